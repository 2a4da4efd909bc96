"""The command line: `memplan estimate|budget|search|advise|compare|models|gpus`, each with `--json`."""

import errno
import gc
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Final, NoReturn, TypeVar, get_args

from memplan.advice import COLUMNS as ADVICE_COLUMNS
from memplan.advice import advice_text, advise
from memplan.budget import budget
from memplan.command import estimate_command as command_of
from memplan.comparison import compared_text, why
from memplan.device import DeviceType
from memplan.engines.base import ENGINES
from memplan.engines.options import USUAL_ENGINE, engine_of_option, plan_fields
from memplan.errors import InvalidValue, MemplanError, PlanRefused, did_you_mean, unknown_name
from memplan.estimate import device_of, estimate
from memplan.fields import (
    Choice,
    Count,
    Counts,
    Field,
    Flag,
    Name,
    Number,
    Registered,
    count_or_text,
    described_fields,
    number_or_text,
)
from memplan.files import shown_path
from memplan.hardware import DEFAULT_MARGIN, Gpu, gpu, gpu_names, resolve_cluster
from memplan.models import (
    Model,
    TracedModel,
    model_dict,
    parameter_count,
    preset,
    preset_names,
    preset_source,
)
from memplan.plan import FIELDS, Plan
from memplan.search.judge import OBJECTIVES
from memplan.search.search import KEEP, QUESTIONS, searched
from memplan.search.table import columns_of, search_dict, search_rows
from memplan.search.text import SHOWN, nothing_runs, search_text
from memplan.tables import estimate_text, ledger_rows, ledger_text
from memplan.text_tables import csv_of, printable, text_table
from memplan.units import TB, TFLOP, GiB
from memplan.version import versioned

try:
    import click
except ModuleNotFoundError:
    raise SystemExit("memplan's commands need click; install it with: pip install 'memplan[cli]'.") from None

F = TypeVar("F", bound=Callable[..., Any])

SETTINGS: Final = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
"""Settings of every command, also of `validate`."""


WHOLE: Final = 1000
"""Characters of a command's first sentence: click would cut it off after 45."""


NO_COMMAND: Final = getattr(click.exceptions, "NoArgsIsHelpError", ())
"""What click raises, from 8.2 on, to print the help of a group without a command."""


class Refused(click.ClickException):
    """An error of memplan's as one message on stderr, with exit code 2."""

    exit_code = 2


class Commands(click.Group):
    """Commands that print errors as one line on stderr, and suggest a name for an unknown command."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        try:
            return super().make_context(*args, **kwargs)
        except click.UsageError as error:
            if isinstance(error, NO_COMMAND):
                raise
            raise _refused(error) from None

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except MemplanError as refusal:
            raise Refused(one_line(str(refusal))) from None
        except click.UsageError as error:
            raise _refused(error) from None
        except OSError as error:
            if error.errno == errno.EPIPE or not error.strerror:
                raise
            where = "" if error.filename is None else f"{shown_path(error.filename)}: "
            raise Refused(f"{where}{error.strerror}.") from None

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if self.get_command(ctx, args[0]) is None:
            name, known = args[0], self.list_commands(ctx)
            near = did_you_mean(name, known)
            raise Refused(f"unknown command {name[:80]!r}{near} Commands: {', '.join(known)}.")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        known = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        rows = [(name, each.get_short_help_str(limit=WHOLE)) for name, each in known if each is not None]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def _refused(error: click.UsageError) -> Refused:
    """click's message for a wrong flag or argument, and the command that prints help, in one line."""
    where = "" if error.ctx is None else f" Try '{error.ctx.command_path} -h' for help."
    return Refused(one_line(f"{error.format_message()}{where}"))


def one_line(text: str) -> str:
    """A message without line breaks, and without what could move a terminal's cursor.

    >>> one_line("tp=3 is refused;  use 1")
    'tp=3 is refused; use 1'
    """
    return printable(" ".join(text.split()))


