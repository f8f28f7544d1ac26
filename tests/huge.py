"""What the tests of huge tensors and their long form share: calls, gradOutput by a formula, what a cell must be."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.lib import format as npy_format
from numpy.typing import NDArray

from poolgrad.core import TensorSpec, plan_adaptive_avg_pool2d_backward, plan_avg_pool2d_backward
from poolgrad.core.executor import Executor

NUMPY: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
EPSILON = {"float32": 2.0**-22, "float16": 2.0**-10, "bfloat16": 2.0**-7}
LEAST = {"float32": 2.0**-149, "float16": 2.0**-25, "bfloat16": 2.0**-133}

PEAK_ENTRY = """
import sys
from poolgrad.cli.start import entry_point
code = entry_point()
with open("/proc/self/status") as status:
    print(next(line.split()[1] for line in status if line.startswith("VmHWM")))
sys.exit(code)
"""
"""Runs a command line and prints the most memory that the process ever had, in kB."""


@dataclass(frozen=True)
class Call:
    """An operator call; without a kernel, adaptive2d."""

    grad_shape: tuple[int, int, int, int]
    shape: tuple[int, int, int, int]
    dtype: str
    kernel: tuple[int, int] | None = None
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    count_include_pad: bool = True

    def __str__(self) -> str:
        operator = "adaptive2d" if self.kernel is None else f"avg2d k{self.kernel}"
        return f"{operator} {self.dtype} {self.shape}".replace(", ", ",")

    def plan(self, **options: Any) -> Executor:
        grad_output, own = TensorSpec(self.grad_shape, self.dtype), TensorSpec(self.shape, self.dtype)
        if self.kernel is None:
            return plan_adaptive_avg_pool2d_backward(grad_output, own, staging=True, **options)
        numbers = (self.kernel, self.stride, self.padding, False, self.count_include_pad)
        return plan_avg_pool2d_backward(grad_output, own, *numbers, staging=True, **options)

    def flags(self) -> list[str]:
        if self.kernel is None:
            return ["adaptive2d"]
        numbers = zip("ksp", (self.kernel, self.stride, self.padding), strict=True)
        flags = [f"-{letter}{pair[0]},{pair[1]}" for letter, pair in numbers]
        return ["avg2d", *flags, *([] if self.count_include_pad else ["--no-count-include-pad"])]

    def expected(self, plane: int, row: int, column: int) -> Fraction:
        """gradInput of one cell, by the definition."""
        total = Fraction(0)
        for (oh, height), (ow, width) in itertools.product(self._windows(0, row), self._windows(1, column)):
            total += Fraction(int(gradient(plane, oh, ow)), height * width)
        return total

    def _windows(self, axis: int, cell: int) -> list[tuple[int, int]]:
        """The windows of an axis that cover a cell, with their divisors."""
        n, m = self.shape[2 + axis], self.grad_shape[2 + axis]
        if self.kernel is None:
            near = range(max(0, cell * m // n - 2), min(m, (cell + 1) * m // n + 3))
            spans = [(o, o * n // m, -((o + 1) * n // -m)) for o in near]
            return [(o, end - start) for o, start, end in spans if start <= cell < end]
        k, s, p = self.kernel[axis], self.stride[axis], self.padding[axis]
        found = []
        for o in range(max(0, (cell + p - k) // s), min(m, (cell + p) // s + 1)):
            start, end = o * s - p, min(o * s - p + k, n + p)
            if start <= cell < end:
                found.append((o, end - start if self.count_include_pad else min(end, n) - max(start, 0)))
        return found

    def check(self, plane: int, row: int, column: int, found: Any) -> None:
        """Compare a cell with the definition."""
        wanted = float(self.expected(plane, row, column))
        cell = f"{self}: cell {(plane, row, column)} is {float(found)}, expected {wanted}"
        assert abs(float(found) - wanted) <= EPSILON[self.dtype] * abs(wanted) + LEAST[self.dtype], cell


def gradient(planes: Any, rows: Any, columns: Any) -> Any:
    """gradOutput by place: integers that every dtype has, so large that a huge window leaves something of them."""
    return 512 * (64 + (planes * 5 + rows * 3 + columns * 7 + rows // 4096 + columns // 4096) % 64)


def stored(values: Any, dtype: str) -> NDArray[Any]:
    """Values as they are stored."""
    return np.asarray(values).astype(np.float32).astype(NUMPY[dtype])


def sparse_npy(path: Path, shape: tuple[int, ...], dtype: str) -> Path:
    """A tensor of zeros that takes no room on most disks."""
    with path.open("wb") as file:
        descr = "<V2" if dtype == "bfloat16" else np.dtype(NUMPY[dtype]).str
        npy_format.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": shape})
        start = file.tell()
        file.truncate(start + TensorSpec(shape, dtype).nbytes)
    return path


def write_gradient(path: Path, call: Call, first: int, count: int) -> None:
    """Put gradOutput's elements [first, first + count), counted over the tensor, into a sparse file."""
    _, _, height, width = call.grad_shape
    item = np.dtype(NUMPY[call.dtype]).itemsize
    numbers = np.arange(first, first + count, dtype=np.int64)
    plane, rest = np.divmod(numbers, height * width)
    values = stored(gradient(plane, *np.divmod(rest, width)), call.dtype)
    descriptor = os.open(path, os.O_WRONLY)
    try:
        start = os.fstat(descriptor).st_size - TensorSpec(call.grad_shape, call.dtype).nbytes
        os.pwrite(descriptor, values.tobytes(), start + first * item)
    finally:
        os.close(descriptor)


B = 2**31
CALLS = [
    Call((1, 4, 1, 1), (1, 4, 32768, 16385), "float16"),
    Call((1, 1, 23171, 23171), (1, 1, 46342, 46342), "float16", (3, 3), (2, 2), (1, 1)),
    Call((1, 1, 1, 1), (1, 1, 1, B), "float16"),
    Call((1, 1, 1, 1), (1, 1, B, 1), "bfloat16"),
    Call((1, 1, 1, 1), (1, 1, 1, B), "bfloat16", (1, B)),
    Call((1, 1, 1, 1), (1, 1, B, 1), "float16", (B, 1)),
    Call((B // 4 + 1, 1, 1, 1), (B // 4 + 1, 1, 2, 2), "bfloat16", (2, 2), (2, 2)),
]
"""More than 2^31 elements, or an axis of 2^31. Run whole by the long form."""
