"""``stratactl trace``: where the time of the latest operations went, step by step."""

import argparse
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Final

import msgspec

from ipc.messages import Traced, TracedOp, TracedStage, TraceKind
from stratad.ctl import values
from stratad.ctl.connection import DaemonClient
from stratad.ctl.output import Answer, Json, JsonObject, human_bytes, table

# As `TracedStage` has them, in the order in which they happen.
STEPS: Final = ("queue", "way", "event", "turn", "digest", "gather", "link", "verify", "rest", "publish")
PERCENTILES: Final = ("p50", "p90", "p99", "most")
_MS: Final = 1000.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this command."""
    parser.add_argument(
        "switch", nargs="?", choices=("on", "off"), metavar="on|off", help="begin anew, or end it (admins)"
    )
    parser.add_argument(
        "--last", type=values.operations, default=20, metavar="N", help="how many operations to list (default: 20)"
    )
    parser.add_argument("--slowest", action="store_true", help="those that took longest, in place of the latest")
    parser.add_argument("--op", default="", metavar="KIND", help="only of this kind: capture, restore, take, ...")


def trace(client: DaemonClient, switch: str | None, *, last: int, slowest: bool, op: str) -> Answer:
    """Switch it, or tell what it holds. Raises what the client raises."""
    if switch is not None:
        return describe(client.set_trace(on=switch == "on"))
    return describe(client.trace(limit=last, op=op, slowest=slowest))


def describe(reply: Traced) -> Answer:
    """The answer for one `Traced`."""
    lines = [_head(reply)]
    if reply.kinds:
        lines += ["", "milliseconds; of an operation's stages that which was done last", *_kinds(reply)]
    if reply.ops:
        lines += ["", "milliseconds; the steps of a stage add up to the total", *_ops(reply)]
    data: JsonObject = {
        "on": reply.on,
        "since_unix_s": reply.since_unix_s,
        "kept": reply.kept,
        "forgotten": reply.forgotten,
        "held_bytes": reply.held_bytes,
        "bound_bytes": reply.bound_bytes,
        "kinds": [_plain(kind) for kind in reply.kinds],
        "ops": [{**_plain(op), "stages": [_plain(stage) for stage in op.stages]} for op in reply.ops],
    }
    return Answer(lines=lines, data=data)


def _plain(value: TracedOp | TracedStage | TraceKind) -> JsonObject:
    """Every field, also one that the wire leaves out since it has its default."""
    plain: dict[str, Json] = msgspec.structs.asdict(value)
    return plain


def _head(reply: Traced) -> str:
    since = f" since {_time(reply.since_unix_s)} UTC" if reply.on else ""
    hint = "" if reply.on else " (`stratactl trace on` begins anew)"
    return (
        f"trace {'on' if reply.on else 'off'}{since}{hint}: {reply.kept} operations kept, "
        f"{human_bytes(reply.held_bytes)} of at most {human_bytes(reply.bound_bytes)}; {reply.forgotten} forgotten"
    )


def _kinds(reply: Traced) -> list[str]:
    head = ("kind", "well", "failed", "moved", "digested", "of", "total", *STEPS, "journal")
    return table(head, (row for kind in reply.kinds for row in _kind_rows(kind)))


def _kind_rows(kind: TraceKind) -> Iterator[list[str]]:
    first = [kind.kind, str(kind.count), str(kind.failed), human_bytes(kind.moved_bytes)]
    first.append(human_bytes(kind.digested_bytes))
    if not kind.times:
        yield [*first, *("-" for _ in range(len(STEPS) + 3))]
    for number, name in enumerate(PERCENTILES if kind.times else ()):
        yield [*first, name, *(_ms(kind.times[step][number]) for step in ("total", *STEPS, "journal"))]


def _ops(reply: Traced) -> list[str]:
    head = ("time (UTC)", "op", "kind", "conversation", "engine", "stage", "worker", "asked", "moved", "digested")
    return table((*head, *STEPS, "total", "code"), (_cells(op, stage) for op in reply.ops for stage in op.stages))


def _cells(op: TracedOp, stage: TracedStage) -> list[str]:
    return [
        _time(op.began_unix_s),
        str(op.op_id),
        op.kind,
        op.conversation or "-",
        str(op.engine_id),
        str(stage.stage),
        stage.worker,
        *map(human_bytes, (stage.asked_bytes, stage.moved_bytes, stage.digested_bytes)),
        *(_ms(getattr(stage, f"{step}_s")) for step in STEPS),
        _ms(op.total_s),
        stage.code or (f"({op.code})" if op.code else "-"),
    ]


def _ms(seconds: float) -> str:
    return f"{seconds * _MS:.3f}"


def _time(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat(sep=" ", timespec="milliseconds").removesuffix("+00:00")
