"""`memplan trace`."""

from typing import get_args

import click

from memplan.cli.flags import blocks_option, choice_option
from memplan.cli.own_module import module_traced
from memplan.cli.program import Refused, one_line
from memplan.device import DeviceType
from memplan.models import TracedModel
from memplan.text_tables import printable


@click.command("trace")
@click.argument("factory")
@click.option("--out", required=True, metavar="FILE", help="Where to write the trace, as JSON.")
@choice_option("--device", get_args(DeviceType), "cpu", "Whose kernels; cuda needs no GPU.")
@blocks_option()
def command(factory: str, out: str, device: DeviceType, blocks: str | None) -> None:
    """Traces your own torch module; what is written is a MODEL of the other commands, without torch.

    FACTORY is the name of a function, as package.module:factory, that returns (module, example_inputs).
    """
    model = module_traced(factory, device, blocks=blocks)
    if not isinstance(model, TracedModel):
        raise Refused(f"{one_line(factory)} names no function; use package.module:factory.")
    model.save(out)
    click.echo(f"{printable(model.name)}: {model.n_parameters:,} parameters, {model.n_layers} blocks; {out}")
