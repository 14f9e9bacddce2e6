"""What the demo can know to fail before it starts anything: its model, its stages and its device."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Final

from stratad.bench.engines import engine_environment
from stratad.core.registration import STAGE_LIMIT
from stratad.ctl.doctor_host import TORCH_FIX, torch_sees_gpus
from stratad.ctl.exit_codes import ExitCode
from stratad.ctl.output import CommandError
from stratad.engines.libraries import LIBRARIES, LIBRARIES_FIX, missing_libraries
from stratad.engines.models import RANDOM_PREFIX, RANDOM_SHAPES, SMOLLM2

# For a slow line and a busy machine: 93 MB, then a conversion of half a minute.
_MODEL_S: Final = 1200.0
_RANDOM: Final = ", ".join(RANDOM_PREFIX + name for name in RANDOM_SHAPES)
_MODEL_FIX: Final = f"give the folder of a causal model, {SMOLLM2}, or one of {_RANDOM}"
_OFFLINE_FIX: Final = f"without a network: --model {RANDOM_PREFIX}{SMOLLM2}"
# The number of layers, as different families of models call it.
_LAYER_KEYS: Final = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")


def check_stages(stages: int, layers: int | None) -> None:
    """Whether the layers can be split so; `layers` is None while their number is not known.

    Raises:
        CommandError: too few or too many stages.
    """
    if not 1 <= stages <= STAGE_LIMIT:
        fix = f"give --stages 1 to {STAGE_LIMIT}, at most the layers of the model"
        raise CommandError(ExitCode.USAGE, "bad_value", f"--stages must be 1 to {STAGE_LIMIT}, got {stages}", fix)
    if layers is not None and stages > layers:
        what = f"--stages must be at most the model's {layers} layers, got {stages}"
        raise CommandError(ExitCode.USAGE, "bad_value", what, f"give --stages {layers} or fewer, or a larger --model")


def check_libraries(model: str) -> None:
    """Whether what the engine processes stand on is installed.

    Raises:
        CommandError: it is not.
    """
    # The weights of the default model come as GGUF.
    if missing := missing_libraries((*LIBRARIES, "gguf") if model == SMOLLM2 else LIBRARIES):
        what = f"the demo runs a real model, and {' and '.join(missing)} cannot be found"
        raise CommandError(ExitCode.FAILED, "not_installed", what, LIBRARIES_FIX)


def check_cards(cards: int, stages: int, device: str) -> None:
    """Whether so many cards can have the stages.

    Raises:
        CommandError: they cannot.
    """
    if cards < 1 or (cards > 1 and cards != stages):
        what = f"--cards {cards} with --stages {stages}: several cards have one stage each"
        raise CommandError(ExitCode.USAGE, "bad_value", what, "leave --stages out, or give as many")
    if cards > 1 and device == "cpu":
        raise CommandError(ExitCode.USAGE, "bad_value", f"--cards {cards} with --device cpu", "cards are GPUs")


def check_device(device: str, cards: int = 1) -> None:
    """Whether ``cuda`` can be had. Torch is asked in a process of its own: a driver that hangs must not hang us.

    Raises:
        CommandError: torch sees no GPU, or fewer than `cards`.
    """
    if device != "cuda" and cards == 1:
        return
    seen = torch_sees_gpus()
    if not seen.trouble and seen.gpus < cards:
        what = f"--cards {cards}, but torch sees {seen.gpus} GPUs"
        raise CommandError(ExitCode.USAGE, "bad_value", what, "give fewer --cards")
    if seen.trouble:
        asked = "--device cuda" if cards == 1 else f"--cards {cards}"
        less = "--device cpu or --device auto" if cards == 1 else "one --cards"
        raise CommandError(
            ExitCode.USAGE, "bad_value", f"{asked}, but {seen.trouble}", f"give {less}; for GPUs: {TORCH_FIX}"
        )


def layers_of(model: str) -> int | None:
    """Number of layers of the model on a command line; None where only the loaded model could tell.

    Raises:
        CommandError: no such shape or folder, or its configuration cannot be read.
    """
    if model.startswith(RANDOM_PREFIX):
        shape = RANDOM_SHAPES.get(model.removeprefix(RANDOM_PREFIX))
        if shape is None:
            raise _no_model(f"--model {model}: there is no such random model")
        return shape.layers
    return None if model == SMOLLM2 else folder_layers(Path(model))


def folder_layers(folder: Path) -> int | None:
    """Number of layers of the model in a folder; None where its configuration does not say it.

    Raises:
        CommandError: there is no configuration, or it cannot be read.
    """
    if not folder.is_dir():
        raise _no_model(f"--model {folder}: there is no such folder")
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise _no_model(f"--model {folder}: the folder holds no config.json") from None
    except (OSError, ValueError) as exc:
        raise _no_model(f"--model {folder}: its config.json cannot be read: {exc}") from exc
    # Models of several parts keep that of the language model in a table of its own.
    for part in (config, config.get("text_config")) if isinstance(config, dict) else ():
        if isinstance(part, dict):
            for key in _LAYER_KEYS:
                if isinstance(part.get(key), int):
                    return int(part[key])
    return None


def _no_model(what: str) -> CommandError:
    return CommandError(ExitCode.USAGE, "model", what, _MODEL_FIX)


def model_folder(model: str) -> str:
    """What an engine process takes as its model; the weights are got in a process of their own, which may need torch.

    Raises:
        CommandError: they could not be had.
    """
    if model.startswith(RANDOM_PREFIX):
        return model
    command = [sys.executable, "-P", "-m", "stratad.engines.models", "--error-to-stdout", model]
    try:
        done = subprocess.run(
            command,
            env=engine_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            timeout=_MODEL_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        what = f"the model {model} could not be had in {_MODEL_S:g} s"
        raise CommandError(ExitCode.FAILED, "deadline", what, _OFFLINE_FIX) from None
    said = done.stdout.strip()
    if done.returncode != 0 or not said:
        # The message of a `ModelError` ends with what to do.
        what, _, fix = (said or f"it ended with exit status {done.returncode}").rpartition("; ")
        what, fix = (what, fix) if what else (fix, _OFFLINE_FIX)
        raise CommandError(ExitCode.FAILED, "model", f"the model {model} could not be had: {what}", fix)
    return said.splitlines()[-1]
