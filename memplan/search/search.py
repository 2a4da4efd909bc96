"""`memplan.search`: what should be run on a cluster."""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np

from memplan.checks import checked_choice, checked_count, checked_flag
from memplan.errors import InvalidValue, PlanRefused, shown_value, unknown_name
from memplan.estimate import device_of
from memplan.hardware import Cluster, resolve_cluster
from memplan.models import Model, resolve
from memplan.plan import RECOMPUTES, SCHEDULES, Plan
from memplan.search.best import Rows, best, front, taken
from memplan.search.plans import VARIED, Plans
from memplan.search.space import RUNS, Chunk, Space, divisors
from memplan.search.table import search_frame
from memplan.steptime import Roofline

if TYPE_CHECKING:
    import pandas

OBJECTIVES: Final = {
    "speed": ("step_s",),
    "memory": ("peak_bytes", "step_s"),
    "micro_batch": ("minus_micro_batch", "step_s", "peak_bytes"),
    "front": ("step_s", "peak_bytes"),
}
"""What is least in the best plan, and of equal ones: the time of a step (so most tokens per second), ..."""

KEEP: Final = 100
"""Plans of each verdict that a search keeps unless told otherwise."""

Progress = Callable[[int], None]
"""Told now and then how many plans have been seen."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search found: the best plans that fit, the nearest that do not, the first that are refused.

    `n_fit`, `n_too_large` and `n_refused` count all there are; `refused_by` how many each rule refused, by
    its text for the first of them.
    """

    model: Model
    cluster: Cluster
    base: Plan
    fit: Rows
    too_large: Rows
    refused: Rows
    n_fit: int
    n_too_large: int
    n_refused: int
    refused_by: Mapping[str, int] = field(default_factory=dict)

    @property
    def n_plans(self) -> int:
        """All of them."""
        return self.n_fit + self.n_too_large + self.n_refused

    def values(self, rows: Rows, i: int) -> dict[str, Any]:
        """The varied fields of one of the rows."""
        return self._plans(rows).values(i)

    def plan(self, rows: Rows, i: int) -> Plan:
        """The plan of one of the rows."""
        return self._plans(rows).plan(i)

    def _plans(self, rows: Rows) -> Plans:
        return Plans(base=self.base, columns={name: rows[name] for name in VARIED})

    def frame(self) -> "pandas.DataFrame":
        """One row per plan kept, best first: see `search`."""
        return search_frame(self)


def search(
    model: Model | str | os.PathLike[str],
    *,
    cluster: Cluster | str,
    global_batch: int,
    seq_len: int | None = None,
    objective: str = "speed",
    keep: int | None = KEEP,
    progress: Progress | None = None,
    **options: Any,
) -> "pandas.DataFrame":
    """Every plan that the cluster's GPUs can run, best first.

    Args:
        model: a preset's name, the path of a Hugging Face config.json, or a Model.
        cluster: "<n>x<gpu>" or a Cluster: all of its GPUs are used.
        global_batch: sequences per step.
        seq_len: tokens per sequence; left out, the model's context.
        objective: "speed" (most tokens per second), "memory" (least peak), "micro_batch" (largest), or
            "front" (all plans that none beats in both speed and memory).
        keep: so many of the best plans that fit, of the nearest that do not, and of the refused ones;
            None: all.
        progress: called now and then with the number of plans seen.
        options: fields of `memplan.Plan`. Those that a search varies (`dp`, `dp_replicate`, `tp`, `pp`,
            `virtual_stages`, `zero`, `sequence_parallel`, `micro_batch`, `recompute`, `recompute_blocks`,
            `schedule`, `offload`) take one value or several and all that make a difference if left out
            (`recompute_blocks`: None); the others one value.

    Returns:
        A frame with a row per plan: the varied fields; `verdict` ("fits", "too large", "refused") and `why`
        not; `peak_bytes`, `over_bytes` (beyond the cluster's budget), `rest_bytes`, `worst_stage`, `when`;
        `step_s`, `tokens_per_s`, `tokens_per_s_per_gpu`, `mfu` (rough: `memplan.steptime`). Equally good
        plans stand with the simpler first. `attrs` has the numbers of plans: `n_plans`, `n_fit`,
        `n_too_large`, `n_refused`, and `refused_by`, how many each rule refused.

    Raises:
        MemplanError: a value that is not allowed, with a way out.
    """
    return searched(
        model,
        cluster=cluster,
        global_batch=global_batch,
        seq_len=seq_len,
        objective=objective,
        keep=keep,
        progress=progress,
        **options,
    ).frame()


def searched(
    model: Model | str | os.PathLike[str],
    *,
    cluster: Cluster | str,
    global_batch: int,
    seq_len: int | None = None,
    objective: str = "speed",
    keep: int | None = KEEP,
    progress: Progress | None = None,
    **options: Any,
) -> Found:
    """As `search`, without pandas.

    Raises:
        MemplanError: as `search`.
    """
    model, where = resolve(model), resolve_cluster(cluster)
    if where is None:
        raise InvalidValue("cluster=None is nothing to search; use '<n>x<gpu>', as in 64xh100-sxm.")
    checked_choice("objective", objective, tuple(OBJECTIVES))
    keep = None if keep is None else checked_count("keep", keep)
    asked = {name: options.pop(name, None) for name in VARIED}
    ranges = {name: values_of(name, value) for name, value in asked.items() if value is not None}
    space = Space(
        model=model,
        n_gpus=where.n_gpus,
        base=common(
            global_batch=checked_count("global_batch", global_batch),
            seq_len=model.max_seq_len if seq_len is None else seq_len,
            **options,
        ),
        ranges=ranges,
    )
    missing = Roofline().missing(space.base, where)
    if missing and OBJECTIVES[objective][0] == "step_s":
        raise InvalidValue(
            f"objective={objective!r} needs the time of a step, but {missing[0]}; use objective='memory', or "
            "another cluster."
        )
    return _run(space, where, objective, keep, progress)


