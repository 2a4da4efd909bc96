"""One rank's steps as the caching allocator sees them: tensor by tensor, each on its stream."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from memplan.engines.torch.cpu_offload import ModuleOffloadingGradients
from memplan.engines.torch.flat_parameter import FlatRankStages
from memplan.engines.torch.fsdp import FSDPModule
from memplan.engines.torch.fsdp1 import FullyShardedDataParallel
from memplan.engines.torch.optimizer import UPDATE_NAME, states_in_order, update
from memplan.engines.torch.pipelining import left_behind, schedule
from memplan.engines.torch.releasing import lets_outputs_go
from memplan.engines.torch.stage import IN_USE, N_TARGETS, RankStages, Stage
from memplan.engines.torch.update_in_backward import ModuleUpdatedInBackward
from memplan.memory import Alive
from memplan.models import TracedModel, ends_are_tied
from memplan.models.recording import REFERENCE
from memplan.offload_activations import STREAM
from memplan.parts.ddp import (
    DistributedDataParallel,
    broadcast_weights,
    first_buckets,
    flat_buckets,
    reducer_of,
)
from memplan.parts.module import PlainModule, StageModule
from memplan.passes.trace import from_host
from memplan.plan import Rank
from memplan.record import Alloc, Event, Free, Stretch, allocs, chain, frees
from memplan.replay.program import AllocatorProgram
from memplan.shapes import FP32, INT64, Buffer, Parameter, buffer_of


def module_of(stage: Stage, rank: Rank) -> StageModule[Any]:
    """The stage's module on a rank."""
    if stage.plan.fsdp:
        place = stage.plan.place_among_shards(rank)
        return FSDPModule(stage, place) if stage.is_fsdp2 else FullyShardedDataParallel(stage, place)
    if stage.plan.ddp:
        return DistributedDataParallel(stage, stage.ddp)
    if stage.options.optimizer_in_backward:
        return ModuleUpdatedInBackward(stage)
    if stage.options.offload_gradients:
        return ModuleOffloadingGradients(stage, zeroed=False)
    return PlainModule(stage, zeroed=not stage.options.set_to_none)


def program(stages: RankStages, modules: Mapping[Stage, StageModule[Any]]) -> AllocatorProgram:
    """The rank's allocations and frees in order; `modules` are the ones that its step was played with."""
    plan, own = stages.plan, _own(stages, modules)
    fresh = None if stages.options.set_to_none else stages.with_gradients_freed()
    first = [] if fresh is None else _own(fresh, {})
    in_turn = plan.kept.makes_states_in_turn
    if fresh is None and (stages.options.forward_prefetch or stages.options.optimizer_in_backward or in_turn):
        fresh, first = stages, own
    first = [module.in_first_step() for module in first]

    def step(of: RankStages, modules: Sequence[StageModule[Any]], makes_states: bool) -> Stretch:
        updates = [] if of.offloads else [update(of, in_order=True, makes_states=makes_states)]
        return chain("step", *schedule(of, modules), *updates)

    firsts = {stage: first_buckets(stage, stage.ddp) for stage in stages if stages.plan.ddp}
    rebuilt = [stage for stage in stages if stages.plan.ddp and not stage.finds_unused]
    later = [bucket for stage in rebuilt for bucket in reducer_of(stage, stage.ddp).buckets]
    return AllocatorProgram(
        setup=tuple(_setup(stages, firsts)),
        received=tuple(_received(stages)),
        start=tuple(_lazy_init(stages)),
        first_step=None if fresh is None else step(fresh, first, in_turn),
        second=(
            *frees(*[bucket for stage in rebuilt for bucket in firsts[stage]]),
            *allocs(*flat_buckets(later), *stages.hook_workspaces.elements(), *stages.barrier.elements()),
            *allocs(*stages.clipping.elements()),
        ),
        step=step(stages, own, False),
        states=() if stages.offloads or plan.kept.made_with_it else tuple(states_in_order(stages)),
        update_name=UPDATE_NAME,
        beside=stages.kept_workspaces,
        takes_oldest=stages.options.torch_version == "2.12",
        kept=left_behind(stages) + kept_by_hooks(own),
        oldest_first=frozenset(_oldest_first(stages, [*own, *first])),
        handed_on=frozenset([one.trace.boundary for one in (*own, *first)]),
        handed_over=stages.handed_over,
        streams=dict([*_streams(own), *_streams(first)]),
    )


