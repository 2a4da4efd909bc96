"""The memory of many plans at once, by the very code that estimates one: `Many` stand where numbers did.

Two levels, each worked out for what differs on it and no more. What a pipeline *stage* allocates and frees in
a pass depends on its share of a tensor and of the batch, on the data axis and on its number of blocks: on a
grid of these three. What a *rank* holds in a step are such passes in turn: for each plan its own.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, Final, Literal, NamedTuple, cast, final

import numpy as np
from numpy.typing import NDArray

from memplan.engines.torch import Passes, RankStages, Stage, passes_of
from memplan.engines.torch.runtime import left_behind
from memplan.engines.torch.schedules import schedule
from memplan.engines.torch.stage import mesh_bytes
from memplan.engines.torch.step import kept_grads, updates
from memplan.estimate import estimate_on
from memplan.many import Differ, anywhere, many
from memplan.models import Model
from memplan.plan import (
    RECOMPUTES,
    SCHEDULES,
    SINGLE_STAGE_SCHEDULES,
    SPLITTING_SCHEDULES,
    V_SCHEDULES,
    Plan,
    Rank,
)
from memplan.search.plans import NO_LIMIT, VARIED, Column, Plans
from memplan.shapes import UINT8, Buffer
from memplan.steptime import forward_flops, passes_flops
from memplan.tape import Device
from memplan.timeline import Stretch, chain, n_bytes_of
from memplan.traffic import Calls, Purpose, Rounds, calls_of_passes, calls_of_update, payloads_bytes


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What each of many plans asks of a GPU.

    Bytes at the worst instant of its worst stage, which stage that is (the first of those that hold most),
    and bytes that this stage holds between steps.
    """

    peak_bytes: Column
    worst_stage: Column
    rest_bytes: Column


def memory(model: Model, plans: Plans, device: Device) -> Memory:
    """The memory of each plan; they are plans that `check_plan` accepts."""
    if has_rule(plans.base):
        found = Search(model, plans, device).run()
    else:
        found = _Found(len(plans))
        found.one_by_one(model, plans, device)
    return Memory(peak_bytes=found.peak, worst_stage=found.worst, rest_bytes=found.rest)


def has_rule(base: Plan) -> bool:
    """Whether nothing in common asks for whole lists of numbers: of DDP's buckets, of stages' layers."""
    return base.engine == "torch" and base.ddp_comm_hook == "none" and base.layers_per_stage is None


class _Found:
    """The worst stage so far of each plan."""

    def __init__(self, n: int) -> None:
        self.peak, self.worst, self.rest = np.full(n, -1), np.zeros(n, np.int64), np.zeros(n, np.int64)

    def one_by_one(self, model: Model, plans: Plans, device: Device) -> None:
        """By one estimate each."""
        for i in range(len(plans)):
            worst = estimate_on(model, plans.plan(i), device).worst
            self.peak[i], self.worst[i], self.rest[i] = worst.peak_bytes, worst.stage, worst.rest_bytes

    def add(self, chosen: Column, stage: Any, rest: Column, high: Column) -> None:
        """A stage that comes after those before it."""
        peak = rest + high
        more = peak > self.peak[chosen]
        at = chosen[more]
        self.peak[at], self.rest[at] = peak[more], np.broadcast_to(rest, peak.shape)[more]
        self.worst[at] = np.broadcast_to(stage, peak.shape)[more]


# A stage: on a grid

Mode = Literal["none", "ddp", "fsdp2", "fsdp3"]
MODES: Final[tuple[Mode, ...]] = ("none", "ddp", "fsdp2", "fsdp3")
"""What the data axis does."""

Ends = tuple[bool, bool]
"""Whether a stage is the pipeline's first, and whether it is the last."""


def with_values(plan: Plan, **values: Any) -> Plan:
    """A plan with other values, unchecked: `Many`, say."""
    other = copy(plan)
    for name, value in values.items():
        object.__setattr__(other, name, value)
    return other


