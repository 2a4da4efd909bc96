"""The list of actions that each rank of a pipeline runs, with its receives where it posts them.

PyTorch simulates all ranks together: a receive enters a rank's list when the sending rank computes the
tensor.

Source: `torch.distributed.pipelining.schedules:_add_send_recv`.
"""

from collections import Counter, deque
from functools import lru_cache
from typing import Final, Literal, NamedTuple

from memplan.engines.torch.orders import with_weights
from memplan.errors import MissingRule
from memplan.orders import ActionKind, actions
from memplan.plan import Plan
from memplan.schedules import SCHEDULES, Schedule

StepKind = ActionKind | Literal["receive-input", "receive-gradient", "wait-reduce"]

RECEIVES: Final[dict[StepKind, tuple[StepKind, int]]] = {
    "forward": ("receive-input", 1),
    "backward": ("receive-gradient", -1),
    "backward-input": ("receive-gradient", -1),
}
"""The receive that a pass makes possible, and where: in the next stage (1) or in the one before (-1)."""


class Step(NamedTuple):
    """An action of a rank at a stage of the pipeline; `micro_batch` is 0 if it has none."""

    kind: StepKind
    stage: int
    micro_batch: int


def steps(plan: Plan, rank: int, m: int) -> tuple[Step, ...]:
    """Every action of a rank in a step of m micro-batches, with its receives where it posts them."""
    return _lowered(plan.schedule, plan.pp, plan.virtual_stages, m)[rank]


@lru_cache(maxsize=16)
def _lowered(schedule: str, pp: int, v: int, m: int) -> tuple[tuple[Step, ...], ...]:
    """The lists of all ranks, simulated together: each in turn runs its next action if its input is there."""
    ahead = {rank: deque(_computed(SCHEDULES.named(schedule), rank, pp, v, m)) for rank in range(pp)}
    rank_of = {step.stage: rank for rank, listed in ahead.items() for step in listed}
    found: list[list[Step]] = [[] for _ in range(pp)]
    there: list[set[Step]] = [set() for _ in range(pp)]
    while ahead:
        n_left = sum(map(len, ahead.values()))
        for rank in list(ahead):
            step = ahead[rank][0]
            receive, way = RECEIVES.get(step.kind, (step.kind, 0))
            waits = way and step.stage - way in rank_of
            if waits and step._replace(kind=receive) not in there[rank]:
                continue
            ahead[rank].popleft()
            found[rank].append(step)
            if way and step.stage + way in rank_of:
                given, to = Step(receive, step.stage + way, step.micro_batch), rank_of[step.stage + way]
                there[to].add(given)
                found[to] += [] if to == rank else [given]
            if not ahead[rank]:
                del ahead[rank]
        if sum(map(len, ahead.values())) == n_left:
            raise MissingRule(f"schedule={schedule!r}: passes of its ranks wait for each other.")
    return tuple(map(tuple, found))


def _computed(schedule: Schedule, rank: int, pp: int, v: int, m: int) -> list[Step]:
    """A rank's list before receives are added; it has FSDP2's actions whether or not the plan uses FSDP2."""
    stages = schedule.stages_of(rank, pp, v)
    n_before: Counter[tuple[bool, int]] = Counter()
    in_parts: dict[int, deque[int]] = {local: deque() for local in range(v)}
    found: list[Step] = []
    for kind, local in actions(with_weights(schedule.order(pp, rank, v, m), v)):
        stage, micro_batch = stages[local], 0
        if kind == "backward-weight":
            micro_batch = in_parts[local].popleft()
        elif kind not in ("unshard", "reshard", "reduce"):
            is_backward = kind != "forward"
            micro_batch = n_before[is_backward, local]
            n_before[is_backward, local] += 1
            if is_backward and schedule.backward_reversed:
                micro_batch = m - 1 - micro_batch
        if kind == "backward-input":
            in_parts[local].append(micro_batch)
        found.append(Step(kind, stage, micro_batch))
        if kind == "reduce":
            found.append(Step("wait-reduce", stage, 0))
    return found
