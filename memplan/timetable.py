"""The start and end of every pass of a pipeline, as the timeline of the step has them."""

from typing import Final

from memplan.errors import InvalidValue, MissingRule
from memplan.estimate import Estimate
from memplan.time.step import Priced
from memplan.time.timeline import TimedPass

MOST_PASSES: Final = 100_000
"""The most passes of a timetable."""


def timetable(estimate: Estimate) -> tuple[TimedPass, ...]:
    """Every pass of a step, rank by rank, in the order of each rank's record (`memplan.time.timeline`).

    A pass includes what it sends, and what its computation waits for. A gradient's reduction after the last
    pass, and the update, are no passes.

    >>> import memplan
    >>> e = memplan.estimate("llama-3-8b", cluster="2xh100-sxm", pp=2, schedule="gpipe", global_batch=2)
    >>> [(each.rank, each.part, each.micro_batch) for each in timetable(e)][:4]
    [(0, 'forward', 0), (0, 'forward', 1), (0, 'backward', 0), (0, 'backward', 1)]

    Raises:
        InvalidValue: an estimate without a step time, with a time model that has no timeline, or of too many
            passes.
        MissingRule: a record that names no passes, or whose ranks wait for each other.
    """
    if estimate.time_missing or estimate.cluster is None:
        missing = "; ".join(estimate.time_missing)
        raise InvalidValue(f"there is no step time: {missing}; use a cluster whose rates are known.")
    plan, model = estimate.plan, estimate.time_model
    if not isinstance(model, Priced):
        raise InvalidValue(f"time_model={model!r} has no timeline; use Measured().")
    n_passes = plan.n_stages * plan.n_micro_batches * 2
    if n_passes > MOST_PASSES:
        raise InvalidValue(
            f"{plan.n_micro_batches} micro-batches through {plan.n_stages} stages are {n_passes:,} passes; "
            f"use a smaller global_batch, of at most {MOST_PASSES:,}."
        )
    if not all(stage.record.step.has_passes for stage in estimate.stages):
        raise MissingRule(f"engine={plan.engine!r} records no passes; use another engine.")
    return model.timed_passes([stage.work for stage in estimate.stages], plan, estimate.cluster)
