"""The trace of one micro-batch through one pipeline stage, from the model's forward pass."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar, cast

from memplan.errors import MissingRule
from memplan.models import Model
from memplan.models.recording import Ends
from memplan.ops import (
    gradient_of_loss,
    logits_in_float32,
    loss_as_returned,
    loss_of_one_step,
    scaled_loss,
    share_of_loss,
)
from memplan.placements import local_shape
from memplan.plan import Recompute
from memplan.record import AccumulateGrad, AddToIncoming, Alloc, Event, Free, Stretch, events, frees
from memplan.shapes import INT64, Buffer, Parameter, Role
from memplan.tape import OpContext, Tape, Tensor

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Segment:
    """The events of one part of the model in the forward or the backward pass."""

    events: tuple[Event, ...] = ()
    _made: dict[tuple[Any, ...], Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def stretch(self, name: str) -> Stretch:
        """The events as a named stretch."""
        return self.made_once((name,), lambda: events(name, self.events))

    @property
    def accumulated(self) -> tuple[AccumulateGrad, ...]:
        """The events that mark a parameter's gradient as accumulated."""
        return self.made_once(
            (AccumulateGrad,), lambda: tuple([e for e in self.events if isinstance(e, AccumulateGrad)])
        )

    def made_once(self, key: tuple[Any, ...], make: Callable[[], T]) -> T:
        """The result of `make`, which is called once for each key."""
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = make()
        return cast(T, found)


EMPTY = Segment()


class BlockKind(NamedTuple):
    """A kind of blocks and its recomputation."""

    kind: str
    recompute: Recompute


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The forward and backward pass of one kind of block, and its parameters in the module's order.

    `last_backward`: the last block's backward pass, where it frees what the head has left; empty: as any.
    `entry`, `entry_backward`, `entry_casts`: the same for a stage's first block, which waits for the
    embedding's collective and does not free a received input: the schedule does. `casts` frees autocast's
    copies of the block's weights, when the forward pass ends.
    """

    forward: Segment
    backward: Segment
    entry: Segment
    entry_backward: Segment
    entry_casts: Segment
    casts: Segment
    last_backward: Segment = EMPTY
    parameters: tuple[Parameter, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """Forward and backward pass of a stage's embedding, head and kinds of blocks; compared by identity.

    Attributes whose meaning their name does not tell:
        cast_inputs: makes inputs of the weights' type, before the module is called.
        blocks: one for each `BlockKind`. All share the boundary and its gradient; a block and the same one
            recomputed also share parameters and the buffers of their gradients.
        embed_casts, head_casts: free what autocast kept of a part's weights, when the forward pass ends.
        end_of_forward: on a stage without the head, frees what the forward function holds until it returns.
        n_loss_backward: how many of `head_backward`'s events are the loss's.
        ends: where the modules outside the blocks run.
        end_of_backward: frees the gradient that backward began with, and the loss unless a schedule holds it.
        release_loss: frees the loss that a pipeline schedule holds until it returns.
        release: frees the stage's output, which a pipeline schedule holds until the backward pass is over.
        release_input_grad: frees the gradient that is sent to the stage before.
        products, products_backward: the results of the matrix products of either pass.
        boundary: the tensor passed from block to block; `sent`: from stage to stage.
        boundary_grad: its gradient, which blocks add to in place and hand on.
        in_flight: what the embedding's collective holds until the first block reads its result.
        blocks_require_grad: whether a backward pass goes through the blocks, for something that is trained in
            or before them.
        entry_requires_grad: whether it goes on to the embedding.
        has_blocks: whether the model has any; if not, all of it is before them.
    """

    cast_inputs: Segment = EMPTY
    embed: Segment = EMPTY
    head: Segment = EMPTY
    embed_casts: Segment = EMPTY
    head_casts: Segment = EMPTY
    end_of_forward: Segment = EMPTY
    loss: Segment = EMPTY
    head_backward: Segment = EMPTY
    n_loss_backward: int = 0
    ends: Ends
    blocks: Mapping[BlockKind, Block]
    embed_backward: Segment = EMPTY
    end_of_backward: Segment = EMPTY
    release: Segment = EMPTY
    release_loss: Segment = EMPTY
    release_input_grad: Segment = EMPTY
    embed_parameters: tuple[Parameter, ...] = ()
    head_parameters: tuple[Parameter, ...] = ()
    products: frozenset[Buffer]
    products_backward: frozenset[Buffer]
    boundary: Buffer
    sent: Buffer
    boundary_grad: Buffer
    in_flight: tuple[Buffer, ...] = ()
    blocks_require_grad: bool = True
    entry_requires_grad: bool = True
    has_blocks: bool = True

    def gradients(self) -> dict[Parameter, Buffer]:
        """The buffer of each parameter's gradient after a backward pass."""
        blocks = [block.backward for block in self.blocks.values()]
        return gradients(self.loss, self.head_backward, *blocks, self.embed_backward)

    def sending(self, forward: Segment) -> Segment:
        """The forward pass of a block whose output, its newest `boundary`, is sent to another stage."""

        def renamed() -> Segment:
            found = list(forward.events)
            made = [i for i, e in enumerate(found) if isinstance(e, Alloc) and e.buffer is self.boundary]
            for newest in made[-1:]:
                found[newest] = Alloc(self.sent)
            return Segment(tuple(found))

        return forward.made_once((self.boundary, self.sent), renamed)


