"""FSDP2: a stage's module whose weights and gradients are sharded, and its passes.

Source: `torch.distributed.fsdp._fully_shard._fully_shard:fully_shard`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Final, Literal, NamedTuple, Self, final

from memplan.engines.torch.float8 import precomputed_scales
from memplan.engines.torch.param_group import CommContext, ParamGroup, Units
from memplan.engines.torch.stage import Stage
from memplan.engines.torch.units import (
    ALL_GATHER,
    REDUCE_SCATTER,
    CountedEvents,
    grouped,
    in_order,
    next_units,
    opened_when_called,
    repeatedly,
)
from memplan.errors import PlanRefused
from memplan.memory import Alive
from memplan.parts.ddp import ALL_REDUCE
from memplan.parts.module import (
    StageModule,
    before_blocks,
)
from memplan.passes.backward import added_to_older, backward_order, from_outside
from memplan.passes.trace import Segment
from memplan.placements import Replicate
from memplan.record import (
    COMPUTE,
    AccumulateGrad,
    Alloc,
    Event,
    Free,
    RecordEvent,
    Stretch,
    UnitHook,
    WaitStream,
    chain,
    events,
    frees,
    repeated,
)
from memplan.shapes import Buffer, Parameter, buffer_of

COPY_OUT: Final = "copy-out"
"""The event of the last copy of gathered weights."""

UnitRow = tuple[ParamGroup | None, list[tuple[Segment, int]], int]
"""Equal units in a row: the unit, the passes of its blocks, and the number of such units."""

Weights = Literal["sharded", "freed after forward", "whole"]
"""A stage's weights: all sharded; unsharded only in groups that do not reshard; all unsharded."""


class FsdpState(NamedTuple):
    """The state after the passes so far; the defaults are the state before the first pass of a step.

    Attributes whose meaning their name does not tell:
        unshard_issued: all weights are being gathered ahead of the next pass.
        has_grads: there are unsharded gradients in the type in which autograd made them.
        has_sums: there are unsharded gradients in the type in which micro-batches are summed.
        syncs: backward passes reduce.
        has_sharded_grads: there are reduced gradients, of an earlier pass or zeroed.
        recomputed_last: the blocks were last run to be recomputed (`FSDPModule.defers`).
        reducing: the group whose gradients the loss has reduced, and whose reduction still holds its input.
        gathered: the group of experts that was last gathered to be recomputed, whose flat buffer is held.
        deferring: for each micro-batch in flight, `recomputed_last` before its forward pass.
    """

    has_sharded_grads: bool
    weights: Weights = "sharded"
    unshard_issued: bool = False
    has_grads: bool = False
    has_sums: bool = False
    syncs: bool = True
    recomputed_last: bool = False
    deferring: tuple[bool, ...] = ()
    gathered: ParamGroup | None = None
    reducing: ParamGroup | None = None


