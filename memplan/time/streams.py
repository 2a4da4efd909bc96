"""A rank's record played on streams: the compute stream, those of its engine, and communicators.

An event starts when its stream is free and what the stream waits for is done; the collectives of a
communicator run one after the other. What the compute stream does or waits for is counted instant by instant,
in whole attoseconds, so that parts add up exactly. A loop is played until the streams' offsets recur: the
other repetitions are counted.
"""

from collections.abc import Iterable
from math import ceil
from operator import add
from typing import Final, NamedTuple, final

from memplan.mesh import HOST, waits_of
from memplan.plan import Plan
from memplan.record import (
    COMPUTE,
    SENDS,
    Collective,
    Compute,
    RecordEvent,
    Stretch,
    Timed,
    WaitStream,
    beside,
)
from memplan.time.prices import Prices

Instant = int
"""Attoseconds since the start of the step, or between two instants."""

PER_S: Final = 10**18

CAUSES: Final = ("compute_s", "recompute_s", "host_s", "tp_s", "dp_s", "pp_s")
"""What the compute stream does, or waits for, in the order of the numbers in `Spent`."""

HOST_CAUSE: Final = CAUSES.index("host_s")

Spent = tuple[Instant, ...]
"""The time of each of the causes."""

NOTHING: Final[Spent] = (0,) * len(CAUSES)


class Work(NamedTuple):
    """What the compute stream does without waiting for another stream."""

    took: Instant
    spent: Spent


class Issued(NamedTuple):
    """The end of a pass: it is not over before the host has issued what is in it, which takes `took`."""

    took: Instant


class Sent(NamedTuple):
    """A collective on another stream; `cause`: what a wait for it is counted as."""

    stream: str
    communicator: str
    took: Instant
    cause: int


@final
class Program:
    """What a stretch asks of the streams, in order, several times.

    `changed`: the streams, events and communicators that it moves on; `read`: those that it waits for.
    `is_pass`: it is a pass of a micro-batch: none of it starts before the compute stream comes to it.
    """

    __slots__ = ("changed", "has_passes", "is_pass", "read", "steps", "times")

    def __init__(self, steps: "Steps", times: int = 1, *, is_pass: bool, has_passes: bool) -> None:
        self.steps, self.times = steps, times
        self.is_pass, self.has_passes = is_pass, has_passes
        self.changed: set[str] = set()
        self.read: set[str] = set()
        for step in steps:
            match step:
                case Sent():
                    self.changed |= {step.stream, step.communicator}
                case WaitStream():
                    self.changed.add(step.stream)
                    self.read.add(step.other)
                case RecordEvent():
                    self.changed.add(step.event)
                    self.read.add(step.stream)
                case Program():
                    self.changed |= step.changed
                    self.read |= step.read
        for names in (self.changed, self.read):
            names.discard(COMPUTE)


Step = Work | Issued | Sent | WaitStream | RecordEvent | Program
Steps = tuple[Step, ...]


