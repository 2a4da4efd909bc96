"""Plans: the ways of dividing a training job over a cluster, and the checks of a plan's values."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from memplan.adapters import ALL_LINEAR, QUANTIZED, Adapters, Quantized
from memplan.checks import LARGEST_CLUSTER
from memplan.errors import MissingRule, PlanRefused, divisors_text
from memplan.fields import (
    Choice,
    Count,
    Counts,
    Field,
    Flag,
    Name,
    Names,
    Number,
    Registered,
    described,
    described_fields,
)
from memplan.mesh import AXES, VIEWS, Group, Mesh, axis_names, replica_axes, shard_group
from memplan.optimizers import KEPT, OPTIMIZERS, Kept, Optimizer
from memplan.precisions import PRECISIONS, Precision
from memplan.schedules import SCHEDULES, Schedule

Recompute = Literal["none", "selective", "full"]


RECOMPUTES: Final[tuple[str, ...]] = get_args(Recompute)

MOST_MICRO_BATCHES: Final = 2**23
"""The most micro-batches of a step; more are taken for a mistake."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """A place on the mesh; `others`: along other packages' axes, by name."""

    pp: int = 0
    dp_replicate: int = 0
    dp: int = 0
    cp: int = 0
    tp: int = 0
    others: tuple[tuple[str, int], ...] = field(default=(), repr=False)

    @property
    def coordinates(self) -> dict[str, int]:
        """The place along each axis, by name."""
        return {axis: getattr(self, axis) for axis in AXES.own} | dict(self.others)


