"""Abstract autograd: a forward pass over shapes, recorded as PyTorch would allocate and free.

Lifetimes follow Python's own reference counts, as they do in PyTorch: an abstract tensor is freed when no
name, no pending gradient and no node refers to it any more. A forward pass written like the torch module
therefore allocates and frees in the torch module's order. The backward pass runs the nodes in the reverse of
their creation, which is the order of PyTorch's engine (highest sequence number first).

Source: torch/csrc/autograd/engine.cpp (`evaluate_function`), torch/csrc/autograd/input_buffer.cpp
(`accumulate`), torch.utils.checkpoint:_checkpoint_without_reentrant_generator (with early stop).
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, cast

from memplan.device import H100, Device, DeviceType
from memplan.errors import InvalidValue, MissingRule
from memplan.kernels import (
    FREES_WORKSPACES,
    LT_WORKSPACE_BYTES,
    Release,
    product_workspace_bytes,
    reduction_scratch,
)
from memplan.mesh import HOST, with_several
from memplan.offload_activations import OffloadActivations
from memplan.placements import WHOLE, Partial, Placement, Placements, Replicate, Shard, changed, shown
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
    Phase,
    flops_of,
    gradient_products,
)
from memplan.shapes import (
    FP16,
    FP32,
    INT32,
    UINT8,
    Buffer,
    DType,
    Kind,
    Parameter,
    Role,
    Shape,
    check_equal,
    n_elements,
)

Backend = Literal["gloo", "nccl", "nccl-at-once", "fake"]
"""The backend of collectives; `nccl-at-once`: NCCL whose collectives take no time, as in `validate.nogpu`."""

NCCL: Final = frozenset({"nccl", "nccl-at-once"})
"""NCCL's process group."""

HOLD_WHAT_IS_SENT: Final = frozenset({"gloo", "nccl-at-once"})
"""Backends whose handles hold a collective's operand until they are waited for.

NCCL's watchdog looks ten times a second whether it is done, and drops the operand long before a step waits.

Source: torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp (`stashed_for_allocator_safety_`, `watchdogHandler`).
"""

USUAL_BACKENDS: Final[dict[DeviceType, Backend]] = {"cpu": "gloo", "cuda": "nccl"}
"""The backend of each device type, unless another is asked for. `fake` moves nothing and holds nothing.

Source: torch/csrc/distributed/c10d/FakeProcessGroup.hpp (`FakeProcessGroup`).
"""

CPU_RNG_STATE_BYTES: Final = 5056
"""The state of PyTorch's CPU generator (`torch.get_rng_state().nbytes`), kept by every recomputed region."""

Saved = tuple["Tensor", ...]
"""The tensors that an operation saves for its backward."""

Grads = tuple["Tensor | Expanded | None", ...]
"""The gradients that a backward returns: one for each input, None where the input needs none."""

Backward = Callable[["Tensor", Saved], Grads]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpContext:
    """Everything beside the shapes that an operation's allocations depend on.

    `weight_dtype` is the type the operations see the weights in; `autocast` is the type that matrix products
    run in on float32 weights; `tp` ranks divide the weights, and the sequence if `sequence_parallel`; `ep`
    ranks divide experts, which are units of FSDP2 of their own if it `plays_hooks`; `cp` ranks divide each
    sequence, of which the rank at this place among them has `seq_len` tokens, and hand keys and values around
    as `cp_rotate_method` says.
    `remakes_dtensors`: weights are plain tensors from which DTensors are made in each pass, as by DDP:
    gradients get their weights' placements as soon as they are made. `cast_units`: the units of FSDP2,
    "block" or "block+ends", whose arguments are cast to the type of the weights. `loss_chunks`: pieces of the
    sequence whose cross-entropy is computed one after the other. `torch_release` is PyTorch's.
    `keeps_wide_grads`: the gradient of a narrower weight stays in float32 where it is computed so.
    `recomputes_outputs`: a checkpoint is reentrant: it computes its region's output again too, and holds it.
    `hooks_modules`: modules have hooks, and linears are ZeRO-3's. `saves_on_cpu`: what a checkpoint keeps is
    copied to the host, and back; `offloads_activations`: by TRL's `OffloadActivations`, all that is saved.
    `fuses_loss`: Liger's loss makes the logits; `chunks_head`: torchtitan's does, in pieces of the sequence.
    `trainer`: transformers' Trainer calls the module, with a
    mask of padding that is all ones; `clones_outputs`: DDP hands on clones of its outputs; `casts_inputs`:
    FSDP casts what the module is called with.
    """

    device: Device = H100
    backend: Backend = "nccl"
    weight_dtype: DType = FP32
    autocast: DType | None = None
    tp: int = 1
    cp: int = 1
    cp_rank: int = 0
    cp_rotate_method: str = "allgather"
    ep: int = 1
    plays_hooks: bool = False
    sequence_parallel: bool = False
    remakes_dtensors: bool = False
    cast_units: str = ""
    micro_batch: int = 1
    seq_len: int = 1024
    loss_chunks: int = 1
    torch_release: Release = (2, 13)
    keeps_wide_grads: bool = False
    recomputes_outputs: bool = False
    hooks_modules: bool = False
    saves_on_cpu: bool = False
    offloads_activations: bool = False
    fuses_loss: bool = False
    chunks_head: bool = False
    trainer: bool = False
    clones_outputs: bool = False
    casts_inputs: bool = False

    @property
    def mesh(self) -> dict[str, int]:
        """The sizes of the mesh axes that operations divide tensors over."""
        return with_several(tp=self.tp, cp=self.cp, ep=self.ep)

    @property
    def stream(self) -> Placement:
        """The placement of the residual stream (batch, seq, d) over the tensor axis."""
        return Shard(1) if self.sequence_parallel else Replicate()

    @property
    def scales_loss(self) -> bool:
        """Whether a loss scaler multiplies the loss: in float16."""
        return FP16 in (self.autocast, self.weight_dtype)

    @property
    def gathers_in_copies(self) -> bool:
        """Whether an all-gather copies its operand and its result, as gloo's does on the host.

        Gloo's reduce-scatter copies its operand on any device.

        Source: torch/csrc/distributed/c10d/ProcessGroupGloo.cpp (`AsyncAllgatherWork`,
        `AsyncAllgatherCUDAWork`, `reduce_scatter_tensor_coalesced`).
        """
        return self.backend == "gloo" and self.device.on_cpu


