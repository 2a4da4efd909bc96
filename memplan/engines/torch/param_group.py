"""FSDP2's groups of parameters that are gathered and reduced together, and how a stage is divided into them.

Source: `torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from functools import cached_property, lru_cache
from itertools import groupby
from typing import NamedTuple

from memplan.engines.torch.float8 import Float8Cast
from memplan.engines.torch.options import gathers_head, runs_again
from memplan.engines.torch.sharding import n_shards, padded_shard_elements, shard_elements
from memplan.engines.torch.stage import Stage, stored_dtype
from memplan.engines.torch.units import (
    ALL_GATHER,
    REDUCE_SCATTER,
    CountedEvents,
    EqualParameters,
    Row,
    collectives,
)
from memplan.engines.torch.update_in_backward import updated_at_once
from memplan.models.base import Role
from memplan.models.recording import REFERENCE
from memplan.parts.ddp import ALL_REDUCE, partial_sum
from memplan.parts.stage import trained
from memplan.record import COMPUTE, Alloc, Collective, Event, Free, WaitStream, allocs, frees
from memplan.shapes import BF16, FP32, UINT8, Buffer, DType, Parameter, buffer_of


@lru_cache(maxsize=1024)
def found_order(parameters: tuple[Parameter, ...]) -> tuple[Parameter, ...]:
    """The parameters in the order in which `fully_shard` finds them: a module's after its children's.

    Source: `torch.distributed.fsdp._fully_shard._fsdp_init:_get_managed_modules`.
    """
    owners = [p.name.rpartition(".")[0] for p in parameters]

    def key(i: int) -> tuple[int, int, int]:
        within = [j for j, owner in enumerate(owners) if f"{owner}.".startswith(f"{owners[i]}.")]
        return within[-1], -owners[i].count("."), i

    return tuple([parameters[i] for i in sorted(range(len(parameters)), key=key)])


class ParamGroup:
    """Parameters that are gathered and reduced together: an FSDP2 unit.

    Each of `n_shards` ranks holds padded shards, so a flat buffer has `n_shards` times the bytes of the
    largest shard. A group that `reshards` frees its weights after its forward pass and gathers them again for
    its backward pass. `place`: the rank's among those that shard. A group of experts is sharded over `efsdp`.
    With one shard (`alone`) FSDP2 copies the
    weights and runs no collective. `is_last`: whether it is the last group of its unit, whose reduction frees
    the inputs of those before.
    """

    is_last = True

    def __init__(
        self, stage: Stage, place: int, name: str, parts: Iterable[EqualParameters], *, reshards: bool
    ) -> None:
        formats = stage.plan.formats
        self.stage, self.place, self.reshards = stage, place, reshards
        self.parts = [part for part in parts if part.parameters and part.n]
        first = self.parts[0].parameters[0]
        self.is_of_experts = first.is_of_experts
        self.n_shards = n = n_shards(first, stage.plan)
        trained_parts = [EqualParameters(tuple(trained(part.parameters)), part.n) for part in self.parts]
        self.trained = [part for part in trained_parts if part.parameters]
        self.replicates = 1 * (stage.plan.dp_replicate > 1)
        self.dtype = formats.reduce
        shards = Counter[DType]()
        for p, times in self._counted(self.parts):
            shards[self.gather_dtype(p)] += times * self.shard(p)
        reduced = sum([times * self.shard(p) for p, times in self._counted(self.trained)])
        n_bytes = n * sum([dtype.itemsize * size for dtype, size in shards.items()])
        dtype = next(iter(shards)) if len(shards) == 1 else UINT8
        self.flat = buffer_of(f"{name} (all-gather output)", (n_bytes // dtype.itemsize,), dtype)
        self.scratch = buffer_of(f"{name} (gloo scratch)", self.flat.shape, dtype)
        narrow = [p for p, _ in self._counted(self.parts) if p.gathered_as]
        self.casts_to_float8 = {p: Float8Cast(stage, p, self.shard(p), self.gather_dtype(p)) for p in narrow}
        self.inputs, self.uploads = self._inputs(name, shards[formats.gather])
        self.unsharded = [([self._unsharded(p) for p in found_order(own)], n) for own, n in self.parts]
        self.reduce_input = buffer_of(f"{name} (reduce-scatter input)", (n * reduced,), self.dtype)
        self.reduce_scratch = buffer_of(f"{name} (gloo scratch)", (n * reduced,), self.dtype)
        self.reduced = buffer_of(f"{name}.grad (sharded)", (reduced,), formats.accumulate, "grads")
        self.passing = buffer_of(f"{name}.grad (sharded, on its way)", (reduced,), formats.accumulate)
        self.reduce_output = buffer_of(f"{name} (reduce-scatter output)", (reduced,), self.dtype)
        self.casts_reduced = self.dtype != formats.accumulate
        self._updates: dict[bool, list[CountedEvents]] = {}
        self.divided = buffer_of(f"{name}.grad (divided)", (reduced,), self.dtype)
        self.all_gather, self.reduce_scatter, self.all_reduce = collectives(
            self.flat.n_bytes,
            self.reduce_input.n_bytes,
            self.reduce_output.n_bytes,
            "efsdp" if self.is_of_experts else stage.plan.shard_group,
        )

    @property
    def alone(self) -> bool:
        """Whether no other rank has a part of it."""
        return self.n_shards == 1

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its parameters, those of equal modules once."""
        return tuple([p.name for p, _ in self._counted(self.parts)])

    def shard(self, parameter: Parameter) -> int:
        """Elements of a rank's padded shard of a parameter."""
        return padded_shard_elements(parameter, self.n_shards)

    def gather_dtype(self, parameter: Parameter) -> DType:
        """The type in which a parameter is gathered: float8 where it has hooks, else the precision's type."""
        return parameter.gathered_as or self.stage.plan.formats.gather

    def _unsharded(self, p: Parameter) -> Buffer:
        return buffer_of(f"{p.name} (unsharded)", (self.n_shards * self.shard(p),), self.gather_dtype(p))

    @staticmethod
    def _counted(parts: Iterable[EqualParameters]) -> Iterator[tuple[Parameter, int]]:
        return ((p, part.n) for part in parts for p in part.parameters)

    def _inputs(self, name: str, shards: int) -> tuple[list[tuple[list[Buffer], int]], dict[Buffer, Buffer]]:
        """Inputs of an all-gather that are copies of shards, each with the uploaded copy it is cast from.

        `shards`: the elements of all of them. Weights that are cast to float8 come first.
        """
        compute = self.stage.plan.formats.gather

        def stored(p: Parameter) -> DType:
            return stored_dtype(p, self.stage.weight_dtype)

        if not self.stage.offloads:
            others = [(p, n) for p, n in self._counted(self.parts) if not p.gathered_as]
            n_cast = shards - sum([self.shard(p) * n for p, n in others if stored(p) == compute])
            cast = buffer_of(f"{name} (own shards as {compute.name})", (n_cast,), compute)
            narrow = [
                ([self.casts_to_float8[p].data for p in own if p.gathered_as], n) for own, n in self.parts
            ]
            return [*narrow, *([([cast], 1)] if n_cast else [])], {}
        found: list[tuple[list[Buffer], int]] = []
        uploads: dict[Buffer, Buffer] = {}
        for parameters, times in self.parts:
            found.append(([], times))
            for p in parameters:
                shard = buffer_of(f"{p.name} (own shard as {compute.name})", (self.shard(p),), compute)
                found[-1][0].append(shard)
                if compute != stored(p):
                    uploads[shard] = buffer_of(f"{p.name} (own shard)", (self.shard(p),), stored(p))
        return found, uploads

    def unshard(self) -> Iterator[CountedEvents]:
        """All-gather into one flat buffer, from shards in the type they are gathered in, on the device.

        A rank alone gathers nothing.

        Source: `torch.distributed.fsdp._fully_shard._fsdp_collectives:_get_param_all_gather_inputs`,
        `torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam.all_gather_inputs`.
        """
        if self.alone:
            return
        casts = {cast.data: cast.events for cast in self.casts_to_float8.values()}
        for inputs, times in self.inputs:
            filled = [casts.get(buffer) or self._filled(buffer) for buffer in inputs]
            yield tuple(event for found in filled for event in found), times
        yield (*allocs(self.flat), self.all_gather), 1
        if self.stage.op_context.gathers_in_copies:
            yield (*allocs(self.scratch), *frees(self.scratch)) * 2, 1
        for inputs, times in self.inputs:
            yield frees(*inputs), times

    @cached_property
    def gathered(self) -> dict[Buffer, Buffer]:
        """The buffers of an all-gather, each with its stand-in for those ahead of time."""
        inputs = [buffer for found, _ in self.inputs for buffer in found]
        inputs += [
            e.buffer for one in self.casts_to_float8.values() for e in one.events if isinstance(e, Alloc)
        ]
        return {buffer: copy(buffer) for buffer in (self.flat, *inputs, *self.uploads.values())}

    def ahead(self, counted: Iterable[CountedEvents]) -> Iterator[CountedEvents]:
        """The all-gather that a schedule asks for: as `unshard`, but after the default stream's work."""
        yield (WaitStream(ALL_GATHER, COMPUTE),), 1
        for found, times in counted:
            yield tuple(map(self._ahead, found)), times

    def _ahead(self, event: Event) -> Event:
        if isinstance(event, Alloc | Free) and event.buffer in self.gathered:
            return type(event)(self.gathered[event.buffer])
        return event

    def _filled(self, shard: Buffer) -> tuple[Event, ...]:
        """Allocates an input of the all-gather, through an uploaded copy in the stored type under offload."""
        if not self.stage.offloads:
            return allocs(shard)
        uploaded = self.uploads.get(shard, shard)
        moved = copied("weights to the GPU", uploaded.n_bytes, ALL_GATHER)
        if uploaded is shard:
            return (*allocs(shard), moved)
        return (*allocs(uploaded), moved, *allocs(shard), *frees(uploaded))

    def wait_for_unshard(self, stale: "ParamGroup | None") -> Iterator[CountedEvents]:
        """Copies the flat buffer into the parameters once it is full, then frees the flat buffer of `stale`.

        A rank alone copies its own weights, through copies in the compute type where they are stored in
        another one: each is freed when the next has been made.

        Source: `torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup.wait_for_unshard`.
        """
        casts: tuple[Buffer, ...] = ()
        yield () if self.alone else (WaitStream(COMPUTE, ALL_GATHER),), 1
        for (buffers, times), (parameters, _) in zip(self.unsharded, self.parts, strict=True):
            if not self.alone:
                yield allocs(*buffers), times
                continue
            for buffer, parameter in zip(buffers, parameters, strict=True):
                before, casts = casts, self.casts[parameter]
                yield (*allocs(*casts), *frees(*before), *allocs(buffer)), 1
        yield frees(stale.flat) if stale is not None and not stale.alone else (), 1
        yield frees(*casts), 1

    @cached_property
    def scales(self) -> list[tuple[list[Buffer], int]]:
        """The scales of weights in float8 that an all-gather makes, and how often in equal blocks."""
        casts = [([self.casts_to_float8[p] for p in own if p.gathered_as], n) for own, n in self.parts]
        return [([scale for one in found for scale in one.scales], n) for found, n in casts]

    def frees_scales(self) -> Iterator[CountedEvents]:
        """Frees the scales of the all-gather before the last one."""
        for scales, times in self.scales:
            yield frees(*scales), times

    @cached_property
    def casts(self) -> dict[Parameter, tuple[Buffer, ...]]:
        """The copy of each of a rank's shards in the compute type; none of one that is stored in it."""
        compute, found = self.stage.plan.formats.gather, {}
        for p in [p for own, _ in self.parts for p in own]:
            name = f"{p.name} (own shard as {compute.name})"
            is_cast = stored_dtype(p, self.stage.weight_dtype) != compute
            found[p] = (buffer_of(name, (self.shard(p),), compute),) * is_cast
        return found

    def reshard(self) -> Iterator[CountedEvents]:
        """Free the unsharded parameters."""
        for buffers, times in self.unsharded:
            yield frees(*buffers), times

    def post_backward(self, grads: dict[Parameter, Buffer], comms: "CommContext") -> Iterator[CountedEvents]:
        """The end of the unit's backward pass: frees its weights and reduces its gradients.

        Under tensor parallelism gradients first get their weights' placements: replicated ones are sharded,
        partial ones summed.

        Source: `torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup.post_backward`,
        `torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam._get_grad_inner_tensor`.
        """
        own = dict(grads)
        for parameters, times in self.trained:
            found: list[Event] = []
            for p in parameters:
                if p.grad_placements != p.placements:
                    own[p] = buffer_of(f"{p.name}.grad (own part)", p.shape, grads[p].dtype)
                    summed = [partial_sum(own[p].n_bytes)] if p.has_partial_grad else []
                    found += [*allocs(own[p]), *summed, *frees(grads[p])]
            yield tuple(found), times
        yield from self.reshard()
        yield from self.reduce_grads(own, comms)

    def reduce_grads(self, grads: dict[Parameter, Buffer], comms: "CommContext") -> Iterator[CountedEvents]:
        """Reduce-scatters the unsharded gradients, if any; the input of the reduction before is freed first.

        That waits for the reduction before.
        In torch 2.12 it is freed last: the variable of the loop that waits for it still refers to it. Before
        2.15 the variable of the loop that collects the gradients holds the last one to the end. The output
        becomes the sharded gradient or is added to it (`passes_on`), through a copy if its type differs.

        Source: `torch.distributed.fsdp._fully_shard._fsdp_collectives:foreach_reduce`,
        torch 2.15's `FSDPParamGroup._take_unsharded_grads_to_reduce`.
        """
        dropped: tuple[Event, ...] = ()
        if self.is_last and comms.reduce_scatter:
            dropped = WaitStream(COMPUTE, REDUCE_SCATTER), *comms.frees_reduced()
        if not self.trained:
            yield dropped, 1
            return
        comms.reduce_scatter += (self,)
        own = [([grads[p] for p in parameters], times) for parameters, times in self.trained]
        (*_, last), times = own[-1]
        kept = self.passing if self.passes_on(comms) else self.reduced
        output = self.reduce_output if self.casts_reduced else kept
        comms.reduced = True
        drops_late = self.stage.options.release == (2, 12)
        held = (last,) if self.stage.options.release < (2, 15) else ()
        yield (*(() if drops_late else dropped), *allocs(self.reduce_input)), 1
        yield from self._chunk_cat(grads)
        for buffers, n in own[:-1]:
            yield frees(*buffers), n
        yield frees(*own[-1][0]), times - 1
        freed = [grad for grad in own[-1][0] if grad not in held]
        yield (*frees(*freed), *allocs(output)), 1
        if self.alone:  # its gradients are divided by the number of batches that its experts saw
            yield (*allocs(self.divided), *frees(self.divided)), 1
        else:
            yield (WaitStream(REDUCE_SCATTER, COMPUTE), self.reduce_scatter), 1
        if self.stage.backend == "gloo" and not self.alone:
            yield (*allocs(self.reduce_scratch), *frees(self.reduce_scratch)), 1
        yield (WaitStream(ALL_REDUCE, REDUCE_SCATTER), self.all_reduce), self.replicates
        if self.casts_reduced:
            yield (*allocs(kept), *(() if self.replicates else frees(output))), 1
        yield from self.updates(makes_states=comms.makes_states)
        yield frees(*held), 1
        if self.stage.offloads:
            yield from self._downloads(comms)
        if kept is self.passing:
            yield frees(kept), int(self.casts_reduced or not self.replicates)
        if drops_late:
            yield dropped, 1

    def _chunk_cat(self, grads: dict[Parameter, Buffer]) -> Iterator[CountedEvents]:
        """The copies of gradients that are made to fill the reduce-scatter's input.

        Gradients whose rows do not divide evenly are copied into padded ones, all at once, unless the kernel
        pads (`_pads_in_kernel`); where gradients are widened on the way in, CPU copies each of them once
        more, with its padding. Gradients of different types (from torch 2.15 on) are first widened, all at
        once, except for CUDA's kernel that takes bfloat16 and float32.

        Source: aten/src/ATen/native/TensorShape.cpp (`_chunk_cat`),
        torch/csrc/distributed/fsdp/ChunkCat.cpp (`chunk_cat_mixed_dtype`).
        """
        dtypes = {grads[p].dtype for parameters, _ in self.trained for p in parameters}
        differ = len(dtypes) > 1
        widened = list(self._widened(grads)) if differ else []
        dtype = self.dtype if differ else dtypes.pop()
        padded = [(list(self._padded(parameters, dtype)), times) for parameters, times in self.trained]
        for buffers, n in (*widened, *padded):
            yield allocs(*buffers), n
        if self.stage.device.casts_in_copies and self.dtype != dtype:
            for parameters, n in self.trained:
                sizes = {p: self.n_shards * self.shard(p) for p in parameters}
                copies = [buffer_of(f"{p.name}.grad (in chunks)", (n,), dtype) for p, n in sizes.items()]
                yield tuple(e for copied in copies for e in (*allocs(copied), *frees(copied))), n
        for buffers, n in (*padded, *widened):
            yield frees(*buffers), n

    def _widened(self, grads: dict[Parameter, Buffer]) -> Iterator[tuple[list[Buffer], int]]:
        """Copies, in the type of the reduction, of gradients that have another type."""
        for parameters, times in self.trained:
            narrow = [p for p in parameters if grads[p].dtype != self.dtype]
            if self.stage.device.on_cpu or any(grads[p].dtype != BF16 for p in narrow):
                what = f"grad ({self.dtype.name})"
                yield [buffer_of(f"{p.name}.{what}", p.shape, self.dtype) for p in narrow], times

    def _downloads(self, comms: "CommContext") -> Iterator[CountedEvents]:
        """The copy of sharded gradients to the host: it overlaps, unless they are added to older ones."""
        added = comms.has_sharded_grads
        what = "gradients to be added" if added else "gradients to the host"
        stream = COMPUTE if added else REDUCE_SCATTER
        plan = self.stage.plan
        for parameters, times in self.trained:
            for p in parameters:
                n_bytes = shard_elements(p, plan.n_shards, self.place) * plan.formats.accumulate.itemsize
                yield (copied(what, n_bytes, stream),), times

    def updates(self, *, makes_states: bool) -> list[CountedEvents]:
        """The update of each weight of the group once it has a gradient, on the stream of the reduction.

        Source: `torch.distributed.fsdp._fully_shard._fsdp_collectives:foreach_reduce`, which calls
        `_post_accumulate_grad_hooks`.
        """
        if not self.stage.options.optimizer_in_backward:
            return []
        if makes_states not in self._updates:
            self._updates[makes_states] = [
                (tuple([event for p in parameters for event in self._updated(p, makes_states)]), times)
                for parameters, times in self.trained
            ]
        return self._updates[makes_states]

    def _updated(self, p: Parameter, makes_states: bool) -> Iterator[Event]:
        rows = shard_elements(p, self.n_shards, self.place) * p.shape[0] // p.n_elements
        return updated_at_once(self.stage, p, (rows, *p.shape[1:]), makes_states=makes_states)

    def passes_on(self, comms: "CommContext") -> bool:
        """Whether reduced gradients are freed: added to older ones, copied to the host, or used at once."""
        return comms.has_sharded_grads or self.stage.offloads or self.stage.options.optimizer_in_backward

    def finalize_backward(self, comms: "CommContext") -> Iterator[CountedEvents]:
        """The end of the backward pass: frees the input of the all-reduce between replicas.

        Source: `torch.distributed.fsdp._fully_shard._fsdp_param_group:AllReduceState`.
        """
        if self.trained and self.casts_reduced:
            yield frees(self.reduce_output), self.replicates
        elif self.trained and self.passes_on(comms):
            yield frees(self.passing), self.replicates

    def _pads_in_kernel(self, dtype: DType) -> bool:
        """Whether gradients of a type are padded within the copy, as CUDA's kernels do.

        One kernel keeps the type, another widens bfloat16 to float32.

        Source: aten/src/ATen/native/cuda/TensorShape.cu (`_chunk_cat_out_cuda`).
        """
        device = self.stage.device
        has_kernel = dtype == self.dtype or (dtype, self.dtype) == (BF16, FP32)
        return not device.runs_kernels or (not device.on_cpu and has_kernel)

    def _padded(self, parameters: Sequence[Parameter], dtype: DType) -> Iterator[Buffer]:
        if self._pads_in_kernel(dtype):
            return
        for p in parameters:
            padded_elements = self.n_shards * self.shard(p)
            if padded_elements != p.n_elements:
                yield buffer_of(f"{p.name}.grad (padded)", (padded_elements,), dtype)

    def accumulate_unsharded_grads(
        self, grads: dict[Parameter, Buffer], wide: dict[Parameter, Buffer], *, has_sums: bool
    ) -> Iterator[CountedEvents]:
        """Copies each gradient into its sum (in `reduce_dtype`), or adds it to an older sum, and frees it.

        CPU adds a narrower tensor through a widened copy.

        Source: `torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam.to_accumulated_grad_if_needed`,
        aten/src/ATen/TensorIterator.cpp (`compute_types`).
        """
        for parameters, times in self.trained:
            found: list[Event] = []
            for p in parameters:
                copied = (*allocs(wide[p]), *frees(wide[p])) if self.stage.device.casts_in_copies else ()
                found += [*(copied if has_sums else allocs(wide[p])), *frees(grads[p])]
            yield tuple(found), times


