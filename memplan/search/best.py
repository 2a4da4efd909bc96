"""The best rows of millions, of which only so many are ever held."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

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


@final
class Kept:
    """The rows that are worth keeping of all `n_seen`: those `chosen` of the ones kept so far and the new."""

    def __init__(self, chosen: Callable[[Rows], dict[str, NDArray[Any]]]) -> None:
        self.chosen = chosen
        self.rows: dict[str, NDArray[Any]] = {}
        self.n_seen = 0

    def add(self, rows: Rows) -> None:
        """Consider more rows."""
        n = n_rows(rows)
        self.n_seen += n
        if n:
            self.rows = self.chosen(joined(self.rows, rows))


def best(keep: int | None, *keys: str) -> Kept:
    """Keeps the `keep` rows (None: all) with the smallest keys, in that order; of equal ones the simplest."""

    def chosen(rows: Rows) -> dict[str, NDArray[Any]]:
        if keep is not None and n_rows(rows) > keep:
            first = rows[keys[0]]
            rows = taken(rows, first <= np.partition(first, keep - 1)[keep - 1])
        return taken(rows, in_order(rows, keys)[:keep])

    return Kept(chosen)


def front(first: str, second: str) -> Kept:
    """Keeps the rows that no other row equals or beats in both keys; of equal ones the simplest."""

    def chosen(rows: Rows) -> dict[str, NDArray[Any]]:
        rows = taken(rows, in_order(rows, (first, second)))
        least_before = np.minimum.accumulate(rows[second])[:-1]
        beats = np.concatenate(([True], rows[second][1:] < least_before))
        return taken(rows, np.flatnonzero(beats))

    return Kept(chosen)


def n_rows(rows: Rows) -> int:
    """How many there are."""
    return len(next(iter(rows.values()))) if rows else 0


def taken(rows: Rows, chosen: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """Some rows, by mask or by place."""
    return {name: column[chosen] for name, column in rows.items()}


def joined(a: Rows, b: Rows) -> dict[str, NDArray[Any]]:
    """The rows of both."""
    return {name: np.concatenate((a[name], column)) if a else column for name, column in b.items()}


def in_order(rows: Rows, keys: Sequence[str]) -> NDArray[np.intp]:
    """The places of the rows from the smallest keys to the largest, of equal ones the simpler first."""
    return np.lexsort([rows[name] for name in reversed((*keys, *SIMPLER))])
