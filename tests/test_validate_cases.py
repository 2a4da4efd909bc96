"""The suites and what a rank is told."""

from collections import Counter
from itertools import product

import pytest

from memplan import Plan
from memplan.errors import UnknownName
from memplan.plan import OPTIMIZERS, PRECISIONS, RECOMPUTES, SCHEDULES, check_plan, stage_layers
from validate.cases import LLAMA, Case, quick, suite
from validate.parallelize import coordinates


def test_the_quick_suite_covers_what_can_be_asked():
    plans = [case.plan for case in quick()]
    assert len(plans) >= 36
    assert {plan.zero for plan in plans} == {0, 1, 2, 3}
    assert {plan.precision for plan in plans} == set(PRECISIONS)
    assert {plan.optimizer for plan in plans} == set(OPTIMIZERS)
    assert {plan.recompute for plan in plans} == set(RECOMPUTES)
    assert {plan.schedule for plan in plans if plan.pp > 1} == set(SCHEDULES)
    assert {plan.sequence_parallel for plan in plans if plan.tp > 1} == {False, True}
    axes = Counter(sum(n > 1 for n in (plan.pp, plan.dp, plan.tp)) for plan in plans)
    assert axes[2] >= 6
    assert axes[3] >= 2
    assert {type(case.model).__name__ for case in quick()} == {"Llama", "Gpt"}
    assert {case.model.tied_head for case in quick()} == {False, True}


def test_every_quick_case_is_a_plan_that_can_run_and_has_its_own_name():
    for case in quick():
        check_plan(case.model, case.plan)
    assert max(Counter(case.name for case in quick()).values()) == 1


def test_an_unknown_suite_is_answered_with_the_nearest():
    with pytest.raises(UnknownName, match="did you mean 'quick'"):
        suite("qick")


def test_each_rank_has_its_own_place_on_the_mesh():
    plan = Plan(pp=2, dp=3, tp=2, global_batch=3)
    places = [coordinates(plan, rank) for rank in range(plan.world_size)]
    assert [(at.pp, at.dp, at.tp) for at in places] == list(product(range(2), range(3), range(2)))


@pytest.mark.parametrize("pp", [1, 2, 3, 7])
def test_stages_share_all_layers(pp):
    stages = [stage_layers(7, pp, stage) for stage in range(pp)]
    assert [layer for stage in stages for layer in stage] == list(range(7))
    assert max(map(len, stages)) - min(map(len, stages)) <= 1


def test_a_reference_is_the_same_training_alone():
    case = Case(name="x", model=LLAMA, plan=Plan(dp=2, tp=2, zero=3, global_batch=4, optimizer="adam"))
    alone = case.reference()
    assert alone.plan.world_size == 1
    assert alone.plan.micro_batch == alone.plan.global_batch == 4
    assert (alone.plan.optimizer, alone.seed, alone.steps) == ("adam", case.seed, case.steps)
