"""The families of transformers' decoders, as its own modules run: each with its quirks.

Flat lists of models and of plans, crossed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from memplan.engines.options import plan_of
from memplan.models import Decoder
from validate.cases import OF_TRANSFORMERS, Case, placed, title
from validate.gpus import Gpus

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
    "cohere": {"n_kv_heads": 1, "d_head": 32, "tied_head": True},
}
"""Options of each family alone, and sizes that the suite `wild` lacks."""

PLANS: Final[tuple[dict[str, Any], ...]] = (
    {"micro_batch": 2, "precision": "fp32"},
    {"micro_batch": 3, "global_batch": 6, "precision": "bf16"},
    {"micro_batch": 4, "recompute": "full"},
    {"dp": 2, "micro_batch": 2},
    {"dp": 2, "zero": 3, "micro_batch": 2, "recompute": "full"},
    {"micro_batch": 4, "recompute": "selective", "precision": "bf16"},
    {"dp": 2, "zero": 3, "micro_batch": 2, "recompute": "selective"},
)


PIPELINES: Final[tuple[dict[str, Any], ...]] = (
    {"pp": 2, "schedule": "gpipe", "micro_batch": 2, "global_batch": 8, "precision": "fp32"},
    {"pp": 2, "micro_batch": 2, "global_batch": 8, "recompute": "full"},
    {"pp": 2, "virtual_stages": 2, "schedule": "interleaved-1f1b", "global_batch": 4, "precision": "bf16"},
    {"pp": 2, "virtual_stages": 2, "schedule": "looped-bfs", "micro_batch": 2, "global_batch": 8},
    {"pp": 2, "dp": 2, "micro_batch": 2, "global_batch": 16, "precision": "fp32"},
    {"pp": 2, "dp": 2, "zero": 3, "micro_batch": 2, "global_batch": 16},
    {"pp": 2, "schedule": "zero-bubble", "micro_batch": 2, "global_batch": 8, "precision": "fp32"},
    {"pp": 2, "dp": 2, "zero": 2, "schedule": "zero-bubble", "micro_batch": 2, "global_batch": 16},
)
"""Pipelines over blocks, of models whose embedding and head are not tied."""

SHARDED_PIPELINES: Final[tuple[dict[str, Any], ...]] = tuple(
    {"pp": 2, "dp": 2, "zero": zero, "precision": precision, "micro_batch": 2, "global_batch": 4 * n}
    for zero in (2, 3)
    for precision in ("fp32", "bf16", "bf16-mixed")
    for n in (2, 4)
)
"""FSDP2 in a pipeline of two and of four micro-batches without recomputation, for GPUs."""

FOUR_STAGES: Final[dict[str, Any]] = {
    "pp": 2, "virtual_stages": 2, "schedule": "zbv", "micro_batch": 2, "global_batch": 8, "recompute": "full",
}  # fmt: skip
NOT_IN_FOUR: Final = ("opt", "gemma2")
"""Families that are not run with a recomputed block on each of four stages.

PyTorch fails on OPT's blocks, which return views. Of Gemma 2's two masks such a stage keeps one; memplan
counts both, 1.0 % too much here.
"""

WINDOWED: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    (
        "mistral",
        {"d_model": 4096, "n_heads": 32, "n_kv_heads": 8, "d_ff": 14336, "vocab_size": 32000, "window": 4096},
    ),
    (
        "gemma3",
        {
            "d_model": 2560, "n_heads": 8, "n_kv_heads": 4, "d_head": 256, "d_ff": 10240, "window": 1024,
            "vocab_size": 262208, "pattern": 2,
        },
    ),
    ("phi3", {"d_model": 3072, "n_heads": 32, "d_ff": 8192, "vocab_size": 32064, "window": 2047}),
    (
        "starcoder2",
        {"d_model": 4608, "n_heads": 36, "n_kv_heads": 4, "d_ff": 18432, "vocab_size": 49152, "window": 4096},
    ),
)  # fmt: skip
"""Sizes of Mistral 7B, Gemma 3 4B, Phi 3 mini and StarCoder 2 7B."""

WINDOW_PLANS: Final[tuple[dict[str, Any], ...]] = (
    {"precision": "fp32", "seq_len": 4608},
    {"precision": "bf16", "seq_len": 4608, "micro_batch": 2},
    {"precision": "bf16", "seq_len": 4100},
    {"precision": "bf16-mixed", "seq_len": 4100, "micro_batch": 2, "recompute": "full"},
)
"""Sequences beyond the windows, also with rows of masks that are padded."""


def families() -> tuple[Case, ...]:
    """Every family under every plan."""
    cases = []
    for name, quirks in QUIRKS.items():
        sizes = {**SIZES, **quirks}
        cases += [_case(name, sizes, {**options, "seq_len": 64}) for options in PLANS]
        cases += _untied(name, PIPELINES if name in NOT_IN_FOUR else [*PIPELINES, FOUR_STAGES])
    return tuple(cases)


def gpu_families(gpus: Gpus | None) -> tuple[Case, ...]:
    """The families in small, and windows at published widths; pipelines where each rank has a GPU."""
    if gpus is None:
        return families()
    sharded = (case for name in QUIRKS for case in _untied(name, SHARDED_PIPELINES))
    small = dict.fromkeys([*families(), *sharded])
    runs = (case for case in small if case.plan.pp == 1 or case.plan.world_size <= gpus.n)
    windowed = (
        _case(name, {"n_layers": 4, "max_seq_len": 8192, **sizes}, options)
        for name, sizes in WINDOWED
        for options in WINDOW_PLANS
    )
    cases = (*runs, *(replace(case, timeout_s=600.0) for case in windowed))
    return tuple(placed(case, gpus) for case in cases)


def _untied(name: str, plans: Sequence[dict[str, Any]]) -> Iterator[Case]:
    """A family without tied weights under these plans."""
    sizes = {**SIZES, **QUIRKS[name], "tied_head": False}
    return (_case(name, sizes, {**options, "seq_len": 64}) for options in plans)


def _case(family: str, sizes: dict[str, Any], options: dict[str, Any]) -> Case:
    cls: type[Decoder] = OF_TRANSFORMERS[f"huggingface-{family}"]
    model, plan = cls(**{**sizes, "name": f"transformers-{family}"}), plan_of(**options)
    name = f"{title(model, plan)}, {plan.global_batch} x {plan.seq_len}"
    return Case(name=name, model=model, plan=plan, timeout_s=240.0)
