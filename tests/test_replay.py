"""Measured runs on file, predicted afresh: states and collectives to the byte, the peak within 1 %.

The measurements are the files of `data/measurements` (see data/README.md). What is predicted is worked out
afresh, and nothing is run: a rule that goes wrong fails here in seconds, without torch.
"""

from collections import Counter
from functools import cache
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import pytest

from memplan import Model, Plan
from memplan.engines.checks import check_plan
from memplan.errors import PlanRefused
from memplan.estimate import StageEstimate, rank_estimate
from memplan.mesh import Mesh
from validate.cases import Case, architecture_traces
from validate.predict import axis_of
from validate.records import PEAK_TOLERANCE, Record, read_records

MEASURED = Path(__file__).parents[1] / "data" / "measurements"
FILES = sorted([*MEASURED.glob("*.jsonl"), *MEASURED.glob("releases/*.jsonl")])
EVERY = [record for file in FILES for record in read_records(file)]
RECORDS = [record for record in EVERY if record.outcome == "ok"]
REFUSED = [record for record in EVERY if record.outcome == "refused"]
MEDIAN_TOLERANCE = 0.0025
REAL = [record for record in RECORDS if record.case["tensors"] == "real"]
AT_TRUE_SIZE = [record for record in RECORDS if record.case["tensors"] == "fake"]
"""Of tensors that have shapes and no data."""

PLACES = {id(record): i for i, record in enumerate(EVERY)}
STATES = ("weights_bytes", "grads_bytes", "optimizer_bytes")

Entry = tuple[str, str, int, int]
"""A collective's kind, axis, calls, payload bytes."""


def model_of(record: Record) -> Model:
    return Case.from_dict(record.case).model


def plan_of(record: Record) -> Plan:
    return Case.from_dict(record.case).plan


class Said(NamedTuple):
    """What is predicted of a rank."""

    states: dict[str, int]
    collectives: set[Entry]
    peak_bytes: int


def predicted(record: Record) -> dict[int, Said]:
    """What is predicted of each measured rank: worked out once for all tests."""
    return _predicted(PLACES[id(record)])


@cache
def _predicted(place: int) -> dict[int, Said]:
    case = Case.from_dict(EVERY[place].case)
    found = {}
    for rank in ranks_of(EVERY[place]):
        at = case.plan.place(rank["rank"])
        estimated = rank_estimate(case.model, case.plan, at, case.kernels, case.talks_by)
        states = {kind: getattr(estimated.states, kind) for kind in STATES}
        found[rank["rank"]] = Said(states, entries(estimated, case.plan.mesh), estimated.peak_bytes)
    return found


def entries(estimated: StageEstimate, mesh: Mesh) -> set[Entry]:
    calls: Counter[tuple[str, str]] = Counter()
    payload_bytes: Counter[tuple[str, str]] = Counter()
    for collective in estimated.collectives:
        key = collective.kind, axis_of(mesh, collective.axis)
        calls[key] += collective.calls
        payload_bytes[key] += collective.payload_bytes
    return {(*key, n, payload_bytes[key]) for key, n in calls.items()}


def peak_errors(record: Record) -> list[float]:
    said = predicted(record)
    return [said[rank["rank"]].peak_bytes / rank["peak_bytes"] - 1 for rank in ranks_of(record)]


def ranks_of(record: Record) -> list[dict[str, Any]]:
    assert record.measured is not None, f"{record.case['name']} was not measured: {record.reason}"
    ranks: list[dict[str, Any]] = record.measured["ranks"]
    return ranks


def check_run(record: Record) -> None:
    """Every rank was measured in a run that trained rightly."""
    case = Case.from_dict(record.case)
    assert record.outcome == "ok", record.reason
    assert [rank["rank"] for rank in ranks_of(record)] == list(case.ranks)
    for rank in ranks_of(record):
        at = case.plan.place(rank["rank"])
        assert (rank["pp"], rank["dp"], rank["tp"]) == (at.pp, at.dp, at.tp)


def check_states(record: Record) -> None:
    """States equal the measured ones to the byte."""
    said = {rank: each.states for rank, each in predicted(record).items()}
    assert said == {r["rank"]: {kind: r[kind] for kind in STATES} for r in ranks_of(record)}


def check_collectives(record: Record) -> None:
    """Collectives equal the counted ones."""
    for rank in ranks_of(record):
        counted = {(c["kind"], c["axis"], c["calls"], c["payload_bytes"]) for c in rank["collectives"]}
        said = predicted(record)[rank["rank"]].collectives
        assert said == counted, f"rank {rank['rank']}: predicted and measured differ in {said ^ counted}"


def check_peak(record: Record) -> None:
    """The peak is within 1 % of the measured one."""
    errors = {rank["rank"]: error for rank, error in zip(ranks_of(record), peak_errors(record), strict=True)}
    off = {rank: f"{error:+.3%}" for rank, error in errors.items() if abs(error) > PEAK_TOLERANCE}
    assert not off, f"ranks whose predicted peak is off: {off}"


