"""The time of a step by cause, and the passes of a pipeline."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from memplan.errors import InvalidValue
from memplan.estimate import Estimate
from memplan.plots.bars import Bar, stacked_bars
from memplan.plots.style import WIDTH_IN, Swatch, checked_some, common_text, heading, legend_of, plain
from memplan.time.timeline import TimedPass
from memplan.timetable import timetable
from memplan.units import scaled, time_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SECONDS: Final[Mapping[str, Swatch]] = {
    "compute_s": Swatch("compute", "#0072B2", ink="white"),
    "recompute_s": Swatch("recompute", "#56B4E9"),
    "host_s": Swatch("waits for the host", "#333333", ink="white"),
    "tp_s": Swatch("tensor axis", "#D55E00"),
    "dp_s": Swatch("data axes", "#E69F00"),
    "pp_s": Swatch("pipeline's sends", "#F0E442"),
    "bubble_s": Swatch("bubble", "white", edge="0.6", hatch="////"),
    "update_s": Swatch("update", "#009E73", ink="white"),
}
"""The parts of `memplan.time.step.StepTime`: blue computes, warm waits for others, green updates."""

PASSES: Final[Mapping[str, tuple[Swatch, Swatch]]] = {
    "forward": (
        Swatch("forward", "#0072B2", ink="white"),
        Swatch("forward, 2nd stage", "#3D8FC4", ink="white"),
    ),
    "backward": (Swatch("backward", "#E69F00"), Swatch("backward, 2nd stage", "#F6CE7A")),
    "backward-input": (Swatch("backward: input", "#D55E00"), Swatch("backward: input, 2nd stage", "#EFA876")),
    "backward-weight": (
        Swatch("backward: weights", "#F0E442"),
        Swatch("backward: weights, 2nd stage", "#F9F4B3"),
    ),
}
"""The passes of a rank's stages: full colors for one, lighter ones for the next; forward is dark with white
numbers, so that a print in grey tells it from backward."""

IDLE: Final = Swatch("idle", "white", edge="0.75", hatch="////")

BOX: Final[dict[str, Any]] = {"height": 0.8, "linewidth": 0.5}

CHARACTER: Final = 0.0085
"""About how much of the axis' width a character of a micro-batch's number takes."""


def step_time(estimates: Mapping[str, Estimate]) -> "Figure":
    """The seconds of a step by cause, one bar for each named plan.

    Raises:
        InvalidValue: no estimate, or one without a step time.
    """
    checked_some("estimates", estimates)
    for name, each in estimates.items():
        if each.step_s is None:
            missing = "; ".join(each.time_missing)
            raise InvalidValue(f"{name!r} has no step time: {missing}; use a cluster whose rates are known.")
    every = list(estimates.values())
    seconds, unit = time_unit(max(each.step_s or 0.0 for each in every))
    bars = [
        Bar(
            name,
            {part: value / seconds for part, value in (each.time.parts if each.time else {}).items()},
            f"{scaled(each.step_s or 0.0, seconds, 2)} {unit}, {each.verdict or 'no verdict'}",
            f"{each.tokens_per_s_per_gpu or 0.0:,.0f} tokens/s/GPU, MFU {each.mfu or 0.0:.0%}",
        )
        for name, each in estimates.items()
    ]
    return stacked_bars(
        bars,
        SECONDS,
        title=_fastest(estimates),
        subtitle=f"a step on the stage that waits least; {common_text(every)}\n{every[0].time_model.label}",
        xlabel=f"time of a step ({unit})",
    )


def _fastest(estimates: Mapping[str, Estimate]) -> str:
    """The fastest of the plans that fit, or of all if none is known to."""
    fit = {name: each for name, each in estimates.items() if each.fits} or estimates
    name = min(fit, key=lambda name: fit[name].step_s or 0.0)
    step_s = fit[name].step_s or 0.0
    seconds, unit = time_unit(step_s)
    takes = f"{scaled(step_s, seconds, 2)} {unit} a step, {fit[name].verdict or 'no verdict'}"
    return f"{' '.join(name.split())}{' is the fastest' if len(estimates) > 1 else ''}: {takes}"


def schedule(*estimates: Estimate) -> "Figure":
    """The passes of pipelines over time (Gantt charts on one axis): a row for each rank.

    Passes are numbered by micro-batch where there is room; what is hatched is idle. Times are those of
    `memplan.timetable`, reductions that a pass waits for included; the update comes after.
    """
    checked_some("estimates", estimates)
    from matplotlib.figure import Figure

    tables = [timetable(each) for each in estimates]
    end_s = max(each.stop_s for passes in tables for each in passes)
    seconds, unit = time_unit(end_s)
    ranks = [each.plan.pp for each in estimates]
    height_in = 2.1 + 0.36 * sum(ranks) + 0.4 * (len(ranks) - 1)
    figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
    rows = figure.subplots(len(ranks), 1, sharex=True, squeeze=False, height_ratios=ranks)[:, 0]
    idle = [_idle(each, passes) for each, passes in zip(estimates, tables, strict=True)]
    titles = [_schedule_text(*each) for each in zip(estimates, idle, strict=True)]
    alone = len(estimates) == 1
    title = (
        titles[0]
        if alone
        else "; ".join(
            f"{_schedule_name(each)} {share:.0%} idle" for each, share in zip(estimates, idle, strict=True)
        )
    )
    heading(figure, title, f"{common_text(estimates)}\n{estimates[0].time_model.label}")
    drawn: set[str] = set()
    for axes, estimate, passes, text in zip(rows, estimates, tables, titles, strict=True):
        plain(axes)
        pp = estimate.plan.pp
        own_end_s = max(each.stop_s for each in passes)
        for rank in range(pp):
            own = [each for each in passes if each.rank == rank]
            for start_s, stop_s in _gaps(own, own_end_s):
                axes.barh(rank, (stop_s - start_s) / seconds, left=start_s / seconds, color=IDLE.color,
                          edgecolor=IDLE.edge, hatch=IDLE.hatch, **BOX)  # fmt: skip
            _draw_rank(axes, own, pp, end_s, seconds)
        axes.set_yticks(range(pp), [_rank_text(estimate, rank) for rank in range(pp)])
        axes.set_ylim(pp - 0.5, -0.5)
        axes.tick_params(axis="y", length=0)
        if not alone:
            axes.set_title(text, loc="left", fontsize=9, weight="bold")
        drawn |= {_part(each, pp).label for each in passes}
    rows[0].set_xlim(0, end_s / seconds)
    rows[-1].set_xlabel(f"time ({unit}) up to the last pass")
    parts = [part for pair in PASSES.values() for part in pair if part.label in drawn]
    legend_of(figure, parts + [IDLE] * any(share > 0 for share in idle), in_a_row=4)
    return figure


def _idle(estimate: Estimate, passes: Sequence[TimedPass]) -> float:
    """The share of the ranks' time until the last pass ends in which they wait."""
    end_s = max(each.stop_s for each in passes)
    return 1 - sum(each.stop_s - each.start_s for each in passes) / (end_s * estimate.plan.pp)


