"""The peaks of allocated and reserved bytes of one rank's first steps in PyTorch's caching allocator.

In a step's record, equal layers and micro-batches share their buffers. The replay keeps the allocator's
blocks of each buffer by micro-batch: a pass frees the newest block of its own micro-batch.

Of hundreds of micro-batches only some are replayed. Where the allocator's state after a micro-batch recurs,
whole cycles between equal states are left out. Where no state recurs, three short steps of
different lengths are replayed, and the growth of their peaks is extrapolated; what these steps have in common
is played once.
"""

from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from marshal import dumps, loads
from operator import itemgetter
from typing import Any, Final, NamedTuple

from memplan.ages import Moment
from memplan.allocator import (
    DEFAULTS,
    AllocatorConfig,
    CachingAllocator,
    FreeSizes,
    OutOfMemory,
    Places,
    Pool,
    rounded_bytes,
)
from memplan.errors import ContradictoryEstimate, InvalidValue
from memplan.memory import Alive, add_net
from memplan.record import Alloc, Event, Free, PassPart, Stretch, chain, changes, events, repeated
from memplan.shapes import Buffer

MOST_STEPS: Final = 10
"""The most steps that are replayed: most plans settle within three, near a limit most within seven."""

FEW: Final = 6
"""Micro-batches of a loop that an extrapolation replays at least; loops of fewer than 4 x 6 are replayed."""

FORGETS: Final = (1, 4, 16)
"""After this many repetitions of a loop, states that it had before are no longer looked for."""

LONGEST_PERIOD: Final = 3
"""The growth of the peaks may be constant for every micro-batch, every second, or every third."""

MANY: Final = 1000
"""Steps between equal states for which all ages of blocks compare the same: more make no difference."""

MOST_EVENTS: Final = 500_000
"""Events of the longest step that is replayed in full if the growth is not constant; others are shortened."""


MOST_REPLAYED: Final = 50_000_000
"""The most events of a step that is replayed in full: about a minute for each of up to ten steps."""

MOST_CORRECTED: Final = 2_000_000
"""The most events of a step that is replayed in full because peaks of shorter programs contradict it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorProgram:
    """The allocations and frees of one rank: `setup`, then, with an empty cache and new peaks, steps.

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
        """Whether the allocator can reserve so many bytes without giving any back to the driver."""
        collects_above = self.allocator().collects_above_bytes
        limits = [limit for limit in (self.bound_bytes, collects_above) if limit is not None]
        return reserved_bytes <= min(limits, default=reserved_bytes)


UNLIMITED: Final = Memory()


def replayed(
    program: AllocatorProgram, memory: Memory = UNLIMITED, *, unlimited: Replayed | None = None
) -> Replayed:
    """The peaks of a program's steps, replayed until a step leaves the allocator's state unchanged.

    `unlimited`: the result for the same program and settings without limits, where it is known.

    Raises:
        OutOfMemory: if the limits are too low.
        InvalidValue: if the whole step would have to be replayed and has too many events.
    """
    left_out = _most_repeats(program.step) - FEW
    if left_out < 3 * FEW:
        return _replayed(program, memory)
    reached = None if memory != UNLIMITED or program.takes_oldest else _Reached()
    tried_bytes = None if unlimited is None else unlimited.tried_bytes
    if tried_bytes is None or not memory.keeps_all(tried_bytes):
        try:
            return _replayed(program, memory, 2 * FEW, reached)
        except _NotRecurring as given_up:
            tried_bytes = given_up.reserved_bytes
    found = unlimited or _extrapolated(program, left_out, memory.config, reached)
    n_events = _n_events(program.step)
    too_long = n_events > MOST_EVENTS
    trusted = found is None or _is_possible(found, program)
    if found is not None and trusted and (found.settled or too_long):
        if memory.keeps_all(found.reserved_bytes):
            return replace(found, tried_bytes=tried_bytes)
        bound_bytes = memory.bound_bytes
        if bound_bytes is not None and found.allocated_bytes > bound_bytes:
            raise OutOfMemory(
                f"{found.allocated_bytes} bytes are in use at once, limit_bytes={bound_bytes}; "
                "use a smaller plan."
            )
    shorter = _shortened(program, memory, left_out) if too_long and trusted else None
    trusted = trusted and (shorter is None or _is_possible(shorter, program))
    if shorter is not None and trusted:
        return shorter
    most_events = MOST_REPLAYED if trusted else MOST_CORRECTED
    if n_events > most_events:
        raise InvalidValue(
            f"what the allocator reserves is not known: the {n_events:,} allocations and computations of a "
            f"step neither repeat nor grow evenly, and at most {most_events:,} are replayed one by one; "
            "use fewer micro-batches: a smaller global_batch, or a larger micro_batch."
        )
    return _replayed(program, memory)


