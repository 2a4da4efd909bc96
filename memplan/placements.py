"""Placements of tensors along axes of the mesh, as DTensor's, and the collectives that change them.

Source: `torch.distributed.tensor.placement_types`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, final

from memplan.errors import MissingRule


@final
@dataclass(frozen=True, slots=True)
class Shard:
    """Each rank has an equal chunk along a dim."""

    dim: int


@final
@dataclass(frozen=True, slots=True)
class Replicate:
    """Each rank has the whole tensor."""


@final
@dataclass(frozen=True, slots=True)
class Partial:
    """Each rank has a term of the sum."""


Placement = Shard | Replicate | Partial

Placements = Mapping[str, Placement]
"""The placement by mesh axis; empty for a plain tensor, which is no DTensor."""


def local_shape(shape: tuple[int, ...], placements: Placements, mesh: Mapping[str, int]) -> tuple[int, ...]:
    """The local shape of a tensor on a mesh of these sizes, which divide it evenly.

    >>> local_shape((8, 6), {"tp": Shard(0)}, {"tp": 4}), local_shape((8, 6), {"tp": Partial()}, {"tp": 4})
    ((2, 6), (8, 6))
    """
    local = list(shape)
    for axis, placement in placements.items():
        if isinstance(placement, Shard):
            local[placement.dim] //= mesh[axis]
    return tuple(local)


def collective_of(
    source: Placement, target: Placement
) -> Literal["all_reduce", "reduce_scatter", "all_gather"] | None:
    """The collective that changes one placement to another; None if the change is local.

    Source: `torch.distributed.tensor._redistribute:redistribute_local_tensor`.

    >>> collective_of(Shard(1), Replicate()), collective_of(Partial(), Shard(1))
    ('all_gather', 'reduce_scatter')
    >>> collective_of(Replicate(), Shard(0)) is None
    True

    Raises:
        MissingRule: for a change that no rule of an operation needs.
    """
    match source, target:
        case Partial(), Replicate():
            return "all_reduce"
        case Partial(), Shard():
            return "reduce_scatter"
        case Shard(), Replicate():
            return "all_gather"
        case (Replicate(), Shard()) | (Replicate(), Replicate()):
            return None
        case _ if source == target:
            return None
    raise MissingRule(f"no rule states what a change from {source} to {target} sends.")
