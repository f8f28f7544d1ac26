"""The one way in which the tests of the operators call poolgrad.core."""

from __future__ import annotations

from typing import Any

from tests.cases import Array, Case
from tests.oracle import Pool

from poolgrad.core import (
    TensorSpec,
    adaptive_avg_pool2d_backward,
    avg_pool2d_backward,
    plan_adaptive_avg_pool2d_backward,
    plan_avg_pool2d_backward,
)


def arguments(pool: Pool) -> tuple[Any, ...]:
    """The Pool's fields in the order of the API."""
    return (
        pool.kernel_size,
        pool.stride,
        pool.padding,
        pool.ceil_mode,
        pool.count_include_pad,
        pool.divisor_override,
    )


def run(case: Case, grad_output: Array, **options: Any) -> Array:
    """The API's answer for a case."""
    own = TensorSpec(case.self_shape, grad_output.dtype)
    if case.pool is None:
        return adaptive_avg_pool2d_backward(grad_output, own, **options)
    return avg_pool2d_backward(grad_output, own, *arguments(case.pool), **options)


def plan(case: Case, dtype: str, **options: Any) -> Any:
    """The API's executor for a case."""
    specs = TensorSpec(case.grad_shape, dtype), TensorSpec(case.self_shape, dtype)
    if case.pool is None:
        return plan_adaptive_avg_pool2d_backward(*specs, **options)
    return plan_avg_pool2d_backward(*specs, *arguments(case.pool), **options)
