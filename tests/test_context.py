"""Sequences over context-parallel ranks: traced, planned, searched, refused, and run."""

import json
from math import prod
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import memplan
from memplan import InvalidValue, MissingRule, PlanRefused
from memplan.engines.base import ring_bytes
from memplan.engines.options import plan_of
from memplan.mesh import Mesh
from memplan.models import resolve
from memplan.record import unrolled
from memplan.search.search import searched
from memplan.tracing.collectives import is_permutation
from validate.cases import Case, divided_named, shipped_trace
from validate.judge import References, judged

transformers = pytest.importorskip("transformers")

ON_CPU: dict[str, Any] = {"device": "cpu", "precision": "fp32", "seq_len": 128, "zero": 3}

TINY: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 1000, "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip
"""A config.json of a family, whose module is traced over context-parallel ranks."""


class OwnAttention(nn.Module):
    """Two blocks of someone's own, which know nothing of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(100, 32)
        self.blocks = nn.ModuleList([nn.Linear(32, 96) for _ in range(2)])

    def forward(self, ids: torch.Tensor) -> Any:
        x = self.table(ids)
        for block in self.blocks:
            q, k, v = block(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
            x = x + scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x @ self.table.weight.T


def llama(cp=2, tp=1):
    return shipped_trace("hf-llama", tp, 1, cp)


def test_context_parallel_ranks_are_between_data_and_tensor_parallel_ones():
    mesh = Mesh({"dp_replicate": 2, "dp": 2, "cp": 4, "tp": 2})
    assert (mesh.n_ranks, mesh.n_replicas, mesh.stride("cp"), mesh.size("dp x cp")) == (32, 4, 2, 8)
    assert mesh.stride("dp x cp") == 2
    plan = plan_of(dp=2, cp=4, zero=3, seq_len=4096)
    assert (plan.n_shards, plan.shard_group, plan.local_seq_len, plan.global_batch) == (8, "dp x cp", 1024, 2)
    assert plan_of(dp=8, zero=3).shard_group == "dp"


@pytest.mark.parametrize("dp, cp", [(1, 2), (2, 2), (1, 4)])
def test_weights_are_sharded_between_all_ranks_of_a_replica(dp, cp):
    model = llama(cp)
    found = memplan.estimate(model, dp=dp, cp=cp, **ON_CPU)
    whole = [(prod(size[0].factor for size in one.shape), n) for one, n in model.parameters]
    assert found.worst.states.weights_bytes == sum(4 * size * n // (dp * cp) for size, n in whole)
    assert {c.axis for c in found.collectives if c.what == "gather weights"} == {"dp x cp"}


@pytest.mark.parametrize("rotate, n_gathers, n_permutations", [("allgather", 2, 2), ("alltoall", 0, 4)])
def test_keys_and_values_go_around_forward_and_backward(rotate, n_gathers, n_permutations):
    found = memplan.estimate(llama(), dp=1, cp=2, cp_rotate_method=rotate, **ON_CPU)
    layers, width, tokens = 4, 2 * 2 * 16, 64
    ring = [c for c in found.collectives if c.axis == "cp"]
    assert sum(c.calls for c in ring if c.kind == "all_gather") == layers * n_gathers
    assert sum(c.calls for c in ring if c.kind == "permute") == layers * n_permutations
    assert {c.payload_bytes // c.calls for c in ring if c.kind == "permute"} == {4 * width * tokens}
    assert {c.wire_bytes // c.calls for c in ring} == {4 * width * tokens}


def test_a_permutation_sends_the_whole_tensor():
    assert ring_bytes("permute", 1000, 8) == 1000
    assert [is_permutation(splits) for splits in ([0, 5, 0], [5, 5, 0], [5])] == [True, False, False]


def test_twice_the_ranks_and_the_tokens_hold_the_same_activations():
    two, four = (
        memplan.estimate(llama(cp), dp=1, cp=cp, **ON_CPU | {"seq_len": 64 * cp}).peak for cp in (2, 4)
    )
    assert 1 <= four.activations_bytes / two.activations_bytes < 1.01  # of the ids all ranks have all


@pytest.mark.parametrize(
    "options, error, said",
    [
        ({"seq_len": 126}, PlanRefused, r"cuts a sequence into 2 x cp = 4 equal pieces; use seq_len=128\."),
        ({"ep": 2}, MissingRule, "ep=2 has no rule yet"),
        ({"precision": "bf16-autocast"}, MissingRule, "was not traced with .* autocast to bfloat16"),
        ({"cp": 4}, MissingRule, "traced with cp=2, and no rule says"),
        ({"engine": "textbook"}, PlanRefused, "divides nothing along cp"),
    ],
)  # fmt: skip
def test_what_does_not_run_or_has_no_rule_is_refused(options, error, said):
    with pytest.raises(error, match=said):
        memplan.estimate(llama(), **{"dp": 1, "cp": 2, **ON_CPU, **options})


@pytest.mark.parametrize("zero", [0, 1])
def test_gradients_are_averaged_over_all_ranks_of_a_replica(zero):
    found = memplan.estimate(llama(), dp=2, cp=2, **ON_CPU | {"zero": zero})
    states = found.worst.states
    axes = {c.what: c.axis for c in found.collectives if c.axis not in ("cp", "tp")}
    assert {axes.pop(what) for what in list(axes) if what != "module buffers"} == {"dp x cp"}
    moments = 2 * states.weights_bytes
    assert states.optimizer_bytes < (1.1 if zero == 0 else 0.5) * moments


@pytest.mark.parametrize("pp", [2, 4])
def test_a_pipeline_divides_all_sequences_at_once_and_sends_a_rank_s_tokens(pp):
    found = memplan.estimate(llama(), dp=1, cp=2, pp=pp, micro_batch=2, global_batch=16, **ON_CPU)
    sent = next(c for c in found.collectives if c.kind == "send")
    assert sent.payload_bytes // sent.calls == 4 * 2 * 64 * 64
    for stage in found.stages:
        divided = [e.buffer for name, e in unrolled(stage.record.step) if name == "context_parallel"]
        whole = [one for one in divided if one.name.endswith("gather")]
        assert {one.shape for one in whole} == {(16, 128)}


def test_code_without_a_rule_names_the_code_that_has_one():
    with pytest.raises(MissingRule, match=r"use implementation='huggingface', a config\.json, or cp=1"):
        memplan.estimate("llama-3-8b", dp=1, cp=2, zero=3)


def test_the_words_of_accelerate_for_layers_that_are_not_causal_alone():
    config = transformers.MistralConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=99,
        num_key_value_heads=2, sliding_window=16,
    )  # fmt: skip
    ids = torch.arange(64).reshape(2, 32)
    module = transformers.MistralForCausalLM(config)
    with pytest.raises(MissingRule, match="Accelerate refuses layers of type sliding_attention"):
        memplan.trace(module, {"input_ids": ids, "labels": ids}, mesh={"cp": 2}, device="cpu")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_module_of_ones_own_needs_no_change(device):
    ids = torch.zeros(2, 256, dtype=torch.int64)
    asked: dict[str, Any] = {"targets": ids, "device": device, "precisions": ["bf16"]}
    model = memplan.trace(OwnAttention(), ids, mesh={"cp": 2}, cp_ranks=[0, 1], **asked)
    assert (model.mesh, model.limits) == ({"cp": 2}, None)
    plan: dict[str, Any] = {"device": device, "precision": "bf16", "zero": 3, "seq_len": 4096}
    assert memplan.estimate(model, dp=1, cp=2, **plan).peak.total_bytes > 0
    with pytest.raises(InvalidValue, match="cuts it into 2 x cp = 4 equal pieces; give one of 256"):
        memplan.trace(OwnAttention(), ids[:, :255], mesh={"cp": 2}, targets=ids[:, :255], device=device)
    with pytest.raises(InvalidValue, match="cp=2 divides sequences, and no input has one"):
        memplan.trace(nn.Linear(4, 4), torch.zeros(2, 4), targets=torch.zeros(2, 4), mesh={"cp": 2})
    with pytest.raises(InvalidValue, match="expert- and context-parallel ranks have no rule together"):
        memplan.trace(OwnAttention(), ids, mesh={"cp": 2, "ep": 2}, **asked)
    with pytest.raises(InvalidValue, match="cp_ranks=2 is not allowed"):
        memplan.trace(OwnAttention(), ids, mesh={"cp": 2}, cp_ranks=[2], **asked)


def test_the_last_rank_of_a_sequence_differs_from_the_first():
    plan = plan_of(dp=1, cp=2, zero=3, precision="fp32", seq_len=128)
    case = Case(name="two ranks", model=llama(), plan=plan)
    from validate.predict import prediction

    first, last = (prediction(case, rank) for rank in (0, 1))
    assert first.peak_bytes > last.peak_bytes
    assert first.collectives == last.collectives


def test_a_config_json_is_planned_searched_and_exported(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(TINY))
    model = resolve(config, precisions=("bf16-mixed",))
    asked: dict[str, Any] = {
        "cluster": "8xh100-sxm", "seq_len": 2048, "global_batch": 8, "tp": 1, "pp": 1, "cp": (1, 2, 4),
        "recompute": ("none", "full"),
    }  # fmt: skip
    everything, found = (searched(model, keep=keep, **asked) for keep in (None, 5))
    assert found.within == everything.within[:5]
    assert {one.plan.cp for one in everything.within} == {1, 2, 4}
    e = memplan.estimate(
        str(config), cluster="8xh100-sxm", cp=2, zero=3, seq_len=2048, fsdp_units="block+ends"
    )
    assert "Ranks of a sequence hold nearly" in " ".join(str(e).split())
    text = e.export("accelerate")
    assert "parallelism_config_cp_size: 2\n" in text
    assert "parallelism_config_cp_comm_strategy: allgather\n" in text
    replicated = memplan.estimate(str(config), cluster="8xh100-sxm", cp=2, zero=0, seq_len=2048)
    with pytest.raises(PlanRefused, match="'Using `cp_size>1` requires FSDP2'"):
        replicated.export("accelerate")
    with pytest.raises(PlanRefused, match="the script divides no sequences, Accelerate does"):
        e.export("torchrun")


def test_the_name_of_a_trace_says_its_ranks():
    assert divided_named("hf-llama.tp2.cp2") == ("hf-llama", 2, 1, 2)


@pytest.mark.parametrize("tp, rotate", [(1, "alltoall"), (2, "allgather")])
def test_small_ones_run_as_predicted_on_each_rank(tp, rotate):
    plan = plan_of(
        dp=1, cp=2, tp=tp, zero=3, micro_batch=2, precision="bf16-mixed", seq_len=128, recompute="full",
        cp_rotate_method=rotate,
    )  # fmt: skip
    record = judged(Case(name="context", model=llama(tp=tp), plan=plan), References())
    assert (record.outcome, record.collectives_off) == ("ok", 0)
    assert record.peak_error is not None
    assert abs(record.peak_error) < 1e-4
