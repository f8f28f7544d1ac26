"""Tensors whose bytes lie in one order and are read in another: which element comes from where."""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import StrEnum

import numpy as np

from .formats import Floats, Ints

Reader = Callable[[slice, slice, slice], Floats]
"""Planes, rows and columns of a tensor to their values."""

_MOST_READ = 1 << 20
"""Elements that are read at once, of bytes in another order, to take a part of them."""


class Order(StrEnum):
    """As what the bytes of a tensor are read, that is then taken as (N, C, H, W)."""

    AS_IS = "N, C, H, W as N, C, H, W"
    CHANNELS_LAST = "N, H, W, C as N, C, H, W"
    CHANNELS_FIRST = "N, C, H, W as N, H, W, C"
    TRANSPOSED = "N, C, W, H as N, C, H, W"
    TRANSPOSED_BACK = "N, C, H, W as N, C, W, H"


def plain_order(order: Order, channels: int, height: int, width: int) -> Order:
    """One name for orders that come to the same, AS_IS where they make no difference."""
    of_channels = order in (Order.CHANNELS_LAST, Order.CHANNELS_FIRST)
    one, other = (channels, height * width) if of_channels else (height, width)
    if order is Order.AS_IS or min(one, other) == 1:
        return Order.AS_IS
    if one == other:
        return Order.CHANNELS_LAST if of_channels else Order.TRANSPOSED
    return order


def reordered(read: Reader, order: Order, channels: int, height: int, width: int) -> Reader:
    """A reader of the same bytes in another order, read as (N, C, H, W) all the same."""
    if order is Order.AS_IS:
        return read

    def read_box(*box: slice) -> Floats:
        extents = [side.stop - side.start for side in box]
        if 0 in extents:
            return np.empty(extents)
        origin = _origin(order, (channels, height, width), *box)
        source = [slice(int(index.min()), int(index.max()) + 1) for index in origin]
        wanted, needed = math.prod(extents), math.prod(side.stop - side.start for side in source)
        if needed <= max(_MOST_READ, 2 * wanted) or wanted == 1:
            places = tuple(index - side.start for index, side in zip(origin, source, strict=True))
            return np.asarray(read(*source)[places])
        # What is together in this order may be far apart in the other.
        axis = next(axis for axis in _HALVED[order] if extents[axis] > 1)
        middle = box[axis].start + extents[axis] // 2
        halves = slice(box[axis].start, middle), slice(middle, box[axis].stop)
        return np.concatenate([read_box(*box[:axis], half, *box[axis + 1 :]) for half in halves], axis)

    return read_box


_HALVED = {
    Order.CHANNELS_LAST: (0, 1, 2),
    Order.CHANNELS_FIRST: (1, 2, 0),
    Order.TRANSPOSED: (1, 2, 0),
    Order.TRANSPOSED_BACK: (2, 1, 0),
}
"""The axes by which less is to be read at once, first the one that helps most."""


def _origin(
    order: Order, shape: tuple[int, int, int], planes: slice, rows: slice, columns: slice
) -> tuple[Ints, Ints, Ints]:
    """The plane, row and column that each element of a box comes from."""
    channels, height, width = shape
    area = height * width
    plane, row, column = np.ogrid[planes, rows, columns]
    if order in (Order.CHANNELS_LAST, Order.CHANNELS_FIRST):
        first, place = plane - plane % channels, plane % channels * area + row * width + column
        lines, length = (area, channels) if order is Order.CHANNELS_LAST else (channels, area)
    else:
        first, place = plane, row * width + column
        lines, length = (width, height) if order is Order.TRANSPOSED else (height, width)
    # Read as `lines` of this length, which lie as columns.
    channel, place = divmod(place % length * lines + place // length, area)
    return first + channel, *divmod(place, width)
