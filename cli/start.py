"""The console script's entry: what a signal does while the rest is imported, and while the process ends.

A short run spends most of its time there, and the interpreter's own answer to an interrupt is a traceback.
Nothing has been written then, or all has: the process can end at once.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType


def entry_point() -> int:
    """Run the command line of this process; returns the exit code."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(signum) is not signal.SIG_IGN:  # As nohup and a shell's background jobs have it.
            signal.signal(signum, _end)
    from .main import run

    return run(sys.argv[1:])


def _end(signum: int, _frame: FrameType | None) -> None:
    what = "interrupted" if signum == signal.SIGINT else "terminated by SIGTERM"
    try:
        os.write(2, f"poolgrad: {what}\n".encode())
    finally:
        os._exit(128 + signum)
