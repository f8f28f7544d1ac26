"""What each Ascend product takes: the tables that the checks, `poolgrad products` and the README share.

Source: the CANN documents of aclnnAvgPool2dBackward and aclnnAdaptiveAvgPool2dBackward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


class Product(StrEnum):
    """An Ascend product series; the value is what `--product` takes.

    >>> Product("atlas-a2").long_name
    'Atlas A2 training / 800I A2 inference / A200I A2 Box'
    """

    ATLAS_A3 = "atlas-a3"
    ATLAS_A2 = "atlas-a2"
    ATLAS_INFERENCE = "atlas-inference"
    ATLAS_TRAINING = "atlas-training"
    ATLAS_200I_500_A2 = "atlas-200i-500-a2"

    @property
    def long_name(self) -> str:
        """The product's name in the CANN documents."""
        return _LONG_NAMES[self]


class CubeMathType(IntEnum):
    """How the cube unit may lower precision (avg2d alone); the names are CANN's."""

    KEEP_DTYPE = 0
    ALLOW_FP32_DOWN_PRECISION = 1
    USE_FP16 = 2
    USE_HF32 = 3


class Precision(StrEnum):
    """What a cubeMathType comes to for one dtype on one product."""

    AS_IS = "as it is"
    HF32 = "HF32"
    FP16 = "FP16"


@dataclass(frozen=True)
class Rules:
    """What one product takes. `precision[dtype][cubeMathType]` is None where the call is rejected."""

    divisor_override: tuple[int, int]
    precision: Mapping[str, tuple[Precision | None, ...]]

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes that both operators take on this product."""
        return tuple(self.precision)


_LONG_NAMES = {
    Product.ATLAS_A3: "Atlas A3 training / inference",
    Product.ATLAS_A2: "Atlas A2 training / 800I A2 inference / A200I A2 Box",
    Product.ATLAS_INFERENCE: "Atlas inference series",
    Product.ATLAS_TRAINING: "Atlas training series",
    Product.ATLAS_200I_500_A2: "Atlas 200I/500 A2 inference",
}

_AS_IS, _HF32, _FP16 = Precision.AS_IS, Precision.HF32, Precision.FP16

_A2_A3 = Rules(
    (INT64_MIN, INT64_MAX),
    {
        "float32": (_AS_IS, _HF32, _FP16, _HF32),
        "float16": (_AS_IS, _AS_IS, _AS_IS, None),
        "bfloat16": (_AS_IS, _AS_IS, None, None),
    },
)
_INFERENCE_TRAINING = Rules(
    (-255, 255),
    {
        "float32": (None, _FP16, _FP16, None),
        "float16": (_AS_IS, _AS_IS, _AS_IS, None),
    },
)

RULES: Mapping[Product, Rules | None] = {
    Product.ATLAS_A3: _A2_A3,
    Product.ATLAS_A2: _A2_A3,
    Product.ATLAS_INFERENCE: _INFERENCE_TRAINING,
    Product.ATLAS_TRAINING: _INFERENCE_TRAINING,
    Product.ATLAS_200I_500_A2: None,
}
"""None: the product supports neither operator."""
