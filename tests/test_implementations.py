"""Models as others' code runs them: bytes of real runs of that code, and what it cannot be asked for."""

from typing import Any

import pytest

import memplan
from memplan.device import CPU
from memplan.errors import InvalidValue, MissingRule, UnknownName
from memplan.estimate import rank_estimate
from memplan.models import implemented, preset
from memplan.models.huggingface_gpt import HuggingFaceGpt
from memplan.plan import Plan, Rank

TINY_GPT2: dict[str, Any] = {"n_layers": 3, "d_model": 64, "n_heads": 4, "d_ff": 256, "max_seq_len": 512}

# transformers 5.23.0, torch 2.13.0, CPU, one thread, oneDNN off: GPT2LMHeadModel, AdamW, labels, no cache;
# the third step's highest sum of the profiler's memory events, beside weights, optimizer state and tokens.
MEASURED: list[tuple[dict[str, Any], dict[str, Any], int]] = [
    ({"vocab_size": 16}, {"precision": "fp32", "micro_batch": 2}, 14_526_192),
    ({"vocab_size": 16}, {"precision": "bf16", "micro_batch": 2}, 7_280_624),
    ({"vocab_size": 16}, {"precision": "bf16-mixed", "micro_batch": 2}, 9_183_592),
    ({"vocab_size": 16}, {"precision": "fp32", "micro_batch": 2, "recompute": "full"}, 7_558_272),
    ({"vocab_size": 16, "dropout": 0.1}, {"precision": "fp32", "micro_batch": 2}, 34_162_416),
    ({"vocab_size": 500}, {"precision": "fp32", "micro_batch": 1, "recompute": "full"}, 5_616_768),
    ({"vocab_size": 500}, {"precision": "fp32", "micro_batch": 2}, 16_986_096),
    ({"vocab_size": 500}, {"precision": "bf16", "micro_batch": 1}, 5_668_976),
    ({"vocab_size": 500}, {"precision": "bf16-mixed", "micro_batch": 1}, 7_553_520),
]


@pytest.mark.parametrize("sizes,asked,peak_bytes", MEASURED, ids=str)
def test_gpt2_holds_what_transformers_does(sizes, asked, peak_bytes):
    model = HuggingFaceGpt(name="tiny", tied_head=True, **TINY_GPT2, **sizes)
    plan = Plan(seq_len=256, global_batch=asked["micro_batch"], **asked)
    predicted = rank_estimate(model, plan, Rank(), CPU).peak_bytes
    assert predicted == pytest.approx(peak_bytes, rel=0.004 if plan.mixed else 2e-5)


def test_an_implementation_is_named_in_every_output():
    e = memplan.estimate("gpt2", implementation="huggingface")
    assert e.to_dict()["model"]["implementation"] == "huggingface"
    assert "code     huggingface: transformers 5.23, GPT2LMHeadModel" in str(e)
    assert memplan.estimate("gpt2").to_dict()["model"]["implementation"] == "reference"


def test_implementations_have_the_same_weights():
    for name in ("gpt2", "gpt2-xl"):
        other = implemented(preset(name), "huggingface")
        assert memplan.parameter_count(other) == memplan.parameter_count(preset(name))


@pytest.mark.parametrize("asked", [{"tp": 2}, {"pp": 2}, {"loss_chunks": 8}], ids=str)
def test_what_the_code_has_no_rule_for_is_refused(asked):
    with pytest.raises(MissingRule, match=r"has no rule for transformers 5\.23, GPT2LMHeadModel"):
        memplan.estimate("gpt2", implementation="huggingface", **asked)


def test_what_an_implementation_has_no_place_for_is_refused():
    biased = memplan.Llama(
        name="b", n_layers=1, d_model=8, n_heads=2, d_ff=8, vocab_size=8, max_seq_len=8, mlp_bias=True
    )
    with pytest.raises(InvalidValue, match="mlp_bias=True of b has no place in the torchtitan"):
        implemented(biased, "torchtitan")
    with pytest.raises(UnknownName, match=r"unknown implementation of llama: 'torchtitian'; did you mean"):
        implemented(biased, "torchtitian")


def test_a_plan_is_named_with_its_implementation():
    found = memplan.search(
        "gpt2", implementation="huggingface", cluster="2xh100-sxm", global_batch=4, seq_len=256, keep=2
    )
    assert all("--implementation huggingface" in line for line in found["command"][:2])
    assert (found["verdict"] == "refused").any()
