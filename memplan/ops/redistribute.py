"""Changes of placement, and the collectives that make them.

They are functional collectives: the result is a new tensor.
"""

from memplan.errors import MissingRule
from memplan.ops.dims import dims, divided
from memplan.placements import Partial, Placement, Replicate, Shard, changed
from memplan.shapes import Parameter, Shape
from memplan.tape import NCCL, Grads, Saved, Tensor


def redistribute(x: Tensor, axis: str, target: Placement, *, waits: bool = True) -> Tensor:
    """x with another placement over one axis; x itself where the mesh has no such axis.

    Its gradient gets x's own placement again. The input of a region stays a DTensor; its output, from a
    partial x, becomes a plain tensor, and the gradient of x is replicated: when it is gathered, this rank's
    chunk is held until that is done, except under `fake`. `waits`: what is sent is waited for at once, as by
    `PrepareModuleInput` for a region of several modules; `ColwiseParallel`, for a single product, waits when
    the product reads it.

    Source: torch.distributed.tensor._redistribute:Redistribute.backward,
    torch.distributed.tensor.parallel.style:PrepareModuleInput, Korthikanti et al. 2022 (g, f);
    torch/csrc/distributed/c10d/FakeProcessGroup.hpp (`FakeWork`),
    torch/csrc/distributed/c10d/ProcessGroupGloo.cpp (`AsyncAllgatherWork`),
    torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp (`stashed_for_allocator_safety_`).
    """
    if axis not in x.tape.mesh:
        return x
    own = x.placements.get(axis, Replicate())
    leaves = isinstance(own, Partial)
    of_grad = Replicate() if leaves else own

    def backward(grad: Tensor, saved: Saved) -> Grads:
        given = moved(grad, axis, of_grad, "activation gradients")
        if leaves and given is not grad and given.shape[0] == 1 and given.tape.context.backend != "fake":
            given.in_flight = (grad,)
        return (given,)

    x.in_flight = ()
    node = x.tape.node((x.node,), (), backward)
    node.has_dtensor_grad = not leaves
    node.grad_placements = (changed(x.placements, axis, of_grad),)
    y = moved(x, axis, target, "activations", waits=waits)
    if y is x:
        return x.alias(node)
    y.node = node
    return y


def moved(x: Tensor, axis: str, target: Placement, what: str, *, waits: bool = True) -> Tensor:
    """x, or its gradient, with the placement `target` over one axis; x itself where that is its own.

    Raises:
        MissingRule: for a change that no rule of an operation needs.

    Source: torch.distributed.tensor._redistribute:redistribute_local_tensor.
    """
    own = x.placements.get(axis, Replicate())
    match own, target:
        case Partial(), Replicate():
            y = _all_reduced(x, axis, what)
        case Partial(), Shard(1):
            y = _reduce_scattered(x, axis, what, waits=waits)
        case Shard(1), Replicate():
            y = _gathered(x, axis, what, waits=waits)
        case _ if own == target:
            return x
        case _:
            raise MissingRule(
                f"a redistribution of {x.name} over {axis} from {own} to {target} has no rule; "
                "use Partial() to Shard(dim=1) or Replicate(), or Shard(dim=1) to Replicate()."
            )
    y.placements = changed(x.placements, axis, target)
    return y


def divided_sequence(x: Tensor) -> Tensor:
    """The input of a norm under sequence parallelism: a DTensor of the same bytes.

    Source: torch.distributed.tensor.parallel.style:SequenceParallel.
    """
    for axis, own in x.placements.items():
        x = redistribute(x, axis, own)
    return x


def replicated_parameter(x: Tensor, name: str, shape: Shape) -> Parameter:
    """A weight that every rank applies to its chunk of x, such as its tokens.

    It then is a DTensor, and its gradient is partial.

    Source: torch.distributed.tensor.parallel.style:SequenceParallel.
    """
    placements, of_grad = (dict.fromkeys(x.placements, each) for each in (Replicate(), Partial()))
    return x.tape.parameter(name, shape, placements=placements, grad_placements=of_grad)


def _all_reduced(x: Tensor, axis: str, what: str) -> Tensor:
    """The sum of the ranks' `x`.

    Source: torch.distributed._functional_collectives:all_reduce.
    """
    tape, shape, dtype = x.tape, x.shape, x.dtype

    def compute() -> tuple[Tensor]:
        tape.collective("all_reduce", axis, what, x.n_bytes)
        return (tape.new("all-reduced", shape, dtype),)

    (total,) = tape.save_if_selective(compute)
    return total


def _gathered(x: Tensor, axis: str, what: str, *, waits: bool) -> Tensor:
    """The whole sequence: the ranks' chunks arrive one after the other, and a copy interleaves them.

    A single sequence needs no copy, and is waited for only when it is read; gloo's scratch may live until
    then.

    Source: torch.distributed._functional_collectives:all_gather_tensor.
    """
    tape = x.tape
    batch, seq, d = dims(x, "an all-gather of the sequence", "batch", "seq", "d", allowed=(x.placements,))
    shape = (batch, seq * tape.mesh[axis], d)
    arrived = tape.new("gathered", shape, x.dtype)
    tape.collective("all_gather", axis, what, arrived.n_bytes)
    if tape.context.gathers_in_copies:
        tape.new("gloo scratch", x.shape, x.dtype)
        with tape.workspace() as scratch:
            scratch.new("gloo scratch", shape, x.dtype)
            if batch == 1 and not waits:
                arrived.in_flight = scratch.handed_over()
    return arrived if batch == 1 else tape.new("gathered sequence", shape, x.dtype)


def _reduce_scattered(x: Tensor, axis: str, what: str, *, waits: bool) -> Tensor:
    """This rank's chunk of the summed sequence; the operand is first copied into the order of the ranks.

    If it is waited for only when it is read, NCCL's handle holds the operand until then.

    Source: torch.distributed._functional_collectives:reduce_scatter_tensor,
    torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp (`stashed_for_allocator_safety_`).
    """
    tape = x.tape
    batch, seq, d = dims(x, "a reduce-scatter of the sequence", "batch", "seq", "d", allowed=(x.placements,))
    part_shape = (batch, divided(seq, tape.mesh[axis], "seq_len", by=axis), d)
    ordered = tape.new("ordered by rank", x.shape, x.dtype)

    def compute() -> tuple[Tensor]:
        tape.collective("reduce_scatter", axis, what, ordered.n_bytes)
        part = tape.new("reduce-scattered", part_shape, ordered.dtype)
        if tape.context.backend == "gloo":
            tape.new("gloo scratch", ordered.shape, ordered.dtype)
        return (part,)

    (part,) = tape.save_if_selective(compute)
    if not waits and tape.context.backend in NCCL:
        part.in_flight = (ordered,)
    return part
