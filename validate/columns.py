"""Rows with equal keys (the ranks of a case) as columns, with equal values written once."""

from collections.abc import Mapping, Sequence
from typing import Any

Columns = dict[str, Any]
"""`shared`: keys with one value in all rows; `by_rank`: other keys with a list of values; `n`: rows."""


def columns(rows: Sequence[Mapping[str, Any]]) -> Columns:
    """Rows as columns; a value is written once if it is every row's.

    >>> columns([{"peak_bytes": 7, "dp": 0}, {"peak_bytes": 7, "dp": 1}])
    {'n': 2, 'shared': {'peak_bytes': 7}, 'by_rank': {'dp': [0, 1]}}
    """
    shared, by_rank = {}, {}
    for key in rows[0] if rows else ():
        values = [row[key] for row in rows]
        if all(value == values[0] for value in values):
            shared[key] = values[0]
        else:
            by_rank[key] = values
    return {"n": len(rows), "shared": shared, "by_rank": by_rank}


def rows(packed: Columns) -> list[dict[str, Any]]:
    """The rows that `columns` packed.

    >>> rows({"n": 2, "shared": {"peak_bytes": 7}, "by_rank": {"dp": [0, 1]}})
    [{'peak_bytes': 7, 'dp': 0}, {'peak_bytes': 7, 'dp': 1}]
    """
    return [
        packed["shared"] | {key: values[i] for key, values in packed["by_rank"].items()}
        for i in range(packed["n"])
    ]
