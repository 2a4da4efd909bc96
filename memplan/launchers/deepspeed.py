"""DeepSpeed 0.19: the JSON that `deepspeed.initialize(config=...)` takes, in and out.

Source: `deepspeed.runtime.config:DeepSpeedConfig`, `deepspeed.runtime.zero.config:DeepSpeedZeroConfig`.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Final, final

from memplan.engines.options import plan_dict
from memplan.errors import InvalidValue, shown_value, unknown_name
from memplan.launchers.base import Job, Launcher, Limit, Read
from memplan.models import Model

BATCH: Final = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
SECTIONS: Final = ("optimizer", "zero_optimization", "bf16", "fp16", "gradient_clipping", "tensor_parallel")

PIPELINE: Final = "pipeline"
OF_PIPELINE: Final[Mapping[str, Any]] = {"pipe_partitioned": True, "grad_partitioned": True}
"""The section's name, and keys that must be true or false; they act over tensor-parallel ranks alone.

Source: `deepspeed.runtime.pipe.engine:PipelineEngine.__init__`.
"""

READ_NOWHERE: Final = ("stages", "partition", "seed_layers")
"""Keys of `pipeline` that DeepSpeed has defaults for and reads nowhere: PipelineModule's arguments say it."""

INTERVAL: Final = "activation_checkpoint_interval"
"""The key of `pipeline` that the engine hands on to its PipelineModule."""

SEQUENCES: Final = ("sequence_parallel_size", "data_parallel_size")
"""Keys that say how many ranks divide a sequence; both together make a mesh for another attention."""

TENSOR_PARALLEL: Final[Mapping[str, Any]] = {
    "tp_overlap_comm": False,
    "vocab_parallel_ce_backend": "torch",
    **dict.fromkeys(("vocab_parallel_lm_head", "partition_config", "preset_model"), None),
    **dict.fromkeys(("injection_policy_tuple", "tp"), None),
    **dict.fromkeys(("keep_module_on_host", "kernel_inject"), False),
}
"""Keys of `tensor_parallel` beside the number of ranks and `dtype`, with the only value that has a rule."""

HARMLESS: Final = frozenset({
    *("steps_per_print", "wall_clock_breakdown", "dump_state", "scheduler", "tensorboard", "wandb"),
    *("csv_monitor", "comms_logger", "memory_breakdown", "zero_allow_untested_optimizer", "checkpoint"),
})  # fmt: skip
"""Keys that change no byte of a step."""

OF_ZERO: Final = ("overlap_comm", "reduce_bucket_size")
"""Keys of `zero_optimization` that a plan has under every stage."""

OFFLOAD: Final = "offload_optimizer"
OFFLOAD_KEYS: Final = {
    *("device", "pin_memory", "ratio", "nvme_path", "buffer_count", "pipeline_read", "pipeline_write"),
    *("fast_init", "cpuadam_cores_perc"),
}
"""The section's name and its keys; the keys for NVMe are accepted and change no byte on the host."""

OFFLOAD_PARAM: Final = "offload_param"
OFFLOAD_PARAM_KEYS: Final = {
    *("device", "pin_memory", "nvme_path", "buffer_count", "buffer_size", "max_in_cpu"),
}
"""The section's name and its keys; partitions of weights are page-locked whatever `pin_memory` says."""

OF_STAGE_3: Final = (
    *("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold", "stage3_max_live_parameters"),
    *("stage3_max_reuse_distance", "sub_group_size", "zero_hpz_partition_size"),
)
"""Keys of `zero_optimization` that only stage 3 reads."""

AUTO: Final[Mapping[str, Callable[[int], int]]] = {
    "reduce_bucket_size": lambda d_model: d_model * d_model,
    "stage3_prefetch_bucket_size": lambda d_model: int(0.9 * d_model * d_model),
    "stage3_param_persistence_threshold": lambda d_model: 10 * d_model,
}
"""What "auto" stands for as transformers' Trainer fills it in.

Source: transformers.integrations.deepspeed (`HfTrainerDeepSpeedConfig.trainer_config_finalize`).
"""

AT_DEFAULT: Final[Mapping[str, Any]] = {
    "contiguous_gradients": True,
    "reduce_scatter": True,
    "use_multi_rank_bucket_allreduce": True,
    "allgather_partitions": True,
    "compute_grad_norm": True,
    "ignore_unused_parameters": True,
    **dict.fromkeys(("round_robin_gradients", "parameter_alignment", "zero_quantized_weights"), False),
    **dict.fromkeys(("zero_quantized_gradients", "cpu_offload", "cpu_offload_param"), False),
    **dict.fromkeys(("zenflow", "mics_shard_size"), None),
    **dict.fromkeys(("stage3_use_all_reduce_for_fetch_params", "stage3_allgather_sequential"), False),
    "stage3_module_granularity_threshold": 0,
}
"""Keys of `zero_optimization` with the only value that has a rule; `{"device": "none"}` is None."""

