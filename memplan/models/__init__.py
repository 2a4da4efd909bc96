"""Models: forward passes over shapes."""

from memplan.models.base import Model
from memplan.models.gpt import Gpt
from memplan.models.huggingface import model_from_config
from memplan.models.llama import Llama
from memplan.models.lookup import resolve
from memplan.models.parameters import parameter_count
from memplan.models.presets import preset, preset_names, preset_source
from memplan.models.traced import TracedModel

__all__ = [
    "Gpt",
    "Llama",
    "Model",
    "TracedModel",
    "model_from_config",
    "parameter_count",
    "preset",
    "preset_names",
    "preset_source",
    "resolve",
]
