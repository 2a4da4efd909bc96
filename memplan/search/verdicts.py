"""Which plans stay within the budget by what they allocate and which do not, and which are worth keeping.

A plan is `within` if its allocated bytes, with the most that CUDA's context and NCCL's buffers may take, are
within the cluster's budget; only such a plan can have the verdict "fits". The rest of it, what the caching
allocator reserves beyond, takes a replay, which millions of plans cannot have: `memplan.search.table` asks it
of the plans that are kept.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, Final, Protocol, Self, final

import numpy as np
from numpy.typing import NDArray

from memplan.estimate import device_of
from memplan.hardware import Cluster, n_communicators, outside_allocator
from memplan.models import Model
from memplan.plan import MESH_AXES
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

    def within(self) -> tuple[Rows, int]:
        """The best plans within the budget, and how many there are."""
        ...

    def beyond(self) -> tuple[Rows, int]:
        """The nearest plans beyond the budget, and how many there are."""
        ...


@final
class Every:
    """Every plan is judged, and worked out unless it is surely beyond the budget and not among the nearest.

    `slack_bytes` of the budget are left to what the caching allocator reserves beyond what is allocated.
    """

    def __init__(self, objective: str, keep: int | None, slack_bytes: int = 0) -> None:
        self.objective, self.keep, self.slack_bytes = objective, keep, slack_bytes
        self.n_seen = 0
        keys = OBJECTIVES[objective]
        choice: Choice = Front(1, *keys) if objective == "front" else Best(keep, keys)
        self._within = Kept(choice)
        self._beyond = Kept(Best(keep, ("over_bytes",)))

    def begun(self) -> "Every":
        """As `Verdicts` says."""
        return Every(self.objective, self.keep, self.slack_bytes)

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
            over_bytes = [
                _least_over_bytes(evaluation, i, cluster, self.slack_bytes) for i in range(len(grids))
            ]
        else:
            over_bytes = [np.zeros(grid.shape, np.int64) for grid in grids]
        may_be_within = [found <= 0 for found in over_bytes]
        for hopeful in _rounds(over_bytes, may_be_within, self._beyond):
            for _, which, grid, columns in _figures(evaluation, hopeful, cluster, self.slack_bytes):
                within = columns["over_bytes"] == 0
                self._within.add(grid, columns, which & within)
                self._beyond.add(grid, columns, which & ~within)
                n_plans -= int(np.count_nonzero(which))
        self._beyond.n_seen += n_plans

    def join(self, other: "Every") -> None:
        """As `Verdicts` says."""
        self._within.join(other._within)
        self._beyond.join(other._beyond)
        self.n_seen += other.n_seen

    def within(self) -> tuple[Rows, int]:
        """As `Verdicts` says."""
        return self._within.rows, self._within.n_seen

    def beyond(self) -> tuple[Rows, int]:
        """As `Verdicts` says."""
        return self._beyond.rows, self._beyond.n_seen


@final
class Fastest:
    """The `keep` fastest plans within the budget, and the nearest beyond it.

    What is not worked out: plans whose step takes longer, by a bound (`memplan.search.time`), than those of
    `keep` plans within; and plans that are beyond by a bound (`memplan.search.floor`), which are among the
    nearest only if none is within. What is found does not depend on the order in which plans are seen.
    `slack_bytes`: as for `Every`.
    """

    def __init__(
        self, keep: int, limit_s: float = inf, *, some_within: bool = False, slack_bytes: int = 0
    ) -> None:
        self.keep, self.slack_bytes = keep, slack_bytes
        self.limit_s = limit_s
        """`keep` plans within the budget are at least as fast."""
        self.some_within = some_within
        self.n_seen = 0
        self._within = Kept(Best(keep, OBJECTIVES["speed"]))
        self._as_fast = Kept(Front(keep, "over_bytes", "least_s"))
        """Plans beyond the budget, whatever the limit becomes."""
        self._nearest = Kept(Best(keep, ("over_bytes",)))
        """Those of all, as long as none is within."""
        self._seconds = Tally(), Tally()

    def begun(self) -> "Fastest":
        """As `Verdicts` says."""
        return Fastest(self.keep, self.limit_s, some_within=self.some_within, slack_bytes=self.slack_bytes)

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
        over_bytes, bounds, may_be_within = [], [], []
        for i in range(len(grids)):
            over_bytes.append(_least_over_bytes(evaluation, i, cluster, self.slack_bytes))
            small = over_bytes[i] <= 0
            bounds.append(least_times(evaluation, i, cluster, small))
            as_fast = bounds[i] <= self.limit_s
            self._seconds[1].add(bounds[i][as_fast & ~small])
            may_be_within.append(as_fast & small)
        for hopeful in _rounds(over_bytes, may_be_within, None if self.some_within else self._nearest):
            found = _figures(evaluation, hopeful, cluster, self.slack_bytes)
            for (i, cells), which, grid, columns in found:
                step_s, least_s = columns["step_s"], bounds[i][cells]
                within, asked = columns["over_bytes"] == 0, which & may_be_within[i][cells]
                fast, beyond = asked & within & (step_s <= self.limit_s), asked & ~within
                self._within.add(grid, columns, fast)
                self._seconds[0].add(step_s[fast])
                self._as_fast.add(grid, columns | {"least_s": least_s}, beyond)
                self._seconds[1].add(least_s[beyond])
                if not self.some_within:
                    self._nearest.add(grid, columns, which & ~within)
            self._limit()
            if self.some_within:
                break

    def _limit(self) -> None:
        within = self._within.rows
        self.some_within |= bool(n_rows(within))
        if n_rows(within) == self.keep:
            self.limit_s = min(self.limit_s, float(within["step_s"][-1]))
        for tally in self._seconds:
            tally.n_up_to(self.limit_s)

    def join(self, other: "Fastest") -> None:
        """As `Verdicts` says."""
        self._within.join(other._within)
        self._as_fast.join(other._as_fast)
        self._nearest.join(other._nearest)
        for own, others in zip(self._seconds, other._seconds, strict=True):
            own.join(others)
        self.n_seen += other.n_seen
        self._limit()

    def within(self) -> tuple[Rows, int]:
        """As `Verdicts` says."""
        return self._within.rows, self._seconds[0].n_up_to(self.limit_s)

    def beyond(self) -> tuple[Rows, int]:
        """As `Verdicts` says, of those that could be as fast."""
        rows, n = self._as_fast.rows, self._seconds[1].n_up_to(self.limit_s)
        if not self.some_within:
            return self._nearest.rows, n
        return taken(rows, np.flatnonzero(rows["least_s"] <= self.limit_s)[: self.keep]) if rows else {}, n


MOST_OUTSIDE_BYTES: Final = np.array(
    [outside_allocator(n).high_bytes for n in range(n_communicators(*[2] * len(MESH_AXES)) + 1)]
)
"""The most that is held beside the caching allocator's bytes, by the number of communicators."""


