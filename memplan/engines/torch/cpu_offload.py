"""torchao's CPUOffloadOptimizer: AdamW of large weights on the host, of small ones on the GPU.

The host has a page-locked copy of each large weight, and of its gradient, which a hook copies there on a
stream of its own once autograd has made it. The fused AdamW updates the copy, which is copied back. With
`offload_gradients` the hook frees the gradient on the GPU.

Neglects: that copies overlap with the backward pass.
Source: torchao/optim/cpu_offload.py (`CPUOffloadOptimizer`), 0.18.
"""

from collections import Counter
from collections.abc import Iterator
from typing import final

from memplan.engines.torch.stage import RankStages, Stage
from memplan.memory import Alive
from memplan.mesh import HOST
from memplan.parts.module import PlainModule
from memplan.parts.weight_updates import scalars_of
from memplan.passes.trace import Segment
from memplan.record import AccumulateGrad, Collective, Event, frees
from memplan.shapes import Parameter, buffer_of


@final
class ModuleOffloadingGradients(PlainModule):
    """A module without a wrapper; a hook of each large weight copies its gradient to the host and frees it.

    Assumes: the copy is done when the block is asked for again (`record_stream`).
    """

    stage: Stage

    def _added(self, segment: Segment) -> tuple[Event, ...]:
        found: list[Event] = []
        for event in segment.events:
            found.append(event)
            if isinstance(event, AccumulateGrad) and self.stage.updates_on_host(event.parameter):
                found += frees(event.buffer)
        return tuple(found)


def updated_on_host(stages: RankStages) -> list[tuple[Parameter, int]]:
    """The weights that the host updates, and how many times each occurs."""
    return [(p, n) for p, n in stages.counted_trained_parameters() if stages.stages[0].updates_on_host(p)]


def copied_by_optimizer(stages: RankStages) -> Iterator[Event]:
    """Gradients are copied to the host, and updated weights back."""
    itemsize = stages.weight_dtype.itemsize
    for what in ("gradients to the host", "updated weights from the host"):
        for p, n in updated_on_host(stages):
            n_bytes = stages.weight_elements(p) * itemsize
            yield Collective(kind="copy", axis=HOST, what=what, payload_bytes=n_bytes, calls=n)


def on_host(stages: RankStages) -> tuple[Alive, Alive]:
    """The copies of weights and gradients, which are page-locked, and AdamW's state, which is not."""
    pinned: Alive = Counter()
    pageable: Alive = Counter()
    dtype = stages.weight_dtype
    for p, n in updated_on_host(stages):
        shape = stages.weight_shape(p)
        pinned[buffer_of(f"{p.name} (copy)", shape, dtype, "optimizer")] = n
        pinned[buffer_of(f"{p.name}.grad (copy)", shape, dtype, "grads")] = n
        states = [
            buffer_of(f"{p.name}.{name}", shape, dtype, "optimizer") for name in stages.plan.kept.moments
        ]
        pageable.update(dict.fromkeys([*states, *scalars_of(stages.plan.kept.scalars, p.name)], n))
    return pinned, pageable
