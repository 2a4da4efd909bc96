"""Tensors without data: PyTorch's own code runs on them, and every storage it makes is seen."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.parallel.distributed as ddp
from torch import Tensor, UntypedStorage
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from memplan.tracing.shapes import Shapes, tensors
from memplan.tracing.values import KnownValues, known_value
from validate.fake.lifetimes import Lifetimes

DEVICE: Final = torch.ops.prim.device.default
"""Asked of a tensor all the time; moves nothing."""

ENTERS: Final = torch.ops.profiler._record_function_enter_new.default
LEAVES: Final = torch.ops.profiler._record_function_exit._RecordFunction
"""The two ends of `torch.profiler.record_function`."""

WRAPS: Final = "_c10d_functional::_wrap_tensor_autograd"
WAITS: Final = "_c10d_functional::wait_tensor"
"""Wraps what a collective is still filling, and waits for it; for a compiler both would make a copy.

Source: torch/distributed/_functional_collectives.py (`_wrap_tensor_autograd`, `_wait_tensor_meta`),
torch/csrc/distributed/c10d/Functional.cpp (`wait_tensor`).
"""

SHAPES: Final = torch._C._TorchDispatchModeKey.FAKE
"""The key of PyTorch's own mode for tensors without data."""


class WithoutData(TorchDispatchMode):
    """Runs on shapes alone what the dispatcher is asked for, and sees every storage that is made.

    Operations on wrappers (DTensor and the like) are passed on, so that those inside are seen. What is on
    `meta` is in no device's memory, and what PyTorch runs on shapes of its own accord, as DTensor does to
    learn a result's, is in nobody's.

    PyTorch's mode for such tensors is asked for results, but never active: PyTorch would take an active one
    for a compiler's and go other ways (`torch.distributed._functional_collectives._are_we_tracing`).
    """

    def __init__(self, lifetimes: Lifetimes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._shapes = Shapes()
        self._values = KnownValues(self._shapes.mode)
        self._lifetimes = lifetimes
        self.keeps_books = False
        """Whether integers are real: PyTorch's C++ code is about to read them without the dispatcher."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here; making sure of that at each operation would take longer than it."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = {} if kwargs is None else kwargs
        if torch._C._get_dispatch_mode(SHAPES) is not None:
            return func(*args, **named)
        if types and tuple(types) != (FakeTensor,):
            return NotImplemented
        if func is DEVICE:
            return args[0].fake_device
        if self.keeps_books and not types and named.get("dtype", torch.int) in (torch.int, torch.long):
            with _disable_current_modes():
                return func(*args, **named)
        if func is ENTERS:
            self._lifetimes.entered(args[0])
            return func(*args, **named)
        if func is LEAVES:
            self._lifetimes.left()
            return func(*args, **named)
        if func._schema.name == WRAPS:
            return AsyncCollectiveTensor(args[0])
        if func._schema.name == WAITS:
            return args[0]
        self._lifetimes.operation = func
        out = self._values.result(func, (args, named), lambda: self._shapes.result(func, types, args, named))
        for tensor in tensors(out):
            if not isinstance(tensor, FakeTensor) or tensor.fake_device.type != "meta":
                self._lifetimes.seen(tensor)
        return out


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

    def with_books(function: Any) -> Any:
        def kept(*args: Any, **kwargs: Any) -> Any:
            mode.keeps_books = True
            try:
                return function(*args, **kwargs)
            finally:
                mode.keeps_books = False

        return kept

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
