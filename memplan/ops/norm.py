"""Norms over the last dim, each with weights that are whole on every tensor rank."""

from memplan.kernels import partial_rows
from memplan.ops.dims import BY_TOKEN, dims
from memplan.ops.elementwise import in_fp32_on_cuda, plus_number, power, power_backward
from memplan.ops.modules import as_module
from memplan.ops.redistribute import divided_sequence, replicated_parameter
from memplan.shapes import FP32, Parameter, n_elements
from memplan.tape import Expanded, Grads, Saved, Tensor


@as_module
def layer_norm(x: Tensor, name: str) -> Tensor:
    """(x - mean) / std x weight + bias over the last dim; saves x and each token's mean and 1/std.

    On CPU the gradients of weight and bias are summed in a buffer of each thread, 2 x d (one thread).

    Source: aten/src/ATen/native/layer_norm.cpp (`layer_norm_cpu`, `layer_norm_backward_cpu`),
    aten/src/ATen/native/cuda/layer_norm_kernel.cu (`layer_norm_cuda`).
    """
    tape, shape, dtype = x.tape, x.shape, x.dtype
    *_, d = dims(x, f"layer_norm {name}", "batch", "seq", "d", allowed=BY_TOKEN)
    w, b = (replicated_parameter(x, f"{name}.{part}", (d,)) for part in ("weight", "bias"))
    x = divided_sequence(x)
    bias, weight, x = (in_fp32_on_cuda(each) for each in (tape.weight(b), tape.weight(w), x))
    dtype, w_dtype = x.dtype, weight.dtype
    statistics = FP32 if not tape.context.device.on_cpu or w_dtype == FP32 else dtype

    def backward(grad: Tensor, saved: Saved) -> Grads:
        grad_x = grad.tape.grad_of(0, shape, dtype)
        grads = [grad.tape.grad_of(1, (d,), w_dtype), grad.tape.grad_of(2, (d,), w_dtype)]
        if grad.tape.context.device.on_cpu and grads[0] is not None:
            with grad.tape.kernel_workspace() as kernel:
                kernel.new("sums of a thread", (2, d), w_dtype)
        sum_partial_rows(grads, n_elements(shape[:-1]))
        return grad_x, *grads

    y = x.new(name, shape, dtype)
    mean = tape.new("mean", shape[:-1], statistics)
    rstd = tape.new("rstd", shape[:-1], statistics)
    y.node = tape.node((x.node, weight.node, bias.node), (x, weight, bias, mean, rstd), backward)
    return y


@as_module
def rms_norm(x: Tensor, name: str) -> Tensor:
    """x / sqrt(mean(x^2) + eps) x weight over the last dim.

    On CPU a composite of float32 operations, each with its own backward: x (as float32), 1/rms and the
    normed x are saved. On CUDA one fused kernel saves x and 1/rms.

    Source: aten/src/ATen/native/layer_norm.cpp (`rms_norm_composite`),
    aten/src/ATen/native/cuda/layer_norm_kernel.cu (`_fused_rms_norm_cuda`).
    """
    tape, dtype = x.tape, x.dtype
    weight = _weight(x, name)
    x = divided_sequence(x)
    if not tape.context.device.on_cpu:
        return _fused_rms_norm(x, weight, name)
    y, _r = _composite_rms_norm(x, tape.weight(weight), name)
    return tape.cast(y, dtype)


@as_module
def rms_norm_by_parts(x: Tensor, name: str) -> Tensor:
    """RMSNorm as Meta's Llama writes it: operation by operation, on any device.

    It computes in float32 up to the weight, which is applied in x's type. Besides what the composite saves,
    it saves the normed x in that type.

    Source: torchtitan/models/norms.py (`RMSNorm.forward`).
    """
    weight, tape = _weight(x, name), x.tape
    narrow = tape.cast(_normed(tape.cast(divided_sequence(x), FP32)), x.dtype)
    return _scaled(narrow, tape.weight(weight), name)


def rms_norm_with_locals(x: Tensor, name: str) -> Tensor:
    """`rms_norm_by_parts` as transformers writes it: variance and normed x are local variables.

    Source: transformers.models.llama.modeling_llama, LlamaRMSNorm.forward.
    """
    weight, tape = _weight(x, name), x.tape
    normed, _variance = _normed_with_locals(x)
    return _scaled(tape.weight(weight), tape.cast(normed, x.dtype), name)


