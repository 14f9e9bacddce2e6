"""stratactl's border: arguments, exit codes, JSON, and never a traceback."""

import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stratad import __version__
from stratad.ctl.connection import DaemonClient, Target
from stratad.ctl.exit_codes import MEANINGS, ExitCode
from stratad.ctl.main import main
from stratad.errors import CODES, error_for
from tests.support.ctl_fakes import FakeClient, another_build, with_health

DAEMON_COMMANDS = [
    ["status"],
    ["memory"],
    ["memory", "--history"],
    ["list"],
    ["show", "tenant", "chat"],
    ["drop", "tenant", "chat", "--force"],
    ["pin", "tenant", "chat"],
    ["clear", "tenant"],
]


def last_json(text: str) -> dict[str, object]:
    value = json.loads(text.splitlines()[-1])
    assert isinstance(value, dict)
    return value


@pytest.mark.parametrize("command", DAEMON_COMMANDS, ids=lambda command: command[0])
def test_every_command_answers_for_people_and_for_scripts(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    client = FakeClient()
    assert main(command, client.connect) == ExitCode.OK
    assert capsys.readouterr().out.strip()
    assert main([*command, "--json"], client.connect) == ExitCode.OK
    out = capsys.readouterr().out
    assert "error" not in last_json(out)
    assert len(out.splitlines()) == 1
    assert client.closed == 2


@pytest.mark.parametrize("place", ["before", "after"])
def test_common_options_stand_before_or_after_the_command(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--run-dir", "/run/x", "--instance", "blue", "--timeout", "2.5", "--json"]
    client = FakeClient()
    argv = [*options, "status"] if place == "before" else ["status", *options]
    assert main(argv, client.connect) == ExitCode.OK
    assert client.calls[0] == ("connect", Target(Path("/run/x"), "blue", 2.5))
    last_json(capsys.readouterr().out)


def test_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    client = FakeClient()
    assert main(["status"], client.connect) == ExitCode.OK
    assert client.calls[0] == ("connect", Target(None, "default", 5.0))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("health", "code"), [("ok", 0), ("degraded", 4), ("failed", 5), ("a word of a later version", 4)]
)
def test_status_exits_by_health(health: str, code: int) -> None:
    assert main(["status"], with_health(health).connect) == code


@pytest.mark.parametrize("code", sorted(CODES))
def test_every_coded_error_is_named_with_its_code(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    client = FakeClient(fails_with=error_for(code, "it went wrong", detail={"key": "value"}))
    expected = {
        "lost": ExitCode.NO_DAEMON,
        "deadline": ExitCode.NO_DAEMON,
        "wrong_version": ExitCode.USAGE,
        "bad_frame": ExitCode.USAGE,
    }.get(code, ExitCode.FAILED)
    assert main(["status", "--json"], client.connect) == expected
    captured = capsys.readouterr()
    assert captured.err.splitlines()[0] == f"stratactl: it went wrong [{code}]"
    error = last_json(captured.out)["error"]
    assert isinstance(error, dict)
    assert error["code"] == code
    assert error["exit_code"] == expected
    assert error["detail"] == {"key": "value"}
    assert client.closed == 1


def test_another_build_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    client = another_build()
    assert main(["clear", "tenant"], client.connect) == ExitCode.USAGE
    assert "[wrong_build]" in capsys.readouterr().err
    assert not [call for call in client.calls if call[0] == "clear"], "nothing may be asked of another build"
    assert client.closed == 1


def test_pinned_image_is_dropped_only_by_force(capsys: pytest.CaptureFixture[str]) -> None:
    client = FakeClient()
    assert main(["drop", "tenant", "chat"], client.connect) == ExitCode.FAILED
    assert "[pinned]" in capsys.readouterr().err
    assert main(["drop", "tenant", "chat", "--force"], client.connect) == ExitCode.OK


def test_workers_are_restarted_and_reset(capsys: pytest.CaptureFixture[str]) -> None:
    client = FakeClient()
    assert main(["worker", "restart", "cpu:0"], client.connect) == ExitCode.OK
    assert "worker cpu:0 was failed: generation 9 follows" in capsys.readouterr().out
    assert main(["worker", "reset", "cpu:0"], client.connect) == ExitCode.FAILED
    assert "--force" in capsys.readouterr().err
    assert main(["worker", "reset", "cpu:0", "--force", "--json"], client.connect) == ExitCode.OK
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert answer == {"worker": "cpu:0", "was": "ready", "generation": 2, "images_dropped": 3}
    assert main(["worker"], client.connect) == ExitCode.USAGE
    orders = [call for call in client.calls if call[0] != "connect"]
    assert orders == [("restart_worker", "cpu:0"), ("reset_worker", "cpu:0", False), ("reset_worker", "cpu:0", True)]


def test_lift_names_a_conversation_an_image_or_a_namespace(capsys: pytest.CaptureFixture[str]) -> None:
    client = FakeClient()
    assert main(["lift", "tenant"], client.connect) == ExitCode.OK
    assert main(["lift", "tenant", "chat", "--image", "7"], client.connect) == ExitCode.OK
    assert capsys.readouterr().out == "lifted 1 quarantine\n" * 2
    lifts = [call for call in client.calls if call[0] != "connect"]
    assert lifts == [("lift", "tenant", "", 0), ("lift", "tenant", "chat", 7)]


@pytest.mark.parametrize(
    ("argv", "where"),
    [
        (["lift", "tenant"], "namespace tenant"),
        (["lift", "tenant", "chat"], "tenant / chat"),
        (["lift", "tenant", "chat", "--image", "7"], "image 7 of tenant / chat"),
    ],
)
def test_lift_says_that_there_was_nothing(argv: list[str], where: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv, FakeClient(quarantines=0).connect) == ExitCode.OK
    assert capsys.readouterr().out == f"nothing is quarantined in {where}\n"


def test_help_of_reset_and_lift_stands_by_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["worker", "reset", "--help"]) == ExitCode.OK
    assert "\nKill a worker's process if there is one, give its shuttles back" in capsys.readouterr().out
    assert main(["lift", "--help"]) == ExitCode.OK
    assert "as the engine registered it" in " ".join(capsys.readouterr().out.split())


def test_pin_off_unpins() -> None:
    client = FakeClient()
    main(["pin", "tenant", "chat", "--off"], client.connect)
    main(["pin", "tenant", "chat"], client.connect)
    asked = [call for call in client.calls if call[0] == "pin"]
    assert asked == [("pin", "tenant", "chat", False, 0), ("pin", "tenant", "chat", True, 0)]


@pytest.mark.parametrize("command", ["show", "pin", "drop"])
def test_one_of_several_images_is_named_by_its_number(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    client = FakeClient()
    more = ["--force"] if command == "drop" else []
    assert main([command, "tenant", "chat", "--image", "3", *more], client.connect) == ExitCode.OK
    assert [call[-1] for call in client.calls if call[0] == command] == [3]
    for wrong in ("0", "-1", "x", "²", str(2**63)):
        assert main([command, "tenant", "chat", f"--image={wrong}", *more], client.connect) == ExitCode.USAGE
        assert "expected the number of an image" in capsys.readouterr().err
    assert len([call for call in client.calls if call[0] == command]) == 1


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (FileNotFoundError(errno.ENOENT, "No such file", "/run/x/client.sock"), ExitCode.NO_DAEMON),
        (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), ExitCode.NO_DAEMON),
        (PermissionError(errno.EACCES, "Permission denied"), ExitCode.FAILED),
        (RuntimeError("a bug"), ExitCode.FAILED),
    ],
    ids=["missing", "refused", "denied", "bug"],
)
def test_whatever_connecting_raises_becomes_one_line(
    error: Exception, code: ExitCode, capsys: pytest.CaptureFixture[str]
) -> None:
    def connect(_target: Target) -> DaemonClient:
        raise error

    assert main(["status"], connect) == code
    err = capsys.readouterr().err
    assert err.startswith("stratactl: ")
    assert "Traceback" not in err


