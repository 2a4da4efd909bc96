"""The steps of a ring all-reduce: the chunk that each rank sends in each step."""

from typing import TYPE_CHECKING, Final

from memplan.checks import checked_count
from memplan.plots.style import Swatch, legend_of, new_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_RANKS: Final = 16
"""The most ranks that can be told apart by eye."""

SUMS: Final = Swatch("reduce-scatter: partial sums", "#56B4E9")
RESULTS: Final = Swatch("all-gather: finished sums", "#009E73", ink="white")

FADED: Final = 0.3
"""Opacity of all chunks but the first, so that the path of the first one stands out."""


def ring_all_reduce(n_ranks: int) -> "Figure":
    """Which chunk each of n ranks sends to the next one in each of the 2 (n - 1) steps of a ring.

    In step t of the first half rank r sends chunk r - t, to which it has added its own; in the second half
    chunk r + 1 - t, which is finished.

    Source: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations".

    Raises:
        InvalidValue: fewer than 2 ranks, or more than 16.
    """
    n = checked_count("n_ranks", n_ranks, least=2, most=MOST_RANKS)
    steps = 2 * (n - 1)
    title = f"Ring all-reduce of {n} ranks: {steps} steps, 1/{n} of the data in each"
    subtitle = (
        f"each rank sends 2 x {n - 1}/{n} = {steps / n:.3g} times its data, to the next rank; in full color: "
        "the way of chunk 0"
    )
    figure, axes = new_axes(title, subtitle, height_in=1.7 + 0.36 * n)
    for rank in range(n):
        for step in range(steps):
            part = SUMS if step < n - 1 else RESULTS
            chunk = (rank - step) % n if step < n - 1 else (rank + 1 - (step - n + 1)) % n
            first = chunk == 0
            color = (part.color, 1.0 if first else FADED)
            axes.barh(rank, 1, left=step, height=0.8, facecolor=color, edgecolor="white")
            axes.text(step + 0.5, rank, f"chunk {chunk}" if n <= 6 else f"{chunk}", ha="center", va="center",
                      fontsize=8.5, color=part.ink if first else "black",
                      weight="bold" if first else "normal")  # fmt: skip
    axes.set_yticks(range(n), [f"rank {rank} to {(rank + 1) % n}" for rank in range(n)])
    axes.set_ylim(n - 0.5, -0.5)
    axes.set_xticks([step + 0.5 for step in range(steps)], [f"{step + 1}" for step in range(steps)])
    axes.set_xlim(0, steps)
    axes.set_xlabel("step")
    axes.tick_params(length=0)
    legend_of(figure, (SUMS, RESULTS))
    return figure
