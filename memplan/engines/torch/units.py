"""A stage's passes, unit by unit: what FSDP gathers and reduces together."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

from memplan.mesh import HOST
from memplan.mesh import Group as MeshGroup
from memplan.parts.ddp import ALL_REDUCE
from memplan.passes.trace import Segment, buffer_in
from memplan.record import Collective, Event, Stretch, chain, events, repeated
from memplan.shapes import Parameter, Role

Group = TypeVar("Group")

ALL_GATHER, REDUCE_SCATTER = "all-gather", "reduce-scatter"
"""The streams on which FSDP communicates, beside that of all-reduces."""

CountedEvents = tuple[tuple[Event, ...], int]
"""Events, and how often they happen."""


class EqualParameters(NamedTuple):
    """The parameters of one of a group's equal modules (its blocks), and the number of such modules."""

    parameters: tuple[Parameter, ...]
    n: int


class Row(NamedTuple, Generic[Group]):
    """`times` equal units in a row, each of `size` consecutive blocks (None: blocks of the root)."""

    group: Group
    size: int
    times: int


def collectives(
    gathered_bytes: int, reduced_bytes: int, sharded_bytes: int, axis: MeshGroup = "dp"
) -> tuple[Collective, Collective, Collective]:
    """A unit's all-gather of weights, its reduce-scatter of gradients, and their all-reduce over replicas.

    `axis`: the ranks between which the unit is sharded.
    """
    return (
        Collective(
            kind="all_gather", axis=axis, what="gather weights",
            payload_bytes=gathered_bytes, stream=ALL_GATHER,
        ),
        Collective(
            kind="reduce_scatter", axis=axis, what="reduce gradients",
            payload_bytes=reduced_bytes, stream=REDUCE_SCATTER,
        ),
        Collective(
            kind="all_reduce", axis="dp_replicate", what="all-reduce gradients",
            payload_bytes=sharded_bytes, stream=ALL_REDUCE,
        ),
    )  # fmt: skip


def repeatedly(counted: Iterable[CountedEvents], times: int) -> Iterator[CountedEvents]:
    """Multiplies each count by `times`."""
    return ((found, n * times) for found, n in counted)


def opened_when_called(
    opened: Sequence[CountedEvents], passed: Sequence[CountedEvents]
) -> tuple[CountedEvents, ...]:
    """The events with the all-gather where the group's first module is called.

    Under checkpointing that is after the random state has been saved, and the arguments on the host.
    """
    first, n = passed[0] if passed else ((), 0)
    n_before = max([i + 1 for i, event in enumerate(first) if _is_of_checkpoint(event)], default=0)
    if not (opened and n_before):
        return (*opened, *passed)
    return ((first[:n_before], 1), *opened, (first[n_before:], 1), (first, n - 1), *passed[1:])


def _is_of_checkpoint(event: Event) -> bool:
    """Whether a checkpoint does it before it calls its function."""
    buffer = buffer_in(event)
    if buffer is None:
        return isinstance(event, Collective) and event.axis == HOST
    return buffer.role in (Role.RNG_STATE, Role.SAVED_ON_CPU)


def grouped(
    order: Iterable[tuple[Segment, int]], groups: Iterable[Row[Group]]
) -> Iterator[tuple[Group, list[tuple[Segment, int]], int]]:
    """The blocks' passes in order, by unit: the unit, the passes of its blocks, the number of such units.

    A row's first unit is yielded alone, and so is its last one if another row follows: the unit next to it,
    which is prefetched, is of another row. A single row of one-block units keeps the counts of `order`.
    """
    left = [(segment, n) for segment, n in order if n]
    all_groups = list(groups)
    match all_groups:
        case [Row(group=unit, size=int(size))] if size == 1:
            yield from ((unit, [(segment, 1)], n) for segment, n in left)
            return
    for i, (unit, size, times) in enumerate(all_groups):
        first, alone = True, i + 1 < len(all_groups)
        while times:
            row: list[tuple[Segment, int]] = []
            n_rows = 1 if first else max(1, min(times - alone, left[0][1] // size))
            needed = n_rows * size
            while needed:
                segment, n = left.pop(0)
                taken = min(n, needed)
                row.append((segment, taken // n_rows))
                needed -= taken
                if taken < n:
                    left.insert(0, (segment, n - taken))
            yield unit, row, n_rows
            times, first = times - n_rows, False


def in_order(name: str, turns: Iterable[CountedEvents]) -> Stretch:
    """A stretch of counted events in order."""
    parts: list[Stretch] = []
    pending: list[Event] = []
    for found, times in turns:
        if times == 1:
            pending += found
        elif found and times:
            parts += [events(name, pending), repeated(events(name, found), times)]
            pending = []
    last = events(name, pending)
    return chain(name, *parts, last) if parts else last


def next_units(order: Sequence[Group | None]) -> Iterator[Group | None]:
    """At each place the unit there, or the next one where there is none."""
    return (next((unit for unit in order[place:] if unit is not None), None) for place in range(len(order)))
