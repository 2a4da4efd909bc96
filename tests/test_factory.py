"""One's own module as a MODEL: the forms in which it is given, and what takes it."""

import json
import sys
from importlib.util import find_spec
from typing import Any, cast

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import memplan
from memplan import InvalidValue, UnknownName
from memplan.cli import commands
from memplan.models import resolve
from memplan.models.trace_from_json import model_from_trace
from memplan.tracing.factory import made_by
from validate.cases import runnable

MINE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, 50)

    def forward(self, tokens, scale=None):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x if scale is None else x * scale)

def make():
    tokens = torch.zeros(2, 16, dtype=torch.long)
    return {"module": Net(), "example_inputs": tokens, "targets": tokens}

def without_a_loss():
    return Net(), torch.zeros(2, 16, dtype=torch.long)

def fails():
    return Net()(torch.zeros(2))

class Holder:
    make = staticmethod(make)
"""


class Sums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(8, 8)

    def forward(self, x, *, bias=None, more=None):
        y = self.w(x)
        for each in (bias, more):
            y = y if each is None else y + each
        return y.sum()


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs a command in a folder with a module of one's own."""
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    yield lambda *command: CliRunner().invoke(commands, [*map(str, command)])
    sys.modules.pop("mine", None)


X, ONE = torch.ones(4, 8), torch.ones(4, 1)
FORMS: dict[str, Any] = {
    "a tensor": (Sums(), X),
    "a tuple": (Sums(), (X,)),
    "a list": (Sums(), [X]),
    "keywords": (Sums(), {"x": X}),
    "arguments and keywords": (Sums(), (X,), {}),
    "the arguments of trace": {"module": Sums(), "example_inputs": X},
    "trace's with a loss": {"module": nn.Linear(8, 8), "example_inputs": X, "loss": torch.sum},
}


@pytest.mark.parametrize("form", FORMS)
def test_a_module_is_given_in_any_natural_form(form):
    given = FORMS[form]
    plain = memplan.trace(Sums(), X, precisions=["fp32"])
    found = resolve(given, precisions=["fp32"])
    assert memplan.estimate(found, precision="fp32", seq_len=1).peak.total_bytes == (
        memplan.estimate(plain, precision="fp32", seq_len=1).peak.total_bytes
    )


def test_arguments_and_keywords_are_both_what_the_module_is_called_with():
    both = resolve((Sums(), (X,), {"bias": ONE, "more": ONE.clone()}), precisions=["fp32"])
    assert [one.name for one in cast(Any, both).inputs_of_step] == ["x", "bias", "more"]


@pytest.mark.parametrize(
    "given, error, words",
    [
        (Sums(), InvalidValue, r"model is a module \(Sums\) without example inputs; give \(module, inputs\)"),
        ({"module": Sums()}, InvalidValue, "without example inputs"),
        (
            {"module": Sums(), "inputs": X},
            UnknownName,
            "unknown key of model 'inputs'.*Known: .*example_inputs",
        ),
        ((X, Sums()), InvalidValue, r"give \(module, inputs\), \(module, args, kwargs\), or a dict"),
        ((), InvalidValue, "or a dict of memplan.trace's arguments"),
        ({"module": 3, "example_inputs": X}, InvalidValue, r"no torch\.nn\.Module"),
    ],
)
def test_what_is_no_module_with_inputs_says_what_to_give(given, error, words):
    for answer in (memplan.estimate, memplan.search):
        with pytest.raises(error, match=words):
            cast(Any, answer)(given, cluster="1xh100-sxm", global_batch=1)


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
def test_a_module_of_transformers_needs_no_inputs():
    import transformers

    settings = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=99
    )
    with torch.device("meta"):
        module = transformers.LlamaForCausalLM(settings)
    assert cast(Any, resolve(module)).n_layers == 2


def test_every_command_takes_a_factory(run):
    cluster = "--cluster", "2xh100-sxm"
    for command in (
        ("estimate", "mine:make", "--zero", 3, "--dp", 2),
        ("estimate", "mine:Holder.make"),
        ("estimate", "mine:make", "--precision", "fp16-mixed"),
        ("advise", "mine:make", *cluster),
        ("budget", "mine:make", *cluster, "--tokens", 1e9),
        ("search", "mine:make", *cluster, "--global-batch", 4, "--precision", "fp32,bf16"),
        (
            "compare",
            "mine:make",
            "zero=1,precision=bf16",
            "zero=3,precision=bf16",
            *cluster,
            "--global-batch",
            4,
        ),
        ("longest-sequence", "mine:make", *cluster, "--global-batch", 2),
        ("largest-model", "mine:make", *cluster, "--global-batch", 2),
    ):
        shown = run(*command)
        assert shown.exit_code == 0, (command, shown.output)
        assert "Net" in shown.output or command[0] == "compare"
    assert "memplan estimate mine:make" in run("search", "mine:make", *cluster, "--global-batch", 4).output


def test_a_trace_is_for_cuda_unless_told_otherwise(run, tmp_path):
    assert memplan.trace(Sums(), X, precisions=["fp32"]).device == "cuda"
    for flags, device in (((), "cuda"), (("--device", "cpu"), "cpu")):
        assert run("trace", "mine:make", "--out", "t.json", *flags).exit_code == 0
        assert model_from_trace(tmp_path / "t.json").device == device
    assert "needs no trace" in run("trace", "gpt2", "--out", "t.json").output


def test_a_factory_is_named_by_its_file_too(run):
    by_file = run("estimate", "mine.py:make", "--cluster", "1xrtx-4090").output
    assert by_file == run("estimate", "./mine.py:make", "--cluster", "1xrtx-4090").output.replace("./", "")
    assert by_file.splitlines()[-2].startswith("Next: memplan export mine.py:make --cluster 1xrtx-4090")


def test_the_message_of_a_missing_loss_can_be_followed(run):
    said = run("estimate", "mine:without_a_loss").output
    assert '{"module": ..., "example_inputs": ..., "loss": ...}' in said
    assert len(said.splitlines()) == 1
    assert run("estimate", "mine:make").exit_code == 0


@pytest.mark.parametrize(
    "name, words",
    [
        (
            "mine:fails",
            r"mine:fails cannot be called \(RuntimeError: .*mine.py line \d+|functional.py line \d+",
        ),
        ("mine:none", "cannot be called .AttributeError"),
        ("not_there:make", "cannot be called .ModuleNotFoundError: No module named 'not_there'"),
    ],
)
def test_a_function_that_fails_is_one_sentence(run, name, words):
    with pytest.raises(InvalidValue, match=words) as refused:
        made_by(name)
    assert len(str(refused.value)) < 400
    assert len(run("estimate", name).output.splitlines()) == 1


def test_no_file_and_no_python_call_names_a_function_that_is_called(run, tmp_path):
    called = "import pathlib\ndef make():\n    pathlib.Path('called').touch()\n"
    (tmp_path / "evil.py").write_text(called)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "evil:make"}))
    for answer in (memplan.estimate, resolve, runnable):
        for name in ("evil:make", tmp_path / "config.json"):
            with pytest.raises(memplan.MemplanError):
                cast(Any, answer)(name)
    assert not (tmp_path / "called").exists()
