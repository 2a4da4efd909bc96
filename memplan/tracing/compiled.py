"""Traces blocks under `torch.compile`: its whole compiler runs, but no kernel is built or launched.

Dynamo, AOTAutograd, its partitioner and Inductor are PyTorch's own, and compile for CUDA without Triton and
without a GPU. The code that Inductor generates, which allocates buffers, calls kernels and frees buffers,
runs on tensors without data. So what is saved, fused away, reused and freed is as Inductor decides.
"""

import ast
import logging
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Final, cast
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._dynamo.device_interface import CudaInterface
from torch._dynamo.trace_rules import get_torch_obj_rule_map
from torch._inductor import config
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.library import _scoped_library
from torch.nn import functional
from torch.utils import _triton
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from memplan.device import H100
from memplan.tracing.cache import setting
from memplan.tracing.cuda import CHOICES, CUDA, on_cuda
from memplan.tracing.recorder import Recorder
from memplan.tracing.shapes import ATEN
from memplan.tracing.torchtitan import TorchtitanBlock, kept_contexts, second_products_kept

GPU: Final = types.SimpleNamespace(
    name=H100.name,
    major=9,
    minor=0,
    multi_processor_count=132,
    warp_size=32,
    max_threads_per_block=1024,
    max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=65_536,
    shared_memory_per_block=49_152,
    shared_memory_per_block_optin=232_448,
    shared_memory_per_multiprocessor=233_472,
    L2_cache_size=52_428_800,
    total_memory=85_017_493_504,
    gcnArchName="",
)
"""What CUDA says of an H100 SXM of 80 GB: Inductor divides long sums by its processors."""

SETTINGS: Final = {"fx_graph_cache": False, "compile_threads": 1, "triton.cudagraphs": False}
"""Inductor's settings that are not the defaults: none of them changes what is allocated."""


class _Device:
    """`torch.cuda.device`, where there is none."""

    def __init__(self, *_: Any) -> None:
        return

    def __enter__(self) -> None:
        return

    def __exit__(self, *_: object) -> None:
        return


class _Generator(torch.Generator):
    """The random numbers of a GPU, of which none is drawn."""

    device = CUDA

    def clone_state(self) -> "_Generator":
        """Another one."""
        return _Generator()

    def graphsafe_get_state(self) -> "_Generator":
        """Its state."""
        return self

    def graphsafe_set_state(self, state: Any) -> "_Generator":
        """Go on from another one's state."""
        return self


_TRACES: Final[Any] = ProxyTorchDispatchMode.__torch_dispatch__


