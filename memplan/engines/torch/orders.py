"""The order in which a rank of a pipeline runs its passes: compressed, so that its length does not grow.

Micro-batches are taken in turn, each pass of a stage the next one of its kind, so that an action need not
name its micro-batch. (`looped-bfs` takes those of its backward passes in reverse.)

Source: `torch.distributed.pipelining.schedules:ScheduleLoopedBFS._calculate_single_rank_operations`, and that
of each other schedule's class.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import repeat
from operator import index, sub
from typing import Final, Literal, NamedTuple

from memplan.plan import SPLITTING_SCHEDULES, Plan, Schedule

ActionKind = Literal[
    "forward",
    "backward",
    "last-backward",
    "backward-input",
    "backward-weight",
    "unshard",
    "reshard",
    "reduce",
]
"""A backward pass is whole, or in parts: the input's gradient first, the gradients of the weights later.

In a stage's last one DDP reduces. What comes after are FSDP2's: to gather a stage's weights, to free them, to
reduce its gradients.
"""

MOST_ACTIVE_STAGES: Final = 3
"""Stages of a rank whose weights are whole at the same time."""


DataAxis = Literal["none", "ddp", "fsdp"]

Stages = tuple[int, ...]
"""Numbers of a rank's stages, or a number of each."""


class Action(NamedTuple):
    """What is done to the `local`-th of the rank's stages, a pass of one micro-batch say."""

    kind: ActionKind
    local: int


class Loop(NamedTuple):
    """Actions and loops of actions in order, all of it `times` over."""

    parts: "tuple[Action | Loop, ...]"
    times: int = 1

    @property
    def once(self) -> bool:
        """Whether it is there a single time."""
        return self.times == 1


def loop_of(parts: "Iterable[Action | Loop]") -> Loop:
    """Parts in order; a loop that is there once is replaced by its own parts.

    >>> twice = Loop(listed("F0"), 2)
    >>> loop_of([Loop(listed("F0 B0")), twice]) == Loop((*listed("F0 B0"), twice))
    True
    """
    found: list[Action | Loop] = []
    for part in parts:
        if isinstance(part, Loop) and part.once:
            found += part.parts
        else:
            found.append(part)
    return Loop(tuple(found))


LETTERS: Final[dict[str, ActionKind]] = {
    "F": "forward",
    "B": "backward",
    "I": "backward-input",
    "W": "backward-weight",
}


@lru_cache(maxsize=1024)
def listed(text: str) -> tuple[Action, ...]:
    """Actions by their letter and the rank's stage, as the papers draw them.

    >>> listed("F0 B1")
    (Action(kind='forward', local=0), Action(kind='backward', local=1))
    """
    return tuple([Action(LETTERS[word[0]], int(word[1:])) for word in text.split()])


def actions(loop: Loop) -> Iterator[Action]:
    """Every action of a loop, one by one.

    >>> [action.kind for action in actions(Loop((*listed("F0"), Loop(listed("B0"), 2))))]
    ['forward', 'backward', 'backward']
    """
    for action, n in in_rows(loop):
        yield from repeat(action, n)


def in_rows(loop: Loop) -> Iterator[tuple[Action, int]]:
    """Every action of a loop in order, and how often in a row where that is known.

    >>> [(action.kind, n) for action, n in in_rows(Loop((Loop(listed("F0"), 3), Loop(listed("B0 F0"), 1))))]
    [('forward', 3), ('backward', 1), ('forward', 1)]
    """
    if len(loop.parts) == 1 and isinstance(loop.parts[0], Action):
        if loop.times:
            yield loop.parts[0], loop.times
        return
    for _ in range(loop.times):
        for part in loop.parts:
            if isinstance(part, Action):
                yield part, 1
            else:
                yield from in_rows(part)


def plan_order(plan: Plan, rank: int) -> Loop:
    """All that one rank of the pipeline does in a step, with what the data axis does in between."""
    data_axis: DataAxis = "fsdp" if plan.fsdp else "ddp" if plan.ddp else "none"
    return _ordered(plan.schedule, plan.pp, rank, plan.virtual_stages, plan.n_micro_batches, data_axis)


def plan_counts(plan: Plan, rank: int) -> dict[Action, int]:
    """How often one rank of the pipeline runs each pass in a step, the last ones not told apart."""
    return _counted(plan.schedule, plan.pp, rank, plan.virtual_stages, plan.n_micro_batches)


@lru_cache(maxsize=65536)
def first_under_way(schedule: Schedule, pp: int, v: int, m: int) -> tuple[Stages, Stages | None]:
    """`under_way` of the first rank of a pipeline."""
    return under_way(order_of(schedule, pp=pp, rank=0, virtual_stages=v, n_micro_batches=m), v, m)


