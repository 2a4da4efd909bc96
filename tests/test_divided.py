"""Modules divided over tensor ranks by their own framework's plan: traced, planned, searched."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

import memplan
from memplan import InvalidValue, MissingRule, PlanRefused
from memplan.engines.options import plan_of
from memplan.models import implemented
from memplan.models.qwen3 import Qwen3
from memplan.models.trace_from_json import model_from_trace
from memplan.placements import Partial, Replicate, Shard
from memplan.plan import Rank
from memplan.search.search import searched
from validate.cases import Case, divided_traces, shipped_trace
from validate.judge import References, judged
from validate.suites.divided import UNEVEN
from validate.suites.models import GPT
from validate.systems.torch.modules import token_loss
from validate.systems.torch.parallelize import cut_tensors, stage_module

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 1000, "max_position_embeddings": 64, "use_cache": False,
}  # fmt: skip
IDS = torch.randint(3, 1000, (2, 64), generator=torch.Generator().manual_seed(0))
INPUTS = {"input_ids": IDS, "labels": IDS}
ON_CPU: dict[str, Any] = {"device": "cpu", "precision": "fp32", "seq_len": 64}


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return self.down(self.up(x).relu())


def by_columns(module, mesh):
    parallelize_module(module, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})


def traced_mlp(**options):
    x = torch.zeros(4, 8)
    asked = {"device": "cpu", "precisions": ["fp32"], "mesh": {"tp": 2}, "parallelize": by_columns, **options}
    return memplan.trace(Mlp(), x, targets=torch.zeros(4, dtype=torch.int64), **asked)


def llama(**sizes):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, **sizes}))


def traced_llama(tp=2, **sizes):
    return memplan.trace(llama(**sizes), INPUTS, mesh={"tp": tp}, device="cpu", precisions=["fp32"])


def test_a_module_is_divided_as_a_function_divides_it_and_left_as_it_was():
    own = Mlp()
    model = memplan.trace(
        own, torch.zeros(4, 8), targets=torch.zeros(4, dtype=torch.int64), device="cpu",
        precisions=["fp32"], mesh={"tp": 2}, parallelize=by_columns,
    )  # fmt: skip
    assert model.mesh == {"tp": 2}
    assert {one.name: one.placements for one, _ in model.parameters} == {
        "up.weight": (("tp", Shard(0)),),
        "up.bias": (("tp", Shard(0)),),
        "down.weight": (("tp", Shard(1)),),
        "down.bias": (("tp", Replicate()),),
    }
    assert model.n_parameters == sum(one.numel() for one in own.parameters())
    assert type(own.up.weight) is nn.Parameter
    assert not dist.is_initialized()
    sent = memplan.estimate(model, tp=2, **{**ON_CPU, "seq_len": 1, "micro_batch": 4}).collectives
    assert [(c.kind, c.axis, c.calls, c.payload_bytes) for c in sent] == [("all_reduce", "tp", 1, 4 * 8 * 4)]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_trace_of_divided_modules_has_the_bytes_of_their_rules(sequence_parallel):
    """memplan's own GPT by `parallelize_module`, traced, and by the rules of its operations."""
    plan = plan_of(tp=2, sequence_parallel=sequence_parallel, micro_batch=2, seq_len=64, precision="fp32")
    module = stage_module(GPT, plan, 0, seed=None, device=torch.device("meta"))

    def cut(module: Any, mesh: DeviceMesh) -> None:
        cut_tensors(module, plan, Rank(), mesh["tp"])

    with loss_parallel():
        model = memplan.trace(
            module, IDS, targets=IDS.clone(), loss=lambda logits, y: token_loss(logits, y, chunks=1),
            device="cpu", precisions=["fp32"], mesh={"tp": 2}, max_seq_len=64, parallelize=cut,
        )  # fmt: skip
    asked = {**ON_CPU, "tp": 2, "micro_batch": 2}
    found = memplan.estimate(model, **asked)
    ruled = memplan.estimate(GPT, sequence_parallel=sequence_parallel, **asked)
    assert found.peak.total_bytes == ruled.peak.total_bytes
    sent = [sum(c.payload_bytes for c in one.collectives) for one in (found, ruled)]
    assert sent[0] == sent[1]
    if sequence_parallel:
        partial = [one.name for one, _ in model.parameters if ("tp", Partial()) in one.grad_placements]
        assert len(partial) == 2 * 2 + 3  # two norms of each block, with biases shared by name, and the ends


@pytest.mark.parametrize("tied", [False, True])
def test_a_trace_of_a_divided_module_is_written_and_read(tmp_path, tied):
    model = traced_llama(tie_word_embeddings=tied)
    model.save(tmp_path / "trace.json")
    assert model_from_trace(tmp_path / "trace.json") == model
    assert model.tied is tied


