"""The best rows of millions, of which only so many are ever held."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappush, heappushpop
from math import inf
from typing import Any, Final, Generic, Protocol, TypeVar, final

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


class Choice(Protocol):
    """Which rows are worth keeping."""

    def chosen(self, rows: Rows) -> dict[str, NDArray[Any]]:
        """Those of some rows, in order."""
        ...

    def hopeful(self, rows: Rows, plans: Places) -> Places:
        """Those of some plans, by the figures of each, that may be among them beside rows kept before."""
        ...


C = TypeVar("C", bound=Choice)


@final
class Kept(Generic[C]):
    """The rows that are worth keeping of all `n_seen`: those of the ones kept so far and the new."""

    def __init__(self, choice: C) -> None:
        self.choice = choice
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
        found = self.choice.hopeful(self._rows, Places(figures, grid.shape, places))
        if len(found.places):
            self._wait({**grid.plans(*found.cells).columns, **{name: found[name] for name in figures}})

    def join(self, other: "Kept[C]") -> None:
        """Consider what was kept elsewhere."""
        self.n_seen += other.n_seen
        if n_rows(other.rows):
            self._wait(other.rows)

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
            self._rows = self.choice.chosen(joined(several))
            self._waiting, self._n_waiting = [], 0


@final
@dataclass(frozen=True, slots=True)
class Best:
    """The `keep` rows (None: all) with the smallest keys, in that order; of equal ones the simplest."""

    keep: int | None
    keys: tuple[str, ...]

    def chosen(self, rows: Rows) -> dict[str, NDArray[Any]]:
        """As `Choice` says."""
        if self.keep is not None:
            rows = taken(rows, smallest([rows[name] for name in self.keys], self.keep))
        return taken(rows, in_order(rows, self.keys)[: self.keep])

    def hopeful(self, rows: Rows, plans: Places) -> Places:
        """As `Choice` says."""
        if self.keep is None:
            return plans
        plans = plans.taken(self.may_keep(rows, plans[self.keys[0]]))
        if len(plans.places) > self.keep:
            plans = plans.taken(smallest([plans[name] for name in self.keys], self.keep))
        return plans

    def may_keep(self, rows: Rows, least: NDArray[Any]) -> NDArray[np.bool_]:
        """Whether plans may be among them beside rows kept before, whose first key is at least so much."""
        if self.keep is None or n_rows(rows) < self.keep:
            return np.ones(least.shape, np.bool_)
        found: NDArray[np.bool_] = least <= rows[self.keys[0]][self.keep - 1]
        return found


@final
@dataclass(frozen=True, slots=True)
class Front:
    """The rows that fewer than `depth` others equal or beat in both keys; of equal ones the simplest.

    Whatever limit is put to the second key, the `depth` rows within it with the smallest first are there.
    """

    depth: int
    first: str
    second: str

    def chosen(self, rows: Rows) -> dict[str, NDArray[Any]]:
        """As `Choice` says."""
        rows = taken(rows, in_order(rows, (self.first, self.second)))
        least = np.array([*least_so_far(rows[self.second].tolist(), self.depth)])
        return taken(rows, (rows[self.second] < least) | (np.arange(len(least)) < self.depth))

    def hopeful(self, rows: Rows, plans: Places) -> Places:
        """As `Choice` says."""
        if rows:
            least = np.array([*least_so_far([*rows[self.second].tolist(), inf], self.depth)])
            before = np.searchsorted(rows[self.first], plans[self.first], side="right")
            plans = plans.taken(plans[self.second] <= least[before])
        order = np.lexsort((plans[self.second], plans[self.first]))
        second = plans[self.second][order]
        return plans.taken(order[second <= np.array([*least_so_far(second.tolist(), self.depth)])])


def least_so_far(numbers: Sequence[float], n: int) -> Iterator[float]:
    """Before each number the n-th smallest of those that have been; infinite while they are fewer.

    >>> [*least_so_far([5, 3, 4, 1], 2)]
    [inf, inf, 5, 4]
    """
    largest_first: list[float] = []
    for number in numbers:
        full = len(largest_first) == n
        yield -largest_first[0] if full else inf
        (heappushpop if full else heappush)(largest_first, -number)


@final
class Tally:
    """Counts numbers up to a limit that falls."""

    def __init__(self) -> None:
        self._numbers: list[NDArray[Any]] = []

    def add(self, numbers: NDArray[Any]) -> None:
        """Some more of them."""
        self._numbers.append(numbers)

    def join(self, other: "Tally") -> None:
        """What another has counted."""
        self._numbers += other._numbers

    def n_up_to(self, limit: float) -> int:
        """How many are at most the limit; those above it are forgotten."""
        self._numbers = [numbers[numbers <= limit] for numbers in self._numbers]
        return sum(map(len, self._numbers))


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
