"""Charts of estimates and of records: every function returns a matplotlib Figure and keeps no state.

Kinds are stacked in one order everywhere, what stays from step to step first; legends follow it. Colors are
those of Okabe and Ito 2008, "Color Universal Design", ordered so that neighbours differ in lightness too
and a print in grey stays readable. In a notebook `%matplotlib inline` shows a returned Figure.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np

from memplan.errors import InvalidValue
from memplan.estimate import Estimate, StageEstimate, alive_at_peak
from memplan.shapes import DType, Event, Kind, Shape
from memplan.timeline import Bytes, Stretch, alive_at_high, bytes_by_kind
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
    "temporaries": "#D55E00",
}

INK: Final[Mapping[Kind, str]] = dict.fromkeys(STACK, "black") | {"weights": "white", "grads": "white"}
"""What is legible on each color."""

MUTED: Final = "0.35"
WIDTH_IN: Final = 9.0
MOST_POINTS: Final = 900
"""Points of a timeline that are drawn: about as many as the chart is wide in pixels."""

AXIS_LABELS: Final = {
    "seq_len": "seq_len (tokens per sequence)",
    "micro_batch": "micro_batch (sequences per pass and replica)",
    "global_batch": "global_batch (sequences per step)",
    "dp": "dp (data-parallel ranks)",
    "tp": "tp (tensor-parallel ranks)",
    "pp": "pp (pipeline stages)",
}


def stage_peaks(estimate: Estimate) -> "Figure":
    """The worst instant of each pipeline stage by kind, and the cluster's budget if there is one."""
    stages = estimate.stages
    bars = [_Bar(f"stage {s.stage}\n{_layers_text(s.layers)}", s.peak, s.when) for s in stages]
    one = len(stages) == 1
    title = "Peak bytes of one GPU" if one else "Peak bytes of one GPU in each pipeline stage"
    return _stacked_bars(title, _subtitle(estimate), bars, _budget([estimate]))


def compare(estimates: Mapping[str, Estimate]) -> "Figure":
    """The worst GPU's worst instant by kind, one bar for each named plan.

    The budget is drawn where all plans have the same one.
    """
    _checked_some("estimates", estimates)
    bars = [_Bar(name, e.peak, e.worst.when) for name, e in estimates.items()]
    every = list(estimates.values())
    return _stacked_bars("Peak bytes of the fullest GPU", _common(every), bars, _budget(every))


@dataclass(frozen=True, slots=True)
class _Bar:
    label: str
    peak: Bytes
    when: str


def _stacked_bars(title: str, subtitle: str, bars: Sequence[_Bar], budget: "_Budget | None") -> "Figure":
    highest = max(bar.peak.total_bytes for bar in bars)
    unit = _unit(max(highest, budget.n_bytes if budget else 0))
    figure, axes = _axes(title, subtitle, height_in=1.5 + 0.5 * len(bars))
    for kind in STACK:
        widths = np.array([_of(bar.peak, kind) for bar in bars]) / unit.n_bytes
        lefts = np.array([_below(bar.peak, kind) for bar in bars]) / unit.n_bytes
        rectangles = axes.barh(range(len(bars)), widths, left=lefts, height=0.66, color=COLORS[kind],
                               edgecolor="white", linewidth=0.8, label=LABELS[kind])  # fmt: skip
        room = 0.045 * max(highest, budget.n_bytes if budget else 0) / unit.n_bytes
        texts = [f"{width:.3g}" if width > room else "" for width in widths]
        axes.bar_label(rectangles, texts, label_type="center", fontsize=8, color=INK[kind])
    for y, bar in enumerate(bars):
        _label_total(axes, y, bar, unit, budget)
    axes.set_yticks(range(len(bars)), [bar.label for bar in bars])
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.set_xlim(0, 1.36 * max(highest, budget.n_bytes if budget else 0) / unit.n_bytes)
    axes.set_xlabel(f"bytes held at the worst instant ({unit.name})")
    axes.tick_params(axis="y", length=0)
    if budget:
        axes.axvline(budget.n_bytes / unit.n_bytes, color="black", linestyle=(0, (4, 3)), linewidth=1.2,
                     label=budget.text, zorder=3)  # fmt: skip
    _legend_in_rows(figure, axes)
    return figure


