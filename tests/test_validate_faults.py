"""Everything that can go wrong at night is made to go wrong: each outcome is told as what it is, the other
cases run all the same, `--resume` finishes the suite with every case once, and nothing is left behind.
"""

import math
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch

from memplan.engines.options import plan_of
from tests.tiny import DEFAULTS, TINY
from validate.cases import Case
from validate.forkserver import End, ForkServer
from validate.launch import ForkServers, Program, Seat, rank_program, run_case
from validate.machine import Budget
from validate.records import merged, open_records, read_records
from validate.sweep import RETRIED, judging, swept
from validate.systems import prepared

pytestmark = pytest.mark.slow

BUDGET = Budget(cores=2, memory_bytes=8 * 2**30)
FAULTY_RANK = 1
ROOT = Path(__file__).parents[1]


def tiny(name: str, timeout_s: float = 60.0, **plan: Any) -> Case:
    settings: dict[str, Any] = {"seq_len": 16, "global_batch": 4, "precision": "fp32", **plan}
    return Case(name=name, model=TINY, plan=plan_of(**settings), timeout_s=timeout_s)


# Faults of a rank, by the name of the case that has them.


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def at_step(number, fault, case, rank, device):
    """A training that meets its fault in the given step."""
    training = prepared(case, rank, device)
    inner = training.gradients
    steps: list[None] = []

    def gradients():
        steps.append(None)
        return fault() if len(steps) == number else inner()

    training.gradients = gradients  # type: ignore[method-assign]
    return training


def in_set_up(fault, case, rank, device):
    return fault()


def before_meeting(seat):
    die()


def after_measuring(seat):
    rank_program(seat)
    die()


def hold_all_memory():
    return torch.ones(2**40)


FAULTS: dict[str, Program] = {
    "killed before rendezvous": before_meeting,
    "killed during set-up": partial(rank_program, prepare=partial(in_set_up, die)),
    "killed in warm-up": partial(rank_program, prepare=partial(at_step, 1, die)),
    "killed in a measured step": partial(rank_program, prepare=partial(at_step, 5, die)),
    "killed after measuring": after_measuring,
    "hangs in a collective": partial(rank_program, prepare=partial(at_step, 4, partial(time.sleep, 600))),
    "exceeds its memory": partial(rank_program, prepare=partial(at_step, 2, hold_all_memory)),
}


def program_with_faults(seat: Seat):
    """What a rank does: its case's fault, if it is the rank to have it."""
    fault = FAULTS.get(seat.case.name) if seat.rank == FAULTY_RANK else None
    return fault(seat) if fault else rank_program(seat)


# What must be so afterwards.


@contextmanager
def nothing_left(monkeypatch, folder):
    """Processes that were started inside have ended, temporary folder and shared memory are as before."""
    mark = uuid4().hex
    shared = set(os.listdir("/dev/shm"))
    folder.mkdir(exist_ok=True)
    with monkeypatch.context() as patched:
        patched.setenv("MEMPLAN_TEST", mark)
        patched.setenv("TMPDIR", str(folder))
        patched.setattr(tempfile, "tempdir", None)
        yield
        deadline_s = time.monotonic() + 10
        while (left := marked(mark)) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert not left, f"processes are left: {left}"
        assert not list(folder.iterdir())
        assert not {name for name in os.listdir("/dev/shm") if name not in shared and not another_s(name)}


def another_s(name):
    """Whether a file in shared memory is of a process that goes on: their names have its number."""
    running = (int(number) for number in re.findall(r"\d+", name) if Path("/proc", number).exists())
    return any(number != os.getpid() for number in running)


def marked(mark):
    """Processes whose environment has a mark, this one excepted."""
    found = {}
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            try:
                if f"MEMPLAN_TEST={mark}".encode() in (process / "environ").read_bytes():
                    found[process.name] = (process / "cmdline").read_text().replace("\0", " ")
            except OSError:
                continue
    return found


def run(cases, file, program=None, retry=False):
    """What `sweep --out FILE --resume` does, with another program for the ranks; the cases that it ran."""
    with open_records(file, resume=True) as records, judging(None, program=program) as judge:
        done = {r.case["name"] for r in merged(records.known) if not (retry and r.outcome in RETRIED)}
        waiting = [case for case in cases if case.name not in done]
        with closing(swept(waiting, judge, BUDGET)) as fresh:
            for record in fresh:
                records.append(record)
    return [case.name for case in waiting]


