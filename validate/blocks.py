"""The blocks that the allocator holds after some of its events."""

import math
from collections.abc import Container, Sequence
from typing import Final

from memplan.snapshot import Block, MemoryEvent

MOST_SUMS: Final = 2000
"""Sums of blocks tried at most, to find what other threads have freed at once."""


def alive_after(
    events: Sequence[MemoryEvent],
    n_events: int,
    *,
    held: Sequence[Block] = (),
    kept: Container[int] = (),
) -> list[Block]:
    """The blocks alive after the first `n_events`, oldest first; `held` were alive before them.

    What other threads free shows in the allocator's running total only. The freed block (or blocks) has as
    many bytes as the total fell by, and no later event frees it. Candidates, in this order: blocks whose
    address is given out again before the next such fall; blocks whose address is given out again at all;
    the oldest block of exactly that size that was made for a collective and is not `held`. Blocks at
    addresses that are `kept` are no candidates. Without a candidate the blocks are more than the total.
    """
    walk = _Walk(events, held, kept)
    for i in range(n_events):
        walk.step(i)
    return sorted((block for _, block in walk.alive.values()), key=lambda block: block.born_ns)


class _Walk:
    """Goes through the events; `alive` has each address' block, and its number: that of its allocation."""

    def __init__(self, events: Sequence[MemoryEvent], held: Sequence[Block], kept: Container[int]) -> None:
        self.events = events
        self.kept = kept
        self.alive = {block.pointer: (-1 - i, block) for i, block in enumerate(held)}
        self.freed: set[int] = set()
        self.reused_at: dict[int, int] = {}
        self.unseen: list[int] = []
        self._look_ahead()

    def _look_ahead(self) -> None:
        """Which blocks the events free, and which must have been freed before their address is reused."""
        at = {pointer: number for pointer, (number, _) in self.alive.items()}
        for i, event in enumerate(self.events):
            if event.pointer == 0:
                self.unseen.append(i)
            elif event.n_bytes < 0:
                self.freed.add(at.pop(event.pointer, i))
            else:
                if event.pointer in at:
                    self.reused_at[at[event.pointer]] = i
                at[event.pointer] = i

    def step(self, i: int) -> None:
        """One event."""
        event = self.events[i]
        if event.pointer == 0:
            for block in self._freed_unseen(i, -event.n_bytes):
                del self.alive[block.pointer]
            return
        self.alive.pop(event.pointer, None)
        if event.n_bytes > 0:
            block = Block(
                n_bytes=event.n_bytes, pointer=event.pointer, born_ns=event.time_ns, path=event.path
            )
            self.alive[event.pointer] = i, block

    def _freed_unseen(self, now: int, n_bytes: int) -> tuple[Block, ...]:
        """The blocks that another thread has freed just before an event."""
        again = next((i for i in self.unseen if i > now), math.inf)
        candidates = [
            (number, block)
            for number, block in self.alive.values()
            if number not in self.freed and (number in self.reused_at or block.pointer not in self.kept)
        ]

        def order(candidate: tuple[int, Block]) -> tuple[float, ...]:
            number, block = candidate
            reused_at = self.reused_at.get(number, math.inf)
            must_now, reused = reused_at < again, reused_at < math.inf
            other_size = block.n_bytes != n_bytes
            return not must_now, not reused, other_size, "c10d" not in block.path, number < 0, block.born_ns

        return _adding_up([block for _, block in sorted(candidates, key=order)], n_bytes)


def _adding_up(blocks: Sequence[Block], n_bytes: int) -> tuple[Block, ...]:
    """The first blocks that add up to `n_bytes`; empty if there are none."""
    sums: dict[int, tuple[Block, ...]] = {0: ()}
    for block in blocks:
        if n_bytes in sums or len(sums) > MOST_SUMS:
            break
        for total, parts in list(sums.items()):
            if total + block.n_bytes <= n_bytes:
                sums.setdefault(total + block.n_bytes, (*parts, block))
    return sums.get(n_bytes, ())
