"""Adapters beside frozen weights: planned, refused, searched, and traced as the records on file were."""

import json
from typing import Any

import pytest

import memplan
from memplan import InvalidValue, MissingRule, PlanRefused
from memplan.engines.options import plan_of
from memplan.search.search import searched
from memplan.tracing import cache
from validate.adapted import ADAPTED, path_of
from validate.cases import packed_trace

pytest.importorskip("peft")

TRACED = cache._traced
"""What traces, before a fixture has it look on file."""

TINY: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 1000, "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip
"""A config.json of a family."""

WHOLE = 1000 * 64 * 2 + 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96 + 2 * 64) + 64
"""Its weights."""

ADAPTERS = 2 * 8 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 96))
"""Weights of adapters of rank 8 beside all its linears but the head."""


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "config.json"
    path.write_text(json.dumps(TINY))
    return str(path)


def states(config, **asked):
    found = memplan.estimate(config, lora_rank=8, seq_len=2048, **asked).worst.states
    return found.weights_bytes, found.grads_bytes, found.optimizer_bytes - 4 * (14 * 2)


def test_frozen_weights_are_in_the_type_of_products_and_adapters_alone_are_trained(config):
    """An optimizer step is counted for each of 28 adapters, which is taken off."""
    assert states(config) == (2 * WHOLE + 4 * ADAPTERS, 4 * ADAPTERS, 8 * ADAPTERS)
    assert states(config, precision="bf16") == (2 * WHOLE + 2 * ADAPTERS, 2 * ADAPTERS, 4 * ADAPTERS)
    assert states(config, precision="fp32") == (4 * WHOLE + 4 * ADAPTERS, 4 * ADAPTERS, 8 * ADAPTERS)


