"""DeepSpeed: its partitions, laws, refusals, and its JSON in and out; bytes are replayed from records."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import memplan
from memplan import launchers
from memplan.device import H100
from memplan.engines.deepspeed.partition import partition_balanced, partition_uniform
from memplan.engines.deepspeed.stage import DeepSpeedStage
from memplan.engines.options import plan_of
from memplan.errors import MemplanError, MissingRule
from memplan.estimate import rank_estimate
from memplan.launchers.deepspeed import read_configuration
from memplan.mesh import Mesh, inner_first, part_of, sends_along, waits_of
from memplan.models.lookup import resolve
from memplan.parts.flat import Partitions, calls_of, slots_of
from memplan.shapes import BF16, Parameter
from memplan.testing import check_laws
from tests.traced import trace_of
from validate.cases import runnable
from validate.suites.models import GPT, LLAMA

USUAL: dict[str, Any] = {"engine": "deepspeed", "dp": 4, "seq_len": 32, "reduce_bucket_size": 10_000}

SIZES = st.lists(st.integers(1, 50), min_size=1, max_size=12)


@given(SIZES, st.integers(2, 9))
def test_the_slices_of_all_partitions_are_the_parameters(sizes, n_ranks):
    slots = slots_of([Parameter(str(i), (n,), BF16) for i, n in enumerate(sizes)])
    partitions = Partitions(slots, n_ranks)
    assert partitions.n_elements % (2 * n_ranks) == 0
    slices = [n for rank in range(n_ranks) for n in partitions.slices(rank).values()]
    assert sum(slices) == sum(sizes) <= partitions.n_elements < sum(sizes) + 2 * n_ranks
    assert all(sum(partitions.slices(rank).values()) <= partitions.size for rank in range(n_ranks))


@given(SIZES, st.integers(2, 9))
def test_a_bucket_has_one_range_for_each_rank_in_a_row(sizes, n_ranks):
    slots = slots_of([Parameter(str(i), (n,), BF16) for i, n in enumerate(sizes)])
    partitions = Partitions(slots, n_ranks)
    ranges = list(partitions.ranges(slots))
    assert sum(ranges) == sum(sizes)
    assert len(ranges) == -(-sum(sizes) // partitions.size)


@given(SIZES, st.integers(1, 100))
def test_a_collective_ends_once_it_has_more_than_a_bucket(sizes, most):
    calls = list(calls_of(sizes, most))
    assert [n for call in calls for n in call] == sizes
    assert all(sum(call[:-1]) <= most for call in calls)
    assert all(sum(call) > most for call in calls[:-1])


LAWFUL: list[dict[str, Any]] = [
    {"zero": 0, "reduce_bucket_size": 500_000_000},
    {"zero": 1},
    {"zero": 1, "overlap_comm": True, "global_batch": 16, "clip_grad_norm": 1.0},
    {"zero": 2, "precision": "fp16-mixed", "recompute": "full"},
    {"zero": 2, "overlap_comm": True, "global_batch": 12, "dp": 3},
    {"zero": 1, "offload_optimizer": "cpu-pinned", "global_batch": 16},
    {"zero": 2, "offload_optimizer": "cpu", "overlap_comm": True},
    {"zero": 3},
    {"zero": 3, "offload_optimizer": "cpu-pinned", "precision": "fp16-mixed", "sub_group_size": 50_000},
    {"zero": 3, "offload_optimizer": "cpu", "offload_param": "cpu", "global_batch": 16},
    {"zero": 3, "dp": 3, "global_batch": 15, "recompute": "full", "overlap_comm": False},
    {"zero": 3, "stage3_prefetch_bucket_size": 0, "stage3_param_persistence_threshold": 0},
    {"zero": 3, "zero_hpz_partition_size": 2, "global_batch": 12, "stage3_max_reuse_distance": 0},
    {"zero": 3, "zero_hpz_partition_size": 4, "offload_optimizer": "cpu", "stage3_max_reuse_distance": 0},
    {"zero": 0, "pp": 2, "dp": 2, "global_batch": 12, "reduce_bucket_size": 500_000_000},
    {"zero": 0, "pp": 4, "dp": 2, "global_batch": 2, "reduce_bucket_size": 500_000_000, "recompute": "full"},
    {"zero": 1, "pp": 3, "dp": 2, "global_batch": 16, "partition_method": "uniform"},
    {"zero": 1, "pp": 2, "dp": 2, "global_batch": 8, "precision": "fp16-mixed", "clip_grad_norm": 1.0},
    {"zero": 0, "pp": 2, "precision": "fp16-mixed", "reduce_bucket_size": 500_000_000},
    {"zero": 1, "pp": 2, "dp": 2, "global_batch": 8, "activation_checkpoint_interval": 2},
]


@pytest.mark.parametrize("options", LAWFUL, ids=str)
def test_laws_hold_under_deepspeed(options):
    asked = USUAL | options
    check_laws(memplan.estimate(GPT, cluster=f"{asked['dp'] * asked.get('pp', 1)}xh100-sxm", **asked))


@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize("dp", [2, 5, 8])
def test_no_rank_holds_more_than_the_one_that_is_shown(zero, dp):
    asked = USUAL | {"zero": zero, "dp": dp}
    plan = plan_of(**asked)
    shown = memplan.estimate(GPT, **asked).peak.total_bytes
    ranks = [rank_estimate(GPT, plan, plan.place(rank), H100) for rank in range(dp)]
    assert max(one.peak.total_bytes for one in ranks) == shown


def test_zero_1_keeps_all_gradients_until_backward_is_over_unless_it_overlaps():
    usual: dict[str, Any] = {
        "engine": "deepspeed",
        "cluster": "8xh100-sxm",
        "recompute": "full",
        "seq_len": 4096,
    }
    late = memplan.estimate("llama-3-8b", zero=1, **usual)
    early = memplan.estimate("llama-3-8b", zero=1, overlap_comm=True, **usual)
    assert late.peak.total_bytes - early.peak.total_bytes > 9 * 2**30


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("model", [GPT, LLAMA], ids=lambda one: one.family)
def test_a_module_traced_for_zero_3_has_the_bytes_of_memplan_s_rules(tmp_path, model, recompute):
    traced = trace_of(model, "cuda", ["bf16-mixed"], zero3=True)
    traced.save(tmp_path / "trace.json")
    asked: dict[str, Any] = USUAL | {"zero": 3, "recompute": recompute, "seq_len": model.max_seq_len}
    asked["stage3_max_reuse_distance"] = 0
    by_rules, by_trace = (memplan.estimate(one, **asked) for one in (model, tmp_path / "trace.json"))
    assert by_trace.model == traced
    assert by_trace.peak.total_bytes == by_rules.peak.total_bytes
    check_laws(by_trace)


def test_a_trace_is_for_zero_3_or_for_everything_else():
    for zero3, engine, said in ((True, "torch", "by ZeRO-3's modules"), (False, "deepspeed", "zero3=True")):
        traced = trace_of(GPT, "cuda", ["bf16-mixed"], zero3=zero3)
        with pytest.raises(MissingRule, match=said):
            memplan.estimate(traced, engine=engine, zero=3, dp=4, seq_len=32)


def test_a_verdict_counts_a_set_up_that_holds_more_than_any_step():
    usual: dict[str, Any] = {"recompute": "full", "seq_len": 512, "engine": "deepspeed", "zero": 2}
    e = memplan.estimate("llama-3-8b", cluster="256xa10g", **usual)
    of = e.worst
    assert of.peak_bytes < e.cluster.gpu.usable_bytes < of.setup_bytes
    assert e.verdict == "does not fit"
    assert "set-up: before the first step a GPU holds 29.92 GiB" in str(e)


def test_an_offloaded_optimizer_is_on_the_host_page_locked_or_not():
    """Masters, gradients, moments in float32, and a partition in 16 bits; the largest gradient twice."""
    asked: dict[str, Any] = USUAL | {"zero": 2, "dp": 4, "micro_batch": 1}
    there, on_gpu = (memplan.estimate(GPT, **asked, offload_optimizer=where) for where in ("cpu", "none"))
    size = Partitions(slots_of(DeepSpeedStage(GPT, there.plan, H100, None).trained), 4).size
    largest = GPT.vocab_size * GPT.d_model
    assert there.host.total_bytes == (4 * 4 + 2) * size + 2 * largest
    assert there.worst.host_pinned_bytes == 0
    assert "no rate is known of the host" in "".join(
        there.time_model.missing(there.plan, memplan.cluster("4xh100-sxm"))
    )
    held = there.worst.rest_bytes - on_gpu.worst.rest_bytes
    assert held == 2 * largest - 3 * 4 * size - 4 - 4  # no optimizer state, FusedAdam's flag, norm
    pinned = memplan.estimate(GPT, **asked, offload_optimizer="cpu-pinned")
    assert pinned.peak == there.peak
    assert pinned.host.total_bytes - pinned.worst.host_pinned_bytes == 2 * 4 * size  # moments
    assert pinned.worst.host_pinned_bytes >= (2 * 4 + 2) * size + 2 * largest


def test_zero3_on_the_host_leaves_one_module_s_weights_and_one_partition_of_gradients():
    """On the GPU: the bucket, and with offload_optimizer alone the partitions of the weights."""
    asked: dict[str, Any] = USUAL | {"zero": 3, "micro_batch": 1, "stage3_param_persistence_threshold": 0}
    on_gpu = memplan.estimate(GPT, **asked)
    optimizer = memplan.estimate(GPT, **asked, offload_optimizer="cpu")
    both = memplan.estimate(GPT, **asked, offload_optimizer="cpu-pinned", offload_param="cpu")
    slots = slots_of(DeepSpeedStage(GPT, on_gpu.plan, H100, None).trained)
    size = sum([slot.part(4) for slot in slots])
    held = [one.worst.rest_bytes for one in (on_gpu, optimizer, both)]
    assert held[1] - held[2] == 2 * size
    assert held[0] - held[1] == (3 * 4 + 2) * size + 1 + 8 + 4  # the flag, the norm, FusedAdam's flag
    assert optimizer.host.total_bytes == (4 * 4 + 2) * size + 1
    assert both.host.total_bytes - both.worst.host_pinned_bytes == 3 * 4 * size + 1
    assert both.worst.host_pinned_bytes >= (4 + 2 + 2) * size
    copied = {c.what: c.payload_bytes for c in both.worst.collectives if c.axis == "host"}
    assert copied["weights"] == 2 * size  # gathered once, as all are used again soon enough
    assert copied["gradients to the host"] == (2 + 4) * size


def test_hpz_holds_a_second_partition_and_gathers_it_among_neighbours():
    """Forward gathers all weights among all ranks, backward among two."""
    asked: dict[str, Any] = USUAL | {"zero": 3, "micro_batch": 1, "stage3_param_persistence_threshold": 0}
    asked |= {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
    usual, hpz = (memplan.estimate(GPT, **asked, zero_hpz_partition_size=n) for n in (1, 2))
    slots = slots_of(DeepSpeedStage(GPT, usual.plan, H100, None).trained)
    size = sum([slot.part(4) for slot in slots]) * 2
    before = {c.axis: c.payload_bytes for c in usual.collectives if c.kind == "all_gather"}
    after = {c.axis: c.payload_bytes for c in hpz.collectives if c.kind == "all_gather"}
    assert set(before) == {"dp"}
    assert set(after) == {"dp", "2 of dp"}
    assert after["dp"] + after["2 of dp"] == before["dp"]
    assert after["dp"] == size * 4  # each weight once
    wire = {c.axis: c.wire_bytes for c in hpz.collectives if c.kind == "all_gather"}
    assert wire["2 of dp"] * 2 == after["2 of dp"]
    assert hpz.worst.rest_bytes == usual.worst.rest_bytes
    assert 0 < hpz.peak.total_bytes - usual.peak.total_bytes <= size * 4 // 2
    assert hpz.device_bytes is not None


def test_ranks_of_a_part_of_an_axis_are_neighbours():
    mesh = Mesh({"dp": 16, "tp": 2})
    group = part_of("dp", 4)
    assert (mesh.size(group), mesh.stride(group), waits_of(group), sends_along(group)) == (4, 2, "dp", False)
    assert list(inner_first({group: 1, "dp": 2, "host": 3})) == ["dp", group, "host"]
    with pytest.raises(MemplanError, match="dq"):
        mesh.stride(part_of("dq", 4))


def test_what_zero_3_releases_is_decided_once():
    """In the second micro-batch of the first step persistent weights are not there, so less is prefetched."""
    asked: dict[str, Any] = USUAL | {"zero": 3, "dp": 8, "micro_batch": 1, "seq_len": 1024}
    asked |= {"reduce_bucket_size": 500_000_000, "global_batch": 16}
    gathered = [
        (c.calls, c.payload_bytes)
        for c in memplan.estimate(replace(runnable("gpt2-xl"), tied_head=False), **asked).collectives
        if c.kind == "all_gather"
    ]
    assert gathered == [(716, 9_110_604_800)]  # as DeepSpeed's run without a GPU has it


OF_ULYSSES: dict[str, Any] = {
    "engine": "deepspeed",
    "implementation": "huggingface",
    "cluster": "8xh100-sxm",
    "seq_len": 8192,
    "cp": 2,
}


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_ulysses_divides_sequences_over_ranks_and_heads_in_attention(zero):
    precision = "fp16-mixed" if zero == 2 else "bf16-mixed"
    asked = {**OF_ULYSSES, "zero": zero, "precision": precision, "recompute": "full"}
    found = memplan.estimate("qwen2.5-0.5b", **asked)
    check_laws(found)
    blocks, heads, passes = 24, 14 + 2 + 2 + 14, 3  # queries, keys, values, output; forward, again, backward
    exchanged = [one for one in found.collectives if one.kind == "all_to_all"]
    assert {one.axis for one in exchanged} == {"cp"}
    assert sum(one.calls for one in exchanged) == blocks * 4 * passes
    assert sum(one.payload_bytes for one in exchanged) == passes * blocks * heads * 64 * 8192 // 2 * 2
    kind = "reduce_scatter" if zero == 3 else "all_reduce"
    reduced = [one for one in found.collectives if (one.kind, one.axis) == (kind, "dp x cp")]
    assert sum(one.payload_bytes for one in reduced) >= 4 * found.n_parameters  # in float32


def test_zero_0_masks_all_gradients_on_the_last_ranks_of_a_sequence():
    found = memplan.estimate("qwen2.5-0.5b", **OF_ULYSSES | {"seq_len": 1024}, zero=0)
    first = rank_estimate(found.model, found.plan, found.plan.place(0), H100)
    assert found.peak.total_bytes - first.peak.total_bytes > found.n_parameters
    assert any("mask their gradients" in note for note in found.notes)


REFUSED_OF_ULYSSES: list[tuple[dict[str, Any], str]] = [
    ({"recompute": "selective"}, "cp=2 with recompute='selective'"),
    ({"zero": 3, "zero_hpz_partition_size": 2}, "cp=2 with zero_hpz_partition_size"),
    ({"seq_len": 8191}, "batch's seqlen=8191 isn't divisible by sp-size=2"),
    ({"cp": 4}, "cp=4: DeepSpeed's Ulysses does not divide the 14 heads of queries and 2 of keys"),
    ({"device": "cpu", "cluster": None, "dp": 2}, "cp=2: DeepSpeed's Ulysses has rules on GPUs only"),
]


@pytest.mark.parametrize("options,said", REFUSED_OF_ULYSSES, ids=[said for _, said in REFUSED_OF_ULYSSES])
def test_what_ulysses_does_not_divide_is_refused_with_a_way_out(options, said):
    with pytest.raises(MemplanError, match=rf"^{re.escape(said)}.*; use"):
        memplan.estimate("qwen2.5-0.5b", **{**OF_ULYSSES, "zero": 2, "precision": "fp16-mixed", **options})


def test_ulysses_is_around_modules_of_transformers():
    with pytest.raises(MissingRule, match="is no module of transformers"):
        memplan.estimate("llama-3-8b", **OF_ULYSSES | {"implementation": "reference"}, zero=1)
    asked = {name: value for name, value in OF_ULYSSES.items() if name != "implementation"}
    chosen = memplan.search("qwen2.5-0.5b", **asked | {"cp": (1, 2)}, zero=0, global_batch=8, micro_batch=1)
    assert {*chosen["cp"]} == {1, 2}


OF_AUTOTP: dict[str, Any] = {
    "engine": "deepspeed",
    "implementation": "huggingface",
    "cluster": "8xh100-sxm",
    "seq_len": 4096,
    "tp": 2,
}


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_autotp_divides_linears_and_the_vocabulary_of_tied_ends(zero):
    found = memplan.estimate("qwen2.5-0.5b", **OF_AUTOTP, zero=zero)
    check_laws(found)
    assert found.n_parameters == 494_032_768  # those of all ranks
    of_block, of_ends, of_norm = 2 + 5, 1 + 1 + 3, 2  # outputs, inputs' gradients; embedding, head, loss
    over_tp = [one for one in found.collectives if one.axis == "tp"]
    assert {one.kind for one in over_tp} == {"all_reduce"}
    assert sum(one.calls for one in over_tp) == 24 * of_block + of_ends + of_norm
    assert {one.axis for one in found.collectives} == {"dp", "tp"}


def test_zero_0_masks_what_all_tensor_ranks_have_on_all_but_the_first():
    found = memplan.estimate("qwen2.5-0.5b", **OF_AUTOTP, zero=0)
    kept = [rank_estimate(found.model, found.plan, found.plan.place(i), H100).rest_bytes for i in (0, 1)]
    assert (
        kept[1] - kept[0] == 24 * 2 * 8
    )  # the norms of a block are neighbours, between weights that are divided


def test_a_single_data_parallel_rank_gathers_no_weights():
    found = memplan.estimate("qwen2.5-0.5b", **OF_AUTOTP | {"cluster": "2xh100-sxm"}, zero=1)
    assert not [one for one in found.collectives if one.kind == "all_gather"]


REFUSED_OF_AUTOTP: list[tuple[dict[str, Any], str]] = [
    ({"zero": 3}, "tp=2 with zero=3"),
    ({"cp": 2}, "tp=2 with cp=2"),
    ({"recompute": "selective"}, "tp=2 with recompute='selective'"),
    ({"sequence_parallel": True}, "sequence_parallel=True: DeepSpeed's AutoTP divides no sequence"),
    ({"tp": 4}, "tp=4 does not divide n_heads=14: DeepSpeed's AutoTP gives ranks shards that are not equal"),
    ({"device": "cpu", "cluster": None, "dp": 2}, "tp=2: DeepSpeed's AutoTP has rules on GPUs only"),
]


@pytest.mark.parametrize("options,said", REFUSED_OF_AUTOTP, ids=[said for _, said in REFUSED_OF_AUTOTP])
def test_what_autotp_does_not_divide_is_refused_with_a_way_out(options, said):
    with pytest.raises(MemplanError, match=rf"^{re.escape(said)}.*; use"):
        memplan.estimate("qwen2.5-0.5b", **{**OF_AUTOTP, "zero": 2, **options})


def test_autotp_divides_modules_of_transformers():
    with pytest.raises(MissingRule, match=r"tp=2: llama-3-8b .* is no module of transformers"):
        memplan.estimate("llama-3-8b", **OF_AUTOTP | {"implementation": "reference"}, zero=1)


def test_tensor_parallel_ranks_are_read_and_written():
    of_ranks = {"tensor_parallel": {"autotp_size": 2, "dtype": "bf16"}, "train_batch_size": 48}
    asked: dict[str, Any] = {
        "deepspeed": {**CONFIGURATION, **of_ranks},
        "cluster": "8xh100-sxm",
        "seq_len": 4096,
    }
    found = memplan.estimate("qwen2.5-0.5b", **asked)
    assert (found.plan.tp, found.plan.dp, found.plan.global_batch) == (2, 4, 24)
    assert found.model.implementation == "huggingface"
    written = json.loads(launchers.exported(found, "deepspeed").text)
    assert (written["tensor_parallel"], written["train_batch_size"]) == ({"autotp_size": 2}, 48)
    assert read_configuration(written, found.model).on_ranks(4)["global_batch"] == 24
    assert read_configuration(CONFIGURATION | {"sequence_parallel_size": 4}, GPT).keywords["cp"] == 4


def test_a_pipeline_has_a_section_of_its_own():
    section = {
        "stages": 2,
        "partition": "best",
        "activation_checkpoint_interval": 1,
        "pipe_partitioned": False,
    }
    read = read_configuration(CONFIGURATION | {"zero_optimization": {"stage": 1}, "pipeline": section}, GPT)
    assert read.keywords["activation_checkpoint_interval"] == 1
    found = memplan.estimate(GPT, cluster="8xh100-sxm", seq_len=32, pp=2, **read.on_ranks(4))
    written = launchers.exported(found, "deepspeed")
    assert json.loads(written.text)["pipeline"] == {"activation_checkpoint_interval": 1}
    assert json.loads(written.text)["train_batch_size"] == 24
    assert "PipelineModule(layers, num_stages=2, partition_method='parameters'" in " ".join(written.notes)
    for wrong in ({"use_reentrant": False}, {"pipe_partitioned": 1}):
        with pytest.raises(MemplanError, match=r"; (use|leave)"):
            read_configuration(CONFIGURATION | {"pipeline": section | wrong}, GPT)


@given(SIZES, st.integers(1, 6))
def test_layers_are_dealt_out_in_order(sizes, n_parts):
    for parts in (partition_balanced(tuple(sizes), n_parts), partition_uniform(len(sizes), n_parts)):
        assert len(parts) == n_parts + 1
        assert (parts[0], parts[-1]) == (0, len(sizes))
        assert sorted(parts) == list(parts)


def test_the_last_stage_keeps_the_logits_of_two_micro_batches():
    asked: dict[str, Any] = {
        "engine": "deepspeed",
        "pp": 2,
        "dp": 4,
        "cluster": "8xh100-sxm",
        "seq_len": 2048,
    }
    one, two, many = (memplan.estimate("llama-3-8b", global_batch=4 * m, **asked) for m in (1, 2, 8))
    logits = 2048 * 128_256 * 2
    assert logits < two.stages[1].rest_bytes - one.stages[1].rest_bytes < 1.2 * logits
    assert many.stages[1].rest_bytes - two.stages[1].rest_bytes < logits / 100


def test_a_search_tries_pipelines_under_zero_0_and_1():
    found = memplan.search(LLAMA, cluster="4xh100-sxm", engine="deepspeed", pp=2, global_batch=8, seq_len=64)
    assert set(found["pp"]) == {2}
    assert set(found["zero"][found["verdict"] != "refused"]) == {0, 1}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"zero": 3, "recompute": "selective"}, "recompute='selective' with zero=3"),
    ({"zero": 3, "zero_hpz_partition_size": 3}, "zero_hpz_partition_size=3 does not divide dp=4"),
    ({"zero": 2, "zero_hpz_partition_size": 2}, "zero_hpz_partition_size=2 is of another ZeRO stage"),
    (
        {"zero": 3, "zero_hpz_partition_size": 2, "offload_optimizer": "cpu", "offload_param": "cpu"},
        "zero_hpz_partition_size beside partitions of weights on the host",
    ),
    ({"zero": 2, "sub_group_size": 10}, "sub_group_size=10 is of another ZeRO stage"),
    ({"zero": 2, "offload": True}, "offload=True"),
    ({"zero": 3, "offload_param": "cpu"}, "offload_param='cpu' beside optimizer states on the GPU"),
    ({"zero": 2, "offload_optimizer": "cpu", "offload_param": "cpu"}, "offload_param=cpu is of another"),
    (
        {"zero": 0, "reduce_bucket_size": 500_000_000, "offload_optimizer": "cpu"},
        "offload_optimizer=cpu is of",
    ),
    ({"zero": 1, "precision": "fp32"}, "precision='fp32'"),
    ({"zero": 1, "optimizer": "sgd"}, "optimizer='sgd'"),
    ({"zero": 2, "pp": 2}, "zero=2: ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism"),
    ({"zero": 1, "pp": 2, "tp": 2}, "pp=2 with tp=2 has no rule yet"),
    ({"zero": 1, "pp": 2, "schedule": "gpipe"}, "schedule='gpipe': DeepSpeed's TrainSchedule"),
    ({"zero": 1, "pp": 2, "schedule": "dualpipe-v"}, "pp=2 with schedule='dualpipe-v' (DualPipeVModule)"),
    ({"zero": 1, "pp": 2, "layers_per_stage": (1, 3)}, "layers_per_stage: DeepSpeed's PipelineModule"),
    ({"zero": 1, "pp": 2, "overlap_comm": True}, "overlap_comm=True: Pipeline parallelism does not"),
    ({"zero": 1, "pp": 2, "offload_optimizer": "cpu"}, "pp=2 with offload_optimizer has no rule yet"),
    ({"zero": 1, "pp": 2, "recompute": "full", "recompute_blocks": 1}, "pp=2 with recompute_blocks"),
    ({"zero": 1, "pp": 7, "global_batch": 28}, "pp=7: gpt-small has 6 layers for DeepSpeed's"),
    (
        {"zero": 1, "pp": 2, "recompute": "full", "activation_checkpoint_interval": 1},
        "pp=2 with activation_checkpoint_interval beside recompute='full'",
    ),
    ({"zero": 1, "activation_checkpoint_interval": 1}, "activation_checkpoint_interval=1 is of pipelines"),
    ({"zero": 1, "partition_method": "uniform"}, "partition_method='uniform' is of pipelines"),
    ({"zero": 1, "dp": 1}, "dp=1"),
    ({"zero": 0}, "reduce_bucket_size=10000"),
]


@pytest.mark.parametrize("options,said", REFUSED, ids=[said for _, said in REFUSED])
def test_what_has_no_rule_is_refused_with_a_way_out(options, said):
    with pytest.raises(MemplanError, match=rf"^{re.escape(said)}.*; (use|leave)"):
        memplan.estimate(GPT, **USUAL | options)


# --- Its JSON ---

CONFIGURATION: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 3,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 5e7},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "steps_per_print": 10,
}


def test_a_configuration_is_a_plan():
    found = read_configuration(CONFIGURATION, GPT).on_ranks(8)
    told = {"engine": "deepspeed", "zero": 2, "overlap_comm": True, "reduce_bucket_size": 50_000_000}
    told |= {"micro_batch": 2, "global_batch": 48, "clip_grad_norm": 1.0, "precision": "bf16-mixed"}
    assert told.items() <= found.items()
    memplan.estimate(GPT, cluster="8xh100-sxm", seq_len=32, **found)


def test_auto_is_what_the_trainer_fills_in_and_a_stage_leaves_others_keys_unread():
    section: dict[str, Any] = {
        "stage": 3,
        "overlap_comm": True,
        "sub_group_size": 1e9,
        "stage3_max_live_parameters": 1e9,
    }
    section |= dict.fromkeys(("reduce_bucket_size", "stage3_param_persistence_threshold"), "auto")
    found = read_configuration(CONFIGURATION | {"zero_optimization": section}, GPT).keywords
    d = GPT.d_model
    assert (found["reduce_bucket_size"], found["stage3_param_persistence_threshold"]) == (d * d, 10 * d)
    section["stage"] = 2
    found = read_configuration(CONFIGURATION | {"zero_optimization": section}, GPT).keywords
    assert not [name for name in found if name.startswith("stage3") or name == "sub_group_size"]


TRAINERS: dict[str, Any] = {
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16},
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "allgather_bucket_size": 2e8,
        "overlap_comm": True,
        "reduce_bucket_size": "auto",
        "contiguous_gradients": True,
    },
    **dict.fromkeys(("gradient_accumulation_steps", "gradient_clipping"), "auto"),
    **dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu"), "auto"),
    "steps_per_print": 2000,
}
"""As transformers' documentation writes it: everything that the Trainer knows is "auto"."""


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"precision": "fp16-mixed", "clip_grad_norm": 0.5, "micro_batch": 2, "global_batch": 48},
    ],
)
def test_what_is_auto_is_the_caller_s(said):
    asked: dict[str, Any] = {"cluster": "8xh100-sxm", "seq_len": 32, "deepspeed": TRAINERS}
    plan = memplan.estimate(GPT, **asked, **said).plan
    found = (plan.precision, plan.clip_grad_norm, plan.micro_batch, plan.global_batch)
    assert found == (("fp16-mixed", 0.5, 2, 48) if said else ("bf16-mixed", 1.0, 1, 8))
    four = TRAINERS | {"gradient_accumulation_steps": 4}
    assert memplan.estimate(GPT, **(asked | {"deepspeed": four}), micro_batch=2).plan.global_batch == 64


