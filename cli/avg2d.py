"""`poolgrad avg2d`: its flags, and the job that they make."""

from __future__ import annotations

from typing import Any

import click

from .options import Common, cube_math_type_number, integer, integers, job_arguments, job_options


@click.command("avg2d")
@job_arguments
@click.option("-k", "--kernel-size", type=integers, metavar="N[,N]", required=True, help="Window: 3, or 3,2 (H,W).")
@click.option("-s", "--stride", type=integers, metavar="N[,N]", help="Step; by default the kernel.")
@click.option(
    "-p",
    "--padding",
    type=integers,
    metavar="N[,N]",
    default="0",
    help="By default 0; at most half the kernel.",
)
@click.option("--ceil-mode", is_flag=True, help="Round the output's size up instead of down.")
@click.option(
    "--count-include-pad/--no-count-include-pad",
    default=True,
    help="Whether padding counts in the divisor; by default it does, as in PyTorch.",
)
@click.option(
    "--divisor-override",
    type=integer,
    metavar="N",
    default="0",
    help="Divide by this instead; 0, the default, is none.",
)
@click.option(
    "--cube-math-type",
    type=cube_math_type_number,
    metavar="0..3|NAME",
    default="0",
    help="0 KEEP_DTYPE (the default), 1 ALLOW_FP32_DOWN_PRECISION, 2 USE_FP16 or 3 USE_HF32.",
)
@job_options
def command(common: Common, **parameters: Any) -> None:
    """Compute gradInput of aclnnAvgPool2dBackward.

    GRAD_OUTPUT and SELF are .npy or .safetensors files; FILE.safetensors:NAME picks a tensor. SELF, the
    forward input, gives shape and dtype; its values are not read.

    \b
    Example: a 3x3 pooling with stride 2 and padding 1
        poolgrad avg2d grad_output.npy self.npy -o grad_input.npy -k 3 -s 2 -p 1
    """
    from .run import run_command

    run_command("avg2d", common, parameters)