def kinds_of(blocks: Iterable[BlockKind]) -> frozenset[str]:
    """The kinds of blocks, however they are recomputed."""
    return frozenset([block.kind for block in blocks])


class Marks:
    """Cuts a tape's record into segments."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.n_events = self.n_parameters = 0

    def segment(self) -> Segment:
        """The tape's events since the last segment."""
        self.tape.end_stretch()
        events = self.tape.events[self.n_events :]
        self.n_events = len(self.tape.events)
        return Segment(tuple(events))

    def parameters(self) -> tuple[Parameter, ...]:
        """The parameters first used since the last call."""
        new = list(self.tape.parameters.values())[self.n_parameters :]
        self.n_parameters += len(new)
        return tuple(new)


@lru_cache(maxsize=1024)
def traced(
    model: Model,
    context: OpContext,
    *,
    first: bool,
    last: bool,
    kinds: tuple[BlockKind, ...],
    keep_logits: bool,
) -> Trace:
    """One micro-batch through a stage's ends and one block of each kind, forward and backward.

    `keep_logits`: the caller holds the logits until the stage's `release`, as pipeline schedules do.
    """

    def of_kind(kind: BlockKind, *, first: bool) -> Trace:
        stage = _TracedStage(
            model, context, first=first, last=last, kind=kind, kinds=kinds, keep_logits=keep_logits
        )
        trace = stage.run()
        if not stage.tape.reuses_received_cast:
            return trace
        (entry,), others = trace.blocks.values(), of_kind(kind, first=True)
        (again,) = others.blocks.values()
        other = _as_in(trace, others, again, [entry])
        block = replace(entry, forward=other.forward, backward=other.backward, casts=other.casts)
        return replace(trace, blocks={kind: block})

    return joined([of_kind(kind, first=first) for kind in kinds])


def joined(traces: Sequence[Trace]) -> Trace:
    """One trace with the blocks of all `traces`, which differ in the blocks' kinds or in recomputation."""
    one, *others = traces
    blocks = dict(one.blocks)
    for other in others:
        blocks |= {kind: _as_in(one, other, block, blocks.values()) for kind, block in other.blocks.items()}
    return replace(one, blocks=blocks)


@lru_cache(maxsize=256)
def without_blocks(trace: Trace) -> Trace:
    """The trace of a stage without blocks: the tensors between its ends and a block belong to the schedule.

    The last stage's head then makes the gradient of the received input.
    """
    head, ends = without(trace.head, trace.boundary), trace.ends
    return replace(
        trace,
        embed=trace.sending(Segment((*trace.embed.events, *frees(*trace.in_flight)))),
        head=head,
        ends=ends._replace(head=places_in(head, trace.head, ends.head)),
        head_backward=without(trace.head_backward, trace.boundary),
        embed_backward=without(trace.embed_backward, trace.boundary_grad),
    )


def places_in(kept: Segment, whole: Segment, places: tuple[int, int]) -> tuple[int, int]:
    """Positions among a whole segment's events as positions among the `kept` ones."""
    own = set(map(id, kept.events))
    begins, ends = (sum([id(event) in own for event in whole.events[:place]]) for place in places)
    return begins, ends


