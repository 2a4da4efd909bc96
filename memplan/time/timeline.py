"""The ranks of a pipeline played together: sends meet receives, and what a rank waits for them is its bubble.

A pass starts when its rank is free and its input is there: of a forward pass what the stage before sends, of
a backward pass what the stage after sends. The compute stream of the rank that sends waits for the send,
unless the send is on a stream of its own.
Turns that every rank repeats are played until all ranks advance by as much in each; the others are counted.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import add
from typing import Final, NamedTuple, final

from memplan.errors import MissingRule
from memplan.plan import Plan
from memplan.record import PassPart, Stretch
from memplan.time.prices import Prices
from memplan.time.streams import CAUSES, PER_S, Instant, Program, Programs, Spent, Streams

FEWEST_TURNS: Final = 4
"""The repetitions of a turn that are played before its ranks are asked whether they advance equally."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TimedPass:
    """A pass of a micro-batch through a stage: its pipeline rank, its start and its end."""

    rank: int
    stage: int
    part: PassPart
    micro_batch: int
    start_s: float
    stop_s: float


class RankTime(NamedTuple):
    """What a rank's compute stream spends on each of `memplan.time.streams.CAUSES`, and when it is done."""

    spent: Spent
    done: Instant


def rank_times(steps: Sequence[Stretch], plan: Plan, prices: Prices) -> list[RankTime]:
    """The time of one rank of each stage of the pipeline, given their steps."""
    programs = Programs(plan, prices)
    if len(steps) == 1:
        streams = Streams()
        streams.play(programs(steps[0]))
        streams.finish()
        return [RankTime(tuple(streams.spent), streams.now)]
    ranks = _ranks(steps, plan, programs)
    return _with_turns_counted(ranks, plan) or _Pipeline(map(_unrolled, ranks), plan).run()


def timed_passes(steps: Sequence[Stretch], plan: Plan, prices: Prices) -> Iterator[TimedPass]:
    """Every pass of a step, rank by rank, in the order of each rank's record."""
    pipeline = _Pipeline(map(_unrolled, _ranks(steps, plan, Programs(plan, prices))), plan)
    pipeline.run()
    for number, rank in enumerate(pipeline.ranks):
        seen: Counter[tuple[int, PassPart]] = Counter()
        for (node, *_), (start, stop) in zip(rank.ahead, rank.ran, strict=True):
            if node is None or node.stage is None:
                continue
            key = node.stage, "backward" if node.part == "backward-input" else node.part
            i, seen[key] = seen[key], seen[key] + 1
            if node.part != "forward" and plan.pipeline_schedule.backward_reversed:
                i = plan.n_micro_batches - 1 - i
            yield TimedPass(
                rank=number, stage=node.stage, part=node.part, micro_batch=i,
                start_s=start / PER_S, stop_s=stop / PER_S,
            )  # fmt: skip


# --- The nodes of a rank ----------------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Node:
    """A pass of a stage, or what a rank does between passes; `took`: None if it leaves a stream busy.

    `under_way`: how long after its end what it has sent arrives.
    """

    program: Program
    took: Instant | None
    under_way: Instant
    spent: Spent
    stage: int | None
    part: PassPart


class _Turns(NamedTuple):
    """Nodes of a rank in order, several times."""

    nodes: list[_Node]
    times: int


_Turned = list[_Turns]
"""A rank's step, its outermost loops as they are."""


def _ranks(steps: Sequence[Stretch], plan: Plan, programs: Programs) -> list[_Turned]:
    found = []
    for rank, step in enumerate(steps):
        known: dict[Stretch, list[_Node]] = {}
        stages = plan.stages_of(rank)
        parts = step.parts if _is_loop(step) else (step,)
        turns = [_Turns(_nodes(part, stages, programs, known), _n_turns(part)) for part in parts]
        found.append(turns)
    return found


def _is_loop(stretch: Stretch) -> bool:
    """Whether a stretch consists of passes."""
    return stretch.has_passes and stretch.stage_pass is None


def _n_turns(stretch: Stretch) -> int:
    return stretch.repeats if _is_loop(stretch) else 1


