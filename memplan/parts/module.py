"""A stage's module as a state machine: each pass is a stretch of allocations, computation and traffic.

A pass depends on what earlier passes of the step left behind: gradients, gathered weights. That is the
module's `state`, which each pass changes. Each pass is played once from each state, and looked up after.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from copy import copy
from functools import partial
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any, Generic, Literal, NamedTuple, Protocol, Self, TypeVar, cast

from memplan.orders import ActionKind
from memplan.parts.stage import ModelStage, QuicklyCopied
from memplan.passes.backward import added_to_older, backward_order, from_outside
from memplan.passes.trace import Segment, Trace
from memplan.record import (
    AccumulateGrad,
    Alloc,
    Collective,
    CollectiveKind,
    Event,
    Free,
    PassPart,
    Stretch,
    allocs,
    chain,
    events,
    frees,
    passed,
    repeated,
)
from memplan.shapes import Buffer, buffer_of


class ModuleState(Protocol):
    """A module's state between two passes of a step: a hashable value."""

    @property
    def has_grads(self) -> bool:
        """Whether there are gradients that a backward pass adds its own to: of an earlier pass, or zeroed."""


State = TypeVar("State", bound=ModuleState)


class StageModule(ABC, QuicklyCopied, Generic[State]):
    """A stage's module as a pipeline or a training loop calls it, one micro-batch at a time.

    Attributes, of a micro-batch:
        fwd_recv, fwd_send, bwd_recv, bwd_send: the receives and sends of a pipeline stage.
        receive_input, receive_grad: allocate tensors for the stage's input and for the gradient of its
            output, which other ranks send; `release_received_input`, `release_received_grad` free them.
        release: frees the stage's output, which the schedule has held; `release_loss` the loss.
        release_input_grad: frees the gradient of the stage's input, which was sent to the stage before.

    `original`: the module that this one is a fresh copy of; the two share their buffers.

    Source: `torch.distributed.pipelining.stage:_PipelineStageBase.get_fwd_recv_ops` and the three beside it.
    """

    def __init__(self, stage: ModelStage, initial: State) -> None:
        self.stage: Any = stage  # the engine's own kind of `ModelStage`
        self.trace = stage.trace
        self.initial = self.state = initial
        self.original: StageModule[State] = self
        self._played: dict[Hashable, tuple[Stretch, State]] = {}
        trace, boundary = self.trace, self.trace.boundary
        self.received_input = buffer_of("received input", boundary.shape, boundary.dtype)
        self.received_grad = buffer_of("received gradient", boundary.shape, boundary.dtype)
        inputs = [self.received_input] * (not stage.first)
        grads = [self.received_grad] * (not stage.last)
        self.receive_input = events("receive", allocs(*inputs))
        self.receive_grad = events("receive", allocs(*grads))
        self.release_received_input = events("release of the received input", frees(*inputs))
        self.release_received_grad = events("release of the received gradient", frees(*grads))
        self.release = trace.release.stretch("release of the stage's output")
        self.release_loss = trace.release_loss.stretch("release of the loss")
        self.release_input_grad = trace.release_input_grad.stretch("release of the input's gradient")
        self.fwd_recv = self._p2p("recv", "activations")
        self.fwd_send = self._p2p("send", "activations")
        self.bwd_recv = self._p2p("recv", "activation gradients")
        self.bwd_send = self._p2p("send", "activation gradients")

    def fresh(self) -> Self:
        """A copy of the module at the start of a step, which shares the passes that have been played."""
        other = copy(self)
        other.state = self.initial
        return other

    def in_first_step(self) -> Self:
        """A copy as in a training's first step, which shares its buffers."""
        return self.fresh()

    def play(self, action: Hashable, make: Callable[[], Stretch]) -> Stretch:
        """The stretch of an action in the present state; `make` plays it and changes the state."""
        key = action, self.state
        if key not in self._played:
            made = make()
            self._played[key] = made, self.state
        made, self.state = self._played[key]
        return made

    def forward(self, *, replaces: bool = False) -> Stretch:
        """The forward pass up to the loss.

        `replaces`: it overwrites the schedule's variable for the output, which frees the previous output.
        """
        release = self.release if replaces else None
        return self.play(("forward", replaces), lambda: self._forward(release))

    def backward(self) -> Stretch:
        """The backward pass."""
        return self.play("backward", self._backward)

    def backward_input(self) -> Stretch:
        """The first part of a split backward pass: the gradient of the stage's input."""
        return self.play("backward-input", self._backward_input)

    def backward_weight(self) -> Stretch:
        """The second part: the gradients of the stage's weights."""
        return self.play("backward-weight", self._backward_weight)

    def require_gradient_sync(self) -> None:
        """Ends `no_sync`: the backward passes that follow reduce gradients."""
        return

    def unshard(self) -> list[Stretch]:
        """Gathers the weights that FSDP2 has sharded ahead of time."""
        return []

    def wait_for_unshard(self) -> list[Stretch]:
        """Copies what FSDP2 has gathered ahead of time into the unsharded weights."""
        return []

    def reduce_grads(self) -> list[Stretch]:
        """The reductions that FSDP2 has put off until a schedule's last backward pass."""
        return []

    def reshard(self) -> list[Stretch]:
        """Frees the weights that FSDP2 has gathered."""
        return []

    def sharded_grads(self) -> Iterable[tuple[Buffer, int]]:
        """FSDP's gradients, one flat tensor for each unit, and how many equal units there are."""
        return ()

    @abstractmethod
    def _backward(self) -> Stretch: ...

    @abstractmethod
    def _made_grads(self) -> None:
        """Change the state after a second part of a backward pass, which has made gradients."""

    def _forward(self, release: Stretch | None) -> Stretch:
        blocks = (repeated(segment.stretch("forward: block"), n) for segment, n in self.stage.forward_order)
        casts = self.trace.cast_inputs.stretch("forward: casts of inputs")
        embedding = before_blocks(self.trace, "forward", self.trace.embed.events)
        return chain("forward", casts, embedding, *blocks, *self._forward_end(release))

    def _forward_end(self, release: Stretch | None) -> list[Stretch]:
        trace = self.trace
        parts = []
        if self.stage.last:
            parts.append(trace.head.stretch("forward: head"))
        elif trace.end_of_forward.events:
            parts.append(trace.end_of_forward.stretch("forward: end"))
        if self.stage.op_context.autocast:
            name, ((entry, n_entry), *others) = "forward: end of autocast", self.stage.blocks
            casts = [(entry.entry_casts, min(1, n_entry)), (entry.casts, n_entry - 1)]
            casts += [(block.casts, n) for block, n in others]
            parts.append(trace.embed_casts.stretch(name))
            parts += [repeated(segment.stretch(name), n) for segment, n in casts]
            parts.append(trace.head_casts.stretch(name))
        parts += [] if release is None else [release]
        if self.stage.last:
            parts.append(self._loss())
        return parts

    def _loss(self) -> Stretch:
        return self.trace.loss.stretch("loss")

    def returned(self) -> list[Stretch]:
        """The frees when the backward pass returns."""
        trace = self.trace
        return [trace.end_of_backward.stretch("backward: end")] if self.stage.last else []

    def _backward_input(self) -> Stretch:
        split, name = self.stage.split, "backward: inputs of the blocks"
        return chain(
            "backward",
            split.loss.stretch("backward: loss"),
            split.head.stretch("backward: input of the head"),
            *[repeated(segment.stretch(name), n) for segment, n in split.blocks],
            *[repeated(segment.stretch("backward: end"), n) for segment, n in split.end],
        )

    def _backward_weight(self) -> Stretch:
        split = self.stage.split
        order = [*split.weights, (split.weights_head, 1), *split.weights_end]
        played = chain("backward", *[repeated(self._weights(segment), n) for segment, n in order])
        self._made_grads()
        return played

    def _weights(self, segment: Segment) -> Stretch:
        """A segment of the second part: first gradients are kept, later ones are added to them and freed."""
        name, has_grads = "backward: weights", self.state.has_grads

        def made() -> Stretch:
            kept = set() if has_grads else set(self.trace.gradients().values())
            return events(name, (e for e in segment.events if not (isinstance(e, Free) and e.buffer in kept)))

        return segment.made_once((name, has_grads), made)

    def _p2p(self, kind: CollectiveKind, what: str) -> Stretch:
        n_bytes = self.trace.boundary.n_bytes
        return events(f"{kind} {what}", [Collective(kind=kind, axis="pp", what=what, payload_bytes=n_bytes)])


