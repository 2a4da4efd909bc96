"""Inputs of recomputed blocks on the host: small models on CPU ranks, known ones at true size on GPUs."""

from itertools import cycle
from typing import Any, Final

from memplan.engines.options import plan_of
from memplan.errors import InvalidValue
from validate.cases import Case, title
from validate.gpus import Gpus
from validate.suites.compiled import cases_of
from validate.suites.models import GPT, GPT_DROPOUT, GPT_TIED, LLAMA, LLAMA_ODD

ON_HOST: Final[dict[str, Any]] = {"activation_offloading": "save_on_cpu", "recompute": "full"}

ON_CPU: Final[tuple[dict[str, Any], ...]] = (
    {"precision": "fp32"},
    {"precision": "bf16", "micro_batch": 2},
    {"micro_batch": 2, "clip_grad_norm": 1.0},
    {"precision": "fp32", "recompute": "selective"},
    {"precision": "fp32", "recompute_blocks": 2, "global_batch": 3},
    {"dp": 2, "precision": "fp32"},
    {"dp": 2, "zero": 1, "precision": "bf16"},
    {"dp": 2, "zero": 3, "precision": "fp32"},
    {"dp": 2, "zero": 3, "micro_batch": 2},
    {"dp": 2, "zero": 2, "precision": "bf16", "global_batch": 4},
    {"dp": 3, "zero": 3, "fsdp_units": "block+ends", "recompute": "selective"},
    {"dp": 2, "dp_replicate": 2, "zero": 3, "precision": "bf16", "micro_batch": 2},
    {"dp": 2, "zero": 3, "fsdp_version": 1, "precision": "fp32"},
    {"dp": 2, "zero": 2, "fsdp_version": 1, "use_orig_params": True, "recompute_blocks": 1},
)
"""Plans of small models, which take turns."""

ALONE: Final[tuple[dict[str, Any], ...]] = (
    {"precision": "bf16", "optimizer": "sgd", "seq_len": 4096},
    {"precision": "bf16", "optimizer": "sgd", "seq_len": 8192, "micro_batch": 2, "global_batch": 4},
    {"precision": "bf16", "optimizer": "sgd", "seq_len": 3000, "recompute": "selective"},
    {"optimizer": "sgd", "seq_len": 2048, "recompute_blocks": 12},
)
"""One GPU, whose activations are most of the peak."""

SHARDED: Final[tuple[dict[str, Any], ...]] = (
    {"dp": 8, "zero": 3, "seq_len": 8192},
    {"dp": 8, "zero": 3, "precision": "bf16", "seq_len": 16384, "clip_grad_norm": 1.0},
    {"dp": 4, "dp_replicate": 2, "zero": 3, "seq_len": 4096, "micro_batch": 3},
    {"dp": 8, "zero": 3, "fsdp_version": 1, "use_orig_params": True, "seq_len": 8192},
    {"dp": 64, "zero": 3, "seq_len": 8192, "offload": True},
)
"""One rank of 8 or 64."""

BY_TRL: Final[dict[str, Any]] = {"activation_offloading": "OffloadActivations", "recompute": "full"}

OF_TRL: Final = (
    ("llama-3.2-3b", "huggingface", ALONE[:2]),
    ("qwen3-4b", "huggingface", [ALONE[0], {"optimizer": "sgd", "seq_len": 2048}]),
    ("llama-3.2-1b", "huggingface", [{"dp": 8, "precision": "bf16", "seq_len": 2048, "micro_batch": 2}]),
    ("llama-3-8b", "huggingface", SHARDED[:3]),
    ("qwen3-8b", "huggingface", SHARDED[:1]),
)
"""Models, whose code, and plans, under TRL's OffloadActivations."""

MODELS: Final = (
    ("llama-3-8b", "huggingface", SHARDED[:4]),
    ("qwen3-8b", "huggingface", SHARDED[:3]),
    ("llama-3-8b", "torchtitan", SHARDED),
    ("llama-3.2-3b", "huggingface", ALONE),
    ("qwen3-4b", "huggingface", ALONE),
    ("llama-3.2-3b", "reference", ALONE),
    ("gpt2-xl", "huggingface", [{"optimizer": "sgd", "seq_len": 1024, "micro_batch": 8}]),
)
"""Models, whose code, and plans."""


def offloading() -> tuple[Case, ...]:
    """Small models on CPU ranks, where a copy for the host is one more tensor."""
    found = []
    for options, model in zip(ON_CPU, cycle((LLAMA, GPT, LLAMA_ODD, GPT_TIED, GPT_DROPOUT)), strict=False):
        plan = plan_of(**{"seq_len": 64, **ON_HOST, **options})
        name = f"{title(model, plan)}, {plan.global_batch} x {plan.seq_len}"
        found.append(Case(name=name, model=model, plan=plan))
    return tuple(found)


def gpu_offloading(gpus: Gpus | None) -> tuple[Case, ...]:
    """One rank of 1 to 64.

    Raises:
        InvalidValue: without a GPU, beside which alone there is a host.
    """
    if gpus is None:
        raise InvalidValue("gpu-offloading copies from a GPU to its host; use --device nogpu.")
    return (*cases_of(MODELS, gpus, **ON_HOST), *cases_of(OF_TRL, gpus, **BY_TRL))
