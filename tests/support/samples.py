"""One message of every type, with every field set to something that is not its default."""

import itertools
import types
from collections.abc import Iterator
from typing import Final, Union, cast, get_args, get_origin

import msgspec

from ipc import messages
from ipc.codec import decode

UNIONS: Final[dict[str, object]] = {
    "request": messages.Request,
    "reply": messages.Reply,
    "command": messages.Command,
    "report": messages.Report,
    "order": messages.TemplateOrder,
    "news": messages.TemplateNews,
}


def message_types() -> Iterator[tuple[str, str, object, type[msgspec.Struct]]]:
    """(union's name, tag, union, message type) of every message."""
    for name, union in UNIONS.items():
        for kind in get_args(union) or (union,):
            assert isinstance(kind, type)
            assert issubclass(kind, msgspec.Struct)
            tag = kind.__struct_config__.tag
            assert isinstance(tag, str)
            yield name, tag, union, kind


def decode_as(frame: bytes, union: object) -> msgspec.Struct:
    """`decode` for a union that is a value."""
    return decode(frame, cast("type[msgspec.Struct]", union))


def sample(kind: type[msgspec.Struct]) -> msgspec.Struct:
    """A message of this type; the same one each time."""
    value = _value(kind, "", itertools.count(1))
    assert isinstance(value, kind)
    return value


def _value(kind: object, name: str, numbers: Iterator[int]) -> object:
    number = next(numbers)
    if kind is bool:
        return True
    if kind is int:
        return number * 1000
    if kind is float:
        return number + 0.5
    if kind is str:
        return f"{name}-{number}"
    if kind is bytes:
        return bytes((number + at) % 256 for at in range(16))
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return kind(**{field.name: _value(field.type, field.name, numbers) for field in msgspec.structs.fields(kind)})
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is tuple:
        return tuple(_value(arguments[0], name, numbers) for _ in range(2))
    if origin is dict:
        return {f"{name}-key": _value(arguments[1], name, numbers)}
    if origin in (types.UnionType, Union):
        choices = [choice for choice in arguments if choice is not type(None)]
        return _value(choices[number % len(choices)], name, numbers)
    raise AssertionError(f"no sample for {kind}")
