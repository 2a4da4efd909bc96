"""FSDP2: units that are gathered and reduced, and the passes around them.

Source: torch/distributed/fsdp/_fully_shard.
"""

from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from functools import cached_property
from typing import NamedTuple

from memplan.engines.torch.passes import Passes, backward_order, from_outside
from memplan.engines.torch.sharding import padded_shard_elements, partial_sum, shard_elements
from memplan.engines.torch.stage import Stage
from memplan.engines.trace import Segment, buffer_in, gradients
from memplan.plan import SPLITTING_SCHEDULES
from memplan.record import (
    Alloc,
    Collective,
    Event,
    Free,
    Overlap,
    Stretch,
    allocs,
    chain,
    events,
    frees,
    repeated,
)
from memplan.shapes import BF16, FP32, Buffer, DType, Parameter, buffer_of
from memplan.tape import RANDOM_STATE

Turn = tuple[tuple[Event, ...], int]
"""Events, and how often they happen."""


class Part(NamedTuple):
    """Equal parts of a unit, its blocks say: the parameters of one, and how many there are."""

    parameters: Sequence[Parameter]
    n: int


class Unit:
    """One FSDP2 unit: parameters gathered and reduced together.

    `dp` ranks each hold padded shards, so that the flat buffers are dp times the largest shard. A unit that
    `reshards` frees its weights after its forward pass and gathers them again for its backward pass.
    """

    def __init__(
        self, stage: Stage, dp_rank: int, name: str, parts: Iterable[Part], *, reshards: bool
    ) -> None:
        n, compute = stage.plan.dp, stage.op_context.weight_dtype
        self.stage = stage
        self.dp_rank = dp_rank
        self._shards: dict[Parameter, int] = {}
        self.parts = [part for part in parts if part.parameters and part.n]
        self.reshards = reshards
        self.replicates = 1 * (stage.plan.dp_replicate > 1)
        self.dtype = FP32 if stage.plan.mixed else stage.weight_dtype
        shards = sum([part.n * sum(map(self.shard, part.parameters)) for part in self.parts])
        self.flat = buffer_of(f"{name} (all-gather output)", (n * shards,), compute)
        self.scratch = buffer_of(f"{name} (gloo scratch)", (n * shards,), compute)
        self.inputs, self.uploads = self._inputs(name, shards)
        self.unsharded = [
            ([buffer_of(f"{p.name} (unsharded)", (n * self.shard(p),), compute) for p in parameters], times)
            for parameters, times in self.parts
        ]
        self.reduce_input = buffer_of(f"{name} (reduce-scatter input)", (n * shards,), self.dtype)
        self.reduce_scratch = buffer_of(f"{name} (gloo scratch)", (n * shards,), self.dtype)
        self.reduced = buffer_of(f"{name}.grad (sharded)", (shards,), self.dtype, "grads")
        self.passing = buffer_of(f"{name}.grad (sharded, on its way)", (shards,), self.dtype)

    def shard(self, parameter: Parameter) -> int:
        """Elements of every rank's padded shard of a parameter."""
        if parameter not in self._shards:
            self._shards[parameter] = padded_shard_elements(parameter, self.stage.plan.dp)
        return self._shards[parameter]

    def _inputs(self, name: str, shards: int) -> tuple[list[tuple[list[Buffer], int]], dict[Buffer, Buffer]]:
        """What an all-gather reads beside the shards at rest, and what each offloaded one is cast from."""
        stored, compute = self.stage.weight_dtype, self.stage.op_context.weight_dtype
        if not self.stage.offloads:
            cast = buffer_of(f"{name} (own shards as {compute.name})", (shards,), compute)
            return ([([cast], 1)] if compute != stored else []), {}
        found: list[tuple[list[Buffer], int]] = []
        uploads: dict[Buffer, Buffer] = {}
        for parameters, times in self.parts:
            found.append(([], times))
            for p in parameters:
                shard = buffer_of(f"{p.name} (own shard as {compute.name})", (self.shard(p),), compute)
                found[-1][0].append(shard)
                if compute != stored:
                    uploads[shard] = buffer_of(f"{p.name} (own shard)", (self.shard(p),), stored)
        return found, uploads

    def gather(self) -> Iterator[Turn]:
        """All-gather into one flat buffer, from shards in the compute type on the device.

        Source: torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py (`_get_param_all_gather_inputs`),
        _fsdp_param.py (`all_gather_inputs`).
        """
        for inputs, times in self.inputs:
            yield tuple(event for buffer in inputs for event in self._filled(buffer)), times
        gathered = Collective(
            kind="all_gather",
            axis="dp",
            what="gather weights",
            payload_bytes=self.flat.n_bytes,
            overlap="compute",
        )
        yield (*allocs(self.flat), gathered), 1
        if self.stage.op_context.gathers_in_copies:
            yield (*allocs(self.scratch), *frees(self.scratch)) * 2, 1
        for inputs, times in self.inputs:
            yield frees(*inputs), times

    @cached_property
    def gathered(self) -> dict[Buffer, Buffer]:
        """All that an all-gather allocates, and its copy for all-gathers that a schedule asks for."""
        found = [
            self.flat,
            *(buffer for inputs, _ in self.inputs for buffer in inputs),
            *self.uploads.values(),
        ]
        return {buffer: copy(buffer) for buffer in found}

    def ahead(self, turns: Iterable[Turn]) -> Iterator[Turn]:
        """The same, of an all-gather that a schedule asks for: it is allocated on the default stream."""
        for found, times in turns:
            yield tuple(map(self._ahead, found)), times

    def _ahead(self, event: Event) -> Event:
        if isinstance(event, Alloc | Free) and event.buffer in self.gathered:
            return type(event)(self.gathered[event.buffer])
        return event

    def _filled(self, shard: Buffer) -> tuple[Event, ...]:
        """An input of the all-gather is made, by way of a copy in the stored type if one is uploaded."""
        if not self.stage.offloads:
            return allocs(shard)
        uploaded = self.uploads.get(shard, shard)
        copied = Collective(
            kind="copy",
            axis="host",
            what="weights to the GPU",
            payload_bytes=uploaded.n_bytes,
            overlap="compute",
        )
        if uploaded is shard:
            return (*allocs(shard), copied)
        return (*allocs(uploaded), copied, *allocs(shard), *frees(uploaded))

    def copy_out(self, stale: "Unit | None") -> Iterator[Turn]:
        """Copy the flat buffer into the parameters; the flat buffer gathered before it is dropped then."""
        for buffers, times in self.unsharded:
            yield allocs(*buffers), times
        yield frees(stale.flat) if stale is not None else (), 1

    def reshard(self) -> Iterator[Turn]:
        """Free the unsharded parameters."""
        for buffers, times in self.unsharded:
            yield frees(*buffers), times

    def close(self, grads: dict[Parameter, Buffer], stale: "Unit | None", *, first: bool) -> Iterator[Turn]:
        """The end of the unit's backward pass: gradients made like their weights, weights freed, all reduced.

        Beside tensor parallelism a gradient that is whole is cut, and a partial one summed.

        Source: torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py (`post_backward`), _fsdp_param.py
        (`_get_grad_inner_tensor`).
        """
        own = dict(grads)
        for parameters, times in self.parts:
            found: list[Event] = []
            for p in parameters:
                if p.summed_over_tp or p.grad_shape != p.shape:
                    own[p] = buffer_of(f"{p.name}.grad (own part)", p.shape, grads[p].dtype)
                    summed = [partial_sum(own[p].n_bytes)] if p.summed_over_tp else []
                    found += [*allocs(own[p]), *summed, *frees(grads[p])]
            yield tuple(found), times
        yield from self.reshard()
        yield from self.reduce(own, stale, first=first)

    def reduce(self, grads: dict[Parameter, Buffer], stale: "Unit | None", *, first: bool) -> Iterator[Turn]:
        """Reduce-scatter the unsharded gradients; the input of the one before is dropped first.

        The last gradient is held until the end by the loop that collected them. Gradients whose rows do not
        divide evenly are copied into padded ones, all at once, unless the kernel pads (`_pads_in_kernel`);
        where gradients are widened on the way in, CPU copies each of them once more, with its padding. What
        is reduced becomes the gradient or goes to it (`passes_on`).

        Source: torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py (`foreach_reduce`),
        aten/src/ATen/native/TensorShape.cpp (`_chunk_cat`).
        """
        own = [([grads[p] for p in parameters], times) for parameters, times in self.parts]
        padded = [(list(self._padded(grads, parameters)), times) for parameters, times in self.parts]
        (*_, last), times = own[-1]
        output = self.passing if self.passes_on(first=first) else self.reduced
        yield (*(frees(stale.reduce_input) if stale is not None else ()), *allocs(self.reduce_input)), 1
        for buffers, n in padded:
            yield allocs(*buffers), n
        if self.stage.device.casts_in_copies and self.dtype != last.dtype:
            for parameters, n in self.parts:
                copies = [self._chunks(p, grads[p].dtype) for p in parameters]
                yield tuple(e for copied in copies for e in (*allocs(copied), *frees(copied))), n
        for buffers, n in padded:
            yield frees(*buffers), n
        for buffers, n in own[:-1]:
            yield frees(*buffers), n
        yield frees(*own[-1][0]), times - 1
        yield (*frees(*own[-1][0][:-1]), *allocs(output), self._reduce_scatter), 1
        if self.stage.backend == "gloo":
            yield (*allocs(self.reduce_scratch), *frees(self.reduce_scratch)), 1
        yield frees(last), 1
        yield (self._all_reduce,), self.replicates
        if self.stage.offloads:
            yield from self._downloads(first=first)
        if output is self.passing:
            yield frees(output), 1 - self.replicates

    @cached_property
    def _reduce_scatter(self) -> Collective:
        return Collective(
            kind="reduce_scatter",
            axis="dp",
            what="reduce gradients",
            payload_bytes=self.reduce_input.n_bytes,
            overlap="backward",
        )

    @cached_property
    def _all_reduce(self) -> Collective:
        """Between replicas (HSDP)."""
        return Collective(
            kind="all_reduce",
            axis="dp_replicate",
            what="all-reduce gradients",
            payload_bytes=self.reduced.n_bytes,
            overlap="backward",
        )

    def _downloads(self, *, first: bool) -> Iterator[Turn]:
        """Own gradients to the host: beside the computation unless they are to be added to older ones."""
        fresh = first and self.stage.plan.set_to_none
        what = "gradients to the host" if fresh else "gradients to be added"
        overlap: Overlap = "compute" if fresh else "nothing"
        plan = self.stage.plan
        for parameters, times in self.parts:
            for p in parameters:
                n_bytes = shard_elements(p, plan.dp, self.dp_rank) * self.dtype.itemsize
                copied = Collective(
                    kind="copy", axis="host", what=what, payload_bytes=n_bytes, overlap=overlap
                )
                yield (copied,), times

    def passes_on(self, *, first: bool) -> bool:
        """Whether reduced gradients are added to older ones, or copied to the host, and then freed."""
        return not (first and self.stage.plan.set_to_none) or self.stage.offloads

    def finalize(self, *, first: bool) -> Iterator[Turn]:
        """The end of the backward pass: what an all-reduce between replicas has been given is dropped.

        Source: torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py (`AllReduceState`).
        """
        if self.passes_on(first=first):
            yield frees(self.passing), self.replicates

    def _pads_in_kernel(self, dtype: DType) -> bool:
        """Whether gradients of a type are padded as they are copied, as CUDA's kernel does.

        There is one for what is reduced as it is, and one for bfloat16 that is widened.

        Source: aten/src/ATen/native/cuda/TensorShape.cu (`_chunk_cat_out_cuda`).
        """
        device = self.stage.device
        return not device.runs_kernels or (not device.on_cpu and dtype in (self.dtype, BF16))

    def _padded(self, grads: dict[Parameter, Buffer], parameters: Sequence[Parameter]) -> Iterator[Buffer]:
        for p in parameters:
            if self._pads_in_kernel(grads[p].dtype):
                continue
            padded_elements = self.stage.plan.dp * self.shard(p)
            if padded_elements != p.n_elements:
                yield buffer_of(f"{p.name}.grad (padded)", (padded_elements,), grads[p].dtype)

    def _chunks(self, parameter: Parameter, dtype: DType) -> Buffer:
        """A copy of a gradient with the padding that its shards have."""
        return buffer_of(
            f"{parameter.name}.grad (in chunks)", (self.stage.plan.dp * self.shard(parameter),), dtype
        )

    def sum(
        self, grads: dict[Parameter, Buffer], wide: dict[Parameter, Buffer], *, first: bool
    ) -> Iterator[Turn]:
        """Each gradient is copied into its float32 sum the first time, added to it after, and freed.

        CPU adds a narrower tensor by way of a widened copy.

        Source: torch/distributed/fsdp/_fully_shard/_fsdp_param.py (`to_accumulated_grad_if_needed`),
        aten/src/ATen/TensorIterator.cpp (`compute_types`).
        """
        for parameters, times in self.parts:
            found: list[Event] = []
            for p in parameters:
                copied = (*allocs(wide[p]), *frees(wide[p])) if self.stage.device.casts_in_copies else ()
                found += [*(allocs(wide[p]) if first else copied), *frees(grads[p])]
            yield tuple(found), times


