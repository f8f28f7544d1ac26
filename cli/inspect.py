"""`poolgrad inspect`: what is in tensor files, without computing anything."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from . import report
from .failures import UNUSABLE_FILE
from .file_errors import printable, shorten
from .options import bf16_bits_option, json_option

if TYPE_CHECKING:
    from rich.console import RenderableType

    from poolgrad.core.statistics import Figures

    from .contents import Contents, Held
    from .tensor_layout import Layout

LONGEST_NAME = 1000
"""Characters of a tensor's name in the table; names can be megabytes long."""

MOST_DRAWN = 1000
"""Rows of a table: drawing them takes a third of a millisecond each, and a header may name a million tensors."""


@click.command("inspect")
@click.argument("files", metavar="FILE[:NAME]...", nargs=-1, required=True)
@click.option("--stats", is_flag=True, help="Read the elements too: range, mean, NaN, infinities, zeros, subnormals.")
@bf16_bits_option
@json_option
def command(files: tuple[str, ...], stats: bool, bf16_bits: bool, as_json: bool) -> None:
    """Show what is in .npy, .safetensors and .pt files, and what is wrong with a damaged one.

    Name, dtype, shape, bytes, byte order and order of each tensor, or of the one that FILE.safetensors:NAME
    picks, from the header alone.

    \b
    Example
        poolgrad inspect grad_output.npy dump.safetensors --stats
    """
    looked_at = [_look(file, stats, bf16_bits, shows_progress=not as_json) for file in files]
    faults = [contents.fault for contents in looked_at if contents.fault]
    summary = _summary(faults)
    if as_json:
        _print_json(looked_at, summary)
    else:
        report.print_tables([part for contents in looked_at for part in _drawn(contents, stats)])
    if summary:
        report.print_failure(report.Failure(UNUSABLE_FILE, "FILE", summary), "poolgrad inspect", as_json=False)
        raise click.exceptions.Exit(UNUSABLE_FILE)


def _look(file: str, stats: bool, bf16_bits: bool, shows_progress: bool) -> Contents:
    from .contents import examine, gather_figures

    with examine(file, bf16_bits) as (contents, sound_file):
        if stats and sound_file is not None:
            shown = shows_progress and report.is_terminal_stderr()
            with report.progress(contents.nbytes, shown) as progress:
                gather_figures(contents, sound_file, progress)
    return contents


def _summary(faults: list[str]) -> str:
    more = len(faults) - 1
    return "" if not faults else faults[0] + (f" (and {more} more faulty file{'s' * (more > 1)})" if more else "")


# ---- For scripts


def _print_json(looked_at: list[Contents], summary: str) -> None:
    files = {"files": list(map(_file_record, looked_at))}
    if summary:
        report.print_json({"code": None, "name": "FILE", "message": summary, **files}, status="error")
    else:
        report.print_json(files)


def _file_record(contents: Contents) -> dict[str, Any]:
    return {
        "path": contents.path,
        "format": contents.format,
        "bytes": contents.size,
        "fault": contents.fault,
        "tensors": list(map(_tensor_record, contents.tensors)),
    }


def _tensor_record(tensor: Held) -> dict[str, Any]:
    layout = tensor.layout
    return {
        "name": tensor.name,
        "dtype": layout.dtype,
        "stored_dtype": layout.stored_dtype,
        "shape": list(layout.shape),
        "bytes": layout.nbytes,
        "offset": layout.offset,
        "byte_order": _byte_order(layout),
        "order": _order(layout),
        "stats": None if tensor.figures is None else _stats_record(tensor.figures),
    }


def _stats_record(figures: Figures) -> dict[str, Any]:
    return {
        "count": figures.count,
        "min": figures.minimum,
        "max": figures.maximum,
        "mean": figures.mean,
        "nan": figures.nan,
        "positive_infinity": figures.positive_infinity,
        "negative_infinity": figures.negative_infinity,
        "zeros": figures.zeros,
        "subnormals": figures.subnormals,
    }


def _byte_order(layout: Layout) -> str | None:
    if not layout.has_byte_order:
        return None
    return "big" if layout.big_endian else "little"


def _order(layout: Layout) -> str:
    return "F" if layout.fortran_order else "C"


# ---- For people


def _drawn(contents: Contents, stats: bool) -> Iterator[RenderableType]:
    """A file's heading, and a table of its tensors."""
    from rich.box import SIMPLE
    from rich.table import Table

    yield report.plain(f"{printable(contents.path)}\n{_file_line(contents)}")
    table = Table(box=SIMPLE, show_header=False, show_edge=False, pad_edge=False)
    table.add_column(style="bold", overflow="fold")
    table.add_column(overflow="fold")
    for tensor in contents.tensors[:MOST_DRAWN]:
        lines = [_layout_line(tensor.layout), *(_stats_lines(tensor) if stats and not contents.fault else ())]
        table.add_row(report.plain(_label(tensor)), report.plain("\n".join(lines)))
    if contents.tensors:
        yield table
    if len(contents.tensors) > MOST_DRAWN:
        yield report.plain(f"and {len(contents.tensors) - MOST_DRAWN:,} more tensors, which --json lists")
    yield report.plain("")


def _label(tensor: Held) -> str:
    return "tensor" if tensor.name is None else shorten(tensor.name, LONGEST_NAME)


def _file_line(contents: Contents) -> str:
    lines = []
    if contents.size is not None:
        lines.append(f"{contents.format}, {contents.size:,} bytes")
        if contents.format == "safetensors" and contents.count is not None:
            lines[0] += f", {contents.count:,} tensor{'s' * (contents.count != 1)}"
    if contents.fault:
        lines.append(f"FAULT: {contents.fault}")
    return "\n".join(lines)


def _layout_line(layout: Layout) -> str:
    byte_order = _byte_order(layout)
    stored = f" stored as {layout.stored_dtype}" if _stored_is_news(layout) else ""
    return ", ".join(
        [
            f"{shorten(layout.dtype)}{stored} ({', '.join(map(str, layout.shape))})",
            f"{layout.nbytes:,} bytes",
            *([f"{byte_order}-endian"] if byte_order else []),
            f"{_order(layout)} order",
        ]
    )


def _stored_is_news(layout: Layout) -> bool:
    """Whether the file's own name of the dtype tells what the name does not, as <V2 for bfloat16."""
    return layout.dtype == "bfloat16" and layout.stored_dtype not in ("BF16", "bfloat16")


def _stats_lines(tensor: Held) -> Iterator[str]:
    figures = tensor.figures
    if figures is None:
        yield f"no statistics of {shorten(tensor.layout.dtype)}"
        return
    if figures.mean is None:
        yield "no finite elements"
    else:
        yield f"min {_number(figures.minimum)}, max {_number(figures.maximum)}, mean {_number(figures.mean)}"
    yield (
        f"{figures.nan:,} NaN, {figures.positive_infinity:,} +inf, {figures.negative_infinity:,} -inf, "
        f"{figures.zeros:,} zeros, {figures.subnormals:,} subnormals"
    )


def _number(value: float | None) -> str:
    return str(value) if isinstance(value, int) else f"{value:.6g}"
