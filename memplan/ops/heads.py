"""Attention heads: their layout, their copies for grouped queries, rotary positions.

Queries, keys and values are (batch, seq, heads, d_head). Batched products need them one head after the other
(`Tensor.head_major`); the operations after them copy them back to one token after the other.
"""

from collections.abc import Sequence

from memplan.ops.dims import dims, divided
from memplan.shapes import COMPLEX64, FP32, Buffer, DType, Shape, buffer_of, check_equal
from memplan.tape import Grads, Saved, Tensor, Workspace

DIMS = ("batch", "seq", "heads", "d_head")


def heads(x: Tensor, d_head: int) -> Tensor:
    """A view of (batch, seq, heads x d_head) as (batch, seq, heads, d_head); its gradient is made contiguous.

    Source: torch:Tensor.unflatten.
    """
    batch, seq, width = dims(x, "heads", "batch", "seq", "heads x d_head")
    y = x.view(batch, seq, divided(width, d_head, "heads x d_head", by="d_head"), d_head)
    y.node = x.tape.node((x.node,), (), lambda grad, saved: (_token_major(grad),))
    return y


def feature_parts(x: Tensor, n: int) -> list[Tensor]:
    """x as n views along its features; gradients of heads are joined one head after the other.

    Source: torch:split, as `split`.
    """
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
        whole = grad.tape.new(grad_name, shape, dtype)
        whole.head_major = by_head
        grads.clear()
        return (whole,)

    def keep(grad: Tensor, saved: Saved) -> Grads:
        grads.append(grad)
        return (None,)

    nodes = [tape.node((None if i else x.node,), (), keep if i else join) for i in range(len(parts))]
    views = zip(parts, nodes, strict=True)
    return [Tensor(tape, part, dtype, x.storage, node, is_view=True) for part, node in views]


def feature_slices(x: Tensor, *widths: int) -> list[Tensor]:
    """Views of x of these widths along its features; backward makes a whole gradient of each, with zeros.

    Source: torch/csrc/autograd/FunctionsManual.cpp (`slice_backward_wrapper`).
    """
    tape, shape, dtype = x.tape, x.shape, x.dtype
    check_equal("slices of the features", sum(widths), shape[-1])
    by_head = len(shape) == len(DIMS) and min(shape[1:3]) > 1

    def backward(grad: Tensor, saved: Saved) -> Grads:
        whole = grad.tape.new("grad", shape, dtype)
        whole.head_major = by_head
        return (whole,)

    nodes = [tape.node((x.node,), (), backward) for _ in widths]
    views = zip(widths, nodes, strict=True)
    return [Tensor(tape, (*shape[:-1], n), dtype, x.storage, node, is_view=True) for n, node in views]


def merged_heads(x: Tensor) -> Tensor:
    """(batch, seq, heads, d_head) as (batch, seq, heads x d_head); a copy where x is laid out by head.

    Source: torch:Tensor.flatten, a view where it can be.
    """
    batch, seq, n_heads, d_head = dims(x, "merged heads", *DIMS)
    return _token_major(x).view(batch, seq, n_heads * d_head)


def repeated_heads(x: Tensor, n_heads: int, *, head_major: bool = False) -> Tensor:
    """Keys or values copied once per query head; the copies' gradients are summed.

    Source: torch:repeat_interleave.
    """
    tape, shape, dtype = x.tape, x.shape, x.dtype
    batch, seq, n_kv_heads, d_head = dims(x, "repeated heads", *DIMS)
    divided(n_heads, n_kv_heads, "n_heads", by="n_kv_heads")

    def backward(grad: Tensor, saved: Saved) -> Grads:
        grad_x = grad.tape.new("grad", shape, dtype)
        grad_x.head_major = head_major and min(shape[1:3]) > 1
        return (grad_x,)

    node = tape.node((x.node,), (), backward)
    repeated = tape.new("repeated heads", (batch, seq, n_heads, d_head), dtype, node)
    repeated.head_major = head_major
    return repeated


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
    _, seq, _, d_head = dims(x, "rope", *DIMS)
    half = divided(d_head, 2, "d_head", by="a pair's size")
    wide = tape.cast(x, FP32)

    def backward(grad: Tensor, saved: Saved) -> Grads:
        with grad.tape.workspace() as conjugate:
            conjugate.new("conjugate of the angles", (seq, half), COMPLEX64)
            return (grad.tape.new("grad", shape, FP32),)

    turned = tape.new("rotated", shape, FP32, tape.node((wide.node,), (), backward))
    turned.node = tape.node((turned.node,), (), lambda grad, saved: (_token_major(grad),))
    return tape.cast(turned, dtype)


