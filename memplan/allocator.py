"""PyTorch's CUDA caching allocator: the bytes that it allocates and those that it reserves from the driver.

Freed blocks are cached by stream and by pool (small and large) and never moved; the driver is asked only when
no cached block serves a request. So reserved bytes follow from the order of allocations and frees, and settle
after a few steps.

Assumes: a new segment has a higher address than all others (which breaks ties between blocks of one size;
in torch 2.12 the order in which blocks were made does).
Neglects: `record_stream`, which puts off the reuse of a block that another stream has used until that stream
gets there (FSDP1 uses it, and NCCL process groups before torch 2.8; FSDP2 uses events instead); private pools
of CUDA graphs.

Source: c10/cuda/CUDACachingAllocator.cpp, functions as named below.
"""

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any, Final, NamedTuple

from memplan.ages import Ages, Moment
from memplan.errors import InvalidValue, MemplanError
from memplan.fields import Setting
from memplan.units import MiB

BLOCK_BYTES: Final = 512
"""Sizes are multiples of it (`kMinBlockSize`)."""

SMALL_BYTES: Final = 1 * MiB
"""The largest request that the small pool serves (`kSmallSize`)."""

SMALL_SEGMENT_BYTES: Final = 2 * MiB
"""A segment of the small pool (`kSmallBuffer`)."""

LARGE_SEGMENT_BYTES: Final = 20 * MiB
"""A segment of the large pool for a request of less than `LEAST_OWN_BYTES` (`kLargeBuffer`)."""

LEAST_OWN_BYTES: Final = 10 * MiB
"""From here on a request gets a segment of its size (`kMinLargeAlloc`) ..."""

ROUND_BYTES: Final = 2 * MiB
"""... rounded up to multiples of this (`kRoundLarge`)."""


MOST_UNUSED_BYTES: Final = 20 * MiB
"""An oversize block serves requests that are smaller by less than this (`max_non_split_rounding_size`)."""

MANY_PAGES: Final = 2**26
"""Pages that an expandable segment has addresses for where no limit of the GPU is known."""


MOST_MARKS: Final = 4
"""New segments for equal blocks after which no repetition is looked for any more."""


class OutOfMemory(MemplanError):
    """A request that the driver refuses even after everything cached has been given back."""


def page_locked_bytes(n_bytes: int) -> int:
    """Bytes of the host's block that holds a page-locked tensor of `n_bytes`: the next power of two.

    Source: aten/src/ATen/core/CachingHostAllocator.h (`allocate`).

    >>> page_locked_bytes(3000), page_locked_bytes(4096), page_locked_bytes(0)
    (4096, 4096, 0)
    """
    return 1 << (n_bytes - 1).bit_length() if n_bytes else 0


