"""Which rules refuse which of many plans: each is asked once for each set of values of what it reads."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any, Final, NamedTuple, cast, final

import numpy as np

from memplan.engines.base import engine_named
from memplan.errors import MemplanError, kind_of
from memplan.models import Model
from memplan.plan import PLAN_RULES, Plan
from memplan.search.plans import Column

RUNS: Final = -1
"""Stands for the rule of a plan that no rule refuses."""

Axis = Sequence[Mapping[str, Any]]
"""At each place along it values of the same fields of a plan."""


class Verdicts(NamedTuple):
    """Of each plan on a grid the number of the rule that refuses it, or `RUNS`; or an axis of length 1.

    `always`: with one micro-batch for each pipeline stage, without an axis of their numbers. `at`: of the
    rules that ask for this number with each of them, along the last axis.
    """

    always: Column
    at: Column


@final
class Rules:
    """The rules of `check_plan`, for plans that have in common with `base` what no axis varies.

    What a rule reads of a plan is noted. So a grid's axes that make none of it are left out, and what a rule
    says of the other places holds along them too. `texts` numbers the kinds of plans that are refused.
    """

    def __init__(self, model: Model, base: Plan, texts: dict[str, int]) -> None:
        self.base = {name: getattr(base, name) for name in Plan.__dataclass_fields__}
        rules: list[Callable[[Plan], None]] = [*PLAN_RULES]
        rules += [partial(rule, model) for rule in engine_named(base.engine).refusals]
        self.rules = [_Rule(rule) for rule in rules]
        self.texts = texts

    def verdicts(self, pp: int, axes: Sequence[Axis], n_micro_batches: Sequence[int]) -> Verdicts:
        """Of the plans with so many ranks of a pipeline, on the axes and the numbers of micro-batches.

        Of the micro-batch no rule asks more than how many there are; here it is 1.
        """
        common = self.base | {"pp": pp, "micro_batch": 1}
        every = [*axes, [{"n_micro_batches": n} for n in (0, *n_micro_batches)]]
        always: Column = np.full([1] * len(axes), RUNS)
        at: Column = np.full([1] * len(every), RUNS)
        for rule in self.rules:
            said = self._said(rule, common, every)
            always = np.where(always == RUNS, said[..., 0], always)
            if said.shape[-1] > 1:
                at = np.where(at == RUNS, said[..., 1:], at)
        return Verdicts(always, at)

    def _said(self, rule: "_Rule", common: Mapping[str, Any], axes: Sequence[Axis]) -> Column:
        """The rule's number or `RUNS`, along the axes that it reads."""
        n_read = -1
        while len(rule.read) > n_read:
            n_read = len(rule.read)
            reads = [any(_makes(name) & rule.read for name in axis[0]) for axis in axes]
            chosen = [axis if read else axis[:1] for axis, read in zip(axes, reads, strict=True)]
            rest = dict(common)
            for axis in chosen:
                rest |= axis[0]
            places = product(*(axis for axis in chosen if len(axis) > 1))
            numbers = [self.number(rule.said(_values(rest, place))) for place in places]
        return np.array(numbers).reshape([len(axis) for axis in chosen])

    def number(self, text: str | None) -> int:
        """Of the kind of a refused plan; `RUNS` if it is not refused."""
        return RUNS if text is None else self.texts.setdefault(text, len(self.texts))


def _makes(name: str) -> set[str]:
    """The fields of a plan which the value of one decides."""
    counted = name in ("dp", "dp_replicate", "virtual_stages", "n_micro_batches")
    return {name, "global_batch"} if counted else {name}


def _values(rest: dict[str, Any], place: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    values = rest.copy()
    for part in place:
        values.update(part)
    m = values["n_micro_batches"] or values["pp"] * values["virtual_stages"]
    values["global_batch"] = m * values["dp"] * values["dp_replicate"]
    return values


@final
class _Rule:
    """A rule, the fields that it has read so far, and what it said of their values."""

    def __init__(self, rule: Callable[[Plan], None]) -> None:
        self.rule = rule
        self.read: set[str] = set()
        self.known: dict[tuple[Any, ...], str | None] = {}

    def said(self, values: Mapping[str, Any]) -> str | None:
        """The kind of plans it refuses for the same reason; None if it does not refuse the plan."""
        key = tuple([values[name] for name in self.read])
        if key not in self.known:
            plan = _Read(values)
            text = self._text(plan)
            if not plan.read <= self.read:
                self.read |= plan.read
                self.known.clear()
                return text
            self.known[key] = text
        return self.known[key]

    def _text(self, plan: "_Read") -> str | None:
        try:
            self.rule(cast("Plan", plan))
        except MemplanError as error:
            return kind_of(error)
        return None


class _Read:
    """A plan of some values, unchecked, that notes which fields are `read`."""

    __slots__ = ("read", "values")

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.read: set[str] = set()
        self.values = values

    def __getattr__(self, name: str) -> Any:
        if name in Plan.__dataclass_fields__:
            self.read.add(name)
            return self.values[name]
        return getattr(Plan, name).__get__(self)
