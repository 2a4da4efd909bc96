"""Whether an engine can run a plan: `check_plan` asks the rules of the plan's engine, one after the other."""

from memplan.device import Device
from memplan.engines.base import ENGINES
from memplan.errors import InvalidValue, shown_value
from memplan.models import Model
from memplan.plan import Plan


def check_plan(model: Model, plan: Plan, device: Device | None = None) -> None:
    """Raise unless the plan's engine can run it on this model, and correctly on the device, if one is given.

    Raises:
        UnknownName: an engine that there is not.
        PlanRefused: with value, rule and way out.
        InvalidValue: options of another engine.
        MissingRule: an option that no rule of the engine covers yet.
    """
    engine = ENGINES.named(plan.engine)
    options = engine.options
    if plan.options is not None and (options is None or not isinstance(plan.options, options)):
        raise InvalidValue(
            f"options={shown_value(plan.options)} are not the options of engine={plan.engine!r}; use "
            f"{'none' if options is None else options.__name__}."
        )
    for rule in engine.rules:
        rule(model, plan)
    if device is not None:
        engine.check_device(plan, device)
