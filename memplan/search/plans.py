"""Many plans of one model: a Plan, and arrays of the fields in which they differ."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from memplan.engines.base import ENGINES
from memplan.fields import Choice, Flag, Registered
from memplan.plan import FIELDS, Plan, apart

Column = NDArray[np.int64]

NO_LIMIT: Final = -1
"""Stands for None in the column of `recompute_blocks`."""

FIRST: Final = ("dp", "dp_replicate", "cp", "tp", "pp", "virtual_stages")
"""The fields that stand first in tables of plans: how the ranks are divided."""

VARIED: Final = (*FIRST, *(name for name, field in FIELDS.items() if field.varied and name not in FIRST))
"""The fields of Plan that a search varies."""


def varied(engine: str) -> tuple[str, ...]:
    """The fields that a search of an engine's plans varies: `VARIED`, and axes of other packages."""
    return (*FIRST, *ENGINES.named(engine).other_axes, *VARIED[len(FIRST) :])


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Plans that differ in the varied fields only: each of its cells with each number of recomputed blocks.

    `cells` has one array for each field that a search varies but `recompute_blocks`, all of the same length.
    A figure of all plans is an array of `shape`; a plan's place is its index in the flattened array.

    A grid's plans have `recompute`, `offload` and `sequence_parallel` in common. Either all have one
    data-parallel rank (dp x cp), or all several; either all use FSDP2 (ZeRO 2 and 3), or none does.
    """

    base: Plan
    cells: Mapping[str, Column]
    recompute_blocks: Column

    @property
    def shape(self) -> tuple[int, int]:
        """Cells, and numbers of recomputed blocks."""
        return len(self.cells["dp"]), len(self.recompute_blocks)

    def __len__(self) -> int:
        n_cells, n_blocks = self.shape
        return n_cells * n_blocks

    def __getitem__(self, chosen: "Column | NDArray[np.bool_]") -> "Grid":
        """The grid of the chosen cells."""
        return replace(self, cells={name: column[chosen] for name, column in self.cells.items()})

    def column(self, name: str, places: Column) -> Column:
        """The numbers of a varied field in the plans at these places."""
        cell, block = np.divmod(places, len(self.recompute_blocks))
        return self.recompute_blocks[block] if name == "recompute_blocks" else self.cells[name][cell]

    @classmethod
    def of(cls, plan: Plan) -> "Grid":
        """The grid of one plan."""
        numbers = {name: np.array([number_of(name, getattr(plan, name))]) for name in varied(plan.engine)}
        blocks = numbers.pop("recompute_blocks")
        return cls(base=plan, cells=numbers, recompute_blocks=blocks)

    def values(self, place: int) -> dict[str, Any]:
        """The varied fields of the plan at a place."""
        names = varied(self.base.engine)
        return {name: value_of(name, int(self.column(name, np.array(place)))) for name in names}

    def plan(self, place: int) -> Plan:
        """The plan at a place.

        Raises:
            PlanRefused: values that contradict each other.
        """
        return with_ranks(self.base, self.values(place))


def with_ranks(plan: Plan, values: Mapping[str, Any]) -> Plan:
    """A plan with other values of its fields and of other packages' axes.

    Raises:
        PlanRefused: values that contradict each other.
    """
    own, others = apart(plan, values)
    return replace(plan, **own, others=others)


def _choices(field: str) -> Sequence[Any]:
    """The values whose indices a field's column holds; empty if it holds the values themselves."""
    match FIELDS.get(field):
        case Choice() | Registered() as known:
            return known.choices
        case Flag():
            return False, True
        case _:
            return ()


def value_of(field: str, number: int) -> Any:
    """The value that a number in a field's column means.

    >>> value_of("recompute", 2), value_of("offload", 0), value_of("tp", 8)
    ('full', False, 8)
    """
    if choices := _choices(field):
        return choices[number]
    return None if field == "recompute_blocks" and number == NO_LIMIT else number


def number_of(field: str, value: Any) -> int:
    """The number that means a value in a field's column.

    >>> number_of("schedule", "1f1b"), number_of("recompute_blocks", None), number_of("zero", 3)
    (1, -1, 3)
    """
    if choices := _choices(field):
        return choices.index(value)
    return NO_LIMIT if value is None else int(value)
