"""The memory of many plans at once, by the very code that estimates one: `Many` stand where numbers did.

Three levels, each worked out for what differs on it and no more. What a *stage* allocates and frees in a
pass (`memplan.search.stages`) depends on its share of a tensor and of the batch, on the data axis and on its
blocks. In which order a *rank* runs its passes (`memplan.search.ranks`) depends on the schedule. A *plan*
puts both together: the largest of a few sums, each linear in the number of recomputed blocks.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import groupby, pairwise
from typing import Any, Final, NamedTuple, TypeVar, final

import numpy as np
from numpy.typing import NDArray

from memplan.engines.torch import RankStages, Stage, passes_of
from memplan.engines.torch.stage import mesh_bytes
from memplan.engines.torch.step import kept_grads, updates
from memplan.estimate import estimate_on
from memplan.many import many
from memplan.models import Model
from memplan.plan import RECOMPUTES, SPLITTING_SCHEDULES, Plan, Rank
from memplan.search.plans import NO_LIMIT, Column, Grid, Plans, grids_of
from memplan.search.ranks import RECEIVED, Pass, Place, Program, Reduced, programs, reduced
from memplan.search.stages import (
    Asked,
    Basis,
    Blocks,
    Cells,
    Ends,
    NotLinear,
    Part,
    Table,
    at_blocks,
    optimizer_sees,
    undominated,
    with_values,
)
from memplan.shapes import UINT8, Buffer
from memplan.tape import Device
from memplan.timeline import chain, n_bytes_of

T = TypeVar("T")

EXACT: Final = 2.0**53
"""Up to here every whole number is a float."""


LARGEST: Final = 2.0**62
"""Sums of bytes stay below: 64-bit integers."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What each of many plans asks of a GPU.

    Bytes at the worst instant of its worst stage, which stage that is (the first of those that hold most),
    and bytes that this stage holds between steps.
    """

    peak_bytes: NDArray[np.int64]
    worst_stage: NDArray[np.int64]
    rest_bytes: NDArray[np.int64]


def memory(model: Model, plans: Plans, device: Device) -> Memory:
    """The memory of each plan; they are plans that `check_plan` accepts."""
    peak, worst, rest = np.zeros((3, len(plans)), np.int64)
    for some in alike(grids_of(plans)):
        evaluation = Evaluation(model, [grid for grid, _ in some], device)
        for i, (_, places) in enumerate(some):
            found = evaluation.memory(i)
            peak[places], worst[places], rest[places] = (
                found.peak_bytes[:, 0],
                found.worst_stage[:, 0],
                found.rest_bytes[:, 0],
            )
    return Memory(peak_bytes=peak, worst_stage=worst, rest_bytes=rest)


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


class Evaluation:
    """Grids of one `kind_of`, and all that is known of their stages."""

    def __init__(self, model: Model, grids: Sequence[Grid], device: Device) -> None:
        self.model, self.grids, self.device = model, grids, device
        self.linear = all(grid.base.fsdp_blocks == 1 for grid in grids)
        self.splits = any(map(splits, grids))
        self._groups: dict[Hashable, _Group] = {}
        self._micro_batches: dict[int, tuple[tuple[int, ...], Column]] = {}
        self._start()

    def _start(self) -> None:
        self._tables: dict[Hashable, Table] = {}
        self._joined: dict[Table, Joined] = {}

    def memory(self, i: int) -> Memory:
        """The memory of one of the grids; arrays of its shape."""
        grid = self.grids[i]
        if not self.has_rule(grid):
            return self._one_by_one(grid)
        return self.worked_out(lambda: self._memory(i))

    def worked_out(self, work: Callable[[], T]) -> T:
        """What some work on the tables says; if not linear, with every number of blocks on its own."""
        try:
            return work()
        except NotLinear:
            self.linear = False
            self._start()
            return work()

    def has_rule(self, grid: Grid) -> bool:
        """Whether many plans can be worked out at once: nothing asks for lists, and no sum is too large.

        What is compared with `LARGEST` is more bytes than tensors of all micro-batches take together.
        """
        model, base = self.model, grid.base
        a_block = 64 * (model.d_model + model.d_ff) + 16 * model.n_heads * base.seq_len
        a_token = (model.n_layers + 2) * a_block + 64 * model.vocab_size
        replicas = int((grid.cells["dp"] * grid.cells["dp_replicate"]).min())
        return has_rule(base) and base.global_batch / replicas * base.seq_len * a_token < LARGEST

    def _one_by_one(self, grid: Grid) -> Memory:
        peak, worst, rest = np.zeros((3, *grid.shape), np.int64)
        for cell, block in np.ndindex(grid.shape):
            plan = grid.plans(np.array([cell]), np.array([block])).plan(0)
            found = estimate_on(self.model, plan, self.device).worst
            peak[cell, block], worst[cell, block] = found.peak_bytes, found.stage
            rest[cell, block] = found.rest_bytes
        return Memory(peak_bytes=peak, worst_stage=worst, rest_bytes=rest)

    def _memory(self, i: int) -> Memory:
        grid = self.grids[i]
        peak = np.full(grid.shape, -1)
        worst, rest = np.zeros(grid.shape, np.int64), np.zeros(grid.shape, np.int64)
        for rank in self.worst_ranks(grid):
            own_rest, high = RankMemory(self, i, rank).found()
            total = own_rest[:, None] + high
            more = total > peak
            if more.any():
                np.copyto(peak, total, where=more)
                np.copyto(rest, own_rest[:, None], where=more)
                worst[more] = rank.pp
        return Memory(peak_bytes=peak, worst_stage=worst, rest_bytes=rest)

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

    def micro_batches(self, i: int) -> tuple[tuple[int, ...], Column]:
        """The numbers of micro-batches that there are in a grid, and which of them each cell has."""
        if i not in self._micro_batches:
            found, place = np.unique(self.grids[i].n_micro_batches, return_inverse=True)
            self._micro_batches[i] = tuple(found.tolist()), place.ravel()
        return self._micro_batches[i]

    # Tables

    def blocks(self, grid: Grid, n: int, limit: int) -> Blocks:
        """How many of a stage's blocks are recomputed, and how many not."""
        if RECOMPUTES[grid.structure["recompute"]] == "none":
            return 0, n
        return (n, 0) if limit == NO_LIMIT or limit >= n else (limit, n - limit)

    def plan(self, grid: Grid) -> Plan:
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

    def stage_table(self, i: int, ends: Ends) -> tuple[Table, Column]:
        """The table of stages with such ends, and each cell's row there."""
        return self._table(i, ends, whole=False)

    def rank_table(self, i: int, ends: Ends) -> tuple[Table, Column]:
        """The table of whole ranks, which no micro-batch and no recomputed block matter to."""
        return self._table(i, ends, whole=True)

    def _table(self, i: int, ends: Ends, *, whole: bool) -> tuple[Table, Column]:
        grid = self.grids[i]
        key = whole, grid.structure["pp"] > 1
        if key not in self._groups:
            self._groups[key] = self._group(*key)
        cells, starts = self._groups[key]
        if (key, ends) not in self._tables:
            plan = self.plan(grid)
            self._tables[key, ends] = Table(
                self.model,
                with_values(plan, recompute="none") if whole else plan,
                ends,
                self.device,
                cells,
                self._all_blocks(*key, ends),
                linear=self.linear and not whole,
                least=3 if self.splits else 2,
            )
        start = starts[i]
        return self._tables[key, ends], cells.row[start : start + grid.shape[0]]

    def _group(self, whole: bool, piped: bool) -> _Group:
        starts, n = {}, 0
        columns: list[list[Column]] = []
        for i, grid in enumerate(self.grids):
            if (grid.structure["pp"] > 1) == piped:
                starts[i], n = n, n + grid.shape[0]
                columns.append(self._cells(grid, whole=whole))
        return _Group(Cells(*[np.concatenate(found) for found in zip(*columns, strict=True)]), starts)

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
        for grid in self.grids:
            if (grid.structure["pp"] > 1) != piped:
                continue
            for rank in self.ranks(grid):
                if whole:
                    own, n = rank.whole
                    if own == ends:
                        found.add((0, n))
                    continue
                numbers = {n for own, n in rank.stages if own == ends}
                limits = grid.recompute_blocks.tolist()
                found |= {self.blocks(grid, n, limit) for n in numbers for limit in limits}
        return found

    def joined(self, i: int, ends: Ends, passes: Sequence[Pass]) -> "Joined":
        """Numbers that tell what these passes of stages with such ends leave, and the most that they hold."""
        table, _ = self.stage_table(i, ends)
        known = self._joined.get(table)
        keys = tuple([found[1:] for found in passes])
        if known is not None and known.places.keys() >= set(keys):
            return known
        basis, before = (Basis(table), ()) if known is None else (known.basis, tuple(known.places))
        keys = tuple(dict.fromkeys((*before, *keys)))
        relations, highs = [], []
        for key in keys:
            names, coefficients = table(key, partial(_asked, *key))
            relations.append(basis.relation(key, coefficients[names.index("net")]))
            highs.append([row for row, name in zip(coefficients, names, strict=True) if name != "net"])
        n = len(basis.numbers)
        numbers = np.stack([*basis.numbers, *[row for own in highs for row in own]])
        if float(np.abs(numbers).max()) < EXACT:
            numbers = numbers.astype(np.float64)
        ends_of_highs = np.cumsum([0, *map(len, highs)]).tolist()
        self._joined[table] = Joined(
            basis,
            {key: place for place, key in enumerate(keys)},
            numbers,
            np.array([(*found, *[0] * (n - len(found))) for found in relations], np.int64),
            np.array(basis.positive, np.bool_),
            [tuple(range(start, stop)) for start, stop in pairwise(ends_of_highs)],
        )
        return self._joined[table]

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
        names, coefficients = table(asked, asked)
        return dict(zip(names, at_blocks(table, coefficients, rows, [(0, n)])[..., 0], strict=True))

    def dealt(self, i: int, rank: RankPlaces) -> NDArray[np.int64]:
        """What `dealt` says of a rank in each cell."""
        grid = self.grids[i]
        ends, n = rank.whole
        pairs, place = np.unique(np.stack([grid.cells["tp"], grid.cells["dp"]]), axis=1, return_inverse=True)
        plan = with_values(self.plan(grid), zero=1, recompute="none")
        found = [
            dealt(self.model, with_values(plan, tp=int(tp), dp=int(dp)), (*ends, n), self.device)
            for tp, dp in pairs.T
        ]
        return np.array(found, np.int64)[place.ravel()].T


