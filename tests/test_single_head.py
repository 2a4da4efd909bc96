"""A single head of keys and values that all query heads see: `expand` and `reshape` copy nothing of it."""

from dataclasses import replace
from typing import Any, cast

import pytest

from memplan import Llama
from memplan.engines.options import plan_of
from memplan.models import Decoder, implemented, preset
from memplan.models.gemma3 import Gemma3
from validate.cases import Case
from validate.judge import References, judged

SIZES: dict[str, Any] = {"d_model": 64, "n_heads": 4, "d_head": 16, "d_ff": 176, "vocab_size": 320}
TORCHTITAN = cast(
    Decoder, implemented(Llama(name="llama", n_layers=3, n_kv_heads=2, max_seq_len=64, **SIZES), "torchtitan")
)  # one head on each of two tensor ranks
GEMMA = preset("gemma-3-1b")
assert isinstance(GEMMA, Gemma3)
GEMMA = replace(GEMMA, n_layers=7, n_kv_heads=1, max_seq_len=128, window=32, **SIZES)


@pytest.mark.parametrize(
    "model, plan",
    [
        (TORCHTITAN, {"tp": 2}),
        (TORCHTITAN, {"tp": 2, "sequence_parallel": True, "precision": "bf16-mixed"}),
        (TORCHTITAN, {"tp": 2, "recompute": "full", "precision": "bf16"}),
        (GEMMA, {}),
        (GEMMA, {"precision": "bf16-mixed"}),
    ],
    ids=str,
)
def test_cpu_ranks_hold_what_is_predicted(model: Decoder, plan: dict[str, Any]):
    if model is GEMMA:
        pytest.importorskip("transformers")
    plan_of_ranks = plan_of(**{"precision": "fp32", "micro_batch": 2, "seq_len": 64, **plan})
    record = judged(Case(name="single head", model=model, plan=plan_of_ranks), References())
    assert (record.outcome, record.states_off_bytes, record.collectives_off) == ("ok", 0, 0)
    assert record.peak_error == 0.0
