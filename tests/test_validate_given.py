"""Ranks that torchrun or Slurm started: two launchers on the loopback interface stand for two machines."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from memplan.engines.options import plan_of
from memplan.errors import InvalidValue
from tests.tiny import DEFAULTS, TINY
from validate.cases import Case
from validate.given import Given, GivenRanks, given_ranks
from validate.launch import rank_program, run_case
from validate.records import merged, read_records
from validate.sweep import part_of

ROOT = Path(__file__).parents[1]
SUITE = f"""{DEFAULTS}
[[case]]
dp = [1, 2, 4]
"""
SLURM = {
    "SLURM_JOB_ID": "41",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}
TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}


def tiny(name="tiny", timeout_s=60.0, **plan):
    return Case(
        name=name, model=TINY, plan=plan_of(seq_len=16, precision="fp32", **plan), timeout_s=timeout_s
    )


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def test_ranks_are_told_by_torchrun_or_srun_and_not_by_a_batch_script():
    assert given_ranks({}) is None
    assert given_ranks({key: SLURM[key] for key in ("SLURM_JOB_ID", "SLURM_PROCID")}) is None
    torchrun = Given(rank=1, world_size=2, local_rank=1, host="10.0.0.1", port=29500, hosts=True)
    assert given_ranks(TORCHRUN) == torchrun
    assert given_ranks(TORCHRUN | SLURM) == torchrun
    agent = given_ranks(
        TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "3"}
    )
    assert (agent.hosts, agent.attempt) == (False, "3")
    slurm = given_ranks(SLURM)
    assert slurm == Given(rank=3, world_size=4, local_rank=1, host="gpu07", port=20243, hosts=True)
    assert given_ranks(SLURM | {"MASTER_ADDR": "head", "MASTER_PORT": "5"}).host == "head"


def test_parts_cover_a_suite_once():
    parts = [part_of(range(10), f"{i}/3") for i in (1, 2, 3)]
    assert sorted(case for part in parts for case in part) == list(range(10))


def dying_on_rank_1(seat):
    if seat.case.name == "rank 1 dies" and seat.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return rank_program(seat)


def test_a_rank_that_dies_takes_its_case_along_but_not_the_given_ranks():
    given = [
        Given(rank=rank, world_size=2, local_rank=rank, host="127.0.0.1", port=free_port(), hosts=True)
        for rank in (0, 1)
    ]
    given[1] = Given(rank=1, world_size=2, local_rank=1, host="127.0.0.1", port=given[0].port, hosts=True)
    other = threading.Thread(target=lambda: GivenRanks(given[1], program=dying_on_rank_1).serve())
    other.start()
    with GivenRanks(given[0], program=dying_on_rank_1) as ranks:
        died = ranks.run(tiny("rank 1 dies", dp=2))
        larger = ranks.run(tiny(dp=4))
        good = ranks.run(tiny(dp=2))
        alone = ranks.run(tiny())
    other.join(timeout=30)
    assert not other.is_alive()
    assert (died.outcome, good.outcome, alone.outcome) == ("crashed", "ok", "ok")
    assert "rank 1 was killed by SIGKILL" in died.reason
    assert larger.outcome == "refused"
    assert "4 ranks, but the launcher started 2; start 4" in larger.reason
    assert good.ranks[0].memory == run_case(tiny(dp=2)).ranks[0].memory


@pytest.mark.slow
def test_two_torchruns_sweep_one_suite_and_each_case_has_one_record(tmp_path):
    suite, out = tmp_path / "suite.toml", tmp_path / "records.jsonl"
    suite.write_text(SUITE)
    command = ["validate", "sweep", "--suite", str(suite), "--out", str(out)]
    outputs = two_torchruns(command)
    records = read_records(out)
    assert [record.outcome for record in records] == ["ok", "ok", "refused"], outputs
    assert all(record.confirmed for record in records[:2])
    assert "started 2; start 4" in records[2].reason
    assert sorted(map(bool, outputs)) == [False, True]
    two_torchruns([*command, "--resume"])
    assert read_records(out) == records


@pytest.mark.slow
def test_two_torchruns_run_one_plan():
    outputs = two_torchruns(["validate", "run", "--zero", "3", "--json"])
    (record,) = [json.loads(output) for output in outputs if output]
    assert record["outcome"] == "ok"
    assert record["collectives_off"] == 0
    assert record["case"]["plan"]["dp"] == 2


def test_the_other_axes_leave_the_data_parallel_ranks_of_a_launcher():
    given = given_ranks({"RANK": "0", "WORLD_SIZE": "8", "MASTER_ADDR": "here"})
    assert given.dp_left({"pp": 2, "tp": 2, "dp_replicate": 1}) == 2
    with pytest.raises(InvalidValue, match="3 ranks do not divide the 8 that the launcher started; start 9"):
        given.dp_left({"pp": 1, "tp": 3, "dp_replicate": 1})


@pytest.mark.slow
def test_srun_s_ranks_sweep_as_torchrun_s_do(tmp_path):
    suite, out = tmp_path / "suite.toml", tmp_path / "records.jsonl"
    suite.write_text(SUITE)
    command = [sys.executable, "-m", "validate", "sweep", "--suite", str(suite), "--out", str(out)]
    step = SLURM | {
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "MASTER_PORT": str(free_port()),
    }
    ended_well([popen(command, step | {"SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)}) for i in (0, 1)])
    assert [record.outcome for record in read_records(out)] == ["ok", "ok", "refused"]


@pytest.mark.slow
def test_parts_on_two_machines_are_reported_as_one(tmp_path):
    suite = tmp_path / "suite.toml"
    suite.write_text(SUITE.replace("[1, 2, 4]", "[1, 2]"))
    files = [tmp_path / f"part{i}.jsonl" for i in (1, 2)]
    ended_well(
        [
            popen(
                [
                    sys.executable,
                    "-m",
                    "validate",
                    "sweep",
                    "--suite",
                    str(suite),
                    "--part",
                    f"{i}/2",
                    "--out",
                    str(f),
                ]
            )
            for i, f in enumerate(files, start=1)
        ]
    )
    assert [len(read_records(file)) for file in files] == [1, 1]
    (report,) = ended_well([popen([sys.executable, "-m", "validate", "report", *map(str, files), "--json"])])
    merged_file = tmp_path / "merged.jsonl"
    merged_file.write_text(report)
    assert [record.case["plan"]["dp"] for record in read_records(merged_file)] == [1, 2]
    assert len(merged(record for file in [*files, *files] for record in read_records(file))) == 2


def two_torchruns(module):
    """What both launchers print."""
    port = free_port()
    launcher = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", str(port), "-m"),
    ]
    return ended_well([popen([*launcher, *module]) for _ in range(2)])


def popen(command, variables=None):
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | (variables or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended_well(processes):
    ends = [process.communicate(timeout=180) for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), ends
    return [output for output, _ in ends]
