"""Rows as text for a terminal of 80 columns, and as pandas frames for those who have pandas."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from memplan.errors import MemplanError

if TYPE_CHECKING:
    import pandas

WIDTH: Final = 80
"""Columns of a terminal; no line is longer."""


def frame(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> "pandas.DataFrame":
    """Rows as a frame with these columns.

    Raises:
        MemplanError: if pandas is not installed.
    """
    try:
        from pandas import DataFrame
    except ModuleNotFoundError:
        raise MemplanError("a frame needs pandas; install it with: pip install 'memplan[tables]'.") from None
    return DataFrame(rows, columns=list(columns))


def text_table(rows: Sequence[Sequence[str]], sides: str, *, flexible: int | None = None) -> str:
    """Rows of cells in columns two spaces apart, the first row their headings.

    `sides` has one of "<" and ">" per column. If the lines would be longer than `WIDTH`, the cells of the
    column `flexible` are cut.

    >>> print(text_table([("name", "bytes"), ("wq", "4096"), ("norm", "16")], "<>"))
    name  bytes
    wq     4096
    norm     16
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    too_wide = sum(widths) + 2 * (len(widths) - 1) - WIDTH
    if flexible is not None and too_wide > 0:
        widths[flexible] = max(4, widths[flexible] - too_wide)
    columns = list(zip(sides, widths, strict=True))
    return "\n".join(
        "  ".join(
            f"{cut(cell, width):{side}{width}}" for cell, (side, width) in zip(row, columns, strict=True)
        ).rstrip()
        for row in rows
    )


def cut(text: str, width: int) -> str:
    """`text` in at most `width` characters, its middle left out.

    >>> cut("gather weights", 20), cut("gather weights", 10)
    ('gather weights', 'gath..ghts')
    """
    half = (width - 2) // 2
    return text if len(text) <= width else f"{text[: width - 2 - half]}..{text[-half:]}"


def printable(text: str) -> str:
    r"""Text with whatever could move a terminal's cursor written as escapes.

    >>> print(printable("a\x1bb"))
    a\x1bb
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
