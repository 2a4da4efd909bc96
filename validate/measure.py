"""Measures one rank: its memory, its collectives, its losses, its step times."""

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from memplan.plan import Rank
from memplan.snapshot import Block, MemoryEvent
from validate.blocks import alive_after
from validate.cases import Case, option
from validate.collectives import Collective, CollectiveCounter
from validate.gloo import let_ranks_go_first, nothing_held_after_waits
from validate.memory import (
    STEP,
    UPDATE,
    Profile,
    count_all_threads,
    during,
    held_at,
    pointer_of,
)
from validate.systems import Training, prepared

OBSERVED_STEPS = 3
"""Steps whose peak is taken on CPU. The least is true: gloo's threads may still free late what is waited for
in C++, as DDP's reducer does, and that only adds.
"""

MOST_SNAPSHOT_EVENTS = 200_000
"""Allocations and frees that a snapshot holds: those of a step of some hundred layers."""

WARM_UP_STEPS = 2
"""Optimizer state is made in the first step; DDP rebuilds its buckets in the second, one later if static."""


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """Bytes of this rank's own tensors: parameters, gradients before the update, optimizer state."""

    weights_bytes: int
    grads_bytes: int
    optimizer_bytes: int


UNRECTIFIED_STEPS: Final = 5
"""The steps after which RAdam's loop has the temporaries of the rest (beta2 of 0.999)."""

ALLOCATOR_STEPS: Final = frozenset({1, 2, 10})
"""Steps after which CUDA's allocator is asked for its peaks so far, besides the last: it settles early."""


