"""Collectives of the tensor axis, and the changes of placement that cause them.

They are functional collectives: the result is a new tensor.
"""

from memplan.ops.dims import dims, divided
from memplan.ops.elementwise import passed_on
from memplan.placements import Partial, Placement, Replicate, Shard, collective_of
from memplan.shapes import Parameter, Shape
from memplan.tape import NCCL, Grads, Saved, Tape, Tensor


def gather_sequence(x: Tensor, *, waits: bool = True) -> Tensor:
    """The input of a tensor-parallel region, in which every tensor rank sees the whole sequence.

    Its gradient is partial, and gets the placement of the residual stream. `waits`: a gathered sequence is
    waited for at once, as by `PrepareModuleInput` for a region of several modules; `ColwiseParallel`, for a
    single product, waits when the product reads it.

    Source: torch.distributed.tensor.parallel.style:PrepareModuleInput, Korthikanti et al. 2022 (g, f).
    """
    tape, stream = x.tape, x.tape.context.stream
    if tape.context.tp == 1:
        return x
    x.in_flight = ()

    def backward(grad: Tensor, saved: Saved) -> Grads:
        return (redistributed(grad, Partial(), stream, "activation gradients"),)

    node = tape.node((x.node,), (), backward)
    node.has_dtensor_grad = True
    whole = redistributed(x, stream, Replicate(), "activations", waits=waits)
    if whole is x:
        return x.alias(node)
    whole.node = node
    return whole


def divided_sequence(x: Tensor) -> Tensor:
    """The input of a norm under sequence parallelism: a DTensor of the same bytes.

    Source: torch.distributed.tensor.parallel.style:SequenceParallel.
    """
    if not isinstance(x.tape.context.stream, Shard):
        return x
    x.in_flight = ()
    node = x.tape.node((x.node,), (), passed_on)
    node.has_dtensor_grad = True
    return x.alias(node)


def replicated_parameter(tape: Tape, name: str, shape: Shape) -> Parameter:
    """A weight that every tensor rank applies to its chunk of the sequence.

    Under sequence parallelism it is a DTensor, and its gradient is partial.

    Source: torch.distributed.tensor.parallel.style:SequenceParallel.
    """
    if not isinstance(tape.context.stream, Shard):
        return tape.parameter(name, shape)
    return tape.parameter(name, shape, placements={"tp": Replicate()}, grad_placements={"tp": Partial()})


def reduced_over_tp(y: Tensor, *, waits: bool = True) -> Tensor:
    """The output of a tensor-parallel region: partial outputs get the placement of the residual stream.

    `waits`: the next operation reads it. When its gradient is gathered, this rank's chunk is held until the
    all-gather is done, except under `fake`.

    Source: torch/csrc/distributed/c10d/FakeProcessGroup.hpp (`FakeWork`),
    torch/csrc/distributed/c10d/ProcessGroupGloo.cpp (`AsyncAllgatherWork`),
    torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp (`stashed_for_allocator_safety_`).
    """
    tape, stream = y.tape, y.tape.context.stream
    if tape.context.tp == 1:
        return y

    def backward(grad: Tensor, saved: Saved) -> Grads:
        whole = redistributed(grad, stream, Replicate(), "activation gradients")
        if whole is not grad and whole.shape[0] == 1 and grad.tape.context.backend != "fake":
            whole.in_flight = (grad,)
        return (whole,)

    node = tape.node((y.node,), (), backward)
    total = redistributed(y, Partial(), stream, "activations", waits=waits)
    total.node = node
    return total


def redistributed(
    x: Tensor, source: Placement, target: Placement, what: str, *, waits: bool = True
) -> Tensor:
    """x with the placement `target` over the tensor axis; x itself where nothing is sent.

    Source: torch.distributed.tensor._redistribute:redistribute_local_tensor.
    """
    match collective_of(source, target):
        case "all_reduce":
            return all_reduced(x, what)
        case "reduce_scatter":
            return reduce_scattered(x, what, waits=waits)
        case "all_gather":
            return gathered(x, what, waits=waits)
        case None:
            return x


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
    """The whole sequence: the ranks' chunks arrive one after the other, and a copy interleaves them.

    A single sequence needs no copy, and is waited for only when it is read; gloo's scratch may live until
    then.

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


def reduce_scattered(x: Tensor, what: str, *, waits: bool = True) -> Tensor:
    """This rank's chunk of the summed sequence; the operand is first copied into the order of the ranks.

    If it is waited for only when it is read, NCCL's handle holds the operand until then.

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
