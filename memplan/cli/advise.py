"""`memplan advise`."""

from typing import Any

import click

from memplan.advice import COLUMNS, advice_text, advise
from memplan.cli.flags import PlanCommand, cluster_options, model_options, plan_options
from memplan.cli.output import check_format, print_csv, print_json, progress_bar
from memplan.cli.own_module import model_of
from memplan.estimate import estimate


@click.command("advise", cls=PlanCommand)
@click.argument("model")
@model_options()
@cluster_options()
@plan_options(dp=None, global_batch=None, seq_len=None)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
@click.option("--csv", "as_csv", is_flag=True, help="The changes as CSV instead of text.")
def command(model: str, *, as_json: bool, as_csv: bool, **asked: Any) -> None:
    """What to change in a plan that does not fit, and what each change costs.

    MODEL is any that `memplan estimate` takes.
    """
    check_format(as_json, as_csv)
    with progress_bar() as progress:
        advice = advise(estimate(model_of(model), **asked), progress)
    if as_csv:
        print_csv(advice.rows(model), COLUMNS)
    elif as_json:
        print_json(advice.to_dict(model))
    else:
        click.echo(advice_text(advice, model))
