"""Five switches under the names that they have in the engines' own environment, where operators set them for years.

=============================  ==================  ===============================================================
variable                       setting             values
=============================  ==================  ===============================================================
``STRATA_STAGE_COPY_PARALLEL`` ``copy.parallel``   1: stages side by side; 0: one after another
``STRATA_STAGE_COPY_TRACE``    ``copy.trace``      1 or 0
``STRATA_SLOT_SHUTTLE_REUSE``  ``shuttle.reuse``   0 or off, storage, 1 or verified
``STRATA_PARK_ASYNC``          ``copy.parallel``   1: one after another, whatever STRATA_STAGE_COPY_PARALLEL says
``STRATA_CKPT_ASYNC``          ``copy.parallel``   the same
=============================  ==================  ===============================================================

They count as environment: a flag or a variable of our own (``STRATAD_COPY_PARALLEL``) goes before them, and they go
before the file. An engine that parks or checkpoints in the background does so beside its own copies; there the stages
never ran in parallel, and whoever sets these relies on one link being left to it.
"""

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

PARALLEL: Final = "STRATA_STAGE_COPY_PARALLEL"
TRACE: Final = "STRATA_STAGE_COPY_TRACE"
REUSE: Final = "STRATA_SLOT_SHUTTLE_REUSE"
ASYNC: Final = ("STRATA_PARK_ASYNC", "STRATA_CKPT_ASYNC")
_BITS: Final[dict[str, bool]] = {"0": False, "1": True}
_REUSE_WORDS: Final = {"0": "off", "1": "verified", "off": "off", "storage": "storage", "verified": "verified"}


class SwitchError(ValueError):
    """A switch that cannot be: names the variable, the value and what is expected."""


class Switched(NamedTuple):
    """One setting that a switch gives, and which one."""

    key: str
    value: bool | str
    variable: str


def switched(environ: Mapping[str, str]) -> Iterator[Switched]:
    """What the switches of an environment give; every one is read, also where another wins.

    Raises:
        SwitchError: one has a value that it cannot have.
    """
    parallel, trace = _bit(environ, PARALLEL), _bit(environ, TRACE)
    background = [name for name in ASYNC if _bit(environ, name)]
    if background:
        yield Switched("copy.parallel", False, background[0])
    elif parallel is not None:
        yield Switched("copy.parallel", parallel, PARALLEL)
    if trace is not None:
        yield Switched("copy.trace", trace, TRACE)
    if REUSE in environ:
        word = _REUSE_WORDS.get(environ[REUSE])
        if word is None:
            raise SwitchError(f"{REUSE} = {environ[REUSE]!r}: expected 0 or off, storage, 1 or verified")
        yield Switched("shuttle.reuse", word, REUSE)


def _bit(environ: Mapping[str, str], name: str) -> bool | None:
    """A switch that is 0 or 1; None: it is not set."""
    if name not in environ:
        return None
    value = _BITS.get(environ[name])
    if value is None:
        raise SwitchError(f"{name} = {environ[name]!r}: expected 0 or 1")
    return value


def serial_note(environ: Mapping[str, str], source: str, *, parallel: bool, others: str) -> str:
    """Why stages copy one after another, or why they do not although a switch asks for it; empty where nobody wonders.

    `source` is where `copy.parallel` comes from; `others` what else gave it and lost.
    """
    background = [f"{name} = 1" for name in ASYNC if environ.get(name) == "1"]
    said = " and ".join(background)
    if parallel:
        return f"{said} without effect: copy.parallel = true ({source})" if background else ""
    if source.removeprefix("environment ") not in ASYNC:
        return f"copy.parallel = false ({source})"
    lost = f"{PARALLEL} = 1" if environ.get(PARALLEL) == "1" else others
    return f"{said} {'win' if len(background) > 1 else 'wins'} over {lost}" if lost else said
