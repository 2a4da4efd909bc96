"""Bad input: refused with the value, the rule and a way out, by the API and on the command line alike."""

import json
from typing import Any, cast

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

import memplan
from memplan.cli import commands
from memplan.errors import InvalidValue, MemplanError, PlanRefused, UnknownName
from memplan.models import resolve

COUNT = r"use an integer from 1 to 2147483647\."
RANKS = r"use an integer from 1 to 1048576\."

# model, keywords, error, message: value and rule, then the way out.
PLANS = [
    ("llama-3-8b", {"tp": 3}, PlanRefused, r"tp=3 does not divide n_heads=32; use one of 1, 2, 4, 8\."),
    ("llama-3-8b", {"tp": 16}, PlanRefused, r"tp=16 does not divide n_kv_heads=8; use one of 1, 2, 4, 8\."),
    ("gpt2", {"tp": 2}, PlanRefused, r"tp=2 does not divide vocab_size=50257; .*pad vocab_size=50257"),
    ("llama-3-8b", {"pp": 33}, PlanRefused, r"pp=33 is more than n_layers=32; use at most 32\."),
    ("gpt2", {"pp": 2}, PlanRefused, r"pp=2 puts the embedding and the head .* tied; use pp=1"),
    ("llama-3-8b", {"pp": 4, "global_batch": 3}, PlanRefused, r"there are 3 for pp=4; use global_batch=4"),
    ("gpt2", {"dp": 3, "cluster": "8xh100-sxm"}, InvalidValue, r"= 3 is not the cluster's 8 GPUs; use c"),
    ("gpt2", {"tp": 3, "cluster": "8xh100-sxm"}, InvalidValue, r"does not divide the cluster's 8 GPUs; use"),
    ("gpt2", {"zero": 4, "dp": 2}, InvalidValue, r"zero=4 is not allowed; use an integer from 0 to 3\."),
    ("gpt2", {"zero": 1}, PlanRefused, r"zero=1 shards over .* dp=1; use dp of 2 or more, or zero=0\."),
    ("gpt2", {"seq_len": 1025}, PlanRefused, r"seq_len=1025 is longer than max_seq_len=1024.*; use 1024 or"),
    ("gpt2", {"global_batch": 7, "dp": 4}, PlanRefused, r"global_batch=7 is not a multiple .* use 8\."),
    ("gpt2", {"sequence_parallel": True}, PlanRefused, r"tp=1; use tp of 2 or more, or sequence_par"),
    ("llama-3-8b", {"sequence_parallel": True, "tp": 8, "seq_len": 9}, PlanRefused, "=9; use seq_len=16"),
    ("llama-3-8b", {"dp": 2**20, "tp": 2}, PlanRefused, r"= 2097152 ranks are more than 1048576; use"),
    ("lama-3-70b", {}, UnknownName, r"unknown model 'lama-3-70b'; did you mean 'llama-3-70b'\?"),
    ("gpt2", {"cluster": "8xh100-smx"}, UnknownName, r"unknown GPU 'h100-smx'; did you mean 'h100-sxm'\?"),
    ("gpt2", {"cluster": "h100"}, InvalidValue, r"cluster='h100' is not understood; use <n>x<gpu>"),
    ("gpt2", {"cluster": "0xa10"}, InvalidValue, r"n_gpus=0 is not allowed; use an integer from 1"),
    ("gpt2", {"precision": "bf61"}, UnknownName, r"unknown precision 'bf61'; did you mean 'bf16'\? Known: "),
    ("gpt2", {"optimizer": "adamww"}, UnknownName, r"unknown optimizer 'adamww'; did you mean 'adamw'\?"),
    ("gpt2", {"schedule": "1fb1"}, UnknownName, r"unknown schedule '1fb1'; did you mean '1f1b'\?"),
    ("gpt2", {"recompute": "ful"}, UnknownName, r"unknown recompute 'ful'; did you mean 'full'\?"),
    ("gpt2", {"engine": "troch"}, UnknownName, r"unknown engine 'troch'; did you mean 'torch'\?"),
]  # fmt: skip
COUNTS = ["dp", "tp", "pp", "zero", "micro_batch", "global_batch", "seq_len"]
NO_COUNTS = ["-1", "-" + "9" * 30, "1" + "0" * 30, "9" * 5000, "8.5", "8.0", "1e3", "nan", "inf", "", "True",
             "0x8", "1_000", "٤"]  # fmt: skip
