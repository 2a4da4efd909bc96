"""What the Megatron engine refuses: what Megatron's own checks refuse, and what has no rule yet."""

from dataclasses import fields
from math import prod
from typing import Any, Final

from memplan.device import Device
from memplan.engines.base import Rule
from memplan.engines.megatron.chunk import PARAMS_DTYPES
from memplan.engines.megatron.options import (
    OLD_CONTAINER,
    RECOMPUTE_MODULES,
    MegatronOptions,
    divides_by_size,
    megatron_options,
)
from memplan.engines.refusals import check_divided, check_layers, check_positions, check_sequence
from memplan.errors import MissingRule, PlanRefused, divisors_text
from memplan.models import Model
from memplan.models.megatron import GPTModel, gpt_model, padded_rows
from memplan.plan import Plan

SUPPORTED: Final[dict[str, tuple[Any, ...]]] = {
    "zero": (0, 1),
    "optimizer": ("adam", "adamw", "muon"),
    "schedule": ("1f1b", "interleaved-1f1b"),
    "offload": (False,),
    "loss_chunks": (1,),
    "precision": tuple(PARAMS_DTYPES),
}
"""The values of a plan's fields that have a rule; zero=1 is the distributed optimizer."""


MULTIPLES: Final = {"blockwise": (128, 128), "mxfp8": (32, 32)}
"""Of what tokens and features must be multiples under a recipe, so that their gathers are in 8 bits."""


OF_DEEPSPEED: Final = (
    *("megatron_deepspeed", "transformer_impl", "gradient_accumulation_fusion"),
    *("make_vocab_size_divisible_by",),
)
"""The options that Megatron-DeepSpeed has rules for."""

DEEPSPEED_OPTIMIZERS: Final = ((1, "fp16-mixed"), (1, "bf16-mixed"), (0, "bf16-mixed"))
"""The ZeRO stages and precisions of DeepSpeed's optimizers under its pipeline."""

FUSED_SOFTMAX: Final = 2048
"""The longest rows of scores that Megatron's fused softmax took in 2022."""


def _check_fields(model: Model, plan: Plan) -> None:
    for name, values in SUPPORTED.items():
        value = getattr(plan, name)
        if value not in values:
            raise MissingRule(
                f"{name}={value!r} has no rule in the Megatron engine; use {' or '.join(map(repr, values))}.",
                kind="options that the engine has no rule for",
            )


def _check_tensor_parallel(model: Model, plan: Plan) -> None:
    own = gpt_model(model)
    check_divided(plan, {"n_heads": own.n_heads, "n_kv_heads": own.n_kv_heads, "d_ff": own.d_ff})


