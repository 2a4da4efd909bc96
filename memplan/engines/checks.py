"""Whether an engine can run a plan: `check_plan` asks the rules of the plan's engine, one after the other."""

from collections.abc import Callable, Mapping
from typing import Final

from memplan.device import Device
from memplan.engines import textbook
from memplan.engines.torch import refusals as torch
from memplan.models import Model
from memplan.plan import Plan

Rule = Callable[[Model, Plan], None]

REFUSALS: Final[Mapping[str, tuple[Rule, ...]]] = {"torch": torch.REFUSALS, "textbook": textbook.REFUSALS}
"""The rules of each engine, in the order in which they are asked."""


def check_plan(model: Model, plan: Plan) -> None:
    """Raise unless the plan's engine can run it on this model.

    Raises:
        PlanRefused: with value, rule and way out.
        MissingRule: an option that no rule of the engine covers yet.
    """
    for rule in REFUSALS[plan.engine]:
        rule(model, plan)


def check_device(plan: Plan, device: Device) -> None:
    """Raise if PyTorch runs the plan on this device, but computes it wrongly.

    Raises:
        PlanRefused: with value, rule and way out.
    """
    torch.check_device(plan, device)
