"""The FairScale engine's own options, by the names of FairScale's arguments."""

from dataclasses import dataclass
from typing import Final, final

from memplan.allocator import ALLOC_CONF
from memplan.fields import Count, described
from memplan.plan import Plan

FAIRSCALE_VERSION: Final = "0.4.13"
"""The release whose rules are played: the last one."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FairScaleOptions:
    """The FairScale engine's own options.

    Source: `fairscale.nn.data_parallel.sharded_ddp:ShardedDataParallel`.
    """

    reduce_buffer_size: int = described(
        2**23, Count("ZeRO-2: most elements of a rank's bucket of small gradients; 0: no buckets", least=0,
                     word="reduce-buffer")
    )  # fmt: skip
    alloc_conf: str = described("", ALLOC_CONF)


def fairscale_options(plan: Plan) -> FairScaleOptions:
    """The options of a plan of the FairScale engine."""
    return plan.options or FairScaleOptions()
