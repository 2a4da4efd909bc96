"""The optimizer's part of a step: what unscaling, clipping and updating hold while they run, and send.

Beside tensor parallelism alone some gradients are not like their weights: whole where the weight is divided,
or partial, each tensor rank knowing a part of the sum. Every operation that reads one next to its weight
makes a copy that is.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from memplan.engines.torch.stage import MOMENTS, RankStages
from memplan.plan import MESH_AXES, Axis, Plan
from memplan.shapes import FP32, Buffer, Event, Parameter, buffer_of
from memplan.timeline import Stretch, allocs, chain, events, frees

Counted = Sequence[tuple[Parameter, int]]
"""Parameters, and how many times each occurs."""

CUDA_CHUNK_ELEMENTS: Final = 65536
"""What one block of a CUDA kernel over a list of tensors takes (`kChunkSize` in MultiTensorApply.cuh)."""

UPDATE_NAME: Final = "optimizer step"
"""The stretch before which the first step makes the optimizer's state."""

AllReduces = tuple[Axis, str, int, int]
"""The mesh axis of all-reduces, their purpose, their number, the payload bytes of all of them."""


def update(stages: RankStages, *, one_by_one: bool = False) -> Stretch:
    """The optimizer's part of a step; the loss scaler's scalars are left out.

    `one_by_one`: what is allocated for all parameters at the same time is so many tensors, rather than one of
    as many bytes.
    """
    clipping = [] if stages.plan.clip_grad_norm is None else [events("gradient clipping", _clipping(stages))]
    roots = _each_root if one_by_one else _all_roots
    return chain("update", *clipping, events(UPDATE_NAME, _stepping(stages, roots)))


def implementation(stages: RankStages) -> str:
    """How the optimizer goes over the parameters: by default all at once on CUDA, one by one on CPU.

    Source: torch/optim/optimizer.py (`_default_to_fused_or_foreach`).
    """
    if stages.plan.optimizer_impl != "default":
        return stages.plan.optimizer_impl
    return "foreach" if not stages.update_device.on_cpu else "for-loop"


def _stepping(stages: RankStages, roots: Callable[[RankStages, Counted], list[Buffer]]) -> Iterator[Event]:
    match implementation(stages):
        case "for-loop":
            yield from _one_by_one(stages)
        case "foreach":
            yield from _all_at_once(stages, roots)
        case _:
            yield from _in_one_kernel(stages)


def _one_by_one(stages: RankStages) -> Iterator[Event]:
    """Adam's denominator and its square root; the last parameter's denominator lives until the next one's.

    Source: torch/optim/adam.py (`_single_tensor_adam`), torch/optim/sgd.py (`_single_tensor_sgd`).
    """
    before: Buffer | None = None
    for parameter in _in_order(stages):
        for copies in _reads(stages, [(parameter, 1)]):
            yield from (*allocs(*copies), *frees(*copies))
        if len(MOMENTS[stages.plan.optimizer]) == 2:
            elements = _elements(stages, parameter)
            root = buffer_of(f"{parameter.name} (square root)", (elements,), stages.weight_dtype)
            denominator = buffer_of(f"{parameter.name} (denominator)", (elements,), stages.weight_dtype)
            yield from (*allocs(root, denominator), *frees(root))
            if before is not None:
                yield from frees(before)
            before = denominator
    if before is not None:
        yield from frees(before)


def _all_at_once(stages: RankStages, roots: Callable[[RankStages, Counted], list[Buffer]]) -> Iterator[Event]:
    """The square roots of all of Adam's second moments, and all copies of gradients, at the same time.

    Source: torch/optim/adam.py (`_multi_tensor_adam`), torch/optim/sgd.py (`_multi_tensor_sgd`).
    """
    for group in _lists(_updated(stages), apart=stages.plan.tp > 1 and not stages.plan.ddp):
        for copies in _reads(stages, group):
            yield from (*allocs(*copies), *frees(*copies))
        if len(MOMENTS[stages.plan.optimizer]) == 2:
            made = roots(stages, group)
            yield from (*allocs(*made), *frees(*made))


