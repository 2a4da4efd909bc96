"""Hardware: GPUs, links and clusters, from datasheets."""

from memplan.hardware.cluster import Cluster, cluster, resolve_cluster
from memplan.hardware.gpu import DTYPES, Gpu, Link, gpu, gpu_names

__all__ = ["DTYPES", "Cluster", "Gpu", "Link", "cluster", "gpu", "gpu_names", "resolve_cluster"]