@final
class FSDPModule(StageModule[FsdpState]):
    """A module under FSDP2.

    Without a pipeline, every backward pass frees each group's weights and reduces its gradients; under
    `no_sync` those before the last one sum them unsharded. Under a schedule each pass does so, and leaves
    weights gathered; `reduce_grads` ends both.

    Plays `torch.distributed.fsdp._fully_shard._fully_shard:FSDPModule`.
    """

    def __init__(self, stage: Stage, place: int) -> None:
        self.units = Units(stage, place)
        zeroed, last = not stage.options.set_to_none, gathered_last(stage, self.units)
        self.pipelined = stage.plan.pp > 1
        self.sums = self.pipelined or stage.options.no_sync
        initial = FsdpState(has_sharded_grads=zeroed, syncs=not self.sums, gathered=last)
        super().__init__(stage, initial)
        self.is_backward = self.makes_states = False
        self.grads = stage.trace.gradients()
        summed = stage.plan.formats.reduce
        self.wide = {
            parameter: grad
            if grad.dtype == summed
            else buffer_of(f"{grad.name} ({summed.name} sum)", grad.shape, summed, grad.kind)
            for parameter, grad in self.grads.items()
        }
        if stage.autograd_casts_grads and not self.pipelined:
            self.grads |= {p: self.wide[p] for p in self.grads if self._is_cast_at_once(p)}

    @property
    def sums_in_reduce_dtype(self) -> bool:
        """Whether gradients are summed unsharded in another type than autograd makes them in."""
        return self.sums and self.stage.reduces_in_other_dtype

    @property
    def defers(self) -> bool:
        """Whether gradients of recomputed blocks may be summed late: where backward passes are split.

        A second part recomputes the blocks and stops early, so their groups remain in the forward state. The
        next forward pass then registers no `RegisterPostBackwardFunction` for them; its work is done at the
        end of that micro-batch's backward pass, after the root, in the module's order. A group of several
        blocks is not affected (its second block starts it anew), and neither is torch from 2.15 on, where
        autograd sums.

        Source: `torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState._pre_forward`,
        `torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState._root_post_backward_final_callback`.
        """
        split = self.stage.plan.splits_backward and not self.stage.first
        summed = self.sums_in_reduce_dtype and not self.stage.autograd_casts_grads
        return split and summed and self.n_recomputed > 0

    @property
    def n_recomputed(self) -> int:
        """How many of the stage's blocks, the first ones, are recomputed."""
        return sum([n for kind, n in self.stage.runs if kind.recompute != "none"])

    def sharded_grads(self) -> Iterable[tuple[Buffer, int]]:
        return [(group.reduced, times) for group, times in self.units.reduced if group.trained]

    def in_first_step(self) -> Self:
        other = self.fresh()
        if self.stage.options.optimizer_in_backward:
            other.makes_states, other._played = True, {}
        return other

    @property
    def between_steps(self) -> Alive:
        """What was gathered last in a step's backward pass and is held until the next forward pass."""
        held, found = self.initial.gathered, Counter[Buffer]()
        for group, times in self.units:
            for scales, n in group.scales:
                found.update(dict.fromkeys(scales, times * n))
        if self.stage.options.float8_all_gather == "precomputed":
            found[precomputed_scales(self.stage.counted_parts)] += 1
        return found if held is None else found + Counter([held.flat])

    def require_gradient_sync(self) -> None:
        """What `FSDPModule.set_requires_gradient_sync` tells the last micro-batch of a loop."""
        self.state = self.state._replace(syncs=not self.pipelined)

    def _begin_pass(self) -> None:
        self.comms = CommContext(
            has_sharded_grads=self.state.has_sharded_grads, makes_states=self.makes_states
        )
        self.comms.all_gather = self.state.gathered
        self.comms.reduce_scatter = () if self.state.reducing is None else (self.state.reducing,)

    # --- What happens to one group ---

    def pre_forward(
        self, group: ParamGroup | None, following: ParamGroup | None = None
    ) -> Iterator[CountedEvents]:
        """Gathers a unit's weights, unless they are unsharded, and the following unit's ahead if it is asked.

        Source: `torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState._pre_forward`.
        """
        for one in self.units.groups(group):
            if not self._is_whole(one):
                yield from () if one in self.comms.prefetched else one.unshard()
                self.comms.prefetched.discard(one)
                yield from self._waited(one)
                yield from one.frees_scales()
        for one in self.units.groups(following) if self.units.prefetches else ():
            if not self._is_whole(one):
                self.comms.prefetched.add(one)
                yield from one.unshard()

    def _waited(self, group: ParamGroup) -> Iterator[CountedEvents]:
        """Copies an all-gather's output in a forward pass, and holds its flat buffer until the next copy.

        All-gathers to come wait for the copy before this one, so that two are under way at most.
        """
        yield from group.wait_for_unshard(self.comms.all_gather)
        self.comms.all_gather = None if group.alone else group
        yield (WaitStream(ALL_GATHER, COPY_OUT), RecordEvent(COPY_OUT, COMPUTE)), int(not group.alone)

    def post_forward(self, group: ParamGroup | None) -> Iterator[CountedEvents]:
        """Frees a group's unsharded weights, if it reshards.

        Source: `torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup.post_forward`.
        """
        for one in self.units.groups(group):
            if one.reshards:
                yield from one.reshard()

    def prefetch(self, group: ParamGroup | None) -> Iterator[CountedEvents]:
        """Gathers a unit that was freed after its forward pass, unless its all-gather is under way.

        Source: `torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup._backward_prefetch`.
        """
        for one in reversed(self.units.groups(group)):
            yield from self._ahead(one)

    def _ahead(self, group: ParamGroup) -> Iterator[CountedEvents]:
        freed = self.state.weights == "freed after forward"
        if group.reshards and freed and group not in self.comms.prefetched:
            self.comms.prefetched.add(group)
            yield from group.unshard()

    def _is_whole(self, group: ParamGroup) -> bool:
        """Whether a group's weights are unsharded."""
        weights = self.state.weights
        return weights == "whole" or (weights == "freed after forward" and not group.reshards)

    def pre_backward(self, group: ParamGroup | None, following: ParamGroup | None) -> Iterator[CountedEvents]:
        """Gathers a unit's weights if they were freed, and prefetches the unit that is needed next.

        Source: `torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup.pre_backward`.
        """
        for one in self.units.groups(group):
            yield from self._ahead(one)
            if one in self.comms.prefetched:
                self.comms.prefetched.discard(one)
                yield from one.wait_for_unshard(one)
                yield (WaitStream(ALL_GATHER, COMPUTE),), int(not one.alone)
        if group is not None:
            yield from self.prefetch(following)

    def _hooked(self, found: Sequence[Event], following: ParamGroup | None) -> Iterator[CountedEvents]:
        """Events with what the hooks do of units that run in them: a block's experts, a reference, or all.

        `following`: the group that is needed after the experts in the backward pass. Experts that are
        recomputed before their output's gradient exists are gathered as they are called, and stay so; the
        flat buffer is held to their end, and longer if the recomputation stops before it.

        Source: `torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup.post_forward` (`is_bw`),
        `torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState._pre_forward`,
        `torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState._post_forward` (`iter_forward_root`).
        """
        start, ready = 0, False
        for place, event in enumerate(found if self.units.hooked else ()):
            if not isinstance(event, UnitHook):
                continue
            yield tuple(found[start:place]), 1
            start, experts = place + 1, self.units.hooked[event.parameters]
            match event.kind:
                case "pre_forward" if not self.is_backward:
                    yield from self.pre_forward(experts)
                case "pre_forward" if experts is not None and not ready:
                    ready = True
                    yield from self.prefetch(experts)
                    if experts in self.comms.prefetched:
                        self.comms.prefetched.discard(experts)
                        yield from self._waited(experts)
                case "post_forward" if not self.is_backward:
                    yield from self.post_forward(experts)
                    if event.parameters in self.units.roots:
                        yield from self._root_returns()
                        self._passed_forward()
                case "post_forward" if experts is not None and self.comms.all_gather is experts:
                    self.comms.all_gather = None
                    yield frees(experts.flat), 1
                case "pre_backward":
                    yield from self.prefetch(following) if ready else self.pre_backward(experts, following)
                    ready = True
                case "post_backward":
                    yield from self.post_backward(experts)
        yield tuple(found[start:]), 1

    def _within(self, found: Iterable[Event], following: ParamGroup | None) -> ParamGroup | None:
        """The experts of a block, which its backward pass needs after its own group; else the `following`."""
        events = found if self.units.hooked else ()
        named = (event.parameters for event in events if isinstance(event, UnitHook))
        return next((self.units.hooked[names] for names in named), following)

    def post_backward(self, group: ParamGroup | None) -> Iterator[CountedEvents]:
        """Frees a unit's weights and reduces its gradients; a pass that does not sync only sums them.

        Weights that a schedule gathered stay. A first sum is made once the weights are freed. The last of a
        unit's groups comes first.

        Source: `torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup.post_backward`.
        """
        parts = self.units.head_parts
        if parts is not None and group is self.units.head:
            yield from (*parts.whole.reshard(), *parts.output.finalize_backward(self.comms))
            yield from parts.norm.reduce_grads(self.grads, self.comms)
            return
        for one in reversed(self.units.groups(group)):
            yield from self._of_group(one)

    def _of_group(self, group: ParamGroup) -> Iterator[CountedEvents]:
        yield from self._reduced(group)
        yield from group.frees_scales() if group.reshards else ()

    def _reduced(self, group: ParamGroup) -> Iterator[CountedEvents]:
        casts = self.sums_in_reduce_dtype and not self.stage.autograd_casts_grads
        added = (
            list(self._accumulated(group)) if casts and (self.state.has_sums or not self.state.syncs) else []
        )
        if self.state.syncs:
            yield from added
            yield from group.post_backward(self.wide if added else self.grads, self.comms)
        else:
            freed = [] if self.pipelined else list(group.reshard())
            yield from (*added, *freed) if self.state.has_sums else (*freed, *added)

    def _accumulated(self, group: ParamGroup) -> Iterator[CountedEvents]:
        return group.accumulate_unsharded_grads(self.grads, self.wide, has_sums=self.state.has_sums)

    # --- Passes ---

    def _forward(self, release: Stretch | None) -> Stretch:
        """The forward pass: groups that are not unsharded are gathered as their modules are called."""
        self._begin_pass()
        self.is_backward = False
        trace, units = self.trace, self.units

        def end(
            name: str,
            group: ParamGroup | None,
            segment: Segment,
            places: tuple[int, int],
            following: ParamGroup | None = None,
        ) -> Stretch:
            if group is None:
                return before_blocks(trace, "forward", segment.events) if whole else segment.stretch(name)
            cuts = pairwise((0, *places, len(segment.events)))
            before, own, after = ((segment.events[start:stop], 1) for start, stop in cuts)
            opened = self.pre_forward(group, following)
            return in_order(name, (before, *opened, own, *self.post_forward(group), after))

        whole = not trace.has_blocks
        parts = [trace.cast_inputs.stretch("forward: casts of inputs")]
        n_before = self._n_before_forward
        earlier, embed = trace.embed.events[:n_before], Segment(trace.embed.events[n_before:])
        if n_before and self._is_first_of_step:
            parts += self._passes_before(earlier, self.stage.plan.n_micro_batches)
        parts.append(in_order(f"forward: {'module' if whole else 'embedding'}", self.pre_forward(units.root)))
        rows = list(grouped(self.stage.forward_order, units.rows))
        first, (opens, closes) = rows[0][0] if rows else None, trace.ends.embed
        places = opens - n_before, closes - n_before
        parts.append(end("forward: embedding", units.embed, embed, places, first))
        for group, segments, times, following in self._with_following(rows):
            opened = [*self.pre_forward(group, following)]
            passed = list[CountedEvents]()
            for segment, n in segments:
                passed += repeatedly(self._hooked(segment.events, None), n)
            turns = (*opened_when_called(opened, passed), *self.post_forward(group))
            parts.append(repeated(in_order("forward: block", turns), times))
        if self.stage.last:
            parts.append(end("forward: head", units.called_head, trace.head, trace.ends.head))
        elif trace.end_of_forward.events:
            parts.append(trace.end_of_forward.stretch("forward: end"))
        parts.append(in_order("forward: end", self._root_returns()))
        parts += [] if release is None else [release]
        self._passed_forward()
        if self.stage.last:
            parts.append(in_order("loss", self._in_loss()))
        if units.head_parts is not None:
            self.state = self.state._replace(reducing=units.head_parts.output)
        if self.defers:
            deferring = *self.state.deferring, self.state.recomputed_last
            self.state = self.state._replace(recomputed_last=False, deferring=deferring)
        return chain("forward", *parts)

    @cached_property
    def _n_before_forward(self) -> int:
        """Events of the embedding's segment that are the trainer's other passes, and free what these made."""
        found = self.trace.embed.events if self.units.hooked else ()
        last = max([place for place, event in enumerate(found) if isinstance(event, UnitHook)], default=-1)
        alive = Counter[Buffer]()
        for place, event in enumerate(found if last >= 0 else ()):
            if isinstance(event, Alloc | Free):
                alive[event.buffer] += 1 if isinstance(event, Alloc) else -1
            if place >= last and not any(alive.values()):
                return place + 1
        return 0

    @property
    def _is_first_of_step(self) -> bool:
        """Whether no micro-batch of the step has left gradients."""
        return not (self.state.has_sharded_grads or self.state.has_grads or self.state.has_sums)

    def _passes_before(self, found: Sequence[Event], n: int) -> Iterator[Stretch]:
        """The passes that a trainer makes for all `n` micro-batches before the first one's forward pass."""
        for times in (1, n - 1):
            yield repeated(in_order("passes before the forward pass", self._hooked(found, None)), times)

    def _passed_forward(self) -> None:
        """The state after a forward pass."""
        weights: Weights = "freed after forward" if self.stage.plan.zero == 3 else "whole"
        self.state = self.state._replace(weights=weights, unshard_issued=False, gathered=None)

    def _in_loss(self) -> Iterator[CountedEvents]:
        """The loss; torchtitan's gathers the head's unit, and reduces the gradients of the output layer.

        The gradients of each chunk are added to the older ones, in the type of the reduction. After the last
        chunk they are reduced, and computation waits for the reduction.

        Source: torchtitan 0.3.0, torchtitan/components/loss.py (`ChunkedLossWrapper`),
        `torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup.post_backward`
        (`is_partial_group_backward`).
        """
        found, parts, head = self.trace.loss.events, self.units.head_parts, self.units.head
        if parts is None or head is None:
            yield from self._hooked(found, None)
            return
        start, left, casts = 0, self.stage.plan.loss_chunks, self.stage.reduces_in_other_dtype
        for place, event in enumerate(found):
            if not isinstance(event, UnitHook):
                continue
            yield found[start:place], 1
            start = place + 1
            match event.kind:
                case "pre_forward":
                    yield from head.ahead((*head.unshard(), *head.wait_for_unshard(head)))
                case "post_backward":
                    if casts and left == self.stage.plan.loss_chunks:
                        yield from self._accumulated(parts.output)
                    left -= 1
                    if not left:
                        yield from parts.output.reduce_grads(self.wide if casts else self.grads, self.comms)
                        yield (WaitStream(COMPUTE, REDUCE_SCATTER), WaitStream(COMPUTE, ALL_REDUCE)), 1
                case "post_forward":
                    yield from head.reshard()
        yield found[start:], 1

    def _root_returns(self) -> Iterator[CountedEvents]:
        """Frees the flat buffer that is held when a root's forward pass ends."""
        gathered, self.comms.all_gather = self.comms.all_gather, None
        yield frees(gathered.flat) if gathered else (), 1

    def _with_following(self, rows: Sequence[UnitRow]) -> Iterator[tuple[*UnitRow, ParamGroup | None]]:
        """Rows of units of a forward pass, each with the unit that is gathered ahead there, if any is."""
        after = [*[row[0] for row in rows[1:]], self.units.called_head][: len(rows)]
        for (group, segments, times), following in zip(rows, after, strict=True):
            n_before = times - 1 if self.units.prefetches and following is not group else 0
            if n_before:
                yield group, segments, n_before, group
            yield group, segments, times - n_before, following

    def _backward(self) -> Stretch:
        """The backward pass: freed groups are gathered, one group ahead.

        It ends at the first module with trained parameters; a group gathered ahead of that is freed at the
        end. It begins with the root's output, or with that of the head where Accelerate makes a unit of tied
        ends.
        """
        self._begin_pass()
        self.is_backward = True
        trace, units = self.trace, self.units
        late = any(self.state.deferring[:1])
        rows = list(self._rows(backward_order(self.stage.blocks), late=late))
        order = list(next_units([*[group for group, *_ in rows], units.embed]))
        rows = rows if trace.blocks_require_grad else []
        of_output = units.called_head is not None or self.stage.has_trainer
        n_before = trace.ends.head_backward if of_output else trace.n_loss_backward
        loss, head = self._added_parts(trace.head_backward, n_before)
        parts = [events("backward: loss", loss)]
        turns = [*self.prefetch(units.called_head or order[0])] if units.root is not None else []
        turns += [*self.pre_backward(units.called_head, order[0]), (head, 1)]
        turns += self.post_backward(units.called_head)
        parts.append(in_order("backward: head", turns))
        outer, skipped = not self.stage.last, list[tuple[ParamGroup | None, int]]()
        for (group, segments, times, closes), following in zip(rows, order[1:], strict=False):
            if not any(segment.events for segment, _ in segments):
                skipped += [(group, times)] if closes else []
                continue
            _check_output(group, segments)
            turns = [*self.pre_backward(group, self._within(segments[0][0].events, following))]
            for segment, n in segments:
                body = self._added(segment)
                body = from_outside(body, trace.boundary_grad) if outer else body
                turns += repeatedly(self._hooked(body, following), n)
                outer = False
            turns += self.post_backward(group) if closes else ()
            parts.append(repeated(in_order("backward: block", turns), times))
        goes_on = trace.entry_requires_grad and trace.blocks_require_grad
        before, embed = self._added_parts(trace.embed_backward, trace.ends.embed_backward)
        turns = [(before, 1), *(self.pre_backward(units.embed, None) if goes_on else ())]
        turns += [*(self._gathered_in_vain() if goes_on else ()), (embed, 1)]
        if whole := not trace.has_blocks:
            parts.append(before_blocks(trace, "backward", (*before, *embed)))
            turns = []
        turns += self.post_backward(units.root)
        turns += self._late() if late else ()
        turns += self.post_backward(units.embed) if goes_on else self._not_visited()
        for group, times in reversed(skipped):
            turns += repeatedly(self._freed(group), times)
        turns += self.finalize_backward()
        parts.append(in_order(f"backward: {'module' if whole else 'embedding'}", turns))
        self._passed_backward(made_grads=True)
        return chain("backward", *parts, *self.returned())

    def _gathered_in_vain(self) -> Iterator[CountedEvents]:
        """The all-gather of the unit that came before the embedding: the last one of a pass before.

        Its backward pass is over, so that nothing waits for it. A step's first micro-batch alone has it, as
        TRL's trainer runs these passes for all of them before the first.

        Source: `torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup._backward_prefetch`.
        """
        head = self.units.called_head
        if head is not None and self._n_before_forward and self._is_first_of_step:
            self.comms.prefetched.add(head)
            yield from head.unshard()

    def _passed_backward(self, *, made_grads: bool) -> None:
        """The state after a backward pass or its first part; `made_grads`: they are there unsharded."""
        state = self.state._replace(unshard_issued=False, deferring=self.state.deferring[1:])
        state = state._replace(gathered=self.comms.all_gather, reducing=None)
        state = state._replace(weights="whole" if self.pipelined else "sharded")
        if self.state.syncs:
            self.state = state._replace(has_sharded_grads=True, has_grads=False, has_sums=False)
        elif made_grads and self.sums_in_reduce_dtype:
            self.state = state._replace(has_grads=False, has_sums=True)
        else:
            self.state = state._replace(has_grads=made_grads)

    def _added(self, segment: Segment) -> tuple[Event, ...]:
        """A backward segment's events; gradients are added to older ones that are not summed yet."""
        if self.stage.autograd_casts_grads:
            return tuple(self._cast_by_autograd(segment.events))
        return added_to_older(segment) if self.state.has_grads else segment.events

    def _added_parts(self, segment: Segment, n_first: int) -> tuple[tuple[Event, ...], tuple[Event, ...]]:
        """A backward segment's first events and the others, as `_added`."""
        first, others = segment.events[:n_first], segment.events[n_first:]
        return self._added(Segment(first)), self._added(Segment(others))

    def _is_cast_at_once(self, parameter: Parameter) -> bool:
        """Whether autograd casts a gradient to the type of its sum as soon as it is made.

        Other gradients stay as they are until they are added to an older sum or reduced. Gradients that may
        be partial over the tensor axis are always cast.

        Source: torch 2.15's `FSDPParam.may_reduce_grad_outside_dp`.
        """
        first_of_a_sum = self.pipelined and not self.state.has_sums
        return first_of_a_sum or not self.stage.widens_grads or Replicate() in parameter.placements.values()

    def _cast_by_autograd(self, found: Iterable[Event]) -> Iterator[Event]:
        """A backward segment's events where autograd casts gradients to the type of their sum.

        A first gradient becomes the sum, later ones are added; CPU adds a narrower tensor through a widened
        copy.

        Source: torch/csrc/autograd/engine.cpp (`validate_outputs`),
        torch/csrc/autograd/functions/accumulate_grad.h (`accumulateGrad`).
        """
        for event in found:
            if not isinstance(event, AccumulateGrad):
                yield event
                continue
            grad, p = event.buffer, event.parameter
            wide = self.wide[p]
            cast = grad is not wide and self._is_cast_at_once(p)
            yield from (Alloc(wide), Free(grad), AccumulateGrad(wide, p)) if cast else (event,)
            if self.state.has_sums:
                copied = not cast and grad is not wide and self.stage.device.casts_in_copies
                yield from (Alloc(wide), Free(wide)) if copied else ()
                yield Free(wide if cast else grad)

    def _backward_input(self) -> Stretch:
        """The first part of a split backward pass; each group's gradients are added to their sum after it."""
        self._begin_pass()
        split, units = self.stage.split, self.units
        late, has_grads = any(self.state.deferring[:1]), self.state.has_grads

        def closed(group: ParamGroup | None) -> Iterator[CountedEvents]:
            if has_grads:
                yield from self.post_backward(group)

        head = ((split.head.events, 1), *closed(units.called_head))
        parts = [events("backward: loss", split.loss.events), in_order("backward: input of the head", head)]
        for group, segments, times, closes in self._rows(split.blocks, late=late):
            turns = [(segment.events, n) for segment, n in segments]
            turns += closed(group) if closes else ()
            parts.append(repeated(in_order("backward: inputs of the blocks", turns), times))
        end = [(segment.events, n) for segment, n in split.end]
        sums = self._late() if has_grads and late else ()
        parts.append(in_order("backward: end", (*closed(units.root), *sums, *end)))
        self._passed_backward(made_grads=has_grads)
        return chain("backward", *parts)

    def _weights(self, segment: Segment) -> Stretch:
        if not self.stage.autograd_casts_grads:
            return super()._weights(segment)
        return events("backward: weights", self._cast_weights(segment.events))

    def _cast_weights(self, found: Iterable[Event]) -> Iterator[Event]:
        """The second part's events; from torch 2.15 on gradients are cast to their sum's type."""
        cast = {grad: self.wide[p] for p, grad in self.grads.items()}
        for event in found:
            match event:
                case AccumulateGrad(grad, p) if grad is not cast[grad]:
                    yield from (Alloc(cast[grad]), Free(grad), AccumulateGrad(cast[grad], p))
                case Free(grad) if grad in cast:
                    yield from (Free(cast[grad]),) if self.state.has_sums else ()
                case _:
                    yield event

    def _made_grads(self) -> None:
        cast = self.stage.autograd_casts_grads
        state = self.state._replace(weights="whole", unshard_issued=False, recomputed_last=self.defers)
        self.state = state._replace(has_grads=not cast, has_sums=state.has_sums or cast)

    def _rows(
        self, order: Iterable[tuple[Segment, int]], *, late: bool
    ) -> Iterator[tuple[ParamGroup | None, list[tuple[Segment, int]], int, bool]]:
        """The blocks' backward passes by unit, and whether the unit's post-backward runs in its turn."""
        ahead, n_not_visited = self.stage.n_blocks, self._n_not_visited
        for group, row, times in grouped(order, reversed(self.units.rows)):
            size = sum([n for _, n in row])
            ahead = ahead - times * size
            in_its_turn = not late or size > 1 or ahead >= self.n_recomputed
            takes_grad = ahead > n_not_visited or (not n_not_visited and self._takes_grad)
            yield group, row, times, in_its_turn and takes_grad

    @property
    def _n_not_visited(self) -> int:
        """How many of the first blocks the backward pass does not come to: nothing is trained up to them."""
        found = 0
        for i, (block, n) in enumerate(self.stage.blocks):
            if block.backward.events or (i == 0 and block.entry_backward.events):
                return found
            found += n
        return 0

    @property
    def _takes_grad(self) -> bool:
        """Whether the first block's input requires a gradient, whose hook runs the group's post-backward."""
        return not self.stage.first or self.trace.entry_requires_grad

    def _not_visited(self) -> Iterator[CountedEvents]:
        """The post-backward of groups whose inputs have no gradient: after the root, in the module's order.

        Where the embedding was gathered ahead, its flat buffer is freed before the next group's turn.

        Source: `torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState._root_post_backward_final_callback`
        """
        yield from self._freed(self.units.embed)
        ahead = [one for one in self.units.groups(self.units.embed) if one in self.comms.prefetched]
        self.comms.prefetched.difference_update(ahead)
        yield frees(*[one.flat for one in ahead if not one.alone]), 1
        left = self._n_not_visited if self.trace.blocks_require_grad else self.stage.n_blocks
        for group, size, times in self.units.rows:
            if left < max(size, 1):
                yield from self.post_backward(group) if self.trace.blocks_require_grad else ()
                return
            for n in (1, min(times, left // size) - 1):
                yield from repeatedly(self._freed(group), n)
            left -= times * size

    def _freed(self, group: ParamGroup | None) -> Iterator[CountedEvents]:
        """Frees a group that the backward pass did not use."""
        if group is not None and group.reshards:  # as it has after the forward pass
            yield from group.reduce_grads(self.grads, self.comms) if self.state.syncs else ()
        else:
            yield from self.post_backward(group)

    def _late(self) -> Iterator[CountedEvents]:
        """The late sums of recomputed blocks' groups, after all others (see `defers`)."""
        left = self.n_recomputed
        for group, size, times in self.units.rows:
            if group is not None and size == 1 and left > 0:
                yield from repeatedly(self._accumulated(group), min(times, left))
            left -= size * times

    def finalize_backward(self) -> Iterator[CountedEvents]:
        """The end of a backward pass that reduces: waits for its collectives, and frees what they still hold.

        Source: `torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState._root_post_backward_final_callback`
        """
        if self.comms.reduced:
            parts = self.units.head_parts
            early = None if parts is None else parts.output
            for group, times in [one for one in self.units.reduced if one[0] is not early]:
                yield from repeatedly(group.finalize_backward(self.comms), times)
        yield frees(*[group.flat for group in self.comms.prefetched if not group.alone]), 1
        yield self.comms.frees_reduced(), 1
        if self.comms.reduced:
            yield (WaitStream(COMPUTE, REDUCE_SCATTER), WaitStream(COMPUTE, ALL_REDUCE)), 1

    # --- What a schedule does between passes ---

    def reduce_grads(self) -> list[Stretch]:
        """Adds each group's last gradients to their sum, frees its weights and reduces it, group by group.

        From torch 2.15 on the last group comes first.

        Source: `torch.distributed.pipelining.stage:_PipelineStageBase.perform_reduce_grad`, torch 2.15's
        `FSDPState.finalize_backward`.
        """
        summed = self.state.has_sums
        grads, name = self.wide if summed else self.grads, "gradient reduction"
        parts: list[Stretch] = []
        self._begin_pass()
        units = list(self.units.by_unit())
        for groups, times in units if self.stage.options.release < (2, 15) else reversed(units):
            for n in (1, times - 1) if times > 1 else (1,):
                turns: list[CountedEvents] = []
                for group in groups:
                    turns += self._accumulated(group) if summed and self.state.has_grads else []
                    turns += group.post_backward(grads, self.comms)
                parts.append(repeated(in_order(name, turns), n))
        parts.append(in_order(name, self.finalize_backward()))
        self.state = self.state._replace(weights="sharded")
        return [chain(name, *parts)]

    def unshard(self) -> list[Stretch]:
        """Gathers all groups ahead of the stage's first pass."""
        self.state = self.state._replace(weights="whole", unshard_issued=True)
        return [self._gathering(ParamGroup.unshard)]

    def wait_for_unshard(self) -> list[Stretch]:
        """Copies all-gathers' outputs into the weights, group by group, before the stage's first pass."""
        if not self.state.unshard_issued:
            return []
        self.state = self.state._replace(unshard_issued=False)
        return [self._gathering(lambda group: group.wait_for_unshard(group))]

    def _gathering(self, play: Callable[[ParamGroup], Iterable[CountedEvents]]) -> Stretch:
        """A part of the all-gathers that a schedule asks for, group by group.

        Source: `torch.distributed.pipelining.schedules:_PipelineScheduleRuntime._step_microbatches`.
        """
        name = "gathering of a stage's weights"
        found = [(in_order(name, group.ahead(play(group))), times) for group, times in self.units]
        return chain(name, *[repeated(one, times) for one, times in found])

    def reshard(self) -> list[Stretch]:
        """Frees all unsharded weights."""
        turns = self._of_units(lambda group: group.reshard() if self._is_whole(group) else ())
        parts = [in_order("freeing of a stage's weights", turns)]
        self.state = self.state._replace(weights="sharded")
        return parts

    def _of_units(self, play: Callable[[ParamGroup], Iterable[CountedEvents]]) -> Iterator[CountedEvents]:
        """What happens to each of the stage's groups, one after the other."""
        for group, times in self.units:
            yield from repeatedly(play(group), times)


def _check_output(group: ParamGroup | None, segments: Sequence[tuple[Segment, int]]) -> None:
    """Raise for a unit of several blocks whose last one gets no gradient, as its output is used by nobody.

    FSDP2 gathers a unit again when the gradient of its last block's output comes. The earlier blocks' weights
    have no storage then ("setStorage: ... are out of bounds for storage of size 0").

    Source: `torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState._register_pre_backward_hook`.
    """
    if group is not None and group.reshards and not segments[0][0].events:
        raise PlanRefused(
            "fsdp_blocks: FSDP2 fails in the backward pass of a unit of several blocks whose last gets no "
            "gradient; use fsdp_blocks=1.",
            kind="a unit of FSDP2 whose last block gets no gradient",
        )


def gathered_last(stage: Stage, units: Units) -> ParamGroup | None:
    """The FSDP2 unit whose all-gather output is still allocated when a step's backward pass has ended.

    It is the experts of the first block with experts: the backward pass recomputes them last.

    None if their pre-backward hook runs before the recomputation, or if the recomputation runs their forward
    pass to its end.

    Source: `torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup.wait_for_unshard`
    (`all_gather_state`).
    """
    for block, _ in stage.blocks:
        hooks = [event for event in block.backward.events if isinstance(event, UnitHook)]
        if hooks:
            group = units.hooked[hooks[0].parameters]
            stops = [hook.kind for hook in hooks[:2]] == ["pre_forward", "pre_backward"]
            return group if stops and group and group.reshards and not group.alone else None
    return None
