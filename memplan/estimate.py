"""One plan's estimate: Model x Plan x Cluster -> Estimate."""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal, cast

from memplan.checks import LARGEST_CLUSTER, checked_count
from memplan.engines import textbook
from memplan.engines.torch import Passes, Rank, Stage, StageTimeline, passes_of, timeline
from memplan.errors import InvalidValue
from memplan.hardware import Cluster, resolve_cluster
from memplan.models import Model, parameter_count, resolve
from memplan.plan import Plan, check_plan, stage_layers
from memplan.tape import Device
from memplan.timeline import Alive, Bytes, Instant, Stretch, alive_at_high, bytes_by_kind, instants
from memplan.traffic import Collective, collectives, textbook_collectives

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

Confirmation = Literal["measured", "unmeasured"]


@dataclass(frozen=True, kw_only=True)
class StageEstimate:
    """What one rank of a pipeline stage holds and sends; the figures are worked out when asked for.

    `rest_bytes` are alive between steps, `flops` the forward pass's on this rank over a step.
    """

    rank: Rank
    layers: range
    timeline: StageTimeline
    flops: int
    traffic: Callable[[], tuple[Collective, ...]] = field(repr=False, compare=False)

    @cached_property
    def peak_bytes(self) -> int:
        """Bytes at the worst instant."""
        return self.timeline.peak_bytes

    @cached_property
    def rest_bytes(self) -> int:
        """Bytes alive between steps."""
        return self.timeline.rest_bytes

    @cached_property
    def states(self) -> Bytes:
        """Weights, gradients and optimizer state as the optimizer sees them; the other kinds are 0."""
        kinds = ("weights", "grads", "optimizer")
        found = self.timeline.rest + self.timeline.grads
        return bytes_by_kind(Counter({buffer: n for buffer, n in found.items() if buffer.kind in kinds}))

    @cached_property
    def _at_peak(self) -> tuple[Alive, str]:
        alive: Alive = Counter(self.timeline.rest)
        when = alive_at_high(self.timeline.step, alive)
        return Counter({buffer: n for buffer, n in alive.items() if n}), when

    @property
    def alive(self) -> Alive:
        """How many of each named tensor are alive at the worst instant."""
        return self._at_peak[0]

    @cached_property
    def peak(self) -> Bytes:
        """Everything alive at the worst instant, by kind."""
        return bytes_by_kind(self.alive)

    @property
    def when(self) -> str:
        """The worst instant's stretch of the step."""
        return self._at_peak[1]

    @cached_property
    def instants(self) -> tuple[Instant, ...]:
        """The highs of the step's stretches, in order."""
        return tuple(instants(self.timeline.step, self.rest_bytes))

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """All collectives of a step, by kind, axis and purpose."""
        return self.traffic()

    @property
    def stage(self) -> int:
        """Its place in the pipeline, from 0."""
        return self.rank.pp

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as `--json` prints them."""
        return {
            "stage": self.stage,
            "layers": [self.layers.start, self.layers.stop],
            "states": self.states.to_dict(),
            "rest_bytes": self.rest_bytes,
            "peak": self.peak.to_dict(),
            "when": self.when,
            "collectives": [asdict(c) for c in self.collectives],
            "forward_flops": self.flops,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a plan asks of each GPU: per pipeline stage, the rank of it that holds most.

    `confirmed` is "measured" where the rules behind it have been compared with real runs (CPU ranks), and
    "unmeasured" where they are read from sources only (CUDA).
    """

    model: Model
    plan: Plan
    cluster: Cluster | None
    stages: tuple[StageEstimate, ...]
    confirmed: Confirmation

    @property
    def n_parameters(self) -> int:
        """Elements of the model's weights, all GPUs together."""
        return parameter_count(self.model)

    @property
    def worst(self) -> StageEstimate:
        """The stage with the highest peak."""
        return max(self.stages, key=lambda stage: stage.peak_bytes)

    @property
    def peak(self) -> Bytes:
        """The worst stage's worst instant, by kind."""
        return self.worst.peak

    @property
    def busiest(self) -> StageEstimate:
        """The stage that sends most."""
        return max(self.stages, key=lambda stage: sum(c.wire_bytes for c in stage.collectives))

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """The collectives of one rank of the stage that sends most."""
        return self.busiest.collectives

    @property
    def fits(self) -> bool | None:
        """Whether the peak is within the cluster's budget; None without a cluster or a limit.

        The peak is of allocated bytes; the budget's margin stands in for fragmentation, the CUDA context
        and communication buffers (see `memplan.hardware.Cluster.budget_bytes`). Textbook accounting is never
        compared with it: None.
        """
        if self.cluster is None or self.plan.engine == "textbook":
            return None
        budget_bytes = self.cluster.budget_bytes
        return None if budget_bytes is None else self.peak.total_bytes <= budget_bytes

    def ledger(self, stage: int | None = None) -> "pandas.DataFrame":
        """Every named tensor alive at the peak of a stage (the worst one if None), largest first.

        Columns: name, kind, shape (on this rank), dtype, count, each_bytes, total_bytes.
        """
        from memplan.tables import ledger_frame

        return ledger_frame((self.worst if stage is None else self._stage(stage)).alive)

    def timeline(self, stage: int | None = None) -> Stretch:
        """The step of a stage (the worst one if None), for `memplan.timeline.running_bytes` and plots."""
        return (self.worst if stage is None else self._stage(stage)).timeline.step

    @property
    def device(self) -> Device:
        """Whose rules it was estimated by."""
        return device_of(self.cluster)

    def _stage(self, stage: int) -> StageEstimate:
        return self.stages[checked_count("stage", stage, least=0, most=len(self.stages) - 1)]

    def to_frame(self) -> "pandas.DataFrame":
        """One row per pipeline stage."""
        from memplan.tables import stages_frame

        return stages_frame(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as `--json` prints them."""
        return {
            "model": {"family": type(self.model).__name__.lower(), **asdict(self.model)},
            "plan": asdict(self.plan),
            "cluster": self.cluster.name if self.cluster is not None else None,
            "n_parameters": self.n_parameters,
            "fits": self.fits,
            "confirmed": self.confirmed,
            "peak": self.peak.to_dict(),
            "worst_stage": self.worst.stage,
            "stages": [stage.to_dict() for stage in self.stages],
        }

    def plot(self) -> "Figure":
        """Each stage's peak by kind."""
        from memplan.plots import stage_peaks

        return stage_peaks(self)

    def __str__(self) -> str:
        from memplan.tables import estimate_text

        return estimate_text(self)


def device_of(cluster: Cluster | None) -> Device:
    """The rules that apply: the CPU's for a cluster of CPU ranks, CUDA's otherwise."""
    return "cpu" if cluster is not None and cluster.gpu.kind == "cpu" else "cuda"


def estimate(
    model: Model | str | os.PathLike[str],
    *,
    cluster: Cluster | str | None = None,
    dp: int | None = None,
    tp: int = 1,
    pp: int = 1,
    zero: int = 0,
    sequence_parallel: bool = False,
    micro_batch: int = 1,
    global_batch: int | None = None,
    seq_len: int | None = None,
    precision: str = "bf16-mixed",
    optimizer: str = "adamw",
    recompute: str = "none",
    schedule: str = "1f1b",
    engine: str = "torch",
) -> Estimate:
    """What one plan asks of each GPU.

    Args:
        model: a preset's name, the path of a Hugging Face config.json, or a Model.
        cluster: "<n>x<gpu>" or a Cluster; None: memory and traffic on CUDA, no limit.
        dp: data-parallel ranks; left out, what the cluster has left (1 without a cluster).
        tp: tensor-parallel ranks.
        pp: pipeline stages.
        zero: 0 DDP, 1 optimizer state, 2 + gradients, 3 + weights.
        sequence_parallel: divide the sequence over the tensor axis between its regions.
        micro_batch: sequences per micro-batch and replica.
        global_batch: sequences per step; left out, one micro-batch per pipeline stage and replica.
        seq_len: tokens per sequence; left out, the model's context.
        precision: "fp32", "bf16" or "bf16-mixed".
        optimizer: "sgd", "sgd-momentum", "adam" or "adamw".
        recompute: "none" or "full".
        schedule: "1f1b" or "gpipe".
        engine: "torch", or "textbook": the papers' closed forms, for teaching, never a verdict on `fits`.

    Raises:
        MemplanError: with the value, the rule it breaks and a way out.
    """
    model = resolve(model)
    cluster = resolve_cluster(cluster)
    tp, pp = (checked_count(axis, n, most=LARGEST_CLUSTER) for axis, n in (("tp", tp), ("pp", pp)))
    micro_batch = checked_count("micro_batch", micro_batch)
    if dp is None:
        dp = _dp_left(cluster, tp, pp)
    dp = checked_count("dp", dp, most=LARGEST_CLUSTER)
    plan = Plan(
        dp=dp,
        tp=tp,
        pp=pp,
        zero=zero,
        sequence_parallel=sequence_parallel,
        micro_batch=micro_batch,
        global_batch=dp * micro_batch * pp if global_batch is None else global_batch,
        seq_len=model.max_seq_len if seq_len is None else seq_len,
        precision=cast(Any, precision),
        optimizer=cast(Any, optimizer),
        recompute=cast(Any, recompute),
        schedule=cast(Any, schedule),
        engine=engine,
    )
    return estimate_plan(model, plan, cluster)


def _dp_left(cluster: Cluster | None, tp: int, pp: int) -> int:
    if cluster is None:
        return 1
    if cluster.n_gpus % (tp * pp):
        raise InvalidValue(
            f"tp x pp = {tp} x {pp} = {tp * pp} does not divide the cluster's {cluster.n_gpus} GPUs; "
            f"use a cluster of {-(-cluster.n_gpus // (tp * pp)) * tp * pp}, or other degrees."
        )
    return cluster.n_gpus // (tp * pp)


def estimate_plan(model: Model, plan: Plan, cluster: Cluster | None = None) -> Estimate:
    """`estimate` for values that already exist.

    Raises:
        MemplanError: if the plan cannot run on this model, or its mesh is not the cluster.
    """
    check_plan(model, plan)
    if cluster is not None and plan.world_size != cluster.n_gpus:
        raise InvalidValue(
            f"pp x dp x tp = {plan.pp} x {plan.dp} x {plan.tp} = {plan.world_size} is not the cluster's "
            f"{cluster.n_gpus} GPUs; use cluster='{plan.world_size}x{cluster.gpu.name}', or leave out dp."
        )
    device, by_textbook = device_of(cluster), plan.engine == "textbook"
    stages = _textbook_stages(model, plan) if by_textbook else _stages(model, plan, device)
    return Estimate(
        model=model,
        plan=plan,
        cluster=cluster,
        stages=tuple(stages),
        confirmed="measured" if device == "cpu" and not by_textbook else "unmeasured",
    )


def _textbook_stages(model: Model, plan: Plan) -> Iterator[StageEstimate]:
    for pp_rank in range(plan.pp):
        yield StageEstimate(
            rank=Rank(pp=pp_rank),
            layers=stage_layers(model.n_layers, plan.pp, pp_rank),
            timeline=textbook.timeline(model, plan, pp_rank),
            flops=round(textbook.forward_flops(model, plan)),
            traffic=partial(textbook_collectives, model, plan, pp_rank),
        )


def _stages(model: Model, plan: Plan, device: Device) -> Iterator[StageEstimate]:
    stage = Stage(model, plan, Rank(), device)
    passes = passes_of(stage)
    for rank in (Rank(pp=pp_rank) for pp_rank in range(plan.pp)):
        if stage.alike(rank):
            stage = stage.moved(rank)
        else:
            stage = Stage(model, plan, rank, device)
            passes = passes_of(stage)
        yield _stage_estimate(stage.on_fullest_rank(), passes)


def rank_estimate(model: Model, plan: Plan, rank: Rank, device: Device) -> StageEstimate:
    """The estimate of one given rank, as `validate` compares it with that rank's run."""
    check_plan(model, plan)
    stage = Stage(model, plan, rank, device)
    return _stage_estimate(stage, passes_of(stage))


def _stage_estimate(stage: Stage, passes: Passes) -> StageEstimate:
    micro_batch_flops = stage.n_blocks * stage.trace.block_flops + stage.trace.head_flops
    return StageEstimate(
        rank=stage.rank,
        layers=stage_layers(stage.model.n_layers, stage.plan.pp, stage.rank.pp),
        timeline=timeline(stage, passes),
        flops=stage.plan.n_micro_batches * micro_batch_flops,
        traffic=partial(collectives, stage),
    )