def rms_norm_in_fp32(x: Tensor, name: str) -> Tensor:
    """`rms_norm_with_locals` with the weight applied in float32, as in OLMo 2.

    Source: transformers.models.olmo2.modeling_olmo2, Olmo2RMSNorm.forward.
    """
    weight, tape = _weight(x, name), x.tape
    normed, _variance = _normed_with_locals(x)
    return tape.cast(_mul_by_weight(normed, tape.weight(weight), name, terms_first=False), x.dtype)


def layer_norm_by_parts(x: Tensor, name: str) -> Tensor:
    """LayerNorm without a bias, operation by operation in float32, the weight's product too, as in Cohere.

    Source: transformers.models.cohere.modeling_cohere, CohereLayerNorm.forward.
    """
    weight, wide = _weight(x, name), x.tape.cast(x, FP32)
    mean = _mean(wide)
    variance = _mean(power(_centred(wide, mean), "squares"))
    wide = _mul_per_token(_centred(wide, mean), _rsqrt(plus_number(variance)))
    weight32 = x.tape.cast(x.tape.weight(weight), FP32)
    return x.tape.cast(_mul_by_weight(wide, weight32, name, terms_first=False), x.dtype)


def _centred(x: Tensor, mean: Tensor) -> Tensor:
    """x (batch, seq, d) less its mean (batch, seq, 1), both float32; saves nothing."""
    tape, shape, mean_shape = x.tape, x.shape, mean.shape

    def backward(grad: Tensor, saved: Saved) -> Grads:
        return grad, Expanded(grad.tape.new("negated grad", shape, FP32), mean_shape, FP32)

    return x.new("centred", shape, FP32, tape.node((x.node, mean.node), (), backward))


def rms_norm_around_one(x: Tensor, name: str) -> Tensor:
    """`rms_norm_by_parts` with 1 + the weight, as in Gemma: each norm makes and saves that sum in float32.

    Source: transformers.models.gemma.modeling_gemma, GemmaRMSNorm.forward.
    """
    weight, tape = _weight(x, name), x.tape
    normed = _normed(tape.cast(x, FP32))
    normed = _mul_by_weight(normed, plus_number(tape.cast(tape.weight(weight), FP32)), name)
    return tape.cast(normed, x.dtype)


def _weight(x: Tensor, name: str) -> Parameter:
    *_, d = dims(x, f"rms_norm {name}", "batch", "seq", "d", allowed=BY_TOKEN)
    return replicated_parameter(x, f"{name}.weight", (d,))


