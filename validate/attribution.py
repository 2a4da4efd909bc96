"""The predicted tensor in each block that the allocator holds at the measured peak.

Two lists are aligned: the blocks that the allocator held at the measured peak, and the tensors that the
prediction holds at its own peak, each in the order of allocation. A block is a tensor only if it has its
bytes exactly and its place in that order, both being alive at that instant; or, where autograd makes some in
another order than is predicted, if both were made in one stretch of the step or the next. Of what was held
before the step began, weights and optimizer state are known by their addresses, and are only matched with
tensors of their kind. A block that stands for several tensors (a shard and its padding, the buckets of DDP)
must have exactly their bytes; sums that happen to be near count for nothing.
"""

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, islice, zip_longest
from typing import Final

import numpy as np

from memplan.memory import Alive, n_bytes_of
from memplan.record import Alloc, Free, Stretch, unrolled
from memplan.shapes import Buffer
from memplan.snapshot import Block, MemoryEvent
from validate.blocks import alive_after
from validate.cases import Case
from validate.measure import RankMeasurement
from validate.predict import estimated_rank

PADDING: Final = " (padding)"
STATES: Final[tuple[str, ...]] = ("weights", "optimizer")
"""The kinds of states that a block held between steps may be known to have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """Measured blocks and the predicted tensors in them: one to one, except for buckets and padding."""

    blocks: tuple[Block, ...]
    tensors: tuple[Buffer, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Matched:
    """The matches of two lists, and the rest of each list."""

    known: tuple[Known, ...]
    blocks: tuple[Block, ...]
    tensors: tuple[Buffer, ...]

    @property
    def n_bytes(self) -> int:
        """Bytes of the blocks that were found."""
        return sum(block.n_bytes for known in self.known for block in known.blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """The bytes alive at a rank's measured peak, attributed to predicted tensors.

    `predicted_bytes` are held at the predicted instant `when`. `unexplained` are blocks that the ledger does
    not have, `unmeasured` tensors that it has and no block is. `lost_bytes` were freed by threads that no
    profile sees, in blocks that could not be told; they count as not attributed.
    """

    peak_bytes: int
    predicted_bytes: int
    when: str
    known: tuple[Known, ...]
    unexplained: tuple[Block, ...]
    unmeasured: tuple[Buffer, ...]
    lost_bytes: int

    @property
    def attributed_bytes(self) -> int:
        """Bytes of the blocks that the ledger names, less those that may have been freed."""
        return sum(block.n_bytes for known in self.known for block in known.blocks) - self.lost_bytes

    @property
    def fraction(self) -> float:
        """Attributed bytes / bytes at the peak."""
        return self.attributed_bytes / self.peak_bytes


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A measured step beside the predicted one.

    `rest` is what is predicted to be alive between steps, `update` the optimizer's stretches of the predicted
    step, `held` the blocks alive when the events began. If these are not `one_step` from its beginning, as in
    a snapshot, states are the oldest blocks of their size.
    """

    rest: Alive
    step: Stretch
    held: Sequence[Block]
    events: Sequence[MemoryEvent]
    one_step: bool = True
    update: tuple[Stretch, ...] = ()

    @cached_property
    def predicted(self) -> list[tuple[str, Alloc | Free]]:
        """The predicted step's allocations and frees in order, with their stretches."""
        return list(unrolled(self.step))

    @cached_property
    def predicted_bytes(self) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        """Bytes held after each predicted event."""
        deltas = [event.sign * event.buffer.n_bytes for _, event in self.predicted]
        return n_bytes_of(self.rest) + np.cumsum(deltas, dtype=np.int64)

    @cached_property
    def pairs(self) -> list[tuple[int, int]]:
        """Indices of predicted and measured allocations: their longest common subsequence."""
        if not self.one_step:
            return []
        from rapidfuzz.distance import Indel

        mine = [i for i, (_, event) in enumerate(self.predicted) if event.sign > 0]
        seen = [i for i, event in enumerate(self.events) if event.n_bytes > 0 and event.pointer]
        parts = Indel.opcodes(
            [self.predicted[i][1].buffer.n_bytes for i in mine], [self.events[i].n_bytes for i in seen]
        )
        return [
            (mine[i], seen[j])
            for part in parts
            if part.tag == "equal"
            for i, j in zip(
                range(part.src_start, part.src_end), range(part.dest_start, part.dest_end), strict=True
            )
        ]

    @property
    def peak(self) -> int:
        """The index of the measured peak."""
        return max(range(len(self.events)), key=lambda i: self.events[i].total_bytes)

    def attribution(self) -> Attribution:
        """The bytes at the measured peak, attributed.

        They are compared with the instant that the measured peak is at, or with the predicted peak where that
        explains more: with the nearest of several equally high ones, as each micro-batch's.
        """
        states = {block.pointer for block in self.held if block.kind}
        blocks = alive_after(self.events, self.peak + 1, held=self.held, kept=states)
        peak_bytes = self.events[self.peak].total_bytes
        beside = self._beside(self.peak)
        highest = np.flatnonzero(self.predicted_bytes == self.predicted_bytes.max())
        places = sorted({int(highest[np.abs(highest - beside).argmin()]), beside})
        place, found = max(
            ((place, self._matched(blocks, place)) for place in places), key=lambda pair: pair[1].n_bytes
        )
        return Attribution(
            peak_bytes=peak_bytes,
            predicted_bytes=int(self.predicted_bytes[place]),
            when=self.predicted[place][0],
            known=found.known,
            unexplained=found.blocks,
            unmeasured=found.tensors,
            lost_bytes=max(0, sum(block.n_bytes for block in blocks) - peak_bytes),
        )

    def _matched(self, blocks: Sequence[Block], place: int) -> Matched:
        rest, added = self._alive(place)
        if not self.one_step:
            base = _held_between_steps([replace(block, kind=None) for block in blocks], rest)
            return _both(base, self._made(base.blocks, added), blocks=())
        start_ns = self.events[0].time_ns
        base = _held_between_steps([block for block in blocks if block.born_ns < start_ns], rest)
        made = self._made([block for block in blocks if block.born_ns >= start_ns], added)
        return _both(base, made, blocks=base.blocks)

    def _made(self, blocks: Sequence[Block], added: Sequence[tuple[str, Buffer]]) -> Matched:
        """Matches of blocks and tensors that the step made: first in order, then within a stretch."""
        pairs = _in_order([block.n_bytes for block in blocks], [tensor.n_bytes for _, tensor in added])
        waiting: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
        for j in sorted({*range(len(added))} - {j for _, j in pairs}, reverse=True):
            stretch, tensor = added[j]
            waiting[stretch, tensor.n_bytes].append(j)
        for i in sorted({*range(len(blocks))} - {i for i, _ in pairs}):
            for stretch in self._stretches_at(blocks[i].born_ns):
                if found := waiting[stretch, blocks[i].n_bytes]:
                    pairs.append((i, found.pop()))
                    break
        some_blocks, some_tensors = {i for i, _ in pairs}, {j for _, j in pairs}
        return Matched(
            known=tuple(Known(blocks=(blocks[i],), tensors=(added[j][1],)) for i, j in sorted(pairs)),
            blocks=tuple(block for i, block in enumerate(blocks) if i not in some_blocks),
            tensors=tuple(tensor for j, (_, tensor) in enumerate(added) if j not in some_tensors),
        )

    def _stretches_at(self, time_ns: int) -> list[str]:
        """The stretch in which something was measured, then those before and after it."""
        j = bisect_right(self._pair_times_ns, time_ns)
        names = (
            (self.predicted[i][0] for i, _ in reversed(self.pairs[:j])),
            (self.predicted[i][0] for i, _ in self.pairs[j:]),
        )
        nearest = [list(islice((name for name, _ in groupby(side)), 2)) for side in names]
        return list(dict.fromkeys(name for both in zip_longest(*nearest) for name in both if name))

    @cached_property
    def _pair_times_ns(self) -> list[int]:
        return [self.events[j].time_ns for _, j in self.pairs]

    def _beside(self, seen: int) -> int:
        """The predicted event beside a measured one: the highest between the nearest matched allocations."""
        before = max((i for i, j in self.pairs if j <= seen), default=0)
        beyond = min((i for i, j in self.pairs if j > seen), default=len(self.predicted))
        return before + int(self.predicted_bytes[before:beyond].argmax())

    def _alive(self, place: int) -> tuple[list[Buffer], list[tuple[str, Buffer]]]:
        """The tensors alive after a predicted event: those held since before the step, and those made in it.

        Equal tensors, as each block's, have one name: freed is the one whose measured block is freed next,
        or, if none is, one held since before the step.
        """
        freed_at = dict(self._frees())
        ends = {i: freed_at.get(j, len(self.events)) for i, j in self.pairs}
        rest = Counter(self.rest)

        def end(i: int) -> int:
            return ends.get(i, len(self.events))

        births: defaultdict[Buffer, list[int]] = defaultdict(list)
        for i, (_, event) in enumerate(self.predicted[: place + 1]):
            made = births[event.buffer]
            if event.sign > 0:
                made.append(i)
            elif made and (not rest[event.buffer] or min(map(end, made)) < len(self.events)):
                made.remove(min(made, key=end))
            else:
                rest[event.buffer] -= 1
        born = {i: buffer for buffer, made in births.items() for i in made}
        return list(rest.elements()), [(self.predicted[i][0], born[i]) for i in sorted(born)]

    def _frees(self) -> Iterator[tuple[int, int]]:
        """The indices at which each measured block is allocated and freed."""
        born: dict[int, int] = {}
        for i, event in enumerate(self.events):
            if event.n_bytes > 0:
                born[event.pointer] = i
            elif event.pointer in born:
                yield born.pop(event.pointer), i


