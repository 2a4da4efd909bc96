"""The roofline: parts that add up, formulas against what they stand for, and no time without rates."""

from collections import Counter
from dataclasses import dataclass, fields, replace
from itertools import product
from math import inf
from typing import Any, cast, final

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils._python_dispatch import TorchDispatchMode

import memplan
from memplan import Gpt, Llama, Plan
from memplan.device import CPU
from memplan.engines.checks import check_plan
from memplan.engines.torch import RankStages
from memplan.errors import InvalidValue, PlanRefused
from memplan.estimate import estimate_plan, rank_estimate
from memplan.files import toml_table
from memplan.hardware import Link, cluster
from memplan.ops import silu
from memplan.plan import Rank, unchecked
from memplan.record import Compute, ComputeKind, Counts, flops_of
from memplan.schedules import SCHEDULES
from memplan.shapes import BF16
from memplan.tables import estimate_text
from memplan.tape import OpContext, Tape
from memplan.time import attention_s, collective_s, product_s
from memplan.time.collectives import crosses_nodes, ranks_in_a_node
from memplan.time.operations import operations_of
from memplan.time.prices import links_used, ring_bytes_per_s
from memplan.time.products import curve_of
from memplan.time.step import Measured, Roofline, StepTime, added
from validate.systems.torch.modules import Transformer, token_loss

HALF = Roofline(efficiency=0.5)

FIELDS: dict[str, Any] = {"n_layers": 3, "d_model": 32, "n_heads": 4, "d_ff": 48, "vocab_size": 64}
LLAMA = Llama(name="small", **FIELDS, n_kv_heads=2, max_seq_len=16, tied_head=False)
GPT = Gpt(name="small", **FIELDS, max_seq_len=16, tied_head=False)
DEEP = replace(LLAMA, n_layers=64)

PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "one GPU": ("gpt2", {"cluster": "1xh100-sxm"}),
    "DDP": ("gpt2", {"cluster": "16xa100-80-sxm", "global_batch": 64}),
    "ZeRO-3": ("llama-3-8b", {"cluster": "16xh100-sxm", "zero": 3, "recompute": "full"}),
    "HSDP": ("llama-3-8b", {"cluster": "16xh100-sxm", "zero": 3, "dp_replicate": 2}),
    "3-D": (
        "llama-3-70b",
        {"cluster": "64xh100-sxm", "tp": 8, "pp": 4, "zero": 1, "sequence_parallel": True, "seq_len": 8192},
    ),
    "interleaved": (
        "llama-3-70b",
        {"cluster": "64xh100-sxm", "tp": 4, "pp": 4, "schedule": "interleaved-1f1b", "virtual_stages": 2},
    ),
}


@pytest.fixture(params=PLANS)
def estimate(request):
    model, asked = PLANS[request.param]
    return memplan.estimate(model, **asked)


# The step


def test_the_parts_add_up_to_the_step_exactly(estimate):
    assert added(estimate.time.parts.values()) == estimate.step_s > 0
    assert all(seconds >= 0 for seconds in estimate.time.parts.values())
    for time in estimate.stage_times:
        assert time.total_s == pytest.approx(estimate.step_s, rel=1e-12)
    assert estimate.step_s == estimate.to_dict()["step_s"]
    assert list(estimate.to_frame()["step_s"]) == pytest.approx([estimate.step_s] * estimate.plan.pp)


def test_throughput_and_utilisation_follow_from_the_step(estimate):
    plan, n_gpus = estimate.plan, estimate.cluster.n_gpus
    assert estimate.tokens_per_s == plan.global_batch * plan.seq_len / estimate.step_s
    assert estimate.tokens_per_s_per_gpu == estimate.tokens_per_s / n_gpus
    peak = estimate.cluster.gpu.bf16_flops_per_s
    used = estimate.total_model_flops / (estimate.step_s * n_gpus * peak)
    assert estimate.mfu == pytest.approx(used, rel=1e-12)
    assert 0 < estimate.mfu <= 0.5


