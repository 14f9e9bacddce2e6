"""``stratactl demo``: a real model's conversation outlives its engine, seen with one's own eyes.

What happens, in this order::

    reference process   reads A, goes on; reads B, goes on          (never parks: what A and B should say)
    daemon              one of its own, in a temporary folder
    engine process 1    reads A, begins the answer, parks A; in the same slot: reads B, begins, parks B
                        SIGKILL
    engine process 2    restores A, goes on; restores B, goes on    (a new process: it has read neither)
"""

import argparse
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final

from stratad.bench.daemon import PrivateDaemon
from stratad.bench.engine_wire import (
    Decode,
    Decoded,
    Encode,
    Encoded,
    Generate,
    Generated,
    Park,
    Parked,
    Prefill,
    Prefilled,
    Ready,
    Restore,
    Restored,
)
from stratad.bench.engines import EngineError, EngineOptions, EngineProcess
from stratad.bench.report import hardware
from stratad.ctl.demo_model import (
    check_cards,
    check_device,
    check_libraries,
    check_stages,
    folder_layers,
    layers_of,
    model_folder,
)
from stratad.ctl.demo_text import FIRST_BODY, FIRST_QUESTION, SECOND_BODY, SECOND_QUESTION
from stratad.ctl.exit_codes import ExitCode
from stratad.ctl.output import Answer, CommandError, JsonObject, human_bytes, table
from stratad.engines.models import RANDOM_PREFIX, SMOLLM2
from stratad.version import commit, package_hash

# Every wait has an end. These are for a slow disk, a large model and a busy machine, not for the usual case.
_LOAD_S: Final = 600.0
_STEP_S: Final = 600.0
_KILLED: Final = -signal.SIGKILL
# Tokens of the answer before the conversation is parked, so that it is parked in the middle of it.
_BEGUN_TOKENS: Final = 8
_LEAST_BUDGET_BYTES: Final = 512 << 20
_LOG_TAIL_LINES: Final = 20
# How many times sooner than by reading its prompt again a conversation goes on.
PROMISED_RATIO: Final = 3.0


@dataclass(frozen=True)
class Settings:
    """What the command line says. `device` is ``auto``, ``cpu`` or ``cuda``; with `cards` above 1 the layers are split
    over so many GPUs.
    """

    model: str
    tokens: int
    stages: int
    device: str
    dtype: str
    continue_tokens: int
    cards: int = 1

    @property
    def engine_device(self) -> str:
        """As an engine process is told it."""
        return self.device if self.cards == 1 else ",".join(f"cuda:{card}" for card in range(self.cards))


@dataclass(frozen=True)
class Talk:
    """One conversation as the reference process held it, which never parked.

    The tokens of its prompt, of the begun answer and of what comes after, and the hash over the logits of the latter.
    """

    name: str
    prompt: list[int]
    begun: list[int]
    expected: list[int]
    logits_sha256: str
    cache_sha256: str = ""


