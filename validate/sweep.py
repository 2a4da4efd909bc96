"""Runs a suite: several cases at once as a budget allows, until all are done or a signal stops it."""

import signal
import sys
import traceback
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Final, TypeVar

from memplan.errors import InvalidValue, MemplanError, MissingRule, PlanRefused, shown_value
from memplan.units import GiB, MiB, human_bytes
from validate.cases import REFERENCE, Case
from validate.given import Given, GivenRanks
from validate.judge import References, Runner, judged
from validate.launch import Ended, ForkServers, Program, run_case
from validate.machine import Budget
from validate.predict import estimated_rank
from validate.records import Record
from validate.tracebacks import without_folders

_T = TypeVar("_T")

MOST_AT_ONCE: Final = 256

ONE_AT_A_TIME: Final = Budget(cores=1, memory_bytes=sys.maxsize)
"""On given ranks, whose machines are not this one."""

RETRIED: Final = ("crashed", "timed-out", "out-of-memory")
"""Outcomes that another try may change."""

RANKS_PER_CORE: Final = 2
"""Ranks wait for each other without using a core.

Eight cases of 4 ranks on 2 busy cores took 96 s one at a time, 77 s two at a time and 60 s four at a time,
with the same 40 s of processor time. What is measured of memory and traffic is the same; steps take longer.
"""

RANK_BYTES: Final = 512 * MiB
"""Memory of a rank's process itself: PyTorch's workspaces, threads and code (seen: 130 MiB)."""

SHAPES_BYTES: Final = 3 * GiB // 2
"""Memory of a rank whose tensors have no data (seen: 1.1 GiB): Python objects and PyTorch's code."""

PLAYED_BYTES: Final = GiB
"""Host memory of a rank whose GPU is not there (seen: 0.8 GiB, PyTorch's CUDA libraries)."""

UNKNOWN_BYTES: Final = 2 * GiB
"""Memory of a rank whose peak has no rule."""


class Judge:
    """Runs cases and compares them: `run` the cases themselves, on this machine their single-process runs.

    Refused ones are run `anyway` only if that is asked for. Of cases on GPUs here each rank's allocations of
    a step are written to the folder `snapshots`.
    """

    def __init__(
        self,
        servers: ForkServers,
        run: Runner | None = None,
        *,
        program: Program | None = None,
        anyway: bool = False,
        snapshots: Path | None = None,
    ) -> None:
        self._servers = servers
        self._program = program
        self._anyway = anyway
        self._snapshots = snapshots
        self._run = run or self._run_here
        self._references = References(self._run_here)

    def __call__(self, case: Case) -> Record:
        """The record of a case, whatever happens; one that needs a single process only is run here."""
        run = self._run_here if case.rank is not None else self._run
        try:
            return judged(case, self._references, run=run, anyway=self._anyway)
        except Exception:
            reason = f"validate itself failed: {without_folders(traceback.format_exc())}"
            return Record(case=case.to_dict(), outcome="crashed", reason=reason)

    def close(self) -> None:
        """Ends what runs."""
        self._servers.close()

    def _run_here(self, case: Case) -> Ended:
        memory_bytes = rank_bytes(case) if case.device == "cpu" else None
        return run_case(
            case,
            program=self._program,
            servers=self._servers,
            memory_bytes=memory_bytes,
            snapshots=self._snapshots if case.torch_device == "cuda" and case.name != REFERENCE else None,
        )


def part_of(cases: Sequence[_T], part: str) -> list[_T]:
    """The i-th of n parts, as "i/n": every n-th case, so that each part has some of every kind.

    >>> [part_of(range(5), part) for part in ("1/2", "2/2")]
    [[0, 2, 4], [1, 3]]
    """
    i, slash, n = part.partition("/")
    if not (slash and i.isascii() and n.isascii() and i.isdigit() and n.isdigit() and 1 <= int(i) <= int(n)):
        raise InvalidValue(f"part {shown_value(part)} is none; use i/n with i from 1 to n, as 1/4.")
    return list(cases[int(i) - 1 :: int(n)])


