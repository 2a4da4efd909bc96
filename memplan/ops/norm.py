"""Norms over the last dim, each with weights that are whole on every tensor rank."""

from memplan.kernels import partial_rows
from memplan.ops.dims import dims
from memplan.ops.elementwise import plus_number, power, power_backward
from memplan.ops.tensor_axis import divided_sequence, replicated_parameter
from memplan.shapes import FP32, DType, Parameter, n_elements
from memplan.tape import Expanded, Grads, Saved, Tape, Tensor


def layer_norm(x: Tensor, name: str) -> Tensor:
    """(x - mean) / std x weight + bias over the last dim; saves x and each token's mean and 1/std.

    On CPU the gradients of weight and bias are summed in a buffer of each thread, 2 x d (one thread).

    Source: aten/src/ATen/native/layer_norm.cpp (`layer_norm_cpu`, `layer_norm_backward_cpu`),
    aten/src/ATen/native/cuda/layer_norm_kernel.cu (`layer_norm_cuda`).
    """
    tape, shape, dtype = x.tape, x.shape, x.dtype
    *_, d = dims(x, f"layer_norm {name}", "batch", "seq", "d")
    w, b = (replicated_parameter(tape, f"{name}.{part}", (d,)) for part in ("weight", "bias"))
    x = divided_sequence(x)
    statistics = FP32 if not tape.context.device.on_cpu or w.dtype == FP32 else dtype

    def backward(grad: Tensor, saved: Saved) -> Grads:
        grad_x = grad.tape.grad_of(0, shape, dtype)
        grads = [grad.tape.grad_of(1, (d,), w.dtype), grad.tape.grad_of(2, (d,), b.dtype)]
        if grad.tape.context.device.on_cpu and grads[0] is not None:
            with grad.tape.kernel_workspace() as kernel:
                kernel.new("sums of a thread", (2, d), w.dtype)
        sum_partial_rows(grads, n_elements(shape[:-1]))
        return grad_x, *grads

    y = tape.new(name, shape, dtype)
    mean = tape.new("mean", shape[:-1], statistics)
    rstd = tape.new("rstd", shape[:-1], statistics)
    y.node = tape.node((x.node, w, b), (x, mean, rstd), backward)
    return y


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


def rms_norm_by_parts(x: Tensor, name: str) -> Tensor:
    """RMSNorm as Meta's and Hugging Face's Llama write it: operation by operation, on any device.

    It computes in float32 up to the weight, which is applied in x's type. Besides what the composite saves,
    it saves the normed x in that type.

    Source: torchtitan/models/norms.py (`RMSNorm.forward`), transformers' `LlamaRMSNorm.forward`.
    """
    weight = _weight(x, name)
    narrow = _normed(divided_sequence(x))
    return _scaled(narrow, x.tape.weight(weight), name)


def rms_norm_in_fp32(x: Tensor, name: str) -> Tensor:
    """`rms_norm_by_parts` with the weight applied in float32, as in OLMo 2.

    Source: transformers.models.olmo2.modeling_olmo2, Olmo2RMSNorm.forward.
    """
    weight, normed = _weight(x, name), _normed_in_fp32(x.tape.cast(x, FP32))
    return x.tape.cast(_mul_by_weight(normed, x.tape.weight(weight), name), x.dtype)


def layer_norm_by_parts(x: Tensor, name: str) -> Tensor:
    """LayerNorm without a bias, operation by operation in float32, the weight's product too, as in Cohere.

    Source: transformers.models.cohere.modeling_cohere, CohereLayerNorm.forward.
    """
    weight, wide = _weight(x, name), x.tape.cast(x, FP32)
    mean = _mean(wide)
    variance = _mean(power(_centred(wide, mean), "squares"))
    centred = _centred(wide, mean)
    del wide
    normed = _mul_per_token(centred, _rsqrt(variance))
    del centred
    return x.tape.cast(_mul_by_weight(normed, x.tape.cast(x.tape.weight(weight), FP32), name), x.dtype)


def _centred(x: Tensor, mean: Tensor) -> Tensor:
    """x (batch, seq, d) less its mean (batch, seq, 1), both float32; saves nothing."""
    tape, shape, mean_shape = x.tape, x.shape, mean.shape

    def backward(grad: Tensor, saved: Saved) -> Grads:
        return grad, Expanded(grad.tape.new("negated grad", shape, FP32), mean_shape, FP32)

    return tape.new("centred", shape, FP32, tape.node((x.node, mean.node), (), backward))


def rms_norm_around_one(x: Tensor, name: str) -> Tensor:
    """`rms_norm_by_parts` with 1 + the weight, as in Gemma: each norm makes and saves that sum in float32.

    Source: transformers.models.gemma.modeling_gemma, GemmaRMSNorm.forward.
    """
    weight, normed = _weight(x, name), _normed_in_fp32(x.tape.cast(x, FP32))
    return x.tape.cast(
        _mul_by_weight(normed, plus_number(x.tape.cast(x.tape.weight(weight), FP32)), name), x.dtype
    )


