"""The command line: what it prints, as text and as JSON, and how it ends."""

import csv
import inspect
import json
import re
import shlex
import subprocess
import sys
from collections import Counter
from itertools import product
from typing import Any

import click
import pytest
from click.testing import CliRunner

import memplan
from memplan.cli import commands
from memplan.cli.flags import PlanCommand
from memplan.engines.options import USUAL_ENGINE, plan_fields
from memplan.hardware import gpu_names
from memplan.models import preset_names
from memplan.plan import FIELDS, Plan
from memplan.search.plans import VARIED
from tests import readme

GPT2 = ["estimate", "gpt2", "--cluster", "8xh100-sxm", "--zero", "3"]


def run(*args):
    return CliRunner().invoke(commands, list(args))


def python(*args, stdin=None):
    return subprocess.run(
        [sys.executable, *args], capture_output=True, text=True, timeout=60, check=False, input=stdin
    )


def test_estimate_prints_the_estimate():
    result = run(*GPT2)
    assert result.exit_code == 0
    assert result.stdout == f"{memplan.estimate('gpt2', cluster='8xh100-sxm', zero=3)}\n"


def test_every_flag_is_the_keyword_with_dashes():
    asked: dict[str, Any] = {
        "cluster": "32xh100-sxm", "dp": 2, "tp": 4, "pp": 4, "zero": 1, "sequence_parallel": True,
        "micro_batch": 2, "global_batch": 32, "seq_len": 4096, "precision": "bf16",
        "optimizer": "sgd-momentum", "recompute": "full", "schedule": "gpipe", "engine": "textbook",
    }  # fmt: skip
    flags = ["--sequence-parallel"]
    for name, value in asked.items():
        flags += [] if value is True else [f"--{name.replace('_', '-')}", str(value)]
    printed = json.loads(run("estimate", "llama-3-8b", "--json", *flags).stdout)
    assert printed == json.loads(json.dumps(memplan.estimate("llama-3-8b", **asked).to_dict()))
    asked.pop("cluster")
    assert {name: printed["plan"][name] for name in asked} == asked


def test_json_is_one_object_with_the_peak_the_stages_and_the_collectives():
    result = json.loads(run(*GPT2, "--json").stdout)
    assert result["fits"] is True
    assert result["confirmed"] == "nogpu"
    kinds = {key: n for key, n in result["peak"].items() if key != "total_bytes"}
    assert sum(kinds.values()) == result["peak"]["total_bytes"]
    assert result["stages"][0]["peak"] == result["peak"]
    assert {c["kind"] for c in result["stages"][0]["collectives"]} == {"all_gather", "reduce_scatter"}
    assert sum(s for part, s in result["time"].items() if part.endswith("_s")) == result["step_s"]
    assert "measured them on GPUs" in result["time"]["confidence"]
    assert "ledger" not in result


def test_the_ledger_adds_up_to_the_peak():
    result = json.loads(run(*GPT2, "--json", "--ledger").stdout)
    assert sum(row["total_bytes"] for row in result["ledger"]) == result["peak"]["total_bytes"]
    text = run(*GPT2, "--ledger").stdout
    assert text.rstrip().endswith(f"= {result['peak']['total_bytes']:,} bytes")
    assert max(map(len, text.splitlines())) <= 80


def test_models_and_gpus_list_every_name():
    models, gpus = run("models").stdout, run("gpus").stdout
    named = [line.split()[0] for line in models.splitlines() if re.search(r"  \d", line)]
    assert named == list(preset_names())
    assert [line.split()[0] for line in gpus.splitlines()[1:]] == list(gpu_names())
    assert max(map(len, (models + gpus).splitlines())) <= 80
    assert "6,738,415,616" in models


