"""Plans that DeepSpeed does not run, or that no rule covers yet: each check raises with a way out."""

from collections.abc import Callable
from typing import Final

from memplan.engines.refusals import check_positions
from memplan.errors import MissingRule, PlanRefused
from memplan.models import Model
from memplan.plan import Plan

PRECISIONS: Final = ("bf16-mixed", "fp16-mixed")
"""`bf16.enabled` and `fp16.enabled`: 16-bit weights, 32-bit masters in the optimizer."""


def _check_modelled(model: Model, plan: Plan) -> None:
    """Raise for what has no rule yet, with DeepSpeed's name of it."""
    options: tuple[tuple[bool, str, str], ...] = (
        (plan.offload, "offload=True (zero_optimization.offload_optimizer)", "offload=False"),
        (
            plan.precision not in PRECISIONS,
            f"precision={plan.precision!r}",
            f"precision={' or '.join(map(repr, PRECISIONS))} (bf16.enabled, fp16.enabled)",
        ),
        (
            plan.optimizer not in ("adam", "adamw"),
            f"optimizer={plan.optimizer!r}",
            "optimizer='adamw' or 'adam' (FusedAdam)",
        ),
    )
    for asked, what, other in options:
        if asked:
            raise MissingRule(
                f"{what} has no rule in engine='deepspeed' yet; use {other}.",
                kind="an option of DeepSpeed that has no rule yet",
            )


def _check_ranks(model: Model, plan: Plan) -> None:
    if plan.dp == 1:
        raise PlanRefused(
            "dp=1: engine='deepspeed' plays data-parallel ranks; use dp of 2 or more.",
            kind="DeepSpeed on a single rank",
        )


def _check_overlap(model: Model, plan: Plan) -> None:
    if plan.zero == 0 and plan.options is not None:
        for name in ("overlap_comm", "reduce_bucket_size"):
            value, usual = getattr(plan.options, name), getattr(type(plan.options)(), name)
            if value != usual:
                raise PlanRefused(
                    f"{name}={value} is of zero_optimization, which stage 0 does not use; leave it out, or "
                    "use zero=1 or 2.",
                    kind="options of ZeRO without ZeRO",
                )


REFUSALS: Final[tuple[Callable[[Model, Plan], None], ...]] = (
    _check_modelled,
    _check_ranks,
    _check_overlap,
    check_positions,
)
"""The checks of a plan, in order."""
