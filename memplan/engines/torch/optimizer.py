"""The optimizer's part of a step: allocations and collectives of unscaling, clipping and updating.

Under tensor parallelism some gradients have other placements than their weights: replicated where the weight
is sharded, or partial sums. Every operation that reads both makes a copy with the weight's placement.
"""

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from memplan.engines.torch.cpu_offload import copied_by_optimizer
from memplan.engines.torch.float8 import precomputed_scales
from memplan.engines.torch.muon import orthogonalized
from memplan.engines.torch.stage import RankStages, Stage
from memplan.mesh import WORLD, Group
from memplan.parts.ddp import partial_sum
from memplan.parts.stage import trained
from memplan.parts.weight_updates import Variables, Weight, updated_alone, updated_together
from memplan.placements import Partial, Shard
from memplan.record import (
    Collective,
    Event,
    Stretch,
    allocs,
    chain,
    events,
    frees,
    repeated,
)
from memplan.shapes import FP32, FP64, Buffer, Parameter, buffer_of

Counted = Sequence[tuple[Parameter, int]]
"""Parameters, and how many times each occurs."""

CUDA_CHUNK_ELEMENTS: Final = 65536
"""Elements per block of a CUDA kernel over a list of tensors (`kChunkSize` in MultiTensorApply.cuh)."""

UPDATE_NAME: Final = "optimizer step"
"""The name of the stretch before which the first step allocates the optimizer's state."""


def update(stages: RankStages, *, in_order: bool = False, makes_states: bool = False) -> Stretch:
    """The optimizer's part of a step.

    `in_order`: one parameter at a time in the module's order; else equal ones of all blocks are counted.
    `makes_states`: it is the first step of an optimizer that makes each weight's state in its turn.
    """
    if stages.options.optimizer_in_backward:
        return chain("update", chain(UPDATE_NAME))
    matrices = orthogonalized(stages, _one_after_the_other(stages, in_order), UPDATE_NAME)
    kept = stages.trainer
    clips = stages.plan.clip_grad_norm is not None or kept is not None
    clipping = [events("gradient clipping", _clipping(stages, in_order))] if clips else []
    if kept is not None:
        gone, made = events("norm of the last step", frees(kept.norm)), events("norm", allocs(kept.norm))
        clipping = [gone, *clipping, made]
    unscaling, scaled = _unscaling(stages)
    match implementation(stages):
        case "for-loop":
            steps = list(_one_by_one(stages, in_order, makes_states))
        case "foreach":
            steps = [events(UPDATE_NAME, _all_at_once(stages, in_order))]
        case _:
            steps = [events(UPDATE_NAME, _in_one_kernel(stages, in_order))]
    if stages.plan.kept.on_host:
        steps.append(events("update on the host", copied_by_optimizer(stages)))
    stepping = chain(UPDATE_NAME, *matrices, *steps)
    after = *_sync_parameters(stages), *scaled, *_precomputed(stages)
    return chain("update", *unscaling, *clipping, stepping, *after)


def _precomputed(stages: RankStages) -> Iterator[Stretch]:
    """The scales of weights that FSDP2 gathers in float8, made anew of the updated weights.

    Neglects: the time of its kernels, which read the weights once.

    Source: `torchao.float8.fsdp_utils:precompute_float8_dynamic_scale_for_fsdp`.
    """
    if stages.options.float8_all_gather == "precomputed":
        scales = precomputed_scales(stages.stored_parts)
        n_bytes = scales.n_bytes // FP32.itemsize * stages.weight_dtype.itemsize
        axes = (stages.plan.shard_group, *["tp"] * (stages.plan.tp > 1))
        sent = [_all_reduce(axis, "largest numbers of weights", n_bytes) for axis in axes]
        yield events("scales of weights in float8", (*allocs(scales), *sent, *frees(scales)))


def _sync_parameters(stages: RankStages) -> Iterator[Stretch]:
    """The broadcasts of each rank's updated weights over the data axis, one weight at a time.

    Source: `torch.distributed.optim.zero_redundancy_optimizer:ZeroRedundancyOptimizer._sync_params`.
    """
    if stages.plan.zero == 1:
        sent = [
            Collective(
                kind="broadcast",
                axis=stages.plan.shard_group,
                what="updated weights",
                payload_bytes=p.n_bytes,
                calls=n,
            )
            for p, n in stages.counted_trained_parameters()
        ]
        yield events("broadcast of updated weights", sent)


