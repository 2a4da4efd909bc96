"""The number of a model's parameters, counted by running its forward pass."""

from functools import cache

from memplan.errors import InvalidValue, shown_value
from memplan.models.base import Model
from memplan.models.traced import TracedModel
from memplan.shapes import INT64, n_elements
from memplan.tape import OpContext, Tape, Tensor


def parameter_count(model: Model) -> int:
    """The number of elements of all weights; a tied head's are counted once.

    >>> from memplan.models.presets import preset
    >>> parameter_count(preset("llama-2-7b"))
    6738415616

    Raises:
        InvalidValue: for anything but a Model.
    """
    if not isinstance(model, Model):
        raise InvalidValue(
            f"model={shown_value(model)} is not a Model; use memplan.preset(name), or "
            "memplan.model_from_config(path)."
        )
    return _counted(model)


@cache
def _counted(model: Model) -> int:
    if isinstance(model, TracedModel):
        return model.n_parameters
    tape = Tape(OpContext(micro_batch=1, seq_len=1))
    x = model.embed(Tensor(tape, (1, 1), INT64))
    ends = dict(tape.parameters)
    tape.parameters.clear()
    x = model.block(x)
    block = sum(n_elements(p.shape) for p in tape.parameters.values())
    tape.parameters = ends
    model.head(x)
    return sum(n_elements(p.shape) for p in tape.parameters.values()) + model.n_layers * block
