"""DeepSpeed's PipelineEngine on one rank: its schedule, what it receives and keeps, and the rank's record.

Source: `deepspeed.runtime.pipe.engine:PipelineEngine`, `deepspeed.runtime.pipe.schedule:TrainSchedule`.
"""

from collections import Counter
from collections.abc import Iterator
from functools import cached_property, partial
from itertools import groupby
from typing import Final, final

from memplan.engines.base import RankRecord
from memplan.engines.deepspeed.checkpointing import CheckpointedBlocks
from memplan.engines.deepspeed.partition import blocks_in, stages
from memplan.engines.deepspeed.runtime import LOSS, SCALED, DeepSpeedEngine
from memplan.engines.deepspeed.stage import DeepSpeedStage, PipelineStage
from memplan.engines.deepspeed.zero_optimizer import UPDATE_NAME
from memplan.parts.flat import Slot
from memplan.passes.module_calls import Part
from memplan.plan import Rank
from memplan.record import (
    Collective,
    CollectiveKind,
    Event,
    Free,
    Stretch,
    allocs,
    chain,
    events,
    frees,
    passed,
    repeated,
)
from memplan.replay.program import AllocatorProgram
from memplan.shapes import FP32, INT32, INT64, Buffer, buffer_of

META: Final = buffer_of("meta_buffer", (256,), INT32)
"""What says the shape of all that follows, sent once (`TENSOR_META_SIZE`)."""

INITIAL: Final = buffer_of("loss", (), FP32)
"""The loss of the last micro-batch, which the engine begins with on every stage."""

AGG_LOSS, DP_GROUP_LOSS, TOTAL_LOSS, AGG_TRAIN_LOSS = (
    buffer_of(name, (), FP32) for name in ("agg_loss", "dp_group_loss", "total_loss", "agg_train_loss")
)


def pipeline_stage(whole: DeepSpeedStage, rank: Rank, known: dict[object, PipelineStage]) -> PipelineStage:
    """The stage of a rank; `known`: stages by their layers, which those of equal layers are one of."""
    model = whole.model
    layers = stages(model, whole.trace, whole.plan)[rank.pp]
    blocks = blocks_in(layers, model.n_blocks)
    key = layers.start == 0, layers.stop == model.n_blocks + 2, model.layers_in(blocks)
    if key not in known:
        known[key] = PipelineStage(whole, layers, blocks)
    return known[key]


