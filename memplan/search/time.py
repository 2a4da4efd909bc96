"""How long a step of each of many plans takes, by the formulas that time one."""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial
from math import inf
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memplan.engines.torch import RankStages
from memplan.estimate import device_of, ranks_of
from memplan.hardware import Cluster
from memplan.many import many
from memplan.models import Model
from memplan.plan import Axis, Plan, Schedule
from memplan.search.evaluate import Evaluation, RankPlaces, alike, mode_of
from memplan.search.plans import Column, Grid, Plans, grids_of
from memplan.search.ranks import taken_apart
from memplan.search.stages import Asked, Ends, Part, at_blocks, optimizer_sees, with_values
from memplan.steptime import (
    Quantity,
    RankWork,
    Rates,
    Roofline,
    Work,
    added,
    busy_s,
    forward_flops,
    links_used,
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

FIELDS: Final = ("fixed", *Rounds._fields)
"""What a stage computes and sends goes with."""

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
            lambda: _GridTimes(evaluation, i, cluster, chosen[timed]).found()
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
    none = np.zeros(grid.shape[0], np.bool_)
    if grid.structure["offload"]:
        return none
    if Roofline().missing(with_values(grid.base, dp=1, dp_replicate=1, tp=1, pp=1, offload=False), cluster):
        return none
    degrees = {name: grid.cells[name] for name in ("dp", "dp_replicate", "tp")}
    plan = with_values(grid.base, pp=np.full(grid.shape[0], grid.structure["pp"]), **degrees)
    within, between = links_used(plan, cluster.gpus_per_node)
    known = ~none
    if not cluster.intra_node.bytes_per_s:
        known &= ~within
    if not cluster.inter_node.bytes_per_s:
        known &= ~between
    return known


class _Stages(NamedTuple):
    """Stages of a rank that are alike: `n` of them, what their rounds add up to.

    `rounds` [field of Rounds, number of micro-batches]; how many send activations to other ranks, and how
    many gradients.
    """

    stage: tuple[Ends, int]
    n: int
    rounds: Column
    sends: tuple[int, int]


class _GridTimes:
    """Cells of a grid on their way to their times; `left` are plans that there is no rule for."""

    def __init__(self, evaluation: Evaluation, i: int, cluster: Cluster, cells: Column) -> None:
        self.evaluation, self.i, self.cells = evaluation, i, cells
        self.grid = grid = evaluation.grids[i]
        self.left = np.zeros((len(cells), grid.shape[1]), np.bool_)
        structure = grid.structure
        columns = {name: many(column[cells])[:, None] for name, column in grid.cells.items()}
        self.plan = with_values(
            grid.base,
            pp=structure["pp"],
            virtual_stages=structure["virtual_stages"],
            schedule=grid.schedule,
            zero=structure["zero"],
            offload=False,
            **columns,
        )
        self.rates: Rates = rates_of(self.plan, cluster)
        self.ms, m = evaluation.micro_batches(i)  # of all cells: what follows is kept
        self.m = m[cells]
        self.numbers: dict[tuple[Ends, int], Mapping[Any, Any]] = {}
        self.efficiency = Roofline().efficiency

    def found(self) -> tuple[Seconds, NDArray[np.bool_]]:
        """Each plan's step: that of its slowest rank."""
        slots: dict[Any, int] = {}
        order: list[int] = []
        parts: list[dict[str, Quantity]] = []
        structure = self.grid.structure
        for rank in self.evaluation.ranks(self.grid):
            rounds = _rounds(
                self.grid.schedule,
                structure["pp"],
                structure["virtual_stages"],
                mode_of(self.grid) >= 2,
                rank.pp,
                self.ms,
            )
            stages = list(_alike_stages(rank, rounds))
            key = rank.whole, tuple([(s.stage, s.n, s.rounds.tobytes(), s.sends) for s in stages])
            if key not in slots:
                slots[key] = len(parts)
                parts.append(self._parts(rank, stages))
            order.append(slots[key])
        busy = [busy_s(found) for found in parts]
        total = added([busy[slot] for slot in order])
        slowest: Any = 0.0
        for found, own in zip(parts, busy, strict=True):
            found["bubble_s"] = waited_s(self.plan, total, own)
            slowest = np.maximum(slowest, added(list(found.values())))
        return np.broadcast_to(slowest, self.left.shape), self.left

    def _parts(self, rank: RankPlaces, stages: Sequence[_Stages]) -> dict[str, Quantity]:
        """The parts of a rank's step, by its own formulas."""
        forward, again = [], []
        for stage in stages:
            known, rounds = self._known(stage.stage), self._times(stage.rounds)
            forward.append((rounds[0], known["flops"]))
            for field, times in zip(("micro_batches", "split"), rounds, strict=False):
                if np.any(times) and ("again", field) in known:
                    again.append((times, known["again", field]))
        work = Work(
            forward_flops=self._total(forward),
            recomputed_flops=self._total(again),
            sent=sent_bytes(self._sent(rank, stages)),
            moved_bytes=self._moved_bytes(rank),
        )
        return parts_s(work, self.plan, self.rates, self.efficiency)

    def _known(self, stage: tuple[Ends, int]) -> Mapping[Any, Any]:
        """The numbers of a stage: [cell, blocks], or [cell, 1] where recomputing changes nothing."""
        if stage not in self.numbers:
            ends, n = stage
            evaluation, grid = self.evaluation, self.grid
            table, rows = evaluation.stage_table(self.i, ends)
            names, coefficients = table("counted", partial(Part.counted, splits=evaluation.splits))
            blocks = [evaluation.blocks(grid, n, limit) for limit in grid.recompute_blocks.tolist()]
            rows = rows[self.cells]
            first = at_blocks(table, coefficients, rows, list(table.ends_of(blocks)))
            found: dict[Any, Any] = {("sent", field): [] for field in FIELDS}
            varied = (first != first[:, :, :1]).any(axis=(1, 2))
            numbers = iter(at_blocks(table, coefficients[varied], rows, blocks))
            for name, number, varies in zip(names, first, varied.tolist(), strict=True):
                found[name] = next(numbers) if varies else number[:, :1]
                if isinstance(name[0], tuple):
                    purpose, field = name
                    found["sent", field].append(purpose)
            self.numbers[stage] = found
        return self.numbers[stage]

    def _times(self, rounds: Column) -> list[Any]:
        """Each field's number for each cell; one for all where the micro-batches are no matter."""
        return [field[self.m][:, None] if (field != field[0]).any() else int(field[0]) for field in rounds]

    def _total(self, terms: Sequence[tuple[Any, Any]]) -> Any:
        """The sum of products of counts; plans for which that is no 64-bit integer are left."""
        if sum(float(np.max(times)) * float(np.max(each)) for times, each in terms) >= MOST:
            rough = sum(np.asarray(times, np.float64) * each for times, each in terms)
            self.left |= rough >= MOST
        return sum([times * each for times, each in terms])

    def _sent(self, rank: RankPlaces, stages: Sequence[_Stages]) -> Iterator[tuple[Axis, str, Any]]:
        """Axes, purposes and bytes of all that a rank sends."""
        terms: dict[Purpose, list[tuple[Any, Any]]] = {}
        m = np.asarray(self.plan.n_micro_batches)
        for stage in stages:
            known = self._known(stage.stage)
            for field, times in zip(FIELDS, (stage.n, *self._times(stage.rounds)), strict=True):
                for purpose in known["sent", field] if np.any(times) else ():
                    if purpose[0] == "recv":
                        continue
                    n = times if purpose[1] != "pp" else m * stage.sends[purpose[2] != "activations"]
                    terms.setdefault(purpose, []).append((n, known[purpose, field]))
        for purpose, each in self._of_rank(rank, Part.after).items():
            if purpose[2] != "updated weights" or self.grid.structure["zero"] == 1:
                terms.setdefault(purpose, []).append((1, each))
        ranks = ranks_along(self.plan)
        for (kind, axis, what), products in terms.items():
            payload = self._total(products)
            self._total([(payload, np.asarray(ranks[axis]))])
            yield axis, what, wire_bytes(kind, payload, ranks[axis])

    def _of_rank(self, rank: RankPlaces, asked: Asked) -> dict[Any, Any]:
        """Numbers of a rank's stages as one, [cell, 1]."""
        found = self.evaluation.of_rank(self.i, rank, asked)
        return {name: column[self.cells, None] for name, column in found.items()}

    def _moved_bytes(self, rank: RankPlaces) -> Quantity:
        found = self._of_rank(rank, Part.moved)
        optimizer = found["optimizer"]
        zero = self.grid.structure["zero"]
        if zero == 1 and mode_of(self.grid):
            *_, dealt = self.evaluation.dealt(self.i, rank)
            optimizer = dealt[self.cells][:, None]
        share = updated_share(zero, self.plan.dp)
        return update_bytes(share * found["weights"], share * found["grads"], optimizer)


def _alike_stages(rank: RankPlaces, rounds: Column) -> Iterator[_Stages]:
    """A rank's stages, those that are alike together; rounds for each number of micro-batches."""
    for stage in rank.distinct:
        (first, last), _ = stage
        local = [i for i, found in enumerate(rank.stages) if found == stage]
        on, back = (
            sum(rank.indices[i] + beyond not in rank.indices for i in local) if there else 0
            for beyond, there in ((1, not last), (-1, not first))
        )
        yield _Stages(stage, len(local), rounds[local].sum(axis=0), (on, back))


@lru_cache(maxsize=65536)
def _rounds(schedule: Schedule, pp: int, v: int, fsdp: bool, rank: int, ms: tuple[int, ...]) -> Column:
    """`Rounds` of each of a rank's stages, for each number of micro-batches."""
    n_replicas = 2 if fsdp else 1
    plan = with_values(
        Plan(), pp=pp, virtual_stages=v, schedule=schedule, zero=3 if fsdp else 0, dp=n_replicas
    )
    firsts = [index == 0 for index in plan.stages_of(rank)]

    def work(some: tuple[int, ...]) -> list[Rounds]:
        return rounds_of(with_values(plan, global_batch=n_replicas * many(some)), rank, firsts)

    found = np.zeros((v, len(Rounds._fields), len(ms)), np.int64)
    for at, rounds in taken_apart(plan, ms, work):
        for local, own in enumerate(rounds):
            for i, times in enumerate(own):
                found[local, i, at] = times
    return found
