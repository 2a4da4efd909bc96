"""Attention heads: their layout, their copies for grouped queries, rotary positions.

Queries, keys and values are (batch, seq, heads, d_head). Batched products need them one head after the other
(`Tensor.head_major`); the operations after them copy them back to one token after the other.
"""

from collections.abc import Sequence
from dataclasses import replace

from memplan.ops.dims import BY_FEATURE, dims, divided
from memplan.placements import WHOLE
from memplan.shapes import COMPLEX64, FP32, Buffer, DType, Shape, buffer_of, check_equal
from memplan.tape import Expanded, Grads, Saved, Tape, Tensor

DIMS = ("batch", "seq", "heads", "d_head")


def heads(x: Tensor, d_head: int, *, by_head: bool = False) -> Tensor:
    """A view of (batch, seq, heads x d_head) as (batch, seq, heads, d_head); its gradient is made contiguous.

    `by_head`: the gradient is laid out by head though its rule does not say so, as behind a norm of heads.

    Source: torch:Tensor.unflatten.
    """
    batch, seq, width = dims(x, "heads", "batch", "seq", "heads x d_head", allowed=BY_FEATURE)
    y = x.view(batch, seq, divided(width, d_head, "heads x d_head", by="d_head"), d_head)
    by_head = by_head and min(y.shape[1:3]) > 1

    def backward(grad: Tensor, saved: Saved) -> Grads:
        grad.head_major = grad.head_major or by_head
        return (token_major(grad),)

    y.node = x.tape.node((x.node,), (), backward)
    return y


def feature_parts(x: Tensor, n: int) -> list[Tensor]:
    """x as n views along its features; gradients of heads are joined one head after the other.

    Source: torch:split, as `split`.
    """
    x.check_placements("parts of the features", WHOLE)
    return split(x, [(*x.shape[:-1], divided(x.shape[-1], n, "width", by="parts"))] * n)


def split(x: Tensor, parts: Sequence[Shape], grad_name: str = "grad") -> list[Tensor]:
    """x as views of these shapes; backward joins their gradients once the first view's has come.

    Until then all are alive.

    Source: torch:split, torch/csrc/autograd/FunctionsManual.cpp (`split_backward`: `cat`).
    """
    tape, shape, dtype = x.tape, x.shape, x.dtype
    by_head = len(shape) == len(DIMS) and min(shape[1:3]) > 1
    grads: list[Tensor] = []

    def join(grad: Tensor, saved: Saved) -> Grads:
        grads.append(grad)
        whole = grad.tape.new(grad_name, shape, dtype, head_major=by_head)
        grads.clear()
        return (whole,)

    def keep(grad: Tensor, saved: Saved) -> Grads:
        grads.append(grad)
        return (None,)

    nodes = [tape.node((None if i else x.node,), (), keep if i else join) for i in range(len(parts))]
    views = zip(parts, nodes, strict=True)
    placed = x.placements
    return [Tensor(tape, part, dtype, x.storage, node, True, placements=placed) for part, node in views]


def feature_slices(x: Tensor, *widths: int) -> list[Tensor]:
    """Views of x of these widths along its features; backward makes a whole gradient of each, with zeros.

    A slice of the full width is x itself.

    Source: torch/csrc/autograd/FunctionsManual.cpp (`slice_backward_wrapper`), ATen/TensorIndexing.h
    (`applySlice`).
    """
    tape, shape, dtype = x.tape, x.shape, x.dtype
    x.check_placements("slices of the features", WHOLE)
    check_equal("slices of the features", sum(widths), shape[-1])
    by_head = len(shape) == len(DIMS) and min(shape[1:3]) > 1

    def backward(grad: Tensor, saved: Saved) -> Grads:
        return (grad.tape.new("grad", shape, dtype, head_major=by_head),)

    views = [(n, x.node if n == shape[-1] else tape.node((x.node,), (), backward)) for n in widths]
    return [Tensor(tape, (*shape[:-1], n), dtype, x.storage, node, is_view=True) for n, node in views]


def merged_heads(x: Tensor) -> Tensor:
    """(batch, seq, heads, d_head) as (batch, seq, heads x d_head); a copy where x is laid out by head.

    Source: torch:Tensor.flatten, a view where it can be.
    """
    batch, seq, n_heads, d_head = dims(x, "merged heads", *DIMS, allowed=BY_FEATURE)
    return token_major(x).view(batch, seq, n_heads * d_head)


