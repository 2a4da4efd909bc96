"""Turns recorded events into a recording: equal blocks become one block, sizes become rules.

Two blocks are equal if they have the same events in the same order, of storages of equal sizes. Storages at
the same place in all blocks become one buffer: the output of a block, which the next block frees, is one
buffer that each block allocates and each block frees.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, count, groupby
from typing import Any, Final

from memplan.errors import MissingRule
from memplan.models.traced import (
    DTYPES,
    PARTS,
    Computation,
    Cut,
    Ends,
    Recording,
    Size,
    Term,
    TracedBuffer,
    TracedEvent,
    size_at,
)
from memplan.shapes import DType, Kind
from memplan.tracing.computed import Computed
from memplan.tracing.recorder import Event, Recorder, Section, Stored

CALLS: Final = ("compute", "kernel", "workspace")
"""The events of no storage."""


SUFFIXES: Final = {"forward": "", "casts": "_casts", "backward": "_backward"}
"""How the names of parts end, by the phase of their sections."""


class Unlike(Exception):
    """Blocks that should be equal are not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """A step in the parts of a recording, for one size of the input; events name storages by class.

    The section of an event is its part.
    """

    parts: Mapping[str, tuple[Event, ...]]
    storages: tuple[Stored, ...]
    kinds: tuple[Kind, ...]
    boundary: int
    boundary_grad: int
    entry_requires_grad: bool
    cut: Cut | str
    ends: Ends | str


def parts_of(recorder: Recorder, blocks: str) -> Parts:
    """The parts of a recorded step; names of blocks' parameters begin with `blocks`.

    Raises:
        Unlike: the blocks are not equal.
    """
    n = recorder.n_blocks
    by_section: dict[Section, list[Event]] = {}
    for event in recorder.events:
        by_section.setdefault(event.section, []).append(event)

    def part(phase: str, unit: int) -> list[Event]:
        return list(_ordered(by_section.get(Section(phase, unit), [])))

    like = representative(n)
    same = _Classes(recorder)
    for unit in range(1, n + 1):
        _check_own_gradients(part("backward", unit), unit, blocks)
    tails: dict[str, list[Event]] = {}
    early: list[Event] = []
    for phase in ("forward", "backward", "casts") if n else ():
        expected = part(phase, like)
        for unit in range(2, n + 1):
            found = part(phase, unit)
            if unit == n != like:
                found, tails[phase] = same.without_extra_frees(found, expected)
            elif unit < like and phase == "backward":
                found, early = same.without_extra_frees(found, expected)
            same.unify(found, expected, f"block {unit - 1} differs from block {like - 1}")
        same.unify_if_equal(part(phase, 1), expected)
        same.unify_gradients(part(phase, 1), expected)
    units = {"embed": 0, "head": n + 1, "loss": n + 2} | ({"entry": 1, "block": like} if n else {})
    parts = {"inputs": part("inputs", 0), "end": part("end", 0)}
    for phase, suffix in SUFFIXES.items():
        parts |= {f"{name}{suffix}": part(phase, unit) for name, unit in units.items()}
    parts["head"] = [*tails.get("forward", []), *parts["head"]]
    parts["head_casts"] += parts["loss_casts"]
    parts["head_backward"] += tails.get("backward", [])
    if n:
        parts["entry_backward"] = [*early, *parts["entry_backward"]]
    return same.numbered({name: parts.get(name, []) for name in PARTS})


def representative(n_blocks: int) -> int:
    """The unit that stands for all blocks but the first: the third, or the second of fewer than four.

    The second may be special: of tensors that several blocks share (masks, say), the first blocks' backward
    passes free them.
    """
    return 3 if n_blocks > 3 else min(n_blocks, 2)


def _ordered(events: Iterable[Event]) -> Iterator[Event]:
    """The events, with consecutive frees sorted by age, as autocast frees its copies in no order."""
    for kind, row in groupby(events, key=lambda event: event.kind):
        found = list(row)
        yield from sorted(found, key=lambda event: event.storage) if kind == "free" else found


def _check_own_gradients(found: Iterable[Event], unit: int, blocks: str) -> None:
    """Raise if a block's backward pass makes the gradient of a parameter that is not the block's.

    It does for a parameter that blocks share, and for one of a module between two blocks.
    """
    for event in found:
        if event.kind == "grad" and not event.detail.startswith(blocks):
            raise Unlike(f"block {unit - 1} makes the gradient of {event.detail}, which is not its own")


