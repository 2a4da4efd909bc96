"""What an engine is: a training framework that is played, found by its name in a registry.

`ENGINES` has memplan's own. Another package adds one by an entry point of the group `memplan.engines` (see
`memplan.registry`), whose object is an `Engine`.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Literal, NamedTuple

from memplan.device import Device
from memplan.errors import MissingRule
from memplan.memory import Alive, alive_at_high, n_bytes_of
from memplan.models import Model
from memplan.plan import Plan, Rank
from memplan.record import Axis, CollectiveKind, Stretch
from memplan.registry import Registry
from memplan.replay import AllocatorProgram
from memplan.tape import Backend

Rule = Callable[[Model, Plan], None]
"""Raises `PlanRefused` or `MissingRule` if no plan of a model can be as this one says."""

Confirmation = Literal["measured", "unmeasured", "unconfirmed"]
"""What rules were compared with: runs on the device itself, runs of its software without it, or no run."""


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

    Elements of its trained weights; FLOPs of its forward pass, of a recomputed block those that are done
    again; bytes that it sends over the tensor axis in both passes; bytes that its forward pass leaves for the
    backward pass.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallelism:
    """Lower bounds of what data parallelism takes of one rank; numbers, or arrays over plans.

    Attributes:
        waits: bytes sent in a step over each axis while nothing is computed.
        reductions: bytes sent beside backward passes.
        gathers: bytes sent beside any computation.
        reducing: the share of backward passes that reduce gradients.
        states_bytes: weights, what is kept beside them, and optimizer state.
        unsharded_bytes: gathered weights that stay from their first forward pass to the last backward pass.
        grads_bytes: gradients when every stage has had a backward pass; 0 if they are kept between steps.
        updated_bytes: the weights that the rank's optimizer updates.
    """

    waits: Mapping[Axis, Any]
    reductions: Mapping[Axis, Any]
    gathers: Mapping[Axis, Any]
    reducing: Any
    states_bytes: Any
    unsharded_bytes: Any
    grads_bytes: Any
    updated_bytes: Any


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
    """Whether it has `part_costs` and `data_parallelism`, so that search need not estimate every plan."""
    options: ClassVar[type[Any] | None] = None
    """The type of its own options: a frozen dataclass of described fields; None: it has none."""
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

    def data_parallelism(
        self, plan: Plan, elements: Any, block_elements: Any, single_stage: Any
    ) -> DataParallelism:
        """Lower bounds of the bytes that data parallelism sends and holds on one rank.

        `elements` counts the elements of the rank's weights before sharding, `block_elements` of its blocks.

        The plan's fields may be arrays over plans that all have one data-parallel rank, or all several, and
        all ZeRO 0 or 1, or all 2 or 3; `single_stage`: whether their schedules have one stage per rank.
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


ENGINES: Final = Registry(
    what="engine",
    kind=Engine,  # type: ignore[type-abstract]
    own={
        "torch": "memplan.engines.torch:TORCH",
        "textbook": "memplan.engines.textbook:TEXTBOOK",
    },
)
"""The engines by name; one is imported when a plan first names it."""
