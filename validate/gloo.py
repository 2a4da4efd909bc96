"""gloo's threads: kept from preempting ranks, and waited for until they hold no tensor (Linux only)."""

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import _functional_collectives

THREADS = Path("/proc/self/task")
SOCKETS = "gloo_tcp_loop"
WORKERS = "pt_gloo_runloop"
SLEEPING = b"S"
YIELDED = 1e-4  # seconds
SCHEDULED = re.compile(rb"^(?:State|\w+_ctxt_switches):\t(\w+)", re.MULTILINE)

Wait = Callable[..., Any]


def threads_named(name: str) -> list[int]:
    """This process's threads of a name; none where there is no /proc."""
    if not THREADS.exists():
        return []
    return [int(thread.name) for thread in THREADS.iterdir() if _name_of(thread).startswith(name)]


def _name_of(thread: Path) -> str:
    try:
        return (thread / "comm").read_text()
    except OSError:  # it has ended
        return ""


def let_ranks_go_first() -> None:
    """Keeps gloo's socket threads from preempting ranks: they spin while a peer is ahead.

    They poll level-triggered events, also of data that nobody waits for yet. On 2 cores 8 ranks take half as
    long with this.
    """
    if hasattr(os, "SCHED_BATCH"):
        for thread in threads_named(SOCKETS):
            os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


@contextmanager
def nothing_held_after_waits() -> Iterator[None]:
    """Makes waiting for a collective return only after gloo's worker has dropped its tensors.

    gloo's worker tells the waiting rank first and drops its references to the operands after: if it loses
    its core in between, they live on while the rank allocates, and a peak depends on the machine's load.
    Freeing the last reference to a tensor of Python takes the interpreter's lock, so a worker may sleep
    before it has dropped its tensors too. A worker that sleeps on after the lock was free has dropped them.

    Source: torch/csrc/distributed/c10d/ProcessGroupGloo.cpp, `runLoop` and `AsyncWork::execute`.
    """
    workers = [os.open(THREADS / str(thread) / "status", os.O_RDONLY) for thread in threads_named(WORKERS)]

    def then_let_go(wait: Wait) -> Wait:
        def waited(*args: Any, **kwargs: Any) -> Any:
            result = wait(*args, **kwargs)
            while not _sleep_on(workers):
                time.sleep(YIELDED)
            return result

        return waited

    with (
        _replaced(dist.Work, "wait", then_let_go),
        _replaced(_functional_collectives, "wait_tensor", then_let_go),
    ):
        try:
            yield
        finally:
            for worker in workers:
                os.close(worker)


def _sleep_on(workers: list[int]) -> bool:
    """Whether threads sleep, and none wakes when the interpreter's lock is free for a moment."""
    before = [_scheduled(worker) for worker in workers]
    time.sleep(0)  # frees the lock, which wakes the thread that waits for it
    after = [_scheduled(worker) for worker in workers]
    return before == after and all(state == SLEEPING for state, *_ in before)


def _scheduled(worker: int) -> list[bytes]:
    """What a thread's `status` says of its state and of how often it was switched to."""
    return SCHEDULED.findall(os.pread(worker, 4096, 0))


@contextmanager
def _replaced(
    owner: Any, name: str, by: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, by(original))
    try:
        yield
    finally:
        setattr(owner, name, original)
