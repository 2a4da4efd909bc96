"""What Megatron's layers are configured with, beside the model's sizes."""

from typing import NamedTuple

from memplan.shapes import UINT8, DType


class Fp8(NamedTuple):
    """How Transformer Engine multiplies in 8 bits.

    `recipe`: "delayed", "tensorwise", "blockwise" or "mxfp8"; `transposes`: the device's products of tensors
    with one scale read both operands by rows; `param_gather`: weights are kept, and gathered, in 8 bits.

    Source: transformer_engine.pytorch.utils:is_non_tn_fp8_gemm_supported.
    """

    recipe: str = "delayed"
    transposes: bool = True
    param_gather: bool = False

    @property
    def is_per_tensor(self) -> bool:
        """Whether a tensor has one scale."""
        return self.recipe in ("delayed", "tensorwise")

    @property
    def weight_dtype(self) -> DType | None:
        """The type of weights that are kept in 8 bits; None: the type of the others."""
        return UINT8 if self.param_gather else None


def padded_rows(n: int, recipe: str) -> int:
    """`n` rows of an expert, padded for a product in 8 bits: to a multiple of 16, or of 32 in MXFP8.

    Source: megatron.core.fp8_utils:get_fp8_align_size.

    >>> padded_rows(100, "tensorwise"), padded_rows(100, "mxfp8")
    (112, 128)
    """
    multiple = 32 if recipe == "mxfp8" else 16
    return -(-n // multiple) * multiple


class TransformerConfig(NamedTuple):
    """The fields of `megatron.core.transformer.transformer_config:TransformerConfig` that layers read.

    `tp` and `cp` are `tensor_model_parallel_size` and `context_parallel_size`; this is `cp_rank`, and
    `cp_all_to_all` ranks exchange heads. `attention_backend` is the one that is taken ("flash", "fused",
    "unfused" or "local"), and `attn_mask_type` is "causal", or the "padding" or "arbitrary" masks of a model
    whose tokens attend to later ones; `softmax_in_fp32`: the softmax of
    Megatron's local attention is PyTorch's, in float32; `vocab_multiple` is the argument
    `make_vocab_size_divisible_by`;
    `recompute_modules` are computed again in the backward pass, and with `recomputes_mtp` the depths of
    multi-token prediction. `cross_entropy` is the fused loss ("native" or "te"; empty: none). `ep` ranks have
    different experts, each of which `etp` ranks divide (`expert_model_parallel_size`,
    `expert_tensor_parallel_size`); `moe_use_legacy_grouped_gemm`: their products are those of grouped_gemm;
    `shares_grouped_wgrads`: those of Transformer Engine return gradients that are kept for good.
    Without `async_tensor_model_parallel_allreduce` a linear's backward pass waits for the sum of its input's
    gradient, and computes its weight's after it.
    With `tp_comm_overlap` what tensor ranks send is in Userbuffers, outside PyTorch's allocator.
    `fp8`: how matrix products of the layers run in 8 bits; None: they run in bfloat16. With
    `first_last_layers_bf16` the first and the last layer run in bfloat16.
    """

    tp: int = 1
    sequence_parallel: bool = False
    async_tensor_model_parallel_allreduce: bool = True
    tp_comm_overlap: bool = False
    cp: int = 1
    cp_rank: int = 0
    cp_all_to_all: int = 1
    ep: int = 1
    etp: int = 1
    moe_token_dispatcher_type: str = "allgather"
    moe_grouped_gemm: bool = False
    moe_use_legacy_grouped_gemm: bool = False
    shares_grouped_wgrads: bool = True
    moe_permute_fusion: bool = False
    moe_router_padding_for_quantization: bool = False
    normalization: str = "LayerNorm"
    transformer_impl: str = "transformer_engine"
    attention_backend: str = "fused"
    attn_mask_type: str = "causal"
    softmax_in_fp32: bool = False
    gradient_accumulation_fusion: bool = True
    cross_entropy: str = ""
    create_attention_mask_in_dataloader: bool = True
    deterministic_mode: bool = False
    recompute_modules: frozenset[str] = frozenset()
    recomputes_mtp: bool = False
    vocab_multiple: int = 128
    fp8: Fp8 | None = None
    first_last_layers_bf16: bool = False
    release: tuple[int, int] = (0, 18)
