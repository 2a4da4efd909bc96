"""TRL's trainers: what they add to a step of transformers' Trainer, and what is refused."""

from dataclasses import replace
from typing import Any

import pytest

import memplan
from memplan.engines.torch.trainer import FOR_SERVER
from memplan.errors import MemplanError, MissingRule, PlanRefused
from memplan.models import implemented, preset
from memplan.tracing.trl import TOKENS, VOCABULARY

WHOLE: Any = implemented(preset("llama-3-8b"), "huggingface")
MODEL: Any = replace(
    WHOLE,
    n_layers=2,
    d_model=512,
    n_heads=4,
    n_kv_heads=2,
    d_ff=1024,
)
SFT: dict[str, Any] = {
    "trainer": "sft", "optimizer_impl": "fused", "seq_len": 512, "precision": "bf16-mixed",
    "recompute": "full", "clip_grad_norm": 1.0,
}  # fmt: skip
FSDP2: dict[str, Any] = {
    "dp": 8, "zero": 3, "fsdp_units": "block+ends", "precision": "bf16-mixed-reduce-bf16",
}  # fmt: skip


def estimated(**options: Any) -> memplan.Estimate:
    return memplan.estimate(**{"model": MODEL, **SFT, **options})


def gathers(found: memplan.Estimate) -> dict[str, Any]:
    return {one.what: one for one in found.collectives if one.kind == "all_gather"}


def test_no_logits_are_made():
    sizes = {"seq_len": 4096, "micro_batch": 2}
    logits = 2 * 4096 * MODEL.vocab_size * 4
    peaks = [estimated(**sizes, trainer=name).peak.total_bytes for name in ("huggingface", "sft")]
    assert peaks[0] - peaks[1] > logits


def test_more_tokens_than_a_tile_has_add_none():
    peaks = [estimated(seq_len=TOKENS + 1, micro_batch=n).peak.total_bytes for n in (1, 2)]
    tile = TOKENS * VOCABULARY * 2
    assert peaks[1] - peaks[0] < tile


def test_metrics_of_each_micro_batch_are_gathered():
    found = gathers(estimated(dp=4, global_batch=8))
    sizes = {"tokens with a target": 8, "entropy": 4, "tokens predicted": 8, "tokens": 8}
    assert {name: found[name].payload_bytes for name in sizes} == {k: 4 * 2 * n for k, n in sizes.items()}
    for precision, n_bytes in (("bf16-mixed-reduce-bf16", 2), ("bf16", 4)):
        assert gathers(estimated(**FSDP2 | {"precision": precision}))["entropy"].payload_bytes == 8 * n_bytes


def test_beside_adapters_the_output_layer_is_gathered_by_trl_itself():
    found = gathers(estimated(**FSDP2, lora_rank=8, recompute="none"))
    assert found["base_model.model.lm_head.weight"].payload_bytes == MODEL.vocab_size * MODEL.d_model * 2


@pytest.mark.parametrize(
    "options,said",
    [
        ({**FSDP2, "fsdp_version": 1, "fsdp_units": "block"}, "fsdp_version=1"),
        ({**FSDP2, "fsdp_units": "block", "model": replace(MODEL, tied_head=True)}, "zero=3 of tied ends"),
        ({"precision": "fp16-mixed"}, "precision='fp16-mixed'"),
        ({"lora_rank": 8, "quantize": "nf4", "seq_len": 4096}, "has adapters in bfloat16"),
        ({"lora_rank": 8, "lora_targets": "q_proj,lm_head"}, "adapters or copies of the ends"),
        ({**FSDP2, "lora_rank": 8, "recompute": "none", "dp": 5}, "dp=5 that does not divide the vocabulary"),
        ({"liger_kernel": "fused_linear_cross_entropy"}, "liger_kernel"),
    ],
)
def test_plans_without_a_rule_are_refused(options, said):
    with pytest.raises(MissingRule, match=f"trainer='sft' with .*{said}"):
        estimated(**options)


DPO: dict[str, Any] = {"trainer": "dpo", "micro_batch": 2}
AHEAD: dict[str, Any] = {"precompute_ref_log_probs": True}


def test_the_reference_is_a_frozen_copy():
    found, alone = estimated(**DPO), estimated(micro_batch=2)
    ledger = found.ledger()
    copied = ledger[ledger["name"].str.match(r"reference\..*\.weight")]
    assert set(copied["kind"]) == {"weights"}
    assert found.peak.weights_bytes == 2 * alone.peak.weights_bytes
    assert found.peak.grads_bytes == alone.peak.grads_bytes
    assert found.peak.optimizer_bytes == alone.peak.optimizer_bytes


