"""Gemma 2: Gemma with norms before and after its layers, and with scores and logits bounded by a tanh."""

from dataclasses import dataclass
from typing import Any, ClassVar, Final, final

from memplan.models.gemma import GemmaDecoder
from memplan.models.huggingface import GELU, causal_mask, decoder_family, window_mask
from memplan.ops import capped_attention, soft_capped
from memplan.tape import Tensor


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma2(GemmaDecoder):
    """`Gemma2ForCausalLM`, whose attention is its own (`eager`): scores and masks are in memory.

    Every second block looks back no further than a window, by a mask of the same size.

    Neglects: a pipeline stage of a single recomputed block keeps only its own mask.

    Source: transformers.models.gemma2.modeling_gemma2 (5.23).
    """

    family: ClassVar[str] = "gemma2"
    code: ClassVar[str] = "transformers 5.23, Gemma2ForCausalLM"

    caps_scores: bool = True
    caps_logits: bool = True

    def masks(self, tokens: Tensor) -> None:
        tape, (batch, seq) = tokens.tape, tokens.shape
        for name, mask in (("full mask", causal_mask), ("sliding mask", window_mask)):
            GemmaDecoder.masks(self, tokens)
            with tape.workspace() as allowed:
                allowed.keep(mask(tokens))
                for value in ("0", "least value"):
                    allowed.new(value, (), tape.context.weight_dtype)
                tape.shared[name] = tape.new(name, (batch, 1, seq, seq), tape.context.weight_dtype)

    def attended(self, q: Tensor, k: Tensor, v: Tensor, kind: str) -> Tensor:
        return capped_attention(q, k, v, q.tape.shared["full mask"], capped=self.caps_scores)

    def head(self, x: Tensor) -> Tensor:
        x = self.norm(x, self.last_norm)
        return soft_capped(self.logits(x)) if self.caps_logits else self.logits(x)


SIZES: Final[dict[str, Any]] = {
    "n_layers": 26,
    "d_model": 2304,
    "n_heads": 8,
    "n_kv_heads": 4,
    "d_head": 256,
    "d_ff": 9216,
    "tied_head": True,
}
"""The default sizes of Gemma 2 and 3 that are the same."""

GEMMA2: Final = decoder_family(
    Gemma2,
    "Gemma2ForCausalLM",
    refuses=("use_bidirectional_attention",),
    activation=("hidden_activation", *GELU),
    flags=("attention_bias",),
    own=lambda config: {
        "caps_scores": bool(config.values.get("attn_logit_softcapping", True)),
        "caps_logits": bool(config.values.get("final_logit_softcapping", True)),
    },
    vocab_size=256000,
    max_seq_len=8192,
    **SIZES,
)
