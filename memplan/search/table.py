"""A search's result as rows and as a frame; the verdict of each plan is its own estimate's."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

from memplan.command import estimate_command
from memplan.comparison import numbered_ties
from memplan.engines.options import not_usual, plan_dict
from memplan.estimate import Estimate
from memplan.search.judge import Judged
from memplan.search.plans import varied
from memplan.search.space import refusal
from memplan.tables import figures_of, trust_text
from memplan.text_tables import frame, interval_text, margin_text
from memplan.units import human_bytes
from memplan.version import versioned

if TYPE_CHECKING:
    import pandas

    from memplan.search.search import Found

COLUMNS: Final = (
    "global_batch",
    "seq_len",
    "n_micro_batches",
    "verdict",
    "tie",
    "why",
    "device_low_bytes",
    "device_high_bytes",
    "peak_bytes",
    "over_bytes",
    "rest_bytes",
    "worst_stage",
    "when",
    "step_s",
    "tokens_per_s",
    "tokens_per_s_per_gpu",
    "mfu",
    "command",
)

ORDER: Final = ("fits", None, "fits, tight", "cannot say", "does not fit")
"""Verdicts in the order of a search's rows; refused plans come last."""


def search_frame(found: "Found") -> "pandas.DataFrame":
    """One row per plan that was kept: as `search_rows`.

    Raises:
        MemplanError: if pandas is not installed.
    """
    result = frame(list(search_rows(found)), columns_of(found))
    result.attrs |= counts(found)
    result.attrs |= {"model": found.model.name, "budget_bytes": found.cluster.budget_bytes}
    for each in (*found.within, *found.beyond)[:1]:
        result.attrs["trust"] = trust_text(found.estimate(each))
    return result


def columns_of(found: "Found") -> tuple[str, ...]:
    """The names of the columns: what a search varies, `COLUMNS`, the other options that were asked for."""
    names = dict.fromkeys((*varied(found.jobs[0].engine), *COLUMNS))
    return tuple(names | dict.fromkeys(name for job in found.jobs for name in not_usual(job)))


def counts(found: "Found") -> dict[str, Any]:
    """The numbers of plans, the kinds of refusals, and the jobs that were searched for."""
    names = dict.fromkeys(("global_batch", "seq_len", *found.different))
    return {
        "n_plans": found.n_plans,
        "n_within": found.n_within,
        "n_beyond": found.n_beyond,
        "n_slower": found.n_slower,
        "n_refused": found.n_refused,
        "refused_by": dict(found.refused_by),
        "cluster": found.cluster.name,
        "seq_len": found.jobs[0].seq_len,
        "jobs": [{name: said[name] for name in names} for said in map(plan_dict, found.jobs)],
        "left_out": list(found.left_out),
    }


def search_dict(found: "Found", model: str | None = None) -> dict[str, Any]:
    """Everything as plain values, as `--json` prints it."""
    cluster = found.cluster.to_dict()
    return versioned({"plans": list(search_rows(found, model)), **counts(found), "cluster": cluster})


def search_rows(found: "Found", model: str | None = None) -> Iterator[dict[str, Any]]:
    """The frame's rows as plain values; unknown values, and those that a refused plan lacks, are None.

    First the plans that fit, then those that fit tightly, that may fit, and that do not fit: each group the
    best first, the last one the nearest first. `model`: how the model was named on the command line.
    """
    columns = columns_of(found)
    for _, row in estimated_rows(found, model):
        yield row
    for job, values in found.refused:
        said, why = plan_dict(job), str(refusal(found.model, job, values))
        yield {name: said.get(name) for name in columns} | values | {"verdict": "refused", "why": why}


def estimated_rows(found: "Found", model: str | None = None) -> Iterator[tuple[Estimate, dict[str, Any]]]:
    """The plans that are not refused, each with its row of `search_rows`."""
    estimates, columns = shown(found), columns_of(found)
    for verdict in ORDER:
        own = [each for each in estimates if each.verdict == verdict]
        for each, tie in numbered_ties(own, by_headroom=found.objective == "speed"):
            row = _row(each, tie, model)
            yield each, {name: row[name] for name in columns}


