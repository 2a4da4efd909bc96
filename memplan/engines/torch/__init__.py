"""Stock PyTorch 2.13, played: DDP, ZeroRedundancyOptimizer, FSDP2, tensor parallelism, pipelining.

`stage` says what a rank holds between steps. `module`, `ddp` and `fsdp` (with `param_group`) are a stage's
module, without a wrapper and with one: what a micro-batch's forward and backward pass allocate, compute and
send. `orders` and `pipelining` run these passes in the order of a schedule, `optimizer` is the update. `step`
plays a rank's step, `program` says what the caching allocator sees of it, `engine` chooses the ranks.

gloo's collectives keep scratch of their own and its sends hold their tensors; NCCL works in place, and so
does the `fake` backend, which does nothing.
"""

from memplan.engines.torch.engine import TORCH
from memplan.engines.torch.stage import RankStages, Stage

__all__ = ["TORCH", "RankStages", "Stage"]
