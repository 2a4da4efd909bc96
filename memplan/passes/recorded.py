"""A traced module's recording as the engines' trace of a stage."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, chain, islice
from typing import Final, cast

from memplan.errors import MissingRule
from memplan.kernels import FREES_WORKSPACES
from memplan.models.base import BLOCKS
from memplan.models.recording import (
    DTYPES,
    MODULE,
    SUFFIXES,
    Computation,
    Cut,
    Ends,
    Recording,
    TracedEvent,
    TracedTensor,
    buffer_at,
    called_kinds,
    part_of_kind,
    shape_at,
    size_at,
)
from memplan.models.traced import TracedModel
from memplan.models.workspaces import Asked
from memplan.ops.kernel_calls import kernel_events
from memplan.passes.trace import EMPTY, Block, BlockKind, Segment, Trace, joined, places_in, without
from memplan.plan import Recompute
from memplan.record import (
    AccumulateGrad,
    AddToIncoming,
    Alloc,
    Collective,
    CollectiveKind,
    Compute,
    ComputeKind,
    Event,
    Free,
    HookKind,
    ModuleHook,
    Phase,
    UnitHook,
    flops_of,
    frees,
)
from memplan.shapes import FP32, UINT8, Buffer, DType, Parameter, Shape, buffer_of
from memplan.tape import OpContext


@lru_cache(maxsize=256)
def recorded(
    model: TracedModel,
    context: OpContext,
    kinds: tuple[BlockKind, ...],
    ends: tuple[bool, bool] | None = None,
) -> Trace:
    """The trace of one micro-batch through the module, with one block of each kind of recomputation.

    `ends`: for a stage of a pipeline, whether it is the first, and whether it is the last; None: the whole
    module.

    Raises:
        MissingRule: for a precision, a size or a device that was not traced; for a stage that cannot be cut.
    """
    if model.device == "cuda" and context.device.capability is not None and not context.device.at_least(8):
        raise MissingRule(
            f"{model.name} was traced with the kernels of GPUs of compute capability 8.0 or more, and older "
            "ones have others; use such a GPU.",
            kind="a traced model on a GPU older than compute capability 8.0",
        )
    if not context.device.on_cpu and not (2, 12) <= context.torch_release < FREES_WORKSPACES:
        raise MissingRule(
            f"{model.name} was traced, and it is not known which of its products have a bias, by which their "
            "workspaces differ in torch 2.11 and from 2.15 on; use torch_version '2.12' to '2.14'.",
            kind="a traced model with CUDA's kernels of torch 2.11 or 2.15",
        )
    if context.device.type != model.device:
        raise MissingRule(
            f"{model.name} was traced with the kernels of device={model.device!r}, and those of "
            f"{context.device.type!r} differ; trace it with device={context.device.type!r}, or use "
            f"device={model.device!r}{' without a cluster' if model.device == 'cpu' else ''}.",
            kind="a traced model on a device that it was not traced for",
        )
    by_recompute: dict[Recompute, list[str]] = {}
    for kind, recompute in kinds:
        by_recompute.setdefault(recompute, []).append(kind)
    entry = kinds[0].kind
    return joined([_recorded(model, context, again, own, entry, ends) for again, own in by_recompute.items()])


def _recorded(
    model: TracedModel,
    context: OpContext,
    recompute: Recompute,
    kinds: Sequence[str],
    entry: str,
    ends: tuple[bool, bool] | None,
) -> Trace:
    """The trace with blocks of these kinds; the first block is of the kind `entry`."""
    recording = _recording_of(model, context, recompute)
    buffers = [buffer_at(one, context.micro_batch, context.seq_len) for one in recording.buffers]
    named = {one.name: _parameter(one, model, context.weight_dtype) for one, _ in model.parameters}

    def own(parameters: Iterable[TracedTensor]) -> tuple[Parameter, ...]:
        return tuple([named[one.name] for one in parameters])

    part, starts, (first, last) = {}, {}, ends or (True, True)
    for name, events in recording.parts.items():
        asked = model.asked if first or name != "embed" else None  # a later stage has no weights there
        expanded = list(_events(events, buffers, named, asked, context))
        starts[name] = [0, *accumulate(map(len, expanded))]
        part[name] = Segment(tuple(chain.from_iterable(expanded)))
    whole = part
    sent = boundary = _buffer(buffers, recording.boundary, context.weight_dtype)
    if ends is not None:
        sent = Buffer("output of the stage", boundary.shape, boundary.dtype, boundary.n_bytes, "activations")
        part = _of_stage(part, model, recording, buffers, sent, context, entry, first=first, last=last)
    loss, head, after_head = part["loss_backward"], part["head"], part["loss"]
    further = [kind for kind in called_kinds(model.of_kind) if kind != BLOCKS]
    if context.autocast is not None and ends is None:
        head, after_head = _within_autocast(head, after_head, context)
    known = {kind: own(model.of_kind[kind].parameters) for kind in kinds}
    blocks = {BlockKind(kind, recompute): _block(part, kind, entry, known[kind]) for kind in kinds}
    return Trace(
        cast_inputs=part["inputs"],
        embed=_with_memory(part["embed"], "forward"),
        head=_with_memory(head, "forward"),
        loss=_with_memory(after_head, "forward"),
        embed_casts=part["embed_casts"],
        head_casts=part["head_casts"],
        head_backward=_with_memory(Segment((*loss.events, *part["head_backward"].events)), "backward"),
        n_loss_backward=len(loss.events),
        ends=_ends(recording, starts, whole, part),
        blocks=blocks,
        embed_backward=_with_memory(part["embed_backward"], "backward"),
        end_of_backward=part["end"],
        end_of_forward=part.get("end_of_forward", EMPTY),
        release=part.get("release", EMPTY),
        release_loss=part.get("release_loss", EMPTY),
        release_input_grad=part.get("release_input_grad", EMPTY),
        embed_parameters=own(model.embed_parameters) if first else (),
        head_parameters=own(model.head_parameters) if last else (),
        products=_products(part[name] for name in (*FORWARD, *further)),
        products_backward=_products(part[name] for name in (*BACKWARD, *_backward_of(further))),
        boundary=boundary,
        sent=sent,
        boundary_grad=_buffer(buffers, recording.boundary_grad, context.weight_dtype),
        blocks_require_grad=recording.boundary_grad >= 0 or _is_passed_backward(model, further, part),
        entry_requires_grad=recording.entry_requires_grad or not model.n_layers or not first,
        has_blocks=model.n_layers > 0,
    )


def divided_inputs(model: TracedModel, context: OpContext) -> Segment:
    """The events in which a rank takes its part of `context.micro_batch` sequences, before the passes."""
    recording = _recording_of(model, context, "none")
    buffers = [buffer_at(one, context.micro_batch, context.seq_len) for one in recording.buffers]
    return Segment(tuple(chain.from_iterable(_events(recording.parts["inputs"], buffers, {}, None, context))))


def _with_memory(segment: Segment, phase: Phase) -> Segment:
    """The segment, and what its kernels beside products move: three times what they allocate.

    A trace does not say what a kernel reads. Assumes: twice what it writes, as the gradient of an activation
    does, which reads the incoming gradient and a saved tensor.
    Neglects: in a backward pass, what of it is recomputation.
    """
    written: list[int] = []
    for event in segment.events:
        if isinstance(event, Alloc):
            written.append(event.buffer.n_bytes)
        elif isinstance(event, Compute) and written:
            written.pop()  # the result of a product
    if not written:
        return segment
    moved = Compute(
        kind=ComputeKind.MEMORY, phase=phase, flops=0, shape=(), dtype=UINT8,
        moved_bytes=3 * sum(written), n_kernels=len(written),
    )  # fmt: skip
    return Segment((*segment.events, moved))


def _is_passed_backward(model: TracedModel, kinds: Sequence[str], part: Mapping[str, Segment]) -> bool:
    """Whether the backward pass goes through any units of these kinds: the last one may get no gradient."""
    units = [kind for kind in kinds if model.role(kind) in ("block", "module")]
    return not model.n_layers or any(part[name].events for name in _backward_of(units))


def _backward_of(kinds: Iterable[str]) -> list[str]:
    return [f"{kind}_backward" for kind in kinds]


def _recording_of(model: TracedModel, context: OpContext, recompute: Recompute) -> Recording:
    return model.recording(
        weights=context.weight_dtype.name,
        autocast="" if context.autocast is None else context.autocast.name,
        recompute=recompute,
        batch=context.micro_batch,
        seq_len=context.seq_len,
        units=MODULE if context.hooks_modules else context.cast_units,
        cp_rank=context.cp_rank,
        rotate=context.cp_rotate_method,
    )


def _within_autocast(head: Segment, loss: Segment, context: OpContext) -> tuple[Segment, Segment]:
    """What runs under autocast, to the loss, and what comes after it: the scaling of the loss.

    The Trainer takes the loss outside autocast.
    """
    n_within = 0 if context.trainer else len(loss.events) - context.scales_loss
    return Segment((*head.events, *loss.events[:n_within])), Segment(loss.events[n_within:])


def _ends(
    recording: Recording,
    starts: Mapping[str, Sequence[int]],
    whole: Mapping[str, Segment],
    part: Mapping[str, Segment],
) -> Ends:
    """Where the modules outside the blocks run, in the parts that are left of the `whole` module's.

    `starts`: by part, how many events there are before each traced event. In the backward pass the loss's
    events come before the head's.
    """
    found = recording.ends
    if not isinstance(found, Ends):
        return Ends((0, 0), (0, 0), 0, 0)

    def places(name: str, *traced: int) -> tuple[int, int]:
        first, last = (starts[name][place] for place in (traced[0], traced[-1]))
        return places_in(part[name], whole[name], (first, last))

    embed, head = places("embed", *found.embed), places("head", *found.head)
    n_loss, (in_head, _) = len(part["loss_backward"].events), places("head_backward", found.head_backward)
    return Ends(embed, head, starts["embed_backward"][found.embed_backward], n_loss + in_head)


def _block(part: Mapping[str, Segment], kind: str, entry: str, parameters: tuple[Parameter, ...]) -> Block:
    """A block of a kind; one that occurs as the first block only is never another one."""
    others = [part.get(f"{part_of_kind(kind)}{suffix}", EMPTY) for suffix in SUFFIXES]
    first = [part[f"entry{suffix}"] for suffix in SUFFIXES] if kind == entry else others
    forward, casts, backward = others if any(each.events for each in others) else first
    return Block(
        forward=_with_memory(forward, "forward"),
        backward=_with_memory(backward, "backward"),
        entry=_with_memory(first[0], "forward"),
        entry_backward=_with_memory(first[2], "backward"),
        entry_casts=first[1],
        casts=casts,
        parameters=parameters,
    )


# --- Stages ---


def _of_stage(
    part: Mapping[str, Segment],
    model: TracedModel,
    recording: Recording,
    buffers: Sequence[Buffer],
    sent: Buffer,
    context: OpContext,
    entry: str,
    *,
    first: bool,
    last: bool,
) -> dict[str, Segment]:
    """The parts of a pipeline stage; one that is not the last returns the buffer `sent`.

    The stage's first block is of the kind `entry`.
    """
    if context.cp > 1:
        divides = _made(part["inputs"])  # of all micro-batches at once: `divided_inputs`
        part = {name: without(segment, *divides) for name, segment in part.items()}
    cut, found = checked_cut(model, recording), dict(part)
    if not first:
        found |= _without_embedding(found, recording, cut, buffers, entry)
    if last:
        return found | _with_loss(found, cut, buffers, context)
    return found | _without_head(found, recording, cut, buffers, sent)


def checked_cut(model: TracedModel, recording: Recording) -> Cut:
    """The recording's description of how the module is cut into stages.

    Raises:
        MissingRule: it cannot be.
    """
    why = ""
    if recording.cut is None:
        raise MissingRule(
            f"pp: how to cut {model.name} into stages is not known (its trace is of an earlier memplan); "
            "trace it again, or use pp=1.",
            kind="a pipeline of a model whose trace does not say how to cut it",
        )
    if recording.boundary_grad < 0:
        why = "nothing is trained in the blocks or before them"
    for name, parameters in (("embed", model.embed_parameters), ("head", model.head_parameters)):
        found = {event.parameter for event in recording.parts[f"{name}_backward"] if event.kind == "grad"}
        if found != {one.name for one in parameters if one.requires_grad}:
            why = "what comes before and after the blocks is not in this order in the module"
    if isinstance(recording.cut, str):
        why = recording.cut
    if isinstance(recording.cut, str) or why:
        raise MissingRule(
            f"pp: {model.name} cannot be cut into stages ({why}); use pp=1.",
            kind="a pipeline of a traced model that cannot be cut into stages",
        )
    return recording.cut


def _without_embedding(
    part: Mapping[str, Segment], recording: Recording, cut: Cut, buffers: Sequence[Buffer], kind: str
) -> dict[str, Segment]:
    """The parts of a stage that is not the first: its first block's input is received, and not freed here.

    That block is of this kind.

    Source: aten/src/ATen/autocast_mode.cpp (`cached_cast`, whose cache is for leaves).
    """
    has_grad = recording.entry_requires_grad
    entry, entry_grad = buffers[cut.entry], buffers[cut.entry_grad if has_grad else recording.boundary_grad]
    embed, last = part["embed"], part["embed_backward"]
    only_first = {buffers[i] for i in cut.embedded} | (_made(embed) & _freed(last)) - {entry}
    found = {name: without(segment, *only_first) for name, segment in part.items()}
    if kind != BLOCKS or not has_grad:
        boundary_grad = buffers[recording.boundary_grad]
        found |= _like_other_blocks(found, kind, entry, buffers[recording.boundary], boundary_grad)
    recast = [buffers[i] for i in cut.recast]
    found |= {name: without(found[name], *recast) for name in ("entry", "entry_backward")}
    found[cut.entry_freed] = _without_last_free(found[cut.entry_freed], entry)
    of_head = _made(*[part[name] for name in HEAD]) - {entry_grad}
    late = [event for event in last.events if isinstance(event, Free) and event.buffer in of_head]
    return found | {
        "inputs": EMPTY,
        "embed": without(found["embed"], entry),
        "embed_backward": EMPTY,
        "end": Segment((*late, *without(found["end"], entry_grad).events)),
        "release_input_grad": Segment(frees(entry_grad)),
    }


def _like_other_blocks(
    part: Mapping[str, Segment], kind: str, entry: Buffer, boundary: Buffer, boundary_grad: Buffer
) -> dict[str, Segment]:
    """The first block's parts, if it is of another kind or has a gradient, unlike the whole module's first.

    It is then as any other block of its kind, and frees what the parts before and after the blocks left to
    the first one.
    """
    left = _made(part["embed"], *[part[name] for name in HEAD]) - {entry, boundary, boundary_grad}
    name = part_of_kind(kind)
    found = {"entry_casts": part[f"{name}_casts"]}
    for first, other in (("entry", name), ("entry_backward", f"{name}_backward")):
        own = [e for e in part[other].events if not _is_free(e, boundary)]
        late = [e for e in part[first].events if isinstance(e, Free) and e.buffer in left]
        found[first] = Segment((*own, *late))
    return found


def _without_head(
    part: Mapping[str, Segment], recording: Recording, cut: Cut, buffers: Sequence[Buffer], sent: Buffer
) -> dict[str, Segment]:
    """The parts of a stage that is not the last: it frees the head's buffers when the module returns."""
    boundary, boundary_grad = buffers[recording.boundary], buffers[recording.boundary_grad]
    of_entry = {buffers[i] for i in (cut.entry, cut.entry_grad) if i >= 0}
    with_graph = [e for e in part["end"].events if isinstance(e, Free) and e.buffer in of_entry]
    n_made: Counter[Buffer] = Counter()
    end: list[Event] = []
    for event in (*part["head"].events, *part["loss"].events):
        match event:
            case Alloc(buffer):
                n_made[buffer] += 1
            case Free(buffer) if n_made[buffer]:
                n_made[buffer] -= 1
            case Free():
                end.append(event)
    freed = Segment(tuple(end))
    if not cut.last_freed.endswith("backward"):
        freed = _without_last_free(freed, boundary)
    others = [segment for name, segment in part.items() if name not in HEAD]
    only_last = _made(*[part[name] for name in HEAD]) - _made(*others) - {boundary_grad} - of_entry
    return {
        **{name: without(segment, *only_last) for name, segment in part.items()},
        **dict.fromkeys((*HEAD, "head_casts", "end"), EMPTY),
        "embed_backward": Segment((*without(part["embed_backward"], *only_last).events, *with_graph)),
        "end_of_forward": freed,
        "release": Segment(frees(sent)),
    }


