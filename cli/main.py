"""The command group, whose commands are loaded when called, and the one error boundary."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

import click

from . import __version__, report
from .failures import explain
from .signals import signals_raise

COMMANDS = {
    "avg2d": "gradInput of aclnnAvgPool2dBackward, from files to a file.",
    "adaptive2d": "gradInput of aclnnAdaptiveAvgPool2dBackward, from files to a file.",
    "batch": "Many jobs, one line of JSON each, on worker processes.",
    "compare": "Whether one tensor is another, by an accuracy standard, and where not.",
    "diagnose": "Name the cause of a wrong gradInput.",
    "inspect": "What is in tensor files: names, dtypes, shapes, figures, faults.",
    "msprobe": "Check every average pooling in a dump of Ascend's msprobe.",
    "products": "What each Ascend product takes, and what cubeMathType means.",
}
"""Each command's name, which is its module's too, and its line in `poolgrad --help`."""


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

    Exit codes: 0 done; 1 a comparison failed, or a job of a batch; 2 usage, or the operator's contract rejects the
    call; 3 a file cannot be read or written; 4 a bug in poolgrad; 5 diagnose found no explanation; 130 interrupted;
    143 terminated.
    """


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; whatever goes wrong becomes one line."""
    report.harden_streams()
    try:
        with signals_raise():
            return _invoke(arguments)
    except BrokenPipeError:
        report.abandon_stdout()
        return 0
    except BaseException as error:
        failure = explain(error)
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


def _title(arguments: Sequence[str]) -> str:
    """What an error line starts with."""
    return f"poolgrad {arguments[0]}" if arguments and arguments[0] in COMMANDS else "poolgrad"


def _wants_json(arguments: Sequence[str]) -> bool:
    """Whether --json was given, also when the command line could not be parsed."""
    flags = list(arguments)
    return "--json" in (flags[: flags.index("--")] if "--" in flags else flags)
