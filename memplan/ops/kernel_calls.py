"""CUDA's kernels by name, called with sizes: for traces, which know these and no operation's rule.

Each allocates its results, and whatever it takes besides, by the rules of the operations here.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

from memplan.errors import InvalidValue, MissingRule
from memplan.kernels import grouped_product_scratch, radix_sort_bytes, scan_bytes
from memplan.ops.attention import attention_kernel
from memplan.ops.embedding import table_gradient
from memplan.ops.fused_attention import cudnn_attention, efficient_attention, flash_attention_cuda
from memplan.ops.norm import sum_partial_rows
from memplan.record import Alloc, Event, Free
from memplan.shapes import BF16, BOOL, INT32, INT64, UINT8, Buffer, DType
from memplan.tape import Node, OpContext, Saved, Tape, Tensor

Results = Sequence[Tensor | None]
"""What a kernel returns; None for what it leaves out."""

Sizes = Sequence[int]
"""What each kernel below takes, in its docstring's order; conditions are 1 or 0."""


def kernel_events(
    name: str, sizes: Sizes, dtype: DType, results: Sequence[Buffer], context: OpContext
) -> list[Event]:
    """What a kernel allocates and frees; `results` become its first results, and get their sizes.

    The others are not made: attention without a backward pass to come has the output alone.

    Raises:
        MissingRule: on a CPU.
        InvalidValue: it has fewer results.
    """
    if context.device.on_cpu:
        raise MissingRule(f"{name} is a kernel of CUDA; trace the module with device='cpu'.")
    tape = Tape(context)
    made = list(KERNELS[name].rule(tape, sizes, dtype))
    if len(made) < len(results):
        raise InvalidValue(f"{name} has {len(made)} results, not {len(results)}; trace the module again.")
    unmade = {one.storage.buffer for one in made[len(results) :] if one is not None and one.storage}
    del made[len(results) :]
    found = [e for e in tape.events if isinstance(e, Alloc | Free) and e.buffer not in unmade]
    new = {event.buffer for event in found if isinstance(event, Alloc)}
    own: dict[Buffer, Buffer] = {}
    left_out: list[Event] = []
    for result, one in zip(results, made, strict=True):
        if one is None or one.storage is None:
            result.n_bytes = 0
            left_out.append(Alloc(result))
        else:
            result.n_bytes = one.storage.buffer.n_bytes
            own[one.storage.buffer] = result
    events = [type(event)(own.get(event.buffer, event.buffer)) for event in found if event.buffer in new]
    return [*events, *left_out]


def _sum(tape: Tape, sizes: Sizes, dtype: DType) -> Results:
    """The sums; sizes: outputs, inputs of each output, whether these inputs are a row apart."""
    n_outputs, n_inputs, along_rows = sizes
    return (tape.summed("sum", (n_outputs,), dtype, n_inputs, along_rows=bool(along_rows)),)


def _cumulative_sum(tape: Tape, sizes: Sizes, dtype: DType) -> Results:
    """The cumulative sums of a row; sizes: elements, whether they are cast to the sum's type first.

    Source: aten/src/ATen/native/ReduceOps.cpp (`impl_func_cum_ops`),
    aten/src/ATen/native/cuda/ScanUtils.cuh (`scan_dim`).
    """
    n_elements, casts = sizes
    total = tape.new("sum", (n_elements,), dtype)
    with tape.workspace() as scratch:
        if casts:
            scratch.new("operand", (n_elements,), dtype)
        scratch.new("CUB: scan", (scan_bytes(n_elements, of_int32=dtype == INT32),), UINT8)
    return (total,)


def _repeated(tape: Tape, sizes: Sizes, dtype: DType) -> Results:
    """The places of elements that are repeated; sizes: elements, places.

    Source: aten/src/ATen/native/Repeat.h (`repeat_interleave_common`).
    """
    n_elements, n_places = sizes
    with tape.workspace() as sums:
        sums.new("cumulative sum", (n_elements,), dtype)
        with tape.workspace() as scratch:
            scratch.new("CUB: scan", (scan_bytes(n_elements, of_int32=dtype == INT32),), UINT8)
        with tape.workspace() as scratch:
            scratch.new("which are not negative", (n_elements,), BOOL)
            scratch.new("whether all are", (), BOOL)
        return (tape.new("places", (n_places,), dtype),)


MOST_UNIQUE: Final = 1 << 17
"""Elements of 4 bytes for which CUB's states of tiles to find the different ones take 512 bytes at most."""


