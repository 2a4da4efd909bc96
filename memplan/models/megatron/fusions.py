"""Megatron's operations between its layers: bias, dropout and residual; activations; the loss."""

from memplan.models.megatron.config import TransformerConfig
from memplan.models.megatron.layers import expanded_bias, node_of, sent
from memplan.shapes import BF16, BOOL, FP32, INT64, Parameter
from memplan.tape import Expanded, Grads, Saved, Tensor


def bias_dropout_add(x: Tensor, bias: Parameter | None, residual: Tensor, p: float) -> Tensor:
    """residual + dropout(x + bias), as one kernel: saves the mask of booleans, and nothing without dropout.

    The residual's gradient is the output's.

    Neglects: the random seed, and the partial sums of the bias's gradient.

    Source: megatron.core.fusions.fused_bias_dropout:bias_dropout_add_fused_train, by torch.compile.
    """
    tape, shape, dtype, width = x.tape, x.shape, x.dtype, x.shape[-1]

    def backward(grad: Tensor, saved: Saved) -> Grads:
        grad_x = grad.tape.new("grad", shape, dtype) if saved else grad
        of_bias = () if bias is None else (expanded_bias(grad_x, width, dtype),)
        return (grad_x, *of_bias, grad)

    mask = (tape.new("dropout mask", shape, BOOL),) if p else ()
    inputs = (x.node, *([] if bias is None else [node_of(bias, tape)]), residual.node)
    node = tape.node(inputs, mask, backward)
    return tape.new("hidden states", shape, dtype, node)


def bias_gelu(x: Tensor, bias: Parameter | None) -> Tensor:
    """GELU of x + bias: saves x.

    Source: megatron.core.fusions.fused_bias_gelu:GeLUFunction; without a bias, torch.nn.functional:gelu.
    """
    return _activation(x, bias, x.shape[-1], "gelu")


