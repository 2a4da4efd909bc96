"""Megatron's schedules: no pipeline, 1F1B, and interleaved 1F1B, with the tensors that their variables hold.

A stage's received input lives as long as something refers to it: the list of inputs in flight, the decoder
(`set_input_tensor`), a variable of the schedule, or the graph of an output. Its gradient lives as long as the
input, or the variable that it was sent from. Outputs are freed once they are sent.

Source: megatron.core.pipeline_parallel.schedules:forward_backward_no_pipelining,
megatron.core.pipeline_parallel.schedules:forward_backward_pipelining_without_interleaving,
megatron.core.pipeline_parallel.schedules:forward_backward_pipelining_with_interleaving.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain as joined
from typing import Any, Final, NamedTuple

from memplan.engines.megatron.chunk import ModelChunk
from memplan.engines.megatron.options import megatron_options
from memplan.orders import Action, Loop, actions
from memplan.plan import Plan
from memplan.record import Event, PassPart, Stretch, allocs, chain, events, frees, passed, repeated
from memplan.shapes import FP32, INT32, buffer_of

NUM_TOKENS: Final = buffer_of("total_num_tokens", (), INT32)
"""The tokens of a step, which a schedule counts on the device."""

LOSS: Final = buffer_of("output_tensor or num_tokens", (), FP32)
"""The loss of a micro-batch, or its number of tokens, to which a variable refers until the next one's."""


def forward_backward(
    plan: Plan, pp_rank: int, chunks: Sequence[ModelChunk], *, first_step: bool = False
) -> list[Stretch]:
    """All passes of a rank's step; in the first one nothing is left of a step before."""
    options, m = megatron_options(plan), plan.n_micro_batches
    n_deferred = min(options.wgrad_deferral_limit or m, m) if options.defer_embedding_wgrad_compute else 0
    begins = events("start of the schedule", allocs(NUM_TOKENS))
    of_last = [(*[chunk.report] * m, *chunk.deferred * n_deferred) for chunk in chunks if chunk.last]
    ends = events("end of the schedule", frees(NUM_TOKENS, *[one for each in of_last for one in each]))
    if plan.pp == 1:
        return [begins, *_no_pipelining(chunks[0], plan.n_micro_batches, first_step=first_step), ends]
    order = plan.pipeline_schedule.order(plan.pp, pp_rank, plan.virtual_stages, plan.n_micro_batches)
    if plan.virtual_stages == 1:
        alone = _OneForwardOneBackward(chunks, first_step=first_step, n_deferred=n_deferred)
        return [begins, *alone.run(order), ends]
    played = _Interleaved(chunks, first_step=first_step, n_deferred=n_deferred)
    played.receives_early = options.overlap_p2p_comm_warmup_flush
    return [begins, *played.run(order), ends]


def _no_pipelining(chunk: ModelChunk, m: int, *, first_step: bool) -> list[Stretch]:
    """The micro-batches in turn; variables of the loop keep the last one's loss and tokens."""
    kept = events("variables of the schedule", allocs(*[LOSS, LOSS] * (m > 1)))
    forward, backward = passed(0, "forward", chunk.forward), passed(0, "backward", chunk.backward)
    others = repeated(chain("micro-batch", forward, backward), m - 1)
    first = passed(0, "forward", chunk.forward_after_forward) if first_step else forward
    return [first, kept, backward, others, events("end of the variables", frees(*[LOSS, LOSS] * (m > 1)))]


class _Input(NamedTuple):
    """A received input: of a chunk, for its i-th micro-batch of the step; -1: of the last step."""

    local: int
    i: int


