"""Bars of stacked parts, one below the other: bytes by kind, seconds by cause."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import TYPE_CHECKING, Any, Final

from memplan.hardware import Verdict
from memplan.plots.style import (
    DASHED,
    DOTTED,
    HOLDS,
    MUTED,
    PAPER,
    Line,
    Swatch,
    interval_style,
    legend_below,
    new_axes,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LABEL_LENGTH: Final = 32
"""Characters of a bar's name in a line; a longer one goes on below."""

CHARACTER: Final = 0.015
"""About how much of the axis' width a bold character takes."""

ROOM: Final = 0.065
"""The least share of the axis' width that has room for a value."""

VISIBLE: Final = 0.002
"""Parts with at least this share of the axis' width are named in the legend."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar: its name, its parts, two lines of text at its end, and what a GPU holds (`HOLDS`) by verdict."""

    label: str
    values: Mapping[str, float]
    total_text: str
    small_text: str
    holds: tuple[float, float] | None = None
    verdict: Verdict | None = None

    @property
    def total(self) -> float:
        """The sum of the parts."""
        return sum(self.values.values())

    @property
    def end(self) -> float:
        """Where what is drawn ends."""
        return self.total if self.holds is None else self.holds[1]


def stacked_bars(
    bars: Sequence[Bar],
    parts: Mapping[str, Swatch],
    *,
    title: str,
    subtitle: str,
    xlabel: str,
    line: Line | None = None,
) -> "Figure":
    """Bars of parts in the order of `parts`; the legend leaves out a part that is too small in every bar."""
    reach = max([bar.end for bar in bars] + ([line.usable] if line else []))
    labels = ["\n".join(fill(text, LABEL_LENGTH) for text in bar.label.splitlines()) for bar in bars]
    n_lines = max(label.count("\n") for label in labels) + 1
    height_in = 1.9 + max(0.5, 0.19 * n_lines) * len(bars)
    figure, axes = new_axes(title, subtitle, height_in=height_in)
    below = [0.0] * len(bars)
    for name, part in parts.items():
        _draw_part(axes, part, [bar.values.get(name, 0.0) for bar in bars], below, reach)
    _draw_intervals(axes, bars)
    ends = _ends(bars, line, reach)
    for y, (bar, end) in enumerate(zip(bars, ends, strict=True)):
        place: dict[str, Any] = {"textcoords": "offset points", "va": "center", "bbox": PAPER, "zorder": 4}
        axes.annotate(bar.total_text, (end, y), xytext=(6, 6), fontsize=9, weight="bold", **place)
        axes.annotate(bar.small_text, (end, y), xytext=(6, -6), fontsize=8, color=MUTED, **place)
    axes.set_yticks(range(len(bars)), labels)
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.set_xlim(0, reach)
    axes.set_xlabel(xlabel)
    axes.tick_params(axis="y", length=0)
    if line:
        axes.axvline(line.value, label=line.text, zorder=3, clip_on=False, **DASHED)
        axes.axvline(line.usable, zorder=3, clip_on=False, **DOTTED)
    legend_below(figure, axes)
    return figure


def _ends(bars: Sequence[Bar], line: Line | None, reach: float) -> list[float]:
    """Where each bar's total is written: at its end; behind the line if the line would cross one of them."""
    ends = [bar.end for bar in bars]
    if line is None:
        return ends
    widths = [CHARACTER * max(len(bar.total_text), len(bar.small_text)) * reach for bar in bars]
    crossed = any(
        end <= line.usable and end + width > line.value for end, width in zip(ends, widths, strict=True)
    )
    return [line.usable if crossed and end <= line.usable else end for end in ends]


def _draw_intervals(axes: "Axes", bars: Sequence[Bar]) -> None:
    """What a GPU holds, as a pale bar behind each stack."""
    if any(bar.holds for bar in bars):
        axes.fill_between([], [], label=HOLDS, **interval_style(None))
    for y, bar in enumerate(bars):
        if bar.holds is not None:
            low, high = bar.holds
            style = interval_style(bar.verdict)
            axes.hlines(y, bar.total, low, color=style["edgecolor"], linewidth=1.2)
            axes.barh(y, high - low, left=low, height=0.4, **style)


def _draw_part(axes: "Axes", part: Swatch, values: Sequence[float], below: list[float], reach: float) -> None:
    """One part of every bar, stacked on the parts drawn before, with its value where there is room."""
    if not any(values):
        return
    rectangles = axes.barh(
        range(len(values)),
        values,
        left=below,
        height=0.66,
        color=part.color,
        edgecolor=part.edge,
        hatch=part.hatch,
        linewidth=0.8,
        label=part.label if max(values) > VISIBLE * reach else None,
    )
    digits = 1 if reach >= 10 else 2
    texts = [f"{value:.{digits}f}" if value > ROOM * reach else "" for value in values]
    written = axes.bar_label(rectangles, texts, label_type="center", fontsize=8, color=part.ink, zorder=4)
    for text in written:
        text.set_bbox({**PAPER, "facecolor": part.color, "pad": 2} if text.get_text() else None)
    below[:] = [start + value for start, value in zip(below, values, strict=True)]
