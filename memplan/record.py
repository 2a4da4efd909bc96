"""The record of one rank's step: an engine's only output, and the only input of everything above engines.

A record is events in order: `Alloc` and `Free`, `Compute`, `Collective`. They are grouped into stretches with
a name, and a loop is one stretch with a count: a step of thousands of equal blocks and micro-batches is a
small tree.

```text
step -- micro-batch, 8 times -- forward -- embedding
     |                       |          |- block, 32 times
     |                       |          `- head, loss
     |                       `- backward ...
     `- update                        (leaves are events)
```

Memory, traffic, time, the allocator's replay and the charts are folds over that tree. Each stretch has three
figures, composed from its parts: `net_bytes`, allocated less freed; `high_bytes`, the most that it ever holds
above its start (in a loop's first or last repetition), so that the peak is `high_bytes` of the step plus the
bytes held between steps; `counts`, how often each computation and each collective occurs.
"""

from collections.abc import Collection, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final, Literal, NamedTuple

from memplan.mesh import Group
from memplan.shapes import Buffer, DType, Parameter, Shape, n_elements

Phase = Literal["forward", "backward", "recompute", "update"]
"""When something is computed: in a forward pass, a backward pass, a recomputation, or an update."""

PassPart = Literal["forward", "backward", "backward-input", "backward-weight"]
"""A stage's pass of a micro-batch; schedules may split the backward pass."""

StepPhase = Literal["forward", "backward", "optimizer"]
"""What a rank does at an instant of its step."""

CollectiveKind = Literal[
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "permute",
    "broadcast",
    "reduce",
    "send",
    "recv",
    "copy",
]

COMPUTE: Final = "compute"
"""The stream of computations."""

SENDS: Final = "sends"
"""The stream of sends to other stages of a pipeline, where they overlap computation."""


class Alloc(NamedTuple):
    """The allocation of a buffer's bytes."""

    buffer: Buffer

    @property
    def sign(self) -> int:
        """1: bytes are added."""
        return 1


class Free(NamedTuple):
    """The free of a buffer's bytes."""

    buffer: Buffer

    @property
    def sign(self) -> int:
        """-1: bytes are taken away."""
        return -1


class AccumulateGrad(NamedTuple):
    """A mark: this buffer is now a parameter's gradient, which the engine keeps or adds to an older one."""

    buffer: Buffer
    parameter: Parameter


class AddToIncoming(NamedTuple):
    """A mark: a gradient is added to the one that came from the next block.

    In place within a stage; if that one was received from another rank, the sum is a new tensor: this buffer.
    """

    buffer: Buffer


class RecordEvent(NamedTuple):
    """`event.record(stream)`: the event is over once all that a stream was given so far is done."""

    event: str
    stream: str


class WaitStream(NamedTuple):
    """`stream.wait_stream(other)`: later work of a stream waits for all work of another one so far.

    `other` may also be an event that was recorded (`stream.wait_event`).
    """

    stream: str
    other: str


HookKind = Literal["pre_forward", "post_forward", "pre_backward", "post_backward"]
"""A hook around the passes of a unit of FSDP2, or of a module."""


class UnitHook(NamedTuple):
    """The place at which FSDP2's hook of a unit is called, experts or a reference; its parameters by name."""

    kind: HookKind
    parameters: tuple[str, ...]


class ModuleHook(NamedTuple):
    """The place at which a hook of a module is called; its own parameters by name.

    `path`: the module's, with a * for a block's number. `parameters`: None if they are those whose names
    begin with the path; the hooks of the modules around it are then left out.
    """

    kind: HookKind
    path: str
    parameters: tuple[str, ...] | None = None


class ComputeKind(Enum):
    """What is computed, by PyTorch's names of operators."""

    MM = "mm"
    """A matrix product; operands (m, k) and (k, n). A bias may be added (addmm)."""
    BMM = "bmm"
    """Matrix products of a batch; operands (batch, m, k) and (batch, k, n)."""
    SCALED_MM = "scaled_mm"
    """A matrix product of operands in float8; operands as of `MM`."""
    GROUPED_MM = "grouped_mm"
    """A matrix product for each group of rows; operands (rows, k) and (groups, k, n), or (m, rows) and
    (rows, n), or as of `BMM`."""
    ATTENTION = "scaled_dot_product_attention"
    """Attention by one kernel; operands q, k, v (batch, seq, heads, d_head): k, v may have fewer heads."""
    ATTENTION_BACKWARD = "scaled_dot_product_attention_backward"
    """Its gradients by one kernel, which computes the scores again; operands as of `ATTENTION`."""
    CONVOLUTION = "convolution"
    """A convolution, or one of its gradients, no product of cuBLAS; operands are the weight and the output,
    or, if it is transposed, the weight and the input."""
    MEMORY = "memory"
    """All kernels of a stretch that only read and write memory, together; no operands and no FLOPs."""
    UNKNOWN = "unknown"
    """Operands are not known, only FLOPs: another operation of a traced module, or a closed form."""


