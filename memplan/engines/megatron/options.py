"""Megatron's own arguments that a plan has no field for, under Megatron's names."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, final

from memplan.device import Device
from memplan.errors import InvalidValue
from memplan.fields import Choice, Count, Counts, Flag, Names, Setting, described
from memplan.kernels import Release, product_workspace_bytes
from memplan.models.megatron import Fp8
from memplan.plan import Plan
from memplan.shapes import BF16, FP16, FP32, DType
from memplan.units import KiB

TRANSFORMER_IMPLS: Final = ("transformer_engine", "local")
ATTENTION_BACKENDS: Final = ("auto", "flash", "fused", "unfused")
DISPATCHERS: Final = ("allgather", "alltoall")
CP_COMM_TYPES: Final = ("p2p", "a2a+p2p")
CROSS_ENTROPY_IMPLS: Final = ("native", "te")
RECOMPUTE_MODULES: Final = frozenset(
    ["core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts"]
)
FP8_FORMATS: Final = ("none", "e4m3", "hybrid")
FP8_RECIPES: Final = ("delayed", "tensorwise", "blockwise", "mxfp8")
MEGATRON_VERSIONS: Final = ("0.12", "0.13", "0.14", "0.15", "0.16", "0.18")

STATE_TYPES: Final[Mapping[str, DType]] = {"fp32": FP32, "fp16": FP16, "bf16": BF16}
NGC_CONTAINERS: Final[Mapping[str, Release]] = {"24.01": (2, 2), "25.09": (2, 9), "26.04": (2, 12)}
"""NVIDIA's containers in which it ran Megatron's tests, and their releases of PyTorch."""

OLD_CONTAINER: Final = "24.01"
"""With FlashAttention 2.0, not deterministic, and Transformer Engine 1.2, without grouped products."""


def _workspace_config(text: str) -> str:
    """The text itself, if it is a value of `CUBLAS_WORKSPACE_CONFIG`."""
    sizes = text.removeprefix(":").split(":") if text else []
    if len(sizes) % 2 or not all(size.isdigit() for size in sizes):
        raise InvalidValue(
            f"cublas_workspace_config={text!r} is no list of :KiB:count pairs; use :4096:8, or leave it out."
        )
    return text


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronOptions:
    """The Megatron engine's own options: arguments of Megatron-LM, and variables of its environment."""

    transformer_impl: str = described(
        "transformer_engine",
        Choice("Transformer Engine's layers, or Megatron's own", choices=TRANSFORMER_IMPLS, word="impl"),
    )
    attention_backend: str = described(
        "auto",
        Choice(
            "Transformer Engine's attention: FlashAttention 2, cuDNN's, or scores in memory; auto: what it "
            "takes by itself, cuDNN's from Hopper on",
            choices=ATTENTION_BACKENDS,
            word="attention",
        ),
    )
    cp_comm_type: str = described(
        "p2p",
        Choice(
            "Context-parallel ranks hand keys and values around, a2a+p2p: after some have exchanged heads",
            choices=CP_COMM_TYPES,
            word="cp-comm",
        ),
    )
    hierarchical_context_parallel_sizes: tuple[int, ...] | None = described(
        None,
        Counts(
            "With a2a+p2p: how many ranks exchange heads, and how many such groups are a ring",
            left_out="none",
            optional=True,
            word="cp-sizes",
        ),
    )
    moe_token_dispatcher_type: str = described(
        "alltoall",
        Choice("How tokens reach experts of other ranks", choices=DISPATCHERS, word="dispatcher"),
    )
    moe_grouped_gemm: bool = described(
        True, Flag("All experts of a rank in one product (TEGroupedMLP)", word="grouped-gemm")
    )
    moe_permute_fusion: bool = described(
        False, Flag("Tokens are permuted by Transformer Engine's kernels", word="permute-fusion")
    )
    moe_router_padding_for_quantization: bool = described(
        False,
        Flag("The router sends each expert as many tokens as products in 8 bits take", word="router-padding"),
    )
    recompute_modules: str = described(
        "core_attn",
        Names(
            "What selective recomputation computes again: core_attn, moe_act, layernorm, mla_up_proj, mlp, "
            "moe, shared_experts",
            word="recompute-modules",
        ),
    )
    gradient_accumulation_fusion: bool = described(
        True, Flag("Weights' gradients are added to main_grad by the matrix product", word="grad-fusion")
    )
    masked_softmax_fusion: bool = described(
        True, Flag("Megatron's own attention masks scores by Apex's softmax", word="softmax-fusion")
    )
    attention_softmax_in_fp32: bool = described(
        False, Flag("PyTorch's softmax in its place is in float32", word="fp32-softmax")
    )
    accumulate_allreduce_grads_in_fp32: bool = described(
        False, Flag("main_grad in float32 under fp16, as it always is under bf16", word="fp32-grads")
    )
    use_precision_aware_optimizer: bool = described(
        False,
        Flag(
            "Transformer Engine's FusedAdam keeps what bfloat16 weights lack of the main ones", word="precise"
        ),
    )
    main_grads_dtype: str = described(
        "fp32", Choice("main_grad of that optimizer, under bf16", choices=("fp32", "bf16"), word="main-grads")
    )
    exp_avg_dtype: str = described(
        "fp32", Choice("Its first moments", choices=tuple(STATE_TYPES), word="exp-avg")
    )
    exp_avg_sq_dtype: str = described(
        "fp32", Choice("Its second moments", choices=tuple(STATE_TYPES), word="exp-avg-sq")
    )
    overlap_grad_reduce: bool = described(
        False, Flag("Reduce gradients in buckets beside the backward pass", word="overlap-grad-reduce")
    )
    overlap_param_gather: bool = described(
        False,
        Flag("Gather the distributed optimizer's weights beside the forward pass", word="overlap-gather"),
    )
    overlap_param_gather_with_optimizer_step: bool = described(
        False, Flag("Gather the first chunk's weights beside the update of the others", word="overlap-step")
    )
    tp_comm_overlap: bool = described(
        False,
        Flag("Transformer Engine sends over the tensor axis beside its products", word="tp-comm-overlap"),
    )
    overlap_p2p_comm_warmup_flush: bool = described(
        False, Flag("Interleaved stages receive ahead in warm-up and flush too", word="warmup-flush")
    )
    defer_embedding_wgrad_compute: bool = described(
        False, Flag("The gradient of the output layer's weight is computed at the step's end", word="defer")
    )
    wgrad_deferral_limit: int | None = described(
        None,
        Count("Micro-batches that defer that gradient", left_out="all", optional=True, word="deferral-limit"),
    )
    num_distributed_optimizer_instances: int = described(
        1, Count("Groups of data-parallel ranks, each with all of the optimizer's state", word="instances")
    )
    use_layer_wise_param_layout: bool = described(
        True,
        Flag(
            "Muon under the distributed optimizer: whole weights in equal parts of buckets, or, turned off, "
            "divided by size alone",
            word="param-layout",
        ),
    )
    microbatch_group_size_per_virtual_pipeline_stage: int | None = described(
        None,
        Count(
            "Micro-batches that pass a stage in a row under the interleaved schedule",
            left_out="pp",
            optional=True,
            word="group",
        ),
    )
    ddp_bucket_size: int | None = described(
        None,
        Count(
            "Elements of a bucket under overlap_grad_reduce",
            left_out="40,000,000, or a million for each data-parallel rank",
            optional=True,
            word="ddp-bucket",
        ),
    )
    cross_entropy_loss_fusion: bool = described(
        False, Flag("The loss by fused kernels", word="cross-entropy-fusion")
    )
    cross_entropy_fusion_impl: str = described(
        "native",
        Choice(
            "Whose fused loss: Megatron's or Transformer Engine's", choices=CROSS_ENTROPY_IMPLS, word="ce"
        ),
    )
    megatron_deepspeed: bool = described(
        False,
        Flag(
            "BigScience's Megatron-DeepSpeed of early 2022: DeepSpeed's pipeline and ZeRO-1, or, without "
            "ZeRO under bf16, its BF16_Optimizer",
            word="megatron-deepspeed",
        ),
    )
    create_attention_mask_in_dataloader: bool = described(
        True, Flag("Each micro-batch comes with an attention mask of booleans", word="mask")
    )
    deterministic_mode: bool = described(
        False, Flag("Only operations whose results do not vary from run to run", word="deterministic")
    )
    make_vocab_size_divisible_by: int = described(
        128, Count("The vocabulary is padded to a multiple of this times tp", word="vocab-multiple")
    )
    fp8_format: str = described(
        "none",
        Choice(
            "Products of layers in 8 bits: e4m3, or hybrid, with gradients in e5m2",
            choices=FP8_FORMATS,
            word="fp8",
        ),
    )
    fp8_recipe: str = described(
        "delayed",
        Choice(
            "Their scales: of a tensor, from its past (delayed) or as it is (tensorwise); of its blocks",
            choices=FP8_RECIPES,
            word="fp8-recipe",
        ),
    )
    fp8_param_gather: bool = described(
        False, Flag("Weights are kept, and gathered, in 8 bits", word="fp8-params")
    )
    fp8_amax_history_len: int = described(
        1, Count("Steps whose largest elements delayed scaling keeps", word="amax-history")
    )
    first_last_layers_bf16: bool = described(
        False, Flag("The first and the last layer have no products in 8 bits", word="ends-bf16")
    )
    cublas_workspace_config: str = described(
        "",
        Setting(
            "The environment's CUBLAS_WORKSPACE_CONFIG, as :4096:8",
            left_out="cuBLAS's own",
            read=_workspace_config,
            word="cublas",
        ),
    )
    megatron_version: str = described(
        "0.18",
        Choice("Release of Megatron-Core whose rules apply", choices=MEGATRON_VERSIONS, word="megatron"),
    )
    ngc_container: str = described(
        "26.04",
        Choice("NVIDIA's container of PyTorch below it", choices=tuple(NGC_CONTAINERS), word="container"),
    )

    @property
    def uses_te(self) -> bool:
        """Whether the layers are Transformer Engine's."""
        return self.transformer_impl == "transformer_engine"

    @property
    def softmax_by_pytorch(self) -> bool:
        """Whether Megatron's own attention takes PyTorch's softmax.

        Source: megatron.core.fusions.fused_softmax:FusedScaleMaskSoftmax.forward_torch_softmax.
        """
        return not (self.uses_te or self.masked_softmax_fusion)

    @property
    def attn_mask_type(self) -> str:
        """The masks of a model whose tokens attend to later ones.

        Source: megatron.core.models.bert.bert_model,
        BertModel._sanity_check_attention_and_get_attn_mask_dimension.
        """
        return "padding" if self.uses_te and self.ngc_container != OLD_CONTAINER else "arbitrary"

    @property
    def moments(self) -> Mapping[str, DType]:
        """The types of Adam's moments."""
        return {"exp_avg": STATE_TYPES[self.exp_avg_dtype], "exp_avg_sq": STATE_TYPES[self.exp_avg_sq_dtype]}

    @property
    def modules_again(self) -> frozenset[str]:
        """The modules that selective recomputation computes again."""
        return frozenset(self.recompute_modules.split(","))

    @property
    def compiles_loss(self) -> bool:
        """Whether the fused loss is Megatron's, which Inductor compiles."""
        return self.cross_entropy_loss_fusion and self.cross_entropy_fusion_impl == "native"

    @property
    def all_to_all_ranks(self) -> int:
        """How many context-parallel ranks exchange heads for tokens before the ring; 1: none."""
        sizes = self.hierarchical_context_parallel_sizes
        return sizes[0] if self.cp_comm_type == "a2a+p2p" and sizes else 1

    @property
    def release(self) -> Release:
        """Megatron-Core's release as numbers, which compare as releases do."""
        major, _, minor = self.megatron_version.partition(".")
        return int(major), int(minor)

    @property
    def shares_grouped_wgrads(self) -> bool:
        """Whether grouped products return dummy gradients too, as Transformer Engine's do since 2.10.

        Source: d2945c6a57 of NVIDIA/TransformerEngine (October 2025), which 26.04 has.
        """
        return self.torch_release >= NGC_CONTAINERS["26.04"]

    @property
    def torch_release(self) -> Release:
        """PyTorch's, of the container."""
        return NGC_CONTAINERS[self.ngc_container]

    def fp8(self, device: Device) -> Fp8 | None:
        """How products of layers are in 8 bits on a device; None: they are not.

        Source: transformer_engine.pytorch.utils:is_non_tn_fp8_gemm_supported.
        """
        if self.fp8_format == "none":
            return None
        reads_columns = device.at_least(10) and not (device.at_least(12) and not device.at_least(13))
        return Fp8(self.fp8_recipe, transposes=not reads_columns, param_gather=self.fp8_param_gather)

    def attention(self, device: Device, dropout: float) -> str:
        """The attention backend on a device: what `auto` takes there, or the one that was asked for.

        Deterministic gradients of attention with dropout are not cuDNN's on Blackwell. FlashAttention before
        2.4.1 has none at all.

        Source: transformer_engine.pytorch.attention.dot_product_attention.utils:get_attention_backend,
        transformer_engine/common/fused_attn/fused_attn.cpp (`nvte_get_fused_attn_backend`).
        """
        if self.attention_backend != "auto":
            return self.attention_backend
        if self.deterministic_mode and self.ngc_container == OLD_CONTAINER:
            return "unfused"
        by_cudnn = device.at_least(9) and not (device.at_least(10) and self.deterministic_mode and dropout)
        return "fused" if by_cudnn else "flash"

    def cublas_workspace_bytes(self, device: Device) -> int:
        """The workspace that PyTorch keeps for each cuBLAS handle and stream.

        Source: aten/src/ATen/cuda/CUDABlas.cpp (`_parseChosenWorkspaceSize`).
        """
        if not self.cublas_workspace_config:
            return product_workspace_bytes(device, self.torch_release)
        sizes = list(map(int, self.cublas_workspace_config.removeprefix(":").split(":")))
        return sum(kib * count for kib, count in zip(sizes[::2], sizes[1::2], strict=True)) * KiB


def megatron_options(plan: Plan) -> MegatronOptions:
    """The options of a plan of the Megatron engine."""
    return plan.options or MegatronOptions()


def divides_by_size(plan: Plan) -> bool:
    """Whether Muon's layer-wise optimizer gives whole weights to ranks by size, beside plain buffers.

    Source: megatron.core.optimizer.layer_wise_optimizer:LayerWiseDistributedOptimizer.shard_params.
    """
    options = megatron_options(plan)
    aligned = options.use_layer_wise_param_layout and options.release >= (0, 18)
    return bool(plan.zero) and plan.optimizer == "muon" and not aligned
