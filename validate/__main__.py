"""The command line: python -m validate run | sweep | report | explain | rejudge | published | calibrate.

`memplan validate` has the same commands. Others use the package's name too: ConfigObj (configobj) writes its
own `validate/__init__.py` into the same folder, which does no harm, since memplan's has nothing that is
needed; a file validate.py in the current folder hides the package from `python -m`.
"""

import io
import json
import os
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Final, TypeVar, get_args

from memplan.errors import InvalidValue, MissingPackage, PlanRefused, did_you_mean, installed, shown_value

try:
    with installed("python -m validate", "validate"):
        import click
        import fastjsonschema  # noqa: F401 - this and what follows are imported by validate's modules
        import jinja2  # noqa: F401
        import matplotlib  # noqa: F401
        import pandas  # noqa: F401
        import rich  # noqa: F401
        import torch
except MissingPackage as missing:
    raise SystemExit(f"Error: {missing}") from None

from memplan.checks import checked_count
from memplan.cli.flags import PlanCommand, plan_options
from memplan.cli.program import SETTINGS, Commands, command_line
from memplan.engines.checks import check_plan
from memplan.engines.options import plan_fields, plan_of, with_said
from memplan.files import shown_path
from memplan.text_tables import printable
from memplan.units import human_bytes
from validate import fake, nogpu, report
from validate.attribution import comparison
from validate.calibrate import calibrated
from validate.cases import LEAST_STEPS, Case, placed
from validate.environment import environment, surroundings
from validate.given import Given, GivenRanks, given_ranks
from validate.gpus import Gpus, gpus_here, gpus_played
from validate.judge import References, judged, rejudged
from validate.launch import dump_events, run_case
from validate.machine import Budget, machine_budget, read_bytes
from validate.outputs import begins_with, check_folder, check_new_folder, output_files
from validate.progress import progress
from validate.published import bigscience, fits, megatron_ci, megatron_times, memory, nemo_times
from validate.published import coverage as covered
from validate.records import Record, RecordFile, RecordLines, merged, open_records, read_records
from validate.requests import n_equal, record_requests
from validate.shipped import found_files
from validate.suites import NAMES, SEARCHES, Rounds, case_named, model_named, rounds
from validate.suites.frontier import frontiers
from validate.suites.gpu import GPU_SUITES
from validate.sweep import ONE_AT_A_TIME, RETRIED, Stopped, check_room, judging, part_of, stoppable, swept
from validate.systems.torch import installed_version
from validate.where import (
    CASE_FIELDS,
    EXAMPLE,
    RECORD_FIELDS,
    Field,
    Where,
    case_facts,
    read_where,
    record_facts,
)

_Command = TypeVar("_Command", bound=Callable[..., None])
_Value = TypeVar("_Value")

FORMATS: Final = ("png", "svg", "pdf")
"""The formats of a step's drawing, by the file's extension."""

DRAWN: Final = "memplan explain"
"""The title in a drawing's metadata, by which `explain` recognises its own files."""

HELP_WIDTH: Final = 43
"""Characters beside an option's name on a terminal of 80 columns."""

H100: Final = "h100-sxm"
"""The GPU that is played unless another is named."""


@click.group(cls=Commands, context_settings=SETTINGS)
def main() -> None:
    """Really run plans, with real processes and collectives, beside what memplan predicts."""


_device_option = click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda", "nogpu"]),
    help="Where ranks run; nogpu: on a GPU that is not there, for bytes; auto: on GPUs, else nogpu "
    "with a CUDA build of PyTorch, else on CPU. GPU suites and `run`: auto; other suites: cpu.",
)

_gpu_option = click.option(
    "--gpu", "gpu_name", metavar="NAME", help="With nogpu: which one, as `memplan gpus` names it (h100-sxm)."
)

