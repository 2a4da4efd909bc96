"""The order of a rank's passes, with FSDP2's all-gathers and reductions and DDP's last pass marked."""

from collections.abc import Callable
from functools import lru_cache
from typing import Final

from memplan.orders import LAST_PARTS, Action, Loop, Stages, loop_of
from memplan.plan import Plan
from memplan.schedules import SCHEDULES

MOST_ACTIVE_STAGES: Final = 3
"""The most stages of a rank whose weights are gathered at the same time."""


def plan_order(plan: Plan, rank: int) -> Loop:
    """The order of one pipeline rank's actions in a step, with the actions of FSDP2 or DDP."""
    marked = with_weights if plan.fsdp else with_last if plan.ddp else None
    return _ordered(plan.schedule, plan.pp, rank, plan.virtual_stages, plan.n_micro_batches, marked)


@lru_cache(maxsize=4096)
def _ordered(
    schedule: str, pp: int, rank: int, v: int, m: int, marked: Callable[[Loop, int], Loop] | None
) -> Loop:
    order = SCHEDULES.named(schedule).order(pp, rank, v, m)
    return order if marked is None else marked(order, v)


def with_weights(order: Loop, n_stages: int) -> Loop:
    """The order with FSDP2's actions: stages that come next are gathered ahead of time.

    A stage's gradients are reduced right after its last backward pass.

    >>> from memplan.orders import actions, listed
    >>> [action.kind for action in actions(with_weights(Loop(listed("F0 B0"), 2), 1))]
    ['unshard', 'forward', 'backward', 'forward', 'backward', 'reduce', 'reshard']

    Source: `torch.distributed.pipelining.schedules:_add_unshard_reshard`,
    `torch.distributed.pipelining.schedules:_add_reduce_grad`.
    """
    order, active = _gathering(order, (), ())
    order = _with_last(order, set(range(n_stages)), lambda last: (last, Action("reduce", last.local)))
    return loop_of((order, *[Action("reshard", local) for local in active]))


def _gathering(loop: Loop, active: Stages, ahead: Stages) -> tuple[Loop, Stages]:
    """A loop with FSDP2's actions, and the stages that are gathered after it.

    Once a repetition leaves the gathered stages unchanged, all later ones but the last are equal to it; the
    last looks ahead to what follows the loop.
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
    """The next stages, each once, in a part and in what follows it."""
    if isinstance(part, Action):
        return (part.local, *[local for local in ahead if local != part.local])[:MOST_ACTIVE_STAGES]
    if part.times:
        for inner in reversed(part.parts):
            ahead = _next(inner, ahead)
    return ahead


def with_last(order: Loop, n_stages: int) -> Loop:
    """The order with each stage's last backward pass marked as `last-backward`.

    >>> from memplan.orders import actions, listed
    >>> [action.kind for action in actions(with_last(Loop(listed("F0 B0"), 2), 1))]
    ['forward', 'backward', 'forward', 'last-backward']
    """
    return _with_last(order, set(range(n_stages)), lambda last: (Action("last-backward", last.local),))


def _with_last(loop: Loop, left: set[int], put: Callable[[Action], tuple[Action, ...]]) -> Loop:
    """A loop in which the last backward pass of each stage in `left` is replaced, unrolled around it.

    Stages whose last pass was found are removed from `left`.
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
    """Whether a part has a backward pass of one of these stages; of split passes the second part counts."""
    if isinstance(part, Action):
        return part.local in stages and part.kind in LAST_PARTS
    return any(_has(inner, stages) for inner in part.parts) and part.times > 0
