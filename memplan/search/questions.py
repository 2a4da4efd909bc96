"""The inverse questions: the smallest cluster, the longest sequence, the largest model that fits."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Final, Unpack, cast

from memplan.checks import LARGEST_CLUSTER, checked_count
from memplan.engines.options import shows
from memplan.errors import InvalidValue, PlanRefused, shown_value
from memplan.hardware import CHANGES, Cluster, ClusterChanges, gpus_per_node
from memplan.models import Model, has_sequence, parameter_count, preset, preset_names, resolve
from memplan.models.families import implementations_of
from memplan.search.options import SearchOptions
from memplan.search.search import Found, cluster_of, resolved, searched
from memplan.search.table import search_rows

SEQ_LEN_STEP: Final = 256
"""Sequence lengths that are tried are multiples of this."""

PROBED: Final = 5
"""Plans that a search keeps if it only has to find out whether one fits."""

SMALLEST: Final = {"micro_batch": 1}
"""The default of these questions: a larger micro-batch needs more memory."""


@shows(SearchOptions)
def smallest_cluster(
    model: Model | str | os.PathLike[str],
    gpu: str,
    *,
    global_batch: int | None = None,
    most_gpus: int = 1024,
    **options: Unpack[SearchOptions],
) -> Found:
    """The plans of the fewest GPUs of a kind that can train the model, fastest first.

    Whole nodes beyond the first; options as in `memplan.search`, micro-batches of 1 unless told otherwise.
    Without `global_batch` each cluster that is tried trains on one sequence for each of its GPUs.

    Raises:
        PlanRefused: if `most_gpus` are too few: with what the nearest plan lacks.
        MemplanError: as `memplan.search`.
    """
    checked_count("most_gpus", most_gpus, most=LARGEST_CLUSTER)
    nodes = options.pop("gpus_per_node", None)
    node = (
        gpus_per_node(gpu) if nodes is None else checked_count("gpus_per_node", nodes, most=LARGEST_CLUSTER)
    )
    whole = most_gpus if most_gpus < node else most_gpus // node * node
    where = cluster_of(f"{whole}x{gpu}", gpus_per_node=node)
    return smallest_part(model, cluster=where, global_batch=global_batch, **options)


@shows(SearchOptions)
def smallest_part(
    model: Model | str | os.PathLike[str],
    *,
    cluster: Cluster | str,
    global_batch: int | None = None,
    **options: Unpack[SearchOptions],
) -> Found:
    """The plans of the fewest GPUs of this cluster that can train the model: as `smallest_cluster`.

    Raises:
        PlanRefused: if the whole cluster is too small: with what the nearest plan lacks.
        MemplanError: as `memplan.search`.
    """
    model, whole, asked = resolved(model, cluster, options)
    asked = SMALLEST | asked
    last: Found | None = None
    no_mesh = ""
    for where in parts_of_cluster(whole):
        try:
            last = _probed(model, where, global_batch, asked)
        except PlanRefused as refusal:
            no_mesh = f" ({refusal})"
            continue
        if last.best or last.fitting:
            return _asked(last, global_batch, asked)
    lacks = nearest_text(last) if last else no_mesh
    raise PlanRefused(
        f"no plan was found of which it is sure that {model.name} fits on {whole.name}{lacks}; use more GPUs "
        "or fewer states."
    )


def _probed(
    model: Model, where: Cluster, global_batch: int | None, asked: dict[str, Any], **also: Any
) -> Found:
    """A search that keeps few plans, to find out whether one fits."""
    few = asked | {"keep": min(asked.get("keep") or PROBED, PROBED)} | also
    return searched(model, cluster=where, global_batch=global_batch, **few)


def _asked(probed: Found, global_batch: int | None, asked: dict[str, Any], **also: Any) -> Found:
    """The search that keeps as many plans as asked: the probe itself, if it does."""
    if probed.keep == asked.get("keep"):
        return probed
    return searched(probed.model, cluster=probed.cluster, global_batch=global_batch, **asked, **also)


def parts_of_cluster(whole: Cluster) -> Iterator[Cluster]:
    """The parts of a cluster, smallest first: GPUs of one node, then whole nodes.

    >>> from memplan.hardware import cluster
    >>> [part.n_gpus for part in parts_of_cluster(cluster("24xh100-sxm"))]
    [1, 2, 3, 4, 5, 6, 7, 8, 16, 24]
    """
    node = whole.gpus_per_node
    yield from (replace(whole, n_gpus=n, gpus_per_node=n) for n in range(1, node))
    yield from (replace(whole, n_gpus=n) for n in range(node, whole.n_gpus + 1, node))


@shows(SearchOptions)
def longest_sequence(
    model: Model | str | os.PathLike[str],
    *,
    cluster: Cluster | str,
    global_batch: int | None = None,
    **options: Unpack[SearchOptions],
) -> Found:
    """The plans that fit with the longest sequence, a multiple of 256 tokens; fastest first.

    Options as in `memplan.search`, micro-batches of 1 unless told otherwise. The sequence may be longer than
    the model's context where positions are rotary; the result says so.

    Assumes: what fits at one length fits at every shorter one.

    Raises:
        InvalidValue: a model whose inputs have no sequence.
        PlanRefused: if no plan fits the shortest one: with what the nearest plan lacks.
        MemplanError: as `memplan.search`.
    """
    model, where, asked = resolved(model, cluster, options)
    asked = SMALLEST | asked
    if "seq_len" in asked:
        raise InvalidValue(f"seq_len={shown_value(asked['seq_len'])} is what is asked for; leave it out.")
    if not has_sequence(model):
        raise InvalidValue(
            f"the inputs of {model.name} have no sequence whose length could be found; use "
            "objective='micro_batch', the largest micro-batch."
        )

    @cache
    def probed(n: int) -> Found:
        return _probed(model, where, global_batch, asked, seq_len=n * SEQ_LEN_STEP)

    def fits(n: int) -> bool:
        return (probed(n).best or probed(n).fitting) is not None

    most = (model.longest_seq_len or 2**22) // SEQ_LEN_STEP
    if not fits(1):
        shortest = probed(1)
        raise PlanRefused(
            f"no plan was found of which it is sure that {model.name} fits with {SEQ_LEN_STEP} tokens"
            f"{nearest_text(shortest)}; use more GPUs."
        )
    low, high = 1, max(2, model.max_seq_len // SEQ_LEN_STEP)
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return _asked(probed(low), global_batch, asked, seq_len=low * SEQ_LEN_STEP)


@shows(SearchOptions)
def largest_model(
    names: Sequence[Model | str] | None = None,
    *,
    cluster: Cluster | str,
    global_batch: int | None = None,
    **options: Unpack[SearchOptions],
) -> Found:
    """The plans of the largest of these models (presets' names or Models; None: all presets) that fits.

    Options as in `memplan.search`, micro-batches of 1 unless told otherwise.

    Raises:
        PlanRefused: if none fits: with what the nearest plan of the smallest lacks.
        MemplanError: as `memplan.search`.
    """
    if isinstance(names, str | Model | os.PathLike) or not isinstance(names, Sequence | None):
        raise InvalidValue(
            f"names={shown_value(names)} is no list of models; use a list of names or Models, as ['gpt2'], "
            "or leave it out for all presets."
        )
    code, changes = options.get("implementation"), {name: options.get(name) for name in CHANGES}
    device = cluster_of(cluster, **cast(ClusterChanges, changes)).gpu.device.type
    if names is None:
        presets = map(preset, preset_names())
        names = [model for model in presets if code is None or code in implementations_of(model)]
    models = [resolve(name, code, device, cache=options.get("cache", True)) for name in names]
    if not models:
        raise InvalidValue("names=[] leaves nothing to try; name at least one model.")
    last: Found | None = None
    _, where, asked = resolved(models[0], cluster, options)
    asked = SMALLEST | asked
    for model in sorted(models, key=parameter_count, reverse=True):
        last = _probed(model, where, global_batch, asked)
        if last.best or last.fitting:
            return _asked(last, global_batch, asked)
    lacks = nearest_text(last) if last else ""
    raise PlanRefused(
        f"no plan was found of which it is sure that any of {len(models)} models fits on "
        f"{where.name}{lacks}; use a smaller model or more GPUs."
    )


def nearest_text(result: Found) -> str:
    """The bytes that the nearest plan exceeds the budget by, for an error's text."""
    row = next((row for row in search_rows(result) if row["why"] is not None), None)
    return "" if row is None else f" (nearest: {row['why']})"
