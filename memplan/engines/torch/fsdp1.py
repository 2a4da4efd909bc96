"""FSDP1: a module whose units each have one flat parameter, and its passes.

Source: `torch.distributed.fsdp.fully_sharded_data_parallel:FullyShardedDataParallel`.
"""

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple, Self, final

from memplan.engines.torch.flat_parameter import FlatParameter, FlatUnits
from memplan.engines.torch.stage import Stage
from memplan.engines.torch.units import (
    ALL_GATHER,
    REDUCE_SCATTER,
    CountedEvents,
    grouped,
    in_order,
    next_units,
    opened_when_called,
)
from memplan.parts.ddp import ALL_REDUCE
from memplan.parts.module import StageModule, before_blocks
from memplan.passes.backward import backward_order
from memplan.passes.trace import Segment
from memplan.record import COMPUTE, RecordEvent, Stretch, WaitStream, chain, events, frees, repeated
from memplan.shapes import Buffer

FREED: Final = "freed"
"""The event of the last unit whose weights were freed."""

WAIT_FOR_UNSHARD: Final[CountedEvents] = (WaitStream(COMPUTE, ALL_GATHER),), 1
"""Computation waits for all all-gathers so far."""

TWO_AT_MOST: Final[CountedEvents] = (WaitStream(ALL_GATHER, FREED), RecordEvent(FREED, COMPUTE)), 1
"""All-gathers to come wait until the unit before the one that is freed now was freed (`limit_all_gathers`).

Source: `torch.distributed.fsdp._limiter_utils:_FreeEventQueue`.
"""


class Fsdp1State(NamedTuple):
    """What the passes so far have left: unsharded weights, unsharded gradients, sharded gradients.

    `syncs`: whether the next backward pass reduces gradients; under `no_sync` it does not. `knows_order`: of
    the units' forward passes, which the first step records.
    """

    has_sharded_grads: bool
    syncs: bool
    is_whole: bool = False
    has_grads: bool = False
    knows_order: bool = True


