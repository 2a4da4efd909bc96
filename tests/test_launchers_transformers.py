"""`--to transformers`: HfArgumentParser and TrainingArguments take what is written."""

from typing import Any

import pytest

from memplan import PlanRefused, estimate
from memplan.launchers import exported, targets
from tests.test_launchers_accelerate import H100, TINY


def parsed(tmp_path, text):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    file = tmp_path / "training_arguments.json"
    file.write_text(text.replace('"bf16": true', '"bf16": false'))  # this machine has no GPU to cast on
    (arguments,) = transformers.HfArgumentParser(transformers.TrainingArguments).parse_json_file(str(file))
    return arguments


def test_the_trainer_takes_shards(tmp_path):
    plan = {**H100, "recompute": "full", "offload": True, "global_batch": 32, "clip_grad_norm": 0.5}
    arguments = parsed(tmp_path, estimate(TINY, **plan).export("transformers"))
    told = arguments.fsdp_plugin_args
    assert told["fsdp_version"] == 2
    assert told["reshard_after_forward"] is told["cpu_offload"] is told["activation_checkpointing"] is True
    assert told["auto_wrap_policy"] == "TRANSFORMER_BASED_WRAP"
    assert (arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps) == (1, 4)
    assert arguments.max_grad_norm == 0.5
    assert arguments.accelerator_config.gradient_accumulation_kwargs == {"sync_each_batch": True}


def test_the_trainer_takes_ddp(tmp_path):
    plan: dict[str, Any] = {"recompute": "full", "optimizer_impl": "fused", "bucket_cap_bytes": 8 * 2**20}
    text = estimate(TINY, dp=8, **plan, micro_batch=4, static_graph=True).export("transformers")
    arguments = parsed(tmp_path, text)
    assert not arguments.fsdp
    assert arguments.fsdp_plugin_args is None
    assert (arguments.optim, arguments.ddp_bucket_cap_mb) == ("adamw_torch_fused", 8)
    assert arguments.ddp_static_graph
    assert arguments.activation_checkpointing
    assert arguments.per_device_train_batch_size == 4
    assert arguments.max_grad_norm == 0
    assert '"bf16": true' in text
    assert '"use_reentrant": false' in text


def test_what_the_trainer_reduces_in_is_noted():
    notes = exported(estimate(TINY, **{**H100, "zero": 2}), "transformers").notes
    assert any("reduces gradients in bfloat16, the plan in float32" in note for note in notes)


@pytest.mark.parametrize("trainer", ["huggingface", "sft", "dpo", "grpo"])
def test_what_the_trainer_trains_is_no_script_with_a_loop_of_its_own(trainer):
    asked = {"implementation": "huggingface", "optimizer_impl": "fused", "trainer": trainer}
    asked |= {"max_completion_length": 32} if trainer == "grpo" else {}
    found = estimate("qwen2.5-0.5b", cluster="1xh100-sxm", seq_len=128, micro_batch=2, **asked)
    assert targets(found)[0] == "transformers"
    with pytest.raises(
        PlanRefused, match=f"trainer='{trainer}': .* a loop of its own; use --to transformers"
    ):
        exported(found, "torchrun")
    written = exported(found, "transformers")
    n_samples = 1 if trainer == "dpo" else 2
    assert f'"per_device_train_batch_size": {n_samples}' in written.text
    wants = "max_completion_length=32, use_vllm=True" if trainer == "grpo" else "max_length=128"
    assert any(wants in note for note in written.notes) == (trainer != "huggingface")


def test_the_norm_that_the_trainer_takes_anyway_is_noted():
    (note,) = exported(estimate(TINY, cluster="1xh100-sxm"), "transformers").notes
    assert "takes the norm of the gradients in every step" in note
    assert exported(estimate(TINY, cluster="1xh100-sxm", clip_grad_norm=1.0), "transformers").notes == ()


@pytest.mark.parametrize(
    "plan,why",
    [
        ({"optimizer": "adam"}, "optimizer='adam'"),
        ({"optimizer_impl": "for-loop"}, "optimizer_impl='for-loop'"),
        ({"gradient_as_bucket_view": True}, "gradient_as_bucket_view=True"),
        ({"ddp_comm_hook": "bf16"}, "ddp_comm_hook='bf16'"),
        ({"bucket_cap_bytes": 1000}, "bucket_cap_bytes=1000"),
        ({"set_to_none": False}, "set_to_none=False"),
        ({"zero": 2, "dp_replicate": 2, "fsdp_units": "block+ends"}, "dp_replicate=2"),
    ],
)
def test_what_the_trainer_cannot_be_told_is_refused_by_name(plan, why):
    with pytest.raises(PlanRefused, match=why):
        estimate(TINY, dp=8, **plan).export("transformers")
