"""The results of a batch: a line of JSON a job, to stdout or appended to a file; and what such a file tells later."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext

from . import report
from .file_errors import cannot
from .jobs import Job, Result, input_state
from .signals import signals_wait


class ResultsOnStdout:
    """Lines on stdout, each out before the next job ends."""

    @property
    def is_terminal(self) -> bool:
        """Whether a person sees the lines as they come."""
        return sys.stdout is not None and sys.stdout.isatty()

    def whole_lines(self) -> AbstractContextManager[None]:
        """Nothing: whoever reads may keep a line waiting for ever, and a signal must not."""
        return nullcontext()

    def write(self, result: Result) -> None:
        """Write one line."""
        report.write_stdout(_line(result))


class ResultFile:
    """Lines appended to a file."""

    is_terminal = False

    def __init__(self, path: str) -> None:
        self._path = path
        with self._named_errors():
            self._file = open(path, "a+b", buffering=0)  # noqa: SIM115 - `close` is the caller's.
            self._end_torn_line()

    def whole_lines(self) -> AbstractContextManager[None]:
        """Hold signals back meanwhile."""
        return signals_wait()

    def write(self, result: Result) -> None:
        """Write one line."""
        with self._named_errors():
            self._append(_line(result).encode("ascii"))

    def close(self) -> None:
        """Close the file."""
        with self._named_errors():
            self._file.close()

    def _end_torn_line(self) -> None:
        """A line that an earlier process could not end must not spoil the first of this one."""
        if self._file.seek(0, io.SEEK_END) > 0:
            self._file.seek(-1, io.SEEK_END)
            if self._file.read(1) != b"\n":
                self._append(b"\n")

    def _append(self, data: bytes) -> None:
        while data:
            data = data[self._file.write(data) or 0 :]

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise cannot("write", self._path, error) from error


@contextmanager
def open_results(path: str | None) -> Iterator[ResultFile | ResultsOnStdout]:
    """The file of this path, or stdout."""
    if path is None:
        yield ResultsOnStdout()
        return
    with closing(ResultFile(path)) as file:
        yield file


def _line(result: Result) -> str:
    # ASCII, so that undecodable bytes of a path can be told (as lone surrogates).
    return json.dumps(result, separators=(",", ":")) + "\n"


def earlier_results(path: str) -> dict[str, Result]:
    """The last result of each job in a file that may not exist yet, by `result_key`; torn lines are passed over."""
    latest = {}
    for result in _results_in(path):
        latest[result_key(result.get("id"), result.get("job"))] = result
    return latest


def result_key(ident: object, digest: object) -> str:
    """What finds the result of a job again: its id and its digest."""
    return json.dumps([ident, digest])


def _results_in(path: str) -> Iterator[Result]:
    try:
        with open(path, "rb") as file:
            for line in file:
                try:
                    result = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(result, dict):
                    yield result
    except FileNotFoundError:
        return
    except OSError as error:
        raise cannot("read", path, error) from error


def is_done(job: Job, earlier: dict[str, Result]) -> bool:
    """Whether a job need not run again: its result is ok, its inputs are what they were, its output is there."""
    result = earlier.get(result_key(job.id, job.digest))
    if result is None or result.get("status") != "ok":
        return False
    if job.output is not None and not os.path.isfile(job.output):
        return False
    now = [input_state(path) for path in job.inputs]
    return _states(now) == _states(result.get("inputs")) and all(state["bytes"] is not None for state in now)


def _states(inputs: object) -> list[tuple[object, object]] | None:
    if not isinstance(inputs, list) or not all(isinstance(state, dict) for state in inputs):
        return None
    return [(state.get("bytes"), state.get("mtime_ns")) for state in inputs]
