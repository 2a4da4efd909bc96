"""memplan: bytes, traffic and time of a training job, before the GPUs are reserved."""

from memplan.models import Gpt, Llama, Model
from memplan.plan import Plan

__all__ = ["Gpt", "Llama", "Model", "Plan"]
