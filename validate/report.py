"""Records as a table for people, 80 columns wide."""

import textwrap
from collections.abc import Sequence
from statistics import median
from typing import Any

from validate.records import Record

HEADER = f"{'case':<35}{'predicted':>12}{'measured':>12}{'peak':>9}{'states':>7}{'coll':>5}"


def header() -> str:
    """The table's head: what the columns are."""
    units = f"{'':<35}{'bytes':>12}{'bytes':>12}{'error':>9}{'off':>7}{'off':>5}"
    return f"{HEADER}\n{units}\n{'-' * len(HEADER)}"


def row(record: Record) -> str:
    """One case on one line: the peak of the rank that is farthest off.

    A case that did not run shows its outcome, and below it the reason's last line.
    """
    name = record.case["name"][:34]
    if record.measured is None or record.outcome != "ok":
        reason = record.reason.strip().splitlines()[-1] if record.reason.strip() else ""
        why = textwrap.fill(reason, 79, initial_indent="    ", subsequent_indent="    ")
        return f"{name:<35}{record.outcome:>12}" + (f"\n{why}" if why else "")
    measured = [rank["peak_bytes"] for rank in record.measured["ranks"]]
    if record.predicted is None:
        return f"{name:<35}{'-':>12}{max(measured):>12,}"
    predicted = [rank["peak_bytes"] for rank in record.predicted["ranks"]]
    ahead, seen = max(zip(predicted, measured, strict=True), key=lambda pair: abs(pair[0] / pair[1] - 1))
    error = f"{ahead / seen - 1:+.4%}"
    off = f"{record.states_off_bytes:>7}{record.collectives_off:>5}"
    return f"{name:<35}{ahead:>12,}{seen:>12,}{error:>9}{off}"


def summary(records: Sequence[Record]) -> str:
    """How many ran, how many were confirmed, the worst and the median error."""
    errors = [abs(record.peak_error) for record in records if record.peak_error is not None]
    ran = sum(record.outcome == "ok" for record in records)
    confirmed = sum(record.confirmed for record in records)
    refused = sum(record.outcome == "refused" for record in records)
    lines = [f"{len(records)} cases: {ran} ran and trained rightly, {refused} refused, {confirmed} confirmed"]
    if errors:
        lines.append(f"peak error: median {median(errors):.5%}, worst {max(errors):.3%}")
    return "\n".join(lines)


def details(record: Record) -> str:
    """One case rank by rank, predicted beside measured, and its collectives."""
    lines = [record.case["name"], f"outcome: {record.outcome}"]
    if record.reason:
        lines.append(record.reason)
    if record.measured is None:
        return "\n".join(lines)
    predicted = record.predicted["ranks"] if record.predicted else [None] * len(record.measured["ranks"])
    for measured, ahead in zip(record.measured["ranks"], predicted, strict=True):
        lines += ["", *_rank_lines(measured, ahead)]
    lines += ["", "loss per step: " + " ".join(f"{loss:.4f}" for loss in record.measured["losses"])]
    for label, error in (("loss", record.loss_error), ("first gradient", record.gradient_error)):
        if error is not None:
            lines.append(f"{label} beside the single-process run: {error:.1e} off")
    return "\n".join(lines)


def _rank_lines(measured: dict[str, Any], ahead: dict[str, Any] | None) -> list[str]:
    place = ", ".join(f"{axis} {measured[axis]}" for axis in ("pp", "dp", "tp"))
    title = f"rank {measured['rank']} ({place})"
    lines = [f"{title:<44}{'measured':>16}{'predicted':>16}"]
    for key in ("weights_bytes", "grads_bytes", "optimizer_bytes", "peak_bytes"):
        guess = f"{ahead[key]:,}" if ahead else "-"
        lines.append(f"  {key:<42}{measured[key]:>16,}{guess:>16}")
    known = {_entry(c) for c in ahead["collectives"]} if ahead else set()
    seen = {_entry(c) for c in measured["collectives"]}
    for entry in sorted(seen | known):
        mark = (
            ""
            if not ahead or entry in seen & known
            else "  predicted only"
            if entry in known
            else "  measured only"
        )
        kind, axis, calls, payload_bytes = entry
        lines.append(f"  {kind:<16}{axis:<6}{calls:>6} calls {payload_bytes:>14,} bytes{mark}")
    return lines


def _entry(collective: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(collective[key] for key in ("kind", "axis", "calls", "payload_bytes"))
