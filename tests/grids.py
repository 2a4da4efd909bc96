"""Grids of plans as rows."""

from memplan.search.plans import Plans, joined
from memplan.search.rules import RUNS
from memplan.search.space import MOST_CELLS, Space


def running(space: Space, most: int = MOST_CELLS) -> Plans:
    """The plans of a space that can run, of which there are some."""
    found = [ruled.grid[ruled.rule == RUNS] for batch in space.grids(most) for ruled in batch]
    return joined([grid.rows() for grid in found])
