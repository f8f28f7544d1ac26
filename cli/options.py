"""The shared flags and arguments, and the types of all flags.

Parses only: whether a value is legal, the operator decides.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import click

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 1000,
    "mb": 1000**2,
    "gb": 1000**3,
    "tb": 1000**4,
    "kib": 1024,
    "mib": 1024**2,
    "gib": 1024**3,
    "tib": 1024**4,
    # As in GNU tools, a bare letter is the binary unit.
    "k": 1024,
    "m": 1024**2,
    "g": 1024**3,
    "t": 1024**4,
}


def _integer_or_none(text: str) -> int | None:
    # int() alone also takes 1_0 and digits of other scripts.
    return int(text) if re.fullmatch(r"\s*[+-]?[0-9]{1,1000}\s*", text) else None


def integer(text: str) -> int:
    """One integer of any size."""
    number = _integer_or_none(text)
    if number is None:
        raise click.BadParameter(f"{text!r} is not an integer.")
    return number


def integers(text: str) -> tuple[int, ...]:
    """`3` or `3,2`: any number of integers, since which ones are legal is the operator's contract."""
    numbers = [_integer_or_none(part) for part in text.split(",")]
    if None in numbers:
        raise click.BadParameter(f"{text!r} is not one integer or two (height,width), such as 3 or 3,2.")
    return tuple(number for number in numbers if number is not None)


def cube_math_type_number(text: str) -> int:
    """cubeMathType by number (any integer: the operator checks it) or by CANN's name in any case."""
    number = _integer_or_none(text)
    if number is not None:
        return number
    from poolgrad.core import CubeMathType

    names = CubeMathType.__members__
    wanted = text.strip().upper()
    if wanted not in names:
        raise click.BadParameter(f"{text!r} is neither 0 to 3 nor one of {', '.join(names)}.")
    return int(names[wanted])


def product_value(text: str) -> str:
    """An Ascend product by its value in any case."""
    from poolgrad.core import Product

    values = [known.value for known in Product]
    wanted = text.strip().lower()
    if wanted not in values:
        raise click.BadParameter(f"{text!r} is not one of {', '.join(values)}.")
    return wanted


def byte_size(text: str) -> int:
    """`64MiB`, `64MB`, `1.5GiB`, `64M` (binary) or plain bytes."""
    match = re.fullmatch(r"\s*([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*([A-Za-z]*)\s*", text)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise click.BadParameter(f"{text!r} is not a size, such as 64MiB, 64MB, 1GiB or a number of bytes.")
    from decimal import Decimal

    return int(Decimal(match[1]) * unit)


@dataclass(frozen=True)
class Judging:
    """How a comparison judges and reports; `standard` None is the default one."""

    standard: str | None
    precision_row: str | None
    rtol: float | None
    atol: float | None
    exit_zero: bool
    plot: str | None


@dataclass(frozen=True)
class Common:
    """What the two operators' commands have in common: the files, how to compute and how to report.

    output, expect: one of them may be None; judging: of the comparison with `expect`.
    """

    grad_output: str
    self_tensor: str
    output: str | None
    expect: str | None
    judging: Judging
    product: str
    accumulate: str
    threads: int | None
    workspace_limit: int | None
    bf16_bits: bool
    bf16_widened: bool
    as_json: bool
    quiet: bool


bf16_bits_option = click.option(
    "--bf16-bits", is_flag=True, help="Take uint16 tensors of .npy files for the bits of bfloat16."
)

bf16_widened_option = click.option(
    "--bf16-widened",
    is_flag=True,
    help="Take float32 tensors for widened bfloat16, as in MindSpore's dumps: round them to bfloat16 again.",
)

cube_math_type_option = click.option(
    "--cube-math-type",
    type=cube_math_type_number,
    metavar="0..3|NAME",
    default="0",
    help="0 KEEP_DTYPE (the default), 1 ALLOW_FP32_DOWN_PRECISION, 2 USE_FP16 or 3 USE_HF32.",
)

product_option = click.option(
    "--product",
    type=product_value,
    metavar="NAME",
    default="atlas-a2",
    show_default=True,
    help="Ascend product to compute for: atlas-a3, atlas-a2, atlas-inference, atlas-training or "
    "atlas-200i-500-a2; 'poolgrad products' shows what each takes.",
)

threads_option = click.option(
    "--threads",
    type=click.IntRange(min=1),
    metavar="N",
    help="Worker threads; by default the CPUs this process may use. The result does not depend on it.",
)

scheduler_option = click.option(
    "--scheduler", metavar="ADDRESS", help="Run on a Dask cluster, tcp://HOST:PORT; takes the extra dask."
)

json_option = click.option("--json", "as_json", is_flag=True, help="Print one line of JSON, errors too.")

_THRESHOLD_OPTIONS: list[Decorator] = [
    click.option(
        "--standard",
        type=click.Choice(["mere-mare", "mixed", "allclose", "exact"]),
        help="What passes; by default mere-mare.",
    ),
    click.option(
        "--precision-row",
        type=click.Choice(["float32", "float16", "bfloat16", "hfloat32"]),
        help="Take the thresholds of this type instead of the one that was computed in.",
    ),
    click.option("--rtol", type=float, metavar="X", help="For allclose; by default as torch.testing.assert_close."),
    click.option("--atol", type=float, metavar="X", help="For allclose; by default as torch.testing.assert_close."),
]

