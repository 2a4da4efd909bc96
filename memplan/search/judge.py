"""Best-first search: plans are estimated in the order of their bounds, until no bound beats the plans kept.

A plan is *within* the budget if its allocated bytes and the most that CUDA's context and NCCL's buffers may
take are within it. Only such a plan can have the verdict "fits". Whether it fits also depends on what the
caching allocator reserves, which is replayed for the plans that are kept (`memplan.search.search.Found`).
"""

from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Final, cast, final

import numpy as np
from numpy.typing import NDArray

from memplan.estimate import Estimate, estimate_of, stage_estimates
from memplan.hardware import Cluster, outside_allocator
from memplan.mesh import VIEWS, Mesh, axis_names
from memplan.models import Model
from memplan.plan import Plan
from memplan.search.bounds import Bounds, bounds
from memplan.search.plans import Grid, number_of
from memplan.search.pool import SIMPLER, Keys, Pool
from memplan.time.step import Priced, Roofline, TimeModel

OBJECTIVES: Final = {
    "speed": ("step_s", "peak_bytes"),
    "memory": ("peak_bytes", "step_s"),
    "micro_batch": ("minus_micro_batch", "step_s", "peak_bytes"),
    "front": ("step_s", "peak_bytes"),
}
"""The figures that an objective minimises: the first decides, of plans with equal ones the next."""

HELD: Final = 2**16
"""Plans that the first pool holds; if it may lack one of the best, the next holds eight times as many."""


def simpler(plan: Plan) -> tuple[int, ...]:
    """The tie-breaker of equally good plans: the smaller tuple stands first."""
    return tuple([number_of(name, getattr(plan, name)) for name in SIMPLER])


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A plan with figures of its estimate; `over_bytes` is 0 if it is within the budget.

    An unknown time is infinite. `estimate` is None where too many plans are kept to hold all their estimates.
    """

    plan: Plan
    peak_bytes: int
    over_bytes: int
    step_s: float
    estimate: Estimate | None = field(default=None, repr=False, compare=False)

    def keys(self, objective: str, *, per_token: bool = False) -> tuple[float, ...]:
        """The figures that an objective minimises, then the tie-breaker.

        `per_token`: seconds per token instead of per step, to compare plans of different batches.
        """
        n_tokens = self.plan.global_batch * self.plan.seq_len if per_token else 1
        figures = {
            "step_s": self.step_s / n_tokens,
            "peak_bytes": self.peak_bytes,
            "minus_micro_batch": -self.plan.micro_batch,
        }
        return (*[figures[name] for name in OBJECTIVES[objective]], *simpler(self.plan))


@final
class Judge:
    """Bounds and estimates of plans of one model on one cluster.

    `slack_bytes` of the budget are left for what the caching allocator reserves beyond what it allocates.
    """

    def __init__(self, model: Model, cluster: Cluster, time_model: TimeModel, slack_bytes: int = 0) -> None:
        self.model, self.cluster, self.time_model = model, cluster, time_model
        self.fastest = time_model if isinstance(time_model, Priced) else Roofline(efficiency=1)
        """A time model that is a lower bound of every step time, and whose own lower bounds are known."""
        budget, usable = (inf if n is None else n for n in (cluster.budget_bytes, cluster.gpu.usable_bytes))
        outside = [outside_allocator(n) for n in range(len(axis_names()) + 2 * len(VIEWS) + 2)]
        self._room = np.array([budget - slack_bytes - each.high_bytes for each in outside], np.float64)
        """Bytes that may be allocated within the budget, by the number of communicators."""
        self._most = np.array([usable - each.low_bytes for each in outside], np.float64)
        """Bytes beyond which no plan fits."""
        self._is_again = slack_bytes > 0

    def bounds(self, grid: Grid) -> Bounds:
        """Lower bounds of a grid's plans' bytes and seconds."""
        return bounds(self.model, grid, self.cluster, self.fastest)

    def room_bytes(self, grid: Grid) -> NDArray[np.float64]:
        """Bytes that a plan of each cell may allocate within the budget: [cell, 1]."""
        return np.asarray(self._room[_communicators(grid)], np.float64)

    def may_be_shown(self, grid: Grid, memory: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Whether each plan's bound is within the budget, or, without slack, within what is usable."""
        most = self._room if self._is_again else np.maximum(self._room, self._most)
        return np.asarray(memory <= most[_communicators(grid)], np.bool_)

    def judged(self, plan: Plan, most_over_bytes: float = inf, *, least_bytes: float = 0) -> Judged | None:
        """A plan's figures; None if it exceeds the budget by more than `most_over_bytes`.

        `least_bytes`: a lower bound of its bytes. Ranks are played one after the other, until one exceeds it.
        """
        device = self.cluster.gpu.device
        room_bytes = float(self._room[plan.mesh.n_communicators])
        if least_bytes > room_bytes + most_over_bytes:
            return None
        stages = []
        for stage in stage_estimates(self.model, plan, device):
            if stage.most_bytes > room_bytes + most_over_bytes:
                return None
            stages.append(stage)
        estimate = estimate_of(self.model, plan, device, self.cluster, stages)
        estimate = replace(estimate, time_model=self.time_model)
        step_s, peak_bytes = estimate.step_s, estimate.worst.peak_bytes
        return Judged(
            plan=plan,
            peak_bytes=peak_bytes,
            over_bytes=int(max(0.0, estimate.worst.most_bytes - room_bytes)),
            step_s=inf if step_s is None else step_s,
            estimate=estimate,
        )

    def __call__(self, plan: Plan) -> Judged:
        """A plan's figures, whether it is within the budget or not."""
        return cast(Judged, self.judged(plan))