def halves_rotation(tokens: Tensor, d_head: int, dtype: DType) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rotary positions, (1, seq, d_head).

    Neglects: the angles that they are made from, which are gone before the first block.
    Source: transformers.models.llama.modeling_llama, LlamaRotaryEmbedding.forward.
    """
    tape, shape = tokens.tape, (1, tokens.shape[1], d_head)
    return tape.new("cosines", shape, dtype), tape.new("sines", shape, dtype)


def rope_by_halves(x: Tensor, cosines: Tensor, sines: Tensor, *others: Tensor) -> Tensor:
    """x cos + (-x2, x1) sin, operation by operation, in the wider of their types; saves both tables.

    `others`: tables that other blocks save, which live as long.

    Source: transformers.models.llama.modeling_llama, apply_rotary_pos_emb.
    """
    tape, shape, dtype, wide = x.tape, x.shape, x.dtype, cosines.dtype
    half = (*shape[:3], divided(shape[3], 2, "d_head", by="halves"))
    copies = dtype != wide and tape.context.device.casts_in_copies

    def times_table(into: Workspace, name: str) -> None:
        with tape.workspace() as copied:
            if copies:
                copied.new(f"copy as {wide.name}", shape, wide)
            into.new(name, shape, wide)

    def backward(grad: Tensor, saved: Saved) -> Grads:
        with grad.tape.workspace() as rotated, grad.tape.workspace() as halves:
            _in_type_of(grad, dtype, halves)
            with grad.tape.workspace() as negated:
                negated.new("negated half", half, dtype)
                grad_x = grad.tape.new("grad", shape, dtype)
            rotated.new("grad of a half", shape, dtype)
        with grad.tape.workspace() as turned:
            _in_type_of(grad, dtype, turned)
        return (grad_x,)

    node = tape.node((x.node,), (cosines, sines, *others), backward)
    with tape.workspace() as products:
        times_table(products, "times cosines")
        with tape.workspace() as rotated:
            with tape.workspace() as negated:
                negated.new("negated half", half, dtype)
                rotated.new("halves in turn", shape, dtype)
            times_table(products, "times sines")
        return tape.new("rotated", shape, wide, node)


def rope_of_part(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """x with the first part of each head rotated, as wide as the tables; the rest is copied beside it.

    Source: transformers.models.phi3.modeling_phi3, apply_rotary_pos_emb.
    """
    tape, shape = x.tape, x.shape
    turned, rest = feature_slices(x, cosines.shape[-1], shape[-1] - cosines.shape[-1])
    turned = rope_by_halves(turned, cosines, sines)

    def backward(grad: Tensor, saved: Saved) -> Grads:
        return grad.view(*shape), grad.view(*shape)

    joined = tape.new("rotated", shape, turned.dtype, tape.node((turned.node, rest.node), (), backward))
    joined.head_major = min(shape[1:3]) > 1
    return joined


def _in_type_of(grad: Tensor, dtype: DType, into: Workspace) -> None:
    """The product of a gradient and a table, cast to another type if it differs."""
    if dtype == grad.dtype:
        into.new("grad times table", grad.shape, dtype)
        return
    with grad.tape.workspace() as wide:
        wide.new("grad times table", grad.shape, grad.dtype)
        into.new(f"grad as {dtype.name}", grad.shape, dtype)


def head_major(x: Tensor) -> Tensor:
    """x with one head after the other, as batched products need it: a copy unless one of these dims is 1."""
    return x if x.head_major or 1 in x.shape[:3] else x.tape.new("by head", x.shape, x.dtype)


def _token_major(x: Tensor) -> Tensor:
    """x with one token after the other: a copy if it is laid out by head."""
    return x.tape.new("by token", x.shape, x.dtype, x.node) if x.head_major else x
