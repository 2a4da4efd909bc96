"""Pipeline schedules as values: the order in which each rank runs its passes, and its requirements.

`SCHEDULES` has memplan's own. Another package adds one by an entry point of the group `memplan.schedules`
(see `memplan.registry`), and it is planned, searched and asked for by its name like these.

Source: `torch.distributed.pipelining.schedules:ScheduleLoopedBFS._calculate_single_rank_operations`, and the
same method of each other schedule's class.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import count
from operator import index
from typing import Final, Literal, NamedTuple, final

from memplan.orders import Action, Loop, Stages, actions, listed, loop_of, under_way
from memplan.registry import Registry

Order = Callable[[int, int, int, int], Loop]
"""The order of a rank's step, from (pp, rank, stages per rank, micro-batches)."""

MicroBatches = Callable[[int, int, int], tuple[int, str]]
"""(pp, stages per rank, wanted) to the least possible number of micro-batches, and the reason for it."""


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Schedule:
    """A pipeline's schedule.

    Attributes:
        order: the passes of each rank.
        runs_as: the class that runs it, as `module:name`.
        placement: stages are dealt out to the ranks in turn ("loop"), or go down the ranks and back up ("v").
        splits_backward: whether backward passes are taken apart: the gradient of the stage's input first,
            that of its weights later.
        single_stage: whether it is PyTorch's `PipelineScheduleSingle`, which has a loop of its own instead of
            a list of actions: one stage on each rank.
        backward_reversed: whether backward passes take the last micro-batch first.
        fewest_stages: the stages on each rank from which on a search tries it.
        micro_batches: how many micro-batches it can run.
    """

    order: Order
    runs_as: str
    placement: Literal["loop", "v"] = "loop"
    splits_backward: bool = False
    single_stage: bool = False
    backward_reversed: bool = False
    fewest_stages: int = 1
    micro_batches: MicroBatches = lambda pp, v, m: (m, "")

    @property
    def stages_per_rank(self) -> int | None:
        """The number of stages that each rank must have; None: any."""
        return 1 if self.single_stage else 2 if self.placement == "v" else None

    def stages_of(self, pp_rank: int, pp: int, virtual_stages: int) -> tuple[int, ...]:
        """The stages of one rank, in model order.

        Source: `torch.distributed.pipelining._utils:generate_stage_to_rank_mapping`.

        >>> SCHEDULES.named("interleaved-1f1b").stages_of(1, 4, 2), SCHEDULES.named("zbv").stages_of(1, 4, 2)
        ((1, 5), (1, 6))
        """
        n_stages = pp * virtual_stages
        if self.placement == "v" and virtual_stages == 2:
            return pp_rank, n_stages - 1 - pp_rank
        return tuple(range(pp_rank, n_stages, pp))


@lru_cache(maxsize=65536)
def first_under_way(schedule: Schedule, pp: int, v: int, m: int) -> tuple[Stages, Stages | None]:
    """`under_way` of the first rank of a pipeline."""
    return under_way(schedule.order(pp, 0, v, m), v, m)


# --- Orders -----------------------------------------------------------------------------------------------


def _gpipe(pp: int, rank: int, v: int, m: int) -> Loop:
    """All forwards, then all backwards."""
    return Loop((Loop(listed("F0"), m), Loop(listed("B0"), m)))


def _one_forward_one_backward(pp: int, rank: int, v: int, m: int) -> Loop:
    """Warm-up forwards, then a backward and a forward in turn, then the backwards left."""
    warm_up = min(m, pp - rank)
    turns = Loop(listed("B0 F0"), m - warm_up)
    return Loop((Loop(listed("F0"), warm_up), turns, Loop(listed("B0"), warm_up)))


def _looped_bfs(pp: int, rank: int, v: int, m: int) -> Loop:
    """All micro-batches through a stage before the next one; backward passes take them in reverse."""
    passes = [f"F{i}" for i in range(v)] + [f"B{i}" for i in reversed(range(v))]
    return Loop(tuple([Loop(listed(each), m) for each in passes]))


