"""Causal attention, and which kernel PyTorch chooses for it."""

from typing import Literal

from memplan.checks import checked_fraction
from memplan.device import Device
from memplan.errors import InvalidValue, MissingRule
from memplan.kernels import Release
from memplan.ops.dims import BY_FEATURE, dims, divided
from memplan.ops.fused_attention import (
    cudnn_attention,
    efficient_attention,
    flash_attention_cpu,
    flash_attention_cuda,
)
from memplan.ops.heads import DIMS
from memplan.ops.math_attention import math_attention
from memplan.shapes import BF16, FP32, DType, check_equal
from memplan.tape import Tensor

AttentionKernel = Literal["flash", "cudnn", "efficient", "math"]


def attention(q: Tensor, k: Tensor, v: Tensor, *, dropout: float = 0.0, mask: Tensor | None = None) -> Tensor:
    """Causal attention of q (batch, seq, heads, d_head) to k, v (batch, seq, kv_heads, d_head).

    A boolean `mask`, such as a window's, is converted to numbers for each sequence, and saved.

    Source: torch.nn.functional:scaled_dot_product_attention.
    """
    _check_heads(q, k, v)
    device, dtype, d_head = q.tape.context.device, q.dtype, q.shape[3]
    drops, grouped = checked_fraction("dropout", dropout) > 0, k.shape != q.shape
    kernel = attention_kernel(
        device,
        q.tape.context.torch_release,
        dtype,
        d_head,
        grouped=grouped,
        dropout=drops,
        masked=mask is not None,
    )
    masks = () if mask is None else (_bias(mask, q, kernel),)
    match kernel:
        case "math":
            return math_attention(q, k, v, dropout=drops)
        case "flash" if device.on_cpu:
            return flash_attention_cpu(q, k, v, *masks)
        case "flash":
            return flash_attention_cuda(q, k, v, dropout=drops)
        case "cudnn":
            return cudnn_attention(q, k, v, *masks, dropout=drops)
        case "efficient":
            return efficient_attention(q, k, v, *masks)


def _bias(mask: Tensor, q: Tensor, kernel: AttentionKernel) -> Tensor:
    """What is added to the scores: 0 where a query may see a key, else -inf, for each sequence.

    Memory-efficient attention needs rows that are a multiple of 8 long, and pads a copy.

    Raises:
        MissingRule: for attention as separate products.

    Source: aten/src/ATen/native/transformers/attention.cpp (`convert_boolean_attn_mask`, `preprocess_mask`).
    """
    if kernel == "math":
        raise MissingRule(
            f"seq_len={q.shape[1]} reaches beyond the window, which is a mask of PyTorch's attention; "
            f"there is no rule for masks where no fused kernel takes them (here {q.dtype.name} heads of "
            f"{q.shape[3]}); use a seq_len below the window.",
            kind="a sequence beyond a window without a fused kernel",
        )
    tape, dtype, (batch, seq, _, _) = q.tape, q.dtype, q.shape
    with tape.workspace() as numbers:
        if not tape.context.device.on_cpu:
            numbers.new("0", (), dtype)
            numbers.new("-inf", (), dtype)
        bias = tape.new("mask", (batch, *mask.shape[1:]), dtype)
    if kernel == "efficient" and seq % 8:
        bias = tape.new("padded mask", (batch, 1, seq, -(-seq // 8) * 8), dtype)
    return bias


def _check_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise for queries, keys and values that no rule here covers.

    Raises:
        InvalidValue: with the shapes or types that differ.
    """
    batch, seq, n_heads, d_head = dims(q, "attention", *DIMS, allowed=BY_FEATURE)
    _, _, n_kv_heads, d_value = dims(v, "attention", *DIMS, allowed=(q.placements,))
    divided(n_heads, n_kv_heads, "n_heads", by="n_kv_heads")
    check_equal("attention", {q.dtype.name}, {k.dtype.name, v.dtype.name})
    if d_value != d_head:
        raise InvalidValue(
            f"attention of values with heads of {d_value} to queries with heads of {d_head} has no rule; "
            f"make both {d_head}."
        )
    for x in (k, v):
        x.check_placements("attention", q.placements)
        check_equal("attention", (batch, seq, n_kv_heads, d_head), x.shape)


def attention_kernel(
    device: Device,
    torch_release: Release,
    dtype: DType,
    d_head: int,
    *,
    grouped: bool,
    dropout: bool,
    masked: bool = False,
    mask_has_grad: bool = False,
) -> AttentionKernel:
    """The implementation that PyTorch chooses for causal attention; `grouped`: query heads share a key.

    cuDNN's drops probabilities in torch 2.11 only. It takes heads of up to 128, on Hopper of up to 256 before
    torch 2.14; from then on wide ones of 256 only. The memory-efficient one takes grouped heads from 2.14 on,
    and heads of whole 16 bytes. Flash attention takes no mask on CUDA, cuDNN's none that has a gradient.

    Neglects: that cuDNN's is not taken for a single key.

    >>> from memplan.device import A100, H100
    >>> [attention_kernel(on, (2, 13), BF16, 128, grouped=True, dropout=False) for on in (A100, H100)]
    ['flash', 'cudnn']

    Source: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp (`select_sdp_backend`,
    `check_prefer_cudnn_attention`: compute capability 9.0, 10.0 and 10.3),
    aten/src/ATen/native/transformers/sdp_utils_cpp.h (`check_attn_mask_shape`),
    aten/src/ATen/native/transformers/sdp_utils_cpp.cpp (`select_sdp_backend_cpp`).
    """
    if device.on_cpu:
        return "math" if dropout else "flash"
    if dtype != FP32 and d_head <= 256 and (device.at_least(8) or device.capability is None):
        most = 256 if torch_release < (2, 14) and not device.at_least(10) else 128
        fits = d_head % 8 == 0 and (d_head <= most or (d_head == 256 and torch_release >= (2, 14)))
        if (
            device.at_least(9)
            and not device.at_least(11)
            and fits
            and not mask_has_grad
            and (not dropout or torch_release < (2, 12))
        ):
            return "cudnn"
        if not masked:
            return "flash"
    if (grouped and torch_release < (2, 14)) or (dtype == BF16 and not device.at_least(8)):
        return "math"
    return "math" if d_head * dtype.itemsize % 16 else "efficient"
