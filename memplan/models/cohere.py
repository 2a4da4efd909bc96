"""Cohere, built as PaLM is: attention and feed-forward layer in parallel, LayerNorm without a bias."""

from dataclasses import dataclass
from typing import ClassVar, Final, final

from memplan.models.huggingface import HuggingFaceDecoder, decoder_family
from memplan.ops import layer_norm_by_parts, times_number
from memplan.shapes import FP32
from memplan.tape import Tensor


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Cohere(HuggingFaceDecoder):
    """`CohereForCausalLM`. Queries and keys are rotated in float32, in pairs; logits are scaled.

    Source: transformers.models.cohere.modeling_cohere (5.23).
    """

    family: ClassVar[str] = "cohere"
    code: ClassVar[str] = "transformers 5.23, CohereForCausalLM"

    attention_bias: bool = False

    def has_bias(self, name: str) -> bool:
        return self.attention_bias and name.startswith("self_attn.")

    def norm(self, x: Tensor, name: str) -> Tensor:
        return layer_norm_by_parts(x, name)

    def block(self, x: Tensor, kind: str) -> Tensor:
        y = self.norm(x, "input_layernorm")
        attended, fed = self.attention(y, kind), self.feed_forward(y)
        return x + attended + fed

    def rotated(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        tape, dtype = q.tape, q.dtype
        wide = tape.cast(q, FP32), tape.cast(k, FP32)  # alive until this returns
        q, k = HuggingFaceDecoder.rotated(self, *wide)
        return tape.cast(q, dtype), tape.cast(k, dtype)

    def logits(self, x: Tensor) -> Tensor:
        return times_number(HuggingFaceDecoder.logits(self, x))


COHERE: Final = decoder_family(
    Cohere,
    "CohereForCausalLM",
    refuses=("use_qk_norm",),
    flags=("attention_bias",),
    n_layers=40,
    d_model=8192,
    n_heads=64,
    d_ff=22528,
    vocab_size=256000,
    max_seq_len=8192,
    tied_head=True,
)
