"""Products in float8 by torchao's linears: planned without a GPU, and refused beside what has no rule."""

from importlib.util import find_spec
from typing import Any

import pytest

import memplan
from memplan import MissingRule, PlanRefused
from memplan.hardware import gpu
from memplan.models import implemented
from memplan.models.llama import Llama
from memplan.record import ComputeKind
from memplan.time.operations import operations_of

pytestmark = pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")

TINY: dict[str, Any] = {
    "name": "tiny", "d_model": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "d_ff": 96,
    "vocab_size": 128, "max_seq_len": 256,
}  # fmt: skip
ALONE: dict[str, Any] = {"float8": "tensorwise", "precision": "bf16", "seq_len": 256}


def tiny(implementation):
    return implemented(Llama(**TINY), implementation)


@pytest.mark.parametrize("code", ["torchtitan", "huggingface"])
def test_states_stay_as_they_are_and_eager_code_saves_in_bfloat16(code):
    with_, without = (
        memplan.estimate(tiny(code), **{**ALONE, "float8": float8}) for float8 in ("tensorwise", "none")
    )
    assert with_.worst.states == without.worst.states
    assert with_.peak.activations_bytes >= without.peak.activations_bytes


def test_compiled_blocks_in_float8_hold_less_than_eager_ones():
    compiled, eager = (
        memplan.estimate(tiny("torchtitan"), **ALONE, compile=how) for how in ("block", "none")
    )
    assert compiled.peak.total_bytes < eager.peak.total_bytes


def test_a_product_in_float8_takes_less_time_than_one_in_bfloat16():
    operations = operations_of(gpu("h100-sxm"), "bf16", False, False)
    sizes = 8192, 14336, 4096
    seconds = [operations._product_s(*sizes, kind) for kind in (ComputeKind.SCALED_MM, ComputeKind.MM)]
    assert 0.4 < seconds[0] / seconds[1] < 0.8


SHARDED: dict[str, Any] = {**ALONE, "dp": 4, "zero": 3}


def sent(e, kind):
    return [(one.calls, one.payload_bytes) for one in e.collectives if one.kind == kind]


def test_an_all_gather_in_float8_sends_a_byte_for_each_weight_of_a_linear_and_scales():
    """Each block is gathered twice, the rest once in two bytes; seven weights and two norms in each block."""
    model = tiny("torchtitan")
    e, plain = (memplan.estimate(model, **SHARDED, float8_all_gather=how) for how in ("dynamic", "none"))
    linears = 64 * 64 * 2 + 64 * 32 * 2 + 64 * 96 * 3
    others, ends = 2 * 64 * 2, (2 * 128 * 64 + 64) * 2
    assert sent(e, "all_gather") == [(5, 2 * 2 * (linears + others) + ends)]
    assert sent(plain, "all_gather") == [(5, 2 * 2 * (2 * linears + others) + ends)]
    assert sent(e, "all_reduce") == [(2 * 2 * 7, 2 * 2 * 7 * 2)]
    assert sent(e, "reduce_scatter") == sent(plain, "reduce_scatter")
    assert e.worst.states == plain.worst.states


def test_precomputed_scales_are_reduced_once():
    e = memplan.estimate(tiny("torchtitan"), **SHARDED, float8_all_gather="precomputed")
    assert sent(e, "all_reduce") == [(1, 2 * 7 * 2)]


DIVIDED: dict[str, Any] = {**SHARDED, "dp": 2, "tp": 2, "sequence_parallel": True}


def wide():
    return implemented(Llama(**{**TINY, "d_model": 128, "d_ff": 320, "vocab_size": 512}), "torchtitan")


def sent_over(axis, e, kind):
    found = [one for one in e.collectives if (one.kind, one.axis) == (kind, axis)]
    return sum(one.calls for one in found), sum(one.payload_bytes for one in found)


