"""What is known of many plans at once, by the very code that estimates one: `Many` stand where numbers did.

Three levels, each worked out for what differs on it and no more. What a *stage* allocates and frees in a
pass (`memplan.search.stages`) depends on its share of a tensor and of the batch, on the data axis and on its
blocks; a few corners tell it (`corners`) for all cells (`cells`, `stage_tables`). In which order a *rank*
runs its passes (`ranks`) depends on the schedule. A *plan* puts both together: its memory (`memory`) is the
largest of a few sums, its time (`time`) a sum.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from copy import copy
from functools import lru_cache, partial
from itertools import zip_longest
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from memplan.device import Device
from memplan.engines.torch import RankStages, Stage, passes_of
from memplan.engines.torch.step import kept_grads, updates
from memplan.models import Model
from memplan.plan import RECOMPUTES, Plan, Rank
from memplan.search.cells import Asked, Basis, Rows, Table, at_cells, distinct
from memplan.search.corners import NotLinear
from memplan.search.kinds import RankPlaces, mode_of, plan_of, ranks_of, splits
from memplan.search.plans import Column, Grid
from memplan.search.ranks import RECEIVED, Place, Program, programs
from memplan.search.stage_tables import StageTables
from memplan.search.stages import Ends, Part, optimizer_sees, with_values
from memplan.timeline import chain, n_bytes_of

T = TypeVar("T")


@lru_cache(maxsize=65536)
def dealt(model: Model, plan: Plan, kind: tuple[bool, bool, int], device: Device) -> tuple[int, ...]:
    """Where ZeRO-1 deals out tensors: states of the fullest rank, the update's net and high, its moments."""
    stage = Stage(model, plan, kind, device)
    stages = RankStages.of(stage, rank=Rank()).on_fullest_rank()
    kept = kept_grads(stages, [passes_of(stage)])
    update = chain("update", *updates(stages))
    states = n_bytes_of(stages.states) + n_bytes_of(kept)
    return states, update.net_bytes, update.high_bytes, optimizer_sees(stages)[2]


class Held(NamedTuple):
    """Of a rank in each cell: bytes of states, and what the update leaves and holds."""

    states: Column
    net: Column
    high: Column


class Numbers(NamedTuple):
    """Coefficients of a table's numbers: a basis of what passes leave, then candidates for what they hold.

    By method and arguments the `places` of passes, equal ones the same: in `relations` [pass, basis], what
    with `positive` `memplan.search.ranks.reduced` asks for, and in `first`, which candidate is their first.
    Of candidates there is one for each pass, then another for the first `ranked[1]` of these, and so on.
    """

    places: Mapping[tuple[Any, ...], int]
    coefficients: NDArray[np.int64]
    relations: NDArray[np.int64]
    positive: NDArray[np.bool_]
    first: Column
    ranked: Sequence[int]


