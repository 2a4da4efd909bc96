"""Memory that kernels take beside their results, and free when they are done, on any device."""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, Final

import torch
from torch import Tensor

from memplan.errors import MissingRule
from memplan.tracing.shapes import ATEN, INDEX, MASKS

Scratch = tuple[str, int, torch.dtype]
"""What it is, its elements and their type."""

ARITHMETIC: Final = (ATEN.add, ATEN.sub, ATEN.mul, ATEN.div, ATEN.bitwise_and, ATEN.bitwise_or)
"""Operations whose operands may be of several types."""

ADDED_IN_PLACE: Final = (ATEN.add_, ATEN.sub_)
"""Operations that add an operand of a narrower type, as ring attention adds up gradients in float32."""

SUMS: Final = (ATEN.cumsum.default, ATEN.sum.default, ATEN.sum.dim_IntList)
"""Sums whose operand may be of another type; a sum of narrow floats in float32 reads them as they are."""

SCATTERED_SUMS: Final = (ATEN.scatter_add, ATEN.scatter_add_)
HALVES: Final = (torch.bfloat16, torch.float16)
"""Types that CPU sums scattered elements of in float32.

Source: aten/src/ATen/native/cpu/ScatterGatherKernel.cpp (`create_acc_buffer`).
"""

CONVOLUTION: Final = ATEN.convolution.default
CONVOLUTION_BACKWARD: Final = ATEN.convolution_backward.default

IN_ORDER: Final = {
    ATEN.embedding.default: {1: "ids"},
    ATEN.native_layer_norm.default: {0: "input"},
    ATEN.native_layer_norm_backward.default: {0: "grad", 1: "input"},
}
"""The operands of operations, by place, that are first copied if they are not contiguous.

Source: aten/src/ATen/native/Embedding.cpp (`embedding_symint`), aten/src/ATen/native/layer_norm.cpp and
aten/src/ATen/native/cuda/layer_norm_kernel.cu (`expect_contiguous`).
"""

TOP: Final = ATEN.topk.default
SHORTEST_DIVIDED: Final = 400
"""From here on the largest of a row may be found by several blocks, with memory of their own.

Source: aten/src/ATen/native/cuda/TensorTopK.cu (`should_use_multiblock`).
"""

OF_CUB: Final = (ATEN._unique2, ATEN.unique_dim, ATEN.unique_consecutive, ATEN.randperm)
"""Operations that always sort or scan by CUB."""

IMAGE_DIMS: Final = 4
"""Sample, channel, row, column."""


def scratch_of(
    func: Any, args: Sequence[Any], results: Sequence[Tensor], device: torch.device
) -> tuple[Scratch, ...]:
    """The scratch of an operation that follows from its tensors' sizes; of others see `kernel_called`.

    Raises:
        MissingRule: on CUDA, for an operation that sorts or scans by CUB.
    """
    own = _on_cpu(func, args, results) if device.type == "cpu" else _on_cuda(func, args)
    found = (*_anywhere(func, args, results), *own)
    return tuple([scratch for scratch in found if scratch[1] > 0])


def copied_before(func: Any, args: Sequence[Any], device: torch.device) -> tuple[Scratch, ...]:
    """The copies of operands that an operation makes before its results, and frees after them."""
    if func is INDEX and device.type == "cuda":
        return tuple(_indices(args[1]))
    return tuple(_in_order(args, IN_ORDER.get(func, {})))


def _indices(given: Sequence[Tensor | None]) -> Iterator[Scratch]:
    """Indices that are moved from the host, and those of several that do not lie in memory in one order.

    Source: aten/src/ATen/native/TensorAdvancedIndexing.cpp (`make_info`, `AdvancedIndex`).
    """
    indices = [one for one in given if one is not None]
    for one in indices:
        if one.device.type == "cpu":
            yield "indices on the GPU", one.numel(), one.dtype
    if any(one.dtype in MASKS for one in indices):
        return
    shape = torch.broadcast_shapes(*[one.shape for one in indices])
    expanded = [one.expand(shape) for one in indices]
    if any(one.stride() != expanded[0].stride() for one in expanded):
        for one in expanded:
            if not one.is_contiguous():
                yield "indices in order", one.numel(), one.dtype


