"""What an engine is: a training framework that is played, found by its name in a registry.

memplan's own engines are in `BUILT_IN`. Another package adds one by an entry point of the group
`memplan.engines`, whose object is an `Engine`:

```toml
[project.entry-points."memplan.engines"]
toy = "toy_engine:TOY"
```

An engine is imported when a plan first names it.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, ClassVar, Final, Literal, NamedTuple

from memplan.device import Device
from memplan.errors import InvalidValue, MissingRule, unknown_name
from memplan.memory import Alive, alive_at_high, n_bytes_of
from memplan.models import Model
from memplan.plan import Plan, Rank, Schedule
from memplan.record import CollectiveKind, Stretch
from memplan.replay import AllocatorProgram
from memplan.tape import Backend

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

Rule = Callable[[Model, Plan], None]
"""Raises `PlanRefused` or `MissingRule` if no plan of a model can be as this one says."""

Confirmation = Literal["measured", "unmeasured"]
"""Whether rules have been compared with runs of the framework, or are read from sources only."""

GROUP: Final = "memplan.engines"
"""The entry points' group."""

StageCounts = tuple[int, ...]
"""A number for each of a rank's stages."""

BUILT_IN: Final = {
    "torch": "memplan.engines.torch:TORCH",
    "textbook": "memplan.engines.textbook:TEXTBOOK",
}
"""memplan's own engines: module and object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRecord:
    """What the host holds of a rank's states where they are offloaded: page-locked or not, and its step."""

    pinned: Alive
    pageable: Alive
    step: Stretch

    def at_peak(self) -> Alive:
        """What is alive at the host's worst instant."""
        alive = self.pinned + self.pageable
        alive_at_high(self.step, alive)
        return Counter({buffer: n for buffer, n in alive.items() if n})


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """What an engine's play of one rank leaves: what is alive between steps, and the record of a step.

    Attributes whose meaning their name does not tell:
        layers: the blocks of each of the rank's stages.
        grads: the gradients that the optimizer sees.
        step_counts: the part of the optimizer state that a GPU's rank leaves on the host.
        host: what the host holds instead of the device; None where nothing is offloaded.
        program: the rank's first steps as a caching allocator sees them; None where there is none.
    """

    rank: Rank
    layers: tuple[range, ...]
    rest: Alive
    step: Stretch
    grads: Alive
    step_counts: Alive = field(default_factory=Counter)
    host: HostRecord | None = None
    program: Callable[[], AllocatorProgram] | None = field(default=None, repr=False, compare=False)

    @property
    def rest_bytes(self) -> int:
        """Bytes alive between steps."""
        return n_bytes_of(self.rest)

    @property
    def peak_bytes(self) -> int:
        """Bytes alive at the worst instant."""
        return self.rest_bytes + self.step.high_bytes


class Costs(NamedTuple):
    """What one micro-batch takes of one tensor rank for a part of the model.

    Elements of its weights; FLOPs of its forward pass, of a recomputed block those that are done again; bytes
    that it sends over the tensor axis in both passes; bytes that its forward pass leaves for the backward
    pass.
    """

    elements: int
    flops: int
    sent_bytes: int
    saved_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PartCosts:
    """The costs of a model's parts: its ends, a block of each kind, and one of each that is recomputed.

    `boundary_bytes` go from stage to stage.
    """

    embedding: Costs
    head: Costs
    blocks: Mapping[str, Costs]
    recomputed: Mapping[str, Costs]
    boundary_bytes: int


