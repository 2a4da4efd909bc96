"""Pipeline stages, and the stages of one rank: its parameters, and what it holds between steps."""

from collections import Counter
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property
from typing import Any, Final, Self, final

from memplan.device import CPU, Device
from memplan.engines.torch.merging import Adapted, adapted, is_sent
from memplan.engines.torch.options import (
    called_by_trainer,
    compiled_blocks,
    finds_unused,
    gathers_head,
    merges_adapters,
    torch_options,
    weight_dtype,
)
from memplan.engines.torch.refusals import check_trace
from memplan.engines.torch.sharding import (
    n_shards,
    padded_shard_elements,
    shard_elements,
    shard_rank,
    zero_redundancy_partition,
)
from memplan.engines.torch.trainer import METRICS, KeptByTrainer, gathered, kept_by_trainer
from memplan.kernels import FREES_WORKSPACES, product_workspace_bytes
from memplan.memory import Alive
from memplan.models import Model, TracedModel, divided, of_sizes
from memplan.models.recording import REFERENCE
from memplan.models.traced import is_of_torchtitan
from memplan.optimizers import KEPT, LEAST_OFFLOADED, Kept
from memplan.parts.ddp import Arguments
from memplan.parts.stage import ModelStage, QuicklyCopied, StageKind, cublas_workspaces, trained
from memplan.parts.weight_updates import (
    Weight,
    is_of_8_bits,
    maps_of,
    scalars_of,
    state_bytes,
    states_of,
    states_of_own_optimizer,
)
from memplan.passes.recorded import divided_inputs
from memplan.passes.trace import EMPTY, BlockKind, Segment, Trace
from memplan.plan import Plan, Rank, stage_layers
from memplan.record import UnitHook
from memplan.shapes import FP32, INT32, INT64, UINT8, Buffer, DType, Kind, Parameter, Shape, buffer_of
from memplan.tape import HOLD_WHAT_IS_SENT, NCCL, USUAL_BACKENDS, Backend, OpContext

N_POOL_STREAMS: Final = 32
"""CUDA streams that PyTorch hands out in turn to what is called when a collective has ended.

Source: c10/cuda/CUDAStream.cpp (`kStreamsPerPool`), aten/src/ATen/core/ivalue_inl.h (`Future::then`).
"""


IN_USE: Final = "parameters in use (DDP)"
"""The name of what DDP keeps to tell which parameters a pass has used."""


def as_rank_has_it(model: Model, plan: Plan, device: Device) -> Model:
    """The model as a rank of the axes that divide it has it; one that is traced so is checked as any is."""
    found = divided(
        model,
        plan.mesh.dividing,
        device.type,
        plan.precision,
        plan.adapters,
        compiled_blocks(plan),
        torch_options(plan).float8,
        called_by_trainer(plan),
        sequence_parallel=plan.sequence_parallel,
        gathers_float8=torch_options(plan).float8_all_gather != "none",
    )
    found = of_sizes(
        found, plan.micro_batch, plan.seq_len, device.type, plan.precision, compiled_blocks(plan)
    )
    if found is not model:
        check_trace(found, plan)
    return found


N_TARGETS: Final = "number of targets in the batch"
"""What torchtitan divides its loss by."""


