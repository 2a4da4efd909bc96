"""Matrix products with a weight, whole or divided over the tensor axis."""

from typing import Literal

from memplan.ops.dims import dims, divided
from memplan.ops.modules import as_module
from memplan.ops.redistribute import redistribute
from memplan.placements import WHOLE, Partial, Replicate, Shard
from memplan.record import ComputeKind
from memplan.shapes import DType, Parameter, n_elements
from memplan.tape import Expanded, Grads, Node, Saved, Tensor

Split = Literal["columns", "rows"]
"""How tensor ranks divide a weight: its output features, or its input features.

Source: torch.distributed.tensor.parallel.style:ColwiseParallel, and
torch.distributed.tensor.parallel.style:RowwiseParallel.
"""


@as_module
def linear(x: Tensor, name: str, n_out: int, *, bias: bool, split: Split, again: bool = False) -> Tensor:
    """x W^T + b, with W (n_out, n_in): 2 x tokens x n_in x n_out FLOPs; saves x and W.

    `again`: selective recomputation computes this product again instead of saving its output.

    Under autocast the weight, the bias and x are first copied to its type, and the weight's copy is kept
    until backward. With columns, the output is sharded over the features, and x's gradient is partial. With
    rows, partial outputs get the placements of the residual stream, and each rank adds its part of the bias.

    Source: aten/src/ATen/native/Linear.cpp (`linear`), tools/autograd/derivatives.yaml (`mm`, `addmm`),
    torch.distributed.tensor.placement_types:Partial._partition_value.
    """
    tape, columns = x.tape, split == "columns"
    tp, of_features = tape.mesh.get("tp", 1), tape.over("tp", Shard(2))
    allowed = (WHOLE if columns else of_features,)
    _, _, n_in = dims(x, f"linear {name} by {split}", "batch", "seq", "n_in", allowed=allowed)
    if columns:
        divided(n_out, tp, f"n_out of {name}")
    whole = (n_out, n_in) if columns else (n_out, n_in * tp)
    weight = tape.parameter(f"{name}.weight", whole, placements={"tp": Shard(0 if columns else 1)})
    b = None
    if bias:
        b = tape.parameter(f"{name}.bias", (n_out,), placements={"tp": Shard(0) if columns else Replicate()})
    y = _product(x, weight, b, name, divides_bias=bias and tp > 1 and not columns, again=again)
    y.placements = of_features if columns else tape.over("tp", Partial())
    return y if columns else redistribute(y, "tp", tape.context.stream)


def conv1d(x: Tensor, name: str, n_out: int) -> Tensor:
    """x W + b, with W (n_in, n_out): a linear whose weight is transposed, and whole on every rank.

    Source: transformers.pytorch_utils, Conv1D.
    """
    _, _, n_in = dims(x, f"conv1d {name}", "batch", "seq", "n_in")
    weight = x.tape.parameter(f"{name}.weight", (n_in, n_out))
    bias = x.tape.parameter(f"{name}.bias", (n_out,))
    return _product(x, weight, bias, name, divides_bias=False, again=False)


def _product(
    x: Tensor, weight: Parameter, bias: Parameter | None, name: str, *, divides_bias: bool, again: bool
) -> Tensor:
    tape, dtype = x.tape, x.tape.context.autocast or x.dtype
    batch, seq, n_in = x.shape
    n_out = n_elements(weight.shape) // n_in
    if tape.context.hooks_modules:
        return _zero3_product(x, weight, bias, name, n_out)
    _until_computed, node = _operands(x, weight, bias, dtype)

    def compute() -> tuple[Tensor]:
        with tape.workspace() as part:
            if divides_bias:
                part.new("part of bias", (n_out,), dtype)
            y = tape.new(name, (batch, seq, n_out), dtype)
            tape.product(y, biased=bias is not None)
        return (y,)

    operands = (batch * seq, n_in), (n_in, n_out)
    (y,) = tape.save_if_selective(compute, ComputeKind.MM, operands, again=again)
    node.computes(ComputeKind.MM, operands, *((0, 1) if bias is None else (2, 1)))
    y.node = node
    return y


def _zero3_product(x: Tensor, weight: Parameter, bias: Parameter | None, name: str, n_out: int) -> Tensor:
    """A product that saves x and W once it is computed, and whose backward pass computes x's gradient first.

    Source: `deepspeed.runtime.zero.linear:LinearFunctionForZeroStage3`.
    """
    tape, dtype, x_shape, w_shape = x.tape, x.dtype, x.shape, weight.shape
    n_rows = n_elements(x_shape[:-1])
    w, b = tape.weight(weight), None if bias is None else tape.weight(bias)

    def compute() -> tuple[Tensor]:
        y = tape.new(name, (*x_shape[:-1], n_out), dtype)
        tape.product(y)
        return (y,)

    operands = (n_rows, x_shape[-1]), (x_shape[-1], n_out)
    (y,) = tape.save_if_selective(compute, ComputeKind.MM, operands)

    def backward(grad: Tensor, saved: Saved) -> Grads:
        grad_x = grad.tape.grad_of(0, x_shape, dtype, is_view=True)
        grad.tape.product(grad_x)
        grad_w = grad.tape.grad_of(1, w_shape, dtype, is_view=True)
        grad.tape.product(grad_w)
        if b is None:
            return grad_x, grad_w
        grad_b = grad.tape.summed("grad", (n_out,), dtype, n_rows, along_rows=True)
        return grad_x, grad_w, grad_b

    y.node = tape.node((x.node, w.node, *([] if b is None else [b.node])), (x, w), backward)
    y.node.computes(ComputeKind.MM, operands, 0, 1)
    return y


def _operands(x: Tensor, weight: Parameter, bias: Parameter | None, dtype: DType) -> tuple[Saved, Node]:
    """x and the weight in the product's type, and the product's node.

    With a bias, x is flattened before the weight is transposed, so that the gradients of bias and weight are
    accumulated before x's is added to others.
    """
    tape, x_shape, w_shape = x.tape, x.shape, weight.shape
    n_rows, n_out = n_elements(x_shape[:-1]), n_elements(w_shape) // x_shape[-1]
    b = None if bias is None else tape.weight(bias, dtype)
    w = tape.weight(weight, dtype)
    x.in_flight = ()
    used = tape.operand(x, dtype)

    def mm_backward(grad: Tensor, saved: Saved) -> Grads:
        grad_w = grad.tape.grad_of(1, w_shape, dtype, is_view=True)
        grad.tape.product(grad_w)
        grad_x = grad.tape.grad_of(0, x_shape, dtype, is_view=True)
        grad.tape.product(grad_x)
        return grad_x, grad_w

    def addmm_backward(grad: Tensor, saved: Saved) -> Grads:
        grad_x = grad.tape.grad_of(2, x_shape, dtype, is_view=True)
        grad.tape.product(grad_x)
        grad_w = grad.tape.grad_of(1, w_shape, dtype, is_view=True)
        grad.tape.product(grad_w)
        rows = Tensor(grad.tape, (n_rows, n_out), grad.dtype, grad.storage)
        grad_b = Expanded(rows, (n_out,), dtype) if grad.tape.wants(0) else None
        return grad_b, grad_w, grad_x

    of_x = x.placements or dict.fromkeys(weight.placements, Partial())
    if b is None:
        node = tape.node((used.node, w.node), (used, w), mm_backward)
        node.grad_placements = of_x, WHOLE
    else:
        node = tape.node((b.node, w.node, used.node), (used, w), addmm_backward)
        node.grad_placements = WHOLE, WHOLE, of_x
    return (used, w), node
