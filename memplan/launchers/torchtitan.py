"""torchtitan 0.3: the flags of `torchtitan.train`; read back, also from the TOML of 0.1 and 0.2.

Since 0.3 a configuration is a Python function (`--config`), whose values flags override; there is no TOML.

Source: torchtitan/config/configs.py, models/llama3/config_registry.py, distributed/fsdp.py
(`apply_fsdp_to_decoder`), distributed/pipeline_parallel.py (`_generate_llm_fqn_per_model_part`), of 0.3.0;
TOML: torchtitan/config/job_config.py of 0.2.2.
"""

import shlex
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import Any, ClassVar, Final, final

from memplan.checks import checked_count
from memplan.engines.options import plan_dict
from memplan.errors import InvalidValue, shown_value, unknown_name
from memplan.fields import count_or_text, number_or_text
from memplan.launchers.base import Job, Launcher, Limit, Read
from memplan.launchers.torchrun import torchrun_command
from memplan.models import Model, preset
from memplan.models.families import implementations_of
from memplan.plan import Plan
from memplan.schedules import SCHEDULES

CONFIGS: Final[Mapping[str, tuple[str, str]]] = {
    "llama-3-8b": ("llama3_8b", "8B"),
    "llama-3-70b": ("llama3_70b", "70B"),
}
"""The functions of torchtitan's module llama3, and the flavors of earlier releases, by preset."""

OTHER_MODELS: Final = f"use {' or '.join(CONFIGS)}"
"""The way out of a model that torchtitan has not."""

OF_CONFIG: Final[Mapping[str, Mapping[str, Any]]] = {
    "llama3_8b": {
        "training.local_batch_size": 1,
        "training.seq_len": 8192,
        "activation_checkpoint.mode": "selective",
    },
    "llama3_70b": {
        "training.seq_len": 8192,
        "parallelism.tensor_parallel_degree": 8,
        "activation_checkpoint.mode": "full",
    },
}
"""What each function sets otherwise than `DEFAULTS`, of what `read` knows."""

DEFAULTS: Final[Mapping[str, Any]] = {
    "training.local_batch_size": 8,
    "training.global_batch_size": -1,
    "training.seq_len": 2048,
    "training.max_norm": 1.0,
    "training.enable_cpu_offload": False,
    "training.disable_cuda_graphs": False,
    "training.dtype": "float32",
    "training.mixed_precision_param": "bfloat16",
    "training.mixed_precision_reduce": "float32",
    "parallelism.data_parallel_replicate_degree": 1,
    "parallelism.data_parallel_shard_degree": -1,
    "parallelism.fsdp_reshard_after_forward": "default",
    "parallelism.tensor_parallel_degree": 1,
    "parallelism.enable_sequence_parallel": True,
    "parallelism.spmd_backend": "spmd_types",
    "parallelism.pipeline_parallel_degree": 1,
    "parallelism.pipeline_parallel_schedule": "1F1B",
    "parallelism.pipeline_parallel_layers_per_stage": None,
    "parallelism.pipeline_parallel_first_stage_less_layers": 1,
    "parallelism.pipeline_parallel_last_stage_less_layers": 1,
    "parallelism.pipeline_parallel_microbatch_size": 1,
    "optimizer.implementation": "fused",
    "optimizer.name": "AdamW",
    "activation_checkpoint.mode": "selective",
    "activation_checkpoint.selective_ac_option": "2",
    "loss.num_chunks": 8,
}
"""The settings that a plan has a word for, and their defaults; some are of one release only."""

ONLY: Final[Mapping[str, Any]] = {
    "compile.enable": False,
    "model.converters": [],
    "parallelism.context_parallel_degree": 1,
    "parallelism.expert_parallel_degree": 1,
    "parallelism.expert_tensor_parallel_degree": 1,
    "parallelism.enable_async_tensor_parallel": False,
    "parallelism.enable_fsdp_symm_mem": False,
    "parallelism.disable_loss_parallel": False,
    "optimizer.early_step_in_backward": False,
    "fault_tolerance.enable": False,
}
"""Settings that change memory and are planned at one value only."""

