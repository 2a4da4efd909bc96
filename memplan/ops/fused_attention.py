"""Attention's fused kernels: the scores are never in memory as a whole.

The output is laid out like the queries, but for the memory-efficient kernel's (`empty_like`).
"""

from collections.abc import Callable

from memplan.kernels import cudnn_scratch, efficient_attention_bytes, flash_splits
from memplan.record import ComputeKind
from memplan.shapes import FP32, INT64, UINT8, Shape
from memplan.tape import Grads, Saved, Tape, Tensor


def flash_attention_cpu(q: Tensor, k: Tensor, v: Tensor, *masks: Tensor) -> Tensor:
    """Saves q, k, v, a mask, the output and each row's log-sum-exp; workspaces of each thread (one thread).

    Source: aten/src/ATen/native/cpu/FlashAttentionKernel.cpp (`cpu_flash_attention`,
    `cpu_flash_attention_backward`: query blocks of 32, 64 or 256 rows by length, key blocks of 512, neither
    longer than the sequence).
    """
    tape, dtype = q.tape, q.dtype
    batch, seq, n_heads, d_head = q.shape
    q_block = 256 if seq >= 768 else 64 if seq >= 192 else 32
    rows, columns = min(q_block, seq), min(512, seq)

    def backward_scratch(tape: Tape) -> None:
        with tape.kernel_workspace() as thread:
            thread.new("scores of a block", (2, rows, columns), FP32)
            if dtype != FP32:
                thread.new(f"scores of a block as {dtype.name}", (2, rows, columns), dtype)
            thread.new("dots of a block", (rows,), FP32)

    def compute() -> Saved:
        y = tape.new("attention", q.shape, dtype)
        lse = tape.new("log-sum-exp", (batch, seq, n_heads), FP32)
        with tape.kernel_workspace() as thread:
            thread.new("scores and sums of a block", (rows * columns + 2 * rows + rows * d_head,), FP32)
            if dtype != FP32:
                thread.new(f"scores of a block as {dtype.name}", (rows, columns), dtype)
        return y, lse

    return _attended(q, k, v, compute, backward_scratch, *masks)


