"""Memory as a fold over the record of a step: the buffers alive at its worst instant, and when that is."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from memplan.record import Alloc, Free, Stretch, changes, unrolled
from memplan.shapes import KINDS, Buffer, Kind


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
        return sum(map(self.of, KINDS))

    def of(self, kind: str) -> int:
        """The bytes of a kind."""
        n_bytes: int = getattr(self, f"{kind}_bytes")
        return n_bytes

    def to_dict(self) -> dict[str, int]:
        """Every kind and the total."""
        return {f"{kind}_bytes": self.of(kind) for kind in KINDS} | {"total_bytes": self.total_bytes}


Alive = Counter[Buffer]
"""How many of each buffer are alive."""


def n_bytes_of(alive: Alive) -> int:
    """The sum of the bytes of all buffers."""
    return sum([n * buffer.n_bytes for buffer, n in alive.items()])


def bytes_by_kind(alive: Alive) -> Bytes:
    """The bytes of buffers by kind."""
    sums: dict[Kind, int] = dict.fromkeys(KINDS, 0)
    for buffer, n in alive.items():
        sums[buffer.kind] += n * buffer.n_bytes
    return Bytes(**{f"{kind}_bytes": sums[kind] for kind in KINDS})


@dataclass(frozen=True, slots=True, kw_only=True)
class Instant:
    """The worst moment of one stretch of a step: `when` it is, and the bytes held then."""

    when: str
    total_bytes: int


def instants(step: Stretch, rest_bytes: int) -> list[Instant]:
    """The worst moment of each named stretch of a step, in order; of repeated ones the first and the last."""
    return [Instant(when=name, total_bytes=n_bytes) for name, n_bytes in _highs(step, rest_bytes, "")]


def _highs(stretch: Stretch, start: int, suffix: str) -> Iterator[tuple[str, int]]:
    if stretch.repeats == 0:
        return
    if not stretch.parts:
        if any(changes(stretch.events)) or not stretch.events:
            yield f"{stretch.name}{suffix}", start + stretch.high_bytes
        return
    if stretch.repeats > 1:
        part = stretch.parts[0]
        yield from _highs(part, start, f", {repeat_text(1, stretch)}{suffix}")
        last = start + (stretch.repeats - 1) * part.net_bytes
        yield from _highs(part, last, f", {repeat_text(stretch.repeats, stretch)}{suffix}")
        return
    for part in stretch.parts:
        yield from _highs(part, start, suffix)
        start += part.net_bytes


def repeat_text(i: int, stretch: Stretch) -> str:
    """The repetition of a stretch in words: of a block, or of a micro-batch.

    >>> from memplan.record import events, repeated
    >>> repeat_text(1, repeated(events("block", ()), 7))
    'repetition 1 of 7'
    """
    return f"repetition {i} of {stretch.repeats}"


def alive_at_high(stretch: Stretch, alive: Alive) -> str:
    """Add to `alive` what a stretch holds beyond its start at its worst instant; the instant's name."""
    if stretch.repeats > 1:
        part = stretch.parts[0]
        if part.net_bytes > 0:
            add_net(part, alive, stretch.repeats - 1)
            return f"{alive_at_high(part, alive)}, {repeat_text(stretch.repeats, stretch)}"
        return f"{alive_at_high(part, alive)}, {repeat_text(1, stretch)}"
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
    until: list[Alloc | Free] = []
    for event in changes(stretch.events):
        until.append(event)
        live += event.sign * event.buffer.n_bytes
        if live == stretch.high_bytes and event.sign > 0:
            break
    else:
        until = []
    for event in until:
        alive[event.buffer] = alive.get(event.buffer, 0) + event.sign
    return stretch.name


def most_by_kind(rest: Alive, step: Stretch) -> dict[Kind, int]:
    """The most bytes of each kind at any instant of a step that starts with `rest`; not all at one instant.

    >>> from memplan.record import allocs, chain, events, frees, repeated
    >>> from memplan.shapes import FP32
    >>> w, g = (Buffer(kind, (2,), FP32, 8, kind) for kind in ("weights", "grads"))
    >>> step = chain("step", repeated(events("backward", allocs(g)), 3), events("update", frees(g, g, g)))
    >>> {kind: n for kind, n in most_by_kind(Counter({w: 1}), step).items() if n}
    {'weights': 8, 'grads': 24}
    """
    most = {kind: high for kind, (_, high) in _net_and_high(step).items()}
    held = bytes_by_kind(rest)
    return {kind: held.of(kind) + most.get(kind, 0) for kind in KINDS}


def _net_and_high(stretch: Stretch) -> dict[Kind, tuple[int, int]]:
    """Bytes of each kind that a stretch leaves, and the most that it holds beyond its start."""
    found: dict[Kind, tuple[int, int]] = {}
    if not stretch.repeats:
        return found
    if not stretch.parts:
        for event in changes(stretch.events):
            kind = event.buffer.kind
            net, high = found.get(kind, (0, 0))
            net += event.sign * event.buffer.n_bytes
            found[kind] = net, max(high, net)
        return found
    for part in stretch.parts:
        for kind, (part_net, part_high) in _net_and_high(part).items():
            net, high = found.get(kind, (0, 0))
            found[kind] = net + part_net, max(high, net + part_high)
    again = stretch.repeats - 1
    return {kind: (net + again * net, high + again * max(0, net)) for kind, (net, high) in found.items()}


def add_net(stretch: Stretch, alive: Alive, times: int) -> None:
    """Add the buffers that `times` repetitions of a stretch leave, less the older ones that they free."""
    for buffer, n in stretch.left:
        alive[buffer] = alive.get(buffer, 0) + n * times
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
