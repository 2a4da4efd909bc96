"""Products of DTensors in bfloat16, as Muon multiplies the matrices that FSDP2 shards.

PyTorch looks for the placements of a product whose operands cost least to redistribute, by a formula of its
own for the time of each collective.
"""

from collections.abc import Sequence
from math import inf, prod
from typing import Final, NamedTuple, Self, final

from memplan.errors import MissingRule
from memplan.mesh import Group
from memplan.parts.newton_schulz import product_in_bfloat16
from memplan.placements import Partial, Placement, Replicate, Shard, local_shape
from memplan.record import Collective, CollectiveKind, Event, allocs, frees
from memplan.shapes import BF16, Buffer, Shape, buffer_of
from memplan.tape import OpContext

ROWS, COLUMNS, WHOLE, TERM = Shard(0), Shard(1), Replicate(), Partial()

STRATEGIES: Final[tuple[tuple[Placement, Placement, Placement], ...]] = (
    (WHOLE, WHOLE, WHOLE),
    (TERM, COLUMNS, ROWS),
    (ROWS, ROWS, WHOLE),
    (COLUMNS, WHOLE, COLUMNS),
    (TERM, TERM, WHOLE),
    (TERM, WHOLE, TERM),
)
"""The placements of a product and of its two operands; what is added is placed as the product.

Source: `torch.distributed.tensor._ops._matrix_ops:gen_single_dim_einsum_strategies`.
"""


class Link(NamedTuple):
    """The rate and the latency between ranks that PyTorch assumes, in GiB per second and microseconds.

    Source: `torch.distributed.tensor._collective_utils:MeshTopoInfo.build_from_mesh`.
    """

    gib_per_s: float
    latency_us: float

    def ring_us(self, n_ranks: int, n_hops: int, n_bytes: float) -> float:
        """The time of a collective over a ring.

        Source: `torch.distributed.tensor._collective_utils:allgather_cost`,
        `torch.distributed.tensor._collective_utils:allreduce_cost`.
        """
        return 6.6 + n_hops * self.latency_us + n_bytes / 2**30 * n_hops / n_ranks / self.gib_per_s * 1e6


WITHIN_HOST: Final = Link(87.7, 0.6)
BETWEEN_HOSTS: Final = Link(0.22 * 87.7, 2.7)


@final
class DTensor(NamedTuple):
    """A matrix in bfloat16 over `n_ranks` ranks; `shape`: of the whole matrix.

    `buffer`: what it keeps alive on this rank. `is_contiguous`: false for the transpose of one that is.
    """

    name: str
    shape: Shape
    placement: Placement
    n_ranks: int
    buffer: Buffer
    is_contiguous: bool = True

    @property
    def local(self) -> Shape:
        """The shape of this rank's part."""
        return local_shape(self.shape, {"": self.placement}, {"": self.n_ranks})

    @property
    def n_bytes(self) -> int:
        """Bytes of this rank's part."""
        return prod(self.local) * BF16.itemsize

    @property
    def transposed(self) -> Self:
        """A view of it with rows for columns."""
        placed = Shard(1 - self.placement.dim) if isinstance(self.placement, Shard) else self.placement
        return self._replace(shape=self.shape[::-1], placement=placed, is_contiguous=not self.is_contiguous)


def redistribution_us(x: DTensor, target: Placement, link: Link) -> float:
    """PyTorch's estimate of a redistribution's microseconds: 0 of a replicated tensor, inf without a way.

    Source: `torch.distributed.tensor._collective_utils:_compute_placement_transition_cost`.
    """
    n, local = x.n_ranks, x.n_bytes
    match x.placement, target:
        case own, _ if own in (target, WHOLE):
            return 0.0
        case Shard(), Replicate():
            return link.ring_us(n, n - 1, local * n)
        case Shard(), Shard():
            return link.ring_us(n, n - 1, local) + 1.0
        case Partial(), Replicate():
            return link.ring_us(n, 2 * (n - 1), local)
        case Partial(), Shard():
            return link.ring_us(n, n - 1, local)
    return inf


def strategy(operands: Sequence[DTensor], link: Link) -> tuple[Placement, ...]:
    """The placements of a product and of its operands that cost least; one that needs no change comes first.

    `operands`: what is added, if anything, and the two factors.

    Source: `torch.distributed.tensor._sharding_prop:_select_min_cost_strategy`.
    """

    def cost(placements: tuple[Placement, ...]) -> tuple[float, bool]:
        pairs = list(zip(operands, placements[1:], strict=True))
        each = [redistribution_us(x, target, link) for x, target in pairs]
        return sum(each), any(x.placement != target for x, target in pairs)

    added = len(operands) - 2
    return min([(out, *[out] * added, *factors) for out, *factors in STRATEGIES], key=cost)


