"""CUDA's operations on tensors without data, where there is no GPU.

Every build of PyTorch has CUDA's dispatch keys, autograd formulas and rules of shapes, but its autograd
engine wants the device itself. So these tensors are on `cuda:0` for Python and for the dispatcher, and on
`meta` for C++. What PyTorch's C++ code chooses by the device is chosen here.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Final, cast
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.library import _scoped_library
from torch.utils import checkpoint
from torch.utils._pytree import tree_map_only

from memplan.device import H100
from memplan.errors import MissingRule
from memplan.kernels import Release
from memplan.models.recording import DTYPES
from memplan.ops.attention import attention_kernel
from memplan.tracing.autocast import OfWrappers, autocast_of
from memplan.tracing.cache import setting
from memplan.tracing.calls import has_whole_rows
from memplan.tracing.divided import local
from memplan.tracing.shapes import ATEN, MAKE, dtype_name

CUDA: Final = torch.device("cuda", 0)
META: Final = torch.device("meta")

WRAP: Final[Any] = Tensor._make_wrapper_subclass
"""Makes a wrapper around tensors."""

RELEASE: Final = cast(Release, tuple([int(part) for part in torch.__version__.split(".")[:2]]))
"""PyTorch's, whose choices these are."""

RECURRENT: Final = tuple(
    [f"{name}.{form}" for name in ("lstm", "gru", "rnn_tanh", "rnn_relu") for form in ("input", "data")]
)
"""Operations that keep memory for their backward which only cuDNN knows."""

OF_ONE_KERNEL: Final = ("_fused_rms_norm", "mish_backward", "silu_backward")
"""Operations of one kernel on CUDA, which a build without CUDA divides into others."""


@contextmanager
def without_a_gpu() -> Iterator[OfWrappers]:
    """A block in which tensors without data can be on `cuda:0`; modules that hold DTensors run in its mode.

    `torch.tensor` copies to it by an operation that a mode sees.

    Source: torch/csrc/utils/tensor_new.cpp (`internal_new_from_data`).
    """
    changes: tuple[AbstractContextManager[Any], ...] = (
        patch.object(Tensor, "_make_subclass", _made_on_meta),
        patch.object(Tensor, "_make_wrapper_subclass", _wrapper_on_meta),
        patch.object(FakeTensorMode, "dispatch", _shaped_on_cuda),
        patch.object(FakeTensor, "is_cuda", property(_is_on_cuda), create=True),
        patch.object(torch.cuda, "_lazy_init", lambda: None),
        patch.object(torch.cuda, "current_device", lambda: 0),
        patch.object(torch.cuda, "get_device_capability", lambda *_: H100.capability),
        patch.object(torch.cuda, "is_bf16_supported", lambda *_, **__: True),
        patch.object(torch.backends.cudnn, "is_acceptable", lambda _: False),
        patch.object(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),
        patch.object(checkpoint, "_infer_device_type", lambda *_: CUDA.type),
        patch.object(checkpoint, "get_device_states", lambda *_: ([], [])),
    )
    with ExitStack() as stack:
        for change in changes:
            stack.enter_context(change)
        stack.enter_context(
            setting(torch._C._only_lift_cpu_tensors, torch._C._set_only_lift_cpu_tensors, True)
        )
        library = stack.enter_context(_scoped_library("aten", "IMPL"))
        for name, choice in CHOICES.items():
            library.impl(name, choice, "AutogradCUDA")
        for name in MOVES:
            for key in ("AutogradCPU", "CPU"):  # the second below autograd, as in torch.tensor
                library.impl(name, CHOICES[name], key)
        for name in OF_ONE_KERNEL:
            library.impl(name, _kernel, "CUDA")
        yield stack.enter_context(autocast_of(library, _is_float_on_cuda))


def _made_on_meta(
    kind: type[Tensor], data: Tensor, *args: Any, dispatch_device: bool = False, **kwargs: Any
) -> Tensor:
    """`Tensor._make_subclass`, by which C++ code is not told that a tensor without data is on CUDA."""
    device = kwargs.get("device_for_backend_keys")
    told = dispatch_device and (device is None or device.type != CUDA.type)
    return cast(Tensor, MAKE(kind, data, *args, dispatch_device=told, **kwargs))


