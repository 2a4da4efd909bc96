"""What is replayed, within which limits, and what comes out: an allocator's program and its peaks."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from memplan.allocator import DEFAULTS, AllocatorConfig, CachingAllocator, FreeSizes
from memplan.memory import Alive
from memplan.record import Event, Stretch
from memplan.shapes import Buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorProgram:
    """The allocations and frees of one rank: `setup`, then, with an empty cache and new peaks, steps.

    Before the setup comes `init`, after which the cache is emptied too.

    Between steps everything that the step has left allocated is freed (gradients), except optimizer state and
    what is `kept`. Of what `first_step` leaves, only what `step` leaves too is freed, so that zeroed
    gradients stay.

    Attributes whose meaning their name does not tell:
        received: receive buffers and how many of each, allocated after the setup and never freed.
        start: what comes after them, before the first step.
        second: events between the first step and the second.
        states: the optimizer's, allocated in the first step before the stretch called `update_name`.
        beside: groups of buffers; the first allocation of one of a group also allocates the buffer beside it.
        oldest_first: buffers of which the oldest block is freed first.
        handed_on: buffers that stand for the input and the output of equal blocks: a block frees its input
            after it has allocated its output, unless it has made its input itself (what is computed between
            two blocks is the second one's).
        handed_over: for a receive buffer that a pass frees, the buffer that replaces it under its name.
        takes_oldest: of equal free blocks the allocator takes the one made first, as in torch 2.12.
        streams: the stream of each buffer that is not on the default stream.
    """

    setup: tuple[Event, ...]
    step: Stretch
    init: tuple[Event, ...] = ()
    received: Sequence[tuple[Buffer, int]] = ()
    start: tuple[Event, ...] = ()
    first_step: Stretch | None = None
    second: tuple[Event, ...] = ()
    kept: Alive = field(default_factory=Counter)
    states: tuple[Buffer, ...] = ()
    update_name: str = ""
    beside: Sequence[tuple[frozenset[Buffer], Buffer]] = ()
    oldest_first: frozenset[Buffer] = frozenset()
    handed_on: frozenset[Buffer] = frozenset()
    handed_over: Mapping[Buffer, Buffer] = field(default_factory=dict)
    takes_oldest: bool = False
    streams: Mapping[Buffer, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """The peaks of the replayed steps.

    `settled`: further steps and micro-batches would not change them, since the allocator's state recurs, or
    since the growth with the number of micro-batches is constant.

    `allocated_bytes` is what `torch.cuda.max_memory_allocated` counts: whole blocks, with the up to 1 MiB of
    each that is not split off; `rest_bytes` what `torch.cuda.memory_allocated` counts between steps, None
    where steps were left out. `after_step` has the peaks of allocated and of reserved bytes after each step.
    `tried_bytes`: what was reserved when waiting for a recurring state was given up (None: never); a
    limit of at least that changes nothing until then. `setup`: the peaks of both before the first step.
    `free_after`: the free blocks after each loop of
    each step that leaves tensors allocated.
    """

    allocated_bytes: int
    reserved_bytes: int
    n_retries: int
    settled: bool
    after_step: tuple[tuple[int, int], ...]
    setup: tuple[int, int] = (0, 0)
    rest_bytes: int | None = field(default=None, compare=False)
    tried_bytes: int | None = field(default=None, repr=False, compare=False)
    free_after: tuple[tuple[FreeSizes, ...], ...] = field(default=(), repr=False, compare=False)

    @property
    def n_steps(self) -> int:
        """Steps that were replayed."""
        return len(self.after_step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """An allocator's settings and its limits: the driver's memory, and the process' share of it."""

    config: AllocatorConfig = DEFAULTS
    limit_bytes: int | None = None
    allowed_bytes: int | None = None

    def allocator(self, *, takes_oldest: bool = False) -> CachingAllocator:
        """A new allocator with these settings and limits."""
        return CachingAllocator(
            self.config,
            limit_bytes=self.limit_bytes,
            allowed_bytes=self.allowed_bytes,
            takes_oldest=takes_oldest,
        )

    @property
    def bound_bytes(self) -> int | None:
        """The smaller of the two limits; None without any."""
        limits = [limit for limit in (self.limit_bytes, self.allowed_bytes) if limit is not None]
        return min(limits, default=None)

    def less(self, n_bytes: int) -> "Memory":
        """The same settings with limits that are smaller by `n_bytes`."""
        limit, allowed = (None if n is None else n - n_bytes for n in (self.limit_bytes, self.allowed_bytes))
        return replace(self, limit_bytes=limit, allowed_bytes=allowed)

    def keeps_all(self, reserved_bytes: int) -> bool:
        """Whether the allocator reserves this many bytes without calling `cudaFree`."""
        collects_above = self.allocator().collects_above_bytes
        limits = [limit for limit in (self.bound_bytes, collects_above) if limit is not None]
        return reserved_bytes <= min(limits, default=reserved_bytes)


UNLIMITED: Final = Memory()