def _label_total(axes: "Axes", y: int, bar: _Bar, unit: "_Unit", budget: "_Budget | None") -> None:
    over = budget is not None and bar.peak.total_bytes > budget.n_bytes
    text = human_bytes(bar.peak.total_bytes) + (", does not fit" if over else "")
    axes.annotate(f"{text}\n", (bar.peak.total_bytes / unit.n_bytes, y), xytext=(6, -1), va="center",
                  textcoords="offset points", fontsize=9, weight="bold", bbox=_PAPER, zorder=4)  # fmt: skip
    axes.annotate(f"\n{bar.when}", (bar.peak.total_bytes / unit.n_bytes, y), xytext=(6, 1), va="center",
                  textcoords="offset points", fontsize=8, color=MUTED, zorder=4)  # fmt: skip


_PAPER: Final = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5}


def step_timeline(estimate: Estimate, stage: int | None = None) -> "Figure":
    """Bytes held by one GPU of a stage (the worst one if None) over one step, by kind, the peak marked.

    The horizontal axis is the order of allocations and frees, not time: it says what is held when, not for
    how long. A phase of few events is widened to be seen. A long step is drawn by its upper envelope, which
    keeps every maximum.
    """
    of = _stage_of(estimate, stage)
    held = _held(estimate.timeline(of.stage), of.peak)
    unit = _unit(of.peak.total_bytes)
    figure, axes = _axes(
        f"One training step, {_stage_text(estimate, of)}", _subtitle(estimate), height_in=4.6
    )
    x, points = _drawn(held)
    rows = [
        np.append(held.by_kind[i, points], held.by_kind[i, points[-1]]) / unit.n_bytes
        for i in range(len(STACK))
    ]
    axes.stackplot(x, rows, step="post", colors=[COLORS[kind] for kind in STACK], linewidth=0,
                   labels=[LABELS[kind] for kind in STACK])  # fmt: skip
    axes.set_xlim(0, x[-1])
    axes.set_ylim(0, 1.25 * of.peak.total_bytes / unit.n_bytes)
    at = int(np.argmax(held.total[points]))
    _mark_peak(axes, float(x[at] + x[at + 1]) / 2, of, unit)
    _shade_phases(axes, held, x[-1])
    axes.set_xticks([])
    axes.set_xlabel(_events_text(len(held.total), len(points)))
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
    axes.annotate(f"peak {human_bytes(of.peak.total_bytes)}\n{of.when}", (x, y), xytext=(-9 if left else 9, 3),
                  textcoords="offset points", ha="right" if left else "left", va="bottom", fontsize=9,
                  weight="bold", bbox=_PAPER, zorder=5)  # fmt: skip


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
        counts = np.array([n for _, n in self.phases], dtype=float)
        return np.maximum(counts, counts.sum() / (2 * max(len(counts), 8)))


def _held(step: Stretch, peak: Bytes) -> _Held:
    row = {kind: i for i, kind in enumerate(STACK)}
    names, found = zip(*_events(step), strict=True)
    deltas = np.zeros((len(STACK), len(found)), dtype=np.int64)
    for i, event in enumerate(found):
        deltas[row[event.buffer.kind], i] = event.sign * event.buffer.n_bytes
    by_kind = deltas.cumsum(axis=1) + _at_rest(step, peak)[:, None]
    phases = groupby(_phases(names))
    return _Held(by_kind, by_kind.sum(axis=0), tuple((name, len(list(run))) for name, run in phases))


