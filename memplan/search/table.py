"""What a search found, as a frame and as text."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from memplan.layout import frame
from memplan.search.plans import VARIED
from memplan.search.space import refusal
from memplan.units import human_bytes

if TYPE_CHECKING:
    import pandas

    from memplan.plan import Plan
    from memplan.search.judge import Judged
    from memplan.search.search import Found

COLUMNS: Final = (
    *VARIED,
    "n_micro_batches",
    "verdict",
    "why",
    "peak_bytes",
    "over_bytes",
    "rest_bytes",
    "worst_stage",
    "when",
    "step_s",
    "tokens_per_s",
    "tokens_per_s_per_gpu",
    "mfu",
)


def search_frame(found: "Found") -> "pandas.DataFrame":
    """One row per plan that was kept: those that fit, those that are too large, those that are refused.

    Raises:
        MemplanError: if pandas is not installed.
    """
    result = frame(list(search_rows(found)), COLUMNS)
    result.attrs |= counts(found)
    return result


def counts(found: "Found") -> dict[str, Any]:
    """How many plans there are, why how many are refused, and what they are plans for."""
    return {
        "n_plans": found.n_plans,
        "n_fit": found.n_fit,
        "n_too_large": found.n_too_large,
        "n_slower": found.n_slower,
        "n_refused": found.n_refused,
        "refused_by": dict(found.refused_by),
        "cluster": found.cluster.name,
        "seq_len": found.base.seq_len,
    }


def search_rows(found: "Found") -> Iterator[dict[str, Any]]:
    """The frame's rows as plain values; figures of a refused plan are None."""
    for verdict, judged in (("fits", found.fit), ("too large", found.too_large)):
        for one in judged:
            yield _row(verdict, one)
    for values in found.refused:
        reason = refusal(found.model, found.base, values)
        yield dict.fromkeys(COLUMNS) | values | {"verdict": "refused", "why": reason}


def _row(verdict: str, judged: "Judged") -> dict[str, Any]:
    figures, over_bytes = judged.rest(), judged.over_bytes
    stage, when = figures["worst_stage"], figures["when"]
    over = f"{human_bytes(over_bytes)} too much on stage {stage}: {when}" if over_bytes else None
    known = {"peak_bytes": judged.peak_bytes, "over_bytes": over_bytes, **figures}
    known |= {"n_micro_batches": judged.plan.n_micro_batches, "verdict": verdict, "why": over}
    return _varied(judged.plan) | {name: known[name] for name in COLUMNS if name in known}


def _varied(plan: "Plan") -> dict[str, Any]:
    return {name: getattr(plan, name) for name in VARIED}
