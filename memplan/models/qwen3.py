"""Qwen 3: Llama with norms of each head's queries and keys."""

from dataclasses import dataclass
from typing import ClassVar, Final, final

from memplan.models.huggingface import HuggingFaceDecoder, decoder_family
from memplan.ops import heads
from memplan.tape import Tensor


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3(HuggingFaceDecoder):
    """`Qwen3ForCausalLM`.

    Source: transformers.models.qwen3.modeling_qwen3 (5.23).
    """

    family: ClassVar[str] = "qwen3"
    code: ClassVar[str] = "transformers 5.23, Qwen3ForCausalLM"

    attention_bias: bool = False

    def has_bias(self, name: str) -> bool:
        return self.attention_bias and name.startswith("self_attn.")

    def head_projection(self, x: Tensor, name: str, n: int) -> Tensor:
        x = self.projected(x, f"self_attn.{name}", n * self.d_head)
        if name == "v_proj":
            return heads(x, self.d_head)
        return self.head_norm(heads(x, self.d_head, by_head=True), f"self_attn.{name[0]}_norm")


QWEN3: Final = decoder_family(
    Qwen3,
    "Qwen3ForCausalLM",
    refuses=("use_sliding_window",),
    flags=("attention_bias",),
    n_kv_heads=32,
    d_head=128,
    d_ff=22016,
    vocab_size=151936,
    max_seq_len=32768,
)
