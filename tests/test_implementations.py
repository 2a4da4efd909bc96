"""Models as others' code runs them: bytes of real runs of that code, and what it cannot be asked for."""

from typing import Any

import pytest

import memplan
from memplan.device import CPU, H100
from memplan.engines.options import plan_of
from memplan.errors import InvalidValue, MissingRule, UnknownName
from memplan.estimate import rank_estimate
from memplan.models import Decoder, implemented, preset
from memplan.models.huggingface_gpt import HuggingFaceGpt
from memplan.models.huggingface_llama import HuggingFaceLlama
from memplan.plan import Rank

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


TINY_LLAMA: dict[str, Any] = {"n_layers": 3, "d_model": 64, "n_heads": 8, "n_kv_heads": 4, "d_ff": 176}

# The same of LlamaForCausalLM.
MEASURED_LLAMA: list[tuple[int, dict[str, Any], int]] = [
    (16, {"precision": "fp32", "micro_batch": 2}, 10_540_704),
    (16, {"precision": "bf16", "micro_batch": 2}, 6_036_384),
    (16, {"precision": "bf16-mixed", "micro_batch": 2}, 8_150_688),
    (16, {"precision": "fp32", "micro_batch": 2, "recompute": "full"}, 5_633_632),
    (500, {"precision": "bf16", "micro_batch": 1}, 5_090_080),
]


@pytest.mark.parametrize("vocab_size,asked,peak_bytes", MEASURED_LLAMA, ids=str)
def test_llama_holds_what_transformers_does(vocab_size, asked, peak_bytes):
    model = HuggingFaceLlama(name="tiny", max_seq_len=512, vocab_size=vocab_size, **TINY_LLAMA)
    plan = plan_of(seq_len=256, global_batch=asked["micro_batch"], **asked)
    predicted = rank_estimate(model, plan, Rank(), CPU).peak_bytes
    assert predicted == peak_bytes


@pytest.mark.parametrize("sizes,asked,peak_bytes", MEASURED, ids=str)
def test_gpt2_holds_what_transformers_does(sizes, asked, peak_bytes):
    model = HuggingFaceGpt(name="tiny", tied_head=True, **TINY_GPT2, **sizes)
    plan = plan_of(seq_len=256, global_batch=asked["micro_batch"], **asked)
    predicted = rank_estimate(model, plan, Rank(), CPU).peak_bytes
    assert predicted == pytest.approx(peak_bytes, rel=0.004 if plan.mixed else 2e-5)


WIDE_LLAMA = HuggingFaceLlama(
    name="wide", n_layers=4, d_model=1024, n_heads=16, n_kv_heads=4, d_ff=2816, vocab_size=32_000,
    max_seq_len=8192,
)  # fmt: skip
WIDE_GPT2 = HuggingFaceGpt(
    name="wide", n_layers=4, d_model=1024, n_heads=16, d_ff=4096, vocab_size=50_264, max_seq_len=8192,
    tied_head=True,
)  # fmt: skip

# transformers 5.23.0 on torch 2.13.0+cu130 and an H100 that is not there (`validate.nogpu`; no GPU was
# measured): the most requested bytes of the third step. Whether a sequence is packed is a value, which is not
# computed there: transformers was told that none is.
WITHOUT_A_GPU: list[tuple[Decoder, dict[str, Any], int]] = [
    (WIDE_LLAMA, {"precision": "bf16", "micro_batch": 1}, 1_895_987_528),
    (WIDE_LLAMA, {"precision": "fp32", "micro_batch": 1}, 4_031_983_880),
    (WIDE_LLAMA, {"precision": "bf16-mixed", "micro_batch": 2}, 4_056_740_168),
    (WIDE_LLAMA, {"precision": "bf16", "micro_batch": 2, "recompute": "full"}, 2_371_508_488),
    (WIDE_GPT2, {"precision": "bf16", "micro_batch": 1}, 2_442_743_880),
    (WIDE_GPT2, {"precision": "bf16-mixed", "micro_batch": 1}, 3_546_898_504),
]


@pytest.mark.parametrize("model,asked,peak_bytes", WITHOUT_A_GPU, ids=str)
def test_cudas_rules_hold_what_pytorchs_cuda_build_requests(model, asked, peak_bytes):
    plan = plan_of(seq_len=2048, global_batch=asked["micro_batch"], **asked)
    predicted = rank_estimate(model, plan, Rank(), H100).peak_bytes
    assert predicted == peak_bytes


def test_an_implementation_is_named_in_every_output():
    e = memplan.estimate("gpt2", implementation="huggingface")
    assert e.to_dict()["model"]["implementation"] == "huggingface"
    assert "code: transformers 5.23, GPT2LMHeadModel" in str(e)
    assert memplan.estimate("gpt2").to_dict()["model"]["implementation"] == "reference"


def test_implementations_have_the_same_weights():
    for name in ("gpt2", "gpt2-xl", "llama-2-7b", "llama-3-70b"):
        other = implemented(preset(name), "huggingface")
        assert memplan.parameter_count(other) == memplan.parameter_count(preset(name))


def test_what_the_code_has_no_rule_for_is_refused():
    with pytest.raises(MissingRule, match=r"has no rule for transformers 5\.23, GPT2LMHeadModel"):
        memplan.estimate("gpt2", implementation="huggingface", loss_chunks=8)
    pytest.importorskip("transformers")
    with pytest.raises(InvalidValue, match="`GPT2LMHeadModel` has no `tp_plan`"):
        memplan.estimate("gpt2", implementation="huggingface", tp=2)


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
