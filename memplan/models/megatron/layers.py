"""Transformer Engine's and Megatron's layers over shapes, as one tensor-parallel rank runs them.

Shapes are local, as (batch, seq, features): Megatron's own order is (seq, batch, features), of as many bytes.
Under sequence parallelism `seq` is this rank's part between layers. Each operation records what its autograd
function allocates, saves and sends.
"""

from collections.abc import Sequence

from memplan.models.megatron.config import TransformerConfig
from memplan.record import CollectiveKind, Compute, ComputeKind, gradient_products
from memplan.shapes import BOOL, FP32, INT64, DType, Parameter, Shape, n_elements
from memplan.tape import Expanded, Grads, Node, Saved, Tape, Tensor, Workspace


def gemm(
    tape: Tape, name: str, shape: Shape, n_in: int, dtype: DType, kind: ComputeKind = ComputeKind.MM
) -> Tensor:
    """A new matrix product of this shape, summed over `n_in` features."""
    with tape.by_products():
        y = tape.new(name, shape, dtype)
    tape.computed(kind, operands_of(shape, n_in), shape, dtype)
    return y


def operands_of(shape: Shape, n_in: int) -> tuple[Shape, Shape]:
    """The operands of a product of this shape, summed over `n_in` features."""
    return (n_elements(shape[:-1]), n_in), (n_in, shape[-1])


def gradient_gemms(
    tape: Tape, shape: Shape, n_in: int, dtype: DType, kind: ComputeKind = ComputeKind.MM
) -> tuple[Compute, ...]:
    """The products of the backward pass of one of this shape: its input's gradient, its weight's."""
    return tuple(
        [
            tape.computation(each, (left, right), (left[0], right[-1]), dtype)
            for each, (left, right) in gradient_products(kind, operands_of(shape, n_in))
        ]
    )


def sent(
    tape: Tape, kind: CollectiveKind, what: str, x: Tensor | Shape, dtype: DType,
    beside: Compute | None = None,
) -> None:  # fmt: skip
    """Record a collective over the tensor axis, whose whole tensor has this shape.

    `beside`: the product that runs meanwhile.
    """
    shape = x.shape if isinstance(x, Tensor) else x
    tape.collective(kind, "tp", what, n_elements(shape) * dtype.itemsize, beside)


def sum_input_gradient(
    tape: Tape, shape: Shape, dtype: DType, config: TransformerConfig, beside: Compute
) -> None:
    """Sum the gradient of the input of a product by columns over tensor ranks, while `beside` is computed.

    Source: megatron.core.tensor_parallel.layers:LinearWithGradAccumulationAndAsyncCommunication. Megatron of
    2021 and BigScience's waited in `copy_to_tensor_model_parallel_region` instead.
    """
    if config.sequence_parallel:
        sent(tape, "reduce_scatter", "input gradient", shape, dtype, beside)
    elif config.tp > 1:
        meanwhile = beside if config.async_tensor_model_parallel_allreduce else None
        sent(tape, "all_reduce", "input gradient", shape, dtype, meanwhile)


def forward_gemm(
    tape: Tape, shape: Shape, n_in: int, dtype: DType, config: TransformerConfig,
    kind: ComputeKind = ComputeKind.MM,
) -> Compute | None:  # fmt: skip
    """The product of this shape that runs while its input or its output is sent; None: none does.

    Source: transformer_engine.pytorch.module.base:initialize_ub (the methods "ring_exchange", "pipeline").
    """
    if not config.tp_comm_overlap:
        return None
    return tape.computation(kind, operands_of(shape, n_in), shape, dtype)


def whole_sequence(shape: Shape, config: TransformerConfig) -> Shape:
    """The shape of what is gathered along the sequence: the shape itself without sequence parallelism."""
    if not config.sequence_parallel:
        return shape
    batch, seq, width = shape
    return batch, seq * config.tp, width


