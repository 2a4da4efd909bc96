"""Plans estimated one by one, the most promising first, as long as one may be better than what is kept.

A plan is *within* the budget if its allocated bytes, with the most that CUDA's context and NCCL's buffers may
take, are; only such a plan can have the verdict "fits". The rest, what the caching allocator reserves beyond,
takes a replay, which is asked for the plans that are kept (`memplan.search.search.Found`).
"""

from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from memplan.estimate import Estimate, estimate_of, estimate_plan, stage_estimates
from memplan.hardware import Cluster, n_communicators, outside_allocator
from memplan.models import Model
from memplan.plan import MESH_AXES, Plan
from memplan.search.bounds import Bounds, bounds
from memplan.search.plans import Grid, number_of
from memplan.search.pool import SIMPLER, Keys, Pool
from memplan.steptime import Roofline

OBJECTIVES: Final = {
    "speed": ("step_s",),
    "memory": ("peak_bytes", "step_s"),
    "micro_batch": ("minus_micro_batch", "step_s", "peak_bytes"),
    "front": ("step_s", "peak_bytes"),
}
"""What is least in the best plan, and of equal ones: the time of a step (so most tokens per second), ..."""

MOST_OUTSIDE_BYTES: Final = np.array(
    [outside_allocator(n).high_bytes for n in range(n_communicators(*[2] * len(MESH_AXES)) + 1)]
)
"""The most that is held beside the caching allocator's bytes, by the number of communicators."""

HELD: Final = 2**16
"""Plans that are held by their bounds at first; more if these turn out to be too few."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A plan with figures of its estimate; `over_bytes` beyond its room: 0 if it is within the budget.

    An unknown time is infinite.
    """

    plan: Plan
    peak_bytes: int
    over_bytes: int
    step_s: float

    @property
    def simpler(self) -> tuple[int, ...]:
        """What decides between equally good plans."""
        return tuple([number_of(name, getattr(self.plan, name)) for name in SIMPLER])

    def keys(self, objective: str) -> tuple[float, ...]:
        """What an objective wants least, then how simple the plan is."""
        figures = {
            "step_s": self.step_s,
            "peak_bytes": self.peak_bytes,
            "minus_micro_batch": -self.plan.micro_batch,
        }
        return (*[figures[name] for name in OBJECTIVES[objective]], *self.simpler)


@final
class Judge:
    """Bounds and estimates of plans of one model on one cluster.

    `slack_bytes` of the budget are left to what the caching allocator reserves beyond what is allocated.
    """

    def __init__(self, model: Model, cluster: Cluster, time_model: Roofline, slack_bytes: int = 0) -> None:
        self.model, self.cluster, self.time_model = model, cluster, time_model
        usable = inf if cluster.budget_bytes is None else cluster.budget_bytes - slack_bytes
        self._room = usable - MOST_OUTSIDE_BYTES.astype(np.float64)
        """By the number of communicators."""

    def bounds(self, grids: Sequence[Grid]) -> Iterator[tuple[Grid, Bounds]]:
        """Grids with the least bytes and the least seconds of their plans."""
        return bounds(self.model, grids, self.cluster, self.time_model)

    def room_bytes(self, grid: Grid) -> NDArray[np.float64]:
        """What a grid's plans may allocate and be within the budget, by cell: [cell, 1]."""
        axes = (grid.structure[axis] if axis in grid.structure else grid.cells[axis] for axis in MESH_AXES)
        return self._room_of(*axes)[:, None]

    def _room_of(self, *axes: Any) -> NDArray[np.float64]:
        """By the ranks along each axis of a mesh."""
        return np.asarray(self._room[n_communicators(*axes)], np.float64)

    def within(self, plan: Plan) -> Judged | None:
        """A plan's figures if it is within the budget: no more ranks are looked at than it takes to tell."""
        device, room_bytes = self.cluster.gpu.device, self._room_of(*_axes(plan))
        stages = []
        for stage in stage_estimates(self.model, plan, device, self.cluster):
            if stage.peak_bytes > room_bytes:
                return None
            stages.append(stage)
        return self._judged(estimate_of(self.model, plan, device, self.cluster, stages))

    def __call__(self, plan: Plan) -> Judged:
        """A plan's figures, whether it is within the budget or not."""
        return self._judged(estimate_plan(self.model, plan, self.cluster))

    def _judged(self, estimate: Estimate) -> Judged:
        estimate = replace(estimate, time_model=self.time_model)
        peak_bytes = estimate.worst.peak_bytes
        step_s = estimate.step_s
        return Judged(
            plan=estimate.plan,
            peak_bytes=peak_bytes,
            over_bytes=int(max(0.0, peak_bytes - float(self._room_of(*_axes(estimate.plan))))),
            step_s=inf if step_s is None else step_s,
        )


def _axes(plan: Plan) -> tuple[int, ...]:
    return tuple([getattr(plan, axis) for axis in MESH_AXES])


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Verdicts:
    """The best plans within the budget, others beyond it; how many of both are known, how many are left out.

    Those beyond are the most promising of the plans that took an estimate to tell; where none is within, the
    nearest of all.
    """

    within: tuple[Judged, ...]
    beyond: tuple[Judged, ...]
    n_within: int
    n_beyond: int
    n_slower: int


Grids = Callable[[], Iterable[Sequence[Grid]]]
"""The plans that can run, batch by batch, each time anew."""


