"""Where settings come from, and which are refused."""

import os
from pathlib import Path

import msgspec
import pytest

from stratad import __version__
from stratad.config import MIB, AccessConfig, Config, ConfigError, load_config, render_config
from stratad.config_text import MEANINGS
from stratad.devices import Devices

ENVIRON = {
    "XDG_RUNTIME_DIR": "/run/user/7",
    "HOME": "/home/x",
    "RUNTIME_DIRECTORY": "/run/it",
    "STATE_DIRECTORY": "/st",
}


def load(*argv: str, **environ: str) -> Config:
    return load_config(argv, ENVIRON | environ)


def refused(*argv: str, **environ: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*argv, **environ)
    return str(caught.value)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "stratad.toml"


def test_defaults() -> None:
    config = load()
    assert config.daemon.instance == "default"
    assert (config.daemon.run_dir, config.daemon.state_dir) == ("/run/it", "/st")
    assert config.daemon.devices == Devices("auto")
    assert config.ram.budget_bytes == "auto"
    assert config.ram.shuttle_bytes == 256 * MIB
    assert config.copy.parallel
    assert config.deadlines.link_floor_bytes_per_s == 200e6
    assert not config.print_config


def test_flags_before_environment_before_file_before_default(file: Path) -> None:
    file.write_text("[limits]\nmax_clients = 3\nmax_ops = 3\nmax_message_bytes = '3MiB'\n")
    flags = ("--config", str(file), "--set", "limits.max_clients=1")
    config = load(*flags, STRATAD_LIMITS_MAX_CLIENTS="2", STRATAD_LIMITS_MAX_OPS="2")
    assert (config.limits.max_clients, config.limits.max_ops, config.limits.max_message_bytes) == (1, 2, 3 * MIB)
    assert config.restarts.give_up_after == 8


def test_short_flags_go_before_set() -> None:
    config = load(
        "--set", "daemon.instance=a", "--instance", "b", "--devices", "cpu:4", "--run-dir", "/r", "--state-dir", "/s"
    )
    assert config.daemon.instance == "b"
    assert config.daemon.devices == Devices("cpu", cpu_count=4)
    assert (config.daemon.run_dir, config.daemon.state_dir) == ("/r", "/s")


def test_the_last_set_counts() -> None:
    assert load("--set", "limits.max_ops=1", "--set", "limits.max_ops=2").limits.max_ops == 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [("4GiB", 4 << 30), ("65536", 65536), ("128 KiB", 128 << 10), ("1TiB", 1 << 40), ("100B", 100), ("auto", "auto")],
)
def test_sizes(text: str, expected: int | str) -> None:
    assert load("--set", f"ram.budget_bytes={text}").ram.budget_bytes == expected


@pytest.mark.parametrize("text", ["4GB", "4g", "-1", "1.5GiB", "1e9", "", "GiB", "0", "4GiB x", "99999999TiB", "Auto"])
def test_sizes_that_cannot_be(text: str) -> None:
    assert "ram.budget_bytes" in refused("--set", f"ram.budget_bytes={text}")


def test_a_rendered_configuration_reads_back_the_same(file: Path) -> None:
    config = load("--set", "ram.budget_bytes=4GiB", "--set", "cpu_device.link_bytes_per_s=5e9", "--devices", "cpu:3")
    file.write_text(render_config(config))
    assert load_config(["--config", str(file)], {}) == config
    assert "shuttle_bytes = 268435456  # 256 MiB" in render_config(config)


def test_every_setting_can_come_from_each_source(file: Path) -> None:
    config = load()
    lines = render_config(config).splitlines()
    section = ""
    count = 0
    for line in lines:
        if line.startswith("["):
            section = line.strip("[]")
        elif line and not line.startswith("#"):
            name, _, value = line.split("  #")[0].partition(" = ")
            value = value.strip('"')
            assert load("--set", f"{section}.{name}={value}") == config
            assert load(**{f"STRATAD_{section}_{name}".upper(): value}) == config
            count += 1
    fields = msgspec.structs.fields(config)
    sections = [field.name for field in fields if isinstance(getattr(config, field.name), msgspec.Struct)]
    assert len(sections) >= 8
    assert count == sum(len(msgspec.structs.fields(getattr(config, section))) for section in sections)


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("ram.bugdet_bytes", "ram.budget_bytes"),
        ("ram.max_clients", "limits.max_clients"),
        ("budget_bytes", "ram.budget_bytes"),
        ("log.levle", "log.level"),
        ("", "the nearest"),
        ("ram", "the nearest"),
        ("print_config", "the nearest"),
        ("ram.budget_bytes.x", "ram.budget_bytes"),
    ],
)
def test_unknown_keys_name_the_nearest(key: str, nearest: str) -> None:
    assert nearest in refused("--set", f"{key}=1")


