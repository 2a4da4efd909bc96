"""What the page asks of memplan, without a browser; `test_web` opens the page itself."""

import json
from pathlib import Path

import pytest

import memplan
from memplan.engines.base import ENGINES
from memplan.engines.options import plan_fields
from memplan.launchers import exported
from memplan.plan import FIELDS, GROUPS
from memplan.search import searched
from memplan.tables import estimate_text, finding, ledger_rows
from memplan.timetable import timetable
from memplan.web import pack, page
from memplan.web.searching import VARIED
from memplan.web.timeline import POINTS

SMALL = {
    "model": "tinyllama-1.1b",
    "cluster": "4xh100-sxm",
    "pp": "2",
    "global_batch": "32",
    "seq_len": "512",
}


def answered(name, *arguments):
    found = json.loads(json.dumps(page.call(name, *arguments)))
    assert "error" not in found, found
    return found["value"]


def refused(name, *arguments):
    return page.call(name, *arguments)["error"]


@pytest.fixture(scope="module")
def expected():
    return memplan.estimate("tinyllama-1.1b", cluster="4xh100-sxm", pp=2, global_batch=32, seq_len=512)


def test_the_groups_have_every_field_of_a_plan_once():
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(FIELDS)


def test_the_form_has_every_field_and_option_once():
    form = answered("form")
    shared = [field["name"] for group in form["groups"] for field in group["fields"]]
    for engine in ENGINES.names():
        own = [field["name"] for field in form["engines"][engine]]
        assert sorted(shared + own) == sorted(plan_fields(engine))


def test_an_answer_is_the_estimate(expected):
    answer = answered("answer", SMALL)
    assert answer["peak_bytes"] == expected.worst.peak_bytes
    assert [stage["bytes"] for stage in answer["stages"]] == [
        {kind: stage.peak.of(kind) for kind in answer["stages"][0]["bytes"]} for stage in expected.stages
    ]
    assert [sum(stage["bytes"].values()) for stage in answer["stages"]] == [
        stage["total_bytes"] for stage in answer["stages"]
    ]
    assert answer["step_s"] == expected.step_s
    assert answer["plan"]["dp"] == "2"


def test_a_verdict_is_the_estimates(expected):
    held = answered("held", SMALL)
    assert held["verdict"] == expected.verdict
    assert held["device_bytes"] == list(expected.device_bytes)
    assert held["finding"] == finding(expected)
    assert answered("text", SMALL)["text"] == estimate_text(expected, "tinyllama-1.1b", details=True)


def test_a_ledger_adds_up_to_the_peak(expected):
    rows = answered("ledger", SMALL)["rows"]
    assert sum(row["total_bytes"] for row in rows) == expected.worst.peak_bytes
    assert len(rows) == len(ledger_rows(expected.worst.alive))


def test_a_schedule_of_few_micro_batches_is_the_whole_one_and_of_many_its_beginning(expected):
    assert len(answered("schedule", {**SMALL, "global_batch": "8"})["passes"]) == 2 * 2 * 4
    found = answered("schedule", SMALL)
    assert (found["shown"], found["n_micro_batches"]) == (8, 16)
    assert len(found["passes"]) < len(timetable(expected))


@pytest.mark.parametrize(
    "changed", [{}, {"pp": "1", "zero": "3"}, {"schedule": "gpipe"}, {"pp": "1", "dp": "4"}]
)
def test_a_step_is_drawn_with_its_peak(changed):
    asked = {**SMALL, **changed}
    of = memplan.estimate(**page.asked(asked)).worst
    found = answered("step", asked)
    points = [point for phase in found["phases"] for point in phase["points"]]
    assert max(map(sum, points)) == of.peak_bytes
    assert {phase["name"] for phase in found["phases"]} == {"forward", "backward", "optimizer"}
    assert len(points) < 2 * POINTS


def test_a_file_for_a_launcher_is_the_exports(expected):
    assert (
        answered("export", SMALL, "torchrun")["text"] == exported(expected, "torchrun", "tinyllama-1.1b").text
    )


