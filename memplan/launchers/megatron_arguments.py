"""A plan as the arguments of Megatron-LM's pretrain_gpt.py, which `memplan.launchers.megatron` reads back."""

from collections.abc import Iterator
from typing import Any, Final

from memplan.engines.options import not_usual
from memplan.models.megatron import BertModel, GPTModel, MoE
from memplan.plan import Plan, stage_layers

PRECISIONS: Final = {"bf16-mixed": "bf16", "fp16-mixed": "fp16"}
"""The flag of each precision; float32 has none."""

FLAGS: Final = (
    "overlap_grad_reduce",
    "overlap_param_gather",
    "overlap_param_gather_with_optimizer_step",
    "tp_comm_overlap",
    "accumulate_allreduce_grads_in_fp32",
    "cross_entropy_loss_fusion",
    "deterministic_mode",
    "attention_softmax_in_fp32",
    "moe_permute_fusion",
    "moe_router_padding_for_quantization",
    "defer_embedding_wgrad_compute",
    "use_precision_aware_optimizer",
    "fp8_param_gather",
    "first_last_layers_bf16",
)
"""The options that are flags."""

NEGATED: Final = (
    "gradient_accumulation_fusion",
    "masked_softmax_fusion",
    "create_attention_mask_in_dataloader",
    "use_layer_wise_param_layout",
)
"""The options whose flags begin with --no-."""

VALUES: Final = (
    "transformer_impl",
    "attention_backend",
    "cp_comm_type",
    "cross_entropy_fusion_impl",
    "ddp_bucket_size",
    "make_vocab_size_divisible_by",
    "microbatch_group_size_per_virtual_pipeline_stage",
    "num_distributed_optimizer_instances",
    "wgrad_deferral_limit",
    "main_grads_dtype",
    "exp_avg_dtype",
    "exp_avg_sq_dtype",
    "fp8_format",
    "fp8_recipe",
    "fp8_amax_history_len",
)
"""The options with a value."""

Argument = tuple[str, Any]
"""An argument's name without dashes, and its value; True for a flag, and a flag that is False is left out."""


def arguments(model: GPTModel, plan: Plan) -> Iterator[str]:
    """Each argument with its value, as a shell takes it."""
    said = [*_of_model(model), *_of_mesh(model, plan), *_of_training(model, plan), *_of_options(model, plan)]
    for name, value in said:
        if value is not False and value is not None:
            yield f"--{name}" if value is True else f"--{name} {value}"


def _of_model(model: GPTModel) -> Iterator[Argument]:
    grouped = model.n_kv_heads != model.n_heads
    yield "num-layers", model.n_layers
    yield "hidden-size", model.d_model
    yield "ffn-hidden-size", model.d_ff
    yield "num-attention-heads", model.n_heads
    yield "group-query-attention", grouped
    yield "num-query-groups", model.n_kv_heads if grouped else None
    yield "kv-channels", None if model.mla else model.d_head
    yield "max-position-embeddings", model.max_seq_len
    yield "vocab-size", model.vocab_size
    yield "untie-embeddings-and-output-weights", not model.tied_head
    yield "hidden-dropout", f"{model.dropout:g}"
    yield "attention-dropout", f"{model.attention_dropout:g}"
    yield "normalization", model.normalization
    yield "swiglu", model.swiglu
    yield "disable-bias-linear", not model.add_bias_linear
    yield "add-qkv-bias", model.add_qkv_bias
    yield "position-embedding-type", model.position_embedding_type
    yield "rotary-percent", f"{model.rotary_percent:g}" if model.rotary_percent != 1 else None
    yield "no-rope-fusion", not model.rope_fusion
    yield "qk-layernorm", model.qk_layernorm
    if model.mla is not None:
        yield "multi-latent-attention", True
        for name, n in model.mla._asdict().items():
            yield name.replace("_", "-"), n or None
    yield "bert-no-binary-head", isinstance(model, BertModel) and not model.binary_head
    yield "mtp-num-layers", model.mtp_num_layers or None
    if model.moe is not None:
        yield from _of_experts(model.moe)
        yield "no-bias-gelu-fusion", not model.swiglu


