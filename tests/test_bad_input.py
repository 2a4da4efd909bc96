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
    ("llama-3-8b", {"pp": 4, "global_batch": 3}, PlanRefused, r"\(3\) must be .* use global_batch=4\."),
    ("llama-3-8b", {"virtual_stages": 2}, PlanRefused, r"virtual_stages=2 are stages of .* pp=1; use"),
    ("llama-3-8b", {"pp": 2, "virtual_stages": 2}, PlanRefused, r"'1f1b' runs one stage on each rank"),
    ("llama-3-8b", {"pp": 4, "schedule": "zbv"}, PlanRefused, r"requires exactly 2 stages .* got 1"),
    (
        "llama-3-8b",
        {"pp": 8, "virtual_stages": 8, "schedule": "looped-bfs"},
        PlanRefused,
        r"pp x virtual_stages = 8 x 8 = 64 is more than n_layers=32; use virtual_stages=4 or",
    ),
    (
        "llama-3-8b",
        {"pp": 2, "virtual_stages": 2, "schedule": "interleaved-1f1b", "global_batch": 5},
        PlanRefused,
        r"multiple of the number of rounds \(2\), but got 5; use global_batch=6\.",
    ),
    (
        "llama-3-8b",
        {"pp": 2, "virtual_stages": 2, "schedule": "dualpipe-v", "global_batch": 3},
        PlanRefused,
        r"got 3 microbatches and 4 stages; use global_batch=4\.",
    ),
    (
        "llama-3-8b",
        {"pp": 2, "dp": 2, "zero": 3, "schedule": "zero-bubble"},
        PlanRefused,
        r"loses gradients with zero=3: FSDP2 frees .*; use zero=2",
    ),
    ("llama-3-8b", {"pp": 2, "dp": 2, "schedule": "zero-bubble"}, PlanRefused, r"zero=0: DDP's hooks .* use"),
    (
        "llama-3-8b",
        {"pp": 2, "schedule": "zero-bubble", "recompute": "selective"},
        PlanRefused,
        r"only allowed to backward once .*; use recompute='full' or 'none'",
    ),
    ("llama-3-8b", {"pp": 2, "layers_per_stage": (16, 8, 8)}, PlanRefused, r"names 3 stages, .* name 2"),
    ("llama-3-8b", {"pp": 2, "layers_per_stage": (16, 8)}, PlanRefused, r"adds up to 24 .* n_layers=32"),
    (
        "llama-3-8b",
        {"dp": 2, "zero": 3, "optimizer": "sgd", "optimizer_impl": "fused"},
        PlanRefused,
        r"_fused_sgd_\.default does not have a sharding strategy.*use optimizer_impl='foreach' or",
    ),
    (
        "llama-3-8b",
        {"tp": 2, "optimizer_impl": "foreach", "set_to_none": False},
        PlanRefused,
        r"_foreach_zero_\.default got mixed torch\.Tensor and DTensor.*or set_to_none=True\.",
    ),
    (
        "llama-3-8b",
        {"tp": 2, "precision": "fp16-mixed"},
        PlanRefused,
        r"_amp_foreach_non_finite_check_and_unscale_\.default: got mixed.*use sequence_parallel=True,",
    ),
    (
        "llama-3-8b",
        {"pp": 2, "precision": "fp16-mixed", "optimizer_impl": "fused"},
        PlanRefused,
        r"output with shape \[\] doesn't match the broadcast shape \[1\].*use optimizer_impl='foreach'",
    ),
    (
        "llama-3-8b",
        {"precision": "bf16", "optimizer": "sgd", "optimizer_impl": "fused", "cluster": "1xcpu"},
        PlanRefused,
        r"leaves most bfloat16 weights as they are on CPU.*use optimizer_impl='foreach' or 'for-loop'\.",
    ),
    ("gpt2", {"clip_grad_norm": 0.0}, InvalidValue, r"clip_grad_norm=0.0 is not allowed; use"),
    ("gpt2", {"dp": 3, "cluster": "8xh100-sxm"}, InvalidValue, r"= 3 ranks are not the cluster's 8 GPUs"),
    ("gpt2", {"tp": 3, "cluster": "8xh100-sxm"}, InvalidValue, r"do not divide the cluster's 8 GPUs; use"),
    ("gpt2", {"zero": 4, "dp": 2}, InvalidValue, r"zero=4 is not allowed; use an integer from 0 to 3\."),
    ("gpt2", {"zero": 1}, PlanRefused, r"zero=1 shards over .* dp=1; use dp of 2 or more, or zero=0\."),
    ("gpt2", {"seq_len": 1025}, PlanRefused, r"seq_len=1025 is longer than max_seq_len=1024.*; use 1024 or"),
    ("gpt2", {"global_batch": 7, "dp": 4}, PlanRefused, r"global_batch=7 is not a multiple .* use 8\."),
    ("gpt2", {"sequence_parallel": True}, PlanRefused, r"tp=1; use tp of 2 or more, or sequence_par"),
    ("llama-3-8b", {"sequence_parallel": True, "tp": 8, "seq_len": 9}, PlanRefused, "=9; use seq_len=16"),
    ("llama-3-8b", {"dp": 2**20, "tp": 2}, PlanRefused, r"= 2097152 ranks are more than 1048576; use"),
    ("lama-3-70b", {}, UnknownName, r"unknown model 'lama-3-70b'; did you mean 'llama-3-70b'\?"),
    ("gpt2", {"cluster": "8xh100-smx"}, UnknownName, r"unknown GPU 'h100-smx'; did you mean 'h100-sxm'\?"),
    ("gpt2", {"cluster": "h100,"}, InvalidValue, r"cluster='h100,' is not understood; use <n>x<gpu>"),
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
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        args += [flag] if value is True else [f"--no{flag[1:]}"] if value is False else [flag, text]
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
    "an unknown architecture": json.dumps({"model_type": "an-architecture-that-nobody-knows"}),
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
    assert "a\\x1b[2J\\nb: " in result.stdout


sizes = st.integers(1, 2**31 - 1) | st.sampled_from([1, 2, 4, 8, 64, 1024])


@settings(max_examples=50, deadline=None, derandomize=True)
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
