"""The picture of a comparison, drawn by matplotlib: error map, histogram, error against magnitude."""

from __future__ import annotations

import importlib
import importlib.util
import io
import os
from typing import TYPE_CHECKING, Any

import click

from .new_file import NewFile, check_target

if TYPE_CHECKING:
    from poolgrad.core.comparison import Comparison

_FORMATS = {".png": "png", ".svg": "svg"}


def check_plot(path: str) -> None:
    """Refuse, before any work, a picture that could not be drawn."""
    context = click.get_current_context()
    if _extension(path) not in _FORMATS:
        raise click.UsageError(f"--plot draws .png and .svg, and this is {path}", context)
    if importlib.util.find_spec("matplotlib") is None:
        raise click.UsageError("--plot takes matplotlib; pip install 'poolgrad[plot]' installs it", context)
    check_target(path)


def write_plot(path: str, comparison: Comparison) -> None:
    """Draw to a file, which is replaced only by the complete picture."""
    image = io.BytesIO()
    figure = _draw(comparison)
    kind = _FORMATS[_extension(path)]
    # Without the date, the same comparison gives the same file.
    figure.savefig(image, format=kind, metadata={"Date": None} if kind == "svg" else None)
    data = image.getvalue()
    file = NewFile(path, len(data))
    try:
        file.write(0, memoryview(data))
        file.commit()
    finally:
        file.discard()


def _extension(path: str) -> str:
    return os.path.splitext(path)[1].lower()


def _draw(comparison: Comparison) -> Any:
    # Typed as Any throughout: matplotlib is optional, for the type checker too.
    figure_module = importlib.import_module("matplotlib.figure")
    figure = figure_module.Figure(figsize=(15, 4.6), layout="constrained")
    verdict = "PASS" if comparison.figures.passed else "FAIL"
    standard = comparison.standard
    figure.suptitle(f"{verdict} by {standard.name}, thresholds of {standard.row}")
    panels = figure.subplots(1, 3)
    _draw_map(figure, panels[0], comparison)
    _draw_histogram(panels[1], comparison)
    _draw_magnitudes(figure, panels[2], comparison)
    return figure


def _draw_map(figure: Any, panel: Any, comparison: Comparison) -> None:
    import numpy as np

    rows, columns = comparison.map.extents
    cells = comparison.map.cells
    finite = np.where((cells > 0) & np.isfinite(cells), cells, np.nan)
    panel.set_title(f"largest {comparison.standard.severity_name} of each cell")
    panel.set_xlabel("W")
    panel.set_ylabel("H")
    panel.set_facecolor("0.92")
    if np.isnan(finite).all():
        panel.text(0.5, 0.5, "no finite errors", transform=panel.transAxes, ha="center")
        return
    scale = importlib.import_module("matplotlib.colors").LogNorm()
    image = panel.imshow(finite, norm=scale, extent=(-0.5, columns - 0.5, rows - 0.5, -0.5), aspect="auto")
    figure.colorbar(image, ax=panel)


def _draw_histogram(panel: Any, comparison: Comparison) -> None:
    import numpy as np

    charts = comparison.charts
    assert charts is not None
    used = np.flatnonzero(charts.relative[1:]) + 1
    panel.set_title(f"relative error (none: {int(charts.relative[0]):,} elements)")
    panel.set_xlabel("|actual - expected| / (|expected| + 1e-7)")
    panel.set_ylabel("elements")
    if used.size:
        edges = 2.0 ** (used - charts.ORIGIN)
        panel.bar(edges, charts.relative[used], width=edges, align="edge", edgecolor="white", linewidth=0.3)
        panel.set_xscale("log")
        panel.set_yscale("log")


def _draw_magnitudes(figure: Any, panel: Any, comparison: Comparison) -> None:
    import numpy as np

    charts = comparison.charts
    assert charts is not None
    counts = charts.errors[1:, 1:]
    panel.set_title("error against magnitude")
    panel.set_xlabel("|expected|")
    panel.set_ylabel("|actual - expected|")
    if not counts.any():
        panel.text(0.5, 0.5, "no errors where EXPECTED is not 0", transform=panel.transAxes, ha="center")
        return
    spans = []
    for axis in (0, 1):
        used = np.flatnonzero(counts.any(axis=1 - axis))
        spans.append(slice(int(used[0]), int(used[-1]) + 1))
    edges = [2.0 ** (np.arange(span.start, span.stop + 1) + 1.0 - charts.ORIGIN) for span in spans]
    shown = counts[spans[0], spans[1]].T
    scale = importlib.import_module("matplotlib.colors").LogNorm()
    image = panel.pcolormesh(*edges, np.where(shown > 0, shown, np.nan), norm=scale)
    panel.set_xscale("log")
    panel.set_yscale("log")
    figure.colorbar(image, ax=panel, label="elements")