class _References:
    """The variables of a schedule, the inputs that they refer to, and which gradients are alive."""

    def __init__(self, chunks: Sequence[ModelChunk]) -> None:
        self.chunks = chunks
        self.variables: dict[str, _Input | None] = {}
        self.counts: Counter[_Input] = Counter()
        self.graded: set[_Input] = set()
        """The inputs that are alive, with a gradient."""
        self.dispatchers: dict[int, _Input] = {}
        """The input whose bytes, not whose gradient, the dispatcher of a chunk's first layer holds."""
        self.sent: _Input | None = None
        """The input whose gradient was sent last."""

    def bind(self, name: str, target: _Input | None) -> Iterator[Event]:
        """Let a variable refer to an input; what nothing refers to any more is freed."""
        before = self.variables.get(name)
        self.variables[name] = target
        if target is not None:
            self.counts[target] += 1
        if before is not None:
            yield from self.drop(before)

    def drop(self, target: _Input) -> Iterator[Event]:
        """One reference less to an input."""
        self.counts[target] -= 1
        if not self.counts[target]:
            del self.counts[target]
            if target not in self.dispatchers.values():
                yield from frees(self.chunks[target.local].input)
            if target in self.graded and target != self.sent:
                yield from frees(self.chunks[target.local].input_grad)
            self.graded.discard(target)

    def hold(self, local: int, target: _Input | None) -> Iterator[Event]:
        """Let the dispatcher of a chunk's first layer hold another input, or none."""
        before = self.dispatchers.pop(local, None)
        if target is not None:
            self.dispatchers[local] = target
        if before is not None and before not in self.counts:
            yield from frees(self.chunks[local].input)

    def send(self, target: _Input | None) -> Iterator[Event]:
        """Let the schedule's variable refer to the gradient of another input."""
        before, self.sent = self.sent, target
        if target is not None:
            self.graded.add(target)
        if before is not None and before not in self.graded:
            yield from frees(self.chunks[before.local].input_grad)

    def state(self, forwards: Sequence[int]) -> tuple[object, ...]:
        """What is referred to, by its distance from the newest micro-batch of its chunk."""

        def seen(target: _Input | None) -> object:
            return None if target is None else (target.local, max(target.i - forwards[target.local], -9))

        return (
            *[(name, seen(target)) for name, target in sorted(self.variables.items())],
            *[seen(target) for _, target in sorted(self.dispatchers.items())],
            frozenset(map(seen, self.graded)), seen(self.sent),
        )  # fmt: skip


