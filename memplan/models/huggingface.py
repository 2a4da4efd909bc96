"""Decoders as transformers 5.23 runs them: families override what differs from Llama.

All of them take PyTorch's attention (`sdpa`) and their own loss, and have no cache.

Local variables of their forward functions live until these return; recomputed blocks keep their arguments,
position ids included.
"""

from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Final

from memplan.checks import checked_count
from memplan.errors import MissingRule
from memplan.models.base import BLOCKS, Decoder, Model
from memplan.models.config import Config, WithoutRule
from memplan.models.families import Family, Reader
from memplan.ops import (
    attention,
    embedding,
    fused_linear_cross_entropy,
    halves_rotation,
    heads,
    linear,
    merged_heads,
    position_ids,
    repeated_heads,
    rms_norm_with_locals,
    rope_by_halves,
    shifted_cross_entropy,
    silu,
)
from memplan.shapes import BOOL, FP32, INT64, Buffer, buffer_of
from memplan.tape import Tensor, Workspace

SILU: Final = "hidden_act", "silu", ("silu", "swish")
"""Llama's activation: its key in a config.json, its default, and the allowed values."""

GELU: Final = "gelu_pytorch_tanh", ("gelu_pytorch_tanh", "gelu")
"""The default activation of several families, GELU's tanh form, and the allowed values."""

N_TOKENS: Final = "tokens of the batch, cast"
"""The argument that the Trainer's count of tokens is to all blocks and the loss, as FSDP casts it."""

