"""How long products, attention and collectives take on GPUs, from curves of what was measured."""

from memplan.time.attention import attention_s
from memplan.time.collectives import collective_s
from memplan.time.products import product_s

__all__ = ["attention_s", "collective_s", "product_s"]
