"""memplan: bytes, traffic and time of a training job, before the GPUs are reserved."""

from memplan.errors import MemplanError
from memplan.estimate import Estimate, estimate
from memplan.hardware import Cluster, cluster
from memplan.models import Gpt, Llama, Model, model_from_config, parameter_count, preset, preset_names
from memplan.plan import Plan
from memplan.search import Advice, advise, largest_model, longest_sequence, search, smallest_cluster, why

__all__ = [
    "Advice",
    "Cluster",
    "Estimate",
    "Gpt",
    "Llama",
    "MemplanError",
    "Model",
    "Plan",
    "advise",
    "cluster",
    "estimate",
    "largest_model",
    "longest_sequence",
    "model_from_config",
    "parameter_count",
    "preset",
    "preset_names",
    "search",
    "smallest_cluster",
    "why",
]
