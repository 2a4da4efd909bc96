"""Plans that Colossal-AI does not run, or that no rule covers yet: each check raises with a way out."""

from collections.abc import Callable
from typing import Final

from memplan.engines.refusals import check_modelled, check_positions, trained_whole
from memplan.errors import PlanRefused
from memplan.models import Model
from memplan.plan import Plan

PRECISIONS: Final = ("fp32", "bf16", "bf16-mixed", "fp16-mixed")
"""`precision`; "bf16" is without `master_weights`."""


def _check_modelled(model: Model, plan: Plan) -> None:
    """Raise for what has no rule yet, with Colossal-AI's name of it."""
    options: tuple[tuple[bool, str, str], ...] = (
        (plan.zero == 3, "zero=3 (GeminiPlugin)", "zero=2, or engine='torch'"),
        (plan.zero == 0, "zero=0 (TorchDDPPlugin)", "zero of 1 or 2, or engine='torch'"),
        (plan.offload, "offload=True (cpu_offload)", "engine='deepspeed' and its offload_optimizer='cpu'"),
        (plan.precision not in PRECISIONS, f"precision={plan.precision!r}", " or ".join(PRECISIONS)),
        *trained_whole(model),
    )
    check_modelled("colossalai", "Colossal-AI", options)


def _check_plan(model: Model, plan: Plan) -> None:
    """Raise for a single rank."""
    if plan.dp == 1:
        raise PlanRefused(
            "dp=1: engine='colossalai' plays data-parallel ranks; use dp of 2 or more, or engine='torch'.",
            kind="Colossal-AI on a single rank",
        )


REFUSALS: Final[tuple[Callable[[Model, Plan], None], ...]] = (_check_modelled, _check_plan, check_positions)
"""The checks of a plan, in order."""