NO_BYTES: Final = frozenset({
    *("allgather_bucket_size", "load_from_fp32_weights", "elastic_checkpoint", "legacy_stage1"),
    *("log_trace_cache_warnings", "stage3_gather_16bit_weights_on_model_save"),
    "stage3_gather_fp16_weights_on_model_save",
})  # fmt: skip
"""Keys of `zero_optimization` that change no byte of a step."""

AUTO_WORD: Final = "auto"
"""What transformers' Trainer replaces by its own arguments, and memplan by flags and keywords."""

MAX_GRAD_NORM: Final = 1.0
"""Source: transformers.training_args (`TrainingArguments.max_grad_norm`)."""

PRECISIONS: Final = {"bf16": "bf16-mixed", "fp16": "fp16-mixed"}
OPTIMIZERS: Final = {"adam": "adam", "adamw": "adamw"}


@final
class DeepSpeedLauncher(Launcher):
    """`deepspeed.initialize`."""

    engine: ClassVar[str] = "deepspeed"
    file: ClassVar[str] = "ds_config.json"

    def limits(self, job: Job) -> Iterator[Limit]:
        if job.estimate.device.on_cpu:
            yield Limit("device='cpu': DeepSpeed is told of GPUs here", {"device": None})

    def notes(self, job: Job) -> Iterator[str]:
        yield "The learning rate is DeepSpeed's default unless optimizer.params.lr says another."
        if job.estimate.plan.recompute != "none":
            yield "Recomputation is the training script's: it checkpoints the model's blocks."
        if (pp := job.estimate.plan.pp) > 1:
            options = plan_dict(job.estimate.plan)
            yield (
                f"Stages are the training script's: PipelineModule(layers, num_stages={pp}, "
                f"partition_method={options['partition_method']!r}, loss_fn=...), with the embedding, each "
                "block and the head as a layer, and engine.train_batch(data_iter)."
            )
            if options[INTERVAL]:
                yield "PipelineModule's checkpointable_layers has the class of the blocks, and no other."
        if job.estimate.plan.tp > 1:
            yield "train_batch_size counts a sequence once for each tensor-parallel rank, as DeepSpeed does."
        if (cp := job.estimate.plan.cp) > 1:
            yield (
                "Sequences are divided by the training script: before initialize it calls "
                "UlyssesSPAttentionHF.register_with_transformers, or it uses Accelerate's ParallelismConfig, "
                f"with sp_size={cp}."
            )

    def text(self, job: Job, notes: tuple[str, ...]) -> str:
        plan = job.estimate.plan
        options = plan_dict(plan)
        told = _read_by(plan.zero)
        zero = {"stage": plan.zero} | {name: options[name] for name in told if options[name] is not None}
        if (where := options[OFFLOAD]) != "none":
            zero[OFFLOAD] = {"device": "cpu", "pin_memory": where == "cpu-pinned"}
        if options[OFFLOAD_PARAM] != "none":
            zero[OFFLOAD_PARAM] = {"device": options[OFFLOAD_PARAM]}
        half = next(word for word, precision in PRECISIONS.items() if precision == plan.precision)
        optimizer = {"adam": "Adam", "adamw": "AdamW"}[plan.optimizer]
        batch = plan.global_batch * plan.tp, plan.micro_batch, plan.n_micro_batches
        values = {
            **dict(zip(BATCH, batch, strict=True)),
            **({"tensor_parallel": {"autotp_size": plan.tp}} if plan.tp > 1 else {}),
            **({PIPELINE: {INTERVAL: options[INTERVAL]}} if options[INTERVAL] else {}),
            half: {"enabled": True},
            "gradient_clipping": plan.clip_grad_norm or 0.0,
            "zero_optimization": zero,
            "optimizer": {"type": optimizer, "params": {"adam_w_mode": plan.optimizer == "adamw"}},
        }
        return json.dumps(values, indent=2) + "\n"

    def read(self, text: str, model: Model | None) -> Read:
        if model is None:
            raise InvalidValue("names no model; give one beside it, as in llama-3-8b.")
        try:
            values = json.loads(text)
        except ValueError as error:
            raise InvalidValue(f"is no JSON: {error}; use one object of DeepSpeed's keys.") from None
        return read_configuration(values, model)