@final
class FullyShardedDataParallel(StageModule[Fsdp1State]):
    """A module under FSDP1; every backward pass reduces but those under `no_sync`.

    Plays `torch.distributed.fsdp.fully_sharded_data_parallel:FullyShardedDataParallel`.
    """

    def __init__(self, stage: Stage, dp_rank: int) -> None:
        options = stage.options
        zeroed = not (options.set_to_none or stage.offloads)
        super().__init__(stage, Fsdp1State(has_sharded_grads=zeroed, syncs=not options.no_sync))
        self.units = FlatUnits(stage, dp_rank)
        self.grads = stage.trace.gradients()

    def in_first_step(self) -> Self:
        other = self.fresh()
        other.state = other.state._replace(knows_order=False)
        return other

    @property
    def prefetches_forward(self) -> bool:
        """Whether a forward pass gathers units ahead.

        Source: `torch.distributed.fsdp._exec_order_utils:_ExecOrderData.get_handle_to_forward_prefetch`.
        """
        return self.stage.options.forward_prefetch and self.state.knows_order

    @property
    def gathers_early(self) -> str:
        """When a backward pass gathers the next unit; one that ends late finds it gathered."""
        asked = self.stage.options.backward_prefetch
        return "none" if self.ends_late and asked == "post" else asked

    @property
    def ends_late(self) -> bool:
        """Whether a unit's gradients are joined only after the next unit's backward pass.

        Autograd runs what was made last in the forward pass first. A unit's views are made when it is
        gathered: with `forward_prefetch` before the operations of the unit in front of it.

        Source: torch/csrc/autograd/engine.cpp (`CompareNodeTaskTime`).
        """
        return self.prefetches_forward

    def require_gradient_sync(self) -> None:
        """The end of `FullyShardedDataParallel.no_sync`."""
        self.state = self.state._replace(syncs=True)

    def sharded_grads(self) -> Iterable[tuple[Buffer, int]]:
        return [(unit.reduced, times) for unit, times in self.units]

    def _made_grads(self) -> None:
        self.state = self.state._replace(has_grads=True)

    # --- What happens to one unit ---

    def _unshard(self, unit: FlatParameter | None) -> Iterator[CountedEvents]:
        """Gathers a unit, unless it is unsharded."""
        if unit is not None:
            yield tuple(unit.unshard(is_whole=self.state.is_whole)), 1

    def _pre_forward(
        self, unit: FlatParameter | None, following: FlatParameter | None, *, first: bool = False
    ) -> Iterator[CountedEvents]:
        """Gathers a unit, unless it was gathered ahead, then the next one if that is asked for.

        Source: `torch.distributed.fsdp._runtime_utils:_pre_forward_unshard`.
        """
        ahead = self.prefetches_forward
        if first or not ahead:
            yield from self._unshard(unit)
        yield WAIT_FOR_UNSHARD
        if ahead:
            yield from self._unshard(following)

    def _pre_backward(
        self, unit: FlatParameter | None, following: FlatParameter | None, *, is_root: bool = False
    ) -> Iterator[CountedEvents]:
        """Gathers a unit, unless it was gathered ahead, then the next one.

        Source: `torch.distributed.fsdp._runtime_utils:_pre_backward_hook`.
        """
        if self.gathers_early == "none" or is_root:
            yield from self._gathered_again(unit)
        yield WAIT_FOR_UNSHARD
        if self.gathers_early == "pre":
            yield from self._gathered_again(following)

    def _gathered_again(self, unit: FlatParameter | None) -> Iterator[CountedEvents]:
        """Gathers a unit that reshards; another one's uploaded shard replaces that of the forward pass."""
        if unit is not None and unit.reshards:
            yield from self._unshard(unit)
        elif unit is not None:
            yield tuple(unit.unshard(is_whole=True)), 1
            yield frees(unit.uploaded), int(unit.keeps_uploaded and self.stage.plan.zero == 2)

    def _post_backward(
        self, unit: FlatParameter | None, following: FlatParameter | None
    ) -> Iterator[CountedEvents]:
        """Joins a unit's gradients, frees its weights and reduces.

        A gradient that is added to an older one is held by autograd until this is done.

        Source: torch/csrc/autograd/engine.cpp (`call_function`: inputs are kept for post-hooks),
        `torch.distributed.fsdp._runtime_utils:_post_backward_hook`.
        """
        if unit is None:
            return
        yield from unit.flatten_grads(self.grads)
        yield unit.reshard(frees_whole=self.state.syncs or self.stage.plan.zero == 3), 1
        yield TWO_AT_MOST
        if self.gathers_early == "post":
            yield from self._gathered_again(following)
        if self.state.syncs:
            yield tuple(unit.reduce(added=self.state.has_sharded_grads)), 1
        yield frees(unit.grad), int(self.state.has_grads)

    # --- Passes ---

    def _forward(self, release: Stretch | None) -> Stretch:
        """The forward pass: units that are not unsharded are gathered as their modules are called."""
        trace, units = self.trace, self.units
        rows = list(grouped(self.stage.forward_order, units.rows))
        following = list(next_units([*[unit for unit, _, _ in rows[1:]], *[None] * bool(rows)]))
        first = next((unit for unit, _, _ in rows if unit is not None), None)
        parts = [trace.cast_inputs.stretch("forward: casts of inputs")]
        parts.append(in_order("forward: root", self._pre_forward(units.root, first, first=True)))
        parts.append(before_blocks(trace, "forward", trace.embed.events))
        for (unit, segments, times), after in zip(rows, following, strict=True):
            passed = [(segment.events, n) for segment, n in segments]
            freed = [(unit.reshard(), 1), TWO_AT_MOST] if unit is not None and unit.reshards else []
            for n, then in ((times - 1, unit), (1, after)):
                opened = [] if unit is None else [*self._pre_forward(unit, then)]
                turns = (*opened_when_called(opened, passed), *freed)
                parts.append(repeated(in_order("forward: block", turns), n))
        if self.stage.plan.zero == 3 and units.root.keeps_uploaded:
            release = events("forward: end of the root", units.root.reshard(frees_whole=False))
        parts += self._forward_end(release)
        self.state = self.state._replace(is_whole=self.stage.plan.zero == 2)
        return chain("forward", *parts)

    def _backward(self) -> Stretch:
        """The backward pass: units are gathered again, by default one ahead, and their gradients reduced."""
        trace, root = self.trace, self.units.root
        rows = list(grouped(backward_order(self.stage.blocks), reversed(self.units.rows)))
        following = list(next_units([*[unit for unit, _, _ in rows], None]))
        n_loss = trace.n_loss_backward
        loss, head = Segment(trace.head_backward.events[:n_loss]), trace.head_backward.events[n_loss:]
        parts = [events("backward: loss", loss.events)]
        turns: list[CountedEvents] = [*self._pre_backward(root, following[0], is_root=True), (head, 1)]
        if self.gathers_early == "post":
            turns += self._gathered_again(following[0])
        parts.append(in_order("backward: head", turns))
        pending: FlatParameter | None = None
        for (unit, segments, times), after in zip(rows, following[1:], strict=True):
            for n in (1, times - 1):
                turns = [] if unit is None else [*self._pre_backward(unit, after)]
                turns += [(segment.events, n_blocks) for segment, n_blocks in segments]
                turns += self._post_backward(pending if self.ends_late else unit, after)
                parts.append(repeated(in_order("backward: block", turns), n))
                pending = unit if self.ends_late else None
        parts.append(before_blocks(trace, "backward", trace.embed_backward.events))
        ended = [*self._post_backward(pending, None), *self._post_backward(root, None)]
        syncs = self.state.syncs
        if syncs:
            ended.append(((WaitStream(COMPUTE, REDUCE_SCATTER), WaitStream(COMPUTE, ALL_REDUCE)), 1))
        parts.append(in_order("backward: root", ended))
        if syncs and self.stage.offloads:
            on_gpu = [(frees(grad), n) for grad, n in self.sharded_grads()]
            parts.append(in_order("backward: gradients are on the host", on_gpu))
        self.state = self.state._replace(
            is_whole=not syncs and self.stage.plan.zero == 2,
            has_grads=not syncs,
            has_sharded_grads=self.state.has_sharded_grads or (syncs and not self.stage.offloads),
        )
        return chain("backward", *parts, *self.returned())
