"""Accelerate 1.15: the YAML of `accelerate launch`, and what the training script has to say itself.

Source: accelerate/utils/fsdp_utils.py (`fsdp2_prepare_model`, `fsdp2_apply_ac`), utils/dataclasses.py
(`FullyShardedDataParallelPlugin`), accelerator.py (`prepare_model`, `no_sync`), parallelism_config.py.
"""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Final, final

from memplan.checks import checked_count
from memplan.engines.options import plan_dict
from memplan.errors import InvalidValue, shown_value, unknown_name
from memplan.launchers.base import Job, Launcher, Limit, Read, yaml_values
from memplan.models import Decoder, Model, ends_are_tied
from memplan.models.families import implementations_of
from memplan.plan import Plan
from memplan.units import MiB, human_bytes

MIXED: Final = {
    **dict.fromkeys(("fp32", "bf16"), "no"),
    **dict.fromkeys(("bf16-mixed", "bf16-mixed-reduce-bf16", "bf16-autocast"), "bf16"),
    "fp16-mixed": "fp16",
}
"""Accelerate's word for each precision; "no" takes the weights as the script has loaded them."""

READ_MIXED: Final = {"no": "fp32", "bf16": "bf16-mixed", "fp16": "fp16-mixed"}
"""The precision of each of Accelerate's words; "no" with a model in bfloat16 is "bf16"."""

SIZES: Final = {
    "dp_replicate_size": "dp_replicate", "dp_shard_size": "dp", "cp_size": "cp", "tp_size": "tp",
}  # fmt: skip
"""Keys of `parallelism_config`, without their prefix, and the mesh axes that they are."""