HARMLESS: Final = (
    *("job.", "profiling.", "profiler.", "metrics.", "lr_scheduler.", "checkpoint.", "comm.", "debug."),
    *(
        "validation.",
        "validator.",
        "dataloader.",
        "memory_estimation.",
        "experimental.",
        "training.dataloader.",
    ),
    *(
        "training.dataset",
        "training.steps",
        "training.gc_",
        "hf_assets_path",
        "dump_folder",
        "model.hf_assets_path",
    ),
    *("model.tokenizer_path", "model.print_after_conversion", "optimizer.lr", "optimizer.eps"),
    *("optimizer.weight_decay", "optimizer.beta", "compile.components", "compile.backend", "tokenizer."),
    *("activation_checkpoint.preserve_rng_state", "activation_checkpoint.determinism_check"),
    *("activation_checkpoint.debug", "activation_checkpoint.early_stop", "float8.", "quantize."),
)
"""How the names of settings begin that change no byte of a step; `quantize` needs a converter."""

KNOWN: Final = (*DEFAULTS, *ONLY, "model.name", "model.flavor")

OF_OCTOBER_2024: Final = (
    "The modules are planned as in torchtitan of October 2024. Those of 0.3 have one projection for queries, "
    "keys and values, and FlexAttention: no rule covers these yet."
)


@final
class Torchtitan(Launcher):
    """`torchtitan.train`."""

    file: ClassVar[str] = "train.sh"
    tells: ClassVar[tuple[str, ...]] = ("chunked_loss",)

    def limits(self, job: Job) -> Iterator[Limit]:
        model, plan = job.estimate.model, job.estimate.plan
        options = plan_dict(plan)
        if job.estimate.device.on_cpu:
            yield Limit("device='cpu': torchtitan trains on GPUs", {"device": None})
        if model.implementation != "torchtitan":
            why = f"implementation={model.implementation!r}: torchtitan trains its own modules"
            has_it = "torchtitan" in implementations_of(model)
            yield Limit(why, {"implementation": "torchtitan"} if has_it else OTHER_MODELS)
        elif _config_of(model) is None:
            why = f"{model.name}: torchtitan has no configuration of these sizes"
            yield Limit(why, OTHER_MODELS)
        if not plan.fsdp:
            why = f"zero={plan.zero}: torchtitan shards by FSDP2 in every plan"
            yield Limit(why, {"zero": 3, "fsdp_units": "block+ends"})
        elif options["fsdp_units"] != "block+ends":
            units = "torchtitan makes units of the blocks, the embedding and the head"
            yield Limit(f"fsdp_units={options['fsdp_units']!r}: {units}", {"fsdp_units": "block+ends"})
        if options["fsdp_blocks"] > 1:
            why = f"fsdp_blocks={options['fsdp_blocks']}: torchtitan shards each block"
            yield Limit(why, {"fsdp_blocks": 1})
        if plan.precision not in ("fp32", "bf16-mixed"):
            has = "torchtitan reduces gradients in float32 and has no loss scaler"
            yield Limit(f"precision={plan.precision!r}: {has}", {"precision": "bf16-mixed"})
        if plan.optimizer != "adamw":
            yield Limit(
                f"optimizer={plan.optimizer!r}: its configurations have AdamW", {"optimizer": "adamw"}
            )
        if plan.clip_grad_norm is None:
            why = "clip_grad_norm is left out: torchtitan clips in every step"
            yield Limit(why, {"clip_grad_norm": 1.0})
        if plan.recompute_blocks is not None:
            why = f"recompute_blocks={plan.recompute_blocks}: torchtitan recomputes all"
            yield Limit(why, {"recompute_blocks": None})
        if not options["set_to_none"]:
            yield Limit("set_to_none=False: torchtitan frees gradients", {"set_to_none": True})
        if plan.loss_chunks > 1 and not _chunks_head(plan):
            why = f"loss_chunks={plan.loss_chunks}: torchtitan's pieces include the head"
            yield Limit(why, {"chunked_loss": "ChunkedLossWrapper"})
        if plan.pp > 1:
            yield from _limits_of_pipelines(model, plan)

    def notes(self, job: Job) -> Iterator[str]:
        yield OF_OCTOBER_2024

    def text(self, job: Job, notes: tuple[str, ...]) -> str:
        flags = dict(_flags(job))
        lines = ["#!/usr/bin/env bash", *(f"# {line}" for line in job.comments(notes))]
        lines += [
            "# Start it on each node, with --hf_assets_path, --dataloader.dataset and other flags of yours."
        ]
        words = [
            torchrun_command(job, "-m torchtitan.train"),
            f"--module llama3 --config {_config_of(job.estimate.model)}",
        ]
        words += [_flag(name, value) for name, value in flags.items()]
        words += [f"activation-checkpoint:{job.estimate.plan.recompute}"]
        return "\n".join([*lines, " \\\n    ".join(words), ""])

    def read(self, text: str, model: Model | None) -> Read:
        said = _of_flags(text) if "--module" in text else _of_toml(text)
        return Read(keywords=said.keywords(), notes=tuple(said.notes()))