def _is_possible(found: Replayed, program: AllocatorProgram) -> bool:
    """Whether peaks of shorter programs contradict neither each other nor the step's tensors."""
    return program.step.high_bytes <= found.allocated_bytes <= found.reserved_bytes


def _shortened(program: AllocatorProgram, memory: Memory, left_out: int) -> Replayed | None:
    """The peaks within limits, replayed without `left_out` of the micro-batches.

    The bytes that these leave allocated are taken off the limits and added to the peaks. None if the program
    cannot be shortened.
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


class _State(NamedTuple):
    """A state of a replay without the blocks' ages, and these; None where age decides nothing alone."""

    key: int
    moment: Moment | None

    @property
    def whole(self) -> int:
        """A hash of all of the state."""
        return hash((self.key, None if self.moment is None else self.moment.order))


class _NotRecurring(Exception):
    """No state of the allocator has recurred within the given number of micro-batches."""

    def __init__(self, reserved_bytes: int) -> None:
        super().__init__(reserved_bytes)
        self.reserved_bytes = reserved_bytes


def _replayed(
    program: AllocatorProgram,
    memory: Memory,
    patience: int | None = None,
    reached: "_Reached | None" = None,
) -> Replayed:
    """The peaks of a program, replayed in full but for repetitions between equal states.

    Raises:
        OutOfMemory: if the limits are too low.
        _NotRecurring: if no state recurs within `patience` micro-batches.
    """
    allocator = memory.allocator(takes_oldest=program.takes_oldest)
    replay = _Replay(program, allocator, patience, reached)
    peaks: list[tuple[int, int]] = []
    free_after: list[tuple[FreeSizes, ...]] = []
    before: _State | None = None
    settled, rest_bytes = False, 0
    while len(peaks) < MOST_STEPS and not settled:
        settled = not replay.step()
        rest_bytes = rest_bytes if settled else allocator.allocated_bytes
        peaks.append((allocator.peak_allocated_bytes, allocator.peak_reserved_bytes))
        if not settled:
            free_after.append(tuple(replay.free_after))
            if len(peaks) == 1:
                replay.second()
            after = replay.state(replay.started)
            n = 0
            if before is not None and before.key == after.key:
                n, after = replay.repeated(before, after, MANY)
            before = after
            settled = n == MANY
            peaks += [] if settled else peaks[-1:] * min(n, MOST_STEPS - len(peaks))
    return Replayed(
        allocated_bytes=allocator.peak_allocated_bytes,
        reserved_bytes=allocator.peak_reserved_bytes,
        n_retries=allocator.n_retries,
        settled=settled,
        after_step=tuple(peaks),
        setup=replay.setup_peaks,
        rest_bytes=rest_bytes,
        free_after=tuple(free_after),
    )


def _extrapolated(
    program: AllocatorProgram, left_out: int, config: AllocatorConfig, reached: "_Reached | None"
) -> Replayed | None:
    """The peaks extrapolated from three shorter programs; None if the program cannot be shortened.

    The longest goes first: on its way it reaches states of the others.
    """

    @cache
    def without(n: int) -> Replayed | None:
        fewer = _without(program, n)
        return None if fewer is None else _replayed(fewer, Memory(config=config), reached=reached)

    for period in range(1, LONGEST_PERIOD + 1):
        shortest = left_out - left_out % period
        if not _grows_evenly(program, shortest, period):
            return None
        three = [without(shortest - i * period) for i in (2, 1, 0)]
        found = _along(three[::-1], shortest // period)
        if found is None or found.settled:
            return found
    return found


def _grows_evenly(program: AllocatorProgram, left_out: int, period: int) -> bool:
    """Whether the step's peak of tensors grows with micro-batches as it does in the shorter programs.

    It does not where the worst instant of few micro-batches is another one than that of many.
    """
    shorter = _without(program, left_out), _without(program, left_out - period)
    if None in shorter:
        return True
    first, second = (one.step.high_bytes for one in shorter if one is not None)
    return program.step.high_bytes == first + left_out // period * (second - first)


def _along(three: Sequence[Replayed | None], times: int) -> Replayed | None:
    """The first result's peaks plus `times` their growth; settled if both growths are equal.

    Where reserved bytes grow less than allocated ones, later micro-batches reserve more.

    `three`: the results of the shortest program, and of those with one and two periods of micro-batches more.
    """
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
        settled=grown == again
        and all(reserved >= allocated for allocated, reserved in grown)
        and all(one is not None and one.settled for one in three)
        and _frees_grow_evenly([one for one in three if one is not None]),
        after_step=after,
        setup=next(one.setup for one in three if one is not None),
    )


