"""The two operators: check the contract, choose windows and precision, make an executor (phase 1), run it.

Sources: the CANN documents of aclnnAvgPool2dBackward and aclnnAdaptiveAvgPool2dBackward for arguments and
refusals; `aten::avg_pool2d_backward` and `aten::_adaptive_avg_pool2d_backward` (PyTorch) for the semantics.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .executor import Executor, plan_executor
from .products import INT64_MAX, INT64_MIN, RULES, CubeMathType, Precision, Product, Rules
from .status import AclnnError, missing
from .task import Task
from .tensors import STORAGE, TensorSpec
from .tiles import ArrayTensor
from .windows import AdaptiveWindows, PoolWindows, Windows

Ints = int | Sequence[int]


def avg_pool2d_backward(
    grad_output: NDArray[Any],
    self: NDArray[Any] | TensorSpec,
    kernel_size: Ints,
    stride: Ints = (),
    padding: Ints = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = 0,
    cube_math_type: CubeMathType | int = CubeMathType.KEEP_DTYPE,
    *,
    product: Product | str = Product.ATLAS_A2,
    accumulate: str = "float32",
    threads: int | None = None,
    workspace_limit: int | None = None,
    workspace: Any = None,
    out: NDArray[Any] | None = None,
) -> NDArray[Any]:
    """gradInput of 2-D average pooling, as `aclnnAvgPool2dBackward` computes it.

    grad_output: array (N, C, Ho, Wo) or (C, Ho, Wo), float32, float16 or bfloat16 (of ml_dtypes), any strides and
        byte order.
    self: the forward input, an array or a `TensorSpec`: (N, C, H, W) or (C, H, W) in grad_output's dtype. Its
        values are never read.
    kernel_size, stride, padding: one integer for both axes or two (H, W). stride () or 0 integers: the kernel.
    divisor_override: 0 or None for none. cube_math_type: how float32 may be lowered; see `CubeMathType`.
    accumulate: "float32", or "float64" to round once from there. threads: None for the CPUs this process may use.
    workspace_limit: most bytes of scratch memory. workspace: a writable buffer of at least the plan's
        `workspace_size` bytes to use. out: an array of self's shape and dtype to fill and return.

    Returns an array of self's shape and dtype, the same bits whatever threads, limits and layouts are.
    Raises `AclnnError` (a ValueError) for what the operator's contract rejects.
    Source: CANN, aclnnAvgPool2dBackward; PyTorch, `aten::avg_pool2d_backward`.

    >>> import numpy as np
    >>> grad_output = np.array([[[4, 8]]], np.float32)
    >>> avg_pool2d_backward(grad_output, TensorSpec((1, 2, 4), np.float32), 2)
    array([[[1., 1., 2., 2.],
            [1., 1., 2., 2.]]], dtype=float32)
    """
    executor = plan_avg_pool2d_backward(
        grad_output, self, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override,
        cube_math_type, product=product, accumulate=accumulate, threads=threads,
        workspace_limit=workspace_limit, staging=_needs_staging(grad_output, out),
    )  # fmt: skip
    return _run_on_arrays(executor, grad_output, workspace, out)


def adaptive_avg_pool2d_backward(
    grad_output: NDArray[Any],
    self: NDArray[Any] | TensorSpec,
    *,
    product: Product | str = Product.ATLAS_A2,
    accumulate: str = "float32",
    threads: int | None = None,
    workspace_limit: int | None = None,
    workspace: Any = None,
    out: NDArray[Any] | None = None,
) -> NDArray[Any]:
    """gradInput of adaptive 2-D average pooling, as `aclnnAdaptiveAvgPool2dBackward` computes it.

    Arguments, result and errors as of `avg_pool2d_backward`; the output size is grad_output's.
    Source: CANN, aclnnAdaptiveAvgPool2dBackward; PyTorch, `aten::_adaptive_avg_pool2d_backward`.

    >>> import numpy as np
    >>> adaptive_avg_pool2d_backward(np.array([[[4, 8]]], np.float32), TensorSpec((1, 2, 2), np.float32))
    array([[[2., 4.],
            [2., 4.]]], dtype=float32)
    """
    executor = plan_adaptive_avg_pool2d_backward(
        grad_output, self, product=product, accumulate=accumulate, threads=threads,
        workspace_limit=workspace_limit, staging=_needs_staging(grad_output, out),
    )  # fmt: skip
    return _run_on_arrays(executor, grad_output, workspace, out)


def plan_avg_pool2d_backward(
    grad_output: NDArray[Any] | TensorSpec,
    self: NDArray[Any] | TensorSpec,
    kernel_size: Ints,
    stride: Ints = (),
    padding: Ints = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = 0,
    cube_math_type: CubeMathType | int = CubeMathType.KEEP_DTYPE,
    *,
    product: Product | str = Product.ATLAS_A2,
    accumulate: str = "float32",
    threads: int | None = None,
    workspace_limit: int | None = None,
    staging: bool = False,
) -> Executor:
    """Phase 1 of `avg_pool2d_backward`: checks every argument, touches no data.

    grad_output, self: arrays or `TensorSpec`s. staging: whether tiles go through buffers of the workspace, as
    files need it; without, source and sink give views. The result's `workspace_size` is in bytes.
    Raises `AclnnError` for what the contract rejects.
    Source: CANN's aclnnAvgPool2dBackwardGetWorkspaceSize.

    >>> spec = TensorSpec((1, 64, 56, 56), "float32"), TensorSpec((1, 64, 112, 112), "float32")
    >>> plan_avg_pool2d_backward(*spec, 3, 2, 1).grad_input
    TensorSpec(shape=(1, 64, 112, 112), dtype='float32')
    """
    given, like = _specs(grad_output, self)
    rules, product = _rules(product, "aclnnAvgPool2dBackward")
    _check_tensors(given, like, rules, product)
    kernel, strides, pads = _pool_arguments(kernel_size, stride, padding)
    _check_output_size(given, like, kernel, strides, pads, ceil_mode)
    override = _divisor_override(divisor_override, rules, product)
    mode, precision = _precision(cube_math_type, given.dtype, rules, product)
    rows, columns = (
        PoolWindows.of(*axis, bool(count_include_pad))
        for axis in zip(like.shape[-2:], given.shape[-2:], kernel, strides, pads, strict=True)
    )
    task = Task(
        "avg2d", "aclnnAvgPool2dBackward", product, mode, precision, _accumulate(accumulate), given, like,
        rows, columns, override,
    )  # fmt: skip
    return plan_executor(task, _threads(threads), _limit(workspace_limit), staging)


def plan_adaptive_avg_pool2d_backward(
    grad_output: NDArray[Any] | TensorSpec,
    self: NDArray[Any] | TensorSpec,
    *,
    product: Product | str = Product.ATLAS_A2,
    accumulate: str = "float32",
    threads: int | None = None,
    workspace_limit: int | None = None,
    staging: bool = False,
) -> Executor:
    """Phase 1 of `adaptive_avg_pool2d_backward`; arguments as of `plan_avg_pool2d_backward`.

    Source: CANN's aclnnAdaptiveAvgPool2dBackwardGetWorkspaceSize.

    >>> spec = TensorSpec((1, 64, 7, 7), "float32"), TensorSpec((1, 64, 56, 56), "float32")
    >>> plan_adaptive_avg_pool2d_backward(*spec).aclnn
    'aclnnAdaptiveAvgPool2dBackward'
    """
    given, like = _specs(grad_output, self)
    rules, product = _rules(product, "aclnnAdaptiveAvgPool2dBackward")
    _check_tensors(given, like, rules, product)
    rows: Windows
    rows, columns = (AdaptiveWindows(*axis) for axis in zip(like.shape[-2:], given.shape[-2:], strict=True))
    task = Task(
        "adaptive2d", "aclnnAdaptiveAvgPool2dBackward", product, None, Precision.AS_IS, _accumulate(accumulate),
        given, like, rows, columns, 0,
    )  # fmt: skip
    return plan_executor(task, _threads(threads), _limit(workspace_limit), staging)


def output_size(cells: int, kernel: int, stride: int, padding: int, ceil_mode: bool) -> int:
    """Number of windows of avg2d along an axis (PyTorch's rule); below 1 there is no output.

    >>> output_size(112, 3, 2, 1, False), output_size(112, 3, 2, 1, True)
    (56, 57)
    """
    span = cells + 2 * padding - kernel
    count = (-(-span // stride) if ceil_mode else span // stride) + 1
    # With ceil_mode the last window must start in the input or the left padding.
    if ceil_mode and (count - 1) * stride >= cells + padding:
        count -= 1
    return count


def _run_on_arrays(
    executor: Executor, grad_output: NDArray[Any], workspace: Any, out: NDArray[Any] | None
) -> NDArray[Any]:
    spec = executor.grad_input
    for name, array in (("gradOutput", grad_output), ("out", out)):
        if not isinstance(array, np.ndarray) and array is not None:
            raise AclnnError(f"{name} is a {type(array).__name__}; expected a numpy array")
    result = np.empty(spec.shape, grad_output.dtype.newbyteorder("=")) if out is None else out
    if TensorSpec.of(result) != spec:
        raise AclnnError(f"out is {TensorSpec.of(result)}; expected {spec}, as self")
    if not result.flags.writeable:
        raise AclnnError("out is read-only; expected a writable array")
    if np.may_share_memory(result, grad_output):
        raise AclnnError("out shares memory with gradOutput; expected an array of its own")
    storage = STORAGE[spec.dtype]
    executor.run(ArrayTensor(_as_storage(grad_output, storage)), ArrayTensor(_as_storage(result, storage)), workspace)
    return result


def _as_storage(array: NDArray[Any], storage: np.dtype[Any]) -> NDArray[Any]:
    """The same memory, 16-bit floats as their bits."""
    return array.view(storage.newbyteorder(array.dtype.byteorder))


def _needs_staging(grad_output: Any, out: Any) -> bool:
    arrays = [array for array in (grad_output, out) if isinstance(array, np.ndarray)]
    return not all(array.flags.c_contiguous and array.flags.aligned and array.dtype.isnative for array in arrays)


def _specs(grad_output: Any, self: Any) -> tuple[TensorSpec, TensorSpec]:
    for name, tensor in (("gradOutput", grad_output), ("self", self)):
        if tensor is None:
            raise missing(name)
        if not isinstance(tensor, np.ndarray | TensorSpec):
            raise AclnnError(f"{name} is a {type(tensor).__name__}; expected a numpy array or a TensorSpec")
    return TensorSpec.of(grad_output), TensorSpec.of(self)


def _rules(product: Product | str, aclnn: str) -> tuple[Rules, Product]:
    try:
        known = Product(product)
    except ValueError:
        names = ", ".join(item.value for item in Product)
        raise AclnnError(f"product is {product!r}; expected one of {names}") from None
    rules = RULES[known]
    if rules is None:
        names = ", ".join(item.value for item, taken in RULES.items() if taken)
        raise AclnnError(f"{aclnn} is not supported on {known.value} ({known.long_name}); products that do: {names}")
    return rules, known


def _check_tensors(given: TensorSpec, like: TensorSpec, rules: Rules, product: Product) -> None:
    for name, spec in (("gradOutput", given), ("self", like)):
        if len(spec.shape) not in (3, 4):
            raise AclnnError(
                f"{name} has rank {len(spec.shape)}, shape {_shape(spec)}; expected (N, C, H, W) or (C, H, W)"
            )
    if len(given.shape) != len(like.shape):
        raise AclnnError(
            f"gradOutput has rank {len(given.shape)} and self rank {len(like.shape)}; expected the same rank"
        )
    for axis, left, right in zip("NC" if len(like.shape) == 4 else "C", given.shape, like.shape, strict=False):
        if left != right:
            raise AclnnError(
                f"gradOutput has {axis} = {left} and self {axis} = {right}; expected the same (nothing is broadcast)"
            )
    if given.dtype != like.dtype:
        raise AclnnError(f"gradOutput is {given.dtype} and self {like.dtype}; expected the same dtype")
    if given.dtype not in rules.dtypes:
        raise AclnnError(
            f"the tensors are {given.dtype}; expected {_either(rules.dtypes)}, which {product.value} takes"
        )
    for name, spec in (("gradOutput", given), ("self", like)):
        if spec.size == 0:
            raise AclnnError(f"{name} is empty, shape {_shape(spec)}; expected at least one element")
        if spec.nbytes > INT64_MAX:
            raise AclnnError(f"{name} has shape {_shape(spec)}, {spec.nbytes} bytes; expected less than 2^63")


def _pool_arguments(
    kernel_size: Any, stride: Any, padding: Any
) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    kernel = _pair("kernelSize", kernel_size, 1)
    strides = _pair("stride", stride, 1, default=kernel)
    pads = _pair("padding", padding, 0)
    for axis, pad, extent in zip("HW", pads, kernel, strict=True):
        if 2 * pad > extent:
            raise AclnnError(
                f"padding {pad} ({axis}) is over half of kernel {extent}; expected at most {extent // 2}"
            )
    return kernel, strides, pads


def _pair(name: str, value: Any, least: int, default: tuple[int, int] | None = None) -> tuple[int, int]:
    if value is None:
        raise missing(name)
    values = _integers(name, value)
    if default is not None and not values:
        return default
    if len(values) not in (1, 2):
        count = "no integers" if not values else f"{len(values)} integers"
        raise AclnnError(f"{name} is {count}, {value!r}; expected one for both axes, or two (H, W)")
    for number in values:
        if not least <= number <= INT64_MAX:
            expected = "at least 0" if least == 0 else "above 0"
            raise AclnnError(f"{name} is {_joined(values)}; expected {expected}, and below 2^63")
    return values[0], values[-1]


def _integers(name: str, value: Any) -> tuple[int, ...]:
    items = value if isinstance(value, Sequence | np.ndarray) and not isinstance(value, str) else (value,)
    try:
        return tuple(operator.index(item) for item in items)
    except TypeError:
        raise AclnnError(f"{name} is {value!r}; expected integers") from None


def _check_output_size(
    given: TensorSpec,
    like: TensorSpec,
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    ceil_mode: bool,
) -> None:
    right, other = (
        tuple(map(output_size, like.shape[-2:], kernel, stride, padding, (mode, mode)))
        for mode in (bool(ceil_mode), not ceil_mode)
    )
    actual = given.shape[-2:]
    if actual == right and min(right) >= 1:
        return
    call = f"kernel {_joined(kernel)} stride {_joined(stride)} padding {_joined(padding)}"
    call += f"{' ceil_mode' if ceil_mode else ''} over {_by(like.shape[-2:])}"
    gives = f"gives {_by(right)}" if min(right) >= 1 else "leaves no output"
    hint = ""
    if actual == other and min(other) >= 1:
        flag = "what --ceil-mode gives" if not ceil_mode else "what it gives without --ceil-mode"
        hint = f"; {_by(actual)} is {flag}"
    else:
        hint = _swap_hint(actual, like, kernel, stride, padding, bool(ceil_mode))
    raise AclnnError(f"gradOutput is {_by(actual)}, {call} {gives}{hint}")


def _swap_hint(
    actual: tuple[int, ...],
    like: TensorSpec,
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    ceil_mode: bool,
) -> str:
    """H and W of one argument exchanged is a common slip: name it where it explains the size."""
    arguments = {"kernel": kernel, "stride": stride, "padding": padding}
    for name, pair in arguments.items():
        swapped = arguments | {name: (pair[1], pair[0])}
        if pair[0] == pair[1] or any(
            2 * pad > extent for pad, extent in zip(swapped["padding"], swapped["kernel"], strict=True)
        ):
            continue
        sizes = tuple(map(output_size, like.shape[-2:], *swapped.values(), (ceil_mode, ceil_mode)))
        if sizes == actual:
            return f"; {_by(actual)} is what {name} {pair[1]},{pair[0]} (H,W) gives"
    return ""


def _divisor_override(value: Any, rules: Rules, product: Product) -> int:
    if value is None:
        return 0
    (number,) = _integers("divisorOverride", (value,))
    least, greatest = rules.divisor_override
    if not least <= number <= greatest:
        expected = "an int64" if (least, greatest) == (INT64_MIN, INT64_MAX) else f"{least} to {greatest}"
        raise AclnnError(f"divisorOverride is {number}; expected {expected} on {product.value}")
    return number


def _precision(value: Any, dtype: str, rules: Rules, product: Product) -> tuple[CubeMathType, Precision]:
    try:
        mode = CubeMathType(value)
    except ValueError:
        names = ", ".join(f"{int(item)} {item.name}" for item in CubeMathType)
        raise AclnnError(f"cubeMathType is {value!r}; expected one of {names}") from None
    choices = rules.precision[dtype]
    precision = choices[mode]
    if precision is None:
        taken = ", ".join(f"{int(item)} {item.name}" for item in CubeMathType if choices[item])
        raise AclnnError(
            f"cubeMathType is {int(mode)} {mode.name}, which {product.value} does not take for {dtype}; "
            f"expected --cube-math-type {taken}"
        )
    return mode, precision


def _accumulate(value: str) -> str:
    if value not in ("float32", "float64"):
        raise AclnnError(f"accumulate is {value!r}; expected float32 or float64")
    return value


def _threads(value: int | None) -> int:
    if value is None:
        return available_cpus()
    (number,) = _integers("threads", (value,))
    if number < 1:
        raise AclnnError(f"threads is {number}; expected at least 1")
    return number


def _limit(value: int | None) -> int | None:
    if value is None:
        return None
    (number,) = _integers("workspace_limit", (value,))
    return number


def available_cpus() -> int:
    """CPUs that this process may use: its affinity, and the limit of its container (cgroup v2)."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        with open("/sys/fs/cgroup/cpu.max", encoding="ascii") as file:
            quota, period = file.read().split()
        return max(1, min(affinity, -(-int(quota) // int(period))))
    except (OSError, ValueError):
        return affinity


def _shape(spec: TensorSpec) -> str:
    return f"({', '.join(map(str, spec.shape))})"


def _by(extents: Sequence[int]) -> str:
    return "x".join(map(str, extents))


def _joined(values: Sequence[int]) -> str:
    return ",".join(map(str, dict.fromkeys(values) if len(set(values)) == 1 else values))


def _either(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"
