"""What is known of many plans at once, by the very code that estimates one: `Many` stand where numbers did.

Three levels, each worked out for what differs on it and no more. What a *stage* allocates and frees in a
pass (`memplan.search.stages`) depends on its share of a tensor and of the batch, on the data axis and on its
blocks; a few corners tell it (`corners`) for all cells (`cells`). In which order a *rank* runs its passes
(`ranks`) depends on the schedule. A *plan* puts both together: its memory (`memory`) is the largest of a few
sums, its time (`time`) a sum.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import zip_longest
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from memplan.engines.torch import RankStages, Stage, passes_of
from memplan.engines.torch.step import kept_grads, updates
from memplan.models import Model
from memplan.plan import RECOMPUTES, SPLITTING_SCHEDULES, Plan, Rank
from memplan.search.cells import Asked, Basis, Cells, Rows, Table, at_cells, distinct
from memplan.search.corners import Blocks, NotLinear
from memplan.search.plans import NO_LIMIT, Column, Grid
from memplan.search.ranks import RECEIVED, Place, Program, programs
from memplan.search.stages import Ends, Part, optimizer_sees, with_values
from memplan.tape import Device
from memplan.timeline import chain, n_bytes_of

T = TypeVar("T")

LARGEST: Final = 2.0**62
"""Sums of bytes stay below: 64-bit integers."""


def alike(found: Iterator[tuple[Grid, Column]]) -> list[list[tuple[Grid, Column]]]:
    """Grids that an `Evaluation` may have together."""
    groups: dict[Hashable, list[tuple[Grid, Column]]] = {}
    for grid, places in found:
        groups.setdefault(kind_of(grid), []).append((grid, places))
    return list(groups.values())


def kind_of(grid: Grid) -> Hashable:
    """What the stages of a grid are made of."""
    structure = grid.structure
    others = [structure[name] for name in ("offload", "sequence_parallel", "recompute")]
    return mode_of(grid), *others


def mode_of(grid: Grid) -> int:
    """What the data axis does: nothing, DDP, or FSDP2 for ZeRO-2 or 3."""
    zero = grid.structure["zero"]
    return zero if zero >= 2 else int(grid.cells["dp"][0] > 1)


def splits(grid: Grid) -> bool:
    """Whether backward passes are taken apart."""
    return grid.schedule in SPLITTING_SCHEDULES


def has_rule(base: Plan) -> bool:
    """Whether nothing in common asks for whole lists of numbers: of DDP's buckets, of stages' layers."""
    return base.engine == "torch" and base.ddp_comm_hook == "none" and base.layers_per_stage is None


def blocks_of(grid: Grid, n: int, limit: int) -> Blocks:
    """How many of a stage's blocks are recomputed, and how many not, if at most so many are."""
    if RECOMPUTES[grid.structure["recompute"]] == "none":
        return 0, n
    return (n, 0) if limit == NO_LIMIT or limit >= n else (limit, n - limit)


class RankPlaces(NamedTuple):
    """A rank of a pipeline: where its stages are, and the ends and number of blocks of each."""

    pp: int
    indices: tuple[int, ...]
    stages: tuple[tuple[Ends, int], ...]

    @property
    def distinct(self) -> tuple[tuple[Ends, int], ...]:
        """Its stages, alike ones once."""
        return tuple(dict.fromkeys(self.stages))

    @property
    def whole(self) -> tuple[Ends, int]:
        """All of them as one."""
        first, last = (any(ends[i] for ends, _ in self.stages) for i in (0, 1))
        return (first, last), sum(n for _, n in self.stages)


@lru_cache(maxsize=4096)
def ranks_of_pipeline(n_layers: int, schedule: str, pp: int, virtual_stages: int) -> tuple[RankPlaces, ...]:
    """The ranks of a pipeline, of equal stages as far as that is possible."""
    plan = with_values(Plan(), pp=pp, virtual_stages=virtual_stages, schedule=schedule)
    each, odd = divmod(n_layers, plan.n_stages)
    found = []
    for rank in range(pp):
        indices = plan.stages_of(rank)
        stages = tuple([((i == 0, i == plan.n_stages - 1), each + (i < odd)) for i in indices])
        found.append(RankPlaces(rank, indices, stages))
    return tuple(found)


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