@lru_cache(maxsize=4096)
def _along(axis: int, numbers: tuple[int, ...]) -> Any:
    """Numbers along one axis of a grid; the same ones are the same object, which traces are known by."""
    shape = [1, 1, 1]
    shape[axis] = len(numbers)
    return many(numbers).reshape(shape)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Axes:
    """(tp, micro_batch), (dp, dp_replicate), and (how many blocks a stage has, the most it recomputes)."""

    tensor: tuple[tuple[int, int], ...]
    data: tuple[tuple[int, int], ...]
    blocks: tuple[tuple[int, int], ...]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Places along each."""
        return len(self.tensor), len(self.data), len(self.blocks)

    def some(self, tensor: Column, data: Column, blocks: Column) -> "_Axes":
        """Some of each."""
        return _Axes(
            tensor=tuple([self.tensor[i] for i in tensor]),
            data=tuple([self.data[i] for i in data]),
            blocks=tuple([self.blocks[i] for i in blocks]),
        )


@final
@dataclass(frozen=True, kw_only=True)
class Part:
    """Part of a grid, from which it has the places `at`: a stage at every combination along its axes."""

    model: Model
    plan: Plan
    ends: Ends
    device: Device
    axes: _Axes
    at: tuple[Column, ...]

    @cached_property
    def stages(self) -> RankStages:
        """A rank that has the stage alone, and a single micro-batch to a step."""
        tp, micro_batch = (_along(0, numbers) for numbers in zip(*self.axes.tensor, strict=True))
        n_blocks, most = (_along(2, numbers) for numbers in zip(*self.axes.blocks, strict=True))
        values = {"tp": tp, "micro_batch": micro_batch}
        if self.plan.recompute != "none":
            values["recompute_blocks"] = most
        if self.plan.fsdp:
            dp, dp_replicate = (_along(1, numbers) for numbers in zip(*self.axes.data, strict=True))
            values |= {"dp": dp, "dp_replicate": dp_replicate}
        plan = with_values(self.plan, **values)
        plan = with_values(plan, global_batch=plan.n_replicas * micro_batch)
        return RankStages.of(Stage(self.model, plan, (*self.ends, n_blocks), self.device), rank=Rank())

    @cached_property
    def passes(self) -> Passes:
        """Those of the stage."""
        return passes_of(*self.stages)

    def boundary(self) -> tuple[Any]:
        """Bytes of what is sent from stage to stage."""
        return (self.stages.stages[0].trace.boundary.n_bytes,)

    def states(self) -> tuple[Any]:
        """Bytes that are kept from step to step, but for what goes in."""
        kept = n_bytes_of(kept_grads(self.stages, [self.passes]))
        return (kept + (0 if self.stages.offloads else n_bytes_of(self.stages.states)),)

    def update(self) -> tuple[Any, Any]:
        """The optimizer's part of a step."""
        return known_by(chain("update", *updates(self.stages)))

    def forward_flops(self) -> tuple[Any]:
        """Of a micro-batch's forward pass."""
        return (forward_flops(self.stages),)

    def again_flops(self, field: str) -> tuple[Any]:
        """Of what is computed again with each of a field of `Rounds`."""
        return (
            passes_flops(self.stages, [EACH[field]]) - EACH[field].micro_batches * self.forward_flops()[0],
        )

    def sent(self, field: str) -> dict[Purpose, Any]:
        """What is passed to collectives, if anything.

        With each of a field of `Rounds`, beyond what is "fixed"; or "after" all passes, by the update.
        """
        if field not in self._sent:
            found = payloads_bytes(self._calls(field))
            if field not in ("fixed", "after"):
                found = {purpose: n - self.sent("fixed").get(purpose, 0) for purpose, n in found.items()}
            self._sent[field] = {purpose: n for purpose, n in found.items() if anywhere(n)}
        return self._sent[field]

    @cached_property
    def _sent(self) -> dict[str, dict[Purpose, Any]]:
        return {}

    def _calls(self, field: str) -> Iterator[Calls]:
        """Those of `sent`; where DDP reduces, the update's with all that ZeRO-1 sends."""
        if field != "after":
            return calls_of_passes(self.stages, [EACH[field]])
        stage = copy(self.stages.stages[0])
        stage.plan = with_values(stage.plan, zero=1 if stage.plan.ddp else stage.plan.zero)
        return calls_of_update(RankStages.of(stage, rank=Rank()))

    def moved(self) -> tuple[Any, Any, Any]:
        """Bytes of what the optimizer sees: weights, gradients, its state."""
        return optimizer_sees(self.stages)

    def split(self, yes: NDArray[np.bool_]) -> list["Part"]:
        """Parts for which an answer does not differ, at least along one more axis."""
        yes = np.broadcast_to(yes, self.axes.shape)
        groups = [_equal_slices(yes, axis) for axis in range(3)]
        axis = min((i for i in range(3) if len(groups[i]) > 1), key=lambda i: len(groups[i]))
        parts = []
        for group in groups[axis]:
            within = [np.arange(n) for n in self.axes.shape]
            within[axis] = group
            at = tuple([where[i] for where, i in zip(self.at, within, strict=True)])
            parts.append(replace(self, axes=self.axes.some(*within), at=at))
        return parts


