"""The inverse questions: the smallest cluster, the longest sequence, the largest model that fits."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from memplan.checks import LARGEST_CLUSTER, checked_count
from memplan.errors import InvalidValue, PlanRefused
from memplan.hardware import Cluster, gpus_per_node
from memplan.models import Model, parameter_count, preset_names, resolve
from memplan.search.search import Found, cluster_of, searched
from memplan.search.table import search_rows

SEQ_LEN_STEP: Final = 256
"""Sequence lengths are asked in multiples of this many tokens."""

SMALLEST: Final = {"micro_batch": 1}
"""What a question about room alone tries unless told otherwise: a larger micro-batch needs more of it."""


def smallest_cluster(
    model: Model | str, gpu: str, *, global_batch: int, most_gpus: int = 1024, **options: Any
) -> Found:
    """The plans of the fewest GPUs of a kind that can train the model, fastest first.

    Whole nodes beyond the first; options as in `memplan.search`, micro-batches of 1 unless told otherwise.

    Raises:
        PlanRefused: if `most_gpus` are too few: with what the nearest plan lacks.
        MemplanError: as `memplan.search`.
    """
    checked_count("most_gpus", most_gpus, most=LARGEST_CLUSTER)
    node = gpus_per_node(gpu)
    whole = most_gpus if most_gpus < node else most_gpus // node * node
    return smallest_part(model, cluster=f"{whole}x{gpu}", global_batch=global_batch, **options)


def smallest_part(
    model: Model | str | os.PathLike[str], *, cluster: Cluster | str, global_batch: int, **options: Any
) -> Found:
    """As `smallest_cluster`, of the GPUs of a cluster.

    Raises:
        PlanRefused: if all of it is too small: with what the nearest plan lacks.
        MemplanError: as `memplan.search`.
    """
    model, whole = resolve(model), cluster_of(cluster)
    last: Found | None = None
    for where in parts(whole):
        last = searched(model, cluster=where, global_batch=global_batch, **(SMALLEST | options))
        if last.n_fit:
            return last
    lacks = nearest_text(last) if last else ""
    raise PlanRefused(f"{model.name} does not fit on {whole.name}{lacks}; use more GPUs or fewer states.")


def parts(whole: Cluster) -> Iterator[Cluster]:
    """What there is of a cluster: GPUs of one node, then whole nodes; smallest first.

    >>> from memplan.hardware import cluster
    >>> [part.n_gpus for part in parts(cluster("24xh100-sxm"))]
    [1, 2, 3, 4, 5, 6, 7, 8, 16, 24]
    """
    node = whole.gpus_per_node
    yield from (replace(whole, n_gpus=n, gpus_per_node=n) for n in range(1, node))
    yield from (replace(whole, n_gpus=n) for n in range(node, whole.n_gpus + 1, node))


def longest_sequence(
    model: Model | str | os.PathLike[str], *, cluster: Cluster | str, global_batch: int, **options: Any
) -> Found:
    """The plans that fit with the longest sequence, a multiple of 256 tokens; fastest first.

    Options as in `memplan.search`, micro-batches of 1 unless told otherwise.

    Assumes: what fits at one length fits at every shorter one.

    Raises:
        PlanRefused: if no plan fits the shortest one: with what the nearest plan lacks.
        MemplanError: as `memplan.search`.
    """
    model = resolve(model)
    if "seq_len" in options:
        raise InvalidValue(f"seq_len={options['seq_len']} is what is asked for; leave it out.")

    def at(n: int) -> Found:
        asked = SMALLEST | options | {"seq_len": n * SEQ_LEN_STEP}
        return searched(model, cluster=cluster, global_batch=global_batch, **asked)

    most = model.max_seq_len // SEQ_LEN_STEP if model.learned_positions else 2**22 // SEQ_LEN_STEP
    best = at(1)
    if not best.n_fit:
        raise PlanRefused(
            f"{model.name} fits with no sequence of {SEQ_LEN_STEP} tokens{nearest_text(best)}; use more GPUs."
        )
    low, high = 1, 2
    while high <= most and (tried := at(high)).n_fit:
        best, low, high = tried, high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        tried = at(middle)
        if tried.n_fit:
            best, low = tried, middle
        else:
            high = middle
    return best


def largest_model(
    names: Sequence[Model | str] | None = None, *, cluster: Cluster | str, global_batch: int, **options: Any
) -> Found:
    """The plans of the largest of these models (presets' names or Models; None: all presets) that fits.

    Options as in `memplan.search`, micro-batches of 1 unless told otherwise.

    Raises:
        PlanRefused: if none fits: with what the nearest plan of the smallest lacks.
        MemplanError: as `memplan.search`.
    """
    models = [resolve(name) for name in (preset_names() if names is None else names)]
    if not models:
        raise InvalidValue("names=[] leaves nothing to try; name at least one model.")
    last: Found | None = None
    for model in sorted(models, key=parameter_count, reverse=True):
        last = searched(model, cluster=cluster, global_batch=global_batch, **(SMALLEST | options))
        if last.n_fit:
            return last
    raise PlanRefused(
        f"none of {len(models)} models fits on {cluster_of(cluster).name}"
        f"{nearest_text(last) if last else ''}; use a smaller model or more GPUs."
    )


def nearest_text(result: Found) -> str:
    """What the nearest plan lacks, for an error's text."""
    row = next(iter(search_rows(replace(result, fit=()))), None)
    return "" if row is None else f" (nearest: {row['why']})"
