"""Grids of plans, plan by plan."""

from typing import Any

from memplan.search.rules import RUNS
from memplan.search.space import MOST_CELLS, Space


def running(space: Space, most: int = MOST_CELLS) -> list[dict[str, Any]]:
    """The varied fields of the plans of a space that can run."""
    found = []
    for batch in space.grids(most):
        for ruled in batch:
            if (ruled.rule == RUNS).any():
                plans = ruled.running.all()
                found += [plans.values(i) for i in range(len(plans))]
    return found
