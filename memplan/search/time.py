"""How long a step of each of many plans takes, by the formulas that time one."""

from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import lru_cache, partial
from math import inf
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from memplan.engines.torch import RankStages
from memplan.estimate import device_of, ranks_of
from memplan.hardware import Cluster
from memplan.many import Differ, many
from memplan.models import Model
from memplan.plan import SCHEDULES, Axis, Plan, Schedule
from memplan.search.evaluate import (
    EACH,
    Columns,
    Part,
    Place,
    RankPlaces,
    Search,
    Sheet,
    distinct,
    has_rule,
    optimizer_sees,
    with_values,
)
from memplan.search.plans import Column, Plans
from memplan.steptime import (
    Quantity,
    RankWork,
    Roofline,
    StepTime,
    Work,
    added,
    busy_s,
    forward_flops,
    links_used,
    parts_s,
    recomputed_flops,
    sent_bytes,
    update_bytes,
    updated_share,
    waited_s,
)
from memplan.timeline import Bytes
from memplan.traffic import Purpose, Rounds, collectives, ranks_along, rounds_of, wire_bytes

Seconds = NDArray[np.float64]

MOST: Final = 2.0**61
"""What a count must stay below for thrice it to be a 64-bit integer."""


def step_s(model: Model, plans: Plans, cluster: Cluster) -> Seconds:
    """Seconds of each plan's step, as `Estimate.step_s`; infinitely many where a rate is missing."""
    seconds = np.full(len(plans), inf)
    timed = np.flatnonzero(_has_rates(plans, cluster))
    if len(timed) and has_rule(plans.base):
        search = _Times(model, plans[timed], cluster)
        search.run()
        seconds[timed] = search.seconds()
        timed = timed[search.left]
    for i in timed:
        seconds[i] = _step_s(model, plans.plan(int(i)), cluster)
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


def _has_rates(plans: Plans, cluster: Cluster) -> NDArray[np.bool_]:
    """Whether each plan's rates are known, as `Roofline.missing` says of one."""
    n = len(plans)
    if Roofline().missing(with_values(plans.base, dp=1, dp_replicate=1, tp=1, pp=1, offload=False), cluster):
        return np.zeros(n, np.bool_)
    degrees = ("dp", "dp_replicate", "tp", "pp")
    plan = with_values(plans.base, **{name: plans.column(name) for name in degrees})
    within, between = links_used(plan, cluster.gpus_per_node)
    known: NDArray[np.bool_] = plans.column("offload") == 0
    if not cluster.intra_node.bytes_per_s:
        known &= ~within
    if not cluster.inter_node.bytes_per_s:
        known &= ~between
    return known


SLOTS: Final = 4
"""Kinds of ranks in a pipeline's order: the first, those with one block more, the others, the last."""


