"""DeepSpeed's engine on one rank: forward, backward and step of each micro-batch, and the rank's record.

Source: `deepspeed.runtime.engine:DeepSpeedEngine`.
"""

from collections import Counter
from collections.abc import Iterator
from functools import partial

from memplan.engines.base import RankRecord
from memplan.engines.deepspeed.bf16_optimizer import BF16Optimizer
from memplan.engines.deepspeed.coordinator import ModuleHooks, PartitionedParameterCoordinator
from memplan.engines.deepspeed.fp16_optimizer import FP16Optimizer
from memplan.engines.deepspeed.stage import DeepSpeedStage
from memplan.engines.deepspeed.stage3 import Stage3Optimizer
from memplan.engines.deepspeed.stage_1_and_2 import DeepSpeedZeroOptimizer
from memplan.engines.deepspeed.zero_optimizer import UPDATE_NAME, Optimizer
from memplan.parts.flat import Slot, slots_of
from memplan.passes.module_calls import Part, recorded_order
from memplan.plan import Rank
from memplan.record import (
    AccumulateGrad,
    Event,
    ModuleHook,
    Stretch,
    allocs,
    chain,
    events,
    frees,
    passed,
    repeated,
)
from memplan.replay.program import AllocatorProgram
from memplan.shapes import BF16, FP32, buffer_of

LOSS, SCALED = (buffer_of(name, (), FP32) for name in ("loss before the division", "loss times the scale"))