def test_unknown_keys_in_the_environment_and_the_file(file: Path) -> None:
    assert "STRATAD_RAM_BUDGET_BYTES" in refused(STRATAD_RAM_BUGDET_BYTES="1")
    file.write_text("[ram]\nbugdet_bytes = 1\n")
    assert "ram.budget_bytes" in refused("--config", str(file))
    file.write_text("[rma]\nbudget_bytes = 1\n")
    assert "ram.budget_bytes" in refused("--config", str(file))
    file.write_text("budget_bytes = 1\n")
    assert "ram.budget_bytes" in refused("--config", str(file))


@pytest.mark.parametrize(
    ("setting", "bound"),
    [
        ("limits.max_clients=0", "at least 1"),
        ("limits.max_clients=many", "a whole number, got text"),
        ("limits.max_clients=1.5", "a whole number"),
        ("limits.max_clients=", "a whole number"),
        ("limits.max_message_bytes=1", "at least 64 KiB"),
        ("limits.max_message_bytes=2GiB", "at most 1 GiB"),
        ("ram.shuttle_bytes=2GiB", "at most 1 GiB"),
        ("ram.shuttle_bytes=64KiB", "at least 128 KiB"),
        ("ram.shuttle_bytes=200000", "multiple of 64 KiB"),
        ("ram.prefault=maybe", "true or false"),
        ("deadlines.stop_s=0", "more than 0"),
        ("deadlines.stop_s=nan", "more than 0"),
        ("deadlines.stop_s=inf", "at most 86400"),
        ("deadlines.stop_s=-1", "more than 0"),
        ("cpu_device.link_bytes_per_s=nan", "at least 0"),
        ("log.level=loud", "one of debug, info, warning, error"),
        ("log.format=xml", "one of text, json"),
        ("daemon.instance=../x", "1 to 32 of a-z 0-9 _ -"),
        ("daemon.instance=", "1 to 32 of a-z 0-9 _ -"),
        ("daemon.run_dir=run", "absolute"),
        ("daemon.state_dir=", "absolute"),
        ("daemon.devices=cuda:0", "UUID"),
        ("copy.chunk_tokens=0", "at least 1"),
        ("ram.budget_bytes=1G", "units: B, KiB, MiB, GiB, TiB"),
        ("ram.budget_bytes=9999TiB", "at most 1024 TiB"),
        ("cpu_device.link_bytes_per_s=1e18", "at most 1e+15"),
        ("testing.worker_faults=x", "worker[#generation]/fault=when"),
    ],
)
def test_bad_values_name_key_value_and_bound(setting: str, bound: str) -> None:
    key, _, value = setting.partition("=")
    text = refused("--set", setting)
    assert key in text
    assert repr(value) in text
    assert bound in text
    assert not set("`\\<>") & set(text), "neither a validator's quotes nor a pattern is for people"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("max_clients = true", "expected a whole number, got"),
        ("max_clients = 5.0", "expected a whole number, got"),
        ("max_clients = '5'", "expected a whole number, got"),
        ("max_clients = [5]", "expected a whole number, got"),
        ("max_message_bytes = true", "expected bytes as a whole number"),
    ],
)
def test_a_file_has_types(file: Path, line: str, problem: str) -> None:
    file.write_text(f"[limits]\n{line}\n")
    text = refused("--config", str(file))
    assert problem in text
    assert str(file) in text