@pytest.mark.parametrize("n,micro_batch,global_batch", [(None, 2, 16), (4, 1, 32)])
def test_batches_are_completed_as_deepspeed_does(n, micro_batch, global_batch):
    values = {key: value for key, value in CONFIGURATION.items() if "train" not in key and "grad" not in key}
    values |= {"train_micro_batch_size_per_gpu": 2} if n is None else {"train_batch_size": 32}
    values |= {} if n is None else {"gradient_accumulation_steps": n}
    found = read_configuration(values, GPT).on_ranks(8)
    assert (found["micro_batch"], found["global_batch"]) == (micro_batch, global_batch)


@pytest.mark.parametrize("as_file", [True, False])
def test_an_estimate_takes_a_configuration_as_a_dict_or_a_file(tmp_path, as_file):
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(CONFIGURATION))
    given = file if as_file else CONFIGURATION
    found = memplan.estimate(GPT, cluster="8xh100-sxm", seq_len=32, deepspeed=given)
    assert (found.plan.engine, found.plan.zero, found.plan.n_micro_batches) == ("deepspeed", 2, 3)
    with pytest.raises(MemplanError, match=r"^zero=1 contradicts the DeepSpeed configuration.*; leave one"):
        memplan.estimate(GPT, cluster="8xh100-sxm", seq_len=32, deepspeed=given, zero=1)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"zero_optimisation": {}}, "did you mean 'zero_optimization'"),
    ({"zero_optimization": {"stage": 2, "overlap_com": True}}, "did you mean 'overlap_comm'"),
    ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, "offload_optimizer="),
    ({"zero_optimization": {"offload_optimizer": {"devise": "cpu"}}}, "did you mean 'device'"),
    ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, "offload_param="),
    ({"zero_optimization": {"offload_param": {"pin_memery": True}}}, "did you mean 'pin_memory'"),
    ({"zero_optimization": {"round_robin_gradients": True}}, "round_robin_gradients=True has no rule"),
    ({"train_batch_size": 47}, "train_batch_size is not equal to micro_batch_per_gpu"),
    ({"fp16": {"enabled": True}}, "both bf16 and fp16"),
    ({"optimizer": {"type": "Lamb"}}, "unknown optimizer.type 'Lamb'"),
    ({"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}, "torch_adam=true has no rule"),
    ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps=0 has to be greater than 0"),
]


@pytest.mark.parametrize("changed,said", WRONG, ids=[said for _, said in WRONG])
def test_what_a_configuration_says_wrongly_is_named(changed, said):
    with pytest.raises(MemplanError, match=re.escape(said)):
        read_configuration(CONFIGURATION | changed, GPT).on_ranks(8)


@pytest.mark.parametrize(
    "asked",
    [
        {"zero": 1, "overlap_comm": True, "offload_optimizer": "cpu", "precision": "fp16-mixed"},
        {"zero": 3, "offload_optimizer": "cpu-pinned", "offload_param": "cpu", "optimizer": "adamw"},
        {"zero": 3, "zero_hpz_partition_size": 4},
    ],
)
def test_an_export_reads_back_as_the_plan(tmp_path, asked):
    usual: dict[str, Any] = {
        "engine": "deepspeed",
        "cluster": "8xh100-sxm",
        "seq_len": 32,
        "recompute": "full",
    }
    asked = {"global_batch": 32, "optimizer": "adam", "implementation": "huggingface"} | asked
    estimated = memplan.estimate("gpt2", **usual, **asked)
    file = tmp_path / "ds_config.json"
    file.write_text(estimated.export("deepspeed"))
    json.loads(file.read_text())
    found = launchers.read(file, "deepspeed", resolve("gpt2")).on_ranks(8)
    found["implementation"] = "huggingface"
    assert memplan.estimate("gpt2", **usual | found).plan == estimated.plan
