"""``stratactl fault arm, list, disarm, points``: faults that are ordered, for tests."""

import argparse
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from ipc.messages import FAULT_KINDS, FAULT_OPS, FaultInfo
from stratad.ctl import exit_codes
from stratad.ctl.connection import Connect, DaemonClient, Target, connected
from stratad.ctl.output import Answer, JsonObject, table

_HEAD: Final = ("fault", "op", "stage", "kind", "at copy", "worker")


def add_arguments(parser: argparse.ArgumentParser, add_common: Callable[[argparse.ArgumentParser], None]) -> None:
    """One sub-parser an action; `add_common` gives each the options that every command takes."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)

    def add(name: str, text: str) -> argparse.ArgumentParser:
        action = actions.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            epilog=exit_codes.help_text(),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        add_common(action)
        action.set_defaults(action=name)
        return action

    arm = add("arm", "have one copy of a running daemon fail")
    arm.add_argument("op", choices=FAULT_OPS, metavar="OP", help=", ".join(FAULT_OPS))
    arm.add_argument("--stage", type=int, required=True, metavar="N", help="stage of the engine")
    arm.add_argument("--kind", choices=FAULT_KINDS, required=True, metavar="KIND", help=", ".join(FAULT_KINDS))
    arm.add_argument("--at", type=int, default=1, metavar="K", help="which copy (slice) from now on (default: 1)")
    arm.add_argument("--engine", type=int, default=0, metavar="ID", help="of which engine (default: of all)")
    listing = add("list", "show the armed faults that have not struck")
    listing.add_argument(
        "--passed", action="store_true", help="also the fault points that were passed (--json: always)"
    )
    disarm = add("disarm", "take armed faults back")
    disarm.add_argument("fault", type=int, nargs="?", default=0, metavar="FAULT", help="only this one (default: all)")
    add("points", "every point at which the daemon can be made to die (testing.die_at)")


def run_fault(args: argparse.Namespace, target: Target, connect: Connect) -> Answer:
    """Carry out the chosen action. Raises what it raises."""
    if args.action == "points":
        return _points()
    from stratad.version import package_hash  # noqa: PLC0415 - not needed for the points

    with connected(target, connect, package_hash()) as client:
        match args.action:
            case "arm":
                armed = client.arm_fault(args.op, args.stage, args.kind, at=args.at, engine_id=args.engine)
                return Answer(lines=_fault_table([armed]), data={"fault": msgspec.to_builtins(armed)})
            case "list":
                return _list(client, passed=args.passed)
            case _:
                count = client.disarm_fault(args.fault)
                return Answer(lines=[f"disarmed {count}"], data={"disarmed": count})


def _points() -> Answer:
    from stratad.fault_points import point_names  # noqa: PLC0415 - loads the core, which no other action needs

    names = point_names()
    return Answer(lines=list(names), data={"points": list(names)})


def _list(client: DaemonClient, *, passed: bool) -> Answer:
    found = client.faults()
    data: JsonObject = {"faults": [msgspec.to_builtins(info) for info in found.faults], "points": dict(found.points)}
    lines = _fault_table(found.faults) if found.faults else ["no fault is armed"]
    if passed and found.points:
        counts = sorted(found.points.items())
        lines += ["", *table(("fault point", "passed"), ((name, str(count)) for name, count in counts))]
    return Answer(lines=lines, data=data)


def _fault_table(faults: Sequence[FaultInfo]) -> list[str]:
    return table(_HEAD, ([str(value) for value in msgspec.structs.astuple(info)] for info in faults))
