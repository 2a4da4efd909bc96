"""What an engine is: a training framework that is played, found by its name in a registry.

`ENGINES` has memplan's own. Another package adds one by an entry point of the group `memplan.engines` (see
`memplan.registry`), whose object is an `Engine`.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Literal, NamedTuple

from memplan.device import Device, DeviceType
from memplan.errors import ContradictoryEstimate, MissingRule, PlanRefused
from memplan.hardware import gpu
from memplan.memory import Alive, alive_at_high, n_bytes_of
from memplan.mesh import AXES, VIEWS, Group, axis_names
from memplan.models import Model, divided
from memplan.optimizers import COMMON
from memplan.plan import Plan, Rank
from memplan.record import CollectiveKind, Compute, Stretch
from memplan.registry import Registry
from memplan.replay.program import AllocatorProgram
from memplan.shapes import Buffer
from memplan.tape import Backend

Rule = Callable[[Model, Plan], None]
"""Raises `PlanRefused` or `MissingRule` for a plan that the engine cannot run on a model."""

CHECKS_OWN = False
"""Whether records of memplan's own engines are checked too."""

Confirmation = Literal["cpu-ranks", "nogpu", "unconfirmed"]
"""Rules were compared with real runs on CPU ranks, with CUDA's software without a GPU, or not at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRecord:
    """The offloaded states of a rank on its host, page-locked and not, and the host's step."""

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
    """An engine's record of one rank: the buffers alive between steps (`rest`), and its `step`.

    Attributes whose meaning their name does not tell:
        layers: the blocks of each of the rank's stages.
        grads: the gradients that the optimizer reads.
        update: the stretches of the step that are the optimizer's.
        setup: what comes before the first step, where that may hold more than a step; else None.
        step_counts: Adam's step counts, which a rank on a GPU keeps on the host.
        host: what the host holds instead of the device; None where nothing is offloaded.
        handed_over: for a buffer that is freed, the tensor that takes its place, under its name, until the
            next step.
        program: the rank's first steps as a caching allocator sees them; None where there is none.
    """

    rank: Rank
    layers: tuple[range, ...]
    rest: Alive
    step: Stretch
    grads: Alive
    update: tuple[Stretch, ...] = ()
    setup: Stretch | None = None
    step_counts: Alive = field(default_factory=Counter)
    host: HostRecord | None = None
    handed_over: Mapping[Buffer, Buffer] = field(default_factory=dict)
    program: Callable[[], AllocatorProgram] | None = field(default=None, repr=False, compare=False)

    @property
    def rest_bytes(self) -> int:
        """Bytes alive between steps."""
        return n_bytes_of(self.rest)

    @property
    def peak_bytes(self) -> int:
        """Bytes alive at the worst instant."""
        return self.rest_bytes + self.step.high_bytes

    def checked(self, engine: str) -> "RankRecord":
        """The record itself, after a `check`.

        Of memplan's own engines only where `CHECKS_OWN` is set, as in its tests: it takes longer than an
        estimate.
        """
        if CHECKS_OWN or engine not in ENGINES.own:
            self.check(engine)
        return self

    def check(self, engine: str) -> None:
        """Raise unless each buffer is freed after it is allocated, and the step leaves gradients alone.

        Raises:
            ContradictoryEstimate: naming a buffer of which this does not hold.
        """
        held: dict[Buffer, tuple[int, int]] = {}
        for buffer, (net, least) in self.step.held.items():
            place = self.handed_over.get(buffer, buffer)
            net_before, least_before = held.get(place, (0, 0))
            held[place] = net + net_before, self.rest[buffer] + least + least_before
        for buffer, (net, least) in held.items():
            wrong = ""
            if least < 0:
                wrong = "is freed once more than it was allocated"
            elif net < 0:
                wrong = "is held between steps, and freed in a step for good"
            elif net > 0 and buffer.kind != "grads":
                wrong = f"of kind {buffer.kind!r} is left by every step; only gradients may be"
            if wrong:
                raise ContradictoryEstimate(
                    f"engine={engine!r}, {self.rank}: {buffer.name!r} {wrong}. This is a fault of the "
                    "engine; please report the plan to its authors."
                )


WireBytes = Callable[[CollectiveKind, int, int], int]
"""What one rank sends: of a kind of collective, its payload in bytes, its ranks."""


class Costs(NamedTuple):
    """Costs of a part of the model on one tensor rank, for one micro-batch.

    Elements of its trained weights; what its forward pass computes, or the part of it that is recomputed;
    what its backward pass computes without that; bytes sent over the tensor axis in both passes; bytes that
    the forward pass saves for the backward pass. An engine gives numbers; a search turns them into functions
    of the micro-batch, and into arrays over plans.
    """

    elements: Any
    computed: tuple[Compute, ...]
    backward: tuple[Compute, ...]
    sent_bytes: Any
    saved_bytes: Any


