"""Grids of plans as rows."""

from memplan.search.plans import Plans, joined
from memplan.search.space import MOST_CELLS, Space


def running(space: Space, most: int = MOST_CELLS) -> Plans:
    """The plans of a space that can run, of which there are some."""
    return joined([ruled.running.rows() for batch in space.grids(most) for ruled in batch])
