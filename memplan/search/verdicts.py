"""Which plans fit and which do not, and which of both are worth keeping."""

from collections.abc import Iterator, Sequence
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, Final, Protocol, Self, final

import numpy as np
from numpy.typing import NDArray

from memplan.estimate import device_of
from memplan.hardware import Cluster
from memplan.models import Model
from memplan.search.best import Best, Choice, Front, Kept, Rows, Tally, n_rows, taken
from memplan.search.plans import Column, Figures, Grid
from memplan.search.processes import uncollected

if TYPE_CHECKING:
    from memplan.search.evaluate import Evaluation

OBJECTIVES: Final = {
    "speed": ("step_s",),
    "memory": ("peak_bytes", "step_s"),
    "micro_batch": ("minus_micro_batch", "step_s", "peak_bytes"),
    "front": ("step_s", "peak_bytes"),
}
"""What is least in the best plan, and of equal ones: the time of a step (so most tokens per second), ..."""


class Verdicts(Protocol):
    """What is kept of the plans of a search that can run."""

    n_seen: int
    """How many were considered."""

    def hopeful(self, model: Model, grids: Sequence[Grid], cluster: Cluster) -> Sequence[Grid]:
        """Those of some plans of one kind that may be kept."""
        ...

    def add(self, model: Model, grids: Sequence[Grid], cluster: Cluster) -> None:
        """Consider the plans of grids of one kind."""
        ...

    def join(self, other: Any) -> None:
        """Consider what was kept elsewhere by verdicts of the same sort."""
        ...

    def begun(self) -> Self:
        """Verdicts of the same sort on other plans, none yet."""
        ...

    def fit(self) -> tuple[Rows, int]:
        """The best plans that fit, and how many there are."""
        ...

    def too_large(self) -> tuple[Rows, int]:
        """The nearest plans that do not fit, and how many there are."""
        ...


@final
class Every:
    """Every plan is judged, and worked out unless it is surely too large and not among the nearest."""

    def __init__(self, objective: str, keep: int | None) -> None:
        self.objective, self.keep = objective, keep
        self.n_seen = 0
        keys = OBJECTIVES[objective]
        choice: Choice = Front(1, *keys) if objective == "front" else Best(keep, keys)
        self._fit = Kept(choice)
        self._too_large = Kept(Best(keep, ("over_bytes",)))

    def begun(self) -> "Every":
        """As `Verdicts` says."""
        return Every(self.objective, self.keep)

    def hopeful(self, model: Model, grids: Sequence[Grid], cluster: Cluster) -> Sequence[Grid]:
        """As `Verdicts` says."""
        return grids

    @uncollected()
    def add(self, model: Model, grids: Sequence[Grid], cluster: Cluster) -> None:
        """As `Verdicts` says."""
        from memplan.search.evaluate import Evaluation  # only a search needs it

        n_plans = sum(map(len, grids))
        self.n_seen += n_plans
        evaluation = Evaluation(model, grids, device_of(cluster))
        if self.keep:
            over_bytes = [_least_over_bytes(evaluation, i, cluster) for i in range(len(grids))]
        else:
            over_bytes = [np.zeros(grid.shape, np.int64) for grid in grids]
        may_fit = [found <= 0 for found in over_bytes]
        for hopeful in _rounds(over_bytes, may_fit, self._too_large):
            for _, which, grid, columns in _figures(evaluation, hopeful, cluster):
                fits = columns["over_bytes"] == 0
                self._fit.add(grid, columns, which & fits)
                self._too_large.add(grid, columns, which & ~fits)
                n_plans -= int(np.count_nonzero(which))
        self._too_large.n_seen += n_plans

    def join(self, other: "Every") -> None:
        """As `Verdicts` says."""
        self._fit.join(other._fit)
        self._too_large.join(other._too_large)
        self.n_seen += other.n_seen

    def fit(self) -> tuple[Rows, int]:
        """As `Verdicts` says."""
        return self._fit.rows, self._fit.n_seen

    def too_large(self) -> tuple[Rows, int]:
        """As `Verdicts` says."""
        return self._too_large.rows, self._too_large.n_seen


