"""The DeepSpeed engine's own options, by the names of DeepSpeed's configuration."""

from dataclasses import dataclass
from typing import Final, final

from memplan.allocator import ALLOC_CONF
from memplan.fields import Choice, Count, Flag, described
from memplan.plan import Plan

DEEPSPEED_VERSION: Final = "0.19.8"
"""The release whose rules are played."""


PLACES: Final = ("none", "cpu", "cpu-pinned")
"""Where offloaded states are: on the GPU, on the host, or page-locked there (`pin_memory`)."""


METHODS: Final = ("parameters", "uniform", "type:block")
"""How layers are dealt out: by equal weights, by equal numbers of layers, by equal numbers of blocks.

Source: `deepspeed.runtime.pipe.module:PipelineModule._partition_layers`.
"""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeedOptions:
    """The DeepSpeed engine's own options: keys of `zero_optimization`, and of a `PipelineModule`.

    Source: `deepspeed.runtime.zero.config:DeepSpeedZeroConfig`.
    """

    overlap_comm: bool | None = described(
        None,
        Flag(
            "Communicate on other streams; ZeRO-1 and 2: in two buckets", left_out="yes with zero=3, else no",
            optional=True, word="overlap",
        ),
    )  # fmt: skip
    reduce_bucket_size: int = described(
        500_000_000, Count("Elements of gradients that are reduced at a time", word="reduce-bucket")
    )
    stage3_prefetch_bucket_size: int = described(
        50_000_000, Count("ZeRO-3: elements of weights that are gathered ahead", least=0, word="prefetch")
    )
    stage3_param_persistence_threshold: int = described(
        100_000, Count("ZeRO-3: weights of at most so many elements stay gathered", least=0, word="persist")
    )
    stage3_max_live_parameters: int = described(
        1_000_000_000, Count("ZeRO-3: gathered elements beyond which nothing is prefetched", word="live")
    )
    stage3_max_reuse_distance: int = described(
        1_000_000_000, Count("ZeRO-3: weights used within so many elements again stay", least=0, word="reuse")
    )
    sub_group_size: int = described(
        1_000_000_000, Count("ZeRO-3: elements of a partition that are updated at a time", word="sub-group")
    )
    zero_hpz_partition_size: int = described(
        1, Count("ZeRO-3: ranks that divide a second copy of the weights (hpZ)", word="hpz")
    )
    offload_optimizer: str = described(
        "none",
        Choice(
            "Where the optimizer is, on the host with cpu (not with zero=0)", choices=PLACES,
            word="offload-opt",
        ),
    )  # fmt: skip
    offload_param: str = described(
        "none",
        Choice(
            "ZeRO-3: where partitions of weights are, on the host with cpu", choices=PLACES[:2],
            word="offload-param",
        ),
    )  # fmt: skip
    partition_method: str = described(
        "parameters",
        Choice("How PipelineModule deals layers out to stages", choices=METHODS, word="partition"),
    )
    activation_checkpoint_interval: int = described(
        0,
        Count("Layers that DeepSpeed's pipeline checkpoints together; 0: none", least=0, word="ckpt"),
    )
    alloc_conf: str = described("", ALLOC_CONF)


OF_STAGE_3: Final = tuple(
    [
        name
        for name in DeepSpeedOptions.__dataclass_fields__
        if name.startswith(("stage3_", "zero_hpz_")) or name in ("sub_group_size", "offload_param")
    ]
)
"""The options of ZeRO-3 alone."""


def deepspeed_options(plan: Plan) -> DeepSpeedOptions:
    """The options of a plan of the DeepSpeed engine."""
    return plan.options or DeepSpeedOptions()


def overlaps(plan: Plan) -> bool:
    """Whether reductions have a stream of their own.

    Source: `deepspeed.runtime.zero.config:DeepSpeedZeroConfig.overlap_comm_valid`.
    """
    asked = deepspeed_options(plan).overlap_comm
    return plan.zero == 3 if asked is None else asked