def repeated_heads(x: Tensor, n_heads: int, *, head_major: bool = False, copies: bool = True) -> Tensor:
    """Keys or values copied once per query head; the copies' gradients are summed.

    Without `copies`, by `expand` and `reshape`: a single head is not copied, but seen by all query heads.

    Source: torch:repeat_interleave; aten/src/ATen/TensorUtils.cpp (`computeStride`).
    """
    tape, shape, dtype = x.tape, x.shape, x.dtype
    batch, seq, n_kv_heads, d_head = dims(x, "repeated heads", *DIMS, allowed=BY_FEATURE)
    divided(n_heads, n_kv_heads, "n_heads", by="n_kv_heads")

    def backward(grad: Tensor, saved: Saved) -> Grads:
        return (grad.tape.new("grad", shape, dtype, head_major=head_major and min(shape[1:3]) > 1),)

    node = tape.node((x.node,), (), backward)
    if n_kv_heads == 1 and not copies:
        return replace(x, shape=(batch, seq, n_heads, d_head), node=node, is_view=True)
    return x.new("repeated heads", (batch, seq, n_heads, d_head), dtype, node, head_major=head_major)


def rotation(seq_len: int, d_head: int) -> Buffer:
    """The angles of rotary positions as unit complex numbers.

    Source: torchtitan/models/llama/model.py (`precompute_freqs_cis`).
    """
    return buffer_of("rotation", (seq_len, d_head // 2), COMPLEX64)


def rope(x: Tensor) -> Tensor:
    """Pairs of elements turned by their position's angle, as complex float32 numbers; saves the angles only.

    The backward product needs its gradient token by token, and resolves the angles' conjugate, a copy of
    (seq, d_head / 2) complex numbers; that is the size of one head's float32 sequence.

    Source: torch/csrc/autograd/FunctionsManual.cpp (`mul_tensor_backward`),
    aten/src/ATen/ConjugateFallback.cpp (`ConjFallback`), tools/autograd/derivatives.yaml (`view_as_real`).
    """
    tape, shape, dtype = x.tape, x.shape, x.dtype
    _, seq, _, d_head = dims(x, "rope", *DIMS, allowed=BY_FEATURE)
    half = divided(d_head, 2, "d_head", by="a pair's size")
    wide = tape.cast(x, FP32)

    def backward(grad: Tensor, saved: Saved) -> Grads:
        with grad.tape.workspace() as conjugate:
            conjugate.new("conjugate of the angles", (seq, half), COMPLEX64)
            return (grad.tape.new("grad", shape, FP32),)

    turned = x.new("rotated", shape, FP32, tape.node((wide.node,), tape.beside, backward))
    turned.node = tape.node((turned.node,), (), lambda grad, saved: (token_major(grad),))
    return tape.cast(turned, dtype)


def halves_rotation(tokens: Tensor, d_head: int, dtype: DType) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rotary positions, (1, seq, d_head), computed in float32.

    Source: transformers.models.llama.modeling_llama, LlamaRotaryEmbedding.forward.
    """
    tape, (_, seq) = tokens.tape, tokens.shape
    shape = 1, seq, d_head
    with tape.workspace() as angles:
        with tape.workspace() as positions:
            positions.new("position ids as float32", (1, seq, 1), FP32)
            angles.new("angles", (1, seq, d_head // 2), FP32)
        angles.new("angles of both halves", shape, FP32)
        tables = [_table(tape, name, shape) for name in ("cosines", "sines")]
        if dtype == FP32:
            cosines, sines = tables
        else:
            cosines, sines = (tape.new(name, shape, dtype) for name in ("cosines", "sines"))
    return cosines, sines


def _table(tape: Tape, name: str, shape: Shape) -> Tensor:
    """Cosines or sines in float32, times the scale of attention."""
    with tape.workspace() as unscaled:
        unscaled.new(f"{name}, not scaled", shape, FP32)
        return tape.new(name, shape, FP32)


def rope_by_halves(x: Tensor, cosines: Tensor, sines: Tensor, *others: Tensor) -> Tensor:
    """x cos + (-x2, x1) sin, operation by operation, in the wider of their types; saves both tables.

    `others`: tables that other blocks save, which live as long.

    Source: transformers.models.llama.modeling_llama, apply_rotary_pos_emb.
    """
    straight = _times_table(x, "times cosines", cosines, *others)
    turned = _times_table(_halves_in_turn(x), "times sines", sines)
    node = x.tape.node((straight.node, turned.node), (), lambda grad, saved: (grad, grad))
    return x.new("rotated", x.shape, turned.dtype, node)


def _times_table(x: Tensor, name: str, *tables: Tensor) -> Tensor:
    """x times the first of some tables, all of which are saved, in the wider type."""
    tape, shape, dtype = x.tape, x.shape, x.dtype
    wide = dtype if dtype == FP32 else tables[0].dtype

    def backward(grad: Tensor, saved: Saved) -> Grads:
        return (Expanded(grad.tape.new("grad times table", shape, wide), shape, dtype),)

    node = tape.node((x.node,), tables, backward)
    with tape.workspace() as copied:
        if dtype != wide and tape.context.device.casts_in_copies:
            copied.new(f"copy as {wide.name}", shape, wide)
        return x.new(name, shape, wide, node)


def _halves_in_turn(x: Tensor) -> Tensor:
    """(-x2, x1), whose gradient is laid out by head.

    Source: transformers.models.llama.modeling_llama, rotate_half;
    torch/csrc/autograd/FunctionsManual.cpp (`slice_backward_wrapper`).
    """
    tape, shape, dtype = x.tape, x.shape, x.dtype
    half = (*shape[:3], divided(shape[3], 2, "d_head", by="halves"))

    def backward(grad: Tensor, saved: Saved) -> Grads:
        with grad.tape.workspace() as added:
            with grad.tape.workspace() as negated:
                negated.new("negated half", half, dtype)
                grad_x = grad.tape.new("grad", shape, dtype, head_major=min(shape[1:3]) > 1)
            added.new("grad of a half", shape, dtype)
        return (grad_x,)

    node = tape.node((x.node,), (), backward)
    with tape.workspace() as negated:
        negated.new("negated half", half, dtype)
        return x.new("halves in turn", shape, dtype, node)


def rope_of_parts(
    q: Tensor, k: Tensor, cosines: Tensor, sines: Tensor, *, in_turn: bool
) -> tuple[Tensor, Tensor]:
    """Queries and keys with the first part of each head rotated; the rest is copied beside it.

    `in_turn`: queries are joined before keys are rotated. The results are as wide as the tables.

    Source: transformers.models.phi3.modeling_phi3, apply_rotary_pos_emb (in turn);
    transformers.models.gpt_neox.modeling_gpt_neox, apply_rotary_pos_emb.
    """
    rotary_dim = cosines.shape[-1]
    (q_rot, q_pass), (k_rot, k_pass) = (
        feature_slices(x, rotary_dim, x.shape[-1] - rotary_dim) for x in (q, k)
    )
    if in_turn:
        joined_q = _joined(rope_by_halves(q_rot, cosines, sines), q_pass)
        return joined_q, _joined(rope_by_halves(k_rot, cosines, sines), k_pass)
    turned_q, turned_k = rope_by_halves(q_rot, cosines, sines), rope_by_halves(k_rot, cosines, sines)
    joined_q = _joined(turned_q, q_pass)
    del turned_q
    return joined_q, _joined(turned_k, k_pass)


def _joined(turned: Tensor, rest: Tensor) -> Tensor:
    """Both parts of all heads beside each other, one head after the other."""
    tape, shape = turned.tape, (*turned.shape[:-1], turned.shape[-1] + rest.shape[-1])

    def backward(grad: Tensor, saved: Saved) -> Grads:
        return grad.view(*shape), grad.view(*shape)

    node = tape.node((turned.node, rest.node), (), backward)
    return turned.new("rotated", shape, turned.dtype, node, head_major=min(shape[1:3]) > 1)


def head_major(x: Tensor) -> Tensor:
    """x with one head after the other, as batched products need it: a copy unless one of these dims is 1."""
    return x if x.head_major or 1 in x.shape[:3] else x.new("by head", x.shape, x.dtype)


def token_major(x: Tensor) -> Tensor:
    """x with one token after the other: a copy if it is laid out by head."""
    return x.new("by token", x.shape, x.dtype, x.node) if x.head_major else x