@final
class Programs:
    """The program of each stretch of a plan's records, at given prices."""

    def __init__(self, plan: Plan, prices: Prices) -> None:
        self.plan, self.prices = plan, prices
        self._host = ceil(prices.host_s * PER_S)
        self._of: dict[Stretch, Program] = {}
        self._alone: dict[Stretch, Streams] = {}
        self._works: dict[Stretch, Work] = {}
        self._costs: dict[Timed, tuple[int, Instant]] = {}

    def __call__(self, stretch: Stretch) -> Program:
        """The program of a stretch."""
        found = self._of.get(stretch)
        if found is None:
            steps, times = self._steps(stretch)
            is_pass, has_passes = stretch.stage_pass is not None, stretch.has_passes
            found = self._of[stretch] = Program(steps, times, is_pass=is_pass, has_passes=has_passes)
        return found

    def alone(self, stretch: Stretch) -> "Streams":
        """A rank's streams after a stretch that found all of them free."""
        found = self._alone.get(stretch)
        if found is None:
            found = self._alone[stretch] = Streams()
            found.play(self(stretch))
        return found

    def _steps(self, stretch: Stretch) -> tuple[Steps, int]:
        """What a stretch consists of, and how often; one without other streams is one piece of work."""
        issued = () if stretch.stage_pass is None or not self._host else (self._issued(stretch),)
        if not stretch.streams and (stretch.stage_pass is not None or not stretch.has_passes):
            work = self._work(stretch)
            return ((work, *issued) if work.took else ()), 1
        steps: list[Step] = []
        for event in stretch.timed:
            if not beside(event):
                self._append(steps, _sum([(self._cost(event), 1)]))
            elif isinstance(event, Collective):
                cause, took = self._cost(event)
                steps.append(Sent(event.stream, f"communicator of {event.axis}", took, cause))
            elif not isinstance(event, Compute):
                steps.append(event)
        for part in stretch.parts:
            program = self(part)
            if program.is_pass or program.times != 1:
                steps.append(program)
            else:
                for step in program.steps:
                    self._append(steps, step)
        return (*steps, *issued), stretch.repeats

    def _issued(self, stretch: Stretch) -> Issued:
        """How long the host takes to issue the kernels and the collectives of a pass."""
        each = [
            n * (event.n_kernels if isinstance(event, Compute) else event.calls)
            for event, n in stretch.counts.items()
        ]
        return Issued(sum(each) * self._host)

    @staticmethod
    def _append(steps: "list[Step]", step: "Step") -> None:
        """Append a step; work in a row is one step."""
        if steps and isinstance(step, Work) and isinstance(before := steps[-1], Work):
            steps[-1] = Work(before.took + step.took, tuple(map(add, before.spent, step.spent)))
        else:
            steps.append(step)

    def _work(self, stretch: Stretch) -> Work:
        """All of a stretch that has no other streams."""
        found = self._works.get(stretch)
        if found is not None:
            return found
        if not stretch.parts:
            found = _sum([(self._cost(event), n) for event, n in stretch.counts.items()])
        else:
            took, spent = 0, NOTHING
            for part in stretch.parts:
                work = self._work(part)
                if work.took:
                    took, spent = took + work.took, tuple(map(add, spent, work.spent))
            found = Work(took * stretch.repeats, tuple([n * stretch.repeats for n in spent]))
        self._works[stretch] = found
        return found

    def under_way(self, stretch: Stretch) -> Instant:
        """How long after its end what a pass has sent meanwhile arrives."""
        sent = [event for event in stretch.counts if isinstance(event, Collective) and event.stream == SENDS]
        found = [self.prices.collective_s(one.kind, one.axis, one.payload_bytes) for one in sent]
        return ceil(max(found, default=0.0) * PER_S)

    def _cost(self, event: Timed) -> tuple[int, Instant]:
        """What an event is counted as, and how long it takes."""
        found = self._costs.get(event)
        if found is None:
            found = self._costs[event] = self._priced(event)
        return found

    def _priced(self, event: Timed) -> tuple[int, Instant]:
        if isinstance(event, Compute):
            return int(event.phase == "recompute"), ceil(self.prices.operation_s(event) * PER_S)
        if not isinstance(event, Collective) or event.kind == "recv" or event.stream == SENDS:
            return 0, 0
        if event.axis == HOST:
            return HOST_CAUSE, event.calls * ceil(self.prices.copied_s(event.payload_bytes) * PER_S)
        each_s = self.prices.collective_s(event.kind, event.axis, event.payload_bytes)
        took = event.calls * ceil(each_s * PER_S)
        if event.beside is not None:
            took = max(0, took - ceil(self.prices.operation_s(event.beside) * PER_S))
        return CAUSES.index(f"{waits_of(event.axis)}_s"), took


def _sum(costs: Iterable[tuple[tuple[int, Instant], int]]) -> Work:
    """The work of events, each several times."""
    spent = [*NOTHING]
    for (cause, took), n in costs:
        spent[cause] += n * took
    return Work(sum(spent), tuple(spent))


