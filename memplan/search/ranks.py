"""The instants of a rank's step in terms of its stages' passes, by the code that orders one rank's step.

A pass is known by what it leaves and by the most it holds. So an instant of the step is a pass and how often
each pass has been before it: whatever the passes' bytes, the largest such sum is the most the step holds.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from math import gcd
from typing import Any, Final, NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from memplan.device import Device
from memplan.engines.torch import Passes, RankStages, Stage
from memplan.engines.torch.runtime import left_behind
from memplan.engines.torch.schedules import schedule
from memplan.many import Differ, many
from memplan.plan import SINGLE_STAGE_SCHEDULES, Plan, Rank
from memplan.search.plans import Column
from memplan.search.stages import Ends, with_values
from memplan.shapes import UINT8, Buffer
from memplan.timeline import Stretch, chain

Counts = NDArray[np.int64]

ROUNDS: Final = frozenset({"interleaved-1f1b", "zero-bubble"})
"""Schedules that take micro-batches in rounds."""

T = TypeVar("T")


class Place(NamedTuple):
    """A stage of a rank, as far as the order of its passes depends on it.

    Stages with the same `number` are alike. The others say what `Passes` of that name do.
    """

    number: int
    ends: Ends
    reduces: bool
    widens: bool
    defers: bool


class Pass(NamedTuple):
    """A pass of stages that are alike: the method of `Passes` that makes it, and its arguments."""

    place: int
    name: str
    how: tuple[tuple[str, bool], ...]


RECEIVED: Final = "received"
"""The name of what a stage holds of a micro-batch that it has received: no pass, but it comes and goes."""


class Program(NamedTuple):
    """The instants of a step, for numbers of micro-batches: the least is `m`, all are `unit`s apart.

    `before` and `before_each` [instant, pass]: how often each of `passes` has been before it is `at` one, and
    how much more often with each unit; in the last instant the passes are over, and it is `at` -1. `left`
    [place]: what the step leaves of each place's `RECEIVED`, and with each unit. `known`: what `reduced` has
    found.
    """

    m: int
    unit: int
    most_units: int
    passes: tuple[Pass, ...]
    at: Column
    before: NDArray[Any]
    before_each: NDArray[Any]
    left: NDArray[Any]
    left_each: NDArray[Any]
    known: dict[tuple[bytes, ...], "Reduced"]


def programs(
    plan: Plan, rank: int, places: Sequence[Place], device: Device, ms: Sequence[int]
) -> list[tuple[Column, Program]]:
    """Of a rank with these stages: which numbers of micro-batches go with each program.

    Of the plan count the schedule, the pipeline, and what is said of gradients and of the data axis.
    """
    return _programs(plan, rank, tuple(places), device, tuple(ms))


@lru_cache(maxsize=8192)
def _programs(
    plan: Plan, rank: int, places: tuple[Place, ...], device: Device, ms: tuple[int, ...]
) -> list[tuple[Column, Program]]:
    return taken_apart(plan, ms, lambda some: _program(plan, rank, places, device, some))


def taken_apart(
    plan: Plan, ms: Sequence[int], work: Callable[[tuple[int, ...]], T]
) -> list[tuple[Column, T]]:
    """What some work says of numbers of micro-batches, and of which by place: of all at once if it can."""
    found: list[tuple[Column, T]] = []
    left = [np.array(some) for some in _likely_alike(plan, ms)]
    while left:
        at = left.pop()
        try:
            found.append((at, work(tuple([ms[i] for i in at]))))
        except Differ as differ:
            yes = differ.yes.ravel()
            left += [at[yes], at[~yes]]
    return found


def of_micro_batches(plan: Plan, ms: Sequence[int]) -> Plan:
    """A plan of micro-batches of one sequence, of so many at once."""
    m = many(ms) if len(ms) > 1 else ms[0]
    return with_values(plan, global_batch=plan.n_replicas * m)


def _likely_alike(plan: Plan, ms: Sequence[int]) -> Iterator[list[int]]:
    """Numbers of micro-batches, by place, of which probably the same can be said.

    Where they go in rounds: as many of them, or rounds as long that are many.
    """
    if plan.schedule in SINGLE_STAGE_SCHEDULES or plan.pp == 1:
        yield list(range(len(ms)))
        return
    groups: dict[tuple[int, int], list[int]] = {}
    for i, m in enumerate(ms):
        n_rounds = max(1, m // plan.pp) if plan.schedule in ROUNDS else 1
        key = (n_rounds, min(m, 3)) if n_rounds < 4 else (4, m // n_rounds)
        groups.setdefault(key, []).append(i)
    yield from groups.values()


@lru_cache(maxsize=8192)
def _program(
    plan: Plan, rank: int, places: tuple[Place, ...], device: Device, ms: tuple[int, ...]
) -> Program:
    plan = of_micro_batches(with_values(plan, micro_batch=1), ms)
    known: dict[int, _Passes] = {}
    for place in places:
        if place.number not in known:
            known[place.number] = _Passes(place, plan, device)
    own = [known[place.number] for place in places]
    stages = RankStages.of(*[one.stage for one in own], rank=Rank(pp=rank))
    stages.received = [(one.boundary, one.boundary) for one in own]
    step = chain("step", *schedule(stages, cast(list[Passes], own)))
    made = {found: stretch.name for one in known.values() for found, stretch in one.made.items()}
    passes, names = tuple(made), {name: i for i, name in enumerate(made.values())}
    boundaries = {id(one.boundary): passes.index(Pass(number, RECEIVED, ())) for number, one in known.items()}
    left = np.zeros((len(known), len(ms)), np.int64)
    behind = left_behind(stages)
    for i, one in enumerate(known.values()):
        left[i] = behind[one.boundary]
    unit = gcd(*[n - ms[0] for n in ms]) or 1
    units = (np.array(ms) - ms[0]) // unit
    at, before, before_each = _Walk(names, boundaries).instants(step, units)
    left, left_each = map(_small, _linear(left, units))
    most_units = int(units[-1])
    return Program(ms[0], unit, most_units, passes, at, before, before_each, left, left_each, {})


def _linear(counts: Counts, units: Column) -> tuple[Counts, Counts]:
    """Counts [..., number of micro-batches] of the least number, and what each unit more adds."""
    start = counts[..., 0]
    if len(units) == 1:
        return start, np.zeros_like(start)
    each = (counts[..., 1] - start) // units[1]
    alike = (counts == start[..., None] + each[..., None] * units).reshape(-1, len(units)).all(axis=0)
    if not alike.all():
        raise Differ(alike)
    return start, each


def _small(counts: Counts) -> NDArray[Any]:
    """The same in as few bytes as they need: there are many programs."""
    least, most = counts.min(initial=0), counts.max(initial=0)
    return counts.astype(np.result_type(np.min_scalar_type(least), np.min_scalar_type(most)))


class _Boundary(NamedTuple):
    """What a schedule asks a trace for."""

    boundary: Buffer
    boundary_grad: Buffer


class _Passes:
    """Answers as `Passes` do, with stretches that only bear names."""

    def __init__(self, place: Place, plan: Plan, device: Device) -> None:
        self.place = place
        self.stage = Stage(cast(Any, None), plan, (*place.ends, 0), device)
        self.boundary = Buffer(RECEIVED, (), UINT8, 0, "activations")
        self.stage.trace = cast(Any, _Boundary(self.boundary, self.boundary))
        self.reduces, self.widens, self.defers = place.reduces, place.widens, place.defers
        self.made: dict[Pass, Stretch] = {}
        self._made(RECEIVED, {})

    def __getattr__(self, name: str) -> Callable[..., Stretch]:
        return lambda **how: self._made(name, how)

    def reduced(self, **how: bool) -> list[Stretch]:
        return [self._made("reduced", how)]

    def _made(self, name: str, how: dict[str, Any]) -> Stretch:
        found, stretch = _named(self.place.number, self.reduces, name, tuple(how.items()))
        self.made[found] = stretch
        return stretch


@lru_cache(maxsize=4096)
def _named(number: int, reduces: bool, name: str, how: tuple[tuple[str, Any], ...]) -> tuple[Pass, Stretch]:
    """A pass of such places, and a stretch of its name."""
    said = tuple([(key, (reduces or key != "last") and bool(value)) for key, value in how])
    return Pass(number, name, said), Stretch(f"{number} {name} {said}", (), (), 1, 0, 0)


class _Walk:
    """A step put together of named passes as one list: of numbers, each a pass or, after these, a jump.

    What is repeated is there twice, as it begins and as it ends. A jump is what is left out, a list and how
    often: the other repetitions, and what comes and goes with no pass.
    """

    def __init__(self, names: dict[str, int], boundaries: dict[int, int]) -> None:
        self.names = names
        self.boundaries = boundaries
        self.jumps: list[tuple[list[int], int]] = []
        self.known: dict[int, list[int]] = {}

    def instants(self, step: Stretch, units: Column) -> tuple[Column, NDArray[Any], NDArray[Any]]:
        """The pass that a step is at, how often each has been before, and with each unit more: once each."""
        n = len(self.names)
        flat = np.array([*self.flat(step), 0])
        added = np.zeros((n + len(self.jumps), 2, n), np.int64)
        added[:n, 0] = np.eye(n)
        added[n:, 0], added[n:, 1] = _linear(self._counts(len(units)), units)
        own = added[flat]
        before = (own.cumsum(axis=0) - own)[flat < n]
        at = flat[flat < n]
        at[-1] = -1
        once = _last_of_each(np.concatenate((at[:, None], before[:, 0], before[:, 1]), axis=1))
        return at[once], _small(before[once, 0]), _small(before[once, 1])

    def _counts(self, n_ms: int) -> Counts:
        """How often each pass is in each jump [jump, pass, number of micro-batches]."""
        n, n_jumps = len(self.names), len(self.jumps)
        found = np.zeros((n_jumps, n, n_ms), np.int64)
        for i, (flat, times) in enumerate(self.jumps):
            within = np.bincount(flat, minlength=n + n_jumps)
            found[i] = within[:n, None]
            for j in np.flatnonzero(within[n:]):
                found[i] += within[n + j] * found[j]
            found[i] *= np.asarray(times)
        return found

    def flat(self, stretch: Stretch) -> list[int]:
        """All repetitions of a stretch."""
        found = self.known.get(id(stretch))
        if found is None:
            found = self._single(stretch)
            n = stretch.repeats
            if type(n) is not int or n != 1:
                found = [*found, self._jump(found, n - 2), *found] if n > 0 else []
            self.known[id(stretch)] = found
        return found

    def _single(self, stretch: Stretch) -> list[int]:
        if stretch.parts:
            found: list[int] = []
            for part in stretch.parts:
                found += self.known.get(id(part)) or self.flat(part)
            return found
        if stretch.name in self.names:
            return [self.names[stretch.name]]
        return [self._jump([self.boundaries[id(buffer)]], sign) for sign, buffer, _ in stretch.events]

    def _jump(self, flat: list[int], times: int) -> int:
        self.jumps.append((flat, times))
        return len(self.names) + len(self.jumps) - 1


def _last_of_each(rows: Counts) -> list[int]:
    """Where each row is, the last time if it is there several times; in order."""
    return sorted({text: i for i, text in enumerate(_texts(rows))}.values())


def _texts(rows: NDArray[Any]) -> list[bytes]:
    """The bytes of each row."""
    rows = np.ascontiguousarray(rows)
    texts: list[bytes] = rows.view(f"V{rows.itemsize * rows.shape[1]}").ravel().tolist()
    return texts


class Reduced(NamedTuple):
    """The instants of a program that may be the worst, in terms of a basis of what its passes leave.

    `before` and `before_each` are [instant, basis]; the last instant is `at` -1. Equal ones have a `key`.
    """

    key: bytes
    at: Column
    before: NDArray[Any]
    before_each: NDArray[Any]


def reduced(program: Program, places: Column, relations: Counts, positive: NDArray[np.bool_]) -> Reduced:
    """A program whose passes have such `places` and leave sums [pass, basis] of numbers, some `positive`.

    Of two instants at the same pass one is left out that has the same of the others and no more of these.
    """
    key = places.tobytes(), relations.tobytes(), positive.tobytes()
    if key not in program.known:
        program.known[key] = _made(program, places, relations, positive)
    return program.known[key]


def _made(program: Program, places: Column, relations: Counts, positive: NDArray[np.bool_]) -> Reduced:
    weights = relations.astype(np.float64)  # BLAS multiplies these, exactly: they are small whole numbers
    before, each = program.before @ weights, program.before_each @ weights
    ends = [before, before + program.most_units * each] if each.any() else [before]
    same = [-end[:, ~positive] for end in ends]
    found = _undominated(np.concatenate((program.at[:, None] % (len(places) + 1), *ends, *same), axis=1))
    at = program.at[found]
    at[:-1] = places[at[:-1]]
    parts = [_small(counts.astype(np.int64)) for counts in (at, before[found], each[found])]
    types = "".join([part.dtype.char for part in parts])
    return Reduced(b"".join([f"{len(at)} {types} ".encode(), *[part.tobytes() for part in parts]]), *parts)


def _undominated(rows: NDArray[np.float64]) -> list[int]:
    """Where those rows are that, of the rows with the same first number, none is nowhere less than; in order.

    A row is taken for one whole number, with a bit before each of its own: the difference of two rows keeps
    it where the first is not less.
    """
    rows = rows - rows.min(axis=0)
    kind = np.min_scalar_type(2 * int(rows.max()) + 1).newbyteorder(">")
    texts = _texts(rows.astype(kind))
    bits = int.from_bytes((b"\x80" + bytes(kind.itemsize - 1)) * rows.shape[1])
    place = dict(zip(texts, range(len(texts)), strict=True))
    found: list[int] = []
    kept: list[int] = []
    first = b""
    for text in sorted(place, reverse=True):
        if text[: kind.itemsize] != first:
            first, kept = text[: kind.itemsize], []
        own = int.from_bytes(text)
        for other in kept:
            if (other - own) & bits == bits:
                break
        else:
            kept.insert(0, own | bits)
            found.append(place[text])
    return found[::-1]
