"""The pump: how many threads share one connection and one wait for replies, with no thread of its own.

Theory of operation. Whoever waits for a reply and finds nobody at it becomes the *leader*: it polls the connection,
takes in whatever came and moves every call on, its own and others'. The rest are *followers*; each sleeps on a lock
of its own and is woken when its call has moved far enough, or when the leader is done and it is next. So a single
thread that waits pays for one `poll` and no switch between threads. Coroutines cannot lead; a thread waits in their
name as long as there are any.

The ZeroMQ socket is touched under `lock` only. Its descriptor is edge-triggered: whoever touches the socket drains it
before letting go of the lock, so that a poll which starts later misses nothing.

A lost connection is opened again by the leader. A call that was never sent, or may be repeated, waits for that; all
others end in `Lost`. A call that a stopping daemon turned away was never begun: it waits for the next daemon too.
"""

import contextlib
import math
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from ipc.codec import BadFrame, EncodeError, decode, encode
from ipc.link import LinkError
from ipc.messages import Failed, Progress, Reply, WorkersChanged
from stratad._calls import FINAL, PROGRESS, QUEUED, SENT, SOURCE_FREE, Call, Owner
from stratad._connection import Connection
from stratad.errors import (
    Busy,
    DeadlineExceeded,
    Lost,
    PeerGone,
    ProtocolError,
    StratadError,
    UsageError,
    error_for,
)

if TYPE_CHECKING:
    import asyncio

# One attempt to open a connection holds up the leader (and `close`) no longer than this.
ATTEMPT_S: Final = 2.0
# A daemon that starts accepts within half a second; a few tries in that time, few afterwards.
_FIRST_BACKOFF_S: Final = 0.01
_LAST_BACKOFF_S: Final = 0.25
# A connection that broke sooner than this says that the next one may break too: no haste.
_LIVED_S: Final = 1.0
_END_FOLLOWS_S: Final = 0.02


class _Waiter:
    """A thread that waits for `call` to reach `level`."""

    __slots__ = ("baton", "call", "level", "thread")

    def __init__(self, call: Call, level: int) -> None:
        self.call = call
        self.level = level
        self.thread = threading.get_ident()
        self.baton: threading.Lock | None = None


