"""Megatron-Core as an engine: a rank's model chunks, what it holds between steps, and its step."""

from collections import Counter
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property
from itertools import product
from typing import Any, Final, Self, final

from memplan.device import Device
from memplan.engines.base import DataParallelism, Engine, PartCosts, RankRecord
from memplan.engines.megatron.buffers import (
    USUAL_BUCKET,
    USUAL_BUCKET_PER_RANK,
    Bucket,
    ChunkStates,
    Owned,
    StateTypes,
    buckets_of,
    chunk_states,
    is_orthogonalized,
    state_types,
)
from memplan.engines.megatron.chunk import ModelChunk, transformer_config
from memplan.engines.megatron.deepspeed import DeepSpeedRank
from memplan.engines.megatron.muon import orthogonalizing, ping_pong, shard_aligned
from memplan.engines.megatron.options import OLD_CONTAINER, MegatronOptions, divides_by_size, megatron_options
from memplan.engines.megatron.overlap import (
    GRADIENTS,
    WEIGHTS,
    Division,
    gathering,
    reducing,
    replaced,
)
from memplan.engines.megatron.refusals import REFUSALS, check_fp8_device
from memplan.engines.megatron.schedules import forward_backward
from memplan.memory import Alive
from memplan.models import Model
from memplan.models.base import Layers
from memplan.models.megatron import WITH_EXPERTS, WORDS, configured, gpt_model, weight_copies
from memplan.optimizers import COMMON
from memplan.parts.stage import QuicklyCopied
from memplan.plan import Plan, Rank, stage_layers
from memplan.record import (
    COMPUTE,
    Collective,
    CollectiveKind,
    Event,
    Stretch,
    WaitStream,
    allocs,
    chain,
    events,
    frees,
)
from memplan.replay.program import AllocatorProgram
from memplan.shapes import FP16, FP32, INT32, UINT8, Buffer, DType, Parameter, buffer_of
from memplan.tape import Backend
from memplan.units import MiB

TE_ALIGNMENT_BYTES: Final = 1024
"""What Transformer Engine's workspace has beside 32 MiB on Hopper and later."""

GROUPED_STREAMS: Final = 4
"""The streams of Transformer Engine's grouped products, each of which has a workspace of its own.

Source: transformer_engine.pytorch.module.base:get_multi_stream_cublas_workspace.
"""

LINEAR_QUANTIZERS: Final = (3, 2)
"""The tensors that a linear casts to 8 bits, or might, in its forward and its backward pass."""

ATTENTION_QUANTIZERS: Final = (9, 6)
"""The same of attention: three for each of its three products.

Source: transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention,
DotProductAttention.init_fp8_metadata.
"""

UPDATE_NAME: Final = "update"
"""The name of the optimizer's part of a step."""

OF_EXPERTS: Final = ".mlp.experts."
"""What names of experts' weights contain, which ranks with the same experts reduce between them."""

_Ends = tuple[bool, bool, tuple[Layers, ...]]


USERBUFFERS_STREAMS: Final = 3
"""The streams of Transformer Engine's products beside traffic, which share one workspace.

Source: transformer_engine.pytorch.cpp_extensions.gemm:get_cublas_workspace.
"""


def te_workspace_bytes(device: Device) -> int:
    """The workspace of Transformer Engine's products.

    Source: transformer_engine.pytorch.module.base:get_cublas_workspace_size_bytes.
    """
    return 32 * MiB + TE_ALIGNMENT_BYTES if device.at_least(9) else 4 * MiB