class DeepSpeedEngine:
    """Plays `deepspeed.runtime.engine:DeepSpeedEngine` around one optimizer.

    The client holds the loss until the backward pass is over.
    """

    def __init__(self, stage: DeepSpeedStage, rank: Rank) -> None:
        self.stage, self.rank, self.trace = stage, rank, stage.trace
        slots = slots_of(stage.trained)
        self.ends, self.places = stage.placed(slots)
        self.forward_parts, self.backward_parts = [*self._forward_parts()], [*self._backward_parts()]
        self.hooks: ModuleHooks | None = None
        self.optimizer: Optimizer
        place = stage.plan.place_among_shards(rank)
        match stage.plan.zero:
            case 0 if stage.plan.pp > 1 and stage.dtype == BF16:
                self.optimizer = BF16Optimizer(stage, slots)
            case 0:
                self.optimizer = FP16Optimizer(stage, slots, rank)
            case 3:
                order = recorded_order([*self.forward_parts, *self.backward_parts])
                coordinator = PartitionedParameterCoordinator(stage.plan, stage.dtype, order)
                self.hooks = ModuleHooks(coordinator)
                self.optimizer = Stage3Optimizer(stage, slots, coordinator, place)
            case _:
                self.optimizer = DeepSpeedZeroOptimizer(stage, slots, place, rank.tp)

    def _forward_parts(self) -> Iterator[Part[Slot]]:
        """The parts of a forward pass in order."""
        trace, i = self.trace, 0
        yield Part("forward: casts of inputs", trace.cast_inputs, self.ends)
        yield Part("forward: embedding", trace.embed, self.ends)
        for segment, n in self.stage.forward_order:
            for _ in range(n):
                yield Part("forward: block", segment, self.places[i], i)
                i += 1
        yield Part("forward: head", trace.head, self.ends)
        yield Part("loss", trace.loss, self.ends)

    def _backward_parts(self) -> Iterator[Part[Slot]]:
        """The parts of a backward pass in order."""
        return self.stage.backward_parts(self.ends, self.places)

    def forward(self) -> Stretch:
        """The forward pass and the loss."""
        if self.hooks is not None:
            self.hooks.start_of_forward()
        parts = self.forward_parts
        if self.hooks is None:
            return passed(0, "forward", *[part.segment.stretch(part.name) for part in parts])
        return passed(0, "forward", *[events(part.name, self._hooked(part)) for part in parts])

    def backward(self, *, older: bool, boundary: bool) -> Stretch:
        """The backward pass: hooks reduce gradients as they come, or the epilogue does.

        Before the epilogue the loss's gradient goes; the loss is the client's, who holds it until the end.
        """
        optimizer, scales_loss = self.optimizer, self.stage.op_context.scales_loss
        *gradients, _ = end = self.trace.end_of_backward.events
        n_before = len(gradients) - scales_loss
        if self.hooks is not None:
            self.hooks.is_backward = True
        held = [LOSS, *[SCALED] * (optimizer.scales_loss and not scales_loss)]
        hooked = partial(self._hooked, older=older, boundary=boundary)
        played = [events(part.name, hooked(part)) for part in self.backward_parts]
        reduced = optimizer.epilogue(older=older, boundary=boundary)
        held_for = self.hooks.coordinator if self.hooks is not None else None
        left = () if held_for is None else held_for.release_all(kept=held_for.persistent)
        epilogue = *end[:n_before], *reduced, *left, *end[n_before:], *frees(*reversed(held))
        loss = events("backward: loss", allocs(*held))
        return passed(0, "backward", loss, *played, events("backward: epilogue", epilogue))

    def _hooked(self, part: Part[Slot], *, older: bool = False, boundary: bool = False) -> Iterator[Event]:
        """A part's events with those of the hooks of its modules and of its gradients."""
        for event in part.segment.events:
            yield event
            if isinstance(event, ModuleHook) and self.hooks is not None:
                yield from self.hooks(part, event)
            elif isinstance(event, AccumulateGrad):
                slot = part.owned[event.parameter]
                if self.hooks is not None:
                    yield from self.hooks.coordinator.backward_over(slot)
                yield from self.optimizer.hook(slot, older=older, boundary=boundary)

    def micro_batches(self) -> Iterator[Stretch]:
        """The passes of all micro-batches; those between the second and the last are equal."""
        n = self.stage.plan.n_micro_batches
        for i in range(min(2, n - 1)):
            yield from (self.forward(), self.backward(older=i > 0, boundary=False))
        if n > 3:
            passes = self.forward(), self.backward(older=True, boundary=False)
            yield repeated(chain("micro-batch", *passes), n - 3)
        yield from (self.forward(), self.backward(older=n > 1, boundary=True))

    def record(self) -> RankRecord:
        """The rank's record: what it holds between steps, and its step.

        With several micro-batches ZeRO-3 decides in the first step what it releases in all.
        """
        stage = self.stage
        first_step = self._first_step() if stage.plan.n_micro_batches > 1 else None
        passes, update = [*self.micro_batches()], self.optimizer.step()
        step = chain("step", *passes, update)
        return RankRecord(
            rank=self.rank, layers=(range(stage.n_blocks),), step=step, update=(update,),
            rest=stage.rest + Counter([*self.optimizer.states, *self.optimizer.kept]),
            grads=Counter(self.optimizer.grads), host=self.optimizer.host,
            setup=events("set-up", (*self._init(), *self._setup())) if self.optimizer.keeps_weights else None,
            program=None if stage.device.on_cpu else partial(self._program, step, first_step),
        )  # fmt: skip

    def _first_step(self) -> Stretch | None:
        """The first step if it differs: in ZeRO-3's, the first micro-batch records the order of modules."""
        if not self.optimizer.starts_training():
            return None
        return chain("step", *self.micro_batches(), self.optimizer.step())

    def _program(self, step: Stretch, first_step: Stretch | None) -> AllocatorProgram:
        """The rank's allocations and frees from the module's weights on."""
        optimizer = self.optimizer
        return AllocatorProgram(
            init=tuple(self._init()), setup=tuple(self._setup()), step=step, kept=Counter(optimizer.kept),
            first_step=first_step or self._first_step(),
            states=tuple(optimizer.made_in_step), update_name=UPDATE_NAME, beside=self.stage.workspaces,
            handed_on=frozenset([self.trace.boundary]), streams=dict(optimizer.on_own_stream),
        )  # fmt: skip

    def _init(self) -> Iterator[Event]:
        """The module's weights and buffers; AutoTP has sent its shards before all others."""
        stage = self.stage
        for parameters, buffers in stage.sent_by_autotp():
            whole = parameters if self.optimizer.keeps_weights else ()
            yield from allocs(*[stage.weights[one] for one in whole], *buffers)
        yield from self.optimizer.init()

    def _setup(self) -> Iterator[Event]:
        """The optimizer's tensors, the step's tokens."""
        stage = self.stage
        yield from (*allocs(*stage.of_adam), *self.optimizer.setup(), *stage.draw_inputs())
