"""A module's forward and backward pass on tensors without data: allocation and free of every storage.

Operations run on shapes (`memplan.tracing.shapes`), integers and masks for real (`memplan.tracing.values`),
so that Python code sees values where it looks at them. Autograd is PyTorch's own: a storage lives as long as
something refers to it.
"""

import re
import weakref
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, cast

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.function import BackwardCFunction

from memplan.mesh import Group
from memplan.models.base import Role
from memplan.record import HookKind
from memplan.shapes import Kind
from memplan.tracing.calls import OF_CUDNN, Called, convolution_called, grad_in_order, kernel_called
from memplan.tracing.collectives import exchanged, finished, is_in_place, sent
from memplan.tracing.computed import Computed, computed_of
from memplan.tracing.cuda import on_cuda
from memplan.tracing.divided import local
from memplan.tracing.mode import ShapesMode
from memplan.tracing.scratch import CONVOLUTION, CONVOLUTION_BACKWARD, Scratch, copied_before, scratch_of
from memplan.tracing.shapes import ATEN, Operation, Operator, Shapes, dtype_name, tensors
from memplan.tracing.values import READ, known_value, receive_counts

ADD: Final = ATEN.add.Tensor
ZEROS: Final = (ATEN.zeros.default, ATEN.new_zeros.default)

IN_PLACE: Final[Mapping[Any, Any]] = {
    ADD: ATEN.add_.Tensor,
    ATEN.index_add.default: ATEN.index_add_.default,
    ATEN.index_put.default: ATEN.index_put_.default,
    ATEN.scatter.src: ATEN.scatter_.src,
    ATEN.scatter_add.default: ATEN.scatter_add_.default,
}
"""What PyTorch's own code runs in place, by what it runs in its stead while a mode is active.

Source: aten/src/ATen/TensorSubclassLikeUtils.h (`isTensorSubclassLike`).
"""

GIVEN, WEIGHT = -1, -2
"""Numbers of storages that were there before the step."""

CASTS: Final = torch.ops.aten._to_copy.default
"""Copies a tensor to another type."""

LAST_FIRST: Final = (torch.ops.aten.native_dropout.default, torch.ops.aten._thnn_fused_lstm_cell.default)
"""CUDA's dropout, which allocates the mask, its second result, before the first; an LSTM's cell likewise.

Source: aten/src/ATen/native/cuda/Dropout.cu (`dropout_cuda`), aten/src/ATen/native/cuda/RNN.cu
(`_thnn_fused_lstm_cell_cuda`).
"""

EMPTY: Final = "empty_strided"
"""How the name of a buffer ends that nothing has filled yet."""

SOLE_OWNER: Final = (4, 2)
"""References to a gradient that autograd alone holds, as counted here, and to its storage."""


class Unit(NamedTuple):
    """A block as it is called, or what runs between two stacks.

    `path`: the block's in the module; `stack`: of the list that it is in; `role`: what it is; `structure`:
    the number of its parameters' names and shapes among the different ones of its stack.
    """

    path: str
    stack: str
    role: Role
    structure: int = 0

    @property
    def common(self) -> str:
        """The path, with a * for the block's number if it is one of several."""
        return self.path if self.path == self.stack else f"{self.stack}.*"


BETWEEN: Final = Unit("", "", "between")


class Section(NamedTuple):
    """A part of a step: a unit's forward or backward pass. Unit 0 is all before the first block.

    The phases "inputs" and "end" come before the module is called and after the backward pass; in "casts",
    when the forward pass has returned, autocast's copies of a unit's weights are freed.
    """

    phase: str
    unit: int


class Event(NamedTuple):
    """An event and the number of its storage.

    `detail` is a parameter's name, in which a * stands for a block's number, a kernel's call, a mark, or a
    computation and its phase.
    """

    kind: str
    section: Section
    storage: int
    detail: Any = None


