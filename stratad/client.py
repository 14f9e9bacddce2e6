"""The client library: what an engine (or a tool) imports to talk to a running stratad.

>>> with Client.connect() as client:
...     pool = CpuPool.allocate(layout.end_bytes)
...     engine = client.register("my-engine", "my-namespace", fingerprint, [StagePool("cpu:0", layout, pool)])
...     image = engine.capture("conversation", tokens, rows=range(len(tokens)), slot=0).result()

Blocking calls use the calling thread alone. Every call has a deadline and ends in a result or in one of
`stratad.errors`. After a restart of the daemon the client connects and registers again by itself, at its next call;
what a stopping daemon turned away waits for the next one.
"""

import contextlib
import math
import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self, TypeVar, cast

import zmq

from ipc.link import ZmqContext
from ipc.messages import (
    FINGERPRINT_REQUIRED,
    Announce,
    Captured,
    Clear,
    Copied,
    Done,
    Drop,
    FaultArm,
    FaultDisarm,
    FaultInfo,
    FaultList,
    Faults,
    Goodbye,
    ImageDetail,
    ImageInfo,
    Images,
    Lift,
    ListImages,
    Marked,
    Memory,
    MemoryReply,
    Pin,
    Registered,
    Request,
    ResetWorker,
    RestartWorker,
    Restored,
    SetTrace,
    Show,
    Stats,
    StatsReply,
    Trace,
    Traced,
    Welcome,
    WorkerOrdered,
    WorkersChanged,
)
from stratad._calls import FINAL, Call
from stratad._connection import Connection
from stratad._engine import Engine, MarkName, Match
from stratad._exchange import EXCHANGE_BYTES, Exchange, allocate_exchange, export_exchange, resolve_device
from stratad._gets import Get, PartNote
from stratad._pump import Pump
from stratad._puts import Put
from stratad._rows import GroupRows
from stratad._stages import StageExport, export_stages
from stratad.errors import DeadlineExceeded, StratadError, UsageError
from stratad.paths import PathError, SocketPaths, find_run_dir, socket_paths
from stratad.pools import CpuPool, StagePool
from stratad.tickets import Ticket

__all__ = [
    "Captured",
    "Client",
    "Copied",
    "CpuPool",
    "Engine",
    "Exchange",
    "Get",
    "GroupRows",
    "ImageDetail",
    "ImageInfo",
    "MarkName",
    "Marked",
    "Match",
    "MemoryReply",
    "PartNote",
    "Put",
    "Restored",
    "StagePool",
    "StatsReply",
    "Ticket",
]

DEFAULT_DEADLINE_S: Final = 30.0
# How long `close` waits for operations in flight to be cancelled, and for the daemon to hear the goodbye.
CLOSE_S: Final = 5.0
_GOODBYE_S: Final = 1.0
_PAGE_IMAGES: Final = 1000

ReplyT = TypeVar("ReplyT")

_clients: "weakref.WeakSet[Client]" = weakref.WeakSet()
# Engines that are gone but whose memory a worker may still use: it must not go back to an allocator yet.
_fenced: list[Engine] = []


class _Sockets:
    """What a client holds of the system: its ZeroMQ context, its latest connection and the eventfd that wakes it.

    Held from outside of the client too: if all of it were garbage together, the context could be finalized before its
    socket is, and would wait for that for ever.
    """

    def __init__(self, context: ZmqContext, wake_fd: int) -> None:
        self.context: Final = context
        self.connection: Connection | None = None
        self._wake_fd: Final = wake_fd
        self._pid: Final = os.getpid()

    def abandon(self) -> None:
        """Close all of it: the client is gone and nobody closed it. In a forked child nothing happens."""
        if os.getpid() != self._pid:
            return
        if self.connection is not None:
            self.connection.close()
        self.context.term()
        os.close(self._wake_fd)


