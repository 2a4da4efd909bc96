"""Which plans fit and which do not, and which of both are worth keeping."""

from collections.abc import Iterator, Sequence
from math import inf
from typing import TYPE_CHECKING, Any, Final, Protocol, Self, final

import numpy as np
from numpy.typing import NDArray

from memplan.estimate import device_of
from memplan.hardware import Cluster
from memplan.models import Model
from memplan.search.best import Best, Front, Kept, Rows, Tally, n_rows, taken
from memplan.search.plans import Figures, Grid
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
    """Every plan is worked out."""

    def __init__(self, objective: str, keep: int | None) -> None:
        self.objective, self.keep = objective, keep
        self.n_seen = 0
        keys = OBJECTIVES[objective]
        self._fit = Kept(Front(1, *keys) if objective == "front" else Best(keep, keys))
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

        evaluation = Evaluation(model, grids, device_of(cluster))
        for grid, figures in zip(grids, evaluated(evaluation, cluster), strict=True):
            columns = _columns(grid, figures, cluster)
            fits = np.broadcast_to(columns["over_bytes"] == 0, grid.shape)
            self._fit.add(grid, columns, fits)
            self._too_large.add(grid, columns, ~fits)
            self.n_seen += len(grid)

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
    """The `keep` fastest plans that fit, and of those that could be as fast the nearest that do not fit.

    A plan is left out if `keep` others that fit take less time than its step takes at least, by a bound
    (`memplan.search.time.least_times`): it is slower, whether it fits or not. What is found does not depend
    on the order in which plans are seen.
    """

    def __init__(self, keep: int, limit_s: float = inf, near: Rows | None = None) -> None:
        self.keep = keep
        self.limit_s = limit_s
        """So many plans that fit are at least as fast."""
        self.near = near or {}
        """Of the nearest that do not fit some that are known to be there."""
        self.n_seen = 0
        self._fit = Kept(Best(keep, OBJECTIVES["speed"]))
        self._front = Front(keep, "over_bytes", "least_s")
        self._too_large = Kept(self._front)
        self._seconds = Tally(), Tally()

    def begun(self) -> "Fastest":
        """As `Verdicts` says."""
        return Fastest(self.keep, self.limit_s, self._too_large.rows or self.near)

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
        from memplan.search.evaluate import Evaluation  # only a search needs it

        self.n_seen += sum(map(len, grids))
        evaluation, bounds, hopeful = self._bounded(Evaluation(model, grids, device_of(cluster)), cluster)
        found = zip(evaluation.grids, bounds, hopeful, evaluated(evaluation, cluster), strict=True)
        for grid, least_s, which, figures in found:
            columns = _columns(grid, figures, cluster) | {"least_s": least_s}
            fits = columns["over_bytes"] == 0
            for kept, tally, verdict, seconds in zip(
                (self._fit, self._too_large),
                self._seconds,
                (fits, ~fits),
                (figures.step_s, least_s),
                strict=True,
            ):
                chosen = which & verdict & (seconds <= self.limit_s)
                kept.add(grid, columns, chosen)
                tally.add(seconds[chosen])
        self._limit()

    def _bounded(
        self, evaluation: "Evaluation", cluster: Cluster
    ) -> tuple["Evaluation", list[NDArray[np.float64]], list[NDArray[np.bool_]]]:
        """Cells where a plan may be kept, how long a step of each plan takes at least, and which may be kept.

        All cells where most are like that: what is known of these need not be found again.
        """
        from memplan.search.evaluate import Evaluation  # only a search needs it
        from memplan.search.time import least_times

        grids = evaluation.grids
        bounds = [least_times(evaluation, i, cluster) for i in range(len(grids))]
        hopeful = [self._hopeful(evaluation, i, least_s, cluster) for i, least_s in enumerate(bounds)]
        cells = [np.flatnonzero(which.any(axis=1)) for which in hopeful]
        if 2 * sum(map(len, cells)) > sum(map(len, bounds)):
            return evaluation, bounds, hopeful
        there = [i for i, own in enumerate(cells) if len(own)]
        some = Evaluation(evaluation.model, [grids[i][cells[i]] for i in there], evaluation.device)
        return some, [bounds[i][cells[i]] for i in there], [hopeful[i][cells[i]] for i in there]

    def _hopeful(
        self, evaluation: "Evaluation", i: int, least_s: NDArray[np.float64], cluster: Cluster
    ) -> NDArray[np.bool_]:
        """Which plans of a grid may be kept; those that are known to be too large otherwise are counted."""
        from memplan.search.floor import least_bytes  # only a search needs it

        hopeful: NDArray[np.bool_] = least_s <= self.limit_s
        budget_bytes = cluster.budget_bytes
        known = [rows for rows in (self._too_large.rows, self.near) if rows]
        if budget_bytes is None or not known or not hopeful.any():
            return hopeful
        over_bytes = least_bytes(evaluation, i) - budget_bytes
        beaten = [self._front.beaten(rows, over_bytes, least_s) for rows in known]
        too_large = hopeful & (over_bytes > 0) & np.any(beaten, axis=0)
        self._seconds[1].add(least_s[too_large])
        hopeful &= ~too_large
        return hopeful

    def _limit(self) -> None:
        slowest = self._fit.rows["step_s"][-1] if n_rows(self._fit.rows) == self.keep else inf
        self.limit_s = min(self.limit_s, float(slowest))
        for tally in self._seconds:
            tally.n_up_to(self.limit_s)

    def join(self, other: "Fastest") -> None:
        """As `Verdicts` says."""
        self._fit.join(other._fit)
        self._too_large.join(other._too_large)
        for own, others in zip(self._seconds, other._seconds, strict=True):
            own.join(others)
        self.n_seen += other.n_seen
        self._limit()

    def fit(self) -> tuple[Rows, int]:
        """As `Verdicts` says."""
        return self._fit.rows, self._seconds[0].n_up_to(self.limit_s)

    def too_large(self) -> tuple[Rows, int]:
        """As `Verdicts` says, of those that could be as fast."""
        rows = self._too_large.rows
        hopeful = taken(rows, np.flatnonzero(rows["least_s"] <= self.limit_s)[: self.keep]) if rows else rows
        return hopeful, self._seconds[1].n_up_to(self.limit_s)


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