def test_a_step_by_hand():
    """gpt2 on one A100: 6 FLOPs a weight of a product and token, 12 a layer for each pair of tokens."""
    e = memplan.estimate("gpt2", cluster="1xa100-80-sxm", global_batch=4, micro_batch=2)
    e = replace(e, time_model=HALF)
    weights = 12 * 12 * 768**2 + 768 * 50257
    flops = 4 * 1024 * (6 * weights + 12 * 12 * 768 * 1024)
    assert e.total_model_flops == flops
    assert e.time.compute_s == pytest.approx(flops / (312e12 * 0.5), rel=1e-12)
    states = e.worst.states
    moved = 2 * states.weights_bytes + states.grads_bytes + 2 * states.optimizer_bytes
    assert e.time.update_s == pytest.approx(moved / 2.039e12, rel=1e-12)
    assert e.step_s == e.time.compute_s + e.time.update_s


def test_a_step_costs_what_its_operations_were_measured_to_take():
    """gpt2 on one A100: each product, with two as large for its gradients; attention; what kernels move."""
    e = memplan.estimate("gpt2", cluster="1xa100-80-sxm", global_batch=4, micro_batch=2)
    share = toml_table("time/sustained.toml")["a100-80-sxm"]["of_products"]
    curve, _ = curve_of(e.cluster.gpu, "bf16")
    products_s = moved_s = 0.0
    for event, n in e.worst.record.step.counts.items():
        if not isinstance(event, Compute):
            continue
        if event.kind is ComputeKind.MM:
            if event.phase == "backward":
                continue
            (m, k), (_, width) = event.operands
            sizes = (m, width, k), (m, k, width), (k, width, m)
            products_s += n * sum(product_s("a100-80-sxm", "bf16", *each) for each in sizes) / share
        elif event.kind is ComputeKind.ATTENTION:
            batch, seq, heads, d_head = event.operands[0]
            passes = (
                attention_s("a100-80-sxm", batch, seq, heads, heads, d_head, backward=b)
                for b in (False, True)
            )
            products_s += n * sum(passes) / share
        elif event.kind is not ComputeKind.ATTENTION_BACKWARD:
            assert event.kind is ComputeKind.MEMORY
            launches_s = event.n_kernels * curve.launch_us * 1e-6
            moved_s += n * (launches_s + event.moved_bytes / (curve.memory_tb_per_s * 1e12))
    assert e.time.compute_s == pytest.approx(products_s + moved_s, rel=1e-9)
    assert 0.5 < moved_s / products_s < 1.5


def test_memory_bound_kernels_move_what_they_read_and_write():
    """SiLU times a gate: forward reads one and two tensors and writes one each; backward by hand, too."""
    tape = Tape(OpContext(micro_batch=2, seq_len=8))
    x, gate = (tape.new(name, (2, 8, 64), BF16) for name in ("x", "gate"))
    tape.end_stretch()
    n = 2 * 8 * 64 * 2
    y = silu(x) * gate
    tape.end_stretch()
    forward = cast(Compute, tape.events[-1])
    assert (forward.moved_bytes, forward.n_kernels) == ((2 + 3) * n, 2)
    tape.start_backward(y, tape.new("grad", y.shape, BF16))
    tape.end_stretch()
    tape.backward()
    tape.end_stretch()
    backward = cast(Compute, tape.events[-1])
    assert backward.phase == "backward"
    assert (backward.moved_bytes, backward.n_kernels) == ((3 + 3 + 3) * n, 3)


def test_as_many_bytes_in_more_kernels_take_longer():
    one = Compute(kind=ComputeKind.MEMORY, phase="forward", flops=0, shape=(), dtype=BF16, moved_bytes=8)
    few, many = (replace(one, n_kernels=n) for n in (1, 2))
    own = operations_of(memplan.gpu("h100-sxm"), "bf16", False, False)
    assert own.seconds(many) == pytest.approx(2 * own.seconds(few), rel=1e-3)


