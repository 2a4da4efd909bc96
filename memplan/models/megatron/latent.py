"""Multi-latent attention: queries, keys and values from compressed states, as DeepSeek-V3 has them.

Source: megatron.core.transformer.multi_latent_attention:MLASelfAttention.get_query_key_value_tensors.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

from memplan.models.megatron.attention import Qkv, with_angles
from memplan.models.megatron.config import TransformerConfig
from memplan.models.megatron.layers import sent, split
from memplan.models.megatron.linears import column_parallel_linear, norm_column_linear
from memplan.shapes import FP32, Buffer, DType, buffer_of
from memplan.tape import Expanded, Grads, Saved, Tensor

NAME: Final = "self_attention.linear_"
"""How the names of its products begin."""

ORIGINAL_POSITIONS: Final = 4096
"""The positions of YaRN's first cache of cosines and sines (`original_max_position_embeddings`)."""

CLEARS_CACHE: Final = (0, 16)
"""From this release on (5153663876) the angles of YaRN's first cache are dropped."""


class MLA(NamedTuple):
    """Multi-latent attention, by Megatron's arguments; `q_lora_rank` of 0: queries are not compressed."""

    q_lora_rank: int = 0
    kv_lora_rank: int = 32
    qk_head_dim: int = 128
    qk_pos_emb_head_dim: int = 64
    v_head_dim: int = 128

    @property
    def width(self) -> int:
        """The features of a query or a key of one head."""
        return self.qk_head_dim + self.qk_pos_emb_head_dim


class Compressed(NamedTuple):
    """The compressed states: of queries, of keys and values, and the keys' features turned by position."""

    q: Tensor
    kv: Tensor
    k_pos: Tensor


