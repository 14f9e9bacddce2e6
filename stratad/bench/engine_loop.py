"""Inside the engine process: one model, its slots, and a loop that carries out orders line by line.

It ends with exit status 0 at `Quit` or when its standard input ends (the driver is gone), and never outlives its driver
by more than the order at hand: the kernel sends SIGTERM when the driver dies.
"""

import argparse
import ctypes
import hashlib
import os
import platform
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, assert_never

import msgspec
import torch
import transformers

from stratad import __version__
from stratad.bench.engine_wire import (
    Answer,
    Bye,
    Decode,
    Decoded,
    Encode,
    Encoded,
    Failed,
    Found,
    Generate,
    Generated,
    Lookup,
    Order,
    Park,
    Parked,
    Prefill,
    Prefilled,
    Quit,
    Ready,
    Restore,
    Restored,
)
from stratad.bench.model_split import spread_layers
from stratad.client import Client
from stratad.engines.cache_api import forward
from stratad.engines.kv_planes import token_bytes
from stratad.engines.model_layers import observe_layers
from stratad.engines.models import RANDOM_PREFIX, ModelError, load_dir, random_model, weights_revision
from stratad.engines.transformers import CacheParker
from stratad.errors import StratadError, UsageError

_PR_SET_PDEATHSIG: Final = 1
_CONNECT_S: Final = 60.0
# Stands where the body of a prompt goes while the chat form is rendered; no model's text holds it.
_BODY_MARK: Final = "\u241ebody\u241e"


@dataclass
class Conversation:
    """One conversation in a slot: `tokens` are those in `cache`; `next_token` was chosen and not read yet."""

    slot: int
    cache: transformers.Cache
    tokens: list[int]
    next_token: int


