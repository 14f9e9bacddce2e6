"""Engines and commands of other users, as real processes under their uids."""

import contextlib
import io
import json
import os
import socket
import stat
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ipc.codec import decode, encode
from ipc.lifeline import Lifeline, LifelineRefused
from ipc.link import Link
from ipc.messages import (
    PROTOCOL_VERSION,
    Acknowledge,
    Cancel,
    Capture,
    Clear,
    Drop,
    Failed,
    Hello,
    ListImages,
    Lookup,
    Mark,
    Pin,
    Release,
    Reply,
    Request,
    Restore,
    Show,
    Stats,
    Unregister,
)
from shm.rows import pack_rows
from shm.shuttle import MOUNT
from stratad.ctl.main import main
from stratad.errors import StratadError, UsageError
from stratad.paths import SocketPaths, socket_paths
from tests.support.daemon import DaemonProcess
from tests.support.engine import FakeEngine, paged_layout, slot_layout
from tests.support.users import Said, other_user, passable, run_as, runtime_for
from tests.support.wait import wait_until

ANNA, BERT, STRANGER, ADA = 65533, 65534, 65532, 65531
GROUP = 65530
LAYOUTS = (slot_layout(), paged_layout(blocks=64))
TOKENS = 300
ROWS: tuple[Sequence[int], Sequence[int]] = (range(TOKENS), range(19))
ALLOWED = {"access.users": f"{ANNA},{BERT}", "access.admins": str(ADA)}

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can be other users"),
    pytest.mark.skipif(not passable(Path(tempfile.gettempdir())), reason="other users cannot get to TMPDIR"),
]


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    """A daemon of root's for Anna, Bert and, as an admin, Ada."""
    with DaemonProcess("cpu:2", settings=ALLOWED, home_mode=0o711) as running:
        yield running


class Raw:
    """A client without the client library: it sends what it wants. `token` None: its own."""

    def __init__(self, paths: SocketPaths, token: bytes | None = None) -> None:
        self.lifeline = Lifeline.connect(paths.life, 5.0)
        self.link = Link.connect(paths.client, max_message_bytes=1 << 24, timeout_s=5.0)
        self.hello = self.ask(Hello(0, PROTOCOL_VERSION, token or self.lifeline.token, "raw"))

    def ask(self, request: Request) -> Reply:
        """The first reply."""
        self.link.send(encode(request), 5.0)
        frame = self.link.recv(10.0)
        assert frame is not None
        reply: Reply = decode(frame, Reply)
        return reply

    def code(self, request: Request) -> str:
        """The code of the refusal; empty where it was served."""
        reply = self.ask(request)
        return reply.code if isinstance(reply, Failed) else ""

    def close(self) -> None:
        """Leave."""
        self.link.close()
        self.lifeline.close()


def paths_of(daemon: DaemonProcess) -> SocketPaths:
    return socket_paths(daemon.run_dir, daemon.instance)


def park_and_return(daemon: DaemonProcess, namespace: str) -> str:
    """An engine's life: capture, lose the bytes, restore; says where bytes differ."""
    with daemon.client() as client, FakeEngine(client, LAYOUTS[:1] * 2, namespace=namespace) as engine:
        expected = engine.contents(ROWS[0], TOKENS)
        engine.capture("a", range(TOKENS), ROWS[0])
        engine.fill()
        assert engine.contents(ROWS[0], TOKENS) != expected
        engine.restore("a", ROWS[0])
        return "equal" if engine.contents(ROWS[0], TOKENS) == expected else "different"


def why_not(daemon: DaemonProcess) -> tuple[str, str]:
    """Code and text with which the client library is refused."""
    with pytest.raises(UsageError) as caught, daemon.client():
        pass
    return caught.value.code, caught.value.message


# --- who is allowed ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("uid", [ANNA, BERT, ADA])
def test_an_engine_of_an_allowed_user_works(daemon: DaemonProcess, uid: int) -> None:
    assert run_as(uid, lambda: park_and_return(daemon, f"works-{uid}")) == "equal"


def test_a_stranger_is_refused_by_a_code_that_says_what_would_help(daemon: DaemonProcess) -> None:
    code, text = run_as(STRANGER, lambda: why_not(daemon), groups=[GROUP])
    assert code == "not_permitted"
    assert f"uid {STRANGER}" in text
    assert "access.users" in text
    assert "access.groups" in text
    with daemon.client() as admin:
        assert admin.stats().counters["peers_refused"] >= 1


