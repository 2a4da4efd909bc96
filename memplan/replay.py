"""One rank's steps through PyTorch's caching allocator: what it reserves at most, and after which step.

A step is a `Stretch`, whose equal blocks and micro-batches share their buffers. Here each of them is a block
of memory of its own, so that what is freed must be told from its equals: a pass frees what belongs to its
micro-batch, the newest first.

Hundreds of micro-batches are not replayed one by one: they are left out where the allocator's state recurs,
or where each beyond some adds to the peaks of every step what the one before it has added.
"""

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Final

from memplan.allocator import (
    DEFAULTS,
    AllocatorConfig,
    CachingAllocator,
    OutOfMemory,
    PackedBlock,
    Places,
    Pool,
    rounded_bytes,
)
from memplan.memory import Alive, add_net
from memplan.record import Alloc, Event, PassPart, Stretch, chain, changes, repeated
from memplan.shapes import Buffer

MOST_STEPS: Final = 10
"""Steps replayed at most: most plans settle within three."""

FEW: Final = 6
"""Repetitions of a schedule's micro-batches that are replayed, when there are four times as many or more."""

LONGEST_PERIOD: Final = 3
"""After so many micro-batches at most, what each adds is looked for to recur ..."""

MOST_EVENTS: Final = 500_000
"""... and where it does not, a step of so many events at most is replayed in full; of a longer one, also
within limits, only with few of its micro-batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorProgram:
    """What one rank allocates and frees: its `setup`, then, nothing being cached, steps that are all alike.

    What a step leaves is freed before the next one, as gradients are, but for what it has found, states and
    what is `kept`; of what a `first_step` leaves those stay that a step leaves alone, as zeroed gradients.

    Attributes whose meaning their name does not tell:
        start: what the first step begins with, to be kept.
        second: what happens once, before the second step.
        states: the optimizer's, made in the first step before the stretch called `update_name`.
        beside: buffers, and what the first of them that is allocated brings with it.
        oldest_first: buffers of which the oldest goes first.
        handed_over: what takes the place, and the name, of a buffer that a pass frees.
        streams: the stream of each buffer that does not belong to the default stream.
    """

    setup: tuple[Event, ...]
    step: Stretch
    start: tuple[Event, ...] = ()
    first_step: Stretch | None = None
    second: tuple[Event, ...] = ()
    kept: Alive = field(default_factory=Counter)
    states: tuple[Buffer, ...] = ()
    update_name: str = ""
    beside: Sequence[tuple[frozenset[Buffer], Buffer]] = ()
    oldest_first: frozenset[Buffer] = frozenset()
    handed_over: Mapping[Buffer, Buffer] = field(default_factory=dict)
    streams: Mapping[Buffer, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """Peaks over the replayed steps.

    `settled`: the last one has left everything as the one before, and micro-batches that were not replayed
    add what others have added.

    `allocated_bytes` is what `torch.cuda.max_memory_allocated` counts: whole blocks, so that a rest of up to
    1 MiB that is not split off belongs to them. `after_step` has both peaks after each step.
    """

    allocated_bytes: int
    reserved_bytes: int
    n_retries: int
    settled: bool
    after_step: tuple[tuple[int, int], ...]

    @property
    def n_steps(self) -> int:
        """How many steps were replayed."""
        return len(self.after_step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What a rank's allocator has: its settings, the driver's bytes, and how many of them it may take."""

    config: AllocatorConfig = DEFAULTS
    limit_bytes: int | None = None
    allowed_bytes: int | None = None

    def allocator(self) -> CachingAllocator:
        """A new allocator of this memory."""
        return CachingAllocator(self.config, limit_bytes=self.limit_bytes, allowed_bytes=self.allowed_bytes)

    @property
    def bound_bytes(self) -> int | None:
        """The least of its limits; None without any."""
        limits = [limit for limit in (self.limit_bytes, self.allowed_bytes) if limit is not None]
        return min(limits, default=None)

    def less(self, n_bytes: int) -> "Memory":
        """The memory that is left of it when so many bytes are taken."""
        limit, allowed = (None if n is None else n - n_bytes for n in (self.limit_bytes, self.allowed_bytes))
        return replace(self, limit_bytes=limit, allowed_bytes=allowed)

    def keeps_all(self, reserved_bytes: int) -> bool:
        """Whether nothing is given back to the driver as long as no more bytes are reserved."""
        collects_above = self.allocator().collects_above_bytes
        limits = [limit for limit in (self.bound_bytes, collects_above) if limit is not None]
        return reserved_bytes <= min(limits, default=reserved_bytes)


