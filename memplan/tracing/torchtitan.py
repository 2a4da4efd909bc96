"""The modules of `memplan.models.torchtitan`, and how PyTorch recomputes them selectively."""

from collections import Counter
from collections.abc import Callable
from typing import Any, Final, cast, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from memplan.models.torchtitan import TorchtitanLlama
from memplan.tracing.float8 import styles_in_float8

KEPT_OPERATIONS: Final = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops._c10d_functional.all_reduce.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
]
"""The operations whose outputs selective recomputation keeps; all others are recomputed, all-gathers too.

Source: torchtitan's list of operations to save (torchtitan/distributed/activation_checkpoint.py), which keeps
every other `mm` and no all-reduce; here all products are kept, and all-reduces, which take the place of
reduce-scatters without sequence parallelism.
"""


def kept_contexts() -> Any:
    """The `context_fn` of `torch.utils.checkpoint` that keeps them."""
    return create_selective_checkpoint_contexts(KEPT_OPERATIONS)


def every_second_product_kept() -> Callable[..., CheckpointPolicy]:
    """torchtitan's policy of selective recomputation: of `KEPT_OPERATIONS` all, but every second product.

    Source: torchtitan/parallelisms/parallelize_llama.py (`_apply_ac_to_transformer_block`).
    """
    n_products = Counter[bool]()

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        again = operation not in KEPT_OPERATIONS
        if operation is torch.ops.aten.mm.default:
            n_products[context.is_recompute] += 1
            again = n_products[context.is_recompute] % 2 == 0
        return CheckpointPolicy.PREFER_RECOMPUTE if again else CheckpointPolicy.MUST_SAVE

    return policy


def second_products_kept() -> Any:
    """The `context_fn` of that policy, for one block."""
    return create_selective_checkpoint_contexts(every_second_product_kept())


def rotations(seq_len: int, d_head: int, theta: float, device: torch.device | None = None) -> Tensor:
    """The rotary angles as unit complex numbers, shape (seq_len, d_head / 2)."""
    frequencies = theta ** -(torch.arange(0, d_head, 2, device=device, dtype=torch.float32) / d_head)
    angles = torch.outer(torch.arange(seq_len, device=device, dtype=torch.float32), frequencies)
    return torch.polar(torch.ones_like(angles), angles)


