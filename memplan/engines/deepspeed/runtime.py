"""DeepSpeed's engine on one rank: forward, backward and step of each micro-batch, and the rank's record.

Source: `deepspeed.runtime.engine:DeepSpeedEngine`.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial

from memplan.engines.base import RankRecord
from memplan.engines.deepspeed.flat import Slot, slots_of
from memplan.engines.deepspeed.fp16_optimizer import FP16Optimizer
from memplan.engines.deepspeed.stage import OVERFLOW_BUFFER, DeepSpeedStage
from memplan.engines.deepspeed.stage_1_and_2 import DeepSpeedZeroOptimizer
from memplan.engines.deepspeed.zero_optimizer import UPDATE_NAME, Optimizer
from memplan.engines.trace import Segment
from memplan.plan import Rank
from memplan.record import AccumulateGrad, Event, Stretch, allocs, chain, events, frees, passed, repeated
from memplan.replay import AllocatorProgram
from memplan.shapes import FP32, INT64, Buffer, Parameter, buffer_of

LOSS, SCALED = (buffer_of(name, (), FP32) for name in ("loss before the division", "loss times the scale"))


class DeepSpeedEngine:
    """Plays `deepspeed.runtime.engine:DeepSpeedEngine` around one optimizer.

    The client holds the loss until the backward pass is over.
    """

    def __init__(self, stage: DeepSpeedStage, rank: Rank) -> None:
        self.stage, self.rank, self.trace = stage, rank, stage.trace
        slots = slots_of(stage.trained)
        self.optimizer: Optimizer = (
            DeepSpeedZeroOptimizer(stage, slots, rank.dp) if stage.plan.zero else FP16Optimizer(stage, slots)
        )
        left = iter(slots)
        parts = [stage.trace.embed_parameters]
        parts += [own for own, n, _ in stage.block_parameters for _ in range(n)]
        parts.append(stage.trace.head_parameters)
        trained = [[one for one in part if one.requires_grad] for part in parts]
        embed, *blocks, head = [{one: next(left) for one in part} for part in trained]
        self.places = blocks
        self.ends = embed | head

    # --- Passes ---

    def forward(self) -> Stretch:
        """The forward pass and the loss."""
        trace = self.trace
        blocks = [repeated(part.stretch("forward: block"), n) for part, n in self.stage.forward_order]
        ends = trace.head.stretch("forward: head"), trace.loss.stretch("loss")
        first = (
            trace.cast_inputs.stretch("forward: casts of inputs"),
            trace.embed.stretch("forward: embedding"),
        )
        return passed(0, "forward", *first, *blocks, *ends)

    def backward(self, *, older: bool, boundary: bool) -> Stretch:
        """The backward pass: hooks reduce gradients as they come, or the epilogue does."""
        trace, optimizer, stage = self.trace, self.optimizer, self.stage
        held = [LOSS, *[SCALED] * (optimizer.scales_loss and not stage.op_context.scales_loss)]
        hooked = partial(self._hooked, older=older, boundary=boundary)
        parts = [events("backward: loss", allocs(*held))]
        parts.append(events("backward: head", hooked(trace.head_backward, self.ends)))
        kinds = [block for block, n in stage.blocks for _ in range(n)]
        for i in reversed(range(len(kinds))):
            segment = kinds[i].backward if i else kinds[i].entry_backward
            parts.append(events("backward: block", hooked(segment, self.places[i])))
        parts.append(events("backward: embedding", hooked(trace.embed_backward, self.ends)))
        start, end = trace.end_of_backward.events[:1], trace.end_of_backward.events[1:]
        reduced = optimizer.epilogue(older=older, boundary=boundary)
        parts.append(events("backward: epilogue", (*start, *reduced, *end, *frees(*reversed(held)))))
        return passed(0, "backward", *parts)

    def _hooked(
        self, segment: Segment, places: Mapping[Parameter, Slot], *, older: bool, boundary: bool
    ) -> Iterator[Event]:
        for event in segment.events:
            yield event
            if isinstance(event, AccumulateGrad):
                slot = places[event.parameter]
                yield from self.optimizer.hook(slot, older=older, boundary=boundary)

    def micro_batches(self) -> Iterator[Stretch]:
        """The passes of all micro-batches; those between the second and the last are equal."""
        n = self.stage.plan.n_micro_batches
        between = n - 2
        if n > 1:
            yield from (self.forward(), self.backward(older=False, boundary=False))
        if between > 0:
            yield repeated(
                chain("micro-batch", self.forward(), self.backward(older=True, boundary=False)), between
            )
        yield from (self.forward(), self.backward(older=n > 1, boundary=True))

    # --- The record ---

    def record(self) -> RankRecord:
        """The rank's record: what it holds between steps, and its step."""
        stage, update = self.stage, self.optimizer.step()
        step = chain("step", *self.micro_batches(), update)
        return RankRecord(
            rank=self.rank,
            layers=(range(stage.n_blocks),),
            rest=stage.rest + Counter([*self.optimizer.states, *self.optimizer.kept]),
            step=step,
            grads=self.optimizer.grads,
            update=(update,),
            program=None if stage.device.on_cpu else partial(self._program, step),
        )

    def _program(self, step: Stretch) -> AllocatorProgram:
        """The rank's allocations and frees from the module's weights on."""
        return AllocatorProgram(
            setup=tuple(self._setup()),
            step=step,
            kept=Counter(self.optimizer.kept),
            states=tuple(self.optimizer.made_in_step),
            update_name=UPDATE_NAME,
            beside=self.stage.workspaces,
            handed_on=frozenset([self.trace.boundary]),
            streams=dict(self._streams()),
        )

    def _setup(self) -> Iterator[Event]:
        """The module's weights and buffers, the optimizer's tensors, the step's tokens."""
        stage, plan = self.stage, self.stage.plan
        for parameters, buffers in stage.modules():
            yield from allocs(*[stage.weights[one] for one in parameters], *buffers)
        yield from (*allocs(OVERFLOW_BUFFER), *self.optimizer.setup())
        batch = plan.n_micro_batches * plan.micro_batch
        drawn = buffer_of("tokens and targets", (batch, plan.seq_len + 1), INT64)
        both = [] if stage.is_traced or stage.model.computes_loss else [drawn]
        yield from (*allocs(*both, *stage.inputs), *frees(*both))

    def _streams(self) -> Iterator[tuple[Buffer, str]]:
        """The buffers on the stream of reductions, if there is one."""
        return ((one, "reduction") for one in self.optimizer.on_own_stream)
