"""Core attention: FlashAttention 2 and cuDNN through Transformer Engine, or scores in memory.

Queries, keys and values are cut out of one product, in which each group of query heads is followed by its key
and its value head. Shapes are (batch, seq, heads, d_head) of this rank.
"""

from collections.abc import Callable
from typing import NamedTuple

from memplan.kernels import cudnn_scratch
from memplan.models.megatron.config import TransformerConfig
from memplan.models.megatron.layers import Norm
from memplan.record import ComputeKind
from memplan.shapes import BOOL, FP32, INT64, UINT8, DType, Shape
from memplan.tape import Grads, Saved, Source, Tape, Tensor


class Heads(NamedTuple):
    """The heads of one rank: of queries, of keys and values (`groups`), and their width."""

    n: int
    groups: int
    width: int

    @property
    def grouped(self) -> bool:
        """Whether several query heads share a key head."""
        return self.groups != self.n


class Qkv(NamedTuple):
    """Queries, keys and values as attention takes them.

    The node takes the gradient of the product that they were cut from, of shape `whole`; None: three nodes
    take their gradients. `separate`: they are tensors of their own, whose gradients are put together.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    nodes: tuple[Source, ...]
    whole: Shape | None
    separate: bool


def split_qkv(mixed: Tensor, heads: Heads) -> Qkv:
    """Queries, keys and values as views of `mixed`; the queries of groups are a copy.

    Source: megatron.core.transformer.attention:SelfAttention.get_query_key_value_tensors.
    """
    tape, (batch, seq, _), dtype = mixed.tape, mixed.shape, mixed.dtype

    def part(n: int) -> Tensor:
        return Tensor(tape, (batch, seq, n, heads.width), dtype, mixed.storage, None, True)

    node = tape.node((mixed.node,), (), lambda grad, saved: (grad,))
    q = part(heads.n)
    if heads.grouped:
        q = tape.new("queries", q.shape, dtype)
    return Qkv(q, part(heads.groups), part(heads.groups), (node,), mixed.shape, heads.grouped)


def with_positions(qkv: Qkv, width: int, *, fused: bool) -> Qkv:
    """Queries and keys turned by their positions, each a new tensor; the angles are not saved for each layer.

    Without the fused kernel each also saves its cosines and sines (seq, 1, 1, `width`).

    Source: megatron.core.models.common.embeddings.rope_utils:apply_rotary_pos_emb.
    """
    q, k, v, nodes, whole, _ = qkv
    del qkv
    tape = q.tape

    def turned(x: Tensor) -> tuple[Tensor, Saved]:
        saved = () if fused else _angles(x, width)
        return tape.new("turned by position", x.shape, x.dtype), saved

    q, of_q = turned(q)
    k, of_k = turned(k)
    node = tape.node(nodes, (*of_q, *of_k), lambda grad, saved: (grad,))
    return Qkv(q, k, v, (node,), whole, True)


def with_angles(x: Tensor, width: int) -> Tensor:
    """x turned by its positions without the fused kernel: a new tensor, which saves cosines and sines."""
    tape, shape, dtype = x.tape, x.shape, x.dtype

    def backward(grad: Tensor, saved: Saved) -> Grads:
        return (grad.tape.new("grad", shape, dtype),)

    saved = _angles(x, width)
    return tape.new("turned by position", shape, dtype, tape.node((x.node,), saved, backward))


def _angles(x: Tensor, width: int) -> Saved:
    shape = x.shape[1], 1, 1, width
    return x.tape.new("cosines", shape, x.dtype), x.tape.new("sines", shape, x.dtype)


def with_norms(qkv: Qkv, config: TransformerConfig) -> Qkv:
    """Queries and keys normed head by head, each a new tensor; their input and statistics are saved.

    The input of a norm is contiguous: of a view it is a copy.

    Source: megatron.core.transformer.attention:SelfAttention.get_query_key_value_tensors (`q_layernorm`),
    transformer_engine.pytorch.ops.basic.rmsnorm:RMSNorm.op_forward.
    """
    q, k, v, nodes, whole, _ = qkv
    del qkv
    tape, shapes, dtype = q.tape, (q.shape, k.shape), q.dtype
    q, k = [tape.new("contiguous", x.shape, dtype) if x.is_view else x for x in (q, k)]
    norms = [Norm(x, f"self_attention.{name}_layernorm.", config) for x, name in ((q, "q"), (k, "k"))]
    (new_q, of_q), (new_k, of_k) = (one.forward(x, "normed") for one, x in zip(norms, (q, k), strict=True))

    def backward(grad: Tensor, saved: Saved) -> Grads:
        tape = grad.tape
        with tape.workspace() as parts:
            for shape in shapes:
                parts.new("grad", shape, dtype)
            return grad, *[grad for one in norms for grad in one.backward(tape)[1]]

    weights = [tape.weight(parameter).node for one in norms for parameter in one.parameters]
    node = tape.node((*nodes, *weights), (q, k, *of_q, *of_k), backward)
    return Qkv(new_q, new_k, v, (node,), whole, True)


def made_contiguous(qkv: Qkv, *, transposes: bool) -> Qkv:
    """Copies of what is not contiguous: all three if they are also transposed, else what is still a view.

    Source: transformer_engine.pytorch.attention.dot_product_attention.utils:get_qkv_layout,
    transformer_engine.pytorch.attention.dot_product_attention.backends:FlashAttention.forward.
    """

    def copy(x: Tensor) -> Tensor:
        again = transposes and x.shape[0] > 1
        return x.tape.new("contiguous", x.shape, x.dtype) if x.is_view or again else x

    q, k, v, nodes, whole, _ = qkv
    del qkv
    q, k, v = copy(q), copy(k), copy(v)
    return Qkv(q, k, v, nodes, whole, True)


def attended(
    qkv: Qkv,
    compute: Callable[[], tuple[Tensor, Saved]],
    scratch: Callable[[Tape], None],
) -> Tensor:
    """An attention kernel's output (batch, seq, heads x d_head); saves q, k, v, and what `compute` returns.

    Backward makes the gradients of all three: in one piece if they are views of one product; else they are
    then put together in a copy, if they were cut from one.
    """
    q, k, v, nodes, whole, separate = qkv
    del qkv
    tape, dtype = q.tape, q.dtype
    shapes = q.shape, k.shape, v.shape

    def backward(grad: Tensor, saved: Saved) -> Grads:
        tape = grad.tape
        if whole and not separate:
            mixed = tape.new("grad of queries, keys and values", whole, dtype)
            scratch(tape)
            return (mixed,)
        with tape.workspace() as parts:
            for name, shape in zip(("queries", "keys", "values"), shapes, strict=True):
                parts.new(f"grad of {name}", shape, dtype)
            scratch(tape)
            if whole is None:
                return parts.handed_over()
            return (tape.new("grad of queries, keys and values", whole, dtype),)

    y, saved = compute()
    tape.computed(ComputeKind.ATTENTION, shapes, q.shape, dtype)
    y.node = tape.node(nodes, (q, k, v, *saved), backward)
    y.node.computes(ComputeKind.ATTENTION, shapes, 0)
    return y


def fused_attention(qkv: Qkv, p: float) -> Tensor:
    """cuDNN's: saves q, k, v, the output, each row's log-sum-exp and the random state.

    Its workspaces are taken to be those of PyTorch's calls of cuDNN.

    Source: transformer_engine.pytorch.attention.dot_product_attention.backends:FusedAttnFunc.
    """
    if qkv.separate:
        qkv = made_contiguous(qkv, transposes=False)
    tape, q, k, dtype = qkv.q.tape, qkv.q.shape, qkv.k.shape, qkv.q.dtype
    (batch, seq, n, _), width = q, qkv.v.shape[-1]

    def compute() -> tuple[Tensor, Saved]:
        y = tape.new("attention", (batch, seq, n * width), dtype)
        lse = tape.new("log-sum-exp", (batch, n, seq), FP32)
        fused_scratch(tape, q, k, dtype, p, backward=False)
        return y, (y.detach(), lse, tape.new("random state", (2,), INT64))

    return attended(qkv, compute, lambda tape: fused_scratch(tape, q, k, dtype, p, backward=True))


def fused_scratch(tape: Tape, q: Shape, k: Shape, dtype: DType, p: float, *, backward: bool) -> None:
    """Allocate and free what cuDNN's attention of these queries and keys needs for a moment."""
    context = tape.context
    scratch = cudnn_scratch(context.device, context.torch_release, q, k, dtype, dropout=bool(p))
    n_bytes = scratch.backward_bytes if backward else scratch.forward_bytes
    with tape.workspace() as temporary:
        if n_bytes:
            temporary.new("cuDNN's workspace", (n_bytes,), UINT8)


