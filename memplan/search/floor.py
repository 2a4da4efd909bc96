"""How little memory plans can need: enough to know of most that are too large that they are."""

from collections.abc import Sequence

import numpy as np

from memplan.engines.torch.orders import plan_first_forwards
from memplan.plan import Plan
from memplan.search.cells import at_cells
from memplan.search.evaluate import Evaluation, blocks_of
from memplan.search.plans import Column
from memplan.search.ranks import of_micro_batches, taken_apart
from memplan.search.stages import Part


def least_bytes(evaluation: Evaluation, i: int) -> Column:
    """Bytes that no plan of a grid holds less than at its worst instant; an array of its shape.

    The states of the pipeline's first rank, and what its forward passes leave until the first backward pass.
    """
    if not evaluation.has_rule(i):
        return np.zeros(evaluation.grids[i].shape, np.int64)
    return evaluation.worked_out(lambda: _least_bytes(evaluation, i))


def _least_bytes(evaluation: Evaluation, i: int) -> Column:
    grid = evaluation.grids[i]
    rank = evaluation.ranks(grid)[0]
    ms, m_place = evaluation.micro_batches(i)
    forwards = evaluation.known(
        ("first forwards", i), lambda: _first_forwards(evaluation.order_plan(i), len(rank.stages), ms)
    )
    found = np.repeat(evaluation.held(i, rank).states[:, None], grid.shape[1], axis=1)
    for stage in rank.distinct:
        ends, n = stage
        table, rows = evaluation.stage_table(i, ends)
        _, coefficients = table("saved", Part.saved)
        weights = table.weights([blocks_of(grid, n, limit) for limit in grid.recompute_blocks.tolist()])
        used = np.flatnonzero(weights.any(axis=1))
        (saved,) = at_cells(coefficients[..., used], rows) @ weights[used]
        times = sum([forwards[local] for local, own in enumerate(rank.stages) if own == stage])
        found += times[m_place, None] * saved
    return found


def _first_forwards(plan: Plan, n_stages: int, ms: Sequence[int]) -> Column:
    """How many forward passes of each stage of the first rank come first, by number of micro-batches."""

    def work(some: tuple[int, ...]) -> dict[int, int]:
        return plan_first_forwards(of_micro_batches(plan, some), 0)

    found = np.zeros((n_stages, len(ms)), np.int64)
    for at, forwards in taken_apart(plan, ms, work):
        for local, n in forwards.items():
            found[local, at] = n
    return found
