"""One rule per operation: its output, parameters, FLOPs, what it saves, its workspace, its collectives.

Each rule is the sequence of allocations that the operation's ATen implementation makes, forward and
backward, on the tape's device. Scalars (a mean's divisor, a scale) are left out: at most
16 bytes at any instant. Rules for "cpu" are confirmed by measured runs; rules for "cuda" carry their
kernels' names, and are confirmed by PyTorch's CUDA software on a GPU that is not there (`validate.nogpu`).

Splitting over the tensor axis follows `torch.distributed.tensor.parallel`: columns (ColwiseParallel) divides
a weight's output features, rows (RowwiseParallel) its input features.
"""

from typing import Literal

from memplan.device import Device
from memplan.kernels import (
    ROWS_PER_THREAD,
    SORTED_IDS,
    efficient_attention_bytes,
    flash_splits,
    partial_rows,
    reduction_scratch,
    sort_scratch,
)
from memplan.shapes import (
    BF16,
    BOOL,
    COMPLEX64,
    FP32,
    INT32,
    INT64,
    UINT8,
    DType,
    Parameter,
    Shape,
    n_elements,
)
from memplan.tape import Node, Tape, Tensor

Split = Literal["columns", "rows"]
Grads = tuple[Tensor | None, ...]
Saved = tuple[Tensor, ...]


def linear(x: Tensor, name: str, n_out: int, *, bias: bool, split: Split, again: bool = False) -> Tensor:
    """x W^T + b, with W (n_out, n_in): 2 x tokens x n_in x n_out FLOPs; saves x and W.

    `again`: selective recomputation keeps other products, but makes this one again.

    Under autocast the weight, the bias and x are first copied to its type, the weight's copy being kept
    until backward. With rows, partial outputs are summed over the tensor axis, or reduce-scattered over the
    sequence; each rank adds its part of the bias.

    Source: aten/src/ATen/native/Linear.cpp, derivatives.yaml (`mm`, `addmm`),
    torch/distributed/tensor/placement_types.py (`Partial._partition_value`).
    """
    tape = x.tape
    tp = tape.context.tp
    n_in = x.shape[-1]
    if split == "columns":
        n_out //= tp
    full_shape = (n_out, n_in)
    weight = tape.parameter(
        f"{name}.weight", full_shape, tp_dim=(0 if split == "columns" else 1) if tp > 1 else None
    )
    weight.grad_shape = weight.shape
    dtype = tape.context.autocast or x.dtype
    b = None
    if bias:
        tp_dim = 0 if tp > 1 and split == "columns" else None
        b = tape.parameter(f"{name}.bias", (n_out,), tp_dim=tp_dim, distributed=tp > 1)
        b_used = tape.weight(b, dtype)
    w = tape.weight(weight, dtype)
    x.in_flight = ()
    used = tape.cast(x, dtype)
    batch, seq = x.shape[0], x.shape[1]
    x_shape, w_shape = x.shape, full_shape

    def mm_backward(grad: Tensor, saved: Saved) -> Grads:
        grad_w = grad.tape.grad_of(1, w_shape, dtype, is_view=True)
        grad.tape.product()
        return grad.tape.grad_of(0, x_shape, dtype, is_view=True), grad_w

    def addmm_backward(grad: Tensor, saved: Saved) -> Grads:
        grad_x = grad.tape.grad_of(0, x_shape, dtype, is_view=True)
        grad.tape.product()
        grad_w = grad.tape.grad_of(2, w_shape, dtype, is_view=True)
        del saved
        grad_b = grad.tape.grad_of(1, (n_out,), dtype)
        if grad_b is not None:
            _sum_rows(grad.tape, n_out, batch * seq)
        return grad_x, grad_b, grad_w

    if b is None:
        node = tape.node((used.node, w.node), (used, w), mm_backward)
    else:
        node = tape.node((used.node, b_used.node, w.node), (used, w), addmm_backward)
        del b_used
    divides_bias = bias and tp > 1 and split == "rows"

    def product() -> tuple[Tensor]:
        part = tape.new("part of bias", (n_out,), dtype) if divides_bias else None
        y = tape.new(name, (batch, seq, n_out), dtype)
        tape.product()
        del part
        return (y,)

    (y,) = tape.save_if_selective(product, 2 * batch * seq * n_in * n_out, again=again)
    y.node = node
    del used, w
    return _reduced_over_tp(y, name) if split == "rows" else y


def gather_sequence(x: Tensor, *, waits: bool = True) -> Tensor:
    """Enter a tensor-parallel region: every tensor rank sees the whole sequence.

    With sequence parallelism the sequence is all-gathered, and the gradient reduce-scattered on the way
    back; without, x is already whole and its gradient is all-reduced. A region of several modules `waits` for
    the sequence (`PrepareModuleInput`), a single product does when it reads it (`ColwiseParallel`).

    Source: torch/distributed/tensor/parallel/style.py (`async_op`), Korthikanti et al. 2022 (g, f).
    """
    tape = x.tape
    if tape.context.tp == 1:
        return x
    if tape.context.sequence_parallel:
        node = tape.node(
            (x.node,), (), lambda grad, saved: (_reduce_scattered(grad, "activation gradients"),)
        )
        node.distributed = True
        return _with_node(_gathered(x, "activations", waits=waits), node)
    node = tape.node((x.node,), (), lambda grad, saved: (_all_reduced(grad, "activation gradients"),))
    node.distributed = True
    return Tensor(tape, x.shape, x.dtype, x.storage, node)


def _divided_sequence(x: Tensor) -> Tensor:
    """x as the norms see it under sequence parallelism: a DTensor of the same bytes.

    Source: torch/distributed/tensor/parallel/style.py (`SequenceParallel`).
    """
    tape = x.tape
    if not tape.context.sequence_parallel:
        return x
    node = tape.node((x.node,), (), lambda grad, saved: (grad,))
    node.distributed = True
    return Tensor(tape, x.shape, x.dtype, x.storage, node)


def _reduced_over_tp(y: Tensor, what: str) -> Tensor:
    """Leave a tensor-parallel region: sum the tensor ranks' parts, keeping part of the sequence under SP."""
    tape = y.tape
    if tape.context.tp == 1:
        return y
    if tape.context.sequence_parallel:
        node = tape.node((y.node,), (), _gathered_backward)
        return _with_node(_reduce_scattered(y, "activations"), node)
    node = tape.node((y.node,), (), lambda grad, saved: (grad,))
    return _with_node(_all_reduced(y, "activations"), node)


