"""DeepSpeed on CPU ranks: ZeRO-0 to 3, and hpZ."""

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
)  # fmt: skip
"""Models and what each plan has beside two ranks."""


def deepspeed() -> tuple[Case, ...]:
    """DeepSpeed on CPU ranks."""
    return tuple(small_cases("deepspeed", "DeepSpeed", SMALL))
