"""ZeRO-3: a partition of each parameter, gathered for a module's passes; gradients are reduce-scattered.

Source: `deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3`.
"""

from collections.abc import Iterator, Sequence
from typing import Final, final

from memplan.engines.deepspeed.coordinator import PartitionedParameterCoordinator
from memplan.engines.deepspeed.flat import Slot
from memplan.engines.deepspeed.options import overlaps
from memplan.engines.deepspeed.stage import DeepSpeedStage
from memplan.engines.deepspeed.zero_optimizer import Optimizer, flat_buffer, norms_of, stepped
from memplan.record import Collective, Event, Stretch, allocs, events, frees
from memplan.shapes import BOOL, FP32, FP64, Buffer, buffer_of

GLOBAL_NORM: Final = buffer_of("_global_grad_norm", (), FP64)
TRACKER: Final = buffer_of("inf_or_nan_tracker", (1,), BOOL)


@final
class Stage3Optimizer(Optimizer):
    """Plays `deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3` with contiguous gradients."""

    keeps_weights = False

    def __init__(
        self, stage: DeepSpeedStage, slots: Sequence[Slot], coordinator: PartitionedParameterCoordinator
    ) -> None:
        super().__init__(stage, slots)
        options, dtype, self.n_ranks = stage.options, stage.dtype, stage.plan.dp
        self.coordinator, self.bucket_size = coordinator, options.reduce_bucket_size
        self.parts = [slot.part(self.n_ranks) for slot in slots]
        total = sum(self.parts)
        self.groups = list(_sub_groups(self.parts, options.sub_group_size))
        self.flat = flat_buffer("lp_param_buffer", total, dtype, weights=True)
        self.masters = [flat_buffer("fp32_partitioned_groups_flat", sum(group)) for group in self.groups]
        names = ("exp_avg", "exp_avg_sq")
        self.made_in_step = [flat_buffer(name, sum(group)) for group in self.groups for name in names]
        self.ipg_buffer = buffer_of("ipg bucket", (self.bucket_size,), dtype)
        self.partitions = buffer_of("grad_partitions_flat_buffer", (total,), dtype, "grads")
        self.kept = [GLOBAL_NORM, *coordinator.persistent.values()]
        held = self.ipg_buffer, self.partitions, TRACKER
        self.states = [self.flat, *self.masters, *self.made_in_step, *held]
        self.grads = [self.partitions]
        self.bucket: list[Slot] = []

    @property
    def on_own_stream(self) -> list[tuple[Buffer, str]]:
        if not overlaps(self.stage.plan):
            return []
        held = self.coordinator
        gathered = [*held.whole.values(), *held.alone.values(), *held.flats]
        return [*((one, "all-gather") for one in gathered), *((one, "reduction") for one in self.flattened)]

    def setup(self) -> Iterator[Event]:
        """The joined partitions, masters, the bucket, and the gradients' partitions.

        The weights are gone: partitions are joined on the host, and the cache is emptied.

        Source: `deepspeed.runtime.zero.utils:defragment`.
        """
        yield from allocs(self.flat)
        for master in self.masters:
            copy = buffer_of("converted partition", master.shape, FP32)
            yield from (*allocs(copy, master), *frees(copy))
        yield from allocs(TRACKER, self.ipg_buffer, self.partitions)

    def hook(self, slot: Slot, *, older: bool, boundary: bool) -> Iterator[Event]:
        """Plays `reduce_independent_p_g_buckets_and_remove_grads`: a full bucket is reduced first."""
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
        parts = [slot.part(self.n_ranks) for slot in self.bucket]
        flat = buffer_of("gradients to reduce", (sum(parts) * self.n_ranks,), self.stage.dtype)
        one = len(self.bucket) == 1 and self.bucket[0].n_elements % self.n_ranks == 0
        copies = [] if one else [flat]
        self.flattened += copies
        yield from allocs(*copies)
        yield Collective(
            kind="reduce_scatter", axis="dp", what="reduce gradients",
            payload_bytes=flat.n_bytes, overlap="backward",
        )  # fmt: skip
        yield from frees(*copies)
        yield from frees(*[self.grad(slot) for slot in self.bucket if slot.n_elements > self.bucket_size])
        self.bucket = []

    def epilogue(self, *, older: bool, boundary: bool) -> Iterator[Event]:
        if self.bucket:
            yield from self._reduce_and_partition_ipg_grads()

    def step(self) -> Stretch:
        """Plays `deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.step`."""
        held = self.coordinator
        norms = [buffer_of(name, (), FP64) for name in ("norm of a group", "scaled_global_grad_norm")]
        updates: list[Event] = []
        for group in self.groups:
            wide = buffer_of("single_grad_partition", (sum(group),), FP32)
            flat = [buffer_of("flat gradients", (sum(group),), self.stage.dtype)] if len(group) > 1 else []
            updates += [*allocs(*flat, wide), *frees(*flat), *frees(wide)]
        first = len(self.groups[0]) > 1
        before, after = updates[: 2 + first], updates[2 + first :]
        return stepped(
            events("norm of gradients", (*held.release_all(), *self._norm(norms))),
            events("gradients in float32", (*allocs(GLOBAL_NORM), *before)),
            after=(*after, *held.gather_persistent(), *frees(*norms, GLOBAL_NORM)),
        )

    def _norm(self, norms: Sequence[Buffer]) -> Iterator[Event]:
        """The norm of each partition of a gradient, in float64.

        Source: `deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.get_grad_norm_direct`.
        """
        of_group, total = norms
        for parts in self.groups:
            yield from norms_of(self.stage, parts)
            yield Collective(
                kind="all_reduce", axis="dp", what="norm of gradients", payload_bytes=FP64.itemsize
            )
            yield from allocs(of_group)
        yield from (*frees(*[of_group] * (len(self.groups) - 1)), *allocs(total))


def _sub_groups(parts: Sequence[int], most: int) -> Iterator[list[int]]:
    """The partitions that are updated together: a group ends once it has `sub_group_size` elements.

    Source: `deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3._create_fp16_sub_groups`.
    """
    group: list[int] = []
    for n in parts:
        group.append(n)
        if sum(group) >= most:
            yield group
            group = []
    if group:
        yield group
