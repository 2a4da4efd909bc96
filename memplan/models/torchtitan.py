"""Llama as torchtitan and torchtune ran it in 2024, after Meta's code: other operations, the same weights."""

from dataclasses import dataclass
from typing import ClassVar, final

from memplan.models.decoders import RotaryDecoder
from memplan.ops import (
    attention,
    heads,
    linear,
    merged_heads,
    redistribute,
    repeated_heads,
    rms_norm_by_parts,
    rope,
    silu,
)
from memplan.placements import Replicate
from memplan.tape import Tensor


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TorchtitanLlama(RotaryDecoder):
    """`memplan.Llama` with norms in parts and a copy of the keys and values for each query head.

    Selective recomputation is torchtitan's: it keeps every second product only.

    Source: torchtitan/models/llama/model.py, norms.py, parallelisms/parallelize_llama.py
    (`_apply_ac_to_transformer_block`).
    """

    family: ClassVar[str] = "llama"
    implementation: ClassVar[str] = "torchtitan"
    code: ClassVar[str] = "torchtitan of October 2024"

    def block(self, x: Tensor, kind: str) -> Tensor:
        x = x + self._attention(rms_norm_by_parts(x, "attention_norm"))
        return x + self._feed_forward(rms_norm_by_parts(x, "ffn_norm"))

    def _attention(self, x: Tensor) -> Tensor:
        h = redistribute(x, "tp", Replicate())
        q = heads(_product(h, "attention.wq", self.n_heads * self.d_head), self.d_head)
        k = heads(_product(h, "attention.wk", self.n_kv_heads * self.d_head, again=True), self.d_head)
        v = heads(_product(h, "attention.wv", self.n_kv_heads * self.d_head), self.d_head)
        q, k = rope(q), rope(k)
        if self.n_kv_heads != self.n_heads:
            k, v = (repeated_heads(one, q.shape[2], copies=False) for one in (k, v))
        y = attention(q, k, v)
        del h, q, k, v
        return linear(merged_heads(y), "attention.wo", self.d_model, bias=False, split="rows", again=True)

    def _feed_forward(self, x: Tensor) -> Tensor:
        h = redistribute(x, "tp", Replicate())
        gated = silu(_product(h, "feed_forward.w1", self.d_ff)) * _product(
            h, "feed_forward.w3", self.d_ff, again=True
        )
        del h
        return linear(gated, "feed_forward.w2", self.d_model, bias=False, split="rows")

    def head(self, x: Tensor) -> Tensor:
        h = rms_norm_by_parts(x, "head.norm")
        whole = redistribute(h, "tp", Replicate())
        return self.logits(whole)


def _product(x: Tensor, name: str, n_out: int, *, again: bool = False) -> Tensor:
    return linear(x, name, n_out, bias=False, split="columns", again=again)