class Group(NamedTuple):
    """Blocks in a row that share a unit (None: the root): how many do, and how many such rows there are."""

    unit: Unit | None
    size: int
    times: int


class Units:
    """How a stage's parameters are divided into units; what no unit takes is the root's.

    The root's weights stay whole after the forward pass, as they would be gathered at once again.
    """

    def __init__(self, stage: Stage, dp_rank: int) -> None:
        plan, trace = stage.plan, stage.trace
        embed, head = Part(trace.embed_parameters, 1), Part(trace.head_parameters, 1)
        blocks, again = Part(trace.block_parameters, stage.n_blocks), plan.zero == 3

        def unit(name: str, *parts: Part, reshards: bool = again) -> Unit | None:
            any_parameters = any(p.parameters for p in parts)
            return Unit(stage, dp_rank, name, parts, reshards=reshards) if any_parameters else None

        self.root = self.embed = self.head = None
        self.groups: list[Group] = []
        if plan.fsdp_units == "model":
            self.root = unit("root", embed, blocks, head, reshards=False)
            self.groups.append(Group(None, stage.n_blocks, 1))
            return
        if plan.fsdp_units == "block":
            self.root = unit("root", embed, head, reshards=False)
        else:
            self.embed, self.head = unit("embedding", embed), unit("head", head)
        whole, left = divmod(stage.n_blocks, plan.fsdp_blocks)
        for size, times in ((plan.fsdp_blocks, whole), (left, 1)):
            if size and times:
                name = "block" if size == 1 else f"{size} blocks"
                self.groups.append(Group(unit(name, Part(trace.block_parameters, size)), size, times))

    def __iter__(self) -> Iterator[tuple[Unit, int]]:
        """Every unit in the module's order, and how often there is one."""
        groups = [(group.unit, group.times) for group in self.groups]
        named = (self.root, 1), (self.embed, 1), *groups, (self.head, 1)
        return ((unit, times) for unit, times in named if unit is not None)

    def finalize(self, *, first: bool) -> Iterator[Turn]:
        """The end of the backward pass of every unit."""
        for unit, times in self:
            for found, n in unit.finalize(first=first):
                yield found, n * times