def _with_node(x: Tensor, node: Node) -> Tensor:
    x.node = node
    return x


def _all_reduced(x: Tensor, what: str) -> Tensor:
    """A functional all-reduce: in a copy of its operand."""
    tape, shape, dtype = x.tape, x.shape, x.dtype

    def compute() -> tuple[Tensor]:
        tape.collective("all_reduce", what, x.n_bytes)
        return (tape.new("all-reduced", shape, dtype),)

    (total,) = tape.save_if_selective(compute)
    return total


def _gathered(x: Tensor, what: str, *, waits: bool = True) -> Tensor:
    """All-gather along the sequence: ranks' parts arrive one after the other and are then interleaved.

    With a single sequence in the batch they are in order as they arrive, and need not be waited for: then
    gloo's scratch may live until they are read.

    Source: torch/distributed/_functional_collectives.py (`all_gather_tensor`).
    """
    tape, tp = x.tape, x.tape.context.tp
    batch, seq, d = x.shape
    shape = (batch, seq * tp, d)
    arrived = tape.new("gathered", shape, x.dtype)
    tape.collective("all_gather", what, arrived.n_bytes)
    if tape.context.gathers_in_copies:
        tape.new("gloo scratch", x.shape, x.dtype)
        scratch = tape.new("gloo scratch", shape, x.dtype)
        if batch == 1 and not waits:
            arrived.in_flight = (scratch,)
        del scratch
    return arrived if batch == 1 else tape.new("gathered sequence", shape, x.dtype)


def _gathered_backward(grad: Tensor, saved: Saved) -> Grads:
    """The sequence of gradients, whose own part is held until all has arrived; but not by the `fake` group.

    Source: torch/csrc/distributed/c10d/FakeProcessGroup.hpp (`FakeWork`), ProcessGroupGloo.cpp
    (`AsyncAllgatherWork`), ProcessGroupNCCL.cpp (`stashed_for_allocator_safety_`).
    """
    whole = _gathered(grad, "activation gradients")
    if whole.shape[0] == 1 and grad.tape.context.backend != "fake":
        whole.in_flight = (grad,)
    return (whole,)


