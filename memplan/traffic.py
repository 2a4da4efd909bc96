"""Traffic as a fold over the record of a step: every collective, summed by kind, mesh axis and purpose."""

from dataclasses import asdict, dataclass
from typing import Any

from memplan.engines.base import ENGINES
from memplan.mesh import Group, inner_first
from memplan.plan import Plan
from memplan.record import COMPUTE, Collective, CollectiveKind, Counts


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTotal:
    """All collectives of one kind, axis and purpose in one step of one rank.

    `payload_bytes` is the operands' sum as the framework passes them (the full tensor of an all-gather or a
    reduce-scatter), `wire_bytes` what this rank sends. `overlappable`: computation goes on meanwhile.
    """

    kind: CollectiveKind
    axis: Group
    what: str
    calls: int
    payload_bytes: int
    wire_bytes: int
    overlappable: bool

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as `--json` prints them."""
        return asdict(self)


def collectives(counts: Counts, plan: Plan) -> tuple[CollectiveTotal, ...]:
    """All collectives of one rank's step from their occurrences, the innermost mesh axis first."""
    wire_bytes = ENGINES.named(plan.engine).wire_bytes
    totals: dict[tuple[CollectiveKind, Group, str, bool], list[int]] = {}
    for event, n in counts.items():
        if isinstance(event, Collective) and n:
            key = event.kind, event.axis, event.what, event.stream != COMPUTE
            total = totals.setdefault(key, [0, 0])
            total[0] += n * event.calls
            total[1] += n * event.calls * event.payload_bytes
    mesh = plan.mesh
    ranks = {axis: mesh.size(axis) for _, axis, _, _ in totals}
    order = list(inner_first(ranks))
    ordered = sorted(totals.items(), key=lambda total: order.index(total[0][1]))
    return tuple(
        [
            CollectiveTotal(
                kind=kind,
                axis=axis,
                what=what,
                calls=calls,
                payload_bytes=payload_bytes,
                wire_bytes=wire_bytes(kind, payload_bytes, ranks[axis]),
                overlappable=overlappable,
            )
            for (kind, axis, what, overlappable), (calls, payload_bytes) in ordered
        ]
    )
