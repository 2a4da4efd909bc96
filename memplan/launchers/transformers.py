"""transformers 5.23: the arguments of its Trainer, in and out, as `HfArgumentParser` takes them.

The Trainer runs on Accelerate, which divides the model.

Source: transformers/training_args.py (`TrainingArguments`, `_process_fsdp_args`), trainer.py.
"""

import json
from collections.abc import Iterator
from typing import Any, ClassVar, Final, final

from memplan.engines.options import plan_dict
from memplan.errors import InvalidValue
from memplan.launchers.accelerate import MIXED, differences, limits_of
from memplan.launchers.base import Job, Launcher, Limit, Read
from memplan.launchers.training_arguments import PREFETCHES, read_arguments
from memplan.models import Model
from memplan.plan import Plan
from memplan.shapes import BF16
from memplan.units import MiB

OPTIMIZERS: Final = {
    ("adamw", "default"): "adamw_torch",
    ("adamw", "fused"): "adamw_torch_fused",
    ("sgd", "default"): "sgd",
}
"""The Trainer's word for an optimizer and its implementation."""

WHO: Final = "transformers' Trainer"

CONFIGS: Final = {"sft": "SFTConfig", "dpo": "DPOConfig", "grpo": "GRPOConfig"}
"""The classes of TRL that take the arguments too."""


@final
class Transformers(Launcher):
    """transformers' Trainer."""

    file: ClassVar[str] = "training_arguments.json"

    def limits(self, job: Job) -> Iterator[Limit]:
        yield from limits_of(job, WHO)
        plan = job.estimate.plan
        options = plan_dict(plan)
        if (plan.optimizer, options["optimizer_impl"]) not in OPTIMIZERS:
            known = ", ".join(f"{name} with optimizer_impl={impl!r}" for name, impl in OPTIMIZERS)
            asked = f"optimizer={plan.optimizer!r}, optimizer_impl={options['optimizer_impl']!r}"
            yield Limit(f"{asked}: {WHO} has no word for it", f"use {known}")
        for name, usual in (("gradient_as_bucket_view", False), ("ddp_comm_hook", "none")):
            if options[name] != usual:
                yield Limit(f"{name}={options[name]!r}: {WHO} has no argument for it", {name: None})
        if (cap := options["bucket_cap_bytes"]) is not None and cap % MiB:
            yield Limit(f"bucket_cap_bytes={cap}: {WHO} takes whole MiB", f"use a multiple of {MiB}")
        if not options["set_to_none"]:
            yield Limit(f"set_to_none=False: {WHO} frees gradients", {"set_to_none": True})
        if plan.cp > 1:
            yield Limit(f"cp={plan.cp}: {WHO} has no argument for a mesh, Accelerate has", {"cp": 1})
        if plan.dp_replicate > 1:
            why = f"dp_replicate={plan.dp_replicate}: {WHO} has no argument for a mesh, Accelerate has"
            yield Limit(why, {"dp_replicate": 1})

    def notes(self, job: Job) -> Iterator[str]:
        plan = job.estimate.plan
        if plan.formats.stored == BF16:
            yield "The weights are in bfloat16 only if your script loads the model with dtype=torch.bfloat16."
        if (trainer := plan_dict(plan)["trainer"]) in CONFIGS:
            wants = f"max_length={plan.seq_len}"
            if plan_dict(plan)["precompute_ref_log_probs"]:
                wants += " and precompute_ref_log_probs=True"
            if trainer == "grpo":
                n, held = (plan_dict(plan)[name] for name in ("max_completion_length", "ref_model"))
                server = f"use_vllm=True, vllm_mode='server', {'a beta above 0' if held else 'beta=0.0'}"
                wants = f"max_completion_length={n}, {server}, and prompts of {plan.seq_len - n} tokens"
            yield f"trl.{CONFIGS[trainer]} takes these arguments too; it also wants {wants}."
        if trainer != "none":
            return
        yield from differences(job, WHO)
        if plan.fsdp and plan.formats.reduce != plan.formats.gather:
            yield (
                f"{WHO} reduces gradients in {plan.formats.gather.name}, the plan in "
                f"{plan.formats.reduce.name}: its buffers are smaller, and its sums less exact."
            )
        if plan.clip_grad_norm is None:
            yield f"{WHO} takes the norm of the gradients in every step, also where none is clipped."

    def read(self, text: str, model: Model | None) -> Read:
        if model is None:
            raise InvalidValue("names no model; give one beside it, as in llama-3-8b.")
        return read_arguments(text, model)

    def text(self, job: Job, notes: tuple[str, ...]) -> str:
        return json.dumps(training_arguments(job.estimate.plan), indent=2) + "\n"


TRANSFORMERS: Final = Transformers()


def training_arguments(plan: Plan) -> dict[str, Any]:
    """The arguments of the Trainer that the plan decides; a sample of TRL's DPOTrainer is two sequences."""
    options = plan_dict(plan)
    found: dict[str, Any] = {
        "output_dir": "outputs",
        "per_device_train_batch_size": plan.micro_batch // (2 if options["trainer"] == "dpo" else 1),
        "gradient_accumulation_steps": plan.n_micro_batches,
        "optim": OPTIMIZERS[plan.optimizer, options["optimizer_impl"]],
        "max_grad_norm": plan.clip_grad_norm or 0.0,
        "bf16": MIXED[plan.precision] == "bf16",
        "fp16": plan.precision == "fp16-mixed",
        "activation_checkpointing": plan.recompute == "full" and not plan.fsdp,
    }
    if plan.recompute == "full" and not plan.fsdp:
        found["activation_checkpointing_kwargs"] = {"use_reentrant": False}
    if plan.ddp and options["bucket_cap_bytes"] is not None:
        found["ddp_bucket_cap_mb"] = options["bucket_cap_bytes"] // MiB
    if options["static_graph"]:
        found["ddp_static_graph"] = True
    if plan.fsdp:
        found["fsdp"] = True
        flat = options["fsdp_version"] == 1
        found["fsdp_config"] = {
            "version": options["fsdp_version"],
            "reshard_after_forward": "full_shard" if flat else plan.zero == 3,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "cpu_offload": plan.offload,
            "activation_checkpointing": plan.recompute == "full",
            "state_dict_type": "SHARDED_STATE_DICT",
        }
        if flat:
            names = "use_orig_params", "forward_prefetch"
            found["fsdp_config"] |= {name: options[name] for name in names}
            found["fsdp_config"]["backward_prefetch"] = PREFETCHES[options["backward_prefetch"]]
        if plan.n_micro_batches > 1 and not options["no_sync"]:
            found["accelerator_config"] = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    return found