SLIDING: Final = "sliding"
"""The kind of the blocks with a window, in a model that has others too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HuggingFaceModel(Decoder, ABC):
    """A decoder of transformers, which computes its loss itself; tensor ranks divide it by its own plan."""

    implementation: ClassVar[str] = "huggingface"
    divides_itself: ClassVar[bool] = False
    chunks_loss: ClassVar[bool] = False
    computes_loss: ClassVar[bool] = True
    token_table: ClassVar[str] = "model.embed_tokens"
    """The name of the table of token embeddings."""

    @property
    def sizes_over_tp(self) -> Mapping[str, int]:
        return {"n_heads": self.n_heads, "n_kv_heads": self.n_kv_heads}

    def config_values(self) -> dict[str, Any] | None:
        from memplan.models.config_of import config_of  # it imports the families, as they import this

        return config_of(self)

    def blocks_called_with(self, seq_len: int) -> tuple[Buffer, ...]:
        return ()

    def logits(self, x: Tensor) -> Tensor:
        """The logits from the last norm's output, which lives until the loss is computed.

        Where Liger makes them within the loss, that output itself.
        """
        arguments = [own for name, own in x.tape.shared.items() if name == N_TOKENS]
        x.tape.let_go()
        x.tape.hold(x, *arguments)
        if x.tape.context.fuses_loss:
            return x
        with x.tape.offload.paused() if x.tape.offload else nullcontext():
            return linear(x, self.output_name, self.vocab_size, bias=False, split="columns")

    @property
    def output_name(self) -> str:
        return self.token_table if self.tied_head else "lm_head"

    @property
    def made_after_buffers(self) -> str:
        return self.output_name

    def loss(self, logits: Tensor) -> Tensor:
        if logits.tape.context.fuses_loss:
            found = fused_linear_cross_entropy(logits, self.output_name, self.vocab_size)
        else:
            found = shifted_cross_entropy(logits)
        logits.tape.let_go()
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class HuggingFaceDecoder(HuggingFaceModel):
    """A decoder of transformers with rotary positions; it is Llama except where a family overrides it.

    Neglects: scalars.
    """

    holds_embedding: ClassVar[bool] = True
    takes_padding_mask: ClassVar[bool] = True
    module_order: ClassVar[tuple[str, ...]] = (
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "self_attn",
        "mlp", "",
    )  # fmt: skip
    last_norm: ClassVar[str] = "model.norm"
    """The name of the norm after the last block."""

    attention_output: ClassVar[str] = "self_attn.o_proj"
    """The name of the projection of attention's output, in its block."""

    def has_bias(self, name: str) -> bool:
        """Whether a projection has a bias, by its name in the block."""
        return False

    @property
    def rotary_dim(self) -> int:
        """The width of the rotated part of a head."""
        return self.d_head

    def buffers(self, seq_len: int) -> tuple[Buffer, ...]:
        names = "rotary_emb.inv_freq", "rotary_emb.original_inv_freq"
        return tuple([buffer_of(name, (self.rotary_dim // 2,), FP32) for name in names])

    def norm(self, x: Tensor, name: str) -> Tensor:
        """A norm of the family."""
        return rms_norm_with_locals(x, name)

    def projected(self, x: Tensor, name: str, n_out: int) -> Tensor:
        """A projection of the block."""
        return linear(x, name, n_out, bias=self.has_bias(name), split="columns")

    def embed(self, tokens: Tensor) -> Tensor:
        x = self.embedded(tokens)
        self.rotation(tokens)
        return x

    def embedded(self, tokens: Tensor) -> Tensor:
        """The embeddings of tokens."""
        return embedding(tokens, self.token_table, self.vocab_size, self.d_model)

    def rotation(self, tokens: Tensor) -> None:
        """Make the arguments of all blocks: position ids, masks, and the tables of rotary angles."""
        shared, context = tokens.tape.shared, tokens.tape.context
        if context.casts_inputs:
            shared[N_TOKENS] = tokens.tape.new(N_TOKENS, (), context.weight_dtype)
        shared["positions"] = offset_positions(tokens)
        self.masks(tokens)
        shared["cosines"], shared["sines"] = self.tables(tokens)

    def masks(self, tokens: Tensor) -> None:
        """Make the masks of attention; where a kernel's own does, none is made."""
        look_for_packed_sequences(tokens)

    def tables(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the rotary angles."""
        return halves_rotation(tokens, self.rotary_dim, tokens.tape.context.weight_dtype)

    def receive(self, tokens: Tensor) -> None:
        self.rotation(tokens)

    def block(self, x: Tensor, kind: str) -> Tensor:
        x = x + self.attention(self.norm(x, "input_layernorm"), kind)
        return x + self.feed_forward(self.norm(x, "post_attention_layernorm"))

    def attention(self, x: Tensor, kind: str) -> Tensor:
        """Self-attention of the normed input, in a block of this kind."""
        q, k, v = self.queries_keys_values(x)
        q, k = self.rotated(q, k)
        return self.projected(merged_heads(self.attended(q, k, v, kind)), self.attention_output, self.d_model)

    def queries_keys_values(self, x: Tensor) -> Sequence[Tensor]:
        """Queries, keys and values of the normed input, each (batch, seq, heads, d_head)."""
        n_heads = {"q_proj": self.n_heads, "k_proj": self.n_kv_heads, "v_proj": self.n_kv_heads}
        return [self.head_projection(x, name, n) for name, n in n_heads.items()]

    def rotated(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys, rotated."""
        tables = self.rotation_tables(q)
        return rope_by_halves(q, *tables), rope_by_halves(k, *tables)

    def rotation_tables(self, x: Tensor) -> tuple[Tensor, ...]:
        """The tables that queries and keys are rotated with: cosines and sines of the angles."""
        return x.tape.shared["cosines"], x.tape.shared["sines"]

    def attended(self, q: Tensor, k: Tensor, v: Tensor, kind: str) -> Tensor:
        """Attention's output for each head, of queries and keys that have been rotated."""
        return attention(q.tape.cast(q, v.dtype), q.tape.cast(k, v.dtype), v)

    def head_projection(self, x: Tensor, name: str, n: int) -> Tensor:
        """Queries, keys or values of `n` heads, (batch, seq, heads, d_head)."""
        return heads(self.projected(x, f"self_attn.{name}", n * self.d_head), self.d_head)

    def head_norm(self, x: Tensor, name: str) -> Tensor:
        """A norm of each head."""
        batch, seq, n, d_head = x.shape
        return self.norm(x.view(batch, seq * n, d_head), name).view(batch, seq, n, d_head)

    def activation(self, x: Tensor) -> Tensor:
        """The activation of the feed-forward layer."""
        return silu(x)

    def feed_forward(self, x: Tensor) -> Tensor:
        """The feed-forward layer of the normed input."""
        gate = self.activation(self.projected(x, "mlp.gate_proj", self.d_ff))
        gated = gate * self.projected(x, "mlp.up_proj", self.d_ff)
        del gate
        return self.projected(gated, "mlp.down_proj", self.d_model)

    def head(self, x: Tensor) -> Tensor:
        x = self.norm(x, self.last_norm)
        return self.logits(x)


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowedDecoder(HuggingFaceDecoder):
    """A decoder whose queries see no key that is `window` or more tokens before them (0: no window).

    A sequence that reaches beyond it needs a mask, with which keys and values are copied for each query head.

    Source: transformers.masking_utils, sliding_window_causal_mask_function, _ignore_causal_mask_sdpa;
    transformers.integrations.sdpa_attention, sdpa_attention_forward.
    """

    window: int = 0

    def __post_init__(self) -> None:
        HuggingFaceDecoder.__post_init__(self)
        object.__setattr__(self, "window", checked_count("window", self.window, least=0))

    def masks(self, tokens: Tensor) -> None:
        HuggingFaceDecoder.masks(self, tokens)
        seq = tokens.shape[1]
        if 0 < self.window <= seq and not {BLOCKS, SLIDING}.isdisjoint(self.kinds):
            mask = window_mask(tokens)
            if tokens.tape.kinds.isdisjoint({BLOCKS, SLIDING}):
                tokens.tape.hold(mask)
            else:
                tokens.tape.shared["mask"] = mask

    def attended(self, q: Tensor, k: Tensor, v: Tensor, kind: str) -> Tensor:
        mask = q.tape.shared.get("mask") if kind in (BLOCKS, SLIDING) else None
        if mask is None:
            return HuggingFaceDecoder.attended(self, q, k, v, kind)
        if k.shape != q.shape:
            k, v = (repeated_heads(x, self.n_heads, head_major=True, copies=False) for x in (k, v))
        return attention(q.tape.cast(q, v.dtype), q.tape.cast(k, v.dtype), v, mask=mask)


def offset_positions(tokens: Tensor) -> Tensor:
    """The ids 0 to seq - 1, to which the number of cached tokens is added."""
    with tokens.tape.workspace() as first:
        first.new("position ids without an offset", tokens.shape[1:], INT64)
        return position_ids(tokens)


def look_for_packed_sequences(tokens: Tensor) -> None:
    """Allocate and free the tensors of the check that each row's positions are of one sequence.

    Under a trainer, of the check that its mask pads no token.

    Source: transformers.masking_utils, find_packed_sequence_indices, _ignore_causal_mask_sdpa.
    """
    tape, shape = tokens.tape, tokens.shape
    batch, seq = shape
    if tape.context.trainer:  # the mask of padding comes with the tokens, and is all ones
        with tape.workspace() as mask:
            mask.new("mask of padding, as bool", shape, BOOL)
            with tape.workspace() as summed:
                summed.new("unmasked tokens", (), INT64)
                summed.new("whether all are", (), BOOL)
        return
    with tape.workspace() as kept:
        kept.new("positions before the first", (batch, 1), INT64)
        with tape.workspace() as joined:
            joined.new("positions with the one before", (batch, seq + 1), INT64)
            kept.new("differences of positions", shape, INT64)
        with tape.workspace() as summed:
            summed.new("starts of sequences", shape, BOOL)
            kept.new("sequences before each token", shape, INT64)
            summed.new("starts as int64", shape, INT64)
        kept.new("rows of one sequence", (batch,), BOOL)
        kept.new("all rows of one sequence", (), BOOL)


def causal_mask(tokens: Tensor) -> Tensor:
    """The mask (1, 1, seq, seq) of keys that are not after their query.

    Source: transformers.masking_utils, sdpa_mask, causal_mask_function.
    """
    tape, seq = tokens.tape, tokens.shape[1]
    with tape.workspace() as ranges:
        _ranges(tokens, ranges)
        return tape.new("causal mask", (1, 1, seq, seq), BOOL)


def window_mask(tokens: Tensor) -> Tensor:
    """The mask (1, 1, seq, seq) of a window: of keys not before it, and not after their query.

    Source: transformers.masking_utils, sdpa_mask, and_masks, sliding_window_overlay.
    """
    tape, seq = tokens.tape, tokens.shape[1]
    shape = 1, 1, seq, seq
    with tape.workspace() as ranges, tape.workspace() as parts:
        _ranges(tokens, ranges)
        with tape.workspace() as window:
            window.new("true", (), BOOL)
            with tape.workspace() as starts:
                starts.new("first keys of windows", (seq,), INT64)
                window.new("keys not before the window", shape, BOOL)
            parts.new("keys not before the window, and true", shape, BOOL)
        parts.new("keys not after the query", shape, BOOL)
        return tape.new("mask of the window", shape, BOOL)


def _ranges(tokens: Tensor, into: Workspace) -> None:
    """The indices of samples, of one head, and of queries and keys, that a mask is a function of.

    Raises:
        MissingRule: where a mask of padding is another argument.
    """
    tape, (batch, seq) = tokens.tape, tokens.shape
    if tape.context.trainer:
        raise MissingRule(
            f"trainer='huggingface' hands over a mask of padding, and no rule joins it with a mask "
            f"over {seq} tokens; use trainer='none', or sequences shorter than the window."
        )
    into.new("samples", (batch,), INT64)
    into.new("head", (1,), INT64)
    for name in ("queries", "keys"):
        with tape.workspace() as first:
            first.new(f"{name} without an offset", (seq,), INT64)
            into.new(name, (seq,), INT64)


def decoder_family(
    cls: type[HuggingFaceDecoder],
    architecture: str,
    *,
    model_type: str = "",
    refuses: Sequence[str] = (),
    activation: tuple[str, str, tuple[str, ...]] = SILU,
    flags: Sequence[str] = (),
    own: Callable[[Config], Mapping[str, Any]] = lambda config: {},
    **sizes: Any,
) -> Family:
    """The family of a decoder that only transformers runs, whose class there is `architecture`.

    Of a config.json, `model_type` is the family's name if left out; settings that it `refuses` must not be
    set; `activation` is as `SILU`; `flags` are fields of `cls` that it calls the same; `own` reads further
    fields. `sizes` are the defaults in transformers' configuration that differ from `decoder_sizes`.
    """
    defaults: dict[str, Any] = {field.name: field.default for field in fields(cls)}

    def read(config: Config, name: str) -> Model:
        config.refuse(*refuses)
        config.one_of(*activation)
        found = decoder_sizes(config, name, **sizes)
        found |= {flag: config.flag(flag, default=defaults[flag]) for flag in flags}
        return cls(**found, **own(config))

    readers = {model_type or cls.family: Reader(architecture, read)}
    return Family(implementations={"huggingface": cls}, readers=readers)


def decoder_sizes(
    config: Config,
    name: str,
    *,
    n_layers: int = 32,
    d_model: int = 4096,
    n_heads: int = 32,
    n_kv_heads: int = 0,
    d_head: int = 0,
    d_ff: int = 11008,
    vocab_size: int = 32000,
    max_seq_len: int = 2048,
    tied_head: bool = False,
) -> dict[str, Any]:
    """A decoder's sizes; the arguments are transformers' defaults of the family, where they are not Llama's.

    0: they follow from other sizes.

    Raises:
        InvalidValue: a value that is no size; dropout of attention.
    """
    if (rate := config.fraction("attention_dropout", 0.0)) > 0:
        raise WithoutRule(
            f"attention_dropout={rate} is not allowed: memplan has no rule for it here; set it to 0.0."
        )
    n_heads = config.count("num_attention_heads", n_heads)
    given_kv_heads = "num_key_value_heads" in config.values or not n_kv_heads
    return {
        "name": name,
        "n_layers": config.count("num_hidden_layers", n_layers),
        "d_model": config.count("hidden_size", d_model),
        "n_heads": n_heads,
        "n_kv_heads": config.count("num_key_value_heads", n_heads if given_kv_heads else n_kv_heads),
        "d_head": config.count("head_dim", d_head),
        "d_ff": config.count("intermediate_size", d_ff),
        "vocab_size": config.count("vocab_size", vocab_size),
        "max_seq_len": config.count("max_position_embeddings", max_seq_len),
        "tied_head": config.flag("tie_word_embeddings", default=tied_head),
    }
