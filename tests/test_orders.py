"""The order of passes is PyTorch's own, and holds as many micro-batches as the papers say."""

from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from torch.distributed.pipelining import schedules

from memplan.device import CPU
from memplan.engines.checks import check_plan
from memplan.engines.torch.orders import with_weights
from memplan.errors import PlanRefused
from memplan.estimate import rank_estimate
from memplan.models.llama import Llama
from memplan.orders import Loop, actions, counts, in_rows, under_way
from memplan.passes.trace import traced
from memplan.plan import Plan
from memplan.schedules import SCHEDULES

CLASSES: dict[str, Any] = {
    "gpipe": schedules.ScheduleGPipe,
    "1f1b": schedules.Schedule1F1B,
    "interleaved-1f1b": schedules.ScheduleInterleaved1F1B,
    "looped-bfs": schedules.ScheduleLoopedBFS,
    "zero-bubble": schedules.ScheduleInterleavedZeroBubble,
    "zbv": schedules.ScheduleZBVZeroBubble,
    "dualpipe-v": schedules.ScheduleDualPipeV,
}
NAMES = {
    "forward": "FORWARD",
    "backward": "FULL_BACKWARD",
    "backward-input": "BACKWARD_INPUT",
    "backward-weight": "BACKWARD_WEIGHT",
}
WEIGHTS = {"unshard": "UNSHARD", "reshard": "RESHARD", "reduce": "REDUCE_GRAD"}
MODEL = Llama(
    name="deep", n_layers=64, d_model=8, n_heads=2, d_ff=8, vocab_size=8, max_seq_len=8, tied_head=False
)


def plans(schedule):
    only = SCHEDULES.named(schedule).stages_per_rank
    stages = (1, 2, 3, 4) if only is None else (only,)
    for pp in range(2, 7):
        for virtual_stages in stages:
            for m in (*range(1, 15), 16, 18, 24, 36):
                yield Plan(
                    pp=pp, virtual_stages=virtual_stages, schedule=schedule, global_batch=m, micro_batch=1
                )


def order_of(plan, rank):
    """Our order of one rank."""
    return plan.pipeline_schedule.order(plan.pp, rank, plan.virtual_stages, plan.n_micro_batches)


def test_each_schedule_names_the_class_that_runs_it():
    for name, runs_as in CLASSES.items():
        assert SCHEDULES.named(name).runs_as == f"{runs_as.__module__}:{runs_as.__name__}"


def made(plan):
    """PyTorch's own schedule, of stages without a process group."""

    def stage(index):
        return SimpleNamespace(
            stage_index=index,
            num_stages=plan.n_stages,
            group_size=plan.pp,
            group_rank=0,
            submod=nn.Identity(),
        )

    stages = [stage(index) for index in plan.stages_of(0)]
    alone = plan.pipeline_schedule.single_stage
    return CLASSES[plan.schedule](stages[0] if alone else stages, plan.n_micro_batches, loss_fn=len)


def torchs(plan, *, with_weights=False):
    """PyTorch's own order of every rank, as (action, stage, micro-batch)."""
    schedule = made(plan)
    order = schedule.pipeline_order_with_comms if with_weights else schedule.pipeline_order
    names = {*NAMES.values(), *(WEIGHTS.values() if with_weights else ())}
    for rank, listed in order.items():
        flat = [part for action in listed if action is not None for part in (action.sub_actions or (action,))]
        yield (
            rank,
            [
                (action.computation_type.name, action.stage_index, action.microbatch_index)
                for action in flat
                if action.computation_type.name in names
            ],
        )


def ours(plan, rank):
    """Our order of one rank in the same words: each pass of a kind is the next micro-batch's."""
    m = plan.n_micro_batches
    run = order_of(plan, rank)
    seen: Counter[tuple[int, str]] = Counter()
    for action in actions(run):
        parts = ("input", "weight") if action.kind == "backward" else (action.kind.removeprefix("backward-"),)
        i = seen[action.local, parts[0]]
        seen.update((action.local, part) for part in parts)
        last_first = plan.schedule == "looped-bfs" and action.kind == "backward"
        yield NAMES[action.kind], plan.stages_of(rank)[action.local], m - 1 - i if last_first else i


@pytest.mark.parametrize("schedule", CLASSES)
def test_the_order_is_pytorchs(schedule):
    compared = 0
    for plan in plans(schedule):
        try:
            check_plan(MODEL, plan)
        except PlanRefused:
            with pytest.raises(ValueError, match="microbatches"):
                made(plan)
            continue
        for rank, expected in torchs(plan):
            found = list(ours(plan, rank))
            if schedule == "1f1b":  # which numbers the last rank's forward passes from 1
                found, expected = ([action[:2] for action in order] for order in (found, expected))
            assert found == expected, (plan, rank)
            compared += 1
    assert compared > 100


