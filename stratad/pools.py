"""Pools: the memory of an engine that holds K/V, as an engine hands it to `stratad.client.Client.register`."""

import math
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Final, Protocol, Self, cast, overload

from shm.layout import StageLayout
from shm.memfd import PoolError, create_pool
from stratad.errors import NoSpace, StratadError, UsageError

if TYPE_CHECKING:
    import numpy as np
    import torch


class Hold(Protocol):
    """Somebody who may still need a pool."""

    def reason(self) -> StratadError | None:
        """Why the pool must not be closed now, or None."""
        ...


class CpuPool:
    """Memory for a stage on a `cpu` device: a memfd sealed against a change of size, mapped here and by the worker.

    Owns its descriptor and its mapping. The bytes begin as zeros.
    """

    def __init__(self, descriptor: int, mapping: mmap.mmap) -> None:
        self.nbytes: Final = len(mapping)
        self._descriptor = descriptor
        self._mapping: mmap.mmap | None = mapping
        self._buffer: memoryview | None = memoryview(mapping)
        self._holds: list[Hold] = []

    @classmethod
    def allocate(cls, nbytes: int, name: str = "stratad-pool") -> Self:
        """Reserve and map `nbytes` bytes. `name` shows in /proc only.

        Raises:
            UsageError: `nbytes` is not positive.
            NoSpace: the memory cannot be had.
        """
        if nbytes <= 0:
            raise UsageError("bad_value", f"a pool needs at least one byte, got {nbytes}")
        try:
            descriptor = create_pool(name, nbytes)
        except PoolError as exc:
            raise NoSpace("no_space", str(exc)) from exc
        try:
            return cls(descriptor, mmap.mmap(descriptor, nbytes))
        except OSError as exc:
            os.close(descriptor)
            raise NoSpace("no_space", f"a pool of {nbytes} bytes cannot be mapped: {exc.strerror}") from exc

    @property
    def buffer(self) -> memoryview:
        """All bytes of the pool, writable.

        Raises:
            UsageError: the pool is closed.
        """
        if self._buffer is None:
            raise UsageError("bad_value", "the pool is closed")
        return self._buffer

    @property
    def descriptor(self) -> int:
        """The memfd; it stays the pool's.

        Raises:
            UsageError: the pool is closed.
        """
        if self._buffer is None:
            raise UsageError("bad_value", "the pool is closed")
        return self._descriptor

    @overload
    def tensor(self, dtype: "torch.dtype", shape: Sequence[int], offset_bytes: int = 0) -> "torch.Tensor": ...

    @overload
    def tensor(
        self, dtype: "str | np.dtype | type[np.generic]", shape: Sequence[int], offset_bytes: int = 0
    ) -> "np.ndarray": ...

    def tensor(
        self, dtype: "torch.dtype | str | np.dtype | type[np.generic]", shape: Sequence[int], offset_bytes: int = 0
    ) -> "torch.Tensor | np.ndarray":
        """A view of the pool: a torch tensor for a torch dtype, else a numpy array. It shares the pool's bytes.

        Raises:
            UsageError: the view does not fit.
        """
        if self._mapping is None:
            raise UsageError("bad_value", "the pool is closed")
        count = math.prod(shape)
        try:
            if type(dtype).__module__.partition(".")[0] == "torch":
                import torch  # noqa: PLC0415 - the caller has imported it already

                flat = torch.frombuffer(
                    self._mapping, dtype=cast("torch.dtype", dtype), count=count, offset=offset_bytes
                )
                return flat.view(tuple(shape))
            import numpy as np  # noqa: PLC0415 - only callers who want an array pay for it

            array = np.frombuffer(self._mapping, dtype=cast("np.dtype", dtype), count=count, offset=offset_bytes)
            return array.reshape(tuple(shape))
        except (ValueError, RuntimeError) as exc:
            raise UsageError(
                "bad_value", f"{dtype} of shape {tuple(shape)} at byte {offset_bytes} of {self.nbytes}: {exc}"
            ) from exc

    def hold(self, hold: Hold) -> None:
        """Have `close` ask `hold` first."""
        self._holds.append(hold)

    def release(self, hold: Hold) -> None:
        """Undo `hold`."""
        if hold in self._holds:
            self._holds.remove(hold)

    def close(self) -> None:
        """Give the memory back; views made by `tensor` keep it alive for themselves. Idempotent.

        Raises:
            UsageError: an engine is registered with the pool.
            Busy: a worker may still write rows of it (code ``rows_busy``).
        """
        if self._buffer is None:
            return
        for hold in list(self._holds):
            reason = hold.reason()
            if reason is not None:
                raise reason
        self._holds.clear()
        # The mapping goes with its last reference and is never closed by hand: torch.frombuffer holds a reference, but
        # no buffer export, so `mmap.close` would succeed and leave its tensors on unmapped pages.
        self._buffer = None
        self._mapping = None
        os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True)
class StagePool:
    """One stage as an engine registers it.

    `memory` is a `CpuPool`, or a contiguous torch tensor on a GPU whose bytes are taken as they are, whatever its
    element type. `device` is ``cpu:K`` for a `CpuPool`; for a tensor it names the tensor's own device (``cuda:K`` as
    this process counts, or the UUID of the GPU). Offsets of the layout count from the first byte of `memory`.
    """

    device: str
    layout: StageLayout
    memory: "CpuPool | torch.Tensor"
