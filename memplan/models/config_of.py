"""The config.json of a transformers model from memplan's sizes: the inverse of its reader."""

from typing import Any, Final

from memplan.models.base import Decoder
from memplan.models.families import FAMILIES

SIZES: Final = {
    "n_layers": "num_hidden_layers",
    "d_model": "hidden_size",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "d_head": "head_dim",
    "d_ff": "intermediate_size",
    "vocab_size": "vocab_size",
    "max_seq_len": "max_position_embeddings",
    "tied_head": "tie_word_embeddings",
    "window": "sliding_window",
    "pattern": "sliding_window_pattern",
    "partial_rotary": "partial_rotary_factor",
    "parallel": "use_parallel_residual",
    "attention_bias": "attention_bias",
    "mlp_bias": "mlp_bias",
    "use_bias": "use_bias",
    "dropout": "dropout",
    "rope_theta": "rope_theta",
}
"""Names of most families' sizes, by memplan's."""

OWN_NAMES: Final[dict[str, dict[str, str]]] = {
    "gpt2": {
        "n_layers": "n_layer", "d_model": "n_embd", "n_heads": "n_head", "d_ff": "n_inner",
        "max_seq_len": "n_positions", "activation": "activation_function",
    },
    "opt": {"d_ff": "ffn_dim"},
}  # fmt: skip
"""Names of a type's own."""


def config_of(model: Decoder) -> dict[str, Any]:
    """The config.json of a model of one of transformers' families."""
    readers = FAMILIES.named(model.family).readers
    kind, reader = next(iter(readers.items()))
    names = {**SIZES, **OWN_NAMES.get(kind, {})}
    values: dict[str, Any] = {names[k]: v for k, v in model.sizes().items() if k in names}
    if kind == "gpt2":
        values |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), model.dropout)
    if kind == "opt":
        values["word_embed_proj_dim"] = model.d_model
    if kind == "gemma2":  # a window changes none of its sizes, and has to be there
        values["sliding_window"] = model.max_seq_len // 2
    elif "window" in model.sizes():
        values["sliding_window"] = values["sliding_window"] or None
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return {"model_type": kind, "architectures": [reader.architecture], **values, **ids}
