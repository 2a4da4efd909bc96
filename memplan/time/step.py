"""How long a step takes: what its record counts, at prices that were measured, or at a roofline's.

Where a rate is not known there is no step time, and `missing` says why. Numeric arguments are Python numbers
or NumPy arrays over plans.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import reduce
from math import inf
from operator import add
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeAlias, final, get_args

from memplan.arrays import namespace
from memplan.checks import checked_share
from memplan.engines.base import ENGINES
from memplan.errors import InvalidValue
from memplan.files import toml_table
from memplan.hardware import Cluster
from memplan.memory import Bytes
from memplan.mesh import HOST, Count, Group, Yes, inner_first, sends_along, waits_of
from memplan.orders import LAST_PARTS
from memplan.plan import Plan
from memplan.record import Compute, Counts, Overlap, Pass
from memplan.time.collectives import best_bytes_per_s, crosses_nodes, lines, ranks_in_a_node
from memplan.time.operations import operations_of
from memplan.traffic import CollectiveTotal

if TYPE_CHECKING:
    import numpy.typing as npt

Quantity: TypeAlias = "float | npt.NDArray[Any]"
"""A number, or one for each of many plans."""

RATES: Final = "time/step.toml"
"""The table of how far published rates are from those of `Measured`."""


def added(seconds: Iterable[Quantity]) -> Quantity:
    """The sum, added from left to right, so that one plan and arrays of plans agree to the last bit.

    >>> added([1.0, 2.5])
    3.5
    """
    return reduce(add, seconds, 0.0)


# --- Values -----------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RankWork:
    """One rank's work in a step, counted from its record.

    Attributes:
        counts: occurrences of each computation, collective and pass; a `Compute` has its kind and operands.
        collectives: their totals.
        states: weights, gradients and optimizer state as its optimizer sees them.
    """

    counts: Counts
    collectives: tuple[CollectiveTotal, ...]
    states: Bytes


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """The seconds of one rank's step by cause; the parts add up to `total_s`.

    Attributes:
        compute_s: matrix products of the forward and backward passes.
        recompute_s: matrix products of forward passes that are run again.
        tp_s: traffic over the tensor axis, and of tokens to experts, which nothing hides.
        dp_s: the part of traffic over the data axes, or between all ranks, that no computation hides.
        pp_s: traffic to other stages of the pipeline, which nothing hides.
        bubble_s: waiting while the pipeline fills and drains.
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
        return float(added(self.parts.values()))


class Band(NamedTuple):
    """The least and the most that real runs reached of the tokens per second that a time model gives."""

    low: float
    high: float
    n_runs: int


class TimeModel(Protocol):
    """Turns counted work into seconds."""

    @property
    def label(self) -> str:
        """How far to trust its seconds, in a sentence."""

    @property
    def band(self) -> Band | None:
        """How far rates of real runs were from its own; None: not compared."""

    def missing(self, plan: Plan, cluster: Cluster | None) -> tuple[str, ...]:
        """Why there is no time for this plan on this cluster; empty if there is."""

    def step_times(self, ranks: Sequence[RankWork], plan: Plan, cluster: Cluster) -> tuple[StepTime, ...]:
        """The step of one rank of each stage of the pipeline."""


# --- Computation ------------------------------------------------------------------------------------------


def compute_s(flops: Quantity, peak_flops_per_s: float, efficiency: float) -> Quantity:
    """Seconds of matrix products: FLOPs / (peak dense rate x efficiency).

    Neglects: norms, activations, casts and kernel launches, which the efficiency accounts for.

    >>> compute_s(1e12, 1e12, 0.5)
    2.0
    """
    return flops / (peak_flops_per_s * efficiency)


def forward_flops(counts: Counts) -> int:
    """FLOPs of a rank's forward passes in a step, over all micro-batches."""
    return sum([e.flops * n for e, n in counts.items() if isinstance(e, Compute) and e.phase == "forward"])


