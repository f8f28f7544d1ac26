"""Signals that end a process, as exceptions: temporary files are removed on the way out."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Stopped(BaseException):
    """A signal that ends the process, other than an interrupt."""

    def __init__(self, signum: int) -> None:
        """Keep the signal's number."""
        super().__init__(signum)
        self.signum = signum


def ending_signals() -> list[signal.Signals]:
    """Those that are to end a process in order, as far as the system has them."""
    return [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


@contextmanager
def signals_raise() -> Iterator[None]:
    """Turn the signals that end a process into exceptions, but for those that the caller ignores (nohup)."""
    replaced, hook = {}, sys.unraisablehook
    try:
        for signum in ending_signals():
            if signal.getsignal(signum) is not signal.SIG_IGN:
                replaced[signum] = signal.signal(signum, stop)
    except ValueError:
        pass  # Not the main thread: the signals are its affair.
    sys.unraisablehook = lambda dropped: _send_again(dropped, hook)
    try:
        yield
    finally:
        sys.unraisablehook = hook
        for signum, handler in replaced.items():
            signal.signal(signum, handler)


@contextmanager
def signals_wait() -> Iterator[None]:
    """Hold back the signals that end a process, where the system can: what is done meanwhile is done as a whole."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ending_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def stop(signum: int, _frame: FrameType | None) -> None:
    """Handle a signal by its exception, once."""
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
    signal.signal(signum, stop)
    # Not from here, where the next exception would be dropped as well.
    threading.Timer(0.01, _thread.interrupt_main, [signum]).start()
