"""PyTorch's CUDA caching allocator: which bytes it hands out, and which it *reserves* from the driver.

Freed blocks are kept for later, by stream and by pool (small and large), and never moved; what they cannot
serve is asked of the driver. So reserved bytes follow from the order of allocations, and settle after a few
steps.

Assumes: a segment lies behind those that came before it (that breaks ties between blocks of one size; in
torch 2.12 the order in which blocks were made does).
Neglects: `record_stream`, which puts off the reuse of a block that another stream has used until that stream
gets there (FSDP2 uses events instead; NCCL process groups before torch 2.8 use it); private pools of CUDA
graphs.

Source: c10/cuda/CUDACachingAllocator.cpp, functions as named below.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

from memplan.errors import InvalidValue, MemplanError
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


MOST_UNUSED_BYTES: Final = 20 * MiB
"""By how much less an oversize block may be larger than what it serves (`max_non_split_rounding_size`)."""

MANY_PAGES: Final = 2**26
"""Pages that an expandable segment has addresses for where no limit of the GPU is known."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorConfig:
    """The settings of `PYTORCH_CUDA_ALLOC_CONF` that decide what is reserved; by default PyTorch's own.

    Attributes:
        expandable_segments: one segment per stream and pool that grows and shrinks by pages.
        max_split_bytes: blocks from this size on serve no smaller request and are never split
            (`max_split_size_mb`, which is in MiB).
        garbage_collection_threshold: from this share on of what the process may have, blocks that have not
            been used for long are given back before more is asked for. Without a limit of the process
            (`torch.cuda.set_per_process_memory_fraction`) PyTorch never gets there.

    Raises:
        InvalidValue: a size that PyTorch refuses, or a share outside (0, 1).

    Source: docs.pytorch.org/docs/2.13/notes/cuda.html (`PYTORCH_CUDA_ALLOC_CONF`),
    c10/core/AllocatorConfig.cpp.
    """

    expandable_segments: bool = False
    max_split_bytes: int | None = None
    garbage_collection_threshold: float | None = None

    def __post_init__(self) -> None:
        split, threshold = self.max_split_bytes, self.garbage_collection_threshold
        if split is not None and (split <= LARGE_SEGMENT_BYTES or split % MiB):
            raise InvalidValue(
                f"max_split_size_mb={split / MiB:g} is not a whole number above "
                f"{LARGE_SEGMENT_BYTES // MiB}; use a larger one, or none."
            )
        if threshold is not None and not 0 < threshold < 1:
            raise InvalidValue(
                f"garbage_collection_threshold={threshold} is no share between 0 and 1; use one, or none."
            )

    @classmethod
    def parse(cls, text: str) -> "AllocatorConfig":
        """The settings of a value of `PYTORCH_CUDA_ALLOC_CONF`.

        >>> AllocatorConfig.parse("expandable_segments:True,garbage_collection_threshold:0.8").conf
        'expandable_segments:True,garbage_collection_threshold:0.8'

        Raises:
            InvalidValue: for a setting that memplan does not know, or a value that is none.
        """
        read: dict[str, Callable[[str], Any]] = {
            "expandable_segments": {"True": True, "False": False}.__getitem__,
            "max_split_size_mb": lambda value: int(value) * MiB,
            "garbage_collection_threshold": float,
        }
        found: dict[str, Any] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, _, value = (word.strip() for word in part.partition(":"))
            if name not in read:
                raise InvalidValue(
                    f"alloc_conf has {name!r}, which memplan does not know; use {', '.join(read)}."
                )
            try:
                found["max_split_bytes" if name == "max_split_size_mb" else name] = read[name](value)
            except (KeyError, ValueError):
                example = {"expandable_segments": "True", "max_split_size_mb": "128"}.get(name, "0.8")
                raise InvalidValue(
                    f"alloc_conf has {name}:{value}, which is no value of it; use {name}:{example}, say."
                ) from None
        return cls(**found)

    @property
    def conf(self) -> str:
        """The value of `PYTORCH_CUDA_ALLOC_CONF` that sets them; empty for PyTorch's defaults."""
        split = None if self.max_split_bytes is None else self.max_split_bytes // MiB
        values = {
            "expandable_segments": self.expandable_segments or None,
            "max_split_size_mb": split,
            "garbage_collection_threshold": self.garbage_collection_threshold,
        }
        return ",".join(f"{name}:{value}" for name, value in values.items() if value is not None)


