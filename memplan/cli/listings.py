"""`memplan models` and `memplan gpus`."""

from dataclasses import asdict
from typing import Any

import click

from memplan.cli.output import print_json
from memplan.hardware import Gpu, gpu, gpu_names
from memplan.models import Model, model_dict, parameter_count, preset, preset_names, preset_source
from memplan.text_tables import text_table
from memplan.units import TB, TFLOP, GiB


@click.command("models")
@click.option("--json", "as_json", is_flag=True, help="A JSON list instead of text.")
def models_command(as_json: bool) -> None:
    """The models known by name."""
    models = [preset(name) for name in preset_names()]
    if as_json:
        print_json([_model_dict(model) for model in models])
        return
    rows: list[tuple[str, ...]] = [
        ("model", "parameters", "layers", "d_model", "heads", "kv", "vocab", "context")
    ]
    rows += [_model_row(model) for model in models]
    click.echo(text_table(rows, "<>>>>>>>", flexible=[0]))


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
