"""How long a step of each of many plans takes, by the formulas that time one."""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial
from math import inf
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memplan.engines.torch import RankStages, Stage
from memplan.estimate import device_of, ranks_of
from memplan.hardware import Cluster
from memplan.many import many
from memplan.models import Model
from memplan.plan import RECOMPUTES, SINGLE_STAGE_SCHEDULES, Axis, Plan, Rank, Schedule
from memplan.search.cells import Asked, Table
from memplan.search.evaluate import Evaluation
from memplan.search.kinds import RankPlaces, alike, all_blocks_of, mode_of, plan_of, ranks_of_pipeline
from memplan.search.plans import NO_LIMIT, Column, Grid, Plans, grids_of
from memplan.search.ranks import of_micro_batches, taken_apart
from memplan.search.stages import Ends, Part, optimizer_sees, with_values
from memplan.steptime import (
    Quantity,
    RankWork,
    Rates,
    Roofline,
    Work,
    added,
    bubble_fraction,
    bubble_s,
    busy_s,
    compute_s,
    forward_flops,
    links_used,
    model_flops,
    parts_s,
    rates_of,
    recomputed_flops,
    sent_bytes,
    update_bytes,
    updated_share,
    waited_s,
)
from memplan.timeline import Bytes
from memplan.traffic import Purpose, Rounds, collectives, ranks_along, rounds_of, wire_bytes

Seconds = NDArray[np.float64]

WHAT: Final = ("fixed", *Rounds._fields, "activations", "activation gradients")
"""What a stage computes and sends goes with: its rounds, or what goes to other ranks."""

MOST: Final = 2.0**61
"""What a count must stay below for thrice it to be a 64-bit integer."""


def step_s(model: Model, plans: Plans, cluster: Cluster) -> Seconds:
    """Seconds of each plan's step, as `Estimate.step_s`; infinitely many where a rate is missing."""
    seconds = np.full(len(plans), inf)
    for some in alike(grids_of(plans)):
        evaluation = Evaluation(model, [grid for grid, _ in some], device_of(cluster))
        for i, (_, places) in enumerate(some):
            seconds[places] = times(evaluation, i, cluster)[:, 0]
    return seconds


ROUNDING: Final = 1e-9
"""Much more than a step's time is off by rounding, as a part of it."""


def least_s(model: Model, grid: Grid, cluster: Cluster) -> Seconds:
    """Seconds that no step of each cell is shorter than; as `step_s`.

    Ranks are busy for as long as their products and the traffic of the tensor axis take, on average; the
    slowest is no less busy, and waits no less for the others.
    """
    structure, cells = grid.structure, grid.cells
    pp, v = structure["pp"], structure["virtual_stages"]
    known = _has_rates(grid, cluster)
    if not known.any():
        return np.full(grid.shape[0], inf)
    tps, place = np.unique(cells["tp"], return_inverse=True)
    once, again = _sequences_s(model, _whole(grid), tuple(tps.tolist()), cluster)[:, place.ravel()]
    n_again = 0
    if RECOMPUTES[structure["recompute"]] != "none":
        limits = grid.recompute_blocks
        limit = int(limits.min(where=limits != NO_LIMIT, initial=model.n_layers))
        n_again = _n_recomputed(model.n_layers, grid.schedule, pp, v, limit)
    n_sequences = grid.base.global_batch // (cells["dp"] * cells["dp_replicate"])
    busy_s = n_sequences * (once + again * n_again) / pp
    found = busy_s + bubble_s(bubble_fraction(grid.schedule, pp, v, grid.n_micro_batches), busy_s)
    return np.where(known, found * (1 - ROUNDING), inf)


@lru_cache(maxsize=4096)
def _n_recomputed(n_layers: int, schedule: Schedule, pp: int, v: int, limit: int) -> int:
    """Blocks of a pipeline that are recomputed, at most so many of each stage."""
    ranks = ranks_of_pipeline(n_layers, schedule, pp, v)
    return sum([min(n, limit) for rank in ranks for _, n in rank.stages])


