"""`--to torchtitan`: its own parser takes the flags; they and the TOML of earlier releases are read back."""

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from memplan import MemplanError, PlanRefused, estimate
from memplan.launchers import exported, read
from memplan.launchers.torchtitan import stages_of_layers

RECORDED = json.loads(Path(__file__).with_name("torchtitan-0.3.0.json").read_text())
"""The flags of torchtitan 0.3.0 and their kinds, made from its dataclasses."""

SHARDED: dict[str, Any] = {
    "implementation": "torchtitan",
    "fsdp_units": "block+ends",
    "clip_grad_norm": 1.0,
    "zero": 3,
}
PLANS: dict[str, dict[str, Any]] = {
    "shards": {"cluster": "8xh100-sxm"},
    "hsdp": {"cluster": "16xh100-sxm", "dp_replicate": 2, "recompute": "full", "offload": True},
    "accumulation": {"cluster": "8xh100-sxm", "zero": 2, "global_batch": 32, "micro_batch": 2},
    "fp32": {"cluster": "8xh100-sxm", "precision": "fp32"},
    "tensors": {"cluster": "16xh100-sxm", "tp": 4, "sequence_parallel": True, "optimizer_impl": "fused"},
    "tensors, whole sequences": {"cluster": "16xh100-sxm", "tp": 2, "recompute": "selective"},
    "pipeline": {"cluster": "16xh100-sxm", "pp": 4, "zero": 2, "global_batch": 32},
    "interleaved": {
        "cluster": "64xh100-sxm", "pp": 4, "zero": 2, "global_batch": 64, "virtual_stages": 4,
        "schedule": "interleaved-1f1b",
    },
    "uneven": {"cluster": "16xh100-sxm", "pp": 4, "global_batch": 32, "layers_per_stage": (8, 9, 8, 7)},
    "zbv": {
        "cluster": "16xh100-sxm", "pp": 2, "zero": 2, "global_batch": 64, "virtual_stages": 2,
        "schedule": "zbv",
    },
}  # fmt: skip
"""Plans of llama-3-8b, beside `SHARDED`."""


def planned(name):
    return estimate("llama-3-8b", **{**SHARDED, **PLANS[name]})


def flags_of(text):
    """The words of the command after the program."""
    words = shlex.split(text.replace("\\\n", " "), comments=True)
    return words[words.index("torchtitan.train") + 1 :]


@pytest.mark.parametrize("name", PLANS)
def test_every_flag_is_one_of_torchtitan_with_a_value_of_its_kind(name):
    *flags, subcommand = flags_of(planned(name).export("torchtitan"))
    assert subcommand in RECORDED["subcommands"]
    assert flags[:4] == ["--module", "llama3", "--config", "llama3_8b"]
    at = iter(flags[4:])
    for flag in at:
        kind = RECORDED["flags"][flag.removeprefix("--").replace(".no-", ".")]
        if kind == "bool":
            continue
        value = next(at)
        if isinstance(kind, list):
            assert value in kind
        elif "int" in kind or "float" in kind:
            assert float(value) >= 0


@pytest.mark.parametrize("name", PLANS)
def test_torchtitans_own_parser_takes_the_flags(name, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["torchtitan"])
    config = pytest.importorskip("torchtitan.config", exc_type=ImportError)
    pytest.importorskip("torchtitan.models.llama3.config_registry", exc_type=ImportError)
    plan = planned(name).plan
    found = config.ConfigManager().parse_args(flags_of(planned(name).export("torchtitan")))
    assert found.training.global_batch_size == plan.global_batch
    assert found.parallelism.data_parallel_shard_degree == plan.dp
    assert found.parallelism.data_parallel_replicate_degree == plan.dp_replicate
    assert found.parallelism.tensor_parallel_degree == plan.tp
    assert found.parallelism.enable_sequence_parallel == plan.sequence_parallel
    assert found.parallelism.pipeline_parallel_degree == plan.pp
    assert found.training.enable_cpu_offload == plan.offload
    checkpointing = type(found.activation_checkpoint).__qualname__
    assert (
        checkpointing
        == {"none": "NoneType", "full": "FullAC.Config", "selective": "SelectiveAC.Config"}[plan.recompute]
    )


