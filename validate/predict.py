"""What memplan says about one rank."""

from dataclasses import dataclass

from memplan import Model, Plan
from validate.collectives import Collective
from validate.parallelize import Coordinates


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The numbers of one rank that a run can confirm, in bytes, and the collectives of one step."""

    weights_bytes: int
    grads_bytes: int
    optimizer_bytes: int
    peak_bytes: int
    collectives: tuple[Collective, ...]


def prediction(model: Model, plan: Plan, at: Coordinates) -> Prediction:
    """memplan's estimate of the rank at these coordinates.

    Raises:
        PlanRefused: if the plan cannot run.
    """
    raise NotImplementedError
