"""`memplan.search`: what should be run on a cluster."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from math import inf
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from memplan.checks import checked_choice, checked_count, checked_flag
from memplan.errors import InvalidValue, PlanRefused, shown_value, unknown_name
from memplan.estimate import device_of
from memplan.hardware import Cluster, resolve_cluster
from memplan.models import Model, resolve
from memplan.plan import RECOMPUTES, SCHEDULES, Plan
from memplan.search.best import Kept, Rows, best, front
from memplan.search.plans import VARIED, Figures, Grid, Plans
from memplan.search.processes import in_processes, n_cores, uncollected
from memplan.search.rules import RUNS
from memplan.search.space import Ruled, Space, divisors
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

QUESTIONS: Final = ("gpus", "seq_len")
"""Objectives that take several searches: the fewest GPUs, the longest sequence."""

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
    workers: int | None = 1,
    **options: Any,
) -> "pandas.DataFrame":
    """Every plan that the cluster's GPUs can run, best first.

    Args:
        model: a preset's name, the path of a Hugging Face config.json, or a Model.
        cluster: "<n>x<gpu>" or a Cluster: all of its GPUs are used, unless the fewest are asked for.
        global_batch: sequences per step.
        seq_len: tokens per sequence; left out, the model's context.
        objective: "speed" (most tokens per second), "memory" (least peak), "micro_batch" (largest), or
            "front" (all plans that none beats in both speed and memory). Or what else is to be found, then
            with the fastest plans for it, of micro-batches of 1 unless told otherwise: "gpus" (the fewest of
            the cluster that suffice: some of a node's, or whole nodes), "seq_len" (the longest sequence).
        keep: so many of the best plans that fit, of the nearest that do not, and of the refused ones;
            None: all.
        progress: called now and then with the number of plans seen.
        workers: processes that share the work, None: one per core; several need `memplan[parallel]`.
        options: fields of `memplan.Plan`. Those that a search varies (`dp`, `dp_replicate`, `tp`, `pp`,
            `virtual_stages`, `zero`, `sequence_parallel`, `micro_batch`, `recompute`, `recompute_blocks`,
            `schedule`, `offload`) take one value or several and all that make a difference if left out
            (`recompute_blocks`: None); the others one value.

    Returns:
        A frame with a row per plan: the varied fields; `verdict` ("fits", "too large", "refused") and `why`
        not; `peak_bytes`, `over_bytes` (beyond the cluster's budget), `rest_bytes`, `worst_stage`, `when`;
        `step_s`, `tokens_per_s`, `tokens_per_s_per_gpu`, `mfu` (rough: `memplan.steptime`). Equally good
        plans stand with the simpler first. `attrs` has the numbers of plans: `n_plans`, `n_fit`,
        `n_too_large`, `n_refused`, and `refused_by`, how many each rule refused; `cluster` and `seq_len`.

    Raises:
        PlanRefused: no plan fits, where the fewest GPUs or the longest sequence are asked for.
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
        workers=workers,
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
    workers: int | None = 1,
    **options: Any,
) -> Found:
    """As `search`, without pandas.

    Raises:
        MemplanError: as `search`.
    """
    model, where = resolve(model), cluster_of(cluster)
    checked_choice("objective", objective, (*OBJECTIVES, *QUESTIONS))
    if objective in QUESTIONS:
        from memplan.search.questions import longest_sequence, smallest_part  # which search in turn

        asked = options | {"cluster": where, "global_batch": global_batch, "keep": keep}
        asked |= {"progress": progress, "workers": workers}
        asked |= {} if seq_len is None else {"seq_len": seq_len}
        return smallest_part(model, **asked) if objective == "gpus" else longest_sequence(model, **asked)
    keep = None if keep is None else checked_count("keep", keep)
    varied = {name: options.pop(name, None) for name in VARIED}
    ranges = {name: values_of(name, value) for name, value in varied.items() if value is not None}
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
    n_workers = n_cores() if workers is None else checked_count("workers", workers)
    return _run(space, where, objective, keep, progress, n_workers)


def cluster_of(value: Cluster | str) -> Cluster:
    """The cluster that is searched for.

    Raises:
        MemplanError: none, or as `memplan.cluster`.
    """
    where = resolve_cluster(value)
    if where is None:
        raise InvalidValue("cluster=None is nothing to search; use '<n>x<gpu>', as in 64xh100-sxm.")
    return where


def _run(
    space: Space,
    cluster: Cluster,
    objective: str,
    keep: int | None,
    progress: Progress | None,
    workers: int,
) -> Found:
    both, refused = _Both.of(objective, keep), best(keep, "place")
    counts: dict[int, int] = {}

    def running(batches: Iterable[Sequence[Ruled]]) -> Iterator[list[Grid]]:
        for batch in batches:
            for ruled in batch:
                _count_refused(ruled, refused, counts)
            yield [ruled.running for ruled in batch if (ruled.rule == RUNS).any()]

    def told() -> None:
        if progress is not None:
            progress(both.n_seen + refused.n_seen)

    parts = [*map(running, space.parts())]
    workers = min(workers, len(parts))
    if workers == 1:
        for grids in chain.from_iterable(parts):
            both.add(space.model, grids, cluster)
            told()
    else:
        work = partial(_worked_out, space.model, cluster, objective, keep)
        for found in in_processes(workers, work, map(list, parts)):
            both.join(found)
            told()
    texts = list(space.rules)
    return Found(
        model=space.model,
        cluster=cluster,
        base=space.base,
        fit=both.fit.rows,
        too_large=both.too_large.rows,
        refused=refused.rows,
        n_fit=both.fit.n_seen,
        n_too_large=both.too_large.n_seen,
        n_refused=refused.n_seen,
        refused_by={texts[rule]: n for rule, n in sorted(counts.items(), key=lambda item: -item[1])},
    )


class _Part(NamedTuple):
    """What is kept of some plans that fit, and of some that are too large; and how many there are."""

    fit: Rows
    too_large: Rows
    n_fit: int
    n_too_large: int


class _Both(NamedTuple):
    """The plans that fit, and those that are too large."""

    fit: Kept
    too_large: Kept

    @classmethod
    def of(cls, objective: str, keep: int | None) -> "_Both":
        """None yet."""
        keys = OBJECTIVES[objective]
        return cls(front(*keys) if objective == "front" else best(keep, *keys), best(keep, "over_bytes"))

    @property
    def n_seen(self) -> int:
        """Of how many plans."""
        return self.fit.n_seen + self.too_large.n_seen

    @uncollected()
    def add(self, model: Model, grids: Sequence[Grid], cluster: Cluster) -> None:
        """Consider the plans of grids of one kind."""
        for grid, figures in zip(grids, evaluated(model, grids, cluster), strict=True):
            columns = _columns(grid, figures, cluster)
            fits = np.broadcast_to(columns["over_bytes"] == 0, grid.shape)
            self.fit.add(grid, columns, fits)
            self.too_large.add(grid, columns, ~fits)

    def join(self, part: _Part) -> None:
        """Consider what another process has kept."""
        self.fit.join(part.fit, part.n_fit)
        self.too_large.join(part.too_large, part.n_too_large)


def _worked_out(
    model: Model, cluster: Cluster, objective: str, keep: int | None, batches: Sequence[Sequence[Grid]]
) -> _Part:
    """What is kept of batches of grids."""
    both = _Both.of(objective, keep)
    for grids in batches:
        both.add(model, grids, cluster)
    fit, too_large = both
    return _Part(fit.rows, too_large.rows, fit.n_seen, too_large.n_seen)


def _count_refused(ruled: Ruled, refused: Kept, counts: dict[int, int]) -> None:
    chosen = np.flatnonzero(ruled.rule != RUNS)
    if not len(chosen):
        return
    grid = ruled.grid[chosen]
    refused.add(grid, {"place": ruled.place[chosen, None]}, np.ones(grid.shape, bool))
    for rule, n in zip(*np.unique(ruled.rule[chosen], return_counts=True), strict=True):
        counts[int(rule)] = counts.get(int(rule), 0) + int(n) * grid.shape[1]


def _columns(grid: Grid, figures: Figures, cluster: Cluster) -> dict[str, NDArray[Any]]:
    """A grid's figures by name; `over_bytes` beyond the cluster's budget (0: the plan fits)."""
    budget_bytes = cluster.budget_bytes
    peak_bytes = figures.peak_bytes
    over_bytes = (
        np.zeros((1, 1), np.int64) if budget_bytes is None else np.maximum(0, peak_bytes - budget_bytes)
    )
    return {
        "peak_bytes": peak_bytes,
        "worst_stage": figures.worst_stage,
        "rest_bytes": figures.rest_bytes,
        "over_bytes": over_bytes,
        "minus_micro_batch": -grid.cells["micro_batch"][:, None],
        "step_s": figures.step_s,
    }


def evaluated(model: Model, grids: Sequence[Grid], cluster: Cluster) -> Iterator[Figures]:
    """The figures of each grid's plans, which are plans that `check_plan` accepts.

    The grids are of one kind: `memplan.search.evaluate.kind_of`. Only steps of cells where a plan fits are
    timed; the others take infinitely long, and so do plans that do not fit.
    """
    from memplan.search.evaluate import Evaluation  # only a search needs them
    from memplan.search.memory import held
    from memplan.search.time import times

    evaluation = Evaluation(model, grids, device_of(cluster))
    for i, grid in enumerate(grids):
        memory = held(evaluation, i)
        budget_bytes = cluster.budget_bytes
        fits = np.broadcast_to(budget_bytes is None or memory.peak_bytes <= budget_bytes, grid.shape)
        seconds = np.full(grid.shape, inf)
        cells = np.flatnonzero(fits.any(axis=1))
        if len(cells):
            seconds[cells] = np.where(fits[cells], times(evaluation, i, cluster, cells), inf)
        yield Figures(
            peak_bytes=memory.peak_bytes,
            worst_stage=memory.worst_stage,
            rest_bytes=memory.rest_bytes,
            step_s=seconds,
        )


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
    whole = {"dp": several, "micro_batch": global_batch // several}
    tools: tuple[dict[str, Any], ...] = {}, {"zero": 3}, {"dp": several}, whole
    for tool in tools:
        try:
            return Plan(global_batch=global_batch, **options, **tool)
        except PlanRefused as refusal:
            refusals.append(refusal)
    raise refusals[0]