def running(schedule: str) -> Iterator[Plan]:
    """The plans that can run."""
    for plan in plans(schedule):
        try:
            check_plan(MODEL, plan)
        except PlanRefused:
            continue
        yield plan


@pytest.mark.parametrize("schedule", [s for s in CLASSES if s not in ("gpipe", "1f1b")])
def test_weights_are_gathered_and_reduced_when_pytorch_does(schedule: str):
    for plan in running(schedule):
        for rank, expected in torchs(plan, with_weights=True):
            run = order_of(plan, rank)
            found = [
                ((NAMES | WEIGHTS)[action.kind], plan.stages_of(rank)[action.local])
                for action in actions(with_weights(run, plan.virtual_stages))
            ]
            assert found == [action[:2] for action in expected], (plan, rank)


def orders(schedule: str) -> Iterator[tuple[Plan, int, Loop]]:
    """Of each plan that can run the order of each rank."""
    for plan in running(schedule):
        for rank in range(plan.pp):
            yield plan, rank, order_of(plan, rank)


@pytest.mark.parametrize("schedule", CLASSES)
def test_passes_are_counted_as_they_come(schedule: str):
    for plan, rank, order in orders(schedule):
        assert counts(order) == Counter(actions(order)), (plan, rank)
        rows = [action for action, n in in_rows(order) for _ in range(n)]
        assert rows == [*actions(order)], (plan, rank)


@pytest.mark.parametrize("schedule", CLASSES)
def test_micro_batches_under_way_are_counted_as_they_come(schedule: str):
    seen = 0
    for plan, rank, order in orders(schedule):
        v, m = plan.virtual_stages, plan.n_micro_batches
        forward, backward, first = Counter[int](), Counter[int](), None
        found = under_way(order, v, m)
        for action in actions(order):
            if action.kind == "forward":
                forward[action.local] += 1
                continue
            left = tuple(forward[i] - backward[i] for i in range(v))
            first = first or left
            if action.kind != "backward":
                left = None
            if left is None or len(backward) == v:
                break
            backward[action.local] += 1
        else:
            left = None
        if m in backward.values():
            left = None
        assert found == (first, left), (plan, rank)
        seen += left is not None
    assert seen > 50 or schedule in ("looped-bfs", "zero-bubble", "zbv")


def kept(schedule, pp, rank, m):
    (first,), _ = under_way(SCHEDULES.named(schedule).order(pp, rank, 1, m), 1, m)
    return first


@pytest.mark.parametrize("pp,m", [(2, 2), (4, 8), (4, 12), (8, 64)])
def test_micro_batches_in_flight_are_as_the_papers_say(pp, m):
    """GPipe m (Huang et al. 2019), 1F1B pp - rank (Narayanan et al. 2019)."""
    for rank in range(pp):
        assert kept("gpipe", pp, rank, m) == m
        assert kept("1f1b", pp, rank, m) == pp - rank


@pytest.mark.parametrize("pp,v,m", [(2, 2, 8), (4, 2, 16), (4, 4, 32), (8, 2, 64)])
def test_interleaving_keeps_so_many_chunks(pp, v, m):
    """(pp - rank - 1) x 2 + (v - 1) x pp + 1 forward passes before the first backward pass.

    Source: Narayanan et al. 2021, arXiv:2104.04473, section 2.2; Megatron-LM's `num_warmup_microbatches`.
    """
    for rank in range(pp):
        run = SCHEDULES.named("interleaved-1f1b").order(pp, rank, v, m)
        kinds = [action.kind for action in actions(run)]
        assert kinds.index("backward") == (pp - rank - 1) * 2 + (v - 1) * pp + 1


def test_an_order_stays_short_however_many_micro_batches():
    """What is worked out for a step grows with the pipeline, not with the batch."""

    def parts(run):
        return sum(parts(part) if hasattr(part, "parts") else 1 for part in run.parts)

    for name in SCHEDULES.own:
        schedule = SCHEDULES.named(name)
        v = schedule.stages_per_rank or 2
        short, long = (schedule.order(16, 3, v, m) for m in (128, 4096))
        assert parts(long) == parts(short) < 200
        assert sum(1 for _ in actions(long)) >= 2 * v * 4096


def test_an_estimate_does_not_depend_on_which_traces_are_still_cached():
    model = Llama(name="two", n_layers=4, d_model=16, n_heads=2, d_ff=48, vocab_size=32, max_seq_len=8)
    plan = Plan(pp=2, schedule="zbv", virtual_stages=2, global_batch=8, seq_len=8)
    before = rank_estimate(model, plan, plan.place(0), CPU).peak_bytes
    traced.cache_clear()
    assert rank_estimate(model, plan, plan.place(0), CPU).peak_bytes == before
