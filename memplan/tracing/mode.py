"""The dispatch mode under which PyTorch's own code runs on shapes, integers and masks alone."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from memplan.tracing.shapes import Memo, Operation, Shapes
from memplan.tracing.values import KnownValues

DEVICE: Final = torch.ops.prim.device.default
"""Returns the device of a tensor, which PyTorch asks for all the time."""

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
            return NotImplemented
        return self.run(Operation(func, types, args, named))

    @abstractmethod
    def run(self, operation: Operation) -> Any:
        """The result of an operation on tensors without data; usually `result`."""

    def result(self, operation: Operation, memo: Memo) -> Any:
        """What the operation returns: tensors without data, with their values where they are known."""
        return self._values.result(operation, lambda: self.shapes.result(operation, memo))