@pytest.fixture(scope="module")
def night(tmp_path_factory):
    """One sweep over every fault, with a good case before and after."""
    faulty = [tiny(name, timeout_s=6.0 if "hangs" in name else 60.0, dp=2) for name in FAULTS]
    cases = [tiny("good first", dp=2), *faulty, tiny("good last")]
    file = tmp_path_factory.mktemp("night") / "records.jsonl"
    with pytest.MonkeyPatch.context() as patch, nothing_left(patch, file.parent / "tmp"):
        assert run(cases, file, program_with_faults) == [case.name for case in cases]
    return cases, file


@pytest.mark.parametrize("name", [name for name in FAULTS if name.startswith("killed")])
def test_a_killed_rank_is_named_with_its_signal(night, name):
    (record,) = [record for record in read_records(night[1]) if record.case["name"] == name]
    assert record.outcome == "crashed"
    assert record.reason.startswith("rank 1 was killed by SIGKILL")
    assert record.predicted is not None


def test_a_hanging_rank_is_timed_out_and_says_where_it_was(night):
    (record,) = [record for record in read_records(night[1]) if "hangs" in record.case["name"]]
    assert record.outcome == "timed-out"
    assert "rank 1 not done after 6 s" in record.reason
    assert "gradients" in record.reason


def test_a_case_that_exceeds_its_memory_is_out_of_memory(night):
    (record,) = [record for record in read_records(night[1]) if "memory" in record.case["name"]]
    assert record.outcome == "out-of-memory"
    assert record.reason.startswith("rank 1: ")
    assert "allocate memory" in record.reason


def test_the_other_cases_run_and_every_case_has_one_row(night):
    cases, file = night
    records = read_records(file)
    assert sorted(record.case["name"] for record in records) == sorted(case.name for case in cases)
    assert {r.case["name"] for r in records if r.confirmed} == {"good first", "good last"}


def test_resume_runs_nothing_that_is_done_and_retry_only_what_failed(night, tmp_path, monkeypatch):
    cases, original = night
    file = tmp_path / "records.jsonl"
    file.write_bytes(original.read_bytes())
    with nothing_left(monkeypatch, tmp_path / "tmp"):
        assert run(cases, file) == []
        assert file.read_bytes() == original.read_bytes()
        assert run(cases, file, retry=True) == list(FAULTS)
    assert all(record.confirmed for record in merged(read_records(file)))


def test_memory_beyond_a_case_s_share_is_refused_before_the_machine_suffers(monkeypatch, tmp_path):
    with nothing_left(monkeypatch, tmp_path / "tmp"), ForkServers() as servers:
        program = partial(rank_program, prepare=partial(at_step, 1, partial(torch.ones, 2**28)))
        ended = run_case(tiny("a gibibyte too much"), program=program, servers=servers, memory_bytes=2**29)
    assert ended.outcome == "out-of-memory"


def test_a_lost_fork_server_costs_one_case_and_is_replaced(monkeypatch, tmp_path):
    with nothing_left(monkeypatch, tmp_path / "tmp"), ForkServers() as servers:
        program = partial(rank_program, prepare=partial(in_set_up, kill_parent))
        lost = run_case(tiny("its server dies"), program=program, servers=servers)
        found = run_case(tiny("the next one"), servers=servers)
    assert lost.outcome == "crashed"
    assert "fork server" in lost.reason
    assert found.outcome == "ok"


@pytest.fixture
def server():
    """A fork server that has forked once, and the number of its process."""
    with closing(ForkServer(())) as server:
        yield server, server.fork(os.getppid).end().value


def test_a_server_that_dies_with_a_request_unread_is_replaced(server):
    server, pid = server
    os.kill(pid, signal.SIGSTOP)  # what is sent is taken, and never read
    killer = threading.Timer(0.2, os.kill, (pid, signal.SIGKILL))
    killer.start()
    assert server.fork(math.sqrt, 4.0).end() == End(value=2.0, exit_code=0)
    killer.join()


def test_a_server_that_has_closed_its_socket_and_not_yet_ended_is_replaced(server, monkeypatch):
    server, pid = server
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    monkeypatch.setattr(subprocess.Popen, "poll", lambda self: None)  # as in the moment before it has ended
    assert server.fork(math.sqrt, 4.0).end() == End(value=2.0, exit_code=0)


def test_a_server_that_cannot_be_kept_alive_is_an_error():
    with closing(ForkServer(("no_such_module",))) as server, pytest.raises(ChildProcessError):
        server.fork(math.sqrt, 4.0)


def test_what_a_process_is_given_may_be_of_any_size(server):
    server, pid = server
    assert server.fork(len, "x" * 2**20).end().value == 2**20
    assert server.fork(os.getppid).end().value == pid


def kill_parent():
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)


# Faults of the whole sweep, by the command line.

SUITE = f"""{DEFAULTS}
[[case]]
dp = 2
zero = [0, 1, 2, 3]
optimizer = ["sgd", "adamw"]
"""
N_CASES = 8