def backward_flops(counts: Counts) -> int:
    """FLOPs of a rank's backward passes in a step, without recomputation (`Compute.backward_flops`)."""
    return sum([e.backward_flops * n for e, n in counts.items() if isinstance(e, Compute)])


def model_flops(counts: Counts) -> int:
    """FLOPs of a rank's forward and backward passes in a step, without recomputation.

    Causal attention is counted whole (`memplan.record.flops_of`).

    Source: Chowdhery et al. 2022, arXiv:2204.02311, appendix B.
    """
    return forward_flops(counts) + backward_flops(counts)


def recomputed_flops(counts: Counts) -> int:
    """Forward FLOPs that a rank recomputes in its backward passes.

    With recompute="full" a block is recomputed up to the last tensor that it saves, so without its last
    matrix product; with "selective" no product is. A split backward pass recomputes its regions for each
    weight.

    Source: torch.utils.checkpoint:_StopRecomputationError, `memplan.tape.SplitBackward`.
    """
    return sum([e.flops * n for e, n in counts.items() if isinstance(e, Compute) and e.phase == "recompute"])


def reducing_share(counts: Counts) -> float:
    """The share of a rank's backward passes during which it reduces gradients, from 0 to 1.

    Neglects: the rank's other stages may still run when one stage reduces after its last pass.
    """
    passes = [(e, n) for e, n in counts.items() if isinstance(e, Pass) and e.part in LAST_PARTS]
    return sum([n for e, n in passes if e.reduces]) / max(1, sum([n for _, n in passes]))


# --- Traffic ----------------------------------------------------------------------------------------------


def ring_bytes_per_s(
    n_ranks: Count, stride: Count, gpus_per_node: Count, intra_node: float, inter_node: float
) -> Quantity:
    """Bytes that one rank sends per second in a collective, over the slowest link that its group crosses.

    Within a node that is the GPU's own link. Between nodes all traffic of a group goes through the network
    links of its members in a node: min(intra, members x inter).

    Assumes: one ring for each network link, as NCCL builds them; all groups of the axis send at once.
    Neglects: latency, congestion, trees and in-network reduction.
    Source: NVIDIA nccl-tests, doc/PERFORMANCE.md (bus bandwidth).

    >>> [ring_bytes_per_s(n, s, 8, 450.0, 50.0) for n, s in ((8, 1), (64, 1), (16, 4), (2, 8))]
    [450.0, 400.0, 100.0, 50.0]
    """
    xp = namespace(n_ranks, stride, gpus_per_node)
    members = ranks_in_a_node(n_ranks, stride, gpus_per_node)
    between = xp.where(members > 1, xp.minimum(intra_node, members * inter_node), inter_node)
    found: Quantity = xp.where(crosses_nodes(n_ranks, stride, gpus_per_node), between, intra_node)
    return found


def neighbour_bytes_per_s(
    n_ranks: Count, stride: Count, gpus_per_node: Count, intra_node: float, inter_node: float
) -> Quantity:
    """Bytes per second from a rank to the next of its group: the network's rate if any group crosses nodes.

    >>> [neighbour_bytes_per_s(n, 4, 8, 450.0, 50.0) for n in (2, 4)]
    [450.0, 50.0]
    """
    crosses = crosses_nodes(n_ranks, stride, gpus_per_node)
    found: Quantity = namespace(crosses).where(crosses, inter_node, intra_node)
    return found


