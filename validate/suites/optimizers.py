"""Optimizers of other packages, at true size on GPUs. The plans are flat lists."""

from dataclasses import replace
from itertools import product
from typing import Any, Final

from memplan.engines.options import plan_of
from memplan.errors import InvalidValue
from memplan.models import Decoder, implemented, preset
from memplan.optimizers import OF_BITSANDBYTES
from validate.cases import UNTIMED_STEPS, Case, title
from validate.gpus import Gpus

PLANS: Final[tuple[dict[str, Any], ...]] = (
    {"precision": "bf16"},
    {"precision": "bf16-mixed", "recompute": "full", "micro_batch": 2, "clip_grad_norm": 1.0},
    {"precision": "bf16", "dp": 8, "recompute": "full"},
)
"""All weights, of memplan's own Llama and of transformers' Qwen3."""

WHOLE: Final = (("llama-3.2-1b", "reference"), ("qwen3-0.6b", "huggingface"))

OF_ADAPTERS: Final[tuple[dict[str, Any], ...]] = (
    {"precision": "bf16-mixed", "quantize": "nf4-double", "optimizer": "paged-adamw-32bit"},
    {"precision": "bf16-mixed", "quantize": "nf4", "optimizer": "paged-adamw-8bit", "micro_batch": 2},
    {"precision": "bf16", "optimizer": "adamw-8bit", "clip_grad_norm": 1.0},
    {"precision": "bf16-mixed", "optimizer": "lion-8bit", "dp": 8},
)
"""Llama-3-8B with LoRA and QLoRA."""


def gpu_optimizers(gpus: Gpus | None) -> tuple[Case, ...]:
    """One rank of 1 to 8.

    Raises:
        InvalidValue: without a GPU, on which alone bitsandbytes' kernels run.
    """
    if gpus is None:
        raise InvalidValue(
            "gpu-optimizers runs bitsandbytes' kernels, which are for GPUs; use --device nogpu."
        )
    found = []
    for (name, code), optimizer, options in product(WHOLE, OF_BITSANDBYTES, PLANS):
        found.append(_case(name, code, {"seq_len": 2048, "optimizer": optimizer, **options}, gpus))
    for options in OF_ADAPTERS:
        asked = {"seq_len": 2048, "lora_rank": 16, "recompute": "full", **options}
        found.append(_case("llama-3-8b", "huggingface", asked, gpus))
    return tuple(found)


def _case(name: str, code: str, options: dict[str, Any], gpus: Gpus) -> Case:
    model, plan = implemented(preset(name), code), plan_of(**options)
    assert isinstance(model, Decoder)
    case = Case(
        name=f"{title(model, plan)}, {plan.global_batch} x {plan.seq_len}",
        model=model,
        plan=plan,
        device=gpus.device,
        gpu=gpus.known_as,
        steps=UNTIMED_STEPS,
        timeout_s=600.0,
    )
    if plan.world_size == 1:
        return case
    return replace(case, backend="nccl" if gpus.device == "nogpu" else "fake", rank=0)