def _run(
    space: Space, cluster: Cluster, objective: str, keep: int | None, progress: Progress | None
) -> Found:
    keys = OBJECTIVES[objective]
    fit = front(*keys) if objective == "front" else best(keep, *keys)
    too_large, refused = best(keep, "over_bytes"), best(keep, "place")
    counts: dict[int, int] = {}
    n_seen = 0
    for chunk in space.chunks():
        runs = chunk.rule == RUNS
        rows = evaluated(space.model, chunk.plans[runs], cluster)
        fits = rows["over_bytes"] == 0
        fit.add(taken(rows, fits))
        too_large.add(taken(rows, ~fits))
        refused.add(_refused_rows(chunk, n_seen))
        for rule, n in zip(*np.unique(chunk.rule[~runs], return_counts=True), strict=True):
            counts[int(rule)] = counts.get(int(rule), 0) + int(n)
        n_seen += len(chunk)
        if progress is not None:
            progress(n_seen)
    texts = list(space.rules)
    return Found(
        model=space.model,
        cluster=cluster,
        base=space.base,
        fit=fit.rows,
        too_large=too_large.rows,
        refused=refused.rows,
        n_fit=fit.n_seen,
        n_too_large=too_large.n_seen,
        n_refused=refused.n_seen,
        refused_by={texts[rule]: n for rule, n in sorted(counts.items(), key=lambda item: -item[1])},
    )


def evaluated(model: Model, plans: Plans, cluster: Cluster) -> dict[str, Any]:
    """The plans' fields and figures as columns; `over_bytes` beyond the cluster's budget (0: they fit).

    Only the steps of plans that fit are timed; the others take infinitely long.
    """
    from memplan.search.evaluate import memory  # only a search needs them
    from memplan.search.time import step_s

    held = memory(model, plans, device_of(cluster))
    budget_bytes = cluster.budget_bytes
    spare_bytes = 0 if budget_bytes is None else budget_bytes - held.peak_bytes
    fits = np.broadcast_to(spare_bytes >= 0, len(plans))
    seconds = np.full(len(plans), inf)
    seconds[fits] = step_s(model, plans[fits], cluster)
    return {
        **plans.columns,
        "peak_bytes": held.peak_bytes,
        "worst_stage": held.worst_stage,
        "rest_bytes": held.rest_bytes,
        "over_bytes": np.broadcast_to(np.maximum(0, np.negative(spare_bytes)), len(plans)),
        "minus_micro_batch": -plans.columns["micro_batch"],
        "step_s": seconds,
    }


def _refused_rows(chunk: Chunk, n_before: int) -> dict[str, Any]:
    places = np.flatnonzero(chunk.rule != RUNS)
    return dict(chunk.plans[places].columns) | {"place": places + n_before}


def values_of(name: str, asked: Any) -> tuple[Any, ...]:
    """What was asked of a varied field: one value or several, each checked, each once.

    >>> values_of("tp", [1, 2, 2]), values_of("recompute", "full"), values_of("pp", range(1, 3))
    ((1, 2), ('full',), (1, 2))

    Raises:
        InvalidValue, UnknownName: a value of the wrong type, or none at all.
    """
    several = isinstance(asked, Iterable) and not isinstance(asked, str)
    values = tuple(dict.fromkeys(asked)) if several else (asked,)
    if not values:
        raise InvalidValue(f"{name}={shown_value(asked)} leaves nothing to try; name at least one value.")
    return tuple(_checked(name, value) for value in values)


def _checked(name: str, value: Any) -> Any:
    match name:
        case "schedule":
            return checked_choice(name, value, SCHEDULES)
        case "recompute":
            return checked_choice(name, value, RECOMPUTES)
        case "offload" | "sequence_parallel":
            return checked_flag(name, value)
        case "zero":
            return checked_count(name, value, least=0, most=3)
        case "recompute_blocks" if value is None:
            return None
        case _:
            return checked_count(name, value)


def common(*, global_batch: int, **options: Any) -> Plan:
    """A plan with these options: what all plans of a search have in common.

    DDP's and FSDP2's options need a plan that uses them, which is what they are given here; the search
    varies those fields anyway.

    Raises:
        MemplanError: a name that is no field of a plan, or a value that no plan can have.
    """
    for name in options:
        if name not in Plan.__dataclass_fields__ or name == "engine":
            raise unknown_name("option of a plan", name, [*Plan.__dataclass_fields__])
    several = next((n for n in divisors(global_batch) if n > 1), 1)
    refusals = []
    tools: tuple[dict[str, Any], ...] = {}, {"zero": 3}, {"dp": several}
    for tool in tools:
        try:
            return Plan(global_batch=global_batch, **options, **tool)
        except PlanRefused as refusal:
            refusals.append(refusal)
    raise refusals[0]
