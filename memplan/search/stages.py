"""What pipeline stages do in a pass, worked out once for all their sizes, by the very code of one estimate.

A stage's share of a tensor and of the batch and the data axis are arrays (`Many`) that this code takes for
numbers. In the micro-batch, and in the numbers of blocks, so many recomputed and so many not, all that it
adds up is linear where no number passes a bound: a few corners tell the whole of such a `Range` or `Span`. Of
a maximum every candidate is kept that is the largest anywhere, so that it is known between the corners too.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import combinations, groupby
from typing import Any, Final, NamedTuple, TypeVar, final

import numpy as np
from numpy.typing import NDArray

from memplan.engines.torch import Passes, RankStages, Stage, passes_of
from memplan.engines.torch.step import kept_grads, updates
from memplan.many import Differ, Many, many
from memplan.models import Model
from memplan.plan import Plan, Rank
from memplan.search.plans import Column
from memplan.shapes import Event
from memplan.steptime import forward_flops, passes_flops
from memplan.tape import Device
from memplan.timeline import Stretch, alive_in_run, chain, n_bytes_of, runs_of_many
from memplan.traffic import Purpose, Rounds, calls_of_passes, calls_of_update, payloads_bytes

Ends = tuple[bool, bool]
"""Whether a stage is the pipeline's first, and whether it is the last."""

Blocks = tuple[int, int]
"""How many of a stage's blocks are recomputed, and how many are not."""


T = TypeVar("T")


class NotLinear(Exception):
    """What was taken for linear in blocks or micro-batches is not: each of them has to be worked out."""


def with_values(plan: Plan, **values: Any) -> Plan:
    """A plan with other values, unchecked: `Many`, say."""
    other = copy(plan)
    for name, value in values.items():
        object.__setattr__(other, name, value)
    return other