def _wrapper_on_meta(*args: Any, **kwargs: Any) -> Tensor:
    """`Tensor._make_wrapper_subclass`, by which C++ code is not told that a wrapper is on CUDA either."""
    args, kwargs = tree_map_only(torch.device, lambda one: META if one == CUDA else one, (args, kwargs))
    return cast(Tensor, WRAP(*args, **kwargs))


def _is_on_cuda(tensor: Tensor) -> bool:
    return isinstance(tensor, FakeTensor) and tensor.fake_device.type == CUDA.type


def _is_float_on_cuda(tensor: Tensor) -> bool:
    return _is_on_cuda(local(tensor)) and tensor.is_floating_point() and tensor.dtype != torch.float64


def on_cuda(kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """An operation's keyword arguments with `device=cuda:0` where C++ code passed `meta`."""
    return {**kwargs, "device": CUDA} if kwargs.get("device") == META else kwargs


_SHAPES: Final[Any] = FakeTensorMode.dispatch


def _shaped_on_cuda(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """What an operation on tensors without data returns, on `cuda:0` where C++ code says `meta`."""
    return _SHAPES(mode, func, types, args, on_cuda(kwargs or {}))


# --- Choices ---


class NotRun(MissingRule):
    """PyTorch itself refuses to run this on CUDA."""


def _refused(name: str) -> Callable[..., Any]:
    def refused(*_: Any, **__: Any) -> Any:
        raise MissingRule(
            f"{name} on CUDA keeps memory that only cuDNN knows; trace the module on a GPU (executed=True), "
            "or step through the sequence with torch.nn.LSTMCell or RNNCell, which cuDNN has no part in.",
            kind="an operation of cuDNN in a trace for CUDA",
        )

    return refused


def _kernel(*_: Any, **__: Any) -> Any:
    """Stands for a kernel, so that autograd takes its operation for one; tensors without data call none."""
    raise NotImplementedError


def _moved(
    x: Tensor,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    copy: bool = False,
    memory_format: torch.memory_format | None = None,
    **_: Any,
) -> Tensor:
    """The tensor itself if it is on the device and of the type already, else a copy.

    Source: aten/src/ATen/native/TensorConversions.cpp (`to_will_alias`).
    """
    to = CUDA if device is not None and device.type in (CUDA.type, META.type) else device
    here = to is None or to.type == local(x).device.type
    if here and not copy and dtype in (None, x.dtype):
        return x
    return cast(
        Tensor, ATEN._to_copy(x, dtype=dtype, device=None if here else to, memory_format=memory_format)
    )


def _moved_to(
    x: Tensor,
    device: torch.device,
    dtype: torch.dtype,
    non_blocking: bool = False,
    copy: bool = False,
    memory_format: torch.memory_format | None = None,
) -> Tensor:
    return _moved(x, dtype=dtype, device=device, copy=copy, memory_format=memory_format)


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    """Dropout by one kernel, which keeps a mask of booleans.

    Source: aten/src/ATen/native/Dropout.cpp (`is_fused_kernel_acceptable`).
    """
    return cast(Tensor, ATEN.native_dropout(x, p, True)[0]) if train and 0 < p < 1 else x


def _lstm_cell(
    x: Tensor,
    hx: Sequence[Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """A step of an LSTM: two products, and one kernel for all gates.

    Source: aten/src/ATen/native/RNN.cpp (`LSTMCell::operator()`).
    """
    hidden, cell = hx
    gates = ATEN.matmul(x, w_ih.t()), ATEN.matmul(hidden, w_hh.t())
    y, cell, _ = ATEN._thnn_fused_lstm_cell(*gates, cell, b_ih, b_hh)
    return y, cell


def _gru_cell(*_: Any) -> Tensor:
    raise MissingRule(
        "gru_cell on CUDA is one kernel, and PyTorch has no rule of its shapes; use torch.nn.LSTMCell.",
        kind="an operation without a rule of shapes in a trace for CUDA",
    )


def _batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    """Batch norm by cuDNN or by PyTorch's own kernel.

    Raises:
        NotRun: running averages of another type than narrow weights.

    Source: aten/src/ATen/native/Normalization.cpp (`_select_batch_norm_backend`),
    aten/src/ATen/native/cuda/Normalization.cu (`batch_norm_cuda_out`).
    """
    tracked = running_mean is not None and running_var is not None
    by_cudnn = (
        cudnn_enabled
        and weight is not None
        and bias is not None
        and torch.bfloat16 not in (x.dtype, weight.dtype)
        and (x.dtype != torch.half or weight.dtype == torch.float)
        and (tracked or training)
        and x.dim() >= 3
        and x.shape[0] <= (880_801 if training else 65_535)
        and x.numel() < 2**31 - 1
    )
    averaged = torch.float if running_mean is None else running_mean.dtype
    if weight is not None and weight.dtype not in (averaged, torch.float):
        raise NotRun(
            f"batch norm on CUDA with weights of {weight.dtype} and running averages of "
            f"{averaged} is refused by PyTorch; use fp32, or bf16-mixed without FSDP2."
        )
    kernel = ATEN.cudnn_batch_norm if by_cudnn else ATEN.native_batch_norm
    return cast(Tensor, kernel(x, weight, bias, running_mean, running_var, training, momentum, eps)[0])


def _rms_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """RMSNorm by one kernel.

    Raises:
        MissingRule: for a weight of another type, with which it is several operations.

    Source: aten/src/ATen/native/layer_norm.cpp (`rms_norm_symint`).
    """
    if weight is not None and weight.dtype != x.dtype:
        raise MissingRule(f"rms_norm of {x.dtype} with a weight of {weight.dtype} has no rule for CUDA.")
    return cast(Tensor, ATEN._fused_rms_norm(x, normalized_shape, weight, eps)[0])


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention by the kernel that PyTorch chooses on an H100; others are chosen when the GPU is known.

    No fused kernel takes a mask whose last dim is strided, as T5's is, on any GPU.

    Source: aten/src/ATen/native/transformers/attention.cpp (`scaled_dot_product_attention`,
    `convert_boolean_attn_mask`, `preprocess_mask`), aten/src/ATen/native/transformers/sdp_utils_cpp.h
    (`check_last_dim_stride_equals_1_dense`).
    """
    d_head, dtype, mask = query.shape[-1], DTYPES[dtype_name(query.dtype)], attn_mask
    how = {"grouped": query.shape[1] != key.shape[1], "dropout": dropout_p > 0, "masked": mask is not None}
    kernel = attention_kernel(
        H100, RELEASE, dtype, d_head, **how, mask_has_grad=mask is not None and mask.requires_grad
    )
    if mask is not None and mask.stride(-1) != 1:
        kernel = "math"
    if mask is not None and mask.dtype == torch.bool and kernel != "math":
        allowed, other = (ATEN.scalar_tensor(x, dtype=query.dtype, device=CUDA) for x in (0.0, -math.inf))
        mask = ATEN.where(mask, allowed, other)
    if mask is not None and kernel == "efficient":
        if not has_whole_rows(mask):
            n_keys = mask.shape[-1]
            mask = ATEN.constant_pad_nd(mask, (0, 8 - n_keys % 8))[..., :n_keys]
        mask = mask.expand(*query.shape[:3], key.shape[2])
    if kernel == "math":
        causal = {"scale": scale, "enable_gqa": enable_gqa}
        operands = query, key, value, mask, dropout_p, is_causal, None
        return cast(Tensor, ATEN._scaled_dot_product_attention_math(*operands, **causal)[0])
    if kernel != "flash":
        fused = {
            "cudnn": ATEN._scaled_dot_product_cudnn_attention,
            "efficient": ATEN._scaled_dot_product_efficient_attention,
        }[kernel]
        keeps = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
        args = query, key, value, mask, keeps, dropout_p, is_causal
        return cast(Tensor, fused(*args, scale=scale)[0])
    scale = d_head**-0.5 if scale is None else scale
    pad = -d_head % 8
    if pad:
        query, key, value = (ATEN.constant_pad_nd(x, (0, pad)) for x in (query, key, value))
    y = ATEN._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
    return cast(Tensor, y[..., :d_head] if pad else y)


MOVES: Final = ("to.device", "to.dtype_layout")
"""Operations that may move a tensor from the host to the GPU."""

CHOICES: Final[Mapping[str, Callable[..., Any]]] = {
    "scaled_dot_product_attention": attention,
    "dropout": _dropout,
    "batch_norm": _batch_norm,
    "lstm_cell": _lstm_cell,
    "gru_cell": _gru_cell,
    "rms_norm": _rms_norm,
    "to.device": _moved_to,
    "to.dtype_layout": _moved,
    **{name: _refused(name.partition(".")[0]) for name in RECURRENT},
}
"""Operations that C++ code divides into others by the device."""
