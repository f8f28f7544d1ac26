"""`poolgrad adaptive2d`: its flags, and the job that they make."""

from __future__ import annotations

import click

from .options import Common, job_arguments, job_options


@click.command("adaptive2d")
@job_arguments
@job_options
def command(common: Common) -> None:
    """Compute gradInput of aclnnAdaptiveAvgPool2dBackward.

    GRAD_OUTPUT and SELF are .npy or .safetensors files; FILE.safetensors:NAME picks a tensor. SELF, the
    forward input, gives shape and dtype; its values are not read. The pooled size is GRAD_OUTPUT's.

    \b
    Example
        poolgrad adaptive2d grad_output.npy self.npy -o grad_input.npy
    """
    from .run import run_command

    run_command("adaptive2d", common, {})
