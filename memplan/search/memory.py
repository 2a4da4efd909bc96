"""The memory of many plans at once: the largest of a few sums of what their stages' passes leave and hold."""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby, pairwise
from typing import Any, Final, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from memplan.device import Device
from memplan.engines.torch import RankStages, Stage
from memplan.engines.torch.stage import mesh_bytes
from memplan.estimate import estimate_on
from memplan.many import many
from memplan.models import Model
from memplan.plan import Plan, Rank
from memplan.search.cells import Rows, Table, at_cells
from memplan.search.evaluate import Evaluation
from memplan.search.kinds import RankPlaces, alike, blocks_of
from memplan.search.plans import NO_LIMIT, Column, Grid, Plans, grids_of
from memplan.search.ranks import RECEIVED, Program, Reduced, reduced
from memplan.search.stages import Ends, with_values
from memplan.shapes import UINT8, Buffer
from memplan.timeline import n_bytes_of

EXACT: Final = 2.0**53
"""Up to here every whole number is a float."""

Bytes = NDArray[np.int64]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What each of many plans asks of a GPU.

    Bytes at the worst instant of its worst stage, which stage that is (the first of those that hold most),
    and bytes that this stage holds between steps.
    """

    peak_bytes: Bytes
    worst_stage: Bytes
    rest_bytes: Bytes


def memory(model: Model, plans: Plans, device: Device) -> Memory:
    """The memory of each plan; they are plans that `check_plan` accepts."""
    peak, worst, rest = np.zeros((3, len(plans)), np.int64)
    for some in alike(grids_of(plans)):
        evaluation = Evaluation(model, [grid for grid, _ in some], device)
        for i, (_, places) in enumerate(some):
            found = held(evaluation, i)
            peak[places], worst[places], rest[places] = (
                found.peak_bytes[:, 0],
                found.worst_stage[:, 0],
                found.rest_bytes[:, 0],
            )
    return Memory(peak_bytes=peak, worst_stage=worst, rest_bytes=rest)


def held(evaluation: Evaluation, i: int) -> Memory:
    """The memory of the plans of one of the grids; arrays of its shape."""
    if not evaluation.has_rule(i):
        return _one_by_one(evaluation.model, evaluation.grids[i], evaluation.device)
    return evaluation.worked_out(lambda: _held(evaluation, i))


def _one_by_one(model: Model, grid: Grid, device: Device) -> Memory:
    peak, worst, rest = np.zeros((3, *grid.shape), np.int64)
    for cell, block in np.ndindex(grid.shape):
        plan = grid.plans(np.array([cell]), np.array([block])).plan(0)
        found = estimate_on(model, plan, device).worst
        peak[cell, block], worst[cell, block] = found.peak_bytes, found.stage
        rest[cell, block] = found.rest_bytes
    return Memory(peak_bytes=peak, worst_stage=worst, rest_bytes=rest)


def _held(evaluation: Evaluation, i: int) -> Memory:
    grid = evaluation.grids[i]
    first, *others = evaluation.worst_ranks(grid)
    at_rest, high = _RankMemory(evaluation, i, first).found()
    peak = at_rest[:, None] + high
    rest, worst = np.repeat(at_rest[:, None], peak.shape[1], axis=1), np.full(peak.shape, first.pp)
    for rank in others:
        at_rest, high = _RankMemory(evaluation, i, rank).found()
        high += at_rest[:, None]
        more = high > peak
        if more.any():
            np.maximum(peak, high, out=peak)
            np.copyto(rest, at_rest[:, None], where=more)
            worst[more] = rank.pp
    return Memory(peak_bytes=peak, worst_stage=worst, rest_bytes=rest)


# Sums that are exact


def _product(a: NDArray[np.int64], b: NDArray[np.int64]) -> NDArray[Any]:
    """The product of whole numbers [..., n] and [n, m]: floats where these are exact."""
    most = max(float(a.max()), -float(a.min())) * float(np.abs(b).sum(axis=0).max())
    return a.astype(np.float64) @ b.astype(np.float64) if most < EXACT else a @ b


class _Sums:
    """Sums of how often each number of a basis [sum, number], and one other number each, by its place."""

    def __init__(self, times: NDArray[Any], other: Column) -> None:
        self.times, self.other = times.astype(np.float64), other
        self.n_most = float(np.abs(self.times).sum(axis=1).max()) + 1
        """How many numbers there are in a sum at most."""

    def largest(self, basis: NDArray[Any], others: NDArray[Any]) -> NDArray[Any]:
        """The largest of all sums of such numbers [number, column], integers or floats."""
        held = self.times.astype(basis.dtype, copy=False) @ basis
        held += others.take(self.other, axis=0)
        found: NDArray[Any] = held.max(axis=0)
        return found


def _largest_of_each(candidates: NDArray[Any], ranked: Sequence[int]) -> NDArray[Any]:
    """The largest candidate of each: there is one of each, then a second one of the first `ranked[1]`, ...

    >>> _largest_of_each(np.array([3, 5, 4, 1]), [2, 1, 1]).tolist()
    [4, 5]
    """
    first, *others = np.split(candidates, np.cumsum(ranked)[:-1])
    for more in others:
        np.maximum(first[: len(more)], more, out=first[: len(more)])
    return first


# Ranks


class _Reach(NamedTuple):
    """Numbers of recomputed blocks, by their places in a grid, between which every candidate is linear."""

    places: Sequence[int]

    @property
    def is_line(self) -> bool:
        """Whether three sums tell all: at the first, at the last, and both together."""
        return len(self.places) > 3


@final
class Coefficients:
    """Numbers of each distinct stage: [number, (at no sequence, for each in a batch), row, column]."""

    def __init__(self, stages: Sequence[NDArray[Any]]) -> None:
        self._rough = [own.astype(np.float64, copy=False) for own in stages]
        self._stages = stages
        self._most = np.max([np.abs(own).max(axis=(0, 3)) for own in self._rough], axis=0)

    @cached_property
    def _whole(self) -> list[NDArray[np.int64]]:
        return [own.astype(np.int64, copy=False) for own in self._stages]

    def bounds(self, rows: Rows) -> NDArray[np.float64]:
        """What no number of each cell is above."""
        once, each = self._most.take(rows.row, axis=1)
        return np.asarray(once + each * rows.micro_batch)

    def at(self, rows: Rows, *, exact: bool) -> list[NDArray[Any]]:
        """The numbers of cells [number, cell, column]: floats where these are exact."""
        return [at_cells(own, rows) for own in (self._rough if exact else self._whole)]


class _Blocks:
    """The numbers of recomputed blocks of a rank in a grid: what is worked out to know all."""

    def __init__(self, evaluation: Evaluation, i: int, rank: RankPlaces) -> None:
        self.grid = evaluation.grids[i]
        self.limits = self.grid.recompute_blocks.tolist()
        self.tables = [
            (table, n) for table, (_, n) in zip(evaluation.tables(i, rank), rank.distinct, strict=True)
        ]
        self.reaches = list(self._reaches())
        self.known = Coefficients(
            [
                _product(evaluation.numbers(table).coefficients, own)
                for (table, _), own in zip(self.tables, self._known(), strict=True)
            ]
        )
        columns = [[1, 1, 2] if reach.is_line else [1] * len(reach.places) for reach in self.reaches]
        self.times = np.concatenate(columns)
        """For how many places each column stands."""

    def _reaches(self) -> Iterator[_Reach]:
        def spans(place: int) -> tuple[Hashable, ...]:
            found = []
            for table, n in self.tables:
                pair = blocks_of(self.grid, n, self.limits[place])
                span = table.span_of[pair]
                found.append((span, pair if len(table.spans[span].corners) == 1 else None))
            return tuple(found)

        def in_order(place: int) -> tuple[bool, int]:
            return self.limits[place] == NO_LIMIT, self.limits[place]

        for _, found in groupby(sorted(range(len(self.limits)), key=in_order), spans):
            yield _Reach(tuple(found))

    def _known(self) -> list[NDArray[np.int64]]:
        """Of each distinct stage the weights of what is known of each reach: [weight, column]."""
        found = []
        for weights in self.weights([place for reach in self.reaches for place in reach.places]):
            columns, start = [], 0
            for reach in self.reaches:
                own = weights[:, start : start + len(reach.places)].T
                start += len(reach.places)
                columns += [own[0], own[-1], own[0] + own[-1]] if reach.is_line else [*own]
            found.append(np.stack(columns, axis=1))
        return found

    def weights(self, places: Sequence[int]) -> list[NDArray[np.int64]]:
        """Of each distinct stage how often its coefficients count at some places: [weight, place]."""
        limits = [self.limits[place] for place in places]
        return [
            table.weights([blocks_of(self.grid, n, limit) for limit in limits]) for table, n in self.tables
        ]


class _Instants:
    """The instants of a rank in terms of its distinct stages' numbers, one stage after the other.

    That is: of a basis of what all passes leave; the same times units of micro-batches; what each pass holds;
    what the update holds.
    """

    def __init__(self, evaluation: Evaluation, tables: Sequence[Table]) -> None:
        joined = [evaluation.numbers(table) for table in tables]
        self.n_basis = [len(numbers.positive) for numbers in joined]
        self.ranked = [numbers.ranked for numbers in joined]
        self.places: dict[tuple[Any, ...], int] = {}
        self.n_passes = 0
        first: list[Column] = []
        for stage, numbers in enumerate(joined):
            first.append(self.n_passes + numbers.first)
            self.places |= {(stage, *key): self.n_passes + place for key, place in numbers.places.items()}
            self.n_passes += numbers.ranked[0]
        self.first = np.append(np.concatenate(first), self.n_passes)
        """Of each place, then of the update: which of what is held is its."""
        self.relations = _block_diagonal([numbers.relations for numbers in joined])
        self.positive = np.concatenate([numbers.positive for numbers in joined])
        self._of_program: dict[int, tuple[bytes, _Sums]] = {}
        self._sums: dict[bytes, _Sums] = {}

    def sums(self, program: Program) -> tuple[bytes, _Sums]:
        """What is held at the instants of a program that may be the worst, and a key of such sums."""
        if id(program) not in self._of_program:
            places = np.array([self.places[one] for one in program.passes])
            worst = reduced(program, places, self.relations[places], self.positive)
            if worst.key not in self._sums:
                self._sums[worst.key] = self._made(worst)
            self._of_program[id(program)] = worst.key, self._sums[worst.key]
        return self._of_program[id(program)]

    def _made(self, worst: Reduced) -> _Sums:
        times = np.concatenate((worst.before, worst.before_each), axis=1)
        return _Sums(times, self.first[worst.at])


def _block_diagonal(blocks: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """The blocks along the diagonal, zeros elsewhere.

    >>> _block_diagonal([np.array([[1, 2]]), np.array([[3], [4]])]).tolist()
    [[1, 2, 0], [0, 0, 3], [0, 0, 4]]
    """
    found = np.zeros(np.sum([block.shape for block in blocks], axis=0), np.int64)
    row = column = 0
    for block in blocks:
        n_rows, n_columns = block.shape
        found[row : row + n_rows, column : column + n_columns] = block
        row, column = row + n_rows, column + n_columns
    return found


class _RankMemory:
    """One rank of a grid's plans: what it holds between steps, and the most that a step adds."""

    def __init__(self, evaluation: Evaluation, i: int, rank: RankPlaces) -> None:
        self.evaluation, self.i, self.rank = evaluation, i, rank
        self.grid = grid = evaluation.grids[i]
        self.m = grid.n_micro_batches
        self.tables = tables = evaluation.tables(i, rank)
        self.instants = evaluation.known(("instants", tables), lambda: _Instants(evaluation, tables))
        limits = grid.recompute_blocks.tobytes()
        self.blocks: _Blocks = evaluation.known(
            ("blocks", tables, rank.distinct, limits), lambda: _Blocks(evaluation, i, rank)
        )
        self.held = evaluation.held(i, rank)
        self._order()
        self.rows = evaluation.stage_table(i, rank.stages[0][0])[1][self.order]

    def _order(self) -> None:
        """Of each cell the sums of its program, and by how many units its micro-batches are more.

        From here on cells are in the `order` of their sums.
        """
        ms, m_place = self.evaluation.micro_batches(self.i)
        found = self.evaluation.programs(self.i, self.rank)
        numbers = np.zeros((3, len(ms)), np.int64)
        self.left: list[tuple[Column, Program]] = []
        self.sums: list[_Sums] = []
        known: dict[bytes, int] = {}
        for at, program in found:
            key, sums = self.instants.sums(program)
            if key not in known:
                known[key] = len(known)
                self.sums.append(sums)
            numbers[:, at] = np.array(((known[key],), (program.m,), (program.unit,)))
            if program.left.any() or program.left_each.any():
                self.left.append((at, program))
        which, m, unit = numbers[:, m_place]
        self.units = (self.m - m) // unit
        self.order = np.argsort(which, kind="stable")
        self.which = which[self.order]

    def found(self) -> tuple[Column, Bytes]:
        """Bytes at rest of each cell; the most that a step adds, of the grid's shape."""
        return self.held.states + self._inputs() + self._left(), self._high()

    def _high(self) -> Bytes:
        blocks = self.blocks
        known = self._most(np.arange(len(self.order)), blocks.known, self.rows, blocks.times)
        high = np.empty(self.grid.shape, np.int64)
        start = 0
        for reach in blocks.reaches:
            places = list(reach.places)
            if not reach.is_line:
                high[:, places] = known[:, start : start + len(places)]
                start += len(places)
                continue
            first, last, both = known[:, start : start + 3].T
            start += 3
            limits = self.grid.recompute_blocks[places]
            each = (last - first) // (limits[-1] - limits[0])
            high[:, places] = first[:, None] + each[:, None] * (limits - limits[0])
            bent = np.flatnonzero(both < first + last)
            if len(bent):
                high[bent[:, None], places] = self._bent(bent, places)
        found = np.empty_like(high)
        found[self.order] = high
        return found

    def _bent(self, cells: Column, places: Sequence[int]) -> Bytes:
        """The most that a step adds in cells where it is not on a line."""
        stages, weights = [], self.blocks.weights(places)
        rows, row = np.unique(self.rows.row[cells], return_inverse=True)
        for table, own in zip(self.tables, weights, strict=True):
            coefficients = self.evaluation.numbers(table).coefficients
            stages.append(_product(coefficients[:, :, rows], own))
        at = Rows(row, self.rows.micro_batch[cells])
        return self._most(cells, Coefficients(stages), at, np.ones(len(places), np.int64))

    def _most(self, cells: Column, known: Coefficients, rows: Rows, times: Column) -> Bytes:
        """The most that a step adds in some cells, [cell, column].

        By the coefficients of each distinct stage, and how often each column has what the update holds.
        """
        which, place = self.which[cells], self.order[cells]
        units, held = self.units[place], self.held.high[place]
        n_most = np.array([sums.n_most for sums in self.sums])[which]
        bounds = np.maximum(np.maximum(units, 1) * known.bounds(rows), held * float(times.max()))
        found = np.empty((len(cells), len(times)), np.int64)
        small = n_most * bounds < EXACT
        for exact in (True, False):
            some = np.flatnonzero(small == exact)
            if len(some):
                numbers = known.at(rows[some], exact=exact)
                first, second = self._values(numbers, units[some, None], held[some, None] * times)
                found[some] = self._largest(which[some], first, second).reshape(-1, len(times))
        return found

    def _largest(self, which: Column, basis: NDArray[Any], others: NDArray[Any]) -> Column:
        """The largest sums, of cells in the order of these, by numbers [number, cell and column]."""
        n_columns = basis.shape[1] // len(which)
        found = np.empty(basis.shape[1], np.int64)
        starts = np.flatnonzero(np.diff(which, prepend=-1)).tolist()
        for start, stop in pairwise([*starts, len(which)]):
            own = slice(start * n_columns, stop * n_columns)
            found[own] = self.sums[which[start]].largest(basis[:, own], others[:, own])
        return found

    def _values(
        self, numbers: Sequence[NDArray[Any]], units: Column, held: Column
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """The numbers of `_Instants` in some cells, [number, cell and column]: the basis, the others."""
        instants = self.instants
        basis = [own[:n] for own, n in zip(numbers, instants.n_basis, strict=True)]
        others = [
            _largest_of_each(own[n:], ranked)
            for own, n, ranked in zip(numbers, instants.n_basis, instants.ranked, strict=True)
        ]
        basis += [own * units.astype(own.dtype) for own in basis]
        first, second = np.concatenate(basis), np.concatenate([*others, held[None].astype(basis[0].dtype)])
        return first.reshape(len(first), -1), second.reshape(len(second), -1)

    def _left(self) -> Column | int:
        """What a schedule leaves until the next step."""
        if not self.left:
            return 0
        found = np.zeros_like(self.m)
        _, m_place = self.evaluation.micro_batches(self.i)
        for at, program in self.left:
            cells = np.flatnonzero(np.isin(m_place, at))
            for (ends, _), n, each in zip(self.rank.distinct, program.left, program.left_each, strict=True):
                boundary = self.evaluation.boundary(self.i, ends)[cells]
                found[cells] += (int(n) + int(each) * self.units[cells]) * boundary
        return found

    def _inputs(self) -> Column:
        """What goes into a step, and the ranks' numbers on the mesh."""
        evaluation, grid = self.evaluation, self.grid
        cells = grid.cells
        distinct = tuple(dict.fromkeys(ends for ends, _ in self.rank.stages))
        ends = tuple([distinct.index(ends) for ends, _ in self.rank.stages])
        fixed, each, received = _inputs(
            evaluation.model, grid.base.seq_len, evaluation.device, distinct, ends
        )
        boundary = sum(
            [n * evaluation.boundary(self.i, own) for n, own in zip(received, distinct, strict=True)]
        )
        found = fixed + self.m * (each * cells["micro_batch"] + boundary)
        return np.asarray(found + evaluation.known(("mesh", self.i), self._mesh_bytes))

    def _mesh_bytes(self) -> Column:
        """The ranks' numbers on the mesh."""
        cells = self.grid.cells
        world = self.grid.structure["pp"] * cells["dp_replicate"] * cells["dp"] * cells["tp"]
        return np.asarray(mesh_bytes(many(world), self.evaluation.device))


@lru_cache(maxsize=4096)
def _inputs(
    model: Model, seq_len: int, device: Device, distinct: tuple[Ends, ...], stages: tuple[int, ...]
) -> tuple[int, int, tuple[int, ...]]:
    """What goes into a step of a rank with such stages: bytes for any, and for each sequence.

    And how often with each micro-batch what is sent to a stage, by distinct ends.
    """
    m, boundary = many([1, 2] + [1] * len(distinct)), np.zeros((len(distinct), 2 + len(distinct)), np.int64)
    boundary[:, 2:] = np.eye(len(distinct), dtype=np.int64)
    plan = with_values(Plan(), micro_batch=1, seq_len=seq_len, global_batch=m)
    buffers = [Buffer(RECEIVED, (), UINT8, many(n), "activations") for n in boundary]
    known = [Stage(model, plan, (*ends, 0), device) for ends in distinct]
    rank = RankStages.of(*[known[i] for i in stages], rank=Rank())
    rank.received = [(buffers[i], buffers[i]) for i in stages]
    one, two, *others = np.asarray(n_bytes_of(rank.inputs)).tolist()
    return 2 * one - two, two - one, tuple([n - one for n in others])
