"""TRL's SFTTrainer, DPOTrainer and GRPOTrainer; flat lists of rows. On CPU Accelerate runs no FSDP2."""

from typing import Any, Final

from memplan.errors import InvalidValue
from validate.cases import Case
from validate.gpus import Gpus
from validate.suites.trainers import FSDP2, LLAMA, LORA, QWEN, in_small, large

SFT: Final[dict[str, Any]] = {"trainer": "sft"}

APART: Final[dict[str, Any]] = {"tied_head": False}

SMALL: Final[tuple[tuple[str, dict[str, Any], dict[str, Any]], ...]] = (
    ("llama", {"precision": "fp32"}, APART),
    ("llama", {"precision": "bf16-mixed", "micro_batch": 3}, APART),
    ("qwen3", {"precision": "bf16", "micro_batch": 2}, APART),
    ("llama", {"precision": "bf16-mixed", "global_batch": 3, "recompute": "full"}, APART),
    ("olmo2", {"precision": "bf16-mixed", "micro_batch": 2, "global_batch": 4}, APART),
    ("gemma", {"precision": "fp32", "clip_grad_norm": None}, APART),
    ("llama", {"dp": 2, "precision": "bf16-mixed", "recompute": "full"}, APART),
    ("llama", {"dp": 2, "precision": "fp32", "micro_batch": 2, "global_batch": 8}, APART),
    ("qwen3", {"dp": 2, "precision": "bf16-mixed"}, APART),
    ("olmo2", {"dp": 4, "precision": "fp32", "bucket_cap_bytes": 1024**2}, APART),
    ("gpt", {"dp": 2, "precision": "bf16-mixed", "micro_batch": 2}, {}),
    ("llama", {**LORA, "precision": "fp32"}, {}),
    ("qwen3", {**LORA, "precision": "bf16-mixed", "recompute": "full"}, {}),
    ("gemma2", {**LORA, "precision": "bf16", "lora_targets": "q_proj,v_proj", "lora_dropout": 0.1}, {}),
    ("llama", {**LORA, "dp": 2, "precision": "bf16-mixed"}, {}),
    ("qwen2", {**LORA, "dp": 2, "precision": "bf16-mixed", "recompute": "full", "global_batch": 8}, {}),
)
"""Families in small, for CPU ranks, and their sizes."""

DEFAULT: Final[dict[str, Any]] = {"precision": "bf16-mixed", "recompute": "full"}
"""What SFTConfig sets where nothing is said."""

SMALLEST: Final = "llama-3.2-1b"

QLORA: Final[dict[str, Any]] = {"precision": "bf16-autocast", "quantize": "nf4-double"}
"""Frozen weights of four bits, and all else in bfloat16."""

LARGE: Final[tuple[tuple[str, int, dict[str, Any], int | None], ...]] = (
    (LLAMA, 2, DEFAULT, None),
    (LLAMA, 8, {**LORA, **DEFAULT}, None),
    (LLAMA, 8, {"dp": 8, **FSDP2, "recompute": "full"}, 1),
    (LLAMA, 2, {**DEFAULT, "dp": 8}, 1),
    (QWEN, 8, {**LORA, **DEFAULT, **QLORA, "dp": 8}, 3),
    (LLAMA, 8, {**LORA, "dp": 8, **FSDP2}, 1),
    (QWEN, 4, {"dp": 16, **FSDP2, "precision": "bf16", "recompute": "full"}, 4),
    (LLAMA, 2, {**DEFAULT, "micro_batch": 2, "global_batch": 4}, None),
    (LLAMA, 4, {"dp": 8, "precision": "bf16-autocast"}, 3),
    (QWEN, 2, DEFAULT, None),
    (LLAMA, 8, {**LORA, **DEFAULT, "dp": 8}, 1),
    (LLAMA, 8, {**LORA, **DEFAULT, **QLORA, "quantize": "nf4"}, None),
    (QWEN, 2, {**DEFAULT, "dp": 64, "global_batch": 128}, 63),
    (QWEN, 4, {"precision": "bf16", "seq_len": 2048, "micro_batch": 3}, None),
    (LLAMA, 4, {"dp": 8, **FSDP2, "zero": 2, "recompute": "full", "global_batch": 16}, 2),
    (LLAMA, 2, {"precision": "bf16-mixed"}, None),
    (LLAMA, 32, {"dp": 8, **FSDP2, "recompute": "full"}, 7),
    (QWEN, 36, {**LORA, **DEFAULT, "lora_dropout": 0.1}, None),
    (LLAMA, 8, {**LORA, "dp": 8, **FSDP2, "recompute": "full"}, 1),
    (QWEN, 4, {**LORA, "dp": 16, **FSDP2, "precision": "bf16", "recompute": "full", "global_batch": 64}, 15),
)
"""A preset, its layers, a plan's options, and the rank that runs alone."""

