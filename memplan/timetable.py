"""The start and end of every pass of a pipeline: each starts when its rank is free and its input is there."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, final

from memplan.errors import InvalidValue, MissingRule
from memplan.estimate import Estimate, StageEstimate
from memplan.mesh import waits_of
from memplan.record import PassPart, Stretch
from memplan.schedules import SCHEDULES
from memplan.time.step import StepTime, backward_flops, forward_flops, recomputed_flops
from memplan.traffic import collectives

MOST_PASSES: Final = 100_000
"""The most passes of a timetable."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TimedPass:
    """A pass of a micro-batch through a stage: its pipeline rank, its start and its end."""

    rank: int
    stage: int
    part: PassPart
    micro_batch: int
    start_s: float
    stop_s: float


class _Work(NamedTuple):
    """The FLOPs of a pass and the bytes that it sends."""

    stage: int
    part: PassPart
    micro_batch: int
    products: int
    recomputed: int
    tp_bytes: int
    pp_bytes: int


def timetable(estimate: Estimate) -> tuple[TimedPass, ...]:
    """Every pass of a step, rank by rank, in the order of each rank's record.

    A rank's busy seconds (`StepTime`: compute, recompute, tp, pp) are divided over its passes in proportion
    to their FLOPs and bytes sent. A forward pass waits for that of the stage before, a backward pass for that
    of the stage after, or on the last stage for its own forward pass.

    Assumes: no pass slows another; what is sent arrives at the end of the pass that sends it.
    Neglects: gradient reductions, gathered weights and the update, which `StepTime` has as dp and update.

    >>> import memplan
    >>> e = memplan.estimate("llama-3-8b", cluster="2xh100-sxm", pp=2, schedule="gpipe", global_batch=2)
    >>> [(each.rank, each.part, each.micro_batch) for each in timetable(e)][:4]
    [(0, 'forward', 0), (0, 'forward', 1), (0, 'backward', 0), (0, 'backward', 1)]

    Raises:
        InvalidValue: an estimate without a step time, or of too many passes.
        MissingRule: a record that names no passes.
    """
    times = estimate.stage_times
    if times is None:
        missing = "; ".join(estimate.time_missing)
        raise InvalidValue(f"there is no step time: {missing}; use a cluster whose rates are known.")
    plan = estimate.plan
    n_passes = plan.n_stages * plan.n_micro_batches * 2
    if n_passes > MOST_PASSES:
        raise InvalidValue(
            f"{plan.n_micro_batches} micro-batches through {plan.n_stages} stages are {n_passes:,} passes; "
            f"use a smaller global_batch, of at most {MOST_PASSES:,}."
        )
    ranks = [
        list(_timed(list(_works(stage)), time)) for stage, time in zip(estimate.stages, times, strict=True)
    ]
    if not all(ranks):
        raise MissingRule(f"engine={plan.engine!r} records no passes; use another engine.")
    return tuple(_run(ranks, plan.n_stages))


def _passes(stretch: Stretch) -> Iterator[Stretch]:
    for _ in range(stretch.repeats):
        if stretch.stage_pass is not None:
            yield stretch
        else:
            for part in stretch.parts:
                if part.has_passes:
                    yield from _passes(part)


def _works(of: StageEstimate) -> Iterator[_Work]:
    """The work of each pass of a rank."""
    stages, schedule = of.plan.stages_of(of.stage), SCHEDULES.named(of.plan.schedule)
    seen: dict[tuple[int, PassPart], int] = {}
    known: dict[Stretch, tuple[int, int, int, int, int]] = {}
    for stretch in _passes(of.record.step):
        local, part = stretch.stage_pass or (0, "forward")
        if stretch not in known:
            known[stretch] = _sums(stretch, of)
        forward, backward, recomputed, tp_bytes, pp_bytes = known[stretch]
        kind: PassPart = "backward" if part == "backward-input" else part
        n = seen[local, kind] = seen.get((local, kind), -1) + 1
        if part != "forward" and schedule.backward_reversed:
            n = of.plan.n_micro_batches - 1 - n
        yield _Work(stages[local], part, n, forward + backward, recomputed, tp_bytes, pp_bytes)


def _sums(stretch: Stretch, of: StageEstimate) -> tuple[int, int, int, int, int]:
    """A pass' forward, backward, recomputed FLOPs, and the bytes it sends over tp and pp without overlap."""
    counts = stretch.counts
    waits = [c for c in collectives(counts, of.plan) if not c.overlappable]
    tp_bytes, pp_bytes = (
        sum(c.wire_bytes for c in waits if waits_of(c.axis) == part) for part in ("tp", "pp")
    )
    return forward_flops(counts), backward_flops(counts), recomputed_flops(counts), tp_bytes, pp_bytes


def _timed(works: Sequence[_Work], time: StepTime) -> Iterator[tuple[_Work, float]]:
    """Each pass with its seconds, which add up to the rank's busy seconds."""
    parts = (
        ([work.products for work in works], time.compute_s),
        ([work.recomputed for work in works], time.recompute_s),
        ([work.tp_bytes for work in works], time.tp_s),
        ([work.pp_bytes for work in works], time.pp_s),
    )
    each_s = [(counts, seconds / (sum(counts) or 1)) for counts, seconds in parts]
    for i, work in enumerate(works):
        yield work, sum(counts[i] * unit_s for counts, unit_s in each_s)


def _run(ranks: Sequence[Sequence[tuple[_Work, float]]], n_stages: int) -> Iterator[TimedPass]:
    """Every pass as early as possible, simulated on all ranks together; listed rank by rank."""
    done: dict[tuple[str, int, int], float] = {}
    found: list[list[TimedPass]] = [[] for _ in ranks]
    while any(len(timed) < len(passes) for timed, passes in zip(found, ranks, strict=True)):
        before = len(done)
        for rank, passes in enumerate(ranks):
            for work, seconds in passes[len(found[rank]) :]:
                ready_s = _ready_s(work, n_stages, done)
                if ready_s is None:
                    break
                start_s = max(ready_s, found[rank][-1].stop_s if found[rank] else 0.0)
                stop_s = start_s + seconds
                kind = "backward" if work.part == "backward-input" else work.part
                done[kind, work.stage, work.micro_batch] = stop_s
                found[rank].append(
                    TimedPass(
                        rank=rank,
                        stage=work.stage,
                        part=work.part,
                        micro_batch=work.micro_batch,
                        start_s=start_s,
                        stop_s=stop_s,
                    )
                )
        if len(done) == before:
            raise MissingRule("the ranks of this record wait for each other: it is no pipeline's schedule.")
    for timed in found:
        yield from timed


def _ready_s(work: _Work, n_stages: int, done: dict[tuple[str, int, int], float]) -> float | None:
    """The time at which a pass has its input; None: not known yet."""
    stage, i = work.stage, work.micro_batch
    if work.part == "forward":
        return done.get(("forward", stage - 1, i)) if stage else 0.0
    if work.part == "backward-weight":
        return 0.0  # it comes after its own backward-input on the same rank
    return done.get(("forward", stage, i) if stage == n_stages - 1 else ("backward", stage + 1, i))
