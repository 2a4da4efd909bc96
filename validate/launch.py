"""Each case in fresh processes: started, watched, ended."""

import json
import multiprocessing
import os
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

import torch
import torch.distributed as dist

from validate.cases import Case
from validate.measure import RankMeasurement, measured_rank

PRELOADED = [
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a case ended: `ok` with every rank's measurement, or another outcome with the reason."""

    outcome: str
    ranks: tuple[RankMeasurement, ...] = ()
    reason: str = ""


def fork_server() -> ForkServerContext:
    """Processes forked from a server that has torch imported, but has used nothing of it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def run_case(case: Case, *, keep_events: bool = False) -> Ended:
    """Runs a case on its own new processes on this machine, one per rank, on CPU with gloo.

    A rank that fails, or the case's time-out, ends all ranks; none is left when this returns.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = fork_server()
    ranks: dict[Connection, tuple[int, ForkServerProcess]] = {}
    for rank in range(case.plan.world_size):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_rank_main, args=(case, rank, store.port, theirs, keep_events))
        process.start()
        theirs.close()
        ranks[ours] = rank, process
    try:
        return _watched(case, ranks)
    finally:
        for connection, (_, process) in ranks.items():
            process.kill()
            process.join()
            connection.close()


def _watched(case: Case, ranks: dict[Connection, tuple[int, ForkServerProcess]]) -> Ended:
    deadline = time.monotonic() + case.timeout_s
    waiting = dict(ranks)
    measured: list[RankMeasurement] = []
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            late = ", ".join(str(rank) for rank, _ in waiting.values())
            return Ended(outcome="timed-out", reason=f"ranks {late} were not done after {case.timeout_s:g} s")
        for connection in ready:
            rank, process = waiting.pop(connection)  # type: ignore[arg-type]
            answer = _answer(connection, process)  # type: ignore[arg-type]
            if not isinstance(answer, RankMeasurement):
                return Ended(outcome="crashed", reason=f"rank {rank}: {answer}")
            measured.append(answer)
    return Ended(outcome="ok", ranks=tuple(sorted(measured, key=lambda m: m.rank)))


def _answer(connection: Connection, process: ForkServerProcess) -> RankMeasurement | str:
    try:
        return connection.recv()  # type: ignore[no-any-return]
    except EOFError:
        process.join()
        return f"died with exit code {process.exitcode}"


def _rank_main(case: Case, rank: int, port: int, answer: Connection, keep_events: bool) -> None:
    try:
        with process_group(rank, case.plan.world_size, port, case.timeout_s):
            answer.send(measured_rank(case, rank, torch.device("cpu"), keep_events=keep_events))
    except BaseException:
        answer.send(traceback.format_exc())


@contextmanager
def process_group(rank: int, world_size: int, port: int, timeout_s: float) -> Iterator[None]:
    """The group of all ranks over the loopback interface; none for a single rank."""
    if world_size == 1:
        yield
        return
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=timeout_s))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def dump_events(ended: Ended, folder: Path) -> list[Path]:
    """Writes each rank's allocation events of the steady step as JSON lines; the files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for measured in ended.ranks:
        file = folder / f"rank{measured.rank}.jsonl"
        file.write_text("".join(json.dumps(asdict(event)) + "\n" for event in measured.memory.events))
        files.append(file)
    return files
