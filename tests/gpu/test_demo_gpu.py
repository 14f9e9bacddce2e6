"""A random model on one GPU, split over stages that share it: the whole demo, processes and SIGKILL too."""

import json

import pytest
import torch

from stratad.ctl.exit_codes import ExitCode
from stratad.ctl.main import main

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]


@pytest.mark.parametrize("stages", [2, 4])
def test_conversations_on_one_card_go_on_with_the_same_tokens(stages: int, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "random:smollm2", "--device", "cuda", "--tokens", "2000", "--stages", str(stages)]
    code = main(["demo", *flags, "--json"])
    shown = capsys.readouterr()
    assert code == ExitCode.OK, shown.out[-3000:]
    data = json.loads(shown.out.splitlines()[-1])
    assert data["device"] == "cuda:0"
    assert data["stages"] == stages
    assert data["engine_killed"] is True
    assert data["continued_tokens"] == data["expected_tokens"]
    assert len(set(data["continued_tokens"])) > 10
