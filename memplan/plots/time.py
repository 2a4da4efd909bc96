"""The time of a step by cause, and the passes of a pipeline."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from memplan.errors import InvalidValue
from memplan.estimate import Estimate
from memplan.plots.bars import Bar, stacked_bars
from memplan.plots.style import Swatch, checked_some, common_text, legend_of, new_axes
from memplan.timetable import TimedPass, timetable
from memplan.units import scaled, time_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SECONDS: Final[Mapping[str, Swatch]] = {
    "compute_s": Swatch("compute", "#0072B2", ink="white"),
    "recompute_s": Swatch("recompute", "#56B4E9"),
    "tp_s": Swatch("tensor axis", "#D55E00"),
    "dp_s": Swatch("data axes", "#E69F00"),
    "pp_s": Swatch("pipeline's sends", "#F0E442"),
    "bubble_s": Swatch("bubble", "white", edge="0.6", hatch="////"),
    "update_s": Swatch("update", "#009E73", ink="white"),
}
"""The parts of `memplan.steptime.StepTime`: blue computes, warm waits for others, green updates."""

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
        title="Where a step's time goes, on the slowest stage",
        subtitle=f"{common_text(every)}\n{every[0].time_model.label}",
        xlabel=f"time of a step ({unit})",
    )


def schedule(estimate: Estimate) -> "Figure":
    """The passes of a pipeline over time (a Gantt chart): a row for each rank.

    Passes are numbered by micro-batch where there is room; what is hatched is idle. Times are those of
    `memplan.timetable`; reductions of gradients and the update come after.
    """
    passes = timetable(estimate)
    plan = estimate.plan
    end_s = max(each.stop_s for each in passes)
    idle = 1 - sum(each.stop_s - each.start_s for each in passes) / (end_s * plan.pp)
    seconds, unit = time_unit(end_s)
    name = "no pipeline" if plan.pp == 1 else plan.schedule
    title = f"{name}: {_many(plan.pp, 'rank')}, {_many(plan.n_micro_batches, 'micro-batch')}, {idle:.0%} idle"
    subtitle = f"{common_text([estimate])}\n{estimate.time_model.label}"
    rows = [_rank_text(estimate, rank) for rank in range(plan.pp)]
    figure, axes = new_axes(title, subtitle, height_in=1.75 + 0.36 * plan.pp)
    for rank in range(plan.pp):
        _draw_rank(axes, [each for each in passes if each.rank == rank], plan.pp, end_s, seconds)
    axes.set_yticks(range(plan.pp), rows)
    axes.set_ylim(plan.pp - 0.5, -0.5)
    axes.set_xlim(0, end_s / seconds)
    axes.set_xlabel(f"time ({unit}), before gradients are reduced and weights updated")
    axes.tick_params(axis="y", length=0)
    drawn = {_part(each, plan.pp).label for each in passes}
    parts = [part for pair in PASSES.values() for part in pair if part.label in drawn]
    legend_of(figure, parts + [IDLE] * (idle > 0), in_a_row=4)
    return figure


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
    place: dict[str, Any] = {"height": 0.8, "linewidth": 0.5}
    for start_s, stop_s in _gaps(passes, end_s):
        axes.barh(rank, (stop_s - start_s) / seconds, left=start_s / seconds, color=IDLE.color,
                  edgecolor=IDLE.edge, hatch=IDLE.hatch, **place)  # fmt: skip
    parts = [_part(each, pp) for each in passes]
    edges = "white" if len(passes) < 200 else "none"
    axes.barh(
        [rank] * len(passes),
        [(each.stop_s - each.start_s) / seconds for each in passes],
        left=[each.start_s / seconds for each in passes],
        color=[part.color for part in parts],
        edgecolor=edges,
        **place,
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
