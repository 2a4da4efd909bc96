"""Collectives of the tensor axis, and the changes of layout that cause them.

They are functional: the result is a new tensor.
"""

from memplan.ops.dims import dims, divided
from memplan.tape import NCCL, Grads, Saved, Tensor


def gather_sequence(x: Tensor, *, waits: bool = True) -> Tensor:
    """Enter a tensor-parallel region, in which every tensor rank sees the whole sequence.

    With sequence parallelism the sequence is all-gathered, and its gradient reduce-scattered in backward;
    without, x is whole already and its gradient is all-reduced. `waits`: the gathered sequence is waited for
    at once, as `PrepareModuleInput` does for a region of several modules; `ColwiseParallel`, for a single
    product, waits when that reads it.

    Source: torch.distributed.tensor.parallel.style:PrepareModuleInput, Korthikanti et al. 2022 (g, f).
    """
    tape = x.tape
    if tape.context.tp == 1:
        return x
    sequence_parallel = tape.context.sequence_parallel
    reduced = reduce_scattered if sequence_parallel else all_reduced
    node = tape.node((x.node,), (), lambda grad, saved: (reduced(grad, "activation gradients"),))
    node.distributed = True
    if not sequence_parallel:
        return x.alias(node)
    whole = gathered(x, "activations", waits=waits)
    whole.node = node
    return whole


def divided_sequence(x: Tensor) -> Tensor:
    """x as a norm sees it under sequence parallelism: a DTensor of the same bytes.

    Source: torch.distributed.tensor.parallel.style:SequenceParallel.
    """
    if not x.tape.context.sequence_parallel:
        return x
    x.in_flight = ()
    node = x.tape.node((x.node,), (), lambda grad, saved: (grad,))
    node.distributed = True
    return x.alias(node)


def reduced_over_tp(y: Tensor, *, waits: bool = True) -> Tensor:
    """Leave a tensor-parallel region: the sum of the tensor ranks' partial outputs.

    Each rank keeps all of it, or its part of the sequence under sequence parallelism. `waits`: the next thing
    that happens is that it is read.
    """
    tape = y.tape
    if tape.context.tp == 1:
        return y
    if tape.context.sequence_parallel:
        node = tape.node((y.node,), (), _gathered_backward)
        total = reduce_scattered(y, "activations", waits=waits)
    else:
        node = tape.node((y.node,), (), lambda grad, saved: (grad,))
        total = all_reduced(y, "activations")
    total.node = node
    return total


def all_reduced(x: Tensor, what: str) -> Tensor:
    """The sum of the tensor ranks' `x`.

    Source: torch.distributed._functional_collectives:all_reduce.
    """
    tape, shape, dtype = x.tape, x.shape, x.dtype

    def compute() -> tuple[Tensor]:
        tape.collective("all_reduce", what, x.n_bytes)
        return (tape.new("all-reduced", shape, dtype),)

    (total,) = tape.save_if_selective(compute)
    return total


def gathered(x: Tensor, what: str, *, waits: bool = True) -> Tensor:
    """The whole sequence: the ranks' parts arrive one after the other, and are then interleaved by a copy.

    A single sequence needs no copy, and need not be waited for: then gloo's scratch may live until the
    sequence is read.

    Source: torch.distributed._functional_collectives:all_gather_tensor.
    """
    tape = x.tape
    batch, seq, d = dims(x, "an all-gather of the sequence", "batch", "seq", "d")
    shape = (batch, seq * tape.context.tp, d)
    arrived = tape.new("gathered", shape, x.dtype)
    tape.collective("all_gather", what, arrived.n_bytes)
    if tape.context.gathers_in_copies:
        tape.new("gloo scratch", x.shape, x.dtype)
        with tape.workspace() as scratch:
            scratch.new("gloo scratch", shape, x.dtype)
            if batch == 1 and not waits:
                arrived.in_flight = scratch.handed_over()
    return arrived if batch == 1 else tape.new("gathered sequence", shape, x.dtype)


def _gathered_backward(grad: Tensor, saved: Saved) -> Grads:
    """The whole sequence's gradient; but for `fake`, the own part is held until everything has arrived.

    Source: torch/csrc/distributed/c10d/FakeProcessGroup.hpp (`FakeWork`),
    torch/csrc/distributed/c10d/ProcessGroupGloo.cpp (`AsyncAllgatherWork`),
    torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp (`stashed_for_allocator_safety_`).
    """
    whole = gathered(grad, "activation gradients")
    if whole.shape[0] == 1 and grad.tape.context.backend != "fake":
        whole.in_flight = (grad,)
    return (whole,)


def reduce_scattered(x: Tensor, what: str, *, waits: bool = True) -> Tensor:
    """This rank's part of the summed sequence; the operand is first put in the order of the ranks.

    It need not be waited for: then NCCL's handle holds the operand until the part is read.

    Source: torch.distributed._functional_collectives:reduce_scatter_tensor,
    torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp (`stashed_for_allocator_safety_`).
    """
    tape, tp = x.tape, x.tape.context.tp
    batch, seq, d = dims(x, "a reduce-scatter of the sequence", "batch", "seq", "d")
    part_shape = (batch, divided(seq, tp, "seq_len"), d)
    ordered = tape.new("ordered by rank", x.shape, x.dtype)

    def compute() -> tuple[Tensor]:
        tape.collective("reduce_scatter", what, ordered.n_bytes)
        part = tape.new("reduce-scattered", part_shape, ordered.dtype)
        if tape.context.backend == "gloo":
            tape.new("gloo scratch", ordered.shape, ordered.dtype)
        return (part,)

    (part,) = tape.save_if_selective(compute)
    if not waits and tape.context.backend in NCCL:
        part.in_flight = (ordered,)
    return part
