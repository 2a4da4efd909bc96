"""Lower bounds on the step time and the memory of every plan of a grid.

Both are arrays over a grid's plans, from what a few micro-batches of one block and of a model's ends take,
which is traced once for each degree of tensor parallelism. They state no rule of their own: traces give
FLOPs, bytes and collectives, `memplan.steptime` turns work into seconds.

Why they hold. Time: a pipeline's slowest rank works no less than the average one, and each part of a step's
time is convex in the work, so the average rank's work takes no longer. Memory: the first rank of a pipeline
holds its weights, its optimizer state and what the forward passes before its first backward pass have saved;
and once all its stages have had a backward pass, gradients too.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from math import inf
from typing import Any, Final, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from memplan.device import Device
from memplan.engines.base import ENGINES
from memplan.hardware import Cluster
from memplan.models import Model
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
"""Whole bytes, or fewer than there are: floats hold 2^53 of them exactly."""

ROUNDED_BYTES: Final = 2
"""Bytes by which what is sent over an axis may be less than in exact arithmetic: only whole ones are."""

ROUNDING: Final = 1e-9
"""Much more than a sum of floats is off by rounding, as a part of it."""


class Affine(NamedTuple):
    """What goes with a micro-batch of n sequences: `one` for a single one, else `each` n times, and `once`.

    A single sequence is apart because PyTorch copies less of it: its heads are in order as they are.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PartsOfModel:
    """What a model takes of one tensor rank: its embedding, one block, its head.

    Elements of weights; FLOPs of a forward pass and, of a block, of those that recomputing does again; bytes
    sent over the tensor axis; bytes that a forward pass leaves for the backward pass, of a block `again` if
    it is recomputed; bytes of what passes from stage to stage.
    """

    embedding_elements: int
    block_elements: int
    head_elements: int
    block_flops: Affine
    head_flops: Affine
    again_flops: Affine
    sent_bytes: Affine
    sent_again_bytes: Affine
    embedding_saved: Affine
    block_saved: Affine
    again_saved: Affine
    head_saved: Affine
    boundary_bytes: Affine


@lru_cache(maxsize=4096)
def parts_of_model(model: Model, plan: Plan, device: Device) -> PartsOfModel:
    """The parts of a model under a plan of one replica and one stage, whatever its micro-batch."""
    one, two, three = (_costs(model, plan, device, n) for n in (1, 2, 3))
    found: dict[str, Any] = {
        name: value if name.endswith("elements") else Affine.through(value, two[name], three[name])
        for name, value in one.items()
    }
    return PartsOfModel(**found)


def _costs(model: Model, plan: Plan, device: Device, micro_batch: int) -> dict[str, int]:
    """What `PartsOfModel` names, for one micro-batch; the first of two blocks is recomputed."""
    batch = {"micro_batch": micro_batch, "global_batch": plan.n_replicas * micro_batch}
    some = unchecked(plan, recompute_blocks=1, **batch)
    return asdict(ENGINES.named(plan.engine).part_costs(model, some, device))


class _FirstRank(NamedTuple):
    """How many embeddings, blocks and heads the first rank of a pipeline holds.

    `n_recomputed`: recomputed blocks of the whole pipeline, for each limit per stage [blocks]; `n_crossing`:
    boundaries between stages that are on different ranks.
    """

    embeddings: int
    blocks: int
    heads: int
    n_recomputed: Column
    n_crossing: int


class _UnderWay(NamedTuple):
    """How many forward passes of each part of the model the first rank has saved at an instant.

    For each number of micro-batches [m]: of an embedding, a block [m, blocks], a recomputed block, a head.
    """

    embeddings: Column
    blocks: Column
    again: Column
    heads: Column


@dataclass(frozen=True, slots=True)
class _Schedule:
    """A pipeline's schedule; of a single rank, where it does not matter, 1F1B."""

    engine: str
    n_layers: int
    schedule: str
    pp: int
    virtual_stages: int
    layers: tuple[int, ...] | None
    limits: tuple[int, ...]
    """The numbers of blocks of each stage that are recomputed at most: [blocks]."""


def _sizes(key: _Schedule) -> tuple[Plan, list[int]]:
    """A plan with the pipeline, and the blocks of each of its stages."""
    plan = unchecked(
        Plan(),
        pp=key.pp,
        virtual_stages=key.virtual_stages,
        schedule=key.schedule,
        layers_per_stage=key.layers,
    )
    return plan, [len(stage_layers(key.n_layers, plan, i)) for i in range(plan.n_stages)]


def _recomputed(n: int, limits: Sequence[int]) -> Column:
    """How many of a stage's n blocks are recomputed: [blocks]."""
    return np.array([n if limit == NO_LIMIT else min(n, limit) for limit in limits])


@lru_cache(maxsize=4096)
def _pipeline(key: _Schedule) -> _FirstRank:
    plan, sizes = _sizes(key)
    owner = {stage: rank for rank in range(key.pp) for stage in plan.stages_of(rank)}
    own, last = plan.stages_of(0), plan.n_stages - 1
    recomputed = [times * _recomputed(n, key.limits) for n, times in Counter(sizes).items()]
    return _FirstRank(
        embeddings=int(0 in own),
        blocks=sum(sizes[i] for i in own),
        heads=int(last in own),
        n_recomputed=np.sum(recomputed, axis=0),
        n_crossing=sum(owner[i] != owner[i + 1] for i in range(last)),
    )


