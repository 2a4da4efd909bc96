"""Bytes held over a step."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np

from memplan.estimate import Estimate, StageEstimate
from memplan.memory import Bytes, alive_at_high, bytes_by_kind
from memplan.plots.style import (
    DASHED,
    DOTTED,
    HOLDS,
    KINDS,
    STACKED,
    budget_line,
    common_text,
    interval_style,
    legend_top_down,
    new_axes,
    stage_text,
    upright,
)
from memplan.record import StepPhase, Stretch, phased
from memplan.tables import finding
from memplan.units import binary_unit, human_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray


MOST_POINTS: Final = 900
"""Points of a timeline that are drawn: about as many as the chart is wide in pixels."""


def step_timeline(estimate: Estimate, stage: int | None = None) -> "Figure":
    """Bytes held by one GPU of a stage (the worst one if None) over one step, by kind, the peak marked.

    The horizontal axis is the order of allocations and frees, not time: it says what is held when, not for
    how long. A phase of few events is widened to be seen. A long step is drawn by its upper envelope, which
    keeps every maximum.
    """
    of = estimate.stage(stage)
    held = _held(of)
    unit, name = binary_unit(of.peak.total_bytes)
    subtitle = f"tensors over one training step, {stage_text(estimate, of)}\n{common_text([estimate])}"
    figure, axes = new_axes(finding(estimate), subtitle, height_in=5.0)
    starts, points = _drawn(held)
    drawn = held.by_kind[:, [*points, points[-1]]] / unit
    axes.stackplot(starts, drawn, step="post", **STACKED)
    axes.set_xlim(0, starts[-1])
    top = 1.16 * of.peak.total_bytes
    if (gpu := estimate.device_bytes_of(of)) is not None:
        verdict = estimate.verdict if of is estimate.worst else None
        axes.axhspan(gpu.low_bytes / unit, gpu.high_bytes / unit, label=HOLDS, **interval_style(verdict))
        top = max(top, 1.04 * gpu.high_bytes)
    budget = budget_line([estimate])
    if budget is not None and budget.value < 2 * top:
        axes.axhline(
            budget.value / unit, label=budget.text.replace(": ", ":\n").replace(", ", "\n"), **DASHED
        )
        axes.axhline(budget.usable / unit, **DOTTED)
        top = max(top, 1.04 * budget.usable)
    axes.set_ylim(0, top / unit)
    at = int(np.argmax(held.total[points]))
    _mark_peak(axes, float(starts[at] + starts[at + 1]) / 2, of, unit)
    envelope = "" if len(points) == len(held.total) else ", upper envelope"
    axes.set_xlabel(
        f"{len(held.total):,} allocations and frees in order (not to the scale of time){envelope}"
    )
    _shade_phases(axes, held)
    axes.set_ylabel(f"tensors, and bytes of a GPU ({name})")
    legend_top_down(figure, axes)
    return figure


def _mark_peak(axes: "Axes", x: float, of: StageEstimate, unit: int) -> None:
    y = of.peak.total_bytes / unit
    left = x > 0.5 * axes.get_xlim()[1]
    axes.plot([x], [y], marker="v", color="black", markersize=7, clip_on=False, zorder=5)
    axes.annotate(
        f"peak {human_bytes(of.peak.total_bytes)}\n{of.when}",
        (x, y),
        xytext=(-9 if left else 9, 3),
        textcoords="offset points",
        ha="right" if left else "left",
        va="bottom",
        fontsize=9,
        weight="bold",
        zorder=5,
    )


@dataclass(frozen=True, slots=True)
class _Held:
    """After each event of a step: the bytes of each kind (rows as `KINDS`) and in all; its phase."""

    by_kind: "NDArray[np.int64]"
    total: "NDArray[np.int64]"
    phases: tuple[tuple[StepPhase, int], ...]
    """Each phase in order: its name and its number of events."""

    @property
    def widths(self) -> "NDArray[np.float64]":
        """The width of each phase: in proportion to its events, with a least width."""
        counts = np.array([n for _, n in self.phases], dtype=np.float64)
        return cast("NDArray[np.float64]", np.maximum(counts, counts.sum() / (2 * max(len(counts), 4))))


def _held(of: StageEstimate) -> _Held:
    row = {kind: i for i, kind in enumerate(KINDS)}
    phases, found = zip(*phased(of.record.step, of.record.update), strict=True)
    deltas = np.zeros((len(KINDS), len(found)), dtype=np.int64)
    for i, event in enumerate(found):
        deltas[row[event.buffer.kind], i] = event.sign * event.buffer.n_bytes
    by_kind = deltas.cumsum(axis=1) + _at_rest(of.record.step, of.peak)[:, None]
    runs = tuple((phase, len(list(run))) for phase, run in groupby(phases))
    return _Held(by_kind, by_kind.sum(axis=0), runs)


def _at_rest(step: Stretch, peak: Bytes) -> "NDArray[np.int64]":
    """The bytes held between steps by kind: the peak less what the step has added by then."""
    added: Counter[Any] = Counter()
    alive_at_high(step, added)
    rises = bytes_by_kind(added)
    return np.array([peak.of(kind) - rises.of(kind) for kind in KINDS], dtype=np.int64)


SHADES: Final[Mapping[StepPhase, str]] = {"forward": "white", "backward": "0.93", "optimizer": "0.84"}


def _drawn(held: _Held) -> "tuple[NDArray[np.float64], NDArray[np.int64]]":
    """The positions of the drawn points (and the end of the last one), and their events.

    Each phase is cut into cells of equal width; a cell shows its highest event.
    """
    starts: list[NDArray[np.float64]] = []
    points: list[NDArray[np.int64]] = []
    edge, first, widths = 0.0, 0, held.widths
    for (_, n), width in zip(held.phases, widths, strict=True):
        cells = min(n, max(2, round(MOST_POINTS * width / widths.sum())))
        cuts = np.linspace(0, n, cells, endpoint=False).astype(np.int64)
        parts = np.split(held.total[first : first + n], cuts[1:])
        points.append(first + cuts + np.array([part.argmax() for part in parts]))
        starts.append(edge + width * np.arange(cells) / cells)
        edge, first = edge + width, first + n
    return np.concatenate([*starts, [edge]]), np.concatenate(points)


def _shade_phases(axes: "Axes", held: _Held) -> None:
    """Shades each phase and names it below; if one is too narrow, the axis' label names the shades."""
    stops = held.widths.cumsum()
    starts = stops - held.widths
    names = [name for name, _ in held.phases]
    for name, start, stop in zip(names, starts, stops, strict=True):
        axes.axvspan(start, stop, color=SHADES[name], linewidth=0, zorder=0)
    axes.set_xticks([])
    if all(upright(*each) is False for each in zip(names, held.widths / stops[-1], strict=True)):
        axes.set_xticks((starts + stops) / 2, names, fontsize=9)
        axes.tick_params(axis="x", length=0)
    else:
        axes.set_xlabel("white: forward, grey: backward, dark grey: optimizer\n" + axes.get_xlabel())