def test_models_are_in_groups_with_what_each_can_be_divided_by():
    text = run("models").stdout
    head, *groups = text.split("\n\n")
    assert head.split()[-3:] == ["zero", "tp", "pp"]
    llama = next(group for group in groups if group.startswith("llama (torchtitan, "))
    rows = {line.split()[0]: line.split()[-3:] for group in groups[:-1] for line in group.splitlines()[1:]}
    assert "llama-3-8b" in llama
    assert rows["llama-3-8b"] == ["0-3", "8", "32"]
    assert rows["resnet-50"] == ["0-1", "-", "-"]
    for name in ("llama-3-8b", "gpt2", "resnet-50", "qwen2.5-7b"):
        zero, tp, pp = rows[name]
        most = {"zero": int(zero[-1]), "tp": 1 if tp == "-" else int(tp), "pp": 1 if pp == "-" else int(pp)}
        for axis, n in most.items():
            assert run("estimate", name, "--dp", "2", f"--{axis}", str(n)).exit_code == 0
            assert run("estimate", name, "--dp", "2", f"--{axis}", str(n + 1)).exit_code == 2


def test_models_and_gpus_as_json():
    models = {m["name"]: m for m in json.loads(run("models", "--json").stdout)}
    gpus = {g["name"]: g for g in json.loads(run("gpus", "--json").stdout)}
    assert (tuple(models), tuple(gpus)) == (preset_names(), gpu_names())
    assert models["llama-2-7b"]["n_parameters"] == 6738415616
    assert gpus["h100-sxm"]["memory_bytes"] == 80 * 1024**3
    assert all(entry["source"] for entry in (*models.values(), *gpus.values()))


@pytest.mark.parametrize(
    "args,message",
    [
        (
            ["estimat"],
            "unknown command 'estimat'; did you mean 'estimate'? Commands: advise, budget, compare, ",
        ),
        (["\x1b[2J"], "unknown command '\\x1b[2J'. Commands: "),
        (["estimate"], "Missing argument 'MODEL'."),
        (["estimate", "gpt2", "--micro-bacth", "1"], "--micro-batch"),
        (["estimate", "gpt2", "--tp"], "requires an argument"),
        (["estimate", "gpt2", "surplus"], "surplus"),
        (["models", "--jsno"], "--json"),
    ],
)
def test_wrong_usage_ends_with_2_and_a_way_out(args, message):
    result = run(*args)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert message in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("args", [[], ["-h"], ["estimate", "--help"], ["models", "-h"], ["--version"]])
def test_help_is_printed_within_80_columns(args):
    result = run(*args)
    assert "Traceback" not in result.output
    assert max(map(len, result.output.splitlines())) <= 80


def test_the_help_of_estimate_has_every_flag_in_a_group_and_ends_with_examples_that_run():
    text = run("estimate", "-h").stdout
    heads = [line for line in text.splitlines() if re.fullmatch(r"[A-Z].*:", line)]
    groups = ["Model and cluster", "Mesh", "Batch", "Memory saving"]
    groups += ["Adapters", "Numbers", "Engine torch", "Output"]
    assert heads == [f"{group}:" for group in (*groups, "Examples")]
    examples = text.partition("Examples:\n")[2].replace("\\\n", " ").strip().splitlines()
    assert len(examples) == 3
    for example in examples:
        program, *args = shlex.split(example)
        assert (program, run(*args).exit_code) == ("memplan", 0)


@pytest.mark.parametrize("command", ["search", "smallest-cluster", "longest-sequence", "largest-model"])
def test_the_help_of_a_search_has_every_flag_in_a_group(command: str):
    text = run(command, "-h").stdout
    assert "Other options" not in text
    assert "Examples:" in text
    assert max(map(len, text.splitlines())) <= 80


def test_the_module_is_the_command():
    result = python("-m", "memplan", *GPT2)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == run(*GPT2).stdout