HARMLESS: Final = frozenset({
    *("compute_environment", "use_cpu", "debug", "machine_rank", "num_machines", "gpu_ids"),
    *("main_process_ip",),
    *("main_process_port", "rdzv_backend", "same_network", "main_training_function", "enable_cpu_affinity"),
    *("downcast_bf16", "tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "command_file", "commands"),
    *("tpu_vm", "tpu_env", "mpirun_config"),
})  # fmt: skip
"""Keys that change no byte of a GPU."""

HARMLESS_OF_FSDP: Final = frozenset({
    *("state_dict_type", "cpu_ram_efficient_loading", "sync_module_states", "use_orig_params"),
    *("forward_prefetch", "backward_prefetch", "sharding_strategy", "min_num_params"),
})  # fmt: skip
"""Keys of `fsdp_config`, without their prefix, that change no byte of a step under FSDP2."""

NOT_PLANNED: Final = ("deepspeed_config", "megatron_lm_config", "fp8_config", "dynamo_config")
"""Sections that change memory, and that no rule covers."""


def limits_of(job: Job, who: str) -> Iterator[Limit]:
    """What of a plan Accelerate, or what runs on it, cannot be told."""
    model, plan = job.estimate.model, job.estimate.plan
    options = plan_dict(plan)
    if job.estimate.device.on_cpu:
        yield Limit(f"device='cpu': {who} is told of GPUs here", {"device": None})
    if plan.precision not in MIXED:
        why = f"precision={plan.precision!r}: {who} has no word for it"
        yield Limit(why, {"precision": "bf16-mixed"})
    if plan.pp > 1:
        yield Limit(f"pp={plan.pp}: {who} trains no pipelines", {"pp": 1})
    if plan.tp > 1:
        divided = "modules that transformers has divided, which has no rule"
        yield Limit(
            f"tp={plan.tp}: {who} takes {divided}",
            {"tp": 1} | ({"sequence_parallel": None} if plan.sequence_parallel else {}),
        )
    if plan.ep > 1:
        yield Limit(f"ep={plan.ep}: {who} divides no experts", {"ep": 1})
    if plan.cp > 1 and not (plan.fsdp and options["fsdp_version"] == 2):
        sharded = {"zero": max(plan.zero, 2), "fsdp_version": 2}
        yield Limit(f"cp={plan.cp}: in {who} 'Using `cp_size>1` requires FSDP2'", sharded)
    if plan.zero == 1:
        yield Limit(f"zero=1: {who} has no ZeroRedundancyOptimizer", {"zero": 2})
    if plan.recompute == "selective":
        yield Limit(f"recompute='selective': {who} recomputes whole blocks", {"recompute": "full"})
    if plan.recompute_blocks is not None:
        why = f"recompute_blocks={plan.recompute_blocks}: {who} recomputes all blocks or none"
        yield Limit(why, {"recompute_blocks": None})
    if not isinstance(model, Decoder):
        if plan.fsdp:
            units = "its units are the classes of its _no_split_modules, which a trace does not have"
            yield Limit(f"zero={plan.zero} of {model.name}: {units}", {"zero": 0})
        return
    if model.implementation != "huggingface":
        why = f"implementation={model.implementation!r}: {who} trains transformers' modules"
        yield Limit(why, {"implementation": "huggingface"})
    if plan.fsdp and options["fsdp_units"] != units_of(model):
        units = "units of each block, of the embedding, and of the last norm with the head"
        why = f"fsdp_units={options['fsdp_units']!r}: {who} makes {units}"
        yield Limit(why, {"fsdp_units": units_of(model)})
    if options["fsdp_blocks"] > 1:
        yield Limit(
            f"fsdp_blocks={options['fsdp_blocks']}: {who} makes a unit of each block", {"fsdp_blocks": 1}
        )


def units_of(model: Model) -> str:
    """The plan's word for Accelerate's units.

    It shards each block, the embedding, and the last norm with the head. A tied head is one unit with the
    embedding and the norm, which stays gathered; so does the root that fsdp_units="block" leaves them to.
    """
    return "block" if ends_are_tied(model) else "block+ends"


def differences(job: Job, who: str) -> Iterator[str]:
    """What Accelerate does otherwise than a plan says, whatever it is told."""
    model, plan = job.estimate.model, job.estimate.plan
    if not isinstance(model, Decoder):
        return
    if plan.zero == 3 and units_of(model) == "block+ends":
        kept = model.vocab_size * model.d_model * plan.formats.gather.itemsize
        yield (
            f"{who} keeps the head gathered from its forward to its backward pass, the plan does not: up to "
            f"{human_bytes(kept)} more."
        )
    if plan.zero == 3 and ends_are_tied(model):
        yield (
            f"{who} gathers the tied embedding and head in a unit of their own, the plan in the root, which "
            "gathers the last block before the loss's backward pass: up to a gathered block less."
        )
    if plan.ddp and plan.mixed:
        copied = plan.micro_batch * plan.seq_len * model.vocab_size * 4
        yield (
            f"{who} returns the logits in float32 too: {human_bytes(copied)} more while the outputs are held "
            "beside the loss."
        )


@final
class Accelerate(Launcher):
    """`accelerate launch`."""

    file: ClassVar[str] = "accelerate.yaml"

    def limits(self, job: Job) -> Iterator[Limit]:
        yield from limits_of(job, "Accelerate")

    def notes(self, job: Job) -> Iterator[str]:
        yield from differences(job, "Accelerate")

    def text(self, job: Job, notes: tuple[str, ...]) -> str:
        plan = job.estimate.plan
        lines = [f"# {line}" for line in job.comments(notes)]
        lines += ["# Start it on each node: accelerate launch --config_file accelerate.yaml train.py"]
        lines += ["# What only the training script can say:", *(f"#   {line}" for line in _of_script(plan))]
        kind = "FSDP" if plan.fsdp else "MULTI_GPU" if plan.world_size > 1 else "'NO'"
        lines += ["compute_environment: LOCAL_MACHINE", f"distributed_type: {kind}"]
        word = MIXED[plan.precision]
        lines += [f"mixed_precision: {repr(word) if word == 'no' else word}"]
        lines += [f"num_machines: {job.nodes}", f"num_processes: {plan.world_size}"]
        if job.nodes > 1:
            lines += [
                "machine_rank: 0  # of this node",
                "main_process_ip: HEAD_NODE",
                "main_process_port: 29500",
            ]
        if plan.fsdp:
            lines += ["fsdp_config:"]
            lines += [f"  fsdp_{name}: {value}" for name, value in _of_fsdp(plan).items()]
        if plan.dp_replicate > 1 or plan.cp > 1:
            lines += ["parallelism_config:"]
            sizes = {key: getattr(plan, axis) for key, axis in SIZES.items()}
            if plan.cp > 1:
                sizes |= {"cp_comm_strategy": plan_dict(plan)["cp_rotate_method"]}
            lines += [f"  parallelism_config_{key}: {size}" for key, size in sizes.items()]
        return "\n".join([*lines, ""])

    def read(self, text: str, model: Model | None) -> Read:
        if model is None:
            raise InvalidValue("names no model; give one beside it, as in llama-3-8b.")
        values = yaml_values(text, "a file of accelerate config")
        _check_keys(values)
        fsdp = _without_prefix(values.get("fsdp_config"), "fsdp_")
        sizes = _without_prefix(values.get("parallelism_config"), "parallelism_config_")
        kind = str(values.get("distributed_type")).upper()
        strategy = _strategy(fsdp) if str(fsdp.get("version", 1)) == "1" else ""
        keywords: dict[str, Any] = {}
        notes: list[str] = []
        if kind == "FSDP":
            keywords, notes = _read_fsdp(fsdp, model)
        elif kind not in ("MULTI_GPU", "NO"):
            raise InvalidValue(
                f"distributed_type={shown_value(values.get('distributed_type'))} is not planned; use FSDP, "
                "MULTI_GPU or 'NO' (in quotes: YAML takes NO for false)."
            )
        word = str(values.get("mixed_precision") or "no").lower().replace("false", "no")
        if word not in READ_MIXED:
            raise InvalidValue(f"mixed_precision={word!r} is not planned; use {', '.join(READ_MIXED)}.")
        keywords["precision"] = READ_MIXED[word]
        if word == "no":
            notes.append(
                "mixed_precision is no: planned with weights in float32; if the script loads them in "
                "bfloat16, say precision='bf16'."
            )
        if kind == "FSDP" and word != "no":
            keywords["precision"] = {"bf16": "bf16-mixed-reduce-bf16"}.get(word, keywords["precision"])
            dtype, planned = {"bf16": ("bfloat16", "so"), "fp16": ("float16", "in float32")}[word]
            notes.append(
                f"Accelerate reduces gradients in {dtype} unless the script has another "
                f"mixed_precision_policy; planned {planned}."
            )
        if "huggingface" in implementations_of(model):
            keywords["implementation"] = "huggingface"
        keywords |= _read_mesh(values, sizes, kind)
        if keywords.get("fsdp_version") == 1:
            keywords |= _read_replicas(keywords, values, strategy)
            notes.append(
                "Accelerate runs FSDP1 under autocast and returns outputs in float32; planned without both."
            )
        return Read(keywords=keywords, notes=tuple(notes))


ACCELERATE: Final = Accelerate()


def _of_fsdp(plan: Plan) -> Mapping[str, str]:
    """The values of `fsdp_config`, without their prefix."""
    flags = {
        "reshard_after_forward": plan.zero == 3,
        "offload_params": plan.offload,
        "activation_checkpointing": plan.recompute == "full",
    }
    words = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "state_dict_type": "SHARDED_STATE_DICT"}
    return {"version": "2", **words, **{name: str(value).lower() for name, value in flags.items()}}