@final
class Fastest:
    """The `keep` fastest plans that fit, and the nearest that do not.

    What is not worked out: plans whose step takes longer, by a bound (`memplan.search.time`), than those of
    `keep` plans that fit; and plans that are too large by a bound (`memplan.search.floor`), which are among
    the nearest only if none fits. What is found does not depend on the order in which plans are seen.
    """

    def __init__(self, keep: int, limit_s: float = inf, *, some_fit: bool = False) -> None:
        self.keep = keep
        self.limit_s = limit_s
        """So many plans that fit are at least as fast."""
        self.some_fit = some_fit
        self.n_seen = 0
        self._fit = Kept(Best(keep, OBJECTIVES["speed"]))
        self._as_fast = Kept(Front(keep, "over_bytes", "least_s"))
        """Plans that do not fit, whatever the limit becomes."""
        self._nearest = Kept(Best(keep, ("over_bytes",)))
        """Those of all, as long as none fits."""
        self._seconds = Tally(), Tally()

    def begun(self) -> "Fastest":
        """As `Verdicts` says."""
        return Fastest(self.keep, self.limit_s, some_fit=self.some_fit)

    def hopeful(self, model: Model, grids: Sequence[Grid], cluster: Cluster) -> Sequence[Grid]:
        """As `Verdicts` says."""
        from memplan.search.time import least_s  # only a search needs it

        found = []
        for grid in grids:
            cells = np.flatnonzero(least_s(model, grid, cluster) <= self.limit_s)
            if len(cells):
                found.append(grid[cells])
        return found

    @uncollected()
    def add(self, model: Model, grids: Sequence[Grid], cluster: Cluster) -> None:
        """As `Verdicts` says."""
        from memplan.search.evaluate import Evaluation  # only a search needs them
        from memplan.search.time import least_times

        self.n_seen += sum(map(len, grids))
        evaluation = Evaluation(model, grids, device_of(cluster))
        over_bytes, bounds, may_fit = [], [], []
        for i in range(len(grids)):
            over_bytes.append(_least_over_bytes(evaluation, i, cluster))
            small = over_bytes[i] <= 0
            bounds.append(least_times(evaluation, i, cluster, small))
            as_fast = bounds[i] <= self.limit_s
            self._seconds[1].add(bounds[i][as_fast & ~small])
            may_fit.append(as_fast & small)
        for hopeful in _rounds(over_bytes, may_fit, None if self.some_fit else self._nearest):
            for (i, cells), which, grid, columns in _figures(evaluation, hopeful, cluster):
                step_s, least_s = columns["step_s"], bounds[i][cells]
                fits, asked = columns["over_bytes"] == 0, which & may_fit[i][cells]
                fast, too_large = asked & fits & (step_s <= self.limit_s), asked & ~fits
                self._fit.add(grid, columns, fast)
                self._seconds[0].add(step_s[fast])
                self._as_fast.add(grid, columns | {"least_s": least_s}, too_large)
                self._seconds[1].add(least_s[too_large])
                if not self.some_fit:
                    self._nearest.add(grid, columns, which & ~fits)
            self._limit()
            if self.some_fit:
                break

    def _limit(self) -> None:
        fit = self._fit.rows
        self.some_fit |= bool(n_rows(fit))
        if n_rows(fit) == self.keep:
            self.limit_s = min(self.limit_s, float(fit["step_s"][-1]))
        for tally in self._seconds:
            tally.n_up_to(self.limit_s)

    def join(self, other: "Fastest") -> None:
        """As `Verdicts` says."""
        self._fit.join(other._fit)
        self._as_fast.join(other._as_fast)
        self._nearest.join(other._nearest)
        for own, others in zip(self._seconds, other._seconds, strict=True):
            own.join(others)
        self.n_seen += other.n_seen
        self._limit()

    def fit(self) -> tuple[Rows, int]:
        """As `Verdicts` says."""
        return self._fit.rows, self._seconds[0].n_up_to(self.limit_s)

    def too_large(self) -> tuple[Rows, int]:
        """As `Verdicts` says, of those that could be as fast."""
        rows, n = self._as_fast.rows, self._seconds[1].n_up_to(self.limit_s)
        if not self.some_fit:
            return self._nearest.rows, n
        return taken(rows, np.flatnonzero(rows["least_s"] <= self.limit_s)[: self.keep]) if rows else {}, n


