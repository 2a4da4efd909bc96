"""A case run, set beside memplan's prediction and the single-process run of the same training."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Final

from memplan.errors import MemplanError
from validate.cases import Case
from validate.launch import Ended, run_case
from validate.measure import RankMeasurement
from validate.parallelize import coordinates
from validate.predict import Prediction, prediction
from validate.records import Record

LOSS_TOLERANCES: Final = {"fp32": 1e-5, "bf16-mixed": 1e-2, "bf16": 1e-2}
"""Relative, any step's loss.

fp32: sums in another order differ by some 1e-7, which a few large steps amplify. bfloat16: one rounding
is up to 2^-9 = 2e-3; where they fall differs between autocast and FSDP2's mixed precision, and gradients
summed over micro-batches are rounded each time.
"""

GRADIENT_TOLERANCES: Final = {"fp32": 1e-6, "bf16-mixed": 4e-3, "bf16": 4e-3}
"""Relative, the norm of the first step's whole gradient: one backward pass, whose roundings average out.

bfloat16: one unit in the last place, 2^-8. Nine micro-batches over three ranks were seen 1.4e-3 off, since
every sum is rounded; a missing reduction or a wrong scale is off by tenths.
It shows what Adam's steps, which do not depend on a gradient's scale, would hide.
"""

Runner = Callable[[Case], Ended]


class References:
    """Single-process runs, each run once."""

    def __init__(self, run: Runner = run_case) -> None:
        self._run = run
        self._ended: dict[Case, Ended] = {}

    def of(self, case: Case) -> Ended:
        """The reference of a case."""
        alone = case.reference()
        if alone not in self._ended:
            self._ended[alone] = self._run(alone)
        return self._ended[alone]


def judged(case: Case, references: References, ended: Ended | None = None) -> Record:
    """The comparison of a case that ended so; it is run first if it has not been."""
    try:
        predictions = _predictions(case)
    except MemplanError as refusal:
        return Record(case=case.to_dict(), outcome="refused", reason=str(refusal))
    ended = ended or run_case(case)
    predicted = {"ranks": [asdict(p) for p in predictions]} if predictions else None
    if ended.outcome != "ok":
        return Record(case=case.to_dict(), outcome=ended.outcome, reason=ended.reason, predicted=predicted)
    return _compared(case, ended.ranks, predictions, references)


def _predictions(case: Case) -> list[Prediction] | None:
    try:
        return [
            prediction(case.model, case.plan, coordinates(case.plan, rank))
            for rank in range(case.plan.world_size)
        ]
    except NotImplementedError:
        return None


def _compared(
    case: Case,
    ranks: Sequence[RankMeasurement],
    predictions: Sequence[Prediction] | None,
    references: References,
) -> Record:
    losses = step_losses(ranks)
    loss_error, gradient_error, complaint = _training_errors(case, ranks, references)
    return Record(
        case=case.to_dict(),
        outcome="wrong-loss" if complaint else "ok",
        reason=complaint,
        predicted={"ranks": [asdict(p) for p in predictions]} if predictions else None,
        measured={"ranks": [_plain(rank) for rank in ranks], "losses": list(map(_finite, losses))},
        peak_error=peak_error(ranks, predictions) if predictions else None,
        states_off_bytes=states_off_bytes(ranks, predictions) if predictions else None,
        collectives_off=collectives_off(ranks, predictions) if predictions else None,
        loss_error=_finite(loss_error),
        gradient_error=_finite(gradient_error),
    )


def peak_error(ranks: Sequence[RankMeasurement], predictions: Sequence[Prediction]) -> float:
    """Prediction / measurement - 1 of the peak, of the rank where it is farthest from 0."""
    errors = [p.peak_bytes / m.memory.peak_bytes - 1 for m, p in zip(ranks, predictions, strict=True)]
    return max(errors, key=abs)


def states_off_bytes(ranks: Sequence[RankMeasurement], predictions: Sequence[Prediction]) -> int:
    """Absolute differences of weights, gradients and optimizer state, summed over ranks."""
    return sum(
        abs(p.weights_bytes - m.states.weights_bytes)
        + abs(p.grads_bytes - m.states.grads_bytes)
        + abs(p.optimizer_bytes - m.states.optimizer_bytes)
        for m, p in zip(ranks, predictions, strict=True)
    )


def collectives_off(ranks: Sequence[RankMeasurement], predictions: Sequence[Prediction]) -> int:
    """Entries (kind, axis, calls, payload) that only one side has, over all ranks."""
    return sum(len(set(m.collectives) ^ set(p.collectives)) for m, p in zip(ranks, predictions, strict=True))


def step_losses(ranks: Sequence[RankMeasurement]) -> list[float]:
    """The loss of each step over the global batch: the mean over the ranks that have one."""
    known = [
        [loss for loss in rank.losses if loss is not None] for rank in ranks if rank.losses[0] is not None
    ]
    return [sum(step) / len(step) for step in zip(*known, strict=True)]


def gradient_norms(ranks: Sequence[RankMeasurement]) -> list[float]:
    """The norm of the first gradient over all stages, as each replica (dp and tp rank) has it."""
    squares: Counter[tuple[int, int]] = Counter()
    for rank in ranks:
        squares[rank.at.dp, rank.at.tp] += rank.gradient_norm_squared  # type: ignore[assignment]
    return [math.sqrt(square) for square in squares.values()]


def _training_errors(
    case: Case, ranks: Sequence[RankMeasurement], references: References
) -> tuple[float | None, float | None, str]:
    losses = step_losses(ranks)
    if not all(map(math.isfinite, losses)) or losses[-1] >= losses[0]:
        return None, None, f"the loss does not fall: {losses[0]:.4g} to {losses[-1]:.4g}"
    if case.model.dropout:
        return None, None, ""
    reference = references.of(case)
    if reference.outcome != "ok":
        return None, None, f"the single-process run {reference.outcome}: {reference.reason}"
    loss_error = max(map(_relative, losses, step_losses(reference.ranks)))
    norm = gradient_norms(reference.ranks)[0]
    gradient_error = max(_relative(replica, norm) for replica in gradient_norms(ranks))
    return loss_error, gradient_error, _complaint(case, loss_error, gradient_error)


def _complaint(case: Case, loss_error: float, gradient_error: float) -> str:
    precision = case.plan.precision
    for what, error, tolerance in (
        ("a step's loss", loss_error, LOSS_TOLERANCES[precision]),
        ("the first gradient's norm", gradient_error, GRADIENT_TOLERANCES[precision]),
    ):
        if not error <= tolerance:
            return f"{what} is {error:.2g} off the single-process run; {precision} allows {tolerance:g}"
    return ""


def _relative(value: float, truth: float) -> float:
    return abs(value - truth) / abs(truth)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _plain(rank: RankMeasurement) -> dict[str, Any]:
    plain = asdict(rank)
    plain["memory"].pop("events")
    return {
        "rank": rank.rank,
        **plain["at"],
        **plain["states"],
        **plain["memory"],
        "collectives": plain["collectives"],
        "losses": plain["losses"],
        "step_s": plain["step_s"],
    }
