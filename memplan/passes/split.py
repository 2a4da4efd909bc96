"""A stage's backward pass in two parts, traced over its first block, its last block and one between.

The gradient that a block's first part makes for the block before lives until that block's second part. So,
unlike a whole backward pass, the parts cannot be composed from the trace of a single block.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from memplan.models import Model
from memplan.ops import gradient_of_loss, scaled_loss, share_of_loss
from memplan.passes.trace import (
    EMPTY,
    BlockKind,
    Marks,
    Segment,
    Trace,
    buffer_in,
    entry_of,
    kinds_of,
    run_block,
    without,
)
from memplan.record import AccumulateGrad, AddToIncoming, Alloc, Event, Free
from memplan.shapes import Buffer, DType, Kind, Shape
from memplan.tape import OpContext, SplitBackward, Tape, Tensor

CountedSegments = tuple[tuple[Segment, int], ...]
"""Segments in order, each with its number of repetitions."""

BlockRuns = tuple[tuple[BlockKind, int], ...]
"""A stage's runs of equal blocks, each with its length."""

MOST_TRACED: Final = 3
"""Blocks of a run that are traced: the first, the last, and one that stands for those between."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitTrace:
    """The two parts of a backward pass through a stage that is not the pipeline's first.

    `loss`, `head`, `blocks` and `end` are the first part, in its order; `weights`, `weights_head` and
    `weights_end` the second, in the module's order. The ends free what their part has held. `products` are
    the results of matrix products of both parts.
    """

    loss: Segment = EMPTY
    head: Segment = EMPTY
    blocks: CountedSegments
    end: CountedSegments
    weights: CountedSegments
    weights_head: Segment
    weights_end: CountedSegments
    products: frozenset[Buffer] = frozenset()


@lru_cache(maxsize=256)
def split_traced(
    trace: Trace, model: Model, context: OpContext, *, last: bool, runs: BlockRuns
) -> SplitTrace:
    """The split backward pass of one micro-batch, in the buffers and parameters of the stage's `trace`.

    The trace is an argument because another trace of the same stage has other buffers.
    """
    tape = Tape(context)
    names = _Names(trace, tape.products["backward"])
    own = [parameter for block in trace.blocks.values() for parameter in block.parameters]
    tape.parameters.update({parameter.name: parameter for parameter in (*own, *trace.head_parameters)})
    cut = Marks(tape)
    x, ends = _forward(trace, model, names, cut, runs)
    times = [n for _, n in _traced_blocks(runs)]
    held = Tensor(tape, x.shape, x.dtype, x.storage)
    of_loss = of_head = EMPTY
    grad: Tensor | None = None
    held_loss: Tensor | None = None
    if last:
        held = logits = model.head(x)
        del x
        n_head = len(tape.nodes)
        if model.computes_loss:
            held = end = model.loss(logits)
        names.give(cut.segment(), trace.head)
        tape.leave_autocast()
        if not model.computes_loss:
            end = model.loss(logits)
        held = held.detach()
        del logits
        end = scaled_loss(share_of_loss(end))
        names.give(cut.segment(), trace.loss)
        grad = gradient_of_loss(tape)
        split = SplitBackward(tape)
        tape.start_backward(end, grad)
        held_loss = Tensor(tape, end.shape, end.dtype, end.storage)
        del end
        split.input(down_to=n_head)
        of_loss = cut.segment()
        split.input(down_to=ends[-1])
        of_head = cut.segment()
    else:
        split = SplitBackward(tape)
        tape.start_backward(x, Tensor(tape, x.shape, x.dtype))
        del x
        tape.let_go()
        cut.segment()
    of_blocks, input_grad = _first_part(split, cut, list(zip(ends[:-1], times, strict=True)))
    grad = None
    names.give_tensor(input_grad, trace.boundary_grad)
    loss, head = names(of_loss), names(of_head)
    blocks = [(names(segment, repeats=n), n) for segment, n in of_blocks]
    split.end_input()
    end_input = names.by_repeats(cut.segment())
    second = _second_part(split, names, cut, list(zip(ends[1:], times, strict=True)))
    del held, held_loss, input_grad
    products = frozenset(names.of(tape.products["backward"]))
    return SplitTrace(loss=loss, head=head, blocks=tuple(blocks), end=end_input, products=products, **second)


def _forward(
    trace: Trace, model: Model, names: "_Names", cut: Marks, runs: BlockRuns
) -> tuple[Tensor, list[int]]:
    """The last traced block's output, and the numbers of nodes before and after each block."""
    tape = cut.tape
    tape.kinds = kinds_of(kind for kind, _ in runs)
    x = entry_of(model, tape, first=False)
    names.give_arguments(cut.segment(), x, trace.embed)
    ends = [1]
    for kind, n in _traced_blocks(runs):
        x, block = run_block(model, tape, x, kind), trace.blocks[kind]
        names.give(cut.segment(), block.entry if len(ends) == 1 else block.forward, repeats=n)
        tape.leave_autocast()
        ends.append(len(tape.nodes))
    return x, ends


