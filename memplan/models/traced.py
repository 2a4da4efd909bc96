"""A model traced from someone's `torch.nn.Module`: the events of its passes, for any batch and length.

`memplan.trace` makes one. It is written as JSON and read back without torch. A file holds data only, no code,
and every field is checked when it is read.
"""

import json
import os
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise, product
from typing import Any, ClassVar, Final, Literal, NamedTuple, cast, final, get_args

from memplan import shapes
from memplan.checks import LARGEST, LARGEST_BYTES, checked_choice, checked_count
from memplan.device import Device, DeviceType
from memplan.errors import InvalidValue, MemplanError, MissingRule, shown_value, unknown_name
from memplan.files import file_text, json_value, of_file
from memplan.mesh import Group, checked_group
from memplan.models.base import BLOCKS, MOST_LAYERS, Layers, Model, Role
from memplan.models.workspaces import Asked, Run
from memplan.ops.kernel_calls import KERNELS
from memplan.placements import Partial, Placement, Replicate, Shard
from memplan.record import CollectiveKind, ComputeKind, HookKind, Phase
from memplan.shapes import FP32, KINDS, Buffer, DType, Kind, Shape, buffer_of, n_elements
from memplan.tape import Tensor

FORMATS: Final = (
    "memplan trace 1",
    "memplan trace 2",
    "memplan trace 3",
    "memplan trace 4",
    "memplan trace 5",
)
"""The formats that a file may name.

In the first, computations have FLOPs only. The third has `layers` and `kinds` instead of `n_blocks` and
`block_parameters`; it is written where not all blocks are of one kind, else the second. The fourth, of a
module that is divided over a `mesh`, has collectives and placements too. The fifth is of ZeRO-3 alone, with
the hooks of every module.
"""

BEGINS: Final = b'{"format":"memplan trace '
"""How a file begins."""

LARGEST_TRACE_BYTES: Final = 64 * 1024**2
"""A trace is some hundred KiB; a larger file is taken for a mistake."""

MOST_VALUES: Final = 3_000_000
"""The most values of a trace; a module of 250,000 operations and frees has 600,000."""

MOST_DIMS: Final = 64
"""The most dims of a tensor (`at::MAX_DIMS`), and the most sizes that an operation has."""

MOST_RESULTS: Final = 4
"""The most results that a kernel returns."""

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

TRAINER: Final = "trainer"
"""The key beside a config.json's own under which is how transformers' Trainer calls the module."""


class Scoring(NamedTuple):
    """How TRL's SFTTrainer scores tokens: in tiles, so that a trace is of one micro-batch and length.

    `gathers_head`: the output layer's weight is a DTensor, which it gathers itself.
    """

    micro_batch: int
    seq_len: int
    gathers_head: bool


class ByTrainer(NamedTuple):
    """How transformers' Trainer calls a module: whether DDP clones outputs, whether FSDP2 casts floats.

    `scoring`: how TRL's SFTTrainer does, which builds on it; None: the Trainer itself calls it.
    """

    clones_outputs: bool = False
    casts_inputs: bool = False
    scoring: Scoring | None = None