UNLIMITED: Final = Memory()


def replayed(
    program: AllocatorProgram, memory: Memory = UNLIMITED, *, unlimited: Replayed | None = None
) -> Replayed:
    """A program through the caching allocator, step after step until one leaves all as the one before.

    `unlimited`: what is known of the same program and settings without limits.

    Raises:
        OutOfMemory: where the memory does not suffice.
    """
    left_out = _most_repeats(program.step) - FEW
    if left_out < 3 * FEW:
        return _replayed(program, memory)
    try:
        return _replayed(program, memory, patience=2 * FEW)
    except _NotRecurring:
        found = unlimited or _extrapolated(program, left_out, memory.config)
    too_long = _n_events(program.step) > MOST_EVENTS
    if found is not None and (found.settled or too_long):
        if memory.keeps_all(found.reserved_bytes):
            return found
        bound_bytes = memory.bound_bytes
        if bound_bytes is not None and found.allocated_bytes > bound_bytes:
            raise OutOfMemory(
                f"{found.allocated_bytes} bytes are in use at once, limit_bytes={bound_bytes}; "
                "use a smaller plan."
            )
    shorter = _shortened(program, memory, left_out) if too_long else None
    return _replayed(program, memory) if shorter is None else shorter


def _shortened(program: AllocatorProgram, memory: Memory, left_out: int) -> Replayed | None:
    """A program within limits, without `left_out` of its micro-batches and the bytes that these leave.

    None if what is left is another program.
    """
    fewer = _without(program, left_out)
    if fewer is None:
        return None
    left: Alive = Counter()
    _leave_out(program.step, left_out, left)
    left_bytes = sum(n * rounded_bytes(buffer.n_bytes) for buffer, n in left.items())
    found = _replayed(fewer, memory.less(left_bytes))
    return replace(
        found,
        allocated_bytes=found.allocated_bytes + left_bytes,
        reserved_bytes=found.reserved_bytes + left_bytes,
        after_step=tuple([(a + left_bytes, r + left_bytes) for a, r in found.after_step]),
    )


class _NotRecurring(Exception):
    """The allocator's state has not recurred after as many repetitions as were to be waited for."""


def _replayed(program: AllocatorProgram, memory: Memory, patience: int | None = None) -> Replayed:
    """A program of which only those repetitions are left out after which the allocator's state recurs.

    Raises:
        OutOfMemory: where the memory does not suffice.
        _NotRecurring: if `patience` repetitions of micro-batches were not enough for that.
    """
    allocator = memory.allocator()
    replay = _Replay(program, allocator, patience)
    peaks: list[tuple[int, int]] = []
    before: object = None
    settled = False
    while len(peaks) < MOST_STEPS and not settled:
        settled = not replay.step()
        peaks.append((allocator.peak_allocated_bytes, allocator.peak_reserved_bytes))
        if not settled:
            if len(peaks) == 1:
                replay.second()
            after = replay.state()
            settled, before = after == before, after
    return Replayed(
        allocated_bytes=allocator.peak_allocated_bytes,
        reserved_bytes=allocator.peak_reserved_bytes,
        n_retries=allocator.n_retries,
        settled=settled,
        after_step=tuple(peaks),
    )


