"""Traffic as a fold over the record of a step: every collective, summed by kind, mesh axis and purpose."""

from dataclasses import asdict, dataclass
from typing import Any, Final

from memplan.engines.base import ENGINES
from memplan.plan import MESH_AXES, Plan
from memplan.record import Axis, Collective, CollectiveKind, Counts, Overlap

AXES: Final[tuple[Axis, ...]] = (*reversed(MESH_AXES), "world", "host")


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTotal:
    """All collectives of one kind, axis and purpose in one step of one rank.

    `payload_bytes` is the operands' sum as the framework passes them (the full tensor of an all-gather or a
    reduce-scatter), `wire_bytes` what this rank sends.
    """

    kind: CollectiveKind
    axis: Axis
    what: str
    calls: int
    payload_bytes: int
    wire_bytes: int
    overlap: Overlap

    @property
    def overlappable(self) -> bool:
        """Whether computation may overlap with it."""
        return self.overlap != "nothing"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as `--json` prints them."""
        plain = asdict(self)
        del plain["overlap"]
        return plain | {"overlappable": self.overlappable}


def collectives(counts: Counts, plan: Plan) -> tuple[CollectiveTotal, ...]:
    """All collectives of one rank's step from their occurrences, the innermost mesh axis first."""
    wire_bytes = ENGINES.named(plan.engine).wire_bytes
    totals: dict[tuple[CollectiveKind, Axis, str, Overlap], list[int]] = {}
    for event, n in counts.items():
        if isinstance(event, Collective) and n:
            total = totals.setdefault((event.kind, event.axis, event.what, event.overlap), [0, 0])
            total[0] += n * event.calls
            total[1] += n * event.calls * event.payload_bytes
    ranks = ranks_along(plan)
    inner_first = sorted(totals.items(), key=lambda total: AXES.index(total[0][1]))
    return tuple(
        [
            CollectiveTotal(
                kind=kind,
                axis=axis,
                what=what,
                calls=calls,
                payload_bytes=payload_bytes,
                wire_bytes=wire_bytes(kind, payload_bytes, ranks[axis]),
                overlap=overlap,
            )
            for (kind, axis, what, overlap), (calls, payload_bytes) in inner_first
        ]
    )


def ranks_along(plan: Plan) -> dict[Axis, int]:
    """The number of ranks of each axis."""
    ranks: dict[Axis, int] = {axis: getattr(plan, axis) for axis in MESH_AXES}
    return ranks | {"host": 1, "world": plan.world_size}
