"""FSDP2 that accumulates whole gradients up to the last micro-batch: small, and at true size on GPUs."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from memplan.engines.options import plan_of
from memplan.errors import InvalidValue
from memplan.models import Decoder
from validate.cases import OF_TRANSFORMERS, Case, title
from validate.gpus import Gpus
from validate.suites.compiled import cases_of
from validate.suites.families import QUIRKS, SIZES
from validate.suites.models import GPT, GPT_TIED, LLAMA, LLAMA_ODD

USUAL: Final[dict[str, Any]] = {"dp": 2, "zero": 3, "precision": "fp32", "seq_len": 64, "no_sync": True}

OF_OWN: Final[tuple[dict[str, Any], ...]] = (
    {"global_batch": 6},
    {"global_batch": 4, "precision": "bf16-mixed"},
    {"global_batch": 8, "precision": "bf16-mixed", "zero": 2},
    {"global_batch": 8, "precision": "bf16-mixed-reduce-bf16", "micro_batch": 2},
    {"dp": 3, "global_batch": 9, "precision": "bf16"},
    {"dp": 3, "global_batch": 9, "precision": "bf16-reduce-fp32", "recompute": "full"},
    {"dp_replicate": 2, "global_batch": 8, "precision": "bf16-mixed", "fsdp_units": "block+ends"},
    {"tp": 2, "global_batch": 6, "precision": "bf16-mixed"},
    {"tp": 2, "global_batch": 4, "sequence_parallel": True, "recompute": "selective"},
    {"global_batch": 4, "precision": "bf16-mixed", "offload": True},
    {"global_batch": 6, "fsdp_units": "model", "set_to_none": False, "precision": "bf16-mixed"},
    {"global_batch": 6, "fsdp_blocks": 2, "clip_grad_norm": 1.0, "optimizer": "sgd-momentum"},
    {"global_batch": 4, "precision": "fp16-mixed", "micro_batch": 2},
)
"""Plans of memplan's own modules; two ranks in float32 but for what is said."""

OF_OTHERS: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    ("llama", {"global_batch": 6, "precision": "bf16-mixed"}),
    ("qwen3", {"global_batch": 4, "precision": "bf16-mixed-reduce-bf16", "recompute": "full"}),
    ("gpt_neox", {"global_batch": 6, "zero": 2}),
    ("llama", {"global_batch": 6, "precision": "bf16-mixed", "lora_rank": 8}),
)
"""Families of transformers."""

LARGE: Final[tuple[dict[str, Any], ...]] = (
    {"dp": 8, "zero": 3, "recompute": "full", "global_batch": 24},
    {"dp": 8, "zero": 3, "recompute": "full", "global_batch": 16, "precision": "bf16-mixed-reduce-bf16"},
    {"dp": 8, "zero": 2, "global_batch": 16, "precision": "bf16", "clip_grad_norm": 1.0, "seq_len": 2048},
    {"dp": 4, "dp_replicate": 2, "zero": 3, "global_batch": 24, "seq_len": 2048, "optimizer_impl": "fused"},
)
"""One rank of 8."""

MODELS: Final = (
    ("llama-3-8b", "huggingface", LARGE),
    ("llama-3-8b", "torchtitan", LARGE[:2]),
    ("qwen3-8b", "huggingface", LARGE[1:3]),
    ("gpt2-xl", "reference", [{**plan, "seq_len": 1024} for plan in LARGE[::3]]),
)
"""Models, whose code, and plans."""


def no_sync() -> tuple[Case, ...]:
    """memplan's own modules and transformers' on CPU ranks."""
    return (*_of_own(), *_of_others())


def _of_own() -> Iterator[Case]:
    for i, asked in enumerate(OF_OWN):
        model: Decoder = (LLAMA, GPT, LLAMA_ODD, GPT_TIED)[i % 4]
        yield _case(replace(model), asked)


def _of_others() -> Iterator[Case]:
    for family, asked in OF_OTHERS:
        sizes = {**SIZES, **QUIRKS[family], "name": f"transformers-{family}"}
        yield _case(OF_TRANSFORMERS[f"huggingface-{family}"](**sizes), asked)


def _case(model: Decoder, asked: dict[str, Any]) -> Case:
    plan = plan_of(**USUAL | asked)
    return Case(name=f"{title(model, plan)}, {plan.global_batch} x {plan.seq_len}", model=model, plan=plan)


def gpu_no_sync(gpus: Gpus | None) -> tuple[Case, ...]:
    """Models of true size, one rank of 8 with stand-ins for the others.

    Raises:
        InvalidValue: without a GPU.
    """
    if gpus is None:
        raise InvalidValue("gpu-no-sync has models of true size; use --device nogpu, or the suite no-sync.")
    return cases_of(MODELS, gpus, no_sync=True)