def _of_script(plan: Plan) -> Iterator[str]:
    """What the training script says of a plan."""
    options, n = plan_dict(plan), plan.n_micro_batches
    chosen = "" if options["optimizer_impl"] == "default" else f" ({options['optimizer_impl']})"
    yield f"batches of {plan.micro_batch} x {plan.seq_len} tokens; {plan.optimizer}{chosen}"
    if plan.precision == "bf16":
        yield "the model loaded with dtype=torch.bfloat16"
    if n > 1:
        each = ", sync_each_batch=True" if plan.fsdp and not options["no_sync"] else ""
        yield f"Accelerator(gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps={n}{each}))"
    if plan.clip_grad_norm is not None:
        yield f"accelerator.clip_grad_norm_(model.parameters(), {plan.clip_grad_norm:g})"
    if plan.fsdp and plan.mixed and plan.formats.reduce != plan.formats.gather:
        casts = f"param_dtype=torch.{plan.formats.gather.name}, reduce_dtype=torch.{plan.formats.reduce.name}"
        yield f"policy = MixedPrecisionPolicy({casts})"
        yield "Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(mixed_precision_policy=policy))"
        yield f"  (without this policy gradients are reduced in {plan.formats.gather.name})"
    if plan.recompute == "full" and not plan.fsdp:
        yield 'model.gradient_checkpointing_enable({"use_reentrant": False})'
    handler = [f"{name}=True" for name in ("gradient_as_bucket_view", "static_graph") if options[name]]
    if options["bucket_cap_bytes"] is not None:
        handler += [f"bucket_cap_mb={options['bucket_cap_bytes'] / MiB:g}"]
    if options["ddp_comm_hook"] != "none":
        name = {"powersgd": "POWER_SGD"}.get(options["ddp_comm_hook"], options["ddp_comm_hook"].upper())
        handler += [f"comm_hook=DDPCommunicationHookType.{name}"]
    if handler:
        yield f"Accelerator(kwargs_handlers=[DistributedDataParallelKwargs({', '.join(handler)})])"
    if not options["set_to_none"]:
        yield "optimizer.zero_grad(set_to_none=False)"


