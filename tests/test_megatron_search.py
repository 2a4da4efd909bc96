"""A search of Megatron's plans finds what estimating every plan finds, by bounds that are bounds."""

from typing import Any

import pytest

from memplan.estimate import estimate_plan
from memplan.search.search import searched
from memplan.testing import check_bounds

ASKED: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": {"global_batch": 16, "seq_len": 4096, "recompute_blocks": (None, 3)},
    "mixtral-8x7b": {
        "cluster": "32xh100-sxm", "global_batch": 32, "seq_len": 4096, "ep": (4, 8), "tp": 4, "pp": (2, 8),
        "zero": 1, "micro_batch": 1, "virtual_stages": (1, 2), "sequence_parallel": True,
    },
    "llama-3.2-3b": {
        "global_batch": 8, "seq_len": 16_384, "cp": (2, 4), "overlap_grad_reduce": True,
        "overlap_param_gather": True, "micro_batch": 1, "recompute": ("none", "full"),
    },
    "qwen3-0.6b": {
        "global_batch": 16, "seq_len": 4096, "optimizer": "muon", "zero": (0, 1), "micro_batch": (1, 2),
        "use_layer_wise_param_layout": (True, False),
    },
    "llama-3.1-8b": {
        "global_batch": 16, "seq_len": 4096, "zero": 1, "micro_batch": 1, "tp": (2, 4),
        "fp8_format": "hybrid", "fp8_recipe": ("tensorwise", "delayed"), "fp8_param_gather": (True, False),
        "first_last_layers_bf16": (False, True), "sequence_parallel": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", ASKED)
def test_what_is_found_is_what_estimating_every_plan_finds(name: str):
    asked = {"cluster": "8xh100-sxm", "engine": "megatron"} | ASKED[name]
    everything = searched(name, keep=None, **asked)
    assert everything.n_within > 3
    found = searched(name, keep=3, **asked)
    assert found.within == everything.within[:3]
    assert found.n_slower > 0
    assert (found.n_plans, found.n_refused) == (everything.n_plans, everything.n_refused)
    for judged in (*everything.within[::9], *everything.beyond[::9]):
        check_bounds(estimate_plan(everything.model, judged.plan, everything.cluster))