def _frees_grow_evenly(three: Sequence[Replayed]) -> bool:
    """Whether the number of free blocks of each size grows equally twice, after every loop of every step.

    Otherwise segments are being filled, and three results do not tell how many micro-batches fill one.
    """
    n_steps = max(len(one.free_after) for one in three)
    steps = ([*one.free_after, *one.free_after[-1:] * (n_steps - len(one.free_after))] for one in three)
    loops = [loop for step in zip(*steps, strict=True) for loop in zip(*step, strict=True)]
    counts = ([Counter(dict(found)) for found in loop] for loop in loops)
    return all(c[size] - b[size] == b[size] - a[size] for a, b, c in counts for size in {*a, *b, *c})


def _n_events(stretch: Stretch) -> int:
    """The events of a stretch, every repetition counted."""
    return stretch.repeats * (len(stretch.events) + sum(map(_n_events, stretch.parts)))


def _most_repeats(stretch: Stretch) -> int:
    """The repetitions of the longest loop over micro-batches."""
    if stretch.stage_pass is not None or not stretch.has_passes:
        return 0
    return max(stretch.repeats, *map(_most_repeats, stretch.parts))


def _without(program: AllocatorProgram, n: int) -> AllocatorProgram | None:
    """The program with `n` micro-batches fewer in its loops; None if others free what these allocate."""
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
    """Add the buffers that `n` repetitions of a step's passes leave allocated."""
    if stretch.stage_pass is None and stretch.has_passes:
        for part in stretch.parts:
            if stretch.repeats > n:
                add_net(part, left_out, n)
            _leave_out(part, n, left_out)


def _shorter(stretch: Stretch, n: int, left_out: Alive) -> Stretch:
    """A step without `n` repetitions of its passes, and without the frees of the buffers that these leave."""
    if stretch.stage_pass is not None or not stretch.parts:
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
"""A stage, the number of its micro-batch, and the part of a split backward pass (0: none) that allocates."""

OUTSIDE: Final[MicroBatch] = (-1, 0, 0)
"""The key of blocks that no pass has allocated."""


WITHOUT_REFERENCES: Final = 2
"""The form of `marshal.dumps` in which equal values are equal bytes."""

_Operation = tuple[Pool, int, int, Buffer | None]
"""A pool; the bytes of an allocation, negative for a free; an index; the buffer.

A block that is allocated and freed within one stretch has the index of its allocation, and no buffer. The
index of any other free is among the blocks of its buffer: -1 is the newest.
"""


def _changed(*stretches: Stretch) -> set[Buffer]:
    """The buffers that events of these stretches, or of their parts, allocate or free."""
    found: set[Buffer] = set()
    left, known = list(stretches), set(stretches)
    while left:
        stretch = left.pop()
        found.update(event.buffer for event in changes(stretch.events))
        left += set(stretch.parts) - known
        known.update(stretch.parts)
    return found


class _Reached:
    """States that replays have reached, of programs that differ only in how often loops are repeated.

    Attributes:
        states: the state within a step, after some repetitions of a loop. The key: whether it is the first
            step, the state before it, then the repetitions of each of its parts so far.
        numbers: the numbers that stand for buffers in a state.
    """

    def __init__(self) -> None:
        self.states: dict[tuple[Any, ...], bytes] = {}
        self.numbers: dict[Buffer, int] = {}


def _repetitions(stretch: Stretch) -> tuple[Any, ...]:
    """How often a stretch of passes is repeated, and how often its parts are."""
    parts = () if stretch.stage_pass is not None else stretch.parts
    if stretch.repeats == 1 and len(parts) == 1:
        return _repetitions(parts[0])
    return stretch.repeats, *map(_repetitions, parts)