@final
class Ranks(NamedTuple):
    """The ranks of one mesh axis, which redistribute and multiply DTensors.

    Attributes:
        n: how many; 1: the tensors are whole.
        axis: the mesh axis.
        context: the device, and what the ranks talk by.
    """

    n: int
    axis: Group
    context: OpContext

    def new(self, name: str, shape: Shape, placement: Placement) -> DTensor:
        """A new matrix, without an event."""
        local = local_shape(shape, {"": placement}, {"": self.n})
        return DTensor(name, shape, placement, self.n, buffer_of(name, local, BF16))

    def product(self, name: str, factors: Sequence[DTensor], *added: DTensor) -> tuple[list[Event], DTensor]:
        """The events of a product, to which a matrix may be `added`, and the product.

        Raises:
            MissingRule: where the placements depend on how many GPUs a process sees.

        Source: `torch.distributed.tensor._dispatch:OpDispatcher.redistribute_local_args`.
        """
        operands = [*added, *factors]
        placed, *targets = self._strategy(operands)
        events: list[Event] = []
        read: list[DTensor] = []
        for x, target in zip(operands, targets, strict=True):
            found, y = self.redistributed(x, target)
            events += found
            read.append(y)
        made = self.new(name, (factors[0].shape[0], factors[1].shape[1]), placed)
        copies = [y.buffer for x, y in zip(operands, read, strict=True) if y is not x]
        computed = product_in_bfloat16(read[-2].local, read[-1].local)
        return [*events, *allocs(made.buffer), computed, *frees(*copies)], made

    def _strategy(self, operands: Sequence[DTensor]) -> tuple[Placement, ...]:
        links = (BETWEEN_HOSTS,) if self.context.device.on_cpu else (BETWEEN_HOSTS, WITHIN_HOST)
        first, *others = {strategy(operands, link) for link in links}
        if others:
            rows, columns = operands[-1].shape
            raise MissingRule(
                f"optimizer='muon' of {operands[-1].name}, ({rows}, {columns}), over {self.n} ranks: how "
                "DTensor divides its products depends on how many GPUs a process sees, which is not known; "
                "use another dp, or adamw.",
                kind="Muon of sharded matrices that DTensor divides as a host has GPUs",
            )
        return first

    def redistributed(self, x: DTensor, target: Placement) -> tuple[list[Event], DTensor]:
        """The events of a redistribution, and the new matrix: x itself where its placement is the target.

        Raises:
            MissingRule: for a redistribution that no product was seen to need.

        Source: `torch.distributed.tensor._redistribute:redistribute_local_tensor`.
        """
        match x.placement, target:
            case own, _ if own == target:
                return [], x
            case Shard(), Replicate():
                return self._gathered(x)
            case Shard(), Shard():
                return self._exchanged(x)
            case Partial(), Replicate():
                y = self.new(f"{x.name} (all-reduced)", x.shape, target)
                return [*allocs(y.buffer), self._sent("all_reduce", x.n_bytes)], y
            case Partial(), Shard(0):
                y = self.new(f"{x.name} (reduce-scattered)", x.shape, target)
                sent = self._sent("reduce_scatter", x.n_bytes)
                scratch = [buffer_of("gloo scratch", x.shape, BF16)] * (self.context.backend == "gloo")
                return [*allocs(y.buffer), sent, *allocs(*scratch), *frees(*scratch)], y
        raise MissingRule(
            f"optimizer='muon' with a redistribution of {x.name} from {x.placement} to {target} has no rule; "
            "use adamw."
        )

    def _gathered(self, x: DTensor) -> tuple[list[Event], DTensor]:
        """The whole matrix: chunks arrive one after the other; those along columns are copied side by side.

        Source: `torch.distributed._functional_collectives:all_gather_single`.
        """
        operand = [] if x.is_contiguous else [buffer_of(f"{x.name} (contiguous)", x.local, BF16)]
        arrived = self.new(f"{x.name} (gathered)", x.shape, WHOLE)
        found = [*allocs(*operand, arrived.buffer), self._sent("all_gather", arrived.n_bytes)]
        if self.context.gathers_in_copies:
            for shape in (x.local, x.shape):
                scratch = buffer_of("gloo scratch", shape, BF16)
                found += (*allocs(scratch), *frees(scratch))
        if x.placement == ROWS:
            return [*found, *frees(*operand)], arrived
        y = self.new(f"{x.name} (gathered columns)", x.shape, WHOLE)
        return [*found, *allocs(y.buffer), *frees(arrived.buffer, *operand)], y

    def _exchanged(self, x: DTensor) -> tuple[list[Event], DTensor]:
        """Rows for columns, or columns for rows: an all-to-all, on CPU a gather and this rank's chunk of it.

        There a chunk of rows keeps all of what was gathered alive.

        Source: `torch.distributed.tensor._collective_utils:shard_dim_alltoall`;
        torch/csrc/distributed/c10d/Functional.cpp (`shard_dim_alltoall`).
        """
        to_rows = x.placement == COLUMNS
        y = self.new(f"{x.name} (exchanged)", x.shape, ROWS if to_rows else COLUMNS)
        if self.context.device.on_cpu:
            found, whole = self._gathered(x)
            if to_rows:
                return found, y._replace(buffer=whole.buffer)
            return [*found, *allocs(y.buffer), *frees(whole.buffer)], y
        in_order = to_rows and x.is_contiguous
        sent = [] if in_order else [buffer_of(f"{x.name} (by rank)", x.local, BF16)]
        received = [buffer_of(f"{x.name} (received)", x.local, BF16)] if to_rows else []
        found = [*allocs(*sent, *received), *(() if to_rows else allocs(y.buffer))]
        found.append(self._sent("all_to_all", x.n_bytes))
        return [*found, *(allocs(y.buffer) if to_rows else ()), *frees(*received, *sent)], y

    def _sent(self, kind: CollectiveKind, n_bytes: int) -> Collective:
        return Collective(kind=kind, axis=self.axis, what="orthogonalization", payload_bytes=n_bytes)