def _of_experts(moe: MoE) -> Iterator[Argument]:
    every = set(moe.layer_freq) <= {1}
    yield "num-experts", moe.num_experts
    yield "moe-ffn-hidden-size", moe.ffn_hidden_size
    yield "moe-router-topk", moe.router_topk
    yield "moe-layer-freq", None if every else f"'{[*moe.layer_freq]}'".replace(" ", "")
    yield "moe-shared-expert-intermediate-size", moe.shared_expert_intermediate_size or None
    yield "moe-router-load-balancing-type", moe.router_load_balancing_type
    yield "moe-aux-loss-coeff", f"{moe.aux_loss_coeff:g}" if moe.aux_loss_coeff else None
    yield "moe-router-score-function", moe.router_score_function
    yield "moe-router-pre-softmax", moe.router_pre_softmax
    yield "moe-router-enable-expert-bias", moe.router_enable_expert_bias
    yield "moe-router-dtype", "fp32" if moe.router_in_fp32 else None


def _of_mesh(model: GPTModel, plan: Plan) -> Iterator[Argument]:
    yield "tensor-model-parallel-size", plan.tp
    yield "pipeline-model-parallel-size", plan.pp
    yield "context-parallel-size", plan.cp
    yield "sequence-parallel", plan.sequence_parallel
    if model.moe is not None:
        yield "expert-model-parallel-size", plan.ep
        yield "expert-tensor-parallel-size", plan.etp
    if plan.layers_per_stage is None and model.n_layers % plan.n_stages == 0:
        if plan.virtual_stages > 1:
            yield "num-layers-per-virtual-pipeline-stage", model.n_layers // plan.n_stages
    else:
        stages = ["t" * len(stage_layers(model.n_layers, plan, stage)) for stage in range(plan.n_stages)]
        layout = f"E{'|'.join(stages)}{'m' * model.mtp_num_layers}L"
        yield "pipeline-model-parallel-layout", f"'{layout}'"


def _of_training(model: GPTModel, plan: Plan) -> Iterator[Argument]:
    yield "seq-length", plan.seq_len
    yield "micro-batch-size", plan.micro_batch
    yield "global-batch-size", plan.global_batch
    yield PRECISIONS.get(plan.precision, "fp32"), plan.precision in PRECISIONS
    yield "optimizer", "muon" if plan.optimizer == "muon" else None
    yield "use-distributed-optimizer", bool(plan.zero)
    yield "clip-grad", f"{plan.clip_grad_norm or 0:g}"
    if plan.recompute == "full":
        every = plan.recompute_blocks is None
        yield "recompute-granularity", "full"
        yield "recompute-method", "uniform" if every else "block"
        yield "recompute-num-layers", 1 if every else plan.recompute_blocks
    if plan.recompute == "selective":
        yield "recompute-granularity", "selective"
        yield "recompute-modules", not_usual(plan).get("recompute_modules", "core_attn").replace(",", " ")


def _of_options(model: GPTModel, plan: Plan) -> Iterator[Argument]:
    asked = not_usual(plan)
    for name in FLAGS:
        yield name.replace("_", "-"), asked.get(name, False)
    for name in NEGATED:
        yield f"no-{name.replace('_', '-')}", not asked.get(name, True)
    for name in VALUES:
        yield name.replace("_", "-"), asked.get(name)
    yield "overlap-p2p-communication-warmup-flush", asked.get("overlap_p2p_comm_warmup_flush", False)
    sizes = asked.get("hierarchical_context_parallel_sizes")
    yield "hierarchical-context-parallel-sizes", " ".join(map(str, sizes)) if sizes else None
    if model.moe is not None:
        yield "moe-grouped-gemm", asked.get("moe_grouped_gemm", True)
        yield "moe-token-dispatcher-type", asked.get("moe_token_dispatcher_type", "alltoall")
