"""Products of DTensors in bfloat16, as Muon multiplies the matrices that FSDP2 or tensor parallelism shards.

PyTorch looks for the placements of a product whose operands cost least to redistribute, by a formula of its
own for the time of each collective.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from math import inf, prod
from operator import ge
from typing import Final, NamedTuple, Self, final

from memplan.errors import MissingRule
from memplan.mesh import Group
from memplan.parts.newton_schulz import product_in_bfloat16
from memplan.placements import Partial, Placement, Replicate, Shard, local_shape
from memplan.record import Collective, CollectiveKind, Event, allocs, frees
from memplan.shapes import BF16, Buffer, DType, Shape, buffer_of
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
"""The placements of a product and of its two operands over one axis; what is added is placed as the product.

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


Placed = tuple[Placement, ...]
"""A placement for each axis of a mesh, the outermost first."""

WITHIN_HOST: Final = Link(87.7, 0.6)
BETWEEN_HOSTS: Final = Link(0.22 * 87.7, 2.7)

MOST_GPUS_OF_A_HOST: Final = 16
"""The most GPUs that a process sees: the 16 of NVIDIA's DGX-2."""


@final
class DTensor(NamedTuple):
    """A matrix over a mesh of `sizes`; `shape`: of the whole matrix.

    `buffer`: what it keeps alive on this rank. `is_contiguous`: false for the transpose of one that is.
    """

    name: str
    shape: Shape
    placed: Placed
    sizes: tuple[int, ...]
    buffer: Buffer
    is_contiguous: bool = True
    dtype: DType = BF16

    @property
    def local(self) -> Shape:
        """The shape of this rank's part."""
        return _local(self.shape, self.placed, self.sizes)

    @property
    def n_bytes(self) -> int:
        """Bytes of this rank's part."""
        return prod(self.local) * self.dtype.itemsize

    def can_be(self, target: Placed) -> bool:
        """Whether no axis shards a dim that is shorter than its ranks.

        Source: `torch.distributed.tensor._ops.utils:is_tensor_shardable`.
        """
        shards = [1] * len(self.shape)
        for one, n in zip(target, self.sizes, strict=True):
            if isinstance(one, Shard):
                shards[one.dim] *= n
        return target == self.placed or all(map(ge, self.shape, shards))

    @property
    def transposed(self) -> Self:
        """A view of it with rows for columns."""
        placed = tuple([Shard(1 - one.dim) if isinstance(one, Shard) else one for one in self.placed])
        return self._replace(shape=self.shape[::-1], placed=placed, is_contiguous=not self.is_contiguous)


def _local(shape: Shape, placed: Placed, sizes: Sequence[int]) -> Shape:
    named = [str(place) for place in range(len(sizes))]
    return local_shape(shape, dict(zip(named, placed, strict=True)), dict(zip(named, sizes, strict=True)))


def transitions(source: Placed, target: Placed) -> Iterator[tuple[int, Placement]]:
    """The axes whose placement changes in a redistribution, in order, each with its new placement.

    Where anything is sharded the innermost axis comes first, and nested shards are first replicated.

    >>> list(transitions((WHOLE, TERM), (COLUMNS, WHOLE)))
    [(0, Shard(dim=1)), (1, Replicate())]
    >>> list(transitions((ROWS, ROWS), (WHOLE, ROWS)))
    [(1, Replicate()), (0, Replicate()), (1, Shard(dim=0))]

    Source: `torch.distributed.tensor._redistribute:DTensorRedistributePlanner`
    (`generate_greedy_transform_infos`).
    """
    placed = list(source)
    nested = len(source) > 1 and any(isinstance(one, Shard) for one in source)
    for axis in reversed(range(len(placed))) if nested else ():
        wanted = target[axis]
        outer = [[one == wanted for one in own[:axis]] for own in (placed, target)]
        if isinstance(wanted, Shard) and outer[0] != outer[1]:
            wanted = WHOLE
        if placed[axis] != wanted:
            placed[axis] = wanted
            yield axis, wanted
    for axis, wanted in enumerate(target):
        if placed[axis] != wanted:
            yield axis, wanted


