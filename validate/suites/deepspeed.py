"""DeepSpeed on CPU ranks: ZeRO-0 to 3, hpZ, and pipelines."""

from typing import Any, Final

from validate.cases import Case
from validate.suites.alone import Small, small_cases
from validate.suites.models import GPT, LLAMA, LLAMA_ODD

BUCKET: Final[dict[str, Any]] = {"reduce_bucket_size": 20_000, "precision": "bf16-mixed"}
SMALL_3: Final[dict[str, Any]] = {
    **BUCKET,
    "zero": 3,
    "stage3_prefetch_bucket_size": 10_000,
    "stage3_param_persistence_threshold": 100,
}

PIPELINE: Final[dict[str, Any]] = {"pp": 2, "zero": 0, "precision": "bf16-mixed"}

SMALL: Final[tuple[Small, ...]] = (
    (LLAMA, {"zero": 0, "precision": "bf16-mixed"}),
    (LLAMA, {"zero": 1, **BUCKET, "global_batch": 8}),
    (GPT, {"zero": 2, **BUCKET, "dp": 3}),
    (LLAMA, {**SMALL_3}),
    (GPT, {**SMALL_3, "dp": 4, "recompute": "full", "stage3_max_reuse_distance": 1000, "global_batch": 12}),
    (LLAMA, {**SMALL_3, "dp": 4, "zero_hpz_partition_size": 2}),
    (LLAMA, {**SMALL_3, "dp": 2, "zero_hpz_partition_size": 2, "recompute": "full"}),
    (GPT, {**SMALL_3, "dp": 4, "zero_hpz_partition_size": 2, "global_batch": 12, "clip_grad_norm": 0.1}),
    (LLAMA_ODD, {**SMALL_3, "dp": 4, "zero_hpz_partition_size": 4, "stage3_max_reuse_distance": 1000}),
    (LLAMA, {**SMALL_3, "dp": 6, "zero_hpz_partition_size": 3, "recompute": "full",
             "stage3_prefetch_bucket_size": 0}),
    (LLAMA, {**PIPELINE, "dp": 1, "global_batch": 4}),
    (GPT, {**PIPELINE, "dp": 1, "global_batch": 6, "recompute": "full"}),
    (LLAMA, {**PIPELINE, "global_batch": 8, "clip_grad_norm": 0.1}),
    (LLAMA, {**PIPELINE, **BUCKET, "zero": 1, "global_batch": 12}),
    (GPT, {**PIPELINE, **BUCKET, "zero": 1, "dp": 1, "global_batch": 4, "micro_batch": 2}),
    (LLAMA, {**PIPELINE, "pp": 3, "dp": 1, "global_batch": 5, "partition_method": "uniform"}),
    (LLAMA_ODD, {**PIPELINE, "pp": 4, "dp": 1, "global_batch": 8, "partition_method": "type:block"}),
    (LLAMA, {**PIPELINE, "pp": 4, "dp": 1, "global_batch": 1}),
    (GPT, {**PIPELINE, **BUCKET, "zero": 1, "global_batch": 16, "recompute": "full", "clip_grad_norm": 0.1}),
)  # fmt: skip
"""Models and what each plan has beside two ranks."""


def deepspeed() -> tuple[Case, ...]:
    """DeepSpeed on CPU ranks."""
    return tuple(small_cases("deepspeed", "DeepSpeed", SMALL))
