"""Each case in fresh processes on this machine: started, watched, ended."""

import atexit
import faulthandler
import json
import math
import os
import re
import resource
import signal
import socket
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache, partial
from ipaddress import ip_address
from pathlib import Path
from threading import Lock
from typing import Final, Self, cast

import torch
import torch.distributed as dist

from memplan.errors import MemplanError, PlanRefused
from memplan.hardware import gpu
from memplan.units import KiB
from validate.attribution import comparison
from validate.cases import Case, RunsOn, option
from validate.fake import without_data
from validate.forkserver import SAID_BYTES, End, Forked, ForkServer, ended
from validate.measure import NewProfile, Prepare, RankMeasurement, measured_rank, settled
from validate.memory import MemoryProfile
from validate.nogpu import RecordStream, environment_for, parts_told
from validate.records import Outcome
from validate.standin import stand_in, unanimous
from validate.systems import prepared
from validate.tracebacks import without_folders

PRELOADED: Final = (
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch.optim",
    "torch.profiler",
    "validate.launch",
    "validate.systems.torch",
)
"""What the fork server imports once for all ranks."""

LAST_WORDS_S: Final = 1.0
"""Seconds that the other ranks have after a failure or the time-out to report it."""

STACK_CHARACTERS: Final = 1000
"""Characters kept of a rank's stack at the time-out."""

POLL_S: Final = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Seconds until the last rank was set up, of all steps, of all cores; bytes of the largest process."""

    setup_s: float
    steps_s: float
    cpu_s: float
    rss_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The end of a case: `ok` with every rank's measurement, or another outcome with the reason."""

    outcome: Outcome
    ranks: tuple[RankMeasurement, ...] = ()
    reason: str = ""
    cost: Cost | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """The arguments of a rank: its case, its rank, and the store for the rendezvous.

    `prefix` keeps cases apart that share a store. The rank may allocate `memory_bytes` of the host beyond
    what it starts with; None: no limit. On a GPU its allocations of a step are written to `snapshot`.
    """

    case: Case
    rank: int
    host: str
    port: int
    prefix: str = ""
    device: str = "cpu"
    memory_bytes: int | None = None
    snapshot: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A rank's answer when all went well; times by the machine's clock."""

    measurement: RankMeasurement
    started_at_s: float
    cpu_s: float
    rss_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a rank has no measurement, and since when; `follows`: because another rank failed."""

    rank: int
    outcome: Outcome
    reason: str
    at_s: float
    follows: bool = False


Answer = Measured | Failure

Program = Callable[[Seat], RankMeasurement]
"""The function that a rank runs."""


def rank_program(seat: Seat, *, keep_events: bool = False, prepare: Prepare = prepared) -> RankMeasurement:
    """Meets the other ranks, trains, measures."""
    device = torch.device(seat.device)
    if device.type == "cuda":
        take_gpu(device, seat.case)
    with (
        parts_told() if seat.case.device == "nogpu" else nullcontext(),
        process_group(seat),
        profiling(seat.case, paths=keep_events) as profile,
        nullcontext() if seat.case.computes else unanimous(),
    ):
        measured = measured_rank(
            seat.case, seat.rank, device, profile=profile, snapshot=seat.snapshot, prepare=prepare
        )
    check_limit(measured.memory.peak_bytes, seat.case.limit_bytes)
    return attributed(seat.case, measured, keep_events=keep_events)


@contextmanager
def profiling(case: Case, *, paths: bool) -> Iterator[NewProfile]:
    """How allocations on CPU are seen: the allocator's, or the storages of tensors without data."""
    if case.tensors == "real":
        yield partial(MemoryProfile, paths=paths)
        return
    with without_data(paths=paths) as lifetimes:
        yield lifetimes.profile


def take_gpu(device: torch.device, case: Case) -> None:
    """Makes a GPU this process's own, with the settings and within the limit of the case's allocator.

    Raises:
        RuntimeError: in a process forked from one that has used CUDA, where nothing on a GPU would work.
    """
    if torch.cuda._is_in_bad_fork():
        raise RuntimeError("the fork server has used CUDA, which does not survive a fork")
    torch.cuda.set_device(device)
    if conf := option(case.plan, "alloc_conf", ""):
        torch.cuda.memory._set_allocator_settings(conf)
    if case.limit_bytes is not None:
        total_bytes = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, case.limit_bytes / total_bytes), device)


