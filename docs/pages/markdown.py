"""Tables and words as Markdown."""

import re
from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[object]], right: str = "") -> str:
    """A Markdown table; `right`: the columns of numbers, by their places."""
    lines = [list(map(str, row)) for row in rows]
    rules = ["--:" if str(i) in right else "---" for i in range(len(head))]
    cells = [list(head), rules, *([_cell(text) for text in line] for line in lines)]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ") or "-"


def code(value: object) -> str:
    """A value as Markdown's code."""
    return f"`{value}`"


def plain(text: str) -> str:
    """A text of the package in Markdown: what stands in backticks stays, other marks lose their meaning."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(
        part if part.startswith("`") else re.sub(r"([*_<>\[\]|$~])", r"\\\1", part) for part in parts
    )


def rounded(value: float | None, unit: float, digits: int) -> str:
    """A figure in a unit, or nothing."""
    return "-" if value is None else f"{value / unit:,.{digits}f}"
