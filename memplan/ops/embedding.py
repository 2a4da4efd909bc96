"""Tables of vectors: token embeddings and learned positions."""

from memplan.kernels import (
    ROWS_PER_THREAD,
    SORTED_IDS,
    id_sort_passes,
    radix_sort_bytes,
    scan_bytes,
    sums_by_id,
    unique_bytes,
)
from memplan.ops.dims import BY_TOKEN, dims, divided
from memplan.ops.modules import as_module
from memplan.ops.redistribute import redistribute, replicated_parameter
from memplan.placements import Partial, Replicate, Shard
from memplan.shapes import BOOL, FP32, INT64, UINT8, DType, Parameter, Shape, check_equal, n_elements
from memplan.tape import Expanded, Grads, Node, Saved, Tape, Tensor


@as_module
def embedding(tokens: Tensor, name: str, n_rows: int, d_model: int) -> Tensor:
    """Rows of the vocabulary's table; saves the token ids. The table's gradient is dense.

    Over the tensor axis each rank holds some of the rows and has zeros for the others; these partial outputs
    get the placements of the residual stream, and FSDP2 gathers the first block's weights before the sum is
    read. PyTorch makes the table's gradient whole on every rank; DDP shards it again.

    Source: aten/src/ATen/native/Embedding.cpp (`embedding_dense_backward_cpu`),
    aten/src/ATen/native/cuda/Embedding.cu (`embedding_dense_backward_cuda`),
    torch.distributed.tensor.placement_types:_MaskPartial.
    """
    tape = tokens.tape
    dims(tokens, f"embedding {name}", "batch", "seq")
    divided(n_rows, tape.mesh.get("tp", 1), f"n_rows of {name}")
    table = tape.parameter(
        f"{name}.weight",
        (n_rows, d_model),
        placements={"tp": Shard(0)},
        grad_placements={"tp": Replicate()},
    )
    if not table.is_divided:
        return _looked_up(tokens, table, n_rows, name)
    with tape.workspace() as masked:
        masked.new("rows of other ranks", tokens.shape, BOOL)
        masked.new("ids of own rows", tokens.shape, INT64)
        partial = _looked_up(tokens, table, n_rows, name)
    partial.placements = {"tp": Partial()}
    return redistribute(partial, "tp", tape.context.stream, waits=False)


def position_ids(tokens: Tensor) -> Tensor:
    """The ids 0 to seq - 1 in a tensor (seq,) that is sharded as the residual stream's sequence is.

    Source: torch:arange.
    """
    tape, (_, seq) = tokens.tape, dims(tokens, "positions", "batch", "seq")
    of_ids = dict.fromkeys(tape.over("tp", tape.context.stream), Shard(0))
    for axis in of_ids:
        seq = divided(seq, tape.mesh[axis], "seq_len", by=axis)
    return tape.new("position ids", (seq,), INT64, placements=of_ids)


@as_module
def learned_positions(ids: Tensor, name: str, n_rows: int, d_model: int) -> Tensor:
    """Rows of the table of positions, which is whole on every tensor rank; saves the ids.

    Source: torch.nn:Embedding.forward, as `embedding`.
    """
    table = replicated_parameter(ids, f"{name}.weight", (n_rows, d_model))
    return _looked_up(ids, table, n_rows, name)


def add_positions(x: Tensor, p: Tensor) -> Tensor:
    """x (batch, seq, d) plus p (seq, d) or (1, seq, d); saves nothing.

    p's gradient is summed over the batch, for p of (seq, d) even over a batch of one.

    Source: tools/autograd/derivatives.yaml (`add.Tensor`).
    """
    tape, p_shape, dtype = x.tape, p.shape, p.dtype
    _, *row = dims(x, "a sum with positions", "batch", "seq", "d", allowed=BY_TOKEN)
    p.check_placements("a sum with positions", dict.fromkeys(x.placements, Shard(len(p_shape) - 2)))
    check_equal("a sum with positions", tuple(row), p_shape[-2:])
    x.in_flight = ()

    def backward(grad: Tensor, saved: Saved) -> Grads:
        return grad, Expanded(grad, p_shape, dtype)

    return x.new("embedding", x.shape, x.dtype, tape.node((x.node, p.node), (), backward))


def _looked_up(ids: Tensor, table: Parameter, n_rows: int, name: str) -> Tensor:
    tape, dtype = ids.tape, table.dtype
    shape = (n_rows, table.shape[1])
    rows: Node | Parameter = table
    if table.grad_shape != shape:
        cut = table.grad_shape
        rows = tape.node((table,), (), lambda grad, saved: (grad.tape.new("grad", cut, dtype),))
    n_ids = n_elements(ids.shape)

    def backward(grad: Tensor, saved: Saved) -> Grads:
        return (table_gradient(grad.tape, n_ids, shape, dtype),)

    return ids.new(name, (*ids.shape, shape[1]), dtype, tape.node((rows,), (ids,), backward))


def table_gradient(tape: Tape, n_ids: int, shape: Shape, dtype: DType) -> Tensor:
    """The gradient of a table (rows, width), of which `n_ids` rows were looked up."""
    if tape.context.device.on_cpu or n_ids <= SORTED_IDS:
        return tape.new("grad", shape, dtype)
    return _sorted_gradient(tape, n_ids, shape, dtype)


def _sorted_gradient(tape: Tape, n_ids: int, shape: Shape, dtype: DType) -> Tensor:
    """A table's gradient from many ids, sorted so that equal ones are neighbours.

    One thread sums at most 10 rows of an id, a part; the parts' sums are kept in float32.

    Source: aten/src/ATen/native/cuda/Embedding.cu (`embedding_dense_backward_cuda`),
    aten/src/ATen/native/cuda/EmbeddingBackwardKernel.cu (`embedding_backward_cuda_kernel`).
    """
    n_rows, d_model = shape
    device, n_passes = tape.context.device, id_sort_passes(tape.context.torch_release, n_rows)
    most = min(n_ids, n_rows)
    most_parts = n_ids // ROWS_PER_THREAD + most
    with tape.workspace() as kept:
        kept.new("sorted ids", (n_ids,), INT64)
        kept.new("order", (n_ids,), INT64)
        with tape.workspace() as sort:
            sort.new("numbers", (n_ids,), INT64)
            sort.new("CUB: sort", (radix_sort_bytes(device, n_ids, n_passes),), UINT8)
        grad = tape.new("grad", shape, dtype)
        kept.new("starts of equal ids", (n_ids,), INT64)
        kept.new("number of different ids", (), INT64)
        with tape.workspace() as unique:
            unique.new("different ids", (n_ids,), INT64)
            unique.new("CUB: unique", (unique_bytes(device, n_ids),), UINT8)
        kept.new("parts of an id", (most,), INT64)
        kept.new("offsets of parts", (most,), INT64)
        with tape.workspace() as scan:
            scan.new("CUB: scan", (scan_bytes(most),), UINT8)
        kept.new("number of parts", (), INT64)
        kept.new("starts of parts", (most_parts,), INT64)
        if sums_by_id(device, most, most_parts, d_model):
            kept.new("ids of parts", (most_parts,), INT64)
            kept.new("sums of ids", (most, d_model), FP32)
        else:
            kept.new("sums of parts", (most_parts, d_model), FP32)
    return grad
