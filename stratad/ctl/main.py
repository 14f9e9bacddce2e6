"""Entry point of stratactl: arguments in, one answer out, an exit code that scripts can rely on."""

import argparse
import contextlib
import io
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Protocol, TextIO

from stratad import __version__
from stratad.ctl import exit_codes, values
from stratad.ctl.connection import Connect, DaemonClient, Target, connect_client, connected
from stratad.ctl.exit_codes import ExitCode
from stratad.ctl.lazy import ArgumentsRefused, LazyParser
from stratad.ctl.output import Answer, CommandError, write_answer
from stratad.errors import StratadError
from stratad.paths import SYSTEM_RUN_DIR

DEFAULT_TIMEOUT_S: Final = 5.0
DEFAULT_INSTANCE: Final = "default"
_NAMESPACE_HELP: Final = "as the engine registered it, and `stratactl list` shows it"
Run = Callable[[argparse.Namespace], Answer]
Act = Callable[[DaemonClient, argparse.Namespace], Answer]


def main(argv: Sequence[str] | None = None, connect: Connect = connect_client) -> int:
    """Run one command; returns the exit code, never raises and never prints a traceback.

    `connect` is how a daemon is reached (tests hand in their own).
    """
    words = list(sys.argv[1:] if argv is None else argv)
    as_json = "--json" in words  # whoever asked for JSON gets it also where the rest cannot be parsed
    try:
        args = _parse(words, connect)
        as_json = args.json
        run: Run = args.run
        answer = run(args)
    except SystemExit as exc:  # argparse has printed the help or the version
        return exc.code if isinstance(exc.code, int) else ExitCode.USAGE
    except ArgumentsRefused as exc:
        answer = _refusal(exc)
    except KeyboardInterrupt:
        answer = _failure(CommandError(ExitCode.INTERRUPTED, "interrupted", "interrupted"))
    except CommandError as exc:
        answer = _failure(exc)
    except StratadError as exc:
        answer = _failure(CommandError(ExitCode.FAILED, exc.code, exc.message))
    except Exception as exc:  # noqa: BLE001 - the last border: a person must never be shown a traceback
        answer = _failure(CommandError(ExitCode.FAILED, "internal", f"{type(exc).__name__}: {exc}", "report it"))
    return _finish(answer, as_json=as_json)


def _parse(argv: Sequence[str], connect: Connect) -> argparse.Namespace:
    return build_parser(connect).parse_args(argv)


def _failure(exc: CommandError) -> Answer:
    """An error as an answer: the text goes to stderr, the object to stdout where JSON was asked for."""
    lines = [f"stratactl: {exc.what} [{exc.code}]"]
    if exc.fix:
        lines.append(f"  fix: {exc.fix}")
    error = {"code": exc.code, "message": exc.what, "fix": exc.fix, "exit_code": int(exc.exit_code), **exc.data}
    return Answer(exc.exit_code, lines, {"error": error})


def _refusal(exc: ArgumentsRefused) -> Answer:
    """Wrong arguments: the usage of the command that was called, then the error as any other."""
    fix = f"see `{exc.program} --help`"
    answer = _failure(CommandError(ExitCode.USAGE, "usage", exc.message, fix))
    lines = [*exc.usage.rstrip().splitlines(), f"{exc.program}: error: {exc.message}", f"  fix: {fix}"]
    return Answer(answer.exit_code, lines, answer.data)


def _finish(answer: Answer, *, as_json: bool) -> int:
    """Write the answer; whoever closed stdout early (``| head``) has what they wanted."""
    code = answer.exit_code
    is_error = "error" in answer.data
    try:
        if is_error:
            _write(Answer(code, answer.lines), sys.stderr, as_json=False)
        if as_json or not is_error:
            _write(answer, sys.stdout, as_json=as_json)
    except BrokenPipeError:
        _silence(sys.stdout)
    except OSError as exc:
        _silence(sys.stdout)
        with contextlib.suppress(OSError):
            sys.stderr.write(f"stratactl: output could not be written: {exc.strerror}\n")
        return code or ExitCode.FAILED
    except KeyboardInterrupt:
        _silence(sys.stdout)
        return ExitCode.INTERRUPTED
    return code