@dataclass(slots=True, eq=False, repr=False)
class Storage:
    """Owns a buffer's bytes: records their allocation when it is made and their free when it dies.

    `is_empty`: they are freed already, or another storage owns them.
    """

    buffer: Buffer
    tape: "Tape"
    is_empty: bool = False

    def __post_init__(self) -> None:
        self.tape.events.append(Alloc(self.buffer))

    def __del__(self) -> None:
        self.discard()

    def discard(self) -> None:
        """Free the bytes, whoever still refers to them."""
        if not self.is_empty:
            self.is_empty = True
            self.tape.events.append(Free(self.buffer))

    def take_over(self, other: "Storage") -> None:
        """Own the bytes of another storage in place of those that were discarded."""
        self.buffer, self.is_empty, other.is_empty = other.buffer, False, True


@dataclass(slots=True, eq=False, repr=False)
class Node:
    """One step of the backward pass: maps the output's gradient to the inputs' gradients.

    `backward` reads tensors from `saved` only, so that recomputation can supply them again. The output's
    gradients are never summed in place if it `has_dtensor_grad`. `released`: what it saved is freed.
    `grad_placements`: of each input's gradient, `WHOLE` for a weight's; None: those of the output's gradient.
    `products`: what it computes for the gradient of the i-th input. `recomputes`: what is computed again when
    its gradient is there.
    """

    inputs: "tuple[Node | Parameter | None, ...]"
    saved: Saved | None
    backward: Backward
    region: "Region | None"
    grad: "Tensor | None" = None
    has_dtensor_grad: bool = False
    released: bool = False
    grad_placements: tuple[Placements, ...] | None = None
    products: "tuple[tuple[int, ComputeKind, tuple[Shape, ...]], ...]" = ()
    recomputes: "Region | None" = None

    def computes(self, kind: ComputeKind, operands: tuple[Shape, ...], *inputs: int) -> None:
        """Say what computed its output; `inputs`: the input that each operand is, of attention's kernel 0."""
        self.computes_all((kind, operands, inputs))

    def computes_all(self, *computed: tuple[ComputeKind, tuple[Shape, ...], tuple[int, ...]]) -> None:
        """Say all that computed its output, as `computes` does one of them."""
        self.products = tuple(
            [
                (i, *one)
                for kind, operands, inputs in computed
                for i, one in zip(inputs, gradient_products(kind, operands), strict=True)
            ]
        )

    def unpacked(self) -> Saved:
        """The saved tensors; recomputed ones are handed over, others stay until the node has run.

        Source: torch.utils.checkpoint:_checkpoint_hook, torch/csrc/autograd/engine.cpp (`release_variables`).
        """
        saved = self.saved or ()
        if self.region is not None:
            self.saved = ()
        return saved


@dataclass(eq=False, repr=False, kw_only=True)
class Region:
    """A checkpointed part of the forward pass: it keeps its arguments only, and is run again in backward.

    If `selective`, the outputs of `Tape.save_if_selective` are kept too, in order, and not computed again.
    `discarded`: outputs that were freed although others have saved them, and that are filled again.
    `beside`: further arguments that are kept on the host.
    It has no slots: Python frees attributes in the order in which they were set, but slots by name.
    """

    function: "Callable[[Tensor], Tensor | Saved]"
    scope: str
    x: "Tensor"
    beside: Saved = ()
    arguments: "dict[str, Tensor]"
    selective: bool
    nodes: list[Node] = field(default_factory=list)
    n_saving: int = 0
    rng_state: "Tensor | None" = None
    output: "Tensor | None" = None
    saved_outputs: deque[Saved] = field(default_factory=deque)
    discarded: tuple[Storage, ...] = ()


class _Recomputed(Exception):
    """Stops the recomputation of a region once its last saved tensor is there."""


Source = Node | Parameter | None
"""What a tensor is the output of: a node, a weight, or nothing."""