def _events(stretch: Stretch) -> Iterator[tuple[str, Event]]:
    for _ in range(stretch.repeats):
        for event in stretch.events:
            yield stretch.name, event
        for part in stretch.parts:
            yield from _events(part)


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


def _shade_phases(axes: "Axes", held: _Held, end: float) -> None:
    """Names above the phases that are wide enough for one; all others than forward are shaded."""
    edge = 0.0
    shades = {"forward": "white", "backward": "0.93", "optimizer": "0.84"}
    for (name, _), width in zip(held.phases, held.widths, strict=True):
        axes.axvspan(edge, edge + width, color=shades[name], linewidth=0, zorder=0)
        if width > 0.055 * end:
            text = "forward and loss" if name == "forward" and width > 0.2 * end else name
            axes.text(edge + width / 2, 0.985, text, transform=axes.get_xaxis_transform(), ha="center",
                      va="top", fontsize=9, color=MUTED)  # fmt: skip
        edge += width


def ledger_at_peak(estimate: Estimate, stage: int | None = None, top: int = 12) -> "Figure":
    """The largest named tensors that a stage (the worst one if None) holds at its peak."""
    of = _stage_of(estimate, stage)
    rows = _ledger(estimate, of)
    shown = rows[:top]
    unit = _unit(shown[0].total_bytes)
    part = sum(row.total_bytes for row in shown) / of.peak.total_bytes
    title = f"The {len(shown)} largest of {len(rows)} entries at the peak, {part:.0%} of {_peak_text(of)}"
    figure, axes = _axes(title, _subtitle(estimate), height_in=1.6 + 0.31 * len(shown))
    values = [row.total_bytes / unit.n_bytes for row in shown]
    bars = axes.barh(range(len(shown)), values, height=0.72, color=[COLORS[row.kind] for row in shown])
    axes.bar_label(bars, [row.text for row in shown], padding=4, fontsize=8, color=MUTED)
    axes.set_yticks(range(len(shown)), [row.name for row in shown], fontsize=8.5)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xlim(0, 1.75 * values[0])
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
    for buffer, n in alive_at_peak(estimate.model, estimate.plan, of.rank, estimate.device)[0].items():
        counts[buffer.name, buffer.kind, buffer.shape, buffer.dtype, buffer.n_bytes] += n
    rows = [_Row(*key[:4], count=n, total_bytes=n * key[4]) for key, n in counts.items() if n]
    return sorted(rows, key=lambda row: -row.total_bytes)


def sweep(keyword: str, estimates: Iterable[Estimate]) -> "Figure":
    """Peak bytes by kind of plans that differ in one keyword of a Plan, against that keyword.

    Where the worst instant of the step changes, a line says so: the kinds jump there, for they are of another instant.
    """
    every = sorted(estimates, key=lambda e: cast(int, getattr(e.plan, keyword)))
    _checked_some("estimates", every)
    values = [getattr(e.plan, keyword) for e in every]
    budget = _budget(every)
    highest = max(e.peak.total_bytes for e in every)
    unit = _unit(highest)
    figure, axes = _axes(
        f"Peak bytes of the fullest GPU against {keyword}", _common(every, keyword), height_in=4.6
    )
    rows = [[_of(e.peak, kind) / unit.n_bytes for e in every] for kind in STACK]
    axes.stackplot(values, rows, colors=[COLORS[kind] for kind in STACK], linewidth=0,
                   labels=[LABELS[kind] for kind in STACK])  # fmt: skip
    axes.plot(values, np.sum(rows, axis=0), color="black", linewidth=1.2, label="peak",
              marker="o" if len(values) <= 24 else "", markersize=4)  # fmt: skip
    if budget and budget.n_bytes < 1.15 * highest:
        axes.axhline(budget.n_bytes / unit.n_bytes, color="black", linestyle=(0, (4, 3)), linewidth=1.2,
                     label=budget.text)  # fmt: skip
    axes.set_xlim(values[0], values[-1])
    axes.set_ylim(0, 1.25 * highest / unit.n_bytes)
    _name_instants(axes, values, [e.worst.when.partition(",")[0] for e in every])
    axes.set_xlabel(AXIS_LABELS.get(keyword, keyword))
    axes.set_ylabel(f"bytes held at the worst instant ({unit.name})")
    _legend_top_down(figure, axes)
    return figure