def _extrapolated(program: AllocatorProgram, left_out: int, config: AllocatorConfig) -> Replayed | None:
    """The program's peaks from those with fewer micro-batches; None if none can be left out of its step."""

    @cache
    def without(n: int) -> Replayed | None:
        fewer = _without(program, n)
        return None if fewer is None else _replayed(fewer, Memory(config=config))

    for period in range(1, LONGEST_PERIOD + 1):
        shortest = left_out - left_out % period
        three = [without(shortest - i * period) for i in range(3)]
        found = _along(three, shortest // period)
        if found is None or found.settled:
            return found
    return found


def _along(three: Sequence[Replayed | None], times: int) -> Replayed | None:
    """Peaks that grow by the same `times` over; settled if they have done so twice."""
    steps = [() if one is None else one.after_step for one in three]
    if not all(steps):
        return None
    n_steps = max(map(len, steps))
    first, second, third = ([*step, *[step[-1]] * (n_steps - len(step))] for step in steps)
    grown = [(b[0] - a[0], b[1] - a[1]) for a, b in zip(first, second, strict=True)]
    again = [(b[0] - a[0], b[1] - a[1]) for a, b in zip(second, third, strict=True)]
    after = tuple([(a[0] + times * g[0], a[1] + times * g[1]) for a, g in zip(first, grown, strict=True)])
    return Replayed(
        allocated_bytes=after[-1][0],
        reserved_bytes=after[-1][1],
        n_retries=0,
        settled=grown == again and all(one is not None and one.settled for one in three),
        after_step=after,
    )


def _n_events(stretch: Stretch) -> int:
    """How many there are in all repetitions."""
    return stretch.repeats * (len(stretch.events) + sum(map(_n_events, stretch.parts)))


def _most_repeats(stretch: Stretch) -> int:
    """How often the passes that recur the most do."""
    if stretch.micro_batch is not None or not stretch.has_passes:
        return 0
    return max(stretch.repeats, *map(_most_repeats, stretch.parts))


def _without(program: AllocatorProgram, n: int) -> AllocatorProgram | None:
    """The program with `n` repetitions of its micro-batches left out; None if that leaves something else."""
    steps = [program.step] if program.first_step is None else [program.step, program.first_step]
    shorter = []
    for step in steps:
        left_out: Alive = Counter()
        _leave_out(step, n, left_out)
        kept = Counter({buffer: m - left_out[buffer] for buffer, m in program.kept.items()})
        shorter.append(_shorter(step, n, left_out))
        if any(left_out.values()):
            return None
    first_step = None if program.first_step is None else shorter[1]
    return replace(program, step=shorter[0], first_step=first_step, kept=kept)


def _leave_out(stretch: Stretch, n: int, left_out: Alive) -> None:
    """Add to `left_out` what is left by `n` repetitions of the passes in a step."""
    if stretch.micro_batch is None and stretch.has_passes:
        for part in stretch.parts:
            if stretch.repeats > n:
                add_net(part, left_out, n)
            _leave_out(part, n, left_out)


def _shorter(stretch: Stretch, n: int, left_out: Alive) -> Stretch:
    """A step without `n` repetitions of its passes, and without freeing, before or later, what they leave."""
    if stretch.micro_batch is not None or not stretch.parts:
        return stretch
    repeats = stretch.repeats
    if stretch.has_passes:
        repeats -= n if repeats > n else 0
    elif repeats > 1:
        freed = {event.buffer for part in stretch.parts for event in changes(part.events)}
        repeats -= max([left_out[buffer] for buffer in freed], default=0)
        for buffer in freed:
            left_out[buffer] -= stretch.repeats - repeats
    parts = [_shorter(part, n, left_out) for part in stretch.parts]
    return (
        repeated(chain(stretch.name, *parts), repeats) if stretch.repeats > 1 else chain(stretch.name, *parts)
    )


SPLIT: Final = {"backward-input": 1, "backward-weight": 2}
"""The parts of a split backward pass."""

MicroBatch = tuple[int, int, int]
"""A stage, the number of its micro-batch, and which part of a split backward pass made it; 0 if none did."""

OUTSIDE: Final[MicroBatch] = (-1, 0, 0)
"""What no pass has made."""


_Operation = tuple[Pool, int, int, Buffer | None]
"""An allocation of so many bytes from a pool, or a free if 0.

Of a block that lives within its stretch: the place where its address is kept. Of others: the buffer.
"""


class _Replay:
    """The blocks of what is alive, by buffer and by the micro-batch that they were made for."""

    def __init__(
        self, program: AllocatorProgram, allocator: CachingAllocator, patience: int | None = None
    ) -> None:
        self.program, self.patience = program, patience
        self.allocator = allocator
        self.held: dict[Buffer, dict[MicroBatch, list[PackedBlock]]] = {}
        self.passes: Counter[tuple[int, str]] = Counter()
        self.current = OUTSIDE
        self.beside = {buffer: group for group in program.beside for buffer in group[0]}
        self.states = program.states
        self.not_yet = Counter(program.kept)
        self.halfway: dict[int, deque[int]] = {}
        """Of each stage the micro-batches between the two parts of their backward passes."""
        self.requests: dict[Buffer, tuple[Pool, int]] = {}
        self.compiled: dict[Stretch, list[_Operation]] = {}
        self._play(self._operations(program.setup))
        allocator.release_cached()
        self.n_given_back = allocator.n_given_back
        self._play(self._operations(program.start))
        self.n_steps = 0
        self.loops: dict[int, int] = {}
        """Of each loop of a step the state in which the last step began it."""
        self.at_rest = self._all_held()
        self.at_rest.update(program.states)
        self.at_rest.update(brought for _, brought in program.beside)
        self.at_rest.update(program.kept)

    def step(self) -> bool:
        """One step, and the freeing of what it leaves; False: it recurs, and was not played to its end."""
        program = self.program
        self.passes.clear()
        first = self.n_steps == 0
        step = program.first_step if first and program.first_step is not None else program.step
        for place, part in enumerate(step.parts):
            if not first and part.repeats > 2 and part.net_bytes == 0:
                state = hash(self.state())
                if self.loops.get(place) == state:
                    return False
                self.loops[place] = state
            self._run(part)
        self.n_steps += 1
        left = self._all_held()
        if first and program.first_step is not None:
            net: Alive = Counter()
            add_net(program.step, net, 1)
            self.at_rest = Counter({buffer: left[buffer] - net[buffer] for buffer in {*left, *net}})
        at_rest = self.at_rest
        for buffer, n in (left - at_rest).items():
            for _ in range(n):
                self._free(buffer)
        for buffer, n in (at_rest - left).items():
            for _ in range(n):
                self._allocate(buffer)
        return True

    def second(self) -> None:
        """What happens once, between the first step and the second."""
        self._play(self._operations(self.program.second))
        for event in changes(self.program.second):
            self.at_rest[event.buffer] += event.sign

    def state(self) -> object:
        """Everything that the rest of the replay depends on; of micro-batches only how old they are."""
        passes, allocator = self.passes, self.allocator
        halfway = [(stage, n) for stage, found in self.halfway.items() for n in found]
        over = {stage: min(passes[stage, "forward"], passes[stage, "backward"]) for stage, _ in passes}
        for stage, n in reversed(halfway):
            over[stage] = min(over[stage], n - 1)
        same = allocator.n_given_back == self.n_given_back
        names = None if same else allocator.places()
        held = frozenset(self._held_blocks(over, names))
        ages = frozenset((stage, n - passes[stage, "forward"]) for stage, n in halfway)
        return allocator.layout(names), allocator.ages, held, ages

    def _held_blocks(self, over: Mapping[int, int], names: Places | None) -> Iterator[tuple[object, ...]]:
        """The blocks of each buffer and micro-batch; the age of one whose passes are `over` is no matter."""
        for buffer, found in self.held.items():
            for i, (key, blocks) in enumerate(found.items()):
                stage, n, split = key
                past = n <= over.get(stage, 0) and key != self.current
                age = None if past else n - self.passes[stage, "forward"]
                yield buffer, i, stage, age, split, *(blocks if names is None else map(names, blocks))

    def _all_held(self) -> Alive:
        return Counter({buffer: sum(map(len, found.values())) for buffer, found in self.held.items()})

    def _run(self, stretch: Stretch) -> None:
        """A stretch with its repetitions; where they recur, only those that are over a whole period."""
        if stretch.name == self.program.update_name and self.states:
            for buffer in self.states:
                self._allocate(buffer)
            self.states = ()
        seen: dict[int, int] = {}
        i, n = 0, stretch.repeats
        while i < n:
            if n > 2 and stretch.net_bytes == 0:
                state = hash(self.state())
                if state in seen:
                    n = i + (n - i) % (i - seen[state])
                    seen = {}
                    if i == n:
                        return
                seen[state] = i
            if i == self.patience and stretch.micro_batch is None and stretch.has_passes:
                raise _NotRecurring
            self._once(stretch)
            i += 1

    def _once(self, stretch: Stretch) -> None:
        before = self.current
        if stretch.micro_batch is not None:
            self.current = self._micro_batch(*stretch.micro_batch)
        if stretch.events:
            if stretch not in self.compiled:
                self.compiled[stretch] = self._operations(stretch.events)
            self._play(self.compiled[stretch])
        for part_ in stretch.parts:
            self._run(part_)
        self.current = before

    def _micro_batch(self, stage: int, part: PassPart) -> MicroBatch:
        """The one that a pass is for: those of each direction come in order."""
        if part == "backward-weight" and self.halfway.get(stage):
            return stage, self.halfway[stage].popleft(), SPLIT[part]
        direction = "forward" if part == "forward" else "backward"
        self.passes[stage, direction] += 1
        n = self.passes[stage, direction]
        if part == "backward-input":
            self.halfway.setdefault(stage, deque()).append(n)
        return stage, n, SPLIT.get(part, 0)

    def _operations(self, events: Sequence[Event]) -> list[_Operation]:
        """The events as operations; what they free of what they have allocated themselves stays with them."""
        found: list[_Operation] = []
        own: dict[Buffer, list[int]] = {}
        for event in changes(events):
            buffer = event.buffer
            if not buffer.n_bytes:
                continue
            pool, n_bytes = self._request(buffer)
            if isinstance(event, Alloc):
                own.setdefault(buffer, []).append(len(found))
                found.append((pool, n_bytes, 0, buffer))
            elif own.get(buffer) and buffer not in self.program.oldest_first and buffer not in self.beside:
                place = own[buffer].pop()
                found[place] = pool, n_bytes, place, None
                found.append((pool, 0, place, None))
            else:
                found.append((pool, 0, 0, buffer))
        return found

    def _request(self, buffer: Buffer) -> tuple[Pool, int]:
        """The pool and the rounded bytes that a buffer asks for."""
        if buffer not in self.requests:
            n_bytes = rounded_bytes(buffer.n_bytes)
            pool = self.allocator.pool_of(n_bytes, self.program.streams.get(buffer, ""))
            self.requests[buffer] = pool, n_bytes
        return self.requests[buffer]

    def _play(self, operations: Sequence[_Operation]) -> None:
        allocate, release = self.allocator.allocate, self.allocator.release
        blocks: list[PackedBlock] = [0] * len(operations)
        for pool, n_bytes, place, buffer in operations:
            if buffer is not None:
                if n_bytes:
                    self._hold(buffer, allocate(pool, n_bytes))
                else:
                    self._free(buffer)
            elif n_bytes:
                blocks[place] = allocate(pool, n_bytes)
            else:
                release(pool, blocks[place])

    def _allocate(self, buffer: Buffer) -> None:
        if buffer.n_bytes:
            self._hold(buffer, self.allocator.allocate(*self._request(buffer)))

    def _hold(self, buffer: Buffer, block: PackedBlock) -> None:
        """A block is the current micro-batch's; if it is the first of its group, it brings another."""
        held = self.held.get(buffer)
        if held is None:
            self.held[buffer] = {self.current: [block]}
        elif self.current in held:
            held[self.current].append(block)
        else:
            held[self.current] = [block]
        if buffer in self.beside:
            buffers, brought = self.beside[buffer]
            for other in buffers:
                del self.beside[other]
            self.compiled.clear()
            self._allocate(brought)

    def _free(self, buffer: Buffer) -> None:
        """The current micro-batch's newest.

        The second part of a split backward pass goes through the module from the first block to the last: of
        what the forward pass has made it frees the oldest, of what the first part has, which went backward,
        the newest.
        """
        if not buffer.n_bytes:
            return
        if buffer not in self.held and self.not_yet[buffer]:
            self.not_yet[buffer] -= 1
            return
        held, current, newest = self.held[buffer], self.current, -1
        if buffer in self.program.oldest_first:
            current, newest = next(iter(held)), 0
        elif current not in held:
            stage, n, split = current
            earlier = [made for part in range(split - 1, -1, -1) if (made := (stage, n, part)) in held]
            current = earlier[0] if earlier else next(reversed(held))
            newest = 0 if earlier and split == SPLIT["backward-weight"] and not current[2] else -1
        self.allocator.release(self.requests[buffer][0], self._taken(buffer, current, newest))
        if buffer in self.program.handed_over:
            block = self._taken(self.program.handed_over[buffer], self.current)
            self.held.setdefault(buffer, {}).setdefault(OUTSIDE, []).append(block)

    def _taken(self, buffer: Buffer, of: MicroBatch, i: int = -1) -> PackedBlock:
        """The i-th block of a buffer and micro-batch, which is no longer held."""
        held = self.held[buffer]
        block = held[of].pop(i)
        if not held[of]:
            del held[of]
            if not held:
                del self.held[buffer]
        return block
