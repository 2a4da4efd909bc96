"""`memplan trace`."""

from typing import get_args

import click

from memplan.cli.flags import choice_option
from memplan.cli.own_module import model_of
from memplan.cli.program import Refused, one_line
from memplan.device import DeviceType
from memplan.models import TracedModel, resolve
from memplan.text_tables import printable


@click.command("trace")
@click.argument("model")
@click.option("--out", required=True, metavar="FILE", help="Where to write the trace, as JSON.")
@choice_option("--device", get_args(DeviceType), "cuda", "Whose kernels; neither needs a GPU.")
def command(model: str, out: str, device: DeviceType) -> None:
    """Traces a torch module; what is written is a MODEL of the other commands, without torch.

    MODEL is package.module:factory, a function as of `memplan estimate`, or a config.json that is traced.
    """
    traced = resolve(model_of(model), device=device)
    if not isinstance(traced, TracedModel):
        raise Refused(
            f"{one_line(model)} is planned by rules and needs no trace; use package.module:factory, or the "
            "config.json of an architecture without rules."
        )
    traced.save(out)
    blocks = f"{traced.n_parameters:,} parameters, {traced.n_layers} blocks"
    click.echo(f"{printable(traced.name)}: {blocks}, for {traced.device}; {out}")
