"""Kill a run right before and right after every call that makes, fills or renames its file.

    python -m tests.kill_steps DIRECTORY

A process of its own, without threads, that forks for each kill: a start of the interpreter for each would take
ten times as long. Prints a line of JSON for each.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults import Job

from poolgrad.cli.main import run

STEPS = [
    ("open", 1),
    ("posix_fallocate", 1),
    ("pwrite", 1),
    ("pwrite", 2),
    ("pwrite", 5),
    ("link", 1),
    ("link", 2),
    ("replace", 1),
]
"""Which call of the system, and which time."""


def main() -> None:
    """Kill at every step, with and without a name, with and without an old file."""
    job = Job(Path(sys.argv[1]), (1, 3, 64, 64), flags=("--threads", "1", "--workspace-limit", "32KiB"))
    for named, with_old, (call, number), moment in itertools.product(
        (False, True), (False, True), STEPS, ("before", "after")
    ):
        if not hasattr(os, call):
            continue
        job.reset(with_old)
        child = os.fork()
        if child == 0:
            _run_and_die(job, named, call, number, moment)
        _, status = os.waitpid(child, 0)
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        step = {"named": named, "with_old": with_old, "call": call, "number": number, "moment": moment}
        print(json.dumps({**step, "killed": killed, "state": job.state(), "leftovers": job.leftovers()}))


def _run_and_die(job: Job, named: bool, call: str, number: int, moment: str) -> None:
    if named:
        vars(os).pop("O_TMPFILE", None)
    setattr(os, call, _fatal(getattr(os, call), number, moment))
    os._exit(run(job.command))


def _fatal(function: Callable[..., Any], number: int, moment: str) -> Callable[..., Any]:
    left = number

    @functools.wraps(function)
    def fatal(*arguments: Any, **keywords: Any) -> Any:
        nonlocal left
        # Files that are opened for reading are no step of the new one.
        left -= function.__name__ != "open" or bool(arguments[1] & os.O_RDWR)
        counted = left == 0
        if counted and moment == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            return function(*arguments, **keywords)
        finally:
            if counted:
                os.kill(os.getpid(), signal.SIGKILL)

    return fatal


if __name__ == "__main__":
    main()