@lru_cache(maxsize=4096)
def _under_way(key: _Schedule, ms: tuple[int, ...]) -> tuple[_UnderWay, _UnderWay, NDArray[np.bool_]]:
    """Before the first rank's first backward pass, and when all its stages had one and another is to come.

    And whether there is such an instant [m].
    """
    plan, sizes = _sizes(key)
    schedule = SCHEDULES.named(key.schedule)
    found = [first_under_way(schedule, key.pp, key.virtual_stages, m) for m in ms]
    first = np.array([before for before, _ in found])
    later = np.array([after or (0,) * len(before) for before, after in found])
    own = plan.stages_of(0)
    blocks = np.array([sizes[i] for i in own])
    again = np.stack([_recomputed(sizes[i], key.limits) for i in own])
    embeddings, heads = (np.array([i == end for i in own]) for end in (0, plan.n_stages - 1))

    def held(times: Column) -> _UnderWay:
        return _UnderWay(
            times @ embeddings, (times @ blocks)[:, None] - times @ again, times @ again, times @ heads
        )

    return held(first), held(later), np.array([after is not None for _, after in found])


class _Plans:
    """Grids of one kind as arrays over all their cells [cell, 1], and the model's parts for each cell."""

    def __init__(self, model: Model, grids: Sequence[Grid], device: Device) -> None:
        one = grids[0]
        base, structure = one.base, one.structure
        self.model, self.base = model, base
        self.offload, self.several = bool(structure["offload"]), bool(one.cells["dp"][0] > 1)
        self.fsdp = structure["zero"] >= 2
        self.ddp = self.several and not self.fsdp
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
        self.plan = unchecked(base, pp=self.pp, virtual_stages=self.virtual_stages, zero=self.zero, **columns)
        recompute = RECOMPUTES[structure["recompute"]]
        limits = tuple(one.recompute_blocks.tolist()) if recompute != "none" else (0,)
        self.schedules = [
            _Schedule(
                base.engine, model.n_layers, grid.schedule, grid.structure["pp"],
                grid.structure["virtual_stages"], base.layers_per_stage, limits,
            )
            for grid in grids
        ]  # fmt: skip
        self.starts = np.concatenate([[0], np.cumsum(n_cells)])
        traced = unchecked(
            base, dp=2 if self.several else 1, dp_replicate=1, pp=1, virtual_stages=1, schedule="1f1b",
            zero=3 if self.fsdp else 0, sequence_parallel=bool(structure["sequence_parallel"]),
            recompute=recompute, offload=False, layers_per_stage=None,
        )  # fmt: skip
        tps, place = np.unique(columns["tp"], return_inverse=True)
        found = [parts_of_model(model, unchecked(traced, tp=tp), device) for tp in tps.tolist()]
        names = PartsOfModel.__dataclass_fields__
        self._parts = {name: np.array([getattr(each, name) for each in found]) for name in names}
        self._place = place.ravel()

    def elements(self, name: str) -> Any:
        """Elements of the weights of a part, as a tensor rank has them."""
        return self._parts[f"{name}_elements"][self._place, None]

    def of(self, name: str) -> Any:
        """What goes with a cell's micro-batch."""
        one, each, once = self._parts[name][self._place].T[..., None]
        return Affine(one, each, once)(self.micro_batch)

    def of_pipelines(self, of: Callable[[_FirstRank], Any]) -> Any:
        """A number of each cell's pipeline [cell, 1], or one for each number of recomputed blocks."""
        found = np.stack([np.atleast_1d(of(_pipeline(key))) for key in self.schedules])
        return np.repeat(found, np.diff(self.starts), axis=0)

    @property
    def itemsize(self) -> int:
        """Bytes of an element of a weight as it is kept."""
        return self.base.formats.stored.itemsize

    @property
    def n_moments(self) -> int:
        """What the optimizer keeps for each weight."""
        return N_MOMENTS[self.base.optimizer]


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
    flops = plans.model.n_layers * plans.of("block_flops") + plans.of("head_flops")
    again = plans.of_pipelines(lambda pipeline: pipeline.n_recomputed) * plans.of("again_flops")
    work = Work(
        forward_flops=m * flops / pp,
        recomputed_flops=m * again / pp,
        sent=_sent(plans),
        reducing=1 / m if plans.ddp else np.where(pp == 1, 1.0, 0.0),
        moved_bytes=_moved_bytes(plans),
    )
    found = parts_s(work, rates_of(plans.plan, cluster), time_model.efficiency)
    fraction = np.empty(m.shape)
    for i, key in enumerate(plans.schedules):
        own = slice(plans.starts[i], plans.starts[i + 1])
        fraction[own] = SCHEDULES.named(key.schedule).bubble_fraction(pp[own], v[own], m[own])
    total: Any = sum(found.values()) + bubble_s(fraction, busy_s(found))
    return np.where(known, total * (1 - ROUNDING), inf)


