"""What pipeline stages do in a pass, worked out once for all their sizes, by the very code of one estimate.

A stage's share of a tensor and of the batch and the data axis are arrays (`Many`) that this code takes for
numbers. In its numbers of blocks, so many recomputed and so many not, all that it adds up is linear where no
number passes a bound: two or three corners tell the whole of such a `Span`. Of a maximum every candidate is
kept that is the largest anywhere, so that it is known between the corners as well.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import combinations, groupby
from typing import Any, Final, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from memplan.engines.torch import Passes, RankStages, Stage, passes_of
from memplan.engines.torch.step import kept_grads, updates
from memplan.many import Differ, many
from memplan.models import Model
from memplan.plan import Plan, Rank
from memplan.search.plans import Column
from memplan.steptime import forward_flops, passes_flops
from memplan.tape import Device
from memplan.timeline import Stretch, chain, n_bytes_of
from memplan.traffic import Purpose, Rounds, calls_of_passes, calls_of_update, payloads_bytes

Ends = tuple[bool, bool]
"""Whether a stage is the pipeline's first, and whether it is the last."""

Blocks = tuple[int, int]
"""How many of a stage's blocks are recomputed, and how many are not."""


class NotLinear(Exception):
    """What was taken for linear in the numbers of blocks is not: each of them has to be worked out."""


def with_values(plan: Plan, **values: Any) -> Plan:
    """A plan with other values, unchecked: `Many`, say."""
    other = copy(plan)
    for name, value in values.items():
        object.__setattr__(other, name, value)
    return other


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
@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """(tp, micro_batch), (dp, dp_replicate), and blocks."""

    tensor: tuple[tuple[int, int], ...]
    data: tuple[tuple[int, int], ...]
    blocks: tuple[Blocks, ...]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Places along each."""
        return len(self.tensor), len(self.data), len(self.blocks)

    def some(self, tensor: Column, data: Column, blocks: Column) -> "Axes":
        """Some of each."""
        return Axes(
            tensor=tuple([self.tensor[i] for i in tensor]),
            data=tuple([self.data[i] for i in data]),
            blocks=tuple([self.blocks[i] for i in blocks]),
        )


@final
@dataclass(frozen=True, kw_only=True)
class Part:
    """A stage at every combination along the axes; `at` are its places in a whole of which it is a part.

    The blocks are the corners of spans: `spans` tells which of each.
    """

    model: Model
    plan: Plan
    ends: Ends
    device: Device
    axes: Axes
    at: tuple[Column, Column, Column]
    spans: tuple[int, ...]

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
    def _first_corners(self) -> Column:
        return np.array([self.spans.index(span) for span in self.spans])

    def varies(self, n: Any) -> bool:
        """Whether a number differs between the corners of any span."""
        if len(set(self.spans)) == len(self.spans) or np.ndim(n) < 3 or n.shape[2] == 1:
            return False
        return bool((n != n[..., self._first_corners]).any())

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
        """What a pass leaves, and candidates for the most it holds; by a method's name and arguments."""
        made = getattr(self.passes, name)(**how)
        net, highs = candidates(chain(name, *made) if isinstance(made, list) else made, self.varies)
        return {"net": net} | {f"high {i}": high for i, high in enumerate(highs)}

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
            NotLinear: it differs between the corners of a span.
        """
        yes = np.broadcast_to(yes, self.axes.shape)
        axis, groups = _apart(yes)
        if axis == 2 and self.varies(yes):
            raise NotLinear
        parts = []
        for group in groups:
            within = [np.arange(n) for n in self.axes.shape]
            within[axis] = group
            tensor, data, blocks = (where[i] for where, i in zip(self.at, within, strict=True))
            spans = tuple([self.spans[i] for i in within[2]])
            parts.append(replace(self, axes=self.axes.some(*within), at=(tensor, data, blocks), spans=spans))
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


# The candidates for a maximum


def candidates(stretch: Stretch, varies: Callable[[Any], bool]) -> tuple[Any, list[Any]]:
    """What a stretch leaves, and numbers of which the largest is the most that it holds.

    Each is linear in the numbers of blocks where its parts are; `varies` tells whether a number is another at
    each corner of a span.
    """
    if not stretch.parts:
        varied = varies(stretch.high_bytes)
        return stretch.net_bytes, list(_running(stretch)) if varied else [stretch.high_bytes]
    live: Any = 0
    highs: list[Any] = []
    for part in stretch.parts:
        net, own = candidates(part, varies)
        highs += [live + high for high in own]
        live = live + net
    n = stretch.repeats
    if np.ndim(n) == 0 and n == 1:
        return live, highs
    some = np.asarray(n) > 0
    if varies(some):
        raise NotLinear
    if not some.any():
        return 0, [0]
    if some.all():
        return n * live, [*highs, *[high + (n - 1) * live for high in highs]]
    return n * live, [*[some * high for high in highs], *[some * (high + (n - 1) * live) for high in highs]]


def _running(stretch: Stretch) -> Iterator[Any]:
    live: Any = 0
    for event in stretch.events:
        live = live + event.sign * event.buffer.n_bytes
        if event.sign > 0:
            yield live


def undominated(rows: NDArray[Any]) -> Column:
    """The rows that may be the largest at some place, or between places: no single other is as large at all.

    >>> undominated(np.array([[1, 1], [3, 0], [0, 3], [2, 2], [3, 0]])).tolist()
    [1, 2, 3]
    """
    if len(rows) == 1:
        return np.zeros(1, np.int64)
    kept: list[int] = []
    largest_first = np.argsort(-rows.sum(axis=1, dtype=np.float64), kind="stable")
    for i in largest_first.tolist():
        row = rows[i]
        if not any((row <= rows[other]).all() for other in kept):
            kept.append(i)
    return np.sort(np.array(kept))


# Tables


class Cells:
    """Combinations of (tp, micro_batch) and (dp, dp_replicate): those there are, each once."""

    def __init__(self, tp: Column, micro_batch: Column, dp: Column, dp_replicate: Column) -> None:
        columns = np.stack([tp, micro_batch, dp, dp_replicate])
        found, self.row = np.unique(columns, axis=1, return_inverse=True)
        self.row = self.row.ravel()
        """Of each combination that was given, its place among those that there are."""
        tensor, t = np.unique(found[:2], axis=1, return_inverse=True)
        data, d = np.unique(found[2:], axis=1, return_inverse=True)
        self.tensor = tuple([(int(a), int(b)) for a, b in tensor.T])
        self.data = tuple([(int(a), int(b)) for a, b in data.T])
        self.n = found.shape[1]
        self.at = np.full((len(self.tensor), len(self.data)), -1)
        self.at[t.ravel(), d.ravel()] = np.arange(self.n)


Asked = Callable[[Part], Mapping[Any, Any]]


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
        axes = Axes(tensor=cells.tensor, data=cells.data, blocks=tuple([corner for _, corner in corners]))
        at = np.arange(axes.shape[0]), np.arange(axes.shape[1]), np.arange(axes.shape[2])
        spans = tuple([i for i, _ in corners])
        self._parts = [Part(model=model, plan=plan, ends=ends, device=device, axes=axes, at=at, spans=spans)]
        self._n_corners = len(corners)
        self._known: dict[Hashable, tuple[tuple[Any, ...], NDArray[np.int64]]] = {}

    def __call__(self, key: Hashable, asked: Asked) -> tuple[tuple[Any, ...], NDArray[np.int64]]:
        """What is asked of all stages, known by a key from then on: names of numbers, and their coefficients.

        Coefficients are [number, span, cell, (at no block, for each recomputed one, for each other one)].
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

    def _found(self, asked: Asked) -> tuple[tuple[Any, ...], NDArray[np.int64]]:
        values: dict[Any, NDArray[np.int64]] = {}
        i = 0
        while i < len(self._parts):
            try:
                answer = asked(self._parts[i])
            except Differ as differ:
                self._parts[i : i + 1] = self._parts[i].split(differ.yes)
                continue
            self._put(values, self._parts[i], answer)
            i += 1
        found = (
            np.stack([*values.values()]) if values else np.zeros((0, self.cells.n, self._n_corners), np.int64)
        )
        spans = [
            span.coefficients(found[..., own]) for span, own in zip(self.spans, self.corner, strict=True)
        ]
        return tuple(values), np.stack(spans, axis=1)

    def _put(self, values: dict[Any, NDArray[np.int64]], part: Part, answer: Mapping[Any, Any]) -> None:
        """The answer of a part in its place among all cells and corners."""
        tensor, data, blocks = part.at
        rows = self.cells.at[np.ix_(tensor, data)]
        there = rows >= 0
        places = np.ix_(rows[there], blocks)
        flat = {name: np.broadcast_to(n, part.axes.shape)[there] for name, n in answer.items()}
        highs = [name for name in flat if isinstance(name, str) and name.startswith("high ")]
        if len(highs) > 1:
            stack = np.stack([flat.pop(name) for name in highs])
            for i, kept in enumerate(undominated(stack.reshape(len(stack), -1)).tolist()):
                flat[f"high {i}"] = stack[kept]
        for name, n in flat.items():
            if name not in values:
                values[name] = np.zeros((self.cells.n, self._n_corners), np.int64)
            values[name][places] = n


