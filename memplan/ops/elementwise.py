"""Activations and dropout."""

from memplan.checks import checked_fraction
from memplan.shapes import BOOL, FP32
from memplan.tape import Backward, Expanded, Grads, Saved, Tensor


def silu(x: Tensor) -> Tensor:
    """x sigmoid(x); saves x.

    Source: tools/autograd/derivatives.yaml (`silu`).
    """
    return pointwise(x, "silu", x)


def gelu(x: Tensor) -> Tensor:
    """x Phi(x), tanh form; saves x.

    Source: tools/autograd/derivatives.yaml (`gelu`).
    """
    return pointwise(x, "gelu", x)


def relu(x: Tensor) -> Tensor:
    """max(x, 0); saves the result.

    Source: tools/autograd/derivatives.yaml (`relu`).
    """
    return _of_result(x, "relu")


def gelu_new(x: Tensor) -> Tensor:
    """0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), operation by operation; saves four tensors.

    CUDA's autocast computes the power, and with it all but 0.5 x, in float32.

    Source: transformers.activations, NewGELUActivation; aten/src/ATen/autocast_mode.h (`AT_FORALL_FP32`).
    """
    half = times_number(x)
    return _times(half, plus_number(tanh(times_number(x + times_number(_cubed(x))))))


def times_number(x: Tensor, *number: Tensor) -> Tensor:
    """x times a number, which is saved if it is a tensor.

    Source: tools/autograd/derivatives.yaml (`mul.Tensor`).
    """
    return pointwise(x, "multiple", *number)


def plus_number(x: Tensor) -> Tensor:
    """x plus a number; saves nothing.

    Source: tools/autograd/derivatives.yaml (`add.Tensor`).
    """
    return pointwise(x, "sum", backward=passed_on)


def soft_capped(x: Tensor) -> Tensor:
    """c tanh(x / c): three operations, of which the tanh is saved; each replaces the one before.

    Source: transformers.models.gemma2.modeling_gemma2, Gemma2ForCausalLM.forward.
    """
    x = times_number(x)
    x = tanh(x)
    return times_number(x)


def _cubed(x: Tensor) -> Tensor:
    return power(in_fp32_on_cuda(x))


def in_fp32_on_cuda(x: Tensor) -> Tensor:
    """`x` as CUDA's autocast casts it for powers and norms; CPU's does not.

    Source: aten/src/ATen/autocast_mode.h (`AT_FORALL_FP32`).
    """
    context = x.tape.context
    return x.tape.cast(x, FP32) if context.autocast and not context.device.on_cpu else x


def power(x: Tensor, name: str = "power") -> Tensor:
    """A constant power; saves x.

    Source: tools/autograd/derivatives.yaml (`pow.Tensor_Scalar`).
    """
    return pointwise(x, name, x, backward=power_backward)


def power_backward(grad: Tensor, saved: Saved) -> Grads:
    """The gradient of a constant power.

    Source: torch/csrc/autograd/FunctionsManual.cpp (`pow_backward`).
    """
    with grad.tape.workspace() as terms:
        terms.new("power", grad.shape, grad.dtype)
        terms.new("scaled power", grad.shape, grad.dtype)
        return (grad.tape.new("grad", grad.shape, grad.dtype),)


def tanh(x: Tensor) -> Tensor:
    """The hyperbolic tangent; saves the result.

    Source: tools/autograd/derivatives.yaml (`tanh`).
    """
    return _of_result(x, "tanh")


def _of_result(x: Tensor, name: str) -> Tensor:
    """An activation that saves its result, from which its derivative follows."""
    x.check_placements(name)
    y = x.new(name, x.shape, x.dtype)
    y.node = x.tape.node((x.node,), (y.detach(),), same_backward)
    return y


def _times(x: Tensor, y: Tensor) -> Tensor:
    """x y in the type of `y`, which may be wider; saves both."""
    shape, narrow, wide = x.shape, x.dtype, y.dtype
    if narrow == wide:
        return x * y

    def backward(grad: Tensor, saved: Saved) -> Grads:
        return Expanded(grad.tape.new("grad", shape, wide), shape, narrow), grad.tape.new("grad", shape, wide)

    return x.new("product", shape, wide, x.tape.node((x.node, y.node), (x, y), backward))


def dropout(x: Tensor, p: float) -> Tensor:
    """x with elements zeroed at probability p and the rest scaled; x itself if p is 0.

    Saves the mask: of x's type and already scaled on CPU, of booleans on CUDA.

    Source: aten/src/ATen/native/Dropout.cpp (`_dropout_impl`, `native_dropout_cuda`).
    """
    if checked_fraction("dropout", p) == 0.0:
        return x
    mask = x.tape.new("dropout mask", x.shape, x.dtype if x.tape.context.device.on_cpu else BOOL)
    return pointwise(x, "dropout", mask)


def same_backward(grad: Tensor, saved: Saved) -> Grads:
    """A new gradient of the output's shape and layout."""
    return (like(grad, "grad"),)


def passed_on(grad: Tensor, saved: Saved) -> Grads:
    """The output's gradient itself."""
    return (grad,)


def pointwise(x: Tensor, name: str, *saved: Tensor, backward: Backward = same_backward) -> Tensor:
    """A new tensor of the shape and type of `x`, computed from it element by element."""
    x.check_placements(name)
    return x.new(name, x.shape, x.dtype, x.tape.node((x.node,), saved, backward))


def like(x: Tensor, name: str) -> Tensor:
    """A new tensor of the shape, type and layout of `x`.

    Source: torch:empty_like.
    """
    return x.new(name, x.shape, x.dtype, head_major=x.head_major)
