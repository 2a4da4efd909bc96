"""The command line: `memplan estimate|models|gpus`, each with `--json`."""

import json
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from difflib import get_close_matches
from typing import Any, NoReturn, TypeVar

from memplan.errors import MemplanError
from memplan.estimate import Estimate, estimate
from memplan.hardware import Gpu, gpu, gpu_names
from memplan.models import Model, parameter_count, preset, preset_names, preset_source
from memplan.plan import ENGINES, OPTIMIZERS, PRECISIONS, RECOMPUTES, SCHEDULES
from memplan.tables import estimate_text, ledger_rows, ledger_text, text_table
from memplan.units import TB, TFLOP, GiB

try:
    import click
except ModuleNotFoundError:
    raise SystemExit("memplan's commands need click; install it with: pip install 'memplan[cli]'.") from None

F = TypeVar("F", bound=Callable[..., Any])


class Refused(click.ClickException):
    """What memplan refuses, as one message on stderr and exit code 2."""

    exit_code = 2


class Commands(click.Group):
    """Commands whose refusals are messages; an unknown command is told the nearest one."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except MemplanError as refusal:
            raise Refused(str(refusal)) from None

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if self.get_command(ctx, args[0]) is None:
            _unknown_command(args[0], self.list_commands(ctx))
        return super().resolve_command(ctx, args)


def _unknown_command(name: str, known: Iterable[str]) -> NoReturn:
    near = get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    raise Refused(f"unknown command {name[:80]!r}{hint} Commands: {', '.join(known)}.")


def count_or_text(value: object) -> int | str:
    """A count, or what was written in its place, which memplan then refuses in its own words.

    >>> count_or_text("8"), count_or_text("8.5")
    (8, '8.5')
    """
    text = str(value)
    return int(text) if re.fullmatch(r"[+-]?[0-9]{1,100}", text) else text


def _count(flag: str, text: str, *, default: int | None = None) -> Callable[[F], F]:
    known = default is not None
    return click.option(flag, type=count_or_text, default=default, help=text, metavar="N", show_default=known)


def _choice(flag: str, choices: tuple[str, ...], default: str, text: str) -> Callable[[F], F]:
    return click.option(flag, default=default, metavar="|".join(choices), help=text, show_default=True)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="memplan")
def commands() -> None:
    """Bytes and traffic of a distributed training job, before the GPUs are reserved."""


@commands.command("estimate")
@click.argument("model")
@click.option("--cluster", metavar="NxGPU", help="As in 64xh100-sxm; left out: memory and traffic only.")
@_count("--dp", "Data-parallel ranks; left out: what the cluster has left.")
@_count("--tp", "Tensor-parallel ranks.", default=1)
@_count("--pp", "Pipeline stages.", default=1)
@_count("--zero", "0 DDP, 1 shards optimizer state, 2 gradients too, 3 weights too.", default=0)
@click.option("--sequence-parallel", is_flag=True, help="Divide the sequence over the tensor axis too.")
@_count("--micro-batch", "Sequences per micro-batch and replica.", default=1)
@_count("--global-batch", "Sequences per step; left out: one micro-batch per stage and replica.")
@_count("--seq-len", "Tokens per sequence; left out: the model's context.")
@_choice("--precision", PRECISIONS, "bf16-mixed", "Number formats.")
@_choice("--optimizer", OPTIMIZERS, "adamw", "Optimizer.")
@_choice("--recompute", RECOMPUTES, "none", "Which activations are computed again.")
@_choice("--schedule", SCHEDULES, "1f1b", "Order of micro-batches in a pipeline.")
@_choice("--engine", ENGINES, "torch", "Whose accounting.")
@click.option("--ledger", is_flag=True, help="Also every named tensor at the worst instant.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
def estimate_command(model: str, *, ledger: bool, as_json: bool, **asked: Any) -> None:
    """What a plan asks of each GPU.

    MODEL is a name (see `memplan models`) or the path of a Hugging Face config.json.
    """
    result = estimate(model, **asked)
    rows = _ledger_rows(result) if ledger else []
    if as_json:
        _print_json(result.to_dict() | ({"ledger": rows} if ledger else {}))
        return
    click.echo(estimate_text(result))
    if ledger:
        click.echo(f"\nLedger of stage {result.worst.stage} at its worst instant\n{ledger_text(rows)}")


def _ledger_rows(result: Estimate) -> list[dict[str, Any]]:
    return ledger_rows(result.worst.alive)


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
    click.echo(text_table(rows, "<>>>>>>>", flexible=0))


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
    click.echo(text_table(rows, "<>>>><>", flexible=5))


def _model_dict(model: Model) -> dict[str, Any]:
    family = type(model).__name__.lower()
    source = preset_source(model.name)
    return {"family": family, **asdict(model), "n_parameters": parameter_count(model), "source": source}


def _model_row(model: Model) -> tuple[str, ...]:
    sizes = (model.n_layers, model.d_model, model.n_heads, model.n_kv_heads, model.vocab_size)
    return (model.name, f"{parameter_count(model):,}", *map(str, sizes), str(model.max_seq_len))


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
    """The entry point: whatever the terminal cannot show is written as an escape."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")
    commands(prog_name="memplan")
