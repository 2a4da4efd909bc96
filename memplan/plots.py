"""Charts of estimates and of records: every function returns a matplotlib Figure and keeps no state.

Kinds are stacked in one order everywhere, what stays from step to step first; legends follow it. Colors are
those of Okabe and Ito 2008, "Color Universal Design", ordered so that neighbours differ in lightness too
and a print in grey stays readable. In a notebook `%matplotlib inline` shows a returned Figure.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from textwrap import fill
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np

from memplan.checks import checked_count
from memplan.errors import InvalidValue
from memplan.estimate import Estimate, StageEstimate
from memplan.hardware import Verdict
from memplan.memory import Bytes, alive_at_high, bytes_by_kind
from memplan.plan import Plan
from memplan.record import Stretch, unrolled
from memplan.shapes import DType, Kind, Shape
from memplan.tables import layers_text
from memplan.units import GiB, KiB, MiB, human_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

STACK: Final[tuple[Kind, ...]] = ("weights", "optimizer", "grads", "activations", "temporaries")
"""The order of every stack, first at the bottom or at the left."""

LABELS: Final[Mapping[Kind, str]] = {
    "weights": "weights",
    "optimizer": "optimizer state",
    "grads": "gradients",
    "activations": "activations",
    "temporaries": "temporaries",
}

COLORS: Final[Mapping[Kind, str]] = {
    "weights": "#0072B2",
    "optimizer": "#56B4E9",
    "grads": "#009E73",
    "activations": "#F0E442",
    "temporaries": "#E69F00",
}
"""Blue for what stays, green for gradients, warm for what comes and goes."""

WITHIN, OUTSIDE, MEASURED = "#0072B2", "#D55E00", "#56B4E9"
"""Errors within and outside the tolerance; what was measured."""

INK: Final[Mapping[Kind, str]] = dict.fromkeys(STACK, "black") | {"weights": "white", "grads": "white"}
"""What is legible on each color."""

MUTED: Final = "0.35"
WIDTH_IN: Final = 9.0
LINE_LENGTH: Final = 118
"""Characters of a subtitle that fit into the width, less what stands beside the axis."""

NARROWEST: Final = 0.03
"""The least share of the horizontal axis that gets a name."""

MOST_POINTS: Final = 900
"""Points of a timeline that are drawn: about as many as the chart is wide in pixels."""

_PAPER: Final[dict[str, Any]] = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
_DASHED: Final[dict[str, Any]] = {"color": "black", "linestyle": (0, (4, 3)), "linewidth": 1.2}
_STACKED: Final[dict[str, Any]] = {
    "colors": [COLORS[kind] for kind in STACK],
    "labels": [LABELS[kind] for kind in STACK],
    "linewidth": 0,
}

AXIS_LABELS: Final = {
    "seq_len": "seq_len (tokens per sequence)",
    "micro_batch": "micro_batch (sequences per pass and replica)",
    "global_batch": "global_batch (sequences per step)",
    "dp": "dp (data-parallel ranks)",
    "tp": "tp (tensor-parallel ranks)",
    "pp": "pp (pipeline stages)",
    "dp_replicate": "dp_replicate (replicas of the dp ranks)",
}


def stage_peaks(estimate: Estimate) -> "Figure":
    """The worst instant of each pipeline stage by kind, the verdict at the worst; the cluster's budget."""
    stages, worst = estimate.stages, estimate.worst
    bars = [
        _Bar(
            f"stage {s.stage}\n{_layers_text(s.layers)}",
            s.peak,
            s.when,
            estimate.verdict if s is worst else None,
        )
        for s in stages
    ]
    one = len(stages) == 1
    title = "Peak bytes of one GPU" if one else "Peak bytes of one GPU in each pipeline stage"
    return _stacked_bars(title, _common([estimate]), bars, _budget([estimate]))


def compare(estimates: Mapping[str, Estimate]) -> "Figure":
    """The worst GPU's worst instant by kind, one bar for each named plan.

    The budget is drawn where all plans have the same one.
    """
    _checked_some("estimates", estimates)
    bars = [_Bar(name, e.peak, e.worst.when, e.verdict) for name, e in estimates.items()]
    every = list(estimates.values())
    return _stacked_bars("Peak bytes of the fullest GPU", _common(every), bars, _budget(every))