@final
class Streams:
    """The clocks of a rank's streams, and what its compute stream has spent on each cause.

    `now`: of the compute stream. A stream, event or communicator without a clock is free since `start`.
    """

    __slots__ = ("_cause", "_clocks", "now", "spent", "start")

    def __init__(self) -> None:
        self.now: Instant = 0
        self.start: Instant = 0
        self.spent = [0] * len(CAUSES)
        self._clocks: dict[str, Instant] = {}
        self._cause: dict[str, int] = {}

    @property
    def at_rest(self) -> Instant:
        """When nothing runs beside the compute stream any more."""
        return max(self._clocks.values(), default=self.start)

    def begin(self, now: Instant) -> None:
        """A pass begins: what runs beside it goes on, and nothing new starts before now."""
        self.now = self.start = now
        self._clocks = {name: clock for name, clock in self._clocks.items() if clock > now}

    def played_from(self, now: Instant, program: Program) -> Instant:
        """When a program is over that begins now."""
        self.begin(now)
        self.play(program)
        return self.now

    def play(self, program: Program) -> None:
        """What a program asks for.

        A loop is played until a repetition moves all clocks on by as much; the others are counted. What a
        repetition does depends on the differences between clocks alone, so they are equal to it.
        """
        for left in reversed(range(program.times)):
            now, offsets, spent = self.now, self._offsets(program) if left else {}, [*self.spent]
            self._once(program)
            if left and self._offsets(program) == offsets and self._is_past(program, now):
                self._skip(program, left, self.now - now, spent)
                return

    def _once(self, program: Program) -> None:
        if program.is_pass:
            self.begin(self.now)
        for step in program.steps:
            match step:
                case Work():
                    self.now += step.took
                    self.spent = list(map(add, self.spent, step.spent))
                case Issued():
                    late = max(0, self.start + step.took - self.now)
                    self.now += late
                    self.spent[HOST_CAUSE] += late
                case Sent(stream=stream, communicator=communicator):
                    clocks, start = self._clocks, self.start
                    free, idle = clocks.get(stream, start), clocks.get(communicator, start)
                    clocks[stream] = clocks[communicator] = max(free, idle) + step.took
                    self._cause[stream] = step.cause
                case WaitStream():
                    self._wait(step.stream, step.other)
                case RecordEvent():
                    self._clocks[step.event] = self._clock(step.stream)
                    self._cause[step.event] = self._cause.get(step.stream, 0)
                case Program():
                    self.play(step)

    def finish(self) -> None:
        """Waits for all streams."""
        for name in sorted(self._cause, key=self._clock):
            self._wait(COMPUTE, name)

    def _clock(self, name: str) -> Instant:
        return self.now if name == COMPUTE else self._clocks.get(name, self.start)

    def _wait(self, stream: str, other: str) -> None:
        done = self._clock(other)
        if stream != COMPUTE:
            self._clocks[stream] = max(self._clock(stream), done)
        elif done > self.now:
            self.spent[self._cause[other]] += done - self.now
            self.now = done

    def _offsets(self, program: Program) -> dict[str, Instant]:
        if program.has_passes:  # each begins anew
            return {name: clock - self.now for name, clock in self._clocks.items() if clock > self.now}
        return {name: self._clock(name) - self.now for name in program.changed}

    def _is_past(self, program: Program, now: Instant) -> bool:
        """Whether what a program waits for and does not change was over before."""
        return all(self._clocks.get(name, now) <= now for name in program.read - program.changed)

    def _skip(self, program: Program, times: int, took: Instant, before: list[Instant]) -> None:
        names = set(self._clocks) if program.has_passes else program.changed
        for name in names:
            self._clocks[name] = self._clock(name) + times * took
        self.now += times * took
        self.start += times * took * program.has_passes
        self.spent = [n + times * (n - old) for n, old in zip(self.spent, before, strict=True)]