def _weight(x: Tensor, name: str) -> Parameter:
    *_, d = dims(x, f"rms_norm {name}", "batch", "seq", "d")
    return replicated_parameter(x.tape, f"{name}.weight", (d,))


def _composite_rms_norm(x: Tensor, w: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """The output in float32, and 1/rms, which lives until the output is cast."""
    x = x.tape.cast(x, FP32)
    r = _reciprocal_rms(x)
    return _mul_by_weight(_mul_per_token(x, r), w, name), r


def _normed(x: Tensor) -> Tensor:
    """x / rms, computed in float32, in x's type."""
    return x.tape.cast(_normed_in_fp32(x.tape.cast(x, FP32)), x.dtype)


def _normed_in_fp32(x: Tensor) -> Tensor:
    return _mul_per_token(x, _reciprocal_rms(x))


def _reciprocal_rms(x: Tensor) -> Tensor:
    squares = power(x, "squares")
    mean = _mean(squares)
    return _rsqrt(mean)


def _mean(x: Tensor) -> Tensor:
    tape, shape = x.tape, x.shape

    def backward(grad: Tensor, saved: Saved) -> Grads:
        return (grad.tape.new("grad", shape, FP32),)

    return tape.new("mean", (*shape[:-1], 1), FP32, tape.node((x.node,), (), backward))


def _rsqrt(x: Tensor) -> Tensor:
    y = x.tape.new("rstd", x.shape, FP32)
    y.node = x.tape.node((x.node,), (y.detach(),), power_backward)
    return y


def _mul_per_token(x: Tensor, r: Tensor) -> Tensor:
    """x (batch, seq, d) times r (batch, seq, 1), both float32; saves both."""
    tape, shape, r_shape = x.tape, x.shape, r.shape

    def backward(grad: Tensor, saved: Saved) -> Grads:
        grad_x = grad.tape.new("grad", shape, FP32)
        return grad_x, Expanded(grad.tape.new("terms of grad", shape, FP32), r_shape, FP32)

    return tape.new("normed", shape, FP32, tape.node((x.node, r.node), (x, r), backward))


def _mul_by_weight(x: Tensor, w: Tensor, name: str) -> Tensor:
    """x (batch, seq, d) in float32 times w (d), which CPU's kernels first copy to float32; saves both."""
    tape, shape, w_dtype = x.tape, x.shape, w.dtype
    grad_dtype = FP32 if tape.context.keeps_wide_grads else w_dtype
    copies = w_dtype != FP32 and tape.context.device.casts_in_copies

    def backward(grad: Tensor, saved: Saved) -> Grads:
        terms = grad.tape.grad_of(1, shape, FP32)
        with grad.tape.workspace() as copied:
            if copies and grad.tape.wants(0):
                copied.new("weight as float32", shape[-1:], FP32)
            grad_x = grad.tape.grad_of(0, shape, FP32)
        return grad_x, None if terms is None else Expanded(terms, shape[-1:], grad_dtype)

    node = tape.node((x.node, w.node), (x, w), backward)
    with tape.workspace() as copied:
        if copies:
            copied.new("weight as float32", shape[-1:], FP32)
        return tape.new(name, shape, FP32, node)


def _scaled(x: Tensor, w: Tensor, name: str) -> Tensor:
    """x (batch, seq, d) times w (d) in the type of `w`, which may be wider; saves both."""
    tape, shape, narrow, wide = x.tape, x.shape, x.dtype, w.dtype

    def backward(grad: Tensor, saved: Saved) -> Grads:
        grad_x = grad.tape.grad_of(0, shape, wide)
        terms = grad.tape.grad_of(1, shape, wide)
        return (
            None if grad_x is None else Expanded(grad_x, shape, narrow),
            None if terms is None else Expanded(terms, shape[-1:], wide),
        )

    return tape.new(name, shape, wide, tape.node((x.node, w.node), (x, w), backward))


def _fused_rms_norm(x: Tensor, weight: Parameter, name: str) -> Tensor:
    tape, shape, dtype = x.tape, x.shape, x.dtype

    def backward(grad: Tensor, saved: Saved) -> Grads:
        grad_x = grad.tape.grad_of(0, shape, dtype)
        grads = [grad.tape.grad_of(1, shape[-1:], weight.dtype)]
        sum_partial_rows(grads, n_elements(shape[:-1]))
        return grad_x, *grads

    y = tape.new(name, shape, dtype)
    rstd = tape.new("rstd", shape[:-1], FP32)
    y.node = tape.node((x.node, weight), (x, rstd), backward)
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
                grads[i] = _sum_of_rows(tape, n_rows, d, dtype)


def _sum_of_rows(tape: Tape, n_rows: int, d: int, dtype: DType) -> Tensor:
    total = tape.new("grad", (d,), dtype)
    tape.sum_workspace(d, n_rows)
    return total