def _all_roots(stages: RankStages, group: Counted) -> list[Buffer]:
    elements = sum(n * _elements(stages, parameter) for parameter, n in group)
    return [buffer_of("square roots of all second moments", (elements,), stages.weight_dtype)]


def _each_root(stages: RankStages, group: Counted) -> list[Buffer]:
    return [
        buffer_of(f"{parameter.name} (square root)", (_elements(stages, parameter),), stages.weight_dtype)
        for parameter, n in group
        for _ in range(n)
    ]


def _in_one_kernel(stages: RankStages) -> Iterator[Event]:
    """Nothing but the copies of gradients, each made once.

    Source: torch/optim/adam.py (`_fused_adam`), aten/src/ATen/native/FusedAdam.cpp.
    """
    for group in _lists(_updated(stages), apart=stages.plan.tp > 1 and not stages.plan.ddp):
        copies = _copies(stages, group)
        yield from (*allocs(*copies), *frees(*copies))


def _reads(stages: RankStages, counted: Counted) -> Iterator[list[Buffer]]:
    """The copies of gradients that each operation of an update makes.

    SGD reads a gradient once; its momentum is like the gradient, so that a whole one is cut only when the
    weight reads it. Adam's first moment reads it once, its second twice.
    """
    match stages.plan.optimizer:
        case "sgd":
            yield _copies(stages, counted)
        case "sgd-momentum":
            yield _copies(stages, [(p, n) for p, n in counted if p.summed_over_tp])
            yield _copies(stages, [(p, n) for p, n in counted if not p.summed_over_tp])
        case _:
            yield _copies(stages, counted)
            yield _copies(stages, counted) * 2


def _copies(stages: RankStages, counted: Counted) -> list[Buffer]:
    """Copies of the gradients that are not like their weights: own rows of whole ones, sums of partial ones.

    Source: torch/distributed/tensor/_dispatch.py (implicit redistribution).
    """
    if stages.plan.tp == 1 or stages.plan.ddp or stages.plan.fsdp:
        return []
    return [
        buffer_of(
            f"{p.name}.grad ({'summed' if p.summed_over_tp else 'own rows'})",
            (n, *p.shape),
            stages.weight_dtype,
        )
        for p, n in counted
        if p.summed_over_tp or p.grad_shape != p.shape
    ]


def _clipping(stages: RankStages) -> Iterator[Event]:
    """The norm of each gradient, all of them stacked, and what DTensors' norms take to be summed over ranks.

    Partial gradients are summed for their norms, one by one or all at once as the optimizer works.

    Source: torch/nn/utils/clip_grad.py (`_get_total_norm`), torch/distributed/tensor/_ops/_math_ops.py
    (`_NormPartial`: raised to the power, all-reduced, and back).
    """
    one_by_one = stages.plan.optimizer_impl == "for-loop"
    for group in _lists(stages.counted_parameters(), apart=stages.plan.tp > 1):
        partial = [(p, n) for p, n in group if p.summed_over_tp]
        n_norms = sum(n for _, n in group)
        names = ["norms of gradients", "stacked norms of gradients"]
        if _divided_over(stages.plan, group):
            names += ["powers of norms", "all-reduced powers of norms", "all-reduced norms"]
        norms, *others = (buffer_of(name, (n_norms,), stages.weight_dtype) for name in names)
        if one_by_one:
            for parameter, _ in partial:
                copies = _copies(stages, [(parameter, 1)])
                yield from (*allocs(*copies), *frees(*copies))
            yield from allocs(norms)
        else:
            copies = [*_copies(stages, partial), *_norms_of_chunks(stages, group)]
            yield from (*allocs(*copies, norms), *frees(*copies))
        yield from (*allocs(*others), *frees(*others, norms))


