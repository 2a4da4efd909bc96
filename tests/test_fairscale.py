"""FairScale: its partition, laws and refusals; bytes are replayed from records."""

import re
from typing import Any

import pytest

import memplan
from memplan.device import CPU, H100
from memplan.engines.fairscale.oss import FairScaleStage
from memplan.engines.options import plan_of
from memplan.errors import MemplanError
from memplan.estimate import rank_estimate
from memplan.testing import check_laws
from validate.suites.models import GPT, LLAMA, LLAMA_ODD

USUAL: dict[str, Any] = {"engine": "fairscale", "dp": 4, "seq_len": 32, "zero": 2}


def test_each_parameter_goes_to_the_rank_that_has_least():
    stage = FairScaleStage(LLAMA_ODD, plan_of(**USUAL | {"dp": 3}), CPU, None)
    every = stage.trained
    assert sorted(place for own in stage.partition for place in own) == list(range(len(every)))
    sizes = [0, 0, 0]
    for place, parameter in enumerate(every):
        (rank,) = [rank for rank, own in enumerate(stage.partition) if place in own]
        assert sizes[rank] == min(sizes)
        sizes[rank] += parameter.n_elements
    assert [bucket.n_bytes for bucket in stage.buckets.values()] == [4 * n for n in sizes]


LAWFUL: list[dict[str, Any]] = [
    {"zero": 1, "clip_grad_norm": 1.0},
    {"zero": 1, "global_batch": 16, "optimizer": "sgd-momentum"},
    {"zero": 1, "dp": 3, "precision": "bf16", "recompute": "full"},
    {},
    {"reduce_buffer_size": 0, "global_batch": 16},
    {"reduce_buffer_size": 20_000, "recompute": "full", "optimizer": "adam"},
    {
        "reduce_buffer_size": 20_000,
        "clip_grad_norm": 1.0,
        "dp": 64,
        "global_batch": 192,
        "precision": "bf16-autocast",
    },
]


@pytest.mark.parametrize("options", LAWFUL, ids=str)
def test_laws_hold_under_fairscale(options):
    asked = USUAL | options
    check_laws(memplan.estimate(GPT, cluster=f"{asked['dp']}xh100-sxm", **asked))


@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize("dp", [2, 5, 8, 64])
def test_no_rank_holds_more_than_the_one_that_is_shown(zero, dp):
    asked = USUAL | {"zero": zero, "dp": dp}
    plan, shown = plan_of(**asked), memplan.estimate(LLAMA, **asked).peak.total_bytes
    ranks = [rank_estimate(LLAMA, plan, plan.place(rank), H100) for rank in range(dp)]
    assert max(one.peak.total_bytes for one in ranks) == shown


def test_without_buckets_each_gradient_is_reduced_alone_and_only_its_owner_keeps_it():
    asked = USUAL | {"precision": "fp32", "reduce_buffer_size": 0}
    alone = memplan.estimate(LLAMA, **asked)
    (reduced,) = [one for one in alone.collectives if one.kind == "reduce"]
    stage = FairScaleStage(LLAMA, alone.plan, H100, None)
    n = sum(parameter.n_elements for parameter in stage.trained)
    assert (reduced.calls, reduced.payload_bytes) == (len(stage.trained), 4 * n)
    plan = alone.plan
    ranks = [rank_estimate(LLAMA, plan, plan.place(rank), H100) for rank in range(4)]
    assert sum(one.states.grads_bytes for one in ranks) == 4 * n
    whole = memplan.estimate(LLAMA, **USUAL | {"precision": "fp32"})  # all fit in buckets, on every rank
    assert whole.worst.states.grads_bytes == 4 * n


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"zero": 3}, "zero=3 (FullyShardedDataParallel)"),
    ({"zero": 0}, "zero=0"),
    ({"dp": 1}, "dp=1"),
    ({"tp": 2}, "tp=2"),
    ({"offload": True}, "offload=True"),
    ({"precision": "fp16-mixed"}, "precision='fp16-mixed' (ShardedGradScaler)"),
    ({"precision": "bf16-reduce-fp32"}, "precision='bf16-reduce-fp32'"),
    ({"optimizer": "muon"}, "optimizer='muon'"),
    ({"lora_rank": 8}, "lora_rank=8"),
    ({"zero": 1, "reduce_buffer_size": 10}, "reduce_buffer_size=10 is ShardedDataParallel's"),
]


@pytest.mark.parametrize("options,said", REFUSED, ids=[said for _, said in REFUSED])
def test_what_has_no_rule_is_refused_with_a_way_out(options, said):
    with pytest.raises(MemplanError, match=rf"^{re.escape(said)}.*[;,] (use|leave)"):
        memplan.estimate(GPT, **USUAL | options)


@pytest.mark.parametrize("zero,wrapper", [(1, "DistributedDataParallel"), (2, "ShardedDataParallel")])
def test_an_estimate_says_what_fairscale_does(zero, wrapper):
    e = memplan.estimate(GPT, **USUAL | {"zero": zero})
    assert f"zero={zero} is FairScale's OSS under {wrapper}" in " ".join(str(e).split())
