"""When the ranks of a pipeline post their receives, among the actions of their schedule.

A rank does not place its receives itself: each is put into its list as the rank that sends gets there.

Source: `torch.distributed.pipelining.schedules:_add_send_recv`.
"""

from collections import Counter, deque
from functools import lru_cache
from typing import Literal, NamedTuple

from memplan.engines.torch.orders import with_weights
from memplan.errors import MissingRule
from memplan.orders import ActionKind, actions
from memplan.plan import Plan
from memplan.schedules import SCHEDULES, Schedule

StepKind = ActionKind | Literal["receive-input", "receive-gradient", "wait-reduce"]

GIVES_INPUT_GRAD = ("backward", "backward-input")


class Step(NamedTuple):
    """What a rank does with a micro-batch (0 where it is about all) at one of the pipeline's stages."""

    kind: StepKind
    stage: int
    micro_batch: int


def steps(plan: Plan, rank: int) -> tuple[Step, ...]:
    """All that a rank of the pipeline does in a step, its receives where it posts them."""
    return _lowered(plan.schedule, plan.pp, plan.virtual_stages, plan.n_micro_batches)[rank]


@lru_cache(maxsize=16)
def _lowered(schedule: str, pp: int, v: int, m: int) -> tuple[tuple[Step, ...], ...]:
    """The lists of all ranks: in turn each takes its next action, if it has what that needs."""
    ahead = {rank: deque(_computed(SCHEDULES.named(schedule), rank, pp, v, m)) for rank in range(pp)}
    rank_of = {step.stage: rank for rank, listed in ahead.items() for step in listed}
    found: list[list[Step]] = [[] for _ in range(pp)]
    there: list[set[Step]] = [set() for _ in range(pp)]
    while ahead:
        n_left = sum(map(len, ahead.values()))
        for rank in list(ahead):
            step = ahead[rank][0]
            if not _is_ready(step, there[rank], pp * v):
                continue
            ahead[rank].popleft()
            found[rank].append(step)
            given = _given_by(step, pp * v)
            if given is not None:
                to = rank_of[given.stage]
                there[to].add(given)
                if to != rank:
                    found[to].append(given)
            if not ahead[rank]:
                del ahead[rank]
        if sum(map(len, ahead.values())) == n_left:
            raise MissingRule(f"schedule={schedule!r}: passes of its ranks wait for each other.")
    return tuple(map(tuple, found))


def _given_by(step: Step, n_stages: int) -> Step | None:
    """What a pass gives to another stage."""
    if step.kind == "forward" and step.stage < n_stages - 1:
        return Step("receive-input", step.stage + 1, step.micro_batch)
    if step.kind in GIVES_INPUT_GRAD and step.stage > 0:
        return Step("receive-gradient", step.stage - 1, step.micro_batch)
    return None


def _is_ready(step: Step, there: set[Step], n_stages: int) -> bool:
    if step.kind == "forward" and step.stage > 0:
        return step._replace(kind="receive-input") in there
    if step.kind in GIVES_INPUT_GRAD and step.stage < n_stages - 1:
        return step._replace(kind="receive-gradient") in there
    return True


def _computed(schedule: Schedule, rank: int, pp: int, v: int, m: int) -> list[Step]:
    """A rank's list before it has receives; FSDP2's actions are in it whether or not there is FSDP2."""
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
