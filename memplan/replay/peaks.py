"""The peaks of a program's steps; of hundreds of micro-batches only some are replayed.

Where no state of the allocator recurs, three short steps of different lengths are replayed, and the growth of
their peaks is extrapolated; what these steps have in common is played once.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Final

from memplan.allocator import AllocatorConfig, OutOfMemory, rounded_bytes
from memplan.errors import InvalidValue
from memplan.memory import Alive, add_net
from memplan.record import Stretch, chain, changes, repeated
from memplan.replay.program import UNLIMITED, AllocatorProgram, Memory, Replayed
from memplan.replay.steps import FEW, NotRecurring, Reached, count_events, replayed_steps

LONGEST_PERIOD: Final = 3
"""The growth of the peaks may be constant for every micro-batch, every second, or every third."""

MOST_EVENTS: Final = 500_000
"""Events of the longest step that is replayed in full if the growth is not constant; others are shortened."""

MOST_REPLAYED: Final = 50_000_000
"""The most events of a step that is replayed in full: about a minute for each of up to ten steps."""

MOST_CORRECTED: Final = 2_000_000
"""The most events of a step that is replayed in full because peaks of shorter programs contradict it."""


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
        return replayed_steps(program, memory)
    reached = None if memory != UNLIMITED or program.takes_oldest else Reached()
    tried_bytes = None if unlimited is None else unlimited.tried_bytes
    if tried_bytes is None or not memory.keeps_all(tried_bytes):
        try:
            return replayed_steps(program, memory, 2 * FEW, reached)
        except NotRecurring as given_up:
            tried_bytes = given_up.reserved_bytes
    found = unlimited or _extrapolated(program, left_out, memory.config, reached)
    n_events = count_events(program.step)
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
    return replayed_steps(program, memory)


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
    found = replayed_steps(fewer, memory.less(left_bytes))
    return replace(
        found,
        allocated_bytes=found.allocated_bytes + left_bytes,
        reserved_bytes=found.reserved_bytes + left_bytes,
        after_step=tuple([(a + left_bytes, r + left_bytes) for a, r in found.after_step]),
    )


def _extrapolated(
    program: AllocatorProgram, left_out: int, config: AllocatorConfig, reached: "Reached | None"
) -> Replayed | None:
    """The peaks extrapolated from three shorter programs; None if the program cannot be shortened.

    The longest goes first: on its way it reaches states of the others.
    """

    @cache
    def without(n: int) -> Replayed | None:
        fewer = _without(program, n)
        return None if fewer is None else replayed_steps(fewer, Memory(config=config), reached=reached)

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
