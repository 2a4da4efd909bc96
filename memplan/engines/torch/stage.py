"""One rank of a pipeline stage: its place, its part of the parameters, what it holds between steps."""

from collections import Counter
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from memplan.engines.torch.sharding import padded_shard_elements, shard_elements, zero_redundancy_partition
from memplan.engines.trace import Trace, traced
from memplan.models import Llama, Model
from memplan.plan import Plan, stage_layers
from memplan.shapes import BF16, COMPLEX64, FP32, INT64, Parameter, Shape, buffer_of
from memplan.tape import Device, Setting
from memplan.timeline import Alive

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
            alive[buffer_of(parameter.name, shape, dtype, "weights")] += n
            if self.fsdp:
                padding = padded_shard_elements(parameter, self.plan.dp) - elements
                if padding:
                    alive[buffer_of(f"{parameter.name} (padding)", (padding,), dtype)] += n
            if self.ddp:
                alive[buffer_of(f"{parameter.name} (DDP bucket)", shape, dtype)] += n
            kept = n if owned is None else owned[parameter]
            if kept:
                like = parameter.grad_shape if names == ("momentum",) and not self.fsdp else shape
                for name in names:
                    alive[buffer_of(f"{parameter.name}.{name}", like, dtype, "optimizer")] += kept
                if len(names) == 2:
                    alive[buffer_of(f"{parameter.name}.step", (), FP32, "optimizer")] += kept
        self._rest_of_inputs(alive)
        return alive

    def _rest_of_inputs(self, alive: Alive) -> None:
        plan, model = self.plan, self.model
        batch = (plan.n_micro_batches * plan.micro_batch, plan.seq_len)
        if self.first:
            alive[buffer_of("tokens", batch, INT64)] += 1
        alive[buffer_of("targets", batch, INT64)] += 1
        if isinstance(model, Llama):
            alive[buffer_of("rotation", (plan.seq_len, model.d_head // 2), COMPLEX64)] += 1
        boundary = self.trace.boundary
        if not self.first:
            alive[buffer_of("received input", boundary.shape, boundary.dtype)] += plan.n_micro_batches
        if not self.last:
            alive[buffer_of("received gradient", boundary.shape, boundary.dtype)] += plan.n_micro_batches

    @cached_property
    def grads(self) -> Alive:
        """The gradients that the optimizer sees."""
        found: Alive = Counter()
        for parameter, n in self.counted_parameters():
            shape: Shape = (self.weight_elements(parameter),) if self.fsdp else parameter.grad_shape
            found[buffer_of(f"{parameter.name}.grad", shape, self.weight_dtype, "grads")] += n
        return found
