"""One number for each of many plans, in the place of an integer: the same code works out all of them at once.

Code that takes counts and bytes adds, multiplies and divides them, and now and then asks which is larger.
Arithmetic goes through an array element by element. A question is answered where the answer is the same for
all; where it is not, `Differ` says for which it is, and whoever put the numbers together takes them apart.
"""

from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Differ(Exception):
    """A question whose answer is yes for some of many and no for others: `yes` says for which."""

    def __init__(self, yes: NDArray[np.bool_]) -> None:
        super().__init__(f"yes for {np.count_nonzero(yes)} of {yes.size}")
        self.yes = yes


class Many(np.ndarray[Any, np.dtype[Any]]):
    """An array of integers that stands for one; it is never changed in place. Equal ones have the same hash.

    >>> n = many([2, 3, 4])
    >>> 5 * n // 2, n > 1 and "each"
    (Many([ 5,  7, 10]), 'each')
    >>> max(n, 3)
    Traceback (most recent call last):
    memplan.many.Differ: yes for 1 of 3
    """

    def __bool__(self) -> bool:
        n = np.count_nonzero(self)
        if 0 < n < self.size:
            raise Differ(np.asarray(self) != 0)
        return bool(n)

    def __index__(self) -> int:
        first = self.flat[0]
        if not bool(self == first):
            raise Differ(np.asarray(self) == first)
        return int(first)

    __int__ = __index__

    @property
    def content(self) -> bytes:
        """What equal ones of the same shape have in common: quicker to compare than they are."""
        if self._content is None:
            self._content = str(self.shape).encode() + self.tobytes()
        return self._content

    _content: bytes | None = None

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(self.content)

    __iadd__: Any = np.ndarray.__add__
    __isub__: Any = np.ndarray.__sub__
    __imul__: Any = np.ndarray.__mul__
    __ifloordiv__: Any = np.ndarray.__floordiv__


def many(numbers: Any) -> Any:
    """Numbers in the place of one: typed as whatever the place wants."""
    return np.asarray(numbers, dtype=np.int64).view(Many)


def plain(n: int) -> int:
    """A number that is the same for all plans as a plain one, which is quicker; another as it is.

    >>> plain(many([3, 3])), plain(many([3, 4]))
    (3, Many([3, 4]))
    """
    return int(n.flat[0]) if isinstance(n, Many) and (n == n.flat[0]).all() else n


def anywhere(n: int) -> bool:
    """Whether a number is not 0, for one plan at least if it is `Many`.

    >>> anywhere(0), anywhere(many([0, 2]))
    (False, True)
    """
    return bool(np.any(n)) if isinstance(n, Many) else n != 0


def larger(a: int, b: int) -> int:
    """The larger of two numbers, for each plan its own where one is `Many`.

    >>> larger(3, 2), larger(3, many([2, 4]))
    (3, Many([3, 4]))
    """
    if type(a) is int and type(b) is int:
        return a if a >= b else b
    return np.maximum(a, b)  # type: ignore[no-any-return]


def largest(numbers: Sequence[int]) -> int:
    """The largest of numbers, for each plan its own where they are `Many` in a row.

    >>> largest([1, 3, 2])
    3
    >>> largest(many([[5, 1], [2, 7]]))
    Many([5, 7])
    """
    return np.maximum.reduce(numbers) if isinstance(numbers, Many) else max(numbers)


def running(numbers: Sequence[int], signs: Sequence[int]) -> Sequence[int]:
    """The sums of the first one, two, ... of numbers with such signs: `Many` of one shape, or none of them.

    >>> running([3, 4, 5], [1, -1, 1]), running([many([3, 4]), many([1, 1])], [1, -1])
    ([3, -1, 4], Many([[3, 4],
          [2, 3]]))
    """
    if type(numbers[-1]) is int:
        return list(accumulate(map(mul, numbers, signs)))
    stack = np.array(numbers, np.int64)
    sums: Any = np.cumsum(stack * np.reshape(signs, (-1, *[1] * (stack.ndim - 1))), axis=0).view(Many)
    return sums  # type: ignore[no-any-return]
