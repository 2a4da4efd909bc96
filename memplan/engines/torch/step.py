"""A whole step of one rank."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from memplan.engines.torch.ddp import ReplicatedPasses
from memplan.engines.torch.fsdp import ShardedPasses
from memplan.engines.torch.host import Host, host_of
from memplan.engines.torch.optimizer import update
from memplan.engines.torch.passes import Passes
from memplan.engines.torch.runtime import left_behind
from memplan.engines.torch.schedules import schedule
from memplan.engines.torch.stage import RankStages, Stage
from memplan.timeline import Alive, Stretch, chain, n_bytes_of


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimeline:
    """One rank's step: what is alive between steps, what it allocates and frees, the gradients it makes.

    `step_counts` are the part of the optimizer state that a GPU's rank leaves on the host. `host` is what the
    host holds instead of the device where states are offloaded.
    """

    rest: Alive
    step: Stretch
    grads: Alive
    step_counts: Alive = field(default_factory=Counter)
    host: Host | None = None

    @property
    def rest_bytes(self) -> int:
        """Bytes alive between steps."""
        return n_bytes_of(self.rest)

    @property
    def peak_bytes(self) -> int:
        """Bytes alive at the worst instant."""
        return self.rest_bytes + self.step.high_bytes


def passes_of(stage: Stage) -> Passes:
    """The stage's forward and backward passes."""
    if stage.plan.fsdp:
        return ShardedPasses(stage)
    return ReplicatedPasses(stage) if stage.plan.ddp else Passes(stage)


def timeline(stages: RankStages, passes: dict[Stage, Passes] | None = None) -> StageTimeline:
    """What the rank holds at rest, and its step; `passes` are kept for other ranks of the same stages."""
    passes = {} if passes is None else passes
    for stage in stages:
        if stage not in passes:
            passes[stage] = passes_of(stage)
    own = [passes[stage] for stage in stages]
    step = chain("step", *schedule(stages, own), *updates(stages))
    return StageTimeline(
        rest=rest_of(stages, own),
        step=step,
        grads=stages.grads,
        step_counts=stages.step_counts,
        host=host_of(stages),
    )


def rest_of(stages: RankStages, passes: Sequence[Passes]) -> Alive:
    """What is alive between steps."""
    rest = stages.rest + kept_grads(stages, passes)
    left = left_behind(stages)
    return rest + left if left else rest


def updates(stages: RankStages) -> list[Stretch]:
    """The optimizer's part, where the device has it."""
    return [] if stages.offloads else [update(stages)]


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
