"""What is known of stages in all cells: linear in the micro-batch and in the numbers of blocks."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from memplan.device import Device
from memplan.many import Differ
from memplan.models import Model
from memplan.plan import Plan
from memplan.search.corners import Axes, Blocks, Range, Span
from memplan.search.plans import Column
from memplan.search.stages import Ends, Part


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
        data, d = distinct(dp, dp_replicate)
        found, pair = distinct(t, d)
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


def distinct(a: Column, b: Column) -> tuple[list[tuple[int, int]], Column]:
    """Pairs of numbers that are 0 or more, each once, in order, and which of them each pair is."""
    base = int(b.max()) + 1
    found, place = np.unique(a * base + b, return_inverse=True)
    return [divmod(pair, base) for pair in found.tolist()], place


def _ranges(numbers: Sequence[int], *, linear: bool) -> list[Range]:
    """Those that micro-batches, in order, are in: a single sequence is like no other number of them."""
    several = [n for n in numbers if n > 1]
    if not linear or len(several) < 4:
        return [Range((n,)) for n in numbers]
    line = Range((several[0], several[1], several[-1]))
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
        self.span_of_corner = np.array([i for i, _ in corners])
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
        by_corner, owners = np.moveaxis(np.stack(ranges, axis=2), 3, -1), self.span_of_corner
        spans = [own.coefficients(by_corner[..., owners == i]) for i, own in enumerate(self.spans)]
        found = np.moveaxis(np.stack(spans, axis=-2), 3, 1)
        return found.reshape(len(values), 2, self.cells.n * len(self.cells.ranges), 3 * len(self.spans))

    def weights(self, blocks: Sequence[Blocks]) -> NDArray[np.int64]:
        """How often each coefficient counts for such numbers of blocks: [weight, blocks].

        Each span has three: at no block, for each recomputed one, for each other one.
        """
        return self._weights([(self.span_of[pair], pair) for pair in blocks])

    def at(
        self, coefficients: NDArray[np.int64], rows: Rows, blocks: Sequence[Blocks]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Coefficients in some cells [number, cell, weight], and `weights`; without what never counts."""
        weights = self.weights(blocks)
        used = np.flatnonzero(weights.any(axis=1))
        return at_cells(coefficients[..., used], rows), weights[used]

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


def at_cells(coefficients: NDArray[Any], rows: Rows) -> NDArray[Any]:
    """Numbers in some cells [number, cell, weight], by their coefficients."""
    fixed, each = (coefficients[:, i].take(rows.row, axis=1) for i in (0, 1))
    each *= rows.micro_batch[:, None]
    each += fixed
    return each
