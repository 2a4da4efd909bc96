"""Records as data frames: one row per case, one row per value of an axis."""

from collections.abc import Iterable
from statistics import median
from typing import Any, Final

import pandas as pd

from memplan.engines.options import plan_fields
from memplan.text_tables import csv_of
from validate.records import Record
from validate.where import record_facts

_SIZES: Final = ("global_batch", "seq_len", "engine")
"""Fields of a plan that are sizes of the training rather than ways of dividing it."""

AXES: Final = (
    "pp",
    "dp_replicate",
    "dp",
    "tp",
    "world_size",
    *(name for name in plan_fields() if name not in ("pp", "dp_replicate", "dp", "tp", *_SIZES)),
    "n_micro_batches",
    "model",
    "family",
    "tied_head",
    "dropout",
    "device",
    "backend",
)
"""What cases are grouped and filtered by."""

MOST_VALUES: Final = 24
"""An axis of more values than that groups nothing."""


def frame(records: Iterable[Record]) -> pd.DataFrame:
    """One row per case: its model's and plan's fields, its outcome and errors; units are in the names."""
    return pd.DataFrame([_row(record) for record in records], dtype=object)


def _row(record: Record) -> dict[str, Any]:
    facts: dict[str, Any] = record_facts(record)
    first = {name: facts.pop(name) for name in ("case", "outcome", "confirmed")}
    return (
        first
        | {name: value for name, value in facts.items() if name != "reason"}
        | {"reason": record.headline}
    )


def axes_of(table: pd.DataFrame) -> dict[str, list[Any]]:
    """The axes along which the cases differ, and the values of each in order."""
    found = {}
    for axis in AXES:
        values = set(table[axis]) if axis in table else set()
        if 1 < len(values) <= MOST_VALUES:
            found[axis] = sorted(values, key=_rank)
    return found


def rows_of(table: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a table as plain values."""
    return [dict(zip(table.columns, row, strict=True)) for row in table.itertuples(index=False, name=None)]


def _rank(value: Any) -> tuple[int, Any]:
    """Numbers by size, everything else by its text; None first."""
    if value is None:
        return 0, 0
    return (1, value) if isinstance(value, int | float) else (2, str(value))


BY_AXIS: Final = ("axis", "value", "cases", "ran", "median_peak_error", "worst_peak_error", "exact")


def by_axis(table: pd.DataFrame) -> pd.DataFrame:
    """One row per axis and value: cases, how many ran, median and worst peak error, how many are exact.

    `exact` are those that ran with every state's byte and every collective as predicted; `worst_peak_error`
    keeps its sign.
    """
    rows = []
    for axis, values in axes_of(table).items():
        for value in values:
            some = table[[known == value for known in table[axis]]]
            ran = some[some["peak_error"].notna()]
            errors = list(ran["peak_error"])
            rows.append(
                {
                    "axis": axis,
                    "value": value,
                    "cases": len(some),
                    "ran": len(ran),
                    "median_peak_error": median(map(abs, errors)) if errors else None,
                    "worst_peak_error": max(errors, key=abs, default=None),
                    "exact": int(((ran["states_off_bytes"] == 0) & (ran["collectives_off"] == 0)).sum()),
                }
            )
    return pd.DataFrame(rows, columns=BY_AXIS, dtype=object)


CSV_START: Final = b"case,outcome,confirmed"
"""How a file of `csv_text` begins."""


def csv_text(table: pd.DataFrame) -> str:
    """A table as CSV."""
    return csv_of(rows_of(table), [str(column) for column in table.columns])