@lru_cache(maxsize=4096)
def _counted(schedule: Schedule, pp: int, rank: int, v: int, m: int) -> dict[Action, int]:
    if schedule != "dualpipe-v":  # which takes some backward passes apart, the others all or none
        passes = "F{0} I{0} W{0}" if schedule in SPLITTING_SCHEDULES else "F{0} B{0}"
        return {action: m for local in range(v) for action in listed(passes.format(local))}
    return counts(_ordered(schedule, pp, rank, v, m, "none"))


@lru_cache(maxsize=4096)
def _ordered(schedule: Schedule, pp: int, rank: int, v: int, m: int, data_axis: DataAxis) -> Loop:
    if data_axis == "none":
        return order_of(schedule, pp=pp, rank=rank, virtual_stages=v, n_micro_batches=m)
    order = _ordered(schedule, pp, rank, v, m, "none")
    return with_weights(order, v) if data_axis == "fsdp" else with_last(order, v)


def order_of(schedule: Schedule, *, pp: int, rank: int, virtual_stages: int, n_micro_batches: int) -> Loop:
    """What one rank of the pipeline runs in a step."""
    m = n_micro_batches
    match schedule:
        case "gpipe":
            return Loop((Loop(listed("F0"), m), Loop(listed("B0"), m)))
        case "1f1b":
            warm_up = min(m, pp - rank)
            return Loop(
                (
                    Loop(listed("F0"), warm_up),
                    Loop(listed("B0 F0"), m - warm_up),
                    Loop(listed("B0"), warm_up),
                )
            )
        case "looped-bfs":
            stages = range(virtual_stages)
            return Loop(
                (
                    *[Loop(listed(f"F{i}"), m) for i in stages],
                    *[Loop(listed(f"B{i}"), m) for i in reversed(stages)],
                )
            )
        case "interleaved-1f1b" | "zero-bubble":
            return _interleaved(pp, rank, virtual_stages, m, split=schedule == "zero-bubble")
        case "zbv":
            return _zbv(pp, rank, m)
        case "dualpipe-v":
            return _dualpipe_v(pp, rank, m)


