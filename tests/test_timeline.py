"""Records played on streams: what waits for what, loops that are counted, pipelines in closed form."""

from collections import Counter
from dataclasses import replace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import memplan
from memplan import Gpt, Llama
from memplan.engines.checks import check_plan
from memplan.errors import MissingRule, PlanRefused
from memplan.estimate import estimate_plan
from memplan.hardware import Link
from memplan.orders import actions
from memplan.plan import Plan
from memplan.record import (
    COMPUTE,
    Collective,
    Compute,
    ComputeKind,
    PassPart,
    RecordEvent,
    Stretch,
    WaitStream,
    chain,
    events,
    passed,
    repeated,
)
from memplan.schedules import SCHEDULES
from memplan.shapes import FP32
from memplan.time import collective_s, timeline
from memplan.time.prices import Prices
from memplan.time.streams import PER_S, Programs, Streams
from memplan.time.timeline import rank_times, timed_passes
from memplan.timetable import timetable

DEEP = Llama(
    name="deep", n_layers=64, d_model=32, n_heads=4, d_ff=48, vocab_size=64, n_kv_heads=2, max_seq_len=16,
    tied_head=False,
)  # fmt: skip


class Seconds(Prices):
    """A second for each FLOP and each byte."""

    def operation_s(self, event):
        return float(event.flops)

    def collective_s(self, kind, group, payload_bytes):
        return float(payload_bytes)

    def least_sent_s(self, group, n_bytes):
        raise NotImplementedError

    def moved_s(self, n_bytes):
        raise NotImplementedError


def computed(seconds, phase="forward"):
    return Compute(kind=ComputeKind.UNKNOWN, phase=phase, flops=seconds, shape=(), dtype=FP32)


def sent(seconds, stream=COMPUTE, axis="dp"):
    return Collective(kind="all_reduce", axis=axis, what="", payload_bytes=seconds, stream=stream)


def spent(*stretches):
    """What a rank spends on computation, recomputation, the host, tp, dp and pp in a step, in seconds."""
    (time,) = rank_times([chain("step", *stretches)], Plan(), Seconds())
    return tuple(n / PER_S for n in time.spent)


# One rank


def test_what_runs_beside_computation_is_waited_for_where_it_is_longer():
    for computes, waits in ((3, 2), (5, 0), (8, 0)):
        found = [sent(5, "side"), computed(computes), WaitStream(COMPUTE, "side")]
        assert spent(events("pass", found)) == (computes, 0, 0, 0, waits, 0)


def test_a_collective_on_the_compute_stream_is_waited_for():
    assert spent(events("pass", [computed(2), sent(3, axis="tp"), sent(1)])) == (2, 0, 0, 3, 1, 0)


def test_a_stream_that_waits_for_computation_begins_after_it():
    found = [
        computed(4, "recompute"),
        WaitStream("side", COMPUTE),
        sent(5, "side"),
        WaitStream(COMPUTE, "side"),
    ]
    assert spent(events("pass", found)) == (0, 4, 0, 0, 5, 0)


def test_the_collectives_of_a_communicator_run_one_after_the_other():
    together = [sent(5, "one"), sent(5, "other", "dp_replicate"), WaitStream(COMPUTE, "one")]
    assert spent(events("pass", [*together, WaitStream(COMPUTE, "other")])) == (0, 0, 0, 0, 5, 0)
    one = [sent(5, "one"), sent(5, "other"), WaitStream(COMPUTE, "one"), WaitStream(COMPUTE, "other")]
    assert spent(events("pass", one)) == (0, 0, 0, 0, 10, 0)


def test_an_event_is_over_once_what_its_stream_had_by_then_is_done():
    found = [sent(2, "side"), RecordEvent("first", "side"), sent(2, "side"), WaitStream(COMPUTE, "first")]
    assert spent(events("pass", [*found, computed(1)])) == (1, 0, 0, 0, 3, 0)  # the step waits for the second


def test_nothing_of_a_pass_begins_before_it():
    ahead = events("pass", [sent(5, "side"), WaitStream(COMPUTE, "side"), computed(1)])
    once = passed(0, "forward", events("pass", [computed(5)])), passed(0, "backward", ahead)
    assert spent(*once) == (6, 0, 0, 0, 5, 0)
    assert spent(events("pass", [computed(5)]), ahead) == (6, 0, 0, 0, 0, 0)