class _OneForwardOneBackward:
    """Plays a rank's actions in order; repetitions that leave what is referred to as it was are counted."""

    def __init__(self, chunks: Sequence[ModelChunk], *, first_step: bool, n_deferred: int) -> None:
        self.chunks = chunks
        self.n_deferred = n_deferred
        """How many micro-batches to come defer the gradient of the output layer's weight."""
        self.refs = _References(chunks)
        self.in_flight: list[deque[_Input]] = [deque() for _ in chunks]
        self.made: dict[tuple[Any, ...], Stretch] = {}
        self.forwards = [0] * len(chunks)
        self.went_back = False
        self.holds = [not first_step for _ in chunks]
        """Whether the dispatchers of each chunk hold what a backward pass has left."""
        self.has_loss = False
        """Whether variables refer to the loss and the tokens of a micro-batch."""
        self.received: int | None = None
        """The chunk whose output's gradient the schedule's variable refers to."""
        for local, chunk in enumerate(chunks):
            if not (first_step or chunk.first):
                left = _Input(local, -1)
                self.refs.variables[f"decoder {local}"] = left
                self.refs.counts[left] = 1
                self.refs.graded.add(left)
                if chunk.holds_received:
                    self.refs.dispatchers[local] = left

    def _once(self, name: str, found: Iterator[Event]) -> Stretch:
        """A stretch of events; equal ones are one object."""
        listed = tuple(found)
        key = name, *[(type(event), event) for event in listed]  # Alloc(b) == Free(b)
        return self._kept(key, lambda: events(name, listed))

    def _kept(self, key: tuple[Any, ...], make: Callable[[], Stretch]) -> Stretch:
        """The stretch of this key, which is made once."""
        if key not in self.made:
            self.made[key] = make()
        return self.made[key]

    def _passed(self, local: int, part: PassPart, *parts: Stretch) -> Stretch:
        """A pass of these parts; equal ones are one object."""
        return self._kept((part, local, *parts), lambda: passed(local, part, *parts))

    def run(self, order: Loop) -> list[Stretch]:
        """The actions in order, then the frees when the schedule returns."""
        return [*self._loop(order), self._once("return of the schedule", self._returned())]

    @property
    def _state(self) -> tuple[object, ...]:
        lengths = tuple(map(len, self.in_flight))
        return (
            *self.refs.state(self.forwards),
            lengths,
            self.received,
            self.went_back,
            tuple(self.holds),
            self.has_loss,
            self.n_deferred,
        )

    def _loop(self, loop: Loop) -> list[Stretch]:
        found: list[Stretch] = []
        left, state = loop.times, self._state
        while left > 0:
            before = state
            parts: list[Stretch] = []
            for part in loop.parts:
                parts += [self._act(part)] if isinstance(part, Action) else self._loop(part)
            state = self._state
            if state == before:
                return [*found, repeated(chain("actions", *parts), left)]
            found += parts
            left -= 1
        return found

    def _act(self, action: Action, *, overlaps: bool = False) -> Stretch:
        """The pass of an action; `overlaps`: the rank does not wait for what it sends."""
        chunk, local = self.chunks[action.local], action.local
        if action.kind == "forward":
            before = self._once("receive", joined(self.refs.hold(local, None), self._before_forward(local)))
            after = self._once("end of the forward pass", self._after_forward(local))
            sent = chunk.isend_forward if overlaps else chunk.send_forward
            sends = [sent, *[chunk.release] * self._releases(local), after]
            forward = chunk.forward if self.holds[local] else chunk.forward_after_forward
            self.holds[local] = False
            return self._passed(local, "forward", before, chunk.recv_forward, forward, *sends)
        before = self._once("receive", joined(self.refs.hold(local, None), self._before_backward(local)))
        after = self._once(
            "end of the backward pass", joined(self._defer(local), self._after_backward(local))
        )
        backward = chunk.backward_after_backward if self.holds[local] else chunk.backward
        self.went_back = self.holds[local] = True
        sent = chunk.isend_backward if overlaps else chunk.send_backward
        return self._passed(local, "backward", before, chunk.recv_backward, backward, after, sent)

    def _defer(self, local: int) -> Iterator[Event]:
        """Keep what the gradient of the output layer's weight is computed from at the end of the step.

        Source: megatron.core.utils:drain_embedding_wgrad_compute.
        """
        if self.chunks[local].last and self.n_deferred:
            self.n_deferred -= 1
            yield from allocs(*self.chunks[local].deferred)

    def _releases(self, local: int) -> bool:
        """Whether an output is freed as soon as it is sent."""
        return not self.chunks[local].last

    def _before_forward(self, local: int) -> Iterator[Event]:
        """Receive an input, and give it to the decoder."""
        if self.chunks[local].first:
            return
        received = _Input(local, self.forwards[local])
        yield from allocs(self.chunks[local].input)
        self.refs.counts[received] += 1
        self.in_flight[local].append(received)
        yield from self._keep_received(received)
        yield from self.refs.bind(f"decoder {local}", received)

    def _keep_received(self, received: _Input) -> Iterator[Event]:
        yield from self.refs.bind("input_tensor", received)

    def _after_forward(self, local: int) -> Iterator[Event]:
        """The output's graph refers to the input that it was computed from."""
        own = self.in_flight[local]
        self.forwards[local] += 1
        if self.chunks[local].last and not self.has_loss:
            self.has_loss = True
            yield from allocs(LOSS, LOSS)
        yield from self._keep_output(local, own[-1] if own else None)

    def _keep_output(self, local: int, of: _Input | None) -> Iterator[Event]:
        yield from self.refs.bind("output_tensor", of)

    def _before_backward(self, local: int) -> Iterator[Event]:
        """Receive the gradient of an output; take the oldest input from the list."""
        if not self.chunks[local].last:
            yield from allocs(self.chunks[local].output_grad)
        yield from self._let_go_of_received()
        self.received = None if self.chunks[local].last else local
        if not self.chunks[local].first:
            yield from self._taken(self.in_flight[local][0])

    def _taken(self, oldest: _Input) -> Iterator[Event]:
        yield from self.refs.bind("input_tensor", oldest)
        yield from self.refs.bind("output_tensor", oldest)

    def _after_backward(self, local: int) -> Iterator[Event]:
        """The input's gradient is sent; the list no longer refers to the input."""
        if self.chunks[local].first:
            yield from self.refs.send(None)
            return
        oldest = self.in_flight[local].popleft()
        if self.chunks[local].holds_received:
            yield from self.refs.hold(local, oldest)
        yield from self.refs.send(oldest)
        yield from self.refs.drop(oldest)

    def _let_go_of_received(self) -> Iterator[Event]:
        if self.received is not None:
            yield from frees(self.chunks[self.received].output_grad)
        self.received = None

    def _returned(self) -> Iterator[Event]:
        yield from self._let_go_of_received()
        yield from self.refs.send(None)
        yield from frees(*[LOSS, LOSS] * self.has_loss)
        for name in ("input_tensor", "output_tensor"):
            yield from self.refs.bind(name, None)


