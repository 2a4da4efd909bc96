"""What a search found, and what is advised, for a terminal of 80 columns."""

from collections.abc import Mapping
from itertools import islice
from typing import Any, Final

from memplan.layout import WIDTH, cut, printable, text_table
from memplan.search.advise import Advice
from memplan.search.search import Found
from memplan.search.table import search_rows
from memplan.search.why import plan_text
from memplan.units import human_bytes

SHOWN: Final = 10
"""Plans of each verdict, and rules, that are printed unless told otherwise."""

MESH: Final = ("pp", "dp_replicate", "dp", "tp")


def search_text(found: Found) -> str:
    """The plans kept: the best, or the nearest if none fits; and what was refused why."""
    cluster, base = found.cluster, found.base
    title = (
        f"{printable(found.model.name)} on {printable(cluster.name)}, {base.global_batch} x {base.seq_len} "
    )
    title += f"tokens a step: {found.n_plans:,} plans"
    counts = f"{found.n_fit:,} fit, {found.n_too_large:,} are too large, {found.n_refused:,} are refused."
    if found.n_slower:
        counts += f"\n{found.n_slower:,} more are worse than those shown, whether they fit or not."
    rows = list(search_rows(found))
    parts = [f"{cut(title, WIDTH)}\n{counts}"]
    for verdict, heading in (("fits", "Best"), ("too large", "Nearest of those that do not fit")):
        chosen = [row for row in rows if row["verdict"] == verdict]
        if chosen and (verdict == "fits" or not found.n_fit):
            parts.append(f"{heading}\n{_plans(chosen)}")
    if not found.n_fit and found.n_too_large:
        parts.append(cut(str(next(row["why"] for row in rows if row["verdict"] == "too large")), WIDTH))
    if found.refused_by:
        parts.append(_refusals(found.refused_by))
    if any(row["step_s"] is not None for row in rows):
        parts.append("Times are rough: a roofline that no run has confirmed.")
    return "\n\n".join(parts)


def _plans(rows: list[dict[str, Any]]) -> str:
    hybrid = any(row["dp_replicate"] > 1 for row in rows)
    mesh = MESH if hybrid else tuple(axis for axis in MESH if axis != "dp_replicate")
    heads = {"dp_replicate": "rep"}
    cells: list[tuple[str, ...]] = [
        (*(heads.get(axis, axis) for axis in mesh), "zero", "mb", "schedule", "and", "peak", "tok/s/GPU")
    ]
    for row in rows:
        speed = row["tokens_per_s_per_gpu"]
        cells.append(
            (
                *(str(row[axis]) for axis in mesh),
                str(row["zero"]),
                str(row["micro_batch"]),
                _schedule(row),
                _rest(row),
                human_bytes(row["peak_bytes"]),
                "-" if speed is None else f"{speed:,.0f}",
            )
        )
    return text_table(cells, ">" * (len(mesh) + 2) + "<<>>", flexible=len(mesh) + 3)


def _schedule(row: Mapping[str, Any]) -> str:
    if row["pp"] == 1:
        return "-"
    virtual_stages = f" x{row['virtual_stages']}" if row["virtual_stages"] > 1 else ""
    return f"{row['schedule']}{virtual_stages}"


def _rest(row: Mapping[str, Any]) -> str:
    parts = ["sp"] if row["sequence_parallel"] else []
    if row["recompute"] != "none":
        blocks = row["recompute_blocks"]
        parts.append(row["recompute"] + ("" if blocks is None else f" of {blocks}"))
    return " ".join(parts + ["offload"] * row["offload"]) or "-"


def _refusals(refused_by: Mapping[str, int]) -> str:
    rows = [("refused", "rule, as for the first of them")]
    rows += [(f"{n:,}", text) for text, n in islice(refused_by.items(), SHOWN)]
    return text_table(rows, "><", flexible=1)


def advice_text(advice: Advice) -> str:
    """Each change with what it frees and costs, then the fastest combination that fits."""
    asked = advice.asked
    rows = [("change", "frees", "peak", "", "a step takes")]
    refused = []
    for row in map(advice.row, advice.changes):
        if row["why_not"] is not None:
            refused.append((row["change"], row["why_not"]))
            continue
        sign = "-" if row["freed_bytes"] < 0 else ""
        slower = row["slower_s"]
        rows.append(
            (
                row["change"],
                f"{sign}{human_bytes(abs(row['freed_bytes']))}",
                human_bytes(row["peak_bytes"]),
                "fits" if row["fits"] else "",
                "-" if slower is None else f"{slower:+.3g} s",
            )
        )
    peak = human_bytes(asked.peak.total_bytes)
    budget = human_bytes((asked.cluster.budget_bytes if asked.cluster else None) or 0)
    verdict = "fits" if asked.fits else "does not fit"
    parts = [f"{cut(plan_text(asked), WIDTH)}\n{verdict}: {peak} of {budget}.", text_table(rows, "<>><>")]
    if refused:
        parts.append(text_table([("cannot run", "because"), *refused], "<<", flexible=1))
    if advice.best is None:
        parts.append("No combination of them fits; use more GPUs, a shorter sequence, or a smaller model.")
    elif not asked.fits:
        best = f"{plan_text(advice.best)}: {human_bytes(advice.best.peak.total_bytes)}"
        parts.append(f"Fastest combination that fits\n{cut(best, WIDTH)}")
    return "\n\n".join(parts)
