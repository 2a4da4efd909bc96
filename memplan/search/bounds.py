"""Lower bounds on the step time and the memory of every plan of a grid.

Both are arrays over a grid's plans, computed from the costs of one block and of a model's ends for a few
micro-batch sizes, traced once for each degree of tensor parallelism. They state no rule of their own: traces
give FLOPs, bytes and collectives, `memplan.steptime` turns work into seconds.

Why they hold. Time: a pipeline's slowest rank works no less than the average one, and each part of a step's
time is convex in the work, so the average rank's work takes no longer. Memory: the first rank of a pipeline
holds its weights, its optimizer state, its receive buffers and what the forward passes before its first
backward pass have saved; and once all its stages have had a backward pass, gradients too.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memplan.device import Device
from memplan.engines.base import ENGINES, Costs, DataParallelism, PartCosts
from memplan.hardware import Cluster
from memplan.models import Layers, Model
from memplan.plan import N_MOMENTS, RECOMPUTES, Plan, stage_layers
from memplan.record import Axis, Overlap
from memplan.schedules import SCHEDULES, first_under_way
from memplan.search.plans import CELL, NO_LIMIT, Column, Grid, unchecked
from memplan.steptime import (
    Roofline,
    Work,
    bubble_s,
    busy_s,
    links_used,
    parts_s,
    rates_of,
    update_bytes,
)

Seconds = NDArray[np.float64]
Bytes = NDArray[np.float64]
"""Bytes as floats, which hold whole numbers up to 2^53 exactly."""

ROUNDED_BYTES: Final = 2
"""Bytes by which an axis's traffic may be below the exact value, as only whole bytes are sent."""

ROUNDING: Final = 1e-9
"""A relative error much larger than that of a sum of floats."""


class BlockPart(NamedTuple):
    """A block of a kind as a part of a model: recomputed, or not."""

    kind: str
    again: bool


class Affine(NamedTuple):
    """A number that depends on the micro-batch: `one` for a single sequence, else `each` x n + `once`.

    A single sequence has a value of its own because PyTorch copies less of it: its heads are contiguous.
    """

    one: float
    each: float
    once: float

    def __call__(self, n: Any) -> Any:
        """Its value for n sequences."""
        return np.where(np.equal(n, 1), self.one, self.each * n + self.once)

    @classmethod
    def through(cls, one: float, two: float, three: float) -> "Affine":
        """The function with these values for one, two and three sequences."""
        return cls(one, three - two, 3 * two - 2 * three)


Part = str | BlockPart
"""A part of a model: "embedding", "head", or a block of a kind, which is recomputed or not."""


class PartsOfModel(NamedTuple):
    """The costs of a model's parts on one tensor rank; bytes that stages send, and keep to receive them.

    All but the elements are `Affine`.
    """

    costs: Mapping[Part, Costs]
    boundary_bytes: Affine
    received_bytes: Affine


@lru_cache(maxsize=4096)
def parts_of_model(model: Model, plan: Plan, device: Device) -> PartsOfModel:
    """The costs of a model's parts under a plan of one replica and one stage, for any micro-batch."""
    each = [_costs(model, plan, device, n) for n in (1, 2, 3)]
    parts = [_parts(costs) for costs in each]
    return PartsOfModel(
        {
            part: Costs(
                costs.elements,
                *[Affine.through(*of_batch) for of_batch in zip(*[p[part][1:] for p in parts], strict=True)],
            )
            for part, costs in parts[0].items()
        },
        Affine.through(*[costs.boundary_bytes for costs in each]),
        Affine.through(*[costs.received_bytes for costs in each]),
    )


def _parts(costs: PartCosts) -> dict[Part, Costs]:
    found: dict[Part, Costs] = {"embedding": costs.embedding, "head": costs.head}
    found |= {BlockPart(kind, again=False): of for kind, of in costs.blocks.items()}
    return found | {BlockPart(kind, again=True): of for kind, of in costs.recomputed.items()}


def _costs(model: Model, plan: Plan, device: Device, micro_batch: int) -> PartCosts:
    """The costs for one micro-batch, where the first of two blocks is recomputed."""
    batch = {"micro_batch": micro_batch, "global_batch": plan.n_replicas * micro_batch}
    some = unchecked(plan, recompute_blocks=1, **batch)
    return ENGINES.named(plan.engine).part_costs(model, some, device)


