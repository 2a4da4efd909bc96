"""Predictions beside measurements."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from memplan.plots.style import (
    BELOW,
    MEASURED,
    MUTED,
    OUTSIDE,
    WIDTH_IN,
    WITHIN,
    checked_some,
    heading,
    plain,
)
from memplan.units import binary_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def predicted_beside_measured(records: Iterable[Mapping[str, Any]], tolerance: float = 0.01) -> "Figure":
    """Measured and predicted peak of every case that ran, and the signed error beside the tolerance.

    A record is an object of `python -m validate`, with `case`, `outcome`, `predicted` and `measured`; of each
    case the peak of the fullest rank is shown, and the error of the rank whose prediction is farthest off.
    """
    every = list(records)
    pairs = [_pair(r) for r in every if r.get("outcome") == "ok" and r.get("predicted") and r.get("measured")]
    checked_some("records that ran and were predicted", pairs)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_IN, 2.2 + 0.2 * len(pairs)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[1.5, 1])
    plain(left)
    plain(right)
    rows = range(len(pairs))
    unit, name = binary_unit(max(pair.measured_bytes for pair in pairs))
    left.barh(rows, [p.measured_bytes / unit for p in pairs], height=0.7, color=MEASURED,
              label="measured")  # fmt: skip
    left.plot([p.predicted_bytes / unit for p in pairs], rows, linestyle="", marker="|", markersize=9,
              markeredgewidth=2, color="black", label="predicted")  # fmt: skip
    left.set_yticks(rows, [p.name for p in pairs], fontsize=8)
    left.set_ylim(len(pairs) - 0.4, -0.6)
    left.set_xlabel(f"peak of the fullest rank ({name})")
    n_more = len(every) - len(pairs)
    left_out = f"{n_more} more cases have no run or no prediction" if n_more else ""
    _draw_errors(right, pairs, 100 * tolerance)
    heading(figure, _verdict(pairs, tolerance), left_out)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], ncols=2, **BELOW)
    return figure


class _Pair(NamedTuple):
    """A case's fullest rank; of the rank farthest off prediction / measurement - 1, and the difference."""

    name: str
    predicted_bytes: int
    measured_bytes: int
    error: float
    off_bytes: int


def _pair(record: Mapping[str, Any]) -> _Pair:
    ranks = zip(record["predicted"]["ranks"], record["measured"]["ranks"], strict=True)
    peaks = [(ahead["peak_bytes"], seen["peak_bytes"]) for ahead, seen in ranks]
    fullest = max(peaks, key=lambda pair: pair[1])
    worst = max(peaks, key=lambda pair: abs(pair[0] / pair[1] - 1))
    return _Pair(record["case"]["name"], *fullest, worst[0] / worst[1] - 1, worst[0] - worst[1])


def _verdict(pairs: Sequence[_Pair], tolerance: float) -> str:
    worst = max((pair.error for pair in pairs), key=abs)
    within = sum(abs(pair.error) <= tolerance for pair in pairs)
    head = f"{within} of {len(pairs)} peaks predicted within {100 * tolerance:g} % of the measured one"
    return f"{head}, the worst {100 * worst:+.2g} %"


def _draw_errors(axes: "Axes", pairs: Sequence[_Pair], tolerance: float) -> None:
    percents = [100 * pair.error for pair in pairs]
    rows = range(len(percents))
    axes.axvspan(-tolerance, tolerance, color="0.92", linewidth=0, zorder=0)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.hlines(rows, 0, percents, color=MUTED, linewidth=1)
    colors = [WITHIN if abs(percent) <= tolerance else OUTSIDE for percent in percents]
    axes.scatter(percents, rows, c=colors, s=22, zorder=3)
    reach = 1.4 * max(tolerance, *map(abs, percents))
    axes.set_xlim(-reach, reach)
    beside: dict[str, Any] = {"fontsize": 8, "color": MUTED}
    for y, pair in enumerate(pairs):
        text = f"{pair.off_bytes:+,} B" if pair.off_bytes else "exact"
        axes.text(1.02, y, text, va="center", transform=axes.get_yaxis_transform(), **beside)
    axes.text(1.02, 1, "farthest\nrank off by", va="bottom", transform=axes.transAxes, **beside)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(f"prediction / measurement - 1 (%)\nshaded: within {tolerance:g} %")
    axes.tick_params(axis="y", length=0)