class Norm:
    """LayerNorm or RMSNorm as Transformer Engine computes it: weights in the parameters' type."""

    def __init__(self, x: Tensor, name: str, config: TransformerConfig) -> None:
        parts = ("weight", "bias") if config.normalization == "LayerNorm" else ("weight",)
        self.parameters = [x.tape.parameter(f"{name}{part}", x.shape[-1:]) for part in parts]
        self.shape, self.dtype = x.shape, x.dtype

    def forward(self, x: Tensor, name: str) -> tuple[Tensor, Saved]:
        """The normed x, and each row's mean (LayerNorm only) and 1/std, as they are saved.

        Source: transformer_engine/pytorch/csrc/extensions/normalization.cpp (`layernorm_fwd`, `rmsnorm_fwd`).
        """
        y = x.tape.new(name, self.shape, self.dtype)
        return y, self.statistics(x.tape)

    def statistics(self, tape: Tape) -> Saved:
        """Each row's mean (LayerNorm only) and 1/std."""
        names = ("mean", "rstd") if len(self.parameters) == 2 else ("rstd",)
        return tuple([tape.new(name, self.shape[:-1], FP32) for name in names])

    def backward(self, tape: Tape) -> tuple[Tensor, list[Tensor]]:
        """The gradients of x and of the weights.

        Source: transformer_engine/pytorch/csrc/extensions/normalization.cpp (`layernorm_bwd`).
        """
        grad = tape.new("grad", self.shape, self.dtype)
        return grad, [tape.new("grad", self.shape[-1:], self.dtype) for _ in self.parameters]


def norm(x: Tensor, name: str, config: TransformerConfig) -> Tensor:
    """A norm of its own (`TENorm`): saves x and its statistics.

    Source: transformer_engine.pytorch.module.layernorm:LayerNorm.
    """
    of = Norm(x, f"{name}.", config)

    def backward(grad: Tensor, saved: Saved) -> Grads:
        grad_x, grads = of.backward(grad.tape)
        return grad_x, *grads

    y, statistics = of.forward(x, name)
    weights = [x.tape.weight(one).node for one in of.parameters]
    y.node = x.tape.node((x.node, *weights), (x, *statistics), backward)
    return y


def te_norm_column_linear(
    x: Tensor, name: str, n_out: int, config: TransformerConfig, *, bias: bool
) -> Tensor:
    """A norm and a product whose weight is divided by columns: saves x, its statistics and the normed x.

    Under sequence parallelism the normed x is gathered for the product, and again in the backward pass.
    `bias`: it is added by the product; else the caller adds it.

    Source: transformer_engine.pytorch.module.layernorm_linear:_LayerNormLinear.
    """
    tape, n_in, dtype = x.tape, x.shape[-1], x.dtype
    of = Norm(x, f"{name}.layer_norm_", config)
    gathered = whole_sequence(x.shape, config)
    out = (*gathered[:-1], n_out)
    own = [tape.parameter(f"{name}.weight", (n_out, n_in))]
    own += [tape.parameter(f"{name}.bias", (n_out,))] if bias else []

    def backward(grad: Tensor, saved: Saved) -> Grads:
        tape, ln_out = grad.tape, saved[1]
        dgrad, wgrad = gradient_gemms(tape, out, n_in, dtype)
        with tape.by_products(), tape.workspace() as local:
            if config.sequence_parallel:
                _in_memory(local, "gathered input", gathered, dtype, config)
                sent(tape, "all_gather", "normed input", gathered, dtype, dgrad)
            gemm_out = None if config.tp_comm_overlap else tape.new("dgrad", gathered, dtype)
            if config.sequence_parallel:
                _in_memory(local, "scattered dgrad", x_shape, dtype, config)
            sum_input_gradient(tape, gathered, dtype, config, wgrad)
            grads = wgrads(tape, (n_out, n_in), dtype, bias=bias, config=config)
            gemm_out = gemm_out or tape.new("scattered dgrad", x_shape, dtype)
        ln_out.storage = None  # clear_tensor_data(ln_out)
        grad_x, of_norm = of.backward(tape)
        del gemm_out
        return grad_x, *of_norm, *grads

    x_shape = x.shape
    ln_out, statistics = of.forward(x, f"{name}.layer_norm")
    with tape.by_products(), tape.workspace() as local:
        if config.sequence_parallel:
            _in_memory(local, "gathered input", gathered, dtype, config)
            beside = forward_gemm(tape, out, n_in, dtype, config)
            sent(tape, "all_gather", "normed input", gathered, dtype, beside)
        y = gemm(tape, name, out, n_in, dtype)
    weights = [tape.weight(one).node for one in (*of.parameters, *own)]
    y.node = tape.node((x.node, *weights), (x, ln_out, *statistics), backward)
    y.node.computes(ComputeKind.MM, operands_of(out, n_in), 0, 1 + len(of.parameters))
    return y


