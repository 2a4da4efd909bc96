"""The families of transformers' decoders, as its own modules run on CPU ranks: each with its quirks.

A flat list of models and of plans, crossed.
"""

from typing import Any, Final

from memplan.engines.options import plan_of
from memplan.models import Decoder
from validate.cases import OF_TRANSFORMERS, Case, title

SIZES: Final[dict[str, Any]] = {
    "n_layers": 4, "d_model": 64, "n_heads": 4, "n_kv_heads": 2, "d_ff": 176, "vocab_size": 1000,
    "max_seq_len": 128,
}  # fmt: skip

ALL_HEADS: Final[dict[str, Any]] = {"n_kv_heads": 4}

QUIRKS: Final[dict[str, dict[str, Any]]] = {
    "gpt": {**ALL_HEADS, "dropout": 0.1, "tied_head": True},
    "llama": {"attention_bias": True, "mlp_bias": True, "d_head": 32},
    "mistral": {"window": 32, "d_head": 32},
    "qwen2": {"tied_head": True},
    "qwen3": {"d_head": 32},
    "gemma": {"n_kv_heads": 1, "d_head": 32, "tied_head": True},
    "gemma2": {"d_head": 32, "tied_head": True},
    "gemma3": {"window": 32, "pattern": 2, "tied_head": True},
    "phi3": {"partial_rotary": 0.5, "window": 32},
    "olmo2": {},
    "starcoder2": {"tied_head": True},
    "gpt_neox": {**ALL_HEADS},
    "opt": {**ALL_HEADS, "dropout": 0.1, "tied_head": True},
}
"""Options of each family alone, and sizes that the suite `wild` lacks."""

PLANS: Final[tuple[dict[str, Any], ...]] = (
    {"micro_batch": 2, "precision": "fp32"},
    {"micro_batch": 3, "global_batch": 6, "precision": "bf16"},
    {"micro_batch": 4, "recompute": "full"},
    {"dp": 2, "micro_batch": 2},
    {"dp": 2, "zero": 3, "micro_batch": 2, "recompute": "full"},
)


def families() -> tuple[Case, ...]:
    """Every family under every plan."""
    cases = []
    for name, quirks in QUIRKS.items():
        cls: type[Decoder] = OF_TRANSFORMERS[f"huggingface-{name}"]
        model = cls(**{**SIZES, "name": f"transformers-{name}", **quirks})
        for options in PLANS:
            plan = plan_of(**options, seq_len=64)
            case = f"{title(model, plan)}, {plan.global_batch} x {plan.seq_len}"
            cases.append(Case(name=case, model=model, plan=plan, timeout_s=240.0))
    return tuple(cases)
