"""OSS: each rank updates its own parameters, and broadcasts them; all weights are views of flat buckets.

Source: `fairscale.optim.oss:OSS`.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Final, final

from memplan.device import Device
from memplan.engines.fairscale.options import fairscale_options
from memplan.kernels import norm_scratch
from memplan.memory import Alive
from memplan.models import Model
from memplan.optimizers import ADAM
from memplan.parts.stage import WholeStage
from memplan.parts.weight_updates import Weight, default_update
from memplan.plan import Plan
from memplan.record import Collective, Event, Stretch, allocs, chain, events, frees
from memplan.shapes import FP32, UINT8, Buffer, Parameter, buffer_of
from memplan.tape import Backend, OpContext

UPDATE_NAME: Final = "optimizer step"
"""The stretch before which the first step makes the optimizer's moments."""


@final
class FairScaleStage(WholeStage):
    """The whole model as OSS and its wrappers have it."""

    def __init__(self, model: Model, plan: Plan, device: Device, backend: Backend | None) -> None:
        super().__init__(model, plan, device, backend, plan.formats.stored)
        self.options = fairscale_options(plan)

    @cached_property
    def op_context(self) -> OpContext:
        plan = self.plan
        autocast = plan.formats.compute if plan.mixed or plan.formats.autocast else None
        return replace(super().op_context, autocast=autocast)

    @cached_property
    def partition(self) -> list[list[int]]:
        """The places of each rank's parameters among all: each goes to the rank with the fewest elements.

        Source: `fairscale.optim.oss:OSS.partition_parameters`.
        """
        found: list[list[int]] = [[] for _ in range(self.plan.dp)]
        sizes = [0] * self.plan.dp
        for place, parameter in enumerate(self.trained):
            rank = sizes.index(min(sizes))
            found[rank].append(place)
            sizes[rank] += parameter.n_elements
        return found

    @cached_property
    def buckets(self) -> dict[int, Buffer]:
        """The flat weights of each rank that has any (`ParamBucket`)."""
        sizes = [sum([self.trained[i].n_elements for i in places]) for places in self.partition]
        return {
            rank: buffer_of(f"ParamBucket of rank {rank}", (n,), self.dtype, "weights")
            for rank, n in enumerate(sizes)
            if n
        }

    def by_size(self, places: Iterable[int]) -> list[int]:
        """Places of parameters, the smallest first."""
        return sorted(places, key=lambda i: self.trained[i].n_elements)


class OSS:
    """Plays `fairscale.optim.oss:OSS` on one rank."""

    def __init__(self, stage: FairScaleStage, rank: int) -> None:
        self.stage = stage
        self.places = stage.partition[rank]
        self.owned: Sequence[Parameter] = [stage.trained[i] for i in self.places]
        self.is_adam = stage.plan.kept.moments == ADAM
        self.moments = [
            buffer_of(f"{p.name}.{name}", p.shape, stage.dtype, "optimizer")
            for p in self.owned
            for name in stage.plan.kept.moments
        ]
        self.step_counts: Alive = Counter(
            buffer_of(f"{p.name}.step", (), FP32, "optimizer") for p in self.owned * self.is_adam
        )

    def setup(self) -> Iterator[Event]:
        """Makes the weights views of a bucket for each rank.

        Source: `fairscale.optim.oss:OSS._setup_flat_buffers`.
        """
        stage = self.stage
        for rank, bucket in stage.buckets.items():
            own = stage.by_size(stage.partition[rank])
            yield from (*allocs(bucket), *frees(*[stage.weights[stage.trained[i]] for i in own]))

    def refresh_trainable(self) -> Iterator[Event]:
        """Makes the buckets once more, as ShardedDataParallel's first forward pass does."""
        for bucket in self.stage.buckets.values():
            yield from (*allocs(bucket), *frees(bucket))

    def step(self) -> Stretch:
        """The update of the rank's own parameters, and the broadcasts of all ranks' buckets.

        Source: `fairscale.optim.oss:OSS.step`, `fairscale.optim.oss:OSS._broadcast_params`.
        """
        stage = self.stage
        sent = [
            Collective(kind="broadcast", axis="dp", what="updated weights", payload_bytes=bucket.n_bytes)
            for bucket in stage.buckets.values()
        ]
        clips = stage.plan.clip_grad_norm is not None
        clipping = [events("gradient clipping", self.clip_grad_norm())] * clips
        updated = self.owned if self.is_adam else ()
        weights = [Weight(p.name, p.shape, stage.dtype) for p in updated]
        update = events(UPDATE_NAME, default_update(stage.plan.optimizer, weights, stage.device))
        return chain("update", *clipping, update, events("broadcast of updated weights", sent))

    def clip_grad_norm(self) -> Iterator[Event]:
        """The norms of the rank's own gradients in float32, and their sum over all ranks.

        Source: `fairscale.optim.oss:OSS.clip_grad_norm`, `fairscale.internal.params:calc_grad_norm`.
        """
        dtype = self.stage.dtype if self.owned else FP32
        norms = [buffer_of("norm of a gradient", (), FP32) for _ in self.owned]
        for norm, parameter in zip(norms, self.owned, strict=True):
            n_bytes = norm_scratch(self.stage.device, parameter.n_elements, itemsize=FP32.itemsize)
            scratch = [buffer_of("scratch of a norm", (n,), UINT8) for n in n_bytes]
            yield from (*allocs(norm, *scratch), *frees(*scratch))
        stacked = [buffer_of("norms of gradients", (len(norms),), FP32)] * bool(norms)
        names = ("norm of this rank", "its square", "norm", "largest norm", "norm and epsilon", "factor")
        local, square, norm, *factor = (buffer_of(name, (), dtype) for name in names)
        yield from (*allocs(*stacked), *frees(*norms), *allocs(local), *frees(*stacked), *allocs(square))
        what = "norm of gradients"
        yield Collective(kind="all_reduce", axis="dp", what=what, payload_bytes=dtype.itemsize)
        yield from (*allocs(norm), *frees(square), *allocs(*factor), *frees(*factor, norm, local))