def _own(stages: RankStages, modules: Mapping[Stage, StageModule[Any]]) -> list[StageModule[Any]]:
    """The module of each stage; under FSDP2 equal stages have separate groups, and so separate streams."""
    found: dict[Stage, StageModule[Any]] = {}
    made: list[StageModule[Any]] = []
    for stage in stages:
        known = None if stage.plan.fsdp and stage in found else found.get(stage) or modules.get(stage)
        found[stage] = known or module_of(stage, stages.rank)
        made.append(found[stage].fresh())
    return made


def _setup(stages: RankStages, firsts: Mapping[Stage, list[Buffer]]) -> Iterator[Event]:
    """The allocations before the first step, in order: weights, rotary angles, DDP's buckets, tokens.

    Source: `torch.nn.modules.module:Module._apply` (children first, a module's own buffers last),
    `torch.optim.adagrad:Adagrad`, which makes its state when it is made.
    """
    plan, held = stages.plan, Counter(stages.rest)
    named = {buffer.name: buffer for buffer in held}
    for stage in stages:
        if stages.offloads:
            yield from allocs(*stage.buffers)
        elif isinstance(stages, FlatRankStages):
            yield from _flat_parameters(stages, stage)
        elif plan.fsdp:
            yield from _shards(stages, stage)
        else:
            for parameters, buffers in stage.modules():
                yield from allocs(*_weights(stages, parameters), *buffers)
        if plan.ddp:
            used = allocs(named[IN_USE]) if stage.finds_unused else ()
            yield from (*broadcast_weights(stage.parameters()), *allocs(*firsts[stage]), *used)
    if plan.kept.made_with_it and not stages.offloads:
        yield from allocs(*states_in_order(stages))
    if plan.formats.loss_scaled:
        one, product = buffer_of("1", (), FP32), buffer_of("1 times the loss scale", (), FP32)
        yield from (*allocs(one, *stages.loss_scale, product), *frees(one, product))
    if stages.trainer is not None:
        yield from allocs(*stages.trainer.buffers)
        return
    batch = (plan.n_micro_batches * plan.micro_batch, plan.seq_len)
    if isinstance(stages.model, TracedModel):
        yield from allocs(*[named[one.name] for one in stages.model.inputs(*batch)])
        return
    both = buffer_of("tokens and targets", (batch[0], batch[1] + 1), INT64)
    drawn = [] if stages.model.computes_loss else [both]  # one that does shifts the targets
    tokens = buffer_of("tokens", batch, INT64)
    yield from (*allocs(*drawn, tokens, named["targets"]), *frees(*drawn))
    if not stages.first:
        yield from frees(tokens)
    if N_TARGETS in named:
        yield from allocs(named[N_TARGETS])


def _received(stages: RankStages) -> Iterator[tuple[Buffer, int]]:
    """The receive buffers of a schedule in order, and how many of each, allocated as the first step starts.

    Source: `torch.distributed.pipelining.schedules:PipelineScheduleMulti._initialize_stages`.
    """
    n = stages.plan.n_micro_batches
    received = [found for found in zip(stages, stages.received, strict=True) if found[0].keeps_received]
    for stage, (inputs, _) in received:
        yield inputs, 0 if stage.first else n
    for stage, (_, gradient) in reversed(received):
        yield gradient, 0 if stage.last else n


