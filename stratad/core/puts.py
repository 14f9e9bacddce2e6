"""Puts and gets: images in the making, part by part, and images that are held to be read part by part.

A part is stored in pieces, each by an operation of its own::

    begin_piece --stored--> kept --commit--> chunks of an image
         '------forget-----> as if it had never been begun          end, restart: kept pieces are handed back

A piece is named by its first row. Its rows are claimed from its begin on, so no row of a part is stored twice.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from stratad.core.failures import Refusal
from stratad.core.images import Chunk, Draft, Image, ImagePart, Staged, StoredPiece

PART_LIMIT = 4096
# Names and notes of all parts of a put: what the daemon keeps of each image besides its chunks, and a reply lists.
TEXT_LIMIT = 1024 * 1024


@dataclass(slots=True, eq=False)
class Part:
    """A part of a put. `claimed` are the numbers of its chunks that some piece stores or has stored."""

    name: str
    nbytes: int
    meta: str
    row_count: int
    pieces: dict[int, "Piece"] = field(default_factory=dict)
    claimed: set[int] = field(default_factory=set)

    @property
    def begun_rows(self) -> int:
        """Rows that are stored or being copied."""
        return sum(piece.row_count for piece in self.pieces.values())

    @property
    def copying(self) -> bool:
        """Whether a piece of it is being copied."""
        return any(piece.stored is None for piece in self.pieces.values())

    @property
    def whole(self) -> bool:
        """Whether every row is stored."""
        return not self.copying and self.begun_rows == self.row_count


@dataclass(slots=True, eq=False)
class Piece:
    """Rows of a part that one operation stores; `stored` once it has."""

    put: "Put"
    part: Part
    first_row: int
    row_count: int
    stored: StoredPiece | None = None

    @property
    def chunks(self) -> range:
        """Numbers of its chunks in the part."""
        step = self.put.chunk_rows
        return range(self.first_row // step, -(-(self.first_row + self.row_count) // step))

    def forget(self) -> None:
        """Its operation did not store it: its rows may be put again."""
        if not self.put.ended:
            self.put.remove(self)


@dataclass(slots=True, eq=False)
class Put:
    """An image in the making. `draft` says what it is to become; its parts have rows of `row_bytes`, and chunks of
    `chunk_rows` rows.
    """

    put_id: int
    draft: Draft
    row_bytes: int
    chunk_rows: int
    parts: dict[str, Part] = field(default_factory=dict)
    chunk_count: int = 0
    text_length: int = 0
    ended: bool = False
    used_s: float = 0.0  # when its engine last did something with it

    def pieces(self) -> Iterator[Piece]:
        """Every piece of every part, in the order of the image."""
        for part in self.parts.values():
            for first_row in sorted(part.pieces):
                yield part.pieces[first_row]

    def restartable(self, name: str) -> bool:
        """Whether the part is there in part only, and nothing of it is under way any more."""
        part = self.parts.get(name)
        return part is not None and not part.copying and not part.whole

    def drop_part(self, name: str) -> list[Staged]:
        """Forget a part; returns what was stored of it, for the caller to discard."""
        part = self.parts[name]
        staged = [piece.stored.staged for piece in part.pieces.values() if piece.stored is not None]
        for piece in list(part.pieces.values()):
            self.remove(piece)
        self.parts.pop(name, None)
        return staged

    def begin_part(self, name: str, nbytes: int, meta: str) -> Part:
        """Begin a part that is not there.

        Raises:
            Refusal: ``duplicate_part`` or ``too_many``.
        """
        if name in self.parts:
            raise Refusal("duplicate_part", f"part {name[:80]!r} is there already, or is being put")
        text = len(name) + len(meta)
        if len(self.parts) >= PART_LIMIT or self.text_length + text > TEXT_LIMIT:
            raise Refusal(
                "too_many", f"a put has at most {PART_LIMIT} parts with {TEXT_LIMIT} characters of names and notes"
            )
        self.text_length += text
        part = self.parts[name] = Part(name, nbytes, meta, -(-nbytes // self.row_bytes))
        return part

    def begin_piece(self, part: Part, first_row: int, row_count: int) -> Piece:
        """Claim rows of a part for an operation that is about to start. The caller vouches that they lie in the part.

        Raises:
            Refusal: ``duplicate_part``: some of them are stored or being copied.
        """
        piece = Piece(self, part, first_row, row_count)
        if not part.claimed.isdisjoint(piece.chunks):
            raise Refusal(
                "duplicate_part", f"rows from {first_row} on of part {part.name[:80]!r} are stored or being copied"
            )
        part.claimed.update(piece.chunks)
        part.pieces[first_row] = piece
        self.chunk_count += len(piece.chunks)
        return piece

    def remove(self, piece: Piece) -> None:
        """Forget a piece, and with its last one the part."""
        part = piece.part
        del part.pieces[piece.first_row]
        part.claimed.difference_update(piece.chunks)
        self.chunk_count -= len(piece.chunks)
        if not part.pieces:
            self.text_length -= len(part.name) + len(part.meta)
            del self.parts[part.name]

    def table(self) -> tuple[ImagePart, ...]:
        """The parts as the image will list them.

        Raises:
            Refusal: ``part_incomplete``: there is none, or one is not stored.
        """
        if not self.parts:
            raise Refusal("part_incomplete", "a put needs at least one part")
        entries: list[ImagePart] = []
        at = 0
        for part in self.parts.values():
            if not part.whole:
                why = "is still being copied" if part.copying else "was not stored as a whole: put it again"
                raise Refusal("part_incomplete", f"part {part.name[:80]!r} {why}", detail={"part": part.name})
            count = sum(len(piece.chunks) for piece in part.pieces.values())
            entries.append(ImagePart(part.name, part.nbytes, part.meta, at, count))
            at += count
        return tuple(entries)


@dataclass(slots=True, eq=False)
class Get:
    """An image that an engine holds, with all its chunks."""

    get_id: int
    image: Image
    chunks: tuple[Chunk, ...]
    used_s: float = 0.0  # when its engine last did something with it