class _Classes:
    """The classes of storages that become one buffer of the recording."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.storages = recorder.storages
        self._above = list(range(len(self.storages)))

    def of(self, storage: int) -> int:
        """The class of a storage."""
        while self._above[storage] != storage:
            self._above[storage] = self._above[self._above[storage]]
            storage = self._above[storage]
        return storage

    def _join(self, one: int, other: int) -> None:
        first, second = sorted((self.of(one), self.of(other)))
        self._above[second] = first

    def _alike(self, one: Event, other: Event) -> bool:
        if (one.kind, one.detail) != (other.kind, other.detail):
            return False
        mine, its = self._stored(one), self._stored(other)
        return (mine.n_bytes, mine.dtype) == (its.n_bytes, its.dtype)

    def _stored(self, event: Event) -> Stored:
        return self.storages[event.storage] if event.storage >= 0 else Stored("", (), "", 0, 0)

    def unify(self, found: Sequence[Event], like: Sequence[Event], what: str) -> None:
        """Make one buffer of the storages at each place of two equal blocks."""
        for one, other in zip(found, like, strict=False):
            if not self._alike(one, other):
                raise Unlike(f"{what}: {self._text(one)}, where the other {self._text(other)}")
        if len(found) != len(like):
            raise Unlike(f"{what}: {len(found)} events, where the other has {len(like)}")
        for one, other in zip(found, like, strict=True):
            if one.storage >= 0 and other.storage >= 0:
                self._join(one.storage, other.storage)

    def unify_if_equal(self, found: Sequence[Event], like: Sequence[Event]) -> None:
        """Make one buffer of the storages at each place of the first block, if it is equal to the others."""
        if len(found) == len(like) and all(map(self._alike, found, like)):
            self.unify(found, like, "")

    def unify_gradients(self, found: Iterable[Event], like: Iterable[Event]) -> None:
        """Make one buffer of the gradients of a parameter, also where all else differs."""
        known = {event.detail: event.storage for event in like if event.kind == "grad"}
        for event in found:
            if event.kind == "grad" and event.detail in known:
                self._join(event.storage, known[event.detail])

    def without_extra_frees(
        self, found: Sequence[Event], like: Sequence[Event]
    ) -> tuple[list[Event], list[Event]]:
        """The last block's events without what it frees beyond the others, and that."""
        kept: list[Event] = []
        extra: list[Event] = []
        for event in found:
            expected = like[len(kept)] if len(kept) < len(like) else None
            if expected is not None and self._alike(event, expected):
                kept.append(event)
            elif event.kind == "free":
                extra.append(event)
            else:
                kept.append(event)
        return kept, extra

    def _text(self, event: Event) -> str:
        stored = self._stored(event)
        return f"has {event.kind} of {stored.name or event.detail} ({stored.n_bytes} bytes)"

    def numbered(self, parts: Mapping[str, Sequence[Event]]) -> Parts:
        """The parts with classes numbered in the order of their first event."""
        recorder, numbers, n = self.recorder, {}, count()
        made: dict[str, tuple[Event, ...]] = {}
        places: dict[tuple[str, str], int] = {}
        for part, events in parts.items():
            found: list[Event] = []
            section = Section(part, 0)
            for kind, _, storage, detail in events:
                if kind == "mark":
                    places[part, detail] = len(found)
                if storage < 0 and kind not in CALLS:
                    continue
                if storage >= 0:
                    own = self.of(storage)
                    if own not in numbers:
                        numbers[own] = next(n)
                    storage = numbers[own]
                found.append(Event(kind, section, storage, detail))
            made[part] = tuple(found)

        def number(storage: int) -> int:
            return numbers.get(self.of(storage), -1) if storage >= 0 else -1

        like = representative(recorder.n_blocks)
        kinds = {self.of(i): kind for i, kind in recorder.kinds.items()}
        return Parts(
            parts=made,
            storages=tuple([self.storages[own] for own in numbers]),
            kinds=tuple([kinds.get(own, "temporaries") for own in numbers]),
            boundary=number(recorder.inputs.get(like, -1)),
            boundary_grad=number(recorder.output_grads.get(like, -1)),
            entry_requires_grad=recorder.entry_requires_grad,
            cut=self._cut(number),
            ends=_ends(places),
        )

    def _cut(self, number: Callable[[int], int]) -> Cut | str:
        """How the recording is cut into stages, or why it cannot be."""
        recorder, n = self.recorder, self.recorder.n_blocks
        entry, last = recorder.inputs.get(1, -1), recorder.outputs.get(n, -1)
        received = 1 if recorder.entry_requires_grad else representative(n)
        freed = {e.storage: _end_of(e.section, n) for e in recorder.events if e.kind == "free"}
        entry_freed, last_freed = freed.get(entry, ""), freed.get(last, "")
        only_first = recorder.embedded - {entry}
        kept = {self.of(i) for i in range(len(self.storages)) if i not in only_first}
        cannot = (
            recorder.reads_across,
            min(entry, last, recorder.entry_grad if recorder.entry_requires_grad else 0) < 0,
            not entry_freed,
            not last_freed.startswith(("head", "loss")),
            not kept.isdisjoint(map(self.of, only_first)),
        )
        if any(cannot):
            return "blocks, or what follows them, need more than the block before hands on"
        return Cut(
            entry=number(entry),
            entry_freed=entry_freed,
            entry_grad=number(recorder.entry_grad),
            last_freed=last_freed,
            embedded=tuple(sorted({number(storage) for storage in only_first} - {-1})),
            output=number(recorder.outputs.get(n + 1, -1)),
            loss=number(recorder.loss),
            recast=tuple(map(number, recorder.input_casts.get(received, [])[1:])),
        )


