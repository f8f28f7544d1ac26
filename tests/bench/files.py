"""File to file: against reading and writing as many bytes, and against a load, torch, save script."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tests.bench.cases import DTYPES, NUMPY_DTYPES, Case
from tests.bench.measure import Check, Line, Task, alternate
from tests.bench.options import Options
from tests.bench.peers import Peer, load_torch

from poolgrad.cli.main import main as cli

BLOCK = 1 << 20
FILE_CASES = (
    Case((1, 64, 112, 112), 2, 2),
    Case((1, 64, 112, 112), 3, 2, 1),
    Case((1, 256, 56, 56), grid=(6, 6)),
    Case((1, 256, 56, 56), grid=(7, 7)),
)
LIMITS = {"float32": 1.3, "bfloat16": 1.5, "float16": 2.0}


def lines(options: Options) -> Iterator[Line]:
    """A line for every case and dtype: 1 GB of output, 256 MB when quick."""
    peer = load_torch(options.threads)
    for small in FILE_CASES:
        for dtype in DTYPES:
            case = sized(small, dtype, 256_000_000 if options.quick else 1_000_000_000)
            name = f"files: {case.name} {dtype}"
            if options.selects(name):
                with tempfile.TemporaryDirectory(dir=options.directory) as directory:
                    yield _line(name, case, dtype, Path(directory), peer, options)


def sized(case: Case, dtype: str, size: int) -> Case:
    """The case with as many items that gradInput has about `size` bytes."""
    item = int(np.prod(case.shape[1:])) * NUMPY_DTYPES[dtype].itemsize
    return dataclasses.replace(case, shape=(max(1, round(size / item)), *case.shape[1:]))


def write_inputs(case: Case, dtype: str, directory: Path) -> tuple[Path, Path]:
    """gradOutput with values; self with a header and a hole, as nothing reads its values."""
    grad_output, like = directory / "grad_output.npy", directory / "self.npy"
    np.save(grad_output, case.grad_output(dtype))
    write_header(like, case.shape, dtype)
    return grad_output, like


def write_header(path: Path, shape: tuple[int, ...], dtype: str) -> None:
    """A .npy file of zeros that takes no room on the disk."""
    with path.open("wb") as file:
        descr = "<V2" if dtype == "bfloat16" else NUMPY_DTYPES[dtype].str
        header = {"descr": descr, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        file.truncate(file.tell() + int(np.prod(shape, dtype=np.int64)) * NUMPY_DTYPES[dtype].itemsize)


def _line(name: str, case: Case, dtype: str, directory: Path, peer: Peer | None, options: Options) -> Line:
    grad_output, like = write_inputs(case, dtype, directory)
    size = case.elements() * NUMPY_DTYPES[dtype].itemsize
    command = [case.command, str(grad_output), str(like), "-o", str(directory / "out_poolgrad.npy")]
    command += [*case.flags(), "--threads", str(options.threads), "--quiet"]
    tasks: dict[str, Task] = {
        "poolgrad": lambda: cli.main(args=command, standalone_mode=False),
        "floor": lambda: _floor(grad_output, directory / "out_floor.npy", size),
    }
    line = Line("files", name)
    if peer is None:
        line.notes.append("torch: not installed")
    else:
        tasks["script"] = lambda: peer.script(case, grad_output, like, directory / "out_script.npy")
    line.times = alternate(tasks, options.rounds, 60, prepare=lambda: _remove_outputs(directory))
    limit = 3.0 if dtype == "float16" and case.overlaps else LIMITS[dtype]
    line.checks.append(Check("poolgrad/floor", line.ratio("poolgrad", "floor"), at_most=limit))
    if peer is not None:
        line.checks.append(Check("script/poolgrad", line.ratio("script", "poolgrad"), at_least=3))
    return line


def _remove_outputs(directory: Path) -> None:
    for path in directory.glob("out_*"):
        path.unlink()


def _floor(grad_output: Path, target: Path, size: int) -> None:
    """Read gradOutput and write `size` bytes, preallocated, 1 MiB a call."""
    block = memoryview(bytearray(BLOCK))
    with grad_output.open("rb", buffering=0) as source, target.open("wb", buffering=0) as sink:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(sink.fileno(), 0, size)
        to_read, to_write = grad_output.stat().st_size, size
        while to_read > 0 or to_write > 0:
            if to_read > 0:
                to_read -= source.readinto(block) or to_read
            if to_write > 0:
                to_write -= sink.write(block[: min(BLOCK, to_write)])
