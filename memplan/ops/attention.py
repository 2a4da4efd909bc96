"""Causal attention, and which kernel PyTorch chooses for it."""

from typing import Literal

from memplan.checks import checked_fraction
from memplan.device import Device
from memplan.errors import InvalidValue, MissingRule
from memplan.kernels import Release
from memplan.ops.dims import dims, divided
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
    drops = checked_fraction("dropout", dropout) > 0
    release, grouped = q.tape.context.torch_release, k.shape != q.shape
    if mask is not None:
        return _masked_attention(q, k, v, dropout=drops)
    match attention_kernel(device, release, dtype, d_head, grouped=grouped, dropout=drops):
        case "math":
            return math_attention(q, k, v, dropout=drops)
        case "flash" if device.on_cpu:
            return flash_attention_cpu(q, k, v)
        case "flash":
            return flash_attention_cuda(q, k, v, dropout=drops)
        case "cudnn":
            return cudnn_attention(q, k, v)
        case "efficient":
            return efficient_attention(q, k, v)


def _masked_attention(q: Tensor, k: Tensor, v: Tensor, *, dropout: bool) -> Tensor:
    """Attention with a mask of numbers.

    Raises:
        MissingRule: on CUDA, or with dropout.
    """
    batch, seq, _, _ = q.shape
    if dropout or not q.tape.context.device.on_cpu:
        raise MissingRule(
            f"seq_len={seq} reaches beyond the model's window, which is a mask of PyTorch's attention, and "
            "of masks there are rules for device='cpu' without dropout only; use a seq_len below the window.",
            kind="a sequence beyond a window on CUDA",
        )
    return flash_attention_cpu(q, k, v, q.tape.new("mask", (batch, 1, seq, seq), q.dtype))


def _check_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise for queries, keys and values that no rule here covers.

    Raises:
        InvalidValue: with the shapes or types that differ.
    """
    batch, seq, n_heads, d_head = dims(q, "attention", *DIMS)
    _, _, n_kv_heads, d_value = dims(v, "attention", *DIMS)
    divided(n_heads, n_kv_heads, "n_heads", by="n_kv_heads")
    check_equal("attention", {q.dtype.name}, {k.dtype.name, v.dtype.name})
    if d_value != d_head:
        raise InvalidValue(
            f"attention of values with heads of {d_value} to queries with heads of {d_head} has no rule; "
            f"make both {d_head}."
        )
    for x in (k, v):
        check_equal("attention", (batch, seq, n_kv_heads, d_head), x.shape)


def attention_kernel(
    device: Device, torch_release: Release, dtype: DType, d_head: int, *, grouped: bool, dropout: bool
) -> AttentionKernel:
    """The implementation that PyTorch chooses for causal attention; `grouped`: query heads share a key.

    cuDNN's drops probabilities in torch 2.11 only; the memory-efficient one takes grouped heads from 2.14 on.

    >>> from memplan.device import A100, H100
    >>> [attention_kernel(on, (2, 13), BF16, 128, grouped=True, dropout=False) for on in (A100, H100)]
    ['flash', 'cudnn']

    Source: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp (`select_sdp_backend`),
    aten/src/ATen/native/transformers/sdp_utils_cpp.cpp (`select_sdp_backend_cpp`).
    """
    if device.on_cpu:
        return "math" if dropout else "flash"
    if dtype != FP32 and d_head <= 256 and (device.at_least(8) or device.capability is None):
        most = 128 if device.at_least(10) else 256
        may_drop = torch_release < (2, 12)
        cudnn = device.at_least(9) and (may_drop or not dropout) and d_head <= most and d_head % 8 == 0
        return "cudnn" if cudnn else "flash"
    if (grouped and torch_release < (2, 14)) or (dtype == BF16 and not device.at_least(8)):
        return "math"
    return "efficient"