def _check_keys(values: Mapping[str, Any]) -> None:
    """Raise for sections that change memory and have no rule, and for unknown keys."""
    known = {
        *HARMLESS,
        "distributed_type",
        "mixed_precision",
        "num_processes",
        "fsdp_config",
        "parallelism_config",
    }
    for key, value in values.items():
        if key in NOT_PLANNED:
            if value and value != {"dynamo_backend": "NO"}:
                raise InvalidValue(
                    f"{key}={shown_value(value, 80)} changes memory and is not planned; remove it."
                )
        elif key not in known:
            raise unknown_name("setting of Accelerate", key, {*known, *NOT_PLANNED})


def _without_prefix(section: object, prefix: str) -> dict[str, Any]:
    if not isinstance(section, dict | None):
        raise InvalidValue(f"{prefix}...: {shown_value(section)} is no section; use keys and values.")
    return {str(key).removeprefix(prefix): value for key, value in (section or {}).items()}


def _flag(name: str, value: object) -> bool:
    """A flag, or its word."""
    words = {"true": True, "false": False}
    if (found := words.get(str(value).lower())) is None:
        raise InvalidValue(f"{name}={shown_value(value)} is not allowed; use true or false.")
    return found


def _read_fsdp(fsdp: dict[str, Any], model: Model) -> tuple[dict[str, Any], list[str]]:
    """The keywords of `fsdp_config`, and notes; gradients are accumulated under `Accelerator.no_sync`."""
    version = fsdp.pop("version", 1)
    if str(version) not in ("1", "2"):
        raise InvalidValue(f"fsdp_version={shown_value(version)} is not allowed; use 1 or 2.")
    policy = fsdp.pop("auto_wrap_policy", "NO_WRAP")
    if policy != "TRANSFORMER_BASED_WRAP":
        raise InvalidValue(
            f"fsdp_auto_wrap_policy={shown_value(policy)} is not planned; use TRANSFORMER_BASED_WRAP."
        )
    if _flag("fsdp_activation_checkpointing_offload", fsdp.pop("activation_checkpointing_offload", False)):
        raise InvalidValue("fsdp_activation_checkpointing_offload=true is not planned; use false.")
    notes = []
    if classes := fsdp.pop("transformer_layer_cls_to_wrap", None):
        notes.append(
            f"fsdp_transformer_layer_cls_to_wrap={shown_value(classes)}: taken for the blocks' class."
        )
    if fsdp.pop("ignored_modules", None):
        raise InvalidValue(
            "fsdp_ignored_modules leaves modules out of FSDP2, which is not planned; remove it."
        )
    offload = _flag("fsdp_offload_params", fsdp.pop("offload_params", False))
    keywords: dict[str, Any] = {"offload": offload, "no_sync": True}
    if str(version) == "1":
        keywords |= _read_fsdp1(fsdp)
    else:
        reshards = _flag("fsdp_reshard_after_forward", fsdp.pop("reshard_after_forward", True))
        keywords |= {"zero": 3 if reshards else 2, "fsdp_units": units_of(model)}
    if _flag("fsdp_activation_checkpointing", fsdp.pop("activation_checkpointing", False)):
        keywords["recompute"] = "full"
    for key in fsdp:
        if key not in HARMLESS_OF_FSDP:
            raise InvalidValue(f"fsdp_{key}={shown_value(fsdp[key])} is not known; remove it.")
    if not isinstance(model, Decoder):
        raise InvalidValue(
            "shards by the classes of a module's _no_split_modules, which a trace does not have; use a model "
            "of a family (memplan models)."
        )
    return keywords, notes


STRATEGIES: Final = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "HYBRID_SHARD": 3, "HYBRID_SHARD_ZERO2": 2}
"""The ZeRO stage of each of FSDP1's strategies."""