class _Times(Search):
    """Plans on their way to their times; `left` are those that there is no rule for."""

    def __init__(self, model: Model, plans: Plans, cluster: Cluster) -> None:
        super().__init__(model, plans, device_of(cluster))
        n = len(plans)
        self.cluster = cluster
        self.efficiency = Roofline().efficiency
        self.left = np.zeros(n, np.bool_)
        names = [field.name for field in fields(StepTime)]
        self.parts = [{name: np.zeros(n) for name in names} for _ in range(SLOTS)]
        self.piped = np.zeros(n)

    def seconds(self) -> Seconds:
        """Each plan's step: that of its slowest rank."""
        busy = [np.asarray(busy_s(parts)) for parts in self.parts]
        total = self._of_all_ranks(busy)
        slowest = self.piped
        for i, schedule in enumerate(SCHEDULES):
            chosen = np.flatnonzero((self.of["schedule"] == i) & (slowest == 0))
            if not len(chosen):
                continue
            plan = self._plan(self.of.some(chosen), schedule=schedule)
            for parts, own, n_ranks in zip(self.parts, busy, self._n_ranks(), strict=True):
                some = {name: column[chosen] for name, column in parts.items()}
                some["bubble_s"] = np.asarray(waited_s(plan, total[chosen], own[chosen]))
                found = np.where(n_ranks[chosen] > 0, added(list(some.values())), 0.0)
                slowest[chosen] = np.maximum(slowest[chosen], found)
        return slowest

    def _n_ranks(self) -> tuple[Column, Column, Column, Column]:
        """How many ranks of each kind there are."""
        pp, odd = self.of["pp"], self.of["odd"]
        several = (pp > 1).astype(np.int64)
        longer = several * np.maximum(0, odd - 1)
        return np.ones_like(pp), longer, several * (pp - 2 - longer), several

    def _of_all_ranks(self, busy: Sequence[Seconds]) -> Seconds:
        """The sum over a pipeline's ranks, one after the other."""
        total = np.zeros(len(self.left))
        for seconds, n_ranks in zip(busy, self._n_ranks(), strict=True):
            last_first = np.argsort(-n_ranks, kind="stable")
            most_first = n_ranks[last_first]
            for i in range(int(most_first[0])):
                more = last_first[: int(np.searchsorted(-most_first, -i, side="left"))]
                total[more] += seconds[more]
        return total

    def _several_stages_each(self, of: Columns) -> None:
        for some in of.alike("schedule", "pp", "virtual_stages", "zero", "mode"):
            self._pipelines(some)

    def _pipelines(self, of: Columns) -> None:
        """The steps of plans whose ranks have equally many stages, in one schedule."""
        schedule, pp = SCHEDULES[of.first("schedule")], of.first("pp")
        plan = self._plan(of, schedule=schedule, zero=of.first("zero"))
        ms, m = distinct(of["m"])
        slots: dict[Any, int] = {}
        order: list[int] = []
        found: list[dict[str, Quantity]] = []
        for rank in self._ranks(of):
            rounds = _rounds(schedule, pp, of.first("virtual_stages"), plan.fsdp, rank.pp, tuple(ms.tolist()))
            stages = list(_of_one_row(rank, rounds))
            key = rank.own, tuple([(s.place, s.n, s.rounds.tobytes(), s.sends) for s in stages])
            if key not in slots:
                slots[key] = len(found)
                some = [s._replace(rounds=_chosen(s.rounds, m)) for s in stages]
                found.append(self._parts(of, plan, some, rank.own))
            order.append(slots[key])
        busy = [busy_s(parts) for parts in found]
        total = added([busy[slot] for slot in order])
        slowest = np.zeros(len(m))
        for parts, own in zip(found, busy, strict=True):
            parts["bubble_s"] = waited_s(plan, total, own)
            slowest = np.maximum(slowest, added(list(parts.values())))
        self.piped[of["plan"]] = slowest

    def _alike(self, of: Columns, rank: Column, stages: Sequence[Place], own: Place) -> None:
        ((ends, _),) = stages
        longer = rank[0] == 1 and of.first("odd") > 1
        slot = 0 if ends[0] else 3 if ends[1] else 1 if longer else 2
        for some in of.alike("schedule", "zero", "mode"):
            plan = self._plan(some, schedule=SCHEDULES[some.first("schedule")], zero=some.first("zero"))
            alone = with_values(plan, pp=1 if some.first("pp") == 1 else 2)
            rounds = rounds_of(alone, 0, 0, first=ends[0])
            stage = _Stages(stages[0], 1, [np.asarray(n) for n in rounds], (1, 1))
            for part, seconds in self._parts(some, plan, [stage], own).items():
                self.parts[slot][part][some["plan"]] = np.asarray(seconds)

    def _parts(self, of: Columns, plan: Plan, stages: "Sequence[_Stages]", own: Place) -> dict[str, Quantity]:
        """The parts of a rank's step, by its own formulas."""
        forward, again = [], []
        for stage in stages:
            sheet, rows, grids = self._looked_up(of, "stage", stage.place)
            m, split, *_ = stage.rounds
            forward += [(m, *sheet("forward", Part.forward_flops, rows, grids))]
            for field, times in (("micro_batches", m), ("split", split)):
                if np.any(times):
                    asked = partial(Part.again_flops, field=field)
                    again += [(times, *sheet(("again", field), asked, rows, grids))]
        work = Work(
            forward_flops=self._total(of, forward),
            recomputed_flops=self._total(of, again),
            sent=sent_bytes(self._sent(of, plan, stages, own)),
            moved_bytes=self._moved_bytes(of, own, plan),
        )
        return parts_s(work, plan, self.cluster, self.efficiency)

    def _looked_up(self, of: Columns, kind: str, place: Place) -> tuple[Sheet, Column, set[int]]:
        """The sheet of a stage, or of a rank; the plans' rows there, and the grids that these are of."""
        sheet, rows = self.sheets[kind, place[0]], of[place[1]]
        return sheet, rows, sheet.grids_of(rows)

    def _plan(self, of: Columns, **values: Any) -> Plan:
        """A plan with arrays for degrees and batches."""
        names = ("dp", "dp_replicate", "tp", "pp", "micro_batch", "virtual_stages")
        return with_values(self.base, **{name: many(of[name]) for name in names}, **values)

    def _total(self, of: Columns, terms: Sequence[tuple[Any, Any]]) -> Any:
        """The sum of products of counts; plans for which that is no 64-bit integer are left."""
        if sum(float(np.max(times)) * float(np.max(each)) for times, each in terms) >= MOST:
            rough = sum(np.asarray(times, np.float64) * each for times, each in terms)
            self.left[of["plan"]] |= rough >= MOST
        return sum([times * each for times, each in terms])

    def _sent(
        self, of: Columns, plan: Plan, stages: "Sequence[_Stages]", own: Place
    ) -> Iterator[tuple[Axis, str, Any]]:
        """Axes, purposes and bytes of all that a rank sends."""
        terms: dict[Purpose, list[tuple[Any, Any]]] = {}
        for stage in stages:
            sheet, rows, grids = self._looked_up(of, "stage", stage.place)
            for field, times in zip(EACH, (stage.n, *stage.rounds), strict=True):
                for purpose in sheet.purposes(field, grids) if np.any(times) else ():
                    if purpose[0] == "recv":
                        continue
                    (each,) = sheet((purpose, field), partial(_passed, purpose, field), rows, grids)
                    n = times if purpose[1] != "pp" else of["m"] * stage.sends[purpose[2] != "activations"]
                    terms.setdefault(purpose, []).append((n, each))
        sheet, rows, grids = self._looked_up(of, "rank", own)
        for purpose in sheet.purposes("after", grids):
            if purpose[2] != "updated weights" or plan.zero == 1:
                (each,) = sheet((purpose, "after"), partial(_passed, purpose, "after"), rows, grids)
                terms.setdefault(purpose, []).append((1, each))
        ranks = ranks_along(plan)
        for (kind, axis, what), products in terms.items():
            payload = self._total(of, products)
            self._total(of, [(payload, np.asarray(ranks[axis]))])
            yield axis, what, wire_bytes(kind, payload, ranks[axis])

    def _moved_bytes(self, of: Columns, own: Place, plan: Plan) -> Quantity:
        sheet, rows, grids = self._looked_up(of, "rank", own)
        weights, grads, optimizer = sheet("moved", Part.moved, rows, grids)
        if plan.zero == 1 and plan.ddp:
            *_, optimizer = self._dealt(of, own)
        share = updated_share(of.first("zero"), plan.dp)
        return update_bytes(share * weights, share * grads, optimizer)