def _write(answer: Answer, stream: TextIO | None, *, as_json: bool) -> None:
    """Write to a stream that may not be there (Python has none for a descriptor closed at start)."""
    if stream is None:
        return
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")  # a name may hold what the terminal's encoding lacks
    write_answer(answer, stream, as_json=as_json)


def _silence(stream: TextIO | None) -> None:
    """Point the descriptor at /dev/null, or the interpreter complains at exit about what it cannot flush."""
    if stream is None:
        return
    with contextlib.suppress(OSError, ValueError):
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, stream.fileno())
        os.close(sink)


def build_parser(connect: Connect) -> argparse.ArgumentParser:
    """All subcommands; each sets `run`. Arguments of the large ones are made only when they are called."""
    parser = LazyParser(
        prog="stratactl",
        description="Ask a stratad daemon, or examine the host it runs on.",
        epilog=exit_codes.help_text(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"stratactl {__version__}")
    _add_common(parser)
    parser.set_defaults(run_dir=None, instance=DEFAULT_INSTANCE, timeout=DEFAULT_TIMEOUT_S, json=False)
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=LazyParser)

    def add(name: str, text: str, run: Run, more: str = "") -> argparse.ArgumentParser:
        command = commands.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}. {more}".strip(),
            epilog=exit_codes.help_text(),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            conflict_handler="resolve",
            allow_abbrev=False,
        )
        _add_common(command)
        command.set_defaults(run=run)
        return command

    _add_daemon_commands(add, connect)
    doctor = add(
        "doctor", "examine devices, memory, sockets and packages, with a fix for each trouble", _doctor(connect)
    )
    doctor.add_argument(
        "--config", type=Path, metavar="FILE", help="the daemon's TOML file: must be usable, and names the budget"
    )
    doctor.add_argument("--torch", action="store_true", help="also try torch on the GPUs, in a process of its own")
    command = add(
        "purge",
        "free what a stopped daemon left in /dev/shm: its images are lost",
        _purge,
        "Refused while a daemon serves the instance. Needs the daemon's user or root.",
    )
    command.add_argument("--yes", action="store_true", help="do it; without, only say what there is")
    _lazily(add("demo", "park and restore a real model's conversation", _demo), _demo_arguments)
    _lazily(add("bench", "measure the daemon on this host", _bench), _bench_arguments)
    _lazily(add("fault", "order faults in a daemon that was started to allow it", _fault(connect)), _fault_arguments)
    _lazily(
        add(
            "fault-matrix",
            "every operation, stage and fault in real processes",
            _fault_matrix,
            "In full it takes about 5 minutes on cpu devices,\n"
            "with `--ops capture,restore --kinds error,kill` some seconds. Ended early it shows what it has found.",
        ),
        _fault_matrix_arguments,
    )
    return parser


class Add(Protocol):
    """Adds one command: its name, what it does, what carries it out, and more for its own help."""

    def __call__(self, name: str, text: str, run: Run, more: str = "") -> argparse.ArgumentParser:
        """The command's parser."""
        ...


def _add_common(parser: argparse.ArgumentParser) -> None:
    """The options that stand before or after the command; suppressed defaults let both places work."""
    hide = argparse.SUPPRESS
    run_dir_help = (
        "directory with the daemon's sockets (default: $XDG_RUNTIME_DIR/stratad if a daemon of your own has its "
        f"sockets there, else {SYSTEM_RUN_DIR}, that of the service; for root always the latter)"
    )
    parser.add_argument("--run-dir", type=Path, default=hide, metavar="DIR", help=run_dir_help)
    parser.add_argument("--instance", default=hide, metavar="NAME", help=f"which daemon (default: {DEFAULT_INSTANCE})")
    timeout_help = f"how long the daemon may take to answer (default: {DEFAULT_TIMEOUT_S:g})"
    parser.add_argument("--timeout", type=values.timeout, default=hide, metavar="SECONDS", help=timeout_help)
    parser.add_argument("--json", action="store_true", default=hide, help="print one JSON object, last")


