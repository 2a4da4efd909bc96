"""How fast plans are searched: `OMP_NUM_THREADS=1 python -m tests.bench`, seconds of one core.

The ten fastest of all plans of llama-3.1-405b on 16,384 GPUs and of GPT-3 175B on 512, of batches with more
and more divisors and with every number of recomputed blocks: enumerated, ruled out, bounded, and the most
promising estimated. Each search is in a process that knows nothing yet.
"""

import resource
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from typing import Any, Final, NamedTuple

import click
import numpy as np

from memplan.estimate import estimate_plan
from memplan.models import Model, resolve
from memplan.models.gpt import Gpt
from memplan.search.plans import VARIED
from memplan.search.search import bases, cluster_of, searched, values_of
from memplan.search.space import Space
from memplan.text_tables import text_table
from memplan.units import KiB, MiB

ONE_BY_ONE: Final = 20
"""Plans of which one estimate each is timed."""

LLAMA: Final = {
    "cluster": "16384xh100-sxm",
    "seq_len": 8192,
    "offload": False,
    "schedule": ("gpipe", "1f1b", "interleaved-1f1b"),
}

GPT3: Final = {
    "cluster": "512xa100-80-sxm",
    "seq_len": 2048,
    "schedule": ("gpipe", "1f1b", "interleaved-1f1b", "looped-bfs"),
}


class Job(NamedTuple):
    """A search: about how many plans it has, the preset, its options."""

    n_plans: int
    model: str
    options: dict[str, Any]


JOBS: Final = (
    Job(12_000, "llama-3.1-405b", LLAMA | {"global_batch": 512}),
    Job(240_000, "llama-3.1-405b", LLAMA | {"global_batch": 2048, "recompute_blocks": range(1, 127)}),
    Job(1_900_000, "llama-3.1-405b", LLAMA | {"global_batch": 215_040, "recompute_blocks": range(1, 127)}),
    Job(9_900_000, "llama-3.1-405b", LLAMA | {"global_batch": 5_160_960, "recompute_blocks": range(1, 127)}),
    Job(6_600_000, "gpt3-175b", GPT3 | {"global_batch": 15_360, "recompute_blocks": range(1, 97)}),
    Job(9_900_000, "gpt3-175b", GPT3 | {"global_batch": 46_080, "recompute_blocks": range(1, 97)}),
)


class Measured(NamedTuple):
    """Plans, processor seconds, and the most memory that the process has had."""

    n_plans: int
    seconds: float
    peak_bytes: int


def model_of(name: str) -> Model:
    """A preset; tensor parallelism wants GPT-3's head untied and its vocabulary a round number."""
    found = resolve(name)
    return replace(found, tied_head=False, vocab_size=51_200) if isinstance(found, Gpt) else found


def space_of(job: Job) -> Space:
    """All plans of a job."""
    options = job.options
    ranges: dict[str, Any] = {name: values_of(name, options[name]) for name in VARIED if name in options}
    (base,) = bases(global_batch=options["global_batch"], seq_len=options["seq_len"])
    n_gpus = cluster_of(options["cluster"]).n_gpus
    return Space(model=model_of(job.model), n_gpus=n_gpus, base=base, ranges=ranges)


def fastest(job: Job) -> Measured:
    """A search of a job for the fastest ten plans."""
    return measured(lambda: searched(model_of(job.model), keep=10, **job.options).n_plans)


def one_by_one(job: Job) -> Measured:
    """One estimate, with the time of a step, of each of a few of a job's plans."""
    where, space = cluster_of(job.options["cluster"]), space_of(job)
    grids = [ruled.running for ruled in space.grids() if len(ruled.running)]
    random = np.random.default_rng(0)
    sizes = np.array([len(grid) for grid in grids], float)
    chosen = [
        grids[i].plan(int(random.integers(0, len(grids[i]))))
        for i in random.choice(len(grids), ONE_BY_ONE, p=sizes / sizes.sum())
    ]

    def work() -> int:
        for plan in chosen:
            _ = estimate_plan(space.model, plan, where).step_s
        return len(chosen)

    return measured(work)


def measured(work: Callable[[], int]) -> Measured:
    """What some work on plans, which says how many, has taken of this process."""
    start = time.process_time()
    n_plans = work()
    seconds = time.process_time() - start
    return Measured(n_plans, seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KiB)


def lines(most: int) -> Iterator[tuple[str, ...]]:
    """A line for one plan per call, and for each search of at most so many plans."""
    chosen = [(fastest, job) for job in JOBS if job.n_plans <= most]
    for how, job in ((one_by_one, JOBS[0]), *chosen):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
            found = alone.submit(how, job).result()
        batch = f"batch of {job.options['global_batch']:,}"
        what = {one_by_one: "one estimate per call", fastest: batch}
        yield (
            f"{job.model}, {what[how]}",
            f"{found.n_plans:,}",
            f"{found.seconds:.1f}",
            f"{found.n_plans / found.seconds:,.0f}",
            f"{found.peak_bytes / MiB:,.0f}",
        )


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--most", default=10**7, show_default=True, help="Leave out searches of more plans.")
def main(most: int) -> None:
    """All plans of large clusters, searched to the best, beside one estimate per call."""
    head = ("", "plans", "s", "plans/s", "peak MiB")
    click.echo(text_table([head, *lines(most)], "<>>>>"))


if __name__ == "__main__":
    main()