def comparison(case: Case, measured: RankMeasurement) -> Comparison:
    """A rank's measured step, whose events were kept, beside memplan's prediction of it.

    Raises:
        MemplanError: if the plan is refused, or no rule says what it holds.
    """
    record = estimated_rank(case, measured.rank).record
    memory = measured.memory
    return Comparison(
        rest=record.rest, step=record.step, update=record.update, held=memory.held, events=memory.events
    )


def _both(base: Matched, made: Matched, *, blocks: tuple[Block, ...]) -> Matched:
    """The matches before the step and in it; `blocks` are those made before it that have no match yet."""
    return Matched(
        known=base.known + made.known, blocks=blocks + made.blocks, tensors=base.tensors + made.tensors
    )


MOST_CELLS: Final = 50_000_000
"""Cells of the table that aligns blocks with tensors, 8 bytes each; longer lists are not aligned."""


def _in_order(blocks: Sequence[int], tensors: Sequence[int]) -> list[tuple[int, int]]:
    """Places of equal sizes: the common subsequence that has most bytes; none if there are too many to tell.

    Source: Needleman and Wunsch 1970, without mismatches.

    >>> _in_order([8, 4, 16], [4, 8, 16])
    [(0, 1), (2, 2)]
    """
    if len(blocks) * len(tensors) > MOST_CELLS:
        return []
    sizes = np.array(tensors, dtype=np.int64)
    best = np.zeros((len(blocks) + 1, len(tensors) + 1), dtype=np.int64)
    for i, n_bytes in enumerate(blocks):
        taken = np.where(sizes == n_bytes, best[i, :-1] + n_bytes, 0)
        best[i + 1, 1:] = np.maximum.accumulate(np.maximum(best[i, 1:], taken))
    pairs = []
    i, j = len(blocks), len(tensors)
    while i and j:
        if best[i, j] == best[i - 1, j]:
            i -= 1
        elif best[i, j] == best[i, j - 1]:
            j -= 1
        else:
            i, j = i - 1, j - 1
            pairs.append((i, j))
    return pairs[::-1]


