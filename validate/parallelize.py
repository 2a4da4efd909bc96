"""A Plan applied to a torch module with PyTorch's own tools.

Mesh axes, outermost first: pp, dp, tp. ZeRO 0 is `DistributedDataParallel`, 1 adds
`ZeroRedundancyOptimizer`, 2 and 3 are FSDP2's `fully_shard` (without and with resharding after forward);
tensor and sequence parallelism are `parallelize_module`, pipelines `torch.distributed.pipelining`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from memplan import Model, Plan
from memplan.plan import stage_layers
from validate.modules import GptEmbedding, Transformer

OPTIMIZERS: Final[dict[str, Callable[..., torch.optim.Optimizer]]] = {
    "sgd": torch.optim.SGD,
    "sgd-momentum": partial(torch.optim.SGD, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}
"""What each optimizer name means."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinates:
    """A rank's place on the mesh."""

    pp: int
    dp: int
    tp: int


def coordinates(plan: Plan, rank: int) -> Coordinates:
    """Where `rank` sits: rank = (pp_rank * dp + dp_rank) * tp + tp_rank.

    >>> coordinates(Plan(dp=2, tp=2, global_batch=2), 3)
    Coordinates(pp=0, dp=1, tp=1)
    """
    return Coordinates(pp=rank // (plan.dp * plan.tp), dp=rank // plan.tp % plan.dp, tp=rank % plan.tp)


def axes(plan: Plan) -> dict[str, int]:
    """The mesh axes with more than one rank, outermost first, and their sizes.

    >>> axes(Plan(dp=2, tp=4, global_batch=2))
    {'dp': 2, 'tp': 4}
    """
    return {name: n for name, n in (("pp", plan.pp), ("dp", plan.dp), ("tp", plan.tp)) if n > 1}


def device_mesh(plan: Plan, device: torch.device) -> DeviceMesh | None:
    """The mesh of all ranks, or None for a single one."""
    sizes = axes(plan)
    if not sizes:
        return None
    return init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def stage_module(
    model: Model, plan: Plan, at: Coordinates, *, seed: int, device: torch.device
) -> Transformer:
    """This rank's pipeline stage in full, before any sharding.

    Every rank draws the whole model's float32 weights from one seed and keeps its own layers, so that all
    plans, and the single-process run they are checked against, start from the same weights.
    """
    torch.manual_seed(seed)
    whole = Transformer(model, range(model.n_layers), seq_len=plan.seq_len)
    if model.tied_head and whole.head is not None:
        nn.init.normal_(whole.head.output.weight, std=model.d_model**-0.5)
    stage = Transformer(model, stage_layers(model.n_layers, plan.pp, at.pp), seq_len=plan.seq_len)
    weights = whole.state_dict()
    stage.load_state_dict({name: weights[name] for name in stage.state_dict()})
    if plan.precision == "bf16":
        for parameter in stage.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
    return stage.to(device)


def parallel_module(stage: Transformer, plan: Plan, at: Coordinates, mesh: DeviceMesh | None) -> nn.Module:
    """`stage` cut over the tensor axis, then replicated or sharded over the data axis."""
    stage.recompute = plan.recompute == "full"
    sharded = plan.dp > 1 and plan.zero >= 2
    if plan.precision == "bf16-mixed" and not sharded:
        stage.autocast_dtype = torch.bfloat16
    if mesh is None:
        return stage
    if plan.tp > 1:
        cut_tensors(stage, plan, at, mesh["tp"])
    if sharded:
        shard_weights(stage, plan, mesh["dp"])
    elif plan.dp > 1:
        return replicated(stage, mesh["dp"])
    return stage


def replicated(stage: Transformer, mesh: DeviceMesh) -> nn.Module:
    """`stage` under DistributedDataParallel with its default options."""
    return DistributedDataParallel(stage, device_mesh=mesh)


def shard_weights(stage: Transformer, plan: Plan, mesh: DeviceMesh) -> None:
    """FSDP2: every block its own unit, then the root with what is left (embedding and head)."""
    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if plan.precision == "bf16-mixed"
        else MixedPrecisionPolicy()
    )
    for block in stage.blocks.values():
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=plan.zero == 3)
    if plan.zero == 3:
        fully_shard(stage, mesh=mesh, mp_policy=policy)
    else:
        fully_shard(stage, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


def cut_tensors(stage: Transformer, plan: Plan, at: Coordinates, mesh: DeviceMesh) -> None:
    """Tensor parallelism, with the sequence divided between the cut regions if the plan says so."""
    between = Shard(1) if plan.sequence_parallel else Replicate()
    tied = stage.tied
    if stage.embedding is not None:
        parallelize_module(stage.embedding, mesh, _embedding_styles(stage.embedding, plan))
        if isinstance(stage.embedding, GptEmbedding) and plan.sequence_parallel:
            stage.embedding.sequence_shard = (at.tp, plan.tp)
    for block in stage.blocks.values():
        parallelize_module(block, mesh, _block_styles(block, plan, stage.rotation is not None))
    if stage.head is not None:
        styles: dict[str, ParallelStyle] = {
            "output": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False)
        }
        if plan.sequence_parallel:
            styles["norm"] = SequenceParallel()
        parallelize_module(stage.head, mesh, styles)
    if tied:
        stage.tie()


def _embedding_styles(embedding: nn.Module, plan: Plan) -> dict[str, ParallelStyle]:
    between = Shard(1) if plan.sequence_parallel else Replicate()
    styles: dict[str, ParallelStyle] = {
        "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
    }
    if plan.sequence_parallel and isinstance(embedding, GptEmbedding):
        styles["positions"] = SequenceParallel(sequence_dim=0, use_local_output=True)
    return styles


def _block_styles(block: nn.Module, plan: Plan, rotary: bool) -> dict[str, ParallelStyle]:
    between = Shard(1) if plan.sequence_parallel else Replicate()
    columns, rows = ColwiseParallel(), RowwiseParallel(output_layouts=between)
    layouts: tuple[Any, ...] = (between, None) if rotary else (between,)
    desired: tuple[Any, ...] = (Replicate(), None) if rotary else (Replicate(),)
    feed_forward = cast(nn.Module, block.feed_forward)
    styles: dict[str, ParallelStyle] = {
        "attention": PrepareModuleInput(input_layouts=layouts, desired_input_layouts=desired),
        "attention.wq": columns,
        "attention.wk": columns,
        "attention.wv": columns,
        "attention.wo": rows,
        "feed_forward": PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),)),
        "feed_forward.w1": columns,
        "feed_forward.w2": rows,
    }
    if hasattr(feed_forward, "w3"):
        styles["feed_forward.w3"] = columns
    if plan.sequence_parallel:
        styles["attention_norm"] = styles["ffn_norm"] = SequenceParallel()
    return styles


def optimizer_of(
    module: nn.Module, plan: Plan, mesh: DeviceMesh | None, *, learning_rate: float
) -> torch.optim.Optimizer:
    """The plan's optimizer over the module's parameters, its state divided over the data axis at ZeRO 1."""
    kind = OPTIMIZERS[plan.optimizer]
    if plan.zero == 1 and mesh is not None and plan.dp > 1:
        return ZeroRedundancyOptimizer(
            module.parameters(),
            optimizer_class=cast(type[torch.optim.Optimizer], kind),
            process_group=mesh.get_group("dp"),
            lr=learning_rate,
        )
    return kind(module.parameters(), lr=learning_rate)