def copied(what: str, n_bytes: int, stream: str) -> Collective:
    """A copy between the host and the GPU."""
    return Collective(kind="copy", axis="host", what=what, payload_bytes=n_bytes, stream=stream)


class CommContext:
    """The buffers that collectives of a pass still hold, and the groups that are gathered ahead.

    `has_sharded_grads`: whether reduced gradients are added to older ones; `makes_states`: whether updates in
    the backward pass are the first; `reduced`: whether any gradients have been reduced.

    Plays `torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPCommContext`.
    """

    def __init__(self, *, has_sharded_grads: bool, makes_states: bool = False) -> None:
        self.has_sharded_grads, self.makes_states = has_sharded_grads, makes_states
        self.all_gather: ParamGroup | None = None
        self.reduce_scatter: tuple[ParamGroup, ...] = ()
        self.reduced = False
        self.prefetched: set[ParamGroup] = set()

    def frees_reduced(self) -> tuple[Event, ...]:
        """Frees the inputs of the reductions so far."""
        groups, self.reduce_scatter = self.reduce_scatter, ()
        return frees(*[group.reduce_input for group in groups])


class HeadParts(NamedTuple):
    """The head's unit under torchtitan's loss, and its parts, whose gradients are reduced one by one."""

    whole: ParamGroup
    norm: ParamGroup
    output: ParamGroup


