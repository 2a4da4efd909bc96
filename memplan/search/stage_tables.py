"""The tables that the stages of some grids are in: what is known of them whatever order passes come in."""

from collections.abc import Hashable, Sequence
from typing import Final, NamedTuple

import numpy as np

from memplan.device import Device
from memplan.models import Model
from memplan.search.cells import Cells, Rows, Table
from memplan.search.corners import Blocks
from memplan.search.kinds import all_blocks_of, has_rule, mode_of, plan_of, ranks_of, splits
from memplan.search.plans import Column, Grid
from memplan.search.stages import Ends, with_values

LARGEST: Final = 2.0**62
"""Sums of bytes stay below: 64-bit integers."""


class _Group(NamedTuple):
    """Grids whose stages are in the same tables, and where the cells of each begin."""

    cells: Cells
    starts: dict[int, int]


class StageTables:
    """Grids of one `kind_of`, and the tables that their stages are in.

    A grid has some if it `has_rule`. `linear`: whether a few micro-batches and numbers of blocks tell all.
    """

    def __init__(self, model: Model, grids: Sequence[Grid], device: Device, *, linear: bool) -> None:
        self.model, self.grids, self.device, self.linear = model, grids, device, linear
        self.splits = any(map(splits, grids))
        """Whether backward passes of some are taken apart."""
        self.has_rule = [self._all_at_once(grid) for grid in grids]
        """Whether a grid's plans can be worked out at once: nothing asks for lists, no sum is too large."""
        self._groups: dict[tuple[bool, bool], _Group] = {}
        self._tables: dict[Hashable, Table] = {}

    def _all_at_once(self, grid: Grid) -> bool:
        """What is compared with `LARGEST` is more bytes than tensors of all micro-batches take together."""
        model, base = self.model, grid.base
        a_block = 64 * (model.d_model + model.d_ff) + 16 * model.n_heads * base.seq_len
        a_token = (model.n_layers + 2) * a_block + 64 * model.vocab_size
        replicas = int((grid.cells["dp"] * grid.cells["dp_replicate"]).min())
        return has_rule(base) and base.global_batch / replicas * base.seq_len * a_token < LARGEST

    def table(self, i: int, ends: Ends, *, whole: bool) -> tuple[Table, Rows]:
        """The table of a grid's stages with such ends, and each cell's row there.

        Or the table of `whole` ranks, which no micro-batch and no recomputed block matter to.
        """
        grid = self.grids[i]
        piped = grid.structure["pp"] > 1
        if (whole, piped) not in self._groups:
            self._groups[whole, piped] = self._group(whole, piped)
        cells, starts = self._groups[whole, piped]
        key = whole, piped, ends
        if key not in self._tables:
            plan = plan_of(grid)
            self._tables[key] = Table(
                self.model,
                with_values(plan, recompute="none") if whole else plan,
                ends,
                self.device,
                cells,
                self._all_blocks(whole, piped, ends),
                linear=self.linear and grid.base.fsdp_blocks == 1 and not whole,
                least=3 if self.splits else 2,
            )
        return self._tables[key], cells.rows[starts[i] : starts[i] + grid.shape[0]]

    def _group(self, whole: bool, piped: bool) -> _Group:
        starts, n = {}, 0
        columns: list[list[Column]] = []
        for i, grid in enumerate(self.grids):
            if (grid.structure["pp"] > 1) == piped and self.has_rule[i]:
                starts[i], n = n, n + grid.shape[0]
                columns.append(self._cells(grid, whole=whole))
        joined = [np.concatenate(found) for found in zip(*columns, strict=True)]
        return _Group(Cells(*joined, linear=self.linear), starts)

    def _cells(self, grid: Grid, *, whole: bool) -> list[Column]:
        tp, micro_batch, dp, replicas = (
            grid.cells[name] for name in ("tp", "micro_batch", "dp", "dp_replicate")
        )
        one = np.ones_like(tp)
        if mode_of(grid) < 2:
            dp = replicas = one
        return [tp, one if whole else micro_batch, dp, np.minimum(replicas, 2)]

    def _all_blocks(self, whole: bool, piped: bool, ends: Ends) -> set[Blocks]:
        """All numbers of blocks of stages, or ranks, with such ends."""
        found = set()
        for i, grid in enumerate(self.grids):
            if (grid.structure["pp"] > 1) != piped or not self.has_rule[i]:
                continue
            for rank in ranks_of(self.model, grid):
                if whole:
                    own, n = rank.whole
                    if own == ends:
                        found.add((0, n))
                    continue
                numbers = {n for own, n in rank.stages if own == ends}
                found |= {pair for n in numbers for pair in all_blocks_of(grid, n)}
        return found
