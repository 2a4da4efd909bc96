"""The interface of an optimizer: its states, its hook of a gradient, its part of backward, its step."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from memplan.allocator import page_locked_bytes
from memplan.engines.base import HostRecord
from memplan.engines.deepspeed.stage import DeepSpeedStage
from memplan.kernels import norm_scratch
from memplan.parts.flat import Slot, calls_of
from memplan.record import (
    COMPUTE,
    Collective,
    CollectiveKind,
    Event,
    Stretch,
    WaitStream,
    allocs,
    chain,
    events,
    frees,
)
from memplan.shapes import FP32, FP64, UINT8, Buffer, DType, buffer_of

REDUCTION: Final = "reduction"
"""The stream of reductions under `overlap_comm`."""

UPDATE_NAME: Final = "optimizer step"
"""The stretch before which the first step makes FusedAdam's moments."""


class Optimizer(ABC):
    """An optimizer around FusedAdam, on one rank; a backward pass calls `hook` for each gradient.

    `states`: the flat tensors that are alive between steps. `grads`: what its step reads. `kept`: what a step
    frees and makes anew. `made_in_step`: the moments, if the first step makes them. `keeps_weights`: it is
    set up beside the module's whole weights. `scales_loss`: it multiplies the loss by a scale, 1 in bfloat16.
    """

    states: Sequence[Buffer]
    grads: Sequence[Buffer]
    kept: Sequence[Buffer] = ()
    made_in_step: Sequence[Buffer] = ()
    keeps_weights: bool = True
    scales_loss: bool = True

    def __init__(self, stage: DeepSpeedStage, slots: Sequence[Slot]) -> None:
        self.stage, self.slots = stage, slots
        self.grad_of = stage.trace.gradients()
        self.flattened: list[Buffer] = []

    @property
    def host(self) -> HostRecord | None:
        """What the host holds instead of the GPU; None where nothing is offloaded."""
        return None

    @property
    def on_own_stream(self) -> Sequence[tuple[Buffer, str]]:
        """The buffers that are allocated on other streams, each with its stream."""
        return ()

    @property
    def between_steps(self) -> Sequence[Buffer]:
        """The flat gradients that are zeroed after a step, and stay."""
        return ()

    def starts_training(self) -> bool:
        """Goes back to before the first step; whether that step differs beyond `made_in_step`."""
        return False

    def init(self) -> Iterable[Event]:
        """What making the module allocates and frees that is freed, or stays beside its weights."""
        return ()

    @abstractmethod
    def setup(self) -> Iterator[Event]:
        """What `deepspeed.initialize` allocates and frees, the module's weights being there."""

    @abstractmethod
    def hook(self, slot: Slot, *, older: bool, boundary: bool) -> Iterator[Event]:
        """What happens once a gradient is there; `older`: it was added to one of an earlier micro-batch."""

    @abstractmethod
    def epilogue(self, *, older: bool, boundary: bool) -> Iterator[Event]:
        """What happens when a backward pass is over, at an accumulation boundary or not."""

    @abstractmethod
    def step(self) -> Stretch:
        """The update."""

    def grad(self, slot: Slot) -> Buffer:
        """A parameter's gradient, as autograd has made it."""
        return self.grad_of[slot.parameter]

    def sent_in_float32(self, n_elements: int, norm: Buffer, stream: str) -> Iterator[Event]:
        """The norm of a gradient's part, in float64, and the part's copy in float32 that the host gets."""
        doubles, floats = (buffer_of("gradient as it is sent", (n_elements,), one) for one in (FP64, FP32))
        n_bytes = norm_scratch(self.stage.device, n_elements)
        scratch = [buffer_of("scratch of a norm", (b,), UINT8) for b in n_bytes]
        self.flattened += [doubles, floats, norm, *scratch]
        yield from (*allocs(doubles, norm, *scratch), *frees(*scratch, doubles))
        sent = host_copy("gradients to the host", floats.n_bytes, stream)
        yield from (*allocs(floats), sent, *frees(floats))

    def reduced(self, sizes: Iterable[int], most: int, stream: str = COMPUTE) -> Iterator[Event]:
        """The all-reduces of gradients that are flattened first; a single tensor is not copied.

        On a stream of its own, each waits for what was computed, which waits for the ones before.

        Source: `deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.average_tensor`,
        torch/csrc/utils/tensor_flatten.h (`flatten_dense_tensors`).
        """
        for call in calls_of(sizes, most):
            flat, wide = [
                buffer_of("gradients to reduce", (sum(call),), dtype)
                for dtype in (self.stage.dtype, self.stage.reduced_dtype)
            ]
            copies = [*[flat] * (len(call) > 1), *[wide] * (wide.dtype != flat.dtype)]
            self.flattened += copies
            yield from allocs(*copies)
            if stream != COMPUTE:
                yield from (WaitStream(stream, COMPUTE), WaitStream(COMPUTE, stream))
            yield self.all_reduce("reduce gradients", wide.n_bytes, stream)
            yield from frees(*reversed(copies))

    def all_reduce(self, what: str, n_bytes: int, stream: str = COMPUTE) -> Collective:
        """An all-reduce over the ranks that divide the states."""
        return self.collective("all_reduce", what, n_bytes, stream)

    def agreed(self, what: str, n_bytes: int) -> list[Collective]:
        """All-reduces of a number: over the ranks that divide the states, then over tensor-parallel ones.

        For these DeepSpeed takes the ranks of a pipeline (`get_model_parallel_group`).
        """
        plan = self.stage.plan
        axis = "pp" if plan.pp > 1 else "tp"
        others = Collective(kind="all_reduce", axis=axis, what=what, payload_bytes=n_bytes)
        return [self.all_reduce(what, n_bytes), *[others] * (max(plan.pp, plan.tp) > 1)]

    def collective(self, kind: CollectiveKind, what: str, n_bytes: int, stream: str = COMPUTE) -> Collective:
        """A collective over the ranks that divide the states."""
        axis = self.stage.plan.shard_group
        return Collective(kind=kind, axis=axis, what=what, payload_bytes=n_bytes, stream=stream)


