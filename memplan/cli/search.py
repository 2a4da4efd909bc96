"""`memplan search`."""

from typing import Any, Final

import click

from memplan.cli.flags import (
    COUNTS,
    PlanCommand,
    choice_option,
    cluster_options,
    model_options,
    search_option,
    search_options,
)
from memplan.cli.found import found_options, print_found, search_keywords
from memplan.cli.output import progress_bar
from memplan.cli.own_module import model_of
from memplan.search.judge import OBJECTIVES
from memplan.search.search import QUESTIONS, searched

EXAMPLES: Final = (
    "memplan search llama-3-8b --cluster 8xh100-sxm",
    "memplan search llama-3-70b --cluster 64xh100-sxm --global-batch 512 --tp 4,8 --recompute none,full",
    "memplan search llama-3-8b --cluster 8xa100-80-sxm --objective memory --all",
)


@click.command("search", cls=PlanCommand, option=search_option, examples=EXAMPLES)
@click.argument("model")
@model_options()
@cluster_options(text="As in 64xh100-sxm; all of it is used, unless for the objective gpus.")
@click.option(
    "--global-batch",
    type=COUNTS,
    metavar="N,N,...",
    help="Sequences per step; left out: one for each GPU, so that all plans train on the same.",
)
@click.option(
    "--seq-len",
    type=COUNTS,
    metavar="N,N,...",
    help="Tokens per sequence; left out: the model's context, at most 8192.",
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
@found_options()
def command(model: str, **asked: Any) -> None:
    """The best plans of a cluster, of all there are.

    MODEL is any that `memplan estimate` takes. Flags of a plan take one value or several, as in 1-4,8; those
    whose help names no default take, if left out, every value that makes a difference.
    """
    with progress_bar() as progress:
        result = searched(model_of(model), progress=progress, **search_keywords(asked))
    print_found(result, asked, model)
