"""How little memory plans can need: enough to know of most that are too large that they are."""

from functools import lru_cache
from typing import Final

import numpy as np

from memplan.engines.torch.orders import first_under_way
from memplan.plan import Schedule
from memplan.search.cells import Asked
from memplan.search.evaluate import Evaluation
from memplan.search.kinds import all_blocks_of, ranks_of
from memplan.search.plans import Column
from memplan.search.stages import Ends, Part


def least_bytes(evaluation: Evaluation, i: int, room_bytes: Column) -> Column:
    """Bytes that no plan of a grid holds less than at its worst instant; an array of its shape.

    The states of the pipeline's first rank, and what its forward passes leave until the first backward pass.
    Or, of plans that are within their room ([cell, 1]) then, what they leave once all stages have gradients,
    and these.
    """
    if not evaluation.has_rule(i):
        return np.zeros(evaluation.grids[i].shape, np.int64)
    return evaluation.worked_out(lambda: _least_bytes(evaluation, i, room_bytes))


def _least_bytes(evaluation: Evaluation, i: int, room_bytes: Column) -> Column:
    grid = evaluation.grids[i]
    rank = ranks_of(evaluation.model, grid)[0]
    ms, m_place = evaluation.micro_batches(i)
    pp, v = grid.structure["pp"], grid.structure["virtual_stages"]
    forwards, graded = _instants(grid.schedule, pp, v, ms)
    stages = [
        (stage, [local for local, found in enumerate(rank.stages) if found == stage])
        for stage in rank.distinct
    ]
    found = np.repeat(evaluation.held(i, rank).states[:, None], grid.shape[1], axis=1)
    later = found.copy()
    for stage, own in stages:
        saved = _bytes(evaluation, i, stage, Part.saved, slice(None))
        found += forwards[own].sum(axis=0)[m_place, None] * saved
        later += graded[own].sum(axis=0)[m_place, None] * saved
    small = (found <= room_bytes).any(axis=1) & (graded.min(axis=0) > NOT_YET)[m_place]
    cells = np.flatnonzero(small)
    if len(cells):
        grads = sum([len(own) * _bytes(evaluation, i, stage, Part.graded, cells) for stage, own in stages])
        found[cells] = np.maximum(found[cells], later[cells] + grads)
    return found


def _bytes(
    evaluation: Evaluation, i: int, stage: tuple[Ends, int], asked: Asked, cells: slice | Column
) -> Column:
    """The bytes that are asked of a stage in some cells of its grid: [cell, blocks]."""
    grid = evaluation.grids[i]
    ends, n = stage
    table, rows = evaluation.stage_table(i, ends)
    _, coefficients = table(asked, asked)
    at, weights = table.at(coefficients, rows[cells], all_blocks_of(grid, n))
    (found,) = at @ weights
    return np.asarray(found)


NOT_YET: Final = -1
"""Of a stage's micro-batches under way: there is no instant at which all stages have some gradients."""


@lru_cache(maxsize=4096)
def _instants(schedule: Schedule, pp: int, v: int, ms: tuple[int, ...]) -> tuple[Column, Column]:
    """`first_under_way` by number of micro-batches: [stage, number]."""
    found = [first_under_way(schedule, pp, v, m) for m in ms]
    first, graded = zip(*[(one, other or (NOT_YET,) * v) for one, other in found], strict=True)
    return np.array(first).T, np.array(graded).T