def _name_instants(axes: "Axes", values: Sequence[float], whens: Sequence[str]) -> None:
    start = values[0]
    groups = [(when, [v for _, v in group]) for when, group in
              groupby(zip(whens, values, strict=True), key=lambda pair: pair[0])]  # fmt: skip
    for i, (when, inside) in enumerate(groups):
        end = (inside[-1] + groups[i + 1][1][0]) / 2 if i + 1 < len(groups) else values[-1]
        if i + 1 < len(groups):
            axes.axvline(end, color="black", linewidth=0.8, linestyle=":")
        text = f"peak in {when}" if i == 0 else when
        axes.text((start + end) / 2, 0.985, text, transform=axes.get_xaxis_transform(), ha="center", va="top",
                  fontsize=9, color=MUTED, bbox=_PAPER)  # fmt: skip
        start = end


def predicted_beside_measured(records: Iterable[Mapping[str, Any]], tolerance: float = 0.01) -> "Figure":
    """Measured and predicted peak of every case that ran, and the signed error beside the tolerance.

    A record is an object of `python -m validate`, with `case`, `outcome`, `predicted` and `measured`; of each
    case the rank is shown whose prediction is farthest off.
    """
    every = list(records)
    pairs = [_pair(r) for r in every if r.get("outcome") == "ok" and r.get("predicted") and r.get("measured")]
    _checked_some("records that ran and were predicted", pairs)
    figure, left, right = _two_axes(len(pairs))
    rows = range(len(pairs))
    unit = _unit(max(pair.measured_bytes for pair in pairs))
    left.barh(rows, [p.measured_bytes / unit.n_bytes for p in pairs], height=0.7, color=COLORS["optimizer"],
              label="measured")  # fmt: skip
    left.plot([p.predicted_bytes / unit.n_bytes for p in pairs], rows, linestyle="", marker="|", markersize=9,
              markeredgewidth=2, color="black", label="predicted")  # fmt: skip
    left.set_yticks(rows, [p.name for p in pairs], fontsize=8)
    left.set_ylim(len(pairs) - 0.4, -0.6)
    left.set_xlabel(f"peak of the rank farthest off ({unit.name})")
    _draw_errors(right, [100 * p.error for p in pairs], 100 * tolerance)
    figure.suptitle(_verdict(pairs, len(every), tolerance), x=0.012, ha="left", fontsize=12, weight="bold")
    figure.legend(
        *left.get_legend_handles_labels(), loc="outside lower left", ncols=2, frameon=False, fontsize=9
    )
    return figure


@dataclass(frozen=True, slots=True)
class _Pair:
    name: str
    predicted_bytes: int
    measured_bytes: int

    @property
    def error(self) -> float:
        """Prediction / measurement - 1."""
        return self.predicted_bytes / self.measured_bytes - 1


def _pair(record: Mapping[str, Any]) -> _Pair:
    ranks = zip(record["predicted"]["ranks"], record["measured"]["ranks"], strict=True)
    pairs = [_Pair(record["case"]["name"], p["peak_bytes"], m["peak_bytes"]) for p, m in ranks]
    return max(pairs, key=lambda pair: abs(pair.error))


def _verdict(pairs: Sequence[_Pair], n_records: int, tolerance: float) -> str:
    worst, within = max((p.error for p in pairs), key=abs), sum(abs(p.error) <= tolerance for p in pairs)
    left_out = (
        f" ({n_records - len(pairs)} not drawn: no run or no prediction)" if n_records > len(pairs) else ""
    )
    return f"{within} of {len(pairs)} runs within {tolerance:.0%}, farthest off {worst:+.2%}{left_out}"