def test_tensor_ranks_gather_inputs_and_gradients_of_blocks_in_a_byte_and_fsdp2_their_parts_of_weights():
    """Two blocks gather twice in each pass; the head's input and the embedding's gradient are not cast."""
    e = memplan.estimate(wide(), **DIVIDED, float8_all_gather="dynamic")
    activations = 256 * 128
    assert sent_over("tp", e, "all_gather") == (10, 2 * (4 * activations + 2 * activations))
    linears = (128 * 128 * 2 + 128 * 64 * 2 + 128 * 320 * 3) // 2
    others, ends = 2 * 128 * 2, (2 * 512 * 128 // 2 + 128) * 2
    assert sent_over("dp", e, "all_gather") == (5, 2 * 2 * (linears + others) + ends)
    assert sent_over("dp", e, "all_reduce") == (2 * 2 * 7, 2 * 2 * 7 * 2)
    assert e.worst.states == memplan.estimate(wide(), **{**DIVIDED, "float8": "none"}).worst.states


def test_precomputed_scales_are_of_whole_weights_over_tensor_ranks_too():
    """The largest numbers are reduced over both axes, where dynamic scales are of a tensor rank's part."""
    dynamic, precomputed = (
        memplan.estimate(wide(), **DIVIDED, float8_all_gather=how) for how in ("dynamic", "precomputed")
    )
    (before, n_before), (after, n_after) = (sent_over("tp", e, "all_reduce") for e in (dynamic, precomputed))
    assert (after - before, n_after - n_before) == (1, 2 * 7 * 2)
    assert sent_over("dp", precomputed, "all_reduce") == (1, 2 * 7 * 2)


def test_parts_of_linears_that_products_in_float8_do_not_take_are_refused():
    with pytest.raises(PlanRefused, match=r"d_ff=96 divided by tp=4 is no multiple of 16, .* another tp"):
        memplan.estimate(tiny("torchtitan"), **ALONE, tp=4)


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"tp": 2, "implementation": "huggingface"},
        MissingRule,
        "float8='tensorwise' with tp=2 of .* has no rule yet; use tp=1, implementation='torchtitan', or",
    ),
    (
        {"tp": 2, "precision": "bf16-mixed"},
        MissingRule,
        r"with tp=2 under autocast \(zero=0\) has no rule yet; use precision='bf16', or zero=2 or 3",
    ),
    ({"pp": 2, "tp": 2}, MissingRule, "float8='tensorwise' with pp=2 has no rule yet; use pp=1"),
    ({"dp": 2}, MissingRule, "float8='tensorwise' with zero=0, dp=2 has no rule yet; use zero=2 or 3"),
    ({"precision": "fp32"}, MissingRule, "precision='fp32' has no rule yet; use precision='bf16-mixed'"),
    ({"float8": "rowwise"}, MissingRule, "use compile='block', or float8='tensorwise'"),
    ({"seq_len": 250}, PlanRefused, "250 tokens are no multiple of 16, .*; use seq_len=256"),
    ({"cluster": "1xa100-80-sxm"}, PlanRefused, "compute capability 8.9 or more"),
    (
        {"cluster": "1xl40s", "float8": "rowwise", "compile": "block"},
        MissingRule,
        "before compute capability 9.0",
    ),
    ({"device": "cpu"}, PlanRefused, "such a GPU, or float8='none'"),
    (
        {"float8_all_gather": "dynamic", "dp": 8, "zero": 3, "float8": "rowwise", "compile": "block"},
        PlanRefused,
        "torchao gathers weights in float8 with one scale for each; use float8='tensorwise'",
    ),
    ({"float8_all_gather": "dynamic"}, MissingRule, "with zero=0, dp=1 has no rule yet; use zero=2 or 3"),
    (
        {"float8_all_gather": "precomputed", "dp": 8, "zero": 3, "offload": True},
        MissingRule,
        "float8_all_gather='precomputed' with offload=True has no rule yet",
    ),
    (
        {"float8_all_gather": "dynamic", "dp": 3, "zero": 3},
        PlanRefused,
        "2048 rows of .* do not divide by 3 ranks",
    ),
    ({"implementation": "reference"}, MissingRule, "no module of .*; use implementation='huggingface', or"),
]


@pytest.mark.parametrize("asked, error, text", REFUSED, ids=[text for *_, text in REFUSED])
def test_what_has_no_rule_beside_float8_is_refused(asked, error, text):
    with pytest.raises(error, match=text):
        memplan.estimate("llama-3.2-1b", **{**ALONE, **asked})


def test_files_name_no_float8():
    with pytest.raises(PlanRefused, match="float8='tensorwise': linears are converted by the code"):
        memplan.estimate(tiny("torchtitan"), **ALONE).export("torchrun")
