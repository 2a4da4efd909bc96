"""What FSDP2 makes of gradients: float32 sums of a split backward pass, and padded copies to reduce."""

from dataclasses import replace

import pytest
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_init import _get_managed_modules, _get_managed_states

from memplan.device import CPU, CPU_OF_SHAPES, H100
from memplan.engines.options import with_said
from memplan.engines.torch.param_group import found_order
from memplan.errors import MemplanError
from memplan.estimate import estimate, rank_estimate
from memplan.models.llama import Llama
from memplan.plan import Plan
from memplan.record import unrolled
from memplan.shapes import FP32, Parameter

SUM = " (float32 sum)"
MODEL = Llama(
    name="five", n_layers=5, d_model=16, n_heads=2, d_ff=48, vocab_size=32, max_seq_len=8, tied_head=False
)


def sums(recompute):
    """The stretch and the gradient of each float32 sum of the first rank, which has the last stage."""
    plan = Plan(
        pp=2, dp=2, zero=2, schedule="zbv", virtual_stages=2, precision="bf16-mixed", global_batch=8,
        micro_batch=1, seq_len=8, recompute=recompute,
    )  # fmt: skip
    step = rank_estimate(MODEL, plan, plan.place(0), CPU).record.step
    made = [(name, event.buffer.name) for name, event in unrolled(step) if event.sign > 0]
    return [(name, made.removesuffix(SUM)) for name, made in made if made.endswith(SUM)]


class Embeddings(nn.Module):
    """A module with a parameter and children that have parameters, as CLIP's embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.class_embedding = nn.Parameter(nn.init.zeros_(nn.Linear(2, 2).weight))
        self.patches = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
        self.position = nn.Embedding(2, 2)


def test_weights_are_gathered_in_the_order_in_which_fully_shard_finds_them():
    module = nn.Sequential(Embeddings(), nn.Linear(2, 2))
    names = {parameter: name for name, parameter in module.named_parameters()}
    found, _ = _get_managed_states(_get_managed_modules((module,)))
    own = tuple([Parameter(name, (2, 2), FP32) for name in names.values()])
    assert [p.name for p in found_order(own)] == [names[parameter] for parameter in found]
    assert next(iter(names.values())) == "0.class_embedding" == found_order(own)[-3].name


def test_sums_of_blocks_that_the_second_part_ran_again_come_after_the_roots():
    in_turn = [grad for name, grad in sums("full") if name == "backward: inputs of the blocks"]
    at_end = [grad for name, grad in sums("full") if name == "backward: end"]
    assert in_turn == []
    assert at_end[:2] == ["head.norm.weight.grad", "head.output.weight.grad"]
    assert at_end[2].startswith("blocks.")


def test_sums_of_blocks_that_keep_their_activations_come_in_their_turn():
    in_turn = [grad for name, grad in sums("none") if name == "backward: inputs of the blocks"]
    at_end = [grad for name, grad in sums("none") if name == "backward: end"]
    assert in_turn
    assert not [grad for grad in at_end if grad.startswith("blocks.")]


@pytest.mark.parametrize(
    "device, precision, padded",
    [
        (CPU, "bf16", True),
        (CPU_OF_SHAPES, "bf16", False),
        *[(H100, precision, False) for precision in ("fp32", "bf16", "bf16-mixed")],
        (H100, "fp16-mixed", True),
    ],
)
def test_cuda_pads_gradients_as_it_copies_them_but_for_float16(device, precision, padded):
    plan = Plan(dp=3, zero=3, precision=precision, seq_len=8)
    step = rank_estimate(MODEL, plan, plan.place(0), device).record.step
    assert any(event.buffer.name.endswith("(padded)") for _, event in unrolled(step)) == padded


@pytest.mark.parametrize(
    "pp_rank, micro_batches, itemsize",
    [
        (0, 1, 4),  # a first stage's backward pass is whole, and adds to float32 sums
        (1, 1, 2),  # the second part leaves gradients as they came: 2 bytes in a run of 8 CPU ranks too
        (1, 2, 2),  # its two second parts follow one another
        (1, 4, 4),  # a later first part has added them to float32 sums
    ],
)
def test_partial_gradients_are_summed_over_tensor_ranks_in_the_type_they_have_then(
    pp_rank, micro_batches, itemsize
):
    plan = Plan(
        pp=2, dp=2, tp=2, zero=2, schedule="zero-bubble", sequence_parallel=True, precision="bf16-mixed",
        global_batch=2 * micro_batches, micro_batch=1, seq_len=8,
    )  # fmt: skip
    found = rank_estimate(MODEL, plan, replace(plan.place(0), pp=pp_rank), CPU).collectives
    (partial,) = [c for c in found if c.what == "partial gradients"]
    assert partial.payload_bytes == partial.calls * MODEL.d_model * itemsize


def test_no_sync_holds_whole_gradients_up_to_the_last_micro_batch():
    """Each in the type in which it is reduced: what the ranks' gradients are beside their parts."""
    plan = Plan(dp=2, zero=3, precision="bf16-mixed", global_batch=6, micro_batch=1, seq_len=8)
    sent = {}
    for no_sync in (False, True):
        found = rank_estimate(MODEL, with_said(plan, no_sync=no_sync), plan.place(0), H100).record
        counts = found.step.counts.items()
        sent[no_sync] = sum(n for one, n in counts if getattr(one, "kind", "") == "reduce_scatter")
        made = [event.buffer for _, event in unrolled(found.step) if event.sign > 0]
        sums = {buffer.name: buffer.n_bytes for buffer in made if buffer.name.endswith(SUM)}
        assert bool(sums) == no_sync
    assert sent[False] == 3 * sent[True] > 0


@pytest.mark.parametrize(
    "plan, said",
    [
        ({"zero": 0}, "no_sync=True is an option of FSDP"),
        ({"pp": 2}, "no_sync=True with pp=2: a schedule sums whole gradients anyway"),
        ({"torch_version": "2.15"}, "no_sync=True with torch_version='2.15' has no rule yet"),
    ],
)
def test_no_sync_is_refused_where_it_says_nothing(plan, said):
    with pytest.raises(MemplanError, match=said):
        estimate(MODEL, **{"dp": 2, "zero": 3, "no_sync": True, "seq_len": 8, **plan})
