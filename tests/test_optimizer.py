"""The update: what each implementation holds and sends, worked out by hand; what PyTorch itself refuses."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

import memplan
from memplan import Llama
from memplan.device import CPU
from memplan.engines.checks import check_plan
from memplan.engines.options import plan_of, with_said
from memplan.engines.torch.dtensor import ROWS, TERM, Ranks
from memplan.errors import MemplanError, MissingRule
from memplan.estimate import StageEstimate, rank_estimate
from memplan.hardware import gpu
from memplan.optimizers import KEPT
from memplan.parts.weight_updates import Weight, state_bytes, states_of
from memplan.plan import Rank
from memplan.record import Collective, Compute, Stretch
from memplan.shapes import BF16
from memplan.tape import OpContext
from memplan.time.step import model_flops
from validate.cases import Case
from validate.launch import run_case

MODEL = Llama(
    name="tiny", n_layers=2, d_model=8, n_heads=4, n_kv_heads=2, d_ff=16, vocab_size=40, max_seq_len=16
)
TABLE, BLOCK, NORM = 40 * 8, 2 * 8 + 8 * 8 * 2 + 2 * 4 * 8 + 3 * 8 * 16, 8
WEIGHTS = 2 * TABLE + 2 * BLOCK + NORM
N_PARAMETERS = 2 + 2 * 9 + 1
SP: dict[str, Any] = {"tp": 2, "sequence_parallel": True}


def estimated(**plan: Any) -> StageEstimate:
    settings: dict[str, Any] = {"seq_len": 4, "precision": "fp32", "optimizer": "adam"}
    return rank_estimate(MODEL, plan_of(**settings | plan), Rank(), CPU)


def part(stretch: Stretch, name: str) -> Stretch:
    """The part of a step of this name."""
    if stretch.name == name:
        return stretch
    found = [inner for outer in stretch.parts if (inner := part(outer, name)).name == name]
    return found[0] if found else Stretch("", (), (), 1, 0, 0)


def step_high_bytes(**plan: Any) -> int:
    return part(estimated(**plan).record.step, "optimizer step").high_bytes


def all_reduces(what: str, **plan: Any) -> Counter[str]:
    """Payload bytes by axis of the all-reduces of one purpose."""
    return Counter(
        {
            c.axis: c.payload_bytes
            for c in estimated(**plan).collectives
            if c.what == what and c.kind == "all_reduce"
        }
    )


def test_a_loop_holds_two_tensors_of_a_parameter_lists_one_of_every_parameter_a_kernel_none():
    """The loop's last denominator, the final norm's, is still there."""
    assert step_high_bytes(optimizer_impl="for-loop") == 4 * (NORM + 2 * TABLE)
    assert step_high_bytes(optimizer_impl="foreach") == 4 * WEIGHTS
    assert step_high_bytes(optimizer_impl="fused") == 0
    assert {step_high_bytes(optimizer="sgd-momentum", optimizer_impl=i) for i in ("foreach", "fused")} == {0}


def test_muon_holds_a_look_ahead_two_copies_in_bfloat16_and_two_products_of_the_shorter_side():
    """Of the largest matrix, (16, 8), beside the update of the last one."""
    largest, gram = 16 * 8, 8 * 8
    for precision, itemsize in (("fp32", 4), ("bf16", 2)):
        plan = plan_of(seq_len=4, optimizer="muon", precision=precision)
        found = rank_estimate(replace(MODEL, vocab_size=4), plan, Rank(), CPU)
        held = part(found.record.step, "optimizer step").high_bytes
        assert held == (itemsize + 2 + 2) * largest + (2 + 2) * gram


def test_muon_s_products_take_time_and_are_no_flops_of_the_model():
    """Of each block 5 times 2 a a (a + 2 b): two (8, 8), two (4, 8) and three (8, 16) matrices."""
    by_hand = 2 * 5 * 2 * (2 * 64 * (8 + 16) + 2 * 16 * (4 + 16) + 3 * 64 * (8 + 32))
    counts = estimated(optimizer="muon").record.step.counts
    assert by_hand == sum(
        e.flops * n for e, n in counts.items() if isinstance(e, Compute) and e.phase == "update"
    )
    assert model_flops(counts) == model_flops(estimated().record.step.counts)
    muon, adamw = (memplan.estimate("gpt2", cluster="1xh100-sxm", optimizer=one) for one in ("muon", "adamw"))
    assert muon.step_s > adamw.step_s


def test_muon_keeps_a_moment_of_the_blocks_matrices_and_leaves_the_rest_to_adamw():
    matrices = 2 * (BLOCK - 2 * NORM)
    others, n_others = WEIGHTS - matrices, N_PARAMETERS - 2 * 7
    states = estimated(optimizer="muon").states
    assert states.optimizer_bytes == 4 * (matrices + 2 * others + n_others)
    fullest = estimated(optimizer="muon", dp=2, zero=1).states.optimizer_bytes
    assert states.optimizer_bytes / 2 <= fullest < states.optimizer_bytes


def test_muon_of_shards_gathers_wide_matrices_and_sums_products_of_tall_ones():
    """Five times each: a wide one, its (a, a) product and it again; two (a, a) products of a tall one."""
    wide, tall = [(8, 8), (4, 8), (4, 8), (8, 8), (8, 16)], [(16, 8)] * 2
    gathered = 2 * 5 * sum(2 * a * b + a * a for a, b in wide) * 2
    summed = 2 * 5 * sum(2 * b * b for _, b in tall) * 2
    found = estimated(optimizer="muon", dp=2, zero=3, precision="fp32").collectives
    sent = Counter({(c.kind, c.what): c.payload_bytes for c in found if "orthogonal" in c.what})
    assert sent == {
        ("all_gather", "orthogonalization"): gathered,
        ("all_reduce", "orthogonalization"): summed,
    }
    assert all_reduces("norms of matrices", optimizer="muon", dp=2, zero=3) == {"dp": 2 * 2 * 7}


def test_large_matrices_are_exchanged_and_what_depends_on_the_host_is_refused():
    """Over 8 ranks (4096, 4096) bfloat16 are rows for columns, a sum and a scatter of products, a gather."""
    context = OpContext(device=gpu("h100-sxm").device)
    ranks = Ranks((8,), ("dp",), context)
    x = ranks.new("x", (4096, 4096), (ROWS,))
    made, gram = ranks.product("gram", (x, x.transposed))
    kinds = [event.kind for event in made if isinstance(event, Collective)]
    assert kinds == ["all_to_all"] * 2
    assert gram.placed == (TERM,)
    made, gram = ranks.product("gram update", (gram, gram), gram)
    assert [event.kind for event in made if isinstance(event, Collective)] == ["all_reduce"]
    made, y = ranks.product("x", (gram, x), x)
    kinds = [event.kind for event in made if isinstance(event, Collective)]
    assert kinds == ["reduce_scatter", "all_gather"]
    assert y.placed == (ROWS,)
    small = ranks.new("x", (512, 1024), (ROWS,))
    with pytest.raises(MissingRule, match="how many GPUs a process sees"):
        ranks.product("gram", (small, small.transposed))


def test_muon_under_hsdp_divides_products_of_tall_matrices_over_replicas_too():
    """DTensor shards what each replica holds whole, which costs nothing, so that it sums half as much."""
    found = estimated(optimizer="muon", dp=2, dp_replicate=2, zero=3, precision="fp32").collectives
    sent = Counter({(c.kind, c.axis): c.calls for c in found if "orthogonal" in c.what})
    assert sent["all_reduce", "dp_replicate"] > 0
    assert sent["all_gather", "dp"] > 0


def test_muon_of_tensor_ranks_sums_products_of_what_is_divided_by_columns():
    """Both ways of dividing a matrix: the output projections are divided by columns, all others by rows."""
    found = estimated(optimizer="muon", tp=2, precision="fp32").collectives
    sent = {c.kind: c.axis for c in found if "orthogonal" in c.what}
    assert sent == {"all_gather": "tp", "all_reduce": "tp"}
    assert all_reduces("norms of matrices", optimizer="muon", tp=2) == {"tp": 2 * 2 * 7}


MATRICES = [(40, 8), *[(8, 8), (4, 8), (4, 8), (8, 8), (16, 8), (16, 8), (8, 16)] * 2, (40, 8)]
N_VECTORS = 5


def test_adafactor_keeps_a_row_and_a_column_and_the_update_before_beside_the_next():
    """The head's update, the mean of its rows and columns, and the norm's update and squared gradient."""
    factors = sum(rows + columns for rows, columns in MATRICES)
    alone = estimated(optimizer="adafactor")
    assert alone.states.optimizer_bytes == 4 * (factors + N_VECTORS * NORM + N_PARAMETERS)
    assert part(alone.record.step, "optimizer step").high_bytes == 4 * (TABLE + 2 * NORM + 40 + 8)
    assert step_high_bytes(optimizer="adafactor", optimizer_impl="foreach") == 4 * (WEIGHTS)


def test_transformers_adafactor_holds_bfloat16_weights_gradients_and_two_updates_in_float32():
    found = estimated(optimizer="adafactor-transformers", precision="bf16")
    factors = sum(rows + columns for rows, columns in MATRICES)
    assert found.states.optimizer_bytes == 4 * (factors + N_VECTORS * NORM + N_PARAMETERS)
    assert part(found.record.step, "optimizer step").high_bytes == 4 * (4 * TABLE + 40 + 8)


@pytest.mark.parametrize(
    "optimizer, of_list, of_loop",
    [("rmsprop", 1, 1), ("adagrad", 2, 1), ("nadam", 1, 2), ("radam", 1, 5), ("adamax", 1, 1)],
)
def test_the_temporaries_of_others_for_each_element(optimizer, of_list, of_loop):
    """Of all weights, or of the largest, beside what the one before left."""
    assert step_high_bytes(optimizer=optimizer, optimizer_impl="foreach") == 4 * of_list * WEIGHTS
    left = 0 if optimizer in ("adamax", "radam") else NORM
    assert step_high_bytes(optimizer=optimizer) == 4 * (of_loop * TABLE + left)


@pytest.mark.parametrize(
    "name, state, in_step",
    [("8bit", 2 * (1 + 4 / 256), 8), ("4bit", 2 * (1 / 2 + 4 / 128), 24), ("fp8", 2 * (1 + 4 / 256), 0)],
)
def test_torchao_keeps_a_scale_for_each_block_and_looks_codes_up_in_wide_copies(name, state, in_step):
    """In a step of the largest weight; the moments of small weights have their type."""
    model = replace(MODEL, d_model=512, d_head=128, vocab_size=4096, d_ff=512)
    plan = plan_of(seq_len=4, precision="bf16", optimizer=f"adamw-{name}-torchao")
    found = rank_estimate(model, plan, Rank(), gpu("h100-sxm").device)
    attention = 2 * 512 * 512 + 2 * 256 * 512
    large, n_large = 2 * (4096 * 512) + 2 * (attention + 3 * 512 * 512), 2 + 2 * 7
    maps = 0 if name == "fp8" else 2 * n_large * 4 * 2 ** int(name[0])
    steps = 4 * (n_large + N_VECTORS)
    assert found.states.optimizer_bytes == large * state + maps + steps + N_VECTORS * 512 * 2 * 2
    scales = 2 * 4 / (128 if name == "4bit" else 256)
    assert part(found.record.step, "optimizer step").high_bytes == 4096 * 512 * (in_step + scales)


@pytest.mark.parametrize(
    "plan, error",
    [
        ({"optimizer": "adafactor", "dp": 2, "zero": 3, "fsdp_version": 1}, "which is a vector"),
        ({"optimizer": "adafactor", "dp": 2, "tp": 2}, "with tp=2 has no rule yet"),
        ({"optimizer": "adafactor-transformers", "optimizer_impl": "foreach"}, "has no rule yet"),
        ({"optimizer": "rmsprop", "tp": 2}, "with tp=2 has no rule yet"),
        ({"optimizer": "nadam", "dp": 2, "zero": 3, "fsdp_version": 1}, "fsdp_version=1 has no rule yet"),
        ({"optimizer": "adagrad", "optimizer_impl": "fused"}, "impl='fused' has no rule yet"),
        ({"optimizer": "adamw-fp8-torchao", "dp": 2, "zero": 3, "precision": "bf16"}, "aten.view.dtype"),
        ({"optimizer": "adamw-8bit-torchao", "dp": 2, "zero": 1}, "with zero=1 has no rule yet"),
        ({"optimizer": "adamw-8bit-torchao", "optimizer_in_backward": True}, "has no rule yet"),
        ({"optimizer": "radam", "engine": "deepspeed", "dp": 2}, "has no rule for torch.optim.RAdam"),
    ],
)
def test_what_an_optimizer_has_no_rule_for_is_refused(plan, error):
    with pytest.raises(MemplanError, match=error):
        check_plan(MODEL, plan_of(**{"seq_len": 4, **plan}))


@pytest.mark.parametrize(
    "plan, error",
    [
        ({"dp": 2, "tp": 2, "zero": 3}, "with tp=2 and zero=3 has no rule yet"),
        ({"dp": 2, "tp": 2}, "would orthogonalize each rank's part as if it were the whole"),
        ({"dp": 2, "zero": 3, "offload": True}, "with offload=True has no rule yet"),
        ({"optimizer_impl": "fused"}, "with optimizer_impl='fused' has no rule yet"),
        ({"dp": 2, "zero": 3, "fsdp_version": 1}, "Muon only supports 2D parameters"),
        ({"engine": "textbook"}, "engine='textbook' has no rule for torch.optim.Muon"),
    ],
)
def test_what_muon_has_no_rule_for_is_refused(plan, error):
    with pytest.raises(MemplanError, match=error):
        check_plan(MODEL, plan_of(**{"seq_len": 4, "optimizer": "muon", **plan}))


def test_lists_hold_the_shards_roots_under_fsdp2_and_the_owned_parameters_under_zero_1():
    assert step_high_bytes(dp=2, zero=3, optimizer_impl="foreach") == 4 * WEIGHTS // 2
    moments_bytes = estimated(dp=2, zero=1, optimizer_impl="foreach").states.optimizer_bytes
    roots_bytes = step_high_bytes(dp=2, zero=1, optimizer_impl="foreach")
    assert 0 < moments_bytes - 2 * roots_bytes <= 4 * N_PARAMETERS


@pytest.mark.parametrize(
    "plan, reads",
    [
        ({"optimizer_impl": "for-loop"}, 3),
        ({"optimizer_impl": "foreach"}, 3),
        ({"optimizer_impl": "fused"}, 1),
        ({"optimizer": "sgd"}, 1),
        ({"optimizer": "sgd-momentum", "optimizer_impl": "foreach"}, 1),
        ({"optimizer": "sgd", "clip_grad_norm": 1.0}, 2),
        ({"optimizer_impl": "fused", "clip_grad_norm": 1.0}, 2),
    ],
)
def test_each_reading_of_a_partial_gradient_sums_it_anew(plan, reads):
    assert all_reduces("partial gradients", **SP, **plan) == {"tp": reads * 5 * NORM * 4}


def test_norms_are_summed_over_the_axes_that_divide_gradients_and_over_the_pipeline():
    def norms(**plan: Any) -> Counter[str]:
        return all_reduces("norms of gradients", clip_grad_norm=1.0, **plan)

    assert [norms(), norms(dp=2), norms(dp=2, zero=1)] == [{}, {}, {}]
    assert norms(dp=2, zero=2) == {"dp": 4 * N_PARAMETERS}
    assert norms(tp=2) == {"tp": 4 * (N_PARAMETERS - 5)}
    assert norms(**SP) == {"tp": 4 * N_PARAMETERS}
    assert norms(dp=2, zero=3, **SP) == {"dp": 4 * N_PARAMETERS, "tp": 4 * N_PARAMETERS}
    assert norms(dp=2, zero=3, tp=2) == {"dp": 4 * N_PARAMETERS, "tp": 4 * (N_PARAMETERS - 5)}
    assert norms(pp=2) == {"pp": 4}


def test_overflows_are_asked_of_the_ranks_that_may_see_others():
    def overflows(**plan: Any) -> Counter[str]:
        return all_reduces("overflows", precision="fp16-mixed", **plan)

    assert [overflows(), overflows(dp=2), overflows(dp=2, zero=1)] == [{}, {}, {}]
    assert overflows(dp=2, zero=2) == {"dp": 4}
    assert overflows(dp=2, zero=2, tp=2) == {"dp": 4, "tp": 4}
    assert overflows(dp=2, tp=2) == {"world": 4}
    assert overflows(pp=2) == {"pp": 4}
    assert overflows(pp=2, dp=2, zero=3) == {"dp": 4, "world": 4}


def test_zeroed_gradients_are_held_between_steps():
    freed, zeroed = estimated(), estimated(set_to_none=False)
    assert zeroed.rest_bytes - freed.rest_bytes == 4 * WEIGHTS
    assert zeroed.record.step.net_bytes == 0


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"dp": 2, "zero": 3, "optimizer": "adafactor"},
        "in-place operations that require placement changes are not supported",
    ),
    ({"tp": 2, "optimizer": "adafactor"}, "in-place operations that require placement changes"),
    ({"dp": 2, "zero": 2, "optimizer": "adafactor-transformers"}, "got mixed torch.Tensor and DTensor"),
    ({"dp": 2, "zero": 3, "optimizer": "sgd", "optimizer_impl": "fused"}, "aten._fused_sgd_.default"),
    ({"tp": 2, "optimizer_impl": "foreach", "set_to_none": False}, "got mixed torch.Tensor and DTensor"),
    ({"tp": 2, "precision": "fp16-mixed"}, "got mixed torch.Tensor and DTensor"),
    ({"pp": 2, "precision": "fp16-mixed", "optimizer_impl": "fused"}, "output with shape []"),
]


@pytest.mark.slow
@pytest.mark.parametrize("plan, error", REFUSED)
def test_what_is_refused_fails_in_pytorch_with_the_error_quoted(plan, error):
    settings: dict[str, Any] = {"seq_len": 4, "precision": "fp32", "optimizer": "adamw"}
    case = Case(name="refused", model=MODEL, plan=plan_of(**settings | plan))
    with pytest.raises(ValueError, match="use") as refusal:
        check_plan(case.model, case.plan)
    ended = run_case(case)
    assert ended.outcome == "crashed"
    assert error in ended.reason
    assert error in str(refusal.value)


@pytest.mark.slow
def test_fused_sgd_leaves_bfloat16_weights_as_they_are_on_cpu():
    plan = plan_of(seq_len=4, precision="bf16", optimizer="sgd", optimizer_impl="fused")
    stuck = run_case(Case(name="stuck", model=MODEL, plan=plan))
    moved = run_case(Case(name="moved", model=MODEL, plan=with_said(plan, optimizer_impl="foreach")))
    (stuck_first, *_, stuck_last), (moved_first, *_, moved_last) = (
        stuck.ranks[0].losses,
        moved.ranks[0].losses,
    )
    assert stuck_first == moved_first
    assert stuck_first - stuck_last < (moved_first - moved_last) / 2


ALONE: dict[str, Any] = {"cluster": "1xh100-sxm", "precision": "bf16", "seq_len": 512, "recompute": "full"}


def test_an_optimizer_in_the_backward_pass_holds_no_gradients_to_its_end():
    usual = memplan.estimate("llama-3.2-1b", **ALONE)
    found = memplan.estimate("llama-3.2-1b", optimizer_in_backward=True, **ALONE)
    held, before = found.worst.states, usual.worst.states
    assert held.grads_bytes == 0 < before.grads_bytes
    assert held.optimizer_bytes == before.optimizer_bytes
    assert found.reserved_bytes is not None
    assert usual.reserved_bytes is not None
    assert usual.reserved_bytes - found.reserved_bytes > before.grads_bytes / 2


@pytest.mark.parametrize(
    "options, said",
    [
        ({"global_batch": 4}, "with 4 micro-batches: .*; use global_batch=1"),
        ({"clip_grad_norm": 1.0}, "with clip_grad_norm=1.0: .*; use no clipping"),
        ({"precision": "fp16-mixed"}, "with precision='fp16-mixed': .*; use precision='bf16-mixed'"),
        ({"set_to_none": False}, "with set_to_none=False: .*; use set_to_none=True"),
        ({"optimizer": "muon"}, "with optimizer='muon' has no rule yet; use adamw, or"),
        ({"cluster": "2xh100-sxm"}, "with dp=2, zero=0 has no rule yet; use zero=2 or 3, or"),
        ({"cluster": "4xh100-sxm", "zero": 3, "dp_replicate": 2}, "with dp_replicate=2 has no rule yet"),
    ],
)
def test_an_optimizer_in_the_backward_pass_is_refused_with_a_way_out(options, said):
    with pytest.raises(MemplanError, match=f"optimizer_in_backward=True {said}"):
        memplan.estimate("llama-3.2-1b", optimizer_in_backward=True, **{**ALONE, **options})


def test_an_optimizer_in_the_backward_pass_is_advised_on_one_gpu():
    advice = memplan.advise(memplan.estimate("llama-3.2-3b", **{**ALONE, "cluster": "1xrtx-4090"}))
    assert "optimizer_in_backward" in [change.text for change in advice.changes]


OFFLOADS: dict[str, Any] = {**ALONE, "optimizer": "adamw-offload-torchao"}


def test_torchaos_optimizer_on_the_host_leaves_the_state_of_small_weights_on_the_gpu():
    """The host has a copy of each weight and gradient, which are page-locked, and two moments."""
    found = memplan.estimate("llama-3.2-1b", **OFFLOADS)
    usual = memplan.estimate("llama-3.2-1b", **ALONE)
    norms = 33 * 2048
    n_large = usual.worst.states.weights_bytes // 2 - norms
    assert found.worst.states.weights_bytes == usual.worst.states.weights_bytes
    assert found.worst.states.grads_bytes == usual.worst.states.grads_bytes
    assert found.peak.optimizer_bytes == 2 * 2 * norms + 33 * 4
    n_offloaded = 1 + 7 * 16
    assert (
        found.worst.states.optimizer_bytes == found.peak.optimizer_bytes + n_large * 2 * 3 + n_offloaded * 4
    )
    assert found.host.grads_bytes == n_large * 2
    assert found.worst.host_pinned_bytes >= 2 * n_large * 2
    assert found.step_s is None
    assert found.time_missing == ("no rate is known of the host, which updates offloaded states",)


def test_gradients_that_torchaos_optimizer_offloads_do_not_add_up():
    held, freed = (
        memplan.estimate("llama-3.2-1b", **OFFLOADS, offload_gradients=one) for one in (False, True)
    )
    assert freed.worst.states.grads_bytes == 33 * 2048 * 2
    assert freed.host == held.host
    assert held.reserved_bytes is not None
    assert freed.reserved_bytes is not None
    assert held.reserved_bytes - freed.reserved_bytes > held.worst.states.grads_bytes / 3
    copies = {one.what: one.payload_bytes for one in freed.collectives if one.kind == "copy"}
    assert len(set(copies.values())) == 1
    assert set(copies) == {"gradients to the host", "updated weights from the host"}


def test_a_dtensor_that_torchaos_optimizer_offloads_counts_whole():
    """Each rank has 512 elements of a norm of Llama-3-8B, which has 4,096."""
    sharded = {"cluster": "8xh100-sxm", "zero": 3}
    assert memplan.estimate("llama-3-8b", **OFFLOADS | sharded).peak.optimizer_bytes == 0


@pytest.mark.parametrize(
    "options, said",
    [
        ({"cluster": "2xh100-sxm"}, "before DDP averages them, .* use zero=3, or dp=1"),
        ({"cluster": "2xh100-sxm", "zero": 1}, "before DDP averages them"),
        ({"clip_grad_norm": 1.0}, "before they are clipped; leave clip_grad_norm out"),
        ({"set_to_none": False}, "use set_to_none=True"),
        ({"offload_gradients": True, "global_batch": 2}, "use offload_gradients=False, or global_batch=1"),
        ({"offload_gradients": True, "cluster": "2xh100-sxm", "zero": 3}, "aten.record_stream"),
        ({"offload_gradients": True, "optimizer": "adamw"}, "use optimizer='adamw-offload-torchao'"),
        ({"precision": "fp16-mixed"}, "has no rule yet"),
        ({"optimizer_impl": "foreach"}, "has no rule yet"),
        ({"optimizer_in_backward": True}, "has no rule yet"),
        ({"cluster": "2xh100-sxm", "zero": 3, "offload": True}, "has no rule yet"),
        ({"model": "llama-3-8b", "cluster": "2xh100-sxm", "pp": 2}, "with pp=2 has no rule yet"),
        ({"engine": "deepspeed"}, "has no rule for torchao"),
    ],
)
def test_what_fails_beside_torchaos_optimizer_on_the_host_is_refused_with_a_way_out(options, said):
    with pytest.raises(MemplanError, match=said):
        memplan.estimate(**{"model": "llama-3.2-1b", **OFFLOADS, **options})


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("name", KEPT)
def test_the_bytes_of_states_in_closed_form_are_the_states(name, on_host):
    for shape in ((7,), (64, 96), (2048, 4096)):
        weight = Weight("w", shape, BF16)
        states = states_of(KEPT[name], weight, on_host=on_host)
        assert state_bytes(KEPT[name], weight, on_host=on_host) == sum(one.n_bytes for one in states)
