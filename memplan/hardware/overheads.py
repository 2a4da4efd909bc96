"""What a process holds on a GPU out of the caching allocator: CUDA's context, NCCL's buffers."""

import tomllib
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any, NamedTuple

from memplan.units import MiB


class Interval(NamedTuple):
    """Bytes that are known only to lie between two others, these included."""

    low_bytes: int
    high_bytes: int


@cache
def overhead_table() -> MappingProxyType[str, dict[str, Any]]:
    """The entries of `overheads.toml` as they stand there, read once, at first use."""
    text = files("memplan.hardware").joinpath("overheads.toml").read_text(encoding="utf-8")
    return MappingProxyType(tomllib.loads(text))


def outside_allocator(n_communicators: int) -> Interval:
    """What the caching allocator does not know of: CUDA's context, and each communicator's buffers.

    >>> [n_bytes // MiB for n_bytes in outside_allocator(0)]
    [300, 1008]
    """
    context, nccl = overhead_table()["cuda-context"], overhead_table()["nccl-communicator"]
    low, high = (
        int((context[f"{end}_mib"] + n_communicators * nccl[f"{end}_mib"]) * MiB) for end in ("low", "high")
    )
    return Interval(low, high)
