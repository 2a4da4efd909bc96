"""Many plans of one model at once: a Plan, and arrays of the fields in which they differ."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from memplan.plan import RECOMPUTES, SCHEDULES, Plan

Column = NDArray[np.int64]

CHOICES: Final[dict[str, Sequence[Any]]] = {
    "schedule": SCHEDULES,
    "recompute": RECOMPUTES,
    "sequence_parallel": (False, True),
    "offload": (False, True),
}
"""Fields whose columns are indices into their values."""

NO_LIMIT: Final = -1
"""Stands for None in the column of `recompute_blocks`."""

VARIED: Final = (
    "dp",
    "dp_replicate",
    "tp",
    "pp",
    "virtual_stages",
    "zero",
    "sequence_parallel",
    "micro_batch",
    "recompute",
    "recompute_blocks",
    "schedule",
    "offload",
)
"""The fields of Plan that a search varies."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Plans:
    """Plans that have all but their `columns` in common: of each varied field one array, all equally long."""

    base: Plan
    columns: Mapping[str, Column]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, chosen: "slice | Column | NDArray[np.bool_]") -> "Plans":
        """Some of them."""
        columns = {name: column[chosen] for name, column in self.columns.items()}
        return Plans(base=self.base, columns=columns)

    def column(self, name: str) -> Column:
        """A varied field of each of them, which may be the same for all."""
        found = self.columns.get(name)
        if found is None:
            return np.full(len(self), number_of(name, getattr(self.base, name)))
        return np.asarray(found, np.int64)

    def values(self, i: int) -> dict[str, Any]:
        """The varied fields of one of them."""
        return {name: value_of(name, int(column[i])) for name, column in self.columns.items()}

    def plan(self, i: int) -> Plan:
        """One of them.

        Raises:
            PlanRefused: values that contradict each other.
        """
        return replace(self.base, **self.values(i))


def value_of(field: str, number: int) -> Any:
    """What a number in a field's column stands for.

    >>> value_of("recompute", 2), value_of("offload", 0), value_of("tp", 8)
    ('full', False, 8)
    """
    if field in CHOICES:
        return CHOICES[field][number]
    return None if field == "recompute_blocks" and number == NO_LIMIT else number


def number_of(field: str, value: Any) -> int:
    """The number that stands for a value in a field's column.

    >>> number_of("schedule", "1f1b"), number_of("recompute_blocks", None), number_of("zero", 3)
    (1, -1, 3)
    """
    if field in CHOICES:
        return CHOICES[field].index(value)
    return NO_LIMIT if value is None else int(value)
