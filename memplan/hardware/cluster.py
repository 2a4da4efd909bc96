"""Clusters: nodes of equal GPUs joined by a network, and whether a plan's bytes fit on each GPU."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, TypedDict, Unpack, final, get_args

from memplan.checks import (
    LARGEST_CLUSTER,
    checked_count,
    checked_fraction,
    checked_positive,
    checked_share,
)
from memplan.errors import InvalidValue, shown_value
from memplan.fields import Count, Field, Name, Number
from memplan.files import toml_table
from memplan.hardware.gpu import Gpu, Link, check_link, gpu
from memplan.hardware.overheads import Interval
from memplan.names import read_as

DEFAULT_MARGIN: Final = 0.05
"""The default fraction of usable memory that a plan must leave free to count as fitting.

A policy, not a prediction: published runs of plans that memplan can express in full are within 4 %
(`python -m validate published`).
"""

Verdict = Literal["fits", "fits, tight", "cannot say", "does not fit"]
"""Whether each GPU of a cluster can hold a plan, the best first."""

VERDICTS: Final[tuple[Verdict, ...]] = get_args(Verdict)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """`n_gpus` equal GPUs, `gpus_per_node` to a node; `intra_node` and `inter_node` are one GPU's links.

    `margin` is the fraction of each GPU's usable bytes that a plan must leave free to count as fitting.
    `efficiency` is the fraction of the peak dense rate at which matrix products run; None: as measured.

    Raises:
        InvalidValue: a count that is no positive integer, a `gpu` or a link of another type, a margin outside
            [0, 1), an efficiency outside (0, 1], or a last node that is not full.
    """

    n_gpus: int
    gpu: Gpu
    gpus_per_node: int
    intra_node: Link
    inter_node: Link
    margin: float = DEFAULT_MARGIN
    efficiency: float | None = None
    source: str = ""
    remarks: tuple[str, ...] = field(default=(), compare=False, repr=False)
    """Sentences on how its name was read, which the notes of an estimate repeat."""

    def __post_init__(self) -> None:
        for name in ("n_gpus", "gpus_per_node"):
            object.__setattr__(self, name, checked_count(name, getattr(self, name), most=LARGEST_CLUSTER))
        if not isinstance(self.gpu, Gpu):
            raise InvalidValue(
                f"gpu={shown_value(self.gpu)} is not a GPU; use memplan.gpu(name), or a memplan.Gpu."
            )
        check_link("intra_node", self.intra_node)
        check_link("inter_node", self.inter_node)
        object.__setattr__(self, "margin", checked_fraction("margin", self.margin))
        if self.efficiency is not None:
            object.__setattr__(self, "efficiency", checked_share("efficiency", self.efficiency))
        if self.n_gpus % self.gpus_per_node:
            full = self.n_gpus // self.gpus_per_node * self.gpus_per_node
            choices = f"{full} or {full + self.gpus_per_node}" if full else f"{self.gpus_per_node}"
            raise InvalidValue(
                f"n_gpus={self.n_gpus} does not fill nodes of gpus_per_node={self.gpus_per_node}; "
                f"use {choices} GPUs, or another gpus_per_node."
            )

    @property
    def name(self) -> str:
        """As in `cluster`: "<n>x<gpu>"."""
        return f"{self.n_gpus}x{self.gpu.name}"

    @property
    def n_nodes(self) -> int:
        """n_gpus / gpus_per_node."""
        return self.n_gpus // self.gpus_per_node

    @property
    def budget_bytes(self) -> int | None:
        """The most that a plan which "fits" may hold on one GPU; None: no limit.

        budget = usable_bytes x (1 - margin), rounded down.

        >>> from memplan.units import GiB
        >>> round(cluster("8xh100-sxm").budget_bytes / GiB, 2)  # 79.11 x 0.95
        75.15
        """
        usable = self.gpu.usable_bytes
        return None if usable is None else int(usable * (1 - self.margin))

    def to_dict(self) -> dict[str, Any]:
        """The values that a plan's verdict and time depend on, as plain values."""
        return {
            "name": self.name,
            "n_gpus": self.n_gpus,
            "gpus_per_node": self.gpus_per_node,
            "network": self.inter_node.name,
            "network_bytes_per_s": self.inter_node.bytes_per_s,
            "usable_bytes": self.gpu.usable_bytes,
            "margin": self.margin,
            "efficiency": self.efficiency,
            "budget_bytes": self.budget_bytes,
        }

    def verdict(self, held: Interval) -> Verdict | None:
        """Whether a GPU can hold bytes that are known as an interval; None: it has no limit.

        "fits": even the upper end leaves the margin free. "does not fit": even the lower end is more than is
        usable. "cannot say": neither. Only `Estimate.verdict`, which knows the allocations, says
        "fits, tight".

        Neglects: what else runs on the GPU.

        >>> c = cluster("8xh100-sxm")  # 79.11 GiB usable, 75.15 GiB less the margin
        >>> from memplan.units import GiB
        >>> [c.verdict(Interval(low * GiB, high * GiB)) for low, high in ((70, 75), (70, 76), (80, 85))]
        ['fits', 'cannot say', 'does not fit']
        """
        usable, budget = self.gpu.usable_bytes, self.budget_bytes
        if usable is None or budget is None:
            return None
        if held.high_bytes <= budget:
            return "fits"
        return "does not fit" if held.low_bytes > usable else "cannot say"


