"""Megatron's schedules: no pipeline, 1F1B, and interleaved 1F1B, with what each holds between passes.

A chunk's decoder refers to the last input it was given (`set_input_tensor`), and the input to its gradient; the
schedule's variable refers to the gradient that it sent last. Outputs are freed once they are sent.

Source: megatron.core.pipeline_parallel.schedules:forward_backward_no_pipelining,
megatron.core.pipeline_parallel.schedules:forward_backward_pipelining_without_interleaving,
megatron.core.pipeline_parallel.schedules:forward_backward_pipelining_with_interleaving.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from memplan.engines.megatron.chunk import ModelChunk
from memplan.orders import Action, Loop
from memplan.plan import Plan
from memplan.record import Event, Stretch, allocs, chain, events, frees, passed, repeated


def forward_backward(plan: Plan, pp_rank: int, chunks: Sequence[ModelChunk]) -> list[Stretch]:
    """All passes of a rank's step."""
    order = plan.pipeline_schedule.order(plan.pp, pp_rank, plan.virtual_stages, plan.n_micro_batches)
    if plan.pp == 1:
        (chunk,) = chunks
        once = chain(
            "micro-batch", passed(0, "forward", chunk.forward), passed(0, "backward", chunk.backward)
        )
        return [repeated(once, plan.n_micro_batches)]
    return _Schedule(chunks).run(order)


class _Held(NamedTuple):
    """What a schedule holds of one chunk beyond its micro-batches in flight.

    Attributes:
        ahead: the micro-batches whose forward pass is done, and whose backward pass is not.
        stale: the decoder's input has had its backward pass, here or in the last step: it and its gradient
            are alive.
    """

    ahead: int = 0
    stale: bool = True


class _Schedule:
    """Plays a rank's actions in order; repetitions that leave what is held as it was are counted."""

    def __init__(self, chunks: Sequence[ModelChunk]) -> None:
        self.chunks = chunks
        self.held = [_Held(stale=not chunk.first) for chunk in chunks]
        self.sent: int | None = None
        """The chunk whose input's gradient only the schedule's variable refers to."""
        self.received: int | None = None
        """The chunk whose output's gradient the schedule's variable refers to."""
        self.played: dict[tuple[Action, object], Stretch] = {}

    def run(self, loop: Loop) -> list[Stretch]:
        """The actions of a loop, then the frees when the schedule returns."""
        return [*self._loop(loop), events("end of the schedule", self._returned())]

    @property
    def _state(self) -> tuple[object, ...]:
        return *self.held, self.sent, self.received

    def _loop(self, loop: Loop) -> list[Stretch]:
        found: list[Stretch] = []
        left = loop.times
        while left > 0:
            before = self._state
            parts: list[Stretch] = []
            for part in loop.parts:
                parts += [self._act(part)] if isinstance(part, Action) else self._loop(part)
            if self._state == before:
                return [*found, repeated(chain("actions", *parts), left)]
            found += parts
            left -= 1
        return found

    def _act(self, action: Action) -> Stretch:
        chunk, local = self.chunks[action.local], action.local
        if action.kind == "forward":
            before = events("receive", self._set_input(local))
            parts = [before, chunk.recv_forward, chunk.forward, chunk.send_forward]
            return passed(local, "forward", *parts, *[chunk.release] * (not chunk.last))
        received = events("receive", self._receive_grad(local))
        done = events("end of the backward pass", self._ended(local))
        return passed(
            local, "backward", received, chunk.recv_backward, chunk.backward, done, chunk.send_backward
        )

    def _set_input(self, local: int) -> Iterator[Event]:
        """Receive an input, which replaces the one that the decoder refers to."""
        chunk, (ahead, stale) = self.chunks[local], self.held[local]
        self.held[local] = _Held(ahead + 1, False)
        if chunk.first:
            return
        yield from allocs(chunk.input)
        if stale:
            yield from frees(chunk.input)
            if self.sent != local:
                yield from frees(chunk.input_grad)

    def _receive_grad(self, local: int) -> Iterator[Event]:
        """Receive the gradient of an output, which replaces the last one."""
        chunk = self.chunks[local]
        if not chunk.last:
            yield from allocs(chunk.output_grad)
        yield from self._let_go_of_received()
        self.received = None if chunk.last else local

    def _let_go_of_received(self) -> Iterator[Event]:
        if self.received is not None:
            yield from frees(self.chunks[self.received].output_grad)
        self.received = None

    def _ended(self, local: int) -> Iterator[Event]:
        """Free the gradient that was sent before, and the input unless the decoder still refers to it."""
        chunk, (ahead, _) = self.chunks[local], self.held[local]
        stale = ahead == 1 and not chunk.first
        if self.sent is not None and not self.held[self.sent].stale:
            yield from frees(self.chunks[self.sent].input_grad)
        self.held[local] = _Held(ahead - 1, stale)
        if not chunk.first and not stale:
            yield from frees(chunk.input)
        self.sent = None if chunk.first else local

    def _returned(self) -> Iterator[Event]:
        yield from self._let_go_of_received()
        if self.sent is not None and not self.held[self.sent].stale:
            yield from frees(self.chunks[self.sent].input_grad)
        self.sent = None
