"""Tables: frames that add up, and text that fits a terminal."""

from typing import Any

import pytest

import memplan
from memplan.shapes import KINDS
from memplan.tables import collectives_frame, instants_frame, stages_frame

PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "one GPU": ("gpt2", {"cluster": "1xh100-sxm"}),
    "no cluster": ("llama-3-8b", {"seq_len": 512}),
    "CPU ranks": ("llama-3-8b", {"cluster": "4xcpu", "dp": 2, "pp": 2, "seq_len": 128}),
    "zero 3": ("llama-3-8b", {"cluster": "16xh100-sxm", "zero": 3, "seq_len": 1024}),
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
    stages, calls, instants = stages_frame(estimate), collectives_frame(estimate), instants_frame(estimate)
    assert len(stages) == len(estimate.stages)
    assert stages["n_layers"].sum() == estimate.model.n_layers
    assert stages["total_bytes"].max() == estimate.peak.total_bytes
    assert stages[[f"{kind}_bytes" for kind in KINDS]].sum(axis=1).eq(stages["total_bytes"]).all()
    assert stages.equals(estimate.to_frame())
    assert calls["payload_bytes"].sum() == sum(
        c.payload_bytes for s in estimate.stages for c in s.collectives
    )
    assert instants.groupby("stage")["total_bytes"].max().tolist() == stages["total_bytes"].tolist()


def test_text_fits_80_columns_of_ascii(estimate):
    text = str(estimate)
    assert text.isascii()
    assert max(map(len, text.splitlines())) <= 80
    assert not any(line != line.rstrip() for line in text.splitlines())


def test_the_verdict_is_said_in_words():
    fits = memplan.estimate("gpt2", cluster="1xh100-sxm")
    too_large = memplan.estimate("llama-3-70b", cluster="1xh100-sxm")
    assert fits.fits is True
    assert "FITS: " in str(fits)
    assert "left." in str(fits)
    assert too_large.fits is False
    assert "DOES NOT FIT: " in str(too_large)
    assert " more than 75.15 GiB (79.11 GiB less 5%)." in str(too_large)
    assert "No verdict: no cluster was given." in str(memplan.estimate("gpt2"))
    assert "No verdict: CPU ranks have no limit." in str(memplan.estimate("llama-3-8b", cluster="1xcpu"))


def test_what_no_run_has_confirmed_says_so():
    assert "no GPU run has confirmed them yet" in str(memplan.estimate("gpt2", cluster="1xh100-sxm"))
    assert "confirmed by real runs" in str(memplan.estimate("llama-3-8b", cluster="1xcpu", seq_len=128))


def test_many_stages_are_elided_but_never_the_worst():
    model, asked = PLANS["126 stages"]
    estimate = memplan.estimate(model, **asked)
    text = str(estimate)
    assert len(text.splitlines()) < 60
    assert "  ...  ..." in text
    rows = [line.split() for line in text.splitlines()]
    assert any(row[:2] == [str(estimate.worst.stage), str(estimate.worst.layers.start)] for row in rows)
    model, asked = PLANS["16 stages"]
    assert "  ..." not in str(memplan.estimate(model, **asked))