def _first_part(
    split: SplitBackward, cut: Marks, blocks: Sequence[tuple[int, int]]
) -> tuple[list[tuple[Segment, int]], Tensor | None]:
    """The first part of the blocks' backward passes, and the gradient of the stage's input.

    `blocks`: each traced block's first node and repetitions.
    """
    found: list[tuple[Segment, int]] = []
    input_grad = None
    for i, (start, n) in reversed(list(enumerate(blocks))):
        split.input(down_to=start)
        if i == 0:
            input_grad = split.tape.nodes.pop().grad
        found.append((cut.segment(), n))
    return found, input_grad


def _second_part(
    split: SplitBackward, names: "_Names", cut: Marks, blocks: Iterable[tuple[int, int]]
) -> dict[str, Any]:
    """The second part of the backward pass; `blocks`: each traced block's last node and repetitions."""
    weights: list[tuple[Segment, int]] = []
    for end, n in blocks:
        split.weights(up_to=end)
        weights.append((names(cut.segment(), repeats=n), n))
    split.weights(up_to=split.n_nodes)
    weights_head = names(cut.segment())
    split.end_weights()
    weights_end = names.by_repeats(cut.segment())
    return {"weights": tuple(weights), "weights_head": weights_head, "weights_end": weights_end}


def _traced_blocks(runs: BlockRuns) -> BlockRuns:
    """The kind of each traced block, and how many blocks it stands for: 1 but for the middle one of three."""
    each = [(kind, (1, n - 2, 1) if n >= MOST_TRACED else (1,) * n) for kind, n in runs]
    return tuple([(kind, n) for kind, times in each for n in times])


_Signature = tuple[str, Shape, DType, Kind, bool]
"""What equal buffers have in common, and whether they are results of products."""


class _Names:
    """Maps the buffers of several traced blocks to the buffers of a trace with one block.

    A buffer that this trace lacks maps to one buffer for all blocks, by its order among the buffers of its
    kind in its block. The number of repetitions of each buffer's block is kept too.
    """

    def __init__(self, trace: Trace, products: Set[Buffer]) -> None:
        self.products = products
        self.grads = trace.gradients()
        self.known: dict[Buffer, Buffer | None] = {}
        self.repeats: dict[Buffer, int] = {}
        self.by_signature: dict[tuple[_Signature, int], Buffer] = {}
        self.made: Counter[_Signature] = Counter()

    def give_arguments(self, segment: Segment, received: Tensor, traced_as: Segment) -> None:
        """Map what all blocks are called with, but leave out the received tensor, which is the schedule's."""
        if received.storage is not None:
            self.known[received.storage.buffer] = None
            segment = without(segment, received.storage.buffer)
        self.give(segment, traced_as)

    def give(self, segment: Segment, traced_as: Segment, repeats: int = 1) -> None:
        """Map each allocation of a forward pass to the allocation at the same position in the trace."""
        ours, theirs = ([e.buffer for e in s.events if isinstance(e, Alloc)] for s in (segment, traced_as))
        self.known.update(zip(ours, theirs, strict=True))
        self.repeats.update(dict.fromkeys(ours, repeats))

    def give_tensor(self, tensor: Tensor | None, buffer: Buffer) -> None:
        """Map the buffer of a single tensor."""
        if tensor is not None and tensor.storage is not None:
            self.known[tensor.storage.buffer] = buffer

    def __call__(self, segment: Segment, repeats: int = 1) -> Segment:
        """A segment of the backward pass of a block, renamed; `repeats`: how many blocks it stands for."""
        self.made.clear()
        for event in segment.events:
            if isinstance(event, AccumulateGrad):
                self.known[event.buffer] = self.grads[event.parameter]
            if (buffer := buffer_in(event)) is not None:
                self.repeats.setdefault(buffer, repeats)
        return Segment(tuple(self._events(segment)))

    def of(self, buffers: Iterable[Buffer]) -> Iterator[Buffer]:
        """The trace's buffers that these stand for; buffers that the schedule made are left out."""
        return (known for buffer in buffers if (known := self._known(buffer)) is not None)

    def by_repeats(self, segment: Segment) -> CountedSegments:
        """The frees of an end, grouped by the repetitions of the buffers' blocks."""
        found: dict[int, list[Event]] = {}
        for event in segment.events:
            buffer = buffer_in(event)
            repeats = 1 if buffer is None else self.repeats.get(buffer, 1)
            found.setdefault(repeats, []).append(event)
        return tuple([(self(Segment(tuple(part))), n) for n, part in found.items()])

    def _events(self, segment: Segment) -> Iterator[Event]:
        for event in segment.events:
            match event:
                case Alloc(buffer) | AddToIncoming(buffer):
                    if (known := self._known(buffer)) is not None:
                        yield Alloc(known)
                case Free(buffer):
                    if (known := self._known(buffer)) is not None:
                        yield Free(known)
                case AccumulateGrad(buffer, parameter):
                    if (known := self._known(buffer)) is not None:
                        yield AccumulateGrad(known, parameter)
                case _:
                    yield event

    def _known(self, buffer: Buffer) -> Buffer | None:
        if buffer not in self.known:
            signature = buffer.name, buffer.shape, buffer.dtype, buffer.kind, buffer in self.products
            self.known[buffer] = self.by_signature.setdefault((signature, self.made[signature]), buffer)
            self.made[signature] += 1
        return self.known[buffer]
