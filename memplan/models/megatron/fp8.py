"""Transformer Engine's products in 8 bits: what a quantized tensor holds, and what layers save of it.

A product of two operands reads both by rows, so a tensor that is read by columns too has a second, transposed
copy (`columns`); on Blackwell, products of tensors with one scale read one copy either way.
"""

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from memplan.models.megatron.config import Fp8, TransformerConfig
from memplan.models.megatron.layers import (
    Norm,
    forward_gemm,
    gemm,
    gradient_gemms,
    grouped_wgrads,
    operands_of,
    row_output,
    sent,
    sum_input_gradient,
    wgrads,
    whole_sequence,
)
from memplan.record import Compute, ComputeKind
from memplan.shapes import BF16, FP32, UINT8, DType, Shape, n_elements
from memplan.tape import Grads, Saved, Tape, Tensor, Workspace

BLOCK: Final = 128
"""The elements of a block's row under the blockwise recipe, each with a scale in float32."""

MX_BLOCK: Final = 32
"""The elements of a block of MXFP8, each with a scale of 8 bits."""

BULK_ALIGNMENT: Final = 256
"""The bytes to which data are aligned in a buffer of several quantized tensors, which begins aligned too."""

SCALES_ALIGNMENT: Final = 16
"""The same of their scales, which come after all data.

Source: transformer_engine/pytorch/csrc/extensions/allocate.cpp (`bulk_allocate`).
"""

Part = tuple[str, Shape, DType]
"""A tensor of a quantized one: its name, shape and type."""


class Quantized(NamedTuple):
    """A tensor in 8 bits: its data with their scales, by rows and by columns; either may be missing."""

    rows: Saved
    columns: Saved


