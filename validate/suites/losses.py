"""Losses that make logits chunk by chunk, Liger's and torchtitan's: at true size, on GPUs alone."""

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

CHUNKS: Final[dict[str, Any]] = {"chunked_loss": "ChunkedLossWrapper", "loss_chunks": 8}

IN_CHUNKS: Final[tuple[dict[str, Any], ...]] = (
    {"dp": 8, "zero": 3, "recompute": "full"},
    {"dp": 8, "zero": 3, "precision": "bf16", "recompute": "selective", "clip_grad_norm": 1.0},
    {"dp": 4, "dp_replicate": 2, "zero": 3, "seq_len": 4096, "micro_batch": 2, "recompute": "full"},
    {"dp": 8, "zero": 3, "recompute": "full", "seq_len": 16_384, "global_batch": 16},
    {"dp": 64, "zero": 3, "recompute": "full", "seq_len": 32_768, "loss_chunks": 16},
    {"dp": 8, "zero": 3, "seq_len": 4096, "loss_chunks": 4, "activation_offloading": "save_on_cpu",
     "recompute": "full"},
    {"precision": "bf16", "optimizer": "sgd", "recompute": "full", "seq_len": 16_384},
    {"precision": "bf16", "optimizer": "sgd", "seq_len": 1024, "micro_batch": 3, "global_batch": 6},
    {"precision": "fp32", "optimizer": "sgd", "recompute": "full", "seq_len": 1024, "loss_chunks": 2},
)  # fmt: skip
"""torchtitan's loss: one rank of 8 or 64, then one GPU."""

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
    sharded = [{"fsdp_units": "block+ends", **one} if "dp" in one else one for one in IN_CHUNKS]
    by_torchtitan = ("llama-3-8b", "torchtitan", sharded), ("llama-3-8b", "reference", sharded[:2])
    return (*cases_of(MODELS, gpus, **LIGER), *cases_of(by_torchtitan, gpus, **CHUNKS))
