"""What a process holds on a GPU outside the caching allocator: CUDA's context, NCCL's buffers."""

from functools import cache
from typing import Any, NamedTuple

from memplan.files import Table, toml_table
from memplan.units import MiB


class Interval(NamedTuple):
    """Bytes that are known only to lie between two others, these included."""

    low_bytes: int
    high_bytes: int


@cache
def overhead_table() -> Table:
    """The entries of `overheads.toml`, read once, at first use."""
    return toml_table("hardware/overheads.toml")


def n_communicators(*axes: Any) -> Any:
    """NCCL communicators of a mesh, by the ranks along each axis: one number each, or arrays over meshes.

    One for each axis with more than one rank, and one for all ranks where there are several such axes.

    >>> n_communicators(1, 1, 1, 1), n_communicators(1, 1, 8, 1), n_communicators(2, 1, 2, 8)
    (0, 1, 4)
    """
    n = sum(1 * (axis > 1) for axis in axes)
    return n + 1 * (n > 1)


def outside_allocator(n_communicators: int) -> Interval:
    """Bytes outside the caching allocator: CUDA's context, and each communicator's buffers.

    >>> [n_bytes // MiB for n_bytes in outside_allocator(0)]
    [300, 1008]
    """
    context, nccl = overhead_table()["cuda-context"], overhead_table()["nccl-communicator"]
    low, high = (
        int((context[f"{end}_mib"] + n_communicators * nccl[f"{end}_mib"]) * MiB) for end in ("low", "high")
    )
    return Interval(low, high)
