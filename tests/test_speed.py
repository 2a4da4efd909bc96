"""How long one estimate takes: short enough to ask for thousands of plans."""

import time
from collections.abc import Callable

import memplan

LIMIT_S = 0.002
MOST_ROUNDS, REPEATS = 300, 5


def least_s(work: Callable[[], object], enough_s: float) -> float:
    """CPU seconds of one call, of the quickest round of a few calls; no more rounds once that is `enough_s`.

    What else a machine does only adds, and little of it to this process's own time: the least of many short
    rounds is what the work itself takes, on a loaded machine too.
    """
    best = float("inf")
    for _ in range(MOST_ROUNDS):
        start = time.process_time()
        for _ in range(REPEATS):
            work()
        best = min(best, (time.process_time() - start) / REPEATS)
        if best < enough_s:
            break
    return best


def peak_of_405b() -> int:
    """The peak, because figures are worked out when asked for."""
    estimated = memplan.estimate(
        "llama-3.1-405b",
        cluster="1152xh100-sxm",
        pp=9,
        dp=16,
        tp=8,
        zero=1,
        sequence_parallel=True,
        global_batch=512,
        seq_len=8192,
    )
    assert len(estimated.stages) == 9
    return estimated.peak.total_bytes


def test_one_estimate_of_405b_in_three_dimensions_takes_under_2_ms():
    assert least_s(peak_of_405b, LIMIT_S) < LIMIT_S
