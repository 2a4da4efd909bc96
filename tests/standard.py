"""How fast this machine is just now, as of the one that limits of time are meant for."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import mean
from threading import Event, Thread
from typing import Final

STANDARD_S: Final = 0.00072
"""CPU seconds of `standard_work` on the machine that limits are meant for."""

SAMPLED_EACH_S: Final = 0.5
"""Seconds between two samples of a machine's speed."""


def standard_work() -> list[int]:
    """Plain Python of the kind that an estimate is made of."""
    kept: dict[tuple[int, int, str], int] = {}
    for i in range(4000):
        key = i, 3 * i, "name"
        kept[key] = kept.get(key, 0) + len(key)
    return sorted(kept.values())


def cpu_s(work: Callable[[], object], repeats: int) -> float:
    """CPU seconds of one call, of a few in a row."""
    start = time.thread_time()
    for _ in range(repeats):
        work()
    return (time.thread_time() - start) / repeats


@contextmanager
def slowness() -> Iterator[list[float]]:
    """A block after which the list has one number: how many times slower than standard the machine was in it.

    1 where it was faster.
    """
    found: list[float] = []
    samples, is_over = list[float](), Event()

    def sampled() -> None:
        while not is_over.wait(SAMPLED_EACH_S):
            samples.append(cpu_s(standard_work, 3) / STANDARD_S)

    thread = Thread(target=sampled)
    thread.start()
    try:
        yield found
    finally:
        is_over.set()
        thread.join()
        found.append(max(1.0, mean(samples or [1.0])))