def test_beside_adapters_the_reference_is_the_model_without_them():
    found, alone = (estimated(lora_rank=8, **by) for by in (DPO, {"micro_batch": 2}))
    assert found.peak.weights_bytes == alone.peak.weights_bytes
    once, twice = (sum(one.flops for one in each.stages) for each in (alone, found))
    assert 1.95 < twice / once < 2  # two forward passes, of which one has no adapters


@pytest.mark.parametrize("trainer", ["dpo", "grpo"])
def test_a_reference_of_four_bits_is_the_model_without_its_adapters(trainer):
    """Products of adapters are in the trained model's forward passes alone, of which GRPO has two."""
    by = {"dpo": DPO, "grpo": GRPO | {"ref_model": True}}[trainer]
    sizes = {"quantize": "nf4", "precision": "bf16-autocast", "recompute": "none", "seq_len": 2048}
    found = {rank: estimated(**by | sizes | {"lora_rank": rank}) for rank in (8, 16)}
    weights = [one.peak.weights_bytes for one in found.values()]
    of_rank = (weights[1] - weights[0]) // 2 // 8  # elements of all adapters, for each of their rank
    flops = [sum(stage.flops for stage in one.stages) for one in found.values()]
    assert flops[1] - flops[0] == 2 * of_rank * 8 * 2 * 2048 * {"dpo": 1, "grpo": 2}[trainer]


def test_a_reference_that_is_computed_ahead_is_in_no_step():
    """A step is the trained model's, and the batch has a number for each of both sequences of a pair."""
    alone = estimated(micro_batch=4)
    ahead = estimated(**DPO | AHEAD | {"micro_batch": 4})
    assert ahead.peak.weights_bytes == alone.peak.weights_bytes
    sharded, without = (estimated(**FSDP2 | by) for by in (DPO | AHEAD, {"micro_batch": 2}))
    assert sharded.peak.weights_bytes == without.peak.weights_bytes
    assert gathers(sharded)["gather weights"] == gathers(without)["gather weights"]
    assert (
        gathers(sharded)["rewards and margins"].payload_bytes == 3 * 8 * 4
    )  # the batch's numbers are float32
    assert gathers(sharded)["log-probabilities"].payload_bytes == 2 * 8 * 2
    ledger = ahead.ledger()
    given = ledger[ledger["name"].str.match("ref_(chosen|rejected)_logps")]
    assert list(given["shape"]) == [(2,)] * 2


def test_metrics_of_pairs_are_gathered_and_a_reference_has_no_buffers_to_broadcast():
    found = estimated(**DPO | {"micro_batch": 4, "dp": 2})
    sizes = {
        "entropy and logits": (3, 4), "numbers of tokens": (6, 8), "right orders": (1, 4 * 2),
        "rewards and margins": (3, 4 * 2), "log-probabilities": (2, 4 * 2),
    }  # fmt: skip
    assert {name: (one.calls, one.payload_bytes) for name, one in gathers(found).items()} == {
        name: (calls, 2 * n_bytes * calls) for name, (calls, n_bytes) in sizes.items()
    }
    (sent,) = (one for one in found.collectives if one.kind == "broadcast")
    assert sent.payload_bytes == 2 * MODEL.d_head // 2 * 4


def test_a_reference_under_fsdp2_is_a_unit_that_is_gathered_whole():
    """One all-gather a micro-batch; its output and the unsharded weights are both allocated."""
    n_elements = estimated(micro_batch=2).peak.weights_bytes // 4
    found, alone = estimated(**DPO | FSDP2), estimated(**FSDP2 | {"micro_batch": 2})
    with_it, without = (gathers(one)["gather weights"] for one in (found, alone))
    assert with_it.calls - without.calls == 1
    assert with_it.payload_bytes - without.payload_bytes == 2 * n_elements
    ledger = found.ledger()
    held = ledger[ledger["name"].str.match(r"reference.*\((unsharded|all-gather output)\)")]
    assert held["total_bytes"].sum() == 2 * 2 * n_elements
    assert found.peak.weights_bytes == 2 * alone.peak.weights_bytes
    metrics = {name: one.payload_bytes for name, one in gathers(found).items() if name != "gather weights"}
    assert metrics["entropy and logits"] == 3 * 8 * 2  # in bfloat16, as FSDP2 casts what modules return
    assert metrics["right orders"] == 8 * 4


@pytest.mark.parametrize("zero", [3, 2])
def test_without_its_adapters_the_reference_is_gathered_unit_by_unit(zero):
    """The embedding and both blocks are gathered again; the root and what does not reshard are not."""
    by = FSDP2 | {"lora_rank": 8, "recompute": "none", "zero": zero}
    found, alone = (gathers(estimated(**by | own)) for own in (DPO, DPO | AHEAD))
    again = found["gather weights"].calls - alone["gather weights"].calls
    assert again == {3: 1 + MODEL.n_layers, 2: 0}[zero]
    of_head = "base_model.model.lm_head.weight"  # TRL gathers it in both passes
    assert (found[of_head].calls, alone[of_head].calls) == (2, 1)