def _norms_of_chunks(stages: RankStages, group: Counted) -> list[Buffer]:
    """What the CUDA kernel over a list of gradients leaves per chunk, as many for each as the largest has.

    Source: aten/src/ATen/native/cuda/ForeachReduceOp.cu (`_foreach_tensor_norm_cuda_impl`).
    """
    if stages.update_device.on_cpu:
        return []
    n_chunks = -(-max(stages.weight_elements(parameter) for parameter, _ in group) // CUDA_CHUNK_ELEMENTS)
    return [buffer_of("norms of chunks of gradients", (n_chunks * sum(n for _, n in group),), FP32)]


def all_reduces(stages: RankStages) -> Iterator[AllReduces]:
    """What the update sends: overflows, norms, and the sums of partial gradients at each reading."""
    plan = stages.plan
    parameters = stages.counted_parameters()
    if plan.precision == "fp16-mixed":
        for axis in _overflow_axes(stages):
            yield axis, "overflows", 1, FP32.itemsize
    if plan.clip_grad_norm is not None:
        for group in _lists(parameters, apart=plan.tp > 1):
            n_norms = sum(n for _, n in group)
            for axis in _divided_over(plan, group):
                yield axis, "norms of gradients", 1, n_norms * stages.weight_dtype.itemsize
        if plan.pp > 1:
            yield "pp", "norms of gradients", 1, stages.weight_dtype.itemsize
    clips = plan.clip_grad_norm is not None
    for parameter, n in parameters:
        if parameter.summed_over_tp and not plan.ddp and not plan.fsdp:
            times = n * (_readings(stages) + clips)
            yield "tp", "partial gradients", times, times * parameter.n_bytes


def _readings(stages: RankStages) -> int:
    if implementation(stages) == "fused" or len(MOMENTS[stages.plan.optimizer]) < 2:
        return 1
    return 3


def _divided_over(plan: Plan, group: Counted) -> list[Axis]:
    """The mesh axes over which a list of gradients is divided; none for plain tensors."""
    over: list[Axis] = ["dp"] if plan.fsdp else []
    return [*over, "tp"] if plan.tp > 1 and group[0][0].distributed else over


def _overflow_axes(stages: RankStages) -> Iterator[Axis]:
    """Over which axes the loss scaler asks for overflows.

    For DTensors over those that divide the first gradient; where that is not enough, over all ranks too.

    Source: torch/distributed/tensor/_dispatch.py (`found_inf_reduce_handler`),
    torch/distributed/fsdp/sharded_grad_scaler.py (`unscale_`).
    """
    plan = stages.plan
    (first, _), *_ = stages.counted_parameters()
    if plan.fsdp:
        yield "dp"
    if plan.tp > 1 and not plan.ddp:
        divided = first.tp_dim is not None and (plan.fsdp or first.grad_shape == first.shape)
        if divided or (first.summed_over_tp and not plan.fsdp):
            yield "tp"
    if plan.pp > 1 or (plan.tp > 1 and not plan.fsdp):
        axes = [axis for axis in MESH_AXES if getattr(plan, axis) > 1]
        yield axes[0] if len(axes) == 1 else "world"


def _lists(counted: Counted, *, apart: bool) -> list[Counted]:
    """Parameters in lists that PyTorch takes in one call: DTensors of one mesh, or plain tensors."""
    if not apart:
        return [counted]
    lists = [[(p, n) for p, n in counted if p.distributed], [(p, n) for p, n in counted if not p.distributed]]
    return [found for found in lists if found]


def _updated(stages: RankStages) -> Counted:
    """The parameters that this rank updates."""
    if stages.owned is not None:
        return [(parameter, 1) for parameter in stages.owned]
    return stages.counted_parameters()


def _in_order(stages: RankStages) -> Sequence[Parameter]:
    """The parameters that this rank updates, in order; of equal blocks the first two."""
    if stages.owned is not None:
        return stages.owned
    found: list[Parameter] = []
    for stage in stages:
        blocks = [p for _ in range(min(stage.n_blocks, 2)) for p in stage.trace.block_parameters]
        found += (*stage.trace.embed_parameters, *blocks, *stage.trace.head_parameters)
    return found


def _elements(stages: RankStages, parameter: Parameter) -> int:
    return parameter.n_elements if stages.owned is not None else stages.weight_elements(parameter)
