"""One micro-batch through one pipeline stage, as traced from the model's forward pass."""

from dataclasses import dataclass
from functools import lru_cache

from memplan.errors import MissingRule
from memplan.models import Model
from memplan.ops import cross_entropy, gradient_of_loss
from memplan.shapes import INT64, Buffer, Event, Parameter
from memplan.tape import Call, Run, Setting, Tensor


@dataclass(frozen=True, slots=True)
class Segment:
    """What one part of the model does in one direction: its events and its tensor-axis collectives."""

    events: tuple[Event, ...] = ()
    calls: tuple[Call, ...] = ()


EMPTY = Segment()


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Forward and backward of the ends a stage owns and of one of its equal blocks.

    Parameters are in the order of the module; FLOPs are of the forward pass on one tensor rank.

    Attributes whose meaning their name does not tell:
        entry_block: the stage's first block. Where its input came from another stage, that tensor is the
            schedule's and not freed here (`entry_block_backward` likewise).
        embed_casts, block_casts, head_casts: free what autocast kept of a part's weights, when the forward
            pass ends.
        n_loss_backward: how many of `head_backward`'s events are the loss's.
        release: frees the stage's output, which a pipeline schedule holds until the backward pass is over.
        release_input_grad: frees the gradient that is sent to the stage before.
        boundary: the tensor handed from block to block and from stage to stage.
    """

    embed: Segment = EMPTY
    block: Segment
    head: Segment = EMPTY
    embed_casts: Segment = EMPTY
    block_casts: Segment = EMPTY
    head_casts: Segment = EMPTY
    loss: Segment = EMPTY
    head_backward: Segment = EMPTY
    n_loss_backward: int = 0
    block_backward: Segment
    entry_block: Segment
    entry_block_backward: Segment
    embed_backward: Segment = EMPTY
    release: Segment = EMPTY
    release_input_grad: Segment = EMPTY
    embed_parameters: tuple[Parameter, ...] = ()
    block_parameters: tuple[Parameter, ...]
    head_parameters: tuple[Parameter, ...] = ()
    boundary: Buffer
    block_flops: int
    head_flops: int = 0


class _Marks:
    """Cuts a run's record into segments."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.n_events = self.n_calls = self.n_parameters = self.n_flops = 0

    def segment(self) -> Segment:
        """What the run has done since the last segment."""
        events, calls = self.run.events[self.n_events :], self.run.calls[self.n_calls :]
        self.n_events, self.n_calls = len(self.run.events), len(self.run.calls)
        return Segment(tuple(events), tuple(calls))

    def parameters(self) -> tuple[Parameter, ...]:
        """The parameters first used since the last call."""
        new = list(self.run.parameters.values())[self.n_parameters :]
        self.n_parameters += len(new)
        return tuple(new)

    def flops(self) -> int:
        """The forward FLOPs since the last call."""
        new, self.n_flops = self.run.flops - self.n_flops, self.run.flops
        return new


@lru_cache(maxsize=1024)
def traced(
    model: Model, setting: Setting, *, first: bool, last: bool, recompute: bool, keep_logits: bool
) -> Trace:
    """One micro-batch through a stage of one block with the ends it owns, forward and backward.

    `keep_logits`: the caller holds the logits until the stage's `release`, as pipeline schedules do.
    """
    run = Run(setting)
    cut = _Marks(run)
    x = _entry(model, run, first=first)
    entry = _buffer(x)
    embed, embed_parameters, _ = cut.segment(), cut.parameters(), cut.flops()
    n_embed = len(run.nodes)
    run.leave_autocast()
    embed_casts = cut.segment()
    with run.named("blocks.*"):
        x = run.recomputed(model.block, x) if recompute else model.block(x)
    boundary = _buffer(x)
    block, block_parameters, block_flops = cut.segment(), cut.parameters(), cut.flops()
    n_block = len(run.nodes)
    run.leave_autocast()
    block_casts = cut.segment()
    head = head_casts = loss = head_backward = EMPTY
    head_parameters: tuple[Parameter, ...] = ()
    head_flops = n_loss_backward = 0
    held: Tensor | None = None
    if last:
        logits = model.head(x)
        del x
        head, head_parameters, head_flops = cut.segment(), cut.parameters(), cut.flops()
        run.leave_autocast()
        head_casts = cut.segment()
        n_head = len(run.nodes)
        end = cross_entropy(logits)
        held = logits if keep_logits else None
        del logits
        start = gradient_of_loss(run)
        loss = cut.segment()
        run.start_backward(end, start)
        del end, start
        run.backward(down_to=n_head)
        n_loss_backward = len(run.events) - cut.n_events
        run.backward(down_to=n_block)
        head_backward = cut.segment()
    else:
        held = Tensor(run, x.shape, x.dtype, x.storage)
        run.start_backward(x, Tensor(run, x.shape, x.dtype))
        del x
    run.backward(down_to=n_embed)
    block_backward = cut.segment()
    input_grad = run.nodes[0].grad if not first else None
    run.backward()
    embed_backward = cut.segment()
    del held
    release = cut.segment()
    del input_grad
    release_input_grad = cut.segment()
    same = _Renamed(entry, boundary)
    inside = (lambda segment: segment) if first else _Without(entry)
    return Trace(
        embed=same(inside(embed)),
        embed_casts=embed_casts,
        block=same(block),
        block_casts=block_casts,
        head=same(head),
        head_casts=head_casts,
        loss=loss,
        head_backward=same(head_backward),
        n_loss_backward=n_loss_backward,
        block_backward=same(block_backward),
        entry_block=same(inside(block)),
        entry_block_backward=same(inside(block_backward)),
        embed_backward=same(embed_backward),
        release=same(release),
        release_input_grad=release_input_grad,
        embed_parameters=embed_parameters,
        block_parameters=block_parameters,
        head_parameters=head_parameters,
        boundary=boundary,
        block_flops=block_flops,
        head_flops=head_flops,
    )


def _entry(model: Model, run: Run, *, first: bool) -> Tensor:
    setting = run.setting
    if first:
        return model.embed(Tensor(run, (setting.micro_batch, setting.seq_len), INT64))
    seq_len = setting.seq_len // setting.tp if setting.sequence_parallel else setting.seq_len
    node = run.node((None,), (), lambda grad, saved: (None,))
    shape = (setting.micro_batch, seq_len, model.d_model)
    return run.new("received", shape, setting.weight_dtype, node)


def _buffer(x: Tensor) -> Buffer:
    if x.storage is None:
        raise MissingRule(
            "the input of a block must own its bytes; a model's embed() must allocate its output."
        )
    return x.storage.buffer


class _Without:
    """Leaves out what happens to a buffer."""

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer

    def __call__(self, segment: Segment) -> Segment:
        return Segment(tuple(e for e in segment.events if e.buffer is not self.buffer), segment.calls)


class _Renamed:
    """Calls a block's input by the name of its output: one block's output is the next one's input."""

    def __init__(self, entry: Buffer, boundary: Buffer) -> None:
        if entry.n_bytes != boundary.n_bytes:
            raise MissingRule(f"a block's input ({entry}) and output ({boundary}) must be alike.")
        if "activations" in (entry.kind, boundary.kind):
            boundary.kind = "activations"
        self.entry = entry
        self.boundary = boundary

    def __call__(self, segment: Segment) -> Segment:
        entry, boundary = self.entry, self.boundary
        renamed = tuple(
            Event(e.sign, boundary, e.parameter) if e.buffer is entry else e for e in segment.events
        )
        return Segment(renamed, segment.calls)
