"""Optimizers other than SGD and Adam on CPU ranks, and at true size on GPUs.

The plans are flat lists.
"""

from dataclasses import replace
from itertools import product
from typing import Any, Final

from memplan.engines.options import plan_of
from memplan.errors import InvalidValue
from memplan.models import Decoder, implemented, preset
from memplan.optimizers import OF_BITSANDBYTES
from validate.cases import UNTIMED_STEPS, Case, title
from validate.gpus import Gpus
from validate.suites.models import GPT, GPT_TIED, LLAMA, LLAMA_ODD

OF_MUON: Final[tuple[tuple[Decoder, dict[str, Any]], ...]] = (
    (LLAMA, {"precision": "fp32"}),
    (LLAMA, {"precision": "bf16", "micro_batch": 2}),
    (LLAMA, {"recompute": "full", "clip_grad_norm": 1.0}),
    (GPT_TIED, {"precision": "fp32", "set_to_none": False}),
    (GPT, {"precision": "bf16"}),
    (LLAMA_ODD, {"precision": "fp32", "micro_batch": 3}),
    (LLAMA, {"dp": 2, "precision": "fp32"}),
    (GPT, {"dp": 2, "clip_grad_norm": 1.0}),
    (LLAMA, {"dp": 2, "zero": 1, "precision": "fp32"}),
    (GPT, {"dp": 4, "zero": 1, "precision": "bf16"}),
    (LLAMA_ODD, {"dp": 3, "zero": 1}),
    (LLAMA, {"pp": 2, "precision": "fp32"}),
    (GPT, {"pp": 2, "dp": 2, "zero": 1}),
    (LLAMA, {"dp": 2, "zero": 3, "precision": "fp32"}),
    (LLAMA, {"dp": 4, "zero": 2, "precision": "bf16", "clip_grad_norm": 1.0}),
    (GPT, {"dp": 2, "zero": 3, "precision": "bf16-mixed", "recompute": "full"}),
    (GPT_TIED, {"dp": 4, "zero": 3, "set_to_none": False, "precision": "fp32"}),
    (LLAMA, {"pp": 2, "dp": 2, "zero": 3, "precision": "bf16"}),
    (LLAMA, {"dp_replicate": 2, "dp": 2, "zero": 3, "precision": "fp32"}),
    (GPT, {"dp_replicate": 2, "dp": 2, "zero": 2, "precision": "bf16", "clip_grad_norm": 1.0}),
    (GPT_TIED, {"dp_replicate": 2, "dp": 2, "zero": 3, "precision": "bf16-mixed", "recompute": "full"}),
    (LLAMA, {"tp": 2, "precision": "fp32"}),
    (GPT, {"tp": 2, "precision": "bf16", "sequence_parallel": True}),
    (LLAMA, {"tp": 2, "sequence_parallel": True, "recompute": "full", "clip_grad_norm": 1.0}),
    (LLAMA, {"pp": 2, "tp": 2, "precision": "fp32"}),
)
"""Muon of memplan's own modules: one rank, DDP, ZeRO-1, FSDP2 and HSDP, tensor ranks, and in pipelines."""

LOOP: Final[dict[str, Any]] = {"optimizer_impl": "for-loop"}
FOREACH: Final[dict[str, Any]] = {"optimizer_impl": "foreach"}

