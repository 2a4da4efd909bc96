"""Other people's modules as they are (`validate.systems.torch.wild`), on CPU ranks: traced and run.

A flat list of plans, each with every module that can run it. Modules of a package that is not installed are
left out.
"""

from dataclasses import replace
from importlib.util import find_spec
from typing import Any, Final

from memplan.engines.options import plan_of
from memplan.errors import InvalidValue
from memplan.plan import Plan
from memplan.shapes import FP32
from validate.cases import UNTIMED_STEPS, Case, shipped_trace, title
from validate.gpus import Gpus
from validate.systems.torch.wild import AT_TRUE_SIZE, IN_FP16, IN_SMALL, Wild

PLANS: Final[tuple[dict[str, Any], ...]] = (
    {"micro_batch": 2, "precision": "fp32"},
    {"micro_batch": 3, "global_batch": 6, "precision": "bf16"},
    {"micro_batch": 4, "precision": "bf16-mixed"},
    {"micro_batch": 4, "precision": "bf16-mixed", "recompute": "full"},
    {"dp": 2, "micro_batch": 2, "global_batch": 8, "precision": "fp32"},
    {"dp": 2, "zero": 3, "micro_batch": 2, "precision": "bf16-mixed"},
    {"dp": 2, "zero": 3, "micro_batch": 4, "precision": "fp32", "recompute": "full"},
)
"""Without recomputation every module, with it those of transformers, which have their own.

With weights in bfloat16 none of torchvision, whose batch norm fails on CPU beside statistics in float32
("expected scalar type BFloat16 but found Float").
"""

FEW_RECOMPUTED: Final[tuple[dict[str, Any], ...]] = (
    {"micro_batch": 4, "recompute": "full", "recompute_blocks": 2},
    {"dp": 2, "zero": 3, "micro_batch": 2, "recompute": "full", "recompute_blocks": 1},
    {
        "pp": 2,
        "micro_batch": 2,
        "global_batch": 8,
        "precision": "fp32",
        "recompute": "full",
        "recompute_blocks": 1,
    },
)
"""The first blocks of each stage recomputed, for modules of `PIPELINED`."""

FP16_PLANS: Final[tuple[dict[str, Any], ...]] = (
    {"micro_batch": 4, "precision": "fp16-mixed"},
    {"micro_batch": 4, "precision": "fp16-mixed", "recompute": "full"},
    {"dp": 2, "micro_batch": 2, "global_batch": 8, "precision": "fp16-mixed"},
    {"dp": 2, "zero": 3, "micro_batch": 2, "global_batch": 8, "precision": "fp16-mixed"},
    {"pp": 2, "micro_batch": 2, "global_batch": 8, "precision": "fp16-mixed"},
    {
        "pp": 2, "dp": 2, "zero": 3, "micro_batch": 2, "global_batch": 16, "precision": "fp16-mixed",
        "recompute": "full",
    },
)  # fmt: skip
"""In float16 with a loss scaler, for modules that are traced so."""

ENDS_PLANS: Final[tuple[dict[str, Any], ...]] = (
    {"dp": 2, "zero": 3, "fsdp_units": "block+ends", "micro_batch": 2},
    {"dp": 2, "zero": 3, "fsdp_units": "block+ends", "micro_batch": 4, "precision": "bf16-mixed"},
    {"dp": 2, "zero": 3, "fsdp_units": "block+ends", "micro_batch": 2, "recompute": "full"},
    {"dp": 2, "zero": 2, "fsdp_units": "block+ends", "micro_batch": 2, "precision": "bf16"},
    {
        "pp": 2, "dp": 2, "zero": 3, "fsdp_units": "block+ends", "micro_batch": 2, "global_batch": 16,
        "precision": "bf16-mixed",
    },
)  # fmt: skip
"""Units of FSDP2 for the modules before and after the blocks, where these share no weight.

In a pipeline not of frozen modules, which memplan refuses.
"""