@dataclass(frozen=True, slots=True)
class _Bar:
    label: str
    peak: Bytes
    when: str
    verdict: Verdict | None


def _stacked_bars(title: str, subtitle: str, bars: Sequence[_Bar], budget: "_Budget | None") -> "Figure":
    reach = max([bar.peak.total_bytes for bar in bars] + ([budget.n_bytes] if budget else []))
    unit = _unit(reach)
    labels = [_folded(bar.label) for bar in bars]
    n_lines = max(label.count("\n") for label in labels) + 1
    height_in = 1.5 + max(0.5, 0.19 * n_lines) * len(bars)
    figure, axes = _axes(title, subtitle, height_in=height_in, beside=labels)
    for kind in STACK:
        _draw_kind(axes, kind, bars, unit, room_bytes=0.045 * reach)
    for y, bar in enumerate(bars):
        _label_total(axes, y, bar, _total_bytes(bar, budget, reach), unit)
    axes.set_yticks(range(len(bars)), labels)
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.set_xlim(0, BEYOND * reach / unit.n_bytes)
    axes.set_xlabel(f"bytes held at the worst instant ({unit.name})")
    axes.tick_params(axis="y", length=0)
    if budget:
        axes.axvline(budget.n_bytes / unit.n_bytes, label=budget.text, zorder=3, **_DASHED)
    _legend_in_a_row(figure, axes)
    return figure


LABEL_LENGTH: Final = 32
"""Characters of a bar's name in a line; a longer one goes on below."""

BEYOND: Final = 1.45
"""How far the axis of bars goes on beyond the longest, for what is written there."""

CHARACTER: Final = 0.0105
"""About how much of a chart's width a bold character takes."""


def _folded(label: str) -> str:
    return "\n".join(fill(line, LABEL_LENGTH) for line in label.splitlines())


def _total_bytes(bar: _Bar, budget: "_Budget | None", reach: int) -> float:
    """Where a bar's total is written: at its end, or behind the budget's line if that would cross it."""
    end = bar.peak.total_bytes
    width = CHARACTER * max(len(_total_text(bar)), len(bar.when)) * BEYOND * reach
    return budget.n_bytes if budget and end <= budget.n_bytes < end + width else end


def _total_text(bar: _Bar) -> str:
    return human_bytes(bar.peak.total_bytes) + ("" if bar.verdict is None else f", {bar.verdict}")


def _draw_kind(axes: "Axes", kind: Kind, bars: Sequence[_Bar], unit: "_Unit", *, room_bytes: float) -> None:
    """One kind's part of every bar, with its value where there is room for it."""
    values = [_of(bar.peak, kind) for bar in bars]
    rectangles = axes.barh(
        range(len(bars)),
        [value / unit.n_bytes for value in values],
        left=[_below(bar.peak, kind) / unit.n_bytes for bar in bars],
        height=0.66,
        color=COLORS[kind],
        edgecolor="white",
        linewidth=0.8,
        label=LABELS[kind],
    )
    texts = [f"{value / unit.n_bytes:.3g}" if value > room_bytes else "" for value in values]
    axes.bar_label(rectangles, texts, label_type="center", fontsize=8, color=INK[kind])


def _label_total(axes: "Axes", y: int, bar: _Bar, x_bytes: float, unit: "_Unit") -> None:
    end = x_bytes / unit.n_bytes
    place: dict[str, Any] = {"textcoords": "offset points", "va": "center", "bbox": _PAPER, "zorder": 4}
    axes.annotate(_total_text(bar), (end, y), xytext=(6, 6), fontsize=9, weight="bold", **place)
    axes.annotate(bar.when, (end, y), xytext=(6, -6), fontsize=8, color=MUTED, **place)


