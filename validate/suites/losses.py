"""Liger's fused linear cross-entropy in transformers' models: at true size, on GPUs alone."""

from typing import Any, Final

from memplan.errors import InvalidValue
from validate.cases import Case
from validate.gpus import Gpus
from validate.suites.compiled import cases_of

LIGER: Final[dict[str, Any]] = {"liger_kernel": "fused_linear_cross_entropy"}

ALONE: Final[tuple[dict[str, Any], ...]] = (
    {"precision": "bf16", "optimizer": "sgd", "seq_len": 4096, "recompute": "full"},
    {"precision": "bf16", "optimizer": "sgd", "seq_len": 2048, "micro_batch": 3, "global_batch": 6},
    {"precision": "fp32", "optimizer": "sgd", "seq_len": 1500, "recompute": "full"},
)
"""One GPU."""

SHARDED: Final[tuple[dict[str, Any], ...]] = (
    {"dp": 8, "zero": 3, "recompute": "full"},
    {"dp": 8, "zero": 3, "precision": "bf16", "recompute": "selective", "clip_grad_norm": 1.0},
    {"dp": 4, "dp_replicate": 2, "zero": 3, "seq_len": 4096, "micro_batch": 2, "recompute": "full"},
    {"dp": 8, "zero": 3, "recompute": "full", "activation_offloading": "save_on_cpu"},
)
"""One rank of 8."""

MODELS: Final = (
    ("llama-3-8b", "huggingface", SHARDED),
    ("qwen3-8b", "huggingface", SHARDED[:2]),
    ("llama-3.2-1b", "huggingface", ALONE),
    ("qwen3-4b", "huggingface", ALONE[:1]),
    ("qwen2.5-0.5b", "huggingface", ALONE[1:2]),
)
"""Models, whose code, and plans."""


def gpu_losses(gpus: Gpus | None) -> tuple[Case, ...]:
    """One rank of 1 to 8.

    Raises:
        InvalidValue: without a GPU, for which alone Triton compiles Liger's kernels.
    """
    if gpus is None:
        raise InvalidValue("gpu-losses runs Liger's kernels, which are for GPUs; use --device nogpu.")
    return cases_of(MODELS, gpus, **LIGER)