STREAMS = ("one", "other")
timed = st.one_of(
    st.builds(computed, st.integers(0, 5), st.sampled_from(["forward", "recompute"])),
    st.builds(sent, st.integers(0, 5), st.sampled_from([*STREAMS, COMPUTE]), st.sampled_from(["dp", "tp"])),
    st.builds(
        WaitStream, st.sampled_from([*STREAMS, COMPUTE]), st.sampled_from([*STREAMS, COMPUTE, "event"])
    ),
    st.builds(RecordEvent, st.just("event"), st.sampled_from([*STREAMS, COMPUTE])),
)
blocks = st.recursive(
    st.lists(timed, max_size=5).map(lambda found: events("block", found)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda parts: chain("chain", *parts)),
        st.tuples(inner, st.integers(0, 9)).map(lambda chosen: repeated(*chosen)),
    ),
    max_leaves=6,
)
steps = st.recursive(
    st.one_of(blocks.map(lambda part: passed(0, "forward", part)), blocks),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda parts: chain("chain", *parts)),
        st.tuples(inner, st.integers(0, 9)).map(lambda chosen: repeated(*chosen)),
    ),
    max_leaves=6,
)


def unrolled(stretch: Stretch) -> Stretch:
    """A stretch without loops."""
    parts = [part for one in stretch.parts for part in [unrolled(one)]]
    if stretch.stage_pass is not None:
        return passed(*stretch.stage_pass, *parts)
    if stretch.parts or not stretch.repeats:
        return chain(stretch.name, *parts * stretch.repeats)
    return stretch


@settings(max_examples=500, deadline=None, derandomize=True)
@given(steps)
def test_loops_that_are_counted_take_as_long_as_played_ones(step):
    played, counted = Streams(), Streams()
    played.play(Programs(Plan(), Seconds())(unrolled(step)))
    counted.play(Programs(Plan(), Seconds())(step))
    for streams in (played, counted):
        streams.finish()
    assert (counted.now, counted.spent) == (played.now, played.spent)
    assert sum(counted.spent) == counted.now


@settings(max_examples=300, deadline=None, derandomize=True)
@given(steps, st.integers(1, 4))
def test_slower_traffic_never_makes_a_step_faster(step, times):
    class Slower(Seconds):
        def collective_s(self, kind, group, payload_bytes):
            return float(times * payload_bytes)

    fast, slow = (
        rank_times([chain("step", step)], Plan(), prices)[0].done for prices in (Seconds(), Slower())
    )
    assert slow >= fast


# Pipelines


def late(p, v, m):
    """A rank waits for the ranks before it once in each direction: p - 1 passes.

    Source: Huang et al. 2019, arXiv:1811.06965 (gpipe); Narayanan et al. 2019 (1f1b).
    """
    return 3 * (p - 1)


def interleaved(p, v, m):
    """The bubble of one stage per rank, with passes 1 / v as long; longer where m is less than p.

    Source: Narayanan et al. 2021, arXiv:2104.04473, section 2.2; Lamy-Poirier 2022, arXiv:2211.05953.
    """
    return 3 * (p - 1 + (v - 1) * max(0, p - m))


def zero_bubble(p, v, m):
    """A third of interleaved 1F1B's bubble: (p-1)(F+B-W) for ZB-H1; longer where m is less than p.

    Source: Qi et al. 2024, arXiv:2401.10241.
    """
    return p - 1 + v * max(0, p - m) + (v - 1) * max(0, p - 2 * m)


def zbv(p, v, m):
    """With enough micro-batches ranks wait only for their first one.

    Source: Qi et al. 2024, arXiv:2401.10241, section 6.
    """
    return max(p - 1, 4 * p - 2 - 2 * m)


def dualpipe_v(p, v, m):
    """Ranks wait only for their first micro-batch.

    Source: DeepSeek-AI 2024, arXiv:2412.19437.
    """
    return p - 1


BUBBLES = {
    "gpipe": late,
    "1f1b": late,
    "interleaved-1f1b": interleaved,
    "looped-bfs": interleaved,
    "zero-bubble": zero_bubble,
    "zbv": zbv,
    "dualpipe-v": dualpipe_v,
}
"""A rank's waiting time from (pp, stages per rank, micro-batches).

The unit is a third of a micro-batch's time on a stage: a forward pass, or either half of a backward pass.
"""


def plans(schedule):
    only = SCHEDULES.named(schedule).stages_per_rank
    for pp in range(2, 8):
        for virtual_stages in (1, 2, 3, 4) if only is None else (only,):
            for m in (*range(1, 15), 16, 18, 24, 60):
                plan = Plan(pp=pp, virtual_stages=virtual_stages, schedule=schedule, global_batch=m)
                try:
                    check_plan(DEEP, plan)
                except PlanRefused:
                    continue
                yield plan


def steps_of(plan, seconds):
    """Each rank's step, of passes that take as long as their stage says, or twice as long."""
    found = []
    for rank in range(plan.pp):
        order = plan.pipeline_schedule.order(plan.pp, rank, plan.virtual_stages, plan.n_micro_batches)
        stages, known, parts = plan.stages_of(rank), {}, []
        for kind, local in actions(order):
            if (kind, local) not in known:
                work = computed(seconds[stages[local]] * (2 if kind == "backward" else 1))
                known[kind, local] = passed(local, cast(PassPart, kind), events(kind, [work]))
            parts.append(known[kind, local])
        found.append(chain("step", *parts))
    return found


