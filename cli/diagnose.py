"""`poolgrad diagnose`: flags to the call that is believed, one core call, report."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from . import report
from .options import (
    avg2d_options,
    bf16_bits_option,
    bf16_widened_option,
    json_option,
    product_option,
    threads_option,
)

if TYPE_CHECKING:
    from poolgrad.core.hypotheses import Call

    from .tensor_files import OpenTensor

WRONG, UNEXPLAINED = 1, 5
"""Exit codes: something else than the believed call explains ACTUAL; nothing does."""


@click.command("diagnose")
@click.argument("grad_output", metavar="GRAD_OUTPUT")
@click.argument("self_tensor", metavar="SELF")
@click.argument("actual", metavar="ACTUAL")
@click.option(
    "--op",
    type=click.Choice(["avg2d", "adaptive2d"]),
    help="Try this operator alone; by default both that fit the shapes.",
)
@avg2d_options(kernel_required=False)
@product_option
@click.option("--all", "show_all", is_flag=True, help="List every hypothesis that was tried.")
@threads_option
@bf16_bits_option
@bf16_widened_option
@json_option
@click.option("-q", "--quiet", is_flag=True, help="Print the last line alone.")
@click.pass_context
def command(
    context: click.Context,
    /,
    grad_output: str,
    self_tensor: str,
    actual: str,
    op: str | None,
    product: str,
    show_all: bool,
    threads: int | None,
    bf16_bits: bool,
    bf16_widened: bool,
    as_json: bool,
    quiet: bool,
    **parameters: Any,
) -> None:
    """Name the cause of a wrong gradInput.

    ACTUAL is the gradInput that a device made of GRAD_OUTPUT and SELF. The flags say which call it is believed to
    be: avg2d with -k, else adaptive2d. Other parameters and known faults are tried, and ranked by the share of
    elements that they explain within one ulp.

    Exit codes: 0 the call as believed explains it; 1 something else does; 5 nothing does; 2 and 3 as usual.

    \b
    Example: a 3x3 pooling with stride 2 and padding 1
        poolgrad diagnose grad_output.npy self.npy npu_grad_input.npy -k 3 -s 2 -p 1
    """
    from poolgrad.core.diagnosis import Tensors, diagnose
    from poolgrad.core.hypotheses import believed_call

    from . import diagnosis_report
    from .tensor_files import open_tensor

    start = time.perf_counter()
    with (
        open_tensor(grad_output, "grad_output", bf16_bits, bf16_widened) as given,
        open_tensor(self_tensor, "self", bf16_bits, bf16_widened) as self,
        open_tensor(actual, "grad_input", bf16_bits, bf16_widened) as made,
    ):
        tensors = Tensors.checked(given.spec, self.spec, made.spec, product)
        believed: Call | None = None
        if op == "adaptive2d" or (op is None and parameters["kernel_size"] is None):
            believed = tensors.adaptive
        elif parameters["kernel_size"] is not None:
            believed = believed_call(tensors.adaptive, **parameters)
        total = made.nbytes
        with report.progress(total, not (as_json or quiet) and report.is_terminal_stderr()) as progress:
            diagnosis = diagnose(
                tensors,
                given.source(),
                made.source(),
                believed,
                (op,) if op else ("avg2d", "adaptive2d"),
                threads,
                progress and (lambda done: progress(min(total, done * total // self.spec.size))),
            )
        for tensor in (given, self, made):
            tensor.check_unchanged()
    named = {"grad_output": _named(given), "self": _named(self), "actual": _named(made)}
    diagnosis_report.show(diagnosis, named, time.perf_counter() - start, as_json, quiet, show_all)
    context.exit(0 if diagnosis.as_believed else WRONG if diagnosis.found else UNEXPLAINED)


def _named(tensor: OpenTensor) -> report.Tensor:
    return report.Tensor(tensor.path, tensor.name, tensor.spec)