OTHERS: Final[tuple[tuple[Decoder, dict[str, Any]], ...]] = (
    (LLAMA, {"optimizer": "adafactor", "precision": "fp32"}),
    (LLAMA, {"optimizer": "adafactor", "precision": "bf16", "clip_grad_norm": 1.0}),
    (GPT, {"optimizer": "adafactor", "precision": "fp32", **FOREACH}),
    (LLAMA, {"optimizer": "adafactor", "precision": "bf16", **FOREACH}),
    (GPT_TIED, {"optimizer": "adafactor", "precision": "fp16-mixed", "set_to_none": False}),
    (LLAMA, {"optimizer": "adafactor", "precision": "fp32", "dp": 2, "zero": 1}),
    (LLAMA_ODD, {"optimizer": "adafactor", "dp": 3, **FOREACH}),
    (LLAMA, {"optimizer": "adafactor-transformers", "precision": "fp32"}),
    (LLAMA, {"optimizer": "adafactor-transformers", "precision": "bf16", "recompute": "full"}),
    (LLAMA, {"optimizer": "adafactor-transformers", "precision": "bf16", "dp": 2, "zero": 1}),
    (LLAMA_ODD, {"optimizer": "adafactor-transformers", "precision": "bf16", "dp": 3}),
    (GPT, {"optimizer": "adafactor-transformers", "pp": 2}),
    (GPT, {"optimizer": "rmsprop", "precision": "fp32"}),
    (GPT, {"optimizer": "rmsprop", "dp": 2, "zero": 3, **FOREACH}),
    (LLAMA, {"optimizer": "rmsprop", "precision": "bf16", "pp": 2}),
    (LLAMA_ODD, {"optimizer": "adagrad", "precision": "fp32", "dp": 3, "zero": 1, "clip_grad_norm": 1.0}),
    (GPT, {"optimizer": "adagrad", "precision": "fp32", **FOREACH}),
    (LLAMA, {"optimizer": "adagrad", "dp": 4, "dp_replicate": 2, "zero": 3}),
    (GPT, {"optimizer": "nadam", "precision": "fp16-mixed"}),
    (LLAMA, {"optimizer": "nadam", "precision": "bf16", "dp": 2, "zero": 2, **FOREACH}),
    (LLAMA_ODD, {"optimizer": "radam", "dp": 3, "zero": 3}),
    (GPT, {"optimizer": "radam", "precision": "fp32", **FOREACH}),
    (GPT, {"optimizer": "adamax", "precision": "bf16", "dp": 4, "dp_replicate": 2, "zero": 2}),
    (LLAMA, {"optimizer": "adamax", "precision": "fp32", **FOREACH}),
)
"""Adafactor of PyTorch and of transformers, and PyTorch's other optimizers."""

IN_BACKWARD: Final[tuple[tuple[Decoder, dict[str, Any]], ...]] = (
    (LLAMA, {"precision": "fp32"}),
    (GPT, {"precision": "bf16", "optimizer_impl": "foreach"}),
    (LLAMA_ODD, {"micro_batch": 2, "recompute": "full", "optimizer_impl": "fused"}),
    (GPT_TIED, {"optimizer": "sgd-momentum", "recompute": "selective"}),
    (LLAMA, {"precision": "bf16", "optimizer": "sgd", "loss_chunks": 3}),
    (LLAMA, {"precision": "bf16", "optimizer": "adafactor"}),
    (LLAMA, {"precision": "bf16", "optimizer": "adafactor-transformers"}),
    (GPT, {"precision": "bf16", "optimizer": "nadam"}),
    (LLAMA, {"dp": 2, "zero": 3, "precision": "fp32"}),
    (GPT, {"dp": 2, "zero": 2, "optimizer_impl": "foreach"}),
    (LLAMA_ODD, {"dp": 3, "zero": 3, "precision": "bf16", "recompute": "full", "optimizer_impl": "fused"}),
    (GPT_TIED, {"dp": 4, "zero": 3, "optimizer": "sgd-momentum"}),
    (LLAMA, {"dp": 2, "zero": 3, "precision": "bf16", "fsdp_blocks": 2, "optimizer": "nadam"}),
)
"""Optimizers that step within the backward pass, on one rank and under FSDP2."""