class _FirstRank(NamedTuple):
    """The number of each part that the first rank of a pipeline holds.

    `recomputed`: recomputed blocks of each kind in the whole pipeline, for each limit per stage [blocks];
    `n_crossing`: boundaries between stages on different ranks; `n_neighbours`: the stages beside each of the
    first rank's, added up.
    """

    parts: Mapping[Part, int]
    recomputed: Mapping[str, Column]
    n_crossing: int
    n_neighbours: int


class _Instant(NamedTuple):
    """The forward passes of each part that the first rank has saved: [m, 1], or [m, blocks].

    `every_stage`: whether each of its stages has saved one [m].
    """

    saved: Mapping[Part, Column]
    every_stage: NDArray[np.bool_]

    def at(self, place: Column) -> "_Instant":
        """The instant with the numbers of micro-batches at these indices."""
        return _Instant({part: n[place] for part, n in self.saved.items()}, self.every_stage[place])


@dataclass(frozen=True, slots=True)
class _Schedule:
    """A pipeline's schedule; 1F1B for a single rank, where it does not matter."""

    engine: str
    model: Model
    schedule: str
    pp: int
    virtual_stages: int
    layers: tuple[int, ...] | None
    limits: tuple[int, ...]
    """The limits on each stage's recomputed blocks: [blocks]."""


@lru_cache(maxsize=4096)
def _stages(key: _Schedule) -> tuple[Plan, list[tuple[Layers, ...]]]:
    """A plan with the pipeline, and the blocks of each of its stages."""
    plan = unchecked(
        Plan(),
        pp=key.pp,
        virtual_stages=key.virtual_stages,
        schedule=key.schedule,
        layers_per_stage=key.layers,
    )
    n_blocks = key.model.n_blocks
    blocks = (stage_layers(n_blocks, plan, i) for i in range(plan.n_stages))
    return plan, [key.model.layers_in(some) for some in blocks]


def _n_of(kind: str, layers: Iterable[Layers]) -> int:
    """The number of a stage's blocks of a kind."""
    return sum([n for each, n in layers if each == kind])


def _recomputed(kind: str, layers: Sequence[Layers], limits: Sequence[int]) -> Column:
    """The number of a stage's blocks of a kind that are recomputed, the first ones: [blocks]."""
    most = np.array([sum([n for _, n in layers]) if limit == NO_LIMIT else limit for limit in limits])
    found, start = np.zeros(len(limits), np.int64), 0
    for each, n in layers:
        if each == kind:
            found += np.clip(most - start, 0, n)
        start += n
    return found


@lru_cache(maxsize=4096)
def _pipeline(key: _Schedule) -> _FirstRank:
    plan, stages = _stages(key)
    owner = {stage: rank for rank in range(key.pp) for stage in plan.stages_of(rank)}
    own, last, kinds = plan.stages_of(0), plan.n_stages - 1, key.model.kinds
    parts: dict[Part, int] = {"embedding": int(0 in own), "head": int(last in own)}
    different = Counter(stages).items()
    return _FirstRank(
        parts=parts
        | {BlockPart(kind, again=False): sum([_n_of(kind, stages[i]) for i in own]) for kind in kinds},
        recomputed={
            kind: np.sum(
                [times * _recomputed(kind, layers, key.limits) for layers, times in different], axis=0
            )
            for kind in kinds
        },
        n_crossing=sum(owner[i] != owner[i + 1] for i in range(last)),
        n_neighbours=sum((i > 0) + (i < last) for i in own),
    )