TORCHTITAN: Final = Torchtitan()


def _config_of(model: Model) -> str | None:
    """The function of a model's sizes; None if there is none."""
    sizes = {**model.sizes(), "name": ""}
    for name, (config, _) in CONFIGS.items():
        known = preset(name).sizes() | {"name": ""}
        if all(known.get(key, size) == size for key, size in sizes.items() if key != "max_seq_len"):
            return config
    return None


def _schedule_name(plan: Plan) -> str:
    """torchtitan's word for a schedule: PyTorch's class without "Schedule"."""
    return plan.pipeline_schedule.runs_as.partition(":Schedule")[2]


def _limits_of_pipelines(model: Model, plan: Plan) -> Iterator[Limit]:
    if plan.pipeline_schedule.stages_per_rank != 1 and plan.virtual_stages == 1:
        why = f"virtual_stages=1 with schedule={plan.schedule!r}: torchtitan wants 2 stages or more on a rank"
        yield Limit(why, {"virtual_stages": 2})
    elif _division(model, plan) is None:
        evenly = "torchtitan divides evenly, with fewer in the first and the last stage"
        yield Limit(f"layers_per_stage={plan.layers_per_stage}: {evenly}", {"layers_per_stage": None})


def _division(model: Model, plan: Plan) -> tuple[int, int, int] | None:
    """Fewer layers in the first and the last stage, and layers a stage, that make the plan's stages."""
    for first in range(5):
        for last in range(5):
            each = ceil((model.n_blocks + first + last) / plan.n_stages)
            if ceil((model.n_blocks + first + last) / each) == plan.n_stages and stages_of_layers(
                model.n_blocks, plan.n_stages, first, last
            ) == (plan.layers_per_stage or stages_of_layers(model.n_blocks, plan.n_stages, 0, 0)):
                return first, last, each
    return None


def stages_of_layers(n_layers: int, n_stages: int, first: int, last: int) -> tuple[int, ...]:
    """The blocks of each stage as torchtitan divides them, with `first` and `last` fewer at the ends.

    >>> stages_of_layers(32, 4, 1, 1)
    (8, 9, 8, 7)
    """
    each, odd = divmod(n_layers + first + last, n_stages)
    wanted = [each + (stage < odd) for stage in range(n_stages)]
    wanted[0] -= first
    wanted[-1] -= last
    return tuple(wanted)