class Units:
    """The division of a stage's parameters into units; the root has all that no other unit has.

    The root does not reshard after the forward pass, since it would be gathered again at once; nor does the
    head's unit as Accelerate makes it (`accelerate.utils.fsdp_utils:fsdp2_prepare_model`), nor as torchtitan
    does where it is not told to reshard all. Accelerate's is of the last norm too, but under PEFT, where that
    is not found and left to the root (`_find_final_norm`).
    """

    def __init__(self, stage: Stage, place: int) -> None:
        options, trace, again = stage.options, stage.trace, stage.plan.zero == 3
        outside = [p for p in trace.head_parameters if not _is_of_reference(p)]
        embed, head = EqualParameters(trace.embed_parameters, 1), EqualParameters(tuple(outside), 1)
        self.reference = _reference_of(stage, place, reshards=again)
        """The frozen copy beside the module, which TRL shards whole, as a root of its own."""
        self.hooked: dict[tuple[str, ...], ParamGroup | None] = {}
        """The units whose hooks a trace has, by the names of their parameters: experts and a reference.

        If the module runs again outside the pass that trains it, all are. The root is there without a name.
        """
        self.within: dict[ParamGroup | None, ParamGroup] = {}
        """The experts of a block, by its own unit."""
        self.shares = stage.is_of_torchtitan
        """Whether experts are a second group of their block's unit, as torchtitan has it, and no unit."""
        if self.reference is not None:
            self.hooked[self.reference.names] = self.reference
        blocks, inner = [], dict[EqualParameters, ParamGroup]()
        for own, n, role in stage.block_parameters:
            rest, experts = (tuple([p for p in own if p.is_of_experts == of]) for of in (False, True))
            blocks.append((EqualParameters(rest, n), role))
            if experts:
                made = ParamGroup(stage, place, "experts", [EqualParameters(experts, 1)], reshards=again)
                known = next((one for one in inner.values() if one.names == made.names), made)
                self.hooked[known.names] = inner[EqualParameters(rest, 1)] = known

        def unit(name: str, *parts: EqualParameters, reshards: bool = again) -> ParamGroup | None:
            any_parameters = any(p.parameters for p in parts)
            return ParamGroup(stage, place, name, parts, reshards=reshards) if any_parameters else None

        self.root = self.embed = self.head = self.called_head = self.head_parts = None
        self.rows: list[Row[ParamGroup | None]] = []
        if options.fsdp_units == "model":
            self.root = unit("root", embed, *[part for part, _ in blocks], head, reshards=False)
            self.rows.append(Row(None, stage.n_blocks, 1))
            return
        if options.fsdp_units == "block":
            self.root = unit("root", embed, head, reshards=False)
        else:
            keeps_head = stage.has_trainer or (self.shares and stage.plan.pp == 1)
            if stage.has_trainer and stage.plan.adapters is not None:
                *others, output = head.parameters
                self.root = unit("root", EqualParameters(tuple(others), 1), reshards=False)
                head = EqualParameters((output,), 1)
            self.embed = unit("embedding", embed)
            self.head = unit("head", head, reshards=again and not keeps_head)
            self.called_head = None if gathers_head(stage.plan) else self.head
            self.head_parts = _parts_of_head(stage, place, self.head, head.parameters)
        self._add_rows(blocks, inner, options.fsdp_blocks, unit)
        if runs_again(stage.plan):
            self.hooked |= {row.group.names: row.group for row in self.rows if row.group is not None}
            ends = {tuple([p.name for p in embed.parameters]): self.embed, (): self.root}
            self.hooked |= ends | {tuple([p.name for p in outside]): self.called_head}

    def _add_rows(
        self,
        blocks: Iterable[tuple[EqualParameters, Role]],
        inner: Mapping[EqualParameters, ParamGroup],
        n_blocks: int,
        unit: Callable[..., ParamGroup | None],
    ) -> None:
        """Add rows of equal units of `n_blocks` blocks, made by `unit`; `inner`: the experts of blocks."""
        made: dict[tuple[EqualParameters, ...], ParamGroup | None] = {}
        for role, run in groupby(blocks, key=lambda block: block[1]):
            in_a_row = [part for part, _ in run]
            if role in ("between", "idle"):
                self.rows.append(Row(None, sum([part.n for part in in_a_row]), 1))
                continue
            for shared, times in _rows_of(in_a_row, n_blocks if role == "block" else 1):
                size = sum([part.n for part in shared])
                if shared not in made:
                    made[shared] = unit("block" if size == 1 else f"{size} blocks", *shared)
                for part in shared:
                    if part in inner:
                        self.within[made[shared]] = inner[part]
                        if (unit_ := made[shared]) is not None:
                            unit_.is_last = not self.shares
                self.rows.append(Row(made[shared], size, times))

    @property
    def roots(self) -> tuple[tuple[str, ...], ...]:
        """How a trace's hooks name roots: the module's is named by nothing, a reference by its parameters."""
        return ((),) if self.reference is None else ((), self.reference.names)

    def groups(self, group: ParamGroup | None) -> tuple[ParamGroup, ...]:
        """The groups of a unit in the order in which they are gathered: that of the experts is the second.

        Source: `torch.distributed.fsdp._fully_shard._fsdp_init:_init_param_group`.
        """
        found = (group, self.within.get(group) if self.shares else None)
        return tuple([one for one in found if one is not None])

    @property
    def prefetches(self) -> bool:
        """Whether units are gathered ahead as torchtitan says, one unit, in forward passes too.

        Source: torchtitan/distributed/fsdp.py (`apply_fsdp_to_decoder`).
        """
        return self.shares and bool(self.within)

    def by_unit(self) -> Iterator[tuple[tuple[ParamGroup, ...], int]]:
        """The groups of each different unit in module order, and how often it occurs."""
        second = set(self.within.values()) if self.shares else ()
        return ((self.groups(group), times) for group, times in self if group not in second)

    def __iter__(self) -> Iterator[tuple[ParamGroup, int]]:
        """Each different unit in module order, and how often it occurs."""
        groups: list[tuple[ParamGroup | None, int]] = []
        for row in self.rows:
            groups += [(row.group, row.times), (self.within.get(row.group), row.times)]
        named = (self.root, 1), (self.embed, 1), *groups, (self.head, 1)
        return ((unit, times) for unit, times in named if unit is not None)

    @property
    def reduced(self) -> Iterator[tuple[ParamGroup, int]]:
        """Each different group whose gradients are reduced together, and how often it occurs."""
        for group, times in self:
            if self.head_parts is not None and group is self.head:
                yield from ((self.head_parts.norm, 1), (self.head_parts.output, 1))
            else:
                yield group, times


