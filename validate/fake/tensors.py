"""Tensors without data: PyTorch's own code runs on them, and every storage it makes is seen."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.parallel.distributed as ddp
from torch import Tensor, UntypedStorage
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from memplan.tracing.mode import ShapesMode
from memplan.tracing.shapes import Operation, Shapes, tensors
from memplan.tracing.values import known_value
from validate.fake.lifetimes import Lifetimes

ENTERS: Final = torch.ops.profiler._record_function_enter_new.default
LEAVES: Final = torch.ops.profiler._record_function_exit._RecordFunction
"""The two ends of `torch.profiler.record_function`."""


class WithoutData(ShapesMode):
    """Runs dispatched operations on shapes alone, and sees every storage that is made."""

    def __init__(self, lifetimes: Lifetimes) -> None:
        super().__init__(Shapes())
        self._lifetimes = lifetimes
        self.keeps_books = False
        """Whether integers get real data, because PyTorch's C++ code reads them without the dispatcher."""

    def run(self, operation: Operation) -> Any:
        func, types, args, kwargs = operation.func, operation.types, operation.args, operation.kwargs
        if self.keeps_books and not types and kwargs.get("dtype", torch.int) in (torch.int, torch.long):
            with _disable_current_modes():
                return func(*args, **kwargs)
        if func is ENTERS:
            self._lifetimes.entered(args[0])
            return func(*args, **kwargs)
        if func is LEAVES:
            self._lifetimes.left()
            return func(*args, **kwargs)
        self._lifetimes.operation = func
        out = self.result(operation, self.shapes.memo(operation))
        for tensor in on_a_device(out):
            self._lifetimes.seen(tensor)
        return out


def on_a_device(results: Any) -> tuple[Tensor, ...]:
    """The tensors of a result that take memory: those on `meta` do not.

    PyTorch itself runs operations on `meta` tensors to learn shapes, as DTensor does.
    """
    return tuple(
        [
            tensor
            for tensor in tensors(results)
            if not isinstance(tensor, FakeTensor) or tensor.fake_device.type != "meta"
        ]
    )


@contextmanager
def without_data(*, paths: bool) -> Iterator[Lifetimes]:
    """Every tensor made meanwhile has no data; the lifetimes of their storages.

    Some things pass the dispatcher by: storages that are resized, the state of the random numbers that
    checkpointing keeps, which is real, numbers that are read all at once, as those of the mesh, and what DDP
    tells other ranks of its parameters and buckets.

    Source: torch/distributed/fsdp/_fully_shard/_fsdp_param.py (`alloc_storage`, `free_storage`),
    torch/utils/checkpoint.py (`fwd_cpu_state`), torch/csrc/distributed/c10d/reducer.cpp
    (`verify_params_across_processes`, `Reducer::sync_bucket_indices`).
    """
    lifetimes = Lifetimes(paths=paths)
    mode = WithoutData(lifetimes)
    resize, random_state = UntypedStorage.resize_, torch.get_rng_state

    def resized(storage: UntypedStorage, n_bytes: int) -> Any:
        result = resize(storage, n_bytes)
        lifetimes.resized(storage)
        return result

    def random_state_seen() -> Tensor:
        state = random_state()
        lifetimes.operation = "get_rng_state"
        lifetimes.seen(state)
        return state

    def listed(tensor: FakeTensor) -> Any:
        return known_value(tensor).tolist()

    with_books = patch.object(mode, "keeps_books", True)
    with (
        patch.object(UntypedStorage, "resize_", resized),
        patch.object(torch, "get_rng_state", random_state_seen),
        patch.object(FakeTensor, "tolist", listed),
        patch.object(ddp, VERIFY, with_books(getattr(ddp, VERIFY))),
        patch.object(dist.Reducer, REBUILD, with_books(getattr(dist.Reducer, REBUILD))),
        mode,
    ):
        yield lifetimes


VERIFY: Final = "_verify_param_shape_across_processes"
REBUILD: Final = "_rebuild_buckets"
