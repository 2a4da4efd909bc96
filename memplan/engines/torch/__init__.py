"""What stock PyTorch keeps alive, and when: DDP, ZeroRedundancyOptimizer, FSDP2, pipelining.

`stage` says what a rank holds between steps, `passes` and `fsdp` what one micro-batch's forward and backward
pass allocate and free, `schedules` in which order they run, `optimizer` what the update adds; `step` puts
them together. Rules of the gloo backend belong to the "cpu" device, where collectives keep scratch of their
own; on "cuda" NCCL works in place.
"""

from memplan.engines.torch.passes import Passes
from memplan.engines.torch.program import program
from memplan.engines.torch.stage import RankStages, Stage
from memplan.engines.torch.step import StageTimeline, passes_of, timeline

__all__ = ["Passes", "RankStages", "Stage", "StageTimeline", "passes_of", "program", "timeline"]
