"""Shapes of results, asked of PyTorch once for each operation and each layout of its arguments.

`FakeTensorMode` would remember them too, but takes 100 microseconds to find out that it does. A step of a
large model is some hundred thousand operations, few of them different.
"""

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from functools import cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

ATEN: Final = torch.ops.aten

UNLIKE: Final = frozenset(
    {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output, torch.Tag.inplace_view}
)
"""Operations whose results do not follow from layouts, or that change an argument's."""

NAMESPACES: Final = frozenset({"aten", "_c10d_functional", "fsdp"})
"""Namespaces whose operations take and return only tensors and plain values."""

LAYER_NORM: Final = ATEN.native_layer_norm.default
GROUPED_PRODUCT: Final = ATEN._grouped_mm.default
PRODUCTS: Final = (ATEN.mm.default, ATEN.addmm.default)
ALIGNMENT_BYTES: Final = 16
"""The bytes of which rows of the operands of a product of groups are multiples.

Source: aten/src/ATen/native/GroupedMMUtils.h (`check_valid_strides_and_return_transposed`).
"""

INDEX: Final = ATEN.index.Tensor
"""Its result's shape depends on the values of masks, but not on those of other indices."""

MASKS: Final = (torch.bool, torch.uint8)

MAKE: Final[Any] = Tensor._make_subclass
"""Makes a tensor without data of one on `meta`."""


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """A type's name without its package, as in `float32`."""
    return str(dtype).removeprefix("torch.")


def tensors(value: Any) -> tuple[Tensor, ...]:
    """The tensors of an argument or a result, in order."""
    if isinstance(value, Tensor):
        return (value,)
    found: list[Tensor] = []
    if isinstance(value, tuple | list | dict):
        for part in value.values() if isinstance(value, dict) else value:
            if isinstance(part, Tensor):
                found.append(part)
            elif isinstance(part, tuple | list | dict):
                found += tensors(part)
    return tuple(found)


Layout = tuple[torch.Size, tuple[int, ...], int, torch.dtype, torch.device, bool]
"""The properties of a tensor apart from its elements: the last says whether it is conjugated."""


def layout_of(tensor: FakeTensor) -> Layout:
    """A tensor's layout."""
    offset = int(tensor.storage_offset())
    return tensor.shape, tensor.stride(), offset, tensor.dtype, tensor.fake_device, tensor.is_conj()


class _Result(NamedTuple):
    """A result: an argument itself, a view of its storage, or (no argument) with a storage of its own."""

    layout: Layout
    argument: int | None
    is_argument: bool


class _Results(NamedTuple):
    """All results of an operation: any number in a tuple or a list, or (`container` None) one or none.

    A result that is no tensor, as a length, is kept as it is.
    """

    parts: tuple[_Result | int | None, ...]
    container: type[tuple[Any, ...]] | type[list[Any]] | None


class Memo:
    """What is remembered of an operation on arguments of certain layouts.

    `results`: their layouts; `taken`: the memory that it takes beside them, and what it computes.
    """

    __slots__ = ("results", "taken")

    def __init__(self) -> None:
        self.results: _Results | None = None
        self.taken: Any = None


class Operator:
    """The properties of an operation that hold for all its arguments."""

    __slots__ = ("any_shape", "any_values", "follows_from_layouts", "is_constant", "name", "writes")

    def __init__(self, func: Any) -> None:
        self.name: str = func._schema.name.removeprefix("aten::")
        self.follows_from_layouts = (
            func.namespace in NAMESPACES and UNLIKE.isdisjoint(func.tags) and "lift" not in self.name
        )
        """Whether equal layouts give equal results: not those of constants (`torch.tensor`), say."""
        self.any_shape = torch.Tag.dynamic_output_shape in func.tags
        """Whether the shape of what it returns depends on values."""
        self.any_values = torch.Tag.nondeterministic_seeded in func.tags or "empty" in self.name
        """Whether what it returns is random, or whatever was in the memory."""
        self.is_constant = self.name in ("zeros_like", "ones_like", "full_like")
        """Whether its values do not depend on the tensor that it is given."""
        self.writes = tuple(
            (place, argument.name)
            for place, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        )
        """The places and names of the arguments that it writes to."""


operator_of: Final = cache(Operator)


