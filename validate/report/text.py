"""Records as a table for people, 80 columns wide."""

import math
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any, Final

from memplan.errors import MemplanError, MissingRule
from memplan.tables import batch_text
from memplan.text_tables import printable
from memplan.units import human_bytes
from validate.allocated import allocator_errors, allocator_summary, twins_summary
from validate.cases import Case
from validate.machine import Budget
from validate.predict import estimated_rank
from validate.records import Record
from validate.sweep import share_of

AxisRow = Mapping[str, Any]
"""One row of `validate.report.tables.by_axis`."""

HEADER = f"{'case':<29}{'predicted':>15}{'measured':>15}{'peak':>9}{'states':>7}{'coll':>5}"


def header() -> str:
    """The table's head: what the columns are."""
    units = f"{'':<29}{'bytes':>15}{'bytes':>15}{'error':>9}{'off':>7}{'off':>5}"
    return f"{HEADER}\n{units}\n{'-' * len(HEADER)}"


def row(record: Record) -> str:
    """One case: the peak of its fullest rank, the error of the rank farthest off; a long name goes on below.

    A case that did not run shows its outcome, and below it the reason's last line.
    """
    name, *rest = textwrap.wrap(printable(record.case["name"]), 28, subsequent_indent="  ") or [""]
    lines = [f"{name:<29}{_figures(record)}".rstrip(), *rest]
    if record.outcome != "ok":
        lines += textwrap.wrap(
            printable(record.headline), 79, initial_indent="    ", subsequent_indent="    "
        )
    if record.anyway:
        said = printable(f"run anyway, {record.anyway}")
        lines += textwrap.wrap(said, 79, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines)


def _figures(record: Record) -> str:
    if record.measured is None or record.outcome != "ok":
        return f"{record.outcome:>15}"
    if record.fullest_peaks is None or record.peak_error is None:
        return f"{'-':>15}{max(rank['peak_bytes'] for rank in record.measured['ranks']):>15,}"
    ahead, seen = record.fullest_peaks
    off = f"{record.states_off_bytes:>7}{record.collectives_off:>5}"
    return f"{ahead:>15,}{seen:>15,}{record.peak_error:>+9.4%}{off}"


def listing(records: Sequence[Record], axes: Iterable[AxisRow], *, brief: bool = False) -> str:
    """The cases that ran, the others by outcome, the errors by axis, the worst ten, and the summary.

    `brief`: only what failed, of the cases themselves.
    """
    shown = [] if brief else [header(), *(row(record) for record in records if record.outcome == "ok")]
    parts = ["\n".join(shown)] if shown else []
    without = ("ok", "refused") if brief else ("ok",)
    by_outcome = Counter(record.outcome for record in records if record.outcome not in without)
    for outcome, n in by_outcome.most_common():
        found = [row(record) for record in records if record.outcome == outcome]
        parts.append("\n".join([f"{outcome}: {n}", *found]))
    if axis_lines := list(_axis_lines(axes)):
        parts.append("\n".join(axis_lines))
    if worst := worst_first(records)[:N_WORST]:
        parts.append("\n".join([f"the {len(worst)} worst peaks", *map(row, worst)]))
    if little := [pair for pair in attributed(records) if pair[0] < LEAST_ATTRIBUTED]:
        lines = [line for part, record in little for line in _named(record.case["name"], floored(part))]
        parts.append("\n".join([f"less than {LEAST_ATTRIBUTED:.0%} of the bytes at the peak named", *lines]))
    return "\n\n".join([*parts, summary(records)])


LEAST_ATTRIBUTED: Final = 0.99
"""Cases of whose bytes at the peak less is attributed are named."""

VALUE_WIDTH: Final = 16
"""Columns for a value of an axis; a longer one stands above its figures."""

N_WORST: Final = 10
"""How many of the worst cases are named."""


def worst_first(records: Iterable[Record]) -> list[Record]:
    """The cases that ran and were predicted, farthest off first."""
    return sorted(
        (record for record in records if record.peak_error is not None),
        key=lambda record: -abs(record.peak_error or 0.0),
    )


def attributed(records: Iterable[Record]) -> list[tuple[float, Record]]:
    """The attributed part of the bytes at the peak, where it is known, least first."""
    known = [(r.attributed_fraction, r) for r in records if r.attributed_fraction is not None]
    return sorted(known, key=lambda pair: pair[0])


def floored(fraction: float) -> str:
    """A percentage that is never rounded up.

    >>> floored(0.9999999)
    '99.999%'
    """
    return f"{math.floor(100_000 * fraction) / 1000:.3f}%"


def _axis_lines(axes: Iterable[AxisRow]) -> Iterator[str]:
    previous = ""
    for part in axes:
        if not previous:
            heads = ("cases", 6), ("ran", 6), ("median", 10), ("worst", 10), ("exact", 10)
            yield f"{'by axis':<22}{'value':<16}" + "".join(f"{head:>{width}}" for head, width in heads)
        name = part["axis"] if part["axis"] != previous else ""
        previous = part["axis"]
        median_text, worst_text = (
            f"{part[key]:.5%}" if part["ran"] else "-" for key in ("median_peak_error", "worst_peak_error")
        )
        exact, value = f"{part['exact']}/{part['ran']}", printable(str(part["value"]))
        figures = f"{part['cases']:>6}{part['ran']:>6}{median_text:>10}{worst_text:>10}{exact:>10}"
        if len(value) > VALUE_WIDTH:
            yield from textwrap.wrap(printable(f"{name:<22}{value}"), 79, subsequent_indent=" " * 24)
            name = value = ""
        yield f"{name:<22}{value:<{VALUE_WIDTH}}{figures}"


