"""PyTorch's CUDA caching allocator: which bytes it hands out, and which it *reserves* from the driver.

Freed blocks are kept for later, by stream and by pool (small and large), and never moved; what they cannot
serve is asked of the driver. So reserved bytes follow from the order of allocations, and settle after a few
steps.

Assumes: the defaults of `PYTORCH_CUDA_ALLOC_CONF`, but for `expandable_segments`; a segment lies behind those
that came before it (that breaks ties between blocks of one size).
Neglects: `record_stream`, which puts off the reuse of a block that another stream has used until that stream
gets there (FSDP2 uses events instead; NCCL process groups before torch 2.8 use it); private pools of CUDA
graphs.

Source: c10/cuda/CUDACachingAllocator.cpp, functions as named below.
"""

from bisect import bisect_left, insort
from typing import Final

from memplan.errors import MemplanError
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
        for i in range(bisect_left(self.blocks, (n_bytes,)), len(self.blocks)):
            block = self.blocks[i][2]
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
            self.release_cached()
            if self.reserved_bytes + n_bytes > limit:
                raise OutOfMemory(
                    f"{n_bytes} more bytes do not fit: {self.reserved_bytes} are reserved, "
                    f"{self.allocated_bytes} of them in use, limit_bytes={limit}; use a smaller plan."
                )
        self.reserved_bytes += n_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def release_cached(self) -> None:
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
