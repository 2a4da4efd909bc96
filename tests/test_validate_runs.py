"""Real ranks: what is measured is so, and what goes wrong is said."""

import gc
import json
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch.nn.parallel import DistributedDataParallel

from memplan import Llama
from memplan.engines.options import plan_of
from validate.__main__ import main
from validate.cases import Case
from validate.collectives import Collective
from validate.judge import References, judged, step_losses
from validate.launch import Ended, rank_program, run_case
from validate.systems import prepared

TINY = Llama(name="tiny", n_layers=2, d_model=32, n_heads=2, d_ff=64, vocab_size=128, max_seq_len=32)


def tiny(timeout_s=60.0, **plan):
    settings: dict[str, Any] = {"seq_len": 16, "global_batch": 4, "precision": "fp32", **plan}
    return Case(name="tiny", model=TINY, plan=plan_of(**settings), timeout_s=timeout_s)


def without_reduction(case, rank, device):
    """DDP whose gradients are never averaged."""
    training = prepared(case, rank, device)
    replica = next(m for m in gc.get_objects() if isinstance(m, DistributedDataParallel))
    replica.require_backward_grad_sync = False
    return training


def scaled(case, rank, device):
    """Gradients summed over micro-batches where their mean belongs: Adam would not show it in the losses."""
    training = prepared(case, rank, device)
    for weight in training.weights():
        weight.register_hook(lambda grad: grad * case.plan.n_micro_batches)
    return training


def listening():
    """Address, port and inode of every TCP socket that listens on this machine, as the kernel writes them."""
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                yield *fields[1].split(":"), fields[9]


def on_loopback_only(seat):
    """A rank that fails if it, or the store where the ranks meet, listens to other machines."""

    def checked(case, rank, device):
        training = prepared(case, rank, device)
        files = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
        ours = {file.stat().st_ino for file in files if file.exists()}
        found = [(address, int(port, 16)) for address, port, inode in listening()
                 if int(inode) in ours or int(port, 16) == seat.port]  # fmt: skip
        if len(found) < 2 or any(address != "0100007F" for address, _ in found):
            raise ValueError(f"listens on {found}")
        return training

    return rank_program(seat, prepare=checked)


def failing(case, rank, device):
    if rank == 1:
        raise ValueError("a fault of rank 1")
    return prepared(case, rank, device)


def dying(case, rank, device):
    if rank == 1:
        os.write(2, b"last words")
        os._exit(3)
    return prepared(case, rank, device)


def hanging(case, rank, device):
    time.sleep(600)


def out_of_memory(case, rank, device):
    torch.empty(2**60, dtype=torch.int8)


@pytest.fixture(scope="module")
def references():
    return References()


def test_ddp_is_measured(references):
    ended = run_case(tiny(dp=2))
    assert ended.outcome == "ok", ended.reason
    n_bytes = 4 * (2 * 128 * 32 + 2 * (4 * 32 * 32 + 3 * 32 * 64 + 2 * 32) + 32)
    for rank in ended.ranks:
        assert rank.states.weights_bytes == rank.states.grads_bytes == n_bytes
        assert rank.states.optimizer_bytes == 2 * n_bytes + 4 * 21
        reduced = [c for c in rank.collectives if c.kind == "all_reduce"]
        assert reduced == [Collective(kind="all_reduce", axis="dp", calls=1, payload_bytes=n_bytes)]
        assert sum(rank.memory.peak_by_kind.values()) == rank.memory.peak_bytes
    assert step_losses(ended.ranks) == pytest.approx(step_losses(references.of(tiny(dp=2)).ranks), rel=1e-5)


def test_at_rest_a_single_rank_holds_its_states_its_tokens_and_its_rotation():
    (rank,) = run_case(tiny()).ranks
    tokens_bytes, rotation_bytes = 2 * 4 * 16 * 8, 16 * 8 * 8
    held = rank.states.weights_bytes + rank.states.optimizer_bytes
    assert rank.memory.rest_bytes == held + tokens_bytes + rotation_bytes


def test_gradients_that_are_not_averaged_are_a_wrong_loss(references):
    case = tiny(dp=2)
    record = judged(
        case, references, ended=run_case(case, program=partial(rank_program, prepare=without_reduction))
    )
    assert record.outcome == "wrong-loss"


def test_a_gradient_of_the_wrong_scale_is_a_wrong_loss_under_adam_too(references):
    case = tiny(optimizer="adam")
    record = judged(case, references, ended=run_case(case, program=partial(rank_program, prepare=scaled)))
    assert record.outcome == "wrong-loss"
    assert "gradient" in record.reason


def test_ranks_listen_on_the_loopback_interface_only():
    ended = run_case(tiny(dp=2), program=on_loopback_only)
    assert ended.outcome == "ok", ended.reason


@pytest.mark.parametrize(
    "prepare, outcome, said",
    [
        (failing, "crashed", "ValueError: a fault of rank 1"),
        (dying, "crashed", "rank 1 died with exit code 3\nlast words"),
        (hanging, "timed-out", "rank 1 not done after 3 s"),
        (out_of_memory, "out-of-memory", "can't allocate memory"),
    ],
)
def test_what_goes_wrong_is_said_and_no_process_is_left(prepare, outcome, said):
    case = tiny(dp=2, timeout_s=3.0 if prepare is hanging else 60.0)
    ended = run_case(case, program=partial(rank_program, prepare=prepare))
    assert ended.outcome == outcome
    assert said in ended.reason


def test_a_crash_has_no_verdict(references):
    record = judged(tiny(), references, ended=Ended(outcome="crashed", reason="so"))
    assert (record.outcome, record.peak_error, record.loss_error) == ("crashed", None, None)


def test_run_prints_one_object(tmp_path):
    events = tmp_path / "events"
    arguments = ["run", "--dp", "2", "--zero", "3", "--json", "--events", str(events)]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    record = json.loads(result.output)
    assert record["outcome"] == "ok"
    assert {"case", "predicted", "measured", "peak_error", "states_off_bytes", "collectives_off"} <= set(
        record
    )
    first = json.loads((events / "rank0.jsonl").read_text().splitlines()[0])
    assert {"n_bytes", "pointer", "total_bytes", "path"} <= set(first)


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["run", "--tp", "3"], "tp=3"),
        (["run", "--zero", "4"], "zero=4"),
        (["run", "--dp", "-1"], "dp=-1"),
        (["run", "--model", "lama-2-7b"], "did you mean"),
        (["sweep", "--suite", "qick"], "did you mean 'quick'"),
    ],
)
def test_bad_input_is_refused_in_one_line(arguments, said):
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert said in result.output
    assert "Traceback" not in result.output


def test_an_engine_that_nothing_runs_is_refused():
    ended = run_case(tiny(engine="textbook"))
    assert ended.outcome == "refused"
    others = "'torch' or 'deepspeed' or 'fairscale' or 'colossalai'"
    assert ended.reason == f"engine='textbook' cannot be run; use {others}."