class Operation:
    """A call of an operation: `given` are the tensors among its arguments, in order."""

    __slots__ = ("args", "func", "given", "key", "kwargs", "operator", "types")

    def __init__(
        self, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        self.func, self.types, self.args, self.kwargs = func, types, args, kwargs
        self.operator = operator_of(func)
        self.given: list[Tensor] = []
        self.key = self.operator, _key(args, self.given), _key(kwargs, self.given) if kwargs else ()
        """The operation and its arguments, of tensors their layouts."""

    @property
    def written(self) -> tuple[Tensor, ...]:
        """The tensors that it writes to."""
        args, writes = self.args, self.operator.writes
        return tensors([args[at] if at < len(args) else self.kwargs.get(name) for at, name in writes])


class Shapes:
    """Runs operations on tensors without data."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.mode.cache_enabled = False  # what it would keep is kept here
        self._memos: defaultdict[Hashable, Memo] = defaultdict(Memo)
        self._common: dict[torch.device, dict[str, Any]] = {}

    def memo(self, operation: Operation) -> Memo:
        """What is remembered of the operation: nothing, if its results do not follow from layouts."""
        by_numbers = operation.func is INDEX and all(one.dtype not in MASKS for one in operation.given[1:])
        follows = by_numbers or operation.operator.follows_from_layouts
        return self._memos[operation.key] if follows else Memo()

    def result(self, operation: Operation, memo: Memo) -> Any:
        """The result of the operation."""
        known = memo.results
        if known is not None:
            made = [self._made(part, operation.given) for part in known.parts]
            if known.container is not None:
                return known.container(made)
            return made[0] if made else None
        out = self._dispatched(operation)
        memo.results = _described(out, operation.given)
        return out

    def _dispatched(self, operation: Operation) -> Any:
        """PyTorch's own answer, but for operations whose kernels do otherwise than its rule says.

        The mean and the deviation of a layer norm on CPU have the weights' type, not the input's. Products of
        groups of rows take other types than bfloat16 too; products of matrices refuse operands of two types.

        Raises:
            RuntimeError: as PyTorch's kernels do.

        Source: aten/src/ATen/native/layer_norm.cpp (`layer_norm_cpu`: `param_scalar_type`),
        aten/src/ATen/native/GroupedMMUtils.h (`create_grouped_gemm_output_tensor`),
        aten/src/ATen/native/LinearAlgebra.cpp (`addmm_impl_cpu_`).
        """
        func, args = operation.func, operation.args
        if func is GROUPED_PRODUCT:
            return self._grouped_product(*args)
        types = [one.dtype for one in operation.given]
        if func in PRODUCTS and len({*types}) > 1:
            raise RuntimeError(f"the operands of {func} must have the same dtype, but are {types}")
        out: Any = self.mode.dispatch(func, operation.types, args, operation.kwargs)
        if func is not LAYER_NORM or args[0].device.type != "cpu" or args[2] is None:
            return out
        with self.mode:
            return out[0], *[statistic.to(args[2].dtype) for statistic in out[1:]]

    def _grouped_product(self, a: Tensor, b: Tensor, of_groups: Tensor | None = None, *_: Any) -> Tensor:
        """The products of rows with each group's matrix, or a matrix for each group of rows.

        Raises:
            RuntimeError: rows, or columns, that are not whole 16 bytes apart.
        """
        for one in (a, b):
            if max(one.stride()[-2:]) * one.itemsize % ALIGNMENT_BYTES:
                raise RuntimeError("strides should be multiple of 16 bytes")
        groups = b.shape[:1] if of_groups is None else of_groups.shape
        with self.mode:
            return a.new_empty((*(groups if a.dim() == b.dim() else ()), a.shape[-2], b.shape[-1]))

    def _made(self, part: _Result | int | None, given: Sequence[Tensor]) -> Any:
        if not isinstance(part, _Result):
            return part
        if part.argument is not None and part.is_argument:
            return given[part.argument]
        shape, stride, offset, dtype, device, conjugated = part.layout
        tensor = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        if part.argument is not None:
            tensor.set_(given[part.argument].untyped_storage(), offset, shape, stride)
        if conjugated:
            torch._C._set_conj(tensor, True)
        return self.without_data(tensor, device)

    def without_data(self, tensor: Tensor, device: torch.device) -> FakeTensor:
        """`FakeTensor(self.mode, tensor, device)` in a quarter of its time: only these two tell them apart.

        Source: torch/_subclasses/fake_tensor.py (`FakeTensor.__new__`).
        """
        if device not in self._common:
            like = FakeTensor(self.mode, torch.empty((), device="meta"), device)
            self._common[device] = dict(vars(like))
        told = device.type != "cuda"
        made: FakeTensor = MAKE(
            FakeTensor, tensor, False, dispatch_device=told, device_for_backend_keys=device
        )
        torch._C._set_throw_on_mutable_data_ptr(made)
        vars(made).update(self._common[device])
        return made


def _key(values: Any, given: list[Tensor]) -> Hashable:
    """Values as far as a result's layout depends on them; their tensors are added to `given`."""
    if isinstance(values, dict):
        return tuple(values), _key(values.values(), given)
    key: list[Hashable] = []
    for value in values:
        if isinstance(value, FakeTensor):
            given.append(value)
            key.append(layout_of(value))
        elif isinstance(value, tuple | list | dict):
            key.append(_key(value, given))
        else:
            if isinstance(value, Tensor):
                given.append(value)
            key.append((type(value), value))
    return tuple(key)


def _described(out: Any, given: Sequence[Tensor]) -> _Results | None:
    """The results of an operation; None if it is not enough to know their layouts."""
    container = list if isinstance(out, list) else tuple if isinstance(out, tuple) else None
    results = [*tensors(out)] if container is None else out
    parts = [one if one is None or type(one) is int else _part(one, given) for one in results]
    known = all(part is not None or one is None for part, one in zip(parts, results, strict=True))
    return _Results(tuple(parts), container) if known else None


def _part(result: Any, given: Sequence[Tensor]) -> _Result | None:
    if not isinstance(result, FakeTensor) or result.layout != torch.strided or result.is_neg():
        return None
    storage = result.untyped_storage()._cdata
    for place, argument in enumerate(given):
        if argument is result:
            return _Result(layout_of(result), place, is_argument=True)
    sharing = [place for place, argument in enumerate(given) if argument.untyped_storage()._cdata == storage]
    if len(sharing) > 1 or (not sharing and result.storage_offset()):
        return None
    return _Result(layout_of(result), sharing[0] if sharing else None, is_argument=False)