LARGE_PAIRS: Final[tuple[tuple[str, int, dict[str, Any], int | None], ...]] = (
    (LLAMA, 32, {**LORA, "precision": "bf16-autocast", "recompute": "full", "seq_len": 2048}, None),
    (LLAMA, 8, {**LORA, **DEFAULT}, None),
    (SMALLEST, 16, {**DEFAULT, "seq_len": 2048}, None),
    (QWEN, 4, {"precision": "bf16", "seq_len": 1024, "micro_batch": 4}, None),
    (LLAMA, 2, {**DEFAULT, "dp": 8}, 1),
    (QWEN, 8, {**LORA, **DEFAULT, "dp": 8, "global_batch": 32}, 3),
    (LLAMA, 32, {**LORA, **DEFAULT, **QLORA, "seq_len": 2048}, None),
    (LLAMA, 8, {**LORA, **DEFAULT, **QLORA, "quantize": "nf4"}, None),
    (SMALLEST, 16, {**LORA, **QLORA, "micro_batch": 4, "global_batch": 8, "seq_len": 2048}, None),
    (QWEN, 8, {**LORA, **DEFAULT, **QLORA, "dp": 8}, 3),
    (LLAMA, 8, {"dp": 8, **FSDP2, "recompute": "full"}, 1),
    (LLAMA, 4, {"dp": 16, **FSDP2, "seq_len": 2048, "global_batch": 64}, 15),
    (QWEN, 4, {"dp": 8, **FSDP2, "precision": "bf16", "micro_batch": 4, "seq_len": 1024}, 3),
    (QWEN, 8, {"dp": 64, **FSDP2, "recompute": "full", "seq_len": 2048}, 63),
    (LLAMA, 8, {**LORA, "dp": 8, **FSDP2, "seq_len": 2048}, 1),
    (QWEN, 4, {**LORA, "dp": 16, **FSDP2, "seq_len": 1024, "micro_batch": 4, "global_batch": 128}, 15),
    (LLAMA, 4, {**LORA, "dp": 64, **FSDP2, "zero": 2, "precision": "bf16", "seq_len": 2048}, 63),
    (LLAMA, 8, {**LORA, "dp": 8, **FSDP2, "recompute": "full"}, 1),
    (QWEN, 4, {**LORA, "dp": 8, **FSDP2, "zero": 2, "recompute": "full", "micro_batch": 4}, 3),
)
"""As `LARGE`, with pairs of sequences."""

LARGE_AHEAD: Final = (
    *LARGE_PAIRS[1:5],
    (LLAMA, 8, {"dp": 8, **FSDP2, "recompute": "full"}, 1),
    (QWEN, 4, {"dp": 64, **FSDP2, "precision": "bf16", "micro_batch": 4, "seq_len": 2048}, 63),
    (LLAMA, 4, {"dp": 8, **FSDP2, "zero": 2, "seq_len": 2048}, 7),
    (QWEN, 8, {**LORA, "dp": 8, **FSDP2}, 3),
)
"""As `LARGE_PAIRS`, with the reference's log-probabilities computed before training."""


DPO: Final[dict[str, Any]] = {"trainer": "dpo", "micro_batch": 2}

