"""The suites and what a rank is told."""

from collections import Counter
from itertools import product

import pytest

from memplan import Plan
from memplan.engines.checks import check_plan
from memplan.errors import InvalidValue, MemplanError, MissingRule, PlanRefused, UnknownName
from memplan.optimizers import COMMON
from memplan.plan import FIELDS, RECOMPUTES, stage_layers
from validate.cases import Case
from validate.suites import SUITES, suite
from validate.suites.models import LLAMA
from validate.suites.quick import quick


def test_the_quick_suite_covers_what_can_be_asked():
    plans = [case.plan for case in quick()]
    assert len(plans) >= 36
    assert {plan.zero for plan in plans} == {0, 1, 2, 3}
    assert {plan.precision for plan in plans} == {"fp32", "bf16", "bf16-mixed"}
    assert {plan.optimizer for plan in plans} == set(COMMON)
    assert {plan.recompute for plan in plans} == {"none", "full"}
    assert {plan.schedule for plan in plans if plan.pp > 1} == {"gpipe", "1f1b"}
    assert {plan.sequence_parallel for plan in plans if plan.tp > 1} == {False, True}
    axes = Counter(sum(n > 1 for n in (plan.pp, plan.dp, plan.tp)) for plan in plans)
    assert axes[2] >= 6
    assert axes[3] >= 2
    assert {type(case.model).__name__ for case in quick()} == {"Llama", "Gpt"}
    assert {getattr(case.model, "tied_head", None) for case in quick()} == {False, True}


def test_every_quick_case_is_a_plan_that_can_run_and_has_its_own_name():
    for case in quick():
        check_plan(case.model, case.plan)
    assert max(Counter(case.name for case in quick()).values()) == 1


def test_an_unknown_suite_is_answered_with_the_nearest():
    with pytest.raises(UnknownName, match="did you mean 'quick'"):
        suite("qick")


def test_each_rank_has_its_own_place_on_the_mesh():
    plan = Plan(pp=2, dp=3, tp=2, global_batch=3)
    places = [plan.place(rank) for rank in range(plan.world_size)]
    assert [(at.pp, at.dp, at.tp) for at in places] == list(product(range(2), range(3), range(2)))


@pytest.mark.parametrize("pp", [1, 2, 3, 7])
def test_stages_share_all_layers(pp):
    stages = [stage_layers(7, Plan(pp=pp), stage) for stage in range(pp)]
    assert [layer for stage in stages for layer in stage] == list(range(7))
    assert max(map(len, stages)) - min(map(len, stages)) <= 1


def test_a_reference_is_the_same_training_alone():
    case = Case(name="x", model=LLAMA, plan=Plan(dp=2, tp=2, zero=3, global_batch=4, optimizer="adam"))
    alone = case.reference()
    assert alone.plan.world_size == 1
    assert alone.plan.micro_batch == alone.plan.global_batch == 4
    assert (alone.plan.optimizer, alone.seed, alone.steps) == ("adam", case.seed, case.steps)


@pytest.mark.parametrize("name", [name for name in SUITES if name != "refused"])
def test_every_case_of_a_suite_can_be_asked_and_has_its_own_name(name):
    if name == "torchtitan":
        pytest.importorskip("torchtitan")
    cases = suite(name)
    assert max(Counter(case.name for case in cases).values()) == 1
    for case in cases:
        try:
            check_plan(case.model, case.plan)
        except MissingRule:
            continue


def test_every_case_of_the_refused_is_refused_with_a_way_out():
    for case in suite("refused"):
        with pytest.raises(PlanRefused, match="; use "):
            check_plan(case.model, case.plan)


def test_the_matrix_has_every_mesh_with_every_zero_schedule_and_recompute_that_can_run():
    plans = [case.plan for case in suite("matrix")]
    meshes = {(p.dp, p.tp, p.pp) for p in plans}
    assert {(d, t, p) for d, t, p in product(range(1, 9), repeat=3) if d * t * p <= 8} <= meshes
    four = {(p.zero, p.schedule, p.recompute) for p in plans if (p.dp, p.tp, p.pp) == (2, 1, 2)}
    assert {(zero, "1f1b", recompute) for zero in range(4) for recompute in RECOMPUTES} <= four


