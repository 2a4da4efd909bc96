"""Lower bounds on the step time and the memory of every plan of a grid.

Both are arrays over a grid's plans, computed from the costs of one block and of a model's ends for a few
micro-batch sizes, traced once for each degree of tensor parallelism. They state no rule of their own: traces
give operations, bytes and collectives, `memplan.time.step` says what they cost at least.

Why they hold. Time: a pipeline's slowest rank works no less than the average one, and what traffic adds is
convex in the work. The last rank begins once a micro-batch has passed the stages before its first one; after
its last backward pass these have theirs to come, and the first rank its update. So has the last stage, before
and after its own passes. Memory: the first rank of a
pipeline holds its weights, its optimizer state, its receive buffers and what the forward passes before its
first backward pass have saved; and once all its stages have had a backward pass, gradients too. When a
stage's last backward pass ends, FSDP2 in a pipeline holds the stage's weights and gradients unsharded.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial, reduce
from itertools import groupby
from math import inf
from operator import itemgetter
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memplan.device import Device
from memplan.engines.base import ENGINES, Costs, DataParallelism, PartCosts
from memplan.hardware import Cluster
from memplan.mesh import DIVIDING, HOST, Group, with_several
from memplan.models import Layers, Model, TracedModel, divided, of_sizes
from memplan.orders import Stages
from memplan.plan import RECOMPUTES, Plan, stage_layers, unchecked
from memplan.schedules import SCHEDULES, Schedule, first_under_way
from memplan.search.plans import NO_LIMIT, Column, Grid, number_of, value_of
from memplan.time.prices import Prices, Quantity, links_used
from memplan.time.step import Priced, update_bytes

Seconds = NDArray[np.float64]
Bytes = NDArray[np.float64]
"""Bytes as floats, which hold whole numbers up to 2^53 exactly."""

ROUNDED_BYTES: Final = 2
"""Bytes by which an axis's traffic may be below the exact value, as only whole bytes are sent."""

ROUNDING: Final = 1e-9
"""A relative error much larger than that of a sum of floats."""


class BlockPart(NamedTuple):
    """A block of a kind as a part of a model; `again`: its recomputation, in addition to the block."""

    kind: str
    again: bool


Part = str | BlockPart
"""A part of a model: one of `ENDS`, a block of a kind, or the recomputation of one."""

ENDS: Final = ("embedding", "head", "output")
"""The embedding on the first stage, the head on the last one, and the output that all others send."""


def _costs_of(part: Part, costs: PartCosts) -> Costs:
    if isinstance(part, BlockPart):
        return (costs.recomputed if part.again else costs.blocks)[part.kind]
    found: Costs = getattr(costs, part)
    return found


@lru_cache(maxsize=4096)
def _traced(model: Model, plan: Plan, device: Device) -> list[PartCosts]:
    """The costs of a model's parts for micro-batches of one, two and three sequences.

    The plan has one replica and one stage; the first of two blocks is recomputed.
    """
    part_costs, sizes = ENGINES.named(plan.engine).part_costs, (1, 2, 3)
    plans = [unchecked(plan, recompute_blocks=1, micro_batch=n, global_batch=n) for n in sizes]
    return [part_costs(model, each, device) for each in plans]


