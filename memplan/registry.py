"""Registries: values of one kind by name, memplan's own and other packages'.

Another package adds a value by an entry point of the registry's group, and it is known wherever names are:

```toml
[project.entry-points."memplan.schedules"]
toy = "toy_package:TOY"
```

The object is imported when its name is first used.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Generic, TypeVar, final

from memplan.errors import InvalidValue, shown_value, unknown_name

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Registry(Generic[T]):
    """Values of one kind by name.

    Attributes:
        what: the word for a value.
        kind: the type of the values.
        own: memplan's own: the value, or the module and the name of one that is imported when it is used.
        plural: the word's plural, if that is not the word with an s.
    """

    what: str
    kind: type[T]
    own: Mapping[str, T | str]
    plural: str = ""

    @property
    def group(self) -> str:
        """The group of the entry points."""
        return f"memplan.{self.plural or f'{self.what}s'}"

    def names(self) -> tuple[str, ...]:
        """All names, memplan's own first."""
        others = installed(self.group)
        return (*self.own, *sorted(set(others) - set(self.own))) if others else tuple(self.own)

    def named(self, name: str) -> T:
        """The value of a name.

        Raises:
            UnknownName: with the names that are known.
            InvalidValue: another package's entry point is no such value.
        """
        found = self.own.get(name)
        return loaded(self, name) if found is None or isinstance(found, str) else found

    def checked_name(self, name: object) -> str:
        """The name itself if it is known; its value is not imported.

        Raises:
            UnknownName: with the names that are known.
        """
        if isinstance(name, str) and (name in self.own or name in self.names()):
            return name
        raise unknown_name(self.what, name, self.names())


@cache
def installed(group: str) -> "dict[str, EntryPoint]":
    """The entry points of a group by name."""
    from importlib.metadata import entry_points  # slow to import, and rarely needed

    return {point.name: point for point in entry_points(group=group)}


@cache
def loaded(registry: Registry[T], name: str) -> T:
    """The value of a name that must be imported."""
    own = registry.own.get(registry.checked_name(name))
    if isinstance(own, str):
        module, _, attribute = own.partition(":")
        found: object = getattr(import_module(module), attribute)
    else:
        found = installed(registry.group)[name].load()
    if not isinstance(found, registry.kind):
        raise InvalidValue(
            f"{registry.what} {name!r} is {shown_value(found)}; its entry point must be a "
            f"{registry.kind.__module__}.{registry.kind.__qualname__}."
        )
    return found
