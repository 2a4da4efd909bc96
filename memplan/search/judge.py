"""Plans estimated one by one, the most promising first, as long as one may be better than what is kept."""

from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from memplan.estimate import Estimate, estimate_of, estimate_plan, stage_estimates
from memplan.hardware import Cluster
from memplan.models import Model
from memplan.plan import Plan
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

HELD: Final = 2**16
"""Plans that are held by their bounds at first; more if these turn out to be too few."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A plan with figures of its estimate; `over_bytes` beyond the cluster's budget: 0 if it fits.

    An unknown time is infinite. `rest` says all other figures when asked.
    """

    plan: Plan
    peak_bytes: int
    over_bytes: int
    step_s: float
    rest: Callable[[], dict[str, Any]]

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
    """Bounds and estimates of plans of one model on one cluster."""

    def __init__(self, model: Model, cluster: Cluster, time_model: Roofline) -> None:
        self.model, self.cluster, self.time_model = model, cluster, time_model
        self.budget_bytes = inf if cluster.budget_bytes is None else cluster.budget_bytes

    def bounds(self, grids: Sequence[Grid]) -> Iterator[tuple[Grid, Bounds]]:
        """Grids with the least bytes and the least seconds of their plans."""
        return bounds(self.model, grids, self.cluster, self.time_model)

    def fitting(self, plan: Plan) -> Judged | None:
        """A plan's figures if it fits: no more ranks are looked at than it takes to tell."""
        device = self.cluster.gpu.device
        stages = []
        for stage in stage_estimates(self.model, plan, device, self.cluster):
            if stage.peak_bytes > self.budget_bytes:
                return None
            stages.append(stage)
        return self._judged(estimate_of(self.model, plan, device, self.cluster, stages))

    def __call__(self, plan: Plan) -> Judged:
        """A plan's figures, whether it fits or not."""
        return self._judged(estimate_plan(self.model, plan, self.cluster))

    def _judged(self, estimate: Estimate) -> Judged:
        estimate = replace(estimate, time_model=self.time_model)
        peak_bytes = estimate.worst.peak_bytes
        step_s = estimate.step_s
        return Judged(
            plan=estimate.plan,
            peak_bytes=peak_bytes,
            over_bytes=int(max(0, peak_bytes - self.budget_bytes)),
            step_s=inf if step_s is None else step_s,
            rest=partial(_rest, estimate),
        )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Verdicts:
    """The best plans that fit, others that do not; how many of both are known, and how many are left out.

    Those that do not fit are the most promising of the plans that took an estimate to tell; where none fits,
    the nearest of all.
    """

    fit: tuple[Judged, ...]
    too_large: tuple[Judged, ...]
    n_fit: int
    n_too_large: int
    n_slower: int


Grids = Callable[[], Iterable[Sequence[Grid]]]
"""The plans that can run, batch by batch, each time anew."""


def best_first(judge: Judge, grids: Grids, objective: str, keep: int) -> Verdicts:
    """The `keep` best plans by an objective: as if every plan had been estimated."""
    most = HELD
    while True:
        pool, n_plans, n_too_large = _pooled(judge, grids, objective, most)
        fit, too_large, done = _judged_in_order(judge, pool, objective, keep)
        if done:
            break
        most *= 8
    return _verdicts(judge, grids, fit[:keep], too_large, (n_plans, len(fit), n_too_large), keep)


def _verdicts(
    judge: Judge,
    grids: Grids,
    fit: Sequence[Judged],
    too_large: Sequence[Plan],
    counted: tuple[int, int, int],
    keep: int,
) -> Verdicts:
    """What is known: `counted` are all plans, those known to fit, and those too large by their bound."""
    n_plans, n_fit, n_too_large = counted
    n_too_large = n_too_large + len(too_large) if fit else n_plans
    others = [judge(plan) for plan in too_large[:keep]] if fit else nearest(judge, grids, keep)
    return Verdicts(
        fit=tuple(fit),
        too_large=tuple(others),
        n_fit=n_fit,
        n_too_large=n_too_large,
        n_slower=n_plans - n_fit - n_too_large,
    )


