"""What a stranger meets: each answer is right, whole, in the same words, and comes with what to type next."""

import json
import math
import os
import re
import resource
import shlex
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from mypy import api as mypy

import memplan
from memplan.cli import commands
from memplan.errors import InvalidValue, MemplanError
from memplan.snapshot import Block
from memplan.text_tables import csv_of
from memplan.time.step import Roofline
from validate.__main__ import main as validate_commands
from validate.attribution import _holding
from validate.records import Outcome, read_records
from validate.report import row, summary
from validate.shipped import data_folder
from validate.suites import NAMES

ROOT = Path(__file__).parent.parent
README, GUIDE = ((ROOT / path).read_text(encoding="utf-8") for path in ("README.md", "memplan/README.md"))
H100S = ["--cluster", "8xh100-sxm"]
REFUSED = data_folder() / "measurements" / "refused.jsonl"
GROUPS = {"memplan": commands, "validate": validate_commands}


def run(*args, group=commands):
    return CliRunner().invoke(group, [str(arg) for arg in args])


def validate(*args):
    return run(*args, group=validate_commands)


def refusal(result):
    """The one line that a refused command says, and nothing else."""
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: ")
    return line


# Wrong or misleading


@pytest.mark.parametrize("plans", [("zero=3", "zero=2,offload"), ("zero=2,offload", "zero=3")])
def test_a_time_that_is_not_known_is_never_as_fast(plans):
    told = run("compare", "gpt2", *plans, *H100S, "--global-batch", 64)
    assert told.exit_code == 0
    assert "Which is faster is not known" in " ".join(told.output.split())
    assert "as fast" not in told.output
    assert "unknown" in told.output


VERDICTS = {"fits": "FITS", "does not fit": "DOES NOT FIT", "cannot say": "CANNOT SAY"}


@pytest.mark.parametrize("seq_len,verdict", [(1024, "fits"), (9216, "cannot say"), (65536, "does not fit")])
def test_one_verdict_in_three_words_hangs_on_one_interval(seq_len, verdict):
    options: dict[str, Any] = {"cluster": "8xh100-sxm", "zero": 3, "global_batch": 64, "seq_len": seq_len}
    options["implementation"] = "reference"
    e = memplan.estimate("llama-3-8b", **options)
    usable, budget = e.cluster.gpu.usable_bytes, e.cluster.budget_bytes
    low, high = e.device_bytes
    by_hand = "does not fit" if low > usable else "cannot say" if high > budget else "fits"
    assert e.verdict == by_hand == verdict == e.to_dict()["verdict"]
    said = [word for word in VERDICTS.values() if f" on 8xh100-sxm {word}: " in str(e)]
    assert said == [VERDICTS[verdict]]
    assert "within the margin" not in str(e)
    found = memplan.search(
        "llama-3-8b", **options, tp=1, pp=1, recompute="none", micro_batch=1, offload=False
    )
    assert verdict in set(found[(found["zero"] == 3) & (found["dp_replicate"] == 1)]["verdict"])


def test_nothing_that_carries_information_is_cut():
    args = ["llama-3-70b", "tp=8,pp=4,zero=1,sequence-parallel", "zero=3,recompute=full,offload"]
    cluster = ["--cluster", "64xh100-sxm", "--global-batch", 512]
    commands_ = (
        ["compare", *args, *cluster],
        ["search", "llama-3-8b", *H100S, "--global-batch", 60, "--keep", 2],
        ["advise", "llama-3-8b", "--cluster", "2xa100-40-sxm", "--micro-batch", 4],
        ["estimate", "llama-3-70b", "--cluster", "64xh100-sxm", "--tp", 8, "--pp", 4, "--zero", 1],
    )
    for command in commands_:
        told = run(*command).output
        assert max(map(len, told.splitlines())) <= 80
        assert ".." not in told


HARDWARE = [
    *((memplan.gpu("h100-sxm"), name) for name in ("memory_bytes", "memory_bytes_per_s", "bf16_flops_per_s")),
    (memplan.gpu("h100-sxm"), "board_power_w"),
    (memplan.gpu("h100-sxm"), "multiprocessors"),
    (memplan.gpu("h100-sxm"), "capability"),
    (memplan.gpu("h100-sxm").link, "bytes_per_s"),
    (memplan.cluster("8xh100-sxm"), "n_gpus"),
    (memplan.cluster("8xh100-sxm"), "gpus_per_node"),
]


