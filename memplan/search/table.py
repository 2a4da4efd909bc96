"""What a search found, as a frame and as text."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from memplan.estimate import estimate_plan
from memplan.layout import frame
from memplan.search.best import Rows, n_rows
from memplan.search.plans import VARIED
from memplan.search.space import refusal
from memplan.units import human_bytes

if TYPE_CHECKING:
    import pandas

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
    for verdict, rows in (("fits", found.fit), ("too large", found.too_large)):
        for i in range(n_rows(rows)):
            yield _row(found, verdict, rows, i)
    for i in range(n_rows(found.refused)):
        values = found.values(found.refused, i)
        yield (
            dict.fromkeys(COLUMNS)
            | values
            | {
                "verdict": "refused",
                "why": refusal(found.model, found.base, values),
            }
        )


def _row(found: "Found", verdict: str, rows: Rows, i: int) -> dict[str, Any]:
    values = found.values(rows, i)
    plan = found.plan(rows, i)
    estimated = estimate_plan(found.model, plan, found.cluster)
    worst, over_bytes = estimated.worst, int(rows["over_bytes"][i])
    over = f"{human_bytes(over_bytes)} too much on stage {worst.stage}: {worst.when}" if over_bytes else None
    return values | {
        "n_micro_batches": plan.n_micro_batches,
        "verdict": verdict,
        "why": over,
        "peak_bytes": int(rows["peak_bytes"][i]),
        "over_bytes": over_bytes,
        "rest_bytes": int(rows["rest_bytes"][i]),
        "worst_stage": int(rows["worst_stage"][i]),
        "when": worst.when,
        "step_s": estimated.step_s,
        "tokens_per_s": estimated.tokens_per_s,
        "tokens_per_s_per_gpu": estimated.tokens_per_s_per_gpu,
        "mfu": estimated.mfu,
    }
