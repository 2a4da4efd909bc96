"""What pipeline stages do in a pass, worked out once for all their sizes, by the very code of one estimate.

A stage's share of a tensor and of the batch and the data axis are arrays (`Many`) that this code takes for
numbers; so are its numbers of blocks.
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from memplan.device import Device
from memplan.engines.torch import Passes, RankStages, Stage, passes_of
from memplan.engines.torch.step import kept_grads, updates
from memplan.many import many
from memplan.models import Model
from memplan.plan import Plan, Rank
from memplan.search.corners import Axes, Candidates, NotLinear, content
from memplan.search.plans import Column
from memplan.steptime import forward_flops, passes_flops
from memplan.timeline import chain, n_bytes_of
from memplan.traffic import Purpose, Rounds, calls_of_passes, calls_of_update, payloads_bytes

Ends = tuple[bool, bool]
"""Whether a stage is the pipeline's first, and whether it is the last."""


def with_values(plan: Plan, **values: Any) -> Plan:
    """A plan with other values, unchecked: `Many`, say."""
    other = object.__new__(Plan)
    for name in FIELDS:
        object.__setattr__(other, name, getattr(plan, name))
    for name, value in values.items():
        object.__setattr__(other, name, value)
    return other


FIELDS: Final = tuple(Plan.__dataclass_fields__)


def _along(axis: int, numbers: Sequence[int]) -> Any:
    """Numbers along one axis of three."""
    shape = [1, 1, 1]
    shape[axis] = len(numbers)
    return many(numbers).reshape(shape)