LARGE_IN_BACKWARD: Final[tuple[tuple[str, str, dict[str, Any]], ...]] = (
    ("llama-3.2-3b", "huggingface", {"precision": "bf16", "recompute": "full", "micro_batch": 2}),
    ("llama-3.2-3b", "torchtitan", {"precision": "bf16", "recompute": "full", "optimizer_impl": "fused"}),
    ("qwen3-4b", "huggingface", {"precision": "bf16-mixed", "optimizer": "sgd-momentum"}),
    ("llama-3-8b", "huggingface", {"precision": "bf16", "recompute": "full"}),
    ("llama-3.2-1b", "huggingface", {"precision": "bf16-mixed", "seq_len": 1024}),
    ("llama-3-8b", "torchtitan", {"dp": 8, "zero": 3}),
    ("qwen3-8b", "huggingface", {"dp": 8, "zero": 2, "precision": "bf16", "optimizer_impl": "fused"}),
    ("llama-3-8b", "huggingface", {"precision": "bf16", "optimizer": "adamw-8bit", "recompute": "full"}),
    ("qwen3-8b", "huggingface", {"precision": "bf16", "optimizer": "paged-adamw-8bit"}),
    ("llama-3.2-1b", "reference", {"precision": "bf16-mixed", "optimizer": "lion-32bit"}),
    ("gpt2-xl", "reference", {"precision": "fp32", "seq_len": 1024, "recompute": "selective"}),
)
"""The same at true size."""

PLANS: Final[tuple[dict[str, Any], ...]] = (
    {"precision": "bf16"},
    {"precision": "bf16-mixed", "recompute": "full", "micro_batch": 2, "clip_grad_norm": 1.0},
    {"precision": "bf16", "dp": 8, "recompute": "full"},
)
"""All weights, of memplan's own Llama and of transformers' Qwen3."""

OF_ZERO_1: Final[dict[str, Any]] = {"precision": "bf16-mixed", "dp": 8, "zero": 1, "recompute": "full"}

WHOLE: Final = (("llama-3.2-1b", "reference"), ("qwen3-0.6b", "huggingface"))

OTHERS_AT_TRUE_SIZE: Final[tuple[tuple[str, str, dict[str, Any]], ...]] = (
    ("llama-3-8b", "huggingface", {"optimizer": "adafactor", "precision": "bf16", "recompute": "full"}),
    ("llama-3-8b", "torchtitan", {"optimizer": "adafactor", "precision": "bf16", **FOREACH}),
    ("llama-3.2-1b", "reference", {"optimizer": "adafactor", "precision": "fp32", "recompute": "full"}),
    ("qwen3-0.6b", "huggingface", {"optimizer": "adafactor", "clip_grad_norm": 1.0, **FOREACH}),
    ("qwen3-0.6b", "huggingface", {"optimizer": "adafactor", "dp": 8, "zero": 1}),
    ("llama-3-8b", "huggingface", {"optimizer": "adafactor-transformers", "precision": "bf16"}),
    ("llama-3.2-1b", "huggingface", {"optimizer": "adafactor-transformers", "dp": 8}),
    ("llama-3.2-1b", "reference", {"optimizer": "adafactor-transformers", "dp": 8, "zero": 1}),
    ("qwen3-0.6b", "huggingface", {"optimizer": "adafactor-transformers", "micro_batch": 2}),
    ("llama-3-8b", "huggingface", {"optimizer": "rmsprop", "precision": "bf16", "recompute": "full"}),
    ("llama-3-8b", "torchtitan", {"optimizer": "rmsprop", "dp": 8, "zero": 3, **LOOP}),
    ("llama-3.2-1b", "reference", {"optimizer": "adagrad", "precision": "bf16"}),
    ("llama-3-8b", "torchtitan", {"optimizer": "adagrad", "dp": 8, "zero": 3}),
    ("llama-3.2-1b", "huggingface", {"optimizer": "nadam", "dp": 8, "zero": 1}),
    ("llama-3-8b", "huggingface", {"optimizer": "nadam", "dp": 8, "zero": 2, "recompute": "full"}),
    ("llama-3.2-1b", "reference", {"optimizer": "radam", "recompute": "full"}),
    ("llama-3-8b", "torchtitan", {"optimizer": "radam", "dp": 16, "dp_replicate": 2, "zero": 3}),
    ("llama-3.2-1b", "huggingface", {"optimizer": "adamax", "precision": "bf16", **LOOP}),
    ("llama-3-8b", "torchtitan", {"optimizer": "adamax", "dp": 8, "zero": 3, "clip_grad_norm": 1.0}),
)
"""Adafactor of PyTorch and of transformers, and PyTorch's other optimizers."""