def _whole(grid: Grid) -> Plan:
    """A plan of the grid's structure, but for its pipeline: one rank with all of the model."""
    sharded = mode_of(grid) >= 2
    return with_values(plan_of(grid), dp=2 if sharded else 1, pp=1, zero=3 if sharded else 0, offload=False)


@lru_cache(maxsize=1024)
def _sequences_s(model: Model, plan: Plan, tps: tuple[int, ...], cluster: Cluster) -> Seconds:
    """Seconds that one sequence more takes of tensor axes, all of the model; and a block of it again."""
    once, whole = (
        np.array([_sequence_s(model, with_values(own, tp=tp), cluster) for tp in tps])
        for own in (with_values(plan, recompute="none"), plan)
    )
    return np.stack([once, np.maximum(0, whole - once) / model.n_layers])


@lru_cache(maxsize=4096)
def _sequence_s(model: Model, plan: Plan, cluster: Cluster) -> float:
    return _busy_s(model, plan, cluster, 3) - _busy_s(model, plan, cluster, 2)


def _busy_s(model: Model, plan: Plan, cluster: Cluster, micro_batch: int) -> float:
    """Seconds that a rank with all of the model is busy with one micro-batch."""
    plan = with_values(plan, micro_batch=micro_batch, global_batch=plan.dp * micro_batch)
    whole = RankStages.of(Stage(model, plan, (True, True, model.n_layers), device_of(cluster)), rank=Rank())
    rates = rates_of(plan, cluster)
    sent = sum([call.wire_bytes for call in collectives(whole) if call.axis == "tp"])
    products_s = compute_s(model_flops(forward_flops(whole)), rates.flops_per_s, Roofline().efficiency)
    again_s = compute_s(recomputed_flops(whole), rates.flops_per_s, Roofline().efficiency)
    return float(products_s + again_s + sent / rates.bytes_per_s["tp"])


def least_times(evaluation: Evaluation, i: int, cluster: Cluster, which: NDArray[np.bool_]) -> Seconds:
    """Seconds that no step of one of the grids is shorter than: `least_s`, and of some plans a better bound.

    There little of what FSDP2 gathers is counted: how often it does is all that depends on the order of
    passes where these are whole.
    """
    grid = evaluation.grids[i]
    seconds = np.repeat(least_s(evaluation.model, grid, cluster)[:, None], grid.shape[1], axis=1)
    cells = np.flatnonzero(which.any(axis=1) & (seconds[:, 0] < inf))
    if len(cells) and evaluation.has_rule(i):
        found, left = evaluation.worked_out(
            lambda: _GridTimes(evaluation, i, cluster, cells, least=True).found()
        )
        seconds[cells] = np.where(which[cells] & ~left, found * (1 - ROUNDING), seconds[cells])
    return seconds


def times(evaluation: Evaluation, i: int, cluster: Cluster, cells: Column | None = None) -> Seconds:
    """Seconds of each step of one of the grids, or of some of its cells; as `step_s`."""
    grid = evaluation.grids[i]
    chosen = np.arange(grid.shape[0]) if cells is None else cells
    seconds = np.full((len(chosen), grid.shape[1]), inf)
    timed = np.flatnonzero(_has_rates(grid[chosen], cluster))
    if not len(timed):
        return seconds
    if evaluation.has_rule(i):
        seconds[timed], left = evaluation.worked_out(
            lambda: _GridTimes(evaluation, i, cluster, chosen[timed], least=False).found()
        )
    else:
        left = np.ones((len(timed), grid.shape[1]), np.bool_)
    for cell, block in np.argwhere(left):
        plan = grid.plans(chosen[timed][[cell]], np.array([block])).plan(0)
        seconds[timed[cell], block] = _step_s(evaluation.model, plan, cluster)
    return seconds


