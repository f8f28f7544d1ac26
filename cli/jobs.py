"""A job of a batch: an object of the manifest to what the command of its `op` would be given; its run to one result.

The keys, their types and their defaults are those of the command's flags, so that a flag is known to both.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from .failures import BUG, explain
from .file_errors import FileError, printable, shorten
from .locate import split
from .options import Common, given_judging, take_common
from .report import SCHEMA, Failure

Id = str | int | None
Result = dict[str, Any]
Progress = Callable[[int], None]

OPERATORS = ("avg2d", "adaptive2d")

_KEYS = {"self_tensor": "self", "output": "out"}
"""Keys that are not called as the command's own parameter."""

_NOT_OF_A_JOB = {"threads", "exit_zero", "plot", "as_json", "quiet"}
_PATHS = {"grad_output", "self_tensor", "output", "expect"}


class JobError(click.UsageError):
    """What is wrong with a line of the manifest: `str()` is one line. `ident` is the job's id, if it has one."""

    def __init__(self, message: str, ident: Id = None) -> None:
        super().__init__(printable(message))
        self.ident = ident


@dataclass(frozen=True)
class Job:
    """A call of one of the operators' commands.

    id: as in the manifest; op: the command's name; common, parameters: what the command would be given; digest: tells
    the object in the manifest from others, its id aside.
    """

    id: Id
    op: str
    common: Common
    parameters: dict[str, Any]
    digest: str

    @property
    def title(self) -> str:
        """What messages call it."""
        return f"job {json.dumps(self.id)}" if self.id is not None else "a job without an id"

    @property
    def inputs(self) -> list[str]:
        """The files that it reads, without names of tensors."""
        common = self.common
        return [
            _file_of(text) for text in (common.grad_output, common.self_tensor, common.expect) if text is not None
        ]

    @property
    def output(self) -> str | None:
        """The file that it writes, without the name of a tensor; None when it only compares."""
        return None if self.common.output is None else _file_of(self.common.output)


def _file_of(path_and_name: str) -> str:
    try:
        return split(path_and_name)[0]
    except FileError:
        return path_and_name  # The run will say what is wrong with it.


# ---- Parsing


def parse_job(line: str | dict[str, Any], base: Path) -> Job:
    """The job of one object of a manifest, whose relative paths are relative to `base`. Raises JobError."""
    given = _object(line) if isinstance(line, str) else line
    ident = given.get("id")
    if not (ident is None or (isinstance(ident, str | int) and not isinstance(ident, bool))):
        raise JobError(f"id is {_shown(ident)}, expected text or an integer")
    try:
        return _parse(given, ident, base)
    except JobError as error:
        error.ident = ident
        raise


def _object(line: str) -> dict[str, Any]:
    try:
        given = json.loads(line, object_pairs_hook=_without_repetition)
    except RecursionError:
        raise JobError("not a line of JSON: it is nested too deeply") from None
    except ValueError as error:
        raise JobError(f"not a line of JSON: {error}") from None
    if not isinstance(given, dict):
        raise JobError(f"a job is an object with keys, not {_shown(given)}")
    return given


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    given = dict(pairs)
    if len(given) < len(pairs):
        keys = [key for key, _ in pairs]
        raise JobError(f"the key '{shorten(next(key for key in keys if keys.count(key) > 1))}' is given twice")
    return given


def _parse(given: dict[str, Any], ident: Id, base: Path) -> Job:
    operator = given.get("op")
    if operator not in OPERATORS:
        what = "op is missing" if operator is None else f"op is {_shown(operator)}"
        raise JobError(f"{what}, expected {' or '.join(OPERATORS)}")
    parameters, defaults = _parameters(operator)
    for key in given:
        if key not in parameters and key not in ("id", "op"):
            raise JobError(f"unknown key '{shorten(key)}'; {operator} takes {', '.join(['id', 'op', *parameters])}")
    values = dict(defaults)
    for key, parameter in parameters.items():
        # As in CANN, no integers at all are as good as none given.
        if given.get(key) not in (None, []):
            values[_name(parameter)] = _value(key, given[key], parameter, base)
        elif parameter.required:
            raise JobError(f"{key} is missing")
    common = take_common(values)
    _check_expectation(common)
    written = {key: value for key, value in given.items() if key != "id"}
    digest = hashlib.sha256(json.dumps(written, sort_keys=True).encode()).hexdigest()[:16]
    return Job(ident, operator, common, values, digest)


@functools.cache
def _parameters(operator: str) -> tuple[dict[str, click.Parameter], dict[str, Any]]:
    """What the command takes, by key of the manifest, and what each of its parameters is if not given."""
    command = importlib.import_module(f".{operator}", __package__).command
    assert isinstance(command, click.Command)
    # Resilient parsing is for completion: it gives every default, and no error for what is required.
    defaults = dict(command.make_context(operator, [], resilient_parsing=True).params)
    keyed = {
        _KEYS.get(_name(parameter), _name(parameter)): parameter
        for parameter in command.params
        if _name(parameter) not in _NOT_OF_A_JOB
    }
    return keyed, defaults


