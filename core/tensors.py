"""The shape and dtype of a tensor, which is all that planning needs, and how numpy stores it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

ITEM_SIZE = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of one element of the dtypes that some product takes."""

STORAGE: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.uint16),
    "bfloat16": np.dtype(np.uint16),
}
"""How tiles carry each dtype: 16-bit floats as their bits, so that both go through the same arithmetic."""


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor: what `self` is to the backward operators, whose values are never read.

    shape: any sequence of integers; dtype: a name ("float32", "float16", "bfloat16") or anything
    `numpy.dtype` takes. Other dtypes can be described too; the operators refuse them by name.

    >>> TensorSpec((1, 64, 112, 112), np.float32)
    TensorSpec(shape=(1, 64, 112, 112), dtype='float32')
    """

    shape: tuple[int, ...]
    dtype: str

    def __init__(self, shape: Any, dtype: Any) -> None:
        object.__setattr__(self, "shape", tuple(int(extent) for extent in shape))
        name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
        object.__setattr__(self, "dtype", name)

    @classmethod
    def of(cls, tensor: Any) -> TensorSpec:
        """The spec of an array, or the spec itself."""
        if isinstance(tensor, TensorSpec):
            return tensor
        return cls(tensor.shape, tensor.dtype)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements (of a supported dtype)."""
        return self.size * ITEM_SIZE[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype} ({', '.join(map(str, self.shape))})"
