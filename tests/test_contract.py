"""What the operators refuse, and what they take: the contract of CANN, spelled out here on its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from poolgrad.core import (
    AclnnError,
    CubeMathType,
    Product,
    TensorSpec,
    adaptive_avg_pool2d_backward,
    avg_pool2d_backward,
    plan_adaptive_avg_pool2d_backward,
    plan_avg_pool2d_backward,
)

Shape = tuple[int, ...]

INVALID = ("ACLNN_ERR_PARAM_INVALID", 161002)
NULLPTR = ("ACLNN_ERR_PARAM_NULLPTR", 161001)


def refusal(call: Callable[..., Any], *arguments: Any, status: tuple[str, int] = INVALID, **options: Any) -> str:
    """The message of a call that must be refused with a status."""
    with pytest.raises(AclnnError) as caught:
        call(*arguments, **options)
    message = str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert (caught.value.status.name, int(caught.value.status)) == status
    assert message
    assert "\n" not in message
    return message


def avg2d(grad_shape: Shape, self_shape: Shape, *arguments: Any, dtype: str = "float32", **options: Any) -> Any:
    specs = TensorSpec(grad_shape, dtype), TensorSpec(self_shape, dtype)
    return plan_avg_pool2d_backward(*specs, *arguments, **options)


def adaptive2d(grad_shape: Shape, self_shape: Shape, dtype: str = "float32", **options: Any) -> Any:
    return plan_adaptive_avg_pool2d_backward(TensorSpec(grad_shape, dtype), TensorSpec(self_shape, dtype), **options)


def assert_says(message: str, *facts: str) -> None:
    missing = [fact for fact in facts if fact.lower() not in message.lower()]
    assert not missing, f"{message!r} does not say {missing}"


# gradOutput's size


def test_the_flag_that_would_make_it_right_is_named() -> None:
    message = refusal(avg2d, (1, 64, 57, 57), (1, 64, 112, 112), 3, 2, 1)
    assert_says(message, "57x57", "56x56", "112x112", "kernel 3", "stride 2", "padding 1", "--ceil-mode")
    assert avg2d((1, 64, 57, 57), (1, 64, 112, 112), 3, 2, 1, True)
    message = refusal(avg2d, (1, 64, 56, 56), (1, 64, 112, 112), 3, 2, 1, True)
    assert_says(message, "56x56", "57x57", "without --ceil-mode")


@pytest.mark.parametrize(
    ("grad", "own", "arguments", "right"),
    [
        ((1, 1, 3, 3), (1, 1, 8, 8), (3, (3, 4), 0, True), (3, 2)),
        ((1, 16, 3, 3), (1, 16, 4, 4), ((1, 2), 2, (0, 1), True), (2, 3)),
        ((1, 1, 7, 6), (1, 1, 8, 6), ((4, 5), 1, (2, 1)), (9, 4)),
        ((1, 1, 2, 3), (1, 1, 4, 4), (2, 2), (2, 2)),
        ((1, 1, 3, 2), (1, 1, 4, 4), (2, 2), (2, 2)),
        ((3, 7, 7), (3, 4, 4), (2, 2), (2, 2)),
    ],
)
def test_wrong_size_of_grad_output(grad: Shape, own: Shape, arguments: tuple[Any, ...], right: Shape) -> None:
    message = refusal(avg2d, grad, own, *arguments)
    assert_says(message, f"{grad[-2]}x{grad[-1]}", f"{right[0]}x{right[1]}", f"{own[-2]}x{own[-1]}")
    assert avg2d((*grad[:-2], *right), own, *arguments)


def test_swapped_padding_is_explained() -> None:
    message = refusal(avg2d, (1, 1, 7, 6), (1, 1, 8, 6), (4, 5), 1, (2, 1))
    assert_says(message, "9x4", "1,2")


def test_empty_output() -> None:
    message = refusal(avg2d, (1, 1, 1, 1), (1, 1, 7, 7), 1280)
    assert_says(message, "1x1", "1280", "7x7", "--ceil-mode")
    result = avg_pool2d_backward(
        np.ones((1, 1, 1, 1), np.float32), TensorSpec((1, 1, 7, 7), "float32"), 1280, (), 0, True
    )
    assert np.all(result == np.float32(1 / 49))


def test_huge_kernel_without_ceil_is_refused_at_once() -> None:
    assert_says(refusal(avg2d, (1, 1, 1, 1), (1, 1, 7, 7), 1250999896764), "1250999896764", "7x7")


# Kernel, stride, padding


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        (((1, 2), (), (1, 0)), ("padding", "1", "kernel 1", "half")),
        ((3, 1, 2), ("padding", "2", "kernel 3", "half", "at most 1")),
        ((3, 1, 3), ("padding", "3", "kernel 3", "half", "at most 1")),
        (((1, 3), 1, (1, 3)), ("padding", "1", "kernel 1", "half")),
        (((5, 3), 1, (2, 2)), ("padding", "2", "kernel 3", "half")),
        ((3, 0), ("stride", "0")),
        ((3, (1, 0)), ("stride", "1,0")),
        ((3, -2), ("stride", "-2")),
        ((0,), ("kernel", "0")),
        ((-3,), ("kernel", "-3")),
        (((2, 0),), ("kernel", "2,0")),
        ((3, 1, -1), ("padding", "-1")),
        (((2, 2, 2),), ("kernel", "3 integers")),
        ((2, (2, 2, 2)), ("stride", "3 integers")),
        ((2, 2, (0, 0, 0)), ("padding", "3 integers")),
        (((),), ("kernel", "no integers")),
        ((2, 2, ()), ("padding", "no integers")),
        ((2.5,), ("kernel", "2.5", "integers")),
        (((2, "2"),), ("kernel", "integers")),
        (("22",), ("kernel", "22", "integers")),
        ((2, 2.0), ("stride", "2.0", "integers")),
        ((2**63,), ("kernel", str(2**63))),
        ((2, 2**64), ("stride", str(2**64))),
    ],
)
def test_illegal_kernel_stride_padding(arguments: tuple[Any, ...], facts: tuple[str, ...]) -> None:
    assert_says(refusal(avg2d, (1, 4, 2, 2), (1, 4, 4, 4), *arguments), *facts)


# Tensors

BOTH = [avg2d, adaptive2d]


def _call(operator: Callable[..., Any], grad: Shape, own: Shape, **options: Any) -> Callable[[], Any]:
    more = (2,) if operator is avg2d else ()
    return lambda: operator(grad, own, *more, **options)


@pytest.mark.parametrize("operator", BOTH)
@pytest.mark.parametrize(
    ("grad", "own", "facts"),
    [
        ((1, 3, 2, 2), (2, 3, 4, 4), ("N", "1", "2")),
        ((2, 1, 2, 2), (2, 3, 4, 4), ("C", "1", "3")),
        ((3, 2, 2), (2, 3, 4, 4), ("rank", "3", "4")),
        ((2, 3, 2, 2), (3, 4, 4), ("rank", "4", "3")),
        ((2, 2, 2), (3, 4, 4), ("C", "2", "3")),
        ((1, 2, 1, 1), (1, 1, 2, 2), ("C", "2", "1")),
        ((1, 3, 8, 3), (1, 48), ("rank", "2", "1, 48")),
        ((48,), (1, 48, 4, 4), ("rank", "1", "48")),
        ((), (), ("rank", "0")),
        ((1, 1, 1, 2, 2), (1, 1, 1, 4, 4), ("rank", "5")),
    ],
)
def test_shapes_that_disagree(operator: Callable[..., Any], grad: Shape, own: Shape, facts: tuple[str, ...]) -> None:
    assert_says(refusal(_call(operator, grad, own)), *facts)


@pytest.mark.parametrize("operator", BOTH)
@pytest.mark.parametrize("axis", range(4))
def test_empty_tensors(operator: Callable[..., Any], axis: int) -> None:
    grad, own = [1, 2, 2, 2], [1, 2, 4, 4]
    own[axis] = 0
    if axis < 2:
        grad[axis] = 0
    assert_says(refusal(_call(operator, tuple(grad), tuple(own))), "empty", "0")
    grad[axis] = 0
    own = [1, 2, 4, 4] if axis > 1 else own
    assert_says(refusal(_call(operator, tuple(grad), tuple(own))), "empty", "0")


@pytest.mark.parametrize("dtypes", [("float16", "float32"), ("float32", "bfloat16"), ("bfloat16", "float16")])
def test_dtypes_that_differ(dtypes: tuple[str, str]) -> None:
    specs = TensorSpec((1, 2, 2, 2), dtypes[0]), TensorSpec((1, 2, 4, 4), dtypes[1])
    assert_says(refusal(plan_avg_pool2d_backward, *specs, 2), *dtypes, "same")
    assert_says(refusal(plan_adaptive_avg_pool2d_backward, *specs), *dtypes, "same")


@pytest.mark.parametrize("operator", BOTH)
@pytest.mark.parametrize("dtype", ["float64", "int32", "uint16", "bool", "complex64", "float8_e4m3fn", "int8"])
@pytest.mark.parametrize("product", ["atlas-a2", "atlas-a3", "atlas-inference", "atlas-training"])
def test_dtypes_that_no_product_takes(operator: Callable[..., Any], dtype: str, product: str) -> None:
    message = refusal(_call(operator, (1, 2, 2, 2), (1, 2, 4, 4), dtype=dtype, product=product))
    assert_says(message, dtype, "float32", "float16", product)


@pytest.mark.parametrize("array", [np.ones((1, 2, 2, 2)), np.ones((1, 2, 2, 2), np.int32)])
def test_arrays_of_other_dtypes(array: Any) -> None:
    own = np.ones((1, 2, 4, 4), array.dtype)
    assert_says(refusal(avg_pool2d_backward, array, own, 2), array.dtype.name, "float32")
    assert_says(refusal(adaptive_avg_pool2d_backward, array, own), array.dtype.name, "float32")


def test_bytes_beyond_int64() -> None:
    assert_says(refusal(adaptive2d, (1, 1, 1, 1), (1, 1, 2**31, 2**31)), "2^63")
    assert adaptive2d((2**31, 2**29, 1, 1), (2**31, 2**29, 1, 1))


# None, and what is not a tensor

ONES = np.ones((1, 2, 2, 2), np.float32)
OWN = TensorSpec((1, 2, 4, 4), "float32")


@pytest.mark.parametrize(
    ("call", "arguments", "name"),
    [
        (avg_pool2d_backward, (None, OWN, 2), "gradOutput"),
        (avg_pool2d_backward, (ONES, None, 2), "self"),
        (avg_pool2d_backward, (ONES, OWN, None), "kernelSize"),
        (avg_pool2d_backward, (ONES, OWN, 2, 2, None), "padding"),
        (plan_avg_pool2d_backward, (None, OWN, 2), "gradOutput"),
        (plan_avg_pool2d_backward, (ONES, None, 2), "self"),
        (plan_avg_pool2d_backward, (ONES, OWN, None), "kernelSize"),
        (plan_avg_pool2d_backward, (ONES, OWN, 2, 2, None), "padding"),
        (adaptive_avg_pool2d_backward, (None, OWN), "gradOutput"),
        (adaptive_avg_pool2d_backward, (ONES, None), "self"),
        (plan_adaptive_avg_pool2d_backward, (None, OWN), "gradOutput"),
        (plan_adaptive_avg_pool2d_backward, (ONES, None), "self"),
    ],
)
def test_missing_arguments(call: Callable[..., Any], arguments: tuple[Any, ...], name: str) -> None:
    assert_says(refusal(call, *arguments, status=NULLPTR), name, "None")


@pytest.mark.parametrize("thing", [[[[1.0]]], 3.5, "grad.npy", object()])
def test_what_is_no_tensor(thing: Any) -> None:
    for call, arguments in (
        (avg_pool2d_backward, (thing, OWN, 2)),
        (avg_pool2d_backward, (ONES, thing, 2)),
        (adaptive_avg_pool2d_backward, (thing, OWN)),
        (adaptive_avg_pool2d_backward, (ONES, thing)),
    ):
        assert_says(refusal(call, *arguments), type(thing).__name__)


def test_a_spec_has_no_values_to_compute_from() -> None:
    spec = TensorSpec(ONES.shape, "float32")
    assert_says(refusal(avg_pool2d_backward, spec, OWN, 2), "gradOutput", "TensorSpec")
    assert_says(refusal(adaptive_avg_pool2d_backward, spec, OWN), "gradOutput", "TensorSpec")


@pytest.mark.parametrize(
    ("out", "facts"),
    [
        (np.empty((1, 2, 4, 5), np.float32), ("out", "1, 2, 4, 5", "1, 2, 4, 4")),
        (np.empty((2, 4, 4), np.float32), ("out", "2, 4, 4", "1, 2, 4, 4")),
        (np.empty((1, 2, 4, 4), np.float16), ("out", "float16", "float32")),
        (np.empty((1, 2, 4, 4), np.float64), ("out", "float64", "float32")),
        (np.broadcast_to(np.float32(0), (1, 2, 4, 4)), ("out", "read-only")),
        ([[[[0.0] * 4] * 4] * 2], ("out", "list")),
        (TensorSpec((1, 2, 4, 4), "float32"), ("out", "TensorSpec")),
    ],
)
def test_out_that_will_not_do(out: Any, facts: tuple[str, ...]) -> None:
    assert_says(refusal(avg_pool2d_backward, ONES, OWN, 2, out=out), *facts)
    assert_says(refusal(adaptive_avg_pool2d_backward, ONES, OWN, out=out), *facts)


def test_out_that_shares_memory_with_grad_output() -> None:
    memory = np.ones((1, 2, 4, 4), np.float32)
    before = memory.copy()
    assert_says(refusal(avg_pool2d_backward, memory[..., :2, :2], OWN, 2, out=memory), "out", "gradOutput")
    assert np.array_equal(memory, before)


# Options


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ({"product": "atlas-a9"}, ("product", "atlas-a9", "atlas-a2", "atlas-training")),
        ({"product": None}, ("product", "None", "atlas-a2")),
        ({"accumulate": "float16"}, ("accumulate", "float16", "float32", "float64")),
        ({"accumulate": None}, ("accumulate", "None", "float32")),
        ({"threads": 0}, ("threads", "0", "1")),
        ({"threads": -4}, ("threads", "-4")),
        ({"threads": 1.5}, ("threads", "1.5")),
        ({"workspace_limit": 0}, ("workspace", "0")),
        ({"workspace_limit": -1}, ("workspace", "-1")),
        ({"workspace_limit": "64MiB"}, ("workspace", "64MiB")),
    ],
)
def test_options(options: dict[str, Any], facts: tuple[str, ...]) -> None:
    assert_says(refusal(avg2d, (1, 2, 2, 2), (1, 2, 4, 4), 3, 1, **options), *facts)
    assert_says(refusal(adaptive2d, (1, 2, 3, 3), (1, 2, 4, 4), **options), *facts)


# Products: section 2 of the contract, cell by cell. "." as it is, "h" HF32, "f" FP16, "-" refused, for modes 0 to 3.

DTYPES = ("float32", "float16", "bfloat16")
TAKEN = {
    "atlas-a3": {"float32": ".hfh", "float16": "...-", "bfloat16": "..--"},
    "atlas-a2": {"float32": ".hfh", "float16": "...-", "bfloat16": "..--"},
    "atlas-inference": {"float32": "-ff-", "float16": "...-", "bfloat16": "----"},
    "atlas-training": {"float32": "-ff-", "float16": "...-", "bfloat16": "----"},
    "atlas-200i-500-a2": {"float32": "----", "float16": "----", "bfloat16": "----"},
}
MODE_NAMES = ("KEEP_DTYPE", "ALLOW_FP32_DOWN_PRECISION", "USE_FP16", "USE_HF32")
CELLS = [(product, dtype, mode) for product in TAKEN for dtype in DTYPES for mode in range(4)]


def test_the_table_names_every_product_and_mode() -> None:
    assert set(TAKEN) == {product.value for product in Product}
    assert tuple(mode.name for mode in CubeMathType) == MODE_NAMES
    assert len(CELLS) == 60


@pytest.mark.parametrize(("product", "dtype", "mode"), CELLS)
def test_cube_math_type(product: str, dtype: str, mode: int) -> None:
    taken = TAKEN[product][dtype][mode]
    shapes = (1, 2, 2, 2), (1, 2, 4, 4)
    if taken == "-":
        message = refusal(avg2d, *shapes, 2, dtype=dtype, cube_math_type=mode, product=product)
        named = ["not supported"] if product == "atlas-200i-500-a2" else [dtype]
        if set(TAKEN[product][dtype]) != {"-"}:
            named += [MODE_NAMES[mode]]
            named += [MODE_NAMES[other] for other in range(4) if TAKEN[product][dtype][other] != "-"]
        assert_says(message, product, *named)
        return
    executor = avg2d(*shapes, 2, dtype=dtype, cube_math_type=mode, product=product)
    assert executor.compute_dtype == {".": dtype, "h": "hfloat32", "f": "float16"}[taken]
    assert executor.grad_input.dtype == dtype
    assert executor.product is Product(product)


@pytest.mark.parametrize(
    ("product", "mode"),
    [(product, mode) for product in TAKEN for mode in range(4) if TAKEN[product]["float32"][mode] != "-"],
)
def test_cube_math_type_values(product: str, mode: int) -> None:
    """1 + 2**-11 + 2**-20 is kept, goes to HF32's next 1 + 2**-11, or to float16's next 1 + 2**-10."""
    taken = TAKEN[product]["float32"][mode]
    g = np.full((1, 1, 1, 1), 1 + 2.0**-11 + 2.0**-20, np.float32)
    result = avg_pool2d_backward(g, TensorSpec(g.shape, "float32"), 1, cube_math_type=mode, product=product)
    expected = {".": 1 + 2.0**-11 + 2.0**-20, "h": 1 + 2.0**-11, "f": 1 + 2.0**-10}[taken]
    assert result.item() == expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("product", TAKEN)
def test_adaptive2d_takes_the_dtypes_of_the_product(product: str, dtype: str) -> None:
    takes = product in ("atlas-a2", "atlas-a3") or (product != "atlas-200i-500-a2" and dtype != "bfloat16")
    if takes:
        executor = adaptive2d((1, 2, 2, 2), (1, 2, 4, 4), dtype=dtype, product=product)
        assert executor.cube_math_type is None
        assert executor.compute_dtype == dtype
    else:
        assert_says(refusal(adaptive2d, (1, 2, 2, 2), (1, 2, 4, 4), dtype=dtype, product=product), product)


@pytest.mark.parametrize("mode", [4, -1, 2**40, "4", "USE_FP64", None, 1.5])
def test_cube_math_type_out_of_range(mode: Any) -> None:
    message = refusal(avg2d, (1, 2, 2, 2), (1, 2, 4, 4), 2, cube_math_type=mode)
    assert_says(message, "cubeMathType", str(mode), *MODE_NAMES)


BIG = 2**63
OVERRIDES = [
    *[(product, value, True) for product in ("atlas-a2", "atlas-a3") for value in (256, -256, 2**32, BIG - 1, -BIG)],
    *[(product, value, False) for product in ("atlas-a2", "atlas-a3") for value in (BIG, -BIG - 1, 2**64)],
    *[
        (product, value, abs(value) <= 255)
        for product in ("atlas-inference", "atlas-training")
        for value in (0, 1, -1, 255, -255, 256, -256, 2**32, 2**32 + 1)
    ],
]


@pytest.mark.parametrize(("product", "value", "taken"), OVERRIDES)
def test_divisor_override(product: str, value: int, taken: bool) -> None:
    g = np.ones((1, 1, 1, 1), np.float16)
    call = TensorSpec((1, 1, 1, 1), "float16"), 1, 1, 0, False, True, value
    if taken:
        result = avg_pool2d_backward(g, *call, product=product)
        assert result.item() == np.float16(1 / value if value else 1)
    else:
        message = refusal(avg_pool2d_backward, g, *call, product=product)
        assert_says(message, "divisorOverride", str(value), product)
        if "inference" in product or "training" in product:
            assert_says(message, "-255", "255")


@pytest.mark.parametrize("value", [1.5, "3", (3, 3), [4]])
def test_divisor_override_that_is_no_integer(value: Any) -> None:
    message = refusal(avg2d, (1, 2, 2, 2), (1, 2, 4, 4), 2, 2, 0, False, True, value)
    assert_says(message, "divisorOverride", "integer")


def test_unsupported_product_names_those_that_are() -> None:
    for operator, name in ((avg2d, "aclnnAvgPool2dBackward"), (adaptive2d, "aclnnAdaptiveAvgPool2dBackward")):
        message = refusal(_call(operator, (1, 2, 2, 2), (1, 2, 4, 4), product="atlas-200i-500-a2"))
        supported = [product for product in TAKEN if product != "atlas-200i-500-a2"]
        assert_says(message, name, "not supported", *supported)


def test_product_and_mode_may_be_members_or_values() -> None:
    for product in (Product.ATLAS_A3, "atlas-a3"):
        for mode in (CubeMathType.USE_HF32, 3):
            assert avg2d((1, 2, 2, 2), (1, 2, 4, 4), 2, cube_math_type=mode, product=product)


def test_a_refused_call_leaves_out_alone() -> None:
    out = np.full((1, 2, 4, 4), 7, np.float32)
    refusal(avg_pool2d_backward, ONES, OWN, 3, 1, 1, out=out)
    assert (out == 7).all()