def _count(flag: str, text: str, *, required: bool = False) -> Callable[[F], F]:
    return click.option(flag, type=count_or_text, required=required, help=text, metavar="N")


def _choice(flag: str, choices: tuple[str, ...], default: str | None, text: str) -> Callable[[F], F]:
    shown = default is not None
    return click.option(flag, default=default, metavar="|".join(choices), help=text, show_default=shown)


def cluster_options(*, required: bool = True, text: str = "As in 64xh100-sxm.") -> Callable[[F], F]:
    """The cluster's flags: its name, GPUs per node, network and margin."""
    return _all_of(
        [
            click.option("--cluster", required=required, metavar="NxGPU", help=text),
            _count("--gpus-per-node", "GPUs in a node; left out: as such GPUs are usually built in."),
            click.option(
                "--network",
                metavar="RATE",
                help="Each GPU's share of the network between nodes, as 200Gbit/s or 25GB/s.",
            ),
            click.option(
                "--margin",
                type=number_or_text,
                metavar="X",
                help=f"Part of usable memory that a plan which fits leaves free; left out: {DEFAULT_MARGIN}.",
            ),
        ]
    )


def implementation_option() -> Callable[[F], F]:
    """The flag that says whose code trains a model."""
    return click.option(
        "--implementation",
        metavar="NAME",
        help="Whose code trains the model: reference, torchtitan, ...; left out: its family's default.",
    )


def plan_options(*left_out: str, **defaults: Any) -> Callable[[F], F]:
    """The flags of the fields of a Plan, for a command; `defaults` where they differ from the plan's."""
    told = {name: _default(name) for name in FIELDS} | defaults
    chosen = [name for name in FIELDS if name not in left_out]
    return _all_of([_plan_option(name, FIELDS[name], told[name]) for name in chosen])


METAVARS: Final[dict[type[Field], str]] = {Count: "N", Counts: "N,N,...", Number: "X", Name: "NAME"}
"""The placeholder for a field's value in the help of its flag."""


def _plan_option(name: str, field: Field, default: Any) -> Callable[[F], F]:
    """The flag of a field that takes one value."""
    flag, told = _flag(name), {"default": default, "help": field.help, "show_default": default is not None}
    match field:
        case Flag() if default:
            return click.option(f"{flag}/--no{flag[1:]}", **told)
        case Flag():
            return click.option(flag, is_flag=True, help=field.help)
        case Choice() | Registered():
            return click.option(flag, metavar="|".join(field.choices), **told)
    return click.option(flag, type=field.parsed, metavar=METAVARS[type(field)], **told)


def search_options() -> Callable[[F], F]:
    """The flags of a search for a plan's fields."""
    searched = [name for name in FIELDS if name not in ("global_batch", "seq_len")]
    return _all_of([_search_option(name, FIELDS[name], _default(name)) for name in searched])


def _search_option(name: str, field: Field, default: Any) -> Callable[[F], F]:
    """The flag of a search for a field, which takes values and ranges between commas: 1-4,8."""
    flag, text = _flag(name), field.text
    if isinstance(field, Choice | Registered):
        text += f": {', '.join(field.choices)}"
    if not field.varied:
        text += f"; left out: {field.left_out or default}"
    match field:
        case Flag():
            return click.option(f"{flag}/--no{flag[1:]}", default=None, help=f"{text}.")
        case Choice() | Registered() if name != "engine":
            return click.option(flag, type=_several(str), metavar="NAME,...", help=f"{text}.")
        case Count():
            return click.option(flag, type=_ranges, metavar="N,N-N,...", help=f"{text}.")
        case Number():
            return click.option(flag, type=_several(number_or_text), metavar="X,X,...", help=f"{text}.")
    return _plan_option(name, field, default)


def _default(name: str) -> Any:
    return Plan.__dataclass_fields__[name].default


