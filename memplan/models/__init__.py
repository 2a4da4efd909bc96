"""Models: forward passes over shapes."""

from memplan.models.base import Decoder, Layers, Model, model_dict, not_adapted, not_divided_so
from memplan.models.families import Family, implemented
from memplan.models.lookup import (
    divided,
    is_of_transformers,
    model_from_config,
    of_sizes,
    resolve,
    under_deepspeed,
)
from memplan.models.parameters import (
    counted_weights,
    end_modules,
    ends_are_tied,
    has_sequence,
    not_divided,
    parameter_count,
)
from memplan.models.presets import preset, preset_named, preset_names, preset_source
from memplan.models.traced import TracedModel

__all__ = [
    "Decoder",
    "Family",
    "Layers",
    "Model",
    "TracedModel",
    "counted_weights",
    "divided",
    "end_modules",
    "ends_are_tied",
    "has_sequence",
    "implemented",
    "is_of_transformers",
    "model_dict",
    "model_from_config",
    "not_adapted",
    "not_divided",
    "not_divided_so",
    "of_sizes",
    "parameter_count",
    "preset",
    "preset_named",
    "preset_names",
    "preset_source",
    "resolve",
    "under_deepspeed",
]