def _anywhere(func: Any, args: Sequence[Any], results: Sequence[Tensor]) -> Iterator[Scratch]:
    """Copies of another type that PyTorch makes of operands, masks of a softmax, differences of a logsumexp.

    Source: aten/src/ATen/native/ReduceOps.cpp (`impl_func_cum_ops`, `logsumexp_out_impl`),
    aten/src/ATen/native/SoftMax.cpp (`_safe_softmax`).
    """
    if func is ATEN.logsumexp.default:
        yield "largest", results[0].numel(), args[0].dtype
        yield "less the largest", args[0].numel(), args[0].dtype
    if func is ATEN._safe_softmax.default:
        yield "keys not allowed", args[0].numel(), torch.bool
        yield "rows without any allowed key", args[0].numel() // args[0].shape[-1], torch.bool
        yield "0", int(args[0].device.type == "cuda"), torch.float32
    lifts = func in SUMS and func is not ATEN.cumsum.default and args[0].is_floating_point()
    if func in SUMS and not lifts and args[0].dtype != results[0].dtype:
        yield "operand as the sum's type", args[0].numel(), results[0].dtype


def _in_order(args: Sequence[Any], operands: Mapping[int, str]) -> Iterator[Scratch]:
    """Copies of these operands, where they are not contiguous."""
    for place, name in operands.items():
        if not args[place].is_contiguous():
            yield f"{name} in order", args[place].numel(), args[place].dtype


def _on_cuda(func: Any, args: Sequence[Any]) -> Iterator[Scratch]:
    """The product that a softmax's backward sums.

    Raises:
        MissingRule: for an operation that sorts or scans by CUB.

    Source: aten/src/ATen/native/cuda/SoftMax.cu (`softmax_backward_cuda_out`).
    """
    if func is ATEN._softmax_backward_data.default:
        yield "grad times probabilities", args[1].numel(), args[1].dtype
    if func is TOP and (n := _row(args[0], args[2] if len(args) > 2 else -1)) >= SHORTEST_DIVIDED:
        raise _of_cub(f"topk of rows of {n}")
    if func._overloadpacket in OF_CUB:
        raise _of_cub(func._overloadpacket.__name__)


def _row(tensor: Tensor, dim: int) -> int:
    """Elements along a dim; 1 for a scalar."""
    return tensor.shape[dim] if tensor.dim() else 1


def _of_cub(what: str) -> MissingRule:
    return MissingRule(
        f"{what} on CUDA takes memory that only CUB knows; trace the module on a GPU (executed=True).",
        kind="a sort by CUB in a trace for CUDA",
    )


def _on_cpu(func: Any, args: Sequence[Any], results: Sequence[Tensor]) -> Iterator[Scratch]:
    if func in (CONVOLUTION, CONVOLUTION_BACKWARD):
        yield from _convolved(func, args, results)
    if func._overloadpacket in (*ARITHMETIC, *ADDED_IN_PLACE):
        yield "widened operand", _widened(args, results[0]), results[0].dtype
    if func._overloadpacket in SCATTERED_SUMS and results[0].dtype in HALVES:
        yield "sums in float32", results[0].numel(), torch.float32


def _convolved(func: Any, args: Sequence[Any], results: Sequence[Tensor]) -> Iterator[Scratch]:
    """What CPU's convolution takes without oneDNN: its input's columns, or the results of each group.

    A single group with windows of one element needs neither; several are computed one by one, and their
    results concatenated. Neglects: transposed ones, of volumes.

    Source: aten/src/ATen/native/Convolution.cpp (`_convolution`, `convolution_backward`).
    """
    backward = func is CONVOLUTION_BACKWARD
    output, image, weight = args[:3] if backward else (results[0], *args[:2])
    *_, stride, padding, _dilation, transposed, _, groups = args[:10] if backward else args[:9]
    if transposed or weight.dim() > IMAGE_DIMS:
        return
    if groups > 1:
        yield from _in_order(args, {0: "grad", 1: "input"} if backward else {0: "input"})
        for result in results[: 2 if backward else 1]:
            yield "results of each group", result.numel(), result.dtype
    elif {*weight.shape[2:], *stride} != {1} or {*padding} != {0}:
        yield "columns of a convolution", _columns(output, image, weight), image.dtype


def _columns(output: Tensor, image: Tensor, weight: Tensor) -> int:
    """Elements of the columns that an image is unfolded into.

    Source: aten/src/ATen/native/ConvolutionMM2d.cpp (`compute_columns2d`, `slow_conv2d_backward_out_cpu`).
    """
    return image.shape[0] * image.shape[1] * prod(weight.shape[2:]) * prod(output.shape[2:])


def _widened(args: Sequence[Any], result: Tensor) -> int:
    """Elements of the operands that CPU first copies to the result's type, in arithmetic with mixed types.

    Source: aten/src/ATen/TensorIterator.cpp (`compute_types`, "Promotes common dtype to operands on CPU").
    """
    operands = [one for one in args if isinstance(one, Tensor) and one.dim() and one.dtype != result.dtype]
    operands = [one for one in operands if torch.promote_types(one.dtype, result.dtype) == result.dtype]
    return sum([one.numel() for one in operands])
