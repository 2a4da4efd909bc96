"""Units: capacities are binary (KiB to TiB), rates are decimal (TB/s, TFLOP/s)."""

from collections.abc import Iterable
from typing import Final

KiB: Final = 1024
MiB: Final = 1024**2
GiB: Final = 1024**3
TiB: Final = 1024**4

GB: Final = 10**9
TB: Final = 10**12

TFLOP: Final = 10**12


def binary_unit(n_bytes: float) -> tuple[int, str]:
    """The largest binary unit up to a byte count, and its name.

    >>> binary_unit(80 * GiB), binary_unit(17)
    ((1073741824, 'GiB'), (1, 'B'))
    """
    for unit, name in ((TiB, "TiB"), (GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB")):
        if abs(n_bytes) >= unit:
            return unit, name
    return 1, "B"


def table_unit(byte_counts: Iterable[int]) -> tuple[int, str]:
    """The one unit of a table of byte counts, and its name: the largest count's, and at most GiB.

    >>> table_unit([17, 3 * MiB]), table_unit([5 * TiB])
    ((1048576, 'MiB'), (1073741824, 'GiB'))
    """
    return binary_unit(min(max(byte_counts, default=0), TiB - 1))


def in_unit(n_bytes: int, unit: int) -> str:
    """A byte count in a table's unit; a few bytes are less than its last digit, and not 0.

    >>> in_unit(0, GiB), in_unit(17, GiB), in_unit(3 * TiB, GiB)
    ('0', '<0.01', '3,072.00')
    """
    if 0 < n_bytes < unit / 200:
        return "<0.01"
    number = n_bytes / unit
    return "0" if not n_bytes else f"{number:,.2f}" if number < 1e6 else f"{number:.2e}"


def human_bytes(n_bytes: float) -> str:
    """A byte count as text, in binary units.

    >>> human_bytes(1536), human_bytes(80 * GiB), human_bytes(-2048)
    ('1.50 KiB', '80.00 GiB', '-2.00 KiB')
    >>> human_bytes(17), human_bytes(10**30)
    ('17 B', '9.09e+17 TiB')
    """
    unit, name = binary_unit(n_bytes)
    return f"{scaled(n_bytes, unit, 0 if unit == 1 else 2)} {name}"


def time_unit(seconds: float) -> tuple[float, str]:
    """The largest of s, ms and us that is at most `seconds`, and its name.

    >>> time_unit(2.5), time_unit(0.02)
    ((1.0, 's'), (0.001, 'ms'))
    """
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return unit, name
    return 1e-6, "us"


def scaled(value: float, unit: float, digits: int) -> str:
    """A value in a unit as text; with an exponent if it has more than six digits before the point.

    >>> scaled(1536, KiB, 2), scaled(10**30, GiB, 2)
    ('1.50', '9.31e+20')
    """
    number = value / unit
    return f"{number:.{digits}f}" if abs(number) < 1e6 else f"{number:.2e}"