def _check_schedule(model: Model, plan: Plan) -> None:
    """Raise for what `validate_args` and the schedules refuse.

    Source: megatron.core.pipeline_parallel.schedules:forward_backward_pipelining_with_interleaving.
    """
    if plan.schedule == "1f1b" and plan.virtual_stages > 1:
        raise PlanRefused(
            f"virtual_stages={plan.virtual_stages} is interleaved; use schedule='interleaved-1f1b'.",
            kind="several stages per rank under a schedule of one",
        )
    if plan.virtual_stages == 1:
        return
    group = megatron_options(plan).microbatch_group_size_per_virtual_pipeline_stage
    if group is None and plan.n_micro_batches % plan.pp:
        raise PlanRefused(
            f"number of microbatches ({plan.n_micro_batches}) is not divisible by "
            f"pipeline-model-parallel-size ({plan.pp}) when using interleaved schedule; use a global_batch "
            f"of {plan.batch_of(-(-plan.n_micro_batches // plan.pp) * plan.pp)}.",
            kind="micro-batches that interleaved 1F1B cannot run",
        )
    rounds = max(1, plan.n_micro_batches // plan.pp)
    if group is not None and group * rounds != plan.n_micro_batches:
        raise MissingRule(
            f"microbatch_group_size_per_virtual_pipeline_stage={group} with {plan.n_micro_batches} "
            "micro-batches has no rule; leave it out.",
            kind="options that the engine has no rule for",
        )


def _check_options(model: Model, plan: Plan) -> None:
    """Raise as `megatron.training.arguments:validate_args` does, in its words."""
    options = megatron_options(plan)
    if options.overlap_param_gather and not plan.zero:
        raise PlanRefused(
            "--overlap-param-gather only supported with distributed optimizer; use zero=1.",
            kind="an overlapped gather without the distributed optimizer",
        )
    if options.overlap_param_gather and not options.overlap_grad_reduce:
        raise PlanRefused(
            "Must use --overlap-param-gather with --overlap-grad-reduce; use overlap_grad_reduce=True.",
            kind="an overlapped gather without overlapped reductions",
        )
    if options.overlap_p2p_comm_warmup_flush and plan.virtual_stages == 1:
        raise PlanRefused(
            "Pipeline parallel communication overlapping in warmup and flush is only compatible with "
            "overlap_p2p_comm, which interleaved stages have; use virtual_stages=2 or more.",
            kind="receives begun ahead without interleaved stages",
        )
    if options.defer_embedding_wgrad_compute and (plan.pp == 1 or not options.gradient_accumulation_fusion):
        raise PlanRefused(
            "Cannot defer embedding wgrad compute when pipeline model parallel is not used, or gradient "
            "accumulation fusion; use pp=2 or more and gradient_accumulation_fusion=True.",
            kind="a deferred gradient without a pipeline",
        )
    instances = options.num_distributed_optimizer_instances
    if instances > 1 and (not plan.zero or plan.n_shards % instances):
        raise PlanRefused(
            f"num_distributed_optimizer_instances={instances} needs the distributed optimizer, and must "
            f"divide the {plan.n_shards} ranks of {plan.shard_group}; use zero=1 and a divisor.",
            kind="instances of the distributed optimizer that do not divide dp",
        )
    if options.ngc_container == OLD_CONTAINER and options.compiles_loss:
        raise MissingRule(
            f"ngc_container={OLD_CONTAINER!r} has no rule for a compiled loss; use another container, or "
            "cross_entropy_fusion_impl='te'.",
            kind="options that the engine has no rule for",
        )
    if options.compiles_loss and plan.precision != "bf16-mixed":
        raise MissingRule(
            "cross_entropy_fusion_impl='native' makes gradients in bfloat16; use precision='bf16-mixed', or "
            "'te'.",
            kind="Megatron's --cross-entropy-loss-fusion",
        )
    if not options.uses_te and gpt_model(model).n_kv_heads != gpt_model(model).n_heads:
        raise MissingRule(
            "transformer_impl='local' with grouped queries has no rule; use 'transformer_engine'.",
            kind="options that the engine has no rule for",
        )
    if plan.precision == "fp32" and options.uses_te and options.attention_backend != "unfused":
        raise PlanRefused(
            "FlashAttention and cuDNN's attention take no float32; use attention_backend='unfused'.",
            kind="fused attention in float32",
        )


def _check_recomputation(model: Model, plan: Plan) -> None:
    """Raise for modules that cannot be computed again.

    Source: megatron.core.transformer.transformer_config:TransformerConfig.__post_init__.
    """
    modules, own = megatron_options(plan).modules_again, gpt_model(model)
    if plan.recompute != "selective":
        return
    if unknown := modules - RECOMPUTE_MODULES:
        raise PlanRefused(
            f"Invalid choices for recompute_modules: {sorted(unknown)}; use some of "
            f"{', '.join(sorted(RECOMPUTE_MODULES))}.",
            kind="modules that cannot be recomputed",
        )
    if plan.recompute_blocks is not None:
        raise PlanRefused(
            "When using recompute_granularity: selective, recompute_num_layers must be None; leave out "
            "recompute_blocks.",
            kind="blocks whose modules are recomputed",
        )
    if "mla_up_proj" in modules and own.mla is None:
        raise PlanRefused(
            "mla_up_proj in recompute_modules is only supported with multi_latent_attention; leave it out.",
            kind="recomputed modules that a model lacks",
        )
    if "moe_act" in modules and own.moe and not megatron_options(plan).moe_grouped_gemm:
        raise PlanRefused(
            "moe_act in recompute_modules is only supported with moe_grouped_gemm; leave it out.",
            kind="recomputed modules that a model lacks",
        )
    inner = modules & {"moe_act", "shared_experts"}
    if ("moe" in modules and inner) or {"mla_up_proj", "core_attn"} <= modules:
        raise MissingRule(
            f"recompute_modules={sorted(modules)}: modules within others that are recomputed have no rule; "
            "name one of them.",
            kind="options that the engine has no rule for",
        )


def _check_deepseek(model: Model, plan: Plan) -> None:
    """Raise for multi-latent attention and multi-token prediction that have no rule."""
    own = gpt_model(model)
    if own.mtp_num_layers and (own.tied_head or plan.cp > 1):
        raise MissingRule(
            "multi-token prediction with a tied head or cp has no rule; use "
            "--untie-embeddings-and-output-weights and cp=1.",
            kind="options that the engine has no rule for",
        )
    if own.mla is None:
        return
    options = megatron_options(plan)
    if plan.cp > 1 or not options.uses_te or options.attention_backend == "flash":
        raise MissingRule(
            "multi-latent attention has a rule under transformer_impl='transformer_engine', without cp, by "
            "cuDNN or with scores in memory; use cp=1 and attention_backend='auto'.",
            kind="options that the engine has no rule for",
        )


def _check_states(model: Model, plan: Plan) -> None:
    """Raise for types of states that Megatron refuses.

    Source: megatron.core.optimizer.optimizer_config:OptimizerConfig.__post_init__.
    """
    options = megatron_options(plan)
    types = options.main_grads_dtype, options.exp_avg_dtype, options.exp_avg_sq_dtype
    if options.use_precision_aware_optimizer and not (plan.zero and options.uses_te):
        raise PlanRefused(
            "--use-precision-aware-optimizer only supported with distributed optimizer, and with Transformer "
            "Engine's; use zero=1.",
            kind="the precision-aware optimizer without the distributed one",
        )
    if types != ("fp32",) * 3 and not options.use_precision_aware_optimizer:
        raise PlanRefused(
            f"main_grads_dtype, exp_avg_dtype and exp_avg_sq_dtype {types} can only be fp32 when not using "
            "precision-aware optimizer; use use_precision_aware_optimizer=True.",
            kind="types of states without the precision-aware optimizer",
        )
    if options.main_grads_dtype == "bf16" and plan.precision != "bf16-mixed":
        raise PlanRefused(
            "main_grads_dtype='bf16' is for bfloat16 weights; use precision='bf16-mixed', or 'fp32'.",
            kind="gradients in bfloat16 of other weights",
        )


def _check_muon(model: Model, plan: Plan) -> None:
    """Raise for what Megatron's Muon and its layer-wise optimizer refuse, or for what has no rule.

    Source: megatron.core.optimizer:_get_megatron_emerging_optimizer,
    megatron.core.optimizer.layer_wise_optimizer:LayerWiseDistributedOptimizer.
    """
    options, own = megatron_options(plan), gpt_model(model)
    if plan.optimizer != "muon":
        return
    refused = (
        (options.release < (0, 16), f"megatron_version={options.megatron_version!r}", "0.16 or later"),
        (plan.precision == "fp16-mixed", "precision='fp16-mixed'", "precision='bf16-mixed'"),
        (options.num_distributed_optimizer_instances > 1, "instances of the optimizer", "one"),
        (
            options.overlap_param_gather_with_optimizer_step,
            "overlap_param_gather_with_optimizer_step=True",
            "False",
        ),
    )
    for applies, what, instead in refused:
        if applies:
            raise PlanRefused(
                f"Megatron's Muon does not support {what}; use {instead}.",
                kind="what Megatron's Muon refuses",
            )
    without_rule = (
        (plan.precision == "fp32", "precision='fp32'"),
        (options.use_precision_aware_optimizer, "use_precision_aware_optimizer=True"),
        (own.sees_all, f"model={model.name!r}"),
        (own.mtp_num_layers > 0, "multi-token prediction"),
        (
            options.overlap_param_gather and divides_by_size(plan),
            "overlap_param_gather=True and weights divided by size (use_layer_wise_param_layout=False, or "
            "before release 0.18)",
        ),
    )
    for applies, what in without_rule:
        if applies:
            raise MissingRule(
                f"optimizer='muon' with {what} has no rule in the Megatron engine; use adamw.",
                kind="Megatron's Muon beside other options",
            )


def _check_experts(model: Model, plan: Plan) -> None:
    """Raise as `TransformerConfig` and MoELayer do, or for what has no rule.

    Source: megatron.core.transformer.moe.moe_layer:MoELayer.forward,
    megatron.training.arguments:validate_args.
    """
    moe, own = gpt_model(model).moe, plan.ep * plan.etp
    if moe is None:
        if own > 1:
            raise PlanRefused(
                f"ep={plan.ep}, etp={plan.etp}: {model.name} has no experts to divide; use 1 of each.",
                kind="ep of a model without experts",
            )
        return
    if moe.num_experts % plan.ep:
        raise PlanRefused(
            f"Number of experts ({moe.num_experts}) should be a multiple of expert model parallel size "
            f"({plan.ep}); use one of {divisors_text(moe.num_experts)}.",
            kind="ep that does not divide the experts",
        )
    if moe.ffn_hidden_size % plan.etp:
        raise PlanRefused(
            f"etp={plan.etp} does not divide the experts' ffn_hidden_size={moe.ffn_hidden_size}; use one of "
            f"{divisors_text(moe.ffn_hidden_size)}.",
            kind="etp that does not divide the experts",
        )
    if plan.tp > 1 and not plan.sequence_parallel:
        raise PlanRefused(
            "When using MoE and tensor parallelism, sequence parallelism must be used; use "
            "sequence_parallel=True.",
            kind="experts under tensor parallelism without sequence parallelism",
        )
    options = megatron_options(plan)
    if options.release < (0, 13) and (moe.router_in_fp32 or not options.moe_grouped_gemm):
        raise MissingRule(
            "megatron_version='0.12' has no rule for experts one after the other, or a router in float32; "
            "use '0.13'.",
            kind="options that the engine has no rule for",
        )
    if options.moe_grouped_gemm and options.ngc_container == OLD_CONTAINER and plan.precision != "bf16-mixed":
        raise PlanRefused(
            f"grouped_gemm, which ngc_container={OLD_CONTAINER!r} takes, knows only bfloat16; use "
            "precision='bf16-mixed', or moe_grouped_gemm=False.",
            kind="grouped products of other types than bfloat16",
        )
    if options.moe_grouped_gemm and not options.uses_te:
        raise MissingRule(
            "moe_grouped_gemm with transformer_impl='local' has no rule; use 'transformer_engine', or "
            "moe_grouped_gemm=False.",
            kind="options that the engine has no rule for",
        )


def _check_context_parallel(model: Model, plan: Plan) -> None:
    """Raise as `validate_args` and the attention over context-parallel ranks do, or for what has no rule.

    Source: megatron.training.arguments:validate_args, megatron.core.transformer.dot_product_attention.
    """
    options, cp = megatron_options(plan), plan.cp
    sizes, by_both = options.hierarchical_context_parallel_sizes, options.cp_comm_type == "a2a+p2p"
    if by_both != (sizes is not None) or (sizes and (len(sizes) != 2 or prod(sizes) != cp)):
        raise PlanRefused(
            f"cp_comm_type={options.cp_comm_type!r} with hierarchical_context_parallel_sizes={sizes} does "
            f"not divide cp={cp}; use 'a2a+p2p' with two sizes whose product is cp, or 'p2p' without sizes.",
            kind="sizes of hierarchical context parallelism",
        )
    if cp == 1:
        return
    if plan.seq_len % (2 * cp):
        raise PlanRefused(
            f"seq-length should be a multiple of 2 * context-parallel-size ({2 * cp}); use "
            f"seq_len={-(-plan.seq_len // (2 * cp)) * 2 * cp}.",
            kind="context-parallel ranks do not divide the sequence",
        )
    if not options.uses_te or options.attention_backend == "unfused":
        raise PlanRefused(
            "Context parallelism is only supported by TEDotProductAttention, with FlashAttention or cuDNN's; "
            "use transformer_impl='transformer_engine' and attention_backend='flash' or 'fused'.",
            kind="context parallelism without a fused attention",
        )
    groups, exchanged = gpt_model(model).n_kv_heads // plan.tp, options.all_to_all_ranks
    if groups % exchanged:
        raise PlanRefused(
            f"{exchanged} ranks cannot exchange {groups} key heads; use a first size that divides them.",
            kind="context-parallel ranks do not divide the heads",
        )


def _check_bert(model: Model, plan: Plan) -> None:
    """Raise for what has no rule where tokens attend to all others."""
    own, options = gpt_model(model), megatron_options(plan)
    divided = plan.cp > 1 or plan.sequence_parallel
    if own.sees_all and (divided or own.moe or own.mla or own.mtp_num_layers):
        raise MissingRule(
            f"{model.name} has no rule with sequence or context parallelism, experts, multi-latent attention "
            "or multi-token prediction; leave them out.",
            kind="options that the engine has no rule for",
        )
    if own.sees_all and options.uses_te and options.attention_backend != "unfused":
        raise MissingRule(
            f"attention_backend={options.attention_backend!r} has no rule where sequences are padded; use "
            "'unfused', or transformer_impl='local'.",
            kind="options that the engine has no rule for",
        )


def _check_tp_comm_overlap(model: Model, plan: Plan) -> None:
    """Raise as `validate_args` does, or for layers whose Userbuffers have no rule."""
    options, own = megatron_options(plan), gpt_model(model)
    if not options.tp_comm_overlap:
        return
    if not plan.sequence_parallel:
        raise PlanRefused(
            "Tensor parallel communication/GEMM overlap can happen only when sequence parallelism is "
            "enabled; use tp=2 or more with sequence_parallel=True.",
            kind="overlapped tensor traffic without sequence parallelism",
        )
    in_blocks = options.fp8_format != "none" and options.fp8_recipe in MULTIPLES
    cases = (
        (not options.uses_te, "transformer_impl='local'"),
        (own.moe is not None, "experts"),
        (own.mla is not None, "multi-latent attention"),
        (own.mtp_num_layers > 0, "multi-token prediction"),
        (own.sees_all, f"model={model.name!r}"),
        (in_blocks, f"fp8_recipe={options.fp8_recipe!r}"),
    )
    for applies, what in cases:
        if applies:
            raise MissingRule(
                f"tp_comm_overlap with {what} has no rule in the Megatron engine; leave one of them out.",
                kind="options beside Megatron's --tp-comm-overlap",
            )


def _check_fp8(model: Model, plan: Plan) -> None:
    """Raise as `validate_args` and Transformer Engine do, or for what has no rule beside products in 8 bits.

    Source: megatron.training.arguments:validate_args,
    megatron.core.transformer.transformer_config:TransformerConfig.__post_init__.
    """
    options, own, recipe = megatron_options(plan), gpt_model(model), megatron_options(plan).fp8_recipe
    if options.fp8_format == "none":
        if options.fp8_param_gather:
            raise PlanRefused(
                "fp8_param must be used together with fp8 mode; use fp8_format='hybrid' or 'e4m3'.",
                kind="weights in 8 bits without products in 8 bits",
            )
        return
    refused = (
        (options.fp8_param_gather and not plan.zero, "fp8_param_gather without the distributed optimizer"),
        (options.first_last_layers_bf16 and recipe == "delayed", "first_last_layers_bf16 and 'delayed'"),
        (not options.uses_te, "transformer_impl='local'"),
    )
    without_rule = (
        (plan.precision != "bf16-mixed", f"precision={plan.precision!r}"),
        (options.release < (0, 18), f"megatron_version={options.megatron_version!r}"),
        (plan.optimizer == "muon", "optimizer='muon'"),
        (own.sees_all, f"model={model.name!r}"),
        (options.fp8_param_gather and recipe == "mxfp8", "fp8_param_gather and fp8_recipe='mxfp8'"),
        (
            options.fp8_param_gather and options.use_precision_aware_optimizer,
            "fp8_param_gather and use_precision_aware_optimizer",
        ),
        (
            options.fp8_param_gather and options.first_last_layers_bf16,
            "fp8_param_gather and first_last_layers_bf16",
        ),
    )
    for kind, cases in ((PlanRefused, refused), (MissingRule, without_rule)):
        for applies, what in cases:
            if applies:
                verb = "is refused" if kind is PlanRefused else "has no rule"
                raise kind(
                    f"fp8_format={options.fp8_format!r} with {what} {verb} in the Megatron engine; leave one "
                    "of them out.",
                    kind="options beside Megatron's --fp8-format",
                )
    of_tokens, of_features = MULTIPLES.get(recipe, (8, 16))
    tokens = plan.micro_batch * plan.local_seq_len // (plan.tp if plan.sequence_parallel else 1)
    widths = _widths(own, plan)
    if tokens % of_tokens or any(width % of_features for width in widths):
        raise PlanRefused(
            f"fp8_recipe={recipe!r} of {tokens} tokens and {', '.join(map(str, widths))} features: they must "
            f"be multiples of {of_tokens} and of {of_features}; use such sizes, or fewer tensor ranks.",
            kind="products in 8 bits of sizes that they do not take",
        )


def _widths(own: GPTModel, plan: Plan) -> list[int]:
    """The widths of the matrix products of layers on one rank, which recipes in 8 bits want to divide.

    Of latent attention without the compressed keys, whose product has the positions beside them.
    """
    d_head = own.mla.v_head_dim if own.mla else own.d_head
    widths = [own.d_model, own.d_ff // plan.tp, own.n_heads * d_head // plan.tp]
    if own.mla is not None:
        widths += [own.mla.q_lora_rank, own.mla.kv_lora_rank]
    if own.moe is not None:
        shared = own.moe.shared_expert_intermediate_size
        widths += [own.moe.ffn_hidden_size // plan.etp, shared // plan.tp]
    return [width for width in widths if width]


def _check_fp8_experts(model: Model, plan: Plan) -> None:
    """Raise as `TransformerConfig` does for layers with experts in 8 bits, or for what has no rule.

    Source: megatron.core.transformer.transformer_config:TransformerConfig.__post_init__,
    megatron.core.transformer.moe.experts:SequentialMLP._pad_tensor_for_quantization.
    """
    options, moe = megatron_options(plan), gpt_model(model).moe
    in_fp8, pads = options.fp8_format != "none", options.moe_router_padding_for_quantization
    if pads and not (in_fp8 and options.moe_token_dispatcher_type == "alltoall"):
        raise PlanRefused(
            "moe_router_padding_for_quantization is for products in 8 bits, and not supported by the "
            "allgather dispatcher; use fp8_format='hybrid' and moe_token_dispatcher_type='alltoall'.",
            kind="Megatron's --moe-router-padding-for-quantization",
        )
    again = {"moe_act", "layernorm"} & options.modules_again if plan.recompute == "selective" else ()
    if in_fp8 and again and options.fp8_recipe == "delayed":
        raise PlanRefused(
            "Delayed scaling does not support moe_act and layernorm recompute for fp8; use another "
            "fp8_recipe.",
            kind="recomputed modules under delayed scaling",
        )
    if not in_fp8 or moe is None or options.moe_grouped_gemm or pads:
        return
    tokens = plan.micro_batch * plan.local_seq_len // (plan.tp if plan.sequence_parallel else 1)
    copies, multiple = tokens * moe.router_topk * plan.ep * plan.etp, padded_rows(1, options.fp8_recipe)
    if copies % (moe.num_experts * multiple):
        raise MissingRule(
            f"{copies} copies of tokens for {moe.num_experts} experts, one after the other, have no rule in "
            f"8 bits unless each gets a multiple of {multiple}; use moe_grouped_gemm=True.",
            kind="experts of few tokens in 8 bits, one after the other",
        )


def check_fp8_device(plan: Plan, device: Device) -> None:
    """Raise for a recipe that a device has not, or that has no rule on it.

    Source: transformer_engine.pytorch.quantization:check_fp8_support,
    transformer_engine.pytorch.quantization:check_mxfp8_support.
    """
    options = megatron_options(plan)
    needs = {"blockwise": (9, 0), "mxfp8": (10, 0)}.get(options.fp8_recipe, (8, 9))
    if options.fp8_format != "none" and not device.at_least(*needs):
        raise PlanRefused(
            f"fp8_recipe={options.fp8_recipe!r} is of GPUs of compute capability {needs[0]}.{needs[1]} or "
            "more; use such a GPU, another recipe, or fp8_format='none'.",
            kind="products in 8 bits on a device without them",
        )
    if options.fp8_format != "none" and options.fp8_recipe == "blockwise" and device.at_least(10):
        raise MissingRule(
            "fp8_recipe='blockwise' has no rule on Blackwell, which computes it as MXFP8; use 'mxfp8'.",
            kind="Megatron's --fp8-recipe blockwise on Blackwell",
        )


def _check_megatron_deepspeed(model: Model, plan: Plan) -> None:
    """Raise for what Megatron-DeepSpeed refuses or has no rule for, and for what only that has.

    Source: megatron/model/fused_softmax.py (`is_kernel_available`) of bigscience-workshop/Megatron-DeepSpeed.
    """
    own, asked = gpt_model(model), not_usual_options(plan)
    if not megatron_options(plan).megatron_deepspeed:
        if own.position_embedding_type == "alibi" or own.embed_layernorm:
            raise MissingRule(
                "alibi and embed_layernorm have rules under megatron_deepspeed=True only; use it too.",
                kind="options that the engine has no rule for",
            )
        return
    heads = plan.micro_batch * own.n_heads // plan.tp
    wrong = own.swiglu or own.normalization != "LayerNorm" or own.qk_layernorm or not own.add_bias_linear
    others = own.moe or own.mla or own.mtp_num_layers or own.sees_all
    without_rule = (
        (asked.get("transformer_impl") != "local", "transformer_impl='transformer_engine'", "'local'"),
        (
            "gradient_accumulation_fusion" not in asked,
            "gradient_accumulation_fusion=True",
            "gradient_accumulation_fusion=False",
        ),
        *[(name not in OF_DEEPSPEED, f"{name}={value!r}", "its default") for name, value in asked.items()],
        (plan.recompute != "full" or plan.recompute_blocks is not None, "layers that are kept", "'full'"),
        (plan.virtual_stages > 1, f"virtual_stages={plan.virtual_stages}", "1"),
        (plan.sequence_parallel, "sequence_parallel=True", "False"),
        (plan.cp > 1, f"cp={plan.cp}", "1"),
        (plan.optimizer == "muon", "optimizer='muon'", "'adamw'"),
        (
            (plan.zero, plan.precision) not in DEEPSPEED_OPTIMIZERS,
            f"zero={plan.zero} in {plan.precision!r}",
            "zero=1, or zero=0 in 'bf16-mixed', which is BF16_Optimizer",
        ),
        (
            plan.layers_per_stage is None and bool(own.n_layers % plan.pp),
            f"{own.n_layers} layers on {plan.pp} stages",
            "layers_per_stage, as DeepSpeed's log shows it",
        ),
        (bool(wrong or others), f"model={model.name!r}", "LayerNorm, GELU, biases and plain layers"),
        (not own.tied_head, "an output layer of its own", "a tied one"),
        (
            own.position_embedding_type not in ("alibi", "learned_absolute"),
            f"position_embedding_type={own.position_embedding_type!r}",
            "'alibi' or 'learned_absolute'",
        ),
        (
            bool(heads % 4) or plan.seq_len > FUSED_SOFTMAX,
            f"{heads} rows of {plan.seq_len} scores, which its fused softmax does not take",
            f"a multiple of 4 rows of at most {FUSED_SOFTMAX}",
        ),
    )
    for applies, what, instead in without_rule:
        if applies:
            raise MissingRule(
                f"{what} has no rule under megatron_deepspeed=True; use {instead}.",
                kind="options that Megatron-DeepSpeed has no rule for",
            )


def not_usual_options(plan: Plan) -> dict[str, Any]:
    """The options of a plan that differ from their defaults."""
    options, usual = megatron_options(plan), MegatronOptions()
    values = {field.name: getattr(options, field.name) for field in fields(options)}
    return {name: value for name, value in values.items() if value != getattr(usual, name)}


REFUSALS: Final[tuple[Rule, ...]] = (
    _check_fields,
    _check_tensor_parallel,
    check_sequence,
    check_layers,
    _check_schedule,
    check_positions,
    _check_context_parallel,
    _check_deepseek,
    _check_bert,
    _check_experts,
    _check_recomputation,
    _check_options,
    _check_tp_comm_overlap,
    _check_states,
    _check_muon,
    _check_fp8,
    _check_fp8_experts,
    _check_megatron_deepspeed,
)
"""The checks of a plan, in order."""