class PlanCommand(click.Command):
    """A command with flags for a plan's fields and for the options of the engine named by `--engine`.

    `defaults`: options whose default here differs from the engine's. `option`: makes an option's flag.
    """

    def __init__(
        self,
        *args: Any,
        defaults: Mapping[str, Any] | None = None,
        option: Callable[[str, Field, Any], Callable[[Any], Any]] = _plan_option,
        **attributes: Any,
    ) -> None:
        super().__init__(*args, **attributes)
        self.defaults, self.option = defaults or {}, option

    def options_of(self, engine: str) -> list[click.Parameter]:
        """The flags of an engine's own options; none for an unknown engine, which is refused later."""
        kind = ENGINES.named(engine).options if engine in ENGINES.names() else None
        flags = click.Command(None)
        if kind is not None:
            for name, field in described_fields(kind).items():
                default = self.defaults.get(name, kind.__dataclass_fields__[name].default)
                self.option(name, field, default)(flags)
        return flags.params

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        said = re.findall(r"(?:^| )--engine[= ](\S+)", " ".join(args))
        ctx.meta["engine"] = engine = [USUAL_ENGINE, *said][-1]
        ctx.meta["options"] = self.options_of(engine)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            owner = engine_of_option(error.option_name.strip("-").removeprefix("no-").replace("-", "_"))
            if owner is None:
                raise
            whose = f"{error.option_name} is an option of engine {owner}, not of {engine}"
            raise Refused(f"{whose}; leave it out, or use --engine {owner}.") from None

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return [*super().get_params(ctx), *ctx.meta.get("options", ())]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        own = ctx.meta.pop("options")
        super().format_options(ctx, formatter)
        ctx.meta["options"] = own
        if own:
            with formatter.section(f"Options of engine {ctx.meta['engine']}"):
                formatter.write_dl([row for each in own if (row := each.get_help_record(ctx)) is not None])