@pytest.mark.parametrize(
    "options,said",
    [
        ({"micro_batch": 1}, "micro_batch=1: pairs of a chosen and a rejected sequence.*micro_batch=2"),
        (FSDP2 | {"zero": 2}, "zero=2, under which the reference stays gathered.*zero=3"),
        ({"lora_rank": 8, "quantize": "nf4", "seq_len": 4096}, "has adapters in bfloat16"),
        ({"precision": "fp16-mixed"}, "precision='fp16-mixed'"),
    ],
)
def test_what_has_no_rule_under_dpo_is_refused(options, said):
    with pytest.raises(MissingRule, match=f"trainer='dpo' with .*{said}"):
        estimated(**DPO | options)


GRPO: dict[str, Any] = {"trainer": "grpo", "micro_batch": 2, "max_completion_length": 128}


def test_a_model_scores_completions_again_before_it_learns_from_them():
    once, twice, thrice = (estimated(**by) for by in ({"micro_batch": 2}, GRPO, GRPO | {"ref_model": True}))
    flops = [sum(stage.flops for stage in one.stages) for one in (once, twice, thrice)]
    assert flops[2] == flops[1] * 3 / 2  # two and three forward passes
    assert twice.peak.weights_bytes == once.peak.weights_bytes
    assert thrice.peak.weights_bytes == 2 * once.peak.weights_bytes
    assert thrice.peak.grads_bytes == once.peak.grads_bytes


def test_only_completions_are_scored():
    def scored(n: int) -> int:
        found = estimated(**GRPO | {"max_completion_length": n})
        return sum(stage.flops for stage in found.stages)

    of_a_token = 2 * MODEL.d_model * MODEL.vocab_size
    assert (
        scored(256) - scored(128) == 2 * 2 * of_a_token * 128
    )  # of two sequences, before the step and in it


def test_the_completions_of_a_step_are_kept_as_one():
    found = estimated(**GRPO | {"global_batch": 6, "ref_model": True})
    ledger = found.ledger()
    shapes: dict[str, Any] = dict(zip(ledger["name"], ledger["shape"], strict=True))
    for name in ("old", "sampling", "ref"):
        assert tuple(shapes[f"{name}_per_token_logps"]) == (6, 128)
    assert tuple(shapes["advantages"]) == (6,)
    assert tuple(shapes["input_ids"]) == (6, 512)


def test_beside_adapters_grpo_has_the_model_without_them_as_reference():
    found, alone = (estimated(lora_rank=8, **GRPO | {"ref_model": held}) for held in (True, False))
    assert found.peak.weights_bytes == alone.peak.weights_bytes


def passes(**options: Any) -> Any:
    return gathers(estimated(**GRPO | FSDP2 | options))["gather weights"]


def test_completions_are_scored_by_units_of_fsdp2_before_the_step():
    """A pass more gathers the embedding and both blocks: the head is still there when the trained one runs.

    The embedding's backward pass asks for the unit before it, which is the head of that earlier pass.
    """
    of_training = gathers(estimated(**FSDP2 | {"micro_batch": 2}))["gather weights"]
    assert passes().calls - of_training.calls == 1 + MODEL.n_layers + 1
    zero_2 = gathers(estimated(**FSDP2 | {"micro_batch": 2, "zero": 2}))["gather weights"]
    assert passes(zero=2).calls - zero_2.calls == 1  # all of them are still there


def test_passes_of_all_micro_batches_come_before_the_first():
    """Each gathers embedding and blocks, and a frozen copy whole; what TRL asks for in vain is asked once."""
    once, twice = passes(ref_model=True), passes(ref_model=True, global_batch=32)
    assert twice.calls == 2 * once.calls - 1


def test_a_server_gets_sharded_weights_whole_one_after_the_other():
    (sent,) = (one for one in estimated(**GRPO | FSDP2).collectives if one.what == FOR_SERVER)
    n_elements = estimated(micro_batch=2).peak.weights_bytes // 4
    assert (sent.calls, sent.payload_bytes) == (3 + 9 * MODEL.n_layers, 4 * n_elements)
    assert all(one.what != FOR_SERVER for one in estimated(**GRPO | {"dp": 2}).collectives)


@pytest.mark.parametrize("by", [{}, DPO, GRPO])
def test_blocks_that_accelerate_wraps_are_recomputed_beside_adapters(by):
    """Wide blocks hold less, and are gathered as often: the recomputed pass is within the backward one."""
    sizes = {"model": replace(MODEL, d_ff=64 * 512), "lora_rank": 8}
    once, again = (estimated(**by | FSDP2 | sizes | {"recompute": how}) for how in ("none", "full"))
    assert once.peak.total_bytes > again.peak.total_bytes
    assert once.worst.recomputed_flops == 0 < again.worst.recomputed_flops
    assert gathers(once)["gather weights"].calls == gathers(again)["gather weights"].calls