_JUDGING_OPTIONS: list[Decorator] = [
    *_THRESHOLD_OPTIONS,
    click.option("--exit-zero", is_flag=True, help="Exit with 0 also when the comparison fails."),
    click.option("--plot", metavar="FILE", help="Draw errors to FILE.png or FILE.svg; takes matplotlib."),
]

_AVG2D_OPTIONS: list[Decorator] = [
    click.option("-s", "--stride", type=integers, metavar="N[,N]", help="Step; by default the kernel."),
    click.option(
        "-p",
        "--padding",
        type=integers,
        metavar="N[,N]",
        default="0",
        help="By default 0; at most half the kernel.",
    ),
    click.option("--ceil-mode", is_flag=True, help="Round the output's size up instead of down."),
    click.option(
        "--count-include-pad/--no-count-include-pad",
        default=True,
        help="Whether padding counts in the divisor; by default it does, as in PyTorch.",
    ),
    click.option(
        "--divisor-override",
        type=integer,
        metavar="N",
        default="0",
        help="Divide by this instead; 0, the default, is none.",
    ),
    cube_math_type_option,
]

_JOB_ARGUMENTS: list[Decorator] = [
    click.argument("grad_output", metavar="GRAD_OUTPUT"),
    click.argument("self_tensor", metavar="SELF"),
]

_JOB_OPTIONS: list[Decorator] = [
    click.option(
        "-o",
        "--output",
        metavar="GRAD_INPUT",
        help="File to write, .npy or .safetensors[:NAME]. Replaced only by a complete result. Without it, the "
        "result is only compared, with --expect.",
    ),
    click.option(
        "--expect",
        metavar="FILE[:NAME]",
        help="A device's gradInput to compare with what is computed; exit code 1 when it fails.",
    ),
    *_JUDGING_OPTIONS,
    product_option,
    click.option(
        "--accumulate",
        type=click.Choice(["float32", "float64"]),
        default="float32",
        show_default=True,
        help="Type of the sums; the result is rounded once at the end.",
    ),
    threads_option,
    click.option(
        "--workspace-limit",
        type=byte_size,
        metavar="SIZE",
        help="Most scratch memory to use, e.g. 64MiB. The result does not depend on it.",
    ),
    bf16_bits_option,
    bf16_widened_option,
    json_option,
    click.option("-q", "--quiet", is_flag=True, help="Print nothing on success."),
]


def avg2d_options(kernel_required: bool) -> Decorator:
    """The parameters of avg2d, which the command gets by their names; the kernel may be left out, then None."""
    kernel = click.option(
        "-k",
        "--kernel-size",
        type=integers,
        metavar="N[,N]",
        required=kernel_required,
        help="Window: 3, or 3,2 (H,W).",
    )
    return functools.partial(_apply, [kernel, *_AVG2D_OPTIONS])


def job_arguments(function: Callable[..., None]) -> Callable[..., None]:
    """GRAD_OUTPUT and SELF. To stand outermost, so that usage lines name them first."""
    return _apply(_JOB_ARGUMENTS, function)


def job_options(function: Callable[..., None]) -> Callable[..., None]:
    """Every shared flag; the command gets them and the two files as one `Common`, its first argument."""

    @functools.wraps(function)
    def command(**values: Any) -> None:
        common = take_common(values)
        _check_expectation(common)
        function(common, **values)

    return _apply(_JOB_OPTIONS, command)


def threshold_options(function: Callable[..., None]) -> Callable[..., None]:
    """The flags that choose a standard; the command gets them by their names."""
    return _apply(_THRESHOLD_OPTIONS, function)


def judging_options(function: Callable[..., None]) -> Callable[..., None]:
    """The flags of a comparison; the command gets them as one `Judging`, its first argument."""

    @functools.wraps(function)
    def command(**values: Any) -> None:
        function(_judging(values), **values)

    return _apply(_JUDGING_OPTIONS, command)


def _judging(values: dict[str, Any]) -> Judging:
    return Judging(**{field.name: values.pop(field.name) for field in fields(Judging)})


def take_common(values: dict[str, Any]) -> Common:
    """Move what is common to both commands out of all their values."""
    judging = _judging(values)
    given = {field.name: values.pop(field.name) for field in fields(Common) if field.name != "judging"}
    return Common(judging=judging, **given)


def given_judging(judging: Judging) -> list[str]:
    """The names of what was given about a comparison."""
    return [field.name for field in fields(Judging) if getattr(judging, field.name) not in (None, False)]


def _check_expectation(common: Common) -> None:
    """Without something to compare with there must be a file to write, and nothing about comparing."""
    if common.expect is not None:
        return
    context = click.get_current_context()
    if common.output is None:
        raise click.UsageError("Missing option '-o' / '--output'.", context)
    for name in given_judging(common.judging):
        raise click.UsageError(f"--{name.replace('_', '-')} takes --expect, a file to compare with.", context)


def _apply(decorators: list[Decorator], function: Callable[..., None]) -> Callable[..., None]:
    # click lists the parameters in the order of the decorators as written, which apply from the bottom up.
    for decorator in reversed(decorators):
        function = decorator(function)
    return function
