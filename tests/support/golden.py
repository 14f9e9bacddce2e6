"""Golden frames: what is on the wire of this protocol version, one file a message type.

``python -m tests.support.golden`` writes the frames that are missing. A frame holds every field, so one that is there
changes with a new field: delete it and run this again. Whether that needs another version is `tests.support.schema`'s
to say.
"""

import sys
from pathlib import Path
from typing import Final

from ipc.codec import encode
from tests.support.samples import message_types, sample

FOLDER: Final = Path(__file__).parents[1] / "unit/ipc/golden"


def golden_path(union: str, tag: str) -> Path:
    """Where the frame of one message type is kept, as hex in lines of 64 bytes."""
    return FOLDER / f"{union}.{tag}.hex"


def read_golden(path: Path) -> bytes:
    """The frame in a file."""
    return bytes.fromhex(path.read_text(encoding="ascii"))


def main() -> int:
    """Write what is missing."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for union, tag, _, kind in message_types():
        path = golden_path(union, tag)
        if not path.exists():
            text = encode(sample(kind)).hex()
            path.write_text("\n".join(text[at : at + 128] for at in range(0, len(text), 128)) + "\n", encoding="ascii")
            sys.stdout.write(f"{path.name}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
