"""Backward calls of average pooling in an msprobe dump: the arguments put to their names, the tensors to their roles.

A call's parameters are in the forward entry of its number, gradOutput and gradInput in the backward one. ATen's
backward functions are called themselves, so that their forward entry holds it all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from .dump_json import Argument, ArgumentError, Dump, EntryName, TensorRecord, argument, listed, named
from .file_errors import shorten

REQUIRED = object()
"""The default of an argument that has none."""


@dataclass(frozen=True)
class Signature:
    """The arguments of a function in order, with their defaults; others: names that its first argument may have."""

    defaults: dict[str, object]
    others: tuple[str, ...] = ()

    def merge(self, entry: Any) -> dict[str, Any]:
        """The arguments of a forward entry, positional and keyword ones, by name; defaults where it has none."""
        names = list(self.defaults)
        positional, keywords = listed(entry, "input_args"), named(entry, "input_kwargs")
        if len(positional) > len(names):
            raise ArgumentError(f"it has {len(positional)} positional arguments, expected at most {len(names)}")
        given = dict(zip(names, positional, strict=False))
        for key, record in keywords.items():
            name = names[0] if key in self.others else key
            if name not in self.defaults:
                raise ArgumentError(f"it has an argument '{shorten(key, 40)}', which the function does not know")
            if name in given:
                raise ArgumentError(f"its argument {name} is given twice")
            given[name] = record
        merged: dict[str, Any] = {}
        for name, default in self.defaults.items():
            if name not in given and default is REQUIRED:
                raise ArgumentError(f"its argument {name} is not in the dump")
            merged[name] = argument(given[name], name) if name in given else default
        return merged


_INPUT_NAMES = ("input_x", "self", "x")

AVG_POOL2D = Signature(
    {
        "input": REQUIRED,
        "kernel_size": REQUIRED,
        "stride": None,
        "padding": 0,
        "ceil_mode": False,
        "count_include_pad": True,
        "divisor_override": None,
    },
    _INPUT_NAMES,
)
"""PyTorch's, and MindSpore's mint: the stride is the kernel where none is given."""

AVG_POOL2D_MINDSPORE = Signature(
    {**AVG_POOL2D.defaults, "kernel_size": 1, "stride": 1, "divisor_override": 0}, _INPUT_NAMES
)
"""Of mindspore.ops."""

ADAPTIVE_AVG_POOL2D = Signature({"input": REQUIRED, "output_size": REQUIRED}, _INPUT_NAMES)

AVG_POOL2D_BACKWARD = Signature(
    {
        "grad_output": REQUIRED,
        "self": REQUIRED,
        **{name: REQUIRED for name in AVG_POOL2D.defaults if name != "input"},
    }
)
ADAPTIVE_AVG_POOL2D_BACKWARD = Signature({"grad_output": REQUIRED, "self": REQUIRED})


@dataclass(frozen=True)
class PoolCall:
    """A backward call: its tensors as they were dumped, and avg2d's arguments by their names."""

    name: str
    operator: str
    grad_output: TensorRecord
    self: TensorRecord
    grad_input: TensorRecord
    parameters: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Unchecked:
    """A call that cannot be checked, and why."""

    name: str
    reason: str


def calls_of(dump: Dump) -> Iterator[PoolCall | Unchecked]:
    """All backward calls in the order of the dump."""
    for text, entry in dump.entries.items():
        name = EntryName.of(text)
        assert name is not None
        if name.prefix == "Aten":
            yield _checked(name, _aten_call, entry, dump)
        elif name.direction == "backward":
            yield _checked(name, _api_call, entry, dump)
    if dump.header.get("level") == "L0":
        for module in dump.modules:
            reason = "level L0 holds no arguments of functions; dump at level L1 or mix"
            yield Unchecked(module, reason)


def _checked(
    name: EntryName, make: Callable[[EntryName, Any, Dump], PoolCall], entry: Any, dump: Dump
) -> PoolCall | Unchecked:
    try:
        return make(name, entry, dump)
    except ArgumentError as fault:
        return Unchecked(name.call, str(fault))


