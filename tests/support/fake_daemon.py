"""A scripted daemon for the client's tests: real sockets and a real lifeline, in a thread, and answers by script."""

import contextlib
import os
import queue
import select
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self, TypeAlias, TypeVar

import msgspec
import zmq

from ipc.codec import decode, encode
from ipc.lifeline import Life, Lifeline, LifelineServer
from ipc.messages import (
    PROTOCOL_VERSION,
    Acknowledge,
    Announce,
    Cancel,
    Capture,
    Captured,
    Clear,
    Copied,
    Done,
    Drop,
    Found,
    Goodbye,
    Hello,
    Images,
    ListImages,
    Lookup,
    Mark,
    Marked,
    MemfdPool,
    Pin,
    Register,
    Registered,
    Release,
    Reply,
    Request,
    Restore,
    Restored,
    SlotDirect,
    SlotDrop,
    SlotFrom,
    SlotTo,
    Stats,
    StatsReply,
    Unregister,
    Welcome,
    WorkerProcess,
)
from stratad.paths import socket_paths
from tests.support.fake_worker import FakeWorker
from tests.support.wait import wait_until

RequestT = TypeVar("RequestT", bound=msgspec.Struct)
Answer: TypeAlias = "Reply | bytes"
Handler: TypeAlias = "Callable[[Request], Iterable[Answer]]"

MAX_MESSAGE_BYTES = 1 << 20


def empty_stats(seq: int) -> StatsReply:
    """A daemon with nothing in it."""
    return StatsReply(seq, "default", os.getpid(), 1.0, "ok", (), (), (), 0, 0, 0, 0, 0, 0, 0, (), {}, {})


def silence(_: Request) -> Iterable[Answer]:
    """A handler that leaves the request unanswered; use `FakeDaemon.say` later."""
    return ()