_record_stream_option = click.option(
    "--record-stream",
    type=click.Choice(get_args(nogpu.RecordStream)),
    default="early",
    show_default=True,
    help="With nogpu: when blocks that another stream has used come back to the allocator, "
    "at once or when the host has waited for it; memplan predicts early.",
)


def _gpus(device: str, gpu_name: str | None, given: Given | None) -> Gpus | None:
    """The GPUs of the ranks, as many as a launcher started ranks or as this machine has; None: CPU."""
    found = None if device in ("cpu", "nogpu") else gpus_here()
    if found is None and (device == "nogpu" or (device == "auto" and nogpu.can_be_built())):
        found = gpus_played(gpu_name or H100)
    elif gpu_name is not None:
        raise InvalidValue(f"--gpu {gpu_name} is for --device nogpu; leave it out.")
    if found is None and device == "cuda":
        raise InvalidValue("--device cuda: PyTorch sees no GPU here; use nogpu, or leave it out.")
    return replace(found, n=given.world_size) if found is not None and given is not None else found


@main.command(cls=PlanCommand, defaults={"torch_version": installed_version()})
@click.option(
    "--model", default="llama-small", show_default=True, help="A preset, a config.json or a suite's model."
)
@click.option("--steps", type=click.IntRange(min=LEAST_STEPS), default=LEAST_STEPS + 1, show_default=True)
@click.option(
    "--timeout-s", type=float, default=120.0, show_default=True, help="Seconds until the ranks are ended."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, as `sweep --out` keeps it.")
@click.option(
    "--events",
    type=click.Path(path_type=Path),
    help="Folder for every allocation; on GPUs, for memory snapshots.",
)
@_device_option
@_gpu_option
@_record_stream_option
@plan_options(dp=None, global_batch=None, seq_len=128, precision="fp32")
def run(
    model: str,
    steps: int,
    timeout_s: float,
    as_json: bool,
    events: Path | None,
    device: str | None,
    gpu_name: str | None,
    record_stream: nogpu.RecordStream,
    global_batch: int | None,
    **plan: Any,
) -> None:
    """Run one plan; under torchrun or srun, on the ranks they started.

    Without --dp these ranks are divided as the other axes leave them; without a launcher dp is 1.
    """
    given = given_ranks(os.environ)
    if plan["dp"] is None:
        plan["dp"] = 1 if given is None else given.dp_left(plan)
    case = replace(_case(model, global_batch, plan), steps=steps, timeout_s=timeout_s)
    case = _returning_blocks(placed(case, _gpus(device or "auto", gpu_name, given)), record_stream)
    if given is not None and given.rank:
        GivenRanks(given).serve()
        return
    if given is None:
        check_room(case, machine_budget())
    if events is not None:
        check_new_folder("--events", events)
    ended = None
    if given is not None:
        with GivenRanks(given) as ranks:
            ended = ranks.run(case)
    elif events is not None and case.torch_device == "cuda":
        ended = run_case(case, snapshots=events)
    elif events is not None:
        ended = run_case(case, keep_events=True)
        dump_events(ended, events)
    record = judged(case, References(), ended=ended)
    if record.outcome == "refused" and not as_json:
        raise PlanRefused(record.reason)
    click.echo(record.to_json() if as_json else report.details(record))
    if record.outcome == "refused":
        sys.exit(2)
    _finish([record])


def _json_text() -> Callable[[Record], str]:
    """Makes the lines of a file of records, one record after the other."""
    lines = RecordLines()
    return lambda record: "\n".join(lines.of(record))


def _case(model: str, global_batch: object, plan: Mapping[str, Any]) -> Case:
    batch = 0 if global_batch is None else checked_count("global_batch", global_batch)
    return Case(
        name=f"{model}, command line", model=model_named(model), plan=plan_of(global_batch=batch, **plan)
    )


@main.command(cls=PlanCommand, defaults={"torch_version": installed_version()})
@click.argument("case", required=False)
@click.option(
    "--model", default="llama-small", show_default=True, help="A preset, a config.json or a suite's model."
)
@click.option("--rank", type=int, help="Which rank; left out: the one that is explained least.")
@click.option(
    "--snapshot",
    type=click.Path(path_type=Path),
    help="Run nothing: explain a file of torch.cuda.memory._dump_snapshot, by rank 0 if --rank is left out.",
)
@click.option(
    "--gpu", "gpu_name", default=H100, show_default=True, metavar="NAME", help="The GPU of the snapshot."
)
@click.option("--plot", type=click.Path(path_type=Path), help="Draw the step into this file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@plan_options(dp=1, global_batch=None, seq_len=128, precision="fp32")
@click.pass_context
def explain(
    context: click.Context,
    /,
    case: str | None,
    model: str,
    rank: int | None,
    snapshot: Path | None,
    gpu_name: str,
    plot: Path | None,
    as_json: bool,
    global_batch: int | None,
    **plan: Any,
) -> None:
    """Attribute each byte at the measured peak to a predicted tensor.

    CASE is a case's name in any suite; or leave it out and give a plan's options, as for `run`.
    """
    from validate.explain import Explanation, explained, ranks_text, snapshot_comparison

    if case is not None:
        _refuse_both(context, ("model", "global_batch", *plan))
    chosen = _as_installed(case_named(case)) if case is not None else _case(model, global_batch, plan)
    check_plan(chosen.model, chosen.plan)
    if rank is not None:
        checked_count("rank", rank, least=0, most=chosen.plan.world_size - 1)
    drawn = output_files(
        {"--plot": (plot, lambda head: not head or DRAWN.encode() in head)},
        inputs=[] if snapshot is None else [snapshot],
    )
    if plot is not None and plot.suffix[1:] not in FORMATS:
        raise InvalidValue(
            f"--plot {shown_path(plot)} says no format; let its name end in {', '.join(FORMATS)}."
        )
    found: list[Explanation] = []
    if snapshot is None:
        check_room(chosen, machine_budget())
    if snapshot is not None:
        on_gpu = replace(chosen, device="cuda", gpu=gpu_name)
        found = [
            explained(f"{snapshot.name}, {chosen.name}", snapshot_comparison(on_gpu, rank or 0, snapshot))
        ]
    else:
        ended = run_case(chosen, keep_events=True)
        if ended.outcome != "ok":
            raise click.ClickException(f"{chosen.name}: {ended.outcome}\n{ended.reason}")
        found = [explained(f"{chosen.name}, rank {r.rank}", comparison(chosen, r)) for r in ended.ranks]
    shown = found[rank] if rank is not None and snapshot is None else min(found, key=lambda e: e.fraction)
    for file in drawn.values():
        image = io.BytesIO()
        shown.plot().savefig(image, format=file.path.suffix[1:], dpi=150, metadata={"Title": DRAWN})
        file.write(image.getvalue())
    if as_json:
        click.echo(json.dumps(shown.to_dict()))
        return
    if len(found) > 1:
        click.echo(ranks_text(found) + "\n")
    click.echo(shown)


def _refuse_both(context: click.Context, names: Iterable[str]) -> None:
    """Raise for a case and options of a plan together."""
    for name in names:
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            flag = f"--{name.replace('_', '-')}"
            raise InvalidValue(f"CASE says its own model and plan; leave out {flag}, or CASE.")


def _unbroken(names: Sequence[str]) -> str:
    """Names wrapped into lines of an option's help, not broken at hyphens."""
    return textwrap.fill(", ".join(names), HELP_WIDTH, break_on_hyphens=False)


def _where_option(known: Mapping[str, Field]) -> Callable[[_Command], _Command]:
    """--where, read before anything runs."""

    def read(_context: click.Context, _parameter: click.Parameter, text: str | None) -> Where | None:
        return None if text is None else read_where(text, known)

    return click.option(
        "--where", callback=read, metavar="EXPR", help=f"Only the cases that this is true of, as {EXAMPLE}."
    )


def _read_by(read: Callable[[str], _Value]) -> Callable[..., _Value | None]:
    """The callback of an option whose text is read by a function of ours."""
    return lambda _context, _parameter, text: None if text is None else read(text)


@main.command()
@click.option(
    "--suite",
    default="quick",
    show_default=True,
    metavar="NAME|FILE.toml",
    help=f"A TOML file, as the README describes it, or one of\n\n\b\n{_unbroken(NAMES)}\n\n",
)
@click.option("--only", default="", metavar="TEXT", help="Only the cases whose name contains this.")
@_where_option(CASE_FIELDS)
@click.option("--part", metavar="I/N", default="1/1", help="Only the i-th of n parts, one for each machine.")
@click.option("--out", type=click.Path(path_type=Path), help="Keep the records in this file.")
@click.option("--resume", is_flag=True, help="Run only the cases that the file lacks.")
@click.option("--retry", is_flag=True, help="With --resume, run again what crashed or took too much.")
@click.option("--list", "as_list", is_flag=True, help="Print the names of the cases, and run nothing.")
@click.option("--dry-run", is_flag=True, help="Print what would be run and what it may take; run nothing.")
@click.option("--anyway", is_flag=True, help="Run what memplan refuses too, to hear PyTorch's own reason.")
@click.option(
    "--cores",
    metavar="N",
    callback=_read_by(lambda text: checked_count("cores", int(text) if text.isdecimal() else text)),
    help="Cores for ranks, two on each; all that this machine has if left out. 1: one case at a time.",
)
@click.option(
    "--memory",
    metavar="BYTES",
    callback=_read_by(read_bytes),
    help="What all cases may take together, as 12GiB; what this machine has free if left out.",
)
@_device_option
@_gpu_option
@_record_stream_option
@click.option(
    "--snapshots",
    type=click.Path(path_type=Path),
    help="On GPUs: a folder for a memory snapshot of every rank, as `explain --snapshot` reads them.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the lines that a file of records has.")
def sweep(
    suite: str,
    only: str,
    where: Where | None,
    part: str,
    out: Path | None,
    resume: bool,
    retry: bool,
    as_list: bool,
    dry_run: bool,
    anyway: bool,
    cores: int | None,
    memory: int | None,
    device: str | None,
    gpu_name: str | None,
    record_stream: nogpu.RecordStream,
    snapshots: Path | None,
    as_json: bool,
) -> None:
    """Run a suite of cases, several at once; under torchrun or srun one after the other, on their ranks."""
    given = given_ranks(os.environ)
    if given is not None and given.rank:
        GivenRanks(given).serve()
        return
    for_gpus = suite in GPU_SUITES or suite in SEARCHES
    gpus = _gpus(device or ("auto" if for_gpus or given else "cpu"), gpu_name, given)
    chosen = _chosen(rounds(suite, gpus), only, where, part, suite)
    moved: Sequence[Case] = [
        _returning_blocks(case if for_gpus else placed(case, gpus), record_stream) for case in chosen(())
    ]
    machine = machine_budget()
    budget = Budget(cores=cores or machine.cores, memory_bytes=memory or machine.memory_bytes)
    if as_list or dry_run:
        for line in (printable(case.name) for case in moved) if as_list else report.plan_lines(moved, budget):
            click.echo(line)
        return
    if snapshots is not None:
        (check_folder if resume else check_new_folder)("--snapshots", snapshots)
    text = _json_text() if as_json else report.row
    records: list[Record] = []
    try:
        with (
            stoppable(),
            open_records(out, resume=resume) if out else nullcontext() as file,
            judging(given, anyway=anyway, snapshots=snapshots) as judge,
        ):
            if not as_json:
                click.echo(_place(suite, gpus) if for_gpus else "", nl=for_gpus)
                if any(case.tensors == "fake" for case in moved):
                    click.echo(f"{suite}: {fake.MEANING}\n")
                click.echo(report.header())
            while moved:
                known, waiting = _divided(moved, file, retry)
                for record in known:
                    click.echo(text(record))
                records += known
                with (
                    progress(waiting) as show,
                    closing(swept(waiting, judge, ONE_AT_A_TIME if given else budget)) as fresh,
                ):
                    for record in fresh:
                        around = environment(Case.from_dict(record.case))
                        kept = replace(record, environment=around)
                        if file is not None:
                            file.append(kept)
                        records.append(kept)
                        show(kept, text(kept))
                searched = chosen(records) if suite in SEARCHES else []
                moved = [_returning_blocks(case, record_stream) for case in searched]
    except Stopped as stop:
        has = f"; {out} has {len(records)} of {len(moved)} cases, --resume runs the others" if out else ""
        click.echo(f"stopped by {stop}{has}", err=True)
        sys.exit(stop.exit_code)
    if not as_json:
        if suite == "gpu-frontier":
            click.echo("\n".join(map(str, frontiers(gpus, records))))
        click.echo(report.summary(records))
    _finish(records)


def _returning_blocks(case: Case, record_stream: nogpu.RecordStream) -> Case:
    """The case with blocks under `record_stream` that come back early or late.

    Raises:
        InvalidValue: for late ones on anything but a GPU that is not there.
    """
    if record_stream == "late" and case.device != "nogpu":
        raise InvalidValue("--record-stream late is for --device nogpu; leave it out.")
    return replace(case, record_stream=record_stream)


def _chosen(cases_of: Rounds, only: str, where: Where | None, part: str, suite: str) -> Rounds:
    """The cases of a suite that pass the options' filters.

    Raises:
        InvalidValue: filters that leave none of the first ones: with the nearest name.
    """

    def chosen(records: Sequence[Record]) -> list[Case]:
        every = [_as_installed(case) for case in cases_of(records)]
        named = [case for case in every if only in case.name]
        cases = [case for case in named if where is None or where(case_facts(case))]
        if not records and not named:
            near = did_you_mean(only, [case.name for case in every])
            raise InvalidValue(
                f"--only {shown_value(only)} is in no case's name of {suite}{near} --list has them."
            )
        if not records and not cases and where is not None:
            raise InvalidValue(
                f"--where {shown_value(where.text)} is true of none of {len(named)} cases of {suite}; use "
                "another expression, or --list to see them."
            )
        return part_of(cases, part)

    return chosen


def _as_installed(case: Case) -> Case:
    """The case under the rules of the PyTorch that runs it, where its engine knows several."""
    if "torch_version" not in plan_fields(case.plan.engine):
        return case
    return replace(case, plan=with_said(case.plan, torch_version=installed_version()))


def _place(suite: str, gpus: Gpus | None) -> str:
    """A sentence on where a GPU suite runs, so that nobody takes CPU numbers for a GPU's."""
    if gpus is None:
        return f"{suite}: PyTorch sees no GPU here, so this is its smallest form, on CPU\n"
    where = f"{suite}: on {gpus.n} x {gpus.name}, {human_bytes(gpus.memory_bytes)} each\n"
    return where if gpus.device == "cuda" else f"{where}{nogpu.MEANING}\n"


def _divided(cases: Iterable[Case], file: RecordFile | None, retry: bool) -> tuple[list[Record], list[Case]]:
    """The records of cases that the file has, and the cases still to be run."""
    done = {Case.from_dict(record.case).identity: record for record in file.known} if file else {}
    known, waiting = [], []
    for case in cases:
        record = done.get(case.identity)
        if record is None or (retry and record.outcome in RETRIED):
            waiting.append(case)
        else:
            known.append(record)
    return known, waiting


@main.command()
@click.option("--out", type=click.Path(path_type=Path), help="Keep the timings in this file.")
@click.option("--resume", is_flag=True, help="Run only the probes that the file lacks.")
@click.option(
    "--device", type=click.Choice(["auto", "cpu", "cuda"]), help="What is timed; auto: a GPU if there is one."
)
@click.option("--json", "as_json", is_flag=True, help="Print the lines that the file of --out has.")
def calibrate(out: Path | None, resume: bool, device: str | None, as_json: bool) -> None:
    """Time a device's matrix products, attention, memory and kernel launches, one operation at a time."""
    gpus = None if device == "cpu" else gpus_here()
    if gpus is None and device == "cuda":
        raise InvalidValue("--device cuda: PyTorch sees no GPU here; leave it out.")
    around = surroundings(gpus)
    said = json.dumps({"environment": around}) if as_json else _place("calibrate", gpus)
    chosen = torch.device("cpu" if gpus is None else "cuda:0")
    try:
        with stoppable():
            for timing in calibrated(chosen, around, out, resume=resume):
                if said:
                    click.echo(said)
                said = ""
                click.echo(timing.to_json() if as_json else str(timing))
    except Stopped as stop:
        click.echo(f"stopped by {stop}; --resume runs the probes that are left", err=True)
        sys.exit(stop.exit_code)


@main.command("report")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@_where_option(RECORD_FIELDS)
@click.option("--csv", type=click.Path(path_type=Path), help="Write one row per case.")
@click.option("--html", type=click.Path(path_type=Path), help="Write a page of its own.")
@click.option("--brief", is_flag=True, help="Only the tables by axis, the worst cases and what failed.")
@click.option("--json", "as_json", is_flag=True, help="Print the lines that a file of records has.")
def report_files(
    files: tuple[Path, ...],
    where: Where | None,
    csv: Path | None,
    html: Path | None,
    brief: bool,
    as_json: bool,
) -> None:
    """What files of records say, each case once: of several records of a case the last one counts.

    FILES that begin with data/ and are not here are those that come with memplan.
    """
    from validate.report import page, tables

    sources = list(found_files(files))
    outputs = output_files(
        {"--csv": (csv, begins_with(tables.CSV_START)), "--html": (html, page.is_page)}, inputs=sources
    )
    every = list(chain.from_iterable(map(read_records, sources)))
    records = merged(every)
    n_superseded = len(every) - len(records)
    if where is not None:
        records = [record for record in records if where(record_facts(record))]
    table = tables.frame(records)
    if "--csv" in outputs:
        outputs["--csv"].write(tables.csv_text(table))
    if "--html" in outputs:
        names = [file.name for file in sources]
        outputs["--html"].write(page.html(records, sources=names, n_superseded=n_superseded))
    if as_json:
        for text in map(_json_text(), records):
            click.echo(text)
    elif outputs:
        click.echo(report.summary(records))
    else:
        click.echo(report.listing(records, tables.rows_of(tables.by_axis(table)), brief=brief))
    if n_superseded and not as_json:
        click.echo(f"{n_superseded} older record(s) of the same cases are left out")


@main.command("rejudge")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="The file to write.")
def rejudge(files: tuple[Path, ...], out: Path) -> None:
    """Compare records with memplan's present predictions, several files in one; nothing is run."""
    with open_records(out, resume=False) as file:
        every = chain.from_iterable(map(read_records, found_files(files)))
        records = [rejudged(record) for record in merged(every)]
        for record in records:
            file.append(record)
    click.echo(report.summary(records))
    _finish(records)


@main.command("published")
@click.argument("file", required=False, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each row.")
@click.option(
    "--engine",
    type=click.Choice(("torch", "megatron", "megatron-deepspeed")),
    default="torch",
    help="Whose runs; torch: PyTorch's.",
)
@click.option("--coverage", is_flag=True, help="How many of all runs memplan expresses, and what is missing.")
def compare_published(file: Path | None, as_json: bool, engine: str, coverage: bool) -> None:
    """Compare published measurements of GPU memory with memplan's predictions; nothing is run.

    FILE has the columns of data/published/memory.csv, which comes with memplan and is read if it is left out,
    as is fits.csv there: runs of which only that they fitted, and how fast they were, is known;
    with --engine megatron, the rows of megatron_ci.jsonl there, and the seconds of megatron_times.csv and
    nemo_times.csv; with megatron-deepspeed, BigScience's runs of bigscience.csv.
    """
    if file is not None and (coverage or engine == "megatron-deepspeed"):
        raise InvalidValue(
            f"{shown_path(file)}: only the rows that come with memplan are read here; leave it out."
        )
    if coverage:
        runs = list(covered.runs())
        click.echo("\n".join(json.dumps(run.to_dict()) for run in runs) if as_json else covered.table(runs))
        return
    if engine == "megatron-deepspeed":
        trials = list(map(bigscience.scored, bigscience.read_rows()))
        lines = "\n".join(json.dumps(one.to_dict()) for one in trials)
        click.echo(lines if as_json else bigscience.table(trials))
        return
    if engine == "megatron":
        found = [megatron_ci.scored(row) for row in megatron_ci.read_rows(file or megatron_ci.ROWS)]
        if as_json:
            click.echo("\n".join(json.dumps(one.to_dict()) for one in found))
            return
        click.echo(megatron_ci.table(found))
        if file is None:
            timed = [megatron_times.timed(row) for row in megatron_times.kept_back()]
            timed += map(nemo_times.timed, nemo_times.kept_back())
            click.echo(f"\n{megatron_times.table(timed)}")
        return
    rows = [memory.compared(row) for row in memory.read_rows(file or memory.ROWS)]
    others = [] if file else [fits.compared(row) for row in memory.read_rows(fits.ROWS)]
    if as_json:
        for row in [*rows, *others]:
            click.echo(json.dumps(row.to_dict()))
    else:
        click.echo("\n\n".join([memory.table(rows), *([fits.table(others)] if others else [])]))
    if not all(row.confirmed for row in [*rows, *others]):
        sys.exit(1)


def _finish(records: list[Record]) -> None:
    """Exit code 1 unless every case was confirmed or refused."""
    if not all(record.confirmed or record.outcome == "refused" for record in records):
        sys.exit(1)


@main.command()
@click.option(
    "--programs", type=click.IntRange(1, 10_000), default=100, show_default=True, help="Of each kind."
)
@click.option(
    "--gpu", "gpu_name", default=H100, show_default=True, metavar="NAME", help="As `memplan gpus` says."
)
@click.option(
    "--out", type=click.Path(path_type=Path), help="Keep what PyTorch's allocator said in this file."
)
def requests(programs: int, gpu_name: str, out: Path | None) -> None:
    """Compare memplan's allocator with PyTorch's caching allocator on random requests, under all settings.

    It is CUDA's own, on a GPU that is not there (see --device nogpu): what it says is compared after each
    request, without a limit, with the process limited, and on a GPU that has no more memory.
    """
    kept = output_files({"--out": (out, begins_with(b'{"environment"'))}, inputs=[])
    lines: list[str] = []
    total = equal = 0
    for record in record_requests(gpu_name, programs):
        lines.append(json.dumps(record, separators=(",", ":")))
        found = n_equal(record)
        total, equal = total + programs, equal + found
        limits = [name for name in ("limit_bytes", "allowed_bytes") if record[name] is not None]
        click.echo(f"{found:5} of {programs} equal  {record['alloc_conf'] or 'defaults'} {' '.join(limits)}")
    for file in kept.values():
        file.write("\n".join(lines) + "\n")
    click.echo(f"{equal} of {total} programs equal after each request")


if __name__ == "__main__":
    command_line(main, "python -m validate")
