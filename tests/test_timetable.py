"""When passes run: from the record of each rank, in an order that can be run, as long as the step says."""

from dataclasses import replace
from itertools import pairwise

import pytest

import memplan
from memplan import Llama, plots
from memplan.errors import InvalidValue, MissingRule
from memplan.plots.time import IDLE, PASSES
from memplan.schedules import SCHEDULES
from memplan.timetable import timetable

EVEN = Llama(
    name="even",
    n_layers=24,
    d_model=512,
    n_heads=8,
    d_ff=2048,
    vocab_size=8,
    max_seq_len=512,
    tied_head=False,
)


INSTANT = replace(memplan.cluster("4xh100-sxm"), intra_node=memplan.Link(name="instant", bytes_per_s=1e18))
"""GPUs whose sends take no time worth mentioning."""


def planned(schedule, m, **asked):
    v = SCHEDULES.named(schedule).stages_per_rank or 2
    options = {"pp": 4, "cluster": INSTANT, "schedule": schedule, "virtual_stages": v, "global_batch": m}
    return memplan.estimate(EVEN, **options | asked)


@pytest.fixture(params=SCHEDULES.own)
def estimate(request):
    return planned(request.param, 12)


def test_a_rank_is_busy_for_as_long_as_its_step_says(estimate):
    passes = timetable(estimate)
    for rank, time in enumerate(estimate.stage_times):
        busy_s = sum(each.stop_s - each.start_s for each in passes if each.rank == rank)
        expected_s = time.compute_s + time.recompute_s + time.tp_s + time.pp_s
        assert busy_s == pytest.approx(expected_s, rel=1e-9)


def test_the_step_ends_after_its_last_pass_and_an_update(estimate):
    end_s = max(each.stop_s for each in timetable(estimate))
    updates = [time.update_s for time in estimate.stage_times]
    assert end_s + min(updates) <= estimate.step_s * (1 + 1e-12)
    assert estimate.step_s <= (end_s + max(updates)) * (1 + 1e-12)


def test_every_micro_batch_goes_once_forward_and_once_back_through_every_stage(estimate):
    ran = sorted((p.stage, p.micro_batch) for p in timetable(estimate) if p.part == "forward")
    back = sorted(
        (p.stage, p.micro_batch) for p in timetable(estimate) if p.part in ("backward", "backward-input")
    )
    assert ran == back == [(s, i) for s in range(estimate.plan.n_stages) for i in range(12)]


def test_no_pass_begins_before_its_rank_is_free_or_its_input_there(estimate):
    passes = timetable(estimate)
    forward = {(p.stage, p.micro_batch): p for p in passes if p.part == "forward"}
    back = {(p.stage, p.micro_batch): p for p in passes if p.part in ("backward", "backward-input")}
    last = estimate.plan.n_stages - 1
    for (stage, i), each in forward.items():
        assert stage == 0 or each.start_s >= forward[stage - 1, i].stop_s
    for (stage, i), each in back.items():
        assert each.start_s >= (forward if stage == last else back)[min(stage + 1, last), i].stop_s
    for each in passes:
        if each.part == "backward-weight":
            assert each.start_s >= back[each.stage, each.micro_batch].stop_s
    for rank in range(4):
        own = [each for each in passes if each.rank == rank]
        assert all(first.stop_s <= then.start_s * (1 + 1e-12) for first, then in pairwise(own))


def test_a_naive_pipeline_is_busy_one_part_in_four():
    e = planned("gpipe", 1)
    passes = timetable(e)
    busy_s = sum(each.stop_s - each.start_s for each in passes)
    assert busy_s / (4 * max(each.stop_s for each in passes)) == pytest.approx(1 / 4, rel=1e-9)


def test_a_single_stage_has_no_idle_time():
    passes = timetable(planned("1f1b", 3, pp=1, cluster="1xh100-sxm"))
    assert [each.part for each in passes] == ["forward", "backward"] * 3
    assert all(first.stop_s == then.start_s for first, then in pairwise(passes))


def test_recomputation_and_traffic_make_passes_longer():
    plain = timetable(planned("1f1b", 4))
    full = timetable(planned("1f1b", 4, recompute="full"))
    split = timetable(planned("1f1b", 4, tp=2, cluster="8xh100-sxm"))
    seconds = [
        {p.part: p.stop_s - p.start_s for p in passes if p.rank == 1} for passes in (plain, full, split)
    ]
    assert seconds[1]["forward"] == pytest.approx(seconds[0]["forward"], rel=1e-9)
    assert seconds[1]["backward"] > 1.3 * seconds[0]["backward"]
    assert seconds[2]["forward"] > 0.5 * seconds[0]["forward"]


def test_without_a_time_or_passes_there_is_no_timetable():
    with pytest.raises(InvalidValue, match="no step time: no cluster was given"):
        timetable(memplan.estimate("gpt2"))
    with pytest.raises(InvalidValue, match="are 120,000 passes; use a smaller global_batch"):
        timetable(planned("1f1b", 15_000))
    e = planned("1f1b", 4)
    stage = replace(e.stages[0], record=replace(e.stages[0].record, step=e.stages[0].record.step.parts[-1]))
    with pytest.raises(MissingRule, match="records no passes"):
        timetable(replace(e, stages=(stage, *e.stages[1:])))


def test_a_schedule_is_drawn_in_full(estimate):
    figure = plots.schedule(estimate)
    (axes,) = figure.axes
    drawn = [patch for patch in axes.patches if patch.get_hatch() != IDLE.hatch]
    assert len(drawn) == len(timetable(estimate))
    shown = {text.get_text() for text in figure.legends[0].get_texts()}
    assert shown <= {part.label for pair in PASSES.values() for part in pair} | {IDLE.label}