class _Stages(NamedTuple):
    """Stages of a rank that have one row: `n` of them, what their rounds add up to.

    How many send activations to other ranks, and how many gradients.
    """

    place: Place
    n: int
    rounds: Any
    sends: tuple[int, int]


def _of_one_row(rank: RankPlaces, rounds: Column) -> Iterator[_Stages]:
    """A rank's stages, those that have one row together; rounds for each number of micro-batches."""
    for place in dict.fromkeys(rank.stages):
        (first, last), _ = place
        local = [i for i, found in enumerate(rank.stages) if found == place]
        on, back = (
            sum(rank.indices[i] + beyond not in rank.indices for i in local) if there else 0
            for beyond, there in ((1, not last), (-1, not first))
        )
        yield _Stages(place, len(local), rounds[local].sum(axis=0), (on, back))


def _chosen(rounds: Column, m: Column) -> list[Any]:
    """Each field's number for each plan's number of micro-batches; one for all where that is no matter."""
    return [field[m] if (field != field[0]).any() else int(field[0]) for field in rounds]


@lru_cache(maxsize=65536)
def _rounds(schedule: Schedule, pp: int, v: int, fsdp: bool, rank: int, ms: tuple[int, ...]) -> Column:
    """`Rounds` of each of a rank's stages, for each number of micro-batches."""
    n_replicas = 2 if fsdp else 1
    plan = with_values(
        Plan(),
        pp=pp,
        virtual_stages=v,
        schedule=schedule,
        zero=3 if fsdp else 0,
        dp=n_replicas,
        global_batch=n_replicas * many(ms),
    )
    found = np.zeros((v, len(Rounds._fields), len(ms)), np.int64)
    try:
        for local, index in enumerate(plan.stages_of(rank)):
            for i, times in enumerate(rounds_of(plan, rank, local, first=index == 0)):
                found[local, i] = times
    except Differ as differ:
        for part in (differ.yes, ~differ.yes):
            chosen = np.flatnonzero(part)
            found[..., chosen] = _rounds(schedule, pp, v, fsdp, rank, tuple(ms[j] for j in chosen))
    return found


def _passed(purpose: Purpose, field: str, part: Part) -> tuple[Any]:
    return (part.sent(field).get(purpose, 0),)
