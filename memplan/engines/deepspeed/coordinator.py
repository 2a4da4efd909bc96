"""ZeRO-3's coordinator of partitioned parameters: what is gathered, ahead and in time, and released.

Source: `deepspeed.runtime.zero.partitioned_param_coordinator:PartitionedParameterCoordinator`.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import accumulate
from operator import attrgetter
from typing import Final, NamedTuple, final

from memplan.engines.deepspeed.options import deepspeed_options
from memplan.engines.deepspeed.zero_optimizer import host_copy
from memplan.mesh import Group, part_of
from memplan.parts.flat import Slot
from memplan.passes.module_calls import Containers, Part
from memplan.plan import Plan
from memplan.record import COMPUTE, Collective, Event, ModuleHook, RecordEvent, WaitStream, allocs, frees
from memplan.shapes import Buffer, DType, buffer_of

ALL_GATHER: Final = "all-gather"
"""The stream of all-gathers of weights."""

IN_ORDER: Final = attrgetter("start")


class Gathered(NamedTuple):
    """Parameters that one all-gather brings; several come in a `flat` tensor, out of which each is copied."""

    slots: tuple[Slot, ...]
    flat: Buffer | None


@final
class PartitionedParameterCoordinator:
    """Gathers and releases the parameters of modules, in an order that an earlier step has recorded.

    `order`: the parameters of each module (containers have none) in the order of a micro-batch's passes.
    `whole`, `alone`: what each parameter is gathered into: copied out of a flat tensor, or its own. `flats`:
    the flat tensors so far. `persistent`: what an update gathers, and keeps: parameters of at most
    `stage3_param_persistence_threshold` elements. `sent`: a copy of a parameter's partition that the host
    keeps, as it is gathered. `secondary`: under hpZ a partition of each parameter among `neighbours`; it is
    made when the parameter is first released after an update (`has_secondary`), and gathered from then on.
    """

    def __init__(self, plan: Plan, dtype: DType, order: Sequence[Sequence[Slot]]) -> None:
        self.options, self.dtype = deepspeed_options(plan), dtype
        self.group, self.n_ranks = plan.shard_group, plan.n_shards
        options, n_ranks = self.options, self.n_ranks
        self.order = order
        slots = dict.fromkeys(slot for own in order for slot in own)
        self._elements_before = [0, *accumulate([sum([slot.n_elements for slot in own]) for own in order])]
        self._uses: dict[Slot, list[int]] = {slot: [] for slot in slots}
        for step, own in enumerate(order):
            for slot in own:
                self._uses[slot].append(step)
        threshold = options.stage3_param_persistence_threshold
        self.whole, self.alone = dict[Slot, Buffer](), dict[Slot, Buffer]()
        for slot in slots:
            name, padded = f"{slot.parameter.name} (gathered", slot.part(n_ranks) * n_ranks
            self.whole[slot] = buffer_of(f"{name})", (slot.n_elements,), dtype)
            self.alone[slot] = buffer_of(f"{name} alone)", (padded,), dtype)
        small = [slot for slot in sorted(slots, key=IN_ORDER) if slot.n_elements <= threshold]
        self.persistent = {one: buffer_of("persistent", self.alone[one].shape, dtype) for one in small}
        self.flats: list[Buffer] = []
        on_host = options.offload_param != "none"
        self.sent = {
            slot: [buffer_of("partition from the host", (slot.part(n_ranks),), dtype)] * on_host
            for slot in slots
        }
        n_neighbours = options.zero_hpz_partition_size
        self.neighbours = self.group if n_neighbours == n_ranks else part_of(self.group, n_neighbours)
        self.secondary = {
            slot: buffer_of(
                f"{slot.parameter.name} (secondary)",
                (slot.part(n_ranks) * n_ranks // n_neighbours,),
                dtype,
                "weights",
            )
            for slot in slots
            if n_neighbours > 1
        }
        self.has_secondary = set[Slot]()
        self._kept: dict[tuple[Slot, int], bool] = {}
        self.available = dict(self.persistent)
        self._is_first = self._records = False
        self.reset_step()

    def start_training(self) -> None:
        """Nothing is gathered, all have been partitioned, and the next micro-batch records the order.

        It gathers nothing ahead.
        """
        self.available, self._is_first = {}, True
        self.has_secondary = {*self.secondary}

    def reset_step(self) -> None:
        """The start of a forward pass of the whole module."""
        self._records, self._is_first = self._is_first, False
        recorded = [(slot, step) for step, own in enumerate(self.order) for slot in sorted(own, key=IN_ORDER)]
        self.queue = deque(recorded)
        self.fetched_for: dict[Slot, int] = {}
        self.in_flight: dict[Slot, Gathered] = {}
        self.copied: set[Gathered] = set()
        self.active: dict[Slot, set[str]] = {}
        self.saved: dict[Slot, Buffer] = {}
        self.step_id = self.n_available = 0

    def fetch_sub_module(self, own: Collection[Slot], module: str) -> Iterator[Event]:
        """Gathers a module's parameters, unless that is under way, then the next ones of the record."""
        yield from self._all_gather([slot for slot in own if not self._is_here(slot)])
        for slot in own:
            self.active.setdefault(slot, set()).add(module)
            if slot in self.in_flight:
                yield from self._wait(slot)
        if not self._records:
            n_expected = len([slot for slot in own if self.fetched_for.get(slot, -1) < self.step_id])
            for _ in range(n_expected):
                slot, self.fetched_for[slot] = self.queue.popleft()
            yield from self._prefetch()
        self.step_id += 1

    def _is_here(self, slot: Slot) -> bool:
        return slot in self.available or slot in self.in_flight

    def _prefetch(self) -> Iterator[Event]:
        options, ahead, n_elements = self.options, dict[Slot, None](), 0
        most = min(options.stage3_max_live_parameters - self.n_available, options.stage3_prefetch_bucket_size)
        while self.queue and n_elements < most:
            slot, step = self.queue.popleft()
            self.fetched_for[slot] = max(self.fetched_for.get(slot, -1), step)
            if slot not in ahead and not self._is_here(slot):
                ahead[slot] = None
                n_elements += slot.n_elements
        yield from self._all_gather(ahead)

    def _all_gather(self, asked: Iterable[Slot]) -> Iterator[Event]:
        """An all-gather of what has a secondary partition, among neighbours, and one of the rest."""
        slots = sorted(asked, key=IN_ORDER)
        kept = tuple([slot for slot in slots if slot in self.has_secondary])
        yield from self._all_gather_coalesced(kept, self.neighbours)
        left = tuple([slot for slot in slots if slot not in self.has_secondary])
        yield from self._all_gather_coalesced(left, self.group)

    def _all_gather_coalesced(self, slots: tuple[Slot, ...], axis: Group) -> Iterator[Event]:
        """One all-gather; of a single parameter into its own tensor."""
        if not slots:
            return
        n_elements = sum([slot.part(self.n_ranks) for slot in slots]) * self.n_ranks
        several = len(slots) > 1
        flat = buffer_of("parameters gathered together", (n_elements,), self.dtype)
        self.flats += [flat] * several
        self.n_available += sum([slot.n_elements for slot in slots])
        self.in_flight |= dict.fromkeys(slots, Gathered(slots, flat if several else None))
        yield from allocs(flat if several else self.alone[slots[0]])
        yield WaitStream(ALL_GATHER, COMPUTE)
        sent = [copy for slot in slots for copy in self.sent[slot]]
        yield from self._from_host(sent)
        yield from frees(*sent[: several * len(sent)])  # they have been joined
        yield self.all_gather(flat.n_bytes, axis)
        yield RecordEvent(self._event(slots[0]), ALL_GATHER)

    @staticmethod
    def _from_host(sent: Sequence[Buffer], stream: str = ALL_GATHER) -> Iterator[Event]:
        """Copies partitions to the GPU."""
        for copy in sent:
            yield from allocs(copy)
            yield host_copy("weights", copy.n_bytes, stream)

    @staticmethod
    def all_gather(n_bytes: int, axis: Group) -> Collective:
        """An all-gather of weights, on a stream of its own."""
        what = "gather weights"
        return Collective(kind="all_gather", axis=axis, what=what, payload_bytes=n_bytes, stream=ALL_GATHER)

    @staticmethod
    def _event(slot: Slot) -> str:
        """The event at the end of the all-gather whose first parameter this is."""
        return f"all-gather from element {slot.start}"

    def _wait(self, slot: Slot) -> Iterator[Event]:
        """Waits for a parameter; the first of several that came together copies all of them."""
        gathered = self.in_flight.pop(slot)
        if gathered.flat is None:
            self.available[slot] = self.alone[slot]
            yield WaitStream(COMPUTE, self._event(slot))
            yield from frees(*self.sent[slot])
            return
        if gathered not in self.copied:
            self.copied.add(gathered)
            yield WaitStream(COMPUTE, self._event(gathered.slots[0]))
            self.available |= {one: self.whole[one] for one in gathered.slots}
            yield from allocs(*[self.whole[one] for one in gathered.slots])
        if gathered not in self.in_flight.values():
            yield from frees(gathered.flat)

    def release_sub_module(
        self, own: Collection[Slot], module: str, *, recomputed: bool = False
    ) -> Iterator[Event]:
        """Releases a module's parameters, but for those that another module still uses, or one soon will.

        `recomputed`: after a forward pass in the backward pass, whose saved tensors hold what is released.
        """
        for slot in own:
            self.active.get(slot, set()).discard(module)
            is_kept = not self._records and self._is_kept(slot)
            if not self.active.get(slot) and not is_kept:
                yield from self._release(slot, saved=recomputed)

    def _is_kept(self, slot: Slot) -> bool:
        """Whether a parameter is not released: used again within `stage3_max_reuse_distance` elements.

        It is decided once, in the first micro-batch that has an order (`functools.lru_cache`).
        """
        if (slot, self.step_id) not in self._kept:
            self._kept[slot, self.step_id] = self._is_used_soon(slot)
        return self._kept[slot, self.step_id]

    def _is_used_soon(self, slot: Slot) -> bool:
        if slot in self.persistent or self.fetched_for.get(slot, -1) > self.step_id:
            return True
        uses, before = self._uses[slot], self._elements_before
        following = bisect_left(uses, self.step_id)
        if following == len(uses):
            return False
        n_elements = before[uses[following]] - before[self.step_id]
        return n_elements < self.options.stage3_max_reuse_distance

    def _release(self, slot: Slot, *, saved: bool = False) -> Iterator[Event]:
        if slot in self.available and slot not in self.in_flight:
            self.n_available -= slot.n_elements
            gathered = self.available.pop(slot)
            if slot in self.secondary and slot not in self.has_secondary:
                self.has_secondary.add(slot)
                yield from allocs(self.secondary[slot])
            if saved:
                self.saved[slot] = gathered
            else:
                yield from frees(gathered)

    def backward_over(self, slot: Slot) -> Iterator[Event]:
        """Frees a weight that only the tensors saved by a recomputation held.

        Source: `torch.utils.checkpoint:_recomputation_hook` (`x.detach()`).
        """
        if slot in self.saved:
            yield from frees(self.saved.pop(slot))

    def release_all(self, kept: Collection[Slot] = ()) -> Iterator[Event]:
        """Releases what is gathered: all before an update, all but persistent ones after a backward pass.

        These are of modules whose inputs have no gradient, as embeddings', which no hook releases.
        """
        for slot in [one for one in self.available if one not in kept]:
            self.active.pop(slot, None)
            yield from self._release(slot)

    def gather_persistent(self) -> Iterator[Event]:
        """Gathers the parameters that stay gathered, one by one, after an update.

        Secondary partitions hold weights from before the update: they are freed.
        """
        self.available |= self.persistent
        sent = [copy for slot in self.persistent for copy in self.sent[slot]]
        yield from self._from_host(sent, COMPUTE)
        yield WaitStream(ALL_GATHER, COMPUTE)
        for gathered in self.persistent.values():
            yield from allocs(gathered)
            yield self.all_gather(gathered.n_bytes, self.group)
        yield from frees(*sent, *[self.secondary[slot] for slot in self.has_secondary])
        self.has_secondary = set()


@final
class ModuleHooks:
    """The hooks of a micro-batch's passes, which tell the coordinator what is needed, and what is not."""

    def __init__(self, coordinator: PartitionedParameterCoordinator) -> None:
        self.coordinator = coordinator
        self._containers = Containers()
        self.is_backward = False

    def start_of_forward(self) -> None:
        """The hook of the whole module: a new micro-batch."""
        self.is_backward = False
        self.coordinator.reset_step()
        self._containers = Containers()

    def __call__(self, part: Part[Slot], hook: ModuleHook) -> Iterator[Event]:
        """What a hook gathers or frees."""
        path, own = part.called(hook)
        if hook.kind.startswith("post"):
            again = hook.kind == "post_forward" and self.is_backward
            yield from self.coordinator.release_sub_module(own, path, recomputed=again)
            return
        for container in self._containers.entered(hook, path):
            yield from self.coordinator.fetch_sub_module((), container)
        yield from self.coordinator.fetch_sub_module(own, path)
