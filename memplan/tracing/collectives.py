"""The collectives of a module that is divided over a mesh, on ranks that are played: nothing is sent."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from memplan.errors import MissingRule
from memplan.mesh import Group
from memplan.record import CollectiveKind
from memplan.tracing.shapes import dtype_name, tensors


class Sent(NamedTuple):
    """A collective over an axis of the mesh, with the shape and dtype of one tensor that it works on.

    For an all-gather this is the output, for any other collective the input.
    """

    kind: CollectiveKind
    axis: Group
    shape: tuple[int, ...]
    dtype: str


class Called(NamedTuple):
    """How an operation is called: the places of its process group and its full tensor (None: the result).

    `splits`: the place of the sizes of the parts that it sends, if it has them.
    """

    kind: CollectiveKind
    group: int
    operand: int | None = 0
    splits: int | None = None


FUNCTIONAL, IN_PLACE = torch.ops._c10d_functional, torch.ops.c10d

CALLS: Final[Mapping[Any, Called]] = {
    FUNCTIONAL.all_reduce.default: Called("all_reduce", 2),
    FUNCTIONAL.all_reduce_.default: Called("all_reduce", 2),
    FUNCTIONAL.all_gather_into_tensor.default: Called("all_gather", 2, None),
    FUNCTIONAL.reduce_scatter_tensor.default: Called("reduce_scatter", 3),
    FUNCTIONAL.all_to_all_single.default: Called("all_to_all", 3, splits=2),
    IN_PLACE.allreduce_.default: Called("all_reduce", 1),
    IN_PLACE._allgather_base_.default: Called("all_gather", 2),
    IN_PLACE._reduce_scatter_base_.default: Called("reduce_scatter", 2, 1),
    IN_PLACE.alltoall_base_.default: Called("all_to_all", 2, 1, splits=4),
}
"""The operations of which memplan knows what they send."""


def is_in_place(func: Any) -> bool:
    """Whether an operation is one of `torch.distributed`'s own, which writes into its arguments."""
    return bool(func.namespace == "c10d")


def exchanged(func: Any, args: Sequence[Any], results: Sequence[Tensor]) -> tuple[Tensor, Tensor] | None:
    """The tensors of whole numbers that an all-to-all receives and sends; None if it is none of such."""
    if func is IN_PLACE.alltoall_base_.default:
        received, sent = args[:2]
    elif func is FUNCTIONAL.all_to_all_single.default:
        received, sent = results[0], args[0]
    else:
        return None
    return None if sent.is_floating_point() else (received, sent)


def finished(func: Any, args: Sequence[Any]) -> Any:
    """What a collective of `torch.distributed` returns: the tensors that it writes, and a finished work."""
    work = torch._C._distributed_c10d.FakeWork().boxed()
    return work if func is IN_PLACE.alltoall_base_.default else (args[0], work)


def is_permutation(splits: Sequence[int]) -> bool:
    """Whether an all-to-all with parts of these sizes sends a rank's whole tensor to one other rank.

    Source: `torch.distributed._functional_collectives:permute_tensor`.
    """
    return sum(1 for n in splits if n) == 1 < len(splits)


def sent(func: Any, args: Sequence[Any], results: Sequence[Tensor], axes: Mapping[str, Group]) -> Sent | None:
    """What an operation sends; None if it is no collective. `axes`: by the name of the process group.

    Raises:
        MissingRule: a collective that memplan does not know, or over other ranks than an axis of the mesh.
    """
    if func not in CALLS:
        if func.namespace not in ("c10d", "_c10d_functional"):
            return None
        raise MissingRule(
            f"{func} has no rule: memplan does not know what it sends; trace a module without it.",
            kind="a traced module with a collective that has no rule",
        )
    kind, at, operand, splits = CALLS[func]
    group = args[at]
    name = group if isinstance(group, str) else dist.ProcessGroup.unbox(group).group_name
    if name not in axes:
        raise MissingRule(
            f"{func} runs over ranks that are no axis of the mesh; use one of its axes.",
            kind="a traced module with a collective over no axis of the mesh",
        )
    (full, *_) = tensors(results if operand is None else args[operand])
    if splits is not None and is_permutation(args[splits]):
        kind = "permute"
    return Sent(kind, axes[name], tuple(full.shape), dtype_name(full.dtype))
