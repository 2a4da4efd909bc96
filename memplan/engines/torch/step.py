"""A whole step of one rank."""

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial

from memplan.engines.base import RankRecord
from memplan.engines.torch.ddp import ReplicatedPasses
from memplan.engines.torch.fsdp import ShardedPasses
from memplan.engines.torch.host import host_of
from memplan.engines.torch.optimizer import update
from memplan.engines.torch.passes import Passes
from memplan.engines.torch.program import passes_of, program
from memplan.engines.torch.runtime import left_behind
from memplan.engines.torch.schedules import schedule
from memplan.engines.torch.stage import RankStages, Stage
from memplan.memory import Alive
from memplan.record import Collective, Stretch, chain, events, repeated


class Player:
    """Plays ranks of one pipeline; what ranks of equal stages have in common is made once."""

    def __init__(self) -> None:
        self.passes: dict[Stage, Passes] = {}
        self._rest: dict[tuple[Stage, ...], Alive] = {}
        self._updates: dict[tuple[Stage, ...], list[Stretch]] = {}

    def __call__(self, stages: RankStages) -> RankRecord:
        """What the rank holds at rest, and its step."""
        for stage in stages:
            if stage not in self.passes:
                self.passes[stage] = passes_of(stage, stages.rank.dp)
        own = [self.passes[stage] for stage in stages]
        if stages.stages not in self._rest:
            self._rest[stages.stages] = stages.rest + kept_grads(stages, own)
            self._updates[stages.stages] = updates(stages)
        rest, left = self._rest[stages.stages], left_behind(stages)
        return RankRecord(
            rank=stages.rank,
            layers=stages.layers,
            rest=rest + left if left else rest,
            step=chain("step", *schedule(stages, own), *self._updates[stages.stages]),
            grads=stages.grads,
            step_counts=stages.step_counts,
            host=host_of(stages),
            program=None if stages.device.on_cpu else partial(program, stages, self.passes),
        )


def updates(stages: RankStages) -> list[Stretch]:
    """The optimizer's part; of one that runs on the host only what it sends to other ranks."""
    updated = update(stages)
    if not stages.offloads:
        return [updated]
    sent = [(event, n) for event, n in updated.counts.items() if isinstance(event, Collective)]
    return [repeated(events("update on the host", [event]), n) for event, n in sent]


def kept_grads(stages: RankStages, passes: Sequence[Passes]) -> Alive:
    """What is kept of gradients from step to step: zeroed ones, and what a hook of DDP's keeps."""
    kept = Counter() if stages.plan.set_to_none else _grads_at_rest(stages, passes)
    for one in passes:
        if isinstance(one, ReplicatedPasses):
            kept = kept + one.between_steps
    return kept


def _grads_at_rest(stages: RankStages, passes: Iterable[Passes]) -> Alive:
    """What holds zeroed gradients between steps beside DDP's buckets: FSDP2 has one tensor per unit."""
    if not stages.plan.fsdp:
        return Counter() if stages.plan.gradient_as_bucket_view else stages.grads
    units = [unit for one in passes if isinstance(one, ShardedPasses) for unit in one.units]
    return Counter() if stages.offloads else Counter({unit.reduced: times for unit, times in units})
