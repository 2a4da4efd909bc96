"""Checks of the shapes that operations are given."""

from memplan.errors import InvalidValue, divisors_text
from memplan.shapes import Shape
from memplan.tape import Tensor


def dims(x: Tensor, operation: str, *names: str) -> Shape:
    """The shape of `x`, which must have one dim for each name.

    Raises:
        InvalidValue: for another number of dims.
    """
    if len(x.shape) != len(names):
        raise InvalidValue(
            f"{operation} of a tensor of shape {x.shape} has no rule; use the shape ({', '.join(names)})."
        )
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