def _nodes(
    stretch: Stretch, stages: Sequence[int], programs: Programs, known: dict[Stretch, list[_Node]]
) -> list[_Node]:
    """One repetition of a stretch that consists of passes, or all of one that does not."""
    if stretch in known:
        return known[stretch]
    found: list[_Node] = []
    if _is_loop(stretch):
        for part in stretch.parts:
            found += _nodes(part, stages, programs, known) * _n_turns(part)
    elif stretch.stage_pass is not None or stretch.streams or stretch.counts:
        program, alone = programs(stretch), programs.alone(stretch)
        took = alone.now if alone.at_rest <= alone.now else None
        local, part_of = stretch.stage_pass or (None, "forward")
        stage = None if local is None else stages[local]
        spent, under_way = tuple(alone.spent), programs.under_way(stretch)
        found.append(_Node(program, took, under_way, spent, stage, part_of))
    known[stretch] = found
    return found


def _unrolled(turned: _Turned) -> list[_Node | None]:
    found: list[_Node | None] = []
    for nodes, times in turned:
        found += nodes * times
    return found


# --- All ranks together -----------------------------------------------------------------------------------

_Ends = list[Instant]
"""When what a stage's passes in one direction send arrives, in order."""


@final
class _Rank:
    """A rank's nodes, how far it has come, and when.

    `ahead`: each node with its times, the ends that it waits for, and the ends to which it adds its own. A
    None among the nodes adds to `marks` when the rank comes to it, and to `busy` if a stream is not free.
    `ran`: the start and the end of each node
    """

    __slots__ = ("ahead", "at_rest", "busy", "marks", "now", "played", "ran", "streams")

    def __init__(self, nodes: list[_Node | None], pipeline: "_Pipeline") -> None:
        self.now: Instant = 0
        self.marks: _Ends = []
        self.ran: list[tuple[Instant, Instant]] = []
        self.streams, self.at_rest, self.busy = Streams(), 0, 0
        self.played: Counter[_Node] = Counter()
        ends = {node: pipeline.ends(node) for node in set(nodes) if node}
        self.ahead = [
            (node, node.took, node.under_way, *ends[node]) if node else (None, 0, 0, None, self.marks)
            for node in nodes
        ]

    def advance(self) -> bool:
        """Runs what can be run; whether anything could."""
        ahead, ran, now = self.ahead, self.ran, self.now
        before = len(ran)
        for at in range(before, len(ahead)):
            node, took, under_way, needed, done = ahead[at]
            if needed is not None and done is not None:
                n = len(done)
                if n == len(needed):
                    break
                if needed[n] > now:
                    now = needed[n]
            start = now
            if took is not None and now >= self.at_rest:
                now += took
            elif node is None:
                self.busy += 1
            else:
                self.played[node] += 1
                now = self.streams.played_from(now, node.program)
                self.at_rest = self.streams.at_rest
            if done is not None:
                done.append(now + under_way)
            ran.append((start, now))
        self.now = now
        return len(ran) > before

    @property
    def is_done(self) -> bool:
        """Whether all has run."""
        return len(self.ran) == len(self.ahead)

    def time(self) -> RankTime:
        """What it has spent its time on, and when it is done."""
        self.streams.begin(self.now)
        self.streams.finish()
        alone = Counter([node for node, *_ in self.ahead if node])
        alone.subtract(self.played)
        return RankTime(tuple(map(add, _spent(alone), self.streams.spent)), self.streams.now)


@final
class _Pipeline:
    """All ranks of a pipeline."""

    def __init__(self, ranks: Iterable[list[_Node | None]], plan: Plan) -> None:
        self.last = plan.n_stages - 1
        self.forward: list[_Ends] = [[] for _ in range(plan.n_stages)]
        self.backward: list[_Ends] = [[] for _ in range(plan.n_stages)]
        self.ranks = [_Rank(nodes, self) for nodes in ranks]

    def ends(self, node: _Node) -> tuple[_Ends | None, _Ends | None]:
        """The ends that a node waits for, and those to which it adds its own."""
        stage = node.stage
        if stage is None or node.part == "backward-weight":
            return None, None
        if node.part == "forward":
            return self.forward[stage - 1] if stage else None, self.forward[stage]
        return self.backward[stage + 1] if stage < self.last else None, self.backward[stage]

    def run(self) -> list[RankTime]:
        """The time of each rank, after all have run to their end."""
        left = self.ranks
        while left:
            advanced = [rank.advance() for rank in left]
            if True not in advanced:
                raise MissingRule("the ranks of this record wait for each other: no pipeline's schedule.")
            left = [rank for rank in left if not rank.is_done]
        return [rank.time() for rank in self.ranks]


