"""Colossal-AI: its buckets, laws and refusals; bytes are replayed from records."""

import pickle
import re
from itertools import pairwise
from typing import Any

import pytest

import memplan
from memplan.device import CPU, H100
from memplan.engines.colossalai.bookkeeping import ColossalAIStage, buckets_of
from memplan.engines.options import plan_of
from memplan.errors import MemplanError
from memplan.estimate import rank_estimate
from memplan.testing import check_laws
from validate.suites.models import GPT, LLAMA, LLAMA_ODD

USUAL: dict[str, Any] = {"engine": "colossalai", "dp": 4, "seq_len": 32, "zero": 2, "precision": "bf16-mixed"}


def test_a_bucket_counts_padding_of_what_is_in_it_and_none_of_what_comes():
    working = ColossalAIStage(LLAMA_ODD, plan_of(**USUAL | {"dp": 7}), CPU, None).working
    assert any(one.n_elements > one.parameter.n_elements for one in working)
    most = 20_000
    buckets = buckets_of(working, most)
    assert [one for bucket in buckets for one in bucket] == working
    for bucket, following in pairwise(buckets):
        filled = sum(one.n_elements for one in bucket)
        assert filled + following[0].parameter.n_elements > most
        before = sum(one.n_elements for one in bucket[:-1])
        assert len(bucket) == 1 or before + bucket[-1].parameter.n_elements <= most


def test_every_rank_has_a_padded_part_of_every_parameter():
    asked = USUAL | {"dp": 7}
    plan = plan_of(**asked)
    working = ColossalAIStage(LLAMA_ODD, plan, H100, None).working
    states = rank_estimate(LLAMA_ODD, plan, plan.place(3), H100).states
    own = sum(one.shard for one in working)
    assert states.weights_bytes == 2 * 7 * own
    assert states.grads_bytes == 2 * own
    assert states.optimizer_bytes == (4 + 4 + 4) * own + 4 * len(working)  # steps
    whole = memplan.estimate(LLAMA_ODD, **asked | {"zero": 1}).worst.states
    assert whole.grads_bytes == 2 * 7 * own


LAWFUL: list[dict[str, Any]] = [
    {"zero": 1, "clip_grad_norm": 1.0},
    {"zero": 1, "global_batch": 16, "optimizer": "sgd-momentum", "overlap_communication": False},
    {"zero": 1, "dp": 3, "precision": "fp16-mixed", "recompute": "full", "communication_dtype": "fp32"},
    {},
    {"global_batch": 16, "reduce_bucket_size": 10_000},
    {"reduce_bucket_size": 5_000, "recompute": "full", "optimizer": "adam", "overlap_communication": False},
    {"precision": "bf16", "dp": 64, "global_batch": 192, "communication_dtype": "fp32"},
    {"precision": "fp32", "dp": 5, "reduce_bucket_size": 1},
]


@pytest.mark.parametrize("options", LAWFUL, ids=str)
def test_laws_hold_under_colossalai(options):
    asked = USUAL | options
    check_laws(memplan.estimate(GPT, cluster=f"{asked['dp']}xh100-sxm", **asked))


def test_stage_1_reduces_once_a_step_and_stage_2_in_each_micro_batch():
    def reduced(zero: int, n: int) -> dict[str, int]:
        asked = USUAL | {"zero": zero, "global_batch": 4 * n}
        found = memplan.estimate(LLAMA, **asked).collectives
        return {one.kind: one.payload_bytes for one in found if one.what == "reduce gradients"}

    n_bytes = 2 * sum(one.n_elements for one in ColossalAIStage(LLAMA, plan_of(**USUAL), H100, None).working)
    assert reduced(1, 3) == reduced(1, 1) == {"all_reduce": n_bytes}
    assert reduced(2, 3) == {"reduce_scatter": 3 * n_bytes}


def test_a_gather_holds_as_many_elements_as_a_bucket_times_the_ranks():
    """`TensorBucket` counts the elements of one rank's parts."""
    asked = USUAL | {"dp": 256, "seq_len": 1024, "recompute": "full"}
    e = memplan.estimate("llama-3-8b", **asked)
    bucket_bytes = 2 * 12 * 2**20
    (gather,) = [one for one in e.collectives if one.what == "gather updated weights"]
    assert gather.calls == -(-gather.payload_bytes // (256 * bucket_bytes))
    assert e.worst.when == "gather of updated weights"
    assert 256 * bucket_bytes * 0.9 < e.peak.temporaries_bytes < 256 * bucket_bytes * 1.5
    small = memplan.estimate("llama-3-8b", **asked, reduce_bucket_size=2**20)
    assert small.peak.temporaries_bytes < 0.2 * e.peak.temporaries_bytes


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"zero": 3}, "zero=3 (GeminiPlugin)"),
    ({"zero": 0}, "zero=0 (TorchDDPPlugin)"),
    ({"dp": 1}, "dp=1"),
    ({"tp": 2}, "tp=2"),
    ({"pp": 2}, "pp=2"),
    ({"offload": True}, "offload=True (cpu_offload)"),
    ({"precision": "bf16-reduce-fp32"}, "precision='bf16-reduce-fp32'"),
    ({"optimizer": "muon"}, "optimizer='muon'"),
    ({"lora_rank": 8}, "lora_rank=8"),
]


@pytest.mark.parametrize("options,said", REFUSED, ids=[said for _, said in REFUSED])
def test_what_has_no_rule_is_refused_with_a_way_out(options, said):
    with pytest.raises(MemplanError, match=rf"^{re.escape(said)}.*[;,] (or )?use"):
        memplan.estimate(GPT, **USUAL | options)


def test_an_estimate_can_be_pickled():
    e = memplan.estimate(GPT, cluster="4xh100-sxm", **USUAL)
    assert pickle.loads(pickle.dumps(e)).peak == e.peak


def test_a_search_ranks_colossalai_beside_torch():
    found = memplan.search(
        LLAMA, cluster="2xh100-sxm", global_batch=4, seq_len=64, engine=("torch", "colossalai"), zero=2
    )
    assert {"torch", "colossalai"} <= set(found["engine"])
