"""An engine's own options: flat keywords beside a plan's fields, kept in a frozen value of the engine's type.

An engine names the value's type in `Engine.options`: a frozen dataclass, each of whose fields is `described`
(see `memplan.fields`). From that follow the flags of the command line, the checks, the columns of a search,
the names of cases and the JSON.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from inspect import Parameter, signature
from typing import Any, Final, Literal, NamedTuple, TypedDict, TypeVar

from memplan.engines.base import ENGINES
from memplan.errors import InvalidValue, MemplanError, shown_value, unknown_name
from memplan.fields import Field, described_fields
from memplan.mesh import AXES
from memplan.plan import FIELDS, Plan, ranks_along

F = TypeVar("F", bound=Callable[..., Any])

USUAL_ENGINE: Final = str(Plan.__dataclass_fields__["engine"].default)
"""The engine of a plan that names none."""


class EngineOptions(TypedDict, total=False):
    """The options of memplan's own engines, for type checkers and editors."""

    fsdp_units: Literal["block", "block+ends", "model"]
    compile: Literal["none", "block"]
    float8: Literal["none", "tensorwise", "rowwise", "rowwise_with_gw_hp"]
    float8_all_gather: Literal["none", "dynamic", "precomputed"]
    liger_kernel: Literal["none", "fused_linear_cross_entropy"]
    chunked_loss: Literal["CEWithChunkedOutputLoss", "ChunkedLossWrapper"]
    activation_offloading: Literal["none", "save_on_cpu", "OffloadActivations"]
    fsdp_blocks: int
    fsdp_version: Literal[1, 2]
    use_orig_params: bool
    backward_prefetch: Literal["pre", "post", "none"]
    forward_prefetch: bool
    no_sync: bool
    cp_rotate_method: Literal["allgather", "alltoall"]
    optimizer_impl: Literal["default", "for-loop", "foreach", "fused"]
    optimizer_in_backward: bool
    offload_gradients: bool
    set_to_none: bool
    gradient_as_bucket_view: bool
    static_graph: bool
    bucket_cap_bytes: int | None
    ddp_comm_hook: Literal["none", "fp16", "bf16", "powersgd"]
    trainer: Literal["none", "huggingface", "sft", "dpo", "grpo"]
    max_completion_length: int | None
    precompute_ref_log_probs: bool
    ref_model: bool
    torch_version: Literal["2.11", "2.12", "2.13", "2.14", "2.15"]
    overlap_comm: bool | None
    reduce_bucket_size: int
    stage3_prefetch_bucket_size: int
    stage3_param_persistence_threshold: int
    stage3_max_live_parameters: int
    stage3_max_reuse_distance: int
    sub_group_size: int
    zero_hpz_partition_size: int
    offload_optimizer: Literal["none", "cpu", "cpu-pinned"]
    offload_param: Literal["none", "cpu"]
    partition_method: Literal["parameters", "uniform", "type:block"]
    activation_checkpoint_interval: int
    reduce_buffer_size: int
    overlap_communication: bool
    communication_dtype: Literal["none", "fp32", "bf16", "fp16"]
    alloc_conf: str
    transformer_impl: Literal["transformer_engine", "local"]
    attention_backend: Literal["auto", "flash", "fused", "unfused"]
    cp_comm_type: Literal["p2p", "a2a+p2p"]
    hierarchical_context_parallel_sizes: tuple[int, ...] | None
    moe_token_dispatcher_type: Literal["allgather", "alltoall"]
    moe_grouped_gemm: bool
    moe_permute_fusion: bool
    moe_router_padding_for_quantization: bool
    use_precision_aware_optimizer: bool
    main_grads_dtype: Literal["fp32", "bf16"]
    exp_avg_dtype: Literal["fp32", "fp16", "bf16"]
    exp_avg_sq_dtype: Literal["fp32", "fp16", "bf16"]
    defer_embedding_wgrad_compute: bool
    wgrad_deferral_limit: int | None
    overlap_p2p_comm_warmup_flush: bool
    recompute_modules: str
    gradient_accumulation_fusion: bool
    masked_softmax_fusion: bool
    attention_softmax_in_fp32: bool
    accumulate_allreduce_grads_in_fp32: bool
    overlap_grad_reduce: bool
    overlap_param_gather: bool
    overlap_param_gather_with_optimizer_step: bool
    tp_comm_overlap: bool
    use_layer_wise_param_layout: bool
    microbatch_group_size_per_virtual_pipeline_stage: int | None
    num_distributed_optimizer_instances: int
    ddp_bucket_size: int | None
    cross_entropy_loss_fusion: bool
    cross_entropy_fusion_impl: Literal["native", "te"]
    megatron_deepspeed: bool
    create_attention_mask_in_dataloader: bool
    deterministic_mode: bool
    make_vocab_size_divisible_by: int
    fp8_format: Literal["none", "e4m3", "hybrid"]
    fp8_recipe: Literal["delayed", "tensorwise", "blockwise", "mxfp8"]
    fp8_param_gather: bool
    fp8_amax_history_len: int
    first_last_layers_bf16: bool
    cublas_workspace_config: str
    megatron_version: Literal["0.12", "0.13", "0.14", "0.15", "0.16", "0.18"]
    ngc_container: Literal["24.01", "25.09", "26.04"]


