"""ZeRO-3: a partition of each parameter, gathered for a module's passes; gradients are reduce-scattered.

Source: `deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3`.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Final, final

from memplan.engines.base import HostRecord
from memplan.engines.deepspeed.coordinator import IN_ORDER, PartitionedParameterCoordinator
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
from memplan.parts.flat import Slot
from memplan.record import COMPUTE, Event, Stretch, WaitStream, allocs, events, frees
from memplan.shapes import BOOL, FP32, FP64, Buffer, buffer_of

GLOBAL_NORM: Final = buffer_of("_global_grad_norm", (), FP64)
TRACKER: Final = buffer_of("inf_or_nan_tracker", (1,), BOOL)


@final
class Stage3Optimizer(Optimizer):
    """Plays `deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3` with contiguous gradients."""

    keeps_weights = False

    def __init__(
        self,
        stage: DeepSpeedStage,
        slots: Sequence[Slot],
        coordinator: PartitionedParameterCoordinator,
        rank: int,
    ) -> None:
        super().__init__(stage, slots)
        options, dtype, self.n_ranks = stage.options, stage.dtype, stage.plan.n_shards
        self.coordinator, self.bucket_size = coordinator, options.reduce_bucket_size
        self.overlaps = overlaps(stage.plan)
        self.parts = [slot.part(self.n_ranks) for slot in slots]
        total = sum(self.parts)
        self.groups = list(_sub_groups(self.parts, options.sub_group_size))
        self.flat = flat_buffer("lp_param_buffer", total, dtype, weights=True)
        self.masters = [flat_buffer("fp32_partitioned_groups_flat", sum(group)) for group in self.groups]
        names = ("exp_avg", "exp_avg_sq")
        self.moments = [[flat_buffer(name, sum(group)) for name in names] for group in self.groups]
        self.has_moments = True
        self.checked = [buffer_of("isinf", *one) for one in (((total,), dtype), ((total,), BOOL), ((), BOOL))]
        self.ipg_buffer = buffer_of("ipg bucket", (self.bucket_size,), stage.reduced_dtype)
        self.partitions = buffer_of("grad_partitions_flat_buffer", (total,), dtype, "grads")
        of_optimizer = [*self.masters, *[one for both in self.moments for one in both], TRACKER]
        self.offloads = options.offload_optimizer != "none"
        self.offloads_weights = options.offload_param != "none"
        on_gpu = [self.flat] * (not self.offloads_weights)
        held = [] if self.offloads else [*of_optimizer, self.partitions]
        self.states = [*on_gpu, *held, self.ipg_buffer]
        self.grads = [self.partitions]
        if self.offloads:
            self.grads = [buffer_of("single_grad_partition", (sum(g),), FP32, "grads") for g in self.groups]
        self.kept = [*[GLOBAL_NORM] * (not self.offloads), *coordinator.persistent.values()]
        held_slots = [slot for slot in slots if slot.part(self.n_ranks) * rank < slot.n_elements]
        self.norms = {slot: buffer_of("norm of a gradient", (), FP64) for slot in held_slots}
        self.accumulates = self.at_boundary = False
        self.bucket: list[Slot] = []

    @property
    def on_own_stream(self) -> list[tuple[Buffer, str]]:
        if not self.overlaps:
            return []
        held = self.coordinator
        sent = [copy for copies in held.sent.values() for copy in copies]
        gathered = [*held.whole.values(), *held.alone.values(), *held.flats, *sent]
        reduced = [*self.flattened, *self.checked]
        return [*((one, "all-gather") for one in gathered), *((one, "reduction") for one in reduced)]

    def starts_training(self) -> bool:
        self.has_moments = False
        self.coordinator.start_training()
        return True

    def init(self) -> Iterator[Event]:
        """Parameters are partitioned; among the secondary partitions of hpZ, what is free is given back."""
        if self.coordinator.secondary:
            yield from self._init()

    def setup(self) -> Iterator[Event]:
        """The joined partitions, masters, the bucket, and the gradients' partitions.

        The weights are gone: partitions are joined on the host, and the cache is emptied, unless they stay
        on the host.

        Source: `deepspeed.runtime.zero.utils:defragment`.
        """
        if self.offloads_weights:
            yield from self._init()
        else:
            yield from allocs(self.flat)
        converted = [buffer_of("converted partition", master.shape, FP32) for master in self.masters]
        if self.offloads:
            for one in converted if not self.offloads_weights else ():
                yield from (*allocs(one), *frees(one))
            yield from allocs(self.ipg_buffer)
            return
        for i, master in enumerate(self.masters):  # each is freed once the next one is there
            yield from (*allocs(converted[i]), *frees(*converted[max(0, i - 1) : i]), *allocs(master))
        yield from frees(converted[-1])
        yield from allocs(TRACKER, self.ipg_buffer, self.partitions)

    def _init(self) -> Iterator[Event]:
        """Each module's parameters are made in float32, cast, and partitioned; under hpZ twice.

        Partitions are on the host where weights are offloaded, but for small ones. What is freed stays in the
        cache.

        Source: `deepspeed.runtime.zero.partition_parameters:zero_wrapper_for_fp_tensor_constructor`,
        `deepspeed.runtime.zero.partition_parameters:Init._post_init_method`.
        """
        held, partitions = self.coordinator, list[Buffer]()
        for _, parameters in groupby(self.slots, lambda slot: slot.parameter.name.rpartition(".")[0]):
            own = list(parameters)
            halves = [buffer_of("parameter", (slot.n_elements,), self.stage.dtype) for slot in own]
            for half in halves:
                wide = buffer_of("parameter in float32", half.shape, FP32)
                yield from (*allocs(wide, half), *frees(wide))
            for slot, half in zip(own, halves, strict=True):
                secondary = [held.secondary[slot]] if held.secondary else []
                stays = slot in held.persistent or not self.offloads_weights
                made = [buffer_of("partition", (slot.part(self.n_ranks),), self.stage.dtype)] * stays
                partitions += made
                yield from (*allocs(*secondary, *made), *frees(half))
        yield from frees(*partitions)

    def hook(self, slot: Slot, *, older: bool, boundary: bool) -> Iterator[Event]:
        """Plays `reduce_independent_p_g_buckets_and_remove_grads`: a full bucket is reduced first."""
        self.accumulates, self.at_boundary = older, boundary
        held = sum([one.n_elements for one in self.bucket])
        if held + slot.n_elements > self.bucket_size and self.bucket:
            yield from self._reduce_and_partition_ipg_grads()
            held = 0
        if held + slot.n_elements <= self.bucket_size:
            yield from frees(self.grad(slot))
        self.bucket.append(slot)

    def _reduce_and_partition_ipg_grads(self) -> Iterator[Event]:
        """Reduce-scatters the bucket; a single gradient of which all ranks have equal parts is not copied.

        Source: `deepspeed.runtime.comm.coalesced_collectives:reduce_scatter_coalesced`.
        """
        own, dtype = self.stage.dtype, self.stage.reduced_dtype
        parts = [slot.part(self.n_ranks) for slot in self.bucket]
        flat = buffer_of("gradients to reduce", (sum(parts) * self.n_ranks,), dtype)
        one = len(self.bucket) == 1 and self.bucket[0].n_elements % self.n_ranks == 0
        pads = [slot.part(self.n_ranks) * self.n_ranks - slot.n_elements for slot in self.bucket]
        padding = [buffer_of("padding", (n,), dtype) for n in pads if n]
        copies = [] if one else [*padding, flat]
        narrow = list[Buffer]()
        if dtype != own:
            large = [slot.n_elements for slot in self.bucket if slot.n_elements > self.bucket_size]
            wide = [buffer_of("gradient in float32", (n,), dtype) for n in large]
            narrow = [buffer_of("reduced partition", (n,), own) for n in parts]
            copies = [*wide, *copies]
        self.flattened += [*copies, *narrow]
        yield from allocs(*copies)
        yield from [WaitStream(REDUCTION, COMPUTE)] * self.overlaps
        stream = REDUCTION if self.overlaps else COMPUTE
        yield self.collective("reduce_scatter", "reduce gradients", flat.n_bytes, stream)
        held = copies
        if narrow:
            yield from (*allocs(*narrow), *frees(*copies))
            held = narrow
        if self.offloads:
            yield from self._to_host(sorted(self.bucket, key=IN_ORDER))
        yield from frees(*held)
        yield from frees(*[self.grad(slot) for slot in self.bucket if slot.n_elements > self.bucket_size])
        self.bucket = []

    def _to_host(self, slots: Sequence[Slot]) -> Iterator[Event]:
        """Partitions of gradients go to the host, and come back: to be added to, for the norm, in float32.

        A rank that has only a parameter's padding leaves it out.
        The copy of one is freed before the next one's is made, and where it was added to, after that.

        Source: `deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.partition_grads`.
        """
        stream = REDUCTION if self.overlaps else COMPUTE
        before: list[Buffer] = []
        for slot in [one for one in slots if one in self.norms]:
            shape = (slot.part(self.n_ranks),)
            back = buffer_of("gradient partition from the host", shape, self.stage.dtype)
            self.flattened.append(back)
            yield from () if self.accumulates else frees(*before)
            yield from (*allocs(back), host_copy("gradients from the host", back.n_bytes, stream))
            yield from frees(*before) if self.accumulates else ()
            yield host_copy("gradients to the host", back.n_bytes, stream)
            if self.at_boundary:
                yield from self.sent_in_float32(slot.part(self.n_ranks), self.norms[slot], stream)
            before = [back]
        yield from frees(*before)

    @property
    def host(self) -> HostRecord | None:
        """The optimizer's tensors, gradients in its type and in the weights', and partitions of weights.

        Gradients are page-locked as asked for, partitions of weights always.
        """
        if not self.offloads:
            return None
        pinned = self.stage.options.offload_optimizer == "cpu-pinned"
        grads, moments = [*self.grads, self.partitions], [one for both in self.moments for one in both]
        locked = [*[self.flat] * self.offloads_weights, *grads * pinned]
        return host_record(locked, [*self.masters, *moments, TRACKER, *grads * (not pinned)])

    def epilogue(self, *, older: bool, boundary: bool) -> Iterator[Event]:
        if self.bucket:
            yield from self._reduce_and_partition_ipg_grads()
        yield from [WaitStream(COMPUTE, REDUCTION)] * self.overlaps

    def step(self) -> Stretch:
        """Plays `deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.step`."""
        held = self.coordinator
        if self.offloads:
            return self._step_on_host()
        norms = [buffer_of(name, (), FP64) for name in ("norm of a group", "scaled_global_grad_norm")]
        updates: list[Event] = []
        for group, moments in zip(self.groups, self.moments, strict=True):
            wide = buffer_of("single_grad_partition", (sum(group),), FP32)
            flat = [buffer_of("flat gradients", (sum(group),), self.stage.dtype)] if len(group) > 1 else []
            made = () if self.has_moments else moments
            updates += [*allocs(*flat, wide), *frees(*flat), *allocs(*made), *frees(wide)]
        self.has_moments = True
        check = self._overflow_check() if self.stage.plan.formats.loss_scaled else ()
        return stepped(
            events("norm of gradients", (*held.release_all(), *check, *self._norm(norms))),
            after=(
                *allocs(GLOBAL_NORM), *updates, *held.gather_persistent(), *frees(*norms, GLOBAL_NORM)
            ),
        )  # fmt: skip

    def _step_on_host(self) -> Stretch:
        """The norms of groups are added up, and the host's masters are copied into the weights."""
        held, flag = self.coordinator, buffer_of("overflow flag", (), BOOL)
        check = (*allocs(flag), self.all_reduce("overflow flag", flag.n_bytes), *frees(flag))
        total = buffer_of("norm of a group", (1,), FP32)
        summed = (*allocs(total), self.all_reduce("norm of gradients", total.n_bytes), *frees(total))
        sent = host_copy("updated weights", self.flat.n_bytes)
        checked = check if self.stage.plan.formats.loss_scaled else ()
        freed = frees(*self.norms.values())
        return stepped(
            events("norm of gradients", (*held.release_all(), *checked, *summed * len(self.groups))),
            after=(*[sent] * (not self.offloads_weights), *freed, *held.gather_persistent()),
        )

    def _overflow_check(self) -> tuple[Event, ...]:
        """Whether a gradient is infinite or no number, in float16 (`has_overflow`)."""
        magnitudes, mask, found = self.checked
        isinf = (*allocs(magnitudes, mask), *frees(magnitudes), *allocs(found), *frees(mask, found))
        isnan = (*allocs(mask, found), *frees(mask, found))
        return *isinf, *isnan, self.all_reduce("overflow flag", found.n_bytes)

    def _norm(self, norms: Sequence[Buffer]) -> Iterator[Event]:
        """The norm of each partition of a gradient, in float64 (`get_grad_norm_direct`)."""
        of_group, total = norms
        for parts in self.groups:
            yield from norms_of(self.stage, parts)
            yield self.all_reduce("norm of gradients", FP64.itemsize)
            yield from allocs(of_group)
        yield from (*frees(*[of_group] * (len(self.groups) - 1)), *allocs(total))


def _sub_groups(parts: Sequence[int], most: int) -> Iterator[list[int]]:
    """The partitions that are updated together: a group ends once it has `sub_group_size` elements."""
    group: list[int] = []
    for n in parts:
        group.append(n)
        if sum(group) >= most:
            yield group
            group = []
    if group:
        yield group