def test_the_matrix_has_every_pair_of_values_that_no_rule_keeps_apart():
    pairs = {
        (one, other)
        for case in suite("matrix")
        for one, other in product((("fp32",), ("bf16",), ("bf16-mixed",)), COMMON)
        if (case.plan.precision,) == one and case.plan.optimizer == other
    }
    assert len(pairs) == 3 * len(COMMON)


SUITE = """
[defaults]
seq_len = 32
[[case]]
dp = 2
zero = [0, 3]
precision = ["fp32", "bf16-mixed"]
[[case]]
name = "uneven"
pp = 2
layers_per_stage = [[1, 3]]
[case.model]
family = "llama"
n_layers = 4
d_model = 32
n_heads = 4
d_ff = 64
vocab_size = 64
max_seq_len = 32
"""


def written(tmp_path, text):
    file = tmp_path / "suite.toml"
    file.write_text(text)
    return str(file)


def test_a_suite_from_a_file_tries_every_combination_of_its_lists(tmp_path):
    cases = suite(written(tmp_path, SUITE))
    assert [case.name for case in cases] == [
        "llama-small, dp2",
        "llama-small, dp2 bf16-mixed",
        "llama-small, dp2 zero3",
        "llama-small, dp2 zero3 bf16-mixed",
        "uneven",
    ]
    assert cases[-1].plan.layers_per_stage == (1, 3)
    assert cases[-1].model.d_model == 32
    assert {case.plan.seq_len for case in cases} == {32}


@pytest.mark.parametrize(
    "text, message",
    [
        ("", r"there are no cases; write \[\[case\]\]"),
        ("[[case]\n", "is no suite"),
        ("[case]\ndp = 2\n", "there are no cases"),
        ("[[cases]]\ndp = 2\n", "unknown table 'cases'; did you mean 'case'"),
        ("[[case]]\nzeroo = 2\n", "case 1: unknown key 'zeroo'; did you mean 'zero'"),
        ("[[case]]\n[[case]]\nzero = 5\n", "case 2: zero=5 is not allowed; use an integer from 0 to 3"),
        ("[[case]]\nmodel = 'lama-small'\n", "case 1: unknown model 'lama-small'"),
        (
            "[[case]]\nmodel = { family = 'lama' }\n",
            "case 1: unknown model family 'lama'; did you mean 'llama'",
        ),
        ("[[case]]\nmodel = { family = 'llama' }\n", "case 1: the model has no d_model; a llama"),
        ("[[case]]\n[[case]]\n", "case 2: a case named 'llama-small, one rank' is there already"),
        ("[[case]]\nsteps = 'many'\n", "case 1: steps='many' is not allowed; use an integer from 6"),
        ("[[case]]\nseed = 1.5\n", "case 1: seed=1.5 is not allowed; use an integer from 0"),
        ("[[case]]\ntimeout_s = nan\n", "case 1: timeout_s=nan is not allowed; use a finite number"),
        ("[[case]]\nname = 7\n", "case 1: name=7 is not allowed; use a text"),
        ("[[case]]\ndp = []\n", "case 1 has an empty list"),
        ("defaults = 1\n[[case]]\n", "defaults=1 is no table"),
        ("a = " + "[" * 5000, "is no suite"),
    ],
)
def test_a_file_that_is_no_suite_is_refused_with_the_place(tmp_path, text, message):
    with pytest.raises(MemplanError, match=message):
        suite(written(tmp_path, text))


def test_a_suite_of_too_many_combinations_is_refused_at_once(tmp_path):
    lists = "\n".join(f"{name} = {[*range(1, 40)]}" for name in [*FIELDS][:7])
    with pytest.raises(InvalidValue, match=r"its lists make 137231006679 cases, and more than 10000 are a"):
        suite(written(tmp_path, f"[[case]]\n{lists}\n"))


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(InvalidValue, match=r"none\.toml: no such file; give the path of a suite"):
        suite(str(tmp_path / "none.toml"))