def _as_in(one: Trace, other: Trace, block: Block, known: Collection[Block]) -> Block:
    """A block of another trace, renamed to the buffers that blocks of this trace share with each other.

    Its parameters become the ones of equal names in the blocks that are `known` already.
    """
    if one.boundary.shape != other.boundary.shape or one.boundary.dtype != other.boundary.dtype:
        raise MissingRule(
            f"blocks of one stage that hand on {one.boundary} and {other.boundary} have no rule; make both "
            "equal."
        )
    if other.boundary.kind == "activations":
        one.boundary.kind = one.sent.kind = "activations"
    named = {parameter.name: parameter for each in known for parameter in each.parameters}
    parameters = {parameter: named.get(parameter.name, parameter) for parameter in block.parameters}
    grads = gradients(*[each.backward for each in known])
    renamed = {other.boundary: one.boundary, other.boundary_grad: one.boundary_grad}
    renamed |= dict(zip(other.in_flight, one.in_flight, strict=True))
    for parameter, grad in gradients(block.backward).items():
        renamed[grad] = grads.get(parameters[parameter], grad)
    same = _Renamed(renamed, parameters)
    segments = [field.name for field in fields(Block) if field.name != "parameters"]
    return Block(
        **{name: same(getattr(block, name)) for name in segments}, parameters=tuple(parameters.values())
    )


