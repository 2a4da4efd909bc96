"""Refusals of many plans at once.

A rule reads few fields of a plan, so it is asked once for each combination of their values, not once a plan.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from math import prod
from typing import Any, Final, NamedTuple, cast, final

import numpy as np

from memplan.engines.base import ENGINES
from memplan.errors import MemplanError, kind_of
from memplan.mesh import AXES, axis_names, replica_axes
from memplan.models import Model
from memplan.plan import PLAN_RULES, Plan
from memplan.search.plans import Column

NOT_REFUSED: Final = -1
"""The number of a plan that no rule refuses."""

SIZES: Final = {"micro_batch", "global_batch"}
"""The fields of a plan that are not values of an axis, and follow from `COUNTED`."""

COUNTED: Final = {"virtual_stages", "n_micro_batches"}
"""The values, beside the ranks that take sequences, that the sizes of batches follow from."""

Choices = Sequence[Mapping[str, Any]]
"""An axis of a grid of plans: for each index the values of the same fields."""


class RefusedBy(NamedTuple):
    """The number of the rule that refuses each plan of a grid, or `NOT_REFUSED`.

    An axis that makes no difference has length 1. `always`: with one micro-batch for each pipeline stage, or,
    by a rule that reads how large batches are, with every number of them. The last axis of `at` is the number
    of micro-batches, for the rules that read it.
    """

    always: Column
    at: Column


@final
class Rules:
    """The rules of `check_plan`, for plans that differ from `base` only in the fields of a grid's axes.

    The fields that a rule reads are recorded. Along an axis of other fields the rule is asked once, and its
    answer holds for the whole axis. `texts` numbers the kinds of refusals.
    """

    def __init__(self, model: Model, base: Plan, texts: dict[str, int]) -> None:
        self.base = {name: getattr(base, name) for name in Plan.__dataclass_fields__}
        rules: list[Callable[[Plan], None]] = [*PLAN_RULES]
        rules += [partial(rule, model) for rule in ENGINES.named(base.engine).rules]
        self.rules = [_Rule(rule) for rule in rules]
        self.texts = texts
        self.replicas = replica_axes(axis_names())
        self.base |= dict(base.others)

    def refused_by(self, pp: int, axes: Sequence[Choices], n_micro_batches: Sequence[int]) -> RefusedBy:
        """The rule that refuses each plan of a grid of pipelines of `pp` ranks."""
        common = self.base | {"pp": pp}
        every = [*axes, [{"n_micro_batches": n} for n in (0, *n_micro_batches)]]
        always: Column = np.full([1] * len(axes), NOT_REFUSED)
        at: Column = np.full([1] * len(every), NOT_REFUSED)
        for rule in self.rules:
            said = self._said(rule, common, every)
            once = said[..., 0]
            if not SIZES.isdisjoint(rule.read):
                once = np.where((said[..., 1:] == NOT_REFUSED).any(axis=-1), NOT_REFUSED, said[..., -1])
            always = np.where(always == NOT_REFUSED, once, always)
            if said.shape[-1] > 1:
                at = np.where(at == NOT_REFUSED, said[..., 1:], at)
        return RefusedBy(always, at)

    def _said(self, rule: "_Rule", common: Mapping[str, Any], axes: Sequence[Choices]) -> Column:
        """The rule's answer for each index; axes that it does not read have length 1."""
        n_read = -1
        while len(rule.read) > n_read:
            n_read = len(rule.read)
            read = rule.read | (set() if SIZES.isdisjoint(rule.read) else COUNTED.union(self.replicas))
            reads = [not read.isdisjoint(axis[0]) for axis in axes]
            chosen = [axis if read else axis[:1] for axis, read in zip(axes, reads, strict=True)]
            rest = dict(common)
            for axis in chosen:
                rest |= axis[0]
            places = product(*(axis for axis in chosen if len(axis) > 1))
            numbers = [self.number(rule.said(self._values(rest, place))) for place in places]
        return np.array(numbers).reshape([len(axis) for axis in chosen])

    def number(self, text: str | None) -> int:
        """The number of a kind of refusal; `NOT_REFUSED` for None."""
        return NOT_REFUSED if text is None else self.texts.setdefault(text, len(self.texts))

    def _values(self, rest: dict[str, Any], place: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The fields of a plan, and its `n_micro_batches`: as many as it has stages where that is 0."""
        values = rest.copy()
        for part in place:
            values.update(part)
        n_replicas = prod([values.get(axis, 1) for axis in self.replicas])
        if values["n_micro_batches"]:
            n_batches = n_replicas * values["n_micro_batches"]
            values["micro_batch"] = max(1, self.base["global_batch"] // n_batches)
        else:
            values["micro_batch"] = 1
            values["n_micro_batches"] = values["pp"] * values["virtual_stages"]
        values["global_batch"] = values["n_micro_batches"] * n_replicas * values["micro_batch"]
        return values


@final
class _Rule:
    """A rule with the fields that it has read so far, and its known answers by their values."""

    def __init__(self, rule: Callable[[Plan], None]) -> None:
        self.rule = rule
        self.read: set[str] = set()
        self.known: dict[tuple[Any, ...], str | None] = {}

    def said(self, values: Mapping[str, Any]) -> str | None:
        """The kind of the refusal; None if the plan is not refused."""
        key = tuple([values[name] for name in self.read])
        if key in self.known:
            return self.known[key]
        plan, text = _Read(values), None
        try:
            self.rule(cast("Plan", plan))
        except MemplanError as error:
            text = kind_of(error)
        if plan.read <= self.read:
            self.known[key] = text
        else:
            self.read |= plan.read
            self.known.clear()
        return text


class _Read:
    """A stand-in for a plan that records which fields are `read`, and whether `n_micro_batches` is."""

    __slots__ = ("read", "values")

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.read: set[str] = set()
        self.values = values

    def __getattr__(self, name: str) -> Any:
        if name in self.values:
            self.read.add(name)
            return self.values[name]
        if name in AXES.names():
            return 1
        return getattr(Plan, name).__get__(self)

    @property
    def n_micro_batches(self) -> int:
        """Micro-batches of a replica in one step."""
        self.read.add("n_micro_batches")
        n: int = self.values["n_micro_batches"]
        return n

    def batch_of(self, n_micro_batches: int) -> int:
        """`Plan.batch_of`, which is a way out in a refusal's text and no condition of it: nothing is read."""
        return n_micro_batches
