"""`memplan search`."""

from typing import Any

import click

from memplan.cli.flags import (
    COUNTS,
    PlanCommand,
    choice_option,
    cluster_options,
    count_option,
    implementation_option,
    search_option,
    search_options,
)
from memplan.cli.output import check_format, print_csv, print_json, progress_bar
from memplan.errors import PlanRefused
from memplan.search.judge import OBJECTIVES
from memplan.search.search import KEEP, QUESTIONS, searched
from memplan.search.table import columns_of, search_dict, search_rows
from memplan.search.text import SHOWN, nothing_runs, search_text


@click.command("search", cls=PlanCommand, option=search_option)
@click.argument("model")
@implementation_option()
@cluster_options(text="As in 64xh100-sxm; all of it is used, unless for the objective gpus.")
@click.option("--global-batch", type=COUNTS, required=True, metavar="N,N,...", help="Sequences per step.")
@click.option(
    "--seq-len", type=COUNTS, metavar="N,N,...", help="Tokens per sequence; left out: the model's context."
)
@click.option("--tp-across-nodes", is_flag=True, help="Also tensor axes that are on several nodes.")
@choice_option(
    "--objective",
    (*OBJECTIVES, *QUESTIONS),
    "speed",
    "speed: most tokens per second; memory: least bytes; micro_batch: the largest; front: all plans that "
    "none beats in both speed and memory; gpus: the fewest of the cluster that suffice; seq_len: the longest "
    "sequence (the last two with micro-batches of 1 unless told otherwise).",
)
@search_options()
@count_option(
    "--keep",
    "How many of the plans that fit or may fit to show, else of the nearest; left out: "
    f"{SHOWN}, as JSON or CSV {KEEP}.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
@click.option("--csv", "as_csv", is_flag=True, help="The kept plans as CSV instead of text.")
def command(model: str, *, as_json: bool, as_csv: bool, **asked: Any) -> None:
    """The best plans of a cluster, of all there are.

    MODEL is a name (see `memplan models`) or the path of a Hugging Face config.json. Flags of a plan take one
    value or several, as in 1-4,8; those whose help names no default take, if left out, every value that makes
    a difference.
    """
    check_format(as_json, as_csv)
    asked = {name: value for name, value in asked.items() if value is not None}
    asked.setdefault("keep", KEEP if as_json or as_csv else SHOWN)
    with progress_bar() as progress:
        result = searched(model, progress=progress, **asked)
    from memplan.search.replays import replay_ahead  # multiprocessing is slow to import

    replay_ahead(result)
    if as_csv:
        print_csv(search_rows(result, model), columns_of(result))
    elif as_json:
        print_json(search_dict(result, model))
    reason = nothing_runs(result)
    if reason:
        raise PlanRefused(reason)
    if as_csv or as_json:
        return
    click.echo(search_text(result, model))
    if result.best is None and result.fitting is None and result.cluster.budget_bytes is not None:
        from memplan.search.alternatives import alternatives_text  # what it searches takes a few seconds

        click.echo(f"\n{alternatives_text(result.model, result.cluster, result.jobs[0], model)}")
