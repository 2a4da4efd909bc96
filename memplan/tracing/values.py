"""The known values of tensors without data: integers, masks and single numbers, computed for real.

Python code that trains a model looks at few values: whether a token's row is this rank's own, the optimizer's
count of steps, whether a scaled gradient has overflowed. They follow from integers and single numbers, so
these, and floats that are made of them, are computed beside the tensors that stand for them. Nothing else has
a value: a loss is no number.
"""

import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map, tree_map_only

from memplan.tracing.shapes import Operation, tensors

MOST_ELEMENTS: Final = 1 << 24
"""A tensor of integers with more elements is not computed: a mask of all queries by all keys, say."""

MOST_FLOATS: Final = 1 << 20
"""Of floats that follow from integers and are not written to: distances of positions, a mask of ones."""

READ: Final = torch.ops.aten._local_scalar_dense.default
"""The operation that reads a number out of a tensor (`Tensor.item`)."""

OVERWRITTEN: Final = "overwritten"
"""The mark of a storage of known values that unknown ones have been written to."""

CHECKS_OVERFLOWS: Final = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
"""The operation that notes whether a gradient is not finite; gradients without values count as finite."""


class KnownValues:
    """Keeps each known value with the tensor that stands for it (`FakeTensor.real_tensor`)."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode

    def result(self, operation: Operation, without_data: Callable[[], Any]) -> Any:
        """The operation's result `without_data`, and its values where they follow from known ones.

        Raises:
            UnknownValue: if what is to be done depends on a value that is not known.
        """
        func, operator = operation.func, operation.operator
        if func is READ:
            return _number(operation.args[0])
        known = all(map(_is_known, operation.given))
        if known and operator.any_shape:
            stand_in = partial(self._stand_in, operation.given[0].device)
            return tree_map(stand_in, _computed(operation))
        out = without_data()
        if operator.is_constant and _can_be_known(out, most_floats=0):
            with _disable_current_modes():
                blank = tree_map_only(Tensor, _zeros, operation.args)
                out.real_tensor = operation.func(*blank, **{**operation.kwargs, "device": None})
            return out
        written = operation.written if operator.writes else ()
        if known and (made := (*written, *tensors(out))):
            most = 1 if written or operator.any_values else MOST_FLOATS
            if all(_can_be_known(one, most) for one in made):
                with suppress(NotImplementedError):  # a CPU has no kernel for these types: a histogram's, say
                    for result, value in zip(tensors(out), tensors(_computed(operation)), strict=True):
                        if isinstance(result, FakeTensor):
                            result.real_tensor = value
                    return out
        if written and func is not CHECKS_OVERFLOWS:
            _forget(written)
        return out

    def _stand_in(self, device: torch.device, value: Any) -> Any:
        """The tensor without data, on a device, that represents a known value."""
        if not isinstance(value, Tensor):
            return value
        n = value.untyped_storage().nbytes() // value.itemsize  # it may have been made for more elements
        own = torch.empty(n, dtype=value.dtype, device="meta")
        own = own.as_strided(value.shape, value.stride(), value.storage_offset())
        tensor = FakeTensor(self._mode, own, device)
        tensor.real_tensor = value
        return tensor


class UnknownValue(NotImplementedError):
    """A value that is read but is not known: only what follows from integers is."""


def known_value(tensor: Tensor) -> Tensor:
    """The value of a tensor.

    Raises:
        UnknownValue: if it is not known.
    """
    value = _value(tensor)
    if value is None:
        raise UnknownValue(f"{tensor} is read, but only what follows from integers is known.")
    return value


def receive_counts(received: Tensor, sent: Tensor) -> None:
    """Make the counts that a rank receives known: as many in all as it sends, and evenly divided.

    Raises:
        UnknownValue: if what it sends is not known.
    """
    n = received.numel()
    with _disable_current_modes():
        total = int(known_value(sent).sum())
    make_known(received, total // n + (np.arange(n) < total % n))


def make_known(tensor: Tensor, values: npt.NDArray[np.int64]) -> None:
    """Let a tensor of whole numbers without data have these values, one after the other."""
    if isinstance(tensor, FakeTensor):
        with _disable_current_modes():
            tensor.real_tensor = torch.from_numpy(values).to(tensor.dtype).view(tensor.shape)


def _number(tensor: Tensor) -> Any:
    """The number in a tensor of one element; NaN for a float whose value is not known."""
    if tensor.is_floating_point() and not _is_known(tensor):
        return math.nan
    return known_value(tensor).item()


def _zeros(like: Tensor) -> Tensor:
    """Zeros in memory, of a tensor's shape and type."""
    return torch.zeros(like.shape, dtype=like.dtype)


def _forget(written: Iterable[Tensor]) -> None:
    """Known values have been overwritten by unknown ones, in all tensors that share their storage."""
    for tensor in written:
        if isinstance(tensor, FakeTensor) and tensor.real_tensor is not None:
            vars(tensor.real_tensor.untyped_storage())[OVERWRITTEN] = True
            tensor.real_tensor = None


def _computed(operation: Operation) -> Any:
    def value(argument: Any) -> Any:
        if isinstance(argument, torch.device) and argument.type in ("cuda", "meta"):  # C++ code says `meta`
            return torch.device("cpu")
        return _value(argument) if isinstance(argument, Tensor) else argument

    args, kwargs = tree_map(value, (operation.args, operation.kwargs))
    with _disable_current_modes(), torch.no_grad():
        return operation.func(*args, **kwargs)


def _value(tensor: Tensor) -> Tensor | None:
    if not isinstance(tensor, FakeTensor):
        return tensor
    value = tensor.real_tensor
    if value is not None and OVERWRITTEN in vars(value.untyped_storage()):
        return None
    return value


def _is_known(tensor: Tensor) -> bool:
    return _value(tensor) is not None


def _is_counted(tensor: Tensor) -> bool:
    """Whether it is of integers, or a mask."""
    return not (tensor.is_floating_point() or tensor.is_complex())


def _can_be_known(tensor: Tensor, most_floats: int) -> bool:
    if not _is_counted(tensor):
        return tensor.numel() <= most_floats
    return tensor.numel() <= MOST_ELEMENTS
