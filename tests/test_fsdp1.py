"""FSDP1: flat parameters, laws, refusals, and Accelerate's configuration of it; all else is replayed."""

import re
from itertools import product
from typing import Any

import pytest

import memplan
from memplan import launchers
from memplan.device import H100
from memplan.engines.options import plan_of
from memplan.engines.torch.flat_parameter import FlatUnits
from memplan.engines.torch.stage import Stage
from memplan.errors import MemplanError, PlanRefused
from memplan.models import Layers
from memplan.models.lookup import resolve
from memplan.testing import check_laws
from validate.suites.models import GPT

USUAL: dict[str, Any] = {"dp": 4, "zero": 3, "fsdp_version": 1, "seq_len": 32}


def units(rank: int = 0, **options: Any) -> FlatUnits:
    plan = plan_of(**USUAL | options)
    stage = Stage(GPT, plan, (True, True, (Layers("blocks", GPT.n_layers),)), H100)
    return FlatUnits(stage, rank)


@pytest.mark.parametrize("precision,itemsize", [("fp32", 4), ("bf16-mixed", 2)])
def test_original_parameters_start_at_multiples_of_16_bytes_and_end_at_a_multiple_of_the_ranks(
    precision, itemsize
):
    for unit, _ in units(dp=3, use_orig_params=True, precision=precision):
        assert unit.n_elements % 3 == 0
        assert all(pad * itemsize < 16 for pad in unit.pads[:-1])
        weights = sum(p.n_elements * n for part, n in unit.parts for p in part)
        assert unit.n_elements == weights + sum(unit.pads)


def test_flat_parameters_are_padded_in_the_last_shards_only():
    for unit, _ in units(dp=3):
        assert not unit.pads
        assert unit.shard_elements == -(-unit.n_elements // 3)
        assert [parameter.n_elements for parameter in unit.updated] == [unit.shard_elements]


@pytest.mark.parametrize("options", [{}, {"fsdp_units": "model"}, {"precision": "fp32", "dp": 3}])
def test_the_slices_of_all_ranks_are_the_weights(options):
    n_ranks = options.get("dp", 4)
    ranks = [list(units(rank, use_orig_params=True, **options)) for rank in range(n_ranks)]
    for found in zip(*ranks, strict=True):
        whole, _ = found[0]
        weights = sum(p.n_elements * n for part, n in whole.parts for p in part)
        assert sum(one.n_elements for unit, _ in found for one in unit.slices) == weights


LAWFUL: list[dict[str, Any]] = [
    {},
    {"use_orig_params": True, "forward_prefetch": True},
    {"zero": 2, "no_sync": True, "global_batch": 16, "backward_prefetch": "post"},
    {"dp_replicate": 2, "precision": "fp32", "recompute": "full"},
    {"offload": True, "backward_prefetch": "none", "fsdp_units": "model"},
    {"clip_grad_norm": 1.0, "precision": "fp16-mixed", "set_to_none": False, "global_batch": 16},
]


@pytest.mark.parametrize("options", LAWFUL, ids=str)
def test_laws_hold_under_fsdp1(options):
    n_gpus = 4 * options.get("dp_replicate", 1)
    check_laws(memplan.estimate(GPT, cluster=f"{n_gpus}xh100-sxm", **USUAL | options))


def test_a_search_over_fsdp1_finds_what_estimating_every_plan_finds():
    space: dict[str, Any] = {"zero": [2, 3], "recompute": ["none", "full"], "micro_batch": [1, 2, 4]}
    fixed: dict[str, Any] = {"cluster": "8xh100-sxm", "global_batch": 32, "seq_len": 32, "fsdp_version": 1}
    fixed |= {"tp": 1, "pp": 1, "dp_replicate": 1, "offload": False}
    found = memplan.search(GPT, **fixed, **space, keep=None)
    assert len(found) == 12
    plans = [dict(zip(space, values, strict=True)) for values in product(*space.values())]
    steps = [memplan.estimate(GPT, **fixed, **plan).step_s for plan in plans]
    assert sorted(found["step_s"]) == sorted(step for step in steps if step is not None)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tp": 2}, "fsdp_version=1 with tp=2"),
    ({"pp": 2}, "fsdp_version=1 with pp=2"),
    ({"fsdp_units": "block+ends"}, "fsdp_version=1 with fsdp_units='block+ends'"),
    ({"fsdp_blocks": 2}, "fsdp_version=1 with fsdp_blocks=2"),
    ({"torch_version": "2.12"}, "fsdp_version=1 with torch_version='2.12'"),
    ({"offload": True, "clip_grad_norm": 1.0}, "fsdp_version=1 with clip_grad_norm"),
    ({"offload": True, "global_batch": 8}, "offload=True with 2 micro-batches"),
    ({"zero": 0}, "fsdp_version=1 is of FullyShardedDataParallel"),
    ({"fsdp_version": 2, "backward_prefetch": "post"}, "backward_prefetch='post' is of"),
]  # fmt: skip