def _with_loss(
    part: Mapping[str, Segment], cut: Cut, buffers: Sequence[Buffer], context: OpContext
) -> dict[str, Segment]:
    """The parts of the last stage: the schedule holds its output, and the loss until it returns.

    A loss that is scaled ends there.
    """
    loss = buffers[cut.loss]
    found = {name: part[name] for name in HEAD}
    found |= {"end": without(part["end"], loss), "release_loss": Segment(frees(loss))}
    if context.scales_loss:
        (unscaled,) = _made(Segment(part["loss"].events[:-1])) & _freed(found["end"])
        found["end"] = without(found["end"], unscaled)
        found["loss"] = Segment((*part["loss"].events, *frees(unscaled)))
    if cut.output >= 0:
        output = buffers[cut.output]
        for name in HEAD:
            found[name] = Segment(tuple([e for e in found[name].events if not _is_free(e, output)]))
        found["release"] = Segment(frees(output))
    return found


HEAD: Final = ("head", "loss", "loss_backward", "head_backward")
"""The parts of a recording after the blocks."""


def _made(*segments: Segment) -> set[Buffer]:
    return {e.buffer for segment in segments for e in segment.events if isinstance(e, Alloc)}


def _freed(segment: Segment) -> set[Buffer]:
    return {e.buffer for e in segment.events if isinstance(e, Free)}


