"""Peak bytes by kind: of stages, of plans, against a keyword; and the ledger at the peak."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from memplan.checks import checked_count
from memplan.engines.options import plan_dict
from memplan.errors import InvalidValue
from memplan.estimate import Estimate, StageEstimate
from memplan.hardware import Interval, Verdict
from memplan.plots.bars import Bar, stacked_bars
from memplan.plots.style import (
    DASHED,
    DOTTED,
    HOLDS,
    KINDS,
    MUTED,
    STACKED,
    VERDICTS,
    budget_line,
    checked_some,
    common_text,
    interval_style,
    legend_of,
    legend_top_down,
    new_axes,
    stage_layers_text,
    stage_text,
    upright,
)
from memplan.tables import finding, ledger_rows
from memplan.text_tables import interval_text
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
    "cp": "cp (context-parallel ranks)",
    "ep": "ep (expert-parallel ranks)",
    "etp": "etp (tensor-parallel ranks of each expert)",
}


def stage_peaks(estimate: Estimate) -> "Figure":
    """The tensors of each pipeline stage at its peak by kind, and what its GPU holds against the budget.

    The title is the verdict, which hangs on the worst stage.
    """
    peaks = [_Peak(f"stage {s.stage}\n{stage_layers_text(s.layers)}", estimate, s) for s in estimate.stages]
    return _peaks(finding(estimate), peaks)


def compare(estimates: Mapping[str, Estimate]) -> "Figure":
    """The tensors of the fullest GPU at its peak by kind, and what it holds, one bar for each named plan.

    The budget is drawn where all plans have the same one.
    """
    checked_some("estimates", estimates)
    return _peaks(_best_of(estimates), [_Peak(name, e, e.worst) for name, e in estimates.items()])


def _best_of(estimates: Mapping[str, Estimate]) -> str:
    """How many of the plans fit, and which one takes least."""
    least = min(estimates, key=lambda name: _most_bytes(estimates[name]))
    e, n_plans = estimates[least], len(estimates)
    held = e.device_bytes
    takes = f"{human_bytes(e.worst.peak_bytes)} of tensors" if held is None else interval_text(held)
    takes = f"{' '.join(least.split())} takes the least, {takes}"
    if n_plans == 1:
        return finding(e)
    if any(each.verdict is None for each in estimates.values()):
        return f"Of {n_plans} plans {takes}"
    n_fit = sum(each.fits is True for each in estimates.values())
    count = "All" if n_fit == n_plans else f"{n_fit or 'None'} of"
    return f"{count} {n_plans} plans {'fits' if n_fit == 1 else 'fit'}; {takes}"


def _most_bytes(estimate: Estimate) -> int:
    """The upper end of what a GPU holds; the tensors at the peak where that is not known."""
    held = estimate.device_bytes
    return estimate.worst.peak_bytes if held is None else held.high_bytes


class _Peak(NamedTuple):
    label: str
    estimate: Estimate
    of: StageEstimate

    @property
    def verdict(self) -> Verdict | None:
        """The estimate's verdict, at its worst stage."""
        return self.estimate.verdict if self.of is self.estimate.worst else None