def rotated(x: Tensor, rotation: Tensor) -> Tensor:
    """Heads `x` (batch, seq, heads, d_head) turned by their positions' angles, computed in float32."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotation[: x.shape[1], None]).flatten(3).type_as(x)


class RmsNormByParts(nn.Module):
    """RMSNorm operation by operation, the weight applied in the input's type.

    Source: torchtitan/models/norms.py (`RMSNorm`).
    """

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d_model))

    def forward(self, x: Tensor) -> Tensor:
        return self._normed(x.float()).type_as(x) * self.weight

    def _normed(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


class TorchtitanAttention(nn.Module):
    """Attention with a copy of the keys and values for each query head.

    Source: torchtitan/models/llama/model.py (`Attention`, `repeat_kv`).
    """

    def __init__(self, model: TorchtitanLlama) -> None:
        super().__init__()
        d, width = model.d_model, model.d_head
        self.d_head = width
        self.wq = nn.Linear(d, model.n_heads * width, bias=False)
        self.wk = nn.Linear(d, model.n_kv_heads * width, bias=False)
        self.wv = nn.Linear(d, model.n_kv_heads * width, bias=False)
        self.wo = nn.Linear(model.n_heads * width, d, bias=False)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, self.d_head)) for w in (self.wq, self.wk, self.wv))
        q, k = rotated(q, rotation), rotated(k, rotation)
        k, v = self._repeated(k, q.shape[2]), self._repeated(v, q.shape[2])
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return cast(Tensor, self.wo(y.transpose(1, 2).contiguous().flatten(2)))

    @staticmethod
    def _repeated(x: Tensor, n_heads: int) -> Tensor:
        batch, seq, n_kv_heads, width = x.shape
        if n_kv_heads == n_heads:
            return x
        copies = x.unsqueeze(3).expand(batch, seq, n_kv_heads, n_heads // n_kv_heads, width)
        return copies.reshape(batch, seq, n_heads, width)


class TorchtitanFeedForward(nn.Module):
    """SwiGLU.

    Source: torchtitan/models/llama/model.py (`FeedForward`).
    """

    def __init__(self, model: TorchtitanLlama) -> None:
        super().__init__()
        self.w1 = nn.Linear(model.d_model, model.d_ff, bias=False)
        self.w3 = nn.Linear(model.d_model, model.d_ff, bias=False)
        self.w2 = nn.Linear(model.d_ff, model.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.w2(F.silu(self.w1(x)) * self.w3(x)))


class TorchtitanBlock(nn.Module):
    """Pre-norm block.

    Source: torchtitan/models/llama/model.py (`TransformerBlock`).
    """

    def __init__(self, model: TorchtitanLlama) -> None:
        super().__init__()
        self.attention_norm = RmsNormByParts(model.d_model)
        self.attention = TorchtitanAttention(model)
        self.ffn_norm = RmsNormByParts(model.d_model)
        self.feed_forward = TorchtitanFeedForward(model)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation)
        return cast(Tensor, x + self.feed_forward(self.ffn_norm(x)))


@final
class TorchtitanTransformer(nn.Module):
    """The whole model, on the `meta` device: token ids to logits.

    Source: torchtitan/models/llama/model.py (`Transformer`).
    """

    def __init__(self, model: TorchtitanLlama, seq_len: int) -> None:
        super().__init__()
        with torch.device("meta"):
            self.embedding = nn.ModuleDict({"tokens": nn.Embedding(model.vocab_size, model.d_model)})
            self.blocks = nn.ModuleList([TorchtitanBlock(model) for _ in range(model.n_layers)])
            rotation = rotations(seq_len, model.d_head, model.rope_theta)
            self.register_buffer("rotation", rotation, persistent=False)
            norm, output = (
                RmsNormByParts(model.d_model),
                nn.Linear(model.d_model, model.vocab_size, bias=False),
            )
            self.head = nn.ModuleDict({"norm": norm, "output": output})
        if model.tied_head:
            output.weight = cast(nn.Embedding, self.embedding["tokens"]).weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding["tokens"](tokens)
        for block in self.blocks:
            x = block(x, self.rotation)
        return cast(Tensor, self.head["output"](self.head["norm"](x)))


STYLES: Final = (ColwiseParallel, RowwiseParallel, PrepareModuleInput)
"""How products by columns and by rows are divided, and their inputs prepared."""


def embedding_style(*, sequence_parallel: bool) -> ParallelStyle:
    """How the embedding of tokens is divided over tensor-parallel ranks: its rows."""
    return RowwiseParallel(input_layouts=Replicate(), output_layouts=_between(sequence_parallel))


def block_styles(
    *, sequence_parallel: bool, float8: str = "none", rotary: bool = True, gated: bool = True
) -> dict[str, ParallelStyle]:
    """How the modules of a block are divided, by their paths in it.

    `float8`: torchao's recipe, by whose styles inputs are cast before they are gathered if it has them;
    `rotary`: attention is called with angles too; `gated`: the feed-forward network has three products.

    Source: torchtitan/models/llama3/infra/parallelize.py (`apply_tp`).
    """
    by_columns, by_rows, prepared = styles_in_float8() if float8 == "tensorwise" else STYLES
    between, columns = _between(sequence_parallel), by_columns()
    rows = by_rows(output_layouts=between)
    layouts: tuple[Any, ...] = (between, None) if rotary else (between,)
    desired: tuple[Any, ...] = (Replicate(), None) if rotary else (Replicate(),)
    styles: dict[str, ParallelStyle] = {
        "attention": prepared(input_layouts=layouts, desired_input_layouts=desired),
        "attention.wq": columns,
        "attention.wk": columns,
        "attention.wv": columns,
        "attention.wo": rows,
        "feed_forward": prepared(input_layouts=(between,), desired_input_layouts=(Replicate(),)),
        "feed_forward.w1": columns,
        "feed_forward.w2": rows,
    }
    if gated:
        styles["feed_forward.w3"] = columns
    if sequence_parallel:
        styles["attention_norm"] = styles["ffn_norm"] = SequenceParallel()
    return styles


def head_styles(*, sequence_parallel: bool) -> dict[str, ParallelStyle]:
    """How the last norm and the head are divided, whose logits stay divided (`loss_parallel`)."""
    between = _between(sequence_parallel)
    output = ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False)
    return {"output": output} | ({"norm": SequenceParallel()} if sequence_parallel else {})


def _between(sequence_parallel: bool) -> Any:
    """The placement of activations between the regions of tensor parallelism."""
    return Shard(1) if sequence_parallel else Replicate()


def parallelize(
    module: TorchtitanTransformer, mesh: DeviceMesh, *, sequence_parallel: bool, float8: str
) -> None:
    """Divide the model over tensor-parallel ranks, as `block_styles` and its neighbours say."""
    tokens, output = (cast(Any, one) for one in (module.embedding["tokens"], module.head["output"]))
    tied = output.weight is tokens.weight
    how = {"sequence_parallel": sequence_parallel}
    parallelize_module(module.embedding, mesh, {"tokens": embedding_style(**how)})
    for block in module.blocks:
        parallelize_module(block, mesh, block_styles(**how, float8=float8))
    parallelize_module(module.head, mesh, head_styles(**how))
    if tied:
        output.weight = tokens.weight


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in float32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