def _ends(places: Mapping[tuple[str, str], int]) -> Ends | str:
    """Where the modules outside the blocks run, by the places of the marks in their parts."""
    if not all((unit, mark) in places for unit in OUTER for mark in (unit, f"{unit}, returned")):
        return "what holds the parameters before and after the blocks is not called in this order"
    embed, head = ((places[unit, unit], places[unit, f"{unit}, returned"]) for unit in OUTER)
    backward = [places.get((f"{unit}_backward", f"{unit}_backward"), 0) for unit in OUTER]
    return Ends(embed, head, *backward)


OUTER: Final = ("embed", "head")
"""The units of FSDP2 outside the blocks."""


def _end_of(section: Section, n_blocks: int) -> str:
    """The recording's part for a section of the embedding, the head, the first block or the end; else "".

    What the last block frees beyond the others is the head's.
    """
    phase, unit = section
    if (phase, unit) == ("forward", n_blocks) and n_blocks != representative(n_blocks):
        unit += 1
    if phase == "end":
        return phase
    ends = {0: "embed", 1: "entry", n_blocks + 1: "head", n_blocks + 2: "loss"}
    if phase not in ("forward", "backward") or unit not in ends:
        return ""
    return ends[unit] + SUFFIXES[phase]


# --- Sizes ---


Point = tuple[int, int]
"""Batch and length of a run."""


def shape_of(shapes: Iterable[Sequence[int]], points: Sequence[Point]) -> tuple[Size, ...]:
    """The rule of each dim of a shape, which it has at these sizes of the input."""
    return tuple([size_of(dims, points) for dims in zip(*shapes, strict=True)])


def size_of(values: Sequence[int], points: Sequence[Point]) -> Size:
    """The simplest sum of terms with these values at these sizes of the input: of few terms, small factors.

    >>> size_of((2 * 48 * 7, 3 * 80 * 7), ((2, 48), (3, 80)))
    (Term(factor=7, batch_power=1, seq_power=1),)
    >>> size_of((47, 79, 79), ((2, 48), (3, 80), (2, 80)))
    (Term(factor=1, batch_power=0, seq_power=1), Term(factor=-1, batch_power=0, seq_power=0))

    Raises:
        MissingRule: none is found.
    """
    if len(set(values)) == 1:
        return (Term(values[0]),)
    units = {powers: [b ** powers[0] * s ** powers[1] for b, s in points] for powers in (*POWERS, (0, 0))}
    for powers in POWERS:
        factor, rest = divmod(values[0], units[powers][0])
        if not rest and list(values) == [factor * unit for unit in units[powers]]:
            return (Term(factor, *powers),)
    found = [
        (Term(factors[0], *one), Term(factors[1], *other))
        for (one, of_one), (other, of_other) in combinations(units.items(), 2)
        if (factors := _solved(values, of_one, of_other)) is not None
    ]
    if found:
        return min(found, key=lambda terms: sum([abs(term.factor) for term in terms]))
    raise MissingRule(f"sizes {values} follow from no rule of batch and length.")


def _solved(values: Sequence[int], of_one: Sequence[int], of_other: Sequence[int]) -> tuple[int, int] | None:
    """Whole factors of two units that give all values; None if there are none."""
    determinant = of_one[0] * of_other[1] - of_one[1] * of_other[0]
    if not determinant:
        return None
    first, rest = divmod(values[0] * of_other[1] - values[1] * of_other[0], determinant)
    second, other_rest = divmod(of_one[0] * values[1] - of_one[1] * values[0], determinant)
    terms = zip(values, of_one, of_other, strict=True)
    if rest or other_rest or any(value != first * x + second * y for value, x, y in terms):
        return None
    return first, second