def _peaks(title: str, peaks: Sequence[_Peak]) -> "Figure":
    estimates = [each.estimate for each in peaks]
    budget = budget_line(estimates)
    highest = max([each.of.peak.total_bytes for each in peaks] + ([budget.value] if budget else []))
    unit, name = binary_unit(highest)
    bars = []
    for peak in peaks:
        held = peak.estimate.device_bytes_of(peak.of)
        tensors = human_bytes(peak.of.peak.total_bytes)
        total = tensors if held is None else interval_text(held)
        total += "" if peak.verdict is None else f", {peak.verdict}"
        small = peak.of.when if held is None else f"tensors {tensors}, {peak.of.when}"
        holds = None if held is None else (held.low_bytes / unit, held.high_bytes / unit)
        parts = {kind: peak.of.peak.of(kind) / unit for kind in KINDS}
        bars.append(Bar(peak.label, parts, total, small, holds, peak.verdict))
    return stacked_bars(
        bars,
        KINDS,
        title=title,
        subtitle=common_text(estimates),
        xlabel=f"tensors at the peak, and bytes of a GPU ({name})",
        line=None if budget is None else budget.per(unit),
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
    """Tensors by kind, and what a GPU holds, of plans that differ in one keyword, against that keyword.

    Kinds jump where another instant of the step becomes the worst one; a dotted line marks that.
    """
    from matplotlib.ticker import MaxNLocator

    every = sorted(estimates, key=lambda e: _value(e, keyword))
    checked_some("estimates", every)
    values = [_value(e, keyword) for e in every]
    if len({*values}) < 2:
        raise InvalidValue(f"every estimate has {keyword}={values[0]}; give estimates of two values or more.")
    budget = budget_line(every)
    held = [e.device_bytes or Interval(e.worst.peak_bytes, e.worst.peak_bytes) for e in every]
    highest = max(each.high_bytes for each in held)
    unit, name = binary_unit(highest)
    figure, axes = new_axes(_fitting(keyword, values, every), common_text(every, keyword), height_in=4.6)
    rows = np.array([[e.peak.of(kind) / unit for e in every] for kind in KINDS])
    axes.stackplot(values, rows, **STACKED)
    marker = "o" if len(values) <= 24 else ""
    axes.plot(values, rows.sum(axis=0), "k-", marker=marker, markersize=4, clip_on=False, label="peak")
    low, high = np.array(held).T / unit
    if any(e.device_bytes for e in every):
        axes.fill_between(values, low, high, label=HOLDS, **interval_style(None))
    for verdict, mark in VERDICTS.items():
        own = [i for i, e in enumerate(every) if verdict is not None and e.verdict == verdict]
        if own:
            axes.plot([values[i] for i in own], high[own], color=mark.color, marker=mark.marker, linestyle="",
                      markersize=5, clip_on=False, label=verdict)  # fmt: skip
    if budget and budget.value < 1.15 * highest:
        axes.axhline(
            budget.value / unit, label=budget.text.replace(": ", ":\n").replace(", ", "\n"), **DASHED
        )
        axes.axhline(budget.usable / unit, **DOTTED)
    axes.set_xlim(values[0], values[-1])
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_ylim(0, 1.25 * highest / unit)
    _part_instants(axes, values, [e.worst.when.partition(",")[0] for e in every])
    axes.set_xlabel(AXIS_LABELS.get(keyword, keyword))
    axes.set_ylabel(f"tensors at the peak, and bytes of a GPU ({name})")
    legend_top_down(figure, axes)
    return figure


def _fitting(keyword: str, values: Sequence[int], estimates: Sequence[Estimate]) -> str:
    """The values of the keyword with which a plan fits."""
    models = {e.model.name for e in estimates}
    model = models.pop() if len(models) == 1 else "The plan"
    fit = [value for value, e in zip(values, estimates, strict=True) if e.fits]
    ends = f"{keyword}={values[0]:,} to {values[-1]:,}"
    if any(e.verdict is None for e in estimates):
        first, last = (human_bytes(e.worst.peak_bytes) for e in (estimates[0], estimates[-1]))
        return f"{model} takes {first} to {last} of tensors a GPU with {ends}"
    if not fit:
        return f"{model} FITS with none of {ends}"
    if fit == list(values):
        return f"{model} FITS with every {ends}"
    if fit == values[: len(fit)]:
        return f"{model} FITS up to {keyword}={fit[-1]:,}"
    if fit == values[-len(fit) :]:
        return f"{model} FITS from {keyword}={fit[0]:,}"
    return f"{model} FITS with {keyword}={', '.join(f'{value:,}' for value in fit)}"


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