def _traced_on_cuda(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """A node of the graph, on `cuda:0` where C++ code says `meta`."""
    return _TRACES(mode, func, types, args, on_cuda(kwargs or {}))


@contextmanager
def compiling(recorder: Recorder) -> Iterator[None]:
    """A block within `without_a_gpu` where `torch.compile` compiles for CUDA code that the recorder sees run.

    Source: torch/_inductor/graph.py (`_compile_to_module_lines`).
    """

    def loaded(_graph: GraphLowering, code: Any) -> types.ModuleType:
        return _loaded(code.value, recorder)

    def of_cuda(name: str, value: Any) -> AbstractContextManager[Any]:
        return patch.object(CudaInterface, name, staticmethod(lambda *_, **__: value))

    nothing: Callable[..., None] = lambda *_, **__: None  # noqa: E731
    changes: tuple[AbstractContextManager[Any], ...] = (
        config.patch(SETTINGS),
        setting(lambda: logging.root.manager.disable, logging.disable, logging.WARNING),
        of_cuda("get_device_properties", GPU),
        of_cuda("is_available", True),
        of_cuda("is_bf16_supported", True),
        of_cuda("get_compute_capability", 10 * GPU.major + GPU.minor),
        patch.object(CudaInterface.Worker, "get_device_properties", staticmethod(lambda *_: GPU)),
        patch.object(torch.cuda, "get_device_properties", lambda *_: GPU),
        patch.object(torch.cuda, "get_rng_state", torch.get_rng_state),
        patch.object(torch.cuda, "set_rng_state", nothing),
        patch.object(torch.cuda, "synchronize", nothing),
        patch.object(torch.cuda, "set_device", nothing),
        patch.object(torch.cuda, "set_stream", nothing),
        patch.object(torch.cuda, "default_generators", (_Generator(),)),
        patch.object(torch.cuda, "device_count", lambda: 1),
        patch.object(torch.cuda, "device", _Device),
        patch.object(torch.cuda, "_DeviceGuard", _Device),
        patch.object(_triton, "triton_hash_with_backend", lambda: ""),
        patch("torch._inductor.scheduler.has_triton", lambda: True),
        patch.object(FakeTensor, "is_meta", property(lambda _: False), create=True),
        patch.object(ProxyTorchDispatchMode, "__torch_dispatch__", _traced_on_cuda),
        patch.object(GraphLowering, "_compile_to_module_lines", loaded),
    )
    torch._dynamo.reset()
    get_torch_obj_rule_map()  # which is kept, of PyTorch's own functions: none may be changed yet
    with ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that complex numbers are slow, say
        for change in changes:
            stack.enter_context(change)
        library = stack.enter_context(_scoped_library("aten", "IMPL"))
        for name, choice in CHOICES.items():  # wrappers are on `meta` for C++
            library.impl(name, choice, "AutogradMeta")
        library.impl("empty.memory_format", _constant, "CUDA")
        stack.callback(torch._dynamo.reset)
        yield


def _constant(
    size: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None, **_: Any
) -> Tensor:
    """A constant of the graph, whose value Inductor reads."""
    return torch.empty(size, dtype=dtype)


def compiled(block: nn.Module, recompute: str) -> Callable[..., Any]:
    """The block's forward function as `torch.compile` runs it: one graph, of the sizes it is called with.

    As torchtitan compiles blocks, what is recomputed is within the graph, and left to the partitioner. No
    mode is active until the generated code runs, as Dynamo would compile the mode.

    Source: torchtitan/models/llama3/infra/parallelize.py (`apply_compile`).
    """
    run = RUNS[recompute]
    if recompute == "selective" and isinstance(block, TorchtitanBlock):
        run = _recomputed_but_second_products
    run = torch.compile(run, fullgraph=True, dynamic=False)

    def without_modes(*args: Any, **kwargs: Any) -> Any:
        args = waited(args)
        with _disable_current_modes(), patch.multiple(functional, **FUNCTIONS):
            return run(block, *args, **kwargs)

    return without_modes


class _Waited(torch.autograd.Function):
    """Waits for a collective's result, which is returned as it is, as its gradient is."""

    @staticmethod
    def forward(ctx: Any, given: Any) -> Tensor:
        return cast(Tensor, given.trigger_wait().detach())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def waited(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """A block's arguments, of which none is still being filled by a collective.

    PyTorch 2.13 waits for them too, but loses their gradients: then no embedding before a block is trained.

    Source: torch/_functorch/_aot_autograd/frontend_utils.py (`process_inputs`), pytorch/pytorch pull request
    191113.
    """
    return cast(tuple[Any, ...], tree_map_only(AsyncCollectiveTensor, _Waited.apply, arguments))


FUNCTIONS: Final = {name: getattr(functional, name) for name in ("linear", "scaled_dot_product_attention")}
"""Functions that are changed where operations are recorded (`memplan.tracing.tracer.ADD_IN_PLACE`)."""


def _run(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(block).forward(block, *args, **kwargs)


def _recomputed(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return checkpoint(_run, block, *args, use_reentrant=False, **kwargs)


def _recomputed_but_products(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return checkpoint(_run, block, *args, use_reentrant=False, context_fn=kept_contexts, **kwargs)


def _recomputed_but_second_products(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return checkpoint(_run, block, *args, use_reentrant=False, context_fn=second_products_kept, **kwargs)


RUNS: Final = {"none": _run, "full": _recomputed, "selective": _recomputed_but_products}


# --- The generated code ---


class _Kernel:
    """A kernel of Triton's: when it has run, the buffers that it is called with have something in them."""

    def __init__(self, name: str, recorder: Recorder) -> None:
        self.name, self.recorder = name, recorder

    def run(self, *arguments: Any, **_: Any) -> None:
        """Run it."""
        self.recorder.filled([one for one in arguments if isinstance(one, Tensor)], self.name)


class _Kernels:
    """Inductor's `AsyncCompile`: what compiles kernels."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def triton(self, name: str, *_: Any, **__: Any) -> _Kernel:
        """A kernel."""
        return _Kernel(name, self.recorder)

    def wait(self, _: Any) -> None:
        """Wait for kernels that are compiled."""


class _Products:
    """Inductor's `extern_kernels`: operations of libraries that write into a buffer."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def __getattr__(self, name: str) -> Callable[..., None]:
        operation = getattr(ATEN, NAMES.get(name, name)).default

        def called(*arguments: Any, out: Tensor, **_: Any) -> None:
            self.recorder.filled([out], name)
            self.recorder.computes(operation, arguments, out)

        return called


NAMES: Final = {"bias_addmm": "addmm"}
"""Operations by Inductor's own names for them."""


def _loaded(code: str, recorder: Recorder) -> types.ModuleType:
    """The module of the generated code, whose kernels only say what they fill.

    Source: torch/_inductor/codegen/wrapper.py (`write_header`, `write_triton_header_once`).
    """
    own: dict[str, Any] = {
        "async_compile": _Kernels(recorder),
        "extern_kernels": _Products(recorder),
        "empty_strided_cuda": _empty_on_cuda,
        "reinterpret_tensor": _reinterpreted,
        "copy_if_misaligned": lambda tensor: tensor,
        "assert_size_stride": lambda *_: None,
        "assert_alignment": lambda *_: None,
        "get_raw_stream": lambda _: 0,
        "triton": None,
        "tl": None,
    }
    tree = ast.parse(code)
    tree.body = [line for line in tree.body if own.keys().isdisjoint(_defined(line))]
    module = types.ModuleType("generated")
    module.__file__ = "generated by Inductor"
    vars(module).update({"key": "", **own})
    exec(compile(tree, module.__file__, "exec"), vars(module))
    call = module.call

    def recorded(arguments: list[Any]) -> Any:
        runs = patch.object(torch.ops.higher_order, "graphsafe_run_with_rng_state", _run_operation)
        with runs, nullcontext() if recorder in _get_current_dispatch_mode_stack() else recorder:
            return call(arguments)

    vars(module)["call"] = recorded
    return module


def _run_operation(operation: Any, *args: Any, rng_state: Any = None, **kwargs: Any) -> Any:
    """An operation that draws random numbers, and draws the same ones when it is run again."""
    return operation(*args, **kwargs)


def _defined(line: ast.stmt) -> Iterator[str]:
    """The names that an import or an assignment defines."""
    match line:
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            yield from [one.asname or one.name for one in names]
        case ast.Assign(targets=targets):
            yield from [one.id for one in targets if isinstance(one, ast.Name)]


def _empty_on_cuda(shape: Any, stride: Any, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device="cuda")


def _reinterpreted(tensor: Tensor, shape: Any, stride: Any, offset: int = 0) -> Tensor:
    """A view of the storage, `offset` elements after the tensor's first."""
    return torch.as_strided(tensor, shape, stride, int(tensor.storage_offset()) + offset)