class _Replay:
    """A program and an allocator: the blocks in use, by buffer and by micro-batch.

    What has been `reached` in a replay of a longer or shorter program is not played again.
    """

    def __init__(
        self,
        program: AllocatorProgram,
        allocator: CachingAllocator,
        patience: int | None = None,
        reached: _Reached | None = None,
    ) -> None:
        self.program, self.patience, self.reached = program, patience, reached
        self.allocator = allocator
        self.held: dict[Buffer, dict[MicroBatch, list[int]]] = {}
        self.passes: Counter[tuple[int, str]] = Counter()
        self.current = OUTSIDE
        self.beside: dict[Buffer, list[tuple[frozenset[Buffer], Buffer]]] = {}
        for group in program.beside:
            for buffer in group[0]:
                self.beside.setdefault(buffer, []).append(group)
        self.states = program.states
        self.not_yet = Counter(program.kept)
        self.handed_over: Alive = Counter()
        """How often each receive buffer has been replaced by another stage's tensor."""
        self.halfway: dict[int, deque[int]] = {}
        """For each stage, the micro-batches between the two parts of their backward pass."""
        self.requests: dict[Buffer, tuple[Pool, int]] = {}
        self.compiled: dict[Stretch, list[_Operation]] = {}
        self._play(self._operations(program.setup))
        self.setup_peaks = allocator.peak_allocated_bytes, allocator.peak_reserved_bytes
        allocator.release_cached()
        allocator.reset_peaks()
        self.n_given_back = allocator.n_given_back
        steps = [program.step, *([] if program.first_step is None else [program.first_step])]
        moved = _changed(*steps, events("", program.second))
        self._receive(moved)
        self._play(self._operations(program.start))
        self.unmoved = {*self.held, *program.states} - moved
        """What no step allocates or frees: weights, optimizer state."""
        self.n_steps = self.started = 0
        self.free_after: list[FreeSizes] = []
        self.loops: dict[int, int] = {}
        """For each loop of the step, by its index, the hash of the state in which the last step began it."""
        self.at_rest = self._all_held()
        self.at_rest.update(program.states)
        self.at_rest.update(brought for _, brought in program.beside)
        self.at_rest.update(program.kept)

    def _receive(self, moved: Collection[Buffer]) -> None:
        """Allocate the receive buffers; of those that are not `moved`, whole segments are only counted."""
        for buffer, n in self.program.received:
            if buffer in moved or buffer in self.beside:
                for _ in range(n):
                    self._allocate(buffer)
            elif buffer.n_bytes:
                for address in self.allocator.allocate_for_good(*self._request(buffer), n):
                    self._hold(buffer, address)

    def step(self) -> bool:
        """Replay a step and free what it leaves; False if a state recurs, so that the rest is left out."""
        program = self.program
        self.passes.clear()
        ages = self.allocator.ages
        self.started = ages.clock
        ages.compared.clear()
        ages.next_repetition()
        first = self.n_steps == 0
        step = program.first_step if first and program.first_step is not None else program.step
        step = step if step.parts else chain(step.name, step)
        self.free_after = []
        so_far: tuple[Any, ...] = ()
        reached, n_skipped = self.reached, 0
        if reached is not None:
            so_far = (first, self._saved(reached.numbers), *map(_repetitions, step.parts))
            n_skipped = self._skipped(reached, so_far)
            if n_skipped:
                self._note_free(step.parts[n_skipped - 1])
        for place, part in list(enumerate(step.parts))[n_skipped:]:
            if not first and part.repeats > 2 and part.net_bytes == 0:
                state = self.state(self.started).whole
                if self.loops.get(place) == state:
                    return False
                self.loops[place] = state
            self._run(part, so_far[: place + 3] if part.has_passes else ())
            self._note_free(part)
        self.n_steps += 1
        left = self._all_held()
        if first and program.first_step is not None:
            net: Alive = Counter()
            add_net(program.step, net, 1)
            for buffer, n in self.handed_over.items():
                net[buffer] += n
                net[program.handed_over[buffer]] -= n
            rest = Counter({buffer: left[buffer] - net[buffer] for buffer in {*left, *net}})
            self.at_rest = rest | program.kept
        at_rest = self.at_rest
        for buffer, n in (left - at_rest).items():
            for _ in range(n):
                self._free(buffer)
        for buffer, n in (at_rest - left).items():
            for _ in range(n):
                self._allocate(buffer)
        return True

    def _note_free(self, part: Stretch) -> None:
        """Note the sizes of the free blocks after a loop that leaves tensors allocated."""
        if part.repeats > 1 and part.has_passes and part.net_bytes > 0:
            self.free_after.append(self.allocator.free_sizes())

    def _skipped(self, reached: _Reached, so_far: tuple[Any, ...]) -> int:
        """Restore the state after the last loop reached before; the number of parts up to there."""
        for i in reversed(range(2, len(so_far))):
            if so_far[i][0] >= FEW and so_far[: i + 1] in reached.states:
                self._restore(reached.states[so_far[: i + 1]], list(reached.numbers))
                return i - 1
        return 0

    def _saved(self, numbers: dict[Buffer, int]) -> bytes:
        """All that the rest of a step depends on, the same for equal states."""
        for buffer in (*self.held, *self.not_yet, *self.handed_over):
            numbers.setdefault(buffer, len(numbers))
        held = [(numbers[buffer], found) for buffer, found in self.held.items()]
        counted = [
            sorted((numbers[buffer], n) for buffer, n in counts.items() if n)
            for counts in (self.not_yet, self.handed_over)
        ]
        halfway = [(stage, list(found)) for stage, found in sorted(self.halfway.items())]
        others = sorted(self.passes.items()), sorted(self.loops.items()), len(self.beside), len(self.states)
        held.sort(key=itemgetter(0))
        rest = *others, self.free_after
        return dumps((self.allocator.saved(), held, *counted, halfway, *rest), WITHOUT_REFERENCES)

    def _restore(self, saved: bytes, buffers: Sequence[Buffer]) -> None:
        allocator, held, not_yet, handed_over, halfway, passes, loops, _, n_states, free_after = loads(saved)
        self.allocator.restore(allocator)
        self.held = {buffers[i]: found for i, found in held}
        for buffer in self.held:
            self._request(buffer)
        self.not_yet = Counter({buffers[i]: n for i, n in not_yet})
        self.handed_over = Counter({buffers[i]: n for i, n in handed_over})
        self.halfway = {stage: deque(found) for stage, found in halfway}
        self.free_after = free_after
        self.passes, self.loops = Counter(dict(passes)), dict(loops)
        self.states = self.states if n_states else ()
        if self.beside:
            self.beside = {}
            self.compiled.clear()

    def second(self) -> None:
        """Replay what happens between the first step and the second."""
        self._play(self._operations(self.program.second))
        for event in changes(self.program.second):
            self.at_rest[event.buffer] += event.sign

    def state(self, since: int = 0) -> "_State":
        """The state that the rest of the replay depends on: free blocks, and used ones by micro-batch age.

        Addresses are counted without the gaps of segments that were given back. Blocks that no step
        frees are left out: they fill the rest.

        `since`: where age alone decides which block is taken, the clock when the states to compare began.
        """
        passes, allocator = self.passes, self.allocator
        halfway = [(stage, n) for stage, found in self.halfway.items() for n in found]
        over = {stage: min(passes[stage, "forward"], passes[stage, "backward"]) for stage, _ in passes}
        for stage, n in reversed(halfway):
            over[stage] = min(over[stage], n - 1)
        fixed: dict[int, int] = {}
        names: Places | None = None
        moment: Moment | None = None
        if allocator.by_age_alone:
            fixed = self._not_freed(since)
            moment, names = allocator.moment([block for block in self._in_use() if block not in fixed], fixed)
        elif allocator.n_given_back != self.n_given_back:
            names = allocator.places()
        held = frozenset(self._held_blocks(over, names))
        ages = frozenset((stage, n - passes[stage, "forward"]) for stage, n in halfway)
        of_garbage = allocator.large_requests_since
        by_age = () if moment is not None else allocator.by_age(self._in_use(), names)
        key = hash((allocator.layout(names), of_garbage, by_age, held, ages, frozenset(fixed)))
        return _State(key, moment)

    def _in_use(self) -> Iterator[int]:
        """The addresses of all blocks in use."""
        return (block for found in self.held.values() for blocks in found.values() for block in blocks)

    def _not_freed(self, since: int) -> dict[int, int]:
        """The bytes of each block in use, by its address, that has not been freed `since` then."""
        found: dict[int, int] = {}
        freed = self.allocator.ages.freed
        for buffer, held in self.held.items():
            pool, n_bytes = self.requests[buffer]
            for blocks in held.values():
                for block in blocks:
                    if freed.get(block, 0) <= since:
                        found[block] = n_bytes + pool.unsplit.get(block, 0)
        return found

    def _held_blocks(self, over: Mapping[int, int], names: Places | None) -> Iterator[tuple[object, ...]]:
        """The blocks of each buffer and micro-batch, with its age; None once all its passes are `over`."""
        moved = [(buffer, found) for buffer, found in self.held.items() if buffer not in self.unmoved]
        for buffer, found in moved:
            for i, (key, blocks) in enumerate(found.items()):
                stage, n, split = key
                past = n <= over.get(stage, 0) and key != self.current
                age = None if past else n - self.passes[stage, "forward"]
                yield buffer, i, stage, age, split, *(blocks if names is None else map(names, blocks))

    def _all_held(self) -> Alive:
        return Counter({buffer: sum(map(len, found.values())) for buffer, found in self.held.items()})

    def _run(self, stretch: Stretch, so_far: tuple[Any, ...] = ()) -> None:
        """Replay a stretch without repetitions between equal states; `so_far`: the key of its end's state."""
        if stretch.name == self.program.update_name and self.states:
            for buffer in self.states:
                self._allocate(buffer)
            self.states = ()
        if self.n_steps == 0 and stretch.repeats > 1 and self._forgone(stretch):
            return
        seen: dict[int, tuple[int, _State]] = {}
        ages = self.allocator.ages
        since = i = n_played = 0
        n, may_recur = stretch.repeats, self._may_recur(stretch)
        while i < n:
            if self.reached is not None and so_far and i >= FEW and not self.beside:
                key = *so_far[:-1], (i, *so_far[-1][1:])
                self.reached.states[key] = self._saved(self.reached.numbers)
            if may_recur:
                if n_played in FORGETS:
                    since, seen = ages.clock, {}
                state = self.state(since)
                if state.key in seen:
                    start, before = seen[state.key]
                    n_more, state = self.repeated(before, state, (n - i) // (i - start))
                    if n_more:
                        i, n_played = i + n_more * (i - start), 0
                        seen, so_far = {}, ()
                        continue
                seen[state.key] = i, state
            if n_played == self.patience and stretch.stage_pass is None and stretch.has_passes:
                raise _NotRecurring(self.allocator.peak_reserved_bytes)
            ages.next_repetition()
            self._once(stretch)
            i, n_played = i + 1, n_played + 1

    def _may_recur(self, stretch: Stretch) -> bool:
        """Whether states between repetitions are worth comparing: not if replaying these has fewer events.

        A state is of all blocks, while a loop over a pass' blocks has a few hundred events.
        """
        if stretch.repeats <= 2 or stretch.net_bytes:
            return False
        return stretch.has_passes or _n_events(stretch) > sum(map(len, self.held.values()))

    def repeated(self, before: _State, now: _State, most: int) -> tuple[int, _State]:
        """Leave out up to `most` repetitions between equal states; how many, and the state after them."""
        if before.moment is None or now.moment is None:
            return most, now
        n, moment = self.allocator.ages.repeat(before.moment, now.moment, most)
        return n, _State(now.key, moment)

    def _once(self, stretch: Stretch) -> None:
        before = self.current
        if stretch.stage_pass is not None:
            self.current = self._micro_batch(*stretch.stage_pass)
        if stretch.events:
            if stretch not in self.compiled:
                self.compiled[stretch] = self._operations(stretch.events)
            self._play(self.compiled[stretch])
        for part_ in stretch.parts:
            self._run(part_)
        self.current = before

    def _micro_batch(self, stage: int, part: PassPart) -> MicroBatch:
        """The micro-batch of the stage's next pass: passes of each direction take micro-batches in order."""
        if part == "backward-weight" and self.halfway.get(stage):
            return stage, self.halfway[stage].popleft(), SPLIT[part]
        direction = "forward" if part == "forward" else "backward"
        self.passes[stage, direction] += 1
        n = self.passes[stage, direction]
        if part == "backward-input":
            self.halfway.setdefault(stage, deque()).append(n)
        return stage, n, SPLIT.get(part, 0)

    def _operations(self, events: Sequence[Event]) -> list[_Operation]:
        """The operations of a stretch's events; a free of one of its own allocations has that one's index."""
        found: list[_Operation] = []
        own: dict[Buffer, list[int]] = {}
        program = self.program
        for event in changes(events):
            buffer = event.buffer
            if not buffer.n_bytes:
                continue
            pool, n_bytes = self._request(buffer)
            if isinstance(event, Alloc):
                own.setdefault(buffer, []).append(len(found))
                found.append((pool, n_bytes, 0, buffer))
            elif not own.get(buffer) or buffer in program.oldest_first or buffer in self.beside:
                found.append((pool, -n_bytes, -1, buffer))
            elif buffer in program.handed_on:
                found.append((pool, -n_bytes, -2, buffer))
            else:
                place = own[buffer].pop()
                found[place] = pool, n_bytes, place, None
                found.append((pool, -n_bytes, place, None))
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
        own: list[int] = [0] * len(operations)
        for pool, n_bytes, place, buffer in operations:
            if buffer is None:
                if n_bytes > 0:
                    own[place] = allocate(pool, n_bytes)
                else:
                    release(pool, own[place], -n_bytes)
            elif n_bytes > 0:
                self._hold(buffer, allocate(pool, n_bytes))
            else:
                self._free(buffer, place)
                if buffer in self.program.handed_over:
                    self._hand_over(buffer)

    def _allocate(self, buffer: Buffer) -> None:
        if buffer.n_bytes:
            self._hold(buffer, self.allocator.allocate(*self._request(buffer)))

    def _hold(self, buffer: Buffer, address: int) -> None:
        """Note a block of the current micro-batch; a group's first also allocates the buffer beside it."""
        held, current = self.held.get(buffer), self.current
        if held is None:
            self.held[buffer] = {current: [address]}
        elif current in held:
            held[current].append(address)
        else:
            held[current] = [address]
        if buffer in self.beside:
            for group in list(self.beside[buffer]):
                for other in group[0]:
                    self.beside[other].remove(group)
                    if not self.beside[other]:
                        del self.beside[other]
                self._allocate(group[1])
            self.compiled.clear()

    def _free(self, buffer: Buffer, i: int = -1) -> None:
        """Free the i-th block of a buffer: of the current micro-batch, or of the last that has one.

        The second part of a split backward pass goes through the module from the first block to the last: it
        frees the oldest tensors of the forward pass, and the newest of the first part, which went the other
        way.
        """
        held, current = self.held.get(buffer), self.current
        if held is None:
            self._forgo(buffer)
            return
        if buffer in self.program.oldest_first:
            current, i = next(iter(held)), 0
        elif current not in held:
            stage, n, split = current
            for part in range(split - 1, -1, -1):
                if (current := (stage, n, part)) in held:
                    i = 0 if split == SPLIT["backward-weight"] and not part else -1
                    break
            else:
                current, i = next(reversed(held)), -1
        pool, n_bytes = self.requests[buffer]
        self.allocator.release(pool, self._taken(buffer, current, i), n_bytes)

    def _forgone(self, loop: Stretch) -> bool:
        """Leave out a loop that only frees what a step before the first would have left; whether it does."""
        if any(part.parts or not all(isinstance(e, Free) for e in part.events) for part in loop.parts):
            return False
        freed = {buffer: -net for buffer, (net, _) in loop.held.items()}
        if any(buffer in self.held or self.not_yet[buffer] < n for buffer, n in freed.items()):
            return False
        self.not_yet.subtract(freed)
        return True

    def _forgo(self, buffer: Buffer) -> None:
        """Leave out a free in the first step, of what a step before it would have left."""
        if not self.not_yet[buffer]:
            raise ContradictoryEstimate(
                f"{buffer.name!r} is freed once more than it was allocated, by the allocator's program of a "
                "plan. This is a fault of the plan's engine; please report the plan to its authors."
            )
        self.not_yet[buffer] -= 1

    def _hand_over(self, buffer: Buffer) -> None:
        """Replace a freed receive buffer by the tensor that another stage of the rank has made for it."""
        block = self._taken(self.program.handed_over[buffer], self.current)
        self.handed_over[buffer] += 1
        self.held.setdefault(buffer, {}).setdefault(OUTSIDE, []).append(block)

    def _taken(self, buffer: Buffer, of: MicroBatch, i: int = -1) -> int:
        """The i-th block of a buffer and micro-batch, or the only one, which is no longer held."""
        held = self.held[buffer]
        blocks = held[of]
        address = blocks.pop(max(i, -len(blocks)))
        if not blocks:
            del held[of]
            if not held:
                del self.held[buffer]
        return address
