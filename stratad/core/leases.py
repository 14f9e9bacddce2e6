"""Leases: what an engine holds between two of its calls, and when that is given up for it.

An engine may take its time between two calls, and nobody asks it for signs of life. But open puts, open gets, transit
images and takes that are not acknowledged keep space, or an image, from everybody else. So a lease that was not used
for `lease_s` seconds ends when another client needs what it holds, the longest unused first, and no sooner.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

from stratad.core.failures import Refusal
from stratad.core.ops import OpKind
from stratad.core.puts import Get, Put
from stratad.core.state import Engine, State

T = TypeVar("T")


class Lease(NamedTuple):
    """What an engine holds: a ``put``, a ``get``, the ``transit`` image of a slot, the image of a ``take``."""

    used_s: float
    engine: Engine
    kind: str
    number: int


def leases(engine: Engine) -> Iterator[Lease]:
    """Everything that an engine holds."""
    for put in engine.puts.values():
        yield Lease(put.used_s, engine, "put", put.put_id)
    for get in engine.gets.values():
        yield Lease(get.used_s, engine, "get", get.get_id)
    for slot, image in engine.transits.items():
        yield Lease(image.held_s, engine, "transit", slot)
    for image_id, since_s in engine.takes.items():
        yield Lease(since_s, engine, "take", image_id)


def with_room(state: State, client: int, reserve: Callable[[], T]) -> T:
    """What `reserve` returns, which is tried anew for as long as it finds no room and a lease can be given up for it.

    Raises:
        Refusal: what `reserve` says; ``no_space`` where that lack remains.
    """
    while True:
        try:
            return reserve()
        except Refusal as refusal:
            if refusal.code != "no_space" or not _give_up_oldest(state, client):
                raise


def _give_up_oldest(state: State, client: int) -> bool:
    """End the lease that was unused longest, for the sake of `client`; False where none may be ended.

    Its own leases are the client's business, and what an operation in flight belongs to is in use.
    """
    due_s = state.now_s - state.settings.lease_s
    idle = [
        lease
        for engine in state.engines.values()
        if engine.client != client and not engine.closing
        for lease in leases(engine)
        if lease.used_s <= due_s and not _in_use(state, lease)
    ]
    if not idle:
        return False
    _give_up(state, min(idle, key=lambda lease: lease.used_s))
    return True


def give_up_take(state: State, client: int, image_id: int) -> bool:
    """End another client's unused hold on an image that it has taken and not acknowledged."""
    for engine in state.engines.values():
        since_s = engine.takes.get(image_id)
        if since_s is not None and engine.client != client and since_s <= state.now_s - state.settings.lease_s:
            _give_up(state, Lease(since_s, engine, "take", image_id))
            return True
    return False


def why_gone(state: State) -> str:
    """What may have become of a lease that is not there, for a refusal's text."""
    return f"what is not used for {state.settings.lease_s:g} s ends when another client needs its space"


def _in_use(state: State, lease: Lease) -> bool:
    """Whether an operation in flight belongs to a lease."""
    engine = lease.engine
    if not engine.ops:
        return False
    mine = [op for op in state.ops.values() if op.engine_id == engine.engine_id]
    match lease.kind:
        case "put":
            return any(op.piece is not None and op.piece.put.put_id == lease.number for op in mine)
        case "get":
            image = engine.gets[lease.number].image
            return any(op.kind is OpKind.GET_PART and op.image is image for op in mine)
        case "transit":
            image = engine.transits[lease.number]
            return any(op.image is image for op in mine)
        case _:
            return False


def _give_up(state: State, lease: Lease) -> None:
    engine = lease.engine
    match lease.kind:
        case "put":
            end_put(state, engine, engine.puts[lease.number])
        case "get":
            end_get(state, engine, engine.gets[lease.number])
        case "transit":
            state.catalog.drop_transit(engine.transits.pop(lease.number))
        case _:
            end_take(state, engine, lease.number)
    state.count("leases_given_up")
    state.log(
        "warning",
        "lease given up: it was not used, and another client needs what it holds",
        engine=engine.engine_id,
        kind=lease.kind,
        number=lease.number,
        unused_s=round(state.now_s - lease.used_s, 3),
    )


def end_put(state: State, engine: Engine, put: Put) -> None:
    """Forget a put: what was stored is freed now; what is being copied when its operation ends."""
    put.ended = True
    del engine.puts[put.put_id]
    for piece in put.pieces():
        if piece.stored is not None:
            state.catalog.discard(piece.stored.staged)
    state.catalog.end_put(put.draft)
    state.count("puts_ended")


def end_get(state: State, engine: Engine, get: Get) -> None:
    """Let go of an image; what is being copied out of it holds its own chunks."""
    del engine.gets[get.get_id]
    state.catalog.end_read(get.image, get.chunks)


def end_take(state: State, engine: Engine, image_id: int) -> None:
    """An engine no longer holds an image that it has taken."""
    del engine.takes[image_id]
    image = state.catalog.images.get(image_id)
    if image is not None:
        image.taken -= 1