def _flags(job: Job) -> Iterator[tuple[str, Any]]:
    """The settings that a plan decides, by name."""
    plan, options = job.estimate.plan, plan_dict(job.estimate.plan)
    implementation = options["optimizer_impl"]
    n_local = plan.micro_batch * (plan.n_micro_batches if plan.pp > 1 else 1)
    yield "training.local_batch_size", n_local
    yield "training.global_batch_size", plan.global_batch
    yield "training.seq_len", plan.seq_len
    yield "training.max_norm", plan.clip_grad_norm
    yield "training.mixed_precision_param", "bfloat16" if plan.mixed else "float32"
    yield "training.enable_cpu_offload", plan.offload
    yield "training.disable_cuda_graphs", True
    yield "parallelism.data_parallel_replicate_degree", plan.dp_replicate
    yield "parallelism.data_parallel_shard_degree", plan.dp
    yield "parallelism.fsdp_reshard_after_forward", "always" if plan.zero == 3 else "never"
    yield "parallelism.tensor_parallel_degree", plan.tp
    yield "parallelism.enable_sequence_parallel", plan.sequence_parallel
    yield "parallelism.spmd_backend", "partial_dtensor"
    yield "parallelism.pipeline_parallel_degree", plan.pp
    if plan.pp > 1 and (division := _division(job.estimate.model, plan)) is not None:
        first, last, each = division
        yield "parallelism.pipeline_parallel_schedule", _schedule_name(plan)
        yield "parallelism.pipeline_parallel_microbatch_size", plan.micro_batch
        yield "parallelism.pipeline_parallel_layers_per_stage", each
        yield "parallelism.pipeline_parallel_first_stage_less_layers", first
        yield "parallelism.pipeline_parallel_last_stage_less_layers", last
    yield "optimizer.implementation", "foreach" if implementation == "default" else implementation
    yield "loss.num_chunks", plan.loss_chunks if _chunks_head(plan) else 1


def _chunks_head(plan: Plan) -> bool:
    """Whether torchtitan's loss computes the logits in pieces."""
    return bool(plan_dict(plan)["chunked_loss"] == "ChunkedLossWrapper")


def _flag(name: str, value: Any) -> str:
    """A setting as a flag: one that is False has "no-" before its last word."""
    section, _, own = name.rpartition(".")
    if isinstance(value, bool):
        return f"--{name}" if value else f"--{section}.no-{own}"
    return f"--{name} {value}"


