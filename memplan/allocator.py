"""PyTorch's CUDA caching allocator over one rank's allocations and frees: the bytes that it *reserves*.

Freed blocks are kept for later, by stream and by pool (small and large), and never moved; what they cannot
serve is asked of the driver. So reserved bytes follow from the order of allocations, and settle after a few
steps.

Assumes: the defaults of `PYTORCH_CUDA_ALLOC_CONF`, but for `expandable_segments`; a segment lies behind those
that came before it (that breaks ties between blocks of one size).
Neglects: `record_stream`, which puts off the reuse of a block that another stream has used until that stream
gets there (FSDP2 uses events instead; NCCL process groups before torch 2.8 use it); private pools of CUDA
graphs; scalars.

Source: c10/cuda/CUDACachingAllocator.cpp, functions as named below.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from memplan.errors import MemplanError
from memplan.shapes import Buffer
from memplan.timeline import Alive, Stretch
from memplan.units import MiB

BLOCK_BYTES: Final = 512
"""Sizes are multiples of it (`kMinBlockSize`)."""

SMALL_BYTES: Final = 1 * MiB
"""The largest request that the small pool serves (`kSmallSize`)."""

SMALL_SEGMENT_BYTES: Final = 2 * MiB
"""What the small pool asks of the driver (`kSmallBuffer`)."""

LARGE_SEGMENT_BYTES: Final = 20 * MiB
"""What the large pool asks for where less than `LEAST_OWN_BYTES` are wanted (`kLargeBuffer`)."""

LEAST_OWN_BYTES: Final = 10 * MiB
"""From here on a request gets a segment of its size (`kMinLargeAlloc`) ..."""

ROUND_BYTES: Final = 2 * MiB
"""... rounded up to multiples of this (`kRoundLarge`)."""

MOST_STEPS: Final = 8
"""Steps replayed at most: most plans settle within three."""

MOST_EVENTS: Final = 200_000
"""Of a repeated stretch of more events (hundreds of micro-batches) only the ends are replayed in full ..."""

ENDS: Final = 2
"""... so many repetitions at either; those between allocate and free nothing but what is left of each."""


class OutOfMemory(MemplanError):
    """A request that the driver refuses even after everything cached has been given back."""


def rounded_bytes(n_bytes: int) -> int:
    """What a request takes: at least one block of 512 bytes.

    Source: `round_size`.

    >>> rounded_bytes(1), rounded_bytes(512), rounded_bytes(513)
    (512, 512, 1024)
    """
    return max(1, -(-n_bytes // BLOCK_BYTES)) * BLOCK_BYTES


def segment_bytes(n_bytes: int) -> int:
    """What is asked of the driver for a request of so many bytes that no cached block serves.

    Source: `get_allocation_size`.

    >>> [segment_bytes(n) // MiB for n in (512, 1 * MiB, 1 * MiB + 512, 10 * MiB, 11 * MiB)]
    [2, 2, 20, 10, 12]
    """
    if n_bytes <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if n_bytes < LEAST_OWN_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-n_bytes // ROUND_BYTES) * ROUND_BYTES


class Block:
    """A stretch of a segment: in use or free, between its neighbours in the segment."""

    __slots__ = ("address", "free", "n_bytes", "next", "pool", "previous")

    def __init__(self, pool: "Pool", address: int, n_bytes: int) -> None:
        self.pool = pool
        self.address = address
        self.n_bytes = n_bytes
        self.free = False
        self.previous: Block | None = None
        self.next: Block | None = None


class Pool:
    """The free blocks of one stream that serve small requests, or large ones: smallest first."""

    __slots__ = ("blocks", "last", "small")

    def __init__(self, *, small: bool) -> None:
        self.small = small
        self.blocks: list[tuple[int, int, Block]] = []
        self.last: Block | None = None
        """The end of an expandable segment."""

    def put(self, block: Block) -> None:
        """A block has become free."""
        block.free = True
        insort(self.blocks, (block.n_bytes, block.address, block))

    def take(self, block: Block) -> None:
        """A free block is to be used, or merged with another."""
        block.free = False
        del self.blocks[bisect_left(self.blocks, (block.n_bytes, block.address, block))]

    def best(self, n_bytes: int) -> Block | None:
        """The smallest free block that is large enough, of equal ones the first.

        The end of an expandable segment counts as the largest there is.

        Source: `get_free_block`.
        """
        for _, _, block in self.blocks[bisect_left(self.blocks, (n_bytes,)) :]:
            if block is not self.last:
                return block
        end = self.last
        return end if end is not None and end.free and end.n_bytes >= n_bytes else None


class CachingAllocator:
    """One device's memory: `allocated_bytes` in use, `reserved_bytes` taken from the driver, and their peaks.

    `limit_bytes` is what the driver has to give; `n_retries` counts how often cached blocks had to be given
    back to it for a request.
    """

    def __init__(self, *, limit_bytes: int | None = None, expandable_segments: bool = False) -> None:
        self.limit_bytes = limit_bytes
        self.expandable_segments = expandable_segments
        self.allocated_bytes = self.reserved_bytes = 0
        self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self.n_retries = 0
        self._pools: dict[tuple[str, bool], Pool] = {}
        self._end = 0

    def malloc(self, n_bytes: int, stream: str = "") -> Block:
        """A block for so many bytes: cached, the smallest that is large enough, or new.

        Raises:
            OutOfMemory: beyond `limit_bytes`.

        Source: `malloc`, `alloc_found_block`.
        """
        n_bytes = rounded_bytes(n_bytes)
        small = n_bytes <= SMALL_BYTES
        pool = self._pools.setdefault((stream, small), Pool(small=small))
        block = pool.best(n_bytes)
        if block is not None:
            pool.take(block)
        elif self.expandable_segments:
            block = self._expanded(pool, n_bytes)
        else:
            block = self._segment(pool, n_bytes)
        if self._splits(block, n_bytes):
            self._split(block, n_bytes)
        self.allocated_bytes += block.n_bytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def free(self, block: Block) -> None:
        """A block is cached, joined with its neighbours where those are free.

        Source: `free_block`, `try_merge_blocks`.
        """
        self.allocated_bytes -= block.n_bytes
        for neighbour in (block.previous, block.next):
            if neighbour is not None and neighbour.free:
                block.pool.take(neighbour)
                _join(block, neighbour)
        block.pool.put(block)

    @property
    def cached(self) -> tuple[tuple[int, int], ...]:
        """The size and the address of each free block, pool by pool."""
        return tuple((n_bytes, at) for pool in self._pools.values() for n_bytes, at, _ in pool.blocks)

    def _splits(self, block: Block, n_bytes: int) -> bool:
        """Whether the rest of a block stays for others; of a large one only if it is no small request's size.

        Source: `should_split`.
        """
        left = block.n_bytes - n_bytes
        return left >= BLOCK_BYTES if block.pool.small or self.expandable_segments else left > SMALL_BYTES

    def _split(self, block: Block, n_bytes: int) -> None:
        rest = Block(block.pool, block.address + n_bytes, block.n_bytes - n_bytes)
        rest.previous, rest.next = block, block.next
        if rest.next is not None:
            rest.next.previous = rest
        if block.pool.last is block:
            block.pool.last = rest
        block.next, block.n_bytes = rest, n_bytes
        block.pool.put(rest)

    def _segment(self, pool: Pool, n_bytes: int) -> Block:
        """A new segment, cached ones being given back if there is no room for it.

        Source: `alloc_block`, `release_cached_blocks`.
        """
        block = Block(pool, self._end, segment_bytes(n_bytes))
        self._reserve(block.n_bytes)
        self._end += block.n_bytes
        return block

    def _expanded(self, pool: Pool, n_bytes: int) -> Block:
        """The end of the pool's one segment, grown by whole pages until it is large enough.

        Source: `try_allocate_expandable_block`, `map_block`.
        """
        page = SMALL_SEGMENT_BYTES if pool.small else LARGE_SEGMENT_BYTES
        end = pool.last
        if end is not None and end.free:
            grown = -(-(n_bytes - end.n_bytes) // page) * page
            self._reserve(grown)
            pool.take(end)
            end.n_bytes += grown
            return end
        grown = -(-n_bytes // page) * page
        self._reserve(grown)
        block = Block(pool, end.address + end.n_bytes if end is not None else 0, grown)
        if end is not None:
            end.next, block.previous = block, end
        pool.last = block
        return block

    def _reserve(self, n_bytes: int) -> None:
        limit = self.limit_bytes
        if limit is not None and self.reserved_bytes + n_bytes > limit:
            self.n_retries += 1
            self._release_cached()
            if self.reserved_bytes + n_bytes > limit:
                raise OutOfMemory(
                    f"{n_bytes} more bytes do not fit: {self.reserved_bytes} are reserved, "
                    f"{self.allocated_bytes} of them in use, limit_bytes={limit}; use a smaller plan."
                )
        self.reserved_bytes += n_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _release_cached(self) -> None:
        """Segments without a block in use go back to the driver; of expandable ones the pages at the end."""
        for pool in self._pools.values():
            for _, _, block in list(pool.blocks):
                if block is pool.last:
                    page = SMALL_SEGMENT_BYTES if pool.small else LARGE_SEGMENT_BYTES
                    self._shorten(pool, block, block.n_bytes // page * page)
                elif block.previous is None and block.next is None:
                    pool.take(block)
                    self.reserved_bytes -= block.n_bytes

    def _shorten(self, pool: Pool, end: Block, n_bytes: int) -> None:
        pool.take(end)
        self.reserved_bytes -= n_bytes
        end.n_bytes -= n_bytes
        if end.n_bytes:
            pool.put(end)
            return
        pool.last = end.previous
        if end.previous is not None:
            end.previous.next = None


def _join(block: Block, neighbour: Block) -> None:
    """A free neighbour's bytes become the block's."""
    if block.previous is neighbour:
        block.address, block.previous = neighbour.address, neighbour.previous
        if block.previous is not None:
            block.previous.next = block
    else:
        block.next = neighbour.next
        if block.next is not None:
            block.next.previous = block
    block.n_bytes += neighbour.n_bytes
    if block.pool.last is neighbour:
        block.pool.last = block


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What one rank allocates and frees: what is there `at_rest`, then steps that are all alike.

    Of what is there at rest, the optimizer's part comes with the first update only, before the first stretch
    called `update_name` (if that is not empty). Whatever a step leaves beyond what is there at rest is freed
    before the next one, as gradients are. `streams` names the stream of each buffer that does not belong to
    the default stream.
    """

    at_rest: Alive
    step: Stretch
    update_name: str = ""
    streams: Mapping[Buffer, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """Peaks over the replayed steps; `settled`: the last one reserved nothing that the one before had not.

    `allocated_bytes` is what `torch.cuda.max_memory_allocated` counts: whole blocks, so that a rest of up to
    1 MiB that is not split off belongs to them.
    """

    allocated_bytes: int
    reserved_bytes: int
    n_retries: int
    n_steps: int
    settled: bool


def replayed(
    program: Program, *, limit_bytes: int | None = None, expandable_segments: bool = False
) -> Replayed:
    """A program through the caching allocator, step after step until a step reserves nothing new.

    Raises:
        OutOfMemory: beyond `limit_bytes`.
    """
    allocator = CachingAllocator(limit_bytes=limit_bytes, expandable_segments=expandable_segments)
    replay = _Replay(program, allocator)
    reserved: list[int] = []
    while len(reserved) < MOST_STEPS and not _settled(reserved):
        replay.step()
        reserved.append(allocator.peak_reserved_bytes)
    return Replayed(
        allocated_bytes=allocator.peak_allocated_bytes,
        reserved_bytes=allocator.peak_reserved_bytes,
        n_retries=allocator.n_retries,
        n_steps=len(reserved),
        settled=_settled(reserved),
    )


def _settled(reserved: list[int]) -> bool:
    """Whether two whole steps with optimizer state have reserved the same; the first one has none."""
    return len(reserved) > 2 and reserved[-1] == reserved[-2]


class _Replay:
    """The blocks of what is alive. Of equal tensors the newest is freed first, as layers' activations are."""

    def __init__(self, program: Program, allocator: CachingAllocator) -> None:
        self.program = program
        self.allocator = allocator
        self.blocks: dict[Buffer, list[Block]] = {}
        self.n_events: dict[int, int] = {}
        self.updated = False
        for buffer, n in program.at_rest.items():
            if buffer.kind != "optimizer" or not program.update_name:
                self._allocate(buffer, n)

    def step(self) -> None:
        """One step, and the freeing of what it leaves."""
        self._run(self.program.step)
        at_rest = self.program.at_rest
        left = Counter({buffer: len(blocks) for buffer, blocks in self.blocks.items()})
        for buffer, n in (left - at_rest).items():
            self._change(buffer, -n)
        for buffer, n in (at_rest - left).items():
            self._allocate(buffer, n)

    def _run(self, stretch: Stretch) -> None:
        """A stretch with its repetitions, until one leaves everything as an earlier one has."""
        if stretch.name == self.program.update_name and not self.updated:
            self.updated = True
            for buffer, n in self.program.at_rest.items():
                if buffer.kind == "optimizer":
                    self._allocate(buffer, n)
        seen: set[object] = set()
        between = range(0)
        if stretch.repeats > 2 * ENDS and self._n_events(stretch) > MOST_EVENTS:
            between = range(ENDS, stretch.repeats - ENDS)
            net = self._net(stretch)
        for i in range(stretch.repeats):
            if i in between:
                for buffer, n in net.items():
                    self._change(buffer, n)
                continue
            if stretch.repeats > 2 and stretch.net_bytes == 0:
                state = self._state()
                if state in seen:
                    return
                seen.add(state)
            for sign, buffer, _ in stretch.events:
                if sign > 0:
                    self._allocate(buffer, 1)
                else:
                    self._free(buffer)
            for part in stretch.parts:
                self._run(part)

    def _n_events(self, stretch: Stretch) -> int:
        """How many there are in all repetitions."""
        key = id(stretch)
        if key not in self.n_events:
            parts = sum(map(self._n_events, stretch.parts))
            self.n_events[key] = stretch.repeats * (len(stretch.events) + parts)
        return self.n_events[key]

    def _net(self, stretch: Stretch) -> Alive:
        """How many more of each buffer one repetition leaves, or fewer; those it frees come first."""
        net: Alive = Counter()
        for sign, buffer, _ in stretch.events:
            net[buffer] += sign
        for part in stretch.parts:
            for buffer, n in self._net(part).items():
                net[buffer] += part.repeats * n
        return Counter({buffer: n for buffer, n in sorted(net.items(), key=lambda item: item[1]) if n})

    def _state(self) -> object:
        blocks = self.blocks.items()
        return self.allocator.cached, frozenset((b, tuple([x.address for x in found])) for b, found in blocks)

    def _allocate(self, buffer: Buffer, n: int) -> None:
        if buffer.n_bytes and n > 0:
            stream = self.program.streams.get(buffer, "")
            blocks = self.blocks.setdefault(buffer, [])
            blocks += [self.allocator.malloc(buffer.n_bytes, stream) for _ in range(n)]

    def _change(self, buffer: Buffer, n: int) -> None:
        """So many more, or fewer."""
        self._allocate(buffer, n)
        for _ in range(-n):
            self._free(buffer)

    def _free(self, buffer: Buffer) -> None:
        if not buffer.n_bytes:
            return
        blocks = self.blocks[buffer]
        self.allocator.free(blocks.pop())
        if not blocks:
            del self.blocks[buffer]
