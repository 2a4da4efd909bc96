"""DeepSpeed 0.19, played: ZeRO-0 to 2 around FusedAdam, in bfloat16 and float16.

`stage` is the module; `flat` its flat parameter group and the ranks' partitions; `fp16_optimizer` (ZeRO-0)
and `stage_1_and_2` the optimizers, as DeepSpeed's modules of these names have them; `runtime` the engine
whose forward, backward and step a training calls.
"""

from memplan.engines.deepspeed.engine import DEEPSPEED

__all__ = ["DEEPSPEED"]
