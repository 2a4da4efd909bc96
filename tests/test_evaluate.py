"""Many plans at once are what one estimate each says."""

from dataclasses import replace
from math import gcd, inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplan import Plan, preset
from memplan.device import H100
from memplan.errors import MemplanError
from memplan.estimate import estimate_on, estimate_plan
from memplan.hardware import cluster
from memplan.plan import SCHEDULES
from memplan.search.evaluate import Evaluation
from memplan.search.memory import held, memory
from memplan.search.plans import VARIED, Plans, number_of
from memplan.search.rules import RUNS
from memplan.search.space import Space
from memplan.search.time import step_s, times
from tests import test_search
from tests.grids import running
from tests.test_laws import cases, laws, runs

LLAMA = replace(test_search.LLAMA, name="long llama", n_layers=13)
GPT = replace(test_search.GPT, name="long gpt", n_layers=12)


@st.composite
def searches(draw):
    """A model, plans of it that can run, and a device."""
    case = draw(cases(schedule=st.sampled_from(SCHEDULES)))
    plans = {case.plan}
    for _ in range(draw(st.integers(1, 12))):
        values = {
            "dp": draw(st.integers(1, 4)),
            "tp": draw(st.sampled_from([1, 2, 4])),
            "pp": draw(st.integers(1, 4)),
            "micro_batch": draw(st.integers(1, 4)),
            "zero": draw(st.integers(0, 3)),
            "recompute": draw(st.sampled_from(["none", "selective", "full"])),
            "recompute_blocks": draw(st.sampled_from([None, None, 1, 2])),
            "offload": draw(st.booleans()),
            "dp_replicate": draw(st.sampled_from([1, 2])),
            "sequence_parallel": draw(st.booleans()),
            "schedule": draw(st.sampled_from(SCHEDULES)),
            "virtual_stages": draw(st.sampled_from([1, 1, 2])),
        }
        for name in draw(st.sets(st.sampled_from(VARIED))):
            values.pop(name, None)
        try:
            plan = replace(case.plan, **values)
        except MemplanError:
            continue
        if runs(case.model, plan, case.device):
            plans.add(plan)
    found = sorted(plans, key=repr)
    columns = {name: np.array([number_of(name, getattr(plan, name)) for plan in found]) for name in VARIED}
    return case.model, found, Plans(base=case.plan, columns=columns), case.device


@pytest.mark.parametrize("name, world, batch", [("llama-3-8b", 16, 64), ("gpt2-xl", 16, 96)])
def test_a_sample_of_all_plans_of_a_preset_is_each_as_estimated(name, world, batch):
    model = preset(name)
    base = Plan(global_batch=batch, seq_len=1024)
    space = Space(model=model, n_gpus=world, base=base, ranges={"micro_batch": (1, 2), "tp": (1, 4)})
    rng = np.random.default_rng(0)
    plans = running(space)
    found = memory(model, plans, H100)
    for i in rng.choice(len(plans), 40, replace=False):
        worst = estimate_on(model, plans.plan(i), H100).worst
        assert found.peak_bytes[i] == worst.peak_bytes
        assert found.worst_stage[i] == worst.stage
        assert found.rest_bytes[i] == worst.rest_bytes


@laws(300)
@given(searches())
def test_many_plans_at_once_are_each_as_estimated(search):
    model, single, plans, device = search
    found = memory(model, plans, device)
    for i, plan in enumerate(single):
        worst = estimate_on(model, plan, device).worst
        assert found.peak_bytes[i] == worst.peak_bytes
        assert found.worst_stage[i] == worst.stage
        assert found.rest_bytes[i] == worst.rest_bytes


def timed(model, plan, where):
    seconds = estimate_plan(model, plan, where).step_s
    return inf if seconds is None else seconds


@pytest.mark.parametrize("name, world, batch", [("llama-3-8b", 16, 64), ("gpt2-xl", 24, 96)])
def test_a_sample_of_all_plans_of_a_preset_takes_as_long_as_estimated(name, world, batch):
    model, where = preset(name), cluster(f"{world}xh100-sxm")
    base = Plan(global_batch=batch, seq_len=1024)
    space = Space(model=model, n_gpus=world, base=base, ranges={"micro_batch": (1, 2), "tp": (1, 4)})
    rng = np.random.default_rng(0)
    plans = running(space)
    plans = plans[np.sort(rng.choice(len(plans), 120, replace=False))]
    assert step_s(model, plans, where).tolist() == [
        timed(model, plans.plan(i), where) for i in range(len(plans))
    ]


@laws(300)
@given(searches(), st.sampled_from([1, 6, 8]))
def test_many_plans_at_once_take_each_as_long_as_estimated(search, gpus_per_node):
    model, single, plans, device = search
    sizes = np.array([plan.world_size for plan in single])
    for n_gpus in set(sizes.tolist()):
        where = cluster("1xh100-sxm")
        gpu = replace(where.gpu, kind=device)
        where = replace(where, gpu=gpu, n_gpus=n_gpus, gpus_per_node=gcd(n_gpus, gpus_per_node))
        found = step_s(model, plans[sizes == n_gpus], where).tolist()
        assert found == [timed(model, plan, where) for plan in single if plan.world_size == n_gpus]


@pytest.mark.parametrize(
    "options",
    [{}, {"fsdp_blocks": 2, "zero": 3}, {"fsdp_units": "model", "zero": 2}],
    ids=lambda options: " ".join(options) or "plain",
)
@pytest.mark.parametrize("model", [LLAMA, GPT], ids=lambda model: model.name)
def test_plans_of_a_grid_are_each_as_estimated(model, options):
    """With every number of recomputed blocks, of which most are worked out from the first and the last."""
    where = cluster("4xh100-sxm")
    ranges = {"recompute_blocks": tuple(range(1, model.n_layers + 1)), "virtual_stages": (1, 2)}
    pinned = {"zero": (options["zero"],)} if "zero" in options else {}
    base = replace(Plan(global_batch=12, seq_len=32, dp=2), **options)
    space = Space(model=model, n_gpus=4, base=base, ranges=ranges | pinned)
    rng = np.random.default_rng(0)
    for batch in space.grids():
        grids = [ruled.running for ruled in batch if (ruled.rule == RUNS).any()]
        evaluation = Evaluation(model, grids, H100)
        for i in rng.choice(len(grids), min(len(grids), 12), replace=False):
            found, seconds = held(evaluation, i), times(evaluation, i, where)
            chosen = tuple(rng.integers(0, n, 6) for n in grids[i].shape)
            plans = grids[i].plans(*chosen)
            for j, place in enumerate(zip(*chosen, strict=True)):
                estimated = estimate_plan(model, plans.plan(j), where)
                assert found.peak_bytes[place] == estimated.worst.peak_bytes
                assert found.worst_stage[place] == estimated.worst.stage
                assert found.rest_bytes[place] == estimated.worst.rest_bytes
                assert seconds[place] == (inf if estimated.step_s is None else estimated.step_s)
