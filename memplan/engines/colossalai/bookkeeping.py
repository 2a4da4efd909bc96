"""What a rank holds of each parameter, and the buckets in which gradients are reduced.

Source: `colossalai.booster.plugin.low_level_zero_plugin:LowLevelZeroModel`,
`colossalai.zero.low_level.bookkeeping.bucket_store:BucketStore`.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Final, NamedTuple, final

from memplan.device import Device
from memplan.engines.colossalai.options import COMMUNICATED, colossalai_options
from memplan.models import Model
from memplan.parts.stage import WholeStage
from memplan.plan import Plan
from memplan.record import COMPUTE, Collective, Event, WaitStream, allocs, frees
from memplan.shapes import Buffer, Parameter, buffer_of
from memplan.tape import Backend

REDUCTION: Final = "reduction"
"""`BucketStore.comm_stream`, which reduces buckets under `overlap_communication`."""


class Working(NamedTuple):
    """A working parameter: its place, its elements with padding, a rank's part of them, its tensors.

    `padded_grad`: the gradient's copy where the ranks do not divide it; `weight` is a padded copy then too.
    """

    place: int
    parameter: Parameter
    n_elements: int
    shard: int
    grad: Buffer
    weight: Buffer
    padded_grad: Buffer | None


@final
class ColossalAIStage(WholeStage):
    """The whole model in the type that it computes in."""

    def __init__(self, model: Model, plan: Plan, device: Device, backend: Backend | None) -> None:
        super().__init__(model, plan, device, backend, plan.formats.compute)
        self.options = colossalai_options(plan)
        self.bucket_size = self.options.reduce_bucket_size

    @cached_property
    def working(self) -> Sequence[Working]:
        """The working parameters, in the module's order."""
        n_ranks, grads, found = self.plan.dp, self.trace.gradients(), list[Working]()
        for place, one in enumerate(self.trained):
            shard, weight, grad = -(-one.n_elements // n_ranks), self.weights[one], None
            n = shard * n_ranks
            if n > one.n_elements:
                weight = buffer_of(f"{one.name} (padded)", (n,), self.dtype, "weights")
                grad = buffer_of(f"{one.name}.grad (padded)", (n,), self.dtype)
            found.append(Working(place, one, n, shard, grads[one], weight, grad))
        return found


@final
class Bucket:
    """A bucket of gradients and the tensors of its reduction.

    `reduced`: what the gradient store holds; of ZeRO-1 the whole bucket, of ZeRO-2 the rank's part.
    """

    def __init__(self, stage: ColossalAIStage, parameters: Sequence[Working]) -> None:
        options, dtype, self.parameters = stage.options, stage.dtype, parameters
        self.scatters, self.scratches = stage.plan.zero == 2, stage.backend == "gloo"
        self.stream = REDUCTION if options.overlap_communication else COMPUTE
        n = sum([one.n_elements for one in parameters])
        n_reduced = sum([one.shard for one in parameters]) if self.scatters else n
        sent_in = COMMUNICATED.get(options.communication_dtype, dtype)
        self.casts = sent_in != dtype
        self.reduced = buffer_of("reduced gradients", (n_reduced,), dtype, "grads")
        in_place = not (self.scatters or self.casts)
        self.flat = self.reduced if in_place else buffer_of("flat gradients", (n,), dtype)
        self.sent = buffer_of("flat gradients as they are sent", (n,), sent_in) if self.casts else self.flat
        self.received = self.reduced if self.scatters else self.sent
        if self.scatters and self.casts:
            self.received = buffer_of("reduced gradients as they are sent", (n_reduced,), sent_in)

    @property
    def on_own_stream(self) -> set[Buffer]:
        """The tensors that are allocated on the stream that reduces, if it is one of its own."""
        return {self.sent, self.received, self.reduced} - {self.flat} if self.stream != COMPUTE else set()

    def reduction(self, *, added: bool) -> Iterator[Event]:
        """The flat copy and its reduction, of which gradients become views; `added`: to earlier ones.

        Source: `colossalai.zero.low_level.low_level_optim:LowLevelZeroOptimizer._run_reduction`.
        """
        for padded, grad in [(one.padded_grad, one.grad) for one in self.parameters]:
            yield from () if padded is None else (*allocs(padded), *frees(grad))
        yield from (*allocs(self.flat), *[WaitStream(self.stream, COMPUTE)] * (self.stream != COMPUTE))
        yield from (*allocs(self.sent), *frees(self.flat)) * self.casts
        yield from allocs(self.received) * self.scatters
        yield Collective(
            kind="reduce_scatter" if self.scatters else "all_reduce", axis="dp", what="reduce gradients",
            payload_bytes=self.sent.n_bytes, stream=self.stream,
        )  # fmt: skip
        scratch = buffer_of("gloo scratch", self.sent.shape, self.sent.dtype)
        yield from (*allocs(scratch), *frees(scratch)) * (self.scatters and self.scratches)
        yield from allocs(self.reduced) * self.casts
        replaced = frees(*[one.padded_grad or one.grad for one in self.parameters])
        if self.scatters:
            yield from (*replaced, *frees(self.received) * self.casts, *frees(self.sent))
        else:
            yield from (*frees(self.sent) * self.casts, *replaced)
        yield from frees(self.reduced) * added


def buckets_of(parameters: Iterable[Working], most: int) -> list[list[Working]]:
    """Parameters in buckets, in order: one that would take more than `most` elements goes to the next.

    A bucket's own elements are counted with padding, the parameter's without.
    Source: `colossalai.zero.low_level.low_level_optim:LowLevelZeroOptimizer._add_to_bucket`.
    """
    found, filled = list[list[Working]](), 0
    for one in parameters:
        if not found or filled + one.parameter.n_elements > most:
            found.append([])
            filled = 0
        found[-1].append(one)
        filled += one.n_elements
    return found