def check_limit(peak_bytes: int, limit_bytes: int | None) -> None:
    """Raises `MemoryError` for a peak beyond the limit, which CPU's allocator does not keep to."""
    if limit_bytes is not None and peak_bytes > limit_bytes:
        raise MemoryError(f"a peak of {peak_bytes:,} bytes is beyond the limit of {limit_bytes:,} bytes")


def attributed(case: Case, measured: RankMeasurement, *, keep_events: bool = False) -> RankMeasurement:
    """The measurement with the attributed fraction of its peak, where its events are known."""
    memory = measured.memory
    fraction = None
    if memory.events:
        with suppress(MemplanError, ModuleNotFoundError):  # rapidfuzz may not be there
            fraction = comparison(case, measured).attribution().fraction
    if not keep_events:
        memory = replace(memory, events=(), held=())
    return replace(measured, memory=memory, attributed_fraction=fraction)


class ForkServers:
    """A fork server for each device that cases run on; for a GPU that is not there, one with its stand-in."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._servers: dict[tuple[RunsOn, str, RecordStream], ForkServer] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def of(self, case: Case) -> ForkServer:
        """The server that a case's ranks are forked from.

        Raises:
            MemplanError: if the case's GPU is not there and cannot be played here.
        """
        played = case.device == "nogpu"
        key: tuple[RunsOn, str, RecordStream] = ("cpu", "", "early")
        if played:
            key = ("nogpu", case.gpu, case.record_stream)
        with self._lock:
            if key not in self._servers:
                environment = environment_for(gpu(case.gpu), case.record_stream) if played else {}
                self._servers[key] = ForkServer(PRELOADED, environment)
            return self._servers[key]

    def close(self) -> None:
        """Ends the servers and all that they forked."""
        with self._lock:
            for server in self._servers.values():
                server.close()


@cache
def shared_servers() -> ForkServers:
    """The fork servers for all cases of this process; they have ended when this process does."""
    servers = ForkServers()
    atexit.register(servers.close)
    return servers


def run_case(
    case: Case,
    *,
    keep_events: bool = False,
    program: Program | None = None,
    servers: ForkServers | None = None,
    memory_bytes: int | None = None,
    snapshots: Path | None = None,
) -> Ended:
    """Runs a case on new processes of its own on this machine, one per rank.

    A rank that fails, or the case's time-out, ends all ranks; none is left when this returns. Each rank may
    take `memory_bytes` beyond what it starts with. `program`: another one than `rank_program`. On a GPU the
    allocations of a step are written to the folder `snapshots`, a file for each rank.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    host, port = listener.getsockname()
    store = dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    seats = [
        Seat(
            case=case,
            rank=rank,
            host=host,
            port=port,
            device=device_for(case, rank),
            memory_bytes=memory_bytes,
            snapshot=None if snapshots is None else snapshot_file(snapshots, case, rank),
        )
        for rank in case.ranks
    ]
    program = program or partial(rank_program, keep_events=keep_events)
    try:
        return concluded(
            answers(started(seats, program, (servers or shared_servers()).of(case)), case.timeout_s)
        )
    finally:
        del store


def device_for(case: Case, local_rank: int) -> str:
    """The device of a machine's `local_rank`: GPUs take turns; a played one is each process's own."""
    if case.device == "cpu":
        return "cpu"
    return f"cuda:{local_rank % torch.cuda.device_count() if case.device == 'cuda' else 0}"


