"""transformers' Trainer: one process, DDP, FSDP2 and FSDP1, with its own options; flat lists of rows."""

from dataclasses import replace
from typing import Any, Final, cast

from memplan.engines.options import plan_of
from memplan.errors import InvalidValue
from memplan.models import Decoder, implemented
from memplan.tape import Backend
from validate.cases import OF_TRANSFORMERS, UNTIMED_STEPS, Case, runnable, title
from validate.gpus import Gpus
from validate.suites.families import QUIRKS, SIZES

TRAINER: Final[dict[str, Any]] = {
    "trainer": "huggingface", "optimizer_impl": "fused", "clip_grad_norm": 1.0,
}  # fmt: skip
"""What the Trainer does by default."""

FSDP2: Final[dict[str, Any]] = {"zero": 3, "fsdp_units": "block+ends", "precision": "bf16-mixed-reduce-bf16"}

TIED: Final[dict[str, Any]] = {**FSDP2, "fsdp_units": "block"}
"""FSDP2 of a model whose embedding and head are tied: one unit of both and of the last norm."""

SMALL: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    ("llama", {"precision": "fp32"}),
    ("llama", {"precision": "bf16-mixed", "micro_batch": 3}),
    ("qwen3", {"precision": "bf16", "micro_batch": 2}),
    ("llama", {"precision": "fp32", "global_batch": 3, "recompute": "full"}),
    ("olmo2", {"precision": "bf16-mixed", "micro_batch": 2, "global_batch": 4}),
    ("gemma", {"precision": "fp32", "clip_grad_norm": None}),
    ("llama", {"dp": 2, "precision": "fp32"}),
    ("llama", {"dp": 2, "precision": "fp32", "micro_batch": 2, "global_batch": 8}),
    ("qwen3", {"dp": 2, "precision": "bf16-mixed", "recompute": "full"}),
    ("olmo2", {"dp": 4, "precision": "fp32", "bucket_cap_bytes": 1024**2}),
    ("gpt_neox", {"dp": 2, "precision": "bf16-mixed", "micro_batch": 2}),
    ("gpt_neox", {"precision": "fp32", "micro_batch": 2}),
)
"""Families in small, for CPU ranks; heads and tables of tokens apart."""

LORA: Final[dict[str, Any]] = {"lora_rank": 8, "micro_batch": 2}

TRACED: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    ("llama", {**LORA, "precision": "fp32"}),
    ("qwen3", {**LORA, "precision": "bf16-mixed"}),
    ("qwen2", {**LORA, "precision": "bf16-mixed", "recompute": "full", "global_batch": 4}),
    ("gemma2", {**LORA, "precision": "bf16", "lora_targets": "q_proj,v_proj", "lora_dropout": 0.1}),
    ("gpt_neox", {**LORA, "precision": "fp32", "use_dora": True}),
    ("llama", {**LORA, "dp": 2, "precision": "bf16-mixed"}),
    ("qwen3", {**LORA, "dp": 2, "precision": "fp32", "recompute": "full", "global_batch": 8}),
    ("gpt", {"precision": "fp32", "micro_batch": 2}),
    ("gpt", {"precision": "bf16-mixed", "recompute": "full", "micro_batch": 2}),
    ("gpt", {"dp": 2, "precision": "bf16-mixed"}),
    ("opt", {"dp": 2, "precision": "fp32", "micro_batch": 2, "global_batch": 8}),
)
"""Families with adapters, and of absolute positions: traced as the Trainer calls them."""

FSDP1: Final[dict[str, Any]] = {
    "zero": 3, "fsdp_version": 1, "use_orig_params": True, "backward_prefetch": "none",
    "precision": "bf16-mixed-reduce-bf16",
}  # fmt: skip
"""FSDP1 as the Trainer tells it by default."""

LLAMA: Final = "llama-3-8b"
QWEN: Final = "qwen3-8b"

