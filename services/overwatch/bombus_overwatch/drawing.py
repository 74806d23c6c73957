"""Draws with characters: bars, sparklines, and a line chart in braille dots. Plain functions, no widgets."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Generic, NamedTuple, TypeVar

import msgspec
from rich.text import Text

from bombus.figures import one_line
from bombus_overwatch.palette import KEY, QUIET, fit, fit_end

T = TypeVar("T")
LEVELS = "▁▂▃▄▅▆▇█"
BRAILLE = 0x2800
DRAWN_MAX = 1e300
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # bit of each dot, by row and column in its cell


def bar(done: float, target: float, width: int) -> tuple[str, str]:
    """Return the filled part of a bar, to half a cell, and the rest; together they are `width` cells wide."""
    share = min(1.0, max(0.0, done / target)) if target > 0 else 0.0
    halves = int(share * width * 2 + 1e-9)  # rounded down, so that a bar is full only when its target is reached
    filled = "━" * (halves // 2) + "╸" * (halves % 2)
    return filled, "─" * (width - len(filled))


def buckets(values: Sequence[float], width: int) -> list[float]:
    """Return at most `width` values in the same order, each the mean of a range of the given values."""
    if len(values) <= width:
        return list(values)
    edges = [len(values) * index // width for index in range(width + 1)]
    return [sum(values[start:end]) / (end - start) for start, end in pairwise(edges)]


def sparkline(values: Sequence[float], width: int, floor: float | None = None) -> str:
    """Return a row of bars, scaled from the smallest value (or `floor`) to the largest.

    Values that cannot be drawn leave gaps.
    """
    shown = buckets(values, width)
    drawn = [value for value in shown if is_drawable(value)]
    if not drawn or width <= 0:
        return ""
    low = min(drawn) if floor is None else floor
    span = max(drawn) - low
    cells = []
    for value in shown:
        if not is_drawable(value):
            cells.append(" ")
            continue
        level = (value - low) / span if span > 0 else 0.0
        cells.append(LEVELS[min(7, int(level * 8))])
    return "".join(cells)


def is_drawable(value: float) -> bool:
    """Return whether a value is small enough to be scaled without overflow, and not NaN."""
    return abs(value) < DRAWN_MAX


class Range(msgspec.Struct, frozen=True):
    low: float
    high: float

    def place(self, value: float, cells: int) -> int:
        """Return the cell of `value`, from 0 to `cells` - 1."""
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.0
        return min(cells - 1, max(0, round(share * (cells - 1))))


def range_of(values: Sequence[float], room: float = 0.05) -> Range:
    """Return the range of the values with a margin on both sides, so that a flat line is in the middle."""
    low, high = min(values), max(values)
    margin = (high - low) * room if high > low else max(0.5, abs(low) * 0.1)
    return Range(low - margin, high + margin)


def braille_line(points: Sequence[tuple[float, float]], x: Range, y: Range, width: int, height: int) -> list[list[str]]:
    """Return a line through the points, as `height` rows of `width` cells with 2 by 4 dots each. Empty cells are
    spaces."""
    bits = [[0] * width for _ in range(height)]
    dots = [(x.place(px, 2 * width), 4 * height - 1 - y.place(py, 4 * height)) for px, py in _thin(points, x, width)]
    for (x0, y0), (x1, y1) in pairwise(dots if len(dots) > 1 else dots * 2):
        steps = max(abs(x1 - x0), abs(y1 - y0), 1)
        for step in range(steps + 1):
            column, row = round(x0 + (x1 - x0) * step / steps), round(y0 + (y1 - y0) * step / steps)
            bits[row // 4][column // 2] |= DOTS[row % 4][column % 2]
    return [[chr(BRAILLE + cell) if cell else " " for cell in row] for row in bits]


def _thin(points: Sequence[tuple[float, float]], x: Range, width: int) -> list[tuple[float, float]]:
    """Replace the points in each column of dots by their mean, since several points would only blur the line."""
    columns: dict[int, list[tuple[float, float]]] = {}
    for point in points:
        columns.setdefault(x.place(point[0], 2 * width), []).append(point)
    return [
        (sum(px for px, _ in column) / len(column), sum(py for _, py in column) / len(column))
        for _, column in sorted(columns.items())
    ]


class Column(NamedTuple, Generic[T]):
    """A column of a table. `cell` returns the text of a row and its style. `width` 0 means a share of the room that is
    left, for text from outside, of which `keeps_end` cuts off the beginning."""

    title: str
    width: int
    cell: Callable[[T], tuple[str, str]]
    left: bool = False
    keeps_end: bool = False

    def fitted(self, text: str, share: int) -> str:
        if self.width:
            return fit(text, self.width, right=not self.left)
        return (fit_end if self.keeps_end else fit)(one_line(text), share - 1) + " "[:share]


class TextTable(Generic[T]):
    """A table, whose columns may have titles. `none` is shown if there are no rows; a row stands for `count` things."""

    def __init__(self, *columns: Column[T], none: str = "none", count: Callable[[T], int] = lambda row: 1) -> None:
        self.columns = columns
        self.none = none
        self.count = count

    def lines(self, rows: Sequence[T], width: int, height: int) -> list[Text]:
        """Return a line for each row. If there are too many rows, the last line says how many are left."""
        if not rows:
            return [Text(self.none, QUIET)]
        shares = sum(not column.width for column in self.columns)
        share = max(0, width - sum(column.width for column in self.columns)) // shares
        titles = "".join(column.fitted(column.title, share) for column in self.columns)
        lines = [Text(titles, f"{QUIET} underline")] if titles.strip() else []
        room = max(1, height - len(lines))
        fits = room if len(rows) <= room else room - 1
        for row in rows[:fits]:
            cells = ((column, *column.cell(row)) for column in self.columns)
            lines.append(Text.assemble(*((column.fitted(text, share), style) for column, text, style in cells)))
        left = sum(map(self.count, rows[fits:]))
        return [*lines, Text(f"  and {left:,} more", QUIET)] if left else lines


def keys(pairs: Sequence[tuple[str, str]]) -> Text:
    """Return what keys do, as a line."""
    return Text.assemble(*(part for key, what in pairs for part in ((f" {key} ", KEY), (f"{what} ", QUIET))))