def _padded(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def rows_of(shape: Shape, fp8: Fp8, *, square: bool = False) -> list[Part]:
    """The tensors of a quantized one by rows: its data, and the scales; `square`: blocks of a weight.

    Source: transformer_engine/pytorch/csrc/quantizer.cpp (`create_tensor`, `get_scale_shape`).

    >>> [shape for _, shape, _ in rows_of((256, 512), Fp8(recipe="blockwise"))]
    [(256, 512), (4, 256)]
    """
    n, width = n_elements(shape[:-1]), shape[-1]
    data: Part = ("in fp8", shape, UINT8)
    if fp8.is_per_tensor:
        return [data, ("scale", (1,), FP32)]
    if fp8.recipe == "mxfp8":
        return [data, ("scales", (_padded(n, 128), _padded(width // MX_BLOCK, 4)), UINT8)]
    blocks = -(-width // BLOCK)
    of_rows = (-(-n // BLOCK), _padded(blocks, 4)) if square else (blocks, _padded(n, 4))
    return [data, ("scales", of_rows, FP32)]


def columns_of(shape: Shape, fp8: Fp8, *, square: bool = False) -> list[Part]:
    """The tensors of a quantized one by columns, but for a scale that it shares with the rows.

    Source: transformer_engine/pytorch/csrc/quantizer.cpp (`create_tensor`, `get_scale_shape`).
    """
    n, width = n_elements(shape[:-1]), shape[-1]
    data: Part = ("in fp8, transposed", (width, n), UINT8)
    if fp8.is_per_tensor:
        return [data] * fp8.transposes
    if fp8.recipe == "mxfp8":
        return [data, ("scales, transposed", (_padded(n // MX_BLOCK, 4), _padded(width, 128)), UINT8)]
    return [data, ("scales, transposed", rows_of((width, n), fp8, square=square)[1][1], FP32)]


def quantized(
    tape: Tape, name: str, shape: Shape, fp8: Fp8, *, rows: bool = True, columns: bool = True
) -> Quantized:
    """A tensor that is cast to 8 bits; a tensor with one scale has its rows in any case.

    Current scaling reads it once more, for its largest element.
    """
    per_tensor, n_bytes = fp8.is_per_tensor, n_elements(shape) * BF16.itemsize

    def made(parts: list[Part]) -> Saved:
        return tuple([tape.new(f"{name} {what}", own, dtype) for what, own, dtype in parts])

    before = tape.moved_bytes, tape.n_kernels
    of_rows = made(rows_of(shape, fp8)) if rows or per_tensor else ()
    of_columns = made(columns_of(shape, fp8)) if columns else ()
    written = sum([one.n_bytes for one in (*of_rows, *of_columns)])
    reads = 2 if fp8.recipe == "tensorwise" else 1
    tape.moved_bytes, tape.n_kernels = before[0] + written + reads * n_bytes, before[1] + reads
    if per_tensor and columns:
        of_columns = (*(of_columns or of_rows[:1]), of_rows[1])
    return Quantized(of_rows, of_columns)


def transposed(tape: Tape, x: Quantized, name: str, shape: Shape, fp8: Fp8) -> Quantized:
    """The same tensor with its columns; with one scale they are the rows' transpose (`_create_transpose`).

    Source: transformer_engine.pytorch.tensor.storage.float8_tensor_storage:Float8TensorStorage.update_usage.
    """
    if x.columns:
        return x
    made = [tape.new(f"{name} {what}", own, dtype) for what, own, dtype in columns_of(shape, fp8)]
    return Quantized(x.rows, (*(made or x.rows[:1]), *x.rows[1:]))


def gathered(
    tape: Tape, what: str, shape: Shape, fp8: Fp8, config: TransformerConfig, *,
    rows: bool = True, columns: bool = False,
    until: Workspace | None = None, beside: Compute | None = None,
) -> Quantized:  # fmt: skip
    """A tensor of this shape, whose quantized parts along the sequence are gathered.

    Transposed parts of the blockwise recipe, and scales by rows, are interleaved in a buffer of their own,
    which lives until the gather is waited for: at once, or when the block `until` ends.

    With `tp_comm_overlap` they are in Userbuffers, not in PyTorch's memory.

    Neglects: the copy of MXFP8's gathered scales in the order of products, which lives for one product.

    Source: transformer_engine.pytorch.distributed:gather_along_first_dim,
    transformer_engine.pytorch.module.base:fill_userbuffers_buffer_for_all_gather.
    """
    if config.tp_comm_overlap:
        parts = [Tensor(tape, own, dtype, is_view=True) for _, own, dtype in rows_of(shape, fp8)]
        whole = Quantized(tuple(parts), ())
    else:
        with tape.by_products():
            whole = quantized(tape, what, shape, fp8, rows=rows, columns=columns and not fp8.is_per_tensor)
    for one in (*whole.rows, *whole.columns):
        if n_elements(one.shape) > 1:
            sent(tape, "all_gather", what, one.shape, one.dtype, beside if one.dtype == UINT8 else None)
    with tape.workspace() as at_once:
        for one in (*whole.rows[1:], *whole.columns[:1]) if fp8.recipe == "blockwise" else ():
            (until or at_once).new("interleaved", one.shape, one.dtype)
    return transposed(tape, whole, what, shape, fp8) if columns else whole


def reduced_amax(tape: Tape, config: TransformerConfig, fp8: Fp8) -> None:
    """Ranks with parts of one sequence agree on a scale under current scaling."""
    if config.sequence_parallel and fp8.recipe == "tensorwise":
        sent(tape, "all_reduce", "amax", (1,), FP32)


def split_quantized(
    tape: Tape, name: str, shapes: list[Shape], fp8: Fp8, *, columns: bool = True, rows: bool = True
) -> Quantized:
    """A tensor's parts of these shapes in 8 bits; under scales of blocks they share a buffer each way.

    Source: transformer_engine/pytorch/csrc/extensions/cast.cpp (`split_quantize`,
    `bulk_allocate_fp8_blockwise_tensors`, `bulk_allocate_mxfp8_tensors`).
    """
    if fp8.is_per_tensor:
        parts = [quantized(tape, name, shape, fp8, columns=columns) for shape in shapes]
        return Quantized(*[sum([part[i] for part in parts], ()) for i in range(2)])
    n_bytes = sum([n_elements(shape) for shape in shapes]) * BF16.itemsize
    before = tape.moved_bytes, tape.n_kernels

    def together(of: Callable[[Shape, Fp8], list[Part]], what: str) -> Saved:
        size = 0
        for alignment, i in ((BULK_ALIGNMENT, 0), (SCALES_ALIGNMENT, 1)):
            for shape in shapes:
                _, own, dtype = of(shape, fp8)[i]
                size = _padded(size, alignment) + n_elements(own) * dtype.itemsize
        return (tape.new(f"{name} {what}", (size + BULK_ALIGNMENT,), UINT8),)

    of_rows = together(rows_of, "in fp8") if rows else ()
    of_columns = together(columns_of, "in fp8, transposed") if columns else ()
    written = sum([one.n_bytes for one in (*of_rows, *of_columns)])
    tape.moved_bytes, tape.n_kernels = before[0] + written + n_bytes, before[1] + 1
    return Quantized(of_rows, of_columns)


def grouped_linear(
    x: Tensor, name: str, n_out: int, n_rows: list[int], config: TransformerConfig, fp8: Fp8, *,
    save_original_input: bool,
) -> Tensor:  # fmt: skip
    """The products in 8 bits of each expert's `n_rows` and its weight.

    It saves x by columns, or x itself, as `row_linear` does.

    Source: transformer_engine.pytorch.module.grouped_linear:_GroupedLinear.
    """
    tape, (rows, n_in), dtype = x.tape, x.shape, x.dtype
    saves_x = save_original_input and fp8.recipe != "delayed"
    weights = [
        tape.parameter(f"{name}.weight{i}", (n_out, n_in), dtype=fp8.weight_dtype) for i in range(len(n_rows))
    ]

    def parts(width: int) -> list[Shape]:
        return [(n, width) for n in n_rows]

    def backward(grad: Tensor, saved: Saved) -> Grads:
        tape = grad.tape
        dy = split_quantized(tape, "output gradient", parts(n_out), fp8)
        with tape.by_products():
            grad_x = tape.new("dgrad", (rows, n_in), dtype)
        again = split_quantized(tape, "input", parts(n_in), fp8, rows=False) if saves_x else None
        of_weights = grouped_wgrads(tape, (n_out, n_in), len(weights), dtype, config)
        del dy, again
        return grad_x, *of_weights

    of_x = split_quantized(tape, "input", parts(n_in), fp8, columns=not saves_x)
    with tape.by_products():
        y = gemm(tape, name, (rows, n_out), n_in, dtype, ComputeKind.SCALED_MM)
    saved = (x,) if saves_x else of_x.columns
    y.node = tape.node((x.node, *[tape.weight(one).node for one in weights]), saved, backward)
    y.node.computes(ComputeKind.SCALED_MM, operands_of(y.shape, n_in), 0, 1)
    return y


def _drop(*tensors: Tensor) -> None:
    """Free tensors that their node still refers to (`clear_tensor_data`)."""
    for one in tensors:
        one.storage = None


def column_product(
    tape: Tape, name: str, what: str, shape: Shape, n_out: int, config: TransformerConfig, fp8: Fp8
) -> Tensor:
    """The output of a product by columns, whose input of this shape, `what`, is gathered if it is divided."""
    dtype, n_in, whole = tape.context.weight_dtype, shape[-1], whole_sequence(shape, config)
    out = (*whole[:-1], n_out)
    reduced_amax(tape, config, fp8)
    beside = forward_gemm(tape, out, n_in, dtype, config, ComputeKind.SCALED_MM)
    total = gathered(tape, what, whole, fp8, config, beside=beside) if config.sequence_parallel else None
    with tape.by_products():
        y = gemm(tape, name, out, n_in, dtype, ComputeKind.SCALED_MM)
    del total
    return y


def norm_column_linear(
    x: Tensor, name: str, n_out: int, config: TransformerConfig, fp8: Fp8, *, bias: bool
) -> Tensor:
    """A norm and a product in 8 bits whose weight is divided by columns.

    It saves x, its statistics and the normed x: by columns, or by rows if it is gathered again.

    Source: transformer_engine.pytorch.module.layernorm_linear:_LayerNormLinear.
    """
    tape, n_in, dtype = x.tape, x.shape[-1], x.dtype
    of, gathers = Norm(x, f"{name}.layer_norm_", config), config.sequence_parallel
    shape = x.shape
    own = [tape.parameter(f"{name}.weight", (n_out, n_in), dtype=fp8.weight_dtype)]
    own += [tape.parameter(f"{name}.bias", (n_out,))] if bias else []
    by_rows = saves_rows(config, fp8)

    def backward(grad: Tensor, saved: Saved) -> Grads:
        tape, ln_out = grad.tape, saved[1:3]
        of_bias = [tape.new("bgrad", (n_out,), dtype)] if bias else []
        dy, total, gemm_out, dgrad = column_gradients(tape, "normed input", shape, n_out, config, fp8)
        of_weight = wgrads(tape, (n_out, n_in), dtype, bias=False, config=config)
        _drop(*ln_out)
        del total
        if gathers:
            _drop(*dy.rows, *dy.columns)
        grad_x, of_norm = of.backward(tape)
        del gemm_out, dgrad, dy
        return grad_x, *of_norm, *of_weight, *of_bias

    statistics = of.statistics(tape)
    ln_out = quantized(tape, "normed input", shape, fp8, columns=not by_rows)
    if fp8.recipe != "delayed":
        tape.new("normed input", shape, dtype)
    y = column_product(tape, name, "normed input", shape, n_out, config, fp8)
    weights = [tape.weight(one).node for one in (*of.parameters, *own)]
    y.node = tape.node(
        (x.node, *weights), (x, *(ln_out.rows if by_rows else ln_out.columns), *statistics), backward
    )
    y.node.computes(ComputeKind.SCALED_MM, operands_of(y.shape, n_in), 0, 1 + len(of.parameters))
    return y


def column_gradients(
    tape: Tape, what: str, shape: Shape, n_out: int, config: TransformerConfig, fp8: Fp8, *,
    again: bool = False,
) -> tuple[Quantized, list[Quantized], Tensor, Tensor]:  # fmt: skip
    """The operands of the gradients of a product by columns, and the gradient of its input.

    The operands are the output's gradient, and the input of this shape where it is quantized `again` or
    gathered. The input's gradient comes as the product makes it, and as this rank's part of the sum.
    """
    dtype, n_in, gathers = tape.context.weight_dtype, shape[-1], config.sequence_parallel
    whole, by_rows = whole_sequence(shape, config), saves_rows(config, fp8)
    out = (*whole[:-1], n_out)
    dy = quantized(tape, "output gradient", out, fp8)
    of_input, of_own = gradient_gemms(tape, out, n_in, dtype, ComputeKind.SCALED_MM)
    operands = [quantized(tape, what, shape, fp8, rows=False, columns=not by_rows)] if again else []
    with tape.workspace() as until:
        if gathers:
            total = gathered(
                tape, what, whole, fp8, config,
                rows=by_rows, columns=not by_rows, until=until, beside=of_input,
            )  # fmt: skip
        with tape.by_products():
            gemm_out = Tensor(tape, whole, dtype, is_view=True)
            if not config.tp_comm_overlap:
                gemm_out = tape.new("dgrad", whole, dtype)
            dgrad = tape.new("scattered dgrad", shape, dtype) if gathers else gemm_out
        sum_input_gradient(tape, whole, dtype, config, of_own)
    if gathers:
        operands.append(transposed(tape, total, what, whole, fp8))
    return dy, operands, gemm_out, dgrad


def saves_rows(config: TransformerConfig, fp8: Fp8) -> bool:
    """Whether a product by columns saves its input by rows: gathers of columns would need several scales.

    Source: transformer_engine.pytorch.quantized_tensor:Quantizer.supports_only_rowwise_all_gather.
    """
    return config.sequence_parallel and fp8.is_per_tensor


def column_linear(
    x: Tensor, name: str, n_out: int, config: TransformerConfig, fp8: Fp8, *, save_original_input: bool
) -> Tensor:
    """A product in 8 bits whose weight is divided by columns, without a bias.

    It saves x by columns, or by rows if it is gathered again, or x itself, as `row_linear` does.

    Source: transformer_engine.pytorch.module.linear:_Linear.
    """
    tape, shape, dtype, n_in = x.tape, x.shape, x.dtype, x.shape[-1]
    by_rows = saves_rows(config, fp8)
    saves_x = save_original_input and fp8.recipe != "delayed"
    weight = tape.parameter(f"{name}.weight", (n_out, n_in), dtype=fp8.weight_dtype)

    def backward(grad: Tensor, saved: Saved) -> Grads:
        tape = grad.tape
        made = column_gradients(tape, "input", shape, n_out, config, fp8, again=saves_x)
        of_weight = wgrads(tape, (n_out, n_in), dtype, bias=False, config=config)
        return made[-1], *of_weight

    of_x = quantized(tape, "input", shape, fp8, columns=not (saves_x or by_rows))
    y = column_product(tape, name, "input", shape, n_out, config, fp8)
    saved = (x,) if saves_x else of_x.rows if by_rows else of_x.columns
    y.node = tape.node((x.node, tape.weight(weight).node), saved, backward)
    y.node.computes(ComputeKind.SCALED_MM, operands_of(y.shape, n_in), 0, 1)
    return y


def row_linear(
    x: Tensor, name: str, n_out: int, config: TransformerConfig, fp8: Fp8, *, save_original_input: bool
) -> Tensor:
    """A product in 8 bits whose weight is divided by rows, and the sum over tensor ranks.

    It saves x by columns, or x itself (`save_original_input`, but for delayed scaling), which is quantized
    again. The caller adds the bias.

    Source: transformer_engine.pytorch.module.linear:_Linear.
    """
    tape, shape, dtype = x.tape, x.shape, x.dtype
    n_in, gathers = shape[-1], config.sequence_parallel
    saves_x = save_original_input and fp8.recipe != "delayed"
    weight = tape.parameter(f"{name}.weight", (n_out, n_in), dtype=fp8.weight_dtype)
    whole = (*shape[:-1], n_out)

    def backward(grad: Tensor, saved: Saved) -> Grads:
        tape = grad.tape
        if gathers:
            part = quantized(tape, "output gradient", grad.shape, fp8, columns=not fp8.is_per_tensor)
            reduced_amax(tape, config, fp8)
            dgrad, _ = gradient_gemms(tape, whole, n_in, dtype, ComputeKind.SCALED_MM)
            beside = dgrad if config.tp_comm_overlap else None
            dy = gathered(tape, "output gradient", whole, fp8, config, columns=True, beside=beside)
            del part
        else:
            dy = quantized(tape, "output gradient", whole, fp8)
        again = quantized(tape, "input", shape, fp8, rows=False) if saves_x else None
        with tape.by_products():
            grad_x = tape.new("dgrad", shape, dtype)
        of_weight = wgrads(tape, (n_out, n_in), dtype, bias=False, config=config)
        del dy, again
        return grad_x, *of_weight

    of_x = quantized(tape, "input", shape, fp8, columns=not saves_x)
    y = row_output(tape, name, whole, n_in, dtype, config, ComputeKind.SCALED_MM)
    saved = (x,) if saves_x else of_x.columns
    y.node = tape.node((x.node, tape.weight(weight).node), saved, backward)
    y.node.computes(ComputeKind.SCALED_MM, operands_of(whole, n_in), 0, 1)
    return y


def weight_copies(shape: Shape, fp8: Fp8) -> Iterator[Part]:
    """What is kept for good of a weight beside the weight itself: in 8 bits, by rows and by columns.

    Source: transformer_engine.pytorch.module.base:quantize_weight.
    """
    data, *scales = rows_of(shape, fp8, square=True)
    if not fp8.param_gather:
        yield data
    yield from scales
    yield from columns_of(shape, fp8, square=True)