def room_bytes(grid: Grid, cluster: Cluster, slack_bytes: int) -> Column | None:
    """What a grid's plans may allocate and be within the budget, by cell: [cell, 1]; None: no limit."""
    budget_bytes = cluster.budget_bytes
    if budget_bytes is None:
        return None
    axes = (grid.structure[axis] if axis in grid.structure else grid.cells[axis] for axis in MESH_AXES)
    most = np.asarray(MOST_OUTSIDE_BYTES[n_communicators(*axes)])
    return (budget_bytes - slack_bytes - most)[:, None]


def _least_over_bytes(
    evaluation: "Evaluation", i: int, cluster: Cluster, slack_bytes: int
) -> NDArray[np.int64]:
    """What plans of a grid allocate at least beyond their room; those that may be within, 0 or less."""
    from memplan.search.floor import least_bytes  # only a search needs it

    room = room_bytes(evaluation.grids[i], cluster, slack_bytes)
    if room is None:
        return np.zeros(evaluation.grids[i].shape, np.int64)
    return least_bytes(evaluation, i, room) - room


Masks = Sequence[NDArray[np.bool_]]
"""Some of the plans of each of several grids."""

AT_FIRST: Final = 64
"""Plans surely beyond the budget that are worked out at first to know the nearest; then more."""


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
    evaluation: "Evaluation", chosen: Masks, cluster: Cluster, slack_bytes: int
) -> Iterator[tuple[tuple[int, Column], NDArray[np.bool_], Grid, dict[str, NDArray[Any]]]]:
    """Figures of cells with a chosen plan: which cells of which grid, which plans, these cells, by name."""
    places = [(i, np.flatnonzero(which.any(axis=1))) for i, which in enumerate(chosen)]
    places = [(i, cells) for i, cells in places if len(cells)]
    some = evaluation.some(places)
    found = evaluated(some, cluster, slack_bytes)
    for (i, cells), grid, figures in zip(places, some.grids, found, strict=True):
        yield (i, cells), chosen[i][cells], grid, _columns(grid, figures, cluster, slack_bytes)


def _columns(grid: Grid, figures: Figures, cluster: Cluster, slack_bytes: int) -> dict[str, NDArray[Any]]:
    """A grid's figures by name; `over_bytes` beyond the room of its plans (0: the plan is within)."""
    room, peak_bytes = room_bytes(grid, cluster, slack_bytes), figures.peak_bytes
    return {
        "peak_bytes": peak_bytes,
        "worst_stage": figures.worst_stage,
        "rest_bytes": figures.rest_bytes,
        "over_bytes": np.zeros((1, 1), np.int64) if room is None else np.maximum(0, peak_bytes - room),
        "minus_micro_batch": -grid.cells["micro_batch"][:, None],
        "step_s": figures.step_s,
    }


def evaluated(evaluation: "Evaluation", cluster: Cluster, slack_bytes: int = 0) -> Iterator[Figures]:
    """The figures of each grid's plans, which are plans that `check_plan` accepts.

    Only steps of cells with a plan within the budget are timed; the others take infinitely long, and so do
    plans that are beyond.
    """
    from memplan.search.memory import held  # only a search needs them
    from memplan.search.time import times

    for i, grid in enumerate(evaluation.grids):
        memory = held(evaluation, i)
        room = room_bytes(grid, cluster, slack_bytes)
        within = np.broadcast_to(room is None or memory.peak_bytes <= room, grid.shape)
        seconds = np.full(grid.shape, inf)
        cells = np.flatnonzero(within.any(axis=1))
        if len(cells):
            seconds[cells] = np.where(within[cells], times(evaluation, i, cluster, cells), inf)
        yield Figures(
            peak_bytes=memory.peak_bytes,
            worst_stage=memory.worst_stage,
            rest_bytes=memory.rest_bytes,
            step_s=seconds,
        )