def read_configuration(values: Any, model: Model) -> Read:
    """The keywords of a DeepSpeed configuration for a model, whose width "auto" depends on.

    Raises:
        InvalidValue, UnknownName: a key that DeepSpeed does not know, or that no rule covers.
    """
    if not isinstance(values, Mapping):
        raise InvalidValue(f"{shown_value(values)} is no DeepSpeed configuration; use an object of its keys.")
    known = {*BATCH, *SECTIONS, PIPELINE, *SEQUENCES, *HARMLESS}
    _check_names("key of a DeepSpeed configuration", values, known)
    precision, is_open = _precision(values)
    keywords: dict[str, Any] = {"engine": "deepspeed", "precision": precision}
    keywords |= _zero(_section(values, "zero_optimization"), model)
    keywords |= _degrees(values) | _pipeline(_section(values, PIPELINE))
    if clip := values.get("gradient_clipping", 0.0):
        keywords["clip_grad_norm"] = MAX_GRAD_NORM if clip == AUTO_WORD else clip
    keywords["optimizer"] = _optimizer(_section(values, "optimizer"))
    total, each, steps = (_count(name, values) for name in BATCH)
    auto = [values.get(name) == AUTO_WORD for name in BATCH]
    if total is None and each is None and not any(auto[:2]):
        raise InvalidValue(
            "Either train_batch_size or train_micro_batch_size_per_gpu needs to be provided; use "
            "train_micro_batch_size_per_gpu."
        )
    if total is not None:
        total = _samples(total, keywords.get("tp", 1))
    keywords |= {name: n for name, n in (("global_batch", total), ("micro_batch", each)) if n is not None}
    left_open = {"precision": is_open, "clip_grad_norm": values.get("gradient_clipping") == AUTO_WORD}
    says_no_steps = any(auto) or (total is not None and each is not None)
    return Read(
        keywords=keywords,
        n_micro_batches=steps or (None if says_no_steps else 1),
        open=frozenset([name for name, is_auto in left_open.items() if is_auto]),
    )


def _check_names(what: str, found: Mapping[str, Any], known: set[str]) -> None:
    for name in found:
        if name not in known:
            raise unknown_name(what, name, known)


