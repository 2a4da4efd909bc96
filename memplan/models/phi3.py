"""Phi 3 and 4: Llama with fused projections, whose heads may be rotated in part."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, final

from memplan.models.huggingface import WindowedDecoder, decoder_family
from memplan.ops import feature_parts, feature_slices, heads, rope_of_parts, silu
from memplan.tape import Tensor


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Phi3(WindowedDecoder):
    """`Phi3ForCausalLM`. `partial_rotary`: the rotated fraction of a head.

    Source: transformers.models.phi3.modeling_phi3 (5.23).
    """

    family: ClassVar[str] = "phi3"
    code: ClassVar[str] = "transformers 5.23, Phi3ForCausalLM"

    partial_rotary: float = 1.0

    @property
    def rotary_dim(self) -> int:
        return int(self.d_head * self.partial_rotary)

    def queries_keys_values(self, x: Tensor) -> Sequence[Tensor]:
        n_q, n_kv = self.n_heads * self.d_head, self.n_kv_heads * self.d_head
        qkv = self.projected(x, "self_attn.qkv_proj", n_q + 2 * n_kv)
        return [heads(part, self.d_head) for part in feature_slices(qkv, n_q, n_kv, n_kv)]

    def rotated(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return rope_of_parts(q, k, *self.rotation_tables(q), in_turn=True)

    def feed_forward(self, x: Tensor) -> Tensor:
        gate, up = feature_parts(self.projected(x, "mlp.gate_up_proj", 2 * self.d_ff), 2)
        return self.projected(up * silu(gate), "mlp.down_proj", self.d_model)


PHI3: Final = decoder_family(
    Phi3,
    "Phi3ForCausalLM",
    refuses=("resid_pdrop", "embd_pdrop"),
    own=lambda config: {"partial_rotary": config.rotary_part(1.0), "window": config.window(0)},
    d_model=3072,
    d_ff=8192,
    vocab_size=32064,
    max_seq_len=4096,
)
