"""Gemma: scaled embeddings, norms with weights around one, a gated GELU."""

from dataclasses import dataclass
from typing import ClassVar, Final, final

from memplan.models.huggingface import GELU, WindowedDecoder, decoder_family
from memplan.ops import gelu, rms_norm_around_one, times_number
from memplan.shapes import FP32, Buffer, buffer_of
from memplan.tape import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaDecoder(WindowedDecoder):
    """The code that Gemma 1, 2 and 3 share."""

    attention_bias: bool = False

    def has_bias(self, name: str) -> bool:
        return self.attention_bias and name.startswith("self_attn.")

    def embedding_buffers(self) -> tuple[Buffer, ...]:
        return (buffer_of("model.embed_tokens.embed_scale", (), FP32),)

    def norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm_around_one(x, name)

    def activation(self, x: Tensor) -> Tensor:
        return gelu(x)

    def embedded(self, tokens: Tensor) -> Tensor:
        tape, x = tokens.tape, WindowedDecoder.embedded(self, tokens)
        scale = () if x.dtype == FP32 else (tape.new("embed_scale", (), x.dtype),)
        return times_number(x, *scale)

    def block(self, x: Tensor, kind: str) -> Tensor:  # norms before and after each layer: Gemma 2 and 3
        y = self.attention(self.norm(x, "input_layernorm"), kind)
        y = self.norm(y, "post_attention_layernorm")
        x = x + y
        del y
        y = self.feed_forward(self.norm(x, "pre_feedforward_layernorm"))
        y = self.norm(y, "post_feedforward_layernorm")
        return x + y


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma(GemmaDecoder):
    """`GemmaForCausalLM`.

    Source: transformers.models.gemma.modeling_gemma (5.23).
    """

    family: ClassVar[str] = "gemma"
    code: ClassVar[str] = "transformers 5.23, GemmaForCausalLM"

    def block(self, x: Tensor, kind: str) -> Tensor:
        return WindowedDecoder.block(self, x, kind)


GEMMA: Final = decoder_family(
    Gemma,
    "GemmaForCausalLM",
    refuses=("use_bidirectional_attention",),
    activation=("hidden_act", *GELU),
    flags=("attention_bias",),
    n_layers=28,
    d_model=3072,
    n_heads=16,
    n_kv_heads=16,
    d_head=256,
    d_ff=24576,
    vocab_size=256000,
    max_seq_len=8192,
    tied_head=True,
)
