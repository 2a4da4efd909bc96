"""How long a step takes: its timeline at prices that were measured, or at a roofline's.

Where a rate is not known there is no step time, and `missing` says why. Numeric arguments are Python numbers
or NumPy arrays over plans.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import reduce
from math import ceil
from operator import add
from typing import Final, NamedTuple, Protocol, final

from memplan.checks import checked_share
from memplan.engines.base import ENGINES
from memplan.errors import InvalidValue
from memplan.files import toml_table
from memplan.hardware import Cluster
from memplan.memory import Bytes
from memplan.mesh import Count
from memplan.plan import Plan
from memplan.record import Compute, Counts, Stretch
from memplan.time.attention import FlashRelease
from memplan.time.prices import (
    MeasuredPrices,
    Prices,
    Quantity,
    RooflinePrices,
    host_bytes_per_s,
    links_used,
    peak_flops_per_s,
)
from memplan.time.streams import CAUSES, PER_S
from memplan.time.timeline import TimedPass, rank_times, timed_passes
from memplan.traffic import CollectiveTotal

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
    """One rank's work in a step.

    Attributes:
        step: its record of the step.
        collectives: their totals.
        states: weights, gradients and optimizer state as its optimizer sees them.
    """

    step: Stretch
    collectives: tuple[CollectiveTotal, ...]
    states: Bytes

    @property
    def counts(self) -> Counts:
        """Occurrences of each computation and collective; a `Compute` has its kind and operands."""
        return self.step.counts


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """What one rank's compute stream does in a step, or waits for, in seconds; the parts add up to `total_s`.

    Attributes:
        compute_s: computes forward and backward passes.
        recompute_s: runs forward passes again.
        host_s: waits for the host to issue kernels, under engines that `memplan/time/host.toml` names, or for
            copies to it and from it.
        tp_s: waits for traffic over the tensor axis, and of tokens to experts.
        dp_s: waits for traffic over the data axes, or between all ranks.
        pp_s: sends to other stages of the pipeline.
        bubble_s: waits for what other stages have not computed yet, and at the end for the slowest of them.
        update_s: the optimizer.
    """

    compute_s: float
    recompute_s: float
    host_s: float = 0.0
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
    """What nine in ten real runs reached at least and at most of the tokens per second of a time model."""

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


# --- The update -------------------------------------------------------------------------------------------


def update_bytes(weights_bytes: Quantity, grads_bytes: Quantity, optimizer_bytes: Quantity) -> Quantity:
    """Bytes that the optimizer reads and writes: weights and state both, gradients are only read.

    Neglects: intermediate results of implementations that are not fused, zeroing, clipping.

    >>> update_bytes(4, 4, 8)
    28
    """
    return 2 * weights_bytes + grads_bytes + 2 * optimizer_bytes


def updated_share(zero: int, n_shards: Count) -> Quantity:
    """The share of its weights and gradients that a rank updates: 1 / (dp x cp) with ZeRO-1, else all.

    Assumes: ZeRO-1's ranks have equal shares.

    >>> updated_share(1, 4), updated_share(3, 4)
    (0.25, 1)
    """
    return 1 / n_shards if zero == 1 else 1


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced(ABC):
    """A time model that plays a record at prices, so that a search can bound its seconds."""

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

    def timed_passes(self, ranks: Sequence[RankWork], plan: Plan, cluster: Cluster) -> tuple[TimedPass, ...]:
        """Every pass of a step, given one rank of each stage, in the order of each rank's record."""
        return tuple(timed_passes([rank.step for rank in ranks], plan, self.prices(plan, cluster)))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Measured(Priced):
    """Each operation and collective takes as long as was measured on GPUs (`memplan.time`).

    Attributes:
        flash: the release of FlashAttention that runs, where torch 2.13 would choose a faster kernel.

    Assumes: clocks as over hours of training; traffic does not slow the computation beside it.
    Neglects: the host's own time per operation under engines that `memplan/time/host.toml` does not name.
    """

    flash: FlashRelease | None = None

    @property
    def label(self) -> str:
        """How far to trust its seconds, in a sentence."""
        band = self.band
        return (
            "Times add up products, attention, memory traffic and collectives as others measured them on "
            f"GPUs; nine in ten of {band.n_runs} published runs had {band.low} to {band.high} times the rate."
        )

    @property
    def band(self) -> Band:
        """The band of the published runs of `step.toml`."""
        found = toml_table(RATES)["band"]
        return Band(found["low"], found["high"], found["n_runs"])

    def prices(self, plan: Plan, cluster: Cluster, *, least: bool = False) -> "Prices":
        """What operations and traffic of a plan, or of many, cost."""
        return MeasuredPrices(plan, cluster, least=least, flash=self.flash)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline(Priced):
    """FLOPs at a fraction of the peak rate, bytes at the slowest link's rate.

    Attributes:
        efficiency: the fraction of the peak dense rate at which matrix products run, above 0, at most 1.

    Assumes: links and memory at their stated peak.
    Neglects: what is no product; latency.

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
    engine = ENGINES.named(plan.engine)
    if engine.is_accounting:
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
    if engine.offloads(plan):
        yield "no rate is known of the host, which updates offloaded states"
    elif engine.copies_to_host(plan) and host_bytes_per_s(cluster) is None:
        yield f"no rate is known between {gpu.name} and its host"
    if cluster.intra_node.bytes_per_s and cluster.inter_node.bytes_per_s:
        return
    within, between = links_used(plan, cluster.gpus_per_node)
    if within and not cluster.intra_node.bytes_per_s:
        yield f"no rate is known within a node ({cluster.intra_node.name})"
    if between and not cluster.inter_node.bytes_per_s:
        yield f"no rate is known between nodes ({cluster.inter_node.name})"


def _step_times(ranks: Sequence[RankWork], plan: Plan, prices: Prices) -> Iterator[StepTime]:
    share = updated_share(plan.zero, plan.n_shards)
    updates = []
    for rank in ranks:
        states = rank.states
        moved = update_bytes(share * states.weights_bytes, share * states.grads_bytes, states.optimizer_bytes)
        updates.append(ceil(prices.moved_s(moved) * PER_S))
    times = rank_times([rank.step for rank in ranks], plan, prices)
    end = max([time.done + update for time, update in zip(times, updates, strict=True)])
    for time, update in zip(times, updates, strict=True):
        bubble = end - sum(time.spent) - update
        spent = {cause: n / PER_S for cause, n in zip(CAUSES, time.spent, strict=True)}
        yield StepTime(**spent, bubble_s=bubble / PER_S, update_s=update / PER_S)
