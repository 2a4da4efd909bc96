"""GPTModel over shapes: Megatron's embedding, transformer layer and output layer."""

from dataclasses import dataclass, replace
from itertools import groupby
from typing import ClassVar, Final

from memplan.checks import checked_fraction
from memplan.models.base import BLOCKS, Decoder, Layers
from memplan.models.megatron import attention as core
from memplan.models.megatron.config import TransformerConfig
from memplan.models.megatron.experts import MoE, moe_layer
from memplan.models.megatron.fusions import (
    bias_dropout_add,
    bias_gelu,
    bias_swiglu,
    compiled_parallel_cross_entropy,
    dropout,
    masked_loss,
    te_parallel_cross_entropy,
    token_losses,
    vocab_parallel_cross_entropy,
    with_loss_beside,
)
from memplan.models.megatron.latent import (
    MLA,
    Compressed,
    compressed,
    latent_buffers,
    latent_qkv,
    up_projected,
)
from memplan.models.megatron.layers import (
    column_linear,
    concatenated,
    gathered_features,
    norm,
    scatter_to_sequence_parallel_region,
    split,
    transposed,
    vocab_parallel_embedding,
    with_embeddings,
)
from memplan.models.megatron.linears import column_parallel_linear, norm_column_linear, row_parallel_linear
from memplan.models.megatron.ring import ring_attention
from memplan.shapes import FP32, INT64, Buffer, DType, Parameter, buffer_of
from memplan.tape import Region, Saved, Tensor

WORDS: Final = "embedding.word_embeddings.weight"
"""The table of word embeddings, which a tied output layer shares."""

EXPERTS: Final = "layers with experts"
"""The kind of layers that have a mixture of experts; the others are `BLOCKS`."""

IN_BF16: Final = {"layers in bfloat16": BLOCKS, "layers with experts in bfloat16": EXPERTS}
"""The kinds of layers that stay in bfloat16 in a model in fp8, each with the kind that it would be."""

WITH_EXPERTS: Final = frozenset([EXPERTS, "layers with experts in bfloat16"])
"""The kinds of layers with experts."""

LOSSES: Final = {
    "": vocab_parallel_cross_entropy,
    "native": compiled_parallel_cross_entropy,
    "te": te_parallel_cross_entropy,
}
"""The losses by the implementation that fuses them."""