OF_TORCHAO_AT_TRUE_SIZE: Final[tuple[tuple[str, str, dict[str, Any]], ...]] = (
    ("llama-3.2-1b", "reference", {"optimizer": "adamw-8bit-torchao", "precision": "bf16"}),
    ("llama-3.2-1b", "huggingface", {"optimizer": "adamw-4bit-torchao", "precision": "bf16"}),
    ("llama-3.2-1b", "huggingface", {"optimizer": "adamw-fp8-torchao", "precision": "bf16"}),
    ("llama-3.2-1b", "reference", {"optimizer": "adamw-torchao", "precision": "bf16"}),
    ("llama-3-8b", "huggingface", {"optimizer": "adamw-8bit-torchao", "precision": "bf16"}),
    ("llama-3-8b", "huggingface", {"optimizer": "adamw-4bit-torchao", "precision": "bf16"}),
    ("qwen3-0.6b", "huggingface", {"optimizer": "adamw-8bit-torchao", "dp": 8, "clip_grad_norm": 1.0}),
    ("llama-3-8b", "torchtitan", {"optimizer": "adamw-8bit-torchao", "dp": 8, "zero": 3}),
    ("llama-3-8b", "torchtitan", {"optimizer": "adamw-4bit-torchao", "dp": 16, "dp_replicate": 2, "zero": 3}),
)
"""torchao's AdamW, of few bits or with weights rounded at random."""

AWAY: Final[dict[str, Any]] = {"offload_gradients": True}

ON_THE_HOST: Final[tuple[tuple[str, str, dict[str, Any]], ...]] = (
    ("llama-3.2-1b", "reference", {"precision": "bf16"}),
    ("llama-3.2-1b", "huggingface", {"precision": "bf16", "recompute": "full", **AWAY}),
    ("qwen3-0.6b", "huggingface", {"precision": "bf16", "recompute": "full", "micro_batch": 2}),
    ("qwen3-0.6b", "huggingface", {"precision": "bf16", "micro_batch": 2, **AWAY}),
    ("qwen3-0.6b", "huggingface", {"precision": "bf16", "global_batch": 4}),
    ("gpt2-medium", "reference", {"precision": "bf16-mixed", "seq_len": 1024}),
    ("gpt2-medium", "reference", {"precision": "bf16-mixed", "seq_len": 1024, "micro_batch": 4, **AWAY}),
    ("gpt2-large", "huggingface", {"precision": "bf16-mixed", "seq_len": 1024, **AWAY}),
    ("gpt2-medium", "reference", {"seq_len": 1024, "recompute": "full", **AWAY}),
    ("llama-3-8b", "torchtitan", {"dp": 64, "zero": 3}),
    ("llama-3-8b", "torchtitan", {"dp": 64, "zero": 3, "precision": "bf16", "recompute": "full"}),
    ("qwen3-8b", "huggingface", {"dp": 64, "zero": 2, "precision": "bf16"}),
    ("llama-3.2-1b", "huggingface", {"dp": 8, "zero": 3, "precision": "bf16-mixed", "recompute": "full"}),
    ("llama-3.2-1b", "huggingface", {"dp": 8, "zero": 3, "global_batch": 16}),
    ("llama-3-8b", "torchtitan", {"dp": 64, "dp_replicate": 2, "zero": 3}),
)
"""torchao's AdamW on the host, of all weights but small ones."""

MUON: Final[dict[str, Any]] = {"optimizer": "muon", "zero": 3}
SEQUENCES: Final[dict[str, Any]] = {"sequence_parallel": True, "zero": 0}