@dataclass(slots=True, eq=False, repr=False)
class Tensor:
    """Shape, dtype, storage, and the node whose output it is (None for data and for gradients).

    `in_flight`: the operand and scratch of the collective that fills it, held until its first use.
    `head_major`: its (batch, seq, heads, d_head) are laid out one head after the other. Over a mesh axis that
    its `placements` do not name it is `Replicate()`.
    """

    tape: "Tape"
    shape: Shape
    dtype: DType
    storage: Storage | None = None
    node: Source = None
    is_view: bool = False
    in_flight: Saved = ()
    head_major: bool = False
    placements: Placements = field(default_factory=dict)

    @property
    def n_bytes(self) -> int:
        """Bytes of the elements."""
        return n_elements(self.shape) * self.dtype.itemsize

    @property
    def name(self) -> str:
        """Its buffer's name, for people."""
        return f"a tensor of shape {self.shape}" if self.storage is None else self.storage.buffer.name

    def new(
        self, name: str, shape: Shape, dtype: DType, node: Source = None, *, head_major: bool = False
    ) -> "Tensor":
        """A freshly allocated tensor with the placements of this one, computed from it."""
        self.tape.moved_bytes += self.n_bytes - n_elements(shape) * dtype.itemsize
        return self.tape.new(name, shape, dtype, node, head_major=head_major, placements=self.placements)

    def check_placements(self, operation: str, *allowed: Placements) -> None:
        """Raise a `MissingRule` unless the placements are allowed; by default all but partial ones are."""
        if self.placements not in allowed and (allowed or Partial() in self.placements.values()):
            own, rule = shown(self.placements), " or ".join(map(shown, allowed or (WHOLE,)))
            raise MissingRule(f"{operation} of {self.name}, which is {own}, has no rule; make it {rule}.")

    def view(self, *shape: int) -> "Tensor":
        """The same bytes under another shape, in which a sharded dim begins at the same place."""
        if n_elements(shape) != n_elements(self.shape):
            raise InvalidValue(
                f"a view of shape {shape} of a tensor of shape {self.shape} has another number of elements; "
                f"use a shape of {n_elements(self.shape)} elements."
            )
        for placement in self.placements.values():
            if isinstance(placement, Shard) and shape[: placement.dim] != self.shape[: placement.dim]:
                self.check_placements(f"a view as {shape}", WHOLE)
        return Tensor(self.tape, shape, self.dtype, self.storage, self.node, True, placements=self.placements)

    def alias(self, node: Source) -> "Tensor":
        """The same bytes as the output of another node."""
        return Tensor(self.tape, self.shape, self.dtype, self.storage, node, placements=self.placements)

    def detach(self) -> "Tensor":
        """The same bytes without a node, as a node saves its own output."""
        return self.alias(None)

    def __add__(self, other: "Tensor") -> "Tensor":
        """Elementwise sum of equal shapes, promoted to the wider type; saves nothing.

        Its gradient is passed on to both.
        """
        tape = self.tape
        other.check_placements("a sum", self.placements)
        check_equal("a sum", self.shape, other.shape)
        dtype = self.dtype if self.dtype.itemsize >= other.dtype.itemsize else other.dtype
        left, right = tape.promoted(self, dtype), tape.promoted(other, dtype)
        node = tape.node((left.node, right.node), (), lambda grad, saved: (grad, grad))
        tape.moved_bytes += right.n_bytes
        return left.new("residual", left.shape, dtype, node)

    def __mul__(self, other: "Tensor") -> "Tensor":
        """Elementwise product of equal shapes and types; saves both factors."""
        self.check_placements("a product")
        other.check_placements("a product", self.placements)
        check_equal("a product", self.shape, other.shape)
        check_equal("a product", self.dtype.name, other.dtype.name)
        node = self.tape.node((self.node, other.node), (self, other), _mul_backward)
        self.tape.moved_bytes += other.n_bytes
        return self.new("product", self.shape, self.dtype, node)


def _mul_backward(grad: Tensor, saved: Saved) -> Grads:
    grad_right = grad.tape.new("grad", grad.shape, grad.dtype)
    return grad.tape.new("grad", grad.shape, grad.dtype), grad_right


class Expanded(NamedTuple):
    """The gradient of an expanded (broadcast) input, in the expanded shape.

    The tape sums it to the input's own shape and casts it to the input's type when the backward has returned.

    Source: torch/csrc/autograd/engine.cpp (`validate_outputs`).
    """

    grad: Tensor
    shape: Shape
    dtype: DType


class Workspace:
    """Buffers of one operation that are freed when the `with` block ends, the newest first."""

    __slots__ = ("_held", "_tape")

    def __init__(self, tape: "Tape | None") -> None:
        self._tape = tape
        self._held: list[Tensor] = []

    def new(self, name: str, shape: Shape, dtype: DType) -> None:
        """Allocate one more buffer."""
        if self._tape is not None:
            self._held.append(self._tape.new(name, shape, dtype))

    def keep(self, tensor: Tensor) -> None:
        """Keep a tensor alive until the block ends."""
        self._held.append(tensor)

    def handed_over(self) -> Saved:
        """The buffers, which the block no longer frees."""
        held, self._held = self._held, []
        return tuple(held)

    def __enter__(self) -> "Workspace":
        return self

    def __exit__(self, *raised: object) -> None:
        while self._held:
            self._held.pop()


