"""Orders that take their time: pools and shuttles are made on threads of their own, their answers come as letters.

Methods are for the loop's thread unless they say otherwise; `post` leaves a letter for the loop and may be called by
any thread.
"""

import logging
import os
from collections.abc import Callable
from typing import Final, TypeAlias

from ipc.lifeline import Lifeline
from ipc.messages import (
    MakeShuttle,
    MemfdPool,
    OpenPool,
    PoolClosed,
    PoolFailed,
    PoolOpened,
    ShuttleFailed,
    ShuttleReady,
)
from workers.device import Device, PoolRefused
from workers.pool_book import EngineProcess, PoolBook, PoolEntry
from workers.shuttle_maker import ShuttleMaker
from workers.threads import TaskThread

_log: Final = logging.getLogger(__name__)


class PoolMade:
    """Letter: a pool was mapped."""

    __slots__ = ("entry",)

    def __init__(self, entry: PoolEntry) -> None:
        self.entry = entry


PoolLetter: TypeAlias = PoolMade | PoolFailed | PoolClosed


class PoolOrders:
    """Opens and closes pools, in the order of the orders, on `thread`; knows which jobs keep a pool open."""

    def __init__(self, device: Device, lifeline: Lifeline, post: Callable[[PoolLetter], None]) -> None:
        self._device = device
        self._lifeline = lifeline
        self._post = post
        self._pools = PoolBook()
        self.thread = TaskThread("pools", device.bind_thread)

    def find(self, number: int) -> PoolEntry | None:
        """The entry of a pool that may be used."""
        return self._pools.find(number)

    def open(self, order: OpenPool) -> None:
        """Open a pool. A memfd is taken from the lifeline and closed here."""
        descriptor = -1
        if isinstance(order.stage.pool, MemfdPool):
            try:
                descriptor = self._lifeline.fetch(order.stage.pool.descriptor)
            except KeyError:
                self._post(PoolFailed(order.pool, "unshareable", "the pool's descriptor did not come"))
                return

        def task() -> None:
            try:
                pool = self._device.open_pool(order.stage, descriptor)
            except PoolRefused as exc:
                self._post(PoolFailed(order.pool, exc.code, exc.message))
            except Exception as exc:  # noqa: BLE001 - the thread must go on, and the order must get its answer
                _log.exception("pool failed pool=%d", order.pool)
                self._post(PoolFailed(order.pool, "internal", f"{type(exc).__name__}: {exc}"))
            else:
                engine = EngineProcess(order.engine_pid, order.engine_start_ticks)
                self._post(PoolMade(PoolEntry(order.pool, pool, engine, order.engine_id)))
            finally:
                if descriptor >= 0:
                    os.close(descriptor)

        self.thread.put(task)

    def close(self, number: int) -> None:
        """Unmap a pool once no job uses it; one that nobody knows is closed already."""
        entry = self._pools.close(number)
        if entry is None:
            # Perhaps it is being opened: the answer must come after that one's, so it takes the same way.
            self.thread.put(lambda: self._post(PoolClosed(number)))
        elif entry.jobs == 0:
            self._unmap(entry)

    def answer(self, letter: PoolLetter) -> PoolOpened | PoolFailed | PoolClosed | None:
        """What a letter means for the supervisor; None where the order is not carried out yet."""
        if isinstance(letter, PoolMade):
            self._pools.add(letter.entry)
            return PoolOpened(letter.entry.number)
        if isinstance(letter, PoolClosed):
            if self._pools.find(letter.pool) is not None:
                # It was opened while its closing was on the way.
                self.close(letter.pool)
                return None
            self._pools.remove(letter.pool)
        return letter

    def job_ended(self, entry: PoolEntry) -> None:
        """One job less; the last one lets a closing pool go."""
        entry.jobs -= 1
        if entry.closing and entry.jobs == 0:
            self._unmap(entry)

    def _unmap(self, entry: PoolEntry) -> None:
        def task() -> None:
            entry.pool.close()
            self._post(PoolClosed(entry.number))

        self.thread.put(task)

    def close_all(self) -> None:
        """Unmap everything here and now; after `thread` has ended."""
        for entry in self._pools.all():
            entry.pool.close()


class ShuttleOrders:
    """Makes shuttles, one after the other, on `thread`. `stopped` is asked there between steps."""

    def __init__(
        self,
        device: Device,
        post: Callable[[ShuttleReady | ShuttleFailed], None],
        stopped: Callable[[], bool],
        *,
        huge_pages: bool,
    ) -> None:
        self._maker = ShuttleMaker(device, stopped, huge_pages=huge_pages)
        self._post = post
        self.thread = TaskThread("shuttles", device.bind_thread)

    def make(self, order: MakeShuttle) -> None:
        """Make a shuttle; the answer is a letter."""

        def task() -> None:
            try:
                answer = self._maker.make(order)
            except Exception as exc:  # noqa: BLE001 - the thread must go on, and the order must get its answer
                _log.exception("shuttle failed shuttle=%d", order.index)
                text = f"{type(exc).__name__}: {exc}"
                answer = ShuttleFailed(order.index, "internal", text, order.shuttle_bytes, 0)
            self._post(answer)

        self.thread.put(task)

    def close_all(self) -> None:
        """Unmap every shuttle; after `thread` has ended and the device was closed."""
        self._maker.close()
