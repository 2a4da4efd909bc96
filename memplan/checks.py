"""Checks of single values, shared by models, plans and clusters."""

from math import inf
from numbers import Real
from typing import Final

from memplan.errors import InvalidValue, shown_value, unknown_name

LARGEST: Final = 2**31 - 1
"""The largest count in a plan or a model; a larger one is taken for a mistake."""

LARGEST_BYTES: Final = 2**50
"""The largest capacity of a GPU, 1 PiB; a larger one is taken for a mistake."""

LARGEST_CLUSTER: Final = 2**20
"""The most GPUs of a cluster; more are taken for a mistake."""


def checked_count(name: str, value: object, *, least: int = 1, most: int = LARGEST) -> int:
    """`value` as an integer count within [least, most].

    Raises:
        InvalidValue: if it is not an integer (booleans and floats are not) or out of range.
    """
    if hasattr(value, "__index__") and not isinstance(value, bool):
        try:
            number = int(value.__index__())
        except TypeError:  # an array of several numbers has the method, and cannot answer it
            number = least - 1
        if least <= number <= most:
            return number
    raise InvalidValue(f"{name}={shown_value(value)} is not allowed; use an integer from {least} to {most}.")


def _float(value: object) -> float | None:
    """A number as a float; None for anything else, and for an integer that overflows a float."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def checked_fraction(name: str, value: object) -> float:
    """`value` as a float in [0, 1).

    Raises:
        InvalidValue: if it is not a number in that range (NaN is not).
    """
    number = _float(value)
    if number is not None and 0.0 <= number < 1.0:
        return number
    raise InvalidValue(
        f"{name}={shown_value(value)} is not allowed; use a number from 0 up to, not including, 1."
    )


def checked_share(name: str, value: object) -> float:
    """`value` as a float in (0, 1].

    Raises:
        InvalidValue: if it is not a number in that range (NaN is not).
    """
    number = _float(value)
    if number is not None and 0.0 < number <= 1.0:
        return number
    raise InvalidValue(f"{name}={shown_value(value)} is not allowed; use a number above 0, at most 1.")


def checked_positive(name: str, value: object) -> float:
    """`value` as a finite float above 0.

    Raises:
        InvalidValue: if it is not a number in that range (NaN, infinity and a float's overflow are not).
    """
    number = _float(value)
    if number is not None and 0.0 < number < inf:
        return number
    raise InvalidValue(f"{name}={shown_value(value)} is not allowed; use a finite number above 0.")


def checked_flag(name: str, value: object) -> bool:
    """`value` as a bool.

    Raises:
        InvalidValue: if it is anything else.
    """
    if isinstance(value, bool):
        return value
    raise InvalidValue(f"{name}={shown_value(value)} is not allowed; use True or False.")


def checked_choice(name: str, value: object, choices: tuple[str, ...]) -> str:
    """`value` as one of `choices`.

    Raises:
        UnknownName: with the nearest choice.
    """
    if isinstance(value, str) and value in choices:
        return value
    raise unknown_name(name, value, choices)


def divisors(n: int) -> tuple[int, ...]:
    """All divisors of a number, sorted.

    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return tuple(small + [n // d for d in reversed(small) if d * d != n])
