"""A Plan applied to a torch module with PyTorch's own tools.

Mesh axes, outermost first: pp, dp_replicate, dp, tp. ZeRO 0 is `DistributedDataParallel`, 1 adds
`ZeroRedundancyOptimizer`, 2 and 3 are FSDP2's `fully_shard` (without and with resharding after forward);
tensor and sequence parallelism are `parallelize_module`, pipelines `torch.distributed.pipelining`.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Final
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.distributed.tensor.parallel import ParallelStyle, SequenceParallel, parallelize_module
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from memplan import Plan
from memplan.engines.torch.options import torch_options
from memplan.models import Decoder
from memplan.plan import Rank, stage_layers
from memplan.shapes import DType
from memplan.tracing.float8 import with_float8
from memplan.tracing.torchtitan import block_styles, embedding_style, head_styles
from memplan.units import MiB
from validate.cases import option
from validate.standin import WEIGHT_STD, WithResult, materialised, with_results
from validate.systems.torch.compiled import compile_blocks
from validate.systems.torch.modules import GptEmbedding, Transformer

POWERSGD_FIRST_STEP: Final = 2
"""Gradients are compressed from the third step on: the least DDP allows, whose buckets the second rebuilds.

All else about PowerSGD is PyTorch's default: rank 1, error feedback, warm start, tensors compressed that
shrink to half or less.
"""


def axes(plan: Plan) -> dict[str, int]:
    """The mesh axes with more than one rank, outermost first, and their sizes.

    Beside expert-parallel ranks "dp" and "tp" are always there, beside context-parallel ones "dp".

    >>> axes(Plan(dp=2, tp=4, global_batch=2))
    {'dp': 2, 'tp': 4}
    """
    always = ("dp", "tp") if plan.ep > 1 else ("dp",) if plan.cp > 1 else ()
    return {axis: n for axis, n in plan.mesh.sizes.items() if n > 1 or axis in always}


def torch_dtype(dtype: DType) -> torch.dtype:
    """PyTorch's element type of the same name."""
    found: torch.dtype = getattr(torch, dtype.name)
    return found


def device_mesh(plan: Plan, device: torch.device) -> DeviceMesh | None:
    """The mesh of all ranks, or None for a single one."""
    sizes = axes(plan)
    if not sizes:
        return None
    mesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    if plan.cp > 1:
        mesh["dp", "cp"]._flatten(plan.shard_group)
    return mesh


def expert_mesh(plan: Plan, device: torch.device) -> DeviceMesh | None:
    """The same ranks as expert-parallel ones see them; None if there are none.

    Source: transformers.distributed.utils (`initialize_distributed_mesh`).
    """
    if plan.ep == 1:
        return None
    outer = {axis: n for axis, n in plan.mesh.sizes.items() if axis in ("pp", "dp_replicate") and n > 1}
    sizes = {**outer, "efsdp": plan.efsdp, "ep": plan.ep}
    return init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def stage_module(
    model: Decoder, plan: Plan, stage: int, *, seed: int | None, device: torch.device
) -> Transformer:
    """A pipeline stage in full, before any sharding; on the `meta` device its shapes only.

    Every rank draws the whole model's float32 weights from one seed and keeps its own layers, so that all
    plans, and the single-process run they are checked against, start from the same weights. Without a seed
    they are whatever the module starts with.
    """
    layers, first, last = stage_layers(model.n_layers, plan, stage), stage == 0, stage == plan.n_stages - 1
    with device:
        weights = {} if seed is None else _drawn_weights(model, plan, seed)
        module = Transformer(model, layers, seq_len=plan.seq_len, first=first, last=last)
    if weights:
        module.load_state_dict({name: weights[name] for name in module.state_dict()})
    for parameter in module.parameters():
        parameter.data = parameter.data.to(torch_dtype(plan.formats.stored))
    return module