def _reduce_scattered(x: Tensor, what: str) -> Tensor:
    """Reduce-scatter along the sequence: the operand is first put in the order of the ranks.

    Source: torch/distributed/_functional_collectives.py (`reduce_scatter_tensor`).
    """
    tape, tp = x.tape, x.tape.context.tp
    batch, seq, d = x.shape
    ordered = tape.new("ordered by rank", x.shape, x.dtype)

    def compute() -> tuple[Tensor]:
        tape.collective("reduce_scatter", what, ordered.n_bytes)
        part = tape.new("reduce-scattered", (batch, seq // tp, d), ordered.dtype)
        if tape.context.backend == "gloo":
            tape.new("gloo scratch", ordered.shape, ordered.dtype)
        return (part,)

    (part,) = tape.save_if_selective(compute)
    return part


def embedding(tokens: Tensor, name: str, n_rows: int, d_model: int) -> Tensor:
    """Rows of the vocabulary's table: saves the token ids; its gradient is a dense table.

    Over the tensor axis each rank holds a part of the rows and contributes zeros for the others; the partial
    outputs are summed. PyTorch makes that table's gradient whole on every rank; DDP cuts it back.

    On CUDA more than 3,072 ids are sorted before their rows' gradients are added up in float32.

    Source: aten/src/ATen/native/Embedding.cpp (`embedding_dense_backward_cpu`), native/cuda/Embedding.cu,
    EmbeddingBackwardKernel.cu; torch/distributed/tensor/_ops/_embedding_ops.py.
    """
    tape, tp = tokens.tape, tokens.tape.context.tp
    table = tape.parameter(f"{name}.weight", (n_rows // tp, d_model), tp_dim=0 if tp > 1 else None)
    if tp == 1:
        return _looked_up(tokens, table, n_rows, name)
    if not tape.context.local_grads:
        table.grad_shape = (n_rows, d_model)
    mask = tape.new("rows of other ranks", tokens.shape, BOOL)
    local_ids = tape.new("ids of own rows", tokens.shape, INT64)
    partial = _looked_up(tokens, table, n_rows, name)
    del local_ids, mask
    return _reduced_over_tp(partial, name)


def learned_positions(ids: Tensor, name: str, n_rows: int, d_model: int) -> Tensor:
    """Rows of the table of positions, whole on every tensor rank."""
    table = ids.tape.parameter(f"{name}.weight", (n_rows, d_model), summed=ids.tape.context.sequence_parallel)
    return _looked_up(ids, table, n_rows, name)


def _looked_up(ids: Tensor, table: Parameter, n_rows: int, name: str) -> Tensor:
    tape, dtype = ids.tape, table.dtype
    shape = (n_rows, table.shape[1])
    rows: Node | Parameter = table
    if table.grad_shape != shape:
        cut = table.grad_shape
        rows = tape.node((table,), (), lambda grad, saved: (grad.tape.new("grad", cut, dtype),))

    n_ids = n_elements(ids.shape)

    def backward(grad: Tensor, saved: Saved) -> Grads:
        if grad.tape.context.device.on_cpu or n_ids <= SORTED_IDS:
            return (grad.tape.new("grad", shape, dtype),)
        return (_sorted_gradient(grad.tape, n_ids, shape, dtype),)

    return tape.new(name, (*ids.shape, shape[1]), dtype, tape.node((rows,), (ids,), backward))


def _sorted_gradient(tape: Tape, n_ids: int, shape: Shape, dtype: DType) -> Tensor:
    """A table's gradient of ids that are sorted first; each sum over at most 10 rows is kept in float32."""
    n_rows, d_model = shape
    scratch = sort_scratch(tape.context.device, n_ids, n_rows)
    ids, order, numbers = (tape.new(what, (n_ids,), INT64) for what in ("sorted ids", "order", "numbers"))
    temporary = tape.new("CUB: sort", (scratch.sort_bytes,), UINT8)
    del temporary, numbers
    grad = tape.new("grad", shape, dtype)
    starts, n_different = (
        tape.new("starts of equal ids", (n_ids,), INT64),
        tape.new("different ids", (), INT64),
    )
    different = tape.new("different ids", (n_ids,), INT64)
    temporary = tape.new("CUB: unique", (scratch.unique_bytes,), UINT8)
    del temporary, different
    most = min(n_ids, n_rows)
    counts, offsets = tape.new("parts of an id", (most,), INT64), tape.new("offsets of parts", (most,), INT64)
    temporary = tape.new("CUB: scan", (scratch.scan_bytes,), UINT8)
    del temporary
    n_parts, most_parts = tape.new("parts", (), INT64), n_ids // ROWS_PER_THREAD + most
    parts = tape.new("starts of parts", (most_parts,), INT64)
    sums = tape.new("sums of parts", (most_parts, d_model), FP32)
    del sums, parts, n_parts, offsets, counts, n_different, starts, order, ids
    return grad


def _sum_rows(tape: Tape, n_outputs: int, n_inputs: int, *, along_rows: bool = True) -> None:
    """What the sum that has just got its output takes on CUDA (see `reduction_scratch`)."""
    device = tape.context.device
    scratch = None if device.on_cpu else reduction_scratch(device, n_outputs, n_inputs, along_rows=along_rows)
    if scratch is not None:
        sums = tape.new("partial sums", (scratch.sums_bytes // FP32.itemsize,), FP32)
        counters = tape.new("counters of partial sums", (scratch.counters_bytes // INT32.itemsize,), INT32)
        del counters, sums


def position_ids(tokens: Tensor) -> Tensor:
    """0 to seq - 1, shape (1, seq), or this tensor rank's part of them under sequence parallelism."""
    context = tokens.tape.context
    seq = tokens.shape[1] // (context.tp if context.sequence_parallel else 1)
    return tokens.tape.new("position ids", (1, seq), INT64)


def add_positions(x: Tensor, p: Tensor) -> Tensor:
    """x (batch, seq, d) plus p (1, seq, d); saves nothing; p's gradient is summed over the batch."""
    tape, p_shape, dtype = x.tape, p.shape, p.dtype

    def backward(grad: Tensor, saved: Saved) -> Grads:
        return grad, grad.tape.new("grad", p_shape, dtype)

    return tape.new("embedding", x.shape, x.dtype, tape.node((x.node, p.node), (), backward))


def dropout(x: Tensor, p: float) -> Tensor:
    """x with elements zeroed at probability p and the rest scaled; nothing at all if p is 0.

    Saves the mask: of x's type and already scaled on CPU, of booleans on CUDA.

    Source: aten/src/ATen/native/Dropout.cpp (`_dropout_impl`, `native_dropout_cuda`).
    """
    if p == 0.0:
        return x
    tape, shape, dtype = x.tape, x.shape, x.dtype
    cpu = tape.context.device.on_cpu

    def backward(grad: Tensor, saved: Saved) -> Grads:
        return (grad.tape.new("grad", shape, dtype),)

    mask = tape.new("dropout mask", shape, dtype if cpu else BOOL)
    node = tape.node((x.node,), (mask,), backward)
    return tape.new("dropout", shape, dtype, node)


def layer_norm(x: Tensor, name: str) -> Tensor:
    """(x - mean) / std x weight + bias over the last dim; saves x and each token's mean and 1/std.

    Source: aten/src/ATen/native/layer_norm.cpp (`layer_norm_cpu`, `layer_norm_backward_cpu`: a per-thread
    buffer of 2 x d for the gradients of weight and bias, dropped again), native/cuda/layer_norm_kernel.cu.
    """
    tape = x.tape
    d = x.shape[-1]
    w = tape.parameter(f"{name}.weight", (d,), summed=tape.context.sequence_parallel)
    b = tape.parameter(f"{name}.bias", (d,), summed=tape.context.sequence_parallel)
    shape, dtype = x.shape, x.dtype
    x = _divided_sequence(x)
    statistics = FP32 if not tape.context.device.on_cpu or w.dtype == FP32 else dtype

    def backward(grad: Tensor, saved: Saved) -> Grads:
        grad_x = grad.tape.grad_of(0, shape, dtype)
        grads = [grad.tape.grad_of(1, (d,), w.dtype), grad.tape.grad_of(2, (d,), b.dtype)]
        if grads[0] is not None:
            if grad.tape.context.device.on_cpu:
                grad.tape.workspace((2, d), w.dtype)
            _sum_partial_rows(grads, n_elements(shape) // d)
        return grad_x, *grads

    y = tape.new(name, shape, dtype)
    mean = tape.new("mean", shape[:-1], statistics)
    rstd = tape.new("rstd", shape[:-1], statistics)
    y.node = tape.node((x.node, w, b), (x, mean, rstd), backward)
    return y


def rms_norm(x: Tensor, name: str) -> Tensor:
    """x / sqrt(mean(x^2) + eps) x weight over the last dim.

    On CPU a composite of float32 operations, each with its own backward: x (widened to float32), 1/rms and
    the normed x are saved. On CUDA one fused kernel saves x and 1/rms.

    Source: aten/src/ATen/native/layer_norm.cpp (`rms_norm_composite`), native/cuda/layer_norm_kernel.cu
    (`_fused_rms_norm_cuda`).
    """
    tape = x.tape
    weight = tape.parameter(f"{name}.weight", (x.shape[-1],), summed=tape.context.sequence_parallel)
    x = _divided_sequence(x)
    if not tape.context.device.on_cpu:
        return _fused_rms_norm(x, weight, name)
    dtype = x.dtype
    x = tape.cast(x, FP32)
    squares = _square(x)
    mean = _mean(squares)
    r = _rsqrt(mean)
    del squares, mean
    y = _mul_by_weight(_mul_per_token(x, r), tape.weight(weight), name)
    del x
    return tape.cast(y, dtype)


def rms_norm_by_parts(x: Tensor, name: str) -> Tensor:
    """The same as Meta's and Hugging Face's Llama write it: operation by operation, on any device.

    In float32 up to the weight, which is applied in x's type: beside what the composite saves, that is the
    normed x in that type.

    Source: torchtitan/models/norms.py (`RMSNorm.forward`), transformers' `LlamaRMSNorm.forward`.
    """
    tape, dtype = x.tape, x.dtype
    weight = tape.parameter(f"{name}.weight", (x.shape[-1],), summed=tape.context.sequence_parallel)
    x = tape.cast(_divided_sequence(x), FP32)
    squares = _square(x)
    mean = _mean(squares)
    r = _rsqrt(mean)
    del squares, mean
    normed = _mul_per_token(x, r)
    del x, r
    narrow = tape.cast(normed, dtype)
    del normed
    return _scaled(narrow, tape.weight(weight), name)


def _scaled(x: Tensor, w: Tensor, name: str) -> Tensor:
    """x (batch, seq, d) times w (d) of the same type; w's gradient is summed over the tokens."""
    tape, shape, dtype = x.tape, x.shape, x.dtype

    def backward(grad: Tensor, saved: Saved) -> Grads:
        grad_x = grad.tape.grad_of(0, shape, dtype)
        terms = grad.tape.grad_of(1, shape, dtype)
        grad_w = grad.tape.grad_of(1, shape[-1:], dtype)
        if grad_w is not None:
            _sum_rows(grad.tape, shape[-1], n_elements(shape[:-1]))
        del terms
        return grad_x, grad_w

    return tape.new(name, shape, dtype, tape.node((x.node, w.node), (x, w), backward))


def _square(x: Tensor) -> Tensor:
    tape, shape = x.tape, x.shape
    return tape.new("squares", shape, FP32, tape.node((x.node,), (x,), _power_backward))


def _power_backward(grad: Tensor, saved: Saved) -> Grads:
    power = grad.tape.new("workspace", grad.shape, FP32)
    scaled = grad.tape.new("workspace", grad.shape, FP32)
    grad_x = grad.tape.new("grad", grad.shape, FP32)
    del power, scaled
    return (grad_x,)


def _mean(x: Tensor) -> Tensor:
    tape, shape = x.tape, x.shape

    def backward(grad: Tensor, saved: Saved) -> Grads:
        return (grad.tape.new("grad", shape, FP32),)

    return tape.new("mean", shape[:-1], FP32, tape.node((x.node,), (), backward))


def _rsqrt(x: Tensor) -> Tensor:
    tape, shape = x.tape, x.shape
    y = tape.new("rstd", shape, FP32)
    y.node = tape.node((x.node,), (Tensor(tape, shape, FP32, y.storage),), _power_backward)
    return y


def _mul_per_token(x: Tensor, r: Tensor) -> Tensor:
    tape, shape = x.tape, x.shape

    def backward(grad: Tensor, saved: Saved) -> Grads:
        grad_x = grad.tape.new("grad", shape, FP32)
        terms = grad.tape.new("workspace", shape, FP32)
        del saved
        grad_r = grad.tape.new("grad", shape[:-1], FP32)
        _sum_rows(grad.tape, n_elements(shape[:-1]), shape[-1], along_rows=False)
        del terms
        return grad_x, grad_r

    return tape.new("normed", shape, FP32, tape.node((x.node, r.node), (x, r), backward))


def _mul_by_weight(x: Tensor, w: Tensor, name: str) -> Tensor:
    tape, shape = x.tape, x.shape
    narrow = w.dtype != FP32
    copied = narrow and tape.context.device.casts_in_copies

    def backward(grad: Tensor, saved: Saved) -> Grads:
        terms = grad.tape.grad_of(1, shape, FP32)
        widens = copied and grad.tape.wants(0)
        widened = grad.tape.new("weight as float32", shape[-1:], FP32) if widens else None
        grad_x = grad.tape.grad_of(0, shape, FP32)
        del widened, saved
        grad_w = grad.tape.grad_of(1, shape[-1:], FP32)
        del terms
        if narrow:
            grad_w = grad.tape.grad_of(1, shape[-1:], w.dtype)
        return grad_x, grad_w

    node = tape.node((x.node, w.node), (x, w), backward)
    widened = tape.new("weight as float32", shape[-1:], FP32) if copied else None
    y = tape.new(name, shape, FP32, node)
    del widened
    return y


def _fused_rms_norm(x: Tensor, weight: Parameter, name: str) -> Tensor:
    tape, shape, dtype = x.tape, x.shape, x.dtype

    def backward(grad: Tensor, saved: Saved) -> Grads:
        grad_x, grads = grad.tape.grad_of(0, shape, dtype), [grad.tape.grad_of(1, shape[-1:], weight.dtype)]
        if grads[0] is not None:
            _sum_partial_rows(grads, n_elements(shape[:-1]))
        return grad_x, *grads

    y = tape.new(name, shape, dtype)
    rstd = tape.new("rstd", shape[:-1], FP32)
    y.node = tape.node((x.node, weight), (x, rstd), backward)
    return y


def _sum_partial_rows(grads: list[Tensor | None], n_tokens: int) -> None:
    """Gradients of a norm's weights over very many tokens on CUDA: sums of partial sums, each a new tensor.

    Source: aten/src/ATen/native/cuda/layer_norm_kernel.cu (`LaunchGammaBetaBackwardCUDAKernel`).
    """
    tape, shape, dtype = next((grad.tape, grad.shape, grad.dtype) for grad in grads if grad is not None)
    n_rows = 0 if tape.context.device.on_cpu else partial_rows(tape.context.device, n_tokens, shape[0])
    if n_rows:
        partial_sums = [tape.new("rows of partial sums", (n_rows, *shape), dtype) for _ in grads]
        for i in range(len(grads)):
            total = tape.new("grad", shape, dtype)
            _sum_rows(tape, shape[0], n_rows)
            grads[i] = total
            del total
        del partial_sums


def rope(x: Tensor) -> Tensor:
    """Pairs of elements turned by their position's angle, as complex float32 numbers; saves the angles only.

    The backward product wants its gradient by token, and resolves the angles' conjugate, a copy of
    (seq, d_head / 2) complex numbers; that is the size of one head's float32 sequence.

    Source: torch/csrc/autograd/FunctionsManual.cpp (`mul_tensor_backward`), ATen/ConjugateFallback.cpp,
    tools/autograd/derivatives.yaml (`view_as_real`).
    """
    tape, shape, dtype = x.tape, x.shape, x.dtype
    seq, half = shape[1], shape[3] // 2
    wide = tape.cast(x, FP32)

    def backward(grad: Tensor, saved: Saved) -> Grads:
        conjugate = grad.tape.new("workspace", (seq, half), COMPLEX64)
        grad_x = grad.tape.new("grad", shape, FP32)
        del conjugate
        return (grad_x,)

    turned = tape.new("rotated", shape, FP32, tape.node((wide.node,), (), backward))
    turned.node = tape.node((turned.node,), (), lambda grad, saved: (_by_token(grad),))
    return tape.cast(turned, dtype)


def silu(x: Tensor) -> Tensor:
    """x sigmoid(x); saves x."""
    return _pointwise(x, "silu")


def gelu(x: Tensor) -> Tensor:
    """x Phi(x), tanh form; saves x."""
    return _pointwise(x, "gelu")


def _pointwise(x: Tensor, name: str) -> Tensor:
    return x.tape.new(name, x.shape, x.dtype, x.tape.node((x.node,), (x,), _same_backward))


def heads(x: Tensor, d_head: int) -> Tensor:
    """(batch, seq, heads x d_head) seen as (batch, seq, heads, d_head); its gradient is put in that order."""
    batch, seq, width = x.shape
    y = x.view(batch, seq, width // d_head, d_head)
    y.node = x.tape.node((x.node,), (), lambda grad, saved: (_by_token(grad),))
    return y


def merged_heads(x: Tensor) -> Tensor:
    """(batch, seq, heads, d_head) as (batch, seq, heads x d_head): a copy of what is laid out by head."""
    batch, seq, n_heads, d_head = x.shape
    shape = batch, seq, n_heads * d_head
    if not x.head_major:
        return x.view(*shape)
    return _by_token(x).view(*shape)


def _by_token(x: Tensor) -> Tensor:
    return x.tape.new("by token", x.shape, x.dtype, x.node) if x.head_major else x


def attention(q: Tensor, k: Tensor, v: Tensor, *, dropout: float = 0.0) -> Tensor:
    """Causal attention of q (batch, seq, heads, d_head) to k, v (batch, seq, kv_heads, d_head).

    4 x batch x heads x seq^2 x d_head FLOPs, counted whole although half is masked (the convention of
    Chowdhery et al. 2022, appendix B).
    """
    match attention_kernel(
        q.tape.context.device, q.dtype, q.shape[3], grouped=k.shape != q.shape, dropout=dropout > 0
    ):
        case "math":
            return _math_attention(q, k, v, dropout=dropout > 0)
        case "flash" if q.tape.context.device.on_cpu:
            return _flash_attention_cpu(q, k, v)
        case "flash":
            return _padded(q, k, v, dropout=dropout > 0)
        case "cudnn":
            return _cudnn_attention(q, k, v)
        case _:
            return _efficient_attention(q, k, v)


AttentionKernel = Literal["flash", "cudnn", "efficient", "math"]


def attention_kernel(
    device: Device, dtype: DType, d_head: int, *, grouped: bool, dropout: bool
) -> AttentionKernel:
    """Which implementation PyTorch takes for causal attention; `grouped`: several query heads share a key.

    >>> from memplan.device import A100, H100
    >>> [attention_kernel(device, BF16, 128, grouped=True, dropout=False) for device in (A100, H100)]
    ['flash', 'cudnn']

    Source: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp (`select_sdp_backend`), sdp_utils_cpp.cpp.
    """
    if device.on_cpu:
        return "math" if dropout else "flash"
    if dtype != FP32 and d_head <= 256 and (device.at_least(8) or device.capability is None):
        most = 128 if device.at_least(10) else 256
        cudnn = device.at_least(9) and not dropout and d_head <= most and d_head % 8 == 0
        return "cudnn" if cudnn else "flash"
    if grouped or (dtype == BF16 and not device.at_least(8)):
        return "math"
    return "efficient"


def _attention_flops(q: Tensor) -> int:
    batch, seq, n_heads, d_head = q.shape
    return 4 * batch * n_heads * seq * seq * d_head


def _flash_attention_cpu(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Saves q, k, v, the output and each row's log-sum-exp; per-thread workspaces (one thread).

    Source: aten/src/ATen/native/cpu/FlashAttentionKernel.cpp (`cpu_flash_attention` and its backward: query
    blocks of 32, 64 or 256 rows by length, key blocks of 512, neither longer than the sequence).
    """
    tape, dtype = q.tape, q.dtype
    batch, seq, n_heads, d_head = q.shape
    q_shape, kv_shape = q.shape, k.shape
    q_block = 256 if seq >= 768 else 64 if seq >= 192 else 32
    rows, columns = min(q_block, seq), min(512, seq)

    def backward(grad: Tensor, saved: Saved) -> Grads:
        r = grad.tape
        grads = r.new("grad", q_shape, dtype), r.new("grad", kv_shape, dtype), r.new("grad", kv_shape, dtype)
        scores = r.workspace((2, rows, columns), FP32)
        narrow = None if dtype == FP32 else r.workspace((2, rows, columns), dtype)
        sums = r.workspace((rows,), FP32)
        del scores, narrow, sums
        return grads

    def compute() -> tuple[Tensor, Tensor]:
        y = tape.new("attention", q_shape, dtype)
        lse = tape.new("log-sum-exp", (batch, seq, n_heads), FP32)
        scores = tape.workspace((rows * columns + 2 * rows + rows * d_head,), FP32)
        narrow = None if dtype == FP32 else tape.workspace((rows, columns), dtype)
        del scores, narrow
        return y, lse

    y, lse = tape.save_if_selective(compute, _attention_flops(q))
    out = Tensor(tape, q_shape, dtype, y.storage)
    y.node = tape.node((q.node, k.node, v.node), (q, k, v, out, lse), backward)
    return y


def _math_attention(q: Tensor, k: Tensor, v: Tensor, *, dropout: bool) -> Tensor:
    """Attention as separate products in float32, the scores materialised.

    CPU takes it for dropout, CUDA for float32 with grouped queries, and for what old GPUs have no kernel for.
    Saves the scaled q and k, v, the
    probabilities and, with dropout, the mask and the dropped probabilities. The probabilities are returned
    too, and thrown away: in a narrower type that is one more copy. Gradients come by head, k's transposed on
    top, so that a single sequence's is in order.

    Source: aten/src/ATen/native/transformers/attention.cpp (`_scaled_dot_product_attention_math`).
    """
    tape, dtype = q.tape, q.dtype
    batch, seq, n_heads, _ = shape = q.shape
    scores_shape, apart = (batch, n_heads, seq, seq), min(n_heads, seq) > 1
    q, k, v = (tape.cast(x, FP32) for x in (q, k, v))

    def product_backward(grad: Tensor, saved: Saved) -> tuple[Tensor, Tensor]:
        left, right = (t.shape for t in saved)
        grad_right, grad_left = grad.tape.new("grad", right, FP32), grad.tape.new("grad", left, FP32)
        grad_left.head_major = grad_right.head_major = apart
        return grad_left, grad_right

    def softmax_backward(grad: Tensor, saved: Saved) -> Grads:
        (grad_scores,) = _same_backward(grad, saved)
        if not grad.tape.context.device.on_cpu:
            _like(grad, "grad times probabilities")
        return (grad_scores,)

    def scores_backward(grad: Tensor, saved: Saved) -> Grads:
        grad_q, grad_k = product_backward(grad, saved)
        grad_k.head_major = min(batch, seq) > 1
        return grad_q, grad_k

    scaled_q = tape.new("scaled q", shape, FP32, tape.node((q.node,), (), _same_backward))
    allowed = tape.new("allowed", (seq, seq), BOOL)
    lower = tape.new("allowed below the diagonal", (seq, seq), BOOL)
    del allowed
    choices = [tape.new(value, (), FP32) for value in ("0", "-inf")] if not tape.context.device.on_cpu else []
    bias = tape.new("causal bias", (seq, seq), FP32)
    del lower, choices
    if k.shape != shape:
        k, v = repeated_heads(k, n_heads, head_major=True), repeated_heads(v, n_heads, head_major=True)
    scaled_k = tape.new("scaled k", shape, FP32, tape.node((k.node,), (), _same_backward))
    scaled_k.head_major = k.head_major
    left, right = _head_major(scaled_q), _head_major(scaled_k)
    node = tape.node((scaled_q.node, scaled_k.node), (left, right), scores_backward)
    flops = _attention_flops(q) // 2
    (scores,) = tape.save_if_selective(lambda: (tape.new("scores", scores_shape, FP32),), flops)
    del scaled_k, left, right
    if tape.watched:
        scores = tape.new("scores and bias", scores_shape, FP32)
    probabilities = tape.new("probabilities", scores_shape, FP32)
    saved = Tensor(tape, scores_shape, FP32, probabilities.storage)
    probabilities.node = tape.node((node,), (saved,), softmax_backward)
    masked_out = tape.new("keys not allowed", scores_shape, BOOL)
    nothing_left = tape.new("rows without any allowed key", scores_shape[:-1], BOOL)
    zero = None if tape.context.device.on_cpu else tape.new("0", (), FP32)
    del nothing_left, masked_out, scores, saved, zero
    if dropout:
        mask = tape.new("dropout mask", scores_shape, FP32 if tape.context.device.on_cpu else BOOL)
        node = tape.node((probabilities.node,), (mask,), _same_backward)
        probabilities = tape.new("dropped probabilities", scores_shape, FP32, node)
        del mask
    returned = None if dtype == FP32 else tape.new(f"probabilities as {dtype.name}", scores_shape, dtype)
    values = _head_major(v)
    node = tape.node((probabilities.node, v.node), (probabilities, values), product_backward)
    (y,) = tape.save_if_selective(lambda: (tape.new("attention", shape, FP32),), flops)
    y.head_major = apart
    y.node = tape.node((node,), (), lambda grad, saved: (_head_major(grad.view(*shape)),))
    del values
    y = tape.cast(y, dtype)
    del probabilities, returned, scaled_q, bias
    return y


def _head_major(x: Tensor) -> Tensor:
    """The heads one after the other, as batched products want them: a copy, but of one sequence or head."""
    return x if x.head_major or 1 in x.shape[:3] else x.tape.new("by head", x.shape, x.dtype)


def _same_backward(grad: Tensor, saved: Saved) -> Grads:
    return (_like(grad, "grad"),)


def _like(x: Tensor, name: str) -> Tensor:
    y = x.tape.new(name, x.shape, x.dtype)
    y.head_major = x.head_major
    return y


def repeated_heads(x: Tensor, n_heads: int, *, head_major: bool = False) -> Tensor:
    """Keys or values copied once per query head; the copies' gradients are summed."""
    tape, shape, dtype = x.tape, x.shape, x.dtype
    batch, seq, _, d_head = shape

    def backward(grad: Tensor, saved: Saved) -> Grads:
        grad_x = grad.tape.new("grad", shape, dtype)
        grad_x.head_major = head_major and min(shape[1:3]) > 1
        return (grad_x,)

    node = tape.node((x.node,), (), backward)
    repeated = tape.new("repeated heads", (batch, seq, n_heads, d_head), dtype, node)
    repeated.head_major = head_major
    return repeated


def _efficient_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Saves q, k, v, the output and each row's log-sum-exp, rows padded to 32; float32's kernel on CUDA.

    Source: aten/src/ATen/native/transformers/cuda/attention.cu (`_efficient_attention_forward`),
    attention_backward.cu (`_efficient_attention_backward`: each row's dot product, in the kernel itself where
    the type is narrow and heads are short).
    """
    tape, dtype, shape = q.tape, q.dtype, q.shape
    batch, seq, n_heads, d_head = shape
    outside = dtype == FP32 or d_head > 128
    n_bytes = batch * n_heads * efficient_attention_bytes(tape.context.device, dtype.itemsize, seq, d_head)

    def backward(grad: Tensor, saved: Saved) -> Grads:
        r = grad.tape
        grads = r.new("grad", shape, dtype), r.new("grad", shape, dtype), r.new("grad", shape, dtype)
        if outside:
            terms = [r.new("terms of dots", shape, FP32) for _ in range(1 if dtype == FP32 else 3)]
            sums = r.new("sums of terms", (batch, seq, n_heads), FP32)
        dots = r.new("dots", (batch, n_heads, seq), FP32)
        if outside:
            del terms, sums
        tiles = r.new("tiles of gradients", (n_bytes,), UINT8)
        del dots, tiles
        return grads

    def compute() -> tuple[Tensor, Tensor]:
        y = tape.new("attention", shape, dtype)
        lse = tape.new("log-sum-exp", (batch, n_heads, -(-seq // 32) * 32), FP32)
        if dtype != FP32 and d_head > 128:
            tape.new("sums of values", shape, FP32)
        return y, lse

    y, lse = tape.save_if_selective(compute, _attention_flops(q))
    out = Tensor(tape, shape, dtype, y.storage)
    y.node = tape.node((q.node, k.node, v.node), (q, k, v, out, lse), backward)
    return y


def _padded(q: Tensor, k: Tensor, v: Tensor, *, dropout: bool) -> Tensor:
    """FlashAttention of heads padded to a multiple of 8, where they are none.

    Source: aten/src/ATen/native/transformers/attention.cpp (`pad_last_dim`, `post_process_flash_output`).
    """
    tape, shape = q.tape, q.shape
    width = -(-shape[3] // 8) * 8
    if width == shape[3]:
        return _flash_attention_cuda(q, k, v, dropout=dropout)

    dtype = q.dtype

    def padded(x: Tensor) -> Tensor:
        x_shape = x.shape
        node = tape.node((x.node,), (), lambda grad, saved: (grad.tape.new("grad", x_shape, dtype),))
        return tape.new("padded heads", (*x_shape[:3], width), dtype, node)

    wide = _flash_attention_cuda(*(padded(x) for x in (q, k, v)), dropout=dropout)
    whole = wide.shape
    y = wide.view(*shape)
    y.node = tape.node((wide.node,), (), lambda grad, saved: (grad.tape.new("grad", whole, dtype),))
    y.head_major = True
    return y


def _flash_attention_cuda(q: Tensor, k: Tensor, v: Tensor, *, dropout: bool) -> Tensor:
    """Saves q, k, v, the output, each row's log-sum-exp and the random state.

    Where few heads and rows leave multiprocessors idle, the keys are divided, and the parts' outputs added
    up, but not with dropout. Backward keeps a float32 accumulator for dq and each row's dot product; grouped
    queries expand dk and dv.

    Source: aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp (`mha_fwd`, `mha_bwd`).
    """
    tape, dtype = q.tape, q.dtype
    batch, seq, n_heads, d_head = q.shape
    q_shape, kv_shape = q.shape, k.shape
    d_rounded = -(-d_head // 32) * 32 if d_head <= 128 else -(-d_head // 64) * 64
    seq_rounded = -(-seq // 128) * 128
    n_splits = 1 if dropout else flash_splits(tape.context.device, batch, n_heads, seq, d_head)

    def backward(grad: Tensor, saved: Saved) -> Grads:
        r = grad.tape
        grads = r.new("grad", q_shape, dtype), r.new("grad", kv_shape, dtype), r.new("grad", kv_shape, dtype)
        dots = r.new("dots", (batch, n_heads, seq_rounded), FP32)
        accumulator = r.new("sums of dq", (batch, seq_rounded, n_heads, d_rounded), FP32)
        expanded = None
        if kv_shape != q_shape:
            expanded = r.new("expanded dk", q_shape, dtype), r.new("expanded dv", q_shape, dtype)
        del dots, accumulator, expanded
        return grads

    def compute() -> tuple[Tensor, ...]:
        y = tape.new("attention", q_shape, dtype)
        lse = tape.new("log-sum-exp", (batch, n_heads, seq), FP32)
        parts = None
        if n_splits > 1:
            parts = (
                tape.new("log-sum-exp of parts", (n_splits, batch, n_heads, seq), FP32),
                tape.new("attention of parts", (n_splits, batch, n_heads, seq, d_rounded), FP32),
            )
        state, unused = tape.new("random state", (2,), INT64), tape.new("random offset", (), INT64)
        if dropout:
            state = tape.new("random state", (2,), INT64)
        del parts
        return y, lse, state, unused

    y, *others = tape.save_if_selective(compute, _attention_flops(q))
    out = Tensor(tape, q_shape, dtype, y.storage)
    y.node = tape.node((q.node, k.node, v.node), (q, k, v, out, *others), backward)
    return y


def _cudnn_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Saves q, k, v, the output, each row's log-sum-exp and the random state.

    Backward's workspace is what cuDNN's frontend asks for: a float32 accumulator for dq and each row's dot.

    Neglects: what the engine that cuDNN chooses asks for beyond that, which only a real GPU tells.

    Source: aten/src/ATen/native/cudnn/MHA.cpp (`run_cudnn_SDP_fprop`, `run_cudnn_SDP_bprop`),
    cudnn_frontend/node/scaled_dot_product_flash_attention.h.
    """
    tape, dtype = q.tape, q.dtype
    batch, seq, n_heads, d_head = q.shape
    q_shape, kv_shape = q.shape, k.shape

    def backward(grad: Tensor, saved: Saved) -> Grads:
        r = grad.tape
        grads = r.new("grad", q_shape, dtype), r.new("grad", kv_shape, dtype), r.new("grad", kv_shape, dtype)
        r.new("sums of dq and dots", (batch, n_heads, seq, d_head + 1), FP32)
        return grads

    def compute() -> tuple[Tensor, ...]:
        random = tape.new("random seed", (), INT64), tape.new("random offset", (), INT64)
        y = tape.new("attention", q_shape, dtype)
        return y, tape.new("log-sum-exp", (batch, n_heads, seq), FP32), *random

    y, *others = tape.save_if_selective(compute, _attention_flops(q))
    out = Tensor(tape, q_shape, dtype, y.storage)
    y.node = tape.node((q.node, k.node, v.node), (q, k, v, out, *others), backward)
    return y


def cross_entropy(logits: Tensor) -> Tensor:
    """Mean of -log softmax(logits) at the target, in float32: saves the log-probabilities.

    A narrower type is first copied to float32; that copy dies with the forward pass. With `loss_chunks`, that
    happens to one piece of the sequence after the other, as torchtune's `CEWithChunkedOutputLoss` does: the
    log-probabilities of all are saved, but one piece at a time is widened, and has gradients.

    Source: aten/src/ATen/native/SoftMax.cpp, LossNLL.cpp; derivatives.yaml (`_log_softmax` saves its result).
    """
    tape = logits.tape
    if tape.context.loss_chunks == 1:
        return _cross_entropy(tape.cast(logits, FP32))
    first, *others = _pieces(logits, tape.context.loss_chunks)
    total = _cross_entropy_of_piece(first)
    added: tuple[Tensor, ...] = ()
    for piece in others:
        loss = _cross_entropy_of_piece(piece)
        added = total, loss  # which `functools.reduce` holds until it has the next loss
        total = total + loss
        del loss
    del added
    return tape.new("loss", (), FP32, tape.node((total.node,), (), _same_backward))


def _cross_entropy(logits: Tensor, *targets: Tensor) -> Tensor:
    """Of float32 logits; `targets` made for it are saved."""
    tape, shape = logits.tape, logits.shape
    if tape.context.tp > 1:
        return _vocabulary_parallel_cross_entropy(logits, targets)

    def softmax_backward(grad: Tensor, saved: Saved) -> Grads:
        return (grad.tape.new("grad of logits", shape, FP32),)

    def nll_backward(grad: Tensor, saved: Saved) -> Grads:
        return (grad.tape.new("grad of log-probabilities", shape, FP32),)

    log_p = tape.new("log-probabilities", shape, FP32)
    log_p.node = tape.node((logits.node,), (Tensor(tape, shape, FP32, log_p.storage),), softmax_backward)
    loss, total_weight = tape.new("loss", (), FP32), tape.new("total weight", (), FP32)
    loss.node = tape.node((log_p.node,), (log_p, total_weight, *targets), nll_backward)
    return loss


def _cross_entropy_of_piece(logits: Tensor) -> Tensor:
    """One piece's sum; where it is cut out of several sequences, logits and targets are made contiguous."""
    tape = logits.tape
    batch, seq, _ = logits.shape
    wide = tape.cast(logits, FP32)
    if batch > 1 and logits.dtype == FP32:
        wide = tape.new("contiguous logits", logits.shape, FP32)
        wide.node = logits.node
    return _cross_entropy(
        wide, *([tape.new("targets of the piece", (batch, seq), INT64)] if batch > 1 else [])
    )


def _pieces(logits: Tensor, n: int) -> list[Tensor]:
    """`torch.chunk` over the sequence: pieces of ceil(seq / n), the last one shorter.

    Backward joins their gradients, all of them alive, once the first piece's has come.

    Source: torch/csrc/autograd/FunctionsManual.cpp (`split_backward`: `cat`).
    """
    tape, (batch, seq, vocab), dtype = logits.tape, logits.shape, logits.dtype
    each = -(-seq // n)
    parts: list[Tensor] = []

    def joined(grad: Tensor, saved: Saved) -> Grads:
        parts.append(grad)
        del grad
        whole = tape.new("grad of logits", (batch, seq, vocab), dtype)
        parts.clear()
        return (whole,)

    def kept(grad: Tensor, saved: Saved) -> Grads:
        parts.append(grad)
        return (None,)

    pieces = []
    for start in range(0, seq, each):
        node = tape.node((logits.node,) if start == 0 else (None,), (), kept if start else joined)
        shape = (batch, min(each, seq - start), vocab)
        pieces.append(Tensor(tape, shape, dtype, logits.storage, node))
    return pieces


def _vocabulary_parallel_cross_entropy(logits: Tensor, targets: Saved) -> Tensor:
    """Each tensor rank has a part of the vocabulary: maxima, sums and the targets' values are all-reduced.

    The gradient is made whole by the loss's backward; log-softmax's passes it on.

    Source: torch/distributed/tensor/parallel/loss.py (`_log_softmax`, `_nll_loss_forward`,
    `_nll_loss_and_log_softmax_backward`).
    """
    tape, shape = logits.tape, logits.shape
    tokens = shape[:-1]

    def nll_backward(grad: Tensor, saved: Saved) -> Grads:
        indices = [grad.tape.new("targets' indices", tokens, INT64) for _ in range(3)]
        mask = grad.tape.new("targets of other ranks", tokens, BOOL)
        updates = [grad.tape.new("targets' gradients", tokens, FP32) for _ in range(2)]
        one_hot = grad.tape.new("grad of log-probabilities", shape, FP32)
        probabilities = grad.tape.new("probabilities", shape, FP32)
        difference = grad.tape.new("probabilities less targets", shape, FP32)
        del probabilities
        scaled = grad.tape.new("grad of logits", shape, FP32)
        del difference, one_hot, indices, mask, updates
        return (scaled,)

    maxima = _all_reduced(tape.new("maxima", tokens, FP32), "maxima of logits")
    shifted = tape.new("logits less maxima", shape, FP32)
    powers = tape.new("exponentials", shape, FP32)
    sums = tape.new("sums", tokens, FP32)
    del powers
    sums = _all_reduced(sums, "sums of exponentials")
    logs = tape.new("logarithms of sums", tokens, FP32)
    log_p = tape.new("log-probabilities", shape, FP32)
    del shifted, maxima, sums, logs
    saved = Tensor(tape, shape, FP32, log_p.storage)
    log_p.node = tape.node((logits.node,), (saved,), lambda grad, saved: (grad,))
    target_values = _all_reduced(
        tape.new("targets' log-probabilities", tokens, FP32), "targets' log-probabilities"
    )
    del target_values
    total_weight = tape.new("total weight", (), FP32)
    return tape.new("loss", (), FP32, tape.node((log_p.node,), (log_p, total_weight, *targets), nll_backward))


def share_of_loss(loss: Tensor) -> Tensor:
    """The loss over the number of micro-batches."""
    return loss.tape.new("loss over the micro-batches", (), FP32, _scalar_node(loss))


def scaled_loss(loss: Tensor) -> Tensor:
    """The loss times the scaler's scale in float16, else the loss itself."""
    if not loss.tape.context.scales_loss:
        return loss
    return loss.tape.new("scaled loss", (), FP32, _scalar_node(loss))


def _scalar_node(loss: Tensor) -> Node:
    return loss.tape.node((loss.node,), (), _same_backward)


def gradient_of_loss(tape: Tape) -> Tensor:
    """The 1 that backward starts from."""
    return tape.new("grad of loss", (), FP32)
