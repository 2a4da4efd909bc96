"""One micro-batch through one pipeline stage, as traced from the model's forward pass."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any

from memplan.errors import MissingRule
from memplan.models import Model
from memplan.ops import cross_entropy, gradient_of_loss, scaled_loss, share_of_loss
from memplan.plan import Recompute
from memplan.record import AccumulateGrad, AddToIncoming, Alloc, Event, Free, Stretch, events
from memplan.shapes import INT64, Buffer, Parameter
from memplan.tape import OpContext, Tape, Tensor


@dataclass(frozen=True, slots=True)
class Segment:
    """What one part of the model does in one direction."""

    events: tuple[Event, ...] = ()
    _stretches: dict[tuple[Any, ...], Stretch] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def stretch(self, name: str) -> Stretch:
        """Its events under a name."""
        return self.made_once((name,), lambda: events(name, self.events))

    def made_once(self, key: tuple[Any, ...], make: Callable[[], Stretch]) -> Stretch:
        """A stretch that follows from the segment and the key alone: stages that share a trace share it."""
        if key not in self._stretches:
            self._stretches[key] = make()
        return self._stretches[key]


EMPTY = Segment()


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One kind of block in both directions.

    `entry`, `entry_backward`: as a stage's first block. Where its input came from another stage, that tensor
    is the schedule's and not freed here. `casts` frees what autocast kept of the block's weights, when the
    forward pass ends.
    """

    forward: Segment
    backward: Segment
    entry: Segment
    entry_backward: Segment
    casts: Segment


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """Forward and backward of the ends a stage owns and of its kinds of blocks; it equals only itself.

    Parameters are in the order of the module.

    Attributes whose meaning their name does not tell:
        blocks: one for each kind that was asked for. They share parameters, the buffers of their gradients,
            the boundary and its gradient.
        embed_casts, head_casts: free what autocast kept of a part's weights, when the forward pass ends.
        n_loss_backward: how many of `head_backward`'s events are the loss's.
        end_of_backward: frees what the backward pass has begun with, and the loss unless a schedule holds it.
        release_loss: frees the loss that a pipeline schedule holds until it returns.
        release: frees the stage's output, which a pipeline schedule holds until the backward pass is over.
        release_input_grad: frees the gradient that is sent to the stage before.
        products, products_backward: the results of the matrix products of either pass.
        boundary: the tensor handed from block to block; `sent` is that from stage to stage.
        boundary_grad: its gradient, which blocks add to in place and hand on.
    """

    embed: Segment = EMPTY
    head: Segment = EMPTY
    embed_casts: Segment = EMPTY
    head_casts: Segment = EMPTY
    loss: Segment = EMPTY
    head_backward: Segment = EMPTY
    n_loss_backward: int = 0
    blocks: tuple[Block, ...]
    embed_backward: Segment = EMPTY
    end_of_backward: Segment = EMPTY
    release: Segment = EMPTY
    release_loss: Segment = EMPTY
    release_input_grad: Segment = EMPTY
    embed_parameters: tuple[Parameter, ...] = ()
    block_parameters: tuple[Parameter, ...]
    head_parameters: tuple[Parameter, ...] = ()
    products: frozenset[Buffer]
    products_backward: frozenset[Buffer]
    boundary: Buffer
    sent: Buffer
    boundary_grad: Buffer

    def sending(self, forward: Segment) -> Segment:
        """A block's forward pass whose output is `sent`."""
        return Segment(
            tuple(
                Alloc(self.sent) if isinstance(e, Alloc) and e.buffer is self.boundary else e
                for e in forward.events
            )
        )


