"""Activations and dropout."""

from memplan.checks import checked_fraction
from memplan.shapes import BOOL
from memplan.tape import Grads, Saved, Tensor


def silu(x: Tensor) -> Tensor:
    """x sigmoid(x); saves x.

    Source: tools/autograd/derivatives.yaml (`silu`).
    """
    return _activation(x, "silu")


def gelu(x: Tensor) -> Tensor:
    """x Phi(x), tanh form; saves x.

    Source: tools/autograd/derivatives.yaml (`gelu`).
    """
    return _activation(x, "gelu")


def _activation(x: Tensor, name: str) -> Tensor:
    node = x.tape.node((x.node,), (x,), same_backward)
    return x.tape.new(name, x.shape, x.dtype, node)


def dropout(x: Tensor, p: float) -> Tensor:
    """x with elements zeroed at probability p and the rest scaled; x itself if p is 0.

    Saves the mask: of x's type and already scaled on CPU, of booleans on CUDA.

    Source: aten/src/ATen/native/Dropout.cpp (`_dropout_impl`, `native_dropout_cuda`).
    """
    if checked_fraction("dropout", p) == 0.0:
        return x
    tape, shape, dtype = x.tape, x.shape, x.dtype

    def backward(grad: Tensor, saved: Saved) -> Grads:
        return (grad.tape.new("grad", shape, dtype),)

    mask = tape.new("dropout mask", shape, dtype if tape.context.device.on_cpu else BOOL)
    return tape.new("dropout", shape, dtype, tape.node((x.node,), (mask,), backward))


def same_backward(grad: Tensor, saved: Saved) -> Grads:
    """A new gradient of the output's shape and layout."""
    return (like(grad, "grad"),)


def like(x: Tensor, name: str) -> Tensor:
    """A new tensor of the shape, type and layout of `x`.

    Source: torch:empty_like.
    """
    y = x.tape.new(name, x.shape, x.dtype)
    y.head_major = x.head_major
    return y