def _draw_errors(axes: "Axes", percents: Sequence[float], tolerance: float) -> None:
    rows = range(len(percents))
    axes.axvspan(-tolerance, tolerance, color="0.92", linewidth=0, zorder=0)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.hlines(rows, 0, percents, color=MUTED, linewidth=1)
    inside = [abs(percent) <= tolerance for percent in percents]
    colors = [COLORS["weights"] if good else COLORS["temporaries"] for good in inside]
    axes.scatter(percents, rows, c=colors, s=22, zorder=3)
    reach = 1.25 * max(tolerance, *map(abs, percents))
    axes.set_xlim(-reach, reach)
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
    """The budget that all have in common; None if there is none."""
    clusters = [e.cluster for e in estimates if e.cluster is not None]
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


def _layers_text(layers: range) -> str:
    return f"layers {layers.start} to {layers.stop - 1}" if len(layers) > 1 else f"layer {layers.start}"


def _peak_text(of: StageEstimate) -> str:
    return f"{human_bytes(of.peak.total_bytes)} ({of.when})"


def _described(estimate: Estimate) -> list[tuple[str, str]]:
    """A plan in words: pairs of the keyword that a part speaks of, and the part."""
    plan = estimate.plan
    found = [
        (axis, f"{axis}={getattr(plan, axis)}") for axis in ("dp", "tp", "pp") if getattr(plan, axis) > 1
    ]
    found += [("zero", f"zero={plan.zero}")] if plan.dp > 1 else []
    found += [("sequence_parallel", "sequence parallel")] if plan.sequence_parallel else []
    found += [("schedule", plan.schedule)] if plan.pp > 1 else []
    found += (
        [("n_micro_batches", f"{plan.n_micro_batches} micro-batches of")] if plan.n_micro_batches > 1 else []
    )
    found += [("micro_batch", f"{plan.micro_batch} sequence{'s' * (plan.micro_batch > 1)}")]
    found += [
        ("seq_len", f"{plan.seq_len} tokens"),
        ("precision", plan.precision),
        ("optimizer", plan.optimizer),
    ]
    return [*found, ("recompute", f"recompute {plan.recompute}")]


def _subtitle(estimate: Estimate) -> str:
    return _common([estimate])


def _common(estimates: Sequence[Estimate], varied: str = "") -> str:
    """What all plans have in common, in words."""
    models = {e.model.name for e in estimates}
    parts = [models.pop()] if len(models) == 1 else []
    described = [_described(e) for e in estimates]
    shared = set.intersection(*map(set, described))
    parts += [part for keyword, part in described[0] if (keyword, part) in shared and keyword != varied]
    confirmed = (
        "rules confirmed by CPU runs" if all(e.confirmed == "measured" for e in estimates) else "unconfirmed"
    )
    return f"{', '.join(parts)}  ({confirmed})".replace(" of, ", " of ")


def _axes(title: str, subtitle: str, *, height_in: float) -> "tuple[Figure, Axes]":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
    axes = figure.add_subplot()
    figure.suptitle(title, x=0.012, ha="left", fontsize=12, weight="bold")
    axes.set_title(subtitle, loc="left", fontsize=9, color=MUTED)
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


def _legend_in_rows(figure: "Figure", axes: "Axes") -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=len(handles), frameon=False, fontsize=8.5,
                  columnspacing=1.2, handlelength=1.4)  # fmt: skip


def _legend_top_down(figure: "Figure", axes: "Axes") -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right center", frameon=False, fontsize=9)


def _legend_of_kinds(figure: "Figure", kinds: set[Kind]) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(color=COLORS[kind], label=LABELS[kind]) for kind in STACK if kind in kinds]
    figure.legend(handles=patches, loc="outside lower left", ncols=len(patches), frameon=False, fontsize=8.5)
