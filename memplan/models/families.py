"""The families of models, found by name in a registry.

memplan's own families are in `BUILT_IN`, each a file of this folder: the forward pass of each implementation,
and the reader of a config.json. Another package adds one by an entry point of the group `memplan.models`,
whose object is a `Family`:

```toml
[project.entry-points."memplan.models"]
toy = "toy_models:TOY"
```
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

from memplan.errors import InvalidValue, shown_value, unknown_name
from memplan.models.base import Model
from memplan.models.config import Config

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP: Final = "memplan.models"
"""The entry points' group."""

BUILT_IN: Final = {
    "gpt": "memplan.models.gpt:GPT",
    "llama": "memplan.models.llama:LLAMA",
}
"""memplan's own families: module and object."""


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
        readers: of a config.json, by its `model_type`.
        presets: models by name, as the entries of `presets.toml` without their `family`.
    """

    implementations: Mapping[str, type[Model]]
    readers: Mapping[str, Reader] = field(default_factory=dict)
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def model(self, **sizes: Any) -> Model:
        """A model of these sizes, in the default implementation."""
        return next(iter(self.implementations.values()))(**sizes)


@cache
def family_named(name: str) -> Family:
    """The family of a name.

    Raises:
        UnknownName: with the names that are known.
        InvalidValue: another package's entry point is no family.
    """
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        found = getattr(import_module(module), attribute)
    else:
        others = _entry_points()
        if name not in others:
            raise unknown_name("model family", name, family_names())
        found = others[name].load()
    if not isinstance(found, Family):
        raise InvalidValue(
            f"model family {name!r} is {shown_value(found)}; its entry point must be a "
            "memplan.models.families.Family."
        )
    return found


def family_names() -> tuple[str, ...]:
    """The names of all families, memplan's own first."""
    return (*BUILT_IN, *sorted(set(_entry_points()) - set(BUILT_IN)))


def families() -> Iterator[Family]:
    """All families."""
    return map(family_named, family_names())


def implemented(model: Model, implementation: str) -> Model:
    """The same model in the code of another implementation.

    >>> from memplan.models.presets import preset
    >>> implemented(preset("llama-3-8b"), "torchtitan").code
    'torchtitan of October 2024'

    Raises:
        UnknownName: an implementation that its family does not have.
        InvalidValue: a size that the other implementation has no place for.
    """
    known = family_named(model.family).implementations
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


def _entry_points() -> "dict[str, EntryPoint]":
    from importlib.metadata import entry_points  # slow to import, and rarely needed

    return {point.name: point for point in entry_points(group=GROUP)}
