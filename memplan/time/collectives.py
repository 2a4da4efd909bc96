"""How long a collective takes: latency, and bytes over bandwidth, within a node and between nodes.

Within a node the times are measured: for each operation and size of group some lines, latency + bytes / rate,
one for each protocol that NCCL chooses among, of which the fastest counts. Between nodes they are made of
NCCL's own latencies and of the network's rate.
"""

from functools import lru_cache
from math import ceil, inf, log2
from typing import Any, Final, NamedTuple

from memplan.arrays import namespace
from memplan.checks import checked_count
from memplan.errors import MissingRule, shown_value
from memplan.files import toml_table
from memplan.hardware import Cluster, Gpu, resolve_cluster
from memplan.mesh import Count, Yes
from memplan.time.borrowing import lender_of

COLLECTIVES: Final = "time/collectives.toml"
"""The table of lines: for each GPU whose links were measured."""

NETWORK: Final = "time/network.toml"
"""The table of NCCL's latencies and of the share of a network's rate that it reaches."""


class Line(NamedTuple):
    """One protocol of a collective: microseconds of latency, and GB/s that each rank sends."""

    latency_us: float
    gb_per_s: float

    def us(self, wire_bytes: float) -> float:
        """Microseconds of a collective in which a rank sends these bytes.

        >>> Line(10.0, 100.0).us(1e6)
        20.0
        """
        return self.latency_us + wire_bytes / self.gb_per_s / 1e3


MEASURED_AS: Final = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
    "broadcast": "all_gather",
    "reduce": "reduce_scatter",
    "permute": "send",
    "send": "send",
    "recv": "send",
}
"""Which measured operation each `memplan.record.CollectiveKind` takes as long as.

A broadcast is timed as an all-gather: in both a ring passes on the whole tensor (an all-gather all but one
shard). A reduce to one rank is timed as a reduce-scatter for the same reason.
"""


def wire_share(kind: str, n_ranks: int) -> float:
    """What a rank sends in a ring, as a share of the operand (`memplan.record.Collective`).

    Source: NVIDIA nccl-tests, doc/PERFORMANCE.md (bus bandwidth).

    >>> wire_share("all_reduce", 4), wire_share("all_gather", 4), wire_share("send", 2)
    (1.5, 0.75, 1.0)
    """
    if kind == "all_reduce":
        return 2 * (n_ranks - 1) / n_ranks
    return (n_ranks - 1) / n_ranks if kind in ("all_gather", "reduce_scatter", "all_to_all") else 1.0


# --- Where a group's ranks are ----------------------------------------------------------------------------


def crosses_nodes(n_ranks: Count, stride: Count, gpus_per_node: Count) -> Yes:
    """Whether any group of an axis has ranks on more than one node; ranks fill nodes in mesh order.

    A group's members are `stride` ranks apart, so the groups that interleave make a row of n x stride ranks.
    No row crosses the end of a node if its length divides the GPUs of a node.

    >>> crosses_nodes(8, 1, 8), crosses_nodes(2, 8, 8), crosses_nodes(3, 1, 8)
    (False, True, True)
    """
    return (gpus_per_node % (n_ranks * stride) != 0) & (n_ranks > 1)