class Tape:
    """Records one micro-batch's passes: events, nodes and parameters."""

    def __init__(self, context: OpContext) -> None:
        self.context = context
        self.mesh = context.mesh
        self.events: list[Event] = []
        self.nodes: list[Node] = []
        self.parameters: dict[str, Parameter] = {}
        self.products: dict[Phase, set[Buffer]] = {"forward": set(), "backward": set()}
        self.phase: Phase = "forward"
        self.moved_bytes = self.n_kernels = 0
        """What kernels beside products have read and written since `end_stretch`, and how many they were."""
        self._is_product = False
        self.scope = ""
        self._grads: dict[Parameter, Tensor] = {}
        self._casts: dict[Parameter | Node, Tensor] = {}
        self._uses: dict[Parameter, int] = {}
        self._region: Region | None = None
        self._replaying: Region | None = None
        self._replayed = self._expected = 0
        self._wanted: tuple[bool, ...] = ()
        self._retained: set[int] = set()
        self._saved_again: list[tuple[Tensor, ...]] = []
        self.held: list[Tensor] = []
        """Tensors that `hold` keeps alive."""
        self.received: Node | None = None
        """The node of the tensor that a pipeline stage has received."""
        self.reuses_received_cast = False
        """Whether several products have read one copy of it."""
        self.until_let_go: list[Event] = []
        """Frees that belong where the forward function over all blocks drops its local variables."""
        self.kinds: frozenset[str] = frozenset()
        """The kinds of the stage's blocks."""
        self.shared: dict[str, Tensor] = {}
        """Tensors made by the embedding that all blocks are called with; recomputed blocks keep them."""
        self.offload = OffloadActivations(self) if context.offloads_activations else None
        self.beside: Saved = ()
        """The copies of its module's buffers that a recomputed block is called with."""

    def new(
        self,
        name: str,
        shape: Shape,
        dtype: DType,
        node: Source = None,
        kind: Kind = "temporaries",
        *,
        head_major: bool = False,
        placements: Placements = WHOLE,
    ) -> Tensor:
        """A freshly allocated tensor, replicated over all axes; `Tensor.new` makes one placed as another.

        A kernel writes it, and reads as many bytes.
        """
        n_bytes = n_elements(shape) * dtype.itemsize
        self.moved_bytes += 2 * n_bytes
        self.n_kernels += 1
        buffer = Buffer(f"{self.scope}{name}", shape, dtype, n_bytes, kind)
        return Tensor(self, shape, dtype, Storage(buffer, self), node, False, (), head_major, placements)

    def hold(self, *tensors: Tensor) -> None:
        """Keep tensors alive until `let_go`, as local variables of a forward function over all blocks."""
        self.held += tensors

    @contextmanager
    def by_products(self) -> Iterator[None]:
        """A block whose new tensors are outputs of matrix products, or unwritten.

        They add neither memory traffic nor a kernel: the products' own time counts both.
        """
        moved = self.moved_bytes, self.n_kernels
        yield
        self.moved_bytes, self.n_kernels = moved

    @contextmanager
    def cast_arguments(self) -> Iterator[None]:
        """Cast a block's float32 arguments to the type of the weights, if the wrapper does.

        Source: torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState._pre_forward.
        """
        given = self.shared
        if self.context.cast_units:
            dtype = self.context.weight_dtype
            self.shared = given | {
                name: self.new(f"{name} as {dtype.name}", x.shape, dtype)
                for name, x in given.items()
                if x.dtype == FP32
            }
        yield
        self.shared = given

    def let_go(self) -> None:
        """Drop the held tensors and the blocks' arguments."""
        self.held.clear()
        self.events += self.until_let_go
        self.until_let_go.clear()
        self.shared.clear()

    def workspace(self) -> Workspace:
        """A block of temporary buffers: `with tape.workspace() as temporary: temporary.new(...)`."""
        return Workspace(self)

    def kernel_workspace(self) -> Workspace:
        """A block of buffers that a kernel allocates itself; none if kernels do not run."""
        return Workspace(self if self.context.device.runs_kernels else None)

    def summed(
        self, name: str, shape: Shape, dtype: DType, n_inputs: int, *, along_rows: bool = True
    ) -> Tensor:
        """A new tensor of sums of `n_inputs` numbers each, with a sum's scratch on CUDA.

        `along_rows`: as in `reduction_scratch`.
        """
        device, n_outputs = self.context.device, n_elements(shape)
        total = self.new(name, shape, dtype)
        scratch = (
            None if device.on_cpu else reduction_scratch(device, n_outputs, n_inputs, along_rows=along_rows)
        )
        if scratch is not None:
            with self.workspace() as blocks:
                blocks.new("partial sums", (scratch.sums_bytes // FP32.itemsize,), FP32)
                blocks.new("counters of partial sums", (scratch.counters_bytes // INT32.itemsize,), INT32)
        return total

    def wants(self, i: int) -> bool:
        """Whether the i-th input's gradient is computed; a split backward pass computes only some."""
        return not self._wanted or self._wanted[i]

    def grad_of(self, i: int, shape: Shape, dtype: DType, *, is_view: bool = False) -> Tensor | None:
        """A new gradient for the i-th input; None if it is not computed."""
        if not self.wants(i):
            return None
        grad = self.new("grad", shape, dtype)
        grad.is_view = is_view
        return grad

    def node(self, inputs: tuple[Node | Parameter | None, ...], saved: Saved, backward: Backward) -> Node:
        """The backward step of an operation that is about to allocate its output."""
        if self._replaying is not None:
            return self._replay(self._replaying, saved)
        for target in inputs:
            if isinstance(target, Parameter):
                self._uses[target] = self._uses.get(target, 0) + 1
        region = self._region
        if region is None:
            _mark_saved(saved)
            if self.offload is not None:
                saved = tuple(map(self.offload.packed, saved))
        elif saved:
            region.n_saving += 1
        node = Node(
            inputs, saved if region is None or not saved else None, backward, region if saved else None
        )
        self.nodes.append(node)
        if region is not None:
            region.nodes.append(node)
        return node

    def _replay(self, region: Region, saved: Saved) -> Node:
        node = region.nodes[self._replayed]
        self._replayed += 1
        if saved:
            _mark_saved(saved)
            if node.released:
                self._saved_again.append(saved)
            else:
                node.saved = saved
            self._expected -= 1
            if self._expected == 0 and not self.context.recomputes_outputs:
                raise _Recomputed
        return node

    def parameter(
        self,
        name: str,
        shape: Shape,
        *,
        dtype: DType | None = None,
        placements: Placements | None = None,
        grad_placements: Placements | None = None,
    ) -> Parameter:
        """The weight `name` of this scope, made at first use; the same name gives the same (tied) weight.

        `shape` is of the whole weight; `dtype` is the context's type of weights if it is left out;
        placements over axes of a single rank are left out. Where DTensors are
        made in each pass, a gradient gets its weight's placement unless it is partial; so does the sum of a
        tied weight's gradients with different placements (`_sum`).
        """
        key, mesh = f"{self.scope}{name}", self.mesh
        own = {axis: each for axis, each in (placements or {}).items() if axis in mesh}
        grads = {axis: each for axis, each in (grad_placements or own).items() if axis in mesh}
        if self.context.remakes_dtensors and Partial() not in grads.values():
            grads = own
        dtype = dtype or self.context.weight_dtype
        made = Parameter(key, shape, dtype, placements=own, grad_placements=grads, mesh=mesh)
        known = self.parameters.setdefault(key, made)
        check_equal(f"two uses of {key}", known.shape, made.shape)
        if known.grad_placements != made.grad_placements:
            known.grad_placements = known.placements
        return known

    def weight(self, parameter: Parameter, dtype: DType | None = None) -> Tensor:
        """A parameter as a tensor without bytes: the engine counts weights.

        In another `dtype` it is a copy that autocast keeps until `leave_autocast`. Autocast keeps copies of
        leaves only, so not of a DTensor that DDP makes in each pass.

        Source: aten/src/ATen/autocast_mode.cpp (`cached_cast`: `arg.is_leaf()`),
        torch.distributed.tensor.parallel.ddp:_reconstruct_dtensor.
        """
        own = Tensor(self, parameter.shape, parameter.dtype, None, parameter)
        if dtype is None or dtype == parameter.dtype:
            return own
        if parameter.is_dtensor and self.context.remakes_dtensors:
            return self.cast(own, dtype)
        if parameter not in self._casts:
            self._casts[parameter] = self.cast(own, dtype)
        return self._casts[parameter]

    def operand(self, x: Tensor, dtype: DType) -> Tensor:
        """`x` in the type of a product; autocast keeps the copy of a received tensor, which is a leaf.

        Source: aten/src/ATen/autocast_mode.cpp (`cached_cast`: `arg.is_leaf()`).
        """
        if x.dtype == dtype or x.node is not self.received or not isinstance(x.node, Node):
            return self.cast(x, dtype)
        if x.node in self._casts:
            self.reuses_received_cast = True
        else:
            self._casts[x.node] = self.cast(x, dtype)
        return self._casts[x.node]

    def leave_autocast(self) -> None:
        """Drop the copies of weights, and of a received tensor, that autocast has kept."""
        self._casts.clear()

    def cast(self, x: Tensor, dtype: DType) -> Tensor:
        """`x` in an element type: `x` itself, or a copy; saves nothing."""
        if x.dtype == dtype:
            return x
        node = self._cast_node(x)
        return x.new(f"copy as {dtype.name}", x.shape, dtype, node, head_major=x.head_major)

    def _cast_node(self, x: Tensor) -> Node:
        """The backward step of a cast: a copy of the gradient in the type of `x`."""
        was = x.dtype

        def backward(grad: Tensor, saved: Saved) -> Grads:
            return (grad.tape.new(f"grad as {was.name}", grad.shape, was, head_major=grad.head_major),)

        return self.node((x.node,), (), backward)

    def promoted(self, x: Tensor, dtype: DType) -> Tensor:
        """`x` as an operand of a kernel of another type: CPU's copy it first, CUDA's cast as they load.

        Source: aten/src/ATen/TensorIterator.cpp (`compute_types`: `common_device == kCPU`),
        aten/src/ATen/native/cuda/CUDALoops.cuh (`gpu_kernel_impl`: `needs_dynamic_casting`).
        """
        if x.dtype == dtype or self.context.device.casts_in_copies:
            return self.cast(x, dtype)
        return Tensor(self, x.shape, dtype, x.storage, self._cast_node(x), placements=x.placements)

    def product(self, result: Tensor | None, *, biased: bool = False) -> None:
        """Record a matrix product, whose result was just allocated, and cuBLAS's workspace.

        From torch 2.15 on the workspace is freed with each product. Before, the first product of a pass
        allocates one that stays; the results of products are noted, so that the first is known. None: the
        product is not computed.
        """
        self._is_product = True
        if result is None or result.storage is None:
            return
        device, release, buffer = self.context.device, self.context.torch_release, result.storage.buffer
        if release < FREES_WORKSPACES:
            if biased:
                buffer.role = Role.BIASED_PRODUCT
            self.products["forward" if self.phase == "forward" else "backward"].add(buffer)
        elif not device.on_cpu:
            n_bytes = LT_WORKSPACE_BYTES if biased else product_workspace_bytes(device, release)
            with self.workspace() as held:
                held.new("cuBLAS workspace", (n_bytes,), UINT8)

    def fused(self) -> None:
        """Say that a node's backward pass is one kernel with FLOPs, whose time no memory's rate tells."""
        self._is_product = True

    def computed(self, kind: ComputeKind, operands: tuple[Shape, ...], shape: Shape, dtype: DType) -> None:
        """Record a computation whose result has this shape and type."""
        self.events.append(self.computation(kind, operands, shape, dtype))

    def computation(
        self, kind: ComputeKind, operands: tuple[Shape, ...], shape: Shape, dtype: DType
    ) -> Compute:
        """A computation of the pass whose result has this shape and type."""
        flops = flops_of(kind, operands)
        return Compute(kind=kind, operands=operands, phase=self.phase, flops=flops, shape=shape, dtype=dtype)

    def end_stretch(self) -> None:
        """Record what kernels beside products have moved since the last call."""
        if self.n_kernels:
            self.events.append(
                Compute(
                    kind=ComputeKind.MEMORY, phase=self.phase, flops=0, shape=(), dtype=UINT8,
                    moved_bytes=self.moved_bytes, n_kernels=self.n_kernels,
                )
            )  # fmt: skip
        self.moved_bytes = self.n_kernels = 0

    def collective(
        self, kind: CollectiveKind, axis: str, what: str, payload_bytes: int, beside: Compute | None = None,
        calls: int = 1,
    ) -> None:  # fmt: skip
        """Record `calls` collectives over an axis of the mesh, which may run beside a computation."""
        of = f"{self.scope}{what}, {self.phase}"
        self.events.append(
            Collective(kind=kind, axis=axis, what=of, payload_bytes=payload_bytes, beside=beside, calls=calls)
        )

    def over(self, axis: str, placement: Placement) -> Placements:
        """The placements of an activation with this one over an axis; `WHOLE` if the mesh lacks the axis."""
        return changed(WHOLE, axis, placement) if axis in self.mesh else WHOLE

    @contextmanager
    def named(self, scope: str) -> Iterator[None]:
        """Prefix the names of parameters and buffers."""
        before, self.scope = self.scope, f"{self.scope}{scope}."
        yield
        self.scope = before

    @property
    def watched(self) -> bool:
        """Whether a Python dispatch mode is active, as in selective recomputation."""
        region = self._replaying or self._region
        return region is not None and region.selective

    def save_if_selective(
        self,
        compute: Callable[[], tuple[Tensor, ...]],
        kind: ComputeKind | None = None,
        operands: tuple[Shape, ...] = (),
        *,
        again: bool = False,
    ) -> tuple[Tensor, ...]:
        """The outputs of `compute`, an operation that selective recomputation saves.

        `kind` and the shapes of its `operands` (see `ComputeKind`) are recorded; None: it has no FLOPs. With
        `again` it is recomputed instead: a policy may save only some of the products.

        Source: torch.utils.checkpoint:_CachingTorchDispatchMode, and
        torch.utils.checkpoint:_CachedTorchDispatchMode.
        """
        replaying, region = self._replaying, self._region
        if replaying is not None and replaying.selective and not again:
            return replaying.saved_outputs.popleft()
        with nullcontext() if kind is None else self.by_products():
            outputs = compute()
        if kind is not None:
            self.computed(kind, operands, outputs[0].shape, outputs[0].dtype)
        if region is not None and region.selective and not again:
            _mark_saved(outputs)
            region.saved_outputs.append(tuple([y.detach() for y in outputs]))
        return outputs

    def recomputed(
        self,
        function: Callable[[Tensor], Tensor],
        x: Tensor,
        *,
        selective: bool = False,
        beside: Iterable[Buffer] = (),
    ) -> Tensor:
        """`function(x)`, of which only `x` is kept; backward runs it again for what it needs.

        `beside`: buffers of the module that `function` is called with too: kept on the host they are copies.

        Source: torch.utils.checkpoint:checkpoint, torch.autograd.graph:save_on_cpu.
        """
        self._region = region = Region(
            function=function, scope=self.scope, x=x, arguments=dict(self.shared), selective=selective
        )
        if self.context.device.on_cpu:
            region.rng_state = self._rng_state()
        if self.context.saves_on_cpu:
            region.x = self._saved_on_cpu(x)
            buffers = [Tensor(self, one.shape, one.dtype) for one in beside]
            region.beside = tuple(map(self._saved_on_cpu, buffers))
            self.beside = region.beside
        else:
            _mark_saved((x,))
        if self.offload is not None:
            self.offload.stashes_older(x)
            region.x = self.offload.packed(x)
        y = function(x)
        self._region, self.beside = None, ()
        return y if region.nodes else x

    def _saved_on_cpu(self, x: Tensor) -> Tensor:
        """What `save_on_cpu(pin_memory=True)` keeps of x: a copy, which is on the device if that is a CPU."""
        if self.context.device.on_cpu:
            kept = self.new("argument on the host", x.shape, x.dtype, x.node, "activations")
            if kept.storage is not None:
                kept.storage.buffer.role = Role.SAVED_ON_CPU
            return kept
        self.collective("copy", HOST, "activations to the host", x.n_bytes)
        return Tensor(self, x.shape, x.dtype, None, x.node)

    def another_like(self, x: Tensor) -> Tensor:
        """A tensor that is there already, with the same buffer as x: the input of another equal block."""
        if x.storage is None:
            return x.detach()
        storage = Storage(x.storage.buffer, self)
        self.events.pop()  # it was allocated before
        return Tensor(self, x.shape, x.dtype, storage, placements=x.placements)

    def _back_from_cpu(self, x: Tensor) -> Tensor:
        """What `save_on_cpu` gives back: what it kept, or a copy of that on the device."""
        if self.offload is not None:
            return self.offload.unpacked(x)
        if not self.context.saves_on_cpu or self.context.device.on_cpu:
            return x
        with self.by_products():
            found = self.new("argument from the host", x.shape, x.dtype, x.node, "activations")
        self.collective("copy", HOST, "activations from the host", x.n_bytes)
        return found

    def computed_again(self, function: Callable[[Tensor], Saved], x: Tensor) -> tuple[Saved, Region]:
        """The outputs of `function(x)`, which are to be discarded, and the region that computes them again.

        Source: megatron.core.tensor_parallel.random:CheckpointWithoutOutput.
        """
        self._region = region = Region(
            function=function, scope=self.scope, x=x, arguments=dict(self.shared), selective=False
        )
        _mark_saved((x,))
        outputs = function(x)
        self._region = None
        return outputs, region

    def discard(self, outputs: Saved, region: Region, until: Tensor) -> None:
        """Free a region's outputs, until the gradient of `until` is there."""
        region.discarded = tuple([y.storage for y in outputs if y.storage is not None])
        for storage in region.discarded:
            storage.discard()
        if isinstance(until.node, Node):
            until.node.recomputes = region

    def _sum(self, parameter: Parameter, older: Tensor, grad: Tensor) -> Tensor:
        """The sum of a tied weight's gradients: in place, unless the older is a view or a DTensor.

        A replicated DTensor is first sharded if the weight is.

        Source: torch/csrc/autograd/input_buffer.cpp (`can_accumulate_inplace`).
        """
        if not older.is_view and not parameter.is_divided:
            return older
        with self.workspace() as own:
            if grad.shape != parameter.shape:
                own.new("grad (own rows)", parameter.shape, grad.dtype)
            return self.new("sum of grads", parameter.shape, grad.dtype)

    def _taken_over(self, grad: Tensor) -> Tensor:
        """The sum of `grad` and a gradient that came from outside the tape, with the mark `AddToIncoming`."""
        buffer = Buffer("sum of grads", grad.shape, grad.dtype, grad.n_bytes, "temporaries")
        taken = Tensor(self, grad.shape, grad.dtype, Storage(buffer, self), placements=grad.placements)
        self.events[-1] = AddToIncoming(buffer)
        return taken

    def start_backward(self, output: Tensor, grad: Tensor) -> None:
        """Set the gradient of an output, which has the output's placements."""
        grad.placements = output.placements
        if isinstance(output.node, Node):
            output.node.grad = grad

    def backward(self, down_to: int = 0) -> None:
        """Run the newest nodes until `down_to` are left."""
        self.phase = "backward"
        while len(self.nodes) > down_to:
            self._step(self.nodes.pop())

    def _step(self, node: Node) -> None:
        grad, node.grad = node.grad, None
        if grad is None:
            raise MissingRule(
                "a forward operation received no gradient; its users' rules return None for it."
            )
        if node.recomputes is not None:
            region, node.recomputes = node.recomputes, None
            self._recompute(region)
            del region
        self.make_saved(node)
        grad.in_flight = ()
        grads = self.gradients(node, grad)
        if self.offload is not None:
            self.offload.after(node.region.nodes if node.region is not None else ())
        node.saved = ()
        grad = None
        inputs, node.region = node.inputs, None
        del node
        for i, target in enumerate(inputs):
            part, grads[i] = grads[i], None
            if target is not None and part is not None:
                self.deliver(target, part)
                part = None
                if isinstance(target, Parameter):
                    self._uses[target] -= 1
                    if self._uses[target] == 0:
                        self.graded(target, self._grads[target])
            part = None

    def make_saved(self, node: Node) -> None:
        """Recompute a node's region if it did not keep the node's saved tensors."""
        if node.saved is None and node.region is not None:
            self._recompute(node.region)

    def gradients(self, node: Node, grad: Tensor, wanted: tuple[bool, ...] = ()) -> list[Tensor | None]:
        """The gradients of a node's inputs; only of those `wanted`, where this is not empty.

        Those of expanded inputs are summed to the inputs' shapes, then cast to their types; their placements
        are of the expanded shape. A weight's must not be partial, unless its parameter says so.

        Source: torch/csrc/autograd/engine.cpp (`call_function`, `validate_outputs`).
        """
        self._wanted, self._is_product = wanted, False
        moved, n_kernels = self.moved_bytes, self.n_kernels
        saved_bytes = sum([x.n_bytes for x in node.saved or ()])
        found, own = list(node.backward(grad, self._unpacked(node))), node.grad_placements
        for i, kind, operands in node.products:
            if self.wants(i):
                left, right, *_ = operands
                shape = left if kind is ComputeKind.ATTENTION_BACKWARD else (*left[:-1], right[-1])
                self.computed(kind, operands, shape, grad.dtype)
        self._wanted = ()
        if self._is_product:
            self.moved_bytes, self.n_kernels = moved, n_kernels
        elif self.n_kernels > n_kernels:
            self.moved_bytes += saved_bytes
        for i, target in enumerate(node.inputs):
            part, found[i] = found[i], None
            if isinstance(part, Expanded):
                dtype, part = part.dtype, self._sum_to(part.grad, part.shape)
                if part.dtype != dtype:
                    part = self.new(f"grad as {dtype.name}", part.shape, dtype)
            if part is not None:
                part.placements = grad.placements if own is None else own[i]
                if part.placements and isinstance(target, Parameter) and not target.has_partial_grad:
                    part.check_placements(f"an addition to {target.name}.grad")
            found[i] = part
        return cast("list[Tensor | None]", found)

    def _unpacked(self, node: Node) -> Saved:
        """The saved tensors of a node, those that were on the host among them."""
        saved = node.unpacked()
        return saved if self.offload is None else tuple(map(self.offload.unpacked, saved))

    def _sum_to(self, grad: Tensor, shape: Shape) -> Tensor:
        """`grad` summed over the dims that were broadcast: those that `shape` lacks, or has of size 1.

        Source: aten/src/ATen/ExpandUtils.h (`sum_to`).
        """
        if grad.shape == shape:
            return grad
        n_inputs = n_elements(grad.shape) // n_elements(shape)
        self.moved_bytes += grad.n_bytes
        return self.summed("grad", shape, grad.dtype, n_inputs, along_rows=grad.shape[-1] == shape[-1])

    def retain(self, grad: Tensor) -> None:
        """Keep other gradients from being added to this one in place."""
        self._retained.add(id(grad.storage))

    def release_retained(self) -> None:
        """Allow in-place additions to all gradients again."""
        self._retained.clear()

    def graded_in_turn(self, parameter: Parameter, older: Tensor | None) -> Tensor:
        """A weight's gradient after one of several backward passes: the first one's, or the older one.

        A later one is added to the older one in place, without a mark, and freed.

        Source: torch/csrc/autograd/functions/accumulate_grad.h (`accumulateGrad`).
        """
        grad = self._grads.pop(parameter)
        if older is None:
            self._uses[parameter] += 1
            return grad
        self.moved_bytes += 3 * grad.n_bytes
        return older

    def keep_grad(self, parameter: Parameter, grad: Tensor) -> None:
        """Keep a weight's gradient to the end of the passes."""
        self._grads[parameter] = grad

    def graded(self, parameter: Parameter, grad: Tensor) -> Tensor:
        """`grad`, marked as the gradient of a weight."""
        if grad.storage is not None:
            grad.storage.buffer.kind = "grads"
            grad.storage.buffer.name = f"{parameter.name}.grad"
            self.events.append(AccumulateGrad(grad.storage.buffer, parameter))
        return grad

    def _rng_state(self) -> Tensor:
        state = self.new("random state", (CPU_RNG_STATE_BYTES,), UINT8, kind="activations")
        if state.storage is not None:
            state.storage.buffer.role = Role.RNG_STATE
        return state

    def _recompute(self, region: Region) -> None:
        phase = self.phase
        self.end_stretch()
        self.phase = "recompute"
        scope, casts, self.scope, self._casts = self.scope, self._casts, region.scope, {}
        self._replaying, self._replayed, self._expected = region, 0, region.n_saving
        shared, self.shared = self.shared, dict(region.arguments)
        with self.workspace() as current:
            if self.context.device.on_cpu:
                current.keep(self._rng_state())
            x, self.beside = self._back_from_cpu(region.x), tuple(map(self._back_from_cpu, region.beside))
            with suppress(_Recomputed):
                output = region.function(x.alias(x.node))
                if isinstance(output, tuple):
                    _refill(region.discarded, output)
                else:
                    region.output = output.detach() if self.context.recomputes_outputs else None
                del output
        self._saved_again.clear()
        self.shared, self.beside = shared, ()
        self.end_stretch()
        self._replaying, self.phase, self.scope, self._casts = None, phase, scope, casts

    def deliver(self, target: Node | Parameter, grad: Tensor) -> None:
        """Add a gradient to what a node or a weight has received so far."""
        if isinstance(target, Parameter):
            if target in self._grads:
                self.moved_bytes += grad.n_bytes
                self._grads[target] = self._sum(target, self._grads[target], grad)
            self._grads.setdefault(target, grad)
        elif target.grad is None:
            target.grad = grad
        elif target.grad.placements != grad.placements:
            grad.check_placements("a sum of gradients", target.grad.placements)
        elif target.grad.storage is None:
            target.grad = self._taken_over(grad)
        elif target.grad.is_view or target.has_dtensor_grad or id(target.grad.storage) in self._retained:
            self.moved_bytes += grad.n_bytes
            target.grad = grad.new("sum of grads", grad.shape, grad.dtype)
        else:
            self.moved_bytes += 3 * grad.n_bytes
            self.n_kernels += 1


class SplitBackward:
    """A backward pass in two parts: first the gradient of the stage's input, later the weights' gradients.

    The first part keeps the graph below the newest weight, with all that it has saved, and the gradient that
    reached each operation with a weight. The second part runs these operations in the order of the module,
    each as a backward pass of its own, and then frees the graph. A recomputed region is run in full for each
    of them; what it saves for other operations is kept until these have run.

    Source: torch.distributed.pipelining._backward:stage_backward_input,
    torch.distributed.pipelining._backward:stage_backward_weight, torch.utils.checkpoint:_CheckpointFrame (its
    `recomputed`, one for each graph task).
    """

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self._graph = list(tape.nodes)
        self.n_nodes = len(tape.nodes)
        self._beside: set[Node] = set()
        self._waiting: deque[tuple[int, Node, Tensor]] = deque()
        self._taken: tuple[Node, Tensor] | None = None
        self._made: list[Tensor] = []
        self._unused: dict[Node, list[tuple[Tensor, ...]]] = {}
        self._regions = dict.fromkeys(node.region for node in tape.nodes if node.region is not None)
        for node in tape.nodes:
            inputs = [target for target in node.inputs if target is not None]
            if inputs and all(map(self._is_weights, inputs)):
                self._beside.add(node)

    def _is_weights(self, target: Node | Parameter | None) -> bool:
        """Whether a gradient for `target` reaches weights only."""
        return isinstance(target, Parameter) or target in self._beside

    def _weights_below(self, node: Node) -> Iterator[Parameter]:
        """The weights that a node's gradient reaches through nodes that lead to weights only."""
        for target in node.inputs:
            if isinstance(target, Parameter):
                yield target
            elif target in self._beside:
                yield from self._weights_below(target)

    def input(self, down_to: int) -> None:
        """Run the newest nodes until `down_to` are left; skip those that lead to weights only."""
        tape = self.tape
        tape.phase = "backward"
        while len(tape.nodes) > down_to:
            node = tape.nodes.pop()
            if node not in self._beside:
                self._step(node, len(tape.nodes))

    def _step(self, node: Node, index: int) -> None:
        tape = self.tape
        grad, node.grad = node.grad, None
        if grad is None:
            raise MissingRule("an operation received no gradient in the first part of a split backward pass.")
        wanted = tuple([not self._is_weights(target) for target in node.inputs])
        if not all(wanted):
            self._waiting.appendleft((index, node, grad))
            tape.retain(grad)
        tape.make_saved(node)
        grad.in_flight = ()
        grads = tape.gradients(node, grad, wanted)
        if node.region is not None:
            node.saved = None
        grad = None
        inputs = node.inputs
        del node
        for i, target in enumerate(inputs):
            part, grads[i] = grads[i], None
            if target is not None and part is not None:
                tape.deliver(target, part)
            part = None

    def end_input(self) -> None:
        """End the first part: free the graph above the newest weight, with what it has saved."""
        self._keep_below([node for _, node, _ in self._waiting])
        self.tape.release_retained()

    def _keep_below(self, ahead: list[Node]) -> None:
        """Free all nodes of the graph except these and the ones that their gradients would reach."""
        kept: set[Node] = set()
        while ahead:
            node = ahead.pop()
            kept.add(node)
            ahead += [target for target in node.inputs if isinstance(target, Node) and target not in kept]
        for node in self._graph:
            if node not in kept:
                node.released = True
                self._unused.pop(node, None)
        self._graph = [node for node in self._graph if node in kept]

    def weights(self, up_to: int) -> None:
        """Compute the gradients of the weights of the first `up_to` nodes, in the module's order.

        A node and its gradient live until the next node runs, the weights' gradients until the next ones are
        made; what is left of the graph is what the nodes to come can reach.
        """
        order = {parameter: i for i, parameter in enumerate(self.tape.parameters.values())}
        ahead = [turn for turn in self._waiting if turn[0] < up_to]
        for _ in ahead:
            self._waiting.popleft()
        ahead.sort(key=lambda turn: min([order[p] for p in self._weights_below(turn[1])]))
        ahead.reverse()
        while ahead:
            _, node, grad = ahead.pop()
            self._taken = (node, grad)
            self._keep_below([node, *[left for _, left, _ in (*ahead, *self._waiting)]])
            self._made = self._weights_of(node, grad)

    def _weights_of(self, node: Node, grad: Tensor) -> list[Tensor]:
        tape, region = self.tape, node.region
        tape.make_saved(node)
        if region is not None:
            for other in region.nodes:
                if other is not node and other.saved:
                    self._unused.setdefault(other, []).append(other.saved)
                    other.saved = None
        wanted = tuple([self._is_weights(target) for target in node.inputs])
        grads = tape.gradients(node, grad, wanted)
        node.saved = ()
        node.released = True
        self._unused.pop(node, None)
        made: list[Tensor] = []
        for i, target in enumerate(node.inputs):
            part, grads[i] = grads[i], None
            while isinstance(target, Node) and part is not None:
                (part,) = tape.gradients(target, part, ())
                (target,) = target.inputs
            if isinstance(target, Parameter) and part is not None:
                made.append(tape.graded(target, part))
            part = None
        return made

    def end_weights(self) -> None:
        """End the second part: free the graph."""
        self._taken = None
        self._made = []
        for region in self._regions:
            region.nodes.clear()
        self._regions.clear()
        self._unused.clear()
        self._graph.clear()
        self._beside.clear()


def _refill(discarded: tuple[Storage, ...], again: Saved) -> None:
    """Give storages whose bytes were discarded the bytes of these tensors."""
    for storage, y in zip(discarded, again, strict=True):
        if y.storage is not None:
            storage.take_over(y.storage)


def _mark_saved(saved: tuple[Tensor, ...]) -> None:
    for tensor in saved:
        if tensor.storage is not None and tensor.storage.buffer.kind == "temporaries":
            tensor.storage.buffer.kind = "activations"
