"""Whose copies kill workers: which operation a worker's death is held against, and what follows from it.

A death is held against a job where that is certain: the one that reported a lost device, the one that was under way on
the lane that let a deadline pass, or the only one that can have been under way. Where several can, all of them are
suspects from then on: each has the worker to itself until it has ended well once, so that another death tells. The
second death in a row that is held against an image quarantines it; of what has no image yet, the conversation or slot
of the engine that is captured.

Such a death counts towards giving the worker up only if it speaks against the worker as well: its process has done
nothing well before, and the death before it was somebody else's.
"""

from collections.abc import Iterable, Iterator

from stratad.core import journaling
from stratad.core.failures import Refusal
from stratad.core.images import Image, Suspect
from stratad.core.ops import Operation, OpKind
from stratad.core.state import Engine, State, SuspectKey, Worker

DEATHS_TO_QUARANTINE = 2
# Of one engine; each has cost a worker's life, so there are never many.
SUSPECT_LIMIT = 256


def source_key(op: Operation) -> SuspectKey:
    """What an operation without an image copies out of its engine. What is only digested for a mark is apart: that it
    ends well says nothing of a capture, which moves bytes.
    """
    if op.kind is OpKind.MARK:
        return ("mark", op.conversation)
    if op.kind is OpKind.SLOT_TO:
        return ("slot", str(op.slot))
    if op.kind is OpKind.SLOT_DIRECT:
        return ("slot", str(op.source_slot))
    return ("conversation", op.conversation)


def suspect_of(state: State, op: Operation) -> Suspect | None:
    """What is held against what an operation copies, if anything."""
    if op.image is not None:
        return op.image.suspect
    engine = state.engines.get(op.engine_id)
    return engine.suspects.get(source_key(op)) if engine is not None and engine.suspects else None


def _suspect(state: State, op: Operation) -> Suspect | None:
    """Like `suspect_of`, but a new suspect where there is none; None: its engine is gone, and so is the cause."""
    found = suspect_of(state, op)
    if found is not None:
        return found
    if op.image is not None:
        op.image.suspect = Suspect()
        return op.image.suspect
    engine = state.engines.get(op.engine_id)
    if engine is None:
        return None
    while len(engine.suspects) >= SUSPECT_LIMIT:
        del engine.suspects[next(iter(engine.suspects))]
    made = engine.suspects[source_key(op)] = Suspect()
    return made


def refuse_quarantined(state: State, op: Operation) -> None:
    """Refuse an operation on something that is quarantined.

    Raises:
        Refusal: ``quarantined``.
    """
    suspect = suspect_of(state, op)
    if suspect is not None and suspect.quarantined:
        what = f"image {op.image.image_id}" if op.image is not None else " ".join(source_key(op))
        raise Refusal("quarantined", quarantine_text(what))


def quarantine_text(what: str) -> str:
    """Why something is refused."""
    return f"copies of {what} killed workers {DEATHS_TO_QUARANTINE} times in a row: an admin can lift its quarantine"


# --- copies that have a worker to themselves --------------------------------------------------------------------------


def stands_back(state: State, op: Operation, worker: Worker) -> bool:
    """Whether an operation that could start at a worker must wait for what has, or is to have, it to itself."""
    if not state.suspects:
        return False
    own = suspect_of(state, op)
    if own is not None and own.alone:
        return bool(worker.jobs)
    others = [running for running, _ in worker.jobs.values()]
    # One that has missed chunks waits as well, and began before all that has not.
    others += [
        w
        for w in (*state.short.values(), *state.waiting.values())
        if w.op_id < op.op_id and any(r.worker == worker.name for r in w.stages)
    ]
    return any((found := suspect_of(state, other)) is not None and found.alone for other in others)


# --- deaths -----------------------------------------------------------------------------------------------------------


def _candidates(worker: Worker) -> Iterator[Operation]:
    """The operations one of whose jobs can have been under way, on a lane that hung where any did. A lane copies one
    job at a time, but which one only its process could say.
    """
    hung, known = worker.life.hung, worker.life.under_way
    for job, (op, _) in worker.jobs.items():
        if (known is None or job in known) and (not hung or op.reads_rows in hung):
            yield op