def _interleaved(pp: int, rank: int, v: int, m: int, *, split: bool) -> Loop:
    """Micro-batches go in rounds through each of the rank's stages, forward and backward in turn.

    With backward passes split, weights wait `rank` turns for theirs.

    Source: `_get_1f1b_rank_ops`, `_get_warmup_ops`.
    """
    per_round = m // max(1, m // pp)
    warm_up = min((v - 1) * per_round + (1 if split else 2) * (pp - 1 - rank), m * v)

    def stage_ahead(i: int) -> int:
        return index(i // per_round % v)

    def stage_back(i: int) -> int:
        return v - 1 - stage_ahead(i)

    def ahead(i: int) -> tuple[Action, ...]:
        return listed(f"F{stage_ahead(i)}")

    def back(i: int) -> tuple[Action, ...]:
        return listed(f"I{stage_back(i)}" if split else f"B{stage_back(i)}")

    def weights(i: int) -> tuple[Action, ...]:
        return listed(f"W{stage_back(i)}")

    def back_whole(i: int) -> tuple[Action, ...]:
        return back(i) + weights(i - rank) if split else back(i)

    n, late = m * v - warm_up, min(rank, m * v) if split else 0
    rounds = _Rounds(per_round, v * per_round)
    return loop_of(
        (
            *rounds(ahead, 0, warm_up, 0),
            *rounds(lambda i: ahead(warm_up + i) + back(i), 0, min(late, n), -warm_up, 0),
            *rounds(lambda i: ahead(warm_up + i) + back_whole(i), min(late, n), n, -warm_up, 0, rank),
            *rounds(back, n, max(n, late), 0),
            *rounds(back_whole, max(n, late), m * v, 0, rank),
            *rounds(weights, m * v - late, m * v, 0),
        )
    )


class _Rounds(NamedTuple):
    """Turns of a schedule that goes `per_round` times to each of a rank's stages; they recur by `period`."""

    per_round: int
    period: int

    def __call__(
        self, at: Callable[[int], tuple[Action, ...]], start: int, stop: int, *changes: int
    ) -> Iterator[Loop]:
        """The turns from start to stop; equal ones that follow each other as one.

        They differ from those before only `per_round` after one of the `changes`, and as often after that.
        """
        whole, left = divmod(stop - start, self.period)
        first = start % self.period
        if whole > 1:
            yield Loop(tuple(self._grouped(at, first, first + self.period, changes)), whole)
        else:
            left += whole * self.period
        yield from self._grouped(at, first, first + left, changes)

    def _grouped(
        self, at: Callable[[int], tuple[Action, ...]], start: int, stop: int, changes: Sequence[int]
    ) -> Iterator[Loop]:
        before: tuple[Action, ...] | None = None
        times = 0
        while start < stop:
            found = at(start)
            ahead = [self.per_round - (start - change) % self.per_round for change in changes]
            n = min(stop - start, *ahead)
            if found != before and before is not None:
                yield Loop(before, times)
                times = 0
            before, times, start = found, times + n, start + n
        if before is not None:
            yield Loop(before, times)


def _zbv(pp: int, rank: int, m: int) -> Loop:
    """Down the ranks with the first stage and back up with the second; weights as soon as possible.

    The order is that of at least 2 pp - 1 micro-batches, less those that there are not.

    Source: `ScheduleZBVZeroBubble`.
    """
    full = max(2 * pp - 1, m)
    left = pp - rank
    loop = Loop(
        (
            Loop(listed("F0"), 2 * left - 1),
            Loop(listed("F1 F0"), rank),
            Loop(listed("F1 I1 W1"), left),
            Loop(listed("F0 I0 W0 F1 I1 W1"), full - pp - left + 1),
            Loop(listed("I0 W0 F1 I1 W1"), left - 1),
            Loop(listed("I0 I1"), rank),
            Loop(listed("I0 W0"), left),
            Loop(listed("W1"), rank),
            Loop(listed("W0"), rank),
        )
    )
    return loop if full == m else Loop(tuple(_first(m, loop)))


def _first(m: int, loop: Loop) -> Iterator[Action]:
    """The actions of the first m micro-batches."""
    seen: dict[Action, int] = {}
    for action in actions(loop):
        seen[action] = seen.get(action, 0) + 1
        if seen[action] <= m:
            yield action


def _dualpipe_v(pp: int, rank: int, m: int) -> Loop:
    """Forward passes of one stage beside backward passes of the other; at the ends weights wait.

    Source: `ScheduleDualPipeV`.
    """
    left = pp - 1 - rank
    main = Loop(listed("F0 B1 F1 B0"), m - 2 * pp + rank + 1)
    waiting: list[int] = []
    end: list[Action] = []

    def back(local: int, *, split: bool) -> None:
        end.extend(listed(f"I{local}" if split else f"B{local}"))
        if split:
            waiting.append(local)

    def weights() -> None:
        if waiting:
            end.extend(listed(f"W{waiting.pop(0)}"))

    half = (rank + 1) // 2
    for i in range(rank + 1):
        back(1, split=i > half or (i == half and rank % 2 == 1))
        back(0, split=i >= half)
    for _ in range(left):
        weights()
        back(0, split=True)
    for _ in range(rank + 1):
        weights()
    return Loop(
        (
            Loop(listed("F0"), 2 * left),
            Loop(listed("F0 F1"), rank + 1),
            Loop(listed("I1 W1 F1"), left),
            main,
            Loop(listed("B1 F1 B0"), left),
            *end,
        )
    )


def with_weights(order: Loop, n_stages: int) -> Loop:
    """The order with what FSDP2 does between passes: the stages that come next are gathered ahead of time.

    A stage's gradients are reduced as soon as its last backward pass is over.

    >>> [action.kind for action in actions(with_weights(Loop(listed("F0 B0"), 2), 1))]
    ['unshard', 'forward', 'backward', 'forward', 'backward', 'reduce', 'reshard']

    Source: `torch.distributed.pipelining.schedules:_add_unshard_reshard`,
    `torch.distributed.pipelining.schedules:_add_reduce_grad`.
    """
    order, active = _gathering(order, (), ())
    order = _with_last(order, set(range(n_stages)), lambda last: (last, Action("reduce", last.local)))
    return loop_of((order, *[Action("reshard", local) for local in active]))


def _gathering(loop: Loop, active: Stages, ahead: Stages) -> tuple[Loop, Stages]:
    """A loop where so many stages are active, and others come after; which are active after it.

    Once a repetition leaves the active stages as they were, all others but the last are equal to it; the last
    sees what comes after the loop.
    """
    parts: list[Loop] = []
    left = loop.times
    while left:
        before, last = active, bool(left == 1)
        body, active = _gathering_once(loop.parts, active, ahead if last else _next(loop, ahead))
        times = left - 1 if active == before and not last else 1
        parts.append(Loop(body.parts, times))
        left -= times
    return (parts[0] if len(parts) == 1 else loop_of(parts)), active


def _gathering_once(parts: tuple[Action | Loop, ...], active: Stages, ahead: Stages) -> tuple[Loop, Stages]:
    wanted = [ahead]
    for part in reversed(parts):
        wanted.append(_next(part, wanted[-1]))
    found: list[Action | Loop] = []
    for part in parts:
        now = wanted.pop()
        if isinstance(part, Loop):
            part, active = _gathering(part, active, wanted[-1])
        else:
            found += [Action("reshard", local) for local in active if local not in now]
            found += [Action("unshard", local) for local in now if local not in active]
            active = tuple(sorted(now))
        found.append(part)
    return loop_of(found), active


def _next(part: Action | Loop, ahead: Stages) -> Stages:
    """The first stages, each once, of a part and of what comes after."""
    if isinstance(part, Action):
        return (part.local, *[local for local in ahead if local != part.local])[:MOST_ACTIVE_STAGES]
    if part.times:
        for inner in reversed(part.parts):
            ahead = _next(inner, ahead)
    return ahead


def with_last(order: Loop, n_stages: int) -> Loop:
    """The order with each stage's last backward pass named so.

    >>> [action.kind for action in actions(with_last(Loop(listed("F0 B0"), 2), 1))]
    ['forward', 'backward', 'forward', 'last-backward']
    """
    return _with_last(order, set(range(n_stages)), lambda last: (Action("last-backward", last.local),))


def _with_last(loop: Loop, left: set[int], put: Callable[[Action], tuple[Action, ...]]) -> Loop:
    """A loop with something else put for the last backward pass of stages, taken apart around it.

    Those are the stages that are still `left` of what comes after, and they are no longer.
    """
    parts = list(loop.parts)
    for i in reversed(range(len(parts))):
        part = parts[i]
        if not _has(part, left):
            continue
        if isinstance(part, Loop):
            parts[i] = _with_last(part, left, put)
        else:
            left.remove(part.local)
            parts[i : i + 1] = put(part)
    last = loop_of(parts)
    return last if loop.times == 1 else loop_of((Loop(loop.parts, loop.times - 1), last))


def _has(part: Action | Loop, stages: set[int]) -> bool:
    """Whether a backward pass of one of some stages is in a part, the end of it if that is in two."""
    if isinstance(part, Action):
        return part.local in stages and part.kind in ("backward", "backward-weight")
    return any(_has(inner, stages) for inner in part.parts) and part.times > 0


def counts(loop: Loop) -> dict[Action, int]:
    """How often each action occurs."""
    found: dict[Action, int] = {}
    for part in loop.parts:
        if isinstance(part, Action):
            found[part] = found.get(part, 0) + 1
        else:
            for action, n in counts(part).items():
                found[action] = found.get(action, 0) + n
    if loop.once:
        return found
    return {action: n * loop.times for action, n in found.items()}


def under_way(order: Loop, n_stages: int, m: int) -> tuple[Stages, Stages | None]:
    """Micro-batches that are to have a backward pass: before the first one, and when all stages have had one.

    By stage. The latter is just before the next one; None if one so far is in parts, or a stage's last of m.

    >>> under_way(order_of("1f1b", pp=4, rank=1, virtual_stages=1, n_micro_batches=8), 1, 8)
    ((3,), (3,))
    >>> under_way(order_of("gpipe", pp=4, rank=1, virtual_stages=1, n_micro_batches=8), 1, 8)
    ((8,), (7,))
    """
    forward, backward = [0] * n_stages, [0] * n_stages
    first: Stages | None = None
    for action, n in in_rows(order):
        if action.kind == "forward":
            forward[action.local] += n
            continue
        first = first or tuple(forward)
        if action.kind != "backward":
            return first, None
        for times in (1, n - 1):
            if times and all(backward):
                return first, tuple(map(sub, forward, backward)) if max(backward) < m else None
            backward[action.local] += times
    return first or tuple(forward), None


def in_flight(loop: Loop, local: int) -> int:
    """The most micro-batches whose forward pass through a stage is kept for a backward pass still to come.

    A micro-batch is kept until the last part of its backward pass.

    >>> orders = [order_of("1f1b", pp=4, rank=i, virtual_stages=1, n_micro_batches=8) for i in range(4)]
    >>> [in_flight(order, 0) for order in orders]
    [4, 3, 2, 1]
    """
    return _held(loop, local)[1]


def _held(loop: Loop | Action, local: int) -> tuple[int, int]:
    """What a loop adds to the micro-batches kept, and the most it has kept."""
    if isinstance(loop, Action):
        if loop.local == local and loop.kind == "forward":
            return 1, 1
        return -(loop.local == local and loop.kind in ("backward", "backward-weight")), 0
    net = most = 0
    for part in loop.parts:
        added, held = _held(part, local)
        most, net = max(most, net + held), net + added
    if not loop.times:
        return 0, 0
    return net * loop.times, max(most, net * (loop.times - 1) + most)
