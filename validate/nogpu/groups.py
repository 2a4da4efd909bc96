"""Process groups over the played NCCL, which has no peers to ask."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch.distributed import distributed_c10d


@contextmanager
def parts_told() -> Iterator[None]:
    """The played NCCL is told how many ranks are in each group that is split off another one.

    Source: `torch.distributed.distributed_c10d:split_group`, `torch.distributed.distributed_c10d:new_group`.
    """
    part_has = ctypes.CDLL(None).memplan_nogpu_part_has
    split_group, new_group = dist.ProcessGroup.split_group, distributed_c10d._new_process_group_helper

    def told_of_new(n: int, rank: int, ranks: list[int], *args: Any, **kwargs: Any) -> Any:
        part_has(len(ranks) or n)
        return new_group(n, rank, ranks, *args, **kwargs)

    def told(self: dist.ProcessGroup, ranks: list[int], *args: Any, **kwargs: Any) -> Any:
        part_has(len(ranks))
        return split_group(self, ranks, *args, **kwargs)

    with (
        patch.object(dist.ProcessGroup, "split_group", told),
        patch.object(distributed_c10d, "_new_process_group_helper", told_of_new),
    ):
        yield