def redistribution_us(x: DTensor, target: Placed, links: Sequence[Link]) -> float:
    """PyTorch's estimate of a redistribution's microseconds: 0 of a replicated tensor, inf without a way.

    Source: `torch.distributed.tensor._collective_utils:redistribute_cost`,
    `torch.distributed.tensor._collective_utils:_compute_placement_transition_cost`.
    """
    if all(one == WHOLE for one in x.placed):
        return 0.0
    placed, n_bytes, total = list(x.placed), float(x.n_bytes), 0.0
    for axis, wanted in transitions(x.placed, target):
        n, link = x.sizes[axis], links[axis]
        match placed[axis], wanted:
            case Shard(), Replicate():
                n_bytes *= n
                total += link.ring_us(n, n - 1, n_bytes)
            case Shard(), Shard():
                total += link.ring_us(n, n - 1, n_bytes) + 1.0
            case Partial(), Replicate():
                total += link.ring_us(n, 2 * (n - 1), n_bytes)
            case Partial(), Shard():
                total += link.ring_us(n, n - 1, n_bytes)
                n_bytes /= n
            case Replicate(), Shard():
                n_bytes /= n
            case Shard(), Partial():
                return inf
        placed[axis] = wanted
    return total


def strategy(operands: Sequence[DTensor], links: Sequence[Link]) -> tuple[Placed, ...]:
    """The placements of a product and of its operands that cost least; one that needs no change comes first.

    `operands`: what is added, if anything, and the two factors. Where none is sharded none is to be.

    Source: `torch.distributed.tensor._sharding_prop:_select_min_cost_strategy`,
    `torch.distributed.tensor._ops.single_dim_strategy:_fill_single_dim_strategy_placeholders`.
    """

    def cost(placed: tuple[Placed, ...]) -> tuple[float, bool]:
        pairs = list(zip(operands, placed[1:], strict=True))
        each = [redistribution_us(x, to, links) if x.can_be(to) else inf for x, to in pairs]
        return sum(each), any(x.placed != target for x, target in pairs)

    if not links:
        return ((),) * (len(operands) + 1)
    added = len(operands) - 2
    shards = any(isinstance(one, Shard) for x in operands for one in x.placed)
    known = [one for one in STRATEGIES if shards or not any(isinstance(each, Shard) for each in one)]
    of_one_axis = [(out, *[out] * added, *factors) for out, *factors in known]
    every = product(of_one_axis, repeat=len(links))
    return min([tuple(zip(*one, strict=True)) for one in every], key=cost)


