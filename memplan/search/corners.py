"""What is linear between corners: in the micro-batch, and in a stage's numbers of blocks.

A few corners tell the whole of such a `Range` or `Span`. Of a maximum every candidate is kept that is the
largest anywhere, so that it is known between the corners too.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Final, NamedTuple, TypeVar, final

import numpy as np
from numpy.typing import NDArray

from memplan.many import many
from memplan.search.plans import Column
from memplan.shapes import Event
from memplan.timeline import Sizes, Stretch, alive_in_run, net_and_high, runs_of_many, sizes_of

Blocks = tuple[int, int]
"""How many of a stage's blocks are recomputed, and how many are not."""

T = TypeVar("T")


class NotLinear(Exception):
    """What was taken for linear in blocks or micro-batches is not: each of them has to be worked out."""


class Range(NamedTuple):
    """Micro-batches between which everything is linear: a single one, or the least, the next one, the most.

    The step from the least to the next is the one that tells, since the most may be on no cell: as many FLOPs
    as there are in so many sequences on a single tensor rank may be no 64-bit integer, and wrap around.
    """

    corners: tuple[int, ...]

    def coefficients(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """At 0, and what each sequence adds; corners are along the last axis of values.

        >>> Range((2, 4, 6)).coefficients(np.array([5, 9, 13])).tolist()
        [1, 2]
        >>> wrapped = np.array([[1, 2, 3]]) * 2**62  # the last is no 64-bit integer
        >>> Range((2, 4, 6)).coefficients(wrapped).tolist() == [[0, 2**61]]
        True

        Raises:
            NotLinear: the corners are on no line.
        """
        if len(self.corners) == 1:
            return np.stack([values[..., 0], np.zeros_like(values[..., 0])], axis=-1)
        least, following, most = self.corners
        each, rest = np.divmod(values[..., 1] - values[..., 0], following - least)
        if rest.any() or (values[..., 0] + each * (most - least) != values[..., 2]).any():
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
            n.shape[axis] > 1
            and len(first) < len(of_place)
            and bool((n != n.take(first[of_place], axis)).any())
            for axis, (first, of_place) in enumerate(self._starts)
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


_ONE: Final = [(np.zeros(1, np.int64), np.zeros(1, np.int64))] * 3
"""`Axes._starts` of a number that is the same along each axis."""


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


def content(stretch: Stretch) -> Hashable:
    """What equal stretches have in common."""
    return stretch.repeats, stretch.events, tuple(map(content, stretch.parts))


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
            self._known[stretch.events] = (
                _alive(self.axes, sizes_of(stretch.events)) if varies else [stretch.high_bytes]
            )
        return self._known[stretch.events]


@lru_cache(maxsize=4096)
def _alive(axes: Axes, sizes: Sizes) -> list[Any]:
    """What is alive after events of such sizes, where it may be the most; for all stages on such axes."""
    live: Any = 0
    found: list[Any] = []
    for run in runs_of_many(sizes):
        net_bytes, high_bytes, alive = alive_in_run(run)
        own = [n for (sign, _), n in zip(run.pairs, alive, strict=True) if sign > 0]
        if own:
            found += [live + n for n in axes.largest(own, high_bytes)]
        live = live + net_bytes
    _, most = net_and_high(sizes)
    return axes.largest(found, most)
