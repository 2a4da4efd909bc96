"""memplan: bytes, traffic and time of a training job, before the GPUs are reserved."""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from memplan import starting as _starting  # noqa: F401 (first: the others take a while to load)
from memplan.budget import Budget, budget
from memplan.errors import InvalidValue, MemplanError, MissingRule, PlanRefused, UnknownName
from memplan.estimate import Estimate, StageEstimate, estimate
from memplan.hardware import Cluster, Gpu, Interval, Link, Verdict, cluster, gpu, gpu_names
from memplan.models import (
    Model,
    TracedModel,
    model_from_config,
    parameter_count,
    preset,
    preset_names,
)
from memplan.plan import Plan
from memplan.version import version

if TYPE_CHECKING:
    from memplan.advice import Advice, Change, advise
    from memplan.comparison import compare, why
    from memplan.models.gpt import Gpt
    from memplan.models.llama import Llama
    from memplan.oom import OomReport, explain_oom
    from memplan.search.questions import largest_model, longest_sequence, smallest_cluster
    from memplan.search.search import Found, search
    from memplan.tracing.tracer import trace

LATER: Final = {
    "trace": "memplan.tracing.tracer",
    "Gpt": "memplan.models.gpt",
    "Llama": "memplan.models.llama",
    **dict.fromkeys(("compare", "why"), "memplan.comparison"),
    **dict.fromkeys(("OomReport", "explain_oom"), "memplan.oom"),
    **dict.fromkeys(("Advice", "Change", "advise"), "memplan.advice"),
}
"""The modules of names that are looked up when they are asked for; the others' is `memplan.search`."""


def __getattr__(name: str) -> Any:
    """`memplan.__version__`, `memplan.trace`, which needs torch, and searching: looked up when asked for."""
    if name == "__version__":
        return version()
    if name not in __all__:
        raise AttributeError(f"module 'memplan' has no attribute {name!r}")
    package = import_module(LATER.get(name, "memplan.search"))
    return package if name == "search" else getattr(package, name)  # a package that can be called


def __dir__() -> list[str]:
    """The public names, for completion and `dir(memplan)`."""
    return sorted([*__all__, "__version__"])


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
    "OomReport",
    "Plan",
    "PlanRefused",
    "StageEstimate",
    "TracedModel",
    "UnknownName",
    "Verdict",
    "advise",
    "budget",
    "cluster",
    "compare",
    "estimate",
    "explain_oom",
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
