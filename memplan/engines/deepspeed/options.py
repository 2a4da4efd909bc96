"""The DeepSpeed engine's own options, by the names of DeepSpeed's configuration."""

from dataclasses import dataclass
from typing import Final, final

from memplan.allocator import AllocatorConfig
from memplan.fields import Count, Flag, Setting, described
from memplan.plan import Plan

DEEPSPEED_VERSION: Final = "0.19.8"
"""The release whose rules are played."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeedOptions:
    """The DeepSpeed engine's own options: keys of `zero_optimization`.

    Source: `deepspeed.runtime.zero.config:DeepSpeedZeroConfig`.
    """

    overlap_comm: bool = described(
        False, Flag("ZeRO-1 and 2 reduce gradients on a stream of their own, in two buffers", word="overlap")
    )
    reduce_bucket_size: int = described(
        500_000_000, Count("Elements of gradients that are reduced at a time", word="reduce-bucket")
    )
    alloc_conf: str = described(
        "",
        Setting(
            "The caching allocator's settings, as PYTORCH_CUDA_ALLOC_CONF has them",
            left_out="PyTorch's own",
            read=lambda text: AllocatorConfig.parse(text).conf,
            word="alloc",
        ),
    )


def deepspeed_options(plan: Plan) -> DeepSpeedOptions:
    """The options of a plan of the DeepSpeed engine."""
    return plan.options or DeepSpeedOptions()