class Evaluation:
    """Grids of one `kind_of`, and all that is known of their stages and ranks."""

    def __init__(self, model: Model, grids: Sequence[Grid], device: Device) -> None:
        self.model, self.grids, self.device = model, grids, device
        self._start(linear=True)

    def _start(self, *, linear: bool) -> None:
        self._stages = StageTables(self.model, self.grids, self.device, linear=linear)
        self._where = [(i, np.arange(grid.shape[0])) for i, grid in enumerate(self.grids)]
        """Of each grid which one it is in `_stages`, and which cells of that."""
        self._known: dict[Hashable, Any] = {}

    def some(self, chosen: Sequence[tuple[int, Column]]) -> "Evaluation":
        """Some cells of some of the grids; what their stages do is still known."""
        found = copy(self)
        found.grids = [self.grids[i][cells] for i, cells in chosen]
        found._where = [(self._where[i][0], self._where[i][1][cells]) for i, cells in chosen]
        found._known = {}
        return found

    def known(self, key: Hashable, work: Callable[[], T]) -> T:
        """What some work says, done once."""
        if key not in self._known:
            self._known[key] = work()
        found: T = self._known[key]
        return found

    def worked_out(self, work: Callable[[], T]) -> T:
        """What some work says; if something is not linear, with every number on its own."""
        try:
            return work()
        except NotLinear:
            self._start(linear=False)
            return work()

    def has_rule(self, i: int) -> bool:
        """Whether a grid's plans can be worked out at once."""
        return self._stages.has_rule[self._where[i][0]]

    @property
    def splits(self) -> bool:
        """Whether backward passes of some stages are taken apart."""
        return self._stages.splits

    def micro_batches(self, i: int) -> tuple[tuple[int, ...], Column]:
        """The numbers of micro-batches that there are in a grid, and which of them each cell has."""

        def work() -> tuple[tuple[int, ...], Column]:
            found, place = np.unique(self.grids[i].n_micro_batches, return_inverse=True)
            return tuple(found.tolist()), place.ravel()

        return self.known(("micro-batches", i), work)

    # Ranks

    def worst_ranks(self, grid: Grid) -> Iterator[RankPlaces]:
        """Those that can be the worst: where backward passes are whole the first of ranks with equal stages.

        It warms up longest.
        """
        seen = set()
        for rank in ranks_of(self.model, grid):
            if splits(grid) or rank.stages not in seen:
                yield rank
            seen.add(rank.stages)

    def programs(self, i: int, rank: RankPlaces) -> list[tuple[Column, Program]]:
        """What a rank runs in a step: which numbers of micro-batches go with each program."""

        def work() -> list[tuple[Column, Program]]:
            plan = self.known(("order", i), lambda: self._order_plan(self.grids[i]))
            return programs(plan, rank.pp, self._places(i, rank), self.device, self.micro_batches(i)[0])

        return self.known(("programs", i, rank.pp), work)

    def _order_plan(self, grid: Grid) -> Plan:
        """What the order of passes depends on."""
        structure, mode = grid.structure, mode_of(grid)
        return with_values(
            grid.base,
            dp=2 if mode else 1,
            dp_replicate=1,
            tp=1,
            zero=mode if mode >= 2 else 0,
            pp=structure["pp"],
            virtual_stages=structure["virtual_stages"],
            schedule=grid.schedule,
            sequence_parallel=False,
            recompute="none",
            recompute_blocks=None,
            offload=False,
            seq_len=1,
            global_batch=0,
        )

    def _places(self, i: int, rank: RankPlaces) -> list[Place]:
        grid = self.grids[i]
        defers = splits(grid) and RECOMPUTES[grid.structure["recompute"]] != "none"
        numbers = {found: number for number, found in enumerate(rank.distinct)}
        places = []
        for found in rank.stages:
            ends, _ = found
            reduces, widens = self._does(self.stage_table(i, ends)[0])
            places.append(Place(numbers[found], ends, reduces, widens, defers and widens and not ends[0]))
        return places

    def _does(self, table: Table) -> tuple[bool, bool]:
        """Whether passes of a table's stages reduce gradients, and whether they widen them."""
        return self.known(
            ("does", table),
            lambda: (bool(table("reduces", _reduces)[1].any()), bool(table("widens", _widens)[1].any())),
        )

    def numbers(self, table: Table) -> Numbers:
        """Numbers that tell what all passes of a table's stages leave, and the most that they hold."""
        return self.known(("numbers", table), lambda: _numbers(table, self._passes()[table]))

    def _passes(self) -> dict[Table, dict[tuple[Any, ...], None]]:
        """The passes of each table's stages, in all programs of all grids."""

        def work() -> dict[Table, dict[tuple[Any, ...], None]]:
            found: dict[Table, dict[tuple[Any, ...], None]] = {}
            for i, grid in enumerate(self.grids):
                for rank in self.worst_ranks(grid) if self.has_rule(i) else ():
                    own = [found.setdefault(table, {}) for table in self.tables(i, rank)]
                    programs = self.programs(i, rank)
                    for one in dict.fromkeys(one for _, program in programs for one in program.passes):
                        own[one.place][one[1:]] = None
            return found

        return self.known("passes", work)

    # Tables

    def tables(self, i: int, rank: RankPlaces) -> tuple[Table, ...]:
        """The tables of a rank's distinct stages."""
        return tuple([self.stage_table(i, ends)[0] for ends, _ in rank.distinct])

    def stage_table(self, i: int, ends: Ends) -> tuple[Table, Rows]:
        """The table of stages with such ends, and each cell's row there."""
        return self.known(("stage", i, ends), lambda: self._table(i, ends, whole=False))

    def rank_table(self, i: int, ends: Ends) -> tuple[Table, Rows]:
        """The table of whole ranks, which no micro-batch and no recomputed block matter to."""
        return self.known(("rank", i, ends), lambda: self._table(i, ends, whole=True))

    def _table(self, i: int, ends: Ends, *, whole: bool) -> tuple[Table, Rows]:
        place, cells = self._where[i]
        table, rows = self._stages.table(place, ends, whole=whole)
        return table, rows[cells]

    # Numbers of each cell

    def boundary(self, i: int, ends: Ends) -> Column:
        """Bytes of what is sent to or from a stage."""

        def work() -> Column:
            table, rows = self.stage_table(i, ends)
            _, coefficients = table("boundary", Part.boundary)
            found: Column = at_cells(coefficients[..., :1], rows)[0, :, 0]
            return found

        return self.known(("boundary", i, ends), work)

    def held(self, i: int, rank: RankPlaces) -> Held:
        """States of a rank, and their update: a rank's stages have those of one stage with all blocks."""
        if self.grids[i].structure["zero"] == 1:
            states, net, high, _ = self.dealt(i, rank)
            return Held(states, net, high)
        update = self.of_rank(i, rank, Part.update)
        return Held(self.of_rank(i, rank, Part.states)["bytes"], update["net"], update["high"])

    def of_rank(self, i: int, rank: RankPlaces, asked: Asked) -> dict[Any, Column]:
        """What is asked of a rank's stages as one, by name: a number for each cell."""
        ends, n = rank.whole
        table, rows = self.rank_table(i, ends)

        def work() -> dict[Any, Column]:
            names, coefficients = table(asked, asked)
            of_rows = coefficients.sum(axis=1) @ table.weights([(0, n)])  # in micro-batches of 1
            return dict(zip(names, of_rows[..., 0], strict=True))

        return {name: found[rows.row] for name, found in self.known((asked, table, n), work).items()}

    def dealt(self, i: int, rank: RankPlaces) -> NDArray[np.int64]:
        """What `dealt` says of a rank in each cell."""
        grid = self.grids[i]
        plan = self.known(("dealt", i), lambda: with_values(plan_of(grid), zero=1, recompute="none"))
        pairs, place = distinct(grid.cells["tp"], grid.cells["dp"])
        ends, n = rank.whole

        def work(tp: int, dp: int) -> tuple[int, ...]:
            return dealt(self.model, with_values(plan, tp=tp, dp=dp), (*ends, n), self.device)

        found = [self.known(("dealt", plan.pp, rank.whole, pair), partial(work, *pair)) for pair in pairs]
        return np.array(found, np.int64)[place].T


