"""FSDP1's flat parameters: the weights of a unit in one tensor, of which each data-parallel rank has a shard.

Source: `torch.distributed.fsdp._flat_param:FlatParamHandle`.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Final, NamedTuple, final

from memplan.engines.torch.param_group import copied
from memplan.engines.torch.stage import RankStages, Stage
from memplan.engines.torch.units import (
    ALL_GATHER,
    REDUCE_SCATTER,
    CountedEvents,
    EqualParameters,
    Row,
    collectives,
)
from memplan.memory import Alive
from memplan.parts.ddp import ALL_REDUCE
from memplan.parts.stage import trained
from memplan.record import COMPUTE, Event, WaitStream, allocs, frees
from memplan.shapes import Buffer, DType, Parameter, Shape, buffer_of

ALIGNMENT_BYTES: Final = 16
"""With `use_orig_params` each parameter starts at a multiple of this (`_get_aligned_numel`)."""


class Slice(NamedTuple):
    """The elements of a parameter that are in a rank's shard."""

    parameter: Parameter
    n_elements: int


class FlatParameter:
    """A unit's flat parameter on one rank, and what is allocated when it is gathered and reduced.

    A unit that `reshards` frees its weights after its forward pass and gathers them again for its backward
    pass. With `use_orig_params` parameters are aligned and the whole is padded to a multiple of the ranks;
    without, the last shards are padded.

    Attributes:
        n_elements: of the unsharded parameter, with the padding between parameters.
        shard_elements: of each rank's shard, with all padding.
        own_elements: of the rank's shard without the padding that comes after the last parameter.
        slices: the parameters' parts that are in the rank's shard.
        shard: the buffer of the rank's shard, of kind "weights"; `reduced`: of its gradient.
    """

    def __init__(
        self, stage: Stage, place: int, name: str, parts: Sequence[EqualParameters], *, reshards: bool
    ) -> None:
        formats, n_ranks = stage.plan.formats, stage.plan.n_shards
        self.stage, self.name, self.reshards = stage, name, reshards
        self.parts = [part for part in parts if part.parameters and part.n]
        self.is_trained = any(trained(part.parameters) for part in self.parts)
        self.aligned = stage.options.use_orig_params
        places, self.pads = self._places(ALIGNMENT_BYTES // formats.gather.itemsize if self.aligned else 1)
        self.n_elements = (places[-1][1] + places[-1][0].n_elements) if places else 0
        if self.aligned and self.n_elements % n_ranks:
            self.pads.append(n_ranks - self.n_elements % n_ranks)
            self.n_elements += self.pads[-1]
        self.shard_elements = -(-self.n_elements // n_ranks)
        self.slices = list(_slices(places, self.shard_elements, place))
        left = self.n_elements - place * self.shard_elements
        self.own_elements = max(0, min(self.shard_elements, left))
        self.shard = self._buffer("flat parameter, sharded", self.shard_elements, formats.stored)
        self.low_precision = self._buffer("flat parameter's shard", self.shard_elements, formats.gather)
        gathered = self.shard_elements * n_ranks
        self.uploaded = self._buffer("flat parameter's shard on the GPU", self.shard_elements, formats.stored)
        self.unsharded = self._buffer("flat parameter, unsharded", gathered, formats.gather)
        self.scratch = self._buffer("gloo scratch", gathered, formats.gather)
        self.grad = self._buffer("flat gradient", self.n_elements, formats.gather)
        self.zeros = [self._buffer("gradient of padding", n, formats.gather) for n in self.pads]
        self.cast_grad = self._buffer("flat gradient to reduce", self.n_elements, formats.reduce)
        self.padded_grad = self._buffer("flat gradient, padded", gathered, formats.reduce)
        self.reduce_scratch = self._buffer("gloo scratch of a gradient", gathered, formats.reduce)
        self.reduce_output = self._buffer("reduce-scatter output", self.shard_elements, formats.reduce)
        self.reduced = buffer_of(
            f"{name}: flat gradient, sharded", (self.shard_elements,), formats.accumulate, "grads"
        )
        self.passing = self._buffer(
            "flat gradient, sharded, to be added", self.shard_elements, formats.stored
        )
        self.all_gather, self.reduce_scatter, self.all_reduce = collectives(
            self.unsharded.n_bytes,
            self.padded_grad.n_bytes,
            self.reduce_output.n_bytes,
            stage.plan.shard_group,
        )

    def _buffer(self, what: str, n: int, dtype: DType) -> Buffer:
        return buffer_of(f"{self.name}: {what}", (n,), dtype)

    def _places(self, multiple: int) -> tuple[list[tuple[Parameter, int]], list[int]]:
        """Each parameter with the element it starts at, and the padding before parameters."""
        places, pads, end = [], [], 0
        for parameters, times in self.parts:
            for parameter in parameters * times:
                if end % multiple:
                    pads.append(multiple - end % multiple)
                    end += pads[-1]
                places.append((parameter, end))
                end += parameter.n_elements
        return places, pads

    @property
    def reduction(self) -> tuple[Buffer, ...]:
        """The buffers that are allocated on the stream of reductions."""
        return (self.cast_grad, self.padded_grad, self.reduce_output, self.reduced, self.passing)

    @cached_property
    def updated(self) -> list[Parameter]:
        """What the optimizer sees of it on this rank: slices of parameters, or the shard as one parameter."""
        dtype = self.stage.plan.formats.stored
        if not self.aligned:
            named = [(f"{self.name}: flat parameter", self.shard_elements)]
        else:
            named = [(one.parameter.name, one.n_elements) for one in self.slices]
        return [Parameter(name, (n,), dtype, requires_grad=self.is_trained) for name, n in named]

    # --- What happens to it in a pass ---

    @property
    def casts(self) -> bool:
        """Whether it is gathered in another type than it is stored in."""
        return self.low_precision.dtype != self.shard.dtype

    @property
    def keeps_uploaded(self) -> bool:
        """Whether the module's parameters hold the uploaded shard until they are views of the host's again.

        Source: `torch.distributed.fsdp._flat_param:FlatParamHandle.flat_param_to`.
        """
        return self.stage.offloads and self.aligned and not self.casts

    def unshard(self, *, is_whole: bool = False) -> Iterator[Event]:
        """Gathers it, through a copy of the shard in the compute type if it is stored in another one.

        `is_whole`: it is unsharded already, and only uploaded, as offload does all the same.

        Source: `torch.distributed.fsdp._flat_param:FlatParamHandle.pre_unshard`,
        `torch.distributed.fsdp._flat_param:FlatParamHandle.unshard`.
        """
        if is_whole and not self.stage.offloads:
            return
        yield from allocs(*[self.low_precision] * self.casts)
        if self.stage.offloads:
            yield from allocs(self.uploaded)
            yield copied("weights to the GPU", self.uploaded.n_bytes, ALL_GATHER)
            yield from frees(*[self.uploaded] * self.casts)
        if not is_whole:
            yield from (*allocs(self.unsharded), self.all_gather)
            if self.stage.op_context.gathers_in_copies:
                yield from (*allocs(self.scratch), *frees(self.scratch)) * 2
        yield from frees(*[self.low_precision] * self.casts)
        if self.stage.offloads and not (self.casts or self.keeps_uploaded):
            yield from frees(self.uploaded)

    def reshard(self, *, frees_whole: bool = True) -> tuple[Event, ...]:
        """Frees the unsharded weights, unless they stay, and the uploaded shard, if it is held."""
        return frees(*[self.uploaded] * self.keeps_uploaded, *[self.unsharded] * frees_whole)

    def flatten_grads(self, grads: Mapping[Parameter, Buffer]) -> Iterator[CountedEvents]:
        """Joins the parameters' gradients into the flat one.

        Padding gets a gradient of zeros.

        Source: torch/csrc/autograd/FunctionsManual.cpp (`split_with_sizes_backward`).
        """
        yield (*allocs(*self.zeros, self.grad), *frees(*self.zeros)), 1
        for parameters, times in self.parts:
            yield frees(*[grads[parameter] for parameter in parameters]), times

    def reduce(self, *, added: bool) -> Iterator[Event]:
        """Reduces the flat gradient into the sharded one; `added`: it is added to an older one and freed.

        Source: `torch.distributed.fsdp._runtime_utils:_post_backward_hook`,
        `torch.distributed.fsdp._runtime_utils:_reduce_grad`.
        """
        formats = self.stage.plan.formats
        whole = self.grad if formats.gather == formats.reduce else self.cast_grad
        yield from allocs(*[whole] * (whole is not self.grad))
        pads = self.padded_grad.shape != self.grad.shape
        yield from allocs(*[self.padded_grad] * pads)
        kept = self.passing if added else self.reduced
        output = kept if formats.reduce == formats.accumulate else self.reduce_output
        yield from (*allocs(output), WaitStream(REDUCE_SCATTER, COMPUTE), self.reduce_scatter)
        if self.stage.backend == "gloo":
            yield from (*allocs(self.reduce_scratch), *frees(self.reduce_scratch))
        if self.stage.plan.dp_replicate > 1:
            yield from (WaitStream(ALL_REDUCE, REDUCE_SCATTER), self.all_reduce)
        if output is not kept:
            yield from (*allocs(kept), *frees(output))
        yield from frees(*[whole] * (whole is not self.grad), *[self.padded_grad] * pads)
        if self.stage.offloads:
            yield copied("gradients to the host", self.reduced.n_bytes, REDUCE_SCATTER)
        yield from frees(*[kept] * added, self.grad)


def _slices(places: Sequence[tuple[Parameter, int]], shard_elements: int, rank: int) -> Iterator[Slice]:
    start, stop = rank * shard_elements, (rank + 1) * shard_elements
    for parameter, begins in places:
        n = min(stop, begins + parameter.n_elements) - max(start, begins)
        if n > 0:
            yield Slice(parameter, n)


class FlatUnits:
    """The flat parameters of a stage: one for each block, and the root's, which has all that is left.

    `rows`: the flat parameters of the blocks, in the module's order.
    """

    def __init__(self, stage: Stage, place: int) -> None:
        trace, again = stage.trace, stage.plan.zero == 3
        embed, head = EqualParameters(trace.embed_parameters, 1), EqualParameters(trace.head_parameters, 1)
        of_root, made = [embed], dict[tuple[Parameter, ...], FlatParameter]()
        self.rows: list[Row[FlatParameter | None]] = []
        for parameters, n, role in stage.block_parameters:
            if stage.options.fsdp_units == "model" or role in ("between", "idle"):
                of_root.append(EqualParameters(parameters, n))
                self.rows.append(Row(None, n, 1))
                continue
            if parameters not in made:
                equal = [EqualParameters(parameters, 1)]
                made[parameters] = FlatParameter(stage, place, "block", equal, reshards=again)
            self.rows.append(Row(made[parameters], 1, n))
        self.root = FlatParameter(stage, place, "root", [*of_root, head], reshards=False)

    def __iter__(self) -> Iterator[tuple[FlatParameter, int]]:
        """The flat parameters in the order in which they are made, equal ones in a row counted: root last."""
        units = [(row.group, row.times) for row in self.rows]
        return ((unit, n) for unit, n in (*units, (self.root, 1)) if unit is not None)


@final
class FlatRankStages(RankStages):
    """The stage of one rank whose weights, gradients and optimizer state are of flat parameters."""

    @cached_property
    def units(self) -> FlatUnits:
        """The flat parameters of the rank's stage."""
        (stage,) = self.stages
        return FlatUnits(stage, self.plan.place_among_shards(self.rank))

    @property
    def stored_parts(self) -> list[tuple[Sequence[Parameter], int]]:
        root, blocks = self.units.root, [(row.group, row.times) for row in self.units.rows]
        of_blocks = [(unit.updated, n) for unit, n in blocks if unit is not None]
        before = {parameter.name for parameter in self.stages[0].trace.embed_parameters}
        first = [one for one in root.updated if not root.aligned or one.name in before]
        return [(first, 1), *of_blocks, ([one for one in root.updated if one not in first], 1)]

    @property
    def page_locked(self) -> Iterator[tuple[str, int, int, int]]:
        for unit, n in self.units:
            counted = sum([parameter.n_bytes for parameter in unit.updated])
            yield f"{unit.name}: flat parameter", unit.shard.n_bytes, unit.shard.n_bytes, n
            yield f"{unit.name}: flat gradient", counted, unit.shard.n_bytes, n

    def weight_elements(self, parameter: Parameter) -> int:
        return parameter.n_elements

    def weight_shape(self, parameter: Parameter) -> Shape:
        return parameter.shape

    def padding_elements(self, parameter: Parameter) -> int:
        return 0

    @cached_property
    def states(self) -> Alive:
        """As of other modules, and the padding of the shards, which no parameter of the optimizer has."""
        alive = super().states
        for unit, n in self.units:
            padding = unit.shard_elements - sum([parameter.n_elements for parameter in unit.updated])
            if padding:
                alive[buffer_of(f"{unit.name} (padding)", (padding,), unit.shard.dtype)] += n
        return alive