class _TracedStage:
    """A stage of one block while a micro-batch passes through it: the tensors it holds, the segments so far.

    A tensor is freed with its last reference, so attributes refer to each one for exactly as long as PyTorch
    does, and no local variable outlasts them.
    """

    def __init__(
        self,
        model: Model,
        context: OpContext,
        *,
        first: bool,
        last: bool,
        kind: BlockKind,
        kinds: Iterable[BlockKind],
        keep_logits: bool,
    ) -> None:
        self.model, self.kind = model, kind
        self.first, self.last, self.keep_logits = first, last, keep_logits
        self.tape = Tape(context)
        self.cut = Marks(self.tape)
        self.segments: dict[str, Segment] = {}
        self.parameters: dict[str, tuple[Parameter, ...]] = {"head": ()}
        self.n_loss_backward = self.n_before_head = self.n_head = 0
        self.tape.kinds = kinds_of(kinds)
        self.held = {"x": entry_of(model, self.tape, first=first)}
        self.input_grad: Tensor | None = None
        self.entry = _buffer(self.held["x"])
        self.holds_entry = False
        self.in_flight = tuple([_buffer(operand) for operand in self.held["x"].in_flight])
        self.shared = tuple([_buffer(tensor) for tensor in self.tape.shared.values()])

    def run(self) -> Trace:
        """Play a micro-batch's passes; their trace."""
        self.forward()
        if self.last:
            self.loss()
        else:
            self.send()
        self.backward()
        self.release()
        return self._trace()

    def _end(self, name: str) -> None:
        """Cut the tape's record: the events since the last cut are the segment of this name."""
        self.segments[name] = self.cut.segment()

    def _end_forward(self, name: str) -> int:
        """End a part's forward segment and autocast; return the number of nodes."""
        self._end(name)
        found = self.cut.parameters()
        self.parameters[name] = tuple(sorted(found, key=lambda one: self.model.place_in_module(one.name)))
        n_nodes = len(self.tape.nodes)
        self.tape.leave_autocast()
        self._end(f"{name}_casts")
        return n_nodes

    def forward(self) -> None:
        """Run the embedding and the block."""
        self.n_embed = self._end_forward("embed")
        self.held["x"] = run_block(self.model, self.tape, self.held["x"], self.kind)
        self.boundary = _buffer(self.held["x"])
        self.n_block = self._end_forward("block")
        freed = {e.buffer for e in self.segments["block"].events if isinstance(e, Free)}
        if self.first and self.model.holds_embedding and self.entry in freed:
            self.holds_entry = True
            self.tape.until_let_go.append(Free(self.entry))

    def loss(self) -> None:
        """Run the last stage's head and loss, and their backward pass."""
        tape, clones = self.tape, self.tape.context.clones_outputs
        logits = self.model.head(self.held.pop("x"))
        self.n_head, n_nodes = len(tape.events) - self.cut.n_events, len(tape.nodes)
        if self.model.computes_loss:
            end = self.model.loss(logits)
            n_head = self._end_forward("head")
        else:
            n_head = self._end_forward("head")
            end = self.model.loss(logits)
        if self.keep_logits:
            self.held["output"] = end.detach() if self.model.computes_loss else logits
        if tape.context.trainer:
            logits = logits_in_float32(logits)
            returned = loss_as_returned(end)
            logits = logits.new("clone of the logits", logits.shape, logits.dtype) if clones else logits
            del logits
            end = returned
            one_step = loss_of_one_step(end)
            scaled = scaled_loss(one_step)
            self.held["loss of one step"] = one_step.detach()
            del returned, one_step
        else:
            del logits
            end = end if tape.context.chunks_head else share_of_loss(end)
            scaled = scaled_loss(end)
        if not self.keep_logits:
            self.held["loss"] = end.detach()
        self.held["scaled loss"] = scaled.detach()
        del end
        self._end("loss")
        self.held["start"] = gradient_of_loss(tape, scaled.dtype)
        tape.start_backward(scaled, self.held["start"])
        del scaled
        tape.backward(down_to=n_head)
        self.n_loss_backward = len(tape.events) - self.cut.n_events
        tape.backward(down_to=n_nodes)
        self.n_before_head = len(tape.events) - self.cut.n_events
        tape.backward(down_to=self.n_block)
        self._end("head_backward")

    def send(self) -> None:
        """Send the output of a stage that is not the last; backward starts with a received gradient."""
        tape, x = self.tape, self.held.pop("x")
        tape.let_go()
        self._end("end_of_forward")
        self.held["output"] = x.detach()
        tape.start_backward(x, Tensor(tape, x.shape, x.dtype))

    def backward(self) -> None:
        """Run the backward pass of the block and the embedding."""
        tape = self.tape
        incoming = _buffer_of_grad(tape)
        tape.backward(down_to=self.n_embed)
        tape.shared.clear()
        self._end("block_backward")
        self.input_grad = tape.nodes[-1].grad
        self.boundary_grad = _buffer(self.input_grad)
        _check_handed_on(incoming, self.boundary_grad, self.segments["block_backward"])
        if self.first:
            self.input_grad = None
        tape.backward()
        if tape.offload is not None:
            tape.offload.end()
        self._end("embed_backward")

    def release(self) -> None:
        """Free what lives to the end of the backward pass, then what a schedule holds beyond it."""
        losses = "scaled loss", "loss of one step", "loss"
        for name in ("start", *(() if self.keep_logits else losses)):
            self.held.pop(name, None)
        self.model.after_backward(self.tape)
        self._end("end_of_backward")
        for name in losses:
            self.held.pop(name, None)
        self._end("release_loss")
        self.held.pop("output", None)
        self._end("release")
        self.input_grad = None
        self._end("release_input_grad")

    def _trace(self) -> Trace:
        """The trace: all segments, with one buffer for the tensor that is passed from block to block."""
        entry, boundary, found = self.entry, self.boundary, self.segments
        if entry.n_bytes != boundary.n_bytes:
            raise MissingRule(
                f"a block whose input ({entry}) and output ({boundary}) differ in size has no rule."
            )
        if "activations" in (entry.kind, boundary.kind):
            boundary.kind = "activations"
        same = _Renamed({entry: boundary})
        sent = Buffer("output of the stage", boundary.shape, boundary.dtype, boundary.n_bytes, boundary.kind)
        outside = () if self.first else (entry,)
        block, last_backward = found["block"], found["block_backward"]
        backward = last_backward if self.tape.offload is None else like_other_blocks(last_backward)
        return Trace(
            embed=same(without(found["embed"], *outside)),
            embed_casts=found["embed_casts"],
            head=same(found.get("head", EMPTY)),
            head_casts=found.get("head_casts", EMPTY),
            end_of_forward=same(found.get("end_of_forward", EMPTY)),
            loss=found.get("loss", EMPTY),
            head_backward=same(found.get("head_backward", EMPTY)),
            n_loss_backward=self.n_loss_backward,
            ends=Ends((0, len(found["embed"].events)), (0, self.n_head), 0, self.n_before_head),
            blocks={
                self.kind: Block(
                    forward=same(without(block, *self.in_flight)),
                    backward=same(without(backward, *self.shared)),
                    last_backward=EMPTY
                    if backward is last_backward
                    else same(without(last_backward, *self.shared)),
                    entry=same(without(block, *([entry] if self.holds_entry else outside))),
                    entry_backward=same(without(backward, *outside)),
                    entry_casts=found["block_casts"],
                    casts=found["block_casts"],
                    parameters=self.parameters["block"],
                )
            },
            embed_backward=same(found["embed_backward"]),
            end_of_backward=found["end_of_backward"],
            release=found["release"] if self.last else _Renamed({boundary: sent})(found["release"]),
            release_loss=found["release_loss"],
            release_input_grad=found["release_input_grad"],
            embed_parameters=self.parameters["embed"],
            head_parameters=self.parameters["head"],
            products=frozenset(self.tape.products["forward"]),
            products_backward=frozenset(self.tape.products["backward"]),
            boundary=boundary,
            sent=sent,
            boundary_grad=self.boundary_grad,
            in_flight=self.in_flight,
        )


