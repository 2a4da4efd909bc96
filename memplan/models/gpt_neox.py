"""GPT-NeoX and Pythia: attention and the feed-forward layer in parallel, heads rotated in part."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, final

from memplan.models.huggingface import HuggingFaceDecoder, decoder_family
from memplan.ops import feature_parts, gelu, heads, layer_norm, rope_of_parts
from memplan.tape import Tensor


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class GptNeox(HuggingFaceDecoder):
    """`GPTNeoXForCausalLM`.

    `partial_rotary`: the rotated fraction of a head. `parallel`: attention and feed-forward layer read the
    same input.

    Source: transformers.models.gpt_neox.modeling_gpt_neox (5.23).
    """

    family: ClassVar[str] = "gpt_neox"
    code: ClassVar[str] = "transformers 5.23, GPTNeoXForCausalLM"
    token_table: ClassVar[str] = "gpt_neox.embed_in"
    last_norm: ClassVar[str] = "gpt_neox.final_layer_norm"
    attention_output: ClassVar[str] = "attention.dense"
    module_order: ClassVar[tuple[str, ...]] = "input_layernorm", "post_attention_layernorm", ""

    partial_rotary: float = 0.25
    parallel: bool = True
    attention_bias: bool = True

    def has_bias(self, name: str) -> bool:
        return self.attention_bias or name.startswith("mlp.")

    @property
    def rotary_dim(self) -> int:
        return int(self.d_head * self.partial_rotary)

    def norm(self, x: Tensor, name: str) -> Tensor:
        return layer_norm(x, name)

    def block(self, x: Tensor, kind: str) -> Tensor:
        attended = self.attention(self.norm(x, "input_layernorm"), kind)
        if self.parallel:
            fed = self.feed_forward(self.norm(x, "post_attention_layernorm"))
            return fed + attended + x
        attended = attended + x
        fed = self.feed_forward(self.norm(attended, "post_attention_layernorm"))
        return fed + attended

    def queries_keys_values(self, x: Tensor) -> Sequence[Tensor]:
        qkv = self.projected(x, "attention.query_key_value", 3 * self.d_model)
        return feature_parts(heads(qkv, 3 * self.d_head), 3)

    def rotated(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return rope_of_parts(q, k, *self.rotation_tables(q), in_turn=False)

    def feed_forward(self, x: Tensor) -> Tensor:
        y = gelu(self.projected(x, "mlp.dense_h_to_4h", self.d_ff))
        return self.projected(y, "mlp.dense_4h_to_h", self.d_model)  # x is alive until the module returns


GPT_NEOX: Final = decoder_family(
    GptNeox,
    "GPTNeoXForCausalLM",
    refuses=("hidden_dropout",),
    activation=("hidden_act", "gelu", ("gelu", "gelu_pytorch_tanh")),
    flags=("attention_bias",),
    own=lambda config: {
        "partial_rotary": config.rotary_part(config.fraction("rotary_pct", 0.25)),
        "parallel": config.flag("use_parallel_residual", default=True),
    },
    n_layers=44,
    d_model=6144,
    n_heads=64,
    d_ff=24576,
    vocab_size=50432,
)
