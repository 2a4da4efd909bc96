"""A rank's record: its step (passes, then the update), and what it holds between steps."""

from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import Any

from memplan.engines.base import RankRecord
from memplan.engines.torch.host import host_of
from memplan.engines.torch.optimizer import update
from memplan.engines.torch.pipelining import left_behind, schedule
from memplan.engines.torch.program import kept_by_hooks, module_of, program
from memplan.engines.torch.stage import RankStages, Stage
from memplan.memory import Alive
from memplan.parts.module import StageModule
from memplan.record import Collective, Stretch, chain, events, repeated


class Player:
    """Plays ranks of one pipeline; ranks with equal stages share their modules."""

    def __init__(self) -> None:
        self.modules: dict[Stage, StageModule[Any]] = {}
        self._known: dict[tuple[Stage, ...], tuple[Alive, list[Stretch]]] = {}

    def __call__(self, stages: RankStages) -> RankRecord:
        """The rank's record: what it holds between steps, and its step."""
        for stage in stages:
            if stage not in self.modules:
                self.modules[stage] = module_of(stage, stages.rank)
        own = [self.modules[stage].fresh() for stage in stages]
        if stages.stages not in self._known:
            kept = grads_at_rest(stages, own) + kept_by_hooks(own)
            self._known[stages.stages] = stages.rest + kept, updates(stages)
        (rest, updated), left = self._known[stages.stages], left_behind(stages)
        return RankRecord(
            rank=stages.rank,
            layers=stages.layers,
            rest=rest + left if left else rest,
            step=chain("step", *schedule(stages, own), *updated),
            grads=stages.grads,
            update=tuple(updated),
            step_counts=stages.step_counts,
            host=host_of(stages),
            handed_over=stages.handed_over if len(stages.stages) > 1 else {},
            program=None if stages.device.on_cpu else partial(program, stages, self.modules),
        )


def updates(stages: RankStages) -> list[Stretch]:
    """The optimizer's part of the step; if it runs on the host, only its collectives."""
    updated = update(stages)
    if not stages.offloads:
        return [updated]
    sent = [(event, n) for event, n in updated.counts.items() if isinstance(event, Collective)]
    return [repeated(events("update on the host", [event]), n) for event, n in sent]


def grads_at_rest(stages: RankStages, modules: Iterable[StageModule[Any]]) -> Alive:
    """Zeroed gradients between steps, apart from DDP's buckets; FSDP has one flat tensor per unit."""
    if stages.options.set_to_none or stages.options.gradient_as_bucket_view or stages.offloads:
        return Counter()
    if not stages.plan.fsdp:
        return stages.grads
    found: Alive = Counter()
    for one in modules:
        for grad, times in one.sharded_grads():
            found[grad] += times
    return found