EACH: Final[dict[str, Rounds]] = {
    field: Rounds(*[int(name == field) for name in Rounds._fields]) for field in ("fixed", *Rounds._fields)
}
"""One of each of `Rounds`' fields, and none of any."""


def known_by(stretch: Stretch) -> tuple[Any, Any]:
    """The two numbers by which a stretch is known to the outside."""
    return stretch.net_bytes, stretch.high_bytes


def optimizer_sees(stages: RankStages) -> tuple[Any, Any, Any]:
    """Bytes of weights, of gradients, and of the optimizer's state."""
    kinds = [
        Counter({b: n for b, n in stages.states.items() if b.kind == k}) for k in ("weights", "optimizer")
    ]
    weights, optimizer = map(n_bytes_of, kinds)
    return weights, n_bytes_of(stages.grads), optimizer


def _equal_slices(yes: NDArray[np.bool_], axis: int) -> list[Column]:
    """The places along an axis whose slices are equal, together."""
    others = tuple(i for i in range(3) if i != axis)
    some, every = yes.any(axis=others), yes.all(axis=others)
    if (some == every).all():
        return [found for found in (np.flatnonzero(some), np.flatnonzero(~some)) if len(found)]
    slices = np.moveaxis(yes, axis, 0).reshape(yes.shape[axis], -1)
    _, group = np.unique(slices, axis=0, return_inverse=True)
    return [np.flatnonzero(group == i) for i in range(group.max() + 1)]


@lru_cache(maxsize=65536)
def dealt(model: Model, plan: Plan, kind: tuple[bool, bool, int], device: Device) -> tuple[int, ...]:
    """Where ZeRO-1 deals out tensors: states of the fullest rank, the update's net and high, its moments."""
    stage = Stage(model, plan, kind, device)
    stages = RankStages.of(stage, rank=Rank()).on_fullest_rank()
    kept = kept_grads(stages, [passes_of(stage)])
    update = chain("update", *updates(stages))
    states = n_bytes_of(stages.states) + n_bytes_of(kept)
    return states, update.net_bytes, update.high_bytes, optimizer_sees(stages)[2]


Asked = Callable[[Part], Sequence[Any]]


@final
class _Grid:
    """Stages of one structure at every combination of what is along the axes; `used` are some of these."""

    def __init__(self, part: Part, used: Column) -> None:
        self.axes, self.used = part.axes, used
        self.parts = [part]

    def __call__(self, asked: Asked) -> Column:
        """What is asked of a stage, one row for each number of the answer."""
        found: list[Column] = []
        i = 0
        while i < len(self.parts):
            part = self.parts[i]
            try:
                answer = asked(part)
            except Differ as differ:
                self.parts[i : i + 1] = part.split(differ.yes)
                continue
            found = found or [np.zeros(self.axes.shape, np.int64) for _ in answer]
            for row, number in zip(found, answer, strict=True):
                row[np.ix_(*part.at)] = number
            i += 1
        return np.stack([row.ravel()[self.used] for row in found])


