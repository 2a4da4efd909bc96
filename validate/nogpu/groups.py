"""Process groups over the played NCCL, which has no peers to ask."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist


@contextmanager
def parts_told() -> Iterator[None]:
    """The played NCCL is told how many ranks are in each group that is split off another one.

    Source: `torch.distributed.distributed_c10d:split_group`.
    """
    part_has = ctypes.CDLL(None).memplan_nogpu_part_has
    split_group = dist.ProcessGroup.split_group

    def told(self: dist.ProcessGroup, ranks: list[int], *args: Any, **kwargs: Any) -> Any:
        part_has(len(ranks))
        return split_group(self, ranks, *args, **kwargs)

    with patch.object(dist.ProcessGroup, "split_group", told):
        yield