@pytest.mark.parametrize(
    ("gid", "groups", "served"),
    [(GROUP, [], True), (STRANGER, [1, GROUP, 7], True), (STRANGER, range(1000, 1400), False), (STRANGER, [], False)],
)
def test_members_of_an_allowed_group(gid: int, groups: Sequence[int], served: bool) -> None:
    """Primary or supplementary, whoever the users are."""
    settings = {"access.groups": f"{GROUP}"}
    with DaemonProcess("cpu:1", settings=settings, home_mode=0o711) as daemon:
        folder = daemon.run_dir / daemon.instance
        assert (stat.S_IMODE(folder.stat().st_mode), folder.stat().st_gid) == (0o750, GROUP)
        for name, mode in (("life.sock", 0o660), ("client.sock", 0o660), ("worker.sock", 0o600)):
            assert stat.S_IMODE((folder / name).stat().st_mode) == mode
        if served:
            assert run_as(STRANGER, lambda: list(connect_only(daemon)), gid=gid, groups=groups) == ["served"]
        else:
            code, text = run_as(STRANGER, lambda: why_not(daemon), gid=gid, groups=groups)
            assert code == "not_permitted"
            assert f"join group {GROUP}" in text


def connect_only(daemon: DaemonProcess) -> Iterator[str]:
    with daemon.client() as client:
        assert client.welcome.admin is False
        yield "served"


def test_more_groups_than_a_short_answer_holds() -> None:
    groups = [*range(1000, 1400), GROUP]
    settings = {"access.groups": f"{GROUP},{GROUP + 1}"}
    with DaemonProcess("cpu:1", settings=settings, home_mode=0o711) as daemon:
        assert run_as(STRANGER, lambda: list(connect_only(daemon)), groups=groups) == ["served"]
        code, text = run_as(STRANGER, lambda: why_not(daemon), groups=groups[:-1])
        assert code == "not_permitted"
        assert f"uid {STRANGER}" in text


def test_the_group_of_the_run_directory_is_allowed_by_default() -> None:
    with DaemonProcess("cpu:1", home_mode=0o711, run_dir_gid=GROUP) as daemon:
        assert run_as(ANNA, lambda: list(connect_only(daemon)), groups=[GROUP]) == ["served"]
        assert run_as(ANNA, lambda: why_not(daemon))[0] == "not_permitted"


def test_users_named_one_by_one_pass_beside_the_group_of_the_run_directory() -> None:
    settings = {"access.users": str(BERT)}
    with DaemonProcess("cpu:1", settings=settings, home_mode=0o711, run_dir_gid=GROUP, run_dir_mode=0o751) as daemon:
        assert run_as(ANNA, lambda: list(connect_only(daemon)), groups=[GROUP]) == ["served"]
        assert run_as(BERT, lambda: list(connect_only(daemon))) == ["served"]
        assert run_as(STRANGER, lambda: why_not(daemon))[0] == "not_permitted"
        assert "cannot get to the sockets" not in daemon.log_path.read_text()


def test_why_auto_is_nobody_stands_in_the_log() -> None:
    with DaemonProcess("cpu:1", home_mode=0o711, run_dir_gid=GROUP, run_dir_mode=0o755) as daemon:
        assert run_as(ANNA, lambda: why_not(daemon), groups=[GROUP])[0] == "not_permitted"
        (line,) = [one for one in daemon.log_path.read_text().splitlines() if "auto means nobody" in one]
    assert "others may do more than pass" in line


def test_by_default_nobody_else_is_allowed() -> None:
    with DaemonProcess("cpu:1", home_mode=0o755) as daemon:
        assert stat.S_IMODE((daemon.run_dir / daemon.instance).stat().st_mode) == 0o700
        code, text = run_as(ANNA, lambda: why_not(daemon), gid=0)
    assert code == "not_permitted"
    assert f"uid {ANNA} may not enter" in text
    assert "access.users" in text


def test_who_gets_through_the_file_permissions_is_still_asked() -> None:
    """The group may enter the run directory, but the settings name nobody."""
    with DaemonProcess("cpu:1", settings={"access.groups": ""}, home_mode=0o711, run_dir_gid=GROUP) as daemon:
        folder = daemon.run_dir / daemon.instance
        folder.chmod(0o755)
        for name in ("life.sock", "client.sock"):
            (folder / name).chmod(0o666)
        code, text = run_as(ANNA, lambda: why_not(daemon), groups=[GROUP])
        assert (code, f"uid {ANNA}" in text) == ("not_permitted", True)


