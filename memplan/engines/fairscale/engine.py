"""FairScale as an engine: OSS under DistributedDataParallel or ShardedDataParallel."""

from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any, final

from memplan.device import Device
from memplan.engines.base import Engine, RankRecord
from memplan.engines.fairscale.options import FairScaleOptions
from memplan.engines.fairscale.oss import OSS, UPDATE_NAME, FairScaleStage
from memplan.engines.fairscale.refusals import REFUSALS
from memplan.engines.fairscale.sharded_ddp import ShardedDataParallel
from memplan.models import Model
from memplan.parts.ddp import (
    Arguments,
    DistributedDataParallel,
    broadcast_weights,
    first_buckets,
    flat_buckets,
)
from memplan.parts.module import StageModule, accumulation
from memplan.plan import Plan, Rank
from memplan.record import Event, Stretch, allocs, chain, events, frees
from memplan.replay.program import AllocatorProgram
from memplan.tape import Backend


@final
class FairScale(Engine):
    """FairScale 0.4.13 over data-parallel ranks."""

    name = "fairscale"
    axes = ("dp",)
    refusals = REFUSALS
    options = FairScaleOptions
    confirmed_gpus = ("h100-sxm", "a100-80-sxm")
    confirmed_on_cpu = True

    def play(self, model: Model, plan: Plan, device: Device) -> Iterator[RankRecord]:
        """The record of the fullest rank: under DDP of the one that owns most, else of any that differ."""
        stage = FairScaleStage(model, plan, device, None)
        sizes = [sum([stage.trained[i].n_elements for i in own]) for own in stage.partition]
        ranks = [sizes.index(max(sizes))] if plan.zero == 1 else range(plan.n_replicas)
        different = {tuple(stage.partition[rank]): rank for rank in reversed(ranks)}
        played = [FairScaleRank(stage, Rank(dp=rank)).record() for rank in different.values()]
        yield max(played, key=lambda record: record.peak_bytes)

    def play_rank(
        self, model: Model, plan: Plan, rank: Rank, device: Device, backend: Backend | None
    ) -> RankRecord:
        return FairScaleRank(FairScaleStage(model, plan, device, backend), rank).record()

    def notes(self, model: Model, plan: Plan) -> Iterator[str]:
        wrapper = "DistributedDataParallel" if plan.zero == 1 else "ShardedDataParallel"
        yield (
            f"zero={plan.zero} is FairScale's OSS under {wrapper}: OSS deals out whole tensors, so ranks "
            "hold unequal parts, and the fullest rank is shown."
        )
        if plan.zero == 2:
            yield (
                "ShardedDataParallel frees a gradient that another rank owns once its reduction is over; the "
                "bytes take that to be before the next gradient. On slow links more gradients are held. "
                "sync_models_at_startup=False is planned: with True, NCCL may hold all weights twice in the "
                "first step."
            )


FAIRSCALE = FairScale()


class FairScaleRank:
    """One rank's module under its wrapper, its optimizer, and its record."""

    def __init__(self, stage: FairScaleStage, rank: Rank) -> None:
        self.stage, self.rank = stage, rank
        self.oss = OSS(stage, rank.dp)
        self.ddp: DistributedDataParallel | None = None
        self.sharded: ShardedDataParallel | None = None
        self.module: StageModule[Any]
        if stage.plan.zero == 1:
            self.module = self.ddp = DistributedDataParallel(stage, Arguments())
            self.first_buckets = first_buckets(stage, Arguments())
            self.buckets = flat_buckets(self.ddp.reducer.buckets)
        else:
            self.module = self.sharded = ShardedDataParallel(stage, self.oss)
            self.buckets = [one for one in self.sharded.buckets.values() if one.n_bytes]

    def record(self) -> RankRecord:
        """The rank's record: what it holds between steps, and its step."""
        stage, update = self.stage, self.oss.step()
        step = chain("step", *accumulation(self.module.fresh(), stage.plan.n_micro_batches), update)
        every = stage.trace.gradients()
        counts, on_cpu = self.oss.step_counts, stage.device.on_cpu
        held = [*stage.buckets.values(), *self.oss.moments, *stage.held]
        return RankRecord(
            rank=self.rank, layers=(range(stage.n_blocks),), step=step, update=(update,),
            rest=Counter([*held, *self.buckets]) + (counts if on_cpu else Counter()),
            grads=self.sharded.grads if self.sharded else Counter([every[one] for one in stage.trained]),
            step_counts=Counter() if on_cpu else counts,
            setup=events("set-up", (*self._setup(), *self._start())),
            program=None if on_cpu else partial(self._program, step),
        )  # fmt: skip

    def _program(self, step: Stretch) -> AllocatorProgram:
        """The rank's allocations and frees from the module's weights on."""
        stage = self.stage
        second = (*frees(*self.first_buckets), *allocs(*self.buckets)) if self.ddp else ()
        return AllocatorProgram(
            setup=tuple(self._setup()), start=tuple(self._start()), second=second, step=step,
            states=tuple(self.oss.moments), update_name=UPDATE_NAME, beside=stage.workspaces,
            oldest_first=frozenset(stage.buckets.values()), handed_on=frozenset([stage.trace.boundary]),
        )  # fmt: skip

    def _setup(self) -> Iterator[Event]:
        """The module, OSS's buckets, DDP's first one, the step's tokens."""
        stage = self.stage
        yield from (*stage.make_modules(), *self.oss.setup())
        if self.ddp:
            yield from (*broadcast_weights(stage.trained), *allocs(*self.first_buckets))
        yield from stage.draw_inputs()

    def _start(self) -> Iterator[Event]:
        """What ShardedDataParallel's first forward pass makes."""
        if self.sharded:
            yield from (*self.oss.refresh_trainable(), *self.sharded.refresh_trainable())