def test_four_bits_a_weight_and_a_scale_for_each_64(config):
    """The head, the embedding and norms are in float32, as PEFT prepares them; 16 values for each linear."""
    quantized = WHOLE - 1000 * 64 * 2 - 5 * 64
    rest = 4 * (WHOLE - quantized)
    weights, *_ = states(config, quantize="nf4")
    assert weights == quantized // 2 + 4 * quantized // 64 + 14 * 16 * 4 + rest + 4 * ADAPTERS
    double, *_ = states(config, quantize="nf4-double")
    scales = [n // 64 for n in 2 * (64 * 64, 64 * 32, 64 * 32, 64 * 64, 64 * 96, 64 * 96, 64 * 96)]
    held = sum(n + 4 * -(-n // 256) + 4 + 256 * 4 for n in scales) + 256 * 4  # and one map for all
    assert double == quantized // 2 + held + 14 * 16 * 4 + rest + 4 * ADAPTERS


def test_eight_bits_a_weight_and_a_scale_for_each_output(config):
    quantized = WHOLE - 1000 * 64 * 2 - 5 * 64
    rest = 4 * (WHOLE - quantized)
    scales = 4 * 2 * (64 + 32 + 32 + 64 + 96 + 96 + 64)
    weights, *_ = states(config, quantize="int8")
    assert weights == quantized + scales + rest + 4 * ADAPTERS


def test_the_node_of_a_product_in_eight_bits_keeps_its_input_where_blocks_are_recomputed_too(config):
    """Of 2 blocks of 2,048 tokens in bfloat16: two normed inputs, the attention's output and the MLP's."""
    asked: dict[str, Any] = {"lora_rank": 8, "seq_len": 2048, "recompute": "full", "precision": "bf16"}
    in_four, in_eight = (
        memplan.estimate(config, quantize=how, **asked).peak.activations_bytes for how in ("nf4", "int8")
    )
    assert in_eight - in_four == 2 * 2048 * 2 * (64 + 64 + 64 + 96)


def test_a_bias_that_the_first_pass_casts_for_good_is_refused(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**TINY, "attention_bias": True}))
    asked: dict[str, Any] = {"lora_rank": 8, "seq_len": 64, "quantize": "int8"}
    with pytest.raises(
        MissingRule, match=r"bias, whose input is in another type, .*; use quantize='nf4', or"
    ):
        memplan.estimate(str(path), **asked)
    assert memplan.estimate(str(path), precision="bf16", **asked).worst.peak_bytes > 0


def test_dora_has_magnitudes_and_saved_modules_are_trained_whole(config):
    magnitudes = 2 * (2 * 64 + 2 * 32 + 2 * 96 + 64)
    whole = memplan.estimate(config, lora_rank=8, use_dora=True, seq_len=64).worst.states
    assert whole.grads_bytes == 4 * (ADAPTERS + magnitudes)
    saved = memplan.estimate(config, lora_rank=8, modules_to_save=["lm_head"], seq_len=64).worst.states
    assert saved.grads_bytes == 4 * (ADAPTERS + 1000 * 64)


def test_names_of_modules_are_a_text_or_a_list(config):
    one, other = (
        memplan.estimate(config, lora_rank=8, lora_targets=targets, seq_len=64)
        for targets in ("q_proj,v_proj", ["q_proj", "v_proj"])
    )
    assert one.plan == other.plan
    assert one.worst.states.grads_bytes == 4 * 2 * 8 * (64 + 64 + 64 + 32)


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"lora_rank": None, "quantize": "nf4"}, PlanRefused, "quantize='nf4' is of LoRA, .*; use lora_rank=16"),
    ({"lora_dropout": 1.0}, PlanRefused, "lora_dropout=1 drops everything; use"),
    ({"lora_targets": ""}, PlanRefused, "lora_targets='' names no module; use all-linear"),
    ({"use_dora": True, "quantize": "nf4"}, MissingRule, "use_dora=True with quantize='nf4' has no rule yet"),
    ({"dp": 1, "tp": 2}, MissingRule, "lora_rank=8 with tp=2 has no rule yet; use tp=1"),
    ({"dp": 2, "zero": 3, "fsdp_version": 1}, MissingRule, "fsdp_version=1 has no rule yet; use fsdp_ver"),
    ({"dp": 2, "zero": 3, "quantize": "nf4"}, MissingRule, "zero=3 of quantized weights has no rule yet"),
    ({"dp": 2, "zero": 2, "quantize": "int8"}, MissingRule, "zero=2 of quantized weights has no rule yet"),
    (
        {"quantize": "int8", "trainer": "huggingface"},
        MissingRule,
        "trainer='huggingface', quantize='int8' has no rule yet; use quantize='nf4'",
    ),
    ({"quantize": "int8", "device": "cpu"}, MissingRule, "quantize='int8' of bitsandbytes has rules on GPUs"),
    ({"quantize": "nf4", "seq_len": 512}, MissingRule, "of 512 tokens, .*; use micro_batch and seq_len of"),
    ({"lora_targets": "wq"}, InvalidValue, "lora_targets='wq', .* not found .*; use .* names of down_proj,"),
    (
        {"precision": "fp16-mixed"},
        MissingRule,
        "precision='fp16-mixed' has no rule yet; use precision=",
    ),
    ({"engine": "megatron"}, MissingRule, "engine='megatron' has no rule for adapters; leave it out"),
    ({"lora_rank": 0}, InvalidValue, "lora_rank=0"),
]


@pytest.mark.parametrize("asked, error, said", REFUSED, ids=[said for _, _, said in REFUSED])
def test_what_has_no_rule_is_refused_with_a_way_out(config, asked, error, said):
    with pytest.raises(error, match=said):
        memplan.estimate(config, **{"lora_rank": 8, "seq_len": 2048, **asked})


@pytest.mark.parametrize("how", ["nf4", "int8"])
def test_products_that_are_not_linears_are_not_left_whole_in_silence(how):
    """transformers quantizes GPT-2's Conv1D too."""
    with pytest.raises(MissingRule, match=f"quantize='{how}' of GPT2LMHeadModel, .* Conv1D .* no rule yet"):
        memplan.estimate("gpt2", lora_rank=8, micro_batch=2, seq_len=1024, quantize=how)


def test_a_model_that_is_none_of_transformers_has_no_adapters():
    with pytest.raises(MissingRule, match=r"lora_rank is of PEFT.*; use implementation='huggingface'"):
        memplan.estimate("llama-3-8b", implementation="reference", lora_rank=8)


