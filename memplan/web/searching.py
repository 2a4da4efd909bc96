"""A search without NumPy: plans are estimated one by one, for spaces of some thousands of plans.

`memplan.search` bounds millions of plans as arrays, which need NumPy. In a browser there is none, so that the
page's search tries fewer fields, and rules out by what it has played: a larger micro-batch holds no less.
"""

from bisect import insort
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from math import inf
from typing import Any, Final, NamedTuple, final

from memplan.checks import divisors
from memplan.engines.checks import check_plan
from memplan.engines.options import plan_of
from memplan.errors import InvalidValue, MemplanError
from memplan.estimate import Estimate, estimate_of, stage_estimates
from memplan.hardware import Cluster, outside_allocator
from memplan.models import Model
from memplan.plan import RECOMPUTES, Plan

VARIED: Final = ("pp", "tp", "dp_replicate", "zero", "sequence_parallel", "recompute", "micro_batch")
"""The fields that may be varied; dp is what the others leave."""

MOST_PLANS: Final = 5_000
"""The most plans that are estimated one by one."""

KEEP: Final = 10
"""The plans that are shown."""

NO_PIPELINE: Final = {"schedule": "1f1b", "virtual_stages": 1, "layers_per_stage": None}
"""The fields of a pipeline, in a plan that has none."""

Values = Mapping[str, Any]


class Ranked(NamedTuple):
    """A plan that is within the budget by what it allocates, by its step's time and its peak."""

    step_s: float
    peak_bytes: int
    place: int
    estimate: Estimate


@final
@dataclass(slots=True, kw_only=True)
class Searching:
    """A search under way: the numbers of plans seen, and the best ones so far, the fastest first.

    `kept` has the values of the fields that all plans have in common, `varied` the names of the others.
    """

    model: Model
    cluster: Cluster
    kept: Values
    varied: tuple[str, ...]
    n_within: int = 0
    n_beyond: int = 0
    n_refused: int = 0
    best: list[Ranked] = field(default_factory=list)

    @property
    def n_seen(self) -> int:
        """The plans that were estimated, refused, or ruled out."""
        return self.n_within + self.n_beyond + self.n_refused

    def checked(self) -> list[list[Values]]:
        """The plans, in lists that differ in the micro-batch only, the smallest first.

        Raises:
            InvalidValue: too many of them.
        """
        found = [plans for plans in self._plans() if plans]
        n_plans = sum(map(len, found))
        if n_plans > MOST_PLANS:
            raise InvalidValue(
                f"{n_plans:,} plans are more than the {MOST_PLANS:,} that can be estimated one by one here; "
                "keep more fields as they are, or use `memplan search`."
            )
        return found

    def _plans(self) -> Iterator[list[Values]]:
        n_gpus, cp = self.cluster.n_gpus, self.kept.get("cp", 1)
        every = divisors(n_gpus)
        within_node = tuple(tp for tp in every if self.cluster.gpus_per_node % tp == 0)
        for pp, tp in product(self._of("pp", every), self._of("tp", within_node)):
            replicas, rest = divmod(n_gpus, pp * tp * cp)
            if rest or not replicas:
                continue
            for dp_replicate in self._of("dp_replicate", divisors(replicas)):
                dp, rest = divmod(replicas, dp_replicate)
                if not rest and (dp_replicate == 1 or dp * cp > 1 or "dp_replicate" not in self.varied):
                    yield from self._on({"pp": pp, "tp": tp, "dp_replicate": dp_replicate, "dp": dp})

    def _on(self, mesh: dict[str, Any]) -> Iterator[list[Values]]:
        """The plans of a mesh."""
        batch, rest = divmod(self.kept["global_batch"], mesh["dp"] * mesh["dp_replicate"])
        if rest or not batch:
            return
        if mesh["dp_replicate"] > 1:
            zeros: tuple[int, ...] = (2, 3)
        else:
            zeros = (0, 1, 2, 3) if mesh["dp"] * self.kept.get("cp", 1) > 1 else (0,)
        if mesh["pp"] == 1:
            mesh = mesh | NO_PIPELINE
        axes = (
            self._of("zero", zeros),
            self._of("sequence_parallel", (False, True) if mesh["tp"] > 1 else (False,)),
            self._of("recompute", RECOMPUTES),
        )
        micro_batches = [n for n in self._of("micro_batch", divisors(batch)) if batch % n == 0]
        for zero, sequence_parallel, recompute in product(*axes):
            values = mesh | {"zero": zero, "sequence_parallel": sequence_parallel, "recompute": recompute}
            yield [values | {"micro_batch": n} for n in micro_batches]

    def _of(self, name: str, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """The values of a field that are tried."""
        return (
            values if name in self.varied else (self.kept.get(name, Plan.__dataclass_fields__[name].default),)
        )

    def run(self, plans: list[list[Values]]) -> Iterator[None]:
        """Estimates the plans, and stops after each."""
        for larger_and_larger in plans:
            for i, values in enumerate(larger_and_larger):
                try:
                    fits = self._try({**self.kept, **values})
                except MemplanError:
                    self.n_refused += 1
                else:
                    if not fits:
                        self.n_beyond += len(larger_and_larger) - i
                        yield
                        break
                yield

    def _try(self, values: Values) -> bool:
        """Whether a plan is within the budget by what it allocates; if so it is ranked.

        Its pipeline ranks are played one after the other, until one is beyond.

        Raises:
            MemplanError: a plan that cannot run.
        """
        plan, device = plan_of(**values), self.cluster.gpu.device
        check_plan(self.model, plan, device)
        budget = self.cluster.budget_bytes
        outside = outside_allocator(plan.mesh.n_communicators).high_bytes
        stages = []
        for stage in stage_estimates(self.model, plan, device):
            if budget is not None and stage.most_bytes + outside > budget:
                return False
            stages.append(stage)
        found = estimate_of(self.model, plan, device, self.cluster, stages)
        self.n_within += 1
        step_s = inf if found.step_s is None else found.step_s
        insort(self.best, Ranked(step_s, found.worst.peak_bytes, self.n_within, found))
        del self.best[KEEP:]
        return True