def _name(parameter: click.Parameter) -> str:
    assert parameter.name is not None
    return parameter.name


def _value(key: str, value: Any, parameter: click.Parameter, base: Path) -> Any:
    """A value of the manifest as the command would get it from its flag."""
    if isinstance(parameter, click.Option) and parameter.is_flag:
        return _checked(key, value, isinstance(value, bool), "true or false")
    if parameter.type is click.FLOAT:
        return float(_checked(key, value, type(value) in (int, float), "a number"))
    if _name(parameter) in _PATHS:
        _checked(key, value, isinstance(value, str) and value != "", "a path")
        return os.path.join(base, value) if str(base) != "." else value
    try:
        return parameter.type.convert(_text(key, value), parameter, None)
    except click.BadParameter as error:
        raise JobError(f"{key}: {error.message.rstrip('.')}") from error


def _checked(key: str, value: Any, is_right: bool, expected: str) -> Any:
    if not is_right:
        raise JobError(f"{key} is {_shown(value)}, expected {expected}")
    return value


def _text(key: str, value: Any) -> str:
    """What would be typed for a value: integers as they are or in a list, names as they are."""
    if isinstance(value, str):
        return value
    numbers = value if isinstance(value, list) else [value]
    if not all(type(number) is int for number in numbers):
        raise JobError(f"{key} is {_shown(value)}, expected an integer, a list of integers or text")
    return ",".join(map(str, numbers))


def _shown(value: Any) -> str:
    return shorten(json.dumps(value, ensure_ascii=False))


def _check_expectation(common: Common) -> None:
    if common.expect is not None:
        return
    if common.output is None:
        raise JobError("out is missing, and expect as well: a file to write, or one to compare with")
    for name in given_judging(common.judging):
        raise JobError(f"{name} takes expect, a file to compare with")


# ---- Running


class _Workspace(threading.local):
    """One buffer a thread, which grows to what the largest job needs and is used again and again."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def of(self, size: int) -> bytearray:
        """A buffer of at least this many bytes."""
        if len(self._buffer) < size:
            self._buffer = bytearray()  # The old one goes before the new one comes.
            self._buffer = bytearray(size)
        return self._buffer


_workspace = _Workspace()


def run_job(job: Job, threads: int = 1, progress: Progress | None = None) -> Result:
    """Compute a job and return its result, an error too. Raises only what ends the process.

    progress: called now and then with the bytes of gradInput that are done.
    """
    from .comparison_report import job_record, status
    from .run import Resources, compute

    resources = Resources(lambda _total: nullcontext(progress), _workspace.of)
    common = replace(job.common, threads=threads)

    def run() -> tuple[str, dict[str, Any]]:
        outcome, comparison = compute(job.op, common, job.parameters, resources)
        return status(comparison), job_record(outcome, comparison)

    return _result(job, run)


def check_job(job: Job) -> Result:
    """What `run_job` would find out from the headers of the files alone; nothing is computed or written."""
    from .run import check

    return _result(job, lambda: ("ok", check(job.op, job.common, job.parameters)))


def _result(job: Job, run: Callable[[], tuple[str, dict[str, Any]]]) -> Result:
    began = time.perf_counter()
    inputs = [input_state(path) for path in job.inputs]  # From before they are read: a later change shows.
    try:
        status, record = run()
    except Exception as error:
        status, record = "error", failure_record(explain(error))
    seconds = round(time.perf_counter() - began, 6)
    return {
        "schema": SCHEMA,
        "id": job.id,
        "status": status,
        **record,
        "seconds": seconds,
        "inputs": inputs,
        "job": job.digest,
    }


def input_state(path: str) -> dict[str, Any]:
    """What tells whether a file has changed since; without figures where there is no such file."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return {"path": path, "bytes": None, "mtime_ns": None}
    return {"path": path, "bytes": status.st_size, "mtime_ns": status.st_mtime_ns}


def error_result(ident: Id, failure: Failure) -> Result:
    """The result of what is no job."""
    return {"schema": SCHEMA, "id": ident, "status": "error", **failure_record(failure), "seconds": 0.0}


def lost_result(job: Job, reason: str) -> Result:
    """The result of a job whose process is gone."""
    return {**error_result(job.id, Failure(BUG, "WORKER", reason)), "inputs": [], "job": job.digest}


def failure_record(failure: Failure) -> dict[str, Any]:
    """The JSON of an error, but for schema and status."""
    return {"code": failure.code, "name": failure.name, "message": failure.message}


def gradient_bytes(job: Job) -> int:
    """Bytes of its gradInput, or about so many, from self's file; 0 if it cannot be read, which the run reports."""
    from .tensor_files import open_tensor

    path = job.common.self_tensor
    try:
        if path.lower().endswith(".pt"):  # It holds one tensor, and its header takes torch, which is slow to load.
            return os.stat(path).st_size
        with open_tensor(path, "self", job.common.bf16_bits) as self:
            return self.nbytes
    except (FileError, OSError):
        return 0
