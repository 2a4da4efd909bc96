"""How long a step takes: a rough roofline, behind a seam where a calibrated model can take its place.

The formulas' numeric arguments are Python numbers or NumPy arrays over plans. What they are given is counted:
FLOPs and bytes by the record of the step; rates are the datasheets', the one other constant is
`EFFICIENCY`. A rate that no datasheet states is never made up: then there is no step time, and `missing` says
why.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import reduce
from math import inf
from operator import add
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, final, get_args

import numpy as np
import numpy.typing as npt

from memplan.checks import checked_positive
from memplan.engines.base import ENGINES
from memplan.errors import InvalidValue
from memplan.hardware import Cluster
from memplan.memory import Bytes
from memplan.plan import MESH_AXES, Plan
from memplan.record import Axis, Compute, Counts, Overlap, Pass
from memplan.traffic import CollectiveTotal

Quantity: TypeAlias = float | npt.NDArray[Any]
"""A number, or one for each of many plans."""

Count: TypeAlias = int | npt.NDArray[np.int64]
"""A whole one."""

WHOLE_BACKWARD: Final = ("backward", "backward-weight")
"""The passes that end a micro-batch's backward pass."""

EFFICIENCY: Final = 0.5
"""The fraction of the peak rate at which matrix products are taken to run: a policy, not a measurement."""


def added(seconds: Iterable[Quantity]) -> Quantity:
    """Their sum, one after the other: the same to the last bit for one plan and for many.

    >>> added([1.0, 2.5])
    3.5
    """
    return reduce(add, seconds)


# --- Values -----------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RankWork:
    """What one rank does in a step, as its record counts it.

    `forward_flops` and `recomputed_flops` are of all its micro-batches, `reducing_share` is the share of its
    backward passes beside which it reduces gradients, `states` what its optimizer sees.
    """

    forward_flops: int
    recomputed_flops: int
    collectives: tuple[CollectiveTotal, ...]
    reducing_share: float
    states: Bytes


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Where the seconds of one rank's step go; the parts add up to `total_s`.

    Attributes:
        compute_s: the forward and backward passes' matrix products.
        recompute_s: those that are computed again.
        tp_s, dp_s, pp_s: traffic that nothing hides: over the tensor axis; over the data axes, or all ranks;
            to other stages of the pipeline.
        bubble_s: the pipeline fills and drains.
        update_s: the optimizer.
    """

    compute_s: float
    recompute_s: float
    tp_s: float
    dp_s: float
    pp_s: float
    bubble_s: float
    update_s: float

    @property
    def parts(self) -> dict[str, float]:
        """Each part's seconds by name."""
        return {part.name: getattr(self, part.name) for part in fields(self)}

    @property
    def total_s(self) -> float:
        """The sum of the parts, in their order.

        >>> StepTime(compute_s=3, recompute_s=1, tp_s=1, dp_s=0, pp_s=0, bubble_s=0.5, update_s=0.5).total_s
        6.0
        """
        return float(added([getattr(self, part.name) for part in fields(self)]))


class TimeModel(Protocol):
    """The seam: what turns counted work into seconds."""

    @property
    def label(self) -> str:
        """How far to trust it, for people."""

    def missing(self, plan: Plan, cluster: Cluster | None) -> tuple[str, ...]:
        """Why there is no time for this plan on this cluster; empty if there is."""

    def step_times(self, ranks: Sequence[RankWork], plan: Plan, cluster: Cluster) -> tuple[StepTime, ...]:
        """The step of one rank of each stage of the pipeline."""


# --- Computation ------------------------------------------------------------------------------------------


def backward_flops(forward_flops: Quantity) -> Quantity:
    """FLOPs of a backward pass: 2 x forward, a product for the inputs' gradient and one for the weights'.

    Neglects: that fused attention computes its scores once more.
    Source: Kaplan et al. 2020, arXiv:2001.08361, section 2.1.

    >>> backward_flops(10)
    20
    """
    return 2 * forward_flops


def model_flops(forward_flops: Quantity) -> Quantity:
    """FLOPs that the model takes, however they are computed: forward and backward, nothing twice.

    Causal attention is counted whole although half is masked, as in `memplan.ops.attention`.

    Source: Chowdhery et al. 2022, arXiv:2204.02311, appendix B.

    >>> model_flops(10)
    30
    """
    return forward_flops + backward_flops(forward_flops)


