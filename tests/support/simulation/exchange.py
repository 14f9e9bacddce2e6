"""What a client does with an exchange: puts images part by part, and gets them again."""

from typing import TYPE_CHECKING

from ipc.messages import (
    EXCHANGE_ROW_BYTES,
    GetBegin,
    GetEnd,
    GetPart,
    PutAbort,
    PutBegin,
    PutCommit,
    PutPart,
    Request,
)
from shm.rows import pack_numbers, pack_rows
from tests.support.simulation.content import part_content
from tests.support.simulation.engine import CONVERSATIONS, Pending, SimEngine, Slot, tokens_of

if TYPE_CHECKING:
    from tests.support.simulation.client import SimClient


def act(client: "SimClient", engine: SimEngine) -> bool:
    """Do one thing. False: it could not think of any."""
    area = engine.slots[0 if client.rng.random() < 0.55 else 1]
    put = engine.put
    if area.number == 0 and area.busy and put is not None and put.put_id and put.parts and client.rng.random() < 0.1:
        return _ask(client, PutCommit(client.next_seq(), engine.engine_id, put.put_id), engine, area)  # too early
    if area.busy or area.held_by:
        return False
    return _put(client, engine, area) if area.number == 0 else _get(client, engine, area)


def _put(client: "SimClient", engine: SimEngine, area: Slot) -> bool:
    put, seq = engine.put, client.next_seq()
    if put is None:
        name = _put_name(client)
        tokens = tokens_of(name, 6) if client.rng.random() < 0.5 else []
        return _ask(client, PutBegin(seq, engine.engine_id, name, pack_numbers(tokens)), engine, area)
    if put.put_id == 0:
        return False
    if put.sent == put.rows and put.stored == put.rows and (put.parts > 2 or (put.parts and client.rng.random() < 0.7)):
        end = PutAbort if client.rng.random() < 0.15 else PutCommit
        return _ask(client, end(seq, engine.engine_id, put.put_id), engine, area)
    if put.sent == put.rows:
        put.parts += 1
        put.name, put.version = f"part{put.parts}", client.rng.randrange(1, 5)
        put.rows, put.sent, put.stored = client.rng.choice((2, 4, 6, 9)), 0, 0
    count = min(put.rows - put.sent, client.rng.choice((4, 12)))
    first = area.first_row
    content = part_content(put.version, put.rows)[put.sent : put.sent + count]
    engine.pools[0].rows[0][first : first + count] = content
    request = PutPart(
        seq,
        engine.engine_id,
        put.put_id,
        put.name,
        put.rows * EXCHANGE_ROW_BYTES - 100,
        pack_rows([(first, count)]),
        f"{put.version} {put.rows}",
        put.sent,
        client.deadline_s(),
    )
    put.sent += count
    return _ask(client, request, engine, area)


def _get(client: "SimClient", engine: SimEngine, area: Slot) -> bool:
    seq = client.next_seq()
    if engine.get is None:
        if not client.put_names:
            return False
        return _ask(client, GetBegin(seq, engine.engine_id, _put_name(client)), engine, area)
    number, parts = engine.get
    if client.rng.random() < 0.2:
        engine.get = None
        return _ask(client, GetEnd(seq, engine.engine_id, number), engine, area)
    which = client.rng.randrange(len(parts))
    rows = pack_rows([(area.first_row, parts[which][2])])
    request = GetPart(seq, engine.engine_id, number, which, rows, 0, client.deadline_s())
    pending = Pending(request, engine, (area,), area, engine.snapshot(area))
    pending.tokens = [parts[which][1], parts[which][2]]
    client.send(request, pending)
    return True


def _put_name(client: "SimClient") -> str:
    if client.put_names and client.rng.random() < 0.5:
        return client.rng.choice(sorted(client.put_names))
    return client.rng.choice("xyz" if client.rng.random() < 0.9 else CONVERSATIONS)


def _ask(client: "SimClient", request: Request, engine: SimEngine, area: Slot) -> bool:
    client.send(request, Pending(request, engine, (area,)))
    return True