def _in_memory(local: Workspace, name: str, shape: Shape, dtype: DType, config: TransformerConfig) -> None:
    """A tensor of a workspace, unless it is in Userbuffers."""
    if not config.tp_comm_overlap:
        local.new(name, shape, dtype)


def input_gradient(
    tape: Tape, local: Workspace, gathered: Shape, shape: Shape, dtype: DType, config: TransformerConfig, *,
    beside: Compute, by_pytorch: bool = False,
) -> Tensor:  # fmt: skip
    """The gradient of the input of a product by columns, summed over tensor ranks.

    Under sequence parallelism `local` keeps the gradient of the gathered input, of which this is a part.
    `beside`: the product of the weight's gradient, which runs while the sum is sent. `by_pytorch`: PyTorch's
    cuBLAS computes the product.
    """
    grad = tape.new("dgrad", gathered, dtype)
    if by_pytorch:
        tape.product(grad)
    if config.sequence_parallel:
        local.keep(grad)
        grad = tape.new("scattered dgrad", shape, dtype)
    sum_input_gradient(tape, gathered, dtype, config, beside)
    return grad


def te_column_linear(x: Tensor, name: str, n_out: int, config: TransformerConfig) -> Tensor:
    """A product whose weight is divided by columns, without a bias: saves x, which is gathered again.

    Source: transformer_engine.pytorch.module.linear:_Linear.
    """
    tape, shape, dtype = x.tape, x.shape, x.dtype
    gathered = whole_sequence(shape, config)
    weight = tape.parameter(f"{name}.weight", (n_out, shape[-1]))
    of_weight, out = weight.shape, (*gathered[:-1], n_out)

    def backward(grad: Tensor, saved: Saved) -> Grads:
        tape = grad.tape
        dgrad, wgrad = gradient_gemms(tape, out, shape[-1], dtype)
        with tape.by_products(), tape.workspace() as local:
            if config.sequence_parallel:
                local.new("gathered input", gathered, dtype)
                sent(tape, "all_gather", "input", gathered, dtype, dgrad)
            grad_x = input_gradient(tape, local, gathered, shape, dtype, config, beside=wgrad)
            return grad_x, *wgrads(tape, of_weight, dtype, bias=False, config=config)

    with tape.by_products(), tape.workspace() as local:
        if config.sequence_parallel:
            local.new("gathered input", gathered, dtype)
            sent(tape, "all_gather", "input", gathered, dtype)
        y = gemm(tape, name, out, shape[-1], dtype)
    y.node = tape.node((x.node, tape.weight(weight).node), (x,), backward)
    y.node.computes(ComputeKind.MM, operands_of(out, shape[-1]), 0, 1)
    return y


def wgrads(
    tape: Tape, shape: Shape, dtype: DType, *, bias: bool, config: TransformerConfig
) -> list[Tensor | None]:
    """The gradients of a weight and its bias; fused, main_grad takes the weight's."""
    grads: list[Tensor | None] = (
        [None] if config.gradient_accumulation_fusion else [tape.new("wgrad", shape, dtype)]
    )
    return [*grads, tape.new("bgrad", shape[:1], dtype)] if bias else grads


def grouped_wgrads(
    tape: Tape, shape: Shape, n: int, dtype: DType, config: TransformerConfig
) -> list[Tensor | None]:
    """The gradients of `n` experts' weights; None if they are dummies that are kept for good.

    Source: transformer_engine.pytorch.module.base:get_dummy_wgrad.
    """
    if config.gradient_accumulation_fusion and config.shares_grouped_wgrads:
        return [None] * n
    return [tape.new("wgrad", shape, dtype) for _ in range(n)]