@final
class Ranks(NamedTuple):
    """The ranks of one or two mesh axes, which redistribute and multiply DTensors.

    Attributes:
        sizes: how many along each axis, the outermost first; none: the tensors are whole.
        axes: the mesh axes.
        context: the device, and what the ranks talk by.
    """

    sizes: tuple[int, ...]
    axes: tuple[Group, ...]
    context: OpContext

    def new(self, name: str, shape: Shape, placed: Placed) -> DTensor:
        """A new matrix, without an event."""
        buffer = buffer_of(name, _local(shape, placed, self.sizes), BF16)
        return DTensor(name, shape, placed, self.sizes, buffer)

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

    def _strategy(self, operands: Sequence[DTensor]) -> tuple[Placed, ...]:
        n = len(self.sizes)
        fits = [prod(self.sizes[axis:]) <= MOST_GPUS_OF_A_HOST for axis in range(n)]
        within = 0 if self.context.device.on_cpu else sum(fits)
        links = [(BETWEEN_HOSTS,) * (n - i) + (WITHIN_HOST,) * i for i in range(within + 1)]
        first, *others = {strategy(operands, one) for one in links}
        if others:
            rows, columns = operands[-1].shape
            raise MissingRule(
                f"optimizer='muon' of {operands[-1].name}, ({rows}, {columns}), over "
                f"{' x '.join(map(str, self.sizes))} ranks: how DTensor divides its products depends on how "
                "many GPUs a process sees, which is not known; use another dp, or adamw.",
                kind="Muon of sharded matrices that DTensor divides as a host has GPUs",
            )
        return first

    def redistributed(self, x: DTensor, target: Placed) -> tuple[list[Event], DTensor]:
        """The events of a redistribution, and the new matrix: x itself where its placements are the target.

        Raises:
            MissingRule: for a redistribution that no product was seen to need.

        Source: `torch.distributed.tensor._redistribute:redistribute_local_tensor`.
        """
        events: list[Event] = []
        y = x
        for axis, wanted in transitions(x.placed, target):
            found, made = self._changed(y, axis, wanted)
            events += (*found, *(frees(y.buffer) if y is not x else ()))
            y = made
        return events, y

    def _changed(self, x: DTensor, axis: int, wanted: Placement) -> tuple[list[Event], DTensor]:
        """The events of a redistribution along one axis, and the new matrix."""
        match x.placed[axis], wanted:
            case Shard(), Replicate():
                return self._gathered(x, axis)
            case Shard(), Shard():
                return self._exchanged(x, axis)
            case Partial(), Replicate():
                y = self._with(x, "all-reduced", axis, wanted)
                return [*allocs(y.buffer), self._sent("all_reduce", axis, x.n_bytes)], y
            case Partial(), Shard(dim):
                y = self._with(x, "reduce-scattered", axis, wanted)
                chunks = [buffer_of(f"{x.name} (chunks of columns)", x.local, BF16)] * dim
                sent = self._sent("reduce_scatter", axis, x.n_bytes)
                scratch = [buffer_of("gloo scratch", x.local, BF16)] * (self.context.backend == "gloo")
                scattered = [*allocs(*chunks, y.buffer), sent, *allocs(*scratch), *frees(*scratch)]
                return [*scattered, *frees(*chunks)], y
            case Replicate(), _:
                y = self._with(x, "own part", axis, wanted)
                return [*allocs(y.buffer)], y
        raise MissingRule(
            f"optimizer='muon' with a redistribution of {x.name} from {x.placed} over {self.axes[axis]} to "
            f"{wanted} has no rule; use adamw."
        )

    def _with(self, x: DTensor, how: str, axis: int, wanted: Placement) -> DTensor:
        """A new matrix with another placement along one axis."""
        placed = (*x.placed[:axis], wanted, *x.placed[axis + 1 :])
        return self.new(f"{x.name} ({how})", x.shape, placed)

    def _gathered(self, x: DTensor, axis: int) -> tuple[list[Event], DTensor]:
        """The whole along an axis: chunks arrive one after the other; columns are copied side by side.

        Source: `torch.distributed._functional_collectives:all_gather_single`.
        """
        operand = [] if x.is_contiguous else [buffer_of(f"{x.name} (contiguous)", x.local, BF16)]
        arrived = self._with(x, "gathered", axis, WHOLE)
        found = [*allocs(*operand, arrived.buffer), self._sent("all_gather", axis, arrived.n_bytes)]
        if self.context.gathers_in_copies:
            for shape in (x.local, arrived.local):
                scratch = buffer_of("gloo scratch", shape, BF16)
                found += (*allocs(scratch), *frees(scratch))
        if x.placed[axis] == ROWS:
            return [*found, *frees(*operand)], arrived
        y = self._with(x, "gathered columns", axis, WHOLE)
        return [*found, *allocs(y.buffer), *frees(arrived.buffer, *operand)], y

    def _exchanged(self, x: DTensor, axis: int) -> tuple[list[Event], DTensor]:
        """Rows for columns, or columns for rows: an all-to-all, on CPU a gather and this rank's chunk of it.

        There a chunk of rows keeps all of what was gathered alive.

        Source: `torch.distributed.tensor._collective_utils:shard_dim_alltoall`;
        torch/csrc/distributed/c10d/Functional.cpp (`shard_dim_alltoall`).
        """
        to_rows = x.placed[axis] == COLUMNS
        y = self._with(x, "exchanged", axis, ROWS if to_rows else COLUMNS)
        if self.context.device.on_cpu:
            found, whole = self._gathered(x, axis)
            if to_rows:
                return found, y._replace(buffer=whole.buffer)
            return [*found, *allocs(y.buffer), *frees(whole.buffer)], y
        in_order = to_rows and x.is_contiguous
        sent = [] if in_order else [buffer_of(f"{x.name} (by rank)", x.local, BF16)]
        received = [buffer_of(f"{x.name} (received)", x.local, BF16)] if to_rows else []
        found = [*allocs(*sent, *received), *(() if to_rows else allocs(y.buffer))]
        found.append(self._sent("all_to_all", axis, x.n_bytes))
        return [*found, *(allocs(y.buffer) if to_rows else ()), *frees(*received, *sent)], y

    def _sent(self, kind: CollectiveKind, axis: int, n_bytes: int) -> Collective:
        return Collective(kind=kind, axis=self.axes[axis], what="orthogonalization", payload_bytes=n_bytes)
