"""What stock PyTorch keeps alive, and when: DDP, ZeroRedundancyOptimizer, FSDP2, pipelining.

A step is a chain of stretches (see `memplan.timeline`) around the traced forward and backward pass of one
micro-batch. Rules of the gloo backend belong to the "cpu" device, where collectives keep scratch of their
own; on "cuda" NCCL works in place.

Source: torch/nn/parallel/distributed.py, torch/distributed/optim/zero_redundancy_optimizer.py,
torch/distributed/fsdp/_fully_shard, torch/distributed/pipelining.
"""

from collections import Counter
from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Final

from memplan.engines.sharding import padded_shard_elements, shard_elements, zero_redundancy_partition
from memplan.engines.trace import Segment, Trace, traced
from memplan.models import Llama, Model
from memplan.plan import Plan, stage_layers
from memplan.shapes import (
    BF16,
    COMPLEX64,
    FP32,
    INT64,
    Buffer,
    DType,
    Event,
    Kind,
    Parameter,
    Shape,
    n_elements,
)
from memplan.tape import Device, Setting
from memplan.timeline import Alive, Stretch, chain, events, repeated

MOMENTS: Final = {"sgd": (), "sgd-momentum": ("momentum",), "adam": ("exp_avg", "exp_avg_sq"),
                  "adamw": ("exp_avg", "exp_avg_sq")}  # fmt: skip
"""What each optimizer keeps per weight, in the weight's type; Adam also counts steps in a float32 scalar.

Adam's moments are like the weight, SGD's momentum is a clone of the first gradient.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """A place on the mesh."""

    pp: int = 0
    dp: int = 0
    tp: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimeline:
    """One rank's step: what is alive between steps, what it allocates and frees, the gradients it makes."""

    rest: Alive
    step: Stretch
    grads: Alive

    @property
    def rest_bytes(self) -> int:
        """Bytes alive between steps."""
        return sum(n * buffer.n_bytes for buffer, n in self.rest.items())

    @property
    def peak_bytes(self) -> int:
        """Bytes alive at the worst instant."""
        return self.rest_bytes + self.step.high_bytes


def _buffer(name: str, shape: Shape, dtype: DType, kind: Kind = "temporaries") -> Buffer:
    return Buffer(name, shape, dtype, n_elements(shape) * dtype.itemsize, kind)


def _alloc(*buffers: Buffer) -> tuple[Event, ...]:
    return tuple(Event(1, b) for b in buffers)


def _free(*buffers: Buffer) -> tuple[Event, ...]:
    return tuple(Event(-1, b) for b in buffers)


def _added_to_older(segment: Segment) -> tuple[Event, ...]:
    """The segment's events where every gradient is added in place to an older one, and so freed at once."""
    found: list[Event] = []
    for event in segment.events:
        found.append(event)
        if event.parameter is not None:
            found.append(Event(-1, event.buffer))
    return tuple(found)