LARGE: Final[tuple[tuple[str, int, dict[str, Any], int | None], ...]] = (
    (LLAMA, 2, {"precision": "bf16-mixed"}, None),
    (LLAMA, 2, {"precision": "bf16-mixed", "recompute": "full", "micro_batch": 2}, None),
    (LLAMA, 2, {"precision": "bf16-mixed", "global_batch": 4}, None),
    (LLAMA, 8, {"precision": "bf16"}, None),
    (LLAMA, 8, {"precision": "bf16", "recompute": "full", "micro_batch": 2}, None),
    (LLAMA, 4, {"precision": "bf16-autocast", "micro_batch": 2}, None),
    (LLAMA, 2, {"precision": "fp32", "seq_len": 2048}, None),
    (LLAMA, 2, {"precision": "fp16-mixed"}, None),
    (QWEN, 4, {"precision": "bf16"}, None),
    (QWEN, 2, {"precision": "bf16-mixed", "recompute": "full", "global_batch": 2}, None),
    (QWEN, 4, {"precision": "bf16-autocast", "recompute": "full", "clip_grad_norm": None}, None),
    ("mistral-7b", 6, {"precision": "bf16", "seq_len": 2048}, None),
    (LLAMA, 2, {"dp": 8, "precision": "bf16-mixed"}, 0),
    (LLAMA, 2, {"dp": 8, "precision": "bf16-mixed", "recompute": "full"}, 7),
    (LLAMA, 2, {"dp": 64, "precision": "bf16-mixed", "global_batch": 192}, 63),
    (LLAMA, 4, {"dp": 8, "precision": "bf16", "micro_batch": 2}, 0),
    (LLAMA, 4, {"dp": 8, "precision": "bf16", "bucket_cap_bytes": 100 * 1024**2}, 3),
    (LLAMA, 4, {"dp": 8, "precision": "bf16", "recompute": "full", "bucket_cap_bytes": 100 * 1024**2}, 3),
    (LLAMA, 4, {"dp": 8, "precision": "bf16-autocast", "global_batch": 16}, 1),
    (QWEN, 2, {"dp": 8, "precision": "fp32", "seq_len": 1024}, 2),
    (QWEN, 4, {"dp": 256, "precision": "bf16", "recompute": "full", "clip_grad_norm": None}, 255),
    (LLAMA, 8, {"dp": 8, **FSDP2}, 1),
    (LLAMA, 32, {"dp": 8, **FSDP2, "recompute": "full"}, 7),
    (LLAMA, 32, {"dp": 64, **FSDP2, "recompute": "full", "micro_batch": 2}, 63),
    (LLAMA, 8, {"dp": 8, **FSDP2, "zero": 2}, 3),
    (LLAMA, 8, {"dp": 8, **FSDP2, "zero": 2, "recompute": "full", "global_batch": 24}, 1),
    (LLAMA, 8, {"dp": 8, **FSDP2, "precision": "bf16"}, 5),
    (LLAMA, 8, {"dp": 16, **FSDP2, "precision": "bf16", "recompute": "full", "global_batch": 32}, 15),
    (LLAMA, 4, {"dp": 8, **FSDP2, "precision": "fp32", "seq_len": 2048}, 1),
    (LLAMA, 8, {"dp": 8, **FSDP2, "recompute": "full", "global_batch": 24, "no_sync": True}, 4),
    (QWEN, 8, {"dp": 8, **FSDP2, "precision": "bf16", "global_batch": 16, "no_sync": True}, 6),
    (QWEN, 8, {"dp": 8, **FSDP2}, 2),
    (QWEN, 36, {"dp": 32, **FSDP2, "recompute": "full"}, 31),
    (QWEN, 8, {"dp": 7, **FSDP2, "clip_grad_norm": None}, 6),
    (LLAMA, 8, {"dp": 8, **FSDP1}, 1),
    (LLAMA, 32, {"dp": 8, **FSDP1, "recompute": "full"}, 7),
    (LLAMA, 8, {"dp": 8, **FSDP1, "recompute": "full", "global_batch": 24, "no_sync": True}, 5),
    (LLAMA, 8, {"dp": 64, **FSDP1, "precision": "bf16", "backward_prefetch": "pre"}, 63),
    (QWEN, 8, {"dp": 8, **FSDP1, "use_orig_params": False, "recompute": "full"}, 2),
    (QWEN, 4, {"dp": 8, **FSDP1, "precision": "fp32", "seq_len": 2048, "clip_grad_norm": None}, 3),
    ("llama-3-70b", 4, {"dp": 256, **FSDP2, "recompute": "full"}, 255),
    (LLAMA, 32, {**LORA, "precision": "bf16-mixed", "recompute": "full"}, None),
    (LLAMA, 8, {**LORA, "precision": "bf16-mixed", "global_batch": 4}, None),
    (LLAMA, 8, {**LORA, "precision": "bf16-autocast", "lora_targets": "q_proj,v_proj"}, None),
    (LLAMA, 8, {**LORA, "precision": "bf16", "use_dora": True, "recompute": "full"}, None),
    (QWEN, 36, {**LORA, "precision": "bf16-mixed", "recompute": "full", "lora_dropout": 0.1}, None),
    (QWEN, 8, {**LORA, "precision": "bf16"}, None),
    (LLAMA, 8, {**LORA, "dp": 8, "precision": "bf16-mixed"}, 0),
    (LLAMA, 32, {**LORA, "dp": 8, "precision": "bf16-mixed", "recompute": "full", "global_batch": 32}, 7),
    (QWEN, 8, {**LORA, "dp": 64, "precision": "bf16", "recompute": "full"}, 63),
    (QWEN, 8, {**LORA, "dp": 4, "precision": "bf16-mixed", "clip_grad_norm": None}, 2),
    ("gpt2-xl", 48, {"precision": "bf16-mixed", "seq_len": 1024, "micro_batch": 2}, None),
    ("gpt2-xl", 48, {"dp": 8, "precision": "bf16-mixed", "seq_len": 1024, "recompute": "full"}, 1),
    ("llama-3.2-1b", 16, {"precision": "bf16-mixed", "recompute": "full"}, None),
    (LLAMA, 8, {**LORA, "dp": 8, **FSDP2}, 1),
    ("llama-3.2-1b", 16, {"dp": 8, **TIED}, 1),
    (LLAMA, 32, {**LORA, "dp": 8, **FSDP2, "recompute": "full", "global_batch": 32, "no_sync": True}, 7),
    ("llama-3.2-1b", 16, {"dp": 8, **TIED, "precision": "bf16", "recompute": "full", "micro_batch": 2}, 7),
    (QWEN, 8, {**LORA, "dp": 8, **FSDP2, "recompute": "full"}, 3),
    (LLAMA, 8, {**LORA, "precision": "bf16-mixed", "quantize": "nf4", "recompute": "full"}, None),
    (LLAMA, 8, {**LORA, "dp": 8, "precision": "bf16-mixed", "quantize": "nf4-double"}, 3),
    ("qwen2.5-0.5b", 24, {"dp": 2, **TIED, "zero": 2, "global_batch": 8, "no_sync": True}, 0),
)
"""A preset, its layers, a plan's options, and the rank that runs alone."""


