"""Tables: frames that add up, and text that fits a terminal."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import memplan
from memplan.cli import commands
from memplan.engines.base import ENGINES
from memplan.shapes import KINDS
from memplan.tables import estimate_text, layers_text, stages_frame
from memplan.text_tables import WIDTH, text_table

DATA = Path(__file__).parents[1] / "data"

PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "one GPU": ("gpt2", {"cluster": "1xh100-sxm"}),
    "no cluster": ("llama-3-8b", {"seq_len": 512}),
    "CPU ranks": ("llama-3-8b", {"cluster": "4xcpu", "dp": 2, "pp": 2, "seq_len": 128}),
    "zero 3": ("llama-3-8b", {"cluster": "16xh100-sxm", "zero": 3, "seq_len": 1024}),
    "offload": (
        "llama-3-8b",
        {"cluster": "16xh100-sxm", "dp_replicate": 2, "zero": 3, "offload": True, "fsdp_units": "block+ends"},
    ),
    "3-D": (
        "llama-3-70b",
        {"cluster": "64xh100-sxm", "tp": 8, "pp": 4, "zero": 1, "sequence_parallel": True, "seq_len": 8192},
    ),
    "16 stages": ("llama-3.1-405b", {"tp": 8, "pp": 16, "sequence_parallel": True, "seq_len": 8192}),
    "126 stages": ("llama-3.1-405b", {"tp": 8, "pp": 126, "seq_len": 8192, "recompute": "full"}),
    "textbook": ("gpt3-175b", {"cluster": "64xa100-80-sxm", "tp": 8, "pp": 8, "engine": "textbook"}),
}


@pytest.fixture(params=PLANS)
def estimate(request):
    model, asked = PLANS[request.param]
    return memplan.estimate(model, **asked)


def test_the_ledger_adds_up_to_the_peak_exactly_kind_by_kind(estimate):
    for stage in {0, estimate.worst.stage, len(estimate.stages) - 1}:
        ledger, peak = estimate.ledger(stage), estimate.stages[stage].peak
        assert ledger["total_bytes"].sum() == peak.total_bytes
        assert (ledger["count"] * ledger["each_bytes"] == ledger["total_bytes"]).all()
        by_kind = ledger.groupby("kind")["total_bytes"].sum()
        for kind in KINDS:
            assert by_kind.get(kind, 0) == getattr(peak, f"{kind}_bytes")


def test_the_ledger_names_each_tensor_once_largest_first(estimate):
    ledger = estimate.ledger()
    assert ledger["total_bytes"].is_monotonic_decreasing
    assert (ledger["count"] > 0).all()
    assert not ledger.duplicated(["name", "kind", "shape", "dtype", "each_bytes"]).any()


def test_frames_are_the_estimate(estimate):
    stages = stages_frame(estimate)
    assert len(stages) == len(estimate.stages)
    assert stages["n_layers"].sum() == estimate.model.n_layers
    assert stages["total_bytes"].max() == estimate.peak.total_bytes
    assert stages[[f"{kind}_bytes" for kind in KINDS]].sum(axis=1).eq(stages["total_bytes"]).all()
    assert stages.equals(estimate.to_frame())
    assert [max(i.total_bytes for i in s.instants) for s in estimate.stages] == stages["total_bytes"].tolist()


def test_the_hosts_ledger_adds_up_to_what_the_host_holds(estimate):
    for number, stage in enumerate(estimate.stages):
        ledger = estimate.ledger(number, host=True)
        assert ledger["total_bytes"].sum() == stage.host.total_bytes
        assert (stage.host.total_bytes > 0) == estimate.plan.offload
        assert stage.host.total_bytes >= stage.host_pinned_bytes
        assert stage.to_dict()["host"] == stage.host.to_dict() | {"pinned_bytes": stage.host_pinned_bytes}
    copied = {c.what for c in estimate.collectives if c.axis == "host"}
    assert copied == ({"weights to the GPU", "gradients to the host"} if estimate.plan.offload else set())
    assert ("the host holds " in joined(estimate).lower()) == estimate.plan.offload
    assert ("\nHost " in estimate_text(estimate, details=True)) == estimate.plan.offload


@pytest.mark.parametrize("details", [False, True])
def test_text_fits_80_columns_of_ascii(estimate, details):
    text = estimate_text(estimate, details=details)
    assert text.isascii()
    assert max(map(len, text.splitlines())) <= 80
    assert not any(line != line.rstrip() for line in text.splitlines())


@pytest.mark.parametrize("wide", [2, 5, 9, 12])
def test_a_table_with_flexible_columns_fits_80_columns_whatever_is_in_it(wide: int):
    rows = [("name", *["number"] * wide, "long"), ("a b " * 30, *["1,234,567"] * wide, "word" * 30)]
    text = text_table(rows, "<" + ">" * wide + "<", flexible=[0, wide + 1])
    assert max(map(len, text.splitlines())) <= WIDTH
    assert Counter("".join(text.split())) == Counter("".join("".join(sum(rows, ())).split()))


def test_the_verdict_is_said_in_words():
    fits = memplan.estimate("gpt2", cluster="1xh100-sxm")
    too_large = memplan.estimate("llama-3-70b", cluster="1xh100-sxm")
    assert fits.fits is True
    assert "FITS: a GPU holds 2.96 to 4.11 GiB (" in joined(fits, details=True)
    assert "up to 75.15 GiB fit (79.11 GiB usable, less a margin of 5%)." in joined(fits, details=True)
    assert too_large.fits is False
    assert "DOES NOT FIT: " in str(too_large)
    assert "79.11 GiB are usable." in joined(too_large, details=True)
    near = memplan.estimate("llama-3-8b", cluster="8xh100-sxm", zero=3)
    assert (near.verdict, near.fits) == ("cannot say", None)
    assert (
        "up to 75.15 GiB fit (79.11 GiB usable, less a margin of 5%), more than 79.11 GiB do not."
        in joined(near, details=True)
    )
    assert "FITS: " not in str(near)
    assert "FIT: " not in str(near)
    alone, cpu = memplan.estimate("gpt2"), memplan.estimate("llama-3-8b", cluster="1xcpu")
    assert "No verdict: no cluster was given; a GPU holds " in joined(alone, details=True)
    assert "No verdict: CPU ranks have no limit." in joined(cpu, details=True)


def joined(estimate, **asked):
    """The text without its line breaks."""
    return " ".join(estimate_text(estimate, **asked).split())


FIRST_LINES: dict[str, tuple[str, dict[str, Any], str]] = {
    "fits": ("8xh100-sxm", {"recompute": "full"}, r"FITS: \d+\.\d-\d+\.\d of 79\.1 GiB, \d+k-\d+k tokens/s"),
    "fits, tight": ("8xa100-40-sxm", {"seq_len": 2048}, r"FITS, TIGHT: \d.*"),
    "cannot say": ("8xh100-sxm", {"global_batch": 8}, r"CANNOT SAY: \d.*"),
    "does not fit": ("1xrtx-4090", {"zero": 0}, r"DOES NOT FIT: \d.*"),
}


@pytest.mark.parametrize("verdict", FIRST_LINES)
def test_the_first_line_is_the_verdict_and_the_last_what_to_run(verdict):
    """Model, GPUs, verdict, bytes against what a GPU has, and a band of tokens per second."""
    cluster, asked, said = FIRST_LINES[verdict]
    e = memplan.estimate("llama-3-8b", cluster=cluster, **{"zero": 3, "global_batch": 64} | asked)
    assert e.verdict == verdict
    first, *_ = str(e).split("\n")
    assert re.fullmatch(f"llama-3-8b on {cluster} {said}", first)
    last = str(e).partition("\nNext: ")[2].replace("\\\n", " ").split()
    assert CliRunner().invoke(commands, last[1:]).exit_code == 0
    assert last[1] == ("export" if e.fits else "advise")


def test_a_kind_that_is_freed_at_the_worst_instant_is_shown_at_its_own():
    """Under DDP gradients are freed after the update: none is held where the backward pass starts."""
    e = memplan.estimate("gpt2", cluster="8xh100-sxm", seq_len=512, micro_batch=8)
    assert e.peak.grads_bytes == 0 < 4 * 124_439_808 <= e.worst.most["grads"]
    worst, most = (line.split() for line in str(e).splitlines() if line.startswith(("worst in", "most of")))
    assert (worst[-5], most[-5]) == ("0.00", "0.46")


def test_a_table_has_one_unit():
    e = memplan.estimate(
        "llama-3-70b", cluster="64xh100-sxm", tp=8, pp=4, zero=1, global_batch=64, seq_len=4096
    )
    text = estimate_text(e, details=True)
    table = text[text.index("collective  ") :].split("\n\n")[0]
    assert table.count("GiB") == 2
    assert not re.search("[KMT]iB", table)


@pytest.mark.parametrize(
    "cluster, said",
    [
        ("1xh100-sxm", "Bytes checked for this GPU by PyTorch's real CUDA software without a GPU"),
        ("1xa100-40-sxm", "Bytes checked for this GPU by"),
        ("1xl40s", "not checked for this GPU (only for a100-80-sxm, h100-sxm, h200, b200)"),
        ("1xh100-pcie", "not checked for this GPU"),
        ("1xv100-32", "not checked for this GPU"),
        ("1xmi300x", "nothing is known here of ROCm's kernels and allocator, so no verdict"),
        ("1xcpu", "Bytes checked by real runs on CPU ranks"),
    ],
)
def test_what_has_confirmed_the_bytes_is_said_of_each_gpu(cluster, said):
    precision = "fp16-mixed" if "v100" in cluster else "bf16-mixed"
    assert said in joined(memplan.estimate("gpt2", cluster=cluster, seq_len=128, precision=precision))


def test_gpus_that_are_said_to_be_checked_have_records():
    names = {path.name.partition("-")[0] for path in (DATA / "measurements" / "nogpu").glob("*-single.jsonl")}
    names |= {path.name.partition("-")[0] for path in (DATA / "measurements" / "nogpu").glob("*-wild.jsonl")}
    assert names == {gpu.partition("-")[0] for gpu in ENGINES.named("torch").confirmed_gpus}


def test_on_amd_there_is_a_verdict_only_if_what_is_held_between_steps_is_too_much():
    small, large = (
        memplan.estimate(name, cluster="8xmi300x", seq_len=512) for name in ("gpt2", "llama-3-70b")
    )
    assert (small.verdict, small.fits) == ("cannot say", None)
    assert (large.verdict, large.fits) == ("does not fit", False)


def test_another_implementation_with_another_verdict_is_named():
    e = memplan.estimate("llama-3-8b", cluster="8xh100-sxm", zero=3)
    others = {each.model.implementation: each.verdict for each in e.other_implementations}
    assert (e.verdict, others) == ("cannot say", {"huggingface": "cannot say", "reference": "fits, tight"})
    assert "The verdict is of torchtitan's code; as reference's code it fits tightly (" in joined(e)
    assert "as huggingface's" not in joined(e)
    assert "The verdict is of" not in joined(
        memplan.estimate("llama-3-8b", cluster="8xh100-sxm", seq_len=512)
    )


def test_many_stages_are_elided_but_never_the_worst():
    model, asked = PLANS["126 stages"]
    estimate = memplan.estimate(model, **asked)
    text = str(estimate)
    assert len(text.splitlines()) < 60
    assert "  ...  ..." in text
    rows = [line.split() for line in text.splitlines()]
    assert any(row[:2] == [str(estimate.worst.stage), layers_text(estimate.worst.layers)] for row in rows)
    model, asked = PLANS["16 stages"]
    assert "  ..." not in str(memplan.estimate(model, **asked))


def test_every_result_says_the_batch_and_how_many_micro_batches_make_it():
    estimate = memplan.estimate("gpt2", dp=2, seq_len=8, micro_batch=2, global_batch=24)
    batch = {"global_batch": 24, "micro_batch": 2, "n_micro_batches": 6}
    assert "24 x 8 tokens; 6 micro-batches of 2 for each of 2 replicas (gradient" in joined(estimate)
    assert batch.items() <= estimate.to_dict()["plan"].items()
    assert batch.items() <= stages_frame(estimate).iloc[0].to_dict().items()


def test_text_says_what_differs_from_the_defaults_and_nothing_else():
    plain = memplan.estimate("gpt2", dp=2, seq_len=8)
    other = memplan.estimate(
        "gpt2", dp=2, seq_len=8, ddp_comm_hook="powersgd", gradient_as_bucket_view=True, loss_chunks=4
    )
    assert "gradient_as_bucket_view=True, ddp_comm_hook=powersgd" in joined(other)
    assert "loss_chunks=4" in str(other)
    assert "hook" not in str(plain)
    assert "chunks" not in str(plain)
