"""A map of the plane for the terminal: half blocks in colours, or shades where there are none."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.measure import Measurement
    from rich.text import Text

    from poolgrad.core.places import ErrorMap

WIDEST, TALLEST = 72, 24
"""Characters of a map."""

DECADES = 3
"""Levels below the largest error, a factor of ten each; smaller errors share the lowest."""

_SHADES, _PLAIN = " ░▒▓█", " .:*#"
_DISAGREE = "N"
_HALF = "▀"
_COLOURS = ("grey11", "blue", "cyan", "yellow", "red", "magenta")


class ErrorPicture:
    """The largest error of each cell over all planes, drawn by rich to fit."""

    def __init__(self, errors: ErrorMap, error_name: str) -> None:
        self._errors, self._name = errors, error_name

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """As wide as the map may be, and its legend needs."""
        from rich.measure import Measurement

        return Measurement(20, min(options.max_width, WIDEST))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        """The title, the map and its legend."""
        from rich.text import Text

        width = min(options.max_width, WIDEST)
        rows, columns = self._errors.extents
        yield Text(
            f"largest {self._name} of each cell of the {rows} x {columns} plane", style="bold", overflow="fold"
        )
        finite = self._errors.cells[self._errors.cells < math.inf]
        top = float(finite.max()) if finite.size else 0.0
        disagree = finite.size < self._errors.cells.size
        if console.color_system and _can_encode(console.encoding, _HALF):
            yield from _half_blocks(self._errors.cells, top, width)
            yield _legend([_HALF] * len(_COLOURS), top, [f"{colour} on {colour}" for colour in _COLOURS], disagree)
        else:
            shades = _SHADES if _can_encode(console.encoding, _SHADES) else _PLAIN
            yield from _shades(self._errors.cells, top, width, shades)
            yield _legend([*shades, _DISAGREE], top, [""] * len(_COLOURS), disagree)


def level(value: float, top: float) -> int:
    """0 for no error, 1 to 4 by decades up to `top`, 5 where one side alone is NaN or infinite.

    >>> [level(value, 2.0) for value in (0.0, 1e-9, 0.003, 0.03, 0.3, 2.0, math.inf)]
    [0, 1, 2, 3, 4, 4, 5]
    """
    if value == 0:
        return 0
    if value == math.inf:
        return DECADES + 2
    return 1 + [value > top / 10**decade for decade in range(1, DECADES + 1)].count(True)


def _half_blocks(cells: Any, top: float, width: int) -> Iterator[Text]:
    """Two cells a character, one over the other."""
    from rich.text import Text

    rows, columns = _scaled(cells.shape, width, 2 * TALLEST, 1.0)
    pixels = shrink(cells, rows, columns)
    for upper in range(0, rows, 2):
        line = Text(no_wrap=True)
        for column in range(columns):
            above = _COLOURS[level(pixels[upper, column], top)]
            below = _COLOURS[level(pixels[upper + 1, column], top)] if upper + 1 < rows else "default"
            line.append(_HALF, style=f"{above} on {below}")
        yield line


def _shades(cells: Any, top: float, width: int, shades: str) -> Iterator[Text]:
    """A cell is two characters wide where that fits, since characters are twice as high as wide."""
    from rich.text import Text

    fits = 2 * cells.shape[1] <= width and cells.shape[0] <= TALLEST
    rows, columns = cells.shape if fits else _scaled(cells.shape, width, TALLEST, 2.0)
    marks = [*shades, _DISAGREE]
    for line in shrink(cells, rows, columns):
        row = "".join(marks[level(value, top)] * (2 if fits else 1) for value in line)
        yield Text(f"|{row}|", no_wrap=True)


def _scaled(shape: tuple[int, int], width: int, height: int, aspect: float) -> tuple[int, int]:
    """Rows and columns that fit, in the plane's proportions; `aspect`: how much higher than wide a pixel is."""
    rows, columns = shape
    scale = max(1.0, columns / (width - 2), rows / aspect / height)
    return max(1, min(rows, round(rows / scale / aspect))), max(1, min(columns, round(columns / scale)))


def shrink(cells: Any, rows: int, columns: int) -> Any:
    """The largest of each of rows x columns parts."""
    import numpy as np

    for axis, count in enumerate((rows, columns)):
        extent = cells.shape[axis]
        if count < extent:
            cells = np.maximum.reduceat(cells, np.arange(count) * extent // count, axis=axis)
    return cells


def _legend(marks: list[str], top: float, styles: list[str], disagree: bool) -> Text:
    from rich.text import Text

    limits = [top / 10**decade for decade in range(DECADES, -1, -1)]
    meanings = ["0", *(f"to {limit:.2g}" for limit in limits), *["NaN, infinity"] * disagree]
    text = Text(overflow="fold")
    for mark, meaning, style in zip(marks, meanings, styles, strict=False):
        text.append(2 * mark, style=style)
        text.append(f" {meaning}   ")
    text.rstrip()
    return text


def _can_encode(encoding: str, text: str) -> bool:
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True
