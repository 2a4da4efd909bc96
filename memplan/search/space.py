"""Which plans there are: every mesh of so many GPUs, and on each every way of dividing the training."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, Final, NamedTuple, final

import numpy as np

from memplan.errors import MemplanError
from memplan.models import Model
from memplan.plan import RECOMPUTES, SCHEDULES, SINGLE_STAGE_SCHEDULES, V_SCHEDULES, Plan, check_plan
from memplan.search.plans import VARIED, Column, Plans, number_of

CHUNK: Final = 2**18
"""About how many plans are held at a time."""

RUNS: Final = -1
"""Stands for the rule of a plan that no rule refuses."""


class Mesh(NamedTuple):
    """Ranks along each axis."""

    pp: int
    dp_replicate: int
    dp: int
    tp: int

    @property
    def n_replicas(self) -> int:
        """Parts of the global batch that are trained on at the same time."""
        return self.dp_replicate * self.dp


class Structure(NamedTuple):
    """All else but the micro-batch."""

    schedule: str
    virtual_stages: int
    zero: int
    offload: bool
    sequence_parallel: bool
    recompute: str
    recompute_blocks: int | None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Some plans, and the rule that refuses each: its place in the space's `rules`, or `RUNS`."""

    plans: Plans
    rule: Column

    def __len__(self) -> int:
        return len(self.rule)


