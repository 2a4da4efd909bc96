"""One rule per operation: its output, weights, FLOPs, what it saves, its temporaries and its collectives.

A rule plays the allocations that the operation's implementation in ATen makes, forward and backward, on the
tape's device. Rules for "cpu" are confirmed by measured runs; rules for "cuda" carry the names of their
kernels, and are confirmed by PyTorch's CUDA build without a GPU (`validate.nogpu`). Scalars such as a mean's
divisor are left out: at most 16 bytes at any instant.

How to write a rule, by the example of SiLU, which saves its input and allocates one gradient:

    def silu(x: Tensor) -> Tensor:
        shape, dtype = x.shape, x.dtype

        def backward(grad: Tensor, saved: Saved) -> Grads:
            return (grad.tape.new("grad", shape, dtype),)

        x.check_placements("silu")
        node = x.tape.node((x.node,), (x,), backward)
        return x.new("silu", shape, dtype, node)

- **A tensor lives as long as something refers to it**, as in PyTorch: a name, a node that has saved it, a
  closure. A name in a rule lives until the function returns, like a local variable in C++; so give a part of
  the rule whose locals end earlier a function of its own, as the implementation does.
- **Temporaries** that nothing refers to by name belong to a block, and are freed where it ends:
  `with tape.workspace() as temporary: temporary.new("scores", shape, FP32)`. What a kernel allocates itself,
  and only where tensors have data, belongs to a `tape.kernel_workspace()`.
- **`backward` refers to shapes and types only**, never to a tensor of the forward pass: it would live as
  long as the node. It receives what was saved, and returns one gradient for each input; `tape.grad_of(i)`
  allocates it only if it is asked for (a pipeline may split the backward pass). The gradient of an input
  that was broadcast is returned as `Expanded`, in the larger shape: the tape sums it.
- **Save an output without its node**, as `y.detach()`: a node that refers to itself would never be freed.
- **Order counts**: create the node before or after the output as the implementation allocates what it saves,
  since backward frees in the reverse of the nodes' creation.
- **Check shapes** with `dims`, `divided` and `check_equal`, so that what has no rule is refused.
- **Placements follow from the inputs'**, in DTensor's words. Over an axis of the mesh that a tensor does not
  name it is `Replicate()`. `x.new` makes an output with x's placements; a rule that changes them says so
  (`linear` by columns: `Shard(2)` over "tp"). `dims` and `check_placements` are told which ones the rule is
  for; only a sum takes `Partial()`. Gradients have the placements of the output's gradient, or what
  `Node.grad_placements` says (`linear` by columns: x's is `Partial()`). Only `redistribute(x, "tp",
  Replicate())` makes collectives: from x's own placement to another, and in backward the way back. A further
  axis is a name in `OpContext.mesh`, and rules in the operations that know it.
- **Name the source**: `module:qualified.name` for Python, file and function for C++.
"""

from memplan.ops.attention import attention, attention_kernel
from memplan.ops.chunked_loss import chunked_linear_cross_entropy
from memplan.ops.elementwise import dropout, gelu, gelu_new, relu, silu, soft_capped, times_number
from memplan.ops.embedding import add_positions, embedding, learned_positions, position_ids
from memplan.ops.heads import (
    feature_parts,
    feature_slices,
    halves_rotation,
    heads,
    merged_heads,
    repeated_heads,
    rope,
    rope_by_halves,
    rope_of_parts,
    rotation,
)
from memplan.ops.linear import conv1d, linear
from memplan.ops.loss import (
    cross_entropy,
    fused_linear_cross_entropy,
    gradient_of_loss,
    logits_in_float32,
    loss_as_returned,
    loss_of_one_step,
    scaled_loss,
    share_of_loss,
    shifted_cross_entropy,
)
from memplan.ops.math_attention import capped_attention
from memplan.ops.norm import (
    layer_norm,
    layer_norm_by_parts,
    rms_norm,
    rms_norm_around_one,
    rms_norm_by_parts,
    rms_norm_in_fp32,
    rms_norm_with_locals,
)
from memplan.ops.redistribute import redistribute

__all__ = [
    "add_positions",
    "attention",
    "attention_kernel",
    "capped_attention",
    "chunked_linear_cross_entropy",
    "conv1d",
    "cross_entropy",
    "dropout",
    "embedding",
    "feature_parts",
    "feature_slices",
    "fused_linear_cross_entropy",
    "gelu",
    "gelu_new",
    "gradient_of_loss",
    "halves_rotation",
    "heads",
    "layer_norm",
    "layer_norm_by_parts",
    "learned_positions",
    "linear",
    "logits_in_float32",
    "loss_as_returned",
    "loss_of_one_step",
    "merged_heads",
    "position_ids",
    "redistribute",
    "relu",
    "repeated_heads",
    "rms_norm",
    "rms_norm_around_one",
    "rms_norm_by_parts",
    "rms_norm_in_fp32",
    "rms_norm_with_locals",
    "rope",
    "rope_by_halves",
    "rope_of_parts",
    "rotation",
    "scaled_loss",
    "share_of_loss",
    "shifted_cross_entropy",
    "silu",
    "soft_capped",
    "times_number",
]
