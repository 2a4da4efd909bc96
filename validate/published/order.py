"""Whether predicted and published seconds are in one order."""

from collections.abc import Sequence

import numpy as np


def order_text(pairs: Sequence[tuple[float | None, float | None]]) -> str:
    """The rank correlation as a cell of a table; empty for fewer than three rows."""
    found = rank_correlation(pairs)
    return "" if found is None else f"{found:.2f}"


def rank_correlation(pairs: Sequence[tuple[float | None, float | None]]) -> float | None:
    """The rank correlation of predicted and published seconds; None for fewer than three rows."""
    if len(pairs) < 3:
        return None
    ranks = np.argsort(np.argsort(np.array(pairs, np.float64), axis=0), axis=0)
    return float(np.corrcoef(ranks[:, 0], ranks[:, 1])[0, 1])
