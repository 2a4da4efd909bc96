"""Peaks are the same however late gloo's workers let go of what they have sent."""

import os
from contextlib import closing
from typing import Any

import pytest

from memplan.engines.options import plan_of
from tests.tiny import TINY
from validate.cases import Case
from validate.gloo import WORKERS, threads_named
from validate.launch import rank_program
from validate.machine import Budget
from validate.sweep import judging, swept
from validate.systems import prepared

pytestmark = pytest.mark.slow

PLANS: dict[str, dict[str, Any]] = {
    "fsdp": {"dp": 2, "zero": 3},
    "fsdp, gradients only": {"dp": 2, "zero": 2, "precision": "bf16-mixed"},
    "tensor and sequence": {"tp": 2, "sequence_parallel": True, "recompute": "full"},
    "ddp": {"dp": 2, "zero": 1},
    "pipeline": {"pp": 2, "schedule": "1f1b"},
}
LAST = 19  # nice: the least share of a core that still advances beside other programs
BUDGET = Budget(cores=1, memory_bytes=8 * 2**30)


def case(name):
    return Case(name=name, model=TINY, plan=plan_of(**{"seq_len": 16, "global_batch": 4, **PLANS[name]}))


def prepared_with_late_workers(case, rank, device):
    """A training on one core, whose gloo workers run after everything else that wants that core."""
    training = prepared(case, rank, device)
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    for worker in threads_named(WORKERS):
        os.sched_setaffinity(worker, os.sched_getaffinity(0))
        os.setpriority(os.PRIO_PROCESS, worker, LAST)
    return training


def late_workers(seat):
    return rank_program(seat, prepare=prepared_with_late_workers)


def test_late_workers_change_no_peak():
    cases = [case(name) for name in PLANS]
    with judging(None, program=late_workers) as judge, closing(swept(cases, judge, BUDGET)) as fresh:
        records = list(fresh)
    assert [record.case["name"] for record in records if not record.confirmed] == []