class FakeDaemon:
    """Accepts clients, records every request, answers as `script` says, or well where it says nothing.

    Attributes:
        script: handlers by request type; called in the daemon's thread.
        requests: everything that came, in order.
        workers: what `Registered` names for stage 0, 1, ... (the last one for all further stages); at first a process
            that ends with this daemon.
        bad_hellos: greetings whose token no lifeline handed out.
        bad_probes: memfds whose bytes were not those of the probe beside them.
        tags: the tags of all memfds that came, in order.
    """

    def __init__(self, run_dir: Path, instance: str, start_id: bytes) -> None:
        self.run_dir = run_dir
        self.start_id = start_id
        self.script: dict[type[msgspec.Struct], Handler] = {}
        self.requests: list[Request] = []
        self.workers: list[WorkerProcess] = []
        self.tags: list[int] = []
        self.bad_hellos = 0
        self.bad_probes = 0
        self._paths = socket_paths(run_dir, instance)
        self._outbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lifelines: list[Lifeline] = []
        self._welcomed: dict[bytes, Lifeline] = {}
        self._last_peer = b""
        self._next_engine_id = 1
        self._next_image_id = 1
        self._stopping = False

    @classmethod
    def start(
        cls,
        run_dir: Path,
        instance: str = "default",
        start_id: bytes = b"1" * 16,
        script: Mapping[type[msgspec.Struct], Handler] | None = None,
    ) -> Self:
        """Bind the sockets and serve in a thread, by `script` from the first request on."""
        daemon = cls(run_dir, instance, start_id)
        daemon.script.update(script or {})
        daemon._worker = FakeWorker.start()
        daemon.workers = [daemon._worker.process]
        daemon._paths.directory.mkdir(parents=True, exist_ok=True)
        daemon._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        daemon._context = zmq.Context()
        daemon._router = daemon._context.socket(zmq.ROUTER)
        daemon._router.setsockopt(zmq.LINGER, 0)
        daemon._paths.client.unlink(missing_ok=True)
        daemon._router.bind(f"ipc://{daemon._paths.client}")
        daemon._life = LifelineServer.listen(daemon._paths.life)
        daemon._thread = threading.Thread(target=daemon._serve, name="fake-daemon", daemon=True)
        daemon._thread.start()
        return daemon

    _wake_fd: int
    _worker: FakeWorker
    _context: "zmq.Context[zmq.Socket[bytes]]"
    _router: "zmq.Socket[bytes]"
    _life: LifelineServer
    _thread: threading.Thread

    # --- for tests, in their own thread ------------------------------------------------------------------------------

    def of(self, kind: type[RequestT]) -> list[RequestT]:
        """All requests of one type so far."""
        return [request for request in list(self.requests) if isinstance(request, kind)]

    def expect(self, kind: type[RequestT], count: int = 1, timeout_s: float = 5.0) -> RequestT:
        """Wait for the `count`-th request of a type."""
        wait_until(lambda: len(self.of(kind)) >= count, timeout_s)
        return self.of(kind)[count - 1]

    def unclaimed(self) -> int:
        """How many memfds came that no request named, over the lifelines that are open."""
        counts: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._do(lambda: counts.put(self._count_stashed()))
        return counts.get(timeout=5.0)

    def say(self, *answers: Answer) -> None:
        """Send answers to the client that spoke last."""
        self._do(lambda: self._send(self._last_peer, answers))

    def hang_up(self) -> None:
        """Close every lifeline, as if this daemon had thrown its clients out."""
        self._do(self._close_lifelines)

    def stop(self) -> None:
        """Die: every socket closes. Idempotent."""
        if self._stopping:
            return
        self._stopping = True
        os.eventfd_write(self._wake_fd, 1)
        self._thread.join(5.0)
        os.close(self._wake_fd)
        self._worker.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _do(self, action: Callable[[], None]) -> None:
        self._outbox.put(action)
        os.eventfd_write(self._wake_fd, 1)

    # --- the daemon's thread -----------------------------------------------------------------------------------------

    def _serve(self) -> None:
        poller = select.poll()
        for descriptor in (self._wake_fd, self._life.fileno(), self._router.fileno()):
            poller.register(descriptor, select.POLLIN)
        while not self._stopping:
            self._turn()
            poller.poll(1000)
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake_fd)
        # A process that dies closes everything at once: the order here must not matter to the client.
        self._close_lifelines()
        self._life.close()
        self._router.close()
        self._context.term()

    def _turn(self) -> None:
        while (lifeline := self._life.accept(self.start_id)) is not None:
            self._lifelines.append(lifeline)
        while not self._outbox.empty():
            self._outbox.get()()
        while self._router.poll(0, zmq.POLLIN):
            peer, *frames = self._router.recv_multipart(zmq.NOBLOCK)
            self._last_peer = peer
            request: Request = decode(frames[0], Request)
            # Taken in before the request is seen by the test: what it asserts about is then all there.
            answers = list(self._answer(peer, request))
            self.requests.append(request)
            self._send(peer, answers)

    def _send(self, peer: bytes, answers: Iterable[Answer]) -> None:
        for answer in answers:
            frame = answer if isinstance(answer, bytes) else encode(answer)
            self._router.send_multipart([peer, frame])

    def _close_lifelines(self) -> None:
        for lifeline in self._lifelines:
            lifeline.close()
        self._lifelines.clear()
        self._welcomed.clear()

    def _answer(self, peer: bytes, request: Request) -> Iterable[Answer]:
        if isinstance(request, Hello):
            owners = [lifeline for lifeline in self._lifelines if lifeline.token == request.token]
            self.bad_hellos += len(owners) != 1
            self._welcomed.update((peer, lifeline) for lifeline in owners)
        if isinstance(request, Register):
            self._check_probe(peer, request)
        handler = self.script.get(type(request), self._by_default)
        return handler(request)

    def _check_probe(self, peer: bytes, request: Register) -> None:
        """Read each pool through its descriptor and compare with the probe, as a worker does."""
        lifeline = self._welcomed[peer]
        assert lifeline.drain() is Life.OPEN
        for stage in request.stages:
            if not isinstance(stage.pool, MemfdPool):
                continue  # nothing but a worker process can open the pool of a GPU
            descriptor = lifeline.take(stage.pool.descriptor)
            self.tags.append(stage.pool.descriptor)
            places = [
                int.from_bytes(stage.probe_offsets[at : at + 8], "little")
                for at in range(0, len(stage.probe_offsets), 8)
            ]
            read = b"".join(os.pread(descriptor, 16, place) for place in places)
            self.bad_probes += read != stage.probe_bytes or not places
            os.close(descriptor)

    def _count_stashed(self) -> int:
        return sum(len(lifeline._stashed) for lifeline in self._lifelines if lifeline.drain() is Life.OPEN)

    def _by_default(self, request: Request) -> Iterable[Answer]:
        match request:
            case Hello(seq=seq):
                yield Welcome(
                    seq,
                    PROTOCOL_VERSION,
                    self.start_id,
                    os.getpid(),
                    "default",
                    "hash",
                    "commit",
                    MAX_MESSAGE_BYTES,
                    256,
                    parallel=True,
                    admin=True,
                )
            case Register(seq=seq, stages=stages):
                yield self.registered(seq, len(stages))
            case Capture(seq=seq, tokens=tokens):
                self._next_image_id += 1
                yield Captured(seq, self._next_image_id - 1, len(tokens) // 4, 1000, 1000, ())
            case Restore(seq=seq, image_id=image_id, tokens=tokens):
                yield Restored(seq, image_id or 1, max(tokens, 1), 1000, ())
            case SlotTo(seq=seq, tokens=tokens):
                yield Captured(seq, 1, tokens, 1000, 1000, ())
            case SlotFrom(seq=seq):
                yield Restored(seq, 1, 1, 1000, ())
            case SlotDirect(seq=seq, tokens=tokens):
                yield Copied(seq, tokens, 1000, ())
            case Mark(seq=seq, conversation=conversation, tokens=tokens) if conversation:
                yield Marked(seq, len(tokens) // 4, 1000, ())
            case Lookup(seq=seq):
                yield Found(seq, "miss")
            case Stats(seq=seq):
                yield empty_stats(seq)
            case ListImages(seq=seq):
                yield Images(seq, (), more=False)
            case (
                SlotDrop()
                | Unregister()
                | Acknowledge()
                | Release()
                | Mark()
                | Announce()
                | Drop()
                | Clear()
                | Pin()
                | Cancel()
                | Goodbye()
            ):
                yield Done(request.seq)
            case _:
                raise AssertionError(f"the fake daemon has no answer to {request}")

    def registered(self, seq: int, stages: int) -> Registered:
        """An answer to `Register` with a new engine id and `workers`."""
        engine_id = self._next_engine_id
        self._next_engine_id += 1
        workers = [self.workers[min(stage, len(self.workers) - 1)] for stage in range(stages)]
        named = tuple(msgspec.structs.replace(worker, stage=stage) for stage, worker in enumerate(workers))
        return Registered(seq, engine_id, named)