NODES: Final = "hardware/clusters.toml"
"""The table of nodes."""


class ClusterChanges(TypedDict, total=False):
    """What may differ from a cluster's table (`cluster`); None: unchanged."""

    gpus_per_node: int | None
    network: Link | str | None
    margin: float | None
    efficiency: float | None


CLUSTER_FIELDS: Final[Mapping[str, Field]] = {
    "gpus_per_node": Count(
        "GPUs in a node", left_out="as such GPUs are usually built in", optional=True, most=LARGEST_CLUSTER
    ),
    "network": Name(
        "Each GPU's share of the network between nodes, as 200Gbit/s or 25GB/s",
        left_out="as such nodes usually have",
        optional=True,
    ),
    "margin": Number(
        "Part of usable memory that a plan which fits leaves free",
        left_out=str(DEFAULT_MARGIN),
        optional=True,
    ),
    "efficiency": Number(
        "Part of the peak rate at which your matrix products run", left_out="times as measured", optional=True
    ),
}
"""The descriptions of `ClusterChanges`, by name."""

CHANGES: Final = tuple(CLUSTER_FIELDS)
"""The names of `ClusterChanges`."""


def cluster(
    text: str,
    *,
    gpus_per_node: int | None = None,
    network: "Link | str | None" = None,
    margin: float | None = None,
    efficiency: float | None = None,
) -> Cluster:
    """The cluster "<n>x<gpu>", of the nodes in which `clusters.toml` puts that GPU; "<gpu>" is one of them.

    Up to one node's worth is one node of exactly that many; more must fill whole nodes. A GPU may have any
    name that `memplan.gpu` knows; if it is another one than the table's, the cluster's `remarks` say so.

    Args:
        text: how many GPUs of which kind.
        gpus_per_node: another number of GPUs in a node than the table's.
        network: another network between nodes: each GPU's share in one direction, as "200Gbit/s" or
            "25GB/s", or a Link.
        margin: the fraction of usable memory that a plan which "fits" leaves free.
        efficiency: the fraction of the peak dense rate at which matrix products run; left out, as measured.

    >>> c = cluster("64xh100-sxm")
    >>> c.n_nodes, c.intra_node.name, c.inter_node.bytes_per_s / 1e9
    (8, 'NVLink 4', 50.0)
    >>> c = cluster("64xh100-sxm", gpus_per_node=4, network="200Gbit/s", margin=0.1)
    >>> c.n_nodes, c.inter_node.bytes_per_s / 1e9, c.margin
    (16, 25.0, 0.1)
    >>> cluster("4xcpu").budget_bytes is None
    True
    >>> cluster("8xH100").remarks
    ('8xH100 is read as 8xh100-sxm.',)

    Raises:
        UnknownName: a GPU that is in no table, with the names that it may stand for.
        InvalidValue: a text of another form, or a count that is zero, huge or leaves a node half full.
    """
    n_gpus, name = _count_and_name(text)
    device = gpu(name)
    node = _node_of(device.name)
    rate = node.get("network_gbit_per_s_per_gpu")
    found = Cluster(
        n_gpus=n_gpus,
        gpu=device,
        gpus_per_node=min(n_gpus, node["gpus_per_node"] if gpus_per_node is None else n_gpus),
        intra_node=device.link,
        inter_node=Link(name=node["network"], bytes_per_s=None if rate is None else rate * 1e9 / 8),
        source=node["source"],
    )
    found = replace(found, remarks=read_as("".join(text.split()), found.name))
    return changed(found, gpus_per_node=gpus_per_node, network=network, margin=margin, efficiency=efficiency)