def test_a_list_of_devices(file: Path) -> None:
    uuid = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"
    file.write_text(f"[daemon]\ndevices = ['{uuid}']\n")
    assert load("--config", str(file)).daemon.devices == Devices("uuids", uuids=(uuid,))
    file.write_text("[daemon]\ndevices = 2\n")
    assert "daemon.devices = 2" in refused("--config", str(file))


@pytest.mark.parametrize("content", [None, b"[ram", b"\xff\xfe", b"[ram]\nprefault = 1\nprefault = 2\n"])
def test_a_file_that_cannot_be_read(file: Path, content: bytes | None) -> None:
    if content is not None:
        file.write_bytes(content)
    assert str(file) in refused("--config", str(file))


def test_settings_that_contradict_each_other() -> None:
    assert "copy.slice_bytes" in refused("--set", "copy.slice_bytes=256MiB")
    assert "restarts.backoff_first_s" in refused("--set", "restarts.backoff_first_s=60")


def test_no_directory_to_run_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 7)
    with pytest.raises(ConfigError, match="run-dir"):
        load_config([], {"HOME": "/home/x"})
    assert load_config(["--run-dir", "/r"], {"HOME": "/home/x"}).daemon.run_dir == "/r"


def test_a_run_dir_too_long_for_a_socket() -> None:
    assert "107" in refused("--run-dir", "/" + "x" * 100)


def test_every_setting_is_explained_above_it() -> None:
    config = load()
    lines = render_config(config).splitlines()
    settings = [number for number, line in enumerate(lines) if " = " in line and not line.startswith("#")]
    assert len(settings) == len(MEANINGS)
    for number in settings:
        name = lines[number].partition(" = ")[0]
        assert lines[number - 1].startswith("# ")
        if name.endswith("_s") and not name.endswith("_per_s"):
            assert "second" in lines[number - 1]
        if "_bytes" in name:
            assert "bytes" in lines[number - 1]
    assert "# for tests only" in lines[next(n for n, line in enumerate(lines) if line.startswith("worker_faults")) - 1]


def test_help_explains_every_flag_and_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load("--help")
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert "--devices auto|cpu:N|cuda:all|UUID,..." in out
    words = " ".join(out.split())
    for meaning in ("socket", "outlives", "default: auto", "default: default", "XDG_RUNTIME_DIR", "TOML", "--version"):
        assert meaning in words
    for code in ("0 stopped", "1 cannot start", "2 bad configuration", "3 the instance is served by another daemon"):
        assert code in words
    assert "belongs to another user" in words


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load("--version")
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"stratad {__version__}\n"


@pytest.mark.parametrize("argv", [["--instanc", "x"], ["--nonsense"], ["stray"], ["--set"]])
def test_misspelt_flags_exit(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load(*argv)
    assert caught.value.code == 2
    assert "usage" in capsys.readouterr().err


def test_set_without_a_value() -> None:
    assert "SECTION.KEY=VALUE" in refused("--set", "ram.prefault")


def test_print_config_is_only_remembered() -> None:
    assert load("--print-config").print_config


def test_who_may_use_the_daemon(file: Path) -> None:
    assert load().access == AccessConfig((), ("auto",), ())
    file.write_text('[access]\nusers = ["root", 1001]\ngroups = []\n')
    from_file = load("--config", str(file)).access
    assert from_file == AccessConfig(("root", "1001"), (), ())
    assert load("--set", "access.users=root, 1001", "--set", "access.groups=").access == from_file
    assert load(STRATAD_ACCESS_USERS="root,1001", STRATAD_ACCESS_GROUPS="[]").access == from_file
    assert load("--set", "access.groups=auto,7").access.groups == ("auto", "7")
    text = render_config(load("--config", str(file)))
    assert 'users = ["root", "1001"]' in text
    file.write_text(text)
    assert load("--config", str(file)).access == from_file


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("users=no-such-user", "no user 'no-such-user'"),
        ("admins=root,no-such-user", "no user 'no-such-user'"),
        ("groups=no-such-group", "no group 'no-such-group'"),
        ("users=a,,b", "access.users"),
        ("users=[true]", "access.users"),
        ("users=[", "access.users"),
    ],
)
def test_names_that_cannot_be(setting: str, said: str) -> None:
    assert said in refused("--set", f"access.{setting}")