class Marks:
    """Cuts a tape's record into segments."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.n_events = self.n_parameters = 0

    def segment(self) -> Segment:
        """What the tape has done since the last segment."""
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
    recomputes: tuple[Recompute, ...],
    keep_logits: bool,
) -> Trace:
    """One micro-batch through a stage's ends and one block of each kind, forward and backward.

    `keep_logits`: the caller holds the logits until the stage's `release`, as pipeline schedules do.
    """
    return joined(
        _traced(model, context, first=first, last=last, recompute=recompute, keep_logits=keep_logits)
        for recompute in recomputes
    )


def joined(traces: Iterable[Trace]) -> Trace:
    """The first of these traces, with the blocks of all."""
    one, *others = traces
    return replace(one, blocks=(*one.blocks, *(_as_in(one, other) for other in others)))


def without_blocks(trace: Trace) -> Trace:
    """The ends of a stage that has no block: what would pass between them and a block is the schedule's.

    The last stage's head then makes the gradient of what the stage has received.
    """
    received, without_grad = Without(trace.boundary), Without(trace.boundary_grad)
    return replace(
        trace,
        embed=trace.sending(trace.embed),
        head=received(trace.head),
        head_backward=received(trace.head_backward),
        embed_backward=without_grad(trace.embed_backward),
    )


def _as_in(one: Trace, other: Trace) -> Block:
    """The block of another trace, in one trace's parameters, gradients and boundary."""
    parameters = dict(zip(other.block_parameters, one.block_parameters, strict=True))
    grads = gradients(one.blocks[0].backward)
    renamed = {other.boundary: one.boundary, other.boundary_grad: one.boundary_grad}
    for parameter, grad in gradients(other.blocks[0].backward).items():
        renamed[grad] = grads[parameters[parameter]]
    same = _Renamed(renamed, parameters)
    block = other.blocks[0]
    return Block(**{field.name: same(getattr(block, field.name)) for field in fields(Block)})


def _traced(
    model: Model, context: OpContext, *, first: bool, last: bool, recompute: Recompute, keep_logits: bool
) -> Trace:
    tape = Tape(context)
    cut = Marks(tape)
    x = entry_of(model, tape, first=first)
    entry = _buffer(x)
    embed, embed_parameters = cut.segment(), cut.parameters()
    n_embed = len(tape.nodes)
    tape.leave_autocast()
    embed_casts = cut.segment()
    with tape.named("blocks.*"):
        x = run_block(model, tape, x, recompute)
    boundary = _buffer(x)
    block, block_parameters = cut.segment(), cut.parameters()
    n_block = len(tape.nodes)
    tape.leave_autocast()
    block_casts = cut.segment()
    head = head_casts = loss = head_backward = end_of_backward = release_loss = EMPTY
    ends: list[Tensor] = []
    head_parameters: tuple[Parameter, ...] = ()
    n_loss_backward = 0
    held: Tensor | None = None
    if last:
        logits = model.head(x)
        del x
        head, head_parameters = cut.segment(), cut.parameters()
        tape.leave_autocast()
        head_casts = cut.segment()
        n_head = len(tape.nodes)
        end = cross_entropy(logits)
        held = logits if keep_logits else None
        del logits
        end = share_of_loss(end)
        scaled = scaled_loss(end)
        ends = [Tensor(tape, x.shape, x.dtype, x.storage) for x in ([] if keep_logits else [end]) + [scaled]]
        del end
        loss = cut.segment()
        start = gradient_of_loss(tape)
        tape.start_backward(scaled, start)
        del scaled
        tape.backward(down_to=n_head)
        n_loss_backward = len(tape.events) - cut.n_events
        tape.backward(down_to=n_block)
        head_backward = cut.segment()
    else:
        held = Tensor(tape, x.shape, x.dtype, x.storage)
        tape.start_backward(x, Tensor(tape, x.shape, x.dtype))
        del x
    tape.backward(down_to=n_embed)
    block_backward = cut.segment()
    input_grad = tape.nodes[-1].grad
    boundary_grad = _buffer(input_grad)
    if first:
        input_grad = None
    tape.backward()
    embed_backward = cut.segment()
    if last:
        del start
    if not keep_logits:
        ends.clear()
    end_of_backward = cut.segment()
    ends.clear()
    release_loss = cut.segment()
    del held
    release = cut.segment()
    del input_grad
    release_input_grad = cut.segment()
    if entry.n_bytes != boundary.n_bytes:
        raise MissingRule(f"a block's input ({entry}) and output ({boundary}) must be alike.")
    if "activations" in (entry.kind, boundary.kind):
        boundary.kind = "activations"
    same = _Renamed({entry: boundary})
    sent = Buffer("output of the stage", boundary.shape, boundary.dtype, boundary.n_bytes, boundary.kind)
    inside = (lambda segment: segment) if first else Without(entry)
    return Trace(
        embed=same(inside(embed)),
        embed_casts=embed_casts,
        head=same(head),
        head_casts=head_casts,
        loss=loss,
        head_backward=same(head_backward),
        n_loss_backward=n_loss_backward,
        blocks=(
            Block(
                forward=same(block),
                backward=same(block_backward),
                entry=same(inside(block)),
                entry_backward=same(inside(block_backward)),
                casts=block_casts,
            ),
        ),
        embed_backward=same(embed_backward),
        end_of_backward=end_of_backward,
        release=release if last else _Renamed({boundary: sent})(release),
        release_loss=release_loss,
        release_input_grad=release_input_grad,
        embed_parameters=embed_parameters,
        block_parameters=block_parameters,
        head_parameters=head_parameters,
        products=frozenset(tape.products["forward"]),
        products_backward=frozenset(tape.products["backward"]),
        boundary=boundary,
        sent=sent,
        boundary_grad=boundary_grad,
    )


