"""The ranks that torchrun or Slurm started: each runs a fresh process per case, which rank 0 chooses."""

import pickle
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from typing import Any, Final, Self, cast

import torch.distributed as dist

from memplan.checks import checked_count
from memplan.errors import InvalidValue
from memplan.mesh import axis_names
from validate.cases import Case
from validate.launch import (
    LAST_WORDS_S,
    Answer,
    Ended,
    Failure,
    ForkServers,
    Program,
    Seat,
    answers,
    concluded,
    device_for,
    rank_program,
    shared_servers,
    started,
)

ASK_S: Final = 0.05
"""Seconds between two looks for a next case."""

MEETING: Final = timedelta(minutes=10)
"""How long a launcher may take to start all ranks."""

PATIENCE_S: Final = 30.0
"""How long beyond its time-out a case's ranks on other machines may be silent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """This process's place among those that a launcher started; `hosts`: rank 0 opens the store itself."""

    rank: int
    world_size: int
    local_rank: int
    host: str
    port: int
    hosts: bool
    attempt: str = "0"

    def dp_left(self, plan: Mapping[str, Any]) -> int:
        """The data-parallel ranks that a plan's other axes leave of the launcher's.

        Raises:
            InvalidValue: if the other axes do not divide them.
        """
        n_other = prod(
            checked_count(axis, plan[axis]) for axis in axis_names() if axis != "dp" and axis in plan
        )
        if self.world_size % n_other:
            raise InvalidValue(
                f"The other axes' {n_other} ranks do not divide the {self.world_size} that the launcher "
                f"started; start {-(-self.world_size // n_other) * n_other}, or use other degrees."
            )
        return self.world_size // n_other


def given_ranks(environment: Mapping[str, str]) -> Given | None:
    """This process's place by the variables of torchrun, or of srun; None if neither started it.

    Source: torch.distributed.run, "Environment Variables"; man srun, "OUTPUT ENVIRONMENT VARIABLES".
    """
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= environment.keys():
        return Given(
            rank=int(environment["RANK"]),
            world_size=int(environment["WORLD_SIZE"]),
            local_rank=int(environment.get("LOCAL_RANK", environment.get("SLURM_LOCALID", "0"))),
            host=environment["MASTER_ADDR"],
            port=_port(environment),
            hosts=environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
            attempt=environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
        )
    if {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST"} <= environment.keys():
        return Given(
            rank=int(environment["SLURM_PROCID"]),
            world_size=int(environment["SLURM_STEP_NUM_TASKS"]),
            local_rank=int(environment.get("SLURM_LOCALID", "0")),
            host=environment.get("MASTER_ADDR") or first_host(environment["SLURM_STEP_NODELIST"]),
            port=_port(environment),
            hosts=True,
        )
    return None


def _port(environment: Mapping[str, str]) -> int:
    """The launcher's port, or else one derived from the job's number, so that jobs of a machine differ."""
    job, step = (int(environment.get(name, "0")) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return int(environment.get("MASTER_PORT", 20_000 + (job + 101 * step) % 20_000))


def first_host(nodes: str) -> str:
    """The first of Slurm's list of nodes.

    >>> first_host("gpu[07-09,12]-ib,login1"), first_host("a1,b2")
    ('gpu07-ib', 'a1')
    """
    found = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\]([^,]*))?", nodes)
    if found is None:
        raise InvalidValue(f"SLURM_STEP_NODELIST={nodes!r} names no node; set MASTER_ADDR to rank 0's.")
    return "".join(part or "" for part in found.groups())


class GivenRanks:
    """All processes that a launcher started: rank 0 is a context that calls `run`, the others `serve`."""

    def __init__(
        self, given: Given, *, program: Program = rank_program, servers: ForkServers | None = None
    ) -> None:
        self._given = given
        self._program = program
        self._servers = servers or shared_servers()
        opens = given.hosts and given.rank == 0
        store = dist.TCPStore(
            given.host, given.port, is_master=opens, wait_for_workers=False, timeout=MEETING
        )
        self._prefix = f"memplan/{given.attempt}"
        self._store = dist.PrefixStore(self._prefix, store)
        self._n_cases = 0

    def run(self, case: Case) -> Ended:
        """Runs a case on as many of the given ranks as it has, the first ones."""
        if case.plan.world_size > self._given.world_size:
            return Ended(
                outcome="refused",
                reason=f"{case.plan.mesh} = {case.plan.world_size} ranks, but the launcher started "
                f"{self._given.world_size}; start {case.plan.world_size}.",
            )
        self._tell(f"{self._n_cases}/case", case)
        return concluded(self._round(case))

    def serve(self) -> None:
        """Takes part in every case that rank 0 runs, until it closes."""
        while (case := self._next_case()) is not None:
            self._round(case)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Tells the other ranks that it is over, and waits until they know: the store is this rank's."""
        self._tell(f"{self._n_cases}/case", None)
        others = [f"gone/{rank}" for rank in range(1, self._given.world_size)]
        self._await(others, time.monotonic() + LAST_WORDS_S)

    def _next_case(self) -> Case | None:
        key = f"{self._n_cases}/case"
        self._await([key], None)
        case = cast(Case | None, pickle.loads(self._store.get(key)))
        if case is None:
            self._store.set(f"gone/{self._given.rank}", "")
        return case

    def _round(self, case: Case) -> list[Answer]:
        """This rank's part of a case; on rank 0 everyone's answers."""
        n, self._n_cases = self._n_cases, self._n_cases + 1
        given, n_ranks = self._given, case.plan.world_size
        if given.rank < n_ranks:
            self._tell(f"{n}/answer/{given.rank}", self._answer(case, n))
        if given.rank:
            return []
        deadline_s = time.monotonic() + case.timeout_s + PATIENCE_S
        self._await([f"{n}/answer/{rank}" for rank in range(n_ranks)], deadline_s)
        return [self._answer_of(n, rank, case) for rank in range(n_ranks)]

    def _answer(self, case: Case, n: int) -> Answer:
        given = self._given
        seat = Seat(
            case=case,
            rank=given.rank,
            host=given.host,
            port=given.port,
            prefix=f"{self._prefix}/{n}/ranks",
            device=device_for(case, given.local_rank),
        )
        ranks = started([seat], self._program, self._servers.of(case))
        (answer,) = answers(ranks, case.timeout_s, stopped=lambda: self._store.check([f"{n}/stop"]))
        if isinstance(answer, Failure):
            self._store.set(f"{n}/stop", "")
        return answer

    def _answer_of(self, n: int, rank: int, case: Case) -> Answer:
        key = f"{n}/answer/{rank}"
        if not self._store.check([key]):
            reason = (
                f"rank {rank}: nothing was heard {PATIENCE_S:g} s after the time-out of {case.timeout_s:g} s"
            )
            return Failure(rank=rank, outcome="timed-out", reason=reason, at_s=time.monotonic())
        answer = cast(Answer, pickle.loads(self._store.get(key)))
        self._store.delete_key(key)
        return answer

    def _tell(self, key: str, value: Any) -> None:
        self._store.set(key, cast(str, pickle.dumps(value)))

    def _await(self, keys: list[str], deadline_s: float | None) -> None:
        """Waits until the store has all keys; interruptible, as the store's own waiting is not."""
        while keys and not self._store.check(keys) and (deadline_s is None or time.monotonic() < deadline_s):
            time.sleep(ASK_S)