def _step_s(model: Model, plan: Plan, cluster: Cluster) -> float:
    """Seconds of one plan's step, its memory left alone."""
    ranks = [_work(stages) for stages in ranks_of(model, plan, device_of(cluster))]
    return max(time.total_s for time in Roofline().step_times(ranks, plan, cluster))


def _work(stages: RankStages) -> RankWork:
    weights, grads, optimizer = optimizer_sees(stages)
    return RankWork(
        forward_flops=forward_flops(stages),
        recomputed_flops=recomputed_flops(stages),
        collectives=collectives(stages),
        states=Bytes(weights_bytes=weights, grads_bytes=grads, optimizer_bytes=optimizer),
    )


def _has_rates(grid: Grid, cluster: Cluster) -> NDArray[np.bool_]:
    """Whether each cell's rates are known, as `Roofline.missing` says of one plan."""
    known = np.ones(grid.shape[0], np.bool_)
    one = with_values(grid.base, dp=1, dp_replicate=1, tp=1, pp=1, offload=False)
    if grid.structure["offload"] or Roofline().missing(one, cluster):
        return ~known
    links = cluster.intra_node.bytes_per_s, cluster.inter_node.bytes_per_s
    if all(links):
        return known
    degrees = {name: grid.cells[name] for name in ("dp", "dp_replicate", "tp")}
    plan = with_values(grid.base, pp=np.full(grid.shape[0], grid.structure["pp"]), **degrees)
    for used, bytes_per_s in zip(links_used(plan, cluster.gpus_per_node), links, strict=True):
        if not bytes_per_s:
            known &= ~used
    return known


class _Pipeline(NamedTuple):
    """The ranks of a pipeline: the `distinct` ones, and of each rank in `order` which of them it works like.

    `wholes`: of those one of each `RankPlaces.whole`, and of each which of these it has. `times`: by distinct
    stages [what, distinct rank, number of micro-batches], how often in a step a rank does `WHAT` they do.
    """

    order: tuple[int, ...]
    wholes: tuple[RankPlaces, ...]
    whole: Column
    times: Mapping[tuple[Ends, int], Column]


def _goes_with(name: Any) -> tuple[Any, int]:
    """What a number of `Part.counted` is a term of, and which of `WHAT` it goes with."""
    if name == "flops":
        return name, WHAT.index("micro_batches")
    of, field = name
    return of, WHAT.index(of[2] if of[1] == "pp" else field)


def _counted(table: Table, *, splits: bool) -> tuple[list[tuple[Any, int]], Column]:
    """What `Part.counted` says of a table, named by `_goes_with`."""
    names, coefficients = table("counted", partial(Part.counted, splits=splits))
    return list(map(_goes_with, names)), coefficients


@lru_cache(maxsize=4096)
def _pipeline(
    n_layers: int, schedule: Schedule, pp: int, v: int, fsdp: bool, least: bool, ms: tuple[int, ...]
) -> _Pipeline:
    """A pipeline, for such numbers of micro-batches; `least`: in whatever order it runs its passes."""
    ordered = fsdp and pp > 1 and schedule not in SINGLE_STAGE_SCHEDULES
    fsdp = fsdp and not (least and ordered)
    plan = with_values(
        Plan(), pp=pp, virtual_stages=v, schedule=schedule, zero=3 if fsdp else 0, dp=2 if fsdp else 1
    )
    slots: dict[Any, int] = {}
    order: list[int] = []
    wholes: dict[tuple[Ends, int], RankPlaces] = {}
    distinct: list[tuple[tuple[Ends, int], dict[tuple[Ends, int], Column]]] = []
    for rank in ranks_of_pipeline(n_layers, schedule, pp, v):
        rounds = _rounds(plan, rank, ms)
        if least and ordered:
            rounds[:, Rounds._fields.index("gathers_again")] = 0
        times = _times(rank, rounds, np.array(ms))
        key = rank.whole, tuple([(stage, own.tobytes()) for stage, own in times.items()])
        if key not in slots:
            slots[key] = len(slots)
            wholes.setdefault(rank.whole, rank)
            distinct.append((rank.whole, times))
        order.append(slots[key])
    stages = dict.fromkeys(stage for _, times in distinct for stage in times)
    none = np.zeros((len(WHAT), len(ms)), np.int64)
    return _Pipeline(
        tuple(order),
        tuple(wholes.values()),
        np.array([[*wholes].index(whole) for whole, _ in distinct]),
        {stage: np.stack([times.get(stage, none) for _, times in distinct], axis=1) for stage in stages},
    )


