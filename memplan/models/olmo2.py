"""OLMo 2: norms after attention and the feed-forward layer, and of all queries and keys."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, final

from memplan.models.huggingface import HuggingFaceDecoder, decoder_family
from memplan.ops import halves_rotation, heads, rms_norm_in_fp32
from memplan.shapes import FP32
from memplan.tape import Tensor


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Olmo2(HuggingFaceDecoder):
    """`Olmo2ForCausalLM`.

    Source: transformers.models.olmo2.modeling_olmo2 (5.23).
    """

    family: ClassVar[str] = "olmo2"
    code: ClassVar[str] = "transformers 5.23, Olmo2ForCausalLM"

    attention_bias: bool = False

    def has_bias(self, name: str) -> bool:
        return self.attention_bias and name.startswith("self_attn.")

    def tables(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return halves_rotation(tokens, self.rotary_dim, FP32)

    def norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm_in_fp32(x, name)

    def block(self, x: Tensor, kind: str) -> Tensor:
        x = x + self.norm(self.attention(x, kind), "post_attention_layernorm")
        return x + self.norm(self.feed_forward(x), "post_feedforward_layernorm")

    def queries_keys_values(self, x: Tensor) -> Sequence[Tensor]:
        q = self.norm(self.projected(x, "self_attn.q_proj", self.n_heads * self.d_head), "self_attn.q_norm")
        n_kv = self.n_kv_heads * self.d_head
        k = self.norm(self.projected(x, "self_attn.k_proj", n_kv), "self_attn.k_norm")
        v = self.projected(x, "self_attn.v_proj", n_kv)
        return heads(q, self.d_head), heads(k, self.d_head), heads(v, self.d_head)

    def rotated(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        tape, dtype = q.tape, q.dtype
        turned_q, turned_k = HuggingFaceDecoder.rotated(self, q, k)
        return tape.cast(turned_q, dtype), tape.cast(turned_k, dtype)


OLMO2: Final = decoder_family(Olmo2, "Olmo2ForCausalLM", flags=("attention_bias",), vocab_size=50304)
