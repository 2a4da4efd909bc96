"""Blocks of several kinds and in several stacks: what is wrapped, gathered and recomputed."""

from typing import Any

import pytest

import memplan
from memplan import TracedModel
from memplan.engines.options import plan_of
from validate.cases import Case, shipped_trace
from validate.judge import References, judged
from validate.systems.torch.wild import wild_named

pytest.importorskip("transformers")

WRAPPED = {"hf-deepseek-v3": 6, "hf-whisper": 8, "hf-vit-whole": 5}
"""Modules that transformers' own plan wraps, by the name of a trace on file."""

ON_RANKS: tuple[dict[str, Any], ...] = (
    {"dp": 2, "zero": 3, "precision": "fp32", "micro_batch": 2, "global_batch": 4},
    {"dp": 2, "zero": 3, "precision": "bf16-mixed", "recompute": "full", "micro_batch": 2, "global_batch": 4},
)


def gathers(model: TracedModel, **plan: Any) -> int:
    options = {"seq_len": 64 if model.has_sequence else 1, "precision": "fp32", "dp": 2, "zero": 3, **plan}
    e = memplan.estimate(model, device="cpu", **options)
    return sum(c.calls for c in e.collectives if c.kind == "all_gather")


@pytest.mark.parametrize("name", WRAPPED)
def test_what_transformers_does_not_split_is_what_is_gathered(name):
    module = wild_named(name).module()
    own = [one for one in module.modules() if type(one).__name__ in module._no_split_modules]
    assert len(own) == WRAPPED[name]
    assert gathers(shipped_trace(name)) == 2 * len(own) + 1  # all but the root are gathered again


@pytest.mark.parametrize("plan", ON_RANKS, ids=str)
@pytest.mark.parametrize("name", WRAPPED)
def test_cpu_ranks_hold_and_send_what_is_predicted(name, plan):
    model = shipped_trace(name)
    case = Case(name=name, model=model, plan=plan_of(**plan, seq_len=64 if model.has_sequence else 1))
    record = judged(case, References())
    assert record.outcome in ("ok", "wrong-loss"), record.reason  # speech of noise is not learned in 6 steps
    assert record.states_off_bytes == record.collectives_off == 0
    assert abs(record.peak_error) < 1e-3
