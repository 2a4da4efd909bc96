"""Colossal-AI: LowLevelZeroPlugin, stages 1 and 2."""

from typing import Final

from validate.cases import Case
from validate.gpus import Gpus
from validate.suites.alone import FULL, GPT_XL, LLAMA_8B, Large, Small, cases_alone, small_cases
from validate.suites.models import GPT, GPT_TIED, LLAMA, LLAMA_ODD, LLAMA_TIED

SMALL: Final[tuple[Small, ...]] = (
    (LLAMA, {"zero": 1}),
    (LLAMA, {"zero": 1, "overlap_communication": False, "precision": "bf16-mixed"}),
    (GPT, {"zero": 1, "dp": 3, "reduce_bucket_size": 20_000, "precision": "bf16-mixed", "micro_batch": 2}),
    (GPT_TIED, {"zero": 1, "dp": 4, "global_batch": 12, "reduce_bucket_size": 20_000, "clip_grad_norm": 0.1}),
    (LLAMA_ODD, {"zero": 1, "dp": 4, "overlap_communication": False, "reduce_bucket_size": 10_000,
                 "recompute": "full", "optimizer": "sgd-momentum"}),
    (LLAMA, {"zero": 1, "precision": "fp16-mixed", "global_batch": 8, "reduce_bucket_size": 50_000}),
    (GPT, {"zero": 1, "precision": "bf16-mixed", "communication_dtype": "fp32",
           "reduce_bucket_size": 30_000}),
    (GPT, {}),
    (LLAMA, {"precision": "bf16-mixed", "reduce_bucket_size": 20_000}),
    (LLAMA_TIED, {"dp": 3, "precision": "bf16-mixed", "reduce_bucket_size": 30_000, "global_batch": 9}),
    (LLAMA_ODD, {"dp": 4, "precision": "fp16-mixed", "reduce_bucket_size": 10_000, "recompute": "full"}),
    (GPT_TIED, {"overlap_communication": False, "precision": "bf16", "optimizer": "sgd-momentum"}),
    (LLAMA, {"precision": "bf16", "dp": 3, "clip_grad_norm": 0.1, "reduce_bucket_size": 5_000}),
    (GPT, {"dp": 4, "precision": "bf16-mixed", "communication_dtype": "fp32", "reduce_bucket_size": 10_000,
           "micro_batch": 2, "optimizer": "adam"}),
    (LLAMA, {"dp": 4, "recompute": "selective", "global_batch": 8, "optimizer": "sgd"}),
)  # fmt: skip
"""Models and what each plan has beside ZeRO-2 of two ranks in float32."""

LARGE: Final[tuple[Large, ...]] = (
    (LLAMA_8B, 8, {"zero": 1, **FULL}, 0),
    (LLAMA_8B, 8, {"zero": 1, "overlap_communication": False, **FULL}, 1),
    (LLAMA_8B, 8, {"zero": 1, "global_batch": 24, **FULL}, 7),
    (LLAMA_8B, 32, {"zero": 1, "dp": 64, **FULL}, 1),
    (LLAMA_8B, 8, {"zero": 1, "precision": "fp16-mixed", "communication_dtype": "fp32", **FULL}, 2),
    (GPT_XL, 48, {"zero": 1, "precision": "fp32", **FULL}, 3),
    (GPT_XL, 24, {"zero": 1, "precision": "bf16", "recompute": "selective"}, 6),
    (LLAMA_8B, 32, {**FULL}, 0),
    (LLAMA_8B, 8, {"overlap_communication": False}, 1),
    (LLAMA_8B, 32, {"dp": 64, "clip_grad_norm": 1.0, **FULL}, 63),
    (LLAMA_8B, 8, {"global_batch": 32, "reduce_bucket_size": 2**26, **FULL}, 5),
    (LLAMA_8B, 8, {"precision": "bf16", "reduce_bucket_size": 2**20, **FULL}, 4),
    (LLAMA_8B, 8, {"precision": "fp16-mixed", "dp": 7, **FULL}, 6),
    (LLAMA_8B, 4, {"optimizer": "sgd-momentum", "micro_batch": 2, "communication_dtype": "fp32"}, 4),
    (GPT_XL, 16, {"clip_grad_norm": 1.0}, 0),
    (GPT_XL, 48, {"precision": "fp32", **FULL}, 2),
    (GPT_XL, 48, {"dp": 64, "optimizer": "adam", "overlap_communication": False, **FULL}, 63),
    (GPT_XL, 24, {"precision": "fp16-mixed", "recompute": "selective", "global_batch": 16}, 6),
)
"""A model, its layers, what its plan has beside ZeRO-2 of eight ranks in bfloat16, the rank that is run."""


def colossalai() -> tuple[Case, ...]:
    """Colossal-AI on CPU ranks."""
    return tuple(small_cases("colossalai", "Colossal-AI", SMALL))


def gpu_colossalai(gpus: Gpus | None) -> tuple[Case, ...]:
    """Colossal-AI on one rank of a world with stand-ins for the others.

    Raises:
        InvalidValue: without a GPU.
    """
    return tuple(cases_alone("colossalai", LARGE, gpus))