def target_of(args: argparse.Namespace) -> Target:
    """Which daemon the arguments name."""
    return Target(args.run_dir, args.instance, args.timeout)


def _add_daemon_commands(add: Add, connect: Connect) -> None:
    """The commands that ask a running daemon."""

    def with_client(act: Act) -> Run:
        def run(args: argparse.Namespace) -> Answer:
            from stratad.version import package_hash  # noqa: PLC0415 - not needed for --help

            with connected(target_of(args), connect, package_hash()) as client:
                return act(client, args)

        return run

    from stratad.ctl import images, memory, status, trace  # noqa: PLC0415 - keeps this module's import cheap for `main`'s error border

    add("status", "workers, engines, operations, images and memory", with_client(lambda c, _: status.status(c)))
    command = add(
        "memory",
        "what each process has resident, and what of it is explained",
        with_client(lambda c, a: memory.memory(c, history=a.history, shares=a.pss)),
        "Exits with 4 while a process holds more than is explained.",
    )
    command.add_argument(
        "--history", type=values.samples, nargs="?", const=24, default=0, metavar="N", help="also up to N samples (24)"
    )
    command.add_argument(
        "--pss", action="store_true", help="also shares of shared pages, read by stratactl: 7.5 ms a GiB that is mapped"
    )
    trace_command = add(
        "trace",
        "where the time of operations went, step by step",
        with_client(lambda c, a: trace.trace(c, a.switch, last=a.last, slowest=a.slowest, op=a.op)),
        "Operations are recorded while it is on (setting copy.trace).",
    )
    trace.add_arguments(trace_command)
    listing = add("list", "published images", with_client(lambda c, a: images.list_images(c, a.namespace, time.time())))
    listing.add_argument("--namespace", default="", help="only this one (default: all that you may see)")
    command = add(
        "show",
        "one image with its chunks",
        with_client(lambda c, a: images.show(c, a.namespace, a.conversation, time.time(), image_id=a.image)),
        "Of a conversation with several images, one a fingerprint, it is the latest.",
    )
    _name_image(command)
    command = add(
        "drop",
        "drop the images of a conversation",
        with_client(lambda c, a: images.drop(c, a.namespace, a.conversation, force=a.force, image_id=a.image)),
        "All of them, or none while one is pinned.",
    )
    _name_image(command)
    command.add_argument("--force", action="store_true", help="even what is pinned")
    command = add(
        "pin",
        "keep the images of a conversation from eviction",
        with_client(lambda c, a: images.pin(c, a.namespace, a.conversation, pinned=not a.off, image_id=a.image)),
        "The pin is kept when the conversation is captured again.",
    )
    _name_image(command)
    command.add_argument("--off", action="store_true", help="let them be evicted again")
    command = add(
        "lift",
        "serve again what is quarantined",
        with_client(lambda c, a: images.lift(c, a.namespace, a.conversation, image_id=a.image)),
        "A conversation whose copies killed workers twice is refused until then. For admins.",
    )
    _name_image(command, all_of="all of the namespace, engines' slots too")
    _add_worker_commands(add, with_client)
    command = add("clear", "drop all images of a namespace", with_client(lambda c, a: images.clear(c, a.namespace)))
    command.add_argument("namespace", metavar="NAMESPACE", help=_NAMESPACE_HELP)