@final
class Sheet:
    """What is known of grids of several structures, one after the other."""

    def __init__(self, grids: list[_Grid]) -> None:
        self.grids = grids
        self.bounds = np.cumsum([0, *[len(grid.used) for grid in grids]])
        self.grid = np.repeat(np.arange(len(grids)), np.diff(self.bounds))
        self.known: dict[Any, tuple[list[Column], set[int]]] = {}
        self.listed: dict[tuple[str, int], dict[Purpose, None]] = {}

    def grids_of(self, rows: Column) -> set[int]:
        """The grids that the rows are of."""
        return set(np.flatnonzero(np.bincount(self.grid[rows])).tolist())

    def __call__(self, name: Any, asked: Asked, rows: Column, grids: set[int]) -> list[Column]:
        """What is asked of the stages of some rows, and known by a name from then on."""
        tables, done = self.known.setdefault(name, ([], set()))
        for i in grids - done:
            found = self.grids[i](asked)
            if not tables:
                tables += [np.zeros(self.bounds[-1], np.int64) for _ in found]
            for table, numbers in zip(tables, found, strict=True):
                table[self.bounds[i] : self.bounds[i + 1]] = numbers
            done.add(i)
        return [table.take(rows) for table in tables]

    def purposes(self, field: str, grids: set[int]) -> list[Purpose]:
        """What any stage of the grids passes anything to collectives for: `Part.sent`."""
        for i in grids:
            if (field, i) not in self.listed:
                found: dict[Purpose, None] = {}

                def listed(part: Part, found: dict[Purpose, None] = found) -> tuple[int]:
                    found.update(dict.fromkeys(part.sent(field)))
                    return (0,)

                self.grids[i](listed)
                self.listed[field, i] = found
        return list(dict.fromkeys(purpose for i in sorted(grids) for purpose in self.listed[field, i]))


# A rank: for each plan


class _ChosenPasses:
    """The passes of a stage of each plan, looked up on a sheet; it answers as `Passes` do."""

    def __init__(self, sheet: Sheet, rows: Column, stage: Stage) -> None:
        self.stage = stage
        self._sheet, self._rows = sheet, rows
        self._grids = sheet.grids_of(rows)
        self._made: dict[Any, Stretch] = {}
        (n_bytes,) = self.ask("boundary", Part.boundary)
        self.received = _buffer(n_bytes), _buffer(n_bytes)
        stage.trace = cast(Any, _Boundary(_buffer(n_bytes), _buffer(n_bytes)))

    def ask(self, name: Any, asked: Asked) -> Any:
        """A number of each plan's stage, or several."""
        found = self._sheet(name, asked, self._rows, self._grids)
        return [many(row) for row in found]

    @cached_property
    def reduces(self) -> bool:
        return bool(self.ask("reduces", lambda part: [int(part.passes.reduces)])[0])

    @cached_property
    def widens(self) -> bool:
        return bool(self.ask("widens", lambda part: [int(part.passes.widens)])[0])

    def __getattr__(self, name: str) -> Callable[..., Stretch]:
        return lambda **how: self._stretch(name, how)

    def reduced(self, **how: bool) -> list[Stretch]:
        return [self._stretch("reduced", how)]

    def _stretch(self, name: str, how: dict[str, bool]) -> Stretch:
        how = {k: (self.reduces and bool(v)) if k == "last" else bool(v) for k, v in how.items()}
        key = name, *how.items()
        if key not in self._made:

            def asked(part: Part) -> tuple[Any, Any]:
                made = getattr(part.passes, name)(**how)
                return known_by(chain(name, *made) if isinstance(made, list) else made)

            self._made[key] = Stretch(name, (), (), 1, *self.ask(key, asked))
        return self._made[key]


def distinct(numbers: NDArray[Any]) -> tuple[Column, Column]:
    """The distinct of small numbers in order, and which of them each is."""
    least = int(numbers.min())
    numbers = np.subtract(numbers, least, dtype=np.int64)
    seen = np.zeros(int(numbers.max()) + 1, bool)
    seen[numbers] = True
    found = np.flatnonzero(seen)
    place = np.zeros(len(seen), np.int64)
    place[found] = np.arange(len(found))
    return found + least, place[numbers]