@lru_cache(maxsize=4096)
def _under_way(key: _Schedule, ms: tuple[int, ...]) -> tuple[_Instant, _Instant, NDArray[np.bool_]]:
    """Micro-batches in flight on the first rank at two instants; whether there is the second [m]."""
    plan, stages = _stages(key)
    schedule = SCHEDULES.named(key.schedule)
    found = [first_under_way(schedule, key.pp, key.virtual_stages, m) for m in ms]
    first = np.array([before for before, _ in found])
    later = np.array([after or (0,) * len(before) for before, after in found])
    own = plan.stages_of(0)
    ends = {"embedding": 0, "head": plan.n_stages - 1}

    def held(times: Column) -> _Instant:
        parts: dict[Part, Column] = {
            name: (times @ np.array([i == end for i in own]))[:, None] for name, end in ends.items()
        }
        for kind in key.model.kinds:
            again = np.stack([_recomputed(kind, stages[i], key.limits) for i in own])
            blocks = np.array([_n_of(kind, stages[i]) for i in own])
            parts[BlockPart(kind, again=True)] = times @ again
            parts[BlockPart(kind, again=False)] = (times @ blocks)[:, None] - times @ again
        return _Instant(parts, np.all(times > 0, axis=1, keepdims=True)[:, 0])

    return held(first), held(later), np.array([after is not None for _, after in found])


class _Plans:
    """Grids of one kind as arrays over all their cells [cell, 1], and the model's parts for each cell."""

    def __init__(self, model: Model, grids: Sequence[Grid], device: Device) -> None:
        one = grids[0]
        base, structure = one.base, one.structure
        self.model, self.base = model, base
        self.offload, self.several = bool(structure["offload"]), bool(one.cells["dp"][0] > 1)
        n_cells = [grid.shape[0] for grid in grids]

        def each(numbers: Iterable[int]) -> Column:
            return np.repeat(np.fromiter(numbers, np.int64), n_cells)[:, None]

        self.pp = each(grid.structure["pp"] for grid in grids)
        self.virtual_stages = each(grid.structure["virtual_stages"] for grid in grids)
        self.zero = each(grid.structure["zero"] for grid in grids)
        self.single = each(SCHEDULES.named(grid.schedule).single_stage for grid in grids)
        columns = {name: np.concatenate([g.cells[name] for g in grids])[:, None] for name in CELL}
        self.dp, self.replicas, self.micro_batch = (
            columns[name] for name in ("dp", "dp_replicate", "micro_batch")
        )
        self.m = base.global_batch // (self.dp * self.replicas * self.micro_batch)
        own = {
            "pp": self.pp,
            "virtual_stages": self.virtual_stages,
            "zero": self.zero,
            "offload": self.offload,
        }
        self.plan = unchecked(base, **own, **columns)
        recompute = RECOMPUTES[structure["recompute"]]
        limits = tuple(one.recompute_blocks.tolist()) if recompute != "none" else (0,)
        self.schedules = [
            _Schedule(
                base.engine, model, grid.schedule, grid.structure["pp"],
                grid.structure["virtual_stages"], base.layers_per_stage, limits,
            )
            for grid in grids
        ]  # fmt: skip
        self.pipelines = list(map(_pipeline, self.schedules))
        self.starts = np.concatenate([[0], np.cumsum(n_cells)])
        traced = unchecked(
            base, dp=2 if self.several else 1, dp_replicate=1, pp=1, virtual_stages=1, schedule="1f1b",
            zero=3 if structure["zero"] >= 2 else 0, sequence_parallel=bool(structure["sequence_parallel"]),
            recompute=recompute, offload=False, layers_per_stage=None,
        )  # fmt: skip
        tps, place = np.unique(columns["tp"], return_inverse=True)
        found = [parts_of_model(model, unchecked(traced, tp=tp), device) for tp in tps.tolist()]
        self._place = place.ravel()
        self.parts: dict[Part, Costs] = {
            part: Costs(*map(np.array, zip(*[each.costs[part] for each in found], strict=True)))
            for part in found[0].costs
        }
        """By degree of tensor parallelism: elements [tp], others [tp, 3]."""
        self.boundary_bytes = self._with_micro_batch(np.array([each.boundary_bytes for each in found]))
        self.received_bytes = self._with_micro_batch(np.array([each.received_bytes for each in found]))

    def elements(self, part: Part) -> Any:
        """Elements of the weights of a part, as a tensor rank has them."""
        return self.parts[part].elements[self._place, None]

    def of(self, figure: str, part: Part) -> Any:
        """A figure of a part, with a cell's micro-batch."""
        return self._with_micro_batch(getattr(self.parts[part], figure))

    def _with_micro_batch(self, affine: Any) -> Any:
        one, each, once = affine[self._place].T[..., None]
        return Affine(one, each, once)(self.micro_batch)

    @property
    def runs(self) -> list[tuple[int, BlockPart, BlockPart]]:
        """For each kind of block: how many the model has, one that is not recomputed, one that is."""
        return [
            (_n_of(kind, self.model.layers), BlockPart(kind, again=False), BlockPart(kind, again=True))
            for kind in self.model.kinds
        ]

    @property
    def all_elements(self) -> Any:
        """Elements of all weights, as a tensor rank of a single stage has them."""
        return self.elements("embedding") + self.elements("head") + self.all_block_elements

    @property
    def all_block_elements(self) -> Any:
        """Elements of all blocks' weights."""
        return sum([n * self.elements(block) for n, block, _ in self.runs])

    def n_on_first_rank(self, part: Part) -> Any:
        """How many of a part the first rank of each cell's pipeline holds [cell, 1]."""
        return self.of_pipelines(lambda pipeline: pipeline.parts[part])

    def recomputed(self, kind: str) -> Any:
        """How many blocks of a kind each cell's pipeline recomputes [cell, blocks]."""
        return self.of_pipelines(lambda pipeline: pipeline.recomputed[kind])

    def of_pipelines(self, of: Callable[[_FirstRank], Any]) -> Any:
        """A number of each cell's pipeline [cell, 1], or one for each number of recomputed blocks."""
        found = np.array([of(one) for one in self.pipelines]).reshape(len(self.pipelines), -1)
        return np.repeat(found, np.diff(self.starts), axis=0)

    def data_parallelism(self, elements: Any) -> DataParallelism:
        """Lower bounds of what data parallelism sends and holds on a rank whose weights have `elements`."""
        engine, blocks = ENGINES.named(self.base.engine), self.all_block_elements / self.pp
        return engine.data_parallelism(self.plan, elements, blocks, self.single)