def _held_between_steps(blocks: Sequence[Block], tensors: Sequence[Buffer]) -> Matched:
    """Matches by kind and bytes; the parts of one thing, "... (DDP bucket)", first as one block.

    If no block has their sum, they are matched one to one too.
    """
    families: defaultdict[str, list[Buffer]] = defaultdict(list)
    for tensor in tensors:
        families[_part_of(tensor)].append(tensor)
    alone = _one_to_one(blocks, families.pop("", []))
    known, left, rest = list(alone.known), list(alone.blocks), list(alone.tensors)
    for family in families.values():
        chosen = _holding([block for block in left if not block.kind], sum(t.n_bytes for t in family))
        if chosen:
            known.append(Known(blocks=chosen, tensors=tuple(family)))
            left = [block for block in left if block not in chosen]
        else:
            rest += family
    over = _one_to_one(left, rest)
    return Matched(known=(*known, *over.known), blocks=over.blocks, tensors=over.tensors)


def _part_of(tensor: Buffer) -> str:
    found = re.search(r"\(([^()]*)\)$", tensor.name)
    return found.group(1) if found and not tensor.name.endswith(PADDING) else ""


def _one_to_one(blocks: Sequence[Block], tensors: Sequence[Buffer]) -> Matched:
    waiting: defaultdict[tuple[str, int], list[tuple[Buffer, ...]]] = defaultdict(list)
    for group in _with_padding(tensors):
        kind: str = group[0].kind if group[0].kind in STATES else ""
        waiting[kind, sum(tensor.n_bytes for tensor in group)].append(group)
    known: list[Known] = []
    left: list[Block] = []
    for block in blocks:
        kinds: tuple[str, ...] = (*STATES, "") if block.kind is None else (block.kind,)
        groups = next((found for kind in kinds if (found := waiting[kind, block.n_bytes])), None)
        if groups is None:
            left.append(block)
        else:
            known.append(Known(blocks=(block,), tensors=groups.pop()))
    rest = tuple(tensor for groups in waiting.values() for group in groups for tensor in group)
    return Matched(known=tuple(known), blocks=tuple(left), tensors=rest)


