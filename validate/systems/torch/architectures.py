"""The language models of transformers in small: its own classes, all settings but sizes at their defaults.

A name is `hf-causal-KIND`, as hf-causal-llama, with the `model_type` of a config.json.
"""

import re
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any, Final, cast

from torch import nn

from validate.systems.torch.wild_stages import VOCABULARY, WIDTH

PREFIX: Final = "hf-causal-"

SIZES: Final[Mapping[str, int]] = {
    r"(num_)?(hidden_|encoder_|decoder_)*(n_)?layers?|n_layer|depth|num_blocks": 2,
    r".*(attention_heads|n_heads?|num_heads)": 4,
    r".*(head_dim|d_kv|kv_channels|attention_head_size|rotary_dim)": 16,
    r"(.*_)?(hidden_size|d_model|n_embd|dim|embedding_size|embed_dim|emb_dim|word_embed_proj_dim)": WIDTH,
    r"(.*_)?(intermediate_size|ffn_dim|d_ff|n_inner|ffn_hidden_size|d_inner)": 176,
    r"(kv|q)_lora_rank": 32,
    r"vocab_size": VOCABULARY,
    r"max_position_embeddings|n_positions|max_seq_len|max_sequence_length|n_ctx|max_length": 130,
    r"num_(local_|routed_)?experts|n_routed_experts|moe_num_experts": 16,
    r"num_experts_per_tok|moe_k|moe_top_k|top_k_experts|num_selected_experts": 2,
}
"""The most that a setting is set to, by the first of these patterns that its whole name matches."""

HEADS: Final = r"num_attention_heads|num_heads|n_heads|n_head"
GROUPS: Final = r".*(key_value|kv)_heads|n_head_kv|multi_query_group_num"
"""Names of the number of key and value heads: half of the heads where they are fewer than these."""

TOKENS: Final = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def _classes() -> Mapping[str, Any]:
    """The names of the classes that train a language model, by model_type."""
    found = import_module("transformers.models.auto.modeling_auto").MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return cast(Mapping[str, Any], found)


def architectures() -> Iterator[str]:
    """The names of all architectures of transformers that are trained to predict the next token."""
    return (f"{PREFIX}{kind}" for kind in _classes())


def is_architecture(name: str) -> bool:
    """Whether a name is one of an architecture."""
    return name.startswith(PREFIX)


def _class_of(name: str) -> Any:
    """The class of transformers that trains an architecture."""
    found = _classes()[name.removeprefix(PREFIX)]
    return getattr(import_module("transformers"), found if isinstance(found, str) else found[0])


def small_config(name: str) -> Any:
    """The configuration of an architecture with sizes of at most `SIZES`."""
    config_class = _class_of(name).config_class
    sizes: dict[str, Any] = _small(config_class)
    for part, part_class in (config_class.sub_configs or {}).items():
        if getattr(part_class, "model_type", ""):
            sizes[part] = _small(part_class)
    config = config_class(**sizes)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    return config


def _small(config_class: Any) -> dict[str, int]:
    """The settings of a class of configurations that are sizes, made small."""
    usual = config_class()
    plain: dict[str, Any] = usual.to_dict()
    counts = {key: n for key, n in plain.items() if isinstance(n, int) and not isinstance(n, bool)}
    heads = max((n for key, n in counts.items() if re.fullmatch(HEADS, key)), default=0)
    sizes = {}
    for key, n in counts.items():
        if re.fullmatch(GROUPS, key):
            sizes[key] = 4 if n >= heads else min(n, 2)
        elif key != "qk_head_dim":  # the sum of two others
            most = next((most for pattern, most in SIZES.items() if re.fullmatch(pattern, key)), n)
            sizes[key] = min(n, most)
    return sizes | {key: n for key, n in TOKENS.items() if hasattr(usual, key)}


def small_module(name: str) -> nn.Module:
    """An architecture's module."""
    return cast(nn.Module, _class_of(name)(small_config(name)))
