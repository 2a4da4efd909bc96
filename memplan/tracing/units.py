"""Turns recorded events into a recording: blocks of one kind become one block, sizes become rules.

Two blocks are of one kind if they have the same events in the same order, of storages of equal sizes.
Storages at the same place in all blocks of a kind become one buffer: the output of a block, which the next
block frees, is one buffer that each block allocates and each block frees.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import combinations, count, groupby
from typing import Any, Final

from memplan.errors import MissingRule
from memplan.models.base import BLOCKS, Layers, Role
from memplan.models.recording import (
    DTYPES,
    Computation,
    Cut,
    Ends,
    Recording,
    Size,
    Term,
    TracedBuffer,
    TracedEvent,
    part_of_kind,
    parts_with,
    size_at,
)
from memplan.shapes import DType, Kind
from memplan.tracing.computed import Computed
from memplan.tracing.recorder import Event, Recorder, Section, Stored, Unit, Unlike

CALLS: Final = ("compute", "kernel", "workspace", "collective", "hook", "module")
"""The events of no storage."""


ROLE_NAMES: Final[Mapping[Role, str]] = {
    "block": "blocks", "module": "module", "between": "between stacks", "idle": "never called",
}  # fmt: skip
"""How the names of kinds begin, by what they are; the first kind is called `BLOCKS`."""

SUFFIXES: Final = {"forward": "", "casts": "_casts", "backward": "_backward"}
"""How the names of parts end, by the phase of their sections."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """A step in the parts of a recording, for one size of the input; events name storages by class.

    The section of an event is its part. `layers`: the units by kind, in their order; `like`: the unit that
    stands for each kind; `labels`: the number of each unit's kind, by the block's path.
    """

    parts: Mapping[str, tuple[Event, ...]]
    storages: tuple[Stored, ...]
    kinds: tuple[Kind, ...]
    boundary: int
    boundary_grad: int
    entry_requires_grad: bool
    cut: Cut | str
    ends: Ends | str
    layers: tuple[Layers, ...] = field(compare=False)
    like: Mapping[str, Unit] = field(compare=False)
    labels: Mapping[str, int] = field(compare=False)


def parts_of(recorder: Recorder, labels: Mapping[str, int]) -> Parts:
    """The parts of a recorded step; blocks with different `labels` are of different kinds.

    Raises:
        Unlike: a block makes the gradient of a parameter that is not its own.
    """
    return _Step(recorder, labels).parts()


class OfOneSize(MissingRule):
    """What happens at several sizes follows from no rule."""


class _Step:
    """A recorded step, in which blocks of one kind become one block.

    A block of a kind may free more than the others: in the forward pass the last one of its stack, in the
    backward pass the first ones, which are the last to use what blocks share (masks, say). The next unit
    frees that, or the stack's first one.
    """

    def __init__(self, recorder: Recorder, labels: Mapping[str, int]) -> None:
        self.recorder, self.labels = recorder, labels
        self.same = _Classes(recorder)
        self.n = recorder.n_blocks
        self.early: dict[int, dict[int, list[Event]]] = {}
        self.by_section: dict[Section, list[Event]] = {}
        for event in recorder.events:
            if event.kind != "mark" or not 0 < event.section.unit <= self.n:
                self.by_section.setdefault(event.section, []).append(event)
        for section, found in self.by_section.items():
            self.by_section[section] = list(_ordered(found))
        for number, unit in enumerate(recorder.units, 1):
            if unit.role != "between":
                _check_own_gradients(self.part("backward", number), unit)

    def part(self, phase: str, unit: int) -> list[Event]:
        """The events of a unit in a phase."""
        return self.by_section.get(Section(phase, unit), [])

    def parts(self) -> Parts:
        """The step, its blocks folded by kind."""
        same, n = self.same, self.n
        kinds = [[1], *self._folded()] if n else []
        if like := self._like_first(kinds[1:]):
            like += kinds.pop(0)
            for phase in SUFFIXES:
                if same.are_equal(first := self.part(phase, 1), other := self.part(phase, like[0])):
                    same.unify(first, other)
        kinds.sort(key=min)
        names = [f"{ROLE_NAMES[self.unit(min(kind)).role]} {i}" for i, kind in enumerate(kinds, 1)]
        names[:1] = [BLOCKS][: len(names)]
        for unit, extra in self.early.items():
            early = [event for number in sorted(extra, reverse=True) for event in extra[number]]
            self.by_section.setdefault(Section("backward", unit), [])[:0] = early
        same.unify_gradients([event for unit in range(n, 0, -1) for event in self.part("backward", unit)])
        units = {"embed": 0, "head": n + 1, "loss": n + 2} | ({"entry": 1} if n else {})
        units |= {part_of_kind(name): kind[0] for name, kind in zip(names, kinds, strict=True) if kind[0] > 1}
        found = {"inputs": self.part("inputs", 0), "end": self.part("end", 0)}
        for phase, suffix in SUFFIXES.items():
            found |= {f"{name}{suffix}": self.part(phase, unit) for name, unit in units.items()}
        found["head_casts"] = [*found["head_casts"], *found["loss_casts"]]
        kind_of = {unit: i for i, kind in enumerate(kinds) for unit in kind}
        runs = groupby(range(1, n + 1), key=lambda unit: names[kind_of[unit]])
        paths = {self.unit(number).path: kind_of[number] for number in kind_of}
        return same.numbered(
            {name: found.get(name, []) for name in parts_with(names)},
            like=kinds[kind_of[n]][0] if n else 0,
            layers=tuple([Layers(name, len(list(run))) for name, run in runs]),
            units={name: self.unit(kind[0]) for name, kind in zip(names, kinds, strict=True)},
            labels={path: label for path, label in paths.items() if path},
        )

    def unit(self, number: int) -> Unit:
        """The unit of a number."""
        return self.recorder.units[number - 1]

    def _folded(self) -> list[list[int]]:
        """The units after the first by kind; the first of each list stands for the others."""
        alike: dict[Hashable, list[int]] = {}
        for number in range(2, self.n + 1):
            unit = self.unit(number)
            own = number if unit.role == "between" else self.labels.get(unit.path)
            key = unit.stack, unit.role, unit.structure, own, self._core(number)
            alike.setdefault(key, []).append(number)
        found = []
        for numbers in alike.values():
            like = numbers[1] if len(numbers) > 2 else numbers[0]  # the first may be special
            kind = [like]
            for number in reversed(numbers):
                if number != like and self._fold(number, like):
                    kind.append(number)
                elif number != like:
                    found.append([number])
            found.append(kind)
        return found

    def _core(self, number: int) -> Hashable:
        """What a unit does, without its frees."""
        events = [event for phase in SUFFIXES for event in self.part(phase, number) if event.kind != "free"]
        return tuple(map(self.same.content, events))

    def _fold(self, number: int, like: int) -> bool:
        """Make one block of two, if they do the same."""
        stack, extra = self.unit(number).stack, {}
        is_last = number == self.n or self.unit(number + 1).stack != stack
        kept = {phase: self.part(phase, number) for phase in SUFFIXES}
        for phase in SUFFIXES:
            if is_last or (number < like and phase == "backward"):
                kept[phase], extra[phase] = self.same.without_extra_frees(kept[phase], self.part(phase, like))
        if not all(self.same.are_equal(kept[phase], self.part(phase, like)) for phase in SUFFIXES):
            return False
        for phase in SUFFIXES:
            self.same.unify(kept[phase], self.part(phase, like))
        if is_last:
            for phase in SUFFIXES:
                after = self.by_section.setdefault(Section(phase, number + 1), [])
                after[:] = [*extra[phase], *after] if phase == "forward" else [*after, *extra[phase]]
        elif "backward" in extra:
            first = next(i for i in range(1, number + 1) if self.unit(i).stack == stack)
            self.early.setdefault(max(first - 1, 1), {})[number] = extra["backward"]
        return True

    def _like_first(self, kinds: Sequence[list[int]]) -> list[int] | None:
        """The kind of the first unit: the one that does the same, else the next of its structure."""
        if not self.n:
            return None
        first, core = self.unit(1), self._core(1)
        label = self.labels.get(first.path)
        found = [kind for kind in kinds if self.unit(kind[0])._replace(path="") == first._replace(path="")]
        known = [kind for kind in found if self.labels.get(self.unit(kind[0]).path) == label]
        return next((kind for kind in known if self._core(kind[0]) == core), next(iter(known), None))


def _ordered(events: Iterable[Event]) -> Iterator[Event]:
    """The events, with consecutive frees sorted by age, as autocast frees its copies in no order."""
    for kind, row in groupby(events, key=lambda event: event.kind):
        found = list(row)
        yield from sorted(found, key=lambda event: event.storage) if kind == "free" else found


def _check_own_gradients(found: Iterable[Event], unit: Unit) -> None:
    """Raise if a block's backward pass makes the gradient of a parameter that is not the block's.

    It does for a parameter that blocks share, and for one of a module between two blocks.
    """
    own = f"{unit.common}.", f"{unit.common}{unit.structure + 1}."
    for event in found:
        if event.kind == "grad" and not event.detail.startswith(own):
            raise Unlike(f"{unit.path} makes the gradient of {event.detail}, which is not its own")


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

    def content(self, event: Event) -> Hashable:
        """What happens, and the size and type of the storage that it happens to."""
        stored = self._stored(event)
        return event.kind, event.detail, stored.n_bytes, stored.dtype

    def _alike(self, one: Event, other: Event) -> bool:
        return self.content(one) == self.content(other)

    def are_equal(self, found: Sequence[Event], like: Sequence[Event]) -> bool:
        """Whether two blocks do the same to storages of equal sizes."""
        return len(found) == len(like) and all(map(self._alike, found, like))

    def _stored(self, event: Event) -> Stored:
        return self.storages[event.storage] if event.storage >= 0 else Stored("", (), "", 0, 0)

    def unify(self, found: Sequence[Event], like: Sequence[Event]) -> None:
        """Make one buffer of the storages at each place of two equal blocks."""
        for one, other in zip(found, like, strict=True):
            if one.storage >= 0 and other.storage >= 0:
                self._join(one.storage, other.storage)

    def unify_gradients(self, found: Iterable[Event]) -> None:
        """Make one buffer of the gradients of a parameter, also where all else differs."""
        known: dict[str, int] = {}
        for event in found:
            if event.kind == "grad":
                self._join(event.storage, known.setdefault(event.detail, event.storage))

    def unify_all(self, storages: Iterable[int]) -> bool:
        """Make one buffer of storages, if they are of one size and type."""
        found = [number for number in storages if number >= 0]
        same = len({(self.storages[i].n_bytes, self.storages[i].dtype) for i in found}) == 1
        for number in found if same else ():
            self._join(found[0], number)
        return same

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

    def numbered(
        self,
        parts: Mapping[str, Sequence[Event]],
        *,
        like: int,
        layers: tuple[Layers, ...],
        units: Mapping[str, Unit],
        labels: Mapping[str, int],
    ) -> Parts:
        """The parts with classes numbered in the order of their first event.

        `like`: the block that stands for the last one's kind.
        """
        recorder, numbers, n = self.recorder, {}, count()
        hands_on = len(units) <= 1 or self._is_of_several_stacks or self._hands_on()
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

        kinds = {self.of(i): kind for i, kind in recorder.kinds.items()}
        return Parts(
            parts=made,
            storages=tuple([self.storages[own] for own in numbers]),
            kinds=tuple([kinds.get(own, "temporaries") for own in numbers]),
            boundary=number(recorder.inputs.get(like, -1)),
            boundary_grad=number(recorder.output_grads.get(like, -1)),
            entry_requires_grad=recorder.entry_requires_grad,
            cut=self._cut(number, like) if hands_on else "its blocks hand on tensors of several sizes",
            ends=SEVERAL_STACKS if self._is_of_several_stacks else _ends(places),
            layers=layers,
            like=units,
            labels=labels,
        )

    @property
    def _is_of_several_stacks(self) -> bool:
        return len({one.stack for one in self.recorder.units}) > 1

    def _hands_on(self) -> bool:
        """Make one buffer of what blocks of several kinds hand on, if it is of one size."""
        recorder, others = self.recorder, range(2, self.recorder.n_blocks + 1)
        outputs = [recorder.outputs[i] for i in range(1, recorder.n_blocks + 1) if i in recorder.outputs]
        inputs = [recorder.inputs[i] for i in others if i in recorder.inputs]
        grads = [storage for i, storage in recorder.output_grads.items() if 0 < i < recorder.n_blocks]
        return self.unify_all([*inputs, *outputs]) and (not grads or self.unify_all(grads))

    def _cut(self, number: Callable[[int], int], like: int) -> Cut | str:
        """How the recording is cut into stages, or why it cannot be."""
        recorder, n = self.recorder, self.recorder.n_blocks
        if self._is_of_several_stacks:
            return SEVERAL_STACKS
        entry, last = recorder.inputs.get(1, -1), recorder.outputs.get(n, -1)
        received = 1 if recorder.entry_requires_grad else like
        freed = {e.storage: _end_of(e.section, n, like) for e in recorder.events if e.kind == "free"}
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


SEVERAL_STACKS: Final = "its blocks are in several stacks"

OUTER: Final = ("embed", "head")
"""The units of FSDP2 outside the blocks."""


def _end_of(section: Section, n_blocks: int, like: int) -> str:
    """The recording's part for a section of the embedding, the head, the first block or the end; else "".

    What the last block frees beyond the others is the head's.
    """
    phase, unit = section
    if (phase, unit) == ("forward", n_blocks) and n_blocks != like:
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
    (Term(factor=7, batch_power=1, seq_power=1, divisor=1),)
    >>> size_of((47, 79, 79), ((2, 48), (3, 80), (2, 80))) == (Term(1, 0, 1), Term(-1))
    True
    >>> size_of((48, 120, 280), ((2, 48), (3, 80), (5, 112)))
    (Term(factor=1, batch_power=1, seq_power=1, divisor=2),)

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
    for powers in POWERS:
        parts = {Fraction(value, unit) for value, unit in zip(values, units[powers], strict=True)}
        if len(parts) == 1 and len({*points}) > 2:
            (part,) = parts
            return (Term(part.numerator, *powers, part.denominator),)
    raise OfOneSize(f"sizes {values} follow from no rule of batch and length.")


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

    >>> product((Term(8),), (Term(1, 1),), (Term(1, 0, 1), Term(1))) == (Term(8, 1, 1), Term(8, 1))
    True
    """
    terms = {(0, 0): Fraction(1)}
    for size in sizes:
        multiplied: dict[tuple[int, int], Fraction] = {}
        for (i, j), n in terms.items():
            for factor, more_i, more_j, divisor in size:
                powers = i + more_i, j + more_j
                multiplied[powers] = multiplied.get(powers, Fraction(0)) + n * Fraction(factor, divisor)
        terms = multiplied
    found = [Term(n.numerator, *powers, n.denominator) for powers, n in terms.items() if n]
    return tuple(found) or (Term(0),)


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
        for part, mine in first.parts.items():
            its = other.parts.get(part, ())
            if [_skeleton(e) for e in mine] != [_skeleton(e) for e in its]:
                raise OfOneSize(f"{part}: other things happen where sizes differ.")
    buffers = [
        _buffer(stored, kind, points)
        for stored, kind in zip(zip(*[r.storages for r in runs], strict=True), first.kinds, strict=True)
    ]
    parts = {
        part: tuple(
            [_event(events, points) for events in zip(*[run.parts[part] for run in runs], strict=True)]
        )
        for part in first.parts
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
        case "collective":
            sent, phase = event.detail
            return event.kind, phase, sent.kind, sent.axis, sent.dtype, len(sent.shape)
        case "hook" | "module":
            return event.kind, event.detail
    return event.kind, event.storage


def _buffer(stored: Sequence[Stored], kind: Kind, points: Sequence[Point]) -> TracedBuffer:
    one = stored[0]
    dtype = DTYPES.get(one.dtype) or DType(one.dtype, one.itemsize)
    all_bytes = [each.n_bytes for each in stored]
    if len({len(each.shape) for each in stored}) > 1:
        raise OfOneSize(f"{one.name} has other dims where sizes differ.")
    try:
        shape = shape_of([each.shape for each in stored], points)
        n_bytes = product((Term(one.itemsize),), *shape)
        if [size_at(n_bytes, *point) for point in points] != all_bytes:  # the storage is not its alone
            n_bytes = size_of(all_bytes, points)
            shape = (size_of([n // one.itemsize for n in all_bytes], points),)
    except MissingRule:
        if not one.by_kernel:
            raise
        shape, n_bytes = (), (Term(0),)
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
        case "collective":
            sent, phase = one.detail
            shape = shape_of([event.detail[0].shape for event in events], points)
            return TracedEvent(
                "collective", phase=phase, kernel=sent.kind, axis=sent.axis, shape=shape, dtype=sent.dtype
            )
        case "hook":
            return TracedEvent("hook", kernel=one.detail[0], parameters=one.detail[1])
        case "module":
            when, path, own = one.detail
            return TracedEvent("module", parameter=path, kernel=when, parameters=own)
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
