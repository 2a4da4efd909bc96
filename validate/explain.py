"""A measured step beside the predicted one, and the attribution of the bytes at its peak."""

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from memplan.estimate import rank_estimate
from memplan.plots.style import MEASURED, MUTED, OUTSIDE, heading
from memplan.plots.timeline import SHADES
from memplan.record import phased
from memplan.shapes import Buffer
from memplan.snapshot import read_snapshot
from memplan.text_tables import WIDTH
from memplan.units import MiB
from validate.attribution import Attribution, Comparison
from validate.cases import Case
from validate.report.text import floored

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_TENSORS: Final = 20
MOST_BLOCKS: Final = 8
"""Rows that the text shows at most, of attributed and of unattributed blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StretchPeak:
    """The highest bytes held in a named stretch of the step, over all its `times` repetitions."""

    when: str
    times: int
    predicted_bytes: int
    measured_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A named tensor of the ledger at the peak, with its predicted and its measured count."""

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    each_bytes: int
    predicted: int
    measured: int

    @property
    def total_bytes(self) -> int:
        """Bytes of all predicted tensors of this name."""
        return self.predicted * self.each_bytes


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """One rank's measured step explained by its prediction; `title` says which."""

    title: str
    comparison: Comparison
    attribution: Attribution

    @property
    def predicted_peak_bytes(self) -> int:
        """The highest predicted instant."""
        return int(self.comparison.predicted_bytes.max())

    @property
    def verdict(self) -> str:
        """The explained fraction as text, never rounded up."""
        peak_bytes = self.attribution.peak_bytes
        return f"{floored(self.fraction)} of the {peak_bytes:,} bytes at the peak are tensors of the ledger"

    @property
    def fraction(self) -> float:
        """Attributed bytes / bytes at the peak."""
        return self.attribution.fraction

    def timeline(self) -> list[StretchPeak]:
        """Every named stretch of the predicted step beside the same part of the measured one, in order.

        Nothing if what was measured is not one step.
        """
        found: dict[str, StretchPeak] = {}
        for name, predicted_bytes, measured_bytes in _stretches(self.comparison):
            known = found.get(name, StretchPeak(when=name, times=0, predicted_bytes=0, measured_bytes=0))
            found[name] = StretchPeak(
                when=name,
                times=known.times + 1,
                predicted_bytes=max(known.predicted_bytes, predicted_bytes),
                measured_bytes=max(known.measured_bytes, measured_bytes),
            )
        return list(found.values())

    def tensors(self) -> list[Tensor]:
        """The ledger at the peak, largest first."""
        measured = Counter(_Key.of(tensor) for known in self.attribution.known for tensor in known.tensors)
        missing = Counter(_Key.of(tensor) for tensor in self.attribution.unmeasured)
        rows = [
            Tensor(**asdict(key), predicted=measured[key] + missing[key], measured=measured[key])
            for key in measured | missing
        ]
        return sorted(rows, key=lambda row: -row.total_bytes)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as `--json` prints them."""
        found = self.attribution
        return {
            "title": self.title,
            "attributed_fraction": found.fraction,
            "attributed_bytes": found.attributed_bytes,
            "measured_peak_bytes": found.peak_bytes,
            "predicted_peak_bytes": self.predicted_peak_bytes,
            "when": found.when,
            "lost_bytes": found.lost_bytes,
            "timeline": [asdict(stretch) for stretch in self.timeline()],
            "tensors": [asdict(tensor) for tensor in self.tensors()],
            "unexplained": [{"n_bytes": block.n_bytes, "path": block.path} for block in found.unexplained],
            "unmeasured": [{"n_bytes": t.n_bytes, "name": t.name} for t in found.unmeasured],
        }

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        found = self.attribution
        yield self.title
        yield self.verdict
        off_bytes = self.predicted_peak_bytes - found.peak_bytes
        yield f"predicted peak: {self.predicted_peak_bytes:,} bytes, {off_bytes:+,}; here: {found.when}"
        timeline = self.timeline()
        if timeline:
            yield from ("", f"{'the step':<37}{'times':>6}{'predicted':>13}{'measured':>13}{'error':>10}")
        for part in timeline:
            error = part.predicted_bytes / part.measured_bytes - 1
            yield (
                f"{part.when[:36]:<37}{part.times:>6}{part.predicted_bytes:>13,}{part.measured_bytes:>13,}"
                f"{error:>+10.3%}"
            )
        yield from ("", f"{'at the peak':<37}{'kind':<12}{'predicted':>9}{'measured':>9}{'bytes':>12}")
        rows = self.tensors()
        for row in rows[:MOST_TENSORS]:
            yield (
                f"{row.name[:36]:<37}{row.kind:<12}{row.predicted:>9}{row.measured:>9}{row.total_bytes:>12,}"
            )
        if len(rows) > MOST_TENSORS:
            rest_bytes = sum(row.total_bytes for row in rows[MOST_TENSORS:])
            yield f"{f'and {len(rows) - MOST_TENSORS} more':<67}{rest_bytes:>12,}"
        yield from _unmatched_lines(
            "measured, not in the ledger", ((b.n_bytes, shortened(b.path)) for b in found.unexplained)
        )
        yield from _unmatched_lines(
            "in the ledger, not measured", ((t.n_bytes, _said(t)) for t in found.unmeasured)
        )
        if found.lost_bytes:
            yield from ("", f"{found.lost_bytes:,} bytes were freed by other threads, it is not known which")

    def plot(self) -> "Figure":
        """Bytes held over the step: measured, and predicted beside it."""
        return plot(self)


@dataclass(frozen=True, slots=True)
class _Key:
    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    each_bytes: int

    @staticmethod
    def of(tensor: Buffer) -> "_Key":
        return _Key(tensor.name, tensor.kind, tensor.shape, tensor.dtype.name, tensor.n_bytes)


def ranks_text(explanations: Sequence[Explanation]) -> str:
    """Two lines per rank."""
    return "\n".join(f"{each.title}\n    {each.verdict}" for each in explanations)


def explained(title: str, comparison: Comparison) -> Explanation:
    """The explanation of a rank's step."""
    return Explanation(title=title, comparison=comparison, attribution=comparison.attribution())


