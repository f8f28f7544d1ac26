"""aclnn status codes and the one exception that carries them."""

from __future__ import annotations

from enum import IntEnum


class Status(IntEnum):
    """The status codes of CANN's two-phase operator calls that poolgrad can return."""

    ACLNN_ERR_PARAM_NULLPTR = 161001
    ACLNN_ERR_PARAM_INVALID = 161002


class AclnnError(ValueError):
    """A call that the operator's contract rejects.

    `str(error)` is one line for a person: what was given, what was expected and, where one argument
    would make the call right, which. `error.status` is the `Status`, with CANN's name and number.

    >>> error = AclnnError("padding 2 is over half of kernel 3")
    >>> error.status.name, int(error.status)
    ('ACLNN_ERR_PARAM_INVALID', 161002)
    """

    def __init__(self, message: str, status: Status = Status.ACLNN_ERR_PARAM_INVALID) -> None:
        super().__init__(message)
        self.status = status


def missing(name: str) -> AclnnError:
    """The refusal of a required argument that is None (CANN: a null pointer)."""
    return AclnnError(f"{name} is missing (None), and is required", Status.ACLNN_ERR_PARAM_NULLPTR)