def _all_reduce(axis: Group, what: str, n_bytes: int) -> Collective:
    return Collective(kind="all_reduce", axis=axis, what=what, payload_bytes=n_bytes)


def _unscaling(stages: RankStages) -> tuple[list[Stretch], list[Stretch]]:
    """The loss scaler's allocations and collectives to unscale gradients, and its frees after the update.

    Source: `torch.amp.grad_scaler:GradScaler.unscale_`, `torch.amp.grad_scaler:GradScaler._unscale_grads_`,
    `torch.amp.grad_scaler:_MultiDeviceReplicator`.
    """
    if not stages.plan.formats.loss_scaled:
        return [], []
    scale, inverse = (buffer_of(name, (), FP64) for name in ("scale", "inverse of the scale"))
    narrow, found = buffer_of("inverse of the scale", (), FP32), buffer_of("found an overflow", (), FP32)
    copies = [buffer_of(f"copy of: {buffer.name}", (), FP32) for buffer in (found, narrow)]
    made = [*allocs(scale, inverse), *frees(scale), *allocs(narrow), *frees(inverse), *allocs(found, *copies)]
    sent = [_all_reduce(axis, "overflows", FP32.itemsize) for axis in _overflow_axes(stages)]
    return [events("unscaling of gradients", [*made, *sent, *frees(copies[1], narrow, found)])], [
        events("unscaling of gradients", frees(copies[0]))
    ]


def implementation(stages: RankStages | Stage) -> str:
    """The optimizer's implementation: by default "foreach" on CUDA, "for-loop" on CPU.

    That of bitsandbytes has a kernel for each weight, as if fused. Adafactor and torchao loop, but for
    torchao's on the host, whose default is the fused AdamW.

    Source: `torch.optim.optimizer:_default_to_fused_or_foreach`, `torch.optim._adafactor:adafactor`.
    """
    kept = stages.plan.kept
    if kept.package == "bitsandbytes" or kept.on_host:
        return "fused"
    if stages.options.optimizer_impl != "default":
        return stages.options.optimizer_impl
    loops = kept.factored is not None or kept.package == "torchao"
    return "for-loop" if stages.update_device.on_cpu or loops else "foreach"


def _one_by_one(stages: RankStages, in_order: bool, makes_states: bool) -> Iterator[Stretch]:
    """The for-loop: what a weight's turn binds to variables lives until the next weight's."""
    variables, optimizer = Variables(), stages.plan.optimizer
    for parameters, times in _one_after_the_other(stages, in_order):
        found: list[Event] = []
        for parameter in [one for one in parameters if one not in stages.matrices]:
            for copies in _reads(stages, [(parameter, 1)]):
                found += copies.events()
            found += allocs(*stages.optimizer_states(parameter)) if makes_states else ()
            weight = Weight(parameter.name, stages.weight_shape(parameter), stages.weight_dtype)
            found += updated_alone(optimizer, weight, variables, stages.update_device)
        yield repeated(events(UPDATE_NAME, found), times)
    yield events(UPDATE_NAME, variables.end())


def _all_at_once(stages: RankStages, in_order: bool) -> Iterator[Event]:
    """The foreach implementation: temporaries of all weights, and all copies of gradients, at once."""
    for group in _updated_lists(stages, in_order):
        for copies in _reads(stages, group):
            yield from copies.events()
        dtype = stages.weight_dtype
        weights = [Weight(p.name, stages.weight_shape(p), dtype, n) for p, n in group]
        yield from updated_together(stages.plan.optimizer, weights, stages.update_device)


def _in_one_kernel(stages: RankStages, in_order: bool) -> Iterator[Event]:
    """A fused kernel, or bitsandbytes' for each weight: nothing but copies of gradients, each made once.

    Source: `torch.optim.adam:_fused_adam`, aten/src/ATen/native/FusedAdam.cpp (`_fused_adam_kernel_cpu_`).
    """
    for group in _updated_lists(stages, in_order):
        yield from _copies(stages, group).events()


def _reads(stages: RankStages, counted: Counted) -> Iterator["Copies"]:
    """The copies of gradients that each operation of an update makes.

    SGD reads a gradient once; its momentum has the gradient's placement, so a replicated one is sharded only
    when it is added to the weight. Adam's first moment reads the gradient once, its second twice.
    """
    match stages.plan.optimizer:
        case "sgd":
            yield _copies(stages, counted)
        case "sgd-momentum":
            yield _copies(stages, [(p, n) for p, n in counted if p.has_partial_grad])
            yield _copies(stages, [(p, n) for p, n in counted if not p.has_partial_grad])
        case _:
            yield _copies(stages, counted)
            once = _copies(stages, counted)
            yield Copies(once.buffers * 2, once.sums * 2)


