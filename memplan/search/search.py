"""`memplan.search`: what should be run on a cluster.

Every plan is enumerated (`space`), and either refused by a rule (`rules`) or bounded (`bounds`). Then plans
are estimated, the most promising first, until no bound beats the plans kept (`judge`). So a search finds what
estimating every plan would find, and each plan shown has the figures and the verdict of its own estimate.
"""

import gc
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import islice, product
from typing import TYPE_CHECKING, Any, Final, Unpack, cast, final

import numpy as np

from memplan.checks import checked_choice, checked_count, checked_flag
from memplan.comparison import held_bytes, is_tie
from memplan.engines.base import ENGINES
from memplan.engines.options import USUAL_ENGINE, plan_dict, plan_fields, plan_of, shows
from memplan.errors import InvalidValue, shown_value
from memplan.estimate import Estimate, estimate_plan
from memplan.fields import Counts
from memplan.hardware import (
    CHANGES,
    Cluster,
    ClusterChanges,
    Link,
    Verdict,
    outside_allocator,
    resolve_cluster,
)
from memplan.models import Model, is_of_transformers, of_sizes, resolve
from memplan.plan import Plan
from memplan.search.judge import (
    OBJECTIVES,
    Judge,
    Judged,
    best_first,
    every,
    front,
    nearest_first,
    on_front,
)
from memplan.search.options import Objective, PlanOptions, Progress, SearchOptions
from memplan.search.plans import Grid, varied
from memplan.search.pool import Pool
from memplan.search.rules import NOT_REFUSED
from memplan.search.space import Ruled, Space
from memplan.search.table import search_dict, search_frame
from memplan.text_tables import html_text
from memplan.time.step import TimeModel, time_model_of

if TYPE_CHECKING:
    import pandas

QUESTIONS: Final = ("gpus", "seq_len")
"""Objectives that take several searches: the fewest GPUs, the longest sequence."""

KEEP: Final = 20
"""Plans of each verdict that a search keeps by default; the verdict of each takes a replay."""

USUAL_BATCH: Final = "The batch was left out: one sequence for each GPU (global_batch, --global-batch)."
"""What a search says if it was not told how many sequences a step trains on."""

LOOKS: Final = 4
"""The most searches for a plan that fits, each leaving more room for the caching allocator."""