def _without_last_free(segment: Segment, buffer: Buffer) -> Segment:
    found = list(segment.events)
    for i in reversed(range(len(found))):
        if _is_free(found[i], buffer):
            del found[i]
            break
    return Segment(tuple(found))


def _is_free(event: Event, buffer: Buffer) -> bool:
    return isinstance(event, Free) and event.buffer is buffer


FORWARD: Final = ("embed", "entry", "block", "head", "loss")
"""The forward parts of a recording, which compute matrix products."""

BACKWARD: Final = ("loss_backward", "head_backward", "block_backward", "entry_backward", "embed_backward")
"""The backward parts of a recording, which compute matrix products."""


def _products(parts: Iterable[Segment]) -> frozenset[Buffer]:
    """The results of matrix products: for each the newest tensor that is still alive."""
    found: set[Buffer] = set()
    for part in parts:
        alive: dict[Buffer, int] = {}
        """Each buffer's number of tensors, in the order of the newest one of each."""
        for event in part.events:
            match event:
                case Alloc(buffer):
                    alive[buffer] = alive.pop(buffer, 0) + 1
                case Free(buffer) if buffer in alive:
                    alive[buffer] -= 1
                    if not alive[buffer]:
                        del alive[buffer]
                case Compute(kind=kind) if alive and kind is not ComputeKind.CONVOLUTION:
                    found.add(next(reversed(alive)))
    return frozenset(found)


