"""A model from its name, its file, or itself."""

import os

from memplan.errors import InvalidValue, shown_value, unknown_name
from memplan.models.base import Model
from memplan.models.huggingface import model_from_config
from memplan.models.presets import preset, preset_names
from memplan.models.traced import is_trace, model_from_trace


def resolve(model: Model | str | os.PathLike[str]) -> Model:
    """The model that is meant: a Model itself, a preset's name, or the path of a trace or a config.json.

    A preset's name goes before a folder of the same name: write ./gpt2 for the folder.

    >>> resolve("gpt2").n_layers
    12

    Raises:
        UnknownName: a name that is no preset and no path.
        InvalidValue: a path whose file is no model's configuration, or a value of another type.
    """
    if isinstance(model, Model):
        return model
    if isinstance(model, os.PathLike):
        return _of_file(model)
    if hasattr(model, "named_parameters"):
        raise InvalidValue(
            f"model is a module ({type(model).__name__}), which must be traced; give example_inputs=, or a "
            "model of memplan.trace."
        )
    if not isinstance(model, str):
        raise InvalidValue(
            f"model={shown_value(model)} is not a model; use a preset's name, the path of a config.json, "
            "or a memplan.Model."
        )
    if model in preset_names():
        return preset(model)
    if _looks_like_a_path(model):
        return _of_file(model)
    raise unknown_name("model", model, preset_names())


def _of_file(path: str | os.PathLike[str]) -> Model:
    """The model of a trace or of a config.json."""
    return model_from_trace(path) if is_trace(path) else model_from_config(path)


def _looks_like_a_path(text: str) -> bool:
    if text.endswith(".json") or os.sep in text or text in (".", ".."):
        return True
    try:
        return os.path.exists(text)
    except ValueError:
        return False
