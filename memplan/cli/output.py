"""What commands share of their output: JSON, CSV, progress."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import click

from memplan.cli.program import Refused
from memplan.hardware import Verdict
from memplan.text_tables import csv_of


@contextmanager
def progress_bar() -> Iterator[Callable[[int], None] | None]:
    """A progress bar on stderr, if that is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    yield lambda n: click.echo(f"\r\033[K{n:,} plans", nl=False, err=True)
    click.echo("\r\033[K", nl=False, err=True)


def check_format(as_json: bool, as_csv: bool) -> None:
    """Refuses --json together with --csv.

    Raises:
        Refused: if both are asked for.
    """
    if as_json and as_csv:
        raise Refused("--json and --csv are two formats of the same output; use one of them.")


def print_csv(rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """Writes rows as CSV to stdout."""
    click.echo(csv_of(rows, columns), nl=False)


COLORS: Final[dict[Verdict | None, str | None]] = {
    "fits": "green",
    "fits, tight": "yellow",
    "cannot say": "yellow",
    "does not fit": "red",
    None: None,
}
"""The colour of a verdict on a terminal."""


def print_verdict_first(text: str, verdict: Verdict | None) -> None:
    """Writes text whose first line is a verdict: bold and coloured, but only on a terminal."""
    first, end, rest = text.partition("\n")
    click.echo(f"{click.style(first, bold=True, fg=COLORS[verdict])}{end}{rest}")


def print_json(value: Any) -> None:
    """Writes plain values as JSON to stdout."""
    click.echo(json.dumps(value, indent=2))
