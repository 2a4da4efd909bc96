"""Muon as Megatron-LM runs it: the weights that it updates, how ranks divide them, and its updates.

Source: megatron.core.optimizer.emerging_optimizers, megatron.core.optimizer.layer_wise_optimizer.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from math import lcm
from typing import Final

from memplan.engines.megatron.buffers import (
    BUCKET_ALIGNMENT,
    PARAM_ALIGNMENT,
    Bucket,
    is_orthogonalized,
    padded,
)
from memplan.parts.newton_schulz import STEPS, newton_schulz_products
from memplan.record import Event, Stretch, allocs, events, frees, repeated
from memplan.shapes import BF16, FP32, Buffer, Parameter, buffer_of

FILLED: Final = 0.9
"""The share of a bucket that weights fill at least, where the largest one decides its size."""


def shard_aligned(parameters: Sequence[Parameter], bucket_size: int | None, n_ranks: int) -> list[Bucket]:
    """The buckets of Muon's weights, each of which is in one rank's part as a whole.

    Source: megatron.core.optimizer.layer_wise_optimizer,
    LayerWiseDistributedOptimizer._compute_per_buffer_param_layout (of release 0.19).

    >>> a, b, c = (Parameter(name, (n, 1), BF16) for name, n in (("a", 100), ("b", 300), ("c", 150)))
    >>> (bucket,) = shard_aligned([a, b, c], None, 2)
    >>> bucket.n_elements, [(p.name, start) for p, start, _ in bucket.parameters]
    (640, [('b', 0), ('c', 320), ('a', 512)])
    """
    found: list[Bucket] = []
    own: list[Parameter] = []
    for parameter in reversed(parameters):
        own.append(parameter)
        sizes = [p.n_elements for p in own] if bucket_size is not None else []
        if sizes and sum(sizes) >= max(bucket_size or 0, int(n_ranks * max(sizes) * FILLED)):
            found.append(_packed(own, found[-1].end if found else 0, n_ranks))
            own = []
    if own:
        found.append(_packed(own, found[-1].end if found else 0, n_ranks))
    return found


def _packed(parameters: Sequence[Parameter], start: int, n_ranks: int) -> Bucket:
    """A bucket of equal parts: the largest weight that is left goes to the part with the fewest elements."""
    ends = [(0, rank) for rank in range(n_ranks)]
    places: list[tuple[Parameter, int, int]] = []
    for parameter in sorted(parameters, key=lambda one: -one.n_elements):
        end, rank = heappop(ends)
        at = padded(end, PARAM_ALIGNMENT)
        places.append((parameter, rank, at))
        heappush(ends, (at + parameter.n_elements, rank))
    size = padded(max(ends)[0], lcm(PARAM_ALIGNMENT, lcm(n_ranks, BUCKET_ALIGNMENT) // n_ranks))
    begins = [(p, start + rank * size + at) for p, rank, at in places]
    return Bucket(start, start + n_ranks * size, tuple([(p, at, at + p.n_elements) for p, at in begins]))


def ping_pong(parameters: Sequence[Parameter], rank: int, n_ranks: int) -> list[Parameter]:
    """A rank's weights, which go from the smallest on to the ranks in order, then in reverse order.

    Source: megatron.core.optimizer.layer_wise_optimizer,
    LayerWiseDistributedOptimizer._shard_params_ping_pong.

    >>> weights = [Parameter(str(n), (n,), BF16) for n in range(10)]
    >>> [[p.shape[0] for p in ping_pong(weights, rank, 4)] for rank in range(4)]
    [[0, 8, 7], [1, 9, 6], [2, 5], [3, 4]]
    """
    grouped = sorted(parameters, key=lambda p: (not is_orthogonalized(p), len(p.shape) != 2))
    order = sorted(grouped, key=lambda p: p.n_elements)
    return [*order[rank :: 2 * n_ranks], *order[2 * n_ranks - 1 - rank :: 2 * n_ranks]]


def orthogonalizing(parameters: Sequence[Parameter]) -> tuple[list[Stretch], frozenset[Buffer]]:
    """Muon's updates of a rank's matrices, each of which is kept until the next is there; and their products.

    Neglects: that queries, keys and values of one weight are updated one by one.

    Source: emerging_optimizers.orthogonalized_optimizers.muon_utils:newton_schulz.
    """
    found: list[Stretch] = []
    made = set[Buffer]()
    before: list[Buffer] = []
    for shape, n in Counter([p.shape for p in parameters]).items():
        a, update = min(shape), buffer_of(f"update of {shape}", shape, FP32)
        sizes = {"gram": (a, a), "polynomial": (a, a), "next iterate": shape}
        products = [buffer_of(f"{name} of {shape}", size, BF16) for name, size in sizes.items()]
        made.update(products)
        for times in (1, n - 1):
            own = events("orthogonalization", _orthogonalized(shape, update, products, before))
            found.append(repeated(own, times))
            before = [update]
    return [*found, events("orthogonalization", frees(*before))], frozenset(made)


def _orthogonalized(
    shape: tuple[int, ...], update: Buffer, products: Sequence[Buffer], before: Sequence[Buffer]
) -> Iterator[Event]:
    normalized, widened, scaled = (
        buffer_of(f"{name} momentum of {shape}", shape, FP32)
        for name in ("normalized", "orthogonal", "scaled")
    )
    x = buffer_of(f"iterate of {shape}", shape, BF16)
    yield from (*allocs(normalized, x), *frees(normalized))
    for _ in range(STEPS):
        for made, computed in zip(products, newton_schulz_products(shape), strict=True):
            yield from (*allocs(made), computed)
        yield from frees(*products[:2], x)
        x = products[2]
    yield from (*allocs(widened), *frees(x), *allocs(scaled, update), *frees(scaled, widened, *before))
