"""Attention as separate products in float32, with the scores in memory."""

from memplan.ops.elementwise import like, passed_on, pointwise, tanh, times_number
from memplan.ops.heads import head_major, repeated_heads, token_major
from memplan.record import ComputeKind
from memplan.shapes import BOOL, FP32, DType, Shape
from memplan.tape import Grads, Saved, Tape, Tensor


def math_attention(q: Tensor, k: Tensor, v: Tensor, *, dropout: bool) -> Tensor:
    """Saves the scaled q and k, v, the probabilities and, with dropout, its mask and its result.

    CPU takes it for dropout, CUDA for float32 with grouped queries and where an old GPU has no other kernel.
    The probabilities are returned too, and thrown away: in a narrower type that is one more copy. Gradients
    are laid out by head; k's is transposed besides, so that a single sequence's is in order.

    Source: aten/src/ATen/native/transformers/attention.cpp (`_scaled_dot_product_attention_math`).
    """
    tape, dtype, shape = q.tape, q.dtype, q.shape
    _, seq, n_heads, _ = shape
    q, k, v = (tape.cast(x, FP32) for x in (q, k, v))
    scaled_q = pointwise(q, "scaled q")
    with tape.workspace() as held:
        held.keep(_causal_bias(tape, seq))
        if k.shape != shape:
            k, v = repeated_heads(k, n_heads, head_major=True), repeated_heads(v, n_heads, head_major=True)
        probabilities = _softmax(_scores(scaled_q, k))
        if dropout:
            probabilities = _dropped(probabilities)
        if dtype != FP32:
            held.new(f"probabilities as {dtype.name}", probabilities.shape, dtype)
        return tape.cast(_weighted_values(probabilities, v), dtype)


def _causal_bias(tape: Tape, seq: int) -> Tensor:
    """0 where a query may see a key, else -inf; (seq, seq)."""
    with tape.workspace() as temporary:
        with tape.workspace() as ones:
            ones.new("allowed", (seq, seq), BOOL)
            temporary.new("allowed below the diagonal", (seq, seq), BOOL)
        if not tape.context.device.on_cpu:
            temporary.new("0", (), FP32)
            temporary.new("-inf", (), FP32)
        return tape.new("causal bias", (seq, seq), FP32)


def _scores(scaled_q: Tensor, k: Tensor) -> Tensor:
    """The product of the scaled q and k for each head, (batch, heads, seq, seq)."""
    scaled_k = pointwise(k, "scaled k")
    scaled_k.head_major = k.head_major
    return _products_of_heads(scaled_q, scaled_k)


def _products_of_heads(q: Tensor, k: Tensor) -> Tensor:
    """The product of q and k for each head, (batch, heads, seq, seq)."""
    tape = k.tape
    batch, seq, n_heads, d_head = q.shape
    left, right = head_major(q), head_major(k)

    def backward(grad: Tensor, saved: Saved) -> Grads:
        grad_q, grad_k = _product_gradients(grad, saved)
        grad_k.head_major = min(batch, seq) > 1
        return grad_q, grad_k

    node = tape.node((q.node, k.node), (left, right), backward)
    operands = (batch * n_heads, seq, d_head), (batch * n_heads, d_head, seq)
    (scores,) = tape.save_if_selective(
        lambda: (_product(tape, "scores", (batch, n_heads, seq, seq), q.dtype),), ComputeKind.BMM, operands
    )
    node.computes(ComputeKind.BMM, operands, 0, 1)
    scores.node = node
    return scores


def _softmax(scores: Tensor) -> Tensor:
    """The probabilities from scores to which the bias is added, in place unless a dispatch mode is active."""
    tape, shape, node, on_cpu = scores.tape, scores.shape, scores.node, scores.tape.context.device.on_cpu

    if tape.watched:
        scores = tape.new("scores and bias", shape, FP32)
    probabilities = tape.new("probabilities", shape, FP32)
    probabilities.node = tape.node((node,), (probabilities.detach(),), _softmax_backward)
    with tape.workspace() as masked:
        masked.new("keys not allowed", shape, BOOL)
        masked.new("rows without any allowed key", shape[:-1], BOOL)
        if not on_cpu:
            masked.new("0", (), FP32)
    return probabilities


