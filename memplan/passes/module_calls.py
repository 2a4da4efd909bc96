"""The order in which modules are called, forward and backward, from the hooks in a trace.

The trace of a module that ran has the hooks of all its modules. That of memplan's rules has those of
operations that are modules (`memplan.ops.modules`), and the modules around them follow from their names.
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Generic, NamedTuple, TypeVar, final

from memplan.passes.trace import Segment
from memplan.record import ModuleHook
from memplan.shapes import Parameter

Own = TypeVar("Own")
"""What an engine has for each parameter of a module."""


class Called(NamedTuple, Generic[Own]):
    """A module that a hook is called for: its path, and its own parameters (containers have none)."""

    path: str
    own: tuple[Own, ...]


@final
class Part(Generic[Own]):
    """A part of a pass: its events, what the engine has for its parameters, and the number of its block."""

    def __init__(
        self, name: str, segment: Segment, owned: Mapping[Parameter, Own], block: int | None = None
    ) -> None:
        self.name, self.segment, self.owned, self.block = name, segment, owned, block
        self._called: dict[ModuleHook, Called[Own]] = {}

    def called(self, hook: ModuleHook) -> Called[Own]:
        """The module of a hook."""
        if hook not in self._called:
            path, names = hook.path, hook.parameters
            own = [
                one
                for parameter, one in self.owned.items()
                if (parameter.name.startswith(f"{path}.") if names is None else parameter.name in names)
            ]
            self._called[hook] = Called(path.replace("*", str(self.block)), tuple(own))
        return self._called[hook]


@final
class Containers:
    """The modules around others, which are called just before the first module in them.

    Forward and backward passes are told apart: a recomputation calls a block while its backward pass runs.
    """

    def __init__(self) -> None:
        self._last: dict[str, str] = {}

    def entered(self, hook: ModuleHook, path: str) -> list[str]:
        """The containers of a module that the module before it was not in, outermost first.

        None if their own hooks are in the trace.
        """
        if hook.parameters is not None:
            return []
        direction = hook.kind.partition("_")[2]
        known = {*_around(self._last[direction])} if direction in self._last else set()
        self._last[direction] = path
        return [container for container in _around(path) if container not in known]


@lru_cache(maxsize=4096)
def _around(path: str) -> tuple[str, ...]:
    """The containers of a module, outermost first; a list of blocks is never called.

    >>> _around("blocks.3.attention.wq")
    ('', 'blocks.3', 'blocks.3.attention')
    """
    names = path.split(".")[:-1]
    called = [n for n in range(1, len(names) + 1) if n == len(names) or not names[n].isdigit()]
    return "", *[".".join(names[:n]) for n in called]


def recorded_order(parts: Iterable[Part[Own]]) -> list[tuple[Own, ...]]:
    """What each module owns, in the order in which modules are called, forward and backward."""
    containers, order = Containers(), list[tuple[Own, ...]]()
    for part in parts:
        for event in part.segment.events:
            if isinstance(event, ModuleHook) and event.kind.startswith("pre"):
                module = part.called(event)
                order += [()] * len(containers.entered(event, module.path))
                order.append(module.own)
    return order
