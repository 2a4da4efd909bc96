"""Placements of tensors along axes of the mesh, as DTensor's.

Source: `torch.distributed.tensor.placement_types`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, final


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
"""The placement by mesh axis. A parameter without any is a plain tensor, which is no DTensor; an activation
is replicated over the axes that it does not name.
"""

WHOLE: Final[Placements] = {}
"""An activation that every rank has as a whole."""


def local_shape(shape: tuple[int, ...], placements: Placements, mesh: Mapping[str, int]) -> tuple[int, ...]:
    """The local shape of a tensor on the first ranks of a mesh of these sizes, which have the largest chunks.

    >>> local_shape((8, 6), {"tp": Shard(0)}, {"tp": 4}), local_shape((8, 6), {"tp": Partial()}, {"tp": 4})
    ((2, 6), (8, 6))
    """
    local = list(shape)
    for axis, placement in placements.items():
        if isinstance(placement, Shard):
            local[placement.dim] = -(-local[placement.dim] // mesh[axis])
    return tuple(local)


def changed(placements: Placements, axis: str, placement: Placement) -> Placements:
    """An activation's placements after a change over one axis.

    >>> changed({"tp": Partial()}, "tp", Shard(1)), changed({"tp": Partial()}, "tp", Replicate())
    ({'tp': Shard(dim=1)}, {})
    """
    placed = {**placements, axis: placement}
    if isinstance(placement, Replicate):
        del placed[axis]
    return placed


def shown(placements: Placements) -> str:
    """An activation's placements as text.

    >>> shown({"tp": Shard(1)}), shown({})
    ('Shard(dim=1) over tp', 'Replicate()')
    """
    return " and ".join([f"{each} over {axis}" for axis, each in placements.items()]) or str(Replicate())
