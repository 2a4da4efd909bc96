"""Functions that take Python's numbers or NumPy arrays; only arrays need NumPy.

`namespace` returns the functions for its arguments, as `array_api_compat.array_namespace` does:

>>> m, n = 3, 4
>>> xp = namespace(m, n)
>>> xp.maximum(m, n)
4

So the estimate of one plan is arithmetic on Python's own numbers, and runs where there is no NumPy.
"""

import math
from operator import not_
from typing import Any, Final, final


@final
class Numbers:
    """NumPy's functions for Python's own numbers."""

    maximum = staticmethod(max)
    minimum = staticmethod(min)
    ceil = staticmethod(math.ceil)
    gcd = staticmethod(math.gcd)
    log = staticmethod(math.log)
    logical_not = staticmethod(not_)

    @staticmethod
    def where(condition: bool, x: Any, y: Any) -> Any:
        """One of two numbers."""
        return x if condition else y

    @staticmethod
    def interp(x: float, xp: Any, fp: Any) -> float:
        """The value at x on lines between points; beyond them that of the nearest.

        >>> Numbers.interp(3, [2, 4, 8], [10, 20, 30]), Numbers.interp(9, [2, 4], [10, 20])
        (15.0, 20.0)
        """
        if x <= xp[0]:
            return float(fp[0])
        for i, right in enumerate(xp):
            if x <= right:
                slope = (fp[i] - fp[i - 1]) / (right - xp[i - 1])
                return float(slope * (x - xp[i - 1]) + fp[i - 1])
        return float(fp[-1])


NUMBERS: Final = Numbers()


def namespace(*values: Any) -> Any:
    """`Numbers` if all values are Python's own numbers, else NumPy."""
    for value in values:
        if not isinstance(value, int | float):
            import numpy

            return numpy
    return NUMBERS


def as_floats(*values: Any) -> list[Any]:
    """The values in double precision: floats, or NumPy arrays of them.

    >>> as_floats(2, 0.5)
    [2.0, 0.5]
    """
    xp = namespace(*values)
    return [float(value) if xp is NUMBERS else xp.asarray(value, xp.float64) for value in values]