def exposed_s(
    reductions_s: Quantity, gathers_s: Quantity, reducing_s: Quantity, computing_s: Quantity
) -> Quantity:
    """Seconds of traffic that outlast the computation beside them.

    Reductions are hidden by at most `reducing_s` of computation, gathers of weights by the rest of
    `computing_s`; a second of computation hides one second of traffic.

    Assumes: reductions and gathers do not run at the same time, and do not slow the computation.

    >>> exposed_s(3.0, 4.0, 2.0, 5.0)  # 3 - 2 of reductions, 4 - (5 - 2) of gathers
    2.0
    """
    xp = namespace(reductions_s, gathers_s, reducing_s, computing_s)
    hidden_s = xp.minimum(reductions_s, reducing_s)
    exposed: Quantity = reductions_s - hidden_s + xp.maximum(0.0, gathers_s - (computing_s - hidden_s))
    return exposed


# --- The pipeline's bubble --------------------------------------------------------------------------------


def bubble_s(fraction: Quantity, others_s: Quantity) -> Quantity:
    """Seconds that a rank waits: the bubble's fraction of the other ranks' mean working time.

    If all ranks are busy equally long, this is the fraction of its own busy time. A rank that is busier than
    the others waits only for their shorter first and last passes: exact for gpipe.

    Assumes: this rank is the slowest; a rank's virtual stages take equally long.

    >>> bubble_s(0.5, 4.0)
    2.0
    """
    return fraction * others_s


# --- The update -------------------------------------------------------------------------------------------


def update_bytes(weights_bytes: Quantity, grads_bytes: Quantity, optimizer_bytes: Quantity) -> Quantity:
    """Bytes that the optimizer reads and writes: weights and state both, gradients are only read.

    Neglects: intermediate results of implementations that are not fused, zeroing, clipping.

    >>> update_bytes(4, 4, 8)
    28
    """
    return 2 * weights_bytes + grads_bytes + 2 * optimizer_bytes


def updated_share(zero: int, dp: Count) -> Quantity:
    """The share of its weights and gradients that a rank updates: 1 / dp with ZeRO-1, else all.

    Assumes: ZeRO-1's ranks have equal shares.

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
    """Model FLOPs utilisation: model FLOPs of the GPUs / (seconds x GPUs x peak dense rate).

    Source: Chowdhery et al. 2022, arXiv:2204.02311, section 4.1.

    >>> utilisation(30.0, 2.0, 3, 10.0)
    0.5
    """
    return flops / (step_s * n_gpus * peak_flops_per_s)


def peak_flops_per_s(plan: Plan, cluster: Cluster) -> float | None:
    """The peak dense rate of the plan's matrix products; None if the datasheet states none."""
    rate: float | None = getattr(cluster.gpu, f"{plan.formats.matmul}_flops_per_s")
    return rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced(ABC):
    """A time model whose seconds are sums over what a record counts, so that a search can bound them."""

    @property
    @abstractmethod
    def label(self) -> str:
        """How far to trust its seconds, in a sentence."""

    @property
    @abstractmethod
    def band(self) -> Band | None:
        """The band of the published runs of `step.toml`; None: not compared."""

    @abstractmethod
    def prices(self, plan: Plan, cluster: Cluster, *, least: bool = False) -> "Prices":
        """What operations and traffic of a plan, or of many, cost; `least`: at least (`Prices`)."""

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
        return tuple(_step_times(ranks, plan, self.prices(plan, cluster)))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Measured(Priced):
    """Each operation and collective takes as long as was measured on GPUs (`memplan.time`).

    Attributes:
        flash_2: whether attention is FlashAttention 2's, also where torch 2.13 chooses a faster kernel.

    Assumes: one kernel after the other on the compute stream, and clocks as over hours of training.
    Neglects: the host's own time per operation; a rank may reduce and update while others drain the pipeline.
    """

    flash_2: bool = False

    @property
    def label(self) -> str:
        """How far to trust its seconds, in a sentence."""
        band = self.band
        return (
            "Times add up products, attention, memory traffic and collectives as others measured them on "
            f"GPUs; {band.n_runs} published runs had {band.low} to {band.high} times the rate."
        )

    @property
    def band(self) -> Band:
        """The band of the published runs of `step.toml`."""
        found = toml_table(RATES)["band"]
        return Band(found["low"], found["high"], found["n_runs"])

    def prices(self, plan: Plan, cluster: Cluster, *, least: bool = False) -> "Prices":
        """What operations and traffic of a plan, or of many, cost."""
        return MeasuredPrices(plan, cluster, least=least, flash_2=self.flash_2)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline(Priced):
    """FLOPs at a fraction of the peak rate, bytes at the slowest link's rate, the bubble in closed form.

    Attributes:
        efficiency: the fraction of the peak dense rate at which matrix products run, above 0, at most 1.

    Assumes: links and memory at their stated peak.
    Neglects: what is no product; latency; a rank may reduce and update while others drain the pipeline.

    Raises:
        InvalidValue: an efficiency outside (0, 1].
    """

    efficiency: float

    def __post_init__(self) -> None:
        checked_share("efficiency", self.efficiency)

    @property
    def label(self) -> str:
        """How far to trust its seconds, in a sentence."""
        return (
            f"Times are a roofline with products at {self.efficiency:.0%} of the peak rate, as you said; no "
            "run has confirmed them."
        )

    @property
    def band(self) -> None:
        """None: no run was compared."""
        return None

    def prices(self, plan: Plan, cluster: Cluster, *, least: bool = False) -> "Prices":
        """What operations and traffic of a plan, or of many, cost."""
        return RooflinePrices(plan, cluster, self.efficiency)