SHARDED_AT_TRUE_SIZE: Final[tuple[tuple[str, str, dict[str, Any]], ...]] = (
    ("llama-3-8b", "torchtitan", {"optimizer": "muon", "dp": 8, "zero": 3}),
    ("llama-3-8b", "huggingface", {"optimizer": "muon", "dp": 64, "zero": 3, "recompute": "full"}),
    ("qwen3-8b", "huggingface", {"optimizer": "muon", "dp": 8, "zero": 2, "clip_grad_norm": 1.0}),
    ("qwen3-8b", "huggingface", {"optimizer": "muon", "dp": 16, "zero": 3, "precision": "bf16"}),
    ("llama-3-8b", "torchtitan", {"dp": 32, "dp_replicate": 4, "recompute": "full", **MUON}),
    ("llama-3-8b", "reference", {"dp": 64, "dp_replicate": 2, "clip_grad_norm": 1.0, **MUON}),
    ("qwen3-8b", "huggingface", {"dp": 64, "dp_replicate": 2, "precision": "bf16", **MUON}),
    ("qwen3-8b", "huggingface", {"dp": 32, "dp_replicate": 2, "recompute": "full", **MUON, "zero": 2}),
    ("llama-3-8b", "torchtitan", {"tp": 2, "precision": "bf16", "recompute": "full", **MUON, "zero": 0}),
    ("llama-3-8b", "torchtitan", {"tp": 8, "precision": "bf16", "recompute": "full", **MUON, **SEQUENCES}),
    ("llama-3-8b", "torchtitan", {"tp": 8, "precision": "bf16", **MUON, **SEQUENCES}),
    ("llama-3-8b", "reference", {"tp": 4, "recompute": "full", **MUON, **SEQUENCES}),
    ("llama-3-8b", "torchtitan", {"optimizer": "adamw-fp8-torchao", "dp": 8, "zero": 3}),
    ("llama-3-8b", "huggingface", {"optimizer": "adamw-torchao", "dp": 8, "zero": 3, "precision": "bf16"}),
)
"""Optimizers of what FSDP2 or tensor ranks shard that send or hold more than SGD and Adam do."""

OF_ADAPTERS: Final[tuple[dict[str, Any], ...]] = (
    {"precision": "bf16-mixed", "quantize": "nf4-double", "optimizer": "paged-adamw-32bit"},
    {"precision": "bf16-mixed", "quantize": "nf4", "optimizer": "paged-adamw-8bit", "micro_batch": 2},
    {"precision": "bf16", "optimizer": "adamw-8bit", "clip_grad_norm": 1.0},
    {"precision": "bf16-mixed", "optimizer": "lion-8bit", "dp": 8},
)
"""Llama-3-8B with LoRA and QLoRA."""


def optimizers() -> tuple[Case, ...]:
    """Small models on CPU ranks."""
    muon = [(model, {"optimizer": "muon", **options}) for model, options in OF_MUON]
    found = []
    for model, options in (
        *muon,
        *OTHERS,
        *[(one, {"optimizer_in_backward": True, **own}) for one, own in IN_BACKWARD],
    ):
        plan = plan_of(**{"seq_len": 64, **options})
        name = f"{title(model, plan)}, {plan.global_batch} x {plan.seq_len}"
        found.append(Case(name=name, model=model, plan=plan))
    return tuple(found)


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
    whole = [*product(WHOLE, OF_BITSANDBYTES, PLANS), *product(WHOLE, ("muon",), (*PLANS, OF_ZERO_1))]
    for (name, code), optimizer, options in whole:
        found.append(_case(name, code, {"seq_len": 2048, "optimizer": optimizer, **options}, gpus))
    for name, code, options in (*OTHERS_AT_TRUE_SIZE, *OF_TORCHAO_AT_TRUE_SIZE, *SHARDED_AT_TRUE_SIZE):
        found.append(_case(name, code, {"seq_len": 2048, **options}, gpus))
    for name, code, options in ON_THE_HOST:
        asked = {"seq_len": 2048, "optimizer": "adamw-offload-torchao", **options}
        found.append(_case(name, code, asked, gpus))
    for name, code, options in LARGE_IN_BACKWARD:
        asked = {"seq_len": 2048, "optimizer_in_backward": True, **options}
        found.append(_case(name, code, asked, gpus))
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