def _communicators(grid: Grid) -> NDArray[np.int64]:
    """The number of communicators of each cell's plans: [cell, 1]."""
    return np.asarray(Mesh(grid.cells).n_communicators)[:, None]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """The best plans within the budget, some beyond it, and the numbers of plans within, beyond and left out.

    The plans beyond are the best by their bounds; if no plan is within, the ones that exceed the budget
    least.
    """

    within: tuple[Judged, ...]
    beyond: tuple[Judged, ...]
    n_within: int
    n_beyond: int
    n_slower: int


Grids = Callable[[], Iterable[Grid]]
"""Makes a new iterator over the grids of the plans that can run."""


def best_first(judge: Judge, grids: Grids, objective: str, keep: int) -> Ranked:
    """The `keep` best plans by an objective, the same as if every plan had been estimated."""
    most = HELD
    while True:
        pool, n_plans, n_beyond = _pooled(judge, grids, objective, most)
        within, beyond, done = _judged_in_order(judge, pool, objective, keep)
        if done:
            break
        most *= 8
    return _ranked(judge, grids, within[:keep], beyond, (n_plans, len(within), n_beyond), keep)


def _ranked(
    judge: Judge,
    grids: Grids,
    within: Sequence[Judged],
    beyond: Sequence[Plan],
    counted: tuple[int, int, int],
    keep: int,
) -> Ranked:
    """The result of a search; `counted`: all plans, those found within, those beyond by their bound."""
    n_plans, n_within, n_beyond = counted
    n_beyond = n_beyond + len(beyond) if within else n_plans
    others = [judge(plan) for plan in beyond[:keep]] if within else nearest(judge, grids, keep)
    return Ranked(
        within=tuple(within),
        beyond=tuple(others),
        n_within=n_within,
        n_beyond=n_beyond,
        n_slower=n_plans - n_within - n_beyond,
    )


def _pooled(judge: Judge, grids: Grids, objective: str, most: int) -> tuple[Pool, int, int]:
    """The best plans by their bounds; how many plans there are, and how many bounds exceed the budget."""
    pool, n_plans = Pool(most), 0
    for grid in grids():
        memory, seconds = judge.bounds(grid)
        n_plans += len(grid)
        pool.add(grid, _keys(grid, objective, memory, seconds), judge.may_be_shown(grid, memory))
    return pool, n_plans, n_plans - pool.n_seen


def _keys(grid: Grid, objective: str, memory: NDArray[np.float64], seconds: NDArray[np.float64]) -> Keys:
    figures = {
        "step_s": seconds,
        "peak_bytes": memory,
        "minus_micro_batch": -grid.cells["micro_batch"][:, None],
    }
    return [figures[name] for name in OBJECTIVES[objective]]


def _judged_in_order(
    judge: Judge, pool: Pool, objective: str, keep: int
) -> tuple[list[Judged], list[Plan], bool]:
    """Plans within the budget, best first; plans beyond it; whether the `keep` best are sure to be found."""
    within: list[tuple[tuple[float, ...], Judged]] = []
    beyond: list[Plan] = []
    bytes_at = OBJECTIVES[objective].index("peak_bytes")
    for entry in pool:
        if len(within) >= keep and entry.keys > within[keep - 1][0]:
            return [found for _, found in within], beyond, True
        plan = entry.grid.plan(entry.place)
        if (found := judge.judged(plan, 0, least_bytes=entry.keys[bytes_at])) is None:
            beyond.append(plan)
        else:
            insort(within, (found.keys(objective), found), key=lambda ranked: ranked[0])
    enough = pool.cut == inf or (len(within) >= keep and within[keep - 1][0][0] < pool.cut)
    return [found for _, found in within], beyond, enough