def _parameter(one: TracedTensor, model: TracedModel, dtype: DType) -> Parameter:
    """A parameter in the type that weights are computed in; integers keep their own, frozen floats may."""
    own, held = DTYPES[one.dtype] if one.keeps_dtype else dtype, None
    if one.keeps_dtype and one.is_floating_point:
        own, held = own if dtype == FP32 else dtype, own
    return Parameter(
        one.name,
        shape_at(one.shape, 1, 1),
        own,
        placements=dict(one.placements),
        grad_placements=dict(one.grad_placements),
        mesh=model.mesh,
        requires_grad=one.requires_grad,
        held=held,
        gathered_as=DTYPES[one.gathered_as] if one.gathered_as else None,
    )


def _events(
    traced: Sequence[TracedEvent],
    buffers: list[Buffer],
    named: dict[str, Parameter],
    asked: Asked | None,
    context: OpContext,
) -> Iterator[Sequence[Event]]:
    """The events of each traced one at a micro-batch and a length; a kernel's as they are on the device.

    The results of a kernel are among its own events. `asked`: None where nothing is computed from weights,
    and so nothing is convolved or sent.
    """
    batch, seq_len = context.micro_batch, context.seq_len
    ahead = iter(traced)
    for one in ahead:
        if one.kind == "kernel":
            results = [buffers[each.buffer] for each in islice(ahead, one.n_results)]
            sizes = shape_at(one.shape, batch, seq_len)
            yield kernel_events(one.kernel, sizes, DTYPES[one.dtype], results, context)
            yield from [()] * one.n_results
        elif one.kind == "workspace":
            n_bytes = 0 if asked is None else asked.n_bytes(one, context.device.name, batch)
            workspace = buffer_of("cuDNN's workspace", (n_bytes,), UINT8)
            yield (Alloc(workspace), Free(workspace)) if n_bytes else ()
        elif one.kind == "compute":
            yield (_computed(one.computation, one.phase, batch, seq_len),)
        elif one.kind == "collective":
            yield () if asked is None else _communication(one, shape_at(one.shape, batch, seq_len), context)
        elif one.kind == "hook":
            hook = UnitHook(cast(HookKind, one.kernel), one.parameters)
            yield (hook,) if context.plays_hooks else ()
        elif one.kind == "module":
            yield (ModuleHook(cast(HookKind, one.kernel), one.parameter, one.parameters),)
        else:
            yield (_event(one, buffers, named),)