def test_a_refusal_is_one_line_on_stderr_and_exit_code_2():
    result = python("-m", "memplan", "estimate", "gpt2", "--tp", "5")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("Error: tp=5 does not divide n_heads=12; use ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("args", [["models", "--json"], [*GPT2, "--ledger"]])
def test_a_closed_pipe_is_no_crash(args):
    process = subprocess.Popen(
        [sys.executable, "-m", "memplan", *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.stdout.close()
    with process:
        assert "Traceback" not in process.stderr.read()


WITHOUT = "import sys; sys.modules[{!r}] = None; import memplan{}"


def test_without_click_the_command_names_the_extra():
    result = python("-c", WITHOUT.format("click", ".cli"))
    assert result.returncode == 1
    assert result.stderr == "memplan's commands need click; install it with: pip install 'memplan[cli]'.\n"


def test_without_pandas_a_frame_names_the_extra_and_text_still_works():
    start = WITHOUT.format("pandas", "") + "; e = memplan.estimate('gpt2'); "
    assert python("-c", start + "print(e)").stdout == f"{memplan.estimate('gpt2')}\n"
    result = python("-c", start + "e.to_frame()")
    assert "MissingPackage: a frame needs pandas, which is not installed; use pip install" in result.stderr


def test_what_the_terminal_cannot_show_is_escaped(tmp_path):
    folder = tmp_path / "模型"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    command = [sys.executable, "-m", "memplan", "estimate", str(folder)]
    env = {"PYTHONIOENCODING": "latin-1"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=env)
    assert (result.returncode, result.stderr) == (0, "")
    assert "\\u6a21\\u578b: " in result.stdout


README = "\n".join([file.read_text(encoding="utf-8") for file in (readme.README, readme.MORE[0])])
SHOWN = re.findall(r"```sh\nmemplan (.*?)\n```\n\n```text\n(.*?)(?:\n\.\.\.)?\n```", README, re.DOTALL)


@pytest.mark.parametrize("command,shown", SHOWN, ids=[command.split(" --")[0] for command, _ in SHOWN])
def test_the_readme_shows_what_its_commands_print(command, shown):
    assert shown in run(*shlex.split(command.replace("\\\n", " "))).output


def test_the_readme_shows_every_command_that_asks_about_plans_and_a_refusal():
    shown = [command.split()[0] for command, _ in SHOWN]
    assert Counter(shown) == {"estimate": 4, "budget": 1, "search": 1, "advise": 1, "compare": 1}


SEARCH = ["search", "llama-3-8b", "--cluster", "8xh100-sxm", "--global-batch", "64", "--seq-len", "8192"]
SEARCH += ["--tp", "1,2,3", "--pp", "1", "--no-offload", "--recompute", "none,full", "--keep", "8"]


def test_search_prints_the_best_and_what_was_refused():
    result = run(*SEARCH)
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= 80
    said = " ".join(result.stdout.split())
    assert re.search(
        r"\d+ stay within 75.15 GiB \(.*\) by what they allocate, \d+ do not, \d+ are refused", said
    )
    assert "Best of those that fit" in result.stdout
    assert "Times add up products" in result.stdout


def test_search_prints_three_plans_and_one_command_and_the_rest_with_all():
    asked = ["search", "gpt2-medium", "--cluster", "8xh100-sxm", "--zero", "0,3", "--no-offload"]
    short, full = run(*asked).stdout, run(*asked, "--all").stdout
    plans = re.compile(r"^ ?\d+=? +\d+ +", re.MULTILINE)
    assert (len(plans.findall(short)), short.count("memplan estimate")) == (3, 1)
    n = len(plans.findall(full))
    assert n > 3
    assert full.count("memplan estimate") == n
    assert f"{min(n, 10) - 3} more are kept: see --all" in short
    assert "plans of this kind" in full
    assert "plans of this kind" not in short
    assert len(plans.findall(run(*asked, "--keep", "5").stdout)) == 5
    command = short.partition("Next: ")[2].replace("\\\n", " ")
    assert run(*shlex.split(command)[1:]).exit_code == 0


def test_without_a_batch_every_command_takes_a_usual_one_and_says_so():
    searched = run("search", "gpt2", "--cluster", "8xh100-sxm", "--tp", "1", "--pp", "1")
    assert "gpt2 on 8xh100-sxm, 8 x 1024 tokens a step" in searched.stdout
    assert "The batch was left out: one sequence for each GPU" in searched.stdout
    assert "The batch was left out" not in run(*SEARCH).stdout
    asked = ["compare", "gpt2", "zero=3", "zero=3,micro_batch=3", "--cluster", "2xh100-sxm"]
    compared = run(*asked)
    assert "The batch was left out: 6 is the least that both plans can divide" in compared.stdout
    found = json.loads(run(*asked, "--json").stdout)
    assert [found[name]["plan"]["global_batch"] for name in "ab"] == [6, 6]
    same = json.loads(run(*asked[:3], "zero=2", *asked[4:], "--json").stdout)
    alone = json.loads(run("estimate", "gpt2", "--zero", "3", *asked[4:], "--json").stdout)
    assert same["a"]["plan"] == alone["plan"]


def test_the_inverse_questions_are_commands_that_say_the_answer_first():
    few = ["--tp", "1", "--pp", "1", "--no-offload"]
    smallest = run("smallest-cluster", "gpt2-xl", "a100-40-sxm", "--seq-len", "512", *few).stdout
    expected = memplan.smallest_cluster("gpt2-xl", "a100-40-sxm", seq_len=512, tp=1, pp=1, offload=False)
    assert smallest.splitlines()[0] == f"The fewest GPUs: {expected.cluster.name}"
    assert "memplan estimate gpt2-xl --cluster" in smallest
    longest = run("longest-sequence", "gpt2-medium", "--cluster", "2xa100-40-sxm", *few).stdout
    assert longest.splitlines()[0] == "The longest sequence: 1,024 tokens"
    job = ["--cluster", "1xrtx-4090", "--seq-len", "512", "--zero", "0"]
    largest = run("largest-model", "gpt2", "gpt2-medium", "gpt2-xl", *job)
    assert largest.stdout.splitlines()[0] == "The largest model: gpt2-medium"
    rows = json.loads(run("largest-model", "gpt2", *job, "--json").stdout)["plans"]
    assert rows[0]["command"].startswith("memplan estimate gpt2 --cluster 1xrtx-4090")
    assert all(len(line) <= 80 for text in (smallest, longest, largest.stdout) for line in text.splitlines())


@pytest.mark.parametrize("command", ["estimate", "budget", "search", "advise"])
def test_every_field_of_a_plan_is_a_flag_and_a_field_of_compare(command: str):
    known = commands.get_command(click.Context(commands), command)
    assert isinstance(known, PlanCommand)
    flags = {flag for each in [*known.params, *known.options_of(USUAL_ENGINE)] for flag in each.opts}
    assert {f"--{name.replace('_', '-')}" for name in plan_fields()} <= flags
    assert {*FIELDS, "options", "others"} == set(Plan.__dataclass_fields__)


def test_search_takes_ranges_and_several_batches():
    asked = ["search", "gpt2", "--cluster", "8xh100-sxm", "--global-batch", "8,16", "--seq-len", "64,128"]
    asked += [
        "--pp",
        "1-4",
        "--tp",
        "1",
        "--zero",
        "2-3",
        "--micro-batch",
        "1",
        "--recompute",
        "none",
        "--json",
    ]
    found = json.loads(run(*asked, "--no-offload", "--keep", "16").stdout)
    shown = [row for row in found["plans"] if row["verdict"] == "fits"]
    assert {row["pp"] for row in shown} <= {1, 2, 3, 4}
    assert {row["zero"] for row in shown} == {2, 3}
    assert {(job["global_batch"], job["seq_len"]) for job in found["jobs"]} == set(
        product((8, 16), (64, 128))
    )


@pytest.mark.parametrize(
    "asked, told",
    [
        (["--tp", "16"], "no mesh of 8 GPUs has tp=16; use degrees of 1, 2, 4, 8 "),
        (["--tp", "8", "--pp", "1"], "none of 1 plans can run; the first: tp=8 does not divide n_heads=12"),
        (["--tp", "1-x"], "tp='1-x' is not allowed"),
        (["--tp", "1,8-2"], "tp='8-2' is not allowed"),
    ],
)
def test_a_search_without_a_plan_says_why(asked: list[str], told: str):
    result = run("search", "gpt2", "--cluster", "8xh100-sxm", "--global-batch", "64", *asked)
    assert result.exit_code == 2
    assert told in result.stderr


def test_search_as_json_and_csv_has_the_kept_plans():
    found = json.loads(run(*SEARCH, "--json").stdout)
    assert found["n_plans"] == sum(found[f"n_{name}"] for name in ("within", "beyond", "slower", "refused"))
    rows = list(csv.DictReader(run(*SEARCH, "--csv").stdout.splitlines()))
    assert [row["peak_bytes"] for row in rows] == [str(plan["peak_bytes"] or "") for plan in found["plans"]]
    assert [row["verdict"] for row in rows] == [plan["verdict"] for plan in found["plans"]]
    best = found["plans"][0]
    fields = {name: best[name] for name in VARIED}
    again = memplan.estimate("llama-3-8b", cluster="8xh100-sxm", global_batch=64, seq_len=8192, **fields)
    assert (again.peak.total_bytes, again.step_s) == (best["peak_bytes"], best["step_s"])


def test_search_for_the_fewest_gpus_and_the_longest_sequence():
    asked = [
        "search",
        "gpt2-medium",
        "--cluster",
        "2xa100-40-sxm",
        "--global-batch",
        "8",
        "--tp",
        "1",
        "--pp",
        "1",
    ]
    few = json.loads(run(*asked, "--objective", "gpus", "--json").stdout)
    assert few["cluster"]["name"] == "1xa100-40-sxm"
    longest = json.loads(run(*asked, "--objective", "seq_len", "--json").stdout)
    assert (longest["cluster"]["name"], longest["seq_len"]) == ("2xa100-40-sxm", 1024)
    refused = run(*asked, "--objective", "seq_len", "--seq-len", "512")
    assert refused.exit_code == 2
    assert "leave it out" in refused.stderr


def test_advise_prints_changes_and_a_plan_that_fits():
    asked = ["advise", "llama-3-8b", "--cluster", "8xa100-40-sxm", "--micro-batch", "2", "--global-batch"]
    asked += ["64", "--seq-len", "4096", "--zero", "1"]
    result = run(*asked)
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "does not fit" in result.stdout
    assert "Fastest combination found that fits" in result.stdout
    assert json.loads(run(*asked, "--json").stdout)["best"]["fits"] is True
    assert run(*asked, "--csv").stdout.startswith("change,freed_bytes")


def test_compare_says_which_is_better_and_why():
    asked = ["compare", "llama-3-70b", "tp=8,pp=4,zero=1,sequence-parallel,recompute=full", "zero=3"]
    asked += ["--cluster", "64xh100-sxm", "--global-batch", "512", "--seq-len", "8192"]
    result = run(*asked)
    assert result.exit_code == 0
    assert "a is better: it fits" in result.stdout
    assert json.loads(run(*asked, "--json").stdout)["b"]["fits"] is False
    wrong = run("compare", "llama-3-70b", "tpp=8", "zero=3", *asked[4:])
    assert wrong.exit_code == 2
    assert "did you mean 'tp'" in wrong.stderr
    twice = run("compare", "llama-3-70b", "zero=1,tp=8,zero=3", "zero=3", *asked[4:])
    assert twice.exit_code == 2
    assert "zero has two values, '1' and '3'; use one of them." in twice.stderr
    outside = run("compare", "llama-3-70b", "--zero 1", "--zero 3", "--recompute", "full", *asked[4:])
    assert outside.exit_code == 2
    assert "--recompute is a plan's flag" in outside.stderr
    assert "write it within the quotes of each" in outside.stderr


@pytest.mark.parametrize(
    "flags, fields",
    [
        ("--tp 2 --zero 3", "tp=2,zero=3"),
        ("--zero=3 --recompute full --no-set-to-none", "zero=3,recompute=full,set_to_none=no"),
        ("--pp 2 --layers-per-stage 3,29 --virtual-stages 1", "pp=2,layers_per_stage=3,29"),
        ("--zero=3", "zero=3"),
    ],
)
def test_compare_takes_the_flags_that_search_prints(flags: str, fields: str):
    job = ["--cluster", "4xh100-sxm", "--global-batch", "8", "--seq-len", "128"]
    found, same = (
        run("compare", "llama-3-8b", plan, "zero=2", *job, "--json").stdout for plan in (flags, fields)
    )
    assert json.loads(found)["a"]["plan"] == json.loads(same)["a"]["plan"]
    assert json.loads(found) == json.loads(same)


@pytest.mark.parametrize(
    "plan, told",
    [
        ("--tp 2 --clip-norm 1", "plan '--tp 2 --clip-norm 1': No such option '--clip-norm'."),
        ("--tp 2 --zero", "Option '--zero' requires an argument. Give a plan's own flags, as "),
        ("--tp '2", "No closing quotation."),
        ("--zero 3 --fsdp-units bolck", "did you mean 'block'?"),
    ],
)
def test_flags_that_are_no_plans_are_refused(plan: str, told: str):
    result = run("compare", "gpt2", plan, "zero=2", "--cluster", "2xh100-sxm")
    assert (result.exit_code, result.stdout) == (2, "")
    assert told in result.stderr
    assert result.stderr.count("\n") == 1


def test_one_name_for_the_comparison_and_the_old_one_still_works():
    assert memplan.compare is memplan.why
    assert {"search", "trace", "advise", "compare"} <= {*dir(memplan)}
    assert {*dir(memplan)} == {*memplan.__all__, "__version__"}


@pytest.mark.parametrize(
    "function", ["estimate", "search", "smallest_cluster", "longest_sequence", "largest_model"]
)
def test_signatures_name_the_keywords_of_a_plan(function: str):
    shown = inspect.signature(getattr(memplan, function)).parameters
    assert {*FIELDS, *plan_fields()} - {"dp_replicate"} <= {*shown}


@pytest.mark.parametrize(
    "said", ["layers_per_stage=3,29", "layers-per-stage=3 + 29", "layers_per_stage=3+29"]
)
def test_compare_reads_the_layers_of_each_stage_as_estimate_does(said: str):
    asked = ["llama-3-8b", f"pp=2,{said},zero=0", "pp=2", "--cluster", "2xh100-sxm", "--global-batch", "4"]
    compared = json.loads(run("compare", *asked, "--seq-len", "64", "--json").stdout)
    assert compared["a"]["plan"]["layers_per_stage"] == [3, 29]
    _, _, value = said.partition("=")
    alone = ["estimate", "llama-3-8b", "--pp", "2", "--layers-per-stage", value, "--seq-len", "64", "--json"]
    assert json.loads(run(*alone).stdout)["plan"]["layers_per_stage"] == [3, 29]


@pytest.mark.parametrize("value", ["(3,29)", "3+x", "3;29", ""])
def test_layers_of_each_stage_that_cannot_be_read_name_the_spelling(value: str):
    compare = ["compare", "llama-3-8b", f"pp=2,layers_per_stage={value}", "pp=2", "--cluster", "2xh100-sxm"]
    estimate = ["estimate", "llama-3-8b", "--pp", "2", "--layers-per-stage", value]
    for asked in ([*compare, "--global-batch", "4"], estimate):
        result = run(*asked)
        assert result.exit_code == 2
        assert f"layers_per_stage='{value.partition(',')[0]}" in result.stderr
        assert "in a command 3,5 or 3+5" in result.stderr


@pytest.mark.parametrize("command", ["estimate", "budget", "search", "advise", "compare"])
def test_every_command_about_plans_takes_whose_code_trains_the_model(command: str):
    found = commands.get_command(click.Context(commands), command)
    flags = {flag for each in found.params for flag in each.opts}
    assert "--implementation" in flags


@pytest.mark.parametrize("command", ["search", "advise"])
def test_two_formats_at_once_are_refused(command: str):
    asked = [command, "gpt2", "--cluster", "1xh100-sxm", "--global-batch", "8", "--json", "--csv"]
    result = run(*asked)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--json and --csv are two formats of the same output; use one of them." in result.stderr


def test_a_search_in_which_nothing_runs_ends_alike_in_every_format():
    asked = ["search", "gpt2", "--cluster", "8xh100-sxm", "--global-batch", "12", "--dp", "8"]
    for printed in ([], ["--json"], ["--csv"]):
        result = run(*asked, *printed)
        assert (result.exit_code, "plans can run" in result.stderr) == (2, True)


def test_compared_plans_of_other_batches_are_different_jobs():
    result = run(
        "compare", "gpt2", "zero=3,global-batch=32", "zero=2", "--cluster", "8xh100-sxm",
        "--global-batch", "64",
    )  # fmt: skip
    assert result.exit_code == 2
    assert "different jobs" in result.stderr


def test_a_search_counts_the_plans_that_a_module_was_not_traced_for_as_refused():
    result = run("search", "resnet-50", "--cluster", "8xh100-sxm", "--global-batch", "2048", "--json")
    refused = [row["zero"] for row in json.loads(result.stdout)["plans"] if row["verdict"] == "refused"]
    assert result.exit_code == 0
    assert {2, 3} <= {*refused}


def test_validate_is_a_command_of_memplan_and_says_what_is_missing(tmp_path):
    assert "published" in python("-m", "memplan", "validate", "-h").stdout
    refused = python("-m", "memplan", "validate", "run", "--tq", "2")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "no such flag --tq" in refused.stderr
    start = "import sys; sys.argv = ['memplan', 'validate', 'run']; {}; from memplan.cli import main; main()"
    without = python("-c", start.format("sys.modules['torch'] = None"))
    assert without.returncode == 1
    assert "use pip install 'memplan[validate]'" in without.stderr
    (tmp_path / "validate.py").write_text("x = 1\n")
    hidden = python("-c", start.format(f"sys.path.insert(0, {str(tmp_path)!r})"))
    assert hidden.returncode == 2
    assert "another module named validate comes before memplan's" in hidden.stderr
    listed = python("-X", "importtime", "-m", "memplan", "-h")
    assert "Run plans for real" in listed.stdout
    assert not re.search(r"\| +torch$", listed.stderr, re.MULTILINE)


def test_the_allocators_settings_are_a_flag_and_a_keyword_that_the_verdict_uses():
    job: dict[str, Any] = {"cluster": "8xh100-sxm", "zero": 3, "global_batch": 8, "recompute": "full"}
    conf = "expandable_segments:True"
    usual, set_so = (memplan.estimate("llama-3-8b", **job, alloc_conf=each) for each in ("", conf))
    assert set_so.worst.replay("").reserved_bytes == usual.reserved_bytes
    assert set_so.reserved_bytes == usual.worst.replay(conf).reserved_bytes < usual.reserved_bytes
    assert set_so.device_bytes.high_bytes < usual.device_bytes.high_bytes
    flags = [word for name, value in job.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    printed = run("estimate", "llama-3-8b", *flags, "--alloc-conf", conf, "--json").stdout
    assert json.loads(printed) == json.loads(json.dumps(set_so.to_dict()))
    found = run("search", "gpt2", "--cluster", "2xh100-sxm", "--pp", "1", "--alloc-conf", conf).stdout
    assert f"--alloc-conf {conf}" in found
    wrong = run("estimate", "gpt2", "--alloc-conf", "expandable_segment:True")
    assert wrong.exit_code == 2
    assert "alloc_conf has 'expandable_segment', which memplan does not know; use expandable_" in wrong.stderr
