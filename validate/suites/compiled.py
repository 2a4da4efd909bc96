"""Blocks under `torch.compile`: models of published sizes, alone and under FSDP2."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final

from memplan.engines.options import plan_of
from memplan.errors import InvalidValue
from memplan.models import Decoder, implemented, preset
from validate.cases import UNTIMED_STEPS, Case, title
from validate.gpus import Gpus

SHARDED: Final[tuple[dict[str, Any], ...]] = (
    {"dp": 8, "zero": 3},
    {"dp": 8, "zero": 3, "recompute": "full", "micro_batch": 2},
    {"dp": 8, "zero": 3, "recompute": "selective", "clip_grad_norm": 1.0},
    {"dp": 4, "zero": 2, "recompute": "selective", "seq_len": 4096, "global_batch": 8},
    {"dp": 64, "zero": 3, "fsdp_units": "block+ends", "seq_len": 4096},
    {"dp": 8, "zero": 3, "recompute": "full", "recompute_blocks": 16, "precision": "bf16"},
    {"dp": 4, "dp_replicate": 2, "zero": 3, "recompute": "selective", "seq_len": 2048, "micro_batch": 2},
)
"""One rank of 4 to 64 under FSDP2."""

ALONE: Final[tuple[dict[str, Any], ...]] = (
    {"precision": "bf16", "seq_len": 4096},
    {"precision": "bf16", "seq_len": 2048, "micro_batch": 2, "recompute": "full"},
    {"precision": "bf16", "seq_len": 4096, "recompute": "selective", "optimizer": "sgd", "global_batch": 2},
    {"precision": "bf16", "seq_len": 2048, "micro_batch": 3, "clip_grad_norm": 1.0},
)
"""One GPU."""

SEQUENCES: Final = {"zero": 3, "sequence_parallel": True}

DIVIDED: Final[tuple[dict[str, Any], ...]] = (
    {"dp": 4, "tp": 2, **SEQUENCES},
    {"dp": 8, "tp": 8, "recompute": "selective", "micro_batch": 4, "clip_grad_norm": 1.0, **SEQUENCES},
    {"dp": 4, "tp": 4, "zero": 3, "recompute": "full", "micro_batch": 2},
    {"dp": 2, "tp": 2, "dp_replicate": 2, "fsdp_units": "block+ends", "seq_len": 4096, **SEQUENCES},
    {"dp": 4, "tp": 4, "zero": 2, "recompute": "selective", "seq_len": 4096, "global_batch": 8},
    {"tp": 4, "precision": "bf16", "seq_len": 4096, "sequence_parallel": True},
)
"""One rank of 4 to 64 whose blocks are divided over tensor-parallel ranks too."""

MODELS: Final = (
    ("llama-3-8b", "torchtitan", SHARDED),
    ("llama-3-8b", "torchtitan", DIVIDED),
    ("llama-3-8b", "huggingface", [options for options in SHARDED if "recompute_blocks" not in options]),
    ("qwen3-8b", "huggingface", SHARDED[:5]),
    ("llama-3.2-3b", "torchtitan", ALONE),
    ("llama-3.2-3b", "huggingface", ALONE),
)
"""Models, whose code, and plans; some recomputed blocks beside others have no rule in transformers' code."""


def gpu_compiled(gpus: Gpus | None) -> tuple[Case, ...]:
    """One rank of each plan, as a GPU or a GPU that is not there runs it.

    Raises:
        InvalidValue: without a GPU, for which alone blocks are compiled here.
    """
    if gpus is None:
        raise InvalidValue("gpu-compiled runs Inductor's kernels for GPUs; use --device nogpu.")
    return cases_of(MODELS, gpus, compile="block")


def cases_of(
    models: Iterable[tuple[str, str, Iterable[dict[str, Any]]]], gpus: Gpus, **usual: Any
) -> tuple[Case, ...]:
    """One rank of each plan, of sequences of 8,192 tokens unless it says others, with these `usual` options.

    `models`: names, whose code, and plans.
    """
    found: list[Case] = []
    for name, code, plans in models:
        model = implemented(preset(name), code)
        assert isinstance(model, Decoder)
        for options in plans:
            plan = plan_of(**{"seq_len": 8192, **usual, **options})
            of = f"{title(model, plan)}, {code}, {plan.global_batch} x {plan.seq_len}"
            case = Case(name=of, model=model, plan=plan, timeout_s=600.0)
            case = replace(case, device=gpus.device, gpu=gpus.known_as, steps=UNTIMED_STEPS)
            if plan.world_size > 1:
                case = replace(case, backend="nccl" if gpus.device == "nogpu" else "fake", rank=0)
            found.append(case)
    return tuple(found)
