"""`memplan smallest-cluster`, `memplan longest-sequence` and `memplan largest-model`."""

from typing import Any, Final

import click

from memplan.cli.flags import (
    PlanCommand,
    cluster_options,
    count_option,
    model_options,
    search_option,
    search_options,
)
from memplan.cli.found import found_options, print_found, search_keywords
from memplan.cli.output import progress_bar
from memplan.cli.own_module import model_of
from memplan.estimate import device_of
from memplan.hardware import resolve_cluster
from memplan.models import resolve
from memplan.search.questions import largest_model, longest_sequence, smallest_cluster
from memplan.text_tables import printable

BATCH: Final = "Sequences per step; left out: one for each GPU."


@click.command(
    "smallest-cluster",
    cls=PlanCommand,
    option=search_option,
    examples=("memplan smallest-cluster llama-3-70b h100-sxm --seq-len 4096",),
)
@click.argument("model")
@click.argument("gpu")
@model_options()
@cluster_options(named=False)
@count_option("--most-gpus", "The largest cluster that is tried; left out: 1024.")
@count_option("--global-batch", BATCH)
@count_option("--seq-len", "Tokens per sequence; left out: the model's context, at most 8192.")
@click.option("--tp-across-nodes", is_flag=True, help="Also tensor axes that are on several nodes.")
@search_options()
@found_options()
def smallest_cluster_command(model: str, gpu: str, **asked: Any) -> None:
    """The fewest GPUs of a kind that can train a model.

    MODEL is any that `memplan estimate` takes, GPU a name of `memplan gpus`. Whole nodes beyond the first;
    micro-batches of 1 unless told otherwise.
    """
    with progress_bar() as progress:
        result = smallest_cluster(model_of(model), gpu, progress=progress, **search_keywords(asked))
    print_found(result, asked, model, f"The fewest GPUs: {result.cluster.name}")


@click.command(
    "longest-sequence",
    cls=PlanCommand,
    option=search_option,
    examples=("memplan longest-sequence llama-3-8b --cluster 8xh100-sxm --zero 3",),
)
@click.argument("model")
@model_options()
@cluster_options()
@count_option("--global-batch", BATCH)
@click.option("--tp-across-nodes", is_flag=True, help="Also tensor axes that are on several nodes.")
@search_options()
@found_options()
def longest_sequence_command(model: str, **asked: Any) -> None:
    """The longest sequence that a cluster can train a model on, a multiple of 256 tokens.

    MODEL is any that `memplan estimate` takes. Micro-batches of 1 unless told otherwise.
    """
    with progress_bar() as progress:
        result = longest_sequence(model_of(model), progress=progress, **search_keywords(asked))
    print_found(result, asked, model, f"The longest sequence: {result.jobs[0].seq_len:,} tokens")


@click.command(
    "largest-model",
    cls=PlanCommand,
    option=search_option,
    examples=(
        "memplan largest-model --cluster 1xrtx-4090 --seq-len 1024",
        "memplan largest-model llama-3-8b llama-2-13b --cluster 8xa100-40-sxm --zero 3",
    ),
)
@click.argument("models", nargs=-1)
@model_options()
@cluster_options()
@count_option("--global-batch", BATCH)
@count_option("--seq-len", "Tokens per sequence; left out: each model's context, at most 8192.")
@click.option("--tp-across-nodes", is_flag=True, help="Also tensor axes that are on several nodes.")
@search_options()
@found_options()
def largest_model_command(models: tuple[str, ...], **asked: Any) -> None:
    """The largest of some models that a cluster can train.

    MODELS are any that `memplan estimate` takes; left out: every model that is known by name. Micro-batches
    of 1 unless told otherwise.
    """
    device = device_of(resolve_cluster(asked["cluster"])).type
    code, cache = asked["implementation"], asked["cache"]
    known = {each: resolve(model_of(each), code, device, cache=cache) for each in models}
    with progress_bar() as progress:
        result = largest_model([*known.values()] or None, progress=progress, **search_keywords(asked))
    found = result.model
    name = next((each for each, model in known.items() if model == found), None)
    print_found(result, asked, name, f"The largest model: {printable(found.name)}")
