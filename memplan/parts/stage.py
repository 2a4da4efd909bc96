"""A pipeline stage of a model as engines play it: its trace, its runs of equal blocks, its parameters."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Self, TypeVar

from memplan.device import Device
from memplan.kernels import FREES_WORKSPACES, LT_WORKSPACE_BYTES, Release, product_workspace_bytes
from memplan.models import Layers, Model, TracedModel
from memplan.models.base import Role as BlockRole
from memplan.offload_activations import MOST_STASHED
from memplan.passes.module_calls import Part
from memplan.passes.recorded import recorded
from memplan.passes.split import BlockRuns, SplitTrace, split_traced
from memplan.passes.trace import Block, BlockKind, Segment, Trace, traced, without_blocks
from memplan.plan import Plan
from memplan.record import Event, Free, allocs, frees
from memplan.shapes import INT64, UINT8, Buffer, DType, Parameter, Role, buffer_of
from memplan.tape import USUAL_BACKENDS, Backend, OpContext

T = TypeVar("T")

StageKind = tuple[bool, bool, tuple[Layers, ...]]
"""Whether a stage is the first, whether it is the last, and its blocks."""


class QuicklyCopied:
    """An object of which `copy.copy` takes the attributes, without `__reduce_ex__`, which takes longer."""

    def __copy__(self) -> Self:
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        return other


def trained(parameters: Iterable[Parameter]) -> list[Parameter]:
    """The parameters that require gradients."""
    return [parameter for parameter in parameters if parameter.requires_grad]


def cublas_workspaces(
    device: Device, release: Release, passes: Iterable[frozenset[Buffer]]
) -> tuple[tuple[frozenset[Buffer], Buffer], ...]:
    """The workspaces that cuBLAS keeps, each with the matrix products whose first one allocates it.

    One for the caller's thread (forward passes) and one for autograd's (backward passes), `passes`; in torch
    2.11 also one of cuBLASLt for each, which adds biases. None from 2.15 on.

    Source: aten/src/ATen/cuda/CublasHandlePool.cpp (`getCurrentCUDABlasHandle`,
    `cublas_handle_stream_to_workspace`, `cublaslt_handle_stream_to_workspace`), autograd/engine.cpp
    (`Engine::thread_init`).
    """
    if device.on_cpu or release >= FREES_WORKSPACES:
        return ()
    cublas = buffer_of("cuBLAS workspace", (product_workspace_bytes(device, release),), UINT8)
    lt = buffer_of("cuBLASLt workspace", (LT_WORKSPACE_BYTES,), UINT8)
    found = [(products, cublas) for products in passes]
    if release < (2, 12):
        biased = [frozenset(y for y in own if y.role is Role.BIASED_PRODUCT) for own, _ in found]
        found += [(products, lt) for products in biased if products]
    return tuple(found)


def _first_without_older(
    order: Iterable[tuple[Segment, int]], boundary: Buffer
) -> Iterator[tuple[Segment, int]]:
    """Forward passes that free an older block's input; the first ones do not, as there is none yet.

    One block more does not where the model itself holds the first input, as the first pass then says.
    """
    left = MOST_STASHED + 1
    for segment, n in order:
        frees_older = [
            i for i, e in enumerate(segment.events) if isinstance(e, Free) and e.buffer is boundary
        ]
        left -= bool(frees_older) and left > MOST_STASHED
        first = min(n, left)
        left -= first
        kept = [e for i, e in enumerate(segment.events) if i not in frees_older]
        yield from [each for each in ((Segment(tuple(kept)), first), (segment, n - first)) if each[1]]


class ModelStage(ABC):
    """A pipeline stage of a model under a plan: blocks, and the ends if it is the `first` or the `last`."""

    model: Model
    plan: Plan
    first: bool
    last: bool
    layers: tuple[Layers, ...]
    n_blocks: int

    @property
    @abstractmethod
    def op_context(self) -> OpContext:
        """What the operations of a pass see."""

    @cached_property
    def runs(self) -> BlockRuns:
        """The stage's runs of equal consecutive blocks; a stage without blocks has one run of length 0."""
        recompute, limit = self.plan.recompute, self.plan.recompute_blocks
        left = self.n_blocks if limit is None else limit
        found: list[tuple[BlockKind, int]] = []
        for kind, n in self.layers:
            again = min(n, left) if recompute != "none" else 0
            left -= again
            found += [(BlockKind(kind, recompute), again), (BlockKind(kind, "none"), n - again)]
        none = (BlockKind(self.model.layers[0].kind, recompute), 0)
        return tuple([run for run in found if run[1]]) or (none,)

    def traced(self, kinds: tuple[BlockKind, ...]) -> Trace:
        """The trace of one micro-batch through the stage's ends and a block of each of these kinds."""
        if isinstance(self.model, TracedModel):
            ends = (self.first, self.last) if self.plan.pp > 1 else None
            return recorded(self.model, self.op_context, kinds, ends)
        return traced(
            self.model, self.op_context, first=self.first, last=self.last,
            kinds=kinds, keep_logits=self.plan.pp > 1,
        )  # fmt: skip

    @cached_property
    def _with_blocks(self) -> Trace:
        return self.traced(tuple(dict(self.runs)))

    @cached_property
    def trace(self) -> Trace:
        """The trace of one micro-batch through this kind of stage."""
        return self._with_blocks if self.n_blocks else without_blocks(self._with_blocks)

    @cached_property
    def split(self) -> SplitTrace:
        """The two parts of a split backward pass."""
        return split_traced(self._with_blocks, self.model, self.op_context, last=self.last, runs=self.runs)

    @cached_property
    def blocks(self) -> tuple[tuple[Block, int], ...]:
        """The traced block of each run of equal blocks, and the run's length."""
        return tuple([(self.trace.blocks[kind], n) for kind, n in self.runs])

    @cached_property
    def forward_order(self) -> tuple[tuple[Segment, int], ...]:
        """The blocks' forward passes in order, with counts.

        A stage's first block is listed alone, and so is its last one if the output is sent.
        """
        (entry, n_entry), *others = self.blocks
        order = [(entry.entry, min(1, n_entry)), (entry.forward, n_entry - 1)]
        order += [(block.forward, n) for block, n in others]
        found = [(segment, n) for segment, n in order if n > 0]
        if self.op_context.offloads_activations:
            found = list(_first_without_older(found, self.trace.boundary))
        if found and not self.last:
            last, n = found.pop()
            found += [(last, n - 1)] if n > 1 else []
            found.append((self.trace.sending(last), 1))
        return tuple(found)

    @cached_property
    def block_parameters(self) -> tuple[tuple[tuple[Parameter, ...], int, BlockRole], ...]:
        """The parameters of one block of each run, the run's length, and what its blocks are."""
        known = {kind.kind: block.parameters for kind, block in self.trace.blocks.items()}
        return tuple([(known[kind], n, self.model.role(kind)) for kind, n in self.layers])

    @property
    def counted_parts(self) -> list[tuple[tuple[Parameter, ...], int]]:
        """The parameters of the embedding, of one block of each run, and of the head, with their number."""
        blocks = [(block.parameters, n) for block, n in self.blocks]
        return [(self.trace.embed_parameters, 1), *blocks, (self.trace.head_parameters, 1)]

    @cached_property
    def buffers(self) -> tuple[Buffer, ...]:
        """The module's buffers, such as rotary angles."""
        if isinstance(self.model, TracedModel) and self.plan.pp > 1:
            return tuple(self.model.buffers_beside(self.layers, self.plan.seq_len))
        return (*self.embedding_buffers, *self.model.buffers(self.plan.seq_len))

    @property
    def synchronized_buffers(self) -> list[Buffer]:
        """The buffers that DDP broadcasts from its first rank."""
        return list(self.buffers)

    @property
    def embedding_buffers(self) -> tuple[Buffer, ...]:
        """The embedding's buffers."""
        return self.model.embedding_buffers() if self.first else ()

    def parameters(self) -> list[Parameter]:
        """Every parameter, in the module's order."""
        blocks = [parameter for parameters, n, _ in self.block_parameters for parameter in parameters * n]
        return [*self.trace.embed_parameters, *blocks, *self.trace.head_parameters]

    def modules(self) -> Iterator[tuple[Sequence[Parameter], tuple[Buffer, ...]]]:
        """The parameters and the buffers of its modules in their order: the embedding, blocks, the head."""
        model, head = self.model, self.trace.head_parameters
        yield self.trace.embed_parameters, self.embedding_buffers
        for parameters, n, _ in self.block_parameters:
            yield from [(parameters, ())] * n
        after = model.made_after_buffers
        output = [one for one in head if after and one.name.startswith(f"{after}.")]
        yield [one for one in head if one not in output], model.buffers(self.plan.seq_len)
        yield output, ()


