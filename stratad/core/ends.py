"""Ends of operations: what the last stage has left is published, handed over, or given back."""

import msgspec

from ipc.messages import Captured, Copied, Failed, Marked, PartLoaded, PartStored, Restored, StageOutcome
from stratad.core import blame, journaling, marking, trace
from stratad.core.clean_marks import CleanMark, Marking
from stratad.core.failures import Refusal
from stratad.core.images import Image, StoredPiece
from stratad.core.ops import ACTIVE, Operation, OpKind, StageState
from stratad.core.puts import Piece
from stratad.core.state import State


def finish(state: State, op: Operation) -> None:
    """No stage is active or pending any more: publish, hand over, or fail."""
    failed = _cause(op)
    engine = state.engines.get(op.engine_id)
    if failed is not None:
        fail(state, op, failed.code, failed.message, stage=failed.stage)
    elif op.lost is not None:
        fail(state, op, *op.lost)
    elif op.staged is not None and op.staged.damaged:
        fail(state, op, "damaged", "stored chunks that the rows were proven equal to lost their digest meanwhile")
    elif any(run.state is StageState.UNTOUCHED for run in op.stages):
        fail(state, op, "cancelled", "the operation was cancelled")
    elif op.image is not None:
        blame.ended_well(state, op)
        _restored(state, op)
    elif op.marking is not None:
        blame.ended_well(state, op)
        _marked(state, op, op.marking)
    elif op.mark is not None:
        _rescued(state, op, op.mark)
    elif engine is not None and engine.marks.get(op.slot if op.captures else op.source_slot) == "poisoned":
        _disown_written(op)
        fail(state, op, "poisoned", "the slot was marked poisoned while it was read")
    else:
        blame.ended_well(state, op)
        if op.piece is not None:
            _stored(state, op, op.piece)
        elif op.captures:
            _captured(state, op)
        else:
            _copied(state, op)


def _cause(op: Operation) -> StageOutcome | None:
    """How the lowest stage failed that failed by itself: one that is not sent again after another's failure is told to
    be cancelled, which nobody has asked for.
    """
    failed = [run.outcome for run in op.stages if run.outcome is not None and run.outcome.state == "failed"]
    own = failed if op.cancelled else [outcome for outcome in failed if outcome.code != "cancelled"]
    return next(iter(own or failed), None)


def _disown_written(op: Operation) -> None:
    """What was written is of no use: a copy out of a slot whose own bytes are wrong."""
    for run in op.stages:
        written = op.written(run)
        if written is not None and run.outcome is not None:
            run.outcome = msgspec.structs.replace(run.outcome, rows_undefined=written.packed)


def _captured(state: State, op: Operation) -> None:
    """All stages are copied: bind the image, have it recorded, publish it. A transit image ends with the engine and is
    not recorded.
    """
    assert op.staged is not None
    answers = [run.answer for run in op.stages]
    image, new_bytes = state.catalog.bind(op.staged, [a for a in answers if a is not None], state.now_unix_s)
    op.staged = None
    if op.kind is OpKind.SLOT_TO:
        state.catalog.publish(image)
        engine = state.engines[op.engine_id]
        former = engine.transits.pop(op.slot, None)
        if former is not None:
            state.catalog.drop_transit(former)
        engine.transits[op.slot] = image
        image.held_s = state.now_s
        _published(state, op, image, new_bytes)
        return
    journaling.publish(
        state,
        image,
        lambda state: _published(state, op, image, new_bytes),
        lambda state, error: fail(state, op, "journal_unwritable", str(journaling.unwritable(error))),
    )


def _published(state: State, op: Operation, image: Image, new_bytes: int) -> None:
    op.advance("publish")
    if op.mark is not None:
        _note_rescue(state, op, op.mark)
    else:
        state.count(f"{op.kind.value}s")
    state.count("new_bytes", new_bytes)
    image_bytes = sum(run.image_bytes for run in op.stages)
    state.reply(op.client, Captured(op.seq, image.image_id, op.token_count, image_bytes, new_bytes, op.outcomes))
    release(state, op)


def _marked(state: State, op: Operation, made: Marking) -> None:
    """The contents of a slot are digested: they are declared, unless the slot was marked otherwise meanwhile."""
    try:
        marking.declare(state, op, made, [run.answer for run in op.stages if run.answer is not None])
    except Refusal as refusal:
        fail(state, op, refusal.code, refusal.message)
        return
    op.advance("declare")
    state.count(f"{op.kind.value}s")
    digested_bytes = sum(run.job_bytes for run in op.stages)
    state.reply(op.client, Marked(op.seq, op.token_count, digested_bytes, op.outcomes))
    release(state, op)


