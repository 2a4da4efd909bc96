"""How many parameters a model has, by running its forward pass."""

from functools import cache

from memplan.models.base import Model
from memplan.shapes import INT64, n_elements
from memplan.tape import Run, Setting, Tensor


@cache
def parameter_count(model: Model) -> int:
    """Elements of all weights; a tied head counts once.

    >>> from memplan.models.presets import preset
    >>> parameter_count(preset("llama-2-7b"))
    6738415616
    """
    run = Run(Setting(micro_batch=1, seq_len=1))
    x = model.embed(Tensor(run, (1, 1), INT64))
    ends = dict(run.parameters)
    run.parameters.clear()
    x = model.block(x)
    block = sum(n_elements(p.shape) for p in run.parameters.values())
    run.parameters = ends
    model.head(x)
    return sum(n_elements(p.shape) for p in run.parameters.values()) + model.n_layers * block
