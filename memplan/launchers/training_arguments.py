"""transformers 5.23's TrainingArguments read as a plan: a JSON file's, or a line's.

Source: transformers/training_args.py (`TrainingArguments`, `_process_fsdp_args`), trainer.py
(`Trainer._build_accelerator_args`).
"""

import json
import shlex
from collections.abc import Mapping
from typing import Any, Final

from memplan.errors import InvalidValue, reason, shown_value, unknown_name
from memplan.launchers.base import Read
from memplan.models import Model, ends_are_tied
from memplan.units import MiB

USUAL: Final[Mapping[str, Any]] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "optim": "adamw_torch_fused",
    "max_grad_norm": 1.0,
    **dict.fromkeys(("bf16", "fp16", "activation_checkpointing", "gradient_checkpointing"), False),
    **dict.fromkeys(("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"), None),
    **dict.fromkeys(("fsdp", "fsdp_config", "ddp_bucket_cap_mb", "accelerator_config"), None),
}
"""The arguments that a plan is made of, and their defaults."""

AT_DEFAULT: Final[Mapping[str, Any]] = {
    "average_tokens_across_devices": True,
    "label_smoothing_factor": 0.0,
    "include_num_input_tokens_seen": "no",
    **dict.fromkeys(("optim_args", "optim_target_modules", "neftune_noise_alpha", "deepspeed"), None),
    **dict.fromkeys(("torch_empty_cache_steps", "parallelism_config", "liger_kernel_config"), None),
    **dict.fromkeys(("ddp_find_unused_parameters", "ddp_broadcast_buffers", "ddp_static_graph"), None),
    **dict.fromkeys(("torch_compile", "use_liger_kernel", "auto_find_batch_size", "use_cpu"), False),
    **dict.fromkeys(("use_cache", "full_determinism"), False),
    **dict.fromkeys(("torch_compile_backend", "torch_compile_mode"), None),
}
"""Arguments with the only value that has a rule."""

HARMLESS: Final = frozenset({
    *("output_dir", "num_train_epochs", "max_steps", "learning_rate", "lr_scheduler_type"),
    *("lr_scheduler_kwargs", "warmup_steps", "weight_decay", "adam_beta1", "adam_beta2"),
    *("adam_epsilon", "bf16_full_eval", "fp16_full_eval", "tf32", "logging_strategy", "logging_steps"),
    *("logging_first_step", "log_on_each_node", "logging_nan_inf_filter", "log_level", "log_level_replica"),
    *("disable_tqdm", "report_to", "run_name", "project", "trackio_space_id", "trackio_bucket_id"),
    *("trackio_static_space_id", "eval_strategy", "eval_steps", "eval_delay", "per_device_eval_batch_size"),
    *("prediction_loss_only", "eval_on_start", "eval_do_concat_batches", "eval_use_gather_object"),
    *("eval_accumulation_steps", "include_for_metrics", "batch_eval_metrics", "save_only_model"),
    *("save_strategy", "save_steps", "save_on_each_node", "save_total_limit", "enable_jit_checkpoint"),
    *("push_to_hub", "hub_token", "hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push"),
    *("hub_revision", "load_best_model_at_end", "metric_for_best_model", "greater_is_better"),
    *("ignore_data_skip", "restore_callback_states_from_checkpoint", "seed", "data_seed"),
    *("dataloader_drop_last", "dataloader_num_workers", "dataloader_pin_memory"),
    *("dataloader_persistent_workers", "dataloader_prefetch_factor", "dataloader_multiprocessing_context"),
    *("dataloader_in_order", "remove_unused_columns", "label_names", "train_sampling_strategy"),
    *("length_column_name", "ddp_backend", "ddp_timeout", "debug", "skip_memory_metrics", "do_train"),
    *("do_eval", "do_predict", "resume_from_checkpoint", "local_rank"),
})  # fmt: skip
"""Arguments that change no byte of a step of training; evaluation is not planned."""

