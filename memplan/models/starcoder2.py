"""StarCoder 2: rotary positions with GPT's LayerNorm, biases and feed-forward layer."""

from dataclasses import dataclass
from typing import ClassVar, Final, final

from memplan.models.huggingface import GELU, WindowedDecoder, decoder_family
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


STARCODER2: Final = decoder_family(
    Starcoder2,
    "Starcoder2ForCausalLM",
    refuses=("residual_dropout", "embedding_dropout"),
    activation=("hidden_act", *GELU),
    flags=("use_bias",),
    own=lambda config: {"window": config.window(0)},
    n_layers=30,
    d_model=3072,
    n_heads=24,
    n_kv_heads=2,
    d_ff=12288,
    vocab_size=49152,
    max_seq_len=4096,
    tied_head=True,
)
