"""Every collective of a step, as one rank issues it."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from memplan.engines import textbook
from memplan.engines.torch import RankStages, Stage
from memplan.engines.torch.ddp import bucket_of, buckets, payloads
from memplan.engines.torch.fsdp import Unit, Units
from memplan.engines.torch.optimizer import all_reduces
from memplan.engines.torch.orders import Action, plan_counts, plan_order, times_unsharded
from memplan.engines.trace import Segment
from memplan.errors import MissingRule
from memplan.models import Model
from memplan.plan import MESH_AXES, SINGLE_STAGE_SCHEDULES, SPLITTING_SCHEDULES, Axis, Plan
from memplan.shapes import FP32, DType, Parameter

NEXT_TO_COMPUTE: Final = frozenset(
    {
        "gather weights",
        "reduce gradients",
        "all-reduce gradients",
        "weights to the GPU",
        "gradients to the host",
    }
)
"""What PyTorch issues beside the computation that does not wait for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """All calls of one kind, over one mesh axis, for one purpose, in one step of one rank.

    `payload_bytes` is the operands' sum as the framework passes them (the full tensor of an all-gather or a
    reduce-scatter), `wire_bytes` what this rank sends under a ring.
    """

    kind: str
    axis: Axis
    what: str
    calls: int
    payload_bytes: int
    wire_bytes: int
    overlappable: bool


def wire_bytes(kind: str, payload_bytes: int, n_ranks: int) -> int:
    """What one of n ranks sends under a ring.

    all-reduce 2 (n-1)/n of the payload, all-gather and reduce-scatter (n-1)/n of the full tensor, all-to-all
    (n-1)/n of the tensor, of which a rank keeps its own part, a broadcast (n-1)/n on average over the ranks,
    point to point and copies all of it, a receive nothing.

    Source: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms".

    >>> wire_bytes("all_reduce", 1000, 4), wire_bytes("all_gather", 1000, 4), wire_bytes("send", 1000, 2)
    (1500, 750, 1000)

    Raises:
        MissingRule: for any other kind.
    """
    match kind:
        case "all_reduce":
            return 2 * payload_bytes * (n_ranks - 1) // n_ranks
        case "all_gather" | "reduce_scatter" | "broadcast" | "all_to_all":
            return payload_bytes * (n_ranks - 1) // n_ranks
        case "send" | "copy":
            return payload_bytes
        case "recv":
            return 0
        case _:
            raise MissingRule(
                f"no rule states what the collective {kind!r} sends; add its figure to `wire_bytes`."
            )


def textbook_collectives(model: Model, plan: Plan, pp_rank: int) -> tuple[Collective, ...]:
    """What the papers count, a ring's factor (n-1)/n neglected: an all-reduce sends twice its payload."""
    return tuple(
        Collective(
            kind=kind,
            axis=axis,
            what=what,
            calls=n,
            payload_bytes=round(n_bytes),
            wire_bytes=round(n_bytes) * (2 if kind == "all_reduce" else 1),
            overlappable=False,
        )
        for kind, axis, what, n, n_bytes in textbook.traffic(model, plan, pp_rank)
    )


Calls = tuple[str, Axis, str, int, int]
"""Kind, axis, purpose, number of calls, payload bytes of all of them."""

Purpose = tuple[str, Axis, str]
"""Kind, axis, purpose."""


class Rounds(NamedTuple):
    """How often one stage of a rank does in a step what it repeats.

    Micro-batches, of which so many go back in two parts; FSDP2's gathers, those of units that have freed
    their weights since, its reductions.
    """

    micro_batches: int
    split: int
    gathers: int
    gathers_again: int
    reductions: int


def rounds_of(plan: Plan, pp_rank: int, firsts: Sequence[bool]) -> list[Rounds]:
    """Those of a rank's stages, each of which may be the pipeline's first."""
    m = plan.n_micro_batches
    if plan.pp == 1:
        return [Rounds(m, 0, m, m, m)]
    if plan.schedule in SINGLE_STAGE_SCHEDULES:
        return [Rounds(m, 0, 1, m, 1)]
    in_parts = plan_counts(plan, pp_rank) if plan.schedule in SPLITTING_SCHEDULES else {}
    unsharded = times_unsharded(plan_order(plan, pp_rank)) if plan.fsdp else {}
    found = []
    for local, first in enumerate(firsts):
        split = 0 if first else in_parts.get(Action("backward-input", local), 0)
        found.append(Rounds(m, split, *unsharded.get(local, (1, m)), 1))
    return found