def changed(found: Cluster, **changes: Unpack[ClusterChanges]) -> Cluster:
    """A cluster with what differs from it.

    Raises:
        InvalidValue: as `cluster`.
    """
    said: dict[str, Any] = {name: value for name, value in changes.items() if value is not None}
    if "gpus_per_node" in said:
        most = checked_count("gpus_per_node", said["gpus_per_node"], most=LARGEST_CLUSTER)
        said["gpus_per_node"] = min(most, found.n_gpus)
    if "network" in said:
        network = said.pop("network")
        said["inter_node"] = network if isinstance(network, Link) else network_link(network)
    return replace(found, **said) if said else found


RATES: Final = {"gbit/s": 1e9 / 8, "gb/s": 1e9}
"""Units of a network's rate, in bytes per second."""


def network_link(text: str) -> Link:
    """A network by its rate: each GPU's share in one direction.

    >>> network_link("400Gbit/s").bytes_per_s == network_link("50 GB/s").bytes_per_s == 50e9
    True

    Raises:
        InvalidValue: a text of another form.
    """
    short = text if isinstance(text, str) and len(text) <= 40 else ""
    match = re.fullmatch(r"\s*([0-9]+\.?[0-9]*)\s*(gbit/s|gb/s)\s*", short, flags=re.ASCII | re.IGNORECASE)
    if match is None:
        raise InvalidValue(
            f"network={shown_value(text)} is not understood; use each GPU's share in one direction, as "
            "200Gbit/s or 25GB/s."
        )
    rate = checked_positive("network", float(match[1]) * RATES[match[2].lower()])
    return Link(name="a network", bytes_per_s=rate)


def gpus_per_node(name: str) -> int:
    """How many GPUs of that name share a node.

    >>> gpus_per_node("h100-sxm")
    8

    Raises:
        UnknownName: a GPU that is in no table, with the nearest one.
    """
    n: int = _node_of(gpu(name).name)["gpus_per_node"]
    return n


def _node_of(name: str) -> dict[str, Any]:
    return next(entry for entry in toml_table(NODES).values() if name in entry["gpus"])


def resolve_cluster(value: "Cluster | str | None", **changes: Unpack[ClusterChanges]) -> Cluster | None:
    """A Cluster from itself or from "<n>x<gpu>", with the changes that are asked for; None stays None.

    Raises:
        UnknownName, InvalidValue: as `cluster`; or a change of no cluster.
    """
    if value is None:
        for name, given in changes.items():
            if given is not None:
                raise InvalidValue(
                    f"{name}={shown_value(given)} says more of a cluster, but there is none; add "
                    "cluster='<n>x<gpu>', or leave it out."
                )
        return None
    return changed(value, **changes) if isinstance(value, Cluster) else cluster(value, **changes)


def _count_and_name(text: str) -> tuple[int, str]:
    example = "use <n>x<gpu>, as in 64xh100-sxm; `memplan gpus` lists the GPUs."
    if not isinstance(text, str):
        raise InvalidValue(f"cluster={shown_value(text)} is not a text; {example}")
    count, name = r"[+-]?[0-9]+", r"[a-z][a-z0-9 _-]*"
    match = re.fullmatch(
        rf"\s*(?:({count})\s*x\s*)?({name}|[0-9]+)\s*", text[:200], flags=re.ASCII | re.IGNORECASE
    )
    if match is None or len(text) > 200:
        raise InvalidValue(f"cluster={text[:80]!r} is not understood; {example}")
    return checked_count("n_gpus", int(match[1] or 1), most=LARGEST_CLUSTER), match[2].strip()
