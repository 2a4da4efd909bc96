"""OPT: GPT with a ReLU, a table of positions for each sequence, and scaled queries."""

from dataclasses import dataclass
from typing import ClassVar, Final, final

from memplan.models.config import Config
from memplan.models.families import Family, Reader
from memplan.models.huggingface import HuggingFaceDecoder, decoder_sizes
from memplan.ops import (
    attention,
    dropout,
    embedding,
    layer_norm,
    learned_positions,
    merged_heads,
    relu,
    times_number,
)
from memplan.ops import heads as heads_of
from memplan.shapes import FP32, INT64, Buffer
from memplan.tape import Tensor

OFFSET: Final = 2
"""Rows of the table of positions that no position has."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Opt(HuggingFaceDecoder):
    """`OPTForCausalLM` with norms before its layers, as in every released size but 350 million parameters.

    Pipeline stages after the first call its blocks alone, which need no positions.

    Source: transformers.models.opt.modeling_opt (5.23).
    """

    family: ClassVar[str] = "opt"
    code: ClassVar[str] = "transformers 5.23, OPTForCausalLM"
    token_table: ClassVar[str] = "model.decoder.embed_tokens"
    last_norm: ClassVar[str] = "model.decoder.final_layer_norm"
    holds_embedding: ClassVar[bool] = False
    blocks_return_views: ClassVar[bool] = True
    module_order: ClassVar[tuple[str, ...]] = (
        "self_attn.k_proj", "self_attn.v_proj", "self_attn.", "self_attn_layer_norm", "fc", "",
    )  # fmt: skip

    def has_bias(self, name: str) -> bool:
        return True

    @property
    def longest_seq_len(self) -> int:
        return self.max_seq_len

    def buffers(self, seq_len: int) -> tuple[Buffer, ...]:
        return ()

    def norm(self, x: Tensor, name: str) -> Tensor:
        return layer_norm(x, name)

    def embed(self, tokens: Tensor) -> Tensor:
        tape = tokens.tape
        x = embedding(tokens, self.token_table, self.vocab_size, self.d_model)
        mask = tape.new("mask of positions", tokens.shape, FP32)
        with tape.workspace() as counted:
            counted.new("tokens up to each", tokens.shape, FP32)
            with tape.workspace() as masked:
                masked.new("masked tokens up to each", tokens.shape, FP32)
                counted.new("position ids as float32", tokens.shape, FP32)
            tape.shared["positions"] = tape.new("position ids", tokens.shape, INT64)
        ids = tape.new("position ids and offset", tokens.shape, INT64)
        n_rows = self.max_seq_len + OFFSET
        positions = learned_positions(ids, "model.decoder.embed_positions", n_rows, self.d_model)
        del ids
        tape.hold(mask, x, positions)
        return x + positions

    def receive(self, tokens: Tensor) -> None:
        return

    def block(self, x: Tensor, kind: str) -> Tensor:
        y = self.attention(self.norm(x, "self_attn_layer_norm"), kind)
        y = dropout(y, self.dropout)
        x = x + y
        del y
        y = relu(self.projected(self.norm(x, "final_layer_norm"), "fc1", self.d_ff))
        y = self.projected(y, "fc2", self.d_model)
        y = dropout(y, self.dropout)
        return x + y

    def attention(self, x: Tensor, kind: str) -> Tensor:
        q = heads_of(times_number(self.projected(x, "self_attn.q_proj", self.d_model)), self.d_head)
        k, v = (self.head_projection(x, name, self.n_heads) for name in ("k_proj", "v_proj"))
        return self.projected(merged_heads(attention(q, k, v)), "self_attn.out_proj", self.d_model)


def _read(config: Config, name: str) -> Opt:
    """Source: transformers, OPTConfig (defaults)."""
    config.refuse("layerdrop", "_remove_final_layer_norm")
    config.one_of("activation_function", "relu", ("relu",))
    for key in ("do_layer_norm_before", "enable_bias", "layer_norm_elementwise_affine"):
        config.expect(key, default=True)
    sizes = decoder_sizes(
        config, name, n_layers=12, d_model=768, n_heads=12, d_ff=3072, vocab_size=50272, tied_head=True
    )
    config.expect("word_embed_proj_dim", default=sizes["d_model"])
    sizes |= {"d_ff": config.count("ffn_dim", 3072), "dropout": config.fraction("dropout", 0.1)}
    return Opt(**sizes)


OPT: Final = Family(implementations={"huggingface": Opt}, readers={"opt": Reader("OPTForCausalLM", _read)})
