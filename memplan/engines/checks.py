"""Whether an engine can run a plan: `check_plan` asks the rules of the plan's engine, one after the other."""

from memplan.device import Device
from memplan.engines.base import ENGINES
from memplan.models import Model
from memplan.plan import Plan


def check_plan(model: Model, plan: Plan) -> None:
    """Raise unless the plan's engine can run it on this model.

    Raises:
        UnknownName: an engine that there is not.
        PlanRefused: with value, rule and way out.
        MissingRule: an option that no rule of the engine covers yet.
    """
    for rule in ENGINES.named(plan.engine).refusals:
        rule(model, plan)


def check_device(plan: Plan, device: Device) -> None:
    """Raise if the plan's engine does not run it correctly on this device.

    Raises:
        PlanRefused: with value, rule and way out.
    """
    ENGINES.named(plan.engine).check_device(plan, device)