FROZEN_PLANS: Final[tuple[dict[str, Any], ...]] = (
    {"dp": 2, "zero": 1, "micro_batch": 2, "global_batch": 8},
    {"dp": 2, "zero": 2, "micro_batch": 2, "global_batch": 8},
    {"dp": 2, "zero": 3, "fsdp_blocks": 2, "micro_batch": 2, "precision": "bf16"},
    {"dp": 2, "zero": 3, "fsdp_units": "model", "micro_batch": 2},
    {"dp": 2, "zero": 3, "micro_batch": 2, "precision": "bf16-mixed", "offload": True},
    {"dp": 2, "dp_replicate": 2, "zero": 3, "micro_batch": 2, "global_batch": 16, "precision": "bf16-mixed"},
    {"micro_batch": 2, "optimizer": "sgd-momentum", "clip_grad_norm": 1.0, "set_to_none": False},
)
"""For modules that are frozen in part, beside the others."""

FSDP1_PLANS: Final[tuple[dict[str, Any], ...]] = (
    {"dp": 2, "zero": 3, "fsdp_version": 1, "micro_batch": 2, "precision": "fp32"},
    {
        "dp": 2, "zero": 3, "fsdp_version": 1, "use_orig_params": True, "micro_batch": 2, "global_batch": 8,
        "no_sync": True,
    },
    {"dp": 2, "zero": 2, "fsdp_version": 1, "micro_batch": 2, "recompute": "full"},
)  # fmt: skip
"""FSDP1 of modules whose weights are all trained, and all of one type."""

OF_LLAVA_REFUSED: Final = {("fsdp_blocks", 2)}
"""LLaVA's last block of images gets no gradient."""

PIPELINED: Final = (
    "hf-llama", "hf-mistral", "hf-mixtral", "hf-qwen3", "hf-phi3", "hf-olmo2", "hf-gpt-neox",
    "hf-gpt2-untied", "encoder", "hf-llama-lora", "hf-llama-qlora",
)  # fmt: skip
"""Modules that are cut into stages: their embedding and head are not tied."""

PIPELINES: Final[tuple[dict[str, Any], ...]] = (
    {"pp": 2, "schedule": "gpipe", "micro_batch": 2, "global_batch": 8, "precision": "fp32"},
    {"pp": 2, "micro_batch": 1, "global_batch": 4, "precision": "bf16"},
    {"pp": 2, "micro_batch": 2, "global_batch": 8, "precision": "bf16-mixed"},
    {"pp": 2, "micro_batch": 2, "global_batch": 8, "precision": "bf16-mixed", "recompute": "full"},
    {"pp": 4, "micro_batch": 2, "global_batch": 12, "precision": "fp32"},
    {
        "pp": 2, "virtual_stages": 2, "schedule": "interleaved-1f1b", "micro_batch": 2, "global_batch": 8,
        "precision": "fp32",
    },
    {"pp": 2, "dp": 2, "micro_batch": 2, "global_batch": 16, "precision": "fp32"},
    {"pp": 2, "dp": 2, "zero": 3, "micro_batch": 2, "global_batch": 16, "precision": "bf16-mixed"},
)  # fmt: skip
"""Pipelines over blocks: two stages, four of one block, two on each rank; beside DDP and FSDP2."""


def wild() -> tuple[Case, ...]:
    """Every module under every plan that it can run."""
    found = []
    for name, one in IN_SMALL.items():
        if find_spec(one.package) is None:
            continue
        model = shipped_trace(name)
        more = [*(FROZEN_PLANS if model.frozen else ()), *PIPELINES, *(FP16_PLANS if name in IN_FP16 else ())]
        more += FEW_RECOMPUTED if name in PIPELINED else ()
        more += FSDP1_PLANS if not (model.frozen or model.narrow_dtypes or model.integer_dtypes) else ()
        more += ENDS_PLANS if model.n_layers and not model.tied else ()
        for options in (*PLANS, *more):
            options = options | ({"micro_batch": model.of_batch} if model.of_batch else {})
            if "pp" in options and (name not in PIPELINED or ("fsdp_units" in options and model.frozen)):
                continue
            if name == "hf-llava" and not OF_LLAVA_REFUSED.isdisjoint(options.items()):
                continue
            if model.image_tokens and ("fsdp_units", "block+ends") in options.items():
                continue
            if "recompute" in options and one.package != "transformers":
                continue
            plan = plan_of(**options, seq_len=one.seq_len)
            if plan.recompute != "none" and not model.n_layers:
                continue
            if _narrow(plan) and one.package == "torchvision":
                continue
            if (plan.fsdp and model.integer_dtypes) or (plan.ddp and model.unused):
                continue
            case = f"{title(model, plan)}, {plan.global_batch} x {plan.seq_len}"
            found.append(Case(name=case, model=model, plan=plan, timeout_s=240.0))
    return tuple(found)


