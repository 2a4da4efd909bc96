"""Tables: frames that add up, and text that fits a terminal."""

from collections import Counter
from typing import Any

import pytest

import memplan
from memplan.shapes import KINDS
from memplan.tables import layers_text, stages_frame
from memplan.text_tables import WIDTH, text_table

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
    assert ("Host " in str(estimate)) == estimate.plan.offload


def test_text_fits_80_columns_of_ascii(estimate):
    text = str(estimate)
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
    assert "FITS: a GPU holds 2.96 to 4.11 GiB (" in str(fits)
    assert "up to 75.15 GiB fit (79.11 GiB usable, less a margin of 5%)." in joined(fits)
    assert too_large.fits is False
    assert "DOES NOT FIT: " in str(too_large)
    assert "79.11 GiB are usable." in joined(too_large)
    near = memplan.estimate("llama-3-8b", cluster="8xh100-sxm", zero=3, global_batch=64, seq_len=9216)
    assert (near.verdict, near.fits) == ("cannot say", None)
    assert (
        "up to 75.15 GiB fit (79.11 GiB usable, less a margin of 5%), more than 79.11 GiB do not."
        in joined(near)
    )
    assert "FITS: " not in str(near)
    assert "FIT: " not in str(near)
    assert "No verdict: no cluster was given; a GPU holds " in str(memplan.estimate("gpt2"))
    assert "No verdict: CPU ranks have no limit." in str(memplan.estimate("llama-3-8b", cluster="1xcpu"))


def joined(estimate):
    """The text without its line breaks."""
    return " ".join(str(estimate).split())


def test_what_no_run_has_confirmed_says_so():
    assert "no GPU run has confirmed them yet" in joined(memplan.estimate("gpt2", cluster="1xh100-sxm"))
    assert "confirmed by real runs" in str(memplan.estimate("llama-3-8b", cluster="1xcpu", seq_len=128))


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
    assert "24 x 8 tokens; 6 micro-batches of 2 for each of 2 replicas (gradient" in str(estimate)
    assert batch.items() <= estimate.to_dict()["plan"].items()
    assert batch.items() <= stages_frame(estimate).iloc[0].to_dict().items()


def test_text_says_what_differs_from_the_defaults_and_nothing_else():
    plain = memplan.estimate("gpt2", dp=2, seq_len=8)
    other = memplan.estimate(
        "gpt2", dp=2, seq_len=8, ddp_comm_hook="powersgd", gradient_as_bucket_view=True, loss_chunks=4
    )
    assert "gradient_as_bucket_view=True, ddp_comm_hook=powersgd" in str(other)
    assert "loss_chunks=4" in str(other)
    assert "hook" not in str(plain)
    assert "chunks" not in str(plain)
