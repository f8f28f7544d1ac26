"""Makes dumps as msprobe does, of PyTorch's and of MindSpore's kind, with gradients by the oracle."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from tests import oracle
from tests.cases import NUMPY, Array
from tests.oracle import Pool

RECORD_DTYPES = {
    "pytorch": {"float32": "torch.float32", "float16": "torch.float16", "bfloat16": "torch.bfloat16"},
    "mindspore": {"float32": "Float32", "float16": "Float16", "bfloat16": "BFloat16"},
}

K2 = Pool((2, 2), (2, 2))
K3S2P1 = Pool((3, 3), (2, 2), (1, 1))


class Dump:
    """One process's dump of one step, `folder/dump.json` and `folder/dump_tensor_data`."""

    def __init__(self, folder: Path, framework: str = "mindspore", task: str = "tensor", level: str = "L1") -> None:
        self.folder = folder
        self.framework = framework
        self.task = task
        self.header = {"task": task, "level": level, "framework": framework, "dump_data_dir": "/elsewhere/data"}
        self.data: dict[str, Any] = {}
        self.tensors = folder / "dump_tensor_data"
        self.tensors.mkdir(parents=True)

    def tensor(self, array: Array, name: str) -> dict[str, Any]:
        """The record of a tensor; it is stored in its file, but for statistics mode."""
        dtype = str(array.dtype)
        kind = {"pytorch": "torch.Tensor"}.get(self.framework, "mindspore.Tensor")
        names = RECORD_DTYPES["pytorch" if self.framework == "pytorch" else "mindspore"]
        record: dict[str, Any] = {"type": kind, "dtype": names[dtype], "shape": list(array.shape)}
        record |= {"Max": float(array.max()), "Min": float(array.min()), "Mean": float("nan"), "Norm": 1.0}
        if self.task == "statistics":
            return record
        if self.framework == "pytorch":
            record |= {"requires_grad": True, "data_name": f"{name}.pt"}
            save_pt(self.tensors / record["data_name"], array)
        else:
            record["data_name"] = f"{name}.npy"
            # MindSpore has no numpy type for bfloat16: it stores the values as float32.
            np.save(self.tensors / record["data_name"], array.astype(np.float32) if dtype == "bfloat16" else array)
        return record

    def call(
        self,
        name: str,
        own: Array,
        grad_output: Array,
        grad_input: Array,
        *arguments: Any,
        input_name: str | None = None,
        **keywords: Any,
    ) -> Dump:
        """A forward and a backward entry: `arguments` follow the input, which may be a keyword itself."""
        record = self.tensor(own, f"{name}.forward.input.0")
        positional = [value(argument) for argument in arguments]
        named = {key: value(argument) for key, argument in keywords.items()}
        if input_name is None:
            positional.insert(0, record)
        else:
            named[input_name] = record
        output = self.tensor(grad_output, f"{name}.forward.output.0")
        self.data[f"{name}.forward"] = {"input_args": positional, "input_kwargs": named, "output": [output]}
        self.data[f"{name}.backward"] = {
            "input": [self.tensor(grad_output, f"{name}.backward.input.0")],
            "output": [self.tensor(grad_input, f"{name}.backward.output.0")],
        }
        return self

    def other(self, count: int = 1) -> Dump:
        """Entries of other functions."""
        for number in range(count):
            self.data[f"Functional.relu.{number}.forward"] = {"input_args": [None], "input_kwargs": {}, "output": []}
            self.data[f"Functional.avg_pool1d.{number}.backward"] = {"input": [], "output": []}
        return self

    def write(self) -> Path:
        """Write dump.json."""
        (self.folder / "dump.json").write_text(json.dumps({**self.header, "data": self.data}, indent=1))
        return self.folder


def value(argument: Any) -> Any:
    """How msprobe writes an argument that is no tensor."""
    if argument is None:
        return None
    if isinstance(argument, tuple | list):
        return [value(element) for element in argument]
    return {"type": type(argument).__name__, "value": argument}


def save_pt(path: Path, array: Array) -> None:
    """Write an array with torch.save."""
    torch = importlib.import_module("torch")
    bits = np.ascontiguousarray(array)
    if array.dtype == NUMPY["bfloat16"]:
        tensor = torch.from_numpy(bits.view(np.int16).copy()).view(torch.bfloat16)
    else:
        tensor = torch.from_numpy(bits.copy())
    torch.save(tensor, path)


def gradients(
    pool: Pool | None, self_shape: tuple[int, ...], grad_size: tuple[int, int] | None = None, dtype: str = "float32"
) -> tuple[Array, Array, Array]:
    """self, gradOutput, and the gradInput that it must give: by exact arithmetic, rounded once."""
    rng = np.random.default_rng(len(str(pool)) + sum(self_shape))
    size = pool.output_size((self_shape[-2], self_shape[-1])) if pool else grad_size
    assert size is not None
    own = rng.standard_normal(self_shape).astype(NUMPY[dtype])
    grad_output = rng.standard_normal((*self_shape[:-2], *size)).astype(NUMPY[dtype])
    grad_input = oracle.rounded(oracle.backward(oracle.exact(grad_output), self_shape, pool), dtype)
    return own, grad_output, grad_input.astype(NUMPY[dtype])


def add_avg(
    dump: Dump, name: str, pool: Pool, *arguments: Any, shape: tuple[int, ...] = (1, 2, 8, 8), **more: Any
) -> Dump:
    """A right call of avg_pool2d."""
    dtype = more.pop("dtype", "float32")
    return dump.call(name, *gradients(pool, shape, dtype=dtype), *arguments, **more)


def add_adaptive(dump: Dump, name: str, size: tuple[int, int], *arguments: Any, **more: Any) -> Dump:
    """A right call of adaptive_avg_pool2d."""
    dtype, shape = more.pop("dtype", "float32"), more.pop("shape", (1, 2, 8, 8))
    return dump.call(name, *gradients(None, shape, size, dtype), *arguments, **more)