Bounds = tuple[Bytes, Seconds]
"""Of each plan of a grid the least bytes and the least seconds: arrays that broadcast to its shape."""


def bounds(
    model: Model, grids: Sequence[Grid], cluster: Cluster, time_model: Roofline
) -> Iterator[tuple[Grid, Bounds]]:
    """Grids, in some order, with the bounds of their plans: 0 where an engine gives none."""
    if grids and not ENGINES.named(grids[0].base.engine).gives_bounds:
        yield from ((grid, (np.zeros(grid.shape), np.zeros(grid.shape))) for grid in grids)
        return
    kinds: dict[Hashable, list[Grid]] = {}
    for grid in grids:
        structure = grid.structure
        same = [structure[name] for name in ("offload", "sequence_parallel", "recompute")]
        data = grid.cells["dp"][0] > 1, structure["zero"] >= 2
        kinds.setdefault((data, *same, grid.recompute_blocks.tobytes()), []).append(grid)
    for some in kinds.values():
        plans = _Plans(model, some, cluster.gpu.device)
        memory, seconds = _least_bytes(plans), _least_s(plans, cluster, time_model)
        for i, grid in enumerate(some):
            own = slice(plans.starts[i], plans.starts[i + 1])
            yield grid, (memory[own], seconds[own])


def _least_s(plans: _Plans, cluster: Cluster, time_model: Roofline) -> Seconds:
    """Seconds that no plan's step is shorter than; infinitely many where a rate is missing."""
    known = _has_rates(plans, cluster)
    if not known.any():
        return np.full((len(known), 1), inf)
    m, pp, v = plans.m, plans.pp, plans.virtual_stages
    flops = sum([n * plans.of("flops", block) for n, block, _ in plans.runs]) + plans.of("flops", "head")
    again: Any = sum([plans.recomputed(block.kind) * plans.of("flops", block) for _, _, block in plans.runs])
    data = plans.data_parallelism(plans.all_elements / pp)
    updated = data.updated_bytes
    work = Work(
        forward_flops=m * flops / pp,
        recomputed_flops=m * again / pp,
        sent=_sent(plans, data),
        reducing=data.reducing,
        moved_bytes=update_bytes(updated, updated, N_MOMENTS[plans.base.optimizer] * updated),
    )
    found = parts_s(work, rates_of(plans.plan, cluster), time_model.efficiency)
    fraction = np.empty(m.shape)
    for i, key in enumerate(plans.schedules):
        own = slice(plans.starts[i], plans.starts[i + 1])
        fraction[own] = SCHEDULES.named(key.schedule).bubble_fraction(pp[own], v[own], m[own])
    total: Any = sum(found.values()) + bubble_s(fraction, busy_s(found))
    return np.where(known, total * (1 - ROUNDING), inf)


