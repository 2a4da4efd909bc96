"""ShardedDataParallel: each gradient is reduced to the rank that owns its parameter, and freed elsewhere.

Small gradients stay in buckets on every rank, one for each rank that owns parameters.

Assumes: a reduction is over when the next gradient is there: what it holds is freed as early as can be.
Source: `fairscale.nn.data_parallel.sharded_ddp:ShardedDataParallel`.
"""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple, final

from memplan.engines.fairscale.oss import OSS, FairScaleStage
from memplan.parts.ddp import ALL_REDUCE
from memplan.parts.module import StageModule
from memplan.passes.module_calls import Part
from memplan.record import (
    COMPUTE,
    AccumulateGrad,
    Collective,
    Event,
    Stretch,
    WaitStream,
    allocs,
    chain,
    events,
    frees,
)
from memplan.shapes import Buffer, buffer_of


class ShardedState(NamedTuple):
    """Whether there are gradients of an earlier micro-batch, and whether the next one's are reduced."""

    has_grads: bool = False
    syncs: bool = False


@final
class ShardedDataParallel(StageModule[ShardedState]):
    """Plays `fairscale.nn.data_parallel.sharded_ddp:ShardedDataParallel`.

    Attributes:
        bucketed: the rank in whose bucket each bucketed gradient is, by the parameter's place.
        buckets: the buffers of these (`GradBucket`), also of ranks whose bucket is empty.
    """

    def __init__(self, stage: FairScaleStage, oss: OSS) -> None:
        super().__init__(stage, ShardedState())
        self.ends, self.places = stage.placed(range(len(stage.trained)))
        self.owner = {place: rank for rank, places in enumerate(stage.partition) for place in places}
        self.owned = frozenset(oss.places)
        n_elements = sum([parameter.n_elements for parameter in stage.parameters()])
        self.most = min(stage.options.reduce_buffer_size, n_elements)
        self.bucketed: dict[int, int] = {}
        self.filled: dict[int, int] = {}
        for place in self._all_params() if self.most else ():
            rank, n = self.owner[place], stage.trained[place].n_elements
            if self.filled.setdefault(rank, 0) + n < self.most:
                self.bucketed[place] = rank
                self.filled[rank] += n
        self.buckets = {
            rank: buffer_of(f"GradBucket of rank {rank}", (n,), stage.dtype, "grads")
            for rank, n in self.filled.items()
        }

    def _all_params(self) -> list[int]:
        """The indices of all parameters by size, smallest first; equal sizes are in the order of ranks."""
        stage = self.stage
        every = [i for places in stage.partition for i in stage.by_size(places)]
        found: list[int] = stage.by_size(every)
        return found

    @property
    def grads(self) -> Counter[Buffer]:
        """The gradients at the update: buckets, and the rank's own."""
        found = self.trace.gradients()
        own = [found[self.stage.trained[i]] for i in self.owned if i not in self.bucketed]
        return Counter([*self.buckets.values(), *own])

    def refresh_trainable(self) -> Iterator[Event]:
        """Makes the buckets, as the first forward pass does: each as large as it may be, then shrunk.

        Source: `fairscale.nn.data_parallel.sharded_ddp:ShardedDataParallel._setup_bucket_strategy`.
        """
        made: dict[int, Buffer] = {}
        for place in self._all_params() if self.most else ():
            rank = self.owner[place]
            if rank not in made:
                made[rank] = buffer_of(f"largest GradBucket of rank {rank}", (self.most,), self.stage.dtype)
                yield from allocs(made[rank])
            if place in self.bucketed:
                parameter = self.stage.trained[place]
                zeros = buffer_of("gradient of zeros", parameter.shape, self.stage.dtype)
                yield from (*allocs(zeros), *frees(zeros))
        for rank, largest in made.items():
            yield from (*allocs(*[self.buckets[rank]] * (self.filled[rank] > 0)), *frees(largest))

    def require_gradient_sync(self) -> None:
        """The end of `ShardedDataParallel.no_sync`."""
        self.state = self.state._replace(syncs=True)

    def _made_grads(self) -> None:
        self.state = self.state._replace(has_grads=True)

    def _forward(self, release: Stretch | None) -> Stretch:
        """The forward pass; outside `no_sync` the first rank's buffers are broadcast, one by one.

        Source: `fairscale.nn.data_parallel.sharded_ddp:ShardedDataParallel.sync_buffers`.
        """
        sent = [
            Collective(kind="broadcast", axis="dp", what="module buffers", payload_bytes=one.n_bytes)
            for one in self.stage.buffers * self.state.syncs
        ]
        return chain("forward", events("forward: broadcast of buffers", sent), super()._forward(release))

    def _backward(self) -> Stretch:
        """The backward pass; what is left of buckets is reduced when it is over.

        Source: `fairscale.nn.data_parallel.sharded_ddp:ShardedDataParallel._flush_reduce_calls`.
        """
        checked_in = Counter[int]()
        played = self.stage.backward_parts(self.ends, self.places)
        parts = [events(part.name, self._hooked(part, checked_in)) for part in played]
        if self.state.syncs:
            empty = [self._reduce(0) for n in self.filled.values() if not n]
            parts.append(events("backward: reductions", [*empty, WaitStream(COMPUTE, ALL_REDUCE)]))
        self._made_grads()
        return chain("backward", *parts, *self.returned())

    def _hooked(self, part: Part[int], checked_in: Counter[int]) -> Iterator[Event]:
        """A part's events with what the hook of each gradient does.

        A gradient is held by autograd until its hook returns; one that is bucketed is added to its view.

        Source: `fairscale.nn.data_parallel.sharded_ddp:ShardedDataParallel._get_reduce_fn`.
        """
        has_grads, syncs = self.state
        for event in part.segment.events:
            yield event
            if not isinstance(event, AccumulateGrad):
                continue
            place = part.owned[event.parameter]
            if place in self.bucketed:
                rank = self.bucketed[place]
                checked_in[rank] += event.parameter.n_elements
                if syncs and checked_in[rank] == self.filled[rank]:
                    yield from self._sent(self.buckets[rank].n_bytes)
                yield from frees(event.buffer)
                continue
            if syncs:
                yield from self._sent(event.buffer.n_bytes)
            yield from frees(event.buffer) * (has_grads + (syncs and place not in self.owned))

    def _sent(self, n_bytes: int) -> tuple[Event, ...]:
        return WaitStream(ALL_REDUCE, COMPUTE), self._reduce(n_bytes)

    def _reduce(self, n_bytes: int) -> Collective:
        what = "reduce gradients"
        return Collective(kind="reduce", axis="dp", what=what, payload_bytes=n_bytes, stream=ALL_REDUCE)