class ShardedPasses(Passes):
    """Forward and backward of one micro-batch under FSDP2.

    Without a pipeline, every backward pass frees each unit's weights and reduces its gradients. Under a
    pipeline schedule gradients are summed unsharded and the weights stay whole until the schedule's end.
    """

    def __init__(self, stage: Stage, dp_rank: int) -> None:
        super().__init__(stage)
        self.first_differs = True
        self.units = Units(stage, dp_rank)
        self.pipelined = stage.plan.pp > 1
        trace = stage.trace
        self.grads = gradients(trace.head_backward, trace.blocks[0].backward, trace.embed_backward)
        self.wide = {
            parameter: buffer_of(f"{grad.name} (float32 sum)", grad.shape, FP32)
            for parameter, grad in self.grads.items()
        }

    @property
    def accumulates_in_fp32(self) -> bool:
        """Whether the micro-batches of a schedule are added up in a wider type than they come in."""
        return self.pipelined and self.stage.op_context.weight_dtype != self.stage.weight_dtype

    @property
    def defers(self) -> bool:
        """Whether sums of recomputed blocks can be late: where backward passes are split.

        A second part runs the blocks again and stops early, so that their units still seem to be in a
        forward pass. The next one then registers no `RegisterPostBackwardFunction` for them, and what that
        would do in its backward pass is done when this is over, after the root, in the module's order. Not so
        a unit of several blocks: it seems to have run the first of them, and begins anew with the second.

        Source: torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py (`pre_forward`:
        `entering_forward_pass`), _fsdp_state.py (`_root_post_backward_final_callback`).
        """
        split = self.stage.plan.schedule in SPLITTING_SCHEDULES and not self.stage.first
        return self.accumulates_in_fp32 and split and self.n_recomputed > 0

    @property
    def n_recomputed(self) -> int:
        """How many of the stage's blocks are run again: the first ones."""
        return sum([n for recompute, n in self.stage.kinds if recompute != "none"])

    def _rows(
        self, order: Iterable[tuple[Segment, int]], *, late: bool
    ) -> Iterator[tuple[Unit | None, list[tuple[Segment, int]], int, bool]]:
        """The blocks' backward passes in rows of a unit each, and whether that is closed in its turn."""
        ahead = self.stage.n_blocks
        for unit, row, times in grouped(order, reversed(self.units.groups)):
            size = sum([n for _, n in row])
            ahead = ahead - times * size
            yield unit, row, times, not late or size > 1 or ahead >= self.n_recomputed

    def _late(self, *, first: bool) -> Iterator[Turn]:
        """The sums of the recomputed blocks' units, after all others."""
        left = self.n_recomputed
        for unit, size, times in self.units.groups:
            if unit is not None and size == 1 and left > 0:
                yield from repeatedly(unit.sum(self.grads, self.wide, first=first), min(times, left))
            left -= size * times

    def _forward(self, first: bool, unsharded: bool, release: Stretch | None) -> Stretch:
        """The forward pass: units are gathered unless `unsharded`, those that stay whole once in a step."""
        trace, units = self.trace, self.units
        everything = first or not self.pipelined
        flat: Unit | None = None

        def opened(unit: Unit | None) -> Iterator[Turn]:
            nonlocal flat
            if unit is not None and (everything or (unit.reshards and not unsharded)):
                yield from unit.gather()
                yield from unit.copy_out(flat)
                flat = unit

        def within(name: str, unit: Unit | None, *segments: tuple[Segment, int]) -> Stretch:
            closed = unit.reshard() if unit is not None and unit.reshards else ()
            passed = [(segment.events, n) for segment, n in segments]
            return in_turn(name, (*called([*opened(unit)], passed), *closed))

        parts = [in_turn("forward: embedding", opened(units.root))]
        parts.append(within("forward: embedding", units.embed, (trace.embed, 1)))
        for unit, segments, times in grouped(self.stage.forward_order, units.groups):
            parts.append(repeated(within("forward: block", unit, *segments), times))
        if self.stage.last:
            parts.append(within("forward: head", units.head, (trace.head, 1)))
        parts.append(events("forward: end", frees(flat.flat) if flat is not None else ()))
        if release is not None:
            parts.append(release)
        if self.stage.last:
            parts.append(events("loss", trace.loss.events))
        return chain("forward", *parts)

    def _backward(self, first: bool, last: bool, unsharded: bool, pending: bool, late: bool) -> Stretch:
        """The backward pass: units are gathered one ahead if they were freed, and not `unsharded`."""
        trace, units = self.trace, self.units
        ahead: Unit | None = None
        reducing: Unit | None = None

        def gathered(unit: Unit | None) -> Iterator[Turn]:
            nonlocal ahead
            if unit is not None and unit.reshards and not unsharded and ahead is not unit:
                ahead = unit
                yield from unit.gather()

        def opened(unit: Unit | None, following: Unit | None) -> Iterator[Turn]:
            nonlocal ahead
            yield from gathered(unit)
            if unit is not None and ahead is unit:
                ahead = None
                yield from unit.copy_out(unit)
            if unit is not None:
                yield from gathered(following)

        def closed(unit: Unit | None) -> Iterator[Turn]:
            nonlocal reducing
            if unit is None:
                return
            if not self.pipelined:
                yield from unit.close(self.grads, reducing, first=first)
                reducing = unit
            elif self.accumulates_in_fp32:
                yield from unit.sum(self.grads, self.wide, first=first)

        rows = list(self._rows(backward_order(self.stage.blocks), late=late))
        order = [*[unit for unit, *_ in rows], units.embed]
        head, n_loss = self.kept(trace.head_backward, first, pending), trace.n_loss_backward
        parts = [events("backward: loss", head[:n_loss])]
        turns = [*gathered(units.head or order[0])] if units.root is not None else []
        turns += [*opened(units.head, order[0]), (head[n_loss:], 1), *closed(units.head)]
        parts.append(in_turn("backward: head", turns))
        outer = not self.stage.last
        for (unit, segments, times, closes), following in zip(rows, order[1:], strict=True):
            turns = [*opened(unit, following)]
            for segment, n in segments:
                body = self.kept(segment, first, pending)
                turns.append((from_outside(body) if outer else body, n))
                outer = False
            turns += closed(unit) if closes else ()
            parts.append(repeated(in_turn("backward: block", turns), times))
        turns = [*opened(units.embed, None), (self.kept(trace.embed_backward, first, pending), 1)]
        turns += [*closed(units.root), *(self._late(first=first) if late else ()), *closed(units.embed)]
        if reducing is not None:
            turns += [*units.finalize(first=first), (frees(reducing.reduce_input), 1)]
        parts.append(in_turn("backward: embedding", turns))
        return chain("backward", *parts, *self.returned())

    def kept(self, segment: Segment, first: bool, pending: bool) -> tuple[Event, ...]:
        """A backward segment's events: unsharded gradients are added to older ones under a schedule only.

        Where gradients are summed in a wider type than they come in, that happens after each unit's backward;
        so there they are added to those only that are `pending`.
        """
        return self.added(segment, not pending if self.accumulates_in_fp32 else first or not self.pipelined)

    def _backward_input(self, first: bool, pending: bool, late: bool) -> Stretch:
        """The first part: after each unit its pending gradients are added to their sum."""
        split, units = self.stage.split, self.units

        def closed(unit: Unit | None) -> Iterator[Turn]:
            if pending and unit is not None:
                yield from unit.sum(self.grads, self.wide, first=first)

        head = ((split.head.events, 1), *closed(units.head))
        parts = [events("backward: loss", split.loss.events), in_turn("backward: input of the head", head)]
        for unit, segments, times, closes in self._rows(split.blocks, late=late):
            turns = [(segment.events, n) for segment, n in segments]
            turns += closed(unit) if closes else ()
            parts.append(repeated(in_turn("backward: inputs of the blocks", turns), times))
        end = [(segment.events, n) for segment, n in split.end]
        sums = self._late(first=first) if pending and late else ()
        parts.append(in_turn("backward: end", (*closed(units.root), *sums, *end)))
        return chain("backward", *parts)

    def reduced(self, *, summed: bool = True, pending: bool = False) -> list[Stretch]:
        """The schedule's end: every unit in turn is freed and reduced."""
        grads, name = self.wide if self.accumulates_in_fp32 and summed else self.grads, "gradient reduction"
        parts: list[Stretch] = []
        stale: Unit | None = None
        for unit, times in self.units:
            added = list(unit.sum(self.grads, self.wide, first=False)) if summed and pending else []
            for n in (1, times - 1):
                turns = (*added, *unit.close(grads, stale, first=True))
                parts.append(repeated(in_turn(name, turns), n))
                stale = unit
        if stale is not None:
            turns = (*self.units.finalize(first=True), (frees(stale.reduce_input), 1))
            parts.append(in_turn(name, turns))
        return parts

    def unshard(self) -> Stretch:
        """All units are gathered at once, ahead of the stage's first pass."""
        turns = (turn for unit, n in self.units for turn in repeatedly(unit.ahead(unit.gather()), n))
        return in_turn("gathering of a stage's weights", turns)

    def reshard(self, *, freed_after_forward: bool) -> Stretch:
        """All weights are freed that are whole."""
        whole = [(unit, n) for unit, n in self.units if not (unit.reshards and freed_after_forward)]
        turns = (turn for unit, times in whole for turn in repeatedly(unit.reshard(), times))
        return in_turn("freeing of a stage's weights", turns)

    def wait_for_unshard(self) -> Stretch:
        """The first pass of the stage copies what was gathered into the weights, unit by unit."""
        turns = (turn for unit, n in self.units for turn in repeatedly(unit.ahead(unit.copy_out(unit)), n))
        return in_turn("gathering of a stage's weights", turns)


