"""Plans that FairScale does not run, or that no rule covers yet: each check raises with a way out."""

from collections.abc import Callable
from typing import Final

from memplan.engines.fairscale.options import FairScaleOptions, fairscale_options
from memplan.engines.refusals import check_modelled, check_positions, trained_whole
from memplan.errors import PlanRefused
from memplan.models import Model, TracedModel
from memplan.plan import Plan
from memplan.shapes import FP32

PRECISIONS: Final = ("fp32", "bf16", "bf16-autocast", "bf16-mixed")
"""Weights in one type, with or without `torch.autocast`."""


def _check_modelled(model: Model, plan: Plan) -> None:
    """Raise for what has no rule yet, with FairScale's name of it."""
    options: tuple[tuple[bool, str, str], ...] = (
        (plan.zero == 3, "zero=3 (FullyShardedDataParallel)", "zero=2, or engine='torch'"),
        (plan.offload, "offload=True (move_params_to_cpu)", "zero=3 of engine='torch'"),
        (
            plan.precision == "fp16-mixed", "precision='fp16-mixed' (ShardedGradScaler)", "'bf16-mixed'"
        ),
        (
            plan.precision not in PRECISIONS,
            f"precision={plan.precision!r}",
            " or ".join(map(repr, PRECISIONS)),
        ),
        *trained_whole(model),
    )  # fmt: skip
    check_modelled("fairscale", "FairScale", options)


def _check_plan(model: Model, plan: Plan) -> None:
    """Raise for what FairScale does not divide, for buckets of mixed types, for options of another stage."""
    if plan.zero == 0 or plan.dp == 1:
        asked = f"zero={plan.zero}" if plan.dp > 1 else f"dp={plan.dp}"
        raise PlanRefused(
            f"{asked}: OSS divides the optimizer's state over data-parallel ranks; use zero of 1 or 2 and dp "
            "of 2 or more, or engine='torch'.",
            kind="FairScale with nothing to divide",
        )
    held = set(model.trained_dtypes) - {FP32.name} if isinstance(model, TracedModel) else set()
    if held and plan.formats.stored == FP32:
        raise PlanRefused(
            f"{model.name} trains weights in {' and '.join(sorted(held))} beside float32, and OSS says "
            "\"Different types for the bucket and the param, cannot proceed\"; use precision='bf16'.",
            kind="weights of several types under OSS",
        )
    size, usual = fairscale_options(plan).reduce_buffer_size, FairScaleOptions().reduce_buffer_size
    if plan.zero == 1 and size != usual:
        raise PlanRefused(
            f"reduce_buffer_size={size} is ShardedDataParallel's, of zero=2; leave it out.",
            kind="options of another ZeRO stage",
        )


REFUSALS: Final[tuple[Callable[[Model, Plan], None], ...]] = (_check_modelled, _check_plan, check_positions)
"""The checks of a plan, in order."""