def front(judge: Judge, grids: Grids, keep: int) -> Ranked:
    """The Pareto front of step time and peak; of plans with equal figures the simplest.

    A plan is not estimated if one on the front so far is at least as good as its bounds in both.
    """
    within: list[Judged] = []
    beyond: list[Plan] = []
    n_plans = n_beyond = n_within = 0
    for grid, (memory, seconds) in _by_structure(judge, grids):
        n_plans += len(grid)
        pool = Pool(len(grid))
        pool.add(grid, [seconds, memory], judge.may_be_shown(grid, memory))
        n_beyond += len(grid) - pool.n_seen
        for entry in pool:
            if any(kept.keys("front") < entry.keys and kept.peak_bytes <= entry.keys[1] for kept in within):
                continue
            plan = grid.plan(entry.place)
            if (found := judge.judged(plan, 0, least_bytes=entry.keys[1])) is None:
                beyond.append(plan)
                continue
            n_within += 1
            within = on_front([*within, found])
    return _ranked(judge, grids, within[:keep], beyond, (n_plans, n_within, n_beyond), keep)


def _by_structure(judge: Judge, grids: Grids) -> Iterator[tuple[Grid, Bounds]]:
    """Parts of the grids with equal pipelines and ZeRO stages, with their bounds.

    What is estimated of one part rules out plans of the next.
    """
    for grid in grids():
        memory, seconds = judge.bounds(grid)
        structures = np.stack([grid.cells[name] for name in ("pp", "virtual_stages", "schedule", "zero")])
        starts = np.flatnonzero(np.any(np.diff(structures), axis=0)) + 1
        for cells in np.split(np.arange(structures.shape[1]), starts):
            yield grid[cells], (memory[cells], seconds[cells])


def on_front(found: Iterable[Judged], *, per_token: bool = False) -> list[Judged]:
    """The Pareto front of step time and peak, the fastest plan first."""
    kept: list[Judged] = []
    for one in sorted(found, key=lambda judged: judged.keys("front", per_token=per_token)):
        if not kept or one.peak_bytes < kept[-1].peak_bytes:
            kept.append(one)
    return kept


def every(judge: Judge, grids: Grids, objective: str) -> Ranked:
    """Every plan, estimated: those within the budget, best first, then the others, nearest first."""
    plans = (grid.plan(place) for grid in grids() for place in range(len(grid)))
    found = [replace(judge(plan), estimate=None) for plan in plans]
    within = sorted((one for one in found if not one.over_bytes), key=lambda one: one.keys(objective))
    beyond = sorted((one for one in found if one.over_bytes), key=nearest_first)
    if objective == "front":
        within = on_front(within)
    n_beyond = len(beyond)
    return Ranked(
        within=tuple(within),
        beyond=tuple(beyond),
        n_within=len(found) - n_beyond,
        n_beyond=n_beyond,
        n_slower=0,
    )


def nearest(judge: Judge, grids: Grids, keep: int) -> list[Judged]:
    """The plans that exceed the budget least, for a search where none is within it."""
    most = HELD
    while True:
        pool = Pool(most)
        for grid in grids():
            memory, _ = judge.bounds(grid)
            pool.add(grid, [memory - judge.room_bytes(grid)], np.ones(grid.shape, np.bool_))
        found = _nearest_of(judge, pool, keep)
        if found is not None:
            return found
        most *= 8


def _nearest_of(judge: Judge, pool: Pool, keep: int) -> list[Judged] | None:
    """The plans of a pool that exceed the budget least; None if a plan outside the pool may be among them."""
    found: list[Judged] = []
    for entry in pool:
        most_over_bytes = found[keep - 1].over_bytes if len(found) >= keep else inf
        if entry.keys[0] > most_over_bytes:
            return found
        if (judged := judge.judged(entry.grid.plan(entry.place), most_over_bytes)) is not None:
            insort(found, judged, key=nearest_first)
            del found[keep:]
    return found if pool.cut == inf else None


def nearest_first(judged: Judged) -> tuple[int, ...]:
    """The bytes by which a plan exceeds the budget, then the tie-breaker."""
    return (judged.over_bytes, *simpler(judged.plan))