def _drawn_weights(model: Decoder, plan: Plan, seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    whole = Transformer(model, range(model.n_layers), seq_len=plan.seq_len)
    if model.tied_head and whole.head is not None:
        nn.init.normal_(whole.head.output.weight, std=model.d_model**-0.5)
    return whole.state_dict()


def parallel_module(
    stage: Transformer, plan: Plan, at: Rank, mesh: DeviceMesh | None, device: torch.device
) -> nn.Module:
    """`stage` sharded over the tensor axis, then replicated or sharded over the data axis.

    A stage on `meta` gets its weights on `device`, or on the host under offload, after the tensor axis and
    before the data axis.
    """
    in_float8(stage, plan)
    stage.skips_output = torch_options(plan).chunked_loss == "ChunkedLossWrapper"
    if plan.tp > 1 and mesh is not None:
        cut_tensors(stage, plan, at, mesh["tp"])
    if not compile_blocks([stage.blocks], plan):
        stage.recompute, stage.recompute_blocks = plan.recompute, plan.recompute_blocks
        stage.checkpoint = checkpoint_of(plan, stage.checkpoint)
    if plan.autocasts:
        stage.autocast_dtype = torch_dtype(plan.formats.compute)
    if mesh is None:
        return materialised(stage, device)
    if plan.fsdp and torch_options(plan).fsdp_version == 1:
        return fully_sharded(stage, stage.blocks.values(), plan, mesh, device)
    if plan.fsdp:
        shard_weights(stage, _units(stage, plan), plan, mesh)
    materialised(stage, device, offload=plan.offload)
    return replicated(stage, plan, mesh[plan.shard_group]) if plan.ddp else stage


def in_float8(module: nn.Module, plan: Plan) -> nn.Module:
    """The module with its linears converted as the plan says."""
    options = torch_options(plan)
    return with_float8(module, options.float8, all_gather=options.float8_all_gather != "none")


def checkpoint_of(plan: Plan, checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    """The function that checkpoints a block: its arguments stay on the device, or are kept on the host.

    Source: `torch.distributed.algorithms._checkpoint.checkpoint_wrapper:OffloadWrapper`.
    """
    if option(plan, "activation_offloading", "none") != "save_on_cpu":
        return checkpoint

    def on_the_host(*args: Any, **kwargs: Any) -> Any:
        with save_on_cpu(pin_memory=True):
            return checkpoint(*args, **kwargs)

    return on_the_host


Hook = Callable[[Any, dist.GradBucket], Future[torch.Tensor]]
"""A communication hook of DDP."""


def awaited(hook: Hook) -> Hook:
    """`hook`, each all-reduce done before it goes on, so that its callbacks run in the caller's thread.

    They do with NCCL. With gloo they run in one of its threads, and what is alive depends on how fast those
    are. PowerSGD's hook could not do without: in a callback it waits for the next all-reduce, so that two
    buckets at a time hold both of gloo's threads for ever. DDP reserves the name of `bf16_compress_hook` for
    NCCL ("BF16 all reduce communication hook required CUDA 11+ and NCCL 2.10+"), but gloo sums bfloat16 too.
    """
    all_reduce = dist.all_reduce

    def awaited_all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        work = all_reduce(tensor, *args, **kwargs)
        work.wait()
        return WithResult(tensor) if dist.get_backend(kwargs.get("group")) == "fake" else work

    def in_turn(state: Any, bucket: dist.GradBucket) -> Future[torch.Tensor]:
        with patch.object(dist, "all_reduce", awaited_all_reduce):
            return hook(state, bucket)

    return in_turn


def replicated(stage: nn.Module, plan: Plan, mesh: DeviceMesh) -> nn.Module:
    """`stage` under DistributedDataParallel with the plan's options."""
    options = torch_options(plan)
    cap = None if options.bucket_cap_bytes is None else options.bucket_cap_bytes / MiB
    module = DistributedDataParallel(
        stage,
        device_mesh=mesh,
        bucket_cap_mb=cap,
        gradient_as_bucket_view=options.gradient_as_bucket_view,
        static_graph=options.static_graph,
    )
    group = mesh.get_group()
    match options.ddp_comm_hook:
        case "none" if dist.get_backend(group) == "fake":
            with_results(module, group)
        case "fp16":
            module.register_comm_hook(group, awaited(fp16_compress_hook))
        case "bf16":
            module.register_comm_hook(group, awaited(bf16_compress_hook))
        case "powersgd":
            state = PowerSGDState(group, start_powerSGD_iter=POWERSGD_FIRST_STEP)
            module.register_comm_hook(state, awaited(powerSGD_hook))
    return module


def shard_weights(
    module: nn.Module, units: Iterable[nn.Module | list[nn.Module]], plan: Plan, mesh: DeviceMesh
) -> None:
    """FSDP2: units from the inside out, the root last with what they leave over.

    With `zero=3` every unit but the root frees its weights after its forward pass (PyTorch's default), with
    `zero=2` none does.
    """
    options = fsdp_options(plan, mesh, plan.shard_group)
    for unit in (*units, module):
        fully_shard(unit, **options)


def fsdp_options(plan: Plan, mesh: DeviceMesh, axis: str) -> dict[str, Any]:
    """The arguments of `fully_shard` for a unit that is sharded over an axis of a mesh."""
    options: dict[str, Any] = {
        "mesh": mesh["dp_replicate", axis] if plan.dp_replicate > 1 else mesh[axis],
        "reshard_after_forward": None if plan.zero == 3 else False,
    }
    gather, reduce = torch_dtype(plan.formats.gather), torch_dtype(plan.formats.reduce)
    if not gather == reduce == torch_dtype(plan.formats.stored):
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=gather, reduce_dtype=reduce)
    if plan.offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
    return options


STRATEGIES: Final = {
    (2, False): ShardingStrategy.SHARD_GRAD_OP,
    (3, False): ShardingStrategy.FULL_SHARD,
    (2, True): ShardingStrategy._HYBRID_SHARD_ZERO2,
    (3, True): ShardingStrategy.HYBRID_SHARD,
}
"""FSDP1's strategy for each ZeRO stage, without and with replicas."""

PREFETCHES: Final = {
    "pre": BackwardPrefetch.BACKWARD_PRE,
    "post": BackwardPrefetch.BACKWARD_POST,
    "none": None,
}
"""The arguments for each value of the option `backward_prefetch`."""


def fully_sharded(
    module: nn.Module, blocks: Iterable[nn.Module], plan: Plan, mesh: DeviceMesh, device: torch.device
) -> nn.Module:
    """FSDP1: `module` with a flat parameter for each of its blocks, and one for the rest."""
    units = {*blocks} if torch_options(plan).fsdp_units == "block" else set()
    options, row = torch_options(plan), plan.formats
    types = {torch_dtype(one) for one in (row.stored, row.gather, row.reduce)}
    mixed = MixedPrecision(param_dtype=torch_dtype(row.gather), reduce_dtype=torch_dtype(row.reduce))
    named = [len(list(module.named_parameters(remove_duplicate=once))) for once in (True, False)]
    if named[0] != named[1]:
        module = materialised(module, device)  # `to_empty` of one module at a time would untie weights
    on_meta = any(parameter.is_meta for parameter in module.parameters())
    return FullyShardedDataParallel(
        module,
        device_mesh=mesh["dp_replicate", plan.shard_group]
        if plan.dp_replicate > 1
        else mesh[plan.shard_group],
        sharding_strategy=STRATEGIES[plan.zero, plan.dp_replicate > 1],
        auto_wrap_policy=CustomPolicy(lambda one: one in units),
        mixed_precision=mixed if len(types) > 1 else None,
        cpu_offload=CPUOffload(offload_params=True) if plan.offload else None,
        backward_prefetch=PREFETCHES[options.backward_prefetch],
        forward_prefetch=options.forward_prefetch,
        use_orig_params=options.use_orig_params,
        device_id=device,
        param_init_fn=partial(_drawn_anew, device=device) if on_meta else None,
    )


def _drawn_anew(module: nn.Module, *, device: torch.device) -> None:
    """Gives a module's own weights and buffers data; rotations are by no angle."""
    module.to_empty(device=device, recurse=False)
    for parameter in module.parameters(recurse=False):
        nn.init.normal_(parameter.detach(), std=WEIGHT_STD)
    for buffer in module.buffers(recurse=False):
        nn.init.ones_(buffer)


def _units(stage: Transformer, plan: Plan) -> Iterator[nn.Module | list[nn.Module]]:
    """FSDP2's units below the root."""
    ends = torch_options(plan).fsdp_units == "block+ends"
    if ends and stage.embedding is not None:
        yield stage.embedding
    yield from units_of_blocks(list(stage.blocks.values()), plan)
    if ends and stage.head is not None:
        yield [stage.head.norm, stage.head.output] if stage.skips_output else stage.head


def units_of_blocks(blocks: list[nn.Module], plan: Plan) -> Iterator[nn.Module | list[nn.Module]]:
    """The units of blocks: each block, several in a row, or none."""
    n = torch_options(plan).fsdp_blocks
    if torch_options(plan).fsdp_units != "model":
        yield from blocks if n == 1 else (blocks[i : i + n] for i in range(0, len(blocks), n))


def cut_tensors(stage: Transformer, plan: Plan, at: Rank, mesh: DeviceMesh) -> None:
    """Applies tensor parallelism, with the sequence sharded between its regions if the plan says so."""
    tied = stage.tied
    if stage.embedding is not None:
        parallelize_module(stage.embedding, mesh, _embedding_styles(stage.embedding, plan))
        if isinstance(stage.embedding, GptEmbedding) and plan.sequence_parallel:
            stage.embedding.sequence_shard = (at.tp, plan.tp)
    for block in stage.blocks.values():
        styles = block_styles(
            sequence_parallel=plan.sequence_parallel,
            float8=torch_options(plan).float8,
            rotary=stage.rotation is not None,
            gated=hasattr(block.feed_forward, "w3"),
        )
        parallelize_module(block, mesh, styles)
    if stage.head is not None:
        parallelize_module(stage.head, mesh, head_styles(sequence_parallel=plan.sequence_parallel))
    if tied:
        stage.tie()


def _embedding_styles(embedding: nn.Module, plan: Plan) -> dict[str, ParallelStyle]:
    styles = {"tokens": embedding_style(sequence_parallel=plan.sequence_parallel)}
    if plan.sequence_parallel and isinstance(embedding, GptEmbedding):
        styles["positions"] = SequenceParallel(sequence_dim=0, use_local_output=True)
    return styles
