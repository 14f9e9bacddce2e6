"""The service manager's end of sd_notify, for tests: a real datagram socket."""

import os
import socket
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support.wait import wait_until


class NotifySocket:
    """Keeps every datagram that it was sent, in order, each as its lines.

    `address` is what goes into ``$NOTIFY_SOCKET``: of a file in `folder`, or an abstract one where there is none.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.setblocking(False)
        if folder is None:
            self.address = f"@stratad-test-{os.getpid()}-{id(self)}"
            self._socket.bind(f"\0{self.address[1:]}")
        else:
            self.address = str(folder / "notify")
            self._socket.bind(self.address)
        self.datagrams: list[list[str]] = []

    def fileno(self) -> int:
        """Readable when something came."""
        return self._socket.fileno()

    def read(self) -> list[list[str]]:
        """What came since the last look."""
        new: list[list[str]] = []
        while True:
            try:
                new.append(self._socket.recv(65536).decode().split("\n"))
            except BlockingIOError:
                self.datagrams += new
                return new

    def lines(self) -> list[str]:
        """Every line so far."""
        self.read()
        return [line for datagram in self.datagrams for line in datagram]

    def wait_for(self, start: str, timeout_s: float = 10.0) -> str:
        """The first line of all that starts so."""
        return wait_until(
            lambda: next((line for line in self.lines() if line.startswith(start)), ""), timeout_s, f"a line {start}"
        )

    def wait_for_more(self, line: str, count: int, timeout_s: float = 10.0) -> None:
        """Wait until `line` has come `count` times more than up to now."""
        wanted = self.lines().count(line) + count
        wait_until(lambda: self.lines().count(line) >= wanted, timeout_s, f"{count} more of {line}")

    def close(self) -> None:
        """Nobody listens from now on; idempotent."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