def rounds(stages: RankStages) -> list[Rounds]:
    """Those of each stage of a rank."""
    return rounds_of(stages.plan, stages.rank.pp, [stage.first for stage in stages])


def payloads_bytes(calls: Iterable[Calls]) -> dict[Purpose, int]:
    """What is passed to collectives, summed as `collectives` does."""
    payload: Counter[Purpose] = Counter()
    for kind, axis, what, _, n_bytes in calls:
        payload[kind, axis, what] += n_bytes
    return payload


def collectives(stages: RankStages) -> tuple[Collective, ...]:
    """All collectives of one rank's step, summed by kind, axis and purpose."""
    calls: Counter[Purpose] = Counter()
    payload: Counter[Purpose] = Counter()
    for kind, axis, what, n, n_bytes in (*calls_of_passes(stages, rounds(stages)), *calls_of_update(stages)):
        calls[kind, axis, what] += n
        payload[kind, axis, what] += n_bytes
    ranks = ranks_along(stages.plan)
    return tuple(
        Collective(
            kind=kind,
            axis=axis,
            what=what,
            calls=n,
            payload_bytes=payload[kind, axis, what],
            wire_bytes=wire_bytes(kind, payload[kind, axis, what], ranks[axis]),
            overlappable=what in NEXT_TO_COMPUTE,
        )
        for (kind, axis, what), n in calls.items()
        if n
    )


def ranks_along(plan: Plan) -> dict[Axis, int]:
    """How many ranks each axis has."""
    ranks: dict[Axis, int] = {axis: getattr(plan, axis) for axis in MESH_AXES}
    return ranks | {"host": 1, "world": plan.world_size}


def calls_of_passes(stages: RankStages, every: Sequence[Rounds]) -> Iterator[Calls]:
    """What a rank sends in its passes, each stage as often as its rounds say."""
    plan = stages.plan
    for stage, times in zip(stages, every, strict=True):
        if plan.tp > 1:
            yield from _tensor_axis(stage, times)
        if plan.ddp:
            yield from _replicated(stage)
        if plan.fsdp:
            yield from _sharded(stages, stage, times)
    if plan.pp > 1:
        yield from _pipeline(stages, every)


def calls_of_update(stages: RankStages) -> Iterator[Calls]:
    """What a rank sends in its update."""
    for axis, what, n, n_bytes in all_reduces(stages):
        yield "all_reduce", axis, what, n, n_bytes
    if stages.plan.zero == 1:
        yield from _updated(stages)


def segments_of_step(stage: Stage, times: Rounds) -> list[tuple[Segment, int]]:
    """What a stage runs in a step, forward and backward, and how often."""
    trace, m, split = stage.trace, times.micro_batches, times.split
    whole = m - split
    parts: list[tuple[Segment, int]] = [(segment, m) for segment in (trace.embed, trace.head, trace.loss)]
    parts += [(trace.head_backward, whole), (trace.embed_backward, whole)]
    for block, n in stage.blocks:
        parts += [(block.forward, m * n), (block.backward, whole * n)]
    if split:
        parts += [(segment, split * n) for segment, n in stage.split.turns]
    return parts


def _tensor_axis(stage: Stage, times: Rounds) -> Iterator[Calls]:
    for segment, n_times in segments_of_step(stage, times):
        for call in segment.calls:
            yield call.kind, "tp", f"{call.what}, {call.phase}", n_times, n_times * call.payload_bytes
    sums = times.reductions if stage.plan.fsdp else times.micro_batches
    for parameter, n in stage.counted_parameters():
        if parameter.summed_over_tp and (stage.plan.ddp or stage.plan.fsdp):
            n_bytes = parameter.n_elements * _summed_dtype(stage, parameter).itemsize
            yield "all_reduce", "tp", "partial gradients", n * sums, n * sums * n_bytes


