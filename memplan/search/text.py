"""What a search found, for a terminal of 80 columns."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final

from memplan.command import command_text
from memplan.comparison import TIE
from memplan.engines.options import plan_dict
from memplan.mesh import AXES, VIEWS, axis_names
from memplan.search.search import Found
from memplan.search.table import estimated_rows, search_rows
from memplan.tables import cluster_text, counted_in, notes_text, step_text
from memplan.text_tables import interval_text, margin_text, printable, text_table, wrapped
from memplan.units import human_bytes

SHOWN: Final = 3
"""Plans that are printed by default."""

MOST_REFUSALS: Final = 10
"""Kinds of refusals that are printed."""

JOB: Final = {"global_batch": "batch", "seq_len": "tokens"}

HEADINGS: Final = {
    "fits": "Best of those that fit",
    None: "Best",
    "fits, tight": "These fit tightly: only if cached blocks are given back, which takes time",
    "cannot say": "Cannot say whether these fit",
    "does not fit": "Nearest of those that do not fit",
}

TIED: Final = (
    f"A plan marked = ties with the first one above it without the mark (within {TIE:.0%}); of a tie, the "
    "plan that holds least stands first."
)


def search_text(
    found: Found, model: str | None = None, *, most: int | None = SHOWN, in_full: bool = False
) -> str:
    """The text of a search: the best plans, or the nearest if none fits, and the command of the first one.

    `model`: how the model was named on the command line; `most`: plans that are shown, None: all that are
    kept; `in_full`: also each plan's command, and how many plans are refused and why.
    """
    kept = list(estimated_rows(found, model))
    parts = [_head(found)]
    fit = any(row["verdict"] in ("fits", "fits, tight", None) for _, row in kept)
    wanted = [(each, row) for each, row in kept if not (fit and row["verdict"] == "does not fit")]
    chosen = wanted[:most]
    rows = [row for _, row in chosen]
    first = 1
    for verdict, heading in HEADINGS.items():
        if own := [row for row in rows if row["verdict"] == verdict]:
            parts.append(f"{heading}\n{_plans(own, first, found)}")
            first += len(own)
    if not fit and rows:
        parts.append(wrapped(f"Plan 1: {rows[0]['why']}."))
    if found.refused_by and in_full:
        parts.append(_refusals(found.refused_by))
    parts += notes_text({str(number): each for number, (each, _) in enumerate(chosen, start=1)})
    if any(row["step_s"] is not None for row in rows):
        times = wrapped(found.time_model.label)
        parts.append(f"{times}\n{wrapped(TIED)}" if _has_ties(rows) else times)
    if len(wanted) > len(chosen):
        parts.append(f"{len(wanted) - len(chosen)} more are kept: see --all, or to_frame() in Python.")
    if in_full and (commands := "\n".join(_commands(rows))):
        parts.append(f"Each plan in full\n{commands}")
    elif rows and rows[0]["command"] is not None:
        parts.append(command_text(rows[0]["command"], head="Next: "))
    return "\n\n".join(parts)


def nothing_runs(found: Found) -> str:
    """Why no plan can run, in a sentence; empty if one can."""
    if found.n_refused < found.n_plans:
        return ""
    why = next((row["why"] for row in search_rows(found)), "")
    return f"none of {found.n_plans:,} plans can run; the first: {why}"


def _has_ties(rows: Sequence[Mapping[str, Any]]) -> bool:
    ties = [(row["verdict"], row["tie"]) for row in rows if row["tie"] is not None]
    return len(set(ties)) < len(ties)


def _head(found: Found) -> str:
    cluster = found.cluster
    said = [plan_dict(job) for job in found.jobs]
    values = {name: list(dict.fromkeys(each[name] for each in said)) for name in (*JOB, *found.different)}
    step = step_text(values["global_batch"], values["seq_len"])
    others = "".join(
        [f", {name}={' or '.join(map(str, own))}" for name, own in values.items() if name not in JOB]
    )
    lines = [
        f"{printable(found.model.name)} on {printable(cluster.name)}, {step} a step{others}: "
        f"{found.n_plans:,} plans",
        cluster_text(cluster),
    ]
    refused = f"{found.n_refused:,} are refused"
    if cluster.budget_bytes is None:
        lines.append(f"{found.n_within:,} run, {refused}; no limit is known of a rank's memory.")
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
    return "\n".join(map(wrapped, [*lines, *found.left_out]))


def _plans(rows: Sequence[Mapping[str, Any]], first: int, found: Found) -> str:
    known = {axis: AXES.named(axis) for axis in axis_names() if axis in rows[0]}
    divided = {axis for row in rows for axis in known if row[axis] > 1}
    mesh = [axis for axis, own in known.items() if axis in divided or not own.hidden_if_one]
    views = [view for view in VIEWS if view in rows[0] and any(row[view] > 1 for row in rows)]
    several = [name for name in JOB if len({row[name] for row in rows}) > 1]
    others = [name for name in found.different if name not in JOB]
    counted = counted_in(max(job.seq_len for job in found.jobs))
    limited = any(row["device_low_bytes"] is not None for row in rows)
    holds = "a GPU holds" if limited else "peak"
    cells: list[tuple[str, ...]] = [
        (
            "#",
            *(known[axis].word or axis for axis in mesh),
            *views,
            *(JOB[name] for name in several),
            "zero",
            "mb",
            "schedule",
            "options",
            holds,
            f"{counted.replace('tokens', 'tok')}/s/GPU",
        )
    ]
    for number, row in zip(_numbered(rows, first), rows, strict=True):
        speed = row["tokens_per_s_per_gpu"]
        held = row["device_low_bytes"], row["device_high_bytes"]
        cells.append(
            (
                number,
                *(str(row[axis]) for axis in (*mesh, *views)),
                *(str(row[name]) for name in several),
                str(row["zero"]),
                str(row["micro_batch"]),
                _schedule(row),
                _options(row, others),
                interval_text(held).replace(" to ", "-") if limited else human_bytes(row["peak_bytes"]),
                "-" if speed is None else f"{speed:,.0f}",
            )
        )
    n_numbers = len(mesh) + len(views) + len(several) + 3
    return text_table(cells, ">" * n_numbers + "<<>>", flexible=[n_numbers, n_numbers + 1])


def _numbered(rows: Sequence[Mapping[str, Any]], first: int) -> list[str]:
    """The numbers of rows, with a mark on a row that ties with the one above."""
    above = [None, *(row["tie"] for row in rows)]
    tied = [row["tie"] is not None and row["tie"] == tie for row, tie in zip(rows, above, strict=False)]
    blank = " " * any(tied)
    return [f"{i}{'=' if same else blank}" for i, same in enumerate(tied, start=first)]


def _schedule(row: Mapping[str, Any]) -> str:
    if row["pp"] == 1:
        return "-"
    virtual_stages = f" x{row['virtual_stages']}" if row["virtual_stages"] > 1 else ""
    return f"{row['schedule']}{virtual_stages}"


def _options(row: Mapping[str, Any], others: Sequence[str]) -> str:
    parts = ["sp"] if row["sequence_parallel"] else []
    parts += [_option(name, row[name]) for name in others]
    if row["recompute"] != "none":
        blocks = row["recompute_blocks"]
        parts.append(row["recompute"] + ("" if blocks is None else f" of {blocks}"))
    return " ".join(parts + ["offload"] * row["offload"]) or "-"


def _option(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return name if value else f"no {name}"
    return value if isinstance(value, str) else f"{name}={value}"


def _commands(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    width = len(str(len(rows)))
    for number, row in enumerate(rows, start=1):
        if row["command"] is not None:
            yield command_text(row["command"], head=f"{number:>{width}}  ")


def _refusals(refused_by: Mapping[str, int]) -> str:
    rows = [("refused", "plans of this kind")]
    rows += [(f"{n:,}", text) for text, n in islice(refused_by.items(), MOST_REFUSALS)]
    if len(refused_by) > MOST_REFUSALS:
        n_others = sum(islice(refused_by.values(), MOST_REFUSALS, None))
        rows.append((f"{n_others:,}", f"{len(refused_by) - MOST_REFUSALS} more kinds"))
    return text_table(rows, "><", flexible=[1])
