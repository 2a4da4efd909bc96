"""Forward and backward of one micro-batch where every rank has the weights whole."""

from collections.abc import Collection, Iterable

from memplan.engines.torch.stage import Stage
from memplan.engines.trace import Segment
from memplan.shapes import Buffer, Event, Parameter
from memplan.timeline import Stretch, chain, events, frees, repeated


class Passes:
    """Forward and backward of one micro-batch where every rank has the weights whole (DDP, or one rank)."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.trace = stage.trace
        self._made: dict[tuple[str, bool, bool, bool], Stretch] = {}

    def forward(self, *, first: bool, unsharded: bool = False, releases: bool = False) -> Stretch:
        """The forward pass up to the loss.

        `first` of the step; `unsharded`: FSDP2 finds the blocks' weights whole; `releases`: the schedule
        drops the micro-batch before once it has the new output.
        """
        key = "forward", first, unsharded, releases
        if key not in self._made:
            self._made[key] = self._forward(first, unsharded, self.release() if releases else None)
        return self._made[key]

    def backward(self, *, first: bool, unsharded: bool = False) -> Stretch:
        """The backward pass; `first` of the step, `unsharded` as in `forward`."""
        key = "backward", first, unsharded, False
        if key not in self._made:
            self._made[key] = self._backward(first, unsharded)
        return self._made[key]

    def _forward(self, first: bool, unsharded: bool, release: Stretch | None) -> Stretch:
        trace, n = self.trace, self.stage.n_blocks
        return chain(
            "forward",
            events("forward: embedding", trace.embed.events),
            events("forward: block", trace.entry_block.events),
            repeated(events("forward: block", trace.block.events), n - 1),
            *self._forward_end(release),
        )

    def _forward_end(self, release: Stretch | None) -> list[Stretch]:
        trace, n = self.trace, self.stage.n_blocks
        parts = []
        if self.stage.last:
            parts.append(events("forward: head", trace.head.events))
        if self.stage.setting.autocast:
            parts.append(events("forward: end of autocast", trace.embed_casts.events))
            parts.append(repeated(events("forward: end of autocast", trace.block_casts.events), n))
            parts.append(events("forward: end of autocast", trace.head_casts.events))
        if release is not None:
            parts.append(release)
        if self.stage.last:
            parts.append(events("loss", trace.loss.events))
        return parts

    def _backward(self, first: bool, unsharded: bool) -> Stretch:
        trace, n = self.trace, self.stage.n_blocks
        return chain(
            "backward",
            events("backward: loss and head", self.added(trace.head_backward, first)),
            *self._blocks(first, n),
            *self._embedding(first),
            *self._sent(first),
        )

    def added(self, segment: Segment, first: bool) -> tuple[Event, ...]:
        """A backward segment's events: gradients are kept in the `first` pass of a step, added after."""
        if first:
            return segment.events
        return added_to_older(segment, [p for p in gradients(segment) if not self._is_late(p)])

    def _is_late(self, parameter: Parameter) -> bool:
        """Whether a gradient waits for the end of the backward pass before it is added to an older one.

        Beside tensor parallelism DDP holds plain weights and makes DTensors of the divided ones before the
        forward pass. That is the first step of the pass, and so the last of the way back.

        Source: torch/distributed/tensor/parallel/ddp.py (`_reconstruct_dtensor`).
        """
        return self.stage.ddp and parameter.distributed

    def _embedding(self, first: bool) -> list[Stretch]:
        """The embedding's backward, and the late additions: head and blocks first, the table's cut last."""
        name, embed = "backward: embedding", self.added(self.trace.embed_backward, first)
        if first or not (self.stage.ddp and self.stage.plan.tp > 1):
            return [events(name, embed)]
        head, block, table = (
            [buffer for parameter, buffer in gradients(segment).items() if self._is_late(parameter)]
            for segment in (self.trace.head_backward, self.trace.block_backward, self.trace.embed_backward)
        )
        divided = [b for p, b in gradients(self.trace.embed_backward).items() if p.tp_dim is not None]
        cut = next((i for i, event in enumerate(embed) if event.buffer in divided), len(embed))
        return [
            events(name, (*embed[:cut], *frees(*head))),
            repeated(events("backward: end", frees(*block)), self.stage.n_blocks),
            events("backward: end", (*embed[cut:], *frees(*table))),
        ]

    def _blocks(self, first: bool, n: int) -> list[Stretch]:
        inner = self.added(self.trace.block_backward, first)
        entry = self.added(self.trace.entry_block_backward, first)
        outer = entry if n == 1 else inner
        parts = [events("backward: block", outer if self.stage.last else from_outside(outer))]
        if n > 1:
            parts.append(repeated(events("backward: block", inner), n - 2))
            parts.append(events("backward: block", entry))
        return parts

    @property
    def keeps_sent(self) -> bool:
        """Whether sent tensors live to the schedule's end: GPipe keeps the handles, gloo's the tensors."""
        return self.stage.plan.schedule == "gpipe" and self.stage.device == "cpu"

    def _sent(self, first: bool) -> list[Stretch]:
        """The gradient sent to the stage before is held until the next one is made."""
        if self.stage.first or first or self.keeps_sent:
            return []
        return [events("backward: embedding", self.trace.release_input_grad.events)]

    def release(self) -> Stretch:
        """What the schedule still holds of a micro-batch: a stage's output."""
        return events("release of the stage's output", self.trace.release.events)

    def end(self) -> list[Stretch]:
        """What the schedule drops when it returns, and the reductions it has put off."""
        m, name = self.stage.plan.n_micro_batches, "end of the schedule"
        parts = []
        if self.keeps_sent and not self.stage.last:
            parts.append(repeated(events(name, self.trace.release.events), m))
        if not self.stage.first:
            sent = events(name, self.trace.release_input_grad.events)
            parts.append(repeated(sent, m if self.keeps_sent else 1))
        return parts


def gradients(*segments: Segment) -> dict[Parameter, Buffer]:
    """The gradients that backward segments leave."""
    return {e.parameter: e.buffer for segment in segments for e in segment.events if e.parameter is not None}


def added_to_older(segment: Segment, parameters: Collection[Parameter]) -> tuple[Event, ...]:
    """The segment's events where these parameters' gradients are added in place to older ones, and freed."""
    found: list[Event] = []
    for event in segment.events:
        found.append(event)
        if event.parameter is not None and event.parameter in parameters:
            found.append(Event(-1, event.buffer))
    return tuple(found)


def from_outside(found: Iterable[Event]) -> tuple[Event, ...]:
    """Events of the block that another rank's gradient comes in at: its sum takes a new tensor."""
    return tuple(Event(1, e.buffer) if e.sign == 0 and e.parameter is None else e for e in found)