class MegatronRank(QuicklyCopied):
    """One rank: its model chunks, and what it holds between steps."""

    def __init__(
        self, model: Model, plan: Plan, rank: Rank, device: Device, known: dict[_Ends, ModelChunk]
    ) -> None:
        self.plan, self.rank, self.device = plan, rank, device
        self.options = megatron_options(plan)
        self.indices = plan.stages_of(rank.pp)
        self.layers = tuple([stage_layers(model.n_blocks, plan, index) for index in self.indices])
        self.chunks: list[ModelChunk] = []
        own = configured(model, transformer_config(model, plan, device))
        for index, layers in zip(self.indices, self.layers, strict=True):
            first, last = index == 0, index == plan.n_stages - 1
            key = first, last, own.layers_in(layers)
            if key not in known:
                known[key] = ModelChunk(
                    model, plan, device, first=first, last=last, layers=layers, tp_rank=rank.tp,
                    cp_rank=rank.cp,
                )  # fmt: skip
            self.chunks.append(known[key])
        self.last = any(chunk.last for chunk in self.chunks)

    def moved_to(self, other: Self) -> Self:
        """A copy of this rank at the pipeline rank of another, which has the same chunks."""
        moved = copy(self)
        moved.rank = replace(self.rank, pp=other.rank.pp)
        moved.indices, moved.layers = other.indices, other.layers
        return moved

    @property
    def has_experts(self) -> bool:
        """Whether a layer of this rank has a mixture of experts."""
        return any(kind in WITH_EXPERTS for chunk in self.chunks for kind, _ in chunk.layers)

    @property
    def uses_muon(self) -> bool:
        """Whether Muon updates matrices."""
        return self.plan.optimizer == "muon"

    @property
    def state_types(self) -> StateTypes:
        """The types of gradients, main parameters and moments."""
        return state_types(self.chunks[0].params_dtype, self.plan.optimizer, self.options)

    def bucket_size(self, local: int) -> int | None:
        """The elements of a chunk's buckets; None: one bucket, as on all stages but the first.

        Source: megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.__init__.
        """
        alone = self.options.overlap_param_gather_with_optimizer_step
        if not self.options.overlap_grad_reduce or self.rank.pp or local or alone:
            return None
        return self.options.ddp_bucket_size or max(USUAL_BUCKET, USUAL_BUCKET_PER_RANK * self.plan.n_shards)

    def shared(self, chunk: ModelChunk) -> frozenset[Parameter]:
        """The word embeddings of a chunk, if the first and the last stage share them."""
        shares = (chunk.model.tied_head or chunk.model.mtp_num_layers) and self.plan.pp > 1
        return frozenset([p for p in chunk.parameters() if p.name == WORDS and shares])

    @cached_property
    def states(self) -> list[ChunkStates]:
        """Weights, gradient buffers, main parameters and moments of each chunk, experts' last."""
        types, padded = self.state_types, self.plan.zero and not divides_by_size(self.plan)
        return [
            chunk_states(
                own.parameters, types, self._owned(own), own.group, own.buckets[-1].end if padded else None
            )
            for own in self.divisions
        ]

    @cached_property
    def divisions(self) -> list[Division]:
        """The weights of each chunk by the ranks that reduce their gradients, experts' after the others'.

        Source: megatron.core.distributed.distributed_data_parallel:group_params_for_buffers.
        """
        plan, found = self.plan, list[Division]()
        apart = self.uses_muon and plan.zero and not divides_by_size(plan)
        groups = {plan.shard_group: plan.n_shards} | ({"efsdp": plan.efsdp} if plan.ep > 1 else {})
        for (group, n_ranks), (local, chunk) in product(groups.items(), enumerate(self.chunks)):
            n, size = n_ranks // self.options.num_distributed_optimizer_instances, self.bucket_size(local)
            kinds: dict[tuple[bool, DType], list[Parameter]] = {}
            for p in chunk.parameters():
                if (OF_EXPERTS in p.name and plan.ep > 1) == (group == "efsdp"):
                    kinds.setdefault((bool(apart) and is_orthogonalized(p), p.dtype), []).append(p)
            for (of_muon, _), own in kinds.items():
                aligned = shard_aligned(own, size, n) if of_muon else None
                buckets = aligned or buckets_of(own, size, n, self.shared(chunk))
                found.append(Division(local, group, n, own, buckets))
        return found

    def _place(self, division: Division, dp_rank: int) -> int:
        """A data-parallel rank's place among the ranks that divide the optimizer's states."""
        plan = self.plan
        place = dp_rank * plan.cp + self.rank.cp
        if division.group == "efsdp":
            place = (place * plan.tp + self.rank.tp) // (plan.ep * plan.etp)
        return place % division.n_ranks

    def _owned(self, division: Division, dp_rank: int | None = None) -> Owned:
        """What of its weights a data-parallel rank updates; by size: of all chunks' at once."""
        place = self._place(division, self.rank.dp if dp_rank is None else dp_rank)
        if divides_by_size(self.plan):
            together = [one for one in self.divisions if one.group == division.group]
            whole = [p for one in together if division is together[0] for p in one.parameters]
            return [(p, p.n_elements) for p in ping_pong(whole, place, division.n_ranks)]
        if self.plan.zero:
            return [own for bucket in division.buckets for own in bucket.shard(place, division.n_ranks)]
        return [(p, p.n_elements) for p in division.parameters]

    @property
    def fullest(self) -> int:
        """The data-parallel rank with most of the optimizer's states: one of several where Muon divides."""
        if not (self.plan.zero and self.uses_muon):
            return 0
        types = self.state_types
        of_muon, of_others = len(types.moments) + 1, len(types.others) + 1

        def n_elements(dp_rank: int) -> int:
            owned = [each for own in self.divisions for each in self._owned(own, dp_rank)]
            return sum([n * (of_muon if is_orthogonalized(p) else of_others) for p, n in owned])

        return max(range(self.plan.dp), key=n_elements)

    @cached_property
    def matrices(self) -> list[Parameter]:
        """The weights that this rank's Muon updates."""
        owned = [p for own in self.divisions for p, _ in self._owned(own)] if self.uses_muon else []
        return [p for p in owned if is_orthogonalized(p)]

    @cached_property
    def orthogonalizing(self) -> tuple[list[Stretch], frozenset[Buffer]]:
        """Muon's updates, and their products."""
        return orthogonalizing(self.matrices)

    @cached_property
    def main_grads(self) -> list[Buffer]:
        """Float32 copies of narrower gradients, which live from one update to the next step's start.

        Source: megatron.core.optimizer.optimizer,
        Float16OptimizerWithFloat16Params._copy_model_grads_to_main_grads.
        """
        narrow = self.state_types.grads != FP32
        main = [one for chunk in self.states for one in chunk.main_params if narrow]
        return [
            buffer_of(one.name.replace("main_param", "main_grad"), one.shape, FP32, "grads") for one in main
        ]

    @property
    def kept(self) -> Iterator[Buffer]:
        """What is neither state nor left by a step: workspaces, caches, and scalars of the training loop."""
        plan, options, device = self.plan, self.options, self.device
        if options.uses_te or self.has_experts:  # routers take its products
            yield buffer_of("Transformer Engine's workspace", (te_workspace_bytes(device),), UINT8)
            if options.moe_grouped_gemm and self.has_experts and options.ngc_container != OLD_CONTAINER:
                for _ in range(GROUPED_STREAMS):
                    yield buffer_of("grouped products' workspace", (te_workspace_bytes(device),), UINT8)
        if options.tp_comm_overlap:
            n_bytes = USERBUFFERS_STREAMS * te_workspace_bytes(device)
            yield buffer_of("workspace of products beside traffic", (n_bytes,), UINT8)
        if options.uses_te:
            yield buffer_of("cu_seqlens", (plan.micro_batch + 1,), INT32)
        for one in self.chunks[:1]:
            yield from one.model.buffers(plan.local_seq_len)
        for chunk in self.chunks:
            n_layers = chunk.n_layers + chunk.n_predicted
            yield from chunk.model.layer_buffers(plan.local_seq_len, chunk.params_dtype) * n_layers
        yield from self._of_fp8()
        yield from self._memory_buffers()
        yield from self._dummy_grads()
        for chunk in self.chunks:
            yield from chunk.kept_by_dispatchers
        scalars = [("FusedAdam's overflow buffer", INT32), ("start time", FP32)]
        if self.chunks[0].params_dtype == FP16:
            names = "scale", "min_scale", "growth_factor", "backoff_factor", "found_inf", "overflow buffer"
            scalars += [(name, FP32) for name in names]
        else:
            scalars.append(("scale of 1", FP32))
        if self.last:
            scalars += [("total_loss_dict", FP32), ("loss_dict", FP32)]
        for name, dtype in scalars:
            yield buffer_of(name, (1,), dtype)

    @cached_property
    def cublas_workspaces(self) -> tuple[tuple[frozenset[Buffer], Buffer], ...]:
        """PyTorch's cuBLAS workspaces of the caller's thread and of autograd's, each with its products.

        Muon's are the caller's. The first product allocates it. Transformer Engine's have their own.
        """
        n_bytes = self.options.cublas_workspace_bytes(self.device)
        forward = frozenset[Buffer]().union(*[chunk.trace.products for chunk in self.chunks])
        forward |= self.orthogonalizing[1]
        backward = frozenset[Buffer]().union(*[chunk.trace.products_backward for chunk in self.chunks])
        workspace = buffer_of("cuBLAS workspace", (n_bytes,), UINT8)
        return tuple([(products, workspace) for products in (forward, backward) if products])

    def _of_fp8(self) -> Iterator[Buffer]:
        """The weights' copies in 8 bits, and delayed scaling's scales and largest elements of each module.

        Copies are made in the first micro-batch's passes, into the same buffers in each step. Attention has
        scales for products in 8 bits of its own, which it does not take.

        Source: transformer_engine.pytorch.quantization:DelayedScalingRecipeState.
        """
        fp8, length = self.options.fp8(self.device), self.options.fp8_amax_history_len
        if fp8 is None:
            return
        quantizers: list[int] = []
        for chunk in self.chunks:
            for p in chunk.quantized:
                for what, shape, dtype in weight_copies(p.shape, fp8):
                    yield buffer_of(f"{p.name} {what}", shape, dtype, "weights")
            together = {"weight": 1, "weight0": chunk.n_own_experts}
            modules = [together.get(p.name.rpartition(".")[2], 0) for p in chunk.quantized]
            quantizers += [n * one for n in modules if n for one in LINEAR_QUANTIZERS]
            quantizers += ATTENTION_QUANTIZERS * (chunk.n_layers + chunk.n_predicted)
        for n in quantizers if fp8.recipe == "delayed" else ():
            yield buffer_of("scales", (n,), FP32)
            yield buffer_of("amax_history", (length, n), FP32)

    def _memory_buffers(self) -> Iterator[Buffer]:
        """Megatron's global memory buffer "mpu", as large as the largest tensor that was asked for.

        Source: megatron.core.utils:GlobalMemoryBuffer.get_tensor.
        """
        plan, one = self.plan, self.chunks[0]
        batch, seq = plan.micro_batch, plan.local_seq_len
        sizes = [0]
        if not self.options.uses_te:
            sizes.append(batch * one.model.heads.n * seq * seq)
        if plan.sequence_parallel and (self.last or not self.options.uses_te):
            sizes.append(batch * seq * one.model.d_model)
        if (
            self.has_experts
            and self.options.moe_token_dispatcher_type == "allgather"
            and plan.ep * plan.etp > 1
        ):
            tokens = batch * seq // (plan.tp if plan.sequence_parallel else 1)
            sizes.append(tokens * plan.ep * plan.etp * one.model.d_model)
        if self.last and plan.sequence_parallel and self.options.defer_embedding_wgrad_compute:
            for name in ("mpu_0", "mpu_1"):
                yield buffer_of(name, (batch * seq * one.model.d_model,), one.params_dtype)
        if max(sizes):
            yield buffer_of("global memory buffer", (max(sizes),), one.params_dtype)

    def _dummy_grads(self) -> Iterator[Buffer]:
        """What backward passes return as gradients of weights whose main_grad the product has added to.

        Megatron's own products share it since e7c55de99e (release 0.14).

        Source: transformer_engine.pytorch.module.base:get_dummy_wgrad.
        """
        if not self.options.gradient_accumulation_fusion:
            return
        shapes = {
            p.shape
            for chunk in self.chunks
            for p in chunk.parameters()
            if not p.name.startswith(("embedding.", "output_layer."))
            and not p.name.endswith("router.weight")
            and (".experts.linear_fc" not in p.name or self.options.shares_grouped_wgrads)
            and ".experts.weight" not in p.name
        }
        if self.last and self.options.release >= (0, 14):
            model = self.chunks[-1].model
            shapes.add((model.padded_vocab_size // self.plan.tp, model.d_model))
        for shape in sorted(shape for shape in shapes if len(shape) == 2):
            yield buffer_of("dummy wgrad", shape, self.chunks[0].params_dtype)

    @cached_property
    def rest(self) -> Alive:
        """What is alive between steps."""
        alive: Alive = Counter([buffer for chunk in self.states for buffer in chunk.kept])
        alive.update(self.kept)
        alive.update([workspace for _, workspace in self.cublas_workspaces])
        alive.update(self.main_grads)
        for chunk in self.chunks:
            alive.update(chunk.left_behind)
        return alive

    @property
    def record(self) -> RankRecord:
        """The rank's record."""
        step = self.step()
        return RankRecord(
            rank=self.rank,
            layers=self.layers,
            rest=self.rest,
            step=step,
            grads=Counter([chunk.grad_data for chunk in self.states]),
            update=step.parts[-1:],
            program=self.program,
        )

    def step(self, *, first: bool = False) -> Stretch:
        """A step: its passes, then the update; the first one finds nothing that a step has left."""
        dropped = events("zero_grad", frees(*[] if first else self.main_grads))
        passes = forward_backward(self.plan, self.rank.pp, self.chunks, first_step=first)
        for local in range(len(self.chunks)):
            passes = self._with_traffic(passes, local)
        update = events(UPDATE_NAME, [*self._communication(), *allocs(*self.main_grads)])
        if self.uses_muon:
            gathered = events("gather of weights", self._gathered_by_size())
            update = chain(UPDATE_NAME, update, *self.orthogonalizing[0], gathered)
        return chain("step", dropped, *passes, update)

    def _with_traffic(self, passes: list[Stretch], local: int) -> list[Stretch]:
        """The passes, of which a chunk's first gathers its weights, and its last reduces its gradients."""
        chunk, options = self.chunks[local], self.options
        own = [
            each
            for each in zip(self.divisions, self.states, strict=True)
            if each[0].local == local and self.plan.mesh.size(each[0].group) > 1
        ]
        if options.overlap_grad_reduce and own:
            reduced = [(part, self._reduced(states, part.buckets, GRADIENTS)) for part, states in own]
            for old in dict.fromkeys([chunk.backward, chunk.backward_after_backward]):
                beside = reducing(chunk.pieces(old), reduced)
                passes = replaced(passes, local, "backward", old, beside)
        if options.overlap_param_gather and own:
            gathered = [(part, self._gathered(states, part.buckets, WEIGHTS)) for part, states in own]
            for old in dict.fromkeys([chunk.forward, chunk.forward_after_forward]):
                beside = gathering(chunk.pieces(old), gathered)
                passes = replaced(passes, local, "forward", old, beside)
        return passes

    def _reduced(
        self, states: ChunkStates, buckets: Sequence[Bucket] = (), stream: str = COMPUTE
    ) -> list[Collective]:
        """The reductions of each bucket of gradients, or of all; without ZeRO there is no padding."""
        padded, size = states.param_data is not None, states.grad_data.dtype.itemsize
        kind: CollectiveKind = "reduce_scatter" if padded else "all_reduce"
        n_bytes = [size * (one.n_elements if padded else one.unpadded) for one in buckets]
        return [
            Collective(kind=kind, axis=states.group, what="gradients", payload_bytes=n, stream=stream)
            for n in n_bytes or [states.grad_data.n_bytes]
        ]

    def _gathered(
        self, states: ChunkStates, buckets: Sequence[Bucket] = (), stream: str = COMPUTE
    ) -> list[Collective]:
        """The distributed optimizer's gathers of each bucket of weights, or of all."""
        if states.param_data is None:
            return []
        n_bytes = [states.param_data.dtype.itemsize * one.n_elements for one in buckets]
        return [
            Collective(kind="all_gather", axis=states.group, what="weights", payload_bytes=n, stream=stream)
            for n in n_bytes or [states.param_data.n_bytes]
        ]

    def _communication(self) -> Iterator[Event]:
        """The gradients' reduction, and with the distributed optimizer the gather of the weights.

        Neglects: what clipping and the update allocate for a moment, which is less than the passes do.
        """
        if self.options.overlap_grad_reduce:
            yield WaitStream(COMPUTE, GRADIENTS)
        for states in self.states:
            if self.plan.mesh.size(states.group) > 1:
                yield from [] if self.options.overlap_grad_reduce else self._reduced(states)
                yield from [] if self.options.overlap_param_gather else self._gathered(states)

    def _gathered_by_size(self) -> Iterator[Event]:
        """The gather of whole weights of several lengths, all of which are there twice for a moment.

        Source: megatron.core.optimizer.layer_wise_optimizer:LayerWiseDistributedOptimizer.allgather_params.
        """
        for group, n_ranks in dict.fromkeys([(own.group, own.n_ranks) for own in self.divisions]):
            if divides_by_size(self.plan) and n_ranks > 1:
                weights = [p for own in self.divisions if own.group == group for p in own.parameters]
                n, dtype = sum([p.n_elements for p in weights]), weights[0].dtype
                gathered = buffer_of("gathered weights", (n,), dtype)
                sent = Collective(
                    kind="all_gather", axis=group, what="weights", payload_bytes=gathered.n_bytes
                )
                yield from (*allocs(gathered), sent, *frees(gathered))

    def program(self) -> AllocatorProgram:
        """The rank's allocations and frees in order, as the caching allocator sees them."""
        return AllocatorProgram(
            setup=tuple(self._setup()),
            start=allocs(*self.kept),
            first_step=self.step(first=True),
            step=self.step(),
            kept=Counter(
                [*self.main_grads, *[one for chunk in self.chunks for one in chunk.left_behind.elements()]]
            ),
            states=tuple([moment for chunk in self.states for moment in chunk.moments]),
            update_name=UPDATE_NAME,
            beside=self.cublas_workspaces,
            handed_on=frozenset([chunk.trace.boundary for chunk in self.chunks]),
            oldest_first=frozenset(
                [one for chunk in self.chunks for one in (chunk.input, chunk.input_grad, chunk.output_grad)]
            ),
        )

    def _setup(self) -> Iterator[Event]:
        """The model, then its buffers, then the optimizer's main parameters.

        Source: megatron.training.training:setup_model_and_optimizer.
        """
        for chunk in self.states:
            yield from allocs(*chunk.weights)
        for chunk in self.states:
            if chunk.param_data is not None:
                yield from allocs(chunk.param_data, chunk.grad_data)
                yield from frees(*chunk.weights)
            else:
                yield from allocs(chunk.grad_data)
        for chunk in self.states:
            for main in chunk.main_params:
                clone = buffer_of("clone", main.shape, self.chunks[0].params_dtype)
                yield from (*allocs(clone, main), *frees(clone))


N_GATHERED: Final = 8
N_SCATTERED: Final = 4
"""The buffers of Transformer Engine for gathers and for reductions over the tensor axis."""


@final
class MegatronEngine(Engine):
    """Megatron-Core's GPTModel with its DDP or distributed optimizer, and its schedules."""

    name = "megatron"
    code = "Megatron-Core"
    compared_with = "Bytes compared with published runs on GPUs (validate published --engine megatron)."
    reserves_more = 0.09
    axes = "pp", "dp", "cp", "tp"
    views = "ep", "etp"
    ep_beside = "pp", "cp", "tp"
    sharded_beside = ()
    counts_blocks = ("full",)
    refusals = REFUSALS
    options = MegatronOptions
    gives_bounds = True
    overlaps_sends = True
    optimizers = (*COMMON, "muon")

    def check_device(self, plan: Plan, device: Device) -> None:
        check_fp8_device(plan, device)

    def outside_bytes(self, plan: Plan, model: Model) -> int:
        """Bytes of Userbuffers: for each layer's traffic a buffer of a micro-batch's whole sequence.

        Neglects: what each of them needs beside its buffer.

        Source: transformer_engine.pytorch.module.base:initialize_ub,
        megatron.training.initialize:_initialize_tp_communicators.
        """
        options = megatron_options(plan)
        if not options.tp_comm_overlap:
            return 0
        n_elements = plan.micro_batch * plan.local_seq_len * gpt_model(model).d_model
        return n_elements * (N_GATHERED * (1 if options.fp8_format != "none" else 2) + N_SCATTERED * 2)

    def notes(self, model: Model, plan: Plan) -> Iterator[str]:
        if megatron_options(plan).megatron_deepspeed:
            yield (
                "Bytes of Megatron-DeepSpeed are compared with what nvidia-smi showed of BLOOM's 93 trials "
                "(validate published --engine megatron-deepspeed). Weights are gathered part by part, as "
                "with CUDA_LAUNCH_BLOCKING=1; else all parts may be there at once."
            )
            return
        yield (
            "Bytes of Megatron-Core are compared with NVIDIA's own tests on H100 and A100, times with "
            "published steps in fp16 on A100 and in fp8 on H100. The interval's upper end has "
            f"{self.reserves_more:.0%} more than a replay of the allocator reserves, as the largest "
            "difference from runs without a GPU."
        )
        if n_bytes := self.outside_bytes(plan, model):
            yield (
                f"Userbuffers are taken to hold {n_bytes / MiB:,.0f} MiB outside PyTorch's memory, as "
                "Transformer Engine's source says; no run has confirmed it."
            )
        if plan.layers_per_stage is None and model.n_blocks % plan.n_stages:
            yield (
                f"The {model.n_blocks} layers are divided over {plan.n_stages} stages as evenly as they can "
                "be; Megatron is told so by --pipeline-model-parallel-layout, as in `memplan export`."
            )
        own = gpt_model(model)
        if own.mtp_num_layers and own is not model:
            yield (
                f"Megatron-Bridge builds the layers for multi-token prediction ({own.mtp_num_layers}), which "
                "transformers leaves out: the last stage has them and the embedding beside these parameters."
            )
        if own.moe:
            yield (
                "Routing is taken as even: each expert gets as many tokens. A rank whose experts get more "
                "holds more; runs of NVIDIA's own tests held up to 6% more, or less."
            )

    def play(self, model: Model, plan: Plan, device: Device) -> Iterator[RankRecord]:
        model = gpt_model(model)
        if megatron_options(plan).megatron_deepspeed:
            for pp_rank in range(plan.pp):
                yield DeepSpeedRank(model, plan, Rank(pp=pp_rank), device).record
            return
        known: dict[_Ends, ModelChunk] = {}
        with_chunks: dict[tuple[object, ...], MegatronRank] = {}
        for pp_rank in range(plan.pp):
            rank = MegatronRank(model, plan, Rank(pp=pp_rank, cp=plan.cp - 1), device, known)
            key = not pp_rank, *rank.chunks  # the first stage has buckets of its own
            if key in with_chunks:
                rank = with_chunks[key].moved_to(rank)
            elif fullest := rank.fullest:
                rank = MegatronRank(model, plan, replace(rank.rank, dp=fullest), device, known)
            with_chunks[key] = rank
            yield rank.record

    def play_rank(
        self, model: Model, plan: Plan, rank: Rank, device: Device, backend: Backend | None = None
    ) -> RankRecord:
        if megatron_options(plan).megatron_deepspeed:
            return DeepSpeedRank(model, plan, rank, device).record
        return MegatronRank(model, plan, rank, device, {}).record

    def built(self, model: Model) -> Model:
        return gpt_model(model)

    def part_costs(self, model: Model, plan: Plan, device: Device) -> PartCosts:
        from memplan.engines.megatron.bounds import megatron_part_costs  # needs NumPy, as only a search does

        return megatron_part_costs(model, plan, device)

    def data_parallelism(
        self, plan: Plan, elements: Any, block_elements: Any, single_stage: Any
    ) -> DataParallelism:
        from memplan.engines.megatron.bounds import data_parallelism

        return data_parallelism(plan, elements)


MEGATRON: Final = MegatronEngine()
