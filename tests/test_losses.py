"""Liger's fused linear cross-entropy: what it saves, its products, and what has no rule beside it."""

from typing import Any, cast

import pytest

import memplan
from memplan import MissingRule, PlanRefused
from memplan.models import Decoder, preset
from memplan.record import ComputeKind, unrolled
from memplan.time.step import model_flops

MODEL = cast(Decoder, preset("qwen3-0.6b"))
ALONE: dict[str, Any] = {"precision": "bf16", "optimizer": "sgd", "seq_len": 2048, "recompute": "full"}
FUSED: dict[str, Any] = {**ALONE, "liger_kernel": "fused_linear_cross_entropy"}


def estimated(asked, **others):
    return memplan.estimate(MODEL, **{**asked, **others})


def test_no_logits_of_all_tokens_are_made():
    buffers = [event.buffer for _, event in unrolled(estimated(FUSED).worst.record.step)]
    logits = [one for one in buffers if one.shape[-1:] == (MODEL.vocab_size,)]
    assert {one.shape for one in logits} == {
        (16, MODEL.vocab_size)
    }  # 2048 tokens x 1024 / 151936, to a power of 2
    assert estimated(FUSED).peak.total_bytes < estimated(ALONE).peak.total_bytes - 2**30


def test_the_products_are_as_many_and_all_of_the_loss_run_in_the_forward_pass():
    fused, plain = (estimated(asked).worst.record.step for asked in (FUSED, ALONE))
    assert model_flops(fused.counts) == model_flops(plain.counts)
    of_loss = [e for e in fused.counts if getattr(e, "kind", None) is ComputeKind.MM and 16 in e.shape]
    assert {e.phase for e in of_loss} == {"forward"}


def test_states_stay_as_they_are():
    assert estimated(FUSED).worst.states == estimated(ALONE).worst.states


def test_a_preset_is_then_transformers_code():
    assert memplan.estimate("llama-3.2-1b", **FUSED).model.implementation == "huggingface"


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"implementation": "torchtitan"},
        MissingRule,
        "of torchtitan of October 2024; use one of llama, mistral",
    ),
    ({"precision": "bf16-mixed"}, MissingRule, "under autocast .* has no rule yet; use precision='bf16'"),
    ({"tp": 2}, MissingRule, "with tp=2 has no rule yet; use tp=1, or liger_kernel='none'"),
    ({"pp": 2}, MissingRule, "with pp=2 has no rule yet; use pp=1"),
    ({"dp": 2}, MissingRule, "with zero=0, dp=2 has no rule yet; use zero=2 or 3"),
    ({"lora_rank": 8}, MissingRule, "with lora_rank=8 has no rule yet; use all weights"),
    ({"dp": 2, "zero": 3, "fsdp_units": "block+ends"}, MissingRule, "use fsdp_units='block'"),
    ({"activation_offloading": "OffloadActivations"}, MissingRule, "use activation_offloading='save_on_cpu'"),
    ({"device": "cpu"}, PlanRefused, "of Triton, which compiles for GPUs; use liger_kernel='none'"),
]


@pytest.mark.parametrize("asked, error, text", REFUSED, ids=[text for *_, text in REFUSED])
def test_what_has_no_rule_beside_it_is_refused(asked, error, text):
    with pytest.raises(error, match=text):
        memplan.estimate("llama-3-8b", **{**FUSED, **asked})


def test_families_that_liger_ends_otherwise_are_refused():
    with pytest.raises(MissingRule, match="has no rule for gemma-2-2b"):
        memplan.estimate("gemma-2-2b", **FUSED)
