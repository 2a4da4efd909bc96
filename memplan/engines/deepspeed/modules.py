"""ZeRO-3's hooks on modules: in which order modules are called, forward and backward, with their containers.

Source: `deepspeed.runtime.zero.parameter_offload:DeepSpeedZeRoOffload`.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, final

from memplan.engines.deepspeed.coordinator import PartitionedParameterCoordinator
from memplan.engines.deepspeed.flat import Slot
from memplan.engines.trace import Segment
from memplan.record import Event, UnitHook
from memplan.shapes import Parameter


class Part(NamedTuple):
    """A part of a pass: its events, its parameters' slots, and the number of its block."""

    name: str
    segment: Segment
    slots: Mapping[Parameter, Slot]
    block: int | None = None


class Called(NamedTuple):
    """A module that a hook is called for: its path, and its own parameters (containers have none)."""

    path: str
    own: tuple[Slot, ...]


def called(part: Part, hook: UnitHook) -> Called:
    """The module of a hook."""
    (path,) = hook.parameters
    own = [slot for parameter, slot in part.slots.items() if parameter.name.startswith(f"{path}.")]
    return Called(path.replace("*", str(part.block)), tuple(own))


@final
class Containers:
    """The modules around others, which are called just before the first module in them.

    Forward and backward passes are told apart: a recomputation calls a block while its backward pass runs.
    """

    def __init__(self) -> None:
        self._last: dict[str, str] = {}

    def entered(self, kind: str, path: str) -> list[str]:
        """The containers of a module that the module before it was not in, outermost first."""
        direction, last = kind.partition("_")[2], self._last.get(kind.partition("_")[2])
        self._last[direction] = path
        known = set() if last is None else {*_around(last)}
        return [container for container in _around(path) if container not in known]


def _around(path: str) -> Iterator[str]:
    """The containers of a module, outermost first; a list of blocks is never called.

    >>> list(_around("blocks.3.attention.wq"))
    ['', 'blocks.3', 'blocks.3.attention']
    """
    yield ""
    names = path.split(".")[:-1]
    for n in range(1, len(names) + 1):
        if n == len(names) or not names[n].isdigit():
            yield ".".join(names[:n])


def recorded_order(parts: Iterable[Part]) -> list[tuple[Slot, ...]]:
    """The parameters of each module in the order in which a micro-batch's hooks fetch them."""
    containers, order = Containers(), list[tuple[Slot, ...]]()
    for part in parts:
        for event in part.segment.events:
            if isinstance(event, UnitHook) and event.kind.startswith("pre"):
                module = called(part, event)
                order += [()] * len(containers.entered(event.kind, module.path))
                order.append(module.own)
    return order


@final
class ModuleHooks:
    """The hooks of a micro-batch's passes, which tell the coordinator what is needed, and what is not."""

    def __init__(self, coordinator: PartitionedParameterCoordinator) -> None:
        self.coordinator = coordinator
        self._containers = Containers()

    def start_of_forward(self) -> None:
        """The hook of the whole module: a new micro-batch."""
        self.coordinator.reset_step()
        self._containers = Containers()

    def __call__(self, part: Part, hook: UnitHook) -> Iterator[Event]:
        """What a hook gathers or frees."""
        path, own = called(part, hook)
        if hook.kind.startswith("post"):
            yield from self.coordinator.release_sub_module(own, path)
            return
        for container in self._containers.entered(hook.kind, path):
            yield from self.coordinator.fetch_sub_module((), container)
        yield from self.coordinator.fetch_sub_module(own, path)
