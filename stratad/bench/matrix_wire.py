"""What the fault matrix and its engine process say to each other (see `stratad.bench.engine_wire` for the form).

The contents of a slot are made from a number, its *seed*: an engine process knows what any image must hold although
another one captured it.
"""

from typing import TypeAlias

from stratad.bench.engine_wire import Bye, Failed, Line, Quit


class Register(Line, frozen=True, tag="register"):
    """Connect and register one stage a device (the daemon's names). Answer: `Registered`."""

    run_dir: str
    instance: str
    devices: list[str]
    slots: int
    tokens: int
    planes: int
    row_bytes: int


class Fill(Line, frozen=True, tag="fill"):
    """Write the contents of a seed to a slot of every stage. Answer: `Filled`."""

    slot: int
    seed: int


class Do(Line, frozen=True, tag="do"):
    """Carry out one operation and look at what it did to the memory. Answer: `Outcome`.

    ``capture``, ``slot_to`` and ``slot_direct`` read `slot`; ``restore``, ``take``, ``slot_from`` and ``slot_direct``
    write `target`, which is filled with a pattern first and must then hold the contents of `seed`. ``cancel`` is a
    capture that is cancelled, ``declare`` marks the slot clean with its contents. In stage `flipped` an ordered fault
    changed one byte of the source.
    """

    op: str
    conversation: str = ""
    slot: int = 0
    target: int = 1
    seed: int = 0
    flipped: int = -1
    deadline_s: float = 10.0


class Tell(Line, frozen=True, tag="tell"):
    """``slot_drop``, ``mark`` (clean, then dirty again), ``lookup`` (of the tokens of `seed`), ``unregister`` or
    ``abandon`` (the lifeline is closed without a goodbye).

    Answer: `Told`.
    """

    what: str
    slot: int = 0
    seed: int = 0
    deadline_s: float = 10.0


class Check(Line, frozen=True, tag="check"):
    """Zero a slot, restore an image into it, compare it with the contents of `seed`. Answer: `Checked`."""

    conversation: str
    slot: int
    seed: int
    deadline_s: float = 10.0


Order: TypeAlias = Register | Fill | Do | Tell | Check | Quit


class Imported(Line, frozen=True, tag="imported"):
    """The first answer: the process has what it needs, and has touched no device."""

    pid: int


class Registered(Line, frozen=True, tag="registered"):
    """Answer to `Register`."""

    device: str


class Filled(Line, frozen=True, tag="filled"):
    """Answer to `Fill`."""


class Outcome(Line, frozen=True, tag="outcome"):
    """Answer to `Do`. `code` is empty where it succeeded. `states` says how each stage ended, `undefined_rows` how many
    rows of it were named undefined. `problems` are what must not be.
    """

    seconds: float
    code: str = ""
    message: str = ""
    stage: int = -1
    states: tuple[str, ...] = ()
    undefined_rows: tuple[int, ...] = ()
    problems: tuple[str, ...] = ()
    image_id: int = 0


class Told(Line, frozen=True, tag="told"):
    """Answer to `Tell`. `code` is empty where it succeeded."""

    code: str = ""
    conversation: str = ""


class Checked(Line, frozen=True, tag="checked"):
    """Answer to `Check`. `code` is empty where the restore succeeded; `exact` says it of every stage."""

    code: str = ""
    message: str = ""
    exact: tuple[bool, ...] = ()


Answer: TypeAlias = Imported | Registered | Filled | Outcome | Told | Checked | Failed | Bye

__all__ = [
    "Answer",
    "Bye",
    "Check",
    "Checked",
    "Do",
    "Failed",
    "Fill",
    "Filled",
    "Imported",
    "Order",
    "Outcome",
    "Quit",
    "Register",
    "Registered",
    "Tell",
    "Told",
]