def _summed_dtype(stage: Stage, parameter: Parameter) -> DType:
    """FSDP2 widens gradients before a pipeline's micro-batches are added, and they are summed as they are.

    Source: torch/distributed/fsdp/_fully_shard/_fsdp_param.py (`to_accumulated_grad_if_needed`).
    """
    return FP32 if stage.plan.fsdp and stage.plan.mixed and stage.plan.pp > 1 else parameter.dtype


def _replicated(stage: Stage) -> Iterator[Calls]:
    yield "all_reduce", "dp", "all-reduce gradients", *_reduced(stage)
    if not stage.model.learned_positions and stage.plan.pp == 1:
        seq_len, half = stage.plan.seq_len, stage.model.d_head // 2
        yield "broadcast", "dp", "rotation buffer", 1, 8 * seq_len * half


def _reduced(stage: Stage) -> tuple[int, int]:
    """How many all-reduces the buckets take, and their bytes."""
    hook, dtype = stage.plan.ddp_comm_hook, stage.weight_dtype
    reduced = [n_bytes for found in buckets(stage) for n_bytes in payloads(hook, bucket_of(found), dtype)]
    return len(reduced), sum(reduced)


def _updated(stages: RankStages) -> Iterator[Calls]:
    parameters = stages.counted_parameters()
    n_bytes = sum(n * p.n_bytes for p, n in parameters)
    yield "broadcast", "dp", "updated weights", sum(n for _, n in parameters), n_bytes


def _sharded(stages: RankStages, stage: Stage, times: Rounds) -> Iterator[Calls]:
    """What each unit gathers and reduces; one that frees its weights gathers them again.

    Under a schedule the weights are freed after a forward pass only: whatever pass follows finds them so.
    """
    for unit, n_units in Units(stage):
        gathers = n_units * (times.gathers + times.gathers_again * unit.reshards)
        yield "all_gather", "dp", "gather weights", gathers, gathers * unit.flat.n_bytes
        if stage.offloads:
            yield from _copied(unit, n_units, gathers, times.reductions, stages)
        n = n_units * times.reductions
        yield "reduce_scatter", "dp", "reduce gradients", n, n * unit.reduce_input.n_bytes
        if unit.replicates:
            n = n * unit.replicates
            yield "all_reduce", "dp_replicate", "all-reduce gradients", n, n * unit.reduced.n_bytes


def _copied(unit: Unit, n_units: int, gathers: int, reduces: int, stages: RankStages) -> Iterator[Calls]:
    """What an offloaded unit copies: padded shards before each gather, own gradients after each reduction.

    Only gradients that need not be added to older ones are copied beside the computation.

    Source: torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py (`foreach_reduce`).
    """
    fresh = 1 if stages.plan.set_to_none else 0
    for parameters, times in unit.parts:
        for p in parameters:
            n, shard_bytes = gathers * times, unit.shard(p) * stages.weight_dtype.itemsize
            yield "copy", "host", "weights to the GPU", n, n * shard_bytes
            own_bytes = stages.weight_elements(p) * unit.dtype.itemsize
            for what, passes in (
                ("gradients to the host", fresh),
                ("gradients to be added", reduces - fresh),
            ):
                n = n_units * times * passes
                yield "copy", "host", what, n, n * own_bytes


def _pipeline(stages: RankStages, every: Sequence[Rounds]) -> Iterator[Calls]:
    """What goes to other ranks; nothing is sent to a stage of the same rank."""
    for index, stage, (m, *_) in zip(stages.indices, stages, every, strict=True):
        n_bytes = stage.trace.boundary.n_bytes
        if not stage.first and index - 1 not in stages.indices:
            yield "recv", "pp", "activations", m, m * n_bytes
            yield "send", "pp", "activation gradients", m, m * n_bytes
        if not stage.last and index + 1 not in stages.indices:
            yield "send", "pp", "activations", m, m * n_bytes
            yield "recv", "pp", "activation gradients", m, m * n_bytes
