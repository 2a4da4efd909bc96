"""What stock PyTorch keeps alive, and when: DDP, ZeroRedundancyOptimizer, FSDP2, pipelining.

`stage` says what a rank holds between steps, `passes` and `fsdp` what one micro-batch's forward and backward
pass allocate and free, `schedules` in which order they run, `optimizer` what the update adds; `step` puts
them together. gloo's collectives keep scratch of their own and its sends hold their tensors; NCCL works in
place, and so does the `fake` backend, which does nothing.
"""

from memplan.engines.torch.engine import TORCH
from memplan.engines.torch.stage import RankStages, Stage

__all__ = ["TORCH", "RankStages", "Stage"]