def test_a_flood_of_strangers_costs_one_line_and_no_descriptor(daemon: DaemonProcess) -> None:
    def flood() -> int:
        refused = 0
        for _ in range(600):
            try:
                Lifeline.connect(paths_of(daemon).life, 10.0).close()
            except LifelineRefused as exc:
                refused += exc.code == "not_permitted"
        return refused

    with daemon.client() as client:
        before = client.stats().counters.get("peers_refused", 0)
        descriptors = len(list(Path(f"/proc/{daemon.pid}/fd").iterdir()))
        lines = daemon.log.count(f"uid={STRANGER}")
        assert run_as(STRANGER, flood) == 600
        assert client.stats().counters["peers_refused"] == before + 600
        assert len(list(Path(f"/proc/{daemon.pid}/fd").iterdir())) <= descriptors
        assert daemon.log.count(f"uid={STRANGER}") - lines <= 20


def examine(daemon: DaemonProcess) -> tuple[int, dict[str, Any]]:
    """Exit status and checks of `stratactl doctor`, by name and state."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        arguments = ["doctor", "--json", "--run-dir", str(daemon.run_dir), "--instance", daemon.instance]
        status = main(arguments)
    checks = json.loads(out.getvalue().splitlines()[-1])["checks"]
    return status, {f"{check['name']} {check['state']}": f"{check['what']}; {check['fix']}" for check in checks}


def test_doctor_tells_a_stranger_why_and_what_to_do(daemon: DaemonProcess) -> None:
    _, checks = run_as(STRANGER, lambda: examine(daemon))
    assert f"uid {STRANGER} may not use this daemon" in checks["daemon fail"]
    assert f"STRATAD_ACCESS_USERS={STRANGER}" in checks["daemon fail"]
    # What another user's daemon looks like from here is no trouble of its own.
    assert not {"sockets fail", "lock warn", "run directory warn"} & checks.keys()


def test_doctor_finds_nothing_wrong_with_the_daemon_of_another_user(daemon: DaemonProcess) -> None:
    with daemon.client() as client:
        wait_until(lambda: client.stats().health == "ok")
    _, checks = run_as(ANNA, lambda: examine(daemon))
    assert {"daemon ok", "sockets ok", "lock ok", "run directory ok"} <= checks.keys()


def test_doctor_names_what_keeps_a_stranger_out_of_the_directory() -> None:
    with DaemonProcess("cpu:1", home_mode=0o755) as daemon:
        _, checks = run_as(ANNA, lambda: examine(daemon))
    assert f"uid {ANNA} may not enter" in checks["sockets fail"]
    assert "access.users" in checks["sockets fail"]


# --- one user's things are not another's ------------------------------------------------------------------------------


@pytest.fixture
def annas(daemon: DaemonProcess) -> Iterator[dict[str, Any]]:
    """What is known of an engine of Anna's, which has an image and lives on, its bytes whole at the end."""

    def life(test: Said) -> str:
        with daemon.client() as client, FakeEngine(client, LAYOUTS[:1], namespace="annas") as engine:
            expected = engine.contents(ROWS[0], TOKENS)
            image_id = engine.capture("secret", range(TOKENS), ROWS[0]).image_id
            (number,) = [known.engine_id for known in client.stats().engines if known.pid == os.getpid()]
            with Lifeline.connect(paths_of(daemon).life, 5.0) as unused:
                known = {"engine": number, "image": image_id, "pid": os.getpid()}
                fds = [entry.name for entry in Path("/proc/self/fd").iterdir() if "memfd" in target(entry)]
                test.send(known | {"token": unused.token, "fds": fds})
                test.recv()
            engine.fill()
            engine.restore("secret", ROWS[0])
            client.clear("annas")
            return "equal" if engine.contents(ROWS[0], TOKENS) == expected else "different"

    with other_user(ANNA, life) as anna:
        yield anna.hear()
        anna.tell()
        assert anna.hear() == "equal"


def target(path: Path) -> str:
    try:
        return str(path.readlink())
    except OSError:
        return ""