@pytest.mark.parametrize("schedule", SCHEDULES.own)
def test_pipelines_of_equal_stages_and_free_links_end_when_the_closed_form_says(schedule):
    compared = 0
    for plan in plans(schedule):
        times = rank_times(steps_of(plan, [1] * plan.n_stages), plan, Seconds())
        v, m = plan.virtual_stages, plan.n_micro_batches
        end = 3 * v * m + BUBBLES[schedule](plan.pp, v, m)
        assert max(time.done for time in times) == end * PER_S, plan
        assert all(time.spent == (3 * v * m * PER_S, 0, 0, 0, 0, 0) for time in times)
        compared += 1
    assert compared > 40


@st.composite
def pipelines(draw):
    """Any plan of any schedule, and the seconds of its stages."""
    schedule = draw(st.sampled_from(tuple(SCHEDULES.own)))
    only = SCHEDULES.named(schedule).stages_per_rank
    pp, m = draw(st.integers(2, 5)), draw(st.sampled_from([1, 2, 4, 8, 12, 40, 60]))
    plan = Plan(pp=pp, virtual_stages=only or draw(st.integers(1, 3)), schedule=schedule, global_batch=m)
    seconds = st.lists(st.integers(1, 6), min_size=plan.n_stages, max_size=plan.n_stages)
    return plan, draw(seconds)


def runs(plan):
    try:
        check_plan(DEEP, plan)
    except PlanRefused:
        return False
    return True


@settings(max_examples=200, deadline=None, derandomize=True)
@given(pipelines().filter(lambda chosen: runs(chosen[0])))
def test_no_pass_begins_before_its_rank_is_free_or_its_input_there(chosen):
    plan, seconds = chosen
    passes = list(timed_passes(steps_of(plan, seconds), plan, Seconds()))
    ends = {
        (p.stage, p.part == "forward", p.micro_batch): p.stop_s for p in passes if p.part != "backward-weight"
    }
    last, n = plan.n_stages - 1, Counter(p.part for p in passes)
    assert n["forward"] == plan.n_stages * plan.n_micro_batches
    for p in passes:
        if p.part == "forward" and p.stage:
            assert p.start_s >= ends[p.stage - 1, True, p.micro_batch]
        elif p.part != "forward" and p.part != "backward-weight":
            assert p.start_s >= ends[min(p.stage + 1, last), p.stage == last, p.micro_batch]
    assert len(ends) == 2 * plan.n_stages * plan.n_micro_batches


@st.composite
def played_plans(draw):
    """An estimate of a pipeline whose ranks repeat turns, under any wrapper."""
    schedule = draw(
        st.sampled_from(["1f1b", "interleaved-1f1b", "zero-bubble", "zbv", "dualpipe-v", "gpipe"])
    )
    pp, dp, m = (
        draw(st.sampled_from([2, 3])),
        draw(st.sampled_from([1, 2])),
        draw(st.sampled_from([12, 48, 60])),
    )
    zero = draw(st.sampled_from([0, 1, 2, 3] if dp > 1 else [0]))
    layers = draw(st.lists(st.integers(1, 6), min_size=pp, max_size=pp))
    v = SCHEDULES.named(schedule).stages_per_rank or draw(st.sampled_from([1, 2]))
    return Plan(
        pp=pp, dp=dp, zero=zero, schedule=schedule, virtual_stages=v, seq_len=16, global_batch=m * dp,
        layers_per_stage=tuple(layers * v),
    )  # fmt: skip


@settings(max_examples=60, deadline=None, derandomize=True)
@given(played_plans())
def test_turns_that_are_counted_take_as_long_as_played_ones(plan):
    model = replace(DEEP, n_layers=sum(plan.layers_per_stage or ()))
    try:
        check_plan(model, plan)
    except PlanRefused:
        return
    on = memplan.cluster(f"{plan.pp * plan.dp}xh100-sxm")
    e = estimate_plan(model, plan, on)
    counted = [time.parts for time in e.stage_times]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(timeline, "FEWEST_TURNS", 10**6)
        assert [time.parts for time in e.stage_times] == counted


def test_ranks_that_wait_for_each_other_are_no_pipeline():
    plan = Plan(pp=2, global_batch=1)
    backward, forward = (passed(0, part, events(part, [computed(1)])) for part in ("backward", "forward"))
    with pytest.raises(MissingRule, match="wait for each other"):
        rank_times([chain("step", backward, forward), chain("step", forward, backward)], plan, Seconds())


