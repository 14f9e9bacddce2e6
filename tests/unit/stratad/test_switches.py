"""The switches of engines: what they mean here, which source goes before which, and what is said of it."""

import itertools
from pathlib import Path

import msgspec
import pytest

from stratad.config import Config, ConfigError, load_config
from stratad.ctl.doctor_daemon import copies as examined
from stratad.ctl.findings import State
from stratad.ctl.status import copies
from stratad.switches import ASYNC, PARALLEL, REUSE, TRACE
from tests.support.ctl_fakes import STATS

HOME = {"RUNTIME_DIRECTORY": "/run/it", "STATE_DIRECTORY": "/st"}
PARK, CKPT = ASYNC


def load(*argv: str, **environ: str) -> Config:
    return load_config(argv, HOME | environ)


def refused(**environ: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(**environ)
    return str(caught.value)


def test_without_any_of_them() -> None:
    config = load()
    assert (config.copy.parallel, config.copy.trace, config.shuttle.reuse) == (True, False, "storage")
    assert config.parallel_note == ""


@pytest.mark.parametrize("bits", list(itertools.product("01", repeat=5)), ids="".join)
def test_all_values_of_all_five(bits: tuple[str, ...]) -> None:
    parallel, reuse, trace, park, ckpt = bits
    config = load(**dict(zip((PARALLEL, REUSE, TRACE, PARK, CKPT), bits, strict=True)))
    assert config.copy.parallel == (parallel == "1" and park == "0" and ckpt == "0")
    assert config.copy.trace == (trace == "1")
    assert config.shuttle.reuse == ("verified" if reuse == "1" else "off")


@pytest.mark.parametrize("word", ["off", "storage", "verified"])
def test_reuse_in_words(word: str) -> None:
    assert load(**{REUSE: word}).shuttle.reuse == word


@pytest.mark.parametrize("name", [PARALLEL, TRACE, *ASYNC])
@pytest.mark.parametrize("value", ["", "2", "true", " 1", "01"])
def test_a_bit_that_is_none(name: str, value: str) -> None:
    assert refused(**{name: value}) == f"{name} = {value!r}: expected 0 or 1"


@pytest.mark.parametrize("value", ["", "2", "true", "Verified"])
def test_reuse_that_cannot_be(value: str) -> None:
    assert refused(**{REUSE: value}) == f"{REUSE} = {value!r}: expected 0 or off, storage, 1 or verified"


def test_one_that_loses_must_still_be_one() -> None:
    assert refused(**{PARALLEL: "yes", PARK: "1"}) == f"{PARALLEL} = 'yes': expected 0 or 1"
    assert refused(STRATAD_COPY_TRACE="true", **{TRACE: "yes"}) == f"{TRACE} = 'yes': expected 0 or 1"


def test_which_source_goes_before_which(tmp_path: Path) -> None:
    """Flags, then our own variables, then these, then the file."""
    file = tmp_path / "stratad.toml"
    file.write_text("[copy]\nparallel = false\ntrace = true\n[shuttle]\nreuse = 'off'\n")
    old = {PARALLEL: "1", TRACE: "0", REUSE: "1"}
    config = load("--config", str(file), **old)
    assert (config.copy.parallel, config.copy.trace, config.shuttle.reuse) == (True, False, "verified")
    own = {"STRATAD_COPY_PARALLEL": "false", "STRATAD_COPY_TRACE": "true", "STRATAD_SHUTTLE_REUSE": "storage"}
    config = load("--config", str(file), **old, **own)
    assert (config.copy.parallel, config.copy.trace, config.shuttle.reuse) == (False, True, "storage")
    flags = ("--set", "copy.parallel=true", "--set", "copy.trace=false", "--set", "shuttle.reuse=off")
    config = load("--config", str(file), *flags, **old, **own)
    assert (config.copy.parallel, config.copy.trace, config.shuttle.reuse) == (True, False, "off")


def note(*argv: str, **environ: str) -> tuple[bool, str]:
    config = load(*argv, **environ)
    return config.copy.parallel, config.parallel_note


def test_what_is_said_of_it(tmp_path: Path) -> None:
    assert note(**{PARALLEL: "1"}) == (True, "")
    assert note(**{PARALLEL: "0"}) == (False, f"copy.parallel = false (environment {PARALLEL})")
    assert note("--set", "copy.parallel=false") == (False, "copy.parallel = false (--set copy.parallel)")
    assert note(**{PARK: "1"}) == (False, f"{PARK} = 1")
    assert note(**{CKPT: "1", PARALLEL: "0"}) == (False, f"{CKPT} = 1")
    assert note(**{CKPT: "1", PARALLEL: "1"}) == (False, f"{CKPT} = 1 wins over {PARALLEL} = 1")
    both = f"{PARK} = 1 and {CKPT} = 1 win over {PARALLEL} = 1"
    assert note(**{CKPT: "1", PARK: "1", PARALLEL: "1"}) == (False, both)
    mine = note("--set", "copy.parallel=true", **{PARK: "1"})
    assert mine == (True, f"{PARK} = 1 without effect: copy.parallel = true (--set copy.parallel)")
    file = tmp_path / "stratad.toml"
    file.write_text("[copy]\nparallel = true\n")
    told = note("--config", str(file), **{PARK: "1"})
    assert told == (False, f"{PARK} = 1 wins over copy.parallel = true ({file})")


def test_status_says_it() -> None:
    assert copies({"copy.parallel": "true", "copy.trace": "false"}) == []
    assert copies({"copy.parallel": "false"}) == ["copies: one stage after another"]
    told = copies({"copy.parallel": "false", "copy.parallel_note": f"{PARK} = 1", "copy.trace": "true"})
    assert told == [f"copies: one stage after another ({PARK} = 1)", "trace: on (see `stratactl trace`)"]
    assert copies({"copy.parallel": "true", "copy.parallel_note": "x"}) == ["copies: stages side by side (x)"]


def test_doctor_says_it_and_warns_of_a_switch_alone() -> None:
    def check(**settings: str) -> tuple[State, str, str]:
        given = {f"copy.{name}": value for name, value in settings.items()}
        stats = msgspec.structs.replace(STATS, settings=given)
        (found,) = examined(stats)
        return found.state, found.what, found.fix

    assert check(parallel="true") == (State.OK, "stages copy side by side", "")
    state, what, fix = check(parallel="false", parallel_note=f"{CKPT} = 1 wins over {PARALLEL} = 1")
    assert (state, what) == (State.WARN, f"stages copy one after another: {CKPT} = 1 wins over {PARALLEL} = 1")
    assert "STRATAD_COPY_PARALLEL=true" in fix
    state, what, fix = check(parallel="false", parallel_note="copy.parallel = false (--set copy.parallel)")
    assert (state, fix) == (State.OK, "")
    assert list(examined(None)) == []
