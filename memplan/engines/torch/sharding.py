"""How parameters are divided over ranks: FSDP2's rows, ZeroRedundancyOptimizer's tensors."""

from collections.abc import Iterable
from functools import lru_cache
from heapq import heapreplace
from math import prod
from typing import Final

from memplan.plan import Plan, Rank
from memplan.shapes import Parameter, Shape
from memplan.units import human_bytes


def padded_rows(n_rows: int, n_shards: int) -> int:
    """Rows of the largest shard: ceil(n_rows / n_shards), what `torch.chunk` gives to the first rank.

    >>> padded_rows(10, 4)
    3
    """
    return -(-n_rows // n_shards)


def shard_rows(n_rows: int, n_shards: int, rank: int) -> int:
    """Rows of the rank's shard: the first ranks have full chunks, one has the rest, others have none.

    >>> [shard_rows(10, 4, rank) for rank in range(4)]
    [3, 3, 3, 1]
    """
    chunk = padded_rows(n_rows, n_shards)
    return max(0, min(n_rows, (rank + 1) * chunk) - rank * chunk)


def n_shards(parameter: Parameter, plan: Plan) -> int:
    """The ranks between which FSDP2 shards a parameter: those that hold the same experts, or dp x cp."""
    return plan.efsdp if parameter.is_of_experts else plan.n_shards


def shard_rank(parameter: Parameter, plan: Plan, rank: Rank) -> int:
    """The place of a rank among those between which FSDP2 shards a parameter."""
    return (
        (rank.dp * plan.tp + rank.tp) // plan.ep if parameter.is_of_experts else plan.place_among_shards(rank)
    )


def shard_elements(parameter: Parameter, n_shards: int, rank: int) -> int:
    """Elements of `parameter` in the rank's FSDP2 shard (dim 0 divided).

    Source: `torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam._init_sharded_param`.
    """
    rows = parameter.shape[0]
    return shard_rows(rows, n_shards, rank) * (parameter.n_elements // rows)


def padded_shard_elements(parameter: Parameter, n_shards: int) -> int:
    """Elements of every rank's shard after padding to equal rows, as it is gathered and reduced."""
    rows = parameter.shape[0]
    return padded_rows(rows, n_shards) * (parameter.n_elements // rows)


MUCH_PADDING: Final = 0.1
"""The part of the weights from which on padding is worth a note."""


def padding_note(weights: Iterable[tuple[str, Shape, int]], n_shards: int, itemsize: int) -> str:
    """A sentence about weights with fewer rows than shards, if the padding is much; else an empty one.

    `weights`: name, shape and number of equal ones; `itemsize`: the bytes of an element as it is gathered.

    >>> padding_note([("experts", (8, 100, 10), 4), ("table", (1000, 10), 1)], 64, 2)[:72]
    'experts has 8 rows (dim 0) for 64 shards: FSDP2 leaves 56 ranks without '
    """
    few, n_gathered, n_padded = [], 0, 0
    for name, shape, n in weights:
        rows, *others = shape or (1,)
        n_gathered += n * rows * prod(others)
        if rows < n_shards:
            few.append((n * (n_shards - rows) * prod(others), rows, name))
            n_padded += few[-1][0]
    if n_padded < MUCH_PADDING * n_gathered:
        return ""
    _, rows, name = max(few)
    return (
        f"{name} has {rows} rows (dim 0) for {n_shards} shards: FSDP2 leaves {n_shards - rows} ranks without "
        f"a part of it and pads what is gathered {n_shards / rows:.3g} times. Padding of all such weights is "
        f"{human_bytes(n_padded * itemsize)}, beside {human_bytes(n_gathered * itemsize)} of weights. Shard "
        f"over fewer ranks with dp_replicate={n_shards // rows}, dp={rows}; to shard another dim is not "
        "modelled."
    )


@lru_cache(maxsize=256)
def zero_redundancy_partition(parameters: tuple[Parameter, ...], n_ranks: int) -> list[list[Parameter]]:
    """Whole parameters assigned to ranks: the largest first, each to the rank with the fewest elements.

    Source: `torch.distributed.optim.zero_redundancy_optimizer:ZeroRedundancyOptimizer._partition_parameters`.
    """
    partition: list[list[Parameter]] = [[] for _ in range(n_ranks)]
    least_first = [(0, rank) for rank in range(n_ranks)]
    for parameter in sorted(parameters, key=lambda p: p.n_elements, reverse=True):
        n_elements, rank = least_first[0]
        partition[rank].append(parameter)
        heapreplace(least_first, (n_elements + parameter.n_elements, rank))
    return partition
