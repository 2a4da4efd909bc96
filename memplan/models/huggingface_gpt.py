"""GPT-2 as transformers runs it: fused projections, a GELU of eight operations, transposed weights."""

from dataclasses import dataclass
from typing import ClassVar, Final, final

from memplan.checks import checked_choice
from memplan.models.decoders import GptDecoder
from memplan.models.huggingface import HuggingFaceModel, look_for_packed_sequences, offset_positions
from memplan.ops import (
    add_positions,
    attention,
    conv1d,
    dropout,
    embedding,
    feature_parts,
    gelu,
    gelu_new,
    heads,
    layer_norm,
    learned_positions,
    merged_heads,
)
from memplan.tape import Tensor

ACTIVATIONS: Final = {"gelu_new": gelu_new, "gelu_pytorch_tanh": gelu, "gelu": gelu}
"""Rules of the activations, by their names in a config.json."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class HuggingFaceGpt(HuggingFaceModel, GptDecoder):
    """`GPT2LMHeadModel` with PyTorch's attention (`sdpa`) and its own loss, without a cache.

    Local variables of its forward functions live until these return: the embeddings until the last block has
    run, attention's output and the norms' until their block has.

    Neglects: masks of a byte per token.
    Source: transformers.models.gpt2.modeling_gpt2 (5.23).
    """

    code: ClassVar[str] = "transformers 5.23, GPT2LMHeadModel"
    token_table: ClassVar[str] = "transformer.wte"

    activation: str = "gelu_new"

    def __post_init__(self) -> None:
        GptDecoder.__post_init__(self)
        checked_choice("activation", self.activation, tuple(ACTIVATIONS))

    def embed(self, tokens: Tensor) -> Tensor:
        embedded = embedding(tokens, self.token_table, self.vocab_size, self.d_model)
        ids = offset_positions(tokens).view(1, tokens.shape[1])
        positions = learned_positions(ids, "transformer.wpe", self.max_seq_len, self.d_model)
        tokens.tape.hold(embedded, positions)
        x = add_positions(embedded, positions)
        look_for_packed_sequences(tokens)
        return dropout(x, self.dropout)

    def block(self, x: Tensor, kind: str) -> Tensor:
        attended = self._attention(layer_norm(x, "ln_1"))
        x = attended + x
        return x + self._feed_forward(layer_norm(x, "ln_2"))

    def _attention(self, x: Tensor) -> Tensor:
        parts = feature_parts(conv1d(x, "attn.c_attn", 3 * self.d_model), 3)
        q, k, v = (heads(part, self.d_head) for part in parts)
        y = merged_heads(attention(q, k, v, dropout=self.dropout))
        return dropout(conv1d(y, "attn.c_proj", self.d_model), self.dropout)

    def _feed_forward(self, x: Tensor) -> Tensor:
        y = conv1d(x, "mlp.c_fc", self.d_ff)
        y = ACTIVATIONS[self.activation](y)
        y = conv1d(y, "mlp.c_proj", self.d_model)
        return dropout(y, self.dropout)

    def head(self, x: Tensor) -> Tensor:
        return self.logits(layer_norm(x, "transformer.ln_f"))
