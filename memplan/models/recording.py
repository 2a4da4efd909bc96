"""What is recorded of a module: buffers, events and computations, whose sizes depend on batch and length."""

from collections.abc import Iterable, Mapping
from typing import Final, Literal, NamedTuple, get_args

from memplan import shapes
from memplan.errors import InvalidValue, MissingRule
from memplan.mesh import Group
from memplan.models.base import BLOCKS, Role
from memplan.placements import Placement
from memplan.record import ComputeKind, HookKind, Phase
from memplan.shapes import FP32, Buffer, DType, Kind, Shape, buffer_of

DTYPES: Final[Mapping[str, DType]] = {
    dtype.name: dtype
    for dtype in (
        *(value for value in vars(shapes).values() if isinstance(value, DType)),
        DType("uint64", 8),
        DType("int16", 2),
        DType("int8", 1),
        DType("complex128", 16),
        DType("float8_e4m3fn", 1),
        DType("float8_e5m2", 1),
    )
}
"""The element types that a traced tensor may have."""

CONVOLUTIONS: Final = "convolutions"
"""The operations of a trace that cuDNN can be asked about without a GPU."""

CONVOLVED: Final = ("output", "input", "weight")
"""What a convolution's workspace is for: its output, or the gradient of one of these."""

EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""The keys of a config.json that say how many experts a block has."""

RECOMPUTES: Final = ("none", "full")
"""The kinds of recomputation that are traced."""

OF_COMPILED: Final = (*RECOMPUTES, "selective")
"""The kinds that are traced of compiled blocks."""

UNITS: Final = ("", "block", "block+ends")
"""The units of FSDP2 beside its root that are traced; "" for none."""

MODULE: Final = "module"
"""The units of DeepSpeed's ZeRO-3: every module, whose hooks are recorded, and whose linears are its own."""


ZERO3: Final = "zero3"
"""The key beside a config.json's own that asks for a trace of ZeRO-3."""

MIXTURE: Final = "torchtitan"
"""The key beside a config.json's own that asks for torchtitan's code, which is also its implementation."""

TORCHTITAN: Final = "torchtitan_llama"
"""The key of values that say what torchtitan's Llama is made of."""

SEQUENCE_PARALLEL: Final = "sequence_parallel"
"""The key under which a Config says that sequences are divided between tensor-parallel regions."""

FLOAT8: Final = "float8"
"""The key that names torchao's recipe, beside the keys of a config.json or torchtitan's sizes."""

FLOAT8_ALL_GATHER: Final = "float8_all_gather"
"""The key under which a Config says whether FSDP2 gathers the weights of linears in float8."""

BEYOND_WINDOW: Final = "beyond_window"
"""The key beside a config.json's own that asks for a trace of sequences that reach its attention's window."""

MICRO_BATCH: Final = "micro_batch"
"""The key beside a config.json's own of the samples in a micro-batch, where a trace is of one number only."""

TRAINER: Final = "trainer"
"""The key beside a config.json's own under which is how transformers' Trainer calls the module."""


REFERENCE: Final = "reference"
"""The name of the frozen copy that TRL's trainers hold beside the module, as a part of it."""

AGAIN: Final = "again"
"""The name of what calls the module beside its own forward pass, as a part of it without parameters."""

Reference = Literal["copy", "sharded copy", "adapters off", "ahead"]
"""What TRL's trainers compare the trained model with: a frozen copy, itself without its adapters, or numbers.

"sharded copy": a unit of FSDP2 of its own; "ahead": log-probabilities that are a part of the batch, computed
before training.
"""


class Scoring(NamedTuple):
    """How TRL's trainers score tokens: in tiles, so that a trace is of one micro-batch and length.

    `gathers_head`: the output layer's weight is a DTensor, which it gathers itself.
    """

    micro_batch: int
    seq_len: int
    gathers_head: bool