def step_timeline(estimate: Estimate, stage: int | None = None) -> "Figure":
    """Bytes held by one GPU of a stage (the worst one if None) over one step, by kind, the peak marked.

    The horizontal axis is the order of allocations and frees, not time: it says what is held when, not for
    how long. A phase of few events is widened to be seen. A long step is drawn by its upper envelope, which
    keeps every maximum.
    """
    of = _stage_of(estimate, stage)
    held = _held(estimate.timeline(of.stage), of.peak)
    unit = _unit(of.peak.total_bytes)
    title = f"Bytes held over one training step, {_stage_text(estimate, of)}"
    figure, axes = _axes(title, _common([estimate]), height_in=4.6)
    starts, points = _drawn(held)
    drawn = held.by_kind[:, [*points, points[-1]]] / unit.n_bytes
    axes.stackplot(starts, drawn, step="post", **_STACKED)
    axes.set_xlim(0, starts[-1])
    axes.set_ylim(0, 1.16 * of.peak.total_bytes / unit.n_bytes)
    at = int(np.argmax(held.total[points]))
    _mark_peak(axes, float(starts[at] + starts[at + 1]) / 2, of, unit)
    axes.set_xlabel(_events_text(len(held.total), len(points)))
    _shade_phases(axes, held)
    axes.set_ylabel(f"bytes held ({unit.name})")
    _legend_top_down(figure, axes)
    return figure


def _events_text(n_events: int, n_points: int) -> str:
    text = f"{n_events:,} allocations and frees in order (not to the scale of time)"
    return text if n_points == n_events else f"{text}, upper envelope"


def _mark_peak(axes: "Axes", x: float, of: StageEstimate, unit: "_Unit") -> None:
    y = of.peak.total_bytes / unit.n_bytes
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
    """After each event of a step: the bytes of each kind (rows as `STACK`) and in all; its phase."""

    by_kind: "NDArray[np.int64]"
    total: "NDArray[np.int64]"
    phases: tuple[tuple[str, int], ...]
    """Each phase in order: its name and its number of events."""

    @property
    def widths(self) -> "NDArray[np.float64]":
        """How wide each phase is drawn: its events, but never too narrow to be seen."""
        counts = np.array([n for _, n in self.phases], dtype=np.float64)
        return cast("NDArray[np.float64]", np.maximum(counts, counts.sum() / (2 * max(len(counts), 4))))


def _held(step: Stretch, peak: Bytes) -> _Held:
    row = {kind: i for i, kind in enumerate(STACK)}
    names, found = zip(*unrolled(step), strict=True)
    deltas = np.zeros((len(STACK), len(found)), dtype=np.int64)
    for i, event in enumerate(found):
        deltas[row[event.buffer.kind], i] = event.sign * event.buffer.n_bytes
    by_kind = deltas.cumsum(axis=1) + _at_rest(step, peak)[:, None]
    phases = groupby(_phases(names))
    return _Held(by_kind, by_kind.sum(axis=0), tuple((name, len(list(run))) for name, run in phases))


def _at_rest(step: Stretch, peak: Bytes) -> "NDArray[np.int64]":
    """What is held between steps, by kind: the peak less what the step has added by then."""
    added: Counter[Any] = Counter()
    alive_at_high(step, added)
    rises = bytes_by_kind(added)
    return np.array([_of(peak, kind) - _of(rises, kind) for kind in STACK], dtype=np.int64)


PHASES: Final = {
    "forward": "forward",
    "loss": "forward",
    "backward": "backward",
    "gradient reduction": "backward",
    "optimizer step": "optimizer",
}
"""The phase that a stretch belongs to, by the first words of its name."""

SHADES: Final = {"forward": "white", "backward": "0.93", "optimizer": "0.84"}


def _phases(names: Iterable[str]) -> Iterator[str]:
    """Each event's phase; what belongs to none stays with the one before."""
    phase = "forward"
    for name in names:
        phase = PHASES.get(name.partition(":")[0], phase)
        yield phase


