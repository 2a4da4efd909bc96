"""Grids of plans, plan by plan."""

from typing import Any

from memplan.search.space import MOST_CELLS, Space


def running(space: Space, most: int = MOST_CELLS) -> list[dict[str, Any]]:
    """The varied fields of the plans of a space that can run."""
    grids = [ruled.running for ruled in space.grids(most)]
    return [grid.values(place) for grid in grids for place in range(len(grid))]
