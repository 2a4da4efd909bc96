"""What a token dispatcher holds of a layer that is recomputed: the layer's input, and the input's gradient.

A dispatcher keeps its last pass's `probs`. Their graph, made in the backward pass, ends at the layer's
input, which has its gradient in `grad`. The next pass of the layer gives the dispatcher other `probs`.

Source: megatron.core.tensor_parallel.random:CheckpointFunction.backward,
megatron.core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher.dispatch_preprocess.
"""

from collections.abc import Iterable, Sequence

from memplan.passes.backward import from_outside
from memplan.record import AccumulateGrad, AddToIncoming, Alloc, Event, Free, frees
from memplan.shapes import Buffer


def let_go(events: Sequence[Event], buffers: Iterable[Buffer]) -> tuple[Event, ...]:
    """The events of a layer's pass, with the frees of these buffers once the router has new `probs`."""
    after = 1 + next(
        i for i, e in enumerate(events) if isinstance(e, Alloc) and e.buffer.name.endswith(".probs")
    )
    return (*events[:after], *frees(*buffers), *events[after:])


def summed_apart(events: Sequence[Event], grad: Buffer) -> tuple[Event, ...]:
    """The events of a layer's backward pass whose output's gradient is kept by others.

    The layer adds its norm's gradient to it in a new tensor, `grad`, not in place.
    """
    if any(isinstance(event, AddToIncoming) for event in events):
        return from_outside(events, grad)
    after = next(
        i for i, e in enumerate(events) if isinstance(e, AccumulateGrad) and "norm" in e.parameter.name
    )
    added = next(
        i
        for i, event in enumerate(events)
        if i > after
        and isinstance(event, Free)
        and (event.buffer.shape, event.buffer.kind) == (grad.shape, grad.kind)
    )
    return (*events[:added], Alloc(grad), *events[added:])
