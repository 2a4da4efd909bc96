"""GPT-2 and GPT-3: learned positions, LayerNorm, biases, GELU, dropout, tied or untied head."""

from dataclasses import dataclass
from typing import ClassVar, final

from memplan.errors import InvalidValue
from memplan.models.base import Model
from memplan.ops import (
    add_positions,
    attention,
    dropout,
    embedding,
    gather_sequence,
    gelu,
    heads,
    layer_norm,
    learned_positions,
    linear,
    merged_heads,
    position_ids,
)
from memplan.tape import Tensor


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Gpt(Model):
    """The GPT family.

    Source: Radford et al. 2019 (GPT-2), Brown et al. 2020 (GPT-3); parameters as in Hugging Face's
    `GPT2LMHeadModel`. `dropout` is the probability of embeddings, of attention weights and of residuals.
    """

    learned_positions: ClassVar[bool] = True

    def __post_init__(self) -> None:
        Model.__post_init__(self)
        if self.n_kv_heads != self.n_heads or self.n_heads * self.d_head != self.d_model:
            raise InvalidValue(
                f"n_kv_heads={self.n_kv_heads}, d_head={self.d_head}: a GPT has n_kv_heads = n_heads = "
                f"{self.n_heads} and n_heads x d_head = d_model = {self.d_model}; leave both out."
            )

    def embed(self, tokens: Tensor) -> Tensor:
        ids = position_ids(tokens)
        x = add_positions(
            embedding(tokens, "embedding.tokens", self.vocab_size, self.d_model),
            learned_positions(ids, "embedding.positions", self.max_seq_len, self.d_model),
        )
        return dropout(x, self.dropout)

    def block(self, x: Tensor) -> Tensor:
        x = x + dropout(self._attention(layer_norm(x, "attention_norm")), self.dropout)
        return x + dropout(self._feed_forward(layer_norm(x, "ffn_norm")), self.dropout)

    def _attention(self, x: Tensor) -> Tensor:
        h = gather_sequence(x)
        q, k, v = (
            heads(linear(h, f"attention.{name}", self.d_model, bias=True, split="columns"), self.d_head)
            for name in ("wq", "wk", "wv")
        )
        y = attention(q, k, v, dropout=self.dropout)
        return linear(merged_heads(y), "attention.wo", self.d_model, bias=True, split="rows")

    def _feed_forward(self, x: Tensor) -> Tensor:
        h = gather_sequence(x)
        return linear(
            gelu(linear(h, "feed_forward.w1", self.d_ff, bias=True, split="columns")),
            "feed_forward.w2", self.d_model, bias=True, split="rows",
        )  # fmt: skip

    def head(self, x: Tensor) -> Tensor:
        h = layer_norm(x, "head.norm")
        whole = gather_sequence(h, waits=False)
        return linear(whole, self.output_name, self.vocab_size, bias=False, split="columns")