def _times(rank: RankPlaces, rounds: Column, ms: Column) -> dict[tuple[Ends, int], Column]:
    """How often in a step a rank does `WHAT` its stages do, alike ones together: [what, micro-batches]."""
    found = {}
    for stage in rank.distinct:
        (first, last), _ = stage
        local = [i for i, own in enumerate(rank.stages) if own == stage]
        sends = [
            ms * sum(rank.indices[i] + beyond not in rank.indices for i in local if there)
            for beyond, there in ((1, not last), (-1, not first))
        ]
        found[stage] = np.stack([np.full_like(ms, len(local)), *rounds[local].sum(axis=0), *sends])
    return found


class _Term(NamedTuple):
    """A product of counts, [distinct rank, cell, 1] and [cell, blocks], and what it is nowhere more than."""

    times: Any
    each: Any
    most: float


class _GridTimes:
    """Cells of a grid on their way to their times; `left` are plans that there is no rule for."""

    def __init__(
        self, evaluation: Evaluation, i: int, cluster: Cluster, cells: Column, *, least: bool
    ) -> None:
        self.evaluation, self.i, self.cells = evaluation, i, cells
        self.grid = grid = evaluation.grids[i]
        self.left = np.zeros((len(cells), grid.shape[1]), np.bool_)
        structure = grid.structure
        columns = {name: column[cells, None] for name, column in grid.cells.items()}
        plan = with_values(
            grid.base,
            pp=structure["pp"],
            virtual_stages=structure["virtual_stages"],
            schedule=grid.schedule,
            zero=structure["zero"],
            offload=False,
            **columns,
        )
        self.rates: Rates = rates_of(plan, cluster)
        self.ranks: dict[Axis, Any] = {**ranks_along(plan)}
        self.most_ranks = float(self.ranks["world"].max())
        self.plan = with_values(plan, **{name: many(column) for name, column in columns.items()})
        ms, m = evaluation.micro_batches(i)  # of all cells: what follows is kept
        self.m = m[cells]
        self.pipeline = _pipeline(
            evaluation.model.n_layers,
            grid.schedule,
            structure["pp"],
            structure["virtual_stages"],
            mode_of(grid) >= 2,
            least,
            ms,
        )

    def found(self) -> tuple[Seconds, NDArray[np.bool_]]:
        """Each plan's step: that of its slowest rank."""
        terms = self._terms()
        work = Work(
            forward_flops=self._total(terms.pop("flops")),
            recomputed_flops=self._total(terms.pop("again", [])),
            sent=sent_bytes(self._sent(terms)),
            moved_bytes=self._moved_bytes(),
        )
        parts = parts_s(work, self.plan, self.rates, Roofline().efficiency)
        busy: Any = busy_s(parts)
        total = added([busy[slot] for slot in self.pipeline.order])
        parts["bubble_s"] = waited_s(self.plan, total, busy)
        seconds: Any = added(parts.values())
        return np.broadcast_to(seconds.max(axis=0), self.left.shape), self.left

    def _terms(self) -> dict[Any, list[_Term]]:
        """What adds up to the FLOPs of forward passes, to those again, and to the payload of each purpose."""
        found: dict[Any, list[_Term]] = {}
        for stage, each in self.pipeline.times.items():
            times = each[:, :, self.m, None]
            often = times.max(axis=(1, 2, 3)).tolist()
            for (of, what), number, most in self._counted(stage):
                if often[what] and of[0] != "recv":
                    term = _Term(times[what], number, float(often[what]) * most)
                    found.setdefault(of, []).append(term)
        return found

    def _counted(self, stage: tuple[Ends, int]) -> list[tuple[tuple[Any, int], Column, float]]:
        """The numbers of a stage, and the most each is: [cell, blocks], or [cell, 1] where all are equal."""
        ends, n = stage
        evaluation, grid = self.evaluation, self.grid
        table, rows = evaluation.stage_table(self.i, ends)
        names, coefficients = evaluation.known(
            ("counted", table), partial(_counted, table, splits=evaluation.splits and not ends[0])
        )
        blocks = all_blocks_of(grid, n)
        coefficients, weights = table.at(coefficients, rows[self.cells], blocks)
        first = coefficients @ weights[:, [blocks.index(pair) for pair in table.ends_of(blocks)]]
        most = first.max(axis=(1, 2), initial=0).tolist()
        varied = (first != first[..., :1]).any(axis=(1, 2)).tolist()
        numbers = iter(coefficients[varied] @ weights)
        return [
            (name, next(numbers) if varies else number[:, :1], limit)
            for name, number, limit, varies in zip(names, first, most, varied, strict=True)
        ]

    def _total(self, terms: Sequence[_Term], n_ranks: Any = 1) -> Any:
        """The sum of products; plans for which that, for so many ranks, is no 64-bit integer are left."""
        if sum([term.most for term in terms]) * self.most_ranks >= MOST:
            rough = sum([term.times * term.each.astype(np.float64) for term in terms]) * n_ranks
            self.left |= (rough >= MOST).any(axis=0)
        return sum([term.times * term.each for term in terms])

    def _sent(self, terms: dict[Purpose, list[_Term]]) -> Iterator[tuple[Axis, str, Any]]:
        """Axes, purposes and bytes of all that ranks send."""
        for purpose, each in self._of_ranks(Part.after).items():
            if purpose[2] != "updated weights" or self.grid.structure["zero"] == 1:
                terms.setdefault(purpose, []).append(_Term(1, each, float(each.max())))
        for (kind, axis, what), own in terms.items():
            n_ranks = self.ranks[axis]
            yield axis, what, wire_bytes(kind, self._total(own, n_ranks), n_ranks)

    def _of_ranks(self, asked: Asked) -> dict[Any, Any]:
        """Numbers of each distinct rank's stages as one, [distinct rank, cell, 1]."""
        found = [self.evaluation.of_rank(self.i, rank, asked) for rank in self.pipeline.wholes]
        none = np.zeros(self.grid.shape[0], np.int64)
        return {
            name: np.stack([own.get(name, none) for own in found])[self.pipeline.whole][:, self.cells, None]
            for name in dict.fromkeys(name for own in found for name in own)
        }

    def _moved_bytes(self) -> Quantity:
        found = self._of_ranks(Part.moved)
        optimizer = found["optimizer"]
        zero = self.grid.structure["zero"]
        if zero == 1 and mode_of(self.grid):
            dealt = [self.evaluation.dealt(self.i, rank)[-1] for rank in self.pipeline.wholes]
            optimizer = np.stack(dealt)[self.pipeline.whole][:, self.cells, None]
        share = updated_share(zero, self.plan.dp)
        return update_bytes(share * found["weights"], share * found["grads"], optimizer)


def _rounds(plan: Plan, rank: RankPlaces, ms: Sequence[int]) -> Column:
    """`Rounds` of each of a rank's stages, for each number of micro-batches: [stage, field, number]."""
    firsts = [first for (first, _), _ in rank.stages]

    def work(some: tuple[int, ...]) -> list[Rounds]:
        return rounds_of(of_micro_batches(plan, some), rank.pp, firsts)

    found = np.zeros((len(firsts), len(Rounds._fields), len(ms)), np.int64)
    for at, rounds in taken_apart(plan, ms, work):
        for local, own in enumerate(rounds):
            for i, times in enumerate(own):
                found[local, i, at] = times
    return found