def flash_attention_cuda(q: Tensor, k: Tensor, v: Tensor, *, dropout: bool) -> Tensor:
    """FlashAttention; heads are first padded to a multiple of 8.

    Source: aten/src/ATen/native/transformers/attention.cpp (`pad_last_dim`, `post_process_flash_output`).
    """
    tape, shape, dtype = q.tape, q.shape, q.dtype
    width = -(-shape[3] // 8) * 8
    if width == shape[3]:
        return _flash_attention(q, k, v, dropout=dropout)

    def padded(x: Tensor) -> Tensor:
        x_shape = x.shape
        node = tape.node((x.node,), (), lambda grad, saved: (grad.tape.new("grad", x_shape, dtype),))
        return x.new("padded heads", (*x_shape[:3], width), dtype, node)

    wide = _flash_attention(*(padded(x) for x in (q, k, v)), dropout=dropout)
    wide_shape = wide.shape
    node = tape.node((wide.node,), (), lambda grad, saved: (grad.tape.new("grad", wide_shape, dtype),))
    at = wide.placements
    return Tensor(tape, shape, dtype, wide.storage, node, is_view=True, head_major=True, placements=at)


def _flash_attention(q: Tensor, k: Tensor, v: Tensor, *, dropout: bool) -> Tensor:
    """Saves q, k, v, the output, each row's log-sum-exp and the random state.

    Where few heads and rows leave multiprocessors idle, the keys are divided into parts whose outputs are
    added up, but not with dropout. Backward keeps a float32 accumulator for dq and each row's dot product;
    grouped queries expand dk and dv.

    Source: aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp (`mha_fwd`, `mha_bwd`).
    """
    tape, dtype = q.tape, q.dtype
    batch, seq, n_heads, d_head = q.shape
    kv_shape = k.shape
    d_rounded = -(-d_head // 32) * 32 if d_head <= 128 else -(-d_head // 64) * 64
    seq_rounded = -(-seq // 128) * 128
    n_splits = 1 if dropout else flash_splits(tape.context.device, batch, n_heads, seq, d_head, kv_shape[1])

    def backward_scratch(tape: Tape) -> None:
        with tape.workspace() as temporary:
            temporary.new("dots", (batch, n_heads, seq_rounded), FP32)
            temporary.new("sums of dq", (batch, seq_rounded, n_heads, d_rounded), FP32)
            if kv_shape[2] != n_heads:
                expanded = (*kv_shape[:2], n_heads, d_head)
                temporary.new("expanded dk", expanded, dtype)
                temporary.new("expanded dv", expanded, dtype)

    def compute() -> Saved:
        y = tape.new("attention", q.shape, dtype)
        lse = tape.new("log-sum-exp", (batch, n_heads, seq), FP32)
        with tape.workspace() as parts:
            if n_splits > 1:
                parts.new("log-sum-exp of parts", (n_splits, batch, n_heads, seq), FP32)
                parts.new("attention of parts", (n_splits, batch, n_heads, seq, d_rounded), FP32)
            state, unused = tape.new("random state", (2,), INT64), tape.new("random offset", (), INT64)
            if dropout:
                state = tape.new("random state", (2,), INT64)
        return y, lse, state, unused

    return _attended(q, k, v, compute, backward_scratch)


def cudnn_attention(q: Tensor, k: Tensor, v: Tensor, *masks: Tensor, dropout: bool) -> Tensor:
    """Saves q, k, v, a mask, the output, each row's log-sum-exp and the random state.

    Source: aten/src/ATen/native/cudnn/MHA.cpp (`run_cudnn_SDP_fprop`, `run_cudnn_SDP_bprop`).
    """
    tape, dtype, context = q.tape, q.dtype, q.tape.context
    batch, seq, n_heads, _ = q.shape
    scratch = cudnn_scratch(context.device, context.torch_release, q.shape, k.shape, dtype, dropout=dropout)

    def backward_scratch(tape: Tape) -> None:
        with tape.workspace() as temporary:
            temporary.new("cuDNN's workspace", (scratch.backward_bytes,), UINT8)

    def compute() -> Saved:
        seed, offset = tape.new("random seed", (), INT64), tape.new("random offset", (), INT64)
        y = tape.new("attention", q.shape, dtype)
        lse = tape.new("log-sum-exp", (batch, n_heads, seq), FP32)
        with tape.workspace() as temporary:
            if scratch.forward_bytes:
                temporary.new("cuDNN's workspace", (scratch.forward_bytes,), UINT8)
        return y, lse, seed, offset

    return _attended(q, k, v, compute, backward_scratch, *masks)


def efficient_attention(
    q: Tensor, k: Tensor, v: Tensor, *masks: Tensor, mask_has_grad: bool = False
) -> Tensor:
    """Saves q, k, v, a mask, the output and each row's log-sum-exp, rows padded to 32.

    Of a mask that has a gradient, this is of each head of each sequence, with rows padded to 16.

    The kernel computes each row's dot product itself in a narrow type, on GPUs before A100 for short heads
    only; else separate operations do. From torch 2.14 on the random state is saved too, and grouped queries
    are taken, which expand dk and dv.

    Source: aten/src/ATen/native/transformers/cuda/attention.cu (`_efficient_attention_forward`),
    aten/src/ATen/native/transformers/cuda/attention_backward.cu (`_efficient_attention_backward`).
    """
    tape, dtype, shape, kv_shape = q.tape, q.dtype, q.shape, k.shape
    batch, seq, n_heads, d_head = shape
    device = tape.context.device
    separate_dots = dtype == FP32 or (d_head > 128 and not device.at_least(8))
    tile_bytes = efficient_attention_bytes(device, dtype.itemsize, seq, d_head, kv_shape[1])

    def backward_scratch(tape: Tape) -> None:
        with tape.workspace() as temporary:
            if kv_shape[2] != n_heads:
                temporary.new("expanded dk", (*kv_shape[:2], n_heads, d_head), dtype)
                temporary.new("expanded dv", (*kv_shape[:2], n_heads, d_head), dtype)
            with tape.workspace() as terms:
                if separate_dots:
                    for _ in range(1 if dtype == FP32 else 3):
                        terms.new("terms of dots", shape, FP32)
                    terms.new("sums of terms", (batch, seq, n_heads), FP32)
                temporary.new("dots", (batch, n_heads, seq), FP32)
            temporary.new("tiles of gradients", (batch * n_heads * tile_bytes,), UINT8)

    def compute() -> Saved:
        state: Saved = ()
        if tape.context.torch_release >= (2, 14):
            state = tape.new("random seed", (), INT64), tape.new("random offset", (), INT64)
        y = tape.new("attention", shape, dtype)
        lse = tape.new("log-sum-exp", (batch, n_heads, -(-seq // 32) * 32), FP32)
        if dtype != FP32 and d_head > 128:
            tape.new("sums of values", shape, FP32)
        return y, lse, *state

    of_mask = ((batch, n_heads, seq, -(-kv_shape[1] // 16) * 16),) if mask_has_grad else ()
    y = _attended(q, k, v, compute, backward_scratch, *masks, of_mask=of_mask)
    y.head_major = False
    return y


def _attended(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    compute: Callable[[], Saved],
    backward_scratch: Callable[[Tape], None],
    *masks: Tensor,
    of_mask: tuple[Shape, ...] = (),
) -> Tensor:
    """A kernel's output, laid out like q; saves q, k, v, all that `compute` returns, and masks.

    Backward allocates the gradients of q, k and v, and of a mask of this shape, if it has one, then takes
    and frees its scratch.
    """
    shapes, dtype = (q.shape, k.shape, v.shape, *of_mask), q.dtype

    def backward(grad: Tensor, saved: Saved) -> Grads:
        grad.tape.fused()
        grads = tuple([grad.tape.new("grad", shape, dtype) for shape in shapes])
        backward_scratch(grad.tape)
        return grads

    operands = q.shape, k.shape, v.shape
    y, *others = q.tape.save_if_selective(compute, ComputeKind.ATTENTION, operands)
    y.head_major, y.placements = q.head_major, q.placements
    inputs = q.node, k.node, v.node, *[None for _ in of_mask]
    y.node = q.tape.node(inputs, (q, k, v, *masks, y.detach(), *others), backward)
    y.node.computes(ComputeKind.ATTENTION, operands, 0)
    return y
