"""DistributedDataParallel: its buckets, how gradients reach them, and its communication hooks.

A bucket is one flat tensor, kept from step to step; gradients are copied into it, and it is reduced as a
whole. A hook works on each bucket while it is reduced. Its allocations are counted as temporaries, as the
buckets are, including what PowerSGD keeps from step to step (errors, P and Q).

Source: torch/csrc/distributed/c10d/reducer.cpp (`Reducer`), `torch.distributed.algorithms.ddp_comm_hooks`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import groupby, islice, repeat
from typing import Any, Final, NamedTuple, final

from memplan.engines.split import BlockRuns
from memplan.engines.torch.module import StageModule, backward_order, from_outside
from memplan.engines.torch.sharding import ddp_buckets, partial_sum
from memplan.engines.torch.stage import Stage
from memplan.engines.trace import Block, Segment, Trace, buffer_in, gradients
from memplan.memory import Alive
from memplan.record import (
    AccumulateGrad,
    Alloc,
    Collective,
    Event,
    Free,
    Stretch,
    allocs,
    chain,
    events,
    frees,
    repeated,
)
from memplan.shapes import BF16, FP16, Buffer, DType, Parameter, buffer_of

POWERSGD_RANK: Final = 1
"""Columns of PowerSGD's P and Q (`matrix_approximation_rank`'s default)."""

POWERSGD_LEAST_RATE: Final = 2
"""How many times smaller a gradient must become to be compressed (`min_compression_rate`'s default)."""

COMPRESSED: Final = {"fp16": FP16, "bf16": BF16}
"""The type that each compressing hook reduces in."""


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


def buckets(stage: Stage) -> list[list[Parameter]]:
    """The stage's buckets, in the order they are reduced."""
    return _buckets(stage.trace, stage.runs, stage.options.bucket_cap_bytes)


@lru_cache(maxsize=256)
def _buckets(trace: Trace, runs: BlockRuns, cap_bytes: int | None) -> list[list[Parameter]]:
    made, late = ready_order(trace, runs)
    return ddp_buckets([*made, *late], cap_bytes)


@lru_cache(maxsize=256)
def _fills(trace: Trace, runs: BlockRuns, cap_bytes: int | None, hook: str) -> tuple[Bucket | None, ...]:
    """For each gradient in the order they are ready: the bucket that it is the last of."""
    found: list[Bucket | None] = []
    for parameters in _buckets(trace, runs, cap_bytes):
        found += [*repeat(None, len(parameters) - 1), bucket_of(parameters, hook)]
    return tuple(found)


def bucket_of(parameters: Iterable[Parameter], hook: str) -> Bucket:
    """The sizes of a bucket of these parameters."""
    if hook != "powersgd":
        n_elements = sum([parameter.n_elements for parameter in parameters])
        return Bucket(n_elements, p=0, q=0, uncompressed=n_elements)
    n_elements = sum_p = sum_q = uncompressed = 0
    for parameter in parameters:
        n_elements += parameter.n_elements
        p, q = low_rank(parameter) or (0, 0)
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


def kept(hook: str, bucket: Bucket, dtype: DType) -> tuple[Buffer, ...]:
    """The tensors that a hook keeps of a bucket from step to step: PowerSGD's error, P and Q."""
    if hook != "powersgd":
        return ()
    sizes = ("error", bucket.n_elements), ("P", bucket.p), ("Q", bucket.q)
    return tuple(buffer_of(f"PowerSGD's {name} of a DDP bucket", (n,), dtype) for name, n in sizes)


def reduction(hook: str, bucket: Bucket, dtype: DType, held: Sequence[Buffer] = ()) -> tuple[Event, ...]:
    """The reduction of a bucket with the allocations of its hook; buckets are reduced one after the other.

    fp16 and bf16: a copy in that type, unless the gradients have it already. PowerSGD: a copy of the bucket,
    the uncompressed gradients, and the new error, which replaces the one `held`.

    Source: default_hooks.py (`_compress_hook`), powerSGD_hook.py (`powerSGD_hook`).
    """
    sent = [
        Collective(
            kind="all_reduce",
            axis="dp",
            what="all-reduce gradients",
            payload_bytes=n_bytes,
            overlap="backward",
        )
        for n_bytes in payloads(hook, bucket, dtype)
    ]
    if hook in COMPRESSED and COMPRESSED[hook] != dtype:
        narrow = COMPRESSED[hook]
        copy = buffer_of(f"gradients as {narrow.name} (DDP bucket)", (bucket.n_elements,), narrow)
        return (*allocs(copy), *sent, *frees(copy))
    if held:
        error, before = held[0], buffer_of("gradients before PowerSGD", (bucket.n_elements,), dtype)
        uncompressed = buffer_of("gradients PowerSGD leaves alone", (bucket.uncompressed,), dtype)
        return (*allocs(before, uncompressed, error), *sent, *frees(error, before, uncompressed))
    return tuple(sent)


class DdpState(NamedTuple):
    """Whether there are gradients, and whether the module's next backward and forward pass communicate."""

    has_grads: bool
    require_backward_grad_sync: bool
    require_forward_param_sync: bool


@final
class DistributedDataParallel(StageModule[DdpState]):
    """A module under DDP: the last backward pass of a step reduces.

    In it, gradients that are views of buckets are copied into them when they are ready, and each bucket is
    reduced with its last gradient. Late gradients are ready, and added to older ones, at the end of the pass.

    Plays `torch.nn.parallel.distributed:DistributedDataParallel`.
    """

    def __init__(self, stage: Stage) -> None:
        plan = stage.plan
        super().__init__(
            stage,
            DdpState(
                has_grads=not stage.options.set_to_none,
                require_backward_grad_sync=False,
                require_forward_param_sync=plan.pp == 1,
            ),
        )
        self.hook = stage.options.ddp_comm_hook
        self.into_views = stage.options.gradient_as_bucket_view and stage.options.set_to_none
        self.grads = stage.trace.gradients()
        self.partial = {
            grad: p.partial_grad for p, grad in self.grads.items() if p.is_dtensor and p.has_partial_grad
        }
        self.buckets: Counter[Bucket] = Counter()
        if self.hook != "none":
            self.buckets.update(bucket_of(parameters, self.hook) for parameters in buckets(stage))
        self.kept = {bucket: kept(self.hook, bucket, stage.weight_dtype) for bucket in self.buckets}

    @property
    def between_steps(self) -> Alive:
        """What the hook keeps from step to step."""
        return Counter({buffer: n for bucket, n in self.buckets.items() for buffer in self.kept[bucket]})

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

        It happens once a step, not in passes under `no_sync`; so never under a schedule, whose passes all
        are.

        Source: `torch.nn.parallel.distributed:DistributedDataParallel._sync_buffers`,
        torch/csrc/distributed/c10d/comm.cpp (`broadcast_coalesced`).
        """
        by_type: dict[DType, list[Buffer]] = {}
        for buffer in self.stage.model.buffers(self.stage.plan.seq_len):
            by_type.setdefault(buffer.dtype, []).append(buffer)
        for dtype, found in by_type.items():
            n_bytes = sum([buffer.n_bytes for buffer in found])
            what = f"{found[0].name} buffer" if len(found) == 1 else f"{dtype.name} buffers"
            sent = Collective(kind="broadcast", axis="dp", what=what, payload_bytes=n_bytes)
            flat = [buffer_of(what, (n_bytes // dtype.itemsize,), dtype)] if len(found) > 1 else []
            yield events("forward: broadcast of buffers", [*allocs(*flat), sent, *frees(*flat)])

    def _backward(self) -> Stretch:
        last = self.state.require_backward_grad_sync
        drops = self.state.has_grads + (last and self.into_views)
        filled = self._filled() if last else iter(())
        head = self.trace.head_backward
        played = chain(
            "backward",
            self._reduced("backward: loss and head", head, drops, _next(filled, len(ready(head)))),
            *self._replicated_blocks(drops, last, filled),
            *self._end(drops, last, filled),
            *self.returned(),
        )
        self._made_grads()
        return played

    def _filled(self) -> Iterator[Bucket | None]:
        """For each gradient in the order they are ready: the bucket that it is the last of."""
        stage = self.stage
        return iter(_fills(stage.trace, stage.runs, stage.options.bucket_cap_bytes, self.hook))

    def _dropped(self, grad: Buffer, drops: int, bucket: Bucket | None) -> tuple[Event, ...]:
        """The events when a gradient is ready: the reduction of the bucket that it fills, and frees.

        A new gradient is held by autograd until the reduction is done, an older one is not.

        Source: torch/csrc/autograd/engine.cpp (`call_function`: inputs are kept for post-hooks).
        """
        reduced: tuple[Event, ...] = ()
        if bucket is not None:
            held = self.kept.get(bucket, ())
            reduced = reduction(self.hook, bucket, self.stage.weight_dtype, held)
        return (*frees(grad) * (drops - 1), *reduced, *frees(grad) * min(drops, 1))

    def _ready(self, segment: Segment, drops: int, filled: Sequence[Bucket | None]) -> tuple[Event, ...]:
        """A backward segment's events; after each ready gradient its frees and its bucket's reduction."""
        found: list[Event] = []
        fills = iter(filled)
        for event in segment.events:
            if isinstance(event, Alloc | Free) and event.buffer in self.partial:
                event = event._replace(buffer=self.partial[event.buffer])
            found.append(event)
            if isinstance(event, AccumulateGrad) and not event.parameter.is_dtensor:
                found += self._dropped(event.buffer, drops, next(fills, None))
        return tuple(found)

    def _reduced(
        self,
        name: str,
        segment: Segment,
        drops: int,
        filled: Sequence[Bucket | None],
        *,
        outside: bool = False,
    ) -> Stretch:
        """A backward segment with its reductions; `outside`: its gradient comes from another stage."""

        def made() -> Stretch:
            body = self._ready(segment, drops, filled)
            return events(name, from_outside(body, self.trace.boundary_grad) if outside else body)

        return self._once(segment, (name, drops, outside, *filled), made)

    def _once(self, segment: Segment, key: tuple[Any, ...], make: Callable[[], Stretch]) -> Stretch:
        """A stretch made once for a segment and a key, unless it has a hook's allocations."""
        return segment.made_once((self.stage.weight_dtype, *key), make) if self.hook == "none" else make()

    def _late(
        self, parameters: Sequence[Parameter], drops: int, filled: Sequence[Bucket | None]
    ) -> tuple[Event, ...]:
        """The events of the late gradients; partial ones are first summed into new tensors.

        Source: `torch.distributed.tensor.placement_types:Partial._reduce_value`.
        """
        found: list[Event] = []
        fills = iter(filled)
        for p in reversed(parameters):
            if p.has_partial_grad:
                grad = self.grads[p]
                found += [*allocs(grad), partial_sum(grad.n_bytes), *frees(p.partial_grad)]
            if p.is_dtensor:
                found += self._dropped(self.grads[p], drops, next(fills, None))
        return tuple(found)

    def _late_block(self, block: Block, drops: int, filled: Sequence[Bucket | None]) -> Stretch:
        return events("backward: end", self._late(block.parameters, drops, filled))

    def _replicated_blocks(
        self, drops: int, last: bool, filled: Iterator[Bucket | None]
    ) -> Iterator[Stretch]:
        """The blocks' backward passes, the last first; those that fill equal buckets are counted."""
        outside = not self.stage.last
        for segment, n in backward_order(self.stage.blocks):
            for closed, times in self._turns(len(ready(segment)) if last else 0, n, filled):
                body = self._reduced("backward: block", segment, drops, closed, outside=outside)
                yield repeated(body, times)
                outside = False

    def _turns(
        self, n_ready: int, n: int, filled: Iterator[Bucket | None]
    ) -> Iterator[tuple[tuple[Bucket | None, ...], int]]:
        """The buckets that the gradients of each of n equal blocks fill; equal ones in a row are counted."""
        if not n_ready:
            yield (), n
            return
        for closed, same in groupby(_next(filled, n_ready) for _ in range(n)):
            yield closed, len(list(same))

    def _end(self, drops: int, last: bool, filled: Iterator[Bucket | None]) -> Iterator[Stretch]:
        """The embedding's backward pass, then the late gradients; the token table's comes last."""
        trace, plan, name = self.trace, self.stage.plan, "backward: end"
        cutting = trace.embed_backward
        made = _next(filled, len(ready(cutting)))
        if plan.tp == 1 or not (drops or last or plan.sequence_parallel):
            yield self._reduced("backward: embedding", cutting, drops, made)
            return
        whole = [p for p in trace.embed_parameters if not p.is_divided]
        table = [p for p in trace.embed_parameters if p.is_divided]

        def own(*, after: bool) -> tuple[Event, ...]:
            embed = self._ready(cutting, drops, made)
            divided = [b for p, b in gradients(cutting).items() if p.is_divided]
            cut = next((i for i, event in enumerate(embed) if buffer_in(event) in divided), len(embed))
            return embed[cut:] if after else embed[:cut]

        of_head = _next(filled, _n_late(trace.head_parameters))
        yield self._once(
            cutting,
            ("before the blocks' late gradients", drops, made, of_head),
            lambda: events(
                "backward: embedding",
                (*own(after=False), *self._late(trace.head_parameters, drops, of_head)),
            ),
        )
        for block, n in reversed(self.stage.blocks):
            n_late = _n_late(block.parameters) if last else 0
            for closed, times in self._turns(n_late, n, filled):
                key = "the blocks' late gradients", drops, closed
                late = partial(self._late_block, block, drops, closed)
                yield repeated(self._once(block.backward, key, late), times)
        of_whole, of_table = (_next(filled, _n_late(some)) for some in (whole, table))
        yield self._once(
            cutting,
            ("after the blocks' late gradients", drops, made, of_whole, of_table),
            lambda: events(
                name,
                (
                    *self._late(whole, drops, of_whole),
                    *own(after=True),
                    *self._late(table, drops, of_table),
                ),
            ),
        )


def _next(filled: Iterator[Bucket | None], n: int) -> tuple[Bucket | None, ...]:
    return tuple(islice(filled, n))


def _n_late(parameters: Iterable[Parameter]) -> int:
    return sum([p.is_dtensor for p in parameters])