def compute_s(flops: Quantity, peak_flops_per_s: float, efficiency: float) -> Quantity:
    """Seconds of matrix products: FLOPs / (peak dense rate x efficiency).

    Neglects: everything between the products: norms, activations, casts, launches; the efficiency stands for
        it.

    >>> compute_s(1e12, 1e12, 0.5)
    2.0
    """
    return flops / (peak_flops_per_s * efficiency)


def backward_s(products_s: Quantity, again_s: Quantity) -> Quantity:
    """Seconds of the backward passes: two thirds of the products, and all that is computed again.

    >>> backward_s(3.0, 1.0)
    3.0
    """
    return products_s * 2 / 3 + again_s


def forward_flops(counts: Counts) -> int:
    """FLOPs of a rank's forward passes in a step: all micro-batches."""
    return sum([e.flops * n for e, n in counts.items() if isinstance(e, Compute) and e.phase == "forward"])


def recomputed_flops(counts: Counts) -> int:
    """Forward FLOPs that a rank computes again in its backward passes.

    With recompute="full" all of a block up to the last tensor that it saves, so all but its last product;
    with "selective" none. A split backward pass runs its regions again for each weight.

    Source: torch.utils.checkpoint:_StopRecomputationError, `memplan.tape.SplitBackward`.
    """
    return sum([e.flops * n for e, n in counts.items() if isinstance(e, Compute) and e.phase != "forward"])


def reducing_share(counts: Counts) -> float:
    """The share of its backward passes beside which a rank reduces gradients; 0 if none does.

    Neglects: that a rank's other stages may still run when one reduces after its last pass.
    """
    passes = [(e, n) for e, n in counts.items() if isinstance(e, Pass) and e.part in WHOLE_BACKWARD]
    return sum([n for e, n in passes if e.reduces]) / max(1, sum([n for _, n in passes]))


# --- Traffic ----------------------------------------------------------------------------------------------


def crosses_nodes(n_ranks: Count, stride: Count, gpus_per_node: Count) -> npt.NDArray[np.bool_]:
    """Whether any group of an axis is on more than one node, of ranks that fill whole nodes.

    Ranks are placed in mesh order; a group's members are `stride` apart, and the groups that interleave make
    a row of n x stride ranks. No row is cut by the end of a node where its length divides the node's.

    >>> bool(crosses_nodes(8, 1, 8)), bool(crosses_nodes(2, 8, 8)), bool(crosses_nodes(3, 1, 8))
    (False, True, True)
    """
    crosses: npt.NDArray[np.bool_] = np.not_equal(gpus_per_node % (n_ranks * stride), 0)
    return crosses & np.greater(n_ranks, 1)


