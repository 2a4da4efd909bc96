"""Compares a case's run with memplan's prediction and with a single-process run of the same training."""

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, fields, replace
from threading import Lock
from typing import Any, Final

from memplan.errors import MemplanError, MissingRule
from validate.cases import Case, option
from validate.collectives import Collective
from validate.launch import Ended, run_case
from validate.measure import Memory, RankMeasurement, States
from validate.predict import Prediction, prediction
from validate.records import Record
from validate.systems.torch.parallelize import POWERSGD_FIRST_STEP

LOSS_TOLERANCES: Final = {"float32": 1e-5, "float16": 2.5e-3, "bfloat16": 1e-2}
"""Relative, any step's loss, by the type that is computed in.

float32: sums in another order differ by some 1e-7, which a few large steps amplify. bfloat16: one rounding
is up to 2^-9 = 2e-3; where they fall differs between autocast and FSDP2's mixed precision, and gradients
summed over micro-batches are rounded each time. float16: ten roundings of up to 2^-12.
"""

GRADIENT_TOLERANCES: Final = {"float32": 1e-6, "float16": 5e-4, "bfloat16": 4e-3}
"""Relative, the norm of the first step's whole gradient: one backward pass, whose roundings average out.

bfloat16: one unit in the last place, 2^-8. Nine micro-batches over three ranks were seen 1.4e-3 off, since
every sum is rounded; a missing reduction or a wrong scale is off by tenths. float16: 2^-11 (6e-6 seen).
It shows what Adam's steps, which do not depend on a gradient's scale, would hide.
"""

COMPRESSION_TOLERANCES: Final = {"none": 0.0, "fp16": 2**-11, "bf16": 2**-8, "powersgd": 0.0}
"""Relative, losses and gradient norm, beside the precision's own: what DDP's hook rounds away.

One rounding to float16 is up to 2^-11, to bfloat16 up to 2^-8; each element is rounded before and after it is
summed, and those errors average out over a norm (seen: 4e-6 and 1e-5). PowerSGD is no rounding but an
approximation of rank 1: the steps before it starts are compared as without a hook; of those after, only that
the loss keeps falling.
"""

Runner = Callable[[Case], Ended]


class References:
    """Single-process runs, each run once, by whichever thread asks for it first."""

    def __init__(self, run: Runner = run_case) -> None:
        self._run = run
        self._lock = Lock()
        self._ended: dict[Case, Future[Ended]] = {}

    def of(self, case: Case) -> Ended:
        """The reference of a case."""
        alone = case.reference()
        with self._lock:
            first = alone not in self._ended
            future = self._ended.setdefault(alone, Future())
        if first:
            try:
                future.set_result(self._run(alone))
            except BaseException as error:
                future.set_exception(error)
        return future.result()


def judged(
    case: Case,
    references: References,
    ended: Ended | None = None,
    *,
    run: Runner = run_case,
    anyway: bool = False,
) -> Record:
    """The record of a case: its run, given or made now, compared with prediction and single-process run.

    A plan that is refused is not run, unless `anyway`.
    """
    began_s = time.monotonic()
    try:
        predictions = _predictions(case)
    except MemplanError as refusal:
        said = _said(_verdict(case, None, run(case), references)) if anyway else ""
        return Record(case=case.to_dict(), outcome="refused", reason=str(refusal), anyway=said)
    fresh = ended is None
    ended = ended or run(case)
    ran_s = time.monotonic() - began_s
    record = _verdict(case, predictions, ended, references)
    if ended.cost is None:
        return record
    cost = ended.cost
    return replace(
        record,
        setup_s=rounded(cost.setup_s),
        steps_s=rounded(cost.steps_s),
        overhead_s=rounded(ran_s - cost.setup_s - cost.steps_s) if fresh else None,
        cpu_s=rounded(cost.cpu_s),
        rss_bytes=cost.rss_bytes,
    )


def _said(record: Record) -> str:
    """An outcome and its reason, on one line."""
    return f"{record.outcome}: {record.headline}" if record.reason else record.outcome


def _verdict(
    case: Case, predictions: Sequence[Prediction] | None, ended: Ended, references: References
) -> Record:
    if ended.outcome == "ok":
        return _compared(case, ended.ranks, predictions, references)
    predicted = {"ranks": [asdict(p) for p in predictions]} if predictions else None
    return Record(case=case.to_dict(), outcome=ended.outcome, reason=ended.reason, predicted=predicted)


def _predictions(case: Case) -> list[Prediction] | None:
    try:
        return [prediction(case, rank) for rank in case.ranks]
    except MissingRule:
        return None


def _compared(
    case: Case,
    ranks: Sequence[RankMeasurement],
    predictions: Sequence[Prediction] | None,
    references: References,
) -> Record:
    losses = step_losses(ranks) if case.computes else []
    loss_error, gradient_error, complaint = _training_errors(case, ranks, losses, references)
    return Record(
        case=case.to_dict(),
        outcome="wrong-loss" if complaint else "ok",
        reason=complaint,
        predicted={"ranks": [asdict(p) for p in predictions]} if predictions else None,
        measured={"ranks": [_plain(rank) for rank in ranks], "losses": [rounded(x, 7) for x in losses]},
        peak_error=rounded(peak_error(ranks, predictions)) if predictions else None,
        states_off_bytes=states_off_bytes(ranks, predictions) if predictions else None,
        collectives_off=collectives_off(ranks, predictions) if predictions else None,
        loss_error=rounded(loss_error),
        gradient_error=rounded(gradient_error),
        attributed_fraction=attributed_fraction(ranks),
        unchecked=case.unchecked,
    )


