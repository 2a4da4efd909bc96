"""One rank: what it holds, what it sends, what it loses, how long it takes."""

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.profiler import record_function

from validate.cases import Case
from validate.collectives import Collective, CollectiveCounter, axis_of_group
from validate.memory import (
    STEP,
    UPDATE,
    MemoryEvent,
    count_all_threads,
    during,
    held_at,
    memory_profile,
    recorded,
)
from validate.parallelize import (
    Coordinates,
    coordinates,
    device_mesh,
    optimizer_of,
    parallel_module,
    stage_module,
)
from validate.training import Gradients, gradients

OBSERVED_STEPS = 4
"""Steps whose peak is taken on CPU: gloo's threads may free late, which only adds, so the least is true."""

WARM_UP_STEPS = 2
"""Optimizer state is made in the first step; DDP rebuilds its buckets in the second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """Bytes of this rank's own tensors: parameters, gradients before the update, optimizer state."""

    weights_bytes: int
    grads_bytes: int
    optimizer_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes in torch's allocator during a steady step.

    `rest_bytes` is held between steps, `peak_bytes` at the worst instant, divided by kind in
    `peak_by_kind` where events are known (on CPU); `events` are kept only when asked for.
    """

    rest_bytes: int
    peak_bytes: int
    peak_reserved_bytes: int | None
    peak_by_kind: dict[str, int] = field(default_factory=dict)
    events: tuple[MemoryEvent, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMeasurement:
    """What one rank measured; a loss is None where there is no last stage.

    `collectives` are those of one steady step, `gradient_norm_squared` is of the first step, over this
    rank's stage, `step_s` seconds from barrier to barrier.
    """

    rank: int
    at: Coordinates
    states: States
    memory: Memory
    collectives: tuple[Collective, ...]
    losses: tuple[float | None, ...]
    gradient_norm_squared: float
    step_s: tuple[float, ...]


@dataclass(slots=True, kw_only=True)
class Training:
    """A module, its optimizer and what one step of both does."""

    optimizer: torch.optim.Optimizer
    gradients: Gradients
    axis_of_group: dict[str, str]

    @property
    def parameters(self) -> list[Tensor]:
        """This stage's parameters as the optimizer has them; DDP beside TP hides some of the module's."""
        return [weight for group in self.optimizer.param_groups for weight in group["params"]]

    def step(self) -> float | None:
        """One whole step; the gradients are freed at its end."""
        loss = self.gradients()
        self.update()
        return loss

    def update(self) -> None:
        """The optimizer's part of a step."""
        self.optimizer.step()
        self.optimizer.zero_grad()


def prepared(case: Case, rank: int, device: torch.device) -> Training:
    """The case's module and optimizer as they are on this rank."""
    at = coordinates(case.plan, rank)
    mesh = device_mesh(case.plan, device)
    stage = stage_module(case.model, case.plan, at, seed=case.seed, device=device)
    module = parallel_module(stage, case.plan, at, mesh)
    return Training(
        optimizer=optimizer_of(module, case.plan, mesh, learning_rate=case.learning_rate),
        gradients=gradients(module, case.model, case.plan, at, mesh, device, seed=case.seed),
        axis_of_group=axis_of_group(mesh),
    )


Prepare = Callable[[Case, int, torch.device], Training]
"""Builds the training of one rank."""


def measured_rank(
    case: Case,
    rank: int,
    device: torch.device,
    *,
    keep_events: bool = False,
    prepare: Prepare = prepared,
) -> RankMeasurement:
    """Runs the case's training on this rank and measures it.

    One thread and no oneDNN, whose scratch memory depends on the CPU's model; garbage is collected between
    steps only, so that no peak depends on when. The process group of all ranks must exist if there is more
    than one.
    """
    torch.set_num_threads(1)
    torch.backends.mkldnn.set_flags(False)
    gc.disable()
    count_all_threads()
    training = prepare(case, rank, device)
    losses, norm_squared = _warmed_up(training)
    with CollectiveCounter(training.axis_of_group) as counter:
        losses.append(training.step())
    observed = _observed_on_gpu if device.type == "cuda" else _observed_on_cpu
    more_losses, states, memory = observed(training, keep_events)
    losses += more_losses
    step_s = []
    while len(losses) < case.steps:
        loss, seconds = _timed_step(training, device)
        losses.append(loss)
        step_s.append(seconds)
    return RankMeasurement(
        rank=rank,
        at=coordinates(case.plan, rank),
        states=states,
        memory=memory,
        collectives=counter.collectives(),
        losses=tuple(losses),
        gradient_norm_squared=norm_squared,
        step_s=tuple(step_s),
    )


def _warmed_up(training: Training) -> tuple[list[float | None], float]:
    """The losses of the first steps, and the squared norm of the very first gradients."""
    losses = [training.gradients()]
    norm_squared = gradient_norm_squared(training.parameters)
    training.update()
    losses += [training.step() for _ in range(WARM_UP_STEPS - 1)]
    return losses, norm_squared


