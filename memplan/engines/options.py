"""An engine's own options: flat keywords beside a plan's fields, kept in a frozen value of the engine's.

An engine names the value's type in `Engine.options`: a frozen dataclass, each of whose fields is `described`
(see `memplan.fields`). From that follow the flags of the command line, the checks, the columns of a search,
the names of cases and the JSON.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from memplan.engines.base import ENGINES
from memplan.errors import unknown_name
from memplan.fields import Field, described_fields
from memplan.plan import FIELDS, Plan


class Said(NamedTuple):
    """What a plan says in one of its fields or of its engine's options."""

    name: str
    field: Field
    value: Any
    default: Any

    @property
    def is_default(self) -> bool:
        """Whether it is what the field says where it is left out."""
        return bool(self.value == self.default)


def option_fields(engine: str) -> dict[str, Field]:
    """The fields of an engine's own options by name.

    Raises:
        UnknownName: an engine that there is not.
    """
    kind = ENGINES.named(engine).options
    return {} if kind is None else described_fields(kind)


def plan_of(**values: Any) -> Plan:
    """A plan from flat keywords: its own fields, and its engine's options.

    Raises:
        MemplanError: as `memplan.Plan`; a name that is neither.
    """
    own = {name: value for name, value in values.items() if name in FIELDS}
    plan = Plan(**own)
    known = option_fields(plan.engine)
    for name in values.keys() - own.keys() - known.keys():
        raise unknown_name("option of a plan", name, [*FIELDS, *known])
    kind = ENGINES.named(plan.engine).options
    if kind is None:
        return plan
    options = {name: known[name].checked(name, values[name]) for name in known if name in values}
    return replace(plan, options=kind(**options))


def said_by(plan: Plan) -> Iterator[Said]:
    """All that a plan says: its own fields, then its engine's options."""
    for name, field in FIELDS.items():
        yield Said(name, field, getattr(plan, name), Plan.__dataclass_fields__[name].default)
    if plan.options is not None:
        for name, field in described_fields(type(plan.options)).items():
            default = type(plan.options).__dataclass_fields__[name].default
            yield Said(name, field, getattr(plan.options, name), default)


def plan_dict(plan: Plan) -> dict[str, Any]:
    """All that a plan says as flat plain values."""
    return {said.name: said.value for said in said_by(plan)}
