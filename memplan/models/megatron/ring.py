"""Core attention over context-parallel ranks: keys and values go around a ring of them, part by part.

Each rank has two pieces of a sequence, one from the front and one from the back, so that all compute as much.
It attends to the first half of a part from a rank before its own; to a part from a rank after it only the
second half of its queries attends.

Source: transformer_engine.pytorch.attention.dot_product_attention.context_parallel:AttnFuncWithCPAndKVP2P.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from memplan.models.megatron.attention import Qkv, flash_scratch, fused_scratch, made_contiguous
from memplan.models.megatron.config import TransformerConfig
from memplan.record import Compute, ComputeKind
from memplan.shapes import FP32, INT64, DType, Shape, n_elements
from memplan.tape import Grads, Saved, Tape, Tensor, Workspace


class Part(NamedTuple):
    """The queries and the keys of one step of the ring: (batch, seq, heads, d_head)."""

    q: Shape
    k: Shape


def ring_attention(qkv: Qkv, p: float, config: TransformerConfig) -> Tensor:
    """The output (batch, seq, heads x d_head); saves queries, the keys and values received last, the output.

    With "a2a+p2p" an all-to-all among `cp_all_to_all` ranks comes first, which gives each rank more tokens of
    fewer heads; another one takes the output back.
    """
    by_flash, exchanged = config.attention_backend == "flash", config.cp_all_to_all
    q, k, v, nodes, whole, _ = made_contiguous(qkv, transposes=by_flash)
    del qkv
    tape, dtype, (batch, seq, n, width) = q.tape, q.dtype, q.shape
    product = whole or ()
    own = batch, seq, n * width
    with tape.workspace() as of_caller:
        if exchanged > 1:
            for x in (q, k, v):
                of_caller.keep(x)
            del x
            q, k, v = exchange(tape, (q, k, v), exchanged, dtype, heads_out=True)
        ring = Ring(q.shape, k.shape, dtype, p, config)
        y, kept = ring.forward(tape, (k, v))
        del k, v
        if exchanged > 1:
            (y,) = exchange(tape, (y,), exchanged, dtype, heads_out=False)

    def backward(grad: Tensor, saved: Saved) -> Grads:
        tape = grad.tape
        with tape.workspace() as grads:
            if exchanged > 1:
                output = grad.view(batch, seq, n, width)
                for x in exchange(tape, (output, output), exchanged, dtype, heads_out=True):
                    grads.keep(x)
            ring.backward(tape, grads)
            if exchanged > 1:
                own_grads = [Tensor(tape, shape, dtype) for shape in (ring.q, ring.k, ring.k)]
                for x in exchange(tape, own_grads, exchanged, dtype, heads_out=False):
                    grads.keep(x)
            return (tape.new("grad of queries, keys and values", product, dtype),)

    y = y.view(*own)
    y.node = tape.node(nodes, (q, y.detach(), *kept), backward)
    if not by_flash or batch == 1:
        return y
    turned = tape.node((y.node,), (), lambda grad, saved: (grad.tape.new("grad, transposed", own, dtype),))
    return tape.new("attention, transposed", own, dtype, turned)


class Ring:
    """The steps of one rank, which has queries `q` and keys `k` of its own."""

    def __init__(self, q: Shape, k: Shape, dtype: DType, p: float, config: TransformerConfig) -> None:
        self.q, self.k, self.dtype, self.p, self.config = q, k, dtype, p, config
        self.n_ranks = config.cp // config.cp_all_to_all
        self.rank = config.cp_rank // config.cp_all_to_all
        self.kv: Shape = (2 * n_elements(k),)

    @property
    def parts(self) -> Iterator[Part]:
        """What each step of the forward pass attends with; the backward pass takes them in reverse."""
        (batch, n_queries, *of_q), (_, n_keys, *of_k) = self.q, self.k
        for step in range(self.n_ranks):
            half_keys, half_queries = 0 < step <= self.rank, step > self.rank
            q = batch, n_queries // (1 + half_queries), *of_q
            yield Part(q, (batch, n_keys // (1 + half_keys), *of_k))

    def forward(self, tape: Tape, kv: Sequence[Tensor]) -> tuple[Tensor, Saved]:
        """The output, and the part received last with the statistics, which are saved."""
        batch, seq, n, _ = self.q
        states: list[Tensor] = []
        with tape.workspace() as steps:
            received = tape.new("keys and values", self.kv, self.dtype)
            for i, part in enumerate(self.parts):
                attention = tape.computation(ComputeKind.ATTENTION, (*part, part.k), part.q, self.dtype)
                if i + 1 < self.n_ranks:
                    steps.keep(received)
                    with tape.by_products():
                        received = tape.new("received keys and values", self.kv, self.dtype)
                    self._send(tape, attention)
                steps.new("attention of a part", part.q, self.dtype)
                steps.new("log-sum-exp of a part", (batch, n, part.q[1]), FP32)
                self._scratch(tape, part, backward=False)
                states.append(tape.new("random state", (2,), INT64))
                tape.events.append(attention)
            lse = tape.new("log-sum-exp", (batch, n, seq), FP32)
            y = tape.new("attention", self.q, self.dtype)
        return y, (received, lse, *states)

    def backward(self, tape: Tape, grads: Workspace) -> None:
        """Make the gradients: the queries' own, and those of keys and values beside a part that was sent."""
        pair: Shape = (2, *self.kv)
        grads.new("grad of queries", self.q, self.dtype)
        with tape.workspace() as other:
            grads.new("a part and its gradient", pair, self.dtype)
            other.new("a received part and its gradient", pair, self.dtype)
            for i, part in enumerate(reversed([*self.parts])):
                attention = tape.computation(
                    ComputeKind.ATTENTION_BACKWARD, (*part, part.k), part.q, self.dtype
                )
                self._send(tape, attention, (i > 0) + (i < self.n_ranks - 1))
                with tape.workspace() as of_part:
                    for name, shape in (("queries", part.q), ("keys", part.k), ("values", part.k)):
                        of_part.new(f"grad of a part's {name}", shape, self.dtype)
                    self._scratch(tape, part, backward=True)
                    tape.events.append(attention)

    def _send(self, tape: Tape, beside: Compute, calls: int = 1) -> None:
        """Send keys and values, or their gradients too, while a part's attention is computed."""
        n_bytes = n_elements(self.kv) * self.dtype.itemsize
        tape.collective("permute", "cp", "keys and values", n_bytes, beside, calls)

    def _scratch(self, tape: Tape, part: Part, *, backward: bool) -> None:
        """Allocate and free what the attention kernel of one step needs for a moment."""
        if self.config.attention_backend == "fused":
            fused_scratch(tape, part.q, part.k, self.dtype, self.p, backward=backward)
        elif backward:
            flash_scratch(tape, part.q, part.k, self.dtype, deterministic=self.config.deterministic_mode)


def exchange(
    tape: Tape, tensors: Sequence[Tensor], n_ranks: int, dtype: DType, *, heads_out: bool
) -> list[Tensor]:
    """Tensors (batch, seq, heads, d_head) with all tokens of `n_ranks` ranks and a part of the heads.

    `heads_out`: whether heads are given for tokens, or tokens for heads.

    Source: transformer_engine...dot_product_attention.context_parallel:flash_attn_a2a_communicate.
    """
    found = []
    with tape.workspace() as sent:
        for x in tensors:
            batch, seq, n, width = x.shape
            shape = (
                (batch, seq * n_ranks, n // n_ranks, width)
                if heads_out
                else (batch, seq // n_ranks, n * n_ranks, width)
            )
            sent.new("in the order in which it is sent", shape, dtype)
            with tape.workspace() as received:
                received.new("received", shape, dtype)
                tape.collective("all_to_all", "cp", "heads and tokens", n_elements(shape) * dtype.itemsize)
                found.append(tape.new("exchanged", shape, dtype))
    return found