@dataclass(frozen=True)
class Outcome:
    """What became of one conversation that was parked."""

    talk: Talk
    prefilled: Prefilled
    parked: Parked
    restored: Restored
    continued: Generated
    text: str
    parked_sha256: str = ""

    @property
    def identical(self) -> bool:
        """Whether the restored conversation went on with the tokens of the one that was never parked."""
        return self.continued.tokens == self.talk.expected

    @property
    def cache_identical(self) -> bool:
        """Whether the restored cache is, byte for byte, the one that was parked."""
        return self.restored.cache_sha256 == self.parked_sha256

    @property
    def ratio(self) -> float:
        """How many times sooner the restored conversation can go on than one whose prompt is read again."""
        return self.prefilled.prefill_s / self.restored.restore_s


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``stratactl demo``."""
    parser.add_argument(
        "--model",
        default=SMOLLM2,
        help=f"folder of a causal model, {RANDOM_PREFIX}tiny, {RANDOM_PREFIX}smollm2, or {SMOLLM2} (the default: "
        "SmolLM2-135M-Instruct, downloaded and converted once)",
    )
    parser.add_argument("--tokens", type=int, default=1200, help="tokens of each prompt (default: 1200)")
    parser.add_argument("--stages", type=int, help="stages that the layers are split over (default: 2, or --cards)")
    parser.add_argument(
        "--cards",
        type=int,
        default=1,
        help="GPUs that the layers lie on: more than one have one stage each (default: 1)",
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU if there is one")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument(
        "--continue", dest="continue_tokens", type=int, default=40, help="tokens to go on by and compare (default: 40)"
    )


def run_demo(args: argparse.Namespace) -> Answer:
    """Run the whole demo; progress goes to standard error.

    Raises:
        CommandError: it could not be carried out (it was carried out with another outcome: an answer with exit code 1).
    """
    stages = args.stages if args.stages is not None else max(args.cards, 2)
    settings = Settings(args.model, args.tokens, stages, args.device, args.dtype, args.continue_tokens, args.cards)
    check_cards(settings.cards, settings.stages, settings.device)
    for name, value in (("tokens", settings.tokens), ("continue", settings.continue_tokens)):
        if value < 1:
            raise CommandError(ExitCode.USAGE, "bad_value", f"--{name} must be at least 1, got {value}")
    check_stages(settings.stages, layers_of(settings.model))
    check_libraries(settings.model)
    check_device(settings.device, settings.cards)
    with tempfile.TemporaryDirectory(prefix="stratad-demo-") as temp, _terminated_as_interrupted():
        model = model_folder(settings.model)
        if not model.startswith(RANDOM_PREFIX):
            check_stages(settings.stages, folder_layers(Path(model)))
        try:
            return _Demo(settings, model, Path(temp)).run()
        except EngineError as exc:
            raise CommandError(ExitCode.FAILED, exc.code, exc.message) from exc


class _Demo:
    """One run. Every process it starts is ended by the block that started it."""

    def __init__(self, settings: Settings, model: str, folder: Path) -> None:
        self._settings: Final = settings
        self._model: Final = model
        self._log: Final = folder / "engines.log"

    def run(self) -> Answer:
        reference, talks = self._reference()
        devices = reference.gpu_uuid or f"cpu:{self._settings.stages}"
        needed_bytes = 4 * reference.token_bytes * (self._settings.tokens + self._settings.continue_tokens)
        budget_bytes = max(_LEAST_BUDGET_BYTES, needed_bytes)
        _say("starting a daemon of its own")
        with PrivateDaemon.start({"daemon.devices": devices, "ram.budget_bytes": str(budget_bytes)}) as daemon:
            client, _ = daemon.connect()  # where that fails it shows the daemon's log itself
            client.close()
            try:
                first, exit_code, begun = self._park_all(daemon, talks, reference.device)
                second, outcomes = self._restore_all(daemon, talks, begun, reference.device)
            except Exception:
                _show_log(daemon)
                raise
        return conclude(self._settings, reference, (first, second), exit_code, outcomes)

    def _options(self, device: str, daemon: PrivateDaemon | None) -> EngineOptions:
        settings = self._settings
        return EngineOptions(
            model=self._model,
            run_dir=None if daemon is None else daemon.run_dir,
            instance="default" if daemon is None else daemon.instance,
            stages=settings.stages,
            device=device,
            dtype=settings.dtype,
            max_tokens=settings.tokens + _BEGUN_TOKENS + settings.continue_tokens,
            namespace="demo",
        )

    def _reference(self) -> tuple[Ready, list[Talk]]:
        """Both conversations in a process that knows no daemon."""
        _say("the reference: both conversations in a process that never parks")
        with EngineProcess.start(self._options(self._settings.engine_device, None), self._log) as engine:
            ready = engine.ready(_LOAD_S)
            texts = (("A", FIRST_BODY, FIRST_QUESTION), ("B", SECOND_BODY, SECOND_QUESTION))
            talks: list[Talk] = []
            for name, body, question in texts:
                prompt = engine.call(Encode(body, question, self._settings.tokens), Encoded, _STEP_S).tokens
                engine.call(Prefill(name, prompt), Prefilled, _STEP_S)
                begun = engine.call(Generate(name, _BEGUN_TOKENS), Generated, _STEP_S)
                after = engine.call(Generate(name, self._settings.continue_tokens), Generated, _STEP_S)
                talks.append(Talk(name, prompt, begun.tokens, after.tokens, after.logits_sha256, begun.cache_sha256))
            engine.quit()
        return ready, talks

    def _park_all(
        self, daemon: PrivateDaemon, talks: list[Talk], device: str
    ) -> tuple[Ready, int, list[tuple[Prefilled, Generated, Parked]]]:
        """The first engine process: each conversation is read, begun and parked, all in one slot. Then SIGKILL."""
        with EngineProcess.start(self._options(device, daemon), self._log) as engine:
            ready = engine.ready(_LOAD_S)
            begun: list[tuple[Prefilled, Generated, Parked]] = []
            for talk in talks:
                _say(f"engine process {engine.pid}: reads {talk.name} ({len(talk.prompt)} tokens), begins, parks it")
                prefilled = engine.call(Prefill(talk.name, talk.prompt), Prefilled, _STEP_S)
                generated = engine.call(Generate(talk.name, _BEGUN_TOKENS), Generated, _STEP_S)
                begun.append((prefilled, generated, engine.call(Park(talk.name), Parked, _STEP_S)))
            exit_code = engine.kill()
        _say(f"engine process {ready.pid} killed with SIGKILL: exit code {exit_code}")
        return ready, exit_code, begun

    def _restore_all(
        self,
        daemon: PrivateDaemon,
        talks: list[Talk],
        begun: list[tuple[Prefilled, Generated, Parked]],
        device: str,
    ) -> tuple[Ready, list[Outcome]]:
        """The second engine process: each conversation is restored into the slot, and goes on."""
        outcomes: list[Outcome] = []
        with EngineProcess.start(self._options(device, daemon), self._log) as engine:
            ready = engine.ready(_LOAD_S)
            for talk, (prefilled, generated, parked) in zip(talks, begun, strict=True):
                _say(f"engine process {engine.pid}: restores {talk.name} and goes on")
                order = Restore(talk.name, [*talk.prompt, *generated.tokens], generated.next_token)
                restored = engine.call(order, Restored, _STEP_S)
                continued = engine.call(Generate(talk.name, self._settings.continue_tokens), Generated, _STEP_S)
                text = engine.call(Decode([*talk.begun, *continued.tokens]), Decoded, _STEP_S).text
                outcomes.append(Outcome(talk, prefilled, parked, restored, continued, text, generated.cache_sha256))
            engine.quit()
        return ready, outcomes


def conclude(
    settings: Settings, reference: Ready, engines: tuple[Ready, Ready], exit_code: int, outcomes: list[Outcome]
) -> Answer:
    """The table for people and the object for programs; a success only if all is as promised.

    `engines` are the process that parked, which ended with `exit_code`, and the one that restored. The object's own
    figures are those of the first conversation.
    """
    killed = exit_code == _KILLED and engines[0].pid != engines[1].pid
    shown = outcomes[0]
    identical = all(outcome.identical for outcome in outcomes)
    same_bytes = all(outcome.cache_identical for outcome in outcomes)
    lines = [
        "",
        f"model {settings.model}, {reference.dtype}, {reference.layers} layers over {len(engines[1].stages)} stages "
        f"({', '.join(engines[1].stages)}); {reference.hardware}",
        "",
        *table(
            ["conversation", "tokens", "image", "read s", "park s", "restore s", "read/restore", "same tokens"],
            [_row(outcome) for outcome in outcomes],
        ),
        "",
        f"engine process {engines[0].pid} was {'killed with SIGKILL' if killed else 'NOT KILLED'} (exit code "
        f"{exit_code}); process {engines[1].pid}, which has read neither prompt, restored both",
        *(f"{outcome.talk.name} answers: {outcome.text}" for outcome in outcomes if outcome.text),
        _pace(outcomes),
        _verdict(outcomes, killed=killed),
    ]
    data: JsonObject = {
        "model": settings.model,
        "stages": len(engines[1].stages),
        "tokens": shown.restored.tokens,
        "image_bytes": shown.parked.image_bytes,
        "prefill_s": shown.prefilled.prefill_s,
        "capture_s": shown.parked.capture_s,
        "restore_s": shown.restored.restore_s,
        "prefill_over_restore": shown.ratio,
        "engine_killed": killed,
        "continuation_identical": identical,
        "cache_identical": same_bytes,
        "reference_cache_identical": all(o.talk.cache_sha256 == o.parked_sha256 for o in outcomes),
        "logits_identical": all(o.continued.logits_sha256 == o.talk.logits_sha256 for o in outcomes),
        "expected_tokens": shown.talk.expected,
        "continued_tokens": shown.continued.tokens,
        "conversations": [_conversation(outcome) for outcome in outcomes],
        "prompt_tokens": len(shown.talk.prompt),
        "exit_codes": [exit_code],
        "pids": {"reference": reference.pid, "killed": [engines[0].pid], "restored": [engines[1].pid]},
        "device": reference.device,
        "dtype": reference.dtype,
        "hardware": {**hardware(), "engine": reference.hardware, "threads": reference.threads},
        "versions": {**reference.versions, "commit": commit(), "package_hash": package_hash()},
    }
    return Answer(ExitCode.OK if identical and same_bytes and killed else ExitCode.FAILED, lines, data)


def _row(outcome: Outcome) -> list[str]:
    return [
        outcome.talk.name,
        str(outcome.restored.tokens),
        human_bytes(outcome.parked.image_bytes),
        f"{outcome.prefilled.prefill_s:.3f}",
        f"{outcome.parked.capture_s:.3f}",
        f"{outcome.restored.restore_s:.3f}",
        f"{outcome.ratio:.1f}",
        "yes" if outcome.identical else "NO",
    ]


def _conversation(outcome: Outcome) -> JsonObject:
    return {
        "conversation": outcome.talk.name,
        "tokens": outcome.restored.tokens,
        "image_bytes": outcome.parked.image_bytes,
        "prefill_s": outcome.prefilled.prefill_s,
        "capture_s": outcome.parked.capture_s,
        "restore_s": outcome.restored.restore_s,
        "identical": outcome.identical,
        "text": outcome.text,
        "expected_tokens": outcome.talk.expected,
        "continued_tokens": outcome.continued.tokens,
    }


def _pace(outcomes: list[Outcome]) -> str:
    """What people see of the promise about time: it depends on the machine, so it decides nothing."""
    slowest = min(outcome.ratio for outcome in outcomes)
    text = f"restored {slowest:.1f} times sooner than reading the prompt again"
    return text if slowest >= PROMISED_RATIO else f"{text}: LESS than the {PROMISED_RATIO:g} times that are promised"


def _verdict(outcomes: list[Outcome], *, killed: bool) -> str:
    damaged = [outcome.talk.name for outcome in outcomes if not outcome.cache_identical]
    if damaged:
        return f"FAILED: the restored cache of {' and '.join(damaged)} does not have the bytes that were parked"
    wrong = [outcome.talk.name for outcome in outcomes if not outcome.identical]
    if wrong:
        return f"FAILED: {' and '.join(wrong)} did not go on with the tokens of the run that never parked"
    if not killed:
        return "FAILED: the engine process that parked was not killed"
    count = len(outcomes[0].talk.expected)
    return f"both went on with the same {count} tokens as the run that never parked"


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM unwinds as an interrupt does, so that the daemon and the engines are ended too."""

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _say(what: str) -> None:
    print(f"demo: {what}", file=sys.stderr, flush=True)


def _show_log(daemon: PrivateDaemon) -> None:
    """The end of the daemon's log, which is removed with it."""
    try:
        lines = daemon.log_path.read_text(errors="replace").splitlines()
    except OSError:
        return
    for line in lines[-_LOG_TAIL_LINES:]:
        print(f"  daemon | {line}", file=sys.stderr)