class Copies(NamedTuple):
    """Copies of gradients that are alive at the same time, and the all-reduces of partial ones."""

    buffers: list[Buffer]
    sums: list[Collective]

    def events(self, *others: Buffer, kept: Buffer | None = None) -> tuple[Event, ...]:
        """The allocations and frees of the copies and of other buffers; `kept` is allocated and stays."""
        made = (*self.buffers, *others)
        return (*allocs(*made), *self.sums, *(() if kept is None else allocs(kept)), *frees(*made))


def _copies(stages: RankStages, counted: Counted) -> Copies:
    """Copies of gradients with other placements than their weights: shards, or sums of partial ones.

    Source: `torch.distributed.tensor._dispatch:OpDispatcher.redistribute_local_args`.
    """
    if stages.plan.tp == 1 or stages.plan.ddp or stages.plan.fsdp:
        return Copies([], [])
    sums = [partial_sum(p.n_bytes, n) for p, n in counted if p.has_partial_grad]
    copied = [(p, n) for p, n in counted if p.grad_placements != p.placements]
    names = [f"{p.name}.grad ({'summed' if p.has_partial_grad else 'own rows'})" for p, _ in copied]
    shapes = [(n, *p.shape) for p, n in copied]
    return Copies([buffer_of(*one, stages.weight_dtype) for one in zip(names, shapes, strict=True)], sums)


def _clipping(stages: RankStages, in_order: bool) -> Iterator[Event]:
    """Gradient clipping: each gradient's norm, the norms stacked, and the all-reduces of DTensors' norms.

    Partial gradients are summed for their norms, one by one or all at once, as the optimizer's implementation
    does.

    Source: `torch.nn.utils.clip_grad:_get_total_norm`, `torch.distributed.tensor._ops._math_ops:_NormPartial`
    (raised to the power, all-reduced, and back).
    """
    plan, one_by_one = stages.plan, stages.options.optimizer_impl == "for-loop"
    if stages.stages[0].is_fsdp1:
        yield from _norm_of_flat_grads(stages)
        return
    for group in _lists(_held(stages, in_order), apart=plan.tp > 1):
        partial = [(p, n) for p, n in group if p.has_partial_grad]
        n_norms = sum(n for _, n in group)
        names = ["norms of gradients", "stacked norms of gradients"]
        axes: dict[Group, bool] = {plan.shard_group: plan.fsdp, "tp": plan.tp > 1 and group[0][0].is_dtensor}
        divided_over = [axis for axis, divided in axes.items() if divided]
        if divided_over:
            names += ["powers of norms", "all-reduced powers of norms", "all-reduced norms"]
        norms, *others = (buffer_of(name, (n_norms,), stages.weight_dtype) for name in names)
        if one_by_one:
            for parameter, n in partial:
                copies = _copies(stages, [(parameter, 1)])
                yield from Copies(copies.buffers, copies.sums * n).events()
            yield from allocs(norms)
        else:
            yield from _copies(stages, partial).events(*_norms_of_chunks(stages, group), kept=norms)
        n_bytes = n_norms * stages.weight_dtype.itemsize
        sent = [_all_reduce(axis, "norms of gradients", n_bytes) for axis in divided_over]
        yield from (*allocs(*others), *sent, *frees(*others, norms))
    if plan.pp > 1:
        yield _all_reduce("pp", "norms of gradients", stages.weight_dtype.itemsize)


def _norm_of_flat_grads(stages: RankStages) -> Iterator[Event]:
    """FSDP1's own clipping: a norm of each gradient in float32, the norms stacked, and their sum over ranks.

    Source: `torch.distributed.fsdp.fully_sharded_data_parallel:FullyShardedDataParallel.clip_grad_norm_`,
    `torch.distributed.fsdp.fully_sharded_data_parallel:_get_grad_norm`.
    """
    n = sum(times for _, times in stages.counted_trained_parameters())
    norms, stacked = (buffer_of(f"{what} of gradients", (n,), FP32) for what in ("norms", "stacked norms"))
    names = (
        "norm of this rank",
        "its power",
        "total norm",
        "total norm and epsilon",
        "factor",
        "clamped factor",
    )
    local, power, total, more, factor, clamped = (buffer_of(name, (), FP32) for name in names)
    yield from (*allocs(norms, stacked), *frees(norms), *allocs(local), *frees(stacked), *allocs(power))
    yield _all_reduce(stages.plan.shard_group, "norms of gradients", FP32.itemsize)
    yield from (*allocs(total, more, factor), *frees(more), *allocs(clamped))
    yield from frees(clamped, factor, total, power, local)


