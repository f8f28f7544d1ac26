"""Checks of dumped calls: each a job of a batch, with what dump.json says of its tensors; run to one result."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .dump_calls import PoolCall, Unchecked
from .dump_folders import Folder, calls_in
from .dump_json import ArgumentError, TensorRecord
from .failures import explain
from .file_errors import FileError
from .jobs import parse_job, run_job
from .report import SCHEMA
from .tensor_files import OpenTensor, Role, open_tensor

Record = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """The same for all calls. keys: what each job has besides its call; cube_math_type: avg2d's."""

    keys: dict[str, Any]
    cube_math_type: int
    diagnose: bool


@dataclass(frozen=True)
class Check:
    """A call that can be checked; job: its line of a manifest. Plain data, to be sent to other processes."""

    rank: str
    call: PoolCall
    job: dict[str, Any]
    diagnose: bool


@dataclass(frozen=True)
class Skipped:
    """A call that cannot be checked, and why; the call itself, as far as it is known."""

    rank: str
    name: str
    reason: str
    call: PoolCall | None = None


def checks_in(folders: Iterable[Folder], settings: Settings) -> Iterator[Check | Skipped]:
    """Every call of the folders."""
    for folder in folders:
        for one in calls_in(folder):
            if isinstance(one, Unchecked):
                yield Skipped(folder.rank, one.name, one.reason)
                continue
            try:
                yield Check(folder.rank, one, _job(folder, one, settings), settings.diagnose)
            except ArgumentError as error:
                yield Skipped(folder.rank, one.name, str(error), one)


def _job(folder: Folder, call: PoolCall, settings: Settings) -> dict[str, Any]:
    """The line of a manifest that checks a call."""
    _check_records(call)
    grad_output = _stored(folder, call.grad_output, "gradOutput")
    grad_input = _stored(folder, call.grad_input, "gradInput")
    job: dict[str, Any] = {
        "id": f"{folder.rank}/{call.name}",
        "op": call.operator,
        "grad_output": grad_output,
        "self": _self_file(folder, call.self, grad_input),
        "expect": grad_input,
    }
    for name, value in call.parameters.items():
        job[name] = list(value) if isinstance(value, tuple) else value
    if call.operator == "avg2d":
        job["cube_math_type"] = settings.cube_math_type
    if call.self.dtype == "bfloat16" and grad_input.lower().endswith(".npy"):
        job["bf16_widened"] = True
    return {**job, **settings.keys}


def _check_records(call: PoolCall) -> None:
    tensors = {"gradOutput": call.grad_output, "self": call.self, "gradInput": call.grad_input}
    if all(record.file is None for record in tensors.values()):
        raise ArgumentError("its tensors were not stored, as in statistics mode; dump with task tensor")
    if (call.grad_input.shape, call.grad_input.dtype) != (call.self.shape, call.self.dtype):
        raise ArgumentError(f"gradInput is {call.grad_input.text} and self {call.self.text}, expected the same")


def _stored(folder: Folder, record: TensorRecord, role: str) -> str:
    if record.file is None:
        raise ArgumentError(f"{role} was not stored: dump.json has no data_name for it")
    path = os.path.abspath(folder.file(record))
    if not os.path.isfile(path):
        raise ArgumentError(f"the file of {role} is missing: {record.file}")
    return path


def _self_file(folder: Folder, record: TensorRecord, grad_input: str) -> str:
    """self's file; without it gradInput's, which has the same shape and dtype, and no more is asked of self."""
    path = os.path.abspath(folder.file(record)) if record.file is not None else ""
    return path if os.path.isfile(path) else grad_input


# ---- Running


def run_check(check: Check, threads: int = 1) -> Record:
    """What a check finds, an error too. Raises only what ends the process."""
    began = time.perf_counter()
    try:
        found = _run(check, threads)
    except Exception as error:
        found = {"status": "unchecked", "reason": explain(error).message}
    return {
        **_head(check.rank, check.call.name, check.call),
        **found,
        "seconds": round(time.perf_counter() - began, 6),
    }


def skipped_record(skipped: Skipped) -> Record:
    """The result of a call that cannot be checked."""
    head = _head(skipped.rank, skipped.name, skipped.call)
    return {**head, "status": "unchecked", "reason": skipped.reason, "seconds": 0.0}


def lost_record(check: Check, reason: str) -> Record:
    """The result of a check that never came back."""
    return {**_head(check.rank, check.call.name, check.call), "status": "unchecked", "reason": reason, "seconds": 0.0}


def _head(rank: str, name: str, call: PoolCall | None) -> Record:
    head: Record = {"schema": SCHEMA, "rank": rank, "call": name}
    if call is None:
        return head
    tensors = {"grad_output": call.grad_output, "self": call.self, "grad_input": call.grad_input}
    shapes = {role: {"dtype": record.dtype, "shape": list(record.shape)} for role, record in tensors.items()}
    return {**head, "op": call.operator, "tensors": shapes, "parameters": dict(call.parameters)}


def _run(check: Check, threads: int) -> Record:
    _check_files(check)
    result = run_job(parse_job(check.job, Path(".")), threads)
    if result["status"] == "error":
        return {"status": "unchecked", "reason": result["message"]}
    found = {"status": result["status"], "comparison": result["comparison"], "compute_dtype": result["compute_dtype"]}
    if result["status"] == "failed" and check.diagnose:
        found["diagnosis"] = _diagnosis(check, threads)
    return found


def _opened(check: Check, stack: ExitStack) -> list[OpenTensor]:
    """gradOutput, self and the dumped gradInput."""
    widened, roles = check.job.get("bf16_widened", False), ("grad_output", "self", "expect")
    names: dict[str, Role] = {"grad_output": "grad_output", "self": "self", "expect": "grad_input"}
    return [
        stack.enter_context(open_tensor(check.job[role], names[role], bf16_bits=False, bf16_widened=widened))
        for role in roles
    ]


def _check_files(check: Check) -> None:
    """Refuse files that are not what dump.json says: they are of another call, or of another run."""
    call = check.call
    with ExitStack() as stack:
        tensors = _opened(check, stack)
        for tensor, record in zip(tensors, (call.grad_output, call.self, call.grad_input), strict=True):
            if (tensor.spec.shape, tensor.spec.dtype) != (record.shape, record.dtype):
                name = os.path.basename(tensor.path)
                raise FileError(f"{name} holds {tensor.spec}, and dump.json says {record.text}")


def _diagnosis(check: Check, threads: int) -> Record:
    """What diagnose says of a call that failed."""
    from poolgrad.core.diagnosis import Tensors, diagnose
    from poolgrad.core.hypotheses import believed_call

    from .diagnosis_report import sentence

    job = parse_job(check.job, Path("."))
    with ExitStack() as stack:
        grad_output, self, actual = _opened(check, stack)
        tensors = Tensors.checked(grad_output.spec, self.spec, actual.spec, job.common.product)
        believed = believed_call(tensors.adaptive, **job.parameters) if job.op == "avg2d" else tensors.adaptive
        found = diagnose(tensors, grad_output.source(), actual.source(), believed, threads=threads)
        for tensor in (grad_output, self, actual):
            tensor.check_unchanged()
    return {"explained": found.found is not None, "as_believed": found.as_believed, "sentence": sentence(found)}
