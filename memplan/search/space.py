"""The search space: every mesh of a number of GPUs, and on each every combination of the varied fields."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, groupby, product
from math import prod
from typing import Any, Final, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from memplan.engines.checks import check_plan
from memplan.errors import MemplanError, PlanRefused, divisors_text, kind_of
from memplan.models import Model
from memplan.plan import MESH_AXES, RECOMPUTES, Plan
from memplan.schedules import SCHEDULES
from memplan.search.plans import CELL, NO_LIMIT, Column, Grid, number_of
from memplan.search.rules import RUNS, Choices, Rules

MOST_CELLS: Final = 2**17
"""Cells of a batch of grids, about."""

DATA: Final = {
    "fsdp3": ((3, False), (3, True)),
    "fsdp2": ((2, False), (2, True)),
    "ddp": ((0, True), (1, True)),
    "none": ((0, False), (1, False)),
}
"""Uses of the data axis: ZeRO stages, each with or without several ranks; the least memory first."""


class Mesh(NamedTuple):
    """Ranks along each axis."""

    pp: int
    dp_replicate: int
    dp: int
    tp: int

    @property
    def n_replicas(self) -> int:
        """Data-parallel ranks that the global batch is divided over."""
        return self.dp_replicate * self.dp


class GridKind(NamedTuple):
    """What all plans of a batch of grids share; `data` is a key of `DATA`."""

    data: str
    recompute: str
    offload: bool
    sequence_parallel: bool


class Ruled(NamedTuple):
    """A grid, and for each cell the number of the rule that refuses it (see `Space.rules`), or `RUNS`.

    `place`: each cell's place among all plans, by mesh, then by structure.
    """

    grid: Grid
    rule: Column
    place: Column

    @property
    def running(self) -> Grid:
        """The cells that no rule refuses."""
        runs = self.rule == RUNS
        return self.grid if runs.all() else self.grid[runs]


@final
@dataclass(frozen=True, kw_only=True)
class Space:
    """All plans of `n_gpus` GPUs that differ from `base` in the varied fields only.

    A field takes the values of its range. A field without a range takes every value that makes a difference:
    no ZeRO for a single replica, no sequence parallelism for a single tensor rank; of several numbers of
    virtual stages with equally large stages only the smallest; of several numbers of recomputed blocks that
    cover every stage only the first. Schedules of other packages are tried only when they are named.
    """

    model: Model
    n_gpus: int
    base: Plan
    ranges: Mapping[str, tuple[Any, ...]]
    node: int | None = None
    """GPUs of a node, if a tensor axis must be within one; None if it may be on several."""
    rules: dict[str, int] = field(default_factory=dict)
    """The kinds of plans that are refused, numbered as they were met."""

    def grids(self, most: int = MOST_CELLS) -> Iterator[list[Ruled]]:
        """All plans, as batches of grids of one kind with about `most` cells.

        A combination that is refused for every micro-batch counts as one plan, and so does a mesh on which no
        plan can run.
        """
        pipelines = list(self._pipelines())
        offload, divided, recompute = [self.of(name, usual) for name, usual in BLOCKS.items()]
        for data, recomputed in product(DATA, reversed(recompute)):
            for own in product(offload, divided):
                yield from _batches(pipelines, GridKind(data, recomputed, *own), most)

    def _pipelines(self) -> Iterator["_PipelineGrids"]:
        rules = Rules(self.model, self.base, self.rules)
        n_places = 0
        for _, meshes in groupby(self.meshes(), key=lambda mesh: mesh.pp):
            pipeline = _PipelineGrids(self, rules, list(meshes), n_places)
            n_places += pipeline.n_places
            yield pipeline

    def meshes(self) -> Iterator[Mesh]:
        """Every mesh of all GPUs, from the least divided model to the most.

        Raises:
            PlanRefused: there is none.
        """
        found = list(self._meshes(self.tps()))
        if not found:
            raise PlanRefused(self._no_mesh())
        yield from found

    def _meshes(self, tps: Sequence[int]) -> Iterator[Mesh]:
        for pp, tp in product(self.of("pp", divisors(self.n_gpus)), tps):
            if self.n_gpus % (pp * tp):
                continue
            replicas = self.n_gpus // (pp * tp)
            for dp in self.of("dp", divisors(replicas)):
                if replicas % dp == 0 and replicas // dp in self.of("dp_replicate", divisors(replicas)):
                    mesh = Mesh(pp, replicas // dp, dp, tp)
                    if self._matters(mesh):
                        yield mesh

    def tps(self) -> tuple[int, ...]:
        """The degrees of tensor parallelism that are tried: within a node, unless that is lifted."""
        every = self.of("tp", divisors(self.n_gpus))
        return every if self.node is None else tuple([tp for tp in every if self.node % tp == 0])

    def left_out(self) -> Iterator[str]:
        """Sentences about values that were asked for and are left out."""
        across = sorted({*self.ranges.get("tp", ())} - {*self.tps()})
        across = [tp for tp in across if self.n_gpus % tp == 0]
        if across:
            yield (
                f"tp={_either(across)} is left out: it is on several nodes of {self.node} GPUs; "
                "tp_across_nodes (--tp-across-nodes) tries it."
            )

    def _no_mesh(self) -> str:
        """Why there is no mesh, with a way out."""
        asked = {axis: self.ranges[axis] for axis in MESH_AXES if axis in self.ranges}
        said = " and ".join(f"{axis}={_either(values)}" for axis, values in asked.items())
        if any(self._meshes(self.of("tp", divisors(self.n_gpus)))):
            return (
                f"tp={_either(self.of('tp', ()))} is on several nodes of {self.node} GPUs, which "
                "is not tried by default; use tp_across_nodes=True (--tp-across-nodes), or a tp of "
                f"{divisors_text(self.node or 1)}."
            )
        return (
            f"no mesh of {self.n_gpus} GPUs has {said}; use degrees of {divisors_text(self.n_gpus)} whose "
            f"product divides {self.n_gpus}, and leave one axis out to make up the rest."
        )

    def _matters(self, mesh: Mesh) -> bool:
        """Whether a mesh differs from others: `dp_replicate` needs several shards and ZeRO 2 or 3."""
        if mesh.dp_replicate == 1 or "dp_replicate" in self.ranges:
            return True
        return mesh.dp > 1 and max(self.of("zero", (3,))) >= 2

    def micro_batches(self, n_replicas: int) -> tuple[int, ...]:
        """The micro-batches that divide a replica's sequences; if none does, the first one asked for."""
        each, rest = divmod(self.base.global_batch, n_replicas)
        if rest:
            return self.of("micro_batch", (1,))[:1]
        asked = self.of("micro_batch", divisors(each))
        return tuple(n for n in asked if each % n == 0) or asked[:1]

    def of(self, field: str, usual: tuple[Any, ...]) -> tuple[Any, ...]:
        """The values of a field: those asked for, else the usual ones."""
        return self.ranges.get(field, usual)

    def recompute_blocks(self, n_stages: int) -> tuple[int | None, ...]:
        """The numbers of recomputed blocks per stage that make a difference."""
        largest_stage = -(-self.model.n_blocks // n_stages)
        asked = self.of("recompute_blocks", (None,))
        some = [n for n in asked if n is not None and n < largest_stage]
        every = [n for n in asked if n is None or n >= largest_stage]
        return (*some, *every[:1])

    def schedules(self, pp: int) -> Iterator[tuple[str, int]]:
        """Schedules, and stages per rank."""
        if pp == 1:
            yield self.of("schedule", ("1f1b",))[0], 1
            return
        for schedule in self.of("schedule", tuple(SCHEDULES.own)):
            for virtual_stages in self.of("virtual_stages", self._virtual_stages(schedule, pp)):
                yield schedule, virtual_stages

    def _virtual_stages(self, schedule: str, pp: int) -> tuple[int, ...]:
        known = SCHEDULES.named(schedule)
        if known.stages_per_rank is not None:
            return (known.stages_per_rank,)
        least = known.fewest_stages
        most = max(self.model.n_blocks // pp, least)
        largest_stage = {-(-self.model.n_blocks // (pp * v)): v for v in range(most, least - 1, -1)}
        return tuple(sorted(largest_stage.values()))


BLOCKS: Final[dict[str, tuple[Any, ...]]] = {
    "offload": (False, True),
    "sequence_parallel": (False, True),
    "recompute": RECOMPUTES,
}
"""The fields, beside the data axis, in which kinds of grids differ, with their usual values."""


NONE: Final = np.array([NO_LIMIT])
"""The column of `recompute_blocks` of plans without recomputation."""


class _Placed(NamedTuple):
    """A mesh with its indices on the axes `tp` and `several`, a replica's sequences, and its micro-batches.

    `each`, the sequences, is 0 if the batch cannot be divided over replicas or into micro-batches.
    """

    mesh: Mesh
    tp: int
    several: int
    each: int
    micro_batches: tuple[int, ...]


class _Cells(NamedTuple):
    """The pairs of a mesh and a micro-batch: their indices; `first` is 1 for the first pair of a mesh."""

    mesh: Column
    micro_batch: Column
    tp: Column
    several: Column
    m: Column
    first: Column


class _PipelineGrids:
    """The plans with the same number of ranks of a pipeline.

    Rules are asked on the axes (zero, offload, sequence_parallel, recompute, tp, several, schedule, m), where
    `m` is the number of micro-batches. No rule reads how many replicas there are, only whether there are
    `several` along dp and dp_replicate, nor how many blocks are recomputed.
    """

    def __init__(self, space: Space, rules: Rules, meshes: list[Mesh], first_place: int) -> None:
        self.space, self.rules, self.pp, self.first_place = space, rules, meshes[0].pp, first_place
        self.schedules = list(space.schedules(self.pp))
        self.zeros = space.of("zero", (0, 1, 2, 3))
        self.blocks = {name: space.of(name, usual) for name, usual in BLOCKS.items()}
        self.structures = (len(self.schedules), len(self.zeros), *map(len, self.blocks.values()))
        self.numbers = [_numbered(values) for values in self._choices()]
        self.tps = list(dict.fromkeys(mesh.tp for mesh in meshes))
        self.several = list(dict.fromkeys(map(_several, meshes)))
        self.meshes = list(map(self._placed, meshes))
        self.there = self._there()
        ms = sorted({each // n for *_, each, micro_batches in self.meshes if each for n in micro_batches})
        refused_by = rules.refused_by(self.pp, self._axes(), ms)
        shape = (*self.structures[1:], len(self.tps), len(self.several), len(self.schedules))
        self.always = np.broadcast_to(refused_by.always, shape)
        self.at = np.broadcast_to(refused_by.at, (*shape, max(1, len(ms))))
        self.columns = {name: np.array([getattr(mesh, name) for mesh in meshes]) for name in CELL[:-1]}
        self.recomputed = {v: _numbers(space.recompute_blocks(self.pp * v)) for _, v in self.schedules}
        self.strays = self._strays()
        self.cells = self._cells(ms)

    @property
    def n_places(self) -> int:
        """Meshes times structures."""
        return len(self.meshes) * prod(self.structures)

    def _placed(self, mesh: Mesh) -> _Placed:
        micro_batches = self.space.micro_batches(mesh.n_replicas)
        each, rest = divmod(self.space.base.global_batch, mesh.n_replicas)
        undivided = rest or each % micro_batches[0]
        tp, several = self.tps.index(mesh.tp), self.several.index(_several(mesh))
        return _Placed(mesh, tp, several, 0 if undivided else each, micro_batches)

    def _choices(self) -> list[Choices]:
        """The axes of a place: the schedule, the ZeRO stage, `BLOCKS`."""
        return [
            [{"schedule": schedule, "virtual_stages": v} for schedule, v in self.schedules],
            [{"zero": zero} for zero in self.zeros],
            *([{name: value} for value in values] for name, values in self.blocks.items()),
        ]

    def _axes(self) -> list[Choices]:
        """The axes of the rules."""
        schedules, *others = self._choices()
        return [
            *others,
            [{"tp": tp} for tp in self.tps],
            [{"dp": dp, "dp_replicate": dp_replicate} for dp, dp_replicate in self.several],
            schedules,
        ]

    def _there(self) -> NDArray[np.bool_]:
        """Whether a combination is tried, on the axes (zero, offload, sequence_parallel, tp, several)."""
        of, no, yes_or_no = self.space.of, (False,), (False, True)
        offload, split, _ = self.blocks.values()
        axes = self.zeros, offload, split, self.tps, self.several
        found = [
            zero in of("zero", _zeros(*several))
            and offloaded in of("offload", yes_or_no if zero >= 2 else no)
            and divided in of("sequence_parallel", yes_or_no if tp > 1 else no)
            for zero, offloaded, divided, tp, several in product(*axes)
        ]
        return np.array(found).reshape([len(axis) for axis in axes])

    def _strays(self) -> dict[int, tuple[int, int]]:
        """For each mesh on which no plan can run, the index of its first structure, and the rule."""
        runs = (self.always == RUNS).any(axis=(3, -1))
        can_run = (runs & self.there).any(axis=(0, 1, 2))
        found = {}
        for i, (mesh, tp, several, each, micro_batches) in enumerate(self.meshes):
            first = int(self.there[..., tp, several].argmax()) * self.structures[-1]
            if not each:
                values = mesh._asdict() | {"micro_batch": micro_batches[0]}
                error = refusal(self.space.model, self.space.base, values)
                found[i] = first, self.rules.number(None if error is None else kind_of(error))
            elif not can_run[tp, several]:
                found[i] = first, int(self.always[..., tp, several, 0].flat[first])
        return found

    def _cells(self, ms: list[int]) -> _Cells:
        """The cells of the meshes on which some plan can run."""
        found = [
            (i, n, tp, several, each // n, n == micro_batches[0])
            for i, (_, tp, several, each, micro_batches) in enumerate(self.meshes)
            if i not in self.strays
            for n in micro_batches
        ]
        mesh, micro_batch, tp, several, m, first = np.array(found, np.int64).reshape(-1, 6).T.copy()
        return _Cells(mesh, micro_batch, tp, several, np.searchsorted(ms, m), first)

    def grids(self, kind: GridKind) -> Iterator[Ruled]:
        """The grids of a kind."""
        blocks = [self.blocks[name].index(getattr(kind, name)) for name in BLOCKS]
        for zero, several in DATA[kind.data]:
            if zero in self.zeros:
                place = (self.zeros.index(zero), *blocks)
                yield from self._stray_grids(place, several)
                yield from self._running_grids(place, several)

    def _stray_grids(self, place: tuple[int, ...], several: bool) -> Iterator[Ruled]:
        """One plan for each mesh on which none can run."""
        structure = int(np.ravel_multi_index((0, *place), self.structures))
        found = [
            (i, self.meshes[i].micro_batches[0], rule)
            for i, (first, rule) in self.strays.items()
            if first == structure and (self.meshes[i].mesh.dp > 1) == several
        ]
        if found:
            mesh, micro_batch, rule = np.array(found, np.int64).T.copy()
            yield self._ruled((0, *place), mesh, self._columns(mesh, micro_batch), rule, slice(1))

    def _running_grids(self, place: tuple[int, ...], several: bool) -> Iterator[Ruled]:
        """A grid for each schedule, with the other meshes."""
        there = self.there[place[:-1]] & np.array([(dp > 1) == several for dp, _ in self.several])
        chosen = np.flatnonzero(there[self.cells.tp, self.cells.several])
        if not len(chosen):
            return
        mesh, micro_batch, tp, replicas, m, first = [column[chosen] for column in self.cells]
        columns = self._columns(mesh, micro_batch)
        always = self.always[place][tp, replicas].T
        rules = np.where(always == RUNS, self.at[place][tp, replicas, :, m].T, always)
        once = (always == RUNS) | (first > 0)
        for i, (rule, some) in enumerate(zip(rules, once, strict=True)):
            if some.all():
                yield self._ruled((i, *place), mesh, columns, rule)
            else:
                kept = {name: column[some] for name, column in columns.items()}
                yield self._ruled((i, *place), mesh[some], kept, rule[some])

    def _columns(self, mesh: Column, micro_batch: Column) -> dict[str, Column]:
        return {name: column[mesh] for name, column in self.columns.items()} | {"micro_batch": micro_batch}

    def _ruled(
        self,
        place: tuple[int, ...],
        mesh: Column,
        cells: Mapping[str, Column],
        rule: Column,
        blocks: slice = slice(None),
    ) -> Ruled:
        numbers = [numbers[i] for numbers, i in zip(self.numbers, place, strict=True)]
        recomputes = self.blocks["recompute"][place[-1]] != "none"
        recomputed = self.recomputed[self.schedules[place[0]][1]] if recomputes else NONE
        grid = Grid(
            base=self.space.base,
            structure=dict(chain([("pp", self.pp)], *numbers)),
            cells=cells,
            recompute_blocks=recomputed[blocks],
        )
        structure = int(np.ravel_multi_index(place, self.structures))
        return Ruled(grid, rule, self.first_place + mesh * prod(self.structures) + structure)


def _batches(pipelines: "Sequence[_PipelineGrids]", kind: GridKind, most: int) -> Iterator[list[Ruled]]:
    """The grids of a kind, about `most` cells at a time."""
    batch: list[Ruled] = []
    n_cells = 0
    for ruled in (ruled for pipeline in pipelines for ruled in pipeline.grids(kind)):
        batch.append(ruled)
        n_cells += len(ruled.rule)
        if n_cells >= most:
            yield batch
            batch, n_cells = [], 0
    if batch:
        yield batch


def _numbered(values: Choices) -> list[list[tuple[str, int]]]:
    """Fields with the numbers that mean their values in a column."""
    return [[(name, number_of(name, value)) for name, value in each.items()] for each in values]


def _numbers(recompute_blocks: Sequence[int | None]) -> Column:
    return np.array([number_of("recompute_blocks", n) for n in recompute_blocks], np.int64)


def _either(values: Iterable[Any]) -> str:
    return " or ".join(map(str, values))


def _several(mesh: Mesh) -> tuple[int, int]:
    """One or several ranks along dp and dp_replicate."""
    return min(mesh.dp, 2), min(mesh.dp_replicate, 2)


def _zeros(dp: int, dp_replicate: int) -> tuple[int, ...]:
    if dp_replicate > 1:
        return (2, 3)
    return (0, 1, 2, 3) if dp > 1 else (0,)


def refusal(model: Model, base: Plan, values: Mapping[str, Any]) -> MemplanError | None:
    """Why a plan cannot run; None if it can."""
    try:
        check_plan(model, replace(base, **values))
    except MemplanError as error:
        return error
    return None


def divisors(n: int) -> tuple[int, ...]:
    """All divisors of a number, sorted.

    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return tuple(small + [n // d for d in reversed(small) if d * d != n])