def snapshot_file(folder: Path, case: Case, rank: int) -> Path:
    """The file of a rank's snapshot in a folder, which is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^A-Za-z0-9.+=-]+", "-", case.name)
    return folder.resolve() / f"{name}.rank{rank}.pickle"


def started(seats: Sequence[Seat], program: Program, server: ForkServer) -> dict[int, Forked]:
    """The processes of ranks, by rank."""
    return {seat.rank: server.fork(rank_main, seat, program) for seat in seats}


def answers(
    ranks: Mapping[int, Forked], timeout_s: float, stopped: Callable[[], bool] | None = None
) -> list[Answer]:
    """One answer per rank, whose processes have all ended.

    After the time-out, or the first failure, of which `stopped` tells if it was elsewhere, the others have
    `LAST_WORDS_S` left.
    """
    found: list[Answer] = []
    running = {process: rank for rank, process in ranks.items()}
    kernel_kills = _kernel_kills()
    deadline_s = time.monotonic() + timeout_s + LAST_WORDS_S
    poll_s = POLL_S if stopped else timeout_s
    failed = False
    try:
        while running and (left_s := deadline_s - time.monotonic()) > 0:
            for process in ended(running, min(left_s, poll_s)):
                out_of_memory = _kernel_kills() > kernel_kills
                rank, end = running.pop(process), process.end()
                found.append(_answer(rank, end, out_of_memory=out_of_memory))
            if not failed and (any(isinstance(x, Failure) for x in found) or (stopped and stopped())):
                failed, deadline_s = True, min(deadline_s, time.monotonic() + LAST_WORDS_S)
    finally:
        for process in running:
            process.kill()
        ends = [(rank, process.end()) for process, rank in running.items()]
    return found + [_ended_by_us(rank, end, timeout_s, late=not failed) for rank, end in ends]


def concluded(given: Sequence[Answer]) -> Ended:
    """The end of a case from its ranks' answers: the first failure explains those that follow."""
    failures = [answer for answer in given if isinstance(answer, Failure)]
    if not failures:
        return _all_measured([answer for answer in given if isinstance(answer, Measured)])
    late = sorted((failure for failure in failures if failure.outcome == "timed-out"), key=lambda f: f.rank)
    if len(late) == sum(not failure.follows for failure in failures):
        reason = "\n".join(failure.reason for failure in late)
        return Ended(outcome="timed-out", reason=reason)
    first = min(failures, key=lambda failure: (failure.follows, failure.at_s))
    return Ended(outcome=first.outcome, reason=first.reason)


def _all_measured(given: Sequence[Measured]) -> Ended:
    ranks = sorted((answer.measurement for answer in given), key=lambda measured: measured.rank)
    prepared_at_s = max(rank.prepared_at_s for rank in ranks)
    cost = Cost(
        setup_s=prepared_at_s - min(answer.started_at_s for answer in given),
        steps_s=max(rank.trained_at_s for rank in ranks) - prepared_at_s,
        cpu_s=sum(answer.cpu_s for answer in given),
        rss_bytes=max(answer.rss_bytes for answer in given),
    )
    return Ended(outcome="ok", ranks=tuple(ranks), cost=cost)


def _answer(rank: int, end: End, *, out_of_memory: bool) -> Answer:
    """The answer of a process that ended by itself, or a failure that says how it died."""
    if end.value is not None:
        return cast(Answer, end.value)
    how = f"was killed by {end.signal.name}" if end.signal else f"died with exit code {end.exit_code}"
    if end.signal is None and end.exit_code is None:
        how = "was lost with the fork server"
    if end.signal == signal.SIGKILL and out_of_memory:
        how = "was killed by the kernel, which was out of memory"
    outcome: Outcome = "out-of-memory" if out_of_memory or _speaks_of_memory(end.said) else "crashed"
    return Failure(
        rank=rank, outcome=outcome, reason=f"rank {rank} {how}\n{end.said}".strip(), at_s=-math.inf
    )


def _ended_by_us(rank: int, end: End, timeout_s: float, *, late: bool) -> Answer:
    """The failure of a rank that was killed after a time-out or another rank's failure."""
    stack = end.said[-STACK_CHARACTERS:]
    return Failure(
        rank=rank,
        outcome="timed-out" if late else "crashed",
        reason=f"rank {rank} not done after {timeout_s:g} s\n{stack}".strip()
        if late
        else "ended with the others",
        at_s=time.monotonic(),
        follows=not late,
    )