def _weights(stages: RankStages, parameters: Iterable[Parameter]) -> Iterator[Buffer]:
    """The weights as they are first allocated: FSDP2's shards without padding."""
    for parameter in parameters:
        dtype = stages.stored_dtype(parameter)
        yield buffer_of(parameter.name, (stages.weight_elements(parameter),), dtype, "weights")


def _shards(stages: RankStages, stage: Stage) -> Iterator[Event]:
    """FSDP2's shards, module by module: shards with too few rows are then copied into padded ones.

    The root's shards are padded last, after the module's buffers.

    Source: `torch.distributed.fsdp._fully_shard._fully_shard:FSDPModule._apply`,
    `torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam.reset_sharded_param`.
    """
    units = stages.options.fsdp_units
    of_the_root: list[Event] = []
    for i, (parameters, buffers) in enumerate(stage.modules()):
        made = list(_weights(stages, parameters))
        yield from allocs(*made)
        padded = list(_padded(stages, parameters, made))
        if units == "model" or (units == "block" and not 1 <= i <= stage.n_blocks):
            of_the_root += padded
        else:
            yield from padded
        yield from allocs(*buffers)
    yield from of_the_root


def _flat_parameters(stages: FlatRankStages, stage: Stage) -> Iterator[Event]:
    """FSDP1's flat parameters, unit by unit, the root last: made of a module's weights, then sharded.

    A unit's weights are made just before, but for a model whose embedding and head are tied: `to_empty` of
    one module at a time would untie them.

    Source: `torch.distributed.fsdp._flat_param:FlatParamHandle.flatten_tensors`,
    `torch.distributed.fsdp._flat_param:FlatParamHandle.shard`.
    """
    dtype, tied = stages.weight_dtype, ends_are_tied(stages.model)
    weights = {p: buffer_of(p.name, p.shape, dtype) for p in stage.parameters()}
    if tied:
        yield from allocs(*[weights[p] for p in stage.parameters()], *stage.buffers)
    for unit, n in stages.units:
        yield from allocs(*stage.buffers) if unit is stages.units.root and not tied else ()
        whole = [weights[p] for own, k in unit.parts for p in [*own] * k]
        flat = buffer_of(f"{unit.name}: flat parameter", (unit.n_elements,), dtype)
        part = buffer_of(f"{unit.name}: shard without padding", (unit.own_elements,), dtype)
        pads = part.n_bytes != unit.shard.n_bytes
        sharded = (*allocs(part, unit.shard), *frees(part)) if pads else allocs(unit.shard)
        made = (*allocs(*[] if tied else whole, flat), *sharded, *frees(flat, *whole))
        yield from made * n


def _lazy_init(stages: RankStages) -> Iterator[Event]:
    """What FSDP1's first forward pass makes and frees: each unit's low-precision shard and unsharded weights.

    Where weights are stored in another type than they are gathered in, also unsharded weights in that type.

    Source: `torch.distributed.fsdp._runtime_utils:_share_state_and_init_handle_attrs`,
    `torch.distributed.fsdp._flat_param:FlatParamHandle.init_flat_param_attributes`.
    """
    if isinstance(stages, FlatRankStages):
        *blocks, root = stages.units
        for unit, n in (root, *blocks):
            found = [(unit.low_precision, unit.low_precision.dtype)] * unit.casts
            found.append((unit.unsharded, unit.unsharded.dtype))
            found += [(unit.unsharded, unit.shard.dtype)] * unit.casts
            made = [buffer_of(f"{one.name} (first)", one.shape, dtype) for one, dtype in found]
            yield from tuple(event for one in made for event in (*allocs(one), *frees(one))) * n


def _padded(stages: RankStages, parameters: Iterable[Parameter], made: Iterable[Buffer]) -> Iterator[Event]:
    """Shards with fewer rows than others have, copied into padded ones."""
    for parameter, shard in zip(parameters, made, strict=True):
        if stages.padding_elements(parameter):
            elements = stages.weight_elements(parameter) + stages.padding_elements(parameter)
            padded = buffer_of(parameter.name, (elements,), stages.stored_dtype(parameter), "weights")
            yield from (*allocs(padded), *frees(shard))