def host_copy(what: str, n_bytes: int, stream: str = COMPUTE) -> Collective:
    """A copy between the GPU and its host."""
    return Collective(kind="copy", axis="host", what=what, payload_bytes=n_bytes, stream=stream)


def host_record(pinned: Iterable[Buffer], pageable: Iterable[Buffer]) -> HostRecord:
    """What the host holds, page-locked and not; a page-locked block has a power of two bytes."""
    locked = list(pinned)
    spare = [page_locked_bytes(one.n_bytes) - one.n_bytes for one in locked]
    rest = [buffer_of("rest of a page-locked block", (n,), UINT8) for n in spare if n]
    return HostRecord(pinned=Counter([*locked, *rest]), pageable=Counter(pageable), step=events("host", ()))


def flat_buffer(name: str, n_elements: int, dtype: DType = FP32, *, weights: bool = False) -> Buffer:
    """A flat tensor between steps: of weights, or of optimizer state."""
    return buffer_of(name, (n_elements,), dtype, "weights" if weights else "optimizer")


def stepped(*before: Stretch, after: Iterable[Event] = ()) -> Stretch:
    """A step: what comes before FusedAdam's kernel, the kernel, which works in place, and what follows."""
    return chain("update", *before, events(UPDATE_NAME, after))


def norms_of(stage: DeepSpeedStage, sizes: Iterable[int]) -> Iterator[Event]:
    """The norm of each gradient of so many elements, in float64; all norms are alive together, then freed."""
    norms = []
    for n_elements in sizes:
        wide = buffer_of("gradient in float64", (n_elements,), FP64)
        norms.append(buffer_of("norm of a gradient", (), FP64))
        scratch = norm_scratch(stage.device, n_elements)
        own = [buffer_of("scratch of a norm", (n_bytes,), UINT8) for n_bytes in scratch]
        yield from (*allocs(wide, norms[-1], *own), *frees(*own, wide))
    yield from frees(*norms)
