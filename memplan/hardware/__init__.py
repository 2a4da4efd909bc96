"""Hardware: GPUs, links and clusters, from datasheets."""

from memplan.hardware.cluster import (
    CHANGES,
    CLUSTER_FIELDS,
    DEFAULT_MARGIN,
    VERDICTS,
    Cluster,
    ClusterChanges,
    Verdict,
    cluster,
    gpus_per_node,
    resolve_cluster,
)
from memplan.hardware.gpu import DTYPES, Gpu, Link, gpu, gpu_names
from memplan.hardware.overheads import Interval, outside_allocator

__all__ = [
    "CHANGES",
    "CLUSTER_FIELDS",
    "DEFAULT_MARGIN",
    "DTYPES",
    "VERDICTS",
    "Cluster",
    "ClusterChanges",
    "Gpu",
    "Interval",
    "Link",
    "Verdict",
    "cluster",
    "gpu",
    "gpu_names",
    "gpus_per_node",
    "outside_allocator",
    "resolve_cluster",
]