class PlainState(NamedTuple):
    """Whether there are gradients."""

    has_grads: bool


class PlainModule(StageModule[PlainState]):
    """A module without a wrapper: no other rank has its weights.

    `zeroed`: its gradients are zeroed after each step, and stay.
    """

    def __init__(self, stage: ModelStage, *, zeroed: bool) -> None:
        super().__init__(stage, PlainState(has_grads=zeroed))

    def _made_grads(self) -> None:
        self.state = PlainState(has_grads=True)

    def _backward(self) -> Stretch:
        played = chain(
            "backward",
            events("backward: loss and head", self._added(self.trace.head_backward)),
            *self._blocks(),
            before_blocks(self.trace, "backward", self._added(self.trace.embed_backward)),
            *self.returned(),
        )
        self._made_grads()
        return played

    def _loss(self) -> Stretch:
        return events("loss", self._added(self.trace.loss))

    def _added(self, segment: Segment) -> tuple[Event, ...]:
        """A segment's events; gradients are added to older ones if there are any."""
        return added_to_older(segment) if self.state.has_grads else segment.events

    def _blocks(self) -> Iterator[Stretch]:
        """The blocks' backward passes, the last first; its gradient comes from the head or another stage."""
        outside = not self.stage.last
        for segment, n in backward_order(self.stage.blocks):
            body = self._added(segment)
            if outside:
                body = from_outside(body, self.trace.boundary_grad)
            yield repeated(events("backward: block", body), n)
            outside = False


