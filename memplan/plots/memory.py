"""Peak bytes by kind: of stages, of plans, against a keyword; and the ledger at the peak."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from memplan.checks import checked_count
from memplan.engines.options import plan_dict
from memplan.errors import InvalidValue
from memplan.estimate import Estimate, StageEstimate
from memplan.hardware import Verdict
from memplan.plots.bars import Bar, stacked_bars
from memplan.plots.style import (
    DASHED,
    KINDS,
    MUTED,
    STACKED,
    Line,
    budget_line,
    checked_some,
    common_text,
    legend_of,
    legend_top_down,
    new_axes,
    stage_layers_text,
    stage_text,
    upright,
)
from memplan.tables import ledger_rows
from memplan.units import binary_unit, human_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


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
    peaks = [
        _Peak(f"stage {s.stage}\n{stage_layers_text(s.layers)}", s, estimate.verdict if s is worst else None)
        for s in stages
    ]
    one = len(stages) == 1
    title = "Peak bytes of one GPU" if one else "Peak bytes of one GPU in each pipeline stage"
    return _peaks(title, [estimate], peaks)


def compare(estimates: Mapping[str, Estimate]) -> "Figure":
    """The worst GPU's worst instant by kind, one bar for each named plan.

    The budget is drawn where all plans have the same one.
    """
    checked_some("estimates", estimates)
    peaks = [_Peak(name, e.worst, e.verdict) for name, e in estimates.items()]
    return _peaks("Peak bytes of the fullest GPU", list(estimates.values()), peaks)


class _Peak(NamedTuple):
    label: str
    of: StageEstimate
    verdict: Verdict | None


def _peaks(title: str, estimates: Sequence[Estimate], peaks: Sequence[_Peak]) -> "Figure":
    budget = budget_line(estimates)
    highest = max([each.of.peak.total_bytes for each in peaks] + ([budget.value] if budget else []))
    unit, name = binary_unit(highest)
    bars = []
    for label, of, verdict in peaks:
        total = human_bytes(of.peak.total_bytes) + ("" if verdict is None else f", {verdict}")
        bars.append(Bar(label, {kind: of.peak.of(kind) / unit for kind in KINDS}, total, of.when))
    return stacked_bars(
        bars,
        KINDS,
        title=title,
        subtitle=common_text(estimates),
        xlabel=f"bytes held at the worst instant ({name})",
        line=None if budget is None else Line(budget.value / unit, budget.text),
    )


def ledger_at_peak(estimate: Estimate, stage: int | None = None, top: int = 12) -> "Figure":
    """The largest named tensors that one GPU of a stage (the worst one if None) holds at its peak.

    The equal tensors of all blocks are one entry.
    """
    of = estimate.stage(stage)
    rows = ledger_rows(of.alive)
    shown = rows[: checked_count("top", top)]
    unit, name = binary_unit(shown[0]["total_bytes"])
    part = sum(row["total_bytes"] for row in shown) / of.peak.total_bytes
    title = f"The {len(shown)} largest of {len(rows)} entries alive at the peak hold {part:.0%} of it"
    peak_text = f"peak of {stage_text(estimate, of)}: {human_bytes(of.peak.total_bytes)}, {of.when}"
    subtitle = f"{peak_text}\n{common_text([estimate])}"
    figure, axes = new_axes(title, subtitle, height_in=1.7 + 0.31 * len(shown))
    values = [row["total_bytes"] / unit for row in shown]
    colors = [KINDS[row["kind"]].color for row in shown]
    bars = axes.barh(range(len(shown)), values, height=0.72, color=colors)
    axes.bar_label(bars, list(map(_tensor_text, shown)), padding=4, fontsize=8, color=MUTED)
    axes.set_yticks(range(len(shown)), [row["name"] for row in shown], fontsize=8.5)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xlim(0, values[0])
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(f"bytes held at the peak ({name})")
    kinds = {row["kind"] for row in shown}
    legend_of(figure, [part for kind, part in KINDS.items() if kind in kinds])
    return figure


def _tensor_text(row: Mapping[str, Any]) -> str:
    """The bytes of a row of the ledger, with its shape and type."""
    times = f"{row['count']} x " if row["count"] > 1 else ""
    return f"{human_bytes(row['total_bytes'])} = {times}{list(row['shape'])} {row['dtype']}"


def sweep(keyword: str, estimates: Iterable[Estimate]) -> "Figure":
    """Peak bytes by kind of plans that differ in one keyword of a Plan, against that keyword.

    Kinds jump where another instant of the step becomes the worst one; a dotted line marks that.
    """
    from matplotlib.ticker import MaxNLocator

    every = sorted(estimates, key=lambda e: _value(e, keyword))
    checked_some("estimates", every)
    values = [_value(e, keyword) for e in every]
    if len({*values}) < 2:
        raise InvalidValue(f"every estimate has {keyword}={values[0]}; give estimates of two values or more.")
    budget = budget_line(every)
    highest = max(e.peak.total_bytes for e in every)
    unit, name = binary_unit(highest)
    title = f"Peak bytes of the fullest GPU against {keyword}"
    figure, axes = new_axes(title, common_text(every, keyword), height_in=4.6)
    rows = np.array([[e.peak.of(kind) / unit for e in every] for kind in KINDS])
    axes.stackplot(values, rows, **STACKED)
    marker = "o" if len(values) <= 24 else ""
    axes.plot(values, rows.sum(axis=0), "k-", marker=marker, markersize=4, clip_on=False, label="peak")
    if budget and budget.value < 1.15 * highest:
        axes.axhline(budget.value / unit, label=budget.text, **DASHED)
    axes.set_xlim(values[0], values[-1])
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_ylim(0, 1.25 * highest / unit)
    _part_instants(axes, values, [e.worst.when.partition(",")[0] for e in every])
    axes.set_xlabel(AXIS_LABELS.get(keyword, keyword))
    axes.set_ylabel(f"bytes held at the worst instant ({name})")
    legend_top_down(figure, axes)
    return figure


def _value(estimate: Estimate, keyword: str) -> int:
    value = plan_dict(estimate.plan).get(keyword)
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
        turned = upright(text, share)
        if turned is not None:
            axes.text((start + stop) / 2, 0.985, text, transform=axes.get_xaxis_transform(), ha="center",
                      va="top", rotation=90 if turned else 0, fontsize=9, color=MUTED)  # fmt: skip
    for edge in edges[1:-1]:
        axes.axvline(edge, color="black", linewidth=0.8, linestyle=":")
