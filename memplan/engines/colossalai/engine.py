"""Colossal-AI as an engine: a module boosted by LowLevelZeroPlugin."""

from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple, final

from memplan.device import Device
from memplan.engines.base import Engine, RankRecord
from memplan.engines.colossalai.bookkeeping import REDUCTION, Bucket, ColossalAIStage, Working, buckets_of
from memplan.engines.colossalai.low_level_optim import UPDATE_NAME, LowLevelZeroOptimizer
from memplan.engines.colossalai.options import ColossalAIOptions
from memplan.engines.colossalai.refusals import REFUSALS
from memplan.models import Model
from memplan.parts.module import StageModule, accumulation
from memplan.passes.module_calls import Part
from memplan.plan import Plan, Rank
from memplan.record import COMPUTE, AccumulateGrad, Event, Stretch, WaitStream, chain, events, frees
from memplan.replay.program import AllocatorProgram
from memplan.tape import Backend


@final
class ColossalAI(Engine):
    """Colossal-AI 0.5.0 over data-parallel ranks, which hold as much as each other."""

    name = "colossalai"
    axes = ("dp",)
    refusals = REFUSALS
    options = ColossalAIOptions
    confirmed_gpus = ("h100-sxm", "a100-80-sxm")
    confirmed_on_cpu = True

    def play(self, model: Model, plan: Plan, device: Device) -> Iterator[RankRecord]:
        yield self.play_rank(model, plan, Rank(), device, None)

    def play_rank(
        self, model: Model, plan: Plan, rank: Rank, device: Device, backend: Backend | None
    ) -> RankRecord:
        return _record(ColossalAIStage(model, plan, device, backend), rank)


COLOSSALAI = ColossalAI()


class ZeroState(NamedTuple):
    """Whether gradients of an earlier micro-batch wait for their reduction, or are in the gradient store.

    `syncs`: the next ones are reduced.
    """

    has_grads: bool
    is_stored: bool
    syncs: bool


@final
class LowLevelZeroModule(StageModule[ZeroState]):
    """The passes of a boosted module; ZeRO-1 reduces gradients in the last micro-batch only (`no_sync`).

    Hooks reduce gradients as they come under ZeRO-2, or with `overlap_communication`.

    Source: `colossalai.zero.low_level.low_level_optim:LowLevelZeroOptimizer.backward`.
    """

    def __init__(self, stage: ColossalAIStage) -> None:
        super().__init__(stage, ZeroState(has_grads=False, is_stored=False, syncs=stage.plan.zero == 2))
        self.overlaps = stage.options.overlap_communication
        self.parts = list(stage.backward_parts(*stage.placed(stage.working)))
        has_hooks = self.overlaps or stage.plan.zero == 2
        found = buckets_of(self._as_they_come() if has_hooks else stage.working, stage.bucket_size)
        self.buckets = [Bucket(stage, parameters) for parameters in found]
        self.order = [one for parameters in found for one in parameters]
        self.opens = {parameters[0] for parameters in found[1:]} if has_hooks else set()

    def _as_they_come(self) -> Iterator[Working]:
        for part in self.parts:
            for event in part.segment.events:
                if isinstance(event, AccumulateGrad):
                    yield part.owned[event.parameter]

    def require_gradient_sync(self) -> None:
        """The end of `LowLevelZeroOptimizer.no_sync`."""
        self.state = self.state._replace(syncs=True)

    def _made_grads(self) -> None:
        syncs = self.state.syncs
        self.state = self.state._replace(has_grads=not syncs, is_stored=syncs)

    def _backward(self) -> Stretch:
        (grad, *held), left = self.trace.end_of_backward.events, iter(self.buckets)
        parts = [events(part.name, self._hooked(part, left)) for part in self.parts]
        ends: list[Event] = [grad]
        if self.state.syncs:
            for bucket in left:
                ends += bucket.reduction(added=self.state.is_stored)
            ends += [WaitStream(COMPUTE, REDUCTION)] * self.overlaps
        self._made_grads()
        return chain("backward", *parts, events("backward: end", [*ends, *held]))

    def _hooked(self, part: Part[Working], left: Iterator[Bucket]) -> Iterator[Event]:
        """A part's events with what the hook of each gradient does.

        One that opens a bucket reduces the bucket before. Autograd holds a gradient that it has added to an
        earlier one until its hook returns.
        """
        for event in part.segment.events:
            yield event
            if isinstance(event, AccumulateGrad):
                if self.state.syncs and part.owned[event.parameter] in self.opens:
                    yield from next(left).reduction(added=self.state.is_stored)
                yield from frees(event.buffer) * self.state.has_grads


def _record(stage: ColossalAIStage, rank: Rank) -> RankRecord:
    """A rank's record: what it holds between steps, and its step."""
    module, optimizer = LowLevelZeroModule(stage), LowLevelZeroOptimizer(stage)
    update, counts, on_cpu = optimizer.step(module.order), optimizer.step_counts, stage.device.on_cpu
    step = chain("step", *accumulation(module, stage.plan.n_micro_batches), update)
    held = [*optimizer.masters, *optimizer.moments, *optimizer.scaler, *stage.held]
    setup = *stage.make_modules(), *optimizer.setup(), *stage.draw_inputs()
    on_own_stream = [buffer for bucket in module.buckets for buffer in bucket.on_own_stream]
    program = partial(
        AllocatorProgram, setup=setup, step=step, states=tuple(optimizer.moments), update_name=UPDATE_NAME,
        beside=stage.workspaces, handed_on=frozenset([stage.trace.boundary]),
        streams=dict.fromkeys(on_own_stream, REDUCTION),
    )  # fmt: skip
    return RankRecord(
        rank=rank, layers=(range(stage.n_blocks),), step=step, update=(update,),
        rest=Counter([*held, *[one.weight for one in stage.working]]) + (counts if on_cpu else Counter()),
        grads=Counter([bucket.reduced for bucket in module.buckets]),
        step_counts=Counter() if on_cpu else counts,
        setup=events("set-up", setup), program=None if on_cpu else program,
    )  # fmt: skip
