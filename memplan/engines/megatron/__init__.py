"""Megatron-Core: its layers, its distributed optimizer and its pipeline schedules, played.

Read from NVIDIA/Megatron-LM at 6e091e1b68 (May 2026, core 0.18) and Transformer Engine 2.8. Symbols are cited
as `megatron.core....:name` and `transformer_engine....:name`.
"""

from memplan.engines.megatron.engine import MEGATRON

__all__ = ["MEGATRON"]
