"""`memplan trace`."""

from typing import get_args

import click

from memplan.checks import LARGEST_CLUSTER, checked_count
from memplan.cli.flags import blocks_option, choice_option, count_option
from memplan.cli.own_module import model_of
from memplan.cli.program import Refused, one_line
from memplan.device import DeviceType
from memplan.mesh import DIVIDING, degrees_text, with_several
from memplan.models import TracedModel, resolve
from memplan.text_tables import printable


@click.command("trace")
@click.argument("model")
@click.option("--out", required=True, metavar="FILE", help="Where to write the trace, as JSON.")
@choice_option("--device", get_args(DeviceType), "cuda", "Whose kernels; neither needs a GPU.")
@blocks_option()
@count_option("--tp", "Tensor-parallel ranks that a module of transformers is divided over; left out: none.")
@count_option("--cp", "Context-parallel ranks that divide its sequences; left out: none.")
@count_option("--ep", "Expert-parallel ranks that its experts are divided over; left out: none.")
def command(model: str, out: str, device: DeviceType, blocks: str | None, **degrees: int | None) -> None:
    """Traces a torch module; what is written is a MODEL of the other commands, without torch.

    MODEL is package.module:factory, a function as of `memplan estimate`, or a config.json that is traced.
    """
    asked = {axis: n for axis in DIVIDING if (n := degrees[axis]) is not None}
    mesh = with_several(**{axis: checked_count(axis, n, most=LARGEST_CLUSTER) for axis, n in asked.items()})
    traced = resolve(model_of(model, blocks), device=device, mesh=mesh)
    if not isinstance(traced, TracedModel):
        raise Refused(
            f"{one_line(model)} is planned by rules and needs no trace; use package.module:factory, or the "
            "config.json of an architecture without rules."
        )
    traced.save(out)
    sizes = f"{traced.n_parameters:,} parameters, {traced.n_layers} blocks"
    divided = f" over {degrees_text(traced.mesh)}" if traced.mesh else ""
    click.echo(f"{printable(traced.name)}{divided}: {sizes}, for {traced.device}; {out}")