def shows(keywords: Any) -> Callable[[F], F]:
    """Puts the keys of a TypedDict into the signature of a function of `**options`, for help and editors."""

    def shown(function: F) -> F:
        own = signature(function)
        *named, rest = own.parameters.values()
        more = [
            Parameter(name, Parameter.KEYWORD_ONLY, default=..., annotation=hint)
            for name, hint in keywords.__annotations__.items()
        ]
        vars(function)["__signature__"] = own.replace(parameters=[*named, *more, rest])
        return function

    return shown


class Said(NamedTuple):
    """A field of a plan, or an option of its engine, with its value and its default."""

    name: str
    field: Field
    value: Any
    default: Any

    @property
    def is_default(self) -> bool:
        """Whether its value is the default."""
        return bool(self.value == self.default)


def option_fields(engine: str) -> dict[str, Field]:
    """The fields of an engine's own options by name.

    Raises:
        UnknownName: an engine that there is not.
    """
    kind = ENGINES.named(engine).options
    return {} if kind is None else described_fields(kind)


def plan_fields(engine: str = USUAL_ENGINE) -> dict[str, Field]:
    """The fields of a plan under an engine: a plan's own, other packages' axes that it knows, its options.

    Raises:
        UnknownName: an engine that there is not.
    """
    axes = {axis: ranks_along(axis) for axis in ENGINES.named(engine).other_axes}
    return FIELDS | axes | option_fields(engine)


def plan_of(**values: Any) -> Plan:
    """A plan from flat keywords: its own fields, and its engine's options.

    Raises:
        MemplanError: as `memplan.Plan`; a name that is neither.
    """
    own = {name: value for name, value in values.items() if name in FIELDS}
    axes = {name: values.pop(name) for name in list(values) if name not in FIELDS and name in AXES.names()}
    plan = Plan(**own, others=tuple(axes.items()))
    kind, known = ENGINES.named(plan.engine).options, option_fields(plan.engine)
    others = {name: value for name, value in values.items() if name not in FIELDS}
    for name in (name for name in others if name not in known):
        if (owner := engine_of_option(name)) is not None:
            raise InvalidValue(
                f"{name}={shown_value(others[name])} is an option of engine={owner!r}, not of "
                f"engine={plan.engine!r}; leave it out, or use engine={owner!r}."
            )
        raise unknown_name("option of a plan", name, plan_fields(plan.engine))
    if kind is None:
        return plan
    options = kind(**{name: known[name].checked(name, value) for name, value in others.items()})
    return plan if options == kind() else replace(plan, options=options)


def engine_of_option(name: str) -> str | None:
    """The engine that has an option of this name; None if none has."""
    for engine in ENGINES.names():
        with suppress(MemplanError, ImportError):
            if name in option_fields(engine) or name in ENGINES.named(engine).other_axes:
                return engine
    return None


def said_by(plan: Plan) -> Iterator[Said]:
    """A plan's own fields, other packages' axes, then its engine's options, each with its value."""
    for name, field in FIELDS.items():
        yield Said(name, field, getattr(plan, name), Plan.__dataclass_fields__[name].default)
    for axis in ENGINES.named(plan.engine).other_axes:
        yield Said(axis, ranks_along(axis), getattr(plan, axis), 1)
    kind = ENGINES.named(plan.engine).options
    if kind is not None:
        options, usual = plan.options or kind(), kind()
        for name, field in described_fields(kind).items():
            yield Said(name, field, getattr(options, name), getattr(usual, name))


def plan_dict(plan: Plan) -> dict[str, Any]:
    """The values of a plan's fields and of its engine's options, by name."""
    return {said.name: said.value for said in said_by(plan)}


def not_usual(plan: Plan) -> dict[str, Any]:
    """The values of a plan's fields and engine's options that differ from their defaults, by name."""
    return {said.name: said.value for said in said_by(plan) if not said.is_default}


def with_said(plan: Plan, **values: Any) -> Plan:
    """The plan with other values of its fields or of its engine's options.

    Raises:
        MemplanError: as `plan_of`.
    """
    return plan_of(**plan_dict(plan) | values)