STRATEGY_NUMBERS: Final = {
    "1": "FULL_SHARD",
    "2": "SHARD_GRAD_OP",
    "4": "HYBRID_SHARD",
    "5": "HYBRID_SHARD_ZERO2",
}
"""The numbers that Accelerate takes for them."""

PREFETCHES: Final = {"BACKWARD_PRE": "pre", "BACKWARD_POST": "post", "NO_PREFETCH": "none", "NONE": "none"}
"""The plan's words for Accelerate's."""


def _strategy(fsdp: Mapping[str, Any]) -> str:
    """FSDP1's strategy by its name, however it is said."""
    asked = fsdp.get("sharding_strategy") or fsdp.get("reshard_after_forward") or "FULL_SHARD"
    return STRATEGY_NUMBERS.get(str(asked), str(asked).upper())


def _read_replicas(keywords: Mapping[str, Any], values: Mapping[str, Any], strategy: str) -> dict[str, int]:
    """The ranks that shard, and their replicas: a hybrid strategy shards within each machine.

    Source: `torch.distributed.fsdp._init_utils:_init_intra_and_inter_node_groups`.
    """
    if keywords.get("dp_replicate", 1) > 1:
        raise InvalidValue(
            "parallelism_config_dp_replicate_size is of FSDP2; use fsdp_version: 2, or HYBRID_SHARD."
        )
    if not strategy.startswith("HYBRID"):
        return {}
    n, machines = keywords["dp"], checked_count("num_machines", values.get("num_machines", 1))
    if n % machines:
        raise InvalidValue(f"num_processes={n} is no multiple of num_machines={machines}; make it one.")
    return {"dp": n // machines, "dp_replicate": machines}


def _read_fsdp1(fsdp: dict[str, Any]) -> dict[str, Any]:
    """The keywords of FSDP1's settings."""
    strategy = _strategy(fsdp)
    if strategy not in STRATEGIES:
        raise InvalidValue(
            f"fsdp_sharding_strategy={shown_value(strategy)} is not planned; use {', '.join(STRATEGIES)}."
        )
    for name in ("sharding_strategy", "reshard_after_forward"):
        fsdp.pop(name, None)
    prefetch = str(fsdp.pop("backward_prefetch", None) or "BACKWARD_PRE").upper()
    if prefetch not in PREFETCHES:
        raise InvalidValue(
            f"fsdp_backward_prefetch={shown_value(prefetch)} is not allowed; use {', '.join(PREFETCHES)}."
        )
    return {
        "fsdp_version": 1,
        "zero": STRATEGIES[strategy],
        "backward_prefetch": PREFETCHES[prefetch],
        "use_orig_params": _flag("fsdp_use_orig_params", fsdp.pop("use_orig_params", True)),
        "forward_prefetch": _flag("fsdp_forward_prefetch", fsdp.pop("forward_prefetch", False)),
    }


def _read_mesh(values: Mapping[str, Any], sizes: dict[str, Any], kind: str) -> dict[str, int]:
    """The mesh axes."""
    n = checked_count("num_processes", values.get("num_processes", 1))
    if kind == "NO" and n > 1:
        raise InvalidValue(f"num_processes={n} contradicts distributed_type=NO; use MULTI_GPU, or 1.")
    if kind != "FSDP":
        if sizes:
            raise InvalidValue("parallelism_config needs distributed_type FSDP; remove it, or use FSDP.")
        return {"dp": n}
    for key, value in sizes.items():
        if key == "sp_size" and value not in (None, 1):
            raise InvalidValue(f"parallelism_config_{key}={shown_value(value)} is not planned; use 1.")
        if key not in (*SIZES, "cp_size", "sp_size", "cp_backend", "sp_backend", "cp_comm_strategy"):
            raise unknown_name("setting of parallelism_config", key, SIZES)
    given = {
        axis: checked_count(key, sizes[key]) for key, axis in SIZES.items() if sizes.get(key) is not None
    }
    others = given.get("dp_replicate", 1) * given.get("cp", 1) * given.get("tp", 1)
    if n % others or given.get("dp", n // others) * others != n:
        raise InvalidValue(f"parallelism_config's sizes are not num_processes={n}; make their product {n}.")
    if given.get("cp", 1) > 1 and "cp_comm_strategy" in sizes:
        given |= {"cp_rotate_method": sizes["cp_comm_strategy"]}
    return {**given, "dp": n // others}
