"""Qwen 1.5, 2 and 2.5: Llama with biases of queries, keys and values."""

from dataclasses import dataclass
from typing import ClassVar, Final, final

from memplan.models.huggingface import HuggingFaceDecoder, decoder_family


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen2(HuggingFaceDecoder):
    """`Qwen2ForCausalLM`.

    Source: transformers.models.qwen2.modeling_qwen2 (5.23).
    """

    family: ClassVar[str] = "qwen2"
    code: ClassVar[str] = "transformers 5.23, Qwen2ForCausalLM"

    def has_bias(self, name: str) -> bool:
        return name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


QWEN2: Final = decoder_family(
    Qwen2,
    "Qwen2ForCausalLM",
    refuses=("use_sliding_window",),
    n_kv_heads=32,
    d_ff=22016,
    vocab_size=151936,
    max_seq_len=32768,
)
