"""The Colossal-AI engine's own options, by the names of `LowLevelZeroPlugin`'s arguments."""

from dataclasses import dataclass
from typing import Final, final

from memplan.allocator import ALLOC_CONF
from memplan.fields import Choice, Count, Flag, described
from memplan.plan import Plan
from memplan.shapes import BF16, FP16, FP32, DType

COLOSSALAI_VERSION: Final = "0.5.0"
"""The release whose rules are played."""

COMMUNICATED: Final[dict[str, DType]] = {"fp32": FP32, "bf16": BF16, "fp16": FP16}
"""The types that gradients may be reduced in."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ColossalAIOptions:
    """The Colossal-AI engine's own options; a bucket's size is in elements.

    Source: `colossalai.zero.low_level.low_level_optim:LowLevelZeroOptimizer`,
    `colossalai.booster.plugin.low_level_zero_plugin:LowLevelZeroPlugin`.
    """

    reduce_bucket_size: int = described(
        12 * 2**20,
        Count("Elements of gradients that are reduced, and of own weights that are gathered, at a time",
              word="reduce-bucket"),
    )  # fmt: skip
    overlap_communication: bool = described(
        True, Flag("Reduce gradients on another stream, as they come", word="overlap")
    )
    communication_dtype: str = described(
        "none",
        Choice(
            "The type that gradients are reduced in; none: their own", choices=("none", *COMMUNICATED),
            word="communication",
        ),
    )  # fmt: skip
    alloc_conf: str = described("", ALLOC_CONF)


def colossalai_options(plan: Plan) -> ColossalAIOptions:
    """The options of a plan of the Colossal-AI engine."""
    return plan.options or ColossalAIOptions()
