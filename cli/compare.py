"""`poolgrad compare`: two files to one core comparison, report; and what the operators' --expect shares with it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from . import report
from .options import Judging, bf16_bits_option, bf16_widened_option, json_option, judging_options, threads_option

if TYPE_CHECKING:
    from poolgrad.core import TensorSpec
    from poolgrad.core.comparison import Comparison
    from poolgrad.core.windows import Windows

FAILED = 1
"""Exit code of a comparison that fails."""


@click.command("compare")
@click.argument("actual", metavar="ACTUAL")
@click.argument("expected", metavar="EXPECTED")
@judging_options
@threads_option
@bf16_bits_option
@bf16_widened_option
@json_option
@click.option("-q", "--quiet", is_flag=True, help="Print nothing; the exit code tells.")
def command(
    judging: Judging,
    actual: str,
    expected: str,
    threads: int | None,
    bf16_bits: bool,
    bf16_widened: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Tell whether ACTUAL is EXPECTED, by an accuracy standard, and where it is not.

    ACTUAL, such as a device's gradInput, and EXPECTED are .npy or .safetensors files of one shape; dtypes are the
    same, or EXPECTED is float32. Thresholds are those of ACTUAL's dtype; what was computed in HF32 takes
    --precision-row hfloat32.

    Exit codes: 0 it passes; 1 it fails; 2 and 3 as usual.

    \b
    Example
        poolgrad compare npu_grad_input.npy grad_input.npy --standard allclose
    """
    from poolgrad.core.operators import available_cpus

    from . import comparison_report
    from .tensor_files import open_tensor

    start = time.perf_counter()
    with (
        open_tensor(actual, "grad_input", bf16_bits, bf16_widened) as made,
        open_tensor(expected, "grad_input", bf16_bits, bf16_widened) as golden,
    ):
        comparison = start_comparison(judging, made.spec, golden.spec, made.spec.dtype)
        shown = not (as_json or quiet) and report.is_terminal_stderr()
        item = made.nbytes // made.spec.size
        with report.progress(made.nbytes, shown) as progress:
            bytes_done = progress and (lambda elements: progress(elements * item))
            comparison.run(made.source(), golden.source(), threads or available_cpus(), bytes_done)
        made.check_unchanged()
        golden.check_unchanged()
    result = comparison_report.Result(
        comparison,
        report.Tensor(made.path, made.name, made.spec),
        report.Tensor(golden.path, golden.name, golden.spec),
        time.perf_counter() - start,
    )
    draw_plot(judging, comparison)
    if not quiet:
        comparison_report.show(result, as_json)
    finish(judging, comparison)


@contextmanager
def _usage_errors() -> Iterator[None]:
    """What cannot be compared, or not so, is an error of the command line."""
    from poolgrad.core.standards import ComparisonError

    try:
        yield
    except ComparisonError as error:
        raise click.UsageError(str(error), click.get_current_context(silent=True)) from error


def start_comparison(
    judging: Judging,
    actual: TensorSpec,
    expected: TensorSpec,
    computed_in: str,
    windows: tuple[Windows, Windows] | None = None,
) -> Comparison:
    """A comparison by the flags. computed_in: the type whose thresholds count unless a flag names another."""
    from poolgrad.core.comparison import Comparison, check_specs
    from poolgrad.core.standards import find_standard

    if judging.plot is not None:
        from .plot import check_plot

        check_plot(judging.plot)
    with _usage_errors():
        check_specs(actual, expected)
        row = judging.precision_row or computed_in
        standard = find_standard(judging.standard, row, judging.rtol, judging.atol)
        return Comparison(actual, expected, standard, windows, charts=judging.plot is not None)


def draw_plot(judging: Judging, comparison: Comparison) -> None:
    """Write the picture, if one is asked for."""
    if judging.plot is not None:
        from .plot import write_plot

        write_plot(judging.plot, comparison)


def finish(judging: Judging, comparison: Comparison) -> None:
    """End the command with its exit code."""
    if not (comparison.figures.passed or judging.exit_zero):
        raise click.exceptions.Exit(FAILED)