def rank_main(seat: Seat, program: Program) -> Answer:
    """Runs one rank's process: its answer."""
    started_at_s = time.monotonic()
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(POLL_S, seat.case.timeout_s - _age_s()))
    try:
        if seat.memory_bytes is not None:
            _limit_memory(seat.memory_bytes)
        measurement = program(seat)
    except PlanRefused as refusal:
        return Failure(rank=seat.rank, outcome="refused", reason=str(refusal), at_s=-math.inf)
    except Exception as error:
        return _failure(seat.rank, error)
    used = resource.getrusage(resource.RUSAGE_SELF)
    return Measured(
        measurement=measurement,
        started_at_s=started_at_s,
        cpu_s=used.ru_utime + used.ru_stime,
        rss_bytes=KiB * used.ru_maxrss,
    )


def _age_s() -> float:
    """Seconds since this process was forked, before it had imported what it runs.

    Source: man 5 proc_pid_stat, field 22, counted behind the command's name, which ends in a parenthesis.
    """
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def _failure(rank: int, error: Exception) -> Failure:
    text = without_folders("".join(traceback.format_exception(error)))
    short = isinstance(error, torch.OutOfMemoryError | MemoryError) or _speaks_of_memory(text)
    return Failure(
        rank=rank,
        outcome="out-of-memory" if short else "crashed",
        reason=f"rank {rank}: {text[-SAID_BYTES:].strip()}",
        at_s=time.monotonic(),
        follows=isinstance(error, dist.DistError) or "gloo/transport" in text,
    )


def _speaks_of_memory(text: str) -> bool:
    return any(
        words in text
        for words in (
            "can't allocate memory",
            "Cannot allocate memory",
            "std::bad_alloc",
            "CUDA out of memory",
            "CUDA error: out of memory",
            "CUBLAS_STATUS_ALLOC_FAILED",
            "Cuda failure 2 'out of memory'",
        )
    )


def _limit_memory(memory_bytes: int) -> None:
    """Limits what this process may still allocate; beyond it malloc fails, and no other process is harmed.

    What counts is private writable memory (man 2 getrlimit, RLIMIT_DATA), not the libraries' address space.
    """
    held_bytes = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (held_bytes + memory_bytes,) * 2)


def _kernel_kills() -> int:
    """How many processes the kernel has killed for memory since the machine started."""
    counts = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    return int(counts.get("oom_kill", 0))


OFFLOADING: Final = "cpu:{},cuda:nccl"
"""The backends where gradients are on the host: their norms are summed there, by gloo or a stand-in's `fake`.

Source: docs.pytorch.org/docs/2.13/distributed.fsdp.fully_shard.html (`CPUOffloadPolicy`), torchtitan's
distributed/utils.py (`init_distributed`).
"""


@contextmanager
def process_group(seat: Seat) -> Iterator[None]:
    """The group of all ranks, over the loopback interface if they meet there; none for a single rank."""
    world_size, alone = seat.case.plan.world_size, seat.case.rank is not None
    if world_size == 1:
        yield
        return
    by_nccl = seat.case.backend == "nccl"
    device = torch.device(seat.device) if by_nccl else None
    offloads = seat.case.plan.offload and by_nccl
    backend = OFFLOADING.format("fake" if alone else "gloo") if offloads else seat.case.backend
    if alone:
        with stand_in(backend, seat.rank, world_size, device):
            yield
            settled()
        return
    if ip_address(socket.gethostbyname(seat.host)).is_loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    patience = timedelta(seconds=seat.case.timeout_s + LAST_WORDS_S)
    store = dist.TCPStore(seat.host, seat.port, is_master=False, timeout=patience)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(seat.prefix, store),
        rank=seat.rank,
        world_size=world_size,
        timeout=patience,
        device_id=device,
    )
    yield
    settled()
    dist.destroy_process_group()


def dump_events(ended: Ended, folder: Path) -> list[Path]:
    """Writes each rank's allocation events of the steady step as JSON lines; the files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for measured in ended.ranks:
        file = folder / f"rank{measured.rank}.jsonl"
        file.write_text("".join(json.dumps(event._asdict()) + "\n" for event in measured.memory.events))
        files.append(file)
    return files