def _norms_of_chunks(stages: RankStages, group: Counted) -> list[Buffer]:
    """The CUDA kernel's norms of chunks of gradients; each gradient has room for the chunks of the largest.

    Source: aten/src/ATen/native/cuda/ForeachReduceOp.cu (`_foreach_tensor_norm_cuda_impl`).
    """
    if stages.update_device.on_cpu:
        return []
    n_chunks = -(-max(stages.weight_elements(parameter) for parameter, _ in group) // CUDA_CHUNK_ELEMENTS)
    return [buffer_of("norms of chunks of gradients", (n_chunks * sum(n for _, n in group),), FP32)]


def _overflow_axes(stages: RankStages) -> Iterator[Group]:
    """The mesh axes over which the loss scaler all-reduces the overflow flag.

    For DTensors the axes that shard the first gradient; if these are not enough, all ranks too.

    Source: `torch.distributed.tensor._dispatch:found_inf_reduce_handler`,
    `torch.distributed.fsdp.sharded_grad_scaler:ShardedGradScaler.unscale_`.
    """
    plan = stages.plan
    (first, _), *_ = stages.counted_trained_parameters()
    flat = stages.stages[0].is_fsdp1
    if plan.fsdp and not flat:
        yield plan.shard_group
    if plan.tp > 1 and not plan.ddp:
        laid_out = first.placements if plan.fsdp else first.grad_placements
        if isinstance(laid_out.get("tp"), Shard | Partial):
            yield "tp"
    if flat or plan.pp > 1 or (plan.tp > 1 and not plan.fsdp):
        axes = plan.mesh.divided
        yield axes[0] if len(axes) == 1 else WORLD


def _lists(counted: Counted, *, apart: bool) -> list[Counted]:
    """Parameters in lists that one foreach call takes: DTensors of one mesh, or plain tensors."""
    if not apart:
        return [counted]
    lists = [[(p, n) for p, n in counted if p.is_dtensor], [(p, n) for p, n in counted if not p.is_dtensor]]
    return [found for found in lists if found]


def _held(stages: RankStages, in_order: bool) -> Counted:
    """The parameters that have a gradient on this rank."""
    return [(p, 1) for p in stages.trained_parameters()] if in_order else stages.counted_trained_parameters()


def _updated_lists(stages: RankStages, in_order: bool) -> list[Counted]:
    """The parameters that this rank updates, in the lists of foreach calls; matrices of Muon are in none."""
    owned, plan = stages.owned, stages.plan
    updated = _held(stages, in_order) if owned is None else [(parameter, 1) for parameter in owned]
    updated = [(parameter, n) for parameter, n in updated if parameter not in stages.matrices]
    one_list = plan.ddp or (plan.ep > 1 and plan.fsdp)
    return _lists(updated, apart=plan.tp > 1 and not one_list)


def _one_after_the_other(stages: RankStages, in_order: bool) -> Iterator[tuple[Sequence[Parameter], int]]:
    """The parameters that this rank updates, in the module's order."""
    if in_order or stages.owned is not None:
        yield stages.trained_parameters() if stages.owned is None else stages.owned, 1
        return
    for parameters, n in stages.stored_parts:
        yield from ((trained(parameters), times) for times in (min(1, n), n - 1) if times > 0)


def states_in_order(stages: RankStages) -> Iterator[Buffer]:
    """The optimizer's state on the device in the order that the first update makes it.

    What a backward pass makes is among its events, and so is what an update makes weight by weight.

    Source: `torch.optim.adam:Adam._init_group`, `torch.optim.sgd:_multi_tensor_sgd`.
    """
    if stages.options.optimizer_in_backward or stages.plan.kept.makes_states_in_turn:
        return
    maps = stages.maps_of_8_bits
    held = stages.trained_parameters() if stages.owned is None else stages.owned
    for parameter in [one for one in held if one in stages.matrices]:
        yield from stages.optimizer_states(parameter)
    for group in _updated_lists(stages, in_order=True):
        for parameter, _ in group:
            if stages.is_of_8_bits(parameter):
                yield from maps
                maps = []
            yield from stages.optimizer_states(parameter)


def _elements(stages: RankStages, parameter: Parameter) -> int:
    return parameter.n_elements if stages.owned is not None else stages.weight_elements(parameter)
