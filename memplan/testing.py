"""Laws that hold for every engine, model and plan: what a new engine, axis or schedule is tested with.

    from memplan.testing import check_laws

    check_laws(memplan.estimate("gpt2", engine="mine", cluster="8xh100-sxm", zero=3))

Each law compares figures of memplan's own, exactly but for sums of floats. Whether the figures are
right only real runs tell: `python -m validate`.
"""

import re
from ast import literal_eval
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from math import inf, isclose
from typing import Any, Final

import numpy as np

from memplan.engines.checks import check_plan
from memplan.engines.options import plan_fields, with_said
from memplan.errors import MissingRule, PlanRefused
from memplan.estimate import Estimate, estimate_plan
from memplan.mesh import HOST
from memplan.models import Model
from memplan.plan import Plan
from memplan.search.bounds import ROUNDING, bounds
from memplan.search.plans import Grid
from memplan.shapes import KINDS
from memplan.tables import ledger_rows
from memplan.time.step import Priced

__all__ = [
    "LAWS",
    "check_allocator",
    "check_balance",
    "check_batches",
    "check_bounds",
    "check_laws",
    "check_sums",
    "check_traffic",
    "check_ways_out",
    "ways_out",
]

Law = Callable[[Estimate], None]
"""Raises `AssertionError` for an estimate that breaks it."""


def check_laws(estimate: Estimate) -> None:
    """Raise unless every law of `LAWS` holds for an estimate and for the plans beside it.

    Raises:
        AssertionError: naming the plan and what contradicts what.
    """
    for law in LAWS:
        law(estimate)


def check_sums(estimate: Estimate) -> None:
    """Raise unless tensors add up to the peak, which is the highest instant, and parts add up to the step."""
    for stage in estimate.stages:
        of_kinds = sum(stage.peak.of(kind) for kind in KINDS)
        of_tensors = sum(row["total_bytes"] for row in ledger_rows(stage.alive))
        highest = max((instant.total_bytes for instant in stage.instants), default=stage.rest_bytes)
        _equal(estimate, "the peak's kinds", of_kinds, "the peak", stage.peak_bytes)
        _equal(estimate, "the peak's tensors", of_tensors, "the peak", stage.peak_bytes)
        _equal(estimate, "the highest instant", max(highest, stage.rest_bytes), "the peak", stage.peak_bytes)
        _hold(
            estimate, all(n > 0 for n in stage.alive.values()), "a tensor is alive less than once at the peak"
        )
    for time in estimate.stage_times or ():
        _hold(estimate, min(time.parts.values()) >= 0, "a part of the step takes less than no time")
        _hold(
            estimate, isclose(sum(time.parts.values()), time.total_s), "the step is not the sum of its parts"
        )


def check_balance(estimate: Estimate) -> None:
    """Raise unless tensors are freed after they are allocated, and a step leaves gradients alone.

    Raises:
        ContradictoryEstimate: naming the tensor.
    """
    for stage in estimate.stages:
        stage.record.check(estimate.plan.engine)


def check_allocator(estimate: Estimate) -> None:
    """Raise unless the caching allocator holds at least the tensors, and reserves at least what it allocates.

    Raises:
        ContradictoryEstimate: naming the three figures.
    """
    for stage in estimate.stages:
        stage.replay()


def check_traffic(estimate: Estimate) -> None:
    """Raise unless collectives have several ranks and send at most twice their payload, and sends arrive."""
    plan = estimate.plan
    for stage in estimate.stages:
        for c in stage.collectives:
            ranks = 2 if c.axis == HOST else plan.mesh.size(c.axis)
            _hold(estimate, c.calls > 0 and ranks > 1, f"{c.kind} over {c.axis}, which has {ranks} rank(s)")
            _hold(estimate, 0 <= c.wire_bytes <= 2 * c.payload_bytes, f"{c.kind} sends {c.wire_bytes} bytes")
    passed = {
        kind: sum(c.payload_bytes for stage in estimate.stages for c in stage.collectives if c.kind == kind)
        for kind in ("send", "recv")
    }
    _equal(estimate, "what stages send", passed["send"], "what stages receive", passed["recv"])