class Basis:
    """Numbers [span, cell, coefficient]: what a table's passes leave are sums of them, so many times each.

    They are `positive` where possible: 0 or more in every cell.
    """

    def __init__(self, table: Table) -> None:
        self.table = table
        self.numbers: list[NDArray[np.int64]] = []
        self.positive: list[bool] = []
        self._known: dict[Hashable, tuple[int, ...]] = {}

    def relation(self, key: Hashable, net: NDArray[np.int64]) -> tuple[int, ...]:
        """What a pass leaves, known by a key: how often each number, the last ones left out if 0."""
        if key not in self._known:
            self._known[key] = self._related(net)
        return self._known[key]

    def _related(self, net: NDArray[np.int64]) -> tuple[int, ...]:
        if not net.any():
            return ()
        found = self._sum(net)
        if found is not None:
            return found
        n = len(self.numbers)
        at_corners = self._at_corners(net)
        for sign in (1, -1):
            if (sign * at_corners >= 0).all():
                self._add(sign * net, positive=True)
                return (*[0] * n, sign)
        corners = [self._at_corners(number) for number in self.numbers]
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

    def _at_corners(self, number: NDArray[np.int64]) -> NDArray[np.int64]:
        values = []
        for coefficients, span in zip(number, self.table.spans, strict=True):
            values += [coefficients @ np.array((1, *corner)) for corner in span.corners]
        return np.concatenate(values)


LARGEST_COEFFICIENT: Final = 64
"""A sum with larger ones is taken for none."""


def at_blocks(
    table: Table, coefficients: NDArray[Any], rows: Column, blocks: Sequence[Blocks]
) -> NDArray[Any]:
    """The values [number, cell, blocks] at some cells for such numbers of blocks."""
    spans = [table.span_of[pair] for pair in blocks]
    found = np.empty((len(coefficients), len(rows), len(blocks)), coefficients.dtype)
    for span in dict.fromkeys(spans):
        chosen = [i for i, s in enumerate(spans) if s == span]
        weights = np.array([(1, *blocks[i]) for i in chosen], coefficients.dtype).T
        found[:, :, chosen] = coefficients[:, span].take(rows, axis=1) @ weights
    return found