def product(*sizes: Size) -> Size:
    """The product of sizes, terms of equal powers added up.

    >>> product((Term(8),), (Term(1, 1),), (Term(1, 0, 1), Term(1)))
    (Term(factor=8, batch_power=1, seq_power=1), Term(factor=8, batch_power=1, seq_power=0))
    """
    terms = {(0, 0): 1}
    for size in sizes:
        multiplied: dict[tuple[int, int], int] = {}
        for (i, j), n in terms.items():
            for factor, more_i, more_j in size:
                powers = i + more_i, j + more_j
                multiplied[powers] = multiplied.get(powers, 0) + n * factor
        terms = multiplied
    return tuple([Term(n, *powers) for powers, n in terms.items() if n]) or (Term(0),)


POWERS: Final = ((1, 0), (0, 1), (1, 1), (0, 2), (1, 2), (2, 1), (2, 2), (2, 0))
"""The powers of batch and length, in the order in which they are tried."""


def recording_of(runs: Sequence[Parts], points: Sequence[Point]) -> Recording:
    """The recording of which all these runs are instances.

    Raises:
        Unlike: they did not do the same.
        MissingRule: their sizes follow from no rule.
    """
    first = runs[0]
    for other in runs[1:]:
        for part in PARTS:
            mine, its = first.parts[part], other.parts[part]
            if [_skeleton(e) for e in mine] != [_skeleton(e) for e in its]:
                raise Unlike(f"{part}: other things happen where sizes differ")
    buffers = [
        _buffer(stored, kind, points)
        for stored, kind in zip(zip(*[r.storages for r in runs], strict=True), first.kinds, strict=True)
    ]
    parts = {
        part: tuple(
            [_event(events, points) for events in zip(*[run.parts[part] for run in runs], strict=True)]
        )
        for part in PARTS
    }
    boundary = first.boundary, first.boundary_grad, first.entry_requires_grad
    return Recording(tuple(buffers), parts, *boundary, first.cut, first.ends)


def _skeleton(event: Event) -> Any:
    match event.kind:
        case "grad":
            return event.kind, event.storage, event.detail
        case "kernel" | "workspace":
            return event.kind, event.detail.name, event.detail.dtype, event.detail.n_results
        case "compute":
            computed, phase = event.detail
            return event.kind, phase, computed.kind, computed.dtype
    return event.kind, event.storage


def _buffer(stored: Sequence[Stored], kind: Kind, points: Sequence[Point]) -> TracedBuffer:
    one = stored[0]
    dtype = DTYPES.get(one.dtype) or DType(one.dtype, one.itemsize)
    all_bytes = [each.n_bytes for each in stored]
    if len({len(each.shape) for each in stored}) > 1:
        raise Unlike(f"{one.name} has other dims where sizes differ")
    try:
        shape = shape_of([each.shape for each in stored], points)
    except MissingRule:
        if not one.by_kernel:
            raise
        return TracedBuffer(one.name, (), dtype, (Term(0),), kind)
    n_bytes = product((Term(one.itemsize),), *shape)
    if [size_at(n_bytes, *point) for point in points] != all_bytes:  # the storage is not the tensor's alone
        n_bytes = size_of(all_bytes, points)
        shape = (size_of([n // one.itemsize for n in all_bytes], points),)
    return TracedBuffer(one.name, shape, dtype, n_bytes, kind)


def _event(events: Sequence[Event], points: Sequence[Point]) -> TracedEvent:
    one = events[0]
    match one.kind:
        case "alloc" | "free" | "add":
            return TracedEvent(one.kind, one.storage)
        case "grad":
            return TracedEvent("grad", one.storage, one.detail)
        case "kernel" | "workspace":
            name, _, dtype, n_results = one.detail
            sizes = shape_of([event.detail.sizes for event in events], points)
            if one.kind == "workspace" and all(batch == 1 for batch, _ in points):
                sizes = ((Term(sizes[0][0].factor, 1),), *sizes[1:])  # cuDNN's engine depends on nothing else
            return TracedEvent(one.kind, kernel=name, n_results=n_results, shape=sizes, dtype=dtype)
    computation = _computation([event.detail[0] for event in events], points)
    return TracedEvent("compute", phase=one.detail[1], computation=computation)


def _computation(computed: Sequence[Computed], points: Sequence[Point]) -> Computation:
    kind, each = computed[0].kind, zip(*[one.operands for one in computed], strict=True)
    return Computation(
        kind,
        tuple([shape_of(operand, points) for operand in each]),
        shape_of([one.shape for one in computed], points),
        computed[0].dtype,
        size_of([one.flops for one in computed], points),
    )