def kept_by_hooks(modules: Iterable[StageModule[Any]]) -> Alive:
    """The state of DDP's communication hooks, and what FSDP2 gathered last."""
    kept: Alive = Counter()
    for one in modules:
        if isinstance(one, DistributedDataParallel | FSDPModule):
            kept += one.between_steps
    return kept


def _oldest_first(stages: RankStages, modules: Iterable[StageModule[Any]]) -> Iterator[Buffer]:
    """Buffers that are freed only after the next tensor of the same kind has been allocated.

    They are FSDP2's flat gathered weights, receive buffers, and tensors held by a variable of the schedule
    that the next micro-batch overwrites: the logits, outputs that are released after their send, and the
    gradient of a stage's input that is being sent.

    Source: `torch.distributed.pipelining.schedules:Schedule1F1B._step_microbatches` (`bwd_sends`).
    """
    for received in stages.received:
        yield from received
    if stages.trainer is not None:
        yield from stages.trainer.replaced
    for one in modules:
        yield from (one.received_input, one.received_grad)
        if isinstance(one, FSDPModule):
            yield from (flat for unit, _ in one.units for flat in (unit.flat, unit.gathered[unit.flat]))
            yield from one.between_steps
        if one.stage.plan.pp > 1:
            held = [one.trace.release] if one.stage.last or lets_outputs_go(one) else []
            held += [] if one.stage.first else [one.trace.release_input_grad]
            yield from (e.buffer for segment in held for e in segment.events if isinstance(e, Free))


def _streams(modules: Iterable[StageModule[Any]]) -> Iterator[tuple[Buffer, str]]:
    """The buffers that FSDP2 allocates on streams of its own, each with its stream.

    They are an all-gather's input and output, a reduce-scatter's output, and gradients that a rank alone has
    divided. Gradients before the reduction and unsharded weights are allocated on the default stream, and so
    are all-gathers that a schedule asks for ahead of time. Each pipeline stage is an FSDP root with streams
    of its own, and so is a reference.

    Source: `torch.distributed.fsdp._fully_shard._fsdp_collectives:foreach_all_gather`,
    `torch.distributed.fsdp._fully_shard._fsdp_collectives:foreach_reduce`,
    `torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPCommContext.get_all_gather_streams`,
    `torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState._lazy_init`.
    """
    for local, one in enumerate(modules):
        yield from [(buffer, STREAM) for buffer in from_host(one.stage.trace)]
        if isinstance(one, FullyShardedDataParallel):
            for flat, _ in one.units:
                yield flat.low_precision, "pre-unshard"
                yield flat.uploaded, "pre-unshard"
                for buffer in (flat.unsharded, flat.grad, *flat.zeros):
                    yield buffer, "unshard"
                cast_late = one.stage.plan.dp_replicate > 1 and flat.reduce_output.dtype != flat.reduced.dtype
                for buffer in flat.reduction:
                    late = cast_late and buffer in (flat.reduced, flat.passing)
                    yield buffer, "all-reduce" if late else "post-backward"
        if isinstance(one, FSDPModule):
            for unit, _ in one.units.reduced:
                for buffer in (unit.reduced, unit.passing, unit.reduce_output, unit.divided):
                    yield buffer, f"reduce-scatter {local}"
                for events, _ in (*unit.updates(makes_states=True), *unit.updates(makes_states=False)):
                    yield from [(e.buffer, f"reduce-scatter {local}") for e in events if isinstance(e, Alloc)]
            for unit, _ in one.units:
                yield from [(buffer, f"all-gather copy-in {local}") for buffer in unit.gathered]
            if one.units.reference is not None:
                for buffer in one.units.reference.gathered:
                    yield buffer, f"all-gather copy-in of the {REFERENCE} {local}"
