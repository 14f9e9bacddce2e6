"""Which devices a benchmark measures: one GPU or several of this host, or `cpu` workers that stand for them."""

import argparse
import re
from dataclasses import dataclass
from typing import Final, Protocol

from stratad.ctl.exit_codes import ExitCode
from stratad.ctl.output import CommandError
from stratad.devices import MAX_CPU_WORKERS

ALL: Final = "all"
ALL_CPU: Final = 4  # `cpu` workers are as many as one likes: these stand for the cards of a host
_FIX: Final = "give how many of the first, `all`, or names such as cuda:0,cuda:2 (on cpu: cpu:0,cpu:1)"
_NAME: Final = re.compile(r"(cuda|cpu):([0-9]{1,4})")


@dataclass(frozen=True)
class Cards:
    """The chosen devices. `names` are what an engine of this process calls them, `uuids` what the daemon does (empty
    on `cpu`); `devices` is the daemon's setting that serves just these.
    """

    names: tuple[str, ...]
    uuids: tuple[str, ...] = ()

    @property
    def on_cuda(self) -> bool:
        """Whether they are GPUs."""
        return bool(self.uuids)

    @property
    def devices(self) -> str:
        """The daemon's ``daemon.devices``."""
        return ",".join(self.uuids) or f"cpu:{len(self.names)}"

    def of_stages(self, stages: int) -> tuple[str, ...]:
        """The device of each stage: in turn, so that as many stages as devices lie one a device."""
        return tuple(self.names[stage % len(self.names)] for stage in range(stages))


class Gpus(Protocol):
    """What is asked of torch."""

    def count(self) -> int:
        """GPUs that this process may see."""
        ...

    def uuid(self, index: int) -> str:
        """UUID of one, as the daemon's configuration spells it."""
        ...


def add_cards_argument(parser: argparse.ArgumentParser, default: str) -> None:
    """``--cards``."""
    parser.add_argument(
        "--cards",
        default=default,
        metavar="N|all|NAME,...",
        help=f"the first N cards, all, or these, such as cuda:0,cuda:2; on cpu: N workers, all: {ALL_CPU} (default: "
        f"{default})",
    )


def chosen_cards(wanted: str, *, on_cuda: bool) -> Cards:
    """The devices that ``--cards`` names, of the one kind or the other.

    Raises:
        CommandError: there are no such devices.
    """
    return choose_cards(wanted, _TorchGpus() if on_cuda else None)


def choose_cards(wanted: str, gpus: Gpus | None) -> Cards:
    """The devices named by ``--cards``, among GPUs, or (None) `cpu` devices.

    Raises:
        CommandError: there are no such devices, or fewer.
    """
    kind = "cpu" if gpus is None else "cuda"
    there = MAX_CPU_WORKERS if gpus is None else gpus.count()
    numbers = _numbers(wanted, kind, there)
    if max(numbers) >= there:
        what = f"--cards {wanted}: there are {there} {kind} devices"
        raise CommandError(ExitCode.USAGE, "foreign_device", what, _FIX)
    names = tuple(f"{kind}:{number}" for number in numbers)
    if gpus is None and numbers != list(range(len(numbers))):
        # A daemon's cpu devices are always numbered from 0.
        what = f"--cards {wanted}: cpu devices are numbered from 0 without gaps"
        raise CommandError(ExitCode.USAGE, "bad_value", what, _FIX)
    return Cards(names, () if gpus is None else tuple(gpus.uuid(number) for number in numbers))


def _numbers(wanted: str, kind: str, there: int) -> list[int]:
    if wanted == ALL:
        return list(range(there if kind == "cuda" else ALL_CPU)) or [0]
    if wanted.isdecimal() and int(wanted) >= 1:
        return list(range(min(int(wanted), there + 1)))  # one more than there are will be refused
    found = [_NAME.fullmatch(part.strip()) for part in wanted.split(",")]
    numbers = [int(match[2]) for match in found if match is not None and match[1] == kind]
    if len(numbers) != len(found) or len(set(numbers)) != len(numbers):
        raise CommandError(ExitCode.USAGE, "bad_value", f"--cards {wanted}: no such {kind} devices", _FIX)
    return numbers


class _TorchGpus:
    """The GPUs that torch sees, which is loaded only here."""

    def count(self) -> int:
        """See `Gpus`.

        Raises:
            CommandError: torch sees none.
        """
        import torch  # noqa: PLC0415 - see above

        if not torch.cuda.is_available():
            what = f"torch {torch.__version__} sees no GPU"
            fix = "see `stratactl doctor --torch`, or use --device cpu"
            raise CommandError(ExitCode.FAILED, "foreign_device", what, fix)
        return torch.cuda.device_count()

    def uuid(self, index: int) -> str:
        """See `Gpus`."""
        import torch  # noqa: PLC0415 - see above

        return f"GPU-{torch.cuda.get_device_properties(index).uuid}"