def test_nobody_touches_the_images_of_another_user(daemon: DaemonProcess, annas: dict[str, Any]) -> None:
    def attempts() -> dict[str, str]:
        raw = Raw(paths_of(daemon))
        requests: dict[str, Request] = {
            "list": ListImages(1, "annas"),
            "show": Show(2, "annas", "secret"),
            "drop": Drop(3, "annas", "secret", force=True),
            "pin": Pin(4, "annas", "secret", pinned=True),
            "clear": Clear(5, "annas"),
        }
        found = {name: raw.code(request) for name, request in requests.items()}
        everything = raw.ask(ListImages(6))
        found["listed"] = repr([image.namespace for image in everything.images])  # type: ignore[union-attr]
        shown = raw.ask(Stats(7))
        found["stats"] = "secret" if "annas" in repr(shown) or "engine fake" in repr(shown) else ""
        raw.close()
        return found

    found = run_as(BERT, attempts)
    assert "annas" not in found.pop("listed")
    assert found.pop("stats") == ""
    assert set(found.values()) == {"not_permitted"}
    assert run_as(BERT, lambda: register_in(daemon, "annas")) == "not_permitted"
    # Only an admin may, Ada as well as root.
    assert run_as(ADA, lambda: [image.conversation for image in list_all(daemon)]) == ["secret"]


def register_in(daemon: DaemonProcess, namespace: str) -> str:
    try:
        with daemon.client() as client, FakeEngine(client, LAYOUTS[:1], namespace=namespace):
            return "registered"
    except StratadError as exc:
        return exc.code


def list_all(daemon: DaemonProcess) -> Sequence[Any]:
    with daemon.client() as client:
        assert client.welcome.admin
        return [image for image in client.list_images() if image.namespace == "annas"]


def test_nobody_uses_the_engine_of_another_user(daemon: DaemonProcess, annas: dict[str, Any]) -> None:
    engine, image = annas["engine"], annas["image"]
    rows, tokens = ((pack_rows([(0, 4)]),),), bytes(16)

    def attempts() -> dict[str, str]:
        raw = Raw(paths_of(daemon))
        requests: dict[str, Request] = {
            "capture": Capture(1, engine, "secret", tokens, rows, 0, "host"),
            "restore": Restore(2, engine, "secret", rows, 0, "host", image),
            "take": Restore(3, engine, "secret", rows, 0, "host", image, take=True),
            "lookup": Lookup(4, engine, tokens),
            "mark": Mark(5, engine, 0, "poisoned"),
            "acknowledge": Acknowledge(6, engine, image),
            "release": Release(7, engine, image),
            "unregister": Unregister(8, engine),
        }
        found = {name: raw.code(request) for name, request in requests.items()}
        found["cancel"] = raw.code(Cancel(9, 1))
        raw.close()
        return found

    found = run_as(BERT, attempts)
    assert found.pop("cancel") == "bad_value"
    assert set(found.values()) == {"not_registered"}


def test_an_image_of_another_user_cannot_be_had_by_its_number(daemon: DaemonProcess, annas: dict[str, Any]) -> None:
    def attempt() -> str:
        with daemon.client() as client, FakeEngine(client, LAYOUTS[:1], namespace="berts") as engine:
            with pytest.raises(StratadError) as caught:
                engine.engine.restore(image_id=annas["image"], rows=ROWS[0]).result()
            return caught.value.code

    assert run_as(BERT, attempt) == "unknown_image"


def test_a_token_serves_only_the_process_whose_lifeline_it_is(daemon: DaemonProcess, annas: dict[str, Any]) -> None:
    def attempt(token: bytes) -> str:
        raw = Raw(paths_of(daemon), token)
        raw.close()
        assert isinstance(raw.hello, Failed)
        return raw.hello.code

    assert run_as(BERT, lambda: attempt(annas["token"])) == "not_permitted"
    assert run_as(ANNA, lambda: attempt(annas["token"])) == "not_permitted"  # the same user, another process
    assert run_as(BERT, lambda: attempt(bytes(16))) == "hello_first"


def test_no_memory_of_the_daemon_or_of_another_engine_can_be_opened(
    daemon: DaemonProcess, annas: dict[str, Any]
) -> None:
    """A published image cannot be written, and another client's memory cannot be mapped, by any client."""
    with daemon.client() as client:
        workers = [worker.pid for worker in client.stats().workers]
    segments = daemon.segments()
    assert [name for name in segments if not name.endswith(".lock")], "the image lies in a segment"
    assert annas["fds"], "Anna's pool is a memfd"
    files = [f"{MOUNT}/{name}" for name in segments]
    files += [f"/proc/{annas['pid']}/fd/{name}" for name in annas["fds"]]
    files += [f"/proc/{pid}/{what}" for pid in [annas["pid"], daemon.pid, *workers] for what in ("mem", "fd/3")]

    def attempts() -> list[str]:
        opened: list[str] = []
        for file in files:
            for flags in (os.O_RDONLY, os.O_RDWR, os.O_WRONLY):
                try:
                    os.close(os.open(file, flags))
                    opened.append(file)
                except PermissionError:
                    pass
            try:
                Path(file).unlink()
                opened.append(f"unlinked {file}")
            except OSError:
                pass
        return opened

    assert run_as(BERT, attempts) == []
    # Not even the engine whose image it is: it has no name for these bytes and no right to them.
    shuttles = [file for file in files if file.startswith(str(MOUNT))]
    assert run_as(ANNA, lambda: [file for file in shuttles if os.access(file, os.R_OK)]) == []


