"""`memplan.search`: what should be run on a cluster."""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np

from memplan.checks import checked_choice, checked_count, checked_flag
from memplan.errors import InvalidValue, PlanRefused, shown_value, unknown_name
from memplan.hardware import Cluster, resolve_cluster
from memplan.models import Model, resolve
from memplan.plan import RECOMPUTES, SCHEDULES, Plan
from memplan.search.best import Best, Kept, Rows
from memplan.search.plans import VARIED, Grid, Plans
from memplan.search.processes import in_processes, n_cores
from memplan.search.rules import RUNS
from memplan.search.space import Ruled, Space, divisors
from memplan.search.table import search_frame
from memplan.search.verdicts import OBJECTIVES, Every, Fastest, Verdicts
from memplan.steptime import Roofline

if TYPE_CHECKING:
    import pandas

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

    `n_slower` counts plans that are slower than all the best, whether they fit or not; `n_fit` and
    `n_too_large` count the others, `n_refused` all there are; `refused_by` how many each rule refused, by its
    text for the first of them.
    """

    model: Model
    cluster: Cluster
    base: Plan
    fit: Rows
    too_large: Rows
    refused: Rows
    n_fit: int
    n_too_large: int
    n_slower: int
    n_refused: int
    refused_by: Mapping[str, int] = field(default_factory=dict)

    @property
    def n_plans(self) -> int:
        """All of them."""
        return self.n_fit + self.n_too_large + self.n_slower + self.n_refused

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
    exhaustive: bool = False,
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
        exhaustive: judge every plan. Otherwise objective="speed" leaves out those that are slower than all
            the best, whether they fit or not: the best are the same, and if some fit, those that do not are
            plans that could be as fast, and that took more than a bound to show that they are too large.
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
        `n_too_large`, `n_slower` (left out as slower than all that are shown), `n_refused`, and `refused_by`,
        how many each rule refused; `cluster` and `seq_len`.

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
        exhaustive=exhaustive,
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
    exhaustive: bool = False,
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
        asked |= {"exhaustive": exhaustive, "progress": progress, "workers": workers}
        asked |= {} if seq_len is None else {"seq_len": seq_len}
        return smallest_part(model, **asked) if objective == "gpus" else longest_sequence(model, **asked)
    keep = None if keep is None else checked_count("keep", keep)
    every = checked_flag("exhaustive", exhaustive) or objective != "speed"
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
    verdicts = Every(objective, keep) if every or keep is None else _fastest(space, where, keep)
    return _run(space, where, verdicts, keep, progress, n_workers)


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
    verdicts: Verdicts,
    keep: int | None,
    progress: Progress | None,
    workers: int,
) -> Found:
    refused = _Refused(keep)

    def told() -> None:
        if progress is not None:
            progress(refused.kept.n_seen + verdicts.n_seen)

    parts = [_hopeful(space, map(refused.noted, part), verdicts, cluster) for part in space.parts()]
    workers = min(workers, len(parts))
    if workers == 1:
        for grids in chain.from_iterable(parts):
            verdicts.add(space.model, grids, cluster)
            told()
    else:
        work = partial(_worked_out, space.model, cluster)
        for found in in_processes(workers, work, ((verdicts.begun(), list(part)) for part in parts)):
            verdicts.join(found)
            told()
    if progress is not None:
        progress(refused.kept.n_seen + refused.n_others)
    (fit, n_fit), (too_large, n_too_large) = verdicts.fit(), verdicts.too_large()
    return Found(
        model=space.model,
        cluster=cluster,
        base=space.base,
        fit=fit,
        too_large=too_large,
        refused=refused.kept.rows,
        n_fit=n_fit,
        n_too_large=n_too_large,
        n_slower=refused.n_others - n_fit - n_too_large,
        n_refused=refused.kept.n_seen,
        refused_by=refused.by_rule(space),
    )


def _hopeful(
    space: Space, batches: Iterable[Sequence[Ruled]], verdicts: Verdicts, cluster: Cluster
) -> Iterator[Sequence[Grid]]:
    """The plans that run, batch by batch, and may be kept beside those that are kept by then."""
    for batch in batches:
        running = [ruled.running for ruled in batch if (ruled.rule == RUNS).any()]
        if some := verdicts.hopeful(space.model, running, cluster):
            yield some


LEAN: Final[dict[str, Any]] = {"zero": 3, "micro_batch": 1, "schedule": "1f1b", "offload": False}
"""Plans that need little memory and are little work: where some fit, it is soon known which are too slow."""


def _fastest(space: Space, cluster: Cluster, keep: int) -> Fastest:
    """Verdicts that know of enough plans that fit to leave out slower ones; if any of the `LEAN` ones fit."""
    lean = {name: (value,) for name, value in LEAN.items() if value in space.of(name, (value,))}
    some = Space(model=space.model, n_gpus=space.n_gpus, base=space.base, ranges={**space.ranges, **lean})
    verdicts = Fastest(keep)
    for grids in _hopeful(some, some.grids(), verdicts, cluster):
        verdicts.add(space.model, grids, cluster)
    return verdicts.begun()


def _worked_out(model: Model, cluster: Cluster, part: tuple[Verdicts, Sequence[Sequence[Grid]]]) -> Verdicts:
    """Verdicts on batches of grids."""
    verdicts, batches = part
    for grids in batches:
        verdicts.add(model, grids, cluster)
    return verdicts


class _Refused:
    """The plans that cannot run: the first ones, how many each rule refused; and how many plans can."""

    def __init__(self, keep: int | None) -> None:
        self.kept = Kept(Best(keep, ("place",)))
        self.n_others = 0
        self._counts = Counter[int]()

    def noted(self, batch: Sequence[Ruled]) -> Sequence[Ruled]:
        """A batch, when its plans have been counted."""
        for ruled in batch:
            chosen = np.flatnonzero(ruled.rule != RUNS)
            grid = ruled.grid[chosen]
            self.n_others += len(ruled.grid) - len(grid)
            if len(chosen):
                self.kept.add(grid, {"place": ruled.place[chosen, None]}, np.ones(grid.shape, bool))
                for rule, n in zip(*np.unique(ruled.rule[chosen], return_counts=True), strict=True):
                    self._counts[int(rule)] += int(n) * grid.shape[1]
        return batch

    def by_rule(self, space: Space) -> dict[str, int]:
        """How many each rule refused, by its text for the first of them, the most first."""
        texts = list(space.rules)
        return {texts[rule]: n for rule, n in self._counts.most_common()}


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