def te_row_linear(x: Tensor, name: str, n_out: int, config: TransformerConfig) -> Tensor:
    """A product whose weight is divided by rows, and the sum over tensor ranks; the caller adds the bias.

    Source: transformer_engine.pytorch.module.linear:_Linear.
    """
    tape, shape, dtype = x.tape, x.shape, x.dtype
    n_in = shape[-1]
    weight = tape.parameter(f"{name}.weight", (n_out, n_in))
    whole = (*shape[:-1], n_out)

    def backward(grad: Tensor, saved: Saved) -> Grads:
        tape = grad.tape
        with tape.by_products(), tape.workspace() as local:
            if config.sequence_parallel:
                _in_memory(local, "gathered output gradient", whole, dtype, config)
                dgrad, _ = gradient_gemms(tape, whole, n_in, dtype)
                beside = dgrad if config.tp_comm_overlap else None
                sent(tape, "all_gather", "output gradient", whole, dtype, beside)
            grad_x = tape.new("dgrad", shape, dtype)
            return grad_x, *wgrads(tape, (n_out, n_in), dtype, bias=False, config=config)

    y = row_output(tape, name, whole, n_in, dtype, config)
    y.node = tape.node((x.node, tape.weight(weight).node), (x,), backward)
    y.node.computes(ComputeKind.MM, operands_of(whole, n_in), 0, 1)
    return y


