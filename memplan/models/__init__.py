"""Models: forward passes over shapes."""

from memplan.models.base import Model
from memplan.models.gpt import Gpt
from memplan.models.llama import Llama

__all__ = ["Gpt", "Llama", "Model"]
