"""FairScale 0.4.13, played: OSS under DistributedDataParallel (ZeRO-1) or ShardedDataParallel (ZeRO-2).

`oss` is the sharded optimizer, `sharded_ddp` the wrapper that reduces each gradient to the rank that owns it.
"""

from memplan.engines.fairscale.engine import FAIRSCALE

__all__ = ["FAIRSCALE"]
