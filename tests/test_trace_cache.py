"""Traces that are kept: found again whatever happens to their files, never after something has changed."""

import json
import logging
import os
import pty
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

import memplan
from memplan import InvalidValue
from memplan.models.config import Config
from memplan.tracing import cache

pytest.importorskip("transformers")

VALUES = {
    "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "vocab_size": 97, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "num_local_experts": 4, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture(scope="module")
def traced():
    return cache.traced_from_config(Config(VALUES), "tiny", "cuda", cache=False)


@pytest.fixture
def kept(monkeypatch, tmp_path, cache_entry, traced):
    """A cache in an empty folder, and how often something was traced."""
    n_traced: list[str] = []

    def counted(asked):
        n_traced.append(asked.text)
        return replace(traced, name=asked.name)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_entry", cache_entry)
    monkeypatch.setattr(cache, "_traced", counted)
    return n_traced


def found(values=VALUES, name="tiny", device="cuda", cached=True, precisions=("bf16",)):
    cache._kept.cache_clear()  # as in another process
    return cache.traced_from_config(Config(values), name, device, precisions, cache=cached)


def entries(tmp_path):
    return sorted((tmp_path / "cache" / "memplan" / "traces").iterdir())


def test_a_config_is_traced_once(kept, tmp_path, traced):
    assert found() == found() == traced
    assert len(kept) == len(entries(tmp_path)) == 1


@pytest.mark.parametrize(
    "changed",
    [
        *({"values": {**VALUES, "num_hidden_layers": 3}}, {"device": "cpu"}, {"name": "other"}),
        *({"precisions": ("fp32",)}, {"cached": False}),
    ],
)
def test_another_config_device_or_name_is_traced_and_so_is_what_shall_not_be_kept(kept, changed):
    found()
    found(**changed)
    assert len(kept) == 2


def test_another_release_or_other_code_of_memplans_is_traced_anew(kept, monkeypatch, tmp_path):
    found()
    (tmp_path / "site" / "einops-1.0.dist-info").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    found()
    monkeypatch.setattr(cache, "_own_code", lambda: "changed")
    found()
    assert len(kept) == 3


def test_a_checkout_of_transformers_is_never_kept(kept, monkeypatch, tmp_path):
    package = tmp_path / "checkout" / "transformers"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path / "checkout"))
    monkeypatch.delitem(sys.modules, "transformers")
    assert cache._entry(cache.Request(json.dumps(VALUES), "tiny", "cuda", (), ())) is None
    found()
    found()
    assert len(kept) == 2


@pytest.mark.parametrize(
    "damage",
    [lambda _: b"", lambda b: b[:-9], lambda b: b.replace(b"97", b"98"), lambda _: bytes(range(256))],
)
def test_a_damaged_entry_is_traced_anew_and_replaced(kept, tmp_path, damage):
    model = found()
    (file,) = entries(tmp_path)
    content = file.read_bytes()
    file.write_bytes(damage(content))
    assert found() == model
    assert len(kept) == 2
    assert file.read_bytes() == content
    assert found() == model
    assert len(kept) == 2


def test_a_cache_that_takes_no_files_changes_no_answer(kept, tmp_path, traced):
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert found() == found() == traced
    assert len(kept) == 2


def test_an_entry_that_cannot_be_written_whole_is_not_there(kept, tmp_path, monkeypatch, traced):
    def full(self, path):
        Path(path).write_text("{")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(memplan.TracedModel, "save", full)
    assert found() == traced
    assert not entries(tmp_path)


def test_the_entries_that_were_not_used_longest_are_removed(kept, tmp_path, monkeypatch):
    found()
    (oldest,) = entries(tmp_path)
    monkeypatch.setattr(cache, "MOST_BYTES", 3 * oldest.stat().st_size)
    os.utime(oldest, (1, 1))
    for n in (3, 4):
        found(values={**VALUES, "num_hidden_layers": n})
    found()  # which is used again
    for n in (5, 6):
        found(values={**VALUES, "num_hidden_layers": n})
    assert oldest in entries(tmp_path)
    assert len(entries(tmp_path)) == 3


def test_processes_that_write_one_entry_at_once_leave_it_whole(kept, tmp_path, traced):
    with ThreadPoolExecutor(8) as pool:
        text = json.dumps(VALUES, sort_keys=True)
        file = cache._entry(cache.Request(text, "tiny", "cuda", ("bf16",), ()))
        list(pool.map(lambda _: cache._write(file, traced), range(32)))
    assert found() == traced
    assert not kept
    assert len(entries(tmp_path)) == 1


def test_traces_that_are_missing_are_made_at_once_in_other_processes(monkeypatch, tmp_path, cache_entry):
    """What the caller then asks for is there, but for what cannot be traced."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_entry", cache_entry)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1}, raising=False)

    def asked(n_heads):
        values = VALUES | {"num_attention_heads": n_heads}
        return cache.traced_from_config(Config(values), "tiny", "cuda", ("bf16",), cache=True)

    cache._kept.cache_clear()
    cache.trace_at_once([partial(asked, n_heads) for n_heads in (1, 2, "none")])
    assert len(entries(tmp_path)) == 2
    monkeypatch.setattr(cache, "_traced", None)
    assert asked(1).name == asked(2).name == "tiny"


def test_a_trace_is_told_and_shown_on_a_terminal_for_as_long_as_it_takes(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "memplan.tracing"), cache.told("Mine", "cuda"):
        pass
    assert [record.getMessage() for record in caplog.records] == [
        "tracing Mine for CUDA",
        "traced Mine in 0 s",
    ]
    (tmp_path / "slow.py").write_text(
        "import time, torch\n"
        "class Slow(torch.nn.Linear):\n"
        "    def forward(self, x):\n        time.sleep(0.5)\n        return super().forward(x).sum()\n"
        "def make():\n    return Slow(8, 8), torch.ones(4, 8)\n"
    )
    ours, its = pty.openpty()
    command = [sys.executable, "-m", "memplan", "estimate", "slow:make", "--seq-len", "1"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        stderr=its,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(Path(memplan.__file__).parents[1])},
        timeout=120,
        text=True,
    )
    os.close(its)
    shown = os.read(ours, 10_000).decode()
    assert done.returncode == 0, shown
    assert "tracing Slow for CUDA ... 2 s" in shown
    assert shown.endswith("\r\033[K")
    assert "tracing" not in done.stdout


def test_no_cache_is_a_flag_of_every_command_with_a_model_and_a_keyword(tmp_path, monkeypatch):
    from click.testing import CliRunner

    from memplan.cli import commands

    asked = []

    def refused(text, name, device, precisions, *, cache, mesh):
        asked.append(cache)
        raise InvalidValue("seen")

    monkeypatch.setattr(cache, "traced_from_config", refused)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(VALUES))
    run, where = CliRunner().invoke, ["--cluster", "2xh100-sxm", "--global-batch", "2"]
    for command, *others in (
        ["estimate"], ["advise"], ["budget"], ["search"], ["compare", "zero=1", "zero=2"],
        ["longest-sequence"], ["largest-model"],
    ):  # fmt: skip
        for flags, is_asked in (([], True), (["--no-cache"], False)):
            shown = run(commands, [command, str(file), *others, *where, *flags])
            assert "seen" in shown.output, shown.output
            assert asked.pop() is is_asked
    for kept in (True, False):
        for answer in (memplan.estimate, memplan.search):
            with pytest.raises(InvalidValue, match="seen"):
                answer(file, cluster="2xh100-sxm", global_batch=2, cache=kept)
            assert asked.pop() is kept