class Pump:
    """Calls in flight over one connection at a time. Every method may be called by any thread.

    Attributes:
        lock: re-entrant; guards everything here and the state of engines and tickets.
        unknown_replies: replies that belong to no call (late ones, mostly).
        connections: connections opened so far.
    """

    def __init__(
        self,
        opener: Callable[[float], Connection],
        on_open: Callable[[Connection], None],
        on_workers: Callable[[WorkersChanged], bool],
        *,
        wake_fd: int,
        where: str,
    ) -> None:
        """`opener` gets the monotonic time at which it must give up. Under the lock are called: `on_open`, before any
        call is sent on a new connection, and `on_workers`, which returns False where the message cannot be right. The
        pump owns `wake_fd`, a non-blocking eventfd; `where` names the daemon's place in messages.
        """
        self.lock: Final = threading.RLock()
        self.unknown_replies = 0
        self.connections = 0
        self._opener = opener
        self._on_open = on_open
        self._on_workers = on_workers
        self._where = where
        self._wake_fd = wake_fd
        self._wake_poller = select.poll()
        self._wake_poller.register(wake_fd, select.POLLIN)
        self._link: Connection | None = None
        self._pending: dict[int, Call] = {}
        self._last_seq = 0
        self._leader: _Waiter | None = None
        self._followers: deque[_Waiter] = deque()
        self._settled = threading.Condition(self.lock)
        self._draining = False
        self._closed = False
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self._next_try_s = 0.0
        self._backoff_s = _FIRST_BACKOFF_S
        self._last_failure: StratadError | None = None
        self._coroutines = 0
        self._stand_in: Call | None = None
        self._threads: list[threading.Thread] = []

    # --- calls -------------------------------------------------------------------------------------------------------

    def submit(self, call: Call) -> None:
        """Send a call, or queue it where there is no connection. Never waits.

        Raises:
            UsageError: the client is closed.
        """
        with self.lock:
            if self._closed:
                raise UsageError("bad_request", "the client is closed")
            self._last_seq += 1
            call.seq = self._last_seq
            self._pending[call.seq] = call
            link = self._link
            if link is not None and (call.owner is None or call.owner.ready_on(link)):
                self._send(link, call)
                self._drain(link)
            elif self._leader is not None:
                self._wake()

    def wait(self, call: Call, level: int, until_s: float) -> bool:
        """Wait until `call` has reached `level`; False when `until_s` came first."""
        if call.level >= level:
            return True
        waiter = _Waiter(call, level)
        with self.lock:
            if call.level >= level:
                return True
            leading = self._leader is None
            if leading:
                self._leader = waiter
            else:
                waiter.baton = threading.Lock()
                waiter.baton.acquire()
                self._followers.append(waiter)
        if not leading and not self._follow(waiter, until_s):
            return call.level >= level
        try:
            self._lead(call, level, until_s)
        finally:
            self._hand_over()
        return call.level >= level

    def group_call(self, call: Call, stage: int, group: int) -> Call:
        """What to wait for until a group of a layered restore is done, or the restore has ended."""
        with self.lock:
            found = call.groups.get((stage, group))
            if found is None:
                found = call.groups[stage, group] = Call(call.name, None, None, call.until_s)
                found.level = FINAL if call.level == FINAL else QUEUED
            return found

    async def wait_async(self, call: Call, level: int, until_s: float) -> bool:
        """`wait` for coroutines: a thread leads in their name."""
        import asyncio  # noqa: PLC0415 - blocking callers need not pay for it

        loop = asyncio.get_running_loop()
        woken: asyncio.Future[None] = loop.create_future()
        watcher = (level, loop, woken)
        with self.lock:
            if call.level >= level:
                return True
            if call.watchers is None:
                call.watchers = []
            call.watchers.append(watcher)
            self._add_coroutine()
        try:
            async with asyncio.timeout(None if math.isinf(until_s) else max(until_s - time.monotonic(), 0.0)):
                await woken
        except TimeoutError:
            pass
        finally:
            with self.lock:
                if watcher in call.watchers:
                    call.watchers.remove(watcher)
                self._remove_coroutine()
        return call.level >= level

    def poll(self) -> None:
        """Take in what came, without waiting."""
        with self.lock:
            link = self._link
            if link is not None:
                self._drain(link)
                if self._link is link and link.ended():
                    self._lose(link, "the daemon has gone")

    def abandon(self, call: Call, *, keep: bool) -> None:
        """The caller no longer waits. With `keep` the reply is still awaited where the call was sent."""
        with self.lock:
            if call.level == FINAL:
                return
            call.abandoned = True
            if not (keep and call.level > QUEUED):
                # Queued for a second time: what the first daemon's workers do is not known.
                call.lost = call.was_sent
                self._fail(call, self.deadline_error(call))

    def end(self, call: Call, error: StratadError) -> None:
        """End a call that waits to be sent."""
        with self.lock:
            if call.level == QUEUED:
                call.lost = call.was_sent
                self._fail(call, error)

    def deadline_error(self, call: Call) -> DeadlineExceeded:
        """What to raise for a call whose time ran out."""
        if call.level == QUEUED and self._link is None:
            why = f": {self._last_failure.message}" if self._last_failure else ""
            return DeadlineExceeded("deadline", f"{call.name}: no daemon answered at {self._where}{why}")
        if call.level == QUEUED:
            return DeadlineExceeded("deadline", f"{call.name}: the engine could not be registered again in time")
        return DeadlineExceeded("deadline", f"{call.name}: no final reply in time")

    def fail(self, owner: Owner, error: StratadError) -> None:
        """End all queued calls of `owner`."""
        with self.lock:
            for call in [call for call in self._pending.values() if call.owner is owner and call.level == QUEUED]:
                self._fail(call, error)

    def flush(self, owner: Owner | None) -> None:
        """Send all queued calls of `owner` that may go now, in the order in which they were made."""
        with self.lock:
            for call in [call for call in self._pending.values() if call.owner is owner and call.level == QUEUED]:
                link = self._link
                if link is None:
                    return
                if call.build is None:
                    self._finish(call)
                elif call.not_on is link:
                    continue
                elif owner is None or owner.ready_on(link):
                    self._send(link, call)

    def call_at(self, when_s: float, action: Callable[[], None]) -> None:
        """Have the leader call `action` under the lock at the monotonic time `when_s`, or later if nobody waits
        then.
        """
        with self.lock:
            self._timers.append((when_s, action))
            self._wake()

    def has_queued(self, owner: Owner) -> bool:
        """Whether a call of `owner` waits to be sent."""
        with self.lock:
            return any(call.owner is owner and call.level == QUEUED for call in self._pending.values())

    @property
    def last_failure(self) -> StratadError | None:
        """Why the last attempt to open a connection failed; None once one succeeded."""
        return self._last_failure

    @property
    def link(self) -> Connection | None:
        """The connection, if there is one. To be used under the lock."""
        return self._link

    def forget_connection(self) -> None:
        """In a forked child: close our copy of the lifeline, so that the daemon sees the parent's death."""
        if self._link is not None:
            self._link.close_in_child()

    def close(self) -> None:
        """End every call in `Lost`, wait for the threads that still wait, close the connection. Idempotent."""
        with self.lock:
            if self._closed:
                return
            self._closed = True
            for call in list(self._pending.values()):
                call.lost = call.was_sent
                self._fail(call, Lost("lost", f"{call.name}: the client was closed"))
            if self._stand_in is not None:  # the coroutines may never run again
                stand_in, self._stand_in = self._stand_in, None
                self._advance(stand_in, FINAL)
            self._wake()
            quiet = self._settled.wait_for(lambda: self._leader is None and not self._followers, timeout=2 * ATTEMPT_S)
            if self._link is not None:
                self._link.close()
                self._link = None
        for thread in self._threads:
            thread.join(ATTEMPT_S)
        if quiet:  # else a leader still polls it: a leaked descriptor is better than a foreign one
            os.close(self._wake_fd)

    # --- leading and following ---------------------------------------------------------------------------------------

    def _follow(self, waiter: _Waiter, until_s: float) -> bool:
        """Sleep until woken or `until_s`; True: this thread leads now."""
        assert waiter.baton is not None
        timeout_s = min(max(until_s - time.monotonic(), 0.0), threading.TIMEOUT_MAX)
        waiter.baton.acquire(timeout=timeout_s)
        with self.lock:
            if self._leader is waiter:
                return True
            if waiter in self._followers:
                self._followers.remove(waiter)
                self._settled.notify_all()
            return False

    def _lead(self, call: Call, level: int, until_s: float) -> None:
        while call.level < level:
            now_s = time.monotonic()
            if now_s >= until_s:
                self.poll()
                return
            if self._timers:
                self._run_timers(now_s)
            link = self._link
            if link is None:
                self._reopen(until_s)
                continue
            events = link.poller.poll(self._timeout_ms(now_s, until_s))
            with self.lock:
                if self._link is link:
                    self._drain(link)
                for descriptor, _ in events:
                    if descriptor == self._wake_fd:
                        self._take_wake()
                    elif descriptor == link.lifeline_fd and self._link is link and link.ended():
                        self._lose(link, "the daemon has gone")

    def _timeout_ms(self, now_s: float, until_s: float) -> float | None:
        if self._timers:
            until_s = min(until_s, *(when_s for when_s, _ in self._timers))
        # poll() rounds up to whole milliseconds itself.
        return None if math.isinf(until_s) else min(max(until_s - now_s, 0.0) * 1000.0, 86_400_000.0)

    def _run_timers(self, now_s: float) -> None:
        with self.lock:
            due = [action for when_s, action in self._timers if when_s <= now_s]
            self._timers = [timer for timer in self._timers if timer[0] > now_s]
            for action in due:
                action()

    def _hand_over(self) -> None:
        with self.lock:
            self._leader = None
            if self._followers:
                heir = self._followers.popleft()
                assert heir.baton is not None
                self._leader = heir
                heir.baton.release()
            else:
                self._settled.notify_all()

    def _wake(self) -> None:
        if self._leader is not None:
            os.eventfd_write(self._wake_fd, 1)

    def _take_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)

    def _add_coroutine(self) -> None:
        self._coroutines += 1
        if self._stand_in is None:
            stand_in = self._stand_in = Call("stand in for coroutines", None, None, math.inf)
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            thread = threading.Thread(
                target=self.wait, args=(stand_in, FINAL, math.inf), name="stratad-pump", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def _remove_coroutine(self) -> None:
        self._coroutines -= 1
        if self._coroutines == 0 and self._stand_in is not None:
            stand_in, self._stand_in = self._stand_in, None
            self._advance(stand_in, FINAL)

    # --- the connection ----------------------------------------------------------------------------------------------

    def _reopen(self, until_s: float) -> None:
        now_s = time.monotonic()
        if now_s < self._next_try_s:
            pause_s = min(self._next_try_s, until_s) - now_s
            if self._wake_poller.poll(max(pause_s, 0.0) * 1000.0):
                self._take_wake()
            return
        try:
            link = self._opener(min(until_s, now_s + ATTEMPT_S))
        except (Lost, Busy, PeerGone, DeadlineExceeded) as exc:
            self._last_failure = exc
            self._back_off()
            return
        except StratadError as exc:
            with self.lock:
                for call in list(self._pending.values()):
                    self._fail(call, exc)
            return
        with self.lock:
            if self._closed:
                link.close()
                return
            self._link = link
            self.connections += 1
            self._last_failure = None
            link.poller.register(self._wake_fd, select.POLLIN)
            self._on_open(link)
            self.flush(None)
            self._drain(link)

    def _back_off(self) -> None:
        self._next_try_s = time.monotonic() + self._backoff_s
        self._backoff_s = min(self._backoff_s * 1.6, _LAST_BACKOFF_S)

    def _lose(self, link: Connection, why: str) -> None:
        """Close the connection; queue again what may be repeated, end the rest."""
        link.close()
        self._link = None
        if time.monotonic() - link.opened_s > _LIVED_S:
            self._backoff_s = _FIRST_BACKOFF_S
            self._next_try_s = 0.0
        else:
            self._back_off()
        for call in list(self._pending.values()):
            if call.level == QUEUED:
                continue
            # After `source_free` the engine may have written the rows: a repeated capture would read other bytes.
            if call.retry and call.level < SOURCE_FREE and not (call.abandoned or call.unwanted):
                call.level = QUEUED
                call.in_doubt = True
            else:
                call.lost = True
                self._fail(call, Lost("lost", f"{call.name}: {why} before the final reply"))
        self._wake()

    def _send(self, link: Connection, call: Call) -> None:
        try:
            frame = _frame(link, call)
            if not link.send(frame):
                # ZeroMQ may see the end some microseconds before the lifeline tells.
                if link.ended(within_s=_END_FOLLOWS_S):
                    self._lose(link, "the daemon has gone")
                    return
                raise Busy("too_many", f"{call.name}: the send queue to the daemon is full")
        except EncodeError as exc:
            self._fail(call, UsageError("bad_request", f"{call.name}: {exc}"))
        except StratadError as exc:
            self._fail(call, exc)
        except OSError as exc:  # descriptors did not go, or went alone
            self._lose(link, f"the request and its descriptors could not be handed over ({exc.strerror or exc})")
        else:
            call.level = SENT
            call.was_sent = True

    def _drain(self, link: Connection) -> None:
        """Dispatch every frame that is there."""
        if self._draining:  # a reply's callback sends another call
            return
        self._draining = True
        try:
            while self._link is link and (frame := link.receive()) is not None:
                self._dispatch(link, frame)
        except LinkError as exc:
            self._drop(link, -1, f"the daemon broke the wire: {exc}")
        finally:
            self._draining = False

    def _dispatch(self, link: Connection, frame: bytes) -> None:
        try:
            reply: Reply = decode(frame, Reply)
        except BadFrame as exc:
            self._drop(link, exc.seq, f"the daemon sent what is no reply: {exc.message}")
            return
        call = self._pending.get(reply.seq)
        kind = type(reply)
        if call is None:
            if isinstance(reply, WorkersChanged):
                if not self._on_workers(reply):
                    self._drop(link, -1, "the daemon named workers for stages that the engine does not have")
            elif isinstance(reply, Failed) and reply.seq == -1:
                self._drop(link, -1, f"the daemon could not read a request: {reply.message}")
            else:
                self.unknown_replies += 1
        elif kind is call.expected:
            call.reply = reply
            self._finish(call)
        elif isinstance(reply, Failed):
            if reply.code == "stopping" and self._wait_for_next(link, call, reply):
                return
            failed = error_for(
                reply.code, reply.message, stage=reply.stage, stages=reply.stages, detail=dict(reply.detail)
            )
            if call.mend is not None and not call.abandoned and call.mend(failed):
                self._send(link, call)
            else:
                self._fail(call, failed)
        elif isinstance(reply, Progress) and reply.state in PROGRESS:
            self._advance(call, PROGRESS[reply.state])
        elif isinstance(reply, Progress) and reply.state == "group":
            self._advance(self.group_call(call, reply.stage, reply.group), FINAL)
        else:
            self._drop(link, reply.seq, f"the daemon answered {call.name} with {kind.__name__}")

    def _wait_for_next(self, link: Connection, call: Call, failed: Failed) -> bool:
        """Queue a call that a stopping daemon turned away for the next one; False where it did some of it that cannot
        be repeated, or nobody wants it any more.
        """
        if call.abandoned or call.unwanted or call.bound:
            return False
        if not _never_begun(failed) and not (call.retry and call.level < SOURCE_FREE):
            return False
        call.level = QUEUED
        call.not_on = link
        call.was_sent = call.in_doubt
        return True

    def _drop(self, link: Connection, seq: int, why: str) -> None:
        """The peer broke the wire: tell the call concerned (all, where it cannot be known) and let the connection
        go.
        """
        call = self._pending.get(seq)
        for waiting in [call] if call is not None else list(self._pending.values()):
            if waiting.level > QUEUED:
                waiting.lost = True
                self._fail(waiting, ProtocolError("bad_frame", why))
        self._lose(link, "the connection was dropped")

    # --- moving calls on ---------------------------------------------------------------------------------------------

    def _fail(self, call: Call, error: StratadError) -> None:
        call.error = error
        self._finish(call)

    def _finish(self, call: Call) -> None:
        self._pending.pop(call.seq, None)
        call.reached = call.level
        if call.on_final is not None:  # first: a waiter that sees the level must see what follows from it
            call.on_final(call)
        self._advance(call, FINAL)
        for group in call.groups.values():
            self._advance(group, FINAL)

    def _advance(self, call: Call, level: int) -> None:
        if level <= call.level:
            return
        call.level = level
        leader = self._leader
        if (
            leader is not None
            and leader.call is call
            and level >= leader.level
            and leader.thread != threading.get_ident()
        ):
            self._wake()
        if self._followers:
            for waiter in [w for w in self._followers if w.call is call and level >= w.level]:
                assert waiter.baton is not None
                self._followers.remove(waiter)
                waiter.baton.release()
        if call.watchers:
            for watched, loop, woken in call.watchers:
                if level >= watched:
                    _wake_coroutine(loop, woken)


def _never_begun(failed: Failed) -> bool:
    """Whether a failure says of every stage that nothing of it was done."""
    return all(
        outcome.state == "untouched" or (outcome.code == "stopping" and not any(outcome.rows_undefined))
        for outcome in failed.stages
    )


def _frame(link: Connection, call: Call) -> bytes:
    """The frame of a call. Where there is none, nothing that it would have named stays on offer.

    Raises:
        EncodeError, StratadError: it cannot be made.
    """
    assert call.build is not None
    try:
        frame = encode(call.build(link, call.seq))
        if len(frame) > link.max_message_bytes:
            text = f"{call.name}: the message has {len(frame)} bytes, the daemon takes {link.max_message_bytes}"
            raise UsageError("bad_request", text)
    except BaseException:
        link.offered.clear()
        raise
    return frame


def _wake_coroutine(loop: "asyncio.AbstractEventLoop", woken: "asyncio.Future[None]") -> None:
    def resolve() -> None:
        if not woken.done():
            woken.set_result(None)

    with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
        loop.call_soon_threadsafe(resolve)
