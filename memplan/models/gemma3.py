"""Gemma 3 (text): Gemma 2 with norms of queries and keys, and two kinds of blocks: most have a window."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar, Final, final

from memplan.checks import checked_count
from memplan.models.base import Layers
from memplan.models.gemma import GemmaDecoder
from memplan.models.gemma2 import SIZES
from memplan.models.huggingface import GELU, SLIDING, HuggingFaceDecoder, WindowedDecoder, decoder_family
from memplan.ops import heads
from memplan.shapes import FP32, Buffer, buffer_of
from memplan.tape import Tensor

FULL: Final = "full"
"""The kind of the blocks without a window."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3(GemmaDecoder):
    """`Gemma3ForCausalLM`. One of `pattern` blocks has no window; each kind has its own tables of angles.

    It takes the kinds of its first blocks for whichever it has, so that a pipeline stage must be given the
    kinds of its own (`config.layer_types`).

    Neglects: backward frees a kind's tables after the first block of that kind; here the stage's first block
    frees all of them.

    Source: transformers.models.gemma3.modeling_gemma3 (5.23).
    """

    family: ClassVar[str] = "gemma3"
    code: ClassVar[str] = "transformers 5.23, Gemma3ForCausalLM"

    pattern: int = 6

    def __post_init__(self) -> None:
        GemmaDecoder.__post_init__(self)
        object.__setattr__(self, "pattern", checked_count("pattern", self.pattern))

    @property
    def layers(self) -> tuple[Layers, ...]:
        return self.layers_in(range(self.n_layers))

    def layers_in(self, blocks: range) -> tuple[Layers, ...]:
        kinds = [SLIDING if (i + 1) % self.pattern else FULL for i in blocks]
        return tuple([Layers(kind, len(list(same))) for kind, same in groupby(kinds)])

    def buffers(self, seq_len: int) -> tuple[Buffer, ...]:
        tables = GemmaDecoder.buffers(self, seq_len)
        return tuple(
            [buffer_of(f"{kind} {one.name}", one.shape, FP32) for kind in self.kinds for one in tables]
        )

    def masks(self, tokens: Tensor) -> None:
        HuggingFaceDecoder.masks(self, tokens)
        GemmaDecoder.masks(self, tokens)

    def rotation(self, tokens: Tensor) -> None:
        WindowedDecoder.rotation(self, tokens)
        if len(tokens.tape.kinds) > 1:
            tables = self.tables(tokens)
            tokens.tape.shared.update(zip(("other cosines", "other sines"), tables, strict=True))

    def head_projection(self, x: Tensor, name: str, n: int) -> Tensor:
        x = self.projected(x, f"self_attn.{name}", n * self.d_head)
        return heads(x, self.d_head, by_head=name != "v_proj")

    def queries_keys_values(self, x: Tensor) -> Sequence[Tensor]:
        q, k, v = GemmaDecoder.queries_keys_values(self, x)
        q = self.head_norm(q, "self_attn.q_norm")
        k = self.head_norm(k, "self_attn.k_norm")
        return q, k, v

    def rotation_tables(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple([table for name, table in x.tape.shared.items() if name.endswith(("cosines", "sines"))])


GEMMA3: Final = decoder_family(
    Gemma3,
    "Gemma3ForCausalLM",
    model_type="gemma3_text",
    refuses=("use_bidirectional_attention", "attn_logit_softcapping", "final_logit_softcapping"),
    activation=("hidden_activation", *GELU),
    flags=("attention_bias",),
    own=lambda config: {
        "window": config.window(4096),
        "pattern": config.count("sliding_window_pattern", 6),
    },
    vocab_size=262208,
    max_seq_len=131072,
    **SIZES,
)
