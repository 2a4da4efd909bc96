"""The optimizer of ZeRO-1 and ZeRO-2: each rank updates a part of every parameter, and gathers the others.

Source: `colossalai.zero.low_level.low_level_optim:LowLevelZeroOptimizer`.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final, final

from memplan.engines.colossalai.bookkeeping import ColossalAIStage, Working
from memplan.kernels import norm_scratch
from memplan.memory import Alive
from memplan.optimizers import ADAM
from memplan.parts.weight_updates import Weight, default_update
from memplan.record import Collective, Event, Stretch, allocs, chain, events, frees
from memplan.shapes import FP32, FP64, UINT8, Buffer, buffer_of

UPDATE_NAME: Final = "optimizer step"
"""The stretch before which the first step makes the optimizer's moments."""


@final
class LowLevelZeroOptimizer:
    """Plays `colossalai.zero.low_level.low_level_optim:LowLevelZeroOptimizer` on one rank.

    Attributes:
        masters: the rank's part of each parameter in float32; empty where it updates the weights themselves.
        scaler: the scalars of the loss scaler, in float16.
    """

    def __init__(self, stage: ColossalAIStage) -> None:
        self.stage, self.working, self.stored = stage, stage.working, stage.plan.formats.stored
        moments, self.casts = stage.plan.kept.moments, self.stored != stage.dtype
        has_masters = self.stored == FP32
        self.masters = [self._part(one, "master") for one in self.working] * has_masters
        self.moments = [self._part(one, name) for one in self.working for name in moments]
        names = [one.parameter.name for one in self.working] * (moments == ADAM)
        self.updated = [
            Weight(name, (one.shard,), self.stored) for name, one in zip(names, self.working, strict=False)
        ]
        self.step_counts: Alive = Counter(buffer_of(f"{name}.step", (), FP32, "optimizer") for name in names)
        scalars = ("scale", "min_scale", "max_scale", "found_overflow") * stage.op_context.scales_loss
        self.scaler = [buffer_of(f"grad_scaler.{name}", (1,), FP32) for name in scalars]

    def _part(self, one: Working, name: str) -> Buffer:
        return buffer_of(f"{one.parameter.name}.{name}", (one.shard,), self.stored, "optimizer")

    def setup(self) -> Iterator[Event]:
        """Pads the weights that the ranks do not divide, and copies the rank's part of each.

        Plays `LowLevelZeroOptimizer._create_master_param_current_rank`.
        """
        for i, one in enumerate(self.working):
            if one.padded_grad is not None:
                yield from (*allocs(one.weight), *frees(self.stage.weights[one.parameter]))
            part = [buffer_of("part of a weight", (one.shard,), self.stage.dtype)] * self.casts
            yield from (*allocs(*part, *self.masters[i : i + 1]), *frees(*part))
        yield from allocs(*self.scaler)

    def step(self, order: Sequence[Working]) -> Stretch:
        """The update; `order`: the parameters as their gradients came to the store.

        The variable for a gradient in float32 refers to the last one until the step returns.
        """
        wide = [buffer_of("gradient in float32", (one.shard,), FP32) for one in self.working] * self.casts
        return chain(
            "update",
            *[events("overflow", self._check_overflow(order))] * bool(self.scaler),
            events("gradients in float32", allocs(*wide)),
            events("norm of gradients", self._compute_grad_norm(order)),
            events(UPDATE_NAME, default_update(self.stage.plan.optimizer, self.updated, self.stage.device)),
            events("gather of updated weights", (*frees(*wide[:-1]), *self._gather(), *frees(*wide[-1:]))),
        )

    def _check_overflow(self, order: Sequence[Working]) -> Iterator[Event]:
        """The sum of each gradient in float32 (`has_inf_or_nan`)."""
        for one in order:
            wide = buffer_of("gradient in float32", (one.shard,), FP32)
            total = buffer_of("sum of a gradient", (), FP32)
            scratch = self._scratch(one.shard, FP32.itemsize)
            yield from (*allocs(wide, total, *scratch), *frees(*scratch, wide, total))
        yield Collective(kind="all_reduce", axis="dp", what="overflow flag", payload_bytes=FP32.itemsize)

    def _compute_grad_norm(self, order: Sequence[Working]) -> Iterator[Event]:
        """The squared norm of each gradient in float64, and their sum over all ranks, clipped or not."""
        names = "norm of a gradient", "its square", "sum of squares"
        before: list[Buffer] = []
        norm, square, total = (buffer_of(name, (), FP64) for name in names)
        for one in order:
            wide = buffer_of("gradient in float64", (one.shard,), FP64)
            scratch = self._scratch(one.shard, FP64.itemsize)
            yield from (*allocs(wide, norm, *scratch), *frees(*scratch, wide), *allocs(square))
            yield from (*frees(norm, *before), *allocs(*[total] * (not before)))
            before = [square]
        sent = buffer_of("sum of squares of all ranks", (1,), FP32)
        yield from allocs(sent)
        yield Collective(kind="all_reduce", axis="dp", what="norm of gradients", payload_bytes=sent.n_bytes)
        yield from frees(total, *before, sent)

    def _scratch(self, n_elements: int, itemsize: int) -> list[Buffer]:
        n_bytes = norm_scratch(self.stage.device, n_elements, itemsize=itemsize)
        return [buffer_of("scratch of a reduction", (n,), UINT8) for n in n_bytes]

    def _gather(self) -> Iterator[Event]:
        """All-gathers of updated weights: large ones alone, in place, the others by buckets.

        The variable for a rank's own part refers to the last one until there is a next.
        """
        most, bucket = self.stage.bucket_size, dict[Working, list[Buffer]]()
        held = list[Event]()
        for one in self.working:
            part = [buffer_of("own part of a weight", (one.shard,), self.stage.dtype)] * self.casts
            yield from (*allocs(*part), *held)
            held = [*frees(*part)] * (one.shard > most)
            if one.shard > most:
                yield from self._all_gather(one.weight)
                continue
            if sum([other.shard for other in bucket]) + one.shard > most:
                yield from self._gather_bucket(bucket)
                bucket = {}
            bucket[one] = part
        yield from (*self._gather_bucket(bucket), *held)

    def _gather_bucket(self, bucket: dict[Working, list[Buffer]]) -> Iterator[Event]:
        """The all-gather of a bucket: its flat copy, the result, and each weight put together of its parts.

        Source: `colossalai.zero.low_level.bookkeeping.tensor_bucket:TensorBucket.all_gather`.
        """
        if not bucket:
            return
        dtype, n_elements = self.stage.dtype, sum([one.shard for one in bucket])
        flat = [buffer_of("flat parts of weights", (n_elements,), dtype)] * (len(bucket) > 1)
        gathered = buffer_of("gathered weights", (n_elements * self.stage.plan.dp,), dtype)
        yield from (*allocs(*flat, gathered), *self._all_gather(gathered))
        before: list[Buffer] = []
        for one in bucket:
            whole = buffer_of("weight of its parts", (one.n_elements,), dtype)
            yield from (*allocs(whole), *frees(*before))
            before = [whole]
        *others, last = bucket.values()
        yield from frees(*[part for own in others for part in own], *flat, gathered, *last, *before)

    def _all_gather(self, gathered: Buffer) -> Iterator[Event]:
        what = "gather updated weights"
        yield Collective(kind="all_gather", axis="dp", what=what, payload_bytes=gathered.n_bytes)
        scratch = buffer_of("gloo scratch", gathered.shape, gathered.dtype)
        yield from (*allocs(scratch), *frees(scratch)) * (2 * self.stage.op_context.gathers_in_copies)
