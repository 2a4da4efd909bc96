"""Products in float8: models of published sizes, eager and compiled, alone and under FSDP2 and HSDP."""

from typing import Any, Final

from memplan.errors import InvalidValue
from validate.cases import Case
from validate.gpus import Gpus
from validate.suites.compiled import cases_of

TENSORWISE: Final = {"float8": "tensorwise"}
ROWWISE: Final = {"float8": "rowwise"}
WITH_GW_HP: Final = {"float8": "rowwise_with_gw_hp"}
COMPILED: Final = {"compile": "block"}

SHARDED: Final[tuple[dict[str, Any], ...]] = (
    {"dp": 8, "zero": 3, "seq_len": 4096, **TENSORWISE},
    {"dp": 4, "dp_replicate": 2, "zero": 3, "seq_len": 2048, "micro_batch": 2, **TENSORWISE},
    {"dp": 8, "zero": 3, "recompute": "selective", "clip_grad_norm": 1.0, **COMPILED, **TENSORWISE},
    {"dp": 8, "zero": 3, "seq_len": 4096, **COMPILED, **ROWWISE},
    {"dp": 64, "zero": 3, "recompute": "selective", "micro_batch": 2, **COMPILED, **TENSORWISE},
    {"dp": 8, "zero": 3, "recompute": "full", **COMPILED, **WITH_GW_HP},
)
"""One rank of 8 or 64 under FSDP2."""

DYNAMIC: Final = {**TENSORWISE, "float8_all_gather": "dynamic"}
PRECOMPUTED: Final = {**TENSORWISE, "float8_all_gather": "precomputed"}

GATHERED: Final[tuple[dict[str, Any], ...]] = (
    {"dp": 8, "zero": 3, "seq_len": 4096, **DYNAMIC},
    {"dp": 8, "zero": 3, "seq_len": 4096, **PRECOMPUTED},
    {"dp": 8, "zero": 3, "recompute": "full", **DYNAMIC},
    {"dp": 64, "zero": 3, "recompute": "full", "clip_grad_norm": 1.0, **PRECOMPUTED},
    {"dp": 8, "zero": 3, "recompute": "selective", "clip_grad_norm": 1.0, **COMPILED, **PRECOMPUTED},
    {"dp": 64, "zero": 3, "seq_len": 4096, **COMPILED, **DYNAMIC},
    {"dp": 8, "zero": 3, "recompute": "full", "micro_batch": 2, **COMPILED, **PRECOMPUTED},
    {"dp": 8, "zero": 2, "precision": "bf16", "seq_len": 2048, "global_batch": 16, **DYNAMIC},
    {"dp": 4, "dp_replicate": 2, "zero": 3, "fsdp_units": "block+ends", "seq_len": 2048, **PRECOMPUTED},
)
"""One rank of 8 or 64, whose linears' weights are gathered in float8."""

SEQUENCES: Final = {"sequence_parallel": True}

DIVIDED: Final[tuple[dict[str, Any], ...]] = (
    {"dp": 4, "tp": 2, "zero": 3, **SEQUENCES, **COMPILED, **TENSORWISE},
    {"dp": 8, "tp": 8, "zero": 3, "recompute": "selective", "micro_batch": 4, "clip_grad_norm": 1.0}
    | {**SEQUENCES, **COMPILED, **PRECOMPUTED},
    {"dp": 4, "tp": 4, "zero": 3, "recompute": "full", "micro_batch": 2, **COMPILED, **DYNAMIC},
    {"tp": 4, "precision": "bf16", "seq_len": 4096, **SEQUENCES, **COMPILED, **ROWWISE},
    {"tp": 4, "precision": "bf16", "seq_len": 4096, **SEQUENCES, **TENSORWISE},
    {"dp": 4, "tp": 4, "zero": 2, "seq_len": 4096, "global_batch": 8, **TENSORWISE},
    {"dp": 2, "tp": 2, "dp_replicate": 2, "zero": 3, "fsdp_units": "block+ends", "seq_len": 4096}
    | {**SEQUENCES, **PRECOMPUTED},
    {"dp": 8, "tp": 8, "zero": 3, "recompute": "full", **SEQUENCES, **DYNAMIC},
)
"""One rank of 4 to 64 whose blocks are divided over tensor-parallel ranks too."""

ALONE: Final[tuple[dict[str, Any], ...]] = (
    {"precision": "bf16", "seq_len": 4096, **TENSORWISE},
    {"seq_len": 2048, "recompute": "full", **TENSORWISE},
    {"precision": "bf16", "seq_len": 4096, **COMPILED, **TENSORWISE},
    {"precision": "bf16", "seq_len": 2048, "recompute": "selective", **COMPILED, **ROWWISE},
)
"""One GPU; the second one under autocast."""

MODELS: Final = (
    ("llama-3-8b", "torchtitan", SHARDED),
    ("llama-3.2-3b", "torchtitan", ALONE),
    ("llama-3-8b", "huggingface", [SHARDED[0], SHARDED[2]]),
    ("qwen3-4b", "huggingface", [ALONE[0], ALONE[3]]),
    ("llama-3-8b", "torchtitan", GATHERED),
    ("llama-3-8b", "torchtitan", DIVIDED),
    ("qwen3-8b", "huggingface", [GATHERED[1], GATHERED[2], GATHERED[4]]),
)
"""Models, whose code, and plans."""


def gpu_float8(gpus: Gpus | None) -> tuple[Case, ...]:
    """One rank of each plan, as a GPU or a GPU that is not there runs it.

    Raises:
        InvalidValue: without a GPU, as products in float8 are a GPU's here.
    """
    if gpus is None:
        raise InvalidValue("gpu-float8 multiplies in float8 as GPUs do; use --device nogpu.")
    return cases_of(MODELS, gpus)