def accuse(state: State, worker: Worker, op: Operation) -> None:
    """The worker is about to die of this operation."""
    worker.life.culprit = _suspect(state, op)
    worker.life.culprit_op = op


def settle(state: State, worker: Worker) -> bool:
    """A worker's process is proven gone and its jobs are still known: hold its death against who caused it. Whether it
    also counts against the worker.
    """
    life = worker.life
    if life.culprit is None and not life.excused:
        found = {op.op_id: op for op in _candidates(worker)}
        if len(found) == 1:
            accuse(state, worker, next(iter(found.values())))
        _watch(state, worker, found.values() if len(found) > 1 else ())
    culprit, op = life.culprit, life.culprit_op
    if culprit is None or op is None:
        return True
    counts = not life.did_well and worker.last_culprit is not None and worker.last_culprit is not culprit
    worker.last_culprit, life.culprit_op = culprit, None
    _hold_against(state, worker, culprit, op)
    return counts


def _watch(state: State, worker: Worker, ops: Iterable[Operation]) -> None:
    """Any of these can have been the cause: from now on each has a worker to itself until it has ended well."""
    for op in ops:
        suspect = _suspect(state, op)
        if suspect is not None and not suspect.alone:
            suspect.alone = True
            state.suspects.add(suspect)
            state.log("warning", "suspected of a worker's death", worker=worker.name, **_named(op))


def _hold_against(state: State, worker: Worker, suspect: Suspect, op: Operation) -> None:
    if suspect.last_op == op.op_id:
        return  # one operation counts once, however many of its workers it killed
    suspect.last_op = op.op_id
    suspect.deaths += 1
    state.log("warning", "held against", worker=worker.name, deaths=suspect.deaths, **_named(op))
    if suspect.deaths < DEATHS_TO_QUARANTINE:
        return
    suspect.alone = False
    state.suspects.discard(suspect)
    if op.image is not None:
        state.catalog.quarantine(op.image)
        journaling.record_flags(state, [op.image])
    else:
        suspect.quarantined = True
    state.count("quarantined")
    state.log("error", "quarantined", **_named(op))


def _named(op: Operation) -> dict[str, str | int]:
    """An operation's subject, for the log."""
    if op.image is not None:
        return {"op": op.op_id, "image": op.image.image_id}
    kind, name = source_key(op)
    return {"op": op.op_id, "engine": op.engine_id, kind: name}


def ended_well(state: State, op: Operation) -> None:
    """An operation succeeded: nothing is held against what it copied any more. A quarantine stays: the operation may
    have been under way already when another one's death led to it.
    """
    suspect = suspect_of(state, op)
    if suspect is None or suspect.quarantined:
        return
    state.suspects.discard(suspect)
    if op.image is not None:
        op.image.suspect = None
    else:
        del state.engines[op.engine_id].suspects[source_key(op)]


# --- lifting ----------------------------------------------------------------------------------------------------------


def lift(state: State, namespace: str, images: Iterable[Image], conversation: str, *, sources: bool) -> int:
    """Lift the quarantine of images and, with `sources`, of what engines of the namespace copy as `conversation` ("":
    all that they copy); how many were quarantined.
    """
    served = [image for image in images if state.catalog.lift(image)]
    journaling.record_flags(state, served)
    lifted = len(served)
    for engine in state.engines.values():
        if not sources or engine.namespace != namespace:
            continue
        wanted = {("conversation", conversation), ("mark", conversation)}
        for key in [key for key in engine.suspects if not conversation or key in wanted]:
            lifted += engine.suspects.pop(key).quarantined
    return lifted


def quarantined_sources(engine: Engine) -> tuple[str, ...]:
    """What of an engine's own is refused, for people."""
    return tuple(" ".join(key) for key, suspect in engine.suspects.items() if suspect.quarantined)