ROTATES: Final = ("allgather", "alltoall")
"""How `context_parallel` hands keys and values around: the two rotations that are traced."""

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
    Or the "hook" of FSDP2 that `kernel` names is called, of a unit within a block with these `parameters`. Or
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
    values around ("": there is no ring); `cp_rank`: the place of the recorded rank in the ring.
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
    and `grad_placements` are its gradient's where they differ.
    """

    name: str
    shape: tuple[Size, ...]
    dtype: str
    requires_grad: bool = True
    placements: Placed = ()
    grad_placements: Placed = ()

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


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TracedModel(Model):
    """A model traced from a `torch.nn.Module`; two are equal if their traces have the same content.

    Attributes whose meaning their name does not tell:
        d_model: nothing; what is handed from block to block is recorded.
        layers: its blocks by kind, in the order in which they are called, over all stacks.
        of_kind: each kind's role and parameters.
        tied: whether one parameter has several names.
        blocks: the path of each stack of blocks in the module, with a * for the blocks' number.
        embed_parameters, head_parameters: those before the first block, and all other ones that are no
            block's, in the module's order.
        module_buffers: what the module holds beside its parameters; DDP sends it to all ranks.
        device: whose kernels the trace is of.
        made_with: the releases it was traced with.
        has_sequence: whether sizes follow `seq_len`; if not, it is 1.
        limits: the batch (0: any) and length that were traced, where nothing is known of others.
        neglects: the operations whose workspaces are not in the trace, but for what is `asked`.
        asked: the workspaces of convolutions as cuDNN was asked, for some GPUs and micro-batches.
        lacks: packages that were not installed, in whose place transformers' own code was traced.
        attention: "eager" if transformers' eager attention was traced; else "".
        unused: the parameters that require a gradient and get none; they take what frozen ones take.
        mesh: the ranks along each axis over which the module was divided; recordings are the first rank's.
        config: the config.json that its module was made of, from which it is traced for other degrees.
    """

    divides_itself: ClassVar[bool] = False
    family: ClassVar[str] = "traced"
    implementation: ClassVar[str] = "traced"
    code: ClassVar[str] = "the module's own"

    d_model: int = 0
    layers: tuple[Layers, ...] = field()
    of_kind: Mapping[str, TracedKind] = field(repr=False)
    blocks: tuple[str, ...]
    tied: bool
    embed_parameters: tuple[TracedTensor, ...] = field(repr=False)
    head_parameters: tuple[TracedTensor, ...] = field(repr=False)
    module_buffers: tuple[TracedTensor, ...] = field(repr=False)
    inputs_of_step: tuple[TracedTensor, ...] = field(repr=False)
    recordings: Mapping[Variant, Recording] = field(repr=False)
    device: DeviceType
    made_with: str
    has_sequence: bool
    limits: tuple[int, int] | None = None
    neglects: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    attention: str = ""
    mesh: Mapping[Group, int] = field(default_factory=dict)
    asked: Asked = field(default=Asked(), repr=False)
    config: str = field(default="", compare=False, repr=False)
    _digest: list[str] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        """Nothing is checked: what is read from a file was checked there."""

    @property
    def digest(self) -> str:
        """A checksum of the trace's content, computed when it is first asked for."""
        import hashlib  # slow to import, and rarely needed

        if not self._digest:
            text = json.dumps(_plain(self), separators=(",", ":"))
            self._digest.append(hashlib.sha256(text.encode()).hexdigest())
        return self._digest[0]

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, TracedModel) and other.digest == self.digest)

    def __hash__(self) -> int:
        return hash((self.name, self.device, self.made_with))

    def buffers(self, seq_len: int) -> tuple[Buffer, ...]:
        return tuple([one.buffer(1, seq_len) for one in self.module_buffers])

    def buffers_beside(self, layers: Iterable[Layers], seq_len: int) -> Iterator[Buffer]:
        """The module's buffers where it has these of its blocks only, as a pipeline's stage has."""
        before = self.blocks[0].partition("*")[0] if self.blocks else "."
        kinds = [kind for kind, n in self.layers for _ in range(n)]
        of_kind: dict[str, dict[str, list[Buffer]]] = {}
        for one in self.module_buffers:
            number, _, _ = one.name.removeprefix(before).partition(".")
            buffer = one.buffer(1, seq_len)
            if one.name.startswith(before) and number.isdecimal():
                of_kind.setdefault(kinds[int(number)], {}).setdefault(number, []).append(buffer)
            else:
                yield buffer
        for kind, n in layers:
            yield from next(iter(of_kind.get(kind, {}).values()), []) * n

    def notes(self, device: Device, micro_batch: int) -> Iterator[str]:
        idle = sum([n for kind, n in self.layers if self.role(kind) == "idle"])
        if idle:
            yield (
                f"{idle} blocks of {self.name} are never called by the inputs it was traced with: their "
                "weights are held, and nothing else of them is counted."
            )
        if is_of_torchtitan(self):
            yield (
                f"{self.name} is planned as torchtitan ({self.made_with}) runs it, with its "
                "ScaledDotProductAttention for FlexAttention, and the loss of all tokens at once. Tokens are "
                "taken to choose all experts equally often: a rank whose experts are chosen more holds more "
                "activations, in proportion."
            )
        if self.attention == "eager":
            yield (
                f"{self.name} was traced with eager attention, which keeps the scores of all pairs of tokens "
                "for the backward pass; a fused kernel (flash attention with sinks, say) would not."
            )
        if self.lacks:
            packages = " and ".join(self.lacks)
            yield (
                f"{self.name} was traced without {packages}: what transformers computes in PyTorch instead "
                "is counted, and their kernels may allocate otherwise."
            )
        known = self.asked.knows(device.name, micro_batch)
        if known:
            yield (
                f"the workspaces of {self.name}'s convolutions are those that {self.asked.library} states "
                f"for {device.name}, asked without a GPU."
            )
        neglected = [one for one in self.neglects if not (known and one == CONVOLUTIONS)]
        if neglected:
            yield (
                f"the workspaces of {self.name}'s {' and '.join(neglected)} are not counted: cuDNN "
                "chooses its engines by GPU and release, and what they need is often as large as the layer's "
                "input and output. They matter to the peak where such a layer runs at it, and to what is "
                "reserved."
            )
        if CONVOLUTIONS in neglected and self.asked.runs:
            where = self.asked.nearest_text(device.name, micro_batch)
            yield f"the workspaces of {self.name}'s convolutions are known {where}."

    def inputs(self, samples: int, seq_len: int) -> tuple[Buffer, ...]:
        return tuple([one.buffer(samples, seq_len) for one in self.inputs_of_step])

    @property
    def parameters(self) -> Iterable[tuple[TracedTensor, int]]:
        """Every parameter, and the number of its equals (one per block)."""
        found = [(one, 1) for one in (*self.embed_parameters, *self.head_parameters)]
        counts: Counter[TracedTensor] = Counter()
        for kind, n in self.layers:
            counts.update(dict.fromkeys(self.of_kind[kind].parameters, n))
        return [*found, *counts.items()]

    @property
    def frozen(self) -> tuple[str, ...]:
        """The names of the parameters that are not trained: frozen, or unused."""
        return tuple([one.name for one, _ in self.parameters if not one.requires_grad])

    @property
    def is_zero3(self) -> bool:
        """Whether it was traced for DeepSpeed's ZeRO-3."""
        return any(variant.units == MODULE for variant in self.recordings)

    @property
    def integer_dtypes(self) -> tuple[str, ...]:
        """The types of parameters that are not of floats."""
        return tuple(sorted({one.dtype for one, _ in self.parameters if not one.is_floating_point}))

    @property
    def narrow_dtypes(self) -> tuple[str, ...]:
        """The types of floats that frozen parameters keep beside others in float32."""
        kept = [one for one, _ in self.parameters if one.keeps_dtype and one.is_floating_point]
        return tuple(sorted({one.dtype for one in kept}))

    @property
    def trained_dtypes(self) -> tuple[str, ...]:
        """The types in which the module holds the parameters that it trains."""
        return tuple(sorted({one.dtype for one, _ in self.parameters if one.requires_grad}))

    @property
    def n_parameters(self) -> int:
        """Elements of all weights."""
        return sum([n * n_elements(shape_at(one.shape, 1, 1)) for one, n in self.parameters])

    def recording(
        self,
        *,
        weights: str,
        autocast: str,
        recompute: str,
        batch: int,
        seq_len: int,
        units: str = "",
        cp_rank: int = 0,
        rotate: str = "",
    ) -> Recording:
        """The recording of a micro-batch under these units of FSDP2, `seq_len` tokens on a rank.

        Of context-parallel ranks the one at this place, or the first if that was not recorded.

        Raises:
            MissingRule: it was not recorded so, or not for these sizes.
        """
        whole = seq_len * self.mesh.get("cp", 1)
        if self.limits is not None and self.limits not in ((batch, whole), (0, whole)):
            size, length = self.limits
            samples = f"a micro-batch of {size} and " if size else ""
            raise MissingRule(
                f"{self.name} was traced with {samples}seq_len={length}, and what it does at other sizes "
                "follows from no rule; use these, or trace it again.",
                kind="a traced model at a size that was not traced",
            )
        if not self.has_sequence and seq_len != 1:
            raise MissingRule(
                f"seq_len={seq_len}: the inputs of {self.name} have no sequence; use seq_len=1.",
                kind="a traced model that has no sequence",
            )
        asked = Variant(weights, autocast, recompute, batch == 1, rotate=rotate if "cp" in self.mesh else "")
        fewer = (MODULE,) if units == MODULE else UNITS[UNITS.index(units) :: -1]
        for place, known in product((cp_rank, 0), fewer):
            if (variant := asked._replace(units=known, cp_rank=place)) in self.recordings:
                return self.recordings[variant]
        others = sorted({_variant_text(variant) for variant in self.recordings})
        said = _variant_text(asked._replace(units=units))
        raise MissingRule(
            f"{self.name} was not traced with {said}, but with: {'; '.join(others)}; use "
            "these, or trace it again so, if PyTorch runs it so (on CUDA no batch norm with weights in "
            "bfloat16).",
            kind="a traced model in a way in which it was not traced",
        )

    def config_values(self) -> dict[str, Any] | None:
        return cast(dict[str, Any], json.loads(self.config)) if self.config else None

    @property
    def n_experts(self) -> int:
        values = self.config_values() or {}
        found = [values[key] for key in EXPERTS if isinstance(values.get(key), int)]
        return found[0] if found else 0

    def role(self, kind: str) -> Role:
        return self.of_kind[kind].role

    @property
    def n_blocks(self) -> int:
        return self.n_layers

    @property
    def n_layers(self) -> int:
        """How many blocks its stacks have."""
        return sum([n for kind, n in self.layers if self.role(kind) == "block"])

    @property
    def n_stacks(self) -> int:
        """How many parts its blocks are in that other operations separate."""
        return sum([self.role(kind) == "between" for kind, _ in self.layers]) + 1

    def layers_in(self, blocks: range) -> tuple[Layers, ...]:
        return self.layers if len(blocks) == self.n_layers else Model.layers_in(self, blocks)

    def sizes(self) -> dict[str, Any]:
        names = ("name", "n_layers", "max_seq_len", "device", "made_with", "digest")
        return {**{name: getattr(self, name) for name in names}, "blocks": ", ".join(self.blocks)}

    def embed(self, tokens: Tensor) -> Tensor:
        raise self._no_rules()

    def block(self, x: Tensor, kind: str) -> Tensor:
        raise self._no_rules()

    def head(self, x: Tensor) -> Tensor:
        raise self._no_rules()

    def _no_rules(self) -> MissingRule:
        return MissingRule(
            f"{self.name} was traced: its operations are known as they ran, and have no rules; use "
            "engine='torch' with tp=1."
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON."""
        with open(path, "w", encoding="utf-8") as file:
            made_of = {"config": json.loads(self.config)} if self.config else {}
            file.write(json.dumps(_plain(self) | made_of, separators=(",", ":")) + "\n")


def is_of_torchtitan(model: Model) -> bool:
    """Whether a model is torchtitan's own module of a mixture of experts."""
    return isinstance(model, TracedModel) and MIXTURE in (model.config_values() or {})


def modules_with(parameters: Iterable[str]) -> tuple[str, ...]:
    """Paths of the modules that hold these parameters, in order; without those inside another one of them.

    >>> modules_with(["wte.weight", "encoder.bias", "encoder.norm.weight", "encoder.norm.bias"])
    ('wte', 'encoder')
    """
    paths = dict.fromkeys(name.rpartition(".")[0] for name in parameters)
    return tuple([path for path in paths if not any(_is_within(path, other) for other in paths)])


def _is_within(path: str, other: str) -> bool:
    return path != other and (not other or path.startswith(f"{other}."))


def _variant_text(variant: Variant) -> str:
    autocast = f", autocast to {variant.autocast}" if variant.autocast else ""
    samples = "one sample" if variant.alone else "several samples"
    rotate = f", {variant.rotate}" if variant.rotate else ""
    rotate += ", by ZeRO-3's modules" if variant.units == MODULE else ""
    return f"{samples}, weights in {variant.weights}{autocast}, recompute={variant.recompute!r}{rotate}"


# --- As JSON ---


class _Tables(NamedTuple):
    """What recordings share, each once, by its index."""

    buffers: dict[TracedBuffer, int]
    computations: dict[Computation, int]
    convolutions: dict[TracedEvent, int]


def _plain(model: TracedModel) -> dict[str, Any]:
    """Plain values, as they are written."""
    tables, of_one_kind = (
        _Tables({}, {}, {}),
        list(model.of_kind) == [BLOCKS] and not (model.mesh or model.is_zero3),
    )
    plain_kinds = {kind: [role, _plain_tensors(own)] for kind, (role, own) in model.of_kind.items()}
    return {
        "format": FORMATS[4 if model.is_zero3 else 3 if model.mesh else 1 if of_one_kind else 2],
        "name": model.name,
        "device": model.device,
        "made_with": model.made_with,
        **({"n_blocks": model.n_layers} if of_one_kind else {"layers": model.layers}),
        "blocks": ", ".join(model.blocks),
        "max_seq_len": model.max_seq_len,
        "has_sequence": model.has_sequence,
        "limits": model.limits,
        **({"neglects": model.neglects} if model.neglects else {}),
        **({"unused": model.unused} if model.unused else {}),
        **({"lacks": model.lacks} if model.lacks else {}),
        **({"attention": model.attention} if model.attention else {}),
        **({"mesh": dict(model.mesh)} if model.mesh else {}),
        "tied": model.tied,
        "embed_parameters": _plain_tensors(model.embed_parameters),
        **({"block_parameters": plain_kinds[BLOCKS][1]} if of_one_kind else {"kinds": plain_kinds}),
        **{name: _plain_tensors(getattr(model, name)) for name in TENSORS[1:]},
        "frozen": model.frozen,
        "recordings": [
            {"run": _plain_variant(variant), **_plain_recording(recording, tables)}
            for variant, recording in model.recordings.items()
        ],
        "buffers": list(map(_plain_buffer, tables.buffers)),
        "computations": list(map(_plain_computation, tables.computations)),
        **(_plain_convolutions(model.asked, tables.convolutions) if tables.convolutions else {}),
    }


def _plain_convolutions(asked: Asked, convolutions: Iterable[TracedEvent]) -> dict[str, Any]:
    """The convolutions, which events name by their index, and what cuDNN was asked about each."""
    runs = {gpu: [[*map(_plain_run, of[one])] for one in convolutions] for gpu, of in asked.runs.items()}
    return {
        "convolutions": [[one.kernel, _plain_shape(one.shape), one.dtype] for one in convolutions],
        "asked": {"library": asked.library, "batches": asked.batches, "runs": runs} if runs else None,
    }


def _plain_run(run: Run) -> list[int]:
    return [*run] if run.per_sample else [*run[:-1]]


def _plain_tensors(tensors: Iterable[TracedTensor]) -> list[Any]:
    return [[one.name, _plain_shape(one.shape), one.dtype, *_plain_placed(one)] for one in tensors]


def _plain_placed(one: TracedTensor) -> list[Any]:
    """The placements of a DTensor and of its gradient; nothing of a plain tensor."""
    if not one.placements:
        return []
    return [[[axis, _plain_placement(own)] for axis, own in placed] for placed in one[-2:]]


def _plain_placement(placement: Placement) -> int | str:
    return placement.dim if isinstance(placement, Shard) else type(placement).__name__


def _placed(values: list[Any], mesh: Mapping[Group, int]) -> Placed:
    found = []
    for one in values:
        axis, placement = _items(one, "placement", str, int | str)
        if axis not in mesh or placement not in (*range(MOST_DIMS), *UNDIVIDED):
            raise _wrong(f"placement {shown_value(one)} is not allowed in a trace")
        found.append((axis, UNDIVIDED[placement] if placement in UNDIVIDED else Shard(placement)))
    return tuple(found)


UNDIVIDED: Final[Mapping[Any, Placement]] = {"Replicate": Replicate(), "Partial": Partial()}
"""The placements that divide no dim, by name."""


TENSORS: Final = (
    "embed_parameters",
    "head_parameters",
    "module_buffers",
    "inputs_of_step",
)


def _plain_variant(variant: Variant) -> list[Any]:
    """Its values; without the last ones where these are their defaults."""
    values, usual = [*variant], [*Variant("", "", "", alone=False)]
    while values[-1] == usual[len(values) - 1] and len(values) > N_ALWAYS:
        values.pop()
    return values


N_ALWAYS: Final = 4
"""The values of a variant that are always written."""


def _plain_size(size: Size) -> Any:
    if len(size) == 1 and size[0] == Term(size[0].factor):
        return size[0].factor
    return [[*term] if term.divisor > 1 else [*term[:-1]] for term in size]


def _plain_shape(shape: Iterable[Size]) -> list[Any]:
    return [_plain_size(dim) for dim in shape]


def _plain_buffer(one: TracedBuffer) -> list[Any]:
    return [one.name, _plain_shape(one.shape), one.dtype.name, _plain_size(one.n_bytes), one.kind]


def _plain_computation(one: Computation) -> list[Any]:
    """Its values; without the FLOPs where they follow from operands."""
    row = [one.kind.value, [*map(_plain_shape, one.operands)], _plain_shape(one.shape), one.dtype]
    return row if one.operands else [*row, _plain_size(one.flops)]


def _plain_recording(recording: Recording, tables: _Tables) -> dict[str, Any]:
    """A recording as plain values, of what is shared the indices in the growing tables."""
    return {
        "buffers": [_index(one, tables.buffers) for one in recording.buffers],
        "parts": {
            part: [_plain_event(event, tables) for event in events]
            for part, events in recording.parts.items()
        },
        "boundary": [recording.boundary, recording.boundary_grad, recording.entry_requires_grad],
        "cut": recording.cut,
        "ends": recording.ends,
    }


def _index(value: Hashable, table: dict[Any, int]) -> int:
    """The place of a value in a table, at whose end it is put if it is new."""
    return table.setdefault(value, len(table))


def _plain_event(event: TracedEvent, tables: _Tables) -> Any:
    """A buffer that comes is its number, one that goes is -1 less its number, one that is added to a list."""
    match event.kind:
        case "alloc":
            return event.buffer
        case "free":
            return -1 - event.buffer
        case "add":
            return [event.buffer]
        case "grad":
            return [event.buffer, event.parameter]
        case "kernel":
            return [event.kernel, event.n_results, _plain_shape(event.shape), event.dtype]
        case "workspace":
            return [event.kind, _index(event, tables.convolutions)]
        case "collective":
            return [[event.phase, event.kernel, event.axis], _plain_shape(event.shape), event.dtype]
        case "hook":
            return [event.kernel, [*event.parameters]]
        case "module":
            return [event.kernel, event.parameter, [*event.parameters]]
    return [event.phase, _index(event.computation, tables.computations)]


def model_from_trace(path: str | os.PathLike[str]) -> TracedModel:
    """The model in a file that `TracedModel.save` has written.

    Raises:
        InvalidValue: a file that cannot be read as a trace, and why.
    """
    try:
        return model_of_text(file_text(path, most_bytes=LARGEST_TRACE_BYTES, what="trace"))
    except MemplanError as error:
        raise of_file(path, error) from None


def model_of_text(text: str) -> TracedModel:
    """The model in a text that `TracedModel.save` has written.

    Raises:
        InvalidValue: a text that is no trace, and why.
    """
    n_values = text.count(",")
    if n_values > MOST_VALUES:
        raise _wrong(f"holds {n_values} values, and a trace has {MOST_VALUES} at most")
    return _model(json_value(text, what="trace", way_out="trace the module again"))


def _wrong(what: str) -> InvalidValue:
    return InvalidValue(f"{what}; trace the module again.")


def is_trace(path: str | os.PathLike[str]) -> bool:
    """Whether a file begins as a trace does."""
    try:
        if not os.path.isfile(path):
            return False
        with open(path, "rb") as file:
            return file.read(len(BEGINS)) == BEGINS
    except (OSError, ValueError, TypeError):
        return False


def _model(data: Any) -> TracedModel:
    if not isinstance(data, dict) or data.get("format") not in FORMATS:
        raise InvalidValue(
            f"is no trace; a trace's format is {' or '.join(FORMATS)}: write one with TracedModel.save."
        )
    of = _Reader(data)
    limits = of("limits", list | None)
    frozen, mesh = set(_texts(of("frozen", list), "frozen")), _mesh(of)
    tensors: dict[str, Any] = {name: _tensors(of(name, list), name, frozen, mesh) for name in TENSORS}
    layers, of_kind = _layers(of, frozen, mesh)
    parameters = [*tensors["embed_parameters"], *tensors["head_parameters"]]
    parameters += [one for kind in of_kind.values() for one in kind.parameters]
    names = {one.name for one in parameters if one.requires_grad}
    device = of("device", str)
    if device not in get_args(DeviceType):
        raise InvalidValue(f"device={shown_value(device)} is not allowed; use one of {get_args(DeviceType)}.")
    known = _Known(
        [_buffer(one) for one in of("buffers", list)],
        [_computation(one) for one in of("computations", list | None) or []],
        [_convolution(one) for one in of("convolutions", list | None) or []],
        names,
        {one.name for one in parameters},
        parts_with(called_kinds(of_kind)),
        mesh,
    )
    asked = of("asked", dict | None)
    played = _played([one for one in layers if of_kind[one.kind].role != "idle"])
    recordings = {}
    for one in of("recordings", list):
        within = _Reader(one)
        read = _older_recording if data["format"] == FORMATS[0] else _recording
        recording = read(within, known)
        _check_sums(recording, played, names)
        if isinstance(recording.cut, Cut):
            _check_cut(recording, recording.cut)
        recordings[_variant(within("run", list))] = recording
    if not recordings:
        raise _wrong("recordings is empty")
    return TracedModel(
        name=of("name", str) or "traced",
        device=device,
        made_with=of("made_with", str),
        layers=layers,
        of_kind=of_kind,
        blocks=tuple(filter(None, of("blocks", str).split(", "))),
        max_seq_len=checked_count("max_seq_len", of("max_seq_len", int)),
        has_sequence=of("has_sequence", bool),
        limits=None if limits is None else (_count(limits, 0), _count(limits, 1)),
        neglects=_texts(of("neglects", list | None) or [], "neglects"),
        unused=_texts(of("unused", list | None) or [], "unused"),
        lacks=_texts(of("lacks", list | None) or [], "lacks"),
        attention=of("attention", str | None) or "",
        mesh=mesh,
        config=json.dumps(of("config", dict | None) or {}, sort_keys=True) if data.get("config") else "",
        asked=Asked() if asked is None else _asked(_Reader(asked), known.convolutions),
        tied=of("tied", bool),
        recordings=recordings,
        **tensors,
    )


def _mesh(of: "_Reader") -> dict[Group, int]:
    """The ranks along each axis; none before the fourth format."""
    mesh = of("mesh", dict) if of.data["format"] == FORMATS[3] else {}
    return {checked_group(axis): checked_count(axis, n, least=2) for axis, n in mesh.items()}


def _layers(
    of: "_Reader", frozen: set[str], mesh: Mapping[Group, int]
) -> tuple[tuple[Layers, ...], dict[str, TracedKind]]:
    """The blocks by kind, and each kind; before the third format there is one."""
    if of.data["format"] in FORMATS[:2]:
        n = checked_count("n_blocks", of("n_blocks", int), least=0, most=MOST_LAYERS)
        own = _tensors(of("block_parameters", list), "block_parameters", frozen, mesh)
        return (Layers(BLOCKS, n),), {BLOCKS: TracedKind("block", own)}
    of_kind: dict[str, TracedKind] = {}
    for kind, value in of("kinds", dict).items():
        role, own = _items(value, "kind", str, list)
        checked_choice("role", role, get_args(Role))
        of_kind[kind] = TracedKind(cast(Role, role), _tensors(own, kind, frozen, mesh))
    layers = [_items(one, "layers", str, int) for one in of("layers", list)]
    if not layers or layers[0][0] != BLOCKS or {kind for kind, _ in layers} != {*of_kind}:
        raise _wrong(f"layers {shown_value(layers)} are not of the kinds {shown_value(list(of_kind))}")
    for _, n in layers:
        checked_count("layers", n)
    checked_count("layers", sum([n for _, n in layers]), most=MOST_LAYERS)
    return tuple([Layers(kind, n) for kind, n in layers]), of_kind


class _Reader:
    """Reads values out of an object of a file and checks their kinds."""

    def __init__(self, data: Any) -> None:
        if not isinstance(data, dict):
            raise _wrong(f"holds {shown_value(data)} where an object is needed")
        self.data = data

    def __call__(self, key: str, kind: Any) -> Any:
        value = self.data.get(key)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise _wrong(f"{key}={shown_value(value)} is not allowed in a trace")
        return value


def _items(value: Any, what: str, *kinds: Any) -> list[Any]:
    """A list of values of these kinds."""
    right = isinstance(value, list) and len(value) == len(kinds)
    if not right or not all(isinstance(one, kind) for one, kind in zip(value, kinds, strict=True)):
        raise _wrong(f"{what} {shown_value(value)} is not allowed in a trace")
    return list(value)


def _texts(values: list[Any], what: str) -> tuple[str, ...]:
    return tuple(_items(values, what, *[str] * len(values)))


def _count(values: list[Any], i: int) -> int:
    return checked_count("limits", values[i] if len(values) == 2 else None, least=i)


def _size(value: Any) -> Size:
    return _whole_size(value) if type(value) is int else _sum(value)


@lru_cache(maxsize=2**16)
def _whole_size(value: int) -> Size:
    return _sum([[value]])


def _sum(value: Any) -> Size:
    if not isinstance(value, list) or len(value) > 8:
        raise _wrong(f"size {shown_value(value)} is not allowed in a trace")
    for term in value:
        right = _are_whole(term, 1, 4) and abs(term[0]) <= LARGEST**2 and all(0 <= n <= 4 for n in term[1:3])
        if not right or not all(1 <= n <= LARGEST for n in term[3:]):
            raise _wrong(f"size {shown_value(term)} is not allowed in a trace")
    return tuple([Term(*term) for term in value])


def _are_whole(values: Any, least: int, most: int = 3) -> bool:
    """Whether the value is a list of `least` to `most` integers."""
    return isinstance(values, list) and least <= len(values) <= most and all(type(n) is int for n in values)


def _shape(value: list[Any]) -> tuple[Size, ...]:
    if len(value) > MOST_DIMS:
        raise _wrong(f"a shape of {len(value)} dims is not allowed in a trace, which has {MOST_DIMS} at most")
    return tuple([_size(dim) for dim in value])


def _dtype(name: Any) -> DType:
    if not isinstance(name, str) or name not in DTYPES:
        raise InvalidValue(
            f"type {shown_value(name)} is not allowed in a trace; use one of {', '.join(DTYPES)}."
        )
    return DTYPES[name]


def _tensors(
    values: list[Any], what: str, frozen: set[str], mesh: Mapping[Group, int]
) -> tuple[TracedTensor, ...]:
    return tuple([_tensor(one, what, frozen, mesh) for one in values])


def _tensor(value: Any, what: str, frozen: set[str], mesh: Mapping[Group, int]) -> TracedTensor:
    is_dtensor = isinstance(value, list) and len(value) == 5
    row = value if is_dtensor else [*_items(value, what, str, list, str), [], []]
    name, shape, dtype, placed, of_grad = _items(row, what, str, list, str, list, list)
    return TracedTensor(
        name,
        _shape(shape),
        _dtype(dtype).name,
        name not in frozen,
        _placed(placed, mesh),
        _placed(of_grad, mesh),
    )


def _variant(value: list[Any]) -> Variant:
    run = [*value, *Variant("", "", "", alone=False)[len(value) :]]
    weights, autocast, recompute, alone, units, rotate, cp_rank = _items(
        run, "run", str, str, str, bool, str, str, int
    )
    _dtype(weights)
    if autocast:
        _dtype(autocast)
    checked_choice("recompute", recompute, OF_COMPILED)
    checked_choice("units", units, (*UNITS, MODULE))
    checked_choice("rotate", rotate, ("", *ROTATES))
    return Variant(
        weights, autocast, recompute, alone, units, rotate, checked_count("cp_rank", cp_rank, least=0)
    )


def _convolution(value: Any) -> TracedEvent:
    part, sizes, dtype = _items(value, "convolution", str, list, str)
    checked_choice("part", part, CONVOLVED)
    return TracedEvent("workspace", kernel=part, shape=_shape(sizes), dtype=_dtype(dtype).name)


def _computation(value: Any) -> Computation:
    follows = isinstance(value, list) and len(value) == len(Computation._fields) - 1
    kinds = str, list, list, str, int | list
    name, operands, shape, dtype, flops = _items([*value, 0] if follows else value, "computation", *kinds)
    kind = ComputeKind(checked_choice("kind", name, tuple([one.value for one in ComputeKind])))
    n, dims = OPERANDS.get(kind, (0, ())) if follows else (0, ())
    if len(operands) != n or not all(isinstance(one, list) and len(one) in dims for one in operands):
        raise _wrong(f"operands {shown_value(operands)} of {name} are not allowed in a trace")
    return Computation(kind, tuple(map(_shape, operands)), _shape(shape), _dtype(dtype).name, _size(flops))


def _asked(within: _Reader, convolutions: list[TracedEvent]) -> Asked:
    batches = [checked_count("batch", one) for one in within("batches", list)]
    _check_ascends(batches, "batches")
    runs = {}
    for gpu, tables in within("runs", dict).items():
        each = [_runs(table) for table in _items(tables, "runs", *[list] * len(convolutions))]
        if any(table[-1].last != batches[-1] for table in each):
            raise _wrong(f"runs of {shown_value(gpu)} end before the last micro-batch")
        runs[gpu] = dict(zip(convolutions, each, strict=True))
    return Asked(library=within("library", str), batches=tuple(batches), runs=runs)


def _runs(table: list[Any]) -> tuple[Run, ...]:
    for run in table:
        if not _are_whole(run, 2) or max(map(abs, run)) > LARGEST_BYTES:
            raise _wrong(f"run {shown_value(run)} is not allowed in a trace")
    _check_ascends([run[0] for run in table], "runs")
    return tuple([Run(*run) for run in table])


def _check_ascends(values: list[int], what: str) -> None:
    """Raise unless there are values, and each is larger than the one before."""
    if not values or any(one >= other for one, other in pairwise(values)):
        raise _wrong(f"{what} {shown_value(values)} do not ascend")


class _Known(NamedTuple):
    """What recordings may refer to."""

    buffers: list[TracedBuffer]
    computations: list[Computation]
    convolutions: list[TracedEvent]
    parameters: set[str]
    weights: set[str]
    parts: tuple[str, ...]
    mesh: Mapping[Group, int]


def _recording(within: _Reader, known: _Known) -> Recording:
    buffers = [known.buffers[_place(one, len(known.buffers))] for one in within("buffers", list)]
    parts = _Reader(within("parts", dict))
    boundary, boundary_grad, requires_grad = _items(within("boundary", list), "boundary", int, int, bool)
    n = len(buffers)
    for i in (boundary, boundary_grad):
        checked_count("boundary", i, least=-1, most=n - 1)
    return Recording(
        tuple(buffers),
        {
            part: tuple(
                [
                    _moved(one) if type(one) is int and -n <= one < n else _event(one, n, known)
                    for one in parts(part, list)
                ]
            )
            for part in known.parts
        },
        boundary,
        boundary_grad,
        requires_grad,
        _cut(within("cut", list | str | None), n),
        _ends(within("ends", list | str | None), parts),
    )


def _older_recording(within: _Reader, known: _Known) -> Recording:
    """A recording in the first format, in which what is computed after a workspace is a convolution."""
    recording = _recording(within, known)
    parts = {part: tuple(_with_convolutions(events)) for part, events in recording.parts.items()}
    return recording._replace(parts=parts)


def _with_convolutions(events: Iterable[TracedEvent]) -> Iterator[TracedEvent]:
    kind = ComputeKind.UNKNOWN
    for one in events:
        if one.kind == "workspace":
            kind = ComputeKind.CONVOLUTION
        elif one.kind == "compute":
            one = one._replace(computation=one.computation._replace(kind=kind))
            kind = ComputeKind.UNKNOWN
        yield one


def _ends(value: list[Any] | str | None, parts: _Reader) -> Ends | str | None:
    if not isinstance(value, list):
        return value
    *ends, embed_backward, head_backward = _items(value, "ends", list, list, int, int)
    (a, b), (c, d) = (_items(places, "ends", int, int) for places in ends)
    of_part = {"embed": (a, b), "head": (c, d), "embed_backward": (embed_backward,)}
    for part, places in (of_part | {"head_backward": (head_backward,)}).items():
        for place in places:
            checked_count("ends", place, least=0, most=len(parts(part, list)))
    return Ends((a, b), (c, d), embed_backward, head_backward)


def _cut(value: list[Any] | str | None, n_buffers: int) -> Cut | str | None:
    if not isinstance(value, list):
        return value
    found = Cut(*_items(value, "cut", int, str, int, str, list, int, int, list))
    for part in (found.entry_freed, found.last_freed):
        checked_choice("part", part, PARTS)
    perhaps = found.entry_grad, found.output, found.loss
    for i in (found.entry, *found.embedded, *found.recast, *[i for i in perhaps if i != -1]):
        _place(i, n_buffers)
    return found._replace(embedded=tuple(found.embedded), recast=tuple(found.recast))


def _place(value: Any, n: int) -> int:
    if type(value) is int and 0 <= value < n:
        return value
    return checked_count("buffer", value, least=0, most=n - 1)


def _buffer(value: Any) -> TracedBuffer:
    name, shape, dtype, n_bytes, kind = _items(value, "buffer", str, list, str, int | list, str)
    if kind not in KINDS:
        raise InvalidValue(
            f"kind {shown_value(kind)} is not allowed in a trace; use one of {', '.join(KINDS)}."
        )
    return TracedBuffer(name, _shape(shape), _dtype(dtype), _size(n_bytes), kind)


def _event(value: Any, n_buffers: int, known: _Known) -> TracedEvent:
    if isinstance(value, int):
        _place(value if value >= 0 else -1 - value, n_buffers)
        return _moved(value)
    if isinstance(value, list) and len(value) == 1:
        return TracedEvent("add", _place(value[0], n_buffers))
    if isinstance(value, list) and len(value) == 3 and isinstance(value[0], str):
        when, path, of = _items(value, "hook", str, str, list)
        checked_choice("hook", when, HOOKS)
        if not {*(names := _texts(of, "hook"))} <= known.weights:
            raise _wrong(f"parameters {shown_value(names)} of {shown_value(path)} are not all the module's")
        return TracedEvent("module", parameter=path, kernel=when, parameters=names)
    if isinstance(value, list) and len(value) == 3:
        called, shape, dtype = _items(value, "collective", list, list, str)
        phase, kind, axis = _items(called, "collective", str, str, str)
        checked_choice("phase", phase, PHASES)
        checked_choice("kind", kind, get_args(CollectiveKind))
        if axis not in known.mesh:
            raise _wrong(f"a collective over {shown_value(axis)} is over no axis of the mesh")
        return TracedEvent(
            "collective", phase=phase, kernel=kind, axis=axis, shape=_shape(shape), dtype=_dtype(dtype).name
        )
    if isinstance(value, list) and len(value) == 2:
        what, of = value
        if what == "workspace":
            return known.convolutions[_place(of, len(known.convolutions))]
        if what in HOOKS:
            names = _texts(_items(value, "hook", str, list)[1], "hook")
            if not set(names) <= known.parameters:
                raise _wrong(f"parameters {shown_value(names)} are not all trained")
            return TracedEvent("hook", kernel=what, parameters=names)
        if what in PHASES:
            computation = known.computations[_place(of, len(known.computations))]
            return TracedEvent("compute", phase=what, computation=computation)
        if not isinstance(of, str) or of not in known.parameters:
            raise _wrong(f"parameter {shown_value(of)} is none that the module trains")
        return TracedEvent("grad", _place(what, n_buffers), of)
    phase, flops, shape, dtype = _items(value, "event", str, int | list, list, str)
    if phase in KERNELS and len(shape) == KERNELS[phase].n_sizes:
        n_results = checked_count("results", flops, least=0, most=MOST_RESULTS)
        return TracedEvent(
            "kernel", kernel=phase, n_results=n_results, shape=_shape(shape), dtype=_dtype(dtype).name
        )
    if phase not in PHASES:
        raise unknown_name("phase", phase, PHASES)
    computation = Computation(ComputeKind.UNKNOWN, (), _shape(shape), _dtype(dtype).name, _size(flops))
    return TracedEvent("compute", phase=phase, computation=computation)


@lru_cache(maxsize=2**16)
def _moved(value: int) -> TracedEvent:
    return TracedEvent("alloc", value) if value >= 0 else TracedEvent("free", -1 - value)


def _played(layers: Sequence[Layers]) -> list[tuple[str, int]]:
    """The parts of a step in the order in which they run, with how many times each runs in a row.

    >>> [f"{n} {part}" for part, n in _played([Layers(BLOCKS, 3), Layers("experts", 2)]) if "_" not in part]
    ['1 inputs', '1 embed', '1 entry', '2 block', '2 experts', '1 head', '1 loss', '1 end']
    """
    first = min(1, sum([n for _, n in layers]))
    runs = [(part_of_kind(kind), n - first * (i == 0)) for i, (kind, n) in enumerate(layers)]
    order: list[tuple[str, int]] = []
    for part in PARTS:
        stem, _, suffix = part.partition("_")
        if stem == "block":
            of_kinds = runs[::-1] if suffix == "backward" else runs
            order += [(f"{kind}_{suffix}" if suffix else kind, n) for kind, n in of_kinds]
        else:
            order.append((part, first if stem == "entry" else 1))
    return order


def _check_sums(recording: Recording, played: Sequence[tuple[str, int]], trained: set[str]) -> None:
    """Raise unless each buffer is freed or made a gradient as often as it is allocated, and not before.

    Every parameter that is trained gets a gradient; a kernel's results come right after it.
    """
    held: Counter[int] = Counter()
    with_gradient: set[str] = set()
    for part, n in played:
        events = recording.parts[part]
        for buffer, (net, least) in _changes(events, part).items() if n else ():
            if not least and not net:
                continue
            if held[buffer] + min(0, (n - 1) * net) + least < 0:
                raise _wrong(f"{part} frees {_named(recording, buffer)}, which nothing has allocated")
            held[buffer] += n * net
        with_gradient.update([one.parameter for one in events if one.kind == "grad"] if n else ())
    left = next((buffer for buffer, n in held.items() if n), None)
    if left is not None:
        raise _wrong(f"nothing frees {_named(recording, left)}, and it is no gradient")
    if with_gradient != trained:
        raise _wrong(f"parameter {shown_value(min(trained - with_gradient))} is trained and has no gradient")


def _check_cut(recording: Recording, cut: Cut) -> None:
    """Raise unless what passes between stages is freed where the cut says so."""
    for part, buffer in ((cut.entry_freed, cut.entry), ("end", cut.loss)):
        if TracedEvent("free", buffer) not in recording.parts[part]:
            raise _wrong(f"cut says that {part} frees {_named(recording, buffer)}, which it does not")
    if TracedEvent("alloc", recording.boundary) not in recording.parts["entry"]:
        raise _wrong(f"no block allocates {_named(recording, recording.boundary)}, the boundary of blocks")


def _named(recording: Recording, buffer: int) -> str:
    return shown_value(recording.buffers[buffer].name)


def _changes(events: Sequence[TracedEvent], part: str) -> dict[int, tuple[int, int]]:
    """How many more of each buffer there are after some events, and the least on the way, at most 0."""
    found: dict[int, tuple[int, int]] = {}
    n_results = 0
    for one in events:
        kind, buffer = one.kind, one.buffer
        if kind == "alloc":
            n_results = n_results and n_results - 1
            net, least = found.get(buffer, (0, 0))
            found[buffer] = net + 1, least
            continue
        if n_results:
            raise _wrong(f"{part} has a kernel without its results")
        if kind == "kernel":
            n_results = one.n_results
        elif kind in ("free", "add", "grad"):
            net, least = found.get(buffer, (0, 0))
            found[buffer] = net - (kind != "add"), least if least < net else net - 1
    if n_results:
        raise _wrong(f"{part} has a kernel without its results")
    return found


def shape_at(shape: Iterable[Size], batch: int, seq_len: int) -> Shape:
    """A shape for these sizes of the input."""
    return tuple([size_at(dim, batch, seq_len) for dim in shape])


def buffer_at(one: TracedBuffer, batch: int, seq_len: int) -> Buffer:
    """A traced buffer for these sizes of the input."""
    shape, n_bytes = shape_at(one.shape, batch, seq_len), size_at(one.n_bytes, batch, seq_len)
    if n_bytes < 0 or any(n < 0 for n in shape):
        raise InvalidValue(f"{one.name} would have {n_bytes} bytes; trace the module with such an input.")
    return Buffer(one.name, shape, one.dtype, n_bytes, one.kind)
