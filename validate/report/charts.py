"""The report's charts, as SVG to put into a page."""

import io
from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import quote

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from memplan.plots.style import MUTED, OUTSIDE, WITHIN, heading, plain
from validate.records import PEAK_TOLERANCE, Record
from validate.report.figures import byte_ticks

SIZE_IN: Final = (5.6, 3.6)
LEAST_ERROR: Final = 1e-9
"""Errors smaller than that, and errors of 0, are drawn there."""


def predicted_against_measured(records: Sequence[Record]) -> str:
    """Each case's peak of its fullest rank; every point links to its case."""
    figure, axes = _axes("Predicted against measured peak")
    pairs = np.array([record.fullest_peaks for record in records], dtype=float)
    reach = np.array([0.8 * pairs.min(), 1.25 * pairs.max()])
    axes.plot(reach, reach, color="0.75", linewidth=1, zorder=1)
    points = axes.scatter(pairs[:, 1], pairs[:, 0], s=22, alpha=0.75, linewidth=0, zorder=2,
                          c=[_color(record) for record in records])  # fmt: skip
    points.set_urls(["#case=" + quote(str(record.case["name"])) for record in records])
    axes.set(xscale="log", yscale="log", xlabel="measured", ylabel="predicted", xlim=reach, ylim=reach)
    byte_ticks(axes, reach)
    return _svg(figure, "points")


def error_histogram(records: Sequence[Record]) -> str:
    """How many cases have which error, on a logarithmic axis; errors of 0 at its left end."""
    figure, axes = _axes("Error of the predicted peak")
    errors = np.maximum([abs(record.peak_error or 0.0) for record in records], LEAST_ERROR)
    first, last = np.floor(np.log10(errors.min())), max(-1.0, np.ceil(np.log10(errors.max())))
    edges = np.logspace(first, last, 1 + 3 * int(last - first))
    for some, color in (
        (errors[errors <= PEAK_TOLERANCE], WITHIN),
        (errors[errors > PEAK_TOLERANCE], OUTSIDE),
    ):
        axes.hist(100 * some, 100 * edges, color=color, edgecolor="white", linewidth=0.8)
    for value, text in ((100 * float(np.median(errors)), "median"), (100 * PEAK_TOLERANCE, "tolerance")):
        axes.axvline(value, color="black", linewidth=1, linestyle=(0, (4, 3)))
        axes.text(value, 1.01, f"{text} {_written(value)} %", transform=axes.get_xaxis_transform(),
                  ha="center", fontsize=9, color=MUTED)  # fmt: skip
    axes.set(xscale="log", xlabel="|predicted / measured - 1| (%)", ylabel="cases")
    axes.xaxis.set_major_formatter(lambda value, _: _written(value))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.get_major_locator().set_params(integer=True)
    return _svg(figure, "histogram")


def _written(value: float) -> str:
    """A number of two digits without an exponent.

    >>> _written(1e-5), _written(12.0)
    ('0.00001', '12')
    """
    return str(np.format_float_positional(value, precision=2, fractional=False, trim="-"))


def _color(record: Record) -> str:
    return WITHIN if abs(record.peak_error or 0.0) <= PEAK_TOLERANCE else OUTSIDE


def _axes(title: str) -> tuple[Figure, Any]:
    figure = Figure(figsize=SIZE_IN, layout="constrained")
    axes = figure.add_subplot()
    heading(figure, title)
    plain(axes)
    return figure, axes


def _svg(figure: Figure, name: str) -> str:
    """The figure as an element; `name` keeps its identifiers apart from another's on the same page."""
    file = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.family": "sans-serif"}):
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    return text[text.index("<svg") :]