def flash_attention(qkv: Qkv, *, deterministic: bool) -> Tensor:
    """FlashAttention 2, which has the batch outermost: q, k, v and its output are copied.

    Source: transformer_engine.pytorch.attention.dot_product_attention.backends:FlashAttention.forward,
    flash-attn 2.8's csrc/flash_attn/flash_api.cpp (`mha_fwd`).
    """
    qkv = made_contiguous(qkv, transposes=True)
    tape, q, k, dtype = qkv.q.tape, qkv.q.shape, qkv.k.shape, qkv.q.dtype
    batch, seq, n, width = q

    def compute() -> tuple[Tensor, Saved]:
        y = tape.new("attention", (batch, seq, n * width), dtype)
        lse = tape.new("log-sum-exp", (batch, n, seq), FP32)
        return y, (y.detach(), lse, tape.new("random state", (2,), INT64))

    y = attended(qkv, compute, lambda tape: flash_scratch(tape, q, k, dtype, deterministic=deterministic))
    if batch == 1:
        return y
    node = tape.node(
        (y.node,), (), lambda grad, saved: (grad.tape.new("grad, transposed", grad.shape, dtype),)
    )
    return tape.new("attention, transposed", y.shape, dtype, node)


def flash_scratch(tape: Tape, q: Shape, k: Shape, dtype: DType, *, deterministic: bool) -> None:
    """Allocate and free what FlashAttention's backward pass needs for a moment.

    Each row's dot product and a float32 accumulator of the queries' gradient, one for each part of the keys
    if it is deterministic; grouped queries expand the gradients of keys and values.

    Source: flash-attn 2.8's csrc/flash_attn/flash_api.cpp (`mha_bwd`).
    """
    batch, seq, n, width = q
    seq_rounded = -(-seq // 128) * 128
    width_rounded = -(-width // 32) * 32 if width <= 128 else -(-width // 64) * 64
    n_splits = -(-tape.context.device.multiprocessors // (batch * n)) if deterministic else 1
    with tape.workspace() as temporary:
        temporary.new("dots", (batch, n, seq_rounded), FP32)
        temporary.new("sums of dq", (n_splits, batch, seq_rounded, n, width_rounded), FP32)
        if k[2] != n:
            temporary.new("expanded dk", (batch, k[1], n, width), dtype)
            temporary.new("expanded dv", (batch, k[1], n, width), dtype)


def unfused_attention(qkv: Qkv, heads: Heads, p: float, config: TransformerConfig) -> Tensor:
    """Scores in memory: saves q, k, v, the softmax, its dropout mask and what is left of it.

    Source: transformer_engine.pytorch.attention.dot_product_attention.backends:UnfusedDotProductAttention,
    megatron.core.transformer.dot_product_attention:DotProductAttention.forward.
    """
    if qkv.separate and config.transformer_impl == "transformer_engine":
        qkv = made_contiguous(qkv, transposes=False)
    tape, (batch, seq, n, _), dtype = qkv.q.tape, qkv.q.shape, qkv.q.dtype
    scores, context = (batch, n, seq, seq), (batch, seq, n * qkv.v.shape[-1])
    q, k, v, nodes, whole, _ = qkv
    shapes = q.shape, k.shape, v.shape
    del qkv

    def backward(grad: Tensor, saved: Saved) -> Grads:
        tape = grad.tape
        with tape.workspace() as parts:
            with tape.by_products():
                parts.new("grad of values", v_shape, dtype)
            with tape.workspace() as of_scores:
                with tape.by_products():
                    of_scores.new("grad of probabilities", scores, dtype)
                if p:
                    of_scores.new("grad of the softmax", scores, dtype)
                if config.transformer_impl != "transformer_engine":
                    of_scores.new("grad of scores", scores, FP32 if config.softmax_in_fp32 else dtype)
                    if config.softmax_in_fp32:
                        of_scores.new("grad of masked scores", scores, FP32)
                with tape.by_products():
                    parts.new("grad of queries", shapes[0], dtype)
                    parts.new("grad of keys", shapes[0], dtype)
            if whole is None:
                of_v, *of_others = parts.handed_over()
                return *of_others, of_v
            return (tape.new("grad of queries, keys and values", whole, dtype),)

    v_shape = *shapes[0][:-1], shapes[2][-1]
    if heads.grouped:
        k, v = (tape.new(f"repeated {name}", shapes[0], dtype) for name in ("keys", "values"))
    softmax, dropped = _softmax(tape, scores, p, dtype, config)
    with tape.workspace() as before:
        with tape.by_products():
            before.new("attention", context, dtype)
        y = tape.new("attention, transposed", context, dtype)
    y.node = tape.node(nodes, (q, k, v, softmax, *dropped), backward)
    heads_of_all, d_head, d_value, last = batch * n, shapes[0][-1], v_shape[-1], len(y.node.inputs) - 1
    of_scores = (heads_of_all, seq, d_head), (heads_of_all, d_head, seq)
    of_values = (heads_of_all, seq, seq), (heads_of_all, seq, d_value)
    for operands in (of_scores, of_values):
        tape.computed(ComputeKind.BMM, operands, (heads_of_all, seq, operands[1][-1]), dtype)
    y.node.computes_all(
        (ComputeKind.BMM, of_scores, (0, min(1, last))), (ComputeKind.BMM, of_values, (0, last))
    )
    return y


def _softmax(
    tape: Tape, scores: Shape, p: float, dtype: DType, config: TransformerConfig
) -> tuple[Tensor, Saved]:
    """The softmax of the scores, and the other saved tensors: dropout's mask and output, if there is dropout.

    A padding mask, which each layer makes again, is applied to the softmax too, in another tensor.

    Transformer Engine allocates the scores twice for a moment; Megatron's own are written from a buffer that
    it keeps for good (`get_global_memory_buffer`).
    """
    padded = config.attn_mask_type == "padding"
    mask = (tape.new("padding mask", (scores[0], 1, *scores[2:]), BOOL),) if padded else ()
    with tape.workspace() as local:
        with tape.by_products():
            if config.transformer_impl == "transformer_engine":
                with tape.workspace() as unused:
                    unused.new("scores, not read", scores, dtype)
                    local.new("scores", scores, dtype)
            else:
                local.new("scores", scores, dtype)
        if config.softmax_in_fp32:
            local.new("scores as float32", scores, FP32)
            local.new("scaled scores", scores, FP32)
        softmax = tape.new("softmax", scores, FP32 if config.softmax_in_fp32 else dtype)
    with tape.workspace() as masked:
        if config.softmax_in_fp32:
            masked.new("softmax, cast", scores, dtype)
        if padded:
            masked.new("masked softmax", scores, dtype)
        if not p:
            return softmax, (*mask, *masked.handed_over())
        dropped = tape.new("dropout of the softmax", scores, dtype)
        return softmax, (*mask, tape.new("dropout mask", scores, BOOL), dropped)
