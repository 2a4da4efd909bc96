"""`memplan.search`: what should be run on a cluster.

Every plan is enumerated (`space`), refused by rule (`rules`) or bounded (`bounds`). Then plans are estimated,
the most promising first, until no bound is better than what is kept (`judge`). So what is found is what
estimating every plan would find, and each plan shown has the figures of its own estimate.
"""

import gc
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np

from memplan.checks import checked_choice, checked_count, checked_flag
from memplan.errors import InvalidValue, PlanRefused, shown_value, unknown_name
from memplan.hardware import Cluster, resolve_cluster
from memplan.models import Model, resolve
from memplan.plan import RECOMPUTES, SCHEDULES, Plan
from memplan.search.judge import OBJECTIVES, Judge, Judged, best_first, every, front
from memplan.search.plans import VARIED, Grid
from memplan.search.pool import Pool
from memplan.search.rules import RUNS
from memplan.search.space import Ruled, Space, divisors
from memplan.search.table import search_frame
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
    """What a search found: the best plans that fit, others that do not, the first that are refused.

    `n_fit` and `n_too_large` count the plans that are known to fit and not to, `n_slower` those whose bound
    is worse than all the best, whether they fit or not, `n_refused` all that are refused; `refused_by` how
    many each rule refused, by its text for the first of them.
    """

    model: Model
    cluster: Cluster
    base: Plan
    fit: tuple[Judged, ...]
    too_large: tuple[Judged, ...]
    refused: tuple[dict[str, Any], ...]
    n_fit: int
    n_too_large: int
    n_slower: int
    n_refused: int
    refused_by: Mapping[str, int] = field(default_factory=dict)

    @property
    def n_plans(self) -> int:
        """All of them."""
        return self.n_fit + self.n_too_large + self.n_slower + self.n_refused

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
        cluster: "<n>x<gpu>" or a Cluster: all of its GPUs are used, unless the fewest are asked for.
        global_batch: sequences per step.
        seq_len: tokens per sequence; left out, the model's context.
        objective: "speed" (most tokens per second), "memory" (least peak), "micro_batch" (largest), or
            "front" (all plans that none beats in both speed and memory). Or what else is to be found, then
            with the fastest plans for it, of micro-batches of 1 unless told otherwise: "gpus" (the fewest of
            the cluster that suffice: some of a node's, or whole nodes), "seq_len" (the longest sequence).
        keep: so many of the best plans that fit, of the nearest that do not, and of the refused ones;
            None: all, every plan estimated, which takes some milliseconds each. Otherwise plans whose bounds
            are worse than all the best are left out, whether they fit or not; those that do not fit are then
            the most promising of the plans that it took an estimate to tell, or the nearest if none fits.
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
        `n_too_large`, `n_slower` (left out as worse than all that are shown), `n_refused`, and `refused_by`,
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
    model, where = resolve(model), cluster_of(cluster)
    checked_choice("objective", objective, (*OBJECTIVES, *QUESTIONS))
    if objective in QUESTIONS:
        from memplan.search.questions import longest_sequence, smallest_part  # which search in turn

        asked = options | {"cluster": where, "global_batch": global_batch, "keep": keep}
        asked |= {"progress": progress}
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
    with _uncollected():
        return _run(space, Judge(model, where, Roofline()), objective, keep, progress)


def cluster_of(value: Cluster | str) -> Cluster:
    """The cluster that is searched for.

    Raises:
        MemplanError: none, or as `memplan.cluster`.
    """
    where = resolve_cluster(value)
    if where is None:
        raise InvalidValue("cluster=None is nothing to search; use '<n>x<gpu>', as in 64xh100-sxm.")
    return where


def _run(space: Space, judge: Judge, objective: str, keep: int | None, progress: Progress | None) -> Found:
    refused = _Refused(keep, progress)
    for batch in space.grids():
        refused.note(batch)

    def grids() -> Iterator[Sequence[Grid]]:
        for batch in space.grids():
            yield [ruled.running for ruled in batch if (ruled.rule == RUNS).any()]

    if keep is None:
        verdicts = every(judge, grids, objective)
    elif objective == "front":
        verdicts = front(judge, grids, keep)
    else:
        verdicts = best_first(judge, grids, objective, keep)
    return Found(
        model=space.model,
        cluster=judge.cluster,
        base=space.base,
        fit=verdicts.fit[:keep],
        too_large=verdicts.too_large[:keep],
        refused=refused.first(keep),
        n_fit=verdicts.n_fit,
        n_too_large=verdicts.n_too_large,
        n_slower=verdicts.n_slower,
        n_refused=refused.n_refused,
        refused_by=refused.by_rule(space),
    )


@contextmanager
def _uncollected() -> Iterator[None]:
    """Python looks for no cycles of objects meanwhile: a search leaves few, and to look is a sixth of it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Refused:
    """The plans that cannot run: the first ones, and how many each rule refused."""

    def __init__(self, keep: int | None, progress: Progress | None) -> None:
        self._pool = Pool(2**62 if keep is None else keep)
        self._progress = progress
        self._counts = Counter[int]()
        self._n_seen = 0

    @property
    def n_refused(self) -> int:
        """All of them."""
        return self._pool.n_seen

    def note(self, batch: Iterable[Ruled]) -> None:
        """Counts the plans of a batch."""
        for ruled in batch:
            self._n_seen += len(ruled.grid)
            chosen = np.flatnonzero(ruled.rule != RUNS)
            if len(chosen):
                grid = ruled.grid[chosen]
                self._pool.add(grid, [ruled.place[chosen, None]], np.ones(grid.shape, bool))
                for rule, n in zip(*np.unique(ruled.rule[chosen], return_counts=True), strict=True):
                    self._counts[int(rule)] += int(n) * grid.shape[1]
        if self._progress is not None:
            self._progress(self._n_seen)

    def first(self, keep: int | None) -> tuple[dict[str, Any], ...]:
        """The varied fields of the first ones by their place among all plans."""
        return tuple(entry.values for entry in islice(self._pool, keep))

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
