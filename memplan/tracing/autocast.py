"""CUDA's autocast, for tensors without data: PyTorch's own asks C++ for their device, which says `meta`.

Source: aten/src/ATen/autocast_mode.h (`AT_FORALL_LOWER_PRECISION_FP`, `AT_FORALL_PROMOTE`, and others, which
are computed in float32), aten/src/ATen/autocast_mode.cpp (`cached_cast`).
"""

import warnings
import weakref
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from typing import Any, Final
from unittest.mock import patch

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch.distributed.tensor import DTensor
from torch.library import Library
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

from memplan.errors import MissingRule

KEY: Final = "AutocastCUDA"
"""The dispatch key of operations under CUDA's autocast."""

NARROW: Final = frozenset(
    {
        "_convolution", "_scaled_dot_product_flash_attention", "_thnn_fused_gru_cell",
        "_thnn_fused_lstm_cell", "addbmm", "addmm", "addmv", "addr", "baddbmm", "bmm", "chain_matmul",
        "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
        "convolution", "cudnn_convolution", "cudnn_convolution_transpose", "einsum", "gru_cell",
        "linalg_multi_dot", "linalg_vecdot", "linear", "lstm_cell", "matmul", "mm", "mv", "prelu",
        "rnn_relu_cell", "rnn_tanh_cell", "scaled_dot_product_attention",
    }
)  # fmt: skip
"""Operations that run in autocast's type."""

WIDEST: Final = frozenset(
    {
        "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "grid_sampler", "index_put", "scatter_add",
        "tensordot", "vdot",
    }
)  # fmt: skip
"""Operations that run in the widest type of their operands."""

ATTENTION: Final = "scaled_dot_product_attention"

OWN_TYPE: Final = frozenset({"cumprod", "cumsum", "log_softmax", "prod", "softmax", "sum"})
"""Operations that are asked for a type of their results: float32."""

Casts = dict[int, tuple[weakref.ref[Tensor], Tensor]]
"""Copies of weights, which autocast keeps until it ends."""


@contextmanager
def autocast_of(library: Library, is_eligible: Callable[[Any], bool]) -> Iterator["OfWrappers"]:
    """A block in which operations under CUDA's autocast cast those floats that are eligible.

    Modules that hold DTensors run in the mode that it gives.
    """
    casts: Casts = {}
    packets: set[str] = set()
    clear = torch.clear_autocast_cache

    def cleared() -> None:
        casts.clear()
        clear()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of the kernels that these replace
        for name in torch._C._dispatch_get_all_op_names():
            if name.startswith("aten::") and torch._C._dispatch_has_kernel_for_dispatch_key(name, KEY):
                name = name.removeprefix("aten::")
                library.impl(name, _autocast(name, casts, is_eligible), KEY)
                packets.add(name.partition(".")[0])
    with patch.object(torch, "clear_autocast_cache", cleared):
        yield OfWrappers(packets, casts, is_eligible)


def _autocast(name: str, casts: Casts, is_eligible: Callable[[Any], bool]) -> Callable[..., Any]:
    """An operation as it is called under autocast."""
    packet, _, overload = name.partition(".")
    func = getattr(getattr(torch.ops.aten, packet), overload or "default")
    names = [argument.name for argument in func._schema.arguments]
    dtype_at = names.index("dtype") if "dtype" in names and packet not in NARROW else None

    def called(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(DispatchKeySet(DispatchKey.AutocastCUDA)):
            if dtype_at is not None:
                asked = (*args, *[None] * (dtype_at - len(args) + 1))[dtype_at] or kwargs.get("dtype")
                into = torch.float32 if asked is None and is_eligible(args[0]) else asked
                return func(*args[:dtype_at], **{**kwargs, "dtype": into})
            args, kwargs = _cast(packet, args, kwargs, casts, is_eligible)
            return func(*args, **kwargs)

    return called


def _cast(
    packet: str, args: Any, kwargs: Any, casts: Casts, is_eligible: Callable[[Any], bool]
) -> tuple[Any, Any]:
    """The arguments of an operation, those floats that are eligible in the type that it runs in."""
    leaves, spec = tree_flatten((args, kwargs))
    floats = [x for x in leaves if isinstance(x, Tensor) and is_eligible(x)]
    dtype = torch.float32
    if packet in NARROW or (packet in WIDEST and all(x.dtype != dtype for x in floats)):
        dtype = torch.get_autocast_dtype("cuda")

    def in_type(x: Tensor) -> Tensor:
        if x.dtype == dtype or not is_eligible(x):
            return x
        is_weight = x.dtype == torch.float32 and x.requires_grad and x.is_leaf and not x._is_view()
        if not is_weight or dtype != torch.get_autocast_dtype("cuda"):
            return x.to(dtype)
        known = casts.get(id(x))
        if known is None or known[0]() is not x:
            known = casts[id(x)] = weakref.ref(x), x.to(dtype)
        return known[1]

    for i in reversed(range(len(leaves))):  # the order in which C++ compilers evaluate arguments
        if isinstance(leaves[i], Tensor):
            leaves[i] = in_type(leaves[i])
    args, kwargs = tree_unflatten(leaves, spec)
    return args, kwargs


class OfWrappers(TorchFunctionMode):
    """CUDA's autocast for DTensors of tensors without data.

    C++ code sees such a DTensor on `meta` and does not call CUDA's autocast, so this mode casts the arguments
    of Python functions. A call with `device="meta"` runs outside the trace, as it takes no GPU memory.
    """

    def __init__(self, packets: Set[str], casts: Casts, is_eligible: Callable[[Any], bool]) -> None:
        self._packets, self._how = packets, (casts, is_eligible)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named, name = dict(kwargs or {}), getattr(func, "__name__", "").strip("_")
        if named.get("device") == "meta":
            with _disable_current_modes():
                return func(*args, **named)
        if not any(type(x) is DTensor for x in args) or not self._applies(name):
            return func(*args, **named)
        if name == ATTENTION:
            raise MissingRule(
                "attention of DTensors has no rule for CUDA; hand it local tensors (use_local_output=True).",
                kind="a traced module that calls attention with DTensors",
            )
        if name in OWN_TYPE:
            return func(*args, **{"dtype": torch.float32, **named})
        args, named = _cast(name, args, named, *self._how)
        return func(*args, **named)

    def _applies(self, name: str) -> bool:
        return (torch.is_autocast_enabled("cuda") and name in self._packets) or name == ATTENTION
