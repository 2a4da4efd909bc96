"""FullyShardedDataParallel (FSDP1): its strategies and options, alone and in pairs."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from memplan.engines.options import plan_of
from memplan.models import Decoder
from validate.cases import Case, title
from validate.suites.models import GPT, GPT_DROPOUT, GPT_TIED, LLAMA, LLAMA_ODD, LLAMA_TIED

ALONE: Final[tuple[dict[str, Any], ...]] = (
    {},
    {"use_orig_params": True},
    {"zero": 2},
    {"zero": 2, "use_orig_params": True},
    {"dp_replicate": 2},
    {"dp_replicate": 2, "zero": 2, "use_orig_params": True},
    {"fsdp_units": "model"},
    {"fsdp_units": "model", "use_orig_params": True, "zero": 2},
    {"dp": 3},
    {"dp": 3, "use_orig_params": True},
    {"dp": 4, "precision": "bf16-mixed", "use_orig_params": True},
    {"dp": 3, "precision": "bf16-mixed"},
    {"precision": "bf16-mixed"},
    {"precision": "bf16-mixed", "zero": 2},
    {"precision": "bf16"},
    {"precision": "bf16", "use_orig_params": True, "zero": 2},
    {"precision": "bf16-reduce-fp32", "use_orig_params": True},
    {"backward_prefetch": "post"},
    {"backward_prefetch": "none"},
    {"backward_prefetch": "post", "zero": 2, "use_orig_params": True},
    {"backward_prefetch": "none", "use_orig_params": True, "recompute": "full"},
    {"forward_prefetch": True},
    {"forward_prefetch": True, "use_orig_params": True, "precision": "bf16-mixed", "micro_batch": 4},
    {"no_sync": True, "global_batch": 8},
    {"no_sync": True, "global_batch": 8, "zero": 2, "use_orig_params": True},
    {"no_sync": True, "global_batch": 8, "precision": "bf16-mixed"},
    {"no_sync": True, "global_batch": 8, "fsdp_units": "model", "zero": 2},
    {"global_batch": 8},
    {"global_batch": 8, "use_orig_params": True, "precision": "bf16-mixed"},
    {"recompute": "full"},
    {"recompute": "full", "use_orig_params": True, "zero": 2},
    {"recompute": "selective", "precision": "bf16-mixed"},
    {"recompute": "full", "recompute_blocks": 2, "use_orig_params": True},
    {"clip_grad_norm": 1.0},
    {"clip_grad_norm": 1.0, "use_orig_params": True, "precision": "bf16-mixed", "micro_batch": 4},
    {"set_to_none": False},
    {"set_to_none": False, "use_orig_params": True, "precision": "bf16-mixed"},
    {"optimizer": "sgd-momentum", "use_orig_params": True},
    {"optimizer": "adam", "optimizer_impl": "foreach"},
    {"optimizer": "adamw", "optimizer_impl": "fused", "use_orig_params": True},
    {"optimizer": "sgd", "optimizer_impl": "foreach", "zero": 2},
    {"loss_chunks": 3, "micro_batch": 2},
    {"precision": "fp16-mixed", "micro_batch": 4},
    {"precision": "fp16-mixed", "zero": 2, "use_orig_params": True, "clip_grad_norm": 1.0, "micro_batch": 4},
    {"dp": 2, "dp_replicate": 2, "precision": "fp16-mixed", "micro_batch": 2},
    {"dp": 2, "dp_replicate": 2, "precision": "bf16-mixed", "recompute": "full", "use_orig_params": True},
    {"no_sync": True, "global_batch": 8, "clip_grad_norm": 1.0, "backward_prefetch": "post", "zero": 2},
    {"precision": "bf16-mixed-reduce-bf16", "micro_batch": 4},
    {"precision": "bf16-mixed-reduce-bf16", "micro_batch": 4, "zero": 2, "use_orig_params": True},
    {"precision": "bf16-mixed-reduce-bf16", "no_sync": True, "global_batch": 32, "micro_batch": 4},
)
"""What each plan has beside FULL_SHARD of two ranks in float32."""

MODELS: Final = (LLAMA, GPT, LLAMA_ODD, GPT_DROPOUT, LLAMA_TIED, GPT_TIED)


def fsdp1() -> tuple[Case, ...]:
    """Every option of FSDP1, alone and beside others; models take turns."""
    return tuple(_cases())


def _cases() -> Iterator[Case]:
    for i, asked in enumerate(ALONE):
        model: Decoder = MODELS[i % len(MODELS)]
        usual = {"dp": 2, "zero": 3, "precision": "fp32", "seq_len": 64, "fsdp_version": 1}
        plan = plan_of(**usual | asked)
        yield Case(name=title(model, plan), model=replace(model), plan=plan)
