"""Steps of a program, replayed in PyTorch's caching allocator.

In a step's record, equal layers and micro-batches share their buffers. The replay keeps the allocator's
blocks of each buffer by micro-batch: a pass frees the newest block of its own micro-batch. Where the
allocator's state after a micro-batch recurs, whole cycles between equal states are left out.
"""

from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from marshal import dumps, loads
from operator import itemgetter
from typing import Any, Final, NamedTuple

from memplan.ages import Moment
from memplan.allocator import CachingAllocator, FreeSizes, Places, Pool, rounded_bytes
from memplan.errors import ContradictoryEstimate
from memplan.memory import Alive, add_net
from memplan.record import Alloc, Event, Free, PassPart, Stretch, chain, changes, events
from memplan.replay.program import AllocatorProgram, Memory, Replayed
from memplan.shapes import Buffer

MOST_STEPS: Final = 10
"""The most steps that are replayed: most plans settle within three, near a limit most within seven."""

FEW: Final = 6
"""Micro-batches of a loop that an extrapolation replays at least; loops of fewer than 4 x 6 are replayed."""

FORGETS: Final = (1, 4, 16)
"""After this many repetitions of a loop, states that it had before are no longer looked for."""

MANY: Final = 1000
"""Steps between equal states for which all ages of blocks compare the same: more make no difference."""


class _State(NamedTuple):
    """A state of a replay without the blocks' ages, and these; None where age decides nothing alone."""

    key: int
    moment: Moment | None

    @property
    def whole(self) -> int:
        """A hash of all of the state."""
        return hash((self.key, None if self.moment is None else self.moment.order))


class NotRecurring(Exception):
    """No state of the allocator has recurred within the given number of micro-batches."""

    def __init__(self, reserved_bytes: int) -> None:
        super().__init__(reserved_bytes)
        self.reserved_bytes = reserved_bytes


def replayed_steps(
    program: AllocatorProgram,
    memory: Memory,
    patience: int | None = None,
    reached: "Reached | None" = None,
) -> Replayed:
    """The peaks of a program, replayed in full but for repetitions between equal states.

    Raises:
        OutOfMemory: if the limits are too low.
        NotRecurring: if no state recurs within `patience` micro-batches.
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


def count_events(stretch: Stretch) -> int:
    """The events of a stretch, every repetition counted."""
    return stretch.repeats * (len(stretch.events) + sum(map(count_events, stretch.parts)))


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


class Reached:
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
        reached: Reached | None = None,
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
        self._play(self._operations(program.init))
        allocator.release_cached()
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

    def _skipped(self, reached: Reached, so_far: tuple[Any, ...]) -> int:
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
                raise NotRecurring(self.allocator.peak_reserved_bytes)
            ages.next_repetition()
            self._once(stretch)
            i, n_played = i + 1, n_played + 1

    def _may_recur(self, stretch: Stretch) -> bool:
        """Whether states between repetitions are worth comparing: not if replaying these has fewer events.

        A state is of all blocks, while a loop over a pass' blocks has a few hundred events.
        """
        if stretch.repeats <= 2 or stretch.net_bytes:
            return False
        return stretch.has_passes or count_events(stretch) > sum(map(len, self.held.values()))

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