def _parts_of_head(
    stage: Stage, place: int, head: ParamGroup | None, parameters: Sequence[Parameter]
) -> HeadParts | None:
    """The parts of a head's unit under torchtitan's loss; None under any other."""
    if head is None or not stage.op_context.chunks_head:
        return None
    *norm, output = parameters

    def part(name: str, *own: Parameter) -> ParamGroup:
        return ParamGroup(stage, place, name, [EqualParameters(own, 1)], reshards=True)

    return HeadParts(head, part("last norm", *norm), part("output layer", output))


def _is_of_reference(parameter: Parameter) -> bool:
    return parameter.name.startswith(f"{REFERENCE}.")


def _reference_of(stage: Stage, place: int, *, reshards: bool) -> ParamGroup | None:
    """The unit of the frozen copy beside a stage's module, if there is one; its blocks are no units.

    Source: trl.models.utils (`prepare_fsdp`), 1.16.
    """
    ends = [p for p in stage.trace.head_parameters if _is_of_reference(p)]
    n_before = len(stage.trace.embed_parameters)
    if not ends:
        return None
    first, last = (EqualParameters(tuple(own), 1) for own in (ends[:n_before], ends[n_before:]))
    own = [(names, n) for names, n, _ in stage.block_parameters if any(map(_is_of_reference, names))]
    parts = first, *[EqualParameters(*block) for block in own], last
    return ParamGroup(stage, place, REFERENCE, parts, reshards=reshards)


def _rows_of(
    blocks: Sequence[EqualParameters], size: int
) -> Iterator[tuple[tuple[EqualParameters, ...], int]]:
    """Blocks in groups of a size, the last one perhaps smaller; equal groups in a row are counted.

    >>> from memplan.shapes import FP32
    >>> blocks = [EqualParameters((Parameter(name, (1,), FP32),), n) for name, n in (("a", 5), ("b", 2))]
    >>> [([part.n for part in row], times) for row, times in _rows_of(blocks, 2)]
    [([2], 2), ([1, 1], 1), ([1], 1)]
    """
    every = [parameters for parameters, n in blocks for _ in range(n)]
    rows = [every[start : start + size] for start in range(0, len(every), size)]
    found = [tuple(EqualParameters(p, len(list(same))) for p, same in groupby(row)) for row in rows]
    return ((row, len(list(same))) for row, same in groupby(found))