def shown(found: "Found") -> list[Estimate]:
    """The `keep` best plans that fit or may fit, then those that do not fit, the nearest first.

    If faster plans may fit too, at least half of the places go to plans that do fit. Verdicts, which take
    replays, are computed in the order of plans until enough are found. A front has no plan that another one
    beats in both figures.
    """
    surer = found.fitting
    within = (*(() if surer is None else surer.within), *found.within)
    beyond = _extending(found, within) if found.objective == "front" else found.beyond
    judged = {one.plan: one for one in (*within, *beyond)}
    keep = len(judged) if found.keep is None else found.keep
    n_sure, sure, others = -(-keep // 2), list[int](), list[int]()
    estimates = [found.estimate(one) for one in sorted(judged.values(), key=found.keys)]
    for i, each in enumerate(estimates):
        if len(sure) >= n_sure and len(sure) + len(others) >= keep:
            break
        if each.verdict != "does not fit":
            (sure if each.verdict in ("fits", None) and len(sure) < n_sure else others).append(i)
    possible = [estimates[i] for i in sorted([*sure, *others[: keep - len(sure)]])]
    nearest = [found.estimate(one) for one in beyond]
    return [*possible, *(each for each in nearest if each.verdict == "does not fit")]


def _extending(found: "Found", within: Iterable[Judged]) -> list[Judged]:
    """The plans beyond the budget that extend the front of those within it: none beats the other in both."""
    front = [found.keys(one)[:2] for one in within]
    kept = set()
    for one in sorted(found.beyond, key=found.keys):
        step_s, peak_bytes = found.keys(one)[:2]
        if all((step_s < other_s) != (peak_bytes < other_bytes) for other_s, other_bytes in front):
            front.append((step_s, peak_bytes))
            kept.add(one.plan)
    return [one for one in found.beyond if one.plan in kept]


def _row(estimated: Estimate, tie: int | None, model: str | None) -> dict[str, Any]:
    plan, worst = estimated.plan, estimated.worst
    return {
        **plan_dict(plan),
        **figures_of(estimated),
        "n_micro_batches": plan.n_micro_batches,
        "tie": tie,
        "why": why_not(estimated),
        "over_bytes": estimated.over_bytes,
        "rest_bytes": worst.rest_bytes,
        "worst_stage": worst.stage,
        "when": worst.when,
        "tokens_per_s": estimated.tokens_per_s,
        "tokens_per_s_per_gpu": estimated.tokens_per_s_per_gpu,
        "mfu": estimated.mfu,
        "command": estimate_command(estimated, model),
    }


def why_not(estimated: Estimate) -> str | None:
    """Why a plan does not fit, or why memplan cannot say whether it does; None if it fits.

    >>> from memplan import estimate
    >>> print(why_not(estimate("llama-2-7b", cluster="1xh100-sxm")))
    125.58 GiB are allocated on stage 0: optimizer step; 79.11 GiB are usable
    """
    worst, cluster, verdict = estimated.worst, estimated.cluster, estimated.verdict
    if cluster is None or verdict not in ("does not fit", "cannot say"):
        return None
    where = f"on stage {worst.stage}: {worst.when}"
    usable = human_bytes(cluster.gpu.usable_bytes or 0)
    if verdict == "does not fit":
        return f"{human_bytes(worst.peak_bytes)} are allocated {where}; {usable} are usable"
    held = estimated.device_bytes
    if held is None:
        tensors = f"at least {human_bytes(worst.peak_bytes)} of tensors {where}"
        return f"{tensors}; {usable} are usable, and what the allocator reserves is not known"
    return f"a GPU holds {interval_text(held)} {where}; {usable} are usable, {margin_text(cluster.margin)}"