def flops_of(kind: ComputeKind, operands: tuple[Shape, ...]) -> int:
    """FLOPs of an operation: 2 m k n for each matrix product, two products for each head of an attention.

    Its backward pass has five. Each element of a convolution's weight is multiplied once for each position of
    its window. Causal attention is counted whole although half is masked (the convention of Chowdhery et al.
    2022, arXiv:2204.02311, appendix B).

    >>> flops_of(ComputeKind.MM, ((2, 3), (3, 4))), flops_of(ComputeKind.BMM, ((5, 2, 3), (5, 3, 4)))
    (48, 240)
    >>> flops_of(ComputeKind.ATTENTION, ((1, 8, 2, 4), (1, 8, 1, 4), (1, 8, 1, 4)))
    2048
    >>> flops_of(ComputeKind.CONVOLUTION, ((16, 3, 5, 5), (2, 16, 8, 8)))  # 1200 weights at 2 x 64 positions
    307200
    """
    left, right, *others = operands
    if kind in (ComputeKind.ATTENTION, ComputeKind.ATTENTION_BACKWARD):
        (value,) = others
        of_keys, of_values = (1, 1) if kind is ComputeKind.ATTENTION else (3, 2)
        return 2 * n_elements(left[:-1]) * right[1] * (of_keys * left[-1] + of_values * value[-1])
    if kind is ComputeKind.CONVOLUTION:
        return 2 * n_elements(left) * right[0] * n_elements(right[2:])
    if len(left) > len(right):  # groups of columns
        return 2 * left[-2] * n_elements(right)
    return 2 * n_elements(left) * right[-1]


def gradient_products(
    kind: ComputeKind, operands: tuple[Shape, ...]
) -> tuple[tuple[ComputeKind, tuple[Shape, ...]], ...]:
    """The products of an operation's backward pass, one for each operand's gradient; attention has a kernel.

    Source: Kaplan et al. 2020, arXiv:2001.08361, section 2.1.

    >>> gradient_products(ComputeKind.MM, ((2, 3), (3, 4)))[0]
    (<ComputeKind.MM: 'mm'>, ((2, 4), (4, 3)))
    >>> gradient_products(ComputeKind.MM, ((2, 3), (3, 4)))[1]
    (<ComputeKind.MM: 'mm'>, ((3, 2), (2, 4)))
    """
    if kind is ComputeKind.ATTENTION:
        return ((ComputeKind.ATTENTION_BACKWARD, operands),)
    left, right = operands
    grad = (*left[:-1], right[-1])
    left_transposed, right_transposed = ((*one[:-2], one[-1], one[-2]) for one in operands)
    return (kind, (grad, right_transposed)), (kind, (left_transposed, grad))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Compute:
    """What is computed; compared by identity.

    `operands`: their shapes, as its kind says; empty where only FLOPs are known. `shape`, `dtype`: its
    result's. `moved_bytes`, `n_kernels`: of `ComputeKind.MEMORY`, what its kernels read and write, and how
    many they are.
    """

    kind: ComputeKind
    operands: tuple[Shape, ...] = ()
    phase: Phase
    flops: int
    shape: Shape
    dtype: DType
    moved_bytes: int = 0
    n_kernels: int = 1

    @property
    def backward_flops(self) -> int:
        """FLOPs of a backward pass, without recomputation.

        Neglects: fused attention computes its scores again in backward.
        """
        if self.phase != "backward":
            return 0
        fused = self.kind is ComputeKind.ATTENTION_BACKWARD
        return 2 * flops_of(ComputeKind.ATTENTION, self.operands) if fused else self.flops


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Collective:
    """`calls` equal collectives in a row; compared by identity.

    `payload_bytes` is the operand of each call as the framework passes it: the full tensor of an all-gather
    or a reduce-scatter. `axis`: the group of ranks, as `memplan.mesh` names it. `what` is for people.
    `stream`: what runs it; computation goes on meanwhile, up to a `WaitStream`, unless it is `COMPUTE`. A
    group's collectives run one after the other, on whatever stream. A send on another stream is waited for by
    its receiver alone. `beside`: a computation that is recorded too and runs meanwhile; what comes next waits
    for both.
    """

    kind: CollectiveKind
    axis: Group
    what: str
    payload_bytes: int
    stream: str = COMPUTE
    calls: int = 1
    beside: Compute | None = None


