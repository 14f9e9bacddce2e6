"""The engine process of demo, benchmarks and fault tests: a model in a process of its own, driven line by line.

``python -m stratad.bench.engines --model MODEL ...`` is that process (see `stratad.bench.engine_loop`); `EngineProcess`
starts one and talks to it. Nothing here imports torch: a driver stays small, and outlives any engine that it kills.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from stratad.bench.engine_wire import Answer, Ready
from stratad.bench.line_process import EngineError, LineProcess, engine_environment, start_process

__all__ = ["EngineError", "EngineOptions", "EngineProcess", "engine_environment"]


@dataclass(frozen=True)
class EngineOptions:
    """How to start an engine process. Without `run_dir` it knows no daemon and never parks.

    `model` is a folder or ``random:SHAPE``; `device` is ``auto`` or a torch device, or several with commas
    between them, over which the layers are split. `devices` names the daemon's device
    of each stage (default: ``cpu:0``, ``cpu:1``, ...; on a GPU all stages lie on it).
    """

    model: str
    run_dir: Path | None = None
    instance: str = "default"
    stages: int = 2
    device: str = "cpu"
    dtype: str = "bfloat16"
    slots: int = 1
    max_tokens: int = 2048
    namespace: str = "bench"
    seed: int = 1
    threads: int = 0
    devices: Sequence[str] = field(default=())

    def arguments(self) -> list[str]:
        """The command line after the module's name."""
        given = [f"--model={self.model}", f"--instance={self.instance}", f"--stages={self.stages}"]
        given += [f"--device={self.device}", f"--dtype={self.dtype}", f"--slots={self.slots}"]
        given += [f"--max-tokens={self.max_tokens}", f"--namespace={self.namespace}", f"--seed={self.seed}"]
        given += [f"--threads={self.threads}"]
        if self.run_dir is not None:
            given.append(f"--run-dir={self.run_dir}")
        if self.devices:
            given.append(f"--devices={','.join(self.devices)}")
        return given


class EngineProcess(LineProcess):
    """One engine process, owned by whoever started it. Used by one thread."""

    @classmethod
    def start(cls, options: EngineOptions, log: Path) -> Self:
        """Start it and return at once; `ready` waits. Its standard error is appended to `log`."""
        return cls(start_process("stratad.bench.engines", options.arguments(), log), log, Answer)

    def ready(self, deadline_s: float) -> Ready:
        """Wait until the model is loaded (and registered).

        Raises:
            EngineError: it failed, died, or took longer than `deadline_s` seconds.
        """
        return self.answer(Ready, deadline_s)


if __name__ == "__main__":
    from stratad.bench.engine_loop import main

    sys.exit(main())