def check_file(record: Record) -> None:
    """The prediction on file is today's: notebooks and reports show it.

    A file is rejudged in the commit that changes a rule.
    """
    assert record.predicted is not None
    on_file = [rank["peak_bytes"] for rank in record.predicted["ranks"]]
    today = [predicted(record)[rank["rank"]].peak_bytes for rank in ranks_of(record)]
    assert on_file == today, "use `python -m validate rejudge FILE --out NEW`"


@pytest.mark.parametrize("record", RECORDS, ids=[record.case["name"] for record in RECORDS])
def test_a_measured_run_is_what_is_predicted_and_what_the_file_says(record):
    """One test of a run, so that what is predicted of it is worked out once."""
    for check in (check_run, check_states, check_collectives, check_peak, check_file):
        check(record)


def test_the_median_peak_is_within_a_quarter_percent():
    assert median(abs(max(peak_errors(record), key=abs)) for record in REAL) <= MEDIAN_TOLERANCE


@pytest.mark.parametrize("record", REFUSED, ids=[record.case["name"] for record in REFUSED])
def test_what_pytorch_failed_at_is_refused_with_a_way_out(record):
    assert record.anyway
    assert record.anyway != "ok"
    with pytest.raises(PlanRefused, match="; use "):
        check_plan(model_of(record), plan_of(record))


def test_every_record_is_a_run_or_a_refusal():
    assert {record.outcome for record in EVERY} == {"ok", "refused"}


def test_at_least_400_configurations_were_measured():
    assert len({(model_of(record), plan_of(record)) for record in REAL}) >= 400


# What the cases cover. A claim over every kind of plan holds for the kinds that were run.


def axes_of(plan: Plan) -> frozenset[str]:
    return frozenset(axis for axis in ("dp", "tp", "pp") if getattr(plan, axis) > 1)


def test_every_record_says_that_it_was_measured_on_cpu():
    assert {record.environment["device"] for record in RECORDS if record.environment} == {"cpu"}
    assert {record.case["device"] for record in RECORDS} == {"cpu"}


def test_single_ranks_of_up_to_1024_stood_in_for_all_and_their_training_was_not_checked():
    alone = [record for record in REAL if record.case["rank"] is not None]
    assert max(plan_of(record).world_size for record in alone) == 1024
    assert len({plan_of(record) for record in alone}) >= 35
    assert all(record.unchecked.startswith("not checked at all") for record in alone)
    assert all(record.loss_error is None for record in alone)


def test_records_without_data_say_so_and_were_neither_timed_nor_checked():
    for record in AT_TRUE_SIZE:
        assert record.environment is not None
        assert "no kernel runs" in record.environment["tensors"]
        assert record.loss_error is None
        assert record.measured is not None
        assert record.measured["losses"] == []
        assert all(rank["step_s"] == [] for rank in ranks_of(record))
    assert all("tensors" not in record.environment for record in REAL if record.environment)


def test_at_true_size_every_peak_is_right_to_the_byte():
    sizes = {model_of(record).name for record in AT_TRUE_SIZE}
    assert len(AT_TRUE_SIZE) >= 60
    assert sizes >= {"llama-3-8b", "llama-3-70b", "gpt3-175b", "llama-3.1-405b"}
    off = {record.case["name"]: errors for record in AT_TRUE_SIZE if any(errors := peak_errors(record))}
    assert not off


def test_at_least_30_configurations_differ():
    assert len({(model_of(record), plan_of(record)) for record in RECORDS}) >= 30


@pytest.mark.parametrize(
    "field, values",
    [
        ("zero", {0, 1, 2, 3}),
        ("precision", {"fp32", "bf16", "bf16-mixed"}),
        ("recompute", {"none", "full"}),
        ("optimizer", {"sgd", "sgd-momentum", "adam", "adamw"}),
    ],
)
def test_every_value_was_run(field, values):
    assert {getattr(plan_of(record), field) for record in RECORDS} >= values


def test_every_axis_was_run_alone_and_in_mixes_of_two_and_three():
    mixes = {axes_of(plan_of(record)) for record in RECORDS}
    every = ("dp", "tp", "pp")
    assert mixes == {
        frozenset(axis for axis, chosen in zip(every, choice, strict=True) if chosen)
        for choice in product((False, True), repeat=3)
    }


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_both_families_ran_both_schedules_and_tensor_parallelism_with_and_without_sp(family):
    plans = [plan_of(record) for record in RECORDS if record.case["model"]["family"] == family]
    assert {plan.schedule for plan in plans if plan.pp > 1} >= {"gpipe", "1f1b"}
    assert {plan.sequence_parallel for plan in plans if plan.tp > 1} == {False, True}
    assert {plan.zero for plan in plans if plan.dp > 1} == {0, 1, 2, 3}


def test_every_zero_stage_was_run_in_mixed_precision_and_in_a_pipeline():
    plans = [plan_of(record) for record in RECORDS]
    assert {p.zero for p in plans if p.dp > 1 and p.precision == "bf16-mixed"} == {0, 1, 2, 3}
    assert {p.zero for p in plans if p.dp > 1 and p.pp > 1} == {0, 1, 2, 3}


def test_every_architecture_that_was_traced_was_run():
    run = {record.case["model"]["name"] for record in read_records(MEASURED / "architectures.jsonl")}
    assert run == set(architecture_traces())