def time_model_of(cluster: Cluster | None) -> Priced:
    """What was measured on GPUs, or a roofline at the efficiency that the cluster states."""
    stated = None if cluster is None else cluster.efficiency
    return Measured() if stated is None else Roofline(efficiency=stated)


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
    if within and not cluster.intra_node.bytes_per_s:
        yield f"no rate is known within a node ({cluster.intra_node.name})"
    if between and not cluster.inter_node.bytes_per_s:
        yield f"no rate is known between nodes ({cluster.inter_node.name})"


def links_used(plan: Plan, gpus_per_node: int) -> tuple[Yes, Yes]:
    """Whether a plan uses the links within a node, and the links between nodes.

    Here and below the plan's degrees may be arrays over plans.
    """
    within: Yes = False
    between: Yes = False
    mesh = plan.mesh
    xp = namespace(*mesh.sizes.values(), mesh.n_communicators)
    for axis, n in mesh.sizes.items():
        stride = mesh.stride(axis)
        crosses = crosses_nodes(n, stride, gpus_per_node)
        shares = (ranks_in_a_node(n, stride, gpus_per_node) > 1) & (not sends_along(axis))
        within = within | ((n > 1) & (xp.logical_not(crosses) | shares))
        between = between | crosses
    n_ranks = xp.where(mesh.n_communicators < 3, 1, mesh.n_ranks)  # of all, where several axes divide
    crosses = crosses_nodes(n_ranks, 1, gpus_per_node)
    return within | ((n_ranks > 1) & xp.logical_not(crosses)), between | crosses


@final
class GroupRates(dict[Group, Quantity]):
    """Bytes per second of each group of ranks, as it is asked for; unknown rates are infinite."""

    def __init__(self, plan: Plan, cluster: Cluster) -> None:
        super().__init__()
        self.mesh, self.cluster = plan.mesh, cluster

    def __missing__(self, group: Group) -> Quantity:
        links = (link.bytes_per_s or inf for link in (self.cluster.intra_node, self.cluster.inter_node))
        rate = neighbour_bytes_per_s if sends_along(group) else ring_bytes_per_s
        n, stride = self.mesh.size(group), self.mesh.stride(group)
        found = self[group] = rate(n, stride, self.cluster.gpus_per_node, *links)
        return found