class ByTrainer(NamedTuple):
    """How transformers' Trainer calls a module: whether DDP clones outputs, whether FSDP2 casts floats.

    `scoring`: how TRL's trainers do, which build on it; None: the Trainer itself calls it. `reference`: what
    these have beside the module; the SFTTrainer has none. `completion`: how many tokens at the end of a
    sequence the GRPOTrainer scores; None: it is another trainer. `hooks_again`: FSDP2 has hooks in passes of
    the module beside the one that trains it; None: there are no such passes, or no hooks. `wraps_blocks`:
    Accelerate has wrapped the blocks that are recomputed, so that transformers knows nothing of it; None: it
    has not, or it makes no difference.
    """

    clones_outputs: bool = False
    casts_inputs: bool = False
    scoring: Scoring | None = None
    reference: Reference | None = None
    completion: int | None = None
    hooks_again: bool | None = None
    wraps_blocks: bool | None = None


ROTATES: Final = ("allgather", "alltoall")
"""How `context_parallel` hands keys and values around: the two rotations that are traced."""

ULYSSES: Final = "ulysses"
"""What DeepSpeed's ranks have instead of a rotation: they exchange heads. Also a Config's key for a trace."""

AUTOTP: Final = "autotp"
"""The key beside a config.json's own that asks for a trace over the ranks of DeepSpeed's AutoTP."""

PARTS: Final = (
    "inputs", "embed", "entry", "block", "head", "loss",
    "embed_casts", "entry_casts", "block_casts", "head_casts",
    "loss_backward", "head_backward", "block_backward", "entry_backward", "embed_backward", "end",
)  # fmt: skip
"""The parts of a recorded step. `inputs` casts them to the weights' type, `entry` is the first block, `block`
any other of its kind, `head` all after the last one; `casts` free what autocast kept of a part's weights,
`end` is what goes with the loss. Blocks of further kinds have parts of their own (`parts_of_kind`).
"""

SUFFIXES: Final = ("", "_casts", "_backward")
"""How the names of a unit's parts end."""


def part_of_kind(kind: str) -> str:
    """The name of the forward part of a kind of blocks; the casts' and the backward pass's begin with it."""
    return "block" if kind == BLOCKS else kind


def parts_with(kinds: Iterable[str]) -> tuple[str, ...]:
    """The parts of a recorded step with blocks of these kinds."""
    further = [kind for kind in kinds if kind != BLOCKS]
    return (*PARTS, *[f"{kind}{suffix}" for kind in further for suffix in SUFFIXES])


class Term(NamedTuple):
    """`factor x batch^batch_power x seq_len^seq_power / divisor`, a whole number."""

    factor: int
    batch_power: int = 0
    seq_power: int = 0
    divisor: int = 1


Size = tuple[Term, ...]
"""A number that depends on the sizes of the input: the sum of its terms."""


def size_at(size: Size, batch: int, seq_len: int) -> int:
    """The number for these sizes of the input.

    >>> size_at((Term(12, 1, 2), Term(-1)), 2, 10), size_at((Term(1, 1, 1, 4),), 2, 10)
    (2399, 5)

    Raises:
        MissingRule: tokens are divided into parts that are not equal at these sizes.
    """
    total = 0
    for factor, i, j, divisor in size:
        n = factor * batch**i * seq_len**j
        if n % divisor:
            raise MissingRule(
                f"micro_batch={batch}, seq_len={seq_len}: {n} is divided into {divisor} parts, and of uneven "
                f"ones nothing was traced; use a micro_batch x seq_len that is a multiple of {divisor}.",
                kind="a traced model that divides tokens into uneven parts",
            )
        total += n // divisor
    return total


class Computation(NamedTuple):
    """A `memplan.record.Compute`; `flops` is only given where the operands are not known."""

    kind: ComputeKind
    operands: tuple[tuple[Size, ...], ...]
    shape: tuple[Size, ...]
    dtype: str
    flops: Size = (Term(0),)


PHASES: Final = get_args(Phase)

HOOKS: Final = get_args(HookKind)

