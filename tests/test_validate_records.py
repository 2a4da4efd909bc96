"""Records, the verdict's arithmetic, the table."""

import json
import lzma
import re
import resource
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from memplan import Plan
from memplan.errors import InvalidValue
from memplan.models.trace_from_json import LARGEST_TRACE_BYTES
from memplan.plan import Rank
from validate import cases, report
from validate.__main__ import main
from validate.cases import Case
from validate.collectives import Collective
from validate.judge import collectives_off, gradient_norms, peak_error, states_off_bytes, step_losses
from validate.lines import DiskFull
from validate.measure import Memory, RankMeasurement, States
from validate.predict import Prediction
from validate.records import Record, merged, open_records, read_records
from validate.suites.models import LLAMA

MEASURED = Path(__file__).parents[1] / "data" / "measurements"
CASE = Case(name="a case", model=LLAMA, plan=Plan(dp=2, global_batch=2))
REDUCE = Collective(kind="all_reduce", axis="dp", calls=2, payload_bytes=100)
RECORD = Record(case=CASE.to_dict(), outcome="ok", peak_error=-0.004, states_off_bytes=0, collectives_off=0)


def measurement(rank=0, at=(0, 0, 0), peak_bytes=1000, losses=(2.0, 1.0)):
    return RankMeasurement(
        rank=rank,
        at=Rank(pp=at[0], dp=at[1], tp=at[2]),
        states=States(weights_bytes=10, grads_bytes=20, optimizer_bytes=30),
        memory=Memory(rest_bytes=40, peak_bytes=peak_bytes, peak_reserved_bytes=None),
        collectives=(REDUCE,),
        losses=losses,
        gradient_norm_squared=4.0,
        step_s=(0.1,),
        prepared_at_s=1.0,
        trained_at_s=2.0,
    )


def predicted(peak_bytes=1000, collectives=(REDUCE,), **states):
    known = {"weights_bytes": 10, "grads_bytes": 20, "optimizer_bytes": 30} | states
    return Prediction(**known, peak_bytes=peak_bytes, collectives=collectives)


def test_records_survive_the_file(tmp_path):
    file = tmp_path / "new" / "records.jsonl"
    with open_records(file, resume=False) as records:
        records.append(RECORD)
        records.append(replace(RECORD, outcome="crashed", reason="a\nb"))
    assert [record.outcome for record in read_records(file)] == ["ok", "crashed"]
    assert read_records(file)[0] == RECORD


@pytest.mark.parametrize("line", ["{", '{"no": "record"}', "[1]"])
def test_a_line_that_is_no_record_is_named(tmp_path, line):
    file = tmp_path / "records.jsonl"
    with open_records(file, resume=False) as records:
        records.append(RECORD)
    file.write_text(file.read_text() + line + "\n")
    with pytest.raises(InvalidValue, match="line 2 is not a record"):
        read_records(file)


@pytest.mark.parametrize(
    "name", ["path", "../traces/hf-bert", "../../data/traces/hf-bert", "..", "", "x\x00"]
)
def test_a_traced_model_of_a_record_is_found_by_its_name_and_never_by_a_path(tmp_path, name):
    trace = tmp_path / "hf-bert.json"
    trace.write_bytes((MEASURED.parent / "traces" / "hf-bert.json").read_bytes())
    case = CASE.to_dict() | {"model": {"family": "traced", "name": "hf-bert"}}
    file = tmp_path / "records.jsonl"
    file.write_text(json.dumps({"case": case, "outcome": "refused"}) + "\n")
    assert read_records(file)[0].case["model"]["name"] == "hf-bert"
    case["model"]["name"] = str(trace.with_suffix("")) if name == "path" else name
    file.write_text(json.dumps({"case": case, "outcome": "refused"}) + "\n")
    with pytest.raises(InvalidValue, match="line 1 is not a record of validate: unknown trace"):
        read_records(file)


def test_a_packed_trace_is_whole_and_of_a_sensible_size_or_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(cases, "ARCHITECTURES", tmp_path)
    text = (MEASURED.parent / "traces" / "hf-bert.json").read_bytes()
    packed = lzma.compress(text)
    bomb = lzma.compress(b"0" * (LARGEST_TRACE_BYTES + 1))
    assert len(bomb) < 20_000
    for content, complaint in {
        packed: "",
        b"something else": "is no xz file (Input format not supported by decoder); compress",
        packed[:-20]: "is not one whole xz stream",
        packed + packed: "is not one whole xz stream",
        bomb: f"unpacks to more than {LARGEST_TRACE_BYTES} bytes, which no trace should have",
        lzma.compress(b"\xff"): "is not UTF-8 text",
        lzma.compress(b"[]"): "is no trace",
    }.items():
        (tmp_path / "some.json.xz").write_bytes(content)
        cases.shipped_trace.cache_clear()
        if not complaint:
            assert cases.shipped_trace("some").name == "hf-bert"
            continue
        with pytest.raises(InvalidValue, match=re.escape(complaint)) as refused:
            cases.shipped_trace("some")
        assert str(refused.value).startswith(str(tmp_path / "some.json.xz"))