@cache
def rank_bytes(case: Case) -> int:
    """Memory reserved for each of a case's ranks: twice the largest predicted peak, and a base."""
    if case.tensors == "fake":
        return SHAPES_BYTES
    try:
        step = max(1, len(case.ranks) // case.plan.pp)
        peaks = [estimated_rank(case, rank).peak.total_bytes for rank in case.ranks[::step]]
    except MissingRule:
        return UNKNOWN_BYTES
    except MemplanError:
        return RANK_BYTES
    return RANK_BYTES + 2 * max(peaks)


@cache
def host_bytes(case: Case) -> int:
    """Memory reserved for each rank on a GPU that is not there: what it offloads, and a base."""
    try:
        return PLAYED_BYTES + max(estimated_rank(case, rank).host.total_bytes for rank in case.ranks)
    except MemplanError:
        return PLAYED_BYTES


def share_of(case: Case, budget: Budget) -> Budget:
    """The share of a budget that a running case takes: cores, at most all of them, and its ranks' memory.

    On a GPU it takes all cores, so that nothing runs beside it; what it takes of the host is not counted. On
    a GPU that is not there each rank keeps a core busy, and takes what the host holds of the plan.
    """
    if case.device == "cuda":
        return Budget(cores=budget.cores, memory_bytes=0)
    if case.device == "nogpu":
        n_ranks = len(case.ranks)
        return Budget(cores=min(n_ranks, budget.cores), memory_bytes=n_ranks * host_bytes(case))
    n_ranks, alone = len(case.ranks), 0 if case.unchecked else rank_bytes(case.reference())
    return Budget(
        cores=min(-(-n_ranks // RANKS_PER_CORE), budget.cores),
        memory_bytes=max(n_ranks * rank_bytes(case), alone),
    )


def swept(cases: Iterable[Case], judge: Judge, budget: Budget) -> Generator[Record]:
    """The records of cases as they are done; they start in order, but small ones may pass large ones.

    Closes the judge when it ends early.
    """
    waiting = list(cases)
    running: dict[Future[Record], Budget] = {}
    with ThreadPoolExecutor(max_workers=MOST_AT_ONCE) as pool:
        try:
            while waiting or running:
                left = _left(budget, running.values())
                for case in list(waiting) if left.cores else ():
                    share = share_of(case, budget)
                    if share.memory_bytes > budget.memory_bytes:
                        waiting.remove(case)
                        yield _too_large(case, share, budget)
                    elif share.cores <= left.cores and share.memory_bytes <= left.memory_bytes:
                        waiting.remove(case)
                        running[pool.submit(judge, case)] = share
                        left = _left(budget, running.values())
                    if not left.cores:
                        break
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    running.pop(future)
                    yield future.result()
        except BaseException:
            judge.close()
            raise


def _left(budget: Budget, shares: Iterable[Budget]) -> Budget:
    taken = list(shares)
    return Budget(
        cores=budget.cores - sum(share.cores for share in taken),
        memory_bytes=budget.memory_bytes - sum(share.memory_bytes for share in taken),
    )


def _too_large(case: Case, share: Budget, budget: Budget) -> Record:
    reason = f"{_room_text(share, budget)}; use --memory, or a smaller case."
    return Record(case=case.to_dict(), outcome="refused", reason=reason)


def _room_text(share: Budget, budget: Budget) -> str:
    return (
        f"its ranks may take {human_bytes(share.memory_bytes)}, twice the predicted peaks and "
        f"{human_bytes(RANK_BYTES)} each, but the budget is {human_bytes(budget.memory_bytes)}"
    )


def check_room(case: Case, budget: Budget) -> None:
    """Raise unless this machine has room for all of a case's ranks at once.

    Raises:
        PlanRefused: with what they may take.
    """
    n_ranks = len(case.ranks)
    if case.torch_device == "cpu" and n_ranks * RANK_BYTES > budget.memory_bytes:
        raise PlanRefused(
            f"{case.plan.mesh} = {n_ranks} ranks are as many processes, of at least "
            f"{human_bytes(RANK_BYTES)} each, but this machine has {human_bytes(budget.memory_bytes)} free; "
            "use smaller degrees, or start the ranks on several machines with torchrun."
        )
    try:
        share = share_of(case, budget)
    except MemplanError:
        return  # refused for another reason, which is told when it is judged
    if share.memory_bytes > budget.memory_bytes:
        raise PlanRefused(f"{_room_text(share, budget)}; use a smaller plan or model.")


@contextmanager
def judging(
    given: Given | None,
    *,
    program: Program | None = None,
    anyway: bool = False,
    snapshots: Path | None = None,
) -> Iterator[Judge]:
    """A judge that runs cases here, or on the ranks of a launcher; what it started ends with it."""
    with ForkServers() as servers:
        if given is None:
            yield Judge(servers, program=program, anyway=anyway, snapshots=snapshots)
            return
        with GivenRanks(given, servers=servers) as ranks:
            yield Judge(servers, ranks.run, anyway=anyway)


class Stopped(BaseException):
    """A signal asked to stop; further ones are ignored until all is tidied up."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


STOPS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def stoppable() -> Iterator[None]:
    """Raises `Stopped` at the first signal that asks to stop, once; those ignored before stay ignored."""

    def stop(number: int, _frame: FrameType | None) -> None:
        for heard in before:
            signal.signal(heard, signal.SIG_IGN)
        raise Stopped(number)

    before = {number: signal.getsignal(number) for number in STOPS}
    before = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