def run_block(model: Model, tape: Tape, x: Tensor, recompute: Recompute) -> Tensor:
    """The model's block, recomputed or not."""
    if recompute == "none":
        return model.block(x)
    return tape.recomputed(model.block, x, selective=recompute == "selective")


def entry_of(model: Model, tape: Tape, *, first: bool) -> Tensor:
    """What a stage's first block gets: the embedding of tokens, or what another stage has sent."""
    context = tape.context
    if first:
        return model.embed(Tensor(tape, (context.micro_batch, context.seq_len), INT64))
    seq_len = context.seq_len // context.tp if context.sequence_parallel else context.seq_len
    node = tape.node((None,), (), lambda grad, saved: (None,))
    shape = (context.micro_batch, seq_len, model.d_model)
    return tape.new("received", shape, context.weight_dtype, node)


def _buffer(x: Tensor | None) -> Buffer:
    if x is None or x.storage is None:
        raise MissingRule(
            "the input of a block must own its bytes, and so must its gradient; a model's embed() must "
            "allocate its output."
        )
    return x.storage.buffer


class Without:
    """Leaves out what happens to a buffer."""

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer

    def __call__(self, segment: Segment) -> Segment:
        return Segment(tuple(e for e in segment.events if buffer_in(e) is not self.buffer))


class _Renamed:
    """Calls buffers and parameters by others' names: one block's output is the next one's input."""

    def __init__(
        self, buffers: dict[Buffer, Buffer], parameters: dict[Parameter, Parameter] | None = None
    ) -> None:
        self.buffers = buffers
        self.parameters = parameters or {}

    def __call__(self, segment: Segment) -> Segment:
        return Segment(tuple(map(self._event, segment.events)))

    def _event(self, event: Event) -> Event:
        match event:
            case AccumulateGrad(buffer, parameter):
                renamed = self.parameters.get(parameter, parameter)
                return AccumulateGrad(self.buffers.get(buffer, buffer), renamed)
            case Alloc(buffer) | Free(buffer) | AddToIncoming(buffer):
                return type(event)(self.buffers.get(buffer, buffer))
            case _:
                return event


def buffer_in(event: Event) -> Buffer | None:
    """The buffer that an event is about; None of computation and collectives."""
    return event.buffer if isinstance(event, (Alloc, Free, AccumulateGrad, AddToIncoming)) else None


def gradients(*segments: Segment) -> dict[Parameter, Buffer]:
    """The gradients that backward segments leave."""
    return {e.parameter: e.buffer for s in segments for e in s.events if isinstance(e, AccumulateGrad)}
