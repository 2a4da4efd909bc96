"""The command line: python -m validate run | sweep | report."""

import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click

from memplan import Plan
from memplan.errors import MemplanError, PlanRefused
from memplan.models.lookup import resolve
from memplan.plan import OPTIMIZERS, PRECISIONS, RECOMPUTES, SCHEDULES
from validate import cases, report
from validate.cases import Case
from validate.judge import References, judged
from validate.launch import dump_events, ranks_given, run_case, run_given_ranks
from validate.records import Record, append_records, read_records


class _Program(click.Group):
    """Refusals are usage errors: a clear line and exit code 2."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except MemplanError as error:
            raise click.UsageError(str(error)) from None


@click.group(cls=_Program)
def main() -> None:
    """Really run plans, with real processes and collectives, beside what memplan predicts."""


def _plan_options(command: Callable[..., None]) -> Callable[..., None]:
    options = [
        click.option("--dp", type=int, default=1, show_default=True, help="Data-parallel ranks."),
        click.option("--tp", type=int, default=1, show_default=True, help="Tensor-parallel ranks."),
        click.option("--pp", type=int, default=1, show_default=True, help="Pipeline stages."),
        click.option("--zero", type=int, default=0, show_default=True, help="0 DDP, 1, 2 or 3."),
        click.option("--sequence-parallel", is_flag=True, help="Divide the sequence over the tensor axis."),
        click.option("--micro-batch", type=int, default=1, show_default=True, help="Sequences per pass."),
        click.option("--global-batch", type=int, help="Sequences per step; dp x micro-batch if left out."),
        click.option("--seq-len", type=int, default=128, show_default=True, help="Tokens per sequence."),
        click.option("--precision", type=click.Choice(PRECISIONS), default="fp32", show_default=True),
        click.option("--optimizer", type=click.Choice(OPTIMIZERS), default="adamw", show_default=True),
        click.option("--recompute", type=click.Choice(RECOMPUTES), default="none", show_default=True),
        click.option("--schedule", type=click.Choice(SCHEDULES), default="1f1b", show_default=True),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@main.command()
@click.option(
    "--model", default="llama-small", show_default=True, help="A preset, a config.json or a suite's model."
)
@click.option(
    "--steps", type=click.IntRange(min=cases.LEAST_STEPS), default=cases.LEAST_STEPS + 1, show_default=True
)
@click.option(
    "--timeout-s", type=float, default=120.0, show_default=True, help="Seconds until the ranks are ended."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--events", type=click.Path(file_okay=False, path_type=Path), help="Folder for every allocation."
)
@_plan_options
def run(
    model: str,
    steps: int,
    timeout_s: float,
    as_json: bool,
    events: Path | None,
    global_batch: int | None,
    **plan: Any,
) -> None:
    """Run one plan; under torchrun or srun, on the ranks they started."""
    if global_batch is None:
        global_batch = max(1, plan["dp"]) * max(1, plan["micro_batch"])
    case = Case(
        name=f"{model}, command line",
        model=_model(model),
        plan=Plan(global_batch=global_batch, **plan),
        steps=steps,
        timeout_s=timeout_s,
    )
    given = ranks_given(os.environ)
    ended = run_given_ranks(case, os.environ) if given else None
    if given and ended is None:
        return
    if ended is None and events is not None:
        ended = run_case(case, keep_events=True)
        dump_events(ended, events)
    record = judged(case, References(), ended=ended)
    if record.outcome == "refused" and not as_json:
        raise PlanRefused(record.reason)
    click.echo(record.to_json() if as_json else report.details(record))
    if record.outcome == "refused":
        sys.exit(2)
    _finish([record])


def _model(name: str) -> Any:
    known = {case.model.name: case.model for case in cases.quick()}
    return known[name] if name in known else resolve(name)


@main.command()
@click.option("--suite", default="quick", show_default=True)
@click.option("--only", default="", help="Only the cases whose name contains this.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Add each record to this file.")
@click.option("--resume", is_flag=True, help="Skip the cases that the file has already.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per case.")
def sweep(suite: str, only: str, out: Path | None, resume: bool, as_json: bool) -> None:
    """Run a suite of cases."""
    done = (
        {str(record.case): record for record in read_records(out)} if resume and out and out.exists() else {}
    )
    chosen = [case for case in cases.suite(suite) if only in case.name]
    records = []
    if not as_json:
        click.echo(report.header())
    for record in _records(chosen, done, out):
        click.echo(record.to_json() if as_json else report.row(record))
        records.append(record)
    if not as_json:
        click.echo(report.summary(records))
    _finish(records)


def _records(chosen: Iterable[Case], done: dict[str, Record], out: Path | None) -> Iterable[Record]:
    references = References()
    for case in chosen:
        known = done.get(str(case.to_dict()))
        if known is not None:
            yield known
            continue
        record = judged(case, references)
        if out is not None:
            append_records(out, [record])
        yield record


@main.command("report")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per case.")
def report_file(file: Path, as_json: bool) -> None:
    """The table of a file of records."""
    records = read_records(file)
    if as_json:
        for record in records:
            click.echo(record.to_json())
        return
    click.echo(report.header())
    for record in records:
        click.echo(report.row(record))
    click.echo(report.summary(records))


def _finish(records: list[Record]) -> None:
    """Exit code 1 unless every case was confirmed or refused."""
    if not all(record.confirmed or record.outcome == "refused" for record in records):
        sys.exit(1)


if __name__ == "__main__":
    main(prog_name="python -m validate")
