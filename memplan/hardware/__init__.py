"""Hardware: GPUs, links and clusters, from datasheets."""

from memplan.hardware.cluster import Cluster, cluster, gpus_per_node, resolve_cluster
from memplan.hardware.gpu import DTYPES, Gpu, Link, gpu, gpu_names
from memplan.hardware.overheads import Interval, outside_allocator

__all__ = [
    "DTYPES",
    "Cluster",
    "Gpu",
    "Interval",
    "Link",
    "cluster",
    "gpu",
    "gpu_names",
    "gpus_per_node",
    "outside_allocator",
    "resolve_cluster",
]
