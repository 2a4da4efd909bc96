"""Sequences divided over context-parallel ranks, as PyTorch's `context_parallel` divides them.

It cuts each sequence into 2 x cp pieces, of which a rank gets two, and replaces
`scaled_dot_product_attention` by ring attention, which hands keys and values from rank to rank.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from importlib import import_module
from typing import Any, Final
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional

from memplan.tracing.cuda import attention

ATEN: Final = torch.ops.aten
ON_CPU: Final = ATEN._scaled_dot_product_flash_attention_for_cpu.default
ON_CPU_BACKWARD: Final = ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default
"""The CPU's attention kernel, which `context_parallel` does not know."""


@contextmanager
def divided_sequences(mesh: DeviceMesh, sequences: Sequence[Tensor], rotate: str) -> Iterator[None]:
    """A block in which these tensors, whose second dim is the sequence, are a rank's own part, for good.

    `rotate`: how keys and values are handed around, as `set_rotate_method` takes it.
    """
    experimental = import_module("torch.distributed.tensor.experimental")
    method = {"allgather": "ALL_GATHER", "alltoall": "ALL_TO_ALL"}[rotate]
    ring = ring_attention()
    with ExitStack() as stack:
        stack.enter_context(patch.object(ring._cp_options, "rotate_method", ring._RotateMethod[method]))
        if mesh.device_type == "cpu":
            stack.enter_context(ring_on_cpu())
        stack.enter_context(
            experimental.context_parallel(
                mesh,
                buffers=[*sequences],
                buffer_seq_dims=[1] * len(sequences),
                no_restore_buffers={*sequences},
            )
        )
        yield


def as_trainer_divides(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inputs of a causal language model with the positions and shifted labels that Trainer adds.

    Source: transformers.trainer:Trainer._prepare_context_parallel_inputs.
    """
    ids, labels = inputs["input_ids"], functional.pad(inputs["labels"], (0, 1), value=-100)
    positions = torch.arange(ids.shape[1], device=ids.device).repeat(ids.shape[0], 1)
    return {**inputs, "shift_labels": labels[:, 1:].contiguous(), "position_ids": positions}


def ring_attention() -> Any:
    """PyTorch's module of ring attention."""
    return import_module("torch.distributed.tensor.experimental._context_parallel._attention")


@contextmanager
def chosen_for_dtensors() -> Iterator[None]:
    """A block in which CUDA's attention kernel is chosen for DTensors too: C++ code takes them for `meta`.

    For the same reason its operands are cast here under autocast, in the order in which C++ compilers
    evaluate arguments.
    """
    own = functional.scaled_dot_product_attention

    @wraps(own)
    def chosen(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(query, DTensor):
            return own(query, key, value, *args, **kwargs)
        if torch.is_autocast_enabled("cuda"):
            dtype = torch.get_autocast_dtype("cuda")
            value, key, query = [x.to(dtype) for x in (value, key, query)]
        return attention(query, key, value, *args, **kwargs)

    with patch.object(functional, own.__name__, chosen):
        yield


@contextmanager
def ring_on_cpu() -> Iterator[None]:
    """A block in which PyTorch's ring attention takes the CPU's kernel too, as it takes those of CUDA.

    It adds no tensor: the kernel has the same operands and results as CUDA's flash attention.
    """

    def called(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        own: Any = DTensor._op_dispatcher.unwrap_to_op_info(func, args, kwargs)
        like: Any = next(one for one in args if isinstance(one, DTensor))
        mesh, placements = like.device_mesh, like.placements
        run = _forward if func is ON_CPU else _backward
        results = run(mesh.get_group(), *own.local_args, **own.local_kwargs)
        return tuple([DTensor.from_local(x, mesh, placements, run_check=False) for x in results])

    with patch.dict(ring_attention().custom_ops, {ON_CPU: called, ON_CPU_BACKWARD: called}):
        yield


def _forward(
    group: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Any:
    _check_mask(attn_mask)
    how = {"is_causal": is_causal, "dropout_p": dropout_p, "scale": scale}
    operands = {"query": query, "key": key, "value": value}
    return ring_attention()._templated_ring_attention(group, 2, ON_CPU, **operands, **how)


def _backward(
    group: Any,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Any:
    _check_mask(attn_mask)
    named = {"query": query, "key": key, "value": value, "out": out, "logsumexp": logsumexp}

    def kernel(*, grad_out: Tensor, is_causal: bool, **own: Tensor) -> Any:
        return ON_CPU_BACKWARD(grad_out, *[own[x] for x in named], dropout_p, is_causal, scale=scale)

    how = {"grad_out": grad_out, "grad_out_name": "grad_out", "is_causal": is_causal}
    return ring_attention()._templated_ring_attention_backward(group, 2, kernel, **how, **named)


def _check_mask(mask: Tensor | None) -> None:
    if mask is not None:
        raise NotImplementedError("attn_bias is not supported yet")
