"""A whole step of one rank."""

from dataclasses import dataclass

from memplan.engines.torch.fsdp import ShardedPasses
from memplan.engines.torch.optimizer import update
from memplan.engines.torch.passes import Passes
from memplan.engines.torch.schedules import schedule
from memplan.engines.torch.stage import Stage
from memplan.timeline import Alive, Stretch, chain


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimeline:
    """One rank's step: what is alive between steps, what it allocates and frees, the gradients it makes."""

    rest: Alive
    step: Stretch
    grads: Alive

    @property
    def rest_bytes(self) -> int:
        """Bytes alive between steps."""
        return sum(n * buffer.n_bytes for buffer, n in self.rest.items())

    @property
    def peak_bytes(self) -> int:
        """Bytes alive at the worst instant."""
        return self.rest_bytes + self.step.high_bytes


def passes_of(stage: Stage) -> Passes:
    """The stage's forward and backward passes; the same for every `alike` stage."""
    return ShardedPasses(stage) if stage.fsdp else Passes(stage)


def timeline(stage: Stage, passes: Passes | None = None) -> StageTimeline:
    """What the stage's rank holds at rest, and its step; `passes` of an alike stage save working them out."""
    order = schedule(stage, passes if passes is not None else passes_of(stage))
    return StageTimeline(rest=stage.rest, step=chain("step", *order, update(stage)), grads=stage.grads)
