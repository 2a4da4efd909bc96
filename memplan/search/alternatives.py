"""What would fit where no plan does: states on the host, more GPUs, a shorter sequence, adapters."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, NamedTuple

from memplan.command import command_text, estimate_command, plan_values
from memplan.engines.options import with_said
from memplan.errors import MemplanError
from memplan.estimate import Estimate
from memplan.hardware import Cluster, gpu_names, gpus_per_node
from memplan.models import Model, has_sequence, parameter_count, resolve
from memplan.plan import Plan
from memplan.search.plans import varied
from memplan.search.search import searched
from memplan.tables import headline
from memplan.text_tables import wrapped

MOST_GPUS: Final = 1024
"""The most GPUs that are tried."""

SHORTEST: Final = 256
"""The shortest sequence that is tried."""


LEAST: Final[dict[str, Any]] = {
    "micro_batch": 1,
    "recompute": "full",
    "schedule": ("1f1b", "gpipe"),
    "virtual_stages": 1,
    "objective": "memory",
    "keep": 1,
}
"""What is searched: the plans that hold least, so that an answer takes a second and not a minute."""


ADAPTERS: Final[dict[str, dict[str, Any]]] = {
    "LoRA of rank 16": {"lora_rank": 16},
    "QLoRA of rank 16": {"lora_rank": 16, "quantize": "nf4"},
}
"""What trains less than all weights, the first that fits of these."""

UNDIVIDED: Final[dict[str, Any]] = {"tp": 1, "pp": 1, "cp": 1, "ep": 1}
"""The mesh beside adapters, but for data-parallel ranks."""


LEAST_BYTES: Final = {"none": 2, "nf4": 0.5}
"""The fewest bytes that a frozen weight takes, by `quantize`."""


class Alternative(NamedTuple):
    """A change of a job, and the plan found that then holds least."""

    change: str
    estimate: Estimate


def alternatives(model: Model, where: Cluster, plan: Plan) -> Iterator[Alternative]:
    """Changes of a job of which no plan fits, each alone, with the plan found that then holds least.

    The plan says what is trained: batch, sequence, precision, optimizer. Its mesh is free, blocks are
    recomputed. States are offloaded; or GPUs are doubled, at most to `MOST_GPUS`; or the sequence is halved,
    at least to `SHORTEST`; each until a plan fits. Or Liger's loss makes the logits in chunks, in a model of
    transformers; or adapters are trained beside frozen weights, where PEFT can and is installed.
    """
    if (found := _least(model, where, plan, offload=True)) is not None:
        yield Alternative("offload to the host", found)
    for larger in larger_clusters(where):
        if (found := _least(model, larger, plan, offload=False)) is not None:
            yield Alternative(f"{larger.n_gpus} GPUs", found)
            break
    seq_len = plan.seq_len // 2
    while has_sequence(model) and seq_len >= SHORTEST:
        found = _least(model, where, replace(plan, seq_len=seq_len), offload=False)
        if found is not None:
            yield Alternative(f"sequences of {seq_len} tokens", found)
            break
        seq_len //= 2
    theirs = resolve(model, adapted=True)
    if (found := _by_liger(theirs, where, plan)) is not None:
        yield Alternative("Liger's loss", found)
    for change, adapters in ADAPTERS.items() if plan.lora_rank is None else ():
        adapted = replace(plan, **adapters)
        if not _can_be_held(theirs, where, adapted):
            continue
        if (found := _least(theirs, where, adapted, offload=False, **UNDIVIDED)) is not None:
            yield Alternative(change, found)
            break


def _can_be_held(model: Model, where: Cluster, plan: Plan) -> bool:
    """Whether all GPUs together have room for the frozen weights alone: a model with adapters is traced."""
    usable = where.gpu.usable_bytes
    return usable is None or parameter_count(model) * LEAST_BYTES[plan.quantize] <= usable * where.n_gpus


def _by_liger(model: Model, where: Cluster, plan: Plan) -> Estimate | None:
    """The plan with Liger's loss that holds least, if it fits; None under an engine that has none."""
    with suppress(MemplanError):
        plan = with_said(plan, liger_kernel="fused_linear_cross_entropy")
        return _least(model, where, plan, offload=False, **UNDIVIDED)
    return None


def _least(model: Model, where: Cluster, plan: Plan, *, offload: bool, **mesh: Any) -> Estimate | None:
    """The plan for a job that holds least, if it fits; over any mesh, but for these degrees."""
    of_mesh = varied(plan.engine)
    job: dict[str, Any] = {name: value for name, value in plan_values(plan).items() if name not in of_mesh}
    try:
        return searched(model, cluster=where, offload=offload, **job, **mesh, **LEAST).best
    except MemplanError:  # no mesh of this cluster can run the job
        return None


def larger_clusters(where: Cluster) -> Iterator[Cluster]:
    """Clusters of twice as many GPUs, and again, in the nodes that such GPUs are usually built in.

    >>> from memplan.hardware import cluster
    >>> [(each.n_gpus, each.gpus_per_node) for each in larger_clusters(cluster("4xh100-sxm"))][:3]
    [(8, 8), (16, 8), (32, 8)]
    """
    node = where.gpus_per_node
    if where.n_nodes == 1 and where.gpu.name in gpu_names():
        node = max(node, gpus_per_node(where.gpu.name))
    n_gpus = 2 * where.n_gpus
    while n_gpus <= MOST_GPUS:
        if n_gpus <= node or n_gpus % node == 0:
            yield replace(where, n_gpus=n_gpus, gpus_per_node=min(n_gpus, node))
        n_gpus *= 2


def alternatives_text(model: Model, where: Cluster, plan: Plan, named: str | None = None) -> str:
    """`alternatives` as text, each with its command; `named`: how the model was named on the command line."""
    found = list(alternatives(model, where, plan))
    if not found:
        return wrapped(
            f"Nothing tried fits either: offload, up to {MOST_GPUS} GPUs, sequences down to {SHORTEST} "
            "tokens. Use a smaller model."
        )
    parts = ["What would fit, each change alone (with full recomputation)"]
    for change, estimate in found:
        parts.append(wrapped(f"- {change}: {headline(estimate)}", indent="  "))
        parts += [wrapped(f"  {note}", indent="  ") for note in estimate.notes if note.startswith("offload")]
        if (command := estimate_command(estimate, named)) is not None:
            parts.append(command_text(command, head="  "))
    return "\n".join(parts)