def _softmax_backward(grad: Tensor, saved: Saved) -> Grads:
    grad_scores = like(grad, "grad")
    if not grad.tape.context.device.on_cpu:
        like(grad, "grad times probabilities")
    return (grad_scores,)


def _dropped(probabilities: Tensor) -> Tensor:
    tape = probabilities.tape
    mask = tape.new("dropout mask", probabilities.shape, FP32 if tape.context.device.on_cpu else BOOL)
    return pointwise(probabilities, "dropped probabilities", mask)


def _weighted_values(probabilities: Tensor, v: Tensor) -> Tensor:
    """The product of the probabilities and v for each head."""
    tape = v.tape
    batch, n_heads, seq, _ = probabilities.shape
    d_head = v.shape[3]
    shape, apart = (batch, seq, n_heads, d_head), min(n_heads, seq) > 1
    values = head_major(v)
    node = tape.node((probabilities.node, v.node), (probabilities, values), _product_gradients)
    operands = (batch * n_heads, seq, seq), (batch * n_heads, seq, d_head)
    (y,) = tape.save_if_selective(
        lambda: (_product(tape, "attention", shape, v.dtype),), ComputeKind.BMM, operands
    )
    node.computes(ComputeKind.BMM, operands, 0, 1)
    y.head_major, y.placements = apart, v.placements
    y.node = tape.node((node,), (), lambda grad, saved: (head_major(grad.view(*shape)),))
    return y


def _product(tape: Tape, name: str, shape: Shape, dtype: DType) -> Tensor:
    """The result of a product for each head."""
    y = tape.new(name, shape, dtype)
    tape.product(y)
    return y


def _product_gradients(grad: Tensor, saved: Saved) -> tuple[Tensor, Tensor]:
    """The gradients of both operands, laid out by head."""
    left, right = (operand.shape for operand in saved)
    grad_right = _product(grad.tape, "grad", right, grad.dtype)
    grad_left = _product(grad.tape, "grad", left, grad.dtype)
    grad_left.head_major = grad_right.head_major = min(right[1:3]) > 1
    return grad_left, grad_right


def capped_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *, capped: bool) -> Tensor:
    """Attention operation by operation, with scores that may be bounded by a tanh, and a mask that is added.

    Source: transformers.models.gemma2.modeling_gemma2, eager_attention_forward.
    """
    tape, dtype, n_heads = q.tape, q.dtype, q.shape[2]
    product = tape.context.autocast or dtype
    if k.shape != q.shape:
        k, v = repeated_heads(k, n_heads, head_major=True), repeated_heads(v, n_heads, head_major=True)
    scores = times_number(_products_of_heads(tape.cast(q, product), tape.cast(k, product)))
    if capped:
        scores = times_number(scores)
        scores = tanh(scores)
        scores = times_number(scores)
    scores = _masked(scores, mask)
    probabilities = tape.cast(_probabilities(scores), dtype)
    del scores
    y = _weighted_values(tape.cast(probabilities, product), tape.cast(v, product))
    return token_major(y)


def _probabilities(scores: Tensor) -> Tensor:
    """The softmax of scores in float32."""
    tape, scores = scores.tape, scores.tape.cast(scores, FP32)
    probabilities = tape.new("probabilities", scores.shape, FP32)
    probabilities.node = tape.node((scores.node,), (probabilities.detach(),), _softmax_backward)
    return probabilities


def _masked(scores: Tensor, mask: Tensor) -> Tensor:
    """The scores and the mask, (batch, 1, seq, seq) in the type of the weights, which may be wider."""
    return pointwise(scores.tape.promoted(scores, mask.dtype), "masked scores", backward=passed_on)
