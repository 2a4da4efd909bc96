"""Mistral: Llama with a head width of its own, and windows in its first release."""

from dataclasses import dataclass
from typing import ClassVar, Final, final

from memplan.models.huggingface import WindowedDecoder, decoder_family


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Mistral(WindowedDecoder):
    """`MistralForCausalLM`.

    Source: transformers.models.mistral.modeling_mistral (5.23).
    """

    family: ClassVar[str] = "mistral"
    code: ClassVar[str] = "transformers 5.23, MistralForCausalLM"


MISTRAL: Final = decoder_family(
    Mistral,
    "MistralForCausalLM",
    own=lambda config: {"window": config.window(4096)},
    n_kv_heads=8,
    d_ff=14336,
    max_seq_len=131072,
)
