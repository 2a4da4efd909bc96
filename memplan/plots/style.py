"""What all charts share: kinds, their colors and order; axes, units, legends, and the line below a title.

Kinds are stacked in one order everywhere, those that stay from step to step first; legends follow it. Colors
are those of Okabe and Ito 2008, "Color Universal Design", ordered so that neighbours differ in lightness too
and a print in grey stays readable.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from textwrap import fill
from typing import TYPE_CHECKING, Any, Final

from memplan.engines.options import Said, said_by
from memplan.errors import InvalidValue
from memplan.estimate import Estimate, StageEstimate
from memplan.hardware import Cluster, Verdict
from memplan.mesh import axis_names
from memplan.tables import ALWAYS, HEADED, layers_text, trust_text
from memplan.units import human_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class Swatch:
    """A part of a stack: its name in legends, its color, and the color of what is written on it."""

    label: str
    color: str
    ink: str = "black"
    edge: str = "white"
    hatch: str = ""


KINDS: Final[Mapping[str, Swatch]] = {
    "weights": Swatch("weights", "#0072B2", ink="white"),
    "optimizer": Swatch("optimizer state", "#56B4E9"),
    "grads": Swatch("gradients", "#009E73", ink="white"),
    "activations": Swatch("activations", "#F0E442"),
    "temporaries": Swatch("temporaries", "#E69F00"),
}
"""Kinds of bytes, from the bottom or the left: blue stays, green are gradients, warm comes and goes."""


@dataclass(frozen=True, slots=True)
class Mark:
    """The color and the marker of a verdict."""

    color: str
    marker: str


VERDICTS: Final[Mapping[Verdict | None, Mark]] = {
    "fits": Mark("#0072B2", "o"),
    "fits, tight": Mark("#56B4E9", "D"),
    "cannot say": Mark("#E69F00", "s"),
    "does not fit": Mark("#D55E00", "X"),
    None: Mark("0.5", "o"),
}
"""How each verdict is drawn in every chart; None where there is no verdict."""

HOLDS: Final = "a GPU holds, low to high"
"""The name of the interval of bytes on which a verdict hangs."""

WITHIN, OUTSIDE, MEASURED = "#0072B2", "#D55E00", "#56B4E9"
"""Colors of errors within and outside the tolerance, and of measurements."""

MUTED: Final = "0.35"
WIDTH_IN: Final = 9.0
TITLE_LENGTH: Final = 64
"""Characters of a title in a line, on a slide too."""

LEFT: Final = 0.012
"""Where titles start, as a share of the width."""

SLIDE_IN: Final = (8.0, 4.5)
"""Inches, 16:9. Scaled up to a slide 13.33 inches wide, text is 5/3 times as large as in a chart."""

SLIDE_DPI: Final = 240
"""Dots per inch of a slide of 1,920 x 1,080 pixels."""

NARROWEST: Final = 0.03
"""The least share of the horizontal axis that gets a name."""

BELOW: Final[dict[str, Any]] = {"loc": "outside lower left", "frameon": False, "fontsize": 8.5}
BESIDE: Final[dict[str, Any]] = {"loc": "outside right center", "frameon": False, "fontsize": 9}
"""Legends below and beside the axes."""

CLOSE: Final[dict[str, Any]] = {"columnspacing": 1.2, "handlelength": 1.6}
"""The entries of a legend close to each other."""

IN_A_ROW: Final = 100
"""The most characters of labels in a legend's row below a figure of the usual width."""

PAPER: Final[dict[str, Any]] = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
DASHED: Final[dict[str, Any]] = {"color": "black", "linestyle": (0, (4, 3)), "linewidth": 1.2}
DOTTED: Final[dict[str, Any]] = {"color": "black", "linestyle": ":", "linewidth": 1.0}
STACKED: Final[dict[str, Any]] = {
    "colors": [part.color for part in KINDS.values()],
    "labels": [part.label for part in KINDS.values()],
    "linewidth": 0,
}


@dataclass(frozen=True, slots=True)
class Line:
    """The budget on an axis of bytes, the usable bytes above it, and their text."""

    value: float
    usable: float
    text: str

    def per(self, unit: int) -> "Line":
        """The line on an axis in this unit."""
        return Line(self.value / unit, self.usable / unit, self.text)


def budget_text(cluster: Cluster) -> str:
    """The bytes up to which a plan fits, and beyond which it does not."""
    budget, usable = human_bytes(cluster.budget_bytes or 0), human_bytes(cluster.gpu.usable_bytes or 0)
    return f"{cluster.gpu.name}: budget {budget}, usable {usable}"


def budget_line(estimates: Sequence[Estimate]) -> Line | None:
    """The budget that all have in common; None if there is none, or no verdict hangs on it (accounting)."""
    clusters = [e.cluster for e in estimates if e.cluster is not None and not e.engine.is_accounting]
    budgets = {(c.budget_bytes, c.gpu.usable_bytes, budget_text(c)) for c in clusters}
    if len(clusters) < len(estimates) or len(budgets) != 1:
        return None
    budget_bytes, usable_bytes, text = budgets.pop()
    return None if budget_bytes is None or usable_bytes is None else Line(budget_bytes, usable_bytes, text)


def interval_style(verdict: Verdict | None) -> dict[str, Any]:
    """How the interval of bytes that a GPU holds is drawn: pale, with an edge."""
    color = VERDICTS[verdict].color
    return {"facecolor": (color, 0.18), "edgecolor": color, "linewidth": 1.2}


def checked_some(what: str, found: "Sequence[object] | Mapping[str, object]") -> None:
    """Raise unless there is something to draw.

    Raises:
        InvalidValue: there is nothing.
    """
    if not found:
        raise InvalidValue(f"there are no {what} to draw; give at least one.")