@pytest.mark.parametrize("name", PLANS)
def test_a_command_is_read_back_as_the_plan_that_it_was_written_from(tmp_path, name):
    file = tmp_path / "train.sh"
    file.write_text(planned(name).export("torchtitan"))
    again = estimate(cluster=PLANS[name]["cluster"], **read(file, "torchtitan").keywords)
    first, second = (one.to_dict()["plan"] for one in (again, planned(name)))
    if second["optimizer_impl"] == "default":
        second["optimizer_impl"] = "foreach"  # torch's choice on a GPU
    assert again.model == planned(name).model
    assert first == second


@pytest.mark.parametrize(
    "plan,why",
    [
        ({"zero": 1, "fsdp_units": "block"}, "zero=1: .*use zero=3 and use fsdp_units='block.ends'"),
        ({"fsdp_units": "block"}, "fsdp_units='block'"),
        ({"implementation": "huggingface"}, "implementation='huggingface'"),
        ({"precision": "bf16"}, "precision='bf16': torchtitan reduces gradients in float32"),
        ({"precision": "fp16-mixed"}, "precision='fp16-mixed'"),
        ({"optimizer": "sgd"}, "optimizer='sgd'"),
        ({"clip_grad_norm": None}, "clip_grad_norm is left out: torchtitan clips in every step"),
        ({"recompute": "full", "recompute_blocks": 3}, "recompute_blocks=3"),
        ({"set_to_none": False}, "set_to_none=False"),
        ({"loss_chunks": 8}, "loss_chunks=8"),
        ({"fsdp_blocks": 2}, "fsdp_blocks=2"),
        ({"cluster": None, "device": "cpu", "dp": 2}, "device='cpu'"),
        (
            {"pp": 2, "global_batch": 16, "layers_per_stage": (30, 2)},
            r"layers_per_stage=\(30, 2\): torchtitan divides evenly",
        ),
        ({"pp": 2, "global_batch": 16, "schedule": "interleaved-1f1b"}, "virtual_stages=1 with schedule"),
    ],
)
def test_what_torchtitan_cannot_be_told_is_refused_by_name(plan, why):
    with pytest.raises(PlanRefused, match=f"torchtitan cannot be told this plan. .*{why}"):
        estimate("llama-3-8b", **{"cluster": "8xh100-sxm", **SHARDED, **plan}).export("torchtitan")


def test_a_model_without_a_configuration_is_refused():
    with pytest.raises(PlanRefused, match="no configuration of these sizes; use llama-3-8b or llama-3-70b"):
        estimate("llama-2-7b", cluster="8xh100-sxm", **SHARDED).export("torchtitan")


def test_the_release_of_the_modules_is_noted():
    assert "October 2024" in exported(planned("shards"), "torchtitan").notes[0]


@pytest.mark.parametrize("stages,first,last", [(4, 1, 1), (4, 0, 0), (8, 1, 1), (3, 2, 1), (16, 1, 0)])
def test_torchtitans_division_of_layers(stages, first, last):
    pipelines = pytest.importorskip("torchtitan.distributed.pipeline_parallel", exc_type=ImportError)
    names = pipelines._generate_llm_fqn_per_model_part(stages, 32, first, last)
    own = [sum(name.startswith("layers.") for name in part) for part in names]
    assert tuple(own) == stages_of_layers(32, stages, first, last)


TOML = """
[job]
description = "Llama 3 8B"
[model]
name = "llama3"
flavor = "8B"
hf_assets_path = "./assets/hf/Llama-3.1-8B"
[optimizer]
name = "AdamW"
lr = 3e-4
[training]
local_batch_size = 2
seq_len = 4096
max_norm = 1.0
steps = 1000
dataset = "c4"
[parallelism]
data_parallel_shard_degree = -1
tensor_parallel_degree = 2
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
"""


