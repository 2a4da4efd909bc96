"""`memplan export`."""

from pathlib import Path
from typing import Any, get_args

import click

from memplan.cli.flags import PlanCommand, choice_option, cluster_options, model_options, plan_options
from memplan.device import DeviceType
from memplan.estimate import estimate
from memplan.launchers import LAUNCHERS, exported
from memplan.text_tables import printable


@click.command("export", cls=PlanCommand)
@click.argument("model")
@choice_option("--to", LAUNCHERS.names(), "torchrun", "The program that is to train.")
@click.option("--out", metavar="FILE", help="Where to write it; left out: to the terminal.")
@model_options()
@cluster_options(required=False, text="As in 64xh100-sxm; left out: one node.")
@plan_options(dp=None, global_batch=None, seq_len=None)
@choice_option("--device", get_args(DeviceType), None, "What it runs on; left out: the cluster's, or cuda.")
def command(model: str, *, to: str, out: str | None, **asked: Any) -> None:
    """A plan as a script, a command or a configuration that trains it.

    MODEL is a name (see `memplan models`) or the path of a Hugging Face config.json. What a program does
    otherwise than the plan says is in the file, and on stderr.
    """
    found = exported(estimate(model, **asked), to, model)
    if out is None:
        click.echo(found.text, nl=False)
    else:
        Path(out).write_text(found.text, encoding="utf-8")
        click.echo(f"{printable(out)}: for {to}")
    for note in found.notes:
        click.echo(f"Note: {note}", err=True)