def _unique(tape: Tape, sizes: Sizes, dtype: DType) -> Results:
    """Elements that differ from the one before, in memory for all; sizes: elements.

    Raises:
        MissingRule: for more elements, or wider ones, than were looked at.

    Source: aten/src/ATen/native/cuda/UniqueCub.cu (`compute_unique`).
    """
    (n_elements,) = sizes
    if n_elements > MOST_UNIQUE or dtype != INT32:
        raise MissingRule(
            f"unique_consecutive of {n_elements} {dtype.name} on CUDA takes memory that only CUB knows; use "
            f"int32 and at most {MOST_UNIQUE} elements, or trace the module on a GPU (executed=True)."
        )
    found = tape.new("unique", (n_elements,), dtype)
    with tape.workspace() as scratch:
        scratch.new("number of them", (1,), INT64)
        scratch.new("CUB: select", (1023,), UINT8)
    return (found,)


SORTED_BY_ONE_BLOCK: Final = 2304
"""The most integers of 64 bits, with their places, that one block of threads sorts, without memory for it.

Source: cub/device/dispatch/dispatch_radix_sort.cuh (`InvokeSingleTile`), as CUDA 13.0 tunes it.
"""


def _added_by_index(tape: Tape, sizes: Sizes, dtype: DType) -> Results:
    """Scratch of `index_put_(accumulate=True)`, which sorts its indices; sizes: indices, rows of the table.

    Source: aten/src/ATen/native/cuda/Indexing.cu (`index_put_with_sort_kernel`).
    """
    n_indices, n_rows = sizes
    with tape.workspace() as scratch:
        for name in ("indices", "indices of rows", "sorted indices", "their places"):
            scratch.new(name, (n_indices,), INT64)
        n_bytes = 1
        if n_indices > SORTED_BY_ONE_BLOCK:
            n_passes = -(-n_rows.bit_length() // 8)
            n_bytes = radix_sort_bytes(tape.context.device, n_indices, n_passes)
        scratch.new("CUB: sort", (n_bytes,), UINT8)
    return ()


def _masked_scatter(tape: Tape, sizes: Sizes, dtype: DType) -> Results:
    """A copy with other elements where a mask is true; sizes: elements, whether the mask is expanded to them.

    Source: aten/src/ATen/native/cuda/IndexKernel.cpp (`masked_scatter__cuda`),
    aten/src/ATen/native/cuda/IndexKernel.cu (`launch_masked_scatter_kernel`).
    """
    n_elements, expands = sizes
    y = tape.new("y", (n_elements,), dtype)
    with tape.workspace() as scratch:
        scratch.new("prefix sums", (n_elements,), INT64)
        if expands:
            scratch.new("mask", (n_elements,), BOOL)
        scratch.new("CUB: scan", (scan_bytes(n_elements),), UINT8)
    return (y,)


def _masked_scatter_backward(tape: Tape, sizes: Sizes, dtype: DType) -> Results:
    """The gradient's elements where a mask is true; sizes: elements, their dims, elements of the result.

    Neglects: memory with which CUB counts and finds them.
    Source: torch/csrc/autograd/FunctionsManual.cpp (`masked_scatter_backward`),
    aten/src/ATen/native/cuda/IndexKernel.cpp (`masked_select_out_cuda_impl`),
    aten/src/ATen/native/cuda/Nonzero.cu (`nonzero_cuda_out_impl`).
    """
    n_elements, dims, n_found = sizes
    with tape.workspace() as scratch:
        with tape.workspace() as expanded:
            expanded.new("mask", (n_elements,), BOOL)
            scratch.new("places", (n_found, dims), INT64)
        return (tape.new("grad", (n_found,), dtype),)


def _table_gradient(tape: Tape, sizes: Sizes, dtype: DType) -> Results:
    """An embedding's gradient; sizes: ids, the table's rows, its width, whether the ids are copied first."""
    n_ids, n_rows, width, copies = sizes
    with tape.workspace() as ids:
        if copies:
            ids.new("ids in order", (n_ids,), INT64)
        return (table_gradient(tape, n_ids, (n_rows, width), dtype),)


def _norm_gradients(tape: Tape, sizes: Sizes, dtype: DType) -> Results:
    """A norm's gradients; sizes: tokens, their width, whether the input has one, how many weights do."""
    n_tokens, width, of_input, n_weights = sizes
    of_inputs = [tape.new("grad", (n_tokens, width), dtype) for _ in range(of_input)]
    of_weights: list[Tensor | None] = [tape.new("grad", (width,), dtype) for _ in range(n_weights)]
    sum_partial_rows(of_weights, n_tokens)
    return *of_inputs, *of_weights


LONGEST_SORTED: Final = 4096
"""Longer rows are sorted by CUB.

Source: aten/src/ATen/native/cuda/Sort.cpp (`should_use_small_sort`).
"""


def _sort(tape: Tape, sizes: Sizes, dtype: DType) -> Results:
    """The sorted elements and their places; sizes: rows, elements of each.

    Raises:
        MissingRule: for several long rows, or long rows of another type than int64.

    Source: aten/src/ATen/native/cuda/Sort.cpp (`sort_cuda_kernel`, `sortKeyValueInplace`),
    aten/src/ATen/native/cuda/SortStable.cu (`launch_stable_sort_kernel`).
    """
    n_rows, n_elements = sizes
    by_cub = n_elements > LONGEST_SORTED
    if by_cub and (n_rows > 1 or dtype != INT64):
        raise MissingRule(
            f"a sort of {n_rows} rows of {n_elements} {dtype.name} on CUDA takes memory that only CUB knows; "
            f"use rows of at most {LONGEST_SORTED}, or trace the module on a GPU (executed=True)."
        )
    elements = tape.new("sorted", (n_rows, n_elements), dtype)
    places = tape.new("places", (n_rows, n_elements), INT64)
    with tape.workspace() as scratch:
        scratch.new("places in a row", (n_elements,), INT64)
        if by_cub:
            n_bytes = radix_sort_bytes(tape.context.device, n_elements)
            scratch.new("CUB: sort", (n_bytes,), UINT8)
    return elements, places


def _grouped_product(tape: Tape, sizes: Sizes, dtype: DType) -> Results:
    """Products of groups of rows.

    Sizes: groups, the result's rows and columns, whether the rows are divided over the groups (or each group
    has a product of its own).
    """
    n_groups, rows, columns, divided = sizes
    y = tape.new("product", (1 if divided else n_groups, rows, columns), dtype)
    with tape.workspace() as scratch:
        of_group = rows // n_groups if divided else rows
        device = tape.context.device
        needed = grouped_product_scratch(device, n_groups, of_group, columns) if dtype == BF16 else None
        if needed is not None:
            scratch.new("groups", (needed.arguments_bytes,), UINT8)
            scratch.new("CUTLASS: workspace", (needed.workspace_bytes,), UINT8)
    return (y,)


IN_ORDER: Final = "_in_order"
"""The end of the name of a backward kernel whose output's gradient is not laid out by tokens."""

AND_MASK: Final = "_and_mask"
"""The end of the name of one that computes the gradient of a mask too."""

Attention = Callable[[Tensor, Tensor, Tensor, bool, int], Tensor]
"""From queries, keys, values, whether there is dropout and how there is a mask, to the output."""


def _cudnn(q: Tensor, k: Tensor, v: Tensor, drops: bool, masked: int) -> Tensor:
    return cudnn_attention(q, k, v, dropout=drops)


def _flash(q: Tensor, k: Tensor, v: Tensor, drops: bool, masked: int) -> Tensor:
    return flash_attention_cuda(q, k, v, dropout=drops)


def _efficient_and_mask(q: Tensor, k: Tensor, v: Tensor, drops: bool, masked: int) -> Tensor:
    return _efficient(q, k, v, drops, masked, mask_has_grad=True)


def _efficient(
    q: Tensor, k: Tensor, v: Tensor, drops: bool, masked: int, mask_has_grad: bool = False
) -> Tensor:
    """Memory-efficient attention.

    Raises:
        MissingRule: for a mask whose rows are padded otherwise than they were as it was traced, or whose
            gradient's are, as sums of such gradients are not in place.
    """
    n_keys = k.shape[1]
    if masked and (masked - 1 != n_keys % 8 or (mask_has_grad and masked == 1 and n_keys % 16)):
        raise MissingRule(
            f"memory-efficient attention to {n_keys} keys with a mask has no rule for CUDA, as it pads "
            f"the mask's rows; use a number of keys that is a multiple of {16 if mask_has_grad else 8}."
        )
    return efficient_attention(q, k, v, mask_has_grad=mask_has_grad)


FUSED: Final[Mapping[str, Attention]] = {"cudnn": _cudnn, "flash": _flash, "efficient": _efficient}
"""The fused kernels, by the names that `attention_kernel` gives them."""


def _fused(tape: Tape, sizes: Sizes, dtype: DType) -> Attention:
    """The fused kernel that PyTorch takes on the GPU.

    Raises:
        MissingRule: it takes none.
    """
    *_, n_heads, n_kv_heads, d_head, drops, masked = sizes
    how = {"grouped": n_heads != n_kv_heads, "dropout": bool(drops), "masked": bool(masked)}
    kernel = attention_kernel(tape.context.device, tape.context.torch_release, dtype, d_head, **how)
    if kernel in FUSED:
        return FUSED[kernel]
    raise MissingRule(
        f"attention with heads of {d_head} is several products on this GPU, and one kernel on an H100, "
        "where it was traced; use such a GPU."
    )


def _attended(rule: Attention, tape: Tape, sizes: Sizes, dtype: DType) -> tuple[Node, Saved]:
    """The node of attention, and what it has saved beside queries, keys and values.

    Sizes: batch, queries, keys, heads of queries and of keys, width of a head, whether there is dropout,
    and 0 without a mask, else 1 and by how much its rows are longer than whole 8s (8: they are not
    aligned, and were not padded).
    """
    batch, n_queries, n_keys, n_heads, n_kv_heads, d_head, drops, masked = sizes
    q = Tensor(tape, (batch, n_queries, n_heads, d_head), dtype)
    k, v = (Tensor(tape, (batch, n_keys, n_kv_heads, d_head), dtype) for _ in range(2))
    node = rule(q, k, v, bool(drops), masked).node
    if not isinstance(node, Node) or node.saved is None:
        raise MissingRule("attention has no backward pass here.")
    return node, node.saved[3:]


def _attention(rule: Attention, tape: Tape, sizes: Sizes, dtype: DType) -> Results:
    """The output, each row's log-sum-exp, and two tensors of the random state, if it is kept."""
    _, saved = _attended(rule, tape, sizes, dtype)
    return *saved, *[None] * (4 - len(saved))


def _attention_backward(
    rule: Attention, tape: Tape, sizes: Sizes, dtype: DType, *, copies_grad: bool = False
) -> Results:
    """The gradients of queries, keys and values; `copies_grad`: the output's gradient is copied first.

    All kernels but cuDNN's do so with a gradient that is not laid out by tokens.

    Source: aten/src/ATen/native/transformers/cuda/attention_backward.cu (`_efficient_attention_backward`,
    `_flash_attention_backward`).
    """
    node, (y, *_) = _attended(rule, tape, sizes, dtype)
    tape.events.clear()
    copies = copies_grad and rule is not _cudnn
    return tape.gradients(node, tape.new("grad by token", y.shape, dtype) if copies else y)


def _fused_attention(tape: Tape, sizes: Sizes, dtype: DType) -> Results:
    return _attention(_fused(tape, sizes, dtype), tape, sizes, dtype)


def _fused_attention_backward(
    tape: Tape, sizes: Sizes, dtype: DType, *, copies_grad: bool = False
) -> Results:
    rule = _fused(tape, sizes, dtype)
    return _attention_backward(rule, tape, sizes, dtype, copies_grad=copies_grad)


class Kernel(NamedTuple):
    """How many sizes a kernel takes, and its rule."""

    n_sizes: int
    rule: Callable[[Tape, Sizes, DType], Results]


KERNELS: Final[Mapping[str, Kernel]] = {
    "sum": Kernel(3, _sum),
    "cumulative_sum": Kernel(2, _cumulative_sum),
    "repeated": Kernel(2, _repeated),
    "unique": Kernel(1, _unique),
    "added_by_index": Kernel(2, _added_by_index),
    "masked_scatter": Kernel(2, _masked_scatter),
    "masked_scatter_backward": Kernel(3, _masked_scatter_backward),
    "sort": Kernel(2, _sort),
    "grouped_product": Kernel(4, _grouped_product),
    "table_gradient": Kernel(4, _table_gradient),
    "norm_gradients": Kernel(4, _norm_gradients),
    "flash_attention": Kernel(8, partial(_attention, _flash)),
    "fused_attention": Kernel(8, _fused_attention),
    "efficient_attention": Kernel(8, partial(_attention, _efficient)),
    **{
        f"{name}{IN_ORDER * copies}{and_mask}": Kernel(8, partial(rule, copies_grad=copies))
        for copies in (False, True)
        for name, and_mask, rule in (
            ("flash_attention_backward", "", partial(_attention_backward, _flash)),
            ("fused_attention_backward", "", _fused_attention_backward),
            ("efficient_attention_backward", "", partial(_attention_backward, _efficient)),
            ("efficient_attention_backward", AND_MASK, partial(_attention_backward, _efficient_and_mask)),
        )
    },
}
"""Each kernel by its name."""