def _all_of(options: Sequence[Callable[[Any], Any]]) -> Callable[[F], F]:
    def decorated(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return decorated


def _several(parsed: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    """Parses values between commas."""
    return lambda text: tuple(map(parsed, text.split(",")))


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _ranges(text: str) -> tuple[int | str, ...]:
    """Counts and ranges of counts; the text of what is neither, to be refused.

    >>> _ranges("1-4,8"), _ranges("1,8-4,8-x")
    ((1, 2, 3, 4, 8), (1, '8-4', '8-x'))
    """
    found: list[int | str] = []
    for part in text.split(","):
        ends = re.fullmatch(r"([0-9]{1,7})-([0-9]{1,7})", part)
        counts = range(0) if ends is None else range(int(ends[1]), int(ends[2]) + 1)
        found += counts or [count_or_text(part)]
    return tuple(found)


COUNTS: Final = _several(count_or_text)


@click.group(cls=Commands, context_settings=SETTINGS)
@click.version_option(package_name="memplan")
def commands() -> None:
    """Bytes, traffic and rough time of a distributed training job, before the GPUs are reserved."""


@commands.command("trace")
@click.argument("factory")
@click.option("--out", required=True, metavar="FILE", help="Where to write the trace, as JSON.")
@_choice("--device", get_args(DeviceType), "cpu", "Whose kernels; cuda needs no GPU.")
def trace_command(factory: str, out: str, device: DeviceType) -> None:
    """Traces your own torch module; what is written is a MODEL of the other commands, without torch.

    FACTORY is the name of a function, as package.module:factory, that returns (module, example_inputs).
    """
    model = _module_traced(factory, device)
    if not isinstance(model, TracedModel):
        raise Refused(f"{one_line(factory)} names no function; use package.module:factory.")
    model.save(out)
    click.echo(f"{printable(model.name)}: {model.n_parameters:,} parameters, {model.n_layers} blocks; {out}")


def _module_traced(name: str, device: Any, cluster: Any = None, **options: Any) -> str | Model:
    """The model of `package.module:factory`, traced for the device or the cluster's; other text unchanged."""
    if re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", name) is None:
        return name
    try:
        from memplan.tracing.factory import traced_from_factory  # imports torch, which the module needs too
    except ModuleNotFoundError as missing:
        raise Refused(f"{one_line(str(missing))}; to trace a module: pip install 'memplan[trace]'.") from None
    device = device or device_of(resolve_cluster(cluster)).type
    return traced_from_factory(name, device=device, **options)


@commands.command("estimate", cls=PlanCommand)
@click.argument("model")
@implementation_option()
@cluster_options(required=False, text="As in 64xh100-sxm; left out: memory and traffic only.")
@plan_options(dp=None, global_batch=None, seq_len=None)
@_choice("--device", get_args(DeviceType), None, "Whose rules; left out: the cluster's, or cuda.")
@click.option("--ledger", is_flag=True, help="Also every named tensor at the worst instant.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
def estimate_command(model: str, *, ledger: bool, as_json: bool, **asked: Any) -> None:
    """What a plan asks of each GPU.

    MODEL is a name (see `memplan models`), the path of a Hugging Face config.json or of a trace, or
    package.module:factory, the name of a function that returns your own module and its example inputs.
    """
    module = _module_traced(model, asked["device"], asked["cluster"], precisions=(asked["precision"],))
    result = estimate(module, **asked)
    worst = result.worst
    tables = {"ledger": worst.alive} | ({"host_ledger": worst.host_alive} if result.plan.offload else {})
    rows = {name: ledger_rows(alive) for name, alive in tables.items() if ledger}
    if as_json:
        _print_json(result.to_dict() | rows)
        return
    click.echo(estimate_text(result))
    for name, found in rows.items():
        where = f"stage {worst.stage}" + (", on the host," if name == "host_ledger" else "")
        click.echo(f"\nLedger of {where} at its worst instant\n{ledger_text(found)}")


@commands.command("budget", cls=PlanCommand)
@click.argument("model")
@implementation_option()
@cluster_options()
@plan_options(dp=None, global_batch=None, seq_len=None)
@click.option("--tokens", type=number_or_text, metavar="N", help="As in 15e12; left out: 20 a parameter.")
@click.option("--price-per-gpu-hour", type=number_or_text, metavar="X", help="In any currency.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
def budget_command(model: str, *, tokens: Any, price_per_gpu_hour: Any, as_json: bool, **asked: Any) -> None:
    """Days, GPU-hours, money and energy of a whole training.

    MODEL is a name (see `memplan models`) or the path of a Hugging Face config.json.
    """
    result = budget(estimate(model, **asked), tokens=tokens, price_per_gpu_hour=price_per_gpu_hour)
    if as_json:
        _print_json(result.to_dict())
    else:
        click.echo(str(result))


@commands.command("search", cls=PlanCommand, option=_search_option)
@click.argument("model")
@implementation_option()
@cluster_options(text="As in 64xh100-sxm; all of it is used, unless for the objective gpus.")
@click.option("--global-batch", type=COUNTS, required=True, metavar="N,N,...", help="Sequences per step.")
@click.option(
    "--seq-len", type=COUNTS, metavar="N,N,...", help="Tokens per sequence; left out: the model's context."
)
@click.option("--tp-across-nodes", is_flag=True, help="Also tensor axes that are on several nodes.")
@_choice(
    "--objective",
    (*OBJECTIVES, *QUESTIONS),
    "speed",
    "speed: most tokens per second; memory: least bytes; micro_batch: the largest; front: all plans that "
    "none beats in both speed and memory; gpus: the fewest of the cluster that suffice; seq_len: the longest "
    "sequence (the last two with micro-batches of 1 unless told otherwise).",
)
@search_options()
@_count(
    "--keep",
    "How many of the plans that fit or may fit to show, else of the nearest; left out: "
    f"{SHOWN}, as JSON or CSV {KEEP}.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
@click.option("--csv", "as_csv", is_flag=True, help="The kept plans as CSV instead of text.")
def search_command(model: str, *, as_json: bool, as_csv: bool, **asked: Any) -> None:
    """The best plans of a cluster, of all there are.

    MODEL is a name (see `memplan models`) or the path of a Hugging Face config.json. Flags of a plan take one
    value or several, as in 1-4,8; those whose help names no default take, if left out, every value that makes
    a difference.
    """
    _check_format(as_json, as_csv)
    asked = {name: value for name, value in asked.items() if value is not None}
    asked.setdefault("keep", KEEP if as_json or as_csv else SHOWN)
    with _counting() as progress:
        result = searched(model, progress=progress, **asked)
    from memplan.search.replays import replay_ahead  # multiprocessing is slow to import

    replay_ahead(result)
    if as_csv:
        _print_csv(search_rows(result, model), columns_of(result))
    elif as_json:
        _print_json(search_dict(result, model))
    reason = nothing_runs(result)
    if reason:
        raise PlanRefused(reason)
    if not as_csv and not as_json:
        click.echo(search_text(result, model))


@commands.command("advise", cls=PlanCommand)
@click.argument("model")
@implementation_option()
@cluster_options()
@plan_options(dp=None, global_batch=None, seq_len=None)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
@click.option("--csv", "as_csv", is_flag=True, help="The changes as CSV instead of text.")
def advise_command(model: str, *, as_json: bool, as_csv: bool, **asked: Any) -> None:
    """What to change in a plan that does not fit, and what each change costs.

    MODEL is a name (see `memplan models`) or the path of a Hugging Face config.json.
    """
    _check_format(as_json, as_csv)
    with _counting() as progress:
        advice = advise(estimate(model, **asked), progress)
    if as_csv:
        _print_csv(advice.rows(model), ADVICE_COLUMNS)
    elif as_json:
        _print_json(advice.to_dict(model))
    else:
        click.echo(advice_text(advice, model))


@commands.command("compare")
@click.argument("model")
@click.argument("plan_a")
@click.argument("plan_b")
@implementation_option()
@cluster_options()
@_count("--global-batch", "Sequences per step.", required=True)
@_count("--seq-len", "Tokens per sequence; left out: the model's context.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
def compare_command(model: str, plan_a: str, plan_b: str, *, as_json: bool, **asked: Any) -> None:
    """Which of two plans is better, and why.

    A plan is fields and values, as in "tp=8,pp=4,zero=1,recompute=full"; dp is what the cluster has left.
    """
    a, b = (estimate(model, **{**asked, **fields_of(text)}) for text in (plan_a, plan_b))
    if as_json:
        plans = {
            name: each.to_dict() | {"command": command_of(each, model)} for name, each in (("a", a), ("b", b))
        }
        _print_json(versioned({**plans, "why": why(a, b)}))
    else:
        click.echo(compared_text(a, b, model))


def fields_of(text: str) -> dict[str, Any]:
    """The fields of a plan, as text. What begins with a digit is no name, and belongs to the value before it.

    >>> fields_of("tp=8,recompute=full,sequence_parallel,layers_per_stage=3,5")
    {'tp': 8, 'recompute': 'full', 'sequence_parallel': True, 'layers_per_stage': (3, 5)}

    Raises:
        UnknownName: a name that is no field of a plan.
        InvalidValue: a field with two values.
    """
    parts = [part.partition("=") for part in filter(None, re.split(r"[,\s]+(?![\d+,\s])", text))]
    pairs = [(name.replace("-", "_"), value) for name, _, value in parts]
    said = dict(pairs)
    for name, value in pairs:
        if said[name] != value:
            raise InvalidValue(f"{name} has two values, {value!r} and {said[name]!r}; use one of them.")
    known = plan_fields(said.get("engine", USUAL_ENGINE))
    for name in said:
        if name not in known:
            raise unknown_name("field of a plan", name, known)
    return {name: known[name].parsed(value) for name, value in said.items()}


@contextmanager
def _counting() -> Iterator[Callable[[int], None] | None]:
    """A progress bar on stderr, if that is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    yield lambda n: click.echo(f"\r\033[K{n:,} plans", nl=False, err=True)
    click.echo("\r\033[K", nl=False, err=True)


def _check_format(as_json: bool, as_csv: bool) -> None:
    if as_json and as_csv:
        raise Refused("--json and --csv are two formats of the same output; use one of them.")


def _print_csv(rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> None:
    click.echo(csv_of(rows, columns), nl=False)


@commands.command("models")
@click.option("--json", "as_json", is_flag=True, help="A JSON list instead of text.")
def models_command(as_json: bool) -> None:
    """The models known by name."""
    models = [preset(name) for name in preset_names()]
    if as_json:
        _print_json([_model_dict(model) for model in models])
        return
    rows: list[tuple[str, ...]] = [
        ("model", "parameters", "layers", "d_model", "heads", "kv", "vocab", "context")
    ]
    rows += [_model_row(model) for model in models]
    click.echo(text_table(rows, "<>>>>>>>", flexible=[0]))


@commands.command("gpus")
@click.option("--json", "as_json", is_flag=True, help="A JSON list instead of text.")
def gpus_command(as_json: bool) -> None:
    """The GPUs known by name: capacities and peak rates of their datasheets."""
    known = [gpu(name) for name in gpu_names()]
    if as_json:
        _print_json([asdict(each) for each in known])
        return
    rows: list[tuple[str, ...]] = [
        ("gpu", "GiB", "usable GiB", "TB/s", "bf16 TFLOP/s", "link", "GB/s one way")
    ]
    rows += [_gpu_row(each) for each in known]
    click.echo(text_table(rows, "<>>>><>", flexible=[5]))


def _model_dict(model: Model) -> dict[str, Any]:
    n_parameters, source = parameter_count(model), preset_source(model.name)
    return {**model_dict(model), "n_parameters": n_parameters, "source": source}


def _model_row(model: Model) -> tuple[str, ...]:
    """A model's sizes for a table; a dash where its family has none."""
    sizes = model.sizes() | {"n_layers": model.n_blocks}
    names = ("n_layers", "d_model", "n_heads", "n_kv_heads", "vocab_size", "max_seq_len")
    return (model.name, f"{parameter_count(model):,}", *[str(sizes.get(name, "-")) for name in names])


def _gpu_row(each: Gpu) -> tuple[str, ...]:
    return (
        each.name,
        _in(GiB, each.memory_bytes, 0),
        _in(GiB, each.usable_bytes, 2),
        _in(TB, each.memory_bytes_per_s, 2),
        _in(TFLOP, each.bf16_flops_per_s, 1),
        each.link.name,
        _in(10**9, each.link.bytes_per_s, 0),
    )


def _in(unit: int, value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value / unit:.{digits}f}"


def _print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2))


def main() -> None:
    """The entry point of `memplan`.

    Garbage collection is off: a command ends before cycles of objects matter, and it takes a tenth of a
    search.
    """
    gc.disable()
    command_line(commands, "memplan")


def command_line(group: click.Group, name: str) -> NoReturn:
    """Runs commands as a program and ends it.

    Whatever the terminal cannot show is written as an escape; an output that cannot be written is one line on
    stderr and exit code 2; one that nobody reads any more ends the program without a word.
    """
    if sys.stdout is None:
        print("Error: the output cannot be written (it is closed).", file=sys.stderr)
        sys.exit(2)
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")
    try:
        try:
            group(prog_name=name)
            code: Any = 0
        except SystemExit as end:
            code = end.code
        sys.stdout.flush()
    except OSError as error:
        # What is left in the buffer has nowhere to go: Python would complain of it when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno != errno.EPIPE:
            print(f"Error: the output cannot be written ({error.strerror}).", file=sys.stderr)
        code = 1 if error.errno == errno.EPIPE else 2
    sys.exit(code)