def _with_padding(tensors: Iterable[Buffer]) -> Iterator[tuple[Buffer, ...]]:
    """The tensors, each shard joined with the padding at the end of its block."""
    padding: defaultdict[str, list[Buffer]] = defaultdict(list)
    whole = []
    for tensor in tensors:
        if tensor.name.endswith(PADDING):
            padding[tensor.name.removesuffix(PADDING)].append(tensor)
        else:
            whole.append(tensor)
    for tensor in whole:
        yield (tensor, padding[tensor.name].pop()) if padding[tensor.name] else (tensor,)


MOST_SUMS: Final = 20_000
"""Sums of blocks that are remembered at most."""

MOST_TRIES: Final = 20 * MOST_SUMS
"""Additions tried at most: a snapshot may have hundreds of thousands of equal blocks."""


def _holding(blocks: Sequence[Block], n_bytes: int) -> tuple[Block, ...]:
    """Blocks that add up to exactly `n_bytes`, preferably of one origin; empty if there are none."""
    origins: defaultdict[str, list[Block]] = defaultdict(list)
    for block in blocks:
        origins[block.path].append(block)
    tries = iter(range(MOST_TRIES))
    for some in (*origins.values(), blocks):
        if sum(block.n_bytes for block in some) == n_bytes:
            return tuple(some)
        if found := _adding_up_to(n_bytes, some, tries):
            return found
    return ()


def _adding_up_to(n_bytes: int, blocks: Sequence[Block], tries: Iterator[int]) -> tuple[Block, ...]:
    """Blocks that add up to `n_bytes`, large ones tried first; empty if the tries run out."""
    last: dict[int, Block | None] = {0: None}
    for block in sorted(blocks, key=lambda block: -block.n_bytes):
        for total in list(last):
            if next(tries, None) is None:
                return ()
            if total + block.n_bytes <= n_bytes and len(last) < MOST_SUMS:
                last.setdefault(total + block.n_bytes, block)
        if n_bytes in last:
            break
    found: list[Block] = []
    while (taken := last.get(n_bytes)) is not None:
        found.append(taken)
        n_bytes -= taken.n_bytes
    return tuple(found[::-1])
