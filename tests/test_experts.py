"""Mixtures of experts over expert-parallel ranks: planned, searched, refused, and run."""

import json
from math import prod
from typing import Any

import pytest
import torch

import memplan
from memplan import InvalidValue, MissingRule, PlanRefused
from memplan.engines.options import plan_of
from memplan.mesh import Mesh
from memplan.models import resolve
from memplan.search.search import searched
from validate.cases import Case, divided_named, shipped_trace
from validate.judge import References, judged

pytest.importorskip("transformers")

ON_CPU: dict[str, Any] = {"device": "cpu", "precision": "fp32", "seq_len": 64, "micro_batch": 2}

TINY: dict[str, Any] = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 64,
    "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 1000, "num_experts": 8, "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
}  # fmt: skip


def qwen(tp=1, ep=2):
    return shipped_trace("hf-qwen3-moe", tp, ep)


def test_a_view_divides_the_ranks_of_dp_and_tp_anew():
    mesh = Mesh({"pp": 2, "dp": 8, "tp": 2, "ep": 4})
    assert (mesh.n_ranks, mesh.size("ep"), mesh.size("efsdp")) == (32, 4, 4)
    assert (mesh.stride("ep"), mesh.stride("efsdp")) == (1, 4)
    assert (mesh.n_communicators, Mesh({"dp": 4, "ep": 4}).n_communicators) == (6, 3)
    assert plan_of(dp=8, tp=2, ep=4, zero=3).efsdp == 4


@pytest.mark.parametrize("ep, dp", [(2, 2), (2, 4), (4, 4)])
def test_a_rank_holds_its_part_of_the_experts_and_of_the_rest(ep, dp):
    model = qwen(ep=ep)
    found = memplan.estimate(model, dp=dp, ep=ep, zero=3, **ON_CPU)
    whole = [(prod(size[0].factor for size in one.shape), n) for one, n in model.parameters]
    assert found.worst.states.weights_bytes == sum(4 * size * n // dp for size, n in whole)


def test_tokens_go_to_their_experts_and_back():
    found = memplan.estimate(qwen(), dp=4, ep=2, zero=3, **ON_CPU).collectives
    sent = [c for c in found if c.kind == "all_to_all"]
    layers, tokens, chosen, width, experts = 4, 2 * 64, 3, 64, 8
    counts, rows = 8 * experts, 4 * tokens * chosen * width
    assert {c.axis for c in sent} == {"ep"}
    assert sum(c.calls for c in sent) == 5 * layers
    assert sum(c.payload_bytes for c in sent) == layers * (counts + 4 * rows)
    gathered = {c.axis for c in found if c.kind == "all_gather"}
    assert gathered == {"dp", "efsdp"}


def test_a_rank_that_has_experts_alone_gathers_none():
    found = memplan.estimate(qwen(), dp=2, ep=2, zero=3, **ON_CPU).collectives
    assert {c.axis for c in found if c.kind in ("all_gather", "reduce_scatter")} == {"dp"}


@pytest.mark.parametrize(
    "options, error, said",
    [
        ({"dp": 4, "ep": 3}, PlanRefused, r"ep=3 does not divide dp x cp x tp = 4.*use an ep of 1, 2, 4\."),
        ({"dp": 2, "tp": 2, "ep": 2}, MissingRule, "traced with ep=2, and no rule says"),
        ({"dp": 2, "tp": 4, "ep": 2}, PlanRefused, "ep=2 is not a multiple of tp=4"),
        ({"dp": 4, "ep": 2, "zero": 0}, MissingRule, "DDP would average different experts"),
        ({"dp": 2, "pp": 2, "ep": 2}, PlanRefused, "not supported/tested yet"),
        ({"dp": 2, "ep": 2, "clip_grad_norm": 1.0}, PlanRefused, "must have the same mesh"),
        ({"dp": 2, "ep": 2, "offload": True}, MissingRule, "offload=True has no rule yet"),
        ({"dp": 2, "ep": 2, "fsdp_units": "model"}, MissingRule, "use fsdp_units='block'"),
        ({"dp": 2, "ep": 2, "engine": "textbook"}, PlanRefused, "divides nothing along ep"),
    ],
)
def test_what_does_not_run_with_expert_parallel_ranks_is_refused(options, error, said):
    with pytest.raises(error, match=said):
        memplan.estimate(qwen(), **{"zero": 3, **ON_CPU, **options})


def test_a_module_is_traced_over_whole_groups():
    with pytest.raises(InvalidValue, match=r"ep=2 is not a multiple of tp=4, .*use 4\."):
        memplan.trace(torch.nn.Linear(2, 2), torch.ones(1, 2), mesh={"tp": 4, "ep": 2})


def test_models_without_experts_are_refused():
    with pytest.raises(MissingRule, match="it has no experts that are known"):
        memplan.estimate("gpt2", cluster="8xh100", ep=8, zero=3)


def test_experts_that_the_ranks_do_not_divide_are_refused(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**TINY, "num_experts": 6}))
    with pytest.raises(InvalidValue, match=r"over ep=4 .*Cannot evenly shard 6 experts across 4"):
        memplan.estimate(config, cluster="8xh100", ep=4, zero=3, seq_len=128)