def test_a_daemon_that_never_answers_ends_within_the_time_out(capsys: pytest.CaptureFixture[str]) -> None:
    def connect(_target: Target) -> DaemonClient:
        reading, writing = os.pipe()
        try:
            os.read(reading, 1)  # nobody writes: without the alarm this never comes back
        finally:
            os.close(reading)
            os.close(writing)
        raise AssertionError("unreachable")

    started_s = time.monotonic()
    assert main(["status", "--timeout", "0.1"], connect) == ExitCode.NO_DAEMON
    assert time.monotonic() - started_s < 2
    assert "[deadline]" in capsys.readouterr().err


def test_interrupt_has_its_own_code(capsys: pytest.CaptureFixture[str]) -> None:
    client = FakeClient(interrupted=True)
    assert main(["status"], client.connect) == ExitCode.INTERRUPTED
    assert "Traceback" not in capsys.readouterr().err
    assert client.closed == 1


@pytest.mark.parametrize(
    "argv",
    [[], ["frobnicate"], ["show", "only-one"], ["status", "--timeout", "0"], ["status", "--timeout", "-1"]],
    ids=["nothing", "unknown", "missing", "zero", "negative"],
)
def test_wrong_arguments(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv, FakeClient().connect) == ExitCode.USAGE
    assert "usage: stratactl" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "program", "named"),
    [
        (["frobnicate"], "stratactl", "frobnicate"),
        (["--nonsense", "status"], "stratactl", "--nonsense"),
        (["show", "a", "b", "--nonsense"], "stratactl show", "--nonsense"),
        (["pin", "a", "b", "--of"], "stratactl pin", "--of"),
        (["show", "only-one"], "stratactl show", "CONVERSATION"),
        (["status", "--timeout", "nan"], "stratactl status", "nan"),
        (["status", "--timeout", "soon"], "stratactl status", "soon"),
        (["memory", "--history", "0"], "stratactl memory", "'0'"),
        (["memory", "--history", "20001"], "stratactl memory", "20001"),
        (["demo", "--nonsense"], "stratactl demo", "--nonsense"),
        (["bench", "control", "--nonsense"], "stratactl bench control", "--nonsense"),
    ],
)
@pytest.mark.parametrize("place", ["before", "after"])
def test_wrong_arguments_show_the_commands_usage_and_an_object(
    argv: list[str], program: str, named: str, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--json", *argv] if place == "before" else [*argv, "--json"]
    assert main(words, FakeClient().connect) == ExitCode.USAGE
    captured = capsys.readouterr()
    assert captured.err.startswith(f"usage: {program} [-h]")
    assert f"{program}: error: " in captured.err
    error = last_json(captured.out)["error"]
    assert isinstance(error, dict)
    assert (error["code"], error["exit_code"]) == ("usage", ExitCode.USAGE)
    assert named in error["message"]
    assert error["fix"] == f"see `{program} --help`"
    assert main(argv, FakeClient().connect) == ExitCode.USAGE
    assert capsys.readouterr().out == "", "nobody asked for JSON"


def test_version_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == ExitCode.OK
    assert capsys.readouterr().out == f"stratactl {__version__}\n"
    assert main(["--help"]) == ExitCode.OK
    assert "--version" in capsys.readouterr().out


def test_help_says_where_the_daemon_is_looked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--help"]) == ExitCode.OK
    out = " ".join(capsys.readouterr().out.split())
    assert "$XDG_RUNTIME_DIR/stratad if a daemon of your own has its sockets there, else /run/stratad" in out


def test_help_of_pin_says_how_long_it_holds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pin", "--help"]) == ExitCode.OK
    assert "kept when the conversation is captured again" in capsys.readouterr().out


ORDERS = [[*words, "--help"] for words in (["worker", "restart"], ["worker", "reset"], ["fault", "arm"])]


@pytest.mark.parametrize("argv", [["--help"], ["status", "--help"], ["drop", "--help"], *ORDERS])
def test_help_lists_the_exit_codes(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv, FakeClient().connect) == ExitCode.OK
    out = capsys.readouterr().out
    assert all(f"{code.value}  {meaning}" in out for code, meaning in MEANINGS.items())


def test_status_loads_neither_torch_nor_numpy_nor_the_benchmarks() -> None:
    program = (
        "import sys, stratad.ctl.main as m\n"
        "from tests.support.ctl_fakes import FakeClient\n"
        "assert m.main(['status', '--json'], FakeClient().connect) == 0\n"
        "heavy = {'torch', 'numpy', 'transformers', 'stratad.bench', 'stratad.ctl.demo', 'stratad.ctl.doctor'}\n"
        "assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def _list_into(stdout: int | None, *, closed: bool = False, images: int = 5000) -> subprocess.CompletedProcess[bytes]:
    """`stratactl list`, with a stdout that cannot be written."""
    program = (
        "import os, sys\n"
        + ("os.close(1); sys.stdout = None\n" if closed else "")
        + "from stratad.ctl.main import main\n"
        "from tests.support.ctl_fakes import FakeClient, IMAGE\n"
        f"sys.exit(main(['list'], FakeClient(images=(IMAGE,) * {images}).connect))\n"
    )
    # Unbuffered output would leave nothing behind for the interpreter to complain about at its exit.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(
        [sys.executable, "-c", program], stdout=stdout, stderr=subprocess.PIPE, check=False, env=environment
    )


@pytest.mark.parametrize("images", [1, 5000])
def test_a_reader_that_leaves_early_is_no_error(images: int) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = _list_into(writing, images=images)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_full_device_is_told() -> None:
    with Path("/dev/full").open("wb") as full:
        done = _list_into(full.fileno())
    assert done.returncode == ExitCode.FAILED
    assert done.stderr.startswith(b"stratactl: output could not be written")
    assert b"Traceback" not in done.stderr


def test_no_stdout_at_all() -> None:
    done = _list_into(None, closed=True)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_terminal_without_unicode() -> None:
    program = (
        "import sys, msgspec\n"
        "from stratad.ctl.main import main\n"
        "from tests.support.ctl_fakes import FakeClient, IMAGE\n"
        "image = msgspec.structs.replace(IMAGE, conversation='gr\\u00fc\\u00df\\ud800')\n"
        "sys.exit(main(['list'], FakeClient(images=(image,)).connect))\n"
    )
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False, env=environment)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"gr\\xfc" in done.stdout
