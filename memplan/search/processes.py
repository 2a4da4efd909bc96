"""How work is run: by several processes, without looking for garbage."""

import gc
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar
from warnings import catch_warnings, filterwarnings

from memplan.errors import InvalidValue

T = TypeVar("T")
R = TypeVar("R")


@contextmanager
def uncollected() -> Iterator[None]:
    """Python looks for no cycles of objects meanwhile: a search leaves few, and to look is a sixth of it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def n_cores() -> int:
    """How many workers there is a core for."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_processes(workers: int, work: Callable[[T], R], parts: Iterable[T]) -> Iterator[R]:
    """What some work says of each part, by so many processes, as it is found.

    Raises:
        InvalidValue: joblib is not installed.
    """
    try:
        from joblib import Parallel, delayed, parallel_config
    except ImportError:
        raise InvalidValue(
            f"workers={workers} needs joblib; use workers=1, or install it: pip install 'memplan[parallel]'."
        ) from None
    with parallel_config(backend="loky", inner_max_num_threads=1), catch_warnings():
        # loky ends a worker whose memory has grown and starts another; no part is lost.
        filterwarnings("ignore", message="A worker stopped while some jobs were given", category=UserWarning)
        yield from Parallel(n_jobs=workers, return_as="generator_unordered")(
            delayed(work)(part) for part in parts
        )
