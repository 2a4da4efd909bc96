"""Megatron-Core's GPT and BERT: Transformer Engine's layers and Megatron's own, over shapes.

Read from NVIDIA/Megatron-LM at 6e091e1b68 (May 2026) and Transformer Engine 2.8. Symbols are cited as
`megatron.core....:name` and `transformer_engine....:name`.
"""

from memplan.models.megatron.bert import BertModel
from memplan.models.megatron.config import Fp8, TransformerConfig, padded_rows
from memplan.models.megatron.conversion import configured, gpt_model
from memplan.models.megatron.experts import MoE, kept_by_dispatcher
from memplan.models.megatron.fp8 import weight_copies
from memplan.models.megatron.latent import MLA
from memplan.models.megatron.model import IN_BF16, WITH_EXPERTS, WORDS, GPTModel

__all__ = [
    "IN_BF16",
    "MLA",
    "WITH_EXPERTS",
    "WORDS",
    "BertModel",
    "Fp8",
    "GPTModel",
    "MoE",
    "TransformerConfig",
    "configured",
    "gpt_model",
    "kept_by_dispatcher",
    "padded_rows",
    "weight_copies",
]