class Sweep:
    """A sweep of eight cases in a process and a session of its own, as a terminal would start it."""

    def __init__(self, folder, *options, file=None, limit_bytes=None):
        self.folder = folder
        self.file = file or folder / "records.jsonl"
        suite = folder / "suite.toml"
        suite.write_text(SUITE)
        command = ["sweep", "--suite", str(suite), "--out", str(self.file), *options]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "validate", *command],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=partial(limit_file_size, limit_bytes) if limit_bytes else None,
        )

    def wait_for_rows(self, n):
        deadline_s = time.monotonic() + 120
        while time.monotonic() < deadline_s and self.process.poll() is None:
            if self.file.exists() and self.file.read_bytes().count(b'{"case"') >= n:
                return
            time.sleep(0.02)
        pytest.fail(f"no {n} rows: {self.process.communicate()[0]}")

    def signal_all(self, number):
        os.killpg(self.process.pid, number)

    def ended(self):
        """Exit code and output."""
        output, _ = self.process.communicate(timeout=120)
        return self.process.returncode, output


def limit_file_size(n_bytes):
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, n_bytes))


def assert_resume_finishes(folder, file=None):
    before = len(read_records(file or folder / "records.jsonl"))
    sweep = Sweep(folder, "--resume", file=file)
    code, output = sweep.ended()
    assert code == 0, output
    records = read_records(sweep.file)
    assert len(records) == len({record.case["name"] for record in records}) == N_CASES
    assert all(record.confirmed for record in records)
    assert before <= N_CASES


def test_ctrl_c_twice_stops_tidily(monkeypatch, tmp_path):
    with nothing_left(monkeypatch, tmp_path / "tmp"):
        sweep = Sweep(tmp_path)
        sweep.wait_for_rows(1)
        sweep.signal_all(signal.SIGINT)
        time.sleep(0.02)
        sweep.signal_all(signal.SIGINT)
        code, output = sweep.ended()
        assert code == 128 + signal.SIGINT
        assert "stopped by SIGINT" in output
        assert "--resume" in output
        assert "Traceback" not in output
    assert 1 <= len(read_records(sweep.file)) < N_CASES
    assert all(record.outcome == "ok" for record in read_records(sweep.file))
    assert_resume_finishes(tmp_path)


def test_ctrl_c_while_modules_load_ends_without_a_traceback(tmp_path):
    (tmp_path / "torch.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)"
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    ended = subprocess.run(
        [sys.executable, "-m", "validate", "sweep", "--list"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, "", "")


def test_a_killed_harness_takes_its_ranks_along_and_a_torn_line_is_made_good(monkeypatch, tmp_path):
    with nothing_left(monkeypatch, tmp_path / "tmp"):
        sweep = Sweep(tmp_path)
        sweep.wait_for_rows(2)
        sweep.process.kill()
        assert sweep.ended()[0] == -signal.SIGKILL
    whole = sweep.file.read_bytes()
    assert whole.endswith(b"\n")
    sweep.file.write_bytes(whole[:-100])
    assert_resume_finishes(tmp_path)


def test_a_second_sweep_is_refused_the_file_and_a_finished_one_is_not_overwritten(monkeypatch, tmp_path):
    file = tmp_path / "records.jsonl"
    with nothing_left(monkeypatch, tmp_path / "tmp"):
        with open_records(file, resume=False):
            code, output = Sweep(tmp_path, "--resume").ended()
        assert code == 2
        assert "another sweep is adding to" in output
        assert_resume_finishes(tmp_path)
        whole = file.read_bytes()
        code, output = Sweep(tmp_path).ended()
        assert code == 2
        assert "use --resume" in output
        assert file.read_bytes() == whole


def test_a_full_disk_loses_nothing(monkeypatch, tmp_path):
    with nothing_left(monkeypatch, tmp_path / "tmp"), small_disk(tmp_path / "disk") as (file, limit_bytes):
        sweep = Sweep(tmp_path, file=file, limit_bytes=limit_bytes)
        code, output = sweep.ended()
        assert code == 2
        assert "cannot be written" in output
        assert "--resume" in output
        content = file.read_bytes()
        assert content.endswith(b"\n")
        assert 1 <= len(read_records(file)) < N_CASES
        copy = tmp_path / "records.jsonl"
        copy.write_bytes(content)
    assert_resume_finishes(tmp_path)


@contextmanager
def small_disk(folder):
    """A file on a disk of 8 KiB; where none can be mounted, a limit to the size of any file instead."""
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8k", "none", folder], capture_output=True)
    try:
        yield folder / "records.jsonl", 5000 if mounted.returncode else None
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", folder], check=True)