@pytest.mark.parametrize("options,said", REFUSED, ids=[said for _, said in REFUSED])
def test_what_fsdp1_is_not_modelled_with_is_refused_with_a_way_out(options, said):
    with pytest.raises(MemplanError, match=rf"^{re.escape(said)}.*; (use|leave)"):
        memplan.estimate(GPT, **USUAL | options)


def test_fsdp1_as_an_engine_says_how_a_plan_says_it():
    with pytest.raises(MemplanError, match=r"engine='fsdp1' is a wrapper.*use fsdp_version=1 and zero=2"):
        memplan.estimate("gpt2", engine="fsdp1")


def test_an_export_says_that_it_is_of_fsdp2_and_names_the_nearest():
    estimated = memplan.estimate("gpt2", cluster="8xh100-sxm", **USUAL | {"dp": 8, "no_sync": True})
    with pytest.raises(PlanRefused, match=r"fsdp_version=1: .* leave fsdp_version out"):
        estimated.export("torchrun")


ACCELERATE = """
distributed_type: FSDP
mixed_precision: bf16
num_processes: 8
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: {prefetch}
  fsdp_sharding_strategy: {strategy}
  fsdp_use_orig_params: {orig}
  fsdp_offload_params: false
"""


@pytest.mark.parametrize(
    "strategy,zero", [("FULL_SHARD", 3), ("1", 3), ("SHARD_GRAD_OP", 2), ("2", 2), ("HYBRID_SHARD_ZERO2", 2)]
)
def test_accelerates_configuration_of_fsdp1_is_read(tmp_path, strategy, zero):
    file = tmp_path / "accelerate.yaml"
    file.write_text(ACCELERATE.format(strategy=strategy, prefetch="BACKWARD_POST", orig="true"))
    found = launchers.read(file, "accelerate", resolve("llama-3-8b")).keywords
    told = {"fsdp_version": 1, "zero": zero, "no_sync": True, "backward_prefetch": "post", "dp": 8}
    assert told.items() <= found.items()
    assert found["use_orig_params"] is True
    memplan.estimate("llama-3-8b", **found | {"implementation": "huggingface", "seq_len": 128})


def test_a_hybrid_strategy_of_accelerate_shards_within_each_machine(tmp_path):
    file = tmp_path / "accelerate.yaml"
    text = ACCELERATE.format(strategy="HYBRID_SHARD", prefetch="BACKWARD_PRE", orig="true")
    file.write_text(text.replace("num_processes: 8", "num_processes: 16\nnum_machines: 2"))
    found = launchers.read(file, "accelerate", resolve("llama-3-8b")).keywords
    assert (found["dp"], found["dp_replicate"], found["zero"]) == (8, 2, 3)
    file.write_text(text.replace("num_processes: 8", "num_processes: 7\nnum_machines: 2"))
    with pytest.raises(MemplanError, match=r"num_processes=7 is no multiple of num_machines=2; make it one"):
        launchers.read(file, "accelerate", resolve("llama-3-8b"))


@pytest.mark.parametrize("strategy,prefetch", [("NO_SHARD", "BACKWARD_PRE"), ("FULL_SHARD", "SOMETIMES")])
def test_what_accelerate_says_of_fsdp1_and_is_not_planned_is_named(tmp_path, strategy, prefetch):
    file = tmp_path / "accelerate.yaml"
    file.write_text(ACCELERATE.format(strategy=strategy, prefetch=prefetch, orig="false"))
    with pytest.raises(MemplanError, match=f"={'.?' + (strategy if strategy[0] == 'N' else prefetch)}"):
        launchers.read(file, "accelerate", resolve("llama-3-8b"))
