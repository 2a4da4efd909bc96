"""memplan: bytes, traffic and time of a training job, before the GPUs are reserved."""

from typing import TYPE_CHECKING, Any

from memplan.budget import Budget, budget
from memplan.errors import InvalidValue, MemplanError, MissingRule, PlanRefused, UnknownName
from memplan.estimate import Estimate, StageEstimate, estimate
from memplan.hardware import Cluster, Gpu, Interval, Link, Verdict, cluster, gpu, gpu_names
from memplan.models import (
    Gpt,
    Llama,
    Model,
    TracedModel,
    model_from_config,
    parameter_count,
    preset,
    preset_names,
)
from memplan.plan import Plan
from memplan.search import (
    Advice,
    Change,
    Found,
    advise,
    largest_model,
    longest_sequence,
    smallest_cluster,
    why,
)
from memplan.version import version

if TYPE_CHECKING:
    from memplan.search.search import search
    from memplan.tracing import trace
else:
    from memplan import search  # the package, which can be called


def __getattr__(name: str) -> Any:
    """`memplan.__version__`, and `memplan.trace`, which needs torch: looked up when they are asked for."""
    if name == "__version__":
        return version()
    if name == "trace":
        from memplan.tracing import trace

        return trace
    raise AttributeError(f"module 'memplan' has no attribute {name!r}")


__all__ = [
    "Advice",
    "Budget",
    "Change",
    "Cluster",
    "Estimate",
    "Found",
    "Gpt",
    "Gpu",
    "Interval",
    "InvalidValue",
    "Link",
    "Llama",
    "MemplanError",
    "MissingRule",
    "Model",
    "Plan",
    "PlanRefused",
    "StageEstimate",
    "TracedModel",
    "UnknownName",
    "Verdict",
    "advise",
    "budget",
    "cluster",
    "estimate",
    "gpu",
    "gpu_names",
    "largest_model",
    "longest_sequence",
    "model_from_config",
    "parameter_count",
    "preset",
    "preset_names",
    "search",
    "smallest_cluster",
    "trace",
    "why",
]