def ranks_along(axis: str) -> Count:
    """The description of the field of a plan that says how many ranks there are along an axis."""
    row = AXES.named(axis)
    return Count(row.text, left_out=row.left_out, most=LARGEST_CLUSTER, varied=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One way of dividing a training job.

    Mesh axes, outermost first: `pp` ranks of a pipeline, `dp_replicate` replicas of `dp` data-parallel ranks
    (HSDP), `cp` ranks that divide each sequence, `tp` tensor shards; the world is their product. `zero`: 0
    replicates (DDP), 1 shards optimizer state, 2 gradients too, 3 weights too. A step trains on
    `global_batch` sequences of `seq_len` tokens, each replica in micro-batches of `micro_batch`; 0: one
    micro-batch per pipeline stage and replica. Each field's
    `text` describes it. `ep` and `etp` divide the dp x cp x tp ranks anew: each group of ep x etp
    neighbours holds all experts, and the `efsdp` ranks with the same experts shard them between them.

    Attributes:
        recompute: what of a block is computed again in backward: "none"; "full": all, from the block's input;
            "selective": all but what matrix products (`aten.mm`, `addmm`, `bmm`: linears, and the products of
            attention where no kernel fuses them), fused attention kernels (outputs and log-sum-exps) and sums
            over the tensor axis (`all_reduce`, `reduce_scatter_tensor`) return. So norms, rotary positions,
            activations, dropout, casts and residual sums are computed again, and under sequence parallelism
            the sequence is all-gathered again. (The textbook's "selective" is the paper's: attention's core.)
        options: the engine's own options, a value of its `Engine.options`; None: all at their defaults.
            `memplan.engines.options.plan_of` makes a plan with them from flat keywords.
        others: ranks along other packages' axes, by name, which are attributes of the plan too.

    Raises:
        InvalidValue, UnknownName: a value of the wrong type, out of range or in no table.
        PlanRefused: values that contradict each other. What an engine or a model does not allow is another
            check: `memplan.engines.checks.check_plan`.
    """

    dp: int = described(1, ranks_along("dp"))
    tp: int = described(1, ranks_along("tp"))
    pp: int = described(1, ranks_along("pp"))
    cp: int = described(1, ranks_along("cp"))
    dp_replicate: int = described(1, ranks_along("dp_replicate"))
    ep: int = described(1, Count(VIEWS["ep"].text, most=LARGEST_CLUSTER, varied=True))
    etp: int = described(1, Count(VIEWS["etp"].text, most=LARGEST_CLUSTER))
    zero: int = described(
        0,
        Count(
            "0 DDP, 1 shards optimizer state (DDP with torch's ZeroRedundancyOptimizer, whose ranks are "
            "uneven), 2 gradients too, 3 weights too (both FSDP)",
            least=0,
            most=3,
            varied=True,
        ),
    )
    sequence_parallel: bool = described(
        False, Flag("Divide the sequence over the tensor axis too", varied=True)
    )
    micro_batch: int = described(
        1, Count("Sequences in one forward and backward pass of a replica", varied=True, word="mb")
    )
    global_batch: int = described(
        0,
        Count(
            "Sequences per optimizer step, by gradient accumulation if need be",
            left_out="one micro-batch per pipeline stage and replica",
        ),
    )
    seq_len: int = described(1024, Count("Tokens per sequence", left_out="the model's context, at most 8192"))
    precision: str = described("bf16-mixed", Registered("Number formats", registry=PRECISIONS))
    optimizer: Optimizer = described("adamw", Choice("Optimizer", choices=OPTIMIZERS))
    recompute: Recompute = described(
        "none",
        Choice(
            "Activation checkpointing: what is computed again in backward",
            choices=RECOMPUTES,
            varied=True,
            word="recompute",
        ),
    )
    recompute_blocks: int | None = described(
        None,
        Count("Recompute only in the first N blocks of each stage", optional=True, varied=True, word="first"),
    )
    schedule: str = described(
        "1f1b", Registered("Order of micro-batches in a pipeline", registry=SCHEDULES, varied=True)
    )
    virtual_stages: int = described(1, Count("Pipeline stages on each pipeline rank", varied=True))
    layers_per_stage: tuple[int, ...] | None = described(
        None, Counts("Blocks of each stage", left_out="as even as possible", optional=True, word="layers")
    )
    offload: bool = described(False, Flag("Keep the states on the host (FSDP)", varied=True, word="offload"))
    clip_grad_norm: float | None = described(
        None,
        Number("Clip the norm of the gradient to this", left_out="no clipping", optional=True, word="clip"),
    )
    loss_chunks: int = described(
        1, Count("Pieces of the sequence whose loss is computed in turn", word="chunks")
    )
    lora_rank: int | None = described(
        None,
        Count(
            "Train LoRA adapters of this rank, by PEFT, beside frozen weights",
            left_out="all weights are trained",
            optional=True,
            word="lora",
        ),
    )
    lora_targets: str = described(
        ALL_LINEAR,
        Names("Modules that have adapters, as PEFT's target_modules: names, or all-linear", word="targets"),
    )
    lora_dropout: float | None = described(
        None, Number("Dropout before the adapters", left_out="none", optional=True, word="lora-dropout")
    )
    use_dora: bool = described(False, Flag("DoRA: adapters with magnitudes", word="dora"))
    modules_to_save: str = described(
        "", Names("Modules that are trained whole beside the adapters", left_out="none", word="saved")
    )
    quantize: Quantized = described(
        "none",
        Choice(
            "Hold the frozen weights of linears as bitsandbytes does: nf4 in 4 bits, nf4-double with their "
            "scales quantized too, int8 in 8 bits (LLM.int8())",
            choices=QUANTIZED,
            word="quantize",
        ),
    )
    engine: str = described(
        "torch",
        Name(
            "Whose rules: torch, what PyTorch allocates; deepspeed, ZeRO-0 to 3; fairscale and colossalai, "
            "ZeRO-1 and 2; megatron, Megatron-Core; textbook, the papers' formulas, for teaching, never a "
            "verdict; or another package's"
        ),
    )
    options: Any = None
    others: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        for name, known in FIELDS.items():
            if name != "global_batch":
                object.__setattr__(self, name, known.checked(name, getattr(self, name)))
        others = [(axis, ranks_along(axis).checked(axis, n)) for axis, n in self.others]
        object.__setattr__(self, "others", tuple([(axis, n) for axis, n in others if n > 1]))
        least = self.batch_of(self.pp * self.virtual_stages)
        asked = least if self.global_batch == 0 else self.global_batch
        object.__setattr__(self, "global_batch", FIELDS["global_batch"].checked("global_batch", asked))
        for rule in PLAN_RULES:
            rule(self)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """The ranks along another package's axis."""
            if name in AXES.own or name.startswith("_") or name not in AXES.names():
                raise AttributeError(f"a Plan has no field {name!r}.")
            return dict(self.others).get(name, 1)

    @property
    def mesh(self) -> Mesh:
        """The ranks along each axis."""
        return Mesh({axis: getattr(self, axis) for axis in (*axis_names(), *VIEWS)})

    @property
    def efsdp(self) -> int:
        """The ranks that hold the same experts, and shard them: dp x cp x tp / (ep x etp)."""
        n: int = self.mesh.size("efsdp")
        return n

    @property
    def shard_group(self) -> Group:
        """The ranks between which weights are sharded, or their gradients averaged: dp, or dp x cp."""
        return shard_group(self.cp)

    @property
    def n_shards(self) -> int:
        """How many ranks the `shard_group` has."""
        return self.dp * self.cp

    @property
    def local_seq_len(self) -> int:
        """The tokens of each sequence that a context-parallel rank has."""
        return self.seq_len // self.cp

    @property
    def world_size(self) -> int:
        """All ranks."""
        n_ranks: int = self.mesh.n_ranks
        return n_ranks

    @property
    def n_replicas(self) -> int:
        """The ranks that the global batch is divided over: dp_replicate x dp."""
        n_replicas: int = prod([getattr(self, axis) for axis in replica_axes(axis_names())])
        return n_replicas

    @property
    def ddp(self) -> bool:
        """Whether DistributedDataParallel replicates the weights."""
        return self.zero <= 1 and self.n_shards > 1

    @property
    def fsdp(self) -> bool:
        """Whether FSDP2 shards the weights."""
        return self.zero >= 2

    @property
    def mixed(self) -> bool:
        """Whether weights are stored in another type than they are computed with."""
        return self.formats.stored != self.formats.compute

    @property
    def autocasts(self) -> bool:
        """Whether passes run under autocast: FSDP2 casts wider weights itself."""
        return self.formats.autocast or (self.mixed and not self.fsdp)

    @property
    def adapters(self) -> Adapters | None:
        """What is trained beside frozen weights; None: all weights are."""
        if self.lora_rank is None:
            return None
        return Adapters(
            rank=self.lora_rank,
            targets=self.lora_targets,
            dropout=self.lora_dropout or 0.0,
            dora=self.use_dora,
            saved=self.modules_to_save,
            quantize=self.quantize,
        )

    @property
    def kept(self) -> Kept:
        """What its optimizer keeps of each weight."""
        return KEPT[self.optimizer]

    @property
    def formats(self) -> Precision:
        """The number formats of its precision."""
        return PRECISIONS.named(self.precision)

    @property
    def pipeline_schedule(self) -> Schedule:
        """The pipeline schedule that its `schedule` names."""
        return SCHEDULES.named(self.schedule)

    @property
    def splits_backward(self) -> bool:
        """Whether the schedule splits backward passes."""
        return self.pp > 1 and self.pipeline_schedule.splits_backward

    @property
    def n_stages(self) -> int:
        """Pipeline stages: pp x virtual_stages."""
        return self.pp * self.virtual_stages

    def stages_of(self, pp_rank: int) -> tuple[int, ...]:
        """The stages of one rank of the pipeline, in model order."""
        return self.pipeline_schedule.stages_of(pp_rank, self.pp, self.virtual_stages)

    @property
    def n_micro_batches(self) -> int:
        """Micro-batches each replica runs in one step."""
        return self.global_batch // (self.n_replicas * self.micro_batch)

    def batch_of(self, n_micro_batches: int) -> int:
        """The global batch with which each replica runs so many micro-batches."""
        return self.n_replicas * self.micro_batch * n_micro_batches

    def place(self, rank: int) -> Rank:
        """The coordinates of `rank` on the mesh; the tensor axis is the innermost.

        >>> Plan(dp=2, tp=2, global_batch=2).place(3)
        Rank(pp=0, dp_replicate=0, dp=1, cp=0, tp=1)
        """
        found = self.mesh.place(rank)
        others = tuple([(axis, found.pop(axis)) for axis in list(found) if axis not in AXES.own])
        return Rank(**found, others=others)

    def place_among_shards(self, rank: Rank) -> int:
        """The place of a rank in its `shard_group`.

        >>> Plan(dp=2, cp=4, global_batch=2).place_among_shards(Rank(dp=1, cp=2))
        6
        """
        return rank.dp * self.cp + rank.cp


FIELDS: Final[dict[str, Field]] = described_fields(Plan)
"""The description of each field of a plan, by name."""

GROUPS: Final[Mapping[str, tuple[str, ...]]] = {
    "Mesh": (
        *("dp", "tp", "pp", "dp_replicate", "cp", "ep", "etp", "zero", "sequence_parallel"),
        *("schedule", "virtual_stages", "layers_per_stage"),
    ),
    "Batch": ("micro_batch", "global_batch", "seq_len"),
    "Memory saving": ("recompute", "recompute_blocks", "offload", "loss_chunks"),
    "Adapters": (
        *("lora_rank", "lora_targets", "lora_dropout", "use_dora"),
        *("modules_to_save", "quantize"),
    ),
    "Numbers": ("precision", "optimizer", "clip_grad_norm"),
    "Engine": ("engine",),
}
"""The fields of a plan by what they are about, in the order in which they are shown."""


def _check_world(plan: Plan) -> None:
    if plan.world_size > LARGEST_CLUSTER:
        raise PlanRefused(
            f"{plan.mesh} = {plan.world_size} ranks are more than {LARGEST_CLUSTER}; use smaller degrees.",
            kind="more ranks than any cluster has",
        )


def _check_batch(plan: Plan) -> None:
    per_pass = plan.n_replicas * plan.micro_batch
    if plan.global_batch % per_pass:
        replicas = f"dp_replicate x dp = {plan.n_replicas}" if plan.dp_replicate > 1 else f"dp = {plan.dp}"
        raise PlanRefused(
            f"global_batch={plan.global_batch} is not a multiple of micro_batch = {plan.micro_batch} times "
            f"{replicas}; use {-(-plan.global_batch // per_pass) * per_pass}.",
            kind="global_batch is not a multiple of micro_batch x replicas",
        )
    if plan.n_micro_batches > MOST_MICRO_BATCHES:
        raise PlanRefused(
            f"global_batch={plan.global_batch} makes {plan.n_micro_batches} micro-batches of "
            f"{plan.micro_batch} for each replica, and more than {MOST_MICRO_BATCHES} are a mistake; use a "
            "smaller global_batch, or a larger micro_batch.",
            kind="more micro-batches than any training accumulates",
        )


def _check_sequence(plan: Plan) -> None:
    if plan.sequence_parallel and plan.tp == 1:
        raise PlanRefused(
            "sequence_parallel=True divides the sequence over the tensor axis, but tp=1; "
            "use tp of 2 or more, or sequence_parallel=False.",
            kind="sequence parallelism without tensor parallelism",
        )


def _check_replicas(plan: Plan) -> None:
    if plan.dp_replicate > 1 and not plan.fsdp:
        raise PlanRefused(
            f"dp_replicate={plan.dp_replicate} replicates shards (HSDP), but zero={plan.zero} shards no "
            "weights; use zero=2 or 3, or dp for replicas.",
            kind="HSDP (dp_replicate) with a ZeRO stage that shards no weights",
        )


def _check_experts(plan: Plan) -> None:
    """Raise for ranks of experts that are no whole groups."""
    ranks, own = plan.dp * plan.cp * plan.tp, plan.ep * plan.etp
    if ranks % own:
        named, what = f"ep={plan.ep}", "ep"
        if plan.etp > 1:
            named, what = f"ep={plan.ep} x etp={plan.etp}", "ep x etp"
        raise PlanRefused(
            f"{named} does not divide dp x cp x tp = {ranks}, the ranks that experts are divided over; use "
            f"an {what} of {divisors_text(ranks)}.",
            kind="ep that divides the dp x cp x tp ranks into no whole groups",
        )


def _check_options(plan: Plan) -> None:
    """Raise for options of a feature that the plan does not use."""
    if plan.recompute_blocks is not None and plan.recompute == "none":
        raise PlanRefused(
            f"recompute_blocks={plan.recompute_blocks} says which blocks to recompute, but recompute='none'; "
            "use recompute='full' or 'selective', or leave it out.",
            kind="recompute_blocks although nothing is recomputed",
        )
    if plan.loss_chunks > plan.seq_len:
        raise PlanRefused(
            f"loss_chunks={plan.loss_chunks} is more than the seq_len={plan.seq_len} tokens to divide; "
            f"use {plan.seq_len} or less.",
            kind="more loss chunks than tokens",
        )


ADAPTER_FIELDS: Final = ("lora_targets", "lora_dropout", "use_dora", "modules_to_save", "quantize")
"""The fields that say how adapters are trained."""


def _check_adapters(plan: Plan) -> None:
    """Raise for options of adapters without any, or for some that contradict each other."""
    for name in ADAPTER_FIELDS if plan.lora_rank is None else ():
        value = getattr(plan, name)
        if value != Plan.__dataclass_fields__[name].default:
            raise PlanRefused(
                f"{name}={value!r} is of LoRA, and no adapters are trained; use lora_rank=16, say, or leave "
                f"{name} out.",
                kind="options of LoRA without adapters",
            )
    if plan.lora_dropout is not None and plan.lora_dropout >= 1:
        raise PlanRefused(
            f"lora_dropout={plan.lora_dropout:g} drops everything; use a number below 1.",
            kind="lora_dropout of 1 or more",
        )
    if plan.use_dora and plan.quantize != "none":
        raise MissingRule(
            f"use_dora=True with quantize={plan.quantize!r} has no rule yet; leave one of them out.",
            kind="DoRA of quantized weights",
        )
    if plan.lora_rank is not None and not plan.lora_targets:
        raise PlanRefused(
            "lora_targets='' names no module; use all-linear, or names, as q_proj,v_proj.",
            kind="LoRA without target modules",
        )


PLAN_RULES: Final[tuple[Callable[[Plan], None], ...]] = (
    _check_world,
    _check_batch,
    _check_sequence,
    _check_replicas,
    _check_experts,
    _check_options,
    _check_adapters,
)
"""The checks of every plan, in order."""


def stage_layers(n_layers: int, plan: Plan, stage: int) -> range:
    """The blocks of one pipeline stage: by `layers_per_stage`, or divided as evenly as possible.

    If they do not divide evenly, the first stages have one more.

    >>> [stage_layers(7, Plan(pp=3), stage) for stage in range(3)]
    [range(0, 3), range(3, 5), range(5, 7)]
    >>> stage_layers(7, Plan(pp=3, layers_per_stage=(1, 4, 2)), 1)
    range(1, 5)
    """
    if plan.layers_per_stage is not None:
        start = sum(plan.layers_per_stage[:stage])
        return range(start, start + plan.layers_per_stage[stage])
    each, odd = divmod(n_layers, plan.n_stages)
    start = stage * each + min(stage, odd)
    return range(start, start + each + (stage < odd))


def unchecked(plan: Plan, **values: Any) -> Plan:
    """A plan with other values, which may be arrays, without any check."""
    values, others = apart(plan, values)
    values["others"] = others
    other = object.__new__(Plan)
    for name in Plan.__dataclass_fields__:
        object.__setattr__(other, name, values[name] if name in values else getattr(plan, name))
    return other


def apart(plan: Plan, values: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[tuple[str, Any], ...]]:
    """The values of a plan's own fields, and the ranks along other packages' axes."""
    own = {name: value for name, value in values.items() if name in FIELDS}
    others = {axis: n for axis, n in values.items() if axis not in FIELDS}
    return own, tuple((dict(plan.others) | others).items())
