"""Modules that hold weights of several types, or checkpoint themselves, are planned as CPU ranks run them."""

import json
import re
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from memplan import MissingRule, PlanRefused
from memplan.engines.options import plan_of
from memplan.models.trace_from_json import model_from_trace
from tests.traced import trace_of
from validate.cases import Case, shipped_trace
from validate.machine import Budget
from validate.suites.models import SMALL as SMALL_MODELS
from validate.sweep import judging, swept

BUDGET = Budget(cores=2, memory_bytes=8 * 2**30)


class Layers(nn.Module):
    """Nine layers of 2 MiB in bfloat16, all but the last frozen; that one is of 4 MiB in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(9))
        self.layers.to(torch.bfloat16)
        self.layers[:-1].requires_grad_(False)
        self.layers[-1].float()

    def forward(self, x):
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype))
        return x.float().sum()


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_frozen_weights_are_held_in_their_own_type(device, tmp_path):
    module = Layers()
    traced = memplan.trace(module, torch.zeros(4, 1024), device=device)
    traced.save(tmp_path / "trace.json")
    assert model_from_trace(tmp_path / "trace.json") == traced
    own_bytes = sum(p.numel() * p.element_size() for p in module.parameters())
    for precision, mebibytes in (("bf16-mixed", 20), ("fp32", 20), ("bf16", 18)):
        estimate = memplan.estimate(traced, device=device, seq_len=1, precision=precision)
        assert estimate.worst.states.weights_bytes == mebibytes * 2**20
        assert (estimate.worst.states.weights_bytes == own_bytes) == (precision != "bf16")


def test_what_is_trained_in_another_type_than_it_is_held_in_is_told():
    module = Layers().to(torch.bfloat16).requires_grad_()
    traced = memplan.trace(module, torch.zeros(4, 1024), device="cpu")
    told = {
        precision: "holds weights that it trains in bfloat16"
        in str(memplan.estimate(traced, device="cpu", seq_len=1, precision=precision).notes)
        for precision in ("fp32", "bf16", "bf16-mixed")
    }
    assert told == {"fp32": True, "bf16": False, "bf16-mixed": True}


def test_weights_of_several_types_are_not_gathered_as_they_are():
    traced = shipped_trace("hf-llama-lora-bf16")
    with pytest.raises(MissingRule, match=r"weights of bfloat16 beside others in float32.*'bf16-mixed'"):
        memplan.estimate(traced, device="cpu", precision="fp32", zero=3, dp=2)


PLANS: tuple[dict[str, Any], ...] = (
    {"precision": "bf16-mixed"},
    {"precision": "bf16"},
    {"precision": "bf16-mixed", "dp": 2},
    {"precision": "bf16-mixed", "dp": 2, "zero": 1, "optimizer": "sgd-momentum"},
    {"precision": "bf16-mixed", "dp": 2, "zero": 2},
    {"precision": "bf16-mixed", "dp": 2, "zero": 3},
    {"precision": "fp32", "dp": 2},
)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hf-llama-lora-bf16", "hf-llama-peft-bf16", "own-checkpoints"])
def test_cpu_ranks_hold_and_send_what_is_said(name):
    """States and collectives to the byte, peaks within the tolerance, as `validate` judges real runs."""
    model = shipped_trace(name)
    fp32 = {"precision": "fp32", "dp": 2, "zero": 3}
    plans = [*PLANS, *([fp32] if name == "own-checkpoints" else [])]
    cases = [
        Case(name=f"{name} {plan}", model=model, plan=plan_of(seq_len=64, global_batch=4, **plan))
        for plan in plans
    ]
    with judging(None) as judge, closing(swept(cases, judge, BUDGET)) as fresh:
        records = list(fresh)
    assert [(r.case["name"], r.outcome, r.reason) for r in records if not r.confirmed] == []


NARROW: tuple[dict[str, Any], ...] = (
    {"precision": "bf16-autocast"},
    {"precision": "bf16-autocast", "dp": 2, "global_batch": 8},
    {"precision": "bf16-autocast", "dp": 2, "zero": 3},
    {"precision": "bf16-reduce-fp32", "dp": 2, "zero": 2},
    {"precision": "bf16-reduce-fp32", "dp": 2, "zero": 3, "global_batch": 8},
    {"precision": "bf16-mixed-reduce-bf16", "dp": 2, "zero": 3, "micro_batch": 4},
    {"precision": "bf16-mixed-reduce-bf16", "dp": 2, "pp": 2, "zero": 2, "global_batch": 8},
)


@pytest.mark.slow
def test_cpu_ranks_hold_bfloat16_weights_as_each_precision_says():
    """Measured by PyTorch on CPU ranks over gloo: states and collectives to the byte, peaks but for 10 bytes.

    Those are the number that AdamW's division takes as a tensor, of 8 bytes and of 2 in bfloat16.
    """
    cases = [
        Case(name=str(plan), model=SMALL_MODELS["llama-small"], plan=plan_of(seq_len=64, **plan))
        for plan in NARROW
    ]
    with judging(None) as judge, closing(swept(cases, judge, BUDGET)) as fresh:
        found = {r.case["name"]: (r.states_off_bytes, r.collectives_off, r.peak_error) for r in fresh}
    assert {name: off[:2] for name, off in found.items()} == {case.name: (0, 0) for case in cases}
    assert all(-2e-6 < peak_error <= 0 for *_, peak_error in found.values()), found


def test_gradients_in_float32_need_fsdp2():
    with pytest.raises(PlanRefused, match=r"'bf16-reduce-fp32' reduces gradients in float32, but Distri"):
        memplan.estimate("gpt2", precision="bf16-reduce-fp32", dp=2)


def test_cuda_s_autocast_computes_norms_of_bfloat16_weights_in_float32():
    """The family's rules have the bytes that a trace of PyTorch's own dispatch has, more than without it."""
    model = replace(SMALL_MODELS["gpt-small"], dropout=0.0)
    asked: dict[str, Any] = {"device": "cuda", "seq_len": 64, "micro_batch": 64}
    peaks = {
        precision: [
            memplan.estimate(one, precision=precision, **asked).peak.total_bytes
            for one in (model, trace_of(model, "cuda", (precision,)))
        ]
        for precision in ("bf16", "bf16-autocast")
    }
    assert [by_rules == traced for by_rules, traced in peaks.values()] == [True, True], peaks
    assert peaks["bf16"] < peaks["bf16-autocast"]


SIZES = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "vocab_size": 99}
SMALL = {**SIZES, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 2}


@pytest.mark.parametrize(
    "setting, told",
    [
        ({"_attn_implementation": "eager"}, "_attn_implementation=eager is ignored"),
        ({"attn_implementation": "flex_attention"}, "attn_implementation=flex_attention is ignored"),
        ({"gradient_checkpointing": True}, "use recompute='full'"),
        ({"_attn_implementation": "sdpa", "gradient_checkpointing": False}, ""),
    ],
)
def test_settings_of_a_run_in_a_config_are_named(setting, told, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, **setting}))
    notes = memplan.estimate(str(tmp_path), seq_len=32, device="cpu").notes
    assert [told in note for note in notes if "is ignored" in note] == ([True] if told else [])


@pytest.mark.parametrize(
    "said, precision, told",
    [
        ({"dtype": "bfloat16"}, "bf16-mixed", "dtype=bfloat16 in its config.json .* precision='bf16' or "),
        ({"torch_dtype": "torch.bfloat16"}, "fp32", "torch_dtype=bfloat16 .*'fp32' holds them in float32"),
        ({"text_config": {"dtype": "bfloat16"}}, "bf16-mixed", "^dtype=bfloat16 .* precision='bf16' or "),
        ({"dtype": "bfloat16"}, "bf16", ""),
        ({"dtype": "float32"}, "bf16-mixed", ""),
        ({"dtype": "float32"}, "bf16", "precision='fp32' or 'bf16-mixed' or .* or 'fp16-mixed' plays"),
        ({"dtype": "float16"}, "fp16-mixed", "which no precision plays; .* holds them in float32"),
        ({"dtype": "int8"}, "bf16-mixed", "dtype='int8' is ignored"),
        ({"dtype": {"": "float32"}}, "bf16-mixed", "dtype=.* is ignored"),
        ({"dtype": None}, "bf16-mixed", ""),
    ],
)
def test_the_type_in_a_config_is_obeyed_or_named(said, precision, told, tmp_path):
    """from_pretrained loads weights in the dtype of config.json; a plan has those of its precision."""
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, **said}))
    (tmp_path / "plain.json").write_text(json.dumps(SMALL))
    asked: dict[str, Any] = {"seq_len": 32, "device": "cpu", "precision": precision}
    found, plain = (memplan.estimate(str(tmp_path / name), **asked) for name in ("config.json", "plain.json"))
    notes = [note for note in found.notes if "dtype" in note]
    assert [re.search(told, note) is not None for note in notes] == ([True] if told else [])
    assert found.peak == plain.peak


def test_a_checkpoint_is_loaded_in_the_type_that_is_named(tmp_path):
    """Measured: the bytes of a small checkpoint in bfloat16 as transformers loads it, which 'bf16' plans."""
    transformers = pytest.importorskip("transformers")
    module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)).to(torch.bfloat16)
    module.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    held_bytes = sum(p.numel() * p.element_size() for p in loaded.parameters())
    found = {
        precision: memplan.estimate(str(tmp_path), seq_len=32, device="cpu", precision=precision)
        for precision in ("bf16", "bf16-mixed")
    }
    weights = {precision: one.worst.states.weights_bytes for precision, one in found.items()}
    assert weights == {"bf16": held_bytes, "bf16-mixed": 2 * held_bytes}
    assert ["bfloat16 in its config.json" in str(one.notes) for one in found.values()] == [False, True]
