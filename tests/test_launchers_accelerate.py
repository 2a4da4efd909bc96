"""`--to accelerate`: Accelerate's own loader, its checks and its FSDP2 take what is written, and back."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from memplan import InvalidValue, PlanRefused, UnknownName, estimate
from memplan.device import CPU
from memplan.estimate import rank_estimate
from memplan.launchers import exported, read
from memplan.models.huggingface_llama import HuggingFaceLlama

SIZES: dict[str, Any] = {"n_layers": 4, "d_model": 64, "n_heads": 4, "n_kv_heads": 2, "d_ff": 176}
TINY, TIED = (
    HuggingFaceLlama(name="tiny", **SIZES, vocab_size=1000, max_seq_len=64, tied_head=tied)
    for tied in (False, True)
)
H100: dict[str, Any] = {"cluster": "8xh100-sxm", "fsdp_units": "block+ends", "zero": 3}


def launched(tmp_path, text):
    """What `accelerate launch` hands to its processes."""
    launch = pytest.importorskip("accelerate.commands.launch")
    environment = pytest.importorskip("accelerate.utils.launch").prepare_multi_gpu_env
    file = tmp_path / "accelerate.yaml"
    file.write_text(text)
    arguments = launch.launch_command_parser().parse_args(["--config_file", str(file), "train.py"])
    arguments, config, _ = launch._validate_launch_command(arguments)
    assert config.num_processes == arguments.num_processes
    return environment(arguments)


def test_accelerate_takes_the_plan_from_its_file(tmp_path):
    plan = {**H100, "recompute": "full", "offload": True, "precision": "bf16-mixed"}
    told = launched(tmp_path, estimate(TINY, **plan).export("accelerate"))
    assert told["FSDP_VERSION"] == "2"
    assert told["FSDP_RESHARD_AFTER_FORWARD"] == told["FSDP_OFFLOAD_PARAMS"] == "true"
    assert told["FSDP_ACTIVATION_CHECKPOINTING"] == "true"
    assert told["FSDP_AUTO_WRAP_POLICY"] == "TRANSFORMER_BASED_WRAP"
    assert told["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert "ACCELERATE_USE_PARALLELISM_CONFIG" not in told


def test_accelerate_takes_replicas_of_shards_and_several_nodes(tmp_path):
    text = estimate(TINY, **{**H100, "cluster": "16xh100-sxm", "dp_replicate": 2, "zero": 2}).export(
        "accelerate"
    )
    told = launched(tmp_path, text)
    assert told["PARALLELISM_CONFIG_DP_REPLICATE_SIZE"] == "2"
    assert told["PARALLELISM_CONFIG_DP_SHARD_SIZE"] == "8"
    assert told["FSDP_RESHARD_AFTER_FORWARD"] == "false"
    assert "num_machines: 2\n" in text


@pytest.mark.parametrize("n,kind", [(8, "MULTI_GPU"), (1, "NO")])
def test_accelerate_takes_plans_without_shards(tmp_path, n, kind):
    load = pytest.importorskip("accelerate.commands.config.config_args").load_config_from_file
    file = tmp_path / "accelerate.yaml"
    file.write_text(estimate(TINY, cluster=f"{n}xh100-sxm").export("accelerate"))
    config = load(str(file))
    assert config.distributed_type.value == kind
    assert (config.num_processes, config.mixed_precision) == (n, "bf16")


DIVIDED = '''
def divided(model, mesh, device):
    """The model as Accelerate divides it under the file's settings."""
    from types import SimpleNamespace

    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_apply_ac, fsdp2_prepare_model
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.fsdp._fully_shard import _fully_shard

    _fully_shard._init_default_mesh = lambda: mesh["dp"]  # not one more in each call, of 8 bytes
    os.environ.update(TOLD, FSDP_CPU_RAM_EFFICIENT_LOADING="false")
    word, policy = TOLD["ACCELERATE_MIXED_PRECISION"], None
    if word != "no":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    plugin = FullyShardedDataParallelPlugin(mixed_precision_policy=policy)
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin), mixed_precision=word, is_main_process=False, device=device
    )
    plugin.set_auto_wrap_policy(model)
    if plugin.activation_checkpointing:
        model = fsdp2_apply_ac(accelerator, model)
    model = fsdp2_prepare_model(accelerator, model)
    if any(weight.is_meta for weight in model.parameters()):
        model.to_empty(device=device)
        model.init_weights()
    return model
