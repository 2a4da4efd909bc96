"""The dispatch mode under which PyTorch's own code runs on shapes, integers and masks alone."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._python_dispatch import TorchDispatchMode

from memplan.tracing.shapes import Memo, Operation, Shapes
from memplan.tracing.values import KnownValues

DEVICE: Final = torch.ops.prim.device.default
"""Returns the device of a tensor, which PyTorch asks for all the time."""

WRAPS: Final = "_c10d_functional::_wrap_tensor_autograd"
WAITS: Final = "_c10d_functional::wait_tensor"
"""Wraps what a collective is still filling, and waits for it; for a compiler both would make a copy.

Source: torch/distributed/_functional_collectives.py (`_wrap_tensor_autograd`, `_wait_tensor_meta`),
torch/csrc/distributed/c10d/Functional.cpp (`wait_tensor`).
"""

SHAPES: Final = torch._C._TorchDispatchModeKey.FAKE
"""The key of PyTorch's own mode for tensors without data."""


class ShapesMode(TorchDispatchMode, ABC):
    """Runs operations on tensors without data (`Shapes`) and on known values (`KnownValues`).

    A subclass notes operations in `run`. Operations on wrappers (such as DTensor) are passed on, so that
    those on the tensors inside are seen.

    PyTorch's mode for such tensors is asked for results, but never active: PyTorch would take an active one
    for a compiler's and go other ways (`torch.distributed._functional_collectives._are_we_tracing`).
    """

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes = shapes
        self._values = KnownValues(shapes.mode)
        self.passed_on: Any = None
        """The last operation on a wrapper."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False, as nothing is compiled here; PyTorch's own check would take longer than an operation."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is DEVICE and isinstance(args[0], FakeTensor):
            return args[0].device
        named = {} if kwargs is None else kwargs
        if torch._C._get_dispatch_mode(SHAPES) is not None:
            return func(*args, **named)
        if types and tuple(types) not in ((FakeTensor,), (Tensor,)):
            self.passed_on = func
            return NotImplemented
        if func._schema.name == WRAPS:
            return AsyncCollectiveTensor(args[0])
        if func._schema.name == WAITS:
            self.waited(args[0])
            return args[0]
        return self.run(Operation(func, types, args, named))

    def waited(self, result: Tensor) -> None:
        """Note that a collective has been waited for."""
        return

    @abstractmethod
    def run(self, operation: Operation) -> Any:
        """The result of an operation on tensors without data; usually `result`."""

    def result(self, operation: Operation, memo: Memo) -> Any:
        """What the operation returns: tensors without data, with their values where they are known."""
        return self._values.result(operation, lambda: self.shapes.result(operation, memo))
