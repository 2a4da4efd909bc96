"""A model chunk of one rank: the passes of a micro-batch, as Megatron's schedules call them."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import groupby

from memplan.device import Device
from memplan.engines.megatron.dispatcher import let_go, summed_apart
from memplan.engines.megatron.options import OLD_CONTAINER, megatron_options
from memplan.engines.megatron.overlap import Piece
from memplan.models import Model
from memplan.models.base import BLOCKS
from memplan.models.megatron import (
    IN_BF16,
    WITH_EXPERTS,
    GPTModel,
    TransformerConfig,
    configured,
    gpt_model,
    kept_by_dispatcher,
)
from memplan.passes.backward import added_to_older, backward_order
from memplan.passes.trace import Block, BlockKind, Segment, Trace, traced, without, without_blocks
from memplan.plan import Plan
from memplan.record import (
    COMPUTE,
    SENDS,
    Alloc,
    Collective,
    CollectiveKind,
    Event,
    Stretch,
    allocs,
    chain,
    events,
    frees,
    repeated,
)
from memplan.shapes import BF16, BOOL, FP16, FP32, INT64, Buffer, DType, Parameter, buffer_of
from memplan.tape import Backend, OpContext

PARAMS_DTYPES = {"bf16-mixed": BF16, "fp16-mixed": FP16, "fp32": FP32}
"""The type of the weights (`params_dtype`) under each precision: --bf16, --fp16, or neither."""


def transformer_config(
    model: Model, plan: Plan, device: Device, cp_rank: int | None = None
) -> TransformerConfig:
    """What Megatron's layers are configured with on one context-parallel rank, usually the last."""
    options, dropout = megatron_options(plan), gpt_model(model).attention_dropout
    return TransformerConfig(
        tp=plan.tp,
        sequence_parallel=plan.sequence_parallel,
        async_tensor_model_parallel_allreduce=not options.megatron_deepspeed,
        tp_comm_overlap=options.tp_comm_overlap,
        cp=plan.cp,
        cp_rank=plan.cp - 1 if cp_rank is None else cp_rank,
        cp_all_to_all=options.all_to_all_ranks,
        ep=plan.ep,
        etp=plan.etp,
        moe_token_dispatcher_type=options.moe_token_dispatcher_type,
        moe_grouped_gemm=options.moe_grouped_gemm,
        moe_use_legacy_grouped_gemm=options.ngc_container == OLD_CONTAINER,
        shares_grouped_wgrads=options.shares_grouped_wgrads,
        moe_permute_fusion=options.moe_permute_fusion,
        moe_router_padding_for_quantization=options.moe_router_padding_for_quantization,
        transformer_impl=options.transformer_impl,
        attention_backend=options.attention(device, dropout) if options.uses_te else "local",
        attn_mask_type=options.attn_mask_type if gpt_model(model).sees_all else "causal",
        softmax_in_fp32=options.attention_softmax_in_fp32 and options.softmax_by_pytorch,
        gradient_accumulation_fusion=options.gradient_accumulation_fusion,
        cross_entropy=options.cross_entropy_fusion_impl if options.cross_entropy_loss_fusion else "",
        create_attention_mask_in_dataloader=options.create_attention_mask_in_dataloader,
        deterministic_mode=options.deterministic_mode,
        recompute_modules=options.modules_again if plan.recompute == "selective" else frozenset(),
        recomputes_mtp=plan.recompute == "full" and plan.recompute_blocks is None,
        release=options.release,
        vocab_multiple=options.make_vocab_size_divisible_by,
        fp8=options.fp8(device),
        first_last_layers_bf16=options.first_last_layers_bf16,
    )