def test_an_uneven_number_of_tokens_on_tensor_ranks_is_refused():
    with pytest.raises(MissingRule, match=r"micro_batch=1, seq_len=63: .* a multiple of 2\."):
        memplan.estimate(qwen(2, 4), tp=2, dp=2, ep=4, zero=3, **{**ON_CPU, "micro_batch": 1, "seq_len": 63})


def test_a_trace_is_named_by_its_degrees():
    for name in ("hf-mixtral", "hf-mixtral.tp2", "hf-mixtral.ep4", "qwen2.5-7b.tp2.ep8"):
        assert str(divided_named(name)) == name


def test_a_search_finds_what_estimating_every_plan_finds(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(TINY))
    model = resolve(config, precisions=("bf16",))
    asked: dict[str, Any] = {
        "cluster": "4xh100", "seq_len": 128, "global_batch": 16, "precision": "bf16", "tp": 1, "pp": 1,
        "ep": (1, 2, 4), "recompute": ("none", "full"),
    }  # fmt: skip
    everything, found = (searched(model, keep=keep, **asked) for keep in (None, 5))
    assert found.within == everything.within[:5]
    assert {one.plan.ep for one in everything.within} == {1, 2, 4}
    assert found.n_within < everything.n_within


@pytest.mark.parametrize(
    "tp, ep, options",
    [
        (1, 2, {"dp": 2, "zero": 3, "precision": "bf16-mixed"}),
        (2, 2, {"precision": "fp32", "recompute": "full"}),
    ],
)
def test_predictions_are_what_ranks_hold(tp, ep, options):
    model = qwen(tp, ep)
    plan = plan_of(tp=tp, ep=ep, micro_batch=2, seq_len=64, **options)
    record = judged(Case(name="experts", model=model, plan=plan), References())
    assert (record.outcome, record.peak_error, record.collectives_off) == ("ok", 0.0, 0)


TITAN = "titan-qwen3-moe"


def test_a_pipeline_beside_experts_is_refused_for_transformers_and_planned_for_torchtitan():
    plan: dict[str, Any] = {"ep": 2, "dp": 2, "pp": 2, "zero": 2, "global_batch": 16}
    plan["fsdp_units"] = "block+ends"
    with pytest.raises(PlanRefused, match=r"'Combining token dispatch .*; use implementation='torchtitan'"):
        memplan.estimate(qwen(1, 2), **{**ON_CPU, **plan})
    planned = memplan.estimate(shipped_trace(TITAN, ep=2), **{**ON_CPU, **plan})
    assert {one.axis for one in planned.collectives} >= {"pp", "ep", "dp"}


@pytest.mark.parametrize(
    "options, said",
    [
        ({"fsdp_units": "block"}, "use fsdp_units='block\\+ends'"),
        ({"dp": 16}, "dp=16, more ranks than a block has experts"),
        ({"tp": 2}, "tp=2"),
        ({"precision": "fp16-mixed"}, "precision='bf16-mixed'"),
    ],
)
def test_what_torchtitan_does_not_do_with_its_mixtures_is_refused(options, said):
    plan = {"ep": 2, "dp": 2, "zero": 3, "fsdp_units": "block+ends", "global_batch": 32, **options}
    with pytest.raises(MissingRule, match=said):
        memplan.estimate(shipped_trace(TITAN, ep=2), **{**ON_CPU, **plan})