DEFAULTS: Final = AllocatorConfig()


class Block:
    """A stretch of a segment: in use or free, between its neighbours in the segment.

    Of an expandable segment also addresses that no memory is `mapped` to. `since` is how many requests the
    large pools had seen when it became free, `number` counts the blocks as they are made.
    """

    __slots__ = ("address", "free", "mapped", "n_bytes", "next", "number", "pool", "previous", "since")

    def __init__(self, pool: "Pool", address: int, n_bytes: int, *, mapped: bool = True) -> None:
        self.pool = pool
        self.number = next(pool.numbers)
        self.address = address
        self.n_bytes = n_bytes
        self.free = False
        self.mapped = mapped
        self.since = 0
        self.previous: Block | None = None
        self.next: Block | None = None

    @property
    def split(self) -> bool:
        """Whether it is part of a segment."""
        return self.previous is not None or self.next is not None

    @property
    def expandable_bytes(self) -> int:
        """Its bytes with the addresses behind it that memory can be mapped to."""
        behind = self.next
        return self.n_bytes + (behind.n_bytes if behind is not None and not behind.mapped else 0)


class Pool:
    """The free blocks of one stream that serve small requests, or large ones: smallest first.

    Of equal ones the first is that of the lowest address, or the oldest. `unmapped` are the addresses of
    expandable segments that no memory is mapped to, lowest first. `numbers` are those of blocks to come.
    """

    __slots__ = ("blocks", "numbers", "page_bytes", "small", "takes_oldest", "unmapped")

    def __init__(self, numbers: Iterator[int], *, small: bool, takes_oldest: bool) -> None:
        self.small = small
        self.numbers = numbers
        self.takes_oldest = takes_oldest
        self.page_bytes = SMALL_SEGMENT_BYTES if small else LARGE_SEGMENT_BYTES
        self.blocks: list[tuple[int, int, Block]] = []
        self.unmapped: list[tuple[int, Block]] = []

    def put(self, block: Block) -> None:
        """A block has become free."""
        block.free = True
        insort(self.blocks, (block.n_bytes, block.number if self.takes_oldest else block.address, block))

    def take(self, block: Block) -> None:
        """A free block is to be used, or merged with another."""
        block.free = False
        order = block.number if self.takes_oldest else block.address
        del self.blocks[bisect_left(self.blocks, (block.n_bytes, order, block))]

    def best(self, n_bytes: int) -> Block | None:
        """The smallest free block that is large enough, of equal ones the first.

        One that can be expanded counts with all that it can be expanded to.

        Source: `get_free_block`.
        """
        blocks = self.blocks
        i = bisect_left(blocks, (n_bytes,))
        if i == len(blocks):
            return None
        found = blocks[i][2]
        if self.unmapped:
            while i + 1 < len(blocks):
                i += 1
                if blocks[i][2].expandable_bytes >= found.expandable_bytes:
                    break
                found = blocks[i][2]
        return found