@final
@dataclass(frozen=True, kw_only=True)
class Space:
    """All plans of `n_gpus` GPUs that have what `base` has, but for the fields that vary.

    A field takes the values of its range. One without a range takes every value that makes a difference:
    a single replica needs no ZeRO, a single tensor rank no sequence parallelism; of the numbers of virtual
    stages that cut the model into equally large stages the smallest counts, and so does of the numbers of
    recomputed blocks that are all of every stage's the first.
    """

    model: Model
    n_gpus: int
    base: Plan
    ranges: Mapping[str, tuple[Any, ...]]
    rules: dict[str, int] = field(default_factory=dict)
    """What a plan was refused for, by the first one's text, numbered as they were met."""

    def meshes(self) -> Iterator[Mesh]:
        """Every mesh of all GPUs, from the least divided model to the most."""
        for pp, tp in product(self._of("pp", divisors(self.n_gpus)), self._of("tp", divisors(self.n_gpus))):
            if self.n_gpus % (pp * tp):
                continue
            replicas = self.n_gpus // (pp * tp)
            for dp in self._of("dp", divisors(replicas)):
                if replicas % dp == 0 and replicas // dp in self._of("dp_replicate", divisors(replicas)):
                    mesh = Mesh(pp, replicas // dp, dp, tp)
                    if self._matters(mesh):
                        yield mesh

    def _matters(self, mesh: Mesh) -> bool:
        """Replicas of a single shard are no shards; replicas of shards need a ZeRO stage that shards."""
        if mesh.dp_replicate == 1 or "dp_replicate" in self.ranges:
            return True
        return mesh.dp > 1 and max(self._of("zero", (3,))) >= 2

    def structures(self, mesh: Mesh) -> list[Structure]:
        """Every way of dividing the training on a mesh."""
        found = []
        for schedule, virtual_stages in self._schedules(mesh):
            for zero in self._of("zero", _zeros(mesh)):
                found += [
                    Structure(schedule, virtual_stages, zero, offload, sequence_parallel, recompute, blocks)
                    for offload, sequence_parallel, recompute in product(
                        self._of("offload", (False, True) if zero >= 2 else (False,)),
                        self._of("sequence_parallel", (False, True) if mesh.tp > 1 else (False,)),
                        self._of("recompute", RECOMPUTES),
                    )
                    for blocks in (
                        self._recompute_blocks(mesh.pp * virtual_stages) if recompute != "none" else (None,)
                    )
                ]
        return found

    def micro_batches(self, mesh: Mesh) -> tuple[int, ...]:
        """Those that divide a replica's part of the batch; where none does, the smallest stands for all."""
        each, rest = divmod(self.base.global_batch, mesh.n_replicas)
        if rest:
            return self._of("micro_batch", (1,))[:1]
        asked = self._of("micro_batch", divisors(each))
        return tuple(n for n in asked if each % n == 0) or asked[:1]

    def chunks(self, most: int = CHUNK) -> Iterator[Chunk]:
        """All plans, about `most` at a time. What is refused at every micro-batch is there once."""
        found: list[Chunk] = []
        known: dict[Mesh, _Structures] = {}
        for mesh in self.meshes():
            few = mesh._replace(dp=min(mesh.dp, 2), dp_replicate=min(mesh.dp_replicate, 2))
            if few not in known:
                known[few] = _Structures(self, few)
            found.append(known[few].on(mesh))
            if sum(map(len, found)) >= most:
                yield _joined(found)
                found = []
        if found:
            yield _joined(found)

    def _of(self, field: str, usual: tuple[Any, ...]) -> tuple[Any, ...]:
        return self.ranges.get(field, usual)

    def _recompute_blocks(self, n_stages: int) -> tuple[int | None, ...]:
        largest_stage = -(-self.model.n_layers // n_stages)
        asked = self._of("recompute_blocks", (None,))
        some = [n for n in asked if n is not None and n < largest_stage]
        every = [n for n in asked if n is None or n >= largest_stage]
        return (*some, *every[:1])

    def _schedules(self, mesh: Mesh) -> Iterator[tuple[str, int]]:
        """Schedules, and stages per rank."""
        if mesh.pp == 1:
            yield self._of("schedule", ("1f1b",))[0], 1
            return
        for schedule in self._of("schedule", SCHEDULES):
            for virtual_stages in self._of("virtual_stages", self._virtual_stages(schedule, mesh.pp)):
                yield schedule, virtual_stages

    def _virtual_stages(self, schedule: str, pp: int) -> tuple[int, ...]:
        if schedule in SINGLE_STAGE_SCHEDULES:
            return (1,)
        if schedule in V_SCHEDULES:
            return (2,)
        least = 1 if schedule == "zero-bubble" else 2
        most = max(self.model.n_layers // pp, least)
        largest_stage = {-(-self.model.n_layers // (pp * v)): v for v in range(most, least - 1, -1)}
        return tuple(sorted(largest_stage.values()))


class _Structures:
    """The structures of meshes that differ only in how many replicas there are, as columns.

    No rule of a plan asks how many replicas there are, only whether there are several; and of the micro-batch
    only how many of them the schedule gets.
    """

    def __init__(self, space: Space, few: Mesh) -> None:
        self.space, self.few = space, few
        self.known: dict[tuple[Structure, int], int] = {}
        structures = space.structures(few)
        self.rule = np.array([self._rule(structure) for structure in structures], np.int64)
        if (self.rule != RUNS).all():
            structures, self.rule = structures[:1], self.rule[:1]
        self.columns = {
            name: np.array([number_of(name, value) for value in values], np.int64)
            for name, values in zip(Structure._fields, zip(*structures, strict=True), strict=True)
        }
        schedules = [structure[:2] for structure in structures]
        self.examples = {s[:2]: s for s, rule in zip(structures, self.rule, strict=True) if rule == RUNS}
        self.schedules = list(dict.fromkeys(schedules))
        self.schedule = np.array([self.schedules.index(schedule) for schedule in schedules], np.int64)

    def on(self, mesh: Mesh) -> Chunk:
        """All plans on one of the meshes."""
        micro_batches = np.array(self.space.micro_batches(mesh), np.int64)
        each, rest = divmod(self.space.base.global_batch, mesh.n_replicas)
        if rest or (each % micro_batches).any():
            return self._undivided(mesh, int(micro_batches[0]))
        unfilled = np.array(
            [[self._unfilled(s, each // int(n)) for n in micro_batches] for s in self.schedules]
        )
        there = np.repeat((self.rule == RUNS)[:, None], len(micro_batches), axis=1)
        there[:, 0] = True
        structure, micro_batch = np.nonzero(there)
        rule = self.rule[structure]
        rule = np.where(rule == RUNS, unfilled[self.schedule[structure], micro_batch], rule)
        return self._chunk(mesh, structure, micro_batches[micro_batch], rule)

    def _undivided(self, mesh: Mesh, micro_batch: int) -> Chunk:
        """One plan for a mesh whose replicas cannot share the global batch."""
        first = np.zeros(1, np.int64)
        values = mesh._asdict() | {"micro_batch": micro_batch}
        rule = self._numbered(refusal(self.space.model, self.space.base, values))
        return self._chunk(mesh, first, first + micro_batch, first + rule)

    def _chunk(self, mesh: Mesh, structure: Column, micro_batch: Column, rule: Column) -> Chunk:
        columns = {name: column[structure] for name, column in self.columns.items()}
        columns |= {name: np.full(len(structure), n, np.int64) for name, n in mesh._asdict().items()}
        columns["micro_batch"] = micro_batch
        return Chunk(plans=Plans(base=self.space.base, columns=columns), rule=rule)

    def _rule(self, structure: Structure, m: int = 0) -> int:
        """The rule that refuses it with so many micro-batches; 0: one for each pipeline stage.

        No rule asks how many blocks are recomputed, only whether that is said.
        """
        if structure.recompute_blocks is not None:
            structure = structure._replace(recompute_blocks=1)
        if (structure, m) not in self.known:
            values = self.few._asdict() | structure._asdict()
            values |= {"micro_batch": 1, "global_batch": m * self.few.n_replicas}
            self.known[structure, m] = self._numbered(refusal(self.space.model, self.space.base, values))
        return self.known[structure, m]

    def _numbered(self, text: str | None) -> int:
        return RUNS if text is None else self.space.rules.setdefault(text, len(self.space.rules))

    def _unfilled(self, schedule: tuple[str, int], m: int) -> int:
        example = self.examples.get(schedule)
        return RUNS if example is None else self._rule(example, m)


def refusal(model: Model, base: Plan, values: Mapping[str, Any]) -> str | None:
    """Why a plan cannot run; None if it can."""
    try:
        check_plan(model, replace(base, **values))
    except MemplanError as error:
        return str(error)
    return None


def divisors(n: int) -> tuple[int, ...]:
    """In order.

    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return tuple(small + [n // d for d in reversed(small) if d * d != n])


def _zeros(mesh: Mesh) -> tuple[int, ...]:
    if mesh.dp_replicate > 1:
        return (2, 3)
    return (0, 1, 2, 3) if mesh.dp > 1 else (0,)


def _joined(chunks: Sequence[Chunk]) -> Chunk:
    plans = [chunk.plans for chunk in chunks]
    columns = {name: np.concatenate([p.columns[name] for p in plans]) for name in VARIED}
    return Chunk(
        plans=Plans(base=plans[0].base, columns=columns),
        rule=np.concatenate([chunk.rule for chunk in chunks]),
    )