def check_batches(estimate: Estimate) -> None:
    """Raise if larger micro-batches, or twice as many, lower the peak or take less time."""
    plan = estimate.plan
    twice = {"global_batch": 2 * plan.global_batch}
    for more in (twice, twice | {"micro_batch": 2 * plan.micro_batch}):
        other = _estimated(estimate, **more)
        if other is not None:
            said = f"{more} lowers"
            _hold(estimate, other.worst.peak_bytes >= estimate.worst.peak_bytes, f"{said} the peak")
            least_s = (estimate.step_s or 0.0) * (1 - ROUNDING)
            _hold(estimate, (other.step_s or inf) >= least_s, f"{said} the step time")


def check_bounds(estimate: Estimate) -> None:
    """Raise if a plan takes fewer bytes or less time than the bounds by which a search leaves it out."""
    if (
        estimate.cluster is None
        or not estimate.engine.gives_bounds
        or not isinstance(estimate.time_model, Priced)
    ):
        return
    grid = Grid.of(estimate.plan)
    least_bytes, least_s = bounds(estimate.model, grid, estimate.cluster, estimate.time_model)
    peak_bytes, step_s = estimate.worst.peak_bytes, estimate.step_s or inf
    _hold(estimate, float(np.max(least_bytes)) <= peak_bytes, f"{least_bytes} bytes are no lower bound")
    _hold(estimate, float(np.max(least_s)) <= step_s, f"{least_s} s are no lower bound of {step_s} s")


def check_ways_out(model: Model, plan: Plan) -> None:
    """Raise if the refusal of a plan offers nothing, or a value with which it is refused for the same reason.

    A plan that is not refused has nothing to check.
    """
    refusal = _refusal(model, plan)
    offered = list(ways_out(refusal, plan.engine))
    assert offered or not refusal or "; use " in refusal, f"no way out: {refusal}"
    for field, value in offered:
        with suppress(PlanRefused):
            again = _refusal(model, with_said(plan, **{field: value}))
            assert again != refusal, f"{field}={value!r} lifts nothing: {refusal}"


def ways_out(refusal: str, engine: str) -> Iterator[tuple[str, Any]]:
    """The fields of a plan that a refusal's way out names, each with a value.

    >>> list(ways_out("pp=9 is more than n_layers=8; use pp=8, or schedule='gpipe'.", "torch"))
    [('pp', 8), ('schedule', 'gpipe')]
    """
    fields = plan_fields(engine)
    for name, value in re.findall(r"(\w+)=('[\w.+-]+'|\d+|True|False)", refusal.partition("; use ")[2]):
        if name in fields:
            yield name, literal_eval(value)


LAWS: Final[tuple[Law, ...]] = (
    check_sums,
    check_balance,
    check_allocator,
    check_traffic,
    check_batches,
    check_bounds,
)
"""The laws of an estimate."""


def _refusal(model: Model, plan: Plan) -> str:
    """Why a plan cannot run; empty if it can."""
    try:
        check_plan(model, plan)
    except (PlanRefused, MissingRule) as refused:
        return str(refused)
    return ""


def _estimated(estimate: Estimate, **changes: Any) -> Estimate | None:
    """The estimate of the plan with changes; None if that plan cannot run."""
    try:
        plan = with_said(estimate.plan, **changes)
        other = estimate_plan(estimate.model, plan, estimate.cluster, estimate.device.type)
    except (PlanRefused, MissingRule):
        return None
    return replace(other, time_model=estimate.time_model)


def _equal(estimate: Estimate, what: str, found: int, other: str, expected: int) -> None:
    _hold(estimate, found == expected, f"{what} ({found} bytes) and {other} ({expected} bytes) are not equal")


def _hold(estimate: Estimate, holds: bool, otherwise: str) -> None:
    assert holds, f"{estimate!r}: {otherwise}"
