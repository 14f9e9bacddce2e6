"""What a version of the protocol promises: the messages of clients and their fields, in words.

``python -m tests.support.schema`` writes down those of a version that has no file yet. A file is never written anew:
what it says holds for as long as the version does (see the rules of change in `ipc.messages`).
"""

import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Union, get_args, get_origin, get_type_hints

import msgspec

from ipc.messages import PROTOCOL_VERSION, Message
from tests.support.samples import message_types

FOLDER: Final = Path(__file__).parents[1] / "unit/ipc/schema"


def schema_path() -> Path:
    """The file of this version."""
    return FOLDER / f"version-{PROTOCOL_VERSION}.txt"


def type_name(kind: object) -> str:
    """A type as WIRE.md calls it."""
    if isinstance(kind, type):
        return "bin" if kind is bytes else kind.__name__
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is tuple:
        return f"[{type_name(arguments[0])}]"
    if origin is dict:
        return f"{{{type_name(arguments[0])}: {type_name(arguments[1])}}}"
    assert origin in (types.UnionType, Union), kind
    return " or ".join(map(type_name, arguments))


def schema() -> dict[str, str]:
    """``request.capture.tokens`` -> ``bin required``, for each field of each message, and of each value in one. Of a
    value that travels as an array the place of the field stands before its name.
    """
    found: dict[str, str] = {}
    seen: set[object] = set()

    def visit(kind: object, name: str = "") -> None:
        if kind in seen:
            return
        seen.add(kind)
        for argument in get_args(kind):
            visit(argument)
        if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
            return
        hints = get_type_hints(kind)
        path = name if issubclass(kind, Message) else kind.__name__
        found[path] = "array" if kind.__struct_config__.array_like else "map"
        for place, field in enumerate(msgspec.structs.fields(kind)):
            shown = f"{place}:{field.name}" if kind.__struct_config__.array_like else field.name
            need = "required" if field.required else "default"
            found[f"{path}.{shown}"] = f"{type_name(hints[field.name])} {need}"
            visit(hints[field.name])

    for union, tag, _, kind in message_types():
        if union in ("request", "reply"):
            visit(kind, f"{union}.{tag}")
    return found


def read_schema() -> dict[str, str]:
    """What was promised for this version."""
    lines = schema_path().read_text(encoding="ascii").splitlines()
    return dict(line.split(" ", 1) for line in lines)


def broken_promises(promised: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Where the messages of now are not what was promised; each needs another version."""
    broken = [
        f"{name}: was {was}, is {now.get(name, 'gone')}" for name, was in promised.items() if now.get(name) != was
    ]
    for name, what in now.items():
        owner = name.rpartition(".")[0]
        if name not in promised and owner in promised and what.endswith(" required"):
            broken.append(f"{name}: new, and without a default")
    return broken


def main() -> int:
    """Write what is missing."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    if not schema_path().exists():
        schema_path().write_text("".join(f"{name} {what}\n" for name, what in schema().items()), encoding="ascii")
    return 0


if __name__ == "__main__":
    sys.exit(main())