class Range(NamedTuple):
    """Micro-batches between which everything is linear: a single one, or the least, one between, the most."""

    corners: tuple[int, ...]

    def coefficients(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """At 0, and what each sequence adds; corners are along the last axis of values.

        Raises:
            NotLinear: the corners are on no line.
        """
        if len(self.corners) == 1:
            return np.stack([values[..., 0], np.zeros_like(values[..., 0])], axis=-1)
        least, between, most = self.corners
        each, rest = np.divmod(values[..., 2] - values[..., 0], most - least)
        if rest.any() or (values[..., 0] + each * (between - least) != values[..., 1]).any():
            raise NotLinear
        return np.stack([values[..., 0] - each * least, each], axis=-1)


class Span(NamedTuple):
    """Numbers of blocks between which everything is linear: a point, a line's ends, or a triangle's corners.

    From the corners' values follow those at (0, 0) and what each block of either kind adds.
    """

    corners: tuple[Blocks, ...]

    @classmethod
    def of(cls, blocks: Blocks, *, most: int, least: int) -> "Span":
        """The one that such numbers are in, of at most `most` blocks of a kind.

        A kind with at least `least` blocks (3 where it is the only one) has one that is neither the first
        nor the last of its kind, and all such numbers are alike.
        """
        a, b = blocks
        least = max(least, 3) if not a or not b else least
        match a >= least, b >= least:
            case True, True:
                return cls(((least, least), (most, least), (least, most)))
            case True, False:
                return cls(((least, b), (most, b)))
            case False, True:
                return cls(((a, least), (a, most)))
            case _:
                return cls((blocks,))

    def coefficients(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """At (0, 0), and what one more block of each kind adds; corners are along the last axis of values.

        Raises:
            NotLinear: slopes that are no whole numbers.
        """
        start = values[..., 0]
        found = np.zeros((*start.shape, 3), np.int64)
        found[..., 0] = start
        for i, corner in enumerate(self.corners[1:], 1):
            axis = int(corner[0] == self.corners[0][0])
            length = corner[axis] - self.corners[0][axis]
            slope, rest = np.divmod(values[..., i] - start, length)
            if rest.any():
                raise NotLinear
            found[..., 1 + axis] = slope
            found[..., 0] -= slope * self.corners[0][axis]
        return found


@lru_cache(maxsize=4096)
def _along(axis: int, numbers: tuple[int, ...]) -> Any:
    """Numbers along one axis of three; the same ones are the same object, which traces are known by."""
    shape = [1, 1, 1]
    shape[axis] = len(numbers)
    return many(numbers).reshape(shape)


@final
@dataclass(frozen=True, kw_only=True)
class Axes:
    """(tp, micro_batch), (dp, dp_replicate), and blocks: corners of ranges and spans, where there are such.

    `spans` tells of each place along an axis what it is a corner of.
    """

    tensor: tuple[tuple[int, int], ...]
    data: tuple[tuple[int, int], ...]
    blocks: tuple[Blocks, ...]
    spans: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Places along each."""
        return len(self.tensor), len(self.data), len(self.blocks)

    def some(self, axis: int, chosen: Column) -> "Axes":
        """Some places along one axis."""

        def of(values: tuple[T, ...], own: int) -> tuple[T, ...]:
            return tuple([values[i] for i in chosen]) if own == axis else values

        first, second, third = self.spans
        return Axes(
            tensor=of(self.tensor, 0),
            data=of(self.data, 1),
            blocks=of(self.blocks, 2),
            spans=(of(first, 0), of(second, 1), of(third, 2)),
        )

    def varies(self, n: Any) -> bool:
        """Whether a number differs between the corners of any span, or of any range."""
        if np.ndim(n) < 3:
            return False
        return any(
            n.shape[axis] > 1 and len(first) and bool((n != n.take(first, axis)).any())
            for axis, first in self._first_corners
        )

    def largest(self, numbers: Sequence[Any], most: Any) -> list[Any]:
        """As few numbers as can be of which the largest is as large as that of these, between corners too.

        In each range and span they are some of these, not the same ones everywhere, none beaten by another.
        `most`: the largest of them, or 0, at the corners.
        """
        if len(numbers) == 1:
            return [*numbers]
        one = max(numbers, key=lambda n: int(np.asarray(n).flat[-1]))
        return [one] if np.all(one == most) else list(map(many, self._largest(numbers)))

    def _largest(self, numbers: Sequence[Any]) -> list[NDArray[np.int64]]:
        rows = np.stack(np.broadcast_arrays(*numbers))
        rows = rows.reshape(len(rows), *[1] * (4 - rows.ndim), *rows.shape[1:])
        spans = [
            one if n == 1 else own for one, own, n in zip(_ONE, self._starts, rows.shape[1:], strict=True)
        ]
        (tensor, _), _, (blocks, _) = spans
        of_place = np.ix_(*[of_place for _, of_place in spans])
        shape, places = rows.shape[1:], np.arange(rows[0].size)
        totals = np.add.reduceat(np.add.reduceat(rows, tensor, 1), blocks, 3).astype(np.float64)
        found = []
        while True:
            pick = totals.argmax(axis=0)
            best = rows.reshape(len(rows), -1)[pick[of_place].ravel(), places].reshape(shape)
            found.append(best)
            beaten = np.logical_and.reduceat(np.logical_and.reduceat(rows <= best, tensor, 1), blocks, 3)
            totals[beaten] = -np.inf
            left = (totals > -np.inf).any(axis=(1, 2, 3))
            if not left.any():
                break
            rows, totals = rows[left], totals[left]
        if len(found) < 3 or shape[2] > 1:
            return found
        lines = np.stack(found)
        last = np.append(tensor[1:], shape[0]) - 1
        order = first_the_largest(lines[:, tensor], lines[:, last])
        flat = lines.reshape(len(lines), -1)
        return [flat[chosen[of_place].ravel(), places].reshape(shape) for chosen in order]

    @cached_property
    def _starts(self) -> list[tuple[Column, Column]]:
        """Along each axis the first place of each span, and which span each place is in, counted from 0."""
        return [
            (np.flatnonzero(first), np.cumsum(first) - 1)
            for first in (np.diff(spans, prepend=-1) != 0 for spans in self.spans)
        ]

    @cached_property
    def _first_corners(self) -> list[tuple[int, Column]]:
        """Along each axis where some are corners of the same, of each the first."""
        return [
            (axis, np.array([spans.index(span) for span in spans]))
            for axis, spans in enumerate(self.spans)
            if len(set(spans)) < len(spans)
        ]


_ONE: Final = [(np.zeros(1, np.int64), np.zeros(1, np.int64))] * 3
"""`Axes._starts` of a number that is the same along each axis."""


@final
@dataclass(frozen=True, kw_only=True)
class Part:
    """A stage at every combination along the axes; `at` are its places in a whole of which it is a part."""

    model: Model
    plan: Plan
    ends: Ends
    device: Device
    axes: Axes
    at: tuple[Column, Column, Column]

    @cached_property
    def stages(self) -> RankStages:
        """A rank that has the stage alone, and a single micro-batch to a step."""
        tp, micro_batch = (_along(0, numbers) for numbers in zip(*self.axes.tensor, strict=True))
        values = {"tp": tp, "micro_batch": micro_batch}
        if self.plan.recompute != "none":
            values["recompute_blocks"] = _along(2, tuple([a for a, _ in self.axes.blocks]))
        if self.plan.fsdp:
            dp, dp_replicate = (_along(1, numbers) for numbers in zip(*self.axes.data, strict=True))
            values |= {"dp": dp, "dp_replicate": dp_replicate}
        plan = with_values(self.plan, **values)
        plan = with_values(plan, global_batch=plan.n_replicas * micro_batch)
        kind = *self.ends, _along(2, tuple([a + b for a, b in self.axes.blocks]))
        return RankStages.of(Stage(self.model, plan, kind, self.device), rank=Rank())

    @cached_property
    def passes(self) -> Passes:
        """Those of the stage."""
        return passes_of(*self.stages)

    @cached_property
    def _candidates(self) -> "Candidates":
        return Candidates(self.axes)

    @cached_property
    def _stretches(self) -> dict[Hashable, dict[str, Any]]:
        return {}

    def boundary(self) -> dict[str, Any]:
        """Bytes of what is sent from stage to stage."""
        return {"bytes": self.stages.stages[0].trace.boundary.n_bytes}

    def states(self) -> dict[str, Any]:
        """Bytes that are kept from step to step, but for what goes in."""
        kept = n_bytes_of(kept_grads(self.stages, [self.passes]))
        return {"bytes": kept + (0 if self.stages.offloads else n_bytes_of(self.stages.states))}

    def update(self) -> dict[str, Any]:
        """The optimizer's part of a step: what it leaves, and the most it holds."""
        made = chain("update", *updates(self.stages))
        return {"net": made.net_bytes, "high": made.high_bytes}

    def moved(self) -> dict[str, Any]:
        """Bytes of what the optimizer sees: weights, gradients, its state."""
        return dict(zip(("weights", "grads", "optimizer"), optimizer_sees(self.stages), strict=True))

    def stretch(self, name: str, how: Mapping[str, bool]) -> dict[str, Any]:
        """What a pass leaves, and candidates for the most it holds; by a method's name and arguments.

        Equal passes have the same answer, whatever they are called.
        """
        made = getattr(self.passes, name)(**how)
        whole = chain(name, *made) if isinstance(made, list) else made
        content = _content(whole)
        if content not in self._stretches:
            net, found = self._candidates(whole)
            highs = self.axes.largest(found, whole.high_bytes)
            self._stretches[content] = {"net": net} | {f"high {i}": high for i, high in enumerate(highs)}
        return self._stretches[content]

    def counted(self, *, splits: bool) -> dict[Any, Any]:
        """What a stage computes and sends with each of a field of `Rounds`, and whatever these are ("fixed").

        `flops` of a forward pass; ("again", field): FLOPs of what is computed again; (purpose, field): bytes.
        """
        fields = [field for field in Rounds._fields if splits or field != "split"]
        each = np.eye(len(fields) + 1, dtype=np.int64)[1:]
        rows = dict(zip(fields, (many(row).reshape(-1, 1, 1, 1) for row in each), strict=True))
        rounds = Rounds(*[rows.get(field, 0) for field in Rounds._fields])
        forward = forward_flops(self.stages)
        again = passes_flops(self.stages, [rounds]) - rounds.micro_batches * forward
        found: dict[Any, Any] = {"flops": forward}
        for field, n in self._by_field(fields, again):
            found["again", field] = n
        for purpose, n_bytes in payloads_bytes(calls_of_passes(self.stages, [rounds])).items():
            for field, n in self._by_field(fields, n_bytes):
                found[purpose, field] = n
        return found

    def _by_field(self, fields: Sequence[str], numbers: Any) -> Iterator[tuple[str, Any]]:
        """The numbers of no field, which come with each, and what each adds; those that are not 0."""
        fixed, *others = np.broadcast_to(numbers, (len(fields) + 1, *self.axes.shape))
        for field, n in (("fixed", fixed), *zip(fields, others, strict=True)):
            own = n if field == "fixed" else n - fixed
            if own.any():
                yield field, own

    def after(self) -> dict[Purpose, Any]:
        """Bytes that the update passes to collectives; where DDP reduces with all that ZeRO-1 sends."""
        stage = copy(self.stages.stages[0])
        stage.plan = with_values(stage.plan, zero=1 if stage.plan.ddp else stage.plan.zero)
        return payloads_bytes(calls_of_update(RankStages.of(stage, rank=Rank())))

    def split(self, yes: NDArray[np.bool_]) -> list["Part"]:
        """Parts for which an answer does not differ, at least along one more axis.

        Raises:
            NotLinear: it differs between the corners of a span, or of a range.
        """
        axis, groups = _apart(np.broadcast_to(yes, self.axes.shape))
        spans = self.axes.spans[axis]
        if sum([len({spans[i] for i in group}) for group in groups]) > len(set(spans)):
            raise NotLinear
        parts = []
        for group in groups:
            tensor, data, blocks = [own[group] if i == axis else own for i, own in enumerate(self.at)]
            parts.append(replace(self, axes=self.axes.some(axis, group), at=(tensor, data, blocks)))
        return parts


def optimizer_sees(stages: RankStages) -> tuple[Any, Any, Any]:
    """Bytes of weights, of gradients, and of the optimizer's state."""
    kinds = [
        Counter({b: n for b, n in stages.states.items() if b.kind == k}) for k in ("weights", "optimizer")
    ]
    weights, optimizer = map(n_bytes_of, kinds)
    return weights, n_bytes_of(stages.grads), optimizer


def _apart(yes: NDArray[np.bool_]) -> tuple[int, list[Column]]:
    """An axis along which answers differ, and its places apart: two groups if one axis alone decides."""
    for axis in range(3):
        others = tuple(i for i in range(3) if i != axis)
        some: NDArray[np.bool_] = np.asarray(yes.any(axis=others))
        if (some == yes.all(axis=others)).all():
            return axis, [np.flatnonzero(some), np.flatnonzero(~some)]
    groups = [_equal_slices(yes, axis) for axis in range(3)]
    axis = min((i for i in range(3) if len(groups[i]) > 1), key=lambda i: len(groups[i]))
    return axis, groups[axis]


def _equal_slices(yes: NDArray[np.bool_], axis: int) -> list[Column]:
    """The places along an axis whose slices are equal, together."""
    slices = np.moveaxis(yes, axis, 0).reshape(yes.shape[axis], -1)
    groups: dict[bytes, list[int]] = {}
    for i, found in enumerate(slices):
        groups.setdefault(found.tobytes(), []).append(i)
    return [np.array(group) for group in groups.values()]


CLOSE: Final = 2.0**-40
"""Much more than floats are off."""


def first_the_largest(low: NDArray[np.int64], high: NDArray[np.int64]) -> NDArray[np.intp]:
    """Places of lines, each known by its two ends [line, ...]: first those that are the largest somewhere.

    Only as many as these are anywhere. What is below another line, or below the chord of two, is never the
    largest; floats decide, so that what is very close to it is kept.

    >>> first_the_largest(np.array([[4], [0], [1], [3]]), np.array([[0], [4], [1], [3]]))[:, 0].tolist()
    [0, 1, 3]
    """
    left, up = (ends[None] - ends[:, None] for ends in (low.astype(np.float64), high.astype(np.float64)))
    one, other = left[:, :, None] * up[:, None], left[:, None] * up[:, :, None]
    chords = (left > 0)[:, :, None] & (up > 0)[:, None] & (one > other + CLOSE * np.abs(other))
    lines = (left >= 0) & (up >= 0) & (left + up > 0)
    below = chords.any(axis=(1, 2)) | lines.any(axis=1)
    order: NDArray[np.intp] = np.argsort(below, axis=0, kind="stable")
    return order[: (~below).sum(axis=0).max()]


def _content(stretch: Stretch) -> Hashable:
    """What equal stretches have in common."""
    times = stretch.repeats.tobytes() if isinstance(stretch.repeats, Many) else stretch.repeats
    return times, stretch.events, tuple(map(_content, stretch.parts))


# The candidates for a maximum


class Candidates:
    """Of stretches what they leave, and numbers of which the largest is the most that they hold.

    Each is linear between corners where the stretch's parts are.
    """

    def __init__(self, axes: Axes) -> None:
        self.axes = axes
        self._known: dict[tuple[Event, ...], list[Any]] = {}

    def __call__(self, stretch: Stretch) -> tuple[Any, list[Any]]:
        """Those of a stretch."""
        if not stretch.parts:
            return stretch.net_bytes, self._of_events(stretch)
        live: Any = 0
        highs: list[Any] = []
        for part in stretch.parts:
            net, own = self(part)
            highs += [live + high for high in own]
            live = live + net
        n = stretch.repeats
        if np.ndim(n) == 0 and n == 1:
            return live, highs
        some = np.asarray(n) > 0
        if self.axes.varies(some):
            raise NotLinear
        if not some.any():
            return 0, [0]
        last = (n - 1) * live
        if some.all():
            return n * live, [*highs, *[high + last for high in highs]]
        return n * live, [*[some * high for high in highs], *[some * (high + last) for high in highs]]

    def _of_events(self, stretch: Stretch) -> list[Any]:
        if stretch.events not in self._known:
            varies = self.axes.varies(stretch.high_bytes)
            self._known[stretch.events] = self._alive(stretch) if varies else [stretch.high_bytes]
        return self._known[stretch.events]

    def _alive(self, stretch: Stretch) -> list[Any]:
        """What is alive after events of a stretch, where it may be the most."""
        live: Any = 0
        found: list[Any] = []
        for run in runs_of_many(stretch.events):
            net_bytes, high_bytes, alive = alive_in_run(run)
            own = [n for event, n in zip(run, alive, strict=True) if event.sign > 0]
            if own:
                found += [live + n for n in self.axes.largest(own, high_bytes)]
            live = live + net_bytes
        return self.axes.largest(found, stretch.high_bytes)


# Tables


@final
@dataclass(frozen=True, slots=True)
class Rows:
    """Of each of some cells its row in the tables of its group, and its micro-batch."""

    row: Column
    micro_batch: Column

    def __getitem__(self, chosen: "slice | Column") -> "Rows":
        """Those of some of the cells."""
        return Rows(self.row[chosen], self.micro_batch[chosen])


class Cells:
    """Combinations of tp, (dp, dp_replicate) and a range of micro-batches: those there are, each a row."""

    def __init__(
        self, tp: Column, micro_batch: Column, dp: Column, dp_replicate: Column, *, linear: bool
    ) -> None:
        self.ranges = _ranges(np.unique(micro_batch).tolist(), linear=linear)
        tps, t = np.unique(tp, return_inverse=True)
        data, d = _distinct(dp, dp_replicate)
        found, pair = _distinct(t, d)
        corners = [(i, corner) for i, own in enumerate(self.ranges) for corner in own.corners]
        self.range_of_corner = np.array([i for i, _ in corners])
        self.tensor = tuple([(tp, corner) for tp in tps.tolist() for _, corner in corners])
        self.data = tuple(data)
        n_ranges = len(self.ranges)
        number = np.searchsorted([own.corners[-1] for own in self.ranges], micro_batch)
        self.spans = tuple([i * n_ranges + own for i in range(len(tps)) for own, _ in corners])
        """Of each of `tensor` the range that it is a corner of, each with each tp counted on its own."""
        self.n = len(found)
        at = np.full((len(tps), len(self.data)), -1)
        at[tuple(np.array(found).T)] = np.arange(self.n)
        corner = np.arange(len(corners))
        self.at = np.where(at[:, None] < 0, -1, at[:, None] * len(corners) + corner[:, None])
        self.at = self.at.reshape(len(self.tensor), len(self.data))
        """Of `tensor` by `data` the place among the corners of all combinations; -1: there is none."""
        self.rows = Rows(pair * n_ranges + number, micro_batch)
        """Of each cell that was given."""
        self.least, self.most = (np.tile([own.corners[i] for own in self.ranges], self.n) for i in (0, -1))
        """Of each row the ends of its range."""


def _distinct(a: Column, b: Column) -> tuple[list[tuple[int, int]], Column]:
    """Pairs of numbers that are 0 or more, each once, in order, and which of them each pair is."""
    base = int(b.max()) + 1
    found, place = np.unique(a * base + b, return_inverse=True)
    return [divmod(pair, base) for pair in found.tolist()], place


def _ranges(numbers: Sequence[int], *, linear: bool) -> list[Range]:
    """Those that micro-batches, in order, are in: a single sequence is like no other number of them."""
    several = [n for n in numbers if n > 1]
    if not linear or len(several) < 4:
        return [Range((n,)) for n in numbers]
    line = Range((several[0], several[len(several) // 2], several[-1]))
    return [Range((1,)), line] if numbers[0] == 1 else [line]


Asked = Callable[[Part], Mapping[Any, Any]]
Known = tuple[tuple[Any, ...], NDArray[np.int64]]


@final
class Table:
    """What is known of stages of one structure with such ends, in all cells, for all these numbers of blocks.

    `linear`: by spans; otherwise each pair of numbers on its own.
    """

    def __init__(
        self,
        model: Model,
        plan: Plan,
        ends: Ends,
        device: Device,
        cells: Cells,
        blocks: Iterable[Blocks],
        *,
        linear: bool,
        least: int = 3,
    ) -> None:
        self.cells = cells
        blocks = list(blocks)
        most = max(map(sum, blocks)) + 1
        self.spans: list[Span] = []
        self.span_of: dict[Blocks, int] = {}
        for pair in sorted(set(blocks)):
            span = Span.of(pair, most=most, least=least) if linear else Span((pair,))
            if span not in self.spans:
                self.spans.append(span)
            self.span_of[pair] = self.spans.index(span)
        corners = [(i, corner) for i, span in enumerate(self.spans) for corner in span.corners]
        self.corner = [[j for j, (k, _) in enumerate(corners) if k == i] for i in range(len(self.spans))]
        axes = Axes(
            tensor=cells.tensor,
            data=cells.data,
            blocks=tuple([corner for _, corner in corners]),
            spans=(cells.spans, tuple(range(len(cells.data))), tuple([i for i, _ in corners])),
        )
        at = np.arange(axes.shape[0]), np.arange(axes.shape[1]), np.arange(axes.shape[2])
        self._parts = [Part(model=model, plan=plan, ends=ends, device=device, axes=axes, at=at)]
        self._shape = cells.n, len(cells.range_of_corner), len(corners)
        self._known: dict[Hashable, Known] = {}
        self._of_answers: dict[tuple[int, ...], tuple[list[Mapping[Any, Any]], Known]] = {}

    def __call__(self, key: Hashable, asked: Asked) -> Known:
        """What is asked of all stages, known by a key from then on: names of numbers, and their coefficients.

        Coefficients are [number, (at no sequence, for each in the micro-batch), row, weight]: see `weights`.
        Where a number is not named it is 0; of several candidates for a maximum those are left out that are
        the largest nowhere.
        """
        if key not in self._known:
            self._known[key] = self._found(asked)
        return self._known[key]

    def ends_of(self, blocks: Sequence[Blocks]) -> Iterator[Blocks]:
        """Of numbers of blocks in the same span the first and the last."""
        ordered = sorted(set(blocks), key=lambda pair: (self.span_of[pair], pair))
        for _, found in groupby(ordered, self.span_of.__getitem__):
            own = list(found)
            yield from own[:1] + own[1:][-1:]

    def _found(self, asked: Asked) -> Known:
        answers: list[Mapping[Any, Any]] = []
        while len(answers) < len(self._parts):
            i = len(answers)
            try:
                answers.append(asked(self._parts[i]))
            except Differ as differ:
                self._parts[i : i + 1] = self._parts[i].split(differ.yes)
        same = tuple(map(id, answers))
        if same not in self._of_answers:
            values: dict[Any, NDArray[np.int64]] = {}
            for part, answer in zip(self._parts, answers, strict=True):
                self._put(values, part, answer)
            coefficients = self._coefficients(np.stack([*values.values()]) if values else None)
            self._of_answers[same] = answers, (tuple(values), coefficients)
        return self._of_answers[same][1]

    def _coefficients(self, values: NDArray[np.int64] | None) -> NDArray[np.int64]:
        """From values [number, combination and corner of a range, corner of a span]."""
        if values is None:
            return np.zeros((0, 2, self.cells.n * len(self.cells.ranges), 3 * len(self.spans)), np.int64)
        values = np.swapaxes(values.reshape(-1, *self._shape), 2, 3)
        owners = self.cells.range_of_corner
        ranges = [own.coefficients(values[..., owners == i]) for i, own in enumerate(self.cells.ranges)]
        by_corner = np.moveaxis(np.stack(ranges, axis=2), 3, -1)
        spans = [
            span.coefficients(by_corner[..., own]) for span, own in zip(self.spans, self.corner, strict=True)
        ]
        found = np.moveaxis(np.stack(spans, axis=-2), 3, 1)
        return found.reshape(len(values), 2, self.cells.n * len(self.cells.ranges), 3 * len(self.spans))

    def weights(self, blocks: Sequence[Blocks]) -> NDArray[np.int64]:
        """How often each coefficient counts for such numbers of blocks: [weight, blocks].

        Each span has three: at no block, for each recomputed one, for each other one.
        """
        return self._weights([(self.span_of[pair], pair) for pair in blocks])

    def _weights(self, at: Sequence[tuple[int, Blocks]]) -> NDArray[np.int64]:
        found = np.zeros((len(self.spans), 3, len(at)), np.int64)
        for column, (span, pair) in enumerate(at):
            found[span, :, column] = 1, *pair
        return found.reshape(-1, len(at))

    def at_corners(self, coefficients: NDArray[np.int64]) -> NDArray[np.int64]:
        """A number of such coefficients at every corner."""
        corners = self._weights([(i, corner) for i, span in enumerate(self.spans) for corner in span.corners])
        n = len(self.cells.ranges)
        fixed, each = coefficients
        found = [
            (fixed[i::n] + micro_batch * each[i::n]) @ corners
            for i, own in enumerate(self.cells.ranges)
            for micro_batch in own.corners
        ]
        return np.concatenate(found)

    def _put(self, values: dict[Any, NDArray[np.int64]], part: Part, answer: Mapping[Any, Any]) -> None:
        """The answer of a part in its place among all cells and corners."""
        tensor, data, blocks = part.at
        rows = self.cells.at[np.ix_(tensor, data)]
        there = rows >= 0
        places = np.ix_(rows[there], blocks)
        flat = {name: np.broadcast_to(n, part.axes.shape)[there] for name, n in answer.items()}
        for name, n in flat.items():
            if name not in values:
                values[name] = np.zeros((self.cells.n * self._shape[1], self._shape[2]), np.int64)
            values[name][places] = n


class Basis:
    """Coefficients of numbers: what a table's passes leave are sums of them, so many times each.

    They are `positive` where possible: 0 or more at every corner.
    """

    def __init__(self, table: Table) -> None:
        self.table = table
        self.numbers: list[NDArray[np.int64]] = []
        self.positive: list[bool] = []

    def relation(self, net: NDArray[np.int64]) -> tuple[int, ...]:
        """What a pass leaves: how often each number, the last ones left out if 0."""
        if not net.any():
            return ()
        found = self._sum(net)
        if found is not None:
            return found
        n = len(self.numbers)
        at_corners = self.table.at_corners(net)
        for sign in (1, -1):
            if (sign * at_corners >= 0).all():
                self._add(sign * net, positive=True)
                return (*[0] * n, sign)
        corners = [self.table.at_corners(number) for number in self.numbers]
        for size in (1, 2):
            for chosen in combinations(range(n), size):
                if (at_corners + sum([corners[i] for i in chosen]) >= 0).all():
                    self._add(net + sum([self.numbers[i] for i in chosen]), positive=True)
                    return (*[-(i in chosen) for i in range(n)], 1)
        self._add(net, positive=False)
        return (*[0] * n, 1)

    def _add(self, number: NDArray[np.int64], *, positive: bool) -> None:
        self.numbers.append(number)
        self.positive.append(positive)

    def _sum(self, net: NDArray[np.int64]) -> tuple[int, ...] | None:
        """The coefficients of the sum that such a number is, if it is one."""
        if not self.numbers:
            return None
        known = np.stack([number.ravel() for number in self.numbers]).astype(np.float64)
        scale = np.linalg.norm(known, axis=1)
        scaled = known / scale[:, None]
        rough = np.linalg.lstsq(scaled @ scaled.T, scaled @ net.ravel().astype(np.float64), rcond=None)[0]
        found = np.rint(rough / scale).astype(np.int64)
        if np.abs(found).max() > LARGEST_COEFFICIENT:
            return None
        total = sum([n * number for n, number in zip(found.tolist(), self.numbers, strict=True)])
        return tuple(found.tolist()) if (total == net).all() else None


LARGEST_COEFFICIENT: Final = 64
"""A sum with larger ones is taken for none."""


def at_cells(coefficients: NDArray[np.int64], rows: Rows) -> NDArray[np.int64]:
    """The coefficients of numbers in some cells: [number, cell, weight]."""
    fixed, each = (coefficients[:, i].take(rows.row, axis=1) for i in (0, 1))
    each *= rows.micro_batch[:, None]
    each += fixed
    return each


def at_blocks(
    table: Table, coefficients: NDArray[np.int64], rows: Rows, blocks: Sequence[Blocks]
) -> NDArray[np.int64]:
    """The numbers in some cells for such numbers of blocks: [number, cell, blocks]."""
    return at_cells(coefficients, rows) @ table.weights(blocks)
