"""`poolgrad adaptive2d`: flags to arguments, one core call, report."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from .options import Job, job_arguments, job_options

if TYPE_CHECKING:
    from poolgrad.core import TensorSpec
    from poolgrad.core.executor import Executor


@click.command("adaptive2d")
@job_arguments
@job_options
def command(job: Job) -> None:
    """Compute gradInput of aclnnAdaptiveAvgPool2dBackward.

    GRAD_OUTPUT and SELF are .npy or .safetensors files; FILE.safetensors:NAME picks a tensor. SELF, the
    forward input, gives shape and dtype; its values are not read. The pooled size is GRAD_OUTPUT's.

    \b
    Example
        poolgrad adaptive2d grad_output.npy self.npy -o grad_input.npy
    """
    from poolgrad.core import plan_adaptive_avg_pool2d_backward

    from .run import run_job

    def plan(grad_output: TensorSpec, self: TensorSpec) -> Executor:
        return plan_adaptive_avg_pool2d_backward(
            grad_output,
            self,
            product=job.product,
            accumulate=job.accumulate,
            threads=job.threads,
            workspace_limit=job.workspace_limit,
            staging=True,
        )

    run_job(job, plan)
