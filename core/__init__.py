"""poolgrad's library: the two operators, planned and run. Knows no file, no click and no rich."""

from .operators import (
    adaptive_avg_pool2d_backward,
    avg_pool2d_backward,
    plan_adaptive_avg_pool2d_backward,
    plan_avg_pool2d_backward,
)
from .products import CubeMathType, Product
from .status import AclnnError
from .tensors import TensorSpec

__all__ = [
    "AclnnError",
    "CubeMathType",
    "Product",
    "TensorSpec",
    "adaptive_avg_pool2d_backward",
    "avg_pool2d_backward",
    "plan_adaptive_avg_pool2d_backward",
    "plan_avg_pool2d_backward",
]