def ranks_in_a_node(n_ranks: Count, stride: Count, gpus_per_node: Count) -> Count:
    """The fewest members of a group that share a node: max(1, gcd(n stride, node) / stride).

    Rows of n x stride ranks (see `crosses_nodes`) begin at multiples of gcd(n stride, node) within a node.

    >>> [ranks_in_a_node(n, stride, 8) for n, stride in ((64, 1), (8, 2), (2, 8), (3, 1), (8, 3))]
    [8, 4, 1, 1, 2]
    """
    xp = namespace(n_ranks, stride, gpus_per_node)
    members: Count = xp.maximum(1, xp.gcd(n_ranks * stride, gpus_per_node) // stride)
    return members


# --- One collective ---------------------------------------------------------------------------------------


def collective_s(
    cluster: Cluster | str, kind: str, payload_bytes: int, n_ranks: int, stride: int = 1
) -> float:
    """Seconds of one collective among `n_ranks` GPUs that are `stride` ranks apart.

    `payload_bytes` is the operand as the framework passes it (`memplan.record.Collective`). Ranks fill nodes
    in order, and all groups of the mesh's axis send at once: each GPU has its own share of the network.

    Neglects: congestion, and groups of other axes that send at the same time.
    Source: `time/collectives.toml`, `time/network.toml`.

    Raises:
        InvalidValue, UnknownName: no cluster, or numbers that are none.
        MissingRule: an operation without rule, or a link or a network whose rate is not known.

    >>> f"{collective_s('8xh100-sxm', 'all_gather', 512 * 2**20, 8) * 1e3:.1f} ms"
    '1.4 ms'
    >>> f"{collective_s('64xh100-sxm', 'all_gather', 512 * 2**20, 64) * 1e3:.1f} ms"
    '1.8 ms'
    """
    found = resolve_cluster(cluster)
    numbers = {"payload_bytes": payload_bytes, "n_ranks": n_ranks, "stride": stride}
    checked = [checked_count(name, n, least=1, most=2**60) for name, n in numbers.items()]
    if kind not in MEASURED_AS or found is None:
        raise MissingRule(
            f"a collective of kind {shown_value(kind)} has no rule of time; use one of "
            f"{', '.join(MEASURED_AS)}."
        )
    return _collective_s(found, kind, *checked) if n_ranks > 1 else 0.0


@lru_cache(maxsize=65536)
def _collective_s(cluster: Cluster, kind: str, payload_bytes: int, n_ranks: int, stride: int) -> float:
    wire_bytes = payload_bytes * wire_share(kind, n_ranks)
    return min([line.us(wire_bytes) for line in lines(cluster, kind, n_ranks, stride)]) * 1e-6


@lru_cache(maxsize=4096)
def lines(cluster: Cluster, kind: str, n_ranks: int, stride: int) -> tuple[Line, ...]:
    """The protocols among which a group's collectives choose the fastest.

    Raises:
        MissingRule: the rate of a link that it crosses is not known.
    """
    operation = MEASURED_AS[kind]
    crosses = bool(crosses_nodes(n_ranks, stride, cluster.gpus_per_node))
    members = int(ranks_in_a_node(n_ranks, stride, cluster.gpus_per_node)) if crosses else n_ranks
    if operation == "send":
        members = 1 if crosses else 2
    within = _within(cluster, operation, members) if members > 1 else ()
    if not crosses:
        return within
    return tuple(_between(cluster, operation, members, -(-n_ranks // members), within))


def _within(cluster: Cluster, operation: str, n_ranks: int) -> tuple[Line, ...]:
    """The lines of a group within a node: measured, or between those of the next smaller and larger group.

    Beyond the largest group that was measured latency grows as between the last two, and the rate stays.
    Rates are scaled as the link's rate is to that of the GPU which was measured. Where sends were not
    measured they take as long as an all-to-all of two.
    """
    lender = lender_of(cluster.gpu, "collectives")
    own, measured = cluster.intra_node.bytes_per_s, lender.link.bytes_per_s
    if not own or not measured:
        raise MissingRule(
            f"no rate is known within a node ({cluster.intra_node.name}); give a Link that states it."
        )
    table = _measured(lender, operation) or _measured(lender, "all_to_all")
    sizes = sorted(table)
    below = max([n for n in sizes if n <= n_ranks], default=sizes[0])
    above = min([n for n in sizes if n >= n_ranks], default=sizes[-1])
    if below == above and n_ranks > sizes[-1] and len(sizes) > 1:
        below = sizes[-2]
    part = (n_ranks - below) / (above - below) if above > below else 0.0
    return tuple(
        [
            Line(
                max(0.0, a.latency_us + part * (b.latency_us - a.latency_us)),
                own / measured / (1 / a.gb_per_s + min(1.0, part) * (1 / b.gb_per_s - 1 / a.gb_per_s)),
            )
            for a, b in zip(table[below], table[above], strict=True)
        ]
    )


def _measured(gpu: Gpu, operation: str) -> dict[int, list[Line]]:
    entry: dict[str, Any] = toml_table(COLLECTIVES)[gpu.name]
    found = {key.rpartition("_"): value for key, value in entry.items()}
    return {
        int(n): [Line(*one) for one in value] for (name, _, n), value in found.items() if name == operation
    }


def _between(
    cluster: Cluster, operation: str, members: int, n_nodes: int, within: tuple[Line, ...]
) -> list[Line]:
    """The lines of a group with `members` on each node: a ring, and for all-reduces a tree, in each protocol.

    All traffic of a group goes through its members' shares of the network.

    Source: NVIDIA/nccl, src/graph/tuning.cc (`hwLat`, `baseLat`, `ncclTopoTuneModel`).
    """
    rate = cluster.inter_node.bytes_per_s
    if not rate:
        raise MissingRule(
            f"no rate is known between nodes ({cluster.inter_node.name}); give a Link that states it."
        )
    table = toml_table(NETWORK)
    share = members * rate * table["share"]["of_rate"] / 1e9
    most = min(share, max([line.gb_per_s for line in within], default=share))
    around = 2 if operation == "all_reduce" else 1
    hops, inner = around * (n_nodes - 1), around * n_nodes * (members - 1)
    if operation == "send":
        hops, inner = 1, 0
    found = []
    for protocol in ("LL", "LL128", "Simple"):
        own = table[protocol]
        rate_gb_per_s = most * own["of_rate"]
        ring_us = hops * own["ring_network_us"] + inner * own["ring_node_us"]
        found.append(Line(own["ring_base_us"] + ring_us, rate_gb_per_s))
        if operation == "all_reduce":
            tree_us = (members - 1) * own["tree_node_us"] + ceil(log2(n_nodes)) * own["tree_network_us"]
            found.append(Line(own["tree_base_us"] + 2 * tree_us, rate_gb_per_s * table["share"]["of_tree"]))
    return found


def best_bytes_per_s(cluster: Cluster, n_ranks: Count, stride: Count) -> Any:
    """Bytes per second that no protocol of any operation exceeds in a group, or in each of many.

    Infinite for a single rank, and where no rate is known.
    """
    if isinstance(n_ranks, int) and isinstance(stride, int):
        return _best(cluster, n_ranks, stride)
    import numpy as np

    sizes, strides = np.broadcast_arrays(n_ranks, stride)
    groups, place = np.unique(np.stack([sizes.ravel(), strides.ravel()]), axis=1, return_inverse=True)
    rates = np.array([_best(cluster, n, each) for n, each in groups.T.tolist()])[place]
    return rates.reshape(sizes.shape)


@lru_cache(maxsize=4096)
def _best(cluster: Cluster, n_ranks: int, stride: int) -> float:
    if n_ranks == 1:
        return inf
    try:
        found = [line for kind in MEASURED_AS for line in lines(cluster, kind, n_ranks, stride)]
    except MissingRule:
        return inf
    return max([line.gb_per_s for line in found]) * 1e9
