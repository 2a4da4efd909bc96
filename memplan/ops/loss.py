"""The loss: cross-entropy, its share of a micro-batch, its scale."""

from functools import reduce
from operator import add

from memplan.ops.dims import BY_FEATURE, dims
from memplan.ops.elementwise import passed_on, pointwise
from memplan.ops.heads import split
from memplan.ops.redistribute import moved
from memplan.placements import Partial, Replicate
from memplan.record import ComputeKind
from memplan.shapes import BOOL, FP32, INT64, DType
from memplan.tape import Grads, Saved, Tape, Tensor, Workspace


def cross_entropy(logits: Tensor) -> Tensor:
    """Mean of -log softmax(logits) at the target, in float32: saves the log-probabilities.

    A narrower type is first copied to float32; that copy is freed with the forward pass. With `loss_chunks`
    the sequence is cut into pieces whose losses are summed, as torchtune's `CEWithChunkedOutputLoss` does:
    the log-probabilities of all are saved, but one piece at a time is in float32, and has gradients.

    Source: aten/src/ATen/native/SoftMax.cpp (`log_softmax`), aten/src/ATen/native/LossNLL.cpp
    (`cross_entropy_loss`), tools/autograd/derivatives.yaml (`_log_softmax` saves its result).
    """
    tape = logits.tape
    dims(logits, "cross_entropy", "batch", "seq", "vocabulary", allowed=BY_FEATURE)
    if tape.context.loss_chunks == 1:
        return softmax_cross_entropy(tape.cast(logits, FP32))
    total = reduce(add, map(_cross_entropy_of_piece, _pieces(logits, tape.context.loss_chunks)))
    return pointwise(total, "loss")


def shifted_cross_entropy(logits: Tensor) -> Tensor:
    """`cross_entropy` of the next token as in transformers: targets are padded and shifted.

    Of several sequences the shifted targets are a copy. Under a trainer it is a sum over the tokens of the
    whole batch.

    Source: transformers.loss.loss_utils, ForCausalLMLoss, fixed_cross_entropy.
    """
    tape = logits.tape
    batch, seq, _ = dims(logits, "shifted_cross_entropy", "batch", "seq", "vocabulary")
    wide = tape.cast(logits, FP32)
    with tape.workspace() as padded:
        targets = tape.new("padded targets", (batch, seq + 1), INT64)
        if batch > 1:
            padded.keep(targets)
            targets = tape.new("shifted targets", (batch, seq), INT64)
        else:
            targets = Tensor(tape, (batch, seq), INT64, targets.storage, is_view=True)
        loss = softmax_cross_entropy(wide, targets)
        return pointwise(loss, "loss over the tokens of the batch") if tape.context.trainer else loss


def fused_linear_cross_entropy(x: Tensor, name: str, n_out: int) -> Tensor:
    """The loss of the last norm's output x (batch, seq, d), whose logits are made chunk by chunk, by Liger.

    A chunk's logits (tokens, n_out) become their own gradient, in place. The gradients of x and of the weight
    are computed in the forward pass and saved; nothing else is.

    Source: liger_kernel.ops.fused_linear_cross_entropy (`fused_linear_cross_entropy_forward`), 0.8.5;
    liger_kernel.transformers.model.loss_utils (`LigerForCausalLMLoss`).
    """
    tape, dtype = x.tape, x.dtype
    batch, seq, d = dims(x, "fused_linear_cross_entropy", "batch", "seq", "d")
    n_tokens = batch * seq
    weight = tape.weight(tape.parameter(f"{name}.weight", (n_out, d)))
    with tape.workspace() as held:
        targets = tape.new("padded targets", (batch, seq + 1), INT64)
        held.keep(targets)
        if batch > 1:
            held.new("shifted targets", (batch, seq), INT64)
        del targets
        grad_x = tape.new("grad of the last norm's output", (n_tokens, d), dtype)
        grad_w = tape.new(f"{name}.weight.grad", weight.shape, dtype)
        losses = tape.new("losses of tokens", (n_tokens,), FP32)
        held.new("tokens with a target", (n_tokens,), BOOL)
        held.keep(losses)
        tape.summed("number of targets", (), INT64, n_tokens)
        with tape.workspace() as storage:
            _chunks(x, weight, n_tokens, storage)
        loss = tape.summed("loss", (), FP32, n_tokens)

    def backward(grad: Tensor, saved: Saved) -> Grads:
        with grad.tape.workspace() as compared:
            compared.new("1", (), FP32)
            compared.new("whether the gradient is 1", (), BOOL)
            compared.new("whether all are", (), BOOL)
        grad_x, grad_w = saved
        return grad_x.view(batch, seq, d), grad_w.detach()

    loss.node = tape.node((x.node, weight.node), (grad_x, grad_w), backward)
    return loss