FSDP_KEYS: Final = frozenset({
    *("version", "reshard_after_forward", "auto_wrap_policy", "transformer_layer_cls_to_wrap"),
    *("activation_checkpointing", "state_dict_type", "cpu_ram_efficient_loading", "cpu_offload"),
    *("min_num_params", "offload_params", "use_orig_params", "sync_module_states", "limit_all_gathers"),
    *("forward_prefetch", "backward_prefetch"),
})  # fmt: skip
"""Keys of `fsdp_config`, without their prefix."""

PREFETCHES: Final = {"pre": "BACKWARD_PRE", "post": "BACKWARD_POST", "none": "NO_PREFETCH"}
"""FSDP1's words for when it gathers the next unit."""


def read_arguments(text: str, model: Model) -> Read:
    """The keywords that a JSON object of arguments, or a line of them, says of a model.

    Raises:
        InvalidValue: neither, or an argument whose value has no rule, by name.
        UnknownName: an argument that TrainingArguments does not have, with the nearest name.
    """
    given = _of_line(text) if text.lstrip().startswith("--") else _object(text, "the file")
    known = {*USUAL, *AT_DEFAULT, *HARMLESS}
    for name, value in given.items():
        if name not in known:
            raise unknown_name("argument of TrainingArguments", name, known)
        if name in AT_DEFAULT and value not in (AT_DEFAULT[name], None):
            raise InvalidValue(
                f"{name}={shown_value(value)} has no rule yet; use {json.dumps(AT_DEFAULT[name])}, or leave "
                "it out."
            )
    said = {**USUAL} | {name: value for name, value in given.items() if name in USUAL and value is not None}
    keywords: dict[str, Any] = {
        "trainer": "huggingface",
        "implementation": "huggingface",
        "micro_batch": said["per_device_train_batch_size"],
        "optimizer": "adamw",
        "optimizer_impl": "fused",
        "clip_grad_norm": said["max_grad_norm"] or None,
    }
    if said["optim"] != USUAL["optim"]:
        raise InvalidValue(f"optim={shown_value(said['optim'])} has no rule yet; use {USUAL['optim']!r}.")
    if said["bf16"] and said["fp16"]:
        raise InvalidValue("At most one of fp16 and bf16 can be True, but not both; leave one out.")
    word = "bf16" if said["bf16"] else "fp16" if said["fp16"] else "fp32"
    mixed = {"bf16": "bf16-mixed", "fp16": "fp16-mixed", "fp32": "fp32"}
    keywords["precision"] = mixed[word]
    checkpoints = _checkpoints(said)
    if said["fsdp"]:
        keywords |= _fsdp(said, model)
        checkpoints = checkpoints or keywords.pop("activation_checkpointing")
        keywords["precision"] = "bf16-mixed-reduce-bf16" if word == "bf16" else mixed[word]
    elif said["ddp_bucket_cap_mb"] is not None:
        keywords["bucket_cap_bytes"] = int(said["ddp_bucket_cap_mb"]) * MiB
    keywords["recompute"] = "full" if checkpoints else "none"
    other = "in bfloat16: precision='bf16'" if word == "fp32" else "in bfloat16: precision='bf16-autocast'"
    note = f"Planned with weights in float32; from_pretrained keeps the checkpoint's type; {other}."
    return Read(
        keywords=keywords,
        n_micro_batches=said["gradient_accumulation_steps"],
        notes=() if said["fsdp"] and word != "fp32" else (note,),
    )


def _checkpoints(said: Mapping[str, Any]) -> bool:
    """Whether blocks are recomputed, by PyTorch's checkpoint that is not reentrant."""
    for prefix in ("activation", "gradient"):
        of = said[f"{prefix}_checkpointing_kwargs"] or {}
        of = _object(of, f"{prefix}_checkpointing_kwargs") if isinstance(of, str) else of
        if of not in ({}, {"use_reentrant": False}):
            raise InvalidValue(
                f"{prefix}_checkpointing_kwargs={shown_value(of)} has no rule yet; use "
                '{"use_reentrant": false}, or leave it out.'
            )
    return bool(said["activation_checkpointing"] or said["gradient_checkpointing"])