NO_COSTS: Final = Costs(0, (), (), 0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartCosts:
    """The costs of the embedding, of the head, and of a block of each kind, recomputed or not.

    `output`: of a stage that sends its output on; it saves less, where the output is freed then.
    `boundary_bytes`: what one stage sends to the next; `received_bytes`: of the receive buffer that a stage
    keeps for each neighbour in the pipeline and each micro-batch.
    """

    embedding: Costs
    head: Costs
    output: Costs = NO_COSTS
    blocks: Mapping[str, Costs]
    recomputed: Mapping[str, Costs]
    boundary_bytes: int
    received_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallelism:
    """Lower bounds of one rank's traffic and memory for data parallelism; numbers, or arrays over plans.

    Attributes:
        waits: bytes sent in a step among each group of ranks that no computation can hide.
        reductions: bytes sent beside backward passes.
        gathers: bytes sent beside any computation.
        reducing: the share of backward passes that reduce gradients.
        states_bytes: weights, DDP's buckets, and optimizer state.
        unsharded_bytes: gathered weights that live from the first forward pass to the last backward pass.
        grads_bytes: gradients when every stage has had a backward pass; 0 if they are kept between steps.
        reduced_bytes: held for each element of a block while its gradients are reduced, if others precede it.
        ended_bytes: held for each element of a pipeline's stage when its last backward pass ends.
        updated_bytes: the weights that the rank's optimizer updates.
    """

    waits: Mapping[Group, Any]
    reductions: Mapping[Group, Any]
    gathers: Mapping[Group, Any]
    reducing: Any
    states_bytes: Any
    unsharded_bytes: Any
    grads_bytes: Any
    updated_bytes: Any
    reduced_bytes: Any = 0.0
    ended_bytes: Any = 0.0


class Engine(ABC):
    """A framework that is played; its methods are pure."""

    name: ClassVar[str]
    is_accounting: ClassVar[bool] = False
    """Whether it is closed-form accounting, which no run can confirm: no verdict and no step time."""
    refusals: ClassVar[tuple[Rule, ...]] = ()
    """The checks of a plan, in order; each raises for a plan that cannot run."""
    gives_bounds: ClassVar[bool] = False
    """Whether it has `part_costs` and `data_parallelism`, so that search need not estimate every plan."""
    overlaps_sends: ClassVar[bool] = False
    """Whether interleaved stages compute on while they send."""
    options: ClassVar[type[Any] | None] = None
    """The type of its own options: a frozen dataclass of described fields; None: it has none."""
    code: ClassVar[str] = ""
    """The code whose layers it runs, whatever the model's implementation; empty: the model's own."""
    reserves_more: ClassVar[float] = 0.0
    """The largest share by which runs reserved more than a replay of its plans says."""
    assumes: ClassVar[str] = ""
    """What accounting assumes, in lines for people."""

    trains_adapters: ClassVar[bool] = False
    """Whether it has rules for adapters beside frozen weights."""
    optimizers: ClassVar[tuple[str, ...]] = COMMON
    """The optimizers that it has rules for, but for those that its refusals name."""
    axes: ClassVar[tuple[str, ...]] = ()
    """The axes of the mesh that it knows; a plan with several ranks along another one is refused."""
    views: ClassVar[tuple[str, ...]] = ()
    """The views of the mesh that it knows, likewise."""
    ep_beside: ClassVar[tuple[str, ...]] = ()
    """The axes that may have several ranks where experts are divided, beside data-parallel ones."""
    counts_blocks: ClassVar[tuple[str, ...]] = ("selective", "full")
    """The kinds of recomputation that `recompute_blocks` may limit to some blocks."""
    sharded_beside: ClassVar[tuple[str, ...]] = ("dp_replicate",)
    """The axes beside whose ranks weights are sharded, by ZeRO 2 or 3."""
    confirmed_gpus: ClassVar[tuple[str, ...]] = ()
    """The GPUs whose software ran the engine's plans without a GPU, and gave its bytes."""
    compared_with: ClassVar[str] = ""
    """What others measured on GPUs that its bytes were compared with, in a sentence."""
    confirmed_on_cpu: ClassVar[bool] = False
    """Whether the rules have been compared with runs on CPU ranks."""

    def confirmed_on(self, device: Device) -> Confirmation:
        """How far the rules for a device have been compared with real runs."""
        if device.on_cpu:
            return "cpu-ranks" if self.confirmed_on_cpu else "unconfirmed"
        chips = {(each.capability, each.multiprocessors) for each in map(gpu, self.confirmed_gpus)}
        return "nogpu" if (device.capability, device.multiprocessors) in chips else "unconfirmed"

    @abstractmethod
    def play(self, model: Model, plan: Plan, device: Device) -> Iterator[RankRecord]:
        """The record of each pipeline rank, of its fullest data-parallel rank; played as it is read."""

    @abstractmethod
    def play_rank(
        self, model: Model, plan: Plan, rank: Rank, device: Device, backend: Backend | None
    ) -> RankRecord:
        """The record of one given rank; `backend` runs its collectives, by default the device's usual one."""

    @property
    def other_axes(self) -> tuple[str, ...]:
        """The axes that it knows of other packages, outermost first."""
        if set(self.axes) <= set(AXES.own):
            return ()
        return tuple([axis for axis in axis_names() if axis in self.axes and axis not in AXES.own])

    @property
    def rules(self) -> tuple[Rule, ...]:
        """All checks of a plan, in order: of the axes of its mesh, then the engine's `refusals`."""
        return self._check_axes, self._check_adapters, self._check_optimizer, *self.refusals

    def _check_axes(self, model: Model, plan: Plan) -> None:
        for axis in (*axis_names(), *VIEWS):
            if axis not in (*self.axes, *self.views) and (n := getattr(plan, axis)) > 1:
                raise PlanRefused(
                    f"{axis}={n}: engine={self.name!r} divides nothing along {axis}; use {axis}=1.",
                    kind="several ranks along an axis that the engine does not know",
                )

    def _check_adapters(self, model: Model, plan: Plan) -> None:
        if plan.adapters and not self.trains_adapters:
            raise MissingRule(
                f"lora_rank={plan.lora_rank}: engine={self.name!r} has no rule for adapters; leave it out, "
                "or use engine='torch'.",
                kind="adapters under an engine that has no rule for them",
            )

    def _check_optimizer(self, model: Model, plan: Plan) -> None:
        if plan.optimizer not in self.optimizers:
            whose = plan.kept.whose
            raise MissingRule(
                f"optimizer={plan.optimizer!r}: engine={self.name!r} has no rule for {whose}; use adamw, or "
                "engine='torch'.",
                kind=f"{whose} under an engine that has no rule for them",
            )

    def check_device(self, plan: Plan, device: Device) -> None:
        """Raise if the plan's results are wrong on this device."""
        return

    def offloads(self, plan: Plan) -> bool:
        """Whether the optimizer updates states in the host's memory."""
        return plan.offload

    def copies_to_host(self, plan: Plan) -> bool:
        """Whether activations are copied to the host and back."""
        return False

    def built(self, model: Model) -> Model:
        """The model as the framework builds it, of which `part_costs` says the costs."""
        return model

    def divided(self, model: Model, plan: Plan, mesh: Mapping[Group, int], device: DeviceType) -> Model:
        """The model as one rank of a mesh trains it under a plan.

        Raises:
            MemplanError: its framework has no plan for this mesh.
        """
        return divided(model, mesh, device, plan.precision)

    def part_costs(self, model: Model, plan: Plan, device: Device) -> PartCosts:
        """The costs of the model's parts for one micro-batch of a plan with one replica and one stage."""
        raise MissingRule(f"engine={self.name!r} gives no bounds.")

    def data_parallelism(
        self, plan: Plan, elements: Any, block_elements: Any, single_stage: Any
    ) -> DataParallelism:
        """Lower bounds of the bytes that data parallelism sends and holds on one rank.

        `elements` counts the elements of the rank's weights before sharding, `block_elements` of its blocks.

        The plan's fields may be arrays over plans that agree on whether `dp` is 1 and on whether `zero` is at
        least 2; `single_stage`: whether their schedules have one stage per rank.
        """
        raise MissingRule(f"engine={self.name!r} gives no bounds.")

    def n_communicators(self, plan: Plan) -> int:
        """NCCL communicators of a plan's groups."""
        n: int = plan.mesh.n_communicators
        return n

    def outside_bytes(self, plan: Plan, model: Model) -> int:
        """Bytes that it holds on each GPU outside the caching allocator, beside NCCL's."""
        return 0

    def notes(self, model: Model, plan: Plan) -> Iterable[str]:
        """Notes on a plan under this engine, beside its figures."""
        return ()

    def wire_bytes(self, kind: CollectiveKind, payload_bytes: int, n_ranks: int) -> int:
        """What one of n ranks sends in a collective: a ring's bytes."""
        return ring_bytes(kind, payload_bytes, n_ranks)


def ring_bytes(kind: CollectiveKind, payload_bytes: int, n_ranks: int) -> int:
    """What one of n ranks sends under a ring.

    All-reduce: 2 (n-1)/n of the payload. All-gather and reduce-scatter: (n-1)/n of the full tensor.
    All-to-all: (n-1)/n of the tensor, since a rank keeps its own part. Broadcast and reduce: (n-1)/n of the
    tensor, averaged over the ranks. Permute, send and copy: the whole tensor. Receive: nothing.

    Source: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms".

    >>> ring_bytes("all_reduce", 1000, 4), ring_bytes("all_gather", 1000, 4), ring_bytes("send", 1000, 2)
    (1500, 750, 1000)

    Raises:
        MissingRule: for any other kind.
    """
    match kind:
        case "all_reduce":
            return 2 * payload_bytes * (n_ranks - 1) // n_ranks
        case "all_gather" | "reduce_scatter" | "broadcast" | "reduce" | "all_to_all":
            return payload_bytes * (n_ranks - 1) // n_ranks
        case "permute" | "send" | "copy":
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
        "deepspeed": "memplan.engines.deepspeed:DEEPSPEED",
        "fairscale": "memplan.engines.fairscale:FAIRSCALE",
        "colossalai": "memplan.engines.colossalai:COLOSSALAI",
        "megatron": "memplan.engines.megatron:MEGATRON",
        "textbook": "memplan.engines.textbook:TEXTBOOK",
    },
)
"""The engines by name; one is imported when a plan first names it."""
