"""What a search found, as rows and as a frame: every plan that is shown has its own estimate's verdict."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from memplan.estimate import Estimate
from memplan.layout import frame, interval_text, margin_text
from memplan.search.command import estimate_command
from memplan.search.plans import VARIED
from memplan.search.space import refusal
from memplan.units import human_bytes
from memplan.version import versioned

if TYPE_CHECKING:
    import pandas

    from memplan.search.search import Found

COLUMNS: Final = (
    *VARIED,
    "n_micro_batches",
    "verdict",
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

ORDER: Final = ("fits", None, "cannot say", "does not fit")
"""Verdicts in the order of a search's rows; refused plans come last."""


def search_frame(found: "Found") -> "pandas.DataFrame":
    """One row per plan that was kept: as `search_rows`.

    Raises:
        MemplanError: if pandas is not installed.
    """
    result = frame(list(search_rows(found)), COLUMNS)
    result.attrs |= counts(found)
    return result


def counts(found: "Found") -> dict[str, Any]:
    """How many plans there are, how many of each kind are refused, and what they are plans for."""
    return {
        "n_plans": found.n_plans,
        "n_within": found.n_within,
        "n_beyond": found.n_beyond,
        "n_slower": found.n_slower,
        "n_refused": found.n_refused,
        "refused_by": dict(found.refused_by),
        "cluster": found.cluster.name,
        "seq_len": found.base.seq_len,
    }


def search_dict(found: "Found", model: str | None = None) -> dict[str, Any]:
    """Everything as plain values, as `--json` prints it."""
    cluster = found.cluster.to_dict()
    return versioned({"plans": list(search_rows(found, model)), **counts(found), "cluster": cluster})


def search_rows(found: "Found", model: str | None = None) -> Iterator[dict[str, Any]]:
    """The frame's rows as plain values; what is not known, or not there for a refused plan, is None.

    First the plans that fit, then those of which memplan cannot say, then those that do not, each in the
    order in which the search found them: the best first, of those that do not fit the nearest. `model`: how
    the model was named on the command line.
    """
    rows = [_row(each, model) for each in shown(found)]
    for verdict in ORDER:
        yield from (row for row in rows if row["verdict"] == verdict)
    for values in found.refused:
        why = str(refusal(found.model, found.base, values))
        yield dict.fromkeys(COLUMNS) | values | {"verdict": "refused", "why": why}


def shown(found: "Found") -> Iterator[Estimate]:
    """The plans that were kept, each once: with more room if no other fits, within the budget, beyond it."""
    surer = found.fitting
    roomier = () if surer is None or surer is found else surer.kept
    within = {each.plan: each for each in (*roomier, *found.kept)}
    yield from within.values()
    yield from found.estimates(found.beyond)


def _row(estimated: Estimate, model: str | None) -> dict[str, Any]:
    plan, worst, verdict = estimated.plan, estimated.worst, estimated.verdict
    held = None if estimated.over_bytes else estimated.device_bytes
    return {name: getattr(plan, name) for name in VARIED} | {
        "n_micro_batches": plan.n_micro_batches,
        "verdict": verdict,
        "why": why_not(estimated),
        "device_low_bytes": None if held is None else held.low_bytes,
        "device_high_bytes": None if held is None else held.high_bytes,
        "peak_bytes": worst.peak_bytes,
        "over_bytes": estimated.over_bytes,
        "rest_bytes": worst.rest_bytes,
        "worst_stage": worst.stage,
        "when": worst.when,
        "step_s": estimated.step_s,
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
    held = estimated.device_bytes or (0, 0)
    return f"a GPU holds {interval_text(held)} {where}; {usable} are usable, {margin_text(cluster.margin)}"