Timed = RecordEvent | WaitStream | Compute | Collective
"""What takes time, or waits."""

HOOKS: Final = (UnitHook, ModuleHook)
"""The events that only mark a place."""

Event = Alloc | Free | AccumulateGrad | AddToIncoming | UnitHook | ModuleHook | Timed
"""What happens at an instant."""

Counts = Mapping[Compute | Collective, int]
"""Occurrences of each computation and collective."""

Held = Mapping[Buffer, tuple[int, int]]
"""For each buffer its net number, and the least that the number reaches on the way: at most 0."""


class Stretch:
    """A named part of a step: `events` in order, or `parts` in order; all of it `repeats` times.

    `net_bytes` and `high_bytes` are of all repetitions, `high_bytes` at least 0. `stage_pass`: the index of
    the rank's stage whose pass this is, over its next micro-batch, and which part of it; None if it is no
    pass. `has_passes`: it is a pass, or contains one. `timed`: its events that take time or wait. `streams`:
    whether anything in it runs beside the compute stream, or waits. Never changed.
    """

    __slots__ = (
        "_counts",
        "_held",
        "_left",
        "events",
        "has_passes",
        "high_bytes",
        "name",
        "net_bytes",
        "parts",
        "repeats",
        "stage_pass",
        "streams",
        "timed",
    )

    def __init__(
        self,
        name: str,
        events: tuple[Event, ...],
        parts: "tuple[Stretch, ...]",
        repeats: int,
        net_bytes: int,
        high_bytes: int,
        stage_pass: tuple[int, PassPart] | None = None,
        timed: tuple[Timed, ...] = (),
        streams: bool = False,
    ) -> None:
        self.name = name
        self.events = events
        self.parts = parts
        self.repeats = repeats
        self.net_bytes = net_bytes
        self.high_bytes = high_bytes
        self.stage_pass = stage_pass
        self.timed = timed
        self.has_passes = stage_pass is not None
        self.streams = streams
        for part in parts:
            if part.streams:
                self.streams = True
            if part.has_passes:
                self.has_passes = True
        self._counts: Counts | None = None
        self._left: tuple[tuple[Buffer, int], ...] | None = None
        self._held: Held | None = None

    def __repr__(self) -> str:
        inside = f"{len(self.events)} events" if self.events else f"{len(self.parts)} parts"
        return f"<Stretch {self.name!r}: {inside}, {self.repeats} times>"

    @property
    def left(self) -> tuple[tuple[Buffer, int], ...]:
        """The net number of each buffer that its own events leave; negative where they free older ones."""
        if self._left is None:
            found: dict[Buffer, int] = {}
            for event in changes(self.events):
                found[event.buffer] = found.get(event.buffer, 0) + event.sign
            self._left = tuple([(buffer, n) for buffer, n in found.items() if n])
        return self._left

    @property
    def held(self) -> "Held":
        """The buffers of which all repetitions leave some, or free older ones."""
        if self._held is None:
            self._held = _held(self)
        return self._held

    @property
    def counts(self) -> Counts:
        """Occurrences of each computation and collective in all repetitions."""
        if self._counts is None:
            self._counts = _counts(self)
        return self._counts


def _held(stretch: Stretch) -> Held:
    found: dict[Buffer, tuple[int, int]] = {}
    for event in changes(stretch.events):
        net, least = found.get(event.buffer, (0, 0))
        net += event.sign
        found[event.buffer] = net, min(net, least)
    for part in stretch.parts:
        for buffer, (more, lowest) in part.held.items():
            net, least = found.get(buffer, (0, 0))
            found[buffer] = net + more, min(least, net + lowest)
    again = stretch.repeats - 1
    moved = [(b, net, least) for b, (net, least) in found.items() if again >= 0 and (net or least)]
    return {b: (net + again * net, least + again * min(net, 0)) for b, net, least in moved}


def _counts(stretch: Stretch) -> Counts:
    times: dict[Stretch, int] = {}
    found: dict[Compute | Collective, int] = {}
    _count_parts(stretch, 1, times)
    for event in stretch.timed:
        if isinstance(event, (Compute, Collective)):
            found[event] = found.get(event, 0) + stretch.repeats
    for part, n in times.items():
        for counted, n_each in part.counts.items():
            found[counted] = found.get(counted, 0) + n * n_each
    return found


