"""What a process holds on a GPU outside the caching allocator: CUDA's context, NCCL's buffers."""

from typing import Final, NamedTuple

from memplan.files import toml_table
from memplan.units import MiB


class Interval(NamedTuple):
    """Bytes that are known only to lie between two others, these included."""

    low_bytes: int
    high_bytes: int


OVERHEADS: Final = "hardware/overheads.toml"
"""The table of bytes outside the allocator."""


def outside_allocator(n_communicators: int) -> Interval:
    """Bytes outside the caching allocator: CUDA's context, and each communicator's buffers.

    >>> [n_bytes // MiB for n_bytes in outside_allocator(0)]
    [300, 1008]
    """
    context, nccl = (toml_table(OVERHEADS)[name] for name in ("cuda-context", "nccl-communicator"))
    low, high = (
        int((context[f"{end}_mib"] + n_communicators * nccl[f"{end}_mib"]) * MiB) for end in ("low", "high")
    )
    return Interval(low, high)
