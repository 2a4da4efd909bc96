"""Replays of the plans that a search will show, several at a time."""

import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from memplan.estimate import Estimate
from memplan.search.search import Found


def replay_ahead(found: Found) -> None:
    """Replays the first plans that may fit, so that their verdicts take no time when they are read."""
    judged = sorted((*found.within, *found.beyond), key=found.keys)
    estimates = [one.estimate for one in judged if one.estimate is not None]
    replay_at_once([each for each in estimates if not each.over_bytes][: found.keep])


def replay_at_once(estimates: Iterable[Estimate]) -> None:
    """Replays each plan's worst stage in a process of its own, as many at a time as this one has cores.

    Only on Linux, where a process can be forked safely: it inherits the estimates, which cannot be sent. A
    plan whose process dies is replayed when its verdict is read.
    """
    if not hasattr(os, "sched_getaffinity"):
        return
    n_cores, left = len(os.sched_getaffinity(0)), list(estimates)[::-1]
    running: dict[Connection, tuple[BaseProcess, Estimate]] = {}
    context = get_context("fork")
    while n_cores > 1 and (left or running):
        while left and len(running) < n_cores:
            estimate = left.pop()
            receiving, sending = context.Pipe(duplex=False)
            process: BaseProcess = context.Process(target=_replay, args=(estimate, sending), daemon=True)
            process.start()
            sending.close()
            running[receiving] = process, estimate
        ready = wait(list(running))
        for receiving in [each for each in running if each in ready]:
            process, estimate = running.pop(receiving)
            with receiving, suppress(EOFError):
                estimate.worst.replays.update(receiving.recv())
            process.join()


def _replay(estimate: Estimate, sending: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _ = estimate.device_bytes
    sending.send(estimate.worst.replays)