def _sent(plans: _Plans, data: DataParallelism) -> dict[Overlap, Any]:
    """Bytes that the average rank sends, in the form of `Work.sent`."""
    axes: list[Axis] = ["pp", "dp_replicate", "dp", "tp", "world", "host"]
    over_tp = plans.of("sent_bytes", "embedding") + plans.of("sent_bytes", "head")
    for n, block, recomputed in plans.runs:
        plain, again = plans.of("sent_bytes", block), plans.of("sent_bytes", recomputed)
        over_tp = over_tp + n * plain + plans.recomputed(block.kind) * (again - plain)
    crossing = plans.of_pipelines(lambda pipeline: pipeline.n_crossing)
    passes: dict[Axis, Any] = {"tp": plans.m * over_tp, "pp": 2 * plans.m * crossing * plans.boundary_bytes}
    waits = {axis: n_bytes / plans.pp for axis, n_bytes in passes.items()}
    every_kind: dict[Overlap, Mapping[Axis, Any]] = {
        "nothing": {**waits, **data.waits},
        "backward": data.reductions,
        "compute": data.gathers,
    }
    return {
        overlap: {axis: np.maximum(0, sent.get(axis, 0.0) - ROUNDED_BYTES) for axis in axes}
        for overlap, sent in every_kind.items()
    }


def _has_rates(plans: _Plans, cluster: Cluster) -> NDArray[np.bool_]:
    """Whether each cell's rates are known, as `Roofline.missing` says of one plan."""
    known = np.ones(plans.m.shape, np.bool_)
    one = unchecked(plans.base, dp=1, dp_replicate=1, tp=1, pp=1, offload=False)
    if plans.offload or Roofline().missing(one, cluster):
        return ~known
    links = cluster.intra_node.bytes_per_s, cluster.inter_node.bytes_per_s
    if not all(links):
        for used, bytes_per_s in zip(links_used(plans.plan, cluster.gpus_per_node), links, strict=True):
            if not bytes_per_s:
                known &= ~used
    return known


def _least_bytes(plans: _Plans) -> Bytes:
    """Bytes that no plan holds less than on its first rank, at the worst of two instants."""
    own = plans.pipelines[0].parts
    elements: Any = sum([plans.n_on_first_rank(part) * plans.elements(part) for part in own])
    data = plans.data_parallelism(elements)
    at_first, later, there = _saved(plans, data.unsharded_bytes)
    held = np.maximum(at_first, np.where(there, later + data.grads_bytes, 0))
    received = plans.m * plans.of_pipelines(lambda one: one.n_neighbours) * plans.received_bytes
    found: Bytes = np.floor((data.states_bytes + received + held) * (1 - ROUNDING))
    return found


def _saved(plans: _Plans, unsharded_bytes: Any) -> tuple[Any, Any, Any]:
    """The bytes saved and gathered in each cell at both instants; whether there is the later one."""
    found = []
    for i, key in enumerate(plans.schedules):
        m = plans.m[plans.starts[i] : plans.starts[i + 1], 0]
        ms = sorted({*m.tolist()})
        first, after, there = _under_way(key, tuple(ms))
        place = np.searchsorted(ms, m)
        found.append((first.at(place), after.at(place), there[place]))
    at_first, later, is_later = zip(*found, strict=True)
    each = {part: plans.of("saved_bytes", part) for part in at_first[0].saved}
    first_bytes, later_bytes = (
        sum([np.concatenate([one.saved[part] for one in instants]) * each[part] for part in each])
        + np.concatenate([one.every_stage for one in instants])[:, None] * unsharded_bytes
        for instants in (at_first, later)
    )
    return first_bytes, later_bytes, np.concatenate(is_later)[:, None]