def _count_parts(stretch: Stretch, n: int, times: dict[Stretch, int]) -> None:
    """Add n to `times` for each part of a stretch; for a part with passes, for each of that part's parts."""
    for part in stretch.parts:
        if part.has_passes:
            _count_parts(part, n * stretch.repeats, times)
        else:
            times[part] = times.get(part, 0) + n * stretch.repeats


def allocs(*buffers: Buffer) -> tuple[Event, ...]:
    """The allocation of each buffer."""
    return tuple([Alloc(buffer) for buffer in buffers])


def frees(*buffers: Buffer) -> tuple[Event, ...]:
    """The free of each buffer."""
    return tuple([Free(buffer) for buffer in buffers])


def events(name: str, sequence: Iterable[Event]) -> Stretch:
    """A stretch of events, without the engine's marks among them.

    >>> from memplan.shapes import FP32
    >>> a, b = (Buffer(n, (1,), FP32, size, "temporaries") for n, size in (("a", 30), ("b", 12)))
    >>> s = events("s", [Alloc(a), Alloc(b), Free(a)])
    >>> s.net_bytes, s.high_bytes
    (12, 42)
    """
    kept: list[Event] = []
    timed: list[Timed] = []
    streams = False
    live = high = 0
    for event in sequence:
        kind = type(event)
        if kind is Alloc:
            live += event[0].n_bytes  # type: ignore[index,union-attr]
            if live > high:
                high = live
        elif kind is Free:
            live -= event[0].n_bytes  # type: ignore[index,union-attr]
        elif kind is AccumulateGrad or kind is AddToIncoming or kind in HOOKS:
            continue
        else:
            timed.append(event)  # type: ignore[arg-type]
            streams = streams or (kind is not Compute and beside(event))  # type: ignore[arg-type]
        kept.append(event)
    return Stretch(name, tuple(kept), (), 1, live, high, None, tuple(timed), streams)


def beside(event: Timed) -> bool:
    """Whether an event is on a stream of its rank other than `COMPUTE`, or between two."""
    if isinstance(event, Collective):
        return event.stream != COMPUTE and event.kind != "send"
    return not isinstance(event, Compute)


def chain(name: str, *parts: Stretch) -> Stretch:
    """Stretches one after the other."""
    live, high = _marks(parts)
    return Stretch(name, (), parts, 1, live, high)


def passed(stage: int, part: PassPart, *parts: Stretch) -> Stretch:
    """A stretch marked as a stage's pass of its next micro-batch."""
    live, high = _marks(parts)
    return Stretch(part, (), parts, 1, live, high, (stage, part))


def _marks(parts: Iterable[Stretch]) -> tuple[int, int]:
    live = high = 0
    for part in parts:
        if live + part.high_bytes > high:
            high = live + part.high_bytes
        live += part.net_bytes
    return live, high


def repeated(part: Stretch, n: int) -> Stretch:
    """A stretch repeated n times; an empty one if n is 0."""
    net, high = part.net_bytes, part.high_bytes
    if n <= 0:
        return Stretch(part.name, (), (), 0, 0, 0)
    return Stretch(part.name, (), (part,), n, n * net, max(high, (n - 1) * net + high))


def changes(events: Iterable[Event]) -> Iterator[Alloc | Free]:
    """The allocations and frees among events."""
    return (event for event in events if isinstance(event, (Alloc, Free)))


def unrolled(stretch: Stretch) -> Iterator[tuple[str, Alloc | Free]]:
    """Every allocation and free of a step in order, with the name of its stretch."""
    for _ in range(stretch.repeats):
        for event in changes(stretch.events):
            yield stretch.name, event
        for part in stretch.parts:
            yield from unrolled(part)


def phased(
    stretch: Stretch, update: Collection[Stretch], before: StepPhase = "forward"
) -> Generator[tuple[StepPhase, Alloc | Free], None, StepPhase]:
    """Every allocation and free of `unrolled`, with its phase; returns the last one's.

    `update`: the stretches of the optimizer. What is neither in one of them nor in a pass of a micro-batch
    belongs to the phase `before`.
    """
    phase = before
    if stretch in update:
        phase = "optimizer"
    elif stretch.stage_pass is not None:
        phase = "forward" if stretch.stage_pass[1] == "forward" else "backward"
    for _ in range(stretch.repeats):
        for event in changes(stretch.events):
            yield phase, event
        for part in stretch.parts:
            phase = yield from phased(part, update, phase)
    return phase