def block_diagonal(blocks: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """The blocks along the diagonal, zeros elsewhere.

    >>> block_diagonal([np.array([[1, 2]]), np.array([[3], [4]])]).tolist()
    [[1, 2, 0], [0, 0, 3], [0, 0, 4]]
    """
    found = np.zeros(np.sum([block.shape for block in blocks], axis=0), np.int64)
    row = column = 0
    for block in blocks:
        n_rows, n_columns = block.shape
        found[row : row + n_rows, column : column + n_columns] = block
        row, column = row + n_rows, column + n_columns
    return found


def _asked(name: str, how: tuple[tuple[str, bool], ...], part: Part) -> Mapping[str, Any]:
    return {"net": part.boundary()["bytes"]} if name == RECEIVED else part.stretch(name, dict(how))


class Joined(NamedTuple):
    """Coefficients of a table's numbers: a basis of what passes leave, then candidates for what they hold.

    By method and arguments the `places` of passes: in `relations` [pass, basis], what with `positive`
    `memplan.search.ranks.reduced` asks for, and in `highs`, each pass's candidates among all.
    """

    basis: Basis
    places: dict[tuple[Any, ...], int]
    numbers: NDArray[Any]
    relations: NDArray[np.int64]
    positive: NDArray[np.bool_]
    highs: list[tuple[int, ...]]


class _Reach(NamedTuple):
    """Numbers of recomputed blocks, by their places in a grid, between which all is linear: known at `ends`.

    The ends are the first and the last; where that is no use, all of them.
    """

    places: tuple[int, ...]
    ends: tuple[int, ...]


class RankMemory:
    """One rank of a grid's plans: what it holds between steps, and the most that a step adds."""

    def __init__(self, evaluation: Evaluation, i: int, rank: RankPlaces) -> None:
        self.evaluation, self.i, self.rank = evaluation, i, rank
        self.grid = grid = evaluation.grids[i]
        self.limits = grid.recompute_blocks.tolist()
        self.mode = mode_of(grid)
        self.m = grid.n_micro_batches
        self.ms, self.m_place = evaluation.micro_batches(i)
        self.reaches = list(self._reaches())
        self.known = [place for reach in self.reaches for place in reach.ends]

    def _reaches(self) -> Iterator[_Reach]:
        """The numbers of recomputed blocks, those together between which all stages are linear."""
        tables = [(self.evaluation.stage_table(self.i, ends)[0], n) for ends, n in self.rank.distinct]

        def spans(place: int) -> tuple[Any, ...]:
            found = []
            for table, n in tables:
                pair = self.evaluation.blocks(self.grid, n, self.limits[place])
                span = table.span_of[pair]
                found.append((span, pair if len(table.spans[span].corners) == 1 else None))
            return tuple(found)

        def in_order(place: int) -> tuple[bool, int]:
            return self.limits[place] == NO_LIMIT, self.limits[place]

        for _, found in groupby(sorted(range(len(self.limits)), key=in_order), spans):
            places = tuple(found)
            yield _Reach(places, places if len(places) < 3 else (places[0], places[-1]))

    def found(self) -> tuple[Column, NDArray[np.int64]]:
        """Bytes at rest of each cell; the most that a step adds, of the grid's shape."""
        held = self.evaluation.held(self.i, self.rank)
        rest = held.states + self._inputs()
        found = programs(self._plan(), self.rank.pp, self._places(), self.evaluation.device, self.ms)
        values = _Values(self, [program for _, program in found])
        high = np.zeros(self.grid.shape, np.int64)
        alike: dict[Hashable, tuple[Reduced, list[Column], list[Column]]] = {}
        program_of = np.zeros(len(self.ms), np.int64)
        for i, (at, _) in enumerate(found):
            program_of[at] = i
        programmed = program_of[self.m_place]
        for i, (_, program) in enumerate(found):
            cells = np.flatnonzero(programmed == i)
            units = (self.m[cells] - program.m) // program.unit
            rest[cells] += self._left(program, cells, units)
            worst = values.reduced(program)
            _, all_cells, all_units = alike.setdefault(worst.key, (worst, [], []))
            all_cells.append(cells)
            all_units.append(units)
        for worst, all_cells, all_units in alike.values():
            cells = np.concatenate(all_cells)
            high[cells] = self._between(values.most(worst, cells, np.concatenate(all_units), held))
        return rest, high

    def _left(self, program: Program, cells: Column, units: Column) -> Column:
        """What a schedule leaves in some cells until the next step."""
        found = np.zeros(len(cells), np.int64)
        for (ends, _), n, each in zip(self.rank.distinct, program.left, program.left_each, strict=True):
            if n or each:
                found += (int(n) + int(each) * units) * self.boundary(ends)[cells]
        return found

    def _plan(self) -> Plan:
        """What the order of passes depends on."""
        structure = self.grid.structure
        return with_values(
            self.grid.base,
            dp=2 if self.mode else 1,
            dp_replicate=1,
            tp=1,
            zero=self.mode if self.mode >= 2 else 0,
            pp=structure["pp"],
            virtual_stages=structure["virtual_stages"],
            schedule=self.grid.schedule,
            sequence_parallel=False,
            recompute="none",
            recompute_blocks=None,
            offload=False,
            seq_len=1,
            global_batch=0,
        )

    def _places(self) -> list[Place]:
        again = RECOMPUTES[self.grid.structure["recompute"]] != "none"
        places = []
        for found in self.rank.stages:
            ends, _ = found
            table, _ = self.evaluation.stage_table(self.i, ends)
            reduces = bool(table("reduces", _reduces)[1].any())
            widens = bool(table("widens", _widens)[1].any())
            defers = widens and splits(self.grid) and again and not ends[0]
            places.append(Place(self.rank.distinct.index(found), ends, reduces, widens, defers))
        return places

    def boundary(self, ends: Ends) -> Column:
        """Bytes of what is sent to or from a stage."""
        table, rows = self.evaluation.stage_table(self.i, ends)
        _, boundary = table("boundary", Part.boundary)
        found: Column = boundary[0, 0, rows, 0]
        return found

    def _between(self, found: NDArray[Any]) -> NDArray[np.int64]:
        """The largest of candidates [candidate, cell, known number of recomputed blocks], for all numbers."""
        high = np.empty((found.shape[1], len(self.limits)), np.int64)
        start = 0
        for places, ends in self.reaches:
            own = found[:, :, start : start + len(ends)]
            start += len(ends)
            if len(places) == len(ends):
                high[:, list(places)] = own.max(axis=0)
                continue
            own = own[undominated(own.reshape(len(own), -1))]
            limits = [self.limits[place] for place in places]
            each = (own[:, :, 1] - own[:, :, 0]) / (limits[-1] - limits[0])
            after = np.array(limits, each.dtype) - limits[0]
            most = own[0, :, 0, None] + each[0, :, None] * after
            for low, slope in zip(own[1:, :, 0], each[1:], strict=True):
                np.maximum(most, low[:, None] + slope[:, None] * after, out=most)
            high[:, list(places)] = most
        return high

    def _inputs(self) -> Column:
        """What goes into a step, and the ranks' numbers on the mesh."""
        grid, cells, evaluation = self.grid, self.grid.cells, self.evaluation
        micro_batch, dp = many(cells["micro_batch"]), 2 if self.mode else 1
        plan = with_values(self._plan(), micro_batch=micro_batch, seq_len=grid.base.seq_len)
        plan = with_values(plan, global_batch=many(self.m) * (dp * micro_batch))
        made = {}
        for ends in dict.fromkeys(ends for ends, _ in self.rank.stages):
            buffer = Buffer(RECEIVED, (), UINT8, many(self.boundary(ends)), "activations")
            made[ends] = Stage(evaluation.model, plan, (*ends, 0), evaluation.device), (buffer, buffer)
        stages, received = zip(*[made[ends] for ends, _ in self.rank.stages], strict=True)
        rank = RankStages.of(*stages, rank=Rank(pp=self.rank.pp))
        rank.received = list(received)
        world = grid.structure["pp"] * cells["dp_replicate"] * cells["dp"] * cells["tp"]
        found = n_bytes_of(rank.inputs) + mesh_bytes(many(world), evaluation.device)
        return np.asarray(found)


class _Values:
    """The numbers of a rank's passes in all cells of a grid, for the known numbers of recomputed blocks.

    A basis of what the passes leave, of all places one after the other, and candidates for what they hold.
    """

    def __init__(self, memory: RankMemory, found: Sequence[Program]) -> None:
        evaluation, i = memory.evaluation, memory.i
        passes = list(dict.fromkeys(one for program in found for one in program.passes))
        known = [memory.limits[place] for place in memory.known]
        self.place: dict[Pass, int] = {}
        self.highs: list[tuple[int, ...]] = []
        joined, basis, highs, n_highs = [], [], [], 0
        for place, (ends, n) in enumerate(memory.rank.distinct):
            own = [one for one in passes if one.place == place]
            numbers = evaluation.joined(i, ends, own)
            table, rows = evaluation.stage_table(i, ends)
            blocks = [evaluation.blocks(memory.grid, n, limit) for limit in known]
            values = at_blocks(table, numbers.numbers, rows, blocks)
            self.place |= {one: len(self.highs) + numbers.places[one[1:]] for one in own}
            self.highs += [tuple([n_highs + high for high in own_highs]) for own_highs in numbers.highs]
            n_basis = len(numbers.positive)
            basis.append(values[:n_basis])
            highs.append(values[n_basis:])
            n_highs += len(highs[-1])
            joined.append(numbers)
        self.relations = block_diagonal([numbers.relations for numbers in joined])
        self.positive = np.concatenate([numbers.positive for numbers in joined])
        self.basis, self.high = np.concatenate(basis), np.concatenate(highs)

    def reduced(self, program: Program) -> Reduced:
        """The instants of a program that may be the worst, in terms of the basis."""
        places = np.array([self.place[one] for one in program.passes])
        return reduced(program, places, self.relations[places], self.positive)

    def most(self, worst: Reduced, cells: Column, units: Column, held: "Held") -> NDArray[Any]:
        """Candidates for what a step holds [candidate, cell, known number of recomputed blocks]."""
        net, high = self.basis[:, cells], self.high[:, cells]
        before = _before(worst, net, units)
        pairs = [(i, row) for i, at in enumerate(worst.at[:-1].tolist()) for row in self.highs[at]]
        by, most = np.array(pairs, np.int64).T
        end = before[-1:] + held.high[cells].astype(before.dtype)[:, None]
        return np.concatenate((before[by] + high[most], end))


def _before(worst: Reduced, net: NDArray[Any], units: Column) -> NDArray[Any]:
    """What is alive at each instant [instant, cell, known number of recomputed blocks]."""
    flat = net.reshape(len(net), -1)
    counts = np.abs(worst.before) + np.abs(worst.before_each) * units.max()
    if float(counts.sum(axis=1).max()) * float(np.abs(flat).max(initial=0)) >= EXACT:
        flat = flat.astype(np.int64)
    found: NDArray[Any] = (worst.before.astype(flat.dtype) @ flat).reshape(-1, *net.shape[1:])
    if worst.before_each.any():
        each = (worst.before_each.astype(flat.dtype) @ flat).reshape(-1, *net.shape[1:])
        found = found + each * units[:, None]
    return found


def _reduces(part: Part) -> dict[str, int]:
    return {"yes": int(part.passes.reduces)}


def _widens(part: Part) -> dict[str, int]:
    return {"yes": int(part.passes.widens)}
