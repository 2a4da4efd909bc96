"""The kernels that operations call on CUDA, of those that take more memory than their results."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain, compress
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from memplan.errors import MissingRule
from memplan.models.recording import CONVOLUTIONS, CONVOLVED
from memplan.ops.kernel_calls import AND_MASK, IN_ORDER
from memplan.tracing.scratch import CONVOLUTION, CONVOLUTION_BACKWARD, IMAGE_DIMS, Scratch
from memplan.tracing.shapes import ATEN, MASKS, dtype_name


class Called(NamedTuple):
    """A kernel of `memplan.ops.kernel_calls`, called with these sizes; the next storages are its results."""

    name: str
    sizes: tuple[int, ...]
    dtype: str
    n_results: int


def convolution_called(func: Any, args: Sequence[Any], results: Sequence[Tensor]) -> tuple[Called, ...]:
    """What computes each result of a convolution or of its backward pass: cuDNN, and a sum for a bias.

    Calls of cuDNN have no `n_results`, and the sizes that `memplan.models.traced.TracedEvent` lists.

    Source: aten/src/ATen/native/Convolution.cpp (`convolution_backward`).
    """
    if func is CONVOLUTION:
        image, weight, _, stride, padding, dilation, transposed, output_padding, groups = args
        parts: tuple[str, ...] = CONVOLVED[:1]
    else:
        grad, image, weight, _, stride, padding, dilation, transposed, output_padding, groups, mask = args
        parts = tuple(compress(CONVOLVED[1:], mask))
    n = image.dim() - 2
    around = [one * n if len(one) == 1 else one for one in (stride, padding, dilation, output_padding)]
    flags = groups, int(transposed), int(_channels_last(image)), int(_channels_last(weight))
    sizes = *image.shape, *weight.shape, *chain(*around), *flags
    called = [Called(part, sizes, dtype_name(image.dtype), 0) for part in parts]
    if len(results) > len(parts):
        dims = [dim for dim in range(grad.dim()) if dim != 1]
        called += filter(None, [_sum((grad, dims), results[-1:])])
    return tuple(called)


def grad_in_order(func: Any, args: Sequence[Any]) -> tuple[Scratch, ...]:
    """The copy of the output's gradient for a convolution's backward pass, if it is laid out in another way.

    Source: aten/src/ATen/native/cudnn/ConvShared.cpp (`cudnn_convolution_backward`).
    """
    if func is not CONVOLUTION_BACKWARD or not any(args[-1][:2]):
        return ()
    grad, image, weight = args[:3]
    last = _channels_last(image) or _channels_last(weight)
    if grad.is_contiguous(memory_format=torch.channels_last if last else torch.contiguous_format):
        return ()
    return (("grad in order", grad.numel(), grad.dtype),)


def _channels_last(tensor: Tensor) -> bool:
    """Whether an image's channels have the smallest stride."""
    if tensor.dim() != IMAGE_DIMS or tensor.is_contiguous():
        return False
    return tensor.is_contiguous(memory_format=torch.channels_last)


class Places(NamedTuple):
    """Where an operation has its dropout, and its mask if it takes one."""

    dropout: int
    mask: int | None = None


def kernel_called(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], results: Sequence[Tensor]
) -> Called | None:
    """The kernel that runs an operation; None if it takes no more memory than its results.

    Neglects: kernels that have no rule; the workspaces of `OF_CUDNN`, see `convolution_called`.
    """
    if func in SORTS:
        return _sort(args[0], kwargs.get("dim", args[1] if len(args) > 1 else -1))
    rule = CALLS.get(func)
    return None if rule is None else rule(args, results)


SORTS: Final = (ATEN.sort.default, ATEN.sort.stable)

OF_CUDNN: Final[Mapping[Any, str]] = {
    CONVOLUTION: CONVOLUTIONS,
    ATEN.cudnn_batch_norm.default: "batch norm in float32",
}
"""Operations of cuDNN's, whose workspaces depend on the engines that it chooses."""


