"""A model's conversations through a real daemon, and the demo that shows it."""

import json

import pytest

from stratad.client import Client
from stratad.ctl.exit_codes import ExitCode
from stratad.ctl.main import main
from stratad.engines.transformers import CacheParker
from stratad.errors import UsageError
from tests.support.daemon import DaemonProcess
from tests.support.tiny_models import PROMPT, cache_bytes, go_on, read, tiny_model


def _register(client: Client, revision: str = "r", slots: int = 1) -> CacheParker:
    return CacheParker.register(
        client, tiny_model(), namespace="n", revision=revision, max_tokens=320, stages=2, slots=slots
    )


def test_parked_conversations_go_on_bit_for_bit() -> None:
    """Two conversations through one slot; then another engine of the same model restores both, and takes one."""
    model = tiny_model()
    with DaemonProcess(devices="cpu:2") as daemon:
        expected = {}
        with daemon.client() as client, _register(client) as parker:
            for name, prompt in (("a", PROMPT), ("b", PROMPT[::-1])):
                cache, token = read(model, prompt)
                image = parker.park(name, cache, prompt).result()
                assert (image.tokens, image.image_bytes) == (len(prompt), len(prompt) * parker.token_bytes)
                expected[name] = (token, cache_bytes(cache), go_on(model, cache, token, 8))
        with daemon.client() as client, _register(client, slots=2) as parker:
            for slot, (name, (token, held, continued)) in enumerate(expected.items()):
                restored, tokens = parker.restore(name, slot=slot)
                assert tokens == len(PROMPT)
                assert cache_bytes(restored) == held
                assert go_on(model, restored, token, 8) == continued
            found = parker.lookup([*PROMPT, 5])
            assert found is not None
            assert (found.conversation, found.tokens) == ("a", len(PROMPT))
            taken, _ = parker.take("a")
            assert cache_bytes(taken) == expected["a"][1]
            with pytest.raises(UsageError) as caught:
                parker.restore("a")
            assert caught.value.code == "unknown_conversation"
            short, tokens = parker.restore("b", tokens=70)
            assert tokens == 70
            assert go_on(model, short, 1, 2)[0] == go_on(model, read(model, PROMPT[::-1][:70])[0], 1, 2)[0]


def test_other_weights_find_nothing() -> None:
    """K/V of another revision would be accepted by the model and mean nothing."""
    with DaemonProcess(devices="cpu:2") as daemon:
        with daemon.client() as client, _register(client) as parker:
            cache, _ = read(tiny_model(), PROMPT)
            parker.park("a", cache, PROMPT).result()
        with daemon.client() as client, _register(client, revision="other") as parker:
            assert parker.lookup(PROMPT) is None
            with pytest.raises(UsageError) as caught:
                parker.restore("a")
            assert caught.value.code in {"fingerprint_mismatch", "unknown_conversation"}


@pytest.mark.timeout(180)
def test_the_demo_with_a_random_model(capsys: pytest.CaptureFixture[str]) -> None:
    """All of it, processes and SIGKILL too, but for the real weights."""
    code = main(["demo", "--model", "random:tiny", "--device", "cpu", "--tokens", "1100", "--stages", "3", "--json"])
    shown = capsys.readouterr()
    assert code == ExitCode.OK, shown.err
    data = json.loads(shown.out.splitlines()[-1])
    assert data["engine_killed"] is True
    assert data["exit_codes"] == [-9]
    assert data["pids"]["killed"] != data["pids"]["restored"]
    assert data["continuation_identical"] is True
    assert data["continued_tokens"] == data["expected_tokens"]
    assert len(data["expected_tokens"]) == 40
    assert (data["model"], data["stages"], data["tokens"]) == ("random:tiny", 3, 1108)
    assert data["image_bytes"] == 1108 * 4 * 2 * 2 * 16 * 2
    assert min(data["prefill_s"], data["capture_s"], data["restore_s"]) > 0
