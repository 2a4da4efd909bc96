"""Qwen 1.5, 2 and 2.5: Llama with biases of queries, keys and values."""

from dataclasses import dataclass
from typing import ClassVar, Final, final

from memplan.models.config import Config
from memplan.models.families import Family, Reader
from memplan.models.huggingface import HuggingFaceDecoder, decoder_sizes


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


def _read(config: Config, name: str) -> Qwen2:
    """Source: transformers, Qwen2Config (defaults)."""
    config.refuse("use_sliding_window")
    config.one_of("hidden_act", "silu", ("silu", "swish"))
    return Qwen2(
        **decoder_sizes(config, name, n_kv_heads=32, d_ff=22016, vocab_size=151936, max_seq_len=32768)
    )


QWEN2: Final = Family(
    implementations={"huggingface": Qwen2}, readers={"qwen2": Reader("Qwen2ForCausalLM", _read)}
)