def test_two_stages_send_while_the_other_waits():
    """By hand: forward 2 s, backward 4 s, a send 1 s; the first stage waits 2 + 4 + 1 s for its gradient."""

    send = events("send", [Collective(kind="send", axis="pp", what="", payload_bytes=1)])
    recv = events("recv", [Collective(kind="recv", axis="pp", what="", payload_bytes=1)])
    ahead, back = events("forward", [computed(2)]), events("backward", [computed(4)])
    first = passed(0, "forward", ahead, send), passed(0, "backward", recv, back)
    second = passed(0, "forward", recv, ahead), passed(0, "backward", back, send)
    times = rank_times([chain("step", *first), chain("step", *second)], Plan(pp=2, global_batch=1), Seconds())
    assert [time.done / PER_S for time in times] == [2 + 1 + 2 + 4 + 1 + 4, 2 + 1 + 2 + 4 + 1]
    assert [tuple(n / PER_S for n in time.spent) for time in times] == [(6, 0, 0, 0, 0, 1)] * 2


# Engines


def test_a_stage_under_ddp_sends_a_gradient_once_its_own_are_reduced():
    """The last backward pass of a stage ends with its all-reduces, and the stage before waits for its end."""
    wide = Gpt(name="wide", n_layers=4, d_model=512, n_heads=8, d_ff=2048, vocab_size=64, max_seq_len=16)
    network = Link(name="slow", bytes_per_s=1e9)
    slow = replace(memplan.cluster("8xh100-sxm"), gpus_per_node=1, inter_node=network)
    e = memplan.estimate(replace(wide, tied_head=False), cluster=slow, pp=4, global_batch=16, seq_len=16)
    backward = [p for p in timetable(e) if p.part == "backward"]
    last = {p.stage: p for p in backward if p.micro_batch == 7}
    before = {p.stage: p for p in backward if p.micro_batch == 6}
    for stage, time in enumerate(e.stage_times):
        longer_s = (last[stage].stop_s - last[stage].start_s) - (before[stage].stop_s - before[stage].start_s)
        assert time.dp_s > 0
        assert longer_s == pytest.approx(time.dp_s, rel=1e-6)
        assert stage == 3 or last[stage].start_s >= last[stage + 1].stop_s


def test_fsdp_hides_the_gathers_that_it_prefetches():
    """Each block's weights are gathered while the block before computes, from the second on."""
    e = memplan.estimate("llama-3-8b", cluster="8xh100-sxm", zero=3, recompute="full", seq_len=8192)
    alone = sum(
        c.calls * collective_s("8xh100-sxm", c.kind, c.payload_bytes // c.calls, 8) for c in e.collectives
    )
    assert 0 < e.time.dp_s < alone / 8
    tiny = memplan.estimate("llama-3-8b", cluster="8xh100-sxm", zero=3, recompute="full", seq_len=64)
    assert tiny.step_s > alone > 3 * tiny.time.compute_s


def test_equal_micro_batches_are_counted_not_played(monkeypatch):
    """A thousand under FSDP2: what the first one waited for is over, so the third is like the second."""
    played = Counter[bool]()
    once = Streams._once

    def counting(self, program):
        played[program.is_pass] += 1
        once(self, program)

    monkeypatch.setattr(Streams, "_once", counting)
    found = memplan.estimate(
        "llama-3-8b", cluster="64xh100-sxm", dp=64, zero=3, seq_len=512, global_batch=64_000, micro_batch=1
    )
    assert found.step_s is not None
    assert played[True] < 20


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("mesh", [{"dp": 8}, {"dp": 2, "pp": 4}, {"dp": 2, "pp": 2, "tp": 2}])
def test_megatrons_buckets_move_as_much_beside_passes_as_after_them(zero, mesh):
    asked: dict[str, Any] = {
        "engine": "megatron",
        "cluster": "8xh100-sxm",
        "global_batch": 16,
        "zero": zero,
        **mesh,
    }
    after = memplan.estimate("gpt2-medium", **asked)
    asked |= {"overlap_grad_reduce": True, "overlap_param_gather": bool(zero)}
    beside = memplan.estimate("gpt2-medium", **asked)
    moved = [
        {(c.kind, c.what): c.payload_bytes for c in e.collectives if c.axis == "dp"} for e in (after, beside)
    ]
    assert moved[1] == pytest.approx(moved[0], rel=1e-5)  # with ZeRO-1 buckets are padded
    assert beside.worst.peak_bytes == pytest.approx(after.worst.peak_bytes, rel=1e-5)
    assert beside.time.compute_s == pytest.approx(after.time.compute_s, rel=1e-9)
    if "pp" not in mesh or not zero:  # else each stage waits for its one bucket before its first pass
        assert beside.step_s < after.step_s