def _spent(counts: Counter[_Node]) -> Spent:
    found = [0] * len(CAUSES)
    for node, n in counts.items():
        for i, spent in enumerate(node.spent):
            found[i] += n * spent
    return tuple(found)


# --- Turns that are counted -------------------------------------------------------------------------------


def _with_turns_counted(ranks: Sequence[_Turned], plan: Plan) -> list[RankTime] | None:
    """The time of each rank where all repeat a turn and come to advance equally; None: they do not.

    At the end of all ranks' loops, what is to come depends on when each rank is there, and on the passes that
    have ended and that no other rank has waited for yet. If all of these are later than one turn before by
    the same time, each turn more makes all that follows later by that time.
    """
    loops = [max(turned, key=lambda turns: len(turns.nodes) * (turns.times - 1)) for turned in ranks]
    n_each = {n for loop in loops for n in _passes_of(loop.nodes).values()}
    plain = all(node.took is not None for loop in loops for node in loop.nodes)
    complete = sum(len(_passes_of(loop.nodes)) for loop in loops) == 2 * plan.n_stages
    if len(n_each) != 1 or not plain or not complete:
        return None
    n_turns = FEWEST_TURNS
    while (left_out := min(loop.times for loop in loops) - n_turns) > n_turns:
        fewer = [_fewer(turned, loop, left_out) for turned, loop in zip(ranks, loops, strict=True)]
        pipeline = _Pipeline([nodes for nodes, _ in fewer], plan)
        times = pipeline.run()
        delay = _delay(pipeline, [passes for _, passes in fewer], *n_each)
        if delay is not None:
            found = []
            for loop, time in zip(loops, times, strict=True):
                more = [left_out * n for n in _spent(Counter(loop.nodes))]
                found.append(RankTime(tuple(map(add, time.spent, more)), time.done + left_out * delay))
            return found
        n_turns *= 4
    return None


_Passes = Counter[tuple[int, bool]]
"""The passes of each stage, by whether they are forward; the second part of a split one is left out."""


def _passes_of(nodes: Iterable[_Node]) -> _Passes:
    return Counter(
        [
            (node.stage, node.part == "forward")
            for node in nodes
            if node.stage is not None and node.part != "backward-weight"
        ]
    )


def _fewer(turned: _Turned, loop: _Turns, left_out: int) -> tuple[list[_Node | None], _Passes]:
    """A rank's nodes with fewer turns, and marks after the last two; the passes up to the last mark."""
    nodes: list[_Node | None] = []
    passes: _Passes = Counter()
    for turns in turned:
        if turns is loop:
            nodes += loop.nodes * (loop.times - left_out - 1)
            nodes += [None, *loop.nodes, None]
            passes = _passes_of([node for node in nodes if node])
        else:
            nodes += turns.nodes * turns.times
    return nodes, passes


def _delay(pipeline: _Pipeline, passes: Sequence[_Passes], n_each: int) -> Instant | None:
    """By how much a turn makes later all that follows; None if not all by as much."""
    if any(rank.busy for rank in pipeline.ranks):
        return None
    delays = {rank.marks[1] - rank.marks[0] for rank in pipeline.ranks}
    counted: _Passes = Counter()
    for each in passes:
        counted += each
    for ends, forward, way in ((pipeline.forward, True, 1), (pipeline.backward, False, -1)):
        for stage, own in enumerate(ends):
            if 0 <= stage + way <= pipeline.last:
                used, made = counted[stage + way, forward], counted[stage, forward]
                if not n_each <= used <= made:
                    return None
                delays |= {own[i] - own[i - n_each] for i in range(used, made)}
    return delays.pop() if len(delays) == 1 else None