def combined(*columns: NDArray[Any]) -> tuple[Column, Column]:
    """One of each of the distinct combinations, and which of them each is."""
    found, key = distinct(columns[0])
    n_keys = len(found)
    for column in columns[1:]:
        found, place = distinct(column)
        key, n_keys = key * len(found) + place, n_keys * len(found)
        if n_keys > MOST_KEYS:
            found, key = distinct(key)
            n_keys = len(found)
    found, place = distinct(key)
    one = np.zeros(len(found), np.int64)
    one[place] = np.arange(len(key))
    return one, place


MOST_KEYS: Final = 2**18
"""Beyond so many possible combinations those that there are get new numbers."""

AT_ONCE: Final = 2**15
"""How many plans' passes are looked up at a time: arrays that a processor's cache holds."""


@final
class Columns:
    """Of each of many plans a number, by name: the varied fields, and what follows from them.

    Of some of the plans a column is made when it is asked for.
    """

    def __init__(self, n: int, source: "tuple[Columns, Column] | None" = None) -> None:
        self.n = n
        self._own: dict[str, Column] = {}
        self._source = source

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, name: str) -> Column:
        if name not in self._own and self._source is not None:
            whole, chosen = self._source
            self._own[name] = whole[name].take(chosen)
        return self._own[name]

    def __setitem__(self, name: str, column: Column) -> None:
        self._own[name] = column

    def first(self, name: str) -> int:
        """The number of the first plan."""
        if name in self._own or self._source is None:
            return int(self[name][0])
        whole, chosen = self._source
        return int(whole[name][chosen[0]])

    def some(self, chosen: NDArray[Any]) -> "Columns":
        """Those of some of the plans, by place or by mask."""
        places = np.flatnonzero(chosen) if chosen.dtype == np.bool_ else chosen
        return Columns(len(places), (self, places))

    def alike(self, *names: str) -> Iterator["Columns"]:
        """All of them, apart where one of these numbers differs, and at most `AT_ONCE` at a time."""
        _, group = combined(*[self[name] for name in names])
        for i in range(group.max() + 1):
            places = np.flatnonzero(group == i)
            for start in range(0, len(places), AT_ONCE):
                yield self.some(places[start : start + AT_ONCE])


def _columns(model: Model, plans: Plans) -> Columns:
    """The varied fields, m micro-batches, the mode, blocks of `each` stage, of which `odd` have one more."""
    of = Columns(len(plans))
    for name in VARIED:
        of[name] = plans.column(name)
    of["plan"] = np.arange(len(plans))
    of["m"] = plans.base.global_batch // (of["dp"] * of["dp_replicate"] * of["micro_batch"])
    of["mode"] = np.where(of["zero"] >= 2, of["zero"], of["dp"] > 1)
    of["each"], of["odd"] = np.divmod(model.n_layers, of["pp"] * of["virtual_stages"])
    return of


Kind = Literal["first", "longer", "shorter", "last"]
"""A pipeline's stages, or ranks: between first and last those with one block more come before the others."""


Place = tuple[Ends, str]
"""Where a stage, or a rank, is to be looked up: the sheet of its ends, the column of its rows there."""


class RankPlaces(NamedTuple):
    """A rank of a pipeline; its stages, where they are in the pipeline, and all of them as one."""

    pp: int
    indices: tuple[int, ...]
    stages: tuple[Place, ...]
    own: Place


SHEET_COLUMNS: Final = (
    "mode",
    "pp",
    "offload",
    "sequence_parallel",
    "recompute",
    "recompute_blocks",
    "dp",
    "dp_replicate",
    "tp",
    "micro_batch",
)
"""What a stage depends on beside its place and its number of blocks."""