@pytest.mark.parametrize("value", [-1, math.nan, math.inf, "1", True])
@pytest.mark.parametrize("owner,name", HARDWARE, ids=lambda part: part if isinstance(part, str) else "")
def test_hardware_of_impossible_rates_is_refused(owner, name, value):
    with pytest.raises(InvalidValue, match=name):
        replace(owner, **{name: value})


def test_a_family_of_gpus_is_offered_by_its_members():
    said = refusal(run("estimate", "gpt2", "--cluster", "8xrtx"))
    assert "did you mean 'rtx-3090', 'rtx-4090', 'rtx-5090' or 'rtx-pro-6000'?" in said


def test_a_plan_without_a_time_is_not_called_the_fastest():
    told = run("advise", "gpt2", "--cluster", "2xv100-32", "--micro-batch", 64).output
    assert "Fastest" not in told
    assert "A combination that fits; its time is not known: no peak rate is known of v100-32" in told


LONGEST = "--global-batch 64 --objective seq_len --tp 8 --recompute full --keep 1"


def test_a_sequence_beyond_the_models_context_comes_with_a_note():
    done = subprocess.run(
        [sys.executable, "-m", "memplan", "search", "llama-3-8b", *H100S, *shlex.split(LONGEST)],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert done.stderr == ""
    assert "is longer than llama-3-8b's context of 8192 tokens" in " ".join(done.stdout.split())


def test_what_the_notebook_says_to_keep_in_mind_is_about_what_its_first_estimate_prints():
    notebook = json.loads((ROOT / "notebooks" / "01_where_do_the_bytes_go.ipynb").read_text(encoding="utf-8"))
    cells = notebook["cells"]
    printed = "".join(next(cell["outputs"][0]["text"] for cell in cells if cell.get("outputs")))
    texts = ["".join(cell["source"]) for cell in cells]
    kept = " ".join(next(text for text in texts if text.startswith("## What to keep in mind")).split())
    assert "gpt2 on 1xh100-sxm FITS: " in printed
    assert "Next: memplan " in printed
    assert "The first line of an estimate is that interval" in kept


def test_json_says_its_version_its_budget_and_its_margin():
    args = ["estimate", "gpt2", *H100S, "--margin", 0.1, "--json"]
    told = json.loads(run(*args).output)
    assert told["memplan_version"] == memplan.estimate("gpt2").to_dict()["memplan_version"]
    assert told["schema_version"] == 1
    cluster = told["cluster"]
    assert (cluster["margin"], cluster["budget_bytes"]) == (0.1, int(cluster["usable_bytes"] * 0.9))
    for command in (["search", "gpt2", "--global-batch", 8], ["compare", "gpt2", "zero=1", "zero=2"]):
        rest = [] if "--global-batch" in command else ["--global-batch", 8]
        found = json.loads(run(*command, *rest, *H100S, "--json").output)
        assert {"memplan_version", "schema_version"} <= set(found)


def test_zero_1_says_whose_it_is_and_that_ranks_are_uneven():
    told = " ".join(run("estimate", "gpt2", *H100S, "--zero", 1).output.split())
    assert "torch's ZeroRedundancyOptimizer" in told
    assert "unequal parts" in told
    assert "whose ranks are uneven" in " ".join(run("estimate", "-h").output.split())


# Slow or endless


def test_a_pipe_is_never_waited_for(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    suite = tmp_path / "suite.toml"
    os.mkfifo(suite)
    out = tmp_path / "out.jsonl"
    assert "is not a regular file" in refusal(run("estimate", pipe))
    readers = (
        ["report", pipe],
        ["rejudge", pipe, "--out", out],
        ["published", pipe],
        ["explain", "--snapshot", pipe],
    )
    writers = (["sweep", "--out", pipe], ["calibrate", "--out", pipe], ["report", REFUSED, "--csv", pipe])
    for command in (*readers, *writers, ["sweep", "--suite", suite]):
        assert "is not a regular file" in refusal(validate(*command))


def test_counts_beyond_reason_are_refused_at_once():
    assert "use 2147483648" in refusal(run("estimate", "gpt2", *H100S, "--global-batch", 2147483647))
    assert "99999 ranks are as many processes" in refusal(validate("run", "--dp", 99999))


def test_many_equal_blocks_are_matched_in_bounded_time():
    blocks = [Block(n_bytes=512, pointer=i, born_ns=-1, path="") for i in range(200_000)]
    began = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    assert _holding(blocks, 511 * 9999) == ()
    assert len(_holding(blocks, 512 * 99)) == 99
    assert resource.getrusage(resource.RUSAGE_SELF).ru_utime - began < 2.0


# Data and files


@pytest.mark.parametrize("flag", ["--html", "--csv"])
def test_no_command_writes_over_what_it_read_or_what_it_did_not_write(tmp_path, flag):
    records, notes = tmp_path / "records.jsonl", tmp_path / "notes.txt"
    records.write_bytes(REFUSED.read_bytes())
    notes.write_text("a line without its end")
    link = tmp_path / "link"
    link.symlink_to(records)
    for known in (records, link):
        assert "is also a file that is read" in refusal(validate("report", records, flag, known))
    assert "this command did not write it" in refusal(validate("report", records, flag, notes))
    for command in (["calibrate"], ["sweep", "--suite", "refused"]):
        refusal(validate(*command, "--resume", "--out", notes))
    refusal(validate("explain", "--plot", notes))
    refusal(validate("rejudge", records, "--out", records))
    assert records.read_bytes() == REFUSED.read_bytes()
    assert notes.read_text() == "a line without its end"
    written = tmp_path / "written"
    for _ in range(2):
        assert validate("report", records, flag, written).exit_code == 0


UNWRITABLE = (
    ["report", REFUSED, "--csv"],
    ["report", REFUSED, "--html"],
    ["rejudge", REFUSED, "--out"],
    ["sweep", "--out"],
    ["calibrate", "--out"],
    ["run", "--events"],
    ["explain", "--plot"],
    ["sweep", "--suite", "quick", "--snapshots"],
)


@pytest.mark.parametrize("command", UNWRITABLE, ids=lambda command: f"{command[0]} {command[-1]}")
def test_what_cannot_be_written_is_said_before_the_work(command):
    assert "cannot be written" in refusal(validate(*command, "/proc/nowhere/file.png"))


@pytest.mark.parametrize(
    "command",
    [["memplan", "models"], ["memplan", "-h"], ["validate", "report", str(REFUSED)]],
    ids=shlex.join,
)
def test_a_full_disk_and_a_closed_pipe_are_no_traceback(command):
    words = shlex.join([sys.executable, "-m", *command])
    ends = {">/dev/full": 2, ">&-": 2, "| head -n 1 >/dev/null": 0}
    for end, code in ends.items():
        done = subprocess.run(
            ["bash", "-c", f"{words} {end}"], capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == code
        assert done.stderr.count("\n") == (code == 2)
        assert "Traceback" not in done.stderr


HOSTILE_RECORDS = [
    ({"outcome": "fine"}, "outcome"),
    ({"peak_error": "0.5"}, "peak_error"),
    ({"peak_error": math.nan}, "no finite number"),
    ({"reason": 7}, "reason"),
    ({"measured": {"ranks": {"n": 1}, "losses": []}}, "ranks"),
    ({"cpu_s": -1}, "cpu_s"),
    ({"unknown": 1}, "unknown"),
    ({"case": None}, "no case"),
]


@pytest.mark.parametrize("changed,said", HOSTILE_RECORDS, ids=[said for _, said in HOSTILE_RECORDS])
def test_every_field_of_a_record_is_checked(tmp_path, changed, said):
    file = tmp_path / "records.jsonl"
    first = next(line for line in REFUSED.read_text().splitlines() if line.startswith('{"case"'))
    file.write_text(json.dumps(json.loads(first) | changed) + "\n")
    assert said in refusal(validate("report", file))


def test_a_measured_peak_of_0_is_none(tmp_path):
    file = tmp_path / "records.jsonl"
    lines = (data_folder() / "measurements" / "quick.jsonl").read_text().splitlines()
    record = json.loads(next(line for line in lines if line.startswith('{"case"')))
    ranks = record["measured"]["ranks"]
    ranks["by_rank" if "peak_bytes" in ranks["by_rank"] else "shared"]["peak_bytes"] = 0
    file.write_text(json.dumps(record) + "\n")
    with pytest.raises(InvalidValue, match="line 1 is not a record"):
        read_records(file)


def test_a_suite_can_be_listed_and_looked_at_without_a_run():
    names = validate("sweep", "--list").output.splitlines()
    assert (len(names), names[0]) == (49, "llama-small, one rank")
    told = validate("sweep", "--dry-run", "--only", "dp2 zero3").output
    assert "may take" in told
    assert "measured" not in told
    said = refusal(validate("sweep", "--only", "llama-smal, dp2 zero"))
    assert "did you mean 'llama-small, dp2 zero3'?" in said
    assert "is true of none of 49 cases" in refusal(validate("sweep", "--where", "tp == 77"))


def test_a_summary_counts_every_outcome():
    one = read_records(REFUSED)[0]
    outcomes: tuple[Outcome, ...] = ("crashed", "timed-out", "refused", "refused")
    records = [replace(one, outcome=outcome) for outcome in outcomes]
    assert summary(records).splitlines()[0] == "4 cases: 2 refused, 1 crashed, 1 timed-out; 0 confirmed"
    assert summary(records[:1]).startswith("1 case: 1 crashed")


def test_a_cell_that_a_spreadsheet_would_run_is_quoted():
    cells = csv_of([{"a": text} for text in ("=1+1", "+1", "-1", "@SUM(A1)", "plain")], ["a"]).splitlines()
    assert cells == ["a", "'=1+1", "'+1", "'-1", "'@SUM(A1)", "plain"]
    assert csv_of([{"a": -1.5}], ["a"]) == "a\n-1.5\n"


# What was missing


def printed_commands(text):
    """Those that a text ends with, each on a line."""
    whole = re.sub(r"\\\n\s*", "", text)
    return re.findall(r"memplan (estimate .*)", whole)


def test_every_plan_comes_with_a_command_that_prints_it():
    plans = ("tp=2,zero=3,recompute=selective", "zero=2,dp-replicate=1,offload")
    told = (
        run("search", "llama-3-8b", *H100S, "--global-batch", 64, "--pp", 1, "--keep", 2, "--margin", 0.1),
        run("compare", "llama-3-8b", *plans, *H100S, "--global-batch", 64, "--network", "100Gbit/s"),
        run("advise", "llama-3-8b", "--cluster", "8xa100-40-sxm", "--zero", 1, "--gpus-per-node", 4),
    )
    for result, flag in zip(told, ("--margin 0.1", "--network 12.5GB/s", "--gpus-per-node 4"), strict=True):
        found = printed_commands(result.output)
        assert found
        for command in found:
            assert flag in command, command
            again = run(*shlex.split(command))
            assert again.exit_code == 0, command
            assert re.search(r" (FITS|FITS, TIGHT|DOES NOT FIT|CANNOT SAY): ([\d.]+)", again.output)


def test_node_network_and_margin_can_be_said_and_are_shown():
    args = ["--gpus-per-node", 4, "--network", "200Gbit/s", "--margin", 0.1]
    told = " ".join(run("estimate", "gpt2", *H100S, *args, "--details").output.split())
    assert "2 nodes of 4 (NVLink 4), a network of 200 Gbit/s for each GPU" in told
    assert "less a margin of 10%" in told
    slow, fast = (
        memplan.estimate("gpt2", cluster="16xh100-sxm", network=network).step_s
        for network in ("1Gbit/s", "400Gbit/s")
    )
    assert slow > fast


def test_an_efficiency_of_ones_own_times_the_plan_and_is_printed_back():
    args = [*H100S, "--global-batch", 64, "--efficiency", 0.4]
    told = run("estimate", "llama-3-8b", *args, "--zero", 3, "--recompute", "full").output
    assert "(products at 40% of the peak rate, as you said)" in " ".join(told.split())
    assert "MFU" not in told
    job: dict[str, Any] = {"cluster": "16xh100-sxm", "global_batch": 64, "zero": 3, "recompute": "full"}
    stated = memplan.estimate("llama-3-8b", efficiency=0.4, **job)
    known = replace(memplan.estimate("llama-3-8b", **job), time_model=Roofline(efficiency=0.4))
    assert stated.step_s == known.step_s
    assert stated.to_dict()["cluster"]["efficiency"] == 0.4
    for command, *more in (["search", "--keep", 2, "--pp", 1, "--zero", 3], ["advise", "--seq-len", 65536]):
        commands = printed_commands(run(command, "llama-3-8b", *args, *more).output)
        assert commands
        assert all("--efficiency 0.4" in each for each in commands)
    found = memplan.search("llama-3-8b", efficiency=0.4, pp=1, **job, keep=3)
    model = Roofline(efficiency=0.4)
    assert found["step_s"].equals(
        memplan.search("llama-3-8b", time_model=model, pp=1, **job, keep=3)["step_s"]
    )
    refusals: tuple[Any, ...] = (0, 1.5, "fast")
    for refused in refusals:
        with pytest.raises(memplan.InvalidValue, match=r"use a number above 0, at most 1\."):
            memplan.estimate("gpt2", cluster="8xh100-sxm", efficiency=refused)
    with pytest.raises(memplan.InvalidValue, match="leave one of them out"):
        memplan.search("gpt2", cluster="8xh100-sxm", efficiency=0.4, time_model=model)


def test_results_are_short_in_a_terminal_and_drawn_in_a_notebook():
    e = memplan.estimate("llama-3-8b", cluster="8xa100-40-sxm", global_batch=64, seq_len=4096)
    asked: dict[str, Any] = {"global_batch": 64, "seq_len": 1024}
    results = (
        memplan.advise(e),
        memplan.smallest_cluster("gpt2", gpu="h100-sxm", **asked),
        memplan.longest_sequence("gpt2", cluster="8xh100-sxm", global_batch=64),
        e,
    )
    for result in results:
        assert len(repr(result)) < 400
        assert len(str(result)) < 8000
        assert result._repr_html_().startswith("<pre>")
        assert type(result).__name__ in memplan.__all__


CHECKED = """
import memplan
memplan.estimate("gpt2", recompute="banana")
memplan.search("gpt2", cluster="2xh100-sxm", global_batch=4, recompute="banana")
memplan.search("gpt2", cluster="2xh100-sxm", global_batch=4, banana=1)
memplan.search("gpt2", cluster="2xh100-sxm", global_batch=4, zero=(2, 3), recompute=("none", "full"))
"""


@pytest.mark.slow
def test_a_type_checker_sees_choices_and_keywords(tmp_path):
    file = tmp_path / "checked.py"
    file.write_text(CHECKED)
    told, _, _ = mypy.run(["--strict", "--cache-dir", str(ROOT / ".mypy_cache"), str(file)])
    wrong = Counter(int(found[1]) for found in re.finditer(r"checked\.py:(\d+): error", told))
    assert set(wrong) == {3, 4, 5}, told


def test_bytes_are_integers_in_every_frame():
    asked: dict[str, Any] = {"cluster": "2xh100-sxm", "global_batch": 4, "seq_len": 64}
    e = memplan.estimate("gpt2", **asked)
    for frame in (memplan.search("gpt2", **asked), e.ledger(), e.to_frame()):
        for name in frame.columns:
            if name.endswith("_bytes"):
                assert str(frame[name].dtype).lower() == "int64", name


def test_cpu_ranks_can_be_estimated_as_validate_will_measure_them():
    e = memplan.estimate("gpt2", dp=2, device="cpu", precision="fp32", seq_len=64)
    assert e.peak.total_bytes != memplan.estimate("gpt2", dp=2, precision="fp32", seq_len=64).peak.total_bytes
    told = run(
        "estimate", "gpt2", "--dp", 2, "--device", "cpu", "--precision", "fp32", "--seq-len", 64
    ).output
    assert "Bytes checked by real runs on CPU ranks" in told


GPT2: Any = "gpt2"
TWO: Any = np.array([2])

CALLS = {
    "use memplan.advise(memplan.estimate(...))": lambda: memplan.advise(GPT2),
    "use a list of names or Models, as ['gpt2']": lambda: memplan.largest_model(
        "gpt2", cluster="2xh100-sxm", global_batch=4
    ),
    "use memplan.preset(name)": lambda: memplan.parameter_count(GPT2),
    "use an integer from 1": lambda: memplan.estimate("gpt2", dp=TWO),
    "use a finite number above 0": lambda: memplan.estimate("gpt2", clip_grad_norm=10**400),
}


@pytest.mark.parametrize("said", CALLS)
def test_a_wrong_call_is_told_what_is_wanted(said):
    with pytest.raises(MemplanError, match=re.escape(said)):
        CALLS[said]()


def test_refused_plans_are_counted_by_kind_in_a_line_each():
    told = run("search", "llama-3-8b", *H100S, "--global-batch", 60, "--keep", 1, "--all").output
    table = told.partition("refused  plans of this kind\n")[2].partition("\n\n")[0]
    kinds = re.findall(r"^ *([\d,]+)  \S", table, re.MULTILINE)
    refused = re.search(r"([\d,]+) are refused", " ".join(told.split()))[1]
    assert sum(int(n.replace(",", "")) for n in kinds) == int(refused.replace(",", ""))
    assert "global_batch is not a multiple of micro_batch x replicas" in table
    assert "tp=" not in table


UNREADABLE = (
    "kept as bf16-mixed", "last of 7", "claims no peak rate", "whether they fit or not", "refused rule",
    "as for the first of them", "ran and trained rightly", "Whose accounting", "left out: any",
    "Plans of each verdict to keep",
)  # fmt: skip


def test_the_words_are_those_that_everyone_uses():
    helps = [run(name, "-h", group=group).output for group in GROUPS.values() for name in group.commands]
    outputs = [
        run("estimate", "llama-3-70b", "--cluster", "64xh100-sxm", "--tp", 8, "--pp", 4).output,
        run("search", "llama-3-8b", *H100S, "--global-batch", 64, "--keep", 2).output,
        validate("report", REFUSED).output,
    ]
    text = " ".join(" ".join([README, GUIDE, *helps, *outputs]).split())
    for words in UNREADABLE:
        assert words not in text
    for term in ("gradient accumulation", "activation checkpointing", "rank", "stage"):
        assert term in text.lower()


def test_the_table_shows_the_fullest_ranks_bytes_beside_the_worst_error():
    measured = next(
        r for r in read_records(data_folder() / "measurements" / "quick.jsonl") if r.case["plan"]["pp"] == 4
    )
    ahead, seen = (
        max(rank["peak_bytes"] for rank in side["ranks"]) for side in (measured.predicted, measured.measured)
    )
    shown = row(measured).splitlines()[0]
    assert f"{ahead:,}" in shown
    assert f"{seen:,}" in shown
    assert f"{measured.peak_error:+.4%}" in shown
    assert abs(measured.peak_error) > abs(ahead / seen - 1)


@pytest.mark.parametrize("name", GROUPS)
def test_every_command_has_a_short_flag_for_help(name):
    group = GROUPS[name]
    for command in ([], *([each] for each in group.commands)):
        told = run(*command, "-h", group=group)
        assert (told.exit_code, told.stderr) == (0, "")
        assert "..." not in told.output.partition("Commands:")[2]
    for module in ("tests.bench", "tests.fuzz"):
        done = subprocess.run(
            [sys.executable, "-m", module, "-h"],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
            cwd=ROOT,
        )
        assert "--help" in done.stdout


def test_suites_are_named_in_help_and_completion_is_documented():
    told = " ".join(validate("sweep", "-h").output.split())
    assert all(suite in told for suite in NAMES)
    assert "_MEMPLAN_COMPLETE=bash_source memplan" in GUIDE
    asked = {"_MEMPLAN_COMPLETE": "bash_complete", "COMP_WORDS": "memplan est", "COMP_CWORD": "1"}
    offered = CliRunner().invoke(commands, [], prog_name="memplan", env=asked)
    assert "estimate" in offered.output


def test_the_readme_begins_with_what_for_whom_and_two_commands():
    first = README[: README.index("```text")]
    assert "For engineers who train with PyTorch" in first
    assert "make demo" in first
    assert "make test" in first
    assert first.count("\n") < 30


def test_a_v100_has_no_flash_attention_and_grouped_heads_keep_their_scores():
    """PyTorch asks for compute capability 8.0; scores are (batch, heads, seq, seq) in float32, twice."""
    options: dict[str, Any] = {"zero": 3, "precision": "fp16-mixed", "recompute": "full", "seq_len": 4096}
    options["implementation"] = "reference"
    v100, a100 = (
        memplan.estimate("llama-3-8b", cluster=f"8x{gpu}", **options) for gpu in ("v100-32", "a100-80-sxm")
    )
    assert v100.peak.total_bytes - a100.peak.total_bytes >= 2 * 32 * 4096**2 * 4 * 0.9
    assert v100.verdict != "fits"
