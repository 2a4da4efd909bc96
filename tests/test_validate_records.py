"""Records, the verdict's arithmetic, the table."""

from dataclasses import replace

import pytest

from memplan import Plan
from memplan.errors import InvalidValue
from validate import report
from validate.cases import LLAMA, Case
from validate.collectives import Collective
from validate.judge import collectives_off, gradient_norms, peak_error, states_off_bytes, step_losses
from validate.measure import Memory, RankMeasurement, States
from validate.parallelize import Coordinates
from validate.predict import Prediction
from validate.records import Record, append_records, read_records

CASE = Case(name="a case", model=LLAMA, plan=Plan(dp=2, global_batch=2))
REDUCE = Collective(kind="all_reduce", axis="dp", calls=2, payload_bytes=100)
RECORD = Record(case=CASE.to_dict(), outcome="ok", peak_error=-0.004, states_off_bytes=0, collectives_off=0)


def measurement(rank=0, at=(0, 0, 0), peak_bytes=1000, losses=(2.0, 1.0)):
    return RankMeasurement(
        rank=rank,
        at=Coordinates(pp=at[0], dp=at[1], tp=at[2]),
        states=States(weights_bytes=10, grads_bytes=20, optimizer_bytes=30),
        memory=Memory(rest_bytes=40, peak_bytes=peak_bytes, peak_reserved_bytes=None),
        collectives=(REDUCE,),
        losses=losses,
        gradient_norm_squared=4.0,
        step_s=(0.1,),
    )


def predicted(peak_bytes=1000, collectives=(REDUCE,), **states):
    known = {"weights_bytes": 10, "grads_bytes": 20, "optimizer_bytes": 30} | states
    return Prediction(**known, peak_bytes=peak_bytes, collectives=collectives)


def test_records_survive_the_file(tmp_path):
    file = tmp_path / "new" / "records.jsonl"
    append_records(file, [RECORD])
    append_records(file, [replace(RECORD, outcome="crashed", reason="a\nb")])
    assert [record.outcome for record in read_records(file)] == ["ok", "crashed"]
    assert read_records(file)[0] == RECORD


@pytest.mark.parametrize("line", ["{", '{"no": "record"}', "[1]"])
def test_a_line_that_is_no_record_is_named(tmp_path, line):
    file = tmp_path / "records.jsonl"
    file.write_text(RECORD.to_json() + "\n" + line + "\n")
    with pytest.raises(InvalidValue, match="line 2 is not a record"):
        read_records(file)


def test_the_peak_error_is_the_worst_ranks_with_its_sign():
    ranks = [measurement(peak_bytes=1000), measurement(peak_bytes=2000)]
    assert peak_error(ranks, [predicted(1005), predicted(1980)]) == pytest.approx(-0.01)


def test_states_off_never_cancel():
    ranks = [measurement(), measurement()]
    assert states_off_bytes(ranks, [predicted(weights_bytes=13), predicted(optimizer_bytes=26)]) == 7


def test_an_entry_that_differs_is_missing_on_both_sides():
    other = replace(REDUCE, payload_bytes=99)
    assert collectives_off([measurement()], [predicted()]) == 0
    assert collectives_off([measurement()], [predicted(collectives=(other,))]) == 2
    assert collectives_off([measurement()], [predicted(collectives=())]) == 1


def test_losses_are_the_mean_over_the_ranks_that_have_one():
    silent = measurement(losses=(None, None))
    assert step_losses([silent, measurement(losses=(4.0, 2.0)), measurement()]) == [3.0, 1.5]


def test_gradient_norms_add_up_over_stages_of_one_replica():
    stages = [measurement(at=(0, 0, 0)), measurement(at=(1, 0, 0)), measurement(at=(0, 1, 0))]
    assert gradient_norms(stages) == pytest.approx([8**0.5, 2.0])


def test_only_a_right_prediction_is_confirmed():
    assert RECORD.confirmed
    assert not replace(RECORD, states_off_bytes=4).confirmed
    assert not replace(RECORD, collectives_off=1).confirmed
    assert not replace(RECORD, peak_error=0.011).confirmed
    assert not replace(RECORD, peak_error=None).confirmed
    assert not replace(RECORD, outcome="wrong-loss").confirmed


def test_rows_fit_80_columns():
    measured = {"ranks": [{"peak_bytes": 123_456_789}], "losses": [1.0]}
    long = replace(RECORD, case={**RECORD.case, "name": "x" * 90}, measured=measured)
    refused = replace(RECORD, outcome="refused", reason="why " * 40)
    lines = [*report.header().splitlines(), report.row(long), *report.row(refused).splitlines()]
    lines += report.summary([long, refused]).splitlines()
    assert max(map(len, lines)) <= 80