class Search:
    """Plans on their way to their figures."""

    def __init__(self, model: Model, plans: Plans, device: Device) -> None:
        self.model, self.base, self.device = model, plans.base, device
        self.found = _Found(len(plans))
        self.sheets: dict[tuple[str, Ends], Sheet] = {}
        self.blocks: dict[Ends, Column] = {}
        self.of = _columns(model, plans)

    def run(self) -> _Found:
        """The figures of all plans."""
        alone = self.of["pp"] == 1
        if alone.any():
            self._alone(self.of.some(alone))
        if not alone.all():
            self._piped(self.of.some(~alone))
        return self.found

    def _alone(self, of: Columns) -> None:
        both = True, True
        self._place("stage", both, [("stage whole", of["each"] > 0, of["each"])], of)
        self._place("rank", both, [("rank whole", of["each"] > 0, of["each"])], of)
        self._alike(of, np.zeros(len(of), np.int64), ((both, "stage whole"),), (both, "rank whole"))

    def _piped(self, of: Columns) -> None:
        n_stages = of["pp"] * of["virtual_stages"]
        each, odd, v = of["each"], of["odd"], of["virtual_stages"]
        folded = np.isin(of["schedule"], [SCHEDULES.index(name) for name in V_SCHEDULES])
        always = np.ones(len(each), bool)
        self._place("stage", (True, False), [("stage first", always, each + (odd > 0))], of)
        between = [("stage longer", odd > 1, each + 1), ("stage shorter", odd < n_stages - 1, each)]
        self._place("stage", (False, False), between, of)
        self._place("stage", (False, True), [("stage last", always, each)], of)
        own = v * each + odd // of["pp"]
        with_first = v * each + -(-odd // of["pp"])
        with_first = np.where(folded, v * each + (odd > 0), with_first)
        self._place("rank", (True, False), [("rank first", ~folded, with_first)], of)
        self._place("rank", (True, True), [("rank ends", folded, with_first)], of)
        middle = (of["pp"] > 2) | folded
        self._place(
            "rank", (False, False), [("rank longer", middle, own + 1), ("rank shorter", middle, own)], of
        )
        self._place("rank", (False, True), [("rank last", ~folded, own)], of)
        single = np.isin(of["schedule"], [SCHEDULES.index(name) for name in SINGLE_STAGE_SCHEDULES])
        if single.any():
            self._one_stage_each(of.some(single))
        if not single.all():
            self._several_stages_each(of.some(~single))

    def _one_stage_each(self, of: Columns) -> None:
        """Of ranks with equally many blocks the first can be the worst: it warms up longest."""
        n, pp, odd = len(of), of["pp"], of["odd"]
        fewer = np.maximum(odd, 1)
        for kind, ends, rank, there in (
            ("first", (True, False), np.zeros(n, np.int64), pp > 1),
            ("longer", (False, False), np.ones(n, np.int64), (odd > 1) & (pp > 2)),
            ("shorter", (False, False), fewer, fewer < pp - 1),
            ("last", (False, True), pp - 1, pp > 1),
        ):
            if there.any():
                own = ends, f"rank {kind}"
                self._alike(of.some(there), rank[there], ((ends, f"stage {kind}"),), own)

    def _several_stages_each(self, of: Columns) -> None:
        """Of each schedule, number of ranks and of stages the ranks that can be the worst.

        Where backward passes are whole those are the first of ranks with equal stages: they warm up longest.
        """
        one, group = combined(of["schedule"], of["pp"], of["virtual_stages"])
        for i in range(len(one)):
            some = of.some(group == i)
            seen = set()
            for rank in self._ranks(some):
                if rank.stages in seen and SCHEDULES[some.first("schedule")] not in SPLITTING_SCHEDULES:
                    continue
                seen.add(rank.stages)
                self._alike(some, np.full(len(some), rank.pp), rank.stages, rank.own)

    def _ranks(self, of: Columns) -> Iterator[RankPlaces]:
        """The ranks of plans with equally many stages, and as many with one block more, in one schedule."""
        plan = with_values(
            self.base,
            pp=of.first("pp"),
            virtual_stages=of.first("virtual_stages"),
            schedule=SCHEDULES[of.first("schedule")],
        )
        odd, folded = of.first("odd"), plan.schedule in V_SCHEDULES
        for rank in range(plan.pp):
            indices = plan.stages_of(rank)
            stages = []
            for index in indices:
                ends = index == 0, index == plan.n_stages - 1
                kind = "first" if ends[0] else "last" if ends[1] else "longer" if index < odd else "shorter"
                stages.append((ends, f"stage {kind}"))
            ends = rank == 0, rank == (0 if folded else plan.pp - 1)
            kind = "longer" if sum(index < odd for index in indices) > odd // plan.pp else "shorter"
            kind = ("ends" if folded else "first") if ends[0] else "last" if ends[1] else kind
            yield RankPlaces(rank, indices, tuple(stages), (ends, f"rank {kind}"))

    def _alike(self, of: Columns, rank: Column, stages: Sequence[Place], own: Place) -> None:
        """Ranks that have such stages, and all of them as one."""
        of["rank"] = rank
        for some in of.alike("schedule", "mode"):
            self._steps(some, stages, own)

    def _steps(self, of: Columns, stages: Sequence[Place], own: Place) -> None:
        """What ranks of one schedule hold, by its own code; taken apart where that takes different turns."""
        try:
            rest, high = self._rest_and_high(of, stages, own)
        except Differ as differ:
            for part in (differ.yes, ~differ.yes):
                self._steps(of.some(part), stages, own)
        else:
            self.found.add(of["plan"], of["rank"], rest, high)

    def _rest_and_high(self, of: Columns, places: Sequence[Place], own: Place) -> tuple[Column, Column]:
        several = len(places) > 1 or SCHEDULES[of.first("schedule")] not in SINGLE_STAGE_SCHEDULES
        pp, rank = (of.first(n) if several else many(of[n]) for n in ("pp", "rank"))
        micro_batch, dp = many(of["micro_batch"]), 2 if of.first("mode") else 1
        plan = with_values(
            self.base,
            dp=dp,
            dp_replicate=1,
            micro_batch=micro_batch,
            pp=pp,
            virtual_stages=of.first("virtual_stages"),
            zero=of.first("zero"),
            schedule=SCHEDULES[of.first("schedule")],
            global_batch=many(of["m"]) * (dp * micro_batch),
        )
        made = {place: self._chosen(of, plan, place) for place in dict.fromkeys(places)}
        passes = [made[place] for place in places]
        stages = RankStages.of(*[one.stage for one in passes], rank=Rank(pp=rank))
        stages.received = [one.received for one in passes]
        states, update = self._held(of, own)
        step = chain("step", *schedule(stages, cast(list[Passes], passes)), update)
        world_size = of["pp"] * of["dp_replicate"] * of["dp"] * of["tp"]
        rest = states + n_bytes_of(stages.inputs) + n_bytes_of(left_behind(stages))
        rest = rest + mesh_bytes(many(world_size), self.device)
        return np.asarray(rest), np.asarray(step.high_bytes)

    def _chosen(self, of: Columns, plan: Plan, place: Place) -> _ChosenPasses:
        ends, name = place
        stage = Stage(self.model, plan, (*ends, 0), self.device)
        return _ChosenPasses(self.sheets["stage", ends], of[name], stage)

    def _held(self, of: Columns, own: Place) -> tuple[Column, Stretch]:
        """States, and the update of them: those of a rank's stages are those of one stage with all blocks."""
        sheet, rows = self.sheets["rank", own[0]], of[own[1]]
        grids = sheet.grids_of(rows)
        (states,) = sheet("states", Part.states, rows, grids)
        net, high = sheet("update", Part.update, rows, grids)
        if (of["zero"] == 1).any():
            chosen = of["zero"] == 1
            states[chosen], net[chosen], high[chosen], _ = self._dealt(of.some(chosen), own)
        return states, Stretch("update", (), (), 1, many(net), many(high))

    def _dealt(self, of: Columns, own: Place) -> Column:
        """What `dealt` says of each."""
        blocks = self.blocks[own[0]][of[own[1]]]
        one, place = combined(of["tp"], of["dp"], of["sequence_parallel"], of["pp"] > 1, blocks)
        rows = []
        for i in one:
            values = {"zero": 1, "tp": int(of["tp"][i]), "dp": int(of["dp"][i]), "recompute": "none"}
            plan = with_values(self._like(of.some(np.array([i]))), **values)
            rows.append(dealt(self.model, plan, (*own[0], int(blocks[i])), self.device))
        return np.array(rows, np.int64)[place].T

    def _like(self, of: Columns) -> Plan:
        """A plan of the first one's structure: what is along no axis decides what its stages are made of."""
        mode = of.first("mode")
        return with_values(
            self.base,
            dp=2 if mode else 1,
            dp_replicate=1,
            pp=2 if of.first("pp") > 1 else 1,
            zero=mode if mode >= 2 else 0,
            sequence_parallel=bool(of.first("sequence_parallel")),
            recompute=RECOMPUTES[of.first("recompute")],
            recompute_blocks=None,
            schedule="1f1b",
            virtual_stages=1,
            micro_batch=1,
            offload=bool(of.first("offload")),
        )

    def _place(
        self, sheet: str, ends: Ends, entries: Sequence[tuple[str, NDArray[np.bool_], Column]], of: Columns
    ) -> None:
        """Put stages with such ends, or ranks, on a sheet, and in a column of that name which row each has.

        An entry: the column's name, which plans have such a stage, and of how many blocks.
        """
        parts = [of.some(there) for _, there, _ in entries]
        every = Columns(sum(map(len, parts)))
        for name in SHEET_COLUMNS:
            every[name] = np.concatenate([part[name] for part in parts])
        every["blocks"] = np.concatenate([n_blocks[there] for _, there, n_blocks in entries])
        rows = np.zeros(len(every), np.int64)
        if len(rows):
            self.sheets[sheet, ends] = self._sheet(ends, every, rows, whole=sheet == "rank")
        start = 0
        for (name, there, _), part in zip(entries, parts, strict=True):
            found = np.zeros(len(there), np.int64)
            found[there] = rows[start : start + len(part)]
            of[name] = found
            start += len(part)

    def _sheet(self, ends: Ends, of: Columns, rows: Column, *, whole: bool) -> Sheet:
        """The grids of stages, and their rows; of `whole` ranks, which no micro-batch matters to."""
        flags = [of[name] for name in ("offload", "sequence_parallel")]
        recompute = of["recompute"] * (not whole)
        structures, structure = combined(of["mode"], *flags, recompute)
        replicas = np.minimum(of["dp_replicate"], 2)
        limit, n_blocks = of["recompute_blocks"], of["blocks"]
        most = n_blocks if whole else np.where(limit == NO_LIMIT, n_blocks, np.minimum(limit, n_blocks))
        micro_batch = np.ones_like(n_blocks) if whole else of["micro_batch"]
        grids, start = [], 0
        order = np.argsort(structure, kind="stable")
        bounds = np.searchsorted(structure[order], np.arange(len(structures) + 1))
        for begin, end in pairwise(bounds):
            own = order[begin:end]
            plan = self._like(of.some(own[:1]))
            if whole:
                plan = with_values(plan, recompute="none")
            tensor, t = combined(of["tp"][own], micro_batch[own])
            blocks, n = combined(n_blocks[own], most[own])
            data, d = np.zeros(1, np.int64), np.zeros_like(n)
            if plan.fsdp:
                data, d = combined(of["dp"][own], replicas[own])
            axes = _Axes(
                tensor=tuple([(int(of["tp"][own[j]]), int(micro_batch[own[j]])) for j in tensor]),
                data=tuple([(int(of["dp"][own[j]]), int(replicas[own[j]])) for j in data]),
                blocks=tuple([(int(n_blocks[own[j]]), int(most[own[j]])) for j in blocks]),
            )
            used, place = distinct((t * len(data) + d) * len(blocks) + n)
            at = tuple([np.arange(length) for length in axes.shape])
            part = Part(model=self.model, plan=plan, ends=ends, device=self.device, axes=axes, at=at)
            grids.append(_Grid(part, used))
            rows[own] = start + place
            start += len(used)
        if whole:
            self.blocks[ends] = np.zeros(start, np.int64)
            self.blocks[ends][rows] = n_blocks
        return Sheet(grids)


class _Boundary(NamedTuple):
    """What a schedule asks a trace for."""

    boundary: Buffer
    boundary_grad: Buffer


def _buffer(n_bytes: Any) -> Buffer:
    return Buffer("boundary", (), UINT8, n_bytes, "activations")
