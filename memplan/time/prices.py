"""What operations and collectives cost: as they were measured on GPUs, or at a roofline's rates.

Numeric arguments are Python numbers or NumPy arrays over plans.
"""

from abc import ABC, abstractmethod
from math import inf
from typing import TYPE_CHECKING, Any, Final, TypeAlias, final

from memplan.arrays import namespace
from memplan.engines.base import ENGINES
from memplan.files import toml_table
from memplan.hardware import Cluster
from memplan.mesh import Count, Group, Yes, sends_along
from memplan.plan import Plan
from memplan.record import CollectiveKind, Compute
from memplan.time.attention import FlashRelease
from memplan.time.collectives import Line, best_bytes_per_s, crosses_nodes, lines, ranks_in_a_node
from memplan.time.operations import operations_of
from memplan.units import GB

if TYPE_CHECKING:
    import numpy.typing as npt

HOST_LINKS: Final = "time/host_links.toml"
"""The table of rates between GPUs and their hosts."""

HOST: Final = "time/host.toml"
"""The table of how long hosts take to issue a kernel."""

Quantity: TypeAlias = "float | npt.NDArray[Any]"
"""A number, or one for each of many plans."""


def compute_s(flops: Quantity, peak_flops_per_s: float, efficiency: float) -> Quantity:
    """Seconds of matrix products: FLOPs / (peak dense rate x efficiency).

    Neglects: norms, activations, casts and kernel launches, which the efficiency accounts for.

    >>> compute_s(1e12, 1e12, 0.5)
    2.0
    """
    return flops / (peak_flops_per_s * efficiency)


def peak_flops_per_s(plan: Plan, cluster: Cluster) -> float | None:
    """The peak dense rate of the plan's matrix products; None if the datasheet states none."""
    rate: float | None = getattr(cluster.gpu, f"{plan.formats.matmul}_flops_per_s")
    return rate


def host_bytes_per_s(cluster: Cluster) -> float | None:
    """The rate of copies between a GPU and its host, as measured of their link; None: not known."""
    found: dict[str, Any] = toml_table(HOST_LINKS).get(cluster.gpu.host_link, {})
    return found["gb_per_s"] * GB if found else None


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


@final
class WireBytes:
    """What a rank sends in a collective under a plan's engine, not rounded to whole bytes."""

    def __init__(self, plan: Plan) -> None:
        self.mesh, self.engine = plan.mesh, ENGINES.named(plan.engine)

    def __call__(self, kind: CollectiveKind, group: Group, payload_bytes: int) -> float:
        """The bytes of one collective among a group of ranks."""
        n_ranks: int = self.mesh.size(group)
        return self.engine.wire_bytes(kind, n_ranks * payload_bytes, n_ranks) / n_ranks


class Prices(ABC):
    """What the operations and the traffic of a plan, or of many, cost in seconds.

    `host_s`: what the host takes to issue one kernel or collective; 0: not known. `host_bytes_per_s`: the
    rate of copies between the GPU and its host.
    """

    host_s: float = 0.0
    host_bytes_per_s: float = inf

    def copied_s(self, n_bytes: int) -> float:
        """Seconds of a copy between the GPU and its host's page-locked memory."""
        return n_bytes / self.host_bytes_per_s

    @abstractmethod
    def operation_s(self, event: Compute) -> float:
        """Seconds of a computation.

        At least: a function that is convex in the micro-batch, and never above the seconds.
        """

    @abstractmethod
    def collective_s(self, kind: CollectiveKind, group: Group, payload_bytes: int) -> float:
        """Seconds of one collective among a group of ranks of one plan."""

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
        self.wire_bytes = WireBytes(plan)
        self.flops_per_s = peak_flops_per_s(plan, cluster) or inf
        self.efficiency = efficiency
        self.memory_bytes_per_s = cluster.gpu.memory_bytes_per_s or inf
        self.bytes_per_s = GroupRates(plan, cluster)
        self.host_bytes_per_s = host_bytes_per_s(cluster) or inf

    def operation_s(self, event: Compute) -> float:
        """Seconds of its FLOPs at the fraction of the peak rate."""
        flops = event.backward_flops if event.phase == "backward" else event.flops
        return float(compute_s(flops, self.flops_per_s, self.efficiency))

    def collective_s(self, kind: CollectiveKind, group: Group, payload_bytes: int) -> float:
        """Seconds of the bytes that the rank sends, at the slowest link's rate."""
        return float(self.least_sent_s(group, self.wire_bytes(kind, group, payload_bytes)))

    def least_sent_s(self, group: Group, n_bytes: Quantity) -> Quantity:
        """Seconds of bytes at the slowest link's rate."""
        return n_bytes / self.bytes_per_s[group]

    def moved_s(self, n_bytes: Quantity) -> Quantity:
        """Seconds of bytes at the stated rate of the memory."""
        return n_bytes / self.memory_bytes_per_s


@final
class MeasuredPrices(Prices):
    """What was measured on GPUs (`memplan.time.operations`, `memplan.time.collectives`)."""

    def __init__(self, plan: Plan, cluster: Cluster, *, least: bool, flash: FlashRelease | None) -> None:
        self.mesh, self.cluster, self.wire_bytes = plan.mesh, cluster, WireBytes(plan)
        self._protocols: dict[tuple[CollectiveKind, Group], tuple[Line, ...]] = {}
        self.operations = operations_of(cluster.gpu, plan.formats.matmul, least, flash)
        self._rates: dict[Group, Quantity] = {}
        self.host_bytes_per_s = host_bytes_per_s(cluster) or inf
        if not least:
            self.host_s = toml_table(HOST).get(plan.engine, {}).get("us", 0.0) * 1e-6

    def operation_s(self, event: Compute) -> float:
        """Seconds of a computation."""
        return self.operations.seconds(event)

    def collective_s(self, kind: CollectiveKind, group: Group, payload_bytes: int) -> float:
        """Seconds under the fastest protocol; none for a rank alone."""
        protocols = self._protocols.get((kind, group))
        if protocols is None:
            protocols = lines(self.cluster, kind, self.mesh.size(group), self.mesh.stride(group))
            self._protocols[kind, group] = protocols
        n_bytes = self.wire_bytes(kind, group, payload_bytes)
        return min([line.us(n_bytes) for line in protocols], default=0.0) * 1e-6

    def least_sent_s(self, group: Group, n_bytes: Quantity) -> Quantity:
        """Seconds of bytes at the rate of the fastest protocol of any operation, without latency."""
        if group not in self._rates:
            n, stride = self.mesh.size(group), self.mesh.stride(group)
            self._rates[group] = best_bytes_per_s(self.cluster, n, stride)
        return n_bytes / self._rates[group]

    def moved_s(self, n_bytes: Quantity) -> Quantity:
        """Seconds of bytes at the rate of the memory that products reached."""
        return n_bytes / self.operations.memory_bytes_per_s