@final
class Stage(ModelStage):
    """A pipeline stage under a plan; ranks share the object of each `StageKind`."""

    def __init__(
        self,
        model: Model,
        plan: Plan,
        kind: StageKind,
        device: Device,
        backend: Backend | None = None,
        cp_rank: int = 0,
    ) -> None:
        self.cp_rank = cp_rank
        self.model = as_rank_has_it(model, plan, device)
        self.plan = plan
        self.options = torch_options(plan)
        self.device = device
        self.backend = backend or USUAL_BACKENDS[device.type]
        self.kind = kind
        self.first, self.last, self.layers = kind
        self.n_blocks = sum([n for _, n in self.layers])
        self.weight_dtype = plan.formats.stored
        self.offloads = plan.offload and not device.on_cpu
        self.update_device = CPU if self.offloads else device

    @cached_property
    def op_context(self) -> OpContext:
        """What the operations see: FSDP2 hands them weights in the compute type, autocast copies them."""
        plan, units = self.plan, self.options.fsdp_units
        formats = plan.formats
        return OpContext(
            device=self.device,
            backend=self.backend,
            weight_dtype=weight_dtype(plan),
            autocast=formats.compute if plan.autocasts or (self.has_trainer and self.is_fsdp1) else None,
            tp=plan.tp,
            cp=plan.cp,
            cp_rank=self.cp_rank,
            cp_rotate_method=self.options.cp_rotate_method,
            ep=plan.ep,
            plays_hooks=self.is_fsdp2,
            sequence_parallel=plan.sequence_parallel,
            remakes_dtensors=self.plan.ddp,
            cast_units=units if self.is_fsdp2 and plan.mixed and units != "model" else "",
            micro_batch=plan.micro_batch,
            seq_len=plan.local_seq_len,
            loss_chunks=plan.loss_chunks,
            saves_on_cpu=self.options.activation_offloading == "save_on_cpu",
            fuses_loss=self.options.liger_kernel != "none",
            chunks_head=self.options.chunked_loss == "ChunkedLossWrapper",
            offloads_activations=self.options.activation_offloading == "OffloadActivations",
            torch_release=self.options.release,
            keeps_wide_grads=self.autograd_casts_grads and self.widens_grads,
            trainer=self.has_trainer,
            clones_outputs=self.finds_unused,
            casts_inputs=self.has_trainer and plan.fsdp and plan.mixed,
        )

    @cached_property
    def divided_inputs(self) -> Segment:
        """The events in which context-parallel ranks divide the sequences of all micro-batches of a pipeline.

        Source: torchtitan/train.py (`Trainer.forward_backward_step`, of 0.2.0), which has
        `context_parallel` around the schedule's step.
        """
        plan = self.plan
        if plan.cp == 1 or plan.pp == 1 or not isinstance(self.model, TracedModel):
            return EMPTY
        n = plan.n_micro_batches * plan.micro_batch
        return divided_inputs(self.model, replace(self.op_context, micro_batch=n))

    @cached_property
    def buffers(self) -> tuple[Buffer, ...]:
        """The module's buffers, which Accelerate has FSDP1 cast as it casts weights.

        Source: accelerate.utils.dataclasses (`FullyShardedDataParallelPlugin.set_mixed_precision`).
        """
        own, dtype = super().buffers, self.plan.formats.gather
        casts = self.has_trainer and self.is_fsdp1 and self.plan.mixed
        return tuple([buffer_of(one.name, one.shape, dtype) for one in own]) if casts else own

    @property
    def scalars_on_device(self) -> bool:
        """Whether the device that updates the weights holds the optimizer's counts of steps."""
        fused = self.options.optimizer_impl == "fused" or self.plan.kept.on_host
        return self.update_device.on_cpu or fused

    def updates_on_host(self, parameter: Parameter) -> bool:
        """Whether torchao's optimizer updates a weight on the host: a DTensor counts whole."""
        return self.plan.kept.on_host and parameter.n_elements >= LEAST_OFFLOADED

    @property
    def has_trainer(self) -> bool:
        """Whether transformers' Trainer trains the module, or TRL's that builds on it."""
        return self.options.trainer != "none"

    @property
    def is_of_torchtitan(self) -> bool:
        """Whether the module is torchtitan's, which torchtitan divides into units."""
        return is_of_torchtitan(self.model)

    def traced(self, kinds: tuple[BlockKind, ...]) -> Trace:
        """The trace of one micro-batch, to which TRL's trainers add what they tell all ranks of it."""
        found, metrics = super().traced(kinds), METRICS.get(self.options.trainer)
        if metrics is None:
            return found
        head, before, after = found.head.events, found.embed.events, found.loss.events
        if gathers_head(self.plan):
            whole = gathered(found.head_parameters[-1], self.plan)
            again = UnitHook("pre_forward", tuple([one.name for one in found.head_parameters]))
            head = whole, *head
            before, after = (tuple([whole if e == again else e for e in own]) for own in (before, after))
        return replace(
            found,
            embed=Segment(before),
            head=Segment(head),
            loss=Segment((*after, *metrics(self.plan))),
        )

    @cached_property
    def trainer(self) -> KeptByTrainer | None:
        """What transformers' Trainer keeps from step to step; None: a plain loop trains."""
        if not self.has_trainer:
            return None
        on_host = self.device.on_cpu
        own = [p for p in self.parameters() if not p.name.startswith(f"{REFERENCE}.")]
        whole = tuple([self._whole(p) for p in own if self.is_fsdp2 and is_sent(p.name)])
        return kept_by_trainer(
            self.model, self.plan, self.trace, self.weight_dtype, whole, self._adapted(own), on_host=on_host
        )

    def _adapted(self, own: Sequence[Parameter]) -> tuple[Adapted, ...]:
        """The weights that have adapters; not where merging them has no rule, as a note says."""
        if not merges_adapters(self.plan):
            return ()
        n_ranks = self.plan.n_shards if self.is_fsdp2 else 1
        return tuple(adapted([(p, stored_dtype(p, self.weight_dtype)) for p in own], n_ranks))

    def _whole(self, p: Parameter) -> Buffer:
        """A sharded weight as `DTensor.full_tensor` gathers it, with its padding."""
        n = n_shards(p, self.plan)
        n_elements = n * padded_shard_elements(p, n)
        return buffer_of(f"{p.name} (whole)", (n_elements,), stored_dtype(p, self.weight_dtype))

    @property
    def synchronized_buffers(self) -> list[Buffer]:
        """The buffers that DDP broadcasts; it does not wrap the reference model of TRL's trainers."""
        found = super().synchronized_buffers
        if self.options.trainer not in ("dpo", "grpo"):
            return found
        return [one for one in found if not one.name.startswith(f"{REFERENCE}.")]

    @property
    def finds_unused(self) -> bool:
        """Whether DDP has `find_unused_parameters`."""
        return finds_unused(self.plan)

    @property
    def ddp(self) -> Arguments:
        """How DDP is called."""
        options = self.options
        return Arguments(
            bucket_cap_bytes=options.bucket_cap_bytes,
            comm_hook=options.ddp_comm_hook,
            gradient_as_bucket_view=options.gradient_as_bucket_view,
            finds_unused=self.finds_unused,
            set_to_none=options.set_to_none,
        )

    @property
    def is_fsdp2(self) -> bool:
        """Whether `fully_shard` shards the weights, and casts inputs of each unit."""
        return self.plan.fsdp and self.options.fsdp_version == 2

    @property
    def is_fsdp1(self) -> bool:
        """Whether `FullyShardedDataParallel` shards the weights."""
        return self.plan.fsdp and self.options.fsdp_version == 1

    @property
    def autograd_casts_grads(self) -> bool:
        """Whether FSDP2 has autograd cast gradients to the type they are reduced in: from torch 2.15 on.

        Source: torch 2.15's `FSDPParamGroup._set_unsharded_grad_dtypes` (`Tensor.grad_dtype`).
        """
        return self.is_fsdp2 and self.reduces_in_other_dtype and self.options.release >= (2, 15)

    @property
    def reduces_in_other_dtype(self) -> bool:
        """Whether gradients are reduced in another type than they are computed in."""
        return self.plan.formats.reduce != self.plan.formats.gather

    @property
    def widens_grads(self) -> bool:
        """Whether gradients are reduced in a wider type than they are computed in."""
        formats = self.plan.formats
        return formats.reduce.itemsize > formats.gather.itemsize

    @property
    def keeps_received(self) -> bool:
        """Whether a pipeline receives into the same tensors in every step: before torch 2.15.

        Source: torch 2.15's `_RecvInfo.allocate_buffer`, `_RecvInfo.take_buffer`.
        """
        return self.options.release < (2, 15)

    @property
    def keeps_sent(self) -> bool:
        """Whether a send's handle holds the tensor until it is waited for; NCCL's batches (2.11) do not.

        Source: `torch.distributed.pipelining.schedules:_batch_p2p` (in 2.11 always `batch_isend_irecv`).
        """
        in_batches = self.backend in NCCL and self.options.release < (2, 12)
        return self.backend in HOLD_WHAT_IS_SENT and not in_batches


