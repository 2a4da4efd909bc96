"""Who holds which part of a parameter, beside PyTorch's own code."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.fsdp._fully_shard._fsdp_common import _chunk_with_empty
from torch.distributed.optim import ZeroRedundancyOptimizer

from memplan.engines.torch.sharding import (
    padded_rows,
    padded_shard_elements,
    shard_elements,
    shard_rows,
    zero_redundancy_partition,
)
from memplan.parts.ddp import BUCKET_BYTES, FIRST_BUCKET_BYTES, ddp_buckets
from memplan.shapes import FP32, Parameter
from memplan.units import MiB

same_every_time = settings(max_examples=100, deadline=None, derandomize=True)
rows, shards = st.integers(1, 200), st.integers(1, 40)


def parameters(*n_elements: int) -> list[Parameter]:
    return [Parameter(f"p{i}", (n,), FP32) for i, n in enumerate(n_elements)]


@same_every_time
@given(rows, shards)
def test_shards_cover_the_whole_with_less_than_a_row_of_padding_each(n_rows, n_shards):
    assert sum(shard_rows(n_rows, n_shards, rank) for rank in range(n_shards)) == n_rows
    assert 0 <= n_shards * padded_rows(n_rows, n_shards) - n_rows < n_shards


@same_every_time
@given(rows, shards, st.integers(1, 5))
def test_shards_are_fsdps(n_rows, n_shards, n_columns):
    parameter = Parameter("p", (n_rows, n_columns), FP32)
    chunks = _chunk_with_empty(torch.empty(n_rows, n_columns), n_shards, dim=0)
    mine = [shard_elements(parameter, n_shards, rank) for rank in range(n_shards)]
    assert mine == [chunk.numel() for chunk in chunks]
    assert padded_shard_elements(parameter, n_shards) == max(mine)


@same_every_time
@given(st.lists(st.integers(1, 30), min_size=1, max_size=30), st.integers(1, 6))
def test_the_zero_1_partition_is_zero_redundancy_optimizers(sizes, n_ranks):
    optimizer: Any = ZeroRedundancyOptimizer.__new__(ZeroRedundancyOptimizer)
    optimizer._partition_parameters_cache = []
    optimizer.world_size = n_ranks
    optimizer.parameters_as_bucket_view = False
    tensors = [torch.empty(size, requires_grad=True) for size in sizes]
    optimizer.param_groups = [{"params": tensors}]
    theirs = [
        [next(i for i, known in enumerate(tensors) if known is tensor) for tensor in groups[0]["params"]]
        for groups in optimizer._partition_parameters()
    ]
    mine = zero_redundancy_partition(tuple(parameters(*sizes)), n_ranks)
    assert [[int(p.name[1:]) for p in owned] for owned in mine] == theirs


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    sizes=st.lists(st.sampled_from([4, 1000, MiB // 8, MiB // 4, MiB // 2, 3 * MiB, 8 * MiB]), max_size=40),
    cap_bytes=st.sampled_from([None, 1, 16, 4000, MiB, 10 * MiB, 100 * MiB]),
)
def test_buckets_are_the_reducers(sizes, cap_bytes):
    with torch.device("meta"):
        tensors = [torch.empty(size) for size in sizes]
    expected: list[list[int]] = []
    if tensors:
        limits = [cap_bytes or FIRST_BUCKET_BYTES, cap_bytes or BUCKET_BYTES]
        expected, _ = dist._compute_bucket_assignment_by_size(tensors, limits, [False] * len(sizes))
    assert [
        [int(p.name[1:]) for p in bucket] for bucket in ddp_buckets(parameters(*sizes), cap_bytes)
    ] == expected


@pytest.mark.parametrize(
    "sizes_mib, buckets_mib",
    [
        ([], []),
        ([0.5, 0.5, 30, 1], [1, 30, 1]),  # the first closes at 1 MiB, the next ones at 25
        ([2, 24, 0.5, 1, 1], [2, 25.5, 1]),
        ([100], [100]),
    ],
)
def test_buckets_by_hand(sizes_mib, buckets_mib):
    found = ddp_buckets(parameters(*(int(size * MiB / 4) for size in sizes_mib)))
    assert [sum(p.n_bytes for p in bucket) / MiB for bucket in found] == buckets_mib


def test_the_limits_are_torchs():
    assert dist._DEFAULT_FIRST_BUCKET_BYTES == FIRST_BUCKET_BYTES


def test_the_largest_tensor_goes_first_and_the_emptiest_rank_gets_the_next():
    partition = zero_redundancy_partition(tuple(parameters(5, 9, 4, 2)), 2)
    assert [[p.n_elements for p in owned] for owned in partition] == [[9, 2], [5, 4]]