def _numbers(table: Table, keys: Mapping[tuple[Any, ...], None]) -> Numbers:
    found = {key: table(key, partial(_asked, *key)) for key in keys}
    passes = {coefficients.tobytes(): (names, coefficients) for names, coefficients in found.values()}
    basis = Basis(table)
    relations: dict[bytes, tuple[int, ...]] = {}
    highs: dict[bytes, list[NDArray[np.int64]]] = {}
    for one, (names, coefficients) in passes.items():
        relations[one] = basis.relation(coefficients[names.index("net")])
        own = [row for row, name in zip(coefficients, names, strict=True) if name != "net"]
        highs[one] = own or [np.zeros_like(coefficients[0])]
    in_order = sorted(passes, key=lambda one: -len(highs[one]))
    place = {one: i for i, one in enumerate(passes)}
    ranked = list(zip_longest(*map(highs.__getitem__, in_order)))
    candidates = [row for own in ranked for row in own if row is not None]
    n = len(basis.numbers)
    return Numbers(
        {key: place[coefficients.tobytes()] for key, (_, coefficients) in found.items()},
        np.stack([*basis.numbers, *candidates]),
        np.array([(*relations[one], *[0] * (n - len(relations[one]))) for one in passes], np.int64),
        np.array(basis.positive, np.bool_),
        np.argsort([place[one] for one in in_order]),
        [sum(row is not None for row in own) for own in ranked],
    )


def _asked(name: str, how: tuple[tuple[str, bool], ...], part: Part) -> Mapping[str, Any]:
    return {"net": part.boundary()["bytes"]} if name == RECEIVED else part.stretch(name, dict(how))


def _reduces(part: Part) -> dict[str, int]:
    return {"yes": int(part.passes.reduces)}


def _widens(part: Part) -> dict[str, int]:
    return {"yes": int(part.passes.widens)}
