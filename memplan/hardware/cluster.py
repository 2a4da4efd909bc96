"""Many GPUs: nodes of equal GPUs, joined by a network."""

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any, Final, final

from memplan.checks import LARGEST_CLUSTER, checked_count, checked_fraction
from memplan.errors import InvalidValue, shown_value
from memplan.hardware.gpu import Gpu, Link, gpu, gpu_names

DEFAULT_MARGIN: Final = 0.05
"""The fraction of usable memory that `fits` leaves free unless told otherwise: a policy, not a prediction."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """`n_gpus` equal GPUs, `gpus_per_node` to a node; `intra_node` and `inter_node` are one GPU's links.

    `margin` is the fraction of each GPU's usable bytes that a plan must leave free to count as fitting.

    Raises:
        InvalidValue: a count that is no positive integer, a margin outside [0, 1), or a last node that is
            not full.
    """

    n_gpus: int
    gpu: Gpu
    gpus_per_node: int
    intra_node: Link
    inter_node: Link
    margin: float = DEFAULT_MARGIN
    source: str = ""

    def __post_init__(self) -> None:
        for field in ("n_gpus", "gpus_per_node"):
            object.__setattr__(self, field, checked_count(field, getattr(self, field), most=LARGEST_CLUSTER))
        checked_fraction("margin", self.margin)
        if self.n_gpus % self.gpus_per_node:
            full = self.n_gpus // self.gpus_per_node * self.gpus_per_node
            choices = f"{full} or {full + self.gpus_per_node}" if full else f"{self.gpus_per_node}"
            raise InvalidValue(
                f"n_gpus={self.n_gpus} does not fill nodes of gpus_per_node={self.gpus_per_node}; "
                f"use {choices}, or a Cluster with another gpus_per_node."
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
        """What a plan may hold on one GPU and still fit; None: no limit.

        budget = usable_bytes x (1 - margin), rounded down.

        Neglects: what else runs on the GPU. The margin stands in for what is not in the compared number:
            the CUDA context, communication buffers and fragmentation, until they are predicted.

        >>> from memplan.units import GiB
        >>> round(cluster("8xh100-sxm").budget_bytes / GiB, 2)  # 79.11 x 0.95
        75.15
        """
        usable = self.gpu.usable_bytes
        return None if usable is None else int(usable * (1 - self.margin))


@cache
def node_table() -> MappingProxyType[str, dict[str, Any]]:
    """The entries of `clusters.toml` as they stand there, read once, at first use."""
    text = files("memplan.hardware").joinpath("clusters.toml").read_text(encoding="utf-8")
    return MappingProxyType(tomllib.loads(text))


def cluster(text: str) -> Cluster:
    """The cluster "<n>x<gpu>", of the nodes in which `clusters.toml` puts that GPU.

    Up to one node's worth is one node of exactly that many; more must fill whole nodes.

    >>> c = cluster("64xh100-sxm")
    >>> c.n_nodes, c.intra_node.name, c.inter_node.bytes_per_s / 1e9
    (8, 'NVLink 4', 50.0)
    >>> cluster("4xcpu").budget_bytes is None
    True

    Raises:
        UnknownName: a GPU that is in no table, with the nearest one.
        InvalidValue: a text of another form, or a count that is zero, huge or leaves a node half full.
    """
    n_gpus, name = _count_and_name(text)
    device = gpu(name)
    node = _node_of(name)
    rate = node.get("network_gbit_per_s_per_gpu")
    return Cluster(
        n_gpus=n_gpus,
        gpu=device,
        gpus_per_node=min(n_gpus, node["gpus_per_node"]),
        intra_node=device.link,
        inter_node=Link(name=node["network"], bytes_per_s=None if rate is None else rate * 1e9 / 8),
        source=node["source"],
    )


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
    return next(entry for entry in node_table().values() if name in entry["gpus"])


def resolve_cluster(value: "Cluster | str | None") -> Cluster | None:
    """A Cluster from itself or from "<n>x<gpu>"; None stays None.

    Raises:
        UnknownName, InvalidValue: as `cluster`.
    """
    return value if value is None or isinstance(value, Cluster) else cluster(value)


def _count_and_name(text: str) -> tuple[int, str]:
    example = f"use <n>x<gpu>, as in 64xh100-sxm; GPUs: {', '.join(gpu_names())}."
    if not isinstance(text, str):
        raise InvalidValue(f"cluster={shown_value(text)} is not a text; {example}")
    match = re.fullmatch(r"\s*([+-]?[0-9]+)\s*x\s*(\S+)\s*", text[:200], flags=re.ASCII | re.IGNORECASE)
    if match is None or len(text) > 200:
        raise InvalidValue(f"cluster={text[:80]!r} is not understood; {example}")
    return checked_count("n_gpus", int(match[1]), most=LARGEST_CLUSTER), match[2].lower()
