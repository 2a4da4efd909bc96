"""Forward and backward of one micro-batch where every rank has the weights whole."""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

from memplan.engines.torch.stage import Stage
from memplan.engines.trace import Block, Segment, gradients
from memplan.record import (
    AccumulateGrad,
    AddToIncoming,
    Alloc,
    Collective,
    CollectiveKind,
    Event,
    Free,
    Stretch,
    chain,
    events,
    repeated,
)
from memplan.shapes import Buffer, Parameter


class Passes:
    """Forward and backward of one micro-batch where every rank has the weights whole (DDP, or one rank)."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.trace = stage.trace
        self.reduces = False
        """Whether the last backward pass of a step differs from the others."""
        self.first_differs = False
        """Whether the first forward pass of a step does."""
        self._made: dict[tuple[str | bool, ...], Stretch] = {}

    def forward(self, *, first: bool, unsharded: bool = False, releases: bool = False) -> Stretch:
        """The forward pass up to the loss.

        `first` of the step; `unsharded`: FSDP2 finds the blocks' weights whole; `releases`: the schedule
        drops the micro-batch before once it has the new output.
        """
        first, unsharded = first and self.first_differs, unsharded and self.stage.plan.fsdp
        key = "forward", first, unsharded, releases
        if key not in self._made:
            self._made[key] = self._forward(first, unsharded, self.release() if releases else None)
        return self._made[key]

    def backward(
        self,
        *,
        first: bool,
        last: bool = False,
        unsharded: bool = False,
        pending: bool = False,
        late: bool = False,
    ) -> Stretch:
        """The backward pass; `first` or `last` of the step, `unsharded` as in `forward`.

        `pending`: FSDP2 has yet to add the last gradients to their sum; `late`: it adds those of recomputed
        blocks when all else is done.
        """
        last, unsharded = self.reduces and last, unsharded and self.stage.plan.fsdp
        key = "backward", first, last, unsharded, pending, late
        if key not in self._made:
            self._made[key] = self._backward(first, last, unsharded, pending, late)
        return self._made[key]

    def _forward(self, first: bool, unsharded: bool, release: Stretch | None) -> Stretch:
        blocks = (repeated(segment.stretch("forward: block"), n) for segment, n in self.stage.forward_order)
        embedding = self.trace.embed.stretch("forward: embedding")
        return chain("forward", embedding, *blocks, *self._forward_end(release))

    def _forward_end(self, release: Stretch | None) -> list[Stretch]:
        trace = self.trace
        parts = []
        if self.stage.last:
            parts.append(trace.head.stretch("forward: head"))
        if self.stage.op_context.autocast:
            parts.append(trace.embed_casts.stretch("forward: end of autocast"))
            for block, n in self.stage.blocks:
                parts.append(repeated(block.casts.stretch("forward: end of autocast"), n))
            parts.append(trace.head_casts.stretch("forward: end of autocast"))
        if release is not None:
            parts.append(release)
        if self.stage.last:
            parts.append(trace.loss.stretch("loss"))
        return parts

    def _backward(self, first: bool, last: bool, unsharded: bool, pending: bool, late: bool) -> Stretch:
        kept = not self.adds_to_older(first)
        return chain(
            "backward",
            events("backward: loss and head", self.added(self.trace.head_backward, kept)),
            *self._blocks(kept),
            events("backward: embedding", self.added(self.trace.embed_backward, kept)),
            *self.returned(),
        )

    def returned(self) -> list[Stretch]:
        """What goes when the backward pass returns."""
        trace = self.trace
        return [trace.end_of_backward.stretch("backward: end")] if self.stage.last else []

    def adds_to_older(self, first: bool) -> bool:
        """Whether a pass finds gradients that it adds its own to: another pass's, or zeroed ones."""
        return not (first and self.stage.plan.set_to_none)

    def added(self, segment: Segment, kept: bool) -> tuple[Event, ...]:
        """A backward segment's events: gradients are `kept`, or added to older ones."""
        return segment.events if kept else added_to_older(segment)

    def _blocks(self, kept: bool) -> Iterator[Stretch]:
        """The blocks in reverse; what the last one gets comes from the head or from another stage."""
        outside = not self.stage.last
        for segment, n in backward_order(self.stage.blocks):
            body = self.added(segment, kept)
            yield repeated(events("backward: block", from_outside(body) if outside else body), n)
            outside = False

    def backward_input(self, *, first: bool, pending: bool = False, late: bool = False) -> Stretch:
        """The first part of a split backward pass: the gradient of the stage's input.

        `pending`: FSDP2 has yet to add the last gradients to their sum, and does so now; `late` as in
        `backward`; `first` of the step.
        """
        key = "backward-input", first, pending, late
        if key not in self._made:
            self._made[key] = self._backward_input(first, pending, late)
        return self._made[key]

    def _backward_input(self, first: bool, pending: bool, late: bool) -> Stretch:
        split, name = self.stage.split, "backward: inputs of the blocks"
        return chain(
            "backward",
            events("backward: loss", split.loss.events),
            events("backward: input of the head", split.head.events),
            *[repeated(events(name, segment.events), n) for segment, n in split.blocks],
            *[repeated(events("backward: end", segment.events), n) for segment, n in split.end],
        )

    def backward_weight(self, *, first: bool) -> Stretch:
        """The second part: the gradients of the stage's weights, added to older ones but for the first."""
        key = "backward-weight", first
        if key not in self._made:
            self._made[key] = self._backward_weight(first)
        return self._made[key]

    def _backward_weight(self, first: bool) -> Stretch:
        split = self.stage.split
        keeps = first and (self.stage.plan.set_to_none or self.stage.plan.fsdp)
        kept = set(self._gradients().values()) if keeps else set()

        def part(segment: Segment, n: int = 1) -> Stretch:
            found = [e for e in segment.events if not (isinstance(e, Free) and e.buffer in kept)]
            return repeated(events("backward: weights", found), n)

        return chain(
            "backward",
            *[part(segment, n) for segment, n in split.weights],
            part(split.weights_head),
            *[part(segment, n) for segment, n in split.weights_end],
        )

    def _gradients(self) -> dict[Parameter, Buffer]:
        trace = self.trace
        return gradients(trace.head_backward, trace.blocks[0].backward, trace.embed_backward)

    def release(self) -> Stretch:
        """What the schedule still holds of a micro-batch: a stage's output."""
        return self.trace.release.stretch("release of the stage's output")

    def release_loss(self) -> Stretch:
        """The loss of a micro-batch, which the schedule holds until it returns."""
        return self.trace.release_loss.stretch("release of the loss")

    def release_input_grad(self) -> Stretch:
        """The gradient that was sent to the stage before."""
        return self.trace.release_input_grad.stretch("release of the input's gradient")

    @cached_property
    def fwd_recv(self) -> Stretch:
        """The receive of the stage's input (`_PipelineStageBase.get_fwd_recv_ops`)."""
        return self._p2p("recv", "activations")

    @cached_property
    def fwd_send(self) -> Stretch:
        """The send of the stage's output (`_PipelineStageBase.get_fwd_send_ops`)."""
        return self._p2p("send", "activations")

    @cached_property
    def bwd_recv(self) -> Stretch:
        """The receive of the output's gradient (`_PipelineStageBase.get_bwd_recv_ops`)."""
        return self._p2p("recv", "activation gradients")

    @cached_property
    def bwd_send(self) -> Stretch:
        """The send of the input's gradient (`_PipelineStageBase.get_bwd_send_ops`)."""
        return self._p2p("send", "activation gradients")

    def _p2p(self, kind: CollectiveKind, what: str) -> Stretch:
        n_bytes = self.trace.boundary.n_bytes
        return events(f"{kind} {what}", [Collective(kind=kind, axis="pp", what=what, payload_bytes=n_bytes)])

    @property
    def accumulates_in_fp32(self) -> bool:
        """Whether gradients are added up in a wider type than they come in."""
        return False

    @property
    def defers(self) -> bool:
        """Whether some of a stage's gradients can be `late`."""
        return False

    def reduced(self, *, summed: bool = True, pending: bool = False) -> list[Stretch]:
        """The reductions that a pipeline schedule has put off until its last backward pass.

        Of the gradients that are `summed`, after those that are `pending` have been added to them.
        """
        return []


def backward_order(blocks: Sequence[tuple[Block, int]]) -> Iterator[tuple[Segment, int]]:
    """The backward passes in reverse, and how often each: the stage's last and first block on their own."""
    (entry, n_entry), last = blocks[0], blocks[-1][0]
    if sum([n for _, n in blocks]) > 1:
        yield last.backward, 1
        for block, n in reversed(blocks):
            yield block.backward, n - (block is last) - (block is entry)
    if n_entry:
        yield entry.entry_backward, 1


def added_to_older(segment: Segment) -> tuple[Event, ...]:
    """The segment's events where gradients are added in place to older ones, and freed."""
    found: list[Event] = []
    for event in segment.events:
        found.append(event)
        if isinstance(event, AccumulateGrad):
            found.append(Free(event.buffer))
    return tuple(found)


def from_outside(found: Iterable[Event]) -> tuple[Event, ...]:
    """Events of the block that another rank's gradient comes in at: its sum takes a new tensor."""
    return tuple(Alloc(e.buffer) if isinstance(e, AddToIncoming) else e for e in found)