def _pooled(judge: Judge, grids: Grids, objective: str, most: int) -> tuple[Pool, int, int]:
    """The most promising plans; how many there are, and how many are too large by their bound."""
    pool, n_plans = Pool(most), 0
    for batch in grids():
        for grid, (memory, seconds) in judge.bounds(batch):
            n_plans += len(grid)
            pool.add(grid, _keys(grid, objective, memory, seconds), memory <= judge.budget_bytes)
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
    """Plans that fit, best first, and that do not; and whether no other plan can be among the best."""
    fit: list[tuple[tuple[float, ...], Judged]] = []
    too_large: list[Plan] = []
    for entry in pool:
        if len(fit) >= keep and entry.keys > fit[keep - 1][0]:
            return [found for _, found in fit], too_large, True
        plan = entry.plan
        if (found := judge.fitting(plan)) is None:
            too_large.append(plan)
        else:
            insort(fit, (found.keys(objective), found), key=lambda ranked: ranked[0])
    enough = pool.cut == inf or (len(fit) >= keep and fit[keep - 1][0][0] < pool.cut)
    return [found for _, found in fit], too_large, enough


def front(judge: Judge, grids: Grids, keep: int) -> Verdicts:
    """The plans that none equals or beats in both step time and peak; of equal ones the simplest.

    A plan is estimated unless one that was estimated before is as good as its bounds in both.
    """
    fit: list[Judged] = []
    too_large: list[Plan] = []
    n_plans = n_too_large = n_fit = 0
    for batch in grids():
        for grid, (memory, seconds) in judge.bounds(batch):
            n_plans += len(grid)
            pool = Pool(len(grid))
            pool.add(grid, [seconds, memory], memory <= judge.budget_bytes)
            n_too_large += len(grid) - pool.n_seen
            for entry in pool:
                if any(kept.keys("front") < entry.keys and kept.peak_bytes <= entry.keys[1] for kept in fit):
                    continue
                plan = entry.plan
                if (found := judge.fitting(plan)) is None:
                    too_large.append(plan)
                    continue
                n_fit += 1
                fit = on_front([*fit, found])
    return _verdicts(judge, grids, fit[:keep], too_large, (n_plans, n_fit, n_too_large), keep)


def on_front(found: Iterable[Judged]) -> list[Judged]:
    """Those that none equals or beats in both step time and peak, fastest first."""
    kept: list[Judged] = []
    for one in sorted(found, key=lambda judged: judged.keys("front")):
        if not kept or one.peak_bytes < kept[-1].peak_bytes:
            kept.append(one)
    return kept


def every(judge: Judge, grids: Grids, objective: str) -> Verdicts:
    """Every plan, estimated: those that fit, best first, then those that do not, the nearest first."""
    plans = [grid.all() for batch in grids() for grid in batch]
    found = [_alone(judge(some.plan(i))) for some in plans for i in range(len(some))]
    fit = sorted((one for one in found if not one.over_bytes), key=lambda one: one.keys(objective))
    too_large = sorted((one for one in found if one.over_bytes), key=_over)
    if objective == "front":
        fit = on_front(fit)
    n_too_large = len(too_large)
    return Verdicts(
        fit=tuple(fit),
        too_large=tuple(too_large),
        n_fit=len(found) - n_too_large,
        n_too_large=n_too_large,
        n_slower=0,
    )


def _alone(judged: Judged) -> Judged:
    """A plan's figures without its estimate, which is a hundred times as large."""
    known = judged.rest()
    return replace(judged, rest=lambda: known)


def nearest(judge: Judge, grids: Grids, keep: int) -> list[Judged]:
    """The plans that need least beyond the budget, where none fits."""
    most = HELD
    while True:
        pool = Pool(most)
        for batch in grids():
            for grid, (memory, _) in judge.bounds(batch):
                pool.add(grid, [memory], np.ones(grid.shape, np.bool_))
        found: list[Judged] = []
        for entry in pool:
            if len(found) >= keep and entry.keys[0] > found[keep - 1].peak_bytes:
                return found[:keep]
            insort(found, judge(entry.plan), key=_over)
        if pool.cut == inf:
            return found[:keep]
        most *= 8


def _over(judged: Judged) -> tuple[int, ...]:
    return (judged.over_bytes, *judged.simpler)


def _rest(estimated: Estimate) -> dict[str, Any]:
    """Figures of an estimate as plain values; a time that nobody knows is None."""
    worst = estimated.worst
    return {
        "rest_bytes": worst.rest_bytes,
        "worst_stage": worst.stage,
        "when": worst.when,
        "step_s": estimated.step_s,
        "tokens_per_s": estimated.tokens_per_s,
        "tokens_per_s_per_gpu": estimated.tokens_per_s_per_gpu,
        "mfu": estimated.mfu,
    }