def _sent(plans: _Plans) -> dict[Overlap, Any]:
    """Bytes that the average rank sends, as `Work.sent`."""
    axes: list[Axis] = ["pp", "dp_replicate", "dp", "tp", "world", "host"]
    waits, reductions, gathers = ({axis: cast(Any, 0.0) for axis in axes} for _ in range(3))
    pp, m, base, dp = plans.pp, plans.m, plans.base, plans.dp
    again = plans.of_pipelines(lambda pipeline: pipeline.n_recomputed)
    waits["tp"] = m * (plans.of("sent_bytes") + again * plans.of("sent_again_bytes")) / pp
    crossing = plans.of_pipelines(lambda pipeline: pipeline.n_crossing)
    waits["pp"] = 2 * m * crossing * plans.of("boundary_bytes") / pp
    blocks = plans.model.n_layers * plans.elements("block") / pp
    every = blocks + (plans.elements("embedding") + plans.elements("head")) / pp
    part = (dp - 1) / dp
    if plans.ddp:
        if base.ddp_comm_hook == "none":
            reductions["dp"] = 2 * every * plans.itemsize * part
        waits["dp"] = (plans.zero == 1) * every * plans.itemsize * part
    if plans.fsdp:
        narrow, wide = base.formats.gather.itemsize, base.formats.reduce.itemsize
        reshards = (plans.zero == 3) & (base.fsdp_units != "model")
        once, again = np.where(pp == 1, m, 1), np.where((pp == 1) | (plans.single > 0), m, 0)
        gathers["dp"] = (once * every + reshards * again * blocks) * narrow * part
        reduced = once * every * wide
        reductions["dp"] = reduced * part
        reductions["dp_replicate"] = 2 * reduced / dp * (plans.replicas - 1) / plans.replicas
    every_kind: dict[Overlap, Any] = {"nothing": waits, "backward": reductions, "compute": gathers}
    return {
        overlap: {axis: np.maximum(0, n_bytes - ROUNDED_BYTES) for axis, n_bytes in sent.items()}
        for overlap, sent in every_kind.items()
    }


def _moved_bytes(plans: _Plans) -> Any:
    """Bytes that the average rank's optimizer moves."""
    every = plans.elements("embedding") + plans.elements("head")
    every = every + plans.model.n_layers * plans.elements("block")
    kept = every * plans.itemsize / plans.pp / (plans.dp if plans.fsdp else 1)
    share = np.where(plans.zero == 1, 1 / plans.dp, 1)
    return update_bytes(share * kept, share * kept, share * plans.n_moments * kept)


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
    at_first, later, there = (np.concatenate(found) for found in zip(*_saved(plans), strict=True))
    elements = (
        plans.of_pipelines(lambda pipeline: pipeline.embeddings) * plans.elements("embedding")
        + plans.of_pipelines(lambda pipeline: pipeline.blocks) * plans.elements("block")
        + plans.of_pipelines(lambda pipeline: pipeline.heads) * plans.elements("head")
    )
    held = np.maximum(at_first, np.where(there, later + _grads_bytes(plans, elements), 0))
    found: Bytes = np.floor((_states_bytes(plans, elements) + held) * (1 - ROUNDING))
    return found


def _saved(plans: _Plans) -> Iterator[tuple[Any, Any, Any]]:
    """Of each grid's cells what is saved at both instants, and whether there is the later one."""
    names = "embedding_saved", "block_saved", "again_saved", "head_saved"
    each = [plans.of(name) for name in names]
    for i, key in enumerate(plans.schedules):
        own = slice(plans.starts[i], plans.starts[i + 1])
        ms, place = np.unique(plans.m[own], return_inverse=True)
        *instants, there = _under_way(key, tuple(ms.tolist()))
        place = place.ravel()
        first, later = (
            sum(n.reshape(len(ms), -1)[place] * saved[own] for n, saved in zip(instant, each, strict=True))
            for instant in instants
        )
        yield first, later, there[place, None]


def _states_bytes(plans: _Plans, elements: Any) -> Any:
    """Weights, what DDP keeps beside them, and optimizer state; offloaded ones are the host's."""
    if plans.offload:
        return 0.0
    kept = elements * plans.itemsize
    if plans.fsdp:
        return (1 + plans.n_moments) * kept / plans.dp
    moments = plans.n_moments * kept / np.where(plans.zero == 1, plans.dp, 1)
    return (2 if plans.ddp else 1) * kept + moments


def _grads_bytes(plans: _Plans, elements: Any) -> Any:
    """Gradients that the device has once all stages have some, and does not keep from step to step."""
    if not plans.base.set_to_none or (plans.ddp and plans.base.gradient_as_bucket_view):
        return 0.0
    formats = plans.base.formats
    kept = elements * formats.accumulate.itemsize
    if not plans.fsdp:
        return kept
    summed = elements * formats.reduce.itemsize
    return np.where(plans.pp > 1, summed, 0.0 if plans.offload else kept / plans.dp)
