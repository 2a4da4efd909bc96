"""The report as one HTML file: no network, every string escaped, nothing runs but its own script."""

import base64
import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any, Final

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from validate.records import PEAK_TOLERANCE, Record
from validate.report import charts
from validate.report.tables import axes_of, by_axis, frame, rows_of
from validate.report.text import attributed, details, floored, worst_first

FOLDER: Final = Path(__file__).parent

TITLE: Final = "memplan: predicted beside measured"

COLUMNS: Final = {
    "case": "case",
    "outcome": "outcome",
    "world_size": "ranks",
    "predicted_peak_bytes": "predicted bytes",
    "measured_peak_bytes": "measured bytes",
    "peak_error": "peak error",
    "attributed_fraction": "named",
    "states_off_bytes": "states off, bytes",
    "collectives_off": "collectives off",
    "loss_error": "loss error",
}
"""The table's columns: field and heading."""

TEXTS: Final = ("case", "outcome")
FILTERS: Final = ("outcome", "confirmed")
"""Fields beside the axes that cases can be filtered by."""

STRIP_WIDTH: Final = 96
STRIP_POWERS: Final = (-7, -1)
"""The powers of ten that a strip of errors reaches from and to; what is outside is drawn at its ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """One case as the page shows it."""

    record: Record
    facts: dict[str, Any]

    def cell(self, field: str) -> str:
        """The text of a column."""
        value = self.facts[field]
        if value is None:
            return ""
        if field == "attributed_fraction":
            return floored(value)
        if field.endswith("_error"):
            return f"{value:+.5%}" if field == "peak_error" else f"{value:.1e}"
        return f"{value:,}" if isinstance(value, int) else str(value)

    def order(self, field: str) -> str | float:
        """What a column is sorted by; errors by their size."""
        value = self.facts[field]
        if value is None:
            return ""
        return abs(value) if isinstance(value, int | float) else str(value)

    @property
    def reason(self) -> str:
        """Why it did not run."""
        return self.record.headline

    @property
    def details(self) -> str:
        """All of its ranks."""
        return details(self.record).partition("\n")[2].strip()


def is_page(head: bytes) -> bool:
    """Whether a file that begins so is such a page, or empty."""
    return not head or (head.startswith(b"<!doctype html>") and TITLE.encode() in head)


def html(records: Sequence[Record], *, sources: Sequence[str], n_superseded: int = 0) -> str:
    """The page of some records; `sources` names the files they come from."""
    environment = Environment(
        loader=FileSystemLoader(FOLDER), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    style, script = ((FOLDER / name).read_text() for name in ("page.css", "page.js"))
    table = frame(records)
    ran = worst_first(records)
    drawn = {
        charts.predicted_against_measured: [record for record in ran if record.fullest_peaks],
        charts.error_histogram: ran,
    }
    return environment.get_template("page.html.jinja").render(
        style=Markup(style),
        script=Markup(script),
        policy=_policy(script),
        title=TITLE,
        verdict=_verdict(records),
        tiles=_tiles(records, ran),
        charts=[Markup(draw(some)) for draw, some in drawn.items() if some],
        axes=_axes(table),
        filters={field: sorted(set(table.get(field, ())), key=str) for field in FILTERS} | axes_of(table),
        columns=COLUMNS,
        texts=TEXTS,
        rows=_rows(records),
        environments=_environments(records),
        sources=sources,
        n_superseded=n_superseded,
        tolerance=f"{PEAK_TOLERANCE:.0%}",
        tolerance_place=_place(PEAK_TOLERANCE),
        strip_width=STRIP_WIDTH,
    )


def _policy(script: str) -> str:
    """What the browser may do with the page: this script and this style, nothing from anywhere."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'"


def _verdict(records: Sequence[Record]) -> str:
    confirmed = sum(record.confirmed for record in records)
    refused = sum(record.outcome == "refused" for record in records)
    text = f"{confirmed} of {len(records) - refused} cases confirmed"
    return f"{text}, {refused} refused" if refused else text


def _tiles(records: Sequence[Record], ran: Sequence[Record]) -> dict[str, str]:
    """The figures at the head of the page."""
    outcomes = Counter(record.outcome for record in records)
    tiles = {"ran": f"{outcomes.pop('ok', 0)}"} | {outcome: str(n) for outcome, n in outcomes.most_common()}
    if ran:
        errors = [abs(record.peak_error or 0.0) for record in ran]
        tiles |= {"median peak error": f"{median(errors):.5%}", "worst peak error": f"{max(errors):.3%}"}
        exact = sum(record.states_off_bytes == 0 and record.collectives_off == 0 for record in ran)
        tiles["states and collectives exact"] = f"{exact} of {len(ran)}"
    if known := attributed(records):
        tiles["bytes at the peak named, at least"] = floored(known[0][0])
    return tiles


def _rows(records: Sequence[Record]) -> list[_Row]:
    """Worst first: what failed, then by the error of the peak, then what was refused."""
    found = zip(records, rows_of(frame(records)), strict=True)
    rows = [_Row(record=record, facts=facts) for record, facts in found]

    def goodness(row: _Row) -> tuple[int, float]:
        place = {"ok": 1, "refused": 2}.get(row.record.outcome, 0)
        return place, -abs(row.record.peak_error or 0.0)

    return sorted(rows, key=goodness)


@dataclass(frozen=True, slots=True, kw_only=True)
class _AxisValue:
    """One value of an axis: its figures, and its errors as places on a strip from 0 to 1."""

    value: Any
    cases: int
    median: str
    worst: str
    within: bool
    exact: str
    strip: list[float]


def _axes(table: pd.DataFrame) -> dict[str, list[_AxisValue]]:
    found = {}
    for axis, parts in groupby(rows_of(by_axis(table)), key=lambda part: part["axis"]):
        found[axis] = [
            _AxisValue(
                value=part["value"],
                cases=part["cases"],
                median=_percent(part["median_peak_error"]),
                worst=_percent(part["worst_peak_error"]),
                within=abs(part["worst_peak_error"] or 0.0) <= PEAK_TOLERANCE,
                exact=f"{part['exact']}/{part['ran']}",
                strip=[_place(error) for known, error in zip(table[axis], table["peak_error"], strict=True)
                       if known == part["value"] and error is not None],
            )
            for part in parts
        ]  # fmt: skip
    return found


def _percent(error: float | None) -> str:
    return "" if error is None else f"{error:.4%}"


def _place(error: float) -> float:
    first, last = STRIP_POWERS
    power = math.log10(abs(error)) if error else first
    return round(min(1.0, max(0.0, (power - first) / (last - first))), 3)


def _environments(records: Iterable[Record]) -> list[tuple[dict[str, Any], int]]:
    """What the cases ran with, and how many with each."""
    known = [tuple((record.environment or {}).items()) for record in records]
    return [(dict(items), n) for items, n in Counter(known).most_common()]
