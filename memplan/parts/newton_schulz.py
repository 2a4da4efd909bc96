"""The products by which Muon makes a matrix orthogonal, in bfloat16."""

from collections.abc import Iterator, Sequence
from typing import Final

from memplan.record import Compute, ComputeKind, flops_of
from memplan.shapes import BF16, Shape

STEPS: Final = 5
"""Of each update of a matrix (`torch.optim._muon:DEFAULT_NS_STEPS`), by default."""


def newton_schulz_products(shape: Sequence[int]) -> Iterator[Compute]:
    """The three products of a step: with a <= b rows and columns (a, a), (a, a) and (a, b).

    FLOPs: 2 a a (a + 2 b).

    Source: `torch.optim._muon:_zeropower_via_newtonschulz`.

    >>> [one.flops for one in newton_schulz_products((3, 2))]
    [24, 16, 24]
    """
    a, b = sorted(shape)
    for m, k, n in ((a, b, a), (a, a, a), (a, a, b)):
        yield product_in_bfloat16((m, k), (k, n))


def product_in_bfloat16(left: Shape, right: Shape) -> Compute:
    """A product of two matrices in an update.

    >>> product_in_bfloat16((3, 2), (2, 5)).flops
    60
    """
    operands = (left, right)
    return Compute(
        kind=ComputeKind.MM,
        operands=operands,
        phase="update",
        flops=flops_of(ComputeKind.MM, operands),
        shape=(left[0], right[1]),
        dtype=BF16,
    )
