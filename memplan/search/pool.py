"""A priority queue of plans that holds a limited number of them, in arrays."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import inf
from typing import Any, Final, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from memplan.search.plans import Column, Grid

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
"""The tie-breaker of equally good plans: at the first field that differs, the smaller value stands first."""

Keys = Sequence[NDArray[Any]]
"""Arrays that broadcast to a grid's shape: the first is compared first, the next where it is equal."""


class Entry(NamedTuple):
    """The plan at a place of a grid, with its keys and, after them, its tie-breaker."""

    keys: tuple[float, ...]
    grid: Grid
    place: int


@final
class Pool:
    """About `most` plans with the smallest keys: all plans whose first key is less than `cut`."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.cut = inf
        self.n_seen = 0
        self._grids: list[Grid] = []
        self._parts: list[tuple[Column, Column, NDArray[Any]]] = []
        self._n_held, self._most_held = 0, 2 * most

    def add(self, grid: Grid, keys: Keys, which: NDArray[np.bool_]) -> None:
        """Add the plans of a grid that `which`, of its shape, selects."""
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
        """Drop the plans with the largest first keys; plans with equal ones stay or go together."""
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
        """The plans in the order of their keys and tie-breakers."""
        if not self._parts:
            return
        grids, places, columns = self._joined()
        simpler = np.empty((len(SIMPLER), len(places)), np.int64)
        starts = np.flatnonzero(np.diff(grids, prepend=-1)).tolist()
        for start, stop in pairwise([*starts, len(grids)]):
            grid = self._grids[grids[start]]
            simpler[:, start:stop] = [grid.column(name, places[start:stop]) for name in SIMPLER]
        for i in np.lexsort((*simpler[::-1], *columns[::-1])).tolist():
            keys = *columns[:, i].tolist(), *simpler[:, i].tolist()
            yield Entry(keys, self._grids[grids[i]], int(places[i]))
