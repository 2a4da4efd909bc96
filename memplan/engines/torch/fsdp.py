"""FSDP2: units that are gathered and reduced, and the passes around them.

Source: torch/distributed/fsdp/_fully_shard.
"""

from collections.abc import Iterable

from memplan.engines.torch.passes import Passes, from_outside, gradients
from memplan.engines.torch.sharding import padded_shard_elements
from memplan.engines.torch.stage import Stage
from memplan.engines.trace import Segment
from memplan.shapes import FP32, Buffer, Event, Parameter, buffer_of
from memplan.tape import Device
from memplan.timeline import Stretch, allocs, chain, events, frees, repeated


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
        self.flat = buffer_of(f"{name} (all-gather output)", (n * sum(shards),), compute)
        self.scratch = buffer_of(f"{name} (gloo scratch)", (n * sum(shards),), compute)
        self.cast = buffer_of(f"{name} (own shards as {compute.name})", (sum(shards),), compute)
        self.casting = compute != stage.weight_dtype
        self.unsharded = [
            buffer_of(f"{p.name} (unsharded)", (n * s,), compute)
            for p, s in zip(parameters, shards, strict=True)
        ]
        self.reduce_input = buffer_of(f"{name} (reduce-scatter input)", (n * sum(shards),), reduce)
        self.reduce_scratch = buffer_of(f"{name} (gloo scratch)", (n * sum(shards),), reduce)
        self.reduced = buffer_of(f"{name}.grad (sharded)", (sum(shards),), reduce, "grads")
        self.added = buffer_of(f"{name}.grad (to be added)", (sum(shards),), reduce)

    def gather(self) -> tuple[Event, ...]:
        """All-gather into one flat buffer."""
        scratch: tuple[Event, ...] = ()
        if self.stage.device == "cpu":
            scratch = (*allocs(self.scratch), *frees(self.scratch)) * 2
        if self.casting:
            return (*allocs(self.cast, self.flat), *scratch, *frees(self.cast))
        return (*allocs(self.flat), *scratch)

    def copy_out(self, stale: "Unit | None") -> tuple[Event, ...]:
        """Copy the flat buffer into the parameters; the flat buffer gathered before it is dropped then."""
        return (*allocs(*self.unsharded), *(frees(stale.flat) if stale is not None else ()))

    def reshard(self) -> tuple[Event, ...]:
        """Free the unsharded parameters."""
        return frees(*self.unsharded)

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
            return (*(frees(stale.reduce_input) if stale is not None else ()), *allocs(self.reduce_input))
        scratch: tuple[Event, ...] = ()
        if self.stage.device == "cpu":
            scratch = (*allocs(self.reduce_scratch), *frees(self.reduce_scratch))
        output = self.reduced if first else self.added
        widens = self.stage.device == "cpu" and self.reduced.dtype != in_order[-1].dtype
        copies = [e for grad in in_order for e in (*allocs(grad), *frees(grad))] if widens else []
        padded = [
            buffer_of(f"{p.name}.grad (padded)", (p.n_elements + self.padding[p],), grads[p].dtype)
            for p in self.parameters
            if self.padding[p]
        ]
        return (
            *(frees(stale.reduce_input) if stale is not None else ()),
            *allocs(self.reduce_input, *padded),
            *copies,
            *frees(*padded),
            *frees(*in_order[:-1]),
            *allocs(output),
            *scratch,
            *frees(in_order[-1]),
            *(() if first else frees(output)),
        )


class GradientSums:
    """The gradients that backward segments leave, and their float32 sums over a schedule's micro-batches.

    Source: torch/distributed/fsdp/_fully_shard/_fsdp_param.py (`to_accumulated_grad_if_needed`).
    """

    def __init__(self, device: Device, *segments: Segment) -> None:
        self.device = device
        self.grads = gradients(*segments)
        self.wide = {
            parameter: buffer_of(f"{grad.name} (float32 sum)", grad.shape, FP32)
            for parameter, grad in self.grads.items()
        }

    def add(self, *, first: bool) -> tuple[Event, ...]:
        """Each gradient is copied into its sum the first time, added to it after, and freed.

        CPU adds a narrower tensor by way of a widened copy.

        Source: aten/src/ATen/TensorIterator.cpp (`compute_types`).
        """
        found: list[Event] = []
        for parameter, grad in self.grads.items():
            wide = self.wide[parameter]
            copied = (*allocs(wide), *frees(wide)) if self.device == "cpu" else ()
            found += [*(allocs(wide) if first else copied), *frees(grad)]
        return tuple(found)


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
        self.block_sums = GradientSums(stage.device, trace.block_backward)
        self.root_sums = GradientSums(stage.device, trace.head_backward, trace.embed_backward)

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
        parts.append(events("forward: end", frees(block.flat) if gathers else ()))
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
        end = (*embed, *self.root.reshard(), *reduced, *frees(self.root.reduce_input))
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
        body = (*opening, *(from_outside(body) if outer else body))
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
        parts.append(events(name, frees(block.reduce_input)))
        return [*parts, *super().end()]