def _schedule_name(estimate: Estimate) -> str:
    return "no pipeline" if estimate.plan.pp == 1 else estimate.plan.schedule


def _schedule_text(estimate: Estimate, idle: float) -> str:
    ranks, passes = _many(estimate.plan.pp, "rank"), _many(estimate.plan.n_micro_batches, "micro-batch")
    return f"{_schedule_name(estimate)}: {ranks}, {passes}, {idle:.0%} idle"


def _many(n: int, what: str) -> str:
    return f"{n:,} {what}" + ("" if n == 1 else "es" if what.endswith("h") else "s")


def _rank_text(estimate: Estimate, rank: int) -> str:
    stages = estimate.plan.stages_of(rank)
    if len(stages) == 1:
        return f"stage {rank}"
    return f"rank {rank}: stages {', '.join(map(str, stages))}"


def _part(of: TimedPass, pp: int) -> Swatch:
    """A pass' color: by its place among its rank's stages, of which there are `pp` in a row."""
    return PASSES[of.part][of.stage // pp % 2]


def _draw_rank(axes: "Axes", passes: Sequence[TimedPass], pp: int, end_s: float, seconds: float) -> None:
    rank = passes[0].rank
    parts = [_part(each, pp) for each in passes]
    edges = "white" if len(passes) < 200 else "none"
    axes.barh(
        [rank] * len(passes),
        [(each.stop_s - each.start_s) / seconds for each in passes],
        left=[each.start_s / seconds for each in passes],
        color=[part.color for part in parts],
        edgecolor=edges,
        **BOX,
    )
    for each, part in zip(passes, parts, strict=True):
        text = str(each.micro_batch)
        if (each.stop_s - each.start_s) / end_s > CHARACTER * (len(text) + 0.3):
            axes.text((each.start_s + each.stop_s) / 2 / seconds, rank, text, ha="center", va="center",
                      fontsize=7.5, color=part.ink)  # fmt: skip


def _gaps(passes: Sequence[TimedPass], end_s: float) -> Iterator[tuple[float, float]]:
    """The times at which a rank waits, from the start of the step to the end of the last pass on any rank."""
    now_s = 0.0
    for each in passes:
        if each.start_s > now_s + 1e-9 * end_s:
            yield now_s, each.start_s
        now_s = each.stop_s
    if end_s > now_s * (1 + 1e-9):
        yield now_s, end_s
