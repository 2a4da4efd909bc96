"""DeepSpeed 0.19, played: ZeRO-0 to 3 around FusedAdam, in bfloat16 and float16.

`stage` is the module; `flat` its flat parameter group; `fp16_optimizer` (ZeRO-0), `stage_1_and_2` and
`stage3` (with `coordinator`) the optimizers, by DeepSpeed's names; `runtime` the engine that trains.
"""

from memplan.engines.deepspeed.engine import DEEPSPEED

__all__ = ["DEEPSPEED"]
