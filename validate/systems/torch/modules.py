"""The torch module that a memplan Model describes: the same parameters and operations, in the same order."""

from functools import reduce
from operator import add
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from memplan.models import Decoder
from memplan.models.gpt import Gpt
from memplan.models.llama import Llama
from memplan.models.torchtitan import TorchtitanLlama
from memplan.plan import Recompute
from memplan.tracing.torchtitan import (
    RmsNormByParts,
    TorchtitanBlock,
    kept_contexts,
    rotated,
    rotations,
    second_products_kept,
)


class GptAttention(nn.Module):
    """Multi-head self-attention with one projection for queries, keys and values each."""

    def __init__(self, model: Gpt) -> None:
        super().__init__()
        d = model.d_model
        self.d_head = model.d_head
        self.dropout = model.dropout
        self.wq = nn.Linear(d, d)
        self.wk = nn.Linear(d, d)
        self.wv = nn.Linear(d, d)
        self.wo = nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, self.d_head)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
        return cast(Tensor, self.wo(y.transpose(1, 2).flatten(2)))


class GptFeedForward(nn.Module):
    """Two linears around a GELU (tanh form, as in GPT-2)."""

    def __init__(self, model: Gpt) -> None:
        super().__init__()
        self.w1 = nn.Linear(model.d_model, model.d_ff)
        self.w2 = nn.Linear(model.d_ff, model.d_model)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.w2(F.gelu(self.w1(x), approximate="tanh")))


class GptBlock(nn.Module):
    """Pre-norm block: attention, then feed-forward, each dropped out and added to the residual."""

    def __init__(self, model: Gpt) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(model.d_model)
        self.attention = GptAttention(model)
        self.ffn_norm = nn.LayerNorm(model.d_model)
        self.feed_forward = GptFeedForward(model)
        self.dropout = model.dropout

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._drop(self.attention(self.attention_norm(x)))
        return x + self._drop(self.feed_forward(self.ffn_norm(x)))

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


class GptEmbedding(nn.Module):
    """Token and learned position embeddings, added and dropped out."""

    def __init__(self, model: Gpt) -> None:
        super().__init__()
        self.tokens = nn.Embedding(model.vocab_size, model.d_model)
        self.positions = nn.Embedding(model.max_seq_len, model.d_model)
        self.dropout = model.dropout
        self.sequence_shard = (0, 1)
        """(rank, ranks) of the tensor axis when the sequence is divided over it."""

    def forward(self, tokens: Tensor) -> Tensor:
        rank, ranks = self.sequence_shard
        length = tokens.shape[1] // ranks
        positions = torch.arange(rank * length, (rank + 1) * length, device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions)
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


class LlamaAttention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, model: Llama) -> None:
        super().__init__()
        d, width = model.d_model, model.d_head
        self.d_head = width
        self.wq = nn.Linear(d, model.n_heads * width, bias=model.attention_bias)
        self.wk = nn.Linear(d, model.n_kv_heads * width, bias=model.attention_bias)
        self.wv = nn.Linear(d, model.n_kv_heads * width, bias=model.attention_bias)
        self.wo = nn.Linear(model.n_heads * width, d, bias=model.attention_bias)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, self.d_head)) for w in (self.wq, self.wk, self.wv))
        q, k = rotated(q, rotation), rotated(k, rotation)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        grouped = q.shape[1] != k.shape[1]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return cast(Tensor, self.wo(y.transpose(1, 2).flatten(2)))


class LlamaFeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, model: Llama) -> None:
        super().__init__()
        self.w1 = nn.Linear(model.d_model, model.d_ff, bias=model.mlp_bias)
        self.w3 = nn.Linear(model.d_model, model.d_ff, bias=model.mlp_bias)
        self.w2 = nn.Linear(model.d_ff, model.d_model, bias=model.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.w2(F.silu(self.w1(x)) * self.w3(x)))


class LlamaBlock(nn.Module):
    """Pre-norm block: attention, then feed-forward, each added to the residual."""

    def __init__(self, model: Llama) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(model.d_model, eps=1e-5)
        self.attention = LlamaAttention(model)
        self.ffn_norm = nn.RMSNorm(model.d_model, eps=1e-5)
        self.feed_forward = LlamaFeedForward(model)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation)
        return cast(Tensor, x + self.feed_forward(self.ffn_norm(x)))


class LlamaEmbedding(nn.Module):
    """Token embeddings."""

    def __init__(self, model: Llama | TorchtitanLlama) -> None:
        super().__init__()
        self.tokens = nn.Embedding(model.vocab_size, model.d_model)

    def forward(self, tokens: Tensor) -> Tensor:
        return cast(Tensor, self.tokens(tokens))


