"""Rows as text for a terminal of 80 columns, and as pandas frames if pandas is installed.

Text that is too long for its line or its column continues below; nothing is cut.
"""

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Final

from memplan.errors import installed
from memplan.units import binary_unit, scaled

if TYPE_CHECKING:
    import pandas

WIDTH: Final = 80
"""Columns of a terminal; no line is longer."""

FORMULAS: Final = ("=", "+", "-", "@", "\t", "\r")
"""The characters with which a spreadsheet's formula may begin."""

LEAST_WIDTH: Final = 8
"""The least width of a column whose cells go on in further lines, unless every column must give way."""


def frame(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> "pandas.DataFrame":
    """Rows as a frame with these columns; whole numbers stay whole where others are missing (`Int64`).

    Raises:
        MissingPackage: pandas is not installed.
    """
    with installed("a frame", "tables"):
        from pandas import DataFrame
    found = DataFrame(rows, columns=list(columns))
    for name in columns:
        values = {type(row.get(name)) for row in rows}
        if values == {int, type(None)}:
            found[name] = found[name].astype("Int64")
    return found


def text_table(rows: Sequence[Sequence[str]], sides: str, *, flexible: Sequence[int] = ()) -> str:
    """Rows of cells in columns two spaces apart, the first row their headings.

    `sides` has one of "<" and ">" per column. If the lines would be longer than `WIDTH`, the cells of the
    columns `flexible` go on in further lines. If that is not enough, columns are one space apart; and if that
    is not either, the cells of every column go on in further lines.

    >>> print(text_table([("name", "bytes"), ("wq", "4096"), ("norm", "16")], "<>"))
    name  bytes
    wq     4096
    norm     16
    >>> print(text_table([("rule", "n"), ("tp=3 does not divide n_heads=32; " * 3, "1")], "<>", flexible=[0]))
    rule                                                                           n
    tp=3 does not divide n_heads=32; tp=3 does not divide n_heads=32; tp=3 does    1
    not divide n_heads=32;
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    gap, n_gaps = 2, len(widths) - 1
    if flexible and sum(widths) + gap * n_gaps > WIDTH:
        natural = widths
        widths = _narrowed(natural, WIDTH - gap * n_gaps, flexible, LEAST_WIDTH)
        if sum(widths) + gap * n_gaps > WIDTH:
            gap = 1
            widths = _narrowed(natural, WIDTH - gap * n_gaps, flexible, LEAST_WIDTH)
            widths = _narrowed(widths, WIDTH - gap * n_gaps, range(len(widths)), 1)
    columns = list(zip(sides, widths, strict=True))
    return "\n".join(
        (" " * gap)
        .join(f"{cell:{side}{width}}" for cell, (side, width) in zip(line, columns, strict=True))
        .rstrip()
        for row in rows
        for line in _lines(row, widths)
    )


def _narrowed(widths: Sequence[int], total: int, columns: Sequence[int], least: int) -> list[int]:
    """Widths that add up to `total` or, with the chosen columns at `least`, are as near as they can be.

    The widest of the chosen columns gives way first.

    >>> _narrowed([9, 30, 20], 45, [1, 2], 8), _narrowed([9, 30, 20], 20, [1, 2], 8)
    ([9, 18, 18], [9, 8, 8])
    """
    narrowed = list(widths)
    for _ in range(sum(widths) - total):
        widest = max(columns, key=lambda i: narrowed[i])
        if narrowed[widest] <= least:
            break
        narrowed[widest] -= 1
    return narrowed


def _lines(row: Sequence[str], widths: Sequence[int]) -> Iterator[tuple[str, ...]]:
    """A row's lines: cells that are too long continue in the lines below."""
    cells = [
        wrap(cell, width) if len(cell) > width else [cell] for cell, width in zip(row, widths, strict=True)
    ]
    return zip_longest(*cells, fillvalue="")


def wrapped(text: str, *, indent: str = "") -> str:
    """Text in lines of at most `WIDTH` characters; those after the first are indented.

    >>> text = "cluster  64xh100-sxm: 8 nodes of 8, InfiniBand NDR of 400 Gbit/s for each GPU"
    >>> print(wrapped(text, indent="   "))
    cluster  64xh100-sxm: 8 nodes of 8, InfiniBand NDR of 400 Gbit/s for each
       GPU
    """
    return "\n".join(wrap(text, WIDTH, subsequent_indent=indent, break_on_hyphens=False)) or text


def printable(text: str) -> str:
    r"""Text with whatever could move a terminal's cursor written as escapes.

    >>> print(printable("a\x1bb"))
    a\x1bb
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def margin_text(margin: float) -> str:
    """The margin for people.

    >>> margin_text(0.05), margin_text(0)
    ('less a margin of 5%', 'no margin')
    """
    return f"less a margin of {100 * margin:g}%" if margin else "no margin"


def interval_text(held: tuple[int, int]) -> str:
    """An interval of bytes, in the unit of its upper end.

    >>> interval_text((2**30, 3 * 2**30))
    '1.00 to 3.00 GiB'
    """
    unit, name = binary_unit(held[1])
    low, high = (scaled(n_bytes, unit, 0 if unit == 1 else 2) for n_bytes in held)
    return f"{low} to {high} {name}"


def html_text(text: str) -> str:
    """Text for a notebook, formatted as in a terminal.

    >>> html_text("a < b")
    '<pre>a &lt; b</pre>'
    """
    from html import escape  # slow to import, and rarely needed

    return f"<pre>{escape(text)}</pre>"


def csv_of(rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """Rows as CSV with a head; None is an empty cell, and a text that looks like a formula is quoted.

    >>> print(csv_of([{"case": "=1+1", "peak_error": -0.5}, {"case": None}], ["case", "peak_error"]))
    case,peak_error
    '=1+1,-0.5
    ,
    """
    import csv  # slow to import, and rarely needed

    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)
    return text.getvalue()


def _cell(value: Any) -> Any:
    """A text that a spreadsheet would take for a formula begins with an apostrophe: it is shown, not run."""
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULAS) else value
