"""GPT-2 and GPT-3: learned positions, LayerNorm, biases, GELU, dropout, tied or untied head."""

from dataclasses import dataclass
from typing import Final, final

from memplan.errors import InvalidValue
from memplan.models.config import Config
from memplan.models.decoders import GptDecoder
from memplan.models.families import Family, Reader
from memplan.models.huggingface_gpt import ACTIVATIONS, HuggingFaceGpt
from memplan.ops import (
    add_positions,
    attention,
    dropout,
    embedding,
    gelu,
    heads,
    layer_norm,
    learned_positions,
    linear,
    merged_heads,
    position_ids,
    redistribute,
)
from memplan.placements import Replicate
from memplan.tape import Tensor


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Gpt(GptDecoder):
    """The GPT family.

    Source: Radford et al. 2019 (GPT-2), Brown et al. 2020 (GPT-3); parameters as in Hugging Face's
    `GPT2LMHeadModel`. `dropout` is the probability of embeddings, of attention weights and of residuals.
    """

    def embed(self, tokens: Tensor) -> Tensor:
        ids = position_ids(tokens)
        x = add_positions(
            embedding(tokens, "embedding.tokens", self.vocab_size, self.d_model),
            learned_positions(ids, "embedding.positions", self.max_seq_len, self.d_model),
        )
        return dropout(x, self.dropout)

    def block(self, x: Tensor, kind: str) -> Tensor:
        x = x + dropout(self._attention(layer_norm(x, "attention_norm")), self.dropout)
        return x + dropout(self._feed_forward(layer_norm(x, "ffn_norm")), self.dropout)

    def _attention(self, x: Tensor) -> Tensor:
        h = redistribute(x, "tp", Replicate())
        q, k, v = (
            heads(linear(h, f"attention.{name}", self.d_model, bias=True, split="columns"), self.d_head)
            for name in ("wq", "wk", "wv")
        )
        y = attention(q, k, v, dropout=self.dropout)
        return linear(merged_heads(y), "attention.wo", self.d_model, bias=True, split="rows")

    def _feed_forward(self, x: Tensor) -> Tensor:
        h = redistribute(x, "tp", Replicate())
        return linear(
            gelu(linear(h, "feed_forward.w1", self.d_ff, bias=True, split="columns")),
            "feed_forward.w2", self.d_model, bias=True, split="rows",
        )  # fmt: skip

    def head(self, x: Tensor) -> Tensor:
        h = layer_norm(x, "head.norm")
        whole = redistribute(h, "tp", Replicate(), waits=False)
        return self.logits(whole)


def _read(config: Config, name: str) -> HuggingFaceGpt:
    """Source: transformers, GPT2Config (defaults) and GPT2LMHeadModel."""
    config.refuse("add_cross_attention", "reorder_and_upcast_attn")
    d_model = config.count("n_embd", 768)
    return HuggingFaceGpt(
        name=name,
        activation=config.one_of("activation_function", "gelu_new", tuple(ACTIVATIONS)),
        n_layers=config.count("n_layer", 12),
        d_model=d_model,
        n_heads=config.count("n_head", 12),
        d_ff=config.count("n_inner", 4 * d_model),
        vocab_size=config.count("vocab_size", 50257),
        max_seq_len=config.count("n_positions", 1024),
        tied_head=config.flag("tie_word_embeddings", default=True),
        dropout=_single_dropout(config),
    )


def _single_dropout(config: Config) -> float:
    rates = {key: config.fraction(key, 0.1) for key in ("resid_pdrop", "embd_pdrop", "attn_pdrop")}
    if len(set(rates.values())) > 1:
        shown = ", ".join(f"{key}={rate}" for key, rate in rates.items())
        raise InvalidValue(f"{shown} differ, but a memplan Gpt has one dropout; set all three equal.")
    return rates["resid_pdrop"]


GPT: Final = Family(
    implementations={"reference": Gpt, "huggingface": HuggingFaceGpt},
    readers={"gpt2": Reader("GPT2LMHeadModel", _read)},
)