class Stage:
    """One rank of one pipeline stage under a plan."""

    def __init__(self, model: Model, plan: Plan, rank: Rank, device: Device) -> None:
        self.model = model
        self.plan = plan
        self.rank = rank
        self.device = device
        self.first = rank.pp == 0
        self.last = rank.pp == plan.pp - 1
        self.n_blocks = len(stage_layers(model.n_layers, plan.pp, rank.pp))
        self.fsdp = plan.zero >= 2 and plan.dp > 1
        self.ddp = plan.zero <= 1 and plan.dp > 1
        self.weight_dtype = BF16 if plan.precision == "bf16" else FP32

    def alike(self, other: "Rank") -> bool:
        """Whether a rank of another stage has the same ends, as many blocks, and so the same passes."""
        plan, layers = self.plan, self.model.n_layers
        return (
            (other.dp, other.tp) == (self.rank.dp, self.rank.tp)
            and (other.pp == 0, other.pp == plan.pp - 1) == (self.first, self.last)
            and len(stage_layers(layers, plan.pp, other.pp)) == self.n_blocks
        )

    def moved(self, rank: Rank) -> "Stage":
        """The stage of an `alike` rank: everything but the schedule is the same."""
        other = copy(self)
        other.rank = rank
        return other

    @cached_property
    def ends(self) -> tuple[Parameter, ...]:
        """The parameters outside the blocks: FSDP2's root unit."""
        return self.trace.embed_parameters + self.trace.head_parameters

    @cached_property
    def setting(self) -> Setting:
        """What the operations see: FSDP2 hands them weights in the compute type, autocast copies them."""
        plan = self.plan
        mixed = plan.precision == "bf16-mixed"
        return Setting(
            device=self.device,
            weight_dtype=BF16 if mixed and self.fsdp else self.weight_dtype,
            autocast=mixed and not self.fsdp,
            tp=plan.tp,
            sequence_parallel=plan.sequence_parallel,
            local_grads=self.ddp,
            micro_batch=plan.micro_batch,
            seq_len=plan.seq_len,
        )

    @cached_property
    def trace(self) -> Trace:
        """One micro-batch through this kind of stage."""
        recompute = self.plan.recompute == "full"
        return traced(
            self.model, self.setting, first=self.first, last=self.last, recompute=recompute,
            keep_logits=self.plan.pp > 1,
        )  # fmt: skip

    def on_fullest_rank(self) -> "Stage":
        """The stage on the rank that holds most: ZeRO-1 deals out tensors, shards are fullest first."""
        if self.owned is None:
            return self
        names, itemsize = MOMENTS[self.plan.optimizer], self.weight_dtype.itemsize
        per_element, per_tensor = len(names) * itemsize, FP32.itemsize if len(names) == 2 else 0
        sizes = [
            sum([p.n_elements for p in owned]) * per_element + len(owned) * per_tensor
            for owned in self.partition
        ]
        fullest = sizes.index(max(sizes))
        if fullest == self.rank.dp:
            return self
        other = self.moved(Rank(pp=self.rank.pp, dp=fullest, tp=self.rank.tp))
        other.owned = self.partition[fullest]
        return other

    @cached_property
    def partition(self) -> list[list[Parameter]]:
        """ZeroRedundancyOptimizer's partition of the stage's parameters over the data axis."""
        return zero_redundancy_partition(self.parameters(), self.plan.dp)

    def parameters(self) -> list[Parameter]:
        """Every parameter of the stage, in the module's order."""
        trace = self.trace
        return [*trace.embed_parameters, *trace.block_parameters * self.n_blocks, *trace.head_parameters]

    # States at rest

    def weight_elements(self, parameter: Parameter) -> int:
        """Elements of a parameter that this rank stores."""
        return shard_elements(parameter, self.plan.dp, self.rank.dp) if self.fsdp else parameter.n_elements

    @cached_property
    def owned(self) -> list[Parameter] | None:
        """The parameters whose optimizer state this rank keeps under ZeRO-1; None: all of them."""
        if self.plan.zero != 1 or not self.ddp:
            return None
        return self.partition[self.rank.dp]

    def counted_parameters(self) -> list[tuple[Parameter, int]]:
        """Every parameter of the stage and how many times it occurs."""
        blocks = [(p, self.n_blocks) for p in self.trace.block_parameters]
        return (
            [(p, 1) for p in self.trace.embed_parameters]
            + blocks
            + [(p, 1) for p in self.trace.head_parameters]
        )

    @cached_property
    def rest(self) -> Alive:
        """What is alive between steps."""
        alive: Alive = Counter()
        dtype, names = self.weight_dtype, MOMENTS[self.plan.optimizer]
        owned = Counter(self.owned) if self.owned is not None else None
        for parameter, n in self.counted_parameters():
            elements = self.weight_elements(parameter)
            shape = parameter.shape
            if self.fsdp:
                shape = (elements * shape[0] // parameter.n_elements, *shape[1:])
            alive[_buffer(parameter.name, shape, dtype, "weights")] += n
            if self.fsdp:
                padding = padded_shard_elements(parameter, self.plan.dp) - elements
                if padding:
                    alive[_buffer(f"{parameter.name} (padding)", (padding,), dtype)] += n
            if self.ddp:
                alive[_buffer(f"{parameter.name} (DDP bucket)", shape, dtype)] += n
            kept = n if owned is None else owned[parameter]
            if kept:
                like = parameter.grad_shape if names == ("momentum",) and not self.fsdp else shape
                for name in names:
                    alive[_buffer(f"{parameter.name}.{name}", like, dtype, "optimizer")] += kept
                if len(names) == 2:
                    alive[_buffer(f"{parameter.name}.step", (), FP32, "optimizer")] += kept
        self._rest_of_inputs(alive)
        return alive

    def _rest_of_inputs(self, alive: Alive) -> None:
        plan, model = self.plan, self.model
        batch = (plan.n_micro_batches * plan.micro_batch, plan.seq_len)
        if self.first:
            alive[_buffer("tokens", batch, INT64)] += 1
        alive[_buffer("targets", batch, INT64)] += 1
        if isinstance(model, Llama):
            alive[_buffer("rotation", (plan.seq_len, model.d_head // 2), COMPLEX64)] += 1
        boundary = self.trace.boundary
        if not self.first:
            alive[_buffer("received input", boundary.shape, boundary.dtype)] += plan.n_micro_batches
        if not self.last:
            alive[_buffer("received gradient", boundary.shape, boundary.dtype)] += plan.n_micro_batches

    # The step

    def timeline(self) -> StageTimeline:
        """What is alive at rest, and the step."""
        step = chain("step", *schedule(self, self.passes), self.update)
        return StageTimeline(rest=self.rest, step=step, grads=self.grads)

    @cached_property
    def passes(self) -> "Passes":
        """Its forward and backward passes."""
        return ShardedPasses(self) if self.fsdp else Passes(self)

    @cached_property
    def grads(self) -> Alive:
        """The gradients that the optimizer sees."""
        found: Alive = Counter()
        for parameter, n in self.counted_parameters():
            shape: Shape = (self.weight_elements(parameter),) if self.fsdp else parameter.grad_shape
            found[_buffer(f"{parameter.name}.grad", shape, self.weight_dtype, "grads")] += n
        return found

    @cached_property
    def update(self) -> Stretch:
        """The optimizer's temporaries: Adam's denominator and its square root, one parameter at a time.

        The last parameter's denominator lives until the next one's is made.

        Source: torch/optim/adam.py (`_single_tensor_adam`).
        """
        if len(MOMENTS[self.plan.optimizer]) < 2:
            return events("optimizer step", self._cut_grads())
        sizes = self._update_sizes()
        if self.device == "cuda":
            return events("optimizer step", self._foreach(sizes))
        found: list[Event] = []
        before: Buffer | None = None
        for name, elements in sizes:
            root = _buffer(f"{name} (square root)", (elements,), self.weight_dtype)
            denominator = _buffer(f"{name} (denominator)", (elements,), self.weight_dtype)
            found += _alloc(root, denominator)
            found += _free(root) if before is None else _free(root, before)
            before = denominator
        if before is not None:
            found += _free(before)
        return events("optimizer step", found)

    def _cut_grads(self) -> list[Event]:
        """A gradient that is whole beside a divided weight is cut while the optimizer reads it."""
        found: list[Event] = []
        for parameter in () if self.fsdp else self.ends:
            if parameter.grad_shape != parameter.shape:
                part = _buffer(f"{parameter.name}.grad (own rows)", parameter.shape, self.weight_dtype)
                found += [*_alloc(part), *_free(part)]
        return found

    def _update_sizes(self) -> list[tuple[str, int]]:
        if self.owned is not None:
            return [(p.name, p.n_elements) for p in self.owned]
        block = [(p.name, self.weight_elements(p)) for p in self.trace.block_parameters]
        embed = [(p.name, self.weight_elements(p)) for p in self.trace.embed_parameters]
        head = [(p.name, self.weight_elements(p)) for p in self.trace.head_parameters]
        return embed + block * min(self.n_blocks, 2) + head

    def _foreach(self, sizes: list[tuple[str, int]]) -> list[Event]:
        """torch/optim/adam.py (`_multi_tensor_adam`): the square roots of all parameters at once."""
        every = sum(n * self.weight_elements(p) for p, n in self.counted_parameters())
        if self.owned is not None:
            every = sum(p.n_elements for p in self.owned)
        roots = _buffer("square roots of all second moments", (every,), self.weight_dtype)
        return [*_alloc(roots), *_free(roots)]


def _from_outside(found: Iterable[Event]) -> tuple[Event, ...]:
    """Events of the block that another rank's gradient comes in at: its sum takes a new tensor."""
    return tuple(Event(1, e.buffer) if e.sign == 0 and e.parameter is None else e for e in found)


class Passes:
    """Forward and backward of one micro-batch where every rank has the weights whole (DDP, or one rank)."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.trace = stage.trace
        self._made: dict[tuple[str, bool, bool, bool], Stretch] = {}

    def forward(self, *, first: bool, unsharded: bool = False, releases: bool = False) -> Stretch:
        """The forward pass up to the loss.

        `first` of the step; `unsharded`: FSDP2 finds the blocks' weights whole; `releases`: the schedule
        drops the micro-batch before once it has the new output.
        """
        key = "forward", first, unsharded, releases
        if key not in self._made:
            self._made[key] = self._forward(first, unsharded, self.release() if releases else None)
        return self._made[key]

    def backward(self, *, first: bool, last: bool, unsharded: bool = False) -> Stretch:
        """The backward pass; `first` and `last` of the step."""
        key = "backward", first, last, unsharded
        if key not in self._made:
            self._made[key] = self._backward(first, unsharded)
        return self._made[key]

    def _forward(self, first: bool, unsharded: bool, release: Stretch | None) -> Stretch:
        trace, n = self.trace, self.stage.n_blocks
        return chain(
            "forward",
            events("forward: embedding", trace.embed.events),
            events("forward: block", trace.entry_block.events),
            repeated(events("forward: block", trace.block.events), n - 1),
            *self._forward_end(release),
        )

    def _forward_end(self, release: Stretch | None) -> list[Stretch]:
        trace, n = self.trace, self.stage.n_blocks
        parts = []
        if self.stage.last:
            parts.append(events("forward: head", trace.head.events))
        if self.stage.setting.autocast:
            parts.append(events("forward: end of autocast", trace.embed_casts.events))
            parts.append(repeated(events("forward: end of autocast", trace.block_casts.events), n))
            parts.append(events("forward: end of autocast", trace.head_casts.events))
        if release is not None:
            parts.append(release)
        if self.stage.last:
            parts.append(events("loss", trace.loss.events))
        return parts

    def _backward(self, first: bool, unsharded: bool) -> Stretch:
        trace, n = self.trace, self.stage.n_blocks
        return chain(
            "backward",
            events("backward: loss and head", self.added(trace.head_backward, first)),
            *self._blocks(first, n),
            events("backward: embedding", self.added(trace.embed_backward, first)),
            *self._sent(first),
        )

    def added(self, segment: Segment, first: bool) -> tuple[Event, ...]:
        """A backward segment's events: gradients are kept in the `first` pass of a step, added after."""
        return segment.events if first else _added_to_older(segment)

    def _blocks(self, first: bool, n: int) -> list[Stretch]:
        inner = self.added(self.trace.block_backward, first)
        entry = self.added(self.trace.entry_block_backward, first)
        outer = entry if n == 1 else inner
        parts = [events("backward: block", outer if self.stage.last else _from_outside(outer))]
        if n > 1:
            parts.append(repeated(events("backward: block", inner), n - 2))
            parts.append(events("backward: block", entry))
        return parts

    @property
    def keeps_sent(self) -> bool:
        """Whether sent tensors live to the schedule's end: GPipe keeps the handles, gloo's the tensors."""
        return self.stage.plan.schedule == "gpipe" and self.stage.device == "cpu"

    def _sent(self, first: bool) -> list[Stretch]:
        """The gradient sent to the stage before is held until the next one is made."""
        if self.stage.first or first or self.keeps_sent:
            return []
        return [events("backward: embedding", self.trace.release_input_grad.events)]

    def release(self) -> Stretch:
        """What the schedule still holds of a micro-batch: a stage's output."""
        return events("release of the stage's output", self.trace.release.events)

    def end(self) -> list[Stretch]:
        """What the schedule drops when it returns, and the reductions it has put off."""
        m, name = self.stage.plan.n_micro_batches, "end of the schedule"
        parts = []
        if self.keeps_sent and not self.stage.last:
            parts.append(repeated(events(name, self.trace.release.events), m))
        if not self.stage.first:
            sent = events(name, self.trace.release_input_grad.events)
            parts.append(repeated(sent, m if self.keeps_sent else 1))
        return parts


class Unit:
    """One FSDP2 unit: parameters gathered and reduced together.

    `dp` ranks each hold padded shards, so that the flat buffers are dp times the largest shard.
    """

    def __init__(self, stage: Stage, name: str, parameters: Iterable[Parameter]) -> None:
        self.stage = stage
        plan = stage.plan
        parameters = list(parameters)
        n = plan.dp
        compute = stage.setting.weight_dtype
        reduce = FP32 if plan.precision == "bf16-mixed" else stage.weight_dtype
        self.parameters = parameters
        shards = [padded_shard_elements(p, n) for p in parameters]
        self.padding = {p: n * s - p.n_elements for p, s in zip(parameters, shards, strict=True)}
        self.flat = _buffer(f"{name} (all-gather output)", (n * sum(shards),), compute)
        self.scratch = _buffer(f"{name} (gloo scratch)", (n * sum(shards),), compute)
        self.cast = _buffer(f"{name} (own shards as {compute.name})", (sum(shards),), compute)
        self.casting = compute != stage.weight_dtype
        self.unsharded = [
            _buffer(f"{p.name} (unsharded)", (n * s,), compute)
            for p, s in zip(parameters, shards, strict=True)
        ]
        self.reduce_input = _buffer(f"{name} (reduce-scatter input)", (n * sum(shards),), reduce)
        self.reduce_scratch = _buffer(f"{name} (gloo scratch)", (n * sum(shards),), reduce)
        self.reduced = _buffer(f"{name}.grad (sharded)", (sum(shards),), reduce, "grads")
        self.added = _buffer(f"{name}.grad (to be added)", (sum(shards),), reduce)

    def gather(self) -> tuple[Event, ...]:
        """All-gather into one flat buffer."""
        scratch: tuple[Event, ...] = ()
        if self.stage.device == "cpu":
            scratch = (*_alloc(self.scratch), *_free(self.scratch)) * 2
        if self.casting:
            return (*_alloc(self.cast, self.flat), *scratch, *_free(self.cast))
        return (*_alloc(self.flat), *scratch)

    def copy_out(self, stale: "Unit | None") -> tuple[Event, ...]:
        """Copy the flat buffer into the parameters; the flat buffer gathered before it is dropped then."""
        return (*_alloc(*self.unsharded), *(_free(stale.flat) if stale is not None else ()))

    def reshard(self) -> tuple[Event, ...]:
        """Free the unsharded parameters."""
        return _free(*self.unsharded)

    def reduce(
        self, grads: dict[Parameter, Buffer], stale: "Unit | None", *, first: bool
    ) -> tuple[Event, ...]:
        """Reduce-scatter the unsharded gradients; the input of the one before is dropped first.

        The last gradient is held until the end by the loop that collected them. Gradients whose rows do not
        divide evenly are copied into padded ones, all at once; where gradients are widened on the way in, CPU
        copies each of them once more. A unit without parameters (the root of a stage between others) has
        nothing to reduce.

        Source: torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py (`foreach_reduce`),
        aten/src/ATen/native/TensorShape.cpp (`_chunk_cat`).
        """
        in_order = [grads[p] for p in self.parameters]
        if not in_order:
            return (*(_free(stale.reduce_input) if stale is not None else ()), *_alloc(self.reduce_input))
        scratch: tuple[Event, ...] = ()
        if self.stage.device == "cpu":
            scratch = (*_alloc(self.reduce_scratch), *_free(self.reduce_scratch))
        output = self.reduced if first else self.added
        widens = self.stage.device == "cpu" and self.reduced.dtype != in_order[-1].dtype
        copies = [e for grad in in_order for e in (*_alloc(grad), *_free(grad))] if widens else []
        padded = [
            _buffer(f"{p.name}.grad (padded)", (p.n_elements + self.padding[p],), grads[p].dtype)
            for p in self.parameters
            if self.padding[p]
        ]
        return (
            *(_free(stale.reduce_input) if stale is not None else ()),
            *_alloc(self.reduce_input, *padded),
            *copies,
            *_free(*padded),
            *_free(*in_order[:-1]),
            *_alloc(output),
            *scratch,
            *_free(in_order[-1]),
            *(() if first else _free(output)),
        )


class ShardedPasses(Passes):
    """Forward and backward of one micro-batch under FSDP2: each block a unit, the ends the root unit.

    Without a pipeline, every backward pass reduces each block's gradients and frees its weights. Under a
    pipeline schedule gradients are summed unsharded and the weights stay whole until the schedule's end.
    """

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage)
        self.root = Unit(stage, "root", stage.ends)
        self.block = Unit(stage, "block", stage.trace.block_parameters)
        self.reshards = stage.plan.zero == 3
        self.pipelined = stage.plan.pp > 1
        self.widens = self.pipelined and self.block.casting
        trace = stage.trace
        self.block_sums = _Sums(trace.block_backward)
        self.root_sums = _Sums(trace.head_backward, trace.embed_backward)

    def _forward(self, first: bool, unsharded: bool, release: Stretch | None) -> Stretch:
        """The forward pass: blocks are gathered unless `unsharded`, the root in the first of a step."""
        trace, n, root, block = self.trace, self.stage.n_blocks, self.root, self.block
        gathers = first or not self.pipelined or (self.reshards and not unsharded)
        enters = first or not self.pipelined
        enter = (*root.gather(), *root.copy_out(None)) if enters else ()
        leave = block.reshard() if self.reshards else ()
        parts = [events("forward: embedding", (*enter, *trace.embed.events))]
        if gathers:
            opened = (*block.gather(), *block.copy_out(root if enters else None))
            parts.append(events("forward: block", (*opened, *trace.entry_block.events, *leave)))
            opened = (*block.gather(), *block.copy_out(block))
            parts.append(repeated(events("forward: block", (*opened, *trace.block.events, *leave)), n - 1))
        else:
            parts.append(events("forward: block", (*trace.entry_block.events, *leave)))
            parts.append(repeated(events("forward: block", (*trace.block.events, *leave)), n - 1))
        if self.stage.last:
            parts.append(events("forward: head", trace.head.events))
        parts.append(events("forward: end", _free(block.flat) if gathers else ()))
        if release is not None:
            parts.append(release)
        if self.stage.last:
            parts.append(events("loss", trace.loss.events))
        return chain("forward", *parts)

    def _backward(self, first: bool, unsharded: bool) -> Stretch:
        """The backward pass: blocks are gathered one ahead if they were freed, and not `unsharded`."""
        block, n = self.block, self.stage.n_blocks
        gathers = self.reshards and not unsharded
        ahead = block.gather() if gathers else ()
        whole = block.copy_out(block) if gathers else ()
        openings = [(*whole, *ahead)] * (n - 1) + [whole]
        head, n_loss = self.kept(self.trace.head_backward, first), self.trace.n_loss_backward
        parts = [events("backward: loss", head[:n_loss]), events("backward: head", (*ahead, *head[n_loss:]))]
        trace, outer = self.trace, not self.stage.last
        inner, entry = trace.block_backward, trace.entry_block_backward
        parts.append(self._block(entry if n == 1 else inner, openings[0], None, first=first, outer=outer))
        parts.append(repeated(self._block(inner, openings[0], block, first=first), n - 2))
        if n > 1:
            parts.append(self._block(entry, openings[-1], block, first=first))
        embed = self.kept(self.trace.embed_backward, first)
        if self.pipelined:
            widened = self.root_sums.add(first=first) if self.widens else ()
            return chain(
                "backward", *parts, events("backward: embedding", (*embed, *widened)), *self._sent(first)
            )
        reduced = self.root.reduce(self.root_sums.grads, block, first=first)
        end = (*embed, *self.root.reshard(), *reduced, *_free(self.root.reduce_input))
        return chain("backward", *parts, events("backward: embedding", end))

    def kept(self, segment: Segment, first: bool) -> tuple[Event, ...]:
        """A backward segment's events: unsharded gradients are added to older ones under a schedule only.

        Where gradients are summed in a wider type than they come in, that happens after each unit's backward.
        """
        return self.added(segment, first or not self.pipelined or self.widens)

    def _block(
        self,
        segment: Segment,
        opening: tuple[Event, ...],
        stale: Unit | None,
        *,
        first: bool,
        outer: bool = False,
    ) -> Stretch:
        block = self.block
        body = self.kept(segment, first)
        body = (*opening, *(_from_outside(body) if outer else body))
        if not self.pipelined:
            body = (*body, *block.reshard(), *block.reduce(self.block_sums.grads, stale, first=first))
        elif self.widens:
            body = (*body, *self.block_sums.add(first=first))
        return events("backward: block", body)

    def end(self) -> list[Stretch]:
        """The schedule's end: the root, then every block, is freed and reduced."""
        root, block = self.root, self.block
        block_grads = self.block_sums.wide if self.widens else self.block_sums.grads
        root_grads = self.root_sums.wide if self.widens else self.root_sums.grads
        name = "gradient reduction"
        root_reduced = root.reduce(root_grads, None, first=True)
        parts = [events(name, (*root.reshard(), *root_reduced))]
        parts.append(events(name, (*block.reshard(), *block.reduce(block_grads, root, first=True))))
        again = events(name, (*block.reshard(), *block.reduce(block_grads, block, first=True)))
        parts.append(repeated(again, self.stage.n_blocks - 1))
        parts.append(events(name, _free(block.reduce_input)))
        return [*parts, *super().end()]


class _Sums:
    """The gradients that backward segments leave, and their float32 sums over a schedule's micro-batches.

    Source: torch/distributed/fsdp/_fully_shard/_fsdp_param.py (`to_accumulated_grad_if_needed`).
    """

    def __init__(self, *segments: Segment) -> None:
        self.grads = {
            e.parameter: e.buffer for segment in segments for e in segment.events if e.parameter is not None
        }
        self.wide = {
            parameter: _buffer(f"{grad.name} (float32 sum)", grad.shape, FP32)
            for parameter, grad in self.grads.items()
        }

    def add(self, *, first: bool) -> tuple[Event, ...]:
        """Each gradient is copied into its sum the first time, added to it after, and freed."""
        found: list[Event] = []
        for parameter, grad in self.grads.items():
            found += [*(_alloc(self.wide[parameter]) if first else ()), *_free(grad)]
        return tuple(found)


def schedule(stage: Stage, passes: Passes) -> list[Stretch]:
    """The order of forward and backward passes in a step."""
    m = stage.plan.n_micro_batches
    if stage.plan.pp == 1:
        return _accumulation(passes, m)
    if stage.plan.schedule == "gpipe":
        return [*_gpipe(passes, m), *passes.end()]
    return [*_one_forward_one_backward(stage, passes, m), *passes.end()]


def _accumulation(passes: Passes, m: int) -> list[Stretch]:
    def one(*, first: bool, last: bool) -> Stretch:
        return chain("micro-batch", passes.forward(first=first), passes.backward(first=first, last=last))

    if m == 1:
        return [one(first=True, last=True)]
    return [
        one(first=True, last=False),
        repeated(one(first=False, last=False), m - 2),
        one(first=False, last=True),
    ]


def _gpipe(passes: Passes, m: int) -> list[Stretch]:
    """All forwards, then all backwards.

    Source: torch/distributed/pipelining/schedules.py (`ScheduleGPipe._step_microbatches`).
    """
    done = () if passes.keeps_sent and not passes.stage.last else (passes.release(),)
    steps = [passes.forward(first=True), repeated(passes.forward(first=False), m - 1)]
    steps.append(chain("backward", passes.backward(first=True, last=m == 1), *done))
    middle = chain("backward", passes.backward(first=False, last=False, unsharded=True), *done)
    steps.append(repeated(middle, m - 2))
    if m > 1:
        steps.append(chain("backward", passes.backward(first=False, last=True, unsharded=True), *done))
    return steps


def _one_forward_one_backward(stage: Stage, passes: Passes, m: int) -> list[Stretch]:
    """Warm-up forwards, then a backward and a forward in turn, then the backwards left.

    The last stage's logits are held by the schedule until the next micro-batch's replace them. The other
    stages' last output that is sent on its own during warm-up is held by that send's handle (gloo's) until
    the schedule has no forward left and reuses the handle's name.

    Source: torch/distributed/pipelining/schedules.py (`Schedule1F1B._step_microbatches`).
    """
    warm_up = min(m, stage.plan.pp - stage.rank.pp)
    last_turn = m - warm_up
    sent_alone = warm_up - 2
    holds = stage.device == "cpu" and not stage.last and 0 <= sent_alone < last_turn
    release = passes.release()
    warm = passes.forward(first=False)
    forward = passes.forward(first=False, unsharded=True, releases=stage.last)
    backward = passes.backward(first=False, last=False)
    drain = passes.backward(first=False, last=False, unsharded=True)

    def done(i: int) -> list[Stretch]:
        if stage.last or (holds and i == sent_alone):
            return []
        return [release, release] if holds and i == last_turn else [release]

    def turn(i: int) -> Stretch:
        if i == 0:
            return chain("backward", passes.backward(first=True, last=m == 1), *done(i))
        if i <= last_turn:
            return chain("forward and backward", forward, backward, *done(i))
        return chain("backward", drain, *done(i))

    steps = [passes.forward(first=True), repeated(warm, warm_up - 1)]
    cuts = {0, 1, last_turn, last_turn + 1, m} | ({sent_alone, sent_alone + 1} if holds else set())
    steps += [repeated(turn(a), b - a) for a, b in pairwise(sorted(cuts)) if b <= m]
    return [*steps, release] if stage.last else steps