WATCHDOG_S: Final = 0.15
"""Longer than the tenth of a second between two looks of NCCL's watchdog."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorPeaks:
    """What CUDA's allocator has held at most since the training began, and its segments after `step`.

    Step 0 is the set-up, since the process began.
    """

    step: int
    allocated_bytes: int
    reserved_bytes: int
    n_segments: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes in torch's allocator during a steady step.

    `rest_bytes` is held between steps, `peak_bytes` at the worst instant: the bytes of all tensors, on a GPU
    before its allocator rounds them up. It is divided by kind in `peak_by_kind` where events are known (on
    CPU); the step's `events` and the blocks `held` when it began are known on CPU; each with the operations
    it happened in, if asked for.

    On a GPU `peak_allocated_bytes` is the peak of the blocks that tensors are in, `peak_reserved_bytes` the
    most that the allocator held of the device, both in that step; `allocator` has both since the training
    began. `device_bytes` of the device were in use after the step, by any process, and `context_bytes` when
    this rank had CUDA's context and no tensor.
    """

    rest_bytes: int
    peak_bytes: int
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    allocator: tuple[AllocatorPeaks, ...] = ()
    device_bytes: int | None = None
    context_bytes: int | None = None
    peak_by_kind: dict[str, int] = field(default_factory=dict)
    events: tuple[MemoryEvent, ...] = ()
    held: tuple[Block, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMeasurement:
    """What one rank measured; a loss is None where there is no last stage.

    `collectives` are those of one steady step, `gradient_norm_squared` is of the first step, over this
    rank's stages (no number where it is not compared), `step_s` seconds from barrier to barrier. The training
    was set up at `prepared_at_s`, its last step done at `trained_at_s` by the machine's clock.
    `attributed_fraction` of the bytes at the peak are tensors that memplan predicts.
    """

    rank: int
    at: Rank
    states: States
    memory: Memory
    collectives: tuple[Collective, ...]
    losses: tuple[float | None, ...]
    gradient_norm_squared: float
    step_s: tuple[float, ...]
    prepared_at_s: float
    trained_at_s: float
    attributed_fraction: float | None = None


Prepare = Callable[[Case, int, torch.device], Training]
"""Sets up the training of one rank."""

NewProfile = Callable[[], Profile]
"""Makes a profile of what is allocated on CPU."""


def measured_rank(
    case: Case,
    rank: int,
    device: torch.device,
    *,
    profile: NewProfile,
    snapshot: Path | None = None,
    prepare: Prepare = prepared,
) -> RankMeasurement:
    """Runs the case's training on this rank and measures it; on a GPU with a `snapshot` of the observed step.

    One thread and no oneDNN, whose scratch memory depends on the CPU's model; garbage is collected between
    steps only, so that no peak depends on when, and among what came after the imports only, since looking
    through those takes half a second. On a GPU collectives are counted in a step beyond the case's: a counted
    step frees some tensors later, and the allocator would have them elsewhere ever after. Without data one
    step is both counted and observed.

    The process group of all ranks must exist if there is more than one.
    """
    torch.set_num_threads(1)
    torch.backends.mkldnn.set_flags(False)
    gc.disable()
    gc.freeze()
    count_all_threads()
    has_data = case.tensors == "real"
    gpu = GpuWatch(ALLOCATOR_STEPS | {case.steps}, snapshot) if device.type == "cuda" else None
    with nullcontext() if gpu is not None else profile() as warm_up:
        training = prepare(case, rank, device)
        if gpu is not None:
            gpu.watch(training)
        let_ranks_go_first()
        prepared_at_s = time.monotonic()
        norm_squared = math.nan
        losses = [training.gradients()]
        if not case.unchecked:
            norm_squared = training.gradient_norm_squared()
        training.finish()
        losses += [training.step() for _ in range(1, n_warm_up(case))]
        counter = CollectiveCounter(training.axis_of_group)
        if has_data:
            with counter if gpu is None else nullcontext():
                losses.append(training.step())
    if gpu is not None:
        more_losses, seen = gpu.observed(training)
    elif warm_up is not None:
        with nullcontext() if has_data else counter:
            n_observed = OBSERVED_STEPS if has_data else 1
            more_losses, seen = _observed_on_cpu(training, warm_up, profile, n_observed)
    losses += more_losses
    step_s = []
    while len(losses) < case.steps:
        loss, seconds = _timed_step(training)
        losses.append(loss)
        if case.is_timed:
            step_s.append(seconds)
    if gpu is not None and case.plan.world_size > 1:
        with counter:
            training.step()
    trained_at_s = time.monotonic()
    states, memory = seen()
    return RankMeasurement(
        rank=rank,
        at=case.plan.place(rank),
        states=states,
        memory=memory,
        collectives=counter.collectives(),
        losses=tuple(losses),
        gradient_norm_squared=norm_squared,
        step_s=tuple(step_s),
        prepared_at_s=prepared_at_s,
        trained_at_s=trained_at_s,
    )


def n_warm_up(case: Case) -> int:
    """Steps until everything that is kept from step to step exists.

    With data one more step follows before memory is observed, in which PowerSGD allocates its state; without
    data that step counts here.
    """
    static_graph: bool = option(case.plan, "static_graph", False)
    if case.tensors == "real":
        return WARM_UP_STEPS + static_graph + (UNRECTIFIED_STEPS if case.plan.optimizer == "radam" else 0)
    if not case.plan.ddp:
        return 1
    compresses: bool = option(case.plan, "ddp_comm_hook", "none") == "powersgd"
    return WARM_UP_STEPS + static_graph + compresses


def settled() -> None:
    """Waits until nothing is under way, on this rank's device or on any other rank."""
    gc.collect()
    _synchronize()
    _barrier()
    _synchronize()


def _synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """The states just before the update, and their storages."""

    states: States
    weight_storages: dict[int, int]
    optimizer_storages: dict[int, int]
    grad_storages: dict[int, int]


def _observed_step(training: Training) -> tuple[float | None, _Seen]:
    """Runs one marked step; states are listed between backward and update, without allocating."""
    with record_function(STEP):
        loss = training.gradients()
        seen = _seen(training)
        with record_function(UPDATE):
            training.finish()
    return loss, seen


def _seen(training: Training) -> _Seen:
    weights, grads, states = training.weights(), training.grads(), training.optimizer_states()
    return _Seen(
        states=States(
            weights_bytes=sum(tensor.nbytes for tensor in weights),
            grads_bytes=sum(tensor.nbytes for tensor in grads),
            optimizer_bytes=sum(tensor.nbytes for tensor in states),
        ),
        weight_storages=_storages(weights),
        optimizer_storages=_storages(states),
        grad_storages=_storages(grads),
    )


def _storages(tensors: Sequence[Tensor]) -> dict[int, int]:
    """The distinct storages of tensors: address to bytes."""
    return {pointer_of(storage): storage.nbytes() for storage in map(Tensor.untyped_storage, tensors)}


_Sight = Callable[[], tuple[States, Memory]]
"""Returns the observation; called after the training, since it takes time."""


def _observed_on_cpu(
    training: Training, warm_up: Profile, profile: NewProfile, n_steps: int
) -> tuple[list[float | None], _Sight]:
    """The losses of some steady steps, and the observation of the one with the lowest peak."""
    settled()
    losses, seen = [], []
    with nothing_held_after_waits(), profile() as profiled:
        for _ in range(n_steps):
            loss, tensors = _observed_step(training)
            losses.append(loss)
            seen.append(tensors)
            settled()
    return losses, partial(_sight_of_cpu, warm_up, profiled, seen)


def _sight_of_cpu(warm_up: Profile, profiled: Profile, seen: list[_Seen]) -> tuple[States, Memory]:
    record = profiled.recorded((STEP, UPDATE))
    steps = [during(record.events, region) for region in record.regions[STEP]]
    peaks = [max(step, key=lambda event: event.total_bytes) for step in steps]
    best = min(range(len(steps)), key=lambda i: peaks[i].total_bytes)
    memory = Memory(
        rest_bytes=min(step[0].total_bytes - step[0].n_bytes for step in steps),
        peak_bytes=peaks[best].total_bytes,
        peak_by_kind=_peak_by_kind(steps[best], peaks[best], record.regions[UPDATE][best][0], seen[best]),
        events=tuple(steps[best]),
        held=_held(warm_up.recorded(()).events, record.events, steps[best], seen[best]),
    )
    return seen[best].states, memory


def _held(
    warm_up: list[MemoryEvent], observed: list[MemoryEvent], step: list[MemoryEvent], seen: _Seen
) -> tuple[Block, ...]:
    """The blocks held when a step began, with the kinds of those that hold a state."""
    kinds = dict.fromkeys(seen.weight_storages, "weights")
    kinds |= dict.fromkeys(seen.optimizer_storages, "optimizer")
    n_before = len(warm_up) + sum(event.time_ns < step[0].time_ns for event in observed)
    blocks = alive_after([*warm_up, *observed], n_before, kept=kinds)
    return tuple(replace(block, kind=kinds.get(block.pointer, "")) for block in blocks)


def _peak_by_kind(step: list[MemoryEvent], peak: MemoryEvent, update_ns: int, seen: _Seen) -> dict[str, int]:
    """Bytes alive at the peak, by kind: a block is a gradient's if one is in it when the update starts.

    Gradients in blocks that the step has not made (zeroed ones, views of DDP's buckets) are always alive.
    """
    made = {held for held in held_at(step, update_ns) if held.pointer in seen.grad_storages}
    kept = seen.grad_storages.keys() - {held.pointer for held in made}
    grads = [held.n_bytes for held in held_at(step, peak.time_ns + 1) if held in made]
    parts = {
        "weights_bytes": sum(seen.weight_storages.values()),
        "grads_bytes": sum(grads) + sum(seen.grad_storages[pointer] for pointer in kept),
        "optimizer_bytes": sum(seen.optimizer_storages.values()),
    }
    return parts | {"other_bytes": peak.total_bytes - sum(parts.values())}


class GpuWatch:
    """Observes a training through the statistics of CUDA's caching allocator.

    `context_bytes` of the device are in use before there is any tensor. The allocator is asked after `steps`;
    the allocations of the observed step are written to `snapshot`.
    """

    def __init__(self, steps: frozenset[int], snapshot: Path | None = None) -> None:
        self._steps = steps
        self.context_bytes = device_bytes()
        self._snapshot = snapshot
        self._n_steps = self._allocated_bytes = self._reserved_bytes = 0
        self._peaks: list[AllocatorPeaks] = []

    def watch(self, training: Training) -> None:
        """Looks at the allocator now, and after each of the training's steps from now on."""
        self._peaks = [self._seen(0, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())]
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        training.after_step = self._after_step

    def observed(self, training: Training) -> tuple[list[float | None], _Sight]:
        """The loss of one steady step, and what was seen in it."""
        settled()
        self._reset()
        rest_bytes = torch.cuda.memory_allocated()
        with nothing_held_after_waits(), snapshot_kept(self._snapshot):
            loss, seen = _observed_step(training)
            torch.cuda.synchronize()
        memory = Memory(
            rest_bytes=rest_bytes,
            peak_bytes=torch.cuda.memory_stats()["requested_bytes.all.peak"],
            peak_allocated_bytes=torch.cuda.max_memory_allocated(),
            peak_reserved_bytes=torch.cuda.max_memory_reserved(),
            device_bytes=device_bytes(),
            context_bytes=self.context_bytes,
        )
        return [loss], lambda: (seen.states, replace(memory, allocator=tuple(self._peaks)))

    def _reset(self) -> None:
        self._see()
        torch.cuda.reset_peak_memory_stats()

    def _see(self) -> None:
        self._allocated_bytes = max(self._allocated_bytes, torch.cuda.max_memory_allocated())
        self._reserved_bytes = max(self._reserved_bytes, torch.cuda.max_memory_reserved())

    def _after_step(self) -> None:
        self._n_steps += 1
        if self._n_steps <= WARM_UP_STEPS + 1:
            _let_watchdog_go()
        if self._n_steps in self._steps:
            self._see()
            self._peaks.append(self._seen(self._n_steps, self._allocated_bytes, self._reserved_bytes))

    @staticmethod
    def _seen(step: int, allocated_bytes: int, reserved_bytes: int) -> AllocatorPeaks:
        return AllocatorPeaks(
            step=step,
            allocated_bytes=allocated_bytes,
            reserved_bytes=reserved_bytes,
            n_segments=torch.cuda.memory_stats()["segment.all.current"],
        )


def _let_watchdog_go() -> None:
    """Waits until all collectives are over, and NCCL's watchdog has dropped what it holds of them.

    A collective that is waited for by its future, as DDP's are, holds its tensors until then: the buckets of
    the first step too, which large models' longer steps outlive.

    Source: torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp (`kWatchdogThreadSleepMillis`).
    """
    if dist.is_initialized() and dist.get_backend() == "nccl":
        torch.cuda.synchronize()
        time.sleep(WATCHDOG_S)


def device_bytes() -> int:
    """Bytes of the current GPU in use by any process; makes CUDA's context if there is none."""
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return total_bytes - free_bytes


@contextmanager
def snapshot_kept(path: Path | None) -> Iterator[None]:
    """Every allocation and free meanwhile, with the Python calls that asked for it, written to a file.

    Source: pytorch.org/docs/stable/torch_cuda_memory.html.
    """
    if path is None:
        yield
        return
    torch.cuda.memory._record_memory_history(max_entries=MOST_SNAPSHOT_EVENTS, stacks="python")
    try:
        yield
        torch.cuda.memory._dump_snapshot(str(path))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def _timed_step(training: Training) -> tuple[float | None, float]:
    """One step and its seconds, barrier to barrier."""
    settled()
    start = time.perf_counter()
    loss = training.step()
    _synchronize()
    _barrier()
    return loss, time.perf_counter() - start
