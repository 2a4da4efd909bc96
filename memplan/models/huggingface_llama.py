"""Llama as transformers runs it: norms by parts, rotary positions by halves, its own loss."""

from dataclasses import dataclass
from typing import ClassVar, final

from memplan.models.decoders import LlamaDecoder
from memplan.ops import (
    attention,
    embedding,
    halves_rotation,
    heads,
    linear,
    merged_heads,
    rms_norm_by_parts,
    rope_by_halves,
    shifted_cross_entropy,
    silu,
)
from memplan.record import Axis
from memplan.shapes import FP32, Buffer, buffer_of
from memplan.tape import Tensor


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class HuggingFaceLlama(LlamaDecoder):
    """`LlamaForCausalLM` with PyTorch's attention (`sdpa`) and its own loss, without a cache.

    Neglects: means of a norm, 4 bytes a token; masks of a byte per token.
    Source: transformers.models.llama.modeling_llama (5.23).
    """

    implementation: ClassVar[str] = "huggingface"
    code: ClassVar[str] = "transformers 5.23, LlamaForCausalLM"
    axes: ClassVar[tuple[Axis, ...]] = ()
    chunks_loss: ClassVar[bool] = False

    def buffers(self, seq_len: int) -> tuple[Buffer, ...]:
        names = "rotary_emb.inv_freq", "rotary_emb.original_inv_freq"
        return tuple([buffer_of(name, (self.d_head // 2,), FP32) for name in names])

    def embed(self, tokens: Tensor) -> Tensor:
        x = embedding(tokens, "model.embed_tokens", self.vocab_size, self.d_model)
        cosines, sines = halves_rotation(tokens, self.d_head)
        tokens.tape.shared.update(cosines=cosines, sines=sines)
        return x

    def block(self, x: Tensor, kind: str) -> Tensor:
        x = x + self._attention(rms_norm_by_parts(x, "input_layernorm"))
        return x + self._feed_forward(rms_norm_by_parts(x, "post_attention_layernorm"))

    def _attention(self, x: Tensor) -> Tensor:
        n_heads = {"q_proj": self.n_heads, "k_proj": self.n_kv_heads, "v_proj": self.n_kv_heads}
        q, k, v = (
            heads(self._linear(x, f"self_attn.{name}", n * self.d_head, self.attention_bias), self.d_head)
            for name, n in n_heads.items()
        )
        tables = x.tape.shared["cosines"], x.tape.shared["sines"]
        q, k = rope_by_halves(q, *tables), rope_by_halves(k, *tables)
        y = attention(x.tape.cast(q, v.dtype), x.tape.cast(k, v.dtype), v)
        return self._linear(merged_heads(y), "self_attn.o_proj", self.d_model, self.attention_bias)

    def _feed_forward(self, x: Tensor) -> Tensor:
        gated = silu(self._linear(x, "mlp.gate_proj", self.d_ff, self.mlp_bias)) * self._linear(
            x, "mlp.up_proj", self.d_ff, self.mlp_bias
        )
        return self._linear(gated, "mlp.down_proj", self.d_model, self.mlp_bias)

    def _linear(self, x: Tensor, name: str, n_out: int, bias: bool) -> Tensor:
        return linear(x, name, n_out, bias=bias, split="columns")

    def head(self, x: Tensor) -> Tensor:
        name = "model.embed_tokens" if self.tied_head else "lm_head"
        return self._linear(rms_norm_by_parts(x, "model.norm"), name, self.vocab_size, bias=False)

    def loss(self, logits: Tensor) -> Tensor:
        return shifted_cross_entropy(logits)
