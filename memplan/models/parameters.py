"""The weights and the inputs of a model, as its forward pass uses them."""

from collections import deque
from collections.abc import Iterator, Mapping
from functools import cache

from memplan.errors import InvalidValue, shown_value
from memplan.models.base import Model
from memplan.models.recording import shape_at
from memplan.models.traced import TracedModel
from memplan.shapes import INT64, Shape, n_elements
from memplan.tape import OpContext, Tape, Tensor

Weights = Mapping[str, Shape]
"""Shapes by name."""


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


def counted_weights(model: Model) -> Iterator[tuple[str, Shape, int]]:
    """Name and shape of each weight, and the number of equal ones; a tied head's are counted once."""
    if isinstance(model, TracedModel):
        yield from ((one.name, shape_at(one.shape, 1, 1), n) for one, n in model.parameters)
        return
    embed, blocks, head = _used(model)
    yield from ((name, shape, 1) for name, shape in {**embed, **head}.items())
    yield from ((name, shape, n) for kind, n in model.layers for name, shape in blocks[kind].items())


def has_sequence(model: Model) -> bool:
    """Whether a sample is a sequence of tokens; a model of images, say, is traced without one."""
    return not isinstance(model, TracedModel) or model.has_sequence


def ends_are_tied(model: Model) -> bool:
    """Whether the head uses a weight of the embedding."""
    if isinstance(model, TracedModel):
        return model.tied
    embed, _, head = _used(model)
    return not embed.keys().isdisjoint(head)


def end_modules(model: Model) -> tuple[list[str], list[str]]:
    """The names of the modules with weights before the blocks, and after them, as the model calls them.

    >>> from memplan.models.presets import preset
    >>> end_modules(preset("llama-3-8b"))
    (['embedding.tokens'], ['head.norm', 'head.output'])
    """
    embed, _, head = _used(model)
    before, after = ([name.rpartition(".")[0] for name in weights] for weights in (embed, head))
    return list(dict.fromkeys(before)), [name for name in dict.fromkeys(after) if name not in before]


@cache
def not_divided(model: Model, tp: int) -> str:
    """The error of an operation that `tp` ranks cannot divide, as text; empty if there is none."""
    if not model.divides_itself:
        return ""
    try:
        deque(_passes(model, Tape(OpContext(tp=tp, micro_batch=1, seq_len=1))), maxlen=0)
    except InvalidValue as error:
        return str(error)
    return ""


@cache
def _counted(model: Model) -> int:
    return sum([n * n_elements(shape) for _, shape, n in counted_weights(model)])


@cache
def _used(model: Model) -> tuple[Weights, Mapping[str, Weights], Weights]:
    """The weights that the embedding uses, that a block of each kind uses, and that the head uses."""
    tape = Tape(OpContext(micro_batch=1, seq_len=1))
    found = []
    for _ in _passes(model, tape):
        found.append({name: parameter.shape for name, parameter in tape.parameters.items()})
        tape.parameters.clear()
    embed, *blocks, head = found
    return embed, dict(zip(model.kinds, blocks, strict=True)), head


def _passes(model: Model, tape: Tape) -> Iterator[None]:
    """Runs the embedding, a block of each kind and the head, one after the other."""
    x = model.embed(Tensor(tape, (1, 1), INT64))
    yield
    for kind in model.kinds:
        with tape.named(kind):
            x = model.block(x, kind)
        yield
    model.head(x)
    yield
