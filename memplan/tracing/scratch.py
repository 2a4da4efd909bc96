"""Memory that kernels take beside their results, and free when they are done, on any device."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from memplan.errors import MissingRule
from memplan.tracing.shapes import ATEN

Scratch = tuple[str, int, torch.dtype]
"""What it is, its elements and their type."""

ARITHMETIC: Final = (ATEN.add, ATEN.sub, ATEN.mul, ATEN.div)
"""Operations whose operands may be of several types."""

SUMS: Final = (ATEN.cumsum.default, ATEN.sum.default, ATEN.sum.dim_IntList)
"""Sums whose operand may be of another type; a sum of narrow floats in float32 reads them as they are."""

CONVOLUTION: Final = ATEN.convolution.default
CONVOLUTION_BACKWARD: Final = ATEN.convolution_backward.default

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


def _anywhere(func: Any, args: Sequence[Any], results: Sequence[Tensor]) -> Iterator[Scratch]:
    """Copies that PyTorch's own code makes of operands, and masks of a softmax.

    Source: aten/src/ATen/native/ReduceOps.cpp (`impl_func_cum_ops`), aten/src/ATen/native/Embedding.cpp
    (`embedding_symint`), aten/src/ATen/native/SoftMax.cpp (`_safe_softmax`).
    """
    if func is ATEN._safe_softmax.default:
        yield "keys not allowed", args[0].numel(), torch.bool
        yield "rows without any allowed key", args[0].numel() // args[0].shape[-1], torch.bool
        yield "0", int(args[0].device.type == "cuda"), torch.float32
    lifts = func in SUMS and func is not ATEN.cumsum.default and args[0].is_floating_point()
    if func in SUMS and not lifts and args[0].dtype != results[0].dtype:
        yield "operand as the sum's type", args[0].numel(), results[0].dtype
    if func is ATEN.embedding.default and not args[1].is_contiguous():
        yield "ids in order", args[1].numel(), args[1].dtype


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
        yield "columns of a convolution", _columns(func, args, results), results[0].dtype
    if func._overloadpacket in ARITHMETIC:
        yield "widened operand", _widened(args, results[0]), results[0].dtype


def _columns(func: Any, args: Sequence[Any], results: Sequence[Tensor]) -> int:
    """Elements of the columns that CPU's convolution of images, without oneDNN, unfolds its input into.

    None for windows of one element in their place. Neglects: groups, which are computed one by one.

    Source: aten/src/ATen/native/ConvolutionMM2d.cpp (`compute_columns2d`, `slow_conv2d_backward_out_cpu`).
    """
    backward = func is CONVOLUTION_BACKWARD
    output, image, weight = args[:3] if backward else (results[0], *args[:2])
    *_, stride, padding, _dilation, _transposed, _padding, groups = args[:10] if backward else args[:9]
    if weight.dim() != IMAGE_DIMS or groups != 1:
        return 0
    if list(weight.shape[2:]) == [1, 1] and set(stride) == {1} and set(padding) == {0}:
        return 0
    rows, columns = output.shape[2:]
    return int(image.shape[0] * image.shape[1] * weight.shape[2] * weight.shape[3] * rows * columns)


def _widened(args: Sequence[Any], result: Tensor) -> int:
    """Elements of the operands that CPU first copies to the result's type, in arithmetic with mixed types.

    Source: aten/src/ATen/TensorIterator.cpp (`compute_types`, "Promotes common dtype to operands on CPU").
    """
    operands = [one for one in args if isinstance(one, Tensor) and one.dim() and one.dtype != result.dtype]
    return sum([one.numel() for one in operands])