def _buffer_of_grad(tape: Tape) -> Buffer | None:
    """The buffer of the gradient at the newest node; None if another stage sends it."""
    grad = tape.nodes[-1].grad
    return None if grad is None or grad.storage is None else grad.storage.buffer


def _check_handed_on(incoming: Buffer | None, boundary_grad: Buffer, backward: Segment) -> None:
    """Raise unless the block adds to its output's gradient and passes it on, as a residual sum does."""
    from_outside = incoming is None and AddToIncoming(boundary_grad) in backward.events
    if incoming is not boundary_grad and not from_outside:
        raise MissingRule(
            "a block that does not add to its output's gradient in place and hand it on has no rule; end the "
            "block with a residual sum, and begin the head with a norm."
        )


def run_block(model: Model, tape: Tape, x: Tensor, kind: BlockKind) -> Tensor:
    """A block of the model, recomputed or not."""
    name, recompute = kind
    with tape.named(f"{name}.*"), tape.cast_arguments():
        if recompute == "none":
            return model.block(x, name)
        return tape.recomputed(
            lambda y: model.block(y, name),
            x,
            selective=recompute == "selective",
            beside=model.blocks_called_with(tape.context.seq_len),
        )


def entry_of(model: Model, tape: Tape, *, first: bool) -> Tensor:
    """The input of a stage's first block: the embedding of tokens, or a received tensor."""
    context = tape.context
    tokens = Tensor(tape, (context.micro_batch, context.seq_len), INT64)
    if first:
        return model.embed(tokens)
    model.receive(tokens)
    placements = tape.over("tp", context.stream)
    shape = local_shape((context.micro_batch, context.seq_len, model.d_model), placements, tape.mesh)
    tape.received = node = tape.node((None,), (), lambda grad, saved: (None,))
    return tape.new("received", shape, context.weight_dtype, node, placements=placements)


def _buffer(x: Tensor | None) -> Buffer:
    if x is None or x.storage is None:
        raise MissingRule(
            "the input of a block must own its bytes, and so must its gradient; a model's embed() must "
            "allocate its output."
        )
    return x.storage.buffer


def without(segment: Segment, *buffers: Buffer) -> Segment:
    """The segment without the events of some buffers."""
    if not buffers:
        return segment
    left_out = set(buffers)
    return Segment(tuple([e for e in segment.events if buffer_in(e) not in left_out]))


class _Renamed:
    """Renames buffers and parameters: one block's output is the next block's input."""

    def __init__(
        self, buffers: dict[Buffer, Buffer], parameters: dict[Parameter, Parameter] | None = None
    ) -> None:
        self.buffers = buffers
        self.parameters = parameters or {}

    def __call__(self, segment: Segment) -> Segment:
        return Segment(tuple(map(self._event, segment.events)))

    def _event(self, event: Event) -> Event:
        if isinstance(event, AccumulateGrad):
            buffer, parameter = event
            return AccumulateGrad(self.buffers.get(buffer, buffer), self.parameters.get(parameter, parameter))
        if isinstance(event, Alloc | Free | AddToIncoming) and event.buffer in self.buffers:
            return type(event)(self.buffers[event.buffer])
        return event


def like_other_blocks(last: Segment) -> Segment:
    """A backward pass that frees, of what came back from the host, the next block's input, not the head's.

    The last block's frees what came back for the head.
    """
    own = [e.buffer for e in last.events if isinstance(e, Alloc) and e.buffer.role is Role.FROM_HOST]
    found: list[Event] = []
    for event in last.events:
        if isinstance(event, Free) and event.buffer.role is Role.FROM_HOST and event.buffer not in own:
            found += frees(*own)
            own = []
        else:
            found.append(event)
    return Segment(tuple(found))


def from_host(trace: Trace) -> Iterator[Buffer]:
    """The buffers of what comes back from the host on a stream of its own."""
    blocks = [block.backward for block in trace.blocks.values()]
    for segment in (trace.head_backward, *blocks, trace.embed_backward):
        yield from [
            e.buffer for e in segment.events if isinstance(e, Alloc) and e.buffer.role is Role.FROM_HOST
        ]


def buffer_in(event: Event) -> Buffer | None:
    """The buffer of an event; None for computation and collectives."""
    return event.buffer if isinstance(event, (Alloc, Free, AccumulateGrad, AddToIncoming)) else None


def gradients(*segments: Segment) -> dict[Parameter, Buffer]:
    """The buffer of each parameter's gradient after these backward segments."""
    return {e.parameter: e.buffer for s in segments for e in s.accumulated}