DEFAULT_CONFIG: Final = TransformerConfig()
"""Megatron's defaults, on one rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTModel(Decoder):
    """A GPT as Megatron's arguments describe it, and how its layers are configured on one rank.

    `vocab_size` is what Megatron pads; `position_embedding_type` is "learned_absolute", "rope" or "none", and
    in Megatron-DeepSpeed "alibi"; `embed_layernorm`: there the embeddings are normed.

    Source: megatron.core.models.gpt.gpt_model:GPTModel.
    """

    family: ClassVar[str] = "megatron"
    code: ClassVar[str] = "Megatron-Core"
    module_order: ClassVar[tuple[str, ...]] = (
        "input_layernorm", "self_attention.linear_proj", "self_attention.linear_qkv",
        "self_attention.linear_q_", "self_attention.linear_kv_",
        "self_attention.q_layernorm", "self_attention.k_layernorm",
        "pre_mlp_layernorm", "mlp.linear_fc1", "mlp.linear_fc2",
        "mlp.router", "mlp.experts", "mlp.shared_experts", "",
    )  # fmt: skip
    sees_all: ClassVar[bool] = False
    """Whether each token attends to all others but padding, and not to earlier ones."""

    normalization: str = "LayerNorm"
    swiglu: bool = False
    add_bias_linear: bool = True
    add_qkv_bias: bool = False
    position_embedding_type: str = "learned_absolute"
    embed_layernorm: bool = False
    rotary_percent: float = 1.0
    rope_fusion: bool = True
    qk_layernorm: bool = False
    attention_dropout: float = 0.0
    mla: MLA | None = None
    moe: MoE | None = None
    mtp_num_layers: int = 0
    config: TransformerConfig = DEFAULT_CONFIG

    def __post_init__(self) -> None:
        Decoder.__post_init__(self)
        checked_fraction("attention_dropout", self.attention_dropout)
        object.__setattr__(self, "config", self.config._replace(normalization=self.normalization))

    @property
    def layers(self) -> tuple[Layers, ...]:
        return self.layers_in(range(self.n_layers))

    def layers_in(self, blocks: range) -> tuple[Layers, ...]:
        every = [0 if self.moe is None else 1] * self.n_layers
        has_experts = self.moe.layer_freq or every if self.moe else every
        ends = {0, self.n_layers - 1} if self.config.first_last_layers_bf16 else set()
        in_bf16 = {kind: own for own, kind in IN_BF16.items()}
        usual = [(i, EXPERTS if has_experts[i] else BLOCKS) for i in blocks]
        kinds = [in_bf16[kind] if i in ends else kind for i, kind in usual]
        return tuple([Layers(kind, len(list(same))) for kind, same in groupby(kinds)])

    @property
    def predicted_kind(self) -> str:
        """The kind of the layers of multi-token prediction: the last layer's, in 8 bits if others are.

        Source: megatron.core.transformer.multi_token_prediction,
        MultiTokenPredictionLayer._proj_and_transformer_layer.
        """
        kind = self.layers[-1].kind
        return IN_BF16.get(kind, kind)

    @property
    def n_experts(self) -> int:
        return self.moe.num_experts if self.moe else 0

    @property
    def longest_seq_len(self) -> int | None:
        return self.max_seq_len if self.position_embedding_type == "learned_absolute" else None

    @property
    def padded_vocab_size(self) -> int:
        """The vocabulary's rows, padded so that tensor ranks divide it evenly.

        Source: megatron.training.tokenizer.tokenizer:_vocab_size_with_padding.
        """
        multiple = self.config.vocab_multiple * self.config.tp
        return -(-self.vocab_size // multiple) * multiple

    @property
    def heads(self) -> core.Heads:
        """The attention heads of one tensor rank."""
        tp = self.config.tp
        return core.Heads(self.n_heads // tp, self.n_kv_heads // tp, self.d_head)

    def embedding_buffers(self) -> tuple[Buffer, ...]:
        return ()

    def buffers(self, seq_len: int) -> tuple[Buffer, ...]:
        """The rotary embedding's inverse frequencies, and its angles, which are cached.

        Source: megatron.core.models.common.embeddings.rotary_pos_embedding:RotaryEmbedding.
        """
        if self.position_embedding_type != "rope" or self.mla:
            return ()
        return (
            buffer_of("rotary inverse frequencies", (self.rotary_width // 2,), FP32),
            buffer_of("rotary angles", (seq_len, 1, 1, self.rotary_width), FP32),
        )

    def layer_buffers(self, seq_len: int, dtype: DType) -> tuple[Buffer, ...]:
        """Each layer's rotary buffers under multi-latent attention; other layers have none."""
        if self.mla is None:
            return ()
        return tuple(latent_buffers(self.mla, seq_len, dtype, self.config, fused=self.fuses_rope))

    @property
    def fuses_rope(self) -> bool:
        """Whether positions are applied by fused kernels: never without `--position-embedding-type rope`."""
        return self.rope_fusion and self.position_embedding_type == "rope"

    @property
    def rotary_width(self) -> int:
        """The features of a head that are turned by position."""
        return int(self.d_head * self.rotary_percent)

    def embed(self, tokens: Tensor) -> Tensor:
        tape, config = tokens.tape, self.config
        table = tape.parameter(WORDS, (self.padded_vocab_size // config.tp, self.d_model))
        x = vocab_parallel_embedding(tokens, table, config)
        if self.embed_layernorm:
            x = norm(x, "embedding.word_embeddings.norm", config)
        if self.position_embedding_type == "learned_absolute":
            positions = tape.parameter(
                "embedding.position_embeddings.weight", (self.max_seq_len, self.d_model)
            )
            x = with_embeddings(x, positions, "position embeddings")
        x = self.with_types(transposed(x, "embeddings, transposed"))
        if config.sequence_parallel:
            x = scatter_to_sequence_parallel_region(x, config)
        return dropout(x, self.dropout)

    def with_types(self, x: Tensor) -> Tensor:
        """The embeddings x and those of each token's type; a GPT has no types."""
        return x

    def block(self, x: Tensor, kind: str) -> Tensor:
        if kind in IN_BF16:
            return replace(self, config=self.config._replace(fp8=None)).block(x, IN_BF16[kind])
        x = self._attention(x)
        if kind == EXPERTS and self.moe is not None:
            return self._experts(x, self.moe)
        return self._mlp(x)

    def _row(self, x: Tensor) -> tuple[Tensor, Parameter | None]:
        """The attention's product by rows, and its bias, which the caller adds.

        Source: megatron.core.transformer.attention:Attention.__init__ (`set_save_original_input`).
        """
        name = "self_attention.linear_proj"
        y = row_parallel_linear(x, name, self.d_model, self.config, save_original_input=True)
        return y, x.tape.parameter(f"{name}.bias", (self.d_model,)) if self.add_bias_linear else None

    def _latent_attention(self, x: Tensor, mla: MLA) -> Tensor:
        n_heads, config, tape = self.heads.n, self.config, x.tape
        h, normed = self._norm(x, "input_layernorm")
        q, kv, k_pos = compressed(h, mla, config)

        def up(states: Tensor) -> Saved:
            own = Compressed(states, kv, k_pos)
            return up_projected(own, mla, n_heads, config, norms=self.qk_layernorm, fused=self.fuses_rope)

        if "mla_up_proj" in config.recompute_modules:
            made, region = tape.computed_again(up, q)
            y = self._core_attention(latent_qkv(made), self.heads)
            tape.discard(made, region, y)
        else:
            made = up(q)
            y = self._core_attention(latent_qkv(made), self.heads)
        y, of_bias = self._row(y)
        del made
        discard(h, normed, y)
        return bias_dropout_add(y, of_bias, x, self.dropout)

    def _norm(self, x: Tensor, name: str) -> tuple[Tensor, Region | None]:
        """A norm of its own, and what computes it again if its output is to be discarded."""
        if "layernorm" not in self.config.recompute_modules:
            return norm(x, name, self.config), None
        (h,), region = x.tape.computed_again(lambda y: (norm(y, name, self.config),), x)
        return h, region

    def _attention(self, x: Tensor) -> Tensor:
        if self.mla is not None:
            return self._latent_attention(x, self.mla)
        heads, name = self.heads, "self_attention.linear_qkv"
        width = (heads.n + 2 * heads.groups) * heads.width
        bias = self.add_bias_linear or self.add_qkv_bias
        mixed = norm_column_linear(x, "input_layernorm", name, width, self.config, bias=bias)
        qkv = core.split_qkv(mixed, heads)
        del mixed
        if self.qk_layernorm:
            qkv = core.with_norms(qkv, self.config)
        if self.position_embedding_type == "rope":
            qkv = core.with_positions(qkv, self.rotary_width, fused=self.rope_fusion)
        y = self._core_attention(qkv, heads)
        y, of_bias = self._row(y)
        del qkv  # `Attention.forward` is over
        return bias_dropout_add(y, of_bias, x, self.dropout)

    def _core_attention(self, qkv: core.Qkv, heads: core.Heads) -> Tensor:
        if "core_attn" in self.config.recompute_modules:
            return qkv.q.tape.recomputed(lambda q: self._attended(qkv._replace(q=q), heads), qkv.q)
        return self._attended(qkv, heads)

    def _attended(self, qkv: core.Qkv, heads: core.Heads) -> Tensor:
        config = self.config
        if config.cp > 1:
            return ring_attention(qkv, self.attention_dropout, config)
        if config.attention_backend == "fused":
            return core.fused_attention(qkv, self.attention_dropout)
        if config.attention_backend == "flash":
            return core.flash_attention(qkv, deterministic=config.deterministic_mode)
        return core.unfused_attention(qkv, heads, self.attention_dropout, config)

    def _mlp(self, x: Tensor) -> Tensor:
        tp, tape, name = self.config.tp, x.tape, "mlp.linear_fc1"
        n_out = self.d_ff // tp * (2 if self.swiglu else 1)
        bias = tape.parameter("mlp.linear_fc2.bias", (self.d_model,)) if self.add_bias_linear else None

        def mlp(x: Tensor) -> Tensor:
            h = norm_column_linear(x, "pre_mlp_layernorm", name, n_out, self.config, bias=False)
            of_fc1 = tape.parameter(f"{name}.bias", (n_out,)) if self.add_bias_linear else None
            h = (bias_swiglu if self.swiglu else bias_gelu)(h, of_fc1)
            return row_parallel_linear(h, "mlp.linear_fc2", self.d_model, self.config)

        y = tape.recomputed(mlp, x) if "mlp" in self.config.recompute_modules else mlp(x)
        return bias_dropout_add(y, bias, x, self.dropout)

    def _experts(self, x: Tensor, moe: MoE) -> Tensor:
        h, normed = self._norm(x, "pre_mlp_layernorm")

        def mixture(h: Tensor) -> Tensor:
            return moe_layer(h, moe, self.config, swiglu=self.swiglu)

        y = x.tape.recomputed(mixture, h) if "moe" in self.config.recompute_modules else mixture(h)
        discard(h, normed, y)
        del h
        return bias_dropout_add(y, None, x, self.dropout)

    def head(self, x: Tensor) -> Tensor:
        h = norm(x, "decoder.final_layernorm", self.config)
        if self.mtp_num_layers:
            h = self._predict_more_tokens(h)
        return self._logits(h)

    def _logits(self, h: Tensor, bias: str = "") -> Tensor:
        tape, config = h.tape, self.config
        name = WORDS if self.tied_head else "output_layer.weight"
        shared = self.tied_head and name in tape.parameters
        n_out = self.padded_vocab_size // config.tp
        weight = tape.parameter(name, (n_out, self.d_model))
        of_bias = tape.parameter(bias, (n_out,)) if bias else None
        return column_linear(h, weight, "logits", config, bias=of_bias, shared=shared, sums_bias=bool(bias))

    def _predict_more_tokens(self, h: Tensor) -> Tensor:
        """The hidden states h, whose gradient brings along the losses of multi-token prediction.

        Neglects: the rolled tokens, labels and loss masks.

        Source: megatron.core.transformer.multi_token_prediction:MultiTokenPredictionBlock.forward,
        megatron.core.transformer.multi_token_prediction:process_mtp_loss.
        """
        tape, found, x = h.tape, [h], h
        for depth in range(self.mtp_num_layers):
            embedded = self.embed(Tensor(tape, x.shape[:-1], INT64))
            with tape.named(f"mtp.layers.{depth}"):
                x = self._predict_next(x, embedded)
            del embedded
            found.append(x)
        del x, h
        n = len(found)
        batch, seq, width = found[0].shape
        whole = concatenated(found, (batch, n * seq, width), "hidden states of all depths")
        found.clear()
        h, *others = split(whole, [(batch, seq, width)] * n)
        del whole
        for other in others:
            h = with_loss_beside(h, token_losses(self._losses(self._logits(other))))
        return h

    def _predict_next(self, x: Tensor, embedded: Tensor) -> Tensor:
        """The next depth's hidden states.

        They are computed from `x`, the hidden states of the depth before, and from `embedded`, the embeddings
        of the next tokens.

        Source: megatron.core.transformer.multi_token_prediction:MultiTokenPredictionLayer.forward.
        """
        if not self.config.recomputes_mtp:
            return self._depth(x, embedded)
        return x.tape.recomputed(lambda y: self._depth(y, embedded), x)

    def _depth(self, x: Tensor, embedded: Tensor) -> Tensor:
        config, width = self.config, self.d_model
        both = [norm(embedded, "enorm", config), norm(x, "hnorm", config)]
        del embedded, x
        h = concatenated(both, (*both[0].shape[:-1], 2 * width), "embeddings and hidden states")
        both.clear()
        h = column_parallel_linear(h, "eh_proj", width // config.tp, config)
        h = gathered_features(h, config)
        with h.tape.named("mtp_model_layer"):
            h = self.block(h, self.predicted_kind)
        return norm(h, "final_layernorm", config)

    def _losses(self, logits: Tensor) -> Tensor:
        return LOSSES[self.config.cross_entropy](logits, self.config)

    def loss(self, logits: Tensor) -> Tensor:
        return masked_loss(self._losses(logits))


def discard(h: Tensor, region: Region | None, until: Tensor) -> None:
    """Free what a region computes again, if there is one, until the gradient of `until` is there."""
    if region is not None:
        h.tape.discard((h,), region, until)