def latent_buffers(
    mla: MLA, seq_len: int, dtype: DType, config: TransformerConfig, *, fused: bool
) -> Iterator[Buffer]:
    """What YaRN's embedding of one layer keeps: frequencies, cached cosines and sines, and cached angles.

    Cosines and sines are buffers of the module, and so in the type of the weights.

    Source: megatron.core.models.common.embeddings.yarn_rotary_pos_embedding:YarnRotaryEmbedding,
    megatron.core.transformer.module:Float16Module.
    """
    width = mla.qk_pos_emb_head_dim
    for name in ("inv_freq", "inv_freq_extra", "inv_freq_inter"):
        yield buffer_of(name, (width // 2,), FP32)
    positions = seq_len if fused else ORIGINAL_POSITIONS
    for name in ("cos_cached", "sin_cached"):
        yield buffer_of(name, (positions, 1, 1, width), dtype)
    yield buffer_of("rotary angles", (seq_len, 1, 1, width), FP32)
    if config.release < CLEARS_CACHE:
        yield buffer_of("rotary angles of the first cache", (ORIGINAL_POSITIONS, 1, 1, width), FP32)


def compressed(h: Tensor, mla: MLA, config: TransformerConfig) -> Compressed:
    """The compressed states of the normed hidden states, by products that each tensor rank computes whole.

    The keys' features for positions are gathered along the sequence.

    Source: megatron.core.transformer.multi_latent_attention:MLASelfAttention._qkv_down_projection,
    MLASelfAttention.set_for_recompute_input_layernorm.
    """
    alone, pos = config._replace(tp=1, sequence_parallel=False), mla.qk_pos_emb_head_dim

    def down(name: str, width: int) -> Tensor:
        again = "layernorm" in config.recompute_modules
        return column_parallel_linear(h, f"{NAME}{name}", width, alone, save_original_input=again)

    q = down("q_down_proj", mla.q_lora_rank) if mla.q_lora_rank else h
    combined = down("kv_down_proj", mla.kv_lora_rank + pos)
    kv, k_pos = split(combined, [(*h.shape[:-1], n) for n in (mla.kv_lora_rank, pos)])
    return Compressed(q, kv, gathered_along_sequence(k_pos, config))


def gathered_along_sequence(x: Tensor, config: TransformerConfig) -> Tensor:
    """The parts of the sequence of all tensor ranks under sequence parallelism; else x itself.

    Source: megatron.core.tensor_parallel.mappings:_GatherFromSequenceParallelRegion.
    """
    if not config.sequence_parallel:
        return x
    tape, (batch, seq, width), dtype = x.tape, x.shape, x.dtype
    own, whole = x.shape, (batch, seq * config.tp, width)

    def backward(grad: Tensor, saved: Saved) -> Grads:
        sent(grad.tape, "reduce_scatter", "gradient of the keys' positions", whole, dtype)
        return (grad.tape.new("scattered gradient", own, dtype),)

    node = tape.node((x.node,), (), backward)
    y = tape.new("keys' positions", whole, dtype, node)
    with tape.workspace() as copy:
        copy.new("contiguous", own, dtype)
        sent(tape, "all_gather", "keys' positions", whole, dtype)
    return y


def up_projected(
    of: Compressed, mla: MLA, n_heads: int, config: TransformerConfig, *, norms: bool, fused: bool
) -> Saved:
    """Queries, keys and values of `n_heads` heads; `norms`: the compressed states are normed before.

    `fused`: the queries are turned in place, and keys and values are written by one kernel.
    """
    q, kv, k_pos = of
    del of
    tape, dtype, pos = kv.tape, kv.dtype, mla.qk_pos_emb_head_dim

    def up(x: Tensor, name: str, width: int) -> Tensor:
        if norms:
            return norm_column_linear(x, "", f"{NAME}{name}", n_heads * width, config, bias=False)
        return column_parallel_linear(x, f"{NAME}{name}", n_heads * width, config)

    if mla.q_lora_rank:
        q = up(q, "q_up_proj", mla.width)
    else:
        q = column_parallel_linear(q, f"{NAME}q_proj", n_heads * mla.width, config)
    batch, seq, _ = q.shape
    heads = batch, seq, n_heads
    if not fused:
        q = _turned_queries(q, (*heads, mla.width), pos)
    kv = up(_contiguous(kv), "kv_up_proj", mla.qk_head_dim + mla.v_head_dim)
    whole, k_shape, one = kv.shape, (*heads, mla.width), (batch, seq, 1, pos)
    k_pos = k_pos.view(*one)
    if not fused:
        k_pos = with_angles(k_pos, pos)
    values: list[Tensor] = []

    def of_keys(grad: Tensor, saved: Saved) -> Grads:
        """The gradients of the keys and of the values, which is there already, put together."""
        tape = grad.tape
        expanded = Tensor(tape, (*heads, pos), dtype, grad.storage, None, True)
        both = tape.new("grad of keys and values", whole, dtype)
        values.clear()
        return both, Expanded(expanded, one, dtype)

    def of_values(grad: Tensor, saved: Saved) -> Grads:
        values.append(grad)
        return (None,)

    key = tape.new("keys", k_shape, dtype, tape.node((kv.node, k_pos.node), (), of_keys))
    value = tape.new("values", (*heads, mla.v_head_dim), dtype, tape.node((kv.node,), (), of_values))
    return Tensor(tape, k_shape, dtype, q.storage, q.node), key, value


def _turned_queries(q: Tensor, shape: tuple[int, ...], pos: int) -> Tensor:
    """Queries of this shape whose last `pos` features are turned by position."""
    tape, dtype, whole = q.tape, q.dtype, q.shape
    node = tape.node((q.node,), (), lambda grad, saved: (grad.tape.new("grad of queries", whole, dtype),))
    turned = with_angles(Tensor(tape, (*shape[:-1], pos), dtype, q.storage, node, True), pos)
    part = turned.shape

    def backward(grad: Tensor, saved: Saved) -> Grads:
        return (Tensor(grad.tape, part, dtype, grad.storage, None, True),)

    return tape.new("queries", shape, dtype, tape.node((turned.node,), (), backward))


def _contiguous(x: Tensor) -> Tensor:
    """x itself, or a copy of a view, as Transformer Engine's modules take it (`prepare_forward`)."""
    if not x.is_view:
        return x
    node = x.tape.node((x.node,), (), lambda grad, saved: (grad,))
    return x.tape.new("contiguous", x.shape, x.dtype, node)


def latent_qkv(made: Saved) -> Qkv:
    """Queries, keys and values as attention takes them, each of which gets its own gradient."""
    q, k, v = made
    return Qkv(q, k, v, tuple([x.node for x in made]), None, separate=True)
