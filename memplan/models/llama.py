"""Llama 2 and 3: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

from dataclasses import dataclass
from typing import Final, final

from memplan.models.config import Config
from memplan.models.decoders import LlamaDecoder
from memplan.models.families import Family, Reader
from memplan.models.huggingface import decoder_sizes
from memplan.models.huggingface_llama import HuggingFaceLlama
from memplan.models.torchtitan import TorchtitanLlama
from memplan.ops import (
    attention,
    heads,
    linear,
    merged_heads,
    redistribute,
    rms_norm,
    rope,
    silu,
)
from memplan.placements import Replicate
from memplan.tape import Tensor


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Llama(LlamaDecoder):
    """The Llama family.

    Source: Touvron et al. 2023, Grattafiori et al. 2024; parameters as in Hugging Face's `LlamaForCausalLM`.
    `max_seq_len` is the trained context, not a limit: rotary positions have no table of weights.
    """

    def block(self, x: Tensor, kind: str) -> Tensor:
        x = x + self._attention(rms_norm(x, "attention_norm"))
        return x + self._feed_forward(rms_norm(x, "ffn_norm"))

    def _attention(self, x: Tensor) -> Tensor:
        h = redistribute(x, "tp", Replicate())
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
        h = redistribute(x, "tp", Replicate())
        return linear(
            silu(linear(h, "feed_forward.w1", self.d_ff, bias=self.mlp_bias, split="columns"))
            * linear(h, "feed_forward.w3", self.d_ff, bias=self.mlp_bias, split="columns"),
            "feed_forward.w2", self.d_model, bias=self.mlp_bias, split="rows",
        )  # fmt: skip

    def head(self, x: Tensor) -> Tensor:
        h = rms_norm(x, "head.norm")
        whole = redistribute(h, "tp", Replicate(), waits=False)
        return self.logits(whole)


def _read(config: Config, name: str) -> HuggingFaceLlama:
    """Source: transformers, LlamaConfig (defaults) and LlamaForCausalLM."""
    config.one_of("hidden_act", "silu", ("silu", "swish"))
    return HuggingFaceLlama(
        **decoder_sizes(config, name),
        attention_bias=config.flag("attention_bias", default=False),
        mlp_bias=config.flag("mlp_bias", default=False),
        rope_theta=config.rope_theta,
    )


LLAMA: Final = Family(
    implementations={"torchtitan": TorchtitanLlama, "huggingface": HuggingFaceLlama, "reference": Llama},
    readers={"llama": Reader("LlamaForCausalLM", _read)},
)