class _Interleaved(_OneForwardOneBackward):
    """The same for several chunks, each of whose receives begins before it is needed (`overlap_p2p_comm`).

    The next input is received after a forward pass, the next output's gradient after a backward pass; between
    warm-up and flush a rank does not wait for what it sends. The
    variable for the input keeps the last one of the warm-up to the end; passes run in functions of their own,
    whose variables end with them.
    """

    receives_early = False
    """Whether warm-up and flush receive before a pass, in buffers (`overlap_p2p_comm_warmup_flush`)."""

    def run(self, order: Loop) -> list[Stretch]:
        listed = list(actions(order))
        early, steady = self._early(listed), self._steady(listed)
        self.received_forwards = [0] * len(self.chunks)
        forwards = deque([action.local for action in listed if action.kind == "forward"])
        begins = self._once("receive", self._receive(forwards.popleft()))
        found, sent = list[Stretch](), list[Stretch]()
        for i, (action, coming) in enumerate(zip(listed, [*listed[1:], None], strict=True)):
            is_forward, parts = action.kind == "forward", list[Stretch]()
            if is_forward:
                parts, sent = sent, []
            ahead: list[Event] = []
            if i not in early:
                parts.append(self._act(action, overlaps=i in steady))
            if is_forward and forwards:
                ahead += self._receive(forwards.popleft())
            if coming is not None and coming.kind == "backward" and not (is_forward and i in early):
                ahead += self._receive_grad(coming.local)
            parts.append(self._once("receive", iter(ahead)))
            if i in early:
                parts.append(self._act(action, overlaps=i in steady))
            if is_forward and not self.chunks[action.local].last:
                sent = [self.chunks[action.local].release]
            if not self.went_back:
                parts, sent = parts + sent, []
            found.append(self._kept(("action", *parts), partial(chain, "action", *parts)))
        returned = self._once("return of the schedule", self._returned())
        return [begins, *_counted(found, _period(listed, 2 * len(self.chunks))), *sent, returned]

    @staticmethod
    def _one_by_one(listed: Sequence[Action]) -> range:
        """The places of the actions between warm-up and flush."""
        kinds = [action.kind for action in listed]
        return range(kinds.index("backward") - 1, len(kinds) - kinds[::-1].index("forward"))

    def _steady(self, listed: Sequence[Action]) -> range:
        """The places of the actions that do not wait for what they send."""
        return range(len(listed)) if self.receives_early else self._one_by_one(listed)

    def _early(self, listed: Sequence[Action]) -> set[int]:
        """The places of the actions before which the next tensor is received."""
        if not self.receives_early:
            return set()
        steady = self._one_by_one(listed)
        warm_up = range(0 if self.chunks[0].first else steady.start)
        return {*warm_up, *range(len(listed) if self.chunks[-1].last else steady.stop, len(listed))}

    def _releases(self, local: int) -> bool:
        return False

    def _receive(self, local: int) -> Iterator[Event]:
        in_variable = not (self.went_back or self.receives_early)
        if self.chunks[local].first:
            yield from self.refs.bind("input_tensor", None) if in_variable else ()
            return
        received = _Input(local, self.received_forwards[local])
        self.received_forwards[local] += 1
        yield from allocs(self.chunks[local].input)
        self.refs.counts[received] += 1
        if in_variable:
            yield from self.refs.bind("input_tensor", received)

    def _receive_grad(self, local: int) -> Iterator[Event]:
        if not self.chunks[local].last:
            yield from allocs(self.chunks[local].output_grad)

    def _before_forward(self, local: int) -> Iterator[Event]:
        if not self.chunks[local].first:
            received = _Input(local, self.forwards[local])
            self.in_flight[local].append(received)
            yield from self.refs.bind(f"decoder {local}", received)

    def _keep_output(self, local: int, of: _Input | None) -> Iterator[Event]:
        yield from self.refs.bind("output_tensor", None if self.chunks[local].last else of)

    def _before_backward(self, local: int) -> Iterator[Event]:
        yield from ()

    def _after_backward(self, local: int) -> Iterator[Event]:
        if not self.chunks[local].last:
            yield from frees(self.chunks[local].output_grad)
        yield from super()._after_backward(local)


def _period(listed: Sequence[Action], least: int) -> int:
    """The period of the actions in the middle of a schedule, at least `least`; 0 if they have none."""
    middle = len(listed) // 2
    for n in range(least, middle // 2 + 1, 2):
        if listed[middle - n : middle] == listed[middle : middle + n]:
            return n
    return 0


def _counted(found: Sequence[Stretch], period: int) -> list[Stretch]:
    """The stretches, of which the longest run that recurs with this period is counted."""
    begin = end = start = 0
    for i in range(len(found) - period if period else 0):
        if found[i] is not found[i + period]:
            start = i + 1
        elif i + 1 - start > end - begin:
            begin, end = start, i + 1
    n = (end - begin) // period + 1 if period else 1
    if n < 3:
        return list(found)
    loop = repeated(chain("actions", *found[begin : begin + period]), n)
    return [*found[:begin], loop, *found[begin + n * period :]]