def _named(name: str, figure: str) -> list[str]:
    """A name in as many lines as it takes, with a figure in the first."""
    first, *rest = textwrap.wrap(printable(name), 70, subsequent_indent="  ") or [""]
    return [f"{first:<71}{figure:>8}", *rest]


def summary(records: Sequence[Record]) -> str:
    """How many there are of each outcome, how many were confirmed, the worst and the median error."""
    errors = [abs(record.peak_error) for record in records if record.peak_error is not None]
    outcomes = Counter(_outcome_text(record) for record in records)
    counted = ", ".join(f"{n} {outcome}" for outcome, n in outcomes.most_common())
    confirmed = sum(record.confirmed for record in records)
    lines = [f"{len(records)} case{'s' * (len(records) != 1)}: {counted or 'none'}; {confirmed} confirmed"]
    if errors:
        lines.append(f"peak error: median {median(errors):.5%}, worst {max(errors):.3%}")
    lines += [*allocator_summary(allocator_errors(records)), *twins_summary(records)]
    if known := attributed(records):
        lines.append(f"bytes at the peak that are named tensors: at least {floored(known[0][0])}")
    return "\n".join(line for text in lines for line in textwrap.wrap(text, 79))


def _outcome_text(record: Record) -> str:
    if record.outcome != "ok":
        return record.outcome
    return "ran as a stand-in" if record.case["rank"] is not None else "ran"


def plan_lines(cases: Sequence[Case], budget: Budget) -> Iterator[str]:
    """What would be run: of each case its ranks, the largest predicted peak, and what it may take."""
    yield f"{'case':<44}{'ranks':>6}{'peak':>13}{'may take':>13}"
    for case in cases:
        name, *rest = textwrap.wrap(printable(case.name), 43, subsequent_indent="  ") or [""]
        yield f"{name:<44}{len(case.ranks):>6}{_room_cells(case, budget)}"
        yield from rest
    has = f"{budget.cores} cores and {human_bytes(budget.memory_bytes)}"
    yield f"{len(cases)} cases; this machine may give {has}"


def _room_cells(case: Case, budget: Budget) -> str:
    try:
        step = max(1, len(case.ranks) // case.plan.pp)
        peak = max(estimated_rank(case, rank).peak.total_bytes for rank in case.ranks[::step])
        return f"{human_bytes(peak):>13}{human_bytes(share_of(case, budget).memory_bytes):>13}"
    except MissingRule:
        return f"{'no rule':>13}{'unknown':>13}"
    except MemplanError:
        return f"{'refused':>13}{'-':>13}"


def details(record: Record) -> str:
    """One case rank by rank, predicted beside measured, and its collectives."""
    return "\n".join(printable(line) for text in _details(record) for line in text.splitlines() or [""])


def _details(record: Record) -> list[str]:
    batch = batch_text(Case.from_dict(record.case).plan)
    lines = [record.case["name"], f"batch: {batch}", f"outcome: {record.outcome}"]
    if record.reason:
        lines.append(record.reason)
    if record.measured is None:
        return lines
    predicted = record.predicted["ranks"] if record.predicted else [None] * len(record.measured["ranks"])
    for measured, ahead in zip(record.measured["ranks"], predicted, strict=True):
        lines += ["", *_rank_lines(measured, ahead)]
    losses = " ".join("-" if loss is None else f"{loss:.4f}" for loss in record.measured["losses"])
    lines += ["", f"loss per step: {losses or '-'}"]
    if record.unchecked:
        lines.append(f"training: {record.unchecked}")
    for label, error in (("loss", record.loss_error), ("first gradient", record.gradient_error)):
        if error is not None:
            lines.append(f"{label} beside the single-process run: {error:.1e} off")
    return lines


def _rank_lines(measured: dict[str, Any], ahead: dict[str, Any] | None) -> list[str]:
    place = ", ".join(
        f"{axis} {measured[axis]}" for axis in ("pp", "dp_replicate", "dp", "tp") if axis in measured
    )
    title = f"rank {measured['rank']} ({place})"
    lines = [f"{title:<44}{'measured':>16}{'predicted':>16}"]
    for key in ("weights_bytes", "grads_bytes", "optimizer_bytes", "peak_bytes"):
        guess = f"{ahead[key]:,}" if ahead else "-"
        lines.append(f"  {key:<42}{measured[key]:>16,}{guess:>16}")
    of_gpu = ("peak_allocated_bytes", "peak_reserved_bytes", "device_bytes", "context_bytes")
    lines += [f"  {key:<42}{measured[key]:>16,}{'-':>16}" for key in of_gpu if measured.get(key) is not None]
    seen = _collectives(measured)
    known = _collectives(ahead) if ahead else {}
    for kind, axis in sorted(seen.keys() | known.keys()):
        for key in ("calls", "payload_bytes"):
            cells = [
                f"{found[kind, axis][key]:,}" if (kind, axis) in found else "-" for found in (seen, known)
            ]
            lines.append(f"  {f'{kind} over {axis}, {key}':<42}{cells[0]:>16}{cells[1]:>16}")
    return lines


def _collectives(rank: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """A rank's collectives by kind and axis."""
    return {(each["kind"], each["axis"]): each for each in rank["collectives"]}