def _least_over_bytes(evaluation: "Evaluation", i: int, cluster: Cluster) -> NDArray[np.int64]:
    """What plans of a grid need at least beyond the cluster's budget; those that may not, 0 or less."""
    from memplan.search.floor import least_bytes  # only a search needs it

    if cluster.budget_bytes is None:
        return np.zeros(evaluation.grids[i].shape, np.int64)
    return least_bytes(evaluation, i, cluster.budget_bytes) - cluster.budget_bytes


Masks = Sequence[NDArray[np.bool_]]
"""Some of the plans of each of several grids."""

AT_FIRST: Final = 64
"""Of the plans that are surely too large: how many are worked out first to know the nearest, then more."""


def _rounds(over_bytes: Sequence[Column], hopeful: Masks, nearest: Kept[Best] | None) -> Iterator[Masks]:
    """Which plans to work out at a time: the hopeful ones; and others as long as they may be kept.

    Of these, those come first that need least beyond the budget by a bound.
    """
    if nearest is None:
        yield hopeful
        return
    n = AT_FIRST
    left: Masks = [~which for which in hopeful]
    while True:
        may_keep = partial(nearest.choice.may_keep, nearest.rows)
        left = [which & may_keep(found) for which, found in zip(left, over_bytes, strict=True)]
        bounds = np.concatenate([found[which] for which, found in zip(left, over_bytes, strict=True)])
        limit = np.partition(bounds, n)[n] if len(bounds) > n else inf
        near = [which & (found <= limit) for which, found in zip(left, over_bytes, strict=True)]
        chosen = [one | other for one, other in zip(hopeful, near, strict=True)]
        if not any(which.any() for which in chosen):
            return
        yield chosen
        hopeful = [np.zeros_like(which) for which in hopeful]
        left = [which & ~done for which, done in zip(left, near, strict=True)]
        n *= 4


def _figures(
    evaluation: "Evaluation", chosen: Masks, cluster: Cluster
) -> Iterator[tuple[tuple[int, Column], NDArray[np.bool_], Grid, dict[str, NDArray[Any]]]]:
    """Figures of cells with a chosen plan: which cells of which grid, which plans, these cells, by name."""
    places = [(i, np.flatnonzero(which.any(axis=1))) for i, which in enumerate(chosen)]
    places = [(i, cells) for i, cells in places if len(cells)]
    some = evaluation.some(places)
    for (i, cells), grid, figures in zip(places, some.grids, evaluated(some, cluster), strict=True):
        yield (i, cells), chosen[i][cells], grid, _columns(grid, figures, cluster)


def _columns(grid: Grid, figures: Figures, cluster: Cluster) -> dict[str, NDArray[Any]]:
    """A grid's figures by name; `over_bytes` beyond the cluster's budget (0: the plan fits)."""
    budget_bytes = cluster.budget_bytes
    peak_bytes = figures.peak_bytes
    over_bytes = (
        np.zeros((1, 1), np.int64) if budget_bytes is None else np.maximum(0, peak_bytes - budget_bytes)
    )
    return {
        "peak_bytes": peak_bytes,
        "worst_stage": figures.worst_stage,
        "rest_bytes": figures.rest_bytes,
        "over_bytes": over_bytes,
        "minus_micro_batch": -grid.cells["micro_batch"][:, None],
        "step_s": figures.step_s,
    }


def evaluated(evaluation: "Evaluation", cluster: Cluster) -> Iterator[Figures]:
    """The figures of each grid's plans, which are plans that `check_plan` accepts.

    Only steps of cells where a plan fits are timed; the others take infinitely long, and so do plans that do
    not fit.
    """
    from memplan.search.memory import held  # only a search needs them
    from memplan.search.time import times

    for i, grid in enumerate(evaluation.grids):
        memory = held(evaluation, i)
        budget_bytes = cluster.budget_bytes
        fits = np.broadcast_to(budget_bytes is None or memory.peak_bytes <= budget_bytes, grid.shape)
        seconds = np.full(grid.shape, inf)
        cells = np.flatnonzero(fits.any(axis=1))
        if len(cells):
            seconds[cells] = np.where(fits[cells], times(evaluation, i, cluster, cells), inf)
        yield Figures(
            peak_bytes=memory.peak_bytes,
            worst_stage=memory.worst_stage,
            rest_bytes=memory.rest_bytes,
            step_s=seconds,
        )
