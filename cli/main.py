"""The command group, whose commands are loaded when called, and the one error boundary."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import click

from . import __version__, report
from .file_errors import FileError
from .report import Failure

COMMANDS = {
    "avg2d": "gradInput of aclnnAvgPool2dBackward, from files to a file.",
    "adaptive2d": "gradInput of aclnnAdaptiveAvgPool2dBackward, from files to a file.",
    "inspect": "What is in tensor files: names, dtypes, shapes, figures, faults.",
    "products": "What each Ascend product takes, and what cubeMathType means.",
}
"""Each command's name, which is its module's too, and its line in `poolgrad --help`."""

USAGE, UNUSABLE_FILE, BUG = 2, 3, 4
"""Exit codes. A call that the operator's contract rejects counts as usage."""


class Stopped(BaseException):
    """A signal that ends the process; raised, so that temporary files are removed on the way out."""

    def __init__(self, signum: int) -> None:
        """Keep the signal's number."""
        super().__init__(signum)
        self.signum = signum


class LazyGroup(click.Group):
    """Imports a command's module when the command is called, not when its name is listed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Load the command of this name."""
        if cmd_name not in COMMANDS:
            return None
        loaded = importlib.import_module(f".{cmd_name}", __package__).command
        assert isinstance(loaded, click.Command)
        return loaded

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands from the table alone."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def _print_version(ctx: click.Context, _param: click.Parameter, wanted: bool) -> None:
    if not wanted or ctx.resilient_parsing:
        return
    click.echo(f"poolgrad {__version__}")
    ctx.exit()


@click.group(cls=LazyGroup, no_args_is_help=False, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the version.",
)
def main() -> None:
    """Golden gradInput of CANN's 2-D average-pooling backward operators, from tensor files, on a CPU.

    Exit codes: 0 done; 2 usage, or the operator's contract rejects the call; 3 a file cannot be read or
    written; 4 a bug in poolgrad; 130 interrupted; 143 terminated.
    """


def entry_point() -> int:
    """Run the command line of this process; returns the exit code."""
    return run(sys.argv[1:])


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; whatever goes wrong becomes one line."""
    report.harden_streams()
    try:
        with _signals_raise():
            return _invoke(arguments)
    except BrokenPipeError:
        report.abandon_stdout()
        return 0
    except BaseException as error:
        failure = _explain(error)
        report.print_failure(failure, _title(arguments), as_json=_wants_json(arguments))
        return failure.exit_code


def _invoke(arguments: Sequence[str]) -> int:
    # Not click's own main(): it swallows EOFError and prints around an interrupt.
    try:
        with main.make_context("poolgrad", list(arguments)) as context:
            main.invoke(context)
        report.flush_stdout()
    except click.exceptions.Exit as done:
        return done.exit_code
    return 0


def _explain(error: BaseException) -> Failure:
    """The one place that knows what each exception means to the user."""
    match error:
        case click.ClickException():
            return Failure(USAGE, "USAGE", _usage_message(error))
        case KeyboardInterrupt():
            return Failure(128 + signal.SIGINT, "INTERRUPTED", "interrupted")
        case Stopped():
            name = signal.Signals(error.signum).name
            return Failure(128 + error.signum, "TERMINATED", f"terminated by {name}")
        case MemoryError():
            return Failure(UNUSABLE_FILE, "MEMORY", "not enough memory; a --workspace-limit makes it need less")
        case FileError():
            return Failure(UNUSABLE_FILE, "FILE", str(error))
        case OSError():
            return Failure(UNUSABLE_FILE, "FILE", _os_message(error))
    return _explain_refusal(error) or _explain_bug(error)


def _explain_refusal(error: BaseException) -> Failure | None:
    # Imports nothing: an exception whose class was never loaded cannot have been raised.
    status = sys.modules.get("poolgrad.core.status")
    if status is not None and isinstance(error, status.AclnnError):
        return Failure(USAGE, error.status.name, str(error), code=int(error.status))
    return None


def _explain_bug(error: BaseException) -> Failure:
    if os.environ.get("POOLGRAD_DEBUG") == "1":
        import traceback

        report.print_to_stderr("".join(traceback.format_exception(error)))
    message = (
        f"this is a bug in poolgrad, please report it with the command line and what it prints "
        f"with POOLGRAD_DEBUG=1 ({type(error).__name__}: {error})"
    )
    return Failure(BUG, "BUG", message)


def _os_message(error: OSError) -> str:
    reason = error.strerror or str(error) or type(error).__name__
    return reason if error.filename is None else f"{error.filename}: {reason}"


def _usage_message(error: click.ClickException) -> str:
    context = getattr(error, "ctx", None)
    path = context.command_path if context else "poolgrad"
    return f"{error.format_message().rstrip('.')} (see '{path} --help')"


def _title(arguments: Sequence[str]) -> str:
    """What an error line starts with."""
    return f"poolgrad {arguments[0]}" if arguments and arguments[0] in COMMANDS else "poolgrad"


def _wants_json(arguments: Sequence[str]) -> bool:
    """Whether --json was given, also when the command line could not be parsed."""
    flags = list(arguments)
    return "--json" in (flags[: flags.index("--")] if "--" in flags else flags)


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Turn the signals that end a process into exceptions, but for those that the caller ignores (nohup)."""
    names = [name for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    replaced, hook = {}, sys.unraisablehook
    try:
        for signum in [getattr(signal, name) for name in names]:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                replaced[signum] = signal.signal(signum, _stop)
    except ValueError:
        pass  # Not the main thread: the signals are its affair.
    sys.unraisablehook = lambda dropped: _send_again(dropped, hook)
    try:
        yield
    finally:
        sys.unraisablehook = hook
        for signum, handler in replaced.items():
            signal.signal(signum, handler)


def _stop(signum: int, _frame: FrameType | None) -> None:
    # The second signal must not cut short the cleaning up after the first.
    signal.signal(signum, signal.SIG_IGN)
    if signum == signal.SIGINT:
        raise KeyboardInterrupt
    raise Stopped(signum)


def _send_again(dropped: Any, otherwise: Callable[[Any], object]) -> None:
    """Send a signal again whose exception was raised where Python drops it: in a finalizer or a callback."""
    error = dropped.exc_value
    if not isinstance(error, KeyboardInterrupt | Stopped):
        otherwise(dropped)
        return
    import _thread
    import threading

    signum = error.signum if isinstance(error, Stopped) else signal.SIGINT
    signal.signal(signum, _stop)
    # Not from here, where the next exception would be dropped as well.
    threading.Timer(0.01, _thread.interrupt_main, [signum]).start()