LORA: dict[str, Any] = {"lora_rank": 8, "recompute": "none"}


def test_adapters_are_merged_before_weights_are_sent_and_taken_out_after():
    """Each rank has a term of a product of fp32, and subtracts it in bfloat16; no adapter is sent."""
    found = estimated(model=replace(WHOLE, n_layers=2), **GRPO | FSDP2 | LORA)
    (sent,) = (one for one in found.collectives if one.what == FOR_SERVER)
    assert sent.calls == 3 + 9 * 2
    merges = {one.kind: one for one in found.collectives if one.what == "merge of adapters"}
    of_linears = 2 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    assert merges["all_to_all"].calls == merges["reduce_scatter"].calls == 2 * 7 * 2
    assert merges["reduce_scatter"].payload_bytes == (4 + 2) * of_linears
    assert any("merging adapters may take less" in note for note in found.notes)


def test_an_adapter_of_fewer_rows_than_ranks_is_gathered():
    found = estimated(**GRPO | FSDP2 | LORA | {"dp": 16})
    (merges,) = (one for one in found.collectives if one.what == "merge of adapters")
    assert (merges.kind, merges.calls) == ("all_gather", 2 * 7 * MODEL.n_layers)
    assert not any("merging adapters may take less" in note for note in found.notes)
    assert merges.payload_bytes == 2 * 2 * 4 * 16 * (6 * 512 + 1024)  # padded to a row for each rank


def test_merges_may_be_the_worst_instant():
    """On one GPU the product of two adapters and its scaled copy are there at once."""
    sizes = {"seq_len": 8, "max_completion_length": 4, "dp": 1}
    wide = replace(MODEL, d_ff=64 * 1024)
    found = estimated(model=wide, **GRPO | LORA | sizes)
    ledger = found.ledger()
    products = ledger[ledger.name.str.contains("product of adapters")]
    assert found.stages[0].when == FOR_SERVER
    assert products.total_bytes.tolist() == [4 * 512 * 64 * 1024] * 2


@pytest.mark.parametrize("asked", [{"use_dora": True}, {"quantize": "nf4", "precision": "bf16-autocast"}])
def test_a_note_says_where_merges_are_not_counted(asked):
    sizes = {"seq_len": 2048}
    (said,) = (one for one in estimated(**GRPO | LORA | sizes | asked).notes if "merged into it" in one)
    assert "That is not counted." in said
    assert not any("merged into it" in one for one in estimated(**GRPO | LORA).notes)


def test_metrics_of_completions_and_of_their_generation():
    found = estimated(**GRPO | {"dp": 2, "global_batch": 8})
    sizes = {"lengths": (2, 8 * 4), "truncated": (1, 4), "rewards": (1, 4 * 4), "clipped tokens": (4, 4 * 2)}
    assert {name: (gathers(found)[name].calls, gathers(found)[name].payload_bytes) for name in sizes} == {
        name: (calls, 2 * n_bytes * calls) for name, (calls, n_bytes) in sizes.items()
    }
    (summed,) = (one for one in found.collectives if one.what == "metrics")
    assert (summed.kind, summed.calls, summed.payload_bytes) == ("all_reduce", 2 * 4, 2 * 4 * 8)


@pytest.mark.parametrize(
    "options,error,said",
    [
        (FSDP2 | {"zero": 2, "ref_model": True}, MissingRule, "zero=2, under which the reference stays"),
        ({"lora_rank": 8, "quantize": "nf4", "seq_len": 4096}, MissingRule, "has adapters in bfloat16"),
        ({"max_completion_length": None}, PlanRefused, "after a prompt; use a max_completion_length below"),
        ({"max_completion_length": 512}, PlanRefused, "max_completion_length=256"),
        ({"micro_batch": 1}, PlanRefused, "global_batch=1: .*compared with each other"),
        ({"trainer": "sft"}, PlanRefused, "max_completion_length=128 is of TRL's GRPOTrainer"),
        (
            {"precompute_ref_log_probs": True},
            PlanRefused,
            "precompute_ref_log_probs=True is of TRL's DPOTrainer",
        ),
        ({"vllm_mode": "colocate"}, MemplanError, "vllm_gpu_memory_utilization of the GPU"),
        ({"num_iterations": 4}, MemplanError, "completions of several steps"),
        ({"loss_type": "grpo"}, MemplanError, "loss_type is 'dapo'"),
    ],
)
def test_what_has_no_rule_under_grpo_is_refused(options, error, said):
    with pytest.raises(error, match=said):
        estimated(**GRPO | options)


def test_routers_are_refused():
    with pytest.raises(MissingRule, match="the loss of a router of experts"):
        memplan.estimate("mixtral-8x7b", **SFT)
