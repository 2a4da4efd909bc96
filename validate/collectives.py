"""Collectives counted at the dispatcher: kind, mesh axis, calls, operand bytes."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from memplan.tracing.collectives import is_permutation

COUNTED: dict[str, tuple[str, str]] = {
    "c10d::allreduce_": ("all_reduce", "tensors"),
    "c10d::allreduce_coalesced_": ("all_reduce", "tensors"),
    "c10d::_allgather_base_": ("all_gather", "output_tensor"),
    "c10d::allgather_": ("all_gather", "output_tensors"),
    "c10d::allgather_coalesced_": ("all_gather", "output_lists"),
    "c10d::allgather_into_tensor_coalesced_": ("all_gather", "outputs"),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", "input_tensor"),
    "c10d::reduce_scatter_": ("reduce_scatter", "input_tensors"),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter", "inputs"),
    "c10d::broadcast_": ("broadcast", "tensors"),
    "c10d::reduce_": ("reduce", "tensors"),
    "c10d::alltoall_": ("all_to_all", "input_tensors"),
    "c10d::alltoall_base_": ("all_to_all", "input"),
    "c10d::send": ("send", "tensors"),
    "c10d::recv_": ("recv", "tensors"),
    "_c10d_functional::all_reduce": ("all_reduce", "input"),
    "_c10d_functional::all_reduce_": ("all_reduce", "input"),
    "_c10d_functional::all_reduce_coalesced": ("all_reduce", "inputs"),
    "_c10d_functional::all_reduce_coalesced_": ("all_reduce", "inputs"),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", "return"),
    "_c10d_functional::all_gather_into_tensor_out": ("all_gather", "out"),
    "_c10d_functional::all_gather_into_tensor_coalesced": ("all_gather", "return"),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", "input"),
    "_c10d_functional::reduce_scatter_tensor_out": ("reduce_scatter", "input"),
    "_c10d_functional::reduce_scatter_tensor_coalesced": ("reduce_scatter", "inputs"),
    "_c10d_functional::broadcast": ("broadcast", "input"),
    "_c10d_functional::broadcast_": ("broadcast", "input"),
    "_c10d_functional::all_to_all_single": ("all_to_all", "input"),
    "_dtensor::shard_dim_alltoall": ("all_to_all", "input"),
    "deepspeed::dim_zero_all_to_all": ("all_to_all", "input"),
}
"""Operator to (kind, the argument whose bytes are the payload): the full tensor of a gather or a scatter."""

SILENT = frozenset(
    {"_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd", "c10d::barrier"}
)
"""Operators that move no operand."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Collective:
    """All calls of one kind over one mesh axis: `payload_bytes` is their sum."""

    kind: str
    axis: str
    calls: int
    payload_bytes: int


class CollectiveCounter(TorchDispatchMode):
    """Counts every collective issued while it is active; a coalesced call counts once, with all its bytes."""

    supports_higher_order_operators = True

    def __init__(self, axis_of_group: Mapping[str, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._axis_of_group = axis_of_group
        self._calls: Counter[tuple[str, str]] = Counter()
        self._payload_bytes: Counter[tuple[str, str]] = Counter()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here; making sure of that at each operation would take longer than it."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(map(is_traceable_wrapper_subclass_type, types)):  # what is inside is sent
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if isinstance(func, HigherOrderOperator):  # compiled code calls an operation by it
            return result
        name = func._schema.name
        sends = name.split("::")[0] in ("c10d", "_c10d_functional") or name in COUNTED
        if sends and name not in SILENT:
            self._count(name, _named_arguments(func, args, kwargs or {}, result))
        return result

    def _count(self, name: str, arguments: dict[str, Any]) -> None:
        if name not in COUNTED:
            raise NotImplementedError(f"no rule counts the collective {name}")
        kind, operand = COUNTED[name]
        if kind == "all_to_all" and is_permutation(arguments.get("input_split_sizes", ())):
            kind = "permute"
        key = kind, self._axis_of_group[_group_name(arguments)]
        self._calls[key] += 1
        self._payload_bytes[key] += _n_bytes(arguments[operand])

    def collectives(self) -> tuple[Collective, ...]:
        """The counted collectives, sorted by kind and axis."""
        return tuple(
            Collective(kind=kind, axis=axis, calls=calls, payload_bytes=self._payload_bytes[kind, axis])
            for (kind, axis), calls in sorted(self._calls.items())
        )


def axis_of_group(*meshes: DeviceMesh | None) -> dict[str, str]:
    """The mesh axis of each process group, by the group's name; the group of all ranks is `world`.

    A group that has several names has the last one: see `validate.predict.axis_of`.
    """
    names: dict[str, str] = {}
    if dist.is_initialized() and dist.group.WORLD is not None:
        names[str(dist.group.WORLD.group_name)] = "world"
    for mesh in filter(None, meshes):
        for axis in mesh.mesh_dim_names or ():
            if mesh[axis].size() > 1:
                names[str(mesh.get_group(axis).group_name)] = axis
    return names


def _named_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> dict[str, Any]:
    names = [argument.name for argument in func._schema.arguments]
    return dict(zip(names, args, strict=False)) | kwargs | {"return": result}


def _group_name(arguments: dict[str, Any]) -> str:
    if "group_name" in arguments:
        group = arguments["group_name"]
        return str(group if isinstance(group, str) else group.group_name)
    return str(dist.ProcessGroup.unbox(arguments["process_group"]).group_name)


def _n_bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    return sum(map(_n_bytes, value))
