"""The rows of the benchmark: operator, shapes and dtype, and tensors for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from poolgrad.core import (
    TensorSpec,
    adaptive_avg_pool2d_backward,
    avg_pool2d_backward,
)

NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
DTYPES = tuple(NUMPY_DTYPES)


@dataclass(frozen=True)
class Case:
    """One call of avg2d (kernel given) or of adaptive2d (grid, the H and W of gradOutput, given)."""

    shape: tuple[int, int, int, int]
    kernel: int | None = None
    stride: int = 1
    padding: int = 0
    ceil_mode: bool = False
    count_include_pad: bool = True
    grid: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        shape = f"({','.join(map(str, self.shape))})"
        if self.grid is not None:
            return f"adaptive2d {shape} from {self.grid[0]}x{self.grid[1]}"
        name = f"avg2d {shape} k{self.kernel} s{self.stride}"
        name += f" p{self.padding}" if self.padding else ""
        name += " ceil" if self.ceil_mode else ""
        return name if self.count_include_pad else name + " not-counted-pad"

    @property
    def overlaps(self) -> bool:
        """Whether some cell gets gradient from more than one window."""
        if self.grid is not None:
            return any(cells % count for cells, count in zip(self.shape[2:], self.grid, strict=True))
        assert self.kernel is not None
        return self.kernel > self.stride

    @property
    def grad_output_shape(self) -> tuple[int, int, int, int]:
        n, c, h, w = self.shape
        if self.grid is not None:
            return (n, c, *self.grid)
        return n, c, self._windows(h), self._windows(w)

    def _windows(self, cells: int) -> int:
        assert self.kernel is not None
        room = cells + 2 * self.padding - self.kernel
        count = (-(-room // self.stride) if self.ceil_mode else room // self.stride) + 1
        if self.ceil_mode and (count - 1) * self.stride >= cells + self.padding:
            count -= 1
        return count

    def elements(self) -> int:
        return int(np.prod(self.shape))

    def grad_output(self, dtype: str) -> NDArray[Any]:
        """Normal values; scaled by 2**-14 for float16, so that it has the small gradients of real dumps."""
        values = np.random.default_rng(0).standard_normal(self.grad_output_shape, dtype=np.float32)
        if dtype == "float16":
            values *= np.float32(2.0**-14)
        return values.astype(NUMPY_DTYPES[dtype])

    def grad_input(self, dtype: str) -> NDArray[Any]:
        """Memory for the result, touched, so that no side pays for its first use."""
        return np.ones(self.shape, NUMPY_DTYPES[dtype])

    def poolgrad(
        self, grad_output: NDArray[Any], out: NDArray[Any], dtype: str, threads: int
    ) -> Callable[[], object]:
        """The call to time."""
        spec = TensorSpec(self.shape, dtype)
        if self.kernel is None:
            return lambda: adaptive_avg_pool2d_backward(grad_output, spec, threads=threads, out=out)
        kernel = self.kernel
        return lambda: avg_pool2d_backward(
            grad_output,
            spec,
            kernel,
            self.stride,
            self.padding,
            self.ceil_mode,
            self.count_include_pad,
            threads=threads,
            out=out,
        )

    def flags(self) -> list[str]:
        """The same call for the command line, without its files."""
        if self.kernel is None:
            return []
        flags = ["-k", str(self.kernel), "-s", str(self.stride), "-p", str(self.padding)]
        flags += ["--ceil-mode"] if self.ceil_mode else []
        return flags if self.count_include_pad else [*flags, "--no-count-include-pad"]

    @property
    def command(self) -> str:
        return "adaptive2d" if self.kernel is None else "avg2d"


MEMORY_CASES = (
    Case((32, 64, 112, 112), 3, 2, 1),
    Case((32, 64, 112, 112), 2, 2),
    Case((32, 256, 56, 56), 3, 1, 1, count_include_pad=False),
    Case((8, 64, 128, 128), 16, 1, 8),
    Case((1, 1, 4096, 4096), 3, 2, 1),
    Case((64, 3, 224, 224), 5, 3, 2, ceil_mode=True),
    Case((32, 2048, 7, 7), 3, 1, 1),
    Case((32, 1024, 14, 14), 2, 2),
    Case((32, 256, 56, 56), grid=(7, 7)),
    Case((32, 256, 56, 56), grid=(1, 1)),
    Case((32, 256, 56, 56), grid=(6, 6)),
    Case((32, 256, 56, 56), grid=(13, 9)),
    Case((32, 256, 56, 56), grid=(28, 28)),
    Case((32, 256, 56, 56), grid=(100, 100)),
)