def _drawn(held: _Held) -> "tuple[NDArray[np.float64], NDArray[np.int64]]":
    """Where the drawn points start (and the last one ends), and which events they are.

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
    """Each phase shaded, and named below where it is wide enough."""
    stops = held.widths.cumsum()
    starts = stops - held.widths
    names = [name for name, _ in held.phases]
    for name, start, stop in zip(names, starts, stops, strict=True):
        axes.axvspan(start, stop, color=SHADES[name], linewidth=0, zorder=0)
    named = [i for i, name in enumerate(names) if _upright(name, held.widths[i] / stops[-1]) is False]
    axes.set_xticks([(starts[i] + stops[i]) / 2 for i in named], [names[i] for i in named], fontsize=9)
    axes.tick_params(axis="x", length=0)
    if len(named) < len(names):
        axes.set_xlabel("white: forward, grey: backward, dark grey: optimizer\n" + axes.get_xlabel())


def _upright(text: str, share: float) -> bool | None:
    """Whether a text in a share of the horizontal axis must stand upright; None: it has no room at all."""
    if share < NARROWEST:
        return None
    return bool(share < 0.011 * len(text))


def ledger_at_peak(estimate: Estimate, stage: int | None = None, top: int = 12) -> "Figure":
    """The largest named tensors that one GPU of a stage (the worst one if None) holds at its peak.

    The equal tensors of all blocks are one entry.
    """
    of = _stage_of(estimate, stage)
    rows = _ledger(estimate, of)
    shown = rows[: checked_count("top", top)]
    unit = _unit(shown[0].total_bytes)
    part = sum(row.total_bytes for row in shown) / of.peak.total_bytes
    title = f"The {len(shown)} largest of {len(rows)} entries alive at the peak hold {part:.0%} of it"
    peak_text = f"peak of {_stage_text(estimate, of)}: {human_bytes(of.peak.total_bytes)}, {of.when}"
    figure, axes = _axes(
        title,
        f"{peak_text}\n{_common([estimate])}",
        height_in=1.7 + 0.31 * len(shown),
        beside=[row.name for row in shown],
    )
    values = [row.total_bytes / unit.n_bytes for row in shown]
    bars = axes.barh(range(len(shown)), values, height=0.72, color=[COLORS[row.kind] for row in shown])
    axes.bar_label(bars, [row.text for row in shown], padding=4, fontsize=8, color=MUTED)
    axes.set_yticks(range(len(shown)), [row.name for row in shown], fontsize=8.5)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xlim(0, 1.8 * values[0])
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(f"bytes held at the peak ({unit.name})")
    _legend_of_kinds(figure, {row.kind for row in shown})
    return figure


@dataclass(frozen=True, slots=True)
class _Row:
    name: str
    kind: Kind
    shape: Shape
    dtype: DType
    count: int
    total_bytes: int

    @property
    def text(self) -> str:
        """What it is made of."""
        times = f"{self.count} x " if self.count > 1 else ""
        return f"{human_bytes(self.total_bytes)} = {times}{list(self.shape)} {self.dtype.name}"


def _ledger(estimate: Estimate, of: StageEstimate) -> list[_Row]:
    counts: Counter[tuple[str, Kind, Shape, DType, int]] = Counter()
    for buffer, n in of.alive.items():
        counts[buffer.name, buffer.kind, buffer.shape, buffer.dtype, buffer.n_bytes] += n
    rows = [_Row(*key[:4], count=n, total_bytes=n * key[4]) for key, n in counts.items() if n]
    return sorted(rows, key=lambda row: -row.total_bytes)


def sweep(keyword: str, estimates: Iterable[Estimate]) -> "Figure":
    """Peak bytes by kind of plans that differ in one keyword of a Plan, against that keyword.

    The kinds jump where the worst instant of the step becomes another one; a dotted line parts them.
    """
    from matplotlib.ticker import MaxNLocator

    every = sorted(estimates, key=lambda e: _value(e, keyword))
    _checked_some("estimates", every)
    values = [_value(e, keyword) for e in every]
    budget = _budget(every)
    highest = max(e.peak.total_bytes for e in every)
    unit = _unit(highest)
    title = f"Peak bytes of the fullest GPU against {keyword}"
    figure, axes = _axes(title, _common(every, keyword), height_in=4.6)
    rows = np.array([[_of(e.peak, kind) / unit.n_bytes for e in every] for kind in STACK])
    axes.stackplot(values, rows, **_STACKED)
    marker = "o" if len(values) <= 24 else ""
    axes.plot(values, rows.sum(axis=0), "k-", marker=marker, markersize=4, clip_on=False, label="peak")
    if budget and budget.n_bytes < 1.15 * highest:
        axes.axhline(budget.n_bytes / unit.n_bytes, label=budget.text, **_DASHED)
    axes.set_xlim(values[0], values[-1])
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))
    axes.set_ylim(0, 1.25 * highest / unit.n_bytes)
    _part_instants(axes, values, [e.worst.when.partition(",")[0] for e in every])
    axes.set_xlabel(AXIS_LABELS.get(keyword, keyword))
    axes.set_ylabel(f"bytes held at the worst instant ({unit.name})")
    _legend_top_down(figure, axes)
    return figure


def _value(estimate: Estimate, keyword: str) -> int:
    value = getattr(estimate.plan, keyword, None)
    if isinstance(value, bool) or not isinstance(value, int):
        names = ", ".join(AXIS_LABELS)
        raise InvalidValue(f"keyword={keyword!r} is no number of a plan; use one of {names}.")
    return value


def _part_instants(axes: "Axes", values: Sequence[int], whens: Sequence[str]) -> None:
    """Names the worst instants along the horizontal axis, with a line where one gives way to another."""
    cuts = [i for i in range(1, len(whens)) if whens[i] != whens[i - 1]]
    edges = [values[0], *((values[i - 1] + values[i]) / 2 for i in cuts), values[-1]]
    for i, start, stop in zip((0, *cuts), edges, edges[1:], strict=False):
        share = (stop - start) / max(1, values[-1] - values[0])
        text = f"peak in {whens[i]}" if share > 0.3 else whens[i]
        upright = _upright(text, share)
        if upright is not None:
            axes.text((start + stop) / 2, 0.985, text, transform=axes.get_xaxis_transform(), ha="center",
                      va="top", rotation=90 if upright else 0, fontsize=9, color=MUTED)  # fmt: skip
    for edge in edges[1:-1]:
        axes.axvline(edge, color="black", linewidth=0.8, linestyle=":")


def predicted_beside_measured(records: Iterable[Mapping[str, Any]], tolerance: float = 0.01) -> "Figure":
    """Measured and predicted peak of every case that ran, and the signed error beside the tolerance.

    A record is an object of `python -m validate`, with `case`, `outcome`, `predicted` and `measured`; of each
    case the peak of the fullest rank is shown, and the error of the rank whose prediction is farthest off.
    """
    every = list(records)
    pairs = [_pair(r) for r in every if r.get("outcome") == "ok" and r.get("predicted") and r.get("measured")]
    _checked_some("records that ran and were predicted", pairs)
    figure, left, right = _two_axes(len(pairs))
    rows = range(len(pairs))
    unit = _unit(max(pair.measured_bytes for pair in pairs))
    left.barh(rows, [p.measured_bytes / unit.n_bytes for p in pairs], height=0.7, color=MEASURED,
              label="measured")  # fmt: skip
    left.plot([p.predicted_bytes / unit.n_bytes for p in pairs], rows, linestyle="", marker="|", markersize=9,
              markeredgewidth=2, color="black", label="predicted")  # fmt: skip
    left.set_yticks(rows, [p.name for p in pairs], fontsize=8)
    left.set_ylim(len(pairs) - 0.4, -0.6)
    left.set_xlabel(f"peak of the fullest rank ({unit.name})")
    if len(every) > len(pairs):
        text = f"{len(every) - len(pairs)} more cases have no run or no prediction"
        left.set_title(text, loc="left", fontsize=9, color=MUTED)
    _draw_errors(right, pairs, 100 * tolerance)
    figure.suptitle(_verdict(pairs, tolerance), x=0.012, ha="left", fontsize=12, weight="bold")
    handles, labels = left.get_legend_handles_labels()
    place: dict[str, Any] = {"loc": "outside lower left", "ncols": 2, "frameon": False, "fontsize": 8.5}
    figure.legend(handles[::-1], labels[::-1], **place)
    return figure


@dataclass(frozen=True, slots=True)
class _Pair:
    name: str
    predicted_bytes: int
    measured_bytes: int
    error: float
    """Prediction / measurement - 1 of the rank farthest off, and its ..."""
    off_bytes: int


def _pair(record: Mapping[str, Any]) -> _Pair:
    ranks = zip(record["predicted"]["ranks"], record["measured"]["ranks"], strict=True)
    peaks = [(ahead["peak_bytes"], seen["peak_bytes"]) for ahead, seen in ranks]
    fullest = max(peaks, key=lambda pair: pair[1])
    worst = max(peaks, key=lambda pair: abs(pair[0] / pair[1] - 1))
    return _Pair(record["case"]["name"], *fullest, worst[0] / worst[1] - 1, worst[0] - worst[1])


def _verdict(pairs: Sequence[_Pair], tolerance: float) -> str:
    worst = max((pair.error for pair in pairs), key=abs)
    within = sum(abs(pair.error) <= tolerance for pair in pairs)
    head = f"{within} of {len(pairs)} peaks predicted within {tolerance:.0%} of the measured one"
    return f"{head}, the worst {worst:+.3%}"


def _draw_errors(axes: "Axes", pairs: Sequence[_Pair], tolerance: float) -> None:
    percents = [100 * pair.error for pair in pairs]
    rows = range(len(percents))
    axes.axvspan(-tolerance, tolerance, color="0.92", linewidth=0, zorder=0)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.hlines(rows, 0, percents, color=MUTED, linewidth=1)
    colors = [WITHIN if abs(percent) <= tolerance else OUTSIDE for percent in percents]
    axes.scatter(percents, rows, c=colors, s=22, zorder=3)
    reach = 2 * max(tolerance, *map(abs, percents))
    axes.set_xlim(-reach, reach)
    place: dict[str, Any] = {"ha": "right", "va": "center", "transform": axes.get_yaxis_transform()}
    for y, pair in enumerate(pairs):
        axes.text(1, y, f"{pair.off_bytes:+,} B", fontsize=8, color=MUTED, **place)
    axes.set_title("farthest rank off by", loc="right", fontsize=8, color=MUTED)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(f"prediction / measurement - 1 (%)\nshaded: within {tolerance:g} %")
    axes.tick_params(axis="y", length=0)


# What the charts share


@dataclass(frozen=True, slots=True)
class _Unit:
    name: str
    n_bytes: int


def _unit(highest_bytes: int) -> _Unit:
    """The largest unit of which the highest value has at least one."""
    for name, n_bytes in (("GiB", GiB), ("MiB", MiB)):
        if highest_bytes >= n_bytes:
            return _Unit(name, n_bytes)
    return _Unit("KiB", KiB)


@dataclass(frozen=True, slots=True)
class _Budget:
    n_bytes: int
    text: str


def _budget(estimates: Sequence[Estimate]) -> _Budget | None:
    """The budget that all have in common; None if there is none, or no verdict hangs on it (accounting)."""
    clusters = [e.cluster for e in estimates if e.cluster is not None and not e.engine.is_accounting]
    budgets = {(c.gpu.name, c.budget_bytes) for c in clusters}
    if len(clusters) < len(estimates) or len(budgets) != 1:
        return None
    name, n_bytes = budgets.pop()
    return None if n_bytes is None else _Budget(n_bytes, f"budget of {name}: {human_bytes(n_bytes)}")


def _of(parts: Bytes, kind: Kind) -> int:
    return cast(int, getattr(parts, f"{kind}_bytes"))


def _below(parts: Bytes, kind: Kind) -> int:
    return sum(_of(parts, lower) for lower in STACK[: STACK.index(kind)])


def _checked_some(what: str, found: "Sequence[object] | Mapping[str, object]") -> None:
    if not found:
        raise InvalidValue(f"there are no {what} to draw; give at least one.")


def _stage_of(estimate: Estimate, stage: int | None) -> StageEstimate:
    if stage is None:
        return estimate.worst
    estimate.timeline(stage)  # refuses a stage that is not there
    return estimate.stages[stage]


def _stage_text(estimate: Estimate, of: StageEstimate) -> str:
    return (
        "one GPU" if len(estimate.stages) == 1 else f"one GPU of stage {of.stage} ({_layers_text(of.layers)})"
    )


def _layers_text(layers: Sequence[range]) -> str:
    return f"layer{'s' if sum(map(len, layers)) > 1 else ''} {layers_text(layers)}"


FIELDS: Final = (
    "dp",
    "tp",
    "pp",
    "zero",
    "sequence_parallel",
    "schedule",
    "micro_batch",
    "global_batch",
    "seq_len",
    "precision",
    "optimizer",
    "recompute",
    "engine",
)
"""What subtitles say of every plan, in the keywords of `memplan.estimate`; of other options they say what is
not the default."""


def _common(estimates: Sequence[Estimate], varied: str = "") -> str:
    """What all plans have in common, but for the `varied` keyword."""
    models = {e.model.name for e in estimates}
    parts = [models.pop()] if len(models) == 1 else []
    for field in (*FIELDS, *(field for field in Plan.__dataclass_fields__ if field not in FIELDS)):
        values = {getattr(e.plan, field) for e in estimates}
        if len(values) == 1 and field != varied and _says_something(estimates, field):
            parts.append(
                f"{values.pop()}" if field in ("precision", "optimizer") else f"{field}={values.pop()}"
            )
    if any(e.confirmed == "unmeasured" for e in estimates):
        parts.append("not confirmed by a run")
    return ", ".join(parts)


def _says_something(estimates: Sequence[Estimate], field: str) -> bool:
    """Whether a field is worth a word: degrees of 1, what only many ranks have, one pass a step are not."""
    axis = {"zero": "dp", "schedule": "pp", "sequence_parallel": "tp"}.get(field, field)
    if axis in ("dp", "tp", "pp"):
        return any(getattr(e.plan, axis) > 1 for e in estimates)
    if field == "global_batch":
        return any(e.plan.n_micro_batches > 1 for e in estimates)
    if field == "engine" or field not in FIELDS:
        return any(getattr(e.plan, field) != Plan.__dataclass_fields__[field].default for e in estimates)
    return True


def _axes(
    title: str, subtitle: str, *, height_in: float, beside: Iterable[str] = ()
) -> "tuple[Figure, Axes]":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
    axes = figure.add_subplot()
    figure.suptitle(title, x=0.012, ha="left", fontsize=12, weight="bold")
    longest = max((len(line) for text in beside for line in text.splitlines()), default=0)
    room = max(40, round(LINE_LENGTH - 1.1 * longest))
    lines = [fill(line, room) for line in subtitle.splitlines()]
    axes.set_title("\n".join(lines), loc="left", fontsize=9, color=MUTED)
    _plain(axes)
    return figure, axes


def _two_axes(n_rows: int) -> "tuple[Figure, Axes, Axes]":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_IN, 1.6 + 0.2 * n_rows), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[1.5, 1])
    _plain(left)
    _plain(right)
    return figure, left, right


def _plain(axes: "Axes") -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)


def _legend_in_a_row(figure: "Figure", axes: "Axes") -> None:
    """The kinds as they are stacked, then the lines."""
    handles, labels = axes.get_legend_handles_labels()
    order = sorted(range(len(labels)), key=lambda i: labels[i] not in LABELS.values())
    figure.legend(
        [handles[i] for i in order],
        [labels[i] for i in order],
        loc="outside lower left",
        ncols=len(handles),
        frameon=False,
        fontsize=8.5,
        columnspacing=1.2,
        handlelength=1.6,
    )


def _legend_top_down(figure: "Figure", axes: "Axes") -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right center", frameon=False, fontsize=9)


def _legend_of_kinds(figure: "Figure", kinds: set[Kind]) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(color=COLORS[kind], label=LABELS[kind]) for kind in STACK if kind in kinds]
    figure.legend(handles=patches, loc="outside lower left", ncols=len(patches), frameon=False, fontsize=8.5)