def _section(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = values.get(name) or {}
    if not isinstance(found, Mapping):
        raise InvalidValue(f"{name}={shown_value(found)} is no section; use an object of its keys.")
    return found


def _count(name: str, values: Mapping[str, Any]) -> int | None:
    """A number of samples or steps; "auto" is left to the training script, and here to the flags."""
    n = values.get(name)
    if n is None or n == AUTO_WORD:
        return None
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise InvalidValue(f"{name}={shown_value(n)} has to be greater than 0; use a whole number.")
    return n


def _samples(total: int, tp: int) -> int:
    """The sequences of a `train_batch_size`, which counts each once for each tensor-parallel rank.

    Source: `deepspeed.runtime.config:DeepSpeedConfig`, whose `world_size` is of all ranks.
    """
    if total % tp:
        raise InvalidValue(
            f"train_batch_size={total} is no multiple of autotp_size={tp}, though it counts the batches of "
            f"all ranks; use {-(-total // tp) * tp}."
        )
    return total // tp


def _degrees(values: Mapping[str, Any]) -> dict[str, int]:
    """The tensor-parallel ranks and those that divide a sequence, where there are several."""
    section = _section(values, "tensor_parallel")
    _check_names("key of tensor_parallel", section, {"autotp_size", "dtype", *TENSOR_PARALLEL})
    for name, usual in TENSOR_PARALLEL.items():
        if (value := section.get(name, usual)) != usual:
            raise InvalidValue(f"tensor_parallel.{name}={shown_value(value)} has no rule yet; leave it out.")
    if "data_parallel_size" in values:
        raise InvalidValue(
            "data_parallel_size beside sequence_parallel_size makes the mesh of DeepSpeed's "
            "DistributedAttention, which has no rule; leave it out, and use UlyssesSPAttentionHF."
        )
    tp = 0 if section.get("autotp_size") == 0 else _count("autotp_size", section)
    found = {"tp": tp, "cp": _count("sequence_parallel_size", values)}
    return {axis: n for axis, n in found.items() if n and n > 1}


def _pipeline(section: Mapping[str, Any]) -> dict[str, int]:
    """The layers that are checkpointed together, where the section says so.

    Source: `deepspeed.runtime.config:get_pipeline_config`.
    """
    _check_names("key of pipeline", section, {*READ_NOWHERE, *OF_PIPELINE, INTERVAL, "use_reentrant"})
    for name, usual in OF_PIPELINE.items():
        if not isinstance(value := section.get(name, usual), bool):
            raise InvalidValue(f"pipeline.{name}={shown_value(value)} is no bool; use true or false.")
    n = section.get(INTERVAL, 0)
    if n and section.get("use_reentrant") is False:
        raise InvalidValue(
            "pipeline.use_reentrant=false has no rule yet beside activation_checkpoint_interval; leave it "
            "out."
        )
    return {INTERVAL: n} if n else {}


def _precision(values: Mapping[str, Any]) -> tuple[str, bool]:
    """The precision, and whether it is the caller's: both are "auto", which bfloat16 fills usually."""
    enabled = {word: _section(values, word).get("enabled", False) for word in PRECISIONS}
    if set(enabled.values()) == {AUTO_WORD}:
        return PRECISIONS["bf16"], True
    on = [word for word, said in enabled.items() if said is True]
    on = on or [word for word, said in enabled.items() if said == AUTO_WORD]
    if len(on) != 1:
        said = "both bf16 and fp16 are enabled" if on else "neither bf16.enabled nor fp16.enabled is true"
        raise InvalidValue(f"{said}, which has no rule; enable one of them.")
    return PRECISIONS[on[0]], False


def _zero(section: Mapping[str, Any], model: Model) -> dict[str, Any]:
    _check_names(
        "key of zero_optimization",
        section,
        {"stage", OFFLOAD, OFFLOAD_PARAM, *OF_ZERO, *OF_STAGE_3, *AT_DEFAULT, *NO_BYTES},
    )
    for name, usual in AT_DEFAULT.items():
        value = section.get(name, usual)
        value = None if isinstance(value, Mapping) and value.get("device") == "none" else value
        if value not in (usual, AUTO_WORD):
            raise InvalidValue(
                f"zero_optimization.{name}={shown_value(value)} has no rule yet; use {json.dumps(usual)}, or "
                "leave it out."
            )
    found: dict[str, Any] = {"zero": section.get("stage", 0)}
    if (where := _place(_section(section, OFFLOAD))) != "none":
        found[OFFLOAD] = where
    if (device := _device(_section(section, OFFLOAD_PARAM), OFFLOAD_PARAM, OFFLOAD_PARAM_KEYS)) != "none":
        found[OFFLOAD_PARAM] = device
    for name in [name for name in _read_by(found["zero"]) if section.get(name) is not None]:
        value = section[name]
        if value == AUTO_WORD and name in AUTO:
            value = AUTO[name](model.d_model)
        if value != AUTO_WORD:
            found[name] = int(value) if isinstance(value, float) and value.is_integer() else value
    return found


def _place(section: Mapping[str, Any]) -> str:
    """Where offloaded states are.

    Source: `deepspeed.runtime.zero.offload_config:DeepSpeedZeroOffloadOptimizerConfig`.
    """
    device = _device(section, OFFLOAD, OFFLOAD_KEYS)
    return "cpu-pinned" if device == "cpu" and section.get("pin_memory", True) else device


def _device(section: Mapping[str, Any], name: str, keys: set[str]) -> str:
    """Where a section says that states are: "cpu" or "none"."""
    _check_names(f"key of {name}", section, keys)
    device = section.get("device", "none")
    if device not in ("none", "cpu") or section.get("ratio", 1.0) != 1.0:
        raise InvalidValue(
            f"zero_optimization.{name}={shown_value(dict(section))} has no rule yet; use the device "
            '"cpu" or "none", with a ratio of 1.'
        )
    return str(device)


def _read_by(stage: Any) -> tuple[str, ...]:
    """The keys of a plan's options that a stage reads."""
    return () if not stage else (*OF_ZERO, *OF_STAGE_3) if stage == 3 else OF_ZERO


def _optimizer(section: Mapping[str, Any]) -> str:
    kind = str(section.get("type", "AdamW"))
    if kind.lower() not in OPTIMIZERS:
        raise unknown_name("optimizer.type", kind, ("Adam", "AdamW"))
    params = _section(section, "params")
    if params.get("torch_adam"):
        raise InvalidValue("optimizer.params.torch_adam=true has no rule yet; leave it out for FusedAdam.")
    return "adam" if kind.lower() == "adam" and params.get("adam_w_mode") is False else "adamw"


DEEPSPEED: Final = DeepSpeedLauncher()
