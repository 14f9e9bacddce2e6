"""What ``bench isolate`` and its engine processes say to each other (see `stratad.bench.engine_wire` for the form)."""

from typing import TypeAlias

from stratad.bench.engine_wire import Bye, Failed, Line, Quit


class Begun(Line, frozen=True, tag="begun"):
    """The first answer: connected, registered, and one image of each size is published."""

    pid: int


class Work(Line, frozen=True, tag="work"):
    """Capture and restore, small and medium in turn, `count` times each; 0: until the next order is there.

    Answer: `Worked`. The pause after each operation is `pause_s`.
    """

    count: int
    pause_s: float


class Loss(Line, frozen=True, tag="loss"):
    """Operations that failed, by kind and code; the words are those of the first."""

    arm: str
    code: str
    count: int
    message: str


class Worked(Line, frozen=True, tag="worked"):
    """Answer to `Work`: the seconds of each operation that was done, by kind, and those that failed. `exact` says that
    the last image of each size came back into zeroed rows byte for byte.
    """

    seconds: dict[str, list[float]]
    losses: list[Loss]
    exact: bool


Order: TypeAlias = Work | Quit
Answer: TypeAlias = Begun | Worked | Failed | Bye
