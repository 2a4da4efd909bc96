"""How fast plans are worked out: `python -m memplan.search.bench`, seconds of one core.

All plans of llama-3.1-405b on 16,384 GPUs, without offload, in the schedules with one stage a rank and in
interleaved 1F1B, from which so many are drawn at random; the first call makes what later ones share.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

import click
import numpy as np

from memplan.estimate import device_of, estimate_plan
from memplan.hardware import cluster
from memplan.layout import text_table
from memplan.models import resolve
from memplan.search.evaluate import memory
from memplan.search.plans import Plans, joined
from memplan.search.rules import RUNS
from memplan.search.search import common
from memplan.search.space import Space
from memplan.search.time import step_s

MODEL: Final = "llama-3.1-405b"
CLUSTER: Final = "16384xh100-sxm"
RANGES: Final = {"schedule": ("gpipe", "1f1b", "interleaved-1f1b"), "offload": (False,)}
AT_ONCE: Final = 2**18
ONE_BY_ONE: Final = 20


def seconds_of(work: Callable[[], object]) -> float:
    """Processor seconds."""
    start = time.process_time()
    work()
    return time.process_time() - start


def measured(n_plans: list[int]) -> Iterator[tuple[str, ...]]:
    """A line each for one plan per call, for the whole space, and for so many plans of it."""
    model, where = resolve(MODEL), cluster(CLUSTER)
    space = Space(
        model=model,
        n_gpus=where.n_gpus,
        base=common(global_batch=2048, seq_len=8192),
        ranges=RANGES,
    )
    grids = [ruled.grid[ruled.rule == RUNS] for batch in space.grids() for ruled in batch]
    plans = joined([grid.rows() for grid in grids])
    parts = [plans[i : i + AT_ONCE] for i in range(0, len(plans), AT_ONCE)]
    rng = np.random.default_rng(0)

    def one_by_one() -> None:
        for i in rng.integers(0, len(plans), ONE_BY_ONE):
            _ = estimate_plan(model, plans.plan(int(i)), where).step_s

    def many(some: list[Plans]) -> None:
        for part in some:
            memory(model, part, device_of(where))
            step_s(model, part, where)

    one_by_one()
    yield _line("one estimate per call", ONE_BY_ONE, seconds_of(one_by_one))
    yield _line("the whole space, first call", len(plans), seconds_of(partial(many, parts)))
    for n in n_plans:
        drawn = [plans[rng.integers(0, len(plans), min(AT_ONCE, n - i))] for i in range(0, n, AT_ONCE)]
        yield _line("drawn from it", n, seconds_of(partial(many, drawn)))


def _line(what: str, n: int, seconds: float) -> tuple[str, ...]:
    return what, f"{n:,}", f"{seconds:.2f}", f"{n / seconds:,.0f}"


@click.command()
@click.option("--plans", "n_plans", type=int, multiple=True, default=(10**4, 10**5, 10**6), show_default=True)
def main(n_plans: tuple[int, ...]) -> None:
    """Memory and step time of many plans at once, beside one estimate per call."""
    click.echo(f"{MODEL} on {CLUSTER}: peak memory and step time")
    click.echo(text_table([("", "plans", "s", "plans/s"), *measured(list(n_plans))], "<>>>"))


if __name__ == "__main__":
    main()