def snapshot_comparison(case: Case, rank: int, path: Path) -> Comparison:
    """A snapshot beside what memplan predicts of a case's rank on its GPU.

    Raises:
        MemplanError: for a file that is no snapshot, or a plan that is refused.
    """
    snapshot = read_snapshot(path)
    record = rank_estimate(case.model, case.plan, case.plan.place(rank), case.kernels).record
    return Comparison(
        rest=record.rest, step=record.step, held=snapshot.held, events=snapshot.events, one_step=False
    )


def _unmatched_lines(title: str, found: Iterable[tuple[int, str]]) -> Iterator[str]:
    rows = sorted(found, key=lambda row: -row[0])
    if not rows:
        return
    yield from ("", f"{title}: {sum(n_bytes for n_bytes, _ in rows):,} bytes")
    for n_bytes, text in rows[:MOST_BLOCKS]:
        yield from textwrap.wrap(
            text, WIDTH - 1, initial_indent=f"{n_bytes:>12,}  ", subsequent_indent=" " * 14
        )
    if len(rows) > MOST_BLOCKS:
        rest_bytes = sum(n_bytes for n_bytes, _ in rows[MOST_BLOCKS:])
        yield f"{rest_bytes:>12,}  in {len(rows) - MOST_BLOCKS} more"


def _said(tensor: Buffer) -> str:
    return f"{tensor.name} {list(tensor.shape)} {tensor.dtype.name} ({tensor.kind})"