def rejudged(record: Record) -> Record:
    """The record with its measurement compared with memplan's present prediction; nothing is run.

    Raises:
        MemplanError: a plan that ran and that memplan refuses now.
    """
    if record.outcome != "ok" or record.measured is None:
        return record
    case = Case.from_dict(record.case)
    ranks = [_measurement(case, plain) for plain in record.measured["ranks"]]
    predictions = _predictions(case)
    return replace(
        record,
        predicted={"ranks": [asdict(p) for p in predictions]} if predictions else None,
        peak_error=rounded(peak_error(ranks, predictions)) if predictions else None,
        states_off_bytes=states_off_bytes(ranks, predictions) if predictions else None,
        collectives_off=collectives_off(ranks, predictions) if predictions else None,
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


def attributed_fraction(ranks: Sequence[RankMeasurement]) -> float | None:
    """The smallest attributed fraction of the bytes at the peak over all ranks; None if one is unknown."""
    known = [rank.attributed_fraction for rank in ranks if rank.attributed_fraction is not None]
    return rounded(min(known), 7) if len(known) == len(ranks) else None


def step_losses(ranks: Sequence[RankMeasurement]) -> list[float]:
    """The loss of each step over the global batch: the mean over the ranks that have one."""
    known = [
        [loss for loss in rank.losses if loss is not None] for rank in ranks if rank.losses[0] is not None
    ]
    return [sum(step) / len(step) for step in zip(*known, strict=True)]


def gradient_norms(ranks: Sequence[RankMeasurement]) -> list[float]:
    """The norm of the first gradient over all stages, as each replica and tensor rank has it."""
    squares: Counter[tuple[int, ...]] = Counter()
    for rank in ranks:
        at = rank.at.dp_replicate, rank.at.dp, rank.at.cp, rank.at.tp
        squares[at] += rank.gradient_norm_squared  # type: ignore[assignment]
    return [math.sqrt(square) for square in squares.values()]


def _training_errors(
    case: Case, ranks: Sequence[RankMeasurement], losses: Sequence[float], references: References
) -> tuple[float | None, float | None, str]:
    if not case.computes:
        return None, None, ""
    exact = (
        POWERSGD_FIRST_STEP + 1 if option(case.plan, "ddp_comm_hook", "none") == "powersgd" else len(losses)
    )
    start = losses[exact - 1] if exact < len(losses) else losses[0]
    if not all(map(math.isfinite, losses)) or losses[-1] >= start:
        return None, None, f"the loss does not fall: {start:.4g} to {losses[-1]:.4g}"
    if case.unchecked:
        return None, None, ""
    reference = references.of(case)
    if reference.outcome != "ok":
        return None, None, f"the single-process run {reference.outcome}: {reference.reason}"
    loss_error = max(map(_relative, losses[:exact], step_losses(reference.ranks)))
    norm = gradient_norms(reference.ranks)[0]
    gradient_error = max(_relative(replica, norm) for replica in gradient_norms(ranks))
    return loss_error, gradient_error, _complaint(case, loss_error, gradient_error)


def _complaint(case: Case, loss_error: float, gradient_error: float) -> str:
    precision, hook = case.plan.precision, option(case.plan, "ddp_comm_hook", "none")
    compressed, compute = COMPRESSION_TOLERANCES[hook], case.plan.formats.compute.name
    for what, error, tolerance in (
        ("a step's loss", loss_error, LOSS_TOLERANCES[compute] + compressed),
        ("the first gradient's norm", gradient_error, GRADIENT_TOLERANCES[compute] + compressed),
    ):
        if not error <= tolerance:
            allowed_by = precision if hook == "none" else f"{precision} with ddp_comm_hook={hook!r}"
            return f"{what} is {error:.2g} off the single-process run; {allowed_by} allows {tolerance:g}"
    return ""


def _relative(value: float, truth: float) -> float:
    return abs(value - truth) / abs(truth)


def rounded(value: float | None, digits: int = 4) -> float | None:
    """A number rounded to significant digits; None if it is not finite.

    >>> rounded(7.823684215545654, 7), rounded(-2.800715246387142e-07)
    (7.823684, -2.801e-07)
    """
    return float(f"{value:.{digits}g}") if value is not None and math.isfinite(value) else None


def _plain(rank: RankMeasurement) -> dict[str, Any]:
    plain = asdict(rank)
    for kept in ("events", "held"):
        plain["memory"].pop(kept)
    return {
        "rank": rank.rank,
        **rank.at.coordinates,
        **plain["states"],
        **{name: value for name, value in plain["memory"].items() if value is not None},
        "collectives": plain["collectives"],
        "step_s": [rounded(seconds) for seconds in rank.step_s],
    }


def _measurement(case: Case, plain: Mapping[str, Any]) -> RankMeasurement:
    """The measurement written by `_plain`; what that leaves out is empty or NaN."""
    return RankMeasurement(
        rank=plain["rank"],
        at=case.plan.place(plain["rank"]),
        states=States(**{field.name: plain[field.name] for field in fields(States)}),
        memory=Memory(
            **{field.name: plain[field.name] for field in fields(Memory) if field.name in plain},
        ),
        collectives=tuple(Collective(**entry) for entry in plain["collectives"]),
        losses=(),
        gradient_norm_squared=math.nan,
        step_s=tuple(plain["step_s"]),
        prepared_at_s=math.nan,
        trained_at_s=math.nan,
    )
