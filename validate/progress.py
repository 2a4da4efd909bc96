"""The progress of a sweep on a terminal; nothing elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from validate.cases import Case
from validate.records import Record

Show = Callable[[Record, str], None]
"""Prints what is said of a record, and counts it."""


@contextmanager
def progress(cases: Sequence[Case]) -> Iterator[Show]:
    """A bar on standard error with the rate, the time left and the worst peak so far.

    The time left is in proportion to ranks, of which large cases have more.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda record, text: click.echo(text)
        return
    began_s = time.monotonic()
    columns = (BarColumn(bar_width=20), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console, redirect_stdout=False, transient=True) as bar:
        task = bar.add_task(f"0/{len(cases)}", total=sum(case.plan.world_size for case in cases))
        n_ranks = {case.identity: len(case.ranks) for case in cases}
        worst, n = 0.0, 0

        def show(record: Record, text: str) -> None:
            nonlocal worst, n
            worst, n = max(worst, record.peak_error or 0.0, key=abs), n + 1
            if sys.stdout.isatty():
                console.print(text, markup=False, highlight=False, soft_wrap=True)
            else:
                click.echo(text)
            bar.advance(task, n_ranks[Case.from_dict(record.case).identity])
            elapsed_s = time.monotonic() - began_s
            left_s = elapsed_s * (100 / bar.tasks[task].percentage - 1)
            bar.update(
                task,
                description=f"{n}/{len(cases)}, {60 * n / elapsed_s:.1f} a minute, "
                f"{timedelta(seconds=round(left_s))} left, worst peak {worst:+.3%}",
            )

        yield show
