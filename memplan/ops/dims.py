"""Checks of the shapes and placements that operations are given."""

from collections.abc import Sequence
from typing import Final

from memplan.errors import InvalidValue, divisors_text
from memplan.placements import WHOLE, Placements, Shard
from memplan.shapes import Shape
from memplan.tape import Tensor

BY_TOKEN: Final[Sequence[Placements]] = (WHOLE, {"tp": Shard(1)})
"""Every rank has all features of its tokens, of a (batch, seq, ...)."""

BY_FEATURE: Final[Sequence[Placements]] = (WHOLE, {"tp": Shard(2)})
"""Every rank has some features of all tokens, of a (batch, seq, features) or (batch, seq, heads, d_head)."""


def dims(x: Tensor, operation: str, *names: str, allowed: Sequence[Placements] = (WHOLE,)) -> Shape:
    """The shape of `x`, which must have one dim for each name, and one of the allowed placements.

    Raises:
        InvalidValue: for another number of dims.
        MissingRule: for other placements.
    """
    if len(x.shape) != len(names):
        raise InvalidValue(
            f"{operation} of a tensor of shape {x.shape} has no rule; use the shape ({', '.join(names)})."
        )
    x.check_placements(operation, *allowed)
    return x.shape


def divided(n: int, parts: int, what: str, by: str = "tp") -> int:
    """`n / parts`, which must be a whole number.

    >>> divided(12, 4, "n_out of attention.wq")
    3

    Raises:
        InvalidValue: where there is a remainder.
    """
    if n % parts:
        raise InvalidValue(
            f"{by}={parts} does not divide {what}={n}; use a multiple of {parts}, or for {by} one of "
            f"{divisors_text(n)}."
        )
    return n // parts