PAIRS: Final[tuple[tuple[str, dict[str, Any], dict[str, Any]], ...]] = (
    ("llama", {"precision": "fp32"}, APART),
    ("llama", {"precision": "bf16-mixed", "micro_batch": 4}, APART),
    ("qwen3", {"precision": "bf16"}, APART),
    ("qwen3", {"precision": "bf16-mixed", "global_batch": 6, "recompute": "full"}, {}),
    ("gpt", {"precision": "fp32", "recompute": "full"}, {}),
    ("llama", {"dp": 2, "precision": "bf16-mixed", "recompute": "full"}, APART),
    ("qwen3", {"dp": 2, "precision": "fp32", "micro_batch": 4, "global_batch": 16}, {}),
    ("llama", {**LORA, "precision": "fp32"}, {}),
    ("qwen3", {**LORA, "precision": "bf16-mixed", "recompute": "full"}, {}),
    ("gemma2", {**LORA, "precision": "bf16", "lora_targets": "q_proj,v_proj", "lora_dropout": 0.1}, {}),
    ("llama", {**LORA, "dp": 2, "precision": "bf16-mixed"}, {}),
    ("qwen2", {**LORA, "dp": 2, "precision": "bf16-mixed", "recompute": "full", "global_batch": 8}, {}),
)
"""Families in small with pairs of sequences, for CPU ranks, and their sizes."""

AHEAD: Final[dict[str, Any]] = {**DPO, "precompute_ref_log_probs": True}

PAIRS_AHEAD: Final = (PAIRS[1], PAIRS[3], PAIRS[5], PAIRS[10])
"""Some of them, with the reference's log-probabilities computed before training."""


GRPO: Final[dict[str, Any]] = {"trainer": "grpo", "micro_batch": 2, "max_completion_length": 32}

COMPLETIONS: Final[tuple[tuple[str, dict[str, Any], dict[str, Any]], ...]] = (
    ("llama", {"precision": "fp32"}, APART),
    ("llama", {"precision": "bf16-mixed", "micro_batch": 4, "ref_model": True}, APART),
    ("qwen3", {"precision": "bf16", "max_completion_length": 48}, APART),
    ("qwen3", {"precision": "bf16-mixed", "global_batch": 6, "recompute": "full", "ref_model": True}, {}),
    ("gpt", {"precision": "fp32", "recompute": "full"}, {}),
    ("llama", {"dp": 2, "precision": "bf16-mixed", "recompute": "full"}, APART),
    ("qwen3", {"dp": 2, "precision": "fp32", "micro_batch": 4, "global_batch": 16, "ref_model": True}, {}),
    ("llama", {**LORA, "precision": "fp32"}, {}),
    ("qwen3", {**LORA, "precision": "bf16-mixed", "recompute": "full", "ref_model": True}, {}),
    ("gemma2", {**LORA, "precision": "bf16", "lora_targets": "q_proj,v_proj", "lora_dropout": 0.1}, {}),
    ("llama", {**LORA, "dp": 2, "precision": "bf16-mixed", "ref_model": True}, {}),
    ("qwen2", {**LORA, "dp": 2, "precision": "bf16-mixed", "recompute": "full", "global_batch": 8}, {}),
)
"""Families in small with completions that are given, for CPU ranks, and their sizes."""

SHORT: Final[dict[str, Any]] = {"seq_len": 128, "max_completion_length": 64}
"""A step that holds most when weights are sent to the server."""

