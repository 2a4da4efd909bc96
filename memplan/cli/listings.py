"""`memplan models` and `memplan gpus`."""

from dataclasses import asdict
from itertools import groupby
from math import gcd
from typing import Any, Final

import click

from memplan.checks import divisors
from memplan.cli.output import print_json
from memplan.engines.checks import check_plan
from memplan.errors import MemplanError
from memplan.hardware import Gpu, gpu, gpu_names
from memplan.models import Model, model_dict, parameter_count, preset, preset_names, preset_source
from memplan.models.families import implementations_of
from memplan.plan import Plan
from memplan.text_tables import text_table, wrapped
from memplan.units import TB, TFLOP, GiB

DIVIDED: Final = (
    "zero, tp, pp: how plans may divide the model as the code named first trains it: ZeRO stages, the most "
    "tensor-parallel ranks (any divisor of them too), the most pipeline ranks; -: not at all. memplan models "
    "--json has all sizes and sources."
)
"""What the last columns of `memplan models` mean."""


@click.command("models")
@click.option("--json", "as_json", is_flag=True, help="A JSON list instead of text.")
def models_command(as_json: bool) -> None:
    """The models known by name, and how plans may divide them."""
    models = [preset(name) for name in preset_names()]
    if as_json:
        print_json([_model_dict(model) for model in models])
        return
    rows: list[tuple[str, ...]] = [
        ("model", "parameters", "layers", "d_model", "context", "zero", "tp", "pp")
    ]
    rows += [_model_row(model) for model in models]
    head, *lines = text_table(rows, "<>>>>>>>").splitlines()
    parts = [head]
    for codes, group in groupby(zip(models, lines, strict=True), lambda each: _codes(each[0])):
        parts.append("\n".join([codes, *(line for _, line in group)]))
    click.echo("\n\n".join([*parts, wrapped(DIVIDED)]))


@click.command("gpus")
@click.option("--json", "as_json", is_flag=True, help="A JSON list instead of text.")
def gpus_command(as_json: bool) -> None:
    """The GPUs known by name: capacities and peak rates of their datasheets."""
    known = [gpu(name) for name in gpu_names()]
    if as_json:
        print_json([asdict(each) for each in known])
        return
    rows: list[tuple[str, ...]] = [
        ("gpu", "GiB", "usable GiB", "TB/s", "bf16 TFLOP/s", "link", "GB/s one way")
    ]
    rows += [_gpu_row(each) for each in known]
    click.echo(text_table(rows, "<>>>><>", flexible=[5]))


def _model_dict(model: Model) -> dict[str, Any]:
    n_parameters, source = parameter_count(model), preset_source(model.name)
    known = {"n_parameters": n_parameters, "source": source, "divisions": divisions(model)}
    return {**model_dict(model), **known}


def _codes(model: Model) -> str:
    """A model's family and whose code may train it, the default first."""
    codes = dict.fromkeys((model.implementation, *implementations_of(model)))
    return f"{model.family} ({', '.join(codes)})" if model.family not in codes else model.family


def _model_row(model: Model) -> tuple[str, ...]:
    """A model's sizes for a table, and how far plans may divide it; a dash where its family has no such."""
    sizes = model.sizes() | {"n_layers": model.n_blocks}
    shown = [str(sizes.get(name, "-")) for name in ("n_layers", "d_model", "max_seq_len")]
    return (model.name, f"{parameter_count(model):,}", *shown, *divisions(model).values())


def divisions(model: Model) -> dict[str, str]:
    """How plans may divide a model, by the rules that refuse a plan: its ZeRO stages, the largest tp and pp.

    >>> divisions(preset("llama-3-8b")), divisions(preset("resnet-50"))
    ({'zero': '0-3', 'tp': '8', 'pp': '32'}, {'zero': '0-1', 'tp': '-', 'pp': '-'})
    """
    most_tp = gcd(*model.sizes_over_tp.values())
    tried = {"zero": range(4), "tp": divisors(most_tp), "pp": range(1, model.n_blocks + 1)}
    most = {
        axis: max([n for n in degrees if _runs(model, **{"dp": 2, axis: n})], default=1)
        for axis, degrees in tried.items()
    }
    zero = f"0-{most.pop('zero')}"
    return {"zero": zero} | {axis: "-" if n == 1 else str(n) for axis, n in most.items()}


def _runs(model: Model, **degrees: Any) -> bool:
    try:
        check_plan(model, Plan(seq_len=model.max_seq_len, **degrees))
    except MemplanError:
        return False
    return True


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