def shortened(path: str, most: int = 100) -> str:
    """The innermost operations of a path.

    >>> shortened("memplan: step > Forward > aten::linear > aten::mm", 25)
    'aten::linear > aten::mm'
    """
    parts = path.split(" > ")
    kept = parts.pop()
    while parts and len(parts[-1]) + len(kept) + 3 <= most:
        kept = f"{parts.pop()} > {kept}"
    return kept[-most:]


def _measured_places(comparison: Comparison) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    """The index in the measured step of each predicted event, interpolated between matched allocations."""
    known = comparison.pairs
    last = len(comparison.events) - 1
    mine = [-1, *(i for i, _ in known), len(comparison.predicted)]
    seen = [0, *(j for _, j in known), last]
    return np.interp(np.arange(len(comparison.predicted)), mine, seen)


def _stretches(comparison: Comparison) -> Iterator[tuple[str, int, int]]:
    """Each stretch in turn: its name, the most bytes predicted in it, and measured in the same part."""
    if not comparison.one_step:
        return
    places = np.rint(_measured_places(comparison)).astype(int)
    totals = np.array([event.total_bytes for event in comparison.events])
    start = 0
    for name, part in groupby(name for name, _ in comparison.predicted):
        stop = start + sum(1 for _ in part)
        first = places[start]
        beyond = max(first + 1, places[stop] if stop < len(places) else len(totals))
        yield name, int(comparison.predicted_bytes[start:stop].max()), int(totals[first:beyond].max())
        start = stop


def plot(explanation: Explanation) -> "Figure":
    """Bytes held after each measured event, the prediction of the same instants over it, the peak.

    Where what was measured is not one step, the predicted peak alone.
    """
    from matplotlib.figure import Figure

    comparison, found = explanation.comparison, explanation.attribution
    figure = Figure(figsize=(9.0, 4.6), layout="constrained")
    axes = figure.add_subplot()
    totals = np.array([event.total_bytes for event in comparison.events]) / MiB
    axes.fill_between(range(len(totals)), totals, step="post", color=MEASURED, linewidth=0, label="measured")
    line: dict[str, Any] = {"color": "black", "linewidth": 0.9}
    if comparison.one_step:
        places = _measured_places(comparison)
        _shade(axes, comparison, places)
        axes.step(places, comparison.predicted_bytes / MiB, where="post", label="predicted", **line)
    else:
        axes.axhline(explanation.predicted_peak_bytes / MiB, linestyle="--", label="predicted peak", **line)
    highest = found.peak_bytes / MiB
    axes.plot([comparison.peak], [1.025 * highest], "v", color=OUTSIDE, markersize=7, label="measured peak")
    axes.set_ylim(0, 1.12 * max(highest, explanation.predicted_peak_bytes / MiB))
    axes.set_xlim(0, len(totals) - 1)
    axes.set_ylabel("bytes held (MiB)")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel(f"{len(totals):,} allocations and frees in order (not to the scale of time)")
    axes.spines[["top", "right"]].set_visible(False)
    heading(figure, explanation.title, explanation.verdict)
    figure.legend(loc="outside lower left", ncols=4, frameon=False, fontsize=8.5)
    return figure


def _shade(axes: "Axes", comparison: Comparison, places: Iterable[float]) -> None:
    """Forward, backward and optimizer, as the prediction knows them, named where there is room."""
    last = float(len(comparison.events))
    phases = (phase for phase, _ in phased(comparison.step, comparison.update))
    firsts = [
        (phase, next(run)[1]) for phase, run in groupby(zip(phases, places, strict=True), itemgetter(0))
    ]
    starts = [0.0, *(float(place) for _, place in firsts[1:]), last]
    for (phase, _), (start, stop) in zip(firsts, pairwise(starts), strict=True):
        axes.axvspan(start, stop, color=SHADES[phase], linewidth=0, zorder=0)
        if stop - start > 0.08 * last:
            axes.text((start + stop) / 2, 0.985, phase, transform=axes.get_xaxis_transform(), ha="center",
                      va="top", fontsize=9, color=MUTED)  # fmt: skip
