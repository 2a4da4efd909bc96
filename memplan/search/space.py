"""The search space: every mesh of a number of GPUs, and on each every combination of the varied fields."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import groupby, product
from math import gcd, prod
from typing import Any, Final, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from memplan.checks import divisors
from memplan.device import DeviceType
from memplan.engines.base import ENGINES
from memplan.engines.checks import check_plan
from memplan.errors import MemplanError, PlanRefused, divisors_text, kind_of
from memplan.mesh import AXES, DIVIDING, VIEWED, VIEWS, Mesh, axis_names, degrees_text, with_several
from memplan.models import Model
from memplan.plan import RECOMPUTES, Plan
from memplan.schedules import SCHEDULES
from memplan.search.plans import Column, Grid, number_of, with_ranks
from memplan.search.rules import NOT_REFUSED, Choices, Rules
from memplan.tracing.cache import trace_at_once

MOST_CELLS: Final = 2**17
"""Cells of a batch of grids, about."""

DATA: Final = (
    ((3, False), (3, True)),
    ((2, False), (2, True)),
    ((0, True), (1, True)),
    ((0, False), (1, False)),
)
"""Uses of the data axis: ZeRO stages, each with or without several ranks; the least memory first."""


class Ruled(NamedTuple):
    """A grid, and for each cell the number of the rule that refuses it (see `Space.rules`), or `NOT_REFUSED`.

    `order`: each cell's place among all plans, by mesh, then by structure.
    """

    grid: Grid
    rule: Column
    order: Column

    @property
    def running(self) -> Grid:
        """The cells that no rule refuses."""
        runs = self.rule == NOT_REFUSED
        return self.grid if runs.all() else self.grid[runs]

    @classmethod
    def joined(cls, parts: Sequence["Ruled"]) -> "Ruled":
        """The cells of several grids with the same numbers of recomputed blocks, in one."""
        grids, rules, orders = zip(*parts, strict=True)
        cells = {name: np.concatenate([grid.cells[name] for grid in grids]) for name in grids[0].cells}
        return cls(replace(grids[0], cells=cells), np.concatenate(rules), np.concatenate(orders))


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
    device: DeviceType = "cuda"
    """The device whose kernels run."""
    rules: dict[str, int] = field(default_factory=dict)
    """The kinds of plans that are refused, numbered as they were met."""

    def grids(self, most: int = MOST_CELLS) -> Iterator[Ruled]:
        """All plans, as grids that have about `most` cells at most.

        A combination that is refused for every micro-batch counts as one plan, and so does a mesh on which no
        plan can run.
        """
        rules, pipelines = Rules(self.model, self.base, self.rules), list[_Pipelines]()
        for _, meshes in groupby(self.meshes(), key=lambda mesh: mesh.sizes["pp"]):
            first = sum([each.n_structures * len(each.meshes) for each in pipelines])
            pipelines.append(_Pipelines(self, rules, list(meshes), first))
        offload, divided, recompute = [self.of(name, usual) for name, usual in GRID_FIELDS.items()]
        for uses, recomputed in product(DATA, reversed(recompute)):
            for own in product(offload, divided):
                yield from _joined(
                    (one for each in pipelines for one in each.grids(uses, *own, recomputed)), most
                )

    def meshes(self) -> Iterator[Mesh]:
        """Every mesh of all GPUs, from the least divided model to the most.

        Raises:
            PlanRefused: there is none.
        """
        every = self._meshes(self._within_node())
        found = [mesh for mesh in every if _divided_by(mesh) not in self.undivided]
        if not found:
            raise PlanRefused(self._no_mesh())
        yield from found

    def _meshes(self, tps: Sequence[int]) -> Iterator[Mesh]:
        every = divisors(self.n_gpus)
        others = {axis: self.of(axis, every) for axis in ENGINES.named(self.base.engine).other_axes}
        others["cp"] = self.of("cp", (1,))
        for sizes in product(self.of("pp", every), *others.values(), tps):
            replicas, rest = divmod(self.n_gpus, prod(sizes))
            if rest:
                continue
            divided = dict(zip(("pp", *others, "tp"), sizes, strict=True))
            for dp in self.of("dp", divisors(replicas)):
                if replicas % dp == 0 and replicas // dp in self.of("dp_replicate", divisors(replicas)):
                    axes = divided | {"dp_replicate": replicas // dp, "dp": dp}
                    for ep in self.eps(axes):
                        mesh = Mesh(axes | {"ep": ep, "etp": self.base.etp})
                        if self._matters(mesh):
                            yield mesh

    def eps(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The degrees of expert parallelism that are tried on a mesh without it.

        Left out, that is one, and the largest that divides the experts within a node, where the engine
        divides experts beside the mesh's other axes.
        """
        ranks = prod([sizes[axis] for axis in VIEWED]) // self.base.etp
        beside = ENGINES.named(self.base.engine).ep_beside
        alone = any(sizes.get(axis, 1) > 1 for axis in ("pp", "cp", "tp") if axis not in beside)
        if "ep" in self.ranges:
            return tuple([ep for ep in self.ranges["ep"] if ranks % ep == 0])
        if alone or self.node is None or not self.model.n_experts:
            return (1,)
        return tuple(sorted({1, gcd(ranks, self.node, self.model.n_experts)}))

    def _within_node(self) -> tuple[int, ...]:
        """The degrees of tensor parallelism that are tried: within a node, unless that is lifted."""
        every = self.of("tp", divisors(self.n_gpus))
        return every if self.node is None else tuple([tp for tp in every if self.node % tp == 0])

    @cached_property
    def undivided(self) -> Mapping[tuple[int, ...], str]:
        """The degrees (of `DIVIDING`) that the model's own framework has no plan for, and why.

        None where the engine builds the model itself, or refuses it: its own rules say so of each plan.
        """
        try:
            if (engine := ENGINES.named(self.base.engine)).built(self.model).divides_itself:
                return {}
        except MemplanError:
            return {}
        sizes, found = self.model.sizes_over_tp.values(), {}
        meshes = {_divided_by(mesh): mesh for mesh in self._meshes(self._within_node())}
        asked = {
            degrees: partial(engine.divided, self.model, self.base, mesh.dividing, self.device)
            for degrees, mesh in meshes.items()
            if not any(size % mesh.sizes["tp"] for size in sizes)
        }
        trace_at_once(asked.values())
        for degrees, divided in asked.items():
            try:
                divided()
            except MemplanError as error:
                found[degrees] = str(error)
        return found

    def left_out(self) -> Iterator[str]:
        """Sentences about values that were asked for and are left out."""
        if self.undivided:
            each = [with_several(**dict(zip(DIVIDING, one, strict=True))) for one in sorted(self.undivided)]
            degrees = [degrees_text(one or {"tp": 1}) for one in each]
            yield f"{_either(degrees)} is left out: {next(iter(self.undivided.values()))}"
        across = sorted({*self.ranges.get("tp", ())} - {*self._within_node()})
        across = [tp for tp in across if self.n_gpus % tp == 0]
        if across:
            yield (
                f"tp={_either(across)} is left out: it is on several nodes of {self.node} GPUs; "
                "tp_across_nodes (--tp-across-nodes) tries it."
            )

    def _no_mesh(self) -> str:
        """Why there is no mesh, with a way out."""
        asked = {axis: self.ranges[axis] for axis in (*axis_names(), *VIEWS) if axis in self.ranges}
        said = " and ".join(f"{axis}={_either(values)}" for axis, values in asked.items())
        if any(self._meshes(self._within_node())):
            return next(iter(self.undivided.values()))
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
        if mesh.sizes["dp_replicate"] == 1 or "dp_replicate" in self.ranges:
            return True
        return _are_several(mesh.sizes) and max(self.of("zero", (3,))) >= 2

    def micro_batches(self, n_replicas: int) -> tuple[int, ...]:
        """The micro-batches that divide a replica's sequences; if none does, the first one asked for."""
        each, rest = divmod(self.base.global_batch, n_replicas)
        if rest:
            return self.of("micro_batch", (1,))[:1]
        asked = self.of("micro_batch", divisors(each))
        return tuple(n for n in asked if each % n == 0) or asked[:1]

    def of(self, field: str, usual: tuple[Any, ...]) -> tuple[Any, ...]:
        """The values of a field that were asked for, else the usual ones."""
        return self.ranges.get(field, usual)

    @property
    def blocks_if_none(self) -> int | None:
        """`recompute_blocks` of plans that recompute nothing; a number, if only numbers were asked for."""
        asked = self.of("recompute_blocks", (None,))
        return None if None in asked else asked[0]

    def recompute_blocks(self, n_stages: int) -> tuple[int | None, ...]:
        """The numbers of recomputed blocks per stage that make a difference."""
        largest_stage = max(self.base.layers_per_stage or (-(-self.model.n_blocks // n_stages),))
        asked = self.of("recompute_blocks", (None,))
        some = [n for n in asked if n is not None and n < largest_stage]
        every = [n for n in asked if n is None or n >= largest_stage]
        return (*some, *every[:1])

    def schedules(self, pp: int) -> Iterator[tuple[str, int]]:
        """Schedules, and stages per rank."""
        if pp == 1:
            for virtual_stages in self.of("virtual_stages", (1,)):
                yield self.of("schedule", ("1f1b",))[0], virtual_stages
            return
        for schedule in self.of("schedule", tuple(SCHEDULES.own)):
            for virtual_stages in self.of("virtual_stages", self._virtual_stages(schedule, pp)):
                yield schedule, virtual_stages

    def _virtual_stages(self, schedule: str, pp: int) -> tuple[int, ...]:
        known = SCHEDULES.named(schedule)
        if known.stages_per_rank is not None:
            return (known.stages_per_rank,)
        if self.base.layers_per_stage is not None:
            return (max(1, len(self.base.layers_per_stage) // pp),)
        least = known.fewest_stages
        most = max(self.model.n_blocks // pp, least)
        largest_stage = {-(-self.model.n_blocks // (pp * v)): v for v in range(most, least - 1, -1)}
        return tuple(sorted(largest_stage.values()))


GRID_FIELDS: Final[dict[str, tuple[Any, ...]]] = {
    "offload": (False, True),
    "sequence_parallel": (False, True),
    "recompute": RECOMPUTES,
}
"""The fields that all plans of a grid have in common, with the values that a search tries."""


class _Cells(NamedTuple):
    """The pairs of a mesh and a micro-batch: indices of the mesh, its degrees (`tp`), its `data`, and `m`."""

    mesh: Column
    micro_batch: Column
    tp: Column
    data: Column
    m: Column
    is_first: Column
    """1 for the first pair of a mesh, else 0."""


class _Pipelines:
    """The plans with the same number of ranks of a pipeline.

    Rules are asked on the axes (zero, offload, sequence_parallel, recompute, tp, data, schedule, m), where
    `data` are the ranks along dp, dp_replicate and other packages' axes, and `m` is the number of
    micro-batches. No rule reads how many blocks are recomputed if any are.
    """

    def __init__(self, space: Space, rules: Rules, meshes: list[Mesh], first: int) -> None:
        self.space, self.meshes, self.pp, self.first = space, meshes, meshes[0].sizes["pp"], first
        self.schedules = list(space.schedules(self.pp))
        blocks = {name: space.of(name, usual) for name, usual in GRID_FIELDS.items()}
        self.values: dict[str, tuple[Any, ...]] = {"zero": space.of("zero", (0, 1, 2, 3)), **blocks}
        self.structures = (len(self.schedules), *map(len, self.values.values()))
        self.n_structures = prod(self.structures)
        names = *AXES.own, *VIEWS, *ENGINES.named(space.base.engine).other_axes
        self.sizes = {axis: np.array([mesh.size(axis) for mesh in meshes]) for axis in names}
        """For each axis and view the ranks along it on each mesh."""
        self.degrees = list(dict.fromkeys(map(_divided_by, meshes)))
        """The degrees that divide the model."""
        self.data = list(dict.fromkeys(map(_data, meshes)))
        self.there = self._there()
        each = [self._micro_batches(mesh) for mesh in meshes]
        ms = sorted({m for found in each for _, m in found})
        refused_by = rules.refused_by(self.pp, self._axes(), ms)
        shape = (*self.structures[1:], len(self.degrees), len(self.data), len(self.schedules))
        self.always = np.broadcast_to(refused_by.always, shape)
        self.at = np.broadcast_to(refused_by.at, (*shape, max(1, len(ms))))
        self.strays = self._strays(rules, [not found for found in each])
        found = [
            (i, n, self.degrees.index(_divided_by(mesh)), self.data.index(_data(mesh)), m, n == each[i][0][0])
            for i, mesh in enumerate(meshes)
            if i not in self.strays
            for n, m in each[i]
        ]
        mesh, micro_batch, tp, data, m, is_first = np.array(found, np.int64).reshape(-1, 6).T.copy()
        self.cells = _Cells(mesh, micro_batch, tp, data, np.searchsorted(ms, m), is_first)

    def _micro_batches(self, mesh: Mesh) -> list[tuple[int, int]]:
        """Sizes and numbers of micro-batches; none if the batch divides into no replicas or micro-batches."""
        each, rest = divmod(self.space.base.global_batch, mesh.n_replicas)
        sizes = self.space.micro_batches(mesh.n_replicas)
        return [] if rest or each % sizes[0] else [(n, each // n) for n in sizes]

    def _axes(self) -> list[Choices]:
        """The axes of the rules."""
        *others, recomputes = [[{name: value} for value in own] for name, own in self.values.items()]
        return [
            *others,
            [{**one, "recompute_blocks": self._uncounted(**one)} for one in recomputes],
            [dict(zip(DIVIDING, degrees, strict=True)) for degrees in self.degrees],
            [dict(each) for each in self.data],
            [{"schedule": schedule, "virtual_stages": v} for schedule, v in self.schedules],
        ]

    def _there(self) -> NDArray[np.bool_]:
        """Whether a combination is tried, on the axes (zero, offload, sequence_parallel, tp, data)."""
        of, no, yes_or_no = self.space.of, (False,), (False, True)
        zeros, offload, split, _ = self.values.values()
        axes = zeros, offload, split, self.degrees, self.data
        found = [
            zero in of("zero", self._zeros(_sizes(degrees, data)))
            and offloaded in of("offload", yes_or_no if zero >= 2 else no)
            and divided in of("sequence_parallel", yes_or_no if _sizes(degrees, data)["tp"] > 1 else no)
            for zero, offloaded, divided, degrees, data in product(*axes)
        ]
        return np.array(found).reshape([len(axis) for axis in axes])

    def _zeros(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The ZeRO stages that make a difference with these ranks."""
        sharded = ENGINES.named(self.space.base.engine).sharded_beside
        if any(sizes[axis] > 1 for axis in sharded):
            return (2, 3)
        return (0, 1, 2, 3) if _are_several(sizes) else (0,)

    def _strays(self, rules: Rules, undivided: Sequence[bool]) -> dict[int, tuple[int, int]]:
        """For each mesh on which no plan can run, the index of its first structure, and the rule."""
        runs = (self.always == NOT_REFUSED).any(axis=(3, -1))
        can_run = (runs & self.there).any(axis=(0, 1, 2))
        found = {}
        for i, mesh in enumerate(self.meshes):
            tp, data = self.degrees.index(_divided_by(mesh)), self.data.index(_data(mesh))
            first = int(self.there[..., tp, data].argmax()) * self.structures[-1]
            if undivided[i]:
                values = (
                    mesh.sizes | mesh.views | {"micro_batch": self.space.micro_batches(mesh.n_replicas)[0]}
                )
                error = refusal(self.space.model, self.space.base, values)
                found[i] = first, rules.number(None if error is None else kind_of(error))
            elif not can_run[tp, data]:
                found[i] = first, int(self.always[..., tp, data, 0].flat[first])
        return found

    def grids(self, uses: Iterable[tuple[int, bool]], *blocks: Any) -> Iterator[Ruled]:
        """The grids with these uses of the data axis, and these values of `GRID_FIELDS`."""
        for zero, several in uses:
            if zero in self.values["zero"]:
                chosen = zip(self.values.values(), (zero, *blocks), strict=True)
                place = tuple([values.index(value) for values, value in chosen])
                yield from self._stray_grids(place, several)
                yield from self._running_grids(place, several)

    def _stray_grids(self, place: tuple[int, ...], several: bool) -> Iterator[Ruled]:
        """One plan for each mesh on which none can run."""
        structure = int(np.ravel_multi_index((0, *place), self.structures))
        found = [
            (0, i, self.space.micro_batches(self.meshes[i].n_replicas)[0], rule)
            for i, (first, rule) in self.strays.items()
            if first == structure and _are_several(self.meshes[i].sizes) == several
        ]
        if found:
            yield self._ruled(
                place, self._recompute_blocks(0, place)[:1], *np.array(found, np.int64).T.copy()
            )

    def _running_grids(self, place: tuple[int, ...], several: bool) -> Iterator[Ruled]:
        """The other meshes, with the schedules whose stages are recomputed by the same numbers of blocks."""
        uses = [_are_several(_sizes(*both)) == several for both in product(self.degrees, self.data)]
        there = self.there[place[:-1]] & np.reshape(uses, (len(self.degrees), len(self.data)))
        chosen = there[self.cells.tp, self.cells.data]
        if not chosen.any():
            return
        mesh, micro_batch, tp, replicas, m, is_first = [column[chosen] for column in self.cells]
        always = self.always[place][tp, replicas].T
        rules = np.where(always == NOT_REFUSED, self.at[place][tp, replicas, :, m].T, always)
        once = (always == NOT_REFUSED) | (is_first > 0)
        limits = [self._recompute_blocks(i, place) for i in range(len(self.schedules))]
        for blocks in dict.fromkeys(limits):
            same = np.array([own == blocks for own in limits])
            schedule, cell = np.nonzero(once & same[:, None])
            if len(cell):
                columns = schedule, mesh[cell], micro_batch[cell], rules[schedule, cell]
                yield self._ruled(place, blocks, *columns)

    def _uncounted(self, recompute: str) -> int | None:
        """`recompute_blocks` of plans that recompute so, where it makes no difference; else None."""
        return self.space.blocks_if_none if recompute == "none" else None

    def _recompute_blocks(self, schedule: int, place: tuple[int, ...]) -> tuple[int | None, ...]:
        recompute = self.values["recompute"][place[-1]]
        if recompute not in ENGINES.named(self.space.base.engine).counts_blocks:
            return (self._uncounted(recompute),)
        return self.space.recompute_blocks(self.pp * self.schedules[schedule][1])

    def _ruled(self, place: tuple[int, ...], blocks: tuple[int | None, ...], *columns: Column) -> Ruled:
        """The plans of one structure but for the schedule.

        `columns`: each cell's schedule and mesh, as indices, its micro-batch, and the rule that refuses it.
        """
        schedule, mesh, micro_batch, rule = columns
        shared = {name: values[i] for (name, values), i in zip(self.values.items(), place, strict=True)}
        cells = {name: np.full(len(mesh), number_of(name, value)) for name, value in shared.items()}
        cells |= {axis: sizes[mesh] for axis, sizes in self.sizes.items()}
        schedules = np.array([(number_of("schedule", name), v) for name, v in self.schedules])
        cells["schedule"], cells["virtual_stages"] = schedules[schedule].T.copy()
        cells["micro_batch"] = micro_batch
        numbers = np.array([number_of("recompute_blocks", n) for n in blocks])
        grid = Grid(base=self.space.base, cells=cells, recompute_blocks=numbers)
        structure = np.ravel_multi_index((schedule, *place), self.structures)
        return Ruled(grid, rule, self.first + mesh * self.n_structures + structure)


def _joined(parts: Iterable[Ruled], most: int) -> Iterator[Ruled]:
    """Grids, joined where all have several data-parallel ranks, or all one, and equal `recompute_blocks`."""
    kinds: dict[tuple[bool, bytes], list[Ruled]] = {}
    n_cells = 0
    for part in parts:
        grid = part.grid
        several = _are_several({axis: int(grid.cells[axis][0]) for axis in ("dp", "cp")})
        kinds.setdefault((several, grid.recompute_blocks.tobytes()), []).append(part)
        n_cells += len(part.rule)
        if n_cells >= most:
            yield from map(Ruled.joined, kinds.values())
            kinds, n_cells = {}, 0
    yield from map(Ruled.joined, kinds.values())


def _either(values: Iterable[Any]) -> str:
    return " or ".join(map(str, values))


def _data(mesh: Mesh) -> tuple[tuple[str, int], ...]:
    """The ranks along the axes that are not rules' own axes, by name: dp, dp_replicate, other packages'."""
    return tuple([(axis, n) for axis, n in mesh.sizes.items() if axis not in ("pp", *DIVIDING)])


def _divided_by(mesh: Mesh) -> tuple[int, ...]:
    """The degrees over which a mesh divides the model, of `DIVIDING`."""
    return tuple([mesh.size(axis) for axis in DIVIDING])


def _sizes(degrees: Sequence[int], data: Iterable[tuple[str, int]]) -> dict[str, int]:
    """The ranks along the axes of `_divided_by` and of `_data`, by name."""
    return dict(zip(DIVIDING, degrees, strict=True)) | dict(data)


def _are_several(sizes: Mapping[str, int]) -> bool:
    """Whether there are several ranks between which data parallelism shards."""
    return sizes["dp"] * sizes["cp"] > 1


def refusal(model: Model, base: Plan, values: Mapping[str, Any]) -> MemplanError | None:
    """Why a plan cannot run; None if it can."""
    try:
        check_plan(model, with_ranks(base, values))
    except MemplanError as error:
        return error
    return None