def stage_text(estimate: Estimate, of: StageEstimate) -> str:
    """A GPU of that stage, for people."""
    if len(estimate.stages) == 1:
        return "one GPU"
    return f"one GPU of stage {of.stage} ({stage_layers_text(of.layers)})"


def stage_layers_text(layers: Sequence[range]) -> str:
    """The blocks of a rank, for people."""
    return f"layer{'s' if sum(map(len, layers)) > 1 else ''} {layers_text(layers)}"


FIELDS: Final = ("dp", "tp", "pp", *HEADED, *ALWAYS)
"""The fields that subtitles name for every plan; others are named if they differ from their defaults."""


def common_text(estimates: Sequence[Estimate], varied: str = "") -> str:
    """The fields that all plans have in common, except the `varied` keyword; and what confirmed them."""
    models = {e.model.name for e in estimates}
    parts = [models.pop()] if len(models) == 1 else []
    first, *others = [{each.name: each for each in said_by(e.plan)} for e in estimates]
    for name in dict.fromkeys((*FIELDS, *first)):
        value = first[name].value
        same = all(name in one and one[name].value == value for one in others)
        if same and name != varied and _says_something(estimates, first[name]):
            parts.append(f"{value}" if name in ("precision", "optimizer") else f"{name}={value}")
    return "\n".join([", ".join(parts), trusts_text(estimates)])


def trusts_text(estimates: Iterable[Estimate]) -> str:
    """What has confirmed the bytes of these estimates; each sentence once."""
    return "\n".join(dict.fromkeys(map(trust_text, estimates)))


def _says_something(estimates: Sequence[Estimate], said: Said) -> bool:
    """Whether a field is worth naming: not a degree of 1, nor an option of several ranks or passes."""
    axis = {"zero": "dp", "schedule": "pp"}.get(said.name, said.name)
    if axis in axis_names():
        return any(getattr(e.plan, axis) > 1 for e in estimates)
    if said.name == "global_batch":
        return any(e.plan.n_micro_batches > 1 for e in estimates)
    return not said.is_default or (said.name in FIELDS and said.name not in ("engine", "sequence_parallel"))


def new_axes(title: str, subtitle: str, *, height_in: float) -> "tuple[Figure, Axes]":
    """A new chart with a title, and below it a subtitle about the whole chart."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
    axes = figure.add_subplot()
    heading(figure, title, subtitle)
    plain(axes)
    return figure, axes


def heading(figure: "Figure", title: str, subtitle: str = "") -> None:
    """A title in bold above lines that wrap at the figure's width.

    The layout keeps room for one text above the axes: for the lines, with empty ones where the title is.
    """
    title = fill(title, TITLE_LENGTH)
    from matplotlib.transforms import ScaledTranslation

    top = figure.transFigure + ScaledTranslation(0, -0.05, figure.dpi_scale_trans)
    figure.text(LEFT, 1, title, va="top", fontsize=13, weight="bold", transform=top)
    above = "\n" * (2 + 2 * title.count("\n"))
    lines = f"{above}{subtitle}" if subtitle else f"{above[1:]} "
    figure.suptitle(lines, x=LEFT, ha="left", fontsize=9, color=MUTED, wrap=True)


def slide(figure: "Figure", title: str | None = None) -> "Figure":
    """The same chart laid out anew for a slide of 16:9, its text large enough for a room.

    `plots.slide(figure, "ZeRO-3 fits").savefig("slide.png", dpi=240)` makes 1,920 x 1,080 pixels; `title`
    replaces the chart's own title.

    Raises:
        InvalidValue: the chart has too many rows: their names would overlap.
    """
    if title is not None:
        figure.texts[0].set_text(title)
    figure.set_size_inches(*SLIDE_IN)
    figure.draw_without_rendering()
    for axes in figure.axes:
        boxes = sorted((text.get_window_extent() for text in axes.get_yticklabels()), key=lambda box: box.y0)
        if any(low.y1 > high.y0 for low, high in pairwise(boxes)):
            raise InvalidValue(f"{len(boxes)} rows have no room on a slide; use fewer of them.")
    return figure


def plain(axes: "Axes") -> None:
    """Leave out the frame above and at the right."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)


def legend_below(figure: "Figure", axes: "Axes") -> None:
    """A legend below the axes: the parts as they are stacked, then the lines, in one row or two."""
    from matplotlib.lines import Line2D

    handles, labels = axes.get_legend_handles_labels()
    order = sorted(range(len(labels)), key=lambda i: (isinstance(handles[i], Line2D), labels[i] == HOLDS))
    handles, labels = [handles[i] for i in order], [labels[i] for i in order]
    n_columns = len(handles) if sum(map(len, labels)) <= IN_A_ROW else -(-len(handles) // 2)
    figure.legend(handles, labels, ncols=n_columns, **BELOW, **CLOSE)


def legend_top_down(figure: "Figure", axes: "Axes") -> None:
    """A legend beside the axes, in the order of the stack."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], **BESIDE)


def legend_of(figure: "Figure", parts: Sequence[Swatch], *, in_a_row: int = 5) -> None:
    """A legend of `parts` below the figure, in rows of equal length, at most `in_a_row`."""
    from matplotlib.patches import Patch

    patches = [Patch(facecolor=p.color, edgecolor=p.edge, hatch=p.hatch, label=p.label) for p in parts]
    n_rows = -(-len(patches) // in_a_row)
    figure.legend(handles=patches, ncols=-(-len(patches) // n_rows), **BELOW, **CLOSE)


def upright(text: str, share: float) -> bool | None:
    """Whether a text must stand upright to fit its share of the axis; None: it fits neither way."""
    if share < NARROWEST:
        return None
    return bool(share < 0.011 * len(text))
