"""What a search found, and what is advised, for a terminal of 80 columns."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final

from memplan.layout import interval_text, margin_text, printable, text_table, wrapped
from memplan.search.advise import Advice
from memplan.search.command import command_text, estimate_command
from memplan.search.search import Found
from memplan.search.table import search_rows
from memplan.search.why import plan_text
from memplan.tables import cluster_text, notes_text, verdict_text
from memplan.units import human_bytes

SHOWN: Final = 10
"""Plans of each verdict, and kinds of refused plans, that are printed unless told otherwise."""

MESH: Final = ("pp", "dp_replicate", "dp", "tp")

HEADINGS: Final = {
    "fits": "Best of those that fit",
    None: "Best",
    "cannot say": "Cannot say whether these fit",
    "does not fit": "Nearest of those that do not fit",
}

ROUGH: Final = "Times are rough: a roofline that no run has confirmed."


def search_text(found: Found, model: str | None = None, most: int | None = None) -> str:
    """The plans kept: the best, or the nearest if none fits; what kinds were refused; and what to type.

    `model`: how the model was named on the command line; `most`: plans of each verdict, None: all.
    """
    rows = list(search_rows(found, model))
    parts = [_head(found)]
    fit = any(row["verdict"] in ("fits", None) for row in rows)
    shown: list[dict[str, Any]] = []
    for verdict, heading in HEADINGS.items():
        chosen = [row for row in rows if row["verdict"] == verdict]
        if chosen and not (fit and verdict == "does not fit"):
            first = chosen[:most]
            parts.append(f"{heading}\n{_plans(first, len(shown) + 1)}")
            if more := len(chosen) - len(first):
                parts.append(f"{more} more of these are kept: see to_frame().")
            shown += first
    if not fit and shown:
        parts.append(wrapped(f"Plan 1: {shown[0]['why']}."))
    if found.refused_by:
        parts.append(_refusals(found.refused_by))
    parts += notes_text(found.model, found.base)
    if any(row["step_s"] is not None for row in rows):
        parts.append(ROUGH)
    if commands := "\n".join(_commands(shown)):
        parts.append(f"Each plan in full\n{commands}")
    return "\n\n".join(parts)


def _head(found: Found) -> str:
    cluster, base = found.cluster, found.base
    lines = [
        f"{printable(found.model.name)} on {printable(cluster.name)}, {base.global_batch} x {base.seq_len} "
        f"tokens a step: {found.n_plans:,} plans",
        cluster_text(cluster),
    ]
    refused = f"{found.n_refused:,} are refused"
    if cluster.budget_bytes is None:
        lines.append(f"{found.n_within:,} run, {refused}; CPU ranks have no limit.")
    else:
        budget = f"{human_bytes(cluster.budget_bytes)} ({human_bytes(cluster.gpu.usable_bytes or 0)} usable, "
        budget += f"{margin_text(cluster.margin)})"
        lines.append(
            f"{found.n_within:,} stay within {budget} by what they allocate, {found.n_beyond:,} do not, "
            f"{refused}."
        )
    if found.n_slower:
        lines.append(
            f"{found.n_slower:,} were left out without an estimate: by a bound they are worse than the plans "
            "below."
        )
    return "\n".join(map(wrapped, lines))


def _plans(rows: Sequence[Mapping[str, Any]], first: int) -> str:
    hybrid = any(row["dp_replicate"] > 1 for row in rows)
    mesh = MESH if hybrid else tuple(axis for axis in MESH if axis != "dp_replicate")
    heads = {"dp_replicate": "rep"}
    limited = any(row["device_low_bytes"] is not None for row in rows)
    holds = "a GPU holds" if limited else "peak"
    cells: list[tuple[str, ...]] = [
        (
            "#",
            *(heads.get(axis, axis) for axis in mesh),
            "zero",
            "mb",
            "schedule",
            "options",
            holds,
            "tok/s/GPU",
        )
    ]
    for number, row in enumerate(rows, start=first):
        speed = row["tokens_per_s_per_gpu"]
        held = row["device_low_bytes"], row["device_high_bytes"]
        cells.append(
            (
                str(number),
                *(str(row[axis]) for axis in mesh),
                str(row["zero"]),
                str(row["micro_batch"]),
                _schedule(row),
                _options(row),
                interval_text(held).replace(" to ", "-") if limited else human_bytes(row["peak_bytes"]),
                "-" if speed is None else f"{speed:,.0f}",
            )
        )
    return text_table(cells, ">" * (len(mesh) + 3) + "<<>>", flexible=len(mesh) + 4)


def _schedule(row: Mapping[str, Any]) -> str:
    if row["pp"] == 1:
        return "-"
    virtual_stages = f" x{row['virtual_stages']}" if row["virtual_stages"] > 1 else ""
    return f"{row['schedule']}{virtual_stages}"


def _options(row: Mapping[str, Any]) -> str:
    parts = ["sp"] if row["sequence_parallel"] else []
    if row["recompute"] != "none":
        blocks = row["recompute_blocks"]
        parts.append(row["recompute"] + ("" if blocks is None else f" of {blocks}"))
    return " ".join(parts + ["offload"] * row["offload"]) or "-"


def _commands(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    width = len(str(len(rows)))
    for number, row in enumerate(rows, start=1):
        if row["command"] is not None:
            yield command_text(row["command"], head=f"{number:>{width}}  ")


def _refusals(refused_by: Mapping[str, int]) -> str:
    rows = [("refused", "plans of this kind")]
    rows += [(f"{n:,}", text) for text, n in islice(refused_by.items(), SHOWN)]
    if len(refused_by) > SHOWN:
        n_others = sum(islice(refused_by.values(), SHOWN, None))
        rows.append((f"{n_others:,}", f"{len(refused_by) - SHOWN} more kinds"))
    return text_table(rows, "><", flexible=1)


def advice_text(advice: Advice, model: str | None = None) -> str:
    """Each change with what it frees and costs, then a combination that fits.

    `model`: how the model was named on the command line.
    """
    asked = advice.asked
    rows = [("change", "frees", "peak", "verdict", "a step takes")]
    refused = []
    for row in advice.rows():
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
                row["verdict"],
                "unknown" if slower is None else f"{slower:+.3g} s",
            )
        )
    parts = [
        f"{wrapped(plan_text(asked))}\n{wrapped(verdict_text(asked))}",
        text_table(rows, "<>><>", flexible=0),
    ]
    if refused:
        parts.append(text_table([("cannot run", "because"), *refused], "<<", flexible=1))
    if advice.best is None:
        parts.append(wrapped(NONE_FITS))
    elif advice.best is not asked:
        heading = "Fastest combination found that fits"
        if advice.best.step_s is None:
            heading = f"A combination that fits; its time is not known: {'; '.join(advice.best.time_missing)}"
        parts.append("\n".join(map(wrapped, (heading, plan_text(advice.best), verdict_text(advice.best)))))
    if (command := estimate_command(advice.best or asked, model)) is not None:
        parts.append(command_text(command))
    return "\n\n".join(parts)


NONE_FITS: Final = (
    "No combination of them was found that fits for sure; use more GPUs, a shorter sequence, or a smaller "
    "model."
)