def _sum(args: Sequence[Any], results: Sequence[Tensor]) -> Called | None:
    """A sum or a mean of floats over some dims, or all.

    The inputs of an output are a row apart where a kept dim has the smallest stride.

    Source: aten/src/ATen/native/cuda/Reduce.cuh (`reduction_on_fastest_striding_dimension`).
    """
    (total,), given = results, args[0]
    if not total.is_floating_point() or not total.numel():
        return None
    dims = (args[1] if len(args) > 1 else None) or range(given.dim())
    reduced = {dim % given.dim() for dim in dims}
    smallest = {True: math.inf, False: math.inf}
    for dim, (n, stride) in enumerate(zip(given.shape, given.stride(), strict=True)):
        if n > 1:
            smallest[dim in reduced] = min(smallest[dim in reduced], stride)
    along_rows = smallest[False] < smallest[True]
    return Called(
        "sum", (total.numel(), given.numel() // total.numel(), int(along_rows)), dtype_name(total.dtype), 1
    )


def _cumulative_sum(args: Sequence[Any], results: Sequence[Tensor]) -> Called | None:
    """A cumulative sum of a single row; others need no scratch."""
    given, (total,) = args[0], results
    if given.numel() != given.shape[args[1]] or given.numel() <= 1:
        return None
    return Called(
        "cumulative_sum", (given.numel(), int(given.dtype != total.dtype)), dtype_name(total.dtype), 1
    )


def _repeated(args: Sequence[Any], results: Sequence[Tensor]) -> Called:
    given, (places,) = args[0], results
    return Called("repeated", (given.numel(), places.numel()), dtype_name(given.dtype), 1)


def _unique(args: Sequence[Any], results: Sequence[Tensor]) -> Called | None:
    """Elements that differ from the one before, without their places or numbers."""
    given, *what = args
    return None if any(what) else Called("unique", (given.numel(),), dtype_name(given.dtype), 1)


def _added_by_index(args: Sequence[Any], results: Sequence[Tensor]) -> Called | None:
    """The call of `index_put_(accumulate=True)` with one tensor of integer indices; None for any other."""
    table, indices, *_ = args
    accumulates = len(args) > 3 and args[3]
    if not accumulates or len(indices) != 1 or indices[0].dtype in MASKS:
        return None
    return Called("added_by_index", (indices[0].numel(), table.shape[0]), dtype_name(table.dtype), 0)


def _masked_scatter(args: Sequence[Any], results: Sequence[Tensor]) -> Called:
    mask, (y,) = args[1], results
    expands = mask.numel() != y.numel() or not mask.is_contiguous()
    return Called("masked_scatter", (y.numel(), int(expands)), dtype_name(y.dtype), 1)


def _masked_scatter_backward(args: Sequence[Any], results: Sequence[Tensor]) -> Called:
    given, (grad,) = args[0], results
    sizes = given.numel(), given.dim(), grad.numel()
    return Called("masked_scatter_backward", sizes, dtype_name(grad.dtype), 1)


def _table_gradient(args: Sequence[Any], results: Sequence[Tensor]) -> Called:
    grad, ids, n_rows = args[:3]
    sizes = ids.numel(), n_rows, grad.shape[-1], int(not ids.is_contiguous())
    return Called("table_gradient", sizes, dtype_name(results[0].dtype), 1)


def _norm_gradients(args: Sequence[Any], results: Sequence[Tensor]) -> Called:
    given, normalized_shape, (of_input, *of_weights) = args[1], args[2], args[-1]
    width = math.prod(normalized_shape)
    sizes = given.numel() // width, width, int(of_input), sum(of_weights)
    return Called("norm_gradients", sizes, dtype_name(given.dtype), len(results))


def _attention(name: str, at: Places, args: Sequence[Any], results: Sequence[Tensor]) -> Called:
    """Its results are the output, the log-sum-exps and two tensors of the random state; others are empty.

    Without a backward pass to come only the output is kept.
    """
    keeps = name == "flash_attention" or args[4]
    return Called(name, _attended(args[0], args[1], at, args), dtype_name(args[0].dtype), 4 if keeps else 1)


def _attention_backward(name: str, at: Places, args: Sequence[Any], results: Sequence[Tensor]) -> Called:
    copies = not args[0].transpose(1, 2).is_contiguous()
    called = f"{name}_backward{IN_ORDER * copies}{AND_MASK * (len(results) - 3)}"
    return Called(called, _attended(args[1], args[2], at, args), dtype_name(args[1].dtype), len(results))


def _attended(q: Tensor, k: Tensor, at: Places, args: Sequence[Any]) -> tuple[int, ...]:
    """The sizes that kernels of attention take (`memplan.ops.kernel_calls`)."""
    (batch, n_heads, n_queries, d_head), n_keys = q.shape, k.shape[2]
    drops = len(args) > at.dropout and args[at.dropout] > 0
    mask = None if at.mask is None else args[at.mask]
    masked = 0 if mask is None else 1 + (n_keys % 8 if has_whole_rows(mask) else 8)
    return batch, n_queries, n_keys, n_heads, k.shape[1], d_head, int(drops), masked


def has_whole_rows(mask: Tensor) -> bool:
    """Whether memory-efficient attention takes a mask as it is: its rows are whole 8s apart.

    Source: aten/src/ATen/native/transformers/attention.cpp (`aligned_tensor`).
    """
    return not any(stride % 8 for stride in mask.stride()[:-1])


def _sort(given: Tensor, dim: int) -> Called | None:
    """A sort of each row along a dim, with its elements' places."""
    n = given.shape[dim] if given.dim() else 1
    return Called("sort", (given.numel() // n, n), dtype_name(given.dtype), 2) if n else None


def _grouped_product(args: Sequence[Any], results: Sequence[Tensor]) -> Called:
    """A matrix for each group of rows, or a product for each group.

    Raises:
        MissingRule: columns in groups.
    """
    (a, b, *of_groups), (out,) = args[:3], results
    if a.dim() > b.dim():
        raise MissingRule("a product with groups of columns has no rule for CUDA; use groups of rows.")
    groups = (of_groups[0] if of_groups and of_groups[0] is not None else b).shape[0]
    sizes = groups, *out.shape[-2:], int(a.dim() < b.dim())
    return Called("grouped_product", sizes, dtype_name(out.dtype), 1)


CALLS: Final[Mapping[Any, Callable[[Sequence[Any], Sequence[Tensor]], Called | None]]] = {
    ATEN.sum.default: _sum,
    ATEN.sum.dim_IntList: _sum,
    ATEN.mean.default: _sum,
    ATEN.mean.dim: _sum,
    ATEN.cumsum.default: _cumulative_sum,
    ATEN.repeat_interleave.Tensor: _repeated,
    ATEN.unique_consecutive.default: _unique,
    ATEN.index_put_.default: _added_by_index,
    ATEN._index_put_impl_.default: _added_by_index,
    ATEN.masked_scatter.default: _masked_scatter,
    ATEN.masked_scatter_backward.default: _masked_scatter_backward,
    ATEN.embedding_dense_backward.default: _table_gradient,
    ATEN.native_layer_norm_backward.default: _norm_gradients,
    ATEN._fused_rms_norm_backward.default: _norm_gradients,
    ATEN._grouped_mm.default: _grouped_product,
    ATEN._scaled_dot_product_efficient_attention.default: partial(
        _attention, "efficient_attention", Places(5, 3)
    ),
    ATEN._scaled_dot_product_flash_attention.default: partial(_attention, "flash_attention", Places(3)),
    ATEN._scaled_dot_product_cudnn_attention.default: partial(_attention, "fused_attention", Places(5, 3)),
    ATEN._scaled_dot_product_efficient_attention_backward.default: partial(
        _attention_backward, "efficient_attention", Places(9, 4)
    ),
    ATEN._scaled_dot_product_flash_attention_backward.default: partial(
        _attention_backward, "flash_attention", Places(10)
    ),
    ATEN._scaled_dot_product_cudnn_attention_backward.default: partial(
        _attention_backward, "fused_attention", Places(13, 8)
    ),
}
"""Which kernel an operation calls, with which sizes."""