class WholeStage(ModelStage):
    """The whole model on a data-parallel rank, its weights in one type, `dtype`."""

    def __init__(
        self, model: Model, plan: Plan, device: Device, backend: Backend | None, dtype: DType
    ) -> None:
        self.model, self.plan, self.device, self.dtype = model, plan, device, dtype
        self.backend = backend or USUAL_BACKENDS[device.type]
        self.first = self.last = True
        self.layers = model.layers
        self.n_blocks = model.n_blocks

    @cached_property
    def op_context(self) -> OpContext:
        plan = self.plan
        return OpContext(
            device=self.device, backend=self.backend, weight_dtype=self.dtype, micro_batch=plan.micro_batch,
            seq_len=plan.local_seq_len, loss_chunks=plan.loss_chunks,
        )  # fmt: skip

    @cached_property
    def trained(self) -> list[Parameter]:
        """The optimizer's parameters, in the module's order."""
        return trained(self.parameters())

    def placed(self, of_trained: Iterable[T]) -> tuple[dict[Parameter, T], list[dict[Parameter, T]]]:
        """A value for each trained parameter, by parameter: those of both ends, and those of each block."""
        left = iter(of_trained)
        blocks = [own for own, n, _ in self.block_parameters for _ in range(n)]
        parts = [self.trace.embed_parameters, *blocks, self.trace.head_parameters]
        embed, *places, head = [{one: next(left) for one in trained(part)} for part in parts]
        return embed | head, places

    def backward_parts(
        self, ends: dict[Parameter, T], places: Sequence[dict[Parameter, T]]
    ) -> Iterator[Part[T]]:
        """The parts of a backward pass in order, each with values for its parameters, as `placed`."""
        trace, kinds = self.trace, [block for block, n in self.blocks for _ in range(n)]
        yield Part("backward: head", trace.head_backward, ends)
        for i in reversed(range(len(kinds))):
            segment = kinds[i].backward if i else kinds[i].entry_backward
            yield Part("backward: block", segment, places[i], i)
        yield Part("backward: embedding", trace.embed_backward, ends)

    @cached_property
    def weights(self) -> dict[Parameter, Buffer]:
        """Each weight as the module is made with it, and as it stays if it is not trained."""
        types = {one: self.dtype if one.is_floating_point else one.dtype for one in self.parameters()}
        return {one: buffer_of(one.name, one.shape, dtype, "weights") for one, dtype in types.items()}

    @cached_property
    def workspaces(self) -> tuple[tuple[frozenset[Buffer], Buffer], ...]:
        """The workspaces that cuBLAS keeps for forward and for backward passes."""
        passes = (self.trace.products, self.trace.products_backward)
        return cublas_workspaces(self.device, self.op_context.torch_release, passes)

    @cached_property
    def inputs(self) -> list[Buffer]:
        """The step's tokens and targets."""
        batch = self.plan.n_micro_batches * self.plan.micro_batch
        return list(self.model.inputs(batch, self.plan.local_seq_len))

    @property
    def held(self) -> list[Buffer]:
        """What is alive between steps beside weights and optimizer: inputs, buffers, workspaces."""
        return [*self.inputs, *self.buffers, *[workspace for _, workspace in self.workspaces]]

    def make_modules(self) -> Iterator[Event]:
        """Allocates the weights and the buffers of the modules in their order."""
        for parameters, buffers in self.modules():
            yield from allocs(*[self.weights[one] for one in parameters], *buffers)

    def draw_inputs(self) -> Iterator[Event]:
        """Allocates the step's tokens and targets, which memplan's own loop draws as one tensor."""
        batch = self.plan.n_micro_batches * self.plan.micro_batch
        drawn = buffer_of("tokens and targets", (batch, self.plan.seq_len + 1), INT64)
        both = [] if isinstance(self.model, TracedModel) or self.model.computes_loss else [drawn]
        yield from (*allocs(*both, *self.inputs), *frees(*both))