def row_output(
    tape: Tape, name: str, shape: Shape, n_in: int, dtype: DType, config: TransformerConfig,
    kind: ComputeKind = ComputeKind.MM,
) -> Tensor:  # fmt: skip
    """The output of a product by rows, summed over tensor ranks: of the sequence this rank's part.

    `shape`: of the product before the sum.
    """
    beside = forward_gemm(tape, shape, n_in, dtype, config, kind)
    if beside is not None:
        tape.events.append(beside)
    else:
        y = gemm(tape, name, shape, n_in, dtype, kind)
    if config.sequence_parallel:
        batch, seq, n_out = shape
        with tape.by_products():
            y = tape.new(name, (batch, seq // config.tp, n_out), dtype)
        sent(tape, "reduce_scatter", "output", shape, dtype, beside)
    elif config.tp > 1:
        sent(tape, "all_reduce", "output", y, dtype)
    return y


def column_linear(
    x: Tensor, weight: Parameter, name: str, config: TransformerConfig, *,
    bias: Parameter | None = None, shared: bool = False, sums_bias: bool = False,
) -> Tensor:  # fmt: skip
    """Megatron's own product by columns: saves x; PyTorch's cuBLAS computes it.

    Under sequence parallelism x is gathered into Megatron's global memory buffer, which is kept for good.
    `sums_bias`: the bias is added in a new tensor, and its gradient is a sum in parts, which is neglected in
    layers. `shared`: the weight is also the embedding's. Where the product adds its gradient to main_grad,
    zeros that are kept for good are then added to the embedding's gradient (`zero_out_wgrad`).

    Source: megatron.core.tensor_parallel.layers:LinearWithGradAccumulationAndAsyncCommunication.
    """
    tape, shape, dtype = x.tape, x.shape, x.dtype
    n_out, n_in = weight.shape
    gathered = whole_sequence(shape, config)
    out = (*gathered[:-1], n_out)

    def backward(grad: Tensor, saved: Saved) -> Grads:
        tape = grad.tape
        dgrad, wgrad = gradient_gemms(tape, out, n_in, dtype)
        with tape.workspace() as local:
            if config.sequence_parallel:
                sent(tape, "all_gather", "input", gathered, dtype, dgrad)
            of_input = gathered, shape, dtype, config
            grad_x = input_gradient(tape, local, *of_input, beside=wgrad, by_pytorch=True)
            has_own = bias is not None and not sums_bias
            of_weight, *of_bias = wgrads(tape, (n_out, n_in), dtype, bias=has_own, config=config)
            if shared and of_weight is None:
                of_weight = Tensor(tape, (n_out, n_in), dtype, is_view=True)
            summed = [expanded_bias(grad, n_out, dtype)] * sums_bias
            return grad_x, of_weight, *of_bias, *summed

    if config.sequence_parallel:
        sent(tape, "all_gather", "input", gathered, dtype)
    y = gemm(tape, name, out, n_in, dtype)
    tape.product(y)
    if sums_bias:
        y = tape.new(f"{name} with bias", y.shape, dtype)
    weights = [tape.weight(one).node for one in (weight, bias) if one is not None]
    y.node = tape.node((x.node, *weights), (x,), backward)
    y.node.computes(ComputeKind.MM, operands_of(out, n_in), 0, 1)
    return y


def row_linear(x: Tensor, weight: Parameter, name: str, config: TransformerConfig) -> Tensor:
    """Megatron's own product by rows, summed over tensor ranks; the caller adds the bias.

    Source: megatron.core.tensor_parallel.layers:RowParallelLinear.forward.
    """
    tape, shape, dtype = x.tape, x.shape, x.dtype
    n_out, n_in = weight.shape
    whole = (*shape[:-1], n_out)

    def backward(grad: Tensor, saved: Saved) -> Grads:
        tape = grad.tape
        with tape.workspace() as local:
            if config.sequence_parallel:
                local.new("gathered output gradient", whole, dtype)
                sent(tape, "all_gather", "output gradient", whole, dtype)
            grad_x = tape.new("dgrad", shape, dtype)
            tape.product(grad_x)
            return grad_x, *wgrads(tape, (n_out, n_in), dtype, bias=False, config=config)

    y = gemm(tape, name, whole, n_in, dtype)
    tape.product(y)
    if config.sequence_parallel:
        batch, seq, _ = whole
        y = tape.new(name, (batch, seq // config.tp, n_out), dtype)
        sent(tape, "reduce_scatter", "output", whole, dtype)
    elif config.tp > 1:
        sent(tape, "all_reduce", "output", whole, dtype)
    y.node = tape.node((x.node, tape.weight(weight).node), (x,), backward)
    y.node.computes(ComputeKind.MM, operands_of(whole, n_in), 0, 1)
    return y


def vocab_parallel_embedding(tokens: Tensor, table: Parameter, config: TransformerConfig) -> Tensor:
    """Rows of the vocabulary, summed over tensor ranks: (batch, seq, hidden); saves the ids of its own rows.

    Source: megatron.core.tensor_parallel.layers:VocabParallelEmbedding.forward.
    """
    tape, dtype = tokens.tape, table.dtype
    batch, seq = tokens.shape[0], tokens.shape[1] * (config.tp if config.sequence_parallel else 1)
    table_shape, width = table.shape, table.shape[1]

    def backward(grad: Tensor, saved: Saved) -> Grads:
        return (grad.tape.new("grad", table_shape, dtype),)

    with tape.workspace() as masks:
        ids: Saved = ()
        if config.tp > 1:
            masks.new("ids of other ranks", (batch, seq), BOOL)
            ids = (tape.new("ids of own rows", (batch, seq), INT64),)
        y = tape.new("word embeddings", (batch, seq, width), dtype)
        y.node = tape.node((tape.weight(table).node,), ids, backward)
        if config.tp > 1:
            sent(tape, "all_reduce", "word embeddings", y, dtype)
    return y


def with_embeddings(x: Tensor, table: Parameter, what: str) -> Tensor:
    """x (batch, seq, hidden) plus a row of another table for each token: of its position, or its type.

    Source: megatron.core.models.common.embeddings.language_model_embedding:LanguageModelEmbedding.forward.
    """
    tape, shape, dtype, table_shape = x.tape, x.shape, x.dtype, table.shape

    def backward(grad: Tensor, saved: Saved) -> Grads:
        return grad, grad

    def of_table(grad: Tensor, saved: Saved) -> Grads:
        return (grad.tape.new("grad", table_shape, dtype),)

    rows = tape.new(what, shape, dtype)
    rows.node = tape.node((tape.weight(table).node,), (), of_table)
    return tape.new("embeddings", shape, dtype, tape.node((x.node, rows.node), (), backward))


def transposed(x: Tensor, name: str) -> Tensor:
    """A copy in the other order of batch and sequence; saves nothing.

    Source: torch:Tensor.contiguous.
    """
    shape, dtype = x.shape, x.dtype

    def backward(grad: Tensor, saved: Saved) -> Grads:
        return (grad,)

    return x.tape.new(name, shape, dtype, x.tape.node((x.node,), (), backward))


def scatter_to_sequence_parallel_region(x: Tensor, config: TransformerConfig) -> Tensor:
    """This rank's part of the sequence; the backward pass gathers it.

    Source: megatron.core.tensor_parallel.mappings:_ScatterToSequenceParallelRegion.
    """
    batch, seq, width = x.shape
    whole, dtype = x.shape, x.dtype

    def backward(grad: Tensor, saved: Saved) -> Grads:
        sent(grad.tape, "all_gather", "embedding gradient", whole, dtype)
        return (grad.tape.new("gathered gradient", whole, dtype),)

    node = x.tape.node((x.node,), (), backward)
    part = (batch, seq // config.tp, width)
    return x.tape.new("part of the sequence", part, dtype, node)  # clone_scatter_output_in_embedding


def split(x: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
    """Views of parts of x with these shapes; the backward pass concatenates their gradients.

    Source: torch:split.
    """
    tape, whole, dtype = x.tape, x.shape, x.dtype
    waiting: list[Tensor] = []

    def view(i: int, shape: Shape) -> Tensor:
        def backward(grad: Tensor, saved: Saved) -> Grads:
            waiting.append(grad)
            if i:
                return (None,)
            both = grad.tape.new("gradients of all parts", whole, dtype)
            waiting.clear()
            return (both,)

        node = tape.node((x.node,), (), backward)
        return Tensor(tape, shape, dtype, x.storage, node, True)

    return [view(i, shape) for i, shape in enumerate(shapes)]


def concatenated(parts: Sequence[Tensor], shape: Shape, name: str) -> Tensor:
    """All parts as one new tensor of this shape; their gradients are views of its own.

    Source: torch:cat.
    """
    tape, dtype, shapes = parts[0].tape, parts[0].dtype, [part.shape for part in parts]

    def backward(grad: Tensor, saved: Saved) -> Grads:
        return tuple([Tensor(grad.tape, own, dtype, grad.storage, None, True) for own in shapes])

    return tape.new(name, shape, dtype, tape.node(tuple([part.node for part in parts]), (), backward))


def gathered_features(x: Tensor, config: TransformerConfig) -> Tensor:
    """The features of all tensor ranks, and under sequence parallelism this rank's part of the sequence.

    The part is a view of the whole.

    Source: megatron.core.tensor_parallel.mappings:gather_from_tensor_model_parallel_region,
    megatron.core.tensor_parallel.mappings:scatter_to_sequence_parallel_region.
    """
    if config.tp == 1:
        return x
    tape, shape, dtype = x.tape, x.shape, x.dtype
    batch, seq, width = *shape[:-1], shape[-1] * config.tp
    whole, part = (batch, seq, width), (batch, seq // config.tp, width)

    def backward(grad: Tensor, saved: Saved) -> Grads:
        tape = grad.tape
        with tape.workspace() as of_all:
            if config.sequence_parallel:
                of_all.new("gathered gradient", whole, dtype)
                sent(tape, "all_gather", "gradient of the projection", whole, dtype)
            return (tape.new("gradient of own features", shape, dtype),)

    with tape.workspace() as received:
        received.new("features of all ranks", whole, dtype)
        sent(tape, "all_gather", "features", whole, dtype)
        y = tape.new("gathered features", whole, dtype)
    y.node = tape.node((x.node,), (), backward)
    return Tensor(tape, part, dtype, y.storage, y.node, True) if config.sequence_parallel else y


def expanded_bias(grad: Tensor, n: int, dtype: DType) -> Expanded:
    """The gradient of a bias (n) that was added to each row of a tensor with this gradient."""
    rows = Tensor(grad.tape, (n_elements(grad.shape) // n, n), grad.dtype, grad.storage)
    return Expanded(rows, (n,), dtype)


def node_of(parameter: Parameter | None, tape: Tape) -> Node | Parameter | None:
    """The graph's edge to a weight; None without one."""
    return None if parameter is None else tape.weight(parameter).node
