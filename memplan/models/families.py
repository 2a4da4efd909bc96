"""The families of models, found by name in a registry.

memplan's own families are each a file of this folder: the forward pass of each implementation, and the reader
of a config.json. Another package adds one by an entry point of the group `memplan.models` (see
`memplan.registry`), whose object is a `Family`.
"""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Final, NamedTuple, final

from memplan.errors import InvalidValue, shown_value, unknown_name
from memplan.fields import Name
from memplan.models.base import Model
from memplan.models.config import Config
from memplan.registry import Registry


class Reader(NamedTuple):
    """Reads the config.json of an architecture, a class of transformers: the model, under a name."""

    architecture: str
    read: Callable[[Config, str], Model]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Models of one architecture.

    Attributes:
        implementations: the class of each implementation, by its name; the first is a preset's default.
        readers: functions that read a config.json, by its `model_type`.
        presets: models by name, as the entries of `presets.toml` without their `family`.
    """

    implementations: Mapping[str, type[Model]]
    readers: Mapping[str, Reader] = field(default_factory=dict)
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def model(self, **sizes: Any) -> Model:
        """A model of these sizes, in the default implementation."""
        return next(iter(self.implementations.values()))(**sizes)


NAMES: Final = (
    "gpt", "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3", "olmo2",
    "starcoder2", "gpt_neox", "opt", "cohere",
)  # fmt: skip
"""memplan's own families: each is an object in the module of this name, with the name in capitals."""

FAMILIES: Final = Registry(
    what="model",
    kind=Family,
    own={name: f"memplan.models.{name}:{name.upper()}" for name in NAMES},
)
"""The families by name; one is imported when a model of it is first used."""

IMPLEMENTATION: Final = Name(
    "Whose code trains the model: reference, torchtitan, ...", left_out="its family's default", optional=True
)
"""The description of the argument that names one of `implementations_of`."""


def implementations_of(model: Model) -> Mapping[str, type[Model]]:
    """The implementations of a model's family by name; none of a traced model, which is its own code."""
    return FAMILIES.named(model.family).implementations if model.family in FAMILIES.names() else {}


def implemented(model: Model, implementation: str) -> Model:
    """The same model in the code of another implementation.

    >>> from memplan.models.presets import preset
    >>> implemented(preset("llama-3-8b"), "torchtitan").code
    'torchtitan of October 2024'

    Raises:
        UnknownName: an implementation that its family does not have.
        InvalidValue: a size that the other implementation has no place for; a model of no family.
    """
    known = implementations_of(model)
    if not known:
        raise InvalidValue(
            f"implementation={shown_value(implementation)} of {model.name}, which is planned as its own code "
            f"runs ({model.code}); leave implementation out."
        )
    if implementation not in known:
        raise unknown_name(f"implementation of {model.family}:", implementation, known)
    cls = known[implementation]
    if type(model) is cls:
        return model
    names = {each.name for each in fields(cls)}
    for each in fields(model):
        value = getattr(model, each.name)
        if each.name not in names and each.default is not MISSING and value != each.default:
            raise InvalidValue(
                f"{each.name}={shown_value(value)} of {model.name} has no place in the {implementation} "
                f"implementation of {model.family}; leave it at {each.default}, or use implementation="
                f"{model.implementation!r}."
            )
    return cls(**{name: getattr(model, name) for name in names if hasattr(model, name)})
