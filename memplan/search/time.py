"""How long a step of each of many plans takes, by the formulas that time one."""

from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import partial
from math import inf
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from memplan.engines.torch import RankStages
from memplan.estimate import device_of, ranks_of
from memplan.hardware import Cluster
from memplan.many import many
from memplan.models import Model
from memplan.plan import SCHEDULES, Axis, Plan
from memplan.search.evaluate import (
    AT_ONCE,
    Columns,
    Ends,
    Part,
    Search,
    combined,
    has_rule,
    optimizer_sees,
    some_of,
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
from memplan.traffic import Purpose, collectives, ranks_along, wire_bytes

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

    def seconds(self) -> Seconds:
        """Each plan's step: that of its slowest rank."""
        busy = [np.asarray(busy_s(parts)) for parts in self.parts]
        total = self._of_all_ranks(busy)
        slowest = np.zeros(len(total))
        for i, schedule in enumerate(SCHEDULES):
            chosen = np.flatnonzero(self.of["schedule"] == i)
            if not len(chosen):
                continue
            plan = self._plan(some_of(self.of, chosen), schedule=schedule)
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
        self.left[of["plan"]] = True

    def _alike(
        self, of: Columns, rank: Column, stages: Sequence[tuple[Ends, Column]], own: tuple[Ends, Column]
    ) -> None:
        ((ends, row),) = stages
        longer = rank[0] == 1 and of["odd"][0] > 1
        slot = 0 if ends[0] else 3 if ends[1] else 1 if longer else 2
        of = of | {"row": row, "own": own[1]}
        _, kind = combined(of["schedule"], of["zero"], of["mode"])
        for i in range(kind.max() + 1):
            alike = np.flatnonzero(kind == i)
            for start in range(0, len(alike), AT_ONCE):
                self._rank(some_of(of, alike[start : start + AT_ONCE]), ends, slot)

    def _rank(self, of: Columns, ends: Ends, slot: int) -> None:
        """The parts of a rank's step, by its own formulas."""
        zero = int(of["zero"][0])
        plan = self._plan(of, schedule=SCHEDULES[of["schedule"][0]], zero=zero)
        sheet, rows = self.sheets["stage", ends], of["row"]
        forward, again = sheet("flops", Part.flops, rows, sheet.grids_of(rows))
        work = Work(
            forward_flops=self._counted(of, forward, of["m"]),
            recomputed_flops=self._counted(of, again, of["m"]),
            sent=sent_bytes(self._sent(of, ends, plan)),
            moved_bytes=self._moved_bytes(of, ends, plan),
        )
        for name, seconds in parts_s(work, plan, self.cluster, self.efficiency).items():
            self.parts[slot][name][of["plan"]] = np.asarray(seconds)

    def _plan(self, of: Columns, **values: Any) -> Plan:
        """A plan with arrays for degrees and batches."""
        names = ("dp", "dp_replicate", "tp", "pp", "micro_batch", "virtual_stages")
        return with_values(self.base, **{name: many(of[name]) for name in names}, **values)

    def _counted(self, of: Columns, each: Column, times: Column | int) -> Column:
        """So many times a count; plans for which that is no 64-bit integer are left."""
        self.left[of["plan"]] |= each.astype(np.float64) * times >= MOST
        return each * times

    def _sent(self, of: Columns, ends: Ends, plan: Plan) -> Iterator[tuple[Axis, str, Any]]:
        """Axes, purposes and bytes of all that a rank sends."""
        sheet, rows = self.sheets["stage", ends], of["row"]
        grids = sheet.grids_of(rows)
        sheet("purposes", lambda part: (len(part.sent),), rows, grids)
        purposes = {p: None for i in grids for part in sheet.grids[i].parts for p in part.sent}
        ranks = ranks_along(plan)
        for purpose in purposes:
            kind, axis, what = purpose
            if kind == "recv" or (what == "updated weights" and plan.zero != 1):
                continue
            fixed, each = sheet(purpose, partial(_passed, purpose=purpose), rows, grids)
            payload: Any = fixed + self._counted(of, each, of["m"])
            self._counted(of, payload, np.asarray(ranks[axis]))
            yield axis, what, wire_bytes(kind, payload, ranks[axis])

    def _moved_bytes(self, of: Columns, ends: Ends, plan: Plan) -> Quantity:
        sheet, rows = self.sheets["rank", ends], of["own"]
        weights, grads, optimizer = sheet("moved", Part.moved, rows, sheet.grids_of(rows))
        if plan.zero == 1 and plan.ddp:
            *_, optimizer = self._dealt(of, ends)
        share = updated_share(int(of["zero"][0]), plan.dp)
        return update_bytes(share * weights, share * grads, optimizer)


def _passed(part: Part, purpose: Purpose) -> tuple[Any, Any]:
    return part.sent.get(purpose, (0, 0))