def _api_call(name: EntryName, backward: Any, dump: Dump) -> PoolCall:
    forward = dump.entries.get(f"{name.call}.forward")
    if forward is None:
        raise ArgumentError(f"{name.call}.forward is not in dump.json, which holds the arguments")
    grad_output = _only_tensor(backward, "input", "gradOutput")
    grad_input = _only_tensor(backward, "output", "gradInput")
    if name.api != "avg_pool2d":
        merged = ADAPTIVE_AVG_POOL2D.merge(forward)
        self = _tensor_argument(merged, "input")
        _check_output_size(merged["output_size"], self, grad_output)
        return PoolCall(name.call, "adaptive2d", grad_output, self, grad_input)
    is_mindspore = name.prefix == "Functional" and dump.is_mindspore
    merged = (AVG_POOL2D_MINDSPORE if is_mindspore else AVG_POOL2D).merge(forward)
    parameters = _parameters(merged, four_sides=is_mindspore)
    return PoolCall(name.call, "avg2d", grad_output, _tensor_argument(merged, "input"), grad_input, parameters)


def _aten_call(name: EntryName, entry: Any, _dump: Dump) -> PoolCall:
    adaptive = name.api.startswith("_adaptive")
    merged = (ADAPTIVE_AVG_POOL2D_BACKWARD if adaptive else AVG_POOL2D_BACKWARD).merge(entry)
    tensors = _tensor_argument(merged, "grad_output"), _tensor_argument(merged, "self")
    grad_input = _only_tensor(entry, "output", "gradInput")
    if adaptive:
        return PoolCall(name.call, "adaptive2d", *tensors, grad_input)
    return PoolCall(name.call, "avg2d", *tensors, grad_input, _parameters(merged, four_sides=False))


def _tensor_argument(merged: dict[str, Any], name: str) -> TensorRecord:
    value = merged[name]
    if not isinstance(value, TensorRecord):
        raise ArgumentError(f"its argument {name} is no tensor")
    return value


def _only_tensor(entry: Any, key: str, role: str) -> TensorRecord:
    """The tensor among an entry's outputs (or inputs): arguments that take no gradient leave null."""
    tensors = [
        value
        for number, record in enumerate(listed(entry, key))
        if isinstance(value := argument(record, f"{role} {number}"), TensorRecord)
    ]
    if len(tensors) != 1:
        raise ArgumentError(f"its {key} holds {len(tensors) or 'no'} tensors, expected {role} alone")
    return tensors[0]


def _check_output_size(value: Argument, self: TensorRecord, grad_output: TensorRecord) -> None:
    sizes = value if isinstance(value, tuple) else (value, value)
    if len(sizes) != 2 or not all(size is None or _is_int(size) for size in sizes):
        raise ArgumentError(f"its argument output_size is {value}, expected one integer or two")
    if len(self.shape) < 2 or len(grad_output.shape) < 2:
        return  # The operator has a word for that.
    wanted = tuple(extent if size is None else size for size, extent in zip(sizes, self.shape[-2:], strict=True))
    if wanted != grad_output.shape[-2:]:
        raise ArgumentError(f"its output_size is {wanted[0]}x{wanted[1]} and gradOutput is {grad_output.text}")


def _parameters(merged: dict[str, Any], four_sides: bool) -> dict[str, Any]:
    """avg2d's arguments as the command line has them."""
    divisor = merged["divisor_override"]
    if divisor is not None and not _is_int(divisor):
        raise ArgumentError(f"its argument divisor_override is {divisor}, expected an integer")
    padding = _integers(merged, "padding")
    if four_sides and len(padding) == 4:
        top, bottom, left, right = padding
        if (top, left) != (bottom, right):
            sides = ", ".join(map(str, padding))
            raise ArgumentError(f"its padding ({sides}) is not symmetric, which is unsupported by the operator")
        padding = (top, left)
    kernel = _integers(merged, "kernel_size")
    # An empty stride, like none, is the kernel.
    stride = _integers(merged, "stride") if merged["stride"] not in (None, ()) else kernel
    return {
        "kernel_size": kernel,
        "stride": stride,
        "padding": padding,
        "ceil_mode": _flag(merged, "ceil_mode"),
        "count_include_pad": _flag(merged, "count_include_pad"),
        "divisor_override": divisor or 0,
    }


def _integers(merged: dict[str, Any], name: str) -> tuple[int, ...]:
    value = merged[name]
    values = value if isinstance(value, tuple) else (value,)
    if not values or not all(_is_int(number) for number in values):
        raise ArgumentError(f"its argument {name} is {_text(value)}, expected one integer or two")
    return tuple(values)


def _flag(merged: dict[str, Any], name: str) -> bool:
    if not isinstance(merged[name], bool):
        raise ArgumentError(f"its argument {name} is {_text(merged[name])}, expected true or false")
    return bool(merged[name])


def _is_int(value: object) -> bool:
    return type(value) is int and abs(value) < 2**63


def _text(value: Argument) -> str:
    return f"a tensor, {value.text}" if isinstance(value, TensorRecord) else shorten(str(value), 60)