def test_a_search_keeps_to_the_adapters_and_finds_what_estimates_say(config):
    asked: dict[str, Any] = {"cluster": "2xh100-sxm", "global_batch": 2, "seq_len": 64}
    kept: dict[str, Any] = {"pp": 1, "tp": 1, "offload": False, "recompute": "none", "lora_rank": 8}
    everything, found = (searched(config, keep=keep, **asked, **kept) for keep in (None, 2))
    assert found.within == everything.within[:2]
    for one in everything.within:
        plan = one.plan
        again = memplan.estimate(
            config, **asked, dp=plan.dp, zero=plan.zero, micro_batch=plan.micro_batch, lora_rank=8
        )
        assert again.worst.peak_bytes == one.peak_bytes


def test_adapters_are_no_file_s_to_name(config):
    with pytest.raises(PlanRefused, match=r"adapters are made by the code .*; call peft\.get_peft_model"):
        memplan.estimate(config, lora_rank=8, seq_len=64).export("torchrun")


def test_a_plan_says_its_adapters():
    plan = plan_of(lora_rank=8, lora_targets="q_proj, v_proj ,q_proj", quantize="nf4", seq_len=2048)
    assert plan.lora_targets == "q_proj,v_proj"
    assert plan.adapters is not None
    assert plan.adapters.quantize == "nf4"


@pytest.mark.parametrize("start", ["transformers-llama", "transformers-opt"])
def test_a_trace_on_file_is_what_is_traced_today(start):
    path = min(ADAPTED.glob(f"{start}*.xz"))
    kept = packed_trace(path)
    precisions = ("bf16-mixed", "bf16", "fp32", "bf16-autocast")
    asked = [cache.Request(kept.config, kept.name, kept.device, (one,), ()) for one in precisions]
    (found,) = [one for one in asked if path_of(one) == path]
    assert TRACED(found).digest == kept.digest


BITSANDBYTES: list[tuple[str, float, float]] = [
    ("adamw-8bit", 2 * (1 + 4 / 256), 2), ("paged-adamw-8bit", 2 * 4 / 256, 2), ("paged-adamw-32bit", 0, 0),
    ("lion-8bit", 1 + 4 / 256, 1), ("paged-lion-8bit", 4 / 256, 1), ("paged-lion-32bit", 0, 0),
    ("adamw-32bit", 2 * 4, 0), ("lion-32bit", 4, 0),
]  # fmt: skip
"""Bytes for each element of a large weight, and maps of 256 floats."""


@pytest.mark.parametrize("name, of_each, n_maps", BITSANDBYTES, ids=[name for name, *_ in BITSANDBYTES])
def test_an_optimizer_of_bitsandbytes_keeps_eight_bits_and_scales_of_large_weights(name, of_each, n_maps):
    """Weights of fewer than 4,096 elements have float32 moments, of fewer than 100,000 none is paged."""
    e = memplan.estimate("llama-3.2-1b", implementation="reference", precision="bf16", optimizer=name)
    large = 1_235_814_400 - 33 * 2048
    small = 33 * 2048 * 4 * len(e.plan.kept.moments)
    assert e.worst.states.optimizer_bytes == large * of_each + small + n_maps * 256 * 4
    said = [note for note in e.notes if "that CUDA moves between GPU and host" in note]
    assert bool(said) == name.startswith("paged")


@pytest.mark.parametrize(
    "asked, said",
    [
        ({"dp": 2, "zero": 3}, "with zero=3 has no rule yet; leave one of them out, or use adamw"),
        ({"dp": 1, "tp": 2}, "with tp=2 has no rule yet"),
        ({"optimizer_impl": "fused"}, "with optimizer_impl='fused' has no rule yet"),
        ({"precision": "fp16-mixed"}, "with precision='fp16-mixed' has no rule yet"),
        ({"device": "cpu"}, "of bitsandbytes has rules on GPUs only; use adamw"),
        ({"engine": "textbook"}, "engine='textbook' has no rule for bitsandbytes' optimizers; use adamw"),
    ],
)
def test_what_has_no_rule_beside_an_optimizer_of_bitsandbytes_is_refused(asked, said):
    with pytest.raises(MissingRule, match=said):
        memplan.estimate("llama-3.2-1b", implementation="reference", optimizer="adamw-8bit", **asked)