NO_COUNTS_IN_PYTHON = [
    -1,
    10**30,
    -(10**5000),
    8.5,
    8.0,
    float("nan"),
    float("inf"),
    True,
    False,
    "8",
    b"8",
    [8],
    1j,
]


def estimate_on_the_command_line(model, **asked):
    args = ["estimate", str(model)]
    for name, value in asked.items():
        flag = f"--{name.replace('_', '-')}"
        args += [flag] if value is True else [flag, str(value)]
    return CliRunner().invoke(commands, args)


def assert_one_message(result):
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1
    assert result.stderr.rstrip().endswith(".")


@pytest.mark.parametrize("model,asked,error,message", PLANS)
def test_a_plan_that_cannot_be_is_refused(model, asked, error, message):
    with pytest.raises(error, match=message):
        memplan.estimate(model, **asked)


@pytest.mark.parametrize("model,asked,error,message", PLANS)
def test_the_command_line_says_the_same(model, asked, error, message):
    with pytest.raises(error) as refusal:
        memplan.estimate(model, **asked)
    result = estimate_on_the_command_line(model, **asked)
    assert_one_message(result)
    assert result.stderr == f"Error: {refusal.value}\n"


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize(
    "value", NO_COUNTS_IN_PYTHON, ids=lambda value: repr(value)[:12] if value != -(10**5000) else "huge"
)
def test_what_is_no_count_is_refused(name, value):
    with pytest.raises(InvalidValue, match=rf"^{name}=.* is not allowed; use an integer from [01] to \d+\.$"):
        memplan.estimate("gpt2", **{name: value})


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", NO_COUNTS, ids=lambda value: value[:12])
def test_what_is_no_count_is_refused_on_the_command_line(name, value):
    result = estimate_on_the_command_line("gpt2", **{name: value})
    assert_one_message(result)
    assert f"{name}=" in result.stderr
    assert "is not allowed; use an integer from" in result.stderr


def test_a_count_at_its_limit_is_named():
    for name, way_out in (("dp", RANKS), ("seq_len", COUNT)):
        with pytest.raises(InvalidValue, match=way_out):
            memplan.estimate("gpt2", **cast(Any, {name: 2**31}))


@pytest.mark.parametrize("value", [1, 0, None, "yes", float("nan")])
def test_a_flag_is_true_or_false(value):
    with pytest.raises(InvalidValue, match=r"sequence_parallel=.* is not allowed; use True or False\."):
        memplan.estimate("gpt2", sequence_parallel=value)


@pytest.mark.parametrize("name", ["precision", "optimizer", "recompute", "schedule", "engine"])
@pytest.mark.parametrize("value", [None, 1, "", ["adamw"], "x" * 10_000, "\x1b[2J", "\0"])
def test_a_name_of_another_type_is_refused(name, value):
    with pytest.raises(UnknownName, match=rf"^unknown {name} .* Known: ") as refusal:
        memplan.estimate("gpt2", **{name: value})
    assert str(refusal.value).isprintable()
    assert len(str(refusal.value)) < 400


@pytest.mark.parametrize("name", ["cluster", "model"])
@pytest.mark.parametrize("value", [7, 1.5, b"gpt2", ["gpt2"], float("nan")])
def test_a_model_or_cluster_of_another_type_is_refused(name, value):
    asked = {"model": "gpt2", name: value}
    with pytest.raises(InvalidValue, match=r"; use "):
        memplan.estimate(asked.pop("model"), **asked)


LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
    "num_hidden_layers": 2, "vocab_size": 256, "max_position_embeddings": 128,
}  # fmt: skip
BROKEN = {
    "empty": "",
    "truncated": json.dumps(LLAMA)[:-20],
    "no object": "[1, 2]",
    "not utf-8": b"\xff\xfe{}",
    "nested": "[" * 200_000,
    "nested objects": '{"a":' * 200_000,
    "NaN": json.dumps(LLAMA | {"hidden_size": float("nan")}),
    "infinity": json.dumps(LLAMA | {"rope_theta": float("inf")}),
    "10^30 layers": json.dumps(LLAMA | {"num_hidden_layers": 10**30}),
    "thousands of digits": '{"model_type": "llama", "num_hidden_layers": ' + "9" * 5000 + "}",
    "2^31 - 1 layers": json.dumps(LLAMA | {"num_hidden_layers": 2**31 - 1}),
    "negative layers": json.dumps(LLAMA | {"num_hidden_layers": -1}),
    "a boolean": json.dumps(LLAMA | {"num_hidden_layers": True}),
    "a text": json.dumps(LLAMA | {"hidden_size": "64"}),
    "a fraction": json.dumps(LLAMA | {"hidden_size": 64.5}),
    "zero heads": json.dumps(LLAMA | {"num_attention_heads": 0}),
    "an unknown architecture": json.dumps({"model_type": "mamba"}),
    "no architecture": "{}",
    "a key twice": '{"model_type": "llama", "model_type": "gpt2"}',
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_a_broken_config_is_refused_by_both(tmp_path, content):
    file = tmp_path / "config.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(MemplanError, match=r"config\.json: .*(; |Known: )") as refusal:
        memplan.estimate(str(file))
    result = estimate_on_the_command_line(file)
    assert_one_message(result)
    assert result.stderr == f"Error: {refusal.value}\n"


def test_an_unknown_architecture_is_named(tmp_path):
    file = tmp_path / "config.json"
    file.write_text('{"model_type": "lama"}')
    with pytest.raises(UnknownName, match=r"unknown model architecture 'lama'; did you mean 'llama'\?"):
        memplan.estimate(file)


def test_a_folders_name_cannot_move_the_cursor(tmp_path):
    folder = tmp_path / "a\x1b[2J\nb"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    result = estimate_on_the_command_line(folder)
    assert result.exit_code == 0
    assert "\x1b" not in result.stdout
    assert "model    a\\x1b[2J\\nb: " in result.stdout


sizes = st.integers(1, 2**31 - 1) | st.sampled_from([1, 2, 4, 8, 64, 1024])


@settings(max_examples=50, deadline=None)
@given(
    dp=st.integers(1, 64), tp=st.integers(1, 8), pp=st.integers(1, 4), zero=st.integers(0, 3),
    micro_batch=sizes, n_micro_batches=sizes, seq_len=sizes,
    precision=st.sampled_from(["fp32", "bf16", "bf16-mixed"]), engine=st.sampled_from(["torch", "textbook"]),
)  # fmt: skip
def test_every_plan_is_estimated_or_refused_and_printed_within_80_columns(
    dp, tp, pp, zero, micro_batch, n_micro_batches, seq_len, precision, engine
):
    asked = {"dp": dp, "tp": tp, "pp": pp, "zero": zero, "micro_batch": micro_batch, "seq_len": seq_len}
    try:
        estimate = memplan.estimate(
            resolve("llama-3-8b"), global_batch=dp * micro_batch * n_micro_batches, precision=precision,
            engine=engine, **asked,
        )  # fmt: skip
    except MemplanError:
        return
    assert estimate.peak.total_bytes > 0
    assert max(map(len, str(estimate).splitlines())) <= 80