def test_nobody_speaks_as_a_worker(daemon: DaemonProcess) -> None:
    paths = paths_of(daemon)

    def attempt() -> str:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
            try:
                stream.connect(str(paths.worker))
            except PermissionError:
                return "refused"
        return "connected"

    for uid in (ANNA, ADA, STRANGER):
        assert run_as(uid, attempt) == "refused"


def test_only_who_is_allowed_reaches_zeromq(daemon: DaemonProcess) -> None:
    paths = paths_of(daemon)

    def attempt() -> str:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
            try:
                stream.connect(str(paths.client))
            except PermissionError:
                return "refused"
        return "connected"

    assert [run_as(uid, attempt) for uid in (ANNA, ADA)] == ["connected"] * 2
    assert run_as(STRANGER, attempt) == "refused"


def test_a_namespace_is_its_owners_as_long_as_anything_is_in_it(daemon: DaemonProcess) -> None:
    def leave_an_image() -> None:
        with daemon.client() as client, FakeEngine(client, LAYOUTS[:1], namespace="shared") as engine:
            engine.capture("a", range(TOKENS), ROWS[0])

    def clear() -> None:
        with daemon.client() as client:
            client.clear("shared")

    run_as(ANNA, leave_an_image)
    assert run_as(BERT, lambda: register_in(daemon, "shared")) == "not_permitted"
    run_as(ANNA, clear)
    assert run_as(BERT, lambda: register_in(daemon, "shared")) == "registered"


# --- permissions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_modes_do_not_follow_the_umask(umask: int) -> None:
    with DaemonProcess("cpu:1", home_mode=0o755, umask=umask) as daemon, daemon.client() as client:
        wait_until(lambda: client.stats().health == "ok")
        folder = daemon.run_dir / daemon.instance
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (*folder.iterdir(), folder, daemon.state_dir)}
        assert modes == {
            "life.sock": 0o600,
            "client.sock": 0o600,
            "worker.sock": 0o600,
            daemon.instance: 0o700,
            "state": 0o700,
        }
        for name in daemon.segments():
            assert stat.S_IMODE((Path(MOUNT) / name).stat().st_mode) == 0o600


def test_a_run_directory_that_another_user_made_first_is_refused() -> None:
    daemon = DaemonProcess("cpu:1", home_mode=0o755)
    try:
        daemon.run_dir.mkdir()
        (daemon.run_dir / daemon.instance).mkdir()
        os.chown(daemon.run_dir / daemon.instance, STRANGER, STRANGER)
        with pytest.raises(StratadError):
            daemon.start(answers_within_s=3.0)
        assert f"belongs to uid {STRANGER}" in daemon.log
    finally:
        daemon.close()


# --- a daemon that is not root ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("copy", [False, True])
def test_a_daemon_of_an_ordinary_user(copy: bool) -> None:
    """It maps the memory of engines of other users, by descriptor; root is its admin."""
    settings = {"access.users": f"{ANNA}"}
    with (
        runtime_for(BERT, copy=copy) as runtime,
        DaemonProcess("cpu:2", settings=settings, home_mode=0o711, uid=BERT, runtime=runtime) as daemon,
    ):
        assert Path(f"/proc/{daemon.pid}").stat().st_uid == BERT
        assert run_as(ANNA, lambda: park_and_return(daemon, "annas")) == "equal"
        assert run_as(BERT, lambda: park_and_return(daemon, "berts")) == "equal"
        assert run_as(STRANGER, lambda: why_not(daemon))[0] == "not_permitted"
        with daemon.client() as root:
            assert root.welcome.admin
            assert {image.namespace for image in root.list_images()} == {"annas", "berts"}
            assert root.drop("annas", "a") == 1
            engine_pids = {worker.pid for worker in root.stats().workers}
            assert engine_pids <= {memory.pid for memory in root.stats().memory}
            for name in daemon.segments():
                assert (Path(MOUNT) / name).stat().st_uid == BERT
        assert run_as(ANNA, lambda: register_in(daemon, "berts")) == "not_permitted"