def _narrow(plan: Plan) -> bool:
    """Whether modules run with weights of a narrow type, which batch norm's running averages do not have."""
    return (plan.formats.gather if plan.fsdp else plan.formats.stored) != FP32


GPU_PLANS: Final[tuple[dict[str, Any], ...]] = (
    {"precision": "bf16"},
    {"precision": "bf16", "dp": 8},
    {"precision": "bf16-mixed", "dp": 8, "zero": 3},
    {"precision": "fp32", "dp": 8, "zero": 3},
    {"precision": "bf16-mixed", "dp": 8, "zero": 3, "recompute": "full", "halves": True},
)
"""One GPU; one rank of eight under DDP and under FSDP2; `halves`: twice the samples, half the tokens."""

AUTOCAST: Final[dict[str, Any]] = {"precision": "bf16-mixed", "dp": 8}
"""DDP with weights in float32, for models of at most `MOST_PARAMETERS`."""

WITH_BATCH_NORM: Final[tuple[dict[str, Any], ...]] = ({"precision": "fp32"}, {"precision": "bf16-mixed"})
"""One GPU, for models that do not run with weights in bfloat16."""

MOST_PARAMETERS: Final = 4 * 10**9
"""Of which weights, gradients and AdamW's states in float32 take 64 GB."""


def _at_true_size(one: Wild, of_batch: int, *, halves: bool = False, **options: Any) -> Plan:
    """The plan of a model's own micro-batch and length; `of_batch`: the only one of its trace, or 0."""
    samples, seq_len = one.gpu_batch or 1, one.seq_len
    if halves:
        samples, seq_len = of_batch or 2 * samples, max(seq_len // 2, 1)
    return plan_of(**options, micro_batch=samples, seq_len=seq_len)


def gpu_wild(gpus: Gpus | None) -> tuple[Case, ...]:
    """Other people's models at true size, on one GPU or as a rank of eight; without a GPU the small ones.

    Raises:
        InvalidValue: if none of their packages is installed.
    """
    if gpus is None:
        return wild()
    found = []
    for name, one in AT_TRUE_SIZE.items():
        if find_spec(one.package) is None:
            continue
        model = shipped_trace(name)
        small = (AUTOCAST,) if model.n_parameters <= MOST_PARAMETERS else ()
        normed = WITH_BATCH_NORM if one.package == "torchvision" else ()
        for options in (*GPU_PLANS, *small, *normed):
            if "recompute" in options and not model.n_layers:
                continue
            plan = _at_true_size(one, **options, of_batch=model.of_batch)
            if (_narrow(plan) and one.package == "torchvision") or (plan.ddp and model.unused):
                continue
            case = Case(
                name=f"{title(model, plan)}, {plan.global_batch} x {plan.seq_len}",
                model=model,
                plan=plan,
                steps=UNTIMED_STEPS,
                timeout_s=600.0,
                device=gpus.device,
                gpu=gpus.known_as,
            )
            if plan.world_size > 1:
                case = replace(case, backend="nccl" if gpus.device == "nogpu" else "fake", rank=0)
            found.append(case)
    if not found:
        packages = " and ".join(sorted({one.package for one in AT_TRUE_SIZE.values()}))
        raise InvalidValue(
            f"suite='gpu-wild' is not possible: it runs models of {packages}, not installed here; "
            "use pip install 'memplan[huggingface]', or suite='wild' for modules of torch alone."
        )
    return tuple(found)
