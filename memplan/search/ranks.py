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

from memplan.engines.torch import Passes, RankStages, Stage
from memplan.engines.torch.runtime import left_behind
from memplan.engines.torch.schedules import schedule
from memplan.many import Differ, many
from memplan.plan import SINGLE_STAGE_SCHEDULES, Plan, Rank
from memplan.search.plans import Column
from memplan.search.stages import Ends, with_values
from memplan.shapes import UINT8, Buffer
from memplan.tape import Device
from memplan.timeline import Stretch, chain

Counts = NDArray[np.int64]

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


def _likely_alike(plan: Plan, ms: Sequence[int]) -> Iterator[list[int]]:
    """Numbers of micro-batches, by place, of which probably the same can be said: as many go round alike."""
    if plan.schedule in SINGLE_STAGE_SCHEDULES or plan.pp == 1:
        yield list(range(len(ms)))
        return
    groups: dict[tuple[int, int], list[int]] = {}
    for i, m in enumerate(ms):
        n_rounds = max(1, m // plan.pp)
        key = (m // n_rounds, min(n_rounds, 4)) if n_rounds > 1 else (0, min(m, 3))
        groups.setdefault(key, []).append(i)
    yield from groups.values()


@lru_cache(maxsize=8192)
def _program(
    plan: Plan, rank: int, places: tuple[Place, ...], device: Device, ms: tuple[int, ...]
) -> Program:
    m = many(ms) if len(ms) > 1 else ms[0]
    plan = with_values(plan, micro_batch=1, global_batch=plan.n_replicas * m)
    known: dict[int, _Passes] = {}
    for place in places:
        if place.number not in known:
            known[place.number] = _Passes(place, plan, device)
    own = [known[place.number] for place in places]
    stages = RankStages.of(*[one.stage for one in own], rank=Rank(pp=rank))
    stages.received = [(one.boundary, one.boundary) for one in own]
    step = chain("step", *schedule(stages, cast(list[Passes], own)))
    passes = tuple(found for one in known.values() for found in one.made)
    names = {text_of(found): i for i, found in enumerate(passes)}
    boundaries = {
        id(one.boundary): names[text_of(Pass(number, RECEIVED, ()))] for number, one in known.items()
    }
    walk = _Walk(names, boundaries, len(ms))
    at, before = walk.instants(step)
    left = np.zeros((len(known), len(ms)), np.int64)
    behind = left_behind(stages)
    for i, one in enumerate(known.values()):
        left[i] = behind[one.boundary]
    unit = gcd(*[n - ms[0] for n in ms]) or 1
    units = (np.array(ms) - ms[0]) // unit
    return Program(
        ms[0], unit, int(units[-1]), passes, at, *_linear(before, units), *_linear(left, units), {}
    )


def _linear(counts: Counts, units: Column) -> tuple[NDArray[Any], NDArray[Any]]:
    """Counts [..., number of micro-batches] of the least number, and what each unit more adds."""
    start = counts[..., 0]
    if len(units) == 1:
        return _small(start), _small(np.zeros_like(start))
    each = (counts[..., 1] - start) // units[1]
    alike = (counts == start[..., None] + each[..., None] * units).reshape(-1, len(units)).all(axis=0)
    if not alike.all():
        raise Differ(alike)
    return _small(start), _small(each)


def _small(counts: Counts) -> NDArray[Any]:
    """The same in as few bytes as they need: there are many programs."""
    least, most = counts.min(initial=0), counts.max(initial=0)
    return counts.astype(np.result_type(np.min_scalar_type(least), np.min_scalar_type(most)))


def text_of(found: Pass) -> str:
    """A pass's name among stretches."""
    return f"{found.place} {found.name} {found.how}"


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
        how = {k: (self.reduces and bool(v)) if k == "last" else bool(v) for k, v in how.items()}
        found = Pass(self.place.number, name, tuple(how.items()))
        if found not in self.made:
            self.made[found] = Stretch(text_of(found), (), (), 1, 0, 0)
        return self.made[found]


class _Walk:
    """From a step put together of named passes to its instants, each stretch once.

    An instant is a row of counts [number of micro-batches, pass], and in a last column the pass it is at.
    """

    def __init__(self, names: dict[str, int], boundaries: dict[int, int], n_ms: int) -> None:
        self.names = names
        self.boundaries = boundaries
        self.shape = n_ms, len(names) + 1
        self.known: dict[int, tuple[Counts, Counts]] = {}

    def instants(self, step: Stretch) -> tuple[Column, Counts]:
        """Passes, and counts [instant, pass, number of micro-batches]."""
        end, found = self._walked(step)
        end[:, -1] = -1
        found = _distinct(np.concatenate((found, end[None])))
        return found[:, 0, -1].copy(), np.moveaxis(found[:, :, :-1], 1, 2)

    def _walked(self, stretch: Stretch) -> tuple[Counts, Counts]:
        if id(stretch) not in self.known:
            self.known[id(stretch)] = self._of_all_repeats(stretch)
        return self.known[id(stretch)]

    def _of_all_repeats(self, stretch: Stretch) -> tuple[Counts, Counts]:
        n = stretch.repeats
        some = np.asarray(n) > 0
        if not some.all():
            if some.any():
                raise Differ(some)
            return np.zeros(self.shape, np.int64), np.zeros((0, *self.shape), np.int64)
        net, found = self._once(stretch)
        if np.ndim(n) == 0 and n == 1:
            return net, found
        times = np.asarray(n).reshape(-1, 1)
        again = (times - 1) * net
        return times * net, np.concatenate((found, found + again)) if again.any() else found

    def _once(self, stretch: Stretch) -> tuple[Counts, Counts]:
        if not stretch.parts:
            return self._single(stretch)
        walked = [self._walked(part) for part in stretch.parts]
        if len(walked) == 1:
            return walked[0]
        after = np.cumsum([net for net, _ in walked], axis=0)
        before = np.concatenate((np.zeros((1, *self.shape), np.int64), after[:-1]))
        found = np.concatenate([rows for _, rows in walked])
        return after[-1], found + np.repeat(before, [len(rows) for _, rows in walked], axis=0)

    def _single(self, stretch: Stretch) -> tuple[Counts, Counts]:
        net = np.zeros(self.shape, np.int64)
        at = self.names.get(stretch.name)
        if at is not None:
            found = np.zeros((1, *self.shape), np.int64)
            found[..., -1] = at
            net[:, at] = 1
            return net, found
        for event in stretch.events:
            net[:, self.boundaries[id(event.buffer)]] += event.sign
        return net, np.zeros((0, *self.shape), np.int64)


def _distinct(rows: Counts) -> Counts:
    """Each row once, in the order of their last."""
    seen = {row.tobytes(): i for i, row in enumerate(np.ascontiguousarray(rows))}
    return rows[sorted(seen.values())]


class Reduced(NamedTuple):
    """The instants of a program that may be the worst, in terms of a basis of what its passes leave.

    `before` and `before_each` are [instant, basis]; the last instant is `at` -1. Equal ones have a `key`.
    """

    key: bytes
    at: Column
    before: Counts
    before_each: Counts


def reduced(program: Program, places: Column, relations: Counts, positive: NDArray[np.bool_]) -> Reduced:
    """A program whose passes have such `places` and leave sums [pass, basis] of numbers, some `positive`.

    Of two instants at the same pass one is left out that has the same of the others and no more of these.
    """
    key = places.tobytes(), relations.tobytes(), positive.tobytes()
    if key not in program.known:
        program.known[key] = _made(program, places, relations, positive)
    return program.known[key]


def _made(program: Program, places: Column, relations: Counts, positive: NDArray[np.bool_]) -> Reduced:
    before = program.before.astype(np.int64) @ relations
    each = program.before_each.astype(np.int64) @ relations
    rows = np.concatenate([program.at[:, None], before, before + program.most_units * each], axis=1)
    one = np.array([*{row.tobytes(): i for i, row in enumerate(rows)}.values()])
    signs = np.concatenate((positive, positive))
    kept = []
    for at in np.unique(program.at).tolist():
        own = one[program.at[one] == at]
        values = rows[own, 1:]
        some, others = values[:, signs], values[:, ~signs]
        beaten = (some[None] >= some[:, None]).all(axis=2) & (others[None] == others[:, None]).all(axis=2)
        np.fill_diagonal(beaten, val=False)
        kept += own[~beaten.any(axis=1)].tolist()
    found = np.array(sorted(kept, key=lambda i: (program.at[i] < 0, rows[i].tolist())), np.int64)
    at = np.where(program.at[found] < 0, -1, places[program.at[found]])
    before, each = before[found], each[found]
    return Reduced(b"".join(part.tobytes() for part in (at, before, each)), at, before, each)
