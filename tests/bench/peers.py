"""PyTorch as the peer: its own CPU kernels, and its oneDNN (mkldnn) path. Optional."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tests.bench.cases import Case

Task = Callable[[], object]


def load_torch(threads: int) -> Peer | None:
    """The peer, or None where torch is not installed."""
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return None
    torch.set_num_threads(threads)
    return Peer(torch)


class Peer:
    """torch's backward of average pooling, on numpy's memory."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch

    def tensor(self, array: NDArray[Any]) -> Any:
        """A tensor over the array's own memory."""
        if array.dtype.itemsize == 4:
            return self.torch.from_numpy(array)
        dtype = self.torch.float16 if array.dtype == np.float16 else self.torch.bfloat16
        return self.torch.from_numpy(array.view(np.int16)).view(dtype)

    def aten(self, case: Case, grad_output: NDArray[Any], out: NDArray[Any]) -> Task:
        """torch's CPU kernel, into preallocated memory where it can be told to.

        `_adaptive_avg_pool2d_backward` cannot: its out variant computes into fresh memory and copies. The
        faster of it and the plain call is taken.
        """
        grad, result = self.tensor(grad_output), self.tensor(out)
        like = self.torch.empty_like(result)
        if case.kernel is not None:
            operator = self.torch.ops.aten.avg_pool2d_backward.grad_input
            arguments = self._arguments(case)
            return lambda: operator(grad, like, *arguments, grad_input=result)
        operators = self.torch.ops.aten._adaptive_avg_pool2d_backward
        return _fastest([lambda: operators.default(grad, like), lambda: operators.out(grad, like, out=result)])

    def onednn(self, case: Case, grad_output: NDArray[Any], dtype_like: NDArray[Any]) -> Task | None:
        """oneDNN with its reorders from and to the plain layout; None where it has no such path."""
        grad = self.tensor(grad_output)
        like = self.tensor(dtype_like).to_mkldnn()
        aten = self.torch.ops.aten
        if case.kernel is not None:
            arguments = self._arguments(case)

            def task() -> object:
                return aten.avg_pool2d_backward.default(grad.to_mkldnn(), like, *arguments).to_dense()
        else:

            def task() -> object:
                return aten.mkldnn_adaptive_avg_pool2d_backward.default(grad.to_mkldnn(), like).to_dense()

        try:
            task()
        except RuntimeError:
            return None
        return task

    def expected(self, case: Case, grad_output: NDArray[Any]) -> NDArray[Any]:
        """gradInput in float32, of float32 gradOutput."""
        grad = self.torch.from_numpy(grad_output.astype(np.float32))
        like = self.torch.empty((grad_output.shape[0], *case.shape[1:]))
        aten = self.torch.ops.aten
        if case.kernel is not None:
            result = aten.avg_pool2d_backward.default(grad, like, *self._arguments(case))
        else:
            result = aten._adaptive_avg_pool2d_backward.default(grad, like)
        return np.asarray(result.numpy())

    def script(self, case: Case, grad_output: Path, like: Path, target: Path) -> None:
        """What a short script would do: load, torch's backward, save. It does not read self's values."""
        grad = self.tensor(np.load(grad_output))
        shaped = self.torch.empty(np.load(like, mmap_mode="r").shape, dtype=grad.dtype)
        aten = self.torch.ops.aten
        if case.kernel is not None:
            result = aten.avg_pool2d_backward.default(grad, shaped, *self._arguments(case))
        else:
            result = aten._adaptive_avg_pool2d_backward.default(grad, shaped)
        if grad.dtype == self.torch.bfloat16:
            np.save(target, result.view(self.torch.int16).numpy().view("V2"))
        else:
            np.save(target, result.numpy())

    @staticmethod
    def _arguments(case: Case) -> tuple[object, ...]:
        assert case.kernel is not None
        sizes = ([extent, extent] for extent in (case.kernel, case.stride, case.padding))
        return (*sizes, case.ceil_mode, case.count_include_pad, None)


def _fastest(tasks: list[Task]) -> Task:
    def seconds(task: Task) -> float:
        task()
        start = time.perf_counter()
        task()
        return time.perf_counter() - start

    return min(tasks, key=seconds)