def _interleaved(pp: int, rank: int, v: int, m: int, *, split: bool) -> Loop:
    """Micro-batches go in rounds through each of the rank's stages, forward and backward in turn.

    Where backward passes are split, weights' gradients follow `rank` turns later.

    Source: `_get_1f1b_rank_ops`, `_get_warmup_ops`.
    """
    per_round = m // max(1, m // pp)
    warm_up = min((v - 1) * per_round + (1 if split else 2) * (pp - 1 - rank), m * v)

    def local(i: int) -> int:
        return index(i // per_round % v)

    def ahead(i: int) -> tuple[Action, ...]:
        return listed(f"F{local(i)}")

    def back(i: int) -> tuple[Action, ...]:
        return listed(f"{'I' if split else 'B'}{v - 1 - local(i)}")

    def weights(i: int) -> tuple[Action, ...]:
        return listed(f"W{v - 1 - local(i)}") if split else ()

    def back_whole(i: int) -> tuple[Action, ...]:
        return back(i) + weights(i - rank)

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
    """Turns of a schedule that runs each stage of a rank `per_round` times in a row; `period`: of a cycle."""

    per_round: int
    period: int

    def __call__(
        self, at: Callable[[int], tuple[Action, ...]], start: int, stop: int, *changes: int
    ) -> Iterator[Loop]:
        """The turns from start to stop, equal ones in a row as a loop.

        Turns change only at one of the `changes`, and every `per_round` turns after it.
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


def _zbv(pp: int, rank: int, v: int, m: int) -> Loop:
    """Down the ranks with the first stage and back up with the second; weight gradients come early.

    The order is made for at least 2 pp - 1 micro-batches; actions of missing ones are left out.

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


def _dualpipe_v(pp: int, rank: int, v: int, m: int) -> Loop:
    """Forward passes of one stage alternate with backward passes of the other.

    Source: `ScheduleDualPipeV`.
    """
    left = pp - 1 - rank
    main = Loop(listed("F0 B1 F1 B0"), m - 2 * pp + rank + 1)
    waiting: list[int] = []
    end: list[Action] = []

    def back(local: int, *, split: bool) -> None:
        end.extend(listed(f"I{local}" if split else f"B{local}"))
        waiting.extend([local] * split)

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


# --- Micro-batches ----------------------------------------------------------------------------------------


def _as_many_as_stages(words: str) -> MicroBatches:
    """At least one micro-batch for each stage."""
    return lambda pp, v, m: (max(m, pp * v), words.format(m=m, n=pp * v))


def _whole_rounds(name: str) -> MicroBatches:
    """A multiple of the rounds in which micro-batches go through a rank's stages.

    Source: `torch.distributed.pipelining.schedules:ScheduleInterleaved1F1B` (`number_of_rounds`).
    """

    def rounds(pp: int, m: int) -> int:
        return max(1, m // pp)

    def least(pp: int, v: int, m: int) -> tuple[int, str]:
        reason = (
            f"{name} requires the number of microbatches to be a multiple of the number of rounds "
            f"({rounds(pp, m)}), but got {m}"
        )
        return next(i for i in count(m) if i % rounds(pp, i) == 0), reason

    return least


# --- The schedules ----------------------------------------------------------------------------------------

MODULE: Final = "torch.distributed.pipelining.schedules"

SCHEDULES: Final = Registry(
    what="schedule",
    kind=Schedule,
    own={
        "gpipe": Schedule(order=_gpipe, runs_as=f"{MODULE}:ScheduleGPipe", single_stage=True),
        "1f1b": Schedule(
            order=_one_forward_one_backward,
            runs_as=f"{MODULE}:Schedule1F1B",
            single_stage=True,
            micro_batches=_as_many_as_stages(
                "Number of microbatches ({m}) must be greater than or equal to the number of stages ({n})"
            ),
        ),
        "interleaved-1f1b": Schedule(
            order=partial(_interleaved, split=False),
            runs_as=f"{MODULE}:ScheduleInterleaved1F1B",
            fewest_stages=2,
            micro_batches=_whole_rounds("Interleaved 1F1B"),
        ),
        "looped-bfs": Schedule(
            order=_looped_bfs,
            runs_as=f"{MODULE}:ScheduleLoopedBFS",
            backward_reversed=True,
            fewest_stages=2,
        ),
        "zero-bubble": Schedule(
            order=partial(_interleaved, split=True),
            runs_as=f"{MODULE}:ScheduleInterleavedZeroBubble",
            splits_backward=True,
            micro_batches=_whole_rounds("Zero bubble"),
        ),
        "zbv": Schedule(
            order=_zbv,
            runs_as=f"{MODULE}:ScheduleZBVZeroBubble",
            placement="v",
            splits_backward=True,
        ),
        "dualpipe-v": Schedule(
            order=_dualpipe_v,
            runs_as=f"{MODULE}:ScheduleDualPipeV",
            placement="v",
            splits_backward=True,
            micro_batches=_as_many_as_stages(
                "DualPipeV requires at least as many microbatches as stages, but got {m} microbatches and "
                "{n} stages"
            ),
        ),
    },
)
"""The schedules by name."""
