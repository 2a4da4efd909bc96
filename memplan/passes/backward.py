"""A stage's backward pass from its trace: the blocks' order, and gradients that are there already."""

from collections.abc import Iterable, Iterator, Sequence

from memplan.passes.trace import Block, Segment
from memplan.record import AccumulateGrad, AddToIncoming, Alloc, Event, Free
from memplan.shapes import Buffer


def backward_order(blocks: Sequence[tuple[Block, int]]) -> Iterator[tuple[Segment, int]]:
    """The blocks' backward passes in order, with counts; the last and first block are listed alone."""
    (entry, n_entry), end = blocks[0], len(blocks) - 1
    if sum([n for _, n in blocks]) > 1:
        last = blocks[end][0]
        yield (last.last_backward if last.last_backward.events else last.backward), 1
        for i in range(end, -1, -1):
            block, n = blocks[i]
            yield block.backward, n - (i == end) - (i == 0)
    if n_entry:
        yield entry.entry_backward, 1


def added_to_older(segment: Segment) -> tuple[Event, ...]:
    """The segment's events if there are older gradients: each new one is added to them in place and freed."""
    found: list[Event] = []
    for event in segment.events:
        found.append(event)
        if isinstance(event, AccumulateGrad):
            found.append(Free(event.buffer))
    return tuple(found)


def from_outside(found: Iterable[Event], incoming: Buffer) -> tuple[Event, ...]:
    """A block's backward events if its output's gradient, `incoming`, was received from another rank.

    The schedule frees `incoming`; the sum with it is a new tensor.
    """
    found = tuple(found)
    is_dropped = any(isinstance(event, AddToIncoming) for event in found)
    kept: list[Event] = []
    for event in found:
        if isinstance(event, Free) and event.buffer is incoming and not is_dropped:
            is_dropped = True
            continue
        kept.append(Alloc(event.buffer) if isinstance(event, AddToIncoming) else event)
    return tuple(kept)