def called(opened: Sequence[Turn], passed: Sequence[Turn]) -> tuple[Turn, ...]:
    """A unit opens when its first module is called: after what checkpointing keeps before that."""
    first, n = passed[0] if passed else ((), 0)
    starts_with = buffer_in(first[0]) if first else None
    if not (opened and starts_with is not None and starts_with.name.endswith(RANDOM_STATE)):
        return (*opened, *passed)
    return ((first[:1], 1), *opened, (first[1:], 1), (first, n - 1), *passed[1:])


def repeatedly(turns: Iterable[Turn], times: int) -> Iterator[Turn]:
    """Turns so many times over, each as often as that at once."""
    return ((found, n * times) for found, n in turns)


def grouped(
    order: Iterable[tuple[Segment, int]], groups: Iterable[Group]
) -> Iterator[tuple[Unit | None, list[tuple[Segment, int]], int]]:
    """The blocks' passes in order, divided into rows: each row's unit and passes, and how often it comes.

    The first row of a unit stands alone: it follows another unit than those after it. Rows of one block come
    as the passes do, which put the first block on its own.
    """
    left = [(segment, n) for segment, n in order if n]
    all_groups = list(groups)
    match all_groups:
        case [Group(unit=unit, size=int(size))] if size == 1:
            yield from ((unit, [(segment, 1)], n) for segment, n in left)
            return
    for unit, size, times in all_groups:
        first = True
        while times:
            row: list[tuple[Segment, int]] = []
            n_rows = 1 if first else max(1, min(times, left[0][1] // size))
            needed = n_rows * size
            while needed:
                segment, n = left.pop(0)
                taken = min(n, needed)
                row.append((segment, taken // n_rows))
                needed -= taken
                if taken < n:
                    left.insert(0, (segment, n - taken))
            yield unit, row, n_rows
            times, first = times - n_rows, False


def in_turn(name: str, turns: Iterable[Turn]) -> Stretch:
    """Turns one after the other as one stretch."""
    parts: list[Stretch] = []
    pending: list[Event] = []
    for found, times in turns:
        if times == 1:
            pending += found
        elif found and times:
            parts += [events(name, pending), repeated(events(name, found), times)]
            pending = []
    last = events(name, pending)
    return chain(name, *parts, last) if parts else last
