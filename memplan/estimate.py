"""One plan's estimate: Model x Plan x Cluster -> Estimate."""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, prod
from typing import TYPE_CHECKING, Any, Unpack, cast, get_args

from memplan.adapters import ALL_LINEAR, Quantized
from memplan.allocator import AllocatorConfig, OutOfMemory
from memplan.checks import LARGEST_CLUSTER, checked_choice, checked_count
from memplan.device import CPU, H100, Device, DeviceType
from memplan.engines.base import ENGINES, Confirmation, Engine, RankRecord
from memplan.engines.checks import check_plan
from memplan.engines.options import EngineOptions, plan_dict, plan_of, shows
from memplan.errors import ContradictoryEstimate, InvalidValue, MemplanError, shown_value
from memplan.hardware import (
    CHANGES,
    Cluster,
    ClusterChanges,
    Interval,
    Link,
    Verdict,
    outside_allocator,
    resolve_cluster,
)
from memplan.memory import Alive, Bytes, Instant, alive_at_high, bytes_by_kind, instants, most_by_kind
from memplan.mesh import DIVIDING, axis_names, with_several
from memplan.models import (
    Model,
    TracedModel,
    implemented,
    is_of_transformers,
    model_dict,
    of_sizes,
    parameter_count,
    resolve,
)
from memplan.models.families import implementations_of
from memplan.optimizers import Optimizer
from memplan.plan import (
    FIELDS,
    Plan,
    Rank,
    Recompute,
)
from memplan.precisions import PRECISIONS
from memplan.record import Stretch
from memplan.replay.peaks import replayed
from memplan.replay.program import AllocatorProgram, Memory, Replayed
from memplan.shapes import Kind
from memplan.tape import Backend
from memplan.text_tables import html_text
from memplan.time.prices import peak_flops_per_s
from memplan.time.step import (
    RankWork,
    StepTime,
    TimeModel,
    forward_flops,
    model_flops,
    per_s,
    recomputed_flops,
    time_model_of,
    utilisation,
)
from memplan.traffic import CollectiveTotal, collectives
from memplan.units import human_bytes
from memplan.version import versioned

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True, repr=False)
class StageEstimate:
    """What one rank of a pipeline holds and sends: folds over its record, computed when they are read."""

    plan: Plan
    record: RankRecord

    def __repr__(self) -> str:
        return f"<StageEstimate of stage {self.stage}: peak {human_bytes(self.peak_bytes)}>"

    @property
    def rank(self) -> Rank:
        """The rank's coordinates on the mesh."""
        return self.record.rank

    @property
    def layers(self) -> tuple[range, ...]:
        """The blocks of each stage on this rank: one range, or `virtual_stages` of them."""
        return self.record.layers

    @property
    def program(self) -> Callable[[], AllocatorProgram] | None:
        """Makes the program of its first steps; None without a caching allocator (CPU, accounting)."""
        return self.record.program

    @cached_property
    def peak_bytes(self) -> int:
        """Bytes at the worst instant."""
        return self.record.peak_bytes

    @cached_property
    def setup_bytes(self) -> int:
        """Bytes at the worst instant before the first step; 0 if the engine records no set-up."""
        return 0 if self.record.setup is None else self.record.setup.high_bytes

    @property
    def most_bytes(self) -> int:
        """Bytes at the worst instant of the step, or of the set-up, if that is worse."""
        return max(self.peak_bytes, self.setup_bytes)

    @cached_property
    def rest_bytes(self) -> int:
        """Bytes alive between steps."""
        return self.record.rest_bytes

    def replay(
        self,
        alloc_conf: str | None = None,
        *,
        limit_bytes: int | None = None,
        allowed_bytes: int | None = None,
    ) -> Replayed | None:
        """Replays the first steps in memplan's caching allocator; None without a program (CPU, accounting).

        Args:
            alloc_conf: the value of `PYTORCH_CUDA_ALLOC_CONF`, as in
                "expandable_segments:True"; None: the plan's.
            limit_bytes: what the driver has to give; when it runs out, cached blocks are given back first.
            allowed_bytes: the process's share of it (`torch.cuda.set_per_process_memory_fraction`).

        Raises:
            InvalidValue: for a setting that memplan does not know.
            OutOfMemory: if the program does not run within the limits.
        """
        config = self._alloc_config if alloc_conf is None else AllocatorConfig.parse(alloc_conf)
        if self.program is None:
            return None
        memory = Memory(config=config, limit_bytes=limit_bytes, allowed_bytes=allowed_bytes)
        return self._checked(replayed(self.program(), memory))

    def _checked(self, replay: Replayed) -> Replayed:
        """The replay, whose allocator holds at least the tensors and reserves at least what it allocates.

        Raises:
            ContradictoryEstimate: otherwise.
        """
        if self.peak_bytes <= replay.allocated_bytes <= replay.reserved_bytes:
            return replay
        raise ContradictoryEstimate(
            f"Stage {self.stage} of {self.plan}: tensors of {self.peak_bytes} bytes, allocated "
            f"{replay.allocated_bytes}, reserved {replay.reserved_bytes}, which must not decrease. This is a "
            "fault of memplan; please report the plan."
        )

    @property
    def _alloc_config(self) -> AllocatorConfig:
        """The allocator's settings: the plan's option, where its engine has one."""
        return AllocatorConfig.parse(getattr(self.plan.options, "alloc_conf", ""))

    @property
    def replayed(self) -> Replayed | None:
        """`replay` with the plan's settings and no limit; computed once."""
        return self.replayed_within(None)

    def replayed_within(self, limit_bytes: int | None) -> Replayed | None:
        """`replay` within a limit, computed once; None if memory runs out."""
        if self.program is not None and limit_bytes not in self.replays:
            unlimited = None if limit_bytes is None else self.replayed
            try:
                memory = Memory(config=self._alloc_config, limit_bytes=limit_bytes)
                found = replayed(self.program(), memory, unlimited=unlimited)
                self.replays[limit_bytes] = self._checked(found)
            except OutOfMemory:
                self.replays[limit_bytes] = None
        return self.replays.get(limit_bytes)

    @cached_property
    def replays(self) -> dict[int | None, Replayed | None]:
        """The replays that are kept, by their limit; None where one ran out of memory."""
        return {}

    @cached_property
    def states(self) -> Bytes:
        """Weights, gradients and optimizer state as the optimizer sees them, also those on the host."""
        host = self.record.host
        held = self.record.rest if host is None else self.record.rest + host.pinned + host.pageable
        held = held + self.record.step_counts
        states = Counter({buffer: n for buffer, n in held.items() if buffer.kind in ("weights", "optimizer")})
        return bytes_by_kind(states + self.record.grads)

    @cached_property
    def _at_peak(self) -> tuple[Alive, str]:
        alive: Alive = Counter(self.record.rest)
        when = alive_at_high(self.record.step, alive)
        return Counter({buffer: n for buffer, n in alive.items() if n}), when

    @property
    def alive(self) -> Alive:
        """How many of each named tensor are alive at the worst instant."""
        return self._at_peak[0]

    @cached_property
    def peak(self) -> Bytes:
        """Everything alive at the worst instant, by kind."""
        return bytes_by_kind(self.alive)

    @cached_property
    def host_alive(self) -> Alive:
        """How many of each offloaded tensor the host holds at its own worst instant."""
        return self.record.host.at_peak() if self.record.host is not None else Counter()

    @cached_property
    def host(self) -> Bytes:
        """What the host holds of offloaded states at its worst instant, by kind; 0 on CPU ranks."""
        return bytes_by_kind(self.host_alive)

    @property
    def host_pinned_bytes(self) -> int:
        """The page-locked part of `host`."""
        return bytes_by_kind(self.record.host.pinned).total_bytes if self.record.host is not None else 0

    @cached_property
    def most(self) -> dict[Kind, int]:
        """The most bytes of each kind at any instant of the step; kinds reach them at different ones."""
        return most_by_kind(self.record.rest, self.record.step)

    @property
    def when(self) -> str:
        """The stretch of the step that the worst instant is in."""
        return self._at_peak[1]

    @cached_property
    def instants(self) -> tuple[Instant, ...]:
        """The worst instant of each stretch of the step, in order."""
        return tuple(instants(self.record.step, self.rest_bytes))

    @cached_property
    def collectives(self) -> tuple[CollectiveTotal, ...]:
        """All collectives of a step, by kind, axis and purpose."""
        return collectives(self.record.step.counts, self.plan)

    @cached_property
    def flops(self) -> int:
        """FLOPs of the rank's forward passes in a step."""
        return forward_flops(self.record.step.counts)

    @cached_property
    def recomputed_flops(self) -> int:
        """Forward FLOPs that it runs again in a step."""
        return recomputed_flops(self.record.step.counts)

    @property
    def work(self) -> RankWork:
        """The rank's work in a step, for a time model."""
        return RankWork(step=self.record.step, collectives=self.collectives, states=self.states)

    @property
    def sent_bytes(self) -> int:
        """Bytes that the rank sends to other ranks in a step."""
        return sum(c.wire_bytes for c in self.collectives if c.axis != "host")

    @property
    def stage(self) -> int:
        """The pipeline rank, from 0."""
        return self.rank.pp

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as `--json` prints them."""
        return {
            "stage": self.stage,
            "layers": [[layers.start, layers.stop] for layers in self.layers],
            "states": self.states.to_dict(),
            "rest_bytes": self.rest_bytes,
            "peak": self.peak.to_dict(),
            "when": self.when,
            "host": {**self.host.to_dict(), "pinned_bytes": self.host_pinned_bytes},
            "collectives": [c.to_dict() for c in self.collectives],
            "forward_flops": self.flops,
            "recomputed_flops": self.recomputed_flops,
        }


@dataclass(frozen=True, kw_only=True, repr=False)
class Estimate:
    """What a plan takes of a GPU; `stages`: each pipeline rank's fullest data-parallel rank.

    Attributes:
        device: whose kernels' rules apply.
        confirmed: what the rules were compared with: "cpu-ranks" (real runs), "nogpu" (CUDA's software for
            this kind of GPU, without a GPU), or "unconfirmed" (no run).
        time_model: turns work into seconds; `dataclasses.replace` exchanges it.
    """

    model: Model
    plan: Plan
    cluster: Cluster | None
    device: Device
    stages: tuple[StageEstimate, ...]
    confirmed: Confirmation
    time_model: TimeModel

    @property
    def engine(self) -> Engine:
        """The engine whose rules apply."""
        return ENGINES.named(self.plan.engine)

    @property
    def n_parameters(self) -> int:
        """Elements of the whole model's weights."""
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
    def host(self) -> Bytes:
        """What the host holds for the GPU that offloads most, by kind."""
        return max((stage.host for stage in self.stages), key=lambda held: held.total_bytes)

    @property
    def busiest(self) -> StageEstimate:
        """The stage that sends most."""
        return max(self.stages, key=lambda stage: stage.sent_bytes)

    @property
    def collectives(self) -> tuple[CollectiveTotal, ...]:
        """The collectives of one rank of the stage that sends most."""
        return self.busiest.collectives

    @property
    def allocated_bytes(self) -> int | None:
        """What `torch.cuda.max_memory_allocated` says of the worst stage; None on CPU and for accounting."""
        replay = self.worst.replayed
        return None if replay is None else replay.allocated_bytes

    @property
    def reserved_bytes(self) -> int | None:
        """What `torch.cuda.max_memory_reserved` says of the worst stage; None on CPU and for accounting.

        `StageEstimate.replay` takes the allocator's settings.
        """
        replay = self.worst.replayed
        return None if replay is None else replay.reserved_bytes

    @property
    def device_bytes(self) -> Interval | None:
        """Bytes of the worst stage's process on its GPU (`nvidia-smi`); None on CPU and for accounting.

        The lower end is the allocated bytes: cached blocks are given back before memory runs out. The upper
        end is the reserved bytes, which the caching allocator takes if nothing limits it, with what runs of
        the engine reserved beyond a replay (`Engine.reserves_more`). To the ends are added the least and the
        most that CUDA's context and NCCL's buffers take.

        Assumes: a communicator for each axis of the mesh with more than one rank, and one for all ranks.
        """
        return self.device_bytes_of(self.worst)

    def device_bytes_of(self, of: StageEstimate) -> Interval | None:
        """`device_bytes` of one stage."""
        replay = of.replayed
        if replay is None:
            return None
        outside = self._outside_allocator
        allocated_bytes, reserved_bytes = replay.setup if of.setup_bytes else (0, 0)
        allocated_bytes = max(allocated_bytes, replay.allocated_bytes)
        reserved_bytes = max(reserved_bytes, replay.reserved_bytes)
        most_bytes = ceil(reserved_bytes * (1 + self.engine.reserves_more))
        return Interval(allocated_bytes + outside.low_bytes, most_bytes + outside.high_bytes)

    @property
    def _outside_allocator(self) -> Interval:
        found = outside_allocator(self.engine.n_communicators(self.plan))
        own_bytes = self.engine.outside_bytes(self.plan, self.model)
        return Interval(found.low_bytes + own_bytes, found.high_bytes + own_bytes)

    @property
    def _gives_back(self) -> bool:
        """Whether a replay within the budget settles, where one without a limit reserves more than that.

        Where no state of the allocator recurs, one step is fragmented otherwise than the next, and any later
        one may run out of memory.
        """
        budget_bytes = None if self.cluster is None else self.cluster.budget_bytes
        replay = self.worst.replayed
        if budget_bytes is None or replay is None or self.engine.reserves_more:
            return False
        limit_bytes = budget_bytes - self._outside_allocator.high_bytes
        if not replay.allocated_bytes <= limit_bytes < replay.reserved_bytes:
            return False
        within = self.worst.replayed_within(limit_bytes)
        return within is not None and within.settled

    @property
    def verdict(self) -> Verdict | None:
        """Whether each GPU holds the plan: `memplan.Cluster.verdict` of `device_bytes`.

        "fits, tight": the caching allocator reserves more than the budget if nothing limits it, and stays
        within it by giving cached blocks back, which takes time. "cannot say" too, unless the tensors alone
        are too much, of an engine that does not tell what its allocator does (`RankRecord.program`). On a GPU
        whose kernels have no rules (AMD's) only the tensors held between steps are known.

        `fits`, `memplan.search`, `advise`, `why`, charts and JSON all use this rule. None without a cluster
        or a limit, and for closed-form accounting.
        """
        usable_bytes = None if self.cluster is None else self.cluster.gpu.usable_bytes
        if self.cluster is None or usable_bytes is None or self.engine.is_accounting:
            return None
        if not self.device.has_rules:
            return "does not fit" if self.worst.rest_bytes > usable_bytes else "cannot say"
        if self.over_bytes:
            return "does not fit"  # `device_bytes` agrees, but takes a replay
        held = self.device_bytes
        said = "cannot say" if held is None else self.cluster.verdict(held)
        return "fits, tight" if said == "cannot say" and self._gives_back else said

    @property
    def over_bytes(self) -> int | None:
        """Bytes by which tensors exceed what CUDA's context and NCCL leave usable; None: no limit.

        If it is more than 0 the plan does not fit. No replay is needed, since the allocator reserves at least
        the bytes of the tensors.
        """
        usable = None if self.cluster is None else self.cluster.gpu.usable_bytes
        if usable is None or self.engine.is_accounting:
            return None
        return max(0, self.worst.most_bytes + self._outside_allocator.low_bytes - usable)

    @property
    def fits(self) -> bool | None:
        """True if the `verdict` is "fits" or "fits, tight", False if "does not fit"; else None."""
        said: dict[Verdict | None, bool] = {"fits": True, "fits, tight": True, "does not fit": False}
        return said.get(self.verdict)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on the plan beside its figures."""
        found = list(notes_of(self.model, self.plan, self.cluster))
        if self.worst.setup_bytes > self.worst.peak_bytes:
            found.append(
                f"set-up: before the first step a GPU holds {human_bytes(self.worst.setup_bytes)} of "
                "tensors, more than in any step; the verdict counts it."
            )
        if host_bytes := self.host.total_bytes:
            node = 1 if self.cluster is None else self.cluster.gpus_per_node
            of_node = f", {human_bytes(node * host_bytes)} for the {node} of a node" if node > 1 else ""
            found.append(
                f"offload: the host holds {human_bytes(host_bytes)} for each GPU{of_node}; memplan does not "
                "know how much memory it has."
            )
        return tuple(found)

    @property
    def time_missing(self) -> tuple[str, ...]:
        """Why there is no step time; empty if there is."""
        return self.time_model.missing(self.plan, self.cluster)

    @cached_property
    def stage_times(self) -> tuple[StepTime, ...] | None:
        """The step of each stage of the pipeline; None without a cluster whose rates are known."""
        if self.cluster is None or self.time_missing:
            return None
        return self.time_model.step_times([stage.work for stage in self.stages], self.plan, self.cluster)

    @property
    def time(self) -> StepTime | None:
        """The step of the stage that waits least for others: parts that add up to `step_s`."""
        times = self.stage_times
        return None if times is None else min(times, key=lambda time: time.bubble_s)

    @property
    def step_s(self) -> float | None:
        """Seconds of a step; None without a cluster whose rates are known."""
        return None if (time := self.time) is None else time.total_s

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens that the whole cluster trains on per second."""
        step_s = self.step_s
        return None if step_s is None else float(per_s(self.plan.global_batch * self.plan.seq_len, step_s))

    @property
    def tokens_per_s_per_gpu(self) -> float | None:
        """`tokens_per_s` divided by the number of GPUs."""
        rate = self.tokens_per_s
        return None if rate is None else rate / self.plan.world_size

    @property
    def tokens_per_s_band(self) -> tuple[float, float] | None:
        """`tokens_per_s` times what nine in ten published runs reached of it; None: not known."""
        rate, band = self.tokens_per_s, self.time_model.band
        return None if rate is None or band is None else (rate * band.low, rate * band.high)

    @property
    def other_implementations(self) -> Iterator["Estimate"]:
        """The estimates of the same plan for the other implementations of the model that can run it."""
        for name in implementations_of(self.model):
            if name != self.model.implementation:
                try:
                    model = implemented(self.model, name)
                    other = estimate_plan(model, self.plan, self.cluster, self.device.type)
                except MemplanError:
                    continue
                yield replace(other, time_model=self.time_model)

    @property
    def total_model_flops(self) -> int:
        """FLOPs of a step on all GPUs, forward and backward, without recomputation."""
        return self._pipeline_flops * self.plan.n_replicas * self.plan.tp

    @property
    def _pipeline_flops(self) -> int:
        """FLOPs of a step on one pipeline's ranks of one place on the tensor axis."""
        return sum([model_flops(stage.record.step.counts) for stage in self.stages])

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation: the model's FLOPs over (step time x GPUs x peak dense rate)."""
        step_s = self.step_s
        if step_s is None or self.cluster is None:
            return None
        peak = peak_flops_per_s(self.plan, self.cluster)
        if peak is None:
            return None
        return float(utilisation(self._pipeline_flops, step_s, self.plan.pp, peak))

    def ledger(self, stage: int | None = None, *, host: bool = False) -> "pandas.DataFrame":
        """Every named tensor that is alive at the peak of a stage (None: the worst one), largest first.

        With `host`, the offloaded tensors that the host holds at its own worst instant.
        Columns: name, kind, shape (on this rank), dtype, count, each_bytes, total_bytes.
        """
        from memplan.tables import ledger_frame

        chosen = self.stage(stage)
        return ledger_frame(chosen.host_alive if host else chosen.alive)

    def timeline(self, stage: int | None = None) -> Stretch:
        """The step of a stage (None: the worst one), for `memplan.memory.running_bytes` and plots."""
        return self.stage(stage).record.step

    def stage(self, stage: int | None) -> StageEstimate:
        """A stage of the pipeline; None: the worst one."""
        if stage is None:
            return self.worst
        return self.stages[checked_count("stage", stage, least=0, most=len(self.stages) - 1)]

    def to_frame(self) -> "pandas.DataFrame":
        """One row per pipeline stage."""
        from memplan.tables import stages_frame

        return stages_frame(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as `--json` prints them."""
        return versioned(
            {
                "model": model_dict(self.model),
                "plan": plan_dict(self.plan) | {"n_micro_batches": self.plan.n_micro_batches},
                "cluster": None if self.cluster is None else self.cluster.to_dict(),
                "device": self.device.type,
                "n_parameters": self.n_parameters,
                "verdict": self.verdict,
                "fits": self.fits,
                "device_bytes": None if (held := self.device_bytes) is None else held._asdict(),
                "allocated_bytes": self.allocated_bytes,
                "reserved_bytes": self.reserved_bytes,
                "confirmed": self.confirmed,
                "notes": list(self.notes),
                "peak": self.peak.to_dict(),
                "worst_stage": self.worst.stage,
                **self._time_dict(),
                "stages": [stage.to_dict() for stage in self.stages],
            }
        )

    def _time_dict(self) -> dict[str, Any]:
        time = self.time
        return {
            "step_s": None if time is None else time.total_s,
            "tokens_per_s": self.tokens_per_s,
            "tokens_per_s_band": None if (band := self.tokens_per_s_band) is None else list(band),
            "tokens_per_s_per_gpu": self.tokens_per_s_per_gpu,
            "mfu": self.mfu,
            "time": None if time is None else time.parts | {"confidence": self.time_model.label},
            "time_missing": list(self.time_missing),
        }

    def plot(self) -> "Figure":
        """Each stage's peak by kind."""
        from memplan.plots import stage_peaks

        return stage_peaks(self)

    def export(self, to: str) -> str:
        """The plan as a launcher is told it: a script for "torchrun", a command for "torchtitan", ...

        `memplan.launchers.exported` also gives the file's usual name, and what the launcher does otherwise.

        Raises:
            UnknownName: a launcher that there is not.
            PlanRefused: a plan that the launcher cannot be told, with every reason and a way out of each.
        """
        from memplan.launchers import exported

        return exported(self, to).text

    def __str__(self) -> str:
        from memplan.tables import estimate_text

        return estimate_text(self)

    def __repr__(self) -> str:
        where = "" if self.cluster is None else f" on {self.cluster.name}"
        peak = f"peak {human_bytes(self.worst.peak_bytes)}"
        return f"<Estimate of {self.model.name}{where}, {self.plan.mesh}, zero={self.plan.zero}: {peak}>"

    def _repr_html_(self) -> str:
        return html_text(str(self))


def notes_of(model: Model, plan: Plan, cluster: Cluster | None) -> Iterator[str]:
    """Notes on a plan beside its figures."""
    yield from model.remarks
    yield from cluster.remarks if cluster is not None else ()
    if plan.seq_len > model.max_seq_len:
        runs = "It runs, since rotary positions have no table of weights; whether the model learns from it is"
        if isinstance(model, TracedModel):
            runs = "A trace does not say whether it runs, which learned positions do not; what it learns is"
        yield (
            f"seq_len={plan.seq_len} is longer than {model.name}'s context of {model.max_seq_len} tokens "
            f"(max_seq_len). {runs} another question."
        )
    if plan.pp == 1 and plan.schedule != Plan.__dataclass_fields__["schedule"].default:
        yield f"schedule={plan.schedule!r} makes no difference: with pp=1 there is no pipeline to order."
    yield from _note_of_dtype(model, plan)
    yield from model.notes(device_of(cluster), plan.micro_batch)
    yield from ENGINES.named(plan.engine).notes(model, plan)


def _note_of_dtype(model: Model, plan: Plan) -> Iterator[str]:
    """A sentence on the type that a config.json names, if the plan's precision holds weights in another."""
    dtype, stored = model.asked_dtype.rpartition("=")[2], plan.formats.stored.name
    if dtype in ("", stored):
        return
    names = [repr(name) for name in PRECISIONS.own if PRECISIONS.named(name).stored.name == dtype]
    held = f"precision={' or '.join(names)}" if names else "no precision"
    yield (
        f"{model.asked_dtype} in its config.json is the type that from_pretrained loads weights in, which "
        f"{held} plays; precision={plan.precision!r} holds them in {stored}."
    )


def device_of(cluster: Cluster | None) -> Device:
    """The device of a cluster's GPUs; an H100 without a cluster."""
    return H100 if cluster is None else cluster.gpu.device


@shows(EngineOptions)
def estimate(
    model: Model | str | os.PathLike[str] | Any,
    *,
    example_inputs: Any = None,
    targets: Any = None,
    loss: Callable[..., Any] | None = None,
    implementation: str | None = None,
    cluster: Cluster | str | None = None,
    dp: int | None = None,
    tp: int = 1,
    pp: int = 1,
    dp_replicate: int = 1,
    cp: int = 1,
    ep: int = 1,
    etp: int = 1,
    zero: int = 0,
    sequence_parallel: bool = False,
    micro_batch: int = 1,
    global_batch: int | None = None,
    seq_len: int | None = None,
    precision: str = "bf16-mixed",
    optimizer: Optimizer = "adamw",
    recompute: Recompute = "none",
    recompute_blocks: int | None = None,
    schedule: str = "1f1b",
    virtual_stages: int = 1,
    layers_per_stage: Sequence[int] | None = None,
    offload: bool = False,
    clip_grad_norm: float | None = None,
    loss_chunks: int = 1,
    lora_rank: int | None = None,
    lora_targets: str | Sequence[str] = ALL_LINEAR,
    lora_dropout: float | None = None,
    use_dora: bool = False,
    modules_to_save: str | Sequence[str] = "",
    quantize: Quantized = "none",
    engine: str = "torch",
    deepspeed: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    gpus_per_node: int | None = None,
    network: Link | str | None = None,
    margin: float | None = None,
    efficiency: float | None = None,
    device: DeviceType | None = None,
    cache: bool = True,
    **options: Unpack[EngineOptions],
) -> Estimate:
    """What one plan asks of each GPU.

    Args:
        model: a preset's name, the path of a Hugging Face config.json or of a trace, a Model, or your own
            `torch.nn.Module`, which is traced: with its `example_inputs`, or as `(module, example_inputs)`.
        example_inputs: what a module is called with; see `memplan.trace`, also for `targets` and `loss`.
        targets: what a module's loss compares with.
        loss: from a module's output (and `targets`) to its loss.
        implementation: whose code trains it, as "torchtitan"; left out, its family's default.
        cluster: "<n>x<gpu>" or a Cluster; None: memory and traffic on H100s, no limit.
        dp: data-parallel ranks; left out, what the cluster has left (1 without a cluster).
        tp: tensor-parallel ranks.
        pp: ranks of a pipeline.
        dp_replicate: replicas of the `dp` ranks that shard between them (HSDP).
        cp: context-parallel ranks, which divide each sequence between them.
        ep: expert-parallel ranks, which hold different experts: each `ep` neighbours of the dp x tp ranks.
        etp: tensor-parallel ranks of each expert, Megatron's `expert_tensor_parallel_size`.
        zero: 0 DDP, 1 optimizer state, 2 + gradients, 3 + weights.
        sequence_parallel: divide the sequence over the tensor axis between its regions.
        micro_batch: sequences per micro-batch and replica.
        global_batch: sequences per step; left out, one micro-batch per pipeline stage and replica.
        seq_len: tokens per sequence; left out, the model's context, and at most 8,192.
        precision: "fp32", "bf16", "bf16-autocast" (weights in bfloat16 under autocast), "bf16-reduce-fp32"
            (FSDP's reduce_dtype), "bf16-mixed", "bf16-mixed-reduce-bf16" (as Accelerate and transformers'
            Trainer set FSDP up) or "fp16-mixed" (with a loss scaler).
        optimizer: "sgd", "sgd-momentum", "adam", "adamw", or one of `memplan.optimizers.OPTIMIZERS`.
        recompute: "none", "selective" (pointwise work only) or "full" (all of a block but its input).
        recompute_blocks: recompute only the first N blocks of each stage; left out, all.
        schedule: "gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "zero-bubble", "zbv" or "dualpipe-v".
        virtual_stages: pipeline stages on each rank of the pipeline.
        layers_per_stage: blocks of each stage in model order; left out, as even as possible.
        offload: weights, gradients and optimizer state are kept on the host (FSDP).
        clip_grad_norm: the largest norm of the whole gradient; left out, not clipped.
        loss_chunks: pieces of the sequence whose cross-entropy is computed one after the other.
        lora_rank: train LoRA adapters of this rank, as PEFT does, beside the frozen weights of a model of
            transformers; these are in the type of products. Left out, all weights are trained.
        lora_targets: the modules with adapters, PEFT's `target_modules`: names, or "all-linear".
        lora_dropout: dropout before the adapters; left out, none.
        use_dora: DoRA, adapters with magnitudes.
        modules_to_save: modules that are trained whole beside the adapters, as "embed_tokens,lm_head".
        quantize: how bitsandbytes holds the frozen weights of linears, but for the head's: "none", "nf4",
            "nf4-double", whose scales are quantized too, or "int8", for inputs without outliers. Under
            "bf16-mixed" all other weights are in float32 then (`prepare_model_for_kbit_training`), under
            "bf16" in bfloat16.
        engine: "torch"; "deepspeed": DeepSpeed's ZeRO-0 to 3; "fairscale", "colossalai": FairScale's and
            Colossal-AI's ZeRO-1 and 2; "megatron": Megatron-Core; "textbook": the papers' closed forms, for
            teaching, which give no verdict; or one of another package's.
        deepspeed: a DeepSpeed configuration, as a dict or the path of its JSON: the options of
            engine="deepspeed"; what it says is not said again.
        gpus_per_node: GPUs in a node; left out, as in the cluster's table.
        network: each GPU's share of the network between nodes, as "200Gbit/s"; left out, as in the table.
        margin: the fraction of usable memory that a plan which "fits" leaves free; left out, 0.05.
        efficiency: the fraction of the peak rate at which matrix products run, if you know yours; left out,
            times as measured on GPUs.
        device: "cuda" or "cpu", whose rules apply; left out, the cluster's, and "cuda" without one. "cpu" is
            what `python -m validate` measures on processes of this machine.
        cache: whether the trace of a config.json is kept in the user's cache folder, or made anew.
        **options: the engine's own options, here those of "torch", "deepspeed", "fairscale", "colossalai"
            and "megatron"; `memplan estimate --engine NAME -h` lists one engine's.
            compile: torch.compile of each "block", or of nothing ("none").
            float8: products of linears in float8 by torchao's recipe: "tensorwise", "rowwise",
                "rowwise_with_gw_hp", or "none".
            float8_all_gather: whether FSDP2 gathers the weights of these linears in float8, and how their
                scales are made: "dynamic" (before each all-gather) or "precomputed" (after each optimizer
                step); "none": they are gathered in the type of other weights.
            liger_kernel: Liger's "fused_linear_cross_entropy" in transformers' models, or "none".
            chunked_loss: whose loss computes `loss_chunks` pieces: torchtune's "CEWithChunkedOutputLoss", of
                the logits, or torchtitan's "ChunkedLossWrapper", whose pieces include the output layer.
            activation_offloading: the inputs of recomputed blocks are kept in the host's page-locked memory,
                by PyTorch's "save_on_cpu" or TRL's "OffloadActivations", or on the GPU ("none").
            fsdp_units: what FSDP2 gathers together: "block", "block+ends" or "model".
            fsdp_blocks: blocks in a row that share a unit.
            fsdp_version: 2, `fully_shard`, or 1, `FullyShardedDataParallel`.
            use_orig_params: FSDP1's optimizer has the module's own parameters, not flat ones.
            backward_prefetch: FSDP1 gathers the next unit of a backward pass before the current unit's
                gradients are computed ("pre"), after that ("post"), or when the unit is reached ("none").
            forward_prefetch: FSDP1 gathers the next unit of a forward pass ahead.
            no_sync: FSDP accumulates whole gradients up to the last micro-batch.
            cp_rotate_method: how `context_parallel` hands keys and values around: "allgather" or "alltoall".
            optimizer_impl: "for-loop", "foreach", "fused", or "default": torch's choice.
            optimizer_in_backward: each weight has an optimizer of its own, which steps once its gradient is
                there, within the backward pass, and frees it.
            offload_gradients: torchao's optimizer on the host ("adamw-offload-torchao") frees a gradient on
                the GPU once it is copied.
            set_to_none: gradients are freed after the step rather than zeroed.
            gradient_as_bucket_view: DDP's gradients are views of its buckets.
            static_graph: DDP may rely on the same graph in each step.
            bucket_cap_bytes: size of DDP's buckets; left out, 25 MiB and a first one of 1 MiB.
            ddp_comm_hook: "none", or DDP's compression: "fp16", "bf16" or "powersgd".
            trainer: whose loop trains: "none" (a plain one), "huggingface" (transformers' Trainer), "sft",
                "dpo" or "grpo" (TRL's SFTTrainer, DPOTrainer or GRPOTrainer; a pair of dpo is two sequences).
            max_completion_length: tokens that GRPOTrainer has generated, the last ones of each sequence.
            precompute_ref_log_probs: whether DPOTrainer computes the reference's log-probabilities before
                training, and holds no reference in a step.
            ref_model: whether GRPOTrainer has a reference model, as its beta is above 0.
            torch_version: the release of PyTorch whose rules apply, "2.11" to "2.15".
            overlap_comm: DeepSpeed communicates on other streams; left out, with zero=3 only.
            reduce_bucket_size: elements of gradients that DeepSpeed or Colossal-AI reduces at a time.
            stage3_prefetch_bucket_size: elements of weights that ZeRO-3 gathers ahead.
            stage3_param_persistence_threshold: weights of at most so many elements stay gathered.
            stage3_max_live_parameters: gathered elements beyond which nothing is prefetched.
            stage3_max_reuse_distance: weights that are used within so many elements again stay gathered.
            sub_group_size: elements of a partition that ZeRO-3 updates at a time.
            zero_hpz_partition_size: ranks that divide ZeRO-3's second copy of the weights (hpZ); 1: none.
            offload_optimizer: DeepSpeed's optimizer is on the host, "cpu" or "cpu-pinned", or not, "none".
            offload_param: ZeRO-3's partitions of weights are on the host, "cpu", or not, "none".
            partition_method: how DeepSpeed's PipelineModule deals layers out: equal "parameters", numbers of
                layers, "uniform", or of blocks, "type:block".
            activation_checkpoint_interval: layers that DeepSpeed's pipeline checkpoints together; 0: none.
            reduce_buffer_size: elements of a bucket of FairScale's ShardedDataParallel; 0: no buckets.
            overlap_communication: Colossal-AI reduces gradients on another stream, as they come.
            communication_dtype: Colossal-AI reduces gradients in "fp32", "bf16", "fp16", or their own type,
                "none".
            alloc_conf: the caching allocator's settings, as in "expandable_segments:True".
            transformer_impl: Megatron's layers: "transformer_engine", or its own, "local".
            attention_backend: Transformer Engine's attention: "flash", "fused", "unfused", or "auto".
            cp_comm_type: Megatron's `cp` hands keys and values around, "p2p", or first heads too, "a2a+p2p".
            hierarchical_context_parallel_sizes: ranks that exchange heads, and groups of them in a ring.
            moe_token_dispatcher_type: how tokens reach experts of other ranks: "allgather" or "alltoall".
            moe_grouped_gemm: all experts of a rank in one product of Transformer Engine.
            moe_permute_fusion: tokens are permuted by Transformer Engine's kernels.
            moe_router_padding_for_quantization: the router sends as many as products in 8 bits take.
            use_precision_aware_optimizer: FusedAdam keeps what bfloat16 weights lack of the main ones.
            main_grads_dtype: main_grad of that optimizer, "fp32" or "bf16".
            exp_avg_dtype: its first moments, "fp32", "fp16" or "bf16".
            exp_avg_sq_dtype: its second moments.
            defer_embedding_wgrad_compute: the gradient of the output layer's weight is computed at the end.
            wgrad_deferral_limit: micro-batches that defer that gradient; None: all.
            overlap_p2p_comm_warmup_flush: interleaved stages receive ahead in warm-up and flush too.
            recompute_modules: what selective recomputation computes again, as "mla_up_proj,moe_act".
            gradient_accumulation_fusion: matrix products add weights' gradients to main_grad themselves.
            masked_softmax_fusion: Megatron's own attention masks scores by Apex's softmax.
            attention_softmax_in_fp32: PyTorch's softmax in its place is in float32.
            accumulate_allreduce_grads_in_fp32: main_grad in float32 under fp16, as always under bf16.
            overlap_grad_reduce: Megatron reduces gradients in buckets beside the backward pass.
            overlap_param_gather: its distributed optimizer gathers weights beside the forward pass.
            overlap_param_gather_with_optimizer_step: and the first chunk's beside the others' update.
            tp_comm_overlap: Transformer Engine sends over the tensor axis beside its products (Userbuffers).
            use_layer_wise_param_layout: Muon's whole weights in equal parts of buckets, or divided by size.
            microbatch_group_size_per_virtual_pipeline_stage: micro-batches in a row; None: pp.
            num_distributed_optimizer_instances: groups of ranks, each with all of the state.
            ddp_bucket_size: elements of its buckets; None: 40 million, or a million for each rank of dp.
            cross_entropy_loss_fusion: the loss by fused kernels.
            cross_entropy_fusion_impl: whose: "native", Megatron's, or "te", Transformer Engine's.
            megatron_deepspeed: BigScience's Megatron-DeepSpeed of early 2022 and DeepSpeed's optimizers.
            create_attention_mask_in_dataloader: each micro-batch comes with a mask of booleans.
            deterministic_mode: only operations whose results do not vary.
            make_vocab_size_divisible_by: the vocabulary is padded to a multiple of this times tp.
            fp8_format: products of Megatron's layers in 8 bits: "e4m3", "hybrid", or "none".
            fp8_recipe: their scales: "delayed", "tensorwise", "blockwise" or "mxfp8".
            fp8_param_gather: weights are kept, and gathered, in 8 bits.
            fp8_amax_history_len: steps whose largest elements delayed scaling keeps.
            first_last_layers_bf16: the first and the last layer have no products in 8 bits.
            cublas_workspace_config: the value of `CUBLAS_WORKSPACE_CONFIG`, as in ":4096:8".
            megatron_version: the release of Megatron-Core whose rules apply.
            ngc_container: NVIDIA's container of PyTorch below it, "25.09" (2.9) or "26.04" (2.12).

    Raises:
        MemplanError: with the value, the rule it breaks and a way out.
    """
    named: dict[str, Any] = locals()
    asked = {name: value for name, value in named.items() if name in FIELDS}
    cluster = resolve_cluster(cluster, **cast(ClusterChanges, {name: named[name] for name in CHANGES}))
    model = _resolved(named, device or device_of(cluster).type)
    if dp is None:
        asked["dp"] = _dp_left(cluster, asked | options)
    asked["global_batch"] = 0 if global_batch is None else checked_count("global_batch", global_batch)
    if seq_len is None:
        asked["seq_len"] = model.usual_seq_len
        model = replace(model, remarks=(*model.remarks, *model.usual_seq_len_said))
    told: dict[str, Any] = {**asked, **options}
    if deepspeed is not None:
        model, told = _with_configuration(named, model, told, cluster)
    return estimate_plan(model, plan_of(**told), cluster, device)


def _resolved(named: Mapping[str, Any], kernels: DeviceType) -> Model:
    """The model that `estimate` was given, by its arguments; traced with these kernels, if it has to be."""
    model, known = named["model"], {name: named[name] for name in ("targets", "loss")}
    if named["example_inputs"] is not None:
        model = {"module": model, "example_inputs": named["example_inputs"], **known}
    degrees = {name: checked_count(name, named[name], most=LARGEST_CLUSTER) for name in DIVIDING}
    return resolve(
        model,
        named["implementation"],
        kernels,
        precisions=(named["precision"],),
        cache=named["cache"],
        mesh=with_several(**degrees) if named["engine"] == "torch" else {},  # others divide it themselves
        adapted=is_of_transformers({**named, **named["options"]}),
    )


def _with_configuration(
    named: Mapping[str, Any], model: Model, told: dict[str, Any], cluster: Cluster | None
) -> tuple[Model, dict[str, Any]]:
    """The model and the keywords with what a DeepSpeed configuration says.

    `named`: the arguments of `estimate`. dp is what the configuration leaves of a cluster, if not given.

    Raises:
        InvalidValue: for a keyword that says something else.
    """
    from memplan import launchers

    if isinstance(named["deepspeed"], Mapping):
        found = launchers.read_configuration(named["deepspeed"], model)
    else:
        found = launchers.read(named["deepspeed"], "deepspeed", model)
    degrees = {axis: n for axis, n in found.keywords.items() if axis in DIVIDING}
    if degrees and named["dp"] is None:
        told |= {"dp": _dp_left(cluster, told | degrees)}
    said = found.on_ranks(told["dp"], told["micro_batch"])
    usual = {name: field.default for name, field in Plan.__dataclass_fields__.items()}
    for name, value in said.items():
        given = told.get(name, usual.get(name, value))
        if name in found.open and given != usual.get(name):
            said[name] = given
        elif given not in (value, usual.get(name, value)):
            raise InvalidValue(
                f"{name}={shown_value(given)} contradicts the DeepSpeed configuration, which says "
                f"{name}={shown_value(value)}; leave one of them out."
            )
    told |= said
    if named["implementation"] is None:
        model = resolve(model, adapted=is_of_transformers(told))
    return model, told


def _dp_left(cluster: Cluster | None, asked: Mapping[str, Any]) -> int:
    axes = {axis: asked[axis] for axis in axis_names() if axis != "dp" and axis in asked}
    n_other = prod(checked_count(a, n, most=LARGEST_CLUSTER) for a, n in axes.items())
    if cluster is None:
        return 1
    if cluster.n_gpus % n_other:
        raise InvalidValue(
            f"The other axes' {n_other} ranks do not divide the cluster's {cluster.n_gpus} GPUs; "
            f"use a cluster of {-(-cluster.n_gpus // n_other) * n_other}, or other degrees."
        )
    return cluster.n_gpus // n_other


def estimate_plan(
    model: Model, plan: Plan, cluster: Cluster | None = None, device: DeviceType | None = None
) -> Estimate:
    """The estimate of a Plan, a Model and a Cluster.

    Raises:
        MemplanError: if the plan cannot run on this model, its mesh is not the cluster, or the cluster is of
            another device.
    """
    if device is None and cluster is None and isinstance(model, TracedModel):
        device = model.device
    runs_on = _checked_device(device, cluster)
    model = of_sizes(model, plan.micro_batch, plan.seq_len, runs_on.type, plan.precision)
    check_plan(model, plan, runs_on)
    if cluster is not None and plan.world_size != cluster.n_gpus:
        raise InvalidValue(
            f"{plan.mesh} = {plan.world_size} ranks are not the cluster's {cluster.n_gpus} GPUs; use "
            f"cluster='{plan.world_size}x{cluster.gpu.name}', or leave out dp."
        )
    return estimate_of(model, plan, runs_on, cluster, stage_estimates(model, plan, runs_on))


def _checked_device(asked: DeviceType | None, cluster: Cluster | None) -> Device:
    known = device_of(cluster)
    if asked is None:
        return known
    checked_choice("device", asked, get_args(DeviceType))
    if cluster is not None and asked != known.type:
        raise InvalidValue(
            f"device={asked!r} contradicts cluster={cluster.name!r}, whose devices are of type "
            f"{known.type!r}; leave one of them out."
        )
    return CPU if asked == "cpu" else known


def stage_estimates(model: Model, plan: Plan, device: Device) -> Iterator[StageEstimate]:
    """The estimate of each rank of the pipeline, made as it is read."""
    for record in ENGINES.named(plan.engine).play(model, plan, device):
        yield StageEstimate(plan=plan, record=record.checked(plan.engine))


def estimate_of(
    model: Model, plan: Plan, device: Device, cluster: Cluster | None, stages: Iterable[StageEstimate]
) -> Estimate:
    """The estimate of a plan whose stages are known."""
    return Estimate(
        model=model,
        plan=plan,
        cluster=cluster,
        device=device,
        stages=tuple(stages),
        time_model=time_model_of(cluster),
        confirmed=ENGINES.named(plan.engine).confirmed_on(device),
    )


def rank_estimate(
    model: Model, plan: Plan, rank: Rank, device: Device, backend: Backend | None = None
) -> StageEstimate:
    """The estimate of one given rank, as `validate` compares it with that rank's run.

    `backend` is what ranks talk by: left out, gloo on CPU and NCCL on GPUs.
    """
    check_plan(model, plan, device)
    record = ENGINES.named(plan.engine).play_rank(model, plan, rank, device, backend)
    return StageEstimate(plan=plan, record=record.checked(plan.engine))
