"""DeepSpeed's own checkpointing (`use_reentrant`): blocks of a pipeline that run forward again together.

Source: `deepspeed.runtime.activation_checkpointing.checkpointing:CheckpointFunction`.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import final

from memplan.engines.deepspeed.stage import PipelineStage
from memplan.passes.backward import from_outside
from memplan.passes.trace import Block, Segment
from memplan.record import AddToIncoming, Alloc, Event, Free, frees
from memplan.shapes import Buffer, buffer_of


@final
class CheckpointedBlocks:
    """The passes of a stage's blocks, some of which are checkpointed together, and of its head.

    A function in the backward pass holds the gradient that it was given until all its blocks are done: no
    block adds to it in place, as a block does otherwise.
    """

    def __init__(self, stage: PipelineStage) -> None:
        self.stage, self.trace = stage, stage.trace
        self.kinds = [kind for kind, n in stage.runs for _ in range(n)]
        self.together = {i: blocks for blocks in stage.checkpointed for i in blocks}
        one = self.trace.boundary_grad
        self.others = [
            buffer_of(f"gradient of an interval's input {i}", one.shape, one.dtype) for i in (0, 1)
        ]

    def _block(self, i: int) -> Block:
        return self.trace.blocks[self.kinds[i]]

    def _made(self, place: int) -> Buffer:
        """The gradient that the interval at a place makes, the first one in the module being at 0."""
        return self.others[place % 2] if place else self.trace.boundary_grad

    def forward(self) -> Iterator[Segment]:
        """The blocks' forward passes; of an interval only the first one's input is kept."""
        stage, trace = self.stage, self.trace
        for i, kind in enumerate(self.kinds):
            block = trace.blocks[kind._replace(recompute="full") if i in self.together else kind]
            segment = block.entry if stage.first and not i else block.forward
            if i == len(self.kinds) - 1 and not stage.last:
                segment = trace.sending(segment)
            if i in self.together and i > self.together[i].start:
                segment = Segment((*segment.events, *frees(trace.boundary)))
            yield segment

    def head_backward(self) -> Segment:
        """The head's backward pass, which makes a gradient for the last interval."""
        made = {Alloc(self.trace.boundary_grad): Alloc(self._made(len(self.stage.checkpointed)))}
        return Segment(
            tuple([made.get(e, e) if isinstance(e, Alloc) else e for e in self.stage.head[1].events])
        )

    def backward(self, i: int) -> Segment:
        """A block's backward pass; before the last one of an interval all its blocks run forward again.

        The function has detached their input; it holds that, and their output, until all are done.
        """
        stage, trace, block = self.stage, self.trace, self._block(i)
        segment = block.backward if i or not stage.first else block.entry_backward
        blocks = self.together.get(i)
        if blocks is None:
            received = i == len(self.kinds) - 1 and not stage.last
            return Segment(from_outside(segment.events, trace.boundary_grad)) if received else segment
        place = stage.checkpointed.index(blocks)
        found = [*segment.events]
        ends: list[Event] = []
        if i == blocks.stop - 1:
            found = [*self._added(i, found, self._made(place))]
        if i == blocks.start:
            last = max(j for j, e in enumerate(found) if isinstance(e, Free) and e.buffer is trace.boundary)
            found.pop(last)
            received = blocks.stop == len(self.kinds) and not stage.last
            given = [self._made(place + 1)] * (not received)
            ends = [*frees(trace.boundary, trace.boundary, *given)]
        again = [event for j in blocks for event in self._block(j).forward.events if i == blocks.stop - 1]
        return Segment((*again, *found, *ends))

    def _added(self, i: int, found: Sequence[Event], made: Buffer) -> tuple[Event, ...]:
        """A block's events where the sum with its output's gradient is a new tensor."""
        marked = list(found)
        for place in self._marks[i]:
            marked[place : place + self._is_marked] = [AddToIncoming(made)]
        return from_outside(marked, made)

    @property
    def _is_marked(self) -> bool:
        """Whether its trace marks that sum, as where the gradient is received: on all stages but the last."""
        return not self.stage.last

    @cached_property
    def _marks(self) -> list[list[int]]:
        """The places of that sum among the events of each block's backward pass."""
        blocks = self.stage.receiving.blocks
        found = [blocks[kind].backward.events for kind in self.kinds]
        return [[j for j, e in enumerate(own) if isinstance(e, AddToIncoming)] for own in found]