class Prices(ABC):
    """What the operations and the traffic of a plan, or of many, cost in seconds."""

    @abstractmethod
    def operation_s(self, event: Compute) -> float:
        """Seconds of a computation.

        At least: a function that is convex in the micro-batch, and never above the seconds.
        """

    @abstractmethod
    def collectives_s(self, total: CollectiveTotal) -> float:
        """Seconds of all collectives of a kind, axis and purpose."""

    @abstractmethod
    def least_sent_s(self, group: Group, n_bytes: Quantity) -> Quantity:
        """The least seconds in which a rank sends bytes among a group of ranks."""

    @abstractmethod
    def moved_s(self, n_bytes: Quantity) -> Quantity:
        """Seconds in which the GPU's memory is read or written."""


@final
class RooflinePrices(Prices):
    """FLOPs at a fraction of the peak rate, bytes at stated rates; unknown rates are infinite."""

    def __init__(self, plan: Plan, cluster: Cluster, efficiency: float) -> None:
        self.flops_per_s = peak_flops_per_s(plan, cluster) or inf
        self.efficiency = efficiency
        self.memory_bytes_per_s = cluster.gpu.memory_bytes_per_s or inf
        self.bytes_per_s = GroupRates(plan, cluster)

    def operation_s(self, event: Compute) -> float:
        """Seconds of its FLOPs at the fraction of the peak rate."""
        flops = event.backward_flops if event.phase == "backward" else event.flops
        return float(compute_s(flops, self.flops_per_s, self.efficiency))

    def collectives_s(self, total: CollectiveTotal) -> float:
        """Seconds of the bytes that the rank sends, at the slowest link's rate."""
        return float(self.least_sent_s(total.axis, total.wire_bytes))

    def least_sent_s(self, group: Group, n_bytes: Quantity) -> Quantity:
        """Seconds of bytes at the slowest link's rate."""
        return n_bytes / self.bytes_per_s[group]

    def moved_s(self, n_bytes: Quantity) -> Quantity:
        """Seconds of bytes at the stated rate of the memory."""
        return n_bytes / self.memory_bytes_per_s


@final
class MeasuredPrices(Prices):
    """What was measured on GPUs (`memplan.time.operations`, `memplan.time.collectives`)."""

    def __init__(self, plan: Plan, cluster: Cluster, *, least: bool, flash_2: bool) -> None:
        self.mesh, self.cluster = plan.mesh, cluster
        self.operations = operations_of(cluster.gpu, plan.formats.matmul, least, flash_2)
        self._rates: dict[Group, Quantity] = {}

    def operation_s(self, event: Compute) -> float:
        """Seconds of a computation."""
        return self.operations.seconds(event)

    def collectives_s(self, total: CollectiveTotal) -> float:
        """Seconds of equal collectives: each of the mean size of all."""
        group, n = total.axis, total.calls
        protocols = lines(self.cluster, total.kind, self.mesh.size(group), self.mesh.stride(group))
        return n * min([line.us(total.wire_bytes / n) for line in protocols]) * 1e-6

    def least_sent_s(self, group: Group, n_bytes: Quantity) -> Quantity:
        """Seconds of bytes at the rate of the fastest protocol of any operation, without latency."""
        if group not in self._rates:
            n, stride = self.mesh.size(group), self.mesh.stride(group)
            self._rates[group] = best_bytes_per_s(self.cluster, n, stride)
        return n_bytes / self._rates[group]

    def moved_s(self, n_bytes: Quantity) -> Quantity:
        """Seconds of bytes at the rate of the memory that products reached."""
        return n_bytes / self.operations.memory_bytes_per_s


