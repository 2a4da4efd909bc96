"""FairScale: OSS under DistributedDataParallel and ShardedDataParallel."""

from typing import Final

from validate.cases import Case
from validate.gpus import Gpus
from validate.suites.alone import FULL, GPT_XL, LLAMA_8B, Large, Small, cases_alone, small_cases
from validate.suites.models import GPT, GPT_TIED, LLAMA, LLAMA_ODD, LLAMA_TIED

SMALL: Final[tuple[Small, ...]] = (
    (LLAMA, {"zero": 1}),
    (GPT, {"zero": 1, "dp": 4, "clip_grad_norm": 0.1}),
    (GPT, {"zero": 1, "dp": 3, "precision": "bf16-mixed", "micro_batch": 2}),
    (LLAMA_ODD, {"zero": 1, "dp": 4, "recompute": "full", "optimizer": "sgd-momentum"}),
    (GPT_TIED, {"zero": 1, "global_batch": 8, "optimizer": "sgd"}),
    (GPT, {}),
    (LLAMA, {"reduce_buffer_size": 20_000}),
    (LLAMA_TIED, {"dp": 3, "reduce_buffer_size": 0}),
    (LLAMA_ODD, {"dp": 4, "reduce_buffer_size": 40_000, "optimizer": "adam", "recompute": "full"}),
    (GPT_TIED, {"reduce_buffer_size": 100_000, "global_batch": 8, "optimizer": "sgd-momentum"}),
    (LLAMA, {"reduce_buffer_size": 50_000, "precision": "bf16-mixed", "global_batch": 12, "micro_batch": 2}),
    (GPT, {"dp": 4, "reduce_buffer_size": 1000, "precision": "bf16", "micro_batch": 2}),
    (LLAMA, {"dp": 3, "reduce_buffer_size": 50_000, "clip_grad_norm": 0.1}),
    (LLAMA, {"dp": 4, "reduce_buffer_size": 0, "recompute": "selective", "global_batch": 8}),
)
"""Models and what each plan has beside ZeRO-2 of two ranks in float32."""

LARGE: Final[tuple[Large, ...]] = (
    (LLAMA_8B, 8, {"zero": 1}, 0),
    (LLAMA_8B, 8, {"zero": 1, **FULL, "global_batch": 24}, 7),
    (LLAMA_8B, 8, {"zero": 1, "dp": 64, "precision": "bf16", **FULL}, 1),
    (GPT_XL, 48, {"zero": 1, **FULL}, 3),
    (LLAMA_8B, 8, {**FULL}, 0),
    (LLAMA_8B, 8, {"reduce_buffer_size": 0}, 1),
    (LLAMA_8B, 8, {"dp": 64, "reduce_buffer_size": 2**25, **FULL}, 1),
    (LLAMA_8B, 8, {"precision": "bf16-autocast", **FULL}, 2),
    (LLAMA_8B, 16, {"precision": "bf16", "global_batch": 32, **FULL}, 5),
    (LLAMA_8B, 32, {"dp": 64, "precision": "bf16", "clip_grad_norm": 1.0, **FULL}, 63),
    (LLAMA_8B, 4, {"optimizer": "sgd-momentum", "micro_batch": 2}, 4),
    (GPT_XL, 16, {"clip_grad_norm": 1.0}, 0),
    (GPT_XL, 48, {"precision": "fp32", **FULL}, 2),
    (GPT_XL, 48, {"dp": 64, "optimizer": "adam", **FULL}, 63),
    (GPT_XL, 24, {"precision": "bf16", "recompute": "selective", "global_batch": 16}, 6),
)
"""A model, its layers, what its plan has beside ZeRO-2 of eight ranks, and the rank that runs alone."""


def fairscale() -> tuple[Case, ...]:
    """FairScale on CPU ranks."""
    return tuple(small_cases("fairscale", "FairScale", SMALL))


def gpu_fairscale(gpus: Gpus | None) -> tuple[Case, ...]:
    """FairScale on one rank of a world with stand-ins for the others.

    Raises:
        InvalidValue: without a GPU.
    """
    return tuple(cases_alone("fairscale", LARGE, gpus))
