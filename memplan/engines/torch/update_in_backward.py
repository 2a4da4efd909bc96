"""A module whose weights each have an optimizer of their own, which steps within the backward pass.

Source: PyTorch's tutorial "How to save memory by fusing an optimizer step into the backward pass"
(`register_post_accumulate_grad_hook`); torchtune's `optimizer_in_bwd`.
"""

from collections.abc import Iterator
from typing import Self, final

from memplan.engines.torch.optimizer import implementation
from memplan.engines.torch.stage import Stage
from memplan.parts.module import PlainModule
from memplan.parts.weight_updates import (
    Variables,
    Weight,
    states_of_own_optimizer,
    updated_alone,
    updated_together,
)
from memplan.passes.trace import Segment
from memplan.record import AccumulateGrad, Event, allocs, frees
from memplan.shapes import Parameter, Shape


@final
class ModuleUpdatedInBackward(PlainModule):
    """A module without a wrapper; a hook of each weight updates it and frees its gradient.

    The updates of the first step make the optimizer's state.
    """

    stage: Stage

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage, zeroed=False)
        self.makes_states = False

    def in_first_step(self) -> Self:
        other = self.fresh()
        other.makes_states, other._played = True, {}
        return other

    def _made_grads(self) -> None:
        return

    def _added(self, segment: Segment) -> tuple[Event, ...]:
        """A backward segment's events, with each weight's update once its gradient is there.

        Source: torch/csrc/autograd/functions/accumulate_grad.cpp (`tensor_post_acc_grad_hooks`).
        """
        found: list[Event] = []
        for event in segment.events:
            found.append(event)
            if isinstance(event, AccumulateGrad):
                shape = event.parameter.shape
                found += updated_at_once(self.stage, event.parameter, shape, makes_states=self.makes_states)
                found += frees(event.buffer)
        return tuple(found)


def updated_at_once(
    stage: Stage, parameter: Parameter, shape: Shape, *, makes_states: bool
) -> Iterator[Event]:
    """What the update of one weight allocates; `shape`: of the rank's part of it.

    `makes_states`: it is the first step, which makes the state of the weight.
    """
    kept, chosen, device = stage.plan.kept, implementation(stage), stage.update_device
    weight = Weight(parameter.name, shape, stage.weight_dtype)
    if makes_states:
        yield from allocs(*states_of_own_optimizer(kept, weight, on_host=not stage.scalars_on_device))
    if chosen == "for-loop":
        variables = Variables()
        yield from updated_alone(stage.plan.optimizer, weight, variables, device)
        yield from variables.end()
    elif chosen == "foreach":
        yield from updated_together(stage.plan.optimizer, [weight], device)
