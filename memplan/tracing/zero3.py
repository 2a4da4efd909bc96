"""DeepSpeed's ZeRO-3 around a module that is traced: hooks of every module, and linears of its own.

Its autograd functions are played as they are, for what they hold decides when tensors are freed.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional

from memplan.record import HookKind

Hooked = Callable[[HookKind], None]
"""Notes that a module's hook is called."""


def hooked_module(forward: Callable[..., Any], called: Hooked) -> Callable[..., Any]:
    """A module's forward function between its hooks; only positional arguments have hooks of their own.

    Source: `deepspeed.runtime.zero.parameter_offload:DeepSpeedZeRoOffload._register_deepspeed_module`.
    """
    remaining = [0]

    def around(*args: Any, **kwargs: Any) -> Any:
        called("pre_forward")
        remaining[0] = 0
        args = _applied(partial(cast(Any, PostBackward).apply, called, remaining), args)
        output = forward(*args, **kwargs)
        called("post_forward")
        return _applied(partial(cast(Any, PreBackward).apply, called), output)

    return around


def _applied(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """A value with the function applied to each tensor in it; dicts, as outputs of transformers, in place.

    Source: `deepspeed.runtime.zero.utils:apply_to_tensors_only`.
    """
    if isinstance(value, tuple | list):
        found = [_applied(function, one) for one in value]
        return value.__class__(*found) if hasattr(value, "_fields") else value.__class__(found)
    if isinstance(value, dict):
        for key in value:
            value[key] = _applied(function, value[key])
        return value
    return function(value) if isinstance(value, Tensor) else value


class PreBackward(torch.autograd.Function):
    """What ZeRO-3 puts behind a module's output: its backward pass comes before the module's."""

    @staticmethod
    def forward(called: Hooked, output: Tensor) -> Tensor:
        return output.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.called = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.called("pre_backward")
        return (None, *grads)


class PostBackward(torch.autograd.Function):
    """What ZeRO-3 puts before a module: called once the gradients of all arguments are there."""

    @staticmethod
    def forward(called: Hooked, remaining: list[int], argument: Tensor) -> Tensor:
        return argument.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.called, ctx.remaining, argument = inputs
        ctx.remaining[0] += argument.requires_grad

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.remaining[0] -= 1
        if not ctx.remaining[0]:
            ctx.called("post_backward")
        return (None, None, *grads)


class Linear(torch.autograd.Function):
    """A product that saves its input and its weight; x's gradient is computed first.

    Source: `deepspeed.runtime.zero.linear:LinearFunctionForZeroStage3`.
    """

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if x.dim() == 2 and bias is not None:
            return torch.addmm(bias, x, weight.t())
        output = x.matmul(weight.t())
        if bias is not None:
            output += bias
        return output

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        x, weight, bias = ctx.saved_tensors
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = grad.matmul(weight)
        if ctx.needs_input_grad[1]:
            rows = grad.reshape(-1, grad.shape[-1]) if grad.dim() > 2 else grad
            grad_weight = rows.t().matmul(x.reshape(-1, x.shape[-1]) if grad.dim() > 2 else x)
        if bias is not None and ctx.needs_input_grad[2]:
            grad_bias = grad.sum(list(range(grad.dim() - 1)))
        return grad_x, grad_weight, grad_bias


@contextmanager
def linears() -> Iterator[None]:
    """A block in which linears are ZeRO-3's (`memory_efficient_linear`)."""

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return cast(Tensor, cast(Any, Linear).apply(x, weight, bias))

    with patch.object(functional, "linear", linear):
        yield