def _fsdp(said: Mapping[str, Any], model: Model) -> dict[str, Any]:
    """The keywords of `fsdp_config`."""
    if said["fsdp"] is not True:
        raise InvalidValue(f"fsdp={shown_value(said['fsdp'])} has no rule yet; use true, with fsdp_config.")
    config = said["fsdp_config"] or {}
    config = _object(config, "fsdp_config") if isinstance(config, str) else config
    config = {str(key).removeprefix("fsdp_"): value for key, value in config.items()}
    for key in config:
        if key not in FSDP_KEYS:
            raise unknown_name("key of fsdp_config", key, FSDP_KEYS)
    only = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "limit_all_gathers": True}
    for key, value in (only | {"cpu_offload": False, "offload_params": False}).items():
        if config.get(key, value) != value:
            raise InvalidValue(
                f"fsdp_config.{key}={shown_value(config[key])} has no rule yet; use {json.dumps(value)}."
            )
    checkpoints = {"activation_checkpointing": bool(config.get("activation_checkpointing"))}
    accumulation = (said["accelerator_config"] or {}).get("gradient_accumulation_kwargs") or {}
    no_sync = said["gradient_accumulation_steps"] > 1 and not accumulation.get("sync_each_batch")
    checkpoints["no_sync"] = no_sync
    if config.get("version", 2) == 1:
        return checkpoints | _fsdp1(config)
    if config.get("version", 2) != 2:
        raise InvalidValue(
            f"fsdp_config.version={shown_value(config['version'])} is not allowed; use 1 or 2."
        )
    return {
        "zero": 3 if config.get("reshard_after_forward", True) else 2,
        "fsdp_units": "block" if ends_are_tied(model) else "block+ends",
        **checkpoints,
    }


def _fsdp1(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of FSDP1's keys.

    Source: accelerate.utils.dataclasses (`FullyShardedDataParallelPlugin.__post_init__`: a strategy that is
    not said in the environment is FULL_SHARD, and goes before `reshard_after_forward`).
    """
    words = {word: value for value, word in PREFETCHES.items()}
    prefetch = str(config.get("backward_prefetch", "NO_PREFETCH")).upper()
    if prefetch not in words:
        raise InvalidValue(
            f"fsdp_config.backward_prefetch={shown_value(prefetch)} is not allowed; use {' or '.join(words)}."
        )
    if str(strategy := config.get("reshard_after_forward", "full_shard")).lower() != "full_shard":
        raise InvalidValue(
            f"fsdp_config.reshard_after_forward={shown_value(strategy)} has no effect on FSDP1: Accelerate "
            '1.15 takes FULL_SHARD all the same; use "full_shard".'
        )
    return {
        "zero": 3,
        "fsdp_version": 1,
        "backward_prefetch": words[prefetch],
        "use_orig_params": bool(config.get("use_orig_params", True)),
        "forward_prefetch": bool(config.get("forward_prefetch", False)),
    }


def _object(text: str, what: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise InvalidValue(f"{what} is no JSON ({reason(error)}); use one object of arguments.") from None
    if not isinstance(found, dict):
        raise InvalidValue(f"{what} is no JSON object; use one of TrainingArguments.")
    return found


def _of_line(text: str) -> dict[str, Any]:
    """The arguments of a line: a name without a value is true, `--no_NAME` false."""
    found: dict[str, Any] = {}
    name = ""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise InvalidValue(f"it is no line of arguments ({reason(error)}); close every quote.") from None
    for word in words:
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            name, is_on = (name[3:], False) if name.startswith("no_") else (name, True)
            found[name] = _value(value) if value else is_on
        elif not name:
            raise InvalidValue(f"{shown_value(word)} follows no argument; begin with --bf16, say.")
        else:
            found[name] = _value(word)
    return found


def _value(word: str) -> Any:
    """A number, a truth value or an object where the word is one."""
    try:
        return json.loads(word.lower() if word.lower() in ("true", "false") else word)
    except ValueError:
        return word
