"""DDP's buckets and hooks: the order gradients are ready in, and PowerSGD's arithmetic beside PyTorch's."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, _should_compress

from memplan import Gpt
from memplan.device import CPU
from memplan.engines.options import plan_of
from memplan.engines.torch import RankStages, Stage
from memplan.errors import PlanRefused
from memplan.estimate import estimate, estimate_plan
from memplan.parts.ddp import (
    POWERSGD_LEAST_RATE,
    POWERSGD_RANK,
    bucket_of,
    low_rank,
    payloads,
    ready_order,
    reducer_of,
    reduction,
)
from memplan.plan import Rank
from memplan.record import changes
from memplan.shapes import BF16, FP32, Parameter
from validate.judge import COMPRESSION_TOLERANCES

GPT = Gpt(name="gpt", n_layers=2, d_model=16, n_heads=2, d_ff=32, vocab_size=64, max_seq_len=8)


def stage(**plan) -> Stage:
    (only,) = RankStages(GPT, plan_of(**{"dp": 2, "seq_len": 8, "precision": "fp32", **plan}), Rank(), CPU)
    return only


def names(parameters) -> list[str]:
    return [parameter.name for parameter in parameters]


BLOCK = [
    "feed_forward.w2.bias",
    "feed_forward.w2.weight",
    "feed_forward.w1.bias",
    "feed_forward.w1.weight",
    "ffn_norm.weight",
    "ffn_norm.bias",
    "attention.wo.bias",
    "attention.wo.weight",
    "attention.wv.bias",
    "attention.wv.weight",
    "attention.wk.bias",
    "attention.wk.weight",
    "attention.wq.bias",
    "attention.wq.weight",
    "attention_norm.weight",
    "attention_norm.bias",
]
"""The order in which a run's `register_post_accumulate_grad_hook` were called."""


def test_gradients_are_ready_in_the_order_of_the_backward_pass():
    made, late = ready_order(stage().trace, stage().runs)
    ends = ["head.output.weight", "head.norm.weight", "head.norm.bias"]
    tables = ["embedding.positions.weight", "embedding.tokens.weight"]
    assert names(made) == [*ends, *(f"blocks.*.{name}" for name in BLOCK * 2), *tables]
    assert late == []


def test_beside_tensor_parallelism_the_divided_modules_gradients_come_last_from_the_end_of_the_model():
    divided = stage(tp=2)
    made, late = ready_order(divided.trace, divided.runs)
    linear = [f"blocks.*.{name}" for name in BLOCK * 2 if "norm" not in name]
    assert names(late) == ["head.output.weight", *linear, "embedding.tokens.weight"]
    assert names(made)[:2] == ["head.norm.weight", "head.norm.bias"]
    assert names(made)[-1] == "embedding.positions.weight"
    everything = stage(tp=2).parameters()
    assert sorted(names([*made, *late])) == sorted(names(everything))


def test_one_bucket_holds_them_all_and_small_ones_hold_one_each():
    everything = stage()
    assert [len(bucket) for bucket in reducer_of(everything, everything.ddp).buckets] == [
        len(everything.parameters())
    ]
    small = stage(bucket_cap_bytes=1)
    assert {len(bucket) for bucket in reducer_of(small, small.ddp).buckets} == {1}


@given(n=st.integers(1, 300), m=st.integers(1, 300))
def test_what_powersgd_compresses_is_what_pytorchs_hook_does(n, m):
    compressed, _, _ = _should_compress(n, m, min(n, m, POWERSGD_RANK), POWERSGD_LEAST_RATE)
    found = low_rank(Parameter("w", (n, m), FP32))
    assert found == ((n, m) if compressed else None)


def test_powersgds_settings_are_pytorchs_defaults():
    state = PowerSGDState(None)
    assert state.matrix_approximation_rank == POWERSGD_RANK
    assert state.min_compression_rate == POWERSGD_LEAST_RATE
    assert state.use_error_feedback
    assert state.warm_start


@pytest.mark.parametrize(
    "hook, dtype, expected",
    [
        ("none", FP32, (4 * 840,)),
        ("fp16", FP32, (2 * 840,)),
        ("bf16", BF16, (2 * 840,)),
        ("powersgd", FP32, (4 * 40, 4 * 20, 4 * 40)),
    ],
)
def test_payloads_by_hand(hook, dtype, expected):
    """A weight of 20 x 40 becomes 20 + 40 elements; a bias of 40 stays."""
    bucket = bucket_of([Parameter("w", (20, 40), FP32), Parameter("b", (40,), FP32)], hook)
    assert payloads(hook, bucket, dtype) == expected


@pytest.mark.parametrize(
    "hook, dtype, most_bytes",
    [
        ("none", FP32, 0),
        ("fp16", FP32, 2 * 840),
        ("fp16", BF16, 2 * 840),
        ("bf16", BF16, 0),  # of that type already
        ("powersgd", FP32, 4 * (840 + 40 + 840)),
    ],
)
def test_what_a_hook_allocates_beside_a_bucket(hook, dtype, most_bytes):
    bucket = bucket_of([Parameter("w", (20, 40), FP32), Parameter("b", (40,), FP32)], hook)
    held, most = 0, 0
    for event in changes(reduction(hook, bucket, dtype, "dp")):
        held += event.sign * event.buffer.n_bytes
        most = max(most, held)
    assert (held, most) == (0, most_bytes)


def test_every_hook_has_a_tolerance_that_a_missing_reduction_would_not_meet():
    assert max(COMPRESSION_TOLERANCES.values()) < 0.01


@pytest.mark.parametrize(
    "option, said",
    [
        ({"static_graph": True, "global_batch": 4}, "static_graph=True cannot accumulate 2 micro-batches"),
        ({"static_graph": True, "dp": 1}, "an option of DistributedDataParallel"),
        ({"ddp_comm_hook": "fp16", "zero": 3}, "an option of DistributedDataParallel"),
        ({"gradient_as_bucket_view": True, "zero": 2}, "an option of DistributedDataParallel"),
    ],
)
def test_what_ddp_cannot_do_is_refused(option, said):
    with pytest.raises(PlanRefused, match=said):
        estimate(GPT, **{"dp": 2, "seq_len": 8, "pp": 1, **option})


@pytest.mark.parametrize("pp", [6, 3, 4, 2])
def test_stages_of_other_plans_share_traces_and_the_partial_gradients_in_them(pp):
    """Plans whose buckets end at other gradients share a trace, but not the passes that were played."""
    model = Gpt(name="parts", n_layers=12, d_model=1024, n_heads=4, d_ff=4096, vocab_size=256, max_seq_len=64)
    plan = plan_of(
        dp=2, tp=2, pp=pp, zero=1, sequence_parallel=True, recompute="full", global_batch=24, seq_len=64
    )
    e = estimate_plan(model, plan, device="cuda")
    for stage in e.stages:
        found = stage.replay()
        assert found.settled
        assert found.allocated_bytes <= found.reserved_bytes