def rounded_bytes(n_bytes: int) -> int:
    """The bytes of a request rounded up to whole blocks of 512 bytes, at least one.

    Source: `round_size`.

    >>> rounded_bytes(1), rounded_bytes(512), rounded_bytes(513)
    (512, 512, 1024)
    """
    return max(1, -(-n_bytes // BLOCK_BYTES)) * BLOCK_BYTES


def segment_bytes(n_bytes: int) -> int:
    """The bytes of a new segment for a request that no cached block serves.

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


ALLOC_CONF: Final = Setting(
    "The caching allocator's settings, as PYTORCH_CUDA_ALLOC_CONF has them: "
    "expandable_segments:True, max_split_size_mb:N, garbage_collection_threshold:X",
    left_out="PyTorch's own",
    read=lambda text: AllocatorConfig.parse(text).conf,
    word="alloc",
)
"""The option of an engine that has them."""

DEFAULTS: Final = AllocatorConfig()

Places = Callable[[int], Hashable]
"""Renames addresses."""

FreeBlock = tuple[int, int]
"""The bytes and the address of a free block.

Sorted, free blocks are in the order in which the allocator prefers them: the smallest, of equal ones the
lowest.
"""

ADDRESS_BITS: Final = 64
"""A free block is also one number, which is compared faster: its bytes, and in the low bits its address."""

ADDRESS: Final = 2**ADDRESS_BITS - 1
"""The bits of such a number that are its address."""


def _block(number: int) -> FreeBlock:
    return number >> ADDRESS_BITS, number & ADDRESS


FreeSizes = tuple[tuple[tuple[str, bool, int], int], ...]
"""For each pool (its stream, and whether it is the small one) and each size, how many blocks are free."""


class Pool:
    """The free blocks of one stream for small requests, or for large ones.

    Attributes:
        free: the free blocks, sorted, each as one number (`ADDRESS_BITS`).
        starts, ends: the bytes of each free block by its address, and its address by the address after it.
        unsplit: by the address of a block in use, the bytes beyond the request that were not split off.
        segments: the bytes of each segment by its address.
        unmapped: ranges of expandable segments that have no memory: their bytes by their address.
        least_rest_bytes: a block is split if at least this much of it is left over.
        page_bytes: expandable segments grow and shrink by multiples of it.
    """

    __slots__ = (
        "ends",
        "free",
        "least_rest_bytes",
        "page_bytes",
        "segments",
        "small",
        "starts",
        "unmapped",
        "unsplit",
    )

    def __init__(self, *, small: bool, expandable: bool) -> None:
        self.small = small
        self.page_bytes = SMALL_SEGMENT_BYTES if small else LARGE_SEGMENT_BYTES
        self.least_rest_bytes = BLOCK_BYTES if small or expandable else SMALL_BYTES + BLOCK_BYTES
        self.free: list[int] = []
        self.starts: dict[int, int] = {}
        self.ends: dict[int, int] = {}
        self.unsplit: dict[int, int] = {}
        self.segments: dict[int, int] = {}
        self.unmapped: dict[int, int] = {}

    @property
    def blocks(self) -> list[FreeBlock]:
        """The free blocks, sorted."""
        return list(self.at_least(0))

    def put(self, address: int, n_bytes: int) -> int:
        """Add a free block, merged with its free neighbours; the address of the merged one.

        Source: `try_merge_blocks`.
        """
        starts, ends, free = self.starts, self.ends, self.free
        end = address + n_bytes
        if address in ends:
            address = ends.pop(address)
            del free[bisect_left(free, starts[address] << ADDRESS_BITS | address)]
        if end in starts:
            behind_bytes = starts.pop(end)
            del free[bisect_left(free, behind_bytes << ADDRESS_BITS | end)]
            end += behind_bytes
        starts[address] = n_bytes = end - address
        ends[end] = address
        insort(free, n_bytes << ADDRESS_BITS | address)
        return address

    def take(self, address: int) -> int:
        """Remove a free block; its bytes."""
        n_bytes = self.starts.pop(address)
        del self.ends[address + n_bytes]
        del self.free[bisect_left(self.free, n_bytes << ADDRESS_BITS | address)]
        return n_bytes

    def least(self, n_bytes: int) -> list[int]:
        """The addresses, sorted, of the free blocks of the least size that is at least `n_bytes`."""
        free = self.free
        first = bisect_left(free, n_bytes << ADDRESS_BITS)
        if first == len(free):
            return []
        end = bisect_left(free, (free[first] >> ADDRESS_BITS) + 1 << ADDRESS_BITS, first)
        return [_block(each)[1] for each in free[first:end]]

    def at_least(self, n_bytes: int, age: Callable[[int], int] | None = None) -> Iterator[FreeBlock]:
        """The free blocks of at least `n_bytes`, sorted by size, then by address or by its `age`."""
        blocks = map(_block, self.free[bisect_left(self.free, n_bytes << ADDRESS_BITS) :])
        if age is None:
            yield from blocks
            return
        for _, equal in groupby(blocks, key=itemgetter(0)):
            yield from sorted(equal, key=lambda block: age(block[1]))

    def is_whole(self, block: FreeBlock) -> bool:
        """Whether a block is its whole segment."""
        return self.segments.get(block[1]) == block[0]

    def least_expandable(self, blocks: Iterable[FreeBlock]) -> FreeBlock | None:
        """The block that `get_free_block` takes where blocks can be expanded, of those large enough.

        It goes on as long as the next block has fewer bytes together with the unmapped ones after it.

        Source: `get_free_block`.
        """
        best = None
        for block in blocks:
            if best is not None and self._expandable_bytes(block) >= self._expandable_bytes(best):
                break
            best = block
        return best

    def _expandable_bytes(self, block: FreeBlock) -> int:
        """A block's bytes with the unmapped ones after it."""
        n_bytes, address = block
        return n_bytes + self.unmapped.get(address + n_bytes, 0)


class Block(NamedTuple):
    """A block in use: its pool, its address and its bytes."""

    pool: Pool
    address: int
    n_bytes: int


class _Mark(NamedTuple):
    """An allocator's state as equal blocks are taken: its pool's layout, the blocks to come, its bytes."""

    layout: Hashable
    n: int
    allocated_bytes: int
    reserved_bytes: int
    end: int


class CachingAllocator:
    """One device's allocator: `allocated_bytes` in use, `reserved_bytes` from the driver, and their peaks.

    `limit_bytes` is what the driver has, `allowed_bytes` what the process may reserve
    (`torch.cuda.set_per_process_memory_fraction`). `n_retries` counts requests for which cached blocks were
    given back first, `n_given_back` the segments and ranges of pages that were given back.

    Of equal free blocks the one of the lowest address is taken; in torch 2.12 the oldest (`takes_oldest`):
    see `memplan.ages`.
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
        limits = (config.max_split_bytes, self.collects_above_bytes)
        self.looks_further = config.expandable_segments or takes_oldest or limits != (None, None)
        """Whether more than its size decides which free block is taken."""
        self.by_age_alone = takes_oldest and config == DEFAULTS
        """Whether the oldest of equal free blocks is taken, wherever it is."""
        self.allocated_bytes = self.reserved_bytes = 0
        self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self.n_retries = self.n_given_back = 0
        self._pools: dict[tuple[str, bool], Pool] = {}
        self._end = 0
        self._n_large_requests = 0
        self._since: dict[int, int] = {}
        """The number of large requests so far when the free block at an address was freed."""
        self.ages = Ages()

    def reset_peaks(self) -> None:
        """Forget the peaks so far, as `torch.cuda.reset_peak_memory_stats` does."""
        self.peak_allocated_bytes, self.peak_reserved_bytes = self.allocated_bytes, self.reserved_bytes

    def malloc(self, n_bytes: int, stream: str = "") -> Block:
        """A block for so many bytes: cached, the smallest that is large enough, or new.

        Raises:
            OutOfMemory: beyond the limits.
        """
        n_bytes = rounded_bytes(n_bytes)
        pool = self.pool_of(n_bytes, stream)
        address = self.allocate(pool, n_bytes)
        return Block(pool, address, n_bytes + pool.unsplit.get(address, 0))

    def free(self, block: Block) -> None:
        """Cache a block, merged with its free neighbours."""
        pool, address, n_bytes = block
        self.release(pool, address, n_bytes - pool.unsplit.get(address, 0))

    def pool_of(self, n_bytes: int, stream: str) -> Pool:
        """The pool that serves requests of `n_bytes` on a stream: the small or the large one.

        Source: `get_pool`.
        """
        key = stream, n_bytes <= SMALL_BYTES
        if key not in self._pools:
            self._pools[key] = Pool(small=key[1], expandable=self.expandable_segments)
        return self._pools[key]

    def allocate(self, pool: Pool, n_bytes: int) -> int:
        """The address that `malloc` gives to a request of a known pool and of rounded bytes.

        Source: `malloc`, `alloc_found_block`.
        """
        free = pool.free
        i = bisect_left(free, n_bytes << ADDRESS_BITS)
        if self.looks_further or i == len(free):
            found_bytes, address = self._taken(pool, n_bytes) or self._new(pool, n_bytes)
        else:
            found = free.pop(i)
            found_bytes, address = found >> ADDRESS_BITS, found & ADDRESS
            del pool.starts[address], pool.ends[address + found_bytes]
        if found_bytes != n_bytes:
            rest, rest_bytes = address + n_bytes, found_bytes - n_bytes
            if rest_bytes >= pool.least_rest_bytes and (self.oversize_bytes is None or self._splits(n_bytes)):
                pool.starts[rest] = rest_bytes
                pool.ends[address + found_bytes] = rest
                insort(free, rest_bytes << ADDRESS_BITS | rest)
                if self.looks_further:
                    self._note_split(address, rest)
            else:
                pool.unsplit[address] = rest_bytes
                self.allocated_bytes += rest_bytes
        self.allocated_bytes = allocated_bytes = self.allocated_bytes + n_bytes
        if allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = allocated_bytes
        return address

    def allocate_for_good(self, pool: Pool, n_bytes: int, n: int) -> list[int]:
        """Take `n` equal blocks that are never freed; the addresses of those that are not only counted.

        Where blocks fill new segments and leave the same free blocks behind twice, the next segments repeat
        that. They are only counted: no later request can be served from them.
        """
        addresses: list[int] = []
        marks: list[_Mark] = []
        while n > 0:
            if not self.looks_further and len(marks) < MOST_MARKS and not pool.least(n_bytes):
                marks.append(self._mark(pool, n))
                n -= self._counted(marks)
            if n > 0:
                addresses.append(self.allocate(pool, n_bytes))
                n -= 1
        return addresses

    def _mark(self, pool: Pool, n: int) -> "_Mark":
        """An instant of `allocate_for_good` at which `n` blocks are to come, the first in a new segment."""
        layout = frozenset(pool.starts.items()), self._end % pool.page_bytes, self.n_given_back
        return _Mark(layout, n, self.allocated_bytes, self.reserved_bytes, self._end)

    def _counted(self, marks: "Sequence[_Mark]") -> int:
        """Repeat what came between the last two marks if their layouts are equal; how many blocks that is."""
        if len(marks) < 2 or marks[-1].layout != marks[-2].layout:
            return 0
        before, now = marks[-2:]
        each, reserved_bytes = before.n - now.n, now.reserved_bytes - before.reserved_bytes
        limits = [limit for limit in (self.limit_bytes, self.allowed_bytes) if limit is not None]
        times = min([now.n // each, *((limit - now.reserved_bytes) // reserved_bytes for limit in limits)])
        self.allocated_bytes += times * (now.allocated_bytes - before.allocated_bytes)
        self.reserved_bytes += times * reserved_bytes
        self._end += times * (now.end - before.end)
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return times * each

    def release(self, pool: Pool, address: int, n_bytes: int) -> None:
        """`free` for a known pool and the rounded bytes that were asked for.

        Source: `free_block`.
        """
        if address in pool.unsplit:
            n_bytes += pool.unsplit.pop(address)
        self.allocated_bytes -= n_bytes
        merged = pool.put(address, n_bytes)
        if self.collects_above_bytes is not None:
            self._since[merged] = self._n_large_requests
        if self.takes_oldest:
            self.ages.free(address, merged)

    def _taken(self, pool: Pool, n_bytes: int) -> FreeBlock | None:
        """Remove the free block that serves a request by whatever the settings look at beside its size.

        Source: `get_free_block`, for `takes_oldest` of 2.12.
        """
        if self.collects_above_bytes is not None:
            self._n_large_requests += not pool.small
        if self.by_age_alone:
            equal = pool.least(n_bytes)
            if not equal:
                return None
            address = self.ages.oldest(equal) if len(equal) > 1 else equal[0]
            return pool.take(address), address
        blocks = pool.at_least(n_bytes, self.ages.numbers.__getitem__ if self.takes_oldest else None)
        best = pool.least_expandable(blocks) if pool.unmapped else next(blocks, None)
        if best is None or not self._serves(best[0], n_bytes):
            return None
        pool.take(best[1])
        return best

    def _note_split(self, address: int, rest: int) -> None:
        """Note the age of the free block that was split off behind a block."""
        if self.collects_above_bytes is not None:
            self._since[rest] = self._n_large_requests
        if self.takes_oldest:
            self.ages.split(address, rest)

    def free_sizes(self) -> FreeSizes:
        """How many blocks of each size are free, by pool, sorted."""
        pools = self._pools.items()
        return tuple(sorted(Counter((*key, n) for key, pool in pools for n in pool.starts.values()).items()))

    def moment(self, in_use: Iterable[int], fixed: Mapping[int, int]) -> tuple[Moment, "Places"]:
        """The ages of free blocks and of those `in_use`, and a function that gives each address its place.

        `fixed`: blocks that stay in use, their bytes by address.
        """
        pools = self._pools.items()
        segments = {at: (n_bytes, key) for key, pool in pools for at, n_bytes in pool.segments.items()}
        blocks = [*in_use, *(address for _, pool in pools for address in pool.starts)]
        gives_back = (self.limit_bytes, self.allowed_bytes) != (None, None)
        found, places = self.ages.moment(blocks, fixed, segments, gives_back=gives_back)
        return found, places.__getitem__

    def by_age(self, in_use: Iterable[int], places: "Places | None") -> tuple[Hashable, ...]:
        """The addresses of all blocks, oldest first, if age decides which is taken; renamed by `places`."""
        if not self.takes_oldest:
            return ()
        every = [*in_use, *(address for pool in self._pools.values() for address in pool.starts)]
        every.sort(key=self.ages.numbers.__getitem__)
        return tuple(every if places is None else map(places, every))

    def saved(self) -> tuple[Any, ...]:
        """The whole state in plain values, the same for equal states; for an allocator with no limit.

        Assumes: PyTorch's default settings.
        """
        pools = [
            (key, list(pool.segments.items()), sorted(pool.starts.items()), sorted(pool.unsplit.items()))
            for key, pool in sorted(self._pools.items())
            if pool.segments
        ]
        peaks = self.peak_allocated_bytes, self.peak_reserved_bytes
        return self.allocated_bytes, self.reserved_bytes, *peaks, self._end, pools

    def restore(self, saved: tuple[Any, ...]) -> None:
        """Set the state to a `saved` one."""
        self.allocated_bytes, self.reserved_bytes, *peaks, self._end, pools = saved
        self.peak_allocated_bytes, self.peak_reserved_bytes = peaks
        for (stream, small), segments, free, unsplit in pools:
            pool = self.pool_of(SMALL_BYTES + (not small), stream)
            pool.segments, pool.unsplit = dict(segments), dict(unsplit)
            pool.starts, pool.ends = dict(free), {address + n: address for address, n in free}
            pool.free = sorted([n << ADDRESS_BITS | address for address, n in free])

    @property
    def cached(self) -> tuple[FreeBlock, ...]:
        """The size and the address of each free block, pool by pool."""
        return tuple(block for pool in self._pools.values() for block in pool.blocks)

    def layout(self, places: "Places | None") -> object:
        """The free blocks of each pool; renamed by `places`, if given, and with the bytes of all segments."""
        pools = self._pools.values()
        if places is None:
            return tuple([frozenset(pool.starts.items()) for pool in pools])
        segments = tuple([tuple(pool.segments.values()) for pool in pools])
        free = [frozenset([(places(at), n) for at, n in pool.starts.items()]) for pool in pools]
        return segments, tuple(free)

    def places(self) -> "Places":
        """A function that renames addresses so that segments which were given back leave no gaps."""
        starts: list[int] = []
        moved: list[int] = []
        end = 0
        segments = sorted(item for pool in self._pools.values() for item in pool.segments.items())
        for address, n_bytes in segments:
            starts.append(address)
            moved.append(address - end)
            end += n_bytes
        return lambda address: address - moved[bisect_right(starts, address) - 1]

    @property
    def large_requests_since(self) -> tuple[int, ...]:
        """The age of each free block in large requests; empty unless garbage is collected by age."""
        if self.collects_above_bytes is None:
            return ()
        return tuple(self._age(block) for pool in self._pools.values() for block in pool.blocks)

    def _age(self, block: FreeBlock) -> int:
        return self._n_large_requests - self._since.get(block[1], 0)

    def _serves(self, block_bytes: int, n_bytes: int) -> bool:
        """Whether a free block may serve a request: an oversize one serves only requests near its size.

        Source: `get_free_block`.
        """
        if self.oversize_bytes is None or n_bytes < self.oversize_bytes:
            return self.oversize_bytes is None or block_bytes < self.oversize_bytes
        return block_bytes < n_bytes + MOST_UNUSED_BYTES

    def _splits(self, n_bytes: int) -> bool:
        """Whether a block may be split for a request: not for an oversize one.

        Source: `should_split`.
        """
        return self.expandable_segments or self.oversize_bytes is None or n_bytes < self.oversize_bytes

    def _new(self, pool: Pool, n_bytes: int) -> FreeBlock:
        """The bytes and the address of a block of new memory; cached blocks are given back if there is none.

        Source: `malloc`, `release_available_cached_blocks`, `release_cached_blocks`.
        """
        self._collect_garbage()
        found = self._asked(pool, n_bytes)
        if found is None and self._release_oversize(pool, n_bytes):
            found = self._asked(pool, n_bytes)
        if found is None:
            self.n_retries += 1
            self.release_cached()
            found = self._asked(pool, n_bytes)
        if found is None:
            limits = f"limit_bytes={self.limit_bytes}"
            if self.allowed_bytes is not None:
                limits = f"allowed_bytes={self.allowed_bytes}"
            raise OutOfMemory(
                f"{n_bytes} more bytes do not fit: {self.reserved_bytes} are reserved, "
                f"{self.allocated_bytes} of them in use, {limits}; use a smaller plan."
            )
        return found

    def _asked(self, pool: Pool, n_bytes: int) -> FreeBlock | None:
        """The bytes and the address of a new segment, or of more pages of one; None beyond the limits.

        Source: `alloc_block`, `get_allocation_size`.
        """
        asked = segment_bytes(n_bytes)
        if self.allowed_bytes is not None and self.reserved_bytes + asked > self.allowed_bytes:
            return None
        if self.expandable_segments:
            return self._expanded(pool, n_bytes)
        if not self._reserve(asked):
            return None
        return asked, self._segment(pool, asked)

    def _segment(self, pool: Pool, n_bytes: int) -> int:
        """The address of a new segment: after all others, with a gap, so that no blocks of two merge."""
        address = -(-self._end // pool.page_bytes) * pool.page_bytes
        self._end = address + n_bytes + BLOCK_BYTES
        pool.segments[address] = n_bytes
        self.ages.make(address)
        return address

    def _reserve(self, n_bytes: int) -> bool:
        """Add `n_bytes` to the reserved bytes; False, and nothing added, if the driver has fewer left."""
        if self.limit_bytes is not None and self.reserved_bytes + n_bytes > self.limit_bytes:
            return False
        self.reserved_bytes += n_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return True

    def _expanded(self, pool: Pool, n_bytes: int) -> FreeBlock | None:
        """Take the first free range of `n_bytes` or more in an expandable segment: its bytes and address.

        What is not mapped yet is mapped first. None if the driver has too little memory.

        Source: `try_allocate_expandable_block`, `find_expandable_block`.
        """
        rows = (self._row(pool, unmapped) for unmapped in sorted(pool.unmapped))
        start = next((address for address, row_bytes in rows if row_bytes >= n_bytes), None)
        if start is None:
            start = self._addresses(pool)
        while True:
            mapped_bytes = pool.starts.get(start, 0)
            if mapped_bytes >= n_bytes:
                return pool.take(start), start
            behind = start + mapped_bytes
            if not self._map(pool, behind, min(n_bytes - mapped_bytes, pool.unmapped[behind])):
                return None

    @staticmethod
    def _row(pool: Pool, unmapped: int) -> tuple[int, int]:
        """The address and the bytes of the range of free and unmapped bytes around an unmapped address."""
        start = end = pool.ends.get(unmapped, unmapped)
        while True:
            found_bytes = pool.starts.get(end, 0) or pool.unmapped.get(end, 0)
            if not found_bytes:
                return start, end - start
            end += found_bytes

    def _addresses(self, pool: Pool) -> int:
        """The address of a new expandable segment, of 1 1/8 times the GPU's memory and nothing mapped.

        Source: `ExpandableSegment`.
        """
        limit, page_bytes = self.limit_bytes, pool.page_bytes
        n_pages = MANY_PAGES if limit is None else -(-(limit + limit // 8) // page_bytes)
        start = self._segment(pool, n_pages * page_bytes)
        pool.unmapped[start] = n_pages * page_bytes
        return start

    def _map(self, pool: Pool, address: int, n_bytes: int) -> bool:
        """Map whole pages to the first of a range of unmapped bytes; False if the driver has too few.

        Source: `map_block`.
        """
        mapped = -(-n_bytes // pool.page_bytes) * pool.page_bytes
        if not self._reserve(mapped):
            return False
        unmapped = pool.unmapped.pop(address)
        if mapped < unmapped:
            pool.unmapped[address + mapped] = unmapped - mapped
            self.ages.make(address + mapped)
        self.ages.numbers[pool.put(address, mapped)] = self.ages.numbers.get(address, 0)
        return True

    def release_cached(self) -> None:
        """Give segments without a block in use back to the driver; of expandable ones all free pages.

        Source: `release_blocks`.
        """
        for pool in self._pools.values():
            for block in pool.blocks:
                if self.expandable_segments:
                    self._unmap(pool, block)
                elif pool.is_whole(block):
                    self._release(pool, block)

    def _release(self, pool: Pool, segment: FreeBlock) -> None:
        _, address = segment
        pool.take(address)
        self.reserved_bytes -= pool.segments.pop(address)
        self.n_given_back += 1

    def _unmap(self, pool: Pool, block: FreeBlock) -> None:
        """Give the whole pages of a free block back; what is left at either end stays free.

        Source: `unmap_block`.
        """
        n_bytes, address = block
        start = -(-address // pool.page_bytes) * pool.page_bytes
        end = (address + n_bytes) // pool.page_bytes * pool.page_bytes
        if start >= end:
            return
        pool.take(address)
        self.reserved_bytes -= end - start
        self.n_given_back += 1
        number = self.ages.numbers.get(address, 0)
        if start > address:
            pool.put(address, start - address)
            self.ages.make(address)
        if address + n_bytes > end:
            pool.put(end, address + n_bytes - end)
            self.ages.make(end)
        end += pool.unmapped.pop(end, 0)
        before = next((at for at, unmapped in pool.unmapped.items() if at + unmapped == start), start)
        pool.unmapped[before] = end - before
        self.ages.numbers[before] = number

    def _release_oversize(self, pool: Pool, n_bytes: int) -> bool:
        """Give back oversize blocks of the pool, the largest first; whether they are enough for a request.

        Source: `release_available_cached_blocks`.
        """
        if self.oversize_bytes is None:
            return False
        wanted = max(n_bytes, self.oversize_bytes)
        enough = next(pool.at_least(wanted), None)
        if enough is not None and not self.expandable_segments:
            self._release(pool, enough)
            return True
        released = 0
        for block in reversed([block for block in pool.blocks if block[0] < wanted]):
            block_bytes, _ = block
            if released >= wanted or block_bytes < self.oversize_bytes:
                break
            if not self.expandable_segments:
                self._release(pool, block)
                released += block_bytes
        return released >= wanted

    def _collect_garbage(self) -> None:
        """Give back free segments that are older than the average, until the threshold is reached.

        Source: `garbage_collect_cached_blocks`.
        """
        above = self.collects_above_bytes
        if above is None or self.reserved_bytes <= above:
            return
        target = self.reserved_bytes - above
        pools = [pool for pool in self._pools.values() if not pool.small]
        whole = [(pool, block) for pool in pools for block in pool.blocks if pool.is_whole(block)]
        collected, freed = 0, True
        while whole and freed and collected < target:
            ages = [self._age(block) for _, block in whole]
            average = sum(ages) / len(ages)
            old = [found for found, age in zip(whole, ages, strict=True) if age >= average]
            freed = bool(old)
            for pool, block in old:
                self._release(pool, block)
                collected += block[0]
                whole.remove((pool, block))
