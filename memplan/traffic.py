"""Every collective of a step, as one rank issues it."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from memplan.engines import textbook
from memplan.engines.torch import Stage
from memplan.engines.torch.fsdp import Unit
from memplan.engines.torch.sharding import ddp_buckets
from memplan.engines.trace import Segment
from memplan.models import Llama, Model
from memplan.plan import Plan
from memplan.shapes import Parameter

Axis = Literal["dp", "tp", "pp"]

NEXT_TO_COMPUTE: Final = frozenset({"gather weights", "reduce gradients", "all-reduce gradients"})
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

    all-reduce 2 (n-1)/n of the payload, all-gather and reduce-scatter (n-1)/n of the full tensor, a
    broadcast (n-1)/n on average over the ranks, point to point all of it, a receive nothing.

    Source: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms".

    >>> wire_bytes("all_reduce", 1000, 4), wire_bytes("all_gather", 1000, 4), wire_bytes("send", 1000, 2)
    (1500, 750, 1000)
    """
    match kind:
        case "all_reduce":
            return 2 * payload_bytes * (n_ranks - 1) // n_ranks
        case "all_gather" | "reduce_scatter" | "broadcast":
            return payload_bytes * (n_ranks - 1) // n_ranks
        case "send":
            return payload_bytes
        case _:
            return 0


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


def collectives(stage: Stage) -> tuple[Collective, ...]:
    """All collectives of one rank's step, summed by kind, axis and purpose."""
    calls: Counter[tuple[str, Axis, str]] = Counter()
    payload: Counter[tuple[str, Axis, str]] = Counter()
    for kind, axis, what, n, n_bytes in _calls(stage):
        calls[kind, axis, what] += n
        payload[kind, axis, what] += n_bytes
    ranks = {"dp": stage.plan.dp, "tp": stage.plan.tp, "pp": 2}
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


def _calls(stage: Stage) -> Iterator[Calls]:
    if stage.plan.tp > 1:
        yield from _tensor_axis(stage)
    if stage.ddp:
        yield from _replicated(stage)
    if stage.fsdp:
        yield from _sharded(stage)
    if stage.plan.pp > 1:
        yield from _pipeline(stage)


def _tensor_axis(stage: Stage) -> Iterator[Calls]:
    trace, m, n = stage.trace, stage.plan.n_micro_batches, stage.n_blocks
    ends = (trace.embed, trace.head, trace.loss, trace.head_backward, trace.embed_backward)
    parts: list[tuple[Segment, int]] = [(segment, m) for segment in ends]
    parts += [(segment, m * n) for segment in (trace.block, trace.block_backward)]
    for segment, times in parts:
        for call in segment.calls:
            yield call.kind, "tp", f"{call.what}, {call.phase}", times, times * call.payload_bytes
    for parameter, count in stage.counted_parameters():
        if parameter.summed_over_tp:
            times = count * _sums_per_step(stage)
            yield "all_reduce", "tp", "partial gradients", times, times * parameter.n_bytes


def _sums_per_step(stage: Stage) -> int:
    """How often the tensor ranks sum a gradient of which each knows a part.

    DDP and FSDP2 do it once per reduction, in backward. Without them the gradient stays partial until the
    optimizer reads it, and each read sums anew: three in Adam, one in SGD.

    Source: torch/distributed/tensor/_dispatch.py (implicit redistribution), torch/optim/adam.py (`lerp_` and
    `addcmul_` with the gradient twice).
    """
    if stage.ddp:
        return stage.plan.n_micro_batches
    if stage.fsdp:
        return 1 if stage.plan.pp > 1 else stage.plan.n_micro_batches
    return 3 if stage.plan.optimizer in ("adam", "adamw") else 1


def _ready_order(stage: Stage) -> list[Parameter]:
    """Parameters in the order their gradients become ready, the last of a tied one's uses counting."""

    def ready(segment: Segment) -> list[Parameter]:
        return [e.parameter for e in segment.events if e.parameter is not None]

    trace = stage.trace
    return [
        *ready(trace.head_backward),
        *ready(trace.block_backward) * stage.n_blocks,
        *ready(trace.embed_backward),
    ]


def _replicated(stage: Stage) -> Iterator[Calls]:
    buckets = ddp_buckets(_ready_order(stage))
    yield "all_reduce", "dp", "all-reduce gradients", len(buckets), sum(buckets)
    if isinstance(stage.model, Llama) and stage.plan.pp == 1:
        seq_len, half = stage.plan.seq_len, stage.model.d_head // 2
        yield "broadcast", "dp", "rotation buffer", 1, 8 * seq_len * half
    if stage.plan.zero == 1:
        parameters = stage.counted_parameters()
        n_bytes = sum(n * p.n_bytes for p, n in parameters)
        yield "broadcast", "dp", "updated weights", sum(n for _, n in parameters), n_bytes


def _sharded(stage: Stage) -> Iterator[Calls]:
    n, m = stage.n_blocks, stage.plan.n_micro_batches
    root, block = Unit(stage, "root", stage.ends), Unit(stage, "block", stage.trace.block_parameters)
    again = stage.plan.zero == 3
    if stage.plan.pp == 1:
        gathers = {root: m, block: m * n * (2 if again else 1)}
        reduces = {root: m, block: m * n}
    else:
        passes = _gathering_passes(stage) if again else 1
        gathers = {root: 1, block: passes * n}
        reduces = {root: 1, block: n}
    for unit, calls in gathers.items():
        if unit.flat.n_bytes:
            yield "all_gather", "dp", "gather weights", calls, calls * unit.flat.n_bytes
    for unit, calls in reduces.items():
        if unit.flat.n_bytes:
            yield "reduce_scatter", "dp", "reduce gradients", calls, calls * unit.reduce_input.n_bytes


def _gathering_passes(stage: Stage) -> int:
    """Passes of a schedule that find the blocks' weights freed.

    Those are every forward before the first backward, and every backward that follows a forward.
    """
    m = stage.plan.n_micro_batches
    if stage.plan.schedule == "gpipe":
        return m + 1
    warm_up = min(m, stage.plan.pp - stage.rank.pp)
    return warm_up + 1 + (m - warm_up)


def _pipeline(stage: Stage) -> Iterator[Calls]:
    m, n_bytes = stage.plan.n_micro_batches, stage.trace.boundary.n_bytes
    if not stage.first:
        yield "recv", "pp", "activations", m, m * n_bytes
        yield "send", "pp", "activation gradients", m, m * n_bytes
    if not stage.last:
        yield "send", "pp", "activations", m, m * n_bytes
        yield "recv", "pp", "activation gradients", m, m * n_bytes