def test_two_plans_are_compared_by_the_package():
    assert "tp" in answered("compared", SMALL, {**SMALL, "tp": "2"})["text"]


@pytest.mark.parametrize("changed", [{"tp": "3"}, {"model": "llama-9"}, {"zero": "7"}, {"cluster": "8xh900"}])
def test_what_the_package_refuses_is_refused_in_its_words(changed):
    asked = page.asked({**SMALL, **changed})
    with pytest.raises(memplan.MemplanError) as error:
        memplan.estimate(**asked)
    assert refused("answer", {**SMALL, **changed}) == str(error.value)


def test_an_unknown_name_is_refused():
    assert "tpp" in refused("answer", {**SMALL, "tpp": "2"})


def test_a_dropped_configuration_is_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = {
        "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4,
        "num_hidden_layers": 2, "num_key_value_heads": 4, "vocab_size": 1000, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512, "tie_word_embeddings": False,
    }  # fmt: skip
    name = answered("keep", "elsewhere/config.json", json.dumps(config))["model"]
    file = tmp_path / "config.json"
    found = answered("answer", {"model": name, "cluster": "1xl4"})
    assert found["peak_bytes"] == memplan.estimate(file, cluster="1xl4").worst.peak_bytes
    assert "drop" in refused("keep", "weights.bin", "")


def test_a_dropped_trace_is_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = Path(__file__).parent / "trace-of-format-1.json"
    name = answered("keep", "mine.json", file.read_text())["model"]
    found = answered("answer", {"model": name, "precision": "fp32"})
    assert found["peak_bytes"] == memplan.estimate(file, precision="fp32").worst.peak_bytes


def test_the_package_is_packed_alike_each_time(tmp_path):
    for name in ("a.zip", "b.zip"):
        pack.packed(tmp_path / name)
    assert (tmp_path / "a.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()


SPACES = {
    "one node": ({"model": "tinyllama-1.1b", "cluster": "4xl4", "global_batch": "8"}, VARIED, {}),
    "without a replica": (
        {"model": "llama-3-8b", "cluster": "8xh100-sxm", "global_batch": "16", "seq_len": "2048"},
        [name for name in VARIED if name != "dp_replicate"],
        {"dp_replicate": 1},
    ),
    "a schedule": (
        {"model": "llama-3-8b", "cluster": "16xa100-40-sxm", "global_batch": "32", "schedule": "gpipe"},
        ("pp", "tp", "zero", "recompute"),
        {"dp_replicate": 1, "sequence_parallel": False, "micro_batch": 1, "schedule": "gpipe"},
    ),
    "a model of experts": (
        {"model": "mixtral-8x7b", "cluster": "8xh200", "global_batch": "8", "seq_len": "2048"},
        ("zero", "recompute"),
        {"pp": 1, "tp": 1, "dp_replicate": 1, "sequence_parallel": False, "micro_batch": 1, "ep": 1},
    ),
}


@pytest.mark.parametrize("question, varied, given", SPACES.values(), ids=SPACES)
def test_a_search_without_numpy_finds_what_the_search_with_it_finds(question, varied, given):
    *_, found = page.search(question, varied)
    asked = {"schedule": "1f1b", "virtual_stages": 1, "offload": False} | page.asked(question) | given
    expected = searched(**asked)
    assert found["done"]
    assert found["n_seen"] == found["n_plans"]
    best = expected.within[0]
    assert (found["best"][0]["step_s"], found["best"][0]["peak_bytes"]) == (best.step_s, best.peak_bytes)
    again = page.answer(found["best"][0]["question"])
    assert (again["step_s"], again["peak_bytes"]) == (best.step_s, best.peak_bytes)
    if not found["n_refused"]:
        assert found["n_plans"] == expected.n_plans


def test_a_search_says_what_it_cannot_do():
    job = {"model": "llama-3-8b", "global_batch": "32768"}
    assert "No GPU is named" in next(page.stream(job, VARIED))["error"]
    assert "memplan search" in next(page.stream({**job, "cluster": "1024xh100-sxm"}, VARIED))["error"]
