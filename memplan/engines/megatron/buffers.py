"""Megatron's parameter and gradient buffers, and its optimizers' states, of one rank.

A model chunk's weights are laid out in one buffer in the reverse of the module's order, cut into buckets. The
distributed optimizer gives each data-parallel rank an equal part of each bucket.

Source: megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBuffer,
megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._compute_per_buffer_param_layout.
"""

from collections.abc import Iterable, Iterator, Sequence
from math import lcm
from typing import Final, NamedTuple

from memplan.plan import MOMENTS
from memplan.shapes import FP32, Buffer, DType, Parameter, buffer_of

PARAM_ALIGNMENT: Final = 64
"""A weight begins at a multiple of so many elements (`pad_param_start`)."""

BUCKET_ALIGNMENT: Final = 128
"""A bucket ends at a multiple of this and of the data-parallel ranks (`pad_bucket_end`)."""

USUAL_BUCKET: Final = 40_000_000
"""The least elements of a bucket (`DistributedDataParallel`: `bucket_size`)."""

USUAL_BUCKET_PER_RANK: Final = 1_000_000
"""The elements of a bucket for each data-parallel rank, if that is more."""


class Bucket(NamedTuple):
    """A bucket's place in its buffer, and the place of each of its weights, in elements."""

    start: int
    end: int
    parameters: tuple[tuple[Parameter, int, int], ...]

    @property
    def n_elements(self) -> int:
        """Its elements, padding included."""
        return self.end - self.start

    def shard(self, rank: int, n_ranks: int) -> Iterator[tuple[Parameter, int]]:
        """The weights of which a data-parallel rank has a part, and the part's elements.

        Source: megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._build_model_gbuf_range.
        """
        size = self.n_elements // n_ranks
        first, last = self.start + rank * size, self.start + (rank + 1) * size
        for parameter, start, end in self.parameters:
            n = min(end, last) - max(start, first)
            if n > 0:
                yield parameter, n


def padded(n: int, multiple: int) -> int:
    """The least multiple that is at least n."""
    return -(-n // multiple) * multiple


def buckets_of(
    parameters: Sequence[Parameter], bucket_size: int | None, n_ranks: int, shared: frozenset[Parameter]
) -> list[Bucket]:
    """The buckets of the distributed optimizer: a shared embedding has one of its own.

    `bucket_size`: the elements from which on a bucket ends; None: one bucket. `shared`: the word embeddings
    that the first and the last stage share.

    >>> from memplan.shapes import BF16
    >>> a, b = Parameter("a", (100,), BF16), Parameter("b", (30,), BF16)
    >>> [(bucket.start, bucket.end) for bucket in buckets_of([a, b], None, 2, frozenset())]
    [(0, 256)]
    """
    found: list[Bucket] = []
    own: list[tuple[Parameter, int, int]] = []
    at = start = 0

    def finish(end: int) -> int:
        end = padded(end, lcm(n_ranks, BUCKET_ALIGNMENT))
        found.append(Bucket(start, end, tuple(own)))
        own.clear()
        return end

    for parameter in reversed(parameters):
        at = padded(at, PARAM_ALIGNMENT)
        if parameter in shared and own:
            at = start = finish(at)
        end = at + parameter.n_elements
        own.append((parameter, at, end))
        at = end
        if parameter in shared or (bucket_size is not None and end - start >= bucket_size):
            at = start = finish(end)
    if own:
        finish(at)
    return found


def grad_buffer(n_elements: int, dtype: DType) -> Buffer:
    """The contiguous gradients of a model chunk (`grad_data`), into which each `main_grad` is a view."""
    return buffer_of("grad_data", (n_elements,), dtype, "grads")


def weights_apart(parameters: Iterable[Parameter], optimizer: str) -> Iterator[Buffer]:
    """Each weight, its float32 main parameter, and its moments: without the distributed optimizer.

    Float32 weights are their own main parameters.

    Source: megatron.core.optimizer.optimizer:Float16OptimizerWithFloat16Params.
    """
    for parameter in parameters:
        yield buffer_of(parameter.name, parameter.shape, parameter.dtype, "weights")
        yield from _states(parameter, parameter.n_elements, optimizer)


def weights_sharded(
    buckets: Sequence[Bucket], dtype: DType, optimizer: str, rank: int, n_ranks: int
) -> Iterator[Buffer]:
    """The weights' buffer (`param_data`), and the main parameters and moments of a rank's part of it."""
    yield buffer_of("param_data", (buckets[-1].end,), dtype, "weights")
    for bucket in buckets:
        for parameter, n in bucket.shard(rank, n_ranks):
            yield from _states(parameter, n, optimizer)


def _states(parameter: Parameter, n: int, optimizer: str) -> Iterator[Buffer]:
    names = (*(("main_param",) if parameter.dtype != FP32 else ()), *MOMENTS[optimizer])
    for name in names:
        yield buffer_of(f"{parameter.name}.{name}", (n,), FP32, "optimizer")
