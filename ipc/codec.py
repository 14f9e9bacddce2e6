"""One frame is one message: a msgpack map whose key ``t`` names the type, checked against a closed union.

What a peer sends can be anything, so every way in which reading can fail ends in `BadFrame`, and what a frame may cost
is bounded while it is built: its strings, arrays and maps by msgpack's own limits, and in a frame above
`SMALL_FRAME_BYTES` also their sum (one byte of an empty map becomes 64 bytes of Python object).
"""

import functools
from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Final, NoReturn, TypeAlias, TypeVar, cast, get_args

import msgpack
import msgspec

if TYPE_CHECKING:
    from typing_extensions import TypeForm

T = TypeVar("T")

# Long strings have no place on the wire: the longest are error texts and names. Bulk data travels as binary.
MAX_STR_BYTES: Final = 64 * 1024
# The socket's own limit is lower as a rule; this one holds where a frame comes from elsewhere.
MAX_BIN_BYTES: Final = 1024 * 1024 * 1024
# The longest legal array is the chunk list of one image: 32,768 chunks are 1M tokens on eight stages.
MAX_ARRAY_ITEMS: Final = 128 * 1024
MAX_MAP_ITEMS: Final = 1024
# Below this size the worst frame (all empty maps) becomes 5 MB of objects and is not worth counting.
SMALL_FRAME_BYTES: Final = 64 * 1024
MAX_ITEMS: Final = 2 * 1024 * 1024
_TEXT_CHARS: Final = 300
_encode: Final = msgspec.msgpack.Encoder().encode
_own_decoders: Final[dict[int, tuple[msgspec.msgpack.Decoder[object], object]]] = {}
_I64: Final = 2**63


class BadFrame(Exception):
    """A frame that is no message of the union.

    Attributes:
        code: ``bad_frame`` (no msgpack map, or one beyond the limits), ``unknown_op`` (its type is not in the union) or
            ``bad_request`` (a known type whose fields do not fit).
        message: what was wrong and, for ``bad_request``, where.
        seq: the frame's `seq` where it could be read, else -1.
    """

    def __init__(self, code: str, message: str, seq: int = -1) -> None:
        super().__init__(f"{message} [{code}]")
        self.code = code
        self.message = message
        self.seq = seq


class EncodeError(ValueError):
    """A message of ours that cannot be put into a frame: an integer over 64 bits, text that is no Unicode, ..."""


def encode(message: msgspec.Struct) -> bytes:
    """The frame of one message.

    Raises:
        EncodeError: a value does not fit the wire.
    """
    try:
        return _encode(message)
    except (TypeError, ValueError, OverflowError, RecursionError) as exc:
        raise EncodeError(f"{type(message).__name__} cannot be encoded: {exc}") from exc


def decode_own(frame: bytes, union: "TypeForm[T]") -> T:
    """`decode` for what our own processes say to each other: in one step, at a fraction of the price. What a frame may
    cost to read is not bounded here.

    Raises:
        BadFrame: it is no message of the union (code ``bad_frame``).
    """
    found = _own_decoders.get(id(union))
    if found is None:
        # By identity, since to hash a union is to look at all its members; kept, so that no other can have its place.
        found = _own_decoders[id(union)] = (msgspec.msgpack.Decoder(union), union)
    try:
        return cast("T", found[0].decode(frame))
    except (msgspec.MsgspecError, RecursionError, OverflowError, UnicodeError) as exc:
        raise BadFrame("bad_frame", _short(str(exc))) from exc