class Engine(ABC):
    """A framework that is played; its methods are pure."""

    name: ClassVar[str]
    plays: ClassVar[str]
    """What it plays, with the version that its rules were read from."""
    is_accounting: ClassVar[bool] = False
    """Whether it is closed-form accounting that no run can confirm: it gives no verdict and no step time."""
    refusals: ClassVar[tuple[Rule, ...]] = ()
    """The rules of what a plan may say, in the order in which they are asked; each raises if it is broken."""
    gives_bounds: ClassVar[bool] = False
    """Whether `part_costs` and `first_under_way` are known, so that search need not estimate every plan."""
    assumes: ClassVar[str] = ""
    """What accounting assumes, in lines for people."""

    @abstractmethod
    def confirmed_on(self, device: Device) -> Confirmation:
        """How far the rules for a device have been compared with real runs."""

    @abstractmethod
    def play(self, model: Model, plan: Plan, device: Device) -> Iterator[RankRecord]:
        """The record of each rank of a pipeline, worked out as it is asked for; of its peers the fullest."""

    @abstractmethod
    def play_rank(
        self, model: Model, plan: Plan, rank: Rank, device: Device, backend: Backend | None
    ) -> RankRecord:
        """The record of one given rank; `backend` is what ranks talk by, left out the device's usual one."""

    def check_device(self, plan: Plan, device: Device) -> None:
        """Raise if the plan runs on this device, but not correctly."""
        return

    def part_costs(self, model: Model, plan: Plan, device: Device) -> PartCosts:
        """What one micro-batch of a plan of one replica and one stage takes of the model's parts."""
        raise MissingRule(f"engine={self.name!r} gives no bounds.")

    def first_under_way(
        self, schedule: Schedule, pp: int, virtual_stages: int, n_micro_batches: int
    ) -> tuple[StageCounts, StageCounts | None]:
        """Micro-batches of the first rank's stages that have saved what their backward passes will need.

        Before the rank's first backward pass, and when all its stages have had one and another is to come;
        None if there is no such instant.
        """
        raise MissingRule(f"engine={self.name!r} gives no bounds.")

    def notes(self, model: Model, plan: Plan) -> Iterable[str]:
        """What should be known of a plan under this engine that no figure says."""
        return ()

    def wire_bytes(self, kind: CollectiveKind, payload_bytes: int, n_ranks: int) -> int:
        """What one of n ranks sends in a collective: a ring's bytes."""
        return ring_bytes(kind, payload_bytes, n_ranks)


def ring_bytes(kind: CollectiveKind, payload_bytes: int, n_ranks: int) -> int:
    """What one of n ranks sends under a ring.

    all-reduce 2 (n-1)/n of the payload, all-gather and reduce-scatter (n-1)/n of the full tensor, all-to-all
    (n-1)/n of the tensor, of which a rank keeps its own part, a broadcast (n-1)/n on average over the ranks,
    point to point and copies all of it, a receive nothing.

    Source: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms".

    >>> ring_bytes("all_reduce", 1000, 4), ring_bytes("all_gather", 1000, 4), ring_bytes("send", 1000, 2)
    (1500, 750, 1000)

    Raises:
        MissingRule: for any other kind.
    """
    match kind:
        case "all_reduce":
            return 2 * payload_bytes * (n_ranks - 1) // n_ranks
        case "all_gather" | "reduce_scatter" | "broadcast" | "all_to_all":
            return payload_bytes * (n_ranks - 1) // n_ranks
        case "send" | "copy":
            return payload_bytes
        case "recv":
            return 0
        case _:
            raise MissingRule(f"no rule states what the collective {kind!r} sends; add it to `ring_bytes`.")


@cache
def engine_named(name: str) -> Engine:
    """The engine of a name.

    Raises:
        UnknownName: with the names that are known.
        InvalidValue: another package's entry point is no engine.
    """
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        found = getattr(import_module(module), attribute)
    else:
        others = _entry_points()
        if name not in others:
            raise unknown_name("engine", name, engine_names())
        found = others[name].load()
    if not isinstance(found, Engine):
        raise InvalidValue(
            f"engine {name!r} is {found!r}; its entry point must be a memplan.engines.base.Engine."
        )
    return found


def engine_names() -> tuple[str, ...]:
    """The names of all engines, memplan's own first."""
    return (*BUILT_IN, *sorted(set(_entry_points()) - set(BUILT_IN)))


def _entry_points() -> "dict[str, EntryPoint]":
    from importlib.metadata import entry_points  # slow to import, and rarely needed

    return {point.name: point for point in entry_points(group=GROUP)}
