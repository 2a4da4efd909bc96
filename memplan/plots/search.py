"""What a search found: speed against memory, and the largest model against the number of GPUs."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from memplan.errors import InvalidValue
from memplan.estimate import Estimate
from memplan.mesh import AXES, VIEWS, axis_names
from memplan.plots.style import BESIDE, DASHED, MUTED, VERDICTS, checked_some, new_axes, trusts_text
from memplan.units import GiB, human_bytes

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

LINES: Final = (
    ("#0072B2", "o"),
    ("#E69F00", "s"),
    ("#009E73", "^"),
    ("#CC79A7", "D"),
    ("#56B4E9", "v"),
    ("#D55E00", "P"),
)
"""The color and the marker of each line."""

APART: Final = 0.035
"""The least distance, as a fraction of both axes, between two named plans on the front."""


def front(found: "pandas.DataFrame") -> "Figure":
    """Tokens per second and GPU against what a GPU holds, of the plans that a search kept.

    The line joins the plans that fit and that no other of them beats in both; the bar of each is the interval
    of bytes that its verdict hangs on.

    Raises:
        InvalidValue: no plan with a step time that fits or may fit.
    """
    known = found[found["verdict"].isin(filter(None, VERDICTS)) & found["tokens_per_s_per_gpu"].notna()]
    known = known[known["device_high_bytes"].notna()]
    checked_some("plans with a step time that fit or may fit", list(known.index))
    from matplotlib.lines import Line2D
    from matplotlib.patheffects import withStroke

    figure, axes = new_axes(_fastest(found, known), _subtitle(found), height_in=5.0)
    for verdict, mark in VERDICTS.items():
        rows = known[known["verdict"] == verdict]
        if len(rows):
            low, high = (rows[f"device_{end}_bytes"].to_numpy(float) / GiB for end in ("low", "high"))
            speed = rows["tokens_per_s_per_gpu"].to_numpy(float)
            axes.hlines(speed, low, high, color=mark.color, alpha=0.35, linewidth=2.5, zorder=2)
            axes.scatter(high, speed, color=mark.color, marker=mark.marker, s=34, zorder=3, label=verdict)
    best = _unbeaten(known[known["verdict"] == "fits"])
    axes.plot(best["device_high_bytes"] / GiB, best["tokens_per_s_per_gpu"], color="black", linewidth=1,
              drawstyle="steps-post", zorder=2.5, label="none beats in both")  # fmt: skip
    named = _apart(best)
    place: dict[str, Any] = {"xytext": (-7, 5), "textcoords": "offset points", "ha": "center"}
    place["path_effects"] = [withStroke(linewidth=2.5, foreground="white")]
    for i, row in enumerate(named):
        at = row["device_high_bytes"] / GiB, row["tokens_per_s_per_gpu"]
        axes.annotate(f"{i + 1}", at, fontsize=9, weight="bold", **place)
    if (budget := found.attrs.get("budget_bytes")) is not None:
        axes.axvline(budget / GiB, label=f"budget {human_bytes(budget)}", **DASHED)
    axes.set_xlabel("most that a GPU holds (GiB)")
    axes.set_ylabel("tokens per second and GPU (predicted)")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.margins(y=0.12)
    axes.set_xlim(left=0)
    names = [f"{i + 1}  {_plan_name(row)}" for i, row in enumerate(named)]
    handles, labels = axes.get_legend_handles_labels()
    handles += [Line2D([], [], linestyle="")] * len(names)
    figure.legend(handles, [*labels, *names], **{**BESIDE, "fontsize": 8.5}, handlelength=1.4)
    return figure


def _subtitle(found: "pandas.DataFrame") -> str:
    asked = found.attrs
    jobs = ", ".join(f"{job['global_batch']:,} x {job['seq_len']:,}" for job in asked.get("jobs", []))
    return (
        f"{asked.get('model', '')} on {asked.get('cluster', '')}, {jobs} tokens a step; the best kept of "
        f"{asked.get('n_plans', len(found)):,} plans\n"
        f"bars: the interval of bytes that a verdict hangs on\n{asked.get('trust', '')}"
    )


def _fastest(found: "pandas.DataFrame", known: "pandas.DataFrame") -> str:
    """What a GPU holds of the fastest plan that fits; of equally fast ones the smallest."""
    where = " on ".join(filter(None, (found.attrs.get("model"), found.attrs.get("cluster"))))
    fit = known[known["verdict"].isin(("fits", "fits, tight"))]
    if fit.empty:
        return f"{where}: no plan is known to fit"
    by_headroom = fit.sort_values("device_high_bytes")
    row = by_headroom.sort_values("tokens_per_s_per_gpu", ascending=False, kind="stable").iloc[0]
    low, high = (int(row[f"device_{end}_bytes"]) for end in ("low", "high"))
    return f"{where} {row['verdict'].upper()}: the fastest holds {low / GiB:.1f}-{high / GiB:.1f} GiB"


def _unbeaten(rows: "pandas.DataFrame") -> "pandas.DataFrame":
    """Plans that no other one beats in both speed and memory, the smallest first."""
    ordered = rows.sort_values(["device_high_bytes", "tokens_per_s_per_gpu"], ascending=[True, False])
    fastest = ordered["tokens_per_s_per_gpu"].cummax()
    return ordered[(ordered["tokens_per_s_per_gpu"] == fastest) & ~fastest.duplicated()]


def _apart(best: "pandas.DataFrame") -> list[Any]:
    """The plans of a front that get a name, the fastest first; none is close to another one with a name."""
    held, speed = (best[name].to_numpy(float) for name in ("device_high_bytes", "tokens_per_s_per_gpu"))
    named: list[int] = []
    for i in range(len(best) - 1, -1, -1):
        near = [
            abs(held[i] - held[j]) < APART * held.max() and abs(speed[i] - speed[j]) < APART * np.ptp(speed)
            for j in named
        ]
        if not any(near):
            named.append(i)
    return [best.iloc[i] for i in named]


def _plan_name(row: Any) -> str:
    """A row of a search in a few words, as pp4 dp2 tp8 sp zero1 full."""
    from pandas import isna

    mesh = [axis for axis in axis_names() if axis in row.index and row[axis] > 1]
    words = [f"{AXES.named(axis).word or axis}{row[axis]}" for axis in mesh]
    words += [f"{view}{row[view]}" for view in VIEWS if view in row.index and row[view] > 1]
    words += ["sp"] if row["sequence_parallel"] else []
    words += [f"zero{row['zero']}"] if row["dp"] > 1 else []
    words += [f"mb{row['micro_batch']}"] if row["micro_batch"] > 1 else []
    if row["recompute"] != "none":
        blocks = row["recompute_blocks"]
        words.append(row["recompute"] + ("" if isna(blocks) else f" of {int(blocks)}"))
    return " ".join(words + ["offload"] * bool(row["offload"])) or "one GPU"


def frontier(lines: Mapping[str, Sequence[Estimate]]) -> "Figure":
    """The parameters of estimated models against the number of GPUs, one line per strategy.

    Meant for the largest model that fits: `memplan.largest_model(...).best` of each cluster.

    Raises:
        InvalidValue: no estimate, or one without a cluster.
    """
    every = [each for line in lines.values() for each in line]
    checked_some("estimates", every)
    for name, line in lines.items():
        if any(each.cluster is None for each in line):
            raise InvalidValue(f"{name!r} has an estimate without a cluster; use cluster='<n>x<gpu>'.")
    gpus = sorted({each.cluster.gpu.name for each in every if each.cluster is not None})
    seq_lens = sorted({each.plan.seq_len for each in every})
    subtitle = f"{', '.join(gpus)}; sequences of {', '.join(f'{n:,}' for n in seq_lens)} tokens"
    largest = max(every, key=lambda each: each.n_parameters)
    strategy = next(name for name, line in lines.items() if largest in line)
    title = f"{largest.model.name} is the largest that fits: {strategy}, {largest.plan.world_size:,} GPUs"
    figure, axes = new_axes(title, f"{subtitle}\n{trusts_text(every)}", height_in=4.8)
    for (name, line), (color, marker) in zip(lines.items(), cycle(LINES), strict=False):
        points = sorted((each.plan.world_size, each.n_parameters / 1e9) for each in line)
        axes.plot(*zip(*points, strict=True), color=color, marker=marker, markersize=6, label=name)
        n_gpus, parameters = points[-1]
        axes.annotate(f"{parameters:,.3g}B", (n_gpus, parameters), xytext=(6, 0), va="center",
                      textcoords="offset points", fontsize=8.5, color=MUTED)  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="parameters (billions)")
    counts = sorted({each.plan.world_size for each in every})
    axes.set_xticks(counts, [f"{n:,}" for n in counts])
    sizes = [each.n_parameters / 1e9 for each in every]
    marks = [n * 10.0**p for p in range(-3, 5) for n in (1, 3)]
    axes.set_yticks(marks, [f"{mark:,g}" for mark in marks])
    axes.set_ylim(0.6 * min(sizes), 1.6 * max(sizes))
    axes.minorticks_off()
    axes.grid(color="0.9", linewidth=0.8)
    axes.margins(x=0.1)
    figure.legend(*axes.get_legend_handles_labels(), **BESIDE)
    return figure