'''

FSDP: dict[str, Any] = {"dp": 2, "seq_len": 64, "zero": 2}
RUN: dict[str, tuple[Any, dict[str, Any]]] = {
    "zero-2": (TINY, {**FSDP, "fsdp_units": "block+ends", "precision": "fp32"}),
    "zero-2 mixed": (TINY, {**FSDP, "fsdp_units": "block+ends", "recompute": "full"}),
    "zero-3": (TINY, {**FSDP, "zero": 3, "fsdp_units": "block+ends", "recompute": "full"}),
    "tied": (TIED, {**FSDP, "zero": 3, "precision": "fp32"}),
}


RNG_BYTES = 5056
"""The state of the CPU's generator, which torch's checkpoint keeps for each block, Accelerate's not."""

BLOCK_BYTES = 4 * (4096 + 2 * 2048 + 4096 + 3 * 64 * 176 + 2 * 64)
"""A gathered block in float32."""

DIVISOR_BYTES = 8 + 4
"""What gloo divides a sum of gradients by, in float64 and as a copy in float32."""


def peak_under_accelerate(model, peak):
    """The plan's peak on a rank, less what Accelerate does not hold then.

    It calls `checkpoint_wrapper(layer, preserve_rng_state=False)`. A tied head is in a unit of its own, and
    the root has no weights: the last block is gathered when the head's gradient is known, the plan's before
    the loss's backward pass. An untied head stays gathered, which raises no peak here.
    """
    less = dict.fromkeys(("forward: head", "forward: end", "loss", "backward: loss", "backward: head"), 0)
    if peak.plan.recompute == "full":
        less = dict.fromkeys(less, RNG_BYTES * model.n_layers)
    if model.tied_head:
        less["backward: head"] += BLOCK_BYTES
    return max(instant.total_bytes - less.get(instant.when, 0) for instant in peak.instants)


@pytest.mark.slow
def test_accelerates_fsdp2_takes_the_bytes_of_the_estimate(tmp_path):
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    scripts = []
    for name, (model, plan) in RUN.items():
        told = launched(tmp_path, estimate(model, **plan).export("accelerate"))
        told = {key: value for key, value in told.items() if key.startswith(("FSDP_", "ACCELERATE_"))}
        script, _, main = (
            estimate(model, **plan, device="cpu").export("torchrun").partition("\n\nif __name__")
        )
        scripts.append(tmp_path / f"{name.replace(' ', '_')}.py")
        scripts[-1].write_text(f"import os\n{script}\nTOLD = {told}\n{DIVIDED}\nif __name__{main}")
    (tmp_path / "scripts.json").write_text(json.dumps(list(map(str, scripts))))
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    harness = Path(__file__).with_name("launched.py")
    ended = subprocess.run([*run, harness, tmp_path / "scripts.json"], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-5000:]
    for (model, keywords), script in zip(RUN.values(), scripts, strict=True):
        planned = estimate(model, **keywords).plan
        for rank in range(2):
            measured = json.loads(script.with_suffix(f".{rank}.json").read_text())["peak_bytes"]
            predicted = peak_under_accelerate(model, rank_estimate(model, planned, planned.place(rank), CPU))
            assert 0 <= measured - predicted <= DIVISOR_BYTES, script.stem


REFUSED = [
    ({"pp": 2, "zero": 0}, "pp=2: Accelerate trains no pipelines; use pp=1"),
    ({"zero": 1}, "zero=1: Accelerate has no ZeroRedundancyOptimizer; use zero=2"),
    ({"recompute": "selective"}, "recompute='selective'"),
    ({"recompute": "full", "recompute_blocks": 2}, "recompute_blocks=2"),
    ({"fsdp_units": "block"}, "use fsdp_units='block.ends'"),
    ({"fsdp_units": "block+ends", "fsdp_blocks": 2}, "fsdp_blocks=2"),
    ({"zero": 0, "device": "cpu", "cluster": None}, "device='cpu'"),
]


@pytest.mark.parametrize("plan,why", REFUSED)
@pytest.mark.parametrize("to", ["accelerate", "transformers"])
def test_what_accelerate_cannot_be_told_is_refused_by_name(to, plan, why):
    whole = {**H100, **plan}
    if whole["zero"] < 2:
        whole.pop("fsdp_units")
    with pytest.raises(PlanRefused, match=why.replace("Accelerate", "(Accelerate|transformers' Trainer)")):
        estimate(TINY, **whole).export(to)


def test_all_that_is_refused_is_told_at_once():
    with pytest.raises(PlanRefused, match=r"implementation='reference'.*\. fsdp_units='block'"):
        estimate("llama-3-8b", implementation="reference", cluster="8xh100-sxm", zero=3).export("accelerate")


def test_what_accelerate_does_otherwise_is_noted():
    (note,) = exported(estimate("llama-3-8b", implementation="huggingface", **H100), "accelerate").notes
    assert "keeps the head gathered" in note
    assert "1002.00 MiB more" in note
    assert exported(estimate(TINY, **{**H100, "zero": 2}), "accelerate").notes == ()


AS_ACCELERATE_REDUCES = {**H100, "precision": "bf16-mixed-reduce-bf16"}

ROUND_TRIPS = [
    {**AS_ACCELERATE_REDUCES, "no_sync": True},
    {**H100, "zero": 2, "recompute": "full", "offload": True, "precision": "fp16-mixed", "no_sync": True},
    {**AS_ACCELERATE_REDUCES, "cluster": "16xh100-sxm", "dp_replicate": 2, "no_sync": True},
    {"cluster": "8xh100-sxm", "zero": 0, "precision": "fp32"},
    {"cluster": "1xh100-sxm", "zero": 0},
]


@pytest.mark.parametrize("plan", ROUND_TRIPS)
def test_a_file_is_read_back_as_the_plan_that_it_was_written_from(tmp_path, plan):
    pytest.importorskip("yaml")
    planned = estimate(TINY, **plan)
    file = tmp_path / "accelerate.yaml"
    file.write_text(planned.export("accelerate"))
    found = read(file, "accelerate", TINY)
    keywords = {name: value for name, value in found.keywords.items() if name != "implementation"}
    assert estimate(TINY, **keywords, cluster=plan["cluster"]).plan == planned.plan


OF_FSDP = (
    "distributed_type: FSDP\nnum_processes: 8\n"
    "fsdp_config: {fsdp_version: 2, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP}"
)
BAD = [
    ("distributed_type: DEEPSPEED", "distributed_type='DEEPSPEED' is not planned"),
    ("distributed_type: FSDP\nfsdp_config: {fsdp_version: 3}", "fsdp_version=3 is not allowed; use 1 or 2"),
    ("distributed_type: 'NO'\nmixed_precision: fp8", "mixed_precision='fp8' is not planned"),
    ("distributed_type: 'NO'\nfp8_config: {backend: TE}", "fp8_config=.* changes memory"),
    ("distributed_type: 'NO'\ndynamo_config: {dynamo_backend: INDUCTOR}", "dynamo_config=.* changes memory"),
    ("distributed_type: 'NO'\nmegatron_lm_config: {megatron_lm_tp_degree: 2}", "megatron_lm_config"),
    (
        f"{OF_FSDP}\nparallelism_config: {{parallelism_config_sp_size: 2}}",
        "parallelism_config_sp_size=2 is not planned",
    ),
    (
        "distributed_type: 'NO'\nnum_procs: 2",
        "unknown setting of Accelerate 'num_procs'; did you mean 'num_processes'",
    ),
    ("[1]", "holds no settings"),
    ("a: [", "is not YAML"),
]


@pytest.mark.parametrize("text,why", BAD)
def test_what_memplan_does_not_plan_is_refused_by_name(tmp_path, text, why):
    pytest.importorskip("yaml")
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises((InvalidValue, UnknownName), match=f"bad.yaml: .*{why}"):
        read(tmp_path / "bad.yaml", "accelerate", TINY)


def test_a_setting_of_fsdp_that_leaves_weights_out_is_refused(tmp_path):
    pytest.importorskip("yaml")
    text = (
        estimate(TINY, **H100)
        .export("accelerate")
        .replace("fsdp_version: 2", "fsdp_version: 2\n  fsdp_ignored_modules: a.*")
    )
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(InvalidValue, match="fsdp_ignored_modules"):
        read(tmp_path / "bad.yaml", "accelerate", TINY)