def test_tensor_traffic_by_hand():
    """Four GPUs of a node: what the tensor axis sends, over NVLink, while nothing is computed."""
    e = memplan.estimate("llama-3-8b", cluster="4xh100-sxm", tp=4, seq_len=2048)
    by_call = sum(
        c.calls * collective_s("4xh100-sxm", c.kind, c.payload_bytes // c.calls, 4)
        for c in e.collectives
        if c.axis == "tp"
    )
    assert e.time.tp_s == pytest.approx(by_call, rel=1e-9)
    e = replace(e, time_model=HALF)
    sent = sum(c.wire_bytes for c in e.collectives if c.axis == "tp")
    assert e.time.tp_s == pytest.approx(sent / 450e9, rel=1e-12)
    assert e.time.dp_s == e.time.pp_s == e.time.bubble_s == 0


def test_ddp_hides_gradients_behind_the_last_backward_pass_only():
    one, many = (
        memplan.estimate("gpt2", cluster="64xh100-sxm", seq_len=64, global_batch=64 * m) for m in (1, 16)
    )
    assert one.time.dp_s > 0
    assert many.time.dp_s == pytest.approx(one.time.dp_s, rel=1e-12)
    assert many.time.compute_s == pytest.approx(16 * one.time.compute_s, rel=1e-12)


def test_the_stage_that_waits_least_leads():
    e = memplan.estimate(
        "llama-3-8b", cluster="2xh100-sxm", pp=2, layers_per_stage=(20, 12), seq_len=512, global_batch=8
    )
    first, second = e.stage_times
    assert e.time == first
    assert first.bubble_s < second.bubble_s
    assert first.total_s == pytest.approx(second.total_s, rel=1e-12)


def test_recomputation_lowers_utilisation_and_counts_as_no_work():
    plain, full, some, selective = (
        memplan.estimate("llama-3-8b", cluster="8xh100-sxm", zero=3, **recompute)
        for recompute in (
            {},
            {"recompute": "full"},
            {"recompute": "full", "recompute_blocks": 8},
            {"recompute": "selective"},
        )
    )
    assert full.total_model_flops == plain.total_model_flops
    assert full.mfu < some.mfu < plain.mfu
    assert plain.time.recompute_s == 0 < selective.time.recompute_s < full.time.recompute_s
    assert some.time.recompute_s == pytest.approx(full.time.recompute_s / 4, rel=1e-12)


# No time without rates


@pytest.mark.parametrize(
    "asked,reason",
    [
        ({}, "no cluster was given"),
        ({"cluster": "2xcpu"}, "no peak rate is known of cpu in bf16"),
        ({"cluster": "8xv100-32"}, "no peak rate is known of v100-32 in bf16"),
        ({"cluster": "8xh100-sxm", "zero": 3, "offload": True}, "known of the host"),
        ({"cluster": "8xh100-sxm", "engine": "textbook"}, "closed-form accounting has none"),
        (
            {"cluster": replace(cluster("16xh100-sxm"), inter_node=Link(name="rumour"))},
            "no rate is known between nodes (rumour)",
        ),
        (
            {"cluster": replace(cluster("8xh100-sxm"), intra_node=Link(name="cut"))},
            "no rate is known within a node (cut)",
        ),
    ],
)
def test_what_has_no_rate_has_no_time_and_says_so(asked, reason):
    e = memplan.estimate("gpt2", **asked)
    results = (e.time, e.stage_times, e.step_s, e.tokens_per_s, e.tokens_per_s_per_gpu, e.mfu)
    assert results == (None,) * 6
    assert e.to_dict()["time"] is e.to_dict()["step_s"] is None
    assert reason in "; ".join(e.time_missing)
    text = str(e)
    assert "No step time: " in text
    assert reason in text.replace("\n", " ")
    assert "MFU" not in text
    assert e.to_frame()["step_s"].isna().all()


def test_many_plans_use_the_links_that_each_of_them_uses() -> None:
    names = "pp", "dp_replicate", "dp", "tp"
    degrees = np.array([*product((1, 2, 3, 8), repeat=4)])
    found: Any = links_used(unchecked(Plan(), **dict(zip(names, degrees.T, strict=True))), 8)
    for row, each in zip(degrees.tolist(), zip(*found, strict=True), strict=True):
        assert links_used(unchecked(Plan(), **dict(zip(names, row, strict=True))), 8) == each


def test_a_link_that_nothing_crosses_needs_no_rate():
    within = replace(cluster("16xh100-sxm"), inter_node=Link(name="rumour"))
    one = replace(cluster("1xh100-sxm"), intra_node=Link(name="rumour"), inter_node=Link(name="rumour"))
    spread = replace(cluster("4xh100-sxm"), gpus_per_node=1, intra_node=Link(name="rumour"))
    assert memplan.estimate("gpt2", cluster=one).step_s is not None
    assert memplan.estimate("gpt2", cluster=spread).step_s is not None
    assert memplan.estimate("gpt2", cluster=within).step_s is None


def test_the_text_says_how_far_to_trust_it(estimate):
    low, high, n_runs = estimate.time_model.band
    assert f"nine in ten published runs had {low} to {high} times this rate" in " ".join(
        str(estimate).split()
    )
    text = " ".join(estimate_text(estimate, details=True).split())
    assert f"nine in ten of {n_runs} published runs had {low} to {high} times the rate" in text
    assert estimate.to_dict()["time"]["confidence"].startswith("Times add up products, attention")
    assert estimate.tokens_per_s_band == (low * estimate.tokens_per_s, high * estimate.tokens_per_s)


# The seam


def test_another_model_of_time_takes_its_place():
    measured = memplan.estimate("gpt2", cluster="1xh100-sxm")
    half, whole = (replace(measured, time_model=Roofline(efficiency=x)) for x in (0.5, 1.0))
    assert half.time.compute_s == pytest.approx(2 * whole.time.compute_s, rel=1e-12)
    assert whole.time.compute_s < measured.time.compute_s
    assert whole.tokens_per_s_band is None
    assert "100% of the peak rate, as you said; no run has confirmed them" in " ".join(
        estimate_text(whole, details=True).split()
    )


def test_flash_attention_2_is_slower_on_hopper_alone():
    for cluster_name, slower in (("1xh100-sxm", True), ("1xa100-80-sxm", False)):
        own = memplan.estimate("llama-3.2-1b", cluster=cluster_name, seq_len=8192)
        second = replace(own, time_model=Measured(flash=2))
        assert (second.step_s > own.step_s) == slower


@pytest.mark.parametrize("efficiency", [0, -1, 1.5, inf, "fast"])
def test_an_efficiency_out_of_range_is_refused(efficiency):
    with pytest.raises(InvalidValue, match="efficiency="):
        Roofline(efficiency=efficiency)


def test_a_roofline_without_rates_refuses():
    with pytest.raises(InvalidValue, match="there is no step time: no peak rate is known of cpu"):
        Roofline(efficiency=0.5).step_times([], Plan(), cluster("1xcpu"))


# FLOPs, against PyTorch's own count


class Products(TorchDispatchMode):
    """Counts the FLOPs of matrix products and of attention's forward kernel."""

    flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            left, right = args[-2:]
            self.flops += 2 * left.shape[0] * left.shape[1] * right.shape[1]
        elif func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:
            batch, n_heads, seq_len, d_head = args[0].shape
            self.flops += 4 * batch * n_heads * seq_len**2 * d_head
        return func(*args, **(kwargs or {}))


def counted(stages, module, run) -> tuple[int, int]:
    """What PyTorch runs, and what we say it does; attention's own backward kernel left out of both."""
    plan, model = stages.plan, stages.model
    module.recompute, module.recompute_blocks = plan.recompute, plan.recompute_blocks
    module.autocast_dtype = None if plan.precision == "fp32" else torch.bfloat16
    with Products() as found:
        run()
    layers = sum(stage.n_blocks for stage in stages)
    attention = 4 * plan.micro_batch * model.n_heads * plan.seq_len**2 * model.d_head * layers
    m = plan.n_micro_batches
    rank = rank_estimate(model, plan, stages.rank, CPU)
    forward, again = rank.flops // m, rank.recomputed_flops // m
    return found.flops, forward + again + 2 * (forward - attention)


@pytest.mark.parametrize("model", [LLAMA, GPT], ids=["llama", "gpt"])
@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
@pytest.mark.parametrize(
    "recompute,blocks", [("none", None), ("full", None), ("full", 2), ("selective", None)]
)
def test_flops_are_those_that_pytorch_runs(model, precision, recompute, blocks):
    plan = Plan(seq_len=16, micro_batch=2, precision=precision, recompute=recompute, recompute_blocks=blocks)
    module = Transformer(model, range(model.n_layers), seq_len=16)
    tokens = torch.randint(model.vocab_size, (2, 16))
    found, expected = counted(
        RankStages(model, plan, Rank(), CPU),
        module,
        lambda: token_loss(module(tokens), tokens).backward(),
    )
    assert found == expected


class Operands(TorchDispatchMode):
    """Counts the computations by kind and by their operands' shapes, heads behind the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[tuple[ComputeKind, tuple[tuple[int, ...], ...]]] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        aten = torch.ops.aten
        if func in (aten.mm.default, aten.addmm.default):
            self.found[ComputeKind.MM, tuple([tuple(x.shape) for x in args[-2:]])] += 1
        elif func is aten.bmm.default:
            self.found[ComputeKind.BMM, tuple([tuple(x.shape) for x in args])] += 1
        elif func is aten._scaled_dot_product_flash_attention_for_cpu.default:
            shapes = tuple([tuple(x.transpose(1, 2).shape) for x in args[:3]])
            self.found[ComputeKind.ATTENTION, shapes] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("model", [LLAMA, GPT, replace(GPT, dropout=0.1)], ids=["llama", "gpt", "dropout"])
def test_operands_are_those_that_pytorch_computes_with(model):
    module = Transformer(model, range(model.n_layers), seq_len=16)
    tokens = torch.randint(model.vocab_size, (2, 16))
    with Operands() as ran:
        token_loss(module(tokens), tokens)
    rank = rank_estimate(model, Plan(seq_len=16, micro_batch=2, precision="fp32"), Rank(), CPU)
    said: Counter[Any] = Counter()
    for event, n in rank.work.counts.items():
        if isinstance(event, Compute) and event.kind is not ComputeKind.MEMORY and event.phase == "forward":
            said[event.kind, event.operands] += n
            assert event.flops == flops_of(event.kind, event.operands)
    assert said == ran.found


@final
@dataclass(frozen=True)
class ByShape:
    """A time model of a second for each matrix product of some (m, k, n), and none for anything else."""

    mkn: tuple[int, int, int]
    label = "by shape"
    band = None

    def missing(self, plan, cluster):
        return ()

    def step_times(self, ranks, plan, cluster):
        return tuple([self.step_time(rank.counts) for rank in ranks])

    def step_time(self, counts: Counts) -> StepTime:
        found = 0
        for event, n in counts.items():
            if isinstance(event, Compute) and event.kind is ComputeKind.MM:
                (m, k), (_, width) = event.operands
                found += n * ((m, k, width) == self.mkn)
        nothing = dict.fromkeys([each.name for each in fields(StepTime)], 0.0)
        return StepTime(**nothing | {"compute_s": float(found)})


def test_a_time_model_receives_the_shape_of_every_product():
    """Also of gradients: that of the down projection's input has the shape of the up projection's output."""
    e = memplan.estimate("llama-3-8b", cluster="8xh100-sxm", tp=8, micro_batch=2, global_batch=8, seq_len=512)
    up_and_gate, down, other = (1024, 4096, 1792), (1024, 1792, 4096), (1024, 4096, 4096)
    assert [replace(e, time_model=ByShape(mkn)).step_s for mkn in (up_and_gate, down, other)] == [384, 384, 0]


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("model", [LLAMA, GPT], ids=["llama", "gpt"])
def test_a_split_backward_pass_recomputes_what_pytorchs_does(model, recompute):
    """Once for the inputs' gradients, and once more for each group of weights."""
    plan = Plan(
        pp=2, schedule="zero-bubble", global_batch=2, seq_len=16, recompute=recompute, precision="fp32"
    )
    stages = RankStages(model, plan, Rank(pp=1), CPU)
    module = Transformer(model, stages.layers[0], seq_len=16, first=False)
    x = torch.randn(1, 16, model.d_model, requires_grad=True)
    targets = torch.randint(model.vocab_size, (1, 16))

    def run() -> None:
        _, groups = stage_backward_input(
            [token_loss(module(x), targets)], None, [x], iter(module.parameters())
        )
        stage_backward_weight(iter(module.parameters()), groups)

    found, expected = counted(stages, module, run)
    assert found == expected
    rank = rank_estimate(model, plan, stages.rank, CPU)
    assert (rank.recomputed_flops > rank.flops) == (recompute == "full")


# Links


def groups(n, stride, n_gpus):
    for start in range(0, n_gpus, n * stride):
        for inner in range(stride):
            yield range(start + inner, start + inner + n * stride, stride)


@pytest.mark.parametrize("gpus_per_node", [1, 2, 3, 4, 6, 8])
def test_links_crossed_are_those_of_the_groups_counted_out(gpus_per_node):
    for n in range(1, 13):
        for stride in range(1, 13):
            n_gpus = int(np.lcm(n * stride, gpus_per_node))
            nodes = [Counter(rank // gpus_per_node for rank in g) for g in groups(n, stride, n_gpus)]
            crosses = any(len(found) > 1 for found in nodes)
            assert bool(crosses_nodes(n, stride, gpus_per_node)) == crosses
            fewest = min(min(found.values()) for found in nodes)
            assert int(ranks_in_a_node(n, stride, gpus_per_node)) == fewest, (n, stride)


def test_formulas_take_arrays():
    n, stride = np.array([8, 64, 16, 2]), np.array([1, 1, 4, 8])
    assert np.asarray(ring_bytes_per_s(n, stride, 8, 450.0, 50.0)).tolist() == [450, 400, 100, 50]


# Laws


@st.composite
def jobs(draw):
    """A small model under a plan on a cluster whose nodes need not suit its mesh."""
    pp, tp, dp = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 6))
    zero = draw(st.sampled_from([0, 1, 2, 3] if dp > 1 else [0]))
    schedule = draw(st.sampled_from(tuple(SCHEDULES.own) if pp > 1 else ("1f1b",)))
    v = SCHEDULES.named(schedule).stages_per_rank or 1
    m = draw(st.integers(1, 12))
    n_gpus = pp * dp * tp
    nodes = draw(st.sampled_from([n for n in range(1, n_gpus + 1) if n_gpus % n == 0]))
    try:
        plan = Plan(
            pp=pp, tp=tp, dp=dp, zero=zero, schedule=schedule, virtual_stages=v, seq_len=16,
            global_batch=m * dp, recompute=draw(st.sampled_from(["none", "full"])),
        )  # fmt: skip
        check_plan(replace(LLAMA, n_layers=6, n_kv_heads=4), plan)
    except PlanRefused:
        assume(False)
    on = replace(cluster("1xh100-sxm"), n_gpus=n_gpus, gpus_per_node=n_gpus // nodes)
    on = replace(on, inter_node=Link(name="network", bytes_per_s=draw(st.sampled_from([1e9, 5e10]))))
    return estimate_plan(replace(LLAMA, n_layers=6, n_kv_heads=4), plan, on)


LAWS = settings(max_examples=60, deadline=None, derandomize=True)


@LAWS
@given(jobs())
def test_a_step_is_its_parts_and_at_least_the_computation(e):
    assert sum(e.time.parts.values()) == e.step_s
    assert all(seconds >= 0 for seconds in e.time.parts.values())
    peak = e.cluster.gpu.bf16_flops_per_s
    assert e.step_s >= max(3 * s.flops + s.recomputed_flops for s in e.stages) / (peak * 0.5) * (1 - 1e-12)
    assert 0 < e.mfu <= 0.5


@LAWS
@given(jobs(), st.floats(1, 100))
def test_faster_links_and_memory_never_make_a_step_slower(e, times):
    def faster(link):
        return replace(link, bytes_per_s=link.bytes_per_s * times)

    gpu = e.cluster.gpu
    for change in (
        {"intra_node": faster(e.cluster.intra_node)},
        {"inter_node": faster(e.cluster.inter_node)},
        {"gpu": replace(gpu, memory_bytes_per_s=gpu.memory_bytes_per_s * times)},
    ):
        assert replace(e, cluster=replace(e.cluster, **change)).step_s <= e.step_s * (1 + 1e-12)


@LAWS
@given(jobs(), st.floats(0.01, 1), st.floats(0.01, 1))
def test_more_efficiency_never_makes_a_step_slower(e, one, other):
    slow, fast = (replace(e, time_model=Roofline(efficiency=x)) for x in sorted((one, other)))
    assert fast.step_s <= slow.step_s * (1 + 1e-12)