def bias_swiglu(x: Tensor, bias: Parameter | None) -> Tensor:
    """SwiGLU of the two halves of x + bias: saves x.

    Source: megatron.core.fusions.fused_bias_swiglu:BiasSwiGLUFunction,
    megatron.core.fusions.fused_bias_swiglu:SwiGLUFunction.
    """
    return _activation(x, bias, x.shape[-1] // 2, "swiglu")


def _activation(x: Tensor, bias: Parameter | None, n_out: int, name: str) -> Tensor:
    tape, shape, dtype = x.tape, x.shape, x.dtype

    def backward(grad: Tensor, saved: Saved) -> Grads:
        both = grad.tape.new("grad", shape, dtype)
        return (both,) if bias is None else (both, expanded_bias(both, shape[-1], dtype))

    inputs = (x.node,) if bias is None else (x.node, node_of(bias, tape))
    return tape.new(name, (*shape[:-1], n_out), dtype, tape.node(inputs, (x,), backward))


def dropout(x: Tensor, p: float) -> Tensor:
    """PyTorch's dropout on CUDA: saves its mask of booleans.

    Source: aten/src/ATen/native/Dropout.cpp (`native_dropout_cuda`).
    """
    if not p:
        return x
    tape, shape, dtype = x.tape, x.shape, x.dtype

    def backward(grad: Tensor, saved: Saved) -> Grads:
        return (grad.tape.new("grad", shape, dtype),)

    y = tape.new("dropout", shape, dtype)
    mask = tape.new("dropout mask", shape, BOOL)
    y.node = tape.node((x.node,), (mask,), backward)
    return y


def vocab_parallel_cross_entropy(logits: Tensor, config: TransformerConfig) -> Tensor:
    """Each token's loss from this rank's part of the logits: (batch, seq) in float32.

    It saves the probabilities in float32, and makes their gradient in place; that is then cast.

    Source: megatron.core.tensor_parallel.cross_entropy:_VocabParallelCrossEntropy.
    """
    tape, shape, dtype = logits.tape, logits.shape, logits.dtype
    tokens = shape[:-1]

    def backward(grad: Tensor, saved: Saved) -> Grads:
        probabilities = saved[0]
        with grad.tape.workspace() as local:
            local.new("arange", tokens, INT64)
            local.new("softmax update", tokens, FP32)
            return (Expanded(probabilities, shape, dtype),)

    with tape.workspace() as frame:
        frame.new("labels, transposed", tokens, INT64)
        with tape.workspace() as local:
            wide = tape.new("logits as float32", shape, FP32)
            local.new("maxima", tokens, FP32)
            if config.tp > 1:
                for what in ("maxima of logits", "predicted logits", "sums of exponentials"):
                    sent(tape, "all_reduce", what, tokens, FP32)
            mask = tape.new("target mask", tokens, BOOL)
            target = tape.new("masked target", tokens, INT64)
            with tape.workspace() as inner:
                inner.new("arange", tokens, INT64)
                local.new("predicted logits", tokens, FP32)
                local.new("sums of exponentials", tokens, FP32)
            loss = tape.new("losses", tokens, FP32)
        loss.node = tape.node((logits.node,), (wide, mask, target), backward)
    return loss


def compiled_parallel_cross_entropy(logits: Tensor, config: TransformerConfig) -> Tensor:
    """Megatron's fused loss, as Inductor compiles it: saves the probabilities in float32.

    Each pass makes a copy of them: Inductor's code for PyTorch 2.13 writes the exponentials into a buffer of
    their own, and subtracts the targets out of place. The gradient is in bfloat16.

    Source: megatron.core.fusions.fused_cross_entropy:_VocabParallelCrossEntropy.
    """
    tape, shape = logits.tape, logits.shape
    tokens = shape[:-1]

    def backward(grad: Tensor, saved: Saved) -> Grads:
        with grad.tape.workspace() as local:
            local.new("probabilities less targets", shape, FP32)
            return (grad.tape.new("grad", shape, BF16),)

    with tape.workspace() as frame:
        frame.new("labels, transposed", tokens, INT64)
        wide = tape.new("logits as float32", shape, FP32)
        frame.new("maxima", tokens, FP32)
        mask = tape.new("target mask", tokens, BOOL)
        target = tape.new("masked target", tokens, INT64)
        with tape.workspace() as local:
            for name in ("predicted logits", "predicted logits of own rows"):
                local.new(name, tokens, FP32)
            frame.new("predicted logits and sums of exponentials", (2, *tokens), FP32)
            local.new("exponentials", shape, FP32)
        if config.tp > 1:
            sent(tape, "all_reduce", "maxima of logits", tokens, FP32)
            sent(tape, "all_reduce", "predicted logits and sums", (2, *tokens), FP32)
        loss = tape.new("losses", tokens, FP32)
        loss.node = tape.node((logits.node,), (wide, mask, target), backward)
    return loss


def te_parallel_cross_entropy(logits: Tensor, config: TransformerConfig) -> Tensor:
    """Transformer Engine's: its forward pass writes the gradient into the logits, which are all it saves.

    Source: transformer_engine.pytorch.cross_entropy:CrossEntropyFunction.
    """
    tape, shape = logits.tape, logits.shape
    tokens = shape[:-1]

    def backward(grad: Tensor, saved: Saved) -> Grads:
        return (saved[0].detach(),)

    with tape.workspace() as frame:
        frame.new("labels, transposed", tokens, INT64)
        loss = tape.new("losses", tokens, FP32)
        frame.new("maxima, sums and predicted logits", (*tokens, 3), FP32)
        if config.tp > 1:
            frame.new("maxima, sums and predicted logits of all ranks", (config.tp, *tokens, 3), FP32)
            sent(tape, "all_gather", "maxima and sums", (config.tp, *tokens, 3), FP32)
        loss.node = tape.node((logits.node,), (logits.detach(),), backward)
    return loss


def masked_loss(losses: Tensor) -> Tensor:
    """The sum of the tokens' losses where the loss mask is 1, which the micro-batch holds anyway.

    Source: pretrain_gpt.py (`loss_func`).
    """
    tape, shape = losses.tape, losses.shape

    def backward(grad: Tensor, saved: Saved) -> Grads:
        return (grad.tape.new("grad of losses", shape, FP32),)

    with tape.workspace() as products:
        products.new("masked losses", shape, FP32)
        return tape.new("loss", (), FP32, tape.node((losses.node,), (), backward))


def token_losses(losses: Tensor) -> Tensor:
    """The tokens' losses times the loss mask and the weight of a depth of multi-token prediction.

    Source: megatron.core.transformer.multi_token_prediction:process_mtp_loss.
    """
    tape, shape = losses.tape, losses.shape

    def backward(grad: Tensor, saved: Saved) -> Grads:
        return (grad.tape.new("grad of losses", shape, FP32),)

    node = tape.node((losses.node,), (), backward)
    return tape.new("weighted losses", shape, FP32, node)


def with_loss_beside(h: Tensor, losses: Tensor) -> Tensor:
    """h itself, whose backward pass begins that of the losses too.

    Source: megatron.core.transformer.multi_token_prediction:MTPLossAutoScaler.
    """
    shape = losses.shape

    def backward(grad: Tensor, saved: Saved) -> Grads:
        return grad, grad.tape.new("grad of weighted losses", shape, FP32)

    node = h.tape.node((h.node, losses.node), (losses,), backward)
    return Tensor(h.tape, h.shape, h.dtype, h.storage, node, h.is_view)
