"""`poolgrad avg2d`: its flags, and the job that they make."""

from __future__ import annotations

from typing import Any

import click

from .options import Common, avg2d_options, job_arguments, job_options


@click.command("avg2d")
@job_arguments
@avg2d_options(kernel_required=True)
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