class CachingAllocator:
    """One device's memory: `allocated_bytes` in use, `reserved_bytes` taken from the driver, and their peaks.

    `limit_bytes` is what the driver has to give, `allowed_bytes` what the process may have of it
    (`torch.cuda.set_per_process_memory_fraction`); `n_retries` counts how often cached blocks had to be given
    back for a request. Of equal free blocks the one of the lowest address is taken, or the oldest
    (`takes_oldest`, torch 2.12). What is split off behind a block is as old as the block, which is made anew.

    Source of the latter: c10/cuda/CUDACachingAllocator.cpp of 2.12 (`BlockComparatorRegistrationCounter`).
    """

    def __init__(
        self,
        config: AllocatorConfig = DEFAULTS,
        *,
        limit_bytes: int | None = None,
        allowed_bytes: int | None = None,
        takes_oldest: bool = False,
    ) -> None:
        self.takes_oldest = takes_oldest
        self.limit_bytes = limit_bytes
        self.allowed_bytes = allowed_bytes
        self.expandable_segments = config.expandable_segments
        self.oversize_bytes = config.max_split_bytes
        threshold = config.garbage_collection_threshold
        self.collects_above_bytes = (
            None if threshold is None or allowed_bytes is None else int(threshold * allowed_bytes)
        )
        self.allocated_bytes = self.reserved_bytes = 0
        self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self.n_retries = 0
        self._n_large_requests = 0
        self._pools: dict[tuple[str, bool], Pool] = {}
        self._end = 0
        self._numbers = count()
        self._in_use: set[Block] = set()

    def malloc(self, n_bytes: int, stream: str = "") -> Block:
        """A block for so many bytes: cached, the smallest that is large enough, or new.

        Raises:
            OutOfMemory: beyond the limits.

        Source: `malloc`, `alloc_found_block`.
        """
        n_bytes = rounded_bytes(n_bytes)
        small = n_bytes <= SMALL_BYTES
        pool = self._pools.get((stream, small))
        if pool is None:
            pool = Pool(self._numbers, small=small, takes_oldest=self.takes_oldest)
            self._pools[stream, small] = pool
        self._n_large_requests += not small
        block = pool.best(n_bytes)
        if block is not None and (self.oversize_bytes is None or self._serves(block, n_bytes)):
            pool.take(block)
        else:
            block = self._new(pool, n_bytes)
        if self._splits(block, n_bytes):
            self._split(block, n_bytes)
        if self.takes_oldest:
            self._in_use.add(block)
        self.allocated_bytes += block.n_bytes
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
        return block

    def free(self, block: Block) -> None:
        """A block is cached, joined with its neighbours where those are free.

        Source: `free_block`, `try_merge_blocks`.
        """
        self.allocated_bytes -= block.n_bytes
        self._in_use.discard(block)
        self._put(block)

    @property
    def cached(self) -> tuple[tuple[int, int], ...]:
        """The size and the address of each free block, pool by pool."""
        return tuple((block.n_bytes, block.address) for block in self._free)

    @property
    def by_age(self) -> tuple[int, ...]:
        """The address of every block, the oldest first, where that decides which one is taken."""
        every = [*self._free, *self._in_use] if self.takes_oldest else []
        return tuple(block.address for block in sorted(every, key=lambda block: block.number))

    @property
    def _free(self) -> Iterator[Block]:
        for pool in self._pools.values():
            for _, _, block in pool.blocks:
                yield block

    @property
    def ages(self) -> tuple[int, ...]:
        """How many requests ago each free block was last used, where garbage is collected by age."""
        if self.collects_above_bytes is None:
            return ()
        return tuple(self._n_large_requests - block.since for block in self._free)

    def _put(self, block: Block) -> None:
        """A block becomes free, and one with its free neighbours."""
        for neighbour in (block.previous, block.next):
            if neighbour is not None and neighbour.free:
                block.pool.take(neighbour)
                _join(block, neighbour)
        block.since = self._n_large_requests
        block.pool.put(block)

    def _serves(self, block: Block, n_bytes: int) -> bool:
        """Whether a block is not too large for a request: oversize ones serve none but those near their size.

        Source: `get_free_block`.
        """
        if self.oversize_bytes is None or n_bytes < self.oversize_bytes:
            return self.oversize_bytes is None or block.n_bytes < self.oversize_bytes
        return block.n_bytes < n_bytes + MOST_UNUSED_BYTES

    def _splits(self, block: Block, n_bytes: int) -> bool:
        """Whether the rest of a block stays for others; of a large one only if it is no small request's size.

        Source: `should_split`.
        """
        left = block.n_bytes - n_bytes
        if block.pool.small or self.expandable_segments:
            return left >= BLOCK_BYTES
        return left > SMALL_BYTES and (self.oversize_bytes is None or n_bytes < self.oversize_bytes)

    def _split(self, block: Block, n_bytes: int) -> None:
        rest = Block(block.pool, block.address + n_bytes, block.n_bytes - n_bytes)
        _insert_behind(block, rest)
        block.n_bytes = n_bytes
        block.number, rest.number = rest.number, block.number
        rest.since = self._n_large_requests
        block.pool.put(rest)

    def _new(self, pool: Pool, n_bytes: int) -> Block:
        """A block that the driver's memory makes room for, cached ones being given back if there is none.

        Source: `malloc`, `release_available_cached_blocks`, `release_cached_blocks`.
        """
        self._collect_garbage()
        block = self._asked(pool, n_bytes)
        if block is None and self._release_oversize(pool, n_bytes):
            block = self._asked(pool, n_bytes)
        if block is None:
            self.n_retries += 1
            self.release_cached()
            block = self._asked(pool, n_bytes)
        if block is None:
            limits = f"limit_bytes={self.limit_bytes}"
            if self.allowed_bytes is not None:
                limits = f"allowed_bytes={self.allowed_bytes}"
            raise OutOfMemory(
                f"{n_bytes} more bytes do not fit: {self.reserved_bytes} are reserved, "
                f"{self.allocated_bytes} of them in use, {limits}; use a smaller plan."
            )
        return block

    def _asked(self, pool: Pool, n_bytes: int) -> Block | None:
        """What the driver gives for a request: a segment, or more pages of one; None if it has too little.

        Source: `alloc_block`, `get_allocation_size`.
        """
        asked = segment_bytes(n_bytes)
        if self.allowed_bytes is not None and self.reserved_bytes + asked > self.allowed_bytes:
            return None
        if self.expandable_segments:
            return self._expanded(pool, n_bytes)
        if not self._reserve(asked):
            return None
        block = Block(pool, self._end, asked)
        self._end += asked
        return block

    def _reserve(self, n_bytes: int) -> bool:
        """Whether the driver has so many more bytes, which are then reserved."""
        if self.limit_bytes is not None and self.reserved_bytes + n_bytes > self.limit_bytes:
            return False
        self.reserved_bytes += n_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return True

    def _expanded(self, pool: Pool, n_bytes: int) -> Block | None:
        """Addresses of an expandable segment, as many free or unmapped ones in a row, with memory mapped.

        Source: `try_allocate_expandable_block`, `find_expandable_block`.
        """
        block = next((found for found in self._rows(pool) if _has_room(found, n_bytes)), None)
        if block is None:
            block = self._addresses(pool)
        if not block.mapped and not self._map(block, min(n_bytes, block.n_bytes)):
            return None
        while block.n_bytes < n_bytes:
            behind = block.next
            if behind is None or not self._map(behind, min(n_bytes - block.n_bytes, behind.n_bytes)):
                return None
            block = behind
        pool.take(block)
        return block

    def _addresses(self, pool: Pool) -> Block:
        """Those of a new expandable segment: 1 1/8 times the GPU's memory.

        Source: `ExpandableSegment`.
        """
        limit, page_bytes = self.limit_bytes, pool.page_bytes
        n_pages = MANY_PAGES if limit is None else -(-(limit + limit // 8) // page_bytes)
        start = -(-self._end // page_bytes) * page_bytes
        block = Block(pool, start, n_pages * page_bytes, mapped=False)
        self._end = start + block.n_bytes
        insort(pool.unmapped, (start, block))
        return block

    @staticmethod
    def _rows(pool: Pool) -> Iterator[Block]:
        """Where a row of free or unmapped addresses starts, lowest first."""
        for _, block in pool.unmapped:
            before = block.previous
            yield before if before is not None and before.free else block

    def _map(self, block: Block, n_bytes: int) -> bool:
        """Memory for the first addresses of a block, whole pages of it, one with what is free beside them.

        Source: `map_block`.
        """
        pool = block.pool
        mapped = -(-n_bytes // pool.page_bytes) * pool.page_bytes
        if not self._reserve(mapped):
            return False
        pool.unmapped.remove((block.address, block))
        if mapped < block.n_bytes:
            rest = Block(pool, block.address + mapped, block.n_bytes - mapped, mapped=False)
            _insert_behind(block, rest)
            block.n_bytes = mapped
            insort(pool.unmapped, (rest.address, rest))
        block.mapped = True
        self._put(block)
        return True

    def release_cached(self) -> None:
        """Segments without a block in use go back to the driver; of expandable ones all whole pages.

        Source: `release_blocks`.
        """
        for pool in self._pools.values():
            for _, _, block in list(pool.blocks):
                if self.expandable_segments:
                    self._unmap(block)
                elif not block.split:
                    self._release(block)

    def _release(self, segment: Block) -> None:
        segment.pool.take(segment)
        self.reserved_bytes -= segment.n_bytes

    def _unmap(self, block: Block) -> None:
        """The whole pages of a free block are memory no longer, what is left at either end stays free.

        Source: `unmap_block`.
        """
        pool = block.pool
        start = -(-block.address // pool.page_bytes) * pool.page_bytes
        end = (block.address + block.n_bytes) // pool.page_bytes * pool.page_bytes
        if start >= end:
            return
        pool.take(block)
        self.reserved_bytes -= end - start
        if start > block.address:
            before = Block(pool, block.address, start - block.address)
            if block.previous is not None:
                _insert_behind(block.previous, before)
            before.next, block.previous = block, before
            pool.put(before)
        if block.address + block.n_bytes > end:
            after = Block(pool, end, block.address + block.n_bytes - end)
            _insert_behind(block, after)
            pool.put(after)
        block.address, block.n_bytes, block.mapped = start, end - start, False
        for neighbour in (block.previous, block.next):
            if neighbour is not None and not neighbour.mapped:
                pool.unmapped.remove((neighbour.address, neighbour))
                _join(block, neighbour)
        insort(pool.unmapped, (block.address, block))

    def _release_oversize(self, pool: Pool, n_bytes: int) -> bool:
        """Whether giving back oversize blocks of the stream, the largest first, has made enough room.

        Source: `release_available_cached_blocks`.
        """
        if self.oversize_bytes is None:
            return False
        wanted = max(n_bytes, self.oversize_bytes)
        at = bisect_left(pool.blocks, (wanted,))
        if at < len(pool.blocks) and not self.expandable_segments:
            self._release(pool.blocks[at][2])
            return True
        released = 0
        for _, _, block in reversed(pool.blocks[:at]):
            if released >= wanted or block.n_bytes < self.oversize_bytes:
                break
            if not self.expandable_segments:
                self._release(block)
                released += block.n_bytes
        return released >= wanted

    def _collect_garbage(self) -> None:
        """Gives back whole segments that have been free for longer than the average, until enough is free.

        Source: `garbage_collect_cached_blocks`.
        """
        above = self.collects_above_bytes
        if above is None or self.reserved_bytes <= above:
            return
        target = self.reserved_bytes - above
        whole = [
            block
            for pool in self._pools.values()
            if not pool.small
            for _, _, block in pool.blocks
            if not block.split
        ]
        collected, freed = 0, True
        while whole and freed and collected < target:
            ages = [self._n_large_requests - block.since for block in whole]
            average = sum(ages) / len(ages)
            old = [block for block, age in zip(whole, ages, strict=True) if age >= average]
            freed = bool(old)
            for block in old:
                self._release(block)
                collected += block.n_bytes
                whole.remove(block)


def _has_room(block: Block, n_bytes: int) -> bool:
    """Whether a row of free or unmapped addresses is long enough."""
    found = 0
    behind: Block | None = block
    while found < n_bytes and behind is not None and (behind.free or not behind.mapped):
        found += behind.n_bytes
        behind = behind.next
    return found >= n_bytes


def _insert_behind(block: Block, new: Block) -> None:
    """A block's next neighbour is another one now."""
    new.previous, new.next = block, block.next
    if new.next is not None:
        new.next.previous = new
    block.next = new


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