class ModelChunk:
    """The model's part at one place of the pipeline, with its passes; equal chunks share one object.

    Attributes:
        input: the tensor received from the stage before; `input_grad`: its gradient, which is sent back.
        output_grad: the gradient of the chunk's output, received from the stage after.
        recv_forward, send_forward, recv_backward, send_backward: what a schedule sends and receives.
        isend_forward, isend_backward: the same sends, for which the rank does not wait.
        release: frees the output, once it is sent (`deallocate_output_tensor`).
    """

    def __init__(
        self, model: Model, plan: Plan, device: Device, *, first: bool, last: bool, layers: range,
        tp_rank: int = 0, cp_rank: int | None = None, backend: Backend = "nccl",
    ) -> None:  # fmt: skip
        self.plan, self.first, self.last, self.n_layers = plan, first, last, len(layers)
        self.tp_rank = tp_rank
        self.model: GPTModel = configured(model, transformer_config(model, plan, device, cp_rank))
        self.layers = self.model.layers_in(layers)
        self.params_dtype: DType = PARAMS_DTYPES[plan.precision]
        self.local_seq_len = plan.local_seq_len // (plan.tp if plan.sequence_parallel else 1)
        self.context = OpContext(
            device=device,
            backend=backend,
            weight_dtype=self.params_dtype,
            micro_batch=plan.micro_batch,
            seq_len=self.local_seq_len,
            torch_release=megatron_options(plan).torch_release,
            recomputes_outputs=True,
        )
        boundary = self.trace.boundary
        self.input = buffer_of("received input", boundary.shape, boundary.dtype, "activations")
        self.output_grad = buffer_of("received gradient", boundary.shape, boundary.dtype)
        self.input_grad = self.trace.boundary_grad
        self.recv_forward = self._p2p("recv", "activations", sends=not first)
        self.send_forward = self._p2p("send", "activations", sends=not last)
        self.recv_backward = self._p2p("recv", "activation gradients", sends=not last)
        self.send_backward = self._p2p("send", "activation gradients", sends=not first)
        self.isend_forward = self._p2p("send", "activations", sends=not last, stream=SENDS)
        self.isend_backward = self._p2p("send", "activation gradients", sends=not first, stream=SENDS)
        self.release = self.trace.release.stretch("deallocate_output_tensor")
        self.report = buffer_of("lm loss and tokens of a micro-batch", (2,), FP32)

    @cached_property
    def runs(self) -> tuple[tuple[BlockKind, int], ...]:
        """The runs of equal layers; a chunk without layers has one run of length 0."""
        plan, found = self.plan, list[tuple[BlockKind, int]]()
        left = self.n_layers if plan.recompute == "full" else 0
        if plan.recompute_blocks is not None:
            left = min(left, plan.recompute_blocks)
        for kind, n in self.layers:
            again = min(left, n)
            left -= again
            found += [(BlockKind(kind, "full"), again), (BlockKind(kind, "none"), n - again)]
        return tuple([(kind, n) for kind, n in found if n]) or ((BlockKind(BLOCKS, "none"), 0),)

    @cached_property
    def trace(self) -> Trace:
        """The passes of one micro-batch through the embedding, one layer of each kind and the head."""
        kinds = tuple([kind for kind, _ in self.runs])
        found = traced(
            self.model, self.context, first=self.first, last=self.last, kinds=kinds, keep_logits=False
        )
        return found if self.n_layers else without_blocks(found)

    @cached_property
    def blocks(self) -> tuple[tuple[Block, int], ...]:
        """The traced layer of each run, and the run's length."""
        return tuple([(self.trace.blocks[kind], n) for kind, n in self.runs])

    def parameters(self) -> list[Parameter]:
        """Every weight, in the module's order."""
        layers = [p for block, n in self.blocks for p in block.parameters * n]
        head = [p for p in self.trace.head_parameters if p not in self.trace.embed_parameters]
        return [*self.trace.embed_parameters, *layers, *head]

    @property
    def quantized(self) -> list[Parameter]:
        """The weights whose products are in 8 bits."""
        if self.model.config.fp8 is None:
            return []
        layers = zip(self.runs, self.blocks, strict=True)
        own = [
            p for (kind, n), (block, _) in layers if kind.kind not in IN_BF16 for p in block.parameters * n
        ]
        own += [p for p in self.trace.head_parameters if p.name.startswith("mtp.")]
        return [p for p in own if len(p.shape) == 2 and not p.name.endswith("router.weight")]

    @property
    def n_own_experts(self) -> int:
        """The experts of a layer that are this rank's."""
        return self.model.n_experts // self.plan.ep

    @property
    def n_predicted(self) -> int:
        """How many layers of multi-token prediction it has: all on the last stage."""
        return self.model.mtp_num_layers if self.last else 0

    @cached_property
    def batch(self) -> tuple[Buffer, ...]:
        """What a micro-batch brings to this rank: its own part of each sequence."""
        return self._batch_of(self.plan.local_seq_len)

    def _batch_of(self, seq_len: int) -> tuple[Buffer, ...]:
        """The tensors of a batch with `seq_len` tokens of each sequence.

        Before release 0.18 the first tensor rank keeps what other stages need.

        Source: megatron.core.utils:get_batch_on_this_tp_rank.
        """
        plan = self.plan
        if self.model.sees_all:
            return self._masked_batch
        if not (self.first or self.last):
            return ()
        keeps_all = self.tp_rank == 0 and megatron_options(plan).release < (0, 18)
        tokens = plan.micro_batch, seq_len
        found = []
        if self.first or keeps_all or self.n_predicted:
            found += [buffer_of(name, tokens, INT64) for name in ("tokens", "position_ids")]
        if self.last or keeps_all:
            found += [buffer_of("labels", tokens, INT64), buffer_of("loss_mask", tokens, FP32)]
        if self.model.config.create_attention_mask_in_dataloader:
            found.append(buffer_of("attention_mask", (tokens[0], 1, seq_len, plan.seq_len), BOOL))
        return tuple(found)

    @property
    def _masked_batch(self) -> tuple[Buffer, ...]:
        """The batch of a BERT, which each stage gets: five tensors and a number for each sequence in one.

        Source: pretrain_bert.py (`get_batch`),
        megatron.core.models.bert.bert_model:BertModel.bert_extended_attention_mask.
        """
        batch, seq = self.plan.micro_batch, self.plan.seq_len
        rows = 1 if self.model.config.attn_mask_type == "padding" else seq
        return (
            buffer_of("tokens", (batch * (5 * seq + 1),), INT64),
            buffer_of("loss_mask", (batch, seq), FP32),
            buffer_of("attention_mask", (batch, 1, rows, seq), BOOL),
        )

    @cached_property
    def kept_batch(self) -> tuple[Buffer, ...]:
        """What of a micro-batch lives until its backward pass is over."""
        options = megatron_options(self.plan)
        kept = {"loss_mask"} if self.last else set()
        kept |= {"tokens", "position_ids"} if self.first or (self.last and self.model.sees_all) else set()
        is_saved = self.plan.recompute == "full" or options.softmax_by_pytorch  # by its `masked_fill_`
        if is_saved and self.n_layers:
            kept.add("attention_mask")
        return tuple([one for one in self.batch if one.name in kept])

    @cached_property
    def deferred(self) -> tuple[Buffer, ...]:
        """The output layer's input and its output's gradient, from which its weight's is computed.

        The input's graph refers to what the stage has received, which keeps its gradient.
        """
        plan, model, shape = self.plan, self.model, self.trace.boundary.shape
        logits = plan.micro_batch, plan.local_seq_len, model.padded_vocab_size // plan.tp
        names = "input of the output layer", "received input of its graph", "gradient of the received input"
        return (
            *[buffer_of(f"{name}, deferred", shape, self.params_dtype) for name in names],
            buffer_of("gradient of logits, deferred", logits, self.params_dtype),
        )

    @cached_property
    def _held(self) -> list[tuple[Buffer, ...]]:
        """What the dispatcher of each layer holds between its passes: its input, and the input's gradient.

        The schedule frees what the stage has received, and a copy of its gradient.
        """
        of_layers = [
            kind.recompute == "full" and kind.kind in WITH_EXPERTS for kind, n in self.runs for _ in range(n)
        ]
        own = self.trace.boundary, self.trace.boundary_grad
        return [own[not (i or self.first) :] if holds else () for i, holds in enumerate(of_layers)]

    @property
    def _holds(self) -> bool:
        return any(self._held) or bool(self._held_of_mtp)

    @property
    def holds_received(self) -> bool:
        """Whether the first layer's dispatcher holds what the stage has received."""
        return not self.first and any(self._held[:1])

    @property
    def _held_of_mtp(self) -> tuple[Buffer, ...]:
        """What dispatchers hold of multi-token prediction, whose layers are called with two tensors."""
        config, own = self.model.config, (self.trace.boundary, self.trace.boundary_grad)
        return own * 2 * self.n_predicted if self.model.moe and config.recomputes_mtp else ()

    @cached_property
    def forward(self) -> Stretch:
        """The forward pass, up to the loss; it frees what dispatchers hold of a backward pass."""
        return self._forward(lets_go=True)

    @cached_property
    def forward_after_forward(self) -> Stretch:
        """The forward pass after another forward pass, or in the first step: dispatchers hold nothing."""
        return self._forward(lets_go=False) if self._holds else self.forward

    def _forward(self, *, lets_go: bool) -> Stretch:
        trace = self.trace
        dropped = [one for one in self.batch if one not in self.kept_batch]
        order = [segment for segment, n in self._forward_order() for _ in range(n)]
        layers = []
        for (segment, own), same in groupby(zip(order, self._held, strict=False)):
            found = let_go(segment.events, own) if own and lets_go else segment.events
            layers.append(repeated(events("forward: layer", found), len(list(same))))
        return chain(
            "forward",
            events("forward: batch", self._loaded()),
            trace.embed.stretch("forward: embedding"),
            *layers,
            *self._of_mtp(frees) * lets_go,
            *[trace.head.stretch("forward: head"), trace.loss.stretch("loss")] * self.last,
            trace.end_of_forward.stretch("forward: end"),
            events("forward: end of the batch", [*frees(*dropped), *allocs(*[self.report] * self.last)]),
        )

    def _loaded(self) -> Iterator[Event]:
        """The batch arrives whole; context-parallel ranks copy their parts of it, one tensor after the other.

        Source: megatron.core.utils:get_batch_on_this_cp_rank.
        """
        if self.plan.cp == 1:
            yield from allocs(*self.batch)
            return
        whole = self._batch_of(self.plan.seq_len)
        yield from allocs(*whole)
        for one, part in zip(whole, self.batch, strict=True):
            yield from (*allocs(part), *frees(one))

    def _forward_order(self) -> Iterator[tuple[Segment, int]]:
        """The layers' forward passes in order, with counts; a chunk's first layer is listed alone."""
        (entry, n_entry), *others = self.blocks
        order = [(entry.entry, min(1, n_entry)), (entry.forward, n_entry - 1)]
        order += [(block.forward, n) for block, n in others]
        order = [(segment, n) for segment, n in order if n > 0]
        if order and not self.last:
            segment, n = order.pop()
            order += [(segment, n - 1), (self.trace.sending(segment), 1)]
        yield from order

    @cached_property
    def backward(self) -> Stretch:
        """The backward pass: each weight's gradient is added to its main_grad, and freed.

        Source: megatron.core.distributed.distributed_data_parallel,
        DistributedDataParallel._make_backward_post_hook.
        """
        return self._backward(added_to_older)

    @cached_property
    def backward_after_backward(self) -> Stretch:
        """The backward pass after another backward pass: it frees what dispatchers hold of that one."""
        return self._backward(added_to_older, lets_go=True) if self._holds else self.backward

    @cached_property
    def first_backward(self) -> Stretch:
        """The backward pass where no gradient is there yet: each new one stays, as a weight's `grad`."""
        return self._backward(lambda segment: segment.events)

    def _backward(self, played: Callable[[Segment], tuple[Event, ...]], *, lets_go: bool = False) -> Stretch:
        trace, embedding = self.trace, self.trace.embed_backward
        if any(self._held[:1]):
            embedding = without(embedding, trace.boundary_grad)
        return chain(
            "backward",
            *self._of_mtp(frees) * lets_go,
            events("backward: loss and head", played(trace.head_backward)),
            *self._of_mtp(allocs),
            *self._layers_backward(played, lets_go=lets_go),
            events("backward: embedding", played(embedding)),
            *[trace.end_of_backward.stretch("backward: end"), trace.release_loss.stretch("backward: loss")]
            * self.last,
            events("backward: end of the batch", frees(*self.kept_batch)),
        )

    def _layers_backward(
        self, played: Callable[[Segment], tuple[Event, ...]], *, lets_go: bool
    ) -> Iterator[Stretch]:
        boundary, grad = self.trace.boundary, self.trace.boundary_grad
        order = [segment for segment, n in backward_order(self.blocks) for _ in range(n)]
        kept = [not self.last, *map(bool, self._held[:0:-1])]  # the output's gradient, by others
        for (segment, own, is_kept), same in groupby(zip(order, self._held[::-1], kept, strict=False)):
            body = played(without(segment, boundary) if own else segment)
            body = summed_apart(body, grad) if is_kept else body
            body = let_go(body, own) if own and lets_go else body
            body = (*body, Alloc(grad)) if own == (grad,) else body
            yield repeated(events("backward: layer", body), len(list(same)))

    def _of_mtp(self, changed: Callable[..., Sequence[Event]]) -> list[Stretch]:
        """Allocations or frees of what multi-token prediction's dispatchers hold."""
        held_by = self._held_of_mtp
        return [events("held of multi-token prediction", changed(*held_by))] if held_by else []

    @property
    def kept_by_dispatchers(self) -> Iterator[Buffer]:
        """What the token dispatchers of layers with experts refer to between steps."""
        moe, tokens = self.model.moe, self.plan.micro_batch * self.local_seq_len
        more = self.model.predicted_kind, self.n_predicted
        for kind, n in (*self.layers, more):
            if moe is not None and kind in WITH_EXPERTS:
                yield from [*kept_by_dispatcher(moe, tokens, self.params_dtype, self.model.config)] * n

    def pieces(self, of: Stretch) -> list[Piece]:
        """A pass layer by layer, with each part's weights; a tied head's are the embedding's."""
        layers = [block.parameters for block, n in self.blocks for _ in range(n)]
        of_layers = iter(layers if of.name == "forward" else layers[::-1])
        embedding = self.trace.embed_parameters
        head = [p for p in self.trace.head_parameters if p not in embedding]
        of_ends = {"embedding": embedding, "head": head}
        found: list[Piece] = []
        for part in of.parts:
            name = part.name.split()[-1]
            if name == "layer":
                found += [Piece(one, next(of_layers)) for one in part.parts * part.repeats]
            else:
                found.append(Piece(part, of_ends.get(name, ())))
        return found

    def _p2p(self, kind: CollectiveKind, what: str, *, sends: bool, stream: str = COMPUTE) -> Stretch:
        n_bytes = self.trace.boundary.n_bytes
        found = Collective(kind=kind, axis="pp", what=what, payload_bytes=n_bytes, stream=stream)
        return events(f"{kind} {what}", [found] * sends)

    @property
    def left_behind(self) -> Counter[Buffer]:
        """What a step leaves: the last input, which the decoder has, its gradient, and what dispatchers hold.

        Source: megatron.core.transformer.transformer_block:TransformerBlock.set_input_tensor.
        """
        of_schedule = () if self.first else (self.input, self.input_grad)
        of_dispatchers = [buffer for own in (*self._held, self._held_of_mtp) for buffer in own]
        return Counter([*of_schedule, *of_dispatchers])
