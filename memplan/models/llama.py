"""Llama 2 and 3: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

from dataclasses import dataclass
from typing import ClassVar, final

from memplan.checks import checked_flag, checked_positive
from memplan.models.base import Model
from memplan.ops import (
    attention,
    embedding,
    gather_sequence,
    heads,
    linear,
    merged_heads,
    rms_norm,
    rope,
    silu,
)
from memplan.tape import Tensor


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Llama(Model):
    """The Llama family.

    Source: Touvron et al. 2023, Grattafiori et al. 2024; parameters as in Hugging Face's `LlamaForCausalLM`.
    `max_seq_len` is the trained context, not a limit: rotary positions have no table of weights.
    """

    learned_positions: ClassVar[bool] = False

    attention_bias: bool = False
    mlp_bias: bool = False
    rope_theta: float = 10000.0

    def __post_init__(self) -> None:
        Model.__post_init__(self)
        checked_flag("attention_bias", self.attention_bias)
        checked_flag("mlp_bias", self.mlp_bias)
        object.__setattr__(self, "rope_theta", checked_positive("rope_theta", self.rope_theta))

    def embed(self, tokens: Tensor) -> Tensor:
        return embedding(tokens, "embedding.tokens", self.vocab_size, self.d_model)

    def block(self, x: Tensor) -> Tensor:
        x = x + self._attention(rms_norm(x, "attention_norm"))
        return x + self._feed_forward(rms_norm(x, "ffn_norm"))

    def _attention(self, x: Tensor) -> Tensor:
        h = gather_sequence(x)
        n_heads = {"wq": self.n_heads, "wk": self.n_kv_heads, "wv": self.n_kv_heads}
        q, k, v = (
            heads(
                linear(h, f"attention.{name}", n * self.d_head, bias=self.attention_bias, split="columns"),
                self.d_head,
            )
            for name, n in n_heads.items()
        )
        q, k = rope(q), rope(k)
        y = attention(q, k, v)
        return linear(merged_heads(y), "attention.wo", self.d_model, bias=self.attention_bias, split="rows")

    def _feed_forward(self, x: Tensor) -> Tensor:
        h = gather_sequence(x)
        return linear(
            silu(linear(h, "feed_forward.w1", self.d_ff, bias=self.mlp_bias, split="columns"))
            * linear(h, "feed_forward.w3", self.d_ff, bias=self.mlp_bias, split="columns"),
            "feed_forward.w2", self.d_model, bias=self.mlp_bias, split="rows",
        )  # fmt: skip

    def head(self, x: Tensor) -> Tensor:
        h = rms_norm(x, "head.norm")
        whole = gather_sequence(h, waits=False)
        return linear(whole, self.output_name, self.vocab_size, bias=False, split="columns")
