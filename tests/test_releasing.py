"""Pipelines of torch 2.15: turns that are counted are those that are played one by one."""

from dataclasses import replace
from typing import Any

import pytest

import memplan
from memplan.device import H100
from memplan.engines.checks import check_plan
from memplan.engines.options import plan_of
from memplan.engines.torch import TORCH, releasing
from memplan.record import Stretch, unrolled
from validate.suites.models import LLAMA

SCHEDULES = [
    ("interleaved-1f1b", 2),
    ("interleaved-1f1b", 3),
    ("looped-bfs", 2),
    ("zero-bubble", 1),
    ("zero-bubble", 2),
    ("zbv", 2),
    ("dualpipe-v", 2),
]
SPLIT = ("zero-bubble", "zbv", "dualpipe-v")
"""Schedules that split backward passes: with DDP or ZeRO-3 PyTorch loses gradients, which is refused."""

WRAPPED: list[dict[str, Any]] = [{}, {"dp": 2}, {"dp": 2, "zero": 2}, {"dp": 2, "zero": 3}]


RUNNING = [
    (schedule, v, wrapped)
    for schedule, v in SCHEDULES
    for wrapped in WRAPPED
    if schedule not in SPLIT or not wrapped or wrapped.get("zero") == 2
]


@pytest.mark.parametrize("pp", [2, 3])
@pytest.mark.parametrize("schedule, v, wrapped", RUNNING, ids=str)
def test_counted_turns_are_played_ones(monkeypatch, schedule, v, wrapped, pp):
    model, m = replace(LLAMA, n_layers=2 * pp * v), (2 * (v + 1) + releasing.LEAST_TIMES) * pp
    usual = {"pp": pp, "virtual_stages": v, "schedule": schedule, "torch_version": "2.15", "seq_len": 32}
    plan = plan_of(**usual, **wrapped, global_batch=m * wrapped.get("dp", 1))
    check_plan(model, plan)
    ranks = [plan.place(pp_rank * wrapped.get("dp", 1)) for pp_rank in range(pp)]
    counted = [TORCH.play_rank(model, plan, rank, H100, None).step for rank in ranks]
    monkeypatch.setattr(releasing, "extrapolated", lambda *_: None)
    played = [TORCH.play_rank(model, plan, rank, H100, None).step for rank in ranks]
    for one, other in zip(counted, played, strict=True):
        assert n_parts(one) < n_parts(other)
        assert (one.net_bytes, one.high_bytes) == (other.net_bytes, other.high_bytes)
        assert [named(event) for event in unrolled(one)] == [named(event) for event in unrolled(other)]


def n_parts(stretch: Stretch) -> int:
    return 1 + sum(map(n_parts, stretch.parts))


def named(found: tuple[str, Any]) -> tuple[str, int]:
    _, event = found
    return event.buffer.name, event.sign


def test_a_step_of_8192_micro_batches_has_few_parts():
    plan: dict[str, Any] = {"pp": 4, "virtual_stages": 2, "schedule": "interleaved-1f1b", "seq_len": 32}
    estimated = memplan.estimate(replace(LLAMA, n_layers=8), **plan, global_batch=8192, torch_version="2.15")
    assert all(len(stage.record.step.parts) < 500 for stage in estimated.stages)
