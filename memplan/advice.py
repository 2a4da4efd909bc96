"""Changes for a plan that does not fit, each with the bytes that it frees and the time that it costs."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, Any, Final, final

from memplan.checks import divisors
from memplan.command import command_text, estimate_command, plan_values
from memplan.comparison import plan_text
from memplan.engines.options import plan_dict, with_said
from memplan.errors import InvalidValue, MemplanError, PlanRefused, shown_value
from memplan.estimate import Estimate, estimate_plan
from memplan.plan import RECOMPUTES, Plan
from memplan.search.alternatives import alternatives_text
from memplan.search.options import Progress
from memplan.search.search import searched
from memplan.tables import figures_of, headline, notes_text, verdict_text
from memplan.text_tables import frame, html_text, text_table, wrapped
from memplan.time.step import time_model_of
from memplan.units import in_unit, table_unit
from memplan.version import versioned

if TYPE_CHECKING:
    import pandas

COLUMNS: Final = (
    "change",
    "freed_bytes",
    "peak_bytes",
    "verdict",
    "device_low_bytes",
    "device_high_bytes",
    "step_s",
    "slower_s",
    "why_not",
    "command",
)

KEEP: Final = 10
"""Combinations that are kept to find one that fits."""

NONE_FITS: Final = "No combination of them was found that fits for sure."


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change of a plan; without an estimate where it cannot run: `why_not`."""

    text: str
    estimated: Estimate | None = None
    why_not: str | None = None


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class Advice:
    """Changes of a plan, the cheapest first, and the best combination found that fits, if any."""

    asked: Estimate
    changes: tuple[Change, ...]
    best: Estimate | None

    def to_frame(self) -> "pandas.DataFrame":
        """One row per change: the bytes it frees at the peak, the verdict then, what it costs a step."""
        return frame(self.rows(), COLUMNS)

    def rows(self, model: str | None = None) -> list[dict[str, Any]]:
        """The changes as plain values; `model`: how the model was named on the command line."""
        return [self._row(change, model) for change in self.changes]

    def _row(self, change: Change, model: str | None) -> dict[str, Any]:
        row: dict[str, Any] = dict.fromkeys(COLUMNS) | {"change": change.text, "why_not": change.why_not}
        if change.estimated is None:
            return row
        after, before = change.estimated, self.asked
        return row | {
            "freed_bytes": _freed_bytes(before, after),
            **figures_of(after),
            "slower_s": _slower_s(before, after),
            "command": estimate_command(after, model),
        }

    def to_dict(self, model: str | None = None) -> dict[str, Any]:
        """Plain values, as `--json` prints them; `model`: how the model was named on the command line."""
        best = None
        if self.best is not None:
            best = self.best.to_dict() | {"command": estimate_command(self.best, model)}
        return versioned({"asked": self.asked.to_dict(), "changes": self.rows(model), "best": best})

    def __str__(self) -> str:
        return advice_text(self)

    def __repr__(self) -> str:
        best = "no combination found that fits" if self.best is None else f"best: {self.best!r}"
        return f"<Advice on {self.asked!r}: {len(self.changes)} changes, {best}>"

    def _repr_html_(self) -> str:
        return html_text(str(self))


def advise(asked: Estimate, progress: Progress | None = None) -> Advice:
    """The changes that save memory in a plan that was estimated for a cluster, in order of cost.

    The changes are those that people are told when memory is short: a smaller micro-batch, gradients reduced
    in each, recomputation, the next ZeRO stages, sequence parallelism, more tensor or pipeline ranks (fewer
    replicas), offload.
    Each alone first; then the fastest that is found among all their combinations and fits. `progress` is
    called now and then with the number of combinations seen.

    Raises:
        InvalidValue: a value that is no estimate.
        PlanRefused: an estimate without a cluster that has a limit.
    """
    if not isinstance(asked, Estimate):
        raise InvalidValue(
            f"asked={shown_value(asked)} is no estimate; use memplan.advise(memplan.estimate(...))."
        )
    if asked.verdict is None:
        other = ", and an engine other than closed-form accounting" if asked.engine.is_accounting else ""
        raise PlanRefused(f"advise needs a limit to fit; estimate the plan with cluster='<n>x<gpu>'{other}.")
    changes = [_tried(asked, text, fields) for text, fields in _single_changes(asked.plan)]
    useful = [c for c in changes if c.estimated is not None and _freed_bytes(asked, c.estimated) > 0]
    rest = [c for c in changes if c not in useful]
    return Advice(
        asked=asked,
        changes=(*sorted(useful, key=lambda c: _cost(asked, c)), *rest),
        best=asked if asked.verdict == "fits" else _best(asked, progress),
    )


def _freed_bytes(before: Estimate, after: Estimate) -> int:
    return before.peak.total_bytes - after.peak.total_bytes


def _slower_s(before: Estimate, after: Estimate) -> float | None:
    a, b = before.step_s, after.step_s
    return None if a is None or b is None else b - a


def _cost(asked: Estimate, change: Change) -> tuple[float, int]:
    """The sort key: seconds added to a step, unknown ones last; then the most bytes freed."""
    after = change.estimated
    if after is None:
        return inf, 0
    slower_s = _slower_s(asked, after)
    return inf if slower_s is None else slower_s, -_freed_bytes(asked, after)


