"""A sweep's order, its budget, what it shows and where it stops; no ranks but in the last test."""

import os
import pty
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from memplan import Llama
from memplan.engines.options import plan_of
from memplan.errors import InvalidValue
from memplan.units import GiB
from validate.cases import Case
from validate.machine import Budget, machine_budget, read_bytes
from validate.records import Record
from validate.suites.models import SMALL
from validate.sweep import RANK_BYTES, Judge, Stopped, part_of, rank_bytes, share_of, stoppable, swept

ROOT = Path(__file__).parents[1]
LLAMA = SMALL["llama-small"]
BUDGET = Budget(cores=2, memory_bytes=64 * GiB)


def case(n_ranks, name="", model=LLAMA, **plan):
    return Case(name=name or f"{n_ranks} ranks", model=model, plan=plan_of(dp=n_ranks, seq_len=64, **plan))


class CountingJudge(Judge):
    """Runs nothing; counts what runs at the same time."""

    def __init__(self, seconds=0.02):
        self.seconds = seconds
        self.lock = threading.Lock()
        self.now, self.most, self.started, self.closed = 0, 0, [], False

    def __call__(self, case):
        with self.lock:
            self.now += case.plan.world_size
            self.most = max(self.most, self.now)
            self.started.append(case.name)
        time.sleep(self.seconds)
        with self.lock:
            self.now -= case.plan.world_size
        return Record(case=case.to_dict(), outcome="ok")

    def close(self):
        self.closed = True


@pytest.mark.parametrize("cores, most", [(1, 2), (2, 4), (4, 8)])
def test_two_ranks_share_a_core(cores, most):
    judge = CountingJudge()
    cases = [case(2, name=str(i)) for i in range(12)]
    records = list(swept(cases, judge, Budget(cores=cores, memory_bytes=64 * GiB)))
    assert sorted(record.case["name"] for record in records) == sorted(c.name for c in cases)
    assert judge.most == most
    assert not judge.closed


def test_a_case_of_more_ranks_than_cores_runs_alone():
    judge = CountingJudge()
    list(swept([case(1), case(8), case(2)], judge, BUDGET))
    assert judge.most == 8


def test_small_cases_pass_large_ones_that_must_wait():
    judge = CountingJudge()
    list(swept([case(2, "a"), case(8, "large"), case(2, "b"), case(2, "c")], judge, BUDGET))
    assert judge.started.index("b") < judge.started.index("large")


def test_memory_bounds_how_many_run():
    judge = CountingJudge()
    one = share_of(case(2), BUDGET).memory_bytes
    list(swept([case(2, str(i)) for i in range(6)], judge, Budget(cores=64, memory_bytes=3 * one)))
    assert judge.most == 6


def test_a_rank_may_take_twice_its_predicted_peak():
    large = Llama(name="x", n_layers=2, d_model=1024, n_heads=8, d_ff=4096, vocab_size=512, max_seq_len=64)
    weights_bytes = 4 * 2 * (4 * 1024**2 + 3 * 1024 * 4096)
    assert rank_bytes(case(2, model=large)) > RANK_BYTES + 2 * 4 * weights_bytes


def test_what_exceeds_the_budget_is_refused_with_the_way_out():
    judge = CountingJudge()
    (record,) = swept([case(4)], judge, Budget(cores=2, memory_bytes=GiB))
    assert record.outcome == "refused"
    assert "the budget is 1.00 GiB; use --memory" in record.reason
    assert not judge.started


def test_a_sweep_that_is_left_early_closes_its_judge():
    judge = CountingJudge()
    with closing(swept([case(1, str(i)) for i in range(9)], judge, BUDGET)) as fresh:
        next(fresh)
    assert judge.closed
    assert len(judge.started) < 9


def test_a_signal_stops_once_and_what_was_ignored_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stoppable():
            os.kill(os.getpid(), signal.SIGHUP)
            with pytest.raises(Stopped, match="SIGTERM") as stop:
                signal.raise_signal(signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)
        assert stop.value.exit_code == 143
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("part", ["", "1", "0/2", "3/2", "1/0", "a/b", "-1/2", "1/2/3", "²/3"])
def test_parts_that_are_none(part):
    with pytest.raises(InvalidValue, match="use i/n"):
        part_of([], part)


@pytest.mark.parametrize("text", ["", "12", "GiB", "-1GiB", "1.2.3GiB", "12GB", "0B", "1e999TiB"])
def test_sizes_that_are_none(text):
    with pytest.raises(InvalidValue, match="as 12GiB"):
        read_bytes(text)


def test_a_cgroup_bounds_cores_and_memory(tmp_path):
    machine = machine_budget(tmp_path / "none", tmp_path / "none")
    assert machine.cores == len(os.sched_getaffinity(0))
    inside = tmp_path / "outer" / "inner"
    inside.mkdir(parents=True)
    (tmp_path / "membership").write_text("0::/outer/inner\n")
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (inside.parent / "cpu.max").write_text("150000 100000\n")
    (inside / "memory.max").write_text("max\n")
    (inside.parent / "memory.max").write_text("1000000\n")
    (inside.parent / "memory.current").write_text("700000\n")
    (inside.parent / "memory.stat").write_text("anon 500000\ninactive_file 200000\n")
    bounded = machine_budget(tmp_path, tmp_path / "membership")
    assert bounded == Budget(cores=1, memory_bytes=500_000)


@pytest.mark.slow
def test_a_terminal_is_shown_how_far_it_is_and_a_file_is_not(tmp_path):
    command = [sys.executable, "-m", "validate", "sweep", "--only", "llama-small, one rank"]
    quiet = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert quiet.returncode == 0, quiet.stderr
    assert quiet.stderr == ""
    seen, terminal = pty.openpty()
    with os.fdopen(terminal, "w") as ours, open(tmp_path / "out", "w") as out:
        loud = subprocess.Popen(
            command, cwd=ROOT, stdout=out, stderr=ours, env=os.environ | {"TERM": "xterm"}
        )
    shown = b""
    while loud.poll() is None or b"3/3" not in shown:
        try:
            shown += os.read(seen, 65536)
        except OSError:
            break
    os.close(seen)
    assert loud.wait(timeout=60) == 0
    assert b"3/3" in shown
    assert b"a minute" in shown
    assert b"worst peak" in shown
    assert (tmp_path / "out").read_text().count("llama-small") == 3