def _step_times(ranks: Sequence[RankWork], plan: Plan, prices: Prices) -> Iterator[StepTime]:
    share = updated_share(plan.zero, plan.dp)
    found: list[StepTime] = []
    for rank in ranks:
        states = rank.states
        moved = update_bytes(share * states.weights_bytes, share * states.grads_bytes, states.optimizer_bytes)
        forward_s, backward_s, recomputed_s = passes_s(rank.counts, prices)
        work = Work(
            forward_s=forward_s,
            backward_s=backward_s,
            recomputed_s=recomputed_s,
            sent_s=sent_s(rank.collectives, prices),
            reducing=reducing_share(rank.counts),
            update_s=prices.moved_s(moved),
        )
        found.append(StepTime(**{name: float(seconds) for name, seconds in parts_s(work).items()}))
    total_busy_s = added([busy_s(time.parts) for time in found])
    for time in found:
        yield replace(time, bubble_s=float(waited_s(plan, total_busy_s, busy_s(time.parts))))


def passes_s(counts: Counts, prices: Prices) -> tuple[float, float, float]:
    """Seconds of a rank's forward passes, of its backward passes without recomputation, and of that."""
    found = {"forward": 0.0, "backward": 0.0, "recompute": 0.0}
    for event, n in counts.items():
        if isinstance(event, Compute):
            found[event.phase] += n * prices.operation_s(event)
    return found["forward"], found["backward"], found["recompute"]


Sent: TypeAlias = Mapping[Group, Any]
"""What a rank sends among each group of ranks: bytes, or seconds of sending them."""


class Work(NamedTuple):
    """Seconds of one rank's work in a step, or arrays of them over plans.

    Attributes:
        sent_s: of traffic, by its overlap, then by axis.
        reducing: the share of the backward passes during which gradients are reduced.
    """

    forward_s: Quantity
    backward_s: Quantity
    recomputed_s: Quantity
    sent_s: Mapping[Overlap, Sent]
    reducing: Quantity
    update_s: Quantity


def sent_s(collectives: Iterable[CollectiveTotal], prices: Prices) -> dict[Overlap, Sent]:
    """Seconds of a rank's collectives by their overlap, then by the group of ranks; without the host's."""
    sent: dict[Overlap, dict[Group, float]] = {overlap: {} for overlap in get_args(Overlap)}
    for c in collectives:
        if c.axis != HOST:
            sent[c.overlap][c.axis] = sent[c.overlap].get(c.axis, 0.0) + prices.collectives_s(c)
    return dict(sent)


def parts_s(work: Work) -> dict[str, Quantity]:
    """The parts of `StepTime` without the bubble: of one rank, or arrays over plans."""
    waits = work.sent_s["nothing"]
    products_s = work.forward_s + work.backward_s
    beside_s = exposed_s(
        _together(work.sent_s["backward"]),
        _together(work.sent_s["compute"]),
        work.reducing * (work.backward_s + work.recomputed_s),
        products_s + work.recomputed_s,
    )
    return {
        "compute_s": products_s,
        "recompute_s": work.recomputed_s,
        "tp_s": _waits(waits, "tp"),
        "dp_s": _waits(waits, "dp") + beside_s,
        "pp_s": _waits(waits, "pp"),
        "bubble_s": 0.0,
        "update_s": work.update_s,
    }


def busy_s(parts: Mapping[str, Quantity]) -> Quantity:
    """Seconds that a rank's passes take."""
    return added([parts[name] for name in ("compute_s", "recompute_s", "tp_s", "pp_s")])


def waited_s(plan: Plan, total_busy_s: Quantity, own_busy_s: Quantity) -> Quantity:
    """Seconds of a rank's bubble, from the busy seconds of all ranks and its own."""
    fraction = plan.pipeline_schedule.bubble_fraction(plan.pp, plan.virtual_stages, plan.n_micro_batches)
    return bubble_s(fraction, (total_busy_s - own_busy_s) / namespace(plan.pp).maximum(1, plan.pp - 1))


def _together(seconds: Sent) -> Quantity:
    return added([seconds[group] for group in inner_first(seconds) if group != HOST])


def _waits(seconds: Sent, part: str) -> Quantity:
    """The seconds of the groups whose traffic is counted in a part of the step."""
    return added([seconds[group] for group in inner_first(seconds) if waits_of(group) == part])
