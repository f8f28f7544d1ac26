"""The tables of cases that several tests share. Knows nothing of poolgrad.core."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from tests.oracle import Pair, Pool, Window, adaptive_windows

Array = NDArray[Any]

NUMPY: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


@dataclass(frozen=True)
class Case:
    """One call: avg2d with a Pool, adaptive2d without."""

    name: str
    self_shape: tuple[int, ...]
    output: Pair
    pool: Pool | None = None

    def __str__(self) -> str:
        return self.name

    @property
    def grad_shape(self) -> tuple[int, ...]:
        return (*self.self_shape[:-2], *self.output)

    def windows(self, axis: int) -> list[Window]:
        cells = self.self_shape[axis - 2]
        if self.pool is None:
            return adaptive_windows(cells, self.output[axis])
        return self.pool.windows(axis, cells)

    @property
    def multiple(self) -> int:
        """With multiples of this in gradOutput every term is an integer."""
        if self.pool is not None and self.pool.divisor_override:
            return abs(self.pool.divisor_override)
        return math.prod(math.lcm(*(window.divisor for window in self.windows(axis))) for axis in (0, 1))

    def with_planes(self, *planes: int) -> Case:
        return Case(self.name, (*planes, *self.self_shape[-2:]), self.output, self.pool)


def avg(name: str, self_shape: tuple[int, ...], *pool: Any, **more: Any) -> Case:
    made = Pool(*pool, **more)
    return Case(name, self_shape, made.output_size((self_shape[-2], self_shape[-1])), made)


def adaptive(name: str, self_shape: tuple[int, ...], output: Pair) -> Case:
    return Case(name, self_shape, output)


def normal(shape: tuple[int, ...], dtype: str, seed: int, scale: float = 1.0) -> Array:
    values = np.random.default_rng(seed).standard_normal(shape) * scale
    return values.astype(np.float32).astype(NUMPY[dtype])


LAYERS = [
    avg("resnet-stem", (2, 3, 20, 20), (3, 3), (2, 2), (1, 1)),
    avg("resnet-stem-ceil", (2, 3, 20, 20), (3, 3), (2, 2), (1, 1), True),
    avg("inception", (2, 3, 9, 9), (3, 3), (1, 1), (1, 1), count_include_pad=False),
    avg("vgg", (2, 3, 14, 14), (2, 2), (2, 2)),
    avg("gaps", (2, 3, 17, 17), (2, 2), (3, 3)),
    avg("gaps-ceil", (2, 3, 16, 19), (2, 3), (3, 4), ceil_mode=True),
    avg("long-range", (1, 2, 24, 25), (17, 16), (1, 1), (8, 8)),
    avg("long-range-strided", (1, 2, 40, 41), (17, 16), (2, 3), (8, 4), True, False),
    avg("phases", (1, 2, 31, 33), (7, 5), (3, 2), (3, 1), True),
    avg("kernel-over-input", (2, 2, 5, 6), (9, 12), (2, 3), (4, 6), True),
    avg("kernel-far-over-input", (2, 2, 7, 7), (1280, 1280), (1280, 1280), ceil_mode=True),
    avg("columns-only", (2, 2, 8, 9), (1, 4), (1, 2), (0, 2)),
    avg("rows-only", (2, 2, 9, 8), (4, 1), (2, 1), (1, 0)),
    avg("negative-divisor", (2, 2, 8, 8), (3, 3), (2, 2), (1, 1), False, False, -7),
    avg("sum-of-windows", (2, 2, 8, 8), (3, 3), (1, 1), (1, 1), False, True, 1),
    avg("rank-3", (4, 11, 13), (3, 2), (2, 2), (1, 1)),
    avg("one-cell", (2, 3, 1, 1), (1, 1), (1, 1)),
    avg("narrow", (8, 16, 7, 7), (3, 3), (1, 1), (1, 1)),
    avg("global", (2, 3, 7, 7), (7, 7), (7, 7)),
    adaptive("adaptive-7x7", (2, 3, 16, 20), (7, 7)),
    adaptive("adaptive-global", (2, 3, 9, 8), (1, 1)),
    adaptive("adaptive-divides", (2, 3, 12, 8), (4, 2)),
    adaptive("adaptive-up", (2, 3, 4, 5), (9, 13)),
    adaptive("adaptive-up-divides", (2, 3, 4, 5), (8, 15)),
    adaptive("adaptive-mixed", (2, 3, 13, 4), (5, 6)),
    adaptive("adaptive-same", (2, 3, 6, 7), (6, 7)),
    adaptive("adaptive-rank-3", (4, 10, 11), (3, 7)),
]
"""One case for every path that a plan can take, as the layers and reports show them."""


def _random_pool(rng: random.Random) -> Pool:
    kernel = rng.randint(1, 7), rng.randint(1, 7)
    return Pool(
        kernel,
        (rng.randint(1, 5), rng.randint(1, 5)),
        (rng.randint(0, kernel[0] // 2), rng.randint(0, kernel[1] // 2)),
        rng.random() < 0.5,
        rng.random() < 0.5,
        rng.choice([0, 0, 0, 1, -1, 3, -255, 2**32]),
    )


def random_cases(count: int, seed: int) -> list[Case]:
    """Legal calls of both operators, the same ones for the same seed."""
    rng = random.Random(seed)
    cases: list[Case] = []
    while len(cases) < count:
        shape = (rng.randint(1, 2), rng.randint(1, 3), rng.randint(1, 14), rng.randint(1, 14))
        if len(cases) % 5 == 4:
            cases.append(Case(f"random-{len(cases)}", shape, (rng.randint(1, 16), rng.randint(1, 16))))
            continue
        pool = _random_pool(rng)
        if min(output := pool.output_size((shape[2], shape[3]))) > 0:
            cases.append(Case(f"random-{len(cases)}", shape, output, pool))
    return cases


@dataclass(frozen=True)
class NumericCase:
    """A call from a public bug report with its right answer, checked by hand and by torch in float64."""

    case: Case
    grad_output: Array
    grad_input: Array

    def __str__(self) -> str:
        return self.case.name


def _numeric_case(record: dict[str, Any]) -> NumericCase:
    grad_output = np.array(record["grad_output"], np.float64)
    pool = None
    if record["op"] == "avg2d":
        kernel, stride, padding = (tuple(record[key]) for key in ("kernel_size", "stride", "padding"))
        flags = record["ceil_mode"], record["count_include_pad"], record["divisor_override"]
        pool = Pool(kernel, stride, padding, *flags)
    height, width = grad_output.shape[-2:]
    case = Case(record["source"], tuple(record["self_shape"]), (height, width), pool)
    return NumericCase(case, grad_output, np.array(record["grad_input"], np.float64))


def _numeric_cases() -> list[NumericCase]:
    text = Path(__file__).with_name("numeric_cases.json").read_text(encoding="utf-8")
    return [_numeric_case(record) for record in json.loads(text)]


NUMERIC = _numeric_cases()