def trainers() -> tuple[Case, ...]:
    """The Trainer on CPU ranks: families in small."""
    untied = [in_small(*row, tied_head=False) for row in SMALL]
    return (*untied, *[in_small(*row) for row in TRACED])


def in_small(family: str, options: dict[str, Any], **more: Any) -> Case:
    """A small model of a family, with `more` sizes, trained by the Trainer with these options."""
    cls: type[Decoder] = OF_TRANSFORMERS[f"huggingface-{family}"]
    sizes = {**SIZES, **QUIRKS[family], **more, "name": f"transformers-{family}"}
    model, plan = cls(**sizes), plan_of(**TRAINER | {"seq_len": 64} | options)
    return Case(name=f"{title(model, plan)}, {plan.global_batch} x {plan.seq_len}", model=model, plan=plan)


def gpu_trainers(gpus: Gpus | None) -> tuple[Case, ...]:
    """The Trainer on one GPU, or on one rank of a world with stand-ins for the others.

    Raises:
        InvalidValue: without a GPU.
    """
    if gpus is None:
        raise InvalidValue("gpu-trainers has models of true size; use --device nogpu, or the suite trainers.")
    return tuple(large(*row, gpus) for row in LARGE)


def large(preset: str, n_layers: int, options: dict[str, Any], rank: int | None, gpus: Gpus) -> Case:
    """A preset with `n_layers` layers, trained by the Trainer on these GPUs with these options.

    `rank`: the rank that runs alone, with stand-ins for the others; None: there is one GPU.
    """
    model = implemented(replace(runnable(preset), n_layers=n_layers), "huggingface")
    plan = plan_of(**TRAINER | {"seq_len": 4096} | options)
    name = f"{title(cast(Decoder, model), plan)}, {n_layers} layers, {plan.n_micro_batches} x {plan.seq_len}"
    case = Case(name=name, model=cast(Decoder, model), plan=plan, steps=UNTIMED_STEPS, timeout_s=600.0)
    played = replace(case, device=gpus.device, gpu=gpus.known_as, backend="nccl")
    if rank is None:
        return played
    backend: Backend = "nccl" if gpus.device == "nogpu" else "fake"
    return replace(played, name=f"{name}, rank {rank}", rank=rank, backend=backend)
