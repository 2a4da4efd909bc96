"""Llama as transformers runs it: norms by parts, rotary positions by halves, its own loss."""

from dataclasses import dataclass
from typing import ClassVar, final

from memplan.models.decoders import LlamaDecoder
from memplan.models.huggingface import HuggingFaceDecoder


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class HuggingFaceLlama(HuggingFaceDecoder, LlamaDecoder):
    """`LlamaForCausalLM`.

    Source: transformers.models.llama.modeling_llama (5.23).
    """

    code: ClassVar[str] = "transformers 5.23, LlamaForCausalLM"

    def has_bias(self, name: str) -> bool:
        return self.mlp_bias if name.startswith("mlp.") else self.attention_bias