LARGE_COMPLETIONS: Final[tuple[tuple[str, int, dict[str, Any], int | None], ...]] = (
    (SMALLEST, 16, {**DEFAULT, "seq_len": 2048, "max_completion_length": 1024}, None),
    (QWEN, 4, {"precision": "bf16", "seq_len": 1024, "micro_batch": 4, "max_completion_length": 512}, None),
    (LLAMA, 32, {**LORA, "precision": "bf16-autocast", "recompute": "full", "ref_model": True}, None),
    (LLAMA, 8, {**LORA, **DEFAULT, "ref_model": True, "global_batch": 4}, None),
    (LLAMA, 2, {**DEFAULT, "dp": 8, "ref_model": True}, 1),
    (QWEN, 8, {**LORA, **DEFAULT, "dp": 8, "global_batch": 32}, 3),
    (LLAMA, 32, {**LORA, **DEFAULT, **QLORA, "ref_model": True}, None),
    (QWEN, 36, {**LORA, **DEFAULT, **QLORA, "quantize": "nf4"}, None),
    (SMALLEST, 16, {**LORA, **QLORA, "micro_batch": 4, "ref_model": True}, None),
    (LLAMA, 8, {**LORA, **DEFAULT, **QLORA, "dp": 8, "global_batch": 32, "ref_model": True}, 1),
    (LLAMA, 8, {"dp": 8, **FSDP2, "recompute": "full"}, 1),
    (QWEN, 4, {"dp": 64, **FSDP2, "precision": "bf16", "ref_model": True}, 63),
    (LLAMA, 4, {"dp": 16, **FSDP2, "ref_model": True, "recompute": "full", "global_batch": 128}, 15),
    (LLAMA, 4, {"dp": 8, **FSDP2, "zero": 2, "seq_len": 2048}, 3),
    (LLAMA, 2, {"dp": 7, **FSDP2, "seq_len": 2048}, 6),
    (LLAMA, 8, {**LORA, "dp": 8, **FSDP2, "ref_model": True}, 1),
    (QWEN, 8, {**LORA, "dp": 16, **FSDP2, "global_batch": 64}, 15),
    (LLAMA, 8, {**LORA, "dp": 8, **FSDP2, "recompute": "full", "ref_model": True}, 1),
    (LLAMA, 8, {**LORA, "dp": 8, **FSDP2, "recompute": "full", "global_batch": 32}, 1),
    (LLAMA, 4, {**LORA, **DEFAULT, **SHORT}, None),
    (QWEN, 4, {**LORA, "precision": "bf16", **SHORT}, None),
    (LLAMA, 2, {**LORA, "dp": 8, "precision": "bf16-mixed", **SHORT}, 1),
    (LLAMA, 4, {**LORA, "dp": 8, **FSDP2, **SHORT}, 3),
    (QWEN, 4, {**LORA, "dp": 16, **FSDP2, "precision": "bf16", "lora_rank": 64, **SHORT}, 7),
    (LLAMA, 4, {**LORA, "dp": 12, **FSDP2, "ref_model": True, **SHORT}, 11),
    (LLAMA, 4, {**LORA, "dp": 6, **FSDP2, "zero": 2, "lora_rank": 16, **SHORT}, 0),
)
"""As `LARGE`, with completions."""


def trl() -> tuple[Case, ...]:
    """TRL's trainers on CPU ranks: families in small."""
    rows = [*[(SFT, *row) for row in SMALL], *[(DPO, *row) for row in PAIRS]]
    rows += [*[(GRPO, *row) for row in COMPLETIONS], *[(AHEAD, *row) for row in PAIRS_AHEAD]]
    return tuple([in_small(family, by | own, **more) for by, family, own, more in rows])


def gpu_trl(gpus: Gpus | None) -> tuple[Case, ...]:
    """TRL's trainers on one GPU, or on one rank of a world with stand-ins for the others.

    Raises:
        InvalidValue: without a GPU, for which alone Triton compiles its kernels.
    """
    if gpus is None:
        raise InvalidValue("gpu-trl has models of true size; use --device nogpu, or the suite trl.")
    rows = [*[(SFT, *row) for row in LARGE], *[(DPO, *row) for row in LARGE_PAIRS]]
    rows += [(GRPO | {"max_completion_length": 1024}, *row) for row in LARGE_COMPLETIONS]
    rows += [(AHEAD, *row) for row in LARGE_AHEAD]
    return tuple([large(preset, n, by | options, rank, gpus) for by, preset, n, options, rank in rows])
