"""memplan's prediction for one rank."""

from collections import Counter
from dataclasses import dataclass

from memplan.estimate import StageEstimate, rank_estimate
from memplan.mesh import REST, WORLD, Group, Mesh, shard_group
from validate.cases import Case, check_case
from validate.collectives import Collective


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The numbers of one rank that a run can confirm, in bytes, and the collectives of one step."""

    weights_bytes: int
    grads_bytes: int
    optimizer_bytes: int
    peak_bytes: int
    collectives: tuple[Collective, ...]


def estimated_rank(case: Case, rank: int) -> StageEstimate:
    """memplan's estimate of one of a case's ranks, by the rules of where it runs.

    Raises:
        PlanRefused: if the plan cannot run.
    """
    check_case(case)
    return rank_estimate(case.model, case.plan, case.plan.place(rank), case.kernels, case.talks_by)


def axis_of(mesh: Mesh, group: Group) -> Group:
    """The name under which a run counts the collectives of a group: of those of all ranks the last one.

    PyTorch makes one process group of all ranks.

    >>> axis_of(Mesh({"dp": 4, "ep": 4}), "dp"), axis_of(Mesh({"dp": 4, "tp": 2, "ep": 4}), "dp")
    ('ep', 'dp')
    """
    cp = mesh.sizes["cp"]
    if mesh.size(group) < mesh.n_ranks or max(cp, *mesh.views.values()) == 1:
        return group
    names = WORLD, *mesh.sizes, REST, *mesh.views, *([shard_group(cp)] if cp > 1 else [])
    return [one for one in names if mesh.size(one) == mesh.n_ranks][-1]


def prediction(case: Case, rank: int) -> Prediction:
    """The figures of `estimated_rank` that a run can confirm; copies to and from the host are no collectives.

    Raises:
        PlanRefused: if the plan cannot run.
    """
    estimated = estimated_rank(case, rank)
    calls: Counter[tuple[str, str]] = Counter()
    payload_bytes: Counter[tuple[str, str]] = Counter()
    for collective in estimated.collectives:
        if collective.axis == "host":
            continue
        axis = axis_of(case.plan.mesh, collective.axis)
        calls[collective.kind, axis] += collective.calls
        payload_bytes[collective.kind, axis] += collective.payload_bytes
    return Prediction(
        weights_bytes=estimated.states.weights_bytes,
        grads_bytes=estimated.states.grads_bytes,
        optimizer_bytes=estimated.states.optimizer_bytes,
        peak_bytes=estimated.peak.total_bytes,
        collectives=tuple(
            Collective(kind=kind, axis=axis, calls=n, payload_bytes=payload_bytes[kind, axis])
            for (kind, axis), n in sorted(calls.items())
        ),
    )
