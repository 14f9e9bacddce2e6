"""A random model on one GPU, split over stages that share it, and on several: the whole demo, SIGKILL too."""

import json
from typing import Any

import pytest
import torch

from stratad.ctl.exit_codes import ExitCode
from stratad.ctl.main import main
from tests.gpu.cards import cards

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
SEVERAL = len(cards()) if torch.cuda.is_available() else 0


@pytest.mark.parametrize("stages", [2, 4])
def test_conversations_on_one_card_go_on_with_the_same_tokens(stages: int, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "random:smollm2", "--device", "cuda", "--tokens", "2000", "--stages", str(stages)]
    assert _demo(flags, stages, capsys)["device"] == "cuda:0"


@pytest.mark.skipif(SEVERAL < 2, reason="one GPU")
def test_conversations_on_several_cards_go_on_with_the_same_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "random:smollm2", "--tokens", "2000", "--cards", str(SEVERAL)]
    assert _demo(flags, SEVERAL, capsys)["device"] == ",".join(f"cuda:{card}" for card in range(SEVERAL))


def _demo(flags: list[str], stages: int, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    code = main(["demo", *flags, "--json"])
    shown = capsys.readouterr()
    assert code == ExitCode.OK, shown.out[-3000:]
    data: dict[str, Any] = json.loads(shown.out.splitlines()[-1])
    assert data["stages"] == stages
    assert data["engine_killed"] is True
    assert data["continued_tokens"] == data["expected_tokens"]
    assert len(set(data["continued_tokens"])) > 10
    return data
