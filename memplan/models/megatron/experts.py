"""Megatron's mixture of experts over shapes: router, token dispatcher and experts, as one rank runs them.

Routing is even: each expert gets as many of the tokens as another. `h` are the normed hidden states (batch,
seq, hidden) of this rank; behind the router tokens are rows (tokens, hidden).

Neglects: what the router allocates for a moment, which is smaller than what its layer's attention does.

Source: megatron.core.transformer.moe.moe_layer:MoELayer.forward.
"""

from collections.abc import Iterator, Mapping
from math import prod
from typing import NamedTuple

from memplan.mesh import TIMES, with_several
from memplan.models.megatron import fp8
from memplan.models.megatron.config import TransformerConfig, padded_rows
from memplan.models.megatron.fusions import bias_gelu, bias_swiglu
from memplan.models.megatron.layers import concatenated, gemm, grouped_wgrads, operands_of, split
from memplan.models.megatron.linears import column_parallel_linear, row_parallel_linear
from memplan.record import CollectiveKind, ComputeKind
from memplan.shapes import BOOL, FP32, INT32, INT64, Buffer, DType, Shape, buffer_of, n_elements
from memplan.tape import Expanded, Grads, Node, Saved, Tape, Tensor


class MoE(NamedTuple):
    """A mixture of experts, by Megatron's arguments `num-experts` and `moe-...`.

    `layer_freq` has a 1 for each layer with experts; empty: all have. `router_load_balancing_type` is "none",
    "aux_loss", "seq_aux_loss", "global_aux_loss" or "sinkhorn"; `router_score_function` is "softmax" or
    "sigmoid".
    """

    num_experts: int
    ffn_hidden_size: int
    router_topk: int = 2
    layer_freq: tuple[int, ...] = ()
    shared_expert_intermediate_size: int = 0
    router_load_balancing_type: str = "aux_loss"
    aux_loss_coeff: float = 0.0
    router_score_function: str = "softmax"
    router_pre_softmax: bool = False
    router_enable_expert_bias: bool = False
    router_in_fp32: bool = False

    @property
    def has_aux_loss(self) -> bool:
        """Whether a loss balances the experts' load."""
        return "aux_loss" in self.router_load_balancing_type and self.aux_loss_coeff > 0


