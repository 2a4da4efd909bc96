"""The inverse questions: the smallest cluster, the longest sequence, the largest model that fits."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from memplan.checks import LARGEST_CLUSTER, checked_count
from memplan.errors import InvalidValue, PlanRefused
from memplan.hardware import Cluster, cluster, gpus_per_node, resolve_cluster
from memplan.models import Model, parameter_count, preset_names, resolve
from memplan.search.search import Found, searched
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
    last: Found | None = None
    for where in clusters_of(gpu, most_gpus):
        last = searched(model, cluster=where, global_batch=global_batch, **(SMALLEST | options))
        if last.n_fit:
            return last
    lacks = "" if last is None else nearest_text(last)
    raise PlanRefused(
        f"{resolve(model).name} fits on no {most_gpus} {gpu}{lacks}; use most_gpus or fewer states."
    )


def clusters_of(gpu: str, most_gpus: int) -> Iterator[Cluster]:
    """Every cluster of a GPU that its nodes allow, smallest first.

    >>> [c.n_gpus for c in clusters_of("h100-sxm", 24)]
    [1, 2, 3, 4, 5, 6, 7, 8, 16, 24]
    """
    node = gpus_per_node(gpu)
    yield from (cluster(f"{n}x{gpu}") for n in range(1, min(node, most_gpus + 1)))
    yield from (cluster(f"{n}x{gpu}") for n in range(node, most_gpus + 1, node))


def longest_sequence(
    model: Model | str, *, cluster: Cluster | str, global_batch: int, **options: Any
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
    where = resolve_cluster(cluster)
    raise PlanRefused(
        f"none of {len(models)} models fits on {where.name if where else cluster}"
        f"{nearest_text(last) if last else ''}; use a smaller model or more GPUs."
    )


def nearest_text(result: Found) -> str:
    """What the nearest plan lacks, for an error's text."""
    row = next(iter(search_rows(replace(result, fit={}))), None)
    return "" if row is None else f" (nearest: {row['why']})"
