"""`memplan budget`."""

from typing import Any

import click

from memplan.budget import budget
from memplan.cli.flags import PlanCommand, cluster_options, model_options, plan_options
from memplan.cli.output import print_json
from memplan.cli.own_module import model_of
from memplan.estimate import estimate
from memplan.fields import number_or_text


@click.command("budget", cls=PlanCommand)
@click.argument("model")
@model_options()
@cluster_options()
@plan_options(dp=None, global_batch=None, seq_len=None)
@click.option("--tokens", type=number_or_text, metavar="N", help="As in 15e12; left out: 20 a parameter.")
@click.option("--price-per-gpu-hour", type=number_or_text, metavar="X", help="In any currency.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
def command(model: str, *, tokens: Any, price_per_gpu_hour: Any, as_json: bool, **asked: Any) -> None:
    """Days, GPU-hours, money and energy of a whole training.

    MODEL is any that `memplan estimate` takes.
    """
    result = budget(estimate(model_of(model), **asked), tokens=tokens, price_per_gpu_hour=price_per_gpu_hour)
    if as_json:
        print_json(result.to_dict())
    else:
        click.echo(str(result))