def _rescued(state: State, op: Operation, mark: CleanMark) -> None:
    """What a dead engine's slot held is copied: publish what of it is as it was declared."""
    try:
        marking.cut(state, op, mark, [run.answer for run in op.stages if run.answer is not None])
    except Refusal as refusal:
        fail(state, op, refusal.code, refusal.message)
        return
    _captured(state, op)


def _note_rescue(state: State, op: Operation, mark: CleanMark) -> None:
    rescue = state.engines[op.engine_id].rescue
    if rescue is not None:
        rescue.images += 1
    state.count("rescued_images")
    state.count("rescued_bytes", sum(span.length_bytes for run in op.stages for span in run.spans))
    state.log(
        "info",
        "slot rescued",
        engine=op.engine_id,
        slot=op.slot,
        tokens=op.token_count,
        declared_tokens=mark.token_count,
    )


def _stored(state: State, op: Operation, piece: Piece) -> None:
    """A piece of a put is copied; it is kept until the put is committed or given up."""
    answer = op.stages[0].answer
    assert op.staged is not None
    assert answer is not None
    if piece.put.ended:
        fail(state, op, "cancelled", "the put was given up while the part was copied")
        return
    piece.stored = StoredPiece(op.staged, answer)
    op.staged = None
    piece.put.used_s = state.now_s
    op.advance("store")
    state.count(f"{op.kind.value}s")
    state.reply(op.client, PartStored(op.seq, op.stages[0].job_bytes, op.outcomes))
    release(state, op)


def _restored(state: State, op: Operation) -> None:
    image = op.image
    assert image is not None
    op.advance("restore")
    if op.kind is OpKind.GET_PART:
        state.count(f"{op.kind.value}s")
        state.reply(op.client, PartLoaded(op.seq, op.stages[0].job_bytes, op.outcomes))
        release(state, op)
        return
    image.restores += 1
    if image.image_id in state.catalog.images:
        state.catalog.touch(image, state.now_unix_s)
    engine = state.engines.get(op.engine_id)
    if op.kind is OpKind.TAKE and engine is not None and not engine.closing:
        engine.takes[image.image_id] = state.now_s  # `taken` stays up until the client acknowledges or is gone
    elif op.kind is OpKind.TAKE:
        image.taken -= 1
    elif op.kind is OpKind.SLOT_FROM and op.keep:
        image.held_s = state.now_s
    elif op.kind is OpKind.SLOT_FROM and engine and engine.transits.get(op.source_slot) is image:
        del engine.transits[op.source_slot]
        state.catalog.drop_transit(image)
    state.count(f"{op.kind.value}s")
    image_bytes = sum(span.length_bytes for run in op.stages for span in run.spans)
    state.reply(op.client, Restored(op.seq, image.image_id, op.token_count, image_bytes, op.outcomes))
    release(state, op)


def _copied(state: State, op: Operation) -> None:
    op.advance("copy")
    state.count(f"{op.kind.value}s")
    copied_bytes = sum(run.job_bytes for run in op.stages)
    state.reply(op.client, Copied(op.seq, op.token_count, copied_bytes, op.outcomes))
    release(state, op)


def fail(state: State, op: Operation, code: str, message: str, *, stage: int = -1) -> None:
    """End an operation without success: extents go back, the caller is told. No stage may still be active."""
    assert not any(run.state in ACTIVE for run in op.stages)
    op.skip_pending()
    op.advance("fail")
    op.code = code
    state.waiting.pop(op.op_id, None)
    if op.staged is not None:
        state.catalog.discard(op.staged)
        op.staged = None
    if op.kind is OpKind.TAKE and op.image is not None:
        op.image.taken -= 1
    if op.piece is not None:
        op.piece.forget()
    state.count(f"{op.kind.value}s_failed")
    state.log("warning", "operation failed", op=op.op_id, kind=op.kind.value, code=code, stage=stage, why=message)
    state.reply(op.client, Failed(op.seq, code, message, stage, op.outcomes, state.settings.start_id))
    release(state, op)


def release(state: State, op: Operation) -> None:
    """Let go of everything an ended operation held. Its reply is among the effects already."""
    if state.trace.on:
        trace.record(state, op)
    for stage in tuple(op.fenced):
        lower_fence(state, op, stage)
    if op.chunks and op.image is not None:
        state.catalog.end_read(op.image, op.chunks)
        op.chunks = ()
    del state.ops[op.op_id]
    state.let_go = True
    state.runs_in_flight -= op.runs_held
    client = state.clients.get(op.client)
    if client is not None:
        client.seqs.pop(op.seq, None)
    engine = state.engines.get(op.engine_id)
    if engine is not None:
        engine.ops -= 1


def lower_fence(state: State, op: Operation, stage: int) -> None:
    """A stage no longer touches its rows."""
    if stage in op.fenced:
        op.fenced.discard(stage)
        state.fences.lower(op.engine_id, stage, op.op_id)
