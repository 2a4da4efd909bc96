"""The instants of a step: stretches of allocations and frees, and the largest of their running sums.

A stretch is known to the outside by two numbers: `net_bytes`, what it leaves behind, and `high_bytes`, the
most it ever holds above its start. Both compose, so a step of thousands of equal blocks and micro-batches
needs no event loop: a stretch repeated n times reaches its high in its first or in its last repetition.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from memplan.shapes import KINDS, Buffer, Event, Kind

PassPart = Literal["forward", "backward", "backward-input", "backward-weight"]
"""What a stage does with a micro-batch; schedules may divide the backward pass."""


class Stretch(NamedTuple):
    """A named part of a step: `events` in order, or `parts` in order; all of it `repeats` times.

    `net_bytes` and `high_bytes` are of all repetitions, `high_bytes` at least 0. `micro_batch`: it is what a
    stage (its place on the rank) does with its next micro-batch, in one part of its work.
    """

    name: str
    events: tuple[Event, ...]
    parts: "tuple[Stretch, ...]"
    repeats: int
    net_bytes: int
    high_bytes: int
    micro_batch: tuple[int, PassPart] | None = None


def allocs(*buffers: Buffer) -> tuple[Event, ...]:
    """The allocation of each buffer."""
    return tuple([Event(1, buffer) for buffer in buffers])


def frees(*buffers: Buffer) -> tuple[Event, ...]:
    """The free of each buffer."""
    return tuple([Event(-1, buffer) for buffer in buffers])


def events(name: str, sequence: Iterable[Event]) -> Stretch:
    """A stretch of single events.

    >>> from memplan.shapes import FP32
    >>> a, b = (Buffer(n, (1,), FP32, size, "temporaries") for n, size in (("a", 30), ("b", 12)))
    >>> s = events("s", [Event(1, a), Event(1, b), Event(-1, a)])
    >>> s.net_bytes, s.high_bytes
    (12, 42)
    """
    kept = tuple([event for event in sequence if event[0]])
    live = high = 0
    for sign, buffer, _ in kept:
        if sign > 0:
            live += buffer.n_bytes
            if live > high:
                high = live
        else:
            live -= buffer.n_bytes
    return Stretch(name, kept, (), 1, live, high)


def chain(name: str, *parts: Stretch) -> Stretch:
    """Stretches one after the other."""
    live = high = 0
    for part in parts:
        high = max(high, live + part.high_bytes)
        live += part.net_bytes
    return Stretch(name, (), parts, 1, live, high)


def passed(stage: int, part: PassPart, *parts: Stretch) -> Stretch:
    """What a stage does with its next micro-batch."""
    return chain(part, *parts)._replace(micro_batch=(stage, part))


def repeated(part: Stretch, n: int) -> Stretch:
    """A stretch n times over; nothing if n is 0."""
    net, high = part.net_bytes, part.high_bytes
    if n <= 0:
        return Stretch(part.name, (), (), 0, 0, 0)
    return Stretch(part.name, (), (part,), n, n * net, max(high, (n - 1) * net + high))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bytes:
    """Bytes by kind; the kinds add up to `total_bytes` exactly."""

    weights_bytes: int = 0
    grads_bytes: int = 0
    optimizer_bytes: int = 0
    activations_bytes: int = 0
    temporaries_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Their sum."""
        return (
            self.weights_bytes
            + self.grads_bytes
            + self.optimizer_bytes
            + self.activations_bytes
            + self.temporaries_bytes
        )

    def to_dict(self) -> dict[str, int]:
        """Every kind and the total."""
        return {f"{kind}_bytes": getattr(self, f"{kind}_bytes") for kind in KINDS} | {
            "total_bytes": self.total_bytes
        }


Alive = Counter[Buffer]
"""How many of each buffer are alive."""


def n_bytes_of(alive: Alive) -> int:
    """Bytes of all that is alive."""
    return sum(n * buffer.n_bytes for buffer, n in alive.items())


def bytes_by_kind(alive: Alive) -> Bytes:
    """What is alive, by kind."""
    sums: dict[Kind, int] = dict.fromkeys(KINDS, 0)
    for buffer, n in alive.items():
        sums[buffer.kind] += n * buffer.n_bytes
    return Bytes(**{f"{kind}_bytes": sums[kind] for kind in KINDS})


@dataclass(frozen=True, slots=True, kw_only=True)
class Instant:
    """The worst moment of one stretch of a step: `when`, the bytes held then."""

    when: str
    total_bytes: int


def instants(step: Stretch, rest_bytes: int) -> list[Instant]:
    """The highs of a step's named stretches, in order; repeated stretches at their first and last."""
    return [Instant(when=name, total_bytes=n_bytes) for name, n_bytes in _highs(step, rest_bytes, "")]


def _highs(stretch: Stretch, start: int, suffix: str) -> Iterator[tuple[str, int]]:
    if stretch.repeats == 0:
        return
    if stretch.events or not stretch.parts:
        yield f"{stretch.name}{suffix}", start + stretch.high_bytes
        return
    if stretch.repeats > 1:
        part = stretch.parts[0]
        yield from _highs(part, start, f"{suffix}, first of {stretch.repeats}")
        last = start + (stretch.repeats - 1) * part.net_bytes
        yield from _highs(part, last, f"{suffix}, last of {stretch.repeats}")
        return
    for part in stretch.parts:
        yield from _highs(part, start, suffix)
        start += part.net_bytes


def alive_at_high(stretch: Stretch, alive: Alive) -> str:
    """Add to `alive` what is alive at the stretch's high, relative to its start; the name of that instant."""
    if stretch.repeats > 1:
        part = stretch.parts[0]
        if part.net_bytes > 0:
            add_net(part, alive, stretch.repeats - 1)
            return f"{alive_at_high(part, alive)}, last of {stretch.repeats}"
        return f"{alive_at_high(part, alive)}, first of {stretch.repeats}"
    if stretch.parts:
        live, best, worst = 0, -1, 0
        for i, part in enumerate(stretch.parts):
            if live + part.high_bytes > best and part.repeats:
                best, worst = live + part.high_bytes, i
            live += part.net_bytes
        for part in stretch.parts[:worst]:
            add_net(part, alive, 1)
        return alive_at_high(stretch.parts[worst], alive)
    live = 0
    pending: list[Event] = []
    for event in stretch.events:
        pending.append(event)
        live += event.sign * event.buffer.n_bytes
        if live == stretch.high_bytes and event.sign > 0:
            break
    else:
        pending = []
    for event in pending:
        alive[event.buffer] += event.sign
    return stretch.name


def add_net(stretch: Stretch, alive: Alive, times: int) -> None:
    """Add to `alive` what a stretch leaves, so many times over, or take from it what the stretch frees."""
    for event in stretch.events:
        alive[event.buffer] += event.sign * times
    for part in stretch.parts:
        add_net(part, alive, times * stretch.repeats)


def running_bytes(stretch: Stretch, start: int = 0) -> Iterator[tuple[str, int]]:
    """Every event of a step unrolled: the stretch's name and the bytes held after it.

    Its maximum is `start + high_bytes`; this is the slow, literal way that the closed form must agree with.
    """
    live = start
    for name, event in unrolled(stretch):
        live += event.sign * event.buffer.n_bytes
        yield name, live


def unrolled(stretch: Stretch) -> Iterator[tuple[str, Event]]:
    """Every event of a step in order, with the name of its stretch."""
    for _ in range(stretch.repeats):
        for event in stretch.events:
            yield stretch.name, event
        for part in stretch.parts:
            yield from unrolled(part)
