"""One job of the two operators: open the files, plan, run, put the result in place, report."""

from __future__ import annotations

import time
from collections.abc import Callable

from poolgrad.core import TensorSpec
from poolgrad.core.executor import Executor

from . import report
from .options import Job
from .tensor_files import create_tensor, open_tensor


def run_job(job: Job, plan: Callable[[TensorSpec, TensorSpec], Executor]) -> None:
    """Compute `job` with the executor that `plan` makes of gradOutput's and self's spec."""
    start = time.perf_counter()
    with (
        open_tensor(job.grad_output, "grad_output", job.bf16_bits) as grad_output,
        open_tensor(job.self_tensor, "self", job.bf16_bits) as self,
    ):
        executor = plan(grad_output.spec, self.spec)
        planned = time.perf_counter()
        with create_tensor(job.output, executor.grad_input, [grad_output, self]) as grad_input:
            created = time.perf_counter()
            with report.progress(executor.grad_input.nbytes, _shows_progress(job)) as progress:
                stats = executor.run(grad_output.source(), grad_input, progress=progress)
            computed = time.perf_counter()
            grad_input.commit()
            end = time.perf_counter()
    # Claiming the file's space and putting it in place are part of writing it.
    timing = report.Timing(
        plan=planned - start,
        read=stats.read,
        compute=stats.compute,
        write=stats.write + (created - planned) + (end - computed),
        total=end - start,
    )
    outcome = report.Outcome(
        executor,
        grad_output=report.Tensor(grad_output.path, grad_output.name, executor.grad_output),
        self=report.Tensor(self.path, self.name, executor.grad_input),
        grad_input=report.Tensor(grad_input.path, grad_input.name, executor.grad_input),
        timing=timing,
    )
    if not job.quiet:
        report.print_outcome(outcome, as_json=job.as_json)


def _shows_progress(job: Job) -> bool:
    return not (job.quiet or job.as_json) and report.is_terminal_stderr()