class _Group(NamedTuple):
    """Grids whose stages are in the same tables, and where the cells of each begin."""

    cells: Cells
    starts: Mapping[int, int]


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
        self.linear = True
        self.splits = any(map(splits, grids))
        self._at_once = list(map(self._all_at_once, grids))
        self._start()

    def _start(self) -> None:
        self._known: dict[Hashable, Any] = {}

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
            self.linear = False
            self._start()
            return work()

    def has_rule(self, i: int) -> bool:
        """Whether a grid's plans can be worked out at once: nothing asks for lists, no sum is too large."""
        return self._at_once[i]

    def _all_at_once(self, grid: Grid) -> bool:
        """What is compared with `LARGEST` is more bytes than tensors of all micro-batches take together."""
        model, base = self.model, grid.base
        a_block = 64 * (model.d_model + model.d_ff) + 16 * model.n_heads * base.seq_len
        a_token = (model.n_layers + 2) * a_block + 64 * model.vocab_size
        replicas = int((grid.cells["dp"] * grid.cells["dp_replicate"]).min())
        return has_rule(base) and base.global_batch / replicas * base.seq_len * a_token < LARGEST

    def micro_batches(self, i: int) -> tuple[tuple[int, ...], Column]:
        """The numbers of micro-batches that there are in a grid, and which of them each cell has."""

        def work() -> tuple[tuple[int, ...], Column]:
            found, place = np.unique(self.grids[i].n_micro_batches, return_inverse=True)
            return tuple(found.tolist()), place.ravel()

        return self.known(("micro-batches", i), work)

    # Ranks

    def ranks(self, grid: Grid) -> tuple[RankPlaces, ...]:
        """The ranks of a grid's pipelines."""
        pp, virtual_stages = grid.structure["pp"], grid.structure["virtual_stages"]
        return ranks_of_pipeline(self.model.n_layers, grid.schedule, pp, virtual_stages)

    def worst_ranks(self, grid: Grid) -> Iterator[RankPlaces]:
        """Those that can be the worst: where backward passes are whole the first of ranks with equal stages.

        It warms up longest.
        """
        seen = set()
        for rank in self.ranks(grid):
            if splits(grid) or rank.stages not in seen:
                yield rank
            seen.add(rank.stages)

    def programs(self, i: int, rank: RankPlaces) -> list[tuple[Column, Program]]:
        """What a rank runs in a step: which numbers of micro-batches go with each program."""

        def work() -> list[tuple[Column, Program]]:
            plan = self.order_plan(i)
            return programs(plan, rank.pp, self._places(i, rank), self.device, self.micro_batches(i)[0])

        return self.known(("programs", i, rank.pp), work)

    def order_plan(self, i: int) -> Plan:
        """What the order of passes depends on."""
        return self.known(("order", i), lambda: self._order_plan(self.grids[i]))

    def _order_plan(self, grid: Grid) -> Plan:
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

    def _plan(self, grid: Grid) -> Plan:
        """A plan of a grid's structure: what is along no axis decides what its stages are made of."""
        mode, structure = mode_of(grid), grid.structure
        return with_values(
            grid.base,
            dp=2 if mode else 1,
            dp_replicate=1,
            pp=2 if structure["pp"] > 1 else 1,
            zero=mode if mode >= 2 else 0,
            sequence_parallel=bool(structure["sequence_parallel"]),
            recompute=RECOMPUTES[structure["recompute"]],
            recompute_blocks=None,
            schedule="1f1b",
            virtual_stages=1,
            micro_batch=1,
            offload=bool(structure["offload"]),
        )

    def stage_table(self, i: int, ends: Ends) -> tuple[Table, Rows]:
        """The table of stages with such ends, and each cell's row there."""
        return self._table(i, ends, whole=False)

    def rank_table(self, i: int, ends: Ends) -> tuple[Table, Rows]:
        """The table of whole ranks, which no micro-batch and no recomputed block matter to."""
        return self._table(i, ends, whole=True)

    def _table(self, i: int, ends: Ends, *, whole: bool) -> tuple[Table, Rows]:
        return self.known(("table and rows", i, ends, whole), lambda: self._table_and_rows(i, ends, whole))

    def _table_and_rows(self, i: int, ends: Ends, whole: bool) -> tuple[Table, Rows]:
        grid = self.grids[i]
        piped = grid.structure["pp"] > 1
        cells, starts = self.known(("group", whole, piped), lambda: self._group(whole, piped))

        def table() -> Table:
            plan = self._plan(grid)
            return Table(
                self.model,
                with_values(plan, recompute="none") if whole else plan,
                ends,
                self.device,
                cells,
                self._all_blocks(whole, piped, ends),
                linear=self.linear and grid.base.fsdp_blocks == 1 and not whole,
                least=3 if self.splits else 2,
            )

        start = starts[i]
        return (
            self.known(("table", whole, piped, ends), table),
            cells.rows[start : start + grid.shape[0]],
        )

    def _group(self, whole: bool, piped: bool) -> _Group:
        starts, n = {}, 0
        columns: list[list[Column]] = []
        for i, grid in enumerate(self.grids):
            if (grid.structure["pp"] > 1) == piped and self.has_rule(i):
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
            if (grid.structure["pp"] > 1) != piped or not self.has_rule(i):
                continue
            for rank in self.ranks(grid):
                if whole:
                    own, n = rank.whole
                    if own == ends:
                        found.add((0, n))
                    continue
                numbers = {n for own, n in rank.stages if own == ends}
                limits = grid.recompute_blocks.tolist()
                found |= {blocks_of(grid, n, limit) for n in numbers for limit in limits}
        return found

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
        plan = self.known(("dealt", i), lambda: with_values(self._plan(grid), zero=1, recompute="none"))
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
