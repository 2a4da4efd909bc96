"""Models of Hugging Face as Megatron's GPTModel, as Megatron-Bridge converts them.

Source: megatron.bridge.models: the bridges of Llama, Mistral, Mixtral, Qwen 2, Qwen 3, Qwen 3 MoE
and DeepSeek-V3.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from memplan.errors import MissingRule
from memplan.models.base import Model
from memplan.models.decoders import GptDecoder
from memplan.models.megatron.config import TransformerConfig
from memplan.models.megatron.experts import MoE
from memplan.models.megatron.latent import MLA
from memplan.models.megatron.model import GPTModel

SIZES: Final = (
    "name", "d_model", "max_seq_len", "n_layers", "n_heads", "n_kv_heads", "d_head", "d_ff", "vocab_size",
    "tied_head", "dropout",
)  # fmt: skip
"""The sizes that both have, by the same name."""

ROTARY_FAMILIES: Final = ("llama", "mistral", "qwen2", "qwen3")
"""The families of RMSNorm, rotary positions and SwiGLU that Megatron has."""

MIXTURES: Final = ("mixtral", "qwen3_moe")
"""The `model_type` of mixtures of experts that Megatron has."""


def gpt_model(model: Model) -> GPTModel:
    """The model as Megatron builds it.

    Raises:
        MissingRule: for a model that Megatron's arguments do not describe here.
    """
    if isinstance(model, GPTModel):
        return model
    known = model.sizes()
    sizes = {name: known[name] for name in SIZES if name in known}
    if isinstance(model, GptDecoder) and model.family == "gpt":
        return GPTModel(**sizes, attention_dropout=model.dropout)
    values = model.config_values() or {}
    if values.get("model_type") in MIXTURES:
        return _mixture(model, values)
    if values.get("model_type") == "deepseek_v3":
        return _deepseek_v3(model, values)
    windowed = 0 < known.get("window", 0) < model.max_seq_len
    if model.family in ROTARY_FAMILIES and not windowed:
        biases = known.get("attention_bias", False) or model.family == "qwen2"
        return _rotary(
            **sizes,
            add_bias_linear=known.get("mlp_bias", False),
            add_qkv_bias=biases,
            qk_layernorm=model.family == "qwen3",
        )
    raise MissingRule(
        f"engine='megatron' has no rule for {model.name} of the family {model.family}; use a GPT, a Llama, a "
        "Mistral without a window, a Mixtral, a Qwen 2 or 3, a DeepSeek-V3, or Megatron's own arguments "
        "(--megatron).",
        kind="a model that the Megatron engine does not build",
    )


def _rotary(**sizes: Any) -> GPTModel:
    """A model of RMSNorm, rotary positions and SwiGLU."""
    usual: dict[str, Any] = {"normalization": "RMSNorm", "swiglu": True, "position_embedding_type": "rope"}
    return GPTModel(**usual | {"add_bias_linear": False} | sizes)


def _mixture(model: Model, values: Mapping[str, Any]) -> GPTModel:
    """A mixture of experts with these values of its config.json."""
    is_qwen, n_layers = values["model_type"] == "qwen3_moe", values["num_hidden_layers"]
    every, dense = values.get("decoder_sparse_step", 1), values.get("mlp_only_layers") or ()
    experts = MoE(
        num_experts=model.n_experts,
        ffn_hidden_size=values["moe_intermediate_size" if is_qwen else "intermediate_size"],
        router_topk=values["num_experts_per_tok"],
        layer_freq=tuple([int((i + 1) % every == 0 and i not in dense) for i in range(n_layers)]),
        aux_loss_coeff=values.get("router_aux_loss_coef", 0.0),
    )
    n_heads = values["num_attention_heads"]
    return _rotary(
        **_sizes(model, values),
        n_kv_heads=values.get("num_key_value_heads") or n_heads,
        d_head=values.get("head_dim") or values["hidden_size"] // n_heads,
        tied_head=values.get("tie_word_embeddings", False),
        add_qkv_bias=values.get("attention_bias", False),
        qk_layernorm=is_qwen,
        moe=experts,
    )


def _sizes(model: Model, values: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes that have the same names in each config.json."""
    return {
        "name": model.name,
        "d_model": values["hidden_size"],
        "max_seq_len": model.max_seq_len,
        "n_layers": values["num_hidden_layers"],
        "n_heads": values["num_attention_heads"],
        "d_ff": values["intermediate_size"],
        "vocab_size": values["vocab_size"],
    }


def _deepseek_v3(model: Model, values: Mapping[str, Any]) -> GPTModel:
    """DeepSeek-V3 with these values of its config.json, multi-token prediction included."""
    n_dense, width = values["first_k_dense_replace"], values["moe_intermediate_size"]
    mla = MLA(
        q_lora_rank=values.get("q_lora_rank") or 0,
        kv_lora_rank=values["kv_lora_rank"],
        qk_head_dim=values["qk_nope_head_dim"],
        qk_pos_emb_head_dim=values["qk_rope_head_dim"],
        v_head_dim=values["v_head_dim"],
    )
    experts = MoE(
        num_experts=model.n_experts,
        ffn_hidden_size=width,
        router_topk=values["num_experts_per_tok"],
        layer_freq=tuple([int(i >= n_dense) for i in range(values["num_hidden_layers"])]),
        shared_expert_intermediate_size=width * values["n_shared_experts"],
        router_load_balancing_type="seq_aux_loss",
        aux_loss_coeff=1e-4,
        router_score_function="sigmoid",
        router_pre_softmax=True,
        router_enable_expert_bias=True,
        router_in_fp32=True,
    )
    return _rotary(
        **_sizes(model, values),
        n_kv_heads=values["num_attention_heads"],
        d_head=mla.width,
        tied_head=False,
        rope_fusion=False,
        qk_layernorm=True,
        mla=mla,
        moe=experts,
        mtp_num_layers=values.get("num_nextn_predict_layers") or 0,
    )


def configured(model: Model, config: TransformerConfig) -> GPTModel:
    """The model with its layers configured."""
    return replace(gpt_model(model), config=config)
