"""A pool of plans ordered by a few keys, the smallest first, that holds a limited number of them."""

from collections.abc import Iterator, Sequence
from math import inf
from typing import Any, Final, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from memplan.plan import Plan
from memplan.search.plans import Column, Grid, Plans

SIMPLER: Final = (
    "offload",
    "recompute",
    "recompute_blocks",
    "zero",
    "sequence_parallel",
    "pp",
    "tp",
    "dp_replicate",
    "virtual_stages",
    "schedule",
    "micro_batch",
)
"""Of two equally good plans the one with the smaller value is the simpler; the first difference decides."""

Keys = Sequence[NDArray[Any]]
"""Arrays of a grid's shape, or that can be broadcast to it: the first decides, of equal ones the next."""


class Entry(NamedTuple):
    """A plan of a pool, alone: its keys, and after them what says how simple it is."""

    keys: tuple[float, ...]
    alone: Plans

    @property
    def plan(self) -> Plan:
        """The plan, which no rule refuses."""
        return self.alone.plan(0)

    @property
    def values(self) -> dict[str, Any]:
        """The varied fields of the plan, which a rule may refuse."""
        return self.alone.values(0)


@final
class Pool:
    """The plans with the smallest keys, about `most` of them: all whose first key is less than `cut`."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.cut = inf
        self.n_seen = 0
        self._grids: list[Grid] = []
        self._parts: list[tuple[Column, Column, NDArray[Any]]] = []
        self._n_held, self._most_held = 0, 2 * most

    def add(self, grid: Grid, keys: Keys, which: NDArray[np.bool_]) -> None:
        """Consider some plans of a grid; `which` has its shape."""
        places = np.flatnonzero(np.broadcast_to(which, grid.shape))
        self.n_seen += len(places)
        if not len(places):
            return
        columns = np.stack([np.broadcast_to(key, grid.shape).ravel()[places].astype(float) for key in keys])
        if self.cut < inf:
            near = columns[0] < self.cut
            places, columns = places[near], columns[:, near]
        self._parts.append((np.full(len(places), len(self._grids)), places, columns))
        self._grids.append(grid)
        self._n_held += len(places)
        if self._n_held > self._most_held:
            self._drop()

    def _drop(self) -> None:
        """Leaves out the plans with the largest first keys, but none that is equal to one that stays."""
        grids, places, columns = self._joined()
        first = columns[0]
        kept = first <= np.partition(first, self.most - 1)[self.most - 1]
        self.cut = min(self.cut, float(first[~kept].min(initial=inf)))
        self._parts = [(grids[kept], places[kept], columns[:, kept])]
        self._n_held = int(kept.sum())
        self._most_held = 2 * self._n_held

    def _joined(self) -> tuple[Column, Column, NDArray[Any]]:
        grids, places, columns = zip(*self._parts, strict=True)
        return np.concatenate(grids), np.concatenate(places), np.concatenate(columns, axis=1)

    def __iter__(self) -> Iterator[Entry]:
        """The plans in order, of those with equal keys the simpler first."""
        if not self._parts:
            return
        grids, places, columns = self._joined()
        simpler = np.empty((len(SIMPLER), len(places)), np.int64)
        for i in np.unique(grids).tolist():
            own = np.flatnonzero(grids == i)
            plans = self._grids[i].at(places[own])
            simpler[:, own] = [plans.columns[name] for name in SIMPLER]
        for i in np.lexsort((*simpler[::-1], *columns[::-1])).tolist():
            alone = self._grids[grids[i]].at(places[i : i + 1])
            yield Entry((*columns[:, i].tolist(), *simpler[:, i].tolist()), alone)
