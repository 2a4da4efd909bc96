"""Colossal-AI 0.5.0, played: LowLevelZeroPlugin, ZeRO-1 and ZeRO-2."""

from memplan.engines.colossalai.engine import COLOSSALAI

__all__ = ["COLOSSALAI"]
