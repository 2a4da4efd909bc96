"""torchtitan's loss: the output layer, cross-entropy and their backward passes, chunk by chunk.

Source: torchtitan 0.3.0, torchtitan/components/loss.py (`ChunkedLossWrapper`, `GradAccumulator`,
`CrossEntropyLoss`).
"""

from memplan.ops.dims import dims, divided
from memplan.ops.elementwise import pointwise
from memplan.ops.linear import linear
from memplan.ops.loss import gradient_of_loss, softmax_cross_entropy
from memplan.record import HookKind, UnitHook
from memplan.shapes import FP32, INT64, Parameter
from memplan.tape import Grads, Node, Saved, Tape, Tensor


def chunked_linear_cross_entropy(x: Tensor, name: str, n_out: int) -> Tensor:
    """The loss of the last norm's output x (batch, seq, d) in `loss_chunks` pieces of the sequence.

    Each piece is passed through the output layer `name` and back before the next one: the layer's gradients
    are added up, the pieces' are copied into a whole one in float32. Its copy in the type of x is saved, and
    is what x gets as its gradient. A piece cut out of several sequences is made contiguous, with its targets.
    The logits of a piece live until the next one's are there.

    Source: torchtitan 0.3.0, torchtitan/components/loss.py (`ChunkedLossWrapper.__call__`).
    """
    tape, n = x.tape, x.tape.context.loss_chunks
    batch, seq, d = dims(x, "chunked_linear_cross_entropy", "batch", "seq", "d")
    shape, whole = (batch, divided(seq, n, "seq", "loss_chunks"), d), batch == 1
    weight = tape.parameter(f"{name}.weight", (n_out, d))
    leaves = [Node((), (), _not_called, None) for _ in range(n)]
    pieces = [
        Tensor(tape, shape, x.dtype, x.storage, leaf) if whole else tape.new("piece", shape, x.dtype, leaf)
        for leaf in leaves
    ]
    targets = [tape.new("targets of a piece", shape[:2], INT64) for _ in range(0 if whole else n)]
    grads = tape.new("gradients of pieces", (batch, seq, d), FP32)
    total, logits, loss, grad = tape.new("sum of losses", (), FP32), None, None, None
    _hook(tape, "pre_forward", weight.name)
    for piece, leaf in zip(pieces, leaves, strict=True):
        n_before = len(tape.nodes)
        logits = linear(piece, name, n_out, bias=False, split="columns")
        loss = pointwise(softmax_cross_entropy(tape.cast(logits, FP32)), "loss over the tokens")
        total = tape.new("sum of losses", (), FP32)
        grad = _pass_back(loss, n_before, weight, grad)
        _collect(piece, leaf)
    if grad is not None:
        tape.keep_grad(weight, grad)
    _hook(tape, "post_forward", weight.name)
    saved = grads if x.dtype == FP32 else tape.new("grad of the last norm's output", x.shape, x.dtype)
    total.node = tape.node((x.node,), (saved.detach(),), lambda grad, saved: (saved[0].detach(),))
    del targets
    return total


def _pass_back(loss: Tensor, n_before: int, weight: Parameter, older: Tensor | None) -> Tensor:
    """Run the backward pass of a piece's loss, down to the first `n_before` nodes; the weight's gradient."""
    tape, start = loss.tape, gradient_of_loss(loss.tape)
    tape.end_stretch()
    tape.start_backward(loss, start)
    tape.backward(down_to=n_before)
    tape.end_stretch()
    tape.phase = "forward"
    grad = tape.graded_in_turn(weight, older)
    _hook(tape, "post_backward", weight.name)
    return grad


def _collect(piece: Tensor, leaf: Node) -> None:
    """Copy a piece's gradient to its place among the others, through a copy in float32."""
    with piece.tape.workspace() as copies:
        if piece.dtype != FP32:
            copies.new("grad of a piece in float32", piece.shape, FP32)
        leaf.grad = None


def _hook(tape: Tape, kind: HookKind, parameter: str) -> None:
    """The place of what `ChunkedLossWrapper` has FSDP2 do with the output layer's unit."""
    if tape.context.plays_hooks:
        tape.events.append(UnitHook(kind, (parameter,)))


def _not_called(grad: Tensor, saved: Saved) -> Grads:
    return ()