def test_a_family_of_transformers_is_divided_by_transformers_own_plan():
    family = Qwen3(
        name="tiny", n_layers=4, d_model=64, n_heads=4, n_kv_heads=2, d_head=16, d_ff=176, vocab_size=1000,
        max_seq_len=64,
    )  # fmt: skip
    found = memplan.estimate(family, tp=2, **ON_CPU)
    assert found.worst.peak_bytes < memplan.estimate(family, **ON_CPU).worst.peak_bytes
    assert "framework's own plan" in " ".join(found.notes)
    assert {c.axis for c in found.collectives} == {"tp"}
    with pytest.raises(PlanRefused, match=r"tp=4 does not divide n_kv_heads=2; use one of 1, 2\."):
        memplan.estimate(family, tp=4, **ON_CPU)
    for plan, complaint in (
        ({"dp": 2}, "DistributedDataParallel makes plain tensors of DTensors"),
        ({"sequence_parallel": True}, "divides no sequence"),
        ({"recompute": "selective"}, "use recompute='full' or 'none'"),
        ({"pp": 2, "schedule": "zero-bubble", "global_batch": 4}, "use schedule='interleaved-1f1b'"),
    ):
        with pytest.raises(MissingRule, match=complaint):
            memplan.estimate(family, **{**ON_CPU, "tp": 2, **plan})


def test_a_trace_holds_for_its_degrees():
    model = traced_mlp()
    for tp in (1, 4):
        with pytest.raises(MissingRule, match="was traced with tp=2, and no rule says what other degrees"):
            memplan.estimate(model, tp=tp, device="cpu", precision="fp32", seq_len=1)
    model = traced_mlp(device="cuda")
    found = searched(model, cluster="4xh100-sxm", global_batch=4, precision="fp32", seq_len=1)
    assert found.left_out[0].startswith("tp=1 or tp=4 is left out: one rank: Mlp was traced with tp=2")


@pytest.mark.parametrize(
    "options, complaint",
    [
        ({"parallelize": None}, "Mlp has no plan of its own; say what divides it"),
        ({"mesh": {"to": 2}}, "unknown axis of a mesh that a module is divided over 'to'. Known: cp, ep, tp"),
        ({"mesh": {"tp": 0}}, "tp=0 is not allowed"),
        ({"device": "cuda", "executed": True}, "leave one of them out"),
        (
            {"parallelize": lambda module, mesh: parallelize_module(module, mesh["dp"], {})},
            r"Mlp cannot be divided over tp=2 \(.*dp.*\); use one rank, other degrees, or a function",
        ),
    ],
)
def test_a_module_that_cannot_be_divided_says_why(options, complaint):
    with pytest.raises((InvalidValue, memplan.UnknownName), match=complaint):
        traced_mlp(**options)


def test_what_transformers_has_no_plan_for_says_so():
    config = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=64, vocab_size=1000)
    with pytest.raises(InvalidValue, match="`GPT2LMHeadModel` has no `tp_plan`"):
        memplan.trace(transformers.GPT2LMHeadModel(config), INPUTS, mesh={"tp": 2}, device="cpu")


def test_a_process_of_a_job_of_its_own_divides_nothing():
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with pytest.raises(InvalidValue, match=r"torch\.distributed is initialized"):
            traced_mlp()
    finally:
        dist.destroy_process_group()


def test_traces_on_file_are_of_their_degrees():
    assert len(divided_traces()) >= 21
    for one in divided_traces():
        model = shipped_trace(*one)
        assert (model.name, model.mesh) == (one.name, one.mesh)


def test_implementations_that_divide_themselves_are_never_traced(monkeypatch):
    monkeypatch.setattr("memplan.tracing.cache.traced_from_config", None)
    assert implemented(replace(GPT, name="own"), "reference").divides_itself
    assert memplan.estimate(GPT, tp=2, **ON_CPU).worst.peak_bytes


@pytest.mark.slow
def test_sizes_that_ranks_do_not_divide_are_planned_for_the_rank_with_the_largest_chunks():
    model = shipped_trace(UNEVEN, 2)
    plan = plan_of(tp=2, dp=2, zero=3, micro_batch=2, precision="bf16-mixed", seq_len=64)
    record = judged(Case(name="odd", model=model, plan=plan), References())
    assert record.predicted
    assert record.measured
    ranks = list(zip(record.predicted["ranks"], record.measured["ranks"], strict=True))
    for figure in ("weights_bytes", "optimizer_bytes", "peak_bytes"):
        assert all(said[figure] == found[figure] for said, found in ranks[::2])
        assert all(said[figure] > found[figure] > 0.97 * said[figure] for said, found in ranks[1::2])


def test_the_command_line_traces_a_config_json_over_tensor_ranks(tmp_path):
    from click.testing import CliRunner

    from memplan.cli import commands

    config, out = tmp_path / "config.json", str(tmp_path / "divided.json")
    values = {"model_type": "glm4", "architectures": ["Glm4ForCausalLM"], "head_dim": 16, "pad_token_id": 0}
    config.write_text(json.dumps({**SIZES, **values, "max_position_embeddings": 256}))
    asked = ["trace", str(config), "--out", out, "--device", "cpu"]
    found = CliRunner().invoke(commands, [*asked, "--tp", "2"])
    assert " over tp=2: " in found.output
    assert model_from_trace(out).mesh == {"tp": 2}
    for tp in ("0", "two"):
        assert "tp=" in CliRunner().invoke(commands, [*asked, "--tp", tp]).output
