"""Whether an engine can run a plan: `check_plan` asks the rules of the plan's engine, one after the other."""

from memplan.device import Device
from memplan.engines.base import ENGINES
from memplan.errors import InvalidValue, shown_value
from memplan.models import Model
from memplan.plan import Plan


def check_plan(model: Model, plan: Plan) -> None:
    """Raise unless the plan's engine can run it on this model.

    Raises:
        UnknownName: an engine that there is not.
        PlanRefused: with value, rule and way out.
        InvalidValue: options of another engine.
        MissingRule: an option that no rule of the engine covers yet.
    """
    options = ENGINES.named(plan.engine).options
    if plan.options is not None and (options is None or not isinstance(plan.options, options)):
        raise InvalidValue(
            f"options={shown_value(plan.options)} are not the options of engine={plan.engine!r}; use "
            f"{'none' if options is None else options.__name__}."
        )
    for rule in ENGINES.named(plan.engine).refusals:
        rule(model, plan)


def check_device(plan: Plan, device: Device) -> None:
    """Raise if the plan's engine does not run it correctly on this device.

    Raises:
        PlanRefused: with value, rule and way out.
    """
    ENGINES.named(plan.engine).check_device(plan, device)