def chunk_tokens(n_tokens: int, d: int, n_out: int) -> int:
    """The tokens of a chunk of Liger's loss.

    >>> chunk_tokens(4 * 4096, 4096, 32_000), chunk_tokens(4096, 4096, 128_256), chunk_tokens(3, 64, 64)
    (2048, 128, 3)
    """
    least = -(-n_tokens // -(-n_out // d))
    return min(n_tokens, 1 << (least - 1).bit_length())


def _chunks(x: Tensor, weight: Tensor, n_tokens: int, storage: Workspace) -> None:
    """The three products of each chunk, into one tensor of logits and into the gradients."""
    tape, (n_out, d) = x.tape, weight.shape
    size = chunk_tokens(n_tokens, d, n_out)
    logits = tape.new("logits of a chunk", (size, n_out), x.dtype)
    storage.keep(logits)
    tape.product(logits)
    for start in range(0, n_tokens, size):
        n = min(size, n_tokens - start)
        for operands in (((n, d), (d, n_out)), ((n, n_out), (n_out, d)), ((n_out, n), (n, d))):
            tape.computed(ComputeKind.MM, operands, (operands[0][0], operands[1][1]), x.dtype)
        if x.dtype == FP32:
            with tape.workspace() as product:
                product.new("gradient of a chunk", weight.shape, FP32)


def softmax_cross_entropy(logits: Tensor, *targets: Tensor) -> Tensor:
    """The loss of float32 logits; saves `targets` that were made for it."""
    tape, shape = logits.tape, logits.shape
    for axis in logits.placements:
        return _vocabulary_parallel_cross_entropy(logits, targets, axis)

    def softmax_backward(grad: Tensor, saved: Saved) -> Grads:
        return (grad.tape.new("grad of logits", shape, FP32),)

    def nll_backward(grad: Tensor, saved: Saved) -> Grads:
        return (grad.tape.new("grad of log-probabilities", shape, FP32),)

    log_p = tape.new("log-probabilities", shape, FP32)
    log_p.node = tape.node((logits.node,), (log_p.detach(),), softmax_backward)
    loss, total_weight = tape.new("loss", (), FP32), tape.new("total weight", (), FP32)
    loss.node = tape.node((log_p.node,), (log_p, total_weight, *targets), nll_backward)
    return loss


def _cross_entropy_of_piece(logits: Tensor) -> Tensor:
    """One piece's loss; a piece cut out of several sequences is made contiguous, with its targets."""
    tape = logits.tape
    batch, seq, _ = logits.shape
    wide = tape.cast(logits, FP32)
    if batch == 1:
        return softmax_cross_entropy(wide)
    if logits.dtype == FP32:
        wide = logits.new("contiguous logits", logits.shape, FP32, logits.node)
    return softmax_cross_entropy(wide, tape.new("targets of the piece", (batch, seq), INT64))


def _pieces(logits: Tensor, n: int) -> list[Tensor]:
    """Pieces of ceil(seq / n) along the sequence, the last one shorter.

    Source: torch:chunk.
    """
    batch, seq, vocabulary = logits.shape
    most = -(-seq // n)
    pieces = [(batch, min(most, seq - start), vocabulary) for start in range(0, seq, most)]
    return split(logits, pieces, "grad of logits")


def _vocabulary_parallel_cross_entropy(logits: Tensor, targets: Saved, axis: str) -> Tensor:
    """The loss where each rank of an axis has a part of the vocabulary.

    Maxima, sums and the targets' values are all-reduced. The loss's backward makes the logits' gradient as a
    whole; log-softmax's passes it on.

    Source: torch.distributed.tensor.parallel.loss:_nll_loss_forward, and
    torch.distributed.tensor.parallel.loss:_nll_loss_and_log_softmax_backward.
    """
    tape, shape = logits.tape, logits.shape
    tokens = shape[:-1]

    def nll_backward(grad: Tensor, saved: Saved) -> Grads:
        with grad.tape.workspace() as temporary:
            for _ in range(3):
                temporary.new("targets' indices", tokens, INT64)
            temporary.new("targets of other ranks", tokens, BOOL)
            for _ in range(2):
                temporary.new("targets' gradients", tokens, FP32)
            temporary.new("grad of log-probabilities", shape, FP32)
            with grad.tape.workspace() as exponentials:
                exponentials.new("probabilities", shape, FP32)
                temporary.new("probabilities less targets", shape, FP32)
            return (grad.tape.new("grad of logits", shape, FP32),)

    log_p = _vocabulary_parallel_log_softmax(logits, axis)
    _reduced(tape.new("targets' log-probabilities", tokens, FP32), axis, "targets' log-probabilities")
    total_weight = tape.new("total weight", (), FP32)
    node = tape.node((log_p.node,), (log_p, total_weight, *targets), nll_backward)
    node.grad_placements = (logits.placements,)
    return tape.new("loss", (), FP32, node)


def _reduced(x: Tensor, axis: str, what: str) -> Tensor:
    """What x, of each rank's part of the vocabulary, is for the whole."""
    x.placements = {axis: Partial()}
    return moved(x, axis, Replicate(), what)


def _vocabulary_parallel_log_softmax(logits: Tensor, axis: str) -> Tensor:
    """Each rank's part of the log-probabilities.

    Source: torch.distributed.tensor.parallel.loss:_log_softmax.
    """
    tape, shape = logits.tape, logits.shape
    tokens = shape[:-1]
    with tape.workspace() as temporary:
        temporary.keep(_reduced(tape.new("maxima", tokens, FP32), axis, "maxima of logits"))
        temporary.new("logits less maxima", shape, FP32)
        temporary.keep(_reduced(_sums_of_exponentials(logits), axis, "sums of exponentials"))
        temporary.new("logarithms of sums", tokens, FP32)
        log_p = logits.new("log-probabilities", shape, FP32)
    log_p.node = tape.node((logits.node,), (log_p.detach(),), passed_on)
    return log_p


def _sums_of_exponentials(logits: Tensor) -> Tensor:
    with logits.tape.workspace() as powers:
        powers.new("exponentials", logits.shape, FP32)
        return logits.tape.new("sums", logits.shape[:-1], FP32)


def share_of_loss(loss: Tensor) -> Tensor:
    """The loss divided by the number of micro-batches, so that gradients add up to the batch's mean.

    Source: torch:Tensor.div.
    """
    return pointwise(loss, "loss over the micro-batches")


def scaled_loss(loss: Tensor) -> Tensor:
    """The loss times the scaler's scale in float16, else the loss itself.

    Source: torch.amp.grad_scaler:GradScaler.scale.
    """
    if not loss.tape.context.scales_loss:
        return loss
    return pointwise(loss, "scaled loss")


def logits_in_float32(logits: Tensor) -> Tensor:
    """The copy in float32 in which Accelerate returns logits that were computed under autocast.

    Source: accelerate.utils.operations (`ConvertOutputsToFp32`).
    """
    is_wide = logits.dtype == FP32 or logits.tape.context.autocast is None
    return logits if is_wide else logits.new("logits in float32", logits.shape, FP32)


def loss_as_returned(loss: Tensor) -> Tensor:
    """The loss as the Trainer's module returns it: FSDP2 casts it, DDP hands on a clone.

    Source: `torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState._post_forward` (`output_dtype`),
    `torch.nn.parallel.distributed:_DDPSink.forward`.
    """
    context = loss.tape.context
    if context.cast_units:
        loss = loss.tape.cast(loss, context.weight_dtype)
    return pointwise(loss, "clone of the loss") if context.clones_outputs else loss


def loss_of_one_step(loss: Tensor) -> Tensor:
    """The loss over Accelerate's steps of accumulation, of which there is one under the Trainer.

    Source: accelerate.accelerator (`Accelerator.backward`).
    """
    return pointwise(loss, "loss of one step")


def gradient_of_loss(tape: Tape, dtype: DType = FP32) -> Tensor:
    """The 1 that backward starts from, in the loss's type.

    Source: torch.autograd:_make_grads.
    """
    return tape.new("grad of loss", (), dtype)