# --- The way back ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """The settings of a file, by name, over the defaults of their release."""

    model: str
    values: Mapping[str, Any]
    ranks: int | None = None
    since_03: bool = True
    of_file: frozenset[str] = field(default_factory=frozenset)

    def count(self, name: str, least: int = 1) -> int:
        return checked_count(name, count_or_text(self.values[name]), least=least)

    def one_of(self, name: str, *allowed: str) -> str:
        if (found := self.values[name]) not in allowed:
            raise InvalidValue(f"{name}={shown_value(found)} is not planned; use {' or '.join(allowed)}.")
        return str(found)

    def flag(self, name: str) -> bool:
        if not isinstance(found := self.values[name], bool):
            raise InvalidValue(f"{name}={shown_value(found)} is not allowed; use true or false.")
        return found

    def keywords(self) -> dict[str, Any]:
        """The keywords of `memplan.estimate`."""
        self.one_of("training.dtype", "float32")
        compute = self.one_of("training.mixed_precision_param", "bfloat16", "float32")
        pp, tp = (
            self.count("parallelism.pipeline_parallel_degree"),
            self.count("parallelism.tensor_parallel_degree"),
        )
        found: dict[str, Any] = {
            "model": self.model,
            "implementation": "torchtitan",
            "precision": "bf16-mixed" if compute == "bfloat16" else "fp32",
            "seq_len": self.count("training.seq_len"),
            "clip_grad_norm": number_or_text(str(self.values["training.max_norm"])),
            "offload": self.flag("training.enable_cpu_offload"),
            "optimizer": {"AdamW": "adamw", "Adam": "adam"}[self.one_of("optimizer.name", "AdamW", "Adam")],
            "optimizer_impl": self.one_of("optimizer.implementation", "fused", "foreach", "for-loop"),
            "recompute": self._recompute(),
            "pp": pp,
            "tp": tp,
            "sequence_parallel": tp > 1 and self.flag("parallelism.enable_sequence_parallel"),
            **self._data_axes(pp, tp),
        }
        if pp > 1:
            found |= self._stages(pp)
        if self._plans_chunks:
            found |= {"chunked_loss": "ChunkedLossWrapper", "loss_chunks": self.count("loss.num_chunks")}
        return found | self._batch(found)

    @property
    def _plans_chunks(self) -> bool:
        """Whether its loss in pieces, which 0.3 has, is planned."""
        axes = ("parallelism.pipeline_parallel_degree", "parallelism.tensor_parallel_degree")
        alone = all(self.count(axis) == 1 for axis in axes)
        keeps = self.values["parallelism.fsdp_reshard_after_forward"] == "never"
        offloads = self.flag("training.enable_cpu_offload")
        several = self.count("loss.num_chunks") > 1
        return self.since_03 and several and alone and not keeps and not offloads

    def _recompute(self) -> str:
        mode = self.one_of("activation_checkpoint.mode", "none", "selective", "full")
        option = str(self.values["activation_checkpoint.selective_ac_option"])
        if mode == "selective" and not self.since_03 and option != "op":
            raise InvalidValue(
                f"activation_checkpoint.selective_ac_option={option!r} recomputes some of the blocks, "
                "which is not planned; use 'op', or mode = 'full' or 'none'."
            )
        return mode

    def _data_axes(self, pp: int, tp: int) -> dict[str, Any]:
        """The data axes, and the ZeRO stage."""
        replicas = self.count("parallelism.data_parallel_replicate_degree")
        shards = count_or_text(self.values["parallelism.data_parallel_shard_degree"])
        if shards == -1 and self.ranks is not None:
            others = pp * tp * replicas
            if self.ranks % others:
                raise InvalidValue(f"the {self.ranks} ranks are no multiple of the other axes' {others}.")
            shards = self.ranks // others
        if shards == 1 and replicas > 1 and not self.since_03:
            return {"dp": replicas, "zero": 0}
        policy = self.one_of("parallelism.fsdp_reshard_after_forward", "default", "always", "never")
        kept = policy == "never" or (policy == "default" and pp > 1)
        axes: dict[str, Any] = {"zero": 2 if kept else 3, "fsdp_units": "block+ends"}
        if shards != -1:
            axes["dp"] = checked_count("parallelism.data_parallel_shard_degree", shards)
        return axes | ({"dp_replicate": replicas} if replicas > 1 else {})

    def _stages(self, pp: int) -> dict[str, Any]:
        """The pipeline's schedule, and its stages."""
        names = {SCHEDULES.named(name).runs_as.partition(":Schedule")[2]: name for name in SCHEDULES.own}
        word = str(self.values["parallelism.pipeline_parallel_schedule"])
        by_word = {name.lower(): name for name in names}
        if word.lower() not in by_word:
            raise unknown_name("pipeline_parallel_schedule", word, names)
        schedule = names[by_word[word.lower()]]
        n_layers = preset(self.model).n_blocks
        first = self.count("parallelism.pipeline_parallel_first_stage_less_layers", least=0)
        last = self.count("parallelism.pipeline_parallel_last_stage_less_layers", least=0)
        n_stages = pp * (1 if SCHEDULES.named(schedule).stages_per_rank == 1 else 2)
        if self.values["parallelism.pipeline_parallel_layers_per_stage"] is not None:
            each = self.count("parallelism.pipeline_parallel_layers_per_stage")
            n_stages = ceil((n_layers + first + last) / each)
        layers = stages_of_layers(n_layers, n_stages, first, last)
        stages: dict[str, Any] = {"schedule": schedule, "virtual_stages": n_stages // pp}
        even = layers == stages_of_layers(n_layers, n_stages, 0, 0)
        return stages if even else stages | {"layers_per_stage": layers}

    def _batch(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """The micro-batch, and the global batch where the file says it."""
        n_local = self.count("training.local_batch_size")
        micro = self.count("parallelism.pipeline_parallel_microbatch_size") if found["pp"] > 1 else n_local
        batch = {"micro_batch": micro}
        if (whole := count_or_text(self.values["training.global_batch_size"])) != -1:
            return batch | {"global_batch": checked_count("training.global_batch_size", whole)}
        if "dp" in found:
            return batch | {"global_batch": n_local * found["dp"] * found.get("dp_replicate", 1)}
        if found["pp"] > 1:
            raise InvalidValue(
                "data_parallel_shard_degree=-1 leaves open how many micro-batches a pipeline has; set "
                "training.global_batch_size."
            )
        return batch

    def notes(self) -> Iterator[str]:
        """What torchtitan does otherwise than is planned."""
        policy = self.values["parallelism.fsdp_reshard_after_forward"]
        if policy == "default":
            yield "fsdp_reshard_after_forward is default: the head stays gathered, which is not planned."
        if not self.since_03:
            return
        yield OF_OCTOBER_2024
        if not self.values["training.disable_cuda_graphs"]:
            yield "CUDA graphs, which 0.3 uses unless --training.disable_cuda_graphs, are not planned."
        if self.values["loss.num_chunks"] != 1 and not self._plans_chunks:
            yield "The loss is planned with all logits at once: more than torchtitan's pieces of it hold."


def _checked(values: dict[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The settings over their defaults; raises for those that change memory and have no rule."""
    for name, value in values.items():
        if name in ONLY:
            if str(value) != str(ONLY[name]):
                raise InvalidValue(
                    f"{name}={shown_value(value)} changes memory and is not planned; remove it."
                )
        elif name not in KNOWN and not name.startswith(HARMLESS):
            raise unknown_name("setting of torchtitan", name, KNOWN)
    return {**DEFAULTS, **defaults, **values}


def _of_toml(text: str) -> Said:
    """The settings of a TOML of torchtitan 0.1 or 0.2."""
    try:
        values = dict(_flattened(tomllib.loads(text)))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InvalidValue(
            f"is neither flags of torchtitan.train nor TOML ({shown_value(str(error), 120)})."
        ) from None
    flavors = {flavor: name for name, (_, flavor) in CONFIGS.items()}
    flavor = str(values.get("model.flavor", "debugmodel"))
    if values.get("model.name", "llama3") != "llama3" or flavor not in flavors:
        shown = f"model.name={shown_value(values.get('model.name'))}, flavor={shown_value(flavor)}"
        raise InvalidValue(f"{shown} is no model that is planned so; use llama3 and {' or '.join(flavors)}.")
    return Said(model=flavors[flavor], values=_checked(values, {}), since_03=False)


def _flattened(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flattened(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _of_flags(text: str) -> Said:
    """The settings of a command of torchtitan 0.3."""
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise InvalidValue(
            f"is no command line ({error}); use a line of flags of torchtitan.train."
        ) from None
    values: dict[str, Any] = {}
    ranks = {"nnodes": 1, "nproc_per_node": 1}
    said: set[str] = set()
    at = iter([*words, "--"])
    word = next(at)
    while word != "--":
        following = next(at)
        if word.startswith("activation-checkpoint:"):
            values["activation_checkpoint.mode"] = word.partition(":")[2]
        elif word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            if (
                not equals
                and not following.startswith("--")
                and not following.startswith("activation-checkpoint:")
            ):
                value, following = following, next(at)
                equals = "="
            off = ".no_" in name
            name = name.replace(".no_", ".")
            values[name] = value if equals else not off
            said.add(name)
        word = following
    for key in ranks:
        ranks[key] = checked_count(key, count_or_text(values.pop(key, 1)))
    for key in ("rdzv_backend", "rdzv_endpoint", "standalone"):
        values.pop(key, None)
    module, config = values.pop("module", None), values.pop("config", None)
    presets = {name: preset_name for preset_name, (name, _) in CONFIGS.items()}
    if module != "llama3" or config not in presets:
        raise InvalidValue(
            f"--module {module} --config {config} is no model that is planned so; use --module llama3 "
            f"--config {' or '.join(presets)}."
        )
    typed = {name: _typed(value) for name, value in values.items()}
    n = ranks["nnodes"] * ranks["nproc_per_node"]
    return Said(
        model=presets[config],
        values=_checked(typed, OF_CONFIG[config]),
        ranks=n if said & {"nnodes", "nproc_per_node"} else None,
    )


def _typed(value: Any) -> Any:
    """A flag's value: a number if it is one."""
    if not isinstance(value, str):
        return value
    return number_or_text(value) if "." in value else count_or_text(value)