def test_what_is_said_twice_is_written_once_and_read_back(tmp_path):
    rank = {
        "weights_bytes": 8,
        "grads_bytes": 8,
        "optimizer_bytes": 16,
        "collectives": [{"kind": "send", "axis": "pp", "calls": 1, "payload_bytes": 4}],
    }
    sides = {"ranks": [rank | {"peak_bytes": 10}, rank | {"peak_bytes": 11}]}
    seen = {"ranks": [each | {"rank": i} for i, each in enumerate(sides["ranks"])], "losses": [2.0, 1.0]}
    record = replace(RECORD, predicted=sides, measured=seen, environment={"torch": "2"})
    file = tmp_path / "records.jsonl"
    with open_records(file, resume=False) as records:
        for name in "ab":
            records.append(replace(record, case=replace(CASE, name=name).to_dict()))
    first, *lines = file.read_text().splitlines()
    assert json.loads(first) == {"environment": {"torch": "2"}}
    assert len(lines) == 2
    assert all(line.count('"weights_bytes"') == 2 and '"seq_len"' not in line for line in lines)
    assert read_records(file) == [replace(record, case=replace(CASE, name=name).to_dict()) for name in "ab"]


def test_of_several_records_of_a_case_the_last_stands():
    other = replace(RECORD, case=replace(CASE, seed=7).to_dict())
    again = replace(RECORD, case=replace(CASE, timeout_s=9.0).to_dict(), outcome="crashed")
    assert merged([RECORD, other, again]) == [again, other]


@pytest.mark.parametrize(
    "tail", [b'{"case":{"name":"a ca', b"{", b"\0" * 100, b'{"case":{"na\0\0\0\n', b"\0\0\n"]
)
def test_a_torn_last_line_is_cut_off_and_nothing_else(tmp_path, tail):
    file = tmp_path / "records.jsonl"
    with open_records(file, resume=False) as records:
        records.append(RECORD)
    whole = file.read_bytes()
    file.write_bytes(whole + tail)
    with open_records(file, resume=True) as records:
        assert records.known == [RECORD]
        assert file.read_bytes() == whole
        records.append(replace(RECORD, outcome="crashed"))
    assert [record.outcome for record in read_records(file)] == ["ok", "crashed"]


@pytest.mark.parametrize(
    "content", [b"# A README\n", b"# A README without its last newline", b"\x7fELF\0\0", b"{}\n[]"]
)
def test_a_file_of_something_else_is_left_alone(tmp_path, content):
    file = tmp_path / "records.jsonl"
    file.write_bytes(content)
    with pytest.raises(InvalidValue, match="line 1 is not a record"), open_records(file, resume=True):
        pass
    assert file.read_bytes() == content


def test_a_file_with_records_is_only_added_to_when_asked(tmp_path):
    file = tmp_path / "records.jsonl"
    with open_records(file, resume=False) as records:
        records.append(RECORD)
    with pytest.raises(InvalidValue, match="use --resume"), open_records(file, resume=False):
        pass


def test_two_sweeps_cannot_add_to_one_file(tmp_path):
    file = tmp_path / "records.jsonl"
    with (
        open_records(file, resume=True),
        pytest.raises(InvalidValue, match="another sweep"),
        open_records(file, resume=True),
    ):
        pass
    with open_records(file, resume=True):
        pass


def test_what_a_full_disk_cannot_take_is_not_half_written(tmp_path):
    file = tmp_path / "records.jsonl"
    with open_records(file, resume=False) as records:
        records.append(RECORD)
        whole = file.read_bytes()
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 10, limits[1]))
        try:
            with pytest.raises(DiskFull, match="--resume"):
                records.append(RECORD)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert file.read_bytes() == whole
        records.append(RECORD)
    assert read_records(file) == [RECORD, RECORD]


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
    lines = [
        line
        for text in (report.header(), report.row(long), report.row(refused))
        for line in text.splitlines()
    ]
    lines += report.summary([long, refused]).splitlines()
    assert max(map(len, lines)) <= 80


def test_every_record_says_the_batch_and_how_many_micro_batches_make_it(tmp_path):
    case = Case(name="any", model=LLAMA, plan=Plan(dp=2, micro_batch=2, global_batch=24, seq_len=8))
    with open_records(tmp_path / "any.jsonl", resume=False) as records:
        records.append(Record(case=case.to_dict(), outcome="ok"))
    (record,) = read_records(tmp_path / "any.jsonl")
    batch = {"global_batch": 24, "micro_batch": 2, "n_micro_batches": 6}
    assert batch.items() <= record.case["plan"].items()
    assert Case.from_dict(record.case) == case
    assert "24 x 8 tokens; 6 micro-batches of 2 for each of 2 replicas" in report.details(record)


def test_what_was_measured_is_set_beside_what_is_predicted_now(tmp_path):
    file, out = MEASURED / "quick.jsonl", tmp_path / "again.jsonl"
    stale = [replace(record, peak_error=0.5, states_off_bytes=1) for record in read_records(file)[:3]]
    with open_records(tmp_path / "stale.jsonl", resume=False) as kept:
        for record in stale:
            kept.append(record)
    result = CliRunner().invoke(main, ["rejudge", str(tmp_path / "stale.jsonl"), "--out", str(out)])
    assert result.exit_code == 0, result.output
    afresh = read_records(out)
    assert [record.measured for record in afresh] == [record.measured for record in stale]
    assert all(record.confirmed for record in afresh)


@pytest.mark.parametrize("file", sorted(MEASURED.rglob("*.jsonl")), ids=lambda file: file.stem)
def test_no_record_names_a_folder_of_a_machine(file):
    text = file.read_text(encoding="utf-8")
    named = re.findall(r'(?<![\w./-])/(?=[\w.-]+/)[^"\s\\]*|/site-packages/', text)
    assert not named, set(named)
