"""Blocks under `torch.compile`: planned without a GPU or Triton, and refused beside what has no rule."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch._dynamo.trace_rules import get_torch_obj_rule_map
from torch.distributed._functional_collectives import AsyncCollectiveTensor

import memplan
from memplan import MissingRule, PlanRefused
from memplan.models import implemented
from memplan.models.llama import Llama
from memplan.models.recording import Compiles
from memplan.tracing import cache
from memplan.tracing.compiled import waited
from validate.adapted import COMPILED, path_of
from validate.cases import packed_trace

TRACED = cache._traced
"""What traces, before a fixture has it look on file."""

TINY: dict[str, Any] = {
    "name": "tiny", "d_model": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "d_ff": 96,
    "vocab_size": 128, "max_seq_len": 256,
}  # fmt: skip
ALONE: dict[str, Any] = {"compile": "block", "precision": "bf16", "seq_len": 256}


def tiny(implementation):
    return implemented(Llama(**TINY), implementation)


def names(e):
    return {row["name"].rpartition("*")[2] for row in e.ledger().to_dict("records")}


@pytest.mark.parametrize("code", ["torchtitan", "huggingface"])
def test_kernels_that_inductor_fuses_keep_less(code):
    """The results of a block's products are kept; what is computed element by element is fused."""
    compiled, eager = (memplan.estimate(tiny(code), **{**ALONE, "compile": how}) for how in ("block", "none"))
    assert compiled.peak.activations_bytes < 0.8 * eager.peak.activations_bytes
    assert compiled.worst.states == eager.worst.states
    kernels = {name for name in names(compiled) if name.startswith(": triton")}
    assert any("silu" in kernel for kernel in kernels)
    assert ": mm" in names(compiled)


def test_blocks_are_compiled_whatever_dynamo_knows_already():
    """Dynamo's table of PyTorch's functions is made of the true ones, if nothing has asked for it yet."""
    get_torch_obj_rule_map.cache_clear()
    memplan.estimate(tiny("torchtitan"), **ALONE, micro_batch=3)


def test_recomputation_is_the_partitioner_s():
    """Of a block that is recomputed in full its input is kept: 256 tokens of 64 elements."""
    kept = {
        how: memplan.estimate(tiny("torchtitan"), **ALONE, recompute=how).peak.activations_bytes
        for how in ("none", "selective", "full")
    }
    assert kept["full"] < kept["selective"] < kept["none"]


HOW = ("block", "none")


def calls(e):
    """How often each collective is called over tensor-parallel ranks, and with how many bytes."""
    found = Counter[str]()
    for one in e.collectives:
        found[one.kind] += one.calls
        found[f"{one.kind} bytes"] += one.payload_bytes
    return found


@pytest.mark.parametrize("divided", [True, False])
def test_compiled_blocks_over_tensor_parallel_ranks_send_what_eager_ones_do(divided):
    """The same collectives: Inductor only fuses what is between them, and sums in place."""
    asked = {**ALONE, "tp": 2, "sequence_parallel": divided}
    compiled, eager = (memplan.estimate(tiny("torchtitan"), **asked | {"compile": how}) for how in HOW)
    assert calls(compiled) == calls(eager)
    assert compiled.worst.states == eager.worst.states
    assert compiled.peak.activations_bytes < 0.8 * eager.peak.activations_bytes
    assert any("191113" in note for note in compiled.notes)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_compiled_block_trains_what_a_collective_is_still_filling():
    """PyTorch 2.13 loses this gradient where nothing has waited before; with it the note above would go."""
    x = torch.ones(2, requires_grad=True)
    run = torch.compile(lambda one: 2 * one, backend="aot_eager")
    assert not run(_Filling.apply(x)).requires_grad
    run(*waited((_Filling.apply(x),))).sum().backward()
    assert x.grad.tolist() == [2, 2]


class _Filling(torch.autograd.Function):
    """Makes a tensor that a collective is still filling, as DTensor.to_local does."""

    @staticmethod
    def forward(ctx, x):
        return AsyncCollectiveTensor(x.detach())

    @staticmethod
    def backward(ctx, grad):
        return grad


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"precision": "bf16-mixed"}, MissingRule, "under autocast .* has no rule yet; use precision='bf16'"),
    (
        {"tp": 2, "implementation": "huggingface"},
        MissingRule,
        "with tp=2 of .* has no rule yet; use tp=1, implementation='torchtitan', or",
    ),
    ({"pp": 2}, MissingRule, "compile='block' with pp=2 has no rule yet; use pp=1"),
    ({"dp": 2}, MissingRule, "compile='block' with zero=0, dp=2: the order .* has no rule yet; use zero=2"),
    ({"dp": 2, "zero": 3, "fsdp_version": 1}, MissingRule, "with fsdp_version=1 has no rule yet; use fsdp_v"),
    ({"loss_chunks": 2}, MissingRule, "loss_chunks=2: .*; use loss_chunks=1"),
    ({"implementation": "reference"}, MissingRule, "no module of .*; use implementation='huggingface', or"),
]


@pytest.mark.parametrize("asked, error, text", REFUSED, ids=[text for *_, text in REFUSED])
def test_what_has_no_rule_beside_compiled_blocks_is_refused(asked, error, text):
    with pytest.raises(error, match=text):
        memplan.estimate("llama-3.2-1b", **{**ALONE, **asked})


def test_compiled_blocks_are_no_file_s_to_name():
    with pytest.raises(PlanRefused, match="compile='block': what memplan exports runs blocks as they are"):
        memplan.estimate(tiny("torchtitan"), **ALONE).export("torchrun")


def test_a_trace_on_file_is_what_is_traced_today():
    (path, *_) = sorted(COMPILED.glob("llama-3.2-3b*.xz"))
    kept = packed_trace(path)
    asked = [
        cache.Request(kept.config, kept.name, kept.device, ("bf16",), (), Compiles(batch, length, (again,)))
        for batch, length in ((1, 4096), (2, 2048), (1, 2048))
        for again in ("none", "full", "selective")
    ]
    (found,) = [one for one in asked if path_of(one) == path]
    assert TRACED(found).digest == kept.digest
