"""Models small enough for a laptop, and a suite of small forms of the known ones."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from memplan import Gpt, Llama
from memplan.engines.options import plan_of
from memplan.models import Decoder
from memplan.models.presets import preset_table
from validate.cases import OWN, Case, runnable, title

LLAMA: Final = Llama(
    name="llama-small",
    n_layers=4,
    d_model=128,
    n_heads=8,
    n_kv_heads=4,
    d_ff=344,
    vocab_size=2048,
    max_seq_len=256,
)
GPT: Final = Gpt(
    name="gpt-small", n_layers=4, d_model=128, n_heads=4, d_ff=512, vocab_size=2048, max_seq_len=256
)
LLAMA_TIED: Final = replace(LLAMA, name="llama-small-tied", tied_head=True)
LLAMA_ODD: Final = replace(LLAMA, name="llama-small-odd", n_layers=3, vocab_size=1999, d_ff=341)
GPT_TIED: Final = replace(GPT, name="gpt-small-tied", tied_head=True)
GPT_DROPOUT: Final = replace(GPT, name="gpt-small-dropout", dropout=0.1)

SMALL: Final = {model.name: model for model in (LLAMA, LLAMA_TIED, LLAMA_ODD, GPT, GPT_TIED, GPT_DROPOUT)}
"""The small models by name."""

BIASED: Final = replace(LLAMA, name="llama-small-biased", attention_bias=True, mlp_bias=True)
WIDE_HEADS: Final = replace(LLAMA, name="llama-small-wide-heads", d_head=32)


def models() -> tuple[Case, ...]:
    """Small forms of the presets with memplan's own modules, with biases and other heads, and one whole."""
    return (*_plans_of_each(), _whole("gpt2"))


def _plans_of_each() -> Iterator[Case]:
    plans: tuple[dict[str, Any], ...] = (
        {"precision": "fp32", "global_batch": 2},
        {"dp": 2, "zero": 3, "precision": "bf16-mixed"},
        {"tp": 2, "sequence_parallel": True, "precision": "bf16"},
        {"pp": 2, "global_batch": 4, "precision": "fp32"},
    )
    names = [name for name, entry in preset_table().items() if entry["family"] in OWN]
    for model in (*(in_small(runnable(name)) for name in names), BIASED, WIDE_HEADS):
        for asked in plans:
            untied = replace(model, tied_head=False) if "pp" in asked else model
            plan = plan_of(**asked, seq_len=64)
            yield Case(name=title(untied, plan), model=untied, plan=plan)


def in_small(model: Decoder) -> Decoder:
    """The model in small: as many query heads to a key head, the same ratios of widths, ties and dropout."""
    n_kv_heads = 2
    n_heads = n_kv_heads * model.n_heads // model.n_kv_heads
    d_model = 16 * n_heads * model.d_model // (model.n_heads * model.d_head)
    return replace(
        model,
        name=f"{model.name} in small",
        n_layers=3,
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        d_head=16,
        d_ff=model.d_ff * d_model // model.d_model // 4 * 4,
        vocab_size=model.vocab_size // 64 // 4 * 4,
        max_seq_len=64,
    )


def _whole(name: str) -> Case:
    model, plan = runnable(name), plan_of(seq_len=128, precision="fp32")
    return Case(name=title(model, plan), model=model, plan=plan, timeout_s=600)
