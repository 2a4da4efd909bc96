"""BF16_Optimizer, which pipelines in bfloat16 have under ZeRO-0; it divides masters and moments as ZeRO-1.

Source: `deepspeed.runtime.bf16_optimizer:BF16_Optimizer`.
"""

from collections.abc import Iterator, Sequence
from typing import final

from memplan.engines.deepspeed.stage import DeepSpeedStage
from memplan.engines.deepspeed.zero_optimizer import Optimizer, flat_buffer, stepped
from memplan.kernels import norm_scratch
from memplan.parts.flat import Partitions, Slot
from memplan.record import Event, Stretch, allocs, events, frees
from memplan.shapes import BOOL, FP32, UINT8, Buffer, buffer_of

GLOBAL_NORM = buffer_of("_global_grad_norm", (), FP32)
"""The norm; the engine keeps the last step's until this step is over."""


@final
class BF16Optimizer(Optimizer):
    """Plays `deepspeed.runtime.bf16_optimizer:BF16_Optimizer` with gradients summed in bfloat16.

    `summed`: the flat tensor that each backward pass adds the weights' gradients to; these are zeroed after,
    and freed with the update.
    """

    scales_loss = False

    def __init__(self, stage: DeepSpeedStage, slots: Sequence[Slot]) -> None:
        super().__init__(stage, slots)
        self.partitions = Partitions(slots, stage.plan.n_shards)
        size, n_elements = self.partitions.size, self.partitions.n_elements
        self.flat = flat_buffer("bf16_groups_flat", n_elements, stage.dtype, weights=True)
        self.summed = buffer_of("fp32_groups_gradients_flat", (n_elements,), stage.dtype, "grads")
        self.master = flat_buffer("fp32_groups_flat_partition", size)
        self.made_in_step: Sequence[Buffer] = flat_buffer("exp_avg", size), flat_buffer("exp_avg_sq", size)
        self.kept: Sequence[Buffer] = (GLOBAL_NORM,)
        self.states: Sequence[Buffer] = self.flat, self.master, *self.made_in_step
        self.own_grads = [self.grad(slot) for slot in self.slots]
        self.grads = [self.summed, *self.own_grads]

    @property
    def between_steps(self) -> Sequence[Buffer]:
        return (self.summed,)

    def setup(self) -> Iterator[Event]:
        """The flat copy of the weights, the master partition, zeros that gradients are added to.

        Source: `deepspeed.runtime.bf16_optimizer:BF16_Optimizer._setup_for_real_optimizer`.
        """
        padding = self.partitions.n_elements - self.slots[-1].end
        pads = [buffer_of("pad_tensor", (padding,), self.stage.dtype)] * (padding > 0)
        part = buffer_of("clone of a partition", self.master.shape, self.stage.dtype)
        weights = [self.stage.weights[slot.parameter] for slot in self.slots]
        yield from (*allocs(*pads, self.flat), *frees(*pads, *weights))
        yield from (*allocs(part, self.master), *frees(part), *allocs(self.summed))

    def hook(self, slot: Slot, *, older: bool, boundary: bool) -> Iterator[Event]:
        yield from frees(*[self.grad(slot)] * older)

    def epilogue(self, *, older: bool, boundary: bool) -> Iterator[Event]:
        """All gradients are reduced in place, as they are one tensor (`_bf16_reduce_grads`)."""
        if boundary:
            yield self.all_reduce("reduce gradients", self.summed.n_bytes)

    def step(self) -> Stretch:
        """Plays `deepspeed.runtime.bf16_optimizer:BF16_Optimizer.step`, and `zero_grad`."""
        part = buffer_of("gradients of the partition in float32", self.master.shape, FP32)
        gather = self.collective("all_gather", "gather updated weights", self.flat.n_bytes)
        gathered = [gather] * (self.stage.plan.n_shards > 1)
        return stepped(
            events("norm of gradients", self._norm()),
            events("gradients in float32", allocs(part)),
            after=(*frees(part), *gathered, *frees(GLOBAL_NORM, *self.own_grads)),
        )

    def _norm(self) -> Iterator[Event]:
        """The norms of all gradients, each in float32, and the norm of these.

        Source: `deepspeed.runtime.utils:get_global_norm_of_tensors`.
        """
        norms = []
        for slot in self.slots:
            wide = buffer_of("gradient in float32", slot.parameter.shape, FP32)
            norms.append(buffer_of("norm of a gradient", (), FP32))
            scratch = norm_scratch(self.stage.device, slot.n_elements, itemsize=FP32.itemsize)
            own = [buffer_of("scratch of a norm", (n_bytes,), UINT8) for n_bytes in scratch]
            yield from (*allocs(wide, norms[-1], *own), *frees(*own, wide))
        stacked, powers = (buffer_of(name, (len(norms),), FP32) for name in ("norms", "norm_powers"))
        total, error = (buffer_of(name, (), FP32) for name in ("device_total_norm", "err"))
        flags = [buffer_of(name, (), BOOL) for name in ("norm_is_inf", "norm_is_nan", "inf_or_nan")]
        yield from (*allocs(stacked, powers), *frees(stacked), *allocs(total))
        yield from self.agreed("norm of gradients", FP32.itemsize)[1:]
        yield from (*allocs(GLOBAL_NORM, *flags, error), *frees(error, *flags, total, powers, *norms))