class Routed(NamedTuple):
    """How many tokens a rank's parts of a mixture of experts see, and of how many experts."""

    n_tokens: int
    """Of this rank."""
    n_gathered: int
    """Of all ranks among which tokens are exchanged."""
    n_copies: int
    """Copies of its tokens, one for each chosen expert, and padding by the router."""
    n_own: int
    """Copies of tokens that go to this rank's experts."""
    n_experts: int
    n_own_experts: int

    @classmethod
    def of(cls, n_tokens: int, moe: MoE, config: TransformerConfig) -> "Routed":
        """The counts of even routing."""
        own, copies = moe.num_experts // config.ep, n_tokens * moe.router_topk
        if config.moe_router_padding_for_quantization and config.fp8:
            copies = padded_rows(-(-copies // moe.num_experts), config.fp8.recipe) * moe.num_experts
        gathered = n_tokens * config.ep * config.etp
        return cls(n_tokens, gathered, copies, copies * config.etp, moe.num_experts, own)

    @property
    def of_experts(self) -> list[int]:
        """The copies that each of this rank's experts gets."""
        each, more = divmod(self.n_own, self.n_own_experts)
        return [each + (i < more) for i in range(self.n_own_experts)]

    def of_experts_padded(self, config: TransformerConfig) -> list[int]:
        """The rows of the product of each of this rank's experts: in 8 bits they are padded."""
        own = self.of_experts
        return own if config.fp8 is None else [padded_rows(n, config.fp8.recipe) for n in own]


def kept_by_dispatcher(moe: MoE, n_tokens: int, dtype: DType, config: TransformerConfig) -> Iterator[Buffer]:
    """What a layer's token dispatcher still refers to when a step is over.

    Source: megatron.core.transformer.moe.token_dispatcher: attributes of MoEAllGatherTokenDispatcher and
    MoEAlltoAllTokenDispatcher.
    """
    n = Routed.of(n_tokens, moe, config)
    if moe.router_in_fp32:
        dtype = FP32
    if config.moe_token_dispatcher_type == "allgather":
        yield buffer_of("local_map", (n.n_gathered, n.n_own_experts), BOOL)
        yield buffer_of("local_probs", (n.n_own,), dtype)
        yield _row_map(n.n_gathered, n.n_own_experts, n.n_own, config)
    else:
        yield buffer_of("probs", (n.n_tokens, n.n_experts), dtype)
        yield buffer_of("routing_map", (n.n_tokens, n.n_experts), BOOL)
        yield _row_map(n.n_tokens, n.n_experts, n.n_copies, config)


def _row_map(n_tokens: int, n_experts: int, n_copies: int, config: TransformerConfig) -> Buffer:
    """The rows from which, or to which, tokens are copied.

    Source: transformer_engine.pytorch.triton.permutation:make_row_id_map; without it the indices.
    """
    if config.moe_permute_fusion:
        return buffer_of("row_id_map", (n_tokens, 2 * n_experts + 1), INT32)
    return buffer_of("sorted_indices", (n_copies,), INT64)


def moe_layer(h: Tensor, moe: MoE, config: TransformerConfig, *, swiglu: bool) -> Tensor:
    """The sum of the chosen experts' outputs for each token, and of the shared experts', if there are any."""
    shape = h.shape
    n = Routed.of(n_elements(shape[:-1]), moe, config)
    shared = None
    if moe.shared_expert_intermediate_size:
        width = moe.shared_expert_intermediate_size // config.tp

        def of_shared(h: Tensor) -> Tensor:
            return shared_experts(h, width, config, swiglu=swiglu)

        again = "shared_experts" in config.recompute_modules
        shared = h.tape.recomputed(of_shared, h) if again else of_shared(h)
    tokens = Tensor(h.tape, (n.n_tokens, shape[-1]), h.dtype, h.storage, h.node, True)
    mixed = by_all_gather if config.moe_token_dispatcher_type == "allgather" else by_all_to_all
    y = mixed(tokens, router(h, moe, n), moe, n, config, swiglu=swiglu).view(*shape)
    return y if shared is None else y + shared


def by_all_gather(
    tokens: Tensor, probs: Tensor, moe: MoE, n: Routed, config: TransformerConfig, *, swiglu: bool
) -> Tensor:
    """The mixture where each rank's experts see the tokens of all ranks, and their outputs are summed.

    Source: megatron.core.transformer.moe.token_dispatcher:MoEAllGatherTokenDispatcher.
    """
    wide = probs.dtype
    tokens, probs = gathered(tokens, probs, n, config)
    rows, own_probs = permuted_own(tokens, probs, n, config)
    late = scales_outputs(config)
    y = experts(rows, None if late else own_probs, moe, n, config, swiglu=swiglu)
    y = unpermuted(times_probs(y, own_probs) if late else y, n.n_gathered, config)
    del rows
    return summed_over(y, wide, expert_ranks(config)) if n.n_gathered > n.n_tokens else y


def by_all_to_all(
    tokens: Tensor, probs: Tensor, moe: MoE, n: Routed, config: TransformerConfig, *, swiglu: bool
) -> Tensor:
    """The mixture where each copy of a token is sent to its expert's rank, and comes back.

    Source: megatron.core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher.
    """
    wide, over_etp, own = probs.dtype, {"etp": config.etp}, None
    copies, scales = permuted(tokens, probs, n, config)
    del probs
    received = all_to_all(copies, config)
    if not scales_outputs(config):
        own = all_to_all(scales, config)
        del scales
    rows = received
    if config.etp > 1:
        rows, own = of_all(rows, over_etp), own and of_all(own, over_etp)
    if n.n_own_experts > 1:
        rows, own = sorted_chunks(rows), own and sorted_chunks(own)
    y = experts(rows, own, moe, n, config, swiglu=swiglu)
    if n.n_own_experts > 1:
        y = sorted_chunks(y)
    if config.etp > 1:
        y = summed_over(y, wide, over_etp)
    del rows  # `routed_experts_compute` is over
    y = all_to_all(y, config)
    return unpermuted(times_probs(y, scales) if scales_outputs(config) else y, n.n_tokens, config)


def scales_outputs(config: TransformerConfig) -> bool:
    """Whether the experts' outputs are scaled by the probs, not their activations.

    So it is before 2659630721, up to release 0.12.0.
    """
    return config.release < (0, 13)


def router(h: Tensor, moe: MoE, n: Routed) -> Tensor:
    """Each token's weight for each expert, 0 where it is not chosen: (tokens, experts); saves h.

    Source: megatron.core.transformer.moe.moe_utils:RouterGatingLinearFunction,
    megatron.core.transformer.moe.router:TopKRouter.routing.
    """
    tape, width, dtype = h.tape, h.shape[-1], h.dtype
    shape, own = h.shape, FP32 if moe.router_in_fp32 else h.dtype
    weight = tape.parameter("mlp.router.weight", (n.n_experts, width))

    def backward(grad: Tensor, saved: Saved) -> Grads:
        tape = grad.tape
        grad_h = tape.new("grad", shape, own)
        if own != dtype:
            with tape.workspace() as copies:
                copies.new("input as float32", shape, own)
                of_weight = tape.new("wgrad", (n.n_experts, width), own)
            grad_h = tape.new("grad", shape, dtype)
            return grad_h, tape.new("wgrad", of_weight.shape, dtype)
        return grad_h, tape.new("wgrad", (n.n_experts, width), own)

    logits = gemm(tape, "router logits", (n.n_tokens, n.n_experts), width, own)
    logits.node = tape.node((h.node, tape.weight(weight).node), (h,), backward)
    logits.node.computes(ComputeKind.MM, operands_of(logits.shape, width), 0, 1)
    return routing(logits, moe)


def routing(logits: Tensor, moe: MoE) -> Tensor:
    """The weights of the chosen experts, from logits (tokens, experts); saves scores and indices.

    Source: megatron.core.transformer.moe.moe_utils:topk_routing_with_score_function,
    megatron.core.transformer.moe.router:TopKRouter.sinkhorn_load_balancing.
    """
    tape, dtype, shape = logits.tape, logits.dtype, logits.shape
    chosen = shape[0], moe.router_topk

    def backward(grad: Tensor, saved: Saved) -> Grads:
        return (grad.tape.new("grad of router logits", shape, dtype),)

    saved: list[Tensor] = []
    if moe.router_load_balancing_type == "sinkhorn":
        saved = [tape.new("sigmoid", shape, dtype), tape.new("routing map", shape, BOOL)]
    else:
        if moe.router_score_function == "sigmoid":
            saved += [tape.new("scores", shape, FP32), tape.new("scores of the chosen", chosen, FP32)]
        elif moe.router_pre_softmax:
            saved.append(tape.new("softmax", shape, FP32))
        else:
            saved.append(tape.new("softmax of the chosen", chosen, FP32))
        saved.append(tape.new("chosen experts", chosen, INT64))
    if moe.has_aux_loss:
        n_scores = 2 if moe.router_score_function == "sigmoid" else 1
        saved += [tape.new("scores for the loss", shape, FP32) for _ in range(n_scores)]
    return tape.new("probs", shape, dtype, tape.node((logits.node,), tuple(saved), backward))


def expert_ranks(config: TransformerConfig) -> dict[str, int]:
    """The axes of several ranks that hold one layer's experts between them."""
    return with_several(ep=config.ep, etp=config.etp)


def gathered(tokens: Tensor, probs: Tensor, n: Routed, config: TransformerConfig) -> tuple[Tensor, Tensor]:
    """The tokens of all ranks between which experts are divided, and their probs.

    Megatron's global memory buffer, which is there anyway, takes the tokens, and the sums of their gradients.

    Source: megatron.core.transformer.moe.token_dispatcher:MoEAllGatherTokenDispatcher.token_dispatch.
    """
    if n.n_gathered == n.n_tokens:
        return tokens, probs
    tape, own, dtype, over = tokens.tape, tokens.shape, tokens.dtype, expert_ranks(config)
    whole = n.n_gathered, own[-1]

    def in_global_buffer(tape: Tape, shape: Shape, node: Node | None = None) -> Tensor:
        nothing = tape.new("in the global memory buffer", (0,), dtype)
        return Tensor(tape, shape, dtype, nothing.storage, node, True)

    def backward(grad: Tensor, saved: Saved) -> Grads:
        sent_over(grad.tape, "reduce_scatter", over, "gradient of tokens", whole, dtype)
        return (in_global_buffer(grad.tape, own),)

    node = tape.node((tokens.node,), (), backward)
    sent_over(tape, "all_gather", over, "tokens", whole, dtype)
    probs = of_all(probs, over)
    return in_global_buffer(tape, whole, node), probs


def sent_over(
    tape: Tape, kind: CollectiveKind, over: Mapping[str, int], what: str, shape: Shape, dtype: DType
) -> None:
    """Record a collective over the ranks of some axes, whose whole tensor has this shape."""
    tape.collective(kind, TIMES.join(over), what, n_elements(shape) * dtype.itemsize)


def permuted_own(
    tokens: Tensor, probs: Tensor, n: Routed, config: TransformerConfig
) -> tuple[Tensor, Tensor]:
    """The tokens of this rank's experts, expert by expert, and their probs.

    Source: megatron.core.transformer.moe.token_dispatcher:MoEAllGatherTokenDispatcher.dispatch_postprocess.
    """
    tape, own = tokens.tape, (n.n_gathered, n.n_own_experts)
    dtype, all_probs = probs.dtype, probs.shape
    turned = own[::-1]

    def sliced(grad: Tensor, saved: Saved) -> Grads:
        return (grad.tape.new("grad of probs", all_probs, dtype),)

    def selected(grad: Tensor, saved: Saved) -> Grads:
        return (grad.tape.new("grad of local_probs", turned, dtype),)

    with tape.workspace() as attributes:
        attributes.new("local_map", own, BOOL)
        if own != all_probs:
            probs = tape.new("local_probs", own, dtype, tape.node((probs.node,), (), sliced))
        rows = permuted_rows(tokens, n.n_own, n.n_own_experts, config)
        kept = (
            tape.new("local_probs, transposed", turned, dtype),
            tape.new("local_map, transposed", turned, BOOL),
        )
        node = tape.node((probs.node,), kept, selected)
        return rows, tape.new("local_probs", (n.n_own,), dtype, node)


def permuted(tokens: Tensor, probs: Tensor, n: Routed, config: TransformerConfig) -> tuple[Tensor, Tensor]:
    """This rank's tokens, copied for each chosen expert, and their probs.

    Source: megatron.core.transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher.dispatch_preprocess.
    """
    tape, shape, dtype = tokens.tape, probs.shape, probs.dtype

    def backward(grad: Tensor, saved: Saved) -> Grads:
        return (grad.tape.new("grad of probs", shape, dtype),)

    rows = permuted_rows(tokens, n.n_copies, n.n_experts, config)
    indices: Saved = ()
    if not config.moe_permute_fusion:
        indices = (tape.new("sorted routing map", (n.n_experts * n.n_tokens,), INT64),)
    node = tape.node((probs.node,), indices, backward)
    return rows, tape.new("permuted probs", (n.n_copies,), dtype, node)


def permuted_rows(tokens: Tensor, n_rows: int, n_experts: int, config: TransformerConfig) -> Tensor:
    """Copies of tokens in the order of the experts (`n_rows`, hidden); saves where each comes from.

    Source: megatron.core.transformer.moe.moe_utils:permute.
    """
    tape, shape, dtype = tokens.tape, tokens.shape, tokens.dtype

    def backward(grad: Tensor, saved: Saved) -> Grads:
        return (grad.tape.new("grad of tokens", shape, dtype),)

    row_map = _row_map(shape[0], n_experts, n_rows, config)
    indices = tape.new(row_map.name, row_map.shape, row_map.dtype)
    return tape.new(
        "permuted tokens", (n_rows, shape[1]), dtype, tape.node((tokens.node,), (indices,), backward)
    )


def all_to_all(x: Tensor, config: TransformerConfig) -> Tensor:
    """Rows sent to the ranks of their experts, or back; as many arrive, and nothing is saved.

    Source: megatron.core.tensor_parallel.mappings:_AllToAll.
    """
    if config.ep == 1:
        return x
    tape, shape, dtype = x.tape, x.shape, x.dtype

    def backward(grad: Tensor, saved: Saved) -> Grads:
        tape = grad.tape
        tape.collective("all_to_all", "ep", "gradient of tokens", n_elements(shape) * dtype.itemsize)
        return (tape.new("received gradient", shape, dtype),)

    tape.collective("all_to_all", "ep", "tokens", n_elements(shape) * dtype.itemsize)
    return tape.new("received", shape, dtype, tape.node((x.node,), (), backward))


def of_all(x: Tensor, over: Mapping[str, int]) -> Tensor:
    """The rows of all ranks along these axes.

    Source: megatron.core.tensor_parallel.mappings:_GatherFromSequenceParallelRegion.
    """
    tape, shape, dtype = x.tape, x.shape, x.dtype
    whole = shape[0] * prod(over.values()), *shape[1:]

    def backward(grad: Tensor, saved: Saved) -> Grads:
        sent_over(grad.tape, "reduce_scatter", over, "gradient of tokens", whole, dtype)
        return (grad.tape.new("scattered gradient", shape, dtype),)

    sent_over(tape, "all_gather", over, "tokens", whole, dtype)
    return tape.new("gathered", whole, dtype, tape.node((x.node,), (), backward))


def summed_over(y: Tensor, wide: DType, over: Mapping[str, int]) -> Tensor:
    """This rank's rows of the sum over all ranks along these axes, summed in the type of the probs.

    Source: megatron.core.tensor_parallel.mappings:_ReduceScatterToSequenceParallelRegion.
    """
    tape, shape, dtype = y.tape, y.shape, y.dtype
    part = shape[0] // prod(over.values()), *shape[1:]

    def backward(grad: Tensor, saved: Saved) -> Grads:
        sent_over(grad.tape, "all_gather", over, "gradient of the output", shape, wide)
        return (grad.tape.new("gathered gradient", shape, wide),)

    y = tape.cast(y, wide)
    sent_over(tape, "reduce_scatter", over, "output", shape, wide)
    return tape.cast(tape.new("scattered output", part, wide, tape.node((y.node,), (), backward)), dtype)


def sorted_chunks(x: Tensor) -> Tensor:
    """The same rows in another order: by expert rather than by rank, or back; saves nothing.

    Source: megatron.core.transformer.moe.moe_utils:sort_chunks_by_idxs.
    """
    tape, shape, dtype = x.tape, x.shape, x.dtype

    def backward(grad: Tensor, saved: Saved) -> Grads:
        return (grad.tape.new("sorted gradient", shape, dtype),)

    return tape.new("sorted", shape, dtype, tape.node((x.node,), (), backward))


def unpermuted(y: Tensor, n_tokens: int, config: TransformerConfig) -> Tensor:
    """Each token's sum over its copies (`n_tokens`, hidden); saves where each goes.

    Deterministic algorithms take another operation since release 0.15, which saves the copies too.

    Source: megatron.core.transformer.moe.moe_utils:unpermute.
    """
    tape, shape, dtype = y.tape, y.shape, y.dtype

    def backward(grad: Tensor, saved: Saved) -> Grads:
        return (grad.tape.new("grad of copies", shape, dtype),)

    saved: Saved = ()
    out = tape.new("zeros", (n_tokens, shape[1]), dtype)
    if config.deterministic_mode and config.release >= (0, 15) and not config.moe_permute_fusion:
        out = tape.new("zeros again", out.shape, dtype)
        saved = (y,)
    out.node = tape.node((y.node,), saved, backward)
    return out


def experts(
    x: Tensor, probs: Tensor | None, moe: MoE, n: Routed, config: TransformerConfig, *, swiglu: bool
) -> Tensor:
    """The outputs of this rank's experts for the rows of each, times their probs, if there are any.

    Source: megatron.core.transformer.moe.experts:SequentialMLP,
    megatron.core.transformer.moe.experts:TEGroupedMLP.
    """
    alone = config._replace(tp=1, sequence_parallel=False)
    width, hidden = moe.ffn_hidden_size // config.etp, x.shape[-1]
    n_out = 2 * width if swiglu else width
    if config.moe_grouped_gemm or probs is None:  # sequential ones always have probs
        n_rows = n.of_experts_padded(config)
        pads = sum(n_rows) > n.n_own
        if pads and probs is not None:
            x, probs = with_padding(x, sum(n_rows)), with_padding(probs, sum(n_rows))
        y = grouped_linear(x, "mlp.experts.linear_fc1", n_out, n_rows, alone)
        y = grouped_output(y, probs, hidden, n_rows, alone, swiglu=swiglu)
        return with_padding(y, n.n_own) if pads else y

    def expert(i: int, rows: Tensor, own: Tensor) -> Tensor:
        name = f"mlp.experts.local_experts.{i}.linear_fc"
        y = column_parallel_linear(rows, f"{name}1", n_out, alone)
        return row_parallel_linear(activated(y, own, swiglu=swiglu), f"{name}2", hidden, alone)

    if n.n_own_experts == 1:
        return expert(0, x, probs)
    rows, own = (split(one, [(n_rows, *one.shape[1:]) for n_rows in n.of_experts]) for one in (x, probs))
    del x, probs
    outputs = [expert(i, *both) for i, both in enumerate(zip(rows, own, strict=True))]
    return concatenated(outputs, (n.n_own, hidden), "outputs of all experts")


def grouped_output(
    x: Tensor, probs: Tensor | None, n_out: int, n_rows: list[int], config: TransformerConfig, *, swiglu: bool
) -> Tensor:
    """The experts' second product, of activations times each row's prob; it saves the scaled activations.

    Source: megatron.core.transformer.moe.experts:TEGroupedMLP.forward.
    """
    name, legacy = "mlp.experts.linear_fc2", config.moe_use_legacy_grouped_gemm
    if "moe_act" not in config.recompute_modules:
        return grouped_linear(
            activated(x, probs, swiglu=swiglu, compiled=legacy), name, n_out, n_rows, config
        )
    (h,), region = x.tape.computed_again(lambda x: (activated(x, probs, swiglu=swiglu, compiled=legacy),), x)
    y = grouped_linear(h, name, n_out, n_rows, config, save_original_input=True)
    x.tape.discard((h,), region, y)
    return y


def with_padding(x: Tensor, n_rows: int) -> Tensor:
    """Pad the rows of experts for products in 8 bits, or take the padding away: `n_rows` in all.

    Source: transformer_engine.pytorch.module.fp8_padding:Fp8Padding,
    transformer_engine.pytorch.module.fp8_unpadding:Fp8Unpadding.
    """
    shape, dtype = x.shape, x.dtype
    node = x.tape.node((x.node,), (), lambda grad, saved: (grad.tape.new("grad of rows", shape, dtype),))
    return x.tape.new("padded rows", (n_rows, *shape[1:]), dtype, node)


def activated(x: Tensor, probs: Tensor | None, *, swiglu: bool, compiled: bool = False) -> Tensor:
    """The activation of each row times its prob: SwiGLU as one kernel, GELU and the product as two.

    `compiled`: GELU as one kernel too, that of GroupedMLP's `activation_func_with_probs`.

    Source: megatron.core.fusions.fused_bias_swiglu:WeightedSwiGLUFunction, megatron.core.transformer.mlp:MLP.
    """
    if probs is None:
        return (bias_swiglu if swiglu else bias_gelu)(x, None)
    tape, dtype, wide = x.tape, x.dtype, probs.dtype
    n, width = x.shape

    def of_kernel(grad: Tensor, saved: Saved) -> Grads:
        return grad.tape.new("grad", (n, width), dtype), grad.tape.new("grad of probs", (n,), wide)

    if swiglu or compiled:
        node = tape.node((x.node, probs.node), (x, probs), of_kernel)
        return tape.new("weighted activations", (n, width // 2 if swiglu else width), dtype, node)
    return tape.cast(times_probs(bias_gelu(x, None), probs), dtype)


def times_probs(x: Tensor, probs: Tensor) -> Tensor:
    """Each row times its prob, in the probs' type; saves both."""
    tape, dtype, wide = x.tape, x.dtype, probs.dtype
    n, width = x.shape

    def backward(grad: Tensor, saved: Saved) -> Grads:
        of_x = grad.tape.new("grad", (n, width), wide)
        of_probs = grad.tape.new("grad of each row's features", (n, width), wide)
        return Expanded(of_x, (n, width), dtype), Expanded(of_probs, (n,), wide)

    node = tape.node((x.node, probs.node), (x, probs), backward)
    return tape.new("rows times probs", (n, width), wide, node)


def grouped_linear(
    x: Tensor, name: str, n_out: int, n_rows: list[int], config: TransformerConfig, *,
    save_original_input: bool = False,
) -> Tensor:  # fmt: skip
    """The products of each expert's rows and weight; saves x, in 8 bits if not `save_original_input`.

    Backward returns a gradient of each weight, though the product may have added it to main_grad. GroupedMLP
    has one weight for all experts.

    Source: transformer_engine.pytorch.module.grouped_linear:_GroupedLinear,
    megatron.core.transformer.moe.experts:GroupedMLP (of release 0.15), grouped_gemm.ops:GroupedGemm.
    """
    if config.fp8 is not None:
        return fp8.grouped_linear(
            x, name, n_out, n_rows, config, config.fp8, save_original_input=save_original_input
        )
    tape, shape, dtype = x.tape, x.shape, x.dtype
    of_weight, names = (n_out, shape[-1]), [f"{name}.weight{i}" for i in range(len(n_rows))]
    if config.moe_use_legacy_grouped_gemm:
        of_weight, names = (len(n_rows) * n_out, shape[-1]), [name.replace("linear_fc", "weight")]
    weights = [tape.parameter(one, of_weight) for one in names]

    def backward(grad: Tensor, saved: Saved) -> Grads:
        tape = grad.tape
        grad_x = tape.new("dgrad", shape, dtype)
        return grad_x, *grouped_wgrads(tape, of_weight, len(weights), dtype, config)

    y = gemm(tape, name, (shape[0], n_out), shape[-1], dtype)
    y.node = tape.node((x.node, *[tape.weight(one).node for one in weights]), (x,), backward)
    y.node.computes(ComputeKind.MM, operands_of(y.shape, shape[-1]), 0, 1)
    return y


def shared_experts(h: Tensor, width: int, config: TransformerConfig, *, swiglu: bool) -> Tensor:
    """An MLP that all tokens go through; the router saves its input anyway.

    Source: megatron.core.transformer.moe.shared_experts:SharedExpertMLP.__init__ and forward.
    """
    name, again = "mlp.shared_experts.linear_fc", "shared_experts" in config.recompute_modules
    n_out = 2 * width if swiglu else width
    y = column_parallel_linear(h, f"{name}1", n_out, config, save_original_input=not again)
    y = (bias_swiglu if swiglu else bias_gelu)(y, None)
    return row_parallel_linear(y, f"{name}2", h.shape[-1], config)
