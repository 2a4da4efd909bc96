"""A traced module's recording as the engines' trace of a stage."""

from collections.abc import Iterable
from functools import lru_cache
from typing import Final

from memplan.engines.trace import Block, BlockKind, Segment, Trace, joined
from memplan.errors import MissingRule
from memplan.models.traced import DTYPES, TracedEvent, TracedModel, TracedTensor, buffer_at, shape_at, size_at
from memplan.record import AccumulateGrad, Alloc, Compute, Event, Free
from memplan.shapes import FP32, Buffer, DType, Parameter
from memplan.tape import OpContext


@lru_cache(maxsize=256)
def recorded(model: TracedModel, context: OpContext, kinds: tuple[BlockKind, ...]) -> Trace:
    """The trace of one micro-batch through the module, with one block of each kind of recomputation.

    Raises:
        MissingRule: for a precision, a size or a device that was not traced.
    """
    if context.device.type != model.device:
        raise MissingRule(
            f"{model.name} was traced with the kernels of device={model.device!r}, and those of "
            f"{context.device.type!r} differ; trace it with device={context.device.type!r}, or use "
            f"device={model.device!r}{' without a cluster' if model.device == 'cpu' else ''}.",
            kind="a traced model on a device that it was not traced for",
        )
    return joined([_recorded(model, context, kind) for kind in kinds], kinds)


def _recorded(model: TracedModel, context: OpContext, kind: BlockKind) -> Trace:
    batch, seq_len = context.micro_batch, context.seq_len
    recording = model.recording(
        weights=context.weight_dtype.name,
        autocast="" if context.autocast is None else context.autocast.name,
        recompute=kind.recompute,
        batch=batch,
        seq_len=seq_len,
    )
    buffers = [buffer_at(one, batch, seq_len) for one in recording.buffers]
    named: dict[str, Parameter] = {}
    for one, _ in model.parameters:
        named[one.name] = _parameter(one, context.weight_dtype)

    def own(parameters: Iterable[TracedTensor]) -> tuple[Parameter, ...]:
        return tuple([named[one.name] for one in parameters])

    part = {
        name: Segment(tuple([_event(one, buffers, named, batch, seq_len) for one in events]))
        for name, events in recording.parts.items()
    }
    loss = part["loss_backward"]
    head, after_head = part["head"], part["loss"]
    if context.autocast is not None:  # which the loss is computed in
        head, after_head = Segment((*head.events, *after_head.events)), Segment()
    return Trace(
        cast_inputs=part["inputs"],
        embed=part["embed"],
        head=head,
        loss=after_head,
        embed_casts=part["embed_casts"],
        head_casts=part["head_casts"],
        head_backward=Segment((*loss.events, *part["head_backward"].events)),
        n_loss_backward=len(loss.events),
        blocks={
            kind: Block(
                forward=part["block"],
                backward=part["block_backward"],
                entry=part["entry"],
                entry_backward=part["entry_backward"],
                entry_casts=part["entry_casts"],
                casts=part["block_casts"],
                parameters=own(model.block_parameters),
            )
        },
        embed_backward=part["embed_backward"],
        end_of_backward=part["end"],
        embed_parameters=own(model.embed_parameters),
        head_parameters=own(model.head_parameters),
        products=_products(part[name] for name in FORWARD),
        products_backward=_products(part[name] for name in BACKWARD),
        boundary=_buffer(buffers, recording.boundary, context.weight_dtype),
        sent=_buffer(buffers, recording.boundary, context.weight_dtype),
        boundary_grad=_buffer(buffers, recording.boundary_grad, context.weight_dtype),
        blocks_require_grad=recording.boundary_grad >= 0 or not model.n_layers,
        entry_requires_grad=recording.entry_requires_grad or not model.n_layers,
    )


FORWARD: Final = ("embed", "entry", "block", "head", "loss")
BACKWARD: Final = ("loss_backward", "head_backward", "block_backward", "entry_backward", "embed_backward")
"""The backward parts of a recording, which compute matrix products."""


def _products(parts: Iterable[Segment]) -> frozenset[Buffer]:
    """The results of matrix products: for each the newest tensor that is still alive."""
    found: set[Buffer] = set()
    for part in parts:
        alive: list[Buffer] = []
        for event in part.events:
            match event:
                case Alloc(buffer):
                    alive.append(buffer)
                case Free(buffer) if buffer in alive:
                    alive.remove(buffer)
                case Compute() if alive:
                    found.add(alive[-1])
    return frozenset(found)


def _parameter(one: TracedTensor, dtype: DType) -> Parameter:
    """A parameter in the type that weights are computed in; integers keep their own."""
    own = dtype if one.dtype == FP32.name else DTYPES[one.dtype]
    return Parameter(one.name, shape_at(one.shape, 1, 1), own, requires_grad=one.requires_grad)


def _event(
    traced: TracedEvent, buffers: list[Buffer], named: dict[str, Parameter], batch: int, seq_len: int
) -> Event:
    """A recorded event at a micro-batch and a sequence length."""
    match traced.kind:
        case "alloc":
            return Alloc(buffers[traced.buffer])
        case "free":
            return Free(buffers[traced.buffer])
        case "grad":
            return AccumulateGrad(buffers[traced.buffer], named[traced.parameter])
    return Compute(
        phase=traced.phase,
        flops=size_at(traced.flops, batch, seq_len),
        shape=shape_at(traced.shape, batch, seq_len),
        dtype=DTYPES[traced.dtype],
    )


def _buffer(buffers: list[Buffer], number: int, dtype: DType) -> Buffer:
    return buffers[number] if number >= 0 else Buffer("no boundary", (), dtype, 0, "temporaries")