def _composite_rms_norm(x: Tensor, w: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """The output in float32, and 1/rms, which lives until the output is cast."""
    x = x.tape.cast(x, FP32)
    r = _reciprocal_rms(x)
    return _mul_by_weight(_mul_per_token(x, r), w, name), r


def _normed(x: Tensor) -> Tensor:
    """x / rms in float32, in a single expression of Python."""
    return _mul_per_token(x, _rsqrt(plus_number(_mean(power(x, "squares")))))


def _normed_with_locals(x: Tensor) -> tuple[Tensor, Tensor]:
    """x / rms in float32, and the mean of the squares, which lives as long."""
    wide = x.tape.cast(divided_sequence(x), FP32)
    variance = _mean(power(wide, "squares"))
    return _mul_per_token(wide, _rsqrt(plus_number(variance))), variance


def _reciprocal_rms(x: Tensor) -> Tensor:
    """1/rms as ATen's composite computes it, whose temporaries live until it is there."""
    squares = power(x, "squares")
    mean = _mean(squares)
    return _rsqrt(mean)


def _mean(x: Tensor) -> Tensor:
    tape, shape = x.tape, x.shape

    def backward(grad: Tensor, saved: Saved) -> Grads:
        return (grad.tape.new("grad", shape, FP32),)

    return x.new("mean", (*shape[:-1], 1), FP32, tape.node((x.node,), (), backward))


def _rsqrt(x: Tensor) -> Tensor:
    y = x.new("rstd", x.shape, FP32)
    y.node = x.tape.node((x.node,), (y.detach(),), power_backward)
    return y


def _mul_per_token(x: Tensor, r: Tensor) -> Tensor:
    """x (batch, seq, d) times r (batch, seq, 1), both float32; saves both."""
    tape, shape, r_shape = x.tape, x.shape, r.shape

    def backward(grad: Tensor, saved: Saved) -> Grads:
        terms = grad.tape.new("terms of grad", shape, FP32)
        return grad.tape.new("grad", shape, FP32), Expanded(terms, r_shape, FP32)

    return x.new("normed", shape, FP32, tape.node((x.node, r.node), (x, r), backward))


def _mul_by_weight(x: Tensor, w: Tensor, name: str, *, terms_first: bool = True) -> Tensor:
    """x (batch, seq, d) in float32 times w (d), which CPU's kernels first copy to float32; saves both.

    `terms_first`: the terms of w's gradient are computed before x's, as of a second factor.
    """
    tape, shape, w_dtype = x.tape, x.shape, w.dtype
    grad_dtype = FP32 if tape.context.keeps_wide_grads else w_dtype
    copies = w_dtype != FP32 and tape.context.device.casts_in_copies

    def grad_of_x(grad: Tensor) -> Tensor | None:
        with grad.tape.workspace() as copied:
            if copies and grad.tape.wants(0):
                copied.new("weight as float32", shape[-1:], FP32)
            return grad.tape.grad_of(0, shape, FP32)

    def backward(grad: Tensor, saved: Saved) -> Grads:
        grad_x = None if terms_first else grad_of_x(grad)
        terms = grad.tape.grad_of(1, shape, FP32)
        if terms_first:
            grad_x = grad_of_x(grad)
        return grad_x, None if terms is None else Expanded(terms, shape[-1:], grad_dtype)

    node = tape.node((x.node, w.node), (x, w), backward)
    with tape.workspace() as copied:
        if copies:
            copied.new("weight as float32", shape[-1:], FP32)
        return x.new(name, shape, FP32, node)


def _scaled(left: Tensor, right: Tensor, name: str) -> Tensor:
    """A product of (batch, seq, d) and weights (d), in either order, in the wider type; saves both."""
    tape, factors = left.tape, (left, right)
    x = max(factors, key=lambda factor: len(factor.shape))
    shape = x.shape
    wide = max(factors, key=lambda factor: factor.dtype.itemsize).dtype
    (left_shape, left_dtype), (right_shape, right_dtype) = ((one.shape, one.dtype) for one in factors)

    def backward(grad: Tensor, saved: Saved) -> Grads:
        grad_right, grad_left = (grad.tape.grad_of(i, shape, wide) for i in (1, 0))
        return (
            None if grad_left is None else Expanded(grad_left, left_shape, left_dtype),
            None if grad_right is None else Expanded(grad_right, right_shape, right_dtype),
        )

    return x.new(name, shape, wide, tape.node((left.node, right.node), factors, backward))


def _fused_rms_norm(x: Tensor, of: Parameter, name: str) -> Tensor:
    weight, x = in_fp32_on_cuda(x.tape.weight(of)), in_fp32_on_cuda(x)
    tape, shape, dtype, w_dtype = x.tape, x.shape, x.dtype, weight.dtype

    def backward(grad: Tensor, saved: Saved) -> Grads:
        grad_x = grad.tape.grad_of(0, shape, dtype)
        grads = [grad.tape.grad_of(1, shape[-1:], w_dtype)]
        sum_partial_rows(grads, n_elements(shape[:-1]))
        return grad_x, *grads

    y = x.new(name, shape, dtype)
    rstd = tape.new("rstd", shape[:-1], FP32)
    y.node = tape.node((x.node, weight.node), (x, weight, rstd), backward)
    return y


def sum_partial_rows(grads: list[Tensor | None], n_tokens: int) -> None:
    """Replace the weights' gradients of a norm over very many tokens on CUDA by sums of partial sums.

    Source: aten/src/ATen/native/cuda/layer_norm_kernel.cu (`LaunchGammaBetaBackwardCUDAKernel`).
    """
    asked = next((grad for grad in grads if grad is not None), None)
    if asked is None or asked.tape.context.device.on_cpu:
        return
    tape, (d,), dtype = asked.tape, asked.shape, asked.dtype
    n_rows = partial_rows(tape.context.device, n_tokens, d)
    if n_rows:
        asked = None
        with tape.workspace() as partial:
            for _ in grads:
                partial.new("rows of partial sums", (n_rows, d), dtype)
            for i in range(len(grads)):
                grads[i] = tape.summed("grad", (d,), dtype, n_rows)