def stored_dtype(parameter: Parameter, weight_dtype: DType) -> DType:
    """The type that a parameter is stored in under a precision that stores weights in `weight_dtype`."""
    own = parameter.held if weight_dtype == FP32 else None
    return own or (weight_dtype if parameter.is_floating_point else parameter.dtype)


class RankStages(QuicklyCopied):
    """The pipeline stages of one rank, and what the rank holds between steps.

    `known`: stages by kind, shared between ranks; a kind that is missing is added.
    """

    def __init__(
        self,
        model: Model,
        plan: Plan,
        rank: Rank,
        device: Device,
        known: dict[StageKind, Stage] | None = None,
        *,
        backend: Backend | None = None,
    ) -> None:
        known = {} if known is None else known
        other_stage = next(iter(known.values()), None)
        model = as_rank_has_it(model, plan, device) if other_stage is None else other_stage.model
        made = []
        for index in plan.stages_of(rank.pp):
            layers = model.layers_in(stage_layers(model.n_blocks, plan, index))
            kind = index == 0, index == plan.n_stages - 1, layers
            if kind not in known:
                known[kind] = Stage(model, plan, kind, device, backend, rank.cp)
            made.append(known[kind])
        one = made[0]
        self.stages, self.rank = tuple(made), rank
        self.model, self.plan, self.device, self.backend = model, plan, device, one.backend
        self.options, self.weight_dtype = one.options, one.weight_dtype
        self.offloads, self.update_device = one.offloads, one.update_device

    @property
    def trainer(self) -> KeptByTrainer | None:
        """What transformers' Trainer keeps from step to step; None: a plain loop trains."""
        return self.stages[0].trainer

    @property
    def indices(self) -> tuple[int, ...]:
        """The places of the rank's stages in the pipeline."""
        return self.plan.stages_of(self.rank.pp)

    @property
    def layers(self) -> tuple[range, ...]:
        """The blocks of each stage."""
        return tuple([stage_layers(self.model.n_blocks, self.plan, index) for index in self.indices])

    def with_gradients_freed(self) -> Self:
        """The same rank with `set_to_none=True`; it receives into the same buffers."""
        plan = replace(self.plan, options=replace(self.options, set_to_none=True))
        other = type(self)(self.model, plan, self.rank, self.device, backend=self.backend)
        other.received = self.received
        return other

    def at(self, **place: Any) -> Self:
        """The same at another place, with stages of the same kinds; traces are kept."""
        other = copy(self)
        other.rank = replace(self.rank, **place)
        return other

    def __iter__(self) -> Iterator[Stage]:
        return iter(self.stages)

    @property
    def first(self) -> bool:
        """Whether the rank has the pipeline's first stage."""
        return any(stage.first for stage in self.stages)

    @property
    def last(self) -> bool:
        """Whether the rank has the pipeline's last stage."""
        return any(stage.last for stage in self.stages)

    @property
    def stored_parts(self) -> Sequence[tuple[Sequence[Parameter], int]]:
        """The parameters of the embedding, of one block of each run, and of the head, with their number.

        As the rank stores them, and its optimizer sees them, in the module's order.
        """
        return [part for stage in self.stages for part in stage.counted_parts]

    def trained_parameters(self) -> list[Parameter]:
        """The optimizer's parameters: the ones that require gradients, in the module's order."""
        return [parameter for part, n in self.stored_parts for parameter in trained(part) * n]

    @cached_property
    def counted_parameters(self) -> list[tuple[Parameter, int]]:
        """Every parameter of the rank and how many times it occurs."""
        found: Counter[Parameter] = Counter()
        for parameters, n in self.stored_parts:
            found.update(dict.fromkeys(parameters, n))
        return list(found.items())

    def counted_trained_parameters(self) -> list[tuple[Parameter, int]]:
        """Every parameter of the rank that requires a gradient, and how many times it occurs."""
        return [(parameter, n) for parameter, n in self.counted_parameters if parameter.requires_grad]

    @property
    def page_locked(self) -> Iterator[tuple[str, int, int, int]]:
        """The host's page-locked tensors under offload: name, bytes that states count, bytes, how often."""
        for parameter, n in self.counted_parameters:
            itemsize, own = self.stored_dtype(parameter).itemsize, self.weight_elements(parameter)
            n_bytes = (own + self.padding_elements(parameter)) * itemsize
            yield parameter.name, n_bytes, n_bytes, n
            if parameter.requires_grad:
                yield f"{parameter.name}.grad", own * itemsize, own * itemsize, n

    def on_fullest_rank(self) -> "RankStages":
        """The same stages on the data-parallel rank that holds most; without ZeRO-1 that is the first.

        Along cp its passes are the first one's, which hold most.
        """
        if self.owned is None:
            return self

        on_host = not self.stages[0].scalars_on_device
        each = {
            p: state_bytes(self.kept_of(p), self._weight(p), on_host=on_host)
            for p, _ in self.counted_trained_parameters()
        }
        sizes = [sum(map(each.__getitem__, owned)) for owned in self.partition]
        dp, cp = divmod(sizes.index(max(sizes)), self.plan.cp)
        return self.at(dp=dp, cp=cp)

    @cached_property
    def matrices(self) -> frozenset[Parameter]:
        """The trained matrices of the blocks if the plan's optimizer updates these alone, else none.

        Source: `torch.optim._muon:Muon` (of two dims; others "should be optimized by a standard method").
        """
        if self.plan.kept.others is None:
            return frozenset()
        blocks = [block.parameters for stage in self.stages for block, _ in stage.blocks]
        return frozenset([p for block in blocks for p in trained(block) if len(p.whole_shape) == 2])

    @cached_property
    def partition(self) -> list[list[Parameter]]:
        """ZeroRedundancyOptimizer's partition of the rank's parameters over the data axis.

        Muon's matrices and the rest have an optimizer each.
        """
        every, matrices = self.trained_parameters(), self.matrices
        if not matrices:
            return zero_redundancy_partition(tuple(every), self.plan.n_shards)
        apart = [[p for p in every if (p in matrices) is inside] for inside in (True, False)]
        found = [zero_redundancy_partition(tuple(part), self.plan.n_shards) for part in apart]
        return [[*first, *others] for first, others in zip(*found, strict=True)]

    def stored_dtype(self, parameter: Parameter) -> DType:
        """The type that a parameter is stored in: the precision's, or its own."""
        return stored_dtype(parameter, self.weight_dtype)

    def weight_elements(self, parameter: Parameter) -> int:
        """Elements of a parameter that this rank stores."""
        if not self.plan.fsdp:
            return parameter.n_elements
        n, rank = n_shards(parameter, self.plan), shard_rank(parameter, self.plan, self.rank)
        return shard_elements(parameter, n, rank)

    def padding_elements(self, parameter: Parameter) -> int:
        """Elements that pad this rank's shard of a parameter."""
        n = n_shards(parameter, self.plan)
        return padded_shard_elements(parameter, n) - self.weight_elements(parameter)

    def weight_shape(self, parameter: Parameter) -> Shape:
        """The shape of a parameter as this rank stores it."""
        if not self.plan.fsdp:
            return parameter.shape
        rows = self.weight_elements(parameter) * parameter.shape[0] // parameter.n_elements
        return (rows, *parameter.shape[1:])

    def state_shape(self, parameter: Parameter) -> Shape:
        """The shape of the optimizer's moments of a parameter: SGD's is a clone of the first gradient."""
        clones = self.plan.optimizer == "sgd-momentum" and not self.plan.fsdp
        return parameter.grad_shape if clones else self.weight_shape(parameter)

    def kept_of(self, parameter: Parameter) -> Kept:
        """What the optimizer of a parameter keeps: Muon's of matrices, AdamW's of the rest."""
        kept = self.plan.kept
        return kept if kept.others is None or parameter in self.matrices else KEPT["adamw"]

    def optimizer_states(self, parameter: Parameter) -> list[Buffer]:
        """The optimizer's tensors of a parameter on the device that updates it, as they are made."""
        if self.stages[0].updates_on_host(parameter):
            return []
        of = states_of_own_optimizer if self.options.optimizer_in_backward else states_of
        on_host = not self.stages[0].scalars_on_device
        return of(self.kept_of(parameter), self._weight(parameter), on_host=on_host)

    def _weight(self, parameter: Parameter) -> Weight:
        return Weight(parameter.name, self.state_shape(parameter), self.weight_dtype)

    def is_of_8_bits(self, parameter: Parameter) -> bool:
        """Whether the optimizer's state of a parameter is of eight bits."""
        return is_of_8_bits(self.plan.kept, self.weight_elements(parameter))

    @cached_property
    def maps_of_8_bits(self) -> list[Buffer]:
        """The values of eight bits, of all weights; an optimizer of one weight has its own."""
        narrow = any(self.is_of_8_bits(parameter) for parameter, _ in self.counted_trained_parameters())
        return maps_of(self.plan.kept) if narrow and not self.options.optimizer_in_backward else []

    @property
    def owned(self) -> list[Parameter] | None:
        """The parameters whose optimizer state this rank keeps under ZeRO-1; None: all of them."""
        if self.plan.zero != 1 or not self.plan.ddp:
            return None
        return self.partition[self.plan.place_among_shards(self.rank)]

    @property
    def _updated(self) -> list[tuple[Parameter, int]]:
        """The parameters whose optimizer state this rank keeps, and how many times each occurs."""
        owned = self.owned
        return self.counted_trained_parameters() if owned is None else list(Counter(owned).items())

    @cached_property
    def rest(self) -> Alive:
        """What is alive on the device between steps; offloaded states are the host's."""
        held: Alive = Counter() if self.offloads else self.states.copy()
        held.update(workspace for _, workspace in self.kept_workspaces)
        for more in (
            self.inputs, self.mesh, self.barrier, self.hook_workspaces, self.loss_scale, self.clipping
        ):  # fmt: skip
            if more:
                held.update(more)
        return held

    @cached_property
    def step_counts(self) -> Alive:
        """The optimizer's scalars that stay on the host, as step counts do unless the update is fused.

        Source: `torch.optim.adam:Adam._init_group`, `torch.optim.optimizer:_get_scalar_dtype`.
        """
        found: Alive = Counter()
        if not self.stages[0].scalars_on_device:
            for parameter, n in self._updated:
                scalars = scalars_of(self.kept_of(parameter).scalars, parameter.name)
                found.update(dict.fromkeys(scalars, n))
        return found

    @property
    def loss_scale(self) -> Alive:
        """The loss scaler's scale, and how many steps in a row have not overflowed.

        Source: `torch.amp.grad_scaler:GradScaler._lazy_init_scale_growth_tracker`.
        """
        if not self.plan.formats.loss_scaled:
            return Counter()
        return Counter([buffer_of("loss scale", (), FP32), buffer_of("growth tracker", (), INT32)])

    @cached_property
    def states(self) -> Alive:
        """Weights, padding or DDP's buckets, and the optimizer's state apart from `step_counts`."""
        alive: Alive = Counter(self.maps_of_8_bits)
        dtype = self.weight_dtype
        sharded, in_buckets = self.plan.fsdp, self.plan.ddp
        of_bucket: Kind = "grads" if self.options.gradient_as_bucket_view else "temporaries"
        for parameter, n in self.counted_parameters:
            shape = self.weight_shape(parameter)
            stored = self.stored_dtype(parameter)
            alive[buffer_of(parameter.name, shape, stored, "weights")] = n
            if sharded:
                padding = self.padding_elements(parameter)
                if padding:
                    alive[buffer_of(f"{parameter.name} (padding)", (padding,), stored)] += n
            if not parameter.requires_grad:
                continue
            if in_buckets:
                alive[buffer_of(f"{parameter.name} (DDP bucket)", shape, dtype, of_bucket)] = n
        for parameter, n in self._updated:
            alive.update(dict.fromkeys(self.optimizer_states(parameter), n))
        if self.options.static_graph or self.stages[0].finds_unused:
            n_parameters = sum(n for _, n in self.counted_trained_parameters())
            in_use = buffer_of(IN_USE, (n_parameters,), INT32)
            alive[in_use] += 2 if self.device.on_cpu else 1
        return alive

    @cached_property
    def kept_workspaces(self) -> tuple[tuple[frozenset[Buffer], Buffer], ...]:
        """The workspaces that cuBLAS keeps; none on a rank with neither block nor head."""
        idle = not any(stage.n_blocks or stage.last for stage in self.stages)
        if idle:
            return ()
        forward = [stage.trace.products for stage in self.stages]
        backward = [stage.trace.products_backward for stage in self.stages]
        if self.plan.splits_backward:
            backward += [stage.split.products for stage in self.stages if not stage.first]
        passes = [frozenset[Buffer]().union(*products) for products in (forward, backward)]
        return cublas_workspaces(self.device, self.options.release, passes)

    @property
    def hook_workspaces(self) -> Alive:
        """What cuBLAS keeps for PowerSGD, whose products come to run on every stream of the pool.

        Source: `torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook:powerSGD_hook` (`.then`).
        """
        keeps = not self.device.on_cpu and self.options.release < FREES_WORKSPACES
        if not keeps or self.options.ddp_comm_hook != "powersgd" or self.backend not in NCCL:
            return Counter()
        n_bytes = product_workspace_bytes(self.device, self.options.release)
        return Counter({buffer_of("cuBLAS workspace of a stream", (n_bytes,), UINT8): N_POOL_STREAMS})

    @property
    def mesh(self) -> Alive:
        """The rank numbers of the `DeviceMesh`, which are on the host: counted if the step runs there.

        Source: `torch.distributed.device_mesh:init_device_mesh`.
        """
        world_size = self.plan.world_size
        counted = world_size > 1 and self.device.on_cpu
        ranks = buffer_of("ranks of the mesh", (world_size,), INT32)
        return Counter({ranks: 2 if self.plan.ep > 1 else 1} if counted else ())

    @property
    def barrier(self) -> Alive:
        """The tensor that NCCL's default process group keeps from its first barrier on, in torch 2.15.

        Source: torch/csrc/distributed/c10d/nccl2/ProcessGroupNCCL.cpp (`barrierImpl`).
        """
        keeps = self.backend in NCCL and self.options.release >= (2, 15) and self.plan.world_size > 1
        return Counter([buffer_of("what a barrier sums", (), FP32)] * keeps)

    @property
    def clipping(self) -> Alive:
        """The zero that FSDP1 keeps from its first gradient clipping on.

        Source: `torch.distributed.fsdp.fully_sharded_data_parallel:FullyShardedDataParallel.clip_grad_norm_`.
        """
        clips = self.plan.clip_grad_norm is not None or self.trainer is not None
        keeps = self.stages[0].is_fsdp1 and clips
        return Counter([buffer_of("norm of no gradients", (), FP32)] * keeps)

    @property
    def inputs(self) -> Alive:
        """The step's tokens and targets, and receive buffers: all are kept from step to step."""
        plan = self.plan
        tokens, *others = self.model.inputs(plan.n_micro_batches * plan.micro_batch, plan.seq_len)
        alive: Alive = Counter([tokens] if self.first or isinstance(self.model, TracedModel) else ())
        alive.update(others)
        if self.stages[0].op_context.chunks_head:
            alive[buffer_of(N_TARGETS, (), INT64)] = 1
        if self.trainer is not None:
            alive = Counter(self.trainer.buffers)
        for stage in self:
            alive.update(stage.buffers)
        for stage, (received_input, received_grad) in zip(self.stages, self.received, strict=True):
            if stage.keeps_received and not stage.first:
                alive[received_input] += plan.n_micro_batches
            if stage.keeps_received and not stage.last:
                alive[received_grad] += plan.n_micro_batches
        return alive

    @cached_property
    def received(self) -> list[tuple[Buffer, Buffer]]:
        """Each stage's receive buffers for a micro-batch: its input and its output's gradient."""
        own = [stage.trace.boundary for stage in self.stages]
        names = "received input", "received gradient"
        first, second = ([buffer_of(name, one.shape, one.dtype) for one in own] for name in names)
        return list(zip(first, second, strict=True))

    @property
    def handed_over(self) -> dict[Buffer, Buffer]:
        """Receive buffers that two stages of the rank share, each with the tensor that takes its place.

        Source: `torch.distributed.pipelining.stage:_PipelineStageBase.set_local_fwd_input`,
        `torch.distributed.pipelining.stage:_PipelineStageBase.set_local_bwd_input`.
        """
        found: dict[Buffer, Buffer] = {}
        local = {index: i for i, index in enumerate(self.indices)}
        for index, i in local.items():
            if index + 1 in local and self.stages[i].keeps_received:
                after = local[index + 1]
                found[self.received[after][0]] = self.stages[i].trace.sent
                found[self.received[i][1]] = self.stages[after].trace.boundary_grad
        return found

    @cached_property
    def grads(self) -> Alive:
        """The gradients that the optimizer sees when the backward pass has ended."""
        found: Alive = Counter()
        if self.options.optimizer_in_backward:
            return found
        sharded, dtype = self.plan.fsdp, self.plan.formats.accumulate
        for p, n in self.counted_trained_parameters():
            if self.options.offload_gradients and self.stages[0].updates_on_host(p):
                continue
            shape = (self.weight_elements(p),) if sharded else p.grad_shape
            found[buffer_of(f"{p.name}.grad", shape, dtype, "grads")] = n
        return found