def gradient_norm_squared(parameters: list[Tensor]) -> float:
    """The squared norm of this stage's whole gradient, cut or replicated tensors counted once."""
    return sum(float(_whole_gradient(weight).float().square().sum()) for weight in parameters)


def _whole_gradient(weight: Tensor) -> Tensor:
    """The gradient of a cut weight in full; DDP keeps how it was cut beside TP in `_st_info`."""
    grad = cast(Tensor, weight.grad)
    spec = getattr(weight, "_st_info", None)
    if spec is not None:
        grad = DTensor.from_local(grad, spec.mesh, spec.placements, run_check=False)
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


def _settled() -> None:
    gc.collect()
    _barrier()


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """What is known of the tensors just before the update: the states, and the storages they are in."""

    states: States
    weight_storages_bytes: int
    optimizer_storages_bytes: int
    grad_pointers: frozenset[int]


def _observed_step(training: Training) -> tuple[float | None, _Seen]:
    """One marked step; the states are looked at between backward and update, which allocates nothing."""
    with record_function(STEP):
        loss = training.gradients()
        seen = _seen(training)
        with record_function(UPDATE):
            training.update()
    return loss, seen


def _seen(training: Training) -> _Seen:
    weights = [_local(weight) for weight in training.parameters]
    grads = [_local(weight.grad) for weight in training.parameters if weight.grad is not None]
    states = [_local(tensor) for tensor in _optimizer_tensors(training.optimizer)]
    return _Seen(
        states=States(
            weights_bytes=sum(tensor.nbytes for tensor in weights),
            grads_bytes=sum(tensor.nbytes for tensor in grads),
            optimizer_bytes=sum(tensor.nbytes for tensor in states),
        ),
        weight_storages_bytes=sum(_storages(weights).values()),
        optimizer_storages_bytes=sum(_storages(states).values()),
        grad_pointers=frozenset(_storages(grads)),
    )


def _storages(tensors: list[Tensor]) -> dict[int, int]:
    """The distinct storages of tensors: address to bytes."""
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _optimizer_tensors(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    inner = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
    for state in inner.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def _observed_on_cpu(training: Training, keep_events: bool) -> tuple[list[float | None], States, Memory]:
    """Losses, states and memory of some steady steps: the memory of the one with the least peak."""
    _settled()
    losses, seen = [], []
    with memory_profile() as profiled:
        for _ in range(OBSERVED_STEPS):
            loss, tensors = _observed_step(training)
            losses.append(loss)
            seen.append(tensors)
            _settled()
    record = recorded(profiled, (STEP, UPDATE), paths=keep_events)
    steps = [during(record.events, region) for region in record.regions[STEP]]
    peaks = [max(step, key=lambda event: event.total_bytes) for step in steps]
    best = min(range(len(steps)), key=lambda i: peaks[i].total_bytes)
    memory = Memory(
        rest_bytes=min(step[0].total_bytes - step[0].n_bytes for step in steps),
        peak_bytes=peaks[best].total_bytes,
        peak_reserved_bytes=None,
        peak_by_kind=_peak_by_kind(steps[best], peaks[best], record.regions[UPDATE][best][0], seen[best]),
        events=tuple(steps[best]) if keep_events else (),
    )
    return losses, seen[best].states, memory


def _peak_by_kind(step: list[MemoryEvent], peak: MemoryEvent, update_ns: int, seen: _Seen) -> dict[str, int]:
    """Bytes alive at the peak, by kind: a block is a gradient's if one is in it when the update starts."""
    grads = {held for held in held_at(step, update_ns) if held.pointer in seen.grad_pointers}
    parts = {
        "weights_bytes": seen.weight_storages_bytes,
        "grads_bytes": sum(held.n_bytes for held in held_at(step, peak.time_ns + 1) if held in grads),
        "optimizer_bytes": seen.optimizer_storages_bytes,
    }
    return parts | {"other_bytes": peak.total_bytes - sum(parts.values())}


def _observed_on_gpu(training: Training, keep_events: bool) -> tuple[list[float | None], States, Memory]:
    """Losses, states and memory of one steady step, by the caching allocator's own statistics."""
    _settled()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    rest_bytes = torch.cuda.memory_allocated()
    loss, seen = _observed_step(training)
    torch.cuda.synchronize()
    memory = Memory(
        rest_bytes=rest_bytes,
        peak_bytes=torch.cuda.max_memory_allocated(),
        peak_reserved_bytes=torch.cuda.max_memory_reserved(),
    )
    return [loss], seen.states, memory


def _timed_step(training: Training, device: torch.device) -> tuple[float | None, float]:
    """One step and its seconds, barrier to barrier."""
    _settled()
    start = time.perf_counter()
    loss = training.step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    _barrier()
    return loss, time.perf_counter() - start
