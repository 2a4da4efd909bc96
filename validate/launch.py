"""Each case in fresh processes: started, watched, ended; or on the ranks that torchrun or Slurm started."""

import json
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final, cast

import torch
import torch.distributed as dist

from memplan.errors import PlanRefused
from validate.cases import Case
from validate.measure import Prepare, RankMeasurement, measured_rank, prepared
from validate.records import Outcome

PRELOADED: Final = [
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch.optim",
    "torch.profiler",
    "validate.measure",
]
"""What the fork server imports once for all ranks."""

SPOKEN_CHARACTERS: Final = 4000
"""How much of what a failed rank printed is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a case ended: `ok` with every rank's measurement, or another outcome with the reason."""

    outcome: Outcome
    ranks: tuple[RankMeasurement, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rank:
    rank: int
    process: BaseProcess
    spoken: Path
    """The file its output goes to."""


@dataclass(frozen=True, slots=True)
class _Order:
    """What a rank is told: `port` of the loopback store, `spoken` the file for its output."""

    case: Case
    rank: int
    port: int
    spoken: Path
    keep_events: bool
    prepare: Prepare


def fork_server() -> ForkServerContext:
    """Processes forked from a server that has torch imported, but has used nothing of it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def run_case(case: Case, *, keep_events: bool = False, prepare: Prepare = prepared) -> Ended:
    """Runs a case on new processes of its own on this machine, one per rank, on CPU with gloo.

    A rank that fails, or the case's time-out, ends all ranks; none is left when this returns.
    `prepare` is for tests that wire a training wrongly.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks: dict[Connection, _Rank] = {}
    with tempfile.TemporaryDirectory(prefix="memplan-") as folder:
        try:
            for rank in range(case.plan.world_size):
                ranks.update(
                    [_started(_Order(case, rank, store.port, Path(folder) / str(rank), keep_events, prepare))]
                )
            return _watched(case, ranks)
        finally:
            for connection, started in ranks.items():
                started.process.kill()
                started.process.join()
                connection.close()


def _started(order: _Order) -> tuple[Connection, _Rank]:
    context = fork_server()
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_rank_main, args=(order, theirs), daemon=True)
    process.start()
    theirs.close()
    return ours, _Rank(rank=order.rank, process=process, spoken=order.spoken)


def _watched(case: Case, ranks: Mapping[Connection, _Rank]) -> Ended:
    deadline = time.monotonic() + case.timeout_s
    waiting = dict(ranks)
    measured: list[RankMeasurement] = []
    while waiting:
        ready = cast(list[Connection], wait(list(waiting), timeout=max(0.0, deadline - time.monotonic())))
        if not ready:
            late = ", ".join(str(started.rank) for started in waiting.values())
            return Ended(outcome="timed-out", reason=f"rank {late} not done after {case.timeout_s:g} s")
        for connection in ready:
            answer = _answer(connection, waiting.pop(connection))
            if isinstance(answer, Ended):
                return answer
            measured.append(answer)
    return Ended(outcome="ok", ranks=tuple(sorted(measured, key=lambda m: m.rank)))


def _answer(connection: Connection, started: _Rank) -> RankMeasurement | Ended:
    try:
        return cast(RankMeasurement | Ended, connection.recv())
    except EOFError:
        started.process.join()
    code = started.process.exitcode
    spoken = (
        started.spoken.read_text(errors="replace")[-SPOKEN_CHARACTERS:] if started.spoken.exists() else ""
    )
    return Ended(
        outcome="out-of-memory" if code == -9 else "crashed",
        reason=f"rank {started.rank} died with exit code {code}\n{spoken}".strip(),
    )


def _rank_main(order: _Order, answer: Connection) -> None:
    with order.spoken.open("w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    try:
        with _loopback_group(order.rank, order.case, order.port):
            measured = measured_rank(
                order.case,
                order.rank,
                torch.device("cpu"),
                keep_events=order.keep_events,
                prepare=order.prepare,
            )
            answer.send(measured)
    except Exception as error:
        answer.send(_failed(order.rank, error))


def _failed(rank: int, error: Exception) -> Ended:
    if isinstance(error, PlanRefused):
        return Ended(outcome="refused", reason=str(error))
    text = "".join(traceback.format_exception(error))
    out_of_memory = isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in text
    return Ended(outcome="out-of-memory" if out_of_memory else "crashed", reason=f"rank {rank}: {text}")


@contextmanager
def _loopback_group(rank: int, case: Case, port: int) -> Iterator[None]:
    """The group of all ranks over the loopback interface; none for a single rank."""
    if case.plan.world_size == 1:
        yield
        return
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    patience = timedelta(seconds=case.timeout_s)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=patience)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=case.plan.world_size, timeout=patience)
    yield
    dist.barrier()
    dist.destroy_process_group()


def ranks_given(environment: Mapping[str, str]) -> bool:
    """Whether torchrun, or srun with the same variables, started this process as one of the ranks."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= environment.keys()


def run_given_ranks(case: Case, environment: Mapping[str, str]) -> Ended | None:
    """Runs a case on the ranks that a launcher started; the result on rank 0, None on the others.

    Raises:
        PlanRefused: if the plan's ranks are not as many as were started.
    """
    rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    if world_size != case.plan.world_size:
        raise PlanRefused(
            f"pp x dp x tp = {case.plan.world_size} ranks, but the launcher started {world_size}; "
            f"use as many as were started, or start {case.plan.world_size}."
        )
    device = _device(int(environment.get("LOCAL_RANK", environment.get("SLURM_LOCALID", "0"))))
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", timeout=timedelta(seconds=case.timeout_s)
    )
    try:
        mine = measured_rank(case, rank, device)
        gathered: list[RankMeasurement | None] | None = [None] * world_size if rank == 0 else None
        dist.gather_object(mine, gathered)
    finally:
        dist.destroy_process_group()
    return Ended(outcome="ok", ranks=tuple(filter(None, gathered))) if gathered else None


def _device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def dump_events(ended: Ended, folder: Path) -> list[Path]:
    """Writes each rank's allocation events of the steady step as JSON lines; the files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for measured in ended.ranks:
        file = folder / f"rank{measured.rank}.jsonl"
        file.write_text("".join(json.dumps(asdict(event)) + "\n" for event in measured.memory.events))
        files.append(file)
    return files