def test_a_toml_of_an_earlier_release_is_read(tmp_path):
    (tmp_path / "llama3.toml").write_text(TOML)
    found = read(tmp_path / "llama3.toml", "torchtitan")
    assert found.keywords == {
        "model": "llama-3-8b", "implementation": "torchtitan", "precision": "bf16-mixed", "seq_len": 4096,
        "clip_grad_norm": 1.0, "offload": False, "optimizer": "adamw", "optimizer_impl": "fused",
        "recompute": "selective", "pp": 1, "tp": 2, "sequence_parallel": True, "zero": 3,
        "fsdp_units": "block+ends", "micro_batch": 2,
    }  # fmt: skip
    assert any("the head stays gathered" in note for note in found.notes)
    plan = estimate(cluster="16xh100-sxm", **found.keywords).plan
    assert (plan.dp, plan.global_batch) == (8, 16)


@pytest.mark.parametrize(
    "old,new,why",
    [
        ('"op"', '"2"', "selective_ac_option='2' recomputes some of the blocks"),
        ("[job]", "[compile]\nenable = true\n[job]", "compile.enable=True changes memory and is not planned"),
        ('name = "llama3"', 'name = "llama3"\nconverters = ["float8"]', "model.converters"),
        (
            "tensor_parallel_degree = 2",
            "context_parallel_degree = 2",
            "parallelism.context_parallel_degree=2",
        ),
        ("tensor_parallel_degree = 2", "expert_parallel_degree = 8", "parallelism.expert_parallel_degree=8"),
        (
            "max_norm",
            "max_nrom",
            "unknown setting of torchtitan 'training.max_nrom'; did you mean 'training.max_norm'",
        ),
        ('flavor = "8B"', 'flavor = "debugmodel"', "flavor='debugmodel' is no model"),
        ("[job]", "[job", "neither flags of torchtitan.train nor TOML"),
        ("seq_len = 4096", 'dtype = "bfloat16"', "training.dtype='bfloat16' is not planned"),
    ],
)
def test_what_memplan_does_not_plan_is_refused_by_name(tmp_path, old, new, why):
    assert old in TOML
    (tmp_path / "bad.toml").write_text(TOML.replace(old, new))
    with pytest.raises(MemplanError, match=f"bad.toml: .*{why}"):
        read(tmp_path / "bad.toml", "torchtitan")


def test_ddp_of_an_earlier_release(tmp_path):
    text = TOML.replace(
        "data_parallel_shard_degree = -1",
        "data_parallel_shard_degree = 1\ndata_parallel_replicate_degree = 8",
    )
    (tmp_path / "ddp.toml").write_text(text.replace("tensor_parallel_degree = 2", ""))
    keywords = read(tmp_path / "ddp.toml", "torchtitan").keywords
    assert (keywords["zero"], keywords["dp"], keywords["global_batch"]) == (0, 8, 16)


@pytest.mark.parametrize(
    "text,why",
    [
        ("torchrun -m torchtitan.train --module llama3 --config llama3_405b", "llama3_405b is no model"),
        ("--module llama3 --config llama3_8b --compile.enable", "compile.enable=True"),
        ("--module llama3 --config llama3_8b activation-checkpoint:memory-budget", "mode='memory-budget'"),
        ("--module llama3 --config llama3_8b --training.seq_len many", "training.seq_len='many'"),
        ("--module llama3 --config llama3_8b --training.seqlen 1", "did you mean 'training.seq_len'"),
        ("--module llama3 --config 'llama3_8b", "is no command line"),
        (
            "--module llama3 --config llama3_8b --parallelism.pipeline_parallel_degree 2",
            "leaves open how many",
        ),
    ],
)
def test_flags_that_memplan_does_not_plan_are_refused_by_name(tmp_path, text, why):
    (tmp_path / "bad.sh").write_text(text)
    with pytest.raises(MemplanError, match=f"bad.sh: .*{why}"):
        read(tmp_path / "bad.sh", "torchtitan")


def test_defaults_of_a_configuration_are_torchtitans(tmp_path):
    (tmp_path / "train.sh").write_text(
        "torchrun --nproc-per-node 64 -m torchtitan.train --module llama3 --config llama3_70b"
    )
    found = read(tmp_path / "train.sh", "torchtitan")
    assert found.keywords["tp"] == 8
    assert found.keywords["dp"] == 8
    assert found.keywords["recompute"] == "full"
    assert found.keywords["global_batch"] == 64
    assert any("CUDA graphs" in note for note in found.notes)
    assert any("all logits" in note for note in found.notes)