OPERANDS: Final[Mapping[ComputeKind, tuple[int, tuple[int, ...]]]] = {
    ComputeKind.MM: (2, (2,)),
    ComputeKind.BMM: (2, (3,)),
    ComputeKind.SCALED_MM: (2, (2,)),
    ComputeKind.GROUPED_MM: (2, (2, 3)),
    ComputeKind.ATTENTION: (3, (4,)),
    ComputeKind.ATTENTION_BACKWARD: (3, (4,)),
    ComputeKind.CONVOLUTION: (2, (3, 4, 5)),
}
"""How many operands a computation has, and how many dims each of them may have."""


class TracedBuffer(NamedTuple):
    """A storage: the shape that it first had and its bytes."""

    name: str
    shape: tuple[Size, ...]
    dtype: DType
    n_bytes: Size
    kind: Kind


class TracedEvent(NamedTuple):
    """What happens to the buffer of this number: allocated, freed, made the parameter's gradient.

    Or another gradient is added in place to this one, which came from the next block. Or something is
    computed. Or a kernel of CUDA (`memplan.ops.kernel_calls`) is called with these sizes, `shape`; the next
    `n_results` buffers that come are its results. Or a convolution takes its workspace for the "output", or
    for the gradient of "input" or "weight", which `kernel` names; its `shape` are the dims of input and
    weight, then stride, padding, dilation and output padding along each dim of an image, the number of
    groups, and whether it is transposed, and the channels of input and of weight are last. Or a collective of
    the kind that `kernel` names runs over this axis of the mesh; `shape` and `dtype` are of its full operand.
    Or the "hook" of FSDP2 that `kernel` names is called, of a unit with these `parameters` that is within a
    block, or a reference, or any unit in a pass beside the one that trains; the root is named by none. Or
    ZeRO-3's hook of a "module" is, whose path is `parameter` and which owns the `parameters`.
    """

    kind: Literal[
        "alloc", "free", "add", "grad", "compute", "kernel", "workspace", "collective", "hook", "module"
    ]
    buffer: int = -1
    parameter: str = ""
    phase: Phase = "forward"
    computation: Computation = Computation(ComputeKind.UNKNOWN, (), (), "")
    shape: tuple[Size, ...] = ()
    dtype: str = ""
    kernel: str = ""
    axis: Group = ""
    n_results: int = 0
    parameters: tuple[str, ...] = ()


class Variant(NamedTuple):
    """How a module was run as it was recorded.

    The type of its weights, the type that autocast ran products in ("": no autocast), whether blocks were
    recomputed, whether the batch was of one sample, where kernels and views may differ, and how the `units`
    of FSDP2 beside its root change that ("": not at all). A unit casts floats that it is called with to the
    weights' type ("block"); outside a unit its weights are float32 ("block+ends"). These are only recorded
    where something else happens. The unit "module" is ZeRO-3's. `rotate`: how ring attention hands keys and
    values around ("": there is no ring), or "ulysses"; `cp_rank`: the place of the recorded rank in the ring.
    """

    weights: str
    autocast: str
    recompute: str
    alone: bool
    units: str = ""
    rotate: str = ""
    cp_rank: int = 0

    @property
    def casts(self) -> bool:
        """Whether units cast what they are called with."""
        return self.units not in ("", MODULE)


class Compiles(NamedTuple):
    """Blocks are compiled: of micro-batches of this size, recomputed in these ways."""

    micro_batch: int
    seq_len: int
    recomputes: tuple[str, ...]


class Cut(NamedTuple):
    """How a recording is cut into pipeline stages of consecutive blocks.

    A stage that is not the first receives the first block's input, `entry`, and runs the operations before
    the blocks except those that depend on weights (their buffers are `embedded`). Where the entry has no
    gradient (-1), as nothing is trained before the blocks, its first block is like any other. A stage that
    is not the last returns its last block's output. `entry_freed`, `last_freed`: the parts in which the
    entry and the last block's output are freed. `entry_grad`: the entry's gradient. `output`: what the last
    stage returns and the `loss` is computed from; -1: it returns the loss. `recast`: autocast's further
    copies of the entry, which a received tensor has not, as autocast caches the first copy.
    """

    entry: int
    entry_freed: str
    entry_grad: int
    last_freed: str
    embedded: tuple[int, ...]
    output: int
    loss: int
    recast: tuple[int, ...]