def repeat(n: int, play: Callable[[], Stretch], modules: Sequence[StageModule[Any]]) -> list[Stretch]:
    """Calls `play` up to `n` times; once a call changes no module's state, the rest are counted."""
    found: list[Stretch] = []
    while n > 0:
        before = [module.state for module in modules]
        played = play()
        if [module.state for module in modules] == before:
            return [*found, repeated(played, n)]
        found.append(played)
        n -= 1
    return found


def turns(n: int, cuts: set[int], turn: Callable[[int], Stretch], module: StageModule[Any]) -> list[Stretch]:
    """Plays turns 0 to n - 1 of a schedule on one stage; turns between neighbouring `cuts` are equal."""
    found: list[Stretch] = []
    for start, stop in pairwise(sorted(cut for cut in cuts if 0 <= cut <= n)):
        found += repeat(stop - start, partial(turn, start), [module])
    return found


def before_blocks(trace: Trace, phase: Literal["forward", "backward"], found: Sequence[Event]) -> Stretch:
    """A pass through what comes before the blocks; of a module without blocks by the module's own parts."""
    if trace.has_blocks:
        return events(f"{phase}: embedding", found)
    parts = groupby(zip(_parts_of(phase, found), found, strict=True), key=itemgetter(0))
    return chain(phase, *[events(f"{phase}: {part}", [e for _, e in own]) for part, own in parts])


def _parts_of(phase: Literal["forward", "backward"], found: Sequence[Event]) -> list[str]:
    """The child of a module in which each event happens.

    In the forward pass that is told by the names of results (child: operation), in the backward pass by the
    parameter whose gradient comes next.
    """
    names, part = [], "module"
    for event in found if phase == "forward" else reversed(found):
        match event:
            case Alloc(buffer) if phase == "forward" and ": " in buffer.name:
                part = buffer.name.partition(":")[0].partition(".")[0]
            case AccumulateGrad(parameter=parameter):
                part = parameter.name.partition(".")[0]
        names.append(part)
    return names if phase == "forward" else names[::-1]


def with_p2p(
    module: StageModule[Any],
    kind: ActionKind,
    parts: Iterable[Stretch],
    *,
    next_is_here: bool = False,
    previous_is_here: bool = False,
) -> tuple[Stretch, ...]:
    """A stage's pass between its receive and its send; two stages of one rank need neither."""
    first, last = module.stage.first or previous_is_here, module.stage.last or next_is_here
    match kind:
        case "forward":
            return *[module.fwd_recv] * (not first), *parts, *[module.fwd_send] * (not last)
        case "backward-weight":
            return tuple(parts)
    return *[module.bwd_recv] * (not last), *parts, *[module.bwd_send] * (not first)


def played(module: StageModule[Any], kind: ActionKind) -> list[Stretch]:
    """What a stage's module does in an action, without what it receives, sends and waits for.

    The pipeline's first stage runs its whole backward pass where other stages run the second part.

    Source: `torch.distributed.pipelining.stage:_PipelineStageBase.backward_weight_one_chunk`.
    """
    match kind:
        case "unshard":
            return module.unshard()
        case "reshard":
            return module.reshard()
        case "reduce":
            return module.reduce_grads()
        case "forward":
            return [module.forward()]
        case "backward-input":
            return [] if module.stage.first else [module.backward_input()]
        case "backward-weight" if not module.stage.first:
            return [module.backward_weight()]
    return [module.backward()]


def named_pass(module: StageModule[Any], local: int, kind: ActionKind, parts: Sequence[Stretch]) -> Stretch:
    """What is played for an action of the rank's `local`-th stage, marked as its pass."""
    first = module.stage.first
    if kind == "backward-input" and first:
        return chain("backward", *parts)
    whole = kind == "last-backward" or (kind == "backward-weight" and first)
    return passed(local, "backward" if whole else cast(PassPart, kind), *parts)


def forward_pass(module: StageModule[Any], *parts: Stretch) -> Stretch:
    """A micro-batch's forward pass with the receive before it and the send after it."""
    return passed(0, "forward", *with_p2p(module, "forward", parts))


def backward_pass(module: StageModule[Any], *parts: Stretch) -> Stretch:
    """A micro-batch's backward pass with the receive before it and the send after it."""
    return passed(0, "backward", *with_p2p(module, "backward", parts))


def accumulation(module: StageModule[Any], m: int) -> list[Stretch]:
    """A training loop's micro-batches; DDP's are under `no_sync` but for the last."""

    def micro_batch() -> Stretch:
        forward = forward_pass(module, module.forward())
        return chain("micro-batch", forward, backward_pass(module, module.backward()))

    steps = repeat(m - 1, micro_batch, [module])
    module.require_gradient_sync()
    return [*steps, *repeat(1, micro_batch, [module])]
