"""A rank of Megatron-DeepSpeed as BigScience ran it early in 2022: DeepSpeed's pipeline and optimizers.

Each stage has one chunk of the model. DeepSpeed's PipelineEngine sends every activation and gradient in equal
parts of the tensor ranks, which gather them again. Its optimizers flatten the weights in three groups.

Source: bigscience-workshop/Megatron-DeepSpeed at 49d21af2, microsoft/DeepSpeed at 8eef742f0 and, for
BF16_Optimizer, at 824505397.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Final, NamedTuple

from memplan.device import Device
from memplan.engines.base import RankRecord
from memplan.engines.megatron.chunk import ModelChunk
from memplan.models import Model
from memplan.orders import Action, Loop
from memplan.parts.flat import Partitions, Slot, calls_of, slots_of
from memplan.plan import Plan, Rank, stage_layers
from memplan.record import (
    Collective,
    CollectiveKind,
    Event,
    Stretch,
    allocs,
    chain,
    events,
    frees,
    passed,
    repeated,
)
from memplan.replay.program import AllocatorProgram
from memplan.shapes import (
    BF16,
    BOOL,
    FP16,
    FP32,
    FP64,
    Buffer,
    DType,
    Parameter,
    Shape,
    buffer_of,
    n_elements,
)

BUCKET: Final = 500_000_000
"""The elements of a bucket of gradients or of weights (`reduce_bucket_size`, `allgather_bucket_size`)."""


class FlatGroup(NamedTuple):
    """A parameter group of the optimizer, flattened, and this rank's partition of its states.

    Attributes:
        own: what this rank updates: each weight in its partition, and how many of its elements.
        grads: float32 gradients of all weights, where BF16_Optimizer sums them; else None.
        wide: the partition's gradients in float32, while FusedAdam runs.
    """

    slots: list[Slot]
    partitions: Partitions
    own: dict[Slot, int]
    flat: Buffer
    master: Buffer
    moments: tuple[Buffer, Buffer]
    grads: Buffer | None
    wide: Buffer

    @property
    def kept(self) -> tuple[Buffer, ...]:
        """What is alive between steps."""
        return (self.flat, self.master, *self.moments, *([] if self.grads is None else [self.grads]))


def parameter_groups(parameters: Iterable[Parameter]) -> list[list[Parameter]]:
    """The first half of the weights that decay, the second half, and norms and biases, which do not.

    The tied embeddings come first on the last stage too. Their norm is PyTorch's own, whose weight counts as
    one that decays.

    Source: megatron/optimizer/__init__.py (`_get_params_for_weight_decay_optimization`) at 541b967f.
    """
    decaying, others = list[Parameter](), list[Parameter]()
    for p in sorted(parameters, key=lambda p: not p.name.startswith("embedding.")):
        decays = len(p.shape) > 1 or p.name == "embedding.word_embeddings.norm.weight"
        (decaying if decays else others).append(p)
    half = len(decaying) // 2
    return [group for group in (decaying[:half], decaying[half:], others) if group]


class DeepSpeedRank:
    """One rank: its stage, the flat groups of its weights, and its step.

    A gradient that is sent back is freed at once, and not with the next micro-batch's forward pass.

    Neglects: the weights of the embeddings' norm on the last stage, the sum of tied gradients, scalars.
    """

    def __init__(self, model: Model, plan: Plan, rank: Rank, device: Device) -> None:
        self.plan, self.rank = plan, rank
        self.layers = stage_layers(model.n_blocks, plan, rank.pp)
        first, last = rank.pp == 0, rank.pp == plan.pp - 1
        self.chunk = ModelChunk(model, plan, device, first=first, last=last, layers=self.layers)
        self.dtype: DType = self.chunk.params_dtype
        self.sums_in_fp32 = plan.zero == 0
        """Whether the optimizer is BF16_Optimizer, which sums gradients in float32."""
        found = self.chunk.trace.gradients()
        self.grads = [found[p] for p in self.chunk.parameters()]
        """The gradient of each weight, as autograd makes it."""
        self.sent_part = self._part("part of the output")
        self.whole_input = self._whole("input in the pipeline's buffer")
        self.went_back = False

    @cached_property
    def groups(self) -> list[FlatGroup]:
        """The optimizer's groups in order."""
        return [self._group(slots_of(own)) for own in parameter_groups(self.chunk.parameters())]

    def _group(self, slots: list[Slot]) -> FlatGroup:
        partitions = Partitions(slots, self.plan.dp)
        n, size = partitions.n_elements, partitions.size
        return FlatGroup(
            slots, partitions, partitions.slices(self.rank.dp),
            buffer_of("flat weights", (n,), self.dtype, "weights"),
            buffer_of("float32 partition", (size,), FP32, "optimizer"),
            (buffer_of("exp_avg", (size,), FP32, "optimizer"),
             buffer_of("exp_avg_sq", (size,), FP32, "optimizer")),
            buffer_of("flat float32 gradients", (n,), FP32, "grads") if self.sums_in_fp32 else None,
            buffer_of("float32 gradients of the partition", (size,), FP32, "grads"),
        )  # fmt: skip

    @cached_property
    def constants(self) -> list[Buffer]:
        """The causal mask, each layer's ALiBi, and what the pipeline receives into.

        Source: pretrain_gpt.py (`model_provider`), megatron/model/transformer.py (`_build_alibi_tensor`).
        """
        plan, chunk = self.plan, self.chunk
        found = [buffer_of("attn_mask", (1, 1, plan.seq_len, plan.seq_len), BOOL)]
        if chunk.model.position_embedding_type == "alibi":
            heads = plan.micro_batch * chunk.model.heads.n
            found += [buffer_of("alibi", (heads, 1, plan.seq_len), self.dtype)] * chunk.n_layers
        found += [self._part("pipe_recv_buf")] * (not chunk.first)
        return found + [self._part("grad_layer")] * (not chunk.last)

    def _part(self, name: str) -> Buffer:
        """This tensor rank's part of an activation, or of its gradient."""
        return buffer_of(name, (n_elements(self.chunk.trace.boundary.shape) // self.plan.tp,), self.dtype)

    def _whole(self, name: str) -> Buffer:
        return buffer_of(name, self.chunk.trace.boundary.shape, self.dtype, "activations")

    def _gathered(self, what: str, found: Buffer) -> Iterator[Event]:
        """An activation gathered from the parts of the tensor ranks: NCCL's copy, then another one.

        Source: deepspeed/runtime/utils.py (`PartitionedTensor.full`), torch/csrc/distributed/c10d
        (`ProcessGroupNCCL::allgather`: `flatten_for_scatter_gather`).
        """
        flat, received = self._whole("flat tensor"), self._whole("flattened outputs")
        gathered = Collective(kind="all_gather", axis="tp", what=what, payload_bytes=flat.n_bytes)
        yield from (*allocs(flat, received), gathered, *frees(received), *allocs(found), *frees(flat))

    @cached_property
    def forward(self) -> Stretch:
        """Receive, forward pass, and send: plays `_exec_recv_activations` to `_exec_send_activations`.

        With tensor parallelism each rank keeps its part of the output. Without it, the rank keeps the whole
        output and a copy of the input.
        """
        chunk, received, sent = self.chunk, list[Event](), list[Event]()
        if not chunk.first and self.plan.tp > 1:
            part = self._part("received part")
            gathered = self._gathered("activations", chunk.input)
            received += [*allocs(part, part), *gathered, *frees(part, part)]
        elif not chunk.first:
            received += allocs(self.whole_input, chunk.input)
        if not chunk.last and self.plan.tp > 1:
            sent += [*allocs(self.sent_part), *chunk.trace.release.events]
        return passed(
            0, "forward", chunk.recv_forward, events("receive", received), chunk.forward,
            events("partition the output", sent), chunk.send_forward,
        )  # fmt: skip

    def _backward(self, *, first: bool) -> Stretch:
        """Receive a gradient, backward pass, and send: plays `_exec_recv_grads` to `_exec_send_grads`.

        The output is gathered again for the pass. BF16_Optimizer drops the gradients of the pass before, and
        adds those of this pass to its own in float32, one after the other.
        """
        chunk, restored = self.chunk, self._whole("output, gathered again")
        received, sent = list[Event](), list[Event]()
        if not chunk.last and self.plan.tp > 1:
            received += self._gathered("activations", restored)
            received += self._gathered("activation gradients", chunk.output_grad)
            sent += frees(chunk.output_grad, restored, self.sent_part)
        elif not chunk.last:
            received += allocs(chunk.output_grad)
            sent += [*frees(chunk.output_grad), *chunk.trace.release.events]
        summed = list[Event]()
        if self.sums_in_fp32:
            received += frees(*self.grads)
            for grad in self.grads:
                wide = buffer_of("gradient in float32", grad.shape, FP32)
                summed += (*allocs(wide), *frees(wide))
        if not chunk.first:
            part = self._part("part of a gradient")
            sent += (*allocs(part), *frees(part, chunk.input, chunk.input_grad))
            sent += frees(self.whole_input) if self.plan.tp == 1 else ()
        backward = chunk.first_backward if first or self.sums_in_fp32 else chunk.backward
        return passed(
            0, "backward", chunk.recv_backward, events("receive", received), backward,
            events("update_hp_grads", summed), events("drop the buffers", sent), chunk.send_backward,
        )  # fmt: skip

    @cached_property
    def backward(self) -> Stretch:
        """The backward pass of a micro-batch but the first."""
        return self._backward(first=False)

    @cached_property
    def first_backward(self) -> Stretch:
        """The step's first backward pass, which makes the gradients."""
        return self._backward(first=True)

    def _passes(self, loop: Loop) -> list[Stretch]:
        """The passes of a loop in order; repetitions before which a backward pass has been are counted."""
        found, left = list[Stretch](), loop.times
        while left:
            before, parts = self.went_back, list[Stretch]()
            for part in loop.parts:
                parts += [self._act(part)] if isinstance(part, Action) else self._passes(part)
            if self.went_back == before:
                return [*found, repeated(chain("actions", *parts), left)]
            found, left = found + parts, left - 1
        return found

    def _act(self, action: Action) -> Stretch:
        if action.kind == "forward":
            return self.forward
        found = self.backward if self.went_back else self.first_backward
        self.went_back = True
        return found

    def _data_parallel(self, kind: CollectiveKind, what: str, n_bytes: int) -> list[Collective]:
        """A collective over the data-parallel ranks, if there are several."""
        found = Collective(kind=kind, axis="dp", what=what, payload_bytes=n_bytes)
        return [found] * (self.plan.dp > 1)

    def _reduced_in_16_bits(self) -> Iterator[Event]:
        """The gradients, flattened in buckets and reduced; bfloat16 is cast to float16 for that.

        Only gradients in the rank's partition stay.

        Source: deepspeed/runtime/zero/stage_1_and_2.py (`reduce_gradients`, `allreduce_bucket`).
        """
        bucket = list[Slot]()

        def reduced() -> Iterator[Event]:
            n = sum([slot.n_elements for slot in bucket])
            copies = [buffer_of("flattened gradients", (n,), self.dtype)] * (len(bucket) > 1)
            copies += [buffer_of("gradients as float16", (n,), FP16)] * (self.dtype == BF16)
            yield from allocs(*copies)
            yield from self._data_parallel("all_reduce", "gradients", n * self.dtype.itemsize)
            yield from frees(*copies)
            bucket.clear()

        for slot in [slot for group in self.groups for slot in group.slots]:
            if sum([one.n_elements for one in bucket]) + slot.n_elements > BUCKET:
                yield from reduced()
            bucket.append(slot)
        yield from reduced()
        yield from frees(*[self._grad(slot) for g in self.groups for slot in g.slots if slot not in g.own])

    def _grad(self, slot: Slot) -> Buffer:
        return self.chunk.trace.gradients()[slot.parameter]

    def _reduced_in_32_bits(self) -> Iterator[Event]:
        """The flat float32 gradients, reduced as copies in bfloat16.

        Source: deepspeed/runtime/engine.py (`allreduce_bucket`: `communication_data_type`).
        """
        flat = [group.partitions.n_elements for group in self.groups]
        for call in calls_of(flat, BUCKET):
            copy = buffer_of("gradients as bfloat16", (sum(call),), BF16)
            joined = [buffer_of("flattened gradients", (sum(call),), FP32)] * (len(call) > 1)
            yield from allocs(*joined, copy)
            yield from self._data_parallel("all_reduce", "gradients", copy.n_bytes)
            yield from frees(copy, *joined)

    def _in_float32(self) -> Iterator[Event]:
        """Overflow and norm of the partition's gradients, which then become float32 ones.

        Source: deepspeed/runtime/zero/stage_1_and_2.py (`DeepSpeedZeroOptimizer.step`).
        """
        for group in self.groups:
            yield from self._one_by_one("gradient as float32", group.own.values(), FP32)
        for group in self.groups:
            yield from self._one_by_one("gradient as float64", group.own.values(), FP64)
            size: Shape = (group.partitions.size,)
            padded = sum(group.own.values()) < group.partitions.size
            flat = [buffer_of("flattened gradients", size, self.dtype)] * (len(group.own) + padded > 1)
            yield from allocs(*flat, group.wide)
            yield from frees(*flat, *map(self._grad, group.own))

    def _one_by_one(self, name: str, sizes: Iterable[int], dtype: DType) -> Iterator[Event]:
        for n in sizes:
            wide = buffer_of(name, (n,), dtype)
            yield from (*allocs(wide), *frees(wide))

    def _updated(self) -> Iterator[Event]:
        """The gather of the updated weights, in parts that NCCL's calls receive into copies.

        Assumes: each part is there before the next is asked for, as with CUDA_LAUNCH_BLOCKING=1.

        Source: deepspeed/runtime/zero/stage_1_and_2.py (`step`), deepspeed/runtime/utils.py
        (`all_gather_dp_groups`).
        """
        for group in self.groups:
            size = group.partitions.size
            n_parts = max(1, size * self.plan.dp // BUCKET)
            for i in range(n_parts):
                own = size // n_parts if i < n_parts - 1 else size - (n_parts - 1) * (size // n_parts)
                received = buffer_of("flattened outputs", (own * self.plan.dp,), self.dtype)
                yield from allocs(received)
                yield from self._data_parallel("all_gather", "weights", received.n_bytes)
                yield from frees(received)

    def _update(self) -> Stretch:
        if self.sums_in_fp32:
            return events("update", [*self._reduced_in_32_bits(), *self._updated()])
        wide = [group.wide for group in self.groups]
        before = *self._reduced_in_16_bits(), *self._in_float32()
        return events("update", [*before, *frees(*wide), *self._updated()])

    def step(self) -> Stretch:
        """A step: all passes, then the update."""
        plan, chunk = self.plan, self.chunk
        order = plan.pipeline_schedule.order(plan.pp, self.rank.pp, 1, plan.n_micro_batches)
        self.went_back = False
        passes = self._passes(order)
        losses = [chunk.report] * (plan.n_micro_batches * chunk.last)
        return chain("step", *passes, events("losses", frees(*losses)), self._update())

    def _setup(self) -> Iterator[Event]:
        """The module's weights, which each group's flat buffer replaces, then the optimizer's states.

        ZeRO moves a group to the host first; BF16_Optimizer flattens it on the GPU.

        Source: deepspeed/runtime/zero/stage_1_and_2.py and bf16_optimizer.py (`__init__`,
        `initialize_optimizer_states`).
        """
        weights = {p: buffer_of(p.name, p.shape, self.dtype, "weights") for p in self.chunk.parameters()}
        yield from allocs(*[weights[p] for p in self.chunk.parameters()], *self.constants)
        for group in self.groups:
            own = [weights[slot.parameter] for slot in group.slots]
            clone = buffer_of("clone", group.master.shape, self.dtype)
            yield from () if self.sums_in_fp32 else frees(*own)
            yield from allocs(group.flat)
            yield from frees(*own) if self.sums_in_fp32 else ()
            yield from (*allocs(clone, group.master), *frees(clone))
            yield from allocs(*[] if group.grads is None else [group.grads])
        zeros = [buffer_of("zero gradients", group.master.shape, FP32) for group in self.groups]
        yield from allocs(*[] if self.sums_in_fp32 else zeros, *[m for g in self.groups for m in g.moments])
        yield from frees(*[] if self.sums_in_fp32 else zeros)

    @property
    def record(self) -> RankRecord:
        """The rank's record."""
        step = self.step()
        left = Counter(self.grads if self.sums_in_fp32 else ())
        of_optimizer = [group.grads for group in self.groups if group.grads is not None] or self.grads
        return RankRecord(
            rank=self.rank,
            layers=(self.layers,),
            rest=Counter([*[one for group in self.groups for one in group.kept], *self.constants]) + left,
            step=step,
            grads=Counter(of_optimizer),
            update=step.parts[-1:],
            program=self.program,
        )

    def program(self) -> AllocatorProgram:
        """The rank's allocations and frees; nothing empties the cache between the set-up and the steps."""
        chunk = self.chunk
        return AllocatorProgram(
            setup=(),
            start=tuple(self._setup()),
            step=self.step(),
            kept=Counter(self.grads if self.sums_in_fp32 else ()),
            update_name="update",
            handed_on=frozenset([chunk.trace.boundary]),
            oldest_first=frozenset([chunk.input, chunk.input_grad, chunk.output_grad]),
        )