class LanguageEngine:
    """A causal model with slots; with a parker its conversations can leave the process."""

    def __init__(
        self,
        model: transformers.PreTrainedModel,
        tokenizer: "Tokenizer | None",
        parker: CacheParker | None,
        devices: Sequence[torch.device] = (),
    ) -> None:
        """`devices` are those that the model's layers lie on."""
        self._model: Final = model
        self._devices: Final = tuple(devices)
        self._tokenizer: Final = tokenizer
        self._parker: Final = parker
        self._conversations: Final[dict[str, Conversation]] = {}

    def carry_out(self, order: Order) -> Answer:
        """Do what an order says.

        Raises:
            StratadError: the daemon, or a wrong order.
        """
        match order:
            case Encode():
                return Encoded(self._encode(order))
            case Decode():
                return Decoded(self._tokenizer.decode(order.tokens) if self._tokenizer is not None else "")
            case Prefill():
                return self._prefill(order)
            case Generate():
                return self._generate(order)
            case Park():
                return self._park(order)
            case Restore():
                return self._restore(order)
            case Lookup():
                return self._lookup(order)
            case Quit():
                return Bye()
        assert_never(order)

    def _encode(self, order: Encode) -> list[int]:
        if self._tokenizer is None:
            vocabulary = int(self._model.config.vocab_size)
            body, tail = ([byte % vocabulary for byte in text.encode()] for text in (order.body, order.question))
            head: list[int] = []
        else:
            head, body, tail = self._tokenizer.prompt(order.body, order.question)
        room = order.tokens - len(head) - len(tail)
        if room < 1 or not body:
            raise UsageError("bad_tokens", f"{order.tokens} tokens leave no room beside the question's {len(tail)}")
        return [*head, *(body * (room // len(body) + 1))[:room], *tail]

    def _prefill(self, order: Prefill) -> Prefilled:
        self._leave(order.slot)
        cache = transformers.DynamicCache(config=self._model.config)
        started_s = time.perf_counter()
        next_token = int(forward(self._model, order.tokens, cache).argmax())
        prefill_s = time.perf_counter() - started_s
        self._conversations[order.conversation] = Conversation(order.slot, cache, list(order.tokens), next_token)
        return Prefilled(len(order.tokens), prefill_s, next_token)

    def _generate(self, order: Generate) -> Generated:
        conversation = self._conversation(order.conversation)
        hashed, chosen = hashlib.sha256(), []
        started_s = time.perf_counter()
        for _ in range(order.count):
            token = conversation.next_token
            chosen.append(token)
            logits = forward(self._model, [token], conversation.cache)
            conversation.tokens.append(token)
            conversation.next_token = int(logits.argmax())
            hashed.update(logits.cpu().contiguous().view(torch.uint8).numpy().tobytes())
        generate_s = time.perf_counter() - started_s
        signature = _signature(conversation.cache)
        return Generated(chosen, generate_s, conversation.next_token, hashed.hexdigest(), signature)

    def _park(self, order: Park) -> Parked:
        conversation, parker = self._conversation(order.conversation), self._need_parker()
        started_s = time.perf_counter()
        ticket = parker.park(
            order.conversation,
            conversation.cache,
            conversation.tokens,
            slot=conversation.slot,
            deadline_s=order.deadline_s,
        )
        captured = ticket.result()
        capture_s = time.perf_counter() - started_s
        self._leave(conversation.slot)
        return Parked(captured.tokens, captured.image_bytes, capture_s)

    def _restore(self, order: Restore) -> Restored:
        parker = self._need_parker()
        self._leave(order.slot)
        fetch = parker.take if order.take else parker.restore
        started_s = time.perf_counter()
        cache, tokens = fetch(order.conversation, slot=order.slot, deadline_s=order.deadline_s)
        for device in self._devices:
            torch.cuda.synchronize(device)
        restore_s = time.perf_counter() - started_s
        if tokens != len(order.known_tokens):
            raise UsageError("bad_tokens", f"the image holds {tokens} tokens, {len(order.known_tokens)} are known")
        self._conversations[order.conversation] = Conversation(
            order.slot, cache, list(order.known_tokens), order.next_token
        )
        return Restored(tokens, restore_s, _signature(cache))

    def _lookup(self, order: Lookup) -> Found:
        found = self._need_parker().lookup(order.tokens)
        return Found("", 0) if found is None else Found(found.conversation, found.tokens)

    def _conversation(self, name: str) -> Conversation:
        if name not in self._conversations:
            raise UsageError("unknown_conversation", f"no slot holds conversation {name!r}")
        return self._conversations[name]

    def _leave(self, slot: int) -> None:
        """Forget what the slot holds."""
        for name in [name for name, held in self._conversations.items() if held.slot == slot]:
            del self._conversations[name]

    def _need_parker(self) -> CacheParker:
        if self._parker is None:
            raise UsageError("not_registered", "this engine process was started without a daemon")
        return self._parker


def _signature(cache: transformers.Cache) -> str:
    """SHA-256 over the bytes of every layer's keys, values and states."""
    hashed = hashlib.sha256()
    for layer in cache.layers:
        states = [getattr(layer, name, {}).values() for name in ("conv_states", "recurrent_states")]
        held = [
            getattr(layer, "keys", None),
            getattr(layer, "values", None),
            *(state for part in states for state in part),
        ]
        for tensor in held:
            if isinstance(tensor, torch.Tensor):
                hashed.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


class Tokenizer:
    """The tokenizer of a model's folder."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer: Final = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)

    def prompt(self, body: str, question: str) -> tuple[list[int], list[int], list[int]]:
        """Tokens before the body, of the body, and after it, in the model's chat form where it has one."""
        text = f"{_BODY_MARK}\n\n{question}"
        if self._tokenizer.chat_template:
            talk = [{"role": "user", "content": text}]
            text = str(self._tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True))
        head, _, tail = text.partition(_BODY_MARK)
        return self._tokens(head), self._tokens(body), self._tokens(tail)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens."""
        return str(self._tokenizer.decode(list(tokens)))

    def _tokens(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False)) if text else []


def main(arguments: Sequence[str] | None = None) -> int:
    """Load, register, answer `Ready`, then serve orders until told to quit."""
    chosen = _parser().parse_args(arguments)
    _die_with_driver()
    answers = _own_stdout()
    try:
        engine, ready = _start(chosen)
    except (StratadError, ModelError, OSError, RuntimeError) as exc:
        _answer(answers, _failed(exc))
        return 1
    _answer(answers, ready)
    orders = msgspec.json.Decoder(Order)
    with torch.inference_mode():
        for line in sys.stdin.buffer:
            try:
                answer = engine.carry_out(orders.decode(line))
            except Exception as exc:  # noqa: BLE001 - a wrong order must not end the process: the driver decides
                traceback.print_exc()
                answer = _failed(exc)
            _answer(answers, answer)
            if isinstance(answer, Bye):
                break
    return 0


def _start(chosen: argparse.Namespace) -> tuple[LanguageEngine, Ready]:
    started_s = time.perf_counter()
    torch.set_num_threads(chosen.threads or len(os.sched_getaffinity(0)))
    # Said before anything is allocated: a daemon may be holding on to a dead engine's memory.
    client = None if chosen.run_dir is None else Client.connect(chosen.run_dir, chosen.instance, deadline_s=_CONNECT_S)
    dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[chosen.dtype]
    tokenizer = None
    if chosen.model.startswith(RANDOM_PREFIX):
        model = random_model(chosen.model.removeprefix(RANDOM_PREFIX), chosen.seed, dtype)
        revision = f"{chosen.model}:{chosen.seed}"
    else:
        folder = Path(chosen.model)
        model, tokenizer, revision = load_dir(folder, dtype), Tokenizer(folder), weights_revision(folder)
    devices = _devices(chosen.device)
    device = devices[0]
    if device.type != "cpu":
        # Two processes are to come to the same bits: no kernel may sum in whatever order its threads arrive.
        # The fused attention kernels choose their way of summing by what else there is, the plain one does not.
        torch.use_deterministic_algorithms(mode=True, warn_only=True)
        torch.backends.cuda.enable_flash_sdp(enabled=False)
        torch.backends.cuda.enable_mem_efficient_sdp(enabled=False)
        torch.backends.cuda.enable_cudnn_sdp(enabled=False)
    if len(devices) == 1:
        torch.nn.Module.to(model, device)
    else:
        spread_layers(model, devices)
    parker = None
    if client is not None:
        parker = CacheParker.register(
            client,
            model,
            namespace=chosen.namespace,
            revision=revision,
            max_tokens=chosen.max_tokens,
            stages=chosen.stages,
            slots=chosen.slots,
            devices=chosen.devices.split(",") if chosen.devices else (),
            name=f"stratad.bench.engines {chosen.model}",
        )
    ready = Ready(
        pid=os.getpid(),
        model=chosen.model,
        dtype=chosen.dtype,
        device=",".join(map(str, devices)),
        gpu_uuid=",".join(filter(None, map(_gpu_uuid, devices))),
        layers=int(model.config.num_hidden_layers),
        vocabulary=int(model.config.vocab_size),
        token_bytes=token_bytes(observe_layers(model)),
        stages=list(parker.stage_devices) if parker is not None else [],
        hardware=_hardware(model.device),
        threads=torch.get_num_threads(),
        load_s=time.perf_counter() - started_s,
        versions={
            "stratad": __version__,
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "transformers": transformers.__version__,
        },
    )
    on_gpus = devices if device.type == "cuda" else ()
    return LanguageEngine(model, tokenizer, parker, on_gpus), ready


def _devices(names: str) -> list[torch.device]:
    """``auto`` is the first GPU, or the CPU where there is none; several are separated by commas."""
    if names in ("auto", "cuda"):
        names = "cuda:0" if names == "cuda" or torch.cuda.is_available() else "cpu"
    return [torch.device(name) for name in names.split(",")]


def _gpu_uuid(device: torch.device) -> str:
    """How the daemon's configuration names the GPU."""
    return "" if device.type == "cpu" else f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def _hardware(device: torch.device) -> str:
    if device.type != "cpu":
        return torch.cuda.get_device_name(device)
    return f"{len(os.sched_getaffinity(0))} CPU cores, {platform.machine()}"


def _failed(exc: Exception) -> Failed:
    if isinstance(exc, StratadError):
        return Failed(exc.code, exc.message)
    return Failed("engine", f"{type(exc).__name__}: {exc}")


def _own_stdout() -> IO[bytes]:
    """The driver's pipe for answers only: whatever else prints goes to the log."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return answers


def _answer(answers: IO[bytes], answer: Answer) -> None:
    answers.write(msgspec.json.encode(answer) + b"\n")
    answers.flush()


def _die_with_driver() -> None:
    """Have the kernel end us with our driver, also in the middle of a long forward pass."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m stratad.bench.engines", description="an engine process")
    parser.add_argument("--model", required=True, help="folder of a causal model, or random:SHAPE")
    parser.add_argument("--run-dir", type=Path, default=None, help="the daemon's run directory (none: never parks)")
    parser.add_argument("--instance", default="default", help="the daemon's instance")
    parser.add_argument("--stages", type=int, default=2, help="stages that the layers are split over")
    parser.add_argument("--device", default="cpu", help="torch devices of the layers, or auto")
    parser.add_argument("--devices", default="", help="the daemon's device of each stage, separated by commas")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--slots", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=2048, help="tokens that a slot holds")
    parser.add_argument("--namespace", default="bench")
    parser.add_argument("--seed", type=int, default=1, help="of random weights")
    parser.add_argument("--threads", type=int, default=0, help="0: one for each CPU that we may use")
    return parser