class Client:
    """A connection to the daemon of one instance. Thread-safe; of no use in a forked child.

    Attributes:
        paths: the sockets in use.
        default_deadline_s: deadline of calls that name none.
    """

    def __init__(
        self, paths: SocketPaths, name: str, default_deadline_s: float, context: ZmqContext, wake_fd: int
    ) -> None:
        """See `connect`. Owns `context` and `wake_fd`."""
        self.paths: Final = paths
        self.default_deadline_s: Final = default_deadline_s
        self.pump: Final = Pump(
            self._open, self._opened, self._workers_changed, wake_fd=wake_fd, where=str(paths.directory)
        )
        self._name = name
        self._sockets = _Sockets(context, wake_fd)
        self._abandoned = weakref.finalize(self, self._sockets.abandon)
        self._abandoned.atexit = False
        self._pid = os.getpid()
        self._engines: list[Engine] = []
        self._welcome: Welcome | None = None
        self._asking = False
        self._closed = False

    @classmethod
    def connect(
        cls,
        run_dir: str | os.PathLike[str] | None = None,
        instance: str = "default",
        *,
        deadline_s: float = DEFAULT_DEADLINE_S,
        name: str = "",
    ) -> Self:
        """Connect to the daemon of `instance`, waiting for one up to `deadline_s`, which is also what later calls may
        take.

        `run_dir` None: that of this user's own daemon, else the system's (see `find_run_dir`). `name` shows in the
        daemon's logs.

        Raises:
            DeadlineExceeded: no daemon answered; the text says what to do about it.
            UsageError: no such run directory or instance can be, or the daemon does not serve this user (code
                ``not_permitted``; the text says what would change that).
            ProtocolError: the daemon speaks another version.
        """
        _check_deadline(deadline_s)
        try:
            given = find_run_dir(os.environ, os.getuid(), instance) if run_dir is None else Path(run_dir)
            paths = socket_paths(given.absolute(), instance)
        except PathError as exc:
            raise UsageError("bad_value", str(exc)) from exc
        wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        client = cls(paths, name, deadline_s, zmq.Context(), wake_fd)
        _clients.add(client)
        try:
            call = Call("connect", None, None, client.until_s(None))
            client.pump.submit(call)
            client.wait(call, object)
        except BaseException as exc:
            client.close()
            if isinstance(exc, DeadlineExceeded):
                raise _no_daemon(paths, deadline_s, client.pump.last_failure) from None
            raise
        return client

    # --- engines -----------------------------------------------------------------------------------------------------

    def register(
        self,
        engine: str,
        namespace: str,
        fingerprint: Mapping[str, str],
        stages: Sequence[StagePool],
        *,
        deadline_s: float | None = None,
    ) -> Engine:
        """Register an engine with all its stages, in order. The workers prove by a probe that they see the same memory.

        `fingerprint` names what must match for bytes to mean the same; it needs the keys model, revision, dtype,
        kv_format and engine_build. The memory of the stages must stay as it is until `Engine.unregister`.

        Raises:
            UsageError: a stage that cannot be served (see `stratad._stages.export_stages`), an incomplete fingerprint.
        """
        made, call = self._register_call(engine, namespace, fingerprint, lambda: export_stages(stages), deadline_s)
        try:
            self.wait(call, Registered)
        except BaseException:
            made.release()
            raise
        return made

    def exchange(
        self,
        device: str,
        namespace: str,
        fingerprint: Mapping[str, str],
        exchange_bytes: int = EXCHANGE_BYTES,
        *,
        name: str = "exchange",
        deadline_s: float | None = None,
    ) -> Exchange:
        """Open an exchange: a segment through which images made of named parts are put and got, whatever their memory
        is. `exchange_bytes` bounds what is on its way at once; larger parts stream through it.

        `device` is one of the daemon's: ``cpu:K``, the UUID of a GPU, or a worker's name as `stats` shows it. An image
        lies at the worker it was put through, and only exchanges of that device get it. `fingerprint` as in `register`.

        Raises:
            UsageError: no such device, an incomplete fingerprint, too few bytes.
            NoSpace: the segment cannot be had.
        """
        self.check_process()
        pool = allocate_exchange(exchange_bytes, self.welcome.chunk_tokens)
        try:
            export = export_exchange(resolve_device(device, self.stats), pool, self.welcome.chunk_tokens)
            made, call = self._register_call(name, namespace, fingerprint, lambda: (export,), deadline_s, exchange=True)
            try:
                self.wait(call, Registered)
            except BaseException:
                made.release()
                raise
        except BaseException:
            with contextlib.suppress(StratadError):  # while a worker may have it mapped it stays
                pool.close()
            raise
        return Exchange(self, made, pool)

    async def register_async(
        self,
        engine: str,
        namespace: str,
        fingerprint: Mapping[str, str],
        stages: Sequence[StagePool],
        *,
        deadline_s: float | None = None,
    ) -> Engine:
        """`register` for coroutines."""
        made, call = self._register_call(engine, namespace, fingerprint, lambda: export_stages(stages), deadline_s)
        try:
            await self.wait_async(call, Registered)
        except BaseException:
            made.release()
            raise
        return made

    @property
    def engines(self) -> tuple[Engine, ...]:
        """Engines that are registered."""
        with self.pump.lock:
            return tuple(self._engines)

    # --- images and the daemon ---------------------------------------------------------------------------------------

    def drop(
        self,
        namespace: str,
        conversation: str,
        *,
        force: bool = False,
        image_id: int = 0,
        deadline_s: float | None = None,
    ) -> int:
        """Drop the images of a conversation, one a fingerprint, or only `image_id` of them; returns how many went.

        Raises:
            UsageError: one of them is pinned and there is no `force` (code ``pinned``; none went), or there is none.
        """
        return self.wait(self._drop_call(namespace, conversation, force, image_id, deadline_s), Done).count

    async def drop_async(
        self,
        namespace: str,
        conversation: str,
        *,
        force: bool = False,
        image_id: int = 0,
        deadline_s: float | None = None,
    ) -> int:
        """`drop` for coroutines."""
        call = self._drop_call(namespace, conversation, force, image_id, deadline_s)
        return (await self.wait_async(call, Done)).count

    def clear(self, namespace: str, *, deadline_s: float | None = None) -> int:
        """Drop every image of a namespace that is not pinned; returns how many went."""
        return self.wait(self._clear_call(namespace, deadline_s), Done).count

    async def clear_async(self, namespace: str, *, deadline_s: float | None = None) -> int:
        """`clear` for coroutines."""
        return (await self.wait_async(self._clear_call(namespace, deadline_s), Done)).count

    def pin(
        self,
        namespace: str,
        conversation: str,
        *,
        pinned: bool = True,
        image_id: int = 0,
        deadline_s: float | None = None,
    ) -> None:
        """Pin or unpin the images of a conversation, one a fingerprint, or only `image_id` of them; a pinned one is
        never evicted.
        """
        self.wait(self._pin_call(namespace, conversation, pinned, image_id, deadline_s), Done)

    async def pin_async(
        self,
        namespace: str,
        conversation: str,
        *,
        pinned: bool = True,
        image_id: int = 0,
        deadline_s: float | None = None,
    ) -> None:
        """`pin` for coroutines."""
        await self.wait_async(self._pin_call(namespace, conversation, pinned, image_id, deadline_s), Done)

    def announce(self, namespace: str = "", devices: Sequence[str] = (), *, deadline_s: float | None = None) -> int:
        """Say that an engine is about to allocate memory on `devices` (as the daemon names them: ``cpu:K``, or the UUID
        of a GPU), for `namespace`; back when what dead engines left there is unmapped, and the memory is free. Rescues
        that were still under way there end; returns how many.

        Raises:
            DeadlineExceeded: a worker still had it mapped at the deadline.
        """
        return self.wait(self._announce_call(namespace, devices, deadline_s), Done).count

    async def announce_async(
        self, namespace: str = "", devices: Sequence[str] = (), *, deadline_s: float | None = None
    ) -> int:
        """`announce` for coroutines."""
        return (await self.wait_async(self._announce_call(namespace, devices, deadline_s), Done)).count

    def lift(
        self, namespace: str, conversation: str = "", *, image_id: int = 0, deadline_s: float | None = None
    ) -> int:
        """Lift the quarantine of a conversation's images, or only of `image_id`, and of what engines copy under that
        name; without a conversation of everything in the namespace. Returns how many were quarantined. For admins.
        """
        return self.wait(self._lift_call(namespace, conversation, image_id, deadline_s), Done).count

    async def lift_async(
        self, namespace: str, conversation: str = "", *, image_id: int = 0, deadline_s: float | None = None
    ) -> int:
        """`lift` for coroutines."""
        return (await self.wait_async(self._lift_call(namespace, conversation, image_id, deadline_s), Done)).count

    def restart_worker(self, worker: str, *, deadline_s: float | None = None) -> WorkerOrdered:
        """Kill a worker's process if there is one, and start the next at once. Images stay. For admins.

        Raises:
            UsageError: there is no such worker, or the caller is no admin.
            Busy: it is stuck (code ``worker_unavailable``), or the daemon stops.
        """
        return self.wait(self._restart_call(worker, deadline_s), WorkerOrdered)

    async def restart_worker_async(self, worker: str, *, deadline_s: float | None = None) -> WorkerOrdered:
        """`restart_worker` for coroutines."""
        return await self.wait_async(self._restart_call(worker, deadline_s), WorkerOrdered)

    def reset_worker(self, worker: str, *, force: bool = False, deadline_s: float | None = None) -> WorkerOrdered:
        """Like `restart_worker`, but the next process begins with an empty arena: images that lie there are dropped.

        Raises:
            UsageError: as there; or images lie there and there is no `force` (code ``arena_in_use``; nothing happened).
            Busy: as there.
        """
        return self.wait(self._reset_call(worker, force, deadline_s), WorkerOrdered)

    async def reset_worker_async(
        self, worker: str, *, force: bool = False, deadline_s: float | None = None
    ) -> WorkerOrdered:
        """`reset_worker` for coroutines."""
        return await self.wait_async(self._reset_call(worker, force, deadline_s), WorkerOrdered)

    def stats(self, *, deadline_s: float | None = None) -> StatsReply:
        """State of the daemon at one instant."""
        return self.wait(self._stats_call(deadline_s), StatsReply)

    async def stats_async(self, *, deadline_s: float | None = None) -> StatsReply:
        """`stats` for coroutines."""
        return await self.wait_async(self._stats_call(deadline_s), StatsReply)

    def memory(self, *, history: int = 0, deadline_s: float | None = None) -> MemoryReply:
        """What every process of the daemon has resident and what of it is explained; with up to `history` samples."""
        return self.wait(self._memory_call(history, deadline_s), MemoryReply)

    async def memory_async(self, *, history: int = 0, deadline_s: float | None = None) -> MemoryReply:
        """`memory` for coroutines."""
        return await self.wait_async(self._memory_call(history, deadline_s), MemoryReply)

    def trace(self, *, limit: int = 20, op: str = "", slowest: bool = False, deadline_s: float | None = None) -> Traced:
        """Where the time of the latest operations went, or (`slowest`) of those that took longest; of one kind `op`.

        Raises:
            UsageError: there is no such kind.
        """
        until_s = self.until_s(deadline_s)
        return self.wait(
            Call("trace", lambda _, seq: Trace(seq, limit, op, slowest), Traced, until_s, retry=True), Traced
        )

    def set_trace(self, *, on: bool, deadline_s: float | None = None) -> Traced:
        """Begin to trace operations, with nothing kept yet, or end it. For admins."""
        until_s = self.until_s(deadline_s)
        return self.wait(Call("set_trace", lambda _, seq: SetTrace(seq, on), Traced, until_s), Traced)

    def list_images(self, namespace: str = "", *, deadline_s: float | None = None) -> list[ImageInfo]:
        """All published images of a namespace, or of all that this user may see, in order of their ids."""
        until_s = self.until_s(deadline_s)
        images: list[ImageInfo] = []
        while True:
            page = self.wait(self._list_call(namespace, images, until_s), Images)
            images.extend(page.images)
            if not page.more or not page.images:
                return images

    async def list_images_async(self, namespace: str = "", *, deadline_s: float | None = None) -> list[ImageInfo]:
        """`list_images` for coroutines."""
        until_s = self.until_s(deadline_s)
        images: list[ImageInfo] = []
        while True:
            page = await self.wait_async(self._list_call(namespace, images, until_s), Images)
            images.extend(page.images)
            if not page.more or not page.images:
                return images

    def show(
        self, namespace: str, conversation: str, *, image_id: int = 0, deadline_s: float | None = None
    ) -> ImageDetail:
        """The latest image of a conversation, or its image `image_id`, with its fingerprint and its chunks."""
        return self.wait(self._show_call(namespace, conversation, image_id, deadline_s), ImageDetail)

    async def show_async(
        self, namespace: str, conversation: str, *, image_id: int = 0, deadline_s: float | None = None
    ) -> ImageDetail:
        """`show` for coroutines."""
        return await self.wait_async(self._show_call(namespace, conversation, image_id, deadline_s), ImageDetail)

    # --- ordered faults, for tests -----------------------------------------------------------------------------------

    def arm_fault(
        self, op: str, stage: int, kind: str, *, at: int = 1, engine_id: int = 0, deadline_s: float | None = None
    ) -> FaultInfo:
        """Have copy number `at` from now (1: the next) of operation `op` in stage `stage` fail in the way of `kind`;
        see `ipc.messages.FaultArm`.

        Raises:
            UsageError: no such fault, no one worker that serves the stage, or the daemon does not allow it (code
                ``faults_off``) or not to this user.
            Busy: the worker is not ready.
        """
        until_s = self.until_s(deadline_s)
        call = Call("arm_fault", lambda _, seq: FaultArm(seq, op, stage, kind, at, engine_id), Faults, until_s)
        return self.wait(call, Faults).faults[0]

    def faults(self, *, deadline_s: float | None = None) -> Faults:
        """Armed faults that have not struck, and how often each fault point was passed."""
        until_s = self.until_s(deadline_s)
        return self.wait(Call("faults", lambda _, seq: FaultList(seq), Faults, until_s, retry=True), Faults)

    def disarm_fault(self, fault: int = 0, *, deadline_s: float | None = None) -> int:
        """Take back an armed fault, or all (0); returns how many."""
        until_s = self.until_s(deadline_s)
        return self.wait(Call("disarm_fault", lambda _, seq: FaultDisarm(seq, fault), Done, until_s), Done).count

    @property
    def welcome(self) -> Welcome:
        """What the daemon said about itself at the last handshake."""
        assert self._welcome is not None
        return self._welcome

    def statistics(self) -> dict[str, int]:
        """Counters of this client: connections opened, replies that belonged to no call."""
        return {"connections": self.pump.connections, "unknown_replies": self.pump.unknown_replies}

    # --- the end -----------------------------------------------------------------------------------------------------

    def close(self, deadline_s: float = CLOSE_S) -> None:
        """Cancel operations in flight, wait for their rows and unregister all engines up to `deadline_s`, say goodbye,
        close. Idempotent.

        Memory that workers may still use then stays allocated until they are gone. In a forked child nothing happens.
        """
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        until_s = time.monotonic() + deadline_s
        for engine in self.engines:
            self._settle(engine, until_s)
        if self.pump.link is not None:
            goodbye = Call("goodbye", lambda _, seq: Goodbye(seq), Done, time.monotonic() + _GOODBYE_S)
            self.pump.submit(goodbye)
            self.pump.wait(goodbye, FINAL, goodbye.until_s)
        self.pump.close()
        with self.pump.lock:
            for engine in list(self._engines):
                engine.release()
        _release_fenced()
        self._abandoned.detach()
        self._sockets.context.term()
        _clients.discard(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- for engines and tickets -------------------------------------------------------------------------------------

    def check_process(self) -> None:
        """Refuse calls in a forked child: its sockets are copies of the parent's.

        Raises:
            UsageError: this is not the process that connected.
        """
        if os.getpid() != self._pid:
            raise UsageError(
                "bad_request", f"this client belongs to process {self._pid}: connect again in process {os.getpid()}"
            )

    def until_s(self, deadline_s: float | None) -> float:
        """The monotonic time at which a call made now must end."""
        if deadline_s is None:
            deadline_s = self.default_deadline_s
        else:
            _check_deadline(deadline_s)
        return time.monotonic() + deadline_s

    def wait(self, call: Call, kind: type[ReplyT]) -> ReplyT:
        """Wait for the final reply of a call, submitting it first where that is not done."""
        self._submit(call)
        if not self.pump.wait(call, FINAL, call.until_s):
            raise self._give_up(call)
        return _reply(call, kind)

    async def wait_async(self, call: Call, kind: type[ReplyT]) -> ReplyT:
        """`wait` for coroutines."""
        self._submit(call)
        try:
            if not await self.pump.wait_async(call, FINAL, call.until_s):
                raise self._give_up(call)
        except BaseException:
            self._give_up(call)
            raise
        return _reply(call, kind)

    def remember(self, engine: Engine) -> None:
        """The engine is registered; it will be registered again on every new connection."""
        with self.pump.lock:
            self._engines.append(engine)

    def forget(self, engine: Engine) -> None:
        """The engine is no longer registered."""
        with self.pump.lock:
            if engine in self._engines:
                self._engines.remove(engine)
            if engine.still_fenced():
                _fenced.append(engine)

    def unfence(self, engine: Engine) -> None:
        """None of the engine's memory must stay any longer."""
        with self.pump.lock, contextlib.suppress(ValueError):
            _fenced.remove(engine)

    def ask_about_lost(self) -> None:
        """Where the daemon that lost us lives on, ask it which operations it still has: no process will end to prove
        it.
        """
        with self.pump.lock:
            link = self.pump.link
            if link is None or self._asking:
                return
            start_id = link.welcome.start_id
            if any(engine.unresolved(start_id) for engine in self._engines):
                self._asking = True
                until_s = time.monotonic() + self.default_deadline_s
                self.pump.submit(Call("ask", lambda _, seq: Stats(seq), StatsReply, until_s, on_final=self._told))

    # --- inside ------------------------------------------------------------------------------------------------------

    def _open(self, until_s: float) -> Connection:
        connection = Connection.open(self._sockets.context, self.paths, self._name, until_s)
        self._sockets.connection = connection
        return connection

    def _opened(self, link: Connection) -> None:
        self._welcome = link.welcome
        for engine in self._engines:
            engine.link_opened()
        self.ask_about_lost()

    def _workers_changed(self, news: WorkersChanged) -> bool:
        for engine in self._engines:
            if engine.registration.engine_id == news.engine_id:
                return engine.workers_changed(news.workers)
        return True  # of an engine that was unregistered meanwhile

    def _told(self, call: Call) -> None:
        self._asking = False
        link = self.pump.link
        if isinstance(call.reply, StatsReply) and link is not None:
            in_flight = {op.engine_id for op in call.reply.ops}
            for engine in self._engines:
                engine.disown(link.welcome.start_id, in_flight)

    def _submit(self, call: Call) -> None:
        self.check_process()
        if call.seq == 0:
            self.pump.submit(call)

    def _give_up(self, call: Call) -> DeadlineExceeded:
        error = self.pump.deadline_error(call)
        # The late answer to a registration is still wanted: what it registered must be unregistered.
        self.pump.abandon(call, keep=call.name == "register")
        return error

    def _settle(self, engine: Engine, until_s: float) -> None:
        try:
            tickets = engine.tickets
            for ticket in tickets:
                ticket.cancel()
            for ticket in tickets:
                ticket.wait_rows_free(max(until_s - time.monotonic(), 0.0))
            engine.unregister(deadline_s=max(until_s - time.monotonic(), 0.001))
        except StratadError:
            pass  # the daemon has gone, or is slow: what can be proved is proved later

    def _register_call(
        self,
        engine: str,
        namespace: str,
        fingerprint: Mapping[str, str],
        export: Callable[[], tuple[StageExport, ...]],
        deadline_s: float | None,
        *,
        exchange: bool = False,
    ) -> tuple[Engine, Call]:
        self.check_process()
        missing = [key for key in FINGERPRINT_REQUIRED if not fingerprint.get(key)]
        if missing:
            raise UsageError("fingerprint_missing", f"the fingerprint lacks {', '.join(missing)}")
        _release_fenced()
        made = Engine(self, engine, namespace, fingerprint, export(), exchange=exchange)
        return made, made.registration.first_call(self.until_s(deadline_s))

    def _drop_call(
        self, namespace: str, conversation: str, force: bool, image_id: int, deadline_s: float | None
    ) -> Call:
        until_s = self.until_s(deadline_s)
        return Call("drop", lambda _, seq: Drop(seq, namespace, conversation, force, image_id), Done, until_s)

    def _clear_call(self, namespace: str, deadline_s: float | None) -> Call:
        return Call("clear", lambda _, seq: Clear(seq, namespace), Done, self.until_s(deadline_s))

    def _pin_call(
        self, namespace: str, conversation: str, pinned: bool, image_id: int, deadline_s: float | None
    ) -> Call:
        until_s = self.until_s(deadline_s)
        return Call("pin", lambda _, seq: Pin(seq, namespace, conversation, pinned, image_id), Done, until_s)

    def _announce_call(self, namespace: str, devices: Sequence[str], deadline_s: float | None) -> Call:
        until_s, named = self.until_s(deadline_s), tuple(devices)

        def build(_: Connection, seq: int) -> Request:
            return Announce(seq, namespace, named, call.remaining_s())

        call = Call("announce", build, Done, until_s, retry=True)
        return call

    def _lift_call(self, namespace: str, conversation: str, image_id: int, deadline_s: float | None) -> Call:
        until_s = self.until_s(deadline_s)
        return Call("lift", lambda _, seq: Lift(seq, namespace, conversation, image_id), Done, until_s)

    def _restart_call(self, worker: str, deadline_s: float | None) -> Call:
        until_s = self.until_s(deadline_s)
        return Call("restart_worker", lambda _, seq: RestartWorker(seq, worker), WorkerOrdered, until_s)

    def _reset_call(self, worker: str, force: bool, deadline_s: float | None) -> Call:
        until_s = self.until_s(deadline_s)
        return Call("reset_worker", lambda _, seq: ResetWorker(seq, worker, force), WorkerOrdered, until_s)

    def _stats_call(self, deadline_s: float | None) -> Call:
        return Call("stats", lambda _, seq: Stats(seq), StatsReply, self.until_s(deadline_s), retry=True)

    def _memory_call(self, history: int, deadline_s: float | None) -> Call:
        until_s = self.until_s(deadline_s)
        return Call("memory", lambda _, seq: Memory(seq, history > 0, history), MemoryReply, until_s, retry=True)

    def _list_call(self, namespace: str, seen: Sequence[ImageInfo], until_s: float) -> Call:
        after = seen[-1].image_id if seen else 0
        return Call("list", lambda _, seq: ListImages(seq, namespace, after, _PAGE_IMAGES), Images, until_s, retry=True)

    def _show_call(self, namespace: str, conversation: str, image_id: int, deadline_s: float | None) -> Call:
        until_s = self.until_s(deadline_s)
        return Call(
            "show", lambda _, seq: Show(seq, namespace, conversation, image_id), ImageDetail, until_s, retry=True
        )


def _reply(call: Call, kind: type[ReplyT]) -> ReplyT:
    if call.error is not None:
        raise call.error.with_traceback(None)
    return cast("ReplyT", call.reply)


def _no_daemon(paths: SocketPaths, deadline_s: float, failure: StratadError | None) -> DeadlineExceeded:
    why = f" ({failure.message})" if failure is not None else ""
    return DeadlineExceeded(
        "deadline",
        f"no daemon answered at {paths.directory} within {deadline_s:.3g} s: start one with `stratad`, or name its "
        f"run_dir and instance{why}",
    )


def _check_deadline(deadline_s: float) -> None:
    if not deadline_s > 0 or math.isinf(deadline_s):
        raise UsageError("bad_value", f"a deadline is a number of seconds above 0, got {deadline_s}")


def _release_fenced() -> None:
    for engine in list(_fenced):
        engine.let_go()


def _forget_in_child() -> None:
    for client in list(_clients):
        client.pump.forget_connection()


os.register_at_fork(after_in_child=_forget_in_child)
