"""Charts of predictions beside measurements, as figures for notebooks."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from memplan.plots.search import LINES
from memplan.plots.style import MUTED, OUTSIDE, WIDTH_IN, WITHIN, checked_some, heading, plain
from memplan.units import GiB, KiB, MiB, TiB, human_bytes
from validate.records import PEAK_TOLERANCE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Peaks = tuple[int, int]
"""What was predicted and what was measured, in bytes."""

WIDE: Final = 256
"""From that ratio of the largest to the smallest peak on errors are drawn by their logarithm."""

MOST_TICKS: Final = 8
"""The most ticks of an axis of bytes."""

LEAST: Final = 1e-7
"""Where errors of 0 are drawn."""

FINEST: Final = 1e-5
"""Errors are drawn to scale up to that one, and by their logarithm beyond."""


def predicted_against_measured(
    groups: Mapping[str, Sequence[Peaks]], tolerance: float = PEAK_TOLERANCE
) -> "Figure":
    """Predicted against measured peaks, and below the signed error of each with the tolerance shaded.

    `groups`: the kinds of truth, or the sources, each with its pairs.
    """
    from matplotlib.figure import Figure

    every = [pair for pairs in groups.values() for pair in pairs]
    checked_some("pairs of prediction and measurement", every)
    figure = Figure(figsize=(WIDTH_IN, 7.4), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[1.5, 1])
    for (name, pairs), (color, marker) in zip(groups.items(), cycle(LINES), strict=False):
        predicted, measured = np.array(pairs, dtype=float).reshape(-1, 2).T
        style: dict[str, Any] = {"color": color, "marker": marker, "s": 20, "alpha": 0.55, "linewidth": 0}
        above.scatter(measured, predicted, label=f"{name} ({len(pairs):,})", **style)
        below.scatter(measured, 100 * (predicted / measured - 1), **style)
    reach = np.array([0.6 * min(map(min, every)), 1.6 * max(map(max, every))])
    above.plot(reach, reach, color="black", linewidth=0.8, zorder=0)
    above.set(xscale="log", yscale="log", xlim=reach, ylim=reach, ylabel="predicted peak")
    wide = reach[1] / reach[0] > WIDE
    below.axhspan(-100 * tolerance, 100 * tolerance, color="0.92", linewidth=0, zorder=0)
    below.axhline(0, color="black", linewidth=0.8, zorder=0)
    below.set(xlabel="measured peak", ylabel=f"error (%)\nshaded: within {100 * tolerance:g} %")
    byte_ticks(above, reach)
    if wide:
        below.set_yscale("symlog", linthresh=100 * FINEST)
        _percent_ticks(below, max(abs(ahead / seen - 1) for ahead, seen in every))
    within = sum(abs(ahead / seen - 1) <= tolerance for ahead, seen in every)
    title = f"{within:,} of {len(every):,} peaks predicted within {tolerance:.0%}"
    heading(figure, title)
    above.legend(loc="upper left", frameon=False, fontsize=9)
    for axes in (above, below):
        plain(axes)
    return figure


def byte_ticks(axes: "Axes", reach: Any) -> None:
    """Ticks in binary units on both axes: powers of 2 equally far apart, or three places between two."""
    units = {"KiB": KiB, "MiB": MiB, "GiB": GiB, "TiB": TiB}
    powers = {n * size: f"{n} {name}" for name, size in units.items() for n in (2**i for i in range(10))}
    shown = [place for place in powers if reach[0] <= place <= reach[1]]
    chosen = shown[:: -(-len(shown) // MOST_TICKS) or 1]
    if len(chosen) < 2:
        chosen = [int(place) for place in np.geomspace(reach[0], reach[1], 5)[1:-1]]
    texts = [powers.get(place, human_bytes(place)) for place in chosen]
    axes.set_xticks(chosen, texts)
    axes.set_yticks(chosen, texts)
    axes.minorticks_off()


def _percent_ticks(axes: "Axes", worst: float) -> None:
    """Ticks at powers of a hundred of percents, both signs, as far as there are errors."""
    powers = [10.0**i for i in (-2, 0, 2, 4) if 10.0**i <= max(1.0, 1000 * worst)]
    ticks = [-p for p in reversed(powers)] + [0.0] + powers
    axes.set_yticks(ticks, [f"{tick:+g}" if tick else "0" for tick in ticks], fontsize=8)
    axes.set_ylim(-2 * max(1.0, 100 * worst), 2 * max(1.0, 100 * worst))


def errors_by(groups: Mapping[str, Sequence[float]], tolerance: float = PEAK_TOLERANCE) -> "Figure":
    """The absolute errors of each group, a row for each: every case a dot, the median a line.

    Errors of 0 are drawn at the left end.
    """
    from matplotlib.figure import Figure

    known = {name: np.abs(np.array(errors, dtype=float)) for name, errors in groups.items() if len(errors)}
    checked_some("errors", known)
    figure = Figure(figsize=(WIDTH_IN, 1.4 + 0.3 * len(known)), layout="constrained")
    axes = figure.add_subplot()
    rng = np.random.default_rng(0)
    for y, errors in enumerate(known.values()):
        places = 100 * np.maximum(errors, LEAST)
        jitter = y + rng.uniform(-0.28, 0.28, len(errors))
        colors = np.where(errors <= tolerance, WITHIN, OUTSIDE)
        axes.scatter(places, jitter, c=colors, s=9, alpha=0.4, linewidth=0)
        median = 100 * max(LEAST, float(np.median(errors)))
        axes.vlines(median, y - 0.4, y + 0.4, color="black", linewidth=2)
        axes.text(
            1.01,
            y,
            _worst(errors),
            transform=axes.get_yaxis_transform(),
            va="center",
            fontsize=8,
            color=MUTED,
        )
    axes.axvline(100 * tolerance, color="black", linewidth=1, linestyle=(0, (4, 3)))
    axes.set_xscale("log")
    farthest = max(tolerance, *(each.max() for each in known.values()))
    powers = [p for p in range(-7, 9) if 10.0 ** (p - 1) < farthest]
    axes.set_xticks([100 * 10.0**p for p in powers], ["0", *(f"{100 * 10.0**p:g}" for p in powers[1:])])
    axes.set_yticks(range(len(known)), list(known), fontsize=8.5)
    axes.set_ylim(len(known) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(
        f"|predicted / measured - 1| (%), 0 at the left end; dashed: {tolerance:.0%}; bar: median"
    )
    heading(figure, "Error of the predicted peak")
    plain(axes)
    return figure


def _worst(errors: Any) -> str:
    n_exact = int((errors == 0).sum())
    if n_exact == len(errors):
        return f"{n_exact:,} cases, all exact"
    return f"{len(errors):,} cases, {n_exact:,} exact, worst {100 * float(errors.max()):.2g} %"
