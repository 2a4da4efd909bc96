"""StarCoder 2: rotary positions with GPT's LayerNorm, biases and feed-forward layer."""

from dataclasses import dataclass
from typing import ClassVar, Final, final

from memplan.models.config import Config
from memplan.models.families import Family, Reader
from memplan.models.huggingface import WindowedDecoder, decoder_sizes
from memplan.ops import gelu, layer_norm
from memplan.tape import Tensor


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Starcoder2(WindowedDecoder):
    """`Starcoder2ForCausalLM`.

    Source: transformers.models.starcoder2.modeling_starcoder2 (5.23).
    """

    family: ClassVar[str] = "starcoder2"
    code: ClassVar[str] = "transformers 5.23, Starcoder2ForCausalLM"

    use_bias: bool = True

    def has_bias(self, name: str) -> bool:
        return self.use_bias

    def norm(self, x: Tensor, name: str) -> Tensor:
        return layer_norm(x, name)

    def feed_forward(self, x: Tensor) -> Tensor:
        return self.projected(gelu(self.projected(x, "mlp.c_fc", self.d_ff)), "mlp.c_proj", self.d_model)


def _read(config: Config, name: str) -> Starcoder2:
    """Source: transformers, Starcoder2Config (defaults)."""
    config.refuse("residual_dropout", "embedding_dropout")
    config.one_of("hidden_act", "gelu_pytorch_tanh", ("gelu_pytorch_tanh", "gelu"))
    return Starcoder2(
        **decoder_sizes(
            config,
            name,
            n_layers=30,
            d_model=3072,
            n_heads=24,
            n_kv_heads=2,
            d_ff=12288,
            vocab_size=49152,
            max_seq_len=4096,
            tied_head=True,
        ),
        use_bias=config.flag("use_bias", default=True),
        window=config.window(0),
    )


STARCODER2: Final = Family(
    implementations={"huggingface": Starcoder2},
    readers={"starcoder2": Reader("Starcoder2ForCausalLM", _read)},
)
