"""The one place that knows what each exception means to the user: an exit code, a name, one line."""

from __future__ import annotations

import os
import signal
import sys

import click

from . import report
from .file_errors import FileError
from .report import Failure
from .signals import Stopped

USAGE, UNUSABLE_FILE, BUG = 2, 3, 4
"""Exit codes. A call that the operator's contract rejects counts as usage."""


def explain(error: BaseException) -> Failure:
    """What the user is told of an exception."""
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
    message, context = error.format_message().rstrip("."), getattr(error, "ctx", None)
    return f"{message} (see '{context.command_path} --help')" if context else message