def best_first(judge: Judge, grids: Grids, objective: str, keep: int) -> Verdicts:
    """The `keep` best plans by an objective: as if every plan had been estimated."""
    most = HELD
    while True:
        pool, n_plans, n_beyond = _pooled(judge, grids, objective, most)
        within, beyond, done = _judged_in_order(judge, pool, objective, keep)
        if done:
            break
        most *= 8
    return _verdicts(judge, grids, within[:keep], beyond, (n_plans, len(within), n_beyond), keep)


def _verdicts(
    judge: Judge,
    grids: Grids,
    within: Sequence[Judged],
    beyond: Sequence[Plan],
    counted: tuple[int, int, int],
    keep: int,
) -> Verdicts:
    """What is known: `counted` are all plans, those known to be within, and those beyond by their bound."""
    n_plans, n_within, n_beyond = counted
    n_beyond = n_beyond + len(beyond) if within else n_plans
    others = [judge(plan) for plan in beyond[:keep]] if within else nearest(judge, grids, keep)
    return Verdicts(
        within=tuple(within),
        beyond=tuple(others),
        n_within=n_within,
        n_beyond=n_beyond,
        n_slower=n_plans - n_within - n_beyond,
    )


def _pooled(judge: Judge, grids: Grids, objective: str, most: int) -> tuple[Pool, int, int]:
    """The most promising plans; how many there are, and how many are beyond the budget by their bound."""
    pool, n_plans = Pool(most), 0
    for batch in grids():
        for grid, (memory, seconds) in judge.bounds(batch):
            n_plans += len(grid)
            pool.add(grid, _keys(grid, objective, memory, seconds), memory <= judge.room_bytes(grid))
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
    """Plans within the budget, best first, and plans beyond; and whether no other can be among the best."""
    within: list[tuple[tuple[float, ...], Judged]] = []
    beyond: list[Plan] = []
    for entry in pool:
        if len(within) >= keep and entry.keys > within[keep - 1][0]:
            return [found for _, found in within], beyond, True
        plan = entry.plan
        if (found := judge.within(plan)) is None:
            beyond.append(plan)
        else:
            insort(within, (found.keys(objective), found), key=lambda ranked: ranked[0])
    enough = pool.cut == inf or (len(within) >= keep and within[keep - 1][0][0] < pool.cut)
    return [found for _, found in within], beyond, enough


def front(judge: Judge, grids: Grids, keep: int) -> Verdicts:
    """The plans that none equals or beats in both step time and peak; of equal ones the simplest.

    A plan is estimated unless one that was estimated before is as good as its bounds in both.
    """
    within: list[Judged] = []
    beyond: list[Plan] = []
    n_plans = n_beyond = n_within = 0
    for batch in grids():
        for grid, (memory, seconds) in judge.bounds(batch):
            n_plans += len(grid)
            pool = Pool(len(grid))
            pool.add(grid, [seconds, memory], memory <= judge.room_bytes(grid))
            n_beyond += len(grid) - pool.n_seen
            for entry in pool:
                if any(
                    kept.keys("front") < entry.keys and kept.peak_bytes <= entry.keys[1] for kept in within
                ):
                    continue
                plan = entry.plan
                if (found := judge.within(plan)) is None:
                    beyond.append(plan)
                    continue
                n_within += 1
                within = on_front([*within, found])
    return _verdicts(judge, grids, within[:keep], beyond, (n_plans, n_within, n_beyond), keep)


def on_front(found: Iterable[Judged]) -> list[Judged]:
    """Those that none equals or beats in both step time and peak, fastest first."""
    kept: list[Judged] = []
    for one in sorted(found, key=lambda judged: judged.keys("front")):
        if not kept or one.peak_bytes < kept[-1].peak_bytes:
            kept.append(one)
    return kept


def every(judge: Judge, grids: Grids, objective: str) -> Verdicts:
    """Every plan, estimated: those within the budget, best first, then those beyond it, the nearest first."""
    plans = [grid.all() for batch in grids() for grid in batch]
    found = [judge(some.plan(i)) for some in plans for i in range(len(some))]
    within = sorted((one for one in found if not one.over_bytes), key=lambda one: one.keys(objective))
    beyond = sorted((one for one in found if one.over_bytes), key=_over)
    if objective == "front":
        within = on_front(within)
    n_beyond = len(beyond)
    return Verdicts(
        within=tuple(within),
        beyond=tuple(beyond),
        n_within=len(found) - n_beyond,
        n_beyond=n_beyond,
        n_slower=0,
    )


def nearest(judge: Judge, grids: Grids, keep: int) -> list[Judged]:
    """The plans that need least beyond their room, where none is within it."""
    most = HELD
    while True:
        pool = Pool(most)
        for batch in grids():
            for grid, (memory, _) in judge.bounds(batch):
                pool.add(grid, [memory - judge.room_bytes(grid)], np.ones(grid.shape, np.bool_))
        found: list[Judged] = []
        for entry in pool:
            if len(found) >= keep and entry.keys[0] > found[keep - 1].over_bytes:
                return found[:keep]
            insort(found, judge(entry.plan), key=_over)
        if pool.cut == inf:
            return found[:keep]
        most *= 8


def _over(judged: Judged) -> tuple[int, ...]:
    return (judged.over_bytes, *judged.simpler)