@final
class PipelineEngine(DeepSpeedEngine):
    """Plays `deepspeed.runtime.pipe.engine:PipelineEngine.train_batch`.

    A stage has one buffer to receive into, a copy of what it receives for each micro-batch under way, and a
    clone of that, which its module is called with. The last stage keeps the logits of two micro-batches from
    step to step, and the losses of all.

    Attributes:
        received: a copy of what a stage receives; `buffer`: what it receives into, activations and gradients.
        loaded, cloned: the tokens of a micro-batch on the first stage, and their clone.
        n_buffers: the micro-batches whose tokens, or logits, are kept.
    """

    stage: PipelineStage

    def __init__(self, stage: PipelineStage, rank: Rank) -> None:
        plan = stage.plan
        boundary = stage.trace.boundary
        self.n_micro_batches = plan.n_micro_batches
        self.n_in_flight = min(plan.n_micro_batches, plan.pp - rank.pp)
        self.n_buffers = min(plan.n_micro_batches, max(2, self.n_in_flight))
        self.received = buffer_of("received", boundary.shape, boundary.dtype)
        self.buffer = buffer_of("buffer to receive into", boundary.shape, boundary.dtype)
        tokens = plan.micro_batch, plan.seq_len
        self.loaded, self.cloned = (buffer_of(name, tokens, INT64) for name in ("loaded", "clone of tokens"))
        self.blocks = CheckpointedBlocks(stage)
        self._forwards: dict[tuple[bool, bool], Stretch] = {}
        self._backwards: dict[bool, Stretch] = {}
        super().__init__(stage, rank)

    @cached_property
    def logits(self) -> list[Buffer]:
        """The output of the last stage."""
        own = self.trace.release.events if self.stage.last else ()
        return [event.buffer for event in own if isinstance(event, Free)]

    @cached_property
    def _kept_by_graph(self) -> list[Buffer]:
        """The copy of what a stage has received, and its gradient.

        On the last stage the logits' graph has them, once they have been sent, until the logits are replaced
        (`AccumulateGrad.variable`).
        """
        grads = [event.buffer for event in self.trace.release_input_grad.events if isinstance(event, Free)]
        return [self.received, *grads]

    def _forward_parts(self) -> Iterator[Part[Slot]]:
        stage, trace = self.stage, self.trace
        yield Part("forward: casts of inputs", trace.cast_inputs, self.ends)
        yield Part("forward: embedding", trace.embed, self.ends)
        for i, segment in enumerate(self.blocks.forward()):
            yield Part("forward: block", segment, self.places[i], i)
        if stage.last:
            yield Part("forward: head", stage.head[0], self.ends)
            yield Part("loss", trace.loss, self.ends)
        else:
            yield Part("forward: end", trace.end_of_forward, self.ends)

    def _backward_parts(self) -> Iterator[Part[Slot]]:
        stage, trace = self.stage, self.trace
        if stage.last:
            yield Part("backward: head", self.blocks.head_backward(), self.ends)
        for i in reversed(range(stage.n_blocks)):
            yield Part("backward: block", self.blocks.backward(i), self.places[i], i)
        yield Part("backward: embedding", trace.embed_backward, self.ends)

    def _p2p(self, kind: CollectiveKind, what: str) -> Stretch:
        n_bytes = self.trace.boundary.n_bytes
        return events(f"{kind} {what}", [Collective(kind=kind, axis="pp", what=what, payload_bytes=n_bytes)])

    def micro_batch_forward(self, i: int, *, first_step: bool = False) -> Stretch:
        """The forward pass of the i-th micro-batch, between what is received and what is sent.

        In a first step nothing is replaced yet: neither the tokens and logits of a micro-batch before, nor
        the losses of a step before.
        """
        key = i == 0, first_step and i < self.n_buffers
        if key not in self._forwards:
            self._forwards[key] = self._forward_of(is_first=i == 0, replaces=not key[1])
        return self._forwards[key]

    def _forward_of(self, *, is_first: bool, replaces: bool) -> Stretch:
        stage, parts = self.stage, [part.segment.stretch(part.name) for part in self.forward_parts]
        if stage.first:
            loaded = *allocs(self.loaded), *frees(*[self.loaded] * replaces), *allocs(self.cloned)
            before = [events("tokens", loaded)]
        else:
            copied = events("copies of what is received", allocs(self.received, self.trace.boundary))
            before = [self._p2p("recv", "activations"), copied]
        if not stage.last:
            return passed(0, "forward", *before, *parts, self._p2p("send", "activations"))
        *module, loss = parts
        graph = frees(*self._kept_by_graph * replaces)
        alone = self.n_micro_batches == 1  # the loss has the graph too, until it is replaced
        replaced = *frees(*self.logits * replaces), *(() if alone else graph)
        losses = *allocs(LOSS), *frees(*[LOSS] * is_first), *allocs(*[TOTAL_LOSS] * is_first)
        ends = events("losses", (*losses, *(graph if alone else ())))
        return passed(0, "forward", *before, *module, events("replaced logits", replaced), loss, ends)

    def micro_batch_backward(self, *, older: bool) -> Stretch:
        """The backward pass of a micro-batch, between what is received and what is sent."""
        if older not in self._backwards:
            self._backwards[older] = self._backward_of(older=older)
        return self._backwards[older]

    def _backward_of(self, *, older: bool) -> Stretch:
        stage, trace = self.stage, self.trace
        hooked = partial(self._hooked, older=older, boundary=False)
        parts = [events(part.name, hooked(part)) for part in self.backward_parts]
        scaled = [SCALED] * (stage.last and self.optimizer.scales_loss)
        ends: list[Event] = [*self.optimizer.epilogue(older=older, boundary=False)]
        ends += [*trace.end_of_backward.events, *frees(*scaled)] if stage.last else []
        ends += trace.release_loss.events if stage.last else trace.release.events
        received = [] if stage.last else [self._p2p("recv", "activation gradients")]
        if stage.first:
            return passed(
                0, "backward", *received, *parts, events("backward: end", [*frees(self.cloned), *ends])
            )
        let_go = frees(*self._kept_by_graph) if not stage.last else ()
        sent = events("what was sent", let_go)
        start = events("backward: loss", allocs(*scaled))
        end = events("backward: end", ends)
        return passed(
            0, "backward", *received, start, *parts, end, self._p2p("send", "activation gradients"), sent
        )

    def _schedule(self, *, first_step: bool) -> Iterator[Stretch]:
        """All passes: forward ones until a backward one can be, both in turn, the backward ones left.

        The first step makes what a stage receives into, when it first receives: gradients on the first stage.
        """
        m, ahead = self.n_micro_batches, self.n_in_flight
        forwards = [self.micro_batch_forward(i, first_step=first_step) for i in range(m)]
        backwards = [self.micro_batch_backward(older=i > 0) for i in range(m)]
        made = [events("buffers", (*allocs(META, self.buffer), *frees(META)))] * first_step
        yield from made * (not self.stage.first)
        for one, equal in groupby(forwards[:ahead]):
            yield repeated(one, len(list(equal)))
        yield from made * self.stage.first
        for both, pairs in groupby(zip(backwards, forwards[ahead:], strict=False)):
            yield repeated(chain("backward and forward", *both), len(list(pairs)))
        for one, equal in groupby(backwards[m - ahead :]):
            yield repeated(one, len(list(equal)))

    def step(self, *, first_step: bool = False) -> tuple[Stretch, Stretch]:
        """A step, and the part of it that is the update.

        Before the first passes the losses of the step before are forgotten; after the last ones gradients are
        reduced.
        """
        n_losses = self.n_micro_batches * self.stage.last
        dropped = [] if first_step else [LOSS] * (n_losses - 1) + [TOTAL_LOSS] * self.stage.last
        passes = [*self._schedule(first_step=first_step)]
        reduced = events("reduction", self.optimizer.epilogue(older=True, boundary=True))
        loss = events("loss of the step", self._aggregated(first_step=first_step))
        update = chain("update", self.optimizer.step(), loss)
        start = events("start of the step", frees(*dropped))
        return chain("step", start, *passes, reduced, update), update

    def _aggregated(self, *, first_step: bool) -> Iterator[Event]:
        """The mean loss, which the last stage sends to all.

        Source: `deepspeed.runtime.pipe.engine:PipelineEngine._aggregate_total_loss`.
        """
        replaced = frees(*[AGG_TRAIN_LOSS] * (not first_step))
        losses, mean = buffer_of("losses", (2,), FP32), buffer_of("mean loss", (), FP32)
        sent = Collective(kind="broadcast", axis="pp", what="loss", payload_bytes=losses.n_bytes)
        if not self.stage.last:
            yield from (*allocs(losses), sent, *allocs(DP_GROUP_LOSS), *frees(DP_GROUP_LOSS))
            yield from (*allocs(AGG_TRAIN_LOSS), *frees(losses), *replaced)
            return
        yield from (*allocs(mean, DP_GROUP_LOSS), *frees(DP_GROUP_LOSS), *allocs(AGG_TRAIN_LOSS))
        if self.stage.plan.dp > 1:
            yield self.optimizer.all_reduce("loss", FP32.itemsize)
        yield from (*allocs(losses), sent, *frees(losses, mean), *replaced)

    @property
    def _between_steps(self) -> list[Buffer]:
        """What is kept from step to step beside states."""
        found = [self.buffer, AGG_LOSS, DP_GROUP_LOSS, AGG_TRAIN_LOSS, *self.optimizer.between_steps]
        found += [self.loaded] * (self.n_buffers * self.stage.first)
        if not self.stage.last:
            return [*found, INITIAL]
        found += [*self.logits, *self._kept_by_graph] * self.n_buffers
        return [*found, *[LOSS] * self.n_micro_batches, TOTAL_LOSS]

    def record(self) -> RankRecord:
        stage, optimizer = self.stage, self.optimizer
        first_step, _ = self.step(first_step=True)
        step, update = self.step()
        held = [*optimizer.states, *optimizer.kept, *self._between_steps]
        layers = stages(stage.model, stage.whole.trace, stage.plan)[self.rank.pp]
        return RankRecord(
            rank=self.rank, layers=(blocks_in(layers, stage.model.n_blocks),), step=step, update=(update,),
            rest=stage.rest + Counter(held), grads=Counter(optimizer.grads),
            setup=events("set-up", (*self._init(), *self._setup())),
            program=None if stage.device.on_cpu else partial(self._pipeline_program, step, first_step),
        )  # fmt: skip

    def _pipeline_program(self, step: Stretch, first_step: Stretch) -> AllocatorProgram:
        optimizer, stage = self.optimizer, self.stage
        return AllocatorProgram(
            init=tuple(self._init()), setup=tuple(self._setup()), step=step, first_step=first_step,
            kept=Counter(optimizer.kept), states=tuple(optimizer.made_in_step), update_name=UPDATE_NAME,
            beside=stage.workspaces, handed_on=frozenset([self.trace.boundary]),
            oldest_first=frozenset([self.loaded, LOSS, *self.logits, *self._kept_by_graph * self.stage.last]),
        )  # fmt: skip

    def _init(self) -> Iterator[Event]:
        """The module's weights; the layers share rotary angles that are there before."""
        yield from allocs(*self.stage.buffers, *map(self.stage.weights.__getitem__, self.stage.parameters()))

    def _setup(self) -> Iterator[Event]:
        stage = self.stage
        loss = LOSS if stage.last else INITIAL
        yield from (*allocs(*stage.of_adam), *self.optimizer.setup())
        yield from (*allocs(loss, AGG_LOSS, DP_GROUP_LOSS), *stage.draw_inputs())