def _add_worker_commands(add: Add, with_client: Callable[[Act], Run]) -> None:
    from stratad.ctl import workers  # noqa: PLC0415 - see above

    parser = add("worker", "restart or reset a worker", _no_command, "For admins.")
    names = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=LazyParser)

    def order(name: str, text: str, act: Act) -> argparse.ArgumentParser:
        command = names.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            epilog=exit_codes.help_text(),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        _add_common(command)
        command.add_argument("worker", metavar="NAME", help="as `stratactl status` calls it")
        command.set_defaults(run=with_client(act))
        return command

    order(
        "restart",
        "kill a worker's process if there is one, and start the next at once; images stay",
        lambda c, a: workers.restart(c, a.worker),
    )
    reset = order(
        "reset",
        "kill a worker's process if there is one, give its shuttles back, and start the next with an empty arena",
        lambda c, a: workers.reset(c, a.worker, force=a.force),
    )
    reset.add_argument("--force", action="store_true", help="drop the images that lie there")


def _no_command(_args: argparse.Namespace) -> Answer:
    raise AssertionError("the parser requires a subcommand")


def _name_image(parser: argparse.ArgumentParser, all_of: str = "") -> None:
    parser.add_argument("namespace", metavar="NAMESPACE", help=_NAMESPACE_HELP)
    if all_of:
        parser.add_argument("conversation", metavar="CONVERSATION", nargs="?", default="", help=f"default: {all_of}")
    else:
        parser.add_argument("conversation", metavar="CONVERSATION")
    image_help = "only this one of the conversation's images, of which each fingerprint has one (see `stratactl list`)"
    parser.add_argument("--image", type=values.image_id, default=0, metavar="ID", help=image_help)


def _lazily(parser: argparse.ArgumentParser, populate: Callable[[argparse.ArgumentParser], None]) -> None:
    assert isinstance(parser, LazyParser)
    parser.populate = populate


def _doctor(connect: Connect) -> Run:
    def run(args: argparse.Namespace) -> Answer:
        from stratad.ctl.doctor import doctor  # noqa: PLC0415 - only this command needs it

        return doctor(target_of(args), connect, config_file=args.config, try_torch=args.torch)

    return run


def _purge(args: argparse.Namespace) -> Answer:
    from stratad.ctl.purge import purge  # noqa: PLC0415 - only this command needs it

    return purge(args.instance, yes=args.yes)


def _demo_arguments(parser: argparse.ArgumentParser) -> None:
    from stratad.ctl.demo import add_arguments  # noqa: PLC0415 - only this command needs it

    add_arguments(parser)


def _demo(args: argparse.Namespace) -> Answer:
    from stratad.ctl.demo import run_demo  # noqa: PLC0415 - only this command needs it

    return run_demo(args)


def _bench_arguments(parser: argparse.ArgumentParser) -> None:
    from stratad.ctl.bench import add_arguments  # noqa: PLC0415 - only this command needs it

    add_arguments(parser, _add_common)


def _bench(args: argparse.Namespace) -> Answer:
    from stratad.ctl.bench import run_bench  # noqa: PLC0415 - only this command needs it

    return run_bench(args, target_of(args))


def _fault_arguments(parser: argparse.ArgumentParser) -> None:
    from stratad.ctl.faults import add_arguments  # noqa: PLC0415 - only this command needs it

    add_arguments(parser, _add_common)


def _fault(connect: Connect) -> Run:
    def run(args: argparse.Namespace) -> Answer:
        from stratad.ctl.faults import run_fault  # noqa: PLC0415 - only this command needs it

        return run_fault(args, target_of(args), connect)

    return run


def _fault_matrix_arguments(parser: argparse.ArgumentParser) -> None:
    from stratad.ctl.fault_matrix import add_arguments  # noqa: PLC0415 - only this command needs it

    add_arguments(parser)


def _fault_matrix(args: argparse.Namespace) -> Answer:
    from stratad.ctl.fault_matrix import run_fault_matrix  # noqa: PLC0415 - only this command needs it

    return run_fault_matrix(args)