def decode(frame: "bytes | memoryview", union: "TypeForm[T]") -> T:
    """The message of one frame; `union` is one of the closed unions of `ipc.messages`, or a single message type.

    Raises:
        BadFrame: in every case of failure.
    """
    fields = _unpack(frame)
    name = fields.get("t")
    if not isinstance(name, str):
        raise BadFrame("bad_frame", "the map has no `t` that names its type", _seq_of(fields))
    known = _known.get(id(union))
    if known is None:
        known = _known[id(union)] = (_shapes(cast("Hashable", union)), union)
    shape = known[0].get(name)
    if shape is None:
        raise BadFrame("unknown_op", f"{_short(name)!r} is no message of this direction", _seq_of(fields))
    kind, float_names = shape
    try:
        # Against the one struct and not the union: converting to a union costs ten times as much.
        message = msgspec.convert(fields, kind, builtin_types=(bytes,))
    except (msgspec.ValidationError, RecursionError, OverflowError, UnicodeError) as exc:
        raise BadFrame("bad_request", _short(f"{name}: {exc}"), _seq_of(fields)) from exc
    for float_name in float_names:
        value: float = getattr(message, float_name)
        if value - value != 0.0:  # NaN and the infinities: a deadline of NaN is neither over nor due
            raise BadFrame("bad_request", f"{name}: expected a finite number - at `$.{float_name}`", _seq_of(fields))
    return cast("T", message)


# By identity: to hash a union is to look at all its members. The union is kept, so that no other can have its place.
_Shapes: TypeAlias = "Mapping[str, tuple[type[msgspec.Struct], tuple[str, ...]]]"
_known: Final[dict[int, tuple[_Shapes, object]]] = {}


@functools.cache
def _shapes(union: Hashable) -> Mapping[str, tuple[type[msgspec.Struct], tuple[str, ...]]]:
    """For each `t` of a union: its struct and the names of its float fields."""
    shapes: dict[str, tuple[type[msgspec.Struct], tuple[str, ...]]] = {}
    for kind in cast("tuple[type[msgspec.Struct], ...]", get_args(union) or (union,)):
        tag = kind.__struct_config__.tag
        assert isinstance(tag, str)
        shapes[tag] = (kind, tuple(field.name for field in msgspec.structs.fields(kind) if field.type is float))
    return shapes


def _unpack(frame: "bytes | memoryview") -> dict[str, object]:
    """The map of a frame, built within the limits.

    Raises:
        BadFrame: not msgpack, cut short, more than one object, no map, an extension type, beyond a limit.
    """
    hooks = {} if len(frame) <= SMALL_FRAME_BYTES else _Budget().hooks()
    try:
        fields = msgpack.unpackb(
            frame,
            raw=False,
            strict_map_key=True,
            max_str_len=MAX_STR_BYTES,
            max_bin_len=MAX_BIN_BYTES,
            max_array_len=MAX_ARRAY_ITEMS,
            max_map_len=MAX_MAP_ITEMS,
            max_ext_len=0,
            ext_hook=_refuse_extension,
            **hooks,
        )
    # msgpack's own errors are ValueErrors but for a few (BufferFull, OutOfData); all derive from these.
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as exc:
        raise BadFrame("bad_frame", _short(f"the frame is no msgpack map: {str(exc) or type(exc).__name__}")) from exc
    if not isinstance(fields, dict):
        raise BadFrame("bad_frame", f"the frame holds a {type(fields).__name__}, expected a map")
    return fields


class _Budget:
    """Counts what a large frame builds and refuses the frame above `MAX_ITEMS`."""

    def __init__(self) -> None:
        self._left = MAX_ITEMS

    def hooks(self) -> dict[str, object]:
        """The two callbacks of msgpack, called for each array and map once it is built."""
        return {"list_hook": self._list, "object_hook": self._map}

    def _list(self, items: list[object]) -> list[object]:
        self._spend(1 + len(items))
        return items

    def _map(self, items: dict[str, object]) -> dict[str, object]:
        self._spend(1 + 2 * len(items))
        return items

    def _spend(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise ValueError(f"more than {MAX_ITEMS} items")


def _refuse_extension(code: int, _data: bytes) -> NoReturn:
    # max_ext_len=0 alone would let an extension of no bytes pass.
    raise ValueError(f"extension type {code}")


def _seq_of(fields: Mapping[str, object]) -> int:
    seq = fields.get("seq")
    if type(seq) is int and -_I64 <= seq < _I64:  # not a bool
        return seq
    return -1


def _short(text: str) -> str:
    return text if len(text) <= _TEXT_CHARS else f"{text[:_TEXT_CHARS]}..."