@final
@dataclass(frozen=True, kw_only=True)
class Part:
    """A stage at every combination along the axes; `at` are its places in a whole of which it is a part."""

    model: Model
    plan: Plan
    ends: Ends
    device: Device
    axes: Axes
    at: tuple[Column, Column, Column]

    @cached_property
    def stages(self) -> RankStages:
        """A rank that has the stage alone, and a single micro-batch to a step."""
        tp, micro_batch = (_along(0, numbers) for numbers in zip(*self.axes.tensor, strict=True))
        values = {"tp": tp, "micro_batch": micro_batch}
        if self.plan.recompute != "none":
            values["recompute_blocks"] = _along(2, [a for a, _ in self.axes.blocks])
        if self.plan.fsdp:
            dp, dp_replicate = (_along(1, numbers) for numbers in zip(*self.axes.data, strict=True))
            values |= {"dp": dp, "dp_replicate": dp_replicate}
        plan = with_values(self.plan, **values)
        plan = with_values(plan, global_batch=plan.n_replicas * micro_batch)
        kind = *self.ends, _along(2, [a + b for a, b in self.axes.blocks])
        return RankStages.of(Stage(self.model, plan, kind, self.device), rank=Rank())

    @cached_property
    def passes(self) -> Passes:
        """Those of the stage."""
        return passes_of(*self.stages)

    @cached_property
    def _candidates(self) -> Candidates:
        return Candidates(self.axes)

    @cached_property
    def _stretches(self) -> dict[Hashable, dict[str, Any]]:
        return {}

    def boundary(self) -> dict[str, Any]:
        """Bytes of what is sent from stage to stage."""
        return {"bytes": self.stages.stages[0].trace.boundary.n_bytes}

    def states(self) -> dict[str, Any]:
        """Bytes that are kept from step to step, but for what goes in."""
        kept = n_bytes_of(kept_grads(self.stages, [self.passes]))
        return {"bytes": kept + (0 if self.stages.offloads else n_bytes_of(self.stages.states))}

    def saved(self) -> dict[str, Any]:
        """Bytes that a forward pass leaves, whatever is gathered for it."""
        return {"bytes": Passes(self.stages.stages[0]).forward(first=False).net_bytes}

    def graded(self) -> dict[str, Any]:
        """Bytes that the first backward pass leaves and a later one does not: gradients."""
        first, later = (self.passes.backward(first=yes).net_bytes for yes in (True, False))
        return {"bytes": first - later}

    def update(self) -> dict[str, Any]:
        """The optimizer's part of a step: what it leaves, and the most it holds."""
        made = chain("update", *updates(self.stages))
        return {"net": made.net_bytes, "high": made.high_bytes}

    def moved(self) -> dict[str, Any]:
        """Bytes of what the optimizer sees: weights, gradients, its state."""
        return dict(zip(("weights", "grads", "optimizer"), optimizer_sees(self.stages), strict=True))

    def stretch(self, name: str, how: Mapping[str, bool]) -> dict[str, Any]:
        """What a pass leaves, and candidates for the most it holds; by a method's name and arguments.

        Equal passes have the same answer, whatever they are called.
        """
        made = getattr(self.passes, name)(**how)
        whole = chain(name, *made) if isinstance(made, list) else made
        key = content(whole)
        if key not in self._stretches:
            net, found = self._candidates(whole)
            highs = self.axes.largest(found, whole.high_bytes)
            self._stretches[key] = {"net": net} | {f"high {i}": high for i, high in enumerate(highs)}
        return self._stretches[key]

    def counted(self, *, splits: bool) -> dict[Any, Any]:
        """What a stage computes and sends with each of a field of `Rounds`, and whatever these are ("fixed").

        `flops` of a forward pass; ("again", field): FLOPs of what is computed again; (purpose, field): bytes.
        """
        fields = [field for field in Rounds._fields if splits or field != "split"]
        each = np.eye(len(fields) + 1, dtype=np.int64)[1:]
        rows = dict(zip(fields, (many(row).reshape(-1, 1, 1, 1) for row in each), strict=True))
        rounds = Rounds(*[rows.get(field, 0) for field in Rounds._fields])
        forward = forward_flops(self.stages)
        again = passes_flops(self.stages, [rounds]) - rounds.micro_batches * forward
        found: dict[Any, Any] = {"flops": forward}
        for field, n in self._by_field(fields, again):
            found["again", field] = n
        for purpose, n_bytes in payloads_bytes(calls_of_passes(self.stages, [rounds])).items():
            for field, n in self._by_field(fields, n_bytes):
                found[purpose, field] = n
        return found

    def _by_field(self, fields: Sequence[str], numbers: Any) -> Iterator[tuple[str, Any]]:
        """The numbers of no field, which come with each, and what each adds; those that are not 0."""
        fixed, *others = np.broadcast_to(numbers, (len(fields) + 1, *self.axes.shape))
        for field, n in (("fixed", fixed), *zip(fields, others, strict=True)):
            own = n if field == "fixed" else n - fixed
            if own.any():
                yield field, own

    def after(self) -> dict[Purpose, Any]:
        """Bytes that the update passes to collectives; where DDP reduces with all that ZeRO-1 sends."""
        stage = copy(self.stages.stages[0])
        stage.plan = with_values(stage.plan, zero=1 if stage.plan.ddp else stage.plan.zero)
        return payloads_bytes(calls_of_update(RankStages.of(stage, rank=Rank())))

    def split(self, yes: NDArray[np.bool_]) -> list["Part"]:
        """Parts for which an answer does not differ, at least along one more axis.

        Raises:
            NotLinear: it differs between the corners of a span, or of a range.
        """
        axis, groups = _apart(np.broadcast_to(yes, self.axes.shape))
        spans = self.axes.spans[axis]
        if sum([len({spans[i] for i in group}) for group in groups]) > len(set(spans)):
            raise NotLinear
        parts = []
        for group in groups:
            tensor, data, blocks = [own[group] if i == axis else own for i, own in enumerate(self.at)]
            parts.append(replace(self, axes=self.axes.some(axis, group), at=(tensor, data, blocks)))
        return parts


def optimizer_sees(stages: RankStages) -> tuple[Any, Any, Any]:
    """Bytes of weights, of gradients, and of the optimizer's state."""
    kinds = [
        Counter({b: n for b, n in stages.states.items() if b.kind == k}) for k in ("weights", "optimizer")
    ]
    weights, optimizer = map(n_bytes_of, kinds)
    return weights, n_bytes_of(stages.grads), optimizer


def _apart(yes: NDArray[np.bool_]) -> tuple[int, list[Column]]:
    """An axis along which answers differ, and its places apart: two groups if one axis alone decides."""
    for axis in range(3):
        others = tuple(i for i in range(3) if i != axis)
        some: NDArray[np.bool_] = np.asarray(yes.any(axis=others))
        if (some == yes.all(axis=others)).all():
            return axis, [np.flatnonzero(some), np.flatnonzero(~some)]
    groups = [_equal_slices(yes, axis) for axis in range(3)]
    axis = min((i for i in range(3) if len(groups[i]) > 1), key=lambda i: len(groups[i]))
    return axis, groups[axis]


def _equal_slices(yes: NDArray[np.bool_], axis: int) -> list[Column]:
    """The places along an axis whose slices are equal, together."""
    slices = np.moveaxis(yes, axis, 0).reshape(yes.shape[axis], -1)
    groups: dict[bytes, list[int]] = {}
    for i, found in enumerate(slices):
        groups.setdefault(found.tobytes(), []).append(i)
    return [np.array(group) for group in groups.values()]
