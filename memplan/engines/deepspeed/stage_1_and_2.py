"""ZeRO-1 and ZeRO-2: weights flat and whole, masters and moments of one partition, reduced gradients.

Source: `deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer`.
"""

from collections.abc import Iterator, Sequence
from typing import Final, final

from memplan.engines.base import HostRecord
from memplan.engines.deepspeed.options import overlaps
from memplan.engines.deepspeed.stage import DeepSpeedStage
from memplan.engines.deepspeed.zero_optimizer import (
    REDUCTION,
    Optimizer,
    flat_buffer,
    host_copy,
    host_record,
    norms_of,
    stepped,
)
from memplan.parts.flat import Partitions, Slot
from memplan.record import COMPUTE, Event, Stretch, WaitStream, allocs, events, frees
from memplan.shapes import FP32, FP64, UINT8, Buffer, buffer_of

GLOBAL_NORM: Final = buffer_of("_global_grad_norm", (), FP32)
"""The unscaled norm; the engine keeps the last step's until this step is over."""


@final
class DeepSpeedZeroOptimizer(Optimizer):
    """Plays `deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer` with contiguous gradients.

    ZeRO-2, or `overlap_comm`, reduces gradients as they come, in buckets; ZeRO-1 keeps them until the last
    backward pass is over.

    Attributes:
        bucket: the parameters whose gradients are in the bucket.
        left: the ones whose gradients are larger than a bucket and stay until the backward pass is over.
        has_partition: whether `grads_in_partition` has been allocated in this backward pass.
        normed: the elements of each slice whose norm it takes; the first tensor-parallel rank alone takes
            the norms of weights that all of these ranks have.
    """

    def __init__(self, stage: DeepSpeedStage, slots: Sequence[Slot], rank: int, tp_rank: int) -> None:
        super().__init__(stage, slots)
        options, plan, dtype = stage.options, stage.plan, stage.dtype
        self.partitions = Partitions(slots, plan.n_shards)
        self.partition_gradients, self.overlaps = plan.zero == 2, overlaps(plan)
        self.bucket_size = options.reduce_bucket_size
        self.stream = REDUCTION if self.overlaps else COMPUTE
        size = self.partitions.size
        self.flat = flat_buffer("bit16_groups_flat", self.partitions.n_elements, dtype, weights=True)
        self.master = flat_buffer("single_partition_of_fp32_groups", size)
        self.moments = flat_buffer("exp_avg", size), flat_buffer("exp_avg_sq", size)
        names = ("ipg bucket", "second ipg bucket")[: 1 + self.overlaps]
        self.ipg_buffers = [buffer_of(name, (self.bucket_size,), dtype) for name in names]
        self.own = self.partitions.slices(rank)
        self.normed = [n for slot, n in self.own.items() if slot.parameter.is_divided or not tp_rank]
        self.padding = size - sum(self.own.values())
        owned = sum([slot.n_elements for slot in self.own])
        self.grads_in_partition = buffer_of("grads_in_partition", (owned,), dtype, "grads")
        self.kept: Sequence[Buffer] = (GLOBAL_NORM,)
        self.made_in_step: Sequence[Buffer] = self.moments
        self.states: Sequence[Buffer] = (self.flat, self.master, *self.moments)
        self.grads = [buffer_of("averaged_gradients", (size,), dtype, "grads")]
        self.zeros = buffer_of("padding of averaged_gradients", (self.padding,), dtype, "grads")
        self.offloads = options.offload_optimizer != "none"
        self.norms = [buffer_of("norm of a gradient", (), FP64) for _ in self.own]
        cloned = [slot for slot in slots if self.offloads and self._is_large(slot)]
        clone = "clone of a large gradient"
        self.clones = {slot: buffer_of(clone, (slot.n_elements,), dtype, "grads") for slot in cloned}
        if self.offloads:
            largest = max([slot.n_elements for slot in slots])
            self.staging = buffer_of("temp_grad_buffer_for_gpu_offload", (largest,), dtype)
            self.states, self.kept, self.made_in_step = (self.flat, self.staging), (), ()
            self.grads = [buffer_of("single_grad_partition", (size,), FP32, "grads")]
        self.at_boundary = False
        self.bucket: list[Slot] = []
        self.left: list[Slot] = []
        self.has_partition = self.ready_for_gradients = False

    @property
    def on_own_stream(self) -> list[tuple[Buffer, str]]:
        held = [self.grads_in_partition, *self.flattened] if self.overlaps else []
        return [(one, "reduction") for one in held]

    def setup(self) -> Iterator[Event]:
        """The flat copy of the weights, the master partition, and zeros (`initialize_optimizer_states`)."""
        padding = self.partitions.n_elements - self.slots[-1].end
        pad = buffer_of("alignment", (padding,), self.stage.dtype)
        part = buffer_of("partition", (self.partitions.size,), self.stage.dtype)
        zeros = buffer_of("single_grad_partition", (self.partitions.size,), FP32)
        pads, weights = [pad] * (padding > 0), [self.stage.weights[slot.parameter] for slot in self.slots]
        yield from (*allocs(*pads, self.flat), *frees(*pads, *weights))
        if self.offloads:
            yield from (*allocs(part), *frees(part), *allocs(self.staging))
        else:
            yield from (*allocs(part, self.master), *frees(part), *allocs(zeros), *frees(zeros))

    def hook(self, slot: Slot, *, older: bool, boundary: bool) -> Iterator[Event]:
        """Plays `process_gradients`."""
        self.at_boundary = boundary
        if not self.ready_for_gradients:  # setup_buckets
            self.ready_for_gradients = True
            yield from allocs(*self.ipg_buffers)
        accumulated = older and not self.partition_gradients
        if self.partition_gradients or (self.overlaps and boundary):
            yield from frees(*[self.grad(slot)] * accumulated)
            yield from self.reduce_independent_p_g_buckets_and_remove_grads(slot)
        elif accumulated:
            yield from frees(self.grad(slot))

    def reduce_independent_p_g_buckets_and_remove_grads(self, slot: Slot) -> Iterator[Event]:
        """Copies a gradient into the bucket and frees it; a full bucket is reduced first."""
        if sum([one.n_elements for one in self.bucket]) + slot.n_elements > self.bucket_size:
            yield from self.reduce_ipg_grads()
        self.bucket.append(slot)
        if slot in self.clones:
            yield from allocs(self.clones[slot])
        if slot in self.clones or not self._is_large(slot):
            yield from frees(self.grad(slot))

    def _large(self, slot: Slot) -> Buffer:
        """A gradient that is larger than a bucket: a clone if the optimizer is on the host."""
        return self.clones.get(slot) or self.grad(slot)

    def _is_large(self, slot: Slot) -> bool:
        """Whether a gradient is larger than a bucket (`extra_large_param_to_reduce`): it is not copied."""
        return slot.n_elements > self.bucket_size

    def reduce_ipg_grads(self) -> Iterator[Event]:
        """Reduces the bucket; the rank's partition is copied out of it (`copy_grads_in_partition`)."""
        ranges = self.partitions.ranges(self.bucket)
        yield from self.reduced(ranges, self.bucket_size, self.stream)
        for slot in self.bucket:
            if slot in self.own and self.offloads:
                yield from self._to_host(slot)
            elif slot in self.own and not self.has_partition:
                self.has_partition = True
                yield from allocs(self.grads_in_partition)
            stays = self.offloads and not self.at_boundary and slot in self.own
            if self._is_large(slot) and not stays and (slot in self.own or self.partition_gradients):
                yield from frees(self._large(slot))
            elif self._is_large(slot):
                self.left.append(slot)
        self.bucket = []

    def _to_host(self, slot: Slot) -> Iterator[Event]:
        """The norm of a gradient's slice, and a copy in float32 that the host gets, at the boundary.

        Neglects: the scalars of `has_inf_or_nan`.
        Source: `deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.copy_grads_in_partition`.
        """
        if not self.at_boundary:
            yield host_copy("gradients to the host", slot.n_elements * self.stage.dtype.itemsize, self.stream)
            return
        norm = self.norms[list(self.own).index(slot)]
        yield from self.sent_in_float32(self.own[slot], norm, self.stream)

    @property
    def host(self) -> HostRecord | None:
        """The masters, the moments, float32 gradients and what is copied to them and from them."""
        if not self.offloads:
            return None
        size, dtype = self.partitions.size, self.stage.dtype
        copied = [self.master, *self.grads, buffer_of("param_buffer_of_bit16", (size,), dtype)]
        copied.append(buffer_of("temp_grad_buffer_for_cpu_offload", self.staging.shape, dtype))
        if self.stage.plan.n_micro_batches > 1:
            copied += [buffer_of("accumulated_grads_in_cpu", (slot.n_elements,), dtype) for slot in self.own]
        pinned = copied if self.stage.options.offload_optimizer == "cpu-pinned" else []
        return host_record(pinned, [*self.moments, *(() if pinned else copied)])

    def epilogue(self, *, older: bool, boundary: bool) -> Iterator[Event]:
        """Reduces the rest; a partition's gradients are added to an earlier micro-batch's.

        Plays `independent_gradient_partition_epilogue`, and ZeRO-1's `reduce_gradients`, which makes another
        bucket on a pipeline's rank.
        """
        self.at_boundary = boundary
        if not (self.partition_gradients or boundary):
            return
        more = self.ipg_buffers * (self.stage.plan.pp > 1)
        yield from allocs(*more)
        if not (self.partition_gradients or self.overlaps):  # reduce_gradients
            for slot in self.slots:
                yield from self.reduce_independent_p_g_buckets_and_remove_grads(slot)
        yield from self.reduce_ipg_grads()
        yield from [WaitStream(COMPUTE, REDUCTION)] * self.overlaps
        yield from allocs(*[self.zeros] * (boundary and self.padding > 0 and not self.offloads))
        yield from frees(*self.ipg_buffers, *more)
        yield from frees(*[self._large(slot) for slot in self.left])
        self.left, self.ready_for_gradients = [], False
        if self.has_partition and older and self.partition_gradients:
            yield from frees(self.grads_in_partition)
        self.has_partition = False

    def step(self) -> Stretch:
        """Plays `DeepSpeedZeroOptimizer.step`; a single rank gathers no weights.

        Source: `deepspeed.runtime.utils:all_gather_into_tensor_dp_groups`.
        """
        what = "gather updated weights"
        gather = self.collective("all_gather", what, self.flat.n_bytes)
        gathered = [gather] * (self.stage.plan.n_shards > 1)
        if self.offloads:
            back = host_copy("updated weights", self.partitions.size * self.stage.dtype.itemsize)
            return stepped(events("norm of gradients", self._norm()), after=(back, *gathered))
        size = self.partitions.size
        flat = buffer_of("flat_grad_partition", (size,), self.stage.dtype)
        single = buffer_of("single_grad_partition", (size,), FP32)
        n_tensors = len(self.own) + (self.padding > 0)
        grads = [self.grads_in_partition] * bool(self.own) + [self.zeros] * (self.padding > 0)
        flattening = [flat] if n_tensors > 1 else []
        scaled = buffer_of("scaled_global_grad_norm", (), FP32)
        before = *allocs(scaled, GLOBAL_NORM, *flattening, single), *frees(*flattening, *grads)
        return stepped(
            events("norm of gradients", self._norm()),
            events("gradients in float32", before),
            after=(*frees(single), *gathered, *frees(scaled, GLOBAL_NORM)),
        )

    def _norm(self) -> Iterator[Event]:
        """The overflow flag, and the norm of each slice of a gradient (`get_grad_norm_direct`).

        Under offload the norms were computed as the slices were copied to the host.
        """
        yield from self.agreed("overflow flag", UINT8.itemsize)
        if not self.offloads:
            yield from norms_of(self.stage, self.normed)
        yield from self.agreed("norm of gradients", FP32.itemsize)
        if self.offloads:
            yield from frees(*self.norms)