class Head(nn.Module):
    """The final norm and the projection to the vocabulary."""

    def __init__(self, model: Decoder) -> None:
        super().__init__()
        match model:
            case Gpt():
                self.norm: nn.Module = nn.LayerNorm(model.d_model)
            case Llama():
                self.norm = nn.RMSNorm(model.d_model, eps=1e-5)
            case TorchtitanLlama():
                self.norm = RmsNormByParts(model.d_model)
            case _:
                raise NotImplementedError(type(model).__name__)
        self.output = nn.Linear(model.d_model, model.vocab_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.output(self.norm(x)))


class Transformer(nn.Module):
    """A whole model, or one pipeline stage of it: `layers` blocks, with the ends it owns: `first`, `last`.

    The forward pass maps token ids (first stage) or hidden states to hidden states or, on the last stage,
    logits. `autocast_dtype` runs it under autocast; `recompute` keeps only the input of each of the first
    `recompute_blocks` blocks (None: all), and if selective what `KEPT_OPERATIONS` made of it. `checkpoint` is
    PyTorch's function, or one around it. With `skips_output` it ends in the last norm's output, which
    torchtitan's loss passes through the output layer.
    """

    def __init__(
        self, model: Decoder, layers: range, *, seq_len: int, first: bool = True, last: bool = True
    ) -> None:
        super().__init__()
        self.embedding: nn.Module | None = None
        self.head: Head | None = None
        rotation: Tensor | None = None
        match model:
            case Gpt():
                self.embedding = GptEmbedding(model) if first else None
                self.blocks = nn.ModuleDict({str(i): GptBlock(model) for i in layers})
            case Llama():
                self.embedding = LlamaEmbedding(model) if first else None
                self.blocks = nn.ModuleDict({str(i): LlamaBlock(model) for i in layers})
                rotation = rotations(seq_len, model.d_head, model.rope_theta)
            case TorchtitanLlama():
                self.embedding = LlamaEmbedding(model) if first else None
                self.blocks = nn.ModuleDict({str(i): TorchtitanBlock(model) for i in layers})
                rotation = rotations(seq_len, model.d_head, model.rope_theta)
            case _:
                raise NotImplementedError(type(model).__name__)
        self.rotation: Tensor | None
        self.register_buffer("rotation", rotation, persistent=False)
        self.head = Head(model) if last else None
        if model.tied_head and self.head is not None and self.embedding is not None:
            self.head.output.weight = self.embedding.tokens.weight
        self.autocast_dtype: torch.dtype | None = None
        self.recompute: Recompute = "none"
        self.recompute_blocks: int | None = None
        self.checkpoint = checkpoint
        self.skips_output = False

    @property
    def tied(self) -> bool:
        """Whether the projection to the vocabulary is the token table itself."""
        if self.head is None or self.embedding is None:
            return False
        return self.head.output.weight is cast(nn.Embedding, self.embedding.tokens).weight

    def tie(self) -> None:
        """Make the projection to the vocabulary the token table itself, where this stage has both.

        `parallelize_module` gives each of the two a weight of its own, so that cutting unties them.
        """
        if self.head is not None and self.embedding is not None:
            self.head.output.weight = cast(nn.Embedding, self.embedding.tokens).weight

    def forward(self, x: Tensor) -> Tensor:
        if self.autocast_dtype is None:
            return self._forward(x)
        with torch.autocast(x.device.type, dtype=self.autocast_dtype):
            return self._forward(x)

    def _forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        arguments = () if self.rotation is None else (self.rotation,)
        blocks = list(self.blocks.values())
        n_again = 0 if self.recompute == "none" else self.recompute_blocks
        for block in blocks[:n_again]:
            x = self._recomputed(block, x, *arguments)
        for block in blocks[len(blocks) if n_again is None else n_again :]:
            x = block(x, *arguments)
        if self.head is not None and self.skips_output:
            return cast(Tensor, self.head.norm(x))
        return x if self.head is None else cast(Tensor, self.head(x))

    def _recomputed(self, block: nn.Module, *arguments: Tensor) -> Tensor:
        contexts = kept_contexts
        if isinstance(block, TorchtitanBlock):
            contexts = second_products_kept
        context_fn = contexts if self.recompute == "selective" else noop_context_fn
        return cast(Tensor, self.checkpoint(block, *arguments, use_reentrant=False, context_fn=context_fn))


def token_loss(logits: Tensor, targets: Tensor, *, chunks: int = 1) -> Tensor:
    """Mean cross-entropy of `logits` (batch, seq, vocab) in float32 against `targets` (batch, seq).

    In `chunks` pieces of the sequence (`torch.chunk`'s), each widened and summed on its own, as torchtune's
    `CEWithChunkedOutputLoss` does.
    """
    if chunks == 1:
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
    pieces = zip(logits.chunk(chunks, dim=1), targets.chunk(chunks, dim=1), strict=True)
    sums = (F.cross_entropy(x.float().flatten(0, 1), y.flatten(), reduction="sum") for x, y in pieces)
    return reduce(add, sums) / targets.numel()
