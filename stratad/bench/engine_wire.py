"""What a driver and its engine process say to each other: one JSON object a line, each a typed struct with key ``t``.

The driver writes orders to the engine's standard input and reads one answer for each from its standard output, the
first being `Ready`. A conversation lives in a slot; `next_token` is the token that the model chose last and has not
read yet, so it is in no cache and the driver, which keeps the text as a chat server would, hands it over at a restore.
"""

from typing import Final, TypeAlias

import msgspec

# An order carries tokens as numbers; 100,000 of them are 0.7 MB.
LINE_LIMIT_BYTES: Final = 64 << 20


class Line(msgspec.Struct, frozen=True, tag_field="t"):
    """Base of all orders and answers."""


# --- orders ----------------------------------------------------------------------------------------------------------


class Encode(Line, frozen=True, tag="encode"):
    """A prompt of exactly `tokens` tokens: `body`, repeated and cut as needed, then `question`.

    In the model's chat form where it has one. A model without a tokenizer takes the bytes of the text as tokens.
    """

    body: str
    question: str
    tokens: int


class Decode(Line, frozen=True, tag="decode"):
    """The text of tokens; empty where the model has no tokenizer."""

    tokens: list[int]


class Prefill(Line, frozen=True, tag="prefill"):
    """Read `tokens` from the start into a slot; what the slot held is gone."""

    conversation: str
    tokens: list[int]
    slot: int = 0


class Generate(Line, frozen=True, tag="generate"):
    """Go on greedily by `count` tokens."""

    conversation: str
    count: int


class Park(Line, frozen=True, tag="park"):
    """Capture a conversation, wait until it is published, and give up its slot."""

    conversation: str
    deadline_s: float = 60.0


class Restore(Line, frozen=True, tag="restore"):
    """Restore a conversation into a slot, or take it (`take`); `known_tokens` are those that the image must hold."""

    conversation: str
    known_tokens: list[int]
    next_token: int
    slot: int = 0
    take: bool = False
    deadline_s: float = 60.0


class Lookup(Line, frozen=True, tag="lookup"):
    """Longest published prefix of these tokens."""

    tokens: list[int]
    deadline_s: float = 60.0


class Quit(Line, frozen=True, tag="quit"):
    """End with exit status 0."""


Order: TypeAlias = Encode | Decode | Prefill | Generate | Park | Restore | Lookup | Quit

# --- answers ---------------------------------------------------------------------------------------------------------


class Ready(Line, frozen=True, tag="ready"):
    """The model is loaded and, with a daemon, the engine is registered.

    `device` is the torch device of the model and `gpu_uuid` names it to the daemon, empty on a CPU; of several both
    have commas between them. `stages` names each stage's device;
    `token_bytes` are the K/V bytes of one token over all layers.
    """

    pid: int
    model: str
    dtype: str
    device: str
    gpu_uuid: str
    layers: int
    vocabulary: int
    token_bytes: int
    stages: list[str]
    hardware: str
    threads: int
    load_s: float
    versions: dict[str, str]


class Encoded(Line, frozen=True, tag="encoded"):
    """Answer to `Encode`."""

    tokens: list[int]


class Decoded(Line, frozen=True, tag="decoded"):
    """Answer to `Decode`."""

    text: str


class Prefilled(Line, frozen=True, tag="prefilled"):
    """Answer to `Prefill`. `prefill_s` is the model's forward pass alone."""

    tokens: int
    prefill_s: float
    next_token: int


class Generated(Line, frozen=True, tag="generated"):
    """Answer to `Generate`. `logits_sha256` covers the bytes of the logits of every step, `cache_sha256` those of the
    cache after the last.
    """

    tokens: list[int]
    generate_s: float
    next_token: int
    logits_sha256: str
    cache_sha256: str = ""


class Parked(Line, frozen=True, tag="parked"):
    """Answer to `Park`. `capture_s` runs from the cache's tensors to the published image."""

    tokens: int
    image_bytes: int
    capture_s: float


class Restored(Line, frozen=True, tag="restored"):
    """Answer to `Restore`. `restore_s` runs from the request to a cache that the model can go on with, verified;
    `cache_sha256` covers that cache's bytes.
    """

    tokens: int
    restore_s: float
    cache_sha256: str = ""


class Found(Line, frozen=True, tag="found"):
    """Answer to `Lookup`; 0 tokens: nothing."""

    conversation: str
    tokens: int


class Failed(Line, frozen=True, tag="failed"):
    """An order could not be carried out; `code` is one of `stratad.errors` or ``engine``."""

    code: str
    message: str


class Bye(Line, frozen=True, tag="bye"):
    """Answer to `Quit`."""


Answer: TypeAlias = Ready | Encoded | Decoded | Prefilled | Generated | Parked | Restored | Found | Failed | Bye