def ranks_in_a_node(n_ranks: Count, stride: Count, gpus_per_node: Count) -> npt.NDArray[np.int64]:
    """How many of a group's members share a node, where that is fewest: max(1, gcd(n stride, node) / stride).

    Rows of n x stride ranks begin wherever a multiple of gcd(n stride, node) is.

    >>> [int(ranks_in_a_node(n, stride, 8)) for n, stride in ((64, 1), (8, 2), (2, 8), (3, 1), (8, 3))]
    [8, 4, 1, 1, 2]
    """
    members: npt.NDArray[np.int64] = np.maximum(1, np.gcd(n_ranks * stride, gpus_per_node) // stride)
    return members


def ring_bytes_per_s(
    n_ranks: Count, stride: Count, gpus_per_node: Count, intra_node: float, inter_node: float
) -> Quantity:
    """What one rank sends per second in a collective: over the slowest link that its axis' groups cross.

    Within a node that is the GPU's own link. Between nodes a group has as many network links as it has
    members in a node, and all of its traffic passes them: min(intra, members x inter).

    Assumes: one ring for each such link, as NCCL builds them; all groups of the axis at the same time.
    Neglects: latency, congestion, trees and in-network reduction.
    Source: NVIDIA nccl-tests, doc/PERFORMANCE.md (bus bandwidth).

    >>> [float(ring_bytes_per_s(n, s, 8, 450.0, 50.0)) for n, s in ((8, 1), (64, 1), (16, 4), (2, 8))]
    [450.0, 400.0, 100.0, 50.0]
    """
    members = ranks_in_a_node(n_ranks, stride, gpus_per_node)
    between = np.where(members > 1, np.minimum(intra_node, members * inter_node), inter_node)
    return np.where(crosses_nodes(n_ranks, stride, gpus_per_node), between, intra_node)


def neighbour_bytes_per_s(
    n_ranks: Count, stride: Count, gpus_per_node: Count, intra_node: float, inter_node: float
) -> Quantity:
    """What one rank sends per second to the next of its group: over its own link, the network's if any does.

    >>> [float(neighbour_bytes_per_s(n, 4, 8, 450.0, 50.0)) for n in (2, 4)]
    [450.0, 50.0]
    """
    return np.where(crosses_nodes(n_ranks, stride, gpus_per_node), inter_node, intra_node)


def exposed_s(
    reductions_s: Quantity, gathers_s: Quantity, reducing_s: Quantity, computing_s: Quantity
) -> Quantity:
    """Traffic beside the computation that outlasts it; no second of computation hides two of traffic.

    Reductions hide in the `reducing_s` of computation during which there are any, gathered weights in what
    is left of all of it.

    Assumes: one of them at a time, and none slows the computation.

    >>> float(exposed_s(3.0, 4.0, 2.0, 5.0))  # 3 - 2 of reductions, 4 - (5 - 2) of gathers
    2.0
    """
    hidden_s = np.minimum(reductions_s, reducing_s)
    return reductions_s - hidden_s + np.maximum(0.0, gathers_s - (computing_s - hidden_s))


# --- The pipeline's bubble --------------------------------------------------------------------------------


def bubble_s(fraction: Quantity, others_s: Quantity) -> Quantity:
    """Seconds that a rank waits: the bubble's fraction of what the other ranks work on average.

    Where every rank works alike this is the fraction of its own work; where one works longer it waits less
    itself, as the others' first and last passes are shorter: exact for gpipe.

    Assumes: this rank is the slowest; a rank's virtual stages are alike.

    >>> bubble_s(0.5, 4.0)
    2.0
    """
    return fraction * others_s


# --- The update -------------------------------------------------------------------------------------------


def update_bytes(weights_bytes: Quantity, grads_bytes: Quantity, optimizer_bytes: Quantity) -> Quantity:
    """What the optimizer moves: weights and its state are read and written, gradients read.

    Neglects: intermediate results of implementations that are not fused, zeroing, clipping.

    >>> update_bytes(4, 4, 8)
    28
    """
    return 2 * weights_bytes + grads_bytes + 2 * optimizer_bytes


def updated_share(zero: int, dp: Count) -> Quantity:
    """The part of its weights and gradients that a rank updates: with ZeRO-1 every dp-th.

    Assumes: an even share.

    >>> updated_share(1, 4), updated_share(3, 4)
    (0.25, 1)
    """
    return 1 / dp if zero == 1 else 1


# --- The step ---------------------------------------------------------------------------------------------


def per_s(n_tokens: Quantity, step_s: Quantity) -> Quantity:
    """Tokens per second: the tokens of a step / its seconds.

    >>> per_s(100, 2.0)
    50.0
    """
    return n_tokens / step_s


def utilisation(flops: Quantity, step_s: Quantity, n_gpus: Count, peak_flops_per_s: float) -> Quantity:
    """Model FLOPs utilisation: the FLOPs of so many GPUs / (seconds x GPUs x peak dense rate).

    Source: Chowdhery et al. 2022, arXiv:2204.02311, section 4.1.

    >>> utilisation(30.0, 2.0, 3, 10.0)
    0.5
    """
    return flops / (step_s * n_gpus * peak_flops_per_s)


def peak_flops_per_s(plan: Plan, cluster: Cluster) -> float | None:
    """The peak dense rate of the plan's matrix products; None where none is stated."""
    rate: float | None = getattr(cluster.gpu, f"{plan.formats.matmul}_flops_per_s")
    return rate


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """FLOPs over a fraction of the peak, bytes over the slowest link they cross, a bubble in closed form.

    Attributes:
        efficiency: the fraction of the peak dense rate at which matrix products run, above 0, at most 1.

    Assumes: links and memory at their stated peak.
    Neglects: latency; a rank's last reductions and its update while others still drain the pipeline.

    Raises:
        InvalidValue: an efficiency outside (0, 1].
    """

    efficiency: float = EFFICIENCY

    def __post_init__(self) -> None:
        if checked_positive("efficiency", self.efficiency) > 1:
            raise InvalidValue(
                f"efficiency={self.efficiency} is more than the peak rate; use a number above 0, at most 1."
            )

    @property
    def label(self) -> str:
        """How far to trust it."""
        return (
            f"rough: roofline, no run has confirmed it (products at {self.efficiency:.0%} of peak, a policy)"
        )

    def missing(self, plan: Plan, cluster: Cluster | None) -> tuple[str, ...]:
        """Why there is no step time: the rates that are not known."""
        return tuple(_missing(plan, cluster))

    def step_times(self, ranks: Sequence[RankWork], plan: Plan, cluster: Cluster) -> tuple[StepTime, ...]:
        """The step of one rank of each stage of the pipeline.

        Raises:
            InvalidValue: a rate is missing.
        """
        if missing := self.missing(plan, cluster):
            raise InvalidValue(f"there is no step time: {'; '.join(missing)}; use a Cluster that states it.")
        return tuple(_step_times(ranks, plan, cluster, self.efficiency))


def _missing(plan: Plan, cluster: Cluster | None) -> Iterator[str]:
    if ENGINES.named(plan.engine).is_accounting:
        yield "closed-form accounting has none"
        return
    if cluster is None:
        yield "no cluster was given"
        return
    gpu = cluster.gpu
    if not peak_flops_per_s(plan, cluster):
        yield f"no peak rate is known of {gpu.name} in {plan.formats.matmul}"
    if not gpu.memory_bytes_per_s:
        yield f"no memory rate is known of {gpu.name}"
    if plan.offload:
        yield "no rate is known to and in the host's memory, where offloaded states are updated"
    if cluster.intra_node.bytes_per_s and cluster.inter_node.bytes_per_s:
        return
    within, between = links_used(plan, cluster.gpus_per_node)
    if within.any() and not cluster.intra_node.bytes_per_s:
        yield f"no rate is known within a node ({cluster.intra_node.name})"
    if between.any() and not cluster.inter_node.bytes_per_s:
        yield f"no rate is known between nodes ({cluster.inter_node.name})"


Yes: TypeAlias = npt.NDArray[np.bool_]


def links_used(plan: Plan, gpus_per_node: int) -> tuple[Yes, Yes]:
    """Whether anything is sent over the links within a node, and between nodes.

    As in all that follows the degrees of a plan are numbers, or one for each of many plans.
    """
    within = between = np.zeros((), np.bool_)
    for axis, (n, stride) in _groups(plan).items():
        crosses = crosses_nodes(n, stride, gpus_per_node)
        shares = (ranks_in_a_node(n, stride, gpus_per_node) > 1) & (axis != "pp")
        within = within | (np.greater(n, 1) & (~crosses | shares))
        between = between | crosses
    return within, between


def _groups(plan: Plan) -> dict[Axis, tuple[Count, Count]]:
    """Each axis' ranks, and how far apart in the cluster two neighbours are."""
    found: dict[Axis, tuple[Count, Count]] = {}
    stride, n_divided = 1, 0
    for axis in reversed(MESH_AXES):
        n: int = getattr(plan, axis)
        found[axis] = n, stride
        stride = stride * n
        n_divided += np.greater(n, 1).astype(np.int64)
    found["world"] = np.where(np.less(n_divided, 2), 1, plan.world_size), 1
    return found


def _axis_bytes_per_s(plan: Plan, cluster: Cluster) -> dict[Axis, Quantity]:
    """Each axis' rate; a link without one is none that is used."""
    within = cluster.intra_node.bytes_per_s or inf
    between = cluster.inter_node.bytes_per_s or inf
    rates: dict[Axis, Quantity] = {}
    for axis, (n, stride) in _groups(plan).items():
        rate = neighbour_bytes_per_s if axis == "pp" else ring_bytes_per_s
        found = rate(n, stride, cluster.gpus_per_node, within, between)
        rates[axis] = found if np.ndim(found) else float(found)
    return rates


def _step_times(
    ranks: Sequence[RankWork], plan: Plan, cluster: Cluster, efficiency: float
) -> Iterator[StepTime]:
    share, rates = updated_share(plan.zero, plan.dp), rates_of(plan, cluster)
    found: list[StepTime] = []
    for rank in ranks:
        states = rank.states
        work = Work(
            forward_flops=rank.forward_flops,
            recomputed_flops=rank.recomputed_flops,
            sent=sent_bytes(rank.collectives),
            reducing=rank.reducing_share,
            moved_bytes=update_bytes(
                share * states.weights_bytes, share * states.grads_bytes, states.optimizer_bytes
            ),
        )
        parts = parts_s(work, rates, efficiency)
        found.append(StepTime(**{name: float(seconds) for name, seconds in parts.items()}))
    total_busy_s = added([busy_s(time.parts) for time in found])
    for time in found:
        yield replace(time, bubble_s=float(waited_s(plan, total_busy_s, busy_s(time.parts))))


Sent: TypeAlias = dict[Axis, Any]
"""Bytes that a rank sends over each axis."""


class Work(NamedTuple):
    """What one rank does in a step, summed up; or an array of it over many plans.

    `sent` is by what the traffic may run beside; `reducing`: the share of the backward passes beside which
    gradients are reduced.
    """

    forward_flops: Quantity
    recomputed_flops: Quantity
    sent: Mapping[Overlap, Sent]
    reducing: Quantity
    moved_bytes: Quantity


def sent_bytes(collectives: Iterable[CollectiveTotal]) -> dict[Overlap, Sent]:
    """`Work.sent` of a rank's collectives."""
    sent: dict[Overlap, Sent] = {overlap: Counter() for overlap in get_args(Overlap)}
    for c in collectives:
        sent[c.overlap][c.axis] += c.wire_bytes
    return sent


class Rates(NamedTuple):
    """What a plan's work is divided by: the peak of matrix products, the rates of memory and of each axis."""

    flops_per_s: float
    memory_bytes_per_s: float
    bytes_per_s: dict[Axis, Quantity]


def rates_of(plan: Plan, cluster: Cluster) -> Rates:
    """Those of a plan, or of many; what has no rate is never used."""
    return Rates(
        peak_flops_per_s(plan, cluster) or inf,
        cluster.gpu.memory_bytes_per_s or inf,
        _axis_bytes_per_s(plan, cluster),
    )


def parts_s(work: Work, rates: Rates, efficiency: float) -> dict[str, Quantity]:
    """The parts of `StepTime`, no bubble yet: of one rank, or of one of each of many plans."""
    seconds = {overlap: _seconds(sent, rates.bytes_per_s) for overlap, sent in work.sent.items()}
    waits = seconds["nothing"]
    products_s = compute_s(model_flops(work.forward_flops), rates.flops_per_s, efficiency)
    again_s = compute_s(work.recomputed_flops, rates.flops_per_s, efficiency)
    beside_s = exposed_s(
        _over_data_axes(seconds["backward"]),
        _over_data_axes(seconds["compute"]),
        work.reducing * backward_s(products_s, again_s),
        products_s + again_s,
    )
    return {
        "compute_s": products_s,
        "recompute_s": again_s,
        "tp_s": waits["tp"],
        "dp_s": _over_data_axes(waits) + beside_s,
        "pp_s": waits["pp"],
        "bubble_s": 0.0,
        "update_s": work.moved_bytes / rates.memory_bytes_per_s,
    }


def busy_s(parts: Mapping[str, Quantity]) -> Quantity:
    """Seconds that a rank's passes take."""
    return added([parts[name] for name in ("compute_s", "recompute_s", "tp_s", "pp_s")])


def waited_s(plan: Plan, total_busy_s: Quantity, own_busy_s: Quantity) -> Quantity:
    """Seconds of a rank's bubble, given the seconds of all ranks' passes and of its own passes."""
    fraction = plan.pipeline_schedule.bubble_fraction(plan.pp, plan.virtual_stages, plan.n_micro_batches)
    return bubble_s(fraction, (total_busy_s - own_busy_s) / np.maximum(1, plan.pp - 1))


def _seconds(sent: Sent, rates: dict[Axis, Quantity]) -> dict[Axis, Quantity]:
    return {axis: sent[axis] / rate for axis, rate in rates.items()}


def _over_data_axes(seconds: dict[Axis, Quantity]) -> Quantity:
    return added([seconds[axis] for axis in ("dp", "dp_replicate", "world")])