@dataclass(frozen=True, slots=True, eq=False)
class _Pipeline:
    """A pipeline's schedule, and how many of each part of the model its stages have.

    `numbers`: the number of a part on each stage, by the limit on recomputed blocks [stage, limit];
    `owners`: each stage's rank.
    """

    schedule: Schedule
    plan: Plan
    numbers: Mapping[Part, Column]
    owners: Sequence[int]

    @property
    def first(self) -> Sequence[int]:
        """The first rank's stages."""
        return self.plan.stages_of(0)

    @property
    def middle(self) -> Sequence[int]:
        """The stages of the rank in the middle, whose blocks are no fewer than most ranks'."""
        return self.plan.stages_of(self.plan.pp // 2)

    @property
    def last(self) -> Sequence[int]:
        """The last rank's stages."""
        return self.plan.stages_of(self.plan.pp - 1)

    @property
    def n_neighbours(self) -> int:
        """The stages beside each of the first rank's, added up."""
        return sum((stage > 0) + (stage < self.plan.n_stages - 1) for stage in self.first)

    def n_on(self, stages: Sequence[int], part: Part) -> Column:
        """The number of a part on some stages [limit]."""
        found: Column = self.numbers[part][np.array(stages, np.int64)].sum(axis=0)
        return found

    def n_crossing(self, stage: int) -> int:
        """The boundaries before a stage that are between different ranks."""
        return sum(self.owners[i] != self.owners[i + 1] for i in range(stage))


@lru_cache(maxsize=4096)
def _pipeline(
    model: Model, schedule: str, pp: int, v: int, layers: tuple[int, ...] | None, limits: tuple[int, ...]
) -> _Pipeline:
    """A pipeline of `v` stages on each rank, under these limits on each stage's recomputed blocks."""
    plan = unchecked(Plan(), pp=pp, virtual_stages=v, schedule=schedule, layers_per_stage=layers)
    stages = [model.layers_in(stage_layers(model.n_blocks, plan, i)) for i in range(plan.n_stages)]
    n = len(stages)
    places = np.arange(n)[:, None]
    theirs = places == 0, places == n - 1, places < n - 1
    numbers: dict[Part, Column] = {end: own.astype(np.int64) for end, own in zip(ENDS, theirs, strict=True)}
    for kind in model.kinds:
        again = {layers: _recomputed(kind, layers, limits) for layers in {*stages}}
        numbers[BlockPart(kind, again=False)] = np.array([[_n_of(kind, layers)] for layers in stages])
        numbers[BlockPart(kind, again=True)] = np.array([again[layers] for layers in stages])
    owner = {stage: rank for rank in range(pp) for stage in plan.stages_of(rank)}
    return _Pipeline(SCHEDULES.named(schedule), plan, numbers, [owner[i] for i in range(n)])


def _n_of(kind: str, layers: Iterable[Layers]) -> int:
    """The number of a stage's blocks of a kind."""
    return sum([n for each, n in layers if each == kind])


def _recomputed(kind: str, layers: Sequence[Layers], limits: Sequence[int]) -> Column:
    """The number of a stage's blocks of a kind that are recomputed, the first ones: [limit]."""
    most = np.array([sum([n for _, n in layers]) if limit == NO_LIMIT else limit for limit in limits])
    found, start = np.zeros(len(limits), np.int64), 0
    for each, n in layers:
        if each == kind:
            found += np.clip(most - start, 0, n)
        start += n
    return found


_StagesOf = Callable[[_Pipeline], Sequence[int]]
"""Chooses stages of a pipeline."""


class _Instant(NamedTuple):
    """How many forward passes of each part a pipeline's first rank has saved at an instant [m, limit].

    `every_stage`: whether each of its stages has saved one; `there`: whether a step has the instant [m, 1].
    """

    saved: Mapping[Part, Column]
    every_stage: NDArray[np.bool_]
    there: NDArray[np.bool_]

    @classmethod
    def joined(cls, found: Sequence["_Instant"]) -> "_Instant":
        """The instants of several pipelines, one after the other."""
        return cls(
            {part: np.concatenate([one.saved[part] for one in found]) for part in found[0].saved},
            np.concatenate([one.every_stage for one in found]),
            np.concatenate([one.there for one in found]),
        )


@lru_cache(maxsize=4096)
def _instants(pipeline: _Pipeline, ms: tuple[int, ...]) -> tuple[_Instant, _Instant]:
    """The instant before the first backward pass; the one once every stage has had one."""
    pp, v, own = pipeline.plan.pp, pipeline.plan.virtual_stages, np.array(pipeline.first)
    found = [first_under_way(pipeline.schedule, pp, v, m) for m in ms]

    def held(under_way: Sequence[Stages | None]) -> _Instant:
        times = np.array([stages or (0,) * v for stages in under_way])
        return _Instant(
            {part: times @ n[own] for part, n in pipeline.numbers.items()},
            np.all(times > 0, axis=1, keepdims=True),
            np.array([[stages is not None] for stages in under_way]),
        )

    return held([before for before, _ in found]), held([after for _, after in found])


class _Plans:
    """A grid's plans as arrays over its cells [cell, 1], and the model's parts for each cell."""

    def __init__(self, model: Model, grid: Grid, device: Device) -> None:
        base = grid.base
        self.model, self.base = model, base
        columns = {name: column[:, None] for name, column in grid.cells.items()}
        self.offload = bool(columns["offload"][0, 0])
        self.plan = unchecked(base, **columns | {"offload": self.offload})
        self.pp, self.virtual_stages = columns["pp"], columns["virtual_stages"]
        self.micro_batch = columns["micro_batch"]
        self.m: Any = self.plan.n_micro_batches
        recompute = RECOMPUTES[columns["recompute"][0, 0]]
        limits = tuple(grid.recompute_blocks.tolist()) if recompute != "none" else (0,)
        one_rank = number_of("schedule", "1f1b")  # a single rank has no schedule
        self.schedule = np.where(self.pp > 1, columns["schedule"], one_rank)
        structures, self._pipeline = _numbered(self.schedule, self.pp, self.virtual_stages)
        self.pipelines = [
            _pipeline(model, value_of("schedule", number), pp, v, base.layers_per_stage, limits)
            for number, pp, v in structures
        ]
        self.single = self.of_pipelines(lambda pipeline: pipeline.schedule.single_stage)
        traced = unchecked(
            base, dp=1, dp_replicate=1, pp=1, virtual_stages=1, schedule="1f1b",
            zero=3 if columns["zero"][0, 0] >= 2 else 0,
            sequence_parallel=bool(columns["sequence_parallel"][0, 0]),
            recompute=recompute, offload=False, layers_per_stage=None,
        )  # fmt: skip
        axes = (*DIVIDING, *ENGINES.named(base.engine).other_axes)
        parts, self._part = _numbered(*[columns[axis] for axis in axes])
        degrees = [dict(zip(axes, each, strict=True)) for each in parts]
        self._costs = [_traced(model, unchecked(traced, **each), device) for each in degrees]

    def elements(self, part: Part) -> Any:
        """Elements of the weights of a part, as a tensor rank has them."""
        return np.array([_costs_of(part, one).elements for one, *_ in self._costs])[self._part, None]

    def of(self, figure: str, part: Part) -> Any:
        """A figure of a part, or of a recomputed block, with a cell's micro-batch."""
        return self.for_micro_batch(lambda costs: getattr(_costs_of(part, costs), figure))

    def saved_bytes(self, part: Part) -> Any:
        """What a part saves for its backward pass; a recomputation: what a block saves more because of it."""
        saved_bytes = self.of("saved_bytes", part)
        if isinstance(part, BlockPart) and part.again:
            saved_bytes = saved_bytes - self.of("saved_bytes", part._replace(again=False))
        return saved_bytes

    def computed_s(self, part: Part, prices: Prices) -> Any:
        """The least seconds of a part's forward pass, or of what is recomputed of it."""
        return self.for_micro_batch(
            lambda costs: sum([prices.operation_s(e) for e in _costs_of(part, costs).computed])
        )

    def backward_s(self, part: Part, prices: Prices) -> Any:
        """The least seconds of a part's backward pass without recomputation."""

        def seconds(costs: PartCosts) -> float:
            return sum([prices.operation_s(e) for e in _costs_of(part, costs).backward])

        return self.for_micro_batch(seconds)

    def for_micro_batch(self, figure: Callable[[PartCosts], float]) -> Any:
        """A figure at each cell's micro-batch: on a line through its values for two and for three.

        So it is no more than the figure, where that is convex. A single sequence has a value of its own
        because PyTorch copies less of it: its heads are contiguous.
        """
        traced = np.array([[figure(costs) for costs in each] for each in self._costs])
        one, two, three = traced[self._part].T[..., None]
        return np.where(self.micro_batch == 1, one, two + (three - two) * (self.micro_batch - 2))

    @property
    def runs(self) -> list[tuple[int, BlockPart, BlockPart]]:
        """For each kind of block: how many the model has, one of them, its recomputation."""
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

    @property
    def elements_on_first_rank(self) -> Any:
        """Elements of the weights of the first rank of each cell's pipeline, as a tensor rank has them."""
        return self.elements_on(lambda pipeline: pipeline.first)

    def elements_on(self, stages_of: _StagesOf) -> Any:
        """Elements of the weights of some stages of each cell's pipeline, as a tensor rank has them."""
        own: list[Part] = [*ENDS, *(block for _, block, _ in self.runs)]
        held = self.numbers(stages_of)
        return sum([held[part] * self.elements(part) for part in own])

    def numbers(self, stages_of: _StagesOf) -> dict[Part, Any]:
        """How many of each part some stages of each cell's pipeline have [cell, limit]."""

        def number(part: Part, pipeline: _Pipeline) -> Column:
            return pipeline.n_on(stages_of(pipeline), part)

        return {part: self.of_pipelines(partial(number, part)) for part in self.pipelines[0].numbers}

    @property
    def boundary_bytes(self) -> Any:
        """What one stage sends to the next for a micro-batch."""
        return self.for_micro_batch(lambda costs: costs.boundary_bytes)

    def of_pipelines(self, of: Callable[[_Pipeline], Any]) -> Any:
        """A number of each cell's pipeline [cell, 1], or one for each limit."""
        return np.array([of(one) for one in self.pipelines]).reshape(len(self.pipelines), -1)[self._pipeline]

    def instants(self) -> tuple[list[_Instant], Column]:
        """Both instants, for each pipeline and number of micro-batches, and each cell's place among these."""
        pairs, place = _numbered(self._pipeline[:, None], self.m)
        ms = [tuple([m for _, m in own]) for _, own in groupby(pairs, key=itemgetter(0))]
        each = [_instants(one, some) for one, some in zip(self.pipelines, ms, strict=True)]
        return [_Instant.joined(found) for found in zip(*each, strict=True)], place

    def data_parallelism(self, elements: Any) -> DataParallelism:
        """Lower bounds of what data parallelism sends and holds on a rank whose weights have `elements`."""
        engine, blocks = ENGINES.named(self.base.engine), self.all_block_elements / self.pp
        return engine.data_parallelism(self.plan, elements, blocks, self.single)


Bounds = tuple[Bytes, Seconds]
"""Lower bounds of each plan's bytes and seconds in a grid: arrays that broadcast to its shape."""


def bounds(model: Model, grid: Grid, cluster: Cluster, time_model: Priced) -> Bounds:
    """The bounds of a grid's plans: 0 where an engine gives none, or a model is of one micro-batch."""
    least_bytes, least_s = np.zeros(grid.shape), np.zeros(grid.shape)
    engine = ENGINES.named(grid.base.engine)
    if engine.gives_bounds:
        for own, cells in _by_division(engine.built(model), grid, cluster.gpu.device):
            if isinstance(own, TracedModel) and own.of_batch:  # other micro-batches have traces of their own
                continue
            plans = _Plans(own, grid[cells], cluster.gpu.device)
            least_bytes[cells] = _least_bytes(plans)
            least_s[cells] = _least_s(plans, cluster, time_model)
    return least_bytes, least_s


def _by_division(model: Model, grid: Grid, device: Device) -> Iterator[tuple[Model, NDArray[np.bool_]]]:
    """For each mesh that divides the model: the model so divided, and a mask of the cells with it."""
    degrees = np.stack([grid.cells[axis] for axis in DIVIDING])
    if model.divides_itself and not grid.base.adapters:
        yield model, np.ones(degrees.shape[1:], np.bool_)
        return
    for each in np.unique(degrees, axis=1).T:
        mesh = with_several(**dict(zip(DIVIDING, each.tolist(), strict=True)))
        own = divided(model, mesh, device.type, grid.base.precision, grid.base.adapters)
        own = of_sizes(own, grid.base.micro_batch, grid.base.seq_len, device.type, grid.base.precision)
        yield own, (degrees == each[:, None]).all(axis=0)


def _numbered(*columns: Column) -> tuple[list[tuple[int, ...]], Column]:
    """The different rows of columns [cell, 1], sorted, and the number of each cell's row among them."""
    sizes = [int(column.max()) + 1 for column in columns]
    rows, place = np.unique(np.ravel_multi_index(columns, sizes), return_inverse=True)
    different = [row.tolist() for row in np.unravel_index(rows, sizes)]
    return list(zip(*different, strict=True)), place.ravel()


def _least_s(plans: _Plans, cluster: Cluster, time_model: Priced) -> Seconds:
    """A lower bound of each plan's step time in seconds; infinite where a rate is missing."""
    known = _has_rates(plans, cluster, time_model)
    if not known.any():
        return np.full((len(known), 1), inf)
    prices = time_model.prices(plans.plan, cluster, least=True)
    parts = dict(_least_of_parts(plans, prices))
    found = np.maximum(_average_s(plans, parts, prices), _ways_s(plans, parts, prices))
    return np.where(known, found * (1 - ROUNDING), inf)


class _Least(NamedTuple):
    """The least seconds of a part's passes of one micro-batch: arrays over cells.

    `forward_s`: of what the forward pass computes; `rest_s`: of the backward pass with what it recomputes,
    and of the traffic over the tensor axis in both.
    """

    forward_s: Any
    rest_s: Any


def _least_of_parts(plans: _Plans, prices: Prices) -> Iterator[tuple[Part, _Least]]:
    def sent_s(part: Part) -> Any:
        return _sent_s(prices, "tp", plans.of("sent_bytes", part))

    def least(part: Part) -> _Least:
        return _Least(plans.computed_s(part, prices), plans.backward_s(part, prices) + sent_s(part))

    for end in ENDS:
        yield end, least(end)
    for _, block, again in plans.runs:
        yield block, least(block)
        yield again, _Least(0.0, plans.computed_s(again, prices) + sent_s(again) - sent_s(block))


def _added(parts: Mapping[Part, _Least], numbers: Mapping[Part, Any]) -> _Least:
    """The sum of the parts' seconds, each part taken `numbers[part]` times."""
    columns = zip(*[[n * each for each in parts[part]] for part, n in numbers.items()], strict=True)
    return _Least(*map(sum, columns))


def _sent_s(prices: Prices, group: Group, n_bytes: Any) -> Any:
    return prices.least_sent_s(group, np.maximum(0, n_bytes - ROUNDED_BYTES))


def _average_s(plans: _Plans, parts: Mapping[Part, _Least], prices: Prices) -> Any:
    """The least seconds in which the average rank does its work, if it never waits for another stage.

    Reductions are hidden by at most the passes that reduce, and all traffic of a group by what the rank does.
    """
    m, pp = plans.m, plans.pp
    whole = _added(parts, plans.numbers(lambda pipeline: range(pipeline.plan.n_stages)))
    data = plans.data_parallelism(plans.all_elements / pp)
    crossing = plans.of_pipelines(lambda pipeline: pipeline.n_crossing(pipeline.plan.n_stages - 1))
    waited = np.where(_overlaps_sends(plans), 0, 2 * m * crossing)
    sent_s = _sent_s(prices, "pp", waited * plans.boundary_bytes / pp)
    waits_s: Any = sum([_sent_s(prices, group, n) for group, n in data.waits.items() if group != HOST])
    busy_s = m * sum(whole) / pp + sent_s + waits_s
    hidden_s = data.reducing * m * whole.rest_s / pp
    beside_s: Any = 0.0
    for group in {**data.reductions, **data.gathers}:
        if group != HOST:
            reductions_s, gathers_s = (
                _sent_s(prices, group, sent.get(group, 0)) for sent in (data.reductions, data.gathers)
            )
            longer_s = np.maximum(reductions_s - hidden_s, reductions_s + gathers_s - busy_s)
            beside_s = np.maximum(beside_s, longer_s)
    return busy_s + beside_s + _update_s(plans, data, prices)


def _ways_s(plans: _Plans, parts: Mapping[Part, _Least], prices: Prices) -> Any:
    """The least seconds of the way to the last rank or stage, of all passes there, and of the way back.

    A schedule that splits backward passes may end with weights' gradients, on no way back. Otherwise the
    first rank ends with its update and, where it has one stage, with its gradients' reduction before that,
    beside its last backward pass.
    """
    found = _way_s(plans, parts, prices, lambda pipeline: pipeline.last)
    if np.any(plans.virtual_stages > 1):
        to_last_stage_s = _way_s(plans, parts, prices, lambda pipeline: [pipeline.plan.n_stages - 1])
        found = np.maximum(found, to_last_stage_s)
    data = plans.data_parallelism(plans.elements_on_first_rank)
    reductions_s: Any = 0.0
    for group, n_bytes in data.reductions.items():
        if group != HOST:
            reductions_s = np.maximum(reductions_s, _sent_s(prices, group, n_bytes))
    first = _added(parts, plans.numbers(lambda pipeline: pipeline.first))
    beside_s = np.maximum(0.0, reductions_s - first.rest_s)
    ends_s = np.where(plans.virtual_stages == 1, beside_s, 0.0) + _update_s(plans, data, prices)
    return found + np.where((plans.pp > 1) & np.logical_not(_splits(plans)), ends_s, 0.0)


def _way_s(plans: _Plans, parts: Mapping[Part, _Least], prices: Prices, stages_of: _StagesOf) -> Any:
    """The least seconds of the way to a rank's stages, of all passes there, and of the way back."""
    m, splits = plans.m, _splits(plans)
    there = _added(parts, plans.numbers(stages_of))
    before = _added(parts, plans.numbers(lambda pipeline: range(min(stages_of(pipeline)))))
    crossing = plans.of_pipelines(lambda pipeline: pipeline.n_crossing(min(stages_of(pipeline))))
    there_and_back = crossing + np.where(_overlaps_sends(plans), 0, m) + np.where(splits, 0, crossing - 1)
    n_sends = np.where(crossing > 0, there_and_back, 0)
    sent_s = _sent_s(prices, "pp", n_sends * plans.boundary_bytes)
    return m * sum(there) + np.where(splits, before.forward_s, sum(before)) + sent_s


def _splits(plans: _Plans) -> Any:
    """Whether each cell's schedule splits backward passes."""
    return plans.of_pipelines(lambda pipeline: pipeline.schedule.splits_backward)


def _overlaps_sends(plans: _Plans) -> Any:
    """Whether the stages of each cell compute on while they send."""
    return ENGINES.named(plans.base.engine).overlaps_sends & (plans.virtual_stages > 1)


def _update_s(plans: _Plans, data: DataParallelism, prices: Prices) -> Quantity:
    updated = data.updated_bytes
    return prices.moved_s(update_bytes(updated, updated, plans.base.kept.least_share * updated))


def _has_rates(plans: _Plans, cluster: Cluster, time_model: Priced) -> NDArray[np.bool_]:
    """Whether each cell's rates are known, as `Priced.missing` says of one plan."""
    known = np.ones(plans.m.shape, np.bool_)
    one = unchecked(plans.base, dp=1, dp_replicate=1, tp=1, pp=1, cp=1, ep=1, offload=False)
    if plans.offload or time_model.missing(one, cluster):
        return ~known
    links = cluster.intra_node.bytes_per_s, cluster.inter_node.bytes_per_s
    if not all(links):
        for used, bytes_per_s in zip(links_used(plans.plan, cluster.gpus_per_node), links, strict=True):
            if not bytes_per_s:
                known &= ~used
    return known


def _least_bytes(plans: _Plans) -> Bytes:
    """A lower bound of each plan's peak: the worst of three instants of the first rank, one of another."""
    elements = plans.elements_on_first_rank
    data = plans.data_parallelism(elements)
    saved_bytes = {part: plans.saved_bytes(part) for part in plans.pipelines[0].numbers}
    instants, place = plans.instants()
    at_first, later = (
        sum([n[place] * saved_bytes[part] for part, n in instant.saved.items()])
        + instant.every_stage[place] * data.unsharded_bytes
        for instant in instants
    )
    with_grads = np.where(instants[1].there[place], later + data.grads_bytes, at_first)
    reduced = with_grads + _reduced_bytes(plans, data, saved_bytes)
    held = reduce(np.maximum, [at_first, with_grads, reduced])
    received_bytes = plans.for_micro_batch(lambda costs: costs.received_bytes)
    received = plans.m * plans.of_pipelines(lambda one: one.n_neighbours) * received_bytes
    first = data.states_bytes + received + held
    found: Bytes = np.floor(np.maximum(first, _ended_bytes(plans, data.ended_bytes)) * (1 - ROUNDING))
    return found


def _ended_bytes(plans: _Plans, each: Any) -> Any:
    """What the rank in the middle of a pipeline holds when its first stage's last backward pass has ended.

    `each`: the bytes for each element of that stage (`DataParallelism.ended_bytes`).
    """
    if not np.any(each):
        return 0.0
    data = plans.data_parallelism(plans.elements_on(lambda pipeline: pipeline.middle))
    elements = plans.elements_on(lambda pipeline: pipeline.middle[:1])
    return np.where(each > 0, data.states_bytes + each * elements, 0.0)


def _reduced_bytes(plans: _Plans, data: DataParallelism, saved_bytes: Mapping[Part, Any]) -> Any:
    """What a single stage holds more when its last block's gradients are reduced than when it has saved all.

    What the head and that block have saved is gone. There are several blocks, or nothing is said.
    """
    if plans.model.n_blocks < 2:
        return -inf
    blocks = [block for _, block, _ in plans.runs]
    least = reduce(np.minimum, [plans.elements(block) for block in blocks])
    own = [saved_bytes[block] + np.maximum(saved_bytes[block._replace(again=True)], 0) for block in blocks]
    freed = saved_bytes["head"] + reduce(np.maximum, own)
    return np.where(data.reduced_bytes > 0, data.reduced_bytes * least - freed, -inf)