def _communication(one: TracedEvent, shape: Shape, context: OpContext) -> tuple[Event, ...]:
    """A recorded collective, and gloo's copies of its operand and of its result."""
    kind, dtype = cast(CollectiveKind, one.kernel), DTYPES[one.dtype]
    what = "activation gradients" if one.phase == "backward" else "activations"
    full = buffer_of("gloo scratch", shape, dtype)
    copied = kind == "all_gather" and context.gathers_in_copies
    copied |= kind == "reduce_scatter" and context.backend == "gloo"
    sent = Collective(kind=kind, axis=one.axis, what=what, payload_bytes=full.n_bytes)
    return sent, *((Alloc(full), Free(full)) if copied else ())


def _event(traced: TracedEvent, buffers: list[Buffer], named: dict[str, Parameter]) -> Event:
    """What happens to a buffer."""
    match traced.kind:
        case "alloc":
            return Alloc(buffers[traced.buffer])
        case "free":
            return Free(buffers[traced.buffer])
        case "add":
            return AddToIncoming(buffers[traced.buffer])
    return AccumulateGrad(buffers[traced.buffer], named[traced.parameter])


@lru_cache(maxsize=4096)
def _computed(traced: Computation, phase: Phase, batch: int, seq_len: int) -> Compute:
    """A recorded computation at a micro-batch and a sequence length."""
    operands = tuple([shape_at(operand, batch, seq_len) for operand in traced.operands])
    return Compute(
        kind=traced.kind,
        operands=operands,
        phase=phase,
        flops=flops_of(traced.kind, operands) if operands else size_at(traced.flops, batch, seq_len),
        shape=shape_at(traced.shape, batch, seq_len),
        dtype=DTYPES[traced.dtype],
    )


def _buffer(buffers: list[Buffer], number: int, dtype: DType) -> Buffer:
    return buffers[number] if number >= 0 else Buffer("no boundary", (), dtype, 0, "temporaries")
