"""Abstract autograd: a forward pass over shapes, recorded as PyTorch would allocate and free.

Lifetimes follow Python's own reference counts, as they do in PyTorch: an abstract tensor is freed when its
last name, its last pending gradient and its last saved reference are gone. A forward pass written like the
torch module therefore allocates and frees in the torch module's order. The backward pass runs the nodes in
the reverse of their creation, which is the order of PyTorch's engine (highest sequence number first).

Source: torch/csrc/autograd/engine.cpp (`evaluate_function`), input_buffer.cpp (`accumulate`),
torch/utils/checkpoint.py (non-reentrant variant, early stop).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final, Literal

from memplan.errors import MissingRule
from memplan.shapes import FP32, UINT8, Buffer, DType, Event, Kind, Parameter, Shape, n_elements

Device = Literal["cpu", "cuda"]
CPU_RANDOM_STATE_BYTES: Final = 5056
"""The state of PyTorch's CPU generator (`torch.get_rng_state().nbytes`), kept by every recomputed region."""
Backward = Callable[["Tensor", "tuple[Tensor, ...]"], "tuple[Tensor | None, ...]"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What decides an operation's cost beside its shapes.

    `weight_dtype` is the type the operations see the weights in; `autocast` lets matrix products run in
    bfloat16 on float32 weights; `tp` ranks divide the weights, and the sequence if `sequence_parallel`.
    `local_grads`: gradients are cut like their weights as soon as they are made.
    """

    device: Device = "cuda"
    weight_dtype: DType = FP32
    autocast: bool = False
    tp: int = 1
    sequence_parallel: bool = False
    local_grads: bool = False
    micro_batch: int = 1
    seq_len: int = 1024


class Call:
    """One collective that an operation causes: the operand's bytes, on the tensor axis."""

    __slots__ = ("kind", "payload_bytes", "phase", "what")

    def __init__(self, kind: str, payload_bytes: int, phase: str, what: str) -> None:
        self.kind = kind
        self.payload_bytes = payload_bytes
        self.phase = phase
        self.what = what


class Storage:
    """Owner of a buffer's bytes; recording their free is its last act."""

    __slots__ = ("buffer", "run")

    def __init__(self, buffer: Buffer, run: "Run") -> None:
        self.buffer = buffer
        self.run = run
        run.events.append(Event(1, buffer))

    def __del__(self) -> None:
        self.run.events.append(Event(-1, self.buffer))


class Node:
    """One step of the backward pass: maps the output's gradient to the inputs' gradients.

    `backward` reads tensors only from `saved`, so that recomputation can supply them anew. The gradients of
    a `distributed` output are DTensors, which are never summed in place.
    """

    __slots__ = ("backward", "distributed", "grad", "inputs", "region", "saved")

    def __init__(
        self,
        inputs: "tuple[Node | Parameter | None, ...]",
        saved: "tuple[Tensor, ...] | None",
        backward: Backward,
        region: "Region | None",
    ) -> None:
        self.inputs = inputs
        self.saved = saved
        self.backward = backward
        self.region = region
        self.distributed = False
        self.grad: Tensor | None = None


class Region:
    """A stretch of the forward pass that keeps only its input and is run again in the backward pass."""

    __slots__ = ("function", "n_saving", "nodes", "random_state", "x")

    def __init__(self, function: "Callable[[Tensor], Tensor]", x: "Tensor") -> None:
        self.function = function
        self.x = x
        self.nodes: list[Node] = []
        self.n_saving = 0
        self.random_state: Tensor | None = None


class _Recomputed(Exception):
    """The last saved tensor of a region has been recomputed: the rest need not run."""


class Tensor:
    """Shape, dtype, storage, and the node whose output it is (None for data and for gradients).

    `in_flight` is the operand of the collective that is still filling it: held until the first use.
    """

    __slots__ = ("dtype", "in_flight", "is_view", "node", "run", "shape", "storage")

    def __init__(
        self,
        run: "Run",
        shape: Shape,
        dtype: DType,
        storage: Storage | None = None,
        node: "Node | Parameter | None" = None,
        is_view: bool = False,
    ) -> None:
        self.run = run
        self.shape = shape
        self.dtype = dtype
        self.storage = storage
        self.node = node
        self.is_view = is_view
        self.in_flight: Tensor | None = None

    @property
    def n_bytes(self) -> int:
        """Bytes of the elements."""
        return n_elements(self.shape) * self.dtype.itemsize

    def view(self, *shape: int) -> "Tensor":
        """The same bytes under another shape."""
        return Tensor(self.run, shape, self.dtype, self.storage, self.node, is_view=True)

    def __add__(self, other: "Tensor") -> "Tensor":
        """Elementwise sum, promoted to the wider type; saves nothing. The gradient passes through."""
        dtype = self.dtype if self.dtype.itemsize >= other.dtype.itemsize else other.dtype
        left, right = self.run.cast(self, dtype), self.run.cast(other, dtype)
        node = self.run.node((left.node, right.node), (), _add_backward)
        return self.run.new("residual", left.shape, dtype, node)

    def __mul__(self, other: "Tensor") -> "Tensor":
        """Elementwise product of equal shapes; saves both factors."""
        node = self.run.node((self.node, other.node), (self, other), _mul_backward)
        return self.run.new("product", self.shape, self.dtype, node)


def _add_backward(grad: Tensor, saved: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    return grad, grad


def _mul_backward(grad: Tensor, saved: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    return grad.run.new("grad", grad.shape, grad.dtype), grad.run.new("grad", grad.shape, grad.dtype)


class Run:
    """One pass over a model: the events, nodes, parameters and collectives it leaves behind."""

    __slots__ = (
        "_casts",
        "_grads",
        "_region",
        "_replayed",
        "_replaying",
        "_uses",
        "calls",
        "events",
        "flops",
        "nodes",
        "parameters",
        "phase",
        "scope",
        "setting",
    )

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.events: list[Event] = []
        self.nodes: list[Node] = []
        self.parameters: dict[str, Parameter] = {}
        self.calls: list[Call] = []
        self.flops = 0
        self.phase = "forward"
        self.scope = ""
        self._grads: dict[Parameter, Tensor] = {}
        self._casts: dict[Parameter, Tensor] = {}
        self._uses: dict[Parameter, int] = {}
        self._region: Region | None = None
        self._replaying: Region | None = None
        self._replayed = 0

    def new(
        self, name: str, shape: Shape, dtype: DType, node: Node | None = None, kind: Kind = "temporaries"
    ) -> Tensor:
        """A freshly allocated tensor."""
        n_bytes = n_elements(shape) * dtype.itemsize
        buffer = Buffer(f"{self.scope}{name}", shape, dtype, n_bytes, kind)
        return Tensor(self, shape, dtype, Storage(buffer, self), node)

    def node(
        self, inputs: tuple[Node | Parameter | None, ...], saved: tuple[Tensor, ...], backward: Backward
    ) -> Node:
        """The backward step of an operation that is about to allocate its output."""
        if self._replaying is not None:
            return self._replay(self._replaying, saved)
        for target in inputs:
            if isinstance(target, Parameter):
                self._uses[target] = self._uses.get(target, 0) + 1
        region = self._region
        if region is None:
            _mark_saved(saved)
        elif saved:
            region.n_saving += 1
        node = Node(inputs, saved if region is None or not saved else None, backward, region)
        self.nodes.append(node)
        if region is not None:
            region.nodes.append(node)
        return node

    def _replay(self, region: Region, saved: tuple[Tensor, ...]) -> Node:
        node = region.nodes[self._replayed]
        self._replayed += 1
        if saved:
            _mark_saved(saved)
            node.saved = saved
            region.n_saving -= 1
            if region.n_saving == 0:
                raise _Recomputed
        return node

    def parameter(
        self,
        name: str,
        shape: Shape,
        *,
        tp_dim: int | None = None,
        summed: bool = False,
        distributed: bool = False,
    ) -> Parameter:
        """The weight `name` of this scope, made at first use; the same name gives the same (tied) weight."""
        key = f"{self.scope}{name}"
        if key not in self.parameters:
            self.parameters[key] = Parameter(
                key,
                shape,
                self.setting.weight_dtype,
                tp_dim=tp_dim,
                summed_over_tp=summed,
                distributed=distributed,
            )
        return self.parameters[key]

    def weight(self, parameter: Parameter, dtype: DType | None = None) -> Tensor:
        """A parameter as a tensor; its bytes are the engine's.

        In another `dtype` it is a copy that autocast keeps until `leave_autocast`.
        """
        own = Tensor(self, parameter.shape, parameter.dtype, None, parameter)
        if dtype is None or dtype == parameter.dtype:
            return own
        if parameter not in self._casts:
            self._casts[parameter] = self.cast(own, dtype)
        return self._casts[parameter]

    def leave_autocast(self) -> None:
        """Drop the copies of weights that autocast has kept."""
        self._casts.clear()

    def cast(self, x: Tensor, dtype: DType) -> Tensor:
        """`x` in another element type: itself if it already is, else a copy; saves nothing."""
        if x.dtype == dtype:
            return x
        was = x.dtype
        node = self.node(
            (x.node,), (), lambda grad, saved: (grad.run.new(f"grad as {was.name}", grad.shape, was),)
        )
        return self.new(f"copy as {dtype.name}", x.shape, dtype, node)

    def collective(self, kind: str, what: str, payload_bytes: int) -> None:
        """Record a collective on the tensor axis."""
        self.calls.append(Call(kind, payload_bytes, self.phase, f"{self.scope}{what}"))

    @contextmanager
    def named(self, scope: str) -> Iterator[None]:
        """Prefix the names of parameters and buffers."""
        before, self.scope = self.scope, f"{self.scope}{scope}."
        yield
        self.scope = before

    def recomputed(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """`function(x)` keeping only `x`; what backward needs is computed again when it gets there."""
        self._region = region = Region(function, x)
        _mark_saved((x,))
        if self.setting.device == "cpu":
            region.random_state = self._random_state()
        y = function(x)
        self._region = None
        return y if region.nodes else x

    def _distributed_sum(self, parameter: Parameter, grad: Tensor) -> Tensor:
        """The sum of a divided weight's gradients (DTensors): out of place, a whole one being cut first."""
        part = None
        if grad.shape != parameter.shape:
            part = self.new("grad (own rows)", parameter.shape, grad.dtype)
        total = self.new("sum of grads", parameter.shape, grad.dtype)
        del part
        return total

    def _taken_over(self, grad: Tensor) -> Tensor:
        """The sum with a gradient that the caller owns: a new tensor; an own one is added to in place."""
        n_bytes = n_elements(grad.shape) * grad.dtype.itemsize
        buffer = Buffer("sum of grads", grad.shape, grad.dtype, n_bytes, "temporaries")
        taken = Tensor(self, grad.shape, grad.dtype, Storage(buffer, self))
        self.events[-1] = Event(0, buffer)
        return taken

    def start_backward(self, output: Tensor, grad: Tensor) -> None:
        """Give an output its gradient."""
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
        if node.saved is None and node.region is not None:
            self._recompute(node.region)
        grad.in_flight = None
        grads = list(node.backward(grad, node.saved or ()))
        node.saved = ()
        grad = None
        inputs, node.region = node.inputs, None
        del node
        for i, target in enumerate(inputs):
            part, grads[i] = grads[i], None
            if target is not None and part is not None:
                self._deliver(target, part)
            part = None

    def _random_state(self) -> Tensor:
        return self.new("random state", (CPU_RANDOM_STATE_BYTES,), UINT8, kind="activations")

    def _recompute(self, region: Region) -> None:
        phase, self.phase = self.phase, "recompute"
        scope, casts, self._casts = self.scope, self._casts, {}
        current_state = self._random_state() if self.setting.device == "cpu" else None
        self._replaying, self._replayed = region, 0
        with suppress(_Recomputed):
            region.function(Tensor(self, region.x.shape, region.x.dtype, region.x.storage, region.x.node))
        del current_state
        self._replaying, self.phase, self.scope, self._casts = None, phase, scope, casts

    def _deliver(self, target: Node | Parameter, grad: Tensor) -> None:
        if isinstance(target, Parameter):
            if target in self._grads and target.tp_dim is not None:
                self._grads[target] = self._distributed_sum(target, grad)
            total = self._grads.setdefault(target, grad)
            self._uses[target] -= 1
            if self._uses[target] == 0 and total.storage is not None:
                total.storage.buffer.kind = "grads"
                total.storage.buffer.name = f"{target.name}.grad"
                self.events.append(Event(0, total.storage.buffer, target))
        elif target.grad is None:
            target.grad = grad
        elif target.grad.storage is None:
            target.grad = self._taken_over(grad)
        elif target.grad.is_view or target.distributed:
            target.grad = self.new("sum of grads", grad.shape, grad.dtype)


def _mark_saved(saved: tuple[Tensor, ...]) -> None:
    for tensor in saved:
        if tensor.storage is not None and tensor.storage.buffer.kind == "temporaries":
            tensor.storage.buffer.kind = "activations"
