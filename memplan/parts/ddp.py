"""DistributedDataParallel: its buckets, how gradients reach them, and its communication hooks.

A bucket is one flat tensor, kept from step to step; gradients are copied into it, and it is reduced as a
whole. A hook works on each bucket while it is reduced. Its allocations are counted as temporaries, as the
buckets are, including what PowerSGD keeps from step to step (errors, P and Q).

Source: torch/csrc/distributed/c10d/reducer.cpp (`Reducer`), `torch.distributed.algorithms.ddp_comm_hooks`.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import groupby, islice
from typing import Final, NamedTuple, final

from memplan.memory import Alive
from memplan.mesh import Group
from memplan.parts.module import StageModule, before_blocks
from memplan.parts.stage import ModelStage, trained
from memplan.passes.backward import backward_order, from_outside
from memplan.passes.split import BlockRuns
from memplan.passes.trace import Segment, Trace, buffer_in, gradients
from memplan.record import (
    COMPUTE,
    AccumulateGrad,
    Alloc,
    Collective,
    Event,
    Free,
    Stretch,
    WaitStream,
    allocs,
    chain,
    events,
    frees,
    repeated,
)
from memplan.shapes import BF16, FP16, Buffer, DType, Parameter, buffer_of
from memplan.units import MiB

ALL_REDUCE: Final = "all-reduce"
"""The stream of all-reduces."""

FIRST_BUCKET_BYTES: Final = 1 * MiB
BUCKET_BYTES: Final = 25 * MiB
BROADCAST_BYTES: Final = 250 * MiB
"""Bytes of weights in each broadcast when DDP is constructed (`broadcast_bucket_size`)."""

POWERSGD_RANK: Final = 1
"""Columns of PowerSGD's P and Q (`matrix_approximation_rank`'s default)."""

POWERSGD_LEAST_RATE: Final = 2
"""How many times smaller a gradient must become to be compressed (`min_compression_rate`'s default)."""

COMPRESSED: Final = {"fp16": FP16, "bf16": BF16}
"""The type that each compressing hook reduces in."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The arguments of `DistributedDataParallel`, and whether gradients are freed after each step."""

    bucket_cap_bytes: int | None = None
    comm_hook: str = "none"
    gradient_as_bucket_view: bool = False
    finds_unused: bool = False
    set_to_none: bool = True


def partial_sum(n_bytes: int, calls: int = 1) -> Collective:
    """The all-reduce of a partial gradient over the tensor axis: `Partial()` to `Replicate()`."""
    return Collective(
        kind="all_reduce", axis="tp", what="partial gradients", payload_bytes=n_bytes, calls=calls
    )


def ddp_buckets(parameters: Iterable[Parameter], cap_bytes: int | None = None) -> list[list[Parameter]]:
    """The parameters of each all-reduce bucket; `parameters`: in the order of ready gradients.

    A bucket closes once it has reached its limit: `cap_bytes`, or 1 MiB for the first and 25 MiB after.

    Source: torch/csrc/distributed/c10d/reducer.cpp (`compute_bucket_assignment_by_size`),
    `torch.nn.parallel.distributed:_BucketCapacityConfig`.
    """
    buckets: list[list[Parameter]] = []
    bucket: list[Parameter] = []
    filled, limit = 0, cap_bytes or FIRST_BUCKET_BYTES
    for parameter in parameters:
        bucket.append(parameter)
        filled += parameter.n_bytes
        if filled >= limit:
            buckets.append(bucket)
            bucket, filled, limit = [], 0, cap_bytes or BUCKET_BYTES
    return [*buckets, bucket] if bucket else buckets


class Bucket(NamedTuple):
    """Elements of a bucket; under PowerSGD also of P, of Q and of its uncompressed gradients."""

    n_elements: int
    p: int
    q: int
    uncompressed: int


def low_rank(parameter: Parameter) -> tuple[int, int] | None:
    """Elements of P and Q for a gradient; None if it is not compressed, as they would not be small enough.

    Source: powerSGD_hook.py (`_should_compress`).

    >>> from memplan.shapes import FP32
    >>> low_rank(Parameter("w", (6, 8), FP32)), low_rank(Parameter("b", (48,), FP32))
    ((6, 8), None)
    """
    n = parameter.shape[0]
    m = parameter.n_elements // n
    p, q = n * POWERSGD_RANK, m * POWERSGD_RANK
    return (p, q) if (p + q) * POWERSGD_LEAST_RATE < n * m else None


def ready_order(trace: Trace, runs: BlockRuns) -> tuple[list[Parameter], list[Parameter]]:
    """Parameters in the order in which their gradients are ready: at once, and late ones.

    A tied weight is ready with its last use. Beside tensor parallelism DDP holds plain weights and makes
    DTensors of the divided ones, module by module, at the start of the forward pass. Their gradients
    therefore become plain tensors, and ready, at the end of the backward pass: they are late.

    Source: `torch.distributed.tensor.parallel.ddp:_reconstruct_dtensor`.
    """
    blocks = [(trace.blocks[kind], n) for kind, n in runs]
    made = [
        *ready(trace.head_backward),
        *(p for block, n in reversed(blocks) for p in ready(block.backward) * n),
        *ready(trace.embed_backward),
    ]
    own = (p for block, n in blocks for p in block.parameters * n)
    module = [*trace.embed_parameters, *own, *trace.head_parameters]
    return made, [p for p in reversed(module) if p.is_dtensor]


def ready(segment: Segment) -> list[Parameter]:
    """The parameters whose gradients are ready within a backward segment."""
    return [e.parameter for e in segment.accumulated if not e.parameter.is_dtensor]


def bucket_of(parameters: Iterable[Parameter], hook: str) -> Bucket:
    """The sizes of a bucket of these parameters."""
    n_elements = sum_p = sum_q = uncompressed = 0
    for parameter in parameters:
        n_elements += parameter.n_elements
        p, q = (low_rank(parameter) if hook == "powersgd" else None) or (0, 0)
        sum_p, sum_q = sum_p + p, sum_q + q
        uncompressed += 0 if p else parameter.n_elements
    return Bucket(n_elements, sum_p, sum_q, uncompressed)


def payloads(hook: str, bucket: Bucket, dtype: DType) -> tuple[int, ...]:
    """Bytes of each all-reduce that a bucket takes.

    PowerSGD reduces what it does not compress, then P, then Q.

    >>> from memplan.shapes import FP32
    >>> payloads("powersgd", Bucket(n_elements=50, p=6, q=8, uncompressed=2), FP32)
    (8, 24, 32)
    """
    if hook == "powersgd":
        return tuple(n * dtype.itemsize for n in (bucket.uncompressed, bucket.p, bucket.q))
    return (bucket.n_elements * COMPRESSED.get(hook, dtype).itemsize,)


@lru_cache(maxsize=1024)
def kept(hook: str, bucket: Bucket, dtype: DType) -> tuple[Buffer, ...]:
    """The tensors that a hook keeps of a bucket from step to step: PowerSGD's error, P and Q."""
    if hook != "powersgd":
        return ()
    sizes = ("error", bucket.n_elements), ("P", bucket.p), ("Q", bucket.q)
    return tuple(buffer_of(f"PowerSGD's {name} of a DDP bucket", (n,), dtype) for name, n in sizes)


@lru_cache(maxsize=1024)
def reduction(hook: str, bucket: Bucket, dtype: DType, axis: Group) -> tuple[Event, ...]:
    """The reduction of a bucket with the allocations of its hook; buckets are reduced one after the other.

    fp16 and bf16: a copy in that type, unless the gradients have it already. PowerSGD: a copy of the bucket,
    the uncompressed gradients, and the new error, which replaces the one that is kept.

    Source: default_hooks.py (`_compress_hook`), powerSGD_hook.py (`powerSGD_hook`).
    """
    all_reduce = partial(Collective, kind="all_reduce", axis=axis, what="all-reduce gradients")
    sent: list[Event] = [WaitStream(ALL_REDUCE, COMPUTE)]
    sent += [all_reduce(payload_bytes=n, stream=ALL_REDUCE) for n in payloads(hook, bucket, dtype)]
    if hook in COMPRESSED and COMPRESSED[hook] != dtype:
        narrow = COMPRESSED[hook]
        copy = buffer_of(f"gradients as {narrow.name} (DDP bucket)", (bucket.n_elements,), narrow)
        return (*allocs(copy), *sent, *frees(copy))
    if hook == "powersgd":
        error, _, _ = kept(hook, bucket, dtype)
        before = buffer_of("gradients before PowerSGD", (bucket.n_elements,), dtype)
        uncompressed = buffer_of("gradients PowerSGD leaves alone", (bucket.uncompressed,), dtype)
        return (*allocs(before, uncompressed, error), *sent, *frees(error, before, uncompressed))
    return tuple(sent)


class Reducer:
    """A stage's buckets, and its backward passes, in which gradients fill them.

    Equal stages of all plans share one (`reducer_of`).

    Attributes:
        buckets: the parameters of each bucket, in the order they are reduced.
        sizes: of each bucket.
        fills: for each gradient in the order they are ready, the buckets that it completes.
        partial: the buffer of each partial gradient that is ready late, before it is summed.

    Plays torch/csrc/distributed/c10d/reducer.cpp (`Reducer`).
    """

    def __init__(
        self,
        trace: Trace,
        runs: BlockRuns,
        dtype: DType,
        cap_bytes: int | None,
        hook: str,
        axis: Group,
        *,
        last: bool,
        finds_unused: bool,
    ) -> None:
        self.trace, self.dtype, self.hook, self.axis, self.last = trace, dtype, hook, axis, last
        self.finds_unused = finds_unused
        self.blocks = [(trace.blocks[kind], n) for kind, n in runs]
        made, late = ready_order(trace, runs)
        self.has_late = bool(late)
        self.buckets = ddp_buckets([*made, *late], cap_bytes)
        if finds_unused:
            self.buckets = ddp_buckets(module_order(trace, runs), cap_bytes)[::-1]
        self.sizes = [bucket_of(parameters, hook) for parameters in self.buckets]
        self.fills = filled_by([*made, *late], self.buckets, self.sizes)
        self.grads = trace.gradients()
        self.partial = {
            grad: p.partial_grad for p, grad in self.grads.items() if p.is_dtensor and p.has_partial_grad
        }
        self.played: dict[tuple[int, bool], Stretch] = {}

    def backward(self, drops: int, *, reduces: bool) -> Stretch:
        """A backward pass that frees `drops` tensors of each ready gradient and, if `reduces`, reduces.

        Source: torch/csrc/distributed/c10d/reducer.cpp (`finalize_backward`).
        """
        key = drops, reduces
        if key not in self.played:
            used = Collective(
                kind="all_reduce", axis=self.axis, what="parameters in use", payload_bytes=4 * len(self.fills)
            )
            ends = [used] * self.finds_unused + [WaitStream(COMPUTE, ALL_REDUCE)]
            waits = [events("finalize_backward", ends)] * reduces
            self.played[key] = chain("backward", *_Backward(self, drops, reduces=reduces).parts(), *waits)
        return self.played[key]


def module_order(trace: Trace, runs: BlockRuns) -> list[Parameter]:
    """The trained parameters in the module's order, in which DDP divides those that may be unused.

    Source: `torch.nn.parallel.distributed:DistributedDataParallel._ddp_init_helper`.
    """
    blocks = [p for kind, n in runs for p in trace.blocks[kind].parameters * n]
    return trained([*trace.embed_parameters, *blocks, *trace.head_parameters])


def filled_by(
    order: Sequence[Parameter], buckets: Sequence[Sequence[Parameter]], sizes: Sequence[Bucket]
) -> list[tuple[Bucket, ...]]:
    """For each gradient in the order they are ready, the buckets that it completes: in turn, as reduced.

    Equal parameters of several blocks are told apart by how many there were before.

    Source: torch/csrc/distributed/c10d/reducer.cpp (`mark_bucket_ready`: `next_bucket_`).
    """
    found: list[tuple[Bucket, ...]] = [()] * len(order)
    places: dict[Parameter, list[int]] = {}
    for place, parameter in enumerate(order):
        places.setdefault(parameter, []).append(place)
    last = 0
    for parameters, size in zip(buckets, sizes, strict=True):
        last = max([last, *[places[one].pop(0) for one in reversed(parameters)]])
        found[last] += (size,)
    return found


_reducer = lru_cache(maxsize=256)(Reducer)


def reducer_of(stage: ModelStage, asked: Arguments) -> Reducer:
    """The reducer of a stage under DDP."""
    return _reducer(
        stage.trace,
        stage.runs,
        stage.plan.formats.stored,
        asked.bucket_cap_bytes,
        asked.comm_hook,
        stage.plan.shard_group,
        last=stage.last,
        finds_unused=asked.finds_unused,
    )


def broadcast_weights(parameters: Sequence[Parameter]) -> Iterator[Event]:
    """DDP's broadcast of the first rank's weights in flat copies, two of them alive at once.

    Source: torch/csrc/distributed/c10d/reducer.cpp (`compute_bucket_assignment_by_size`),
    torch/csrc/distributed/c10d/comm.cpp (`broadcast_coalesced`: of a single tensor a view).
    """
    by_type: dict[DType, list[Parameter]] = {}
    for parameter in parameters:
        by_type.setdefault(parameter.dtype, []).append(parameter)
    found = [bucket for own in by_type.values() for bucket in ddp_buckets(own, BROADCAST_BYTES)]
    copies = flat_buckets([own for own in found if len(own) > 1])
    for i, copy in enumerate(copies):
        yield from allocs(copy)
        yield from frees(*copies[i - 1 : i])
    yield from frees(*copies[-1:])


def first_buckets(stage: ModelStage, asked: Arguments) -> list[Buffer]:
    """DDP's bucket in the first step: one for all gradients, since the order in which they come is not known.

    From the second step on there are several, rebuilt in the order in which gradients came.

    Source: `torch.nn.parallel.distributed:DistributedDataParallel._ddp_init_helper`,
    torch/csrc/distributed/c10d/reducer.cpp (`rebuild_buckets`).
    """
    if asked.finds_unused:  # never rebuilt
        return flat_buckets(reducer_of(stage, asked).buckets)
    return flat_buckets([trained(stage.parameters())])


def flat_buckets(found: Iterable[Sequence[Parameter]]) -> list[Buffer]:
    """The buffers of buckets of these parameters."""
    return [
        buffer_of("DDP bucket", (sum([p.n_elements for p in parameters]),), parameters[0].dtype)
        for parameters in found
    ]


class _Backward:
    """One backward pass, and the buckets that its gradients are still to fill."""

    def __init__(self, reducer: Reducer, drops: int, *, reduces: bool) -> None:
        self.reducer, self.trace, self.drops, self.reduces = reducer, reducer.trace, drops, reduces
        self.left = iter(reducer.fills if reduces else ())

    def parts(self) -> Iterator[Stretch]:
        """The pass from the loss to the embedding, then the late gradients."""
        yield events("backward: loss and head", self._ready(self.trace.head_backward))
        yield from self._blocks()
        yield from self._end()

    def _filled(self, n: int) -> tuple[tuple[Bucket, ...], ...]:
        """For each of the next n gradients, the buckets that it completes."""
        return tuple(islice(self.left, n))

    def _filled_by_each(
        self, n_gradients: int, n: int
    ) -> Iterator[tuple[tuple[tuple[Bucket, ...], ...], int]]:
        """`_filled` by the gradients of each of n equal blocks; equal ones in a row are counted."""
        for filled, same in groupby(self._filled(n_gradients) for _ in range(n)):
            yield filled, len(list(same))

    def _dropped(self, grad: Buffer, buckets: Sequence[Bucket]) -> tuple[Event, ...]:
        """The events when a gradient is ready: the reductions of the buckets that it fills, and frees.

        A new gradient is held by autograd until the reduction is done, an older one is not.

        Source: torch/csrc/autograd/engine.cpp (`call_function`: inputs are kept for post-hooks).
        """
        own = self.reducer
        reduced = [event for bucket in buckets for event in reduction(own.hook, bucket, own.dtype, own.axis)]
        return (*frees(grad) * (self.drops - 1), *reduced, *frees(grad) * min(self.drops, 1))

    def _ready(self, segment: Segment, filled: Sequence[Sequence[Bucket]] | None = None) -> tuple[Event, ...]:
        """A backward segment's events; after each ready gradient its frees and its bucket's reduction."""
        fills = iter(self._filled(len(ready(segment))) if filled is None else filled)
        found: list[Event] = []
        for event in segment.events:
            if isinstance(event, Alloc | Free) and event.buffer in self.reducer.partial:
                event = event._replace(buffer=self.reducer.partial[event.buffer])
            found.append(event)
            if isinstance(event, AccumulateGrad) and not event.parameter.is_dtensor:
                found += self._dropped(event.buffer, next(fills, ()))
        return tuple(found)

    def _late(
        self, parameters: Sequence[Parameter], filled: Sequence[Sequence[Bucket]] | None = None
    ) -> tuple[Event, ...]:
        """The events of the late gradients; partial ones are first summed into new tensors.

        Source: `torch.distributed.tensor.placement_types:Partial._reduce_value`.
        """
        found: list[Event] = []
        fills = iter(self._filled(_n_late(parameters)) if filled is None else filled)
        for p in reversed(parameters):
            if p.is_dtensor:
                grad = self.reducer.grads[p]
                if p.has_partial_grad:
                    found += [*allocs(grad), partial_sum(grad.n_bytes), *frees(p.partial_grad)]
                found += self._dropped(grad, next(fills, ()))
        return tuple(found)

    def _blocks(self) -> Iterator[Stretch]:
        """The blocks' backward passes, the last first; equal ones that fill equal buckets are counted."""
        outside = not self.reducer.last
        for segment, n in backward_order(self.reducer.blocks):
            for filled, times in self._filled_by_each(len(ready(segment)), n):
                key = self.reducer.hook, self.drops, filled, outside
                yield repeated(segment.made_once(key, partial(self._block, segment, filled, outside)), times)
                outside = False

    def _block(self, segment: Segment, filled: Sequence[Sequence[Bucket]], outside: bool) -> Stretch:
        """A block's backward pass; `outside`: its gradient comes from another stage."""
        body = self._ready(segment, filled)
        return events("backward: block", from_outside(body, self.trace.boundary_grad) if outside else body)

    def _end(self) -> Iterator[Stretch]:
        """The embedding's backward pass, then the late gradients; the token table's comes last."""
        trace, own, name = self.trace, self.reducer, "backward: end"
        embed = self._ready(trace.embed_backward)
        if not (own.has_late and (self.drops or self.reduces or own.partial)):
            yield before_blocks(trace, "backward", embed)
            return
        whole = [p for p in trace.embed_parameters if not p.is_divided]
        table = [p for p in trace.embed_parameters if p.is_divided]
        divided = [b for p, b in gradients(trace.embed_backward).items() if p.is_divided]
        cut = next((i for i, event in enumerate(embed) if buffer_in(event) in divided), len(embed))
        yield events("backward: embedding", (*embed[:cut], *self._late(trace.head_parameters)))
        for block, n in reversed(own.blocks):
            for filled, times in self._filled_by_each(_n_late(block.parameters), n):
                yield repeated(events(name, self._late(block.parameters, filled)), times)
        yield events(name, (*self._late(whole), *embed[cut:], *self._late(table)))


def _n_late(parameters: Iterable[Parameter]) -> int:
    return sum([p.is_dtensor for p in parameters])


class DdpState(NamedTuple):
    """Whether there are gradients, and whether the module's next backward and forward pass communicate."""

    has_grads: bool
    require_forward_param_sync: bool
    require_backward_grad_sync: bool = False


@final
class DistributedDataParallel(StageModule[DdpState]):
    """A module under DDP: the last backward pass of a step reduces.

    In it, gradients that are views of buckets are copied into them when they are ready, and each bucket is
    reduced with its last gradient. Late gradients are ready, and added to older ones, at the end of the pass.

    Plays `torch.nn.parallel.distributed:DistributedDataParallel`.
    """

    def __init__(self, stage: ModelStage, asked: Arguments) -> None:
        first = DdpState(has_grads=not asked.set_to_none, require_forward_param_sync=stage.plan.pp == 1)
        super().__init__(stage, first)
        self.reducer = reducer_of(stage, asked)
        self.into_views = asked.gradient_as_bucket_view and asked.set_to_none

    @property
    def between_steps(self) -> Alive:
        """What the hook keeps from step to step."""
        own = self.reducer
        return Counter([buffer for size in own.sizes for buffer in kept(own.hook, size, own.dtype)])

    def _made_grads(self) -> None:
        self.state = self.state._replace(has_grads=True)

    def require_gradient_sync(self) -> None:
        """The end of `DistributedDataParallel.no_sync`."""
        self.state = self.state._replace(require_backward_grad_sync=True)

    def _forward(self, release: Stretch | None) -> Stretch:
        forward = super()._forward(release)
        if not self.state.require_forward_param_sync:
            return forward
        self.state = self.state._replace(require_forward_param_sync=False)
        return chain(forward.name, *self._sync_buffers(), forward)

    def _sync_buffers(self) -> Iterator[Stretch]:
        """The broadcast of the first rank's module buffers: a flat copy per type, of a single buffer a view.

        It happens in a step's first forward; never under a schedule, whose passes all run under
        `no_sync`.

        Source: `torch.nn.parallel.distributed:DistributedDataParallel._sync_buffers`,
        torch/csrc/distributed/c10d/comm.cpp (`broadcast_coalesced`).
        """
        by_type: dict[DType, list[Buffer]] = {}
        for buffer in self.stage.synchronized_buffers:
            by_type.setdefault(buffer.dtype, []).append(buffer)
        for dtype, found in by_type.items():
            n_bytes = sum([buffer.n_bytes for buffer in found])
            what = f"{found[0].name} buffer" if len(found) == 1 else f"{dtype.name} buffers"
            sent = Collective(kind="broadcast", axis=self.reducer.axis, what=what, payload_bytes=n_bytes)
            flat = [buffer_of(what, (n_bytes // dtype.itemsize,), dtype)] if len(found) > 1 else []
            yield events("forward: broadcast of buffers", [*allocs(*flat), sent, *frees(*flat)])

    def _backward(self) -> Stretch:
        reduces = self.state.require_backward_grad_sync
        drops = self.state.has_grads + (reduces and self.into_views)
        played = self.reducer.backward(drops, reduces=reduces)
        self._made_grads()
        return chain("backward", played, *self.returned())