@final
@dataclass(frozen=True, kw_only=True, repr=False)
class Found:
    """What a search found: the best plans within the budget, some beyond it, the first refused ones.

    A plan is *within* the budget by what it allocates, with the most that CUDA's context and NCCL's buffers
    may take. Verdicts are computed for the kept plans only, when they are read: each is its estimate's
    (`kept`), so a search never contradicts `memplan.estimate` on a plan that it shows. If none of them fits,
    because the caching allocator reserves more than is allocated, the search is repeated (`again`) for plans
    that leave room for that (`fitting`), which may miss a faster plan that fits with less room.

    A search for speed ranks plans whose times tie by the bytes that a GPU holds, the fewest first.

    `jobs` has a plan for each job that was searched for: each combination of the values of `engine`,
    `global_batch`, `seq_len` and other fields that are not varied within a search. `keep` says how many plans
    are shown that fit or may fit.

    `n_within` and `n_beyond` count the plans known to be within and beyond the budget, `n_slower` the ones
    left out by their bounds, within it or not, `n_refused` the refused ones, and `refused_by` these by the
    kind of refusal.
    """

    model: Model
    cluster: Cluster
    jobs: tuple[Plan, ...]
    within: tuple[Judged, ...]
    beyond: tuple[Judged, ...]
    refused: tuple[tuple[Plan, dict[str, Any]], ...]
    n_within: int
    n_beyond: int
    n_slower: int
    n_refused: int
    refused_by: Mapping[str, int] = field(default_factory=dict)
    objective: str = "speed"
    keep: int | None = None
    time_model: TimeModel
    left_out: tuple[str, ...] = ()
    again: Callable[[int], "Found"] | None = field(default=None, repr=False, compare=False)

    @cached_property
    def different(self) -> tuple[str, ...]:
        """The fields of a plan in which the jobs differ; those that a search varies are no job's."""
        said = [plan_dict(job) for job in self.jobs]
        varies = {name for job in self.jobs for name in varied(job.engine)}
        own = [name for name in said[0] if name not in varies and all(name in each for each in said)]
        return tuple([name for name in own if any(each[name] != said[0][name] for each in said)])

    @property
    def n_plans(self) -> int:
        """The plans within and beyond the budget, left out, and refused."""
        return self.n_within + self.n_beyond + self.n_slower + self.n_refused

    @cached_property
    def kept(self) -> tuple[Estimate, ...]:
        """The estimates of the plans kept within the budget, the best first."""
        return tuple(map(self.estimate, self.within))

    @cached_property
    def best(self) -> Estimate | None:
        """The best of the plans kept that fits, or that has no limit; else of those that fit tightly."""
        return self._best("fits", None) or self._best("fits, tight")

    def _best(self, *verdicts: Verdict | None) -> Estimate | None:
        found: list[Estimate] = []
        for each in self.kept:
            if found and not (self.objective == "speed" and is_tie(found[0], each)):
                break
            if each.verdict in verdicts:
                found.append(each)
        return min(found, key=held_bytes, default=None)

    @cached_property
    def fitting(self) -> "Found | None":
        """The first search with a plan that fits: this one, or one with more room; None if there is none.

        If none is found, the first search with a plan that fits tightly.
        """
        found, tight = self, None
        for _ in range(LOOKS):
            if found.best is not None and found.best.verdict != "fits, tight":
                return found
            tight = tight or (None if found.best is None else found)
            every = found.n_within == len(found.kept) and not found.n_slower
            if every or not found.kept or self.again is None:
                break
            found = self.again(max(map(_reserved_more, found.kept)))
        return tight

    def estimate(self, judged: Judged) -> Estimate:
        """The estimate of a plan."""
        if judged.estimate is not None:
            return judged.estimate
        found = estimate_plan(self.model, judged.plan, self.cluster)
        return replace(found, time_model=self.time_model)

    def keys(self, judged: Judged) -> tuple[float, ...]:
        """The figures of a plan that the objective minimises."""
        return judged.keys(self.objective, per_token=len(self.jobs) > 1)

    def to_frame(self) -> "pandas.DataFrame":
        """One row per plan kept, best first: see `search`."""
        return search_frame(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as `--json` prints them."""
        return search_dict(self)

    def __str__(self) -> str:
        from memplan.search.text import search_text  # which imports this module

        return search_text(self)

    def __repr__(self) -> str:
        return (
            f"<Found {self.n_plans:,} plans of {self.model.name} on {self.cluster.name}, seq_len="
            f"{self.jobs[0].seq_len}: {self.n_within:,} within the budget, {len(self.within)} of them kept>"
        )

    def _repr_html_(self) -> str:
        return html_text(str(self))


def _reserved_more(estimate: Estimate) -> int:
    """The bytes that the caching allocator may reserve beyond what the worst stage allocates."""
    outside = outside_allocator(estimate.engine.n_communicators(estimate.plan))
    device = estimate.device_bytes
    held = estimate.worst.peak_bytes + outside.high_bytes
    return 0 if device is None else device.high_bytes - held


@shows(PlanOptions)
def search(
    model: Model | str | os.PathLike[str],
    *,
    implementation: str | None = None,
    cluster: Cluster | str,
    global_batch: int | Iterable[int] | None = None,
    seq_len: int | Iterable[int] | None = None,
    objective: Objective = "speed",
    keep: int | None = KEEP,
    tp_across_nodes: bool = False,
    time_model: TimeModel | None = None,
    progress: Progress | None = None,
    gpus_per_node: int | None = None,
    network: Link | str | None = None,
    margin: float | None = None,
    efficiency: float | None = None,
    cache: bool = True,
    **options: Unpack[PlanOptions],
) -> "pandas.DataFrame":
    """Every plan that the cluster's GPUs can run, best first.

    Args:
        model: any that `memplan.estimate` takes; your own module with its inputs, as `(module, inputs)`.
        implementation: whose code trains it, as "torchtitan"; left out, its family's default.
        cluster: "<n>x<gpu>" or a Cluster: all of its GPUs are used, unless the fewest are asked for.
        global_batch: sequences per step; several are compared by tokens per second; left out, one for each
            GPU, so that all plans train on the same.
        seq_len: tokens per sequence, one number or several; left out, the model's context, and at
            most 8,192.
        objective: "speed" (most tokens per second), "memory" (least peak), "micro_batch" (largest), or
            "front" (all plans that no other beats in both speed and memory). Two more find a size, and the
            fastest plans for it, with micro_batch=1 unless it is given: "gpus" (the fewest of the cluster
            that suffice: part of a node, or whole nodes), "seq_len" (the longest sequence).
        keep: how many plans to keep that fit or may fit, that do not fit, and that are refused; None: all,
            and every plan is estimated, which takes some milliseconds each. Otherwise plans whose bounds are
            worse than the best plans are not estimated. Kept plans that do not fit are the estimated ones
            with the best bounds, or, if no plan is within the budget, the ones that exceed it least.
        tp_across_nodes: whether the ranks of a tensor axis may be on several nodes, which is slow: by default
            they are on one.
        time_model: turns counted work into seconds; left out, what `efficiency` says. One of your own must
            give each step at least the seconds of a roofline at the full peak rates.
        progress: called now and then with the number of plans seen.
        gpus_per_node: GPUs in a node; left out, as in the cluster's table.
        network: each GPU's share of the network between nodes, as "200Gbit/s"; left out, as in the table.
        margin: the least headroom: the fraction of usable memory that a plan which "fits" leaves free; left
            out, 0.05.
        efficiency: the fraction of the peak rate at which matrix products run, if you know yours; left out,
            times as measured on GPUs.
        cache: whether the trace of a config.json is kept in the user's cache folder, or made anew.
        **options: fields of `memplan.Plan` and options of its engine. Those that a search varies (`dp`,
            `dp_replicate`, `tp`, `pp`, `virtual_stages`, `zero`, `sequence_parallel`, `micro_batch`,
            `recompute`, `recompute_blocks`, `schedule`, `offload`) take all values that make a difference if
            left out (`recompute_blocks`: None), the others their default. All take one value or several, but
            for `layers_per_stage`; plans of several, as of two engines, are compared by tokens per second.

    Returns:
        A frame with a row per plan: those that fit, those that fit tightly, those of which memplan cannot
        say, those that do not fit, those that are refused, each the best first. Its columns: the varied
        fields, `global_batch`, `seq_len`, other fields that are not at their defaults; `tie`, the same number
        where no plan is more than 1 % slower than the fastest of them (of these, the one that holds least on
        a GPU stands first); `verdict` ("fits", "fits, tight", "cannot say", "does not fit", "refused"; None
        on CPU ranks, which have no limit), `why` not;
        `device_low_bytes` and `device_high_bytes`, on which the verdict hangs (None where what is allocated
        is too much already); `peak_bytes`, `over_bytes` (allocated beyond what is usable), `rest_bytes`,
        `worst_stage`, `when`;
        `step_s`, `tokens_per_s`, `tokens_per_s_per_gpu`, `mfu` (rough: `memplan.time.step`); `command`, the
        `memplan estimate` line of the plan. Equally good plans stand with the simpler first. `attrs` has the
        numbers of plans: `n_plans`, `n_within` (the budget by what they allocate), `n_beyond`, `n_slower`
        (left out as worse than all that are shown), `n_refused`, and `refused_by`, how many of each kind;
        `cluster` and `seq_len`.

    Raises:
        PlanRefused: no mesh has these degrees; no plan fits, where the fewest GPUs or the longest sequence
            are asked for.
        MemplanError: a value that is not allowed, with a way out.
    """
    asked = {**locals(), **options}
    del asked["options"]
    return searched(**asked).to_frame()


def searched(
    model: Model | str | os.PathLike[str],
    *,
    cluster: Cluster | str,
    global_batch: int | Iterable[int] | None = None,
    objective: Objective = "speed",
    **options: Unpack[SearchOptions],
) -> Found:
    """As `search`, without pandas.

    Raises:
        MemplanError: as `search`.
    """
    checked_choice("objective", objective, (*OBJECTIVES, *QUESTIONS))
    engine, *others = values_of("engine", options.get("engine", USUAL_ENGINE))
    if others:
        return _over_engines(
            (engine, *others),
            model,
            cluster=cluster,
            global_batch=global_batch,
            objective=objective,
            **options,
        )
    model, where, asked = resolved(model, cluster, options)
    asked["engine"] = engine
    keep, time_model = asked.pop("keep", KEEP), asked.pop("time_model", None)
    if time_model is not None and where.efficiency is not None:
        raise InvalidValue(
            f"efficiency={where.efficiency} and time_model={shown_value(time_model)} both say how long "
            "products take; leave one of them out."
        )
    how: dict[str, Any] = {
        "keep": None if keep is None else checked_count("keep", keep),
        "tp_across_nodes": checked_flag("tp_across_nodes", asked.pop("tp_across_nodes", False)),
        "time_model": time_model_of(where) if time_model is None else time_model,
        "progress": asked.pop("progress", None),
    }
    seq_len = asked.pop("seq_len", None)
    if objective in QUESTIONS:
        from memplan.search.questions import longest_sequence, smallest_part  # which search in turn

        asked |= how | {"cluster": where, "global_batch": global_batch}
        asked |= {} if seq_len is None else {"seq_len": seq_len}
        return smallest_part(model, **asked) if objective == "gpus" else longest_sequence(model, **asked)
    batch = where.n_gpus if global_batch is None else global_batch
    asked |= {"seq_len": model.usual_seq_len if seq_len is None else seq_len, "global_batch": batch}
    given = {name: asked.pop(name, None) for name in varied(engine)}
    ranges = {name: values_of(name, value, engine) for name, value in given.items() if value is not None}
    job = partial(_Job, cluster=where, ranges=ranges, objective=objective, **how)
    own = partial(of_sizes, model, device=where.gpu.device.type)
    jobs = [
        job(model=own(one.micro_batch, one.seq_len, precision=one.precision), base=one)
        for one in bases(**asked)
    ]
    for one in jobs:
        one.check_time()
    found = jobs[0].found() if len(jobs) == 1 else together([one.found() for one in jobs])
    assumed = () if seq_len is not None else model.usual_seq_len_said
    assumed += () if global_batch is not None else (USUAL_BATCH,)
    return replace(found, left_out=(*found.left_out, *assumed)) if assumed else found


def _over_engines(
    engines: Sequence[str], model: Model | str | os.PathLike[str], *, objective: Objective, **asked: Any
) -> Found:
    """A search of each engine's plans, as one.

    Raises:
        InvalidValue: an objective that takes several searches itself.
        MemplanError: as `search`.
    """
    if objective in QUESTIONS:
        raise InvalidValue(
            f"engine={shown_value(engines)} with objective={objective!r}: a size is found for one engine at "
            f"a time; use engine={engines[0]!r}."
        )
    return together([searched(model, objective=objective, **asked | {"engine": one}) for one in engines])


def resolved(
    model: Model | str | os.PathLike[str], cluster: Cluster | str, options: SearchOptions
) -> tuple[Model, Cluster, dict[str, Any]]:
    """The model and the cluster that are searched for, and the options that change neither.

    Raises:
        MemplanError: none, or as `memplan.estimate`.
    """
    asked: dict[str, Any] = {**options}
    changes: Any = {name: asked.pop(name) for name in CHANGES if name in asked}
    where = cluster_of(cluster, **changes)
    if "precision" in asked:
        asked["precision"] = values_of("precision", asked["precision"])
    usual = (Plan.__dataclass_fields__["precision"].default,)
    traced = {"precisions": asked.get("precision", usual), "cache": asked.pop("cache", True)}
    code, device = asked.pop("implementation", None), where.gpu.device.type
    adapted = is_of_transformers(asked)
    return resolve(model, code, device, adapted=adapted, **traced), where, asked


def cluster_of(value: Cluster | str, **changes: Unpack[ClusterChanges]) -> Cluster:
    """The cluster that is searched for.

    Raises:
        MemplanError: none, or as `memplan.cluster`.
    """
    if value is None:
        raise InvalidValue("cluster=None is nothing to search; use '<n>x<gpu>', as in 64xh100-sxm.")
    where = resolve_cluster(value, **changes)
    return cast(Cluster, where)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """One search: plans of a model on a cluster, for one batch and one sequence length."""

    model: Model
    cluster: Cluster
    base: Plan
    ranges: Mapping[str, tuple[Any, ...]]
    objective: str
    keep: int | None
    tp_across_nodes: bool
    time_model: TimeModel
    progress: Progress | None

    def check_time(self) -> None:
        """Raise if the objective needs the time of a step and a rate for it is missing."""
        missing = self.time_model.missing(self.base, self.cluster)
        if missing and OBJECTIVES[self.objective][0] == "step_s":
            raise InvalidValue(
                f"objective={self.objective!r} needs the time of a step, but {missing[0]}; use "
                "objective='memory', or another cluster."
            )

    def found(self, slack_bytes: int = 0) -> Found:
        """The result, if `slack_bytes` of the budget are left to the caching allocator."""
        node = None if self.tp_across_nodes else self.cluster.gpus_per_node
        space = Space(
            model=self.model, n_gpus=self.cluster.n_gpus, base=self.base, ranges=self.ranges, node=node,
            device=self.cluster.gpu.device.type,
        )  # fmt: skip
        judge = Judge(self.model, self.cluster, self.time_model, slack_bytes)
        refused = _Refused(self.keep, self.progress)

        def grids() -> Iterator[Grid]:
            for ruled in refused.noting(space.grids()):
                if len(running := ruled.running):
                    yield running

        with _uncollected():
            if self.keep is None:
                ranked = every(judge, grids, self.objective)
            elif self.objective == "front":
                ranked = front(judge, grids, self.keep)
            else:
                ranked = best_first(judge, grids, self.objective, self.keep)
        kinds = list(space.rules)
        return Found(
            model=self.model,
            cluster=self.cluster,
            jobs=(self.base,),
            within=ranked.within[: self.keep],
            beyond=ranked.beyond[: self.keep],
            refused=tuple([(self.base, values) for values in refused.first()]),
            n_within=ranked.n_within,
            n_beyond=ranked.n_beyond,
            n_slower=ranked.n_slower,
            n_refused=refused.counts.total(),
            refused_by={kinds[rule]: n for rule, n in refused.counts.most_common()},
            objective=self.objective,
            keep=self.keep,
            time_model=self.time_model,
            left_out=tuple(space.left_out()),
            again=self.found,
        )


def together(found: Sequence[Found]) -> Found:
    """Several searches for different jobs, as one."""
    one, *_ = found
    per_token = partial(Judged.keys, objective=one.objective, per_token=True)
    within = sorted((judged for each in found for judged in each.within), key=per_token)
    if one.objective == "front":
        within = on_front(within, per_token=True)
    beyond = sorted((judged for each in found for judged in each.beyond), key=nearest_first)
    refused_by: Counter[str] = Counter()
    for each in found:
        refused_by.update(each.refused_by)
    return replace(
        one,
        within=tuple(within[: one.keep]),
        beyond=tuple(beyond[: one.keep]),
        refused=tuple([refused for each in found for refused in each.refused][: one.keep]),
        n_within=sum(each.n_within for each in found),
        n_beyond=sum(each.n_beyond for each in found),
        n_slower=sum(each.n_slower for each in found),
        n_refused=sum(each.n_refused for each in found),
        refused_by=dict(refused_by.most_common()),
        left_out=tuple(dict.fromkeys(text for each in found for text in each.left_out)),
        jobs=tuple([job for each in found for job in each.jobs]),
        again=lambda slack_bytes: together([each.again(slack_bytes) for each in found if each.again]),
    )


@contextmanager
def _uncollected() -> Iterator[None]:
    """Runs with Python's garbage collector off, which would take a sixth of the time.

    Objects made meanwhile join the oldest generation, so that the collector does not scan them at once.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()


class _Refused:
    """The first refused plans, and the number of each kind of refusal: `counts`."""

    def __init__(self, keep: int | None, progress: Progress | None) -> None:
        self.counts = Counter[int]()
        self._keep = keep
        self._pool = Pool(2**62 if keep is None else keep)
        self._progress = progress
        self._n_seen = 0
        self._is_complete = False

    def noting(self, grids: Iterable[Ruled]) -> Iterator[Ruled]:
        """Yields the grids; the first time through all of them their refused plans are counted."""
        for ruled in grids:
            if not self._is_complete:
                self._note(ruled)
            yield ruled
        self._is_complete = True

    def _note(self, ruled: Ruled) -> None:
        self._n_seen += len(ruled.grid)
        chosen = np.flatnonzero(ruled.rule != NOT_REFUSED)
        grid = ruled.grid[chosen]
        self._pool.add(grid, [ruled.order[chosen, None]], np.ones(grid.shape, bool))
        for rule, n in Counter(ruled.rule[chosen].tolist()).items():
            self.counts[rule] += n * grid.shape[1]
        if self._progress is not None:
            self._progress(self._n_seen)

    def first(self) -> Iterator[dict[str, Any]]:
        """The varied fields of the first refused plans."""
        return (entry.grid.values(entry.place) for entry in islice(self._pool, self._keep))


def values_of(name: str, asked: Any, engine: str = USUAL_ENGINE) -> tuple[Any, ...]:
    """The values asked for of a plan's field, one or several: checked, without repetitions.

    >>> values_of("tp", [1, 2, 2]), values_of("recompute", "full"), values_of("pp", range(1, 3))
    ((1, 2), ('full',), (1, 2))

    Raises:
        InvalidValue, UnknownName: a value of the wrong type, or none at all.
    """
    field = plan_fields(engine)[name]
    several = isinstance(asked, Iterable) and not isinstance(asked, str) and not isinstance(field, Counts)
    values = dict.fromkeys(field.checked(name, value) for value in (asked if several else (asked,)))
    if not values:
        raise InvalidValue(f"{name}={shown_value(asked)} leaves nothing to try; name at least one value.")
    return tuple(values)


def bases(*, engine: str = USUAL_ENGINE, **options: Any) -> Iterator[Plan]:
    """A plan for each combination of the options' values: what all plans of one job have in common.

    Raises:
        MemplanError: a name that is no field of a plan, or a value that no plan can have.
    """
    if ENGINES.named(engine).is_accounting:
        raise InvalidValue(
            f"engine={engine!r} is closed-form accounting, which gives no verdict and no step time to search "
            "by; use engine='torch'."
        )
    known = plan_fields(engine)
    several = [
        values_of(name, value, engine) if name in known else (value,) for name, value in options.items()
    ]
    for values in product(*several):
        chosen = dict(zip(options, values, strict=True))
        yield plan_of(engine=engine, micro_batch=chosen["global_batch"], **chosen)