class Stored(NamedTuple):
    """A storage as it was when it was allocated; `by_kernel`: its bytes follow from the kernel's rule."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    n_bytes: int
    by_kernel: bool = False


class Unlike(Exception):
    """Blocks are not what they should be: equal, called once, with gradients of their own."""


class Taken(NamedTuple):
    """What an operation takes beside its results (by its kernel's rule, or as scratch), and computes.

    `copies`: scratch that is there before its results.
    """

    kernel: Called | None
    scratch: tuple[Scratch, ...]
    computed: tuple[Computed, ...]
    copies: tuple[Scratch, ...] = ()


class _Watch(weakref.ref[UntypedStorage]):
    """Notes when the storage of a number is freed."""

    __slots__ = ("address", "number")

    address: int
    number: int


class Recorder(ShapesMode):
    """Records the events of storages, unit by unit.

    The `units` in the middle are the blocks in the order of their calls, with one between two stacks; the one
    after them is the head, then the loss.
    """

    def __init__(
        self, shapes: Shapes, device: torch.device, axes: Mapping[str, Group], *, executes: bool
    ) -> None:
        super().__init__(shapes)
        self.axes = axes
        """The axes of the mesh by the names of their process groups."""
        self.device = device
        self.executes = executes
        """Whether operations run on the device, with values."""
        self.units: list[Unit] = []
        self.events: list[Event] = []
        self.storages: list[Stored] = []
        self.section = Section("inputs", 0)
        self.scopes: list[str] = []
        self.operation: Any = ""
        """The running operation; `scopes` are the modules around it, the innermost last."""
        self.inputs: dict[int, int] = {}
        """Storage of the first tensor that each block is called with."""
        self.output_grads: dict[int, int] = {}
        """Storage of the gradient of each block's output."""
        self.entry_requires_grad = False
        """Whether the first block is called with a tensor that has a gradient."""
        self.entry_grad = -1
        """Storage of that gradient."""
        self.autocasts = False
        self.is_called = False
        self.input_casts: dict[int, list[int]] = {}
        """Storages of autocast's copies of what each block is called with."""
        self.outputs: dict[int, int] = {}
        """Storage of the first tensor that each block returns; the module's, if a loss is computed of it."""
        self.loss = -1
        """Storage of the loss that the backward pass starts from."""
        self.embedded: set[int] = set()
        """Storages of tensors computed from weights before the first block."""
        self.reads_across = False
        """Whether a unit reads a tensor that another one has computed from weights and has not returned."""
        self.running: dict[str, set[str]] = {}
        """Of each unit outside the blocks, the paths of its modules that have not returned yet."""
        self.kinds: dict[int, Kind] = {}
        """The kind of each storage that is no temporary."""
        self.neglected: dict[str, None] = {}
        self.lacks: dict[str, None] = {}
        """Operations whose workspaces are not recorded."""
        self.adds_in_place = False
        """Whether a function runs that adds in place: a linear layer's bias, an attention's mask."""
        self._zeros = GIVEN
        """The storage that was last filled with zeros."""
        self._next_unit: int | None = None
        self._first_node = 0
        self._starts: list[int] = [0]
        self._numbers: list[int] = [0]
        self._alive: dict[int, _Watch] = {}
        self._made_in: list[int] = []
        self._from_weights = False
        self._in_flight: dict[int, Tensor] = {}
        """The operand of each collective that has not been waited for, by its result's storage."""
        self._noted: set[Event] = set()
        """The in-place additions that have been recorded."""

    # --- What the run tells ---

    def register(self, tensor: Tensor, number: int = GIVEN) -> None:
        """Register a tensor from before the step, an input or a weight: its events are not recorded."""
        self._watch(local(tensor).untyped_storage(), number)

    def storage_of(self, tensor: Tensor) -> int:
        """The number of a tensor's storage; below 0 for one that was there before the step."""
        watch = self._alive.get(local(tensor).untyped_storage()._cdata)
        return GIVEN if watch is None else watch.number

    @property
    def n_blocks(self) -> int:
        """The number of the last unit that has been called."""
        return len(self.units)

    def entered(self, block: Unit, arguments: Any) -> int:
        """The number of a block whose forward pass begins.

        Raises:
            Unlike: it has been called before.
        """
        if block in self.units:
            raise Unlike(f"{block.path} is called several times")
        if self.units and self.units[-1].stack != block.stack:
            self.units.append(BETWEEN)
        self.units.append(block)
        unit = self.n_blocks
        self._first_node = torch.autograd._get_sequence_nr()
        self._begin(unit)
        called_with = tensors(arguments)
        for tensor in called_with[:1]:
            self.inputs[unit] = self.storage_of(tensor)
        if unit == 1:
            self.entry_requires_grad = any(tensor.requires_grad for tensor in called_with)
            for tensor in called_with[:1]:
                if tensor.requires_grad:
                    tensor.register_hook(self._entry_grad)
        return unit

    def left(self, unit: int, output: Any = ()) -> None:
        """Note that a unit's forward pass has returned; frees belong to it until something else computes."""
        self._next_unit = unit + 1
        self._first_node = torch.autograd._get_sequence_nr()
        for tensor in tensors(output)[:1]:
            self.outputs[unit] = self.storage_of(tensor)
            if tensor.requires_grad:
                tensor.register_hook(partial(self._output_grad, unit))

    def end_called(self, unit: str, paths: Iterable[str]) -> None:
        """Note that a module of these is called: outside the blocks, they are an FSDP2 unit of this name."""
        if unit not in self.running:
            self.running[unit] = set(paths)
            self._mark(unit)

    def end_returned(self, unit: str, path: str, output: Any) -> bool:
        """Whether the module is the last one of its unit to return, which gives the unit's output."""
        if self.running[unit] != {path}:
            self.running[unit].discard(path)
            return False
        self.running[unit].clear()
        self._mark(f"{unit}, returned")
        for tensor in tensors(output)[:1]:
            if tensor.requires_grad:
                tensor.register_hook(lambda _: self._mark(f"{unit}_backward"))
        return True

    def hooked(self, when: HookKind, parameters: Sequence[str]) -> None:
        """Note that FSDP2's hooks of a unit with these parameters are called."""
        self._locate()
        self.events.append(Event("hook", self.section, -1, (when, tuple(parameters))))

    def module_hooked(self, path: str, parameters: tuple[str, ...], when: HookKind) -> None:
        """Note that ZeRO-3's hook of a module, which has these parameters of its own, is called."""
        self._locate()
        self.events.append(Event("module", self.section, -1, (when, path, parameters)))

    def _mark(self, name: str) -> None:
        """Note a place among the events."""
        self._locate()
        self.events.append(Event("mark", self.section, -1, name))

    def _entry_grad(self, grad: Tensor) -> None:
        self.entry_grad = self.storage_of(grad)

    def _output_grad(self, unit: int, grad: Tensor) -> None:
        self.output_grads[unit] = self.storage_of(grad)
        if unit <= self.n_blocks and self.units[unit - 1].role == "module":
            self._locate()  # its backward pass may compute nothing before it makes a parameter's gradient

    def _begin(self, unit: int) -> None:
        self._next_unit = None
        self.section = Section("forward", unit)
        self._starts.append(self._first_node)
        self._numbers.append(unit)

    def start_backward(self) -> None:
        """Note that the backward pass begins: tensors that are alive are saved for it."""
        self.kinds |= {watch.number: "activations" for watch in self._alive.values() if watch.number >= 0}
        self._from_weights = False
        self.section = Section("backward", self.n_blocks + 2)

    def grad_made(self, parameter: nn.Parameter, name: str) -> None:
        """Note that a parameter's gradient has been accumulated."""
        if parameter.grad is not None:
            storage = self.storage_of(parameter.grad)
            self.kinds[storage] = "grads"
            self.events.append(Event("grad", self.section, storage, name))

    def made(self, tensor: Tensor, function: str) -> None:
        """Note a tensor that a function has made without the dispatcher."""
        self._locate()
        self._seen(tensor, function)

    def filled(self, given: Iterable[Tensor], kernel: str) -> None:
        """Name the buffers that no kernel has written before after this kernel of compiled code."""
        for tensor in given:
            storage = self.storage_of(tensor)
            if storage >= 0 and self.storages[storage].name.endswith(EMPTY):
                name = self.storages[storage].name.removesuffix(EMPTY) + kernel
                self.storages[storage] = self.storages[storage]._replace(name=name)

    def computes(self, func: Any, args: Sequence[Any], out: Tensor) -> None:
        """Note what an operation of compiled code computes that writes into `out`."""
        for one in computed_of(func, args, {}, (out,), out):
            self.events.append(Event("compute", self.section, -1, (one, self._phase)))

    # --- What the dispatcher is asked for ---

    def run(self, operation: Operation) -> Any:
        self._locate()
        if operation.func in IN_PLACE and self._is_in_place(operation.func, operation.args):
            in_place = IN_PLACE[operation.func]
            operation = Operation(in_place, operation.types, operation.args, operation.kwargs)
        func, args = operation.func, operation.args
        self.operation = func
        if self.section.phase == "forward":
            self._reads(operation.given)
        if is_in_place(func):
            self._communicates(func, args, ())
            self._exchanges(func, args, ())
            return finished(func, args)
        if self.executes:
            out, scratch = executed(func, args, operation.kwargs, self.device)
            results = self._on_device(out)
            taken = Taken(None, scratch, computed_of(func, args, operation.kwargs, results, out))
        else:
            if func is READ:
                known_value(args[0])
            if self.device.type == "cuda":
                operation = _on_cuda(operation)
            memo = self.shapes.memo(operation)
            out = self.result(operation, memo)
            results = self._on_device(out)
            if memo.taken is None:
                memo.taken = self._taken(operation, results, out)
            taken = memo.taken
        self._record(operation, results, taken)
        self._communicates(func, args, results)
        self._exchanges(func, args, results)
        if func in ZEROS:
            self._zeros = self.storage_of(out)
        return out

    @staticmethod
    def _exchanges(func: Any, args: Sequence[Any], results: Sequence[Tensor]) -> None:
        """Make the counts known that an all-to-all of whole numbers receives."""
        if (counts := exchanged(func, args, results)) is not None:
            receive_counts(*counts)

    def _is_in_place(self, func: Any, args: Sequence[Any]) -> bool:
        """Whether PyTorch's own code, if no mode were active, would write the result into the first operand.

        Source: aten/src/ATen/native/Linear.cpp (`linear`), aten/src/ATen/native/transformers/attention.cpp
        (`_scaled_dot_product_attention_math`), torch/csrc/autograd/FunctionsManual.cpp.
        """
        if func is self.passed_on:  # its operands are parts of wrappers, which are never written to
            self.passed_on = None
            return False
        if self.section.phase == "forward" or self.is_recomputing:
            return func is ADD and self.adds_in_place
        if func is not ADD:
            node = torch._C._current_autograd_node()
            return self.storage_of(args[0]) == self._zeros and not isinstance(node, BackwardCFunction)
        if summed := _is_summed_in_place(*args):
            self._added(self.storage_of(args[0]))
        return summed

    @property
    def is_recomputing(self) -> bool:
        """Whether a forward pass is run again in the backward pass, which itself records no gradients."""
        return self.section.phase == "backward" and torch.is_grad_enabled()

    @property
    def is_outside(self) -> bool:
        """Whether the module's forward pass is yet to begin, or over: a block called there is no unit."""
        is_over = self.section.unit > self.n_blocks + 1
        return self.section.phase == "forward" and (is_over or not self.is_called)

    def _on_device(self, out: Any) -> tuple[Tensor, ...]:
        """The tensors of a result that are in the device's memory."""
        return tuple([one for one in tensors(out) if one.device.type == self.device.type])

    def _taken(self, operation: Operation, results: Sequence[Tensor], out: Any) -> Taken:
        """What a simulated operation takes beside its results; nothing where these are on the host."""
        func, args, kwargs = operation.func, operation.args, operation.kwargs
        kernel = (
            kernel_called(func, args, kwargs, results) if results and self.device.type == "cuda" else None
        )
        scratch = scratch_of(func, args, results, self.device) if results and kernel is None else ()
        copies = copied_before(func, args, self.device) if results else ()
        return Taken(kernel, scratch, computed_of(func, args, kwargs, results, out), copies)

    def note_fallback(self, said: str) -> None:
        """Note the package that transformers says is not installed, in whose place its own code runs.

        Source: transformers.integrations.hub_kernels (`use_kernel_func_from_hub_with_fallback`).
        """
        if found := re.search("because `([^`]+)` is not installed", said):
            self.lacks[found[1]] = None

    def _record(self, operation: Operation, results: Sequence[Tensor], taken: Taken) -> None:
        """Record the events of an operation."""
        func, kernel = operation.func, taken.kernel
        simulates_cuda = not self.executes and self.device.type == "cuda"
        if simulates_cuda and func in OF_CUDNN:
            self.neglected[OF_CUDNN[func]] = None
        if simulates_cuda and func in (CONVOLUTION, CONVOLUTION_BACKWARD):
            self._convolved(operation, results)
        copies = self._scratch(taken.copies)
        if kernel is not None:
            results = results[: kernel.n_results]
            self.events.append(Event("kernel", self.section, -1, kernel))
        self._allocated(operation, results[::-1] if func in LAST_FIRST else results)
        for made in () if kernel is None else {*map(self.storage_of, results)} - {GIVEN, WEIGHT}:
            self.storages[made] = self.storages[made]._replace(by_kernel=True)
        self._freed_scratch([*copies, *self._scratch(taken.scratch)])
        self.events += [Event("compute", self.section, -1, (one, self._phase)) for one in taken.computed]

    @property
    def _phase(self) -> str:
        return "recompute" if self.is_recomputing else self.section.phase

    def waited(self, result: Tensor) -> None:
        self._in_flight.pop(self.storage_of(result), None)

    def _communicates(self, func: Any, args: Sequence[Any], results: Sequence[Tensor]) -> None:
        """Record what an operation sends; what is gathered or scattered is held until it is waited for.

        Source: torch/csrc/distributed/c10d/Functional.cpp (`all_reduce` sends a clone),
        ProcessGroupGloo.cpp, ProcessGroupNCCL.cpp (`stashed_for_allocator_safety_`).
        """
        found = sent(func, args, results, self.axes)
        if found is not None:
            self.events.append(Event("collective", self.section, -1, (found, self._phase)))
            if results and found.kind != "all_reduce":
                self._in_flight[self.storage_of(results[0])] = args[0]

    def _convolved(self, operation: Operation, results: Sequence[Tensor]) -> None:
        """Record the results of a convolution, each with what computes it."""
        func, args = operation.func, operation.args
        copies = self._scratch(grad_in_order(func, args))
        for tensor, call in zip(results, convolution_called(func, args, results), strict=True):
            if call.n_results:
                self._freed_scratch(copies)
                copies = []
                self.events.append(Event("kernel", self.section, -1, call))
            self._seen(tensor, operation.operator)
            if not call.n_results:
                self.events.append(Event("workspace", self.section, -1, call))
        self._freed_scratch(copies)

    def _allocated(self, operation: Operation, results: Sequence[Tensor]) -> None:
        """Record the results of an operation."""
        for tensor in results:
            self._seen(tensor, operation.operator)
            if self._from_weights:
                self.embedded.add(self.storage_of(tensor))
                self.embedded.discard(WEIGHT)
        phase, unit = self.section
        casts = operation.func is CASTS and self.autocasts and phase == "forward"
        if casts and self.storage_of(operation.args[0]) == self.inputs.get(unit):
            self.input_casts.setdefault(unit, []).append(self.storage_of(results[0]))

    def _reads(self, given: Iterable[Tensor]) -> None:
        """Note operands of a forward pass that its unit has not computed itself."""
        unit, head = self.section.unit, self.n_blocks + 1
        read = {self.storage_of(tensor) for tensor in given}
        self._from_weights = unit == 0 and not read.isdisjoint({WEIGHT, *self.embedded})
        for storage in read if unit else ():
            made = 0 if storage < 0 else self._made_in[storage]
            own = made == unit or min(made, unit) >= head
            handed = storage in (self.inputs.get(unit), self.outputs.get(unit - 1))
            self.reads_across |= not (own or handed or (made == 0 and storage not in self.embedded))

    def _added(self, storage: int) -> None:
        """Note the first time that a gradient is added in place to the gradient of the unit's output."""
        event = Event("add", self.section, storage)
        if self.output_grads.get(self.section.unit) == storage and event not in self._noted:
            self._noted.add(event)
            self.events.append(event)

    def _scratch(self, scratch: Sequence[Scratch]) -> list[int]:
        """Record that temporary buffers are allocated; their numbers."""
        return [self._allocates(name, (n,), dtype, n * dtype.itemsize) for name, n, dtype in scratch]

    def _freed_scratch(self, numbers: Sequence[int]) -> None:
        """Record that temporary buffers are freed, the last one first."""
        self.events += [Event("free", self.section, number) for number in reversed(numbers)]

    def _locate(self) -> None:
        """Find the step's section: after a unit has returned, or at an autograd node that a unit has made."""
        if self.section.phase == "forward":
            if self._next_unit is not None:
                self._begin(self._next_unit)
        elif self.section.phase == "backward":
            node = torch._C._current_autograd_node()
            if node is not None and node.name() != "torch::autograd::AccumulateGrad":
                unit = self._numbers[bisect_right(self._starts, node._sequence_nr()) - 1]
                if unit < self.section.unit:
                    self.section = Section("backward", unit)

    def _seen(self, tensor: Tensor, function: Operator | str) -> None:
        """Record a tensor's storage if it is new; of an operation's result with the module that runs."""
        storage = tensor.untyped_storage()
        if storage._cdata in self._alive:
            return
        if isinstance(function, Operator):
            scope = self.scopes[-1] if self.scopes else ""
            if self.section.phase == "backward" and not self.is_recomputing:
                scope = "grad"
            function = f"{scope}: {function.name}"
        made = self._allocates(function, tuple(tensor.shape), tensor.dtype, storage.nbytes())
        self._watch(storage, made)

    def _allocates(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, n_bytes: int) -> int:
        """Record a new storage; its number."""
        self.storages.append(Stored(name, shape, dtype_name(dtype), dtype.itemsize, n_bytes))
        self._made_in.append(self.section.unit)
        self.events.append(Event("alloc", self.section, len(self.storages) - 1))
        return len(self.storages) - 1

    def _watch(self, storage: UntypedStorage, number: int) -> None:
        watch = _Watch(storage, self._gone)
        watch.address, watch.number = storage._cdata, number
        self._alive[watch.address] = watch

    def _gone(self, reference: "weakref.ref[UntypedStorage]") -> None:
        watch = cast(_Watch, reference)
        del self._alive[watch.address]
        if watch.number >= 0:
            section = self.section
            if section.phase == "casts":
                section = Section("casts", self._made_in[watch.number])
            self.events.append(Event("free", section, watch.number))


def executed(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device
) -> tuple[Any, tuple[Scratch, ...]]:
    """The result of an operation on a GPU, and the most bytes that its kernels allocated beside it."""
    torch._C._cuda_resetPeakMemoryStats(device.index)
    out = func(*args, **kwargs)
    requested = torch._C._cuda_memoryStats(device.index)["requested_bytes"]["all"]
    n_bytes = requested["peak"] - requested["current"]
    return out, (("memory of a kernel's own", n_bytes, torch.uint8),) if n_bytes > 0 else ()


def _on_cuda(operation: Operation) -> Operation:
    """The operation with `device=cuda:0` where C++ code passed `meta`."""
    kwargs = on_cuda(operation.kwargs)
    if kwargs is operation.kwargs:
        return operation
    return Operation(operation.func, operation.types, operation.args, kwargs)


def _is_summed_in_place(older: Any, newer: Any, *more: Any) -> bool:
    """Whether autograd would add a gradient to an older one in place, if no mode were active.

    Source: torch/csrc/autograd/input_buffer.cpp (`can_accumulate_inplace`).
    """
    if not isinstance(older, Tensor) or not isinstance(newer, Tensor) or older.shape != newer.shape:
        return False
    if torch._C._current_autograd_node() is None or torch.is_grad_enabled():
        return False
    counts = cast(Any, older)._use_count(), torch._C._storage_Use_Count(older.untyped_storage()._cdata)
    return counts == SOLE_OWNER and torch.ops.aten.is_non_overlapping_and_dense.default(older)
