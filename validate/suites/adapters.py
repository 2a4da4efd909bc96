"""Adapters beside frozen weights: PEFT's LoRA on transformers' decoders, small and at true size.

The plans are flat lists.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Final

from memplan.engines.options import plan_of
from memplan.models import Decoder, implemented, preset
from validate.cases import OF_TRANSFORMERS, UNTIMED_STEPS, Case, title
from validate.gpus import Gpus
from validate.suites.families import QUIRKS, SIZES

PLANS: Final[tuple[dict[str, Any], ...]] = (
    {"micro_batch": 2, "precision": "fp32"},
    {"micro_batch": 3, "global_batch": 6, "precision": "bf16", "lora_targets": "q_proj,v_proj"},
    {"micro_batch": 2, "recompute": "full", "lora_dropout": 0.1},
    {"micro_batch": 2, "precision": "bf16-autocast", "use_dora": True},
    {"micro_batch": 2, "precision": "fp32", "modules_to_save": "embed_tokens,lm_head"},
    {"micro_batch": 4, "optimizer": "sgd-momentum", "clip_grad_norm": 1.0, "set_to_none": False},
    {"dp": 2, "micro_batch": 2, "global_batch": 8, "precision": "fp32"},
    {"dp": 2, "micro_batch": 2, "recompute": "full"},
    {"dp": 2, "zero": 1, "micro_batch": 2, "precision": "bf16"},
    {"dp": 2, "zero": 3, "micro_batch": 2, "precision": "fp32"},
    {"dp": 2, "zero": 3, "micro_batch": 2, "recompute": "full"},
    {"dp": 2, "zero": 2, "micro_batch": 2, "global_batch": 8, "precision": "bf16"},
    {"dp": 2, "dp_replicate": 2, "zero": 3, "micro_batch": 2, "global_batch": 16},
)
"""One rank, DDP, ZeRO-1, FSDP2 and HSDP of Llama."""

OF_OTHERS: Final[tuple[dict[str, Any], ...]] = (
    {"micro_batch": 2},
    {"micro_batch": 2, "precision": "bf16", "recompute": "full"},
    {"dp": 2, "zero": 3, "micro_batch": 2},
)
"""Every other family."""

RANK: Final = 8


def adapters() -> tuple[Case, ...]:
    """Small decoders of transformers on CPU ranks."""
    others = [name for name in QUIRKS if name != "llama"]
    return (*_cases("llama", PLANS), *(case for name in others for case in _cases(name, OF_OTHERS)))


def _cases(family: str, plans: Iterable[dict[str, Any]]) -> Iterator[Case]:
    cls: type[Decoder] = OF_TRANSFORMERS[f"huggingface-{family}"]
    model = cls(**{**SIZES, **QUIRKS[family], "name": f"transformers-{family}"})
    for options in plans:
        yield _case(model, {"lora_rank": RANK, "seq_len": 64, **options})


def _case(model: Decoder, options: dict[str, Any]) -> Case:
    plan = plan_of(**options)
    name = f"{title(model, plan)}, {plan.global_batch} x {plan.seq_len}"
    return Case(name=name, model=model, plan=plan, timeout_s=240.0)


AT_TRUE_SIZE: Final[tuple[dict[str, Any], ...]] = (
    {"precision": "bf16"},
    {"precision": "bf16-mixed"},
    {"precision": "bf16-mixed", "recompute": "full", "micro_batch": 2},
    {"precision": "bf16", "lora_targets": "q_proj,v_proj", "lora_dropout": 0.1, "recompute": "full"},
    {"precision": "bf16-mixed", "use_dora": True, "recompute": "full"},
    {"precision": "bf16", "quantize": "nf4"},
    {"precision": "bf16-mixed", "quantize": "nf4", "recompute": "full"},
    {"precision": "bf16-mixed", "quantize": "nf4-double", "recompute": "full"},
    {"precision": "bf16-mixed", "quantize": "nf4-double", "seq_len": 2048},
    {"precision": "bf16", "quantize": "nf4-double", "micro_batch": 2, "recompute": "full"},
    {"precision": "bf16", "dp": 8},
    {"precision": "bf16-mixed", "dp": 4, "recompute": "full", "global_batch": 8},
    {"precision": "bf16-mixed", "dp": 2, "zero": 1},
    {"precision": "bf16-mixed", "dp": 2, "quantize": "nf4", "recompute": "full"},
    {"precision": "bf16", "dp": 8, "quantize": "nf4-double", "recompute": "full", "clip_grad_norm": 1.0},
    {"precision": "bf16-mixed", "dp": 8, "zero": 3},
    {"precision": "bf16-mixed", "dp": 8, "zero": 3, "recompute": "full", "global_batch": 16},
    {"precision": "bf16", "dp": 8, "zero": 3, "recompute": "full", "clip_grad_norm": 1.0},
    {"precision": "bf16-mixed", "dp": 4, "zero": 2, "recompute": "full"},
    {"precision": "bf16-mixed", "dp": 4, "dp_replicate": 2, "zero": 3, "fsdp_units": "block+ends"},
    {"precision": "bf16-mixed", "quantize": "int8", "recompute": "full"},
    {"precision": "bf16", "quantize": "int8", "micro_batch": 2, "seq_len": 2048},
    {"precision": "bf16-mixed", "dp": 2, "quantize": "int8"},
    {"precision": "bf16", "dp": 8, "quantize": "int8", "micro_batch": 2, "recompute": "full"},
)
"""One GPU, and one rank of 2 to 8."""

PUBLISHED: Final = ("llama-3-8b", "qwen3-8b")


def gpu_adapters(gpus: Gpus | None) -> tuple[Case, ...]:
    """Llama-3-8B and Qwen3-8B with LoRA and QLoRA; without a GPU the small ones."""
    if gpus is None:
        return adapters()
    found = []
    for name in PUBLISHED:
        model = implemented(preset(name), "huggingface")
        assert isinstance(model, Decoder)
        for options in AT_TRUE_SIZE:
            case = _case(model, {"lora_rank": 16, "seq_len": 4096, **options})
            case = replace(case, device=gpus.device, gpu=gpus.known_as, steps=UNTIMED_STEPS, timeout_s=600.0)
            if case.plan.world_size > 1:
                case = replace(case, backend="nccl" if gpus.device == "nogpu" else "fake", rank=0)
            found.append(case)
    return tuple(found)
