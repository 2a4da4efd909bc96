"""Mistral: Llama with heads of their own width, and windows in its first release."""

from dataclasses import dataclass
from typing import ClassVar, Final, final

from memplan.models.config import Config
from memplan.models.families import Family, Reader
from memplan.models.huggingface import WindowedDecoder, decoder_sizes


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Mistral(WindowedDecoder):
    """`MistralForCausalLM`.

    Source: transformers.models.mistral.modeling_mistral (5.23).
    """

    family: ClassVar[str] = "mistral"
    code: ClassVar[str] = "transformers 5.23, MistralForCausalLM"


def _read(config: Config, name: str) -> Mistral:
    """Source: transformers, MistralConfig (defaults)."""
    config.one_of("hidden_act", "silu", ("silu", "swish"))
    return Mistral(
        **decoder_sizes(config, name, n_kv_heads=8, d_ff=14336, max_seq_len=131072),
        window=config.window(4096),
    )


MISTRAL: Final = Family(
    implementations={"huggingface": Mistral}, readers={"mistral": Reader("MistralForCausalLM", _read)}
)
