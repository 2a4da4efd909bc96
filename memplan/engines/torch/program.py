"""One rank's steps as the caching allocator sees them: tensor by tensor, each on its stream."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from memplan.engines.torch.ddp import ReplicatedPasses, buckets
from memplan.engines.torch.fsdp import ShardedPasses
from memplan.engines.torch.optimizer import UPDATE_NAME, states_in_order, update
from memplan.engines.torch.passes import Passes
from memplan.engines.torch.runtime import left_behind
from memplan.engines.torch.schedules import schedule
from memplan.engines.torch.sharding import ddp_buckets, padded_shard_elements
from memplan.engines.torch.stage import RankStages, Stage
from memplan.engines.torch.step import passes_of
from memplan.plan import SINGLE_STAGE_SCHEDULES
from memplan.replay import Program
from memplan.shapes import FP32, INT64, Buffer, Event, Parameter, buffer_of
from memplan.timeline import Stretch, allocs, chain, frees

GATHERS: Final = "all-gather copy-in"
REDUCES: Final = "reduce-scatter"


def program(stages: RankStages, passes: Mapping[Stage, Passes]) -> Program:
    """What the rank allocates and frees, in order; `passes` are those it was estimated with."""
    own = [passes.get(stage) or passes_of(stage) for stage in stages]
    buckets_before, buckets_after = _buckets(stages)
    return Program(
        setup=(*_setup(stages), *allocs(*buckets_before)),
        first_step=None if stages.plan.set_to_none else _without_gradients(stages),
        second=(*frees(*buckets_before), *allocs(*buckets_after)),
        step=_step(stages, own),
        states=() if stages.offloads else tuple(states_in_order(stages)),
        update_name=UPDATE_NAME,
        beside=_workspaces(stages),
        kept=left_behind(stages) + _kept_by_hooks(own),
        oldest_first=frozenset(_oldest_first(own)),
        streams=dict(_streams(own)),
    )


def _step(stages: RankStages, passes: Sequence[Passes]) -> Stretch:
    updates = [] if stages.offloads else [update(stages, in_order=True)]
    return chain("step", *schedule(stages, passes), *updates)


def _without_gradients(stages: RankStages) -> Stretch:
    """The first step where gradients are kept and zeroed: it finds none."""
    plan = replace(stages.plan, set_to_none=True)
    fresh = RankStages(stages.model, plan, stages.rank, stages.device, backend=stages.backend)
    return _step(fresh, [passes_of(stage) for stage in fresh])


def _setup(stages: RankStages) -> Iterator[Event]:
    """What there is before the first step, in the order it is made: weights, angles, tokens, receive buffers.

    Source: torch/nn/modules/module.py (`_apply`: children first, a module's own buffers last),
    torch/distributed/pipelining/schedules.py (`_initialize_stages`).
    """
    plan, held = stages.plan, Counter(stages.rest)
    named = {buffer.name: buffer for buffer in held}
    for stage in stages:
        if not stages.offloads:
            yield from allocs(*_weights(stages, stage))
        if "rotation" in named:
            yield from allocs(named["rotation"])
    if stages.plan.precision == "fp16-mixed":
        one, product = buffer_of("1", (), FP32), buffer_of("1 times the loss scale", (), FP32)
        yield from (*allocs(one, *stages.loss_scale, product), *frees(one, product))
    batch = (plan.n_micro_batches * plan.micro_batch, plan.seq_len)
    drawn = buffer_of("tokens and targets", (batch[0], batch[1] + 1), INT64)
    tokens = buffer_of("tokens", batch, INT64)
    yield from (*allocs(drawn, tokens, named["targets"]), *frees(drawn))
    if not stages.first:
        yield from frees(tokens)
    received = list(zip(stages, stages.received, strict=True))
    for stage, (inputs, _) in received:
        yield from allocs(*[inputs] * (0 if stage.first else plan.n_micro_batches))
    for stage, (_, gradient) in reversed(received):
        yield from allocs(*[gradient] * (0 if stage.last else plan.n_micro_batches))


def _weights(stages: RankStages, stage: Stage) -> Iterator[Buffer]:
    """Each weight of a stage as it lies in memory: FSDP2's shard with its padding."""
    dp = stages.plan.dp
    for parameter in stage.parameters():
        elements = padded_shard_elements(parameter, dp) if stages.plan.fsdp else parameter.n_elements
        yield buffer_of(parameter.name, (elements,), stages.weight_dtype, "weights")


def _buckets(stages: RankStages) -> tuple[list[Buffer], list[Buffer]]:
    """DDP's buckets in the first step, and as they are made anew in the order that gradients came.

    Source: torch/csrc/distributed/c10d/reducer.cpp (`initialize_buckets`, `rebuild_buckets`).
    """
    if not stages.plan.ddp:
        return [], []
    cap = stages.plan.bucket_cap_bytes
    before = [bucket for stage in stages for bucket in ddp_buckets(reversed(stage.parameters()), cap)[::-1]]
    after = [bucket for stage in stages for bucket in buckets(stage)]
    return _flat(before, stages), _flat(after, stages)


def _flat(found: Iterable[Sequence[Parameter]], stages: RankStages) -> list[Buffer]:
    return [
        buffer_of("DDP bucket", (sum([p.n_elements for p in parameters]),), stages.weight_dtype)
        for parameters in found
    ]


def _workspaces(stages: RankStages) -> dict[Buffer, Buffer]:
    """The first product of the forward pass, and of the backward pass, and the workspace it brings."""
    found: dict[Buffer, Buffer] = {}
    (workspace,) = stages.workspaces
    for stage in stages:
        for product in (stage.trace.first_product, stage.trace.first_product_backward):
            if product is not None:
                found[product] = workspace
    return found


def _kept_by_hooks(passes: Iterable[Passes]) -> Counter[Buffer]:
    kept: Counter[Buffer] = Counter()
    for one in passes:
        if isinstance(one, ReplicatedPasses):
            kept += one.between_steps
    return kept


def _oldest_first(passes: Iterable[Passes]) -> Iterator[Buffer]:
    """What is freed once its successor is there: flat weights of FSDP2, logits that a schedule holds."""
    for one in passes:
        if isinstance(one, ShardedPasses):
            yield from (unit.flat for unit, _ in one.units)
        if one.stage.last and one.stage.plan.pp > 1:
            yield from (event.buffer for event in one.trace.release.events)


def _streams(passes: Iterable[Passes]) -> Iterator[tuple[Buffer, str]]:
    """FSDP2's own streams: what an all-gather reads and fills, and what a reduce-scatter leaves.

    Gradients that are to be reduced, and weights, come from the default stream; so does what a schedule
    gathers ahead of time by itself.

    Source: torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py (`foreach_all_gather`, `foreach_reduce`),
    _fsdp_param_group.py (`FSDPCommContext.get_all_gather_streams`).
    """
    for one in passes:
        if isinstance(one, ShardedPasses):
            plan = one.stage.plan
            ahead = plan.pp > 1 and plan.schedule not in SINGLE_STAGE_SCHEDULES
            for unit, _ in one.units:
                for buffer in (unit.reduced, unit.passing):
                    yield buffer, REDUCES
                for buffer in () if ahead else unit.gathering():
                    yield buffer, GATHERS