def _single_changes(plan: Plan) -> Iterator[tuple[str, dict[str, Any]]]:
    if _keeps_whole_gradients(plan):
        yield "no_sync=False", {"no_sync": False}
    if plan.world_size == 1 and plan_dict(plan).get("optimizer_in_backward") is False:
        yield "optimizer_in_backward", {"optimizer_in_backward": True}
    if plan.micro_batch > 1:
        smaller = divisors(plan.micro_batch)[-2]
        yield f"micro_batch={smaller}", {"micro_batch": smaller}
    for recompute in RECOMPUTES[RECOMPUTES.index(plan.recompute) + 1 :]:
        yield f"recompute={recompute}", {"recompute": recompute}
    if plan.n_replicas > 1:
        for zero in range(plan.zero + 1, 4):
            yield f"zero={zero}", {"zero": zero}
    if plan.tp > 1 and not plan.sequence_parallel:
        yield "sequence_parallel", {"sequence_parallel": True}
    if plan.dp % 2 == 0:
        yield f"tp={2 * plan.tp}, dp={plan.dp // 2}", {"tp": 2 * plan.tp, "dp": plan.dp // 2}
        yield f"pp={2 * plan.pp}, dp={plan.dp // 2}", {"pp": 2 * plan.pp, "dp": plan.dp // 2}
    if not plan.offload:
        yield "offload" if plan.fsdp else "zero=3, offload", {"zero": max(plan.zero, 3), "offload": True}


def _keeps_whole_gradients(plan: Plan) -> bool:
    """Whether FSDP accumulates whole gradients of several micro-batches."""
    return bool(plan_dict(plan).get("no_sync")) and plan.n_micro_batches > 1


def _tried(asked: Estimate, text: str, fields: dict[str, Any]) -> Change:
    try:
        estimated = estimate_plan(asked.model, with_said(asked.plan, **fields), asked.cluster)
    except MemplanError as refusal:
        return Change(text=text, why_not=str(refusal))
    return Change(text=text, estimated=estimated)


def _best(asked: Estimate, progress: Progress | None) -> Estimate | None:
    """The fastest plan found that fits and changes only what is advised; without rates, the smallest."""
    plan, where = asked.plan, asked.cluster
    if where is None:
        return None
    others = {name: value for name, value in plan_values(plan).items() if name not in ("dp", "dp_replicate")}
    varied = {
        "tp": [n for n in divisors(plan.tp * plan.dp) if n % plan.tp == 0],
        "pp": [n for n in divisors(plan.pp * plan.dp) if n % plan.pp == 0],
        "dp_replicate": plan.dp_replicate,
        "zero": list(range(plan.zero, 4)),
        "sequence_parallel": [True] if plan.sequence_parallel else None,
        "micro_batch": divisors(plan.micro_batch),
        "recompute": RECOMPUTES[RECOMPUTES.index(plan.recompute) :],
        "schedule": plan.schedule,
        "offload": [True] if plan.offload else None,
        "no_sync": [False, True] if _keeps_whole_gradients(plan) else None,
        "tp_across_nodes": where.gpus_per_node % plan.tp != 0,
    }
    chosen = others | {name: value for name, value in varied.items() if value is not None}
    if asked.step_s is None and time_model_of(where).missing(replace(plan, offload=False), where):
        chosen["objective"] = "memory"
    found = searched(asked.model, cluster=where, keep=KEEP, progress=progress, **chosen).fitting
    return None if found is None else found.best


def advice_text(advice: Advice, model: str | None = None) -> str:
    """Each change with what it frees and costs, then a combination that fits.

    `model`: how the model was named on the command line.
    """
    asked = advice.asked
    changes = advice.rows()
    unit, name = table_unit([row["peak_bytes"] or 0 for row in changes])
    rows = [("change", f"frees {name}", f"peak {name}", "verdict", "a step takes")]
    refused = []
    for row in changes:
        if row["why_not"] is not None:
            refused.append((row["change"], row["why_not"]))
            continue
        sign = "-" if row["freed_bytes"] < 0 else ""
        slower = row["slower_s"]
        rows.append(
            (
                row["change"],
                f"{sign}{in_unit(abs(row['freed_bytes']), unit)}",
                in_unit(row["peak_bytes"], unit),
                row["verdict"],
                "unknown" if slower is None else f"{slower:+.3g} s",
            )
        )
    parts = [
        f"{headline(asked)}\n{wrapped(plan_text(asked))}",
        text_table(rows, "<>><>", flexible=[0]),
    ]
    if refused:
        parts.append(text_table([("cannot run", "because"), *refused], "<<", flexible=[1]))
    if advice.best is None:
        parts.append(wrapped(NONE_FITS))
        if asked.cluster is not None:
            parts.append(alternatives_text(asked.model, asked.cluster, asked.plan, model))
    elif advice.best is not asked:
        heading = "Fastest combination found that fits"
        if advice.best.step_s is None:
            heading = f"A combination that fits; its time is not known: {'; '.join(advice.best.time_missing)}"
        parts.append("\n".join(map(wrapped, (heading, plan_text(advice.best), verdict_text(advice.best)))))
    shown = {"asked for": asked} | ({} if advice.best is None else {"that fits": advice.best})
    parts += notes_text(shown, "the plan")
    if advice.best is not None and (command := estimate_command(advice.best, model)) is not None:
        parts.append(command_text(command))
    return "\n\n".join(parts)
