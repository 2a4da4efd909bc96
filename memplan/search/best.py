"""The best rows of millions, of which only so many are ever held."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from memplan.search.plans import Grid

Rows = Mapping[str, NDArray[Any]]
"""Columns of equal length."""

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


Figures = Mapping[str, NDArray[Any]]
"""Of a grid's plans: arrays that can be broadcast to its shape."""


@final
@dataclass(frozen=True, slots=True)
class Places:
    """Some places on a grid of a shape, counted cell by cell, and the figures of the grid."""

    figures: Figures
    shape: tuple[int, int]
    places: NDArray[np.intp]

    @property
    def cells(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Of each place the cell, and which number of recomputed blocks."""
        cell, block = np.divmod(self.places, self.shape[1])
        return cell, block

    def __getitem__(self, name: str) -> NDArray[Any]:
        figure = self.figures[name]
        if figure.shape == self.shape:
            return figure.ravel()[self.places]
        return np.broadcast_to(figure, self.shape)[self.cells]

    def taken(self, chosen: NDArray[Any]) -> "Places":
        """Some of them, by mask or by place among them."""
        return Places(self.figures, self.shape, self.places[chosen])


AT_ONCE: Final = 1000
"""Fewer rows than these wait until it is chosen among them."""


@final
class Kept:
    """The rows that are worth keeping of all `n_seen`: those `chosen` of the ones kept so far and the new.

    `hopeful` are those of some plans, by the figures of each, that may be among them beside the rows kept.
    """

    def __init__(
        self,
        chosen: Callable[[Rows], dict[str, NDArray[Any]]],
        hopeful: Callable[[Rows, "Places"], "Places"],
    ) -> None:
        self.chosen, self.hopeful = chosen, hopeful
        self.n_seen = 0
        self._rows: dict[str, NDArray[Any]] = {}
        self._waiting: list[Rows] = []
        self._n_waiting = 0

    def add(self, grid: Grid, figures: Figures, which: NDArray[np.bool_]) -> None:
        """Consider some plans of a grid; `which` has its shape."""
        places = np.flatnonzero(which)
        self.n_seen += len(places)
        if not len(places):
            return
        found = self.hopeful(self._rows, Places(figures, grid.shape, places))
        if len(found.places):
            self._wait({**grid.plans(*found.cells).columns, **{name: found[name] for name in figures}})

    def join(self, rows: Rows, n_seen: int) -> None:
        """Consider what was kept elsewhere of so many plans."""
        self.n_seen += n_seen
        if n_rows(rows):
            self._wait(rows)

    def _wait(self, rows: Rows) -> None:
        self._waiting.append(rows)
        self._n_waiting += n_rows(rows)
        if self._n_waiting > max(AT_ONCE, n_rows(self._rows)):
            self._choose()

    @property
    def rows(self) -> dict[str, NDArray[Any]]:
        """Those kept."""
        self._choose()
        return self._rows

    def _choose(self) -> None:
        if self._waiting:
            several = [self._rows, *self._waiting] if self._rows else self._waiting
            self._rows = self.chosen(joined(several))
            self._waiting, self._n_waiting = [], 0


def best(keep: int | None, *keys: str) -> Kept:
    """Keeps the `keep` rows (None: all) with the smallest keys, in that order; of equal ones the simplest."""

    def chosen(rows: Rows) -> dict[str, NDArray[Any]]:
        if keep is not None:
            rows = taken(rows, smallest([rows[name] for name in keys], keep))
        return taken(rows, in_order(rows, keys)[:keep])

    def hopeful(rows: Rows, plans: Places) -> Places:
        if keep is None:
            return plans
        if n_rows(rows) >= keep:
            plans = plans.taken(plans[keys[0]] <= rows[keys[0]][keep - 1])
        if len(plans.places) > keep:
            plans = plans.taken(smallest([plans[name] for name in keys], keep))
        return plans

    return Kept(chosen, hopeful)


def front(first: str, second: str) -> Kept:
    """Keeps the rows that no other row equals or beats in both keys; of equal ones the simplest."""

    def chosen(rows: Rows) -> dict[str, NDArray[Any]]:
        rows = taken(rows, in_order(rows, (first, second)))
        least_before = np.minimum.accumulate(rows[second])[:-1]
        beats = np.concatenate(([True], rows[second][1:] < least_before))
        return taken(rows, np.flatnonzero(beats))

    def hopeful(rows: Rows, plans: Places) -> Places:
        if rows:
            least = np.concatenate(([np.inf], rows[second]))
            before = np.searchsorted(rows[first], plans[first], side="right")
            plans = plans.taken(plans[second] <= least[before])
        order = np.lexsort((plans[second], plans[first]))
        falling = plans[second][order]
        return plans.taken(order[falling <= np.minimum.accumulate(falling)])

    return Kept(chosen, hopeful)


def smallest(keys: Sequence[NDArray[Any]], keep: int) -> NDArray[np.intp]:
    """The places of the `keep` smallest, by the first key, of equal ones by the next; all that are equal.

    >>> smallest([np.array([3, 1, 2, 1, 2]), np.array([0, 0, 7, 0, 5])], 3).tolist()
    [1, 3, 4]
    """
    left = np.arange(len(keys[0]))
    found = []
    for key in keys:
        if len(left) <= keep:
            break
        some = key[left]
        limit = np.partition(some, keep - 1)[keep - 1]
        found.append(left[some < limit])
        keep -= len(found[-1])
        left = left[some == limit]
    return np.concatenate([*found, left])


def n_rows(rows: Rows) -> int:
    """How many there are."""
    return len(next(iter(rows.values()))) if rows else 0


def taken(rows: Rows, chosen: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """Some rows, by mask or by place."""
    return {name: column[chosen] for name, column in rows.items()}


def joined(several: Sequence[Rows]) -> dict[str, NDArray[Any]]:
    """The rows of all."""
    return {name: np.concatenate([rows[name] for rows in several]) for name in several[0]}


def in_order(rows: Rows, keys: Sequence[str]) -> NDArray[np.intp]:
    """The places of the rows from the smallest keys to the largest, of equal ones the simpler first."""
    return np.lexsort([rows[name] for name in reversed((*keys, *SIMPLER))])
