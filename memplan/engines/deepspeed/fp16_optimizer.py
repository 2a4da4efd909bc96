"""ZeRO-0 in 16 bits: flat weights, masters and moments, all whole; gradients one by one until the step.

Source: `deepspeed.runtime.fp16.fused_optimizer:FP16_Optimizer`, which bfloat16 uses too.
"""

from collections.abc import Iterator, Sequence
from typing import Final, final

from memplan.engines.deepspeed.stage import DeepSpeedStage
from memplan.engines.deepspeed.zero_optimizer import Optimizer, flat_buffer, stepped
from memplan.parts.flat import Slot
from memplan.plan import Rank
from memplan.record import Collective, Event, Stretch, allocs, events, frees
from memplan.shapes import BOOL, FP32, INT64, UINT8, buffer_of

ALLREDUCE_ELEMENTS: Final = 500_000_000
"""Elements of gradients after which an all-reduce begins (`MEMORY_OPT_ALLREDUCE_SIZE`)."""


@final
class FP16Optimizer(Optimizer):
    """Plays `deepspeed.runtime.fp16.fused_optimizer:FP16_Optimizer` under data parallelism.

    `n_masked`: the stretches of the flat group that the norm leaves out.
    """

    scales_loss = False

    def __init__(self, stage: DeepSpeedStage, slots: Sequence[Slot], rank: Rank) -> None:
        super().__init__(stage, slots)
        again = [slot for slot in slots if not slot.parameter.is_divided] if rank.cp or rank.tp else []
        starts, ends = {slot.start for slot in again}, {slot.end for slot in again}
        self.n_masked = len(starts - ends)
        n = slots[-1].end
        self.flat = flat_buffer("fp16_groups_flat", n, stage.dtype, weights=True)
        self.fp32 = [flat_buffer(name, n) for name in ("fp32_groups_flat", "exp_avg", "exp_avg_sq")]
        mask = buffer_of("flatten_grad_norm_mask_list", (self.n_masked, 2), INT64)
        self.made_in_step = [mask] * (self.n_masked > 0)
        self.states = self.flat, *self.fp32, *self.made_in_step
        self.grads = [self.grad(slot) for slot in self.slots]

    def setup(self) -> Iterator[Event]:
        """Clones of the weights are flattened; a step on zeros makes the moments.

        Source: `deepspeed.runtime.fp16.fused_optimizer:FP16_Optimizer.initialize_optimizer_states`.
        """
        weights = [self.stage.weights[slot.parameter] for slot in self.slots]
        clones = [buffer_of(f"{one.name} (clone)", one.shape, one.dtype) for one in weights]
        copy = buffer_of("clone of fp16_groups_flat", self.flat.shape, self.flat.dtype)
        zeros = buffer_of("zero gradients", self.flat.shape, FP32)
        yield from (*allocs(*clones, self.flat), *frees(*clones, *weights))
        master, *moments = self.fp32
        yield from (*allocs(copy, master), *frees(copy), *allocs(zeros, *moments), *frees(zeros))

    def hook(self, slot: Slot, *, older: bool, boundary: bool) -> Iterator[Event]:
        yield from frees(*[self.grad(slot)] * older)

    def epilogue(self, *, older: bool, boundary: bool) -> Iterator[Event]:
        """Plays `deepspeed.runtime.engine:DeepSpeedEngine.buffered_allreduce_fallback`."""
        if boundary:
            yield from self.reduced([slot.n_elements for slot in self.slots], ALLREDUCE_ELEMENTS)

    def step(self) -> Stretch:
        """Plays `deepspeed.runtime.fp16.fused_optimizer:FP16_Optimizer.step`."""
        wide = [buffer_of("gradient in float32", slot.parameter.shape, FP32) for slot in self.slots]
        flat = buffer_of("flat gradients", self.flat.shape, FP32)
        flattened = (*allocs(*wide, flat), *frees(*wide, *self.grads))
        return stepped(
            events("overflow flag", self._agreed("overflow flag", UINT8.itemsize)),
            events("gradients in float32", flattened),
            events("norm of gradients", (*self._masked(), *self._agreed("norm of gradients", FP32.itemsize))),
            after=frees(flat),
        )

    def _agreed(self, what: str, n_bytes: int) -> list[Event]:
        """An all-reduce over tensor-parallel ranks.

        For these DeepSpeed takes the ranks of a sequence, or of a pipeline, too.
        """
        plan = self.stage.plan
        axis = "pp" if plan.pp > 1 else "cp" if plan.cp > 1 else "tp"
        one = Collective(kind="all_reduce", axis=axis, what=what, payload_bytes=n_bytes)
        return [one] * (max(plan.pp, plan.cp, plan.tp) > 1)

    def _masked(self) -> Iterator[Event]:
        """The gradients without what the first of these ranks has too: of a sequence's ranks, all.

        Source: `deepspeed.runtime.utils:get_flattened_grad_norm`.
        """
        if not self.n_masked:
            return
        n = self.slots[-1].end
        pairs = buffer_of("cum_sum_pairs", (self.n_masked, 2), FP32)
        marks, sums = (buffer_of(name, (n + 1,), FP32) for name in ("mask_tensor", "cumulated mask"))
        mask, masked = buffer_of("mask", (n + 1,), BOOL), buffer_of("masked gradients", (n,), FP32)
        yield from (*allocs(pairs, marks, sums, mask), *frees(sums, marks))
        yield from (*allocs(masked), *frees(masked, mask, pairs))