class Ends(NamedTuple):
    """Where the modules outside the blocks run, as units of FSDP2's: one before the blocks, one after them.

    `embed`, `head`: the number of that part's events before the first of the unit's modules is called, and
    before the last one has returned. `embed_backward`, `head_backward`: the number of that part's events
    before the gradient of the unit's output exists.
    """

    embed: tuple[int, int]
    head: tuple[int, int]
    embed_backward: int
    head_backward: int


class Recording(NamedTuple):
    """Forward and backward pass of a micro-batch.

    `boundary` is the buffer that blocks are called with (-1: no blocks), `boundary_grad` its gradient (-1:
    none, as nothing is trained in the blocks or before them); `entry_requires_grad`: whether anything is
    trained before the blocks, so that the first one's input has a gradient too. `cut`, `ends`: if there are
    none, the reason; None in a trace of an earlier memplan, which did not record them.
    """

    buffers: tuple[TracedBuffer, ...]
    parts: Mapping[str, tuple[TracedEvent, ...]]
    boundary: int
    boundary_grad: int
    entry_requires_grad: bool
    cut: Cut | str | None
    ends: Ends | str | None


Placed = tuple[tuple[Group, Placement], ...]
"""The placement along each axis of the mesh."""


class TracedTensor(NamedTuple):
    """A parameter, a buffer of the module, or an input; where inputs go, `shape` depends on their sizes.

    A parameter that does not require a gradient is frozen. `dtype` is what the module holds: a precision
    decides the type of trained floats, and of frozen ones of float32; narrower frozen floats are cast where
    it has no float32, and integers never. Of a DTensor `shape` is the whole, `placements` are by mesh axis,
    and `grad_placements` are its gradient's where they differ. `gathered_as`: the type in which FSDP2's
    extensions gather it; empty where the precision decides.
    """

    name: str
    shape: tuple[Size, ...]
    dtype: str
    requires_grad: bool = True
    placements: Placed = ()
    grad_placements: Placed = ()
    gathered_as: str = ""

    @property
    def is_floating_point(self) -> bool:
        """Whether it is of floats."""
        return "float" in self.dtype

    @property
    def keeps_dtype(self) -> bool:
        """Whether a parameter is held in its own type beside others that a precision stores in float32."""
        return not (self.is_floating_point and (self.requires_grad or self.dtype == FP32.name))

    def buffer(self, batch: int, seq_len: int) -> Buffer:
        """The buffer for these sizes of the input."""
        return buffer_of(self.name, shape_at(self.shape, batch, seq_len), DTYPES[self.dtype])


class TracedKind(NamedTuple):
    """A kind of blocks: what they are, and the parameters of one of them, named with a * for its number."""

    role: Role
    parameters: tuple[TracedTensor, ...]


def called_kinds(of_kind: Mapping[str, TracedKind]) -> list[str]:
    """The kinds of blocks that are called, and have parts in recordings."""
    return [kind for kind, one in of_kind.items() if one.role != "idle"]


def shape_at(shape: Iterable[Size], batch: int, seq_len: int) -> Shape:
    """A shape for these sizes of the input."""
    return tuple([size_at(dim, batch, seq_len) for dim in shape])


def buffer_at(one: TracedBuffer, batch: int, seq_len: int) -> Buffer:
    """A traced buffer for these sizes of the input."""
    shape, n_bytes = shape_at(one.shape, batch, seq_len), size_at(one.n_bytes, batch, seq_len)
    if n_bytes < 0 or any(n < 0 for n in shape):
        raise InvalidValue(f"{one.name} would have {n_bytes} bytes; trace the module with such an input.")
    return Buffer(one.name, shape, one.dtype, n_bytes, one.kind)
